"""Where kernels run for `check` and `sweep`: a GPU, or the emulator that stands in for one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mlaflash.device import Device, apply_budget, gpu_available
from mlaflash.errors import CompileError, LaunchError, MissingDependencyError, MlaFlashError, NoDeviceError
from mlaflash.interop import numpy_view
from mlaflash.jit import compiler_threads
from mlaflash.lab.timing import Timing, measure
from mlaflash.masks import TreeMask
from mlaflash.problem import Problem
from mlaflash.schedule import Launch, Schedule, plan
from mlaflash.settings import settings
from mlaflash.tiles import KernelConfig

DEFAULT_ARCH = "sm_120"

Kind = Literal["gpu", "emulator"]
Built = tuple[str, frozenset[tuple[str, int]]]


@dataclass(frozen=True, slots=True)
class Result:
    """What a verify call gave.

    Attributes
    ----------
    out, lse : numpy.ndarray
    kv_bytes : int or None
        Bytes of KV that the kernels loaded, counted; None where nothing counts them.
    """

    out: np.ndarray[Any, Any]
    lse: np.ndarray[Any, Any]
    kv_bytes: int | None


def no_progress(what: str, done: int, total: int) -> None:
    """Tell nobody."""


class Target(ABC):
    """A place where kernels run.

    Attributes
    ----------
    kind : {"gpu", "emulator"}
    name : str
        The GPU's name, or ``"emulator"``.
    device : Device
        Limits that count there.
    """

    kind: Kind
    name: str
    device: Device

    @abstractmethod
    def load(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Bring the arguments of a verify call, NumPy arrays, to where it runs."""

    @abstractmethod
    def verify(self, loaded: Mapping[str, Any], kernel: str, config: KernelConfig | None, seed: int) -> Result:
        """Make one checked verify call and bring its results back.

        Parameters
        ----------
        loaded : mapping of str to Any
            From `load`.
        kernel : str
        config : KernelConfig or None
            None takes the kernel's defaults.
        seed : int
            Of the order in which an emulator runs threads.
        """

    @abstractmethod
    def build_one(self, launch: Launch) -> None:
        """Compile a kernel unless it is in the cache."""

    def time(self, loaded: Mapping[str, Any], kernel: str, config: KernelConfig | None, samples: int) -> Timing | None:
        """Time a verify call from a cold level-2 cache; None where time means nothing.

        Parameters
        ----------
        loaded : mapping of str to Any
            From `load`.
        kernel : str
        config : KernelConfig or None
        samples : int
        """
        del loaded, kernel, config, samples
        return None

    def is_usable(self) -> bool:
        """Whether anything can still run: a kernel that faults leaves the process without its GPU."""
        return True

    def plan(self, problem: Problem, kernel: str, config: KernelConfig | None) -> Schedule:
        """Plan a verify call; nothing runs.

        Parameters
        ----------
        problem : Problem
            From `read_problem`.
        kernel : str
        config : KernelConfig or None
            None takes the kernel's defaults.

        Raises
        ------
        TileError, UnsupportedError, InvalidArgumentError
            The kernel cannot do this here.
        """
        return plan(problem, self.device, kernel=kernel, tiles=config)

    def build(
        self, launches: Iterable[Launch], progress: Callable[[str, int, int], None] = no_progress
    ) -> dict[Built, CompileError]:
        """Compile what launches need here; see `build_all`."""
        return build_all(launches, self.build_one, self.name, progress)


def read_problem(arguments: Mapping[str, Any]) -> Problem:
    """Check the arguments of a verify call, NumPy arrays.

    Parameters
    ----------
    arguments : mapping of str to Any
    """
    return _reader(arguments)(numpy_view, **arguments)


def call_name(arguments: Mapping[str, Any]) -> str:
    """Name the call that takes these arguments.

    Parameters
    ----------
    arguments : mapping of str to Any

    Returns
    -------
    {"mla_sparse", "mla_verify"}
    """
    return "mla_sparse" if "indices" in arguments else "mla_verify"


def _reader(arguments: Mapping[str, Any]) -> Callable[..., Problem]:
    return Problem.from_lists if call_name(arguments) == "mla_sparse" else Problem.from_arrays


