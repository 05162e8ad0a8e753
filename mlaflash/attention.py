"""The verify call on arrays of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mlaflash import jit, reuse
from mlaflash.checks import flag, is_number
from mlaflash.device import Device, apply_budget, current_ordinal, on_device, padded_shared_bytes
from mlaflash.errors import ShapeError
from mlaflash.interop import ArrayView, device_view, ordinal_of, require_apart
from mlaflash.jit.launch import PreparedLaunch
from mlaflash.masks import TreeMask
from mlaflash.problem import Problem, View, one_token_axis
from mlaflash.schedule import Schedule, build_params, plan
from mlaflash.streams import as_stream, memory_for
from mlaflash.tiles import KernelConfig


def mla_verify(
    q: Any,
    kv_cache: Any,
    *,
    sm_scale: float,
    kv_lens: Any,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    block_table: Any = None,
    page_size: int | None = None,
    qo_indptr: Any = None,
    mask: str | TreeMask = "causal",
    tail_lens: Any = None,
    new_kv: Any = None,
    kv_dtype: Any = None,
    kv_scale: Any = 1.0,
    logit_cap: float = 0.0,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    lse_base: str = "e",
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    kernel: str | None = None,
    tiles: KernelConfig | None = None,
    deterministic: bool = False,
    budget: str | None = None,
    validate: bool = False,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Attend the draft tokens of each request to its paged MLA cache.

    Row ``(t, h)`` of `q` scores ``sm_scale * (q . row)`` over the cache rows that its token sees; `out` is their first
    512 columns weighted by the softmax of the scores (absorbed MLA: DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Arrays may be CuPy's, torch's or JAX's, or have ``__dlpack__`` or ``__cuda_array_interface__``; all of a call lie on
    one GPU, which need not be the current one. They are used where they lie: nothing is copied, and neither an event
    nor a synchronisation is put in.

    Parameters
    ----------
    q : array, shape (T, H, 576) or (B, S, H, 576), float32, bfloat16 or float16
        Absorbed queries: 512 latent columns, then 64 rope columns; or the pair ``(q_nope, q_pe)`` of widths 512 and 64.
        Any strides, last axis contiguous; the second form has S query tokens for every request, all of them one run in
        memory: its first stride is S times its second.
    kv_cache : array, q's dtype, or 8 bits
        ``(slots, 576)``, ``(slots, 1, 576)``, ``(pages, page_size, 576)`` or ``(pages, page_size, 1, 576)``; or the
        pair ``(kv_c, k_pe)`` of widths 512 and 64. Rows of ``"fp8_ds_mla"`` are 656 wide, in one array.
    sm_scale : float
        Multiplies ``q . row``; any value finite in float32 (scores beyond its range are not). There is no default:
        0.14468 for Kimi K2.x, 0.13523 for DeepSeek-V3 (see `yarn_sm_scale`).
    kv_lens : array, shape (B,), int32
        Tokens of each request, its new ones included. 0, and lengths below its number of query tokens, are legal: rows
        that see nothing are empty.
    kv_indptr : array, shape (B + 1,), int32 or int64, optional
        Where the pages of each request begin and end in `kv_indices`.
    kv_indices : array, int32 or int64, optional
        Page ids; slot ids at page size 1.
    block_table : array, shape (B, max_pages), int32 or int64, optional
        Page ids as a table, in place of the two above. With neither, page b is request b.
    page_size : int, optional
        Tokens of a page where the shape of `kv_cache` does not say; 1 by default.
    qo_indptr : array, shape (B + 1,), int32, optional
        Where the query tokens of each request begin and end. Tokens behind the last one are padding: out 0, lse -inf.
        Without it every request has T / B.
    mask : {"causal", "none"} or TreeMask
        Among the last q_len tokens; everything before them is visible. ``"causal"`` is aligned to the bottom right.
    tail_lens : array, shape (B,), int32, optional
        With a TreeMask: to how many last tokens its columns belong; by default q_len.
    new_kv : array, q's dtype, shape (T, 576), or pair, optional
        The last q_len tokens of each request, read from here in place of the cache; ids then cover the prefix alone.
    kv_dtype : {"float8_e4m3", "fp8_ds_mla"}, optional
        What the bytes of a uint8 `kv_cache` are: numbers of e4m3fn, or vLLM's rows of 656 bytes, which hold 512 such
        numbers, a float32 scale for each 128 of them, and 64 bfloat16 rope values. By default what the array says: its
        element type, or its width of 656.
    kv_scale : float, or array of one float32 on the GPU
        Multiplies every number of a ``"float8_e4m3"`` cache, and none of `new_kv`; greater than 0. An array is read
        when the kernels run, so that replays of a CUDA graph follow it.
    logit_cap : float
        ``logit_cap * tanh(score / logit_cap)`` before the mask; 0 for none.
    out : array, shape (T, H, 512) or (B, S, H, 512), optional
        Filled in place; any strides, last axis contiguous. No JAX array, and no tensor that requires grad. It shares no
        memory with another array of the call, which is looked at in the first call of a layout, and with `validate`. By
        default new memory, of the library of `q`.
    lse : array, shape (T, H) or (B, S, H), float32, optional
        As `out`.
    out_dtype : str or dtype, optional
        Of `out`; by default q's, or that of `out`.
    lse_base : {"e", "2"}
        Base of `lse`: the natural logarithm, or that in base 2, which some engines merge.
    max_q_len : int, optional
        Largest number of query tokens of a request; tightens the grid for ragged q. By default a TreeMask without
        `tail_lens` gives it by its columns, else it is T.
    max_kv_len : int, optional
        Longest request; by default what the page table can address. No length is read from the device.
    kernel : {"naive", "tile", "mma_narrow", "mma_wide", "mma_roles"}, optional
        By default (or ``"auto"``) chosen: a tensor-core kernel where q is 16-bit, every row starts on 16 bytes, strides
        are below 2**31 elements and a TreeMask has at most 1,024 columns; else `tile`. Caches of 8 bits are read by
        `mma_narrow` and, ``"float8_e4m3"``, by `mma_roles` alone, on sm_89 and newer.
    tiles : KernelConfig, optional
        Constants of the kernel, such as `TileConfig`.
    deterministic : bool
        A row of `out` and `lse` then depends on its own q and on the tokens that it sees, and on nothing else: it has
        the same bits alone, in a batch, in a verify call and in a decode call of one token, with other heads beside it,
        in pages of any size, from `new_kv` or from the cache, and whatever bounds the lengths (see Notes).
    budget : str, optional
        Architecture whose shared memory a block may have, and whose number of blocks an SM holds, such as ``"sm_120"``,
        where these are lower than the GPU's.
    validate : bool
        Also check what only the device knows: lengths, ids, offsets. Reads them back, and so synchronises.
    stream : stream or int, optional
        Where the work runs: a stream of CuPy or torch, an object with ``__cuda_stream__``, or the handle of a
        ``cudaStream_t``. By default torch's current stream where `q` is a tensor, else CuPy's. It may be captured.

    Returns
    -------
    out : array, q's dtype or `out_dtype`
        ``(T, H, 512)`` or ``(B, S, H, 512)``.
    lse : array, float32
        ``(T, H)`` or ``(B, S, H)``: logarithm, natural or as `lse_base` says, of the sum of the exponentials of the
        scores; -inf for an empty row.

    Raises
    ------
    ShapeError
        Rank, width, dtype or device of an array.
    InvalidArgumentError
        A value that is not allowed.
    UnsupportedError, TileError
        Something that no kernel, or not on this device, does.
    CompileError, CaptureError, MissingDependencyError, NoDeviceError
        The kernels cannot be had here.
    LaunchError, ContextLostError
        The driver refused; after the second, all that this process asks of it.

    Notes
    -----
    In a CUDA graph: call once before the capture, which compiles and loads the kernels. What lies between the kernels
    is allocated by the library of `q`. torch keeps it as long as the graph; CuPy's pool does not know of graphs and
    may hand it out again, so replay on the stream of the capture, and call no ``free_all_blocks``.

    JAX computes on streams of its own. The launch's stream waits for JAX arrays on the GPU, and JAX for the results,
    by events of its own; so they cannot be captured. Keep the inputs until the results are there.

    ``deterministic=True`` takes one kernel with the same constants for whatever rows: `mma_narrow` for 16-bit q, whose
    rows must start on 16 bytes, `tile` for float32; another `kernel`, other `tiles` and caches of 8 bits are refused.
    The KV is cut into chunks of 256 tokens, counted from the first one, and these are merged in a fixed order. The
    promise holds for finite values, for one element type of q and of `out`, on GPUs of one architecture, for one
    version of mlaflash and of NVRTC. Rows that see the same tokens at other positions may differ. Between the two
    kernels lie ``T * H * max_kv_len / 256`` partial results of 512 elements, and 524,288 tokens are the most: give
    `max_kv_len` where the page table can hold more than a request has.
    """
    arrays = {
        "q": q,
        "kv_cache": kv_cache,
        "kv_lens": kv_lens,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "block_table": block_table,
        "qo_indptr": qo_indptr,
        "tail_lens": tail_lens,
        "new_kv": new_kv,
    }
    results = {"out": out, "lse": lse}
    options = {
        "sm_scale": sm_scale,
        "page_size": page_size,
        "logit_cap": logit_cap,
        "out_dtype": out_dtype,
        "lse_base": lse_base,
        "max_q_len": max_q_len,
        "max_kv_len": max_kv_len,
        "kernel": kernel,
        "tiles": tiles,
        "deterministic": deterministic,
        "budget": budget,
    }
    # On the host it is an option, on the device an array like the others.
    arrays["kv_scale"], options["kv_scale"] = (None, kv_scale) if is_number(kv_scale) else (kv_scale, None)
    options["kv_dtype"] = kv_dtype
    words, mask_key = (mask.words, mask.max_q) if isinstance(mask, TreeMask) else (None, mask)
    signature = reuse.Signature({**arrays, **results, "words": words}, (mask_key, *options.values()))
    arguments = {**arrays, **results, **options, "mask": mask, "kv_scale": kv_scale}
    return call_or_repeat(signature, arguments, validate=validate, stream=stream)


