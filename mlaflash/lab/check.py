"""Hold every kernel against the oracle on a list of problems."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlaflash import combine, oracle
from mlaflash.errors import (
    EmulatorError,
    InvalidArgumentError,
    LaunchError,
    TileError,
    UnsupportedError,
)
from mlaflash.lab.compare import Comparison, compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.space import SPACES, check_axes
from mlaflash.lab.target import Target, built_key, call_name, no_progress, read_problem
from mlaflash.problem import Problem
from mlaflash.schedule import FP8_KERNELS, KERNELS, MMA_KERNELS, Launch
from mlaflash.tiles import KernelConfig

COMBINE: Final = "combine"
CHECKED: Final = (*KERNELS, COMBINE)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One kernel on one problem.

    Attributes
    ----------
    kernel : str
        ``combine`` is `tile` with more than one split, whose merge is what the result is about.
    case : str
    dtype : str
    config : KernelConfig or None
    comparison : Comparison or None
        None where the kernel gave no result.
    tolerance : float
        What `Comparison.max_rel` is held against.
    error : str
        Why there is no result.
    """

    kernel: str
    case: str
    dtype: str
    config: KernelConfig | None
    comparison: Comparison | None
    tolerance: float
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether there is a result and it is right."""
        return self.comparison is not None and self.comparison.passed

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it; a number that is not finite is None."""
        found = self.comparison
        return {
            "kernel": self.kernel,
            "case": self.case,
            "dtype": self.dtype,
            "max_abs": _finite(found.max_abs) if found else None,
            "max_rel": _finite(found.max_rel) if found else None,
            "tolerance": self.tolerance,
            "passed": self.passed,
        }


@dataclass(frozen=True, slots=True)
class Skip:
    """A kernel that does not do a problem, and says so."""

    kernel: str
    case: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Run:
    label: str
    kernel: str
    config: KernelConfig | None
    case: Case


def select(
    all_cases: Sequence[Case],
    dtypes: Sequence[str] = (),
    names: Sequence[str] = (),
    kv_dtypes: Sequence[str] = (),
) -> list[Case]:
    """Choose some problems of a preset.

    Parameters
    ----------
    all_cases : sequence of Case
    dtypes, names, kv_dtypes : sequence of str
        What to keep; empty is everything.

    Raises
    ------
    InvalidArgumentError
        Nothing is left.
    """
    known = [case.name for case in all_cases]
    for name in names:
        if name not in known:
            raise InvalidArgumentError(f"case is {name!r}; this preset has {', '.join(known)}. Name one of them.")
    kept = [
        case
        for case in all_cases
        if (not dtypes or case.dtype in dtypes)
        and (not names or case.name in names)
        and (not kv_dtypes or case.stored in kv_dtypes)
    ]
    if not kept:
        raise InvalidArgumentError(
            f"dtype is {', '.join(dtypes) or 'any'}, kv_dtype {', '.join(kv_dtypes) or 'any'} and case "
            f"{', '.join(names) or 'any'}; no problem of this preset is all of that. Leave one out."
        )
    return kept


def labels(kernels: Sequence[str], nsplit: int | None, cases: Sequence[Case]) -> list[str]:
    """Choose the kernels to run.

    Parameters
    ----------
    kernels : sequence of str
        Of `CHECKED`; empty is all that take one of the problems.
    nsplit : int or None
        Splits that were asked for: one leaves nothing to merge.
    cases : sequence of Case

    Raises
    ------
    InvalidArgumentError
        `combine` is named, and there is one split.
    """
    if nsplit == 1 and COMBINE in kernels:
        raise InvalidArgumentError(f"nsplit is 1 and {COMBINE} merges at least 2 splits. Give 2 or more.")
    able = [label for label in CHECKED if any(takes(label, case) for case in cases)]
    return [label for label in kernels or able if label != COMBINE or nsplit != 1]


def takes(label: str, case: Case) -> bool:
    """Whether a kernel does a problem, by its element types, lists and new rows.

    Parameters
    ----------
    label : str
        Of `CHECKED`.
    case : Case
    """
    if case.topk and label == "mma_roles":
        return False
    if case.kv_dtype is not None:
        return label in FP8_KERNELS[case.kv_dtype] and not (case.new_kv and label == "mma_roles")
    return label not in MMA_KERNELS or case.dtype != "float32"


