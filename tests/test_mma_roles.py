"""The `mma_roles` kernel on the emulator against the oracle: numbers, bytes, bank conflicts, races, barriers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlaflash import emulator, oracle
from mlaflash.emulator import Report
from mlaflash.errors import InvalidArgumentError, TileError
from mlaflash.jit.compiler import compile_kernel
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.masks import TreeMask
from mlaflash.mma_tiles import ROWS_64_ROLES, MmaConfig, MmaRolesConfig, feature_defines
from mlaflash.tiles import KernelConfig, dtype_defines

KIMI = 0.14468
TOKEN_BYTES = 576 * 2


def case(**fields: Any) -> Case:
    """Make a `Case` with the fields that a test does not care about."""
    defaults: dict[str, Any] = {"name": "roles", "q_lens": (8,), "kv_lens": (203,), "heads": 8, "sm_scale": KIMI}
    return Case(**(defaults | fields))


def run(arguments: dict[str, Any], splits: int = 1, *, seed: int = 0, **how: Any) -> tuple[Any, Any, Report]:
    """Run the kernel, and the merge of its splits."""
    reports: list[Report] = []
    out_dtype = how.pop("out_dtype", None)
    config = replace(ROWS_64_ROLES, nsplit=splits, **how)
    out, lse = emulator.mla_verify(**arguments, tiles=config, seed=seed, reports=reports, out_dtype=out_dtype)
    return out, lse, reports[0]


def expect(arguments: dict[str, Any], out: Any, lse: Any, report: Report) -> None:
    """Compare with the oracle; no bank conflict is allowed."""
    q = arguments["q"]
    dtype = (q[0] if isinstance(q, tuple) else q).dtype.name
    comparison = compare(out, lse, *oracle.mla_verify(**arguments), tolerance(dtype, out.dtype.name))
    assert comparison.passed, comparison
    assert {kind: conflicts for kind, (_, conflicts) in report.bank.items() if conflicts} == {}


def check(arguments: dict[str, Any], splits: int = 1, **how: Any) -> tuple[Any, Report]:
    """Run the kernel and hold it against the oracle."""
    out, lse, report = run(arguments, splits, **how)
    expect(arguments, out, lse, report)
    return out, report


QUICK = {
    "causal": case(),
    "one tile": case(kv_lens=(5,), q_lens=(3,)),
    "two tiles": case(kv_lens=(32,), q_lens=(3,)),
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
    check(build(QUICK[name], seed=1), splits, seed=splits)


@pytest.mark.parametrize("constants", [{"lookahead": 1}, {"shared_steps": 0}, {"shared_steps": 3}])
def test_other_constants(constants: dict[str, int]) -> None:
    check(build(QUICK["tree"], 2), 2, **constants)


def test_eight_stages() -> None:
    """More shared memory than an sm_120 has."""
    case_ = build(QUICK["tree"], 2)
    reports: list[Report] = []
    config = replace(ROWS_64_ROLES, stages=8, nsplit=1)
    out, lse = emulator.mla_verify(**case_, tiles=config, reports=reports, budget="sm_90")
    expect(case_, out, lse, reports[0])


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("dtype", "out_dtype"), [("bfloat16", "float32"), ("float16", "float32")])
def test_output_types(dtype: str, out_dtype: str, splits: int) -> None:
    check(build(case(dtype=dtype), 3), splits, out_dtype=out_dtype)


def test_more_splits_than_tiles() -> None:
    check(build(case(kv_lens=(33,)), 4), 17)


def test_padding_behind_the_last_request_is_empty() -> None:
    arguments = build(case(q_lens=(2, 3), kv_lens=(20, 30)), 5)
    arguments["qo_indptr"] = np.array([0, 2, 3], np.int32)
    for splits in (1, 2):
        out, lse, _ = run(arguments, splits)
        assert (out[3:] == 0).all()
        assert (lse[3:] == -np.inf).all()


def test_tail_shorter_than_the_draft() -> None:
    """A cache that holds a part of the tree: the mask's columns belong to fewer tokens than there are queries."""
    arguments = build(case(q_lens=(8, 8), kv_lens=(50, 3), mask="dense"), 6)
    arguments["tail_lens"] = np.array([3, 5], np.int32)
    check(arguments)


