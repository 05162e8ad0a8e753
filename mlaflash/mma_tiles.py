"""Constants of the tensor-core kernels: what can be chosen, and what it costs in shared memory and registers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final, Protocol, TypeAlias, runtime_checkable

from mlaflash.checks import integer
from mlaflash.errors import TileError
from mlaflash.params import DL, DR, FP8_CODES, D

TILE: Final = 16
"""KV tokens of a tile, and rows of a tensor-core operand."""

MAX_TAIL_LEN: Final = 1024
"""Most mask columns of a request: kernels keep one bit for each of them in shared memory."""

_ROW_PITCH: Final = 2 * D + 16
_WARP: Final = 32


def _slice_pitch(kv_dtype: str, parts: int) -> int:
    """Bytes of a part of a cache row in shared memory; a scale of "fp8_ds_mla" takes 16."""
    if kv_dtype not in FP8_CODES:
        return 2 * D // parts
    slice_bytes = D // parts if kv_dtype == "float8_e4m3" else DL // parts + DR // parts * 2 + 16
    return slice_bytes if slice_bytes // 16 % 2 else slice_bytes + 16


@runtime_checkable
class MmaConfig(Protocol):
    """What the set of constants of a tensor-core kernel offers; also a `mlaflash.tiles.KernelConfig`."""

    @property
    def kernel(self) -> str:
        """Name of the kernel, as its file in ``kernels/``."""

    @property
    def rows(self) -> int:
        """Packed rows (query token x head) of a block: grid x is ``ceil(max_q_len * H / rows)``."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def nsplit(self) -> int | None:
        """Splits of the KV; None is chosen from the problem and the device."""

    def defines(self) -> dict[str, int]:
        """Constants of the kernel without its element types and without `feature_defines`."""

    def shared_bytes(self, kv_dtype: str = "bfloat16") -> int:
        """Dynamic shared memory of a block in bytes."""

    def as_dict(self) -> dict[str, int]:
        """Return the constants under their lower-case names, for records."""


def feature_defines(logit_cap: float, has_new_kv: bool, is_split_kv: bool) -> dict[str, int]:
    """Return the constants that leave out what a call does not use.

    Parameters
    ----------
    logit_cap : float
        0 where scores are not capped.
    has_new_kv : bool
        Whether the last q_len tokens come from `new_kv`.
    is_split_kv : bool
        Whether the rope columns of a cache row lie elsewhere than right behind its latent ones.
    """
    return {"SOFT_CAP": int(logit_cap > 0), "NEW_KV": int(has_new_kv), "SPLIT_KV": int(is_split_kv)}


