"""The oracle against a second formula, properties, and cases that went wrong elsewhere."""

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fp8_cases import numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaflash.errors import InvalidArgumentError, ShapeError
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.presets import cases
from mlaflash.masks import TreeMask
from mlaflash.merge import merge_states
from mlaflash.oracle import mla_sparse, mla_verify

Array = np.ndarray[Any, np.dtype[Any]]
SCALE = 0.14468


def case(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **changes: Any) -> Case:
    plain = Case(name="test", q_lens=q_lens, kv_lens=kv_lens, heads=2, sm_scale=SCALE, dtype="float32")
    return replace(plain, **changes)


def joined(rows: Any) -> Array:
    return np.concatenate(rows, axis=-1) if isinstance(rows, tuple) else rows


def second_formula(
    q: Any,
    kv_cache: Any,
    *,
    sm_scale: float,
    kv_lens: Array,
    qo_indptr: Array,
    page_size: int,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    block_table: Array | None = None,
    mask: str | TreeMask = "causal",
    tail_lens: Array | None = None,
    new_kv: Any = None,
    kv_dtype: str | None = None,
    kv_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> tuple[Array, Array]:
    """Attend row by row, newest token first, folding each into a running mean with logaddexp."""
    q, pages = joined(q), joined(kv_cache)
    if kv_dtype is not None:
        pages = numbers(pages, kv_dtype, kv_scale)
    out = np.zeros((*q.shape[:2], 512))
    lse = np.full(q.shape[:2], -math.inf)
    for b, kv_len in enumerate(kv_lens.tolist()):
        start, stop = int(qo_indptr[b]), int(qo_indptr[b + 1])
        q_len = stop - start
        tail = q_len if tail_lens is None else int(tail_lens[b])
        for i in range(q_len):
            for t in reversed(range(kv_len)):
                column = t - (kv_len - tail)
                if isinstance(mask, TreeMask) and column >= 0:
                    if not int(mask.words[start + i, column // 32]) >> (column % 32) & 1:
                        continue
                elif mask == "causal" and t > i + kv_len - q_len:
                    continue
                if new_kv is not None and t >= kv_len - q_len:
                    row = joined(new_kv)[stop - kv_len + t]
                else:
                    page = t // page_size
                    if block_table is not None:
                        page_id = block_table[b, page]
                    elif kv_indptr is not None and kv_indices is not None:
                        page_id = kv_indices[kv_indptr[b] + page]
                    else:
                        page_id = b
                    row = pages[page_id, t % page_size]
                values = [float(x) for x in row]
                for h in range(q.shape[1]):
                    score = sm_scale * math.fsum(float(x) * y for x, y in zip(q[start + i, h], values, strict=True))
                    if logit_cap:
                        score = logit_cap * math.tanh(score / logit_cap)
                    both = float(np.logaddexp(lse[start + i, h], score))
                    share = math.exp(score - both)
                    out[start + i, h] += share * (np.array(values[:512]) - out[start + i, h])
                    lse[start + i, h] = both
    return out, lse


def assert_close(got: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-12, atol=1e-12)


def bitwise(got: tuple[Array, Array], expected: tuple[Array, Array]) -> None:
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


@pytest.mark.parametrize("problem", cases("quick", "emulator"), ids=lambda problem: problem.name)
def test_presets_agree_with_the_second_formula(problem: Case) -> None:
    if max(problem.kv_lens) > 20:
        problem = replace(problem, heads=1)
    arguments = build(problem, seed=3)
    expected = second_formula(**(as_verify(arguments) if problem.topk else arguments))
    assert_close((mla_sparse if problem.topk else mla_verify)(**arguments), expected)
    assert np.isfinite(expected[0]).all()


def as_verify(arguments: dict[str, Any]) -> dict[str, Any]:
    """Turn a sparse call into a verify call: one request for each query token, of the slots that it lists."""
    lists = [ids[:count] for ids, count in zip(arguments["indices"], arguments["topk_lens"], strict=True)]
    slots = [ids[ids >= 0] for ids in lists]
    lens = np.array([len(ids) for ids in slots], np.int32)
    return {
        "q": arguments["q"],
        "kv_cache": joined(arguments["kv_cache"]).reshape(-1, 1, 576),
        "kv_lens": lens,
        "kv_indptr": np.array([0, *np.cumsum(lens)], np.int32),
        "kv_indices": np.concatenate(slots),
        "page_size": 1,
        "qo_indptr": np.arange(len(lens) + 1, dtype=np.int32),
        "mask": "none",
        "sm_scale": arguments["sm_scale"],
        "logit_cap": arguments["logit_cap"],
    }


@pytest.mark.parametrize("changes", [{}, {"paired": True}, {"logit_cap": 1.5}, {"kv_lens": (0, 9)}, {"topk": 1}])
def test_lists_are_requests_of_one_query_token(changes: dict[str, Any]) -> None:
    problem = case((4, 2), (7, 9), mask="none", topk=20, page_size=2, id_dtype="int64")
    arguments = build(replace(problem, **changes), seed=5)
    expected = mla_verify(**as_verify(arguments))
    bitwise(mla_sparse(**arguments), expected)
    out, lse = np.empty((6, 2, 512), np.float32), np.empty((6, 2))
    returned = mla_sparse(**arguments, out=out, lse=lse)
    assert returned[0] is out
    np.testing.assert_array_equal(out, expected[0].astype(np.float32))
    np.testing.assert_array_equal(lse, expected[1])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": np.zeros((2, 3, 2, 576), np.float32)}, ShapeError, r"must be \(T, H, 576\)"),
        ({"indices": np.zeros(6, np.int32)}, ShapeError, "indices is int32"),
        ({"indices": np.zeros((5, 20), np.int32)}, ShapeError, "q has 6 rows, indices 5 and topk_lens 6"),
        ({"topk_lens": np.zeros(7, np.int32)}, ShapeError, "topk_lens 7"),
        ({"topk_lens": np.full(6, 21)}, InvalidArgumentError, "topk_lens has 21; indices has only 20"),
        ({"logit_cap": -1.0}, InvalidArgumentError, "logit_cap is -1.0"),
    ],
)
def test_lists_that_do_not_fit_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = build(case((4, 2), (7, 9), mask="none", topk=20), seed=5)
    with pytest.raises(error, match=message):
        mla_sparse(**(arguments | changes))


problems = st.integers(0, 3).flatmap(
    lambda batch: st.builds(
        Case,
        name=st.just("property"),
        q_lens=st.tuples(*[st.integers(0, 3)] * batch),
        kv_lens=st.tuples(*[st.integers(0, 7)] * batch),
        heads=st.integers(1, 2),
        sm_scale=st.sampled_from([SCALE, -0.3, 0.0, 2.0]),
        page_size=st.integers(1, 5),
        dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
        mask=st.sampled_from(["causal", "none", "chain", "tree", "dense"]),
        logit_cap=st.sampled_from([0.0, 1.5]),
        id_dtype=st.sampled_from(["int32", "int64"]),
        addressing=st.sampled_from(["indices", "block_table", "dense"]),
        paired=st.booleans(),
        new_kv=st.booleans(),
    )
)


@settings(deadline=None, max_examples=150)
@given(problems, st.integers(0, 99))
def test_any_problem_agrees_with_the_second_formula(problem: Case, seed: int) -> None:
    arguments = build(problem, seed)
    assert_close(mla_verify(**arguments), second_formula(**arguments))


@settings(deadline=None, max_examples=150)
@given(problems, st.integers(0, 99), st.data())
def test_split_anywhere_and_merge_equals_no_split(problem: Case, seed: int, data: st.DataObject) -> None:
    problem = replace(problem, mask="none", page_size=1, addressing="indices", new_kv=False)
    arguments = build(problem, seed)
    cut = np.array([data.draw(st.integers(0, kv_len)) for kv_len in problem.kv_lens], np.int32)
    rest = {**arguments, "kv_lens": arguments["kv_lens"] - cut}
    rest["kv_indptr"] = arguments["kv_indptr"].copy()
    rest["kv_indptr"][:-1] += cut
    # Each request's list now ends where the next one's cut list begins: no entry past kv_lens is
    # read.
    merged = merge_states(*mla_verify(**{**arguments, "kv_lens": cut}), *mla_verify(**rest))
    assert_close(merged, mla_verify(**arguments))


@settings(deadline=None, max_examples=150)
@given(problems, st.integers(0, 99))
def test_e6_permuted_pages_with_their_table_change_nothing(problem: Case, seed: int) -> None:
    problem = replace(problem, addressing="block_table", paired=False)
    arguments = build(problem, seed)
    order = np.random.default_rng(seed).permutation(len(arguments["kv_cache"]))
    table = arguments["block_table"].copy()
    named = table < len(order)
    table[named] = np.argsort(order)[table[named]]
    moved = {**arguments, "kv_cache": arguments["kv_cache"][order], "block_table": table}
    bitwise(mla_verify(**moved), mla_verify(**arguments))


@settings(deadline=None, max_examples=150)
@given(problems, st.integers(0, 99), st.floats(-30, 30))
def test_a_constant_added_to_all_scores_shifts_lse_and_leaves_out(problem: Case, seed: int, shift: float) -> None:
    problem = replace(problem, sm_scale=SCALE, logit_cap=0.0, paired=False, dtype="float32")
    arguments = build(problem, seed)
    for name in ("kv_cache", "new_kv"):
        if name in arguments:
            arguments[name][..., -1] = np.where(np.isnan(arguments[name][..., -1]), np.nan, 1)
    arguments["q"] = arguments["q"].astype(np.float64)
    arguments["q"][..., -1] = 0
    plain = mla_verify(**arguments)
    arguments["q"][..., -1] = shift / SCALE
    shifted = mla_verify(**arguments)
    np.testing.assert_allclose(shifted[0], plain[0], rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(shifted[1], plain[1] + shift, rtol=1e-11, atol=1e-11)


@given(st.sampled_from([SCALE, 0.0, -1.0, 1e6]), st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_one_visible_token_gives_its_latent(sm_scale: float, seed: int) -> None:
    arguments = build(case((1,), (1,), sm_scale=sm_scale, page_size=4), seed)
    out, lse = mla_verify(**arguments)
    row = arguments["kv_cache"][arguments["kv_indices"][0], 0].astype(np.float64)
    np.testing.assert_array_equal(out, np.broadcast_to(row[:512], out.shape))
    np.testing.assert_allclose(lse[0], sm_scale * (arguments["q"][0] @ row), rtol=1e-12)


@pytest.mark.parametrize("kv_lens", [(9, 20), (2, 0), (40, 3)])
def test_d11_the_chain_tree_is_causal_bitwise(kv_lens: tuple[int, int]) -> None:
    arguments = build(case((4, 6), kv_lens), 1)
    chain = {**arguments, "mask": TreeMask.causal([4, 6])}
    bitwise(mla_verify(**chain), mla_verify(**arguments))


def test_d14_each_tree_path_decoded_linearly_is_its_verify_row() -> None:
    prefix, q_len = 6, 12
    arguments = build(case((q_len,), (prefix + q_len,), mask="tree"), 5)
    out, lse = mla_verify(**arguments)
    parents = arguments["mask"].to_parents()
    ids = arguments["kv_indices"]
    depths = set()
    for i in range(q_len):
        path = [i]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        depths.add(len(path))
        linear = mla_verify(
            arguments["q"][i : i + 1],
            arguments["kv_cache"],
            sm_scale=SCALE,
            kv_lens=np.array([prefix + len(path)]),
            kv_indptr=np.array([0, prefix + len(path)]),
            kv_indices=np.concatenate([ids[:prefix], ids[prefix + np.array(path)]]),
        )
        assert_close(linear, (out[i : i + 1], lse[i : i + 1]))
    assert len(depths) > 2


def test_d1_a_later_column_is_honoured() -> None:
    dense = np.eye(3, dtype=np.bool_)
    dense[0, 2] = True
    arguments = build(case((3,), (5,)), 2)
    later = mla_verify(**{**arguments, "mask": TreeMask.from_dense([dense])})
    dense[0, 2] = False
    without = mla_verify(**{**arguments, "mask": TreeMask.from_dense([dense])})
    assert np.abs(later[0][0] - without[0][0]).max() > 1e-3
    bitwise((later[0][1:], later[1][1:]), (without[0][1:], without[1][1:]))


def test_tree_over_more_tokens_than_the_cache_has() -> None:
    # Four mask columns, two tokens: columns 2 and 3 are the tokens, columns 0 and 1 have none.
    dense = np.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 1, 1]])
    arguments = build(case((4,), (2,)), 2)
    out, lse = mla_verify(**{**arguments, "mask": TreeMask.from_dense([dense])})
    tokens = arguments["kv_cache"][arguments["kv_indices"][:2], 0, :512]
    assert (lse[0] == -np.inf).all()
    assert not out[0].any()
    np.testing.assert_array_equal(out[1:3], np.broadcast_to(tokens[:, None], (2, 2, 512)))
    assert np.isfinite(lse[1:]).all()


