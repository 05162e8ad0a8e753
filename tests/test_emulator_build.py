"""The kernels as shared libraries: compilers, cache, and what is refused."""

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlaflash import emulator, mask_pack
from mlaflash.emulator import build, run_kernel
from mlaflash.emulator.run import load_library
from mlaflash.errors import (
    CacheMissError,
    CompileError,
    EmulatorError,
    InvalidArgumentError,
    MissingDependencyError,
    UnsupportedError,
)
from mlaflash.jit.sources import kernel_names, kernel_root
from mlaflash.lab import inputs
from mlaflash.tiles import NaiveConfig, TileConfig

KERNELS = Path(__file__).parent / "kernels"
COMPILERS = [
    pytest.param(name, marks=pytest.mark.skipif(not shutil.which(name), reason=f"no {name}"))
    for name in ("g++", "clang++")
]
CASE = inputs.Case(name="small", q_lens=(2,), kv_lens=(40,), heads=2, dtype="bfloat16", sm_scale=0.1)
PROGRAM = """\
import sys
from pathlib import Path
import numpy as np
from mlaflash.emulator import run_kernel
out = np.zeros(32, np.uint32)
params = np.array([(out.ctypes.data,)], [("out", "u8")])
run_kernel(Path(sys.argv[1]), {"FACTOR": 5}, (1,), 32, 0, params, {"out": out})
assert out.tolist() == [5 * i for i in range(32)], out
"""
SMALL = """\
#include "ptx.cuh"
struct VerifyParams { void* out; };
KERNEL(mlaflash_small, 32, 1) {
  st_global_u32((u8*)p.out + 4 * thread_idx(), (u32)(MLAFLASH_FACTOR * thread_idx()));
}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.cu"
    path.write_text(SMALL)
    return path


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a compiler that writes down its calls, and an empty cache, in the environment."""
    log = tmp_path / "calls"
    log.touch()
    compiler = tmp_path / "logged-c++"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo call >> {log} ;; esac\nexec c++ "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_libraries", {})
    return log


def multiples(path: Path, factor: int) -> list[int]:
    out = np.zeros(32, np.uint32)
    params = np.array([(out.ctypes.data,)], [("out", "u8")])
    run_kernel(path, {"FACTOR": factor}, (1,), 32, 0, params, {"out": out})
    return out.tolist()


def in_new_processes(path: Path, count: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], env=environment, stderr=subprocess.PIPE)
        for _ in range(count)
    ]
    for process in processes:
        assert process.communicate(timeout=120)[1] == b""
        assert process.returncode == 0


