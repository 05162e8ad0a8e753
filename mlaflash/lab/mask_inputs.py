"""One batch of masks in every format that `MaskSource` takes, with what the host's converters make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlaflash.errors import InvalidArgumentError
from mlaflash.mask_formats import parents_to_retrieve, words_per_row
from mlaflash.mask_source import MaskSource
from mlaflash.masks import TreeMask

Array = np.ndarray[Any, np.dtype[Any]]
GARBAGE = 2147480000


@dataclass(frozen=True)
class Batch:
    """Requests of any visibility, and others of the same lengths that are forests, with one root at token 0."""

    q_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    seed: int = 0

    @property
    def rng(self) -> np.random.Generator:
        """A new generator of this batch's seed."""
        return np.random.default_rng(self.seed)

    @property
    def num_tokens(self) -> int:
        """Query tokens of all requests."""
        return sum(self.q_lens)

    @property
    def qo_indptr(self) -> Array:
        """Where the query tokens of each request begin and end."""
        return np.cumsum([0, *self.q_lens]).astype(np.int32)

    def dense(self) -> list[Array]:
        """Give a matrix of random bits for each request."""
        rng = self.rng
        return [rng.random((q_len, q_len)) < 0.5 for q_len in self.q_lens]

    def parents(self) -> list[Array]:
        """Give the parents of the forest of each request."""
        rng = self.rng
        # Close to the token for depth, far away for breadth.
        return [
            np.array([max(i - 1 - int(rng.geometric(0.4) - 1), 0) if i else -1 for i in range(q_len)], np.int64)
            for q_len in self.q_lens
        ]

    def grids(self) -> list[Array]:
        """Give the rows over prefix and draft. All of the prefix is visible."""
        return [
            np.hstack([np.ones((len(own), prefix), np.bool_), own])
            for own, prefix in zip(self.dense(), self.prefix_lens, strict=True)
        ]


@dataclass(frozen=True)
class Encoded:
    """Arrays of a format, what makes a source of them, and the words of the host's converter."""

    arrays: dict[str, Array]
    make: Callable[..., MaskSource]
    expected: TreeMask


def flat(parts: list[Array], dtype: Any) -> Array:
    """Lay arrays one behind the other."""
    return np.concatenate([np.zeros(0, dtype), *(part.ravel().astype(dtype) for part in parts)])


def table(rows: list[Array], shape: tuple[int, ...], fill: Any, dtype: Any) -> Array:
    """Lay each request into its own corner of an array of garbage."""
    out = np.full((len(rows), *shape), fill, dtype)
    for own, row in zip(out, rows, strict=True):
        own[tuple(slice(length) for length in row.shape)] = row
    return out


def spread(parts: list[Array], fill: Any) -> tuple[Array, Array]:
    """Put garbage before each part; return all, and where the parts begin."""
    begins, pieces = [], []
    at = 0
    for b, part in enumerate(parts):
        pieces += [np.full(b + 1, fill, part.dtype), part.ravel()]
        begins.append(at + b + 1)
        at += b + 1 + part.size
    return np.concatenate([np.zeros(0, parts[0].dtype), *pieces]), np.array([*begins, at])


def flashinfer(batch: Batch, bitorder: Any, dtype: Any, *, with_indptr: bool) -> Encoded:
    """Write a batch as FlashInfer's packed bits."""
    parts = [np.packbits(grid.ravel(), bitorder=bitorder) for grid in batch.grids()]
    kv_lens = np.add(batch.q_lens, batch.prefix_lens).astype(dtype)
    expected = TreeMask.from_flashinfer(flat(parts, np.uint8), kv_lens, batch.qo_indptr, bitorder=bitorder)

    def make(packed: Any, kv_lens: Any, mask_indptr: Any = None) -> MaskSource:
        return MaskSource.from_flashinfer(packed, kv_lens, bitorder=bitorder, mask_indptr=mask_indptr)

    if with_indptr:
        packed, begins = spread(parts, 0xA5)
        return Encoded({"packed": packed, "kv_lens": kv_lens, "mask_indptr": begins.astype(dtype)}, make, expected)
    return Encoded({"packed": flat(parts, np.uint8), "kv_lens": kv_lens}, make, expected)


