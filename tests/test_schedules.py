"""Every kernel in random orders of its threads, and with each of its barriers, waits and fences removed once.

A seed of the emulator is one order of threads and of landing copies. A race in any of them fails the run, and the
result has the same bits in all.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from schedule_cases import SCENARIOS, Scenario, taken_from

from mlaflash.errors import EmulatorError
from mlaflash.jit import sources

SEEDS = 5
SLOW_SEEDS = 200
MUTATION_SEEDS = 6

ALL = [(kernel, name) for kernel, named in SCENARIOS.items() for name in named]


@functools.cache
def scenario(kernel: str, name: str) -> Scenario:
    return SCENARIOS[kernel][name]()


def test_every_kernel_has_a_scenario() -> None:
    assert set(SCENARIOS) == set(sources.kernel_names())


FIRST = [(kernel, next(iter(named))) for kernel, named in SCENARIOS.items()]


@pytest.mark.parametrize(
    ("kernel", "name"), [*FIRST, ("mma_roles", "e4m3 plan"), ("mma_roles", "e4m3 plan, two groups")]
)
def test_a_few_orders(kernel: str, name: str) -> None:
    assert len({scenario(kernel, name)(seed) for seed in range(SEEDS)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name"), ALL)
def test_two_hundred_orders(kernel: str, name: str) -> None:
    assert len({scenario(kernel, name)(seed) for seed in range(SLOW_SEEDS)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name"), ALL)
def test_lanes_of_a_warp_do_not_race(kernel: str, name: str) -> None:
    with taken_from(kernel, kernel, True):
        assert len({scenario(kernel, name)(seed) for seed in range(SEEDS)}) == 1


def test_a_lane_that_waits_for_no_other_is_noticed(tmp_path: Path) -> None:
    """Only where lanes are looked at one by one."""
    (call,) = (call for call in calls("tile") if named("tile", call)[1] == "warp_sync")
    name, *_ = SCENARIOS["tile"]
    wanted, gone = expected("tile", name), without("tile", [call], tmp_path)
    for path, lane_races in ((gone, False), ("tile", True)):
        with taken_from("tile", path, lane_races):
            assert scenario("tile", name)(0) == wanted
    with taken_from("tile", gone, True), pytest.raises(EmulatorError, match="no warp_sync between the two"):
        scenario("tile", name)(0)


# --- what is missed when it is gone --------------------------------------------------------------------------------

CALLS = re.compile(
    r"\b(\w*_sync|named_barrier_\w+|mbarrier_(?!try)\w+|cp_async_(?:commit|wait\w*|mbarrier\w*)|\w*fence\w*|"
    r"wait_prerequisites)(?:<[^<>;]*>)?\("
)
LAUNCHES = "the emulator runs one kernel after the other: on a GPU the kernel may start before the one before it ended"
TWICE = "it stands twice, for compute-sanitizer alone: the other one does its work"
EMPTY = "the groups that may be open are empty ones, of tiles past the end; it keeps that from being an accident"
UNSEEN: dict[str, str] = {
    "wait_prerequisites": LAUNCHES,
    "  block_sync();": TWICE,
    "if constexpr (FP8) block_sync();  // as in all_sync()": TWICE,
    "cp_async_wait_all();  // nothing is in flight any more": EMPTY,
    "the reads of the stage before the next task's copies into it": "a block has one task below 2**31 of them",
    "orders the reads of the last scan before the writes below": "the barrier at the end of place_spans() lies between",
    "keeps the compiler from loading more of it at once": "it orders nothing: without it registers spill on sm_120",
}
"""By the call, or by words of its line: what the emulator does not see is gone, and why it stays."""


def calls(kernel: str) -> list[tuple[int, int, int]]:
    """Find the calls that order something: line, begin and end, definitions apart."""
    found = []
    for number, line in enumerate(sources.read(kernel).source.splitlines()):
        code = line.split("//")[0]
        for match in CALLS.finditer(code):
            if re.search(r"\b(void|bool|u32)\s+$", code[: match.start()]):
                continue
            depth, end = 1, match.end()
            while depth and end < len(code):
                depth += {"(": 1, ")": -1}.get(code[end], 0)
                end += 1
            found.append((number, match.start(), end))
    return found


def without(kernel: str, gone: Sequence[tuple[int, int, int]], folder: Path) -> Path:
    """Copy a kernel, less some of its calls."""
    lines = sources.read(kernel).source.splitlines()
    for number, begin, end in gone:
        lines[number] = f"{lines[number][:begin]}((void)0){lines[number][end:]}"
    path = folder / f"{kernel}.cu"
    path.write_text("\n".join(lines) + "\n")
    return path


def is_about(words: str, line: str, name: str) -> bool:
    return words in (line, name) or (len(words) > 20 and words in line)


def why_unseen(kernel: str, call: tuple[int, int, int]) -> str:
    return next((why for words, why in UNSEEN.items() if is_about(words, *named(kernel, call))), "")


def named(kernel: str, call: tuple[int, int, int]) -> tuple[str, str]:
    """Return the line of a call and the call's name."""
    line = sources.read(kernel).source.splitlines()[call[0]]
    return line, CALLS.match(line, call[1])[1]


