"""Verify steps over a KV cache whose tokens are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlaflash import mask_pack
from mlaflash.checks import choice, integer
from mlaflash.distributed import merging, transposing
from mlaflash.distributed.communicator import Communicator
from mlaflash.distributed.masking import mask_source
from mlaflash.distributed.transposing import TRANSPOSE_PARAMS_DTYPE
from mlaflash.errors import InvalidArgumentError, ShapeError, UnsupportedError
from mlaflash.interop import ArrayView, as_cupy
from mlaflash.mask_source import MaskSource
from mlaflash.masks import TreeMask
from mlaflash.params import DL, MASK_CODES, D, numpy_dtype
from mlaflash.plan import ALIGNMENT, Launcher, VerifyPlan
from mlaflash.problem import element_type, one_token_axis, query_rows, vector
from mlaflash.reuse import Recent, Reusable, Signature
from mlaflash.schedule import Launch
from mlaflash.sharding import Sharding, check_rank

_LSE_UNIT = 16  # bytes: rows of out that lie behind an lse start on as many
_ROPE_SKIP = DL * 2  # bytes from the latent to the rope columns of a fused row of q
_LATENT, _ROPE = 0, 1  # words of the argument of `transpose`
_OUT, _LSE = 2, 3  # of that of `merge`


class _Group(NamedTuple):
    """The memory of a group of heads, for a number of query tokens."""

    gathered: Any  # [N, bytes] of q
    q: Any  # [T, all heads, 576]
    out: Any  # of all heads over this rank's tokens
    lse: Any
    parts: Any  # [N, bytes]: the same, as it is given away
    received: Any  # [N, bytes]
    outs: Any  # [N, T, heads, 512]: the same, as it is merged
    lses: Any


class _Bound(NamedTuple):
    """A launch between the attention of the ranks, on the caller's arrays wherever they lie."""

    launch: Launcher
    words: memoryview[int]  # of its argument, which begins with the addresses
    arrays: dict[str, Any]  # of the plan, that the kernel touches


class _Merge(NamedTuple):
    """The merge of a group of heads."""

    bound: _Bound
    out_skip: int  # bytes from the first element of the whole result
    lse_skip: int


class _Step(NamedTuple):
    """All that a step does to arrays of some layout, made ready. Without query tokens it has no group."""

    groups: tuple[_Group, ...]
    transpose: _Bound
    attention: tuple[Reusable, ...]  # of each group
    merges: tuple[_Merge, ...]


