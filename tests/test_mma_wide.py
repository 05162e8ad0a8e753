"""The `mma_wide` kernel on the emulator against the oracle: numbers, bytes, bank conflicts, races, barriers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlaflash import oracle
from mlaflash.attention import output_views
from mlaflash.emulator import Report, run_kernel
from mlaflash.errors import EmulatorError, InvalidArgumentError, TileError
from mlaflash.interop import numpy_view
from mlaflash.jit import sources
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
        | feature_defines(problem.logit_cap, problem.new_kv is not None),
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
    arrays = {view.name: view.array for view in problem.views()} | {view.name: view.array for view in views} | workspaces
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
    return Case(**{"name": "wide", "q_lens": (8,), "kv_lens": (203,), "heads": 8, "sm_scale": KIMI} | fields)
