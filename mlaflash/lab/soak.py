"""Verify calls for minutes on end, most of them through CUDA graphs: right whenever one is looked at, and memory flat.

Time is cut into rounds. A round makes some plans, captures each with its arrays in a graph, and then, in any order,
replays them with other lengths, ids, masks and requests, captures them anew, drops one for another, and makes plain
calls on the same arrays. At its end everything is dropped; the memory then in use must not rise from round to round.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from mlaflash import oracle
from mlaflash.device import HERE, Device, parse_arch
from mlaflash.errors import MlaFlashError
from mlaflash.jit import compiler_threads
from mlaflash.lab.compare import Comparison
from mlaflash.lab.fuzz import Place
from mlaflash.lab.inputs import GARBAGE_ID, Case, build
from mlaflash.lab.mask_inputs import widened
from mlaflash.lab.plan_inputs import BUILDS, FP8_BUILDS, Build, judge, plan_arguments
from mlaflash.mask_source import MaskSource
from mlaflash.masks import TreeMask

CHECK_EVERY: Final = 100
"""Of how many results one is held against the oracle."""

WARM_UP: Final = 0.2
"""Share of the time whose rounds do not count for memory: modules, pools and allocators fill up."""

LEAST_ROUNDS: Final = 6
"""Behind the warm-up, so that memory can be judged."""

LIMITS: Final[Mapping[str, int]] = {"pool": 0, "device": 32 << 20, "host": 32 << 20}
"""Bytes by which each may grow.

