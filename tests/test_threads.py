"""Plans and calls in several threads, and calls that fail half-way: right, refused, or usable again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plan_cases import expect

from mlaflash.emulator import VerifyPlan, mla_verify
from mlaflash.emulator import plan as emulated_plan
from mlaflash.emulator.plan import EmulatorBackend
from mlaflash.errors import BusyError, ContextLostError, InvalidArgumentError, LaunchError, ShapeError
from mlaflash.interop import numpy_view
from mlaflash.jit import kernel as kernel_module
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.plan_inputs import plan_arguments
from mlaflash.mma_tiles import NARROW

THREADS = 8
CASE = Case(name="threads", q_lens=(3, 1), kv_lens=(70, 33), heads=8, sm_scale=0.14468, page_size=16, mask="tree")
NAMES = ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices", "mask")


def make() -> VerifyPlan:
    return VerifyPlan(**plan_arguments(CASE, tiles=NARROW, num_sms=2))


def update(plan: VerifyPlan, arguments: dict[str, Any]) -> None:
    plan.update(**{name: arguments[name] for name in NAMES})


def run(plan: VerifyPlan, arguments: dict[str, Any]) -> tuple[Any, Any]:
    return plan.run(arguments["q"], arguments["kv_cache"])


def in_threads(work: Callable[[int], None]) -> None:
    """Start them together, and raise what the first of them raised."""
    start, failures = threading.Barrier(THREADS), []

    def begin(number: int) -> None:
        start.wait()
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


@pytest.fixture
def arguments() -> dict[str, Any]:
    return build(CASE, 0)


def test_eight_threads_with_a_plan_each() -> None:
    plans = [make() for _ in range(THREADS)]

    def work(number: int) -> None:
        for step in range(2):
            mine = build(CASE, 10 * number + step)
            update(plans[number], mine)
            expect(run(plans[number], mine), mine)

    in_threads(work)


def test_eight_threads_that_make_calls() -> None:
    def work(number: int) -> None:
        for step in range(2):
            mine = build(replace(CASE, kv_lens=(20 + number, 9)), 10 * number + step)
            expect(mla_verify(**mine, tiles=NARROW), mine)

    in_threads(work)


def test_a_plan_that_is_shared_under_a_lock() -> None:
    plan, lock = make(), threading.Lock()

    def work(number: int) -> None:
        mine = build(CASE, number)
        with lock:
            update(plan, mine)
            result = run(plan, mine)
        expect(result, mine)

    in_threads(work)


@pytest.mark.parametrize("inside", ["update", "run"])
def test_a_plan_that_another_thread_is_in_is_refused(
    inside: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make()
    update(plan, arguments)
    expected = run(plan, arguments)
    entered, leave = threading.Event(), threading.Event()
    run_kernel = emulated_plan.run_kernel

    def held(*given: Any, **how: Any) -> Any:
        if threading.current_thread() is other:
            entered.set()
            assert leave.wait(60)
        return run_kernel(*given, **how)

    monkeypatch.setattr(emulated_plan, "run_kernel", held)
    results: list[Any] = []

    def work() -> None:
        results.append((update if inside == "update" else run)(plan, arguments))

    other = threading.Thread(target=work)
    other.start()
    assert entered.wait(60)
    try:
        for call in (update, run):
            with pytest.raises(BusyError, match="another thread"):
                call(plan, arguments)
    finally:
        leave.set()
        other.join()
    assert len(results) == 1
    for result in [run(plan, arguments)] if inside == "update" else [*results, run(plan, arguments)]:
        for one, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(one, wanted)


# --- half-way ------------------------------------------------------------------------------------------------------


def test_no_memory_for_a_plan_is_an_error_and_the_next_one_is_made(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> Any:
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(EmulatorBackend, "memory", refuse)
        with pytest.raises(MemoryError):
            make()
    plan = make()
    update(plan, arguments)
    expect(run(plan, arguments), arguments)


def test_no_memory_for_the_results_leaves_a_plan_as_it_was(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> Any:
        raise MemoryError("out of memory")

    plan = make()
    update(plan, arguments)
    with monkeypatch.context() as patch:
        patch.setattr(EmulatorBackend, "results", refuse)
        with pytest.raises(MemoryError):
            run(plan, arguments)
    expect(run(plan, arguments), arguments)


def failing_at(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    run_kernel = emulated_plan.run_kernel

    def fail(name: Any, *given: Any, **how: Any) -> Any:
        if name == kernel:
            raise LaunchError("the driver refused")
        return run_kernel(name, *given, **how)

    monkeypatch.setattr(emulated_plan, "run_kernel", fail)


@pytest.mark.parametrize("kernel", ["mma_narrow", "combine_planned"])
def test_after_a_run_that_failed_the_same_run_is_right(
    kernel: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make()
    update(plan, arguments)
    for _ in range(2):  # the first run of a layout, and one that is known
        with monkeypatch.context() as patch:
            failing_at(patch, kernel)
            with pytest.raises(LaunchError):
                run(plan, arguments)
        expect(run(plan, arguments), arguments)


def test_after_an_update_that_failed_there_is_no_step(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask and the ids of one step, and the schedule of another, are none."""
    plan, others = make(), build(CASE, 1)
    update(plan, arguments)
    for kernel in ("plan", "copy"):
        with monkeypatch.context() as patch:
            if kernel == "plan":
                failing_at(patch, kernel)
            else:
                patch.setattr(EmulatorBackend, "copy", lambda *given: (_ for _ in ()).throw(LaunchError("refused")))
            with pytest.raises(LaunchError):
                update(plan, others)
        with pytest.raises(InvalidArgumentError, match=r"call update\(\) first"):
            run(plan, others)
        update(plan, others)
        expect(run(plan, others), others)


