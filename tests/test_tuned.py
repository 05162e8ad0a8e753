"""Tables of tuned choices: lookups, files, tuning without a GPU's clock, and what a sweep passes over or stops."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from test_sweep import PlantedTarget, planted_sweep

from mlaflash import cost, tuned
from mlaflash.commands.main import main
from mlaflash.device import Device, apply_budget
from mlaflash.errors import InvalidArgumentError, LaunchError
from mlaflash.lab import tune as lab
from mlaflash.lab.inputs import Case
from mlaflash.lab.runner import Attempt, Step
from mlaflash.lab.space import SPACES
from mlaflash.lab.sweep import HOPELESS, restrict
from mlaflash.lab.timing import Timing
from mlaflash.lab.workload import Workload
from mlaflash.mma_tiles import NARROW, ROWS_32, ROWS_64, ROWS_64_ROLES, MmaWideConfig
from mlaflash.schedule import Launch, mma_choice
from mlaflash.shape import VerifyShape, call_launches
from mlaflash.tiles import TileConfig

H200 = apply_budget(replace(Device.for_card("h200"), name="NVIDIA H200"), "sm_120")
SMALL = VerifyShape(num_heads=4, q_len=3, kv_len=600, batch=2, page_size=16, mask="tree")
ENTRY = tuned.Entry(64, 1, 16384, 64, ROWS_32, 32, 20.0, 22.0)


def run(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(main, arguments, env={"COLUMNS": "200", **environment}, prog_name="mlaflash")


def table(*entries: tuned.Entry, device: Device = H200, is_predicted: bool = False) -> tuned.Table:
    return tuned.Table.of(device, entries, is_predicted=is_predicted, origin={"command": "none"})


@pytest.fixture
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "own.json"
    path.write_text(table(ENTRY).to_json())
    monkeypatch.setenv("MLAFLASH_TUNED", str(path))
    return path


def test_a_table_survives_its_file() -> None:
    before = table(ENTRY, replace(ENTRY, batch=4, config=ROWS_64_ROLES), is_predicted=True)
    assert tuned.Table.from_json(before.to_json(), "x") == before


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"kv_len": 16_391}, True),
        ({"kv_len": 14_000}, True),
        ({"rows": 63}, True),
        ({"page_size": 16}, True),
        ({"kv_len": 24_000}, False),
        ({"rows": 65}, False),
        ({"batch": 2}, False),
        ({"page_size": 1}, False),
    ],
)
def test_problems_share_a_class_by_tiles_half_octaves_and_pages(change: dict[str, int], same: bool) -> None:
    problem = {"rows": 64, "batch": 1, "kv_len": 16_384, "page_size": 64}
    assert (tuned.problem_class(**problem) == tuned.problem_class(**problem | change)) is same


@pytest.mark.usefixtures("own_table")
def test_a_call_takes_the_choice_of_the_users_table() -> None:
    shape = VerifyShape(num_heads=8, q_len=8, kv_len=16_391, page_size=64)
    chosen = mma_choice(shape.problem(), H200)
    assert chosen.config == ROWS_32
    assert chosen.num_splits == cost.usable_splits(32, 16_391)
    assert "measured to be best" in chosen.reasons[0]
    assert chosen.predicted_us > 0


def test_other_problems_and_gpus_take_the_cost_model(own_table: Path) -> None:
    shape = VerifyShape(num_heads=8, q_len=8, kv_len=16_384, page_size=64)
    for other, device in (
        (replace(shape, batch=3), H200),
        (shape, replace(H200, num_sms=114)),
        (shape, replace(H200, name="NVIDIA H100")),
        (shape, Device.for_card("h200")),
        (replace(shape, out_dtype="float32"), H200),
    ):
        rows, partial_bytes = other.rows, 4 if other.out_dtype else 2
        expected = cost.choose(rows, other.batch, other.kv_len, device, partial_bytes=partial_bytes)
        chosen = mma_choice(other.problem(), device)
        assert (chosen.config, chosen.num_splits) == (expected.config, expected.num_splits)
    assert mma_choice(shape.problem(), H200, row_tile=64).config.rows == 64


def test_the_variable_counts_at_the_next_choice(own_table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned.find(64, 1, 16_384, H200, 64) is not None
    monkeypatch.setenv("MLAFLASH_TUNED", "")
    assert tuned.find(64, 1, 16_384, H200, 64) is None
    monkeypatch.setenv("MLAFLASH_TUNED", str(own_table.parent / "missing.json"))
    with pytest.raises(InvalidArgumentError, match=r"missing\.json"):
        tuned.find(64, 1, 16_384, H200, 64)


def test_predictions_count_for_their_own_lengths_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.json"
    path.write_text(table(ENTRY, is_predicted=True).to_json())
    monkeypatch.setenv("MLAFLASH_TUNED", str(path))
    found = tuned.find(64, 1, 16_384, H200, 64)
    assert found is not None
    assert "predicted to be best" in found.reasons[0]
    assert tuned.find(64, 1, 16_383, H200, 64) is None


def test_a_configuration_of_a_table_is_compiled_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = MmaWideConfig(row_groups=4, column_warps=2, stages=4, lookahead=2, refill_at=3)
    path = tmp_path / "own.json"
    path.write_text(table(replace(ENTRY, config=other)).to_json())
    monkeypatch.setenv("MLAFLASH_TUNED", str(path))
    shape = VerifyShape(num_heads=8, q_len=8, kv_len=16_384, page_size=64)
    wanted = other.defines().items()
    assert any(wanted <= launch.defines.items() for launch in call_launches(shape, H200))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-5],
        lambda text: text.replace("mlaflash tuned", "mlaflash bench"),
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace('"mma_wide"', '"mma_wider"'),
        lambda text: text.replace('"row_groups": 2', '"row_groups": 3'),
        lambda text: text.replace('"stages": 4', '"stages": 8'),
        lambda text: text.replace('"num_splits"', '"splits"'),
    ],
)
def test_files_that_are_no_table_are_refused(spoil: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"own\.json"):
        tuned.Table.from_json(spoil(table(ENTRY).to_json()), "own.json")


def test_the_shipped_tables_are_read_and_unlike() -> None:
    shipped = tuned.tables(None)
    assert {(t.gpu, t.is_predicted) for t in shipped} >= {("RTX PRO 6000 Blackwell", True), ("RTX 5090", True)}
    assert len({(t.gpu, t.num_sms, t.shared_per_block) for t in shipped}) == len(shipped)
    for each in shipped:
        assert len({entry.key for entry in each.entries}) == len(each.entries)


@pytest.mark.parametrize("card", ["rtx-pro-6000", "rtx-5090"])
def test_shipped_predictions_are_those_of_the_cost_model(card: str, tmp_path: Path) -> None:
    """Made anew by: mlaflash sweep --suite kimi --suite verify --predict CARD --save-best FILE."""
    path = tmp_path / "new.json"
    result = run("sweep", "--suite", "kimi", "--suite", "verify", "--predict", card, "--save-best", str(path))
    assert result.exit_code == 0, result.stderr
    shipped = (Path(tuned.__file__).parent / f"{card.replace('-', '_')}.json").read_bytes()
    assert tuned.Table.from_json(shipped, "shipped").entries == tuned.read(path).entries


class Clock:
    """A runner whose results are exact and whose times are planted."""

    def __init__(self, times: dict[tuple[str, int], float], *, fails: str = "", wrong: str = "") -> None:
        self.device = H200
        self._times, self._fails, self._wrong = times, fails, wrong
        self.samples: list[int] = []

    def build(self, launches: Iterable[Launch], progress: Any) -> None:
        self.built = {launch.kernel for launch in launches}

    def load(self, workload: Workload) -> Workload:
        if self._fails == "load":
            raise LaunchError("no memory")
        return workload

    def attempt(self, loaded: Workload, step: Step, samples: int, hopeless_us: float) -> Attempt:
        assert step.config is not None
        if step.kernel == self._fails:
            raise LaunchError("planted")
        us = self._times.get((step.config.kernel, step.config.rows), 100.0)
        taken = samples if us < hopeless_us else 3
        self.samples.append(taken)
        expected, shape = loaded.expected(), step.shape
        out = np.zeros((len(loaded.kv_lens) * shape.q_len, shape.num_heads, 512))
        lse = np.zeros(out.shape[:2])
        out[expected.tokens, expected.heads] = expected.out + (step.kernel == self._wrong)
        lse[expected.tokens, expected.heads] = expected.lse
        return Attempt(Timing((us,) * taken), out, lse)

    def measure(self, workload: Workload, step: Step, samples: int) -> Any:
        raise NotImplementedError


def tune(runner: Any, **options: Any) -> list[lab.Tuned]:
    return list(lab.tune(runner, [Step(SMALL, (600, 600))], seed=0, samples=7, **options))


def test_tuning_finds_the_fastest_and_leaves_the_hopeless_alone() -> None:
    clock = Clock({("mma_narrow", 16): 20.0, ("mma_wide", 32): 15.0, ("mma_wide", 64): 90.0})
    (found,) = tune(clock)
    chosen = cost.choose(12, 2, 600, H200)
    assert (found.candidates[0].config, found.candidates[0].num_splits) == (chosen.config, chosen.num_splits)
    assert found.best is not None
    assert (found.best.config, found.best.median_us) == (ROWS_32, 15.0)
    assert found.regret == pytest.approx(20 / 15 - 1)
    assert set(clock.samples) == {3, 7}
    assert clock.built >= {"mma_narrow", "mma_wide", "combine"}
    assert any("after 3 timings" in candidate.reason for candidate in found.candidates)
    entry = found.entry()
    assert entry is not None
    assert (entry.rows, entry.batch, entry.kv_len, entry.us, entry.model_us) == (12, 2, 600, 15.0, 20.0)
    assert lab.regrets([found]) == (found.regret, found.regret)
    assert found.is_worth_an_entry


def test_where_the_model_is_right_but_for_noise_a_table_needs_no_entry() -> None:
    (found,) = tune(Clock({("mma_narrow", 16): 20.0, ("mma_wide", 32): 19.7}))
    assert found.regret == pytest.approx(20 / 19.7 - 1)
    assert not found.is_worth_an_entry
    new = [replace(ENTRY, batch=4)]
    assert lab.merged([ENTRY, replace(ENTRY, batch=2)], new, {ENTRY.key}) == [replace(ENTRY, batch=2), *new]


def test_what_is_wrong_or_fails_is_never_the_best() -> None:
    (found,) = tune(Clock({("mma_narrow", 16): 5.0}, wrong="mma_narrow"))
    assert found.best is not None
    assert found.best.config.kernel != "mma_narrow"
    assert found.regret is None
    assert "wrong: " in found.candidates[0].reason
    (found,) = tune(Clock({}, fails="mma_narrow"))
    assert (found.candidates[0].median_us, found.candidates[0].reason) == (None, "planted")
    (found,) = tune(Clock({}, fails="load"))
    assert (found.best, found.entry(), len(found.candidates)) == (None, None, 1)


def test_no_problem_is_begun_after_the_time_limit() -> None:
    assert tune(Clock({}), seconds=-1.0) == []


def test_every_candidate_fits_and_is_tried_once() -> None:
    tried = lab.candidates(Step(SMALL, (600, 600)), H200)
    assert len({(config, splits) for config, splits, _ in tried}) == len(tried)
    assert all(config.shared_bytes() <= H200.shared_per_block for config, _, _ in tried)
    assert all(splits == cost.usable_splits(splits, 600) for _, splits, _ in tried)


def test_a_suite_is_tuned_into_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlaflash.commands.tune.make_runner", lambda budget: Clock({("mma_wide", 32): 15.0}))
    monkeypatch.setattr("mlaflash.commands.bench.suite", lambda name: [SMALL])
    path = tmp_path / "table.json"
    arguments = ("sweep", "--suite", "verify", "--save-best", str(path))
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "in the median" in result.stdout
    assert [entry.config for entry in tuned.read(path).entries] == [ROWS_32]
    before = tuned.read(path)
    more = [ENTRY, replace(before.entries[0], us=99.0)]
    path.write_text(table(*more).to_json())
    (line,) = run(*arguments, "--json").stdout.splitlines()
    assert json.loads(line)["candidates"][0]["median_us"] is not None
    assert [entry.us for entry in tuned.read(path).entries] == [15.0, 20.0]
    path.write_text(table(ENTRY, device=Device.for_card("h200")).to_json())
    assert run(*arguments).exit_code == 2
    monkeypatch.setattr("mlaflash.commands.tune.make_runner", lambda budget: Clock({}, fails="mma_wide"))
    assert run("sweep", "--suite", "verify").exit_code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--suite", "verify", "--q-len", "8"),
        ("--suite", "verify", "--tk", "8"),
        ("--predict", "rtx-5090"),
        ("--time-limit", "3"),
        ("--suite", "verify", "--predict", "rtx-5090"),
        ("--suite", "verify", "--predict", "rtx-5090", "--save-best", "x.json", "--kv-dtype", "float8_e4m3"),
        ("--device", "emulator", "--budget", "sm_120"),
        ("--device", "emulator", "--save-best", "x.json"),
    ],
)
def test_options_that_do_not_go_together_are_usage_errors(arguments: tuple[str, ...]) -> None:
    assert run("sweep", *arguments).exit_code == 2


def test_what_cannot_be_of_use_is_passed_over_unless_it_was_asked_for() -> None:
    case = Case(name="x", q_lens=(8,), kv_lens=(640,), heads=8, sm_scale=0.1)
    device = Device.for_arch("sm_120")
    configs = list(SPACES["tile"].candidates("gpu", {}))
    kept, passed_over = restrict(configs, device, case, ())
    assert kept
    assert all(config.shared_bytes("bfloat16") <= 101_376 and config.as_dict()["nsplit"] <= 10 for config in kept)
    assert len(kept) + passed_over.total() == len(configs)
    assert len(passed_over) == 2
    assert restrict(configs, device, case, ("ht", "nsplit")) == (configs, {})
    result = run("sweep", "--device", "emulator", "--heads", "1", "--q-len", "1", "--kv-len", "8", "--kernel", "tile",
                 "--ht", "1", "--tk", "4")  # fmt: skip
    assert "3 more have splits" not in result.stdout
    assert "1 more have splits of less than 64 tokens: passed over" in result.stdout


def test_a_hopeless_candidate_is_timed_a_few_times_only() -> None:
    target = PlantedTarget()
    first, second, third = planted_sweep(target).run([TileConfig(4, tk, 1) for tk in (32, 16, 4)])
    assert (first.reason, first.median_us) == ("", pytest.approx(100 / 32 + 5, abs=0.01))
    assert 100 / 16 / (100 / 32 + 5) < HOPELESS < 100 / 4 / (100 / 32 + 5)
    assert (second.reason, second.median_us) == ("", pytest.approx(100 / 16 + 5))
    assert third.status == "ok"
    assert "after 3 timings" in third.reason
    assert third.median_us == 100 / 4 + 1
    assert target.timed == [32, 16, 16, 4]


def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.svg"
    result = run("sweep", "--device", "emulator", "--kv-len", "20", "--q-len", "1", "--heads", "4", "--ht", "2,4",
                 "--tk", "8", "--nsplit", "1", "--kernel", "tile", "--plot", str(path))  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "NO TIMING" in path.read_text()


def test_shipped_configurations_are_among_those_that_calls_compile() -> None:
    known = {NARROW, ROWS_32, ROWS_64, ROWS_64_ROLES} | {c.config for c in cost.ROW_CLASSES}
    assert {entry.config for each in tuned.tables(None) for entry in each.entries} <= known
