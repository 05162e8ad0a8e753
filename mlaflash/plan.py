"""Verify steps of a fixed capacity: kernels and memory made ready once, the schedule made on the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from mlaflash import cost, mask_pack
from mlaflash.attention import Export, output_views
from mlaflash.checks import choice, finite, flag, integer, is_number
from mlaflash.device import Device
from mlaflash.errors import BusyError, InvalidArgumentError, ShapeError, UnsupportedError
from mlaflash.interop import ArrayView, dtype_name, to_host
from mlaflash.mask_formats import words_per_row
from mlaflash.mask_source import MaskSource
from mlaflash.masks import TreeMask
from mlaflash.mma_tiles import MAX_TAIL_LEN, MmaKernelConfig, feature_defines
from mlaflash.params import DL, FP8_CODES, MASK_CODES, new_params, numpy_dtype
from mlaflash.problem import (
    MAX_KV_LEN,
    Problem,
    check_pages,
    element_type,
    kv_element_type,
    kv_scale_view,
    soft_cap,
    vector,
)
from mlaflash.reuse import Recent, Reusable, Signature
from mlaflash.schedule import (
    FP8_KERNELS,
    MMA_KERNELS,
    Launch,
    Schedule,
    build_params,
    check_cache,
    check_fp8,
    fp8_kernels,
    mma_refusal,
)
from mlaflash.tiles import KernelConfig, check_shared, dtype_defines

MAX_WORK_BLOCKS: Final = 1024
"""Most blocks of a planned kernel."""

_PLAN_THREADS = 512
_MOST = 2**31 - 1
_PLAN_SHARED = 128
_COMBINE_THREADS = 512
_COMBINE_SHARED = 16 * (32 * 16 + 4)
_COMBINE_ROWS = 3  # blocks along y: 132 x 3 x 16 warps are enough for 64 rows of 4 items in as many parts
_LEAST_TILES = 8  # of a block, as cost.choose finds for short requests
ALIGNMENT: Final = 256
"""Bytes on which a workspace and each of its arrays start."""
_ID_BYTES = {"int32": 4, "int64": 8}
Launcher = Callable[[Any, Mapping[str, Any]], None]
"""Of a stream, and of the arrays that the kernel touches where they are kept track of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a `VerifyPlan` is made for; its parameters are those of the plan, checked.

    Attributes
    ----------
    num_heads, max_batch, max_q_len, max_kv_len, max_tokens, page_size, max_ids : int
    sm_scale, logit_cap : float
    dtype, kv_dtype, out_dtype, id_dtype, mask : str
    block_table, new_kv, split_kv, copy_ids : bool
    lse_base : str
    """

    num_heads: int
    max_batch: int
    max_q_len: int
    max_kv_len: int
    max_tokens: int
    max_ids: int
    page_size: int
    sm_scale: float
    logit_cap: float
    dtype: str
    kv_dtype: str
    out_dtype: str
    id_dtype: str
    mask: str
    block_table: bool
    new_kv: bool
    split_kv: bool
    copy_ids: bool
    lse_base: str

    @property
    def rows(self) -> int:
        """Most packed rows of a request."""
        return self.max_q_len * self.num_heads

    @property
    def table_width(self) -> int:
        """Pages of a request."""
        return -(-self.max_kv_len // self.page_size)

    @property
    def mask_words(self) -> int:
        """Words of a row of the tree mask."""
        return words_per_row(self.max_q_len) if self.mask == "tree" else 0


@dataclass(frozen=True, slots=True)
class Work:
    """How a planned kernel spreads its work.

    Attributes
    ----------
    config : MmaKernelConfig
    blocks : int
        Of the kernel that reads the KV, whatever the lengths: as many as run at once.
    row_tiles : int
        Most row tiles of a request.
    start_tiles : int
        What starting on a row tile costs, in KV tiles.
    reasons : tuple of str
        For people.
    """

    config: MmaKernelConfig
    blocks: int
    row_tiles: int
    start_tiles: int
    reasons: tuple[str, ...]


def choose_work(capacity: Capacity, device: Device, tiles: KernelConfig | None = None) -> Work:
    """Choose kernel and blocks of a plan.

    Parameters
    ----------
    capacity : Capacity
    device : Device
        Its limits count; a budget's too.
    tiles : MmaKernelConfig, optional
        Constants of the kernel; by default those with the least predicted time of a full plan.

    Raises
    ------
    InvalidArgumentError
        `tiles` belong to another kernel.
    UnsupportedError
        The cache holds 8 bits, and the kernel or the device does not read those.
    TileError
        The configuration does not fit the device.
    """
    check_fp8(capacity.kv_dtype, device)
    if tiles is None:
        # The model alone: what a tuned table has over it are splits and waves of a grid, which a plan does without.
        choice = cost.choose(
            max(capacity.rows, 1),
            max(capacity.max_batch, 1),
            capacity.max_kv_len,
            device,
            has_new_kv=capacity.new_kv,
            kv_dtype=capacity.kv_dtype,
        )
        config, reasons = choice.config, choice.reasons[:1]
    elif isinstance(tiles, MmaKernelConfig):
        config, reasons = tiles, ("tiles as given",)
    else:
        raise InvalidArgumentError(
            f"tiles is {tiles!r}; a plan takes MmaNarrowConfig, MmaWideConfig or MmaRolesConfig. Leave it out to have "
            "it chosen."
        )
    if config.kernel not in FP8_KERNELS.get(capacity.kv_dtype, MMA_KERNELS):
        raise UnsupportedError(
            f"tiles are those of {config.kernel}, which does not read a {capacity.kv_dtype} cache; "
            f"{fp8_kernels(capacity.kv_dtype)}. Leave tiles out to have them chosen."
        )
    config = replace(config, nsplit=None)
    check_cache(config, capacity.kv_dtype, has_new_kv=capacity.new_kv)
    check_shared(config, device, capacity.kv_dtype)
    row_tiles = max(1, -(-capacity.rows // config.rows))
    blocks_per_sm = cost.blocks_per_sm(config, device, capacity.kv_dtype)
    slots = min(device.num_sms * blocks_per_sm, MAX_WORK_BLOCKS)
    # Row tiles of one request side by side, each in step with the others: they share what they read.
    blocks = slots // row_tiles * row_tiles if row_tiles < slots else slots
    reasons += (f"{blocks} blocks share the work of a step on {device.num_sms} SMs",)
    return Work(config, blocks, row_tiles, cost.start_tiles(config, device, capacity.kv_dtype), reasons)


class Backend(Protocol):
    """Where a plan's memory lies and its kernels run."""

    @property
    def device(self) -> Device:
        """Its limits count; a budget's too."""

    @property
    def keeps_track(self) -> bool:
        """Whether launches want to know every array that a kernel touches."""

    def view(self, name: str, array: Any) -> ArrayView:
        """View the caller's array."""

    def locate(self, array: Any) -> tuple[int, Hashable]:
        """Return the address of the caller's array, and all else that tells it from others."""

    def memory(self, num_bytes: int, workspace: Any) -> Any:
        """Allocate bytes, or check those that the caller gives."""

    def piece(
        self, memory: Any, offset: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None
    ) -> Any:
        """View a part of the memory as another array, contiguous or with strides in bytes."""

    def results(self, q: Any, shape: tuple[int, ...], out_dtype: str, stream: Any) -> tuple[Any, Any, Export]:
        """Allocate out, and lse without the last axis; the last result makes arrays of q's library of them."""

    def scope(self) -> AbstractContextManager[Any]:
        """Make the device the current one."""

    def stream(self, stream: Any, array: Any) -> Any:
        """Find the stream of work on the caller's array."""

    def copy(self, dst: int, src: ArrayView, width: int, rows: int, dst_pitch: int, stream: Any) -> None:
        """Enqueue a copy of the first `width` bytes of the first `rows` rows of an array."""

    def load(self, launch: Launch, params: npt.NDArray[np.void], stream: Any) -> Launcher:
        """Make a launch ready; each call of it enqueues the kernel with what `params` hold by then."""


