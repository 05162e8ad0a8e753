"""The kernel `compact`: which rows bring each accepted path to the front of its verify window."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlaflash import jit
from mlaflash.device import Device, current_ordinal, on_device
from mlaflash.errors import ShapeError
from mlaflash.interop import ArrayView, device_view, ordinal_of
from mlaflash.kv.move import Moves
from mlaflash.problem import View, vector
from mlaflash.schedule import Launch
from mlaflash.streams import as_stream, memory_for

BLOCK: Final = 512
SHARED_BYTES: Final = BLOCK // 32 * 4

COMPACT_PARAMS_DTYPE: Final = np.dtype(
    [(name, np.uint64) for name in ("out_slots", "accept_index", "accept_lens", "qo_indptr", "src", "dst", "n")]
    + [("accept_stride", np.int64)]
    + [(name, np.int32) for name in ("num_tokens", "batch", "width", "q_len", "wide_slots", "wide_index", "wide_lens")],
    align=True,
)
"""The kernel's one argument; `kernels/include/move_params.cuh` declares the same structure."""

_INTEGERS = ("int32", "int64")


@dataclass(frozen=True, slots=True)
class Compaction:
    """A checked launch of the kernel `compact`, but for where its results go.

    Attributes
    ----------
    launch : Launch
    params : numpy.ndarray, shape (1,), `COMPACT_PARAMS_DTYPE`
    arrays : mapping of str to ArrayView
        All that the kernel reads.
    num_moves : int
        Entries of the list, B * (depth + 1).
    group : int
        Entries of a request, depth + 1.
    id_dtype : str
        Element type of the slots.
    """

    launch: Launch
    params: npt.NDArray[np.void]
    arrays: Mapping[str, ArrayView]
    num_moves: int
    group: int
    id_dtype: str

    def write_to(self, src: int, dst: int, n: int) -> None:
        """Say where the list goes.

        Parameters
        ----------
        src, dst : int
            Addresses of `num_moves` slots.
        n : int
            Address of one int32.
        """
        self.params["src"], self.params["dst"], self.params["n"] = src, dst, n


def every_launch() -> tuple[Launch, ...]:
    """Return a launch of each form that the kernel is compiled in."""
    return (Launch("compact", {}, (1, 1, 1), BLOCK, SHARED_BYTES),)


def build(view: View, out_slots: Any, accept_index: Any, accept_lens: Any, qo_indptr: Any) -> Compaction:
    """Check the arrays, but for their values, and make the launch.

    Parameters
    ----------
    view : callable
        Turns an array into an `ArrayView` and refuses arrays of another library or device.
    out_slots, accept_index, accept_lens, qo_indptr
        As in `plan_compact`.

    Raises
    ------
    ShapeError
        Shape, strides, dtype or device of an array.
    """
    slots = vector(view, "out_slots", out_slots, _INTEGERS)
    index = view("accept_index", accept_index)
    if index.ndim != 2 or index.dtype not in _INTEGERS:
        raise ShapeError(
            f"accept_index is {index.dtype} {index.shape}; it must be int32 or int64 (B, depth + 1). Pad paths with -1."
        )
    batch, width = index.shape
    if 0 not in index.shape and ((width > 1 and index.strides[1] != 1) or index.strides[0] < 0):
        raise ShapeError(
            f"accept_index has strides {index.strides} (in elements); its last axis must be contiguous, and none may"
            " be negative. Copy it."
        )
    arrays = {"out_slots": slots, "accept_index": index}
    fields: dict[str, Any] = {
        "accept_stride": index.strides[0],
        "num_tokens": slots.shape[0],
        "batch": batch,
        "width": width,
        "wide_slots": slots.dtype == "int64",
        "wide_index": index.dtype == "int64",
    }
    if accept_lens is not None:
        arrays["accept_lens"] = vector(view, "accept_lens", accept_lens, _INTEGERS, batch)
        fields["wide_lens"] = arrays["accept_lens"].dtype == "int64"
    if qo_indptr is not None:
        arrays["qo_indptr"] = vector(view, "qo_indptr", qo_indptr, ("int32",), batch + 1)
    elif batch and slots.shape[0] % batch:
        raise ShapeError(
            f"out_slots has {slots.shape[0]} slots, no multiple of the {batch} requests of accept_index; pass qo_indptr"
            " to say where their windows begin."
        )
    else:
        fields["q_len"] = slots.shape[0] // max(batch, 1)
    params = np.zeros(1, COMPACT_PARAMS_DTYPE)
    for field, value in fields.items():
        params[field] = value
    for name, array in arrays.items():
        params[name] = array.ptr
    (launch,) = every_launch()
    return Compaction(launch, params, arrays, batch * width, width, slots.dtype)


def plan_compact(
    out_slots: Any, accept_index: Any, accept_lens: Any = None, *, qo_indptr: Any = None, stream: Any = None
) -> Moves:
    """List the moves that bring each accepted path to the front of its verify window, on the GPU.

    A verify step of a tree wrote `out_slots`, one window of slots a request, and one path from the root is kept. Its
    token j moves to the slot of the window's place j, so that the request's KV goes on with the first slots of its
    window. No value is read from the device, and exactly B * (depth + 1) entries of `accept_index` are read on it.

    Parameters
    ----------
    out_slots : array, shape (T,), int32 or int64
        Slots that the verify step wrote.
    accept_index : array, shape (B, depth + 1), int32 or int64
        Each request's path, from the root on: places in `out_slots`, counted over the batch, as
        `mlaflash.spec.Acceptance` and SGLang have them; -1 pads. Parents come before their children: token j of a path
        is at place j of its window or behind it. An entry that is not, or that lies outside the window, moves nothing.
    accept_lens : array, shape (B,), int32 or int64, optional
        Entries of each path, its root included; by default those that are not -1.
    qo_indptr : array, shape (B + 1,), int32, optional
        Where the windows begin and end; by default all have T / B slots.
    stream : stream or int, optional
        Where the work runs, as in `mlaflash.mla_verify`.

    Returns
    -------
    Moves
        `src` and `dst` of shape (B * (depth + 1),) in the type and the library of `out_slots`, request by request; -1
        where nothing moves, as for tokens that are in place. `n`, int32 (1,), is where the last move ends. `group` is
        depth + 1.

    Raises
    ------
    ShapeError
        Shape, strides, dtype or device of an array.
    CaptureError
        The first call is being captured; make it once before.
    CompileError, CacheMissError, MissingDependencyError, NoDeviceError
        The kernel cannot be had here.
    """
    ordinal = ordinal_of(out_slots)
    with on_device(current_ordinal() if ordinal is None else ordinal):
        here = current_ordinal()
        work_stream = as_stream(stream, out_slots, here)
        view = functools.partial(device_view, stream=work_stream)
        step = build(view, out_slots, accept_index, accept_lens, qo_indptr)
        memory = memory_for(out_slots, work_stream, here, is_current=stream is None)
        with memory.scope:
            src, dst = (memory.empty((step.num_moves,), step.id_dtype) for _ in range(2))
            n = memory.empty((1,), "int32")
            step.write_to(memory.address(src), memory.address(dst), memory.address(n))
            launch = step.launch
            kernel = jit.load(launch.kernel, launch.defines, Device.current(), launch.shared_bytes, stream=work_stream)
            kernel.launch(launch.grid, launch.block, step.params, work_stream)
            if memory.export is not None:
                src, dst, n = (memory.export(array) for array in (src, dst, n))
        return Moves(src, dst, n, step.group)