def test_a_library_is_compiled_once(small: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiples(small, 3) == [3 * i for i in range(32)]
    assert multiples(small, 3) == [3 * i for i in range(32)]
    assert len(calls.read_text().splitlines()) == 1
    assert multiples(small, 4) == [4 * i for i in range(32)]
    assert len(calls.read_text().splitlines()) == 2
    monkeypatch.setattr(build, "_libraries", {})
    assert multiples(small, 4) == [4 * i for i in range(32)]
    assert len(calls.read_text().splitlines()) == 2


def test_a_new_process_compiles_nothing(small: Path, calls: Path) -> None:
    in_new_processes(small, 1)
    in_new_processes(small, 1)
    assert len(calls.read_text().splitlines()) == 1


def test_eight_processes_at_once(small: Path, calls: Path) -> None:
    in_new_processes(small, 8)
    assert 1 <= len(calls.read_text().splitlines()) <= 8
    in_new_processes(small, 1)
    assert len(calls.read_text().splitlines()) <= 8


def test_changed_text_is_compiled_again(
    small: Path, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "kernels"
    shutil.copytree(kernel_root(), root)
    monkeypatch.setattr("mlaflash.jit.sources.kernel_root", lambda: root)
    multiples(small, 2)
    for header in ("include/types.cuh", "host/shadow.h"):
        before = len(calls.read_text().splitlines())
        (root / header).write_text((root / header).read_text() + "\n")
        assert multiples(small, 2) == [2 * i for i in range(32)]
        assert len(calls.read_text().splitlines()) == before + 1
    small.write_text(SMALL.replace("thread_idx())", "thread_idx() + 1)"))
    assert multiples(small, 2) == [2 * i + 1 for i in range(32)]


def test_torn_library_is_compiled_again(
    small: Path, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiples(small, 2)
    (library,) = (tmp_path / "cache").glob("*.so")
    content = library.read_bytes()
    # A new file, as another process would leave: the old one is mapped.
    library.unlink()
    library.write_bytes(content[: len(content) // 2])
    monkeypatch.setattr(build, "_libraries", {})
    assert multiples(small, 2) == [2 * i for i in range(32)]
    assert len(calls.read_text().splitlines()) == 2


def test_a_relative_cache_folder_is_loaded_from(small: Path, calls: Path, tmp_path: Path) -> None:
    folder = tmp_path / "relative"
    folder.mkdir()
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM, str(small)]
        subprocess.run(command, check=True, cwd=folder, env=os.environ | {"MLAFLASH_CACHE_DIR": "."})
    assert calls.read_text() == "call\n"


def test_without_a_cache_on_disk(small: Path, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", "")
    assert multiples(small, 2) == [2 * i for i in range(32)]
    assert multiples(small, 2) == [2 * i for i in range(32)]
    assert len(calls.read_text().splitlines()) == 1
    assert not (tmp_path / "cache").exists()


def test_disabled_compiler(small: Path, calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAFLASH_DISABLE_JIT", "1")
    with pytest.raises(CacheMissError, match="MLAFLASH_DISABLE_JIT"):
        multiples(small, 2)
    assert calls.read_text() == ""


@pytest.mark.parametrize("configured", [None, "no-such-compiler", '"no-such-compiler', ""])
def test_no_compiler(configured: str | None, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if configured is not None:
        monkeypatch.setenv("CXX", configured)
    with pytest.raises(MissingDependencyError, match=r"apt-get install g\+\+") as error:
        multiples(small, 2)
    assert ("no-such-compiler" in str(error.value)) == bool(configured)


@pytest.mark.parametrize("text", ["no program\n", "#!/no/such/interpreter\n"])
def test_a_compiler_that_the_system_cannot_run(
    text: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "cxx"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    with pytest.raises(MissingDependencyError, match=r"cxx' cannot be run: .*apt-get install g\+\+"):
        multiples(small, 2)


def test_refused_source(small: Path) -> None:
    small.write_text(SMALL + "int missing_semicolon\n")
    with pytest.raises(CompileError, match="missing_semicolon") as error:
        multiples(small, 2)
    assert error.value.kernel == "small"
    assert error.value.arch == "host"
    assert error.value.defines == {"FACTOR": 2}
    assert error.value.source_path == small
    assert "error" in error.value.log
    assert "-DMLAFLASH_FACTOR=2" in error.value.options


def test_unknown_kernel() -> None:
    with pytest.raises(UnsupportedError, match="known are"):
        load_library("flash9", {})


def test_cache_folder_that_is_a_file(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(build, "_libraries", {})
    with pytest.raises(InvalidArgumentError, match="is a file"):
        multiples(small, 2)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("kernel", ["instructions", "faults"])
def test_no_warnings_in_the_headers(kernel: str, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    for options in ([], ["-O2"]):
        assert build.compile_library(KERNELS / f"{kernel}.cu", {}, options=["-Werror", *options]).log == ""


@pytest.mark.parametrize("compiler", COMPILERS)
def test_no_warnings_in_the_kernels(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def strict(kernel: str, defines: dict[str, int]) -> object:
        compiled.append(kernel)
        assert build.compile_library(kernel, defines, options=["-Werror"]).log == ""
        return load_library(kernel, defines)

    arguments = inputs.build(CASE, 0)
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr("mlaflash.emulator.run.load_library", strict)
    for config in (NaiveConfig(), replace(TileConfig(), nsplit=2)):
        emulator.mla_verify(**arguments, kernel=config.kernel, tiles=config)
    assert set(compiled) == {"naive", "tile", "combine"}
    assert set(compiled) <= set(kernel_names())


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("source_format", mask_pack.FORMAT_CODES)
def test_no_warnings_in_any_form_of_mask(source_format: str, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert build.compile_library("mask", mask_pack.defines(source_format), options=["-Werror"]).log == ""


@pytest.mark.parametrize("compiler", COMPILERS)
def test_both_compiler_families_agree(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = inputs.build(CASE, 0)
    expected = emulator.mla_verify(**arguments)
    monkeypatch.setenv("CXX", compiler)
    for got, want in zip(emulator.mla_verify(**arguments), expected, strict=True):
        assert got.tobytes() == want.tobytes()


def test_portable_fibers_do_the_same() -> None:
    # What runs on processors for which there is no switch by hand.
    defines = {"EMULATOR_UCONTEXT": 1}
    params = np.zeros(1, [("a", "u8"), ("b", "u8"), ("out", "u8"), ("counter", "u8"), ("numbers", "i4", 4)])
    a, out = np.arange(64 * 4, dtype=np.uint32), np.zeros(64 * 4, np.uint32)
    params["a"], params["out"], params["numbers"] = a.ctypes.data, out.ctypes.data, (12, 4, 128, 0)
    arrays = {"a": a, "out": out}
    reports = [
        run_kernel(KERNELS / "instructions.cu", chosen, (1,), 128, 4096, params, arrays, seed=2)
        for chosen in ({}, defines)
    ]
    assert out.tolist() == a.reshape(4, 64)[:, ::-1].ravel().tolist()
    assert reports[0] == reports[1]
    wrong = np.zeros(1, [("a", "u8"), ("out", "u8"), ("numbers", "i4", 2)])
    wrong["a"], wrong["out"], wrong["numbers"] = a.ctypes.data, out.ctypes.data, (26, 1)
    with pytest.raises(EmulatorError, match="warp 1: has returned"):
        run_kernel(KERNELS / "faults.cu", defines, (1,), 64, 4096, wrong, arrays)
