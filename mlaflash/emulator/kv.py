"""The kernels that plan and make moves of KV rows, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlaflash.emulator.run import Report, run_kernel
from mlaflash.interop import ArrayView, numpy_view
from mlaflash.kv import compact, move
from mlaflash.kv.move import Moves, Pool
from mlaflash.schedule import Launch


def plan_compact(
    out_slots: Any,
    accept_index: Any,
    accept_lens: Any = None,
    *,
    qo_indptr: Any = None,
    seed: int = 0,
    reports: list[Report] | None = None,
) -> Moves:
    """Run `mlaflash.kv.plan_compact` on NumPy arrays: the same kernel, checked at every access.

    Parameters
    ----------
    out_slots, accept_index, accept_lens, qo_indptr
        As in `mlaflash.kv.plan_compact`.
    seed : int
        Of the order in which threads take their turns.
    reports : list, optional
        The `Report` of the launch is appended.

    Returns
    -------
    Moves

    Raises
    ------
    EmulatorError
        The kernel did something that is wrong on a GPU.
    MlaFlashError
        As in `mlaflash.kv.plan_compact`; there is no GPU to miss.
    """
    step = compact.build(numpy_view, out_slots, accept_index, accept_lens, qo_indptr)
    # What the kernel forgets to write cannot pass for a result.
    src, dst = (np.full(step.num_moves, 2**31 - 1, step.id_dtype) for _ in range(2))
    n = np.full(1, -1, np.int32)
    step.write_to(src.ctypes.data, dst.ctypes.data, n.ctypes.data)
    _run(step.launch, step.params, step.arrays, {"src": src, "dst": dst, "n": n}, seed, reports)
    return Moves(src, dst, n, step.group)


def move_rows(
    kv_layers: Sequence[Any],
    src: Any,
    dst: Any,
    n: Any = None,
    group: int | None = None,
    *,
    scratch: Any = None,
    validate: bool = False,
    seed: int = 0,
    reports: list[Report] | None = None,
) -> None:
    """Run `mlaflash.kv.move_rows` on NumPy arrays: the same kernel, checked at every access, slowly.

    Parameters
    ----------
    kv_layers, src, dst, n, group, scratch, validate
        As in `mlaflash.kv.move_rows`.
    seed : int
        Of the order in which threads take their turns.
    reports : list, optional
        The `Report` of each launch is appended.

    Raises
    ------
    EmulatorError
        The kernel did something that is wrong on a GPU.
    MlaFlashError
        As in `mlaflash.kv.move_rows`; there is no GPU to miss.
    """
    pool = Pool.from_arrays(numpy_view, kv_layers)
    found = move.build(numpy_view, pool, Moves(src, dst, n, group), scratch, _aligned, validate=validate)
    if found is None:
        return
    for step in found.steps:
        _run(step.launch, step.params, found.arrays, {}, seed, reports)


def _aligned(size: int) -> Any:
    """Allocate bytes at a multiple of 16, which NumPy does not promise."""
    room = np.empty(size + 16, np.uint8)
    skipped = -room.ctypes.data % 16
    return room[skipped : skipped + size]


def _run(
    launch: Launch,
    params: Any,
    views: Any,
    results: dict[str, Any],
    seed: int,
    reports: list[Report] | None,
) -> None:
    read: dict[str, ArrayView] = dict(views)
    arrays = {name: view.array for name, view in read.items()} | results
    report = run_kernel(
        launch.kernel, launch.defines, launch.grid, launch.block, launch.shared_bytes, params, arrays, seed=seed
    )
    if reports is not None:
        reports.append(report)
