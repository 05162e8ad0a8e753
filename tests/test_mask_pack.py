"""The `mask` kernel on the emulator: every format against the host's converters, and input that they would refuse."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlaflash import Device, MaskSource, TreeMask, emulator
from mlaflash.emulator import Report, run_kernel
from mlaflash.errors import InvalidArgumentError, ShapeError, UnsupportedError
from mlaflash.interop import ArrayView, numpy_view
from mlaflash.jit import compile_kernel
from mlaflash.jit.compiler import compile_sources
from mlaflash.jit.sources import read
from mlaflash.lab.mask_inputs import GARBAGE, NAMES, Array, Batch, encode, flat, widened
from mlaflash.mask_pack import FORMAT_CODES, MASK_PARAMS_DTYPE, build, defines, shared_bytes

requests = st.tuples(
    st.one_of(st.integers(0, 9), st.sampled_from([16, 17, 31, 32, 33, 64, 65])),
    st.one_of(st.just(0), st.integers(0, 60)),
)
batches = st.builds(
    lambda drawn, seed: Batch(tuple(q for q, _ in drawn), tuple(prefix for _, prefix in drawn), seed),
    st.lists(requests, max_size=5),
    st.integers(0, 2**16),
)
some = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("name", NAMES)
@some
@given(batch=batches, padding=st.integers(0, 40), spare=st.integers(0, 40), seed=st.integers(0, 3))
def test_every_format_gives_the_words_of_the_hosts_converter(
    name: str, wide: bool, batch: Batch, padding: int, spare: int, seed: int
) -> None:
    if name.endswith("indptr") and not batch.q_lens:
        return  # nothing to lay apart
    max_q = max(batch.q_lens, default=0) + spare
    num_tokens = batch.num_tokens + padding
    case = encode(name, batch, max_q, wide=wide)
    mask = emulator.pack_mask(case.make(**case.arrays), num_tokens, max_q, qo_indptr=batch.qo_indptr, seed=seed)
    assert mask.max_q == max_q
    np.testing.assert_array_equal(mask.words, widened(case.expected, num_tokens, max_q))


@pytest.mark.parametrize("q_len", [1, 16, 33, 64, 65, 1024])
@pytest.mark.parametrize("name", NAMES)
def test_requests_of_one_length_need_no_qo_indptr(name: str, q_len: int) -> None:
    batch = Batch((q_len,) * 2, (3, 11), q_len)
    case = encode(name, batch, q_len)
    mask = emulator.pack_mask(case.make(**case.arrays), batch.num_tokens, q_len)
    np.testing.assert_array_equal(mask.words, case.expected.words)


@pytest.mark.parametrize("q_len", [1, 40, 1024])
def test_d11_a_chain_is_causal(q_len: int) -> None:
    chain = np.arange(-1, q_len - 1)[None]
    child = np.append(np.arange(1, q_len), -1)[None]
    expected = TreeMask.causal(q_len).words
    for source in (MaskSource.from_parents(chain), MaskSource.from_retrieve(child, np.full_like(child, -1))):
        np.testing.assert_array_equal(emulator.pack_mask(source, q_len, q_len).words, expected)


def test_a_root_with_all_others_as_children() -> None:
    q_len = 1024
    child, sibling = np.full((1, q_len), -1), np.append([-1], np.append(np.arange(2, q_len), -1))[None]
    child[0, 0] = 1
    parents = np.where(np.arange(q_len) == 0, -1, 0)
    mask = emulator.pack_mask(MaskSource.from_retrieve(child, sibling), q_len, q_len)
    np.testing.assert_array_equal(mask.words, TreeMask.from_parents(parents).words)


def test_siblings_may_come_in_any_order() -> None:
    child, sibling = np.array([[3, -1, -1, 4, -1]]), np.array([[-1, 2, -1, 1, -1]])  # 0 > 3, 1, 2; 3 > 4
    mask = emulator.pack_mask(MaskSource.from_retrieve(child, sibling), 5, 5)
    np.testing.assert_array_equal(mask.words, TreeMask.from_retrieve(child, sibling).words)
    assert mask.to_parents().tolist() == [-1, 0, 0, 0, 3]


@pytest.mark.parametrize(
    ("q_len", "dtype"), [(1, "u1"), (8, "u1"), (8, "i1"), (9, "u2"), (16, "i2"), (17, "u4"), (32, "u4"), (32, "i4")]
)
def test_sglangs_packed_rows_of_every_width(q_len: int, dtype: str) -> None:
    mask = TreeMask.from_dense(Batch((q_len,) * 3, (0,) * 3, q_len).dense())
    items = mask.to_sglang(mode="qlen_only_bitpacking").view(dtype)
    source = MaskSource.from_sglang(items, mode="qlen_only_bitpacking")
    np.testing.assert_array_equal(emulator.pack_mask(source, 3 * q_len, q_len).words, mask.words)
    # Wider rows, ragged requests: bits past a request's tokens go, rows past the last one are 0.
    bounds = np.array([0, q_len // 2, q_len // 2, q_len], np.int32)
    ragged = emulator.pack_mask(source, 3 * q_len, 70, qo_indptr=bounds)
    expected = np.zeros((3 * q_len, 3), np.uint32)
    for begin, stop in pairwise(bounds):
        expected[begin:stop, 0] = mask.words[begin:stop, 0] & ((1 << (stop - begin)) - 1)
    np.testing.assert_array_equal(ragged.words, expected)


@pytest.mark.parametrize(("width", "max_q"), [(1, 90), (2, 64), (2, 200), (4, 40), (4, 1024), (40, 1000)])
def test_words_of_another_width_are_filled_up_or_cut(width: int, max_q: int) -> None:
    rng = np.random.default_rng(width)
    q_lens = [5, 0, max_q, 33]
    bounds = np.cumsum([0, *q_lens]).astype(np.int32)
    words = rng.integers(0, 2**32, (bounds[-1] + 2, width), dtype=np.uint32)
    mask = emulator.pack_mask(MaskSource.from_packed(words), int(bounds[-1]) + 7, max_q, qo_indptr=bounds)
    bits = np.zeros((mask.num_tokens, max_q), np.bool_)
    columns = min(max_q, 32 * width)
    source_bits = TreeMask(words, 32 * width).bits()
    for begin, q_len in zip(bounds[:-1], q_lens, strict=True):
        seen = min(q_len, columns)
        bits[begin : begin + q_len, :seen] = source_bits[begin : begin + q_len, :seen]
    np.testing.assert_array_equal(mask.bits(), bits)


def test_words_may_describe_other_columns_than_the_draft() -> None:
    words = np.full((4, 2), 2**32 - 1, np.uint32)
    tails = np.array([35, 1, 10**6], np.int64)
    source = MaskSource.from_packed(words, tail_lens=tails)
    mask = emulator.pack_mask(source, 4, 40, qo_indptr=np.array([0, 1, 3, 4], np.int32))
    assert mask.words.tolist() == [[2**32 - 1, 0b111], [1, 0], [1, 0], [2**32 - 1, 0xFF]]


def loads(name: str, batch: Batch) -> tuple[Report, str]:
    reports: list[Report] = []
    case = encode(name, batch, max(batch.q_lens))
    max_q = max(batch.q_lens)
    emulator.pack_mask(case.make(**case.arrays), batch.num_tokens, max_q, qo_indptr=batch.qo_indptr, reports=reports)
    return reports[0], next(iter(case.arrays))


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("parents", "retrieve"))])
def test_only_the_columns_of_the_draft_are_read(name: str) -> None:
    batch = Batch((5, 40, 0, 16), (300, 7, 9, 100))
    report, mask = loads(name, batch)
    elements = sum(q_len * q_len for q_len in batch.q_lens)
    if name == "packed":
        elements = sum(q_len * -(-max(batch.q_lens) // 32) for q_len in batch.q_lens)
    assert report.loads[mask] == elements


def test_d4_each_request_begins_on_a_byte() -> None:
    batch = Batch((3, 2, 5), (4, 3, 8))  # 21, 10 and 65 bits
    for name, size in (("flashinfer_little", 3 + 2 + 9), ("flashinfer_big", 3 + 2 + 9)):
        case = encode(name, batch, 5)
        assert case.arrays["packed"].size == size
        mask = emulator.pack_mask(case.make(**case.arrays), 10, 5, qo_indptr=batch.qo_indptr)
        np.testing.assert_array_equal(mask.words, TreeMask.from_dense(batch.dense()).words)


def test_d9_the_wrong_order_of_bits_is_another_mask() -> None:
    dense = np.zeros((4, 4), np.bool_)
    dense[0, 1] = True
    packed, kv_lens = np.packbits(dense, bitorder="little"), np.array([4], np.int32)
    little = emulator.pack_mask(MaskSource.from_flashinfer(packed, kv_lens, bitorder="little"), 4, 4)
    big = emulator.pack_mask(MaskSource.from_flashinfer(packed, kv_lens, bitorder="big"), 4, 4)
    assert np.argwhere(little.bits()).tolist() == [[0, 1]]
    assert np.argwhere(big.bits()).tolist() == [[1, 2]]


@pytest.mark.parametrize("kv_len", [0, 1, 3, 4])
def test_a_request_shorter_than_its_draft_sees_what_it_has(kv_len: int) -> None:
    sees = np.random.default_rng(kv_len).random((4, kv_len)) < 0.5
    packed = np.append(np.packbits(sees, bitorder="little"), np.uint8(0xFF))
    kv_lens, bounds = np.array([kv_len, 1], np.int32), np.array([0, 4, 5], np.int32)
    mask = emulator.pack_mask(MaskSource.from_flashinfer(packed, kv_lens, bitorder="little"), 5, 4, qo_indptr=bounds)
    expected = np.zeros((5, 4), np.bool_)
    expected[:4, 4 - kv_len :] = sees
    expected[4, 0] = True
    np.testing.assert_array_equal(mask.bits(), expected)


@pytest.mark.parametrize("name", ["sglang_full", "flashinfer_little"])
def test_d7_the_largest_contexts_and_a_buffer_of_the_exact_size(name: str) -> None:
    batch = Batch((8, 8), (262_144 - 8, 262_144 - 8))
    case = encode(name, batch, 8)
    mask = emulator.pack_mask(case.make(**case.arrays), 16, 8)
    np.testing.assert_array_equal(mask.words, case.expected.words)


def test_a_thousand_requests() -> None:
    rng = np.random.default_rng(0)
    batch = Batch(tuple(rng.integers(0, 4, 1000).tolist()), tuple(rng.integers(0, 9, 1000).tolist()))
    for name in ("sglang_full", "flashinfer_big"):  # whose blocks add up all sizes before theirs
        case = encode(name, batch, 3)
        mask = emulator.pack_mask(case.make(**case.arrays), batch.num_tokens, 3, qo_indptr=batch.qo_indptr)
        np.testing.assert_array_equal(mask.words, case.expected.words)


def test_d7_offsets_past_two_to_the_31() -> None:
    q_lens = [16, 16, 3]
    kv_lens = np.array([2**28 + 16, 40, 5], np.int64)
    bounds = np.cumsum([0, *q_lens]).astype(np.int32)
    dense = Batch(tuple(q_lens), (0,) * 3).dense()
    sizes = q_lens * kv_lens
    assert sizes[0] > 2**32
    # Untouched pages of zeros take no memory, and nobody looks at the prefix.
    mask, bits = np.zeros(sizes.sum(), np.bool_), np.zeros((-(-sizes // 8)).sum(), np.uint8)
    begins, byte_begins = np.append(0, np.cumsum(sizes)), np.append(0, np.cumsum(-(-sizes // 8)))
    for b, own in enumerate(dense):
        rows, columns = np.nonzero(own)
        places = rows * kv_lens[b] + kv_lens[b] - len(own) + columns
        mask[begins[b] + places] = True
        np.bitwise_or.at(bits, byte_begins[b] + places // 8, (1 << places % 8).astype(np.uint8))
    expected = TreeMask.from_dense(dense).words
    source = MaskSource.from_sglang(mask, mode="full", prefix_lens=kv_lens - q_lens)
    np.testing.assert_array_equal(emulator.pack_mask(source, 35, 16, qo_indptr=bounds).words, expected)
    source = replace(source, arrays=source.arrays | {"mask_indptr": begins})
    np.testing.assert_array_equal(emulator.pack_mask(source, 35, 16, qo_indptr=bounds).words, expected)

    # As many bits, in bytes; then bytes past 2**31, where mask_indptr says so.
    source = MaskSource.from_flashinfer(bits, kv_lens, bitorder="little")
    np.testing.assert_array_equal(emulator.pack_mask(source, 35, 16, qo_indptr=bounds).words, expected)
    far = np.zeros(2**31 + 100, np.uint8)
    far[-2:] = np.packbits(np.pad(dense[2], ((0, 0), (2, 0))), bitorder="little")
    source = MaskSource.from_flashinfer(
        far, kv_lens[2:], bitorder="little", mask_indptr=np.array([far.size - 2, far.size])
    )
    last = emulator.pack_mask(source, 3, 3)
    np.testing.assert_array_equal(last.to_dense()[0], dense[2])


def walk(parents: Any) -> Array:
    """Pack one request's rows by hand: a token, and its parents as long as each is an earlier token."""
    sees = np.zeros((len(parents), len(parents)), np.bool_)
    for i in range(len(parents)):
        at = i
        while at >= 0:
            sees[i, at] = True
            at = int(parents[at]) if 0 <= parents[at] < at else -1
    return sees


