"""The kernel `mask`: a tree mask of any format packed into words on the device, without a look at it from the host."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlaflash import jit
from mlaflash.checks import integer
from mlaflash.device import Device, current_ordinal, on_device
from mlaflash.errors import InvalidArgumentError, ShapeError, UnsupportedError
from mlaflash.interop import ArrayView, as_cupy, device_view, ordinal_of, require_apart
from mlaflash.mask_formats import words_per_row
from mlaflash.mask_source import MaskSource
from mlaflash.masks import TreeMask
from mlaflash.problem import View, vector
from mlaflash.schedule import Launch
from mlaflash.sharding import Contiguous, Sharding, check_rank
from mlaflash.streams import as_stream, memory_for

BLOCK: Final = 256
ROW_TILE: Final = 16
MAX_COLUMNS: Final = 1024
FORMAT_CODES: Final = {
    **{"dense": 0, "ragged": 1, "bits": 2, "parents": 3, "retrieve": 4, "words": 5, "items": 5},
    "causal": 6,
}

MASK_PARAMS_DTYPE: Final = np.dtype(
    [
        (name, np.uint64)
        for name in (
            *("source", "siblings", "qo_indptr", "lens", "mask_indptr", "words"),
            *("kv_lens", "begins", "shard_lens", "shard_tails"),
        )
    ]
    + [
        (name, np.int64)
        for name in (
            *("source_size", "source_stride_request", "source_stride_row", "sibling_stride_request"),
            "begin_stride_request",
        )
    ]
    + [
        (name, np.int32)
        for name in (
            *("source_rows", "source_columns", "item_bytes", "is_flat", "num_tokens", "batch", "q_len", "max_q"),
            *("words_per_row", "wide_lens", "wide_indptr", "is_big", "num_ranks", "rank", "interleave"),
        )
    ],
    align=True,
)
"""The kernel's one argument; `kernels/include/mask_params.cuh` declares the same structure."""

_INTEGERS = ("int32", "int64")
_BYTES = ("bool", "uint8", "int8")
_ITEMS = ("uint8", "int8", "uint16", "int16", "uint32", "int32")
_LENS = {"ragged": "prefix_lens", "bits": "kv_lens", "words": "tail_lens"}


@dataclass(frozen=True, slots=True)
class Packing:
    """A checked launch of the kernel `mask`.

    Attributes
    ----------
    launch : Launch
    params : numpy.ndarray, shape (1,), `MASK_PARAMS_DTYPE`
    arrays : mapping of str to ArrayView
        All that the kernel reads.
    words : ArrayView
        What it writes.
    is_sharded : bool
        Whether it writes lengths, too.
    """

    launch: Launch
    params: npt.NDArray[np.void]
    arrays: Mapping[str, ArrayView]
    words: ArrayView

    is_sharded: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is no word to write, and no length, and so nothing to launch."""
        return 0 in self.words.shape and not self.is_sharded


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Which tokens lie on this rank, for a mask whose columns are to be those of the rank's draft tokens.

    Attributes
    ----------
    sharding : Interleaved or Contiguous
    rank : int
    kv_lens : array, shape (B,), int32
        Tokens of each request on all ranks.
    shard_lens, tail_lens : array, shape (B,), int32
        Where the tokens of each request on this rank go, and how many of them, the last ones, are the draft's: the
        `kv_lens` and `tail_lens` of the local call.
    """

    sharding: Sharding
    rank: int
    kv_lens: Any
    shard_lens: Any
    tail_lens: Any


@dataclass(frozen=True, slots=True)
class _Requests:
    """Which rows are whose, as far as the host knows."""

    qo_indptr: ArrayView | None
    batch: int
    q_len: int | None

    @property
    def num_rows(self) -> int:
        """Query tokens that there are for certain."""
        return self.batch * (self.q_len or 0)


def defines(source_format: str, is_sharded: bool = False) -> dict[str, int]:
    """Return the kernel's constants.

    Parameters
    ----------
    source_format : str
        Of `FORMAT_CODES`.
    is_sharded : bool
        Whether the KV is spread over ranks.
    """
    return {"FORMAT": FORMAT_CODES[source_format]} | ({"SHARDED": 1} if is_sharded else {})


