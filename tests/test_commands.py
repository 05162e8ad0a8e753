"""The command line without a GPU: exit statuses, JSON, help, refusals, and a kernel that is broken."""

import dataclasses
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import mlaflash
from mlaflash.combine import defines as merge_defines
from mlaflash.commands.check import repeat as check_repeat
from mlaflash.commands.main import main
from mlaflash.commands.options import DTYPES, given_axes
from mlaflash.commands.render import _fold
from mlaflash.commands.sweep import repeat as sweep_repeat
from mlaflash.device import Device
from mlaflash.errors import CacheMissError, MissingDependencyError
from mlaflash.interop import numpy_view
from mlaflash.jit import CompiledKernel, cached, compile_cached, sources
from mlaflash.lab.check import CheckResult, takes
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.presets import cases
from mlaflash.lab.space import SPACES
from mlaflash.lab.target import EmulatorTarget, read_problem
from mlaflash.lab.variants import COMPILED, compile_all, spell, variants
from mlaflash.lab.variants import form as form_of
from mlaflash.mma_tiles import NARROW, NARROW_32, ROWS_32, ROWS_64, ROWS_64_ROLES
from mlaflash.params import FP8_CODES
from mlaflash.problem import Problem
from mlaflash.schedule import KERNELS, MMA_KERNELS, plan
from mlaflash.tiles import KernelConfig, TileConfig, dtype_defines

CHECK_KEYS = {"kernel", "case", "dtype", "max_abs", "max_rel", "tolerance", "passed"}
COMPILE_KEYS = {
    "kernel",
    "arch",
    "config",
    "registers",
    "spill_bytes",
    "shared_bytes",
    "shared_limit",
    "seconds",
    "cached",
}
ONE_CASE = ("--preset", "quick", "--case", "no-mask-soft-cap-page-3-h4-float32")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CUDA find no GPU, so that these tests do the same everywhere."""
    monkeypatch.setattr("mlaflash.lab.target.gpu_available", lambda: False)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let asking for the current GPU fail as CUDA does without one."""

    def refuse(index: int | None = None) -> None:
        raise mlaflash.NoDeviceError("CUDA finds no GPU (planted).")

    monkeypatch.setattr("mlaflash.device.Device.current", refuse)


