"""Launch geometry of `kernels/combine.cu`, which merges the splits of a call."""

from __future__ import annotations

from typing import Final

from mlaflash.errors import InvalidArgumentError

MAX_SPLITS: Final = 1024
"""Most splits of one call, `MAX_SPLITS` of the kernel: their weights lie in shared memory."""

_COLUMN_GROUPS: Final = 4
_WARP: Final = 32


def split_warps(num_splits: int) -> int:
    """Return how many warps share the splits of 128 columns of a row: the constant `SPLIT_WARPS`.

    Few splits need no sum across warps; many are latency-bound, and take enough warps to have all loads in flight at
    once, eight a lane.

    Parameters
    ----------
    num_splits : int
        Splits of the call, 1 to `MAX_SPLITS`.

    Raises
    ------
    InvalidArgumentError
        `num_splits` is out of range.
    """
    if not 1 <= num_splits <= MAX_SPLITS:
        raise InvalidArgumentError(
            f"num_splits is {num_splits}; combine merges 1 to {MAX_SPLITS} splits. Choose a number in that range."
        )
    for warps, most in ((1, 8), (4, 32), (8, 64)):
        if num_splits <= most:
            return warps
    return 16


def _warps(num_splits: int) -> int:
    return max(_COLUMN_GROUPS, split_warps(num_splits))


def block(num_splits: int) -> int:
    """Return the threads of a block.

    Parameters
    ----------
    num_splits : int
        Splits of the call.
    """
    return _WARP * _warps(num_splits)


def shared_bytes(num_splits: int) -> int:
    """Return the dynamic shared memory of a block: weights, two reductions over its warps, a sum of four columns a thread.

    Parameters
    ----------
    num_splits : int
        Splits of the call.
    """
    return MAX_SPLITS * 4 + _warps(num_splits) * (2 * 4 + _WARP * 16)


def grid(num_rows: int, num_splits: int) -> tuple[int, int, int]:
    """Return the grid.

    Parameters
    ----------
    num_rows : int
        Rows of out: query tokens times heads.
    num_splits : int
        Splits of the call.
    """
    return (num_rows, min(_COLUMN_GROUPS, split_warps(num_splits)), 1)
