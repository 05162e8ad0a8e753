"""Time verify steps on a GPU, or predict them for one that is not there: one record for each step."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np

from mlaflash import cost
from mlaflash.device import Device, apply_budget
from mlaflash.errors import CompileError, InvalidArgumentError, LaunchError, MlaFlashError, UnsupportedError
from mlaflash.floors import Roofline, roofline
from mlaflash.jit import compile_cached
from mlaflash.lab.ceilings import Ceilings
from mlaflash.lab.compare import Comparison, compare, tolerance
from mlaflash.lab.environment import revision, versions
from mlaflash.lab.sweep import FIRST_SAMPLES
from mlaflash.lab.target import build_all, no_progress
from mlaflash.lab.timing import Timing, measure
from mlaflash.lab.workload import Expected, Workload, block
from mlaflash.masks import TreeMask
from mlaflash.mma_tiles import MmaKernelConfig
from mlaflash.params import DL, D, numpy_dtype
from mlaflash.problem import Problem
from mlaflash.schedule import Launch, Schedule, plan
from mlaflash.shape import VerifyShape
from mlaflash.tiles import KernelConfig

KIND: Final = "mlaflash bench"
_HOST_CALLS = 50
_HOST_ROUNDS = 4

Status = Literal["ok", "wrong", "failed", "predicted"]


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
        Median time for which a call of `mla_verify` like one before keeps the host.
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

    def measure(self, workload: Workload, step: Step, samples: int) -> Measured:
        """Run and time a step.

        Parameters
        ----------
        workload : Workload
            The inputs of `step`.
        step : Step
        samples : int
            Durations to take.

        Raises
        ------
        LaunchError, CompileError
            CUDA refused or aborted it, or has no memory left; or the compiler refused a kernel.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRecord:
    """A step's figures; the fields are those of JSON and CSV. None is what is not known.

    Attributes
    ----------
    status : {"ok", "wrong", "failed", "predicted"}
        ``predicted``: nothing ran, times are those of the cost model.
    reason : str
        Why it is wrong or failed.
    problem : dict
        A `VerifyShape` and the lengths of its requests; one stands for all where they are alike.
    batch, q_len, rows, kv_len : int
        Requests, query tokens and packed rows of a request, tokens of the longest request.
    kernel : str
    config : dict of str to int
    num_splits : int
    median_us, p10_us, p90_us : float or None
        Time of the call's launches on the GPU, merge included, from a cold level-2 cache.
    graph_us : float or None
        Median time of a CUDA graph of these launches.
    host_us : float or None
        Median time for which a call like one before keeps the host.
    tb_s : float or None
        KV rows, each counted once, and q, out, lse, in 1e12 bytes a second.
    tflop_s : float or None
        ``2 * (576 + 512)`` operations for each row and token that it sees.
    of_read, of_mma : float or None
        The same as shares of the measured ceilings.
    floor_us : float
        The least time by these ceilings; of a prediction by the data sheet.
    roof : str
        ``"memory"`` or ``"tensor cores"``: which of them that is.
    predicted_us : float or None
        By the cost model, which goes by the data sheet; None for float32, which it does not know.
    predicted_limit : str or None
        What binds, by the cost model.
    predicted_from : dict of str to float
        All numbers that the prediction was made of.
    max_rel, tolerance : float or None
        Largest relative error of the rows that were held against a float64 reference, and its bound.
    ceilings : dict of str to float or None
    gpu, arch : str
    budget : str or None
        Architecture whose shared memory was kept to.
    versions : dict
        See `mlaflash.lab.environment.versions`.
    revision : str or None
        Of git.
    seed, samples : int
    command : str
        Repeats this record.
    """

    status: Status
    reason: str
    problem: dict[str, Any]
    batch: int
    q_len: int
    rows: int
    kv_len: int
    kernel: str
    config: dict[str, int]
    num_splits: int
    median_us: float | None
    p10_us: float | None
    p90_us: float | None
    graph_us: float | None
    host_us: float | None
    tb_s: float | None
    tflop_s: float | None
    of_read: float | None
    of_mma: float | None
    floor_us: float
    roof: str
    predicted_us: float | None
    predicted_limit: str | None
    predicted_from: dict[str, float]
    max_rel: float | None
    tolerance: float | None
    ceilings: dict[str, float] | None
    gpu: str
    arch: str
    budget: str | None
    versions: dict[str, str | None]
    revision: str | None
    seed: int
    samples: int
    command: str

    @property
    def us(self) -> float | None:
        """The measured time; of a prediction the predicted one."""
        return self.predicted_us if self.status == "predicted" else self.median_us

    @property
    def key(self) -> str:
        """What tells its problem from others."""
        return json.dumps(self.problem, sort_keys=True)