def check_capacity(
    *,
    num_heads: int,
    max_batch: int,
    max_q_len: int,
    max_kv_len: int,
    sm_scale: float,
    page_size: int = 1,
    max_tokens: int | None = None,
    max_ids: int | None = None,
    q_dtype: Any = "bfloat16",
    kv_dtype: Any = None,
    out_dtype: Any = None,
    id_dtype: Any = "int32",
    mask: str = "causal",
    block_table: bool = False,
    new_kv: bool = False,
    split_kv: bool = False,
    copy_ids: bool = True,
    logit_cap: float = 0.0,
    lse_base: str = "e",
) -> Capacity:
    """Check the parameters of a `VerifyPlan`.

    Parameters
    ----------
    num_heads, ... : see `VerifyPlan`

    Returns
    -------
    Capacity

    Raises
    ------
    InvalidArgumentError
        A value that is not allowed.
    UnsupportedError
        Something that the tensor-core kernels do not do.
    """
    sizes = {
        "num_heads": integer("num_heads", num_heads, 1),
        "max_batch": integer("max_batch", max_batch, 1),
        "max_q_len": integer("max_q_len", max_q_len, 1),
        "max_kv_len": integer("max_kv_len", max_kv_len, 1),
        "page_size": integer("page_size", page_size, 1),
    }
    given = {"max_tokens": max_tokens, "max_ids": max_ids}
    optional = {name: integer(name, value, 1) for name, value in given.items() if value is not None}
    for name, size in (sizes | optional).items():
        if size > _MOST:
            raise UnsupportedError(f"{name} is {size}; the kernels count in 32 bits, up to {_MOST}.")
    if sizes["max_kv_len"] > MAX_KV_LEN:
        raise UnsupportedError(f"max_kv_len is {max_kv_len}; a request has at most {MAX_KV_LEN} tokens.")
    tokens = sizes["max_batch"] * sizes["max_q_len"]
    table_width = -(-sizes["max_kv_len"] // sizes["page_size"])
    dtype = element_type("q_dtype", q_dtype)
    if dtype == "float32":
        raise UnsupportedError(
            "q_dtype is 'float32'; a plan serves the tensor-core kernels, which take bfloat16 and float16. Call "
            "mla_verify for float32."
        )
    kv_name = dtype if kv_dtype is None else kv_element_type("kv_dtype", kv_dtype)
    if kv_name not in (dtype, *FP8_CODES):
        raise UnsupportedError(
            f"kv_dtype is {kv_dtype!r} and q_dtype {dtype!r}; allowed are q_dtype itself, {', '.join(FP8_CODES)}."
        )
    if kv_name == "fp8_ds_mla" and split_kv:
        raise UnsupportedError("split_kv is set and kv_dtype 'fp8_ds_mla', whose rows are one array. Leave it out.")
    if not isinstance(mask, str) or mask not in MASK_CODES:
        raise InvalidArgumentError(
            f"mask is {mask!r}; a plan is made for one of {', '.join(map(repr, MASK_CODES))}, and update() takes the "
            "tree itself."
        )
    if mask == "tree" and sizes["max_q_len"] > MAX_TAIL_LEN:
        raise UnsupportedError(f"max_q_len is {max_q_len}; a tree mask has at most {MAX_TAIL_LEN} columns.")
    id_name = id_dtype if isinstance(id_dtype, str) else dtype_name(id_dtype)
    if id_name not in _ID_BYTES:
        raise InvalidArgumentError(f"id_dtype is {id_dtype!r}; allowed are int32 and int64.")
    return Capacity(
        **sizes,
        max_tokens=optional.get("max_tokens", tokens),
        max_ids=optional.get("max_ids", sizes["max_batch"] * table_width),
        sm_scale=finite("sm_scale", sm_scale),
        logit_cap=soft_cap(logit_cap),
        dtype=dtype,
        kv_dtype=kv_name,
        out_dtype=dtype if out_dtype is None else element_type("out_dtype", out_dtype),
        id_dtype=id_name,
        mask=mask,
        block_table=flag("block_table", block_table),
        new_kv=flag("new_kv", new_kv),
        split_kv=flag("split_kv", split_kv),
        copy_ids=flag("copy_ids", copy_ids),
        lse_base=choice("lse_base", lse_base, ("e", "2")),
    )


class _Turn:
    """Lets one thread in, and refuses others meanwhile: what they would change, the first one is about to launch."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "another thread is in update() or run() of this plan. Give each thread a plan of its own, or hold a "
                "lock from update() to the last run() of a step."
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class VerifyPlan:
    """Verify steps of a fixed capacity, for serving engines: plan once, then update and run each step.

    The constructor allocates, compiles and loads. `update` enqueues work on the device alone: it reads no length on the
    host and synchronises nothing. `run` only launches. All addresses of the plan's own memory stay the same, so both
    may be captured in CUDA graphs, whose replays follow whatever the arrays hold by then: lengths, ids, masks, and how
    many requests and query tokens are live.

    The schedule is made on the device (`kernels/plan.cu`): as many blocks as run at once share the KV of the batch
    evenly, whatever the lengths, so that a graph captured with short requests replays at full speed with long ones.

    A plan is for one stream and one thread at a time: `run` reads what the `update` before it wrote. Threads with a
    plan and a stream of their own need no lock. Threads that share one must hold a lock from `update` to the last `run`
    of a step; a call that comes while another thread is inside one is refused, but not a `run` behind somebody else's
    `update`.

    An `update` that is refused leaves the step before it in force. One that fails later, as when the driver refuses a
    launch, leaves none: `run` then asks for another `update`. After a `run` that failed, `out` and `lse` hold nothing
    that counts, and the same `run` may be tried again.

    Parameters
    ----------
    num_heads : int
        Query heads, H.
    max_batch : int
        Most requests of a step.
    max_q_len : int
        Most query tokens of a request.
    max_kv_len : int
        Most tokens of a request, its new ones included.
    sm_scale : float
        As in `mla_verify`.
    page_size : int
        Tokens of a page.
    max_tokens : int, optional
        Most query tokens of a step; by default ``max_batch * max_q_len``. Bounds the tree mask alone.
    max_ids : int, optional
        With `kv_indptr`: most page ids of a step; by default what `max_batch` requests of `max_kv_len` need.
    q_dtype : {"bfloat16", "float16"}
    kv_dtype : {"bfloat16", "float16", "float8_e4m3", "fp8_ds_mla"}, optional
        q's by default, or a cache of 8 bits as in `mla_verify`.
    out_dtype : {"bfloat16", "float16", "float32"}, optional
        By default q's.
    id_dtype : {"int32", "int64"}
        Of page ids.
    mask : {"causal", "none", "tree"}
        Fixed for the life of the plan; a tree itself is given to `update`.
    block_table : bool
        Whether `update` takes a block table in place of `kv_indptr` and `kv_indices`.
    new_kv : bool
        Whether `run` takes the last q_len tokens of each request apart from the cache.
    split_kv : bool
        Whether the rope columns of a cache row may lie elsewhere than right behind its latent ones.
    copy_ids : bool
        Whether `update` copies the page ids to memory of the plan. Without it the array of the last `update` is read by
        every `run` and must stay; a graph keeps the address of the one at its capture.
    logit_cap : float
        As in `mla_verify`.
    lse_base : {"e", "2"}
        As in `mla_verify`.
    tiles : MmaKernelConfig, optional
        Constants of the kernel; by default chosen by `mlaflash.cost`.
    budget : str, optional
        As in `mla_verify`.
    workspace : array, optional
        Memory for the plan, at least `workspace_bytes` that start on 256 bytes, kept; by default allocated.

    Attributes
    ----------
    capacity : Capacity
    work : Work
        Kernel and blocks.
    workspace_bytes : int
        Memory of the plan: the partial results of two pieces of each block (``2 * blocks * rows`` of 514 elements), 48
        to 100 bytes for each block and for each row tile of each request, and its copies of ids and masks.

    Raises
    ------
    InvalidArgumentError
        A value that is not allowed.
    UnsupportedError, TileError
        Something that the tensor-core kernels do not do, or not on this device.
    CompileError, CacheMissError, CaptureError, MissingDependencyError, NoDeviceError
        The kernels cannot be had here.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        max_batch: int,
        max_q_len: int,
        max_kv_len: int,
        sm_scale: float,
        page_size: int = 1,
        max_tokens: int | None = None,
        max_ids: int | None = None,
        q_dtype: Any = "bfloat16",
        kv_dtype: Any = None,
        out_dtype: Any = None,
        id_dtype: Any = "int32",
        mask: str = "causal",
        block_table: bool = False,
        new_kv: bool = False,
        split_kv: bool = False,
        copy_ids: bool = True,
        logit_cap: float = 0.0,
        lse_base: str = "e",
        tiles: KernelConfig | None = None,
        budget: str | None = None,
        workspace: Any = None,
    ) -> None:
        capacity = check_capacity(
            num_heads=num_heads,
            max_batch=max_batch,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            sm_scale=sm_scale,
            page_size=page_size,
            max_tokens=max_tokens,
            max_ids=max_ids,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            out_dtype=out_dtype,
            id_dtype=id_dtype,
            mask=mask,
            block_table=block_table,
            new_kv=new_kv,
            split_kv=split_kv,
            copy_ids=copy_ids,
            logit_cap=logit_cap,
            lse_base=lse_base,
        )
        self._start(capacity, self._make_backend(budget), tiles, workspace)

    def _make_backend(self, budget: str | None) -> Backend:
        from mlaflash.plan_gpu import GpuBackend

        return GpuBackend(budget)

    def _start(self, capacity: Capacity, backend: Backend, tiles: KernelConfig | None, workspace: Any) -> None:
        self.capacity = capacity
        self._backend = backend
        with backend.scope():
            self.work = choose_work(capacity, backend.device, tiles)
            shapes = workspace_shapes(capacity, self.work)
            self.workspace_bytes = workspace_bytes(capacity, self.work)
            self._memory = backend.memory(self.workspace_bytes, workspace)
            self._pieces: dict[str, Any] = {}
            offset = 0
            for name, piece in shapes.items():
                self._pieces[name] = backend.piece(self._memory, offset, *piece)
                offset += _num_bytes(*piece)
            self._pointers = {name: backend.locate(piece)[0] for name, piece in self._pieces.items()}
            self._page_ids = self._pointers["page_ids"]
            self._ids_array = self._pieces["page_ids"]
            self._turn = _Turn()
            self._is_updated = False
            self._uniform: tuple[int, int] | None = None  # requests and query tokens of each, without qo_indptr
            self._known: Recent[Reusable] = Recent()
            self._plan_params = new_params(**self._work_fields())
            self._plan = backend.load(plan_launch(self.work), self._plan_params, None)
            # Loaded here, so that nothing is left to do for the first run, which may be captured.
            self._load(new_params())

    def _work_fields(self) -> dict[str, Any]:
        names = ("work_items", "work_merges", "work_scratch", "partial_out", "partial_lse")
        return {name: self._pointers[name] for name in names} | work_fields(self.capacity, self.work)

    def _load(self, params: npt.NDArray[np.void]) -> tuple[Launcher, ...]:
        return tuple(self._backend.load(launch, params, None) for launch in run_launches(self.capacity, self.work))

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
        tail_lens: Any = None,
        validate: bool = False,
        stream: Any = None,
    ) -> None:
        """Take over the metadata of a step and schedule it; device work alone.

        Parameters
        ----------
        kv_lens : array, shape (B,), int32
            As in `mla_verify`; B is at most `max_batch`.
        qo_indptr : array, shape (B + 1,), int32, optional
            As in `mla_verify`. Requests that are padding have no query token, or a `kv_lens` of 0.
        q_len : int, optional
            Without `qo_indptr`: query tokens of every request; by default `max_q_len`.
        kv_indptr, kv_indices : array, shapes (B + 1,) and (at most max_ids,), int32 or int64
            As in `mla_verify`, the ids of the plan's type.
        block_table : array, shape (B, pages), int32 or int64
            In their place, where the plan was made so.
        mask : TreeMask or MaskSource
            For a plan with ``mask="tree"``, and only for it. Has a row for each query token.
        tail_lens : array, shape (B,), int32, optional
            With a tree: as in `mla_verify`.
        validate : bool
            Check the values too: reads the device, and so synchronises.
        stream : object, optional
            As in `mla_verify`.

        Raises
        ------
        ShapeError
            Rank, length, dtype or device of an array, or more than the plan's capacity.
        InvalidArgumentError
            Arguments that do not go together, or with the plan.
        BusyError
            Another thread is in a call of this plan.
        LaunchError, ContextLostError
            As in `mla_verify`.
        """
        backend, capacity = self._backend, self.capacity
        with self._turn, backend.scope():
            stream = backend.stream(stream, kv_lens)
            lens = vector(backend.view, "kv_lens", kv_lens, ("int32",))
            batch = lens.shape[0]
            if batch > capacity.max_batch:
                raise ShapeError(f"kv_lens has {batch} requests; the plan was made for {capacity.max_batch} at most.")
            q_len = capacity.max_q_len if q_len is None else integer("q_len", q_len, 0)
            if q_len > capacity.max_q_len:
                raise InvalidArgumentError(f"q_len is {q_len}; the plan was made for {capacity.max_q_len} at most.")
            indptr = None
            if qo_indptr is not None:
                indptr = vector(backend.view, "qo_indptr", qo_indptr, ("int32",), batch + 1)
            tails = None
            if tail_lens is not None:
                if capacity.mask != "tree":
                    raise InvalidArgumentError(
                        f"tail_lens is given and the plan's mask is {capacity.mask!r}; it says where the columns of a "
                        "tree lie. Leave it out."
                    )
                tails = vector(backend.view, "tail_lens", tail_lens, ("int32",), batch)
            kv_ptrs, ids = self._ids(batch, kv_indptr, kv_indices, block_table)
            if flag("validate", validate):
                self._validate(lens, indptr, q_len, kv_ptrs, ids)
            # The mask first, which may be refused: then the last update is still in force.
            self._take_mask(mask, qo_indptr, q_len, batch, tail_lens, stream)
            # What fails from here on leaves some of both steps.
            self._is_updated = False
            self._take_ids(ids, kv_ptrs is None, stream)
            fields: dict[str, Any] = {
                "kv_lens": lens.ptr,
                "qo_indptr": 0 if indptr is None else indptr.ptr,
                "tail_lens": 0 if tails is None else tails.ptr,
                "kv_indptr": 0 if kv_ptrs is None else kv_ptrs.ptr,
                "wide_indptr": kv_ptrs is not None and kv_ptrs.dtype == "int64",
                "block_table_stride": self._table_stride(ids),
                "batch": batch,
                "max_q_len": q_len,
            }
            for name, value in fields.items():
                self._plan_params[name] = value
            touched = [view for view in (lens, indptr, tails, kv_ptrs) if view is not None]
            self._plan(stream, self._pieces | {view.name: view.array for view in touched})
            self._uniform = (batch, q_len) if indptr is None else None
            self._is_updated = True

    def _ids(self, batch: int, kv_indptr: Any, kv_indices: Any, block_table: Any) -> tuple[ArrayView | None, ArrayView]:
        backend, capacity = self._backend, self.capacity
        given = {"kv_indptr": kv_indptr, "kv_indices": kv_indices, "block_table": block_table}
        wanted = ("block_table",) if capacity.block_table else ("kv_indptr", "kv_indices")
        if any((array is not None) != (name in wanted) for name, array in given.items()):
            got = ", ".join(name for name, array in given.items() if array is not None) or "none of them"
            raise InvalidArgumentError(
                f"given: {got}; the plan was made with block_table={capacity.block_table} and takes "
                f"{' and '.join(wanted)}."
            )
        if not capacity.block_table:
            ids = vector(backend.view, "kv_indices", kv_indices, (capacity.id_dtype,))
            indptr = vector(backend.view, "kv_indptr", kv_indptr, ("int32", "int64"), batch + 1)
            if capacity.copy_ids and ids.shape[0] > capacity.max_ids:
                raise ShapeError(
                    f"kv_indices has {ids.shape[0]} ids; the plan was made for {capacity.max_ids} at most."
                )
            return indptr, ids
        table = backend.view("block_table", block_table)
        if table.ndim != 2 or table.shape[0] != batch or table.dtype != capacity.id_dtype:
            raise ShapeError(
                f"block_table is {table.dtype} {table.shape}; it must be {capacity.id_dtype} with {batch} rows."
            )
        least = table.shape[1] if capacity.copy_ids else 0  # rows that overlap cannot be copied as a table
        if (table.shape[1] > 1 and table.strides[1] != 1) or (batch > 1 and table.strides[0] < least):
            raise ShapeError(
                f"block_table has strides {table.strides} over shape {table.shape}; its last axis must be contiguous, "
                f"and its rows at least {least} apart. Copy it."
            )
        return None, table

    def _table_stride(self, ids: ArrayView) -> int:
        if not self.capacity.block_table:
            return 0
        return self.capacity.table_width if self.capacity.copy_ids else ids.strides[0]

    def _take_ids(self, ids: ArrayView, is_table: bool, stream: Any) -> None:
        if not self.capacity.copy_ids:
            self._page_ids, self._ids_array = ids.ptr, ids.array
            return
        if 0 in ids.shape:
            return
        if not is_table:
            self._backend.copy(self._page_ids, ids, ids.shape[0] * ids.itemsize, 1, 0, stream)
            return
        width = self.capacity.table_width
        columns = min(ids.shape[1], width)
        self._backend.copy(self._page_ids, ids, columns * ids.itemsize, ids.shape[0], width * ids.itemsize, stream)

    def _take_mask(
        self,
        mask: TreeMask | MaskSource | None,
        qo_indptr: Any,
        q_len: int,
        batch: int,
        tail_lens: Any,
        stream: Any,
    ) -> None:
        capacity = self.capacity
        if not isinstance(mask, TreeMask | MaskSource):
            if capacity.mask == "tree" or mask is not None:
                given = repr(mask) if mask is None or isinstance(mask, str) else type(mask).__qualname__
                takes = "takes a TreeMask or a MaskSource" if capacity.mask == "tree" else "takes none"
                raise InvalidArgumentError(f"mask is {given}; a plan with mask={capacity.mask!r} {takes}.")
            return
        if capacity.mask != "tree":
            raise InvalidArgumentError(
                f"mask is a {type(mask).__qualname__} and the plan's is {capacity.mask!r}, fixed when it was made. "
                "Make a plan with mask='tree'."
            )
        if isinstance(mask, TreeMask):
            mask = MaskSource.from_packed(mask.words, tail_lens)
        ragged: dict[str, Any] = {"qo_indptr": qo_indptr}
        if qo_indptr is None:
            ragged = {"q_len": q_len, "batch": batch}
        packing = mask_pack.build(
            self._backend.view, mask, self._pieces["mask_words"], capacity.max_tokens, capacity.max_q_len, **ragged
        )
        touched = {name: view.array for name, view in packing.arrays.items()} | self._pieces
        self._backend.load(packing.launch, packing.params, stream)(stream, touched)

    def _validate(
        self, lens: ArrayView, indptr: ArrayView | None, q_len: int, kv_ptrs: ArrayView | None, ids: ArrayView
    ) -> None:
        capacity = self.capacity
        kv_lens = to_host(lens).astype(np.int64)
        q_lens = np.full(len(kv_lens), q_len, np.int64)
        if indptr is not None:
            bounds = to_host(indptr).astype(np.int64)
            q_lens = np.diff(bounds)
            if bounds[0] != 0 or (q_lens < 0).any() or bounds[-1] > capacity.max_tokens:
                raise InvalidArgumentError(
                    f"qo_indptr is {bounds.tolist()[:8]}...; it must begin with 0, never fall, and end at or below the "
                    f"plan's {capacity.max_tokens} query tokens."
                )
        for name, values, most in (("q_len", q_lens, capacity.max_q_len), ("kv_len", kv_lens, capacity.max_kv_len)):
            bad = np.flatnonzero((values < 0) | (values > most))
            if bad.size:
                raise InvalidArgumentError(
                    f"{name} of request {bad[0]} is {values[bad[0]]}; the plan was made for 0 .. {most}."
                )
        cached = np.maximum(kv_lens - q_lens, 0) if capacity.new_kv else kv_lens
        check_pages(ids, kv_ptrs, cached, capacity.page_size, None)

    def run(
        self,
        q: Any,
        kv_cache: Any,
        *,
        new_kv: Any = None,
        kv_scale: Any = 1.0,
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Attend the query tokens of the step that `update` planned; launches alone.

        Parameters
        ----------
        q, kv_cache, new_kv
            As in `mla_verify`. Rows of q behind the last request are padding: out 0, lse -inf.
        kv_scale : float, or array of one float32
            As in `mla_verify`. A CUDA graph keeps the number, or the address of the array.
        out, lse : array, optional
            As in `mla_verify`. Without them they are allocated, which is the one thing here that is more than a launch.
        stream : object, optional
            As in `mla_verify`.

        Returns
        -------
        out, lse : array

        Raises
        ------
        ShapeError
            An array does not fit the plan.
        InvalidArgumentError
            There was no `update`, or the last one failed.
        BusyError
            Another thread is in a call of this plan.
        LaunchError, ContextLostError
            As in `mla_verify`.
        """
        backend = self._backend
        first = q[0] if isinstance(q, tuple | list) and q else q
        with self._turn, backend.scope():
            self._check_rows(first)
            stream = backend.stream(stream, first)
            makes_out, makes_lse, export = out is None, lse is None, None
            if makes_out or makes_lse:
                new_out, new_lse, export = backend.results(q, (*first.shape[:-1], DL), self.capacity.out_dtype, stream)
                out, lse = (new_out if makes_out else out), (new_lse if makes_lse else lse)
            scale, scale_array = self._scale(kv_scale)
            given = {
                "q": q,
                "kv_cache": kv_cache,
                "new_kv": new_kv,
                "kv_scale": scale_array,
                "out": out,
                "lse": lse,
            }
            signature = Signature(given, (), backend.locate)
            known = self._known.get(signature.key)
            if known is None:
                known = self._bind(q, kv_cache, new_kv, kv_scale, out, lse)
                self._known.put(signature.key, known)
            self._enqueue(known, signature.addresses, given, scale, stream)
            if export is not None:
                out, lse = (export(out) if makes_out else out), (export(lse) if makes_lse else lse)
        return out, lse

    def _scale(self, kv_scale: Any) -> tuple[float, Any]:
        """Return the number that the cache is scaled by, 1 where an array holds it, and that array."""
        value, array = (kv_scale, None) if is_number(kv_scale) else (1.0, kv_scale)
        if array is None and (kv_scale is None or value != 1):
            kv_scale_view(self._backend.view, kv_scale, self.capacity.kv_dtype)
        return value, array

    def _enqueue(
        self, known: Reusable, addresses: Mapping[str, Any], given: Mapping[str, Any], scale: float, stream: Any
    ) -> None:
        """Launch what is ready for arrays like these, at the addresses of these."""
        known.point(addresses, {"page_ids": self._page_ids})
        if self.capacity.kv_dtype == "float8_e4m3":
            known.params["kv_scale_value"] = scale
        touched: Mapping[str, Any] = self._touched(given) if self._backend.keeps_track else {}
        for launch in known.launches:
            launch(stream, touched)

    def _check_rows(self, q: Any) -> None:
        """Refuse a q that has fewer query tokens than the last update planned, where the host knows their number."""
        if not self._is_updated:
            raise InvalidArgumentError("run() has nothing to do: call update() first, again if the last one failed.")
        shape = getattr(q, "shape", None)
        if shape is None:
            self._backend.view("q", q)  # says what it is
            raise ShapeError("q has no shape; it must be an array, or a pair of two.")
        if self._uniform is None:
            return
        batch, q_len = self._uniform
        fits = shape[0] >= batch and shape[1] == q_len if len(shape) == 4 else shape[0] >= batch * q_len
        if batch * q_len and not fits:
            raise ShapeError(
                f"q has shape {tuple(shape)}, and update() planned {batch} requests of {q_len} query tokens. Give "
                "q_len or qo_indptr to update()."
            )

    def _touched(self, given: Mapping[str, Any]) -> dict[str, Any]:
        arrays: dict[str, Any] = {}
        for name, array in given.items():
            pieces = array if isinstance(array, tuple | list) else (array,)
            arrays |= {f"{name}[{i}]" if len(pieces) > 1 else name: piece for i, piece in enumerate(pieces)}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        return arrays | self._pieces | {"page_ids": self._ids_array}

    def _bind(self, q: Any, kv_cache: Any, new_kv: Any, kv_scale: Any, out: Any, lse: Any) -> Reusable:
        """Check arrays of a layout that is new, and make their launches ready."""
        capacity, stand_ins = self.capacity, self._pieces["stand_ins"]
        q_shape = (q[0] if isinstance(q, tuple | list) else q).shape
        uniform = len(q_shape) == 4
        batch = min(q_shape[0], capacity.max_batch) if uniform else capacity.max_batch
        num_tokens = int(np.prod(q_shape[: 2 if uniform else 1], dtype=np.int64))
        mask: Any = capacity.mask
        if capacity.mask == "tree":
            if num_tokens > capacity.max_tokens:
                raise ShapeError(
                    f"q has {num_tokens} query tokens; the plan was made for {capacity.max_tokens} at most."
                )
            mask = TreeMask(self._pieces["mask_words"][:num_tokens], capacity.max_q_len)
        # The kernels follow the schedule: of what update() was given, only the shapes matter here.
        problem = Problem.from_arrays(
            self._backend.view,
            q,
            kv_cache,
            sm_scale=capacity.sm_scale,
            kv_lens=stand_ins[:batch],
            qo_indptr=None if uniform else stand_ins[: batch + 1],
            kv_indptr=stand_ins[: batch + 1],
            kv_indices=stand_ins,
            page_size=capacity.page_size,
            mask=mask,
            new_kv=new_kv,
            kv_dtype=capacity.kv_dtype if capacity.kv_dtype in FP8_CODES else None,
            kv_scale=kv_scale,
            logit_cap=capacity.logit_cap,
            lse_base=capacity.lse_base,
            out_dtype=capacity.out_dtype,
            max_q_len=capacity.max_q_len,
        )
        self._check_problem(problem)
        views = output_views(self._backend.view, problem, out, lse)
        params = build_params(problem, Schedule(self.work.config, 1, (), ()), *views, {})
        fields = self._work_fields() | {"wide_ids": capacity.id_dtype == "int64"}
        if capacity.mask == "tree":
            fields["mask_words"] = self._pointers["mask_words"]
        for name, value in fields.items():
            params[name] = value
        launches = () if problem.is_empty else self._load(params)
        return Reusable.of(0, problem.out_shape, problem.out_dtype, problem.rope_offsets, (), params, launches)

    def _check_problem(self, problem: Problem) -> None:
        capacity = self.capacity
        if problem.dtype != capacity.dtype or problem.num_heads != capacity.num_heads:
            raise ShapeError(
                f"q is {problem.dtype} with {problem.num_heads} heads; the plan was made for {capacity.dtype} with "
                f"{capacity.num_heads}."
            )
        if problem.kv_dtype != capacity.kv_dtype:
            raise ShapeError(f"kv_cache is {problem.kv_dtype}; the plan was made for {capacity.kv_dtype}.")
        if (problem.new_kv is not None) != capacity.new_kv:
            raise InvalidArgumentError(
                f"new_kv is {'missing' if problem.new_kv is None else 'given'}; the plan was made with "
                f"new_kv={capacity.new_kv}."
            )
        if problem.is_split_kv and not capacity.split_kv:
            raise InvalidArgumentError(
                "the latent and the rope columns of kv_cache lie apart; make the plan with split_kv=True for that."
            )
        refusal = mma_refusal(problem)
        if refusal is not None and not problem.is_empty:
            raise UnsupportedError(f"a plan does not take these arrays: {refusal}. Call mla_verify.")


def plan_launch(work: Work) -> Launch:
    """Return the launch that makes the schedule.

    Parameters
    ----------
    work : Work
    """
    # It loads no element: whatever the types, one build will do.
    types = dtype_defines("bfloat16", "bfloat16", "bfloat16")
    defines = types | {"PLANNED_ROWS": work.config.rows}
    return Launch("plan", defines, (1, 1, 1), _PLAN_THREADS, _PLAN_SHARED)


def run_launches(capacity: Capacity, work: Work) -> tuple[Launch, Launch]:
    """Return the launches that follow the schedule: the kernel that reads the KV, and the merge of its parts.

    Parameters
    ----------
    capacity : Capacity
    work : Work
    """
    config = work.config
    planned, out_dtype = {"PLANNED_ROWS": config.rows}, capacity.out_dtype
    types = dtype_defines(capacity.dtype, out_dtype, out_dtype) | planned
    kv_types = dtype_defines(capacity.dtype, out_dtype, out_dtype, capacity.kv_dtype) | planned
    features = feature_defines(capacity.logit_cap, capacity.new_kv, capacity.split_kv)
    return (
        Launch(
            config.kernel,
            kv_types | config.defines() | features,
            (work.blocks, 1, 1),
            config.threads,
            config.shared_bytes(capacity.kv_dtype),
        ),
        Launch(
            "combine_planned",
            types,
            (work.blocks, _COMBINE_ROWS, 1),
            _COMBINE_THREADS,
            _COMBINE_SHARED,
            is_dependent=True,
        ),
    )


def work_fields(capacity: Capacity, work: Work) -> dict[str, int]:
    """Return what a plan fixes of the kernels' argument, addresses apart.

    Parameters
    ----------
    capacity : Capacity
    work : Work
    """
    return {
        "num_heads": capacity.num_heads,
        "mask_mode": MASK_CODES[capacity.mask],
        "num_splits": 1,
        "work_blocks": work.blocks,
        "work_row_tiles": work.row_tiles,
        "work_start_tiles": work.start_tiles,
        "work_least_tiles": _LEAST_TILES,
    }


def workspace_shapes(capacity: Capacity, work: Work) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and element type of each array of a plan's memory.

    Parameters
    ----------
    capacity : Capacity
    work : Work
    """
    spans = work.row_tiles * capacity.max_batch
    rows = 2 * work.blocks * work.config.rows
    ids = (capacity.max_batch, capacity.table_width) if capacity.block_table else (capacity.max_ids,)
    return {
        "work_items": ((work.blocks + spans, 12), "int32"),
        "work_merges": ((work.blocks + 1, 8), "int32"),
        "work_scratch": ((spans + 1 + work.blocks + 1 + -(-spans // 2),), "uint64"),
        "page_ids": (ids if capacity.copy_ids else (0,), capacity.id_dtype),
        "mask_words": ((capacity.max_tokens, capacity.mask_words), "uint32"),
        "partial_out": ((rows, DL), capacity.out_dtype),
        "partial_lse": ((rows,), "float32"),
        "stand_ins": ((capacity.max_batch + 1,), "int32"),
    }


def workspace_bytes(capacity: Capacity, work: Work) -> int:
    """Return the size of a plan's memory.

    Parameters
    ----------
    capacity : Capacity
    work : Work
    """
    return sum(_num_bytes(*piece) for piece in workspace_shapes(capacity, work).values())


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    size = int(np.prod(shape, dtype=np.int64)) * numpy_dtype(dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT
