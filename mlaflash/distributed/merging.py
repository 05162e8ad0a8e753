"""The kernel `merge`: attention over the tokens of each rank becomes attention over all of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlaflash import jit
from mlaflash.checks import choice, integer
from mlaflash.device import Device, current_ordinal, on_device
from mlaflash.errors import InvalidArgumentError, ShapeError
from mlaflash.interop import ArrayView, device_view, ordinal_of, require_apart
from mlaflash.params import DL, DTYPE_CODES
from mlaflash.problem import View, element_type
from mlaflash.schedule import Launch
from mlaflash.streams import as_stream, memory_for
from mlaflash.tiles import dtype_defines

BLOCK: Final = 128

MERGE_PARAMS_DTYPE: Final = np.dtype(
    [(name, np.uint64) for name in ("outs", "lses", "out", "lse")]
    + [(f"{name}_stride_{axis}", np.int64) for name in ("outs", "lses") for axis in ("part", "t", "h")]
    + [(f"{name}_stride_{axis}", np.int64) for name in ("out", "lse") for axis in ("t", "h")]
    + [(name, np.int32) for name in ("num_heads", "num_lses", "first_part", "num_parts", "lse_base_2", "padding")],
    align=True,
)
"""The kernel's one argument; `kernels/include/merge_params.cuh` declares the same structure."""


@dataclass(frozen=True, slots=True)
class Merge:
    """A checked launch of the kernel `merge`.

    Attributes
    ----------
    launch : Launch
    params : numpy.ndarray, shape (1,), `MERGE_PARAMS_DTYPE`
    arrays : mapping of str to ArrayView
        All that the kernel touches.
    """

    launch: Launch
    params: npt.NDArray[np.void]
    arrays: Mapping[str, ArrayView]

    @property
    def is_empty(self) -> bool:
        """Whether there is no row, and so nothing to launch."""
        return 0 in self.arrays["out"].shape

    def check_memory(self) -> None:
        """Refuse results that share memory with what they are made of; one part may become the result.

        Raises
        ------
        ShapeError
            Naming the two arrays.
        """
        parts, factors, out, lse = (self.arrays[name] for name in ("outs", "lses", "out", "lse"))
        # A thread reads what its elements are made of before it writes them.
        in_place = (parts.ptr, parts.shape, parts.strides, parts.dtype) == (out.ptr, out.shape, out.strides, out.dtype)
        require_apart((out, lse), [factors] if in_place else [parts, factors])


def merge_launch(partial_dtype: str, out_dtype: str, rows: int = 1) -> Launch:
    """Return the launch for so many rows.

    Parameters
    ----------
    partial_dtype, out_dtype : str
        Element types of the parts and of the result.
    rows : int
        Query tokens times heads.
    """
    return Launch("merge", dtype_defines(out_dtype, out_dtype, partial_dtype), (rows, 1, 1), BLOCK, 0)


def every_launch() -> tuple[Launch, ...]:
    """Return a launch of each form that the kernel is compiled in."""
    return tuple(merge_launch(partial, out) for partial in DTYPE_CODES for out in DTYPE_CODES)


def build(view: View, outs: Any, lses: Any, out: Any, lse: Any, lse_base: str, part: int | None = None) -> Merge:
    """Check the arrays and make the launch.

    Parameters
    ----------
    view : callable
        Turns an array into an `ArrayView` and refuses arrays of another library or device.
    outs : array, shape (N, T, H, 512), or (T, H, 512) with `part`
    lses : array, shape (N, T, H), float32
    out : array, shape (T, H, 512)
    lse : array, shape (T, H), float32
    lse_base : {"e", "2"}
        Of `lses` and of `lse`.
    part : int, optional
        Which of the N parts `outs` is, where it is but one.

    Raises
    ------
    ShapeError
        Rank, shape, strides, dtype or device of an array.
    InvalidArgumentError
        A value that is not allowed.
    """
    views = {name: view(name, array) for name, array in (("outs", outs), ("lses", lses), ("out", out), ("lse", lse))}
    parts, factors = views["outs"], views["lses"]
    if parts.ndim != (4 if part is None else 3) or parts.shape[-1] != DL:
        raise ShapeError(
            f"outs has shape {parts.shape}; it must be {'(N, T, H, 512)' if part is None else '(T, H, 512)'}."
        )
    rows = parts.shape[-3:-1]
    num_lses = parts.shape[0] if part is None else factors.shape[0] if factors.ndim == 3 else 0
    if part is not None and integer("rank", part, 0) >= num_lses:
        raise InvalidArgumentError(f"rank is {part} and lses has shape {factors.shape}; it must be one of its parts.")
    shapes = {"outs": parts.shape, "lses": (num_lses, *rows), "out": (*rows, DL), "lse": rows}
    for name, array in views.items():
        if array.shape != shapes[name] or (name.startswith("lse") and array.dtype != "float32"):
            wanted = "float32 " if name.startswith("lse") else ""
            raise ShapeError(f"{name} is {array.dtype} {array.shape}; it must be {wanted}{shapes[name]}.")
        if name in ("out", "lse") and array.read_only:
            raise ShapeError(f"{name} is read-only ({array.read_only}); the result is written to it. Give another.")
        if name.startswith("out"):
            element_type(name, array.dtype)
            _check_rows(array)
    params = np.zeros(1, MERGE_PARAMS_DTYPE)
    for name, array in views.items():
        params[name] = array.ptr
        strides = array.strides[: len(array.shape) - name.startswith("out")]
        for axis, stride in zip(reversed(("part", "t", "h")), reversed(strides), strict=False):
            params[f"{name}_stride_{axis}"] = stride
    params["num_heads"], params["num_lses"] = max(rows[1], 1), num_lses
    params["first_part"], params["num_parts"] = (0, num_lses) if part is None else (part, 1)
    params["lse_base_2"] = choice("lse_base", lse_base, ("e", "2")) == "2"
    return Merge(merge_launch(parts.dtype, views["out"].dtype, rows[0] * rows[1]), params, views)


