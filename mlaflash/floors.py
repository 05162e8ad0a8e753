"""The least time that a verify step can take, by a data sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlaflash.cost import speed_of
from mlaflash.device import Device
from mlaflash.params import DL, D, numpy_dtype, row_bytes
from mlaflash.shape import VerifyShape

_MMA_FLOP = 2 * 16 * 8 * 16


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a step cannot do without, and how long that takes at least.

    Attributes
    ----------
    kv_bytes : int
        Every KV row that some query token sees, read once.
    other_bytes : int
        q read, out and lse written.
    flop : int
        Floating-point operations: ``2 * (576 + 512)`` for each row and each token that it sees. A tree is counted as
        if all of it were seen.
    read_gb_s : float
        Bandwidth of the memory, 1e9 bytes a second.
    mma_tflop_s : float or None
        Rate of the tensor cores by ``mma.sync``, 1e12 operations a second; None for float32, which they do not take.
    """

    kv_bytes: int
    other_bytes: int
    flop: int
    read_gb_s: float
    mma_tflop_s: float | None

    @property
    def memory_us(self) -> float:
        """Least time of the bytes, in microseconds."""
        return (self.kv_bytes + self.other_bytes) / self.read_gb_s / 1e3

    @property
    def mma_us(self) -> float | None:
        """Least time of the operations on tensor cores, in microseconds."""
        return None if self.mma_tflop_s is None else self.flop / self.mma_tflop_s / 1e6

    @property
    def floor_us(self) -> float:
        """The greater of both."""
        return max(self.memory_us, self.mma_us or 0.0)

    @property
    def limit(self) -> str:
        """What it is the time of: ``"memory"`` or ``"tensor cores"``."""
        return "memory" if self.memory_us >= (self.mma_us or 0.0) else "tensor cores"


def roofline(shape: VerifyShape, device: Device | None = None, *, kv_lens: Sequence[int] | None = None) -> Roofline:
    """Tell what a verify step reads, writes and computes at least, and how fast a GPU can do that.

    Nothing is measured: speeds are those of `mlaflash.cost`, from data sheets for the most part.

    Parameters
    ----------
    shape : VerifyShape
    device : Device, optional
        By default the current one. `Device.for_arch` describes others.
    kv_lens : sequence of int, optional
        Tokens of each request of the step; by default `shape.batch` requests of `shape.kv_len`.

    Returns
    -------
    Roofline

    Raises
    ------
    InvalidArgumentError
        `kv_lens` are more, or longer, than the shape says.
    NoDeviceError, MissingDependencyError
        No device is given and there is none.
    """
    device = Device.current() if device is None else device
    lens = shape.check_lens(kv_lens)
    seen = visible(shape, lens)
    itemsize = numpy_dtype(shape.dtype).itemsize
    out_itemsize = numpy_dtype(shape.out_dtype or shape.dtype).itemsize
    speed = speed_of(device)
    return Roofline(
        kv_bytes=int(seen.max(axis=1).sum()) * row_bytes(shape.stored),
        other_bytes=len(lens) * shape.rows * (D * itemsize + DL * out_itemsize + 4),
        flop=2 * (D + DL) * shape.num_heads * int(seen.sum()),
        read_gb_s=speed.dram_gbps,
        mma_tflop_s=None if shape.dtype == "float32" else mma_tflop_s(device.num_sms, speed.sm_ghz, speed.mma_clocks),
    )


def visible(shape: VerifyShape, kv_lens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return up to which token each query token of each request sees.

    Parameters
    ----------
    shape : VerifyShape
    kv_lens : sequence of int

    Returns
    -------
    numpy.ndarray, shape (B, q_len)
    """
    hidden = np.arange(shape.q_len)[::-1] if shape.mask == "causal" else np.zeros(shape.q_len, np.int64)
    seen: npt.NDArray[np.int64] = np.maximum(np.array(kv_lens, np.int64).reshape(-1, 1) - hidden, 0)
    return seen


def mma_tflop_s(num_sms: float, sm_ghz: float, mma_clocks: float) -> float:
    """Return the rate of the tensor cores by ``mma.sync``, in 1e12 operations a second.

    Parameters
    ----------
    num_sms : float
    sm_ghz, mma_clocks : float
        As of `mlaflash.cost.Speed`.
    """
    return _MMA_FLOP * num_sms * sm_ghz / mma_clocks / 1e3