def run(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(main, arguments, env=environment, prog_name="mlaflash")


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_help_explains_every_command_and_option(path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: {' '.join(('mlaflash', *path))}")
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    assert command.help
    for option in command.params:
        assert isinstance(option, click.Option)
        assert option.help, option.name
        assert option.opts[0] in result.stdout


def test_the_group_has_the_documented_commands() -> None:
    assert {" ".join(path) for path in commands()} == {
        "",
        "check",
        "fuzz",
        "soak",
        "bench",
        "sweep",
        "report",
        "plan",
        "compile",
        "inspect",
        "info",
        "cache",
        "cache list",
        "cache path",
        "cache clear",
        "sglang-check",
    }


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert mlaflash.__version__ in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "--preset", "kimi-k3"], ["kimi-k3", "kimi-k2-tp8", "deepseek-v3-tp8", "quick"]),
        (["check", "--kernel", "tiles"], ["tiles", "naive", "combine"]),
        (["check", "--dtype", "float64"], ["float64", "bfloat16"]),
        (["check", "--case", "none-such"], ["none-such", "Name one of them"]),
        (["check", "--ht", "3"], ["ht is 3", "power of two"]),
        (["check", "--tk", "0"], ["tk is 0", "power of two"]),
        (["check", "--ht", "many"], ["many"]),
        (["check", "--nsplit", "0"], ["nsplit is 0", "at least 1"]),
        (["check", "--nsplit", "1", "--kernel", "combine"], ["nsplit is 1", "at least 2"]),
        (["check", "--nsplit", "5000"], ["5000", "1024"]),
        (["check", "--kernel", "naive", "--ht", "8"], ["--ht", "naive"]),
        (["check", "--kernel", "naive", "--kv-groups", "1"], ["--kv-groups", "naive"]),
        (["check", "--kernel", "mma_narrow", "--dtype", "float32"], ["mma_narrow", "q is float32", "the kernel tile"]),
        (["check", "--kernel", "tile", "--kernel", "mma_wide", "--dtype", "float32"], ["mma_wide", "q is float32"]),
        (["sweep", "--kernel", "mma_wide", "--dtype", "float32"], ["mma_wide", "q is float32", "the kernel tile"]),
        (["sweep", "--kernel", "mma_wide", "--row-groups", "3"], ["mma_wide", "--row-groups 3"]),
        (["sweep", "--kernel", "mma_wide", "--refill-at", "40"], ["mma_wide", "--refill-at 40"]),
        (["check", "--ht", "32", "--tk", "32"], ["101376"]),
        (["check", "--seed", "-1"], ["-1"]),
        (["sweep", "--ht", "3"], ["ht is 3", "power of two"]),
        (["sweep", "--ht", "4,x"], ["4,x"]),
        (["sweep", "--resume"], ["--resume", "--out"]),
        (["sweep", "--out", "/none/such/folder/sweep.jsonl"], ["/none/such/folder/sweep.jsonl"]),
        (["sweep", "--arch", "sm_75"], ["sm_75", "sm_80"]),
        (["sweep", "--arch", "sm_90", "--device", "gpu"], ["sm_90", "--device gpu"]),
        (["sweep", "--heads", "0"], ["0"]),
        (["sweep", "--sm-scale", "nan"], ["sm_scale", "finite"]),
        (["compile", "--arch", "sm_7x"], ["sm_7x", "sm_120"]),
        (["compile", "--arch", "sm_75"], ["sm_75", "sm_80"]),
        (["compile", "--kernel", "tiles"], ["tiles", "naive"]),
        (["cache", "erase"], ["erase"]),
    ],
    ids=lambda value: " ".join(value) if value[0] in main.commands else "",
)
def test_a_wrong_argument_is_named_and_ends_with_status_2(arguments: list[str], words: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: ") + result.stderr.count("Error: ") == 1
    assert "kernel='" not in result.stderr
    for word in words:
        assert word in result.stderr


def leaves() -> Iterator[click.Command]:
    for path in commands():
        command: click.Command = main
        for name in path:
            assert isinstance(command, click.Group)
            command = command.commands[name]
        yield command


def test_options_are_spelled_with_dashes() -> None:
    options = [option for command in leaves() for param in command.params for option in param.opts]
    assert "--kv-groups" in options
    assert "--refill-at" in options
    assert not [option for option in options if "_" in option]


def configs_of(kernel: str) -> list[KernelConfig]:
    space = SPACES[kernel]
    shipped = [c for c in (NARROW, NARROW_32, ROWS_32, ROWS_64, ROWS_64_ROLES) if c.kernel == kernel]
    found = [config for kind in ("gpu", "emulator") for config in space.candidates(kind, {})]
    return found + [space.change(config, {"nsplit": 3}) for config in shipped]


@pytest.mark.parametrize("kernel", list(SPACES))
def test_the_printed_command_of_every_candidate_can_be_pasted(kernel: str) -> None:
    options = {"q_len": 8, "kv_len": 20, "page_size": 3, "sm_scale": 1e-05, "seed": 1, "device": "emulator"}
    labels = [kernel, "combine"] if kernel == "tile" else [kernel]
    for config in configs_of(kernel):
        program, name, *words = shlex.split(sweep_repeat(config, options))
        assert (program, name) == ("mlaflash", "sweep")
        params = main.commands["sweep"].make_context("sweep", words).params
        assert params["kernels"] == (kernel,)
        assert {name: params[name] for name in options} == options
        assert list(SPACES[kernel].candidates("emulator", given_axes(params))) == [config]
        for label in labels:
            result = CheckResult(label, "some-case", "bfloat16", config, None, 0.1)
            program, name, *words = shlex.split(check_repeat(result, "quick", 3, EmulatorTarget("sm_120")))
            assert (program, name) == ("mlaflash", "check")
            params = main.commands["check"].make_context("check", words).params
            assert (params["kernels"], params["names"], params["seed"]) == ((label,), ("some-case",), 3)
            assert given_axes(params) == config.as_dict()


def test_summaries_of_commands_are_not_cut() -> None:
    for group in ((), ("cache",)):
        assert "..." not in run(*group, "--help", COLUMNS="80").stdout.partition("Commands:")[2]


@pytest.mark.parametrize("width", [4, 11, 24, 60])
def test_names_break_at_hyphens(width: int) -> None:
    name = "ragged-causal-block-table-h4-float32 is a name"
    lines = _fold(name, width)
    assert "".join(lines).replace(" ", "") == name.replace(" ", "")
    assert max(map(len, lines)) <= width
    if width >= len("is a name"):
        words = [word for line in lines for word in re.findall(r"[^-\s]+", line)]
        assert words == re.findall(r"[^-\s]+", name)


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("command", ["check", "sweep"])
def test_asking_for_a_gpu_that_is_not_there_ends_with_status_3(command: str) -> None:
    result = run(command, "--device", "gpu")
    assert result.exit_code == 3
    assert result.stdout == ""
    assert "no GPU" in result.stderr


def test_asking_for_a_gpu_without_cupy_ends_with_status_3_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", None)
    result = run("check", "--device", "gpu")
    assert result.exit_code == 3
    assert "mlaflash[cuda12]" in result.stderr


def test_check_passes_on_the_emulator_and_says_so() -> None:
    result = run("check", *ONE_CASE)
    assert result.exit_code == 0, result.stderr
    assert "on the emulator" in result.stdout
    assert "nothing has run on a GPU" in " ".join(result.stdout.split())
    for kernel in ("naive", "tile", "combine"):
        assert re.search(rf"^{kernel} .* ok", result.stdout, re.MULTILINE)
    assert "passed: 3 of 3" in result.stdout


def test_check_json_is_one_document_with_the_documented_keys() -> None:
    result = run("check", "--json", *ONE_CASE)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found.keys() == {"device", "passed", "results"}
    assert found["device"] == "emulator"
    assert found["passed"] is True
    assert [row["kernel"] for row in found["results"]] == ["naive", "tile", "combine"]
    for row in found["results"]:
        assert row.keys() == CHECK_KEYS
        assert row["case"] == ONE_CASE[-1]
        assert row["dtype"] == "float32"
        assert row["passed"] is True
        assert 0 < row["max_rel"] < row["tolerance"]


def test_check_runs_what_is_asked_for() -> None:
    result = run("check", "--json", "--preset", "quick", "--kernel", "combine", "--dtype", "float32", "--nsplit", "2")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["results"]
    assert len(rows) == 3
    assert {(row["kernel"], row["dtype"]) for row in rows} == {("combine", "float32")}


def test_one_split_leaves_combine_out() -> None:
    result = run("check", "--json", *ONE_CASE, "--nsplit", "1")
    assert result.exit_code == 0, result.stderr
    assert [row["kernel"] for row in json.loads(result.stdout)["results"]] == ["naive", "tile"]


@pytest.fixture
def kernels_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let mlaflash take its kernels from a copy that a test may change."""
    root = tmp_path / "kernels"
    shutil.copytree(sources.kernel_root(), root)
    monkeypatch.setattr("mlaflash.jit.sources.kernel_root", lambda: root)
    return root


def plant(path: Path, line: str) -> None:
    text = path.read_text()
    include = '#include "addressing.cuh"\n'
    assert text.count(include) == 1
    assert "ex2(" in text
    path.write_text(text.replace(include, include + line))


@pytest.mark.parametrize(
    ("kernel", "wrong"), [("naive", {"naive"}), ("tile", {"tile", "combine"}), ("combine", {"combine"})]
)
def test_a_broken_kernel_fails_check(kernels_copy: Path, kernel: str, wrong: set[str]) -> None:
    plant(kernels_copy / f"{kernel}.cu", "#define ex2(v) (1.01f * ex2(v))\n")
    result = run("check", "--json", *ONE_CASE)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["passed"] is False
    assert {row["kernel"] for row in found["results"] if not row["passed"]} == wrong
    # Which element, both of its values, and how to see it again.
    for name in wrong:
        told = re.search(rf"FAIL {name} on (\S+): .*?(out|lse)\[[\d, ]+\] is (\S+), expected (\S+)\n", result.stderr)
        assert told is not None
        assert told[1] == ONE_CASE[-1]
        assert float(told[3]) != float(told[4])
        again = re.search(rf"repeat with: mlaflash (check .*--kernel {name} .*)\n", result.stderr)
        assert again is not None
        assert run(*again[1].split()).exit_code == 1


def test_a_kernel_that_does_not_compile_fails_check(kernels_copy: Path) -> None:
    plant(kernels_copy / "combine.cu", "#error planted\n")
    result = run("check", "--json", *ONE_CASE)
    assert result.exit_code == 1
    rows = {row["kernel"]: row for row in json.loads(result.stdout)["results"]}
    assert [name for name, row in rows.items() if not row["passed"]] == ["combine"]
    assert rows["combine"]["max_abs"] is None
    assert "planted" in result.stderr


def test_a_kernel_that_faults_fails_check(kernels_copy: Path) -> None:
    path = kernels_copy / "naive.cu"
    text = path.read_text()
    barrier = "block_sync();  // scores and maxima"
    assert text.count(barrier) == 1
    path.write_text(text.replace(barrier, "//"))
    result = run("check", *ONE_CASE)
    assert result.exit_code == 1
    assert re.search(r"^naive .* FAIL", result.stdout, re.MULTILINE)
    assert re.search(r"^tile .* ok", result.stdout, re.MULTILINE)
    assert "FAIL naive" in result.stdout
    assert "Traceback" not in result.output


def test_no_host_compiler_is_told_once_with_the_packages() -> None:
    result = run("check", "--preset", "quick", CXX="/none/such/c++")
    assert result.exit_code == 1
    assert result.stdout.count("\n") <= 4
    assert "g++" in result.stderr
    assert "Traceback" not in result.output


def test_compile_json_is_one_array_with_the_documented_keys(tmp_path: Path) -> None:
    kernels = [word for kernel in ("naive", "tile", "combine") for word in ("--kernel", kernel)]
    arguments = ("compile", "--arch", "sm_120", "--all", "--dtype", "bfloat16", *kernels, "--json")
    first, second = (run(*arguments, MLAFLASH_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr
    rows = json.loads(first.stdout)
    assert {row["kernel"] for row in rows} == {"naive", "tile", "combine"}
    for row in rows:
        assert row.keys() == COMPILE_KEYS
        assert row["arch"] == "sm_120"
        assert row["spill_bytes"] == 0
        assert 0 < row["shared_bytes"] <= row["shared_limit"] == 101376
        assert row["registers"] > 0
    assert {"ht": 8, "tk": 32, "dtype": "bfloat16"} in [row["config"] for row in rows if row["kernel"] == "tile"]
    assert all(row["cached"] and row["seconds"] == 0 for row in json.loads(second.stdout))


def test_rows_of_compile_tell_the_forms_apart() -> None:
    found, refused = variants("sm_120", DTYPES, COMPILED)
    assert refused == []
    rows = [(variant.kernel, spell(variant.config)) for variant in found]
    assert len(set(rows)) == len(rows) > 100
    merges = {
        spell(form_of("combine", merge_defines(splits, rows))) for splits in (2, 9, 33, 65) for rows in (1, 65, 256)
    }
    assert {("combine", f"{merge} bfloat16") for merge in merges} <= set(rows)
    assert ("combine", "split_warps=1 few_splits=1 bfloat16 partial_dtype=float32") in rows
    assert ("combine", "split_warps=1 few_splits=1 bfloat16") in rows
    assert ("mask", "format=retrieve") in rows
    assert ("tile", "ht=8 tk=32 bfloat16 out_dtype=float32") in rows
    narrow = "kv_groups=2 stages=2 exchange_buffers=2 step_tiles=1 row_tiles=1 column_warps=4 shared_steps=0"
    assert ("mma_narrow", f"{narrow} soft_cap split_kv float16") in rows
    assert ("mma_narrow", f"{narrow} soft_cap sparse_ids float16") in rows
    assert ("tile", "ht=8 tk=32 sparse_ids float32") in rows
    assert ("mma_narrow", "fp8_ds_mla") in {(kernel, spelled.split("kv_dtype=")[-1]) for kernel, spelled in rows}


def test_the_shipped_tensor_core_kernels_keep_their_registers() -> None:
    types: Mapping[str, Any] = {"out_dtypes": ["bfloat16"], "kv_dtypes": ["bfloat16"]}
    found, _ = variants("sm_120", ["bfloat16"], ["mma_narrow", "mma_wide", "mma_roles"], **types)
    dense = [v for v in found if not v.config.get("sparse_ids")]
    plain = [v for v in dense if not v.config["soft_cap"] + v.config["new_kv"] + v.config["split_kv"]]
    full = [v for v in found if v.config["soft_cap"] * v.config["new_kv"] * v.config["split_kv"]]
    assert len(plain) == len(full) == 6  # the deterministic one among them
    assert all(result.passed and not result.spills for result in compile_all([*plain, *full]))


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what lets the process forget the kernels that it compiled, so that the cache on disk counts."""

    def forget() -> None:
        monkeypatch.setattr(cached, "_compiled", {})

    forget()
    return forget


def test_compile_covers_what_a_call_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: Callable[[], None]
) -> None:
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(tmp_path))
    assert run("compile", "--arch", "sm_120", "--dtype", "float32").exit_code == 0
    forgetful()
    monkeypatch.setenv("MLAFLASH_DISABLE_JIT", "1")
    target = EmulatorTarget("sm_120")
    wanted = set()
    for case in cases("kimi-k2-tp8", "emulator"):
        if case.dtype == "float32":
            problem = read_problem(build(case, 0))
            chosen = target.plan(problem, "tile", None).config
            assert isinstance(chosen, TileConfig)
            configs = [None, *(dataclasses.replace(chosen, nsplit=nsplit) for nsplit in range(1, 100, 3))]
            for config in configs:
                schedule = target.plan(problem, "tile", config)
                wanted |= {(step.kernel, tuple(sorted(step.defines.items()))) for step in schedule.launches}
    assert len(wanted) > 3
    for kernel, defines in wanted:
        assert cached.compile_cached(kernel, dict(defines), "sm_120").cached


