"""What a GPU can do at most, measured: the numbers that a kernel's time is held against."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from mlaflash.device import Device, driver_version, parse_arch
from mlaflash.jit.cache import make_key, open_cache
from mlaflash.jit.compiler import compile_sources
from mlaflash.jit.sources import kernel_root, read

CEILINGS_SUFFIX: Final = ".ceilings"
"""Ending of the files in the cache of compiled kernels that hold what was measured of a card."""

_THREADS = 256
_CHAINS = 8
_STEPS = 4096
_READ_BYTES = 1 << 30
_SAMPLES = 7
_SHARED_BYTES_A_CLOCK = 128
_FMA_LANES = {(8, 0): 64}  # of an SM; 128 on all others since sm_86


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates of one GPU.

    Attributes
    ----------
    read_gb_s : float
        Streaming reads of a buffer larger than the level-2 cache, 1e9 bytes a second.
    mma_tflop_s : float
        ``mma.sync`` m16n8k16 on bfloat16 with float32 accumulation, from registers.
    fma_tflop_s : float
        float32 fused multiply-adds, two operations each.
    shared_tb_s : float
        Shared memory of all SMs, 1e12 bytes a second: 128 bytes a clock and SM, at the clock of the multiply-adds.
    """

    read_gb_s: float
    mma_tflop_s: float
    fma_tflop_s: float
    shared_tb_s: float


def known_ceilings(device: Device, *, anew: bool = False) -> Ceilings:
    """Return the rates of the current GPU: from the cache on disk, else measured and kept there.

    Parameters
    ----------
    device : Device
        The current one.
    anew : bool
        Measure whatever the cache holds.

    Returns
    -------
    Ceilings
    """
    parts = {
        "gpu": device.name,
        "arch": device.arch,
        "num_sms": device.num_sms,
        "driver": driver_version(),
        "sources": [read(kernel, kernel_root() / "lab").digest for kernel in ("ceilings", "flush")],
    }
    key = make_key(f"ceilings-{device.name}", parts)
    cache = open_cache(suffix=CEILINGS_SUFFIX)
    stored = cache.get(key) if cache and not anew else None
    found = _read_ceilings(stored[0]) if stored else None
    if found is None:
        found = measure_ceilings(device)
        if cache:
            cache.put(key, json.dumps(asdict(found)).encode(), parts)
    return found


def _read_ceilings(payload: bytes) -> Ceilings | None:
    try:
        found = Ceilings(**json.loads(payload))
    except (TypeError, ValueError):
        return None
    is_whole = all(isinstance(rate, float) and math.isfinite(rate) and rate > 0 for rate in asdict(found).values())
    return found if is_whole else None


def measure_ceilings(device: Device) -> Ceilings:
    """Measure the rates of the current GPU; takes about a second.

    Parameters
    ----------
    device : Device
        The current one.

    Returns
    -------
    Ceilings
    """
    warps = 2 * device.num_sms * _THREADS // 32
    instructions = warps * _STEPS * _CHAINS
    fma, mma = (_instruction_seconds(device, limit) for limit in range(2))
    fma_flop_s = instructions * 2 * 32 / fma
    clock = fma_flop_s / (2 * _FMA_LANES.get(parse_arch(device.arch)[0], 128) * device.num_sms)
    return Ceilings(
        read_gb_s=_READ_BYTES / _read_seconds(device) / 1e9,
        mma_tflop_s=instructions * 2 * 16 * 8 * 16 / mma / 1e12,
        fma_tflop_s=fma_flop_s / 1e12,
        shared_tb_s=_SHARED_BYTES_A_CLOCK * device.num_sms * clock / 1e12,
    )


def _instruction_seconds(device: Device, limit: int) -> float:
    import cupy

    function = _load(device, "ceilings", {"LIMIT": limit})
    sink = cupy.zeros(1, "float32")
    arguments = (np.uint32(_STEPS), np.float32(1e-6), sink)
    return _seconds(lambda: function((2 * device.num_sms, 1, 1), (_THREADS, 1, 1), arguments, 0))


def _read_seconds(device: Device) -> float:
    import cupy

    function = _load(device, "flush", {})
    data, sink = cupy.zeros(_READ_BYTES, "uint8"), cupy.zeros(1, "uint32")
    arguments = (data, np.uint64(_READ_BYTES // 16), np.uint32(1), sink)
    return _seconds(lambda: function((8 * device.num_sms, 1, 1), (_THREADS, 1, 1), arguments, 0))


def _load(device: Device, kernel: str, defines: dict[str, int]) -> Any:
    from cupy.cuda import function

    compiled = compile_sources(read(kernel, kernel_root() / "lab"), defines, device.arch)
    module = function.Module()
    module.load(compiled.cubin)
    return module.get_function(compiled.entry)


def _seconds(enqueue: Any) -> float:
    import cupy

    samples = []
    for _ in range(_SAMPLES + 1):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        enqueue()
        end.record()
        end.synchronize()
        samples.append(1e-3 * cupy.cuda.get_elapsed_time(start, end))
    return float(np.median(samples[1:]))