@functools.cache
def expected(kernel: str, name: str) -> bytes:
    return scenario(kernel, name)(0)


def is_noticed(kernel: str, path: Path, *, lane_races: bool = False) -> bool:
    """Whether any scenario fails, or differs, in any of a few orders."""
    for name in SCENARIOS[kernel]:
        wanted = expected(kernel, name)
        with taken_from(kernel, path, lane_races):
            for seed in range(MUTATION_SEEDS):
                try:
                    if scenario(kernel, name)(seed) != wanted:
                        return True
                except EmulatorError:
                    return True
    return False


MUTATIONS: list[Any] = [
    pytest.param(kernel, call, id=f"{kernel}:{call[0] + 1}") for kernel in SCENARIOS for call in calls(kernel)
]


TWINS: list[Any] = [
    pytest.param(kernel, first, id=f"{kernel}:{one[0] + 1}")
    for kernel in SCENARIOS
    for first, (one, two) in enumerate(itertools.pairwise(calls(kernel)))
    if why_unseen(kernel, one) == TWICE and two[0] == one[0] + 1
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "call"), MUTATIONS)
def test_every_barrier_wait_and_fence_is_missed(kernel: str, call: tuple[int, int, int], tmp_path: Path) -> None:
    line, name = named(kernel, call)
    gone = without(kernel, [call], tmp_path)
    assert is_noticed(kernel, gone, lane_races=name == "warp_sync") == (not why_unseen(kernel, call)), line


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "first"), TWINS)
def test_barriers_that_stand_twice_are_missed_together(kernel: str, first: int, tmp_path: Path) -> None:
    assert is_noticed(kernel, without(kernel, calls(kernel)[first : first + 2], tmp_path))


def test_a_barrier_of_each_small_kernel_is_missed(tmp_path: Path) -> None:
    """The same for some that compile fast."""
    for kernel in ("compact", "naive"):
        assert is_noticed(kernel, without(kernel, calls(kernel)[-1:], tmp_path))


def test_every_call_that_orders_something_is_removed_once() -> None:
    """None hides in a header, or behind a name that is not looked for; what is said not to be seen is there."""
    assert {kernel for kernel in SCENARIOS if not calls(kernel)} == {"merge", "transpose"}
    root = sources.kernel_root()
    others = {*root.rglob("*.cu*")} - {root / f"{kernel}.cu" for kernel in SCENARIOS}
    assert {path.name for path in others if CALLS.search(path.read_text())} == {"ptx.cuh"}
    text = (root / "include/ptx.cuh").read_text()
    instructions = re.split(r"^(?:template <[^>]*>\s*)?DEVICE \w+ (?=\w+\()", text, flags=re.MULTILINE)[1:]
    ordering = re.compile(r"__sync\w+\(\)|bar\.|barrier\.|fence|acq_rel|wait|commit")
    names = {each.partition("(")[0] for each in instructions if ordering.search(each)}
    unmatched = {name for name in names if not CALLS.match(f"{name}(")}
    # The first is inside mbarrier_wait(); no kernel calls any of them.
    assert unmatched == {"mbarrier_try_wait", "atomic_add_global_u32", "atomic_add_shared_u32"}
    assert not any(name in sources.read(kernel).source for kernel in SCENARIOS for name in unmatched)

    all_calls = [named(kernel, call) for kernel in SCENARIOS for call in calls(kernel)]
    for words in UNSEEN:
        assert any(is_about(words, *call) for call in all_calls), words
