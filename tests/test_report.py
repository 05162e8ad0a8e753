"""The report of a GPU, with the emulator in its place and a planted clock."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from test_bench import CEILINGS, EmulatorRunner

from mlaflash.commands.main import main
from mlaflash.lab.presets import quick
from mlaflash.lab.records import read_records
from mlaflash.lab.target import EmulatorTarget
from mlaflash.shape import VerifyShape

STEPS = [
    VerifyShape(num_heads=4, q_len=2, kv_len=33, page_size=4, mask="tree"),
    VerifyShape(num_heads=4, q_len=1, kv_len=20),
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments], env={"COLUMNS": "120"}, prog_name="mlaflash")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    module = "mlaflash.commands.report"
    monkeypatch.setattr(f"{module}.make_runner", lambda budget: EmulatorRunner())
    monkeypatch.setattr(f"{module}.select_target", lambda *_: (EmulatorTarget("sm_90"), ""))
    monkeypatch.setattr(f"{module}.known_ceilings", lambda device, anew: CEILINGS)
    monkeypatch.setattr(f"{module}.suite", lambda name: STEPS if name == "verify" else [])
    monkeypatch.setattr(f"{module}.cases", lambda preset, kind: quick(kind)[-2:])
    return tmp_path / "mlaflash-report.json"


def test_a_report_holds_everything(emulated: Path) -> None:
    result = run()
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(emulated.read_text())
    assert found["passed"]
    assert (found["check"]["failed"], found["check"]["not_begun"]) == (0, 0)
    assert found["check"]["right"] == len(found["check"]["results"]) >= 5
    assert found["ceilings"]["read_gb_s"] == 4000
    assert found["device"]["num_sms"] == 132
    assert "versions" in found["environment"]
    assert found["steps_not_begun"] == 0
    records = read_records(emulated)
    assert [record.kv_len for record in records] == [33, 20]
    assert all(record.median_us and record.predicted_us for record in records)
    assert found["model_error"]["median"] > 0
    assert "2 of 2 steps timed" in result.stdout
    same = CliRunner().invoke(main, ["bench", "--compare", str(emulated), str(emulated)])
    assert "1.000 in the geometric mean" in same.stdout


def test_what_the_time_does_not_allow_is_said(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr("mlaflash.commands.report.time.monotonic", lambda: next(clock))
    assert run("--time-limit", "10", "--out", "short.json").exit_code == 0
    found = json.loads(Path("short.json").read_text())
    assert found["check"]["not_begun"] == 2
    assert found["steps_not_begun"] == 2
    assert found["model_error"] is None


def test_something_wrong_is_status_1(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlaflash.commands.report.make_runner", lambda budget: EmulatorRunner(spoil=1.0))
    result = run("--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["passed"]
    assert "repeat with: mlaflash bench" in result.stderr
    assert run("--out", "missing/report.json").exit_code == 2