entries = st.one_of(st.integers(-2, 12), st.sampled_from([-(2**31), 2**31 - 1, GARBAGE, -(2**63), 2**63 - 1, 2**32]))


@some
@given(st.lists(entries, min_size=1, max_size=12), st.booleans())
def test_any_parents_are_packed_to_something_defined(parents: list[int], wide: bool) -> None:
    if not wide:
        parents = [parent for parent in parents if -(2**31) <= parent < 2**31]
    array = np.array([parents], np.int64 if wide else np.int32)
    mask = emulator.pack_mask(MaskSource.from_parents(array), len(parents), len(parents))
    np.testing.assert_array_equal(mask.bits(), walk(parents))


def linked_parents(child: list[int], sibling: list[int]) -> list[int]:
    """Follow links backwards by hand. Of several to one token that from the lowest one counts, a child's first."""
    size = len(child)
    back: dict[int, tuple[int, bool]] = {}
    for source in range(size):
        for to, is_child in ((child[source], True), (sibling[source], False)):
            if 0 < to < size:
                back.setdefault(to, (source, is_child))
    parents = []
    for token in range(size):
        at, parent = token, -1
        for _ in range(size):
            if at not in back:
                break
            at, is_child = back[at]
            if is_child:
                parent = at
                break
        parents.append(parent)
    return parents