Q_LENS = (1, 3, 8, 40)
STORED = [(dtype, None) for dtype in DTYPES] + list(itertools.product(("bfloat16", "float16"), FP8_CODES))
"""Element types of q, and what caches hold."""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_every_form_that_a_call_asks_for_is_compiled(arch: str) -> None:
    compiled = {(v.kernel, *sorted(v.defines.items())) for v in variants(arch, DTYPES, COMPILED, out_dtypes=DTYPES)[0]}
    default = {(v.kernel, *sorted(v.defines.items())) for v in variants(arch, DTYPES, COMPILED)[0]}
    device = Device.for_arch(arch)
    seen = set()
    for (dtype, kv_dtype), out_dtype, cap, new_kv, layout in itertools.product(
        STORED, DTYPES, (0.0, 20.0), (False, True), ("fused", "paired", "apart")
    ):
        if kv_dtype is not None and (arch == "sm_80" or (kv_dtype == "fp8_ds_mla" and layout != "fused")):
            continue
        for q_len in Q_LENS:
            case = Case(
                name="any",
                q_lens=(q_len,) * 2,
                kv_lens=(q_len, 400),
                heads=8,
                sm_scale=1.0,
                dtype=dtype,
                kv_dtype=kv_dtype,
                logit_cap=cap,
                new_kv=new_kv,
                paired=layout != "fused",
                mask="chain",
            )
            arguments = build(case, 0)
            if layout == "paired":
                whole = np.concatenate(arguments["kv_cache"], -1)
                arguments["kv_cache"] = whole[..., :512], whole[..., 512:]
            problem = Problem.from_arrays(numpy_view, out_dtype=out_dtype, **arguments)
            plans = [plan(problem, device)]
            plans += [plan(problem, device, kernel=kernel) for kernel in KERNELS if takes(kernel, case)]
            for max_kv_len in (400, 4000) if kv_dtype is None else ():
                plans.append(plan(dataclasses.replace(problem, max_kv_len=max_kv_len), device, deterministic=True))
            for launch in itertools.chain(*(chosen.launches for chosen in plans)):
                form = (launch.kernel, *sorted(launch.defines.items()))
                seen.add(form)
                assert form in compiled
                assert form in default or out_dtype not in (dtype, "float32")
    assert len(seen) > 100


