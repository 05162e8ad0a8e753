"""Sweeps without a GPU: records, resuming, ranking, and what becomes of candidates that fail."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from mlaflash import emulator, oracle
from mlaflash.commands.main import main
from mlaflash.device import Device
from mlaflash.errors import CompileError, EmulatorError, InvalidArgumentError, LaunchError
from mlaflash.jit.compiler import compile_sources
from mlaflash.jit.sources import kernel_root, read
from mlaflash.lab import space
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.sweep import Record, RecordFile, Sweep, rank, requested_kv_bytes, visible_tokens
from mlaflash.lab.target import EmulatorTarget, Target
from mlaflash.lab.target import Result as Verified
from mlaflash.lab.timing import Timing, measure
from mlaflash.schedule import Launch
from mlaflash.tiles import KernelConfig, NaiveConfig, TileConfig

SMALL = (
    "sweep",
    "--q-len",
    "2",
    "--heads",
    "4",
    "--kv-len",
    "20",
    "--dtype",
    "float32",
    "--ht",
    "4",
    "--device",
    "emulator",
)
KEYS = {field.name for field in dataclasses.fields(Record)}
CASE = Case(name="small", q_lens=(2,), kv_lens=(20,), heads=4, sm_scale=0.1, dtype="float32", page_size=4)


def run(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(main, arguments, env=environment, prog_name="mlaflash")


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_is_one_line_for_each_candidate() -> None:
    result = run(*SMALL, "--tk", "8,16", "--nsplit", "1,2", "--json")
    assert result.exit_code == 0, result.stderr
    records = lines(result.stdout)
    assert [record["config"] for record in records] == [
        {"ht": 4, "tk": tk, "nsplit": nsplit} for tk in (8, 16) for nsplit in (1, 2)
    ]
    for record in records:
        assert record.keys() == KEYS
        assert (record["kernel"], record["status"], record["reason"]) == ("tile", "ok", "")
        assert (record["device"], record["gpu"], record["arch"]) == ("emulator", None, "sm_120")
        assert (record["median_us"], record["p10_us"], record["p90_us"]) == (None, None, None)
        assert record["kv_bytes"] == (19 + 20) * 576 * 4
        assert record["registers"] > 0
        assert record["spill_bytes"] == 0
        assert record["shared_bytes"] < record["shared_limit"] == 101376
        assert record["versions"]["nvrtc"]
        assert record["problem"]["kv_lens"] == [20]
    assert len({record["key"] for record in records}) == 1
    assert "NO TIMING" in result.stderr


def test_the_command_of_a_record_repeats_it() -> None:
    (first,) = lines(run(*SMALL, "--tk", "8", "--nsplit", "2", "--seed", "3", "--json").stdout)
    program, *arguments = first["command"].split()
    assert program == "mlaflash"
    assert lines(run(*arguments, "--json").stdout) == [first]


def test_the_table_ranks_and_says_that_it_is_no_timing() -> None:
    result = run(*SMALL, "--ht", "1,4", "--tk", "8", "--nsplit", "1", COLUMNS="100")
    assert result.exit_code == 0, result.stderr
    assert "NO TIMING" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.endswith("ok")]
    assert [row[:4] for row in rows] == [["1", "tile", "4", "8"], ["2", "tile", "1", "8"]]


def test_a_candidate_over_the_shared_memory_limit_is_a_record_with_both_numbers() -> None:
    result = run(*SMALL, "--ht", "32", "--tk", "8,32", "--nsplit", "1", "--json")
    assert result.exit_code == 0, result.stderr
    fits, too_large = lines(result.stdout)
    assert fits["status"] == "ok"
    assert too_large["status"] == "invalid"
    assert too_large["shared_bytes"] == TileConfig(32, 32).shared_bytes("float32") > too_large["shared_limit"] == 101376
    assert str(too_large["shared_bytes"]) in too_large["reason"]
    assert "101376" in too_large["reason"]
    assert too_large["kv_bytes"] is None


def test_a_sweep_in_which_nothing_is_valid_fails() -> None:
    result = run(*SMALL, "--ht", "32", "--tk", "32", "--nsplit", "1")
    assert result.exit_code == 1
    assert "no candidate is ok" in result.stdout


def test_too_many_splits_are_invalid() -> None:
    (record,) = lines(run(*SMALL, "--tk", "8", "--nsplit", "4000", "--json").stdout)
    assert record["status"] == "invalid"
    assert "1024" in record["reason"]


def test_registers_are_not_known_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    from mlaflash.jit import compiler

    compiler._nvrtc.cache_clear()
    try:
        result = run(*SMALL, "--tk", "8", "--nsplit", "1", "--json")
    finally:
        monkeypatch.undo()
        compiler._nvrtc.cache_clear()
    assert result.exit_code == 0, result.stderr
    (record,) = lines(result.stdout)
    assert (record["status"], record["registers"], record["spill_bytes"]) == ("ok", None, None)
    assert "mlaflash[cuda12]" in result.stderr


def test_naive_can_be_swept_beside_tile() -> None:
    result = run(*SMALL, "--kernel", "naive", "--kernel", "tile", "--tk", "8", "--nsplit", "1", "--json")
    naive, tile = lines(result.stdout)
    assert (naive["kernel"], naive["config"]) == ("naive", {})
    # What the shared tile saves: both parts of the row for each head, against one row for each 4 heads.
    assert naive["kv_bytes"] / tile["kv_bytes"] == 4 * (576 + 512) / 576


def test_kernels_side_by_side_show_their_own_constants() -> None:
    arguments = (*SMALL, "--kernel", "naive", "--kernel", "tile", "--tk", "8", "--nsplit", "1")
    result = run(*arguments, COLUMNS="100")
    assert result.exit_code == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.rstrip().endswith("ok")]
    assert [row[:5] for row in rows] == [["1", "tile", "ht=4", "tk=8", "nsplit=1"], ["2", "naive", *rows[1][2:5]]]
    assert not any("=" in word or word == "-" for word in rows[1])
    narrow = run(*arguments, COLUMNS="40")
    assert max(map(len, narrow.stdout.splitlines())) <= 40


# --- the file ----------------------------------------------------------------------------------------------------


def test_resume_goes_on_where_a_sweep_was_cut_off(tmp_path: Path) -> None:
    out = tmp_path / "sweep.jsonl"
    arguments = (*SMALL, "--tk", "8", "--nsplit", "1,2,3", "--out", str(out))
    assert run(*arguments).exit_code == 0
    whole = out.read_text()
    assert whole.count("\n") == 3

    # As a process that was killed in the middle of writing the third record leaves it.
    out.write_text(whole[: whole.rindex("\n", 0, -1) + 30])
    result = run(*arguments, "--resume", "--json")
    assert result.exit_code == 0, result.stderr
    assert out.read_text() == whole
    assert "2 of them are in" in result.stderr
    # All of them are reported, the kept ones first.
    assert lines(result.stdout) == lines(whole)

    again = run(*arguments, "--resume")
    assert again.exit_code == 0
    assert out.read_text() == whole
    assert sum(line.endswith("ok") for line in map(str.rstrip, again.stdout.splitlines())) == 3


def test_resume_keeps_the_records_of_other_problems(tmp_path: Path) -> None:
    out = tmp_path / "sweep.jsonl"
    arguments = (*SMALL, "--tk", "8", "--nsplit", "1", "--out", str(out), "--resume")
    assert run(*arguments).exit_code == 0
    assert run(*arguments, "--seed", "1").exit_code == 0
    assert run(*arguments, "--kv-len", "21").exit_code == 0
    assert run(*arguments, "--arch", "sm_90").exit_code == 0
    records = lines(out.read_text())
    assert len(records) == 4
    assert len({record["key"] for record in records}) == 4


def test_a_file_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "sweep.jsonl"
    out.write_text("{}\n")
    refused = run(*SMALL, "--tk", "8", "--nsplit", "1", "--out", str(out))
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    foreign = run(*SMALL, "--tk", "8", "--nsplit", "1", "--out", str(out), "--resume")
    assert foreign.exit_code == 2
    assert "line 1" in foreign.stderr
    assert out.read_text() == "{}\n"


@pytest.mark.parametrize("content", ["not json\n", "[1]\n", '{"kernel": "tile"}\n'])
def test_lines_that_are_no_records_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError, match="line 1"):
        RecordFile(path, resume=True)


@pytest.mark.parametrize("content", ["{}", '{"precious": 1}', "notes", "[\n1,\n2]", "\xff"])
def test_a_foreign_last_line_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InvalidArgumentError, match="is no record of a sweep"):
        RecordFile(path, resume=True)
    assert path.read_text(encoding="latin-1") == content


@pytest.mark.parametrize("kept", [0, 1, 5, 11, 40])
def test_a_first_record_that_was_cut_off_is_cut_away(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_text(record_of().to_json()[:kept])
    assert RecordFile(path, resume=True).records == []
    assert path.read_text() == ""


def test_a_disk_that_is_full_is_an_error_that_says_how_to_go_on() -> None:
    result = run(*SMALL, "--tk", "8", "--nsplit", "1", "--out", "/dev/full")
    assert result.exit_code == 1
    assert "/dev/full" in result.stderr
    assert "--resume" in result.stderr


def test_each_record_is_in_the_file_before_the_next_candidate_runs(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    file = RecordFile(path, resume=False)
    sweep = planted_sweep(PlantedTarget())
    for count, record in enumerate(sweep.run([TileConfig(4, 8, 1), TileConfig(4, 8, 2)]), 1):
        file.append(record)
        assert [Record.from_dict(line) for line in lines(path.read_text())][-1] == record
        assert path.read_text().count("\n") == count


# --- what becomes of candidates ------------------------------------------------------------------------------------


class PlantedTarget(Target):
    """Answers with the oracle's result, or with what a test plants."""

    kind = "gpu"
    name = "planted"

    def __init__(self, planted: Mapping[int, Any] | None = None, *, usable: bool = True) -> None:
        self.device = Device.for_arch("sm_120")
        self.planted = planted or {}
        self.usable = usable
        self.ran: list[int] = []
        self.timed: list[int] = []

    def load(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return dict(arguments)

    def build_one(self, launch: Launch) -> None:
        planted = self.planted.get(launch.defines.get("TK", 0))
        if isinstance(planted, CompileError):
            raise planted

    def verify(self, loaded: Mapping[str, Any], kernel: str, config: KernelConfig | None, seed: int) -> Verified:
        assert isinstance(config, TileConfig)
        self.ran.append(config.tk)
        planted = self.planted.get(config.tk)
        if isinstance(planted, Exception):
            raise planted
        out, lse = oracle.mla_verify(**loaded)
        if planted == "wrong":
            out[1, 2, 3] += 0.5
        return Verified(out.astype(np.float32), lse.astype(np.float32), None)

    def time(self, loaded: Mapping[str, Any], kernel: str, config: KernelConfig | None, samples: int) -> Timing:
        assert isinstance(config, TileConfig)
        self.timed.append(config.tk)
        if self.planted.get(config.tk) == "slow to fail":
            raise LaunchError("planted")
        return Timing(tuple(100.0 / config.tk + i for i in range(samples)))

    def is_usable(self) -> bool:
        return self.usable


def planted_sweep(target: Target) -> Sweep:
    return Sweep(target, CASE, seed=0, command=lambda config: "mlaflash sweep", samples=11)


def compile_error() -> CompileError:
    return CompileError("planted", kernel="tile", defines={}, arch="sm_120", options=(), log="the log")


def test_each_failure_is_a_record_of_its_own_and_the_sweep_goes_on() -> None:
    target = PlantedTarget(
        {
            1: compile_error(),
            2: LaunchError("planted"),
            4: EmulatorError("planted", kind="race"),
            8: "wrong",
            16: "slow to fail",
        }
    )
    records = list(planted_sweep(target).run([TileConfig(4, tk, 1) for tk in (1, 2, 4, 8, 16, 32)]))
    assert [record.status for record in records] == [
        "compile_failed",
        "launch_failed",
        "wrong",
        "wrong",
        "launch_failed",
        "ok",
    ]
    assert all("planted" in record.reason for record in (*records[:3], records[4]))
    assert "the log" in records[0].reason
    assert "out[1, 2, 3] is " in records[3].reason
    assert records[5].reason == ""
    # What is wrong is never timed.
    assert target.timed == [16, 32]
    assert 1 not in target.ran


def test_a_timed_record_holds_median_and_percentiles() -> None:
    (record,) = planted_sweep(PlantedTarget()).run([TileConfig(4, 8, 1)])
    assert (record.median_us, record.p10_us, record.p90_us) == (17.5, 13.5, 21.5)
    assert (record.gpu, record.device) == ("planted", "planted")
    assert record.kv_bytes == (19 + 20) * 576 * 4


def test_a_candidate_that_takes_the_gpu_away_ends_the_sweep_after_its_record() -> None:
    target = PlantedTarget({8: LaunchError("planted")}, usable=False)
    configs = [TileConfig(4, 8, 1), TileConfig(4, 16, 1)]
    sweep = planted_sweep(target)
    found = sweep.run(configs)
    records = [next(found)]
    with pytest.raises(LaunchError, match="--resume"):
        next(found)
    assert [record.status for record in records] == ["launch_failed"]
    # The next process begins behind it.
    (after,) = planted_sweep(PlantedTarget()).run(configs, done=sweep.kept(configs, records))
    assert (after.status, after.config["tk"]) == ("ok", 16)


def test_wrong_results_end_the_command_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    verify = emulator.mla_verify

    def broken(*arguments: Any, **keywords: Any) -> Any:
        out, lse = verify(*arguments, **keywords)
        out[0, 0, 0] += 1
        return out, lse

    monkeypatch.setattr(emulator, "mla_verify", broken)
    result = run(*SMALL, "--tk", "8", "--nsplit", "1")
    assert result.exit_code == 1
    assert "wrong: " in result.stdout
    assert "out[0, 0, 0] is" in result.stdout
    assert "repeat with: mlaflash sweep" in result.stdout


def record_of(**fields: Any) -> Record:
    (record,) = planted_sweep(PlantedTarget()).run([TileConfig(4, 8, 1)])
    return dataclasses.replace(record, **fields)


def test_rank_is_by_time_where_there_is_one() -> None:
    slow, fast = record_of(median_us=9.0, kv_bytes=1), record_of(median_us=8.0, kv_bytes=2)
    assert rank([slow, record_of(status="wrong", median_us=1.0), fast]) == [fast, slow]


def test_rank_without_a_time_is_by_spilling_then_bytes_then_memory_then_registers() -> None:
    best = record_of(median_us=None, kv_bytes=10, spill_bytes=0, shared_bytes=5, registers=7)
    changes: list[dict[str, Any]] = [
        {"registers": 8},
        {"shared_bytes": 6, "registers": 1},
        {"kv_bytes": 11, "spill_bytes": 0, "shared_bytes": 1, "registers": 1},
        {"kv_bytes": None},
        {"spill_bytes": 4, "kv_bytes": 1, "shared_bytes": 1, "registers": 1},
        {"spill_bytes": 8, "kv_bytes": 1, "shared_bytes": 1, "registers": 1},
    ]
    ordered = [best, *(dataclasses.replace(best, **change) for change in changes)]
    assert rank(reversed(ordered)) == ordered


# --- what is tried, and what it reads --------------------------------------------------------------------------------


def test_a_kernel_that_is_added_is_swept_with_its_own_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Other(NaiveConfig):
        rows: int = 16

        def as_dict(self) -> dict[str, int]:
            return {"rows": self.rows}

    axis = space.Axis("rows", (16, 32), (16,), "Rows of a block.")
    monkeypatch.setitem(space.SPACES, "other", space.Space(Other, (axis,)))
    other = space.SPACES["other"]
    assert [config.as_dict() for config in other.candidates("gpu", {})] == [{"rows": 16}, {"rows": 32}]
    assert [config.as_dict() for config in other.candidates("emulator", {"ht": [1]})] == [{"rows": 16}]
    assert other.change(Other(), {"rows": 64, "ht": 2}).as_dict() == {"rows": 64}
    assert "rows" in [found.name for found in space.all_axes()]
    assert space.swept_kernels() == ["tile", "mma_narrow", "mma_wide", "mma_roles", "other"]
    assert space.swept_kernels("float32", ["ht", "nsplit"]) == ["tile"]
    assert space.swept_kernels("bfloat16", ["stages"]) == ["mma_narrow", "mma_wide", "mma_roles"]
    with pytest.raises(InvalidArgumentError, match="--rows"):
        space.check_axes(["tile"], ["rows"])


def test_the_splits_that_check_merges_cover_all_forms_of_combine() -> None:
    from mlaflash import combine

    forms = {tuple(combine.defines(splits).items()) for splits in range(2, combine.MAX_SPLITS + 1)}
    assert {tuple(combine.defines(splits).items()) for splits in combine.merge_splits()} == forms
    assert len(combine.merge_splits()) == len(forms)


@pytest.mark.parametrize("mask", ["causal", "none", "chain", "tree", "dense"])
@pytest.mark.parametrize("config", [NaiveConfig(), TileConfig(4, 8, 1), TileConfig(4, 8, 3)], ids=str)
def test_the_bytes_that_a_gpu_is_said_to_load_are_those_that_the_emulator_counts(
    mask: Any, config: KernelConfig
) -> None:
    case = dataclasses.replace(CASE, name=mask, mask=mask, q_lens=(3, 2), kv_lens=(17, 1), heads=6)
    inputs = build(case, 1)
    result = EmulatorTarget("sm_120").verify(inputs, config.kernel, config, 0)
    assert result.kv_bytes == requested_kv_bytes(config, case, visible_tokens(inputs, case))


# --- timing, as far as it goes without a GPU -----------------------------------------------------------------------


def test_timing_statistics() -> None:
    timing = Timing(tuple(float(value) for value in (5, 1, 2, 3, 4)))
    assert (timing.median_us, timing.p10_us, timing.p90_us) == (3.0, 1.4, 4.6)


def test_measure_refuses_no_samples() -> None:
    with pytest.raises(InvalidArgumentError, match="samples is 0"):
        measure(lambda: None, Device.for_arch("sm_90"), samples=0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_the_flush_kernel_compiles(arch: str) -> None:
    compiled = compile_sources(read("flush", kernel_root() / "lab"), {}, arch)
    assert compiled.entry == "mlaflash_flush"
    assert compiled.spill_bytes == 0
