"""Problems of `deterministic=True`, and calls that must give their rows the same bits; for the emulator and a GPU."""

from dataclasses import replace
from typing import Any

import numpy as np
from verify_cases import SCALE

from mlaflash.lab.inputs import GARBAGE_ID, Case, build
from mlaflash.schedule import CHUNK_TOKENS

DTYPES = ["bfloat16", "float16", "float32"]
KV_LEN = 2 * CHUNK_TOKENS + 5
BASE = Case(name="deterministic", q_lens=(8,), kv_lens=(KV_LEN,), heads=8, sm_scale=SCALE, page_size=16)
BATCH = replace(
    BASE,
    name="batch",
    q_lens=(1, 8, 0, 3, 2, 1, 5, 2),
    kv_lens=(1, CHUNK_TOKENS + 4, 0, CHUNK_TOKENS, 300, 2 * CHUNK_TOKENS + 1, 16, 90),
)


def assert_same_bits(left: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(*(np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in (a, b)))


def request(arguments: dict[str, Any], index: int) -> dict[str, Any]:
    """Return request `index` of a batch as a call of its own."""
    q_begin, q_end = arguments["qo_indptr"][index : index + 2]
    begin, end = arguments["kv_indptr"][index : index + 2]
    return arguments | {
        "q": arguments["q"][q_begin:q_end],
        "kv_lens": arguments["kv_lens"][index : index + 1],
        "qo_indptr": np.array([0, q_end - q_begin], np.int32),
        "kv_indptr": np.array([0, end - begin], np.int32),
        "kv_indices": arguments["kv_indices"][begin:end],
    }


def decode(arguments: dict[str, Any], token: int) -> dict[str, Any]:
    """Return query token `token` of a causal call of one request as a decode call over the tokens that it sees."""
    q_len = len(arguments["q"])
    return arguments | {
        "q": arguments["q"][token : token + 1],
        "kv_lens": arguments["kv_lens"] - (q_len - 1 - token),
        "qo_indptr": np.array([0, 1], np.int32),
    }


def roomy(arguments: dict[str, Any], chunks: int) -> dict[str, Any]:
    """Return the call with a page table that could hold so many chunks for one request."""
    spare = np.full(chunks * CHUNK_TOKENS // arguments["page_size"], GARBAGE_ID, np.int32)
    return arguments | {"kv_indices": np.concatenate([arguments["kv_indices"], spare])}


def wide_scores(dtype: str) -> dict[str, Any]:
    """Build scores that span 60 powers of two and grow along the tokens, faster for some rows than for others."""
    arguments = build(replace(BASE, dtype=dtype), 3)
    rng = np.random.default_rng(3)
    tokens = arguments["kv_cache"].reshape(-1, 576)
    slots = (arguments["kv_indices"][:-1, None] * 16 + np.arange(16)).reshape(-1)[:KV_LEN]
    # The first rope column alone makes the scores: from -1 to 1 with noise, times up to 30 powers of two.
    tokens[slots, 512:] = 0
    tokens[slots, 512] = np.linspace(-1, 1, KV_LEN) + 0.1 * rng.standard_normal(KV_LEN)
    q = np.zeros((8, 8, 576), np.float32)
    q[..., 512] = np.linspace(0.5, 30, 64).reshape(8, 8)[:, rng.permutation(8)] * np.log(2) / SCALE
    return arguments | {"q": q.astype(arguments["q"].dtype)}


def large_values(dtype: str) -> tuple[dict[str, Any], float]:
    """Build values that are large where the first query token is blind, and otherwise as small as the number returned.

    Their weights are 0 there, and the sums beside these products must lose nothing: were the exponent of a large value
    to count, they would lose about half of their bits.
    """
    large, small = {"float16": (6e4, 1e-4), "bfloat16": (1e30, 1e-12)}[dtype]
    arguments = build(replace(BASE, dtype=dtype, kv_lens=(40,)), 9)
    cache = arguments["kv_cache"].reshape(-1, 576)
    slots = (arguments["kv_indices"][:-1, None] * 16 + np.arange(16)).reshape(-1)[:40]
    cache[slots[:33], :512] *= np.array(small, cache.dtype)
    cache[slots[33:], :512] = large
    arguments["q"][..., :512] = 0
    return arguments, small
