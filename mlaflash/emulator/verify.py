"""The verify call, and the sparse one, on NumPy arrays, by the GPU's own kernels on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlaflash.attention import output_views
from mlaflash.checks import flag
from mlaflash.device import Device
from mlaflash.emulator.run import Report, run_kernel
from mlaflash.interop import ArrayView, numpy_view
from mlaflash.masks import TreeMask
from mlaflash.params import numpy_dtype
from mlaflash.problem import Problem
from mlaflash.schedule import Schedule, build_params, plan
from mlaflash.tiles import KernelConfig

DEFAULT_ARCH = "sm_120"


def mla_verify(
    q: Any,
    kv_cache: Any,
    *,
    sm_scale: float,
    kv_lens: Any,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    block_table: Any = None,
    page_size: int | None = None,
    qo_indptr: Any = None,
    mask: str | TreeMask = "causal",
    tail_lens: Any = None,
    new_kv: Any = None,
    kv_dtype: Any = None,
    kv_scale: Any = 1.0,
    logit_cap: float = 0.0,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    lse_base: str = "e",
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    kernel: str | None = None,
    tiles: KernelConfig | None = None,
    deterministic: bool = False,
    budget: str | None = None,
    validate: bool = True,
    seed: int = 0,
    reports: list[Report] | None = None,
) -> tuple[Any, Any]:
    """Run `mlaflash.mla_verify` on NumPy arrays: the same kernels, checked at every access, slowly.

    Parameters
    ----------
    q, kv_cache, ...
        As in `mlaflash.mla_verify`; bfloat16 is that of `ml_dtypes`.
    budget : str, optional
        Architecture whose limits apply; ``"sm_120"`` by default.
    validate : bool
        As in `mlaflash.mla_verify`, but on by default: here it costs nothing that matters.
    seed : int
        Of the order in which threads, warps and asynchronous copies take their turns.
    reports : list, optional
        A `Report` of each launch is appended: bytes read from each array, bank conflicts and more.

    Returns
    -------
    out, lse : numpy.ndarray
        As in `mlaflash.mla_verify`.

    Raises
    ------
    EmulatorError
        A kernel did something that is wrong on a GPU: a race, an access out of bounds, a deadlock.
    MlaFlashError
        As in `mlaflash.mla_verify`; there is no GPU to miss.
    """
    problem = Problem.from_arrays(
        numpy_view,
        q,
        kv_cache,
        sm_scale=sm_scale,
        kv_lens=kv_lens,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        block_table=block_table,
        page_size=page_size,
        qo_indptr=qo_indptr,
        mask=mask,
        tail_lens=tail_lens,
        new_kv=new_kv,
        kv_dtype=kv_dtype,
        kv_scale=kv_scale,
        logit_cap=logit_cap,
        out_dtype=getattr(out, "dtype", None) if out_dtype is None else out_dtype,
        lse_base=lse_base,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
    )
    choice = {"kernel": kernel, "tiles": tiles, "deterministic": deterministic}
    return _solve(problem, out, lse, choice, budget, validate, seed, reports)


def mla_sparse(
    q: Any,
    kv_cache: Any,
    indices: Any,
    *,
    sm_scale: float,
    topk_lens: Any = None,
    kv_dtype: Any = None,
    kv_scale: Any = 1.0,
    logit_cap: float = 0.0,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    lse_base: str = "e",
    kernel: str | None = None,
    tiles: KernelConfig | None = None,
    budget: str | None = None,
    validate: bool = True,
    seed: int = 0,
    reports: list[Report] | None = None,
) -> tuple[Any, Any]:
    """Run `mlaflash.mla_sparse` on NumPy arrays: the same kernels, checked at every access, slowly.

    Parameters
    ----------
    q, kv_cache, indices, ...
        As in `mlaflash.mla_sparse`; bfloat16 is that of `ml_dtypes`.
    budget, validate, seed, reports
        As in `mla_verify`.

    Returns
    -------
    out, lse : numpy.ndarray
        As in `mlaflash.mla_sparse`.

    Raises
    ------
    EmulatorError, MlaFlashError
        As in `mla_verify`.
    """
    problem = Problem.from_lists(
        numpy_view,
        q,
        kv_cache,
        indices=indices,
        sm_scale=sm_scale,
        topk_lens=topk_lens,
        kv_dtype=kv_dtype,
        kv_scale=kv_scale,
        logit_cap=logit_cap,
        out_dtype=getattr(out, "dtype", None) if out_dtype is None else out_dtype,
        lse_base=lse_base,
    )
    return _solve(problem, out, lse, {"kernel": kernel, "tiles": tiles}, budget, validate, seed, reports)


def _solve(
    problem: Problem,
    out: Any,
    lse: Any,
    choice: dict[str, Any],
    budget: str | None,
    validate: bool,
    seed: int,
    reports: list[Report] | None,
) -> tuple[Any, Any]:
    if flag("validate", validate):
        problem.validate()
    schedule = plan(problem, Device.for_arch(DEFAULT_ARCH if budget is None else budget), **choice)
    # NaN: what a kernel forgets to write cannot pass for a result.
    if out is None:
        out = np.full(problem.out_shape, np.nan, numpy_dtype(problem.out_dtype))
    if lse is None:
        lse = np.full(problem.out_shape[:-1], np.nan, np.float32)
    views = output_views(numpy_view, problem, out, lse)
    if not problem.is_empty:
        launched = _run(problem, schedule, views, seed)
        if reports is not None:
            reports.extend(launched)
    return out, lse


def _run(problem: Problem, schedule: Schedule, outputs: tuple[ArrayView, ArrayView], seed: int) -> list[Report]:
    workspaces = {w.name: np.full(w.shape, np.nan, numpy_dtype(w.dtype)) for w in schedule.workspaces}
    if problem.is_dense:
        workspaces["page_ids"] = np.arange(problem.batch, dtype=np.int32)
    pointers = {name: array.ctypes.data for name, array in workspaces.items()}
    params = build_params(problem, schedule, *outputs, pointers)
    arrays = _arrays(problem) | {view.name: view.array for view in outputs} | workspaces
    return [
        run_kernel(
            step.kernel,
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


def _arrays(problem: Problem) -> dict[str, np.ndarray[Any, Any]]:
    """Name every array that a kernel may read: an access anywhere else is an error."""
    return {view.name: view.array for view in problem.inputs}