@dataclass(frozen=True, slots=True)
class MmaWideConfig:
    """Constants of the `mma_wide` kernel, for 32 rows and more.

    `ROWS_64` and `ROWS_32` are the two that were measured to be best within 101,376 bytes; both take 8 warps. 64 rows
    take all 255 registers of a thread, 32 rows about 190. For 64 rows `mma_roles` is faster.

    Parameters
    ----------
    row_groups : int
        Groups of 16 rows of a block.
    column_warps : int
        Warps that share a row group's dims and output columns, a power of two.
    stages : int
        KV tiles in the ring, a power of two: two are in use, the others on their way.
    lookahead : int
        Operand loads that a warp issues ahead of the products that use them.
    refill_at : int
        Which of a warp's ``36 / column_warps`` steps through the dims of a tile is interrupted to refill the ring.
    nsplit : int or None
        Splits of the KV, at least 1; None is chosen from the problem and the device. A run-time number: changing it
        compiles nothing.

    Raises
    ------
    TileError
        Constants that `mma_wide.cu` is not built for.
    InvalidArgumentError
        `nsplit` is below 1.
    """

    row_groups: int = 4
    column_warps: int = 2
    stages: int = 4
    lookahead: int = 1
    refill_at: int = 9
    nsplit: int | None = None

    def __post_init__(self) -> None:
        """Check the constants against each other; the device's limits are checked by `mlaflash.tiles.check_shared`."""
        if self.column_warps not in (2, 4) or self.row_groups * self.column_warps not in (4, 8):
            raise TileError(
                f"row_groups is {self.row_groups} and column_warps {self.column_warps}; column_warps must be 2 or 4 "
                "and their product 4 or 8. Use 4 and 2 for 64 rows, 2 and 4 for 32."
            )
        if self.stages not in (4, 8) or self.stages < self.row_groups:
            raise TileError(f"stages is {self.stages}; it must be 4 or 8, and no less than row_groups. Use 4.")
        if self.lookahead not in (1, 2, 3):
            raise TileError(f"lookahead is {self.lookahead}; it must be 1, 2 or 3. Use 1 for 64 rows, 3 for 32.")
        if not 0 <= self.refill_at <= 36 // self.column_warps:
            raise TileError(
                f"refill_at is {self.refill_at}; with {self.column_warps} column warps a tile has "
                f"{36 // self.column_warps} steps. Use about half of them."
            )
        if self.nsplit is not None:
            object.__setattr__(self, "nsplit", integer("nsplit", self.nsplit, 1))

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "mma_wide"

    @property
    def rows(self) -> int:
        """Packed rows of a block."""
        return 16 * self.row_groups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _WARP * self.row_groups * self.column_warps

    def defines(self) -> dict[str, int]:
        """Return ROW_GROUPS, COLUMN_WARPS, STAGES, LOOKAHEAD and REFILL_AT."""
        return {
            "ROW_GROUPS": self.row_groups,
            "COLUMN_WARPS": self.column_warps,
            "STAGES": self.stages,
            "LOOKAHEAD": self.lookahead,
            "REFILL_AT": self.refill_at,
        }

    def shared_bytes(self, kv_dtype: str = "bfloat16") -> int:
        """Bytes of the ring with its barriers, of two buffers of partial scores, and of the mask columns."""
        ring = self.stages * (TILE * _ROW_PITCH + 16)
        exchange = 2 * self.threads * 2 * 16
        return ring + exchange + MAX_TAIL_LEN // 8 + 16

    def as_dict(self) -> dict[str, int]:
        """Return the constants, and `nsplit` where it is set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


ROWS_64: Final = MmaWideConfig(row_groups=4, column_warps=2, lookahead=1, refill_at=9)
"""Row tiles of 64: 91,344 bytes, 255 registers."""

ROWS_32: Final = MmaWideConfig(row_groups=2, column_warps=4, lookahead=3, refill_at=3)
"""Row tiles of 32: 91,344 bytes, under 200 registers."""


@dataclass(frozen=True, slots=True)
class MmaNarrowConfig:
    """Constants of the `mma_narrow` kernel, for up to 32 rows, and for more rows over short KV as row tiles of 16.

    `NARROW` and `NARROW_32` fill an SM with one block, `NARROW_PAIR` with two; either way two groups of warps hide each
    other's latency.

    Parameters
    ----------
    kv_groups : int
        Groups of four warps that take turns at the KV tiles, 1 or 2.
    stages : int
        KV tiles in each warp's ring, at least 2: one is in use.
    exchange_buffers : int
        Buffers for the scores that a group's warps exchange: 2 save a barrier a tile.
    step_tiles : int
        Tiles that a group takes at once, 1 or, over a cache of 8 bits, 2.
    row_tiles : int
        Row tiles of 16 of a block, 1 or, over a cache of 16 bits or of e4m3, 2, of which each warp of a group weighs a
        quarter. Two over 16 bits take no lists of slots.
    column_warps : int
        Warps of a group, each with its share of the columns: 4 or, over a cache of e4m3, 2.
    shared_steps : int
        Over a cache of e4m3 with two row tiles or two column warps, of the steps through a warp's share of q those
        that stay in shared memory for want of registers, 0 to 7.
    nsplit : int or None
        Splits of the KV, at least 1; None is chosen from the problem and the device. A run-time number: changing it
        compiles nothing.

    Raises
    ------
    TileError
        Constants that `mma_narrow.cu` is not built for.
    InvalidArgumentError
        `nsplit` is below 1.
    """

    kv_groups: int = 2
    stages: int = 2
    exchange_buffers: int = 2
    step_tiles: int = 1
    row_tiles: int = 1
    column_warps: int = 4
    shared_steps: int = 0
    nsplit: int | None = None

    def __post_init__(self) -> None:
        """Check the constants against each other; the device's limits are checked by `mlaflash.tiles.check_shared`."""
        if self.step_tiles not in (1, 2):
            raise TileError(f"step_tiles is {self.step_tiles}; it must be 1, or 2 for a cache of 8 bits. Use 1.")
        if self.row_tiles not in (1, 2) or self.row_tiles * self.step_tiles > 2:
            raise TileError(
                f"row_tiles is {self.row_tiles} and step_tiles {self.step_tiles}; each must be 1 or 2, and not both 2. "
                "Use 1 and 1, or 2 and 1, or for a cache of 8 bits 1 and 2."
            )
        if self.row_tiles == 2 and self.exchange_buffers != 1:
            raise TileError(
                f"row_tiles is 2 and exchange_buffers {self.exchange_buffers}; two row tiles have one buffer. Use 1."
            )
        if self.column_warps not in (2, 4) or (self.column_warps == 2 and self.row_tiles * self.step_tiles > 1):
            raise TileError(
                f"column_warps is {self.column_warps}, row_tiles {self.row_tiles} and step_tiles {self.step_tiles}; "
                "column_warps must be 4, or over a cache of e4m3 2 with single tiles. Use 4."
            )
        if not 0 <= self.shared_steps <= (7 if self.row_tiles * 4 // self.column_warps == 2 else 0):
            raise TileError(
                f"shared_steps is {self.shared_steps}; it must be 0, or with two row tiles or two column warps at "
                "most 7. Use 0."
            )
        if self.kv_groups not in (1, 2) or self.exchange_buffers not in (1, 2):
            raise TileError(
                f"kv_groups is {self.kv_groups} and exchange_buffers {self.exchange_buffers}; each must be 1 or 2. "
                "Use 2 and 2 for one block an SM, 1 and 1 for two."
            )
        if self.stages < 2:
            raise TileError(f"stages is {self.stages}; it must be at least 2. Use 2.")
        if self.nsplit is not None:
            object.__setattr__(self, "nsplit", integer("nsplit", self.nsplit, 1))

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "mma_narrow"

    @property
    def rows(self) -> int:
        """Packed rows of a block."""
        return self.row_tiles * TILE

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.column_warps * _WARP * self.kv_groups

    def defines(self) -> dict[str, int]:
        """Return the constants but for `nsplit`, in upper case."""
        return {
            "KV_GROUPS": self.kv_groups,
            "STAGES": self.stages,
            "EXCHANGE_BUFFERS": self.exchange_buffers,
            "STEP_TILES": self.step_tiles,
            "ROW_TILES": self.row_tiles,
            "COLUMN_WARPS": self.column_warps,
            "SHARED_STEPS": self.shared_steps,
        }

    def shared_bytes(self, kv_dtype: str = "bfloat16") -> int:
        """Bytes of the warps' rings, each a quarter of a KV row wide and with page ids, of partial scores, and of q."""
        ring = self.stages * self.step_tiles * TILE * (_slice_pitch(kv_dtype, self.column_warps) + 4)
        scores = self.exchange_buffers * self.row_tiles * self.step_tiles * TILE * TILE * 4
        q = self.column_warps * self.shared_steps * self.row_tiles * 512
        handover = self.kv_groups * (self.row_tiles * 512 + self.rows * 8 + 16) if self.row_tiles == 2 else 0
        return self.threads // _WARP * (ring + scores) + q + handover

    def as_dict(self) -> dict[str, int]:
        """Return the constants, and `nsplit` where it is set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


NARROW: Final = MmaNarrowConfig()
"""Row tiles of 16, one block an SM: 91,136 bytes."""

NARROW_PAIR: Final = MmaNarrowConfig(kv_groups=1, exchange_buffers=1)
"""Row tiles of 16, two blocks an SM: 41,472 bytes. What deterministic calls take."""

NARROW_32: Final = MmaNarrowConfig(exchange_buffers=1, row_tiles=2)
"""Row tiles of 32, one block an SM: 93,728 bytes."""

NARROW_32_DEEP: Final = MmaNarrowConfig(stages=4, exchange_buffers=1, row_tiles=2)
"""The same with four tiles in each ring, where more shared memory than an sm_120's allows: 168,480 bytes."""

NARROW_E4M3: Final = MmaNarrowConfig(exchange_buffers=1, column_warps=2, shared_steps=6)
"""Row tiles of 16 over a cache of e4m3, two blocks an SM: 49,664 bytes."""

NARROW_32_E4M3: Final = MmaNarrowConfig(kv_groups=1, stages=3, exchange_buffers=1, row_tiles=2, shared_steps=1)
"""Row tiles of 32 over a cache of e4m3, two blocks an SM: 42,000 bytes."""

NARROW_DS_MLA: Final = MmaNarrowConfig(stages=3, exchange_buffers=1)
"""Row tiles of 16 over rows of 656 bytes, one block an SM: 77,312 bytes."""


@dataclass(frozen=True, slots=True)
class MmaRolesConfig:
    """Constants of the `mma_roles` kernel: 4 score warps and 8 value warps of at most 168 registers.

    They work on 64 rows, or over a cache of e4m3 as two groups on the same 32, each with half of the KV.

    Parameters
    ----------
    stages : int
        KV tiles in a group's ring, 4 to 8: one or two are in use, the others on their way.
    shared_steps : int
        Of the 18 steps through a score warp's half of q, those that stay in shared memory for want of registers.
    lookahead : int
        Operand loads that a score warp issues ahead of the products that use them.
    row_tiles : int
        Row tiles of 16 of a block, 4 or, over a cache of e4m3, 2.
    nsplit : int or None
        Splits of the KV, at least 1; None is chosen from the problem and the device. A run-time number: changing it
        compiles nothing.

    Raises
    ------
    TileError
        Constants that `mma_roles.cu` is not built for.
    InvalidArgumentError
        `nsplit` is below 1.
    """

    stages: int = 4
    shared_steps: int = 4
    lookahead: int = 2
    row_tiles: int = 4
    nsplit: int | None = None

    def __post_init__(self) -> None:
        """Check the constants against each other; the device's limits are checked by `mlaflash.tiles.check_shared`."""
        if not 4 <= self.stages <= 8:
            raise TileError(f"stages is {self.stages}; it must be 4 to 8, because q passes through four. Use 4.")
        if not 0 <= self.shared_steps <= 9:
            raise TileError(f"shared_steps is {self.shared_steps}; it must be 0 to 9. Use 4.")
        if self.lookahead not in (1, 2):
            raise TileError(f"lookahead is {self.lookahead}; it must be 1 or 2. Use 2.")
        if self.row_tiles not in (2, 4):
            raise TileError(f"row_tiles is {self.row_tiles}; it must be 4, or 2 over a cache of e4m3. Use 4.")
        if self.nsplit is not None:
            object.__setattr__(self, "nsplit", integer("nsplit", self.nsplit, 1))

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "mma_roles"

    @property
    def rows(self) -> int:
        """Packed rows of a block."""
        return self.row_tiles * TILE

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 12 * _WARP

    def defines(self) -> dict[str, int]:
        """Return STAGES, SHARED_STEPS, LOOKAHEAD and ROW_TILES."""
        return {
            "STAGES": self.stages,
            "SHARED_STEPS": self.shared_steps,
            "LOOKAHEAD": self.lookahead,
            "ROW_TILES": self.row_tiles,
        }

    def shared_bytes(self, kv_dtype: str = "bfloat16") -> int:
        """Bytes of the rings, a part of q, partial scores, two buffers of weights, and of what masks and rows need."""
        groups = 4 // self.row_tiles
        is_fp8 = kv_dtype in FP8_CODES
        stage = TILE * (D + 16 if is_fp8 else _ROW_PITCH) + 16
        exchange = weights = self.row_tiles * 1024
        q = self.row_tiles * self.shared_steps * 1024  # once for both groups
        front = self.stages * stage + exchange + weights + (q if groups == 1 else 0)
        if is_fp8:  # q as it comes lies behind two stages at first
            front = max(front, 2 * stage + self.row_tiles // groups * TILE * _ROW_PITCH)
        handover = 2 * 512
        if groups == 2:  # has room between its buffers for the rest
            return 2 * (front + handover) + q
        return front + handover + self.rows * (4 + 8) + MAX_TAIL_LEN // 8 + 48

    def as_dict(self) -> dict[str, int]:
        """Return the constants, and `nsplit` where it is set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


ROWS_64_ROLES: Final = MmaRolesConfig()
"""Row tiles of 64: 101,360 bytes, 168 registers."""

ROLES_E4M3: Final = MmaRolesConfig(shared_steps=9)
"""Row tiles of 64 over a cache of e4m3: 95,696 bytes, 168 registers."""

ROLES_32_E4M3: Final = MmaRolesConfig(shared_steps=7, row_tiles=2)
"""Row tiles of 32 over a cache of e4m3: 100,480 bytes, 168 registers."""

MmaKernelConfig: TypeAlias = MmaNarrowConfig | MmaRolesConfig | MmaWideConfig
"""Constants of any of these kernels."""
