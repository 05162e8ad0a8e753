"""One verify call as checked sizes and array views: the border at which bad input is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from mlaflash.checks import choice, finite, integer, is_number
from mlaflash.errors import InvalidArgumentError, ShapeError, UnsupportedError
from mlaflash.interop import ArrayView, dtype_name, to_host
from mlaflash.masks import TreeMask
from mlaflash.params import DL, DR, DS_MLA_BYTES, DS_MLA_ROPE, DTYPE_CODES, FP8_CODES, MASK_CODES, D

View = Callable[[str, Any], ArrayView]

MAX_KV_LEN: Final = 2**31 - 256
"""Most tokens of a request: the kernels round lengths up to whole tiles in 32 bits."""

_IDS = ("int32", "int64")
_Q_SHAPES = (3, 4), "(T, H, 576) or (B, S, H, 576)"
_E4M3 = "float8_e4m3fn"
_BYTES = ("uint8", "void8")  # the second is how NumPy spells the 8-bit floats of others in an array interface
_MAX_LISTS = 65_535  # blocks along the last axes of a grid
_LEAST_CAP = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of 576 elements that lie in one array or in two.

    Attributes
    ----------
    latent, rope : ArrayView
        Of the 512 and of the 64 columns; for a fused array both are it.
    fused : bool
        Whether the rope columns follow the latent ones in the same array.
    shape : tuple of int
        Without the last axis.
    rope_offset : int
        Bytes from the first element of `rope` to the first rope column.
    """

    latent: ArrayView
    rope: ArrayView
    fused: bool
    shape: tuple[int, ...]
    rope_offset: int

    @property
    def dtype(self) -> str:
        """Element type of both."""
        return self.latent.dtype

    @property
    def latent_ptr(self) -> int:
        """Address of the first latent element."""
        return self.latent.ptr

    @property
    def rope_ptr(self) -> int:
        """Address of the first rope element."""
        return self.rope.ptr + self.rope_offset

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape with the last axis, of two arrays as if they were one."""
        return (*self.shape, self.latent.shape[-1] if self.fused else D)

    def is_contiguous(self) -> bool:
        """Whether the rope columns of every row follow its latent ones in memory, in one array or two views of one."""
        if self.fused:
            return True
        if self.rope_ptr != self.latent_ptr + DL * self.latent.itemsize:
            return False
        # An axis of length 1 is never stepped along.
        steps = zip(self.latent.strides[:-1], self.rope.strides[:-1], self.shape, strict=True)
        return all(latent == rope for latent, rope, length in steps if length > 1)

    def is_aligned(self) -> bool:
        """Whether every row starts on 16 bytes, as 128-bit loads need."""
        for view, ptr in ((self.latent, self.latent_ptr), (self.rope, self.rope_ptr)):
            # An axis of length 1 is never stepped along.
            steps = [s for s, n in zip(view.strides[:-1], view.shape[:-1], strict=True) if n > 1]
            if ptr % 16 or any(step * view.itemsize % 16 for step in steps):
                return False
        return True


@dataclass(frozen=True, slots=True)
class Problem:
    """A checked verify call, or a sparse one: then every query token is a request, and its page ids are slots.

    Attributes
    ----------
    q : Rows
        ``(T, H)`` or ``(B, S, H)`` rows of queries.
    kv : Rows
        Cache rows: ``(slots,)``, ``(pages, page_size)`` or ``(pages, page_size, 1)``.
    kv_dtype : str
        What they hold: q's element type, or a key of `mlaflash.params.FP8_CODES`.
    kv_scale : ArrayView or None
        Of one float32 on the device, which multiplies every number of a ``float8_e4m3`` cache.
    kv_scale_value : float
        In its place, where it is None.
    new_kv : Rows or None
        ``(T,)`` rows of q's element type.
    num_tokens, num_heads, batch, max_q_len : int
        T, H, B, and the largest number of query tokens that a request can have.
    num_pages, page_size, max_kv_len : int
        `max_kv_len` bounds every request's length without reading the device.
    page_strides, page_rope_strides : tuple of int
        Elements from page to page and from token to token, of the latent and of the rope columns.
    kv_lens : ArrayView or None
        None in a sparse call alone: every list has `max_kv_len` entries.
    is_sparse : bool
        Whether ids may be -1, for none.
    """

    q: Rows
    kv: Rows
    kv_dtype: str
    kv_scale: ArrayView | None
    kv_scale_value: float
    new_kv: Rows | None
    kv_lens: ArrayView | None
    kv_indptr: ArrayView | None
    page_ids: ArrayView | None
    block_table: bool
    qo_indptr: ArrayView | None
    tail_lens: ArrayView | None
    mask_mode: str
    mask_words: ArrayView | None
    mask_columns: int
    num_tokens: int
    num_heads: int
    batch: int
    max_q_len: int
    num_pages: int
    page_size: int
    max_kv_len: int
    page_strides: tuple[int, int]
    page_rope_strides: tuple[int, int]
    sm_scale: float
    logit_cap: float
    out_dtype: str
    lse_base: str
    is_sparse: bool = False

    @property
    def dtype(self) -> str:
        """Element type of q, and of KV that is not `is_fp8`."""
        return self.q.dtype

    @property
    def is_fp8(self) -> bool:
        """Whether the cache holds numbers of 8 bits."""
        return self.kv_dtype in FP8_CODES

    @property
    def rows(self) -> int:
        """Packed rows of the batch: query tokens times heads."""
        return self.num_tokens * self.num_heads

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of out; lse has all axes but the last."""
        return (*self.q.shape, DL)

    @property
    def inputs(self) -> list[ArrayView]:
        """Every array that a kernel may read."""
        found = [self.kv_lens, self.kv_indptr, self.page_ids, self.qo_indptr, self.tail_lens, self.mask_words]
        found.append(self.kv_scale)
        for rows in (self.q, self.kv, self.new_kv):
            if rows is not None:
                found += [rows.latent] if rows.fused else [rows.latent, rows.rope]
        return [view for view in found if view is not None]

    @property
    def rope_offsets(self) -> dict[str, int]:
        """Bytes from the latent to the rope columns of rows in one array, by the name of the argument."""
        rows = {"q": self.q, "kv_cache": self.kv, "new_kv": self.new_kv}
        return {name: given.rope_offset for name, given in rows.items() if given is not None}

    @property
    def is_split_kv(self) -> bool:
        """Whether a row of the cache lies in two places, latent and rope columns apart."""
        return not self.kv.is_contiguous()

    @property
    def is_dense(self) -> bool:
        """Whether page b is request b, so that the kernels need ids that say so."""
        return self.page_ids is None

    @property
    def is_empty(self) -> bool:
        """Whether there is no row to compute."""
        return self.rows == 0

    @property
    def is_aligned(self) -> bool:
        """Whether 128-bit loads are legal for every row of q and of the KV."""
        return all(rows.is_aligned() for rows in (self.q, self.kv, self.new_kv) if rows is not None)

    @classmethod
    def from_arrays(
        cls,
        view: View,
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
        mask: Any = "causal",
        tail_lens: Any = None,
        new_kv: Any = None,
        kv_dtype: Any = None,
        kv_scale: Any = 1.0,
        logit_cap: float = 0.0,
        out_dtype: Any = None,
        lse_base: Any = "e",
        max_q_len: int | None = None,
        max_kv_len: int | None = None,
    ) -> Problem:
        """Check the arguments of a verify call; nothing on a device is read.

        Parameters
        ----------
        view : callable
            Turns an array into an `ArrayView` and refuses arrays of another library or device.
        q, kv_cache, ...
            As in `mlaflash.mla_verify`.

        Returns
        -------
        Problem

        Raises
        ------
        ShapeError
            Rank, width, dtype or device of an array, or two arrays that disagree.
        InvalidArgumentError
            A value that is not allowed.
        UnsupportedError
            Widths other than 512 + 64, or element types that no kernel takes.
        """
        q_rows, kv_rows, kv_name = _q_and_kv(view, q, *_Q_SHAPES, kv_cache, kv_dtype)
        scale, scale_value = kv_scale_view(view, kv_scale, kv_name)
        lens = vector(view, "kv_lens", kv_lens, ("int32",))
        batch = lens.shape[0]
        num_tokens = math.prod(q_rows.shape[:-1])
        num_heads = q_rows.shape[-1]

        if max_q_len is not None:
            max_q_len = integer("max_q_len", max_q_len, 0)
        if page_size is not None:
            page_size = integer("page_size", page_size, 1)
        indptr, max_q = _query_lengths(view, q_rows, qo_indptr, batch, num_tokens, max_q_len)
        if len(q_rows.shape) == 3:
            q_rows = replace(q_rows, latent=one_token_axis(q_rows.latent), rope=one_token_axis(q_rows.rope))
        pages, size, strides, rope_strides = _pages(kv_rows, page_size)
        if batch == 1 and size == 1 and kv_indices is None and block_table is None:
            pages, size = 1, pages  # the slots of the only request, in order
        kv_ptrs, ids, is_table, ids_bound = _addressing(view, kv_indptr, kv_indices, block_table, batch, pages, size)
        new_rows = None
        if new_kv is not None:
            new_rows = _rows(view, "new_kv", new_kv, (2,), "(T, 576)")
            if new_rows.shape != (num_tokens,) or new_rows.dtype != q_rows.dtype:
                raise ShapeError(
                    f"new_kv has {new_rows.shape[0]} rows of {new_rows.dtype}; one {q_rows.dtype} row for each of "
                    f"the {num_tokens} query tokens is needed."
                )
        mode, words, columns = _mask(view, mask, num_tokens)
        if mode == "tree" and tail_lens is None and indptr is None and max_q > columns:
            raise InvalidArgumentError(
                f"mask has {columns} columns (max_q) and every request {max_q} query tokens; a column for each is "
                "needed. Make the mask wider, or give tail_lens."
            )
        if mode == "tree" and tail_lens is None:
            # A column for each query token of a request: the mask bounds ragged lengths, which lie on the device.
            max_q = min(max_q, columns)
        if new_rows is not None:
            ids_bound += max_q
        tails = None
        if tail_lens is not None:
            if mode != "tree":
                raise InvalidArgumentError(
                    f"tail_lens is given with mask={mask!r}; it says where the columns of a TreeMask lie. Leave it out."
                )
            tails = vector(view, "tail_lens", tail_lens, ("int32",), batch)
        return cls(
            q=q_rows,
            kv=kv_rows,
            kv_dtype=kv_name,
            kv_scale=scale,
            kv_scale_value=scale_value,
            new_kv=new_rows,
            kv_lens=lens,
            kv_indptr=kv_ptrs,
            page_ids=ids,
            block_table=is_table,
            qo_indptr=indptr,
            tail_lens=tails,
            mask_mode=mode,
            mask_words=words,
            mask_columns=columns,
            num_tokens=num_tokens,
            num_heads=num_heads,
            batch=batch,
            max_q_len=max_q,
            num_pages=pages,
            page_size=max(size, 1),  # pages of 0 tokens are legal where no token is read from the cache
            max_kv_len=_bound(max_kv_len, ids_bound),
            page_strides=strides,
            page_rope_strides=rope_strides,
            sm_scale=finite("sm_scale", sm_scale),
            logit_cap=soft_cap(logit_cap),
            out_dtype=_out_dtype(out_dtype, q_rows.dtype),
            lse_base=choice("lse_base", lse_base, ("e", "2")),
        )

    @classmethod
    def from_lists(
        cls,
        view: View,
        q: Any,
        kv_cache: Any,
        *,
        indices: Any,
        sm_scale: float,
        topk_lens: Any = None,
        kv_dtype: Any = None,
        kv_scale: Any = 1.0,
        logit_cap: float = 0.0,
        out_dtype: Any = None,
        lse_base: Any = "e",
    ) -> Problem:
        """Check the arguments of a sparse call; nothing on a device is read.

        Parameters
        ----------
        view : callable
            As in `from_arrays`.
        q, kv_cache, ...
            As in `mlaflash.mla_sparse`.

        Returns
        -------
        Problem

        Raises
        ------
        ShapeError, InvalidArgumentError, UnsupportedError
            As in `from_arrays`.
        """
        q_rows, kv_rows, kv_name = _q_and_kv(view, q, (3,), "(T, H, 576)", kv_cache, kv_dtype)
        scale, scale_value = kv_scale_view(view, kv_scale, kv_name)
        num_tokens, num_heads = q_rows.shape
        if num_tokens > _MAX_LISTS:
            raise UnsupportedError(
                f"q holds {num_tokens} query tokens; a sparse call takes at most {_MAX_LISTS}. Split it."
            )
        lists = _table(view, "indices", indices, num_tokens, "topk", "query token of q")
        num_slots, stride, rope_stride = _slots(kv_rows)
        lens = None if topk_lens is None else vector(view, "topk_lens", topk_lens, ("int32",), num_tokens)
        return cls(
            q=q_rows,
            kv=kv_rows,
            kv_dtype=kv_name,
            kv_scale=scale,
            kv_scale_value=scale_value,
            new_kv=None,
            kv_lens=lens,
            kv_indptr=None,
            page_ids=lists,
            block_table=True,
            qo_indptr=None,
            tail_lens=None,
            mask_mode="none",
            mask_words=None,
            mask_columns=0,
            num_tokens=num_tokens,
            num_heads=num_heads,
            batch=num_tokens,
            max_q_len=1,
            num_pages=num_slots,
            page_size=1,
            max_kv_len=lists.shape[1],
            page_strides=(stride, stride),
            page_rope_strides=(rope_stride, rope_stride),
            sm_scale=finite("sm_scale", sm_scale),
            logit_cap=soft_cap(logit_cap),
            out_dtype=_out_dtype(out_dtype, q_rows.dtype),
            lse_base=choice("lse_base", lse_base, ("e", "2")),
            is_sparse=True,
        )

    def validate(self) -> None:
        """Check what only the arrays' values tell: lengths, ids, offsets. Reads the device and synchronises.

        Raises
        ------
        InvalidArgumentError
            Naming the argument, the first bad request or entry, and what is allowed.
        """
        if self.kv_scale is not None:
            positive("kv_scale", float(to_host(self.kv_scale).reshape(())))
        if self.is_sparse:
            _validate_lists(self)
        else:
            _validate(self)


