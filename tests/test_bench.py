"""Bench without a GPU: inputs and their reference, records, predictions, comparisons, figures."""

import csv
import dataclasses
import io
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from mlaflash import emulator, oracle
from mlaflash.commands.main import main
from mlaflash.cost import choose
from mlaflash.device import CARDS, Device
from mlaflash.errors import InvalidArgumentError, LaunchError, UnsupportedError
from mlaflash.jit.cache import open_cache
from mlaflash.lab import bench as lab
from mlaflash.lab import ceilings as ceilings_module
from mlaflash.lab import environment
from mlaflash.lab.ceilings import CEILINGS_SUFFIX, Ceilings, known_ceilings
from mlaflash.lab.records import BenchRecord, read_records, to_csv, to_document
from mlaflash.lab.runner import Measured, Step, plan_step
from mlaflash.lab.suites import SUITES, suite
from mlaflash.lab.timing import Timing
from mlaflash.lab.workload import PERIOD, Workload, block
from mlaflash.schedule import Launch
from mlaflash.shape import VerifyShape

CEILINGS = Ceilings(read_gb_s=4000.0, mma_tflop_s=600.0, fma_tflop_s=50.0, shared_tb_s=25.0)
SMALL = VerifyShape(num_heads=4, q_len=3, kv_len=40, batch=2, page_size=4, mask="tree")
H200 = Device.for_card("h200")


def run(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(main, arguments, env={"COLUMNS": "200", **environment}, prog_name="mlaflash")


class EmulatorRunner:
    """Results are the emulator's; it stands in for the GPU's clock alone."""

    def __init__(self, us: float = 20.0, spoil: float = 0.0, error: str = "") -> None:
        self.device = H200
        self._us, self._spoil, self._error = us, spoil, error
        self._results: dict[Step, Any] = {}
        self.loaded: list[tuple[int, ...]] = []
        self.timed: list[tuple[tuple[int, ...], int]] = []

    def build(self, launches: Iterable[Launch], progress: Any) -> None:
        assert all(launch.kernel for launch in launches)

    def load(self, workload: Workload) -> dict[str, Any]:
        self.loaded.append(workload.kv_lens)
        return workload.host_arguments()

    def measure(self, loaded: dict[str, Any], step: Step, samples: int) -> Measured:
        self.timed.append((step.kv_lens, samples))
        if self._error:
            raise LaunchError(self._error)
        schedule = plan_step(step, self.device)
        if step not in self._results:
            self._results[step] = emulator.mla_verify(**loaded, kernel=step.kernel, tiles=schedule.config)
        out, lse = self._results[step]
        heads = step.shape.num_heads
        before = sum(taken for lens, taken in self.timed[:-1] if lens == step.kv_lens)
        timing = Timing(tuple(self._us + before + i for i in range(samples)))
        out = (out.astype(np.float32) + self._spoil).reshape(-1, heads, 512)
        return Measured(schedule, timing, timing, 12.0, out, lse.reshape(-1, heads))


def bench(runner: Any, steps: list[Step]) -> list[BenchRecord]:
    made = lab.Bench(runner, CEILINGS, seed=0, samples=3, budget=None, command=lambda step: f"repeat {step.kv_lens}")
    return list(made.run(steps))


@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        replace(SMALL, mask="causal", new_kv=True, soft_cap=True),
        replace(SMALL, mask="none", split_kv=True, page_size=1, dtype="float16"),
        replace(SMALL, kv_dtype="float8_e4m3", split_kv=True),
        replace(SMALL, kv_dtype="fp8_ds_mla", new_kv=True),
        replace(SMALL, kv_len=PERIOD + 5, batch=1, q_len=1, num_heads=2, page_size=64),
    ],
    ids=["tree", "new-kv", "split-kv", "e4m3", "ds-mla", "longer-than-the-block"],
)
def test_the_reference_of_a_few_rows_is_the_oracle(shape: VerifyShape) -> None:
    lens = (shape.kv_len,) if shape.batch == 1 else (shape.kv_len, shape.kv_len - 3)
    workload = Workload(shape, lens, seed=5)
    out, lse = oracle.mla_verify(**workload.host_arguments())
    expected = workload.expected()
    rows = expected.tokens, expected.heads
    np.testing.assert_allclose(out.reshape(-1, shape.num_heads, 512)[rows], expected.out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse.reshape(-1, shape.num_heads)[rows], expected.lse, rtol=1e-5)
    assert expected.tokens.max() == len(lens) * shape.q_len - 1


def test_a_request_without_tokens_has_an_empty_reference() -> None:
    expected = Workload(replace(SMALL, mask="causal"), (40, 0), seed=0).expected()
    assert (expected.out == 0).all()
    assert (expected.lse == -np.inf).all()


