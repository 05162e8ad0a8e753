"""Every kernel in random orders of its threads, and with each of its barriers, waits and fences removed once.

A seed of the emulator is one order of threads and of landing copies. A race in any of them fails the run, and the
result has the same bits in all.
"""

from __future__ import annotations

import functools
import re
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


@pytest.mark.parametrize(("kernel", "name"), [*FIRST, ("mma_roles", "e4m3 plan")])
def test_a_few_orders(kernel: str, name: str) -> None:
    assert len({scenario(kernel, name)(seed) for seed in range(SEEDS)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name"), ALL)
def test_two_hundred_orders(kernel: str, name: str) -> None:
    assert len({scenario(kernel, name)(seed) for seed in range(SLOW_SEEDS)}) == 1


# --- what is missed when it is gone --------------------------------------------------------------------------------

CALLS = re.compile(
    r"\b(\w*_sync|named_barrier_\w+|mbarrier_(?!try)\w+|cp_async_(?:commit|wait\w*|mbarrier\w*)|\w*fence\w*|"
    r"wait_prerequisites)(?:<[^<>;]*>)?\("
)
LAUNCHES = "the emulator runs one kernel after the other: on a GPU the kernel may start before the one before it ended"
LANES = "the lanes of a warp share one clock in the race detector: on a GPU a lane may run ahead of the others"
TWICE = "it stands twice, for compute-sanitizer alone: the other one does its work"
EMPTY = "the groups that may be open are empty ones, of tiles past the end; it keeps that from being an accident"
UNSEEN: dict[str, str] = {
    "wait_prerequisites": LAUNCHES,
    "every lane has read MAXIMUM before lane 0 replaces it": LANES,
    "all lanes' reads of the stage before the copies that overwrite it": LANES,
    "the lanes' reads of the ring, or of the tile before, before the writes": LANES,
    "all lanes' copies of q, which have landed, before the reads": LANES,
    "reads of tile n - 1 before the arrival": LANES,
    "the lanes' reads of the codes and ids before the copies over them": LANES,
    "the lanes' reads of the units before the writes over them": LANES,
    "the lanes' reads of the tile before the arrival": LANES,
    "  block_sync();": TWICE,
    "if constexpr (FP8) block_sync();  // as in all_sync()": TWICE,
    "cp_async_wait_all();  // nothing is in flight any more": EMPTY,
    "the reads of the stage before the next task's copies into it": "a block has one task below 2**31 of them",
    "orders the reads of the last scan before the writes below": "the barrier at the end of place_spans() lies between",
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


def without(kernel: str, call: tuple[int, int, int], folder: Path) -> Path:
    """Copy a kernel, less one call."""
    lines = sources.read(kernel).source.splitlines()
    number, begin, end = call
    lines[number] = f"{lines[number][:begin]}((void)0){lines[number][end:]}"
    path = folder / f"{kernel}.cu"
    path.write_text("\n".join(lines) + "\n")
    return path


def why_unseen(line: str, name: str) -> str:
    found = (why for words, why in UNSEEN.items() if words in (line, name) or (len(words) > 20 and words in line))
    return next(found, "")


@functools.cache
def expected(kernel: str, name: str) -> bytes:
    return scenario(kernel, name)(0)


def is_noticed(kernel: str, path: Path) -> bool:
    """Whether any scenario fails, or differs, in any of a few orders."""
    for name in SCENARIOS[kernel]:
        wanted = expected(kernel, name)
        with taken_from(kernel, path):
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


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "call"), MUTATIONS)
def test_every_barrier_wait_and_fence_is_missed(kernel: str, call: tuple[int, int, int], tmp_path: Path) -> None:
    line = sources.read(kernel).source.splitlines()[call[0]]
    name = CALLS.match(line, call[1])[1]
    assert is_noticed(kernel, without(kernel, call, tmp_path)) == (not why_unseen(line, name)), line


def test_a_barrier_of_each_small_kernel_is_missed(tmp_path: Path) -> None:
    """The same for some that compile fast."""
    for kernel in ("compact", "naive"):
        assert is_noticed(kernel, without(kernel, calls(kernel)[-1], tmp_path))