def _q_and_kv(
    view: View, q: Any, q_ranks: tuple[int, ...], q_shapes: str, kv_cache: Any, kv_dtype: Any
) -> tuple[Rows, Rows, str]:
    q_rows = _rows(view, "q", q, q_ranks, q_shapes)
    _check_dtype("q", q_rows)
    kv_rows, kv_name = _cache(_views(view, "kv_cache", kv_cache), kv_dtype)
    if kv_name in FP8_CODES:
        if q_rows.dtype == "float32":
            raise UnsupportedError(
                f"q is float32 and kv_cache {kv_name}; a cache of 8 bits takes q in bfloat16 or float16. Cast q."
            )
    elif kv_name != q_rows.dtype:
        raise ShapeError(
            f"kv_cache is {kv_name} and q is {q_rows.dtype}; both must have the same element type. Cast one."
        )
    if q_rows.shape[-1] < 1:
        raise ShapeError("q has 0 heads; at least 1 is needed.")
    return q_rows, kv_rows, kv_name


def _cache(views: list[ArrayView], kv_dtype: Any) -> tuple[Rows, str]:
    """Return the rows of a cache, and the name of what they hold."""
    ranks, shapes = (2, 3, 4), "(slots, 576) or (pages, page_size, 576)"
    given, width = views[0].dtype, views[0].shape[-1:]
    if given.startswith("float8_") and given != _E4M3:
        raise UnsupportedError(
            f"kv_cache is {given}; of the floats of 8 bits {_E4M3} alone is read, and rows of 'fp8_ds_mla'. Store the "
            "cache as one of those."
        )
    name = None if kv_dtype is None else kv_element_type("kv_dtype", kv_dtype)
    if name is None and given == _E4M3:
        name = "float8_e4m3"
    elif name is None and given in _BYTES:
        if len(views) > 1 or width != (DS_MLA_BYTES,):
            raise ShapeError(
                f"kv_cache is {given} {views[0].shape}, which does not say what its bytes are. Say "
                f"kv_dtype='float8_e4m3' for rows of {D} bytes; rows of {DS_MLA_BYTES} are 'fp8_ds_mla'."
            )
        name = "fp8_ds_mla"
    allowed = {"float8_e4m3": (*_BYTES, _E4M3), "fp8_ds_mla": _BYTES}.get(name or given, (name or given,))
    if given not in allowed:
        raise ShapeError(
            f"kv_cache is {given} and kv_dtype {name!r}, which comes in arrays of "
            f"{' or '.join(each for each in allowed if each != 'void8')}. View or cast it."
        )
    if name != "fp8_ds_mla":
        return _joined("kv_cache", views, ranks, shapes), name or given
    if len(views) > 1:
        raise ShapeError(
            f"kv_cache is a pair and kv_dtype 'fp8_ds_mla', whose scales lie between the two. Give the one array of "
            f"rows of {DS_MLA_BYTES} bytes."
        )
    _check_rows(views[0], DS_MLA_BYTES, ranks, shapes.replace(str(D), str(DS_MLA_BYTES)))
    return Rows(views[0], views[0], True, views[0].shape[:-1], DS_MLA_ROPE), name


