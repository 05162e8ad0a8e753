"""Which draft tokens may see which: the tree mask of a verify step, packed into words.

Bit ``j`` of row ``i``, least significant first, says that draft token ``i`` may see draft token
``j`` of the same request; tokens before the draft are always visible. A row takes ``ceil(max_q /
32)`` words.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlaflash.checks import integer
from mlaflash.errors import InvalidArgumentError, ShapeError

BITS_PER_WORD = 32

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """Visibility among the draft tokens of each request, one packed row for each query token.

    Make one with `from_parents`, `from_dense`, `from_packed` or `causal`. The first two check what
    they are given and therefore read it: with CuPy arrays they synchronise. `from_packed` looks at
    shape and dtype alone and keeps the array, so that new bits written into it in place are used by
    the next call.

    Attributes
    ----------
    words : array, shape (T, ceil(max_q / 32)), uint32, C-contiguous
        NumPy or CuPy. Bits at or past a request's number of mask columns are never looked at.
    max_q : int
        Columns of the mask: the largest number of draft tokens of any request.
    """

    words: Any
    max_q: int

    def __post_init__(self) -> None:
        """Check shape and dtype; the bits are not read."""
        object.__setattr__(self, "max_q", integer("max_q", self.max_q, 0))
        shape, dtype = getattr(self.words, "shape", None), getattr(self.words, "dtype", None)
        if shape is None or dtype is None or _module(self.words) not in ("numpy", "cupy"):
            raise ShapeError(
                f"words is {type(self.words).__name__}; it must be a NumPy or a CuPy array: convert it first."
            )
        if len(shape) != 2 or shape[1] != words_per_row(self.max_q):
            raise ShapeError(
                f"words has shape {shape}; for max_q {self.max_q} it must be"
                f" (query tokens, {words_per_row(self.max_q)})."
            )
        if dtype != np.uint32:
            raise ShapeError(f"words is {dtype}; it must be uint32: view int32 words as uint32.")
        if not self.words.flags.c_contiguous:
            raise ShapeError(
                f"words has strides {self.words.strides}; it must be C-contiguous: copy it with ascontiguousarray."
            )

    @property
    def num_tokens(self) -> int:
        """Query tokens of the whole batch, T."""
        return int(self.words.shape[0])

    @classmethod
    def from_packed(cls, words: Any, max_q: int) -> TreeMask:
        """Wrap words that are packed already.

        Parameters
        ----------
        words : array, shape (T, ceil(max_q / 32)), uint32 or int32
            Least significant bit first. The array is kept, not copied.
        max_q : int
            Columns of the mask.

        Returns
        -------
        TreeMask
        """
        if getattr(words, "dtype", None) == np.int32:
            words = words.view(np.uint32)
        return cls(words, max_q)

    @classmethod
    def from_dense(cls, dense: Any) -> TreeMask:
        """Pack square matrices of visibility.

        Parameters
        ----------
        dense : sequence of (q, q) arrays, one for each request, or one array of shape (B, S, S)
            bool, or integers 0 and 1. ``dense[b][i, j]``: draft token i of request b may see its
            draft token j. Nothing more is asked of it: a token may see later ones, and may be blind
            to itself.

        Returns
        -------
        TreeMask
        """
        if not isinstance(dense, Sequence) and not getattr(dense, "shape", ()):
            raise ShapeError(
                f"dense is a {type(dense).__name__}; it must be a list of square arrays, or one array of shape"
                " (B, S, S)."
            )
        like = dense if hasattr(dense, "shape") else dense[0] if len(dense) else None
        matrices = [_square_bools(_to_host(f"dense[{b}]", matrix), b) for b, matrix in enumerate(dense)]
        max_q = max((len(matrix) for matrix in matrices), default=0)
        words = np.zeros((sum(map(len, matrices)), words_per_row(max_q)), np.uint32)
        row = 0
        for matrix in matrices:
            words[row : row + len(matrix)] = _pack(matrix, words.shape[1])
            row += len(matrix)
        return cls(_like(words, like), max_q)

    @classmethod
    def from_parents(cls, parents: Any, qo_indptr: Any = None, *, forest: bool = False) -> TreeMask:
        """Make the mask of draft trees: a token sees itself and its ancestors.

        Parameters
        ----------
        parents : array, shape (T,) or (B, S), integers
            Each token's parent, counted inside its request; -1 for a root. A parent comes before
            its children.
        qo_indptr : array, shape (B + 1,), integers, optional
            Where the requests of a flat `parents` begin and end; without it, `parents` is one
            request. An array of shape (B, S) has its own requests.
        forest : bool
            Allow several roots in one request. Without it a second root is taken for a mistake.

        Returns
        -------
        TreeMask
        """
        host = _integers("parents", parents)
        if host.ndim == 2:
            if qo_indptr is not None:
                raise InvalidArgumentError(
                    f"parents has shape {host.shape} and qo_indptr was given too; flatten parents,"
                    " or leave qo_indptr out."
                )
            requests = list(host)
        elif host.ndim == 1:
            bounds = _bounds(qo_indptr, host.size, max_q=host.size)
            requests = [host[bounds[b] : bounds[b + 1]] for b in range(len(bounds) - 1)]
        else:
            raise ShapeError(f"parents has shape {host.shape}; it must be (T,) or (B, S).")
        mask = cls.from_dense([_ancestors(own, b, forest) for b, own in enumerate(requests)])
        return cls(_like(mask.words, parents), mask.max_q)

    @classmethod
    def causal(cls, q_lens: int | Sequence[int]) -> TreeMask:
        """Make the mask of a chain: a token sees itself and every earlier one.

        Parameters
        ----------
        q_lens : int or sequence of int
            Draft tokens of the only request, or of each request.

        Returns
        -------
        TreeMask
            The same visibility as ``mask="causal"``.
        """
        lens = _integers("q_lens", q_lens)
        if lens.ndim > 1:
            raise ShapeError(f"q_lens has shape {lens.shape}; it must be one integer, or one for each request.")
        return cls.from_dense(
            [np.tri(integer(f"q_lens[{b}]", q_len, 0), dtype=np.bool_) for b, q_len in enumerate(lens.ravel())]
        )

    def to_dense(self, qo_indptr: Any = None) -> list[Bools]:
        """Unpack into one square matrix for each request, on the host.

        Parameters
        ----------
        qo_indptr : array, shape (B + 1,), integers, optional
            Where the requests begin and end; without it, each has `max_q` tokens.

        Returns
        -------
        list of numpy.ndarray, shape (q, q), bool
        """
        bounds = _bounds(qo_indptr, self.num_tokens, self.max_q)
        rows = self.bits()
        return [rows[bounds[b] : bounds[b + 1], : bounds[b + 1] - bounds[b]] for b in range(len(bounds) - 1)]

    def to_parents(self, qo_indptr: Any = None, *, forest: bool = False) -> npt.NDArray[np.int32]:
        """Recover each token's parent, the inverse of `from_parents`.

        Parameters
        ----------
        qo_indptr : array, shape (B + 1,), integers, optional
            Where the requests begin and end; without it, each has `max_q` tokens.
        forest : bool
            Allow several roots in one request.

        Returns
        -------
        numpy.ndarray, shape (T,), int32
            Counted inside the request; -1 for a root.

        Raises
        ------
        InvalidArgumentError
            The mask is no tree in which a token sees itself and its ancestors, earlier tokens all.
        """
        parents = np.full(self.num_tokens, -1, np.int32)
        row = 0
        for b, dense in enumerate(self.to_dense(qo_indptr)):
            for i, sees in enumerate(dense):
                earlier = np.flatnonzero(sees[:i])
                parent = int(earlier[-1]) if earlier.size else -1
                expected = np.zeros_like(sees) if parent < 0 else dense[parent].copy()
                expected[i] = True
                if not np.array_equal(sees, expected):
                    raise InvalidArgumentError(
                        f"draft token {i} of request {b} sees {np.flatnonzero(sees).tolist()},"
                        " which is not itself and the ancestors of one earlier token; only a tree"
                        " has parents: use to_dense."
                    )
                parents[row + i] = parent
            _check_parents(parents[row : row + len(dense)].astype(np.int64), b, forest)
            row += len(dense)
        return parents

    def bits(self) -> Bools:
        """Unpack all `max_q` columns of every row, on the host.

        Returns
        -------
        numpy.ndarray, shape (T, max_q), bool
        """
        words = np.ascontiguousarray(_to_host("words", self.words), "<u4")
        unpacked = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        return unpacked[:, : self.max_q].astype(np.bool_)


def words_per_row(max_q: int) -> int:
    """Return how many 32-bit words hold one row of `max_q` columns.

    Parameters
    ----------
    max_q : int
        Columns of the mask.

    Returns
    -------
    int
    """
    return -(-max_q // BITS_PER_WORD)


def _pack(matrix: Bools, num_words: int) -> npt.NDArray[np.uint32]:
    packed = np.zeros((len(matrix), num_words * 4), np.uint8)
    columns = np.packbits(matrix, axis=1, bitorder="little")
    packed[:, : columns.shape[1]] = columns
    return packed.view("<u4").astype(np.uint32)


def _square_bools(matrix: npt.NDArray[Any], b: int) -> Bools:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ShapeError(
            f"dense[{b}] has shape {matrix.shape}; it must be square: one row and one column a draft token."
        )
    if matrix.dtype == np.bool_:
        return matrix
    if matrix.dtype.kind not in "iu":
        raise ShapeError(f"dense[{b}] is {matrix.dtype}; it must be bool, or integers 0 and 1.")
    wrong = np.argwhere((matrix != 0) & (matrix != 1))
    if wrong.size:
        i, j = wrong[0].tolist()
        raise InvalidArgumentError(
            f"dense[{b}][{i}, {j}] is {matrix[i, j]}; it must be 0 or 1: compare an additive mask with 0 first."
        )
    return matrix.astype(np.bool_)


def _check_parents(parents: Int64s, b: int, forest: bool) -> None:
    order = np.arange(parents.size)
    wrong = np.flatnonzero((parents < -1) | (parents >= order))
    if wrong.size:
        i = int(wrong[0])
        allowed = "-1" if i == 0 else f"-1 to {i - 1}"
        raise InvalidArgumentError(
            f"the parent of draft token {i} of request {b} is {parents[i]}; it must be {allowed}:"
            " order the tokens so that a parent comes before its children."
        )
    roots = np.flatnonzero(parents == -1)
    if roots.size > 1 and not forest:
        raise InvalidArgumentError(
            f"request {b} has {roots.size} roots, draft tokens {roots[:8].tolist()}; a tree has"
            " one: fix parents, or pass forest=True."
        )


def _ancestors(parents: Int64s, b: int, forest: bool) -> Bools:
    _check_parents(parents, b, forest)
    sees = np.eye(parents.size, dtype=np.bool_)
    for i, parent in enumerate(parents):
        if parent >= 0:
            sees[i] |= sees[parent]
    return sees


def _bounds(qo_indptr: Any, num_tokens: int, max_q: int) -> list[int]:
    """Return where each request begins and ends among `num_tokens` rows, each at most `max_q`."""
    if qo_indptr is None:
        if num_tokens % max_q if max_q else num_tokens:
            raise InvalidArgumentError(
                f"{num_tokens} rows are no multiple of max_q {max_q}; pass qo_indptr to say where requests begin."
            )
        return list(range(0, num_tokens + 1, max_q)) if max_q else [0]
    bounds = _integers("qo_indptr", qo_indptr)
    if bounds.ndim != 1 or bounds.size == 0:
        raise ShapeError(f"qo_indptr has shape {bounds.shape}; it must be (B + 1,).")
    lens = np.diff(bounds)
    if bounds[0] != 0 or bounds[-1] != num_tokens or (lens < 0).any() or (lens > max_q).any():
        raise InvalidArgumentError(
            f"qo_indptr is {bounds.tolist()}; it must rise from 0 to {num_tokens} by at most {max_q} a request."
        )
    return [int(bound) for bound in bounds]


def _integers(name: str, array: Any) -> Int64s:
    host = _to_host(name, array)
    if host.size and host.dtype.kind not in "iu":
        raise ShapeError(f"{name} is {host.dtype}; it must hold integers.")
    return host.astype(np.int64)


def _module(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def _to_host(name: str, array: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(array.get() if _module(array) == "cupy" else array)
    except ValueError as error:
        raise ShapeError(f"{name} makes no array: {error} Its rows must have one length.") from error


def _like(words: npt.NDArray[np.uint32], like: Any) -> Any:
    """Return `words` in the module of `like`, which is NumPy for anything that is no CuPy array."""
    return sys.modules["cupy"].asarray(words) if _module(like) == "cupy" else words