CuPy counts what arrays hold, to the byte, and between rounds there are none. The driver takes memory in blocks of 2 MiB
and more, and the allocators of the host keep some; a few hundred bytes that each of a million calls leaves behind are
far more than that.
"""

_MOST_FINDINGS: Final = 10
_SPLITS: Final = (1, 3)
_HEADS: Final = (1, 4, 5, 8, 16, 20)
_PAGE_SIZES: Final = (1, 16, 64)


@dataclass(frozen=True, slots=True)
class _Size:
    """What plans are made for, and how much a call may compute.

    `pool` tokens are stored for each request; longer contexts name pages twice. A call that the oracle repeats has up
    to `pairs` of a row and a token, and any other ten times as many.
    """

    batch: int
    q_len: int
    kv_len: int
    pool: int
    pairs: int
    plans: int
    round_seconds: float


_SIZES: Final = {
    "emulator": _Size(batch=2, q_len=3, kv_len=128, pool=64, pairs=600, plans=2, round_seconds=2.0),
    "gpu": _Size(batch=4, q_len=16, kv_len=8192, pool=1024, pairs=200_000, plans=6, round_seconds=5.0),
}


class Memory(NamedTuple):
    """Bytes in use; None where nothing tells.

    Attributes
    ----------
    pool : int or None
        Of arrays, in CuPy's pool.
    device : int or None
        Of the GPU, by whatever process.
    host : int or None
        Resident, of this process.
    """

    pool: int | None
    device: int | None
    host: int | None


@dataclass(slots=True)
class Outcome:
    """What a soak came to.

    Attributes
    ----------
    calls : Counter of str
        ``replay``, ``run`` and ``call``: through a graph, through a plan, and without one. ``capture`` and ``plan``:
        how many were made. ``checked``: results that were held against the oracle.
    findings : list of str
        Wrong results, and errors.
    samples : list of Memory
        At the end of each round behind the warm-up.
    judged : tuple of str
        Which fields of `Memory` count.
    """

    calls: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    samples: list[Memory] = field(default_factory=list)
    judged: tuple[str, ...] = tuple(LIMITS)

    def growth(self) -> dict[str, int]:
        """Tell by how many bytes each kind of memory has grown.

        That is from the most in the first third of the samples to the least in the last third: what comes and goes is
        no growth, what each call leaves behind is.
        """
        third = len(self.samples) // 3
        found = {}
        for name in self.judged:
            values = [getattr(sample, name) for sample in self.samples]
            if third and None not in values:
                found[name] = min(values[-third:]) - max(values[:third])
        return found

    def complaints(self) -> list[str]:
        """Say what is wrong about memory; nothing where it is flat."""
        if len(self.samples) < LEAST_ROUNDS:
            return [f"memory is not judged: {len(self.samples)} rounds, {LEAST_ROUNDS} are needed. Take more time."]
        return [
            f"{name} memory has grown by {grown:,} bytes; allowed are {LIMITS[name]:,}"
            for name, grown in self.growth().items()
            if grown > LIMITS[name]
        ]

    @property
    def passed(self) -> bool:
        """Whether every result was right and memory is flat."""
        return not self.findings and not self.complaints()


def soak(
    place: Place,
    seed: int,
    seconds: float,
    *,
    builds: Sequence[Build] = (*BUILDS, *FP8_BUILDS),
    check_every: int = CHECK_EVERY,
    is_shared: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Outcome:
    """Make calls until the time is over, which begins when the kernels are compiled.

    Parameters
    ----------
    place : Place
    seed : int
        A round makes the same calls again with the same one, as far as it comes.
    seconds : float
    builds : sequence of Build
        What plans are compiled for.
    check_every : int
        As `CHECK_EVERY`.
    is_shared : bool
        Other processes use the GPU, so that its free memory says nothing of this one.
    progress : callable
        Told what is done, how much of it, and of how much.
    """
    outcome = Outcome(judged=tuple(name for name in LIMITS if name != "device" or not is_shared))
    size = _SIZES[place.kind]
    if place.kind == "gpu" and parse_arch(Device.current().arch)[0] < (8, 9):
        builds = [which for which in builds if which.kv_dtype is None]  # it does not convert numbers of 8 bits
    _compile(place, size, builds, progress)
    started = time.monotonic()
    length = min(size.round_seconds, seconds / (2 * LEAST_ROUNDS))
    number = 0
    with _stream(place) as stream:
        while (spent := time.monotonic() - started) < seconds and len(outcome.findings) < _MOST_FINDINGS:
            progress("soaking (seconds)", int(spent), int(seconds) or 1)
            a_round = _Round(place, size, builds, np.random.default_rng([seed, number]), outcome, stream, check_every)
            try:
                with HERE:
                    a_round.go_on(started + min(spent + length, seconds))
            except MlaFlashError as error:
                outcome.findings.append(f"round {number}, {a_round.problem}: {type(error).__name__}: {error}")
                break
            outcome.findings += [f"round {number}, {finding}" for finding in a_round.findings]
            del a_round
            sample = _memory(place, stream)
            if spent >= WARM_UP * seconds:
                outcome.samples.append(sample)
            number += 1
    return outcome


def _compile(place: Place, size: _Size, builds: Sequence[Build], progress: Callable[[str, int, int], None]) -> None:
    def make(which: Build) -> None:
        lane = _Lane(place, size, which, np.random.default_rng(0), None)
        lane.draw(size.pairs)
        for splits in _SPLITS:
            lane.call(splits)

    with ThreadPoolExecutor(compiler_threads()) as pool:
        for done, _ in enumerate(pool.map(make, builds), 1):
            progress("compiling", done, len(builds))


@contextmanager
def _stream(place: Place) -> Iterator[Any]:
    if place.kind == "emulator":
        yield None
        return
    import cupy

    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


def _memory(place: Place, stream: Any) -> Memory:
    """Take stock, once nothing of a round is left."""
    gc.collect()
    statm = Path("/proc/self/statm")
    host = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else None
    if place.kind == "emulator":
        return Memory(None, None, host)
    import cupy

    stream.synchronize()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    free, total = cupy.cuda.runtime.memGetInfo()
    return Memory(pool.used_bytes(), total - free, host)


class _Lane:
    """A plan with its arrays, which stay where they are, and its graph."""

    def __init__(self, place: Place, size: _Size, which: Build, rng: np.random.Generator, stream: Any) -> None:
        self.place, self.size, self.build, self.rng, self.stream = place, size, which, rng, stream
        new_tokens = size.q_len if which.new_kv else 0
        self.case = Case(
            name="soak",
            q_lens=(size.q_len,) * size.batch,
            # Whole pages in the cache: a page may then stand anywhere in a request.
            kv_lens=(size.pool + new_tokens,) * size.batch,
            heads=int(rng.choice(_HEADS)),
            sm_scale=0.14468,
            page_size=int(rng.choice(_PAGE_SIZES)),
            dtype=which.dtype,
            kv_dtype=which.kv_dtype,
            mask=("causal", "none", "tree", "tree")[rng.integers(4)],
            logit_cap=which.logit_cap,
            id_dtype=("int32", "int64")[rng.integers(2)],
            addressing=("indices", "block_table")[rng.integers(2)],
            paired=which.split_kv,
            new_kv=which.new_kv,
        )
        self.budget = (None, "sm_120")[rng.integers(2)]
        self.host = build(self.case, int(rng.integers(2**32)))
        ids = self.host.pop("block_table" if self.case.addressing == "block_table" else "kv_indices").ravel()
        self.pages = ids[ids != GARBAGE_ID]
        self.step = self._room()
        rows = ("q", "kv_cache", "new_kv")
        self.there = {name: self._put(self.host[name]) for name in rows if name in self.host}
        self.metadata = {name: place.put(array.copy()) for name, array in self.step.items()}
        tokens, heads = self.case.num_tokens, self.case.heads
        self.results = tuple(
            place.put(np.zeros(shape, dtype))
            for shape, dtype in (((tokens, heads, 512), which.out_dtype), ((tokens, heads), "float32"))
        )
        how = {"num_sms": 2, **place.seeded(rng)} if place.kind == "emulator" else {}
        self.plan = place.plan(
            **plan_arguments(
                self.case,
                max_kv_len=size.kv_len,
                max_ids=self.step.get("kv_indices", self.pages).size,
                kv_dtype=which.kv_dtype,
                out_dtype=which.out_dtype,
                split_kv=which.split_kv,
                tiles=which.tiles,
                budget=self.budget,
            ),
            **how,
        )
        self.graph: Any = None

    def __str__(self) -> str:
        case = self.case
        return (
            f"{self.build}, {case.heads} heads, page size {case.page_size}, {case.id_dtype} {case.addressing}, mask "
            f"{case.mask}, budget {self.budget}, q_lens {np.diff(self.step['qo_indptr']).tolist()}, kv_lens "
            f"{self.step['kv_lens'].tolist()}"
        )

    def _put(self, array: Any) -> Any:
        return tuple(map(self.place.put, array)) if isinstance(array, tuple) else self.place.put(array)

    def _room(self) -> dict[str, Any]:
        """Make room for the metadata of any step."""
        case, size = self.case, self.size
        width = -(-size.kv_len // case.page_size)
        table = np.full((size.batch, width), GARBAGE_ID, case.id_dtype)
        is_table = case.addressing == "block_table"
        room = {
            "kv_lens": np.zeros(size.batch, np.int32),
            "qo_indptr": np.zeros(size.batch + 1, np.int32),
            **({"block_table": table} if is_table else {"kv_indices": table.ravel()}),
            **({} if is_table else {"kv_indptr": np.zeros(size.batch + 1, np.int32)}),
        }
        return room | ({"parents": np.full(case.num_tokens, -1, np.int32)} if case.mask == "tree" else {})

    def draw(self, pairs: int) -> None:
        """Draw requests, and write them over those of the step before."""
        rng, size, case, step = self.rng, self.size, self.case, self.step
        q_lens = rng.integers(0, size.q_len + 1, size.batch)
        q_lens[rng.integers(1, size.batch + 1) :] = 0
        kv_lens = rng.integers(0, rng.choice((17, 65, 600, size.kv_len)) + 1, size.batch)
        kv_lens = np.minimum(kv_lens, min(size.kv_len, pairs // max(1, int(q_lens.sum()) * case.heads)))
        cached = np.maximum(kv_lens - q_lens, 0) if case.new_kv else kv_lens
        counts = -(-cached // case.page_size)
        step["kv_lens"][:] = kv_lens
        step["qo_indptr"][1:] = np.cumsum(q_lens)
        if "block_table" in step:
            for row, count in zip(step["block_table"], counts, strict=True):
                row[:count] = rng.choice(self.pages, count)
        else:
            step["kv_indptr"][1:] = np.cumsum(counts)
            step["kv_indices"][: counts.sum()] = rng.choice(self.pages, counts.sum())
        if "parents" in step:
            token = np.concatenate([np.arange(q_len) for q_len in q_lens])
            step["parents"][: token.size] = np.where(token, np.floor(rng.random(token.size) * token), -1)
        for name, array in step.items():
            if self.place.kind == "emulator":
                self.metadata[name][...] = array
            else:
                self.metadata[name].set(array)
        for array in self.results:
            array.view(np.uint8).fill(0xFF)  # NaN

    def run(self) -> tuple[Any, Any]:
        """Make the step through the plan."""
        names = ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices", "block_table")
        given = {name: self.metadata[name] for name in names if name in self.metadata}
        self.plan.update(**given, **({"mask": self._source()} if "parents" in self.metadata else {}))
        out, lse = self.results
        self.plan.run(**self.there, kv_scale=self.host.get("kv_scale", 1.0), out=out, lse=lse)
        return out, lse

    def capture(self) -> None:
        """Keep the step in a graph, whatever the arrays hold when it is replayed."""
        if self.graph is None:
            self.run()  # loads what a capture may not
        if self.place.kind == "emulator":
            self.graph = self.run
            return
        self.stream.begin_capture()
        try:
            self.run()
        finally:
            self.graph = self.stream.end_capture()

    def replay(self) -> tuple[Any, Any]:
        """Make the step through the graph."""
        if self.place.kind == "emulator":
            self.run()
        else:
            self.graph.launch(self.stream)
        return self.results[0], self.results[1]

    def call(self, splits: int) -> tuple[Any, Any]:
        """Make the step as a plain call."""
        place, case = self.place, self.case
        given: dict[str, Any] = {name: array for name, array in self.metadata.items() if name != "parents"}
        mask: Any = case.mask
        if "parents" in self.metadata:
            mask = place.calls.pack_mask(
                self._source(), case.num_tokens, self.size.q_len, qo_indptr=given["qo_indptr"], **place.seeded(self.rng)
            )
        result: tuple[Any, Any] = place.calls.mla_verify(
            **(self.host | self.there | given | {"mask": mask}),
            max_q_len=self.size.q_len,
            max_kv_len=self.size.kv_len,
            out_dtype=self.build.out_dtype,
            tiles=replace(self.build.tiles, nsplit=splits),
            budget=self.budget,
            **place.seeded(self.rng),
        )
        return result

    def _source(self) -> MaskSource:
        return MaskSource.from_parents(self.metadata["parents"])

    def judge(self, result: tuple[Any, Any]) -> Comparison:
        """Hold a result of the step against the oracle's."""
        mask: Any = self.case.mask
        if "parents" in self.step:
            bounds = self.step["qo_indptr"]
            mask = TreeMask.from_parents(self.step["parents"][: bounds[-1]], bounds)
            mask = TreeMask(widened(mask, self.case.num_tokens, self.size.q_len), self.size.q_len)
        given = {name: array for name, array in self.step.items() if name != "parents"}
        expected = oracle.mla_verify(**(self.host | given | {"mask": mask}))
        out, lse = map(self.place.get, result)
        return judge((out, lse), expected, self.case.dtype)