def kv_scale_view(view: View, kv_scale: Any, kv_dtype: str) -> tuple[ArrayView | None, float]:
    """Check the scale of a cache.

    Parameters
    ----------
    view : callable
        As in `Problem.from_arrays`.
    kv_scale : float or array
    kv_dtype : str
        What the cache holds.

    Returns
    -------
    array : ArrayView or None
        None for a number.
    value : float
        The number; 1 for an array.

    Raises
    ------
    ShapeError, InvalidArgumentError
        It is not one positive number, or the cache has no such scale.
    """
    if kv_dtype != "float8_e4m3" and not (is_number(kv_scale) and kv_scale == 1):
        raise InvalidArgumentError(
            f"kv_scale is given and kv_cache is {kv_dtype}; it is the scale of a 'float8_e4m3' cache alone. Leave it "
            "out."
        )
    if is_number(kv_scale) or kv_scale is None or isinstance(kv_scale, str | bytes):
        return None, positive("kv_scale", kv_scale)
    array = view("kv_scale", kv_scale)
    if array.dtype != "float32" or math.prod(array.shape) != 1:
        raise ShapeError(f"kv_scale is {array.dtype} {array.shape}; it must be a number, or one float32. Cast it.")
    return array, 1.0


def positive(name: str, value: Any) -> float:
    """Return a scale: finite and greater than 0.

    Parameters
    ----------
    name : str
    value : float

    Raises
    ------
    InvalidArgumentError
        It is something else.
    """
    number = finite(name, value)
    if number <= 0:
        raise InvalidArgumentError(f"{name} is {number}; it must be greater than 0.")
    return number