@pytest.mark.parametrize("splits", [1, 5])
def test_mask_of_more_than_one_word(splits: int) -> None:
    """Some splits begin among the mask's columns."""
    check(build(case(q_lens=(70,), heads=2, kv_lens=(111,), mask="dense"), 7), splits)


def test_maxima_that_keep_rising() -> None:
    """Every tile moves the bases, so the output is rescaled each time."""
    arguments = build(case(kv_lens=(160,), addressing="dense", page_size=160), 3)
    rows = arguments["kv_cache"].reshape(-1, 576)
    rows[:160] *= np.linspace(0.1, 4.0, 160, dtype=np.float32)[:, None].astype(rows.dtype)
    check(arguments)


def test_token_that_no_row_sees_may_hold_anything() -> None:
    """NaN in a draft token that is masked for every row, which the scores' mask alone would not keep out."""
    arguments = build(case(q_lens=(4,), kv_lens=(40,), page_size=1), 10)
    dense = np.tri(4, dtype=np.bool_)
    dense[:, 2] = False
    arguments["mask"] = TreeMask.from_dense([dense])
    arguments["kv_cache"].reshape(-1, 576)[arguments["kv_indices"][38]] = np.nan
    assert np.isfinite(check(arguments)[0].astype(np.float32)).all()


