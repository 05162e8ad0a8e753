"""Sparse calls on the emulator: each query token reads the slots that it lists, and no others."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from verify_cases import (
    LISTS,
    SCALE,
    SPARSE_CASES,
    WIDE_PAIR,
    assert_same,
    config_id,
    configs,
    list_configs,
    run_and_compare,
)

from mlaflash import Device, InvalidArgumentError, ShapeError, UnsupportedError, oracle
from mlaflash.emulator import mla_sparse, mla_verify
from mlaflash.interop import numpy_view
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import GARBAGE_ID, Case, build
from mlaflash.lab.variants import compile_all, variants
from mlaflash.mma_tiles import NARROW, NARROW_PAIR, ROWS_32, ROWS_64, MmaNarrowConfig
from mlaflash.problem import Problem
from mlaflash.schedule import plan
from mlaflash.tiles import KernelConfig, NaiveConfig, TileConfig

CONFIGS = [*configs(), *list_configs()]
# Rings of other depths, and blocks whose half-warps copy two rows each.
RINGS = [replace(NARROW_PAIR, nsplit=2), MmaNarrowConfig(1, 3, 2, nsplit=1), WIDE_PAIR]
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.name)
def test_agrees_with_the_oracle(case: Case, config: KernelConfig) -> None:
    run_and_compare(mla_sparse, case, config, seed=1)


@pytest.mark.parametrize("config", [*CONFIGS, *RINGS], ids=config_id)
def test_order_of_threads_does_not_matter(config: KernelConfig) -> None:
    arguments = build(replace(LISTS, topk=130), 2)
    results = [
        mla_sparse(**arguments, kernel=config.kernel, tiles=config, budget="sm_90", seed=seed) for seed in range(6)
    ]
    expected = oracle.mla_sparse(**arguments)
    assert compare(*results[0], *expected, tolerance("bfloat16", "bfloat16")).passed
    for result in results[1:]:
        assert_same(results[0], result)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [8, 64])
def test_what_is_chosen_agrees(heads: int, seed: int) -> None:
    case = replace(LISTS, heads=heads, q_lens=(1, 4, 2), kv_lens=(200, 90, 31), topk=97 + seed, id_dtype="int64")
    arguments = build(case, 10 + seed)
    out, lse = mla_sparse(**arguments, seed=seed)
    assert compare(out, lse, *oracle.mla_sparse(**arguments), tolerance("bfloat16", "bfloat16")).passed


def listed(arguments: dict[str, Any]) -> int:
    """Count the entries that name a slot."""
    indices = arguments["indices"]
    return int(((np.arange(indices.shape[1]) < arguments["topk_lens"][:, None]) & (indices >= 0)).sum())


def kv_bytes(arguments: dict[str, Any], config: KernelConfig) -> int:
    reports: list[Any] = []
    mla_sparse(**arguments, kernel=config.kernel, tiles=config, reports=reports)
    assert all(report.bank["ldmatrix"][1] == 0 for report in reports)
    return sum(n for report in reports for name, n in report.bytes_read.items() if name.startswith("kv_cache"))


@pytest.mark.parametrize("heads", [5, 16, 40, 64, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_tensor_core_kernels_read_a_listed_row_once_for_each_row_tile(heads: int, splits: int) -> None:
    arguments = build(replace(LISTS, heads=heads), 3)
    for config in (NARROW, ROWS_32, ROWS_64):
        row_tiles = -(-heads // config.rows)
        assert kv_bytes(arguments, replace(config, nsplit=splits)) == row_tiles * listed(arguments) * 576 * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_other_kernels_read_listed_rows_alone(dtype: str) -> None:
    arguments = build(replace(LISTS, heads=12, dtype=dtype), 3)
    assert kv_bytes(arguments, TileConfig(8, 16, 2)) == 2 * listed(arguments) * 576 * ITEM[dtype]
    assert kv_bytes(arguments, NaiveConfig()) == 12 * listed(arguments) * (576 + 512) * ITEM[dtype]


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_full_lists_equal_a_verify_call_bitwise(config: KernelConfig) -> None:
    rng = np.random.default_rng(4)
    kv_cache = rng.standard_normal((90, 576), np.float32).astype(np.float16)
    q = (0.1 * rng.standard_normal((4, 20, 576), np.float32)).astype(np.float16)
    indices = rng.permuted(np.tile(np.arange(90, dtype=np.int32), (4, 1)), axis=1)[:, :75]
    dense = mla_verify(
        q,
        kv_cache,
        sm_scale=SCALE,
        kv_lens=np.full(4, 75, np.int32),
        block_table=indices,
        mask="none",
        kernel=config.kernel,
        tiles=config,
    )
    assert_same(dense, mla_sparse(q, kv_cache, indices, sm_scale=SCALE, kernel=config.kernel, tiles=config))


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.as_dict().get("nsplit", 1) == 1], ids=config_id)
def test_lists_without_lengths_may_end_with_none(config: KernelConfig) -> None:
    arguments = build(LISTS, 5)
    padded = arguments | {"indices": np.where(arguments["indices"] == GARBAGE_ID, -1, arguments["indices"])}
    del padded["topk_lens"]
    assert_same(*(mla_sparse(**a, kernel=config.kernel, tiles=config) for a in (arguments, padded)))


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_a_slot_listed_twice_counts_twice(config: KernelConfig) -> None:
    arguments = build(replace(LISTS, q_lens=(1,), kv_lens=(20,), topk=20), 6)
    slot = int(arguments["indices"].max())
    once, twice = np.full((2, 1, 20), -1, np.int32)
    once[0, 7] = twice[0, 3] = twice[0, 19] = slot
    del arguments["topk_lens"]
    first, second = (
        mla_sparse(**(arguments | {"indices": ids}), kernel=config.kernel, tiles=config) for ids in (once, twice)
    )
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_allclose(second[1], first[1] + np.log(2), atol=1e-5)
    row = arguments["kv_cache"].reshape(-1, 576)[slot, :512]
    np.testing.assert_array_equal(first[0], np.broadcast_to(row, (1, 8, 512)))


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("topk", [0, 40])
def test_a_token_without_an_entry_is_empty(topk: int, config: KernelConfig) -> None:
    arguments = build(replace(LISTS, topk=40), 7)
    arguments["indices"] = np.full((5, topk), -1, np.int32)
    del arguments["topk_lens"]
    out, lse = mla_sparse(**arguments, kernel=config.kernel, tiles=config)
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("kernel", ["naive", "tile", "mma_narrow", "mma_wide"])
def test_no_query_tokens_launch_nothing(kernel: str) -> None:
    arguments = build(LISTS, 8)
    reports: list[Any] = []
    arguments |= {"q": arguments["q"][:0], "indices": arguments["indices"][:0], "topk_lens": np.zeros(0, np.int32)}
    out, lse = mla_sparse(**arguments, kernel=kernel, reports=reports)
    assert (out.shape, lse.shape, reports) == ((0, 8, 512), (0, 8), [])


def test_mma_roles_takes_no_lists() -> None:
    with pytest.raises(UnsupportedError, match="mma_narrow does, and mma_wide with caches of 16 bits"):
        mla_sparse(**build(LISTS, 8), kernel="mma_roles")


@pytest.mark.parametrize("kernel", ["tile", "mma_narrow", "mma_wide"])
def test_any_strides_and_the_callers_outputs(kernel: str) -> None:
    arguments = build(LISTS, 9)
    expected = mla_sparse(**arguments, kernel=kernel, out_dtype="float32")
    q, cache, lists = arguments["q"], arguments["kv_cache"].reshape(-1, 576), arguments["indices"]
    wide = np.full((len(cache), 1, 1024), np.nan, cache.dtype)
    wide[:, 0, 256:832] = cache
    wide_lists = np.full((5, 100), GARBAGE_ID, np.int32)
    wide_lists[:, :75] = lists
    changed = arguments | {
        "q": (np.ascontiguousarray(q[..., :512].transpose(1, 0, 2)).transpose(1, 0, 2), q[..., 512:]),
        "kv_cache": wide[..., 256:832],
        "indices": wide_lists[:, :75],
    }
    out = np.full((5, 8, 1024), np.nan, np.float32)[..., 256:768]
    lse = np.full((5, 8), np.nan, np.float32)
    returned = mla_sparse(**changed, kernel=kernel, out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    assert_same(expected, (out, lse))


def test_pages_are_their_slots() -> None:
    arguments = build(replace(LISTS, page_size=16), 10)
    pages = arguments["kv_cache"]
    assert pages.shape[1] == 16
    expected = mla_sparse(**arguments)
    for cache in (pages.reshape(-1, 576), pages[:, :, None], pages.reshape(-1, 1, 576)):
        assert_same(expected, mla_sparse(**(arguments | {"kv_cache": cache})))
        assert_same(oracle.mla_sparse(**arguments), oracle.mla_sparse(**(arguments | {"kv_cache": cache})))


@pytest.mark.parametrize("config", [NaiveConfig(), *list_configs()], ids=config_id)
def test_a_nan_in_a_listed_row_is_not_lost(config: KernelConfig) -> None:
    arguments = build(replace(LISTS, q_lens=(1,), kv_lens=(60,)), 11)
    arguments["kv_cache"].reshape(-1, 576)[arguments["indices"].max()] = np.nan
    out, lse = mla_sparse(**arguments, kernel=config.kernel, tiles=config)
    assert np.isnan(out.astype(np.float32)).all()
    assert np.isnan(lse).all()


def problem(tokens: int, heads: int, topk: int) -> Problem:
    """Make a call whose arrays repeat one row."""
    row = np.zeros(576, np.float16)
    return Problem.from_lists(
        numpy_view,
        np.broadcast_to(row, (tokens, heads, 576)),
        np.broadcast_to(row, (1 << 20, 576)),
        indices=np.broadcast_to(np.zeros(topk, np.int32), (tokens, topk)),
        sm_scale=SCALE,
    )


@pytest.mark.parametrize(
    ("heads", "kernel", "row_tiles"), [(8, "mma_narrow", 1), (64, "mma_wide", 1), (128, "mma_wide", 2)]
)
def test_decode_is_split_and_prefill_is_not(heads: int, kernel: str, row_tiles: int) -> None:
    device = Device.for_arch("sm_90")
    decode = plan(problem(16, heads, 2048), device)
    assert decode.num_splits > 1
    assert [launch.kernel for launch in decode.launches] == [kernel, "combine"]
    prefill = plan(problem(8192, heads, 2048), device)
    assert [(launch.kernel, launch.grid) for launch in prefill.launches] == [(kernel, (row_tiles, 1, 8192))]
    assert prefill.workspaces == ()


def test_at_most_65_535_query_tokens() -> None:
    assert problem(65_535, 1, 4).batch == 65_535
    with pytest.raises(UnsupportedError, match=r"65536 query tokens; a sparse call takes at most 65535. Split it"):
        problem(65_536, 1, 4)


ZEROS = np.zeros
I32 = np.int32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": ZEROS((5, 1, 8, 576), np.float16)}, r"q has shape .* of rank 4; allowed is \(T, H, 576\)"),
        ({"q": ZEROS((5, 0, 576), np.float16)}, "q has 0 heads"),
        ({"q": ZEROS((5, 8, 576), np.float32)}, "kv_cache is float16 and q is float32"),
        (
            {"indices": ZEROS((4, 75), I32)},
            r"indices has shape \(4, 75\); it must be \(5, topk\): one row for each query",
        ),
        ({"indices": ZEROS((5, 1, 75), I32)}, r"indices has shape \(5, 1, 75\)"),
        ({"indices": ZEROS((5, 75), np.int16)}, "indices is int16; allowed: int32 or int64"),
        ({"indices": ZEROS((5, 150), I32)[:, ::2]}, "the rows of indices are not contiguous"),
        ({"topk_lens": ZEROS(4, I32)}, r"topk_lens has shape \(4,\); it must have shape \(5,\)"),
        ({"topk_lens": ZEROS(5, np.int64)}, "topk_lens is int64; allowed: int32"),
        ({"kv_cache": ZEROS((9, 32, 576), np.float16)[:, :16]}, "a slot id counts the tokens of all pages"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = build(replace(LISTS, dtype="float16"), 12)
    with pytest.raises(ShapeError, match=message):
        mla_sparse(**(arguments | changes))


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("topk_lens", 3, 76, r"topk_lens\[3\] is 76; allowed is 0 .. 75"),
        ("topk_lens", 2, -1, r"topk_lens\[2\] is -1"),
        ("indices", (0, 9), -2, r"indices\[0, 9\] is -2; kv_cache holds slots 0 .. 107, and -1 is none"),
        ("indices", (0, 74), 108, r"indices\[0, 74\] is 108"),
    ],
)
def test_values_that_are_not_allowed_are_found(name: str, place: Any, value: int, message: str) -> None:
    arguments = build(LISTS, 13)
    arguments[name][place] = value
    with pytest.raises(InvalidArgumentError, match=message):
        mla_sparse(**arguments)
    with pytest.raises(InvalidArgumentError, match=name):
        oracle.mla_sparse(**arguments)


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_the_tensor_core_kernels_keep_their_registers(arch: str) -> None:
    found, _ = variants(arch, ["bfloat16"], ["mma_narrow", "mma_wide"], out_dtypes=["bfloat16"])
    sparse = [variant for variant in found if variant.defines.get("SPARSE_IDS")]
    assert {variant.kernel for variant in sparse} == {"mma_narrow", "mma_wide"}
    assert all(result.passed and not result.spills for result in compile_all(sparse))
