"""The soak on a GPU: through real graphs, and with a leak in each kind of memory."""

from __future__ import annotations

from typing import Any

import pytest

import mlaflash
from mlaflash.lab.fuzz import Place
from mlaflash.lab.plan_inputs import BUILDS, FP8_BUILDS
from mlaflash.lab.soak import soak

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The pynvml package:FutureWarning")]

SOME = (BUILDS[0], BUILDS[5], FP8_BUILDS[2])


def test_a_soak_of_seconds_is_right_and_flat() -> None:
    # Tests run side by side: what they use of the GPU says nothing here.
    outcome = soak(Place("gpu"), 0, 20.0, builds=SOME, check_every=10, is_shared=True)
    assert outcome.passed, (outcome.findings, outcome.complaints())
    assert outcome.growth().keys() == {"pool", "host"}
    assert min(outcome.calls[name] for name in ("replay", "run", "call", "checked")) > 10


def test_a_plan_that_leaves_memory_behind_is_noticed() -> None:
    import cupy

    kept: list[Any] = []

    class Plan(mlaflash.VerifyPlan):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            kept.append(cupy.empty(1, "uint8"))

    place = Place("gpu")
    place.plan = Plan
    outcome = soak(place, 1, 12.0, builds=SOME, is_shared=True)
    assert outcome.findings == []
    assert [complaint.split()[0] for complaint in outcome.complaints()] == ["pool"]