def test_tail_lens_shards_merge_to_the_whole() -> None:
    # The draft's last two tokens live in another cache than the prefix and its first two.
    arguments = build(case((4,), (9,), mask="dense"), 4)
    ids = arguments["kv_indices"]
    dense = arguments["mask"].to_dense()[0]
    columns = np.zeros((4, 4), np.bool_)
    columns[:, :2] = dense[:, 2:]
    common = {name: arguments[name] for name in ("q", "kv_cache", "sm_scale", "qo_indptr")}
    first = mla_verify(
        **common,
        kv_lens=np.array([7]),
        kv_indptr=np.array([0, 7]),
        kv_indices=ids[:7],
        mask=arguments["mask"],
        tail_lens=np.array([2]),
    )
    second = mla_verify(
        **common,
        kv_lens=np.array([2]),
        kv_indptr=np.array([0, 2]),
        kv_indices=ids[7:9],
        mask=TreeMask.from_dense([columns]),
        tail_lens=np.array([2]),
    )
    assert_close(merge_states(*first, *second), mla_verify(**arguments))


@pytest.mark.parametrize("mask", ["causal", "chain", "tree"])
def test_a1_rows_that_see_nothing_are_zero_and_minus_infinity(mask: Any) -> None:
    out, lse = mla_verify(**build(case((5,), (2,), mask=mask, dtype="bfloat16"), 0))
    causal = mask != "tree"
    empty = np.array([True, True, True, False, False]) if causal else (lse == -np.inf).all(axis=-1)
    assert empty[:3].any()
    np.testing.assert_array_equal(out[empty], 0)
    np.testing.assert_array_equal(lse[empty], -np.inf)
    assert np.isfinite(lse[~empty]).all()
    assert out[~empty].any()


