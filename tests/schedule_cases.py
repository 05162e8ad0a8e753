"""One or more calls of every kernel on the emulator, whose result must not depend on the order of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlaflash import emulator
from mlaflash.distributed import transposing
from mlaflash.emulator import distributed as emulated_distributed
from mlaflash.emulator import kv as emulated_kv
from mlaflash.emulator import mask as emulated_mask
from mlaflash.emulator import plan as emulated_plan
from mlaflash.emulator import run_kernel
from mlaflash.emulator import verify as emulated_verify
from mlaflash.interop import numpy_view
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.mask_inputs import Batch, encode
from mlaflash.lab.move_inputs import ids, random_layers
from mlaflash.lab.plan_inputs import plan_arguments
from mlaflash.lab.target import call_name
from mlaflash.mma_tiles import (
    NARROW,
    NARROW_32,
    NARROW_32_E4M3,
    NARROW_DS_MLA,
    NARROW_E4M3,
    NARROW_PAIR,
    ROLES_32_E4M3,
    ROLES_E4M3,
    ROWS_32,
    ROWS_64,
    ROWS_64_ROLES,
    MmaNarrowConfig,
)
from mlaflash.problem import query_rows
from mlaflash.tiles import KernelConfig, NaiveConfig, TileConfig

Scenario = Callable[[int], bytes]

BASE = Case(name="order", q_lens=(8, 1), kv_lens=(190, 17), heads=8, sm_scale=0.14468, page_size=16, mask="tree")
SMALL = replace(BASE, q_lens=(3,), kv_lens=(37,), heads=3, dtype="float32")
LISTS = Case(name="lists", q_lens=(2,), kv_lens=(150,), heads=8, sm_scale=0.14468, mask="none", topk=100)


def verify(case: Case, config: KernelConfig | None, *, splits: int | None = None, **options: Any) -> Scenario:
    """Make a scenario of a verify call, or of a sparse one."""
    arguments = build(case, 15)
    if config is not None:
        options |= {"kernel": config.kernel, "tiles": replace(config, **({"nsplit": splits} if splits else {}))}

    def run(seed: int) -> bytes:
        out, lse = getattr(emulator, call_name(arguments))(**arguments, **options, seed=seed)
        return bytes(out.tobytes() + lse.tobytes())

    return run


def planned(case: Case, config: Any, num_sms: int, **more: Any) -> Scenario:
    """Make a scenario of an update and a run of a plan."""
    arguments = build(case, 16)
    plan = emulator.VerifyPlan(**plan_arguments(case, tiles=config, num_sms=num_sms, kv_dtype=case.kv_dtype, **more))
    names = ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices")
    update = {name: arguments[name] for name in names} | (
        {"mask": arguments["mask"]} if not isinstance(arguments["mask"], str) else {}
    )
    given = {name: arguments[name] for name in ("q", "kv_cache", "new_kv", "kv_scale") if name in arguments}

    def run(seed: int) -> bytes:
        plan.seed = seed
        plan._memory[:] = 0xFF  # or what a run forgets would be there from the one before
        plan.update(**update)
        out, lse = plan.run(**given)
        return bytes(out.tobytes() + lse.tobytes())

    return run


def packed(name: str) -> Scenario:
    """Make a scenario of the mask kernel."""
    batch = Batch((9, 0, 40, 3), (5, 70, 33, 0), 3)
    case = encode(name, batch, 44)

    def run(seed: int) -> bytes:
        source = case.make(**case.arrays)
        mask = emulator.pack_mask(source, batch.num_tokens, 44, qo_indptr=batch.qo_indptr, seed=seed)
        return bytes(mask.words.tobytes())

    return run


def moving(name: str, size: int, group: int | None, width: int = 1152, layers: int = 2) -> Scenario:
    """Make a scenario of moves of rows."""
    rng = np.random.default_rng(3)
    src, dst = ids(name, size, rng)
    pool = random_layers((2 * size + 3, width), layers, rng)

    def run(seed: int) -> bytes:
        there = [layer.copy() for layer in pool]
        emulator.move_rows(there, src, dst, None, group, seed=seed)
        return b"".join(layer.tobytes() for layer in there)

    return run


def compacted(seed: int) -> bytes:
    rng = np.random.default_rng(4)
    q_lens = rng.integers(0, 9, 40)
    bounds = np.cumsum([0, *q_lens]).astype(np.int32)
    slots = rng.permutation(1000)[: bounds[-1]]
    index = np.sort(rng.integers(-1, bounds[-1], (40, 5)), 1)
    moves = emulator.plan_compact(slots, index, None, qo_indptr=bounds, seed=seed)
    return b"".join(np.asarray(array).tobytes() for array in (moves.src, moves.dst, moves.n))


def merged(seed: int) -> bytes:
    rng = np.random.default_rng(5)
    outs = rng.standard_normal((3, 5, 4, 512)).astype(np.float16)
    lses = rng.normal(10, 3, (3, 5, 4)).astype(np.float32)
    results = [*emulator.merge_partials(outs, lses, seed=seed)]
    results += [*emulator.correct_partial(outs[1].copy(), lses, 1, seed=seed)]
    return b"".join(array.tobytes() for array in results)


def transposed(seed: int) -> bytes:
    q = np.random.default_rng(6).standard_normal((5, 8, 576)).astype(np.float16)
    out = np.zeros((8, 5, 576), np.float16)
    step = transposing.build(query_rows(numpy_view, q), out.ctypes.data, 4, 4 * 5 * 1152)
    launch, arrays = step.launch, {"q": q, "out": out}
    emulated_verify.run_kernel(launch.kernel, {}, launch.grid, launch.block, 0, step.params, arrays, seed=seed)
    return bytes(out.tobytes())


FP8 = replace(BASE, kv_dtype="float8_e4m3", new_kv=True)
DS_MLA = replace(BASE, kv_dtype="fp8_ds_mla", new_kv=True, dtype="float16")
PLANNED = replace(BASE, q_lens=(8, 9, 8), kv_lens=(90, 20, 33))
MANY = replace(BASE, q_lens=(3, 0, 9, 2, 1), kv_lens=(301, 5, 200, 0, 40), mask="causal")

SCENARIOS: dict[str, dict[str, Callable[[], Scenario]]] = {
    "naive": {"call": lambda: verify(SMALL, NaiveConfig())},
    "tile": {
        "one split": lambda: verify(SMALL, TileConfig(ht=4, tk=8, nsplit=1)),
        "an empty split": lambda: verify(replace(SMALL, kv_lens=(9,)), TileConfig(ht=4, tk=8, nsplit=3)),
        "deterministic": lambda: verify(SMALL, None, deterministic=True),
    },
    "combine": {
        "few rows": lambda: verify(replace(SMALL, q_lens=(1,), heads=2), TileConfig(ht=2, tk=4, nsplit=9)),
        "many splits": lambda: verify(replace(BASE, q_lens=(1,), kv_lens=(150,)), NARROW, splits=40),
        "many rows": lambda: verify(replace(BASE, q_lens=(9,), kv_lens=(70,)), NARROW, splits=3),
        "deterministic": lambda: verify(replace(SMALL, kv_lens=(700,), heads=2), None, deterministic=True),
    },
    "mma_narrow": {
        "call": lambda: verify(BASE, NARROW, splits=1),
        "a pair": lambda: verify(replace(BASE, q_lens=(3, 1)), NARROW_PAIR, splits=1),
        "lists": lambda: verify(LISTS, NARROW, splits=1),
        "deterministic": lambda: verify(replace(BASE, q_lens=(2,), kv_lens=(300,)), None, deterministic=True),
        "plan": lambda: planned(PLANNED, NARROW, 1),
        "two row tiles": lambda: verify(replace(BASE, q_lens=(4, 3)), NARROW_32, splits=1),
        "two row tiles, new rows": lambda: verify(
            replace(BASE, q_lens=(4, 3), new_kv=True), MmaNarrowConfig(1, 3, 1, row_tiles=2), splits=1
        ),
        "plan, two row tiles": lambda: planned(PLANNED, NARROW_32, 1),
        "e4m3": lambda: verify(FP8, NARROW_E4M3, splits=1),
        "e4m3, two tiles a step": lambda: verify(FP8, MmaNarrowConfig(exchange_buffers=1, step_tiles=2), splits=1),
        "e4m3, two row tiles": lambda: verify(FP8, MmaNarrowConfig(exchange_buffers=1, row_tiles=2), splits=1),
        "e4m3 plan": lambda: planned(replace(PLANNED, kv_dtype="float8_e4m3", new_kv=True), NARROW_E4M3, 1),
        "e4m3 plan, two row tiles": lambda: planned(
            replace(PLANNED, kv_dtype="float8_e4m3", new_kv=True), NARROW_32_E4M3, 1
        ),
        "e4m3 lists": lambda: verify(replace(LISTS, kv_dtype="float8_e4m3"), NARROW_E4M3, splits=1),
        "e4m3, several tiles of new rows": lambda: verify(
            replace(FP8, q_lens=(70,), kv_lens=(90,), heads=1), NARROW_E4M3, splits=1
        ),
        "ds_mla": lambda: verify(DS_MLA, NARROW_DS_MLA, splits=1),
        "ds_mla lists": lambda: verify(replace(LISTS, kv_dtype="fp8_ds_mla"), NARROW_DS_MLA, splits=1),
    },
    "mma_wide": {
        "64": lambda: verify(BASE, ROWS_64, splits=1),
        "32": lambda: verify(BASE, ROWS_32, splits=1),
        "32, unmasked": lambda: verify(replace(BASE, q_lens=(4,), kv_lens=(350,), mask="none"), ROWS_32, splits=1),
        "lists": lambda: verify(LISTS, ROWS_32, splits=1),
        "plan": lambda: planned(PLANNED, ROWS_64, 1),
    },
    "mma_roles": {
        "call": lambda: verify(BASE, ROWS_64_ROLES, splits=1),
        "plan": lambda: planned(PLANNED, ROWS_64_ROLES, 1),
        "e4m3": lambda: verify(replace(FP8, new_kv=False), ROLES_E4M3, splits=1),
        "e4m3 pairs": lambda: verify(replace(FP8, new_kv=False, paired=True), ROLES_E4M3, splits=1),
        "e4m3 plan": lambda: planned(replace(PLANNED, kv_dtype="float8_e4m3"), ROLES_E4M3, 1),
        "e4m3, two groups": lambda: verify(replace(FP8, new_kv=False), ROLES_32_E4M3, splits=1),
        "e4m3 plan, two groups": lambda: planned(replace(PLANNED, kv_dtype="float8_e4m3"), ROLES_32_E4M3, 1),
    },
    "plan": {
        "few pieces": lambda: planned(MANY, NARROW, 2),
        "many pieces": lambda: planned(MANY, NARROW, 40),
    },
    "combine_planned": {
        "few pieces": lambda: planned(MANY, NARROW, 2),
        "pieces for several warps": lambda: planned(
            replace(MANY, q_lens=(8,), kv_lens=(1000,)), ROWS_64, 7, out_dtype="float32"
        ),
    },
    "mask": {
        name: (lambda name=name: packed(name))
        for name in (
            *("dense", "dense_flat", "parents", "parents_table", "retrieve", "packed"),
            *("flashinfer_little", "sglang_full", "sglang_qlen_only"),
        )
    },
    "merge": {"parts": lambda: merged},
    "transpose": {"q": lambda: transposed},
    "compact": {"plan": lambda: compacted},
    "move": {
        "staged": lambda: moving("cycles_of_three", 24, None),
        "short groups": lambda: moving("swaps", 400, 2),
        "long group": lambda: moving("one_cycle", 1500, None, width=256),
        "apart": lambda: moving("apart", 77, 1),
        "scratch": lambda: moving("one_cycle", 3100, None, width=128, layers=1),
        "bytes": lambda: moving("one_cycle", 24, None, width=37),
        "words": lambda: moving("one_cycle", 24, None, width=36),
    },
}


@contextmanager
def taken_from(kernel: str, path: Path | str, lane_races: bool) -> Iterator[None]:
    """Let the emulator take a kernel from another file, and look for races among the lanes of its warps."""

    def run_other(name: Any, defines: dict[str, int], *arguments: Any, **how: Any) -> Any:
        if name == kernel:
            name, defines = path, defines | ({"LANE_RACES": 1} if lane_races else {})
        return run_kernel(name, defines, *arguments, **how)

    with pytest.MonkeyPatch.context() as patch:
        for module in (emulated_plan, emulated_verify, emulated_kv, emulated_mask, emulated_distributed):
            patch.setattr(module, "run_kernel", run_other)
        yield
