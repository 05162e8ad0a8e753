"""FlashInfer's and SGLang's masks: converted both ways, and refused where a TreeMask cannot say the same."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlaflash import oracle
from mlaflash.errors import InvalidArgumentError, ShapeError, UnsupportedError
from mlaflash.masks import TreeMask

Array = np.ndarray[Any, np.dtype[Any]]

ORDERS = ("little", "big")
Batch = tuple[list[Array], list[int]]


def matrix(q_len: int, seed: int, kind: str) -> Array:
    """Draw a square matrix: any bits, or a forest's."""
    rng = np.random.default_rng(seed)
    if kind == "dense":
        return rng.random((q_len, q_len)) < 0.5
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(q_len)], np.int64)
    return TreeMask.from_parents(parents, forest=True).bits()


requests = st.builds(
    lambda q_len, prefix_len, seed, kind: (matrix(q_len, seed, kind), prefix_len),
    st.one_of(st.integers(0, 9), st.integers(10, 70)),
    st.integers(0, 45),
    st.integers(0, 2**16),
    st.sampled_from(["dense", "forest"]),
)
batches = st.lists(requests, max_size=4).map(lambda drawn: ([d for d, _ in drawn], [p for _, p in drawn]))
single_parents = st.integers(1, 40).flatmap(
    lambda q_len: st.tuples(*(st.integers(-1 if i == 0 else 0, max(i - 1, -1)) for i in range(q_len)))
)
uniform_parents = st.integers(1, 3).flatmap(
    lambda batch: st.integers(1, 40).flatmap(
        lambda q_len: st.lists(
            st.tuples(*(st.integers(-1 if i == 0 else 0, max(i - 1, -1)) for i in range(q_len))),
            min_size=batch,
            max_size=batch,
        )
    )
)


def indptr(lens: list[int]) -> Array:
    return np.cumsum([0, *lens])


def with_prefix(dense: Array, prefix_len: int) -> Array:
    return np.hstack([np.ones((len(dense), prefix_len), np.bool_), dense])


def packed_by_hand(grids: list[Array], bitorder: str) -> Array:
    """Pack bit by bit, each request from a byte of its own on."""
    octets: list[int] = []
    for grid in grids:
        own = [0] * -(-grid.size // 8)
        for n, visible in enumerate(grid.ravel().tolist()):
            own[n // 8] |= visible << (n % 8 if bitorder == "little" else 7 - n % 8)
        octets += own
    return np.array(octets, np.uint8)


@pytest.mark.parametrize("bitorder", ORDERS)
@given(batch=batches)
def test_d4_flashinfer_round_trips_exactly(bitorder: str, batch: Batch) -> None:
    dense, prefix_lens = batch
    mask = TreeMask.from_dense(dense)
    q_lens = [len(own) for own in dense]
    kv_lens = np.array([q_len + prefix for q_len, prefix in zip(q_lens, prefix_lens, strict=True)], np.int32)
    grids = [with_prefix(own, prefix) for own, prefix in zip(dense, prefix_lens, strict=True)]
    expected = np.concatenate(
        [np.zeros(0, np.uint8), *(np.packbits(grid.ravel(), bitorder=bitorder) for grid in grids)]
    )
    packed = mask.to_flashinfer(kv_lens, indptr(q_lens), bitorder=bitorder)
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, expected)
    back = TreeMask.from_flashinfer(packed, kv_lens, indptr(q_lens), bitorder=bitorder)
    assert back.max_q == mask.max_q
    np.testing.assert_array_equal(back.words, mask.words)


@pytest.mark.parametrize("bitorder", ORDERS)
def test_d4_each_request_begins_on_a_byte(bitorder: str) -> None:
    lens = [(3, 7), (2, 5), (5, 13)]  # 21, 10 and 65 bits
    dense = [matrix(q_len, b, "dense") for b, (q_len, _) in enumerate(lens)]
    grids = [with_prefix(own, kv_len - q_len) for own, (q_len, kv_len) in zip(dense, lens, strict=True)]
    packed = packed_by_hand(grids, bitorder)
    assert packed.size == 3 + 2 + 9
    mask = TreeMask.from_flashinfer(packed, [7, 5, 13], [0, 3, 5, 10], bitorder=bitorder)
    np.testing.assert_array_equal(mask.words, TreeMask.from_dense(dense).words)
    np.testing.assert_array_equal(mask.to_flashinfer([7, 5, 13], [0, 3, 5, 10], bitorder=bitorder), packed)


def test_d9_the_order_of_bits_has_no_default() -> None:
    packed = np.zeros(2, np.uint8)
    with pytest.raises(TypeError, match="bitorder"):
        TreeMask.from_flashinfer(packed, [4], [0, 4])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="bitorder"):
        TreeMask.causal(4).to_flashinfer([4])  # type: ignore[call-arg]
    for wrong in ("Little", "", None):
        with pytest.raises(InvalidArgumentError, match="bitorder"):
            TreeMask.from_flashinfer(packed, [4], [0, 4], bitorder=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="bitorder"):
            TreeMask.causal(4).to_flashinfer([4], bitorder=wrong)  # type: ignore[arg-type]