def build_all(
    launches: Iterable[Launch],
    build_one: Callable[[Launch], object],
    place: str,
    progress: Callable[[str, int, int], None] = no_progress,
) -> dict[Built, CompileError]:
    """Compile the kernels of many launches side by side.

    Parameters
    ----------
    launches : iterable of Launch
    build_one : callable
        Compiles the kernel of one launch.
    place : str
        What they are compiled for, in words.
    progress : callable
        Told what is done, how many are, and of how many.

    Returns
    -------
    dict
        The kernels, by `built_key`, that did not compile.
    """
    what = f"compiling kernels for {place}"
    unique = {built_key(launch): launch for launch in launches}
    failures: dict[Built, CompileError] = {}
    with ThreadPoolExecutor(compiler_threads()) as pool:
        futures = {pool.submit(build_one, launch): key for key, launch in unique.items()}
        progress(what, 0, len(futures))
        try:
            for done, future in enumerate(as_completed(futures), 1):
                try:
                    future.result()
                except CompileError as error:
                    failures[futures[future]] = error
                progress(what, done, len(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failures


def built_key(launch: Launch) -> Built:
    """Tell apart what has to be compiled apart."""
    return launch.kernel, frozenset(launch.defines.items())


class EmulatorTarget(Target):
    """The emulator, with the limits of an architecture.

    Parameters
    ----------
    arch : str
        Such as ``"sm_120"``.
    """

    kind: Kind = "emulator"
    name = "emulator"

    def __init__(self, arch: str) -> None:
        self.device = Device.for_arch(arch)

    def load(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Take them as they are."""
        return dict(arguments)

    def verify(self, loaded: Mapping[str, Any], kernel: str, config: KernelConfig | None, seed: int) -> Result:
        """Make one checked verify call."""
        from mlaflash import emulator

        reports: list[Any] = []
        out, lse = getattr(emulator, call_name(loaded))(
            **loaded, kernel=kernel, tiles=config, budget=self.device.arch, validate=True, seed=seed, reports=reports
        )
        kv_bytes = sum(
            count
            for report in reports
            for name, count in report.bytes_read.items()
            if name.split("[")[0] in ("kv_cache", "new_kv")
        )
        return Result(out, lse, kv_bytes)

    def build_one(self, launch: Launch) -> None:
        """Compile with the host compiler."""
        from mlaflash.emulator.build import load_library

        load_library(launch.kernel, launch.defines)


class GpuTarget(Target):
    """CuPy's current GPU.

    Parameters
    ----------
    budget : str or None
        Architecture whose shared memory to keep to.

    Raises
    ------
    MissingDependencyError
        CuPy is not installed.
    NoDeviceError
        There is no GPU.
    UnsupportedError
        It is older than sm_80.
    """

    kind: Kind = "gpu"

    def __init__(self, budget: str | None = None) -> None:
        device = Device.current()
        self.device = device if budget is None else apply_budget(device, budget)
        self.name = self.device.name
        self._budget = budget

    def load(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Copy them to the GPU."""
        return {name: _to_gpu(value) for name, value in arguments.items()}

    def verify(self, loaded: Mapping[str, Any], kernel: str, config: KernelConfig | None, seed: int) -> Result:
        """Make one checked verify call; `seed` changes nothing here."""
        import cupy

        from mlaflash.attention import prepare

        try:
            options: dict[str, Any] = {"kernel": kernel, "tiles": config, "budget": self._budget}
            call = prepare(**loaded, **options, validate=True, read=_reader(loaded))
            call.launch()
            out, lse = call.results()
            return Result(out.get(), lse.get(), None)
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError) as error:
            raise _launch_error(kernel, config, error) from error

    def build_one(self, launch: Launch) -> None:
        """Compile with NVRTC."""
        from mlaflash.jit import compile_cached

        compile_cached(launch.kernel, launch.defines, self.device.arch)

    def time(self, loaded: Mapping[str, Any], kernel: str, config: KernelConfig | None, samples: int) -> Timing:
        """Time a verify call from a cold level-2 cache."""
        import cupy

        from mlaflash.attention import prepare

        try:
            # Of its own: on the legacy stream no launch starts before the one before it has ended.
            with cupy.cuda.Stream(non_blocking=True) as stream:
                cupy.cuda.runtime.deviceSynchronize()
                call = prepare(**loaded, kernel=kernel, tiles=config, budget=self._budget, read=_reader(loaded))
                return measure(call.launch, self.device, stream=stream, samples=samples)
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError) as error:
            raise _launch_error(kernel, config, error) from error

    def is_usable(self) -> bool:
        """Whether CUDA still answers."""
        import cupy

        try:
            cupy.cuda.runtime.deviceSynchronize()
        except cupy.cuda.runtime.CUDARuntimeError:
            return False
        return True


def device_or_default(arch: str | None = None) -> Device:
    """Choose whose limits count where nothing runs.

    Parameters
    ----------
    arch : str or None
        None is ``MLAFLASH_ARCH``, else the GPU's own, else sm_120.

    Returns
    -------
    Device
        The GPU itself, or the usual card of an architecture.
    """
    arch = arch or settings().arch
    if arch is not None:
        return Device.for_arch(arch)
    try:
        return Device.current()
    except (MissingDependencyError, NoDeviceError):
        return Device.for_arch(DEFAULT_ARCH)


def select_target(choice: str, arch: str | None = None, budget: str | None = None) -> tuple[Target, str]:
    """Choose where to run.

    Parameters
    ----------
    choice : {"auto", "gpu", "emulator"}
        ``auto`` is the GPU where one can be used.
    arch : str or None
        Whose limits the emulator keeps; None is ``MLAFLASH_ARCH``, else sm_120.
    budget : str or None
        Architecture whose shared memory a GPU keeps to.

    Returns
    -------
    target : Target
    reason : str
        Why ``auto`` did not take the GPU; empty where it did or was not asked.

    Raises
    ------
    NoDeviceError
        ``gpu`` was asked for and there is none that can be used.
    """
    reason = ""
    if choice == "gpu":
        try:
            return GpuTarget(budget), ""
        except MissingDependencyError as error:
            raise NoDeviceError(str(error)) from error
    if choice == "auto":
        try:
            if gpu_available():
                return GpuTarget(budget), ""
            reason = "no GPU that CUDA can use"
        except MlaFlashError as error:
            reason = str(error)
    return EmulatorTarget(arch or settings().arch or DEFAULT_ARCH), reason


def _to_gpu(value: Any) -> Any:
    import cupy

    if isinstance(value, tuple):
        return tuple(_to_gpu(part) for part in value)
    if isinstance(value, TreeMask):
        return TreeMask(cupy.asarray(value.words), value.max_q)
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def _launch_error(kernel: str, config: KernelConfig | None, error: Exception) -> LaunchError:
    constants = " ".join(f"{name}={value}" for name, value in config.as_dict().items()) if config else "defaults"
    return LaunchError(
        f"CUDA refused or aborted kernel {kernel!r} ({constants}): {error}. Run it under "
        "compute-sanitizer to see where."
    )
