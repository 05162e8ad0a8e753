"""The kernel `move`: rows of all layers to other slots, whatever overlaps."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mlaflash import jit
from mlaflash.checks import flag, integer
from mlaflash.device import Device, current_ordinal, on_device
from mlaflash.errors import InvalidArgumentError, ShapeError, UnsupportedError
from mlaflash.interop import ArrayView, device_view, ordinal_of, to_host
from mlaflash.problem import View, vector
from mlaflash.schedule import Launch
from mlaflash.streams import as_stream, memory_for

BLOCK: Final = 256
MAX_LAYERS: Final = 256
WORDS: Final = (16, 4, 1)
WAYS: Final = {"staged": 0, "direct": 1, "gather": 2, "scatter": 3}
# Several blocks of the first share a multiprocessor; the second fits every GPU's.
MOST_STAGE_BYTES: Final = 98_304
_STAGE_BYTES = (32_768, MOST_STAGE_BYTES)
_SECTOR_BYTES = 32
_SCRATCH_SLICE_BYTES = 128  # a line: less of a row at a time would waste what memory reads
_MAX_SCRATCH_BYTES = 1 << 28
_DIRECT_CHUNK = 32  # rows of a block: two rounds of its eight warps
_MAX_INT = 2**31 - 1

MOVE_PARAMS_DTYPE: Final = np.dtype(
    [(name, np.uint64) for name in ("src", "dst", "n", "scratch")]
    + [(name, np.int64) for name in ("num_rows", "row_stride")]
    + [
        (name, np.int32)
        for name in (
            *("first_move", "num_moves", "chunk", "num_layers", "row_words"),
            *("slice_words", "wide_src", "wide_dst", "wide_n"),
        )
    ]
    + [("layers", np.uint64, (MAX_LAYERS,))],
    align=True,
)
"""The kernel's one argument; `kernels/include/move_params.cuh` declares the same structure."""

_INTEGERS = ("int32", "int64")