def call_or_repeat(
    signature: reuse.Signature,
    arguments: dict[str, Any],
    *,
    validate: bool,
    stream: Any,
    read: Callable[..., Problem] = Problem.from_arrays,
) -> tuple[Any, Any]:
    """Make a call, from what an equal one before it left where there was one.

    Parameters
    ----------
    signature : Signature
        Of the arguments.
    arguments : dict of str to Any
        Those of `prepare`; q, out and lse among them.
    validate, stream, read
        As in `prepare`.

    Returns
    -------
    out, lse : array
        As in `mla_verify`.

    Raises
    ------
    MlaFlashError
        As in `mla_verify`.
    """
    known = reuse.recall(signature) if validate is False else None
    if known is not None:
        return _launch_again(known, signature, arguments["q"], arguments["out"], arguments["lse"], stream)
    call = prepare(**arguments, validate=validate, stream=stream, read=read)
    call.launch()
    if not call.workspaces.keys() & _CALLERS and call.exports == (None, None):
        problem = call.problem
        reuse.remember(
            signature,
            reuse.Reusable.of(
                call.ordinal,
                problem.out_shape,
                problem.out_dtype,
                problem.rope_offsets,
                call.schedule.workspaces if call.launches else (),
                call.params,
                call.launches,
            ),
        )
    return call.results()


