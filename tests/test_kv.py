"""Moves of KV rows on the emulator and in NumPy: overlaps of every kind, plans, tables, and the next verify step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlaflash import Device, TreeMask, emulator, kv, spec
from mlaflash.emulator import Report, run_kernel
from mlaflash.errors import InvalidArgumentError, ShapeError, UnsupportedError
from mlaflash.interop import numpy_view
from mlaflash.jit import compile_kernel
from mlaflash.jit.compiler import compile_sources
from mlaflash.jit.sources import read
from mlaflash.kv import compact, move
from mlaflash.kv.move import MOST_STAGE_BYTES, WAYS, WORDS, Pool, choose_geometry, cut_for_scratch, defines
from mlaflash.lab.move_inputs import NAMES, Array, compaction, ids, moved, random_layers

some = settings(max_examples=40, deadline=None)
BF16, FP8_ROW, FP8_SCALED_ROW = 1152, 576, 656


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2026)


def run_all(layers: list[Array], src: Any, dst: Any, *args: Any, **keywords: Any) -> list[Report]:
    reports: list[Report] = []
    emulator.move_rows(layers, src, dst, *args, reports=reports, **keywords)
    return reports


def run(layers: list[Array], src: Any, dst: Any, *args: Any, **keywords: Any) -> Report:
    (report,) = run_all(layers, src, dst, *args, **keywords)
    return report


# --- move_rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_bytes", [BF16, FP8_ROW, FP8_SCALED_ROW])
@pytest.mark.parametrize("name", NAMES)
def test_h2_h9_any_overlap_is_read_before_it_is_written(name: str, row_bytes: int, rng: np.random.Generator) -> None:
    for size, seed in ((2, 0), (24, 1)):
        src, dst = ids(name, max(size, 3) if name == "cycles_of_three" else size, rng)
        layers = random_layers((2 * size + 6, row_bytes), 3, rng)
        expected = [moved(layer, src, dst) for layer in layers]
        run(layers, src, dst, seed=seed, validate=True)
        for layer, wanted in zip(layers, expected, strict=True):
            np.testing.assert_array_equal(layer, wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("size", "row_bytes", "way"),
    [
        (150, BF16, "staged"),
        (1000, 144, "staged"),
        (3100, 272, "scratch"),
        (3100, 140, "scratch"),
        (800, 137, "scratch"),
    ],
)
def test_h2_lists_longer_than_what_rows_of_fit_in_a_block(
    name: str, size: int, row_bytes: int, way: str, rng: np.random.Generator
) -> None:
    src, dst = ids(name, size, rng)
    layers = random_layers((2 * size, row_bytes), 2, rng)
    assert choose_geometry(Pool.from_arrays(numpy_view, layers), size, size).way == way
    expected = [moved(layer, src, dst) for layer in layers]
    reports = run_all(layers, src.astype(np.int32), dst.astype(np.int64))
    assert len(reports) == (2 if way == "scratch" else 1)
    assert reports[0].blocks > 2
    for i, (layer, wanted) in enumerate(zip(layers, expected, strict=True)):
        np.testing.assert_array_equal(layer, wanted)
        live = int((src != dst).sum())
        read, written = reports[0].bytes_read, reports[-1].bytes_written
        assert read[f"kv_layers[{i}]"] == written[f"kv_layers[{i}]"] == live * row_bytes


@pytest.mark.parametrize(("room", "launches"), [(1, 6), (2, 4), (3, 4), (5, 4), (6, 2)])
def test_one_group_through_as_much_scratch_as_there_is(room: int, launches: int, rng: np.random.Generator) -> None:
    size = 3100
    src, dst = ids("one_cycle", size, rng)
    layers = random_layers((2 * size, 256), 3 if room > 3 else 2, rng)
    if room == 1:
        layers = random_layers((2 * size, 384), 1, rng)
    expected = [moved(layer, src, dst) for layer in layers]
    needed = move.scratch_bytes(Pool.from_arrays(numpy_view, layers), size, None)
    assert needed == size * 128
    memory = np.empty(room * needed + 16, np.uint8)
    scratch = memory[-memory.ctypes.data % 16 :][: room * needed]
    assert len(run_all(layers, src, dst, scratch=scratch)) == launches
    for layer, wanted in zip(layers, expected, strict=True):
        np.testing.assert_array_equal(layer, wanted)
    with pytest.raises(InvalidArgumentError, match=f"a group of 3100 moves needs at least {needed}"):
        run(layers, src, dst, scratch=scratch[: needed - 1])
    with pytest.raises(InvalidArgumentError, match="at a multiple of 16"):
        run(layers, src, dst, scratch=scratch[1:])


def test_long_groups_one_after_the_other(rng: np.random.Generator) -> None:
    size, groups = 3073, 3
    lists = [ids("one_cycle", size, rng) for _ in range(groups)]
    src, dst = (np.concatenate([own[which] + 2 * size * g for g, own in enumerate(lists)]) for which in (0, 1))
    (layer,) = random_layers((2 * size * groups, 40), 1, rng)
    n = 2 * size + 100
    expected = moved(layer, src[:n], dst[:n])
    scratch = np.empty(size * 48 + 16, np.uint8)
    scratch = scratch[-scratch.ctypes.data % 16 :][: size * 48]
    assert len(run_all([layer], src, dst, np.array([n]), size, scratch=scratch)) == 2 * groups
    np.testing.assert_array_equal(layer, expected)


@pytest.mark.parametrize("row_bytes", [BF16, FP8_SCALED_ROW, 140, 37, 16, 2000])
def test_h9_groups_of_one_go_straight_from_row_to_row(row_bytes: int, rng: np.random.Generator) -> None:
    size = 77
    src, dst = ids("apart", size, rng)
    src[5], dst[9], src[11] = -1, 10**6, dst[11]
    layers = random_layers((2 * size, row_bytes), 2, rng)
    kept = (src >= 0) & (dst < 2 * size)
    expected = [moved(layer, src[:70][kept[:70]], dst[:70][kept[:70]]) for layer in layers]
    report = run(layers, src, dst, np.array([70], np.int32), 1)
    for i, (layer, wanted) in enumerate(zip(layers, expected, strict=True)):
        np.testing.assert_array_equal(layer, wanted)
        assert report.bytes_read[f"kv_layers[{i}]"] == report.bytes_written[f"kv_layers[{i}]"] == 67 * row_bytes
    assert report.blocks == 2 * 3  # layers, and chunks of 32


def test_groups_that_have_nothing_to_do_with_each_other_run_in_many_blocks(rng: np.random.Generator) -> None:
    group, groups = 7, 40
    src, dst = (
        np.concatenate([ids("one_cycle", group, np.random.default_rng(g))[which] + 14 * g for g in range(groups)])
        for which in (0, 1)
    )
    src[::11] = -1
    layers = random_layers((14 * groups, BF16), 2, rng)
    expected = [moved(layer, src, dst) for layer in layers]
    # 28 rows are staged together: four groups.
    assert run(layers, src, dst, None, group, validate=True).blocks == 2 * groups / 4
    for layer, wanted in zip(layers, expected, strict=True):
        np.testing.assert_array_equal(layer, wanted)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("n", [0, 1, 5, 12, 99, -3])
def test_h5_only_the_first_n_entries_count(n: int, dtype: Any, rng: np.random.Generator) -> None:
    src, dst = (part.astype(dtype) for part in ids("apart", 12, rng))
    src[3], dst[7] = -1, -1
    src[8:] = dst[10] = 2**31 - 1
    layers = random_layers((24, 64), 2, rng)
    live = min(max(n, 0), 8)
    expected = [moved(layer, src[:live], dst[:live]) for layer in layers]
    run(layers, src, dst, np.array([n], dtype))
    for layer, wanted in zip(layers, expected, strict=True):
        np.testing.assert_array_equal(layer, wanted)


def test_h5_all_zeros_move_nothing(rng: np.random.Generator) -> None:
    layers = random_layers((4, 64), 2, rng)
    before = [layer.copy() for layer in layers]
    report = run(layers, np.zeros(100, np.int64), np.zeros(100, np.int64))
    assert report.bytes_written["kv_layers[0]"] == 0
    plan = emulator.plan_compact(np.zeros(8, np.int64), np.zeros((2, 4), np.int64))
    assert (plan.n.tolist(), set(plan.src.tolist()), set(plan.dst.tolist())) == ([0], {-1}, {-1})
    for layer, wanted in zip(layers, before, strict=True):
        np.testing.assert_array_equal(layer, wanted)


def test_nothing_to_move_launches_nothing(rng: np.random.Generator) -> None:
    reports: list[Report] = []
    none = np.zeros(0, np.int32)
    emulator.move_rows(random_layers((4, 64), 1, rng), none, none, reports=reports)
    emulator.move_rows([np.zeros((0, 64), np.uint8)] * 2, np.zeros(3, np.int32), np.ones(3, np.int32), reports=reports)
    assert reports == []


def test_offsets_past_two_to_the_31() -> None:
    # Untouched pages of zeros take no memory.
    layer = np.zeros((2**22, BF16), np.uint8)
    layer[[1, 2**22 - 1, 2**21]] = np.array([[1], [2], [3]], np.uint8)
    run([layer], np.array([1, 2**22 - 1, 2**21]), np.array([2**22 - 1, 2**21, 1]))
    assert [set(layer[i].tolist()) for i in (1, 2**21, 2**22 - 1)] == [{3}, {2}, {1}]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn])
def test_h9_rows_of_any_element_type_keep_their_bits(dtype: Any, rng: np.random.Generator) -> None:
    layers = random_layers((20, 1, 576), 2, rng, dtype)
    src, dst = ids("shift_by_many", 9, rng)
    expected = [moved(layer.view(np.uint8), src, dst) for layer in layers]
    report = run(layers, src, dst)
    assert report.async_bytes["kv_layers[0]"] == report.loads["kv_layers[0]"] * 16
    for layer, wanted in zip(layers, expected, strict=True):
        np.testing.assert_array_equal(layer.view(np.uint8), wanted)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda raw: list(raw[: 40 * 3 * 64].reshape(40, 3, 64).transpose(1, 0, 2)), 16),  # layers side by side
        (lambda raw: [raw[i * 4096 :][:4096].reshape(8, 8, 64)[:5] for i in range(3)], 16),  # pages
        (lambda raw: [raw[i * 4096 :][:4096].reshape(8, 8, 1, 64) for i in range(3)], 16),
        (lambda raw: [raw[i * 4096 :][:4096].reshape(64, 64)[:, 16:] for i in range(3)], 16),  # columns of wider rows
        (lambda raw: [raw[i * 4096 :][:4096].reshape(64, 64)[:, 4:] for i in range(3)], 4),
        (lambda raw: [raw[i * 4096 :][:4096].reshape(64, 64)[:, 2:44] for i in range(3)], 1),
        (lambda raw: [raw[2 + i * 4096 :][:4000].reshape(40, 100) for i in range(3)], 1),  # bases at odd addresses
    ],
)
def test_rows_may_lie_anywhere(make: Any, word: int, rng: np.random.Generator) -> None:
    memory = rng.integers(0, 256, 3 * 4096 + 64, np.uint8)
    raw = memory[-memory.ctypes.data % 16 :]
    layers = make(raw)
    assert Pool.from_arrays(numpy_view, layers).word == word
    src, dst = ids("one_cycle", 15, rng)
    expected = raw.copy()
    for layer in make(expected):
        rows = np.lib.stride_tricks.as_strided(
            layer, (layer.size // layer.shape[-1], layer.shape[-1]), (layer.strides[-2], 1)
        )
        if layer.ndim == 4:
            rows = layer.reshape(-1, layer.shape[-1])
        rows[...] = moved(rows, src, dst)
    run(layers, src, dst)
    np.testing.assert_array_equal(raw, expected)


@some
@given(
    word=st.sampled_from(WORDS),
    words=st.integers(1, 200),
    layers=st.integers(1, 3),
    moves=st.integers(1, 5000),
    group=st.integers(1, 5000),
    room=st.integers(10, 200),
)
def test_tasks_hold_whole_groups_and_fit(word: int, words: int, layers: int, moves: int, group: int, room: int) -> None:
    group = min(group, moves)
    pool = Pool((numpy_view("layer", np.zeros(1)),) * layers, 1, word * words, word * words, word)
    cut = choose_geometry(pool, moves, group)
    assert 1 <= cut.slice_words <= words
    if group == 1:
        assert (cut.way, cut.slice_words, cut.stage_bytes) == ("direct", words, 0)
        return
    assert cut.chunk % group == 0
    assert cut.chunk >= group
    if cut.way == "staged":
        assert cut.chunk * cut.slice_words * max(word, 4) <= cut.stage_bytes <= MOST_STAGE_BYTES
        assert cut.slice_words * word >= min(32, word * words)
        return
    assert group > 3072 or (word == 1 and group > 768)
    assert cut.stage_bytes >= group * cut.slice_words * word
    seen = np.zeros((moves, layers, words), np.int8)
    room = room * cut.stage_bytes // 10
    for portion in cut_for_scratch(pool, moves, cut, room):
        assert portion.moves.start % group == 0
        assert len(portion.moves) * len(portion.layers) * len(portion.words) * word <= room
        seen[np.ix_(portion.moves, portion.layers, portion.words)] += 1
    assert (seen == 1).all()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst", "n", "group", "words"),
    [
        ([0, 1], [5, 5], None, None, r"dst\[0\] and dst\[1\] are both 5"),
        ([0, 8], [5, 6], None, None, r"src\[1\] is 8; it must be a slot from 0 to 7, or -1"),
        ([0, 1], [5, -2], None, None, r"dst\[1\] is -2"),
        ([0, 1], [5, 6], 3, None, "n is 3; it must be 0 to 2"),
        ([0, 1], [1, 2], None, 1, "move 1 reads slot 1, which move 0 of another group of 1 writes"),
        ([1, 0, 3, 2], [0, 1, 2, 4], None, 2, None),
        ([0, 1, 1, 3], [1, 0, 4, 5], None, 2, "move 2 reads slot 1, which move 0 of another group of 2 writes"),
        ([-1, 0, 0, 0, 8], [5, -1, 0, 0, 9], 4, 1, None),
    ],
)
def test_h8_validate_tells_what_is_wrong_with_a_list(
    src: list[int], dst: list[int], n: int | None, group: int | None, words: str | None
) -> None:
    layers = [np.zeros((8, 64), np.uint8)]
    count = None if n is None else np.array([n])
    arguments = (layers, np.array(src), np.array(dst), count, group)
    if words is None:
        emulator.move_rows(*arguments, validate=True)
        return
    with pytest.raises(InvalidArgumentError, match=words):
        emulator.move_rows(*arguments, validate=True)


IDS = np.arange(2)


@pytest.mark.parametrize(
    ("layers", "src", "n", "words"),
    [
        ([], IDS, None, "kv_layers is empty"),
        (np.zeros((2, 4, 64)), IDS, None, "kv_layers is one array; it must be a list"),
        ([np.zeros((4, 64)), np.zeros((4, 32))], IDS, None, r"kv_layers\[1\] has 4 rows of 256 bytes"),
        ([np.zeros((4, 64)), np.zeros((5, 64))], IDS, None, r"kv_layers\[1\] has 5 rows"),
        ([np.zeros((4, 64))] * 2, IDS, None, "the same array twice"),
        ([np.zeros(64)], IDS, None, "it must be .slots, W."),
        ([np.zeros((4, 4, 2, 64))], IDS, None, "it must be .slots, W."),
        ([np.zeros((4, 64))[:, ::2]], IDS, None, "its last axis must be contiguous"),
        ([np.zeros((4, 4, 64))[:, :2]], IDS, None, "the next page must begin where a page ends"),
        ([np.broadcast_to(np.zeros(64), (4, 64))], IDS, None, "rows must not overlap"),
        ([[1, 2]], IDS, None, r"kv_layers\[0\] is a builtins.list"),
        ([np.zeros((4, 64))], IDS.astype(np.int16), None, "src is int16"),
        ([np.zeros((4, 64))], np.arange(3), None, r"dst has shape \(2,\)"),
        ([np.zeros((4, 64))], IDS, np.zeros(2, np.int32), r"n is int32 \(2,\)"),
        ([np.zeros((4, 64))], IDS, np.zeros(1), r"n is float64 \(1,\)"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(layers: Any, src: Any, n: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        emulator.move_rows(layers, src, IDS + 2, n)


def test_more_that_is_refused() -> None:
    layer = np.zeros((4, 64))
    with pytest.raises(InvalidArgumentError, match="group is 0"):
        emulator.move_rows([layer], IDS, IDS + 1, None, 0)
    with pytest.raises(UnsupportedError, match="257 arrays; at most 256"):
        emulator.move_rows([layer] * 257, IDS, IDS)
    many = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (2**26,), (0,))
    with pytest.raises(ShapeError, match="src is not contiguous"):
        emulator.move_rows([layer], many, many)
    with pytest.raises(UnsupportedError, match="at most 1073741823 words are moved in one launch"):
        emulator.move_rows([layer], *[np.zeros(2**26, np.int32)] * 2)
    layer.flags.writeable = False
    with pytest.raises(ShapeError, match="is read-only"):
        emulator.move_rows([layer], IDS, IDS)


# --- plan_compact ----------------------------------------------------------------------------------------------------


def check_compaction(out_slots: Array, accept_index: Array, accept_lens: Array | None, bounds: Array | None) -> None:
    batch, width = accept_index.shape
    reports: list[Report] = []
    plan = emulator.plan_compact(out_slots, accept_index, accept_lens, qo_indptr=bounds, reports=reports)
    if bounds is None:
        bounds = np.arange(batch + 1) * (out_slots.size // max(batch, 1))
    expected = compaction(out_slots, accept_index, accept_lens, bounds.tolist())
    flat = [pair for pairs in expected for pair in pairs]
    assert list(zip(plan.src.tolist(), plan.dst.tolist(), strict=True)) == flat
    assert plan.n.tolist() == [max((i + 1 for i, (src, _) in enumerate(flat) if src >= 0), default=0)]
    assert plan.group == width
    assert plan.src.dtype == plan.dst.dtype == out_slots.dtype
    assert reports[0].loads["accept_index"] == batch * width


@some
@given(
    q_lens=st.lists(st.integers(0, 9), max_size=5),
    width=st.integers(0, 6),
    seed=st.integers(0, 2**16),
    wide=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    has_lens=st.booleans(),
)
def test_h1_a_plan_moves_each_path_to_the_front(
    q_lens: list[int], width: int, seed: int, wide: tuple[bool, bool, bool], has_lens: bool
) -> None:
    rng = np.random.default_rng(seed)
    kinds = [np.int64 if flag else np.int32 for flag in wide]
    bounds = np.cumsum([0, *q_lens]).astype(np.int32)
    slots = rng.permutation(1000)[: bounds[-1]].astype(kinds[0])
    index = np.full((len(q_lens), width), -1, kinds[1])
    for b, q_len in enumerate(q_lens):
        length = rng.integers(0, min(q_len, width) + 1)
        index[b, :length] = bounds[b] + np.sort(rng.choice(q_len, length, replace=False))
    lens = rng.integers(0, width + 1, len(q_lens)).astype(kinds[2]) if has_lens else None
    check_compaction(slots, index, lens, bounds)


@some
@given(st.data(), st.integers(0, 2**16))
def test_garbage_moves_nothing_of_another_request(data: st.DataObject, seed: int) -> None:
    entry = st.one_of(st.integers(-2, 20), st.sampled_from([-(2**63), 2**63 - 1, 2**32 + 3, -(2**31)]))
    index = np.array(data.draw(st.lists(entry, min_size=12, max_size=12)), np.int64).reshape(3, 4)
    lens = np.array(data.draw(st.lists(entry, min_size=3, max_size=3)), np.int64)
    check_compaction(np.random.default_rng(seed).permutation(50)[:18], index, lens, None)


def test_h1_many_requests_and_rows_of_a_wider_buffer(rng: np.random.Generator) -> None:
    batch, q_len, width = 300, 16, 5
    slots = rng.permutation(batch * q_len)
    wide = np.full((batch, 32), 2147480000, np.int64)
    wide[:, :width] = np.sort(rng.random((batch, q_len)).argsort(1)[:, :width], 1) + np.arange(batch)[:, None] * q_len
    check_compaction(slots, wide[:, :width], rng.integers(0, width + 1, batch), None)


def test_a_compaction_of_many_requests_is_moved_group_by_group(rng: np.random.Generator) -> None:
    batch, q_len, width = 40, 8, 5
    slots = rng.permutation(batch * q_len)
    index = np.sort(rng.random((batch, q_len)).argsort(1)[:, :width], 1) + np.arange(batch)[:, None] * q_len
    layers = random_layers((batch * q_len, 96), 2, rng)
    before = [layer.copy() for layer in layers]
    plan = emulator.plan_compact(slots, index)
    emulator.move_rows(layers, *plan, validate=True)
    for layer, old in zip(layers, before, strict=True):
        windows = slots.reshape(batch, q_len)
        np.testing.assert_array_equal(layer[windows[:, :width]], old[slots[index]])


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"out_slots": np.zeros(7, np.int32)}, "7 slots, no multiple of the 2 requests"),
        ({"out_slots": np.zeros(8)}, "out_slots is float64"),
        ({"accept_index": np.zeros(8, np.int32)}, r"accept_index is int32 \(8,\)"),
        ({"accept_index": np.zeros((2, 3))}, "accept_index is float64"),
        ({"accept_index": np.zeros((2, 6), np.int32)[:, ::2]}, "its last axis must be contiguous"),
        ({"accept_lens": np.zeros(3, np.int32)}, r"accept_lens has shape \(3,\)"),
        ({"qo_indptr": np.zeros(2, np.int32)}, r"qo_indptr has shape \(2,\)"),
        ({"qo_indptr": np.zeros(3, np.int64)}, "qo_indptr is int64"),
    ],
)
def test_plans_of_arrays_that_do_not_fit_are_refused(keywords: dict[str, Any], words: str) -> None:
    fitting = {"out_slots": np.zeros(8, np.int32), "accept_index": np.zeros((2, 3), np.int32)}
    with pytest.raises(ShapeError, match=words):
        emulator.plan_compact(**(fitting | keywords))


# --- plan_defrag and apply_remap -------------------------------------------------------------------------------------


def fragmented(seed: int, align: int) -> tuple[int, list[Array], Array, Array]:
    """Return the slots of a pool, those of two requests, the runs of free slots, and which slots others share."""
    rng = np.random.default_rng(seed)
    num_slots = int(rng.integers(1, 40)) * align + int(rng.integers(0, align))
    used = rng.random(num_slots) < rng.choice([0.1, 0.5])
    used_slots = np.flatnonzero(used)
    if rng.random() < 0.5:
        rng.shuffle(used_slots)
    cut = int(rng.integers(0, used_slots.size + 1))
    edges = np.flatnonzero(np.diff(np.concatenate([[1], used.astype(np.int8), [1]])))
    runs = np.stack([edges[::2], edges[1::2] - edges[::2]], 1)
    rng.shuffle(runs)
    return num_slots, [used_slots[:cut], used_slots[cut:]], runs, rng.random(num_slots) < 0.02


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    align=st.sampled_from([1, 4, 16]),
    max_moves=st.one_of(st.none(), st.integers(0, 100)),
    wide=st.booleans(),
)
def test_h8_defragmentation_changes_where_rows_lie_and_not_what_they_are(
    seed: int, align: int, max_moves: int | None, wide: bool
) -> None:
    num_slots, requests, runs, shared = fragmented(seed, align)
    kind = np.int64 if wide else np.int32
    slots = requests[0].astype(kind)
    (src, dst, n, group), remap = kv.plan_defrag(
        slots, runs, num_slots=num_slots, align=align, max_moves=max_moves, immovable=shared
    )
    assert (src.dtype, dst.dtype, remap.dtype, group) == (kind, kind, kind, 1)
    live = np.flatnonzero(src >= 0)
    assert n.shape == (1,)
    assert live.size == 0 or live.max() < n[0] <= src.size
    if max_moves is not None:
        assert live.size <= n[0] <= max_moves
    free = {slot for begin, length in runs.tolist() for slot in range(begin, begin + length)}
    assert set(dst[live].tolist()) <= free
    assert set(src[live].tolist()) <= set(slots.tolist())
    assert not shared[src[live]].any()

    tokens = np.arange(num_slots)
    pool = moved(tokens, src, dst)
    for request in requests:
        np.testing.assert_array_equal(pool[kv.apply_remap(request, remap)], tokens[request])
    new = kv.apply_remap(slots, remap)
    stuck = 0
    for begin in range(0, slots.size, align):
        block, old = new[begin : begin + align], slots[begin : begin + align]
        if (block == block[0] + np.arange(block.size)).all() and block[0] % align == 0:
            continue
        np.testing.assert_array_equal(block, old)
        stuck += not shared[old].any()
    # A block stays only where no run or no move is left.
    room = sum(max(0, (begin + length) // align - -(-begin // align)) for begin, length in runs.tolist())
    left = room if max_moves is None else min(room, max_moves // align)
    assert stuck == 0 or n[0] // align == left


def test_a_request_that_lies_well_is_left_alone() -> None:
    slots = np.concatenate([np.arange(64, 96), np.arange(0, 32), np.arange(32, 40)])
    (src, _, n, _), remap = kv.plan_defrag(slots, np.array([[128, 64]]), num_slots=256, align=32)
    assert (src >= 0).sum() == n[0] == 0
    np.testing.assert_array_equal(remap, np.arange(256))


def test_a_defragmented_request_is_moved_by_the_kernel(rng: np.random.Generator) -> None:
    slots = rng.permutation(90)
    layers = random_layers((256, 128), 2, rng)
    before = [layer.copy() for layer in layers]
    moves, remap = kv.plan_defrag(slots, np.array([[100, 156], [0, 0]]), num_slots=256, align=32)
    emulator.move_rows(layers, *moves, validate=True)
    table = kv.apply_remap(slots, remap)
    np.testing.assert_array_equal(table, np.arange(128, 128 + 90))
    for layer, old in zip(layers, before, strict=True):
        np.testing.assert_array_equal(layer[table], old[slots])


@pytest.mark.parametrize(("slots", "runs", "num_slots"), [(0, 1, 64), (5, 0, 64), (0, 0, 0)])
def test_nothing_to_lay_elsewhere(slots: int, runs: int, num_slots: int) -> None:
    (src, dst, n, _), remap = kv.plan_defrag(
        np.arange(slots)[::-1].copy(), np.full((runs, 2), 32), num_slots=num_slots, align=16
    )
    assert (n.tolist(), remap.tolist()) == ([0], list(range(num_slots)))
    assert set(src.tolist()) <= {-1}
    assert set(dst.tolist()) <= {-1}


def test_tables_are_rewritten_out_of_place_and_in_place() -> None:
    remap = np.arange(8, dtype=np.int32)
    remap[2:4] = 6, 7
    table = np.array([[2, 3, -1], [2147480000, 7, 0]], np.int64)
    wanted = [[6, 7, -1], [2147480000, 7, 0]]
    new = kv.apply_remap(table, remap)
    assert (new.tolist(), new.dtype, table[0, 0]) == (wanted, np.int64, 2)
    assert kv.apply_remap(table, remap, out=table) is table
    assert table.tolist() == wanted
    # Pages of two slots: page 1 went to page 3.
    assert kv.apply_remap(np.array([0, 1, 2, 3, 4]), remap, page_size=2).tolist() == [0, 3, 2, 3, 4]
    assert kv.apply_remap(np.array([0, 5]), remap[:0]).tolist() == [0, 5]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: kv.plan_defrag(np.zeros(3), np.zeros((1, 2), np.int32), num_slots=4), ShapeError, "slots is float64"),
        (
            lambda: kv.plan_defrag(np.arange(3), np.zeros(2, np.int32), num_slots=4),
            ShapeError,
            r"free_runs is int32 \(2,\); it must be \(\*, 2\)",
        ),
        (
            lambda: kv.plan_defrag(np.arange(3), np.zeros((1, 2), np.int32), num_slots=4, immovable=np.zeros(3, bool)),
            ShapeError,
            r"immovable is bool \(3,\); it must be \(4\)",
        ),
        (
            lambda: kv.plan_defrag(np.arange(3), np.zeros((1, 2), np.int32), num_slots=4, align=0),
            InvalidArgumentError,
            "align is 0",
        ),
        (lambda: kv.plan_defrag(np.arange(3), [[0, 4]], num_slots=4), ShapeError, "free_runs is a builtins.list"),
        (lambda: kv.apply_remap(np.zeros(3), np.arange(3)), ShapeError, "table is float64"),
        (lambda: kv.apply_remap(np.arange(3), np.arange(3), out=np.arange(4)), ShapeError, r"out is int64 \(4,\)"),
        (lambda: kv.apply_remap(np.arange(3), np.arange(3), page_size=0), InvalidArgumentError, "page_size is 0"),
    ],
)
def test_plans_and_tables_that_do_not_fit_are_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


# --- the commit path -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_h10_the_next_verify_sees_what_a_linear_decode_wrote(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bfloat16 = ml_dtypes.bfloat16
    batch, size, heads, num_slots = 2, 8, 4, 160
    parents = np.array([[-1, 0, 0, 1, 1, 2, 3, 4], [-1, 0, 1, 2, 0, 4, 5, 6]])
    target = rng.integers(0, 100, (batch, size))
    draft = np.full((batch, size), 100)
    draft[0, [2, 5]] = target[0, [0, 2]]
    draft[1, [4, 5, 6]] = target[1, [0, 4, 5]]
    accepted = spec.accept_greedy(draft, target, parents=parents, depth=4)
    assert accepted.accept_index.tolist() == [[0, 2, 5, -1, -1], [8, 12, 13, 14, -1]]

    slots = rng.permutation(num_slots)
    prefix_slots = [slots[:21], slots[21:26]]
    windows = slots[40 : 40 + batch * size]
    before = rng.standard_normal((num_slots, 576)).astype(bfloat16)
    compacted, linear = before.copy(), before.copy()
    plan = emulator.plan_compact(windows, accepted.accept_index, accepted.accept_lens)
    emulator.move_rows([compacted], *plan, validate=True)

    # A linear decode: each accepted token's row is written behind the last one, in slots of its own.
    fresh_slots = slots[100 : 100 + batch * size].reshape(batch, size)
    ours, theirs = [], []
    for b, length in enumerate(accepted.accept_lens.tolist()):
        fresh = fresh_slots[b, :length]
        linear[fresh] = before[windows[accepted.accept_index[b, :length]]]
        ours.append(np.concatenate([prefix_slots[b], windows[b * size : b * size + length]]))
        theirs.append(np.concatenate([prefix_slots[b], fresh]))

    # The next draft is written to new slots, alike in all.
    next_slots = slots[80 : 80 + batch * size].reshape(batch, size)
    q = rng.standard_normal((batch * size, heads, 576)).astype(bfloat16)

    def verify(cache: Array, tables: list[Array]) -> tuple[Array, Array]:
        rows = [np.concatenate([table, own]) for table, own in zip(tables, next_slots, strict=True)]
        counts = [len(row) for row in rows]
        assert counts == [21 + 3 + size, 5 + 4 + size]
        out, lse = emulator.mla_verify(
            q,
            cache,
            sm_scale=0.05,
            kv_lens=np.array(counts, np.int32),
            kv_indptr=np.cumsum([0, *counts]).astype(np.int32),
            kv_indices=np.concatenate(rows).astype(np.int32),
            mask=TreeMask.from_parents(parents),
        )
        return out, lse

    wanted = verify(linear, theirs)
    for got, expected in zip(verify(compacted, ours), wanted, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert not np.array_equal(verify(before, ours)[1], wanted[1])


# --- the kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "dtype", "result"),
    [("CompactParams", compact.COMPACT_PARAMS_DTYPE, "src"), ("MoveParams", move.MOVE_PARAMS_DTYPE, "scratch")],
)
def test_layouts_are_those_of_the_kernels(structure: str, dtype: Any, result: str, tmp_path: Path) -> None:
    names = dtype.names
    places = [f"u32x2{{__builtin_offsetof({structure}, {name}), sizeof(p.{name})}}" for name in names]
    places.append(f"u32x2{{sizeof({structure}), alignof({structure})}}")
    stores = "".join(f"  st_global_u32x2((u8*)p.{result} + {8 * i}, {place});\n" for i, place in enumerate(places))
    kernel = tmp_path / "layout.cu"
    kernel.write_text(
        '#include "move_params.cuh"\n#include "ptx.cuh"\n'
        f"KERNEL_WITH({structure}, mlaflash_layout, 32, 1) {{\n  if (thread_idx()) return;\n{stores}}}\n"
    )
    out = np.zeros((len(names) + 1, 2), np.uint32)
    params = np.zeros(1, dtype)
    params[result] = out.ctypes.data
    run_kernel(kernel, {}, (1,), 32, 0, params, {"out": out})
    for i, name in enumerate(names):
        field, offset = dtype.fields[name][:2]
        assert (name, *out[i].tolist()) == (name, offset, field.itemsize)
    assert out[-1].tolist() == [dtype.itemsize, dtype.alignment]


@pytest.mark.parametrize(
    ("kernel", "constants", "lines"),
    [
        ("compact", {}, f"BLOCK == {compact.BLOCK} && Smem::BYTES == {compact.SHARED_BYTES}"),
        ("move", defines(16, "staged"), f"BLOCK == {move.BLOCK} && MAX_LAYERS == {move.MAX_LAYERS} && SLOT == 16"),
        ("move", defines(4, "gather"), "SLOT == 4 && WAY == GATHER"),
        ("move", defines(4, "scatter"), "WAY == SCATTER"),
        ("move", defines(16, "direct"), "WAY == DIRECT && WARPS * ROWS * 2 == 32"),
        ("move", defines(1, "staged"), "SLOT == 4 && WAY == STAGED && sizeof(MoveParams) <= 4096"),
    ],
)
def test_constants_agree_with_the_kernels(kernel: str, constants: dict[str, int], lines: str) -> None:
    sources = read(kernel)
    text = f'{sources.source}\nstatic_assert({lines}, "constants");\n'
    compile_sources(replace(sources, source=text), constants, "sm_90", lineinfo=False)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_every_form_compiles_without_spills(arch: str) -> None:
    launches = (*compact.every_launch(), *move.every_launch())
    assert len(launches) == 1 + len(WORDS) * len(WAYS)
    for launch in launches:
        compiled = compile_kernel(launch.kernel, launch.defines, arch)
        assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0), compiled.log
        assert compiled.static_shared_bytes + launch.shared_bytes <= Device.for_arch(arch).shared_per_block
