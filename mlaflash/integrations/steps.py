"""Plans for the steps of an engine: memory taken once for each kind of step, and one update for all its layers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from mlaflash.errors import CaptureError, MlaFlashError, UnsupportedError


@dataclass(slots=True)
class Planned:
    """A plan, and what its last update was for."""

    plan: Any
    max_batch: int
    lse: Any
    step: tuple[Any, ...] = ()
    is_capturing: bool = False
    layers: set[int] = field(default_factory=set)

    def is_new_step(self, step: tuple[Any, ...], layer: int, *, is_capturing: bool) -> bool:
        """Tell whether a call begins a step.

        Parameters
        ----------
        step : tuple
            Objects that all layers of a step share, and no two steps in which the layers differ.
        layer : int
            Where its cache begins. A graph is captured after runs with the same objects: then a layer that was served
            already comes again, and the update must be part of the graph.
        is_capturing : bool
        """
        is_same = len(step) == len(self.step) and all(a is b for a, b in zip(step, self.step, strict=True))
        return not is_same or layer in self.layers or is_capturing != self.is_capturing

    def begin(self, step: tuple[Any, ...], layer: int, *, is_capturing: bool) -> None:
        """Remember the step that an update was made for, whose objects live on so that no other has their place."""
        self.step, self.is_capturing, self.layers = step, is_capturing, {layer}


class TorchRuntime:
    """What serving an engine needs of torch."""

    def make_plan(self, **capacity: Any) -> Any:
        """Make a `mlaflash.VerifyPlan`."""
        from mlaflash.plan import VerifyPlan

        return VerifyPlan(**capacity)

    def opaque(self, function: Any) -> Any:
        """Keep torch's compiler out of a function."""
        import torch

        return torch.compiler.disable(function)

    def is_capturing(self) -> bool:
        """Tell whether the current stream is being captured."""
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    def empty_lse(self, like: Any, shape: tuple[int, int]) -> Any:
        """Allocate float32 beside an array."""
        import torch

        return torch.empty(shape, dtype=torch.float32, device=like.device)

    def empty_out(self, like: Any, shape: tuple[int, int, int]) -> Any:
        """Allocate the element type of an array beside it."""
        return like.new_empty(shape)

    def dtype_name(self, array: Any) -> str:
        """Name an element type."""
        return str(array.dtype).removeprefix("torch.")

    def address(self, array: Any) -> int:
        """Return where an array begins."""
        return int(array.data_ptr())


class Plans:
    """The plans of one engine, by kind of step.

    Nothing waits for the GPU, so that steps may be captured; the first one of a kind must come before, as the warm-up
    runs of engines do.

    Parameters
    ----------
    runtime : TorchRuntime
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._plans: dict[Hashable, Planned] = {}
        self._outgrown: list[Planned] = []  # graphs may still use their memory
        self._failed: dict[Hashable, str] = {}

    def find(self, key: Hashable, batch: int, max_batch: int, like: Any, **capacity: Any) -> tuple[Planned, bool]:
        """Return the plan for a kind of step, made at its first one.

        Parameters
        ----------
        key : hashable
        batch : int
            Requests of the step.
        max_batch : int
            Most that are expected.
        like : array
            Memory is taken beside it.
        **capacity
            Of a `VerifyPlan`; `num_heads` and `max_q_len` among it.

        Returns
        -------
        planned : Planned
        is_new : bool

        Raises
        ------
        CaptureError
            The first step of its kind is being captured.
        MlaFlashError
            The plan cannot be made; it is tried once.
        """
        planned = self._plans.get(key)
        if planned is not None and planned.max_batch >= batch:
            return planned, False
        if key in self._failed:
            raise UnsupportedError(self._failed[key])
        if self._runtime.is_capturing():
            raise CaptureError(f"the first step of its kind ({key}) is being captured. Run it once before.")
        max_batch = max(batch, max_batch)
        try:
            plan = self._runtime.make_plan(max_batch=max_batch, **capacity)
        except MlaFlashError as error:
            self._failed[key] = str(error)
            raise
        lse = self._runtime.empty_lse(like, (max_batch * capacity["max_q_len"], capacity["num_heads"]))
        if planned is not None:
            self._outgrown.append(planned)
        self._plans[key] = planned = Planned(plan, max_batch, lse)
        return planned, True
