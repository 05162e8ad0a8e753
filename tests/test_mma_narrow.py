"""The `mma_narrow` kernel on the emulator against the oracle: numbers, bytes, bank conflicts, races, barriers."""

import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlaflash import Device, oracle
from mlaflash.attention import output_views
from mlaflash.emulator import mla_verify, run_kernel
from mlaflash.errors import EmulatorError, InvalidArgumentError, TileError, UnsupportedError
from mlaflash.interop import numpy_view
from mlaflash.jit import compile_kernel, sources
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.target import read_problem
from mlaflash.masks import TreeMask
from mlaflash.mma_tiles import (
    NARROW,
    NARROW_32,
    NARROW_32_DEEP,
    NARROW_PAIR,
    MmaNarrowConfig,
    feature_defines,
)
from mlaflash.problem import Problem
from mlaflash.schedule import build_params, plan
from mlaflash.tiles import dtype_defines

KIMI = 0.14468
ROW_BYTES = 576 * 2
BASE = Case(name="narrow", q_lens=(2,), kv_lens=(75,), heads=8, sm_scale=KIMI)
CONFIGS = {
    "one-block": NARROW,
    "two-blocks": NARROW_PAIR,
    "three-stages": MmaNarrowConfig(1, 3, 2),
    "32-rows": NARROW_32,
}


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def run(arguments, config=NARROW, *, splits=1, seed=0, **extra):
    """Run the kernel and return out, lse and its report."""
    reports = []
    out, lse = mla_verify(
        **arguments, **extra, kernel="mma_narrow", tiles=replace(config, nsplit=splits), seed=seed, reports=reports
    )
    return out, lse, reports[0]


def check(arguments, config=NARROW, **how):
    """Run the kernel, compare with the oracle, and return the report of the split kernel."""
    out, lse, report = run(arguments, config, **how)
    expected = oracle.mla_verify(**arguments)
    q = arguments["q"]
    dtype = (q[0] if isinstance(q, tuple) else q).dtype.name
    comparison = compare(out, lse, *expected, tolerance(dtype, out.dtype.name))
    assert comparison.passed, comparison
    assert report.bank["ldmatrix"][1] == 0
    return report


def kv_bytes(report):
    return sum(n for name, n in report.bytes_read.items() if name.startswith("kv_cache"))


@pytest.mark.parametrize("mask", ["causal", "none", "chain", "tree", "dense"])
@pytest.mark.parametrize("splits", [1, 3])
def test_masks(mask, splits, config):
    check(build(replace(BASE, q_lens=(7, 3), kv_lens=(75, 40), mask=mask), 1), config, splits=splits)


@pytest.mark.parametrize("heads", [1, 4, 5, 8, 12, 16, 20])
def test_heads_of_any_number_share_row_tiles(heads):
    check(build(replace(BASE, q_lens=(3, 1), kv_lens=(50, 33), heads=heads, mask="tree"), 2), splits=2)


@pytest.mark.parametrize("addressing", ["indices", "block_table"])
@pytest.mark.parametrize(
    ("page_size", "id_dtype"), [(1, "int32"), (1, "int64"), (16, "int64"), (48, "int32"), (64, "int64"), (7, "int32")]
)
def test_pages(page_size, id_dtype, addressing, config):
    case = replace(BASE, kv_lens=(70, 131), q_lens=(2, 1), page_size=page_size, addressing=addressing)
    check(build(replace(case, id_dtype=id_dtype), 3), config, splits=2)


@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 97])
def test_lengths_around_tiles_and_turns(kv_len, config):
    check(build(replace(BASE, q_lens=(1,), kv_lens=(kv_len,)), 4), config)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_ragged_batches_with_empty_requests(splits, config):
    case = replace(BASE, q_lens=(1, 0, 5, 2, 3), kv_lens=(30, 0, 81, 0, 16), mask="tree", page_size=16)
    check(build(case, 5), config, splits=splits)