def shared_bytes(source_format: str) -> int:
    """Return the dynamic shared memory of a block: sums of its warps, parents, and links both ways.

    Parameters
    ----------
    source_format : str
        Of `FORMAT_CODES`.
    """
    sums, entries = BLOCK // 32 * 8, MAX_COLUMNS * 4
    return {"ragged": sums, "bits": sums, "parents": entries, "retrieve": 4 * entries}.get(source_format, 0)


def every_launch(is_sharded: bool = False) -> tuple[Launch, ...]:
    """Return a launch of each form that the kernel is compiled in, on one block.

    Parameters
    ----------
    is_sharded : bool
        Whether the KV is spread over ranks.
    """
    formats = {code: name for name, code in FORMAT_CODES.items() if is_sharded or name != "causal"}
    return tuple(
        Launch("mask", defines(name, is_sharded), (1, 1, 1), BLOCK, shared_bytes(name)) for name in formats.values()
    )


def build(
    view: View,
    source: MaskSource | None,
    words: Any,
    num_tokens: int,
    max_q: int,
    *,
    qo_indptr: Any = None,
    q_len: int | None = None,
    batch: int | None = None,
    shard: Shard | None = None,
) -> Packing:
    """Check the arrays of a mask, but for their values, and make the launch that packs it.

    Parameters
    ----------
    view : callable
        Turns an array into an `ArrayView` and refuses arrays of another library or device.
    source : MaskSource or None
        None, with a shard alone: every token sees itself and those before it.
    words : array, shape (T, ceil(max_q / 32)), uint32
        Where the words go. All of it is written: what is no bit of `source` becomes 0, and so do rows behind the last
        request.
    num_tokens : int
        T.
    max_q : int
        Columns, at most `MAX_COLUMNS`.
    qo_indptr : array, shape (B + 1,), int32, optional
        Where the query tokens of each request begin and end: from 0, rising, to T at most.
    q_len : int, optional
        Without `qo_indptr`: query tokens of every request; by default `max_q`.
    batch : int, optional
        Without `qo_indptr`: requests; by default as many as T holds.
    shard : Shard, optional
        The columns of the words are then the draft tokens that lie on one rank.

    Returns
    -------
    Packing

    Raises
    ------
    ShapeError
        Shape, strides, dtype or device of an array.
    InvalidArgumentError
        Numbers that do not go together.
    UnsupportedError
        More than `MAX_COLUMNS` columns.
    """
    num_tokens, max_q = integer("num_tokens", num_tokens, 0), integer("max_q", max_q, 0)
    if max_q > MAX_COLUMNS:
        raise UnsupportedError(
            f"max_q is {max_q}; the kernel mask packs at most {MAX_COLUMNS} columns. Convert the mask on the host, with"
            " a constructor of TreeMask."
        )
    out = view("words", words)
    if out.dtype != "uint32" or out.shape != (num_tokens, words_per_row(max_q)):
        raise ShapeError(
            f"words is {out.dtype} {out.shape}; for {num_tokens} tokens and max_q {max_q} it must be uint32"
            f" {(num_tokens, words_per_row(max_q))}."
        )
    _flat_size(out)
    if out.read_only:
        raise ShapeError(f"words is read-only ({out.read_only}); the bits are written to it. Give another array.")
    requests = _requests(view, num_tokens, max_q, qo_indptr, q_len, batch)
    fields: dict[str, Any] = {
        "words": out.ptr,
        "num_tokens": num_tokens,
        "batch": requests.batch,
        "q_len": requests.q_len or 0,
        "max_q": max_q,
        "words_per_row": out.shape[1],
    }
    arrays: dict[str, ArrayView] = {}
    if requests.qo_indptr is not None:
        arrays["qo_indptr"] = requests.qo_indptr
        fields["qo_indptr"] = requests.qo_indptr.ptr
    if source is not None:
        fields |= _source(view, source, requests, arrays)
    if shard is not None:
        fields |= _shard(view, shard, requests, arrays)
    params = np.zeros(1, MASK_PARAMS_DTYPE)
    for field, value in fields.items():
        params[field] = value
    rows = max_q if requests.q_len is None else requests.q_len
    source_format = "causal" if source is None else source.format
    launch = Launch(
        "mask",
        defines(source_format, shard is not None),
        (max(requests.batch, 1), max(-(-rows // ROW_TILE), 1), 1),
        BLOCK,
        shared_bytes(source_format),
    )
    return Packing(launch, params, arrays, out, shard is not None)


def _source(view: View, source: MaskSource, requests: _Requests, arrays: dict[str, ArrayView]) -> dict[str, Any]:
    """Check the arrays of a mask, and add them to `arrays`."""
    (name, array), *_ = source.arrays.items()
    data = arrays[name] = view(name, array)
    fields: dict[str, Any] = {"source": data.ptr, "item_bytes": data.itemsize, "is_big": source.is_big}
    for role, wide, role_name, length in (
        ("lens", "wide_lens", _LENS.get(source.format, ""), requests.batch),
        ("mask_indptr", "wide_indptr", "mask_indptr", requests.batch + 1),
    ):
        if role_name in source.arrays:
            found = vector(view, role_name, source.arrays[role_name], _INTEGERS, length)
            arrays[role_name] = found
            fields |= {role: found.ptr, wide: found.dtype == "int64"}
    if source.format == "dense":
        fields |= _dense(data, requests)
    elif source.format in ("ragged", "bits"):
        fields |= _ragged(data, requests, source)
    elif source.format == "words":
        fields |= _words(data, requests)
    elif source.format == "items":
        fields |= _items(data, requests)
    else:
        fields |= _links(data, requests)
        if source.format == "retrieve":
            siblings = view("next_sibling", source.arrays["next_sibling"])
            fields |= _siblings(data, siblings)
            arrays["next_sibling"] = siblings
    return fields


def _shard(view: View, shard: Shard, requests: _Requests, arrays: dict[str, ArrayView]) -> dict[str, Any]:
    """Check the arrays of a shard, and add them to `arrays`."""
    sharding, batch = shard.sharding, requests.batch
    fields: dict[str, Any] = {"rank": check_rank(sharding, shard.rank), "num_ranks": sharding.num_ranks}
    if "tail_lens" in arrays:
        raise InvalidArgumentError(
            "the MaskSource has tail_lens, and the KV is spread over ranks, where they follow from kv_lens. Leave them "
            "out: the columns of its mask are the draft tokens of each request."
        )
    for name, field in (("kv_lens", "kv_lens"), ("shard_lens", "shard_lens"), ("tail_lens", "shard_tails")):
        found = vector(view, name, getattr(shard, name), ("int32",), batch)
        if found.read_only and name != "kv_lens":
            raise ShapeError(f"{name} is read-only ({found.read_only}); lengths are written to it. Give another array.")
        # A mask of FlashInfer brings lengths of its own under the first name.
        arrays[f"shard {name}" if name in arrays else name] = found
        fields[field] = found.ptr
    if isinstance(sharding, Contiguous):
        begins = arrays["begins"] = view("begins", sharding.begins)
        if begins.ndim == 2 and begins.shape[0] != batch:
            raise ShapeError(f"begins has shape {begins.shape}; there are {batch} requests.")
        _check_last_axis(begins)
        fields |= {"begins": begins.ptr, "begin_stride_request": begins.strides[0] if begins.ndim == 2 else 0}
    else:
        fields["interleave"] = sharding.interleave
    return fields


def pack_mask(
    source: MaskSource,
    num_tokens: int,
    max_q: int,
    *,
    qo_indptr: Any = None,
    words: Any = None,
    stream: Any = None,
) -> TreeMask:
    """Pack a mask into words on the GPU; no value is read from the device.

    Parameters
    ----------
    source : MaskSource
        Of arrays on one GPU, of any library. They are read when the kernel runs, and again at each replay of a graph
        that holds it.
    num_tokens : int
        Rows of the result, T: the query tokens of the call that uses it, padding included.
    max_q : int
        Its columns, at most 1,024: the most draft tokens of a request.
    qo_indptr : array, shape (B + 1,), int32, optional
        Where the draft tokens of each request begin and end; rows behind the last one become 0. Without it, each has
        `max_q`.
    words : array, shape (T, ceil(max_q / 32)), uint32, optional
        Where the words go, all of which are written; new memory by default. Give it inside a CUDA graph.
    stream : stream or int, optional
        Where the work runs, as in `mlaflash.mla_verify`.

    Returns
    -------
    TreeMask
        Of a CuPy array, which is `words` where that was given. Its bits are there once the stream has come so far.

    Raises
    ------
    ShapeError
        Shape, strides, dtype or device of an array.
    InvalidArgumentError
        Numbers that do not go together.
    UnsupportedError
        More than 1,024 columns.
    CaptureError
        The first call for this format is being captured; make it once before.
    CompileError, CacheMissError, MissingDependencyError, NoDeviceError
        The kernel cannot be had here.
    """
    first = next(iter(source.arrays.values()))
    ordinal = ordinal_of(first)
    with on_device(current_ordinal() if ordinal is None else ordinal):
        here = current_ordinal()
        work_stream = as_stream(stream, first, here)
        is_given = words is not None
        if words is None:
            shape = integer("num_tokens", num_tokens, 0), words_per_row(integer("max_q", max_q, 0))
            memory = memory_for(first, work_stream, here, is_current=stream is None)
            with memory.scope:
                words = memory.empty(shape, "uint32")
        view = functools.partial(device_view, stream=work_stream)
        packing = build(view, source, words, num_tokens, max_q, qo_indptr=qo_indptr)
        if is_given:
            require_apart([packing.words], packing.arrays.values())
        if not packing.is_empty:
            step = packing.launch
            kernel = jit.load(step.kernel, step.defines, Device.current(), step.shared_bytes, stream=work_stream)
            kernel.launch(step.grid, step.block, packing.params, work_stream)
        return TreeMask(as_cupy(packing.words), max_q)


def _requests(
    view: View, num_tokens: int, max_q: int, qo_indptr: Any, q_len: int | None, batch: int | None
) -> _Requests:
    if qo_indptr is not None:
        if q_len is not None or batch is not None:
            raise InvalidArgumentError(
                f"qo_indptr was given with q_len {q_len} and batch {batch}; it says how many query tokens each request"
                " has, and how many requests there are. Leave them out."
            )
        indptr = vector(view, "qo_indptr", qo_indptr, ("int32",))
        if not indptr.shape[0]:
            raise ShapeError("qo_indptr has shape (0,); it must be (B + 1,).")
        return _Requests(indptr, indptr.shape[0] - 1, None)
    q_len = max_q if q_len is None else integer("q_len", q_len, 0)
    if q_len > max_q:
        raise InvalidArgumentError(f"q_len is {q_len} and max_q {max_q}; a column for each query token is needed.")
    if batch is None:
        if q_len and num_tokens % q_len:
            raise InvalidArgumentError(
                f"{num_tokens} tokens are no multiple of q_len {q_len}; pass qo_indptr to say where requests begin."
            )
        return _Requests(None, num_tokens // q_len if q_len else 0, q_len)
    if integer("batch", batch, 0) * q_len > num_tokens:
        raise InvalidArgumentError(f"{batch} requests of {q_len} query tokens are more than the {num_tokens} tokens.")
    return _Requests(None, int(batch), q_len)


def _dense(data: ArrayView, requests: _Requests) -> dict[str, Any]:
    _check_dtype(data, _BYTES)
    if data.shape[1] != data.shape[2]:
        raise ShapeError(f"{data.name} has shape {data.shape}; it must be (B, S, S).")
    return _table(data, requests) | {"source_stride_row": data.strides[1], "source_columns": data.shape[2]}


def _ragged(data: ArrayView, requests: _Requests, source: MaskSource) -> dict[str, Any]:
    is_bits = source.format == "bits"
    _check_dtype(data, ("uint8",) if is_bits else _BYTES)
    size = _flat_size(data)
    if not is_bits and "mask_indptr" not in source.arrays:
        # Prefixes come on top of it.
        _check_size(data, size, requests.num_rows * (requests.q_len or 0), "elements")
    return {"source_size": size}


def _words(data: ArrayView, requests: _Requests) -> dict[str, Any]:
    _check_dtype(data, ("uint32", "int32"))
    if data.ndim != 2:
        raise ShapeError(f"{data.name} has shape {data.shape}; it must be (T, W).")
    _flat_size(data)
    rows, columns = data.shape
    _check_size(data, rows, requests.num_rows, "rows")
    return {"source_rows": rows, "source_columns": columns, "source_stride_row": columns, "is_flat": 1}


def _items(data: ArrayView, requests: _Requests) -> dict[str, Any]:
    """Describe rows of one item each, of any width."""
    _check_dtype(data, _ITEMS)
    if requests.q_len is not None and requests.q_len > 8 * data.itemsize:
        raise ShapeError(
            f"{data.name} is {data.dtype}, which holds no row of {requests.q_len} draft tokens; SGLang packs up to 8"
            ' into uint8, 16 into uint16 and 32 into uint32. Use mode "qlen_only" for more.'
        )
    rows = _flat_size(data)
    _check_size(data, rows, requests.num_rows, "rows")
    return {"source_rows": rows, "source_columns": 1, "source_stride_row": 1, "is_flat": 1}


def _links(data: ArrayView, requests: _Requests) -> dict[str, Any]:
    """Describe parents, and links to first children."""
    _check_dtype(data, _INTEGERS)
    if data.name == "parents" and data.ndim == 1:
        size = _flat_size(data)
        _check_size(data, size, requests.num_rows, "elements")
        return {"source_rows": size, "source_stride_row": 1, "is_flat": 1}
    if data.ndim != 2:
        allowed = "(T,) or (B, S)" if data.name == "parents" else "(B, S)"
        raise ShapeError(f"{data.name} has shape {data.shape}; it must be {allowed}.")
    return _table(data, requests) | {"source_stride_row": 1}


def _siblings(data: ArrayView, siblings: ArrayView) -> dict[str, Any]:
    if siblings.shape != data.shape or siblings.dtype != data.dtype:
        raise ShapeError(
            f"{siblings.name} is {siblings.dtype} {siblings.shape} and {data.name} {data.dtype} {data.shape}; both must"
            " have one type and one shape."
        )
    _check_last_axis(siblings)
    return {"siblings": siblings.ptr, "sibling_stride_request": siblings.strides[0]}


def _table(data: ArrayView, requests: _Requests) -> dict[str, Any]:
    """Describe S rows for each request."""
    batch, num_rows = data.shape[:2]
    if requests.q_len != 0 and batch != requests.batch:
        raise ShapeError(f"{data.name} has shape {data.shape}, {batch} requests; there are {requests.batch}.")
    if requests.q_len is not None and requests.q_len > num_rows:
        raise ShapeError(f"{data.name} has shape {data.shape}; each request has {requests.q_len} query tokens.")
    _check_last_axis(data)
    return {"source_stride_request": data.strides[0], "source_rows": num_rows}


def _check_dtype(data: ArrayView, dtypes: tuple[str, ...]) -> None:
    if data.dtype not in dtypes:
        raise ShapeError(f"{data.name} is {data.dtype}; allowed: {', '.join(dtypes)}. Cast it.")


def _check_last_axis(data: ArrayView) -> None:
    if 0 in data.shape:
        return  # no stride is stepped along
    negative = any(stride < 0 for stride, length in zip(data.strides, data.shape, strict=True) if length > 1)
    if negative or (data.shape[-1] > 1 and data.strides[-1] != 1):
        raise ShapeError(
            f"{data.name} has strides {data.strides} (in elements); its last axis must be contiguous, and none may be"
            " negative. Copy it."
        )


def _flat_size(data: ArrayView) -> int:
    """Return the number of elements of an array that must lie in C order without gaps."""
    size = math.prod(data.shape)
    step = 1
    for stride, length in zip(reversed(data.strides), reversed(data.shape), strict=True):
        if size and length > 1 and stride != step:
            raise ShapeError(
                f"{data.name} has strides {data.strides} (in elements) over shape {data.shape}; it must be"
                " C-contiguous. Copy it."
            )
        step *= length
    return size


def _check_size(data: ArrayView, size: int, needed: int, unit: str) -> None:
    if size < needed:
        raise ShapeError(f"{data.name} has {size} {unit}; these requests need {needed}.")