def test_a2_a8_an_empty_request_leaves_its_neighbours_alone() -> None:
    with_empty = build(case((2, 3, 1), (7, 0, 4)), 0)
    out, lse = mla_verify(**with_empty)
    assert not out[2:5].any()
    assert (lse[2:5] == -np.inf).all()
    for b, rows in ((0, slice(0, 2)), (2, slice(5, 6))):
        begin, end = with_empty["kv_indptr"][b : b + 2]
        alone = mla_verify(
            with_empty["q"][rows],
            with_empty["kv_cache"],
            sm_scale=SCALE,
            kv_lens=with_empty["kv_lens"][b : b + 1],
            kv_indptr=np.array([0, end - begin]),
            kv_indices=with_empty["kv_indices"][begin:end],
        )
        bitwise((out[rows], lse[rows]), alone)


@pytest.mark.parametrize("mask", ["causal", "none", "chain"])
def test_a15_no_tokens_return_empty(mask: Any) -> None:
    for problem in (case((), (), mask=mask), case((0, 0), (3, 0), mask=mask)):
        out, lse = mla_verify(**build(problem, 0))
        assert out.shape == (0, 2, 512)
        assert lse.shape == (0, 2)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a12_e13_poison_that_a_row_does_not_see_never_reaches_it(poison: float) -> None:
    arguments = build(case((3,), (8,)), 0)
    clean = mla_verify(**arguments)
    cache, ids = arguments["kv_cache"], arguments["kv_indices"]
    cache[np.isnan(cache)] = poison
    bitwise(mla_verify(**arguments), clean)
    cache[ids[7]] = poison  # seen by the last row alone
    cache[ids[6]] = poison  # seen by the last two
    out, lse = mla_verify(**arguments)
    bitwise((out[:1], lse[:1]), (clean[0][:1], clean[1][:1]))
    assert not np.isfinite(out[1:]).any()


