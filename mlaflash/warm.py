"""Compile and load kernels before the first request."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mlaflash import jit
from mlaflash.device import Device, apply_budget, padded_shared_bytes
from mlaflash.errors import InvalidArgumentError
from mlaflash.schedule import Launch
from mlaflash.shape import VerifyShape, call_launches, mask_launches, plan_launches


@dataclass(frozen=True, slots=True)
class Warmup:
    """What `warmup` had to do.

    Attributes
    ----------
    kernels : int
        Kernels that are loaded now.
    compiled : int
        Those of them that were compiled for it.
    disk_hits : int
        Those that were read from the cache on disk; this process had the others in memory.
    seconds : float
        Time that it took.
    """

    kernels: int
    compiled: int
    disk_hits: int
    seconds: float


def warmup(
    problems: Iterable[VerifyShape] | VerifyShape = (),
    *,
    plans: Iterable[VerifyShape] | VerifyShape = (),
    budget: str | None = None,
) -> Warmup:
    """Compile and load, on the current GPU, all kernels that verify steps need.

    The first request then waits for no compiler, and no capture of a CUDA graph meets a kernel that is not loaded.
    Compiles side by side, and keeps what it compiled in the cache on disk. ``mlaflash compile`` fills that cache
    without a GPU.

    With ``mask="tree"`` the kernels that pack masks, of every format, are among them: for `pack_mask` and for
    `VerifyPlan.update`.

    Parameters
    ----------
    problems : VerifyShape, or iterable of them
        Of calls of `mla_verify` that name neither `kernel` nor `tiles`: all that calls of these shapes, and of smaller
        ones, choose from. Rows that start on 16 bytes are taken for granted.
    plans : VerifyShape, or iterable of them
        Of `VerifyPlan`: the kernels of a plan made for exactly that. Its constructor loads them, too; here they are
        compiled side by side.
    budget : str, optional
        As in `mla_verify`.

    Returns
    -------
    Warmup

    Raises
    ------
    NoDeviceError
        There is no GPU.
    UnsupportedError
        No kernel, or no plan, does what a shape says.
    CaptureError
        A CUDA graph is being captured.
    CompileError, CacheMissError, MissingDependencyError
        A kernel cannot be had here.

    Examples
    --------
    >>> shape = mlaflash.VerifyShape(num_heads=8, q_len=16, kv_len=262144, batch=48, page_size=64, mask="tree")
    >>> mlaflash.warmup(plans=[shape])  # doctest: +SKIP
    Warmup(kernels=9, compiled=9, disk_hits=0, seconds=4.1)
    """
    started = time.perf_counter()
    device = Device.current()
    limits = device if budget is None else apply_budget(device, budget)
    # One function may be loaded with several amounts of shared memory.
    wanted: dict[tuple[str, frozenset[tuple[str, int]], int], Launch] = {}

    def want(launch: Launch, shared_bytes: int) -> None:
        wanted.setdefault((launch.kernel, frozenset(launch.defines.items()), shared_bytes), launch)

    for shape in _shapes("problems", problems):
        for launch in call_launches(shape, limits):
            want(launch, padded_shared_bytes(launch.shared_bytes, device, limits))
        for launch in mask_launches(shape):
            want(launch, launch.shared_bytes)  # pack_mask knows no budget
    for shape in _shapes("plans", plans):
        for launch in (*plan_launches(shape, limits), *mask_launches(shape)):
            want(launch, padded_shared_bytes(launch.shared_bytes, device, limits))

    before = jit.stats()
    with ThreadPoolExecutor(jit.compiler_threads()) as pool:
        list(pool.map(lambda launch: jit.compile_cached(launch.kernel, launch.defines, device.arch), wanted.values()))
    for (kernel, _, shared_bytes), launch in wanted.items():
        jit.load(kernel, launch.defines, device, shared_bytes)
    after = jit.stats()
    return Warmup(
        kernels=len({key[:2] for key in wanted}),
        compiled=after.compiled - before.compiled,
        disk_hits=after.disk_hits - before.disk_hits,
        seconds=time.perf_counter() - started,
    )


def _shapes(name: str, given: Iterable[VerifyShape] | VerifyShape) -> list[VerifyShape]:
    if isinstance(given, VerifyShape):
        return [given]
    shapes = list(given)
    wrong = next((shape for shape in shapes if not isinstance(shape, VerifyShape)), None)
    if wrong is not None:
        raise InvalidArgumentError(f"{name} holds {wrong!r}; allowed is a mlaflash.VerifyShape, or several.")
    return shapes
