"""Load a compiled kernel on a GPU and launch it."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlaflash.device import (
    Device,
    check_runs_on,
    compute_capability,
    context_loss,
    current_ordinal,
    stream_is_capturing,
)
from mlaflash.errors import CaptureError, LaunchError, TileError
from mlaflash.jit.cached import compile_cached, counters
from mlaflash.jit.compiler import CompiledKernel

Grid = tuple[int, int, int]

# Between asking for a function's limit and raising it, another thread must not raise it further.
_limit_lock = threading.Lock()


class Kernel:
    """A kernel on one GPU, ready to launch with one amount of dynamic shared memory.

    Parameters
    ----------
    compiled : CompiledKernel
        What was loaded.
    function : cupy.cuda.Function
        Its entry point on the GPU.
    ordinal : int
        CUDA's number of the GPU.
    shared_bytes : int
        Dynamic shared memory of a block.
    shared_limit : int
        Shared memory that a block may have there.
    """

    __slots__ = (
        "_driver",
        "_dynamic_limit",
        "_function",
        "compiled",
        "ordinal",
        "shared_bytes",
        "shared_limit",
    )

    def __init__(
        self,
        compiled: CompiledKernel,
        function: Any,
        ordinal: int,
        shared_bytes: int,
        shared_limit: int,
    ) -> None:
        from cupy_backends.cuda.api import driver

        self.compiled = compiled
        self.ordinal = ordinal
        self.shared_bytes = shared_bytes
        self.shared_limit = shared_limit
        self._function = function
        self._driver = driver
        self._dynamic_limit = 0
        self._allow(shared_bytes)

    def launch(
        self,
        grid: Grid,
        block: int,
        params: np.ndarray[Any, Any],
        stream: Any = None,
        shared_bytes: int | None = None,
    ) -> None:
        """Enqueue the kernel; returns before it ran.

        Parameters
        ----------
        grid : tuple of int
            Blocks along x, y and z.
        block : int
            Threads of a block.
        params : np.ndarray
            The kernel's one argument: a structured array of size 1, passed by value.
        stream : cupy.cuda.Stream or None
            None is CuPy's current stream.
        shared_bytes : int or None
            Dynamic shared memory of a block; None is what the kernel was loaded with.

        Raises
        ------
        LaunchError
            The driver refused, or there is nothing to launch.
        """
        shared = self.shared_bytes if shared_bytes is None else shared_bytes
        # CuPy would launch one block in place of none.
        if min(grid) < 1 or block < 1:
            raise self._refused("every dimension must be at least 1", grid, block, shared)
        try:
            if shared > self._dynamic_limit:
                self._allow(shared)
            self._function(grid, (block, 1, 1), (params,), shared, stream)
        except self._driver.CUDADriverError as error:
            raise context_loss(error) or self._refused(str(error), grid, block, shared) from error

    @property
    def function_ptr(self) -> int:
        """Handle of the function, for launches that CuPy does not offer."""
        return int(self._function.ptr)

    def refusal(self, status: int, grid: Grid, block: int) -> LaunchError:
        """Return the error for a launch that the driver refused.

        Parameters
        ----------
        status : int
            The driver's error code.
        grid : tuple of int
        block : int
            Of the launch.
        """
        error = self._driver.CUDADriverError(status)
        return context_loss(error) or self.refused(str(error), grid, block)

    def refused(self, reason: str, grid: Grid, block: int) -> LaunchError:
        """Return the error for a launch that cannot be.

        Parameters
        ----------
        reason : str
        grid : tuple of int
        block : int
            Of the launch.
        """
        return self._refused(reason, grid, block, self.shared_bytes)

    def attributes(self) -> dict[str, int]:
        """Ask the driver what the loaded kernel uses.

        Returns
        -------
        dict
            ``registers``, ``local_bytes`` (of a thread), ``static_shared_bytes``,
            ``max_dynamic_shared_bytes`` (of a block), ``max_threads_per_block``,
            ``binary_version``.
        """
        return {
            "registers": self._attribute("NUM_REGS"),
            "local_bytes": self._attribute("LOCAL_SIZE_BYTES"),
            "static_shared_bytes": self._attribute("SHARED_SIZE_BYTES"),
            "max_dynamic_shared_bytes": self._attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES"),
            "max_threads_per_block": self._attribute("MAX_THREADS_PER_BLOCK"),
            "binary_version": self._attribute("BINARY_VERSION"),
        }

    def active_blocks(self, block: int) -> int:
        """Ask the driver how many blocks a multiprocessor holds at once.

        Parameters
        ----------
        block : int
            Threads of a block.
        """
        return int(self._driver.occupancyMaxActiveBlocksPerMultiprocessor(self._function.ptr, block, self.shared_bytes))

    def _attribute(self, name: str) -> int:
        number = getattr(self._driver, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(self._driver.funcGetAttribute(number, self._function.ptr))

    def _allow(self, shared_bytes: int) -> None:
        """Raise, never lower, the dynamic shared memory of the function that every load shares."""
        with _limit_lock:
            allowed = self._attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES")
            if shared_bytes > allowed:
                number = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._driver.funcSetAttribute(self._function.ptr, number, shared_bytes)
                allowed = shared_bytes
            self._dynamic_limit = allowed

    def _refused(self, reason: str, grid: Grid, block: int, shared: int) -> LaunchError:
        return LaunchError(
            f"kernel {self.compiled.kernel!r} ({self.compiled.arch}) was not launched on GPU "
            f"{self.ordinal} with grid {grid}, block {block} and {shared} bytes of dynamic shared "
            f"memory: {reason}. Allowed are a grid of 1..2147483647 x 1..65535 x 1..65535 blocks, "
            "a block that the kernel's registers leave room for "
            f"({self._attribute('MAX_THREADS_PER_BLOCK')} threads) and {self.shared_limit} bytes "
            f"of shared memory, {self.compiled.static_shared_bytes} of them static. Check the "
            f"plan, and that GPU {self.ordinal} is the current device."
        )


_kernels: dict[tuple[object, ...], Kernel] = {}
_functions: dict[tuple[object, ...], tuple[CompiledKernel, Any]] = {}


def load(
    kernel: str,
    defines: Mapping[str, int],
    device: Device,
    shared_bytes: int,
    *,
    stream: Any = None,
) -> Kernel:
    """Get a kernel that is ready to launch on CuPy's current device.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    defines : mapping of str to int
        Constants to compile it with.
    device : Device
        Says for which architecture, and how much shared memory a block may have.
    shared_bytes : int
        Dynamic shared memory of a block.
    stream : cupy.cuda.Stream or None
        Stream of the launch to come; None is CuPy's current one. Nothing is compiled or loaded
        while it is captured.

    Returns
    -------
    Kernel

    Raises
    ------
    TileError
        A block of the kernel may not have that much shared memory.
    CaptureError
        The kernel is not loaded and the stream is being captured.
    UnsupportedError
        The kernel or the architecture is unknown, or the GPU cannot run the architecture.
    CompileError, CacheMissError, MissingDependencyError
        The kernel cannot be compiled.
    LaunchError
        The driver refused to load it.
    """
    ordinal = current_ordinal()
    module_key = (kernel, frozenset(defines.items()), device.arch, ordinal)
    key = (module_key, shared_bytes)
    loaded = _kernels.get(key)
    if loaded is not None:
        counters.memory_hits += 1
        _check_shared(kernel, shared_bytes, loaded.compiled.static_shared_bytes, device)
        return loaded

    _check_shared(kernel, shared_bytes, 0, device)
    check_runs_on(device.arch, compute_capability(ordinal))
    if stream_is_capturing(stream):
        raise CaptureError(
            f"kernel {kernel!r} for {device.arch} with {dict(defines)} is not loaded on GPU "
            f"{ordinal} and a CUDA graph is being captured; a kernel can only be compiled and "
            "loaded outside a capture. Run the same call once before capturing, or mlaflash.warmup."
        )
    if module_key not in _functions:
        compiled = compile_cached(kernel, defines, device.arch)
        _functions[module_key] = compiled, _load_function(compiled, ordinal)
    compiled, function = _functions[module_key]
    _check_shared(kernel, shared_bytes, compiled.static_shared_bytes, device)
    return _kernels.setdefault(key, Kernel(compiled, function, ordinal, shared_bytes, device.shared_per_block))


def _load_function(compiled: CompiledKernel, ordinal: int) -> Any:
    from cupy.cuda import function
    from cupy_backends.cuda.api import driver

    module = function.Module()
    try:
        # The bytes at hand, not the file: another process may be replacing that.
        module.load(compiled.cubin)
        return module.get_function(compiled.entry)
    except driver.CUDADriverError as error:
        raise context_loss(error) or LaunchError(
            f"GPU {ordinal} refused to load kernel {compiled.kernel!r} compiled for "
            f"{compiled.arch} by NVRTC {compiled.nvrtc_version}: {error}. A driver at least as new "
            "as that NVRTC is needed. Update the driver, or empty the cache with: mlaflash cache "
            "clear."
        ) from error


def _check_shared(kernel: str, shared_bytes: int, static_bytes: int, device: Device) -> None:
    total = shared_bytes + static_bytes
    if total > device.shared_per_block:
        raise TileError(
            f"kernel {kernel!r} asks for {total} bytes of shared memory a block; {device.name} "
            f"({device.arch}) allows {device.shared_per_block}. Choose a smaller tile.",
            shared_bytes=total,
            shared_limit=device.shared_per_block,
        )
