"""Arrays as the kernels see them: an address, a shape, strides and an element type."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlaflash.errors import ShapeError


@dataclass(frozen=True, slots=True)
class ArrayView:
    """Where an array lies.

    Attributes
    ----------
    name : str
        The caller's name for it, used in messages.
    ptr : int
        Address of element 0.
    shape, strides : tuple of int
        Strides count elements.
    dtype : str
        NumPy's name of the element type; ``"bfloat16"`` is that of `ml_dtypes`.
    itemsize : int
        Bytes of an element.
    array : object
        The array itself, kept alive as long as the view.
    """

    name: str
    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    array: Any

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


def _view(name: str, array: Any, ptr: int) -> ArrayView:
    """View an array whose elements a kernel can load one by one."""
    dtype = array.dtype
    if not dtype.isnative:
        raise ShapeError(
            f"{name} is {dtype.str}, of the other byte order than this machine's; the kernels read its own. Convert it "
            "with astype(dtype.newbyteorder('='))."
        )
    # A type without bytes is no number's: whoever asked for the view refuses it by name.
    itemsize = max(dtype.itemsize, 1)
    if any(stride % itemsize for stride in array.strides) or (array.size and ptr % itemsize):
        raise ShapeError(
            f"{name} begins at address {ptr:#x} and has strides of {array.strides} bytes for elements of {itemsize}; "
            "address and strides must be multiples of the element. Copy it."
        )
    strides = tuple(stride // itemsize for stride in array.strides)
    return ArrayView(name, ptr, array.shape, strides, dtype.name, dtype.itemsize, array)


def numpy_view(name: str, array: Any) -> ArrayView:
    """View a NumPy array, for the emulator.

    Parameters
    ----------
    name : str
        The caller's name for it.
    array : numpy.ndarray

    Raises
    ------
    ShapeError
        It is something else, or its elements are not whole ones of this machine's byte order.
    """
    # What a masked array hides, the kernels would read.
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise ShapeError(
            f"{name} is a {type(array).__module__}.{type(array).__qualname__}; the emulator takes NumPy arrays. Call "
            "mlaflash.mla_verify for arrays on a GPU."
        )
    return _view(name, array, array.ctypes.data)


def cupy_view(name: str, array: Any) -> ArrayView:
    """View a CuPy array on its current device.

    Parameters
    ----------
    name : str
        The caller's name for it.
    array : cupy.ndarray

    Raises
    ------
    ShapeError
        It is something else, lies on another device, or its elements are not whole ones.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(array, cupy.ndarray):
        hint = (
            "Call mlaflash.emulator.mla_verify for NumPy arrays."
            if isinstance(array, np.ndarray)
            else "Convert it with cupy.asarray or cupy.from_dlpack, which copy nothing."
        )
        raise ShapeError(
            f"{name} is a {type(array).__module__}.{type(array).__qualname__}; mla_verify takes CuPy arrays. {hint}"
        )
    current = cupy.cuda.runtime.getDevice()
    if array.size and array.device.id != current:
        raise ShapeError(
            f"{name} lies on GPU {array.device.id} and GPU {current} is current. Call inside `with "
            f"cupy.cuda.Device({array.device.id}):`, with all arrays there."
        )
    return _view(name, array, array.data.ptr)


def to_host(view: ArrayView) -> np.ndarray[Any, Any]:
    """Copy an array to the host; with a GPU this synchronises."""
    array = view.array
    host: np.ndarray[Any, Any] = array if isinstance(array, np.ndarray) else array.get()
    return host