# A workspace under the name of an argument stands in for an array that was not given.
_CALLERS = frozenset({"page_ids"})


def _launch_again(
    known: reuse.Reusable, signature: reuse.Signature, q: Any, out: Any, lse: Any, stream: Any
) -> tuple[Any, Any]:
    """Make the call that an equal one before prepared: new memory, new addresses, the same launches."""
    first = q[0] if isinstance(q, tuple | list) else q
    with on_device(known.ordinal):
        work_stream = as_stream(stream, first, known.ordinal)
        memory = memory_for(first, work_stream, known.ordinal, is_current=stream is None)
        addresses = signature.addresses
        with memory.scope:
            if out is None:
                out = memory.empty(known.out_shape, known.out_dtype)
                addresses["out"] = memory.address(out)
            if lse is None:
                lse = memory.empty(known.out_shape[:-1], "float32")
                addresses["lse"] = memory.address(lse)
            workspaces = {w.name: memory.empty(w.shape, w.dtype) for w in known.workspaces}
        known.point(addresses, {name: memory.address(array) for name, array in workspaces.items()})
        for launch in known.launches:
            launch.launch(work_stream.ptr)
    return out, lse


Export = Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class Call:
    """A verify call whose arrays are checked, whose memory is there and whose kernels are loaded.

    Attributes
    ----------
    problem : Problem
    schedule : Schedule
    ordinal : int
        CUDA's number of the GPU.
    out, lse : array
        Where the results go.
    launches : tuple of PreparedLaunch
        In order; empty where there is nothing to compute.
    params : numpy.ndarray
        The kernels' argument.
    workspaces : dict
        Device memory between the kernels.
    stream : cupy.cuda.Stream
    exports : tuple
        For `out` and `lse`: what makes an array of q's library of it, or None.
    """

    problem: Problem
    schedule: Schedule
    ordinal: int
    out: Any
    lse: Any
    launches: tuple[PreparedLaunch, ...]
    params: np.ndarray[Any, Any]
    workspaces: dict[str, Any]
    stream: Any
    exports: tuple[Export, Export]

    def launch(self) -> None:
        """Enqueue the kernels, on the arrays as they are now; may be repeated."""
        with on_device(self.ordinal):
            for launch in self.launches:
                launch.launch(self.stream.ptr)

    def results(self) -> tuple[Any, Any]:
        """Give out and lse, once launched, as arrays of the library that they are wanted in."""
        if self.exports == (None, None):
            return self.out, self.lse
        with on_device(self.ordinal), self.stream:
            out, lse = (
                array if export is None else export(array)
                for array, export in zip((self.out, self.lse), self.exports, strict=True)
            )
        return out, lse