def query_rows(view: View, q: Any) -> Rows:
    """Check q, and give it one axis of tokens.

    Parameters
    ----------
    view : callable
        As in `Problem.from_arrays`.
    q : array, shape (T, H, 576) or (B, S, H, 576), or pair

    Returns
    -------
    Rows, shape (T, H)

    Raises
    ------
    ShapeError
        Rank, shape, strides, dtype or device; or (B, S) are no run of tokens in memory.
    """
    rows = _rows(view, "q", q, *_Q_SHAPES)
    _check_dtype("q", rows)
    if len(rows.shape) == 2:
        return rows
    shape = (math.prod(rows.shape[:2]), rows.shape[2])
    latent, rope = (
        array._replace(shape=(*shape, array.shape[-1]), strides=one_token_axis(array).strides[1:])
        for array in (rows.latent, rows.rope)
    )
    return replace(rows, latent=latent, rope=rope, shape=shape)


def _rows(view: View, name: str, array: Any, ranks: tuple[int, ...], shapes: str) -> Rows:
    return _joined(name, _views(view, name, array), ranks, shapes)


def _views(view: View, name: str, array: Any) -> list[ArrayView]:
    if not isinstance(array, tuple | list):
        return [view(name, array)]
    if len(array) != 2:
        raise ShapeError(
            f"{name} is a {type(array).__name__} of {len(array)} arrays; give one array of width {D}, or two of "
            f"widths {DL} and {DR}."
        )
    return [view(f"{name}[{place}]", part) for place, part in enumerate(array)]


