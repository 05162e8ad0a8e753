"""The referee: MLA verify attention, and sparse attention, in NumPy, float64 inside, written to be read.

It shares no code with the library's own argument handling, so that a mistake there is found here.
What a row does not see is never selected; nothing is multiplied by 0 to be rid of it, so any bits
may lie in an invisible token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlaflash.errors import InvalidArgumentError, ShapeError
from mlaflash.masks import TreeMask
from mlaflash.params import DL, DR, D

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

_FLOATS = ("bfloat16", "float16", "float32", "float64")


def mla_verify(
    q: Any,
    kv_cache: Any,
    *,
    sm_scale: float,
    kv_lens: Any,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    block_table: Any = None,
    page_size: int | None = None,
    qo_indptr: Any = None,
    mask: str | TreeMask = "causal",
    tail_lens: Any = None,
    new_kv: Any = None,
    kv_dtype: str | None = None,
    kv_scale: Any = 1.0,
    logit_cap: float = 0.0,
    out: Array | None = None,
    lse: Array | None = None,
    out_dtype: Any = None,
    lse_base: str = "e",
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    kernel: str | None = None,
    tiles: Any = None,
    deterministic: bool = False,
    budget: str | None = None,
    validate: bool = True,
) -> tuple[Array, Array]:
    """Attend the draft tokens of each request to its MLA cache, in float64.

    Token ``t`` of a request is its cache row ``t`` (its page ``t // page_size``), or, with
    `new_kv`, one of the last q_len tokens that are read from there. A row of q scores ``sm_scale *
    (q . row)``, soft-capped if asked, over the tokens that it sees; the first 512 columns of those
    rows, weighted by the softmax of the scores, make its output.

    Parameters
    ----------
    q : array, shape (T, H, 576) or (B, S, H, 576), or the pair (q_nope, q_pe) of widths 512 and 64
        Absorbed queries: 512 latent columns, then 64 rope columns.
    kv_cache : array, or the pair (kv_c, k_pe) of widths 512 and 64
        ``(slots, 576)``, ``(slots, 1, 576)``, ``(pages, page_size, 576)`` or ``(pages, page_size,
        1, 576)``. Rows of ``"fp8_ds_mla"`` are 656 bytes.
    sm_scale : float
        Multiplies ``q . k``; any finite value. There is no default (see `yarn_sm_scale`).
    kv_lens : array, shape (B,), integers
        Tokens of each request, its q_len new ones included; a length below q_len is legal.
    kv_indptr : array, shape (B + 1,), integers, optional
        Where each request's pages begin and end in `kv_indices`.
    kv_indices : array, integers, optional
        Page ids. Entries past the pages that a request needs are never looked at.
    block_table : array, shape (B, max_pages), integers, optional
        The same as a table. With neither, page b is request b: a `kv_cache` of shape ``(B, max_kv,
        576)``, or ``(slots, 576)`` for one request.
    page_size : int, optional
        Tokens of a page where `kv_cache` does not say: ``slots = pages * page_size``. 1 by default.
    qo_indptr : array, shape (B + 1,), integers, optional
        Where each request's rows of q begin and end. Without it every request has ``T / B`` rows.
        Rows of q past the last entry belong to nobody and come back empty.
    mask : {"causal", "none"} or TreeMask
        ``"causal"``: row i sees token t if ``t <= kv_len - q_len + i``. ``"none"``: every token. A
        `TreeMask`: every token before the last `tail_lens`, and of those the ones whose bit is set.
    tail_lens : array, shape (B,), integers, optional
        Only with a `TreeMask`: column j of the mask is token ``kv_len - tail_len + j`` of this
        cache. q_len by default; smaller where this cache holds a part of the draft. Columns of a
        token before 0 have no token.
    new_kv : array, shape (T, 576), or the pair of widths 512 and 64, optional
        Rows of the last q_len tokens of each request, which then are not read from the cache; its
        page ids cover the tokens before them. `kv_lens` still counts them.
    kv_dtype : {"float8_e4m3", "fp8_ds_mla"}, optional
        What a cache of bytes holds: numbers of e4m3fn (OCP 8-bit floating point specification,
        revision 1.0), or rows of 512 such numbers, four float32 scales of 128 of them each, and 64
        bfloat16 rope values. Arrays of e4m3fn and rows of 656 bytes need no word.
    kv_scale : float, or array of one
        Multiplies the numbers of a ``"float8_e4m3"`` cache.
    logit_cap : float
        ``logit_cap * tanh(score / logit_cap)`` before the mask; 0 leaves scores alone.
    out, lse : numpy.ndarray, optional
        Filled with the results, cast to their dtypes, and returned.
    out_dtype : dtype, optional
        Dtype of a new `out`; float64 by default.
    lse_base : {"e", "2"}
        Base of `lse`.
    max_q_len, max_kv_len : int, optional
        Upper bounds of the lengths; a request beyond them is refused.
    kernel, tiles, deterministic, budget, validate
        Accepted so that the arguments of one call fit; they choose how the library computes, and
        the oracle has one way. It always validates.

    Returns
    -------
    out : numpy.ndarray, shape (T, H, 512) or (B, S, H, 512), float64
        0 for an empty row.
    lse : numpy.ndarray, shape (T, H) or (B, S, H), float64
        Natural logarithm of the sum of exponentials of the scores, or that in base 2; -inf for an empty row.

    Raises
    ------
    InvalidArgumentError, ShapeError
        An argument is wrong; the message names it, its value and what is allowed.
    """
    _finite("sm_scale", sm_scale)
    if _finite("logit_cap", logit_cap) < 0:
        raise InvalidArgumentError(f"logit_cap is {logit_cap}; it must be 0 (none) or positive.")
    if lse_base not in ("e", "2"):
        raise InvalidArgumentError(f"lse_base is {lse_base!r}; it must be 'e' or '2'.")
    queries = np.concatenate([part.astype(np.float64) for part in _parts("q", q)], axis=-1)
    if queries.ndim not in (3, 4):
        raise ShapeError(f"q has shape {queries.shape}; it must be (T, H, {D}) or (B, S, H, {D}).")
    leading = queries.shape[:-1]
    lens = _lengths("kv_lens", kv_lens)
    bounds = _row_bounds(leading, lens.size, qo_indptr)
    queries = queries.reshape(math.prod(leading[:-1]), *queries.shape[-2:])
    batch = lens.size
    q_lens = np.diff(bounds)
    for name, bound, actual in (("max_q_len", max_q_len, q_lens), ("max_kv_len", max_kv_len, lens)):
        if bound is not None and actual.size and actual.max() > bound:
            raise InvalidArgumentError(
                f"{name} is {bound} and a request has {actual.max()}; it must be an upper bound: raise it."
            )
    tails = _check_mask(mask, tail_lens, q_lens, num_tokens=len(queries))
    new_parts = None if new_kv is None else _parts("new_kv", new_kv)
    if new_parts is not None and new_parts[0].shape[:-1] != (len(queries),):
        raise ShapeError(
            f"new_kv has {new_parts[0].shape[:-1]} rows; it must have one for each of the {len(queries)} rows of q."
        )
    cached_lens = lens if new_parts is None else np.maximum(lens - q_lens, 0)
    tables = _page_tables(kv_indptr, kv_indices, block_table, batch)
    cache = _Cache.open(
        kv_cache, kv_dtype, kv_scale, page_size, dense=block_table is None and kv_indices is None, batch=batch
    )

    result = np.zeros((*queries.shape[:-1], DL))
    logs = np.full(queries.shape[:-1], -np.inf)
    for b in range(batch):
        rows = slice(int(bounds[b]), int(bounds[b + 1]))
        tokens = cache.read(tables[b], int(cached_lens[b]), b)
        if new_parts is not None:
            # Where q_len > kv_len the first of the new tokens do not exist.
            first = rows.stop - int(lens[b] - cached_lens[b])
            tokens = np.concatenate([tokens, _join([part[first : rows.stop] for part in new_parts])])
        visible = _visible(mask, rows, int(lens[b]), int(tails[b]))
        result[rows], logs[rows] = _attend(queries[rows], tokens, visible, sm_scale, logit_cap)
    return (
        _deliver("out", result.reshape(*leading, DL), out, out_dtype),
        _deliver("lse", logs.reshape(leading) / (math.log(2) if lse_base == "2" else 1.0), lse, None),
    )


def mla_sparse(
    q: Any,
    kv_cache: Any,
    indices: Any,
    *,
    sm_scale: float,
    topk_lens: Any = None,
    kv_dtype: str | None = None,
    kv_scale: Any = 1.0,
    logit_cap: float = 0.0,
    out: Array | None = None,
    lse: Array | None = None,
    out_dtype: Any = None,
    lse_base: str = "e",
    kernel: str | None = None,
    tiles: Any = None,
    budget: str | None = None,
    validate: bool = True,
) -> tuple[Array, Array]:
    """Attend each query token to the cache rows that it lists, in float64.

    Parameters
    ----------
    q : array, shape (T, H, 576), or the pair (q_nope, q_pe) of widths 512 and 64
        Absorbed queries, as in `mla_verify`.
    kv_cache : array, or the pair (kv_c, k_pe) of widths 512 and 64
        As in `mla_verify`; a slot is a token of the pages in their order.
    indices : array, shape (T, topk), integers
        Slots of each query token, shared by its heads; -1 is none, and one listed twice counts twice.
    sm_scale : float
        Multiplies ``q . k``; any finite value.
    topk_lens : array, shape (T,), integers, optional
        How many first entries of each row of `indices` count; those behind are never looked at.
    kv_dtype, kv_scale
        As in `mla_verify`.
    logit_cap : float
        ``logit_cap * tanh(score / logit_cap)``; 0 leaves scores alone.
    out, lse, out_dtype, lse_base, kernel, tiles, budget, validate
        As in `mla_verify`.

    Returns
    -------
    out : numpy.ndarray, shape (T, H, 512), float64
        0 for a query token without an entry.
    lse : numpy.ndarray, shape (T, H), float64
        Logarithm of the sum of exponentials of the scores; -inf for a query token without an entry.

    Raises
    ------
    InvalidArgumentError, ShapeError
        An argument is wrong; the message names it, its value and what is allowed.
    """
    _finite("sm_scale", sm_scale)
    if _finite("logit_cap", logit_cap) < 0:
        raise InvalidArgumentError(f"logit_cap is {logit_cap}; it must be 0 (none) or positive.")
    if lse_base not in ("e", "2"):
        raise InvalidArgumentError(f"lse_base is {lse_base!r}; it must be 'e' or '2'.")
    queries = _join(_parts("q", q))
    if queries.ndim != 3:
        raise ShapeError(f"q has shape {queries.shape}; it must be (T, H, {D}).")
    lists = _integers("indices", indices, ndim=2)
    num_tokens, topk = len(queries), lists.shape[1]
    lens = np.full(num_tokens, topk) if topk_lens is None else _lengths("topk_lens", topk_lens)
    if not len(lists) == lens.size == num_tokens:
        raise ShapeError(
            f"q has {num_tokens} rows, indices {len(lists)} and topk_lens {lens.size}; there must be one for each."
        )
    if lens.size and lens.max() > topk:
        raise InvalidArgumentError(f"topk_lens has {lens.max()}; indices has only {topk} entries a row.")
    stored, decode = _stored(kv_cache, kv_dtype, kv_scale)
    parts = [part.reshape(-1, part.shape[-1]) for part in stored]
    result = np.zeros((*queries.shape[:-1], DL))
    logs = np.full(queries.shape[:-1], -np.inf)
    for token in range(num_tokens):
        slots = lists[token, : lens[token]]
        wrong = np.flatnonzero((slots < -1) | (slots >= len(parts[0])))
        if wrong.size:
            raise InvalidArgumentError(
                f"indices[{token}, {wrong[0]}] is {slots[wrong[0]]}; it must be -1 or a slot, 0 to {len(parts[0]) - 1}."
            )
        rows = decode([part[slots[slots >= 0]] for part in parts])
        own = slice(token, token + 1)
        result[own], logs[own] = _attend(queries[own], rows, np.ones((1, len(rows)), np.bool_), sm_scale, logit_cap)
    logs /= math.log(2) if lse_base == "2" else 1.0
    return _deliver("out", result, out, out_dtype), _deliver("lse", logs, lse, None)


def _attend(q: Floats, tokens: Floats, visible: Bools, sm_scale: float, logit_cap: float) -> tuple[Floats, Floats]:
    """Attend `q` (q_len, H, 576) to `tokens` (kv_len, 576) where `visible` says so."""
    out = np.zeros((*q.shape[:-1], DL))
    lse = np.full(q.shape[:-1], -np.inf)

    def score(queries: Floats, keys: Floats) -> Floats:
        scores = sm_scale * (queries @ keys.T)
        return logit_cap * np.tanh(scores / logit_cap) if logit_cap else scores

    # The prefix, which every row sees, is multiplied once for all rows; the rest is selected by
    # row.
    everyone = visible.all(axis=0)
    common, rest = tokens[everyone], tokens[~everyone]
    with np.errstate(invalid="ignore", over="ignore"):
        common_scores = score(q, common)
        for i, sees in enumerate(visible):
            if not sees.any():
                continue
            own = rest[sees[~everyone]]
            scores = np.concatenate([common_scores[i], score(q[i], own)], axis=-1)
            maximum = scores.max(axis=-1, keepdims=True)
            weights = np.exp(scores - maximum)
            total = weights.sum(axis=-1, keepdims=True)
            weighted = weights[:, : len(common)] @ common[:, :DL] + weights[:, len(common) :] @ own[:, :DL]
            out[i] = weighted / total
            lse[i] = (maximum + np.log(total))[:, 0]
    return out, lse


def _visible(mask: str | TreeMask, rows: slice, kv_len: int, tail_len: int) -> Bools:
    """Return which of `kv_len` tokens each of the request's rows sees."""
    q_len = rows.stop - rows.start
    token = np.arange(kv_len)
    if isinstance(mask, TreeMask):
        visible = np.ones((q_len, kv_len), np.bool_)
        column = token - (kv_len - tail_len)
        visible[:, column >= 0] = mask.bits()[rows][:, column[column >= 0]]
        return visible
    last = kv_len - q_len + np.arange(q_len) if mask == "causal" else np.full(q_len, kv_len)
    return token <= last[:, None]


@dataclass(frozen=True)
class _Cache:
    """A paged pool; `parts` are arrays (pages or slots, tokens of one row, width), `decode` reads rows of them."""

    parts: list[Array]
    page_size: int
    decode: Callable[[list[Array]], Floats]

    @classmethod
    def open(
        cls, kv_cache: Any, kv_dtype: str | None, kv_scale: Any, page_size: int | None, *, dense: bool, batch: int
    ) -> _Cache:
        stored_parts, decode = _stored(kv_cache, kv_dtype, kv_scale)
        parts = [_as_pages(part) for part in stored_parts]
        stored, held = parts[0].shape[:2]
        if page_size is None:
            page_size = held
        elif isinstance(page_size, bool) or not isinstance(page_size, (int, np.integer)) or page_size < 1:
            raise InvalidArgumentError(f"page_size is {page_size!r}; it must be a positive integer.")
        if held not in (1, page_size):
            raise InvalidArgumentError(
                f"page_size is {page_size} and the pages of kv_cache hold {held} tokens; leave page_size out."
            )
        if page_size and stored * held % page_size:
            raise ShapeError(
                f"kv_cache has {stored * held} slots, no multiple of page_size {page_size}: it must hold whole pages."
            )
        if dense and batch == 1 and held == page_size == 1:
            page_size = stored  # the slots of the only request, in order
        cache = cls(parts, int(page_size), decode)
        if dense and cache.num_pages < batch:
            raise InvalidArgumentError(
                f"kv_cache has {cache.num_pages} pages and there are {batch} requests; without"
                " kv_indices or block_table page b is request b: pass one of them."
            )
        return cache

    @property
    def num_pages(self) -> int:
        stored, held = self.parts[0].shape[:2]
        return stored * held // self.page_size if self.page_size else stored or 1

    def read(self, table: Int64s, num_tokens: int, b: int) -> Floats:
        """Return the first `num_tokens` rows of the request whose page ids are `table`."""
        if num_tokens > table.size * self.page_size:
            raise InvalidArgumentError(
                f"kv_lens: request {b} reads {num_tokens} tokens from the cache and its"
                f" {table.size} pages of {self.page_size} hold {table.size * self.page_size}; list"
                " more pages, or lower kv_lens."
            )
        if not num_tokens:
            return np.zeros((0, D))
        needed = -(-num_tokens // self.page_size)
        wrong = np.flatnonzero((table[:needed] < 0) | (table[:needed] >= self.num_pages))
        if wrong.size:
            raise InvalidArgumentError(
                f"page id {table[wrong[0]]} (entry {wrong[0]} of request {b}) is out of range;"
                f" kv_cache has pages 0 to {self.num_pages - 1}."
            )
        token = np.arange(num_tokens)
        slot = table[token // self.page_size] * self.page_size + token % self.page_size
        held = self.parts[0].shape[1]
        return self.decode([part[slot // held, slot % held] for part in self.parts])


def _stored(kv_cache: Any, kv_dtype: str | None, kv_scale: Any) -> tuple[list[Array], Callable[[list[Array]], Floats]]:
    """Return the arrays of a cache, and what turns some of their rows into numbers."""
    scale = _finite("kv_scale", np.asarray(kv_scale).reshape(()))
    arrays = [np.asarray(part) for part in (kv_cache if isinstance(kv_cache, (tuple, list)) else [kv_cache])]
    if kv_dtype is None and arrays[0].dtype.name in ("uint8", "float8_e4m3fn"):
        kv_dtype = "fp8_ds_mla" if arrays[0].shape[-1] == _DS_MLA_BYTES else "float8_e4m3"
        if kv_dtype == "float8_e4m3" and arrays[0].dtype == np.uint8:
            raise InvalidArgumentError("kv_cache is uint8, which says no type; pass kv_dtype.")
    if scale <= 0 or (scale != 1 and kv_dtype != "float8_e4m3"):
        raise InvalidArgumentError(f"kv_scale is {scale}; it must be positive, and belongs to a cache of float8_e4m3.")
    if kv_dtype is None or kv_dtype == arrays[0].dtype.name:
        return _parts("kv_cache", kv_cache), _join
    if kv_dtype not in ("float8_e4m3", "fp8_ds_mla") or any(part.itemsize != 1 for part in arrays):
        raise ShapeError(f"kv_dtype is {kv_dtype!r} and kv_cache {arrays[0].dtype}; the bytes must be of that type.")
    widths = [_DS_MLA_BYTES] if kv_dtype == "fp8_ds_mla" else [D] if len(arrays) == 1 else [DL, DR]
    if [part.shape[-1] for part in arrays] != widths:
        raise ShapeError(f"kv_cache has widths {[part.shape[-1] for part in arrays]}; a {kv_dtype} one has {widths}.")
    codes = [part.view(np.uint8) for part in arrays]
    if kv_dtype == "fp8_ds_mla":
        return codes, lambda rows: _read_ds_mla(rows[0])
    return codes, lambda rows: scale * _E4M3[np.concatenate(rows, axis=-1)]


def _read_ds_mla(rows: Array) -> Floats:
    """Return the numbers in rows of 656 bytes."""
    latent, scales, rope = np.split(np.ascontiguousarray(rows), [DL, DL + 16], axis=-1)
    each = np.ascontiguousarray(scales).view(np.float32).astype(np.float64).repeat(128, axis=-1)
    # A bfloat16 is the upper half of a float32.
    upper = np.ascontiguousarray(rope).view(np.uint16).astype(np.uint32) << 16
    return np.concatenate([_E4M3[latent] * each, upper.view(np.float32).astype(np.float64)], axis=-1)


def _e4m3_numbers() -> Floats:
    """Return the number of each code: sign, four bits of exponent with a bias of 7, three of mantissa; no infinity."""
    numbers = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
        numbers.append((math.nan if code & 127 == 127 else size) * (-1 if code & 128 else 1))
    return np.array(numbers)


_DS_MLA_BYTES = DL + 4 * 4 + DR * 2
_E4M3 = _e4m3_numbers()


def _as_pages(part: Array) -> Array:
    """View one array of the cache as (pages or slots, tokens of one row, width)."""
    if part.ndim == 2:
        return part[:, None]
    if part.ndim == 4 and part.shape[2] == 1:
        return part[:, :, 0]
    if part.ndim == 3:
        return part
    raise ShapeError(
        f"kv_cache has shape {part.shape}; it must be (slots, {D}), (slots, 1, {D}), (pages,"
        f" page_size, {D}) or (pages, page_size, 1, {D})."
    )


def _page_tables(kv_indptr: Any, kv_indices: Any, block_table: Any, batch: int) -> list[Int64s]:
    """Return each request's page ids, those past the needed ones included."""
    if (kv_indptr is None) != (kv_indices is None):
        given, absent = ("kv_indptr", "kv_indices")[:: 1 if kv_indices is None else -1]
        raise InvalidArgumentError(f"{given} was given without {absent}; pass both or neither.")
    if block_table is not None and kv_indices is not None:
        raise InvalidArgumentError("block_table and kv_indices were both given; pass one of them.")
    if block_table is not None:
        table = _integers("block_table", block_table, ndim=2)
        if len(table) != batch:
            raise ShapeError(
                f"block_table has {len(table)} rows; it must have one for each of the {batch} requests of kv_lens."
            )
        return list(table)
    if kv_indices is None:
        return list(np.arange(batch)[:, None])
    ids = _integers("kv_indices", kv_indices, ndim=1)
    bounds = _integers("kv_indptr", kv_indptr, ndim=1)
    if bounds.size != batch + 1:
        raise ShapeError(
            f"kv_indptr has {bounds.size} entries; it must have one more than the {batch} requests of kv_lens."
        )
    if bounds[0] < 0 or bounds[-1] > ids.size or (np.diff(bounds) < 0).any():
        raise InvalidArgumentError(
            f"kv_indptr is {bounds.tolist()}; it must rise within 0 to {ids.size}, the number of kv_indices."
        )
    return [ids[bounds[b] : bounds[b + 1]] for b in range(batch)]


def _row_bounds(leading: tuple[int, ...], batch: int, qo_indptr: Any) -> Int64s:
    """Return where each request's rows of the flattened q begin and end."""
    if len(leading) == 3:
        if qo_indptr is not None:
            raise InvalidArgumentError(
                "qo_indptr was given and q is (B, S, H, ...), whose requests all have S rows; leave qo_indptr out."
            )
        if leading[0] != batch:
            raise ShapeError(f"q is for {leading[0]} requests and kv_lens for {batch}; they must agree.")
        return np.arange(batch + 1) * leading[1]
    num_tokens = leading[0]
    if qo_indptr is None:
        if num_tokens % batch if batch else num_tokens:
            raise ShapeError(
                f"q has {num_tokens} rows for the {batch} requests of kv_lens, which is not the"
                " same number each: pass qo_indptr."
            )
        return np.arange(batch + 1) * (num_tokens // batch if batch else 0)
    bounds = _integers("qo_indptr", qo_indptr, ndim=1)
    if bounds.size != batch + 1:
        raise ShapeError(
            f"qo_indptr has {bounds.size} entries; it must have one more than the {batch} requests of kv_lens."
        )
    if bounds[0] != 0 or bounds[-1] > num_tokens or (np.diff(bounds) < 0).any():
        raise InvalidArgumentError(
            f"qo_indptr is {bounds.tolist()}; it must rise from 0 to at most {num_tokens}, the rows of q."
        )
    return bounds


def _check_mask(mask: Any, tail_lens: Any, q_lens: Int64s, num_tokens: int) -> Int64s:
    """Return how many last tokens of each request the mask's columns stand for."""
    if not isinstance(mask, TreeMask):
        if not isinstance(mask, str) or mask not in ("causal", "none"):
            raise InvalidArgumentError(f'mask is {mask!r}; it must be "causal", "none" or a TreeMask.')
        if tail_lens is not None:
            raise InvalidArgumentError(
                f'tail_lens was given with mask "{mask}"; it belongs to a TreeMask: TreeMask.causal is the chain.'
            )
        return q_lens
    if mask.num_tokens != num_tokens:
        raise ShapeError(
            f"mask has {mask.num_tokens} rows and q has {num_tokens}; there must be one mask row for each row of q."
        )
    tails = q_lens if tail_lens is None else _lengths("tail_lens", tail_lens)
    if tails.size != q_lens.size:
        raise ShapeError(
            f"tail_lens has {tails.size} entries; it must have one for each of the {q_lens.size} requests of kv_lens."
        )
    if tails.size and tails.max() > mask.max_q:
        raise InvalidArgumentError(
            f"a request has {tails.max()} masked tokens and the mask {mask.max_q} columns; make a wider mask."
        )
    return tails


def _parts(name: str, arrays: Any) -> list[Array]:
    """Return the one array of width 576 or the two of widths 512 and 64, checked."""
    paired = isinstance(arrays, (tuple, list))
    widths = [DL, DR] if paired else [D]
    parts = [np.asarray(part) for part in (arrays if paired else [arrays])]
    if len(parts) != len(widths):
        raise ShapeError(f"{name} has {len(parts)} parts; a pair has two, of widths {DL} and {DR}.")
    for part, width in zip(parts, widths, strict=True):
        if part.ndim == 0 or part.shape[-1] != width:
            raise ShapeError(
                f"{name} has shape {part.shape}; its last axis must be {width}: {DL} latent and"
                f" {DR} rope columns are the one supported width."
            )
        if part.dtype.name not in _FLOATS:
            raise ShapeError(f"{name} is {part.dtype}; it must be one of {', '.join(_FLOATS)}.")
        if part.shape[:-1] != parts[0].shape[:-1] or part.dtype != parts[0].dtype:
            raise ShapeError(
                f"the parts of {name} are {parts[0].dtype} {parts[0].shape} and {part.dtype}"
                f" {part.shape}; all but the last axis must agree."
            )
    return parts


def _join(parts: list[Array]) -> Floats:
    return np.concatenate([part.astype(np.float64) for part in parts], axis=-1)


def _integers(name: str, array: Any, *, ndim: int) -> Int64s:
    host = np.asarray(array)
    if host.ndim != ndim or (host.size and host.dtype.kind not in "iu"):
        raise ShapeError(f"{name} is {host.dtype} of shape {host.shape}; it must hold integers and have {ndim} axes.")
    return host.astype(np.int64)


def _lengths(name: str, array: Any) -> Int64s:
    lens = _integers(name, array, ndim=1)
    if (lens < 0).any():
        b = int(np.argmax(lens < 0))
        raise InvalidArgumentError(f"{name}[{b}] is {lens[b]}; it must be at least 0.")
    return lens


def _finite(name: str, value: Any) -> float:
    try:
        # float() would also read digits out of a text.
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidArgumentError(f"{name} is {value!r}; it must be a finite number.")
    return number


def _deliver(name: str, result: Floats, into: Array | None, dtype: Any) -> Array:
    if into is None:
        return result if dtype is None else result.astype(dtype)
    if into.shape != result.shape:
        raise ShapeError(f"{name} has shape {into.shape}; the result has shape {result.shape}.")
    into[...] = result.astype(into.dtype)
    return into