class Moves(NamedTuple):
    """Rows to move, as if all were read before any is written: the arguments of `move_rows` behind the layers.

    Attributes
    ----------
    src, dst : array, shape (N,), int32 or int64
        Slots; entries with -1, or with src = dst, move nothing.
    n : array, shape (1,), int32 or int64, or None
        How many entries of the list count, read on the device; None is all.
    group : int or None
        Length of the groups that the list is made of, the last of which may be shorter: no move writes a slot that a
        move of *another* group reads or writes. 1 says that no slot is both read and written. None is one group:
        whatever overlaps.
    """

    src: Any
    dst: Any
    n: Any = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """Layers that keep a token's row in the same slot.

    Attributes
    ----------
    layers : tuple of ArrayView
    num_rows : int
        Slots of a layer.
    row_bytes, row_stride : int
        Bytes of a row, and from one to the next.
    word : int
        Bytes that are moved at once: the most of `WORDS` that divide row, stride and addresses.
    """

    layers: tuple[ArrayView, ...]
    num_rows: int
    row_bytes: int
    row_stride: int
    word: int

    @classmethod
    def from_arrays(cls, view: View, kv_layers: Sequence[Any]) -> Pool:
        """Check arrays and find their rows.

        Parameters
        ----------
        view : callable
            Turns an array into an `ArrayView` and refuses arrays of another library or device.
        kv_layers : sequence of array
            As in `move_rows`.

        Raises
        ------
        ShapeError
            Shape, strides or device of an array, or two that do not go together.
        UnsupportedError
            More than `MAX_LAYERS`.
        """
        # A single array would pass for a sequence of its rows.
        if hasattr(kv_layers, "shape") or not isinstance(kv_layers, Sequence) or not kv_layers:
            is_empty = isinstance(kv_layers, Sequence) and not kv_layers
            given = "one array" if hasattr(kv_layers, "shape") else "empty" if is_empty else f"{kv_layers!r:.80}"
            raise ShapeError(f"kv_layers is {given}; it must be a list with an array for each layer.")
        if len(kv_layers) > MAX_LAYERS:
            raise UnsupportedError(
                f"kv_layers has {len(kv_layers)} arrays; at most {MAX_LAYERS} are moved in one launch. Make two calls."
            )
        layers = tuple([view(f"kv_layers[{i}]", layer) for i, layer in enumerate(kv_layers)])
        rows = [_rows_of(layer) for layer in layers]
        for layer, found in zip(layers, rows, strict=True):
            if found != rows[0]:
                raise ShapeError(
                    f"{layer.name} has {found[0]} rows of {found[1]} bytes, {found[2]} apart, and kv_layers[0]"
                    f" {rows[0][0]} of {rows[0][1]}, {rows[0][2]} apart; all must be alike. Move it in another call."
                )
            if layer.read_only:
                raise ShapeError(f"{layer.name} is read-only ({layer.read_only}); its rows are moved in place.")
        addresses = [layer.ptr for layer in layers]
        num_rows, row_bytes, row_stride = rows[0]
        if num_rows and len(set(addresses)) < len(addresses):
            raise ShapeError("kv_layers has the same array twice; each layer's rows are moved once. Leave one out.")
        if num_rows and _overlap(sorted(addresses), num_rows, row_bytes, row_stride):
            raise ShapeError("arrays of kv_layers share memory; each layer has rows of its own. Leave one out.")
        aligned = math.gcd(row_bytes, row_stride, *addresses)
        return cls(layers, num_rows, row_bytes, row_stride, next(word for word in WORDS if aligned % word == 0))


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the work on a list is cut into launches and tasks; see `kernels/move.cu`.

    Attributes
    ----------
    way : {"staged", "direct", "scratch"}
        The last stands for pairs of launches, ``"gather"`` and ``"scatter"``.
    slice_words : int
        Words of a row that a task moves; of ``"scratch"``, that a pair of launches moves at least.
    chunk : int
        Moves of a task; of ``"scratch"``, of a group.
    stage_bytes : int
        What a task keeps in shared memory; of ``"scratch"``, the least that a pair of launches keeps there.
    """

    way: str
    slice_words: int
    chunk: int
    stage_bytes: int


def choose_geometry(pool: Pool, num_moves: int, group: int) -> Geometry:
    """Cut the work so that a group's moves are staged together.

    Parameters
    ----------
    pool : Pool
    num_moves : int
        Entries of the list, at least 1.
    group : int
        At most `num_moves`.
    """
    word, row_words = pool.word, pool.row_bytes // pool.word
    if group == 1:
        return Geometry("direct", row_words, _DIRECT_CHUNK, 0)
    slot = max(word, 4)
    least = min(row_words, _SECTOR_BYTES // word)
    for room in _STAGE_BYTES:
        words = min(room // (slot * group), row_words)
        if words >= least:
            # As few slices as fit, of like width, cut at sectors.
            widest = words if words == row_words else words // least * least
            even = _ceil_div(row_words, _ceil_div(row_words, widest))
            slice_words = min(_ceil_div(even, least) * least, row_words)
            chunk = min(room // (slot * slice_words * group), _ceil_div(num_moves, group)) * group
            return Geometry("staged", slice_words, chunk, _ceil_div(chunk * slice_words * slot, 16) * 16)
    slice_words = min(row_words, _SCRATCH_SLICE_BYTES // word)
    return Geometry("scratch", slice_words, group, _ceil_div(group * slice_words * word, 16) * 16)


@dataclass(frozen=True, slots=True)
class Portion:
    """What one launch, or one pair of them, moves.

    Attributes
    ----------
    moves, layers, words : range
        Of the list, of the layers, and of a row.
    """

    moves: range
    layers: range
    words: range


def cut_for_scratch(pool: Pool, num_moves: int, cut: Geometry, room: int) -> Iterator[Portion]:
    """Cut the work into portions whose rows fit scratch.

    Parameters
    ----------
    pool : Pool
    num_moves : int
    cut : Geometry
        Of ``"scratch"``.
    room : int
        Bytes of scratch, at least `cut.stage_bytes`.
    """
    row_words, group, num_layers = pool.row_bytes // pool.word, cut.chunk, len(pool.layers)
    moves = min(max(room // (cut.slice_words * pool.word * group), 1) * group, _ceil_div(num_moves, group) * group)
    slices = min(max(room // (cut.slice_words * pool.word * moves), 1), _ceil_div(row_words, cut.slice_words))
    words = min(slices * cut.slice_words, row_words)
    layers = max(room // (words * pool.word * moves), 1) if words == row_words else 1
    for first_move in range(0, num_moves, moves):
        for first_layer in range(0, num_layers, layers):
            for first_word in range(0, row_words, words):
                yield Portion(
                    range(first_move, min(first_move + moves, num_moves)),
                    range(first_layer, min(first_layer + layers, num_layers)),
                    range(first_word, min(first_word + words, row_words)),
                )


@dataclass(frozen=True, slots=True)
class Step:
    """A launch of the kernel `move`.

    Attributes
    ----------
    launch : Launch
    params : numpy.ndarray, shape (1,), `MOVE_PARAMS_DTYPE`
    """

    launch: Launch
    params: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Move:
    """Checked launches of the kernel `move`, in order.

    Attributes
    ----------
    steps : tuple of Step
    arrays : mapping of str to ArrayView
        All that the kernel reads or writes.
    """

    steps: tuple[Step, ...]
    arrays: Mapping[str, ArrayView]


def defines(word: int, way: str) -> dict[str, int]:
    """Return the kernel's constants.

    Parameters
    ----------
    word : int
        Of `WORDS`.
    way : str
        Of `WAYS`.
    """
    return {"WORD": word, "WAY": WAYS[way]}


def every_launch() -> tuple[Launch, ...]:
    """Return a launch of each form that the kernel is compiled in, on one block with all that it may stage."""
    return tuple(
        Launch("move", defines(word, way), (1, 1, 1), BLOCK, MOST_STAGE_BYTES if way == "staged" else 0)
        for word in WORDS
        for way in WAYS
    )


def build(
    view: View,
    pool: Pool,
    moves: Moves,
    scratch: Any,
    new_scratch: Callable[[int], Any],
    *,
    validate: bool,
) -> Move | None:
    """Check a list, and make the launch that moves its rows.

    Parameters
    ----------
    view : callable
        As in `Pool.from_arrays`.
    pool : Pool
    moves : Moves
    scratch : array or None
        As in `move_rows`.
    new_scratch : callable
        Allocates so many bytes of it.
    validate : bool
        Also look at the slots.

    Returns
    -------
    Move or None
        None where there is nothing to do.

    Raises
    ------
    ShapeError
        Shape, strides, dtype or device of an array.
    InvalidArgumentError
        `group` or `scratch` is too small; with `validate`, what `move_rows` says.
    UnsupportedError
        More words than 32 bits count.
    """
    src = vector(view, "src", moves.src, _INTEGERS)
    num_moves = src.shape[0]
    arrays = {"src": src, "dst": vector(view, "dst", moves.dst, _INTEGERS, num_moves)}
    if moves.n is not None:
        arrays["n"] = view("n", moves.n)
        if math.prod(arrays["n"].shape) != 1 or arrays["n"].dtype not in _INTEGERS:
            raise ShapeError(
                f"n is {arrays['n'].dtype} {arrays['n'].shape}; it must be one int32 or int64 on the device, (1,)."
            )
    group = num_moves if moves.group is None else min(integer("group", moves.group, 1), num_moves)
    if num_moves * (pool.row_bytes // pool.word) > _MAX_INT // 2:
        raise UnsupportedError(
            f"src has {num_moves} entries for rows of {pool.row_bytes // pool.word} words of {pool.word} bytes; at most"
            f" {_MAX_INT // 2} words are moved in one launch. Split the list between groups."
        )
    if flag("validate", validate):
        check_moves({name: to_host(array) for name, array in arrays.items()}, group, pool.num_rows)
    if not num_moves or not pool.num_rows or not pool.row_bytes:
        return None
    cut = choose_geometry(pool, num_moves, group)
    whole = Portion(range(num_moves), range(len(pool.layers)), range(pool.row_bytes // pool.word))
    if cut.way != "scratch":
        steps: tuple[Step, ...] = (_step(pool, arrays, whole, cut.way, cut.slice_words, cut.chunk, cut.stage_bytes),)
    else:
        if scratch is None:
            whole_bytes = num_moves * pool.row_bytes * len(pool.layers)
            scratch = new_scratch(max(cut.stage_bytes, min(whole_bytes, _MAX_SCRATCH_BYTES)))
        arrays["scratch"] = buffer = vector(view, "scratch", scratch, ("uint8",))
        if buffer.ptr % 16 or buffer.shape[0] < cut.stage_bytes:
            raise InvalidArgumentError(
                f"scratch has {buffer.shape[0]} bytes at address {buffer.ptr:#x}; a group of {group} moves needs at "
                f"least {cut.stage_bytes}, at a multiple of 16. The more, the fewer launches."
            )
        steps = tuple(
            _step(pool, arrays, portion, way, len(portion.words), _DIRECT_CHUNK, 0)
            for portion in cut_for_scratch(pool, num_moves, cut, buffer.shape[0])
            for way in ("gather", "scatter")
        )
    return Move(steps, arrays | {layer.name: layer for layer in pool.layers})


def _step(
    pool: Pool,
    arrays: Mapping[str, ArrayView],
    portion: Portion,
    way: str,
    slice_words: int,
    chunk: int,
    shared_bytes: int,
) -> Step:
    """Make the launch that moves a portion one way."""
    params = np.zeros(1, MOVE_PARAMS_DTYPE)
    for name, array in arrays.items():
        params[name] = array.ptr
        if name != "scratch":
            params[f"wide_{name}"] = array.dtype == "int64"
    first = portion.moves.start
    for name in ("src", "dst"):
        params[name] += np.uint64(first * arrays[name].strides[0] * arrays[name].itemsize if first else 0)
    for field, value in {
        "num_rows": pool.num_rows,
        "row_stride": pool.row_stride,
        "first_move": first,
        "num_moves": len(portion.moves),
        "chunk": chunk,
        "num_layers": len(portion.layers),
        "row_words": len(portion.words),
        "slice_words": slice_words,
    }.items():
        params[field] = value
    begin = portion.words.start * pool.word
    params["layers"][0, : len(portion.layers)] = [pool.layers[i].ptr + begin for i in portion.layers]
    chunks = _ceil_div(len(portion.moves), chunk)
    tasks = chunks * _ceil_div(len(portion.words), slice_words) * len(portion.layers)
    return Step(Launch("move", defines(pool.word, way), (min(tasks, _MAX_INT), 1, 1), BLOCK, shared_bytes), params)


def check_moves(arrays: Mapping[str, npt.NDArray[Any]], group: int, num_rows: int) -> None:
    """Refuse a list that does not say which row ends up where.

    Parameters
    ----------
    arrays : mapping of str to numpy.ndarray
        ``src``, ``dst`` and, where the list is not all of them, ``n``.
    group : int
    num_rows : int

    Raises
    ------
    InvalidArgumentError
        What `move_rows` says.
    """
    src, dst = (arrays[name].astype(np.int64) for name in ("src", "dst"))
    n = int(arrays["n"].reshape(-1)[0]) if "n" in arrays else src.size
    if not 0 <= n <= src.size:
        raise InvalidArgumentError(f"n is {n}; it must be 0 to {src.size}, the length of src and dst.")
    for name, ids in (("src", src[:n]), ("dst", dst[:n])):
        wrong = np.flatnonzero((ids < -1) | (ids >= num_rows))
        if wrong.size:
            i = int(wrong[0])
            raise InvalidArgumentError(f"{name}[{i}] is {ids[i]}; it must be a slot from 0 to {num_rows - 1}, or -1.")
    live = np.flatnonzero((src[:n] >= 0) & (dst[:n] >= 0) & (src[:n] != dst[:n]))
    src, dst = src[live], dst[live]
    order = np.argsort(dst, kind="stable")
    again = np.flatnonzero(np.diff(dst[order]) == 0)
    if again.size:
        first, second = live[order[again[0]]], live[order[again[0] + 1]]
        raise InvalidArgumentError(
            f"dst[{first}] and dst[{second}] are both {dst[order[again[0]]]}; a slot is written once. Fix the plan."
        )
    writer = np.full(num_rows, -1, np.int64)
    writer[dst] = live
    crossing = np.flatnonzero((writer[src] >= 0) & (writer[src] // group != live // group))
    if crossing.size:
        i = int(crossing[0])
        raise InvalidArgumentError(
            f"move {live[i]} reads slot {src[i]}, which move {writer[src[i]]} of another group of {group} writes; give"
            " group=None, or put both into one group."
        )


class RowMover:
    """The layers of a KV pool, looked at once, for moves in every step.

    Parameters
    ----------
    kv_layers : sequence of array
        As in `move_rows`.

    Raises
    ------
    ShapeError, UnsupportedError
        As in `move_rows`.
    """

    def __init__(self, kv_layers: Sequence[Any]) -> None:
        first = kv_layers[0] if len(kv_layers) else None
        home = ordinal_of(first)
        with on_device(current_ordinal() if home is None else home):
            self._ordinal = current_ordinal()
            self.pool = Pool.from_arrays(device_view, kv_layers)

    def scratch_bytes(self, num_moves: int, group: int | None = None) -> int:
        """Tell how much scratch is needed at least; 0 where none is.

        Parameters
        ----------
        num_moves : int
            Length of the list.
        group : int, optional
            As in `Moves`.
        """
        return scratch_bytes(self.pool, num_moves, group)

    def move(
        self,
        src: Any,
        dst: Any,
        n: Any = None,
        group: int | None = None,
        *,
        scratch: Any = None,
        validate: bool = False,
        stream: Any = None,
    ) -> None:
        """Move rows, as `move_rows` does.

        Parameters
        ----------
        src, dst, n, group, scratch, validate, stream
            As in `move_rows`.
        """
        with on_device(self._ordinal):
            work_stream = as_stream(stream, src, self._ordinal)
            view = functools.partial(device_view, stream=work_stream)
            memory = memory_for(src, work_stream, self._ordinal, is_current=stream is None)
            with memory.scope:
                move = build(
                    view,
                    self.pool,
                    Moves(src, dst, n, group),
                    scratch,
                    lambda size: memory.empty((size,), "uint8"),
                    validate=validate,
                )
                if move is None:
                    return
                for step in move.steps:
                    launch = step.launch
                    kernel = jit.load(
                        launch.kernel, launch.defines, Device.current(), launch.shared_bytes, stream=work_stream
                    )
                    kernel.launch(launch.grid, launch.block, step.params, work_stream)


def scratch_bytes(pool: Pool, num_moves: int, group: int | None) -> int:
    """Tell how much scratch is needed at least; 0 where none is.

    Parameters
    ----------
    pool : Pool
    num_moves : int
    group : int or None
    """
    num_moves = integer("num_moves", num_moves, 0)
    group = num_moves if group is None else min(integer("group", group, 1), num_moves)
    if not num_moves or not pool.row_bytes:
        return 0
    cut = choose_geometry(pool, num_moves, group)
    return cut.stage_bytes if cut.way == "scratch" else 0


def move_rows(
    kv_layers: Sequence[Any],
    src: Any,
    dst: Any,
    n: Any = None,
    group: int | None = None,
    *,
    scratch: Any = None,
    validate: bool = False,
    stream: Any = None,
) -> None:
    """Move rows of all layers to other slots, in place, on the GPU; in one launch but for long lists of one group.

    Every row is read before any is written: row ``dst[i]`` becomes what row ``src[i]`` was, whatever overlaps. Bytes
    are copied, so the layers may be of any element type. Nothing is read from the device but by the kernel, so a CUDA
    graph replays with other lists and another `n`.

    Parameters
    ----------
    kv_layers : sequence of array, (slots, ...), (slots, 1, ...) or (pages, page_size, [1,] ...)
        At most 256, each of the same number and size of rows. The last axis is contiguous; slots may lie apart, but all
        by the same step. Of (pages, page_size, W) and (pages, page_size, 1, W), slot s is row s % page_size of page
        s // page_size.
    src, dst : array, shape (N,), int32 or int64
        Slots. Entries with -1, or any other number that is no slot, are skipped. No slot is written twice.
    n : array, shape (1,), int32 or int64, optional
        How many entries count, read when the kernel runs; by default all.
    group : int, optional
        A promise about the list that makes it faster, as in `Moves`: entries of different groups of this length have
        nothing to do with each other. Rows of groups of 1 are copied directly; groups of up to 3,072 rows (768, where
        addresses or rows are no multiples of 4 bytes) are staged in shared memory; larger ones go through `scratch`, by
        two launches each time that it is full. `plan_compact` and `plan_defrag` say it for their lists.
    scratch : array, shape (bytes,), uint8, optional
        Memory for groups that no shared memory holds: at least `RowMover.scratch_bytes`, the more the faster; by
        default new memory, for all rows or of 256 MiB, or what is needed at least.
    validate : bool
        Look at the list first, which waits for the GPU.
    stream : stream or int, optional
        Where the work runs, as in `mlaflash.mla_verify`. What reads the rows must be ordered behind it.

    Raises
    ------
    ShapeError
        Shape, strides, dtype or device of an array, or layers that are not alike.
    InvalidArgumentError
        `group` or `scratch` is too small. With `validate`: `n` or a slot out of range, a slot that is written twice, or
        one group that reads what another writes.
    UnsupportedError
        More than 256 layers.
    CaptureError
        The first call is being captured; make it once before.
    CompileError, CacheMissError, MissingDependencyError, NoDeviceError
        The kernel cannot be had here.
    """
    RowMover(kv_layers).move(src, dst, n, group, scratch=scratch, validate=validate, stream=stream)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _overlap(addresses: list[int], num_rows: int, row_bytes: int, row_stride: int) -> bool:
    """Whether any two of equal layers, given where each begins, in order, have a byte in common."""
    extent = (num_rows - 1) * row_stride + row_bytes
    if all(b - a >= extent for a, b in itertools.pairwise(addresses)):
        return False
    # Layers may lie between each other's rows.
    phases = sorted((address - addresses[0]) % row_stride for address in addresses)
    if all(b - a >= row_bytes for a, b in itertools.pairwise([*phases, phases[0] + row_stride])):
        return False
    return any(
        b - a < extent and not row_bytes <= (b - a) % row_stride <= row_stride - row_bytes
        for a, b in itertools.combinations(addresses, 2)
    )


def _rows_of(layer: ArrayView) -> tuple[int, int, int]:
    """Return the number of rows, their bytes and their stride in bytes."""
    shape, strides = layer.shape, layer.strides
    if layer.ndim == 4 and shape[2] == 1:
        shape, strides = (*shape[:2], shape[3]), (*strides[:2], strides[3])
    if len(shape) not in (2, 3):
        raise ShapeError(
            f"{layer.name} has shape {layer.shape}; it must be (slots, W), (pages, page_size, W) or (pages, page_size,"
            " 1, W)."
        )
    if 0 in shape:
        return 0, 0, 0
    if shape[-1] > 1 and strides[-1] != 1:
        raise ShapeError(
            f"{layer.name} has strides {layer.strides} (in elements); its last axis must be contiguous. Copy it."
        )
    if len(shape) == 3:
        if shape[0] > 1 and shape[1] > 1 and strides[0] != shape[1] * strides[1]:
            raise ShapeError(
                f"{layer.name} has strides {layer.strides} (in elements); the next page must begin where a page ends,"
                " so that all rows are equally far apart. Copy it."
            )
        stride = strides[1] if shape[1] > 1 else strides[0]
    else:
        stride = strides[0]
    num_rows = math.prod(shape[:-1])
    row_bytes = shape[-1] * layer.itemsize
    stride_bytes = stride * layer.itemsize if num_rows > 1 else row_bytes
    if stride_bytes < row_bytes:
        raise ShapeError(f"{layer.name} has strides {layer.strides} (in elements); its rows must not overlap. Copy it.")
    return num_rows, row_bytes, stride_bytes
