"""Launch geometry of `kernels/combine.cu`, which merges the splits of a call."""

from __future__ import annotations

from typing import Final

from mlaflash.errors import InvalidArgumentError

MAX_SPLITS: Final = 1024
"""Most splits of one call, `MAX_SPLITS` of the kernel: their weights lie in shared memory."""

BLOCK: Final = 128
"""Threads of a block."""

SHARED_BYTES: Final = MAX_SPLITS * 4 + 2 * 4 * 4 + BLOCK * 16
"""Dynamic shared memory of a block: weights, two reductions over four warps, one sum of four columns a thread."""

_FEW_SPLITS: Final = 8


def split_warps(num_splits: int) -> int:
    """Return how many warps share the splits of 128 columns of a row: the constant `SPLIT_WARPS`.

    Few splits need no sum across warps; many are latency-bound, and four warps keep four times the loads in flight.

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
    return 1 if num_splits <= _FEW_SPLITS else 4


def grid(num_rows: int, num_splits: int) -> tuple[int, int, int]:
    """Return the grid for `num_rows` = T * H rows.

    Parameters
    ----------
    num_rows : int
        Rows of out: query tokens times heads.
    num_splits : int
        Splits of the call.
    """
    return (num_rows, split_warps(num_splits), 1)
