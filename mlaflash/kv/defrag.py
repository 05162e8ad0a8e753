"""Requests laid into aligned runs of slots, and the tables that say so; NumPy and GPU arrays alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mlaflash.checks import integer
from mlaflash.device import current_ordinal, on_device
from mlaflash.errors import InvalidArgumentError, ShapeError
from mlaflash.interop import as_cupy, device_view, numpy_view, ordinal_of
from mlaflash.kv.move import Moves
from mlaflash.streams import as_stream

_INTEGERS = ("int32", "int64")
_MOST_ALIGN = 2**20
_MASKS = ("bool", "uint8", "int8", "int32", "int64")


class Defragmentation(NamedTuple):
    """What `plan_defrag` says.

    Attributes
    ----------
    moves : Moves
        Of `group` 1: no slot is both read and written.
    remap : array, shape (num_slots,), type of the slots
        Where each slot's row is after the moves; itself, where it stays.
    """

    moves: Moves
    remap: Any


def plan_defrag(
    slots: Any,
    free_runs: Any,
    *,
    num_slots: int,
    align: int = 64,
    max_moves: int | None = None,
    immovable: Any = None,
    stream: Any = None,
) -> Defragmentation:
    """Plan moves that bring a request's tokens into aligned runs of slots; no value is read from the device.

    Tokens are taken in blocks of `align`. A block that is not a run of consecutive slots from a multiple of `align` on
    moves as a whole, into the next such run that is free. Blocks with a slot that must not move stay, and so do those
    for which no run or no move is left.

    Parameters
    ----------
    slots : array, shape (L,), int32 or int64
        Slots of the request's tokens, in their order; of NumPy, CuPy, torch or another library on a GPU.
    free_runs : array, shape (R, 2), int32 or int64
        First slot and length of each run of free slots; runs of length 0 pad. None may hold a slot in use.
    num_slots : int
        Slots of the pool.
    align : int
        Tokens of a block.
    max_moves : int, optional
        The most rows to move, of which ``max_moves // align`` blocks come.
    immovable : array, shape (num_slots,), bool or integers, optional
        Not 0 where others share a slot (its reference count less 1, for instance).
    stream : stream or int, optional
        Where the work runs, as in `mlaflash.mla_verify`.

    Returns
    -------
    Defragmentation
        Of NumPy or CuPy arrays. The moves have `align` entries for each block that moves, -1 behind the last token, and
        ``n`` counts them.

    Raises
    ------
    ShapeError
        Shape, dtype or device of an array.
    InvalidArgumentError
        A number is out of range.

    Notes
    -----
    Whatever holds old slots must be rewritten with `apply_remap` before it is used again, and the old slots are free
    only then: call it where no work that was planned before is under way.
    """
    num_slots, align = integer("num_slots", num_slots, 0), integer("align", align, 1)
    if align > _MOST_ALIGN:
        raise InvalidArgumentError(f"align is {align}; blocks have at most {_MOST_ALIGN} tokens.")
    most_moves = None if max_moves is None else integer("max_moves", max_moves, 0)
    with _arrays(stream, slots=slots, free_runs=free_runs, immovable=immovable) as (xp, found):
        table, runs, shared = found["slots"], found["free_runs"], found["immovable"]
        _check("slots", table, _INTEGERS, (None,))
        _check("free_runs", runs, _INTEGERS, (None, 2))
        num_blocks = -(-table.shape[0] // align)
        ids = xp.full(num_blocks * align, -1, np.int64)
        ids[: table.shape[0]] = table
        ids = ids.reshape(num_blocks, align)
        live = (ids >= 0) & (ids < num_slots)
        place = xp.arange(align, dtype=np.int64)
        stays = ((ids == ids[:, :1] + place) | ~live).all(1) & (ids[:, 0] % align == 0)
        if shared is not None:
            _check("immovable", shared, _MASKS, (num_slots,))
            if num_slots:
                stays |= (live & (shared[xp.where(live, ids, 0)] != 0)).any(1)
        wanted = live.any(1) & ~stays

        # One run of length 0 more: there is always a last one.
        starts, lengths = xp.concatenate([runs.astype(np.int64), xp.zeros((1, 2), np.int64)]).T
        ends = xp.minimum(starts + lengths, num_slots)
        starts = -(-xp.maximum(starts, 0) // align) * align
        room = xp.maximum(ends - starts, 0) // align
        filled = xp.cumsum(room)
        rank = xp.cumsum(wanted.astype(np.int64)) - 1
        most_blocks = num_blocks if most_moves is None else min(num_blocks, most_moves // align)
        taken = wanted & (rank < filled[-1:]) & (rank < most_blocks)
        run = xp.minimum(xp.searchsorted(filled, rank, side="right"), room.shape[0] - 1)
        target = starts[run] + (rank - (filled[run] - room[run])) * align

        moving = live & taken[:, None]
        goal = target[:, None] + place
        # What does not move is written behind the end, and cut off.
        row = xp.where(taken, rank, most_blocks)
        lists = xp.full((2, most_blocks + 1, align), -1, table.dtype)
        lists[0, row] = xp.where(moving, ids, -1)
        lists[1, row] = xp.where(moving, goal, -1)
        n = (taken.sum(keepdims=True) * align).astype(np.int32)
        remap = xp.arange(num_slots + 1, dtype=table.dtype)
        remap[xp.where(moving, ids, num_slots)] = xp.where(moving, goal, num_slots)
        src, dst = (part[:most_blocks].reshape(-1) for part in lists)
        return Defragmentation(Moves(src, dst, n, 1), remap[:num_slots])


def apply_remap(table: Any, remap: Any, *, page_size: int = 1, out: Any = None, stream: Any = None) -> Any:
    """Rewrite a table of slots or pages for rows that have moved.

    Parameters
    ----------
    table : array, any shape, int32 or int64
        ``req_to_token``, ``kv_indices`` or a block table, of NumPy, CuPy, torch or another library on a GPU. What is no
        slot, such as -1 or garbage behind a request's end, stays as it is.
    remap : array, shape (num_slots,), int32 or int64
        From `plan_defrag`.
    page_size : int
        Slots of what an entry of the table counts. Above 1, pages must have moved as wholes: a plan's `align` is then a
        multiple of it.
    out : array, optional
        Where the result goes, of table's shape; `table` itself, to rewrite it in place. By default new memory.
    stream : stream or int, optional
        Where the work runs, as in `mlaflash.mla_verify`.

    Returns
    -------
    array
        `out`; without it of table's type, NumPy or CuPy.

    Raises
    ------
    ShapeError
        Shape, dtype or device of an array.
    InvalidArgumentError
        `page_size` is out of range.
    """
    page_size = integer("page_size", page_size, 1)
    with _arrays(stream, table=table, remap=remap, out=out) as (xp, found):
        entries, new, target = found["table"], found["remap"], found["out"]
        _check("table", entries, _INTEGERS, (None,) * entries.ndim)
        _check("remap", new, _INTEGERS, (None,))
        num_pages = new.shape[0] // page_size
        known = (entries >= 0) & (entries < num_pages)
        if num_pages:
            moved = new[xp.where(known, entries, 0).astype(np.int64) * page_size] // page_size
            result = xp.where(known, moved, entries).astype(entries.dtype)
        else:
            result = entries.copy()
        if target is None:
            return result
        _check("out", target, _INTEGERS, entries.shape)
        target[...] = result
        return out


@contextmanager
def _arrays(stream: Any, **arrays: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Give the module that works on arrays, and each of them as an array of it, on the caller's stream."""
    first = next(iter(arrays.values()))
    given = {name: array for name, array in arrays.items() if array is not None}
    absent = dict.fromkeys(arrays)
    if isinstance(first, np.ndarray):
        yield np, absent | {name: numpy_view(name, array).array for name, array in given.items()}
        return
    ordinal = ordinal_of(first)
    with on_device(current_ordinal() if ordinal is None else ordinal):
        work_stream = as_stream(stream, first, current_ordinal())
        views = {name: device_view(name, array, stream=work_stream) for name, array in given.items()}
        import cupy

        with work_stream:
            yield cupy, absent | {name: as_cupy(view) for name, view in views.items()}


def _check(name: str, array: Any, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> None:
    if array is None:
        raise ShapeError(f"{name} is None; it must be an array of {', '.join(dtypes)}.")
    fits = array.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, array.shape, strict=True))
    if not fits or array.dtype.name not in dtypes:
        wanted = ", ".join("*" if length is None else str(length) for length in shape)
        raise ShapeError(f"{name} is {array.dtype.name} {array.shape}; it must be ({wanted}), of {', '.join(dtypes)}.")