def test_rows_before_the_first_token_are_empty(config):
    out, lse, _ = run(build(replace(BASE, q_lens=(9,), kv_lens=(4,), heads=4), 6), config, splits=2)
    assert not out[:5].any()
    assert np.all(np.isneginf(lse[:5]))
    assert np.isfinite(lse[5:]).all()


def test_rows_that_a_tree_leaves_blind_are_empty():
    arguments = build(replace(BASE, q_lens=(4,), kv_lens=(4,), heads=5), 7)
    seen = np.zeros((4, 4), bool)
    seen[2, 3] = seen[3, 1] = True
    out, lse, _ = run(arguments | {"mask": TreeMask.from_dense([seen])}, splits=1)
    assert not out[:2].any()
    assert np.all(np.isneginf(lse[:2]))
    values = arguments["kv_cache"].reshape(-1, 576)[arguments["kv_indices"][[3, 1]], :512]
    np.testing.assert_array_equal(out[2:], np.repeat(values[:, None], 5, 1))


@pytest.mark.parametrize("sm_scale", [0.0, -KIMI, 1e-30, 3.0])
@pytest.mark.parametrize("mask", ["causal", "tree"])
def test_any_finite_scale(sm_scale, mask):
    check(build(replace(BASE, q_lens=(5,), kv_lens=(44,), sm_scale=sm_scale, mask=mask), 8), splits=2)


