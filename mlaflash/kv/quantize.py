"""Rows of the cache in 8 bits, from the numbers of a model and back; NumPy and CuPy arrays alike.

The numbers are e4m3fn: a sign, four bits of exponent with a bias of 7, three of mantissa, no infinities, one NaN of
either sign, 448 the largest ("OCP 8-bit Floating Point Specification (OFP8)", revision 1.0, 2023). CuPy has no such
type: they are made of the bits of float32.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mlaflash.checks import is_number
from mlaflash.errors import ShapeError
from mlaflash.interop import is_cupy
from mlaflash.params import DL, DS_MLA_BYTES, DS_MLA_ROPE, D
from mlaflash.problem import positive

LARGEST: Final = 448.0
GROUP: Final = 128
"""Columns that share a scale in a row of ``"fp8_ds_mla"``."""

_NAN = 0x7F
_LEAST_NORMAL = 2.0**-6
_REBIAS = (127 - 7) << 23  # between the exponents of float32 and of e4m3
_TINY = float(np.finfo(np.float32).tiny)


def quantize_e4m3(x: Any, scale: Any = None) -> tuple[Any, Any]:
    """Round numbers to e4m3: to the nearest, ties to even; beyond 448 to 448, as serving engines do; NaN stays NaN.

    Parameters
    ----------
    x : array, NumPy or CuPy, any shape, floating point
        Such as rows ``(..., 576)``; taken as float32.
    scale : float or array of one, optional
        What the numbers are divided by before. By default the largest finite magnitude is scaled to 448.

    Returns
    -------
    codes : array, uint8, shape of `x`
    scale : array of one float32, or as given
        The `kv_scale` of `mlaflash.mla_verify`; without a copy to the host.

    Raises
    ------
    ShapeError
        `x` is no such array, or `scale` no array of one.
    InvalidArgumentError
        `scale` is a number that is not finite, or not greater than 0.
    """
    xp = _module("x", x)
    x = x.astype(np.float32)
    if scale is None:
        scale = _scale_of(xp, x.reshape(1, x.size))
    return _round(xp, x / _float32(xp, scale)), scale


def dequantize_e4m3(codes: Any, scale: Any = 1.0) -> Any:
    """Return what e4m3 numbers stand for.

    Parameters
    ----------
    codes : array, NumPy or CuPy, any shape, uint8
    scale : float or array of one
        What they are multiplied by.

    Returns
    -------
    array, float32, shape of `codes`

    Raises
    ------
    ShapeError
        `codes` is no such array, or `scale` no array of one.
    InvalidArgumentError
        `scale` is a number that is not finite, or not greater than 0.
    """
    xp = _module("codes", codes, np.uint8)
    return _number(xp, codes) * _float32(xp, scale)


def quantize_ds_mla(x: Any) -> Any:
    """Write rows in vLLM's format ``"fp8_ds_mla"``.

    The layout is that of DeepSeek-V3.2 in FlashMLA and vLLM: 512 bytes of e4m3; four float32 scales, each the largest
    finite magnitude of 128 columns divided by 448; 64 rope columns in bfloat16.

    Parameters
    ----------
    x : array, NumPy or CuPy, shape (..., 576), floating point
        Taken as float32.

    Returns
    -------
    array, uint8, shape (..., 656)

    Raises
    ------
    ShapeError
        `x` is no such array.
    """
    xp = _module("x", x)
    _check_width("x", x, D)
    x = xp.ascontiguousarray(x, dtype=np.float32)
    groups = x[..., :DL].reshape(*x.shape[:-1], DL // GROUP, GROUP)
    scales = _scale_of(xp, groups)
    rows = xp.empty((*x.shape[:-1], DS_MLA_BYTES), np.uint8)
    rows[..., :DL] = _round(xp, groups / scales[..., None]).reshape(*x.shape[:-1], DL)
    rows[..., DL:DS_MLA_ROPE] = scales.view(np.uint8)
    rows[..., DS_MLA_ROPE:] = _to_bfloat16(xp, x[..., DL:]).view(np.uint8)
    return rows


def dequantize_ds_mla(rows: Any) -> Any:
    """Return the numbers in rows of the format ``"fp8_ds_mla"``.

    Parameters
    ----------
    rows : array, NumPy or CuPy, shape (..., 656), uint8

    Returns
    -------
    array, float32, shape (..., 576)

    Raises
    ------
    ShapeError
        `rows` is no such array.
    """
    xp = _module("rows", rows, np.uint8)
    _check_width("rows", rows, DS_MLA_BYTES)
    x = xp.empty((*rows.shape[:-1], D), np.float32)
    scales = xp.ascontiguousarray(rows[..., DL:DS_MLA_ROPE]).view(np.float32)
    groups = _number(xp, rows[..., :DL]).reshape(*scales.shape, GROUP) * scales[..., None]
    x[..., :DL] = groups.reshape(*rows.shape[:-1], DL)
    rope = xp.ascontiguousarray(rows[..., DS_MLA_ROPE:]).view(np.uint16)
    x[..., DL:] = (rope.astype(np.uint32) << 16).view(np.float32)
    return x


def _module(name: str, array: Any, dtype: Any = None) -> Any:
    """Return the module of an array, checked."""
    if is_cupy(array):
        import cupy as xp
    elif isinstance(array, np.ndarray):
        xp = np
    else:
        raise ShapeError(f"{name} is a {type(array).__qualname__}; it must be an array of NumPy or CuPy.")
    # The floats of ml_dtypes are of no kind that NumPy knows.
    is_right = array.dtype == dtype if dtype is not None else array.dtype.kind == "f" or "float" in array.dtype.name
    if not is_right:
        raise ShapeError(f"{name} is {array.dtype}; it must be {'uint8' if dtype is not None else 'floating point'}.")
    return xp


def _float32(xp: Any, scale: Any) -> Any:
    if is_number(scale):
        return np.float32(positive("scale", scale))
    if not isinstance(scale, xp.ndarray) or scale.size != 1 or scale.dtype.kind != "f":
        raise ShapeError(f"scale is {scale!r:.80}; it must be a number, or an array of one beside the other array.")
    return scale.astype(np.float32)


def _check_width(name: str, array: Any, width: int) -> None:
    if array.shape[-1:] != (width,):
        raise ShapeError(f"{name} has shape {array.shape}; its last axis must be {width}.")


def _scale_of(xp: Any, x: Any) -> Any:
    """Return what brings the largest finite magnitude along the last axis to 448."""
    size = xp.where(xp.isfinite(x), xp.abs(x), np.float32(0))
    most = size.max(axis=-1) if size.shape[-1] else xp.zeros(size.shape[:-1], np.float32)
    return xp.where(most > 0, xp.maximum(most / np.float32(LARGEST), np.float32(_TINY)), np.float32(1))


def _round(xp: Any, x: Any) -> Any:
    """Return the codes of float32 numbers."""
    bits = xp.ascontiguousarray(x).view(np.uint32)
    sign = (bits >> 24) & 0x80
    size = xp.minimum(xp.abs(x), np.float32(LARGEST))  # a NaN stays
    rest = xp.ascontiguousarray(size).view(np.uint32) - np.uint32(_REBIAS)
    normal = (rest + np.uint32(0x7FFFF) + ((rest >> 20) & 1)) >> 20
    # Below the normal ones numbers are 2**-9 apart; rint rounds ties to even.
    small = xp.rint(xp.where(size < _LEAST_NORMAL, size, 0) * np.float32(2**9)).astype(np.uint32)
    code = xp.where(size < _LEAST_NORMAL, small, normal)
    return (sign | xp.where(xp.isnan(x), np.uint32(_NAN), code)).astype(np.uint8)


def _number(xp: Any, codes: Any) -> Any:
    """Return the float32 numbers of codes."""
    wide = codes.astype(np.uint32)
    size = wide & 0x7F
    normal = ((size << 20) + np.uint32(_REBIAS)).view(np.float32)
    number = xp.where(size < 8, size.astype(np.float32) * np.float32(2**-9), normal)
    number = xp.where(size == _NAN, np.float32(np.nan), number)
    return xp.where(wide & 0x80, -number, number)


def _to_bfloat16(xp: Any, x: Any) -> Any:
    """Return the bits of float32 numbers rounded to bfloat16: to the nearest, ties to even."""
    bits = xp.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return xp.where(xp.isnan(x), (bits >> 16) | np.uint32(0x40), rounded).astype(np.uint16)