_FIELDS: Final = tuple(field.name for field in dataclasses.fields(BenchRecord))


class Bench:
    """Times steps one after the other.

    Parameters
    ----------
    runner : Runner
    ceilings : Ceilings
        Of the same GPU.
    seed : int
    samples : int
        Durations to take of each step.
    budget : str or None
        For the records: the runner keeps to it.
    command : callable
        Returns the command that repeats a step.
    """

    def __init__(
        self,
        runner: Runner,
        ceilings: Ceilings,
        *,
        seed: int,
        samples: int,
        budget: str | None,
        command: Callable[[Step], str],
    ) -> None:
        self._runner = runner
        self._ceilings = ceilings
        self._seed = seed
        self._samples = samples
        self._budget = budget
        self._command = command
        self._versions = versions()
        self._revision = revision()

    def run(
        self,
        steps: Sequence[Step],
        progress: Callable[[str, int, int], None] = no_progress,
        *,
        seconds: float = math.inf,
    ) -> Iterator[BenchRecord]:
        """Time steps; each is held against a float64 reference.

        Parameters
        ----------
        steps : sequence of Step
        progress : callable
            Told what is done, how much of it, and of how much.
        seconds : float
            No step is begun after that time.

        Yields
        ------
        BenchRecord
            In the order of `steps`, as far as the time allows.
        """
        begin = time.monotonic()
        self._runner.build(
            (launch for step in steps for launch in plan_step(step, self._runner.device).launches), progress
        )
        for done, step in enumerate(steps):
            if time.monotonic() - begin > seconds:
                return
            progress("steps", done, len(steps))
            yield self._record(step)
        progress("steps", len(steps), len(steps))

    def _record(self, step: Step) -> BenchRecord:
        device = self._runner.device
        floors = measured_roofline(step, device, self._ceilings)
        workload = Workload(step.shape, step.kv_lens, self._seed)
        try:
            found = self._runner.measure(workload, step, self._samples)
        except (LaunchError, CompileError) as error:
            return self._finish(step, floors, "failed", str(error), plan_step(step, device))
        comparison = check_rows(found.out, found.lse, workload.expected(), step.shape)
        seconds = 1e-6 * found.timing.median_us
        tb_s = (floors.kv_bytes + floors.other_bytes) / seconds / 1e12
        tflop_s = floors.flop / seconds / 1e12
        mma = floors.mma_tflop_s
        return self._finish(
            step,
            floors,
            "ok" if comparison.passed else "wrong",
            comparison.reason,
            found.schedule,
            median_us=round(found.timing.median_us, 3),
            p10_us=round(found.timing.p10_us, 3),
            p90_us=round(found.timing.p90_us, 3),
            graph_us=round(found.graph.median_us, 3),
            host_us=round(found.host_us, 2),
            tb_s=tb_s,
            tflop_s=tflop_s,
            of_read=1e3 * tb_s / self._ceilings.read_gb_s,
            of_mma=tflop_s / mma if mma is not None else None,
            max_rel=comparison.max_rel if math.isfinite(comparison.max_rel) else None,
            tolerance=comparison.tolerance.rel,
        )

    def _finish(
        self, step: Step, floors: Roofline, status: Status, reason: str, schedule: Schedule, **found: Any
    ) -> BenchRecord:
        return _record(
            step,
            self._runner.device,
            schedule,
            floors,
            status=status,
            reason=reason,
            ceilings=asdict(self._ceilings),
            budget=self._budget,
            versions=self._versions,
            revision=self._revision,
            seed=self._seed,
            samples=self._samples,
            command=self._command(step),
            **found,
        )


def predict_steps(
    steps: Iterable[Step], device: Device, *, budget: str | None, command: Callable[[Step], str]
) -> list[BenchRecord]:
    """Predict steps for a GPU from counts and its data sheet; nothing runs.

    Parameters
    ----------
    steps : iterable of Step
    device : Device
        With the limits of the budget where there is one.
    budget : str or None
    command : callable
        As of `Bench`.

    Returns
    -------
    list of BenchRecord
        Their status is ``predicted``.

    Raises
    ------
    UnsupportedError
        The cost model does not know a step's kernel.
    """
    used, revised = versions(), revision()
    records = []
    for step in steps:
        schedule = plan_step(step, device)
        if not isinstance(schedule.config, MmaKernelConfig):
            raise UnsupportedError(
                f"the step takes kernel {schedule.config.kernel!r}, of which the cost model knows nothing; it predicts "
                "the tensor-core kernels. Leave --kernel out, and use bfloat16 or float16."
            )
        floors = roofline(step.shape, device, kv_lens=step.kv_lens)
        records.append(
            _record(
                step,
                device,
                schedule,
                floors,
                status="predicted",
                reason="",
                ceilings=None,
                budget=budget,
                versions=used,
                revision=revised,
                seed=0,
                samples=0,
                command=command(step),
            )
        )
    return records