def test_d9_one_bit_in_the_wrong_order_is_another_mask() -> None:
    dense = np.zeros((4, 4), np.bool_)
    dense[0, 1] = True
    packed = np.array([0b10, 0], np.uint8)
    little = TreeMask.from_flashinfer(packed, [4], [0, 4], bitorder="little")
    np.testing.assert_array_equal(little.to_dense()[0], dense)
    big = TreeMask.from_flashinfer(packed, [4], [0, 4], bitorder="big")
    assert np.argwhere(big.to_dense()[0]).tolist() == [[1, 2]]
    # What flashinfer.packbits does unless told otherwise.
    by_default = np.packbits(dense.ravel())
    np.testing.assert_array_equal(
        TreeMask.from_flashinfer(by_default, [4], [0, 4], bitorder="big").to_dense()[0], dense
    )


@given(batch=batches)
def test_d9_the_wrong_order_never_passes_for_the_right_one(batch: Batch) -> None:
    dense, prefix_lens = batch
    mask = TreeMask.from_dense(dense)
    q_lens = [len(own) for own in dense]
    kv_lens = [q_len + prefix for q_len, prefix in zip(q_lens, prefix_lens, strict=True)]
    little, big = (mask.to_flashinfer(kv_lens, indptr(q_lens), bitorder=order) for order in ORDERS)
    if np.array_equal(little, big):
        return
    try:
        wrong = TreeMask.from_flashinfer(little, kv_lens, indptr(q_lens), bitorder="big")
    except (InvalidArgumentError, UnsupportedError):
        return
    assert not np.array_equal(wrong.words, mask.words)


@pytest.mark.parametrize("bitorder", ORDERS)
def test_d10_a_hidden_prefix_is_refused(bitorder: str) -> None:
    q_lens, prefix_lens = [3, 3], [4, 9]
    dense = [np.tri(q_len, dtype=np.bool_) for q_len in q_lens]
    grids = [with_prefix(own, prefix) for own, prefix in zip(dense, prefix_lens, strict=True)]
    grids[1][2, :5] = False  # a sliding window of its last row
    packed = np.concatenate([np.packbits(grid.ravel(), bitorder=bitorder) for grid in grids])
    with pytest.raises(UnsupportedError, match="draft token 2 of request 1 does not see token 0"):
        TreeMask.from_flashinfer(packed, [7, 12], [0, 3, 6], bitorder=bitorder)
    flat = np.concatenate([grid.ravel() for grid in grids])
    with pytest.raises(UnsupportedError, match="draft token 2 of request 1 does not see token 0"):
        TreeMask.from_sglang(flat, mode="full", prefix_lens=prefix_lens, draft_token_num=3)


