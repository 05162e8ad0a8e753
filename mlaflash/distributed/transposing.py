"""The kernel `transpose`: q goes where it is gathered, head by head."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mlaflash.errors import ShapeError
from mlaflash.params import D
from mlaflash.problem import Rows
from mlaflash.schedule import Launch

_BLOCK: Final = 256
_WORD: Final = 16  # bytes that a thread copies
_ROW_WORDS: Final = D * 2 // _WORD

TRANSPOSE_PARAMS_DTYPE: Final = np.dtype(
    [(name, np.uint64) for name in ("latent", "rope", "dst")]
    + [(f"{name}_stride_{axis}", np.int64) for name in ("latent", "rope") for axis in ("t", "h")]
    + [("group_stride", np.int64)]
    + [(name, np.int32) for name in ("num_tokens", "num_heads", "group_heads", "padding")],
    align=True,
)
"""The kernel's one argument; `kernels/include/transpose_params.cuh` declares the same structure."""


class Transpose(NamedTuple):
    """A checked launch of the kernel `transpose`.

    Attributes
    ----------
    launch : Launch
    params : numpy.ndarray, shape (1,), `TRANSPOSE_PARAMS_DTYPE`
    """

    launch: Launch
    params: npt.NDArray[np.void]


def transpose_launch(num_rows: int = 1) -> Launch:
    """Return the launch for so many rows.

    Parameters
    ----------
    num_rows : int
        Query tokens times heads.
    """
    return Launch("transpose", {}, (max(1, -(-num_rows * _ROW_WORDS // _BLOCK)), 1, 1), _BLOCK, 0)


def build(q: Rows, dst: int, group_heads: int, group_stride: int) -> Transpose:
    """Make the launch.

    Parameters
    ----------
    q : Rows, shape (T, H)
        Of 16-bit elements.
    dst : int
        Address for the first group of heads, (group_heads, T, 576).
    group_heads : int
    group_stride : int
        Bytes from a group to the next.

    Raises
    ------
    ShapeError
        A row of q does not start on 16 bytes.
    """
    if not q.is_aligned():
        raise ShapeError(
            f"q has strides {q.latent.strides} (in elements) and begins at address {q.latent_ptr:#x}; every row of its "
            f"latent and of its rope columns must start on {_WORD} bytes. Copy it."
        )
    num_tokens, num_heads = q.shape
    params = np.zeros(1, TRANSPOSE_PARAMS_DTYPE)
    params["latent"], params["rope"], params["dst"] = q.latent_ptr, q.rope_ptr, dst
    for name, view in (("latent", q.latent), ("rope", q.rope)):
        for axis, stride in zip(("t", "h"), view.strides, strict=False):
            params[f"{name}_stride_{axis}"] = stride * view.itemsize
    params["group_stride"], params["group_heads"] = group_stride, group_heads
    params["num_tokens"], params["num_heads"] = num_tokens, num_heads
    return Transpose(transpose_launch(num_tokens * num_heads), params)
