"""`deterministic=True` on a GPU: as on the emulator, with the tensor cores' own sums and on longer contexts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from deterministic_cases import (
    BASE,
    BATCH,
    DTYPES,
    assert_same_bits,
    decode,
    large_values,
    request,
    roomy,
    wide_scores,
)
from test_verify_gpu import mla_verify
from verify_cases import CASES

from mlaflash import TreeMask, oracle
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build

pytestmark = pytest.mark.gpu
# Up to 16 chunks, the last one full, of one token, and in between.
LONG = replace(
    BATCH, name="long", q_lens=(1, 8, 0, 3, 2, 1, 5, 12), kv_lens=(1, 4096, 0, 257, 300, 3841, 1024, 2000), page_size=64
)


def verify(arguments: dict[str, Any], **extra: Any) -> tuple[np.ndarray, np.ndarray]:
    return mla_verify(**arguments, **extra, deterministic=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [8, 20])
def test_b8_a_row_is_the_same_alone_in_a_batch_and_as_a_decode_call(dtype: str, heads: int) -> None:
    arguments = build(replace(LONG, dtype=dtype, heads=heads), 1)
    out, lse = verify(arguments)
    result = compare(out, lse, *oracle.mla_verify(**arguments), tolerance(dtype, dtype))
    assert result.passed, result.reason
    for index, q_len in enumerate(LONG.q_lens):
        if q_len == 0:
            continue
        alone = request(arguments, index)
        begin = arguments["qo_indptr"][index]
        assert_same_bits(verify(alone), (out[begin : begin + q_len], lse[begin : begin + q_len]))
        for token in range(q_len):
            row = begin + token
            assert_same_bits(verify(decode(alone, token)), (out[row : row + 1], lse[row : row + 1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_among_512_and_with_any_head_beside_it(dtype: str) -> None:
    """Both forms of the merge: one warp and four for the chunks of a row."""
    arguments = build(replace(BASE, dtype=dtype, q_lens=(70,), kv_lens=(4000,)), 2)
    out, lse = verify(arguments)
    for token in (0, 33, 69):
        rows = slice(token, token + 1)
        one = decode(arguments, token)
        assert_same_bits(verify(one), (out[rows], lse[rows]))
        assert_same_bits(verify(one | {"q": one["q"][:, 5:6]}), (out[rows, 5:6], lse[rows, 5:6]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_whatever_bounds_the_lengths(dtype: str) -> None:
    arguments = request(build(replace(LONG, dtype=dtype), 3), 7)
    tight = verify(arguments, max_kv_len=2000, max_q_len=12)
    assert_same_bits(verify(arguments, budget="sm_120"), tight)
    for chunks in (9, 100, 1000):
        assert_same_bits(verify(roomy(arguments, chunks)), tight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 48, 64])
def test_a_row_is_the_same_wherever_its_tokens_lie(dtype: str, page_size: int) -> None:
    arguments = build(replace(BASE, dtype=dtype, q_lens=(3,), kv_lens=(1500,), addressing="dense"), 4)
    expected = verify(arguments)
    rows = arguments["kv_cache"].reshape(-1, 576)[:1500]
    pages = -(-1500 // page_size)
    order = np.random.default_rng(page_size).permutation(pages + 1)[:pages]
    pool = np.full((pages + 1, page_size, 576), np.nan, rows.dtype)
    token = np.arange(1500)
    pool[order[token // page_size], token % page_size] = rows
    moved = arguments | {"kv_cache": pool, "page_size": page_size, "block_table": order[None].astype("int32")}
    assert_same_bits(verify(moved), expected)
    assert_same_bits(verify(moved | {"block_table": order[None].astype("int64")}), expected)
    assert_same_bits(verify(moved | {"kv_cache": (pool[..., :512].copy(), pool[..., 512:].copy())}), expected)
    assert_same_bits(verify(moved | {"new_kv": rows[-3:].copy()}), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_under_every_mask_that_shows_it_the_same(dtype: str) -> None:
    arguments = build(replace(BASE, dtype=dtype, kv_lens=(1027,)), 5)
    out, lse = verify(arguments)
    assert_same_bits(verify(arguments | {"mask": TreeMask.causal([8])}), (out, lse))
    seen = np.random.default_rng(5).random((8, 8)) < 0.5
    seen[[2, 7]] = np.tril(np.ones((8, 8), bool))[[2, 7]]
    mixed = verify(arguments | {"mask": TreeMask.from_dense([seen])})
    assert_same_bits((mixed[0][[2, 7]], mixed[1][[2, 7]]), (out[[2, 7]], lse[[2, 7]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_apart(dtype: str) -> None:
    arguments = wide_scores(dtype)
    out, lse = verify(arguments, out_dtype="float32")
    for token in range(8):
        rows, one = slice(token, token + 1), decode(arguments, token)
        assert_same_bits(verify(one, out_dtype="float32"), (out[rows], lse[rows]))
        one["q"] = one["q"][:, 3:5]
        assert_same_bits(verify(one, out_dtype="float32"), (out[rows, 3:5], lse[rows, 3:5]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_product_of_zero_and_a_large_value_cuts_nothing_off(dtype: str) -> None:
    """The one thing here that the emulator cannot know: what the tensor cores do with it."""
    arguments, small = large_values(dtype)
    out, lse = verify(arguments, out_dtype="float32")
    assert np.abs(out[0]).max() < 10 * small < 0.1 < out[7].max()
    assert_same_bits(verify(decode(arguments, 0), out_dtype="float32"), (out[:1], lse[:1]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_right(case: Case) -> None:
    for dtype in {"bfloat16", case.dtype}:
        arguments = build(replace(case, dtype=dtype), 6)
        allowed = tolerance(dtype, dtype)
        # Each chunk is rounded to out's type once more: three roundings in place of two.
        allowed = replace(allowed, norm=1.5**0.5 * allowed.norm)
        result = compare(*verify(arguments), *oracle.mla_verify(**arguments), allowed)
        assert result.passed, result.reason


def test_lse_in_base_2() -> None:
    arguments = build(replace(BASE, kv_lens=(700,)), 7)
    for how in ({}, {"kernel": "naive"}, {"kernel": "tile"}, {"deterministic": True}):
        out, lse = mla_verify(**arguments, **how)
        same_out, lse_2 = mla_verify(**arguments, **how, lse_base="2")
        np.testing.assert_array_equal(same_out, out)
        np.testing.assert_allclose(lse, lse_2 * np.float32(np.log(2)), rtol=2e-7)
