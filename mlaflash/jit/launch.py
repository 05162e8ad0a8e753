"""Launches made ready once: what is left to do each time is one call of the CUDA driver."""

import ctypes
import functools
from typing import Any

import numpy as np

from mlaflash.device import parse_arch
from mlaflash.jit.kernel import Grid, Kernel

_LEAST_CAPABILITY = (9, 0)
# CUDA 12.3: the first whose graphs capture the attribute.
_LEAST_DRIVER = 12030
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_INVALID_CONTEXT = 201


class _AttributeValue(ctypes.Union):
    _fields_ = [("allowed", ctypes.c_int), ("bytes", ctypes.c_byte * 64)]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", _AttributeValue)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


_DEPENDENT = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, _AttributeValue(allowed=1))


class PreparedLaunch:
    """A launch that may be enqueued many times, on any stream of its GPU.

    Parameters
    ----------
    kernel : Kernel
    grid : tuple of int
        Blocks along x, y and z.
    block : int
        Threads of a block.
    params : numpy.ndarray
        The kernel's one argument: a structured array of size 1. Each launch passes what it holds by then.
    is_dependent : bool
        A programmatic dependent launch: its blocks may start while the last blocks of the kernel before it still run,
        which hides its launch. The kernel itself waits, with ``wait_prerequisites()``, before it reads what that one
        wrote. Below sm_90, and where the driver is older than CUDA 12.3, it is launched as any other.

    Raises
    ------
    LaunchError
        There is nothing to launch.
    """

    __slots__ = ("_arguments", "_config", "_function", "_launch", "_reference", "block", "grid", "kernel", "params")

    def __init__(
        self, kernel: Kernel, grid: Grid, block: int, params: np.ndarray[Any, Any], *, is_dependent: bool = False
    ) -> None:
        if min(grid) < 1 or block < 1:
            raise kernel.refused("every dimension must be at least 1", grid, block)
        self.kernel, self.grid, self.block, self.params = kernel, grid, block, params
        self._launch = _driver().cuLaunchKernelEx
        self._function = ctypes.c_void_p(kernel.function_ptr)
        self._arguments = ctypes.pointer(ctypes.c_void_p(params.ctypes.data))
        attributes = ctypes.POINTER(_Attribute)()
        if is_dependent and knows_dependents(kernel.compiled.arch):
            attributes = ctypes.pointer(_DEPENDENT)
        self._config = _Config(grid, (block, 1, 1), kernel.shared_bytes, None, attributes, int(bool(attributes)))
        self._reference = ctypes.byref(self._config)

    def launch(self, stream: int) -> None:
        """Enqueue the kernel; returns before it ran.

        Parameters
        ----------
        stream : int
            Handle of the stream, which may be captured.

        Raises
        ------
        LaunchError
            The driver refused.
        """
        self._config.stream = stream
        status = self._launch(self._reference, self._function, self._arguments, None)
        if status == _INVALID_CONTEXT:
            # The first use of the GPU in this thread.
            from cupy.cuda import runtime

            runtime.setDevice(self.kernel.ordinal)
            status = self._launch(self._reference, self._function, self._arguments, None)
        if status:
            raise self.kernel.refusal(status, self.grid, self.block)


def knows_dependents(arch: str) -> bool:
    """Say whether dependent launches are what they are called, on GPUs of an architecture and with this driver.

    Parameters
    ----------
    arch : str
        Such as ``"sm_120"``.
    """
    return parse_arch(arch)[0] >= _LEAST_CAPABILITY and _driver_version() >= _LEAST_DRIVER


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _driver_version() -> int:
    version = ctypes.c_int()
    return 0 if _driver().cuDriverGetVersion(ctypes.byref(version)) else version.value
