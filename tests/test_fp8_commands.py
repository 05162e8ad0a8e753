"""The commands with caches of 8 bits, without a GPU and without NVRTC."""

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mlaflash.commands.main import main
from mlaflash.errors import MissingDependencyError
from mlaflash.params import row_bytes
from mlaflash.schedule import FP8_KERNELS


@pytest.fixture(autouse=True)
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no kernel be compiled for a GPU: for what does not ask for registers, quickly."""

    def missing(*_: Any, **__: Any) -> None:
        raise MissingDependencyError("compiling a kernel needs NVRTC; pip install 'mlaflash[cuda12]'")

    for module in ("variants", "sweep"):
        monkeypatch.setattr(f"mlaflash.lab.{module}.compile_cached", missing)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="mlaflash")


@pytest.mark.parametrize("kv_dtype", FP8_KERNELS)
def test_check_runs_the_kernels_that_read_the_format(kv_dtype: str) -> None:
    result = run("check", "--preset", "quick", "--kv-dtype", kv_dtype, "--device", "emulator", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["results"]
    assert {one["kernel"] for one in found} == set(FP8_KERNELS[kv_dtype])
    assert all(one["case"].endswith(kv_dtype) for one in found)
    assert "skipped" not in result.stderr


def test_check_says_what_does_not_read_it() -> None:
    result = run("check", "--preset", "quick", "--kv-dtype", "fp8_ds_mla", "--kernel", "tile", "--device", "emulator")
    assert result.exit_code == 2
    assert "--kernel is tile, which does none of the problems selected" in result.stderr
    assert "kernel 'tile' does not read a fp8_ds_mla cache; mma_narrow does" in result.stderr


@pytest.mark.parametrize("kv_dtype", FP8_KERNELS)
def test_plan_counts_the_bytes_of_the_format(kv_dtype: str) -> None:
    arguments = ("plan", "--kv-dtype", kv_dtype, "--kv-len", "4096,1000", "--mask", "none", "--arch", "sm_120")
    found = json.loads(run(*arguments, "--json").stdout)
    assert (found["problem"]["dtype"], found["problem"]["kv_dtype"]) == ("bfloat16", kv_dtype)
    assert found["floors"]["kv_bytes"] == 5096 * row_bytes(kv_dtype)
    for way in ("mla_verify", "verify_plan"):
        assert found[way]["kernel"] in FP8_KERNELS[kv_dtype]
        assert found[way]["kv_bytes"] % row_bytes(kv_dtype) == 0
    text = " ".join(run(*arguments).stdout.split())
    assert f"mask none, bfloat16, KV {kv_dtype}, pages of 64" in text


def test_plan_refuses_a_gpu_that_does_not_convert_it() -> None:
    result = run("plan", "--kv-dtype", "float8_e4m3", "--arch", "sm_80")
    assert result.exit_code == 2
    assert "kv_cache is float8_e4m3 and A100 is sm_80; sm_89 is the least" in result.stderr


def test_types_that_do_not_go_together_are_refused() -> None:
    result = run("plan", "--kv-dtype", "float8_e4m3", "--dtype", "float32")
    assert result.exit_code == 2
    assert "kv_dtype is 'float8_e4m3' and dtype 'float32'" in result.stderr
    plain = run("plan", "--kv-dtype", "bfloat16", "--arch", "sm_120", "--json")
    assert json.loads(plain.stdout)["problem"]["kv_dtype"] is None


def test_sweep_tries_what_reads_the_format_and_its_commands_repeat_it() -> None:
    few = ("--kv-groups", "2", "--stages", "2", "--exchange-buffers", "1", "--nsplit", "1")
    problem = ("--kv-dtype", "float8_e4m3", "--q-len", "1", "--kv-len", "70", "--arch", "sm_120")
    result = run("sweep", *problem, "--kernel", "mma_narrow", *few, "--json")
    assert result.exit_code == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert {record["config"]["step_tiles"] for record in records} == {1, 2}
    for record in records:
        assert (record["status"], record["problem"]["kv_dtype"]) == ("ok", "float8_e4m3")
        assert record["kv_bytes"] == 70 * 576
        assert "--kv-dtype float8_e4m3" in record["command"]
    plain = run("sweep", "--q-len", "1", "--kv-len", "40", "--arch", "sm_120", "--kernel", "mma_narrow", *few, "--json")
    records = [json.loads(line) for line in plain.stdout.splitlines()]
    assert [record["config"]["row_tiles"] for record in records] == [1, 2]
    for record in records:
        assert (record["config"]["step_tiles"], record["problem"]["kv_dtype"]) == (1, None)
        assert "--kv-dtype" not in record["command"]
