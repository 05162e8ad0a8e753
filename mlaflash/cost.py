"""Choose row tile and splits of the tensor-core kernels from counts: a model of their time, no device, no measurement.

One call is a split kernel and, with more than one split, a merge. A block of the split kernel walks its KV in tiles of
16 tokens, one after the other, so with W waves of blocks

    time = launch + max(W * (start + tiles of a split * time of a tile), start + bytes / bandwidth)

where the first row tile of a request reads its KV from memory and the others read it from the level-2 cache.

The constants were fitted to one NVIDIA H200 at 1.79 GHz, all at once, to what `mlaflash sweep` measured of the
candidates of 141 problems (`docs/experiments.md`). Those of a tile are kept in clocks, and what a tile needs of the
tensor cores and of shared memory is counted. On other GPUs a tile takes what it took there, or what the counts say if
that is more: a prediction, until it is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from mlaflash import combine
from mlaflash.device import Device, occupancy_blocks, parse_arch
from mlaflash.errors import InvalidArgumentError, TileError
from mlaflash.mma_tiles import (
    NARROW,
    NARROW_32,
    NARROW_32_DEEP,
    NARROW_32_E4M3,
    NARROW_DS_MLA,
    NARROW_E4M3,
    ROLES_32_E4M3,
    ROLES_E4M3,
    ROWS_32,
    ROWS_64,
    ROWS_64_ROLES,
    TILE,
    MmaKernelConfig,
)
from mlaflash.params import DL, row_bytes

TOKENS_PER_SPLIT: Final = 64
"""Fewest tokens of a split: below, starting a block costs more than its share of the KV."""

_LAUNCH_US = 2.8
_ACHIEVABLE = 0.9  # of a data sheet's bandwidth: 4.3 of the 4.8 TB/s of an H200
_ACCURACY = 0.01  # candidates as near as this to the best one are as good for all that the model knows
_LATER_START = 0.64  # of a block's start once another block has warmed the caches
_LAST_TILES = 0.06  # of a block's tiles, that the last of several waves waits for, as blocks do not end together

# The merge, launched as a dependent: what its launch leaves, a round of loads, and partials that lie in the cache.
_MERGE_US = 1.5
_MERGE_FEW_US = 1.25  # of up to 32 splits, whose weights every warp finds for itself
_MERGE_ROUND_US = 1.0
_MERGE_BANDWIDTH = 0.365  # of the level-2 cache's
# Where four warps share more than 32 splits a row has four blocks, of 80 registers a thread on sm_90: an SM holds six
# at a time. Blocks of other merges fit in one wave.
_MERGE_BLOCKS_PER_SM = 6
_MERGE_WAVE_US = 2.4


@dataclass(frozen=True, slots=True)
class Speed:
    """What a GPU's model of the time depends on besides its number of multiprocessors.

    Attributes
    ----------
    dram_gbps : float
        Bandwidth of its memory by the data sheet, in GB/s.
    l2_gbps : float
        Bandwidth of reads from its level-2 cache: measured on an H200, reported for sm_120, estimated for the others.
    sm_ghz : float
        Clock of its multiprocessors under this load.
    mma_clocks : float
        Clocks that one ``mma.sync.m16n8k16`` with float32 sums occupies a multiprocessor.
    """

    dram_gbps: float
    l2_gbps: float
    sm_ghz: float
    mma_clocks: float


_SPEEDS: dict[tuple[int, int], Speed] = {
    (8, 0): Speed(2039, 4000, 1.41, 2),
    (8, 6): Speed(768, 2000, 1.8, 8),
    (8, 7): Speed(204, 600, 1.3, 8),
    (8, 9): Speed(864, 4000, 2.4, 8),
    (9, 0): Speed(3350, 5000, 1.79, 1.51),
    (10, 0): Speed(8000, 10000, 1.85, 2),
    (10, 3): Speed(8000, 10000, 1.85, 2),
    (12, 0): Speed(1792, 8700, 2.2, 4),
    (12, 1): Speed(273, 2000, 2.4, 8),
}
# Cards that differ from the usual one of their architecture.
_SPEEDS_BY_NAME = {
    "H200": Speed(4800, 5000, 1.79, 1.51),
    "RTX 5090": Speed(1792, 7900, 2.4, 8),
}


def speed_of(device: Device) -> Speed:
    """Return the data-sheet speed of a GPU.

    Parameters
    ----------
    device : Device
        Its name decides, where it is listed; else its architecture, and that of the nearest older one if there is none.
    """
    for name, speed in _SPEEDS_BY_NAME.items():
        if name in device.name:
            return speed
    capability = parse_arch(device.arch)[0]
    return _SPEEDS[max(known for known in _SPEEDS if known <= capability)]


@dataclass(frozen=True, slots=True)
class TileCounts:
    """What a block does for one KV tile, all warps together: counted by the emulator, and in the machine code.

    Attributes
    ----------
    mma : int
        ``mma.sync.m16n8k16``.
    ldmatrix : int
        Of four 8 x 8 matrices.
    shared_bytes : int
        That threads load from and store to shared memory besides, to exchange scores and weights for the most part.
    copied_bytes : int
        Of the KV, and of page ids, that asynchronous copies write to shared memory.
    barriers : int
        Arrivals of warps at named barriers.
    arrivals : int
        Of threads and copies at mbarriers.
    """

    mma: int
    ldmatrix: int
    shared_bytes: int
    copied_bytes: int
    barriers: int
    arrivals: int

    @property
    def shared_clocks(self) -> float:
        """Clocks that the path to shared memory is busy, at 128 bytes a clock; an ``ldmatrix`` takes four."""
        return 4 * self.ldmatrix + (self.shared_bytes + self.copied_bytes) / 128


@dataclass(frozen=True, slots=True)
class RowClass:
    """Costs of one configuration.

    Attributes
    ----------
    config : MmaKernelConfig
    start_us : float
        From a block's first instruction to its first tile, and from its last to its end.
    tile_clocks : float
        Measured time of a tile: the chain of loads, products, exchange and softmax.
    counts : TileCounts
    blocks_per_sm : int
        Blocks that share a multiprocessor, and with it these times.
    least_capability : tuple of int
        Of GPUs that it is chosen for: on older ones it takes more registers than a thread has.
    takes_lists : bool
        Whether it does attention over lists of slots.
    takes_new_kv : bool
        Whether the last tokens may come from `new_kv`.
    tiles_at_once : int
        Tiles that a block works on side by side: it takes as long for fewer of them.
    """

    config: MmaKernelConfig
    start_us: float
    tile_clocks: float
    counts: TileCounts
    blocks_per_sm: int = 1
    least_capability: tuple[int, int] = (8, 0)
    takes_lists: bool = True
    takes_new_kv: bool = True
    tiles_at_once: int = 1


ROW_CLASSES: Final = (
    RowClass(NARROW, start_us=5.6, tile_clocks=806, counts=TileCounts(136, 68, 16_896, 18_688, 4, 0)),
    RowClass(
        NARROW_32,
        start_us=7.2,
        tile_clocks=1040,
        counts=TileCounts(272, 68, 23_900, 18_688, 8, 0),
        least_capability=(9, 0),
        takes_lists=False,
    ),
    RowClass(
        NARROW_32_DEEP,
        start_us=6.9,
        tile_clocks=1035,
        counts=TileCounts(272, 68, 23_900, 18_688, 8, 0),
        least_capability=(9, 0),
        takes_lists=False,
    ),
    RowClass(ROWS_32, start_us=5.7, tile_clocks=1366, counts=TileCounts(272, 136, 32_768, 18_432, 8, 512)),
    RowClass(
        ROWS_64_ROLES,
        # Call after call it is 2 us less. Between other kernels, as in a model, its code has to come from memory.
        start_us=9.5,
        tile_clocks=1375,
        counts=TileCounts(544, 104, 49_800, 18_496, 16, 1_024),
        least_capability=(9, 0),
        takes_lists=False,
    ),
    RowClass(ROWS_64, start_us=7.0, tile_clocks=1700, counts=TileCounts(544, 272, 16_384, 18_432, 8, 512)),
)
"""Configurations to choose from, fewest rows first; of equal times the first one is taken."""

FP8_ROW_CLASSES: Final = {
    "float8_e4m3": (
        RowClass(
            NARROW_E4M3,
            start_us=7.5,
            tile_clocks=1170,
            counts=TileCounts(136, 34, 10_496, 9_344, 4, 0),
            blocks_per_sm=2,
        ),
        RowClass(
            NARROW_32_E4M3,
            start_us=7.1,
            tile_clocks=1920,
            counts=TileCounts(272, 32, 29_200, 9_472, 8, 0),
            blocks_per_sm=2,
            takes_lists=False,
        ),
        RowClass(
            ROLES_32_E4M3,
            start_us=9.1,
            tile_clocks=750,
            counts=TileCounts(272, 34, 28_704, 9_280, 8, 512),
            takes_lists=False,
            takes_new_kv=False,
            tiles_at_once=2,
        ),
        RowClass(
            ROLES_E4M3,
            start_us=9.0,
            tile_clocks=1380,
            counts=TileCounts(544, 52, 78_456, 9_216, 16, 1_024),
            takes_lists=False,
            takes_new_kv=False,
        ),
    ),
    "fp8_ds_mla": (
        RowClass(NARROW_DS_MLA, start_us=5.6, tile_clocks=920, counts=TileCounts(136, 36, 18_944, 10_752, 8, 0)),
    ),
}
"""The same for caches of 8 bits, by what these hold. For e4m3 fitted to a sweep of its own (`docs/experiments.md`); for
656-byte rows the time of a tile was measured, and that of a start is the 16-bit kernel's."""


