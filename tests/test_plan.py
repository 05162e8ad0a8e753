"""`VerifyPlan` on the emulator: results against the oracle, the schedule for any lengths, refusals, barriers."""

import itertools
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_cases import expect
from verify_cases import CASES, SCALE, assert_same

from mlaflash import Device, MaskSource, TreeMask, merge_states
from mlaflash.emulator import VerifyPlan, mla_verify, run_kernel
from mlaflash.emulator.plan import EmulatorBackend, pieces
from mlaflash.errors import EmulatorError, InvalidArgumentError, ShapeError, TileError, UnsupportedError
from mlaflash.jit import compile_kernel, sources
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.mask_inputs import Batch, encode
from mlaflash.lab.plan_inputs import (
    BUILDS,
    FORMATS,
    HEADS,
    MAX_BATCH,
    PAGE_SIZES,
    TILES,
    Build,
    bitpacked,
    plan_arguments,
    random_setup,
    random_step,
)
from mlaflash.mma_tiles import NARROW, NARROW_PAIR, ROWS_32, ROWS_64, ROWS_64_ROLES, MmaNarrowConfig
from mlaflash.plan import check_capacity, choose_work, plan_launch, run_launches
from mlaflash.problem import MAX_KV_LEN
from mlaflash.tiles import TileConfig

BASE = Case(name="plan", q_lens=(3, 0, 9, 2), kv_lens=(301, 5, 470, 0), heads=8, sm_scale=SCALE, page_size=16)
ROW_BYTES = 576 * 2


@pytest.fixture(params=TILES)
def tiles(request: pytest.FixtureRequest) -> Any:
    return TILES[request.param]


def make(case: Case, **extra: Any) -> VerifyPlan:
    """Make a plan that a case fits; few multiprocessors, so that short contexts are cut into many pieces."""
    return VerifyPlan(**plan_arguments(case, **({"tiles": NARROW, "num_sms": 5} | extra)))


def update(plan: VerifyPlan, arguments: dict[str, Any], **extra: Any) -> None:
    names = ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices", "block_table", "tail_lens", "mask")
    given = {name: arguments[name] for name in names if name in arguments}
    if isinstance(given["mask"], str):
        del given["mask"]
    plan.update(**(given | {"validate": True} | extra))


def run(plan: VerifyPlan, arguments: dict[str, Any], **extra: Any) -> tuple[Any, Any]:
    return plan.run(arguments["q"], arguments["kv_cache"], new_kv=arguments.get("new_kv"), **extra)


def step(plan: VerifyPlan, arguments: dict[str, Any], **extra: Any) -> tuple[Any, Any]:
    update(plan, arguments)
    return run(plan, arguments, **extra)


def check(case: Case, data: int, **extra: Any) -> VerifyPlan:
    """Hold a step on the arrays number `data` against the oracle."""
    arguments = build(case, data)
    plan = make(case, **extra)
    expect(step(plan, arguments), arguments)
    return plan


# --- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "addressing"),
    [("causal", "indices"), ("none", "block_table"), ("tree", "indices"), ("dense", "block_table")],
)
def test_every_mask_and_row_tile(mask: str, addressing: str, tiles: Any) -> None:
    check(replace(BASE, mask=mask, addressing=addressing), 1, tiles=tiles)


@pytest.mark.parametrize("case", [c for c in CASES if c.addressing != "dense"], ids=lambda case: case.name)
def test_cases_from_the_field(case: Case) -> None:
    case = replace(case, dtype="bfloat16" if case.dtype == "float32" else case.dtype)
    check(case, 2, num_sms=4)
    check(case, 2, num_sms=7, tiles=ROWS_64)


@pytest.mark.parametrize("addressing", ["indices", "block_table"])
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_pages(page_size: int, id_dtype: str, addressing: str) -> None:
    case = replace(BASE, q_lens=(2, 1), kv_lens=(170, 331), page_size=page_size, id_dtype=id_dtype)
    check(replace(case, addressing=addressing), 3, num_sms=7)
    check(replace(case, addressing=addressing), 3, num_sms=7, tiles=ROWS_64)


@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_e10_kv_indptr_of_either_width(width: Any) -> None:
    arguments = build(BASE, 4)
    expect(step(make(BASE), arguments | {"kv_indptr": arguments["kv_indptr"].astype(width)}), arguments)


@pytest.mark.parametrize("num_sms", range(4, 10))
def test_any_number_of_blocks(num_sms: int, tiles: Any) -> None:
    plan = check(replace(BASE, q_lens=(2, 7, 1), kv_lens=(600, 90, 333), mask="tree"), 5, num_sms=num_sms, tiles=tiles)
    assert plan.work.blocks >= num_sms - num_sms % plan.work.row_tiles


@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize(
    "lens",
    [[MAX_KV_LEN], [MAX_KV_LEN] * 300, [0, 1, MAX_KV_LEN, 0, 5] * 20, [1] * 600],
    ids=lambda lens: str(len(lens)),
)
def test_every_tile_of_the_longest_requests_is_in_one_piece(lens: list[int], heads: int) -> None:
    """Their sums do not fit 32 bits."""
    capacity = check_capacity(
        num_heads=heads, max_batch=len(lens), max_q_len=16, max_kv_len=MAX_KV_LEN, sm_scale=0.1, mask="none", max_ids=1
    )
    work = choose_work(capacity, Device.for_arch("sm_90"), NARROW)
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    blocks = pieces(capacity, work, lens)
    for piece in itertools.chain(*blocks):
        found[piece.request, piece.row_tile].append((piece.begin, piece.end))
    assert len(found) == len(lens) * work.row_tiles
    for (request, _), runs in found.items():
        ends = [0, *(end for _, end in sorted(runs))]
        assert [begin for begin, _ in sorted(runs)] == ends[:-1]
        assert ends[-1] == -(-lens[request] // 16)
    tiles = [sum(piece.end - piece.begin for piece in block) for block in blocks]
    assert max(tiles) <= 1.1 * sum(tiles) / len(tiles) + work.start_tiles


def test_a_longer_request_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=f"max_kv_len is 2147483647; a request has at most {MAX_KV_LEN} tokens"):
        VerifyPlan(num_heads=8, max_batch=1, max_q_len=1, max_kv_len=2**31 - 1, sm_scale=0.1)


