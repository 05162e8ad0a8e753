"""Try constants of kernels on one problem: each is checked first, then timed, and becomes one record in any case."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from mlaflash import oracle
from mlaflash.cost import TOKENS_PER_SPLIT
from mlaflash.device import Device
from mlaflash.errors import (
    CompileError,
    EmulatorError,
    InvalidArgumentError,
    LaunchError,
    MissingDependencyError,
    MlaFlashError,
    TileError,
    UnsupportedError,
)
from mlaflash.jit import CompiledKernel, compile_cached
from mlaflash.lab.check import describe
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.environment import versions
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.target import Built, Target, build_all, built_key, no_progress, read_problem
from mlaflash.lab.timing import Timing
from mlaflash.masks import TreeMask
from mlaflash.params import DL, D
from mlaflash.problem import Problem
from mlaflash.schedule import Launch, Schedule
from mlaflash.tiles import KernelConfig, NaiveConfig, TileConfig

FIRST_SAMPLES: Final = 3
"""Timings of a candidate, after which one that is hopeless is left alone."""

HOPELESS: Final = 1.5
"""Times the best median so far that makes it so."""

_RECORD_START = b'{"kernel": "'

Status = Literal["ok", "invalid", "compile_failed", "launch_failed", "wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What became of one candidate; its fields are those of the JSON line.

    Attributes
    ----------
    kernel : str
    config : dict of str to int
    status : {"ok", "invalid", "compile_failed", "launch_failed", "wrong"}
    reason : str
        Where `status` is ``"ok"`` empty, or why it was timed a few times only.
    median_us, p10_us, p90_us : float or None
        Time from a cold level-2 cache; None where there is no GPU, or nothing to time.
    kv_bytes : int or None
        Bytes of KV that the kernel's loads ask for: counted by the emulator, on a GPU derived from the problem.
    shared_bytes, shared_limit : int
        Shared memory of a block, and the most that it may have.
    registers, spill_bytes : int or None
        Of a thread, as the compiler tells; None without NVRTC, or where it was not reached.
    device : str
        The GPU's name, or ``"emulator"``.
    gpu : str or None
        The GPU's name.
    arch : str
        Architecture that was compiled for.
    versions : dict
        See `mlaflash.lab.environment.versions`.
    seed : int
    problem : dict
    command : str
        Repeats this record.
    key : str
        Digest of problem, seed and environment: records with the same one compare.
    """

    kernel: str
    config: dict[str, int]
    status: Status
    reason: str
    median_us: float | None
    p10_us: float | None
    p90_us: float | None
    kv_bytes: int | None
    shared_bytes: int
    shared_limit: int
    registers: int | None
    spill_bytes: int | None
    device: str
    gpu: str | None
    arch: str
    versions: dict[str, str | None]
    seed: int
    problem: dict[str, Any]
    command: str
    key: str

    @property
    def candidate(self) -> tuple[str, str]:
        """What tells it from the other records with its key."""
        return self.kernel, json.dumps(self.config, sort_keys=True)

    def to_json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Record:
        """Make it of a parsed line.

        Raises
        ------
        InvalidArgumentError
            A field is missing.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in fields]
        if missing:
            raise InvalidArgumentError(f"it is no record of a sweep: it lacks {', '.join(missing)}")
        return cls(**{name: fields[name] for name in names})


class RecordFile:
    """A JSONL file to which records are added one by one.

    Parameters
    ----------
    path : Path
    resume : bool
        Whether it may hold records already.

    Raises
    ------
    InvalidArgumentError
        It holds something and `resume` is not set, or something other than records, or cannot be written.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        try:
            holds_something = path.exists() and path.stat().st_size > 0
            if holds_something and not resume:
                raise InvalidArgumentError(
                    f"--out is {path}, which holds something. Add --resume to continue it, or name another file."
                )
            self.records = _read(path) if holds_something else []
            self._write("")
        except OSError as error:
            raise InvalidArgumentError(f"--out is {path}, which cannot be used: {error}. Name another file.") from error

    def append(self, record: Record) -> None:
        """Write a record through to the operating system.

        Raises
        ------
        MlaFlashError
            It cannot be written, as on a disk that is full.
        """
        try:
            self._write(record.to_json() + "\n")
        except OSError as error:
            raise MlaFlashError(
                f"--out is {self.path}, and a record cannot be added to it: {error}. Make room, and run the same "
                "command with --resume."
            ) from error

    def _write(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


def _read(path: Path) -> list[Record]:
    """Read the records; an unfinished last line, which an interrupted write leaves, is cut off."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    # Any other file may lack its last newline, too, and nothing of it is ours to cut.
    if not _RECORD_START.startswith(content[whole:][: len(_RECORD_START)]):
        raise InvalidArgumentError(f"--out is {path}, and its last line is no record of a sweep. Name another file.")
    records = []
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            fields = json.loads(line)
            records.append(Record.from_dict(fields if isinstance(fields, dict) else {}))
        except ValueError as error:
            raise InvalidArgumentError(
                f"--out is {path}, and its line {number} cannot be continued: {error}. Name another file."
            ) from error
    if whole < len(content):
        os.truncate(path, whole)
    return records


@dataclass(frozen=True, slots=True)
class _Candidate:
    kernel: str
    config: KernelConfig
    schedule: Schedule | None
    invalid: str
    is_refused: bool = False  # the kernel does not do the problem, whatever its constants


class Sweep:
    """One problem, on one target, ready for candidates.

    Parameters
    ----------
    target : Target
    case : Case
    seed : int
    command : callable
        Returns the command that repeats one candidate.
    samples : int
        Durations that are taken of each candidate.
    """

    def __init__(
        self,
        target: Target,
        case: Case,
        *,
        seed: int,
        command: Callable[[KernelConfig], str],
        samples: int = 30,
    ) -> None:
        self.target = target
        self.case = case
        self.seed = seed
        self.samples = samples
        self.notes: list[str] = []
        self._best_us = math.inf
        self._command = command
        self._problem = problem_fields(case)
        self._versions = versions()
        self.key = _key(self._problem, seed, target, self._versions)

    def kept(self, configs: Iterable[KernelConfig], records: Iterable[Record]) -> list[Record]:
        """Choose from earlier records those that are of this problem, environment and candidates.

        Parameters
        ----------
        configs : iterable of KernelConfig
        records : iterable of Record
        """
        wanted = {_candidate_id(config) for config in configs}
        return [record for record in records if record.key == self.key and record.candidate in wanted]

    def run(
        self,
        configs: Iterable[KernelConfig],
        *,
        done: Iterable[Record] = (),
        progress: Callable[[str, int, int], None] = no_progress,
    ) -> Iterator[Record]:
        """Check and time candidates.

        Parameters
        ----------
        configs : iterable of KernelConfig
        done : iterable of Record
            From `kept`. They are skipped whatever became of them: one that ended the last sweep would end this one too.
        progress : callable
            Told what is done, how much of it, and of how much.

        Returns
        -------
        iterator of Record
            Candidates are compiled and run as it is advanced. It raises `LaunchError` where one left the process
            without a GPU, after its record.

        Raises
        ------
        InvalidArgumentError
            A kernel does not do the problem, whatever its constants.
        """
        skipped = {record.candidate for record in done}
        inputs = build(self.case, self.seed)
        wanted = [config for config in configs if _candidate_id(config) not in skipped]
        problem = read_problem(inputs)
        candidates = [self._plan(problem, config) for config in wanted]
        for kernel in dict.fromkeys(candidate.kernel for candidate in candidates):
            of_kernel = [candidate for candidate in candidates if candidate.kernel == kernel]
            if all(candidate.is_refused for candidate in of_kernel):
                raise InvalidArgumentError(of_kernel[0].invalid)
        return self._records(candidates, inputs, progress)

    def _records(
        self,
        candidates: Sequence[_Candidate],
        inputs: Mapping[str, Any],
        progress: Callable[[str, int, int], None],
    ) -> Iterator[Record]:
        launches = [launch for candidate in candidates if candidate.schedule for launch in candidate.schedule.launches]
        failures = self.target.build(launches, progress)
        if self.target.kind == "emulator":
            failures |= self._compile_for_gpu(candidates, progress)
        if not candidates:
            return
        expected = oracle.mla_verify(**inputs)
        loaded = self.target.load(inputs)
        visible = visible_tokens(inputs, self.case)
        for done_count, candidate in enumerate(candidates):
            progress("candidates", done_count, len(candidates))
            record = self._measure(candidate, loaded, expected, visible, failures)
            yield record
            if record.status == "launch_failed" and not self.target.is_usable():
                raise LaunchError(
                    f"{candidate.kernel} {candidate.config.as_dict()} left this process without a GPU: {record.reason} "
                    "Run the same command with --resume: it goes on behind this candidate."
                )

    def _plan(self, problem: Problem, config: KernelConfig) -> _Candidate:
        try:
            schedule = self.target.plan(problem, config.kernel, config)
        except (UnsupportedError, InvalidArgumentError) as error:
            is_refused = isinstance(error, UnsupportedError) and not isinstance(error, TileError)
            return _Candidate(config.kernel, config, None, str(error), is_refused)
        return _Candidate(config.kernel, config, schedule, "")

    def _measure(
        self,
        candidate: _Candidate,
        loaded: Mapping[str, Any],
        expected: tuple[Any, Any],
        visible: Sequence[int],
        failures: Mapping[Built, CompileError],
    ) -> Record:
        found: dict[str, Any] = {}
        if candidate.schedule is None:
            return self._record(candidate, "invalid", candidate.invalid)
        try:
            for launch in candidate.schedule.launches:
                if built_key(launch) in failures:
                    raise failures[built_key(launch)]
            found |= self._usage(candidate.schedule)
            result = self.target.verify(loaded, candidate.kernel, candidate.config, self.seed)
        except CompileError as error:
            return self._record(candidate, "compile_failed", str(error), **found)
        except LaunchError as error:
            return self._record(candidate, "launch_failed", str(error), **found)
        except EmulatorError as error:
            return self._record(candidate, "wrong", str(error), **found)
        comparison = compare(result.out, result.lse, *expected, tolerance(self.case.dtype, self.case.dtype))
        found["kv_bytes"] = result.kv_bytes
        if result.kv_bytes is None:
            found["kv_bytes"] = requested_kv_bytes(candidate.config, self.case, visible)
        if not comparison.passed:
            return self._record(candidate, "wrong", describe(comparison), **found)
        try:
            timing, reason = self._time(loaded, candidate)
        except LaunchError as error:
            return self._record(candidate, "launch_failed", str(error), **found)
        if timing is not None:
            found |= {
                "median_us": round(timing.median_us, 2),
                "p10_us": round(timing.p10_us, 2),
                "p90_us": round(timing.p90_us, 2),
            }
        return self._record(candidate, "ok", reason, **found)

    def _time(self, loaded: Mapping[str, Any], candidate: _Candidate) -> tuple[Timing | None, str]:
        """Time a candidate; one of which no first timing is near the best so far is left at these."""
        if math.isfinite(self._best_us) and self.samples > FIRST_SAMPLES:
            first = self.target.time(loaded, candidate.kernel, candidate.config, FIRST_SAMPLES)
            ratio = min(first.samples_us) / self._best_us if first else 0.0
            if ratio > HOPELESS:
                return first, f"{ratio:.1f} times the best after {FIRST_SAMPLES} timings, and timed no more"
        timing = self.target.time(loaded, candidate.kernel, candidate.config, self.samples)
        if timing is not None:
            self._best_us = min(self._best_us, timing.median_us)
        return timing, ""

    def _usage(self, schedule: Schedule) -> dict[str, Any]:
        """Ask the compiler for registers and spills of the kernel that reads the KV."""
        if self.notes:
            return {}
        compiled = self._compile(schedule.launches[0])
        return {"registers": compiled.registers, "spill_bytes": compiled.spill_bytes}

    def _compile_for_gpu(
        self, candidates: Sequence[_Candidate], progress: Callable[[str, int, int], None]
    ) -> dict[Built, CompileError]:
        """Compile for the GPU that the emulator stands in for; without NVRTC, note that."""
        launches = [candidate.schedule.launches[0] for candidate in candidates if candidate.schedule]
        try:
            return build_all(launches, self._compile, self.target.device.arch, progress)
        except MissingDependencyError as error:
            self.notes.append(f"registers and spills are not known: {error}")
            return {}

    def _compile(self, launch: Launch) -> CompiledKernel:
        return compile_cached(launch.kernel, launch.defines, self.target.device.arch)

    def _record(self, candidate: _Candidate, status: Status, reason: str, **found: Any) -> Record:
        fields: dict[str, Any] = {
            "median_us": None,
            "p10_us": None,
            "p90_us": None,
            "kv_bytes": None,
            "registers": None,
            "spill_bytes": None,
            **found,
        }
        device = self.target.device
        return Record(
            kernel=candidate.kernel,
            config=candidate.config.as_dict(),
            status=status,
            reason=reason,
            shared_bytes=candidate.config.shared_bytes(self.case.stored),
            shared_limit=device.shared_per_block,
            device=self.target.name,
            gpu=self.target.name if self.target.kind == "gpu" else None,
            arch=device.arch,
            versions=self._versions,
            seed=self.seed,
            problem=self._problem,
            command=self._command(candidate.config),
            key=self.key,
            **fields,
        )


def restrict(
    configs: Iterable[KernelConfig], device: Device, case: Case, given: Iterable[str]
) -> tuple[list[KernelConfig], Counter[str]]:
    """Pass over candidates that cannot be of use; constants that a user gave are tried whatever they are.

    Parameters
    ----------
    configs : iterable of KernelConfig
    device : Device
    case : Case
    given : iterable of str
        Names of the axes that the user gave values for.

    Returns
    -------
    kept : list of KernelConfig
    passed_over : Counter of str
        How many of the others, by the reason.
    """
    names = set(given)
    kept: list[KernelConfig] = []
    passed_over = Counter[str]()
    most = max(1, max(case.kv_lens, default=0) // TOKENS_PER_SPLIT)
    for config in configs:
        own = {name for name in config.as_dict() if name != "nsplit"}
        if not own & names and config.shared_bytes(case.dtype) > device.shared_per_block:
            passed_over[f"ask for more than {device.shared_per_block} bytes of shared memory a block"] += 1
        elif "nsplit" not in names and config.as_dict().get("nsplit", 1) > most:
            passed_over[f"have splits of less than {TOKENS_PER_SPLIT} tokens"] += 1
        else:
            kept.append(config)
    return kept, passed_over


def _candidate_id(config: KernelConfig) -> tuple[str, str]:
    return config.kernel, json.dumps(config.as_dict(), sort_keys=True)


def rank(records: Iterable[Record]) -> list[Record]:
    """Order the records that are ok, the best first.

    By the median time where there is one. Else, which is no timing, those that spill come last; then by the bytes of KV
    that are loaded, spilled bytes, shared memory and registers.

    Parameters
    ----------
    records : iterable of Record
    """

    def size(value: float | None) -> float:
        return math.inf if value is None else value

    def merit(record: Record) -> tuple[float, ...]:
        return (
            size(record.median_us),
            float(bool(record.spill_bytes)),
            size(record.kv_bytes),
            size(record.spill_bytes),
            record.shared_bytes,
            size(record.registers),
            record.config.get("nsplit", 1),
        )

    return sorted((record for record in records if record.status == "ok"), key=merit)


def problem_fields(case: Case) -> dict[str, Any]:
    """Return a problem as records hold it."""
    fields = dataclasses.asdict(case)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def visible_tokens(inputs: Mapping[str, Any], case: Case) -> list[int]:
    """Count the KV tokens that each query token sees.

    Parameters
    ----------
    inputs : mapping of str to Any
        From `mlaflash.lab.inputs.build`.
    case : Case
    """
    mask = inputs["mask"]
    dense = mask.to_dense(inputs["qo_indptr"]) if isinstance(mask, TreeMask) else None
    counts: list[int] = []
    for request, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        before = kv_len - q_len
        if dense is not None:
            columns = np.asarray(dense[request])[:, max(-before, 0) :]
            counts += [max(before, 0) + int(row.sum()) for row in columns]
        elif mask == "causal":
            counts += [max(before + token + 1, 0) for token in range(q_len)]
        else:
            counts += [kv_len] * q_len
    return counts


def requested_kv_bytes(config: KernelConfig, case: Case, visible: Sequence[int]) -> int | None:
    """Bytes of KV that a kernel's loads ask for, whatever caches they hit; None where it is not known beforehand.

    Parameters
    ----------
    config : KernelConfig
    case : Case
    visible : sequence of int
        From `visible_tokens`.
    """
    itemsize = 4 if case.dtype == "float32" else 2
    if isinstance(config, NaiveConfig):
        # The whole row for the score, and its latent part again for the value.
        return sum(visible) * case.heads * (D + DL) * itemsize
    if isinstance(config, TileConfig):
        return sum(visible) * -(-case.heads // config.ht) * D * itemsize
    return None


def _key(problem: Mapping[str, Any], seed: int, target: Target, used: Mapping[str, str | None]) -> str:
    parts = {
        "problem": problem,
        "seed": seed,
        "device": target.name,
        "arch": target.device.arch,
        "shared_limit": target.device.shared_per_block,
        "versions": used,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
