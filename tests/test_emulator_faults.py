"""Faults that a GPU would hide or answer with nonsense: each planted one is caught, and its repaired twin passes."""

import dataclasses
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from mlaflash.emulator import Report, run_kernel
from mlaflash.errors import EmulatorError, InvalidArgumentError

KERNEL = Path(__file__).parent / "kernels" / "faults.cu"
PARAMS = np.dtype([("a", "u8"), ("out", "u8"), ("op", "i4"), ("wrong", "i4")], align=True)
SEEDS = range(10)

# What is planted, the kinds of report that are right (the schedule decides), and what the message must say.
FAULTS = [
    ("missing_block_sync", "race", r"(read|write) of shared \+ \d+, which warp [01] (wrote|read) with no barrier"),
    ("missing_second_sync", "race", r"which warp [01] (wrote|read) with no barrier between the two"),
    ("unwritten_read", "poison", r"thread 5 .*read of shared \+ 20, which nothing has written yet"),
    ("read_before_wait", "poison", r"destination of a cp.async of thread \d+ that is still in flight"),
    ("wait_for_too_few", "poison", r"read of shared \+ 1\d\d\d, the destination of a cp.async of thread"),
    (
        "wait_without_barrier",
        "race poison",
        r"which (warp [01] wrote with no barrier|nothing has written)|still in flight",
    ),
    ("write_into_flight", "race", r"write of shared \+ \d+, the destination of a cp.async"),
    ("return_in_flight", "async", r"the thread returns with 1 cp.async in flight"),
    ("bulk_in_flight", "async", r"the block returns with 1 asynchronous copies"),
    (
        "bulk_without_wait",
        "race poison",
        r"a copy that completes on the mbarrier at shared \+ 2048 wrote|a bulk copy of thread 0|nothing has written",
    ),
    ("shared_bounds", "bounds", r"write of 16 bytes at shared \+ 4096; the block has 4096 bytes"),
    ("shared_below", "bounds", r"write of 4 bytes at shared \+ -1024"),
    ("global_bounds", "bounds", r"read of 4 bytes outside every array; the nearest is a, at byte 2048 of its 2048"),
    ("global_before", "bounds", r"the nearest is a, at byte -4 of its 2048"),
    ("global_null", "bounds", r"through a null pointer"),
    ("global_read_only", "bounds", r"write of 4 bytes to a, which is read-only"),
    ("async_bounds", "bounds", r"thread 63 .*read of 16 bytes outside every array; the nearest is a, at byte 2048"),
    ("shared_misaligned", "misaligned", r"write of 16 bytes at shared \+ \d+, which is no multiple of 16"),
    ("global_misaligned", "misaligned", r"read of 8 bytes at 0x[0-9a-f]+, which is no multiple"),
    ("ldmatrix_misaligned", "misaligned", r"read of 16 bytes at shared \+ \d+, which is no multiple of 16"),
    (
        "mbarrier_over_arrival",
        "barrier",
        r"over-arrival on the mbarrier at shared \+ 0: all 63 arrivals of phase 0 are in",
    ),
    ("mbarrier_data_access", "barrier", r"write of shared \+ 4, which holds an mbarrier"),
    ("mbarrier_missing", "barrier", r"no mbarrier at shared \+ 0"),
    ("mbarrier_unordered_init", "race barrier", r"which warp 0 wrote with no barrier|no mbarrier at shared \+ 0"),
    (
        "named_barrier_count",
        "barrier deadlock",
        r"asked to count 32 threads while 32 of 64|32 of 64 threads have arrived",
    ),
    ("named_barrier_twice", "barrier", r"the warp arrives twice on named barrier 1"),
    (
        "deadlock_barrier",
        "deadlock",
        r"warp 0: every lane at named barrier 3 \(32 of 64 threads .*\n  warp 1: has returned",
    ),
    (
        "deadlock_mbarrier",
        "deadlock",
        r"warp 0: every lane at the mbarrier at shared \+ 0 for parity 0 \(0 phases complete, 1 of 64 arrivals",
    ),
    ("deadlock_try_wait", "deadlock", r"at the mbarrier at shared \+ 0 for parity 0"),
    (
        "divergent_collective",
        "divergence",
        r"the lane meets (shfl|warp vote) while lanes 0x[0-9a-f]+ of its warp wait at",
    ),
    ("return_before_collective", "divergence", r"0x00000100|the lane returns while lanes 0x[0-9a-f]+ of its warp wait"),
    ("divergent_block_sync", "divergence", r"block_sync"),
    (
        "unordered_atomic",
        "race poison",
        r"shared \+ 0, which (warp [01] (wrote|read) with no barrier|nothing has written)",
    ),
    ("deep_stack", "stack", r"stack"),
    ("different_uniform", "divergence", r"warp 1, .*make_uniform different values"),
    ("mbarrier_gone", "barrier", r"no mbarrier at shared \+ 0"),
    (
        "mbarrier_ends_early",
        "barrier deadlock",
        r"waits on the mbarrier that is invalidated|no mbarrier at shared \+ 0|warp 1: every lane at the mbarrier",
    ),
]
# Waits for millions of failed attempts: one schedule is enough.
ONE_SEED = {"deadlock_try_wait"}
# A copy may happen to land before the block returns.
SOMETIMES_MISSED = {"bulk_in_flight"}


