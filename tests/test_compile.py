"""Compiling without a GPU. These tests need NVRTC and fail without it: CI installs it."""

import builtins
import subprocess
import sys

import pytest

from mlaflash.errors import (
    CompileError,
    InvalidArgumentError,
    MissingDependencyError,
    UnsupportedError,
)
from mlaflash.jit import compile_kernel, compiler
from mlaflash.jit.compiler import compile_options, supported_archs

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_120")
ELF_MAGIC = b"\x7fELF"

pytestmark = pytest.mark.usefixtures("toy_kernels")


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_compiles_for_every_architecture_without_a_gpu(arch):
    compiled = compile_kernel("toy", {"FACTOR": 3}, arch)
    assert compiled.cubin.startswith(ELF_MAGIC)
    assert b"mlaflash_toy" in compiled.cubin
    assert 0 < compiled.registers <= 255
    assert (compiled.spill_bytes, compiled.stack_bytes, compiled.static_shared_bytes) == (0, 0, 0)
    assert (compiled.kernel, compiled.arch, compiled.defines) == ("toy", arch, {"FACTOR": 3})
    assert compiled.seconds > 0
    assert not compiled.cached
    assert f"'{arch}'" in compiled.log


def test_constants_reach_the_kernel():
    cubins = {compile_kernel("toy", {"FACTOR": factor}, "sm_90").cubin for factor in (3, 5)}
    assert len(cubins) == 2


def test_line_tables_are_there_when_asked_for():
    plain = compile_kernel("toy", {"FACTOR": 3}, "sm_90")
    with_lines = compile_kernel("toy", {"FACTOR": 3}, "sm_90", lineinfo=True)
    assert b".debug_line" in with_lines.cubin
    assert b".debug_line" not in plain.cubin


def test_g5_no_header_of_the_cuda_toolkit_is_used(toy_kernels):
    """A kernel gets our headers alone: one from the toolkit, installed or not, is not found."""
    path = toy_kernels / "toy.cu"
    path.write_text("#include <cuda_fp16.h>\n" + path.read_text())
    with pytest.raises(CompileError, match=r'could not open source file "cuda_fp16\.h"'):
        compile_kernel("toy", {"FACTOR": 3}, "sm_90")


def test_a_header_in_the_current_directory_is_not_used(toy_kernels, tmp_path, monkeypatch):
    (tmp_path / "stray.cuh").write_text("#pragma once\n")
    monkeypatch.chdir(tmp_path)
    path = toy_kernels / "toy.cu"
    path.write_text('#include "stray.cuh"\n' + path.read_text())
    with pytest.raises(CompileError, match=r"stray\.cuh"):
        compile_kernel("toy", {"FACTOR": 3}, "sm_90")


def test_a_failure_carries_the_log_and_all_that_repeats_it(toy_kernels):
    with pytest.raises(CompileError) as caught:
        compile_kernel("toy", {"WIDTH": 3}, "sm_90")
    error = caught.value
    assert (error.kernel, error.arch, error.defines) == ("toy", "sm_90", {"WIDTH": 3})
    assert error.source_path == toy_kernels / "toy.cu"
    assert "-DMLAFLASH_WIDTH=3" in error.options
    assert "toy_scale.cuh(3): catastrophic error" in error.log
    assert "MLAFLASH_FACTOR is missing: compile through mlaflash.jit" in str(error)


def rewrite(toy_kernels, body):
    (toy_kernels / "toy.cu").write_text(body)


def test_spills_and_static_shared_memory_are_counted(toy_kernels):
    rewrite(
        toy_kernels,
        """
        extern "C" __global__ void __launch_bounds__(1024) mlaflash_toy(float* p_gmem) {
            __shared__ float one_smem[256];
            float many_rmem[128];
            #pragma unroll
            for (int i = 0; i < 128; ++i) many_rmem[i] = p_gmem[i * 1024 + threadIdx.x];
            one_smem[threadIdx.x & 255] = many_rmem[0];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 128; ++i)
                p_gmem[i * 1024 + threadIdx.x] = many_rmem[127 - i] * many_rmem[i] + one_smem[i];
        }
        """,
    )
    compiled = compile_kernel("toy", {}, "sm_90")
    assert compiled.spill_bytes > 0
    assert compiled.stack_bytes > 0
    assert compiled.static_shared_bytes == 1024
    assert compiled.registers <= 64