def row_classes(kv_dtype: str) -> tuple[RowClass, ...]:
    """Return the configurations to choose from.

    Parameters
    ----------
    kv_dtype : str
        What the cache holds.
    """
    return FP8_ROW_CLASSES.get(kv_dtype, ROW_CLASSES)


def config_for(kernel: str, kv_dtype: str, is_sparse: bool = False) -> MmaKernelConfig:
    """Return the constants of a kernel that is asked for by its name alone: those with the most rows.

    Parameters
    ----------
    kernel : str
    kv_dtype : str
        What the cache holds.
    is_sparse : bool
        Whether each query token has a list of its slots.
    """
    known = [c for c in row_classes(kv_dtype) if c.config.kernel == kernel]
    # Whoever asks a kernel for lists that it does not take is told so by its name.
    allowed = [c for c in known if c.takes_lists >= is_sparse] or known
    return max((c.config for c in allowed), key=lambda config: config.rows)


# Where the tensor cores are the limit, as on no GPU that was measured, the chain around them still costs some time.
_MMA_OVERHEAD = 1.2


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of a call from a cold level-2 cache, and what it is made of, in microseconds.

    Attributes
    ----------
    launch_us : float
        Until the first block runs.
    start_us : float
        Of the first block: before its first KV tile and after its last.
    chain_us : float
        `start_us`, and the KV tiles of the blocks that follow each other on one multiprocessor.
    memory_us : float
        `start_us`, and all bytes at the bandwidths of memory and level-2 cache.
    merge_us : float
        Of the splits; 0 with one.
    tile_limit : str
        What takes the time of a tile: ``"latency of a tile"``, ``"tensor cores"`` or ``"shared memory"``.
    inputs : mapping of str to float
        Every number that the prediction was made of, by its name in this module.
    """

    launch_us: float
    start_us: float
    chain_us: float
    memory_us: float
    merge_us: float
    tile_limit: str
    inputs: Mapping[str, float]

    @property
    def total_us(self) -> float:
        """Of the whole call."""
        return self.launch_us + max(self.chain_us, self.memory_us) + self.merge_us

    @property
    def limit(self) -> str:
        """What binds: ``"start and merge"`` where they take half of the time, else ``"memory"`` or `tile_limit`."""
        if 2 * (self.launch_us + self.start_us + self.merge_us) > self.total_us:
            return "start and merge"
        return "memory" if self.memory_us >= self.chain_us else self.tile_limit


@dataclass(frozen=True, slots=True)
class Choice:
    """What to launch.

    Attributes
    ----------
    config : MmaKernelConfig
        Constants of the split kernel.
    num_splits : int
        Splits of each request's KV; 1 writes the result directly.
    predicted_us : float
        Time of the whole call from a cold level-2 cache, if every request has the greatest length.
    reasons : tuple of str
        What decided, for people.
    prediction : Prediction
        What `predicted_us` is made of.
    """

    config: MmaKernelConfig
    num_splits: int
    predicted_us: float
    reasons: tuple[str, ...]
    prediction: Prediction


@functools.lru_cache(maxsize=4096)
def choose(
    rows_per_request: int,
    batch: int,
    max_kv_len: int,
    device: Device,
    *,
    partial_bytes: int = 2,
    max_splits: int = combine.MAX_SPLITS,
    row_tile: int | None = None,
    is_sparse: bool = False,
    has_new_kv: bool = False,
    kv_dtype: str = "bfloat16",
    speed: Speed | None = None,
) -> Choice:
    """Choose the configuration and the number of splits with the least predicted time.

    Of configurations that are about equally fast, the one that reads the KV least often is taken.

    Parameters
    ----------
    rows_per_request : int
        Most packed rows of a request: query tokens times heads.
    batch : int
        Requests.
    max_kv_len : int
        Most tokens of a request; what the page table can hold, where nobody knows better.
    device : Device
        Multiprocessors and limits of shared memory.
    partial_bytes : int
        Bytes of an element of the splits' partial outputs.
    max_splits : int
        Upper bound of `num_splits`.
    row_tile : int or None
        Packed rows of a block, where they are given; None chooses.
    is_sparse : bool
        Whether each query token has a list of its slots.
    has_new_kv : bool
        Whether the last tokens come from `new_kv`.
    kv_dtype : str
        What the cache holds.
    speed : Speed or None
        None is that of the data sheet.

    Returns
    -------
    Choice

    Raises
    ------
    InvalidArgumentError
        A count is below 1, `max_kv_len` below 0.
    TileError
        No configuration fits the device.
    """
    if min(rows_per_request, batch, max_splits) < 1 or max_kv_len < 0:
        raise InvalidArgumentError(
            f"rows_per_request is {rows_per_request}, batch {batch}, max_kv_len {max_kv_len} and max_splits "
            f"{max_splits}; each must be at least 1, and max_kv_len at least 0."
        )
    speed = speed or speed_of(device)
    model = _Model(rows_per_request, batch, max_kv_len, device.num_sms, speed, partial_bytes, kv_dtype)
    allowed = [c for c in row_classes(kv_dtype) if row_tile in (None, c.config.rows)]
    if not allowed:
        known = ", ".join(str(c.config.rows) for c in row_classes(kv_dtype))
        raise InvalidArgumentError(f"row_tile is {row_tile}; there are row tiles of {known}. Use one of them, or None.")
    fitting = [c for c in fitting_classes(device, is_sparse, kv_dtype, has_new_kv) if c in allowed]
    if not fitting:
        least = min(c.config.shared_bytes(kv_dtype) for c in allowed if c.blocks_per_sm == 1)
        raise TileError(
            f"the tensor-core kernels ask for at least {least} bytes of shared memory a block; {device.name} allows "
            f"{device.shared_per_block}. Use the kernel tile.",
            shared_bytes=least,
            shared_limit=device.shared_per_block,
        )
    best = [model.best_splits(c, max_splits) for c in fitting]
    bound = min(best)[0] * (1 + _ACCURACY)
    good = [(us, splits, c) for c, (us, splits) in zip(fitting, best, strict=True) if us <= bound]
    us, splits, row_class = min(good, key=lambda each: (model.row_tiles(each[2]), model.chain_us(each[2], each[1])))
    return Choice(row_class.config, splits, us, model.reasons(row_class, splits), model.prediction(row_class, splits))


def choice_of(
    config: MmaKernelConfig,
    num_splits: int,
    rows_per_request: int,
    batch: int,
    max_kv_len: int,
    device: Device,
    *,
    partial_bytes: int = 2,
    kv_dtype: str = "bfloat16",
    speed: Speed | None = None,
) -> Choice:
    """Predict a call with given constants and splits.

    Parameters
    ----------
    config : MmaKernelConfig
        Constants that are none of `ROW_CLASSES` cost what the nearest of them do: same rows, threads, kernel.
    num_splits : int
    rows_per_request, batch, max_kv_len, device, partial_bytes, kv_dtype, speed
        As in `choose`.
    """
    speed = speed or speed_of(device)
    model = _Model(rows_per_request, batch, max_kv_len, device.num_sms, speed, partial_bytes, kv_dtype)
    row_class = _nearest_class(config, kv_dtype)
    prediction = model.prediction(row_class, num_splits)
    return Choice(config, num_splits, prediction.total_us, model.reasons(row_class, num_splits), prediction)


def candidates(
    rows_per_request: int,
    batch: int,
    max_kv_len: int,
    device: Device,
    *,
    partial_bytes: int = 2,
    kv_dtype: str = "bfloat16",
) -> list[tuple[MmaKernelConfig, int, float]]:
    """List what a measurement may try, with predicted microseconds, the least of them first.

    Every fitting configuration with every number of splits that fills a part of a wave of blocks, or a few.

    Parameters
    ----------
    rows_per_request, batch, max_kv_len, device, partial_bytes, kv_dtype
        As in `choose`.
    """
    speed = speed_of(device)
    model = _Model(rows_per_request, batch, max_kv_len, device.num_sms, speed, partial_bytes, kv_dtype)
    found = [
        (c.config, splits, model.prediction(c, splits).total_us)
        for c in fitting_classes(device, kv_dtype=kv_dtype)
        for splits in model.split_candidates(c, combine.MAX_SPLITS)
    ]
    return sorted(found, key=lambda each: each[2])


def usable_splits(num_splits: int, max_kv_len: int) -> int:
    """Return the least number of splits with runs as long as those of a given number: none of them is empty.

    Parameters
    ----------
    num_splits : int
    max_kv_len : int
        Most tokens of a request.
    """
    tiles = max(1, _ceil(max_kv_len, TILE))
    most = max(1, min(num_splits, tiles * TILE // TOKENS_PER_SPLIT))
    return _ceil(tiles, _ceil(tiles, most))


def fitting_classes(
    device: Device, is_sparse: bool = False, kv_dtype: str = "bfloat16", has_new_kv: bool = False
) -> list[RowClass]:
    """List the configurations that `choose` takes on a device: as many blocks of each as it counts on fit an SM.

    Parameters
    ----------
    device : Device
    is_sparse : bool
        Whether each query token has a list of its slots.
    kv_dtype : str
        What the cache holds.
    has_new_kv : bool
        Whether the last tokens come from `new_kv`.
    """
    capability = parse_arch(device.arch)[0]
    allowed = [c for c in row_classes(kv_dtype) if c.takes_lists >= is_sparse and c.takes_new_kv >= has_new_kv]
    allowed = [c for c in allowed if capability >= c.least_capability]
    return [c for c in allowed if occupancy_blocks(c.config.shared_bytes(kv_dtype), device) >= c.blocks_per_sm]


def blocks_per_sm(config: MmaKernelConfig, device: Device, kv_dtype: str = "bfloat16") -> int:
    """Count the blocks that share a multiprocessor.

    Parameters
    ----------
    config : MmaKernelConfig
    device : Device
    kv_dtype : str
        What the cache holds.
    """
    # Threads of these kernels take up to 255 registers, so that an SM has room for 256, or for the 384 of `mma_roles`.
    room = max(1, 256 // config.threads)
    known = [c.blocks_per_sm for c in row_classes(kv_dtype) if c.config == config]
    return min(occupancy_blocks(config.shared_bytes(kv_dtype), device), known[0] if known else room)


def start_tiles(config: MmaKernelConfig, device: Device, kv_dtype: str = "bfloat16") -> int:
    """Return what starting on another row tile costs a block that runs already, in KV tiles.

    Parameters
    ----------
    config : MmaKernelConfig
    device : Device
    kv_dtype : str
        What the cache holds.
    """
    row_class = _nearest_class(config, kv_dtype)
    tile_us = _Model(1, 1, 1, device.num_sms, speed_of(device), 2, kv_dtype).tile_us(row_class)
    return max(1, round(_LATER_START * row_class.start_us / tile_us))


def _nearest_class(config: MmaKernelConfig, kv_dtype: str) -> RowClass:
    def distance(row_class: RowClass) -> tuple[bool, ...]:
        known = row_class.config
        differ = (known.rows, known.threads, known.kernel) != (config.rows, config.threads, config.kernel)
        return known != config, differ, known.rows != config.rows, known.threads != config.threads

    return min(row_classes(kv_dtype), key=distance)


@dataclass(frozen=True, slots=True)
class _Model:
    rows: int
    batch: int
    kv_len: int
    num_sms: int
    speed: Speed
    partial_bytes: int
    kv_dtype: str

    @property
    def tiles(self) -> int:
        return max(1, _ceil(self.kv_len, TILE))

    def row_tiles(self, row_class: RowClass) -> int:
        return _ceil(self.rows, row_class.config.rows)

    def slots(self, row_class: RowClass) -> int:
        """Count the blocks that run at once."""
        return self.num_sms * row_class.blocks_per_sm

    def run(self, row_class: RowClass, splits: int) -> int:
        """Count the tiles that a split takes the time of."""
        return _ceil(_ceil(self.tiles, splits), row_class.tiles_at_once) * row_class.tiles_at_once

    def split_candidates(self, row_class: RowClass, max_splits: int) -> list[int]:
        """Return 1, the most that is allowed, and what fills one to four waves or a part of one.

        Splits are runs of equally many tiles: of the numbers that give the same run, the least leaves no split empty.
        """
        most = max(1, min(max_splits, self.tiles * TILE // TOKENS_PER_SPLIT))
        blocks = self.batch * self.row_tiles(row_class)
        wanted = {1, most} | {int(waves * self.slots(row_class) / blocks) for waves in (0.25, 0.5, 0.75, 1, 2, 3, 4)}
        counts = {min(max(splits, 1), most) for splits in wanted}
        return sorted({_ceil(self.tiles, self.run(row_class, splits)) for splits in counts})

    def best_splits(self, row_class: RowClass, max_splits: int) -> tuple[float, int]:
        """Return the least time and its splits; of about equal ones those with the shortest chain of tiles."""
        times = {splits: self.call_us(row_class, splits) for splits in self.split_candidates(row_class, max_splits)}
        bound = min(times.values()) * (1 + _ACCURACY)
        good = [splits for splits, us in times.items() if us <= bound]
        splits = min(good, key=lambda each: (self.chain_us(row_class, each), each))
        return times[splits], splits

    def tile_times(self, row_class: RowClass) -> dict[str, float]:
        """Return the clocks of a tile by each of its limits."""
        counts, blocks = row_class.counts, row_class.blocks_per_sm
        return {
            "latency of a tile": row_class.tile_clocks,
            "tensor cores": _MMA_OVERHEAD * blocks * counts.mma * self.speed.mma_clocks,
            "shared memory": blocks * counts.shared_clocks,
        }

    def tile_us(self, row_class: RowClass) -> float:
        return max(self.tile_times(row_class).values()) / self.speed.sm_ghz / 1e3

    def partial_mb(self, splits: int) -> float:
        return splits * self.batch * self.rows * DL * self.partial_bytes / 1e6

    def chain_us(self, row_class: RowClass, splits: int) -> float:
        waves = _ceil(self.batch * self.row_tiles(row_class) * splits, self.slots(row_class))
        start = row_class.start_us * (1 + _LATER_START * (waves - 1))
        late = _LAST_TILES if waves > 1 else 0.0
        return start + (waves + late) * self.run(row_class, splits) * self.tile_us(row_class)

    def memory_us(self, row_class: RowClass, splits: int) -> float:
        # Row tiles of a request run side by side: all but one read from the level-2 cache, half of that time hidden.
        kv_mb = self.batch * self.kv_len * row_bytes(self.kv_dtype) / 1e6
        again_mb = (self.row_tiles(row_class) - 1) * kv_mb
        dram_us = (kv_mb + self.partial_mb(splits)) * 1e3 / (_ACHIEVABLE * self.speed.dram_gbps)
        return row_class.start_us + dram_us + 0.5 * again_mb * 1e3 / self.speed.l2_gbps

    def merge_us(self, splits: int) -> float:
        """Return what the merge adds: latency, rounds of loads beyond the first, waves of its blocks, traffic."""
        if splits == 1:
            return 0.0
        rows = self.batch * self.rows
        warps = combine.split_warps(splits, rows)
        rounds = _ceil(splits, 8 * warps)
        waves = rows * combine.grid(rows, splits)[1] / (_MERGE_BLOCKS_PER_SM * self.num_sms) if warps > 1 else 1.0
        latency = (
            (_MERGE_FEW_US if splits <= 32 else _MERGE_US)
            + _MERGE_ROUND_US * (rounds - 1)
            + _MERGE_WAVE_US * max(0.0, waves - 1)
        )
        return latency + self.partial_mb(splits) * 1e3 / (_MERGE_BANDWIDTH * self.speed.l2_gbps)

    def call_us(self, row_class: RowClass, splits: int) -> float:
        return (
            _LAUNCH_US
            + max(self.chain_us(row_class, splits), self.memory_us(row_class, splits))
            + self.merge_us(splits)
        )

    def prediction(self, row_class: RowClass, splits: int) -> Prediction:
        times = self.tile_times(row_class)
        row_tiles = self.row_tiles(row_class)
        return Prediction(
            launch_us=_LAUNCH_US,
            start_us=row_class.start_us,
            chain_us=self.chain_us(row_class, splits),
            memory_us=self.memory_us(row_class, splits),
            merge_us=self.merge_us(splits),
            tile_limit=max(times, key=times.__getitem__),
            inputs={
                "num_sms": self.num_sms,
                **asdict(self.speed),
                "achievable_bandwidth": _ACHIEVABLE,
                "row_tiles": row_tiles,
                "splits": splits,
                "blocks": self.batch * row_tiles * splits,
                "waves": _ceil(self.batch * row_tiles * splits, self.slots(row_class)),
                "tiles_per_block": _ceil(self.tiles, splits),
                "start_us": row_class.start_us,
                "tile_clocks": row_class.tile_clocks,
                **{f"{name}_per_tile": count for name, count in asdict(row_class.counts).items()},
                "kv_mb": self.batch * self.kv_len * row_bytes(self.kv_dtype) / 1e6,
                "partial_mb": 0.0 if splits == 1 else self.partial_mb(splits),
            },
        )

    def reasons(self, row_class: RowClass, splits: int) -> tuple[str, ...]:
        row_tiles = self.row_tiles(row_class)
        blocks = self.batch * row_tiles * splits
        chain, memory = self.chain_us(row_class, splits), self.memory_us(row_class, splits)
        limit = "the chain of a block's tiles" if chain > memory else "memory"
        return (
            f"{self.rows} rows a request in {row_tiles} row tiles of {row_class.config.rows}",
            f"{splits} splits of {_ceil(self.tiles, splits) * TILE} tokens: {blocks} blocks on {self.num_sms} SMs",
            f"limit: {limit} (tiles {chain:.1f} us, memory {memory:.1f} us, merge {self.merge_us(splits):.1f} us)",
        )


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
