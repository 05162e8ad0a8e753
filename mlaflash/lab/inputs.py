"""Problems by name, and seeded inputs for them with poison wherever a kernel must not look."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mlaflash.errors import InvalidArgumentError, UnsupportedError
from mlaflash.kv.quantize import quantize_ds_mla, quantize_e4m3
from mlaflash.masks import TreeMask
from mlaflash.params import DL, FP8_CODES, D, row_bytes

Array = npt.NDArray[Any]
MaskKind = Literal["causal", "none", "chain", "tree", "dense"]
Addressing = Literal["indices", "block_table", "dense"]

GARBAGE_ID = 2_147_480_000
SCORE_SPREAD = 2.0
COMMON_SHARE = 0.5
MAX_REACH = 4
HOLES = 0.125
KV_SCALE = float(np.float32(0.013))
"""Of `float8_e4m3` caches: no power of two; the largest of their numbers are a few hundred times as large."""

_NAN_BYTE = 0xFF  # NaN in e4m3, and four of them in float32, two in bfloat16

_DTYPES: dict[str, npt.DTypeLike] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
_ALLOWED = {
    "mask": ("causal", "none", "chain", "tree", "dense"),
    "addressing": ("indices", "block_table", "dense"),
    "id_dtype": ("int32", "int64"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem: everything but the random numbers.

    Attributes
    ----------
    name : str
        Unique in its preset.
    q_lens, kv_lens : tuple of int
        Query tokens and KV tokens of each request, the latter with the former included.
    heads : int
        Query heads.
    page_size : int
        Tokens of a page.
    dtype : {"float32", "bfloat16", "float16"}
        Of q, of `new_kv`, and of the cache where `kv_dtype` is None.
    kv_dtype : {None, "float8_e4m3", "fp8_ds_mla"}
        What a cache of bytes holds.
    mask : {"causal", "none", "chain", "tree", "dense"}
        ``chain`` is the tree mask that equals causal, ``tree`` a random tree, ``dense`` random
        bits: a token may see later ones and be blind to itself.
    sm_scale, logit_cap : float
        As in `mla_verify`.
    id_dtype : {"int32", "int64"}
        Of the page ids.
    addressing : {"indices", "block_table", "dense"}
        How pages are named; ``dense`` makes page b request b and ignores `page_size`.
    paired : bool
        Hand q and the cache over as pairs of two arrays; those of the cache lie in buffers of their own.
    new_kv : bool
        Hand the last q_len tokens over apart from the cache.
    topk : int
        Entries of each query token's list of its request's tokens, for `mla_sparse`; 0 is a `mla_verify` call. Lists
        know no mask.
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int
    sm_scale: float
    page_size: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    mask: MaskKind = "causal"
    logit_cap: float = 0.0
    id_dtype: str = "int32"
    addressing: Addressing = "indices"
    paired: bool = False
    new_kv: bool = False
    topk: int = 0

    def __post_init__(self) -> None:
        """Refuse what no input can be built for."""
        if len(self.q_lens) != len(self.kv_lens):
            raise InvalidArgumentError(
                f"q_lens has {len(self.q_lens)} requests and kv_lens {len(self.kv_lens)}; they must agree."
            )
        if min((*self.q_lens, *self.kv_lens), default=0) < 0:
            raise InvalidArgumentError(
                f"q_lens is {self.q_lens} and kv_lens {self.kv_lens}; lengths must be at least 0."
            )
        if max(self.num_tokens * self.heads, sum(self.kv_lens)) >= 2**31:
            raise InvalidArgumentError(
                f"the requests have {self.num_tokens} query tokens x {self.heads} heads and {sum(self.kv_lens)} KV "
                "tokens; both must stay below 2**31. Use fewer."
            )
        for name in ("heads", "page_size"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.topk < 0 or (self.topk and (self.mask != "none" or self.addressing != "indices" or self.new_kv)):
            raise InvalidArgumentError(
                f"topk is {self.topk}, mask {self.mask!r}, addressing {self.addressing!r} and new_kv {self.new_kv}; "
                "topk must be at least 0, and lists take mask 'none', addressing 'indices' and no new_kv."
            )
        if self.dtype not in _DTYPES:
            raise UnsupportedError(f"dtype is {self.dtype!r}; it must be one of {', '.join(_DTYPES)}.")
        if self.kv_dtype not in (None, *FP8_CODES):
            raise UnsupportedError(
                f"kv_dtype is {self.kv_dtype!r}; it must be one of {', '.join(FP8_CODES)}, or None for dtype itself."
            )
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}."
                )

    @property
    def is_split_kv(self) -> bool:
        """Whether the cache is two arrays; rows of 656 bytes are one in any case."""
        return self.paired and self.kv_dtype != "fp8_ds_mla"

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.q_lens)

    @property
    def stored(self) -> str:
        """What the cache holds: `kv_dtype`, or `dtype`."""
        return self.kv_dtype or self.dtype

    @property
    def num_tokens(self) -> int:
        """Query tokens of the whole batch, T."""
        return sum(self.q_lens)

    @property
    def macs(self) -> int:
        """Multiply-adds of a kernel that skips nothing: 576 + 512 for each row and token."""
        pairs = sum(q_len * (self.topk or kv_len) for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True))
        return pairs * self.heads * (D + DL)


def build(case: Case, seed: int) -> dict[str, Any]:
    """Return the arguments of one `mla_verify` call, or of one `mla_sparse` call where the case has lists, in NumPy.

    Values look like a model's: the rows of the cache share a common vector, and q is scaled so that
    the scores of one row spread by about `SCORE_SPREAD`, a softmax that is neither flat nor
    one-hot. Poison lies wherever nothing may be read from: NaN in every slot past a length and in
    slots of no request (slot 0 included), ids of 2,147,480,000 past the pages that a request needs,
    NaN in the rows of `new_kv` that have no token. Pages are shuffled. Lists have entries of -1 anywhere, slots twice,
    and garbage behind their lengths; NaN lies in every slot that no list names.

    Parameters
    ----------
    case : Case
        The problem.
    seed : int
        The same case and seed give the same arrays.

    Returns
    -------
    dict
        Keyword arguments, `q` and `kv_cache` among them.
    """
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    dtype = np.dtype(_DTYPES[case.dtype])
    num_tokens = case.num_tokens
    common = COMMON_SHARE * rng.standard_normal(D, np.float32)

    q_std = SCORE_SPREAD / (np.sqrt(D) * (abs(case.sm_scale) or 1.0))
    q = (np.float32(q_std) * rng.standard_normal((num_tokens, case.heads, D), np.float32)).astype(dtype)
    new_rows = _rows(rng, num_tokens, common, dtype)
    cached_lens = [
        max(kv_len - q_len, 0) if case.new_kv else kv_len
        for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)
    ]
    pool, page_size, tables = _fill_pool(case, cached_lens, rng, common, dtype)

    if case.topk:
        indices, topk_lens = _lists(case, page_size, tables, rng)
        named = indices[(np.arange(case.topk) < topk_lens[:, None]) & (indices >= 0)]
        pool.reshape(-1, pool.shape[-1])[np.setdiff1d(np.arange(pool.shape[0] * page_size), named)] = _poison(pool)
        return {
            "q": _split(q) if case.paired else q,
            **_cache(case, pool),
            "indices": indices,
            "topk_lens": topk_lens,
            "sm_scale": case.sm_scale,
            "logit_cap": case.logit_cap,
        }
    arguments: dict[str, Any] = {
        "q": _split(q) if case.paired else q,
        **_cache(case, pool),
        "sm_scale": case.sm_scale,
        "logit_cap": case.logit_cap,
        "kv_lens": np.array(case.kv_lens, np.int32),
        "qo_indptr": _indptr(case.q_lens),
        "page_size": page_size,
        "mask": _mask(case, rng),
        **_addresses(case, tables),
    }
    if case.new_kv:
        for start, q_len, kv_len in zip(_indptr(case.q_lens), case.q_lens, case.kv_lens, strict=False):
            new_rows[start : start + max(q_len - kv_len, 0)] = np.nan
        arguments["new_kv"] = _split(new_rows) if case.paired else new_rows
    return arguments


def _rows(rng: np.random.Generator, count: int, common: Array, dtype: np.dtype[Any]) -> Array:
    rows = rng.standard_normal((count, D), np.float32)
    rows += common
    return rows.astype(dtype)


def _fill_pool(
    case: Case,
    cached_lens: list[int],
    rng: np.random.Generator,
    common: Array,
    dtype: np.dtype[Any],
) -> tuple[Array, int, list[Array]]:
    """Return the pool (pages, page_size, 576), its page size, and each request's page ids."""
    if case.addressing == "dense":
        page_size = max(cached_lens, default=0) + 1
        counts = [1] * case.batch
        ids = np.arange(case.batch)
        num_pages = case.batch
    else:
        page_size = case.page_size
        counts = [-(-cached // page_size) for cached in cached_lens]
        spare = 2 + sum(counts) // 64
        num_pages = sum(counts) + spare
        # Page 0 belongs to nobody: padded tokens of an engine point to it.
        ids = 1 + rng.permutation(num_pages - 1)[: sum(counts)]
    if case.kv_dtype is None:
        pool = np.full((num_pages, page_size, D), np.nan, dtype)
    else:
        pool = np.full((num_pages, page_size, row_bytes(case.kv_dtype)), _NAN_BYTE, np.uint8)
    slots = pool.reshape(-1, pool.shape[-1])
    tables = np.split(ids, list(accumulate(counts))[:-1]) if counts else []
    for table, cached in zip(tables, cached_lens, strict=True):
        token = np.arange(cached)
        if cached:
            rows = _rows(rng, cached, common, dtype)
            slots[table[token // page_size] * page_size + token % page_size] = stored_rows(rows, case.kv_dtype)
    return pool, page_size, tables


def stored_rows(rows: Array, kv_dtype: str | None) -> Array:
    """Write rows of the model as a cache holds them.

    Parameters
    ----------
    rows : numpy.ndarray, shape (n, 576)
    kv_dtype : {None, "float8_e4m3", "fp8_ds_mla"}
        None leaves them as they are; `KV_SCALE` is that of ``"float8_e4m3"``.

    Returns
    -------
    numpy.ndarray, shape (n, 576) or (n, 656)
    """
    if kv_dtype is None:
        return rows
    stored: Array = quantize_ds_mla(rows) if kv_dtype == "fp8_ds_mla" else quantize_e4m3(rows, KV_SCALE)[0]
    return stored


def _poison(pool: Array) -> Any:
    return _NAN_BYTE if pool.dtype == np.uint8 else np.nan


def _cache(case: Case, pool: Array) -> dict[str, Any]:
    """Return the arguments about the cache."""
    given: dict[str, Any] = {"kv_cache": tuple(part.copy() for part in _split(pool)) if case.is_split_kv else pool}
    if case.kv_dtype is not None:
        given["kv_dtype"] = case.kv_dtype
    if case.kv_dtype == "float8_e4m3":
        given["kv_scale"] = KV_SCALE
    return given


def _addresses(case: Case, tables: list[Array]) -> dict[str, Array]:
    """Name the pages, with garbage after those that each request needs."""
    if case.addressing == "dense":
        return {}
    if case.addressing == "block_table":
        longest = max(map(len, tables), default=0)
        block_table = np.full((case.batch, longest + 1), GARBAGE_ID, case.id_dtype)
        for row, table in zip(block_table, tables, strict=True):
            row[: len(table)] = table
        return {"block_table": block_table}
    listed = [np.append(table, GARBAGE_ID) for table in tables]
    return {
        "kv_indptr": _indptr([len(ids) for ids in listed]),
        "kv_indices": np.concatenate([*listed, [GARBAGE_ID]]).astype(case.id_dtype),
    }


def _lists(case: Case, page_size: int, tables: list[Array], rng: np.random.Generator) -> tuple[Array, Array]:
    """Return the slots that each query token lists, and how many of them count: none of the second, all of the first.

    Of the first 16 entries of every third token none is a slot: a whole tile of the tensor-core kernels.
    """
    entries = []
    for table, q_len, kv_len in zip(tables, case.q_lens, case.kv_lens, strict=True):
        token = rng.integers(0, max(kv_len, 1), (q_len, case.topk))
        slots = table[token // page_size] * page_size + token % page_size if kv_len else np.full_like(token, -1)
        entries.append(np.where(rng.random(slots.shape) < HOLES, -1, slots))
    indices = np.concatenate([np.empty((0, case.topk), np.int64), *entries])
    indices[2::3, :16] = -1
    lens = rng.integers(0, case.topk + 1, len(indices))
    lens[0:1], lens[1:2] = case.topk, 0
    indices[np.arange(case.topk) >= lens[:, None]] = GARBAGE_ID
    return indices.astype(case.id_dtype), lens.astype(np.int32)


def _mask(case: Case, rng: np.random.Generator) -> str | TreeMask:
    if case.mask in ("causal", "none"):
        return case.mask
    if case.mask == "chain":
        return TreeMask.causal(case.q_lens)
    if case.mask == "dense":
        return TreeMask.from_dense([rng.random((q_len, q_len)) < 0.5 for q_len in case.q_lens])
    parents = [int(rng.integers(max(i - MAX_REACH, 0), i)) if i else -1 for q_len in case.q_lens for i in range(q_len)]
    return TreeMask.from_parents(np.array(parents, np.int32), _indptr(case.q_lens))


def _split(rows: Array) -> tuple[Array, Array]:
    return rows[..., :DL], rows[..., DL:]


def _indptr(lens: tuple[int, ...] | list[int]) -> Array:
    return np.array([0, *accumulate(lens)], np.int32)
