"""Every compiled form of the kernels: what fills a cache, and what a compiler is asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from mlaflash.device import Device
from mlaflash.errors import CompileError, UnsupportedError
from mlaflash.interop import numpy_view
from mlaflash.jit import CompiledKernel, compile_cached
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.space import SPACES, merge_splits
from mlaflash.lab.target import compiler_threads, no_progress
from mlaflash.mma_tiles import NARROW, ROWS_32, ROWS_32_PAIR, ROWS_64
from mlaflash.problem import Problem
from mlaflash.schedule import KERNELS, MMA_KERNELS, mma_refusal, plan
from mlaflash.tiles import KernelConfig

COMPILED: Final = (*KERNELS, "combine")
SHIPPED: Final[dict[str, tuple[KernelConfig, ...]]] = {
    "mma_narrow": (NARROW,),
    "mma_wide": (ROWS_32, ROWS_32_PAIR, ROWS_64),
}
"""Configurations that a call may choose, of the kernels that have more than one for a problem's shape."""
ARCHS: Final = ("sm_80", "sm_89", "sm_90", "sm_120")
"""Architectures that are compiled for where all are asked for."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form.

    Attributes
    ----------
    kernel : str
    arch : str
    config : dict
        The kernel's constants under their names, and ``dtype``.
    defines : dict of str to int
    shared_bytes : int
        Dynamic shared memory of a block.
    shared_limit : int
        Of the architecture's usual card.
    """

    kernel: str
    arch: str
    config: dict[str, Any]
    defines: dict[str, int]
    shared_bytes: int
    shared_limit: int


@dataclass(frozen=True, slots=True)
class Compilation:
    """What became of a variant.

    Attributes
    ----------
    variant : Variant
    compiled : CompiledKernel or None
        None where the compiler refused it.
    error : str
        Why it did.
    """

    variant: Variant
    compiled: CompiledKernel | None
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether it compiled, keeps its registers, and fits."""
        return self.compiled is not None and self.compiled.spill_bytes == 0 and self.fits

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, static and dynamic."""
        return self.variant.shared_bytes + (self.compiled.static_shared_bytes if self.compiled else 0)

    @property
    def fits(self) -> bool:
        """Whether a block may have that much shared memory."""
        return self.shared_bytes <= self.variant.shared_limit

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        variant, compiled = self.variant, self.compiled
        return {
            "kernel": variant.kernel,
            "arch": variant.arch,
            "config": variant.config,
            "registers": compiled.registers if compiled else None,
            "spill_bytes": compiled.spill_bytes if compiled else None,
            "shared_bytes": self.shared_bytes,
            "shared_limit": variant.shared_limit,
            "seconds": round(compiled.seconds, 3) if compiled else None,
            "cached": compiled is not None and compiled.cached,
        }


def variants(
    arch: str, dtypes: Sequence[str], kernels: Sequence[str], *, every_tile: bool = False
) -> tuple[list[Variant], list[str]]:
    """List what the calls on an architecture need compiled.

    Parameters
    ----------
    arch : str
    dtypes : sequence of str
    kernels : sequence of str
        Of `COMPILED`.
    every_tile : bool
        All candidates of a sweep, where otherwise the tiles are those that the library chooses.

    Returns
    -------
    variants : list of Variant
    refused : list of str
        Why the others are none: they do not fit, or the kernel does not do it.

    Raises
    ------
    UnsupportedError
        The architecture is unknown.
    """
    device = Device.for_arch(arch)
    found: dict[tuple[str, frozenset[tuple[str, int]]], Variant] = {}
    refused: dict[str, None] = {}
    for dtype in dtypes:
        # Plans come from the same code as a call's: what is compiled here is what a call looks for.
        case = Case(name="variants", q_lens=(1,), kv_lens=(1,), heads=8, sm_scale=1.0, dtype=dtype)
        problem = Problem.from_arrays(numpy_view, **build(case, 0))
        for kernel in KERNELS:
            refusal = mma_refusal(problem) if kernel in MMA_KERNELS else None
            if refusal is not None:
                continue  # of an element type: nothing that a user could do about it
            for config in _configs(problem, device, kernel, every_tile):
                try:
                    launches = plan(problem, device, kernel=kernel, tiles=config).launches
                except UnsupportedError as error:
                    refused.setdefault(str(error))
                    continue
                for launch in launches:
                    # A kernel of another name than the plan's, `combine` apart, is a form of the planned one.
                    if (launch.kernel if launch.kernel in COMPILED else kernel) not in kernels:
                        continue
                    constants = {
                        name.lower(): value for name, value in launch.defines.items() if not name.endswith("_DTYPE")
                    }
                    found.setdefault(
                        (launch.kernel, frozenset(launch.defines.items())),
                        Variant(
                            launch.kernel,
                            arch,
                            {**constants, "dtype": dtype},
                            dict(launch.defines),
                            launch.shared_bytes,
                            device.shared_per_block,
                        ),
                    )
    order = {kernel: place for place, kernel in enumerate(COMPILED)}
    return sorted(found.values(), key=lambda variant: order.get(variant.kernel, -1)), list(refused)


def compile_all(
    wanted: Sequence[Variant], progress: Callable[[str, int, int], None] = no_progress
) -> Iterator[Compilation]:
    """Compile variants side by side, through the cache.

    Parameters
    ----------
    wanted : sequence of Variant
    progress : callable
        Told what is done, how much of it, and of how much.

    Yields
    ------
    Compilation
        In the order of `wanted`.

    Raises
    ------
    MissingDependencyError
        CuPy or NVRTC is not installed.
    """
    with ThreadPoolExecutor(compiler_threads()) as pool:
        try:
            for done, result in enumerate(pool.map(_compile, wanted), 1):
                yield result
                progress("compiling", done, len(wanted))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _compile(variant: Variant) -> Compilation:
    try:
        return Compilation(variant, compile_cached(variant.kernel, variant.defines, variant.arch))
    except CompileError as error:
        return Compilation(variant, None, str(error))


def _configs(problem: Problem, device: Device, kernel: str, every_tile: bool) -> Iterator[KernelConfig | None]:
    """List what a call chooses by itself, or everything that is swept, with all the splits that compile differently."""
    yield None
    space = SPACES.get(kernel)
    if space is None or not space.axes:
        return
    splits = [1, *merge_splits()]
    if every_tile:
        yield from space.candidates("gpu", {"nsplit": [1]})
    for shipped in SHIPPED.get(kernel) or (plan(problem, device, kernel=kernel).config,):
        for nsplit in splits:
            yield space.change(shipped, {"nsplit": nsplit})
