"""The lists of problems that `bench`, `sweep` and `report` run whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mlaflash.errors import InvalidArgumentError
from mlaflash.shape import VerifyShape

# batch, q_len, heads, kv_len: what other kernels were measured on, ordered by rows of a request.
_VERIFY: Final = (
    *((1, 1, 8, 65536), (32, 1, 8, 8192), (32, 2, 8, 8192)),
    *((1, 4, 8, 65536), (32, 4, 8, 8192)),
    *((1, 8, 8, 4096), (1, 8, 8, 16384), (1, 8, 8, 65536), (1, 1, 64, 65536), (1, 8, 8, 200000)),
    *((8, 8, 8, 32768), (32, 8, 8, 8192), (32, 1, 64, 8192)),
    *((1, 16, 8, 65536), (64, 1, 128, 4096), (1, 32, 8, 65536), (64, 2, 128, 4096)),
    *((1, 8, 64, 65536), (8, 8, 64, 16384), (1, 64, 8, 65536), (1, 16, 64, 65536)),
)
_KIMI_BATCHES: Final = (1, 4, 8, 16)
_KIMI_Q_LENS: Final = (1, 4, 8, 16, 33, 61)
_KIMI_PREFIXES: Final = (4096, 16384, 65536, 131072, 200000)


def verify() -> list[VerifyShape]:
    """Return the problems of the README's comparison: bfloat16, tree masks, shuffled pages of 64 tokens."""
    return [
        VerifyShape(num_heads=heads, q_len=q_len, kv_len=kv_len, batch=batch, page_size=64, mask="tree")
        for batch, q_len, heads, kv_len in _VERIFY
    ]


def kimi() -> list[VerifyShape]:
    """Return verify steps of Kimi K2.x on eight GPUs: 8 heads, tree masks, pages of one token, prefix and draft."""
    return [
        VerifyShape(num_heads=8, q_len=q_len, kv_len=prefix + q_len, batch=batch, page_size=1, mask="tree")
        for batch in _KIMI_BATCHES
        for q_len in _KIMI_Q_LENS
        for prefix in _KIMI_PREFIXES
    ]


SUITES: Final[dict[str, Callable[[], list[VerifyShape]]]] = {"verify": verify, "kimi": kimi}


def suite(name: str) -> list[VerifyShape]:
    """Return the problems of a suite.

    Parameters
    ----------
    name : str
        A key of `SUITES`.

    Returns
    -------
    list of VerifyShape

    Raises
    ------
    InvalidArgumentError
        There is no such suite.
    """
    if name not in SUITES:
        raise InvalidArgumentError(f"suite is {name!r}; it must be one of {', '.join(SUITES)}.")
    return SUITES[name]()
