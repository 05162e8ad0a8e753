"""The `mma_roles` kernel on the emulator against the oracle: numbers, bytes, bank conflicts, races, barriers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlaflash import emulator, oracle
from mlaflash.emulator import Report
from mlaflash.errors import TileError
from mlaflash.jit.compiler import compile_kernel
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.masks import TreeMask
from mlaflash.mma_tiles import ROLES, MmaConfig, MmaRolesConfig, feature_defines
from mlaflash.tiles import KernelConfig, dtype_defines

KIMI = 0.14468
TOKEN_BYTES = 576 * 2


def case(**fields: Any) -> Case:
    """Make a `Case` with the fields that a test does not care about."""
    defaults: dict[str, Any] = {"name": "roles", "q_lens": (8,), "kv_lens": (203,), "heads": 8, "sm_scale": KIMI}
    return Case(**(defaults | fields))


def run(arguments: dict[str, Any], splits: int = 1, *, seed: int = 0, lookahead: int = 1) -> tuple[Any, Any, Report]:
    """Run the kernel, and the merge of its splits."""
    reports: list[Report] = []
    config = MmaRolesConfig(nsplit=splits, lookahead=lookahead)
    out, lse = emulator.mla_verify(**arguments, tiles=config, seed=seed, reports=reports)
    return out, lse, reports[0]


def check(arguments: dict[str, Any], splits: int = 1, **how: Any) -> tuple[Any, Report]:
    """Run the kernel and compare with the oracle; no bank conflict is allowed."""
    out, lse, report = run(arguments, splits, **how)
    q = arguments["q"]
    dtype = (q[0] if isinstance(q, tuple) else q).dtype.name
    comparison = compare(out, lse, *oracle.mla_verify(**arguments), tolerance(dtype, out.dtype.name))
    assert comparison.passed, comparison
    assert {kind: conflicts for kind, (_, conflicts) in report.bank.items() if conflicts} == {}
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


def test_operands_two_ahead() -> None:
    check(build(QUICK["tree"], 2), 2, lookahead=2)


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
    assert isinstance(ROLES, KernelConfig)
    assert isinstance(ROLES, MmaConfig)
    assert ROLES.shared_bytes() <= 101_376


@pytest.mark.parametrize("constants", [{"stages": 3}, {"shared_steps": 6}, {"lookahead": 3}])
def test_constants_that_are_not_built_are_refused(constants: dict[str, int]) -> None:
    with pytest.raises(TileError, match=next(iter(constants))):
        MmaRolesConfig(**constants)


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_nothing_spills(arch: str) -> None:
    pytest.importorskip("cupy")
    defines = dtype_defines("bfloat16", "bfloat16", "bfloat16") | ROLES.defines() | feature_defines(0.0, False, False)
    compiled = compile_kernel("mma_roles", defines, arch)
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)