def test_c3_each_of_several_rows_has_its_own_mask() -> None:
    arguments = build(case((4,), (4,)), 0)
    out, _ = mla_verify(**arguments)
    first = arguments["kv_cache"][arguments["kv_indices"][0], 0, :512]
    np.testing.assert_array_equal(out[0], np.broadcast_to(first, (2, 512)))
    assert all(np.abs(out[i] - out[i - 1]).max() > 1e-3 for i in range(1, 4))


def test_c7_ragged_rows_are_those_of_each_request_alone() -> None:
    arguments = build(case((1, 4, 2), (5, 6, 3), addressing="block_table", page_size=2), 0)
    out, lse = mla_verify(**arguments)
    for b, rows in enumerate((slice(0, 1), slice(1, 5), slice(5, 7))):
        alone = mla_verify(
            arguments["q"][rows],
            arguments["kv_cache"],
            sm_scale=SCALE,
            kv_lens=arguments["kv_lens"][b : b + 1],
            block_table=arguments["block_table"][b : b + 1],
        )
        bitwise((out[rows], lse[rows]), alone)


@pytest.mark.parametrize("heads", [1, 4, 5, 8, 10, 12, 16, 20, 32, 64, 96, 128])
def test_c8_every_head_is_computed_alone(heads: int) -> None:
    arguments = build(case((2,), (6,), heads=heads), 0)
    out, lse = mla_verify(**arguments)
    last = mla_verify(**{**arguments, "q": arguments["q"][:, -1:]})
    assert out.shape == (2, heads, 512)
    assert_close((out[:, -1:], lse[:, -1:]), last)


