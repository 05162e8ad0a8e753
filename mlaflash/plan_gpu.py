"""Memory and launches of a `VerifyPlan` on a GPU."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from mlaflash import jit
from mlaflash.attention import Export
from mlaflash.device import HERE, Device, apply_budget, context_loss, current_ordinal, on_device, padded_shared_bytes
from mlaflash.errors import LaunchError, ShapeError
from mlaflash.interop import ArrayView, as_cupy, device_view, fingerprint
from mlaflash.jit.launch import PreparedLaunch
from mlaflash.params import numpy_dtype
from mlaflash.plan import ALIGNMENT
from mlaflash.schedule import Launch
from mlaflash.streams import as_stream, memory_for


class GpuBackend:
    """CuPy's current device; see `mlaflash.plan.Backend`.

    Parameters
    ----------
    budget : str or None
        As in `mlaflash.mla_verify`.
    """

    keeps_track = False

    def __init__(self, budget: str | None) -> None:
        self._ordinal = current_ordinal()
        from cupy.cuda import runtime

        self._current_device = runtime.getDevice  # asked by every run
        self._device = Device.current(self._ordinal)
        self.device = self._device if budget is None else apply_budget(self._device, budget)

    def view(self, name: str, array: Any) -> ArrayView:
        """View the caller's array."""
        return device_view(name, array, self._ordinal)

    def locate(self, array: Any) -> tuple[int, Hashable]:
        """Return the address of an array, and its shape, strides and element type."""
        found = fingerprint(array)
        if found is not None:
            return found
        view = self.view("array", array)
        return view.ptr, (view.shape, view.strides, view.dtype, view.ptr % 16, view.read_only)

    def memory(self, num_bytes: int, workspace: Any) -> Any:
        """Allocate bytes, or check those that the caller gives."""
        import cupy

        if workspace is None:
            return cupy.empty(num_bytes, np.uint8)
        view = self.view("workspace", workspace)
        if view.read_only:
            raise ShapeError(f"workspace is read-only ({view.read_only}); the plan writes it. Give another one.")
        if view.ndim != 1 or (view.shape[0] > 1 and view.strides[0] != 1) or view.ptr % ALIGNMENT:
            raise ShapeError(
                f"workspace has shape {view.shape} and begins at address {view.ptr:#x}; it must have one contiguous "
                f"axis and begin on {ALIGNMENT} bytes."
            )
        if view.shape[0] * view.itemsize < num_bytes:
            raise ShapeError(
                f"workspace has {view.shape[0] * view.itemsize} bytes; the plan needs {num_bytes} (workspace_bytes)."
            )
        return as_cupy(view, self._ordinal).view(np.uint8)

    def piece(
        self, memory: Any, offset: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None
    ) -> Any:
        """View a part of the memory as another array, contiguous or with strides in bytes."""
        import cupy

        return cupy.ndarray(shape, numpy_dtype(dtype), memory.data + offset, strides)

    def results(self, q: Any, shape: tuple[int, ...], out_dtype: str, stream: Any) -> tuple[Any, Any, Export]:
        """Allocate out and lse, in the library of q where it lends memory."""
        like = q[0] if isinstance(q, tuple | list) else q
        memory = memory_for(like, stream, self._ordinal, is_current=False)
        with memory.scope:
            out, lse = memory.empty(shape, out_dtype), memory.empty(shape[:-1], "float32")
        if memory.export is None:
            return out, lse, None
        take = memory.export

        def export(array: Any) -> Any:
            with memory.scope:
                return take(array)

        return out, lse, export

    def scope(self) -> AbstractContextManager[Any]:
        """Make the device the current one."""
        return HERE if self._current_device() == self._ordinal else on_device(self._ordinal)

    def stream(self, stream: Any, array: Any) -> Any:
        """Find the stream of work on the caller's array."""
        return as_stream(stream, array, self._ordinal)

    def copy(self, dst: int, src: ArrayView, width: int, rows: int, dst_pitch: int, stream: Any) -> None:
        """Enqueue a copy of the first `width` bytes of the first `rows` rows of an array."""
        from cupy.cuda import runtime

        kind = runtime.memcpyDeviceToDevice
        try:
            if rows == 1:
                runtime.memcpyAsync(dst, src.ptr, width, kind, stream.ptr)
                return
            pitch = src.strides[0] * src.itemsize
            runtime.memcpy2DAsync(dst, dst_pitch, src.ptr, pitch, width, rows, kind, stream.ptr)
        except runtime.CUDARuntimeError as error:
            raise context_loss(error) or LaunchError(
                f"the driver refused to copy {src.name} to the plan: {error}. An earlier kernel may have failed; see "
                "what CUDA says, and update() again once it works."
            ) from error

    def load(self, launch: Launch, params: npt.NDArray[np.void], stream: Any) -> Any:
        """Make a launch ready."""
        shared = padded_shared_bytes(launch.shared_bytes, self._device, self.device)
        kernel = jit.load(launch.kernel, launch.defines, self._device, shared, stream=stream)
        prepared = PreparedLaunch(kernel, launch.grid, launch.block, params, is_dependent=launch.is_dependent)

        def enqueue(stream: Any, _touched: Mapping[str, Any]) -> None:
            prepared.launch(stream.ptr)

        return enqueue