@some
@given(st.lists(st.tuples(entries, entries), min_size=1, max_size=12), st.integers(0, 3))
@example([(-1, 3), (-1, -1), (0, -1), (-1, -1)], 0)  # the root's sibling has no parent, whatever leads to the root
def test_any_links_are_packed_to_something_defined(links: list[tuple[int, int]], seed: int) -> None:
    child, sibling = ([link[which] for link in links] for which in (0, 1))
    source = MaskSource.from_retrieve(np.array([child], np.int64), np.array([sibling], np.int64))
    mask = emulator.pack_mask(source, len(links), len(links), seed=seed)
    np.testing.assert_array_equal(mask.bits(), walk(linked_parents(child, sibling)))


def test_links_in_a_circle_end() -> None:
    size = 1000
    round_trip = np.roll(np.arange(size), -1)[None]  # token 0 is no target: the circle of the others is cut there
    inner = np.where(np.arange(size) == size - 1, 1, round_trip[0])[None]  # 1 to size - 1, and back to 1
    none = np.full_like(inner, -1)
    mask = emulator.pack_mask(MaskSource.from_retrieve(none, inner), size, size)
    np.testing.assert_array_equal(mask.bits(), walk(linked_parents(none[0].tolist(), inner[0].tolist())))


@pytest.mark.parametrize("name", NAMES)
@some
@given(data=st.data())
def test_lengths_out_of_range_lead_nowhere(name: str, data: st.DataObject) -> None:
    batch = Batch((5, 0, 33), (3, 7, 20))
    case = encode(name, batch, 40, wide=True)
    huge = st.one_of(st.integers(-5, 80), st.sampled_from([-(2**63), 2**63 - 1, 2**31, -(2**31), 2**62, 2**40]))
    arrays = dict(case.arrays)
    for lengths in arrays.keys() & {"kv_lens", "prefix_lens", "mask_indptr"}:
        size = arrays[lengths].size
        arrays[lengths] = np.array(data.draw(st.lists(huge, min_size=size, max_size=size)), np.int64)
    near = st.one_of(st.integers(-3, 45), st.sampled_from([-(2**31), 2**31 - 1]))
    bounds = np.array(data.draw(st.lists(near, min_size=4, max_size=4)), np.int32)
    # The emulator refuses every access outside these arrays; the rows behind the last request are 0 all the same.
    results = [
        emulator.pack_mask(case.make(**arrays), 40, 40, qo_indptr=bounds, words=np.zeros((40, 2), np.uint32), seed=seed)
        for seed in range(2)
    ]
    rising = np.all(np.diff(bounds.astype(np.int64)) >= 0)
    if rising:
        np.testing.assert_array_equal(results[0].words, results[1].words)
        assert not results[0].words[max(int(bounds[-1]), 0) :].any()