def test_every_form_that_a_sparse_call_asks_for_is_compiled() -> None:
    compiled = {(v.kernel, *sorted(v.defines.items())) for v in variants("sm_120", DTYPES, COMPILED)[0]}
    seen = set()
    for (dtype, kv_dtype), cap, paired, heads in itertools.product(STORED, (0.0, 20.0), (False, True), (1, 20, 64)):
        case = Case(
            name="any",
            q_lens=(3,),
            kv_lens=(90,),
            heads=heads,
            sm_scale=1.0,
            dtype=dtype,
            logit_cap=cap,
            mask="none",
            topk=600,
            kv_dtype=kv_dtype,
        )
        arguments = build(case, 0)
        cache = arguments["kv_cache"]
        if paired and kv_dtype != "fp8_ds_mla":
            arguments["kv_cache"] = cache[..., :512].copy(), cache[..., 512:].copy()
        for kernel in (None, *KERNELS):
            if kernel == "mma_roles" or (kernel in MMA_KERNELS and dtype == "float32"):
                continue
            if kv_dtype is not None and kernel not in (None, "mma_narrow"):
                continue
            for launch in plan(read_problem(arguments), Device.for_arch("sm_120"), kernel=kernel).launches:
                form = (launch.kernel, *sorted(launch.defines.items()))
                seen.add(form)
                assert form in compiled
    assert len({form for form in seen if ("SPARSE_IDS", 1) in form}) > 20


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_the_hint_of_a_missing_kernel_fills_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: Callable[[], None], out_dtype: str
) -> None:
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MLAFLASH_DISABLE_JIT", "1")
    defines = dtype_defines("float16", out_dtype, out_dtype) | {"SPLIT_WARPS": 8}
    with pytest.raises(CacheMissError) as missing:
        compile_cached("combine", defines, "sm_90")
    hint = re.search(r"Fill the cache with: mlaflash (compile [^(]*)\(", str(missing.value))
    assert hint is not None
    # All but one kernel are left out for the time that they take.
    arguments = [*hint[1].split(), "--kernel", "combine"]
    assert run(*arguments).exit_code == 0  # in the same shell, with the variable set
    forgetful()
    assert compile_cached("combine", defines, "sm_90").cached


