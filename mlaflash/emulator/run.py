"""Run one kernel on the CPU, every access checked and counted.

What it cannot show: timing, registers and spills; and a missing ``warp_sync`` unless the constant `LANE_RACES` is 1,
because the lanes of a warp share one clock in the race detector.
"""

import ctypes
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlaflash.emulator.build import load_library
from mlaflash.errors import EmulatorError, InvalidArgumentError, MlaFlashError

MAX_BLOCK: Final = 1024
MAX_SHARED_BYTES: Final = 232448
MESSAGE_BYTES: Final = 8192
NO_BLOCK: Final = 2**64 - 1

# The fields of `Counters` and `ArrayCounters` in kernels/host/state.h, in their order.
_COUNTERS = (
    "races",
    "shared_loads",
    "shared_load_bytes",
    "shared_stores",
    "shared_store_bytes",
    "ldmatrix",
    "ldmatrix_phases",
    "ldmatrix_extra_wavefronts",
    "mma",
    "collectives",
    "block_barriers",
    "named_barriers",
    "mbarrier_arrivals",
    "shared_atomics",
    "global_atomics",
    "async_copies",
    "bulk_copies",
    "switches",
)
_ARRAY_COUNTERS = ("loads", "bytes_read", "stores", "bytes_written", "async_bytes")


class _Array(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_uint64),
    )


