"""Eight threads on one GPU, each with a stream and a plan, or with calls, of its own."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from plan_cases import expect

from mlaflash import TreeMask, VerifyPlan, mla_verify
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.plan_inputs import plan_arguments
from mlaflash.mma_tiles import NARROW, ROWS_64_ROLES

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The pynvml package:FutureWarning")]

THREADS, STEPS = 8, 20
CASE = Case(name="threads", q_lens=(3, 9), kv_lens=(3000, 470), heads=8, sm_scale=0.14468, page_size=16, mask="tree")
NAMES = ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices", "mask")


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    import cupy

    there = {name: cupy.asarray(array) if hasattr(array, "shape") else array for name, array in arguments.items()}
    return there | {"mask": TreeMask(cupy.asarray(arguments["mask"].words), arguments["mask"].max_q)}


@pytest.mark.parametrize("how", ["plans", "calls"])
def test_eight_threads_with_streams_of_their_own(how: str) -> None:
    cupy = pytest.importorskip("cupy")
    failures: list[BaseException] = []
    start = threading.Barrier(THREADS)

    def work(number: int) -> None:
        try:
            tiles = (NARROW, ROWS_64_ROLES)[number % 2]
            with cupy.cuda.Stream(non_blocking=True) as stream:
                plan = VerifyPlan(**plan_arguments(CASE, tiles=tiles)) if how == "plans" else None
                start.wait(120)
                for step in range(STEPS):
                    mine = build(replace(CASE, kv_lens=(3000 - 100 * step, 470)), 100 * number + step)
                    there = on_gpu(mine)
                    if plan is None:
                        out, lse = mla_verify(**there, tiles=tiles)
                    else:
                        plan.update(**{name: there[name] for name in NAMES})
                        out, lse = plan.run(there["q"], there["kv_cache"])
                    expect((out.get(stream), lse.get(stream)), mine)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