def test_compile_for_all_architectures() -> None:
    result = run("compile", "--all", "--kernel", "combine", "--dtype", "float16", "--json")
    assert result.exit_code == 0, result.stderr
    assert {row["arch"] for row in json.loads(result.stdout)} == {"sm_80", "sm_89", "sm_90", "sm_120"}


@pytest.mark.usefixtures("no_device")
def test_compile_without_a_gpu_takes_sm_120_or_the_variable() -> None:
    arguments = ("compile", "--kernel", "combine", "--dtype", "float16", "--json")
    assert {row["arch"] for row in json.loads(run(*arguments).stdout)} == {"sm_120"}
    assert {row["arch"] for row in json.loads(run(*arguments, MLAFLASH_ARCH="sm_90a").stdout)} == {"sm_90a"}


def test_compile_of_every_tile_leaves_out_what_does_not_fit() -> None:
    fitting, refused = variants("sm_120", ["float16"], ["tile"], kv_dtypes=["float16"], every_tile=True)
    assert len(fitting) > 10
    assert all(variant.shared_bytes <= 101376 for variant in fitting)
    assert all("101376" in reason for reason in refused)
    # Each tile is told once, whatever the splits.
    assert len(refused) == len({reason.split(" nsplit=")[0] for reason in refused}) > 0
    assert len(variants("sm_90", ["float16"], ["tile"], every_tile=True)[0]) > len(fitting)


