"""The kernels' one argument as a NumPy structured type, and the codes that both sides share.

`kernels/include/params.cuh` declares the same structure; a test compiles it and compares size and offsets.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

DL: Final = 512
DR: Final = 64
D: Final = DL + DR

DTYPE_CODES: Final = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Element types of q and of out, and of a cache that holds what the model computes."""

FP8_CODES: Final = {"float8_e4m3": 3, "fp8_ds_mla": 4}
"""Caches in 8 bits: ``float8_e4m3`` rows are 576 numbers of e4m3fn, times one scale for all. ``fp8_ds_mla`` rows are
`DS_MLA_BYTES` bytes: 512 numbers of e4m3fn, a float32 scale for each 128 of them, 64 of bfloat16."""

DS_MLA_BYTES: Final = DL + DL // 128 * 4 + DR * 2
DS_MLA_ROPE: Final = DS_MLA_BYTES - DR * 2
"""Where the rope columns of such a row begin."""

MASK_CODES: Final = {"none": 0, "causal": 1, "tree": 2}

_POINTERS = (
    *("q_nope", "q_pe", "kv_c", "k_pe", "new_kv_c", "new_k_pe", "kv_scale"),
    *("qo_indptr", "kv_lens", "kv_indptr", "page_ids", "mask_words", "tail_lens"),
    *("out", "lse", "partial_out", "partial_lse", "scores", "counters"),
)
_STRIDES = (
    *("q_nope_stride_t", "q_nope_stride_h", "q_pe_stride_t", "q_pe_stride_h"),
    *("kv_c_stride_page", "kv_c_stride_token", "k_pe_stride_page", "k_pe_stride_token"),
    *("new_kv_c_stride", "new_k_pe_stride", "block_table_stride"),
    *("out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h", "max_kv_len"),
)

PARAMS_DTYPE: Final = np.dtype(
    [(name, np.uint64) for name in _POINTERS]
    + [(name, np.int64) for name in _STRIDES]
    + [(name, np.int32) for name in ("num_tokens", "num_heads", "batch", "max_q_len", "page_size")]
    + [("page_magic", np.uint32)]
    + [
        (name, np.int32)
        for name in (
            "page_shift",
            "mask_words_per_row",
            "num_splits",
            "mask_mode",
            "wide_ids",
            "wide_indptr",
            "vectorized",
        )
    ]
    + [("sm_scale", np.float32), ("logit_cap", np.float32), ("kv_scale_value", np.float32)]
    + [(name, np.uint64) for name in ("work_items", "work_merges", "work_scratch")]
    + [(name, np.int32) for name in ("work_blocks", "work_row_tiles", "work_start_tiles", "work_least_tiles")]
    + [("lse_base_2", np.int32)],
    align=True,
)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy type of an element type's name; bfloat16 is that of `ml_dtypes`."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def row_bytes(kv_dtype: str) -> int:
    """Return the size of a cache row.

    Parameters
    ----------
    kv_dtype : str
        A key of `DTYPE_CODES` or of `FP8_CODES`.
    """
    if kv_dtype in FP8_CODES:
        return DS_MLA_BYTES if kv_dtype == "fp8_ds_mla" else D
    return D * numpy_dtype(kv_dtype).itemsize


def new_params(**fields: Any) -> npt.NDArray[np.void]:
    """Return a size-1 array of `PARAMS_DTYPE` with the given fields set and the others zero.

    Parameters
    ----------
    **fields
        Names of `PARAMS_DTYPE` and their values; pointers are integers.

    Returns
    -------
    numpy.ndarray, shape (1,), PARAMS_DTYPE
    """
    params = np.zeros(1, PARAMS_DTYPE)
    for name, value in fields.items():
        params[name] = value
    return params


def page_divisor(page_size: int) -> tuple[int, int]:
    """Return `(page_magic, page_shift)` with which the kernels divide a token by `page_size`.

    A power of two needs the shift alone (`page_magic` 0). Else the quotient of every token below 2**31 is
    `umulhi(token, page_magic) >> page_shift`: round-up method of Granlund and Montgomery, "Division by
    invariant integers using multiplication", PLDI 1994, section 4, whose multiplier fits 32 bits for 31-bit
    dividends.

    Parameters
    ----------
    page_size : int
        Tokens a page holds, at least 1.
    """
    shift = (page_size - 1).bit_length()
    if page_size == 1 << shift:
        return 0, shift
    magic = -(-(1 << (31 + shift)) // page_size)
    return magic, shift - 1
