"""Find the constants and splits that are best for the problems of a suite, for a table of `mlaflash.tuned`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlaflash import cost, tuned
from mlaflash.device import Device
from mlaflash.errors import CompileError, LaunchError
from mlaflash.lab.runner import Runner, Step, check_rows, plan_step
from mlaflash.lab.target import no_progress
from mlaflash.lab.workload import Workload
from mlaflash.mma_tiles import MmaKernelConfig

_HOPELESS = 1.3  # times the best so far: no candidate comes back from that in more timings
_UNLIKELY = 1.6  # times the least predicted time, where the model was never wrong by as much
_MOST = 14  # candidates of a problem
_WORTH = 0.02  # of the time: the least of many medians is below the true one by about as much


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice for a problem, and what came of it.

    Attributes
    ----------
    config : MmaKernelConfig
        Constants, without splits.
    num_splits : int
    predicted_us : float
    median_us : float or None
        None where it was wrong or failed.
    reason : str
        Why, or why it was timed only a few times.
    """

    config: MmaKernelConfig
    num_splits: int
    predicted_us: float
    median_us: float | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return asdict(self) | {"kernel": self.config.kernel, "config": self.config.as_dict()}


@dataclass(frozen=True, slots=True)
class Tuned:
    """The candidates of a problem.

    Attributes
    ----------
    step : Step
    candidates : tuple of Candidate
        What the cost model chooses is the first.
    """

    step: Step
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest that is right; None where there is none."""
        timed = [candidate for candidate in self.candidates if candidate.median_us is not None]
        return min(timed, key=lambda candidate: candidate.median_us or math.inf, default=None)

    @property
    def regret(self) -> float | None:
        """How much longer the cost model's choice takes than the best, as a share; None where it is not known."""
        best, chosen = self.best, self.candidates[0].median_us
        return None if best is None or chosen is None else chosen / (best.median_us or math.nan) - 1

    @property
    def is_worth_an_entry(self) -> bool:
        """Whether a table needs it: where the model's choice is the best but for noise, the model may answer.

        It does so for each length, and an entry for a whole class alike.
        """
        return self.best is not None and (self.regret is None or self.regret > _WORTH)

    def entry(self) -> tuned.Entry | None:
        """Return it for a table; None where nothing ran."""
        best = self.best
        if best is None or best.median_us is None:
            return None
        shape = self.step.shape
        model_us = self.candidates[0].median_us
        return tuned.Entry(
            rows=shape.rows,
            batch=len(self.step.kv_lens),
            kv_len=shape.kv_len,
            page_size=shape.page_size,
            config=best.config,
            num_splits=best.num_splits,
            us=round(best.median_us, 2),
            model_us=round(best.median_us if model_us is None else model_us, 2),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {
            "problem": self.step.problem,
            "regret": self.regret,
            "candidates": [candidate.as_dict() for candidate in self.candidates],
        }


def candidates(step: Step, device: Device) -> list[tuple[MmaKernelConfig, int, float]]:
    """List what to try for a problem, the cost model's choice first, then by predicted time.

    Of each configuration with any chance, the numbers of splits that fill a part of a wave, or a few waves.

    Parameters
    ----------
    step : Step
    device : Device
        With the limits of the budget where there is one.

    Returns
    -------
    list of (MmaKernelConfig, int, float)
        Constants, splits, predicted microseconds.
    """
    problem = step.shape.rows, len(step.kv_lens), max(step.kv_lens), device
    of_cache: dict[str, Any] = {"kv_dtype": step.shape.stored}
    chosen = cost.choose(*problem, **of_cache)
    likely = cost.candidates(*problem, **of_cache)
    least = likely[0][2]
    found = {(chosen.config, chosen.num_splits): chosen.predicted_us}
    for config, splits, us in likely:
        if us <= _UNLIKELY * least and len(found) < _MOST:
            found.setdefault((config, splits), us)
    return [(config, splits, us) for (config, splits), us in found.items()]


def tune(
    runner: Runner,
    steps: Sequence[Step],
    *,
    seed: int,
    samples: int,
    seconds: float = math.inf,
    progress: Callable[[str, int, int], None] = no_progress,
) -> Iterator[Tuned]:
    """Try the candidates of each problem: held against a float64 reference, then timed.

    Parameters
    ----------
    runner : Runner
    steps : sequence of Step
    seed : int
    samples : int
        Durations to take of a candidate that is not hopeless.
    seconds : float
        No problem is begun after that time.
    progress : callable
        Told what is done, how much of it, and of how much.

    Yields
    ------
    Tuned
        In the order of `steps`, as far as the time allows.
    """
    begin = time.monotonic()
    launches = (
        launch
        for step in steps
        for config, splits, _ in candidates(step, runner.device)
        for launch in plan_step(_with(step, config, splits), runner.device).launches
    )
    runner.build(launches, progress)
    for done, step in enumerate(steps):
        progress("problems", done, len(steps))
        if time.monotonic() - begin > seconds:
            return
        workload = Workload(step.shape, step.kv_lens, seed)
        tried: list[Candidate] = []
        try:
            loaded = runner.load(workload)
        except LaunchError as error:
            yield Tuned(step, (_failed(candidates(step, runner.device)[0], str(error)),))
            continue
        expected = workload.expected()
        best_us = math.inf
        for config, splits, predicted_us in candidates(step, runner.device):
            try:
                attempt = runner.attempt(loaded, _with(step, config, splits), samples, _HOPELESS * best_us)
            except (LaunchError, CompileError) as error:
                tried.append(_failed((config, splits, predicted_us), str(error)))
                continue
            comparison = check_rows(attempt.out, attempt.lse, expected, step.shape)
            if not comparison.passed:
                tried.append(_failed((config, splits, predicted_us), f"wrong: {comparison.reason}"))
                continue
            us = attempt.timing.median_us
            taken = len(attempt.timing.samples_us)
            stopped = f"{us / best_us:.2f} times the best after {taken} timings" if taken < samples else ""
            tried.append(Candidate(config, splits, predicted_us, us, stopped))
            best_us = min(best_us, us)
        yield Tuned(step, tuple(tried))
    progress("problems", len(steps), len(steps))


def _with(step: Step, config: MmaKernelConfig, num_splits: int) -> Step:
    return replace(step, kernel=config.kernel, config=replace(config, nsplit=num_splits))


def _failed(candidate: tuple[MmaKernelConfig, int, float], reason: str) -> Candidate:
    return Candidate(*candidate, None, reason)


def predicted(steps: Iterable[Step], device: Device) -> list[tuned.Entry]:
    """Return entries by the cost model alone, for a card that is not there.

    Parameters
    ----------
    steps : iterable of Step
    device : Device
    """
    entries = []
    for step in steps:
        shape = step.shape
        lens = len(step.kv_lens), max(step.kv_lens)
        choice = cost.choose(shape.rows, *lens, device)
        us = round(choice.predicted_us, 2)
        entries.append(
            tuned.Entry(shape.rows, *lens, shape.page_size, choice.config, choice.num_splits, us=us, model_us=us)
        )
    return entries


def merged(
    old: Iterable[tuned.Entry], new: Iterable[tuned.Entry], settled: Collection[tuned.Key] = ()
) -> list[tuned.Entry]:
    """Put new entries in the place of old ones of the same class.

    Parameters
    ----------
    old, new : iterable of Entry
    settled : collection of Key
        Classes whose old entries go, whether there are new ones or not.
    """
    kept = {entry.key: entry for entry in old if entry.key not in settled}
    by_class = kept | {entry.key: entry for entry in new}
    return sorted(by_class.values(), key=lambda entry: (entry.page_size, entry.batch, entry.rows, entry.kv_len))


def regrets(found: Iterable[Tuned]) -> tuple[float, float] | None:
    """Tell by how much the cost model's choices are slower than the best: in the median, and at most, as shares.

    Parameters
    ----------
    found : iterable of Tuned

    Returns
    -------
    tuple of float or None
        None where it is not known of any problem.
    """
    known = [each.regret for each in found if each.regret is not None]
    return (statistics.median(known), max(known)) if known else None