def test_kv_is_read_once_for_each_row_tile() -> None:
    heads, q_len, kv_len = 8, 20, 150
    arguments = build(case(q_lens=(q_len,), kv_lens=(kv_len,), heads=heads), 11)
    last_rows = [min(first + 64, q_len * heads) - 1 for first in range(0, q_len * heads, 64)]
    visible = sum(kv_len - q_len + row // heads + 1 for row in last_rows)
    for splits in (1, 4):
        assert check(arguments, splits)[1].bytes_read["kv_cache"] == visible * TOKEN_BYTES


# --- a list of work made on the device -----------------------------------------------------------------------------


def make_plan(arguments: dict[str, Any], fields: Case, **extra: Any) -> emulator.VerifyPlan:
    """Make and update a plan that a case fits."""
    mask = fields.mask if fields.mask in ("causal", "none") else "tree"
    plan = emulator.VerifyPlan(
        num_heads=fields.heads,
        max_batch=len(fields.q_lens),
        max_q_len=max(fields.q_lens),
        max_kv_len=max(fields.kv_lens),
        page_size=fields.page_size,
        sm_scale=fields.sm_scale,
        q_dtype=fields.dtype,
        id_dtype=fields.id_dtype,
        mask=mask,
        new_kv=fields.new_kv,
        split_kv=fields.paired,
        logit_cap=fields.logit_cap,
        **({"tiles": ROWS_64_ROLES, "num_sms": 6} | extra),
    )
    names = ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices", "tail_lens", *(("mask",) if mask == "tree" else ()))
    plan.update(**{name: arguments[name] for name in names if arguments.get(name) is not None}, validate=True)
    return plan


PLANNED = {
    "causal": case(q_lens=(8, 3), kv_lens=(300, 77)),
    "several items a block": case(q_lens=(8, 9, 8, 1), kv_lens=(40, 20, 33, 70), page_size=16),
    "more row tiles than blocks": case(q_lens=(40, 0, 30), kv_lens=(90, 20, 64), mask="tree"),
    "empty items": case(q_lens=(3, 9, 8), kv_lens=(0, 0, 200), heads=12),
    "new_kv, pair": case(q_lens=(8, 2), kv_lens=(150, 31), new_kv=True, paired=True, id_dtype="int64", mask="tree"),
    "soft-cap, float16": case(q_lens=(8, 5), kv_lens=(130, 200), logit_cap=30.0, mask="none", dtype="float16"),
}


@pytest.mark.parametrize("num_sms", [1, 6])
@pytest.mark.parametrize("name", PLANNED)
def test_plans_result_is_the_oracles(name: str, num_sms: int) -> None:
    arguments = build(PLANNED[name], seed=num_sms)
    plan = make_plan(arguments, PLANNED[name], num_sms=num_sms)
    out, lse = plan.run(arguments["q"], arguments["kv_cache"], new_kv=arguments.get("new_kv"))
    expect(arguments, out, lse, plan.reports[-2])


def test_plan_reads_kv_once_for_each_row_tile() -> None:
    fields = case(q_lens=(8, 8), kv_lens=(300, 90), mask="none")
    arguments = build(fields, 3)
    plan = make_plan(arguments, fields)
    plan.run(arguments["q"], arguments["kv_cache"])
    assert plan.reports[-2].bytes_read["kv_cache"] == sum(fields.kv_lens) * TOKEN_BYTES


def test_plan_has_no_race_in_any_order() -> None:
    fields = PLANNED["several items a block"]
    arguments = build(fields, 4)
    plan = make_plan(arguments, fields, num_sms=2)
    results = set()
    for seed in range(4):
        plan.seed = seed
        results.add(plan.run(arguments["q"], arguments["kv_cache"])[0].tobytes())
    assert len(results) == 1


# --- order ---------------------------------------------------------------------------------------------------------


# One seed of the emulator is one order of threads and of landing copies; a race in any of them fails the run.
@pytest.mark.parametrize("seeds", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_no_race_in_any_order(seeds: int) -> None:
    arguments = build(case(mask="tree", kv_lens=(150,), new_kv=True), 13)
    assert len({run(arguments, seed=seed)[0].tobytes() for seed in range(seeds)}) == 1


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
    check(build(problem, seed), int(rng.choice([1, 2, 3, 5, 17])), seed=seed, lookahead=int(rng.choice([1, 2])))


def test_config_offers_what_a_kernel_config_does() -> None:
    assert isinstance(ROWS_64_ROLES, KernelConfig)
    assert isinstance(ROWS_64_ROLES, MmaConfig)
    assert ROWS_64_ROLES.shared_bytes() <= 101_376


@pytest.mark.parametrize("constants", [{"stages": 3}, {"shared_steps": 10}, {"lookahead": 3}, {"row_tiles": 3}])
def test_constants_that_are_not_built_are_refused(constants: dict[str, int]) -> None:
    with pytest.raises(TileError, match=next(iter(constants))):
        MmaRolesConfig(**constants)


def test_no_split_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="nsplit is 0"):
        MmaRolesConfig(nsplit=0)


FEATURES = [feature_defines(cap, new, split) for cap in (0.0, 30.0) for new in (False, True) for split in (False, True)]
TYPES = [("bfloat16", "bfloat16", "bfloat16"), ("float16", "float32", "float16"), ("bfloat16", "float32", "float32")]


def assert_no_spill(defines: dict[str, int], arch: str) -> None:
    compiled = compile_kernel("mma_roles", defines, arch)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0), defines


@pytest.mark.parametrize("planned", [{}, {"PLANNED_ROWS": 64}], ids=["grid", "planned"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_nothing_spills(arch: str, planned: dict[str, int]) -> None:
    pytest.importorskip("cupy")
    assert_no_spill(dtype_defines(*TYPES[0]) | ROWS_64_ROLES.defines() | FEATURES[0] | planned, arch)


@pytest.mark.slow
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("planned", [{}, {"PLANNED_ROWS": 64}], ids=["grid", "planned"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_nothing_spills_with_any_feature(arch: str, planned: dict[str, int], types: tuple[str, str, str]) -> None:
    pytest.importorskip("cupy")
    for features in FEATURES:
        assert_no_spill(dtype_defines(*types) | ROWS_64_ROLES.defines() | features | planned, arch)
