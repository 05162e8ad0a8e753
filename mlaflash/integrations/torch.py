"""`mla_verify` as an operator of torch, which ``torch.compile`` keeps whole.

Importing this module registers ``torch.ops.mlaflash.mla_verify``. Code that is not traced needs none of it:
`mlaflash.mla_verify` takes tensors, and fills `out` in place.
"""

from __future__ import annotations

from typing import Any

from mlaflash import attention
from mlaflash.errors import InvalidArgumentError, MissingDependencyError
from mlaflash.interop import as_cupy, device_view
from mlaflash.masks import TreeMask
from mlaflash.params import DL

try:
    import torch
except ImportError as error:
    raise MissingDependencyError(
        f"mlaflash.integrations.torch needs torch, which cannot be imported ({error}); install it as "
        "https://pytorch.org says. mlaflash.mla_verify needs none."
    ) from error

_SCHEMA = (
    "(Tensor q, Tensor kv_cache, Tensor kv_lens, Tensor? kv_indptr=None, Tensor? kv_indices=None, "
    "Tensor? block_table=None, Tensor? qo_indptr=None, Tensor? mask_words=None, Tensor? kv_scale=None, *, "
    "float sm_scale, str mask='causal', SymInt max_q=0, float logit_cap=0.0, str? kv_dtype=None, "
    "SymInt? page_size=None, SymInt? max_q_len=None, SymInt? max_kv_len=None) -> (Tensor, Tensor)"
)


def _run(
    q: Any,
    kv_cache: Any,
    kv_lens: Any,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    block_table: Any = None,
    qo_indptr: Any = None,
    mask_words: Any = None,
    kv_scale: Any = None,
    *,
    sm_scale: float,
    mask: str = "causal",
    max_q: int = 0,
    logit_cap: float = 0.0,
    kv_dtype: str | None = None,
    page_size: int | None = None,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
) -> tuple[Any, Any]:
    return attention.mla_verify(
        q,
        kv_cache,
        sm_scale=sm_scale,
        kv_lens=kv_lens,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        block_table=block_table,
        page_size=page_size,
        qo_indptr=qo_indptr,
        mask=_mask(mask, mask_words, max_q, q),
        logit_cap=logit_cap,
        kv_dtype=kv_dtype,
        kv_scale=1.0 if kv_scale is None else kv_scale,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
    )


def _mask(mask: str, words: Any, max_q: int, q: Any) -> str | TreeMask:
    if (mask == "tree") != (words is not None):
        raise InvalidArgumentError(
            f"mask is {mask!r} and mask_words is {'left out' if words is None else 'given'}; mask='tree' and its words "
            "belong together. Give both, or neither."
        )
    if words is None:
        return mask
    ordinal = q.get_device()
    return TreeMask.from_packed(as_cupy(device_view("mask_words", words, ordinal), ordinal), max_q)


def _allocate(q: Any, kv_cache: Any, kv_lens: Any, *_tensors: Any, **_scalars: Any) -> tuple[Any, Any]:
    """Give results of the right shape and type, and no values: what torch traces."""
    shape = q.shape[:-1]
    return q.new_empty((*shape, DL)), q.new_empty(shape, dtype=torch.float32)


mla_verify = torch.library.custom_op("mlaflash::mla_verify", _run, mutates_args=(), device_types="cuda", schema=_SCHEMA)
"""Operator ``mlaflash::mla_verify``: `mlaflash.mla_verify` on tensors, on torch's current stream; no gradient.

Parameters
----------
q, kv_cache, kv_lens, kv_indptr, kv_indices, block_table, qo_indptr : torch.Tensor
    As in `mlaflash.mla_verify`, `q` and `kv_cache` of one array each.
mask_words : torch.Tensor, shape (T, ceil(max_q / 32)), uint32 or int32, optional
    Words of a `TreeMask`, with ``mask="tree"``.
kv_scale : torch.Tensor of one float32, optional
    Of a ``"float8_e4m3"`` cache; 1 by default.
sm_scale, logit_cap : float
mask : {"causal", "none", "tree"}
max_q : int
    Columns of the tree mask.
kv_dtype : str, optional
    As in `mlaflash.mla_verify`.
page_size, max_q_len, max_kv_len : int, optional
    As in `mlaflash.mla_verify`; all but the tensors by keyword.

Returns
-------
out : torch.Tensor, shape (T, H, 512) or (B, S, H, 512), q's dtype
lse : torch.Tensor, shape (T, H) or (B, S, H), float32

Raises
------
MlaFlashError
    As in `mlaflash.mla_verify`.
"""
mla_verify.register_fake(_allocate)