def sglang_full(batch: Batch, dtype: Any, *, with_indptr: bool) -> Encoded:
    """Write a batch as SGLang's mask over prefix and draft."""
    grids = batch.grids()
    prefix_lens = np.array(batch.prefix_lens, dtype)
    expected = TreeMask.from_sglang(
        flat(grids, np.bool_), mode="full", prefix_lens=prefix_lens, qo_indptr=batch.qo_indptr
    )
    for grid, prefix in zip(grids, batch.prefix_lens, strict=True):
        grid[:, :prefix] = batch.rng.random((len(grid), prefix)) < 0.5  # nobody looks at it

    def make(mask: Any, prefix_lens: Any, mask_indptr: Any = None) -> MaskSource:
        return MaskSource.from_sglang(mask, mode="full", prefix_lens=prefix_lens, mask_indptr=mask_indptr)

    if with_indptr:
        mask, begins = spread(grids, True)
        return Encoded({"mask": mask, "prefix_lens": prefix_lens, "mask_indptr": begins.astype(dtype)}, make, expected)
    return Encoded({"mask": flat(grids, np.bool_), "prefix_lens": prefix_lens}, make, expected)


def encode(name: str, batch: Batch, max_q: int, *, wide: bool = False) -> Encoded:
    """Write a batch in a format.

    `max_q` is S where an array has it; `wide` chooses int64 for integers.
    """
    dtype = np.int64 if wide else np.int32
    dense, parents = batch.dense(), batch.parents()
    if name == "dense":
        array = table(dense, (max_q, max_q), 7, np.uint8 if wide else np.int8)
        return Encoded({"dense": array}, MaskSource.from_dense, TreeMask.from_dense(dense))
    if name == "dense_flat":
        return Encoded({"dense": flat(dense, np.bool_)}, MaskSource.from_dense, TreeMask.from_dense(dense))
    if name == "parents":
        expected = TreeMask.from_parents(flat(parents, dtype), batch.qo_indptr)
        padded = np.append(flat(parents, dtype), np.full(3, GARBAGE, dtype))
        return Encoded({"parents": padded}, MaskSource.from_parents, expected)
    if name == "parents_table":
        expected = TreeMask.from_parents(flat(parents, dtype), batch.qo_indptr)
        return Encoded({"parents": table(parents, (max_q,), GARBAGE, dtype)}, MaskSource.from_parents, expected)
    if name == "retrieve":
        links = [parents_to_retrieve(own[None]) for own in parents]
        arrays = {
            "next_token": table([first[0] for first, _ in links], (max_q,), GARBAGE, dtype),
            "next_sibling": table([sibling[0] for _, sibling in links], (max_q,), GARBAGE, dtype),
        }
        # The host's converter takes one length; each request is one batch there.
        rows = [TreeMask.from_retrieve(*own).to_dense()[0] for own in links if own[0].size]
        return Encoded(arrays, MaskSource.from_retrieve, TreeMask.from_dense(rows))
    if name == "packed":
        expected = TreeMask.from_dense(dense)
        # Bits past a request's columns are nobody's.
        words = expected.words.copy()
        for b, q_len in enumerate(batch.q_lens):
            beyond = np.ones((1, max(expected.max_q, 1)), np.bool_)
            beyond[:, :q_len] = False
            if expected.max_q:
                words[batch.qo_indptr[b] : batch.qo_indptr[b + 1]] |= TreeMask.from_dense(
                    [np.repeat(beyond, expected.max_q, 0)]
                ).words[0]
        return Encoded({"words": words.view(np.int32 if wide else np.uint32)}, MaskSource.from_packed, expected)
    if name in ("flashinfer_little", "flashinfer_big"):
        return flashinfer(batch, name.removeprefix("flashinfer_"), dtype, with_indptr=False)
    if name == "flashinfer_indptr":
        return flashinfer(batch, "little", dtype, with_indptr=True)
    if name in ("sglang_full", "sglang_full_indptr"):
        return sglang_full(batch, dtype, with_indptr=name.endswith("indptr"))
    if name == "sglang_qlen_only":
        mask = flat(dense, np.bool_)

        def make(mask: Any) -> MaskSource:
            return MaskSource.from_sglang(mask, mode="qlen_only")

        return Encoded({"mask": mask}, make, TreeMask.from_sglang(mask, mode="qlen_only", qo_indptr=batch.qo_indptr))
    raise InvalidArgumentError(f"format is {name!r}; known are {', '.join(NAMES)}. Name one of them.")


NAMES = (
    *("dense", "dense_flat", "parents", "parents_table", "retrieve", "packed"),
    *("flashinfer_little", "flashinfer_big", "flashinfer_indptr"),
    *("sglang_full", "sglang_full_indptr", "sglang_qlen_only"),
)


def widened(mask: TreeMask, num_tokens: int, max_q: int) -> Array:
    """Give the words of a mask with more rows and columns, all 0."""
    words = np.zeros((num_tokens, words_per_row(max_q)), np.uint32)
    words[: mask.num_tokens, : mask.words.shape[1]] = mask.words
    return words
