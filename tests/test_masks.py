"""Packing, unpacking and refusing tree masks."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaflash.errors import InvalidArgumentError, ShapeError
from mlaflash.masks import TreeMask

Array = np.ndarray[Any, np.dtype[Any]]

parent_lists = st.integers(0, 70).flatmap(
    lambda q_len: st.tuples(*(st.integers(-1 if i == 0 else 0, max(i - 1, -1)) for i in range(q_len)))
)


def indptr(lens: list[int]) -> Array:
    return np.cumsum([0, *lens])


def test_d9_bits_are_least_significant_first() -> None:
    dense = np.zeros((40, 40), np.bool_)
    dense[0, 1] = dense[39, 33] = True
    words = TreeMask.from_dense([dense]).words
    assert words.dtype == np.uint32
    assert words.shape == (40, 2)
    assert words[0].tolist() == [2, 0]
    assert words[39].tolist() == [0, 2]
    # numpy.packbits' default order puts the same bit elsewhere.
    assert np.packbits(dense, axis=1)[0, 0] == 0b01000000


@pytest.mark.parametrize("q_len", [1, 7, 31, 32, 33, 64, 65, 200])
def test_dense_round_trip_over_word_edges(q_len: int) -> None:
    dense = np.random.default_rng(q_len).random((q_len, q_len)) < 0.5
    mask = TreeMask.from_dense([dense])
    assert mask.words.shape == (q_len, (q_len + 31) // 32)
    np.testing.assert_array_equal(mask.to_dense()[0], dense)
    for i in range(0, q_len, 5):
        for j in range(0, q_len, 3):
            assert bool(mask.words[i, j // 32] >> (j % 32) & 1) == dense[i, j]


def test_d4_ragged_requests_pack_like_each_alone() -> None:
    rng = np.random.default_rng(0)
    lens = [3, 0, 35, 1]
    dense = [rng.random((q_len, q_len)) < 0.5 for q_len in lens]
    mask = TreeMask.from_dense(dense)
    assert (mask.max_q, mask.num_tokens, mask.words.shape) == (35, 39, (39, 2))
    for got, given_ in zip(mask.to_dense(indptr(lens)), dense, strict=True):
        np.testing.assert_array_equal(got, given_)
    assert not mask.bits()[:3, 3:].any()


def test_uniform_array_and_integers_are_taken() -> None:
    dense = np.random.default_rng(1).integers(0, 2, (2, 5, 5))
    mask = TreeMask.from_dense(dense)
    np.testing.assert_array_equal(np.array(mask.to_dense()), dense.astype(bool))


def test_parents_see_themselves_and_their_ancestors() -> None:
    mask = TreeMask.from_parents(np.array([-1, 0, 0, 1, 3]))
    expected = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]
    assert [np.flatnonzero(row).tolist() for row in mask.to_dense()[0]] == expected


@given(st.lists(parent_lists, max_size=3))
def test_parents_round_trip(trees: list[tuple[int, ...]]) -> None:
    lens = [len(tree) for tree in trees]
    flat = np.array([parent for tree in trees for parent in tree], np.int32)
    mask = TreeMask.from_parents(flat, indptr(lens))
    np.testing.assert_array_equal(mask.to_parents(indptr(lens)), flat)


def test_uniform_parents_are_requests_of_their_own() -> None:
    parents = np.array([[-1, 0, 0], [-1, 0, 1]])
    mask = TreeMask.from_parents(parents)
    np.testing.assert_array_equal(mask.to_parents(), parents.ravel())
    assert mask.max_q == 3


def test_d11_causal_is_the_chain() -> None:
    chain = TreeMask.from_parents(np.arange(-1, 39))
    np.testing.assert_array_equal(TreeMask.causal(40).words, chain.words)
    ragged = TreeMask.causal([2, 0, 40])
    for dense, q_len in zip(ragged.to_dense([0, 2, 2, 42]), [2, 0, 40], strict=True):
        np.testing.assert_array_equal(dense, np.tri(q_len, dtype=bool))


def test_forest_only_when_asked_for() -> None:
    parents = np.array([-1, -1, 0])
    with pytest.raises(InvalidArgumentError, match="2 roots"):
        TreeMask.from_parents(parents)
    mask = TreeMask.from_parents(parents, forest=True)
    with pytest.raises(InvalidArgumentError, match="2 roots"):
        mask.to_parents()
    np.testing.assert_array_equal(mask.to_parents(forest=True), parents)


@pytest.mark.parametrize(
    ("parents", "named"),
    [
        ([0], "token 0"),
        ([-1, 1], "token 1"),
        ([-1, 2, 0], "token 1"),
        ([-2], "token 0"),
        ([-1, 0, -3], "token 2"),
    ],
)
def test_malformed_parents_are_refused(parents: list[int], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        TreeMask.from_parents(np.array(parents))
    with pytest.raises(InvalidArgumentError, match="request 1"):
        TreeMask.from_parents(np.array([-1, *parents]), [0, 1, 1 + len(parents)])


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 1], [0, 1]],  # sees a later token, and is blind to itself
        [[1, 0], [1, 0]],  # blind to itself
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]],  # sees its parent and not its grandparent
    ],
)
def test_to_parents_refuses_what_is_no_tree(rows: list[list[int]]) -> None:
    mask = TreeMask.from_dense([np.array(rows)])
    with pytest.raises(InvalidArgumentError, match="to_dense"):
        mask.to_parents()


def test_packed_words_are_kept_and_not_copied() -> None:
    words = np.zeros((4, 1), np.uint32)
    mask = TreeMask.from_packed(words, 4)
    words[2, 0] = 8
    assert mask.to_dense()[0][2].tolist() == [False, False, False, True]
    signed = np.full((4, 1), -1, np.int32)
    assert TreeMask.from_packed(signed, 4).to_dense()[0].all()


@pytest.mark.parametrize(
    ("words", "max_q", "error", "named"),
    [
        (np.zeros((4, 1), np.uint32), 33, ShapeError, "shape"),
        (np.zeros((4, 2), np.uint32), 32, ShapeError, "shape"),
        (np.zeros(4, np.uint32), 4, ShapeError, "shape"),
        (np.zeros((4, 1), np.uint64), 4, ShapeError, "uint64"),
        (np.zeros((4, 4), np.uint32)[:, ::2], 64, ShapeError, "contiguous"),
        ([[1]], 1, ShapeError, "list"),
        (np.zeros((4, 1), np.uint32), -1, InvalidArgumentError, "max_q"),
        (np.zeros((4, 1), np.uint32), 4.0, InvalidArgumentError, "max_q"),
    ],
)
def test_malformed_words_are_refused(words: Any, max_q: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        TreeMask.from_packed(words, max_q)


@pytest.mark.parametrize(
    ("dense", "error", "named"),
    [
        ([np.ones((2, 3), bool)], ShapeError, "square"),
        ([np.eye(2)], ShapeError, "float64"),
        ([np.array([[1, 0], [2, 1]])], InvalidArgumentError, r"\[1, 0\] is 2"),
        ([np.eye(2, dtype=bool), np.array([[-1]])], InvalidArgumentError, r"dense\[1\]"),
        ([[[1, 0], [1]]], ShapeError, r"dense\[0\] makes no array"),
        (5, ShapeError, "dense is a int"),
        (np.array(True), ShapeError, "dense is a ndarray"),
    ],
)
def test_d5_malformed_matrices_are_refused(dense: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        TreeMask.from_dense(dense)


@pytest.mark.parametrize("q_lens", ["8", 2.5, [2, 2.0], [[1, 2]], [3, -1], None])
def test_lengths_of_a_chain_are_integers(q_lens: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="q_lens"):
        TreeMask.causal(q_lens)


def test_parents_of_unlike_rows_are_refused() -> None:
    with pytest.raises(ShapeError, match="parents makes no array"):
        TreeMask.from_parents([[-1], [-1, 0]])


@pytest.mark.parametrize("qo_indptr", [[0, 2], [1, 4], [0, 3, 2, 4], [0, 5], [0, 4, 4, 3]])
def test_request_bounds_must_cover_the_rows(qo_indptr: list[int]) -> None:
    with pytest.raises(InvalidArgumentError, match="qo_indptr"):
        TreeMask.from_parents(np.array([-1, 0, 1, 2]), qo_indptr)


def test_bounds_are_needed_where_requests_differ() -> None:
    mask = TreeMask.causal([2, 1])
    with pytest.raises(InvalidArgumentError, match="qo_indptr"):
        mask.to_dense()
    with pytest.raises(InvalidArgumentError, match="qo_indptr"):
        TreeMask.from_parents(np.array([[-1, 0]]), [0, 2])
    with pytest.raises(ShapeError, match="integers"):
        TreeMask.from_parents(np.array([-1.0, 0.0]))


def test_a15_no_tokens_make_an_empty_mask() -> None:
    for mask in (
        TreeMask.causal([]),
        TreeMask.from_dense([]),
        TreeMask.from_parents(np.zeros(0, int)),
        TreeMask.causal([0, 0]),
    ):
        assert mask.words.shape == (0, 0)
        assert mask.to_parents().shape == (0,)


@pytest.mark.gpu
def test_cupy_arrays_make_cupy_words() -> None:
    import cupy

    parents = np.array([[-1, 0, 0, 2], [-1, 0, 1, 2]], np.int32)
    host = TreeMask.from_parents(parents)
    dense = cupy.asarray(np.array(host.to_dense()))
    for mask in (
        TreeMask.from_parents(cupy.asarray(parents)),
        TreeMask.from_dense(dense),
        TreeMask.from_packed(cupy.asarray(host.words).view(np.int32), 4),
    ):
        assert isinstance(mask.words, cupy.ndarray)
        np.testing.assert_array_equal(mask.words.get(), host.words)
        np.testing.assert_array_equal(mask.to_parents(), parents.ravel())