def _check_rows(array: ArrayView) -> None:
    """Refuse rows whose quads of elements cannot be loaded at once."""
    steps = [s for s, n in zip(array.strides[:-1], array.shape[:-1], strict=True) if n > 1]
    unit = 4 * array.itemsize
    if 0 not in array.shape and (array.strides[-1] != 1 or array.ptr % unit or any(step % 4 for step in steps)):
        raise ShapeError(
            f"{array.name} begins at address {array.ptr:#x} and has strides {array.strides} (in elements of "
            f"{array.itemsize} bytes); its last axis must be contiguous, and every row must start on {unit} bytes. "
            "Copy it."
        )


def merge_partials(
    outs: Any, lses: Any, *, out: Any = None, lse: Any = None, lse_base: str = "e", stream: Any = None
) -> tuple[Any, Any]:
    """Merge the partial results of all ranks, on the GPU: what follows an all-gather, or an all-to-all over heads.

    Parameters
    ----------
    outs : array, shape (N, T, H, 512), float32, bfloat16 or float16
        `out` of each rank, for the same query tokens and heads. Any strides, last axis contiguous, rows on 4 elements.
    lses : array, shape (N, T, H), float32
        `lse` of each rank; -inf or +inf for a row that saw nothing there, whose `outs` are then not read.
    out : array, shape (T, H, 512), optional
        Filled in place; by default new memory of the type and the library of `outs`.
    lse : array, shape (T, H), float32, optional
        As `out`.
    lse_base : {"e", "2"}
        Base of `lses` and of the result.
    stream : stream or int, optional
        Where the work runs, as in `mlaflash.mla_verify`. It may be captured.

    Returns
    -------
    out, lse : array
        As one call over the tokens of all ranks gives them. Sums are float32, in the order of the ranks.

    Raises
    ------
    ShapeError
        Rank, shape, strides, dtype or device of an array.
    InvalidArgumentError
        A value that is not allowed.
    CaptureError
        The first call is being captured; make it once before.
    CompileError, CacheMissError, MissingDependencyError, NoDeviceError
        The kernel cannot be had here.
    """
    return _merge(outs, lses, out, lse, lse_base, None, stream)


def correct_partial(
    out: Any,
    lses: Any,
    rank: int,
    *,
    corrected: Any = None,
    lse: Any = None,
    lse_base: str = "e",
    stream: Any = None,
) -> tuple[Any, Any]:
    """Scale this rank's partial result to its share of the whole, on the GPU: what comes before a reduce-scatter.

    The sum of what the ranks return is the attention over all tokens, so that any collective sum of 16-bit or float32
    numbers ends the step: reduce-scatter over heads, or all-reduce.

    Parameters
    ----------
    out : array, shape (T, H, 512), float32, bfloat16 or float16
        This rank's partial result.
    lses : array, shape (N, T, H), float32
        All-gathered `lse` of all ranks; -inf or +inf for a row that saw nothing there, whose `out` is not read.
    rank : int
        Which of the N parts is this rank's.
    corrected : array, shape (T, H, 512), optional
        Filled in place; `out` itself is allowed, and the default.
    lse : array, shape (T, H), float32, optional
        Filled in place; by default new memory.
    lse_base : {"e", "2"}
        Base of `lses` and of the result.
    stream : stream or int, optional
        Where the work runs, as in `mlaflash.mla_verify`. It may be captured.

    Returns
    -------
    corrected : array
    lse : array, shape (T, H)
        Of the whole: the same on every rank.

    Raises
    ------
    MlaFlashError
        As in `merge_partials`.
    """
    return _merge(out, lses, out if corrected is None else corrected, lse, lse_base, rank, stream)


def _merge(outs: Any, lses: Any, out: Any, lse: Any, lse_base: str, part: int | None, stream: Any) -> tuple[Any, Any]:
    ordinal = ordinal_of(outs)
    with on_device(current_ordinal() if ordinal is None else ordinal):
        here = current_ordinal()
        work_stream = as_stream(stream, outs, here)
        view = functools.partial(device_view, ordinal=here, stream=work_stream)
        memory = memory_for(outs, work_stream, here, is_current=stream is None)
        exports = (out is None, lse is None)
        parts = view("outs", outs)
        with memory.scope:
            if out is None:
                out = memory.empty(parts.shape[1:], parts.dtype)
            if lse is None:
                lse = memory.empty(parts.shape[-3:-1], "float32")
            step = build(view, outs, lses, out, lse, lse_base, part)
            if not all(exports):
                step.check_memory()
            if not step.is_empty:
                launch = step.launch
                kernel = jit.load(launch.kernel, launch.defines, Device.current(), 0, stream=work_stream)
                kernel.launch(launch.grid, launch.block, step.params, work_stream)
            if memory.export is not None:
                out, lse = (
                    memory.export(array) if is_new else array for array, is_new in zip((out, lse), exports, strict=True)
                )
    return out, lse