def _record(step: Step, device: Device, schedule: Schedule, floors: Roofline, **fields: Any) -> BenchRecord:
    prediction = predict_schedule(step, device, schedule)
    missing = {
        name: None
        for name in ("median_us", "p10_us", "p90_us", "graph_us", "host_us", "tb_s", "tflop_s", "of_read", "of_mma")
    }
    config = schedule.config.as_dict() | ({"nsplit": schedule.num_splits} if schedule.config.kernel != "naive" else {})
    return BenchRecord(
        **{
            **missing,
            "max_rel": None,
            "tolerance": None,
            "problem": step.problem,
            "batch": len(step.kv_lens),
            "q_len": step.shape.q_len,
            "rows": step.shape.rows,
            "kv_len": max(step.kv_lens),
            "kernel": schedule.config.kernel,
            "config": config,
            "num_splits": schedule.num_splits,
            "floor_us": floors.floor_us,
            "roof": floors.limit,
            "predicted_us": prediction.total_us if prediction else None,
            "predicted_limit": prediction.limit if prediction else None,
            "predicted_from": dict(prediction.inputs) if prediction else {},
            "gpu": device.name,
            "arch": device.arch,
            **fields,
        }
    )


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


def predict_schedule(step: Step, device: Device, schedule: Schedule) -> cost.Prediction | None:
    """Predict the time of a step by the cost model; None where it does not know the kernel.

    Parameters
    ----------
    step : Step
    device : Device
    schedule : Schedule
    """
    config = schedule.config
    if not isinstance(config, MmaKernelConfig):
        return None
    partial_bytes = numpy_dtype(step.shape.out_dtype or step.shape.dtype).itemsize
    lens = len(step.kv_lens), max(step.kv_lens)
    return cost.choice_of(
        config, schedule.num_splits, step.shape.rows, *lens, device, partial_bytes=partial_bytes
    ).prediction


def measured_roofline(step: Step, device: Device, ceilings: Ceilings) -> Roofline:
    """Return the floors of a step at measured rates.

    Parameters
    ----------
    step : Step
    device : Device
    ceilings : Ceilings
    """
    floors = roofline(step.shape, device, kv_lens=step.kv_lens)
    mma = ceilings.mma_tflop_s if floors.mma_tflop_s is not None else None
    return replace(floors, read_gb_s=ceilings.read_gb_s, mma_tflop_s=mma)


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
        self._blocks: dict[tuple[str, int, slice], Any] = {}

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
        parts = (slice(0, DL), slice(DL, D)) if shape.split_kv else (slice(0, D),)
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
        key = shape.dtype, workload.seed, columns
        if key not in self._blocks:
            self._blocks = {known: array for known, array in self._blocks.items() if known[:2] == key[:2]}
            self._blocks[key] = cupy.asarray(np.ascontiguousarray(block(shape.dtype, workload.seed)[:, columns]))
        rows = self._blocks[key]
        width = columns.stop - columns.start
        cache = cupy.empty((workload.num_pages, shape.page_size, width), rows.dtype)
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

    def measure(self, workload: Workload, step: Step, samples: int) -> Measured:
        """Run and time a step."""
        from mlaflash.attention import mla_verify, prepare

        arguments = self.load(workload)
        choice: dict[str, Any] = {"kernel": step.kernel, "tiles": step.config, "budget": self._budget}
        with self._errors(), self.stream as stream:
            call = prepare(**arguments, **choice)
            timing = measure(call.launch, self.device, stream=stream, samples=samples)
            stream.begin_capture()
            call.launch()
            graph = stream.end_capture()
            replay = measure(lambda: graph.launch(stream), self.device, stream=stream, samples=samples)
            results = {"out": call.out, "lse": call.lse}
            host_us = self._host_us(lambda: mla_verify(**arguments, **choice, **results))
            return Measured(call.schedule, timing, replay, host_us, *_packed(call, step))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import cupy

        try:
            yield
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError) as error:
            raise LaunchError(f"CUDA refused or aborted the step: {error}. See it with compute-sanitizer.") from error

    def _host_us(self, call: Callable[[], object]) -> float:
        call()
        samples = []
        for _ in range(_HOST_ROUNDS):
            # Few enough in flight that the host never waits for room in the queue.
            self.stream.synchronize()
            for _ in range(_HOST_CALLS):
                begin = time.perf_counter()
                call()
                samples.append(time.perf_counter() - begin)
        self.stream.synchronize()
        return 1e6 * statistics.median(samples)


