"""Every kernel on the emulator against the oracle: masks, raggedness, addressing, poison."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from verify_cases import BASE, CASES, SCALE, assert_same, config_id, configs, mma_configs, run_and_compare

from mlaflash import TreeMask, oracle
from mlaflash.emulator import mla_verify, run_kernel
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.mma_tiles import NARROW
from mlaflash.tiles import KernelConfig, NaiveConfig, TileConfig, tile_candidates

CONFIGS = list(configs())
SPLIT = TileConfig(nsplit=3)


@pytest.mark.parametrize("config", [*CONFIGS, *mma_configs()], ids=config_id)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_oracle(case: Case, config: KernelConfig) -> None:
    run_and_compare(mla_verify, case, config, seed=1)


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_order_of_threads_does_not_matter(dtype: str, config: KernelConfig) -> None:
    arguments = build(replace(BASE, mask="tree", dtype=dtype), 2)
    results = [mla_verify(**arguments, kernel=config.kernel, tiles=config, seed=seed) for seed in range(8)]
    for result in results[1:]:
        assert_same(results[0], result)


@pytest.mark.slow
@pytest.mark.parametrize("config", [c for c in tile_candidates() if c.shared_bytes() <= 232_448], ids=config_id)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tile_agrees(dtype: str, config: TileConfig) -> None:
    budget = "sm_120" if config.shared_bytes() <= 101_376 else "sm_90"
    case = replace(BASE, heads=20, q_lens=(2, 1), kv_lens=(75, 130), mask="tree", dtype=dtype)
    run_and_compare(mla_verify, case, replace(config, nsplit=2), seed=3, budget=budget)


@pytest.mark.parametrize("config", [NaiveConfig(), TileConfig(nsplit=1), SPLIT], ids=config_id)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unaligned_rows_take_the_scalar_path(dtype: str, config: KernelConfig) -> None:
    case = replace(BASE, dtype=dtype)
    arguments = build(case, 4)
    shifted = {}
    for name in ("q", "kv_cache"):
        source = arguments[name]
        padded = np.full((*source.shape[:-1], 577), np.nan, source.dtype)
        padded[..., 1:] = source
        shifted[name] = padded[..., 1:]
    expected = oracle.mla_verify(**arguments)
    actual = mla_verify(**(arguments | shifted), kernel=config.kernel, tiles=config)
    result = compare(*actual, *expected, tolerance(dtype, dtype))
    assert result.passed, result.reason


def test_a6_more_splits_than_tokens() -> None:
    arguments = build(replace(BASE, q_lens=(2,), kv_lens=(5,)), 5)
    whole = mla_verify(**arguments, tiles=TileConfig(nsplit=1))
    split = mla_verify(**arguments, tiles=TileConfig(nsplit=64))
    np.testing.assert_allclose(split[0], whole[0], rtol=1e-6)
    np.testing.assert_allclose(split[1], whole[1], rtol=1e-6)


def test_b1_splits_do_not_move_the_lse() -> None:
    arguments = build(replace(BASE, q_lens=(3,), kv_lens=(200,)), 6)
    one, *others = (mla_verify(**arguments, tiles=TileConfig(nsplit=n))[1] for n in (1, 2, 16, 64))
    for lse in others:
        np.testing.assert_allclose(lse, one, atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_a9_padded_query_tokens_are_zero(config: KernelConfig) -> None:
    arguments = build(BASE, 7)
    q = np.concatenate([arguments["q"], np.full((4, 8, 576), np.nan, np.float32)])
    out, lse = mla_verify(**(arguments | {"q": q}), kernel=config.kernel, tiles=config)
    assert (out[8:] == 0).all()
    assert np.isneginf(lse[8:]).all()
    assert np.isfinite(np.abs(out).max())
    assert_same((out[:8], lse[:8]), mla_verify(**arguments, kernel=config.kernel, tiles=config))


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a12_bits_that_nobody_sees_change_nothing(poison: float, config: KernelConfig) -> None:
    arguments = build(replace(BASE, mask="tree", page_size=64), 8)
    poisoned = arguments["kv_cache"].copy()
    poisoned[np.isnan(poisoned)] = poison
    clean = arguments["kv_cache"].copy()
    clean[np.isnan(clean)] = 0
    results = [
        mla_verify(**(arguments | {"kv_cache": cache}), kernel=config.kernel, tiles=config)
        for cache in (clean, poisoned)
    ]
    assert_same(*results)


@pytest.mark.parametrize("config", [NaiveConfig(), TileConfig(nsplit=1)], ids=config_id)
def test_a12_a_column_masked_for_one_row_alone_does_not_reach_it(config: KernelConfig) -> None:
    arguments = build(replace(BASE, q_lens=(3,), kv_lens=(20,), mask="none", addressing="dense"), 9)
    arguments["mask"] = TreeMask.from_dense([np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)])
    clean = mla_verify(**arguments, kernel=config.kernel, tiles=config)
    arguments["kv_cache"][0, 18] = np.inf  # token 1 of the draft, which draft token 1 alone sees
    out, lse = mla_verify(**arguments, kernel=config.kernel, tiles=config)
    assert_same((out[[0, 2]], lse[[0, 2]]), (clean[0][[0, 2]], clean[1][[0, 2]]))
    assert not np.isfinite(out[1]).all()


@pytest.mark.parametrize("config", [NaiveConfig(), TileConfig(nsplit=1), SPLIT], ids=config_id)
def test_nan_that_a_row_sees_is_not_taken_for_an_empty_row(config: KernelConfig) -> None:
    case = replace(BASE, q_lens=(2,), kv_lens=(50,), mask="none", addressing="dense")
    query, keys, tile = (build(case, 21) for _ in range(3))
    query["q"][1, 3, 5] = np.nan
    keys["kv_cache"][0, :50, 570] = np.nan
    tile["kv_cache"][0, 16:32, 570] = np.nan  # all that the second split of three sees
    for arguments in (query, keys, tile):
        result = compare(
            *mla_verify(**arguments, kernel=config.kernel, tiles=config),
            *oracle.mla_verify(**arguments),
            tolerance("float32", "float32"),
        )
        assert result.passed, result.reason


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("config", [NaiveConfig(), SPLIT], ids=config_id)
def test_one_token_of_each_of_several_in_a_buffer(config: KernelConfig, paired: bool) -> None:
    # The axis of length 1 has a stride that says nothing of the way to the next request.
    arguments = build(replace(BASE, q_lens=(1, 1, 1), kv_lens=(20, 33, 9)), 22)
    del arguments["qo_indptr"]
    expected = oracle.mla_verify(**arguments)
    buffer = np.full((3, 4, 8, 576), np.nan, np.float32)
    buffer[:, :1] = arguments["q"][:, None]
    q = buffer[:, :1]
    arguments["q"] = (q[..., :512], q[..., 512:]) if paired else q
    out, lse = mla_verify(**arguments, kernel=config.kernel, tiles=config)
    assert compare(out[:, 0], lse[:, 0], *expected, tolerance("float32", "float32")).passed


@pytest.mark.parametrize("config", [*CONFIGS, *mma_configs()], ids=config_id)
def test_what_combine_loads_was_written(config: KernelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # More splits than tiles, padding, empty requests: the splits of nothing must leave zeros, not what was there.
    arguments = build(replace(BASE, q_lens=(2, 0, 3), kv_lens=(20, 0, 45), dtype="bfloat16"), 22)
    padding = np.full((4, 8, 576), np.nan, arguments["q"].dtype)
    arguments["q"] = np.concatenate([arguments["q"], padding])
    merged: list[Any] = []

    def spy(kernel: str, *rest: Any, **options: Any) -> Any:
        arrays = rest[-1]
        if kernel == "combine":
            merged.append(arrays["partial_out"].astype(np.float32))
        return run_kernel(kernel, *rest, **options)

    monkeypatch.setattr("mlaflash.emulator.verify.run_kernel", spy)
    tiles = config if isinstance(config, NaiveConfig) else replace(config, nsplit=7)
    mla_verify(**arguments, kernel=config.kernel, tiles=tiles)
    assert len(merged) == (0 if isinstance(config, NaiveConfig) else 1)
    assert all(np.isfinite(partial).all() for partial in merged)


@pytest.mark.parametrize("kernel", [None, "naive", "tile", "mma_narrow", "mma_wide", "mma_roles"])
@pytest.mark.parametrize(
    "bound",
    [{"max_q_len": 0}, {"mask": TreeMask.from_packed(np.zeros((3, 0), np.uint32), 0)}, {}],
    ids=["length", "mask", "unbounded"],
)
def test_requests_without_query_tokens_leave_the_padding_empty(bound: dict[str, Any], kernel: str | None) -> None:
    out, lse = mla_verify(
        np.ones((3, 8, 576), ml_dtypes.bfloat16), np.ones((4, 576), ml_dtypes.bfloat16), sm_scale=SCALE,
        kv_lens=np.array([2], np.int32), kv_indptr=np.array([0, 2], np.int32), kv_indices=np.array([0, 1], np.int32),
        qo_indptr=np.zeros(2, np.int32), kernel=kernel, **bound,
    )  # fmt: skip
    assert (out.astype(np.float32) == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("kernel", [None, "naive", "tile"])
def test_a_batch_of_nothing_but_padding_is_empty(kernel: str | None) -> None:
    none = np.zeros(0, np.int32)
    out, lse = mla_verify(
        np.ones((3, 8, 576), ml_dtypes.bfloat16), np.ones((4, 576), ml_dtypes.bfloat16), sm_scale=SCALE, kv_lens=none,
        kv_indptr=np.zeros(1, np.int32), kv_indices=none, qo_indptr=np.zeros(1, np.int32), kernel=kernel,
    )  # fmt: skip
    assert (out.astype(np.float32) == 0).all()
    assert np.isneginf(lse).all()


def test_a15_nothing_to_do_launches_nothing() -> None:
    reports: list[Any] = []
    cache = np.zeros((4, 576), np.float32)
    empty = np.zeros(0, np.int32)
    no_request = mla_verify(
        np.zeros((0, 8, 576), np.float32), cache, sm_scale=SCALE, kv_lens=empty,
        kv_indptr=np.zeros(1, np.int32), kv_indices=empty, qo_indptr=np.zeros(1, np.int32), reports=reports,
    )  # fmt: skip
    uniform = mla_verify(
        np.zeros((0, 8, 576), np.float32), cache, sm_scale=SCALE, kv_lens=empty,
        block_table=np.zeros((0, 3), np.int32), reports=reports,
    )  # fmt: skip
    for out, lse in (no_request, uniform):
        assert (out.shape, lse.shape) == ((0, 8, 512), (0, 8))
    assert reports == []


@pytest.mark.parametrize("config", [TileConfig(nsplit=1), SPLIT, NaiveConfig()], ids=config_id)
def test_d11_a_chain_is_causal_bitwise(config: KernelConfig) -> None:
    arguments = build(replace(BASE, q_lens=(6, 11), kv_lens=(40, 11)), 10)
    parents = np.concatenate([np.arange(-1, 5), np.arange(-1, 10)]).astype(np.int32)
    chain = TreeMask.from_parents(parents, arguments["qo_indptr"])
    causal = mla_verify(**arguments, kernel=config.kernel, tiles=config)
    assert_same(causal, mla_verify(**(arguments | {"mask": chain}), kernel=config.kernel, tiles=config))


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_d14_a_path_of_the_tree_decodes_like_its_verify_row(config: KernelConfig) -> None:
    arguments = build(replace(BASE, q_lens=(5,), kv_lens=(30,), addressing="dense"), 11)
    parents = np.array([-1, 0, 0, 1, 3], np.int32)
    arguments["mask"] = TreeMask.from_parents(parents)
    out, lse = mla_verify(**arguments, kernel=config.kernel, tiles=config)
    path = [0, 1, 3, 4]
    cache = arguments["kv_cache"][0]
    linear = np.concatenate([cache[:25], cache[25:30][path]])
    path_out, path_lse = mla_verify(
        arguments["q"][path],
        linear,
        sm_scale=SCALE,
        kv_lens=np.array([29], np.int32),
        kernel=config.kernel,
        tiles=config,
    )
    np.testing.assert_allclose(path_out, out[path], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(path_lse, lse[path], rtol=1e-5)


@pytest.mark.parametrize("kernel", ["naive", "tile"])
def test_e1_slots_past_two_to_the_31_elements(kernel: str) -> None:
    # Memory that is never touched costs nothing: 4.4 GB of address space, a few pages of it real.
    slots = np.array([3_728_270, 3_728_271, 3_799_999, 5], np.int32)
    pool = np.empty((3_800_000, 576), ml_dtypes.bfloat16)
    rng = np.random.default_rng(12)
    rows = rng.standard_normal((4, 576), np.float32).astype(ml_dtypes.bfloat16)
    pool[slots] = rows
    q = (0.3 * rng.standard_normal((1, 8, 576), np.float32)).astype(ml_dtypes.bfloat16)
    lens = np.array([4], np.int32)
    out, lse = mla_verify(
        q, pool, sm_scale=SCALE, kv_lens=lens, kv_indptr=np.array([0, 4]), kv_indices=slots, kernel=kernel
    )
    expected = oracle.mla_verify(q, rows, sm_scale=SCALE, kv_lens=lens)
    assert compare(out, lse, *expected, tolerance("bfloat16", "bfloat16")).passed


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_e6_shuffled_slots_equal_contiguous_ones_bitwise(config: KernelConfig) -> None:
    arguments = build(replace(BASE, page_size=1), 13)
    ids, indptr = arguments["kv_indices"], arguments["kv_indptr"]
    slots = np.concatenate([ids[begin : begin + n] for begin, n in zip(indptr, arguments["kv_lens"], strict=False)])
    contiguous = arguments | {
        "kv_cache": arguments["kv_cache"].reshape(-1, 576)[slots],
        "kv_indices": np.arange(slots.size, dtype=np.int32),
        "kv_indptr": np.array([0, *np.cumsum(arguments["kv_lens"])], np.int32),
    }
    assert_same(*(mla_verify(**a, kernel=config.kernel, tiles=config) for a in (arguments, contiguous)))


@pytest.mark.parametrize("page_size", [16, 32, 48, 64])
def test_e9_pages_equal_slots_bitwise(page_size: int) -> None:
    arguments = build(replace(BASE, page_size=page_size), 14)
    token_ids = []
    for begin, kv_len in zip(arguments["kv_indptr"], arguments["kv_lens"], strict=False):
        token = np.arange(kv_len)
        token_ids.append(arguments["kv_indices"][begin + token // page_size] * page_size + token % page_size)
    slots = arguments | {
        "kv_cache": arguments["kv_cache"].reshape(-1, 576),
        "page_size": 1,
        "kv_indices": np.concatenate(token_ids).astype(np.int32),
        "kv_indptr": np.array([0, *np.cumsum(arguments["kv_lens"])], np.int32),
    }
    assert_same(mla_verify(**arguments, tiles=SPLIT), mla_verify(**slots, tiles=SPLIT))


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_e10_wide_ids_equal_narrow_ones_bitwise(config: KernelConfig) -> None:
    arguments = build(BASE, 15)
    narrow = mla_verify(**arguments, kernel=config.kernel, tiles=config)
    for names in (("kv_indices",), ("kv_indptr",), ("kv_indices", "kv_indptr")):
        wide = arguments | {name: arguments[name].astype(np.int64) for name in names}
        assert_same(narrow, mla_verify(**wide, kernel=config.kernel, tiles=config))


@pytest.mark.parametrize("kernel", ["naive", "tile"])
def test_uniform_batches_keep_their_shape_and_fill_the_callers_arrays(kernel: str) -> None:
    arguments = build(replace(BASE, q_lens=(3, 3), kv_lens=(21, 34)), 16)
    del arguments["qo_indptr"]
    flat = mla_verify(**arguments, kernel=kernel)
    q = arguments["q"].reshape(2, 3, 8, 576)
    out = np.full((2, 3, 8, 1024), np.nan, np.float32)[..., 256:768]
    lse = np.full((2, 3, 8), np.nan, np.float32)
    returned = mla_verify(**(arguments | {"q": q}), kernel=kernel, out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    assert_same((out.reshape(6, 8, 512), lse.reshape(6, 8)), flat)


@pytest.mark.parametrize("kernel", ["naive", "tile"])
def test_e7_transposed_and_sliced_queries(kernel: str) -> None:
    arguments = build(BASE, 17)
    q = arguments["q"]
    nope = np.ascontiguousarray(q[..., :512].transpose(1, 0, 2)).transpose(1, 0, 2)
    assert_same(
        mla_verify(**arguments, kernel=kernel), mla_verify(**(arguments | {"q": (nope, q[..., 512:])}), kernel=kernel)
    )


def test_tail_lens_move_the_columns_of_the_mask() -> None:
    # A shard that holds two of the four draft tokens: their columns come first.
    arguments = build(replace(BASE, q_lens=(4,), kv_lens=(22,), mask="none"), 18)
    visible = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]], bool)
    arguments |= {"mask": TreeMask.from_dense([visible]), "tail_lens": np.array([2], np.int32)}
    expected = oracle.mla_verify(**arguments)
    for config in CONFIGS:
        actual = mla_verify(**arguments, kernel=config.kernel, tiles=config)
        assert compare(*actual, *expected, tolerance("float32", "float32")).passed, config


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_out_dtype_is_the_callers(out_dtype: str, config: KernelConfig) -> None:
    arguments = build(replace(BASE, dtype="bfloat16"), 19)
    out, lse = mla_verify(**arguments, kernel=config.kernel, tiles=config, out_dtype=out_dtype)
    assert out.dtype.name == out_dtype
    expected = oracle.mla_verify(**arguments)
    assert compare(out, lse, *expected, tolerance("bfloat16", out_dtype)).passed


@pytest.mark.parametrize("config", [NaiveConfig(), SPLIT, *mma_configs()], ids=config_id)
def test_a_nan_that_a_row_sees_does_not_pass_for_an_empty_row(config: KernelConfig) -> None:
    arguments = build(replace(BASE, q_lens=(1,), kv_lens=(60,), dtype="bfloat16"), 20)
    arguments["q"][0, 3, 5] = np.nan
    out, lse = mla_verify(**arguments, kernel=config.kernel, tiles=config)
    assert np.isnan(out[0, 3].astype(np.float32)).all()
    assert np.isnan(lse[0, 3])


@pytest.mark.parametrize("config", [SPLIT, *mma_configs()], ids=config_id)
def test_a_split_of_nans_is_not_dropped(config: KernelConfig) -> None:
    arguments = build(replace(BASE, q_lens=(1,), kv_lens=(60,), dtype="bfloat16", addressing="dense"), 21)
    arguments["kv_cache"][0, :20] = np.nan
    out, lse = mla_verify(**arguments, kernel=config.kernel, tiles=config)
    assert np.isnan(out.astype(np.float32)).all()
    assert np.isnan(lse).all()


def test_16_bit_partials_cost_less_than_a_third_more_error() -> None:
    # The worst case for rounding each split's result: nearly uniform attention, many splits, a long context.
    kv_len, rng = 131_072, np.random.default_rng(23)
    arguments = {
        "q": (0.02 * rng.standard_normal((1, 16, 576), np.float32)).astype(ml_dtypes.bfloat16),
        "kv_cache": rng.standard_normal((kv_len, 576), np.float32).astype(ml_dtypes.bfloat16),
        "sm_scale": SCALE,
        "kv_lens": np.array([kv_len], np.int32),
        "tiles": replace(NARROW, nsplit=132),
    }
    expected, _ = oracle.mla_verify(**arguments)

    def error(out: Any) -> float:
        return float(np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected))

    rounded = error(mla_verify(**arguments)[0])
    # A float32 out has float32 partials; rounding it then is all that a bfloat16 out needs.
    exact = error(mla_verify(**arguments, out_dtype="float32")[0].astype(ml_dtypes.bfloat16))
    assert exact < rounded <= 1.3 * exact
    assert rounded <= 2.5e-3