@pytest.mark.parametrize("logit_cap", [0.5, 30.0])
@pytest.mark.parametrize("sm_scale", [KIMI, -KIMI, 0.0])
def test_soft_cap(logit_cap, sm_scale, config):
    check(build(replace(BASE, q_lens=(3,), sm_scale=sm_scale, logit_cap=logit_cap, mask="tree"), 9), config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("splits", [1, 4])
def test_element_types(dtype, out_dtype, splits, config):
    check(build(replace(BASE, dtype=dtype), 10), config, splits=splits, out_dtype=out_dtype)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("mask", ["causal", "none", "tree"])
def test_new_kv(paired, mask, config):
    case = replace(BASE, q_lens=(3, 17, 2), kv_lens=(48, 20, 2), new_kv=True, paired=paired, mask=mask)
    check(build(case, 11), config, splits=2)


def test_a_cache_of_two_buffers(config):
    arguments = build(replace(BASE, page_size=16, kv_lens=(100,)), 12)
    cache = arguments["kv_cache"]
    check(arguments | {"kv_cache": (cache[..., :512].copy(), cache[..., 512:].copy())}, config)


def test_strided_q(config):
    arguments = build(replace(BASE, q_lens=(3,), heads=5), 13)
    q = arguments["q"]
    room = np.full((5, 6, 640), np.nan, q.dtype)
    strided = room.transpose(1, 0, 2)[::2, :, 32:608]
    strided[:] = q
    check(arguments | {"q": strided}, config)


def test_tail_lens_say_what_the_mask_columns_are(config):
    arguments = build(replace(BASE, q_lens=(8, 5), kv_lens=(60, 33), mask="dense"), 14)
    check(arguments | {"tail_lens": np.array([5, 2], np.int32)}, config, splits=2)


def test_a_tree_of_more_than_64_tokens():
    check(build(replace(BASE, q_lens=(70,), kv_lens=(99,), heads=1, mask="tree"), 15), splits=2)


def test_padding_tokens_come_out_empty(config):
    arguments = build(replace(BASE, q_lens=(2, 1), kv_lens=(20, 30)), 16)
    padded = np.concatenate([arguments["q"], np.full((3, 8, 576), np.nan, arguments["q"].dtype)])
    out, lse, _ = run(arguments | {"q": padded}, config, splits=2)
    assert not out[3:].any()
    assert np.all(np.isneginf(lse[3:]))
    assert np.isfinite(lse[:3]).all()


def test_values_of_tokens_that_no_row_sees_are_not_multiplied():
    arguments = build(replace(BASE, q_lens=(4,), kv_lens=(40,), heads=4, mask="tree"), 17)
    seen = np.tril(np.ones((4, 4), bool))
    seen[:, 2] = False
    arguments |= {"mask": TreeMask.from_dense([seen])}
    arguments["kv_cache"].reshape(-1, 576)[arguments["kv_indices"][38]] = np.nan
    out, lse, _ = run(arguments)
    assert np.isfinite(out.astype(np.float32)).all()
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("splits", [2, 5, 9, 40])
def test_splits_change_rounding_alone(splits, config):
    """A6, B1: up to more splits than there are tiles."""
    arguments = build(replace(BASE, kv_lens=(150,)), 18)
    out, lse, _ = run(arguments, config, out_dtype="float32")
    split_out, split_lse, _ = run(arguments, config, splits=splits, out_dtype="float32")
    np.testing.assert_allclose(split_lse, lse, atol=1e-5)
    np.testing.assert_allclose(split_out, out, atol=5e-3 * np.abs(out).max())


@pytest.mark.parametrize("splits", [1, 3])
def test_schedules_give_the_same_bits(splits, config):
    arguments = build(replace(BASE, q_lens=(3, 2), kv_lens=(90, 21), mask="tree"), 19)
    first = run(arguments, config, splits=splits, seed=1)
    for seed in (2, 3):
        other = run(arguments, config, splits=splits, seed=seed)
        np.testing.assert_array_equal(first[0], other[0])
        np.testing.assert_array_equal(first[1], other[1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_schedules_are_free_of_races(seed, config):
    case = replace(BASE, q_lens=(3, 1), kv_lens=(100, 17), mask="tree", page_size=(1, 16)[seed % 2])
    check(build(case, seed), config, splits=1 + seed % 3, seed=seed)


@pytest.mark.parametrize(("q_lens", "heads", "row_tiles"), [((2,), 8, 1), ((3,), 8, 2), ((8,), 8, 4), ((1,), 20, 2)])
@pytest.mark.parametrize("splits", [1, 4])
def test_every_kv_row_is_read_once_for_the_rows_of_a_block(q_lens, heads, row_tiles, splits, config):
    case = replace(BASE, q_lens=q_lens, heads=heads, kv_lens=(203,), mask="none")
    report = check(build(case, 20), config, splits=splits)
    assert kv_bytes(report) == -(-row_tiles // config.row_tiles) * 203 * ROW_BYTES


def test_causal_row_tiles_do_not_read_what_they_cannot_see(config):
    report = check(build(replace(BASE, q_lens=(8,), kv_lens=(100,)), 21), config)
    seen = (96 + 100) if config.row_tiles == 2 else (94 + 96 + 98 + 100)
    assert kv_bytes(report) == seen * ROW_BYTES


def test_q_is_read_once_per_kv_group(config):
    report = check(build(replace(BASE, q_lens=(1,)), 22), config)
    assert report.bytes_read["q"] == config.kv_groups * 8 * ROW_BYTES


def test_every_partial_is_written_once():
    arguments = build(replace(BASE, q_lens=(1,), kv_lens=(40,)), 23)
    _, _, report = run(arguments, splits=20)
    assert report.bytes_written["partial_out"] == 20 * 8 * 512 * 2
    assert report.bytes_written["partial_lse"] == 20 * 8 * 4


@pytest.mark.parametrize(
    "config", [NARROW, NARROW_PAIR, NARROW_32, MmaNarrowConfig(2, 2, 1), MmaNarrowConfig(1, 4, 2)], ids=str
)
def test_shared_memory_is_what_the_kernel_uses(config):
    """Sixteen bytes less are out of bounds."""
    arguments = build(replace(BASE, q_lens=(2,), kv_lens=(150,)), 24)
    with pytest.raises(EmulatorError, match="bounds"):
        launch(arguments, config, shared_bytes=config.shared_bytes() - 16)
    launch(arguments, config)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("config", [NARROW, NARROW_PAIR], ids=["one-block", "two-blocks"])
def test_it_compiles_without_spills(config, arch):
    defines = dtype_defines("bfloat16", "bfloat16", "bfloat16") | config.defines() | feature_defines(0.0, False, False)
    assert_no_spills(defines, config, arch)


ROWS_32_FORMS = [(NARROW_32, "sm_90"), (NARROW_32, "sm_120"), (NARROW_32_DEEP, "sm_90")]


@pytest.mark.parametrize(("config", "arch"), ROWS_32_FORMS)
def test_32_rows_compile_without_spills(config, arch):
    for planned in ({}, {"PLANNED_ROWS": 32}):
        types = dtype_defines("bfloat16", "bfloat16", "bfloat16")
        assert_no_spills(types | config.defines() | feature_defines(0.0, False, False) | planned, config, arch)


@pytest.mark.slow
@pytest.mark.parametrize("planned", [{}, {"PLANNED_ROWS": 32}], ids=["call", "plan"])
@pytest.mark.parametrize(("config", "arch"), ROWS_32_FORMS)
@pytest.mark.parametrize("types", [("bfloat16", "float32", "float32"), ("float16", "float16", "float16")])
@pytest.mark.parametrize("features", [*itertools.product((0.0, 30.0), (False, True), (False, True))])
def test_every_build_of_32_rows_compiles_without_spills(config, types, features, planned, arch):
    assert_no_spills(dtype_defines(*types) | config.defines() | feature_defines(*features) | planned, config, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("config", [NARROW, NARROW_PAIR], ids=["one-block", "two-blocks"])
@pytest.mark.parametrize("types", [("bfloat16", "float32", "float32"), ("float16", "float16", "float16")])
@pytest.mark.parametrize("features", [(0.0, False, False), (30.0, True, True), (0.0, True, False), (0.0, False, True)])
def test_every_build_compiles_without_spills(config, types, features, arch):
    assert_no_spills(dtype_defines(*types) | config.defines() | feature_defines(*features), config, arch)


def assert_no_spills(defines, config, arch):
    compiled = compile_kernel("mma_narrow", defines, arch)
    assert (compiled.spill_bytes, compiled.stack_bytes, compiled.static_shared_bytes) == (0, 0, 0), compiled.log
    assert compiled.registers * config.threads * (3 - config.kv_groups) <= 65_536


def test_the_shipped_constants_fit_the_sm_120_budget():
    limit = Device.for_arch("sm_120")
    assert NARROW.shared_bytes() + 1024 <= limit.shared_per_sm
    assert NARROW_32.shared_bytes() + 1024 <= limit.shared_per_sm
    assert 2 * (NARROW_PAIR.shared_bytes() + 1024) <= limit.shared_per_sm


@pytest.mark.parametrize("wrong", [{"kv_groups": 3}, {"stages": 1}, {"exchange_buffers": 0}])
def test_constants_that_the_kernel_is_not_built_for_are_refused(wrong):
    with pytest.raises(TileError, match=str(next(iter(wrong)))):
        MmaNarrowConfig(**wrong)


def test_lists_of_slots_are_not_for_two_row_tiles():
    lists = read_problem(build(replace(BASE, mask="none", topk=40), 27))
    with pytest.raises(UnsupportedError, match=r"row_tiles is 2 and kv_cache is bfloat16; .* lists of slots. Use 1"):
        plan(lists, Device.for_arch("sm_120"), tiles=NARROW_32)
    assert plan(lists, Device.for_arch("sm_120"), kernel="mma_narrow").config == NARROW


def test_steps_of_q_in_shared_memory_are_not_for_16_bits():
    with pytest.raises(TileError, match=r"shared_steps is 1 and kv_cache is bfloat16; .*of float8_e4m3. Use 0"):
        run(build(BASE, 28), replace(NARROW_32, shared_steps=1))


@pytest.mark.parametrize(
    ("q_len", "arch", "config"), [(2, "sm_90", NARROW), (3, "sm_90", NARROW_32), (3, "sm_89", NARROW)]
)
def test_by_its_name_alone_it_takes_the_tile_that_the_rows_fill(q_len, arch, config):
    problem = read_problem(build(replace(BASE, q_lens=(q_len,)), 29))
    assert plan(problem, Device.for_arch(arch), kernel="mma_narrow").config == config


def test_nsplit_must_be_positive():
    with pytest.raises(InvalidArgumentError, match="nsplit is 0"):
        MmaNarrowConfig(nsplit=0)


def test_float32_is_refused():
    with pytest.raises(UnsupportedError, match="float32"):
        run(build(replace(BASE, dtype="float32"), 25))


def launch(arguments, config, *, kernel="mma_narrow", shared_bytes=None, seed=0):
    """Run the kernel alone, one split, perhaps from another file."""
    problem = Problem.from_arrays(numpy_view, **arguments)
    schedule = plan(problem, Device.for_arch("sm_120"), kernel="mma_narrow", tiles=replace(config, nsplit=1))
    out = np.full(problem.out_shape, np.nan, arguments["q"].dtype)
    lse = np.full(problem.out_shape[:-1], np.nan, np.float32)
    views = output_views(numpy_view, problem, out, lse)
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    step = schedule.launches[0]
    run_kernel(
        kernel,
        step.defines,
        step.grid,
        step.block,
        step.shared_bytes if shared_bytes is None else shared_bytes,
        build_params(problem, schedule, *views, {}),
        arrays | {"out": out, "lse": lse},
        seed=seed,
    )
    return out, lse


SOURCE = (sources.kernel_root() / "mma_narrow.cu").read_text()
# Statements that do nothing but order others. warp_sync() is not among them, because the lanes of a warp share one
# clock in the emulator, nor is cp_async_wait_all(), because nothing is in flight at the end of the tiles. Of the two
# barriers of all_sync() one is for another tool, as its comment says; here both go. The one between two row tiles is
# with the forms that have them, in test_schedules.py.
ORDERINGS = [
    match.span()
    for match in re.finditer(r"group_sync\(w\);|(?<!> 0\) )all_sync\(\);|cp_async_wait<STAGES - \w+>\(\);", SOURCE)
]


def test_all_orderings_are_found():
    assert len(ORDERINGS) == 17


@pytest.mark.parametrize("span", ORDERINGS, ids=lambda span: f"{SOURCE[slice(*span)]}@{span[0]}")
def test_an_ordering_that_is_removed_is_noticed(span, tmp_path):
    folder = Path(shutil.copytree(sources.kernel_root(), tmp_path / "kernels"))
    (folder / "mma_narrow.cu").write_text(SOURCE[: span[0]] + ";" + SOURCE[span[1] :])
    # group_sync() before the scores are published is there with one buffer alone.
    config = MmaNarrowConfig(2, 2, 1)
    # One of the waits is that of caches in 8 bits; two row tiles have barriers of their own, and their new rows too.
    case = replace(BASE, q_lens=(2,), kv_lens=(150,))
    cases = [(build(replace(case, kv_dtype=kv), 26), config) for kv in ("float8_e4m3", None)]
    new = replace(case, q_lens=(4,), heads=8, kv_dtype="float8_e4m3", new_kv=True)
    cases.insert(0, (build(new, 26), replace(config, row_tiles=2)))
    cases.append((build(replace(case, q_lens=(4,)), 26), NARROW_32))

    def is_noticed(arguments, config, seed):
        expected = oracle.mla_verify(**arguments)
        try:
            out, lse = launch(arguments, config, kernel=folder / "mma_narrow.cu", seed=seed)
        except EmulatorError:
            return True
        return not compare(out, lse, *expected, tolerance("bfloat16", "bfloat16")).passed

    assert any(is_noticed(*case, seed) for case in cases for seed in range(5))
