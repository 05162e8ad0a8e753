"""Time verify steps on a GPU, or predict them for one that is not there: one record for each step."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mlaflash import cost
from mlaflash.device import Device
from mlaflash.errors import CompileError, LaunchError, UnsupportedError
from mlaflash.floors import Roofline, roofline
from mlaflash.lab.ceilings import Ceilings
from mlaflash.lab.compare import Comparison
from mlaflash.lab.environment import revision, versions
from mlaflash.lab.records import BenchRecord, Status
from mlaflash.lab.runner import Measured, Runner, Step, check_rows, plan_step
from mlaflash.lab.target import no_progress
from mlaflash.lab.timing import Timing
from mlaflash.lab.workload import Workload
from mlaflash.mma_tiles import MmaKernelConfig
from mlaflash.params import numpy_dtype
from mlaflash.schedule import Schedule

_PASSES = 5  # a GPU's clock and power drift by a few percent within seconds: the samples of a step lie apart
_KEPT_BYTES = 4 << 30  # of caches that stay on the GPU from one pass to the next; others are made anew


@dataclass(slots=True)
class _Taken:
    """What was measured of a step so far."""

    step: Step
    schedule: Schedule
    comparison: Comparison | None = None
    error: str = ""
    timings: list[Timing] = field(default_factory=list)
    graphs: list[Timing] = field(default_factory=list)
    hosts_us: list[float] = field(default_factory=list)

    def add(self, found: Measured) -> None:
        self.schedule = found.schedule
        self.timings.append(found.timing)
        self.graphs.append(found.graph)
        self.hosts_us.append(found.host_us)


class Bench:
    """Times steps one after the other, in several passes.

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
        """Time steps, each a few times in every pass over all of them, and hold each against a float64 reference.

        Parameters
        ----------
        steps : sequence of Step
        progress : callable
            Told what is done, how much of it, and of how much.
        seconds : float
            No step is begun, in whichever pass, after that time.

        Yields
        ------
        BenchRecord
            In the order of `steps`, as far as the time allows.
        """
        begin = time.monotonic()
        self._runner.build(
            (launch for step in steps for launch in plan_step(step, self._runner.device).launches), progress
        )
        taken = [_Taken(step, plan_step(step, self._runner.device)) for step in steps]
        passes = min(_PASSES, self._samples)
        kept: dict[int, Any] = {}
        room = _KEPT_BYTES
        for done, (number, index) in enumerate(itertools.product(range(passes), range(len(steps)))):
            if time.monotonic() - begin > seconds:
                break
            progress("steps", done, passes * len(steps))
            each = taken[index]
            if each.error:
                continue
            loaded = None  # nothing of the step before stays on the GPU unless it is kept
            try:
                workload = Workload(each.step.shape, each.step.kv_lens, self._seed) if index not in kept else None
                loaded = kept[index] if workload is None else self._runner.load(workload)
                samples = self._samples // passes + (number < self._samples % passes)
                found = self._runner.measure(loaded, each.step, samples)
            except (LaunchError, CompileError) as error:
                each.error = str(error)
                continue
            each.add(found)
            if each.comparison is None and workload is not None:
                each.comparison = check_rows(found.out, found.lse, workload.expected(), each.step.shape)
            if workload is not None and workload.cache_bytes <= room:
                kept[index] = loaded
                room -= workload.cache_bytes
        else:
            progress("steps", passes * len(steps), passes * len(steps))
        yield from (self._record(each) for each in taken if each.error or each.timings)

    def _record(self, taken: _Taken) -> BenchRecord:
        step, comparison = taken.step, taken.comparison
        floors = measured_roofline(step, self._runner.device, self._ceilings)
        if taken.error or comparison is None:
            return self._finish(step, floors, "failed", taken.error, taken.schedule, samples=0)
        timing, graph = (
            Timing(tuple(us for part in parts for us in part.samples_us)) for parts in (taken.timings, taken.graphs)
        )
        seconds = 1e-6 * timing.median_us
        tb_s = (floors.kv_bytes + floors.other_bytes) / seconds / 1e12
        tflop_s = floors.flop / seconds / 1e12
        mma = floors.mma_tflop_s
        return self._finish(
            step,
            floors,
            "ok" if comparison.passed else "wrong",
            comparison.reason,
            taken.schedule,
            samples=len(timing.samples_us),
            median_us=round(timing.median_us, 3),
            p10_us=round(timing.p10_us, 3),
            p90_us=round(timing.p90_us, 3),
            graph_us=round(graph.median_us, 3),
            host_us=round(statistics.median(taken.hosts_us), 2),
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
    return cost.choice_of(
        config,
        schedule.num_splits,
        step.shape.rows,
        len(step.kv_lens),
        max(step.kv_lens),
        device,
        partial_bytes=partial_bytes,
        kv_dtype=step.shape.stored,
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
