"""Time launches on a GPU with CUDA events, each on a level-2 cache that holds nothing of theirs."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlaflash.device import Device
from mlaflash.errors import InvalidArgumentError
from mlaflash.jit.compiler import compile_sources
from mlaflash.jit.sources import kernel_root, read

_FLUSH_THREADS = 256
_FLUSH_BLOCKS_PER_SM = 8
_FLUSH_L2_SIZES = 2
_ENQUEUE_MARGIN = 2.0
_WARMUP = 5
_HOST_CALLS = 50
_HOST_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one launch, or of a few that belong together.

    Attributes
    ----------
    samples_us : tuple of float
        Each duration in microseconds, in the order they were taken.
    """

    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """The middle duration in microseconds."""
        return self._percentile(50)

    @property
    def p10_us(self) -> float:
        """The duration that 10 % of the samples stay below, in microseconds."""
        return self._percentile(10)

    @property
    def p90_us(self) -> float:
        """The duration that 90 % of the samples stay below, in microseconds."""
        return self._percentile(90)

    def _percentile(self, percent: float) -> float:
        return float(np.percentile(self.samples_us, percent))


def measure(
    enqueue: Callable[[], object],
    device: Device,
    *,
    stream: Any = None,
    samples: int = 30,
) -> Timing:
    """Time what a function enqueues, from a cold level-2 cache.

    Before each sample a kernel reads twice the size of the cache. It runs for longer than the host needs to enqueue, so
    that the events enclose the GPU's work and not the host's.

    Parameters
    ----------
    enqueue : callable
        Launches the work on `stream` and returns without waiting for it.
    device : Device
        The current one.
    stream : cupy.cuda.Stream, optional
        By default CuPy's current stream.
    samples : int
        Durations to take, at least 1.

    Returns
    -------
    Timing

    Raises
    ------
    InvalidArgumentError
        `samples` is below 1.
    """
    if samples < 1:
        raise InvalidArgumentError(f"samples is {samples}; it must be at least 1.")
    import cupy

    if stream is None:
        stream = cupy.cuda.get_current_stream()
    flush = _L2Flush(device, stream)
    _host_seconds(enqueue, stream)  # the first call compiles and loads
    host_seconds = max(_host_seconds(enqueue, stream) for _ in range(_WARMUP))
    passes = max(1, math.ceil(_ENQUEUE_MARGIN * host_seconds / flush.seconds()))

    events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(samples)]
    for start, end in events:
        flush(passes)
        start.record(stream)
        enqueue()
        end.record(stream)
        # One sample at a time: a queue that is full would make the host wait in the middle of one.
        end.synchronize()
    return Timing(tuple(1e3 * cupy.cuda.get_elapsed_time(start, end) for start, end in events))


def measure_host(call: Callable[[], object], device: Device, *, stream: Any) -> float:
    """Time for how long a function that launches keeps the host, once it has been called before.

    Calls follow each other without a pause while the GPU still works on what was enqueued before them, and too few to
    fill its queue: no call waits for the GPU, or wakes it up. A round gives the mean of its calls.

    Parameters
    ----------
    call : callable
        Launches on `stream` and returns without waiting for it.
    device : Device
        The current one.
    stream : cupy.cuda.Stream

    Returns
    -------
    float
        Median of some rounds, in microseconds.
    """
    flush = _L2Flush(device, stream)
    for _ in range(_WARMUP):
        call()
    passes = max(1, math.ceil(_ENQUEUE_MARGIN * _HOST_CALLS * _host_seconds(call, stream) / flush.seconds()))
    means = []
    for _ in range(_HOST_ROUNDS):
        flush(passes)
        begin = time.perf_counter()
        for _ in range(_HOST_CALLS):
            call()
        means.append((time.perf_counter() - begin) / _HOST_CALLS)
        stream.synchronize()
    return 1e6 * statistics.median(means)


def _host_seconds(enqueue: Callable[[], object], stream: Any) -> float:
    begin = time.perf_counter()
    enqueue()
    seconds = time.perf_counter() - begin
    stream.synchronize()
    return seconds


class _L2Flush:
    """Launches `kernels/lab/flush.cu` on one device and stream."""

    def __init__(self, device: Device, stream: Any) -> None:
        import cupy

        self._stream = stream
        self._function = _flush_function(device.arch, cupy.cuda.runtime.getDevice())
        self._words = max(1, _FLUSH_L2_SIZES * device.l2_bytes // 16)
        with stream:
            self._data = cupy.empty(16 * self._words, "uint8")
            self._sink = cupy.empty(1, "uint32")
        # Clean lines only: what a fresh allocation holds is not known, and `sink` is written where it is not zero.
        cupy.cuda.runtime.memsetAsync(self._data.data.ptr, 0, self._data.nbytes, stream.ptr)
        self._grid = (_FLUSH_BLOCKS_PER_SM * device.num_sms, 1, 1)

    def __call__(self, passes: int) -> None:
        """Enqueue it."""
        arguments = (self._data, np.uint64(self._words), np.uint32(passes), self._sink)
        self._function(self._grid, (_FLUSH_THREADS, 1, 1), arguments, 0, self._stream)

    def seconds(self) -> float:
        """Time one pass."""
        import cupy

        self(1)
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(self._stream)
        self(1)
        end.record(self._stream)
        end.synchronize()
        return max(1e-3 * float(cupy.cuda.get_elapsed_time(start, end)), 1e-6)


@functools.cache
def _flush_function(arch: str, ordinal: int) -> Any:
    from cupy.cuda import function

    compiled = compile_sources(read("flush", kernel_root() / "lab"), {}, arch)
    module = function.Module()
    module.load(compiled.cubin)
    return module.get_function(compiled.entry)