def _joined(name: str, views: list[ArrayView], ranks: tuple[int, ...], shapes: str) -> Rows:
    if len(views) == 1:
        (fused,) = views
        _check_rows(fused, D, ranks, shapes)
        return Rows(fused, fused, True, fused.shape[:-1], DL * fused.itemsize)
    latent, rope = views
    _check_rows(latent, DL, ranks, shapes)
    _check_rows(rope, DR, ranks, shapes)
    if latent.shape[:-1] != rope.shape[:-1] or latent.dtype != rope.dtype:
        raise ShapeError(
            f"{name}[0] is {latent.dtype} {latent.shape} and {name}[1] is {rope.dtype} {rope.shape}; all axes but the "
            "last and the element type must agree."
        )
    return Rows(latent, rope, False, latent.shape[:-1], 0)


def _check_rows(array: ArrayView, width: int, ranks: tuple[int, ...], shapes: str) -> None:
    if array.ndim not in ranks:
        raise ShapeError(f"{array.name} has shape {array.shape}, of rank {array.ndim}; allowed is {shapes}.")
    if array.shape[-1] != width:
        raise ShapeError(
            f"{array.name} has shape {array.shape}, {array.shape[-1]} wide; its last axis must be {width}: only MLA "
            f"rows of {DL} latent + {DR} rope columns are supported."
        )
    if array.strides[-1] != 1 and 0 not in array.shape:
        raise ShapeError(
            f"{array.name} has strides {array.strides} (in elements); its last axis must be contiguous. Copy it."
        )
    negative = any(s < 0 for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    if negative:
        raise ShapeError(f"{array.name} has strides {array.strides} (in elements); none may be negative. Copy it.")


def _check_dtype(name: str, rows: Rows) -> None:
    if rows.dtype not in DTYPE_CODES:
        raise ShapeError(f"{name} is {rows.dtype}; allowed are {', '.join(DTYPE_CODES)}. Cast it.")


def vector(view: View, name: str, array: Any, dtypes: tuple[str, ...], length: int | None = None) -> ArrayView:
    """View a contiguous array of one axis.

    Parameters
    ----------
    view : callable
        As in `Problem.from_arrays`.
    name : str
    array : array
    dtypes : tuple of str
        Allowed element types.
    length : int, optional
        Where it must have one.

    Raises
    ------
    ShapeError
        Rank, length, dtype or strides.
    """
    found = view(name, array)
    if found.ndim != 1 or (length is not None and found.shape[0] != length):
        wanted = "one axis" if length is None else f"shape ({length},)"
        raise ShapeError(f"{name} has shape {found.shape}; it must have {wanted}.")
    if found.dtype not in dtypes:
        raise ShapeError(f"{name} is {found.dtype}; allowed: {' or '.join(dtypes)}. Cast it.")
    if found.shape[0] > 1 and found.strides[0] != 1:
        raise ShapeError(f"{name} is not contiguous; copy it.")
    return found


def _query_lengths(
    view: View, q: Rows, qo_indptr: Any, batch: int, num_tokens: int, max_q_len: int | None
) -> tuple[ArrayView | None, int]:
    if len(q.shape) == 3:
        if qo_indptr is not None:
            raise ShapeError(
                f"q has shape {(*q.shape, D)}, the same q_len for every request, and qo_indptr is given too; ragged q "
                "is (T, H, 576). Leave qo_indptr out, or flatten q."
            )
        if q.shape[0] != batch:
            raise ShapeError(f"q holds {q.shape[0]} requests and kv_lens {batch}; they must agree.")
        return None, q.shape[1]
    if qo_indptr is None:
        if num_tokens % batch if batch else num_tokens:
            raise ShapeError(
                f"q holds {num_tokens} query tokens and kv_lens {batch} requests; without qo_indptr each request has "
                "the same number. Give qo_indptr for ragged ones."
            )
        return None, num_tokens // max(batch, 1)
    indptr = vector(view, "qo_indptr", qo_indptr, ("int32",), batch + 1)
    return indptr, num_tokens if max_q_len is None else min(max_q_len, num_tokens)


def one_token_axis(array: ArrayView) -> ArrayView:
    """Give the second axis of (B, S, ...) the stride from token to token, which is the only one that kernels know.

    Parameters
    ----------
    array : ArrayView
        Its first two axes count requests and their tokens.

    Returns
    -------
    ArrayView
        With the stride between requests where S is 1.

    Raises
    ------
    ShapeError
        The tokens of all requests are not one run in memory.
    """
    (batch, q_len), (over_requests, over_tokens) = array.shape[:2], array.strides[:2]
    if q_len == 1:
        return array._replace(strides=(over_requests, over_requests, *array.strides[2:]))
    if batch > 1 and q_len > 0 and over_requests != q_len * over_tokens:
        raise ShapeError(
            f"{array.name} has strides {array.strides} (in elements) over shape {array.shape}; its first two axes "
            "must be one run of tokens in memory. Copy it, or pass flat tokens with qo_indptr."
        )
    return array


def _pages(kv: Rows, page_size: int | None) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    if len(kv.shape) == 3 and kv.shape[2] != 1:
        raise ShapeError(
            f"kv_cache has shape {kv.full_shape}; a fourth axis counts KV heads, of which MLA has 1: (pages, "
            f"page_size, 1, {kv.full_shape[-1]})."
        )
    if len(kv.shape) == 1 or (kv.shape[1] == 1 and page_size is not None):
        size = 1 if page_size is None else page_size
        if kv.shape[0] % size:
            raise ShapeError(
                f"kv_cache holds {kv.shape[0]} slots and page_size is {size}; slots must be a multiple of it."
            )
        steps = tuple((size * array.strides[0], array.strides[0]) for array in (kv.latent, kv.rope))
        return kv.shape[0] // size, size, steps[0], steps[1]
    if page_size is not None and page_size != kv.shape[1]:
        raise ShapeError(
            f"page_size is {page_size} and kv_cache has shape {kv.full_shape}, pages of {kv.shape[1]} tokens; they "
            "must agree."
        )
    steps = tuple((array.strides[0], array.strides[1]) for array in (kv.latent, kv.rope))
    return kv.shape[0], kv.shape[1], steps[0], steps[1]


def _slots(kv: Rows) -> tuple[int, int, int]:
    """Return the slots of a cache, and the elements from one to the next, of the latent and of the rope columns."""
    pages, size, *strides = _pages(kv, None)
    steps = []
    for array, (over_pages, over_tokens) in zip((kv.latent, kv.rope), strides, strict=True):
        if pages > 1 and size > 1 and over_pages != size * over_tokens:
            raise ShapeError(
                f"{array.name} has strides {array.strides} (in elements) over shape {array.shape}; a slot id counts "
                "the tokens of all pages, which must be one run in memory. Copy it."
            )
        steps.append(over_tokens if size > 1 else over_pages)
    return pages * size, steps[0], steps[1]


def _table(view: View, name: str, array: Any, rows: int, columns: str, row_for: str) -> ArrayView:
    table = view(name, array)
    if table.ndim != 2 or table.shape[0] != rows:
        raise ShapeError(f"{name} has shape {table.shape}; it must be ({rows}, {columns}): one row for each {row_for}.")
    if table.dtype not in _IDS:
        raise ShapeError(f"{name} is {table.dtype}; allowed: {' or '.join(_IDS)}. Cast it.")
    if table.shape[0] and table.shape[1] > 1 and table.strides[1] != 1:
        raise ShapeError(f"the rows of {name} are not contiguous; copy it.")
    if table.shape[0] > 1 and table.strides[0] < 0:
        raise ShapeError(f"{name} has strides {table.strides} (in elements); none may be negative. Copy it.")
    return table


def _addressing(
    view: View,
    kv_indptr: Any,
    kv_indices: Any,
    block_table: Any,
    batch: int,
    num_pages: int,
    page_size: int,
) -> tuple[ArrayView | None, ArrayView | None, bool, int]:
    """Return kv_indptr, page ids, whether they are a table, and the longest request they can address."""
    if block_table is not None:
        if kv_indptr is not None or kv_indices is not None:
            raise InvalidArgumentError(
                "block_table and kv_indptr/kv_indices are both given; allowed is one of the two ways to name pages."
            )
        table = _table(view, "block_table", block_table, batch, "max_pages", "request of kv_lens")
        return None, table, True, table.shape[1] * page_size
    if (kv_indptr is None) != (kv_indices is None):
        given, missing = ("kv_indptr", "kv_indices") if kv_indices is None else ("kv_indices", "kv_indptr")
        raise InvalidArgumentError(f"{given} is given without {missing}; the two belong together.")
    if kv_indptr is not None:
        ids = vector(view, "kv_indices", kv_indices, _IDS)
        indptr = vector(view, "kv_indptr", kv_indptr, _IDS, batch + 1)
        return indptr, ids, False, ids.shape[0] * page_size
    if num_pages < batch:
        raise ShapeError(
            f"kv_cache holds {num_pages} pages for {batch} requests and neither kv_indptr/kv_indices nor block_table "
            f"is given; page b is then request b. Give a table, or a kv_cache of shape ({batch}, max_kv, 576)."
        )
    return None, None, False, page_size


def _mask(view: View, mask: Any, num_tokens: int) -> tuple[str, ArrayView | None, int]:
    if isinstance(mask, TreeMask):
        words = view("mask", mask.words)
        if mask.num_tokens != num_tokens:
            raise ShapeError(
                f"mask has {mask.num_tokens} rows and q has {num_tokens} query tokens; one row for each token is "
                "needed, shared by all heads."
            )
        return "tree", words, mask.max_q
    if isinstance(mask, str) and mask in MASK_CODES and mask != "tree":
        return mask, None, 0
    # Not the array itself: it may be large.
    given = (
        repr(mask) if mask is None or isinstance(mask, str) else f"a {type(mask).__module__}.{type(mask).__qualname__}"
    )
    raise InvalidArgumentError(
        f"mask is {given}; allowed are 'causal', 'none' and a TreeMask (TreeMask.from_dense takes a list of boolean "
        "matrices). None is refused: say mask='none' to see all."
    )


def soft_cap(value: Any) -> float:
    """Check a soft-cap of scores.

    Parameters
    ----------
    value : float
        0 for none.

    Raises
    ------
    InvalidArgumentError
        It is negative, not finite, or too small to divide by.
    """
    number = finite("logit_cap", value)
    if number != 0 and number < _LEAST_CAP:
        raise InvalidArgumentError(
            f"logit_cap is {number}; it must be at least {_LEAST_CAP:.3g}, or 0 for no soft-cap."
        )
    return number


def _bound(max_kv_len: int | None, ids_bound: int) -> int:
    bound = min(ids_bound, MAX_KV_LEN)
    return bound if max_kv_len is None else min(integer("max_kv_len", max_kv_len, 0), bound)


def _out_dtype(value: Any, q_dtype: str) -> str:
    return q_dtype if value is None else element_type("out_dtype", value)


def element_type(name: str, value: Any) -> str:
    """Return the name of an element type of rows.

    Parameters
    ----------
    name : str
        What the caller calls it.
    value : str or dtype

    Raises
    ------
    UnsupportedError
        No kernel takes it.
    """
    found = value if isinstance(value, str) else dtype_name(value)
    if found not in DTYPE_CODES:
        raise UnsupportedError(f"{name} is {value!r}; allowed are {', '.join(DTYPE_CODES)}.")
    return found


def kv_element_type(name: str, value: Any) -> str:
    """Return the name of what a cache holds.

    Parameters
    ----------
    name : str
        What the caller calls it.
    value : str or dtype
        A dtype of e4m3fn is ``float8_e4m3``.

    Raises
    ------
    UnsupportedError
        No kernel reads it.
    """
    found = value if isinstance(value, str) else dtype_name(value)
    allowed = (*DTYPE_CODES, *FP8_CODES)
    # The type of that name that others have is not e4m3fn: it has infinities.
    if found == _E4M3 or (found in allowed and (isinstance(value, str) or found not in FP8_CODES)):
        return "float8_e4m3" if found == _E4M3 else found
    raise UnsupportedError(f"{name} is {value!r}; allowed are {', '.join(allowed)}, where float8_e4m3 is {_E4M3}.")


def _first(bad: np.ndarray[Any, Any]) -> int:
    return int(np.flatnonzero(bad)[0])


def _host_lens(problem: Problem) -> np.ndarray[Any, Any]:
    if problem.kv_lens is None:
        return np.full(problem.batch, problem.max_kv_len, np.int64)
    return to_host(problem.kv_lens).astype(np.int64)


def _validate_lists(problem: Problem) -> None:
    lens, topk = _host_lens(problem), problem.max_kv_len
    bad = (lens < 0) | (lens > topk)
    if bad.any():
        token = _first(bad)
        raise InvalidArgumentError(
            f"topk_lens[{token}] is {lens[token]}; allowed is 0 .. {topk}, the entries of a row of indices."
        )
    if problem.page_ids is None:
        return
    ids = to_host(problem.page_ids)
    wrong = ((ids < -1) | (ids >= problem.num_pages)) & (np.arange(topk) < lens[:, None])
    if wrong.any():
        token, entry = np.argwhere(wrong)[0]
        raise InvalidArgumentError(
            f"indices[{token}, {entry}] is {ids[token, entry]}; kv_cache holds slots 0 .. {problem.num_pages - 1}, and "
            "-1 is none."
        )


def _validate(problem: Problem) -> None:
    kv_lens = _host_lens(problem)
    if problem.qo_indptr is None:
        q_lens = np.full(problem.batch, problem.max_q_len, np.int64)
    else:
        indptr = to_host(problem.qo_indptr).astype(np.int64)
        q_lens = np.diff(indptr)
        if indptr[0] != 0 or (q_lens < 0).any() or indptr[-1] > problem.num_tokens:
            raise InvalidArgumentError(
                f"qo_indptr is {indptr.tolist()[:8]}...; it must begin with 0, never fall, and end at or below the "
                f"{problem.num_tokens} query tokens."
            )
    _validate_mask(problem, q_lens)
    if (q_lens > problem.max_q_len).any():
        worst = int(q_lens.argmax())
        raise InvalidArgumentError(
            f"max_q_len is {problem.max_q_len} and request {worst} has {q_lens[worst]} query tokens; no request may "
            "have more."
        )
    bad = (kv_lens < 0) | (kv_lens > problem.max_kv_len)
    if bad.any():
        request = _first(bad)
        raise InvalidArgumentError(
            f"kv_lens[{request}] is {kv_lens[request]}; allowed is 0 .. {problem.max_kv_len} (max_kv_len, or what the "
            "page table can address)."
        )
    _validate_pages(problem, kv_lens, q_lens)


def _validate_mask(problem: Problem, q_lens: np.ndarray[Any, Any]) -> None:
    if problem.mask_mode != "tree":
        return
    tails, name = q_lens, "request"
    if problem.tail_lens is not None:
        tails, name = to_host(problem.tail_lens).astype(np.int64), "tail_lens"
    bad = (tails < 0) | (tails > problem.mask_columns)
    if bad.any():
        request = _first(bad)
        raise InvalidArgumentError(
            f"{name} {request} needs {tails[request]} mask columns and the TreeMask has {problem.mask_columns} "
            "(max_q); make the mask wider."
        )


def _validate_pages(problem: Problem, kv_lens: np.ndarray[Any, Any], q_lens: np.ndarray[Any, Any]) -> None:
    cached = np.maximum(kv_lens - q_lens, 0) if problem.new_kv is not None else kv_lens
    if problem.page_ids is None:
        long = cached > problem.page_size
        if long.any():
            request = _first(long)
            raise InvalidArgumentError(
                f"kv_lens[{request}] leaves {cached[request]} tokens to the cache, whose page {request} holds "
                f"{problem.page_size}."
            )
        return
    check_pages(problem.page_ids, problem.kv_indptr, cached, problem.page_size, problem.num_pages)


def check_pages(
    page_ids: ArrayView,
    kv_indptr: ArrayView | None,
    kv_lens: np.ndarray[Any, Any],
    page_size: int,
    num_pages: int | None,
) -> None:
    """Check the values of a page table; reads the device.

    Parameters
    ----------
    page_ids : ArrayView
        ``kv_indices``, or a block table.
    kv_indptr : ArrayView or None
        None: `page_ids` is a block table.
    kv_lens : numpy.ndarray, shape (B,)
        Tokens of each request that lie in the cache.
    page_size : int
    num_pages : int or None
        Pages of the cache, where they are known.

    Raises
    ------
    InvalidArgumentError
        Naming the first bad request or entry, and what is allowed.
    """
    needed = -(-kv_lens // page_size)
    ids = to_host(page_ids)
    if kv_indptr is None:
        begins = np.arange(len(kv_lens), dtype=np.int64) * ids.shape[1]
        available = np.full(len(kv_lens), ids.shape[1], np.int64)
        ids = ids.reshape(-1)
    else:
        indptr = to_host(kv_indptr).astype(np.int64)
        begins, available = indptr[:-1], np.diff(indptr)
        if indptr[0] < 0 or (available < 0).any() or indptr[-1] > ids.shape[0]:
            raise InvalidArgumentError(
                f"kv_indptr is {indptr.tolist()[:8]}...; it must begin at 0 or more, never fall, and end at or below "
                f"the {ids.shape[0]} kv_indices."
            )
    bad = needed > available
    if bad.any():
        request = _first(bad)
        raise InvalidArgumentError(
            f"kv_lens[{request}] leaves {kv_lens[request]} tokens to the cache, {needed[request]} pages of {page_size} "
            f"tokens; the page table names {available[request]} for it."
        )
    for request in range(len(kv_lens)):
        used = ids[begins[request] : begins[request] + needed[request]]
        wrong = used < 0 if num_pages is None else (used < 0) | (used >= num_pages)
        if wrong.any():
            entry = _first(wrong)
            raise InvalidArgumentError(
                f"page {entry} of request {request} has id {used[entry]}; "
                + ("none is negative." if num_pages is None else f"kv_cache holds pages 0 .. {num_pages - 1}.")
            )
