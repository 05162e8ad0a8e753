"""Constants of the kernels: what can be chosen, what it costs in shared memory, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from mlaflash.device import Device
from mlaflash.errors import InvalidArgumentError, TileError
from mlaflash.params import DTYPE_CODES, FP8_CODES, D

BLOCK = 256
_NUM_WARPS = BLOCK // 32

MAX_HT = 32
"""More heads than this do not fit the registers of a block of the `tile` kernel."""
MAX_TK = 64
"""More tokens than this do not fit the shared memory of any GPU."""


@runtime_checkable
class KernelConfig(Protocol):
    """What every kernel's set of constants offers."""

    @property
    def kernel(self) -> str:
        """Name of the kernel, as its file in ``kernels/``."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    def defines(self) -> dict[str, int]:
        """Constants of the kernel without its element types, as ``-DMLAFLASH_<name>=<value>`` gives them."""

    def shared_bytes(self, kv_dtype: str) -> int:
        """Dynamic shared memory of a block in bytes."""

    def as_dict(self) -> dict[str, int]:
        """Return the constants under their lower-case names, for records."""


@dataclass(frozen=True, slots=True)
class NaiveConfig:
    """The `naive` kernel has no constants to choose."""

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "naive"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return BLOCK

    def defines(self) -> dict[str, int]:
        """Return no constants."""
        return {}

    def shared_bytes(self, kv_dtype: str) -> int:
        """Reductions of 8 warps, and one 128-bit vector of float32 values for each thread."""
        return 4 * (2 * _NUM_WARPS + BLOCK * vector_width(kv_dtype))

    def as_dict(self) -> dict[str, int]:
        """Return no constants."""
        return {}


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Constants of the `tile` kernel.

    Parameters
    ----------
    ht : int
        Heads of a block, a power of two; heads that it does not divide leave part of the last block idle.
    tk : int
        KV tokens of a tile, a power of two.
    nsplit : int or None
        Splits of the KV, at least 1; None is chosen from the problem and the device. A run-time number: changing it
        compiles nothing.

    Raises
    ------
    TileError
        `ht` or `tk` is not a positive power of two, or too large.
    InvalidArgumentError
        `nsplit` is below 1.
    """

    ht: int = 8
    tk: int = 16
    nsplit: int | None = None

    def __post_init__(self) -> None:
        """Check the constants against each other; the device's limits are checked by `check_shared`."""
        for name in ("ht", "tk", "nsplit"):
            if isinstance(getattr(self, name), np.integer):
                object.__setattr__(self, name, int(getattr(self, name)))
        for name in ("ht", "tk"):
            value = getattr(self, name)
            most = MAX_HT if name == "ht" else MAX_TK
            if type(value) is not int or value < 1 or value & (value - 1) or value > most:
                raise TileError(
                    f"{name} is {value!r}; it must be a positive power of two of at most {most}. Use ht 8 and tk 16 "
                    "to begin with."
                )
        if self.nsplit is not None and (type(self.nsplit) is not int or self.nsplit < 1):
            raise InvalidArgumentError(
                f"nsplit is {self.nsplit!r}; it must be an integer of at least 1, or None to have it chosen."
            )

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "tile"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return BLOCK

    def defines(self) -> dict[str, int]:
        """Return HT and TK."""
        return {"HT": self.ht, "TK": self.tk}

    @property
    def dim_slices(self) -> int:
        """Warps that share the 576 dims of one piece of the scores; `tile.cu` derives the same number."""
        token_lanes = min(4, self.tk)
        tokens = 2 if self.tk >= 32 else 1
        sets = (self.ht // min(8, self.ht)) * (self.tk // (token_lanes * tokens))
        return max(1, _NUM_WARPS // sets)

    def shared_bytes(self, kv_dtype: str = "float32") -> int:
        """Bytes of q, KV tile, scores, weights, row addresses and running sums; the tile is float32 for every dtype."""
        floats = D * (self.ht + self.tk) + self.ht * self.tk * (1 + self.dim_slices) + 3 * self.ht
        return 4 * floats + 16 * self.tk

    def as_dict(self) -> dict[str, int]:
        """Return `ht`, `tk`, and `nsplit` where it is set."""
        record = {"ht": self.ht, "tk": self.tk}
        if self.nsplit is not None:
            record["nsplit"] = self.nsplit
        return record


def vector_width(dtype: str) -> int:
    """Elements of a 128-bit load."""
    return 4 if dtype == "float32" else 8


def dtype_defines(q_dtype: str, out_dtype: str, partial_dtype: str, kv_dtype: str | None = None) -> dict[str, int]:
    """Element types as constants of a kernel.

    Parameters
    ----------
    q_dtype, out_dtype, partial_dtype : str
        ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    kv_dtype : str or None
        What the cache holds; None is q's, also for kernels that read no cache.
    """
    return {
        "Q_DTYPE": DTYPE_CODES[q_dtype],
        "KV_DTYPE": (DTYPE_CODES | FP8_CODES)[kv_dtype or q_dtype],
        "OUT_DTYPE": DTYPE_CODES[out_dtype],
        "PARTIAL_DTYPE": DTYPE_CODES[partial_dtype],
    }


def list_defines(is_sparse: bool) -> dict[str, int]:
    """Return the constant of kernels whose query tokens list their own slots, and nothing for the others.

    Parameters
    ----------
    is_sparse : bool
    """
    return {"SPARSE_IDS": 1} if is_sparse else {}


def check_shared(config: KernelConfig, device: Device, kv_dtype: str) -> None:
    """Refuse a configuration whose block asks for more shared memory than the device gives one.

    Parameters
    ----------
    config : KernelConfig
    device : Device
    kv_dtype : str

    Raises
    ------
    TileError
        With both numbers.
    """
    shared = config.shared_bytes(kv_dtype)
    if shared > device.shared_per_block:
        constants = " ".join(f"{name}={value}" for name, value in config.as_dict().items())
        raise TileError(
            f"{config.kernel} {constants} asks for {shared} bytes of shared memory a block; {device.name} "
            f"({device.arch}) allows {device.shared_per_block}. Use smaller tiles.",
            shared_bytes=shared,
            shared_limit=device.shared_per_block,
        )


def tile_candidates() -> Iterator[TileConfig]:
    """All HT x TK that the `tile` kernel is built for, without regard to a device's limit."""
    for ht in (1, 2, 4, 8, 16, 32):
        for tk in (4, 8, 16, 32, 64):
            yield TileConfig(ht, tk)