class ShardedPlan:
    """Verify steps of a fixed capacity over a cache whose tokens are spread over ranks (decode context parallelism).

    Each rank has its own heads of q, all query tokens, and some tokens of every request. A step gathers q over the
    heads, attends all heads to the tokens of the rank (a `VerifyPlan`), and merges the partial results by their
    log-sum-exp. All ranks make the same calls in the same order, with the same lengths, masks and numbers of query
    tokens; only q, the cache and the page table differ.

    As with a `VerifyPlan`, `update` and `run` may be captured in CUDA graphs, once each was run before.

    Parameters
    ----------
    communicator : Communicator
        Such as an `NcclCommunicator`, made on the GPU that is current now.
    sharding : Interleaved or Contiguous
    num_heads : int
        Query heads of this rank; all ranks have as many.
    max_batch, max_q_len : int
        As in `VerifyPlan`.
    max_kv_len : int
        Most tokens of a request on all ranks, its new ones included.
    sm_scale : float
        As in `mla_verify`.
    mask : {"causal", "none", "tree"}
        Among the draft tokens, on whichever ranks they lie.
    merge : {"reduce_scatter", "all_gather"}
        What a rank gets: the result of its own heads, or that of all heads.
    head_groups : int
        Parts of the heads that are computed one after the other, each gathered and merged beside the attention of
        another. 1 overlaps nothing, and is for where the exchange is short: NCCL's kernels take multiprocessors from
        the attention, and each group reads the KV again.
    max_tokens : int, optional
        Most query tokens of a step, padding included; by default ``max_batch * max_q_len``.
    q_dtype, out_dtype : {"bfloat16", "float16"}, and "float32" for the second
        As in `VerifyPlan`.
    partial_dtype : {"bfloat16", "float16", "float32"}, optional
        Of the partial results that are exchanged; by default that of `out`.
    lse_base : {"e", "2"}
        As in `mla_verify`.
    **options
        As in `VerifyPlan`, for the cache of this rank: `page_size`, `block_table`, `max_ids`, `id_dtype`, `copy_ids`,
        `kv_dtype`, `split_kv`, `logit_cap`, `tiles`, `budget`.

    Attributes
    ----------
    communicator, sharding
        As given.
    local : VerifyPlan
        Of all heads, or of a group of them, over the tokens of this rank.

    Raises
    ------
    MlaFlashError
        As in `VerifyPlan`.
    """

    _make_local: Callable[..., VerifyPlan] = VerifyPlan

    def __init__(
        self,
        communicator: Communicator,
        sharding: Sharding,
        *,
        num_heads: int,
        max_batch: int,
        max_q_len: int,
        max_kv_len: int,
        sm_scale: float,
        mask: str = "causal",
        merge: str = "reduce_scatter",
        head_groups: int = 1,
        max_tokens: int | None = None,
        q_dtype: Any = "bfloat16",
        out_dtype: Any = None,
        partial_dtype: Any = None,
        lse_base: str = "e",
        **options: Any,
    ) -> None:
        self.communicator, self.sharding = communicator, sharding
        check_rank(sharding, communicator.rank)
        if sharding.num_ranks != communicator.num_ranks:
            raise InvalidArgumentError(
                f"sharding is for {sharding.num_ranks} ranks and communicator for {communicator.num_ranks}; both must "
                "agree."
            )
        self._mask = choice("mask", mask, tuple(MASK_CODES))
        self._merge = choice("merge", merge, ("reduce_scatter", "all_gather"))
        self._num_heads, self._groups = integer("num_heads", num_heads, 1), integer("head_groups", head_groups, 1)
        if self._num_heads % self._groups:
            raise InvalidArgumentError(f"num_heads is {num_heads} and head_groups {head_groups}; it must divide them.")
        if self._groups > 1 and merge == "all_gather":
            raise UnsupportedError("head_groups are for merge='reduce_scatter'; give 1 with 'all_gather'.")
        if options.get("new_kv"):
            raise UnsupportedError(
                "new_kv is for a cache on one GPU; here each draft token lies in the cache of one rank. Write it there "
                "before the step."
            )
        out_dtype = element_type("out_dtype", q_dtype if out_dtype is None else out_dtype)
        self._out_dtype, self._lse_base = out_dtype, lse_base
        # One query token sees all that there is, as with no mask.
        is_masked = mask == "tree" or (mask == "causal" and max_q_len > 1)
        self.local = self._make_local(
            num_heads=self._heads_of_group * communicator.num_ranks,
            max_batch=max_batch,
            max_q_len=max_q_len,
            max_kv_len=max(sharding.most_tokens(integer("max_kv_len", max_kv_len, 1)), 1),
            sm_scale=sm_scale,
            mask="tree" if is_masked else "none",
            max_tokens=max_tokens,
            q_dtype=q_dtype,
            out_dtype=out_dtype if partial_dtype is None else partial_dtype,
            lse_base=lse_base,
            **options,
        )
        self._backend = self.local._backend
        with self._backend.scope():
            self._allocate()
            self._lanes = self._make_lanes()
            self._load_kernels()

    def _load_kernels(self) -> None:
        """Load what is launched beside the local plan, so that nothing is left to do for a step that is captured."""
        masks = [launch for launch in mask_pack.every_launch(is_sharded=True) if self._may_launch(launch.defines)]
        copies = [launch for launch in mask_pack.every_launch() if launch.defines == mask_pack.defines("words")]
        for launch in (*masks, *(copies if self.local.capacity.mask == "tree" else ())):
            self._backend.load(launch, np.zeros(1, mask_pack.MASK_PARAMS_DTYPE), None)
        merge = merging.merge_launch(self.local.capacity.out_dtype, self._out_dtype)
        self._backend.load(merge, np.zeros(1, merging.MERGE_PARAMS_DTYPE), None)
        self._backend.load(transposing.transpose_launch(), np.zeros(1, TRANSPOSE_PARAMS_DTYPE), None)

    def _may_launch(self, defines: dict[str, int]) -> bool:
        """Whether these are the constants of a mask that `update` may be given."""
        return (defines == mask_pack.defines("causal", is_sharded=True)) != (self._mask == "tree")

    @property
    def _heads_of_group(self) -> int:
        """Heads of one rank in a group."""
        return self._num_heads // self._groups

    @property
    def _is_gathered(self) -> bool:
        return self._merge == "all_gather"

    # --- memory ------------------------------------------------------------------------------------------------------

    def _q_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one rank's q for a group of heads."""
        return self._heads_of_group * num_tokens * D * numpy_dtype(self.local.capacity.dtype).itemsize

    def _block_bytes(self, num_tokens: int) -> int:
        """Return the bytes of what one head gives: rows of out, then their lse."""
        lse_bytes = -(-num_tokens * 4 // _LSE_UNIT) * _LSE_UNIT
        return num_tokens * DL * numpy_dtype(self.local.capacity.out_dtype).itemsize + lse_bytes

    def _allocate(self) -> None:
        capacity, ranks = self.local.capacity, self.communicator.num_ranks
        tokens, heads = capacity.max_tokens, ranks * self._num_heads
        block = heads * self._block_bytes(tokens)
        sizes = {
            "q": heads * tokens * D * numpy_dtype(capacity.dtype).itemsize,
            "parts": 0 if self._is_gathered else block,
            "received": ranks * block if self._is_gathered else block,
            "words": tokens * capacity.mask_words * 4,
            "shard_lens": capacity.max_batch * 4,
            "tail_lens": capacity.max_batch * 4,
        }
        sizes = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
        self._memory = self._backend.memory(sum(sizes.values()), None)
        self._offsets = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self._words = self._piece("words", (tokens, capacity.mask_words), "uint32")
        self._shard_lens = self._piece("shard_lens", (capacity.max_batch,), "int32")
        self._tail_lens = self._piece("tail_lens", (capacity.max_batch,), "int32")
        self._known: Recent[_Step] = Recent()

    def _piece(
        self, name: str, shape: tuple[int, ...], dtype: str, skip: int = 0, strides: tuple[int, ...] | None = None
    ) -> Any:
        return self._backend.piece(self._memory, self._offsets[name] + skip, shape, dtype, strides)

    def _group(self, index: int, num_tokens: int) -> _Group:
        ranks, heads, rank = self.communicator.num_ranks, self._heads_of_group, self.communicator.rank
        q_bytes = self._q_bytes(num_tokens)
        part_bytes = heads * self._block_bytes(num_tokens)
        q_skip, skip = index * ranks * q_bytes, index * ranks * part_bytes
        q = self._piece("q", (ranks * heads, num_tokens, D), self.local.capacity.dtype, q_skip)
        if self._is_gathered:
            # Each rank's results of all heads; its own are written where they are gathered.
            received = parts = self._piece("received", (ranks, ranks * part_bytes), "uint8")
            out, lse = self._states("received", rank * ranks * part_bytes, (ranks * heads,), num_tokens)
            outs, lses = self._states("received", 0, (ranks, ranks * heads), num_tokens)
        else:
            parts, received = (self._piece(name, (ranks, part_bytes), "uint8", skip) for name in ("parts", "received"))
            out, lse = self._states("parts", skip, (ranks * heads,), num_tokens)
            outs, lses = self._states("received", skip, (ranks, heads), num_tokens)
        return _Group(
            gathered=self._piece("q", (ranks, q_bytes), "uint8", q_skip),
            q=q.transpose(1, 0, 2),
            out=out,
            lse=lse,
            parts=parts,
            received=received,
            outs=outs,
            lses=lses,
        )

    def _states(self, name: str, skip: int, heads: tuple[int, ...], num_tokens: int) -> tuple[Any, Any]:
        """View blocks of heads as out and lse; the last of `heads` are those of one result."""
        dtype = self.local.capacity.out_dtype
        size, block = numpy_dtype(dtype).itemsize, self._block_bytes(num_tokens)
        before = tuple(block * int(np.prod(heads[i + 1 :])) for i in range(len(heads) - 1))
        shape = (*heads[:-1], num_tokens, heads[-1])
        out = self._piece(name, (*shape, DL), dtype, skip, (*before, DL * size, block, size))
        return out, self._piece(name, shape, "float32", skip + num_tokens * DL * size, (*before, 4, block))

    # --- a step ------------------------------------------------------------------------------------------------------

    def update(
        self,
        *,
        kv_lens: Any,
        qo_indptr: Any = None,
        q_len: int | None = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        block_table: Any = None,
        mask: TreeMask | MaskSource | None = None,
        validate: bool = False,
        stream: Any = None,
    ) -> None:
        """Take over the metadata of a step and schedule it; device work alone, without a word to other ranks.

        Parameters
        ----------
        kv_lens : array, shape (B,), int32
            Tokens of each request on all ranks.
        qo_indptr, q_len
            As in `VerifyPlan.update`.
        kv_indptr, kv_indices, block_table : array
            As in `VerifyPlan.update`: the pages of this rank, whose tokens follow each other as they do in the request.
        mask : TreeMask or MaskSource
            For a plan with ``mask="tree"``, and only for it: of the whole draft.
        validate : bool
            Check the values too: reads the device, and so synchronises.
        stream : object, optional
            As in `mla_verify`.

        Raises
        ------
        ShapeError, InvalidArgumentError
            As in `VerifyPlan.update`.
        """
        backend, capacity = self._backend, self.local.capacity
        with backend.scope():
            stream = backend.stream(stream, kv_lens)
            lens = vector(backend.view, "kv_lens", kv_lens, ("int32",))
            batch = lens.shape[0]
            if batch > capacity.max_batch:
                raise ShapeError(f"kv_lens has {batch} requests; the plan was made for {capacity.max_batch} at most.")
            if (mask is not None) != (self._mask == "tree"):
                raise InvalidArgumentError(
                    f"mask is {'missing' if mask is None else 'given'}; a plan with mask={self._mask!r} takes "
                    f"{'a TreeMask or a MaskSource' if mask is None else 'none'}."
                )
            source = None if mask is None else mask_source(mask)
            shard_lens, tail_lens = self._shard_lens[:batch], self._tail_lens[:batch]
            shard = mask_pack.Shard(self.sharding, self.communicator.rank, kv_lens, shard_lens, tail_lens)
            is_masked = capacity.mask == "tree"
            # Without a mask, the kernel has but lengths to write.
            rows: dict[str, Any] = {"q_len": 0, "batch": batch}
            if is_masked:
                most = capacity.max_q_len if q_len is None else q_len
                rows = {"q_len": most, "batch": batch} if qo_indptr is None else {"qo_indptr": qo_indptr}
            packing = mask_pack.build(
                backend.view,
                source,
                self._words,
                self._words.shape[0],
                capacity.max_q_len if is_masked else 0,
                **rows,
                shard=shard,
            )
            touched = {name: view.array for name, view in packing.arrays.items()} | {"sharded words": self._words}
            backend.load(packing.launch, packing.params, stream)(stream, touched)
            step: dict[str, Any] = {"kv_lens": shard_lens, "qo_indptr": qo_indptr, "q_len": q_len}
            if is_masked:
                step |= {"mask": TreeMask(self._words, capacity.max_q_len), "tail_lens": tail_lens}
            pages = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "block_table": block_table}
            with self._current(stream):
                self.local.update(**step, **pages, validate=validate, stream=stream)

    def run(
        self, q: Any, kv_cache: Any, *, kv_scale: Any = 1.0, out: Any = None, lse: Any = None, stream: Any = None
    ) -> tuple[Any, Any]:
        """Attend the query tokens of the step that `update` planned to the tokens of all ranks.

        Parameters
        ----------
        q : array, shape (T, H, 576) or (B, S, H, 576), or pair
            This rank's heads, as in `mla_verify`; rows on 16 bytes.
        kv_cache : array
            This rank's cache, as in `mla_verify`.
        kv_scale : float, or array of one float32
            Of this rank's cache, as in `VerifyPlan.run`; ranks may have scales of their own.
        out : array, shape (T, H, 512) or (B, S, H, 512), optional
            Filled in place; with ``merge="all_gather"`` N * H heads, those of rank 0 first. Any strides with a
            contiguous last axis and rows on 16 bytes. New memory of the library of `q` by default.
        lse : array, shape as `out` without its last axis, float32, optional
        stream : object, optional
            As in `mla_verify`.

        Returns
        -------
        out, lse : array

        Raises
        ------
        ShapeError, InvalidArgumentError
            As in `VerifyPlan.run`.
        CommunicationError
            Another rank is gone.

        Notes
        -----
        Arguments are checked before the step begins. An error behind that aborts the communicator, since the others
        would wait for what this rank did not send.
        """
        backend = self._backend
        first = q[0] if isinstance(q, tuple | list) and q else q
        with backend.scope():
            self.local._check_rows(first)
            stream = backend.stream(stream, first)
            makes_out, makes_lse, export = out is None, lse is None, None
            if makes_out or makes_lse:
                shape = self._out_shape(first.shape[:-2])
                new_out, new_lse, export = backend.results(q, shape, self._out_dtype, stream)
                out, lse = (new_out if makes_out else out), (new_lse if makes_lse else lse)
            scale, scale_array = self.local._scale(kv_scale)
            given = {"q": q, "kv_cache": kv_cache, "kv_scale": scale_array, "out": out, "lse": lse}
            signature = Signature(given, (), backend.locate)
            step = self._known.get(signature.key)
            if step is None:
                # Refused here, where this rank has not yet begun what others would wait for.
                step = self._bind(q, kv_cache, kv_scale, out, lse)
                self._known.put(signature.key, step)
            if step.groups:
                try:
                    self._enqueue(step, signature.addresses, given, scale, stream)
                except BaseException as error:
                    self.communicator.abort(f"run() raised {type(error).__name__} in the middle of a step: {error}")
                    raise
            if export is not None:
                out, lse = (export(out) if makes_out else out), (export(lse) if makes_lse else lse)
        return out, lse

    def _out_shape(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        return (*tokens, self._num_heads * (self.communicator.num_ranks if self._is_gathered else 1), DL)

    def _enqueue(
        self, step: _Step, addresses: Mapping[str, Any], given: Mapping[str, Any], scale: float, stream: Any
    ) -> None:
        """Gather q, attend, and exchange the partial results; group by group, communication beside attention."""
        backend, lanes, communicator = self._backend, self._lanes, self.communicator
        tracks = backend.keeps_track
        q, words = addresses["q"], step.transpose.words
        words[_LATENT], words[_ROPE] = (q, q + _ROPE_SKIP) if isinstance(q, int) else q
        step.transpose.launch(stream, step.transpose.arrays | self.local._touched({"q": given["q"]}) if tracks else {})
        communication = lanes.fork(stream)
        for i, group in enumerate(step.groups):
            communicator.all_gather(group.gathered, communication)
            lanes.mark(i)
        cache = {name: address for name, address in addresses.items() if name.startswith("kv_")}
        for i, (group, attention) in enumerate(zip(step.groups, step.attention, strict=True)):
            lanes.wait(i, stream)
            local = {**given, "q": group.q, "out": group.out, "lse": group.lse} if tracks else {}
            self.local._enqueue(attention, cache, local, scale, stream)
            lanes.follow(stream)
            if self._is_gathered:
                communicator.all_gather(group.received, communication)
            else:
                communicator.all_to_all(group.parts, group.received, communication)
        lanes.mark(len(step.groups))
        lanes.wait(len(step.groups), stream)
        for (launch, words, arrays), out_skip, lse_skip in step.merges:
            words[_OUT], words[_LSE] = addresses["out"] + out_skip, addresses["lse"] + lse_skip
            launch(stream, arrays | {"out": given["out"], "lse": given["lse"]} if tracks else {})

    def _bind(self, q: Any, kv_cache: Any, kv_scale: Any, out: Any, lse: Any) -> _Step:
        """Check arrays of a layout that is new, and make their launches ready."""
        capacity, view = self.local.capacity, self._backend.view
        rows = query_rows(view, q)
        num_tokens, num_heads = rows.shape
        if rows.dtype != capacity.dtype or num_heads != self._num_heads:
            raise ShapeError(
                f"q is {rows.dtype} with {num_heads} heads; it must be {capacity.dtype} with {self._num_heads}, the "
                "heads of this rank."
            )
        if num_tokens > capacity.max_tokens:
            raise ShapeError(f"q has {num_tokens} query tokens; the plan was made for {capacity.max_tokens} at most.")
        shape = self._out_shape((q[0] if isinstance(q, tuple | list) else q).shape[:-2])
        views = view("out", out), view("lse", lse)
        for array, wanted, dtype in zip(views, (shape, shape[:-1]), (self._out_dtype, "float32"), strict=True):
            if array.shape != wanted or array.dtype != dtype:
                raise ShapeError(f"{array.name} is {array.dtype} {array.shape}; it must be {dtype} {wanted}.")
            if array.read_only:
                raise ShapeError(
                    f"{array.name} is read-only ({array.read_only}); the result is written to it. Give another."
                )
        groups = tuple(self._group(i, num_tokens) for i in range(self._groups if num_tokens else 0))
        first = self._backend.locate(self._memory)[0] + self._offsets["q"]
        size = self._q_bytes(num_tokens)
        transpose = transposing.build(
            rows, first + self.communicator.rank * size, self._heads_of_group, self.communicator.num_ranks * size
        )
        gathered = {f"gathered[{i}]": group.gathered for i, group in enumerate(groups)}
        return _Step(
            groups,
            self._bound(transpose.launch, transpose.params, gathered),
            tuple(self.local._bind(group.q, kv_cache, None, kv_scale, group.out, group.lse) for group in groups),
            self._bind_merges(*views, groups),
        )

    def _bind_merges(self, out: ArrayView, lse: ArrayView, groups: tuple[_Group, ...]) -> tuple[_Merge, ...]:
        merges = []
        outs, lses = (self._tokens_first(view) for view in (out, lse))
        for i, group in enumerate(groups):
            begin, count = i * self._heads_of_group, group.outs.shape[2]
            results = outs[:, begin : begin + count], lses[:, begin : begin + count]
            merge = merging.build(self._backend.view, group.outs, group.lses, *results, self._lse_base)
            bound = self._bound(merge.launch, merge.params, {"outs": group.outs, "lses": group.lses})
            merges.append(_Merge(bound, *(int(merge.params[view.name][0]) - view.ptr for view in (out, lse))))
        return tuple(merges)

    def _tokens_first(self, view: ArrayView) -> Any:
        """Give a result as an array with one axis of tokens, in the same memory."""
        array = self._array(view)
        if array.ndim == (3 if view.name == "out" else 2):
            return array
        one_token_axis(view)  # refuses what only a copy could give so
        return array.reshape(-1, *array.shape[2:])

    def _bound(self, launch: Launch, params: npt.NDArray[np.void], arrays: dict[str, Any]) -> _Bound:
        words = memoryview(params.view(np.uint64).data)
        return _Bound(self._backend.load(launch, params, None), words, arrays)

    # --- what a GPU does otherwise than the emulator -----------------------------------------------------------------

    def _array(self, view: ArrayView) -> Any:
        """Give a caller's array as one that slices and copies like the plan's own."""
        return as_cupy(view)

    def _current(self, stream: Any) -> AbstractContextManager[Any]:
        """Make the stream that of copies."""
        current: AbstractContextManager[Any] = nullcontext() if stream is None else stream
        return current

    def _make_lanes(self) -> Lanes:
        return GpuLanes(self._groups) if self._groups > 1 else Lanes()


class Lanes:
    """Order between attention and communication: all on the caller's stream."""

    def fork(self, stream: Any) -> Any:
        """Let communication follow what the caller enqueued, and return its stream."""
        return stream

    def follow(self, stream: Any) -> None:
        """Let communication follow what the caller's stream has now."""

    def mark(self, point: int) -> None:
        """Name what communication has now."""

    def wait(self, point: int, stream: Any) -> None:
        """Let the caller's stream wait for what was named."""


class GpuLanes(Lanes):
    """Communication on a stream of its own.

    Parameters
    ----------
    groups : int
        Points that are named, but for the last one.
    """

    def __init__(self, groups: int) -> None:
        import cupy

        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._follow, *self._marks = (cupy.cuda.Event(disable_timing=True) for _ in range(groups + 2))

    def fork(self, stream: Any) -> Any:
        """Let communication follow what the caller enqueued, and return its stream."""
        self.follow(stream)
        return self._stream

    def follow(self, stream: Any) -> None:
        """Let communication follow what the caller's stream has now."""
        self._follow.record(stream)
        self._stream.wait_event(self._follow)

    def mark(self, point: int) -> None:
        """Name what communication has now."""
        self._marks[point].record(self._stream)

    def wait(self, point: int, stream: Any) -> None:
        """Let the caller's stream wait for what was named."""
        stream.wait_event(self._marks[point])