def _packed(call: Any, step: Step) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    heads = step.shape.num_heads
    return call.out.get().reshape(-1, heads, DL), call.lse.get().reshape(-1, heads)


def to_document(records: Iterable[BenchRecord]) -> dict[str, Any]:
    """Return records as one JSON document.

    Parameters
    ----------
    records : iterable of BenchRecord
    """
    return {"kind": KIND, "records": [asdict(record) for record in records]}


def from_document(document: Any, where: str) -> list[BenchRecord]:
    """Read records back.

    Parameters
    ----------
    document : Any
        What `to_document` returned; or a report, which holds such a document.
    where : str
        Its name, for messages.

    Raises
    ------
    InvalidArgumentError
        It is something else.
    """
    if isinstance(document, Mapping) and isinstance(document.get("bench"), Mapping):
        document = document["bench"]
    if not isinstance(document, Mapping) or document.get("kind") != KIND:
        raise InvalidArgumentError(f"{where} holds no records of a bench. Make it with mlaflash bench --json.")
    records = []
    for fields in document.get("records", []):
        missing = [name for name in _FIELDS if name not in fields]
        if missing:
            raise InvalidArgumentError(
                f"{where} holds a record without {', '.join(missing)}; it is of another version. Make it again."
            )
        records.append(BenchRecord(**{name: fields[name] for name in _FIELDS}))
    return records


def read_records(path: Path) -> list[BenchRecord]:
    """Read the records of a file.

    Parameters
    ----------
    path : Path

    Raises
    ------
    InvalidArgumentError
        It cannot be read, or holds something else.
    """
    try:
        return from_document(json.loads(path.read_bytes()), str(path))
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}. Name another file.") from error
    except ValueError as error:
        if isinstance(error, MlaFlashError):
            raise
        raise InvalidArgumentError(f"{path} is no JSON: {error}. Make it with mlaflash bench --json.") from error


def to_csv(records: Iterable[BenchRecord]) -> str:
    """Return records as CSV with a head; fields that hold several values are JSON.

    Parameters
    ----------
    records : iterable of BenchRecord
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_FIELDS)
    for record in records:
        values = (getattr(record, name) for name in _FIELDS)
        writer.writerow([json.dumps(v) if isinstance(v, dict) else v for v in values])
    return text.getvalue()


@dataclass(frozen=True, slots=True)
class Difference:
    """One problem in two files.

    Attributes
    ----------
    before, after : BenchRecord
    """

    before: BenchRecord
    after: BenchRecord

    @property
    def ratio(self) -> float:
        """How many times as long the second takes."""
        if not self.before.us or not self.after.us:
            return math.nan
        return self.after.us / self.before.us


def compare_records(before: Iterable[BenchRecord], after: Iterable[BenchRecord]) -> list[Difference]:
    """Pair the records of the same problem that have times, in the order of the first list.

    Parameters
    ----------
    before, after : iterable of BenchRecord

    Raises
    ------
    InvalidArgumentError
        They have no problem in common.
    """
    others = {record.key: record for record in after if record.us}
    pairs = [Difference(record, others[record.key]) for record in before if record.us and record.key in others]
    if not pairs:
        raise InvalidArgumentError("the two files have no problem in common. Compare runs of the same suite.")
    return pairs


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean of some ratios.

    Parameters
    ----------
    ratios : iterable of float
        Greater than 0, at least one.
    """
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def model_error(records: Iterable[BenchRecord]) -> tuple[float, float] | None:
    """Tell how far the cost model is from what was measured: median and largest ``|predicted / measured - 1|``.

    Parameters
    ----------
    records : iterable of BenchRecord

    Returns
    -------
    tuple of float or None
        None where no record has both times.
    """
    errors = [abs(r.predicted_us / r.median_us - 1) for r in records if r.predicted_us and r.median_us]
    return (statistics.median(errors), max(errors)) if errors else None
