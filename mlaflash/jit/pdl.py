"""Launch a kernel as a programmatic dependent of the one before it on the stream.

The dependent kernel's blocks may start while the last blocks of the kernel before it still run: it waits inside, with
``wait_prerequisites()``, until their results are in memory. That hides its launch. CuPy has no such launch, so it goes
straight to the CUDA driver.
"""

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


def launch_dependent(kernel: Kernel, grid: Grid, block: int, params: np.ndarray[Any, Any], stream: Any = None) -> None:
    """Enqueue a kernel that calls ``wait_prerequisites()`` before it reads what the kernel before it wrote.

    Below sm_90, and where the driver is older than CUDA 12.3, it is launched as any other.

    Parameters
    ----------
    kernel : Kernel
        Loaded on CuPy's current device.
    grid : tuple of int
        Blocks along x, y and z.
    block : int
        Threads of a block.
    params : np.ndarray
        The kernel's one argument: a structured array of size 1, passed by value.
    stream : cupy.cuda.Stream or None
        None is CuPy's current stream. It may be captured.

    Raises
    ------
    LaunchError
        The driver refused, or there is nothing to launch.
    """
    launch = _driver_launch() if parse_arch(kernel.compiled.arch)[0] >= _LEAST_CAPABILITY else None
    if launch is None or min(grid) < 1 or block < 1:
        kernel.launch(grid, block, params, stream)
        return
    if stream is None:
        from cupy.cuda import get_current_stream

        stream = get_current_stream()
    config = _Config(grid, (block, 1, 1), kernel.shared_bytes, stream.ptr, ctypes.pointer(_DEPENDENT), 1)
    arguments = ctypes.c_void_p(params.ctypes.data)
    status = launch(ctypes.byref(config), kernel.function_ptr, ctypes.byref(arguments), None)
    if status:
        raise kernel.refusal(status, grid, block)


@functools.cache
def _driver_launch() -> Any:
    """Return cuLaunchKernelEx, or None where the driver is missing or too old."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) or version.value < _LEAST_DRIVER:
            return None
        launch = driver.cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return launch
