"""Random inputs of one verify step that are as large as serving makes them, and its exact results for a few rows.

A cache of gigabytes is made of one block of random rows: slot s holds row s modulo `PERIOD`. So the scores of a row
against the block give its scores against the cache, and a float64 reference costs the same at any length.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlaflash.kv.quantize import dequantize_ds_mla, dequantize_e4m3
from mlaflash.lab.inputs import COMMON_SHARE, KV_SCALE, MAX_REACH, SCORE_SPREAD, stored_rows
from mlaflash.lab.presets import KIMI_K2_SM_SCALE
from mlaflash.masks import TreeMask
from mlaflash.params import DL, D, numpy_dtype, row_bytes
from mlaflash.shape import VerifyShape

PERIOD: Final = 65537
"""Rows of the block: a prime, so that pages begin anywhere in it."""

_CHECKED_ROWS = 8
_LEAST_SPARE_PAGES = 2

Array = npt.NDArray[Any]


@functools.lru_cache(maxsize=2)
def block(dtype: str, seed: int) -> Array:
    """Return the random rows, which share a common vector as a model's do.

    Parameters
    ----------
    dtype : str
    seed : int

    Returns
    -------
    numpy.ndarray, shape (PERIOD, 576)
    """
    rng = np.random.default_rng([seed, PERIOD])
    rows = rng.standard_normal((PERIOD, D), np.float32)
    rows += COMMON_SHARE * rng.standard_normal(D, np.float32)
    made: Array = rows.astype(numpy_dtype(dtype))
    made.flags.writeable = False
    return made


@functools.lru_cache(maxsize=2)
def stored_block(dtype: str, kv_dtype: str | None, seed: int) -> Array:
    """Return the rows as a cache holds them.

    Parameters
    ----------
    dtype : str
    kv_dtype : str or None
        None is `dtype`.
    seed : int

    Returns
    -------
    numpy.ndarray, shape (PERIOD, 576); of ``"fp8_ds_mla"`` (PERIOD, 656)
        Caches of 8 bits are uint8.
    """
    made = stored_rows(block(dtype, seed), kv_dtype)
    made.flags.writeable = False
    return made


@functools.lru_cache(maxsize=1)
def _exact_block(dtype: str, kv_dtype: str | None, seed: int) -> Array:
    rows = stored_block(dtype, kv_dtype, seed)
    if kv_dtype is not None:
        rows = dequantize_ds_mla(rows) if kv_dtype == "fp8_ds_mla" else dequantize_e4m3(rows, KV_SCALE)
    return rows.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Expected:
    """Exact results of some rows of one request.

    Attributes
    ----------
    tokens, heads : numpy.ndarray of int, shape (n,)
        Where the rows are in ``out``: query token of the whole batch, and head.
    out : numpy.ndarray of float64, shape (n, 512)
    lse : numpy.ndarray of float64, shape (n,)
    """

    tokens: Array
    heads: Array
    out: Array
    lse: Array


class Workload:
    """Inputs of one step, on the host; the cache only on demand.

    Parameters
    ----------
    shape : VerifyShape
    kv_lens : sequence of int
        Tokens of each request.
    seed : int
        The same shape, lengths and seed give the same inputs.

    Attributes
    ----------
    num_pages : int
        Of the cache; their order is shuffled.
    table : numpy.ndarray of int32, shape (B, pages of the longest request)
    """

    def __init__(self, shape: VerifyShape, kv_lens: Sequence[int], seed: int) -> None:
        self.shape = shape
        self.kv_lens = tuple(kv_lens)
        self.seed = seed
        rng = np.random.default_rng([seed, zlib.crc32(repr((shape, self.kv_lens)).encode())])
        batch, q_len, heads = len(self.kv_lens), shape.q_len, shape.num_heads
        self._rng_mask = rng.spawn(1)[0]
        dtype = numpy_dtype(shape.dtype)
        q_std = np.float32(SCORE_SPREAD / (np.sqrt(D) * KIMI_K2_SM_SCALE))
        self.q: Array = (q_std * rng.standard_normal((batch, q_len, heads, D), np.float32)).astype(dtype)
        self.new_kv: Array | None = None
        if shape.new_kv:
            self.new_kv = rng.standard_normal((batch * q_len, D), np.float32).astype(dtype)
        width = max(1, -(-max(self.kv_lens, default=0) // shape.page_size))
        self.num_pages = batch * width + _LEAST_SPARE_PAGES
        self.table: Array = rng.permutation(self.num_pages)[: batch * width].reshape(batch, width).astype(np.int32)
        self.mask: str | TreeMask = shape.mask
        if shape.mask == "tree":
            parents = [
                [int(self._rng_mask.integers(max(i - MAX_REACH, 0), i)) if i else -1 for i in range(q_len)]
                for _ in range(batch)
            ]
            self.mask = TreeMask.from_parents(np.array(parents, np.int32))

    @property
    def cache_bytes(self) -> int:
        """Size of the cache."""
        return self.num_pages * self.shape.page_size * row_bytes(self.shape.stored)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the call that are no arrays, and those that stay on the host."""
        shape = self.shape
        of_cache = {"kv_dtype": shape.kv_dtype} if shape.kv_dtype else {}
        return {
            **(of_cache | {"kv_scale": KV_SCALE} if shape.kv_dtype == "float8_e4m3" else of_cache),
            "sm_scale": KIMI_K2_SM_SCALE,
            "logit_cap": self.shape.logit_cap,
            "max_kv_len": self.shape.kv_len,
            "out_dtype": self.shape.out_dtype,
        }

    def host_arguments(self) -> dict[str, Any]:
        """Return the whole call in NumPy, for the emulator and the oracle."""
        slots = np.arange(self.num_pages * self.shape.page_size)
        stored = stored_block(self.shape.dtype, self.shape.kv_dtype, self.seed)
        rows = stored[slots % PERIOD].reshape(self.num_pages, self.shape.page_size, -1)
        cache: Any = rows
        if self.shape.split_kv:
            cache = tuple(np.ascontiguousarray(part) for part in (rows[..., :DL], rows[..., DL:]))
        arguments = {
            "q": self.q,
            "kv_cache": cache,
            "kv_lens": np.array(self.kv_lens, np.int32),
            "block_table": self.table,
            "mask": self.mask,
            **self.options,
        }
        return arguments if self.new_kv is None else arguments | {"new_kv": self.new_kv}

    def expected(self) -> Expected:
        """Compute a few rows of the last request in float64."""
        shape, request = self.shape, len(self.kv_lens) - 1
        kv_len, rows = self.kv_lens[request], shape.rows
        picked = np.unique(np.linspace(0, rows - 1, min(_CHECKED_ROWS, rows)).astype(int))
        tokens, heads = picked // shape.num_heads, picked % shape.num_heads
        new = 0 if self.new_kv is None else min(kv_len, shape.q_len)
        token = np.arange(kv_len - new)
        size = shape.page_size
        slots = self.table[request][token // size].astype(np.int64) * size + token % size
        keys, where = _exact_block(shape.dtype, shape.kv_dtype, self.seed), slots % PERIOD
        if len(where) < PERIOD // 2:  # few of the block's rows
            distinct, where = np.unique(where, return_inverse=True)
            keys = keys[distinct]
        if self.new_kv is not None:
            where = np.concatenate([where, len(keys) + np.arange(new)])
            end = (request + 1) * shape.q_len
            keys = np.concatenate([keys, self.new_kv[end - new : end].astype(np.float64)])
        scores = (self.q[request, tokens, heads].astype(np.float64) @ keys.T)[:, where] * KIMI_K2_SM_SCALE
        if shape.soft_cap:
            scores = shape.logit_cap * np.tanh(scores / shape.logit_cap)
        scores[~self._visible(request, tokens)] = -np.inf
        top = scores.max(axis=1, initial=-np.inf)
        is_empty = top == -np.inf
        weights = np.exp(scores - np.where(is_empty, 0.0, top)[:, None])
        sums = np.where(is_empty, 1.0, weights.sum(axis=1))
        # Tokens of one row of the block are one key with the weight of all.
        of_keys = np.stack([np.bincount(where, row, len(keys)) for row in weights / sums[:, None]])
        return Expected(request * shape.q_len + tokens, heads, of_keys @ keys[:, :DL], top + np.log(sums))

    def _visible(self, request: int, tokens: Array) -> Array:
        """Say which KV tokens of a request some of its query tokens see, (n, kv_len)."""
        q_len, kv_len = self.shape.q_len, self.kv_lens[request]
        prefix = kv_len - q_len
        seen = np.ones((len(tokens), kv_len), bool)
        if isinstance(self.mask, TreeMask):
            dense = self.mask.to_dense()[request]
            seen[:, max(prefix, 0) :] = np.asarray(dense)[tokens][:, max(-prefix, 0) :]
        elif self.mask == "causal":
            seen &= np.arange(kv_len) <= prefix + tokens[:, None]
        return seen
