"""Time verify steps over a cache that is spread over the GPUs of this machine, against one GPU with all of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from mlaflash.device import Device, device_count
from mlaflash.distributed import Interleaved, NcclCommunicator, ShardedPlan
from mlaflash.errors import InvalidArgumentError, NoDeviceError, UnsupportedError
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.environment import revision, versions
from mlaflash.lab.presets import KIMI_K2_SM_SCALE
from mlaflash.lab.ranks import free_address, run_ranks
from mlaflash.params import DL, D, numpy_dtype
from mlaflash.plan import VerifyPlan
from mlaflash.scaling import LINKS, Link, ShardedStep, predict_replicated, predict_sharded
from mlaflash.shape import VerifyShape

TIMES: Final = ("one_gpu", "step", "attention", "gather", "exchange", "update", "host")
"""What is timed of a step: one GPU with all of it; the whole step; its parts by themselves, those of one group of
heads; the update; and how long a run keeps the host."""

_CACHES_MB = 400  # of one rank together: more than the level-2 cache
_MOST_LAYERS = 16
_WINDOWS = 8
_LAUNCHES = 24  # of a window, in graphs of several layers
_REPEATS = 10  # of a message in a graph
_MESSAGES = tuple(2**power for power in range(16, 27, 2))  # bytes that a rank receives


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank measured of one step.

    Attributes
    ----------
    samples_us : dict of str to list of float
        `TIMES`, in microseconds of one layer; all but ``host`` in CUDA graphs.
    passed : bool
        Whether its heads are those of one GPU, within twice the tolerance of a result: both were rounded.
    reason : str
        Why not.
    max_abs : float
    """

    samples_us: dict[str, list[float]]
    passed: bool
    reason: str
    max_abs: float

    @property
    def us(self) -> dict[str, float]:
        """Medians."""
        return {name: float(np.median(samples)) for name, samples in self.samples_us.items()}


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank measured.

    Attributes
    ----------
    gpu, arch : str
    messages : list of tuple
        Bytes that a rank receives, microseconds of an all-gather, and of an all-to-all.
    steps : list of RankTimes
        Of each number of groups of heads.
    """

    gpu: str
    arch: str
    messages: list[tuple[int, float, float]]
    steps: list[RankTimes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRecord:
    """A step on several GPUs; the fields are those of JSON.

    Attributes
    ----------
    status : {"ok", "wrong", "predicted"}
    reason : str
        Why it is wrong.
    problem : dict
        A `VerifyShape`, of all ranks together.
    kv_lens : tuple of int
    ranks, head_groups : int
    us : dict of str to float
        `TIMES`, of each the slowest rank's; of a prediction the parts of `mlaflash.scaling.ShardedStep`.
    ratio : float
        Time of the step in those of one GPU.
    max_abs : float or None
        Largest difference from one GPU.
    link : str or None
        Of a prediction.
    messages : list of tuple
        As in `Measured`, of each the slowest rank's.
    samples_us : list of dict
        Of each rank.
    gpu, arch : str
    versions : dict
    revision : str or None
    """

    status: str
    reason: str
    problem: dict[str, Any]
    kv_lens: tuple[int, ...]
    ranks: int
    head_groups: int
    us: dict[str, float]
    ratio: float
    max_abs: float | None
    link: str | None
    messages: list[tuple[int, float, float]]
    samples_us: list[dict[str, list[float]]]
    gpu: str
    arch: str
    versions: dict[str, str | None]
    revision: str | None


def bench_ranks(
    shape: VerifyShape, kv_lens: Sequence[int], num_ranks: int, head_groups: Sequence[int] = (1,), timeout: float = 20.0
) -> list[ShardedRecord]:
    """Time a step on several GPUs of this machine, each in a process of its own, with pages dealt out in turn.

    Parameters
    ----------
    shape : VerifyShape
        Of all ranks: its heads are spread over them, and so are its tokens.
    kv_lens : sequence of int
        Of each request.
    num_ranks : int
    head_groups : sequence of int
        Each is timed.
    timeout : float
        Seconds that a rank waits for the others.

    Returns
    -------
    list of ShardedRecord
        One for each number of groups.

    Raises
    ------
    InvalidArgumentError, UnsupportedError
        It cannot be spread so.
    NoDeviceError, MissingDependencyError
        There is no GPU, or no CuPy.
    CommunicationError
        A rank ended without a result.
    """
    _check(shape, num_ranks, head_groups)
    if shape.kv_dtype is not None:
        raise UnsupportedError(f"kv_dtype is {shape.kv_dtype!r}; on several GPUs, caches of q's type are timed.")
    gpus = device_count()
    if not gpus:
        raise NoDeviceError("there is no GPU, and each rank takes one. Without, there is bench --ranks --predict.")
    if num_ranks > gpus:
        raise InvalidArgumentError(f"ranks is {num_ranks} and this machine has {gpus} GPUs; each rank takes one.")
    found: list[Measured] = run_ranks(
        measure, num_ranks, num_ranks, free_address(), shape, tuple(kv_lens), tuple(head_groups), timeout
    )
    return collect(shape, kv_lens, head_groups, found)


def collect(
    shape: VerifyShape, kv_lens: Sequence[int], head_groups: Sequence[int], found: Sequence[Measured]
) -> list[ShardedRecord]:
    """Make records of what all ranks measured.

    Parameters
    ----------
    shape, kv_lens, head_groups
        As in `bench_ranks`.
    found : sequence of Measured
        Of each rank.

    Returns
    -------
    list of ShardedRecord
    """
    messages = [
        (sizes[0][0], max(size[1] for size in sizes), max(size[2] for size in sizes))
        for sizes in zip(*(rank.messages for rank in found), strict=True)
    ]
    records = []
    for i, groups in enumerate(head_groups):
        ranks = [rank.steps[i] for rank in found]
        us = {name: max(rank.us[name] for rank in ranks) for name in TIMES}
        worst = float(np.max([rank.max_abs for rank in ranks]))  # NaN where one is
        reasons = [f"rank {number}: {rank.reason}" for number, rank in enumerate(ranks) if not rank.passed]
        records.append(
            ShardedRecord(
                status="wrong" if reasons else "ok",
                reason="; ".join(reasons),
                problem=asdict(shape),
                kv_lens=tuple(kv_lens),
                ranks=len(found),
                head_groups=groups,
                us=us,
                ratio=us["step"] / us["one_gpu"],
                max_abs=worst if math.isfinite(worst) else None,
                link=None,
                messages=messages,
                samples_us=[rank.samples_us for rank in ranks],
                gpu=found[0].gpu,
                arch=found[0].arch,
                versions=versions(),
                revision=revision(),
            )
        )
    return records


def predict_ranks(shape: VerifyShape, num_ranks: int, device: Device) -> list[ShardedRecord]:
    """Predict a step on several GPUs; nothing runs.

    Parameters
    ----------
    shape : VerifyShape
        Of all ranks; every request has `kv_len` tokens.
    num_ranks : int
    device : Device
        Each of them.

    Returns
    -------
    list of ShardedRecord
        One for each link that the card may have; then one without, of which every GPU holds all tokens.

    Raises
    ------
    InvalidArgumentError, UnsupportedError
        It cannot be spread so, or predicted.
    """
    _check(shape, num_ranks, ())
    alone = predict_replicated(shape, 1, device).total_us
    steps: list[tuple[str, ShardedStep]] = [
        (link.name, predict_sharded(shape, num_ranks, link, device)) for link in LINKS[device.arch]
    ]
    steps.append(("none", predict_replicated(shape, num_ranks, device)))
    return [
        ShardedRecord(
            status="predicted",
            reason="",
            problem=asdict(shape),
            kv_lens=(shape.kv_len,) * shape.batch,
            ranks=num_ranks,
            head_groups=1,
            us={
                "one_gpu": alone,
                "step": step.total_us,
                "attention": step.attention_us,
                "gather": step.gather_us,
                "exchange": step.exchange_us,
                "merge": step.merge_us,
            },
            ratio=step.total_us / alone,
            max_abs=None,
            link=name,
            messages=[],
            samples_us=[],
            gpu=device.name,
            arch=device.arch,
            versions=versions(),
            revision=revision(),
        )
        for name, step in steps
    ]


def fit_link(messages: Sequence[tuple[int, float, float]]) -> Link:
    """Fit latency and bandwidth of a link to messages among two GPUs: least squares of relative errors.

    Parameters
    ----------
    messages : sequence of tuple
        As in `Measured`, two at least.

    Returns
    -------
    Link
    """
    points = np.array([(size, us) for size, *times in messages for us in times])
    terms = np.stack([np.ones(len(points)), points[:, 0]], axis=1) / points[:, 1:]
    (latency_us, us_per_byte), *_ = np.linalg.lstsq(terms, np.ones(len(points)), rcond=None)
    return Link("fitted", gb_s=1e-3 / max(float(us_per_byte), 1e-9), latency_us=max(float(latency_us), 0.0))


def _check(shape: VerifyShape, num_ranks: int, head_groups: Sequence[int]) -> None:
    for groups in head_groups or (1,):
        if shape.num_heads % (num_ranks * groups):
            raise InvalidArgumentError(
                f"num_heads is {shape.num_heads}; {num_ranks} ranks of {groups} groups of heads must have equally many."
            )
    refused = [name for name in ("new_kv", "split_kv", "soft_cap") if getattr(shape, name)]
    if refused or shape.mask == "tree" or shape.dtype == "float32":
        what = ", ".join(refused) or ("mask 'tree'" if shape.mask == "tree" else "float32")
        raise UnsupportedError(f"{what} is given; steps on several GPUs are timed without. Leave it out.")


# --- one rank --------------------------------------------------------------------------------------------------------


def measure(
    rank: int,
    num_ranks: int,
    address: tuple[str, int],
    shape: VerifyShape,
    kv_lens: tuple[int, ...],
    head_groups: tuple[int, ...],
    timeout: float,
) -> Measured:
    """Measure as one rank, in its process.

    Parameters
    ----------
    rank, num_ranks : int
    address : tuple of str and int
        Where rank 0 listens.
    shape, kv_lens, head_groups, timeout
        As in `bench_ranks`.

    Returns
    -------
    Measured
    """
    import cupy

    cupy.cuda.Device(rank).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    device = Device.current()
    with NcclCommunicator(num_ranks, rank, address, timeout=timeout) as communicator, stream:
        work = _Work(shape, kv_lens, communicator, stream)
        messages = [(size, *work.message(size)) for size in _MESSAGES] if num_ranks > 1 else []
        return Measured(device.name, device.arch, messages, work.steps(head_groups))


class _Work:
    """What one rank times, and on what."""

    def __init__(
        self, shape: VerifyShape, kv_lens: tuple[int, ...], communicator: NcclCommunicator, stream: Any
    ) -> None:
        self._shape, self._communicator, self._stream = shape, communicator, stream
        self._kv_lens = _cupy().asarray(np.array(kv_lens, np.int32))
        self._tokens, self._heads = shape.batch * shape.q_len, shape.num_heads // communicator.num_ranks
        self._options: dict[str, Any] = {
            "max_batch": shape.batch,
            "max_q_len": shape.q_len,
            "max_kv_len": shape.kv_len,
            "page_size": shape.page_size,
            "block_table": True,
            "mask": shape.mask,
            "sm_scale": KIMI_K2_SM_SCALE,
            "q_dtype": shape.dtype,
            "out_dtype": shape.out_dtype,
        }

    def message(self, size: int) -> tuple[float, float]:
        """Time an all-gather and an all-to-all by which a rank receives so many bytes."""
        ranks = self._communicator.num_ranks
        part = size // (ranks - 1)
        return self._gather(part), self._exchange(part)

    def _gather(self, part: int) -> float:
        buffer = _cupy().zeros((self._communicator.num_ranks, part), "uint8")
        return float(np.median(self._repeated(lambda: self._communicator.all_gather(buffer, self._stream))))

    def _exchange(self, part: int) -> float:
        send, receive = (_cupy().zeros((self._communicator.num_ranks, part), "uint8") for _ in range(2))
        return float(np.median(self._repeated(lambda: self._communicator.all_to_all(send, receive, self._stream))))

    def _repeated(self, enqueue: Callable[[], object]) -> list[float]:
        return self._time([enqueue] * _REPEATS)

    def _time(self, layers: Sequence[Callable[[], object]]) -> list[float]:
        """Capture what is done on each layer, and return the microseconds of one layer in several windows."""
        cupy, stream = _cupy(), self._stream
        for enqueue in layers:
            enqueue()
        self._communicator.synchronize(stream)
        stream.begin_capture()
        for enqueue in layers:
            enqueue()
        graph = stream.end_capture()
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        samples = []
        replays = max(2, _LAUNCHES // len(layers))
        for window in range(_WINDOWS):
            begin.record(stream)
            for _ in range(replays):
                graph.launch(stream)
            end.record(stream)
            self._communicator.synchronize(stream)
            if window:  # the first one warms up
                samples.append(1e3 * float(cupy.cuda.get_elapsed_time(begin, end)) / replays / len(layers))
        return samples

    def steps(self, head_groups: Sequence[int]) -> list[RankTimes]:
        """Time the step on one GPU, then on all with each number of groups of heads."""
        cupy, shape = _cupy(), self._shape
        dtype = numpy_dtype(shape.dtype)
        q = (0.3 * cupy.random.default_rng(99).standard_normal((self._tokens, shape.num_heads, D))).astype(dtype)
        one_us, *expected = self._one_gpu(q)
        cupy.get_default_memory_pool().free_all_blocks()
        ranks = self._communicator.num_ranks
        megabytes = shape.batch * shape.kv_len * D * dtype.itemsize / 1e6 / ranks
        layers = int(min(_MOST_LAYERS, max(2, _CACHES_MB / megabytes)))
        shards = [self._cache(self._communicator.rank, ranks, layer) for layer in range(layers)]
        return [self._sharded(groups, q, shards, one_us, *expected) for groups in head_groups]

    def _cache(self, rank: int, num_ranks: int, layer: int) -> tuple[Any, Any]:
        """Make the pages of a rank, shuffled, and its table; the tokens are the same however many ranks there are."""
        cupy, shape = _cupy(), self._shape
        pages = -(-shape.kv_len // shape.page_size)
        generator = cupy.random.default_rng(layer)
        tokens = generator.standard_normal((shape.batch, pages, shape.page_size, D), np.float32)[:, rank::num_ranks]
        count = tokens.shape[1]
        flat = tokens.astype(numpy_dtype(shape.dtype)).reshape(-1, shape.page_size, D)
        del tokens
        order = cupy.asarray(np.random.default_rng(layer).permutation(len(flat)).astype(np.int32))
        shuffled = cupy.empty_like(flat)
        shuffled.view("uint16")[order] = flat.view("uint16")
        return shuffled, order.reshape(shape.batch, count)

    def _one_gpu(self, q: Any) -> tuple[list[float], Any, Any]:
        """Do the whole step on this GPU alone: its time, out and lse."""
        plan = VerifyPlan(num_heads=self._shape.num_heads, **self._options)
        caches = [self._cache(0, 1, layer) for layer in range(2)]
        plan.update(kv_lens=self._kv_lens, block_table=caches[0][1])
        out, lse = plan.run(q, caches[0][0])
        # The first layer last: its results remain.
        layers = [partial(plan.run, q, tokens, out=out, lse=lse) for tokens, _ in reversed(caches)]
        return self._time(layers), out, lse

    def _sharded(
        self, groups: int, q: Any, shards: list[Any], one_us: list[float], expected: Any, expected_lse: Any
    ) -> RankTimes:
        cupy, communicator, stream, shape = _cupy(), self._communicator, self._stream, self._shape
        ranks, heads = communicator.num_ranks, self._heads
        sharding = Interleaved(ranks, shape.page_size)
        plan = ShardedPlan(communicator, sharding, num_heads=heads, head_groups=groups, **self._options)
        columns = slice(communicator.rank * heads, (communicator.rank + 1) * heads)
        mine = cupy.ascontiguousarray(q.view("uint16")[:, columns]).view(q.dtype)

        def update() -> None:
            plan.update(kv_lens=self._kv_lens, block_table=shards[0][1])

        update()
        out, lse = plan.run(mine, shards[0][0])
        communicator.synchronize(stream)
        result = compare(
            out.get(),
            lse.get(),
            expected[:, columns].get().astype(np.float64),
            expected_lse[:, columns].get().astype(np.float64),
            _doubled(shape),
        )
        begin = time.perf_counter()
        for _ in range(_REPEATS):
            plan.run(mine, shards[0][0], out=out, lse=lse)
        host_us = (time.perf_counter() - begin) / _REPEATS * 1e6
        communicator.synchronize(stream)

        group = heads // groups
        local_q = cupy.zeros((self._tokens, group * ranks, D), q.dtype)
        local_out, local_lse = plan.local.run(local_q, shards[0][0])
        part = group * self._tokens
        samples = {
            "one_gpu": one_us,
            "step": self._time([partial(plan.run, mine, shard, out=out, lse=lse) for shard, _ in shards]),
            "attention": self._time(
                [partial(plan.local.run, local_q, shard, out=local_out, lse=local_lse) for shard, _ in shards]
            ),
            "gather": [self._gather(part * D * q.itemsize)],
            "exchange": [self._exchange(part * (DL * out.itemsize + 4))],
            "update": self._time([update]),
            "host": [host_us],
        }
        return RankTimes(samples, bool(result.passed), str(result.reason), float(result.max_abs))


def _doubled(shape: VerifyShape) -> Any:
    limits = tolerance(shape.dtype, shape.out_dtype or shape.dtype)
    return replace(limits, **{name: 2 * value for name, value in asdict(limits).items()})


def _cupy() -> Any:
    import cupy

    return cupy