def test_d5_padded_masks_of_ragged_requests_are_refused() -> None:
    q_lens, kv_lens = [2, 4], [6, 9]
    padded = [with_prefix(np.tri(4, dtype=np.bool_), 5)] * 2  # every request as long as the longest
    packed = np.concatenate([np.packbits(grid.ravel(), bitorder="little") for grid in padded])
    with pytest.raises(ShapeError, match="packed has 10 and these requests need 7 bytes"):
        TreeMask.from_flashinfer(packed, kv_lens, indptr(q_lens), bitorder="little")
    flat = np.concatenate([grid.ravel() for grid in padded])
    with pytest.raises(ShapeError, match="mask has 72 and these requests need 48 elements"):
        TreeMask.from_sglang(flat, mode="full", prefix_lens=[4, 5], qo_indptr=indptr(q_lens))
    square = np.array([np.tri(4, dtype=np.bool_)] * 2)
    with pytest.raises(ShapeError, match="mask has 32 and these requests need 20 elements"):
        TreeMask.from_sglang(square, mode="qlen_only", qo_indptr=indptr(q_lens))


def test_d5_lengths_that_take_equally_many_bytes_are_told_apart() -> None:
    packed = np.packbits(with_prefix(np.ones((1, 1), np.bool_), 15), bitorder="little")
    assert packed.size == 2
    for kv_len in (9, 15):
        with pytest.raises(InvalidArgumentError, match="last byte of request 0"):
            TreeMask.from_flashinfer(packed, [kv_len], [0, 1], bitorder="little")
    short = np.packbits(with_prefix(np.ones((1, 1), np.bool_), 8), bitorder="little")
    with pytest.raises(UnsupportedError, match="does not see token 9"):
        TreeMask.from_flashinfer(short, [16], [0, 1], bitorder="little")