def test_tokens_past_max_q_have_empty_rows_and_no_columns() -> None:
    sees = np.ones((1, 40, 40), np.bool_)
    bounds = np.array([0, 40, 43], np.int32)
    source = MaskSource.from_dense(np.concatenate([sees, sees]))
    mask = emulator.pack_mask(source, 50, 20, qo_indptr=bounds)
    assert [int(row.sum()) for row in mask.bits()] == [20] * 20 + [0] * 20 + [3] * 3 + [0] * 7


@pytest.mark.parametrize("name", ["parents", "dense_flat", "sglang_full", "flashinfer_little", "packed"])
def test_what_a_short_array_lacks_is_not_visible(name: str) -> None:
    batch = Batch((9, 7), (4, 5))
    case = encode(name, batch, 9)
    key = next(iter(case.arrays))
    whole = emulator.pack_mask(case.make(**case.arrays), 16, 9, qo_indptr=batch.qo_indptr)
    short = case.arrays | {key: case.arrays[key][: len(case.arrays[key]) // 2].copy()}
    half = emulator.pack_mask(case.make(**short), 16, 9, qo_indptr=batch.qo_indptr)
    assert not (half.words & ~whole.words).any()
    assert 0 < np.count_nonzero(half.bits()) < np.count_nonzero(whole.bits())


@pytest.mark.parametrize("name", ["dense", "parents_table", "retrieve"])
def test_what_a_narrow_table_lacks_is_not_visible(name: str) -> None:
    q_lens, size = (9, 7), 6
    batch = Batch(q_lens, (0, 0))
    case = encode(name, batch, 9)
    narrow = {key: array[(slice(None), *(slice(size),) * (array.ndim - 1))] for key, array in case.arrays.items()}
    mask = emulator.pack_mask(case.make(**narrow), 16, 9, qo_indptr=batch.qo_indptr)
    for b, (q_len, sees) in enumerate(zip(q_lens, mask.to_dense(batch.qo_indptr), strict=True)):
        if name == "dense":
            lacking = q_len - size
            np.testing.assert_array_equal(sees, np.pad(narrow["dense"][b] == 1, ((0, lacking), (0, lacking))))
        else:
            rows = [[*array[b].tolist(), *[-1] * (q_len - size)] for array in narrow.values()]
            np.testing.assert_array_equal(sees, walk(rows[0] if len(rows) == 1 else linked_parents(*rows)))


def test_strided_tables_are_read_where_they_lie() -> None:
    batch = Batch((6, 6, 6), (0, 0, 0), 3)
    dense, parents = np.array(batch.dense()), np.array(batch.parents())
    room = np.full((3, 20, 31), 7, np.uint8)
    room[:, 2:14:2, 4:10] = dense
    mask = emulator.pack_mask(MaskSource.from_dense(room[:, 2:14:2, 4:10]), 18, 6)
    np.testing.assert_array_equal(mask.words, TreeMask.from_dense(dense).words)
    one_tree = np.broadcast_to(parents[0], (3, 6))
    mask = emulator.pack_mask(MaskSource.from_parents(one_tree), 18, 6)
    np.testing.assert_array_equal(mask.words, TreeMask.from_parents(one_tree).words)
    links = np.full((2, 6, 9), GARBAGE)
    for own, link in zip(links, TreeMask.from_parents(parents).to_retrieve(), strict=True):
        own[::2, 1:7] = link
    mask = emulator.pack_mask(MaskSource.from_retrieve(links[0, ::2, 1:7], links[1, ::2, 1:7]), 18, 6)
    np.testing.assert_array_equal(mask.words, TreeMask.from_parents(parents).words)


def test_no_requests_and_no_tokens() -> None:
    none = np.zeros(0, np.int32)
    reports: list[Report] = []
    mask = emulator.pack_mask(MaskSource.from_parents(none), 3, 40, qo_indptr=np.zeros(1, np.int32), reports=reports)
    assert (mask.words.tolist(), len(reports)) == ([[0, 0]] * 3, 1)
    assert emulator.pack_mask(MaskSource.from_parents(none), 0, 40, reports=reports).words.shape == (0, 2)
    assert emulator.pack_mask(MaskSource.from_parents(none), 5, 0, reports=reports).words.shape == (5, 0)
    assert len(reports) == 1


def test_new_bits_in_the_same_arrays_are_seen() -> None:
    first, second = Batch((4, 3), (2, 9), 1), Batch((2, 5), (7, 4), 2)
    case, other = (encode("sglang_full", batch, 5) for batch in (first, second))
    room = np.zeros(200, np.bool_)
    arrays = case.arrays | {"mask": room, "qo_indptr": first.qo_indptr}
    words = np.zeros((7, 1), np.uint32)
    bounds = arrays.pop("qo_indptr")
    source = case.make(**arrays)
    for batch, encoded in ((first, case), (second, other)):
        room[: encoded.arrays["mask"].size] = encoded.arrays["mask"]
        arrays["prefix_lens"][...] = encoded.arrays["prefix_lens"]
        bounds[...] = batch.qo_indptr
        mask = emulator.pack_mask(source, 7, 5, qo_indptr=bounds, words=words)
        assert mask.words is words
        np.testing.assert_array_equal(words, encoded.expected.words)


def test_the_host_reads_no_array() -> None:
    def view(name: str, array: Any) -> ArrayView:
        """Show everything of an array but its elements."""
        return numpy_view(name, array)._replace(ptr=8, array=None)

    batch = Batch((3, 4), (2, 5))
    for name in NAMES:
        case = encode(name, batch, 4)
        words = np.zeros((7, 1), np.uint32)
        packing = build(view, case.make(**case.arrays), words, 7, 4, qo_indptr=batch.qo_indptr)
        assert packing.launch.grid == (2, 1, 1)
        assert set(packing.arrays) == {*case.arrays, "qo_indptr"}


def test_fewer_requests_than_the_words_have_room_for() -> None:
    batch = Batch((6, 6), (0, 0))
    words = np.full((30, 2), 2**32 - 1, np.uint32)
    source = MaskSource.from_dense(np.array(batch.dense()))
    packing = build(numpy_view, source, words, 30, 50, q_len=6, batch=2)
    arrays = {"mask": source.arrays["dense"], "words": words}
    step = packing.launch
    run_kernel("mask", step.defines, step.grid, step.block, step.shared_bytes, packing.params, arrays)
    np.testing.assert_array_equal(words, widened(TreeMask.from_dense(batch.dense()), 30, 50))


INDPTR = np.array([0, 2, 4], np.int32)
TWO = np.array([2, 2], np.int32)


def pack(source: MaskSource, **keywords: Any) -> TreeMask:
    return emulator.pack_mask(source, **({"num_tokens": 4, "max_q": 2} | keywords))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: MaskSource.from_dense(np.zeros((2, 2), np.bool_)), ShapeError, r"\(2, 2\); it must be \(B, S, S\)"),
        (lambda: MaskSource.from_dense([[True]]), ShapeError, r"it must be \(B, S, S\)"),
        (lambda: pack(MaskSource.from_dense(np.zeros((2, 2, 3), np.bool_))), ShapeError, r"\(B, S, S\)"),
        (lambda: pack(MaskSource.from_dense(np.zeros((3, 2, 2), np.bool_))), ShapeError, "3 requests; there are 2"),
        (lambda: pack(MaskSource.from_dense(np.zeros((2, 1, 1), np.bool_))), ShapeError, "each request has 2 query"),
        (lambda: pack(MaskSource.from_dense(np.zeros((2, 2, 2), np.float32))), ShapeError, "is float32; allowed: bool"),
        (lambda: pack(MaskSource.from_dense(np.zeros(7, np.bool_))), ShapeError, "7 elements; these requests need 8"),
        (
            lambda: pack(MaskSource.from_dense(np.zeros((2, 2, 4), np.bool_)[:, :, ::2])),
            ShapeError,
            r"strides \(8, 4, 2\) .*last axis must be contiguous",
        ),
        (lambda: pack(MaskSource.from_dense(np.zeros(16, np.bool_)[::2])), ShapeError, "C-contiguous. Copy it"),
        (
            lambda: pack(MaskSource.from_dense(np.zeros((2, 2, 2), np.bool_)[:, ::-1])),
            ShapeError,
            "none may be negative",
        ),
        (lambda: pack(MaskSource.from_parents(np.zeros(4))), ShapeError, "is float64; allowed: int32, int64"),
        (lambda: pack(MaskSource.from_parents(np.zeros(3, np.int32))), ShapeError, "3 elements; these requests need 4"),
        (lambda: pack(MaskSource.from_parents(np.zeros((1, 2, 2), np.int32))), ShapeError, r"\(T,\) or \(B, S\)"),
        (lambda: pack(MaskSource.from_retrieve(np.zeros(4, np.int32), TWO)), ShapeError, r"it must be \(B, S\)"),
        (
            lambda: pack(MaskSource.from_retrieve(np.zeros((2, 2), np.int32), np.zeros((2, 2), np.int64))),
            ShapeError,
            "next_sibling is int64 .* both must have one type and one shape",
        ),
        (lambda: pack(MaskSource.from_packed(np.zeros(4, np.uint32))), ShapeError, r"it must be \(T, W\)"),
        (lambda: pack(MaskSource.from_packed(np.zeros((4, 1), np.uint16))), ShapeError, "is uint16; allowed: uint32"),
        (lambda: pack(MaskSource.from_packed(np.zeros((3, 1), np.uint32))), ShapeError, "3 rows; these .* need 4"),
        (
            lambda: pack(MaskSource.from_packed(np.zeros((4, 1), np.uint32), tail_lens=np.zeros(3, np.int32))),
            ShapeError,
            r"tail_lens has shape \(3,\); it must have shape \(2,\)",
        ),
        (
            lambda: pack(MaskSource.from_flashinfer(np.zeros(4, np.bool_), TWO, bitorder="little")),
            ShapeError,
            "packed is bool; allowed: uint8",
        ),
        (
            lambda: pack(MaskSource.from_flashinfer(np.zeros(4, np.uint8), TWO[:1], bitorder="little")),
            ShapeError,
            r"kv_lens has shape \(1,\); it must have shape \(2,\)",
        ),
        (
            lambda: pack(MaskSource.from_flashinfer(np.zeros(4, np.uint8), TWO, bitorder="little", mask_indptr=TWO)),
            ShapeError,
            r"mask_indptr has shape \(2,\); it must have shape \(3,\)",
        ),
        (
            lambda: MaskSource.from_flashinfer(np.zeros(4, np.uint8), TWO, bitorder="msb"),  # type: ignore[arg-type]
            InvalidArgumentError,
            "bitorder is 'msb'",
        ),
        (
            lambda: pack(MaskSource.from_sglang(np.zeros(4, np.float16), mode="qlen_only")),
            ShapeError,
            "is float16; allowed: bool",
        ),
        (
            lambda: MaskSource.from_sglang(np.zeros(4, np.bool_), mode="full"),
            InvalidArgumentError,
            "prefix_lens was left out",
        ),
        (
            lambda: MaskSource.from_sglang(np.zeros(4, np.bool_), mode="qlen_only", prefix_lens=TWO),
            InvalidArgumentError,
            "prefix_lens was given",
        ),
        (
            lambda: MaskSource.from_sglang(np.zeros(4, np.uint8), mode="qlen_only_bitpacking", mask_indptr=INDPTR),
            InvalidArgumentError,
            "mask_indptr was given",
        ),
        (
            lambda: pack(
                MaskSource.from_sglang(np.zeros(9, np.uint8), mode="qlen_only_bitpacking"), num_tokens=9, max_q=9
            ),
            ShapeError,
            "is uint8, which holds no row of 9 draft tokens",
        ),
        (
            lambda: pack(MaskSource.from_parents(np.zeros(4, np.int32)), qo_indptr=INDPTR.astype(np.int64)),
            ShapeError,
            "qo_indptr is int64; allowed: int32",
        ),
        (
            lambda: pack(MaskSource.from_parents(np.zeros(4, np.int32)), qo_indptr=INDPTR[:0]),
            ShapeError,
            r"it must be \(B \+ 1,\)",
        ),
        (
            lambda: pack(MaskSource.from_parents(np.zeros(4, np.int32)), num_tokens=5),
            InvalidArgumentError,
            "5 tokens are no multiple of q_len 2",
        ),
        (
            lambda: pack(MaskSource.from_parents(np.zeros(4, np.int32)), max_q=1025),
            UnsupportedError,
            "max_q is 1025; the kernel mask packs at most 1024",
        ),
        (
            lambda: pack(MaskSource.from_parents(np.zeros(4, np.int32)), words=np.zeros((4, 2), np.uint32)),
            ShapeError,
            r"words is uint32 \(4, 2\); for 4 tokens and max_q 2 it must be uint32 \(4, 1\)",
        ),
        (
            lambda: pack(MaskSource.from_parents(np.zeros(4, np.int32)), words=np.zeros((8, 1), np.uint32)[::2]),
            ShapeError,
            "words has strides",
        ),
        (lambda: pack(MaskSource.from_parents([-1, 0])), ShapeError, "parents is a builtins.list"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_words_that_must_not_be_written_are_refused() -> None:
    words = np.zeros((4, 1), np.uint32)
    words.flags.writeable = False
    with pytest.raises(ShapeError, match="words is read-only"):
        pack(MaskSource.from_parents(np.zeros(4, np.int32)), words=words)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"qo_indptr": INDPTR, "q_len": 2}, "qo_indptr was given with q_len 2"),
        ({"qo_indptr": INDPTR, "batch": 2}, "batch 2"),
        ({"q_len": 5}, "q_len is 5 and max_q 4"),
        ({"q_len": 2, "batch": 3}, "3 requests of 2 query tokens are more than the 4 tokens"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        build(numpy_view, MaskSource.from_parents(np.zeros(4, np.int32)), np.zeros((4, 1), np.uint32), 4, 4, **keywords)


def test_layout_is_that_of_the_kernel(tmp_path: Path) -> None:
    names = MASK_PARAMS_DTYPE.names
    places = [f"u32x2{{__builtin_offsetof(MaskParams, {name}), sizeof(p.{name})}}" for name in names]
    places.append("u32x2{sizeof(MaskParams), alignof(MaskParams)}")
    stores = "".join(f"  st_global_u32x2((u8*)p.words + {8 * i}, {place});\n" for i, place in enumerate(places))
    kernel = tmp_path / "layout.cu"
    kernel.write_text(
        '#include "mask_params.cuh"\n#include "ptx.cuh"\n'
        f"KERNEL_WITH(MaskParams, mlaflash_layout, 32, 1) {{\n  if (thread_idx()) return;\n{stores}}}\n"
    )
    out = np.zeros((len(names) + 1, 2), np.uint32)
    params = np.zeros(1, MASK_PARAMS_DTYPE)
    params["words"] = out.ctypes.data
    run_kernel(kernel, {"FORMAT": 0}, (1,), 32, 0, params, {"out": out})
    for i, name in enumerate(names):
        dtype, offset = MASK_PARAMS_DTYPE.fields[name][:2]
        assert (name, *out[i].tolist()) == (name, offset, dtype.itemsize)
    assert out[-1].tolist() == [MASK_PARAMS_DTYPE.itemsize, MASK_PARAMS_DTYPE.alignment]


@pytest.mark.parametrize("name", FORMAT_CODES)
def test_constants_agree_with_the_kernel(name: str) -> None:
    sources = read("mask")
    lines = (
        f'\nstatic_assert(Smem::BYTES == {shared_bytes(name)}, "shared memory");\n'
        'static_assert(BLOCK == 256 && ROW_TILE == 16 && MAX_COLUMNS == 1024, "geometry");\n'
        f'static_assert(FORMAT == {"WORDS" if name == "items" else name.upper()}, "code");\n'
    )
    compile_sources(replace(sources, source=sources.source + lines), defines(name), "sm_90", lineinfo=False)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("name", FORMAT_CODES)
def test_every_format_compiles_without_spills(name: str, arch: str) -> None:
    compiled = compile_kernel("mask", defines(name), arch)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0), compiled.log
    assert compiled.static_shared_bytes + shared_bytes(name) <= Device.for_arch(arch).shared_per_block


def test_flat_puts_requests_one_behind_the_other() -> None:
    assert flat([np.ones((1, 2)), np.zeros((0, 0)), np.full((1, 1), 3)], np.int32).tolist() == [1, 1, 3]