@dataclass(slots=True)
class _Round:
    place: Place
    size: _Size
    builds: Sequence[Build]
    rng: np.random.Generator
    outcome: Outcome
    stream: Any
    check_every: int
    findings: list[str] = field(default_factory=list)
    problem: str = "making plans"

    def go_on(self, until: float) -> None:
        """Make calls until a moment of `time.monotonic`."""
        lanes = [self._lane() for _ in range(self.size.plans)]
        while time.monotonic() < until and not self.findings:
            at = int(self.rng.integers(len(lanes)))
            if self.rng.random() < 0.005:
                lanes[at] = self._lane()
            self._call(lanes[at])

    def _lane(self) -> _Lane:
        which = self.builds[int(self.rng.integers(len(self.builds)))]
        lane = _Lane(self.place, self.size, which, self.rng, self.stream)
        self.outcome.calls["plan"] += 1
        self._capture(lane)
        return lane

    def _capture(self, lane: _Lane) -> None:
        self.problem = str(lane)
        lane.capture()
        self.outcome.calls["capture"] += 1

    def _call(self, lane: _Lane) -> None:
        calls = self.outcome.calls
        is_checked = (calls["replay"] + calls["run"] + calls["call"] + 1) % self.check_every == 0
        chance = self.rng.random()
        if chance < 0.02:
            self._capture(lane)
        lane.draw(self.size.pairs * (1 if is_checked else 10))
        self.problem = str(lane)
        if chance > 0.95:
            kind, result = "call", lane.call(_SPLITS[int(self.rng.integers(len(_SPLITS)))])
        elif chance > 0.9:
            kind, result = "run", lane.run()
        else:
            kind, result = "replay", lane.replay()
        calls[kind] += 1
        if is_checked:
            calls["checked"] += 1
            found = lane.judge(result)
            if not found.passed:
                self.findings.append(
                    f"{kind} of {self.problem}: {found.reason}; {found.worst_array}{list(found.worst_index)} is "
                    f"{found.worst_actual:.8g}, expected {found.worst_expected:.8g}"
                )
