"""Tree masks as other libraries hold them, kept as they are until a kernel packs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlaflash.errors import InvalidArgumentError, ShapeError
from mlaflash.mask_formats import check_bitorder, check_mode


@dataclass(frozen=True, slots=True, eq=False)
class MaskSource:
    """A tree mask that only the kernel `mask` reads, when it packs it into the words of a `TreeMask`.

    This is the one for CUDA graphs: the host copies, reads and checks nothing, so that a replay packs what the arrays
    hold by then. `TreeMask` has constructors of the same names, which check every value and synchronise for that; what
    they accept is packed to the same words here. Pack it with `mlaflash.pack_mask`.

    What they would refuse is packed as well, to the same words at every run, and without an access out of bounds:

    * An element outside the arrays, or a row or column past `max_q`, is not visible; any byte but 0 is.
    * A parent that is no earlier token of the request is none.
    * A link to token 0, or to no token of the request, is none; of several to one token, that from the lowest token
      counts. A token that no link leads to is a root.
    * Columns of the prefix are not read.

    Attributes
    ----------
    format : {"dense", "ragged", "bits", "parents", "retrieve", "words", "items"}
        As `mlaflash.mask_pack` and the kernel call it.
    arrays : mapping of str to array
        The arguments of the constructor, the mask itself first. Kept, not copied.
    is_big : bool
        Of ``"bits"``: whether the first bit of a byte is its most significant.
    """

    format: str
    arrays: Mapping[str, Any]
    is_big: bool = False

    @classmethod
    def from_packed(cls, words: Any, tail_lens: Any = None) -> MaskSource:
        """Take words that are packed already, of any number a row.

        Parameters
        ----------
        words : array, shape (T, W), uint32 or int32
            Least significant bit first. Columns that it lacks are not visible.
        tail_lens : array, shape (B,), int32 or int64, optional
            Columns of each request, where they are not its draft tokens; as in `mlaflash.mla_verify`.

        Returns
        -------
        MaskSource
        """
        return cls("words", {"words": words} | _given(tail_lens=tail_lens))

    @classmethod
    def from_dense(cls, dense: Any) -> MaskSource:
        """Take square matrices of visibility.

        Parameters
        ----------
        dense : array, shape (B, S, S) or (sum of q_len * q_len,), bool, uint8 or int8
            The first in any strides with a contiguous last axis; requests may have fewer than S tokens. The second
            holds, for each request, q_len rows of q_len.

        Returns
        -------
        MaskSource
        """
        rank = getattr(dense, "ndim", None)
        if rank not in (1, 3):
            raise ShapeError(
                f"dense has shape {getattr(dense, 'shape', None)}; it must be (B, S, S), or flat with the sum of"
                " q_len * q_len elements."
            )
        return cls("dense" if rank == 3 else "ragged", {"dense": dense})

    @classmethod
    def from_parents(cls, parents: Any) -> MaskSource:
        """Take draft trees as the parent of each token.

        Parameters
        ----------
        parents : array, shape (T,) or (B, S), int32 or int64
            Counted inside the request; -1 for a root, of which there may be several.

        Returns
        -------
        MaskSource
        """
        return cls("parents", {"parents": parents})

    @classmethod
    def from_retrieve(cls, next_token: Any, next_sibling: Any) -> MaskSource:
        """Take draft trees as first child and next sibling.

        Parameters
        ----------
        next_token, next_sibling : array, shape (B, S), int32 or int64
            As in `TreeMask.from_retrieve`; both of one type.

        Returns
        -------
        MaskSource
        """
        return cls("retrieve", {"next_token": next_token, "next_sibling": next_sibling})

    @classmethod
    def from_flashinfer(
        cls, packed: Any, kv_lens: Any, *, bitorder: Literal["little", "big"], mask_indptr: Any = None
    ) -> MaskSource:
        """Take FlashInfer's packed custom mask.

        Parameters
        ----------
        packed : array, shape (at least the sum of ceil(q_len * kv_len / 8),), uint8
            For each request, from a byte of its own on, q_len rows of kv_len bits.
        kv_lens : array, shape (B,), int32 or int64
            Tokens of each request, its draft tokens included.
        bitorder : {"little", "big"}
            Which bit of a byte comes first; FlashInfer's kernels read ``"little"``.
        mask_indptr : array, shape (B + 1,), int32 or int64, optional
            Byte at which each request begins; without it, one follows the other.

        Returns
        -------
        MaskSource
        """
        check_bitorder(bitorder)
        arrays = {"packed": packed, "kv_lens": kv_lens} | _given(mask_indptr=mask_indptr)
        return cls("bits", arrays, is_big=bitorder == "big")

    @classmethod
    def from_sglang(
        cls,
        mask: Any,
        *,
        mode: Literal["full", "qlen_only", "qlen_only_bitpacking"],
        prefix_lens: Any = None,
        mask_indptr: Any = None,
    ) -> MaskSource:
        """Take a mask that SGLang built, in any of its ``TreeMaskMode``.

        Parameters
        ----------
        mask : contiguous array of any shape
            ``"full"``: bool, for each request q_len rows of prefix_len + q_len. ``"qlen_only"``: bool, for each request
            q_len rows of q_len. ``"qlen_only_bitpacking"``: uint8, uint16 or uint32, one item a row. It may be longer.
        mode : {"full", "qlen_only", "qlen_only_bitpacking"}
        prefix_lens : array, shape (B,), int32 or int64
            With ``"full"`` alone: tokens before the draft.
        mask_indptr : array, shape (B + 1,), int32 or int64, optional
            With ``"full"`` and ``"qlen_only"``: where each request begins; without it, one follows the other.

        Returns
        -------
        MaskSource
        """
        check_mode(mode, prefix_lens)
        if mode == "qlen_only_bitpacking":
            if mask_indptr is not None:
                raise InvalidArgumentError(
                    f'mask_indptr was given with mode "{mode}", which has a row for each token; leave it out.'
                )
            return cls("items", {"mask": mask})
        return cls("ragged", {"mask": mask} | _given(prefix_lens=prefix_lens, mask_indptr=mask_indptr))


def _given(**arrays: Any) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None}
