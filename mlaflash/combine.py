"""Launch geometry of `kernels/combine.cu`, which merges the splits of a call."""

from __future__ import annotations

from typing import Final

from mlaflash.errors import InvalidArgumentError

MAX_SPLITS: Final = 1024
"""Most splits of one call, `MAX_SPLITS` of the kernel: their weights lie in shared memory."""

MAX_CHUNKS: Final = 2048
"""The same of a deterministic call, whose splits are chunks of a constant number of tokens."""

_COLUMN_GROUPS: Final = 4
_WARP: Final = 32
_FEW_SPLITS: Final = 8
_MANY_ROWS: Final = 256


def split_warps(num_splits: int, num_rows: int = 1) -> int:
    """Return how many warps share the splits of 128 columns of a row: the constant `SPLIT_WARPS`.

    Few splits need no sum across warps. Nor do up to 32 splits of many rows, whose blocks would not fit the GPU in one
    wave. Few rows with many splits are bound by latency: they take as many warps as have all loads in flight at once,
    eight a lane, while the blocks still fit.

    Parameters
    ----------
    num_splits : int
        Splits of the call, 1 to `MAX_SPLITS`.
    num_rows : int
        Rows of out: query tokens times heads.

    Raises
    ------
    InvalidArgumentError
        `num_splits` is out of range.
    """
    if not 1 <= num_splits <= MAX_SPLITS:
        raise InvalidArgumentError(
            f"num_splits is {num_splits}; combine merges 1 to {MAX_SPLITS} splits. Choose a number in that range."
        )
    if num_splits <= _FEW_SPLITS or (num_splits <= 4 * _FEW_SPLITS and num_rows >= _MANY_ROWS):
        return 1
    if num_splits > 64 and num_rows <= 32:
        return 16
    return 8 if num_splits > 32 and num_rows <= 64 else 4


def defines(num_splits: int, num_rows: int = 1) -> dict[str, int]:
    """Return the constants of the kernel without its element types.

    Parameters
    ----------
    num_splits, num_rows : int
        Of the call.
    """
    few = {"FEW_SPLITS": 1} if num_splits <= _WARP else {}
    return {"SPLIT_WARPS": split_warps(num_splits, num_rows)} | few


def merge_splits(num_rows: int = 1) -> list[int]:
    """List numbers of splits that cover all the ways `combine` is compiled for so many rows, the smallest of each.

    Parameters
    ----------
    num_rows : int
        Rows of out.
    """
    first: dict[frozenset[tuple[str, int]], int] = {}
    for splits in range(2, MAX_SPLITS + 1):
        first.setdefault(frozenset(defines(splits, num_rows).items()), splits)
    return list(first.values())


def _warps(num_splits: int, num_rows: int) -> int:
    return max(_COLUMN_GROUPS, split_warps(num_splits, num_rows))


def block(num_splits: int, num_rows: int = 1) -> int:
    """Return the threads of a block.

    Parameters
    ----------
    num_splits, num_rows : int
        Of the call.
    """
    return _WARP * _warps(num_splits, num_rows)


def shared_bytes(num_splits: int, num_rows: int = 1) -> int:
    """Return the dynamic shared memory of a block: weights, two reductions over its warps, four columns a thread.

    Parameters
    ----------
    num_splits, num_rows : int
        Of the call.
    """
    most = _WARP if num_splits <= _WARP else MAX_SPLITS
    return most * 4 + _warps(num_splits, num_rows) * (2 * 4 + _WARP * 16)


def chunk_warps(num_chunks: int, num_rows: int) -> int:
    """Return `SPLIT_WARPS` of a deterministic call: 1 or 4, which add a row's chunks in the same order.

    Parameters
    ----------
    num_chunks, num_rows : int
        Of the call.
    """
    return 1 if num_chunks <= 8 or (num_chunks <= 64 and num_rows > 512) else _COLUMN_GROUPS


def chunk_shared_bytes() -> int:
    """Return the dynamic shared memory of a block of a deterministic call, which is 4 warps."""
    return MAX_CHUNKS * 4 + _COLUMN_GROUPS * (2 * 4 + _WARP * 16)


def grid(num_rows: int, num_splits: int) -> tuple[int, int, int]:
    """Return the grid.

    Parameters
    ----------
    num_rows, num_splits : int
        Of the call.
    """
    return (num_rows, min(_COLUMN_GROUPS, split_warps(num_splits, num_rows)), 1)