def test_c10_scale_zero_averages_and_a_missing_scale_is_an_error() -> None:
    arguments = build(case((1,), (6,), sm_scale=0.0), 0)
    out, lse = mla_verify(**arguments)
    rows = arguments["kv_cache"][arguments["kv_indices"][:6], 0, :512].astype(np.float64)
    np.testing.assert_allclose(out[0, 0], rows.mean(axis=0), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, math.log(6))
    del arguments["sm_scale"]
    with pytest.raises(TypeError, match="sm_scale"):
        mla_verify(**arguments)


def test_a_negative_scale_turns_the_order_around() -> None:
    arguments = build(case((1,), (2,), heads=1), 0)
    arguments["q"] = 40 * arguments["q"]
    tokens = arguments["kv_cache"][arguments["kv_indices"][:2], 0].astype(np.float64)
    scores = tokens @ arguments["q"][0, 0].astype(np.float64)
    for sign in (1, -1):
        out, _ = mla_verify(**{**arguments, "sm_scale": sign * 10.0})
        np.testing.assert_allclose(out[0, 0], tokens[np.argmax(sign * scores), :512], rtol=1e-6)


def test_c12_the_whole_prefix_counts() -> None:
    arguments = build(case((2,), (300,)), 0)
    whole = mla_verify(**arguments)
    short = dict(arguments)
    short["kv_indptr"] = arguments["kv_indptr"] + [10, 0]
    short["kv_lens"] = arguments["kv_lens"] - 10
    assert (mla_verify(**short)[1] < whole[1] - 1e-6).all()


