"""Why a verify step runs as it does: what each way to run it chooses, reads and needs, without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlaflash.device import Device
from mlaflash.emulator.plan import pieces
from mlaflash.errors import CacheMissError, CompileError, MissingDependencyError, UnsupportedError
from mlaflash.floors import Roofline, roofline, visible
from mlaflash.mma_tiles import TILE, MmaConfig
from mlaflash.params import row_bytes
from mlaflash.plan import Capacity, Work, choose_work, plan_launch, run_launches, workspace_bytes
from mlaflash.schedule import Launch, Schedule, mma_choice, mma_refusal
from mlaflash.schedule import plan as plan_call
from mlaflash.shape import VerifyShape
from mlaflash.tiles import KernelConfig, TileConfig


@dataclass(frozen=True, slots=True)
class CallChoice:
    """What one call of `mla_verify` launches.

    Attributes
    ----------
    schedule : Schedule
    kv_bytes : int
        KV that all row tiles together read; each beyond the first of a request finds it in the level-2 cache if that
        is large enough.
    predicted_us : float or None
        By `mlaflash.cost`, if every request is as long as the shape allows; None for `tile`, which it does not know.
    reasons : tuple of str
    """

    schedule: Schedule
    kv_bytes: int
    predicted_us: float | None
    reasons: tuple[str, ...]

    @property
    def workspace_bytes(self) -> int:
        """Memory between the kernels."""
        return sum(workspace.num_bytes for workspace in self.schedule.workspaces)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        first = self.schedule.launches[0]
        return {
            **_config(self.schedule.config),
            "num_splits": self.schedule.num_splits,
            "blocks": first.grid[0] * first.grid[1] * first.grid[2],
            "workspace_bytes": self.workspace_bytes,
            "kv_bytes": self.kv_bytes,
            "predicted_us": self.predicted_us,
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, slots=True)
class Balance:
    """How even the work of a step lies on the blocks of a plan.

    Attributes
    ----------
    mean_tiles : float
        KV tiles of a block.
    busiest_tiles : int
        Of the block that has most.
    idle_blocks : int
        Blocks without any.
    num_pieces : int
        Pieces that the row tiles are cut into.
    most_pieces : int
        Of one block.
    merged : int
        Row tiles of several pieces.
    """

    mean_tiles: float
    busiest_tiles: int
    idle_blocks: int
    num_pieces: int
    most_pieces: int
    merged: int


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """What a `VerifyPlan` launches, and how it spreads one step.

    Attributes
    ----------
    work : Work
    launches : tuple of Launch
        The kernel that makes the schedule, then those that follow it.
    workspace_bytes : int
    kv_bytes : int
        As of `CallChoice`.
    kv_tiles : int
        Of all row tiles.
    balance : Balance or None
        None where the schedule cannot be made here.
    missing : str
        Why it cannot.
    """

    work: Work
    launches: tuple[Launch, ...]
    workspace_bytes: int
    kv_bytes: int
    kv_tiles: int
    balance: Balance | None
    missing: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {
            **_config(self.work.config),
            "blocks": self.work.blocks,
            "start_tiles": self.work.start_tiles,
            "workspace_bytes": self.workspace_bytes,
            "kv_bytes": self.kv_bytes,
            "kv_tiles": self.kv_tiles,
            "balance": asdict(self.balance) if self.balance else None,
            "reasons": list(self.work.reasons),
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """A step and its choices.

    Attributes
    ----------
    shape : VerifyShape
    kv_lens : tuple of int
    device : Device
    floors : Roofline
    call : CallChoice
    plan : PlanChoice or None
        None where a plan does not do this.
    refusal : str
        Why it does not.
    """

    shape: VerifyShape
    kv_lens: tuple[int, ...]
    device: Device
    floors: Roofline
    call: CallChoice
    plan: PlanChoice | None
    refusal: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        floors = self.floors
        times = {"memory_us": floors.memory_us, "mma_us": floors.mma_us, "limit": floors.limit}
        return {
            "problem": asdict(self.shape) | {"kv_lens": list(self.kv_lens)},
            "device": asdict(self.device),
            "floors": asdict(floors) | times,
            "mla_verify": self.call.as_dict(),
            "verify_plan": self.plan.as_dict() if self.plan else {"refusal": self.refusal},
        }


def explain(shape: VerifyShape, device: Device, kv_lens: Sequence[int] | None = None) -> Explanation:
    """Explain what a verify step chooses on a device, without that device.

    How a plan spreads the step is found out by its own kernel on the emulator, where there is a C++ compiler.

    Parameters
    ----------
    shape : VerifyShape
        The largest step: a call is chosen for it, and a plan is made for it.
    device : Device
        Its limits count; a budget's too.
    kv_lens : sequence of int, optional
        Tokens of each request of the step; by default as many as the shape allows.

    Returns
    -------
    Explanation

    Raises
    ------
    InvalidArgumentError
        `kv_lens` are more, or longer, than the shape says.
    UnsupportedError
        No kernel does this on the device.
    """
    lens = shape.check_lens(kv_lens)
    floors = roofline(shape, device, kv_lens=lens)
    problem = shape.problem()
    schedule = plan_call(problem, device)
    refusal = mma_refusal(problem)
    choice = mma_choice(problem, device) if refusal is None else None
    call = CallChoice(
        schedule,
        _tiles(shape, lens, schedule.config)[0],
        choice.predicted_us if choice else None,
        choice.reasons if choice else (refusal or "",),
    )
    plan, missing = None, ""
    try:
        plan = _plan(shape, lens, device)
    except UnsupportedError as error:
        missing = str(error)
    return Explanation(shape, lens, device, floors, call, plan, missing)


def _plan(shape: VerifyShape, lens: Sequence[int], device: Device) -> PlanChoice:
    capacity = shape.capacity()
    work = choose_work(capacity, device)
    balance, missing = None, ""
    try:
        balance = _balance(capacity, work, lens)
    except (MissingDependencyError, CacheMissError, CompileError) as error:
        missing = str(error).partition("\n")[0]
    kv_bytes, kv_tiles = _tiles(shape, lens, work.config)
    launches = (plan_launch(work), *run_launches(capacity, work))
    return PlanChoice(work, launches, workspace_bytes(capacity, work), kv_bytes, kv_tiles, balance, missing)


def _balance(capacity: Capacity, work: Work, lens: Sequence[int]) -> Balance:
    blocks = pieces(capacity, work, lens)
    tiles = [sum(piece.end - piece.begin for piece in block) for block in blocks]
    parts = Counter((piece.request, piece.row_tile) for block in blocks for piece in block)
    return Balance(
        mean_tiles=sum(tiles) / len(blocks),
        busiest_tiles=max(tiles),
        idle_blocks=tiles.count(0),
        num_pieces=parts.total(),
        most_pieces=max(map(len, blocks)),
        merged=sum(count > 1 for count in parts.values()),
    )


def _tiles(shape: VerifyShape, lens: Sequence[int], config: KernelConfig) -> tuple[int, int]:
    """Count the bytes and the KV tiles that all row tiles read."""
    seen = visible(shape, lens)
    if isinstance(config, MmaConfig):
        ends = np.arange(config.rows, shape.rows + config.rows, config.rows)
        seen = seen[:, (np.minimum(ends, shape.rows) - 1) // shape.num_heads]
    elif isinstance(config, TileConfig):
        seen = seen.repeat(-(-shape.num_heads // config.ht), axis=1)
    return int(seen.sum()) * row_bytes(shape.stored), int((-(-seen // TILE)).sum())


def _config(config: KernelConfig) -> dict[str, Any]:
    constants = config.as_dict()
    constants.pop("nsplit", None)
    rows = {"row_tile": config.rows} if isinstance(config, MmaConfig) else {}
    return {"kernel": config.kernel, "config": constants} | rows
