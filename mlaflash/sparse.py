"""Sparse attention on a GPU: every query token lists the cache rows that it sees."""

from __future__ import annotations

from typing import Any

from mlaflash import reuse
from mlaflash.attention import call_or_repeat
from mlaflash.checks import is_number
from mlaflash.problem import Problem
from mlaflash.tiles import KernelConfig


def mla_sparse(
    q: Any,
    kv_cache: Any,
    indices: Any,
    *,
    sm_scale: float,
    topk_lens: Any = None,
    kv_dtype: Any = None,
    kv_scale: Any = 1.0,
    logit_cap: float = 0.0,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    lse_base: str = "e",
    kernel: str | None = None,
    tiles: KernelConfig | None = None,
    budget: str | None = None,
    validate: bool = False,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attend each query token to the cache rows in its own list, which all its heads share.

    The attention of DeepSeek-V3.2 and GLM-5 behind their indexer (DeepSeek Sparse Attention: DeepSeek-V3.2,
    arXiv:2512.02556). The kernels are those of `mla_verify`, to which each query token is a request.

    Parameters
    ----------
    q : array, shape (T, H, 576), float32, bfloat16 or float16
        Absorbed queries, as in `mla_verify`; or the pair ``(q_nope, q_pe)``. At most 65,535 query tokens.
    kv_cache : array, q's dtype, or 8 bits
        ``(slots, 576)`` or ``(slots, 1, 576)``, or pages ``(pages, page_size, 576)`` or ``(pages, page_size, 1, 576)``
        that follow each other in memory; or the pair ``(kv_c, k_pe)`` of widths 512 and 64.
    indices : array, shape (T, topk), int32 or int64
        Slots of each query token, in any order: of pages, ``page * page_size`` and the place in the page. -1, anywhere,
        is none. A slot that is listed twice counts twice.
    sm_scale : float
        Multiplies ``q . row``, as in `mla_verify`.
    topk_lens : array, shape (T,), int32, optional
        Only so many first entries of each row of `indices` count, 0 to topk; what lies behind is not looked at. Lists
        padded with -1 give the same result and cost the time of their full length.
    kv_dtype, kv_scale
        Of a cache of 8 bits, as in `mla_verify`.
    logit_cap : float
        ``logit_cap * tanh(score / logit_cap)``; 0 for none.
    out, lse, out_dtype, lse_base, kernel, tiles, budget, stream
        As in `mla_verify`.
    validate : bool
        Also check `topk_lens` and `indices` on the host, and so synchronise.

    Returns
    -------
    out : array, shape (T, H, 512), q's dtype or `out_dtype`
        0 for a query token without an entry.
    lse : array, shape (T, H), float32
        Logarithm of the sum of the exponentials of the scores; -inf for a query token without an entry.

    Raises
    ------
    MlaFlashError
        As in `mla_verify`.
    """
    # On the host it is an option, on the device an array like the others.
    scale_array, scale_value = (None, kv_scale) if is_number(kv_scale) else (kv_scale, None)
    arrays = {
        "q": q,
        "kv_cache": kv_cache,
        "indices": indices,
        "topk_lens": topk_lens,
        "kv_scale": scale_array,
        "out": out,
        "lse": lse,
    }
    options = {
        "sm_scale": sm_scale,
        "kv_dtype": kv_dtype,
        "kv_scale": scale_value,
        "logit_cap": logit_cap,
        "out_dtype": out_dtype,
        "lse_base": lse_base,
        "kernel": kernel,
        "tiles": tiles,
        "budget": budget,
    }
    # The name keeps it apart from the signatures of mla_verify.
    signature = reuse.Signature(arrays, ("mla_sparse", *options.values()))
    arguments = arrays | options | {"kv_scale": kv_scale}
    return call_or_repeat(signature, arguments, validate=validate, stream=stream, read=Problem.from_lists)