def test_c13_the_cap_bounds_scores_before_the_mask() -> None:
    arguments = build(case((2,), (2,), logit_cap=30.0), 0)
    arguments["q"] = 1e4 * arguments["q"]
    out, lse = mla_verify(**arguments)
    assert (np.abs(lse[0]) <= 30).all()
    assert_close((out, lse), second_formula(**arguments))
    # Capped after the mask, the invisible token would count with tanh(-inf) = -1.
    first = arguments["kv_cache"][arguments["kv_indices"][0], 0, :512]
    np.testing.assert_array_equal(out[0], np.broadcast_to(first, (2, 512)))


@pytest.mark.parametrize("page_size", [3, 16, 32, 64])
@pytest.mark.parametrize("addressing", ["indices", "block_table"])
def test_e9_e10_any_page_size_and_id_width_equals_single_slots(page_size: int, addressing: Any) -> None:
    paged = build(case((2, 1), (70, 5), page_size=page_size, addressing=addressing, id_dtype="int64"), 0)
    cache = paged["kv_cache"]
    slots = []
    for b, kv_len in enumerate((70, 5)):
        token = np.arange(kv_len)
        listed = addressing == "indices"
        pages = paged["kv_indices"][paged["kv_indptr"][b] :] if listed else paged["block_table"][b]
        slots.append(pages[token // page_size] * page_size + token % page_size)
    common = {name: paged[name] for name in ("q", "sm_scale", "kv_lens", "qo_indptr")}
    expected = mla_verify(
        kv_cache=cache.reshape(-1, 576),
        kv_indptr=np.array([0, 70, 75]),
        kv_indices=np.concatenate(slots).astype(np.int32),
        **common,
    )
    bitwise(mla_verify(**paged), expected)
    flat = {**paged, "kv_cache": cache.reshape(-1, 1, 576)}
    bitwise(mla_verify(**flat), expected)
    headed = {**paged, "kv_cache": cache[:, :, None], "page_size": None}
    bitwise(mla_verify(**headed), expected)


def test_two_requests_may_share_pages() -> None:
    arguments = build(case((1, 1), (8, 8), addressing="block_table", page_size=4), 0)
    arguments["q"][1] = arguments["q"][0]
    arguments["block_table"][1] = arguments["block_table"][0]
    out, lse = mla_verify(**arguments)
    bitwise((out[0], lse[0]), (out[1], lse[1]))


def test_uniform_batches_keep_their_shape() -> None:
    arguments = build(case((3, 3), (5, 4)), 0)
    out, lse = mla_verify(**arguments)
    del arguments["qo_indptr"]
    bitwise(mla_verify(**arguments), (out, lse))
    arguments["q"] = arguments["q"].reshape(2, 3, 2, 576)
    bitwise(mla_verify(**arguments), (out.reshape(2, 3, 2, 512), lse.reshape(2, 3, 2)))
    q = arguments["q"]
    arguments["q"] = (q[..., :512], q[..., 512:])
    bitwise(mla_verify(**arguments), (out.reshape(2, 3, 2, 512), lse.reshape(2, 3, 2)))


def test_one_dense_request_needs_no_table() -> None:
    arguments = build(case((2,), (6,)), 0)
    expected = mla_verify(**arguments)
    rows = arguments["kv_cache"][arguments["kv_indices"][:6], 0]
    for cache in (rows, rows[:, None], rows[None], rows[None, :, None]):
        dense = mla_verify(arguments["q"], cache, sm_scale=SCALE, kv_lens=np.array([6]))
        bitwise(dense, expected)
    # What is the default may be said.
    bitwise(mla_verify(arguments["q"], rows, sm_scale=SCALE, kv_lens=np.array([6]), page_size=1), expected)


def test_a2_a_cache_without_slots_serves_empty_requests() -> None:
    q = np.zeros((2, 1, 576), np.float32)
    for cache in (np.zeros((0, 576), np.float32), np.zeros((1, 0, 576), np.float32)):
        out, lse = mla_verify(q, cache, sm_scale=SCALE, kv_lens=np.array([0]))
        assert not out.any()
        assert (lse == -np.inf).all()
        with pytest.raises(InvalidArgumentError, match="request 0 reads 1 tokens"):
            mla_verify(q, cache, sm_scale=SCALE, kv_lens=np.array([1]))


def test_strided_views_are_read_as_they_are() -> None:
    arguments = build(case((3,), (6,)), 0)
    expected = mla_verify(**arguments)
    transposed = np.ascontiguousarray(arguments["q"].transpose(1, 0, 2)).transpose(1, 0, 2)
    wide = np.zeros((*arguments["kv_cache"].shape[:2], 640), np.float32)
    wide[..., :576] = arguments["kv_cache"]
    bitwise(mla_verify(**{**arguments, "q": transposed, "kv_cache": wide[..., :576]}), expected)


def test_rows_of_no_request_come_back_empty() -> None:
    arguments = build(case((2,), (6,)), 0)
    expected = mla_verify(**arguments)
    padded = np.concatenate([arguments["q"], np.full((3, 2, 576), np.nan, np.float32)])
    out, lse = mla_verify(**{**arguments, "q": padded})
    bitwise((out[:2], lse[:2]), expected)
    assert not out[2:].any()
    assert (lse[2:] == -np.inf).all()


def test_results_go_into_the_callers_arrays() -> None:
    arguments = build(case((2,), (6,)), 0)
    expected = mla_verify(**arguments)
    out = np.empty((2, 2, 512), ml_dtypes.bfloat16)
    lse = np.empty((2, 2), np.float32)
    got = mla_verify(**arguments, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    bitwise(got, (expected[0].astype(ml_dtypes.bfloat16), expected[1].astype(np.float32)))
    assert mla_verify(**arguments, out_dtype=np.float16)[0].dtype == np.float16


VALID = build(case((2, 2), (6, 4), page_size=2), 0)
TABLE = build(case((2, 2), (6, 4), page_size=2, addressing="block_table"), 0)
BAD_ID = VALID["kv_indices"].copy()
BAD_ID[1] = 77


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"sm_scale": math.nan}, InvalidArgumentError, "sm_scale is nan"),
        ({"sm_scale": math.inf}, InvalidArgumentError, "sm_scale is inf"),
        ({"sm_scale": None}, InvalidArgumentError, "sm_scale is None"),
        ({"logit_cap": -1.0}, InvalidArgumentError, "logit_cap is -1"),
        ({"logit_cap": math.nan}, InvalidArgumentError, "logit_cap is nan"),
        ({"mask": None}, InvalidArgumentError, "mask is None"),
        ({"mask": "tree"}, InvalidArgumentError, "mask is 'tree'"),
        ({"mask": np.ones((4, 4), bool)}, InvalidArgumentError, "mask is array"),
        ({"mask": TreeMask.causal([2, 1])}, ShapeError, "mask has 3 rows and q has 4"),
        ({"mask": TreeMask.causal([1] * 4)}, InvalidArgumentError, "2 masked tokens"),
        ({"tail_lens": np.array([2, 2])}, InvalidArgumentError, "tail_lens"),
        (
            {"mask": TreeMask.causal([2, 2]), "tail_lens": np.array([3, 1])},
            InvalidArgumentError,
            "3 masked tokens",
        ),
        ({"mask": TreeMask.causal([2, 2]), "tail_lens": np.array([1])}, ShapeError, "tail_lens"),
        ({"q": VALID["q"][..., :512]}, ShapeError, "q has shape"),
        ({"q": (VALID["q"][..., :512],)}, ShapeError, "q has 1 parts"),
        ({"q": (VALID["q"][..., :512], VALID["q"][:3, :, 512:])}, ShapeError, "parts of q"),
        ({"q": VALID["q"][:, 0]}, ShapeError, "q has shape"),
        ({"q": VALID["q"].astype(np.int32)}, ShapeError, "q is int32"),
        ({"q": VALID["q"].reshape(2, 2, 2, 576)}, InvalidArgumentError, "qo_indptr"),
        ({"q": VALID["q"][None], "qo_indptr": None}, ShapeError, "1 requests and kv_lens for 2"),
        ({"kv_cache": VALID["kv_cache"][0, 0]}, ShapeError, "kv_cache has shape"),
        ({"kv_cache": VALID["kv_cache"][..., :400]}, ShapeError, "kv_cache has shape"),
        ({"page_size": 3}, InvalidArgumentError, "page_size is 3"),
        ({"page_size": 0}, InvalidArgumentError, "page_size is 0"),
        ({"page_size": 2.0}, InvalidArgumentError, "page_size is 2.0"),
        ({"kv_cache": np.zeros((5, 576), np.float32)}, ShapeError, "5 slots"),
        ({"kv_lens": np.array([6])}, ShapeError, "qo_indptr has 3"),
        ({"kv_lens": np.array([6, -1])}, InvalidArgumentError, r"kv_lens\[1\] is -1"),
        ({"kv_lens": np.array([6.0, 4.0])}, ShapeError, "kv_lens is float64"),
        ({"kv_lens": np.array([9, 4])}, InvalidArgumentError, "request 0 reads 9 tokens"),
        ({"kv_lens": np.array([7, 4])}, InvalidArgumentError, "page id 2147480000"),
        ({"kv_indices": BAD_ID}, InvalidArgumentError, "page id 77"),
        ({"kv_indices": None}, InvalidArgumentError, "kv_indptr was given without kv_indices"),
        ({"kv_indptr": None}, InvalidArgumentError, "kv_indices was given without kv_indptr"),
        ({"kv_indptr": np.array([0, 3])}, ShapeError, "kv_indptr has 2"),
        ({"kv_indptr": np.array([0, 4, 99])}, InvalidArgumentError, "kv_indptr is"),
        ({"block_table": TABLE["block_table"]}, InvalidArgumentError, "block_table and kv_indices"),
        (
            {"kv_cache": VALID["kv_cache"][:1], "kv_indptr": None, "kv_indices": None},
            InvalidArgumentError,
            "pages and there are 2",
        ),
        ({"qo_indptr": np.array([0, 2, 5])}, InvalidArgumentError, "qo_indptr is"),
        ({"qo_indptr": np.array([0, 3, 2])}, InvalidArgumentError, "qo_indptr is"),
        ({"new_kv": VALID["kv_cache"][0]}, ShapeError, "new_kv has"),
        ({"max_q_len": 1}, InvalidArgumentError, "max_q_len is 1"),
        ({"max_kv_len": 5}, InvalidArgumentError, "max_kv_len is 5"),
        ({"out": np.empty((4, 2, 576))}, ShapeError, "out has shape"),
        ({"lse": np.empty((4,))}, ShapeError, "lse has shape"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_refused_by_name(changes: dict[str, Any], error: type[Exception], named: str) -> None:
    mla_verify(**VALID)
    with pytest.raises(error, match=named):
        mla_verify(**{**VALID, **changes})


def test_table_rows_and_uneven_rows_are_refused() -> None:
    with pytest.raises(ShapeError, match="block_table has 1 rows"):
        mla_verify(**{**TABLE, "block_table": TABLE["block_table"][:1]})
    with pytest.raises(ShapeError, match="q has 3 rows"):
        mla_verify(**{**TABLE, "q": TABLE["q"][:3], "qo_indptr": None})