class _Segment(ctypes.Structure):
    _fields_ = (("base", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("array", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    """`Launch` in kernels/host/state.h."""

    _fields_ = (
        ("params", ctypes.c_void_p),
        ("params_bytes", ctypes.c_uint64),
        ("arrays", ctypes.POINTER(_Array)),
        ("num_arrays", ctypes.c_uint64),
        ("segments", ctypes.POINTER(_Segment)),
        ("num_segments", ctypes.c_uint64),
        ("grid", ctypes.c_uint64 * 3),
        ("block", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("check_races", ctypes.c_uint64),
        ("cancelled", ctypes.c_uint64),
        ("next_block", ctypes.c_uint64),
        ("lock", ctypes.c_uint64),
        ("blocks_done", ctypes.c_uint64),
        ("counters", ctypes.c_void_p),
        ("array_counters", ctypes.c_void_p),
        ("fault_block", ctypes.c_uint64),
        ("fault_kind", ctypes.c_char * 16),
        ("fault_message", ctypes.c_char * MESSAGE_BYTES),
    )


@dataclass(frozen=True, slots=True)
class Report:
    """What a kernel did, counted over all blocks; after a fault, what the failing block did until then.

    Parameters
    ----------
    blocks : int
        Blocks that ran to their end.
    races : int
        Accesses to shared memory that nothing orders after an earlier one of another warp; only with
        ``check_races=False`` can this be other than 0.
    bytes_read, bytes_written : mapping of str to int
        Bytes of global memory for each registered array, asynchronous copies included.
    loads, stores : mapping of str to int
        Accesses for each registered array; an access of 16 bytes counts once.
    async_bytes : mapping of str to int
        The part of `bytes_read` that ``cp.async`` and bulk copies read.
    bank : mapping of str to (int, int)
        For ``"ldmatrix"``: phases of eight rows, and the wavefronts that bank conflicts add to them.
    shared_loads, shared_stores, shared_load_bytes, shared_store_bytes : int
        Accesses to shared memory by each thread's own loads and stores.
    ldmatrix, mma : int
        Warp instructions.
    collectives : int
        Meetings of all lanes of a warp: these, shuffles, votes and barriers.
    block_barriers, named_barriers, mbarrier_arrivals : int
        Arrivals of warps at the first two, of threads and copies at the third.
    shared_atomics, global_atomics : int
        Atomic operations.
    async_copies, bulk_copies : int
        Copies issued.
    switches : int
        Changes from one thread to another.
    """

    blocks: int
    races: int
    bytes_read: Mapping[str, int]
    bytes_written: Mapping[str, int]
    loads: Mapping[str, int]
    stores: Mapping[str, int]
    async_bytes: Mapping[str, int]
    bank: Mapping[str, tuple[int, int]]
    shared_loads: int
    shared_load_bytes: int
    shared_stores: int
    shared_store_bytes: int
    ldmatrix: int
    mma: int
    collectives: int
    block_barriers: int
    named_barriers: int
    mbarrier_arrivals: int
    shared_atomics: int
    global_atomics: int
    async_copies: int
    bulk_copies: int
    switches: int


def run_kernel(
    kernel: str | Path,
    defines: Mapping[str, int],
    grid: Sequence[int],
    block: int,
    shared_bytes: int,
    params: npt.NDArray[Any],
    arrays: Mapping[str, npt.NDArray[Any]],
    *,
    seed: int = 0,
    workers: int | None = None,
    check_races: bool = True,
    entry: str | None = None,
) -> Report:
    """Run a kernel on the CPU.

    Parameters
    ----------
    kernel : str or Path
        Name of one of the library's kernels, or a path to any other ``.cu`` file.
    defines : mapping of str to int
        ``{"HT": 8}`` becomes ``-DMLAFLASH_HT=8``.
    grid : sequence of int
        Blocks in x, y and z; missing ones are 1.
    block : int
        Threads of a block, a multiple of 32.
    shared_bytes : int
        Dynamic shared memory of a block.
    params : numpy.ndarray
        The kernel's one argument: a structured array of size 1 with addresses of `arrays`.
    arrays : mapping of str to numpy.ndarray
        Global memory: the kernel may touch nothing else, and may write only to writable arrays. Where two
        overlap, an access counts for the one that comes first.
    seed : int
        Of the order in which threads run and copies land; results do not depend on `workers`.
    workers : int or None
        Operating system threads; None is one for each core that this process may use.
    check_races : bool
        Stop at the first race; otherwise count them.
    entry : str or None
        Name of the ``KERNEL``; None is ``mlaflash_<kernel>``.

    Returns
    -------
    Report

    Raises
    ------
    EmulatorError
        The kernel did something that is wrong on a GPU. Of several failing blocks, the first is reported.
    InvalidArgumentError
        The launch is not possible, whatever the kernel does.
    MissingDependencyError, CompileError
        The kernel could not be compiled.
    """
    extent = _checked_grid(grid)
    blocks = extent[0] * extent[1] * extent[2]
    if block < 32 or block % 32 or block > MAX_BLOCK:
        raise InvalidArgumentError(f"block is {block}; allowed are multiples of 32 up to {MAX_BLOCK}.")
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
        raise InvalidArgumentError(f"shared_bytes is {shared_bytes}; allowed are 0 to {MAX_SHARED_BYTES}.")
    if workers is not None and workers < 1:
        raise InvalidArgumentError(f"workers is {workers}; allowed are 1 and more, or None for one a core.")
    if params.size != 1:
        raise InvalidArgumentError(f"params has {params.size} elements; a kernel takes exactly one structure.")
    params = np.ascontiguousarray(params)
    name = entry or f"mlaflash_{kernel.stem if isinstance(kernel, Path) else kernel}"
    library = load_library(kernel, defines)
    try:
        run_worker = getattr(library, name)
    except AttributeError:
        raise InvalidArgumentError(f"kernel {str(kernel)!r} has no entry point {name}.") from None

    counters = np.zeros(len(_COUNTERS), np.uint64)
    array_counters = np.zeros((len(arrays), len(_ARRAY_COUNTERS)), np.uint64)
    regions = _regions(arrays)
    segments = _segments(regions)
    launch = _Launch(
        params=params.ctypes.data,
        params_bytes=params.nbytes,
        arrays=regions,
        num_arrays=len(regions),
        segments=segments,
        num_segments=len(segments),
        grid=extent,
        block=block,
        shared_bytes=shared_bytes,
        seed=seed % 2**64,
        check_races=check_races,
        counters=counters.ctypes.data,
        array_counters=array_counters.ctypes.data,
        fault_block=NO_BLOCK,
    )
    num_workers = max(1, min(workers or len(os.sched_getaffinity(0)), blocks))
    statuses = _run_workers(run_worker, launch, num_workers)
    _check_statuses(statuses, name, block, params.nbytes)
    report = _report(launch, counters, array_counters, list(arrays))
    if launch.fault_block != NO_BLOCK:
        kind = launch.fault_kind.decode()
        message = launch.fault_message.decode(errors="replace")
        raise EmulatorError(f"{kind}: {message} [kernel {name}, seed {seed}]", kind=kind, report=report)
    return report


def _run_workers(run_worker: Any, launch: _Launch, num_workers: int) -> list[int]:
    statuses: list[int] = []

    def work() -> None:
        statuses.append(run_worker(ctypes.byref(launch)))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_workers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        # Ctrl-C comes to this thread alone. The workers use memory that this call owns.
        launch.cancelled = 1
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    return statuses


def _check_statuses(statuses: Sequence[int], name: str, block: int, params_bytes: int) -> None:
    """Raise what a worker's `Status` in kernels/host/scheduler.h says."""
    if 2 in statuses:
        raise InvalidArgumentError(f"params has {params_bytes} bytes, which is not the size of what {name} takes.")
    if 3 in statuses:
        raise InvalidArgumentError(f"block is {block}, more than {name} was compiled for.")
    if 0 not in statuses:
        raise MlaFlashError("the emulator found no memory for the stacks of a block.")


def _checked_grid(grid: Sequence[int]) -> tuple[int, int, int]:
    extent = (*grid, 1, 1, 1)[:3]
    if not 1 <= len(grid) <= 3 or min(extent) < 1:
        raise InvalidArgumentError(f"grid is {tuple(grid)}; allowed are 1 to 3 numbers, each at least 1.")
    return (int(extent[0]), int(extent[1]), int(extent[2]))


def _regions(arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    regions = (_Array * len(arrays))()
    for region, (name, array) in zip(regions, arrays.items(), strict=True):
        low, high = np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data,) * 2
        region.base, region.bytes = low, high - low
        region.name = name.encode()
        region.writable = array.flags.writeable
    return regions


def _segments(regions: Any) -> Any:
    """Cut overlapping regions into pieces that each belong to the first region that holds them."""
    cuts = sorted({bound for region in regions for bound in (region.base, region.base + region.bytes)})
    pieces: list[tuple[int, int, int]] = []
    for low, high in itertools.pairwise(cuts):
        owner = next((i for i, r in enumerate(regions) if r.base <= low and high <= r.base + r.bytes), None)
        if owner is None:
            continue
        if pieces and pieces[-1][2] == owner and pieces[-1][0] + pieces[-1][1] == low:
            pieces[-1] = (pieces[-1][0], high - pieces[-1][0], owner)
        else:
            pieces.append((low, high - low, owner))
    return (_Segment * len(pieces))(*itertools.starmap(_Segment, pieces))


def _report(
    launch: _Launch,
    counters: npt.NDArray[np.uint64],
    array_counters: npt.NDArray[np.uint64],
    names: Sequence[str],
) -> Report:
    total = dict(zip(_COUNTERS, counters.tolist(), strict=True))
    by_array: dict[str, Any] = {
        counter: dict(zip(names, array_counters[:, i].tolist(), strict=True))
        for i, counter in enumerate(_ARRAY_COUNTERS)
    }
    phases = total.pop("ldmatrix_phases")
    extra = total.pop("ldmatrix_extra_wavefronts")
    return Report(
        blocks=launch.blocks_done,
        bank={"ldmatrix": (phases, extra)},
        **by_array,
        **total,
    )
