"""Faults of a GPU: memory that is not there, a launch that fails between two, a context that is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_cases import expect

from mlaflash import LaunchError, TreeMask, VerifyPlan, mla_verify
from mlaflash.jit.launch import PreparedLaunch
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.plan_inputs import plan_arguments
from mlaflash.mma_tiles import NARROW

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The pynvml package:FutureWarning")]

CASE = Case(name="faults", q_lens=(3, 9), kv_lens=(3000, 470), heads=8, sm_scale=0.14468, page_size=16, mask="tree")
NAMES = ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices", "mask")


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    import cupy

    there = {name: cupy.asarray(array) if hasattr(array, "shape") else array for name, array in arguments.items()}
    return there | {"mask": TreeMask(cupy.asarray(arguments["mask"].words), arguments["mask"].max_q)}


def step(plan: VerifyPlan, there: dict[str, Any]) -> tuple[Any, Any]:
    plan.update(**{name: there[name] for name in NAMES})
    return plan.run(there["q"], there["kv_cache"])


def host(result: tuple[Any, Any]) -> tuple[Any, Any]:
    return result[0].get(), result[1].get()


@pytest.fixture
def pool() -> Iterator[Any]:
    """Give CuPy a pool of its own, which forgets its limit at the end."""
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        yield pool
    cupy.cuda.Device().synchronize()


def test_memory_that_is_not_there_for_a_plan_leaves_nothing_behind(pool: Any) -> None:
    arguments = build(CASE, 1)
    there = on_gpu(arguments)
    size = VerifyPlan(**plan_arguments(CASE, tiles=NARROW)).workspace_bytes
    used = pool.used_bytes()
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + size - 1)
    for _ in range(3):
        with pytest.raises(MemoryError):
            VerifyPlan(**plan_arguments(CASE, tiles=NARROW))
        assert pool.used_bytes() == used
    pool.set_limit(size=0)
    expect(host(step(VerifyPlan(**plan_arguments(CASE, tiles=NARROW)), there)), arguments)


@pytest.mark.parametrize("how", ["plan", "call"])
def test_memory_that_is_not_there_for_the_results(how: str, pool: Any) -> None:
    arguments = build(CASE, 2)
    there = on_gpu(arguments)
    plan = VerifyPlan(**plan_arguments(CASE, tiles=NARROW))
    tiles = replace(NARROW, nsplit=3)

    def call() -> tuple[Any, Any]:
        return step(plan, there) if how == "plan" else mla_verify(**there, tiles=tiles)

    for _ in range(2):  # the first call of its kind, and one that is known
        pool.free_all_blocks()
        used = pool.used_bytes()
        pool.set_limit(size=pool.total_bytes() + 512)
        with pytest.raises(MemoryError):
            call()
        assert pool.used_bytes() == used
        pool.set_limit(size=0)
        expect(host(call()), arguments)


@pytest.mark.parametrize("how", ["plan", "call"])
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_a_step_after_one_that_failed_between_its_launches(
    how: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    arguments = build(CASE, 3)
    there = on_gpu(arguments)
    plan = VerifyPlan(**plan_arguments(CASE, tiles=NARROW))
    tiles = replace(NARROW, nsplit=3)
    out, lse = cupy.empty((12, 8, 512), arguments["q"].dtype), cupy.empty((12, 8), np.float32)
    merge = "combine_planned" if how == "plan" else "combine"
    launch = PreparedLaunch.launch
    failed: list[str] = []

    def fail(self: PreparedLaunch, stream: int) -> None:
        if self.kernel.compiled.kernel == merge:
            failed.append(merge)
            raise LaunchError("the driver refused")
        launch(self, stream)

    def call() -> None:
        if how == "plan":
            plan.update(**{name: there[name] for name in NAMES})
            plan.run(there["q"], there["kv_cache"], out=out, lse=lse)
        else:
            mla_verify(**there, tiles=tiles, out=out, lse=lse)

    if known:
        call()
    with monkeypatch.context() as patch:
        patch.setattr(PreparedLaunch, "launch", fail)
        for _ in range(2):
            with pytest.raises(LaunchError, match="the driver refused"):
                call()
    assert failed == [merge, merge]
    lse.fill(np.nan)
    call()
    expect((out.get(), lse.get()), arguments)


# A process of its own: there is no way back. Each call is made twice, and nothing may come but the one error.
LOST = """
import os, sys
sys.path.insert(0, "tests")
import cupy
import mlaflash
from mlaflash.lab.inputs import build
from mlaflash.lab.plan_inputs import plan_arguments
from mlaflash.mma_tiles import NARROW, ROWS_32
from test_faults_gpu import CASE, NAMES, on_gpu, step

there = on_gpu(build(CASE, 4))
packed = mlaflash.MaskSource.from_packed(there["mask"].words)
plan = mlaflash.VerifyPlan(**plan_arguments(CASE, tiles=NARROW))
step(plan, there)
mlaflash.mla_verify(**there, tiles=NARROW)
mover = mlaflash.kv.RowMover([there["kv_cache"].reshape(-1, 576)])
ids = cupy.arange(4, dtype="int32")
mover.move(ids, ids)
stream = cupy.cuda.Stream(non_blocking=True)
source = {"trap": "asm volatile(\\"trap;\\");", "address": "*(volatile int*)1024 = 1;"}[sys.argv[1]]
bad = cupy.RawKernel('extern "C" __global__ void bad() { ' + source + ' }', "bad")
cupy.cuda.Device().synchronize()
bad((1,), (1,), ())
try:
    cupy.cuda.Device().synchronize()
    print("the kernel did not fail")
except cupy.cuda.runtime.CUDARuntimeError:
    pass
update = {name: there[name] for name in NAMES}
calls = {
    "run": lambda: plan.run(there["q"], there["kv_cache"]),
    "update": lambda: plan.update(**update),
    "known call": lambda: mlaflash.mla_verify(**there, tiles=NARROW),
    "call on a stream": lambda: mlaflash.mla_verify(**there, tiles=NARROW, stream=stream),
    "checked call": lambda: mlaflash.mla_verify(**there, tiles=NARROW, validate=True),
    "kernel that is not loaded": lambda: mlaflash.mla_verify(**there, tiles=ROWS_32),
    "mask": lambda: mlaflash.pack_mask(packed, 12, 9, qo_indptr=there["qo_indptr"]),
    "move": lambda: mover.move(ids, ids),
}
for name, call in calls.items():
    for _ in range(2):
        try:
            call()
            print(name, "went through")
        except mlaflash.ContextLostError as error:
            if "start the process again" not in str(error):
                print(name, error)
        except BaseException as error:
            print(name, type(error), error)
print("end")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("how", ["trap", "address"])
def test_after_a_kernel_that_broke_the_context_every_call_says_so(how: str) -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOST, how], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "end\n", done.stdout + done.stderr