def launch(op: int, wrong: int, seed: int, *, check_races: bool = True, workers: int | None = None) -> Report:
    a = np.arange(512, dtype=np.uint32)
    a.flags.writeable = False
    out = np.zeros(64, np.uint32)
    params = np.zeros(1, PARAMS)
    params["a"], params["out"], params["op"], params["wrong"] = a.ctypes.data, out.ctypes.data, op, wrong
    return run_kernel(
        KERNEL, {}, (1,), 64, 4096, params, {"a": a, "out": out}, seed=seed, check_races=check_races, workers=workers
    )


@pytest.mark.parametrize("op", range(len(FAULTS)), ids=[name for name, *_ in FAULTS])
def test_planted_fault_is_caught(op: int) -> None:
    name, kinds, pattern = FAULTS[op]
    assert re.search(rf"case {op}:\s+return {name}\(p\);", KERNEL.read_text())
    caught: list[EmulatorError] = []
    seeds = list(SEEDS) if name not in ONE_SEED else [0]
    for seed in seeds:
        try:
            launch(op, 1, seed)
        except EmulatorError as error:
            caught.append(error)
    assert len(caught) == len(seeds) or (name in SOMETIMES_MISSED and caught)
    for error in caught:
        assert re.search(pattern, str(error)), str(error)
        assert str(error).startswith(f"{error.kind}: ")
        assert "[kernel mlaflash_faults, seed " in str(error)
        assert re.search(r"faults\.cu:\d+", str(error)) or error.kind in ("async", "divergence")
    assert {error.kind for error in caught} <= set(kinds.split())
    assert kinds.split()[0] in {error.kind for error in caught}


@pytest.mark.parametrize("op", range(len(FAULTS)), ids=[name for name, *_ in FAULTS])
def test_repaired_program_passes(op: int) -> None:
    for seed in SEEDS:
        report = launch(op, 0, seed)
        assert report.races == 0
        assert report.blocks == 1


def test_line_of_the_fault_is_named() -> None:
    with pytest.raises(EmulatorError) as error:
        launch(2, 1, 0)
    line = int(re.search(r"faults\.cu:(\d+): block \(0, 0, 0\), thread 5 \(warp 0, lane 5\)", str(error.value))[1])
    assert "keep(p, ld_shared_u32(shared_base() + 4 * thread_idx()));" in KERNEL.read_text().splitlines()[line - 1]


def test_report_comes_with_the_error_and_repeats() -> None:
    errors = []
    for workers in (1, 2):
        with pytest.raises(EmulatorError) as error:
            launch(0, 1, 5, workers=workers)
        errors.append(error.value)
    assert str(errors[0]) == str(errors[1])
    assert isinstance(errors[0].report, Report)
    assert errors[0].report == errors[1].report
    assert errors[0].report.blocks == 0
    assert errors[0].report.races == 1


def test_races_can_be_counted_instead() -> None:
    assert launch(0, 1, 0, check_races=False).races > 1
    assert launch(0, 0, 0, check_races=False).races == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_first_failing_block_is_reported(workers: int, tmp_path: Path) -> None:
    kernel = tmp_path / "blocks.cu"
    kernel.write_text(
        '#include "ptx.cuh"\n'
        "struct VerifyParams { void* out; };\n"
        "KERNEL(mlaflash_blocks, 32, 1) {\n"
        "  const int i = block_idx_x();\n"
        "  // Later blocks are quicker to fail.\n"
        "  for (int k = 0; k < 400 - 10 * i; k++) warp_sync();\n"
        "  st_global_u32((u8*)p.out + 4 * (i % 11 == 7 ? 40 : i), 1);\n"
        "}\n"
    )
    out = np.zeros(40, np.uint32)
    params = np.array([(out.ctypes.data,)], [("out", "u8")])
    with pytest.raises(EmulatorError, match=r"block \(7, 0, 0\)") as error:
        run_kernel(kernel, {}, (40,), 32, 0, params, {"out": out}, workers=workers)
    assert error.value.kind == "bounds"
    assert error.value.report.stores == {"out": 0}
    assert out[:7].tolist() == [1] * 7