def check(
    target: Target,
    cases: Sequence[Case],
    *,
    kernels: Sequence[str] = CHECKED,
    required: Sequence[str] = (),
    constants: Mapping[str, int] | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = no_progress,
) -> Iterator[CheckResult | Skip]:
    """Run kernels on problems and compare each result with the oracle's.

    Parameters
    ----------
    target : Target
    cases : sequence of Case
    kernels : sequence of str
        From `labels`.
    required : sequence of str
        Those of them that were asked for by name.
    constants : mapping of str to int, optional
        Constants by name, such as ``{"ht": 8}``; ``nsplit`` is that of `combine`.
    seed : int
        Of the inputs, and of the emulator's order of threads.
    progress : callable
        Told what is done, how much of it, and of how much.

    Returns
    -------
    iterator of CheckResult or Skip
        By problem, then kernel. What is not allowed is refused before; kernels are compiled and run as it is advanced.

    Raises
    ------
    InvalidArgumentError, TileError
        Constants that are not allowed or do not fit, or a required kernel that does none of the problems.
    """
    constants = dict(constants or {})
    check_axes([_kernel_of(label) for label in kernels], list(constants))
    inputs = {case.name: build(case, seed) for case in cases}
    planned: list[_Planned] = []
    for case, splits in zip(cases, _splits(cases, constants.get("nsplit")), strict=True):
        problem = read_problem(inputs[case.name])
        for label in kernels:
            run, launches = _plan(target, problem, case, label, splits, constants)
            planned.append((run, launches))
    for label in required:
        steps = [steps for run, steps in planned if run.label == label]
        skips = [skip for skip in steps if isinstance(skip, Skip)]
        if skips and len(skips) == len(steps):
            raise InvalidArgumentError(
                f"--kernel is {label}, which does none of the problems selected. Of {skips[0].case}: {skips[0].reason}"
            )
    return _results(target, planned, inputs, seed, progress)


_Planned = tuple[_Run, tuple[Launch, ...] | Skip]


def _results(
    target: Target,
    planned: Sequence[_Planned],
    inputs: dict[str, dict[str, Any]],
    seed: int,
    progress: Callable[[str, int, int], None],
) -> Iterator[CheckResult | Skip]:
    launches = [launch for _, steps in planned if not isinstance(steps, Skip) for launch in steps]
    failures = target.build(launches, progress)
    by_case = itertools.groupby(enumerate(planned), key=lambda item: item[1][0].case.name)
    for name, group in by_case:
        # What one problem holds is let go before the next: some are large.
        arguments = inputs.pop(name)
        expected_out, expected_lse = getattr(oracle, call_name(arguments))(**arguments)
        loaded = target.load(arguments)
        for done, (run, steps) in group:
            progress("checking", done, len(planned))
            if isinstance(steps, Skip):
                yield steps
                continue
            broken = [failures[built_key(launch)] for launch in steps if built_key(launch) in failures]
            if broken:
                yield _failed(run, str(broken[0]))
                continue
            try:
                result = target.verify(loaded, run.kernel, run.config, seed)
            except (EmulatorError, LaunchError) as error:
                yield _failed(run, str(error))
                continue
            limits = tolerance(run.case.dtype, run.case.dtype)
            comparison = compare(result.out, result.lse, expected_out, expected_lse, limits)
            yield CheckResult(run.label, name, run.case.dtype, run.config, comparison, limits.rel)


def describe(comparison: Comparison) -> str:
    """Say in one line what is wrong with a result, and where.

    Parameters
    ----------
    comparison : Comparison
        One that failed.
    """
    place = ", ".join(map(str, comparison.worst_index))
    return (
        f"{comparison.reason}; {comparison.worst_array}[{place}] is {comparison.worst_actual:.8g}, "
        f"expected {comparison.worst_expected:.8g}"
    )


def _splits(cases: Sequence[Case], nsplit: int | None) -> Iterator[int]:
    """Choose the splits that `combine` merges in each problem: in turn, for each dtype, all the ways it is compiled."""
    seen: Counter[str] = Counter()
    turns = combine.merge_splits()
    for case in cases:
        yield turns[seen[case.dtype] % len(turns)] if nsplit is None else nsplit
        seen[case.dtype] += 1


def _plan(
    target: Target, problem: Problem, case: Case, label: str, splits: int, constants: Mapping[str, int]
) -> tuple[_Run, tuple[Launch, ...] | Skip]:
    """Plan what a call would run, but for the constants that were asked for and the splits that `label` is about."""
    kernel = _kernel_of(label)
    values = dict(constants)
    if kernel == "tile":
        values["nsplit"] = splits if label == COMBINE else 1
    try:
        schedule = target.plan(problem, kernel, None)
        if kernel in SPACES:
            schedule = target.plan(problem, kernel, SPACES[kernel].change(schedule.config, values))
    except TileError:
        raise
    except UnsupportedError as error:
        return _Run(label, kernel, None, case), Skip(label, case.name, str(error))
    return _Run(label, kernel, schedule.config, case), schedule.launches


def _kernel_of(label: str) -> str:
    return "tile" if label == COMBINE else label


def _failed(run: _Run, error: str) -> CheckResult:
    dtype = run.case.dtype
    return CheckResult(run.label, run.case.name, dtype, run.config, None, tolerance(dtype, dtype).rel, error)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
