"""The `mma_wide` kernel on the emulator against the oracle: numbers, bytes, bank conflicts, races, barriers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlaflash import oracle
from mlaflash.attention import output_views
from mlaflash.emulator import Report, run_kernel
from mlaflash.errors import InvalidArgumentError, TileError
from mlaflash.interop import numpy_view
from mlaflash.jit.compiler import compile_kernel
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.masks import TreeMask
from mlaflash.mma_tiles import ROWS_32, ROWS_64, MmaConfig, MmaWideConfig, feature_defines
from mlaflash.params import numpy_dtype
from mlaflash.problem import Problem
from mlaflash.schedule import Launch, Schedule, build_params, with_combine
from mlaflash.tiles import KernelConfig, dtype_defines

ROWS_32_FOUR_WARPS = MmaWideConfig(row_groups=2, column_warps=2)
CONFIGS = {"64": ROWS_64, "32": ROWS_32, "32x4": ROWS_32_FOUR_WARPS}
KIMI = 0.14468
TOKEN_BYTES = 576 * 2


@dataclass(frozen=True)
class Result:
    """What one call gave."""

    out: Any
    lse: Any
    reports: list[Report]


def verify(
    arguments: dict[str, Any],
    config: MmaWideConfig = ROWS_64,
    *,
    splits: int = 1,
    seed: int = 0,
    out_dtype: str | None = None,
    partial_dtype: str | None = None,
    source: Path | None = None,
) -> Result:
    """Run the kernel, and the merge of its splits, on NumPy arrays."""
    problem = Problem.from_arrays(numpy_view, **arguments, out_dtype=out_dtype)
    partials = partial_dtype or problem.out_dtype
    launch = Launch(
        "mma_wide",
        dtype_defines(problem.dtype, problem.out_dtype, partials)
        | config.defines()
        | feature_defines(problem.logit_cap, problem.new_kv is not None, not problem.kv.fused),
        (-(-problem.max_q_len * problem.num_heads // config.rows), splits, problem.batch),
        config.threads,
        config.shared_bytes(),
    )
    schedule = with_combine(problem, config, launch, splits, partials)
    out = np.full(problem.out_shape, np.nan, numpy_dtype(problem.out_dtype))
    lse = np.full(problem.out_shape[:-1], np.nan, np.float32)
    return Result(out, lse, _launch(problem, schedule, out, lse, seed, source))


def _launch(problem: Problem, schedule: Schedule, out: Any, lse: Any, seed: int, source: Path | None) -> list[Report]:
    views = output_views(numpy_view, problem, out, lse)
    workspaces = {w.name: np.full(w.shape, np.nan, numpy_dtype(w.dtype)) for w in schedule.workspaces}
    if problem.is_dense:
        workspaces["page_ids"] = np.arange(problem.batch, dtype=np.int32)
    params = build_params(problem, schedule, *views, {name: w.ctypes.data for name, w in workspaces.items()})
    arrays = _arrays(problem) | {view.name: view.array for view in views} | workspaces
    return [
        run_kernel(
            source if source is not None and step.kernel == "mma_wide" else step.kernel,
            step.defines,
            step.grid,
            step.block,
            step.shared_bytes,
            params,
            arrays,
            seed=seed,
        )
        for step in schedule.launches
    ]


def _arrays(problem: Problem) -> dict[str, Any]:
    views = [
        problem.kv_lens,
        problem.kv_indptr,
        problem.page_ids,
        problem.qo_indptr,
        problem.tail_lens,
        problem.mask_words,
    ]
    for rows in (problem.q, problem.kv, problem.new_kv):
        if rows is not None:
            views += [rows.latent] if rows.fused else [rows.latent, rows.rope]
    return {view.name: view.array for view in views if view is not None}


def check(arguments: dict[str, Any], config: MmaWideConfig = ROWS_64, **how: Any) -> Result:
    """Run the kernel and compare with the oracle."""
    result = verify(arguments, config, **how)
    expected = oracle.mla_verify(**arguments)
    q = arguments["q"]
    dtype = (q[0] if isinstance(q, tuple) else q).dtype.name
    comparison = compare(result.out, result.lse, *expected, tolerance(dtype, result.out.dtype.name))
    assert comparison.passed, comparison
    assert result.reports[0].bank["ldmatrix"][1] == 0
    return result


def case(**fields: Any) -> Case:
    """Make a `Case` with the fields that a test does not care about."""
    defaults: dict[str, Any] = {"name": "wide", "q_lens": (8,), "kv_lens": (203,), "heads": 8, "sm_scale": KIMI}
    return Case(**(defaults | fields))


# --- numbers -------------------------------------------------------------------------------------------------------

QUICK = {
    "causal": case(),
    "short": case(kv_lens=(5,), q_lens=(3,)),
    "none, float16": case(mask="none", dtype="float16", kv_lens=(65,)),
    "tree": case(mask="tree", q_lens=(12,), kv_lens=(90,), page_size=16),
    "sees later tokens": case(mask="dense", q_lens=(40,), heads=1, kv_lens=(77,)),
    "ragged, some empty": case(q_lens=(3, 0, 9, 1), kv_lens=(40, 20, 4, 0), heads=12, page_size=48),
    "new_kv, pair": case(new_kv=True, paired=True, mask="tree", id_dtype="int64", page_size=64),
    "soft-cap, negative scale": case(logit_cap=30.0, sm_scale=-0.2, addressing="block_table"),
    "scale 0": case(sm_scale=0.0, q_lens=(5,), kv_lens=(3,)),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", QUICK)
def test_result_is_the_oracles(name: str, splits: int) -> None:
    check(build(QUICK[name], seed=1), splits=splits, seed=splits)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_shape_of_block(config: str) -> None:
    check(build(case(mask="tree", q_lens=(9, 2), kv_lens=(100, 31)), 2), CONFIGS[config], splits=2)


@pytest.mark.parametrize(
    ("out_dtype", "partial_dtype"), [("float32", "float32"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_output_types(out_dtype: str, partial_dtype: str) -> None:
    for splits in (1, 2):
        check(build(case(), 3), splits=splits, out_dtype=out_dtype, partial_dtype=partial_dtype)


def test_more_splits_than_tiles() -> None:
    """Empty splits write an lse of -inf and no rows, and the merge does not look at those."""
    check(build(case(kv_lens=(33,)), 4), splits=17)


def test_padding_behind_the_last_request_is_empty() -> None:
    arguments = build(case(q_lens=(2, 3), kv_lens=(20, 30)), 5)
    arguments["qo_indptr"] = np.array([0, 2, 3], np.int32)
    for splits in (1, 2):
        result = check(arguments, splits=splits)
        assert (result.out[3:] == 0).all()
        assert (result.lse[3:] == -np.inf).all()


def test_tail_shorter_than_the_draft() -> None:
    """A cache that holds a part of the tree: the mask's columns belong to fewer tokens than there are queries."""
    arguments = build(case(q_lens=(8, 8), kv_lens=(50, 3), mask="dense"), 6)
    arguments["tail_lens"] = np.array([3, 5], np.int32)
    check(arguments)