def test_a_kernel_that_does_not_compile_fails_compile(kernels_copy: Path) -> None:
    plant(kernels_copy / "tile.cu", "#error planted\n")
    result = run("compile", "--arch", "sm_120", "--dtype", "float32", "--json")
    assert result.exit_code == 1
    rows = {row["kernel"]: row for row in json.loads(result.stdout)}
    assert rows["tile"]["registers"] is None
    assert rows["naive"]["registers"] > 0
    assert "planted" in result.stderr


def test_a_kernel_that_spills_fails_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def spilling(kernel: str, defines: Mapping[str, int], arch: str, **_: Any) -> CompiledKernel:
        return dataclasses.replace(compile_cached(kernel, defines, arch), spill_bytes=140)

    monkeypatch.setattr("mlaflash.lab.variants.compile_cached", spilling)
    arguments = ("compile", "--arch", "sm_120", "--dtype", "float16", "--kernel", "combine")
    result = run(*arguments)
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert "140 bytes of registers are spilled" in result.stdout
    as_json = run(*arguments, "--json")
    assert as_json.exit_code == 1
    assert {row["spill_bytes"] for row in json.loads(as_json.stdout)} == {140}


def test_a_candidate_of_a_sweep_may_spill_and_its_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    one = compile_cached("combine", dtype_defines("float16", "float16", "float32") | {"SPLIT_WARPS": 1}, "sm_120")

    def spilling(kernel: str, defines: Mapping[str, int], arch: str, **_: Any) -> CompiledKernel:
        return dataclasses.replace(one, spill_bytes=0 if defines["HT"] == 8 else 140)

    monkeypatch.setattr("mlaflash.lab.variants.compile_cached", spilling)
    arguments = ("compile", "--arch", "sm_120", "--dtype", "float16", "--kernel", "tile", "--tiles", "all")
    result = run(*arguments, COLUMNS="120")
    assert result.exit_code == 0, result.stdout
    assert "FAIL" not in result.stdout
    assert re.search(r"^tile .*ht=16 tk=4 .* 140 .* spills$", result.stdout, re.MULTILINE)
    assert re.search(r"^tile .*ht=8 tk=32 .* ok *$", result.stdout, re.MULTILINE)
    assert re.search(r"\d+ spill and no call chooses them$", result.stdout.rstrip())


