"""Plans on the emulator: the kernels of `mlaflash.VerifyPlan` on NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlaflash.checks import integer
from mlaflash.device import Device
from mlaflash.emulator.run import Report, run_kernel
from mlaflash.emulator.verify import DEFAULT_ARCH
from mlaflash.errors import ShapeError
from mlaflash.interop import ArrayView, numpy_view
from mlaflash.params import new_params, numpy_dtype
from mlaflash.plan import ALIGNMENT, Backend, Capacity, Work, plan_launch, work_fields, workspace_shapes
from mlaflash.plan import VerifyPlan as GpuVerifyPlan
from mlaflash.schedule import Launch

_NEXT = 11  # word of a work item that names the block's next one, as in kernels/include/work.cuh


class EmulatorBackend:
    """NumPy's memory, and the host; see `mlaflash.plan.Backend`.

    Parameters
    ----------
    device : Device
        Whose limits count.
    """

    keeps_track = True

    def __init__(self, device: Device) -> None:
        self.device = device
        self.seed = 0
        self.reports: list[Report] = []

    def view(self, name: str, array: Any) -> ArrayView:
        """View the caller's array."""
        return numpy_view(name, array)

    def locate(self, array: Any) -> tuple[int, Hashable]:
        """Return the address of an array, and its shape, strides and element type."""
        view = numpy_view("array", array)
        return view.ptr, (view.shape, view.strides, view.dtype, view.ptr % 16, view.read_only)

    def memory(self, num_bytes: int, workspace: Any) -> Any:
        """Allocate bytes, or check those that the caller gives."""
        if workspace is None:
            workspace = np.empty(num_bytes + ALIGNMENT, np.uint8)
            workspace = workspace[-workspace.ctypes.data % ALIGNMENT :][:num_bytes]
        view = numpy_view("workspace", workspace)
        is_whole = view.ndim == 1 and (view.shape[0] < 2 or view.strides[0] == 1) and not view.read_only
        if not is_whole or view.ptr % ALIGNMENT or view.shape[0] * view.itemsize < num_bytes:
            raise ShapeError(f"workspace is {view.dtype} {view.shape}; {num_bytes} bytes on {ALIGNMENT} are needed.")
        memory = workspace.view(np.uint8)
        memory[:] = 0xFF  # NaN, and ids that are none: what no kernel wrote cannot pass for anything
        return memory

    def piece(
        self, memory: Any, offset: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None
    ) -> Any:
        """View a part of the memory as another array, contiguous or with strides in bytes."""
        # Of an array without elements, NumPy still wants the offset inside.
        return np.ndarray(shape, numpy_dtype(dtype), memory, offset if 0 not in shape else 0, strides)

    def results(self, q: Any, shape: tuple[int, ...], out_dtype: str, stream: Any) -> tuple[Any, Any, None]:
        """Allocate out and lse, filled with NaN."""
        return np.full(shape, np.nan, numpy_dtype(out_dtype)), np.full(shape[:-1], np.nan, np.float32), None

    def scope(self) -> AbstractContextManager[Any]:
        """Nothing is to be done."""
        return nullcontext()

    def stream(self, stream: Any, array: Any) -> Any:
        """There are none."""
        return None

    def copy(self, dst: int, src: ArrayView, width: int, rows: int, dst_pitch: int, stream: Any) -> None:
        """Copy the first `width` bytes of the first `rows` rows of an array."""
        for row in range(rows):
            step = row * src.strides[0] * src.itemsize if rows > 1 else 0
            ctypes.memmove(dst + row * dst_pitch, src.ptr + step, width)

    def load(self, launch: Launch, params: npt.NDArray[np.void], stream: Any) -> Any:
        """Make a launch ready."""

        def run(_stream: Any, touched: Mapping[str, Any]) -> None:
            report = run_kernel(
                launch.kernel,
                launch.defines,
                launch.grid,
                launch.block,
                launch.shared_bytes,
                params,
                touched,
                seed=self.seed,
            )
            self.reports.append(report)

        return run


class VerifyPlan(GpuVerifyPlan):
    """`mlaflash.VerifyPlan` on NumPy arrays: the same kernels, checked at every access, slowly.

    Parameters
    ----------
    num_heads, ... :
        As in `mlaflash.VerifyPlan`; `budget` says for which architecture.
    num_sms : int, optional
        Multiprocessors to plan for, which decide how many blocks there are; by default those of the architecture.
    seed : int
        Of the order in which threads run and copies land; may be changed between runs.

    Attributes
    ----------
    reports : list of Report
        Of every launch so far.
    seed : int
    """

    def __init__(self, *, num_sms: int | None = None, seed: int = 0, **arguments: Any) -> None:
        self._num_sms = None if num_sms is None else integer("num_sms", num_sms, 1)
        super().__init__(**arguments)
        self.seed = seed

    def _make_backend(self, budget: str | None) -> Backend:
        device = Device.for_arch(DEFAULT_ARCH if budget is None else budget)
        self._emulator = EmulatorBackend(device if self._num_sms is None else replace(device, num_sms=self._num_sms))
        return self._emulator

    @property
    def reports(self) -> list[Report]:
        """Reports of every launch so far."""
        return self._emulator.reports

    @property
    def seed(self) -> int:
        """Seed of the launches to come."""
        return self._emulator.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._emulator.seed = seed


class Piece(NamedTuple):
    """KV tiles of a row tile that a block works on.

    Attributes
    ----------
    request, row_tile : int
    begin, end : int
        KV tiles.
    """

    request: int
    row_tile: int
    begin: int
    end: int


def pieces(capacity: Capacity, work: Work, kv_lens: Sequence[int]) -> list[list[Piece]]:
    """Make the schedule of one step, as a plan does on the device, and nothing else of it.

    Parameters
    ----------
    capacity : Capacity
    work : Work
    kv_lens : sequence of int
        Of at most `max_batch` requests, each with `max_q_len` query tokens.

    Returns
    -------
    list of list of Piece
        Of each block, in its order.

    Raises
    ------
    MissingDependencyError
        There is no C++ compiler.
    """
    shapes = workspace_shapes(capacity, work)
    arrays: dict[str, npt.NDArray[Any]] = {"kv_lens": np.array(kv_lens, np.int32)}
    for name in ("work_items", "work_merges", "work_scratch"):
        shape, dtype = shapes[name]
        arrays[name] = np.zeros(shape, numpy_dtype(dtype))
    params = new_params(
        **work_fields(capacity, work),
        **{name: array.ctypes.data for name, array in arrays.items()},
        batch=len(kv_lens),
        max_q_len=capacity.max_q_len,
    )
    launch = plan_launch(work)
    run_kernel(launch.kernel, launch.defines, launch.grid, launch.block, launch.shared_bytes, params, arrays)
    items = arrays["work_items"]
    found: list[list[Piece]] = []
    for block in range(work.blocks):
        found.append([])
        index = block
        while index >= 0 and items[index, 0] >= 0:
            found[-1].append(Piece(*items[index, :4].tolist()))
            index = int(items[index, _NEXT])
    return found