def test_mask_of_more_than_one_word() -> None:
    arguments = build(case(q_lens=(70,), heads=2, kv_lens=(111,), mask="dense"), 7)
    check(arguments, splits=2)


def test_chain_is_causal_bit_for_bit() -> None:
    causal = build(case(q_lens=(8,)), 8)
    chain = causal | {"mask": TreeMask.causal(8)}
    one, other = verify(causal), verify(chain)
    assert one.out.tobytes() == other.out.tobytes()
    assert one.lse.tobytes() == other.lse.tobytes()


def test_transposed_and_sliced_q() -> None:
    arguments = build(case(heads=5), 9)
    wide = np.zeros((5, 8, 640), arguments["q"].dtype)
    wide[..., :576] = arguments["q"].transpose(1, 0, 2)
    check(arguments | {"q": wide[..., :576].transpose(1, 0, 2)})


def test_token_that_no_row_sees_may_hold_anything() -> None:
    """NaN in a draft token that is masked for every row, which the scores' mask alone would not keep out."""
    arguments = build(case(q_lens=(4,), kv_lens=(40,), page_size=1), 10)
    dense = np.tri(4, dtype=np.bool_)
    dense[:, 2] = False
    arguments["mask"] = TreeMask.from_dense([dense])
    slot = arguments["kv_indices"][38]
    arguments["kv_cache"].reshape(-1, 576)[slot] = np.nan
    assert np.isfinite(check(arguments).out.astype(np.float32)).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_problems_and_schedules(seed: int) -> None:
    rng = np.random.default_rng([seed, 77])
    heads = int(rng.choice([1, 4, 5, 8, 12, 16, 20, 64, 128]))
    most = max(1, min(40, 200 // heads))
    batch = int(rng.integers(1, 4))
    problem = case(
        name=f"random {seed}",
        q_lens=(int(rng.integers(1, most + 1)), *(int(q) for q in rng.integers(0, most + 1, batch - 1))),
        kv_lens=tuple(int(n) for n in rng.integers(0, rng.choice([2, 40, 300]), batch)),
        heads=heads,
        sm_scale=float(rng.choice([KIMI, KIMI, 0.0, -0.2])),
        page_size=int(rng.choice([1, 16, 64, 48])),
        dtype=str(rng.choice(["bfloat16", "float16"])),
        mask=str(rng.choice(["causal", "none", "tree", "chain", "dense"])),
        logit_cap=float(rng.choice([0.0, 0.0, 30.0])),
        id_dtype=str(rng.choice(["int32", "int64"])),
        addressing=str(rng.choice(["indices", "block_table", "dense"])),
        paired=bool(rng.integers(2)),
        new_kv=bool(rng.integers(2)),
    )
    config = CONFIGS[str(rng.choice(list(CONFIGS)))]
    check(build(problem, seed), config, splits=int(rng.choice([1, 2, 3, 5, 17])), seed=seed)


# --- what it reads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["64", "32"])
def test_kv_is_read_once_for_each_row_tile(config: str) -> None:
    """And no row past the last token that a row tile sees, whatever the splits."""
    heads, q_len, kv_len = 8, 20, 150
    arguments = build(case(q_lens=(q_len,), kv_lens=(kv_len,), heads=heads), 11)
    rows = CONFIGS[config].rows
    last_rows = [min(first + rows, q_len * heads) - 1 for first in range(0, q_len * heads, rows)]
    visible = sum(kv_len - q_len + row // heads + 1 for row in last_rows)
    for splits in (1, 4):
        result = check(arguments, CONFIGS[config], splits=splits)
        assert result.reports[0].bytes_read["kv_cache"] == visible * TOKEN_BYTES


def test_unseen_draft_tokens_are_not_read() -> None:
    q_len, kv_len = 8, 64
    arguments = build(case(q_lens=(q_len,), kv_lens=(kv_len,), mask="dense"), 12)
    dense = np.zeros((q_len, q_len), np.bool_)
    dense[:, [1, 6]] = True
    arguments["mask"] = TreeMask.from_dense([dense])
    assert check(arguments).reports[0].bytes_read["kv_cache"] == (kv_len - q_len + 2) * TOKEN_BYTES


# --- order ---------------------------------------------------------------------------------------------------------

# One seed of the emulator is one order of threads and of landing copies; a race in any of them fails the run.
SEEDS = 4
SLOW_SEEDS = 100


@pytest.mark.parametrize("config", CONFIGS)
def test_no_race_in_any_order(config: str) -> None:
    arguments = build(case(mask="tree", q_lens=(8,), kv_lens=(150,)), 13)
    results = {verify(arguments, CONFIGS[config], seed=seed).out.tobytes() for seed in range(SEEDS)}
    assert len(results) == 1


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_no_race_in_a_hundred_orders(config: str) -> None:
    arguments = build(case(mask="tree", q_lens=(8,), kv_lens=(150,)), 14)
    results = {verify(arguments, CONFIGS[config], seed=seed).out.tobytes() for seed in range(SLOW_SEEDS)}
    assert len(results) == 1


# --- constants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_config_offers_what_a_kernel_config_does(config: str) -> None:
    assert isinstance(CONFIGS[config], KernelConfig)
    assert isinstance(CONFIGS[config], MmaConfig)


@pytest.mark.parametrize("config", [ROWS_64, ROWS_32])
def test_fits_the_smallest_budget(config: MmaWideConfig) -> None:
    assert config.shared_bytes() <= 101_376


@pytest.mark.parametrize(
    "constants",
    [
        {"row_groups": 3},
        {"column_warps": 8},
        {"row_groups": 8, "column_warps": 1},
        {"stages": 2},
        {"lookahead": 0},
        {"refill_at": 19},
    ],
)
def test_constants_that_are_not_built_are_refused(constants: dict[str, int]) -> None:
    with pytest.raises(TileError, match=next(iter(constants))):
        MmaWideConfig(**constants)


def test_no_split_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="nsplit is 0"):
        MmaWideConfig(nsplit=0)


FEATURES = [feature_defines(cap, new, split) for cap in (0.0, 30.0) for new in (False, True) for split in (False, True)]
TYPES = [("bfloat16", "bfloat16", "bfloat16"), ("float16", "float32", "float16"), ("bfloat16", "float32", "float32")]


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("config", [ROWS_64, ROWS_32], ids=["64", "32"])
def test_nothing_spills(config: MmaWideConfig, arch: str) -> None:
    pytest.importorskip("cupy")
    compiled = compile_kernel("mma_wide", dtype_defines(*TYPES[0]) | config.defines() | FEATURES[0], arch)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)


# Forms that spill where nothing is found anew; on sm_120, under NVRTC 13.0, one that spills where only the lane is.
@pytest.mark.parametrize(
    ("arch", "features", "planned"),
    [
        ("sm_90", (0.0, True, False), False),
        ("sm_90", (0.0, False, True), True),
        ("sm_90", (30.0, True, True), True),
        ("sm_89", (30.0, False, False), True),
        ("sm_120", (0.0, True, False), False),
    ],
)
def test_64_rows_with_features_spill_nothing(arch: str, features: tuple[float, bool, bool], planned: bool) -> None:
    pytest.importorskip("cupy")
    defines = dtype_defines(*TYPES[0]) | ROWS_64.defines() | feature_defines(*features)
    compiled = compile_kernel("mma_wide", defines | ({"PLANNED_ROWS": ROWS_64.rows} if planned else {}), arch)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("config", [ROWS_64, ROWS_32], ids=["64", "32"])
def test_nothing_spills_with_any_feature(config: MmaWideConfig, arch: str, types: tuple[str, str, str]) -> None:
    pytest.importorskip("cupy")
    for features in FEATURES:
        compiled = compile_kernel("mma_wide", dtype_defines(*types) | config.defines() | features, arch)
        assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0), features
