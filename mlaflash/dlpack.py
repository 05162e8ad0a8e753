"""Read a DLPack capsule: where an array lies, without the library that made it.

Layouts: ``DLTensor``, ``DLManagedTensor`` and ``DLManagedTensorVersioned`` of the DLPack specification, version 1.1.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate
from operator import mul
from typing import Any, Final, NamedTuple

from mlaflash.errors import ShapeError

CPU: Final = 1
CUDA: Final = 2
CUDA_MANAGED: Final = 13
VERSION: Final = (1, 0)
"""The newest that is asked for."""

_BOOL, _BFLOAT = 6, 4
_KINDS = {0: "int", 1: "uint", 2: "float", 5: "complex"}
_FLOATS_OF_8_BITS = {
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
}
_READ_ONLY, _IS_COPIED = 1, 2


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Layout(NamedTuple):
    """What a capsule says.

    Attributes
    ----------
    ptr : int
        Address of element 0.
    shape, strides : tuple of int
        Strides count elements.
    dtype : str
        NumPy's name of the element type, or that of `ml_dtypes`.
    itemsize : int
        Bytes of an element.
    device : tuple of int
        DLPack's device type, and the number of the device.
    read_only : str
        Why the memory must not be written; empty where it may be.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    device: tuple[int, int]
    read_only: str


def read(name: str, capsule: Any) -> Layout:
    """Read a capsule and leave it to its owner: it is not consumed, and must outlive the use of its memory.

    Parameters
    ----------
    name : str
        The caller's name for the array.
    capsule : PyCapsule
        What ``__dlpack__`` returned.

    Raises
    ------
    ShapeError
        It is no unused capsule of a version that is known, or its elements are no plain numbers.
    """
    read_only = ""
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if managed.major != VERSION[0]:
            raise ShapeError(
                f"{name} exports DLPack {managed.major}.{managed.minor}; versions 0 and {VERSION[0]} are read. Pass a "
                "CuPy array or a torch tensor."
            )
        if managed.flags & _READ_ONLY:
            read_only = "its DLPack export says so"
        elif managed.flags & _IS_COPIED:
            read_only = "its DLPack export is a copy"
        tensor = managed.tensor
    elif _is_valid(capsule, b"dltensor"):
        tensor = _Managed.from_address(_pointer(capsule, b"dltensor")).tensor
    else:
        raise ShapeError(f"{name} exports {capsule!r} through DLPack; it must be an unused capsule. Export it again.")
    shape = tuple(tensor.shape[: tensor.ndim])
    return Layout(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        tuple(tensor.strides[: tensor.ndim]) if tensor.strides else contiguous_strides(shape),
        *_element(name, tensor),
        (tensor.device_type, tensor.device_id),
        read_only,
    )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-contiguous array."""
    return tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1] if shape else ()


def _element(name: str, tensor: _Tensor) -> tuple[str, int]:
    code, bits = tensor.code, tensor.bits
    dtype = {(_BOOL, 8): "bool", (_BFLOAT, 16): "bfloat16"}.get((code, bits))
    if dtype is None and bits == 8:
        dtype = _FLOATS_OF_8_BITS.get(code)
    if dtype is None and code in _KINDS:
        dtype = f"{_KINDS[code]}{bits}"
    if dtype is None or tensor.lanes != 1 or bits % 8:
        raise ShapeError(
            f"{name} has DLPack elements of code {code}, {bits} bits and {tensor.lanes} lanes, which are no type that "
            "a kernel takes. Cast it."
        )
    return dtype, bits // 8
