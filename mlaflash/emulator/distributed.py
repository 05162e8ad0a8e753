"""Ranks on the emulator: sharded plans on NumPy arrays, and their parts, with an exchange in the host's memory."""

from __future__ import annotations

import multiprocessing
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mlaflash.checks import integer
from mlaflash.distributed import merging
from mlaflash.distributed.masking import ShardMask, mask_source, words_shape
from mlaflash.distributed.plan import Lanes
from mlaflash.distributed.plan import ShardedPlan as GpuShardedPlan
from mlaflash.emulator.plan import VerifyPlan
from mlaflash.emulator.run import run_kernel
from mlaflash.errors import CommunicationError, InvalidArgumentError
from mlaflash.interop import ArrayView, numpy_view
from mlaflash.mask_pack import Shard, build
from mlaflash.mask_source import MaskSource
from mlaflash.masks import TreeMask
from mlaflash.sharding import Sharding


class SharedMemory:
    """Memory through which processes of this machine exchange arrays; goes to each of them as an argument.

    Parameters
    ----------
    num_ranks : int
    capacity : int
        Most bytes that a rank gives away in one exchange.
    timeout : float
        Seconds that a rank waits for the others.
    """

    def __init__(self, num_ranks: int, capacity: int, *, timeout: float = 60.0) -> None:
        context = multiprocessing.get_context("spawn")
        self.num_ranks, self.timeout = integer("num_ranks", num_ranks, 1), timeout
        self._bytes = context.RawArray("B", self.num_ranks * integer("capacity", capacity, 1))
        self._barrier = context.Barrier(self.num_ranks)

    def communicator(self, rank: int) -> HostCommunicator:
        """Make the communicator of one rank, in its process.

        Parameters
        ----------
        rank : int
        """
        memory = np.frombuffer(self._bytes, np.uint8).reshape(self.num_ranks, -1)
        return HostCommunicator(memory, rank, self._barrier, self.timeout)


class HostCommunicator:
    """A `mlaflash.distributed.Communicator` on NumPy arrays; made by `SharedMemory`.

    Attributes
    ----------
    num_ranks, rank : int
    """

    def __init__(self, memory: Any, rank: int, barrier: Any, timeout: float) -> None:
        self.num_ranks, self.rank = len(memory), rank
        self._memory, self._barrier, self._timeout = memory, barrier, timeout

    def all_gather(self, buffer: Any, stream: Any) -> None:
        """Fill the rows of a buffer with what each rank has in its own one.

        Parameters
        ----------
        buffer : numpy.ndarray, shape (N, bytes), uint8
        stream : None
        """
        size = self._give(buffer[self.rank])
        buffer[...] = self._memory[:, :size]
        self._meet()

    def all_to_all(self, send: Any, receive: Any, stream: Any) -> None:
        """Give each rank its row of `send`, and fill row r of `receive` with what rank r has for this one.

        Parameters
        ----------
        send, receive : numpy.ndarray, shape (N, bytes), uint8
        stream : None
        """
        size = self._give(send.ravel())
        receive[...] = self._memory[:, :size].reshape(self.num_ranks, *send.shape)[:, self.rank]
        self._meet()

    def abort(self, reason: str) -> None:
        """Give up: no rank waits for another any more, and each later call raises.

        Parameters
        ----------
        reason : str
        """
        self._barrier.abort()

    def _give(self, data: Any) -> int:
        if data.size > self._memory.shape[1]:
            raise InvalidArgumentError(
                f"an exchange of {data.size} bytes; the memory was made for {self._memory.shape[1]} a rank. Make it "
                "larger."
            )
        self._memory[self.rank, : data.size] = data
        self._meet()
        return int(data.size)

    def _meet(self) -> None:
        try:
            self._barrier.wait(self._timeout)
        except threading.BrokenBarrierError as error:
            raise CommunicationError(
                f"rank {self.rank} of {self.num_ranks} waited for {self._timeout:g} s, or another rank did. See which "
                "process ended."
            ) from error