def test_a_copy_that_cuda_refuses_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("cupy").cuda.runtime
    from mlaflash.plan_gpu import GpuBackend

    view = numpy_view("block_table", np.zeros((2, 4), np.int32))
    for status, kind, said in (
        (1, LaunchError, "refused to copy block_table"),
        (700, ContextLostError, "start the process again"),
    ):

        def refuse(*given: Any, status: int = status) -> None:
            raise runtime.CUDARuntimeError(status)

        for name in ("memcpyAsync", "memcpy2DAsync"):
            monkeypatch.setattr(runtime, name, refuse)
        for rows in (1, 2):
            with pytest.raises(kind, match=said):
                GpuBackend.copy(object(), 0, view, 16, rows, 16, SimpleNamespace(ptr=0))


@pytest.mark.parametrize("wrong", [{"mask": "causal"}, {"kv_lens": np.zeros(9, np.int32)}, {"kv_indices": None}])
def test_after_an_update_that_was_refused_the_step_before_is_in_force(
    wrong: dict[str, Any], arguments: dict[str, Any]
) -> None:
    plan = make()
    update(plan, arguments)
    with pytest.raises((InvalidArgumentError, ShapeError)):
        update(plan, build(CASE, 1) | wrong)
    expect(run(plan, arguments), arguments)


def test_a_call_that_failed_between_its_launches_is_right_the_next_time(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlaflash.emulator import verify as emulated_verify

    run_kernel, tiles = emulated_verify.run_kernel, replace(NARROW, nsplit=3)

    def fail(name: Any, *given: Any, **how: Any) -> Any:
        if name == "combine":
            raise LaunchError("the driver refused")
        return run_kernel(name, *given, **how)

    out = np.full((4, 8, 512), np.nan, arguments["q"].dtype)
    lse = np.full((4, 8), np.nan, np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(emulated_verify, "run_kernel", fail)
        with pytest.raises(LaunchError):
            mla_verify(**arguments, tiles=tiles, out=out, lse=lse)
    assert np.isnan(lse).all()
    mla_verify(**arguments, tiles=tiles, out=out, lse=lse)
    expect((out, lse), arguments)


def test_two_threads_never_lower_the_shared_memory_that_a_function_may_have() -> None:
    class Driver:
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
        limit = 48_000
        most = 0

        def funcGetAttribute(self, number: int, function: int) -> int:
            found = self.limit
            pause.wait(0.0005)  # lets the others in
            return found

        def funcSetAttribute(self, number: int, function: int, value: int) -> None:
            self.limit = value

    pause, driver = threading.Event(), Driver()

    class Bare(kernel_module.Kernel):
        def __init__(self, number: int) -> None:
            self._driver, self._function, self._dynamic_limit = driver, Function(), 0
            self._allow(50_000 + 1000 * number)

    class Function:
        ptr = 0

    in_threads(lambda number: Bare(number) and None)
    assert driver.limit == 50_000 + 1000 * (THREADS - 1)