def test_compile_without_nvrtc_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise MissingDependencyError("compiling a kernel needs NVRTC; pip install 'mlaflash[cuda12]'")

    monkeypatch.setattr("mlaflash.lab.variants.compile_cached", missing)
    result = run("compile", "--arch", "sm_120")
    assert result.exit_code == 1
    assert "mlaflash[cuda12]" in result.stderr
    assert result.stdout == ""


def test_info_prints_everything() -> None:
    result = run("info", MLAFLASH_JIT_LINEINFO="1")
    assert result.exit_code == 0
    for word in ("mlaflash", "nvrtc", "GPU", "kernels", "cache", "MLAFLASH_JIT_LINEINFO", "host compiler"):
        assert word in result.stdout


def test_info_json(tmp_path: Path) -> None:
    result = run("info", "--json", MLAFLASH_CACHE_DIR=str(tmp_path))
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    keys = {"versions", "platform", "gpus", "host_compiler", "kernels", "cache", "variables", "refused_variables"}
    assert found.keys() == keys
    assert found["refused_variables"] == {}
    assert found["versions"]["mlaflash"] == mlaflash.__version__
    assert found["cache"] == {"path": str(tmp_path), "kernels": 0, "bytes": 0}
    assert found["variables"]["MLAFLASH_CACHE_DIR"] == str(tmp_path)


def test_info_prints_when_its_probes_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", None)
    result = run("info", MLAFLASH_CACHE_DIR=str(file), CXX="/none/such/c++")
    assert result.exit_code == 0
    assert "no GPU: using a GPU needs CuPy" in result.stdout
    assert f"the cache folder is {file}" in result.stdout
    assert "CXX is '/none/such/c++'" in result.stdout


@pytest.mark.parametrize(
    ("variable", "allowed"),
    [
        ("MLAFLASH_LOG", "allowed are debug, info, warning"),
        ("MLAFLASH_ARCH", "allowed is a CUDA architecture"),
        ("MLAFLASH_DISABLE_JIT", "allowed are 1, true"),
        ("MLAFLASH_JIT_LINEINFO", "allowed are 1, true"),
    ],
)
def test_info_complains_of_a_variable_on_its_own_line(tmp_path: Path, variable: str, allowed: str) -> None:
    environment = {variable: "foo", "MLAFLASH_CACHE_DIR": str(tmp_path)}
    result = run("info", **environment)
    assert result.exit_code == 0
    assert re.search(rf"^{variable} +'foo'; {allowed}", result.stdout, re.MULTILINE)
    assert re.search(rf"^cache +{tmp_path}, 0 kernels, 0.0 MiB$", result.stdout, re.MULTILINE)
    assert result.stdout.count(allowed) == 1
    found = json.loads(run("info", "--json", **environment).stdout)
    assert found["variables"][variable] == "foo"
    assert found["cache"]["path"] == str(tmp_path)
    assert list(found["refused_variables"]) == [variable]


