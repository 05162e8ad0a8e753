"""Verify steps on the GPU, checked and timed: one step, or one candidate of a search."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from mlaflash.device import Device, apply_budget
from mlaflash.errors import LaunchError
from mlaflash.jit import compile_cached
from mlaflash.lab.compare import Comparison, compare, tolerance
from mlaflash.lab.sweep import FIRST_SAMPLES
from mlaflash.lab.target import build_all
from mlaflash.lab.timing import Timing, measure, measure_host
from mlaflash.lab.workload import Expected, Workload, stored_block
from mlaflash.masks import TreeMask
from mlaflash.params import DL, D
from mlaflash.problem import Problem
from mlaflash.schedule import Launch, Schedule, plan
from mlaflash.shape import VerifyShape
from mlaflash.tiles import KernelConfig


@dataclass(frozen=True, slots=True)
class Step:
    """One verify step to time.

    Attributes
    ----------
    shape : VerifyShape
    kv_lens : tuple of int
        Of each request.
    kernel : str or None
    config : KernelConfig or None
        Constants; None has them chosen as a call does.
    """

    shape: VerifyShape
    kv_lens: tuple[int, ...]
    kernel: str | None = None
    config: KernelConfig | None = None

    @property
    def problem(self) -> dict[str, Any]:
        """What records hold of it, without the choice of a kernel; lengths that are all alike as one."""
        lens = self.kv_lens[:1] if len(set(self.kv_lens)) == 1 else self.kv_lens
        return asdict(self.shape) | {"kv_lens": list(lens)}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a runner found out about a step.

    Attributes
    ----------
    schedule : Schedule
    timing : Timing
        Of the call's launches, from a cold level-2 cache.
    graph : Timing
        Of a CUDA graph of them, likewise.
    host_us : float
        Time for which a call of `mla_verify` like one before keeps the host; see `mlaflash.lab.timing.measure_host`.
    out, lse : numpy.ndarray, shapes (T, H, 512) and (T, H)
    """

    schedule: Schedule
    timing: Timing
    graph: Timing
    host_us: float
    out: np.ndarray[Any, Any]
    lse: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of trying a step.

    Attributes
    ----------
    timing : Timing
    out, lse : numpy.ndarray, shapes (T, H, 512) and (T, H)
    """

    timing: Timing
    out: np.ndarray[Any, Any]
    lse: np.ndarray[Any, Any]


class Runner(Protocol):
    """What steps are timed with.

    Attributes
    ----------
    device : Device
        The GPU, with the limits of a budget where there is one.
    """

    device: Device

    def build(self, launches: Iterable[Launch], progress: Callable[[str, int, int], None]) -> object:
        """Compile the kernels of launches side by side; one that does not compile is found out when it is run.

        Parameters
        ----------
        launches : iterable of Launch
        progress : callable
            Told what is done, how much of it, and of how much.
        """

    def load(self, workload: Workload) -> Any:
        """Make the arguments of a call where it runs.

        Parameters
        ----------
        workload : Workload

        Raises
        ------
        LaunchError
            There is too little memory.
        """

    def attempt(self, loaded: Any, step: Step, samples: int, hopeless_us: float) -> Attempt:
        """Run and time the launches of a step; with few timings where all of the first are hopeless.

        Parameters
        ----------
        loaded : Any
            From `load`.
        step : Step
            With its constants.
        samples : int
            Durations to take.
        hopeless_us : float
            A time that is of no interest.

        Raises
        ------
        LaunchError, CompileError
            CUDA refused or aborted it, or the compiler refused a kernel.
        """

    def measure(self, loaded: Any, step: Step, samples: int) -> Measured:
        """Run and time a step.

        Parameters
        ----------
        loaded : Any
            From `load`.
        step : Step
        samples : int
            Durations to take.

        Raises
        ------
        LaunchError, CompileError
            CUDA refused or aborted it, or has no memory left; or the compiler refused a kernel.
        """


class GpuRunner:
    """Times steps on CuPy's current GPU, on a stream of its own: on the legacy one no launch starts early.

    Parameters
    ----------
    budget : str or None
        Architecture whose shared memory to keep to.

    Raises
    ------
    MissingDependencyError
        CuPy is not installed.
    NoDeviceError
        There is no GPU.
    """

    def __init__(self, budget: str | None = None) -> None:
        device = Device.current()
        import cupy

        self.device = device if budget is None else apply_budget(device, budget)
        self._budget = budget
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._blocks: dict[tuple[tuple[str, str | None, int], Any, Any], Any] = {}

    def build(self, launches: Iterable[Launch], progress: Callable[[str, int, int], None]) -> object:
        """Compile the kernels of launches side by side."""
        arch = self.device.arch
        return build_all(launches, lambda step: compile_cached(step.kernel, step.defines, arch), arch, progress)

    def load(self, workload: Workload) -> dict[str, Any]:
        """Make the arguments of a call on the GPU."""
        import cupy

        try:
            with self.stream:
                return self._load(workload)
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise LaunchError(f"the inputs do not fit the GPU's memory: {error}. Use a smaller step.") from error

    def _load(self, workload: Workload) -> dict[str, Any]:
        import cupy

        shape = workload.shape
        parts = (slice(0, DL), slice(DL, D)) if shape.split_kv else (slice(None),)
        caches = tuple(self._cache(workload, part) for part in parts)
        mask: Any = workload.mask
        if isinstance(mask, TreeMask):
            mask = TreeMask(cupy.asarray(mask.words), mask.max_q)
        arguments = {
            "q": cupy.asarray(workload.q),
            "kv_cache": caches if shape.split_kv else caches[0],
            "kv_lens": cupy.asarray(np.array(workload.kv_lens, np.int32)),
            "block_table": cupy.asarray(workload.table),
            "mask": mask,
            **workload.options,
        }
        return arguments if workload.new_kv is None else arguments | {"new_kv": cupy.asarray(workload.new_kv)}

    def _cache(self, workload: Workload, columns: slice) -> Any:
        """Fill a cache with copies of the block."""
        import cupy

        shape = workload.shape
        key = (shape.dtype, shape.kv_dtype, workload.seed), columns.start, columns.stop
        if key not in self._blocks:
            self._blocks = {known: array for known, array in self._blocks.items() if known[0] == key[0]}
            self._blocks[key] = cupy.asarray(np.ascontiguousarray(stored_block(*key[0])[:, columns]))
        rows = self._blocks[key]
        cache = cupy.empty((workload.num_pages, shape.page_size, rows.shape[1]), rows.dtype)
        for begin in range(0, cache.nbytes, rows.nbytes):
            # Plain copies: they need no compiled kernel of CuPy's.
            size = min(rows.nbytes, cache.nbytes - begin)
            (cache.data + begin).copy_from_device_async(rows.data, size, self.stream)
        return cache

    def attempt(self, loaded: Any, step: Step, samples: int, hopeless_us: float) -> Attempt:
        """Run and time the launches of a step."""
        from mlaflash.attention import prepare

        with self._errors(), self.stream as stream:
            call = prepare(**loaded, kernel=step.kernel, tiles=step.config, budget=self._budget)
            timing = measure(call.launch, self.device, stream=stream, samples=min(FIRST_SAMPLES, samples))
            if samples > FIRST_SAMPLES and min(timing.samples_us) < hopeless_us:
                timing = measure(call.launch, self.device, stream=stream, samples=samples)
            return Attempt(timing, *_packed(call, step))

    def measure(self, loaded: Any, step: Step, samples: int) -> Measured:
        """Run and time a step."""
        from mlaflash.attention import mla_verify, prepare

        choice: dict[str, Any] = {"kernel": step.kernel, "tiles": step.config, "budget": self._budget}
        with self._errors(), self.stream as stream:
            call = prepare(**loaded, **choice)
            timing = measure(call.launch, self.device, stream=stream, samples=samples)
            stream.begin_capture()
            call.launch()
            graph = stream.end_capture()
            replay = measure(lambda: graph.launch(stream), self.device, stream=stream, samples=samples)
            results = {"out": call.out, "lse": call.lse}
            host_us = measure_host(lambda: mla_verify(**loaded, **choice, **results), self.device, stream=stream)
            return Measured(call.schedule, timing, replay, host_us, *_packed(call, step))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import cupy

        try:
            yield
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError) as error:
            raise LaunchError(f"CUDA refused or aborted the step: {error}. See it with compute-sanitizer.") from error


def _packed(call: Any, step: Step) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    heads = step.shape.num_heads
    return call.out.get().reshape(-1, heads, DL), call.lse.get().reshape(-1, heads)


@functools.lru_cache(maxsize=64)
def _problem(shape: VerifyShape) -> Problem:
    return shape.problem()


def plan_step(step: Step, device: Device) -> Schedule:
    """Plan a step as a call does.

    Parameters
    ----------
    step : Step
    device : Device
        With the limits of the budget where there is one.
    """
    return plan(_problem(step.shape), device, kernel=step.kernel, tiles=step.config)


def check_rows(
    out: np.ndarray[Any, Any], lse: np.ndarray[Any, Any], expected: Expected, shape: VerifyShape
) -> Comparison:
    """Hold the rows that have a reference against it.

    Parameters
    ----------
    out, lse : numpy.ndarray, shapes (T, H, 512) and (T, H)
    expected : Expected
    shape : VerifyShape

    Returns
    -------
    Comparison
    """
    bounds = tolerance(shape.dtype, shape.out_dtype or shape.dtype)
    # Of a few rows the norm of all of them is bound as that of each is: they do not average out.
    bounds = replace(bounds, norm=bounds.row_norm)
    rows = expected.tokens, expected.heads
    return compare(out[rows], lse[rows], expected.out, expected.lse, bounds)
