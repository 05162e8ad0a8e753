"""Which draft tokens may see which: the tree mask of a verify step, packed into words.

Bit ``j`` of row ``i``, least significant first, says that draft token ``i`` may see draft token
``j`` of the same request; tokens before the draft are always visible. A row takes ``ceil(max_q /
32)`` words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mlaflash.checks import integer
from mlaflash.errors import InvalidArgumentError, ShapeError, UnsupportedError
from mlaflash.mask_formats import (
    Bools,
    ancestors,
    array_like,
    check_parents,
    dense_to_bits,
    flashinfer_to_words,
    integers,
    module_of,
    pack_rows,
    parents_to_retrieve,
    retrieve_to_parents,
    rows_bounds,
    sglang_to_words,
    split_parents,
    to_host,
    unpack_rows,
    words_per_row,
    words_to_flashinfer,
    words_to_sglang,
)

_MOST_TOKENS = 2**15  # of a draft: a bool for each two of them


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """Visibility among the draft tokens of each request, one packed row for each query token.

    Make one with `from_parents`, `from_dense`, `from_flashinfer`, `from_sglang`, `from_retrieve`,
    `from_packed` or `causal`. All but the last two check what they are given and therefore read it:
    with CuPy arrays they synchronise, which no CUDA graph allows. There, and wherever the host must
    not wait, make a `MaskSource` with the constructor of the same name. `from_packed` looks at shape
    and dtype alone and keeps the array, so that new bits written into it in place are used by the next
    call.

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
        if shape is None or dtype is None or module_of(self.words) not in ("numpy", "cupy"):
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
        bits = dense_to_bits(dense)
        return cls(array_like(pack_rows(bits), like), bits.shape[1])

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
        requests = split_parents(parents, qo_indptr)
        bits = dense_to_bits([ancestors(own, b, forest) for b, own in enumerate(requests)])
        return cls(array_like(pack_rows(bits), parents), bits.shape[1])

    @classmethod
    def from_retrieve(cls, next_token: Any, next_sibling: Any) -> TreeMask:
        """Make the mask of draft trees given as first child and next sibling.

        Parameters
        ----------
        next_token, next_sibling : array, shape (B, S), integers
            SGLang's ``retrieve_next_token`` (spelt ``retrive_`` in its kernels) and
            ``retrieve_next_sibling``: a token's first child and the next child of its parent, counted
            inside the request; -1 for none. Token 0 is the root, and a parent comes before its
            children.

        Returns
        -------
        TreeMask

        Raises
        ------
        InvalidArgumentError
            A link is out of range or leads to a token twice, or no link leads to some token.

        Notes
        -----
        Layout: ``build_tree_efficient`` in SGLang's ``sgl-kernel/csrc/speculative/eagle_utils.cu``.
        """
        mask = cls.from_parents(retrieve_to_parents(next_token, next_sibling))
        return cls(array_like(mask.words, next_token), mask.max_q)

    @classmethod
    def from_flashinfer(
        cls, packed: Any, kv_lens: Any, qo_indptr: Any, *, bitorder: Literal["little", "big"]
    ) -> TreeMask:
        """Take over FlashInfer's packed custom mask.

        Parameters
        ----------
        packed : array, shape (sum of ceil(q_len * kv_len / 8),), uint8
            For each request, from a byte of its own on, q_len rows of kv_len bits. 1: visible. The
            bits that fill a request's last byte are 0.
        kv_lens : array, shape (B,), integers
            Tokens of each request, its draft tokens included.
        qo_indptr : array, shape (B + 1,), integers
            Where the draft tokens of each request begin and end.
        bitorder : {"little", "big"}
            Which bit of a byte comes first. There is no default: FlashInfer's kernels read
            ``"little"``, and what ``flashinfer.packbits`` and `numpy.packbits` make unless told
            otherwise is ``"big"``.

        Returns
        -------
        TreeMask
            Columns of tokens that a request shorter than its draft does not have are 0.

        Raises
        ------
        UnsupportedError
            A token before the last q_len is hidden from some row, as by a sliding window.
        InvalidArgumentError
            The bytes are more or fewer than the lengths need, or a bit past the last is set.

        Notes
        -----
        Layout: ``CustomMaskAttention`` in FlashInfer's ``include/flashinfer/attention/variants.cuh``
        and ``SegmentPackBitsKernel`` in its ``include/flashinfer/quantization.cuh``.
        """
        return cls(*flashinfer_to_words(packed, kv_lens, qo_indptr, bitorder))

    @classmethod
    def from_sglang(
        cls,
        mask: Any,
        *,
        mode: Literal["full", "qlen_only", "qlen_only_bitpacking"],
        prefix_lens: Any = None,
        qo_indptr: Any = None,
        draft_token_num: int | None = None,
        check_prefix: bool = True,
    ) -> TreeMask:
        """Take over a mask that SGLang built, in any of its ``TreeMaskMode``.

        Parameters
        ----------
        mask : array of any shape, read in C order
            ``"full"``: bool, for each request q_len rows of prefix_len + q_len.
            ``"qlen_only"``: bool, for each request q_len rows of q_len. Both take integers 0 and 1.
            ``"qlen_only_bitpacking"``: one item a row, bit j for column j; uint8 up to 8 draft
            tokens, uint16 up to 16, uint32 up to 32, or the signed type of that width.
        mode : {"full", "qlen_only", "qlen_only_bitpacking"}
            SGLang's ``FULL_MASK``, ``QLEN_ONLY``, ``QLEN_ONLY_BITPACKING``.
        prefix_lens : array, shape (B,), integers
            With ``"full"`` alone: tokens before the draft, which is what ``seq_lens`` counts in a
            verify batch of SGLang (the `kv_lens` of mlaflash counts the draft too).
        qo_indptr : array, shape (B + 1,), integers
            Where the draft tokens of each request begin and end.
        draft_token_num : int
            Instead of `qo_indptr`: draft tokens of every request.
        check_prefix : bool
            Whether the columns of the prefix are read, and refused where one is 0. SGLang leaves them
            unwritten where it asks its builder for ``fill_prefix_mask=False``.

        Returns
        -------
        TreeMask

        Raises
        ------
        UnsupportedError
            A token of the prefix is hidden from some row; or packed rows of more than 32 tokens.
        InvalidArgumentError
            The mask is larger or smaller than the lengths need, or holds something else than bits.

        Notes
        -----
        Layout: ``build_tree_kernel_efficient`` in ``python/sglang/srt/speculative/eagle_utils.py``,
        and ``build_tree_efficient`` and ``build_tree_efficient_partial_packed`` in
        ``sgl-kernel/csrc/speculative/eagle_utils.cu``.
        """
        return cls(*sglang_to_words(mask, mode, prefix_lens, qo_indptr, draft_token_num, check_prefix))

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
        lens = integers("q_lens", q_lens)
        if lens.ndim > 1:
            raise ShapeError(f"q_lens has shape {lens.shape}; it must be one integer, or one for each request.")
        sizes = [integer(f"q_lens[{b}]", q_len, 0) for b, q_len in enumerate(lens.ravel())]
        if max(sizes, default=0) > _MOST_TOKENS:
            raise UnsupportedError(
                f"q_lens holds {max(sizes)}; the matrix of a draft is made up to {_MOST_TOKENS} tokens."
            )
        return cls.from_dense([np.tri(size, dtype=np.bool_) for size in sizes])

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
        bounds = rows_bounds(qo_indptr, self.num_tokens, self.max_q)
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
            check_parents(parents[row : row + len(dense)].astype(np.int64), b, forest)
            row += len(dense)
        return parents

    def to_retrieve(self) -> tuple[Any, Any]:
        """Give the trees as first child and next sibling, the inverse of `from_retrieve`.

        Returns
        -------
        next_token, next_sibling : array, shape (B, max_q), int64
            In the module of `words`; children in ascending order, as SGLang links them.

        Raises
        ------
        InvalidArgumentError
            The mask is no tree, has several roots, or its requests differ in length.
        """
        parents = self.to_parents().astype(np.int64).reshape(self.num_tokens // max(self.max_q, 1), self.max_q)
        next_token, next_sibling = parents_to_retrieve(parents)
        return array_like(next_token, self.words), array_like(next_sibling, self.words)

    def to_flashinfer(self, kv_lens: Any, qo_indptr: Any = None, *, bitorder: Literal["little", "big"]) -> Any:
        """Give FlashInfer's packed custom mask, the inverse of `from_flashinfer`.

        Parameters
        ----------
        kv_lens : array, shape (B,), integers
            Tokens of each request, its draft tokens included.
        qo_indptr : array, shape (B + 1,), integers, optional
            Where the requests begin and end; without it, each has `max_q` tokens.
        bitorder : {"little", "big"}
            Which bit of a byte comes first; FlashInfer's kernels read ``"little"``.

        Returns
        -------
        array, shape (sum of ceil(q_len * kv_len / 8),), uint8
            In the module of `words`.
        """
        return words_to_flashinfer(self.words, self.max_q, kv_lens, qo_indptr, bitorder)

    def to_sglang(
        self,
        *,
        mode: Literal["full", "qlen_only", "qlen_only_bitpacking"],
        prefix_lens: Any = None,
        qo_indptr: Any = None,
    ) -> Any:
        """Give a flat mask as SGLang builds it, the inverse of `from_sglang`.

        Parameters
        ----------
        mode : {"full", "qlen_only", "qlen_only_bitpacking"}
            The last needs requests of equally many draft tokens, at most 32.
        prefix_lens : array, shape (B,), integers
            With ``"full"`` alone: tokens before the draft.
        qo_indptr : array, shape (B + 1,), integers, optional
            Where the requests begin and end; without it, each has `max_q` tokens.

        Returns
        -------
        array of one axis, bool, or uint8, uint16 or uint32 with ``"qlen_only_bitpacking"``
            In the module of `words`.
        """
        return words_to_sglang(self.words, self.max_q, mode, prefix_lens, qo_indptr)

    def bits(self) -> Bools:
        """Unpack all `max_q` columns of every row, on the host.

        Returns
        -------
        numpy.ndarray, shape (T, max_q), bool
        """
        bits: Bools = unpack_rows(to_host("words", self.words), self.max_q)
        return bits
