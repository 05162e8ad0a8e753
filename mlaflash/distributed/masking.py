"""Lengths and masks of the tokens that lie on one rank."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from mlaflash import jit
from mlaflash.checks import integer
from mlaflash.device import Device, current_ordinal, on_device
from mlaflash.errors import InvalidArgumentError
from mlaflash.interop import as_cupy, device_view, ordinal_of
from mlaflash.mask_formats import words_per_row
from mlaflash.mask_pack import Shard, build
from mlaflash.mask_source import MaskSource
from mlaflash.masks import TreeMask
from mlaflash.sharding import Sharding
from mlaflash.streams import as_stream, memory_for


class ShardMask(NamedTuple):
    """What the local call of one rank takes in place of the arguments of the whole call.

    Attributes
    ----------
    mask : TreeMask
        Its columns are the draft tokens of each request that lie on the rank.
    kv_lens : array, shape (B,), int32
        Tokens of each request on the rank.
    tail_lens : array, shape (B,), int32
        How many of them, the last ones, are draft tokens.
    """

    mask: TreeMask
    kv_lens: Any
    tail_lens: Any


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
    stream: Any = None,
) -> ShardMask:
    """Pack the mask of the tokens on one rank, on the GPU; no value is read from the device.

    A causal mask is aligned to the last tokens of the whole request. On one rank those are not the last ones of the
    cache: it needs a mask as a tree does, whose columns are the draft tokens that the rank happens to hold, and it may
    hold none. They are its last tokens whatever the sharding, since each rank keeps tokens in their order.

    Parameters
    ----------
    mask : "causal", TreeMask or MaskSource
        Of the whole draft: row and column for each draft token, wherever it lies.
    sharding : Interleaved or Contiguous
    rank : int
    kv_lens : array, shape (B,), int32
        Tokens of each request on all ranks, its new ones included.
    num_tokens : int
        Query tokens of the call, padding included.
    max_q : int
        Most draft tokens of a request, at most 1,024.
    qo_indptr : array, shape (B + 1,), int32, optional
        Where the draft tokens of each request begin and end. Without it, each has `max_q`.
    words : array, shape (T, ceil(max_q / 32)), uint32, optional
        Where the words go; new memory by default.
    stream : stream or int, optional
        Where the work runs, as in `mlaflash.mla_verify`. It may be captured.

    Returns
    -------
    ShardMask
        CuPy arrays: arguments of `mlaflash.mla_verify` for the cache of this rank, whose page table lists the rank's
        own pages.

    Raises
    ------
    ShapeError
        Shape, strides, dtype or device of an array.
    InvalidArgumentError
        A value that is not allowed.
    UnsupportedError
        More than 1,024 columns.
    CaptureError
        The first call for this format is being captured; make it once before.
    CompileError, CacheMissError, MissingDependencyError, NoDeviceError
        The kernel cannot be had here.
    """
    ordinal = ordinal_of(kv_lens)
    with on_device(current_ordinal() if ordinal is None else ordinal):
        import cupy

        here = current_ordinal()
        work_stream = as_stream(stream, kv_lens, here)
        view = functools.partial(device_view, stream=work_stream)
        memory = memory_for(kv_lens, work_stream, here, is_current=stream is None)
        with memory.scope:
            if words is None:
                words = memory.empty(words_shape(num_tokens, max_q), "uint32")
            lens, tails = (memory.empty((view("kv_lens", kv_lens).shape[0],), "int32") for _ in range(2))
        shard = Shard(sharding, rank, kv_lens, lens, tails)
        packing = build(view, mask_source(mask), words, num_tokens, max_q, qo_indptr=qo_indptr, shard=shard)
        step = packing.launch
        kernel = jit.load(step.kernel, step.defines, Device.current(), step.shared_bytes, stream=work_stream)
        kernel.launch(step.grid, step.block, packing.params, work_stream)
        lens, tails = (
            array if isinstance(array, cupy.ndarray) else as_cupy(view("", array)) for array in (lens, tails)
        )
        return ShardMask(TreeMask(as_cupy(packing.words), max_q), lens, tails)


def words_shape(num_tokens: int, max_q: int) -> tuple[int, int]:
    """Return the shape of the words of a mask.

    Parameters
    ----------
    num_tokens, max_q : int
        Query tokens, and columns.
    """
    return integer("num_tokens", num_tokens, 0), words_per_row(integer("max_q", max_q, 0))


def mask_source(mask: Any) -> MaskSource | None:
    """Give a mask as the kernel that packs it takes it.

    Parameters
    ----------
    mask : "causal", TreeMask or MaskSource

    Returns
    -------
    MaskSource or None
        None is the causal mask.

    Raises
    ------
    InvalidArgumentError
        It is something else.
    """
    if isinstance(mask, TreeMask):
        return MaskSource.from_packed(mask.words)
    if isinstance(mask, MaskSource):
        return mask
    if isinstance(mask, str) and mask == "causal":
        return None
    given = repr(mask) if mask is None or isinstance(mask, str) else type(mask).__qualname__
    raise InvalidArgumentError(
        f"mask is {given}; allowed are 'causal', a TreeMask and a MaskSource. Where all tokens see all, no rank needs "
        "a mask: take shard_lens."
    )