@pytest.mark.parametrize("bitorder", ORDERS)
def test_requests_shorter_than_their_draft(bitorder: str) -> None:
    # Column j is token kv_len - q_len + j, so that a draft of 4 on 3 tokens has no column 0.
    full = np.ones((4, 4), np.bool_)
    mask = TreeMask.from_dense([full, full])
    packed = mask.to_flashinfer([3, 0], bitorder=bitorder)
    assert packed.size == 2
    back = TreeMask.from_flashinfer(packed, [3, 0], [0, 4, 8], bitorder=bitorder)
    exists = np.array([False, True, True, True])
    np.testing.assert_array_equal(back.to_dense()[0], full & exists)
    assert not back.to_dense()[1].any()
    np.testing.assert_array_equal(back.to_flashinfer([3, 0], bitorder=bitorder), packed)
    rng = np.random.default_rng(0)
    q, kv_cache = rng.standard_normal((8, 1, 576)), rng.standard_normal((2, 3, 576))
    outs = [oracle.mla_verify(q, kv_cache, sm_scale=0.1, kv_lens=[3, 0], mask=own)[0] for own in (mask, back)]
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize(
    ("packed", "kv_lens", "qo_indptr", "error", "named"),
    [
        (np.zeros(2, np.int8), [4], [0, 4], ShapeError, "int8"),
        (np.zeros((1, 2), np.uint8), [4], [0, 4], ShapeError, "one axis"),
        (np.zeros(3, np.uint8), [4], [0, 4], ShapeError, "slice a larger buffer"),
        (np.zeros(2, np.uint8), [4, 4], [0, 4], ShapeError, "kv_lens has shape"),
        (np.zeros(2, np.uint8), [4.0], [0, 4], ShapeError, "kv_lens is float64"),
        (np.zeros(2, np.uint8), [-4], [0, 4], InvalidArgumentError, "negative"),
        (np.zeros(2, np.uint8), [4], [1, 4], InvalidArgumentError, "qo_indptr"),
        (np.zeros(2, np.uint8), [4, 4], [0, 4, 3], InvalidArgumentError, "qo_indptr"),
        (np.zeros(2, np.uint8), [4], [], ShapeError, "qo_indptr"),
    ],
)
def test_malformed_flashinfer_masks_are_refused(
    packed: Any, kv_lens: Any, qo_indptr: Any, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        TreeMask.from_flashinfer(packed, kv_lens, qo_indptr, bitorder="little")


@given(batch=batches)
def test_sglang_full_and_qlen_only_round_trip_exactly(batch: Batch) -> None:
    dense, prefix_lens = batch
    mask = TreeMask.from_dense(dense)
    bounds = indptr([len(own) for own in dense])
    grids = [with_prefix(own, prefix) for own, prefix in zip(dense, prefix_lens, strict=True)]
    nothing = np.zeros(0, np.bool_)
    for mode, prefixes, parts in (("full", np.array(prefix_lens, np.int64), grids), ("qlen_only", None, dense)):
        flat = mask.to_sglang(mode=mode, prefix_lens=prefixes, qo_indptr=bounds)
        assert flat.dtype == np.bool_
        np.testing.assert_array_equal(flat, np.concatenate([nothing, *(part.ravel() for part in parts)]))
        for given_ in (flat, flat.astype(np.uint8)):
            back = TreeMask.from_sglang(given_, mode=mode, prefix_lens=prefixes, qo_indptr=bounds)
            assert back.max_q == mask.max_q
            np.testing.assert_array_equal(back.words, mask.words)


@given(batch=st.integers(0, 3), q_len=st.integers(1, 32), seed=st.integers(0, 2**16))
def test_d9_sglang_packed_rows_round_trip_exactly(batch: int, q_len: int, seed: int) -> None:
    dense = [matrix(q_len, seed + b, "dense") for b in range(batch)]
    item_bytes = 1 if q_len <= 8 else 2 if q_len <= 16 else 4
    octets = np.zeros((batch * q_len, item_bytes), np.uint8)
    for row, sees in enumerate(row for own in dense for row in own):
        for j in np.flatnonzero(sees).tolist():
            octets[row, j // 8] |= 1 << (j % 8)
    items = octets.view(f"<u{item_bytes}").ravel().astype(f"u{item_bytes}")
    mask = TreeMask.from_sglang(items, mode="qlen_only_bitpacking", draft_token_num=q_len)
    assert (mask.max_q, mask.num_tokens) == (q_len, batch * q_len)
    for got, own in zip(mask.to_dense(), dense, strict=True):
        np.testing.assert_array_equal(got, own)
    back = mask.to_sglang(mode="qlen_only_bitpacking")
    assert back.dtype == items.dtype
    np.testing.assert_array_equal(back, items)
    signed = TreeMask.from_sglang(items.view(f"i{item_bytes}"), mode="qlen_only_bitpacking", draft_token_num=q_len)
    np.testing.assert_array_equal(signed.words, mask.words)


def test_sglang_masks_of_any_shape_by_draft_token_num() -> None:
    dense = np.array([matrix(5, b, "dense") for b in range(3)])
    expected = TreeMask.from_dense(dense)
    prefix_lens = [2, 0, 11]
    full = expected.to_sglang(mode="full", prefix_lens=prefix_lens)
    for mask in (
        TreeMask.from_sglang(dense, mode="qlen_only", draft_token_num=5),
        TreeMask.from_sglang(np.asfortranarray(dense), mode="qlen_only", draft_token_num=5),
        TreeMask.from_sglang(full, mode="full", prefix_lens=prefix_lens, draft_token_num=5),
        TreeMask.from_sglang(full, mode="full", prefix_lens=prefix_lens, qo_indptr=[0, 5, 10, 15]),
    ):
        np.testing.assert_array_equal(mask.words, expected.words)


def test_an_unwritten_prefix_is_not_read_when_told_so() -> None:
    dense = [matrix(4, b, "forest") for b in range(2)]
    prefix_lens = [3, 6]
    full = TreeMask.from_dense(dense).to_sglang(mode="full", prefix_lens=prefix_lens).astype(np.uint8)
    for rows in (full[: 4 * 7].reshape(4, 7)[:, :3], full[4 * 7 :].reshape(4, 10)[:, :6]):
        rows[...] = np.random.default_rng(0).integers(0, 256, rows.shape)
    arguments: dict[str, Any] = {"mode": "full", "prefix_lens": prefix_lens, "draft_token_num": 4}
    with pytest.raises(InvalidArgumentError, match="mask of request 0"):
        TreeMask.from_sglang(full, **arguments)
    mask = TreeMask.from_sglang(full, **arguments, check_prefix=False)
    for got, own in zip(mask.to_dense(), dense, strict=True):
        np.testing.assert_array_equal(got, own)


@pytest.mark.parametrize(
    ("mask", "arguments", "error", "named"),
    [
        (np.ones(16, bool), {"mode": "FULL_MASK", "draft_token_num": 4}, InvalidArgumentError, "mode is 'FULL_MASK'"),
        (np.ones(16, bool), {"mode": "full", "draft_token_num": 4}, InvalidArgumentError, "prefix_lens was left out"),
        (
            np.ones(16, bool),
            {"mode": "qlen_only", "prefix_lens": [3], "draft_token_num": 4},
            InvalidArgumentError,
            "prefix_lens was given",
        ),
        (np.ones(16, bool), {"mode": "qlen_only"}, InvalidArgumentError, "left out"),
        (
            np.ones(16, bool),
            {"mode": "qlen_only", "draft_token_num": 4, "qo_indptr": [0, 4]},
            InvalidArgumentError,
            "both given",
        ),
        (np.ones(16, bool), {"mode": "qlen_only", "draft_token_num": 0}, InvalidArgumentError, "draft_token_num is 0"),
        (np.ones(17, bool), {"mode": "qlen_only", "draft_token_num": 4}, ShapeError, "slice a larger buffer"),
        (np.full(16, 2), {"mode": "qlen_only", "draft_token_num": 4}, InvalidArgumentError, "must be 0 or 1"),
        (np.zeros(16), {"mode": "qlen_only", "draft_token_num": 4}, ShapeError, "float64"),
        # The lengths of mlaflash, which count the draft, are not SGLang's.
        (
            np.ones(4 * 7, bool),
            {"mode": "full", "prefix_lens": [7], "draft_token_num": 4},
            ShapeError,
            "mask has 28 and these requests need 44",
        ),
    ],
)
def test_malformed_sglang_masks_are_refused(
    mask: Array, arguments: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        TreeMask.from_sglang(mask, **arguments)


@pytest.mark.parametrize(
    ("items", "q_len", "error", "named"),
    [
        (np.zeros(9, np.uint8), 9, ShapeError, "uint16"),
        (np.zeros(8, np.uint16), 8, ShapeError, "uint8"),
        (np.zeros(8, np.bool_), 8, ShapeError, "bool"),
        (np.zeros(10, np.uint8), 8, ShapeError, "multiple of draft_token_num 8"),
        (np.zeros(33, np.uint32), 33, UnsupportedError, "at most 32"),
        (np.array([1, 3, 5, 9, 17, 1, 1, 1], np.uint8), 4, InvalidArgumentError, "row 4 of mask is 0x11"),
    ],
)
def test_malformed_sglang_packed_rows_are_refused(items: Array, q_len: int, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        TreeMask.from_sglang(items, mode="qlen_only_bitpacking", draft_token_num=q_len)


def test_sglang_packed_rows_need_one_short_length() -> None:
    with pytest.raises(InvalidArgumentError, match="qo_indptr was given"):
        TreeMask.from_sglang(np.ones(4, np.uint8), mode="qlen_only_bitpacking", qo_indptr=[0, 4])
    with pytest.raises(UnsupportedError, match="max_q 3 in each"):
        TreeMask.causal([3, 2]).to_sglang(mode="qlen_only_bitpacking", qo_indptr=[0, 3, 5])
    with pytest.raises(UnsupportedError, match="at most 32"):
        TreeMask.causal([33]).to_sglang(mode="qlen_only_bitpacking")


def links(parents: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Link a tree as SGLang does: each token to its first child, each child to the next."""
    first, sibling = [-1] * len(parents), [-1] * len(parents)
    for i in range(len(parents)):
        children = [child for child, parent in enumerate(parents) if parent == i]
        if children:
            first[i] = children[0]
        for child, following in pairwise(children):
            sibling[child] = following
    return first, sibling


@given(trees=uniform_parents)
def test_retrieve_links_round_trip(trees: list[tuple[int, ...]]) -> None:
    linked = [links(tree) for tree in trees]
    next_token, next_sibling = (np.array([own[side] for own in linked], np.int64) for side in (0, 1))
    mask = TreeMask.from_retrieve(next_token, next_sibling)
    np.testing.assert_array_equal(mask.words, TreeMask.from_parents(np.array(trees)).words)
    np.testing.assert_array_equal(mask.to_parents(), np.array(trees).ravel())
    back = mask.to_retrieve()
    assert [side.dtype for side in back] == [np.int64, np.int64]
    np.testing.assert_array_equal(back[0], next_token)
    np.testing.assert_array_equal(back[1], next_sibling)


@given(tree=single_parents, seed=st.integers(0, 2**16))
def test_children_may_be_linked_in_any_order(tree: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, sibling = [-1] * len(tree), [-1] * len(tree)
    for i in rng.permutation(np.arange(1, len(tree))).tolist():
        sibling[i], first[tree[i]] = first[tree[i]], i
    mask = TreeMask.from_retrieve([first], [sibling])
    np.testing.assert_array_equal(mask.to_parents(), tree)


def test_d11_the_links_of_a_chain_are_causal() -> None:
    next_token = np.array([[*range(1, 16), -1]] * 2)  # as SGLang's DFlash writes them
    mask = TreeMask.from_retrieve(next_token, np.full((2, 16), -1))
    np.testing.assert_array_equal(mask.words, TreeMask.causal([16, 16]).words)


@pytest.mark.parametrize(
    ("next_token", "next_sibling", "error", "named"),
    [
        ([1, 2, 1], [-1, -1, -1], InvalidArgumentError, "leads? to draft token 1 twice"),  # a cycle down
        ([1, -1, -1], [-1, 2, 1], InvalidArgumentError, "draft token 1 twice"),  # a cycle of siblings
        ([1, -1, -1], [-1, 1, -1], InvalidArgumentError, "draft token 1 twice"),  # its own sibling
        ([1, 2, -1], [-1, 2, -1], InvalidArgumentError, "draft token 2 twice"),  # a shared child
        ([1, -1, -1], [-1, -1, -1], InvalidArgumentError, r"draft tokens \[2\]"),
        ([-1, 2, 1], [-1, -1, -1], InvalidArgumentError, r"draft tokens \[1, 2\]"),  # a cycle apart
        ([1, 3, -1], [-1, 2, -1], InvalidArgumentError, r"next_token\[1, 1\] is 3"),
        ([1, -1, -1], [-1, 2, -2], InvalidArgumentError, r"next_sibling\[1, 2\] is -2"),
        ([1, 0, -1], [-1, 2, -1], InvalidArgumentError, r"next_token\[1, 1\] is 0"),
        ([1, -1, -1], [2, -1, -1], InvalidArgumentError, r"next_sibling\[1, 0\] is 2"),
        ([2, -1, 1], [-1, -1, -1], InvalidArgumentError, "parent comes before its children"),
        ([1.0, 2.0, -1.0], [-1, -1, -1], ShapeError, "next_token is float64"),
        ([1, 2, -1], [-1, -1], ShapeError, "next_sibling"),
    ],
)
def test_malformed_links_are_refused(next_token: Any, next_sibling: Any, error: type[Exception], named: str) -> None:
    good = ([1, 2, -1], [-1, -1, -1][: len(next_sibling)])
    with pytest.raises(error, match=named):
        TreeMask.from_retrieve(np.array([good[0], next_token]), np.array([good[1], next_sibling]))


def test_links_need_one_tree_in_each_request() -> None:
    with pytest.raises(ShapeError, match="next_token"):
        TreeMask.from_retrieve([1, -1], [-1, -1])
    with pytest.raises(InvalidArgumentError, match="qo_indptr"):
        TreeMask.causal([2, 1]).to_retrieve()
    with pytest.raises(InvalidArgumentError, match="roots"):
        TreeMask.from_parents(np.array([-1, -1]), forest=True).to_retrieve()


def test_bits_past_a_request_never_leave() -> None:
    loud = TreeMask.from_packed(np.full((5, 1), 0xFFFFFFFF, np.uint32), 3)
    quiet = TreeMask.from_dense([np.ones((3, 3), np.bool_), np.ones((2, 2), np.bool_)])
    bounds = [0, 3, 5]
    for kv_lens in ([3, 2], [9, 2], [1, 7]):
        np.testing.assert_array_equal(
            loud.to_flashinfer(kv_lens, bounds, bitorder="little"),
            quiet.to_flashinfer(kv_lens, bounds, bitorder="little"),
        )
    np.testing.assert_array_equal(
        loud.to_sglang(mode="qlen_only", qo_indptr=bounds), quiet.to_sglang(mode="qlen_only", qo_indptr=bounds)
    )
    uniform = TreeMask.from_packed(np.full((3, 1), -1, np.int32), 3)
    assert uniform.to_sglang(mode="qlen_only_bitpacking").tolist() == [7, 7, 7]


def test_a_converted_mask_is_a_copy() -> None:
    items = np.array([1, 3], np.uint32)
    wide = np.concatenate([items, np.zeros(15, np.uint32)])
    mask = TreeMask.from_sglang(wide, mode="qlen_only_bitpacking", draft_token_num=17)
    wide[:] = 0
    assert mask.words[1, 0] == 3


def test_a15_no_tokens_make_an_empty_mask() -> None:
    for mask in (
        TreeMask.from_flashinfer(np.zeros(0, np.uint8), [], [0], bitorder="little"),
        TreeMask.from_flashinfer(np.zeros(0, np.uint8), [5, 0], [0, 0, 0], bitorder="big"),
        TreeMask.from_sglang(np.zeros(0, bool), mode="full", prefix_lens=[4], qo_indptr=[0, 0]),
        TreeMask.from_retrieve(np.zeros((0, 0), int), np.zeros((0, 0), int)),
    ):
        assert mask.words.shape == (0, 0)
        assert mask.to_flashinfer([], [0], bitorder="little").shape == (0,)
        assert mask.to_flashinfer([7], [0, 0], bitorder="little").shape == (0,)
        assert mask.to_sglang(mode="full", prefix_lens=[]).shape == (0,)
        assert mask.to_sglang(mode="qlen_only_bitpacking").shape == (0,)
        assert [side.shape for side in mask.to_retrieve()] == [(0, 0), (0, 0)]


@pytest.mark.gpu
@pytest.mark.parametrize("q_lens", [[3, 0, 35, 1], [16, 16], [0], [17, 17, 17]])
def test_cupy_masks_convert_as_numpy_ones_do(q_lens: list[int]) -> None:
    import cupy

    dense = [matrix(q_len, b, "dense") for b, q_len in enumerate(q_lens)]
    host = TreeMask.from_dense(dense)
    mask = TreeMask.from_packed(cupy.asarray(host.words), host.max_q)
    prefix_lens = np.arange(len(q_lens)) * 11
    bounds = indptr(q_lens)
    ours, theirs = (prefix_lens, bounds), (cupy.asarray(prefix_lens), cupy.asarray(bounds))

    def same(got: Any, expected: Array) -> None:
        assert isinstance(got, cupy.ndarray)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got.get(), expected)

    for order in ORDERS:
        packed = mask.to_flashinfer(theirs[0] + cupy.diff(theirs[1]), theirs[1], bitorder=order)
        same(packed, host.to_flashinfer(ours[0] + np.diff(ours[1]), ours[1], bitorder=order))
        back = TreeMask.from_flashinfer(packed, theirs[0] + cupy.diff(theirs[1]), theirs[1], bitorder=order)
        same(back.words, host.words)
    full = mask.to_sglang(mode="full", prefix_lens=theirs[0], qo_indptr=theirs[1])
    same(full, host.to_sglang(mode="full", prefix_lens=ours[0], qo_indptr=ours[1]))
    square = mask.to_sglang(mode="qlen_only", qo_indptr=theirs[1])
    same(square, host.to_sglang(mode="qlen_only", qo_indptr=ours[1]))
    for given_ in (full, full.astype(cupy.uint8)):
        for check_prefix in (True, False):
            back = TreeMask.from_sglang(
                given_, mode="full", prefix_lens=theirs[0], qo_indptr=theirs[1], check_prefix=check_prefix
            )
            same(back.words, host.words)
    same(TreeMask.from_sglang(square, mode="qlen_only", qo_indptr=theirs[1]).words, host.words)
    if len(set(q_lens)) == 1 and q_lens[0]:
        items = mask.to_sglang(mode="qlen_only_bitpacking")
        same(items, host.to_sglang(mode="qlen_only_bitpacking"))
        same(TreeMask.from_sglang(items, mode="qlen_only_bitpacking", draft_token_num=q_lens[0]).words, host.words)


@pytest.mark.gpu
def test_cupy_masks_are_checked_and_linked_like_numpy_ones() -> None:
    import cupy

    parents = np.array([[-1, 0, 0, 2, 1], [-1, 0, 1, 2, 3]])
    host = TreeMask.from_parents(parents)
    mask = TreeMask.from_parents(cupy.asarray(parents))
    next_token, next_sibling = mask.to_retrieve()
    assert isinstance(next_token, cupy.ndarray)
    assert isinstance(next_sibling, cupy.ndarray)
    back = TreeMask.from_retrieve(next_token, next_sibling)
    assert isinstance(back.words, cupy.ndarray)
    np.testing.assert_array_equal(back.words.get(), host.words)
    hidden = cupy.ones((3, 7), cupy.bool_)
    hidden[2, 1] = False
    with pytest.raises(UnsupportedError, match="draft token 2 of request 0 does not see token 1"):
        TreeMask.from_flashinfer(cupy.packbits(hidden.ravel()), [7], [0, 3], bitorder="big")
    with pytest.raises(UnsupportedError, match="draft token 2 of request 0 does not see token 1"):
        TreeMask.from_sglang(hidden, mode="full", prefix_lens=[4], draft_token_num=3)
    with pytest.raises(InvalidArgumentError, match="last byte of request 0"):
        TreeMask.from_flashinfer(cupy.full(3, 255, cupy.uint8), [7], [0, 3], bitorder="little")
    with pytest.raises(InvalidArgumentError, match=r"\[1, 0\] is 2"):
        TreeMask.from_sglang(cupy.asarray([[0, 1], [2, 1]]), mode="qlen_only", draft_token_num=2)
    with pytest.raises(InvalidArgumentError, match="row 1 of mask is 0x10"):
        TreeMask.from_sglang(cupy.asarray([1, 16, 1, 1], cupy.uint8), mode="qlen_only_bitpacking", draft_token_num=4)
