"""Predict how a verify step scales over GPUs that share its KV cache: the cost model, with a link between the GPUs.

A step on N ranks gathers q over the heads, attends all heads to 1 / N of the tokens, and exchanges the partial results
of the heads, each of which is a message of

    latency + (N - 2) * hop + (N - 1) / N * bytes of all heads / bandwidth

followed by a merge. What is fitted to times of two H200s says so; all else is a prediction, from data sheets and NCCL's
usual latencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mlaflash import cost
from mlaflash.checks import finite, integer
from mlaflash.cost import Speed, speed_of
from mlaflash.device import Device
from mlaflash.errors import InvalidArgumentError, UnsupportedError
from mlaflash.params import DL, D, numpy_dtype
from mlaflash.shape import VerifyShape

# Fitted: the step of B = 1, q = 8, 64 heads and 32,768 tokens took 99.8 us on two H200s, 94.3 without these two.
_COPY_US = 2.8  # of q to where it is gathered
_MERGE_US = 2.8
_ACHIEVABLE = 0.7  # of the memory's bandwidth, by kernels this short


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the GPUs.

    Attributes
    ----------
    name : str
    gb_s : float
        What a GPU receives while it sends as much, in GB/s, all other GPUs together.
    latency_us : float
        Of a short collective among two GPUs, captured in a CUDA graph, in microseconds.
    hop_us : float
        What each further GPU adds to it.

    Raises
    ------
    InvalidArgumentError
        A number that is negative, or a bandwidth of 0.
    """

    name: str
    gb_s: float
    latency_us: float
    hop_us: float = 1.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("gb_s", "latency_us", "hop_us"):
            value = finite(name, getattr(self, name))
            if value < 0 or (name == "gb_s" and value == 0):
                raise InvalidArgumentError(f"{name} is {value}; it must not be negative, and a bandwidth not 0.")


NVLINK: Final = Link("NVLink 4", gb_s=230.0, latency_us=8.4, hop_us=1.0)
"""Through NVSwitch, as in an HGX H200.

Latency and bandwidth are fitted to messages of 64 KiB to 64 MiB between two H200s (8.4 us and 228 GB/s, 9.9 us and 237
GB/s in two runs); by the data sheet it is 450 GB/s each way. Predicted is the hop.
"""
PCIE5: Final = Link("PCIe 5 x16", gb_s=50.0, latency_us=14.0, hop_us=3.0)
"""Peer to peer through a switch or the host, predicted: 63 GB/s each way by the data sheet."""
LINKS: Final = {"sm_90": (NVLINK, PCIE5), "sm_120": (PCIE5,)}
"""What joins the cards of an architecture that times are predicted for."""


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """Predicted times of one step on one layer, in microseconds.

    Attributes
    ----------
    num_ranks : int
    gather_us : float
        Of q over the heads, the copy before it included; 0 on one rank.
    attention_us : float
        All heads over this rank's tokens.
    exchange_us, merge_us : float
        Of the partial results; 0 on one rank.
    """

    num_ranks: int
    gather_us: float
    attention_us: float
    exchange_us: float
    merge_us: float

    @property
    def total_us(self) -> float:
        """All of it, one after the other."""
        return self.gather_us + self.attention_us + self.exchange_us + self.merge_us


def predict_sharded(
    shape: VerifyShape, num_ranks: int, link: Link, device: Device, *, speed: Speed | None = None
) -> ShardedStep:
    """Predict a step of `mlaflash.distributed.ShardedPlan` with ``merge="reduce_scatter"``.

    Parameters
    ----------
    shape : VerifyShape
        Of all ranks: its heads are spread over them for all but the attention, and so are its tokens.
    num_ranks : int
    link : Link
        Between the GPUs.
    device : Device
        Each of them. `Device.for_arch` describes one that is not here.
    speed : Speed, optional
        Of the device; by default as `mlaflash.cost` knows it.

    Returns
    -------
    ShardedStep

    Raises
    ------
    InvalidArgumentError
        The heads cannot be spread over so many ranks.
    UnsupportedError
        float32, which the cost model does not know.
    """
    num_ranks = integer("num_ranks", num_ranks, 1)
    if shape.num_heads % num_ranks:
        raise InvalidArgumentError(f"num_heads is {shape.num_heads}; {num_ranks} ranks must have equally many of them.")
    if shape.dtype == "float32":
        raise UnsupportedError("dtype is 'float32'; times are predicted for bfloat16 and float16.")
    speed = speed_of(device) if speed is None else speed
    attention = cost.choose(
        shape.rows,
        shape.batch,
        -(-shape.kv_len // num_ranks),
        device,
        kv_dtype=shape.stored,
        speed=speed,
    ).predicted_us
    if num_ranks == 1:
        return ShardedStep(1, 0.0, attention, 0.0, 0.0)
    rows = shape.rows * shape.batch
    part_bytes = rows * (DL * numpy_dtype(shape.out_dtype or shape.dtype).itemsize + 4)
    return ShardedStep(
        num_ranks,
        _COPY_US + _message_us(rows * D * numpy_dtype(shape.dtype).itemsize, num_ranks, link),
        attention,
        _message_us(part_bytes, num_ranks, link),
        _MERGE_US + part_bytes / (_ACHIEVABLE * speed.dram_gbps) / 1e3,
    )


def predict_replicated(
    shape: VerifyShape, num_ranks: int, device: Device, *, speed: Speed | None = None
) -> ShardedStep:
    """Predict the same step where every rank holds all tokens and has its own heads alone: tensor parallelism.

    Nothing is exchanged, and each rank needs room for the whole cache.

    Parameters
    ----------
    shape, num_ranks, device, speed
        As in `predict_sharded`.

    Returns
    -------
    ShardedStep

    Raises
    ------
    InvalidArgumentError
        The heads cannot be spread over so many ranks.
    """
    if shape.num_heads % integer("num_ranks", num_ranks, 1):
        raise InvalidArgumentError(f"num_heads is {shape.num_heads}; {num_ranks} ranks must have equally many of them.")
    attention = cost.choose(
        shape.rows // num_ranks,
        shape.batch,
        shape.kv_len,
        device,
        kv_dtype=shape.stored,
        speed=speed,
    ).predicted_us
    return ShardedStep(num_ranks, 0.0, attention, 0.0, 0.0)


def _message_us(all_bytes: int, num_ranks: int, link: Link) -> float:
    received = all_bytes * (num_ranks - 1) / num_ranks
    return link.latency_us + (num_ranks - 2) * link.hop_us + received / link.gb_s / 1e3