def test_a_function_that_is_not_inlined_does_not_hide_the_kernels_numbers(toy_kernels):
    rewrite(
        toy_kernels,
        """
        __noinline__ int helper(int* p_gmem, int i) { return p_gmem[i] + i; }
        extern "C" __global__ void mlaflash_toy(int* p_gmem) {
            p_gmem[threadIdx.x] = helper(p_gmem, threadIdx.x);
        }
        """,
    )
    compiled = compile_kernel("toy", {}, "sm_90")
    assert compiled.registers > 0
    assert compiled.spill_bytes == 0


@pytest.mark.parametrize(
    "body",
    [
        'extern "C" __global__ void mlaflash_other(int* p_gmem) { *p_gmem = 1; }',
        'extern "C" __global__ void mlaflash_toy(int* p_gmem) { *p_gmem = 1; }\n'
        'extern "C" __global__ void mlaflash_two(int* p_gmem) { *p_gmem = 2; }',
        "constexpr int nothing = 1;",
    ],
)
def test_a_file_without_exactly_its_own_kernel_is_an_error(toy_kernels, body):
    rewrite(toy_kernels, body)
    with pytest.raises(CompileError, match="mlaflash_toy"):
        compile_kernel("toy", {}, "sm_90")


@pytest.mark.parametrize("drop", ["Used", "spill stores", "Compiling entry", "Function properties"])
def test_a_log_that_lacks_a_number_is_an_error_and_no_zero(drop):
    log = compile_kernel("toy", {"FACTOR": 3}, "sm_90").log
    assert compiler._parse_log(log, "mlaflash_toy") is not None
    cut = "\n".join(line for line in log.splitlines() if drop not in line)
    assert compiler._parse_log(cut, "mlaflash_toy") is None


@pytest.mark.parametrize("arch", ["sm_70", "sm_75"])
def test_an_architecture_below_sm_80_is_refused_by_name(arch):
    with pytest.raises(UnsupportedError, match=rf"{arch}.*sm_80 is the least"):
        compile_kernel("toy", {"FACTOR": 3}, arch)


def test_an_architecture_that_nvrtc_does_not_know_is_refused_with_those_it_knows():
    with pytest.raises(UnsupportedError, match=r"'sm_199'.*NVRTC \d+\.\d+ compiles for .*sm_90"):
        compile_kernel("toy", {"FACTOR": 3}, "sm_199")


def test_the_architectures_start_at_sm_80_and_hold_the_targets():
    assert supported_archs()[0] == "sm_80"
    assert set(ARCHS) <= set(supported_archs())


@pytest.mark.parametrize("defines", [{"ht": 8}, {"HT": 8.0}, {"HT": "8"}, {"H T": 8}, {"": 1}])
def test_constants_are_upper_case_names_of_integers(defines):
    with pytest.raises(InvalidArgumentError, match="upper-case names with integer values"):
        compile_options(defines, "sm_90")


def test_options_do_not_depend_on_the_order_of_constants():
    one = compile_options({"HT": 8, "TK": 16}, "sm_90")
    assert one == compile_options({"TK": 16, "HT": 8}, "sm_90")
    assert not [option for option in one if "fast" in option or "ftz" in option]


def test_without_cupy_the_extra_is_named(monkeypatch):
    imported = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("cupy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    compiler._nvrtc.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"needs CuPy.*mlaflash\[cuda12\]"):
        compile_kernel("toy", {"FACTOR": 3}, "sm_90")


def test_without_nvrtc_the_extra_is_named():
    """The library is searched for once a process, so the search must fail in a new one."""
    script = """
import cuda.pathfinder

def absent(name):
    raise cuda.pathfinder.DynamicLibNotFoundError(f"no {name}")

cuda.pathfinder.load_nvidia_dynamic_lib = absent
from mlaflash.errors import MissingDependencyError
from mlaflash.jit.compiler import nvrtc_version

try:
    nvrtc_version()
except MissingDependencyError as error:
    assert "needs NVRTC" in str(error) and "mlaflash[cuda12]" in str(error), error
else:
    raise SystemExit("no error")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