@pytest.mark.usefixtures("forgetful")
def test_cache_commands(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    assert run("cache", "path", MLAFLASH_CACHE_DIR=cache).stdout == f"{cache}\n"
    assert json.loads(run("cache", "list", "--json", MLAFLASH_CACHE_DIR=cache).stdout) == []
    combine = ("compile", "--arch", "sm_120", "--kernel", "combine", "--dtype", "float16")
    assert run(*combine, MLAFLASH_CACHE_DIR=cache).exit_code == 0
    listed = json.loads(run("cache", "list", "--json", MLAFLASH_CACHE_DIR=cache).stdout)
    assert {(entry["kernel"], entry["arch"]) for entry in listed} == {("combine", "sm_120")}
    assert all(Path(entry["path"]).stat().st_size == entry["bytes"] for entry in listed)
    table = run("cache", "list", MLAFLASH_CACHE_DIR=cache, COLUMNS="80").stdout
    assert re.search(r"^combine +sm_120 +split_warps=8 float16 partial_dtype=float32 +\d+$", table, re.MULTILINE)
    assert table.count("sm_120") == len(listed)
    assert max(map(len, table.splitlines()[:-1])) <= 80
    cleared = run("cache", "clear", MLAFLASH_CACHE_DIR=cache)
    assert cleared.exit_code == 0
    assert cleared.stdout.startswith(f"{len(listed)} kernels removed")
    assert json.loads(run("cache", "list", "--json", MLAFLASH_CACHE_DIR=cache).stdout) == []


def test_cache_that_is_switched_off() -> None:
    path = run("cache", "path", MLAFLASH_CACHE_DIR="")
    assert (path.exit_code, path.stdout) == (1, "")
    assert "MLAFLASH_CACHE_DIR" in path.stderr
    assert run("cache", "clear", MLAFLASH_CACHE_DIR="").exit_code == 0


def test_a_cache_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    result = run("cache", "list", MLAFLASH_CACHE_DIR=str(file))
    assert result.exit_code == 2
    assert "MLAFLASH_CACHE_DIR" in result.stderr


@pytest.mark.parametrize("columns", ["0", "1"])
@pytest.mark.parametrize("arguments", [("check", *ONE_CASE), ("info",)], ids=lambda arguments: arguments[0])
def test_a_terminal_without_a_width_ends_nothing(arguments: tuple[str, ...], columns: str) -> None:
    assert run(*arguments, COLUMNS=columns).exit_code == 0


def test_a_standard_output_that_cannot_be_written_to_is_an_error_without_a_traceback() -> None:
    command = [sys.executable, "-m", "mlaflash", "cache", "path"]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: [Errno 28]")
    assert "Traceback" not in result.stderr


def test_a_path_that_the_output_cannot_spell_is_spelled_otherwise() -> None:
    result = run("cache", "path", MLAFLASH_CACHE_DIR="/tmp/\udcff")
    assert (result.exit_code, result.stdout) == (0, "/tmp/\\udcff\n")


def test_too_little_memory_is_an_error_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise MemoryError("Unable to allocate 1. TiB")

    monkeypatch.setattr("mlaflash.lab.check.build", refuse)
    result = run("check", *ONE_CASE)
    assert result.exit_code == 1
    assert "not enough memory (Unable to allocate 1. TiB)" in result.stderr


@pytest.mark.parametrize("columns", ["40", "50", "80"])
def test_output_fits_the_terminal(columns: str) -> None:
    result = run("check", *ONE_CASE, COLUMNS=columns)
    assert result.exit_code == 0, result.stderr
    widest = max(result.stdout.splitlines(), key=len)
    assert len(widest) <= int(columns)
    assert "tolerance" in result.stdout


def test_no_colour_where_none_is_wanted() -> None:
    coloured = run("check", *ONE_CASE, FORCE_COLOR="1", NO_COLOR=None, TERM="xterm-256color")
    plain = run("check", *ONE_CASE, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color")
    green = re.compile(r"\x1b\[[\d;]*3[0-7]m")
    assert green.search(coloured.stdout)
    assert not green.search(plain.stdout)
    assert "\x1b" not in run("check", *ONE_CASE).stdout


@pytest.mark.parametrize("command", [["-m", "mlaflash"], ["cli.py"]])
def test_the_other_ways_in(command: list[str]) -> None:
    root = Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, *command, "--version"], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout == f"mlaflash, version {mlaflash.__version__}\n"
    wrong = subprocess.run([sys.executable, *command, "check", "--ht", "3"], cwd=root, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "ht is 3" in wrong.stderr