LANES_MEET = """\
#include "ptx.cuh"
struct VerifyParams { void* out; };
KERNEL(mlaflash_lanes, 32, 1) {
  const u32 smem = shared_base(), lane = (u32)thread_idx();
  st_shared_u32(smem + lane * 4, 0);
  if (lane == 0) mbarrier_init(smem + 128, ARRIVALS);
  warp_sync();
  st_shared_u32(smem + lane * 4, lane);
  if (lane < ARRIVALS) mbarrier_arrive(smem + 128);
  if (WAITS) mbarrier_wait(smem + 128, 0);
  st_global_u32((u8*)p.out + lane * 4, ld_shared_u32(smem + (lane + 1) % 32 * 4));
}
"""


@pytest.mark.parametrize(("arrivals", "waits", "is_ordered"), [(32, 1, True), (32, 0, False), (1, 1, False)])
def test_lanes_are_in_order_where_all_of_them_arrive_and_wait(
    arrivals: int, waits: int, is_ordered: bool, tmp_path: Path
) -> None:
    kernel = tmp_path / "lanes.cu"
    kernel.write_text(LANES_MEET.replace("ARRIVALS", str(arrivals)).replace("WAITS", str(waits)))
    for seed in range(8):
        out = np.zeros(32, np.uint32)
        params = np.array([(out.ctypes.data,)], [("out", "u8")])
        ordered = nullcontext() if is_ordered else pytest.raises(EmulatorError, match="no warp_sync between the two")
        with ordered:
            run_kernel(kernel, {"LANE_RACES": 1}, (1,), 32, 136, params, {"out": out}, seed=seed)
            assert out.tolist() == [(lane + 1) % 32 for lane in range(32)]


def test_interrupt_ends_a_kernel_that_never_does(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    kernel = tmp_path / "polling.cu"
    kernel.write_text(
        '#include "ptx.cuh"\n'
        "struct VerifyParams { void* out; };\n"
        "KERNEL(mlaflash_polling, 64, 1) {\n"
        "  while (ld_global_cg_u32(p.out) == 0) {\n"
        "  }\n"
        "}\n"
    )
    out = np.zeros(1, np.uint32)
    params = np.array([(out.ctypes.data,)], [("out", "u8")])
    # Compiles the kernel, so that the alarm comes while it runs.
    with pytest.raises(EmulatorError, match="outside every array"):
        run_kernel(kernel, {}, (1,), 64, 0, params, {"out": out.copy()})
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            run_kernel(kernel, {}, (16,), 64, 0, params, {"out": out})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_array_that_overlaps_counts_once(tmp_path: Path) -> None:
    kernel = tmp_path / "views.cu"
    kernel.write_text(
        '#include "ptx.cuh"\n'
        "struct VerifyParams { void* out; };\n"
        "KERNEL(mlaflash_views, 32, 1) {\n"
        "  if (thread_idx() < 20) ld_global_u32((u8*)p.out + 4 * thread_idx());\n"
        "  if (thread_idx() == 0) ld_global_u32x4((u8*)p.out + 32);\n"
        "}\n"
    )
    buffer = np.zeros(64, np.uint32)
    offset = -buffer.ctypes.data % 16 // 4
    buffer = buffer[offset : offset + 20]
    params = np.array([(buffer.ctypes.data,)], [("out", "u8")])
    report = run_kernel(kernel, {}, (1,), 32, 0, params, {"low": buffer[:10], "high": buffer[6:], "all": buffer})
    # The load of 16 bytes crosses from one name to the next: it counts where it starts.
    assert report.bytes_read == {"low": 40 + 16, "high": 40, "all": 0}
    assert report.loads == {"low": 11, "high": 10, "all": 0}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grid": (0,)}, "grid is"),
        ({"grid": (1, 1, 1, 1)}, "grid is"),
        ({"block": 48}, "block is 48"),
        ({"block": 128}, "more than mlaflash_faults was compiled for"),
        ({"block": 2048}, "block is 2048"),
        ({"shared_bytes": -1}, "shared_bytes is -1"),
        ({"params": np.zeros(1, "u8")}, "params has 8 bytes"),
        ({"params": np.zeros(2, PARAMS)}, "params has 2 elements"),
        ({"workers": 0}, "workers is 0"),
        ({"entry": "mlaflash_nothing"}, "no entry point mlaflash_nothing"),
    ],
)
def test_impossible_launch(changed: dict[str, object], message: str) -> None:
    arguments = {"grid": (1,), "block": 64, "shared_bytes": 4096, "params": np.zeros(1, PARAMS)} | changed
    keywords = {name: arguments.pop(name) for name in ("workers", "entry") if name in arguments}
    with pytest.raises(InvalidArgumentError, match=message):
        run_kernel(KERNEL, {}, *arguments.values(), {}, **keywords)


def test_report_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        launch(10, 0, 0).races = 1  # type: ignore[misc]