def prepare(
    q: Any,
    kv_cache: Any,
    *,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    tiles: KernelConfig | None = None,
    deterministic: bool = False,
    budget: str | None = None,
    validate: bool = False,
    stream: Any = None,
    read: Callable[..., Problem] = Problem.from_arrays,
    **arguments: Any,
) -> Call:
    """Do everything of a verify call, or of a sparse one, but the launches.

    Parameters
    ----------
    q, kv_cache, ...
        As in `mla_verify`, or in `mla_sparse`.
    read : callable
        What makes a problem of the arguments: `Problem.from_lists` for a sparse call.

    Returns
    -------
    Call

    Raises
    ------
    MlaFlashError
        As in `mla_verify`.
    """
    validate = flag("validate", validate)
    first = q[0] if isinstance(q, tuple | list) and q else q
    current = current_ordinal()
    ordinal = ordinal_of(first)
    if ordinal is None:
        ordinal = current
    with on_device(ordinal):
        work_stream = as_stream(stream, first, ordinal)
        view = partial(device_view, ordinal=ordinal, stream=work_stream)
        if out_dtype is None and out is not None:
            out_dtype = view("out", out).dtype
        problem = read(view, q, kv_cache, out_dtype=out_dtype, **arguments)
        if validate:
            with work_stream:
                problem.validate()
        device = Device.current(ordinal)
        limits = device if budget is None else apply_budget(device, budget)
        schedule = plan(problem, limits, kernel=kernel, tiles=tiles, deterministic=deterministic)
        launches = () if problem.is_empty else schedule.launches
        memory = memory_for(first, work_stream, ordinal, is_current=stream is None)
        exports = (None if out is not None else memory.export, None if lse is not None else memory.export)
        with memory.scope:
            if out is None:
                out = memory.empty(problem.out_shape, problem.out_dtype)
            if lse is None:
                lse = memory.empty(problem.out_shape[:-1], "float32")
            workspaces = {w.name: memory.empty(w.shape, w.dtype) for w in schedule.workspaces if launches}
            if problem.is_dense and launches:
                workspaces["page_ids"] = memory.arange(problem.batch)
        views = output_views(view, problem, out, lse)
        pointers = {name: memory.address(array) for name, array in workspaces.items()}
        params = build_params(problem, schedule, *views, pointers)
        prepared = tuple(
            PreparedLaunch(
                jit.load(
                    step.kernel,
                    step.defines,
                    device,
                    padded_shared_bytes(step.shared_bytes, device, limits),
                    stream=work_stream,
                ),
                step.grid,
                step.block,
                params,
                is_dependent=step.is_dependent,
            )
            for step in launches
        )
    return Call(problem, schedule, ordinal, out, lse, prepared, params, workspaces, work_stream, exports)


def output_views(view: View, problem: Problem, out: Any, lse: Any) -> tuple[ArrayView, ArrayView]:
    """Check the arrays that the results go to.

    Parameters
    ----------
    view : callable
        As in `Problem.from_arrays`.
    problem : Problem
    out, lse : array
        The caller's or fresh ones.

    Raises
    ------
    ShapeError
        Shape, dtype or strides do not fit the problem, or an array must not be written, or shares memory with another.
    """
    out_view, lse_view = view("out", out), view("lse", lse)
    for array, shape, dtype in (
        (out_view, problem.out_shape, problem.out_dtype),
        (lse_view, problem.out_shape[:-1], "float32"),
    ):
        if array.shape != shape or array.dtype != dtype:
            raise ShapeError(f"{array.name} is {array.dtype} {array.shape}; it must be {dtype} {shape}.")
        if array.read_only:
            raise ShapeError(
                f"{array.name} is read-only ({array.read_only}); the result is written to it. Give an array that can "
                "be written."
            )
    if problem.is_empty:
        return out_view, lse_view
    require_apart((out_view, lse_view), problem.inputs)
    if len(problem.out_shape) == 4:
        out_view, lse_view = one_token_axis(out_view), one_token_axis(lse_view)
    if out_view.strides[-1] != 1:
        raise ShapeError(
            f"out has strides {out_view.strides} (in elements); its last axis must be contiguous. Give a copy."
        )
    steps = [s for s, n in zip(out_view.strides[:-1], out_view.shape[:-1], strict=True) if n > 1]
    if out_view.ptr % 16 or any(step * out_view.itemsize % 16 for step in steps):
        raise ShapeError(
            f"out begins at address {out_view.ptr:#x} and has strides {out_view.strides} (in elements of "
            f"{out_view.itemsize} bytes); every row must start on 16 bytes. Give a copy."
        )
    return out_view, lse_view