def test_inputs_follow_from_the_seed() -> None:
    first, again, other = (Workload(SMALL, (40, 40), seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.table, again.table)
    np.testing.assert_array_equal(first.q.view(np.uint16), again.q.view(np.uint16))
    assert (first.q != other.q).any()
    assert sorted(first.table.reshape(-1)) != list(first.table.reshape(-1))
    assert not block("bfloat16", 1).flags.writeable


def test_a_record_has_every_figure() -> None:
    (record,) = bench(EmulatorRunner(), [Step(SMALL, (40, 40))])
    assert (record.status, record.reason) == ("ok", "")
    assert (record.median_us, record.p10_us, record.p90_us) == (21.0, 20.2, 21.8)
    assert (record.graph_us, record.host_us) == (21.0, 12.0)
    num_bytes = 2 * 40 * 1152 + 2 * 12 * (1152 + 1024 + 4)
    assert record.tb_s == pytest.approx(num_bytes / 21e-6 / 1e12)
    assert record.of_read == pytest.approx(num_bytes / 21e-6 / 4000e9)
    assert record.tflop_s == pytest.approx(2 * 1088 * 2 * 12 * 40 / 21e-6 / 1e12)
    assert record.of_mma == pytest.approx(record.tflop_s / 600)
    assert (record.roof, record.floor_us) == ("memory", pytest.approx(num_bytes / 4000e9 * 1e6))
    assert record.max_rel is not None
    assert record.tolerance is not None
    assert 0 < record.max_rel < record.tolerance
    assert record.predicted_us == pytest.approx(choose(12, 2, 40, H200).predicted_us)
    assert record.predicted_from["num_sms"] == 132
    assert (record.gpu, record.seed, record.samples, record.command) == ("H200", 0, 3, "repeat (40, 40)")
    assert {"cupy", "driver", "nvrtc", "sources"} <= record.versions.keys()
    assert record.problem["kv_lens"] == [40]


def test_samples_of_a_step_lie_apart_and_its_cache_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches beyond what may stay on the GPU are made again in every pass."""
    first, second = Step(SMALL, (40, 40)), Step(SMALL, (8, 20))
    runner = EmulatorRunner()
    made = lab.Bench(runner, CEILINGS, seed=0, samples=7, budget=None, command=str)
    assert [record.samples for record in made.run([first, second])] == [7, 7]
    assert runner.timed == [(step.kv_lens, n) for n in (2, 2, 1, 1, 1) for step in (first, second)]
    assert runner.loaded == [first.kv_lens, second.kv_lens]
    monkeypatch.setattr(lab, "_KEPT_BYTES", Workload(SMALL, (40, 40), 0).cache_bytes)
    runner = EmulatorRunner()
    assert len(bench(runner, [first, second])) == 2
    assert runner.loaded == [first.kv_lens, *[second.kv_lens] * 3]


def test_passes_end_with_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first passes gave is recorded."""
    clock = iter(range(1000))
    monkeypatch.setattr(lab.time, "monotonic", lambda: next(clock))
    made = lab.Bench(EmulatorRunner(), CEILINGS, seed=0, samples=5, budget=None, command=str)
    records = list(made.run([Step(SMALL, (40, 40)), Step(SMALL, (8, 20))], seconds=3.5))
    assert [(record.status, record.samples) for record in records] == [("ok", 2), ("ok", 1)]


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3", "fp8_ds_mla"])
def test_caches_of_8_bits_are_timed_and_predicted(kv_dtype: str) -> None:
    (record,) = bench(EmulatorRunner(), [Step(replace(SMALL, kv_dtype=kv_dtype), (40, 40))])
    assert (record.status, record.reason) == ("ok", "")
    assert record.predicted_us == pytest.approx(choose(12, 2, 40, H200, kv_dtype=kv_dtype).predicted_us)
    assert record.problem["kv_dtype"] == kv_dtype
    arguments = ("bench", "--predict", "rtx-5090", "--suite", "verify", "--kv-dtype", kv_dtype, "--json")
    records = json.loads(run(*arguments).stdout)["records"]
    program, *again = records[1]["command"].split()
    assert json.loads(run(*again, "--json").stdout)["records"][0]["predicted_us"] == records[1]["predicted_us"]
    assert program == "mlaflash"


def test_a_wrong_result_is_told() -> None:
    (record,) = bench(EmulatorRunner(spoil=0.1), [Step(SMALL, (40, 40))])
    assert record.status == "wrong"
    assert "off by" in record.reason


def test_a_step_that_fails_leaves_the_others() -> None:
    records = bench(EmulatorRunner(error="no memory"), [Step(SMALL, (40, 40)), Step(SMALL, (8, 8))])
    assert [(record.status, record.reason, record.median_us) for record in records] == [
        ("failed", "no memory", None)
    ] * 2


def test_float32_has_one_roof_and_no_prediction() -> None:
    (record,) = bench(EmulatorRunner(), [Step(replace(SMALL, dtype="float32", kv_len=8), (8, 8))])
    assert record.status == "ok"
    assert (record.kernel, record.of_mma, record.predicted_us, record.roof) == ("tile", None, None, "memory")


def test_suites_have_the_problems_that_they_promise() -> None:
    kimi = suite("kimi")
    assert len(suite("verify")) == 21
    assert len(kimi) == 4 * 6 * 5
    assert {shape.page_size for shape in kimi} == {1}
    assert {shape.kv_len - shape.q_len for shape in kimi} == {4096, 16384, 65536, 131072, 200000}
    assert all(len(set(map(repr, suite(name)))) == len(suite(name)) for name in SUITES)
    with pytest.raises(InvalidArgumentError, match="verify, kimi"):
        suite("all")


def test_records_survive_json_and_csv(tmp_path: Path) -> None:
    records = bench(EmulatorRunner(), [Step(SMALL, (40, 40)), Step(SMALL, (8, 20))])
    path = tmp_path / "a.json"
    path.write_text(json.dumps(to_document(records)))
    assert read_records(path) == records
    path.write_text(json.dumps({"bench": to_document(records)}))
    assert read_records(path) == records
    rows = list(csv.DictReader(io.StringIO(to_csv(records))))
    assert [float(row["median_us"]) for row in rows] == [21.0, 21.0]
    assert json.loads(rows[1]["problem"])["kv_lens"] == [8, 20]
    assert rows[0].keys() == {field.name for field in dataclasses.fields(BenchRecord)}


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": "mlaflash bench", "records": [{}]}'])
def test_files_that_are_no_bench_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    result = run("bench", "--compare", str(path), str(path))
    assert result.exit_code == 2
    assert str(path) in result.stderr


def test_compare_pairs_the_same_problems(tmp_path: Path) -> None:
    steps = [Step(SMALL, (40, 40)), Step(SMALL, (8, 20))]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, us, some in zip(files, (20.0, 41.0), (steps, steps[1:]), strict=True):
        path.write_text(json.dumps(to_document(bench(EmulatorRunner(us), some))))
    result = run("bench", "--compare", *map(str, files), "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["geometric_mean"] == found["furthest"] == pytest.approx(2.0)
    assert [problem["problem"]["kv_lens"] for problem in found["problems"]] == [[8, 20]]
    shown = run("bench", "--compare", *map(str, files)).stdout
    assert "2.000 in the geometric mean" in shown
    files[1].write_text(json.dumps(to_document(bench(EmulatorRunner(), [Step(SMALL, (9, 9))]))))
    assert run("bench", "--compare", *map(str, files)).exit_code == 2


@pytest.mark.parametrize("card", CARDS)
def test_predictions_are_labelled_and_state_their_inputs(card: str) -> None:
    result = run("bench", "--predict", card, "--suite", "verify", "--json")
    assert result.exit_code == 0, result.stderr
    records = json.loads(result.stdout)["records"]
    assert len(records) == 21
    for record in records:
        assert (record["status"], record["median_us"]) == ("predicted", None)
        assert record["predicted_us"] > record["floor_us"]
        assert record["predicted_limit"]
        assert {"num_sms", "dram_gbps", "sm_ghz", "mma_clocks", "tile_clocks", "kv_mb"} <= record[
            "predicted_from"
        ].keys()
        assert record["command"].endswith(f"--predict {card}")
    program, *arguments = records[5]["command"].split()
    (again,) = json.loads(run(*arguments, "--json").stdout)["records"]
    assert (program, again["predicted_us"]) == ("mlaflash", records[5]["predicted_us"])
    assert "PREDICTED" in run("bench", "--predict", card).stdout


def test_a_card_with_half_the_tensor_cores_is_bound_by_them() -> None:
    (record,) = json.loads(
        run("bench", "--predict", "rtx-5090", "--q-len", "16", "--kv-len", "65536", "--json").stdout
    )["records"]
    assert record["predicted_limit"] == "tensor cores"


def test_a_kernel_of_which_the_model_knows_nothing_is_refused() -> None:
    result = run("bench", "--predict", "h200", "--kernel", "tile")
    assert result.exit_code == 2
    assert "tile" in result.stderr


def test_constants_are_those_asked_for() -> None:
    (record,) = json.loads(run("bench", "--predict", "h200", "--kernel", "mma_wide", "--nsplit", "7", "--json").stdout)[
        "records"
    ]
    assert (record["kernel"], record["num_splits"], record["config"]["nsplit"]) == ("mma_wide", 7, 7)
    assert "--kernel mma_wide" in record["command"]
    assert "--nsplit 7" in record["command"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--json", "--csv", "--predict", "h200"),
        ("--suite", "verify", "--heads", "8", "--predict", "h200"),
        ("--nsplit", "4", "--predict", "h200"),
        ("--kernel", "naive", "--nsplit", "4", "--predict", "h200"),
        ("--predict", "h100"),
    ],
)
def test_options_that_do_not_go_together_are_usage_errors(arguments: tuple[str, ...]) -> None:
    assert run("bench", *arguments).exit_code == 2


def test_without_a_gpu_it_ends_with_status_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", None)
    result = run("bench")
    assert result.exit_code == 3
    assert "--predict" in result.stderr


def test_the_table_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlaflash.commands.bench.GpuRunner", lambda budget: EmulatorRunner())
    monkeypatch.setattr("mlaflash.commands.bench.known_ceilings", lambda device, anew: CEILINGS)
    arguments = ("bench", "--q-len", "2", "--kv-len", "33", "--heads", "4", "--samples", "3")
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "4,000 GB/s" in result.stdout
    assert "21.0" in result.stdout
    assert "off in the median" in result.stdout
    (record,) = json.loads(run(*arguments, "--json").stdout)["records"]
    _program, *repeated = record["command"].split()
    assert json.loads(run(*repeated, "--json").stdout)["records"] == [record]
    assert run(*arguments, "--csv").stdout.startswith("status,reason,problem")
    monkeypatch.setattr("mlaflash.commands.bench.GpuRunner", lambda budget: EmulatorRunner(spoil=1.0))
    assert run(*arguments).exit_code == 1


def test_figures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.svg"
    result = run("bench", "--suite", "kimi", "--predict", "rtx-5090", "--plot", str(path), "--json")
    assert result.exit_code == 0, result.stderr
    assert "PREDICTED" in path.read_text()
    assert run("bench", "--predict", "rtx-5090", "--plot", str(tmp_path / "bench.nothing")).exit_code == 2


def test_the_table_of_the_readme_is_made_of_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import readme

    assert "<!-- bench-table -->" in readme.README.read_text()
    (record,) = bench(EmulatorRunner(), [Step(SMALL, (40, 40))])
    record = dataclasses.replace(record, kernel="mma_narrow", num_splits=3)
    head, _, _, _, row, end = readme.table([record]).split("\n")
    assert "4,000 GB/s" in head
    assert row.startswith("| 2, 3, 4, 40 | mma_narrow x 3 | 21.0 (20.2 to 21.8) | 21.0 |")
    assert end == ""
    with pytest.raises(SystemExit, match="not measured"):
        readme.table([dataclasses.replace(record, status="predicted")])


def test_plotting_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("bench", "--predict", "rtx-5090", "--plot", str(tmp_path / "bench.svg"))
    assert result.exit_code == 1
    assert "mlaflash[plot]" in result.stderr


def test_ceilings_are_measured_once_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLAFLASH_CACHE_DIR", str(tmp_path))
    measured: list[str] = []

    def measure(device: Device) -> Ceilings:
        measured.append(device.name)
        return CEILINGS

    monkeypatch.setattr(ceilings_module, "measure_ceilings", measure)
    monkeypatch.setattr(ceilings_module, "driver_version", lambda: "13.0")
    other = replace(H200, name="other")
    assert [known_ceilings(device) for device in (H200, H200, other)] == [CEILINGS] * 3
    assert measured == ["H200", "other"]
    known_ceilings(H200, anew=True)
    assert measured == ["H200", "other", "H200"]
    cache = open_cache(suffix=CEILINGS_SUFFIX)
    assert cache is not None
    for entry in cache.entries():
        cache.put(entry.key, b'{"read_gb_s": -1}', entry.info)
    known_ceilings(H200)
    assert measured[3:] == ["H200"]
    assert run("cache", "clear").exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_the_revision_is_that_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?|[\w.-]+-g[0-9a-f]{7,}(-dirty)?", environment.revision() or "0000000")
    monkeypatch.setattr(environment.mlaflash, "__file__", str(tmp_path / "mlaflash/__init__.py"))
    assert environment.revision() is None
    (tmp_path / ".git").mkdir()
    assert environment.revision() is None


def test_unknown_cards_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="rtx-5090"):
        Device.for_card("rtx-3090")