@pytest.mark.parametrize("kv_len", [0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257])
def test_lengths_around_tiles_and_pieces(kv_len: int) -> None:
    check(replace(BASE, q_lens=(1, 2), kv_lens=(kv_len, 256 - kv_len // 2)), 6, num_sms=4)


def test_a1_rows_before_the_first_token_are_empty(tiles: Any) -> None:
    case = replace(BASE, q_lens=(33, 9), kv_lens=(7, 200), heads=4)
    arguments = build(case, 7)
    out, lse = step(make(case, tiles=tiles), arguments)
    expect((out, lse), arguments)
    assert not out[:26].any()
    assert np.isneginf(lse[:26]).all()


def test_a9_padding_comes_out_empty(tiles: Any) -> None:
    arguments = build(BASE, 8)
    arguments["q"] = np.concatenate([arguments["q"], np.full((5, 8, 576), np.nan, arguments["q"].dtype)])
    plan = make(BASE, tiles=tiles)
    plan._memory[:] = 0xFF  # NaN
    out, lse = step(plan, arguments)
    expect((out, lse), arguments)
    assert not out[14:].any()
    assert np.isneginf(lse[14:]).all()
    assert np.isfinite(np.abs(out.astype(np.float32)).max())


@pytest.mark.parametrize("requests", [0, 2])
def test_a_step_of_padding_alone(requests: int) -> None:
    plan = make(BASE)
    none = np.zeros(requests + 1, np.int32)
    plan.update(kv_lens=none[:requests], qo_indptr=none, kv_indptr=none, kv_indices=none[:0], validate=True)
    out, lse = plan.run(np.full((3, 8, 576), np.nan, ml_dtypes.bfloat16), np.zeros((2, 16, 576), ml_dtypes.bfloat16))
    assert not out.any()
    assert np.isneginf(lse).all()


def test_a15_no_tokens_launch_nothing_in_run() -> None:
    plan = make(BASE)
    arguments = build(replace(BASE, q_lens=(0, 0), kv_lens=(20, 0)), 9)
    update(plan, arguments)
    plan.reports.clear()
    out, lse = run(plan, arguments)
    assert (out.shape, lse.shape, plan.reports) == ((0, 8, 512), (0, 8), [])


@pytest.mark.parametrize("paired", [False, True])
def test_requests_of_one_length(paired: bool) -> None:
    case = replace(BASE, q_lens=(3, 3, 3), kv_lens=(100, 2, 333), mask="tree", paired=paired)
    arguments = build(case, 10)
    q = arguments["q"]
    plan = make(case, max_q_len=5, max_batch=4)
    expected = step(plan, arguments)
    expect(expected, arguments)
    del arguments["qo_indptr"]
    update(plan, arguments, q_len=3)
    assert_same(run(plan, arguments), expected)
    shaped = tuple(x.reshape(3, 3, *x.shape[1:]) for x in q) if paired else q.reshape(3, 3, 8, 576)
    out, lse = run(plan, arguments | {"q": shaped})
    assert (out.shape, lse.shape) == ((3, 3, 8, 512), (3, 3, 8))
    assert_same((out.reshape(9, 8, 512), lse.reshape(9, 8)), expected)


def test_q_len_is_max_q_len_by_default() -> None:
    case = replace(BASE, q_lens=(2, 2), kv_lens=(90, 40))
    arguments = build(case, 11)
    plan = make(case)
    expected = step(plan, arguments)
    del arguments["qo_indptr"]
    assert_same(step(plan, arguments), expected)


@pytest.mark.parametrize("mask", ["causal", "none", "tree"])
@pytest.mark.parametrize("paired", [False, True])
def test_new_kv(mask: str, paired: bool) -> None:
    case = replace(BASE, q_lens=(3, 17, 2), kv_lens=(148, 220, 2), new_kv=True, paired=paired, mask=mask)
    check(case, 12)
    check(case, 12, tiles=ROWS_64)


@pytest.mark.parametrize("tiles", [NARROW, ROWS_64], ids=["narrow", "wide"])
def test_a_cache_of_two_buffers(tiles: Any) -> None:
    case = replace(BASE, paired=True)
    arguments = build(case, 13)
    plan = make(case, tiles=tiles)
    apart = step(plan, arguments)
    expect(apart, arguments)
    whole = np.concatenate(arguments["kv_cache"], -1)
    views = whole[..., :512], whole[..., 512:]
    # Of the same layout as the views, but elsewhere.
    buffers = views[0], np.full_like(whole, np.nan)[..., 512:]
    buffers[1][...] = views[1]
    for cache in (views, buffers):
        assert_same(step(plan, arguments | {"kv_cache": cache}), apart)
    fused = make(case, split_kv=False, tiles=tiles)
    assert_same(step(fused, arguments | {"kv_cache": views}), apart)
    with pytest.raises(InvalidArgumentError, match="split_kv=True"):
        run(fused, arguments)


def test_e7_strided_q_and_results() -> None:
    case = replace(BASE, heads=5)
    arguments = build(case, 14)
    plan = make(case)
    expected = step(plan, arguments)
    nope = np.ascontiguousarray(arguments["q"][..., :512].transpose(1, 0, 2)).transpose(1, 0, 2)
    room = np.full((14, 5, 128), np.nan, nope.dtype)
    room[..., 32:96] = arguments["q"][..., 512:]
    out = np.full((14, 5, 640), np.nan, nope.dtype)[..., 64:576]
    lse = np.full((5, 14), np.nan, np.float32).T
    given = run(plan, arguments | {"q": (nope, room[..., 32:96])}, out=out, lse=lse)
    assert given[0] is out
    assert given[1] is lse
    assert_same(given, expected)
    assert np.isnan(out.base.astype(np.float32)[..., [*range(64), *range(576, 640)]]).all()


def test_tail_lens_say_what_the_mask_columns_are() -> None:
    case = replace(BASE, q_lens=(8, 5, 2), kv_lens=(260, 33, 20), mask="dense")
    arguments = build(case, 15) | {"tail_lens": np.array([5, 2, 8], np.int32)}
    for tiles in (NARROW, ROWS_64):
        plan = make(case, tiles=tiles)
        expected = step(plan, arguments)
        expect(expected, arguments)
        source = MaskSource.from_packed(arguments["mask"].words, arguments["tail_lens"].astype(np.int64))
        update(plan, arguments, mask=source)
        assert_same(run(plan, arguments), expected)


@pytest.mark.parametrize("sm_scale", [0.0, -SCALE])
@pytest.mark.parametrize("logit_cap", [0.0, 0.5, 30.0])
def test_scales_and_soft_caps(logit_cap: float, sm_scale: float) -> None:
    case = replace(BASE, q_lens=(3,), kv_lens=(333,), sm_scale=sm_scale, logit_cap=logit_cap, mask="tree")
    check(case, 16, num_sms=4)
    check(case, 16, num_sms=4, tiles=ROWS_64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
def test_element_types(dtype: str, out_dtype: str) -> None:
    case = replace(BASE, dtype=dtype, mask="tree")
    plan = check(case, 17, out_dtype=out_dtype)
    arguments = build(case, 17)
    out = np.full((14, 8, 512), np.nan, ml_dtypes.bfloat16 if out_dtype == "bfloat16" else out_dtype)
    assert run(plan, arguments, out=out)[0] is out
    expect((out, run(plan, arguments)[1]), arguments)


@pytest.mark.parametrize("parts", [2, 6, 12, 25, 50, 90])
def test_many_parts_of_a_row_tile_are_merged(parts: int) -> None:
    """One, two, four, eight and sixteen warps share an item."""
    case = replace(BASE, q_lens=(2,), kv_lens=(128 * parts,))
    for out_dtype in ("bfloat16", "float32") if parts < 20 else ("float32",):
        plan = check(case, 18, num_sms=parts, out_dtype=out_dtype, page_size=16)
        assert sum(merge["first"] >= 0 for merge in merges_of(plan)[:-1]) == parts - 1


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_a_mask(name: str) -> None:
    case = replace(BASE, q_lens=(3, 0, 17, 9), kv_lens=(301, 5, 270, 12), mask="dense")
    batch = Batch(case.q_lens, tuple(max(kv - q, 0) for q, kv in zip(case.q_lens, case.kv_lens, strict=True)))
    arguments = build(case, 19)
    plan = make(case, max_q_len=40)
    for wide in (False, True):
        if name == "tree_mask":
            arguments["mask"] = given = TreeMask.from_dense(batch.dense())
        else:
            source = bitpacked(batch) if name == "sglang_bitpacking" else encode(name, batch, 17, wide=wide)
            arguments["mask"], given = source.expected, source.make(**source.arrays)
        update(plan, arguments, mask=given)
        expect(run(plan, arguments), arguments)


def test_d3_a_step_does_not_see_the_mask_of_the_one_before() -> None:
    case = replace(BASE, mask="dense")
    plan = make(case)
    first, second = build(case, 20), build(replace(case, mask="chain"), 20)
    step(plan, first)
    assert_same(step(plan, second), step(make(replace(BASE, mask="causal")), second | {"mask": "causal"}))


def test_d11_a_chain_is_causal_bitwise(tiles: Any) -> None:
    # The tokens of a request end in one KV tile: row tiles are equally long under both masks.
    case = replace(BASE, q_lens=(3, 9), kv_lens=(304, 480))
    arguments = build(replace(case, mask="chain"), 21)
    chain = step(make(replace(case, mask="chain"), tiles=tiles), arguments)
    assert_same(step(make(case, tiles=tiles), arguments | {"mask": "causal"}), chain)


# --- one plan, many steps ------------------------------------------------------------------------------------------

SHRINKING_AND_GROWING = [
    ((3, 0, 9, 2), (301, 5, 470, 0)),
    ((1,), (40,)),
    ((), ()),
    ((9, 9, 9, 9, 9), (500, 400, 300, 200, 100)),
    ((0, 0), (0, 0)),
    ((1, 1, 1, 1, 1), (500, 1, 17, 16, 15)),
    ((9,), (500,)),
]


def test_a_step_does_not_depend_on_those_before(tiles: Any) -> None:
    case = replace(BASE, mask="dense", addressing="block_table" if tiles.rows == 16 else "indices")
    capacity = {"max_batch": 5, "max_q_len": 9, "max_kv_len": 512, "max_ids": 200, "tiles": tiles}
    plan = make(case, **capacity)
    for seed, (q_lens, kv_lens) in enumerate(SHRINKING_AND_GROWING):
        arguments = build(replace(case, q_lens=q_lens, kv_lens=kv_lens), seed)
        result = step(plan, arguments)
        assert_same(result, step(make(case, **capacity), arguments))
        expect(result, arguments)


def test_a_run_may_be_repeated_with_other_arrays() -> None:
    """Layers share a schedule."""
    arguments = build(BASE, 22)
    plan = make(BASE)
    first = step(plan, arguments)
    other = arguments | {"kv_cache": -arguments["kv_cache"], "q": arguments["q"][:, ::-1].copy()}
    expect(run(plan, other), other)
    assert_same(run(plan, arguments), first)


@pytest.mark.parametrize("mask", ["causal", "tree"])
def test_the_order_of_threads_does_not_matter(mask: str, tiles: Any) -> None:
    arguments = build(replace(BASE, mask=mask), 23)
    plan = make(replace(BASE, mask=mask), tiles=tiles)
    first = step(plan, arguments)
    for seed in (1, 2):
        plan.seed = seed
        assert_same(step(plan, arguments), first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_many_schedules_are_free_of_races(seed: int, tiles: Any) -> None:
    case = replace(BASE, q_lens=(3, 1, 2), kv_lens=(200, 17, 90), mask="tree", page_size=(1, 16)[seed % 2])
    check(case, seed, tiles=tiles, seed=seed, num_sms=3 + seed % 5)


@pytest.mark.parametrize("addressing", ["indices", "block_table"])
@pytest.mark.parametrize("copy_ids", [False, True])
def test_f2_ids_are_copied_if_asked(copy_ids: bool, addressing: str) -> None:
    case = replace(BASE, addressing=addressing)
    arguments = build(case, 24)
    name = "block_table" if addressing == "block_table" else "kv_indices"
    plan = make(case, copy_ids=copy_ids)
    first = step(plan, arguments)
    expect(first, arguments)
    # The pages change places, and the ids with them, after the update.
    order = np.random.default_rng(0).permutation(len(arguments["kv_cache"]))
    moved = np.argsort(order)
    cache = arguments["kv_cache"][order]
    ids = arguments[name]
    real = ids < len(cache)
    ids[real] = moved[ids[real]]
    if not copy_ids:
        assert_same(run(plan, arguments | {"kv_cache": cache}), first)
    else:
        assert_same(run(plan, arguments | {"kv_cache": arguments["kv_cache"]}), first)


@pytest.mark.parametrize("copy_ids", [False, True])
@pytest.mark.parametrize("columns", [31, 40])
def test_rows_of_a_wider_block_table(columns: int, copy_ids: bool) -> None:
    """Of fewer columns than the plan has room for, and of more."""
    case = replace(BASE, addressing="block_table")
    arguments = build(case, 25)
    table = arguments["block_table"]
    wide = np.full((4, 64), 2_147_480_000, np.int32)
    wide[:, : table.shape[1]] = table
    plan = make(case, max_kv_len=16 * 35, copy_ids=copy_ids)
    expect(step(plan, arguments | {"block_table": wide[:, :columns]}), arguments)


def test_requests_may_share_pages() -> None:
    case = replace(BASE, q_lens=(2, 2), kv_lens=(300, 300), addressing="block_table")
    arguments = build(case, 26)
    arguments["block_table"][1, :15] = arguments["block_table"][0, :15]
    expect(step(make(case), arguments), arguments)


def aligned(num_bytes: int, offset: int = 0) -> Any:
    room = np.full(num_bytes + 512, 0xFF, np.uint8)
    begin = -room.ctypes.data % 256 + offset
    return room[begin : begin + num_bytes]


def test_the_callers_memory() -> None:
    arguments = build(replace(BASE, mask="tree"), 27)
    case = replace(BASE, mask="tree")
    own = make(case)
    expected = step(own, arguments)
    size = own.workspace_bytes
    memory = aligned(size + 256)
    plan = make(case, workspace=memory[:size].view(np.float32))
    assert plan.workspace_bytes == size
    assert_same(step(plan, arguments), expected)
    assert (memory[size:] == 0xFF).all()
    assert not (memory[:size] == 0xFF).all()


@pytest.mark.parametrize(
    "wrong",
    [lambda n: aligned(n - 1), lambda n: aligned(n, 16), lambda n: aligned(2 * n)[::2], lambda n: aligned(n)[None]],
    ids=["too-small", "misaligned", "strided", "two-axes"],
)
def test_memory_that_does_not_do_is_refused(wrong: Any) -> None:
    size = make(BASE).workspace_bytes
    with pytest.raises(ShapeError, match=rf"workspace is uint8 .*; {size} bytes on 256 are needed"):
        make(BASE, workspace=wrong(size))


def test_the_documented_bound_of_the_workspace(tiles: Any) -> None:
    case = replace(BASE, q_lens=(64,), kv_lens=(4096,))
    plan = make(case, max_batch=48, tiles=tiles, num_sms=132, max_ids=1)
    partials = 2 * plan.work.blocks * tiles.rows * (512 * 2 + 4)
    assert partials <= plan.workspace_bytes
    spans = plan.work.row_tiles * 48
    assert plan.workspace_bytes <= partials + 100 * (plan.work.blocks + spans) + 256 * 8


def test_e1_e2_slots_past_two_to_the_31_elements(tiles: Any) -> None:
    # Memory that is never touched costs nothing: 4.4 GB of address space, a few pages of it real.
    slots = np.array([3_728_270, 3_728_271, 3_799_999, 5], np.int32)
    pool = np.empty((3_800_000, 576), ml_dtypes.bfloat16)
    rng = np.random.default_rng(28)
    pool[slots] = rows = rng.standard_normal((4, 576), np.float32).astype(pool.dtype)
    q = (0.3 * rng.standard_normal((1, 8, 576), np.float32)).astype(pool.dtype)
    plan = make(replace(BASE, q_lens=(1,), kv_lens=(4,), page_size=1), tiles=tiles)
    plan.update(kv_lens=np.array([4], np.int32), kv_indptr=np.array([0, 4], np.int32), kv_indices=slots)
    lens = np.array([4], np.int32)
    expect(plan.run(q, pool), {"q": q, "kv_cache": rows, "sm_scale": SCALE, "kv_lens": lens})


def test_e6_shuffled_slots_equal_contiguous_ones_bitwise() -> None:
    case = replace(BASE, page_size=1)
    arguments = build(case, 29)
    ids, indptr = arguments["kv_indices"], arguments["kv_indptr"]
    slots = np.concatenate([ids[begin : begin + n] for begin, n in zip(indptr, case.kv_lens, strict=False)])
    contiguous = arguments | {
        "kv_cache": arguments["kv_cache"].reshape(-1, 576)[slots],
        "kv_indices": np.arange(slots.size, dtype=np.int32),
        "kv_indptr": np.array([0, *np.cumsum(case.kv_lens)], np.int32),
    }
    plan = make(case)
    assert_same(step(plan, arguments), step(plan, contiguous))


def spread_tokens(rows: Any, step: int) -> Any:
    """Lay tokens `step` elements apart, in memory that costs nothing where it is not touched."""
    room = np.empty((len(rows) - 1) * step + rows[0].size, rows.dtype)
    item = rows.itemsize
    far = np.lib.stride_tricks.as_strided(room, rows.shape, (step * item, *rows.strides[1:]))
    far[...] = rows
    return far


@pytest.mark.parametrize("kernel", ["plan", "naive", "tile", "mma_narrow", "mma_wide"])
def test_e4_query_tokens_past_two_to_the_31_elements(kernel: str) -> None:
    arguments = build(replace(BASE, q_lens=(1, 2), kv_lens=(9, 20)), 36)
    q, out = (spread_tokens(np.ones((3, 8, width), arguments["q"].dtype), 2**30 + 1024) for width in (576, 512))
    q[...] = arguments["q"]
    if kernel == "plan":
        plan = make(replace(BASE, q_lens=(1, 2), kv_lens=(9, 20)))
        update(plan, arguments)
        expect(run(plan, arguments | {"q": q}, out=out), arguments)
    else:
        expect(mla_verify(**(arguments | {"q": q}), out=out, kernel=kernel), arguments)


def test_b2_the_halves_of_a_context_merge_to_the_whole() -> None:
    """Of two ranks, each with every other token of the cache and its share of the tree's."""
    case = replace(BASE, q_lens=(6,), kv_lens=(206,), mask="tree", page_size=1)
    arguments = build(case, 37)
    slots, dense = arguments["kv_indices"], arguments["mask"].to_dense()[0]
    parts = []
    for rank in range(2):
        own = np.ascontiguousarray(slots[rank:206:2])
        columns = np.zeros((6, 6), bool)
        columns[:, :3] = dense[:, rank::2]
        half = arguments | {
            "kv_lens": int32(103), "kv_indptr": int32(0, 103), "kv_indices": own, "tail_lens": int32(3),
            "mask": TreeMask.from_dense([columns]),
        }  # fmt: skip
        parts += step(make(case, out_dtype="float32"), half)
    whole = step(make(case, out_dtype="float32"), arguments)
    expect(whole, arguments)
    expect(merge_states(*parts), arguments)


def test_b2_the_log_sum_exp_in_either_base() -> None:
    arguments = build(BASE, 38)
    out, lse = step(make(BASE), arguments)
    out_2, lse_2 = step(make(BASE, lse_base="2"), arguments)
    np.testing.assert_array_equal(out_2, out)
    np.testing.assert_allclose(lse_2 * np.log(2), lse, rtol=1e-6)
    live = np.isfinite(lse)
    assert np.abs(lse_2[live] - lse[live]).min() > 0.1


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a12_e13_bits_that_nobody_sees_change_nothing(poison: float, tiles: Any) -> None:
    """Slot 0, pages of nobody and the tails of pages hold NaN already."""
    case = replace(BASE, mask="tree", page_size=64)
    arguments = build(case, 30)
    plan = make(case, tiles=tiles)
    holes = np.isnan(arguments["kv_cache"].astype(np.float32))
    caches = [np.where(holes, fill, arguments["kv_cache"]).astype(ml_dtypes.bfloat16) for fill in (0.0, poison)]
    clean, poisoned = (step(plan, arguments | {"kv_cache": cache}) for cache in caches)
    assert_same(clean, poisoned)


@pytest.mark.parametrize("fill", [0, 1])
def test_a10_a11_a_bucket_of_eight_with_five_live_requests(fill: int, tiles: Any) -> None:
    case = replace(BASE, q_lens=(3,) * 5, kv_lens=(40, 300, 3, 77, 160), addressing="block_table", mask="tree")
    arguments = build(case, 31)
    live = step(make(case, tiles=tiles, max_batch=8), arguments)
    expect(live, arguments)
    # Pads: garbage q, garbage masks, and slot 0, which lies on page 0.
    padded = dict(arguments)
    padded["q"] = np.concatenate([arguments["q"], np.full((9, 8, 576), np.nan, arguments["q"].dtype)])
    padded["kv_lens"] = np.append(arguments["kv_lens"], [fill] * 3).astype(np.int32)
    padded["block_table"] = np.pad(arguments["block_table"], ((0, 3), (0, 0)))
    words = np.concatenate([arguments["mask"].words, np.full((9, 1), 2**32 - 1, np.uint32)])
    padded["mask"] = TreeMask(words, arguments["mask"].max_q)
    del padded["qo_indptr"]
    plan = make(case, tiles=tiles, max_batch=8)
    out, lse = step(plan, padded)
    expect((out[:15], lse[:15]), arguments)
    if fill == 0:
        assert not out[15:].any()
        assert np.isneginf(lse[15:]).all()
    # The schedule knows nothing of pads that see nothing: the same cuts, but for their share of zeros.
    same = padded | {"qo_indptr": np.array([0, 3, 6, 9, 12, 15, 15, 15, 15], np.int32)}
    out, lse = step(plan, same)
    assert_same((out[:15], lse[:15]), live)
    assert not out[15:].any()
    assert np.isneginf(lse[15:]).all()


@pytest.mark.parametrize("mask", ["causal", "none"])
def test_every_kv_row_is_read_once_for_each_row_tile(mask: str, tiles: Any) -> None:
    case = replace(BASE, q_lens=(2, 5, 1), kv_lens=(600, 37, 333), mask=mask)
    plan = check(case, 32, tiles=tiles, num_sms=6)
    reports = [report for report in plan.reports if report.mma]
    read = sum(n for name, n in reports[0].bytes_read.items() if name.startswith("kv_cache"))
    tokens = 0
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        for last in range(tiles.rows - 1, q_len * 8 + tiles.rows - 1, tiles.rows):
            token = min(last // 8, q_len - 1)
            tokens += kv_len - q_len + token + 1 if mask == "causal" else kv_len
    assert read == tokens * ROW_BYTES


def test_it_equals_a_call_of_the_same_cuts_bitwise() -> None:
    """One request in equal pieces is what splits make of it."""
    for num_sms in (4, 5):
        case = replace(BASE, q_lens=(2,), kv_lens=(16 * 40,))
        arguments = build(case, 33)
        plan = make(case, num_sms=num_sms)
        planned = step(plan, arguments)
        assert {item["end"] - item["begin"] for item in items_of(plan)} == {40 // num_sms}
        tiles = replace(NARROW, nsplit=num_sms)
        assert_same(planned, mla_verify(**arguments, kernel="mma_narrow", tiles=tiles))


def random_problem(seed: int, pairs: int, builds: Sequence[Build] = BUILDS) -> None:
    rng = np.random.default_rng(seed)
    setup = random_setup(rng, builds)
    plan = VerifyPlan(**setup.arguments(), num_sms=int(rng.integers(1, 10)), seed=seed)
    tiles = setup.build.tiles
    for _ in range(2):
        problem = random_step(rng, setup, pairs=pairs)
        plan.update(**problem.update(), validate=True)
        planned = plan.run(**problem.run())
        expect(planned, problem.arguments)
        plan.seed += 1
        assert_same(plan.run(**problem.run()), planned)
        splits = replace(tiles, nsplit=int(rng.integers(1, 5)))
        called = mla_verify(
            **problem.arguments, out_dtype=setup.build.out_dtype, kernel=tiles.kernel, tiles=splits, seed=seed
        )
        expect(called, problem.arguments)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_problems(seed: int) -> None:
    random_problem(seed, 20_000, (BUILDS[0], BUILDS[4]))  # compiled for other tests too


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_many_random_problems(seed: int) -> None:
    random_problem(seed, 100_000)


def test_the_random_problems_cover_what_they_should() -> None:
    """Of each kind there are some: a generator that lost one would weaken its tests without a word."""
    seen: Counter[Any] = Counter()
    for seed in range(300):
        rng = np.random.default_rng(seed)
        setup = random_setup(rng)
        problem = random_step(rng, setup, pairs=2_000)
        arguments = problem.arguments
        q_lens, kv_lens = np.diff(arguments["qo_indptr"]), arguments["kv_lens"]
        q = arguments["q"][0] if setup.build.split_kv else arguments["q"]
        seen.update([setup.build, ("heads", setup.heads), ("page size", setup.page_size), setup.id_dtype, setup.mask])
        seen.update([("table", setup.block_table), ("batch", len(kv_lens)), ("padding", len(q) > q_lens.sum())])
        seen.update([("tails", "tail_lens" in arguments), ("source", problem.source is not None)])
        seen.update([("no query", bool((q_lens == 0).any())), ("no token", bool((kv_lens == 0).any()))])
        seen.update([("blind rows", bool((q_lens > kv_lens).any())), ("wide mask", bool(q_lens.max() > 32))])
    kinds: list[Any] = [*BUILDS, "int32", "int64", "causal", "none", "tree"]
    kinds += [("heads", heads) for heads in HEADS] + [("page size", size) for size in PAGE_SIZES]
    kinds += [("batch", requests + 1) for requests in range(MAX_BATCH)]
    flags = ("table", "padding", "tails", "source", "no query", "no token", "blind rows", "wide mask")
    kinds += [(flag, holds) for flag in flags for holds in (False, True)]
    assert [kind for kind in kinds if seen[kind] < 10] == []


# --- the schedule --------------------------------------------------------------------------------------------------

ITEM = np.dtype(
    [(name, np.int32) for name in ("request", "row_tile", "begin", "end", "q_begin", "q_len", "kv_len", "tail_len")]
    + [("id_begin", np.int64), ("part", np.int32), ("next", np.int32)]
)
MERGE = np.dtype(
    [(name, np.int32) for name in ("first", "last", "q_begin", "first_row", "end_row")] + [("unused", np.int32, 3)]
)


def merges_of(plan: VerifyPlan) -> Any:
    """Give the merges of the last schedule; the one behind the blocks' says where the query tokens end."""
    return plan._pieces["work_merges"].view(MERGE)[:, 0]


def chains_of(plan: VerifyPlan) -> list[list[Any]]:
    """Give the items of each block, in its order."""
    items = plan._pieces["work_items"].view(ITEM)[:, 0]
    seen: set[int] = set()
    chains = []
    for block in range(plan.work.blocks):
        chain, index = [], block
        while index != -1:
            assert index not in seen  # neither a loop nor an item of two blocks
            assert 0 <= index < len(items)
            seen.add(index)
            chain.append(items[index])
            index = int(items["next"][index])
        chains.append(chain)
    return chains


def items_of(plan: VerifyPlan) -> list[Any]:
    return [item for chain in chains_of(plan) for item in chain if item["request"] >= 0]


def visible_tiles(plan: VerifyPlan, q_len: int, kv_len: int, row_tile: int) -> int:
    """Give the KV tiles in which some row of a row tile sees a token."""
    rows, heads = plan.work.config.rows, plan.capacity.num_heads
    last = min((row_tile * rows + rows - 1) // heads, q_len - 1)
    end = kv_len - q_len + last + 1 if plan.capacity.mask == "causal" else kv_len
    return -(-max(end, 0) // 16)


def expected_row_tiles(plan: VerifyPlan, q_lens: Any, kv_lens: Any) -> Iterator[tuple[tuple[int, int], int]]:
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for row_tile in range(-(-q_len * plan.capacity.num_heads // plan.work.config.rows)):
            yield (request, row_tile), visible_tiles(plan, q_len, kv_len, row_tile)


def check_schedule(plan: VerifyPlan, q_lens: Any, kv_lens: Any) -> None:
    """Every KV tile of every row tile belongs to one item, and parts and merges agree with it."""
    rows, heads = plan.work.config.rows, plan.capacity.num_heads
    bounds = np.concatenate([[0], np.cumsum(q_lens)])
    pieces = defaultdict(list)
    for block, chain in enumerate(chains_of(plan)):
        for item in chain:
            if item["request"] == -1:
                assert len(chain) == 1
                continue
            request, q_len, kv_len = (int(item[name]) for name in ("request", "q_len", "kv_len"))
            assert (q_len, kv_len) == (q_lens[request], kv_lens[request])
            assert (item["q_begin"], item["tail_len"]) == (bounds[request], q_len)
            pieces[request, int(item["row_tile"])].append((int(item["begin"]), int(item["end"]), block, item["part"]))
    merges = merges_of(plan)
    wanted = {}
    parts: list[int] = []
    expected = dict(expected_row_tiles(plan, q_lens, kv_lens))
    assert pieces.keys() == expected.keys()
    for (request, row_tile), tiles in expected.items():
        begins, ends, blocks, own = zip(*sorted(pieces[request, row_tile]), strict=True)
        assert (begins[0], *ends) == (*begins, tiles)
        if len(own) == 1:
            assert own[0] == -1
            continue
        assert all(begin < end for begin, end in zip(begins, ends, strict=True))
        assert blocks == tuple(range(blocks[0], blocks[-1] + 1))
        assert own == (2 * blocks[0] + 1, *(2 * block for block in blocks[1:]))
        parts += own
        end_row = min((row_tile + 1) * rows, q_lens[request] * heads)
        for block in blocks[1:]:
            wanted[block] = (blocks[0], blocks[-1], bounds[request], row_tile * rows, end_row)
    assert len(parts) == len(set(parts))
    for block, merge in enumerate(merges[:-1]):
        if block in wanted:
            assert tuple(merge.tolist()[:5]) == wanted[block]
        else:
            assert merge["first"] == -1
    assert (merges["first"][-1], merges["q_begin"][-1]) == (-1, bounds[-1])


def loads_of(plan: VerifyPlan) -> Any:
    """Give what each block has to do, in KV tiles: those that it reads, and its starts on row tiles."""
    start = plan.work.start_tiles
    return np.array(
        [
            sum(int(i["end"] - i["begin"]) + start if i["end"] > i["begin"] else 1 for i in chain if i["request"] >= 0)
            for chain in chains_of(plan)
        ]
    )


def check_balance(plan: VerifyPlan) -> None:
    """No block has much more to do than the mean, of which it has 40 tiles at least, and few have nothing."""
    loads, start = loads_of(plan), plan.work.start_tiles
    ideal = loads.mean()
    if (merges_of(plan)["first"][:-1] >= 0).any():
        if ideal >= 40:
            assert loads.max() <= 1.15 * ideal
        if ideal >= 24:
            # Equal runs of one row tile a block may leave some without, but are no longer than equal pieces for all.
            assert (loads == 0).mean() <= 0.1 or loads.max() <= (1 + 1 / 64) * ideal + start + 1
    else:
        # To merge nothing is worth a start, beside the one that blocks of equal pieces have twice.
        assert loads.max() <= max((1 + 1 / 64) * ideal + 2 * start, 8 + start) + 1


def least_longest(plan: VerifyPlan, q_lens: Any, kv_lens: Any) -> int:
    """Give a load, in KV tiles, that the longest block of any schedule has at least; it is three starts or more.

    A block of load L reads at most L less a start of one row tile, or all of it, and L less two starts of several. Only
    one block reads more than the latter of a row tile that fits one block.
    """
    blocks, start = plan.work.blocks, plan.work.start_tiles
    tiles = np.array([n for _, n in expected_row_tiles(plan, q_lens, kv_lens)])
    for load in itertools.count(3 * start):
        is_long = tiles > load - start
        shorts = np.concatenate([tiles[~is_long], np.zeros(blocks, int)]).clip(min=load - 2 * start)
        of_shorts = np.concatenate([[0], np.cumsum(np.sort(shorts)[::-1][:blocks])])
        of_longs = np.minimum(np.arange(blocks + 1) * (load - start), tiles[is_long].sum())
        if (of_longs + of_shorts[::-1]).max() >= tiles.sum():
            return load
    raise AssertionError


def schedule(plan: VerifyPlan, q_lens: Any, kv_lens: Any) -> None:
    """Make a schedule for requests whose KV nobody reads: no page table is that long."""
    plan.update(
        kv_lens=np.array(kv_lens, np.int32),
        qo_indptr=np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
        block_table=np.zeros((len(kv_lens), 1), np.int32),
    )


def schedules(heads: int, tiles: Any, *, max_batch: int = 64, max_q_len: int = 16, mask: str = "causal") -> VerifyPlan:
    return VerifyPlan(
        num_heads=heads, max_batch=max_batch, max_q_len=max_q_len, max_kv_len=262_144, sm_scale=SCALE, mask=mask,
        block_table=True, copy_ids=False, tiles=tiles, num_sms=132, budget="sm_90",
    )  # fmt: skip


log_uniform = st.floats(np.log(128), np.log(200_000)).map(lambda x: int(np.exp(x)))
lengths = st.one_of(
    st.lists(log_uniform, min_size=1, max_size=64),
    st.builds(lambda n, length: [length] * n, st.integers(1, 64), log_uniform),
    st.builds(lambda n, length: [length] + [512] * n, st.integers(1, 63), log_uniform),
    st.lists(st.integers(128, 4000), min_size=16, max_size=64),
)


@pytest.mark.parametrize("tiles", [NARROW, NARROW_PAIR, ROWS_32, ROWS_64], ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)  # the next test has what a lucky draw finds
@given(kv_lens=lengths, q_len=st.sampled_from([1, 2, 8, 16]), heads=st.sampled_from([8, 16]))
@example([100_000] + [512] * 47, 8, 8)
@example([4096] * 47, 8, 8)
@example([800] * 50, 4, 16)
@example([131_072], 1, 8)
def test_the_work_of_long_contexts_is_spread_evenly(tiles: Any, kv_lens: list[int], q_len: int, heads: int) -> None:
    plan = schedules(heads, tiles)
    q_lens = [q_len] * len(kv_lens)
    schedule(plan, q_lens, kv_lens)
    check_schedule(plan, q_lens, kv_lens)
    check_balance(plan)


ONE_LONG = [
    (NARROW, 3827, 26), (NARROW, 2500, 28), (NARROW_PAIR, 9000, 52), (NARROW_PAIR, 3827, 60), (NARROW_PAIR, 2500, 62)
]  # fmt: skip


@pytest.mark.parametrize(("tiles", "length", "others"), ONE_LONG)
def test_one_long_request_beside_equal_ones_has_the_least_longest_block(tiles: Any, length: int, others: int) -> None:
    plan, q_lens, kv_lens = schedules(8, tiles), [8] * (1 + others), [length] + [512] * others
    schedule(plan, q_lens, kv_lens)
    check_schedule(plan, q_lens, kv_lens)
    assert loads_of(plan).max() == least_longest(plan, q_lens, kv_lens)


@pytest.mark.parametrize("tiles", [NARROW, ROWS_64], ids=str)
@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 16), st.one_of(st.integers(0, 40), st.integers(0, 3000))), min_size=1, max_size=64
    ),
    heads=st.sampled_from([1, 5, 8, 20]),
    mask=st.sampled_from(["causal", "none"]),
)
def test_ragged_lengths_are_covered_once(tiles: Any, requests: list[tuple[int, int]], heads: int, mask: str) -> None:
    plan = schedules(heads, tiles, mask=mask)
    q_lens, kv_lens = zip(*requests, strict=True)
    schedule(plan, q_lens, kv_lens)
    check_schedule(plan, q_lens, kv_lens)
    check_balance(plan)


@pytest.mark.parametrize("tiles", [NARROW, ROWS_64], ids=str)
@pytest.mark.parametrize("kv_len", [16, 500, 3000])
def test_five_hundred_and_twelve_short_requests(kv_len: int, tiles: Any) -> None:
    kv_lens = np.random.default_rng(kv_len).integers(kv_len // 2, kv_len + 1, 512)
    plan = schedules(8, tiles, max_batch=512, max_q_len=4)
    schedule(plan, [4] * 512, kv_lens)
    check_schedule(plan, [4] * 512, kv_lens)
    check_balance(plan)


@pytest.mark.parametrize("tiles", [NARROW, ROWS_64], ids=str)
@pytest.mark.parametrize("kv_lens", [(1024, 70_000, 5000), (1500,)])
def test_a_thousand_query_tokens(kv_lens: tuple[int, ...], tiles: Any) -> None:
    plan = schedules(8, tiles, max_batch=3, max_q_len=1024)
    assert plan.work.row_tiles == 8192 // tiles.rows
    q_lens = [1024] * len(kv_lens)
    schedule(plan, q_lens, kv_lens)
    check_schedule(plan, q_lens, kv_lens)
    check_balance(plan)


@pytest.mark.parametrize(("tiles", "heads", "kv_len"), [(NARROW, 8, 177), (NARROW, 8, 195), (NARROW_PAIR, 16, 183)])
def test_equal_numbers_of_whole_row_tiles_are_not_cut(tiles: Any, heads: int, kv_len: int) -> None:
    """Equal pieces of the axis would drift, as later row tiles see a tile more, and cut most of them."""
    plan, q_lens, kv_lens = schedules(heads, tiles), [8] * 64, [kv_len] * 64
    schedule(plan, q_lens, kv_lens)
    check_schedule(plan, q_lens, kv_lens)
    assert (merges_of(plan)["first"] == -1).all()
    loads = loads_of(plan)
    assert loads.max() - loads.min() <= 2


def test_blocks_are_whole_groups_of_row_tiles() -> None:
    """Row tiles of one request run in step, so that they share what they read."""
    plan = schedules(8, ROWS_64, max_q_len=64)
    assert (plan.work.row_tiles, plan.work.blocks) == (8, 128)
    schedule(plan, [64], [100_000])
    chains = chains_of(plan)
    begins = [{int(chain[0]["begin"]) for chain in chains[first::16]} for first in range(16)]
    assert max(max(own) - min(own) for own in begins) <= 16


def test_more_blocks_than_the_list_has_room_for_are_not_used() -> None:
    plan = VerifyPlan(
        num_heads=8, max_batch=1, max_q_len=1, max_kv_len=64, sm_scale=SCALE, num_sms=2000, tiles=NARROW_PAIR
    )
    assert plan.work.blocks == 1024


def test_the_cost_model_chooses_the_row_tile() -> None:
    rows = {
        q_len: VerifyPlan(
            num_heads=8, max_batch=4, max_q_len=q_len, max_kv_len=32_768, sm_scale=SCALE, num_sms=132
        ).work.config.rows
        for q_len in (1, 2, 4, 8, 64)
    }
    assert rows == {1: 16, 2: 16, 4: 32, 8: 64, 64: 64}


def test_of_a_graph_captured_with_short_requests_long_ones_use_all_blocks() -> None:
    """B6: nothing of the schedule is fixed by the lengths that it was first made for."""
    plan = schedules(8, NARROW)
    schedule(plan, [1] * 4, [1] * 4)
    assert (loads_of(plan) > 0).sum() == 4
    schedule(plan, [1] * 4, [131_072] * 4)
    check_schedule(plan, [1] * 4, [131_072] * 4)
    assert (loads_of(plan) > 0).all()


# --- builds --------------------------------------------------------------------------------------------------------

CAPACITY: dict[str, Any] = {"num_heads": 8, "max_batch": 4, "max_q_len": 9, "max_kv_len": 512, "sm_scale": SCALE}


@pytest.mark.parametrize(
    "features",
    [{}, pytest.param({"new_kv": True, "split_kv": True, "logit_cap": 3.0}, marks=pytest.mark.slow)],
    ids=str,
)
def test_the_kernels_compile_without_spills(features: Any, tiles: Any) -> None:
    device = Device.for_arch("sm_120")
    capacity = check_capacity(**CAPACITY, mask="tree", **features)
    work = choose_work(capacity, device, tiles)
    for launch in (plan_launch(work), *run_launches(capacity, work)):
        compiled = compile_kernel(launch.kernel, launch.defines, "sm_120")
        assert (compiled.spill_bytes, compiled.stack_bytes, compiled.static_shared_bytes) == (0, 0, 0), compiled.log


@pytest.mark.parametrize(("kernel", "shared_bytes"), [("plan", 128), ("combine_planned", 8256)])
def test_shared_memory_is_what_the_kernels_use(kernel: str, shared_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen bytes less are out of bounds."""

    def run_with_less(name: str, defines: Any, grid: Any, block: int, shared: int, *rest: Any, **options: Any) -> Any:
        if name == kernel:
            assert shared == shared_bytes
            shared -= 16
        return run_kernel(name, defines, grid, block, shared, *rest, **options)

    several_items_and_many_parts(ROWS_64, 0)
    monkeypatch.setattr("mlaflash.emulator.plan.run_kernel", run_with_less)
    with pytest.raises(EmulatorError, match="bounds"):
        several_items_and_many_parts(ROWS_64, 0)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"q_dtype": "float32"},
            UnsupportedError,
            "q_dtype is 'float32'; .* take bfloat16 and float16. Call mla_verify",
        ),
        ({"q_dtype": "int8"}, UnsupportedError, "q_dtype is 'int8'; allowed are"),
        ({"kv_dtype": "float16"}, UnsupportedError, "kv_dtype is 'float16' and q_dtype 'bfloat16'; allowed are"),
        ({"out_dtype": "float64"}, UnsupportedError, "out_dtype is 'float64'; allowed are"),
        (
            {"mask": "chain"},
            InvalidArgumentError,
            "mask is 'chain'; a plan is made for one of 'none', 'causal', 'tree'",
        ),
        ({"mask": None}, InvalidArgumentError, "mask is None; a plan is made for one of"),
        ({"mask": "tree", "max_q_len": 1025}, UnsupportedError, "max_q_len is 1025; a tree mask has at most 1024"),
        ({"id_dtype": "uint32"}, InvalidArgumentError, "id_dtype is 'uint32'; allowed are int32 and int64"),
        ({"id_dtype": np.int16}, InvalidArgumentError, "id_dtype is .*int16.*; allowed are int32 and int64"),
        *(
            ({name: value}, InvalidArgumentError, rf"{name} is {value!r}; it must be an integer of at least 1")
            for name in ("num_heads", "max_batch", "max_q_len", "max_kv_len", "page_size", "max_tokens", "max_ids")
            for value in (0, 1.5)
        ),
        ({"lse_base": "10"}, InvalidArgumentError, "lse_base is '10'"),
        ({"sm_scale": np.inf}, InvalidArgumentError, "sm_scale is inf; it must be a finite number"),
        ({"sm_scale": None}, InvalidArgumentError, "sm_scale is None; it must be a finite number"),
        ({"logit_cap": -1.0}, InvalidArgumentError, "logit_cap is -1.0; it must be at least"),
        (
            {"tiles": TileConfig()},
            InvalidArgumentError,
            "tiles is TileConfig.*; a plan takes MmaNarrowConfig, MmaWideConfig",
        ),
        ({"tiles": MmaNarrowConfig(2, 3, 2)}, TileError, "101376|101,376"),
        (
            {"workspace": np.zeros(10, np.uint8)},
            ShapeError,
            r"workspace is uint8 \(10,\); [0-9]+ bytes on 256 are needed",
        ),
        ({"workspace": [0]}, ShapeError, "workspace is a .*list"),
    ],
)
def test_a_plan_that_cannot_be_made(wrong: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        VerifyPlan(**(CAPACITY | wrong))


def test_sm_scale_has_no_default() -> None:
    with pytest.raises(TypeError, match="sm_scale"):
        VerifyPlan(num_heads=8, max_batch=4, max_q_len=9, max_kv_len=512)


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


STEP: dict[str, Any] = {
    "kv_lens": int32(20, 30),
    "qo_indptr": int32(0, 1, 3),
    "kv_indptr": int32(0, 20, 50),
    "kv_indices": np.arange(50, dtype=np.int32),
}
TABLE: dict[str, Any] = {
    "kv_lens": int32(20, 30),
    "qo_indptr": int32(0, 1, 3),
    "block_table": np.zeros((2, 40), np.int32),
}
WORDS = TreeMask.from_dense([np.ones((1, 1), bool), np.ones((2, 2), bool)])
IDS = "the plan was made with block_table=False and takes kv_indptr and kv_indices"


@pytest.mark.parametrize(
    ("made", "given", "error", "message"),
    [
        ({}, STEP | {"kv_lens": np.zeros(5, np.int32)}, ShapeError, "kv_lens has 5 requests; the plan was made for 4"),
        ({}, STEP | {"kv_lens": np.zeros(2, np.int64)}, ShapeError, "kv_lens is int64; allowed: int32"),
        ({}, STEP | {"kv_lens": np.zeros((2, 1), np.int32)}, ShapeError, r"kv_lens has shape \(2, 1\)"),
        ({}, STEP | {"kv_lens": [20, 30]}, ShapeError, "kv_lens is a .*list"),
        ({}, STEP | {"qo_indptr": int32(0, 1)}, ShapeError, r"qo_indptr has shape \(2,\); it must have shape \(3,\)"),
        ({}, STEP | {"q_len": 10}, InvalidArgumentError, "q_len is 10; the plan was made for 9 at most"),
        ({}, STEP | {"q_len": -1}, InvalidArgumentError, "q_len is -1; it must be an integer of at least 0"),
        (
            {},
            STEP | {"tail_lens": int32(1, 1)},
            InvalidArgumentError,
            "tail_lens is given and the plan's mask is 'causal'",
        ),
        ({}, STEP | {"kv_indptr": None}, InvalidArgumentError, f"given: kv_indices; {IDS}"),
        ({}, STEP | {"kv_indices": None}, InvalidArgumentError, f"given: kv_indptr; {IDS}"),
        ({}, {"kv_lens": int32(1)}, InvalidArgumentError, f"given: none of them; {IDS}"),
        ({}, TABLE, InvalidArgumentError, f"given: block_table; {IDS}"),
        ({"block_table": True}, STEP, InvalidArgumentError, "given: kv_indptr, kv_indices; .*takes block_table"),
        ({}, STEP | TABLE, InvalidArgumentError, f"given: kv_indptr, kv_indices, block_table; {IDS}"),
        ({}, STEP | {"kv_indices": np.zeros(50, np.int64)}, ShapeError, "kv_indices is int64; allowed: int32"),
        ({"id_dtype": "int64"}, STEP, ShapeError, "kv_indices is int32; allowed: int64"),
        ({}, STEP | {"kv_indptr": np.zeros(3, np.uint32)}, ShapeError, "kv_indptr is uint32; allowed: int32 or int64"),
        ({}, STEP | {"kv_indptr": int32(0, 20)}, ShapeError, r"kv_indptr has shape \(2,\)"),
        ({"max_ids": 49}, STEP, ShapeError, "kv_indices has 50 ids; the plan was made for 49 at most"),
        (
            {"block_table": True},
            TABLE | {"block_table": np.zeros((3, 40), np.int32)},
            ShapeError,
            "it must be int32 with 2 rows",
        ),
        (
            {"block_table": True},
            TABLE | {"block_table": np.zeros(40, np.int32)},
            ShapeError,
            r"int32 \(40,\); it must be",
        ),
        (
            {"block_table": True},
            TABLE | {"block_table": np.zeros((2, 40), np.int64)},
            ShapeError,
            "int64 .* must be int32",
        ),
        (
            {"block_table": True},
            TABLE | {"block_table": np.zeros((2, 80), np.int32)[:, ::2]},
            ShapeError,
            "must be contiguous",
        ),
        (
            {"block_table": True},
            TABLE | {"block_table": np.zeros((2, 40), np.int32)[::-1]},
            ShapeError,
            "rows at least 40 apart",
        ),
        (
            {"block_table": True},
            TABLE | {"block_table": np.broadcast_to(int32(*range(40)), (2, 40))},
            ShapeError,
            "at least 40 apart",
        ),
        (
            {"block_table": True, "copy_ids": False},
            TABLE | {"block_table": np.zeros((2, 40), np.int32)[::-1]},
            ShapeError,
            "at least 0 apart",
        ),
        ({}, STEP | {"mask": "causal"}, InvalidArgumentError, "mask is 'causal'; a plan with mask='causal' takes none"),
        (
            {},
            STEP | {"mask": WORDS},
            InvalidArgumentError,
            "mask is a TreeMask and the plan's is 'causal', fixed when it was",
        ),
        (
            {},
            STEP | {"mask": MaskSource.from_packed(WORDS.words)},
            InvalidArgumentError,
            "mask is a MaskSource and the plan's",
        ),
        (
            {"mask": "none"},
            STEP | {"mask": np.zeros(3, bool)},
            InvalidArgumentError,
            "mask is ndarray; a plan with mask='none' takes none",
        ),
        (
            {"mask": "tree"},
            STEP,
            InvalidArgumentError,
            "mask is None; a plan with mask='tree' takes a TreeMask or a MaskSource",
        ),
        (
            {"mask": "tree"},
            STEP | {"mask": "tree"},
            InvalidArgumentError,
            "mask is 'tree'; a plan with mask='tree' takes a",
        ),
        ({"mask": "tree"}, STEP | {"mask": WORDS, "tail_lens": int32(1)}, ShapeError, r"tail_lens has shape \(1,\)"),
        (
            {"mask": "tree"},
            STEP | {"mask": WORDS, "qo_indptr": None, "q_len": 2},
            ShapeError,
            "words has 3 rows; these requests need 4",
        ),
        (
            {"mask": "tree", "max_tokens": 3},
            STEP | {"mask": WORDS, "qo_indptr": None, "q_len": 2},
            InvalidArgumentError,
            "2 requests of 2",
        ),
    ],
)
def test_an_update_that_is_refused(made: Any, given: Any, error: Any, message: str) -> None:
    plan = VerifyPlan(**(CAPACITY | made))
    with pytest.raises(error, match=message):
        plan.update(**given)
    assert plan.reports == []


@pytest.mark.parametrize(
    ("made", "given", "message"),
    [
        ({}, {"qo_indptr": int32(1, 1, 3)}, r"qo_indptr is \[1, 1, 3\].*begin with 0, never fall"),
        ({}, {"qo_indptr": int32(0, 3, 2)}, r"qo_indptr is \[0, 3, 2\].*begin with 0, never fall"),
        ({"max_tokens": 2}, {}, "end at or below the plan's 2 query tokens"),
        ({}, {"qo_indptr": int32(0, 10, 10)}, r"q_len of request 0 is 10; the plan was made for 0 \.\. 9"),
        ({}, {"kv_lens": int32(20, 513)}, r"kv_len of request 1 is 513; the plan was made for 0 \.\. 512"),
        ({}, {"kv_lens": int32(-1, 20)}, r"kv_len of request 0 is -1; the plan was made for 0 \.\. 512"),
        ({}, {"kv_lens": int32(20, 31)}, r"kv_lens\[1\] leaves 31 tokens to the cache"),
        ({}, {"kv_indptr": int32(0, 20, 51)}, r"kv_indptr is \[0, 20, 51\]"),
        ({}, {"kv_indices": np.arange(-1, 49, dtype=np.int32)}, "page 0 of request 0 has id -1; none is negative"),
    ],
)
def test_values_that_validation_refuses(made: Any, given: Any, message: str) -> None:
    plan = VerifyPlan(**(CAPACITY | made))
    with pytest.raises(InvalidArgumentError, match=message):
        plan.update(**(STEP | given), validate=True)
    assert plan.reports == []


def test_new_tokens_need_no_page() -> None:
    plan = VerifyPlan(**CAPACITY, new_kv=True)
    plan.update(**(STEP | {"kv_lens": int32(21, 32)}), validate=True)
    with pytest.raises(InvalidArgumentError, match=r"kv_lens\[1\] leaves 31 tokens to the cache"):
        plan.update(**(STEP | {"kv_lens": int32(21, 33)}), validate=True)


def rows(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> Any:
    return np.zeros((*shape, 576), dtype)


MISALIGNED = np.zeros((3, 8, 577), ml_dtypes.bfloat16)[..., 1:]
PAIR = np.zeros((50, 512), ml_dtypes.bfloat16), np.zeros((50, 64), ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("made", "given", "error", "message"),
    [
        ({}, {"q": rows(3, 8, dtype=np.float16)}, ShapeError, "both must have the same element type"),
        ({}, {"q": rows(3, 4)}, ShapeError, "q is bfloat16 with 4 heads; the plan was made for bfloat16 with 8"),
        ({}, {"q": np.zeros((3, 8, 512), ml_dtypes.bfloat16)}, ShapeError, "512 wide; its last axis must be 576"),
        ({}, {"q": rows(3, 8)[None, None]}, ShapeError, "rank 5"),
        ({}, {"q": MISALIGNED}, UnsupportedError, "a plan does not take these arrays: .* 16 bytes.* Call mla_verify"),
        (
            {},
            {"q": rows(3, 8, dtype=np.float16), "kv_cache": rows(50, dtype=np.float16)},
            ShapeError,
            "q is float16 with 8",
        ),
        ({}, {"kv_cache": rows(4, 16)}, ShapeError, r"page_size is 1 and kv_cache has shape \(4, 16, 576\)"),
        ({}, {"kv_cache": PAIR}, InvalidArgumentError, "lie apart; make the plan with split_kv=True"),
        ({}, {"new_kv": rows(3)}, InvalidArgumentError, "new_kv is given; the plan was made with new_kv=False"),
        ({"new_kv": True}, {}, InvalidArgumentError, "new_kv is missing; the plan was made with new_kv=True"),
        ({"new_kv": True}, {"new_kv": rows(2)}, ShapeError, "new_kv has 2 rows"),
        ({}, {"out": np.zeros((3, 8, 512), np.float16)}, ShapeError, "out is float16"),
        (
            {},
            {"out": np.zeros((2, 8, 512), ml_dtypes.bfloat16)},
            ShapeError,
            r"out is bfloat16 \(2, 8, 512\); it must be bfloat16 \(3",
        ),
        ({}, {"lse": np.zeros((3, 8), np.float16)}, ShapeError, "lse is float16"),
        (
            {"mask": "tree", "max_tokens": 3},
            {"q": rows(4, 8)},
            ShapeError,
            "q has 4 query tokens; the plan was made for 3",
        ),
    ],
)
def test_a_run_that_is_refused(made: Any, given: Any, error: Any, message: str) -> None:
    plan = VerifyPlan(**(CAPACITY | made))
    plan.update(**STEP, mask=WORDS if made.get("mask") == "tree" else None)
    plan.reports.clear()
    with pytest.raises(error, match=message):
        plan.run(**({"q": rows(3, 8), "kv_cache": rows(50)} | given))
    assert plan.reports == []


@pytest.mark.parametrize("kernel", ["plan", None, "naive"])
def test_c11_rows_without_rope_columns_are_refused_by_name(kernel: str | None) -> None:
    q, cache = np.zeros((3, 8, 512), ml_dtypes.bfloat16), np.zeros((50, 512), ml_dtypes.bfloat16)
    message = r"512 wide; its last axis must be 576: only MLA rows of 512 latent \+ 64 rope columns"
    if kernel == "plan":
        plan = VerifyPlan(**CAPACITY)
        plan.update(**STEP)
        for arrays in ((q, rows(50)), (rows(3, 8), cache)):
            with pytest.raises(ShapeError, match=message):
                plan.run(*arrays)
    else:
        for arrays in ((q, rows(50)), (rows(3, 8), cache)):
            with pytest.raises(ShapeError, match=message):
                mla_verify(*arrays, **STEP, sm_scale=SCALE, kernel=kernel)


def test_g8_what_a_layout_was_accepted_for_is_asked_of_each_address() -> None:
    plan = VerifyPlan(**CAPACITY)
    plan.update(**STEP)
    room = np.zeros(3 * 8 * 576 + 64, ml_dtypes.bfloat16)
    begin = -room.ctypes.data // 2 % 8
    q = room[begin : begin + 3 * 8 * 576].reshape(3, 8, 576)
    plan.run(q, rows(50))
    with pytest.raises(UnsupportedError, match="16 bytes"):
        plan.run(room[begin + 1 : begin + 1 + q.size].reshape(q.shape), rows(50))
    out = np.zeros((3, 8, 512), ml_dtypes.bfloat16)
    plan.run(q, rows(50), out=out)
    out.flags.writeable = False
    with pytest.raises(ShapeError, match="out is read-only"):
        plan.run(q, rows(50), out=out)


def test_f9_d10_a_mask_is_never_ignored() -> None:
    """The kind of mask is fixed when the plan is made: neither a stale one nor none at all can be taken for another."""
    plan = VerifyPlan(**CAPACITY, mask="tree")
    with pytest.raises(InvalidArgumentError, match="takes a TreeMask or a MaskSource"):
        plan.update(**STEP)
    with pytest.raises(InvalidArgumentError, match="call update"):
        plan.run(rows(3, 8), rows(50))


def test_fresh_results_are_handed_over_in_the_library_of_q(monkeypatch: pytest.MonkeyPatch) -> None:
    own = EmulatorBackend.results

    def results(*arguments: Any) -> tuple[Any, Any, Any]:
        out, lse, _ = own(*arguments)
        return out, lse, lambda array: ("theirs", array)

    monkeypatch.setattr(EmulatorBackend, "results", results)
    plan = VerifyPlan(**CAPACITY)
    plan.update(**STEP)
    q, cache = np.zeros((3, 8, 576), ml_dtypes.bfloat16), rows(50)
    fresh_out, fresh_lse = plan.run(q, cache)
    assert fresh_out[0] == fresh_lse[0] == "theirs"
    given = np.full((3, 8, 512), np.nan, ml_dtypes.bfloat16)
    out, fresh_lse = plan.run(q, cache, out=given)
    assert out is given
    assert fresh_lse[0] == "theirs"
    assert np.array_equal(given, fresh_out[1])


def test_run_needs_an_update() -> None:
    plan = VerifyPlan(**CAPACITY)
    with pytest.raises(InvalidArgumentError, match=r"run\(\) has nothing to do: call update\(\) first"):
        plan.run(rows(3, 8), rows(50))


def test_after_a_refused_update_the_one_before_is_in_force() -> None:
    case = replace(BASE, mask="tree")
    arguments = build(case, 34)
    plan = make(case)
    expected = step(plan, arguments)
    ids = np.zeros_like(arguments["kv_indices"])
    for wrong in ({"mask": "tree"}, {"mask": MaskSource.from_dense(np.zeros((1, 1, 1), bool))}, {"kv_lens": ids}):
        with pytest.raises((InvalidArgumentError, ShapeError)):
            plan.update(**({name: arguments[name] for name in ("kv_lens", "qo_indptr", "kv_indptr", "mask")}
                           | {"kv_indices": ids} | wrong))  # fmt: skip
        assert_same(run(plan, arguments), expected)


# --- barriers ------------------------------------------------------------------------------------------------------

# Statements that the schedule adds and that do nothing but order others, with a problem that needs them.
BETWEEN_ITEMS = r"block_sync\(\);(?= +// orders this item's reads)"
STATEMENTS = {
    "mma_narrow": BETWEEN_ITEMS,
    "mma_wide": rf"{BETWEEN_ITEMS}|retire_barriers\(shared_base\(\)\);",
    "mma_roles": r"roles_sync\(1\);(?= +// orders this item's reads)|(?<=GROUPS == 1\) )retire_barriers\(smem\);",
    "plan": r"block_sync\(\);",
    "combine_planned": r"block_sync\(\);",
}
SOURCES = {name: (sources.kernel_root() / f"{name}.cu").read_text() for name in STATEMENTS}
ORDERINGS = [
    (name, match.span()) for name, pattern in STATEMENTS.items() for match in re.finditer(pattern, SOURCES[name])
]
# wait_prerequisites() and launch_dependents() are not among them: in the emulator a launch begins when the one before
# has ended. Nor is this one noticed, which place_spans() makes superfluous where block_min() is used now:
UNNOTICED = "block_sync();  // orders the reads of the last scan before the writes below"
EMPTY = "/* removed */"


def test_all_orderings_are_found() -> None:
    found = {"mma_narrow": 1, "mma_wide": 2, "mma_roles": 2, "plan": 6, "combine_planned": 2}
    assert Counter(name for name, _ in ORDERINGS) == found
    assert SOURCES["plan"].count(UNNOTICED) == 1


def is_unnoticed(name: str, span: tuple[int, int]) -> bool:
    return name == "plan" and SOURCES[name].startswith(UNNOTICED, span[0])


@pytest.mark.parametrize(
    ("name", "span"),
    [
        pytest.param(*ordering, id=f"{ordering[0]}@{ordering[1][0]}")
        for ordering in ORDERINGS
        if not is_unnoticed(*ordering)
    ],
)
def test_an_ordering_that_is_removed_is_noticed(
    name: str, span: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(sources.kernel_root(), tmp_path / "kernels"))
    (folder / f"{name}.cu").write_text(SOURCES[name][: span[0]] + f"{EMPTY};" + SOURCES[name][span[1] :])

    def run_changed(kernel: str, *rest: Any, **options: Any) -> Any:
        return run_kernel(folder / f"{kernel}.cu" if kernel == name else kernel, *rest, **options)

    monkeypatch.setattr("mlaflash.emulator.plan.run_kernel", run_changed)
    check_step: Callable[..., None] = schedules_of_two_kinds if name == "plan" else several_items_and_many_parts

    def is_noticed(seed: int) -> bool:
        try:
            check_step({"mma_narrow": NARROW, "mma_roles": ROWS_64_ROLES}.get(name, ROWS_64), seed)
        except (EmulatorError, AssertionError):
            return True
        return False

    assert any(is_noticed(seed) for seed in range(10))


def several_items_and_many_parts(tiles: Any, seed: int) -> None:
    """Blocks with several items, and a row tile in so many parts that warps share items of the merge, one by one."""
    case = replace(BASE, q_lens=(8, 1, 2, 1), kv_lens=(1100, 40, 33, 60))
    for num_sms in (8, 2):
        check(case, 35, tiles=tiles, out_dtype="float32", num_sms=num_sms, seed=seed)


def schedules_of_two_kinds(tiles: Any, seed: int) -> None:
    """More row tiles than threads, many to a block; and row tiles of one length, which are cut into runs."""
    for q_lens, kv_lens in (([1] * 600, [20, 700, 90] * 200), ([1] * 4, [4000] * 4)):
        plan = VerifyPlan(
            num_heads=8, max_batch=len(q_lens), max_q_len=1, max_kv_len=4096, sm_scale=SCALE, block_table=True,
            copy_ids=False, tiles=tiles, num_sms=40, seed=seed,
        )  # fmt: skip
        schedule(plan, q_lens, kv_lens)
        check_schedule(plan, q_lens, kv_lens)


def test_q_must_hold_what_update_planned_without_qo_indptr() -> None:
    arguments = build(replace(BASE, q_lens=(4, 4), kv_lens=(40, 33)), 3)
    plan = make(replace(BASE, q_lens=(9, 9), kv_lens=(64, 64)), max_ids=200)
    given = {name: arguments[name] for name in ("kv_lens", "kv_indptr", "kv_indices")}
    plan.update(**given)
    for q in (arguments["q"], arguments["q"].reshape(2, 4, *arguments["q"].shape[1:])):
        with pytest.raises(ShapeError, match="planned 2 requests of 9 query tokens"):
            plan.run(q, arguments["kv_cache"])
    plan.update(**given, q_len=4)
    expect(plan.run(arguments["q"], arguments["kv_cache"]), arguments)


def test_q_that_is_no_array_is_refused() -> None:
    arguments = build(BASE, 3)
    plan = make(BASE)
    plan.update(**{name: arguments[name] for name in ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices")})
    with pytest.raises(ShapeError, match="q is a"):
        plan.run(None, arguments["kv_cache"])