class ShardedPlan(GpuShardedPlan):
    """`mlaflash.distributed.ShardedPlan` on NumPy arrays: the same kernels, checked at every access, slowly.

    Parameters
    ----------
    communicator, ... :
        As in `mlaflash.distributed.ShardedPlan`; also `num_sms` and `seed`, as in `mlaflash.emulator.VerifyPlan`.
    """

    _make_local = VerifyPlan

    def _array(self, view: ArrayView) -> Any:
        return view.array

    def _current(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def _make_lanes(self) -> Lanes:
        return Lanes()


def shard_mask(
    mask: str | TreeMask | MaskSource,
    sharding: Sharding,
    rank: int,
    *,
    kv_lens: Any,
    num_tokens: int,
    max_q: int,
    qo_indptr: Any = None,
    words: Any = None,
    seed: int = 0,
) -> ShardMask:
    """Run `mlaflash.distributed.shard_mask` on NumPy arrays: the same kernel, checked at every access.

    Parameters
    ----------
    mask, sharding, ... :
        As in `mlaflash.distributed.shard_mask`.
    seed : int
        Of the order in which threads take their turns.

    Returns
    -------
    ShardMask

    Raises
    ------
    EmulatorError
        The kernel did something that is wrong on a GPU.
    MlaFlashError
        As in `mlaflash.distributed.shard_mask`; there is no GPU to miss.
    """
    # Values that no kernel writes: what it forgets cannot pass for a result.
    if words is None:
        words = np.full(words_shape(num_tokens, max_q), 2**32 - 1, np.uint32)
    lens, tails = (np.full(numpy_view("kv_lens", kv_lens).shape, -1, np.int32) for _ in range(2))
    shard = Shard(sharding, rank, kv_lens, lens, tails)
    packing = build(numpy_view, mask_source(mask), words, num_tokens, max_q, qo_indptr=qo_indptr, shard=shard)
    arrays = {name: view.array for name, view in packing.arrays.items()} | {"result": words}
    step = packing.launch
    run_kernel(step.kernel, step.defines, step.grid, step.block, step.shared_bytes, packing.params, arrays, seed=seed)
    return ShardMask(TreeMask(words, max_q), lens, tails)


def merge_partials(
    outs: Any, lses: Any, *, out: Any = None, lse: Any = None, lse_base: str = "e", seed: int = 0
) -> tuple[Any, Any]:
    """Run `mlaflash.distributed.merge_partials` on NumPy arrays: the same kernel, checked at every access.

    Parameters
    ----------
    outs, lses, out, lse, lse_base
        As in `mlaflash.distributed.merge_partials`.
    seed : int
        Of the order in which threads take their turns.

    Returns
    -------
    out, lse : numpy.ndarray

    Raises
    ------
    EmulatorError, MlaFlashError
        As in `shard_mask`.
    """
    parts = numpy_view("outs", outs).array
    return _merge(
        outs, lses, np.full(parts.shape[1:], np.nan, parts.dtype) if out is None else out, lse, lse_base, None, seed
    )


def correct_partial(
    out: Any, lses: Any, rank: int, *, corrected: Any = None, lse: Any = None, lse_base: str = "e", seed: int = 0
) -> tuple[Any, Any]:
    """Run `mlaflash.distributed.correct_partial` on NumPy arrays: the same kernel, checked at every access.

    Parameters
    ----------
    out, lses, rank, corrected, lse, lse_base
        As in `mlaflash.distributed.correct_partial`.
    seed : int
        Of the order in which threads take their turns.

    Returns
    -------
    corrected, lse : numpy.ndarray

    Raises
    ------
    EmulatorError, MlaFlashError
        As in `shard_mask`.
    """
    return _merge(out, lses, out if corrected is None else corrected, lse, lse_base, rank, seed)


def _merge(outs: Any, lses: Any, out: Any, lse: Any, lse_base: str, part: int | None, seed: int) -> tuple[Any, Any]:
    if lse is None:
        lse = np.full(numpy_view("out", out).shape[:-1], np.nan, np.float32)
    step = merging.build(numpy_view, outs, lses, out, lse, lse_base, part)
    step.check_memory()
    if not step.is_empty:
        # Where out is one of the parts, the same memory is read and written: the name that may be written comes first.
        arrays = {name: step.arrays[name].array for name in ("out", "lse", "outs", "lses")}
        launch = step.launch
        run_kernel(
            launch.kernel,
            launch.defines,
            launch.grid,
            launch.block,
            launch.shared_bytes,
            step.params,
            arrays,
            seed=seed,
        )
    return out, lse
