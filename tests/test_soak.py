"""The soak itself: right and flat where all is well, and it notices a wrong result, an error, and memory that grows."""

from __future__ import annotations

import itertools
import json
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from mlaflash import emulator
from mlaflash.commands.main import main
from mlaflash.errors import LaunchError
from mlaflash.lab import soak as lab
from mlaflash.lab.fuzz import Place
from mlaflash.lab.plan_inputs import Build
from mlaflash.lab.soak import Memory, Outcome
from mlaflash.mma_tiles import NARROW

SECONDS = 2.0
MIB = 1 << 20


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Where time goes on by each look at the clock: a slow machine makes no fewer calls."""
    ticks = itertools.count()
    monkeypatch.setattr(lab, "time", SimpleNamespace(monotonic=lambda: 0.03 * next(ticks)))
    return Place("emulator")


soak = partial(lab.soak, builds=(Build(NARROW),), check_every=2)


def test_it_ends_in_time() -> None:
    soak(Place("emulator"), 0, 0.01)  # compiles
    begin = time.monotonic()
    soak(Place("emulator"), 0, 1.0)
    assert time.monotonic() - begin < 6


def test_a_soak_is_right_and_flat(place: Place) -> None:
    outcome = soak(place, 1, SECONDS)
    assert outcome.passed, (outcome.findings, outcome.complaints())
    assert outcome.growth().keys() == {"host"}  # an emulator has no other
    calls = outcome.calls
    assert calls["checked"] == (calls["replay"] + calls["run"] + calls["call"]) // 2 > 3
    assert calls["capture"] >= calls["plan"] >= 2 * lab.LEAST_ROUNDS
    assert min(calls[kind] for kind in ("replay", "run", "call")) > 0


@pytest.mark.parametrize("kind", ["plan", "call"])
def test_a_wrong_result_is_a_finding(kind: str, place: Place) -> None:
    class Plan(emulator.VerifyPlan):
        def run(self, *arrays: Any, **given: Any) -> Any:
            result = super().run(*arrays, **given)
            result[0][...] += 1
            return result

    class Calls:
        pack_mask = staticmethod(emulator.pack_mask)

        @staticmethod
        def mla_verify(**given: Any) -> Any:
            out, lse = emulator.mla_verify(**given)
            return out, lse + 1

    if kind == "plan":
        place.plan = Plan
    else:
        place.calls = Calls
    outcome = soak(place, 2, SECONDS, check_every=1)
    assert not outcome.passed
    wanted = ("replay of ", "run of ") if kind == "plan" else ("call of ",)
    assert outcome.findings
    assert all(any(name in finding for name in wanted) for finding in outcome.findings)
    assert all("kv_lens" in finding and ", expected " in finding for finding in outcome.findings)


def test_an_error_is_a_finding_and_the_end(place: Place) -> None:
    class Plan(emulator.VerifyPlan):
        def run(self, *arrays: Any, **given: Any) -> Any:
            raise LaunchError("the driver refused")

    place.plan = Plan
    outcome = soak(place, 3, SECONDS)
    assert len(outcome.findings) == 1
    assert "LaunchError: the driver refused" in outcome.findings[0]
    assert not outcome.passed


def test_a_plan_that_leaves_memory_behind_is_noticed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    class Plan(emulator.VerifyPlan):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            kept.append(np.ones(12 * MIB, np.uint8))  # far above what a busy host gives back meanwhile

    place.plan = Plan
    monkeypatch.setattr(lab, "LIMITS", lab.LIMITS | {"host": 8 * MIB})
    outcome = soak(place, 4, SECONDS)
    assert outcome.findings == []
    (complaint,) = outcome.complaints()
    assert "host memory has grown by" in complaint
    assert not outcome.passed


def flat(count: int = 9) -> list[Memory]:
    return [Memory(1000, 50 * MIB, 80 * MIB + 1000 * (number % 3)) for number in range(count)]


@pytest.mark.parametrize(
    ("name", "grown", "is_noticed"),
    [("pool", 1, True), ("device", 32 * MIB, False), ("device", 33 * MIB, True), ("host", 33 * MIB, True)],
)
def test_what_counts_as_growth(name: str, grown: int, is_noticed: bool) -> None:
    samples = [sample._replace(**{name: getattr(sample, name) + grown * (i > 4)}) for i, sample in enumerate(flat())]
    complaints = Outcome(samples=samples).complaints()
    assert [text.split()[0] for text in complaints] == [name] * is_noticed


def test_what_comes_and_goes_is_no_growth() -> None:
    samples = flat()
    for at in (1, 4, 7):
        samples[at] = Memory(5 * MIB, 500 * MIB, 500 * MIB)
    assert Outcome(samples=samples).complaints() == []
    leaking = [Memory(1000, 50 * MIB, (80 + 8 * number) * MIB) for number in range(12)]
    assert len(Outcome(samples=leaking).complaints()) == 1


def test_what_others_use_of_the_gpu_does_not_count() -> None:
    samples = [sample._replace(device=number * 1000 * MIB) for number, sample in enumerate(flat())]
    assert len(Outcome(samples=samples).complaints()) == 1
    assert Outcome(samples=samples, judged=("pool", "host")).complaints() == []


def test_too_few_rounds_are_no_pass() -> None:
    outcome = Outcome(samples=flat(lab.LEAST_ROUNDS - 1))
    assert "memory is not judged" in outcome.complaints()[0]
    assert not outcome.passed
    assert Outcome(samples=flat(lab.LEAST_ROUNDS)).passed


def command(monkeypatch: pytest.MonkeyPatch, outcome: Outcome, *options: str) -> Result:
    asked: dict[str, Any] = {}

    def answer(place: Place, seed: int, seconds: float, **given: Any) -> Outcome:
        asked.update(given, seed=seed, seconds=seconds)
        return outcome

    monkeypatch.setattr(lab, "soak", answer)
    arguments = ["soak", "--device", "emulator", "--minutes", "0.5", "--seed", "7", "--shared", *options]
    result = CliRunner().invoke(main, arguments)
    del asked["progress"]
    assert asked == {"seed": 7, "seconds": 30.0, "check_every": 100, "is_shared": True}
    return result


def test_the_command_says_what_it_came_to(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = Outcome(samples=flat())
    outcome.calls.update(replay=1200, capture=3, checked=12)
    result = command(monkeypatch, outcome)
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert "passed: 1,200 replays of 3 graphs" in words
    assert "pool 1,000 1,000 0 0" in words
    document = json.loads(command(monkeypatch, outcome, "--json").stdout)
    assert document["passed"] is True
    assert document["calls"]["replay"] == 1200
    assert document["memory"]["device"] == {"grown": 0, "allowed": 32 * MIB}
    assert document["samples"][0] == {"pool": 1000, "device": 50 * MIB, "host": 80 * MIB}


def test_the_command_fails_on_growth_and_on_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = [sample._replace(pool=1000 + number) for number, sample in enumerate(flat())]
    result = command(monkeypatch, Outcome(samples=grown))
    assert result.exit_code == 1
    assert "FINDING pool memory has grown by 4 bytes; allowed are 0" in result.stdout
    result = command(monkeypatch, Outcome(samples=flat(), findings=["round 3, replay of x: wrong"]), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["findings"] == ["round 3, replay of x: wrong"]
