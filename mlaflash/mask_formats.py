"""The formats in which masks arrive and leave, to and from rows of bits.

A *row of bits* is one query token's: element j says whether it may see draft token j of its
request. `TreeMask` documents the formats; here is the arithmetic, in NumPy or in CuPy, whichever
the array is of. Values that are checked are read: with CuPy arrays that synchronises.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mlaflash.checks import integer
from mlaflash.errors import InvalidArgumentError, ShapeError, UnsupportedError

BITS_PER_WORD = 32
BITS_PER_BYTE = 8
SGLANG_MODES = ("full", "qlen_only", "qlen_only_bitpacking")

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


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


def pack_rows(bits: Any) -> Any:
    """Pack rows of bits, (T, max_q) bool, into words, (T, ceil(max_q / 32)) uint32."""
    xp = namespace(bits)
    num_tokens, max_q = bits.shape
    num_words = words_per_row(max_q)
    if not bits.size:
        return xp.zeros((num_tokens, num_words), np.uint32)
    padded = xp.zeros((num_tokens, num_words * BITS_PER_WORD), np.bool_)
    padded[:, :max_q] = bits
    packed = xp.packbits(padded.ravel(), bitorder="little").reshape(num_tokens, -1)
    return packed.view("<u4").astype(np.uint32)


def unpack_rows(words: Any, max_q: int) -> Any:
    """Unpack words into rows of bits, the inverse of `pack_rows`."""
    xp = namespace(words)
    num_tokens = words.shape[0]
    if not words.size:
        return xp.zeros((num_tokens, max_q), np.bool_)
    octets = xp.ascontiguousarray(words, "<u4").view(np.uint8)
    unpacked = xp.unpackbits(octets.ravel(), bitorder="little").view(np.bool_)
    return unpacked.reshape(num_tokens, -1)[:, :max_q]


def flashinfer_to_words(packed: Any, kv_lens: Any, qo_indptr: Any, bitorder: str) -> tuple[Any, int]:
    """Return words and `max_q` of FlashInfer's packed custom mask."""
    check_bitorder(bitorder)
    data = own_array("packed", packed)
    if data.ndim != 1 or data.dtype != np.uint8:
        raise ShapeError(
            f"packed is {data.dtype} of shape {data.shape}; it must be uint8 of one axis, each request beginning on a"
            " byte."
        )
    bounds = request_bounds(qo_indptr)
    q_lens, lens = _lens_of(bounds), _lengths("kv_lens", kv_lens, len(bounds) - 1)
    sizes = [-(-q_len * kv_len // BITS_PER_BYTE) for q_len, kv_len in zip(q_lens, lens, strict=True)]
    _check_size("packed", data, sum(sizes), "bytes, the sum of ceil(q_len * kv_len / 8)", "kv_lens, qo_indptr")
    bits = _no_bits(data, q_lens)
    start = 0
    for b, (q_len, kv_len, size) in enumerate(zip(q_lens, lens, sizes, strict=True)):
        if not size:
            continue
        unpacked = namespace(data).unpackbits(data[start : start + size], bitorder=bitorder).view(np.bool_)
        if unpacked[q_len * kv_len :].any():
            raise InvalidArgumentError(
                f"the last byte of request {b} has a bit set past its {q_len} x {kv_len} bits; those must be 0. Check"
                f' kv_lens, qo_indptr and bitorder="{bitorder}".'
            )
        rows = slice(bounds[b], bounds[b + 1])
        tail = min(q_len, kv_len)
        bits[rows, q_len - tail : q_len] = _tail(unpacked[: q_len * kv_len].reshape(q_len, kv_len), b)
        start += size
    return pack_rows(bits), bits.shape[1]


def words_to_flashinfer(words: Any, max_q: int, kv_lens: Any, qo_indptr: Any, bitorder: str) -> Any:
    """Return FlashInfer's packed custom mask, the inverse of `flashinfer_to_words`."""
    check_bitorder(bitorder)
    xp = namespace(words)
    bounds = rows_bounds(qo_indptr, words.shape[0], max_q)
    lens = _lengths("kv_lens", kv_lens, len(bounds) - 1)
    bits = unpack_rows(words, max_q)
    parts = [xp.zeros(0, np.uint8)]
    for b, (q_len, kv_len) in enumerate(zip(_lens_of(bounds), lens, strict=True)):
        if not q_len * kv_len:
            continue
        sees = xp.ones((q_len, kv_len), np.bool_)
        tail = min(q_len, kv_len)
        sees[:, kv_len - tail :] = bits[bounds[b] : bounds[b + 1], q_len - tail : q_len]
        parts.append(xp.packbits(sees.ravel(), bitorder=bitorder))
    return xp.concatenate(parts)


def sglang_to_words(
    mask: Any, mode: str, prefix_lens: Any, qo_indptr: Any, draft_token_num: Any, check_prefix: bool
) -> tuple[Any, int]:
    """Return words and `max_q` of a mask as SGLang's ``build_tree_kernel_efficient`` writes it."""
    check_mode(mode, prefix_lens)
    data = own_array("mask", mask).reshape(-1)
    if (qo_indptr is None) == (draft_token_num is None):
        raise InvalidArgumentError(
            "qo_indptr and draft_token_num were " + ("left out" if qo_indptr is None else "both given") + "; one of"
            " them says how many draft tokens each request has: pass exactly one."
        )
    if mode == "qlen_only_bitpacking":
        if qo_indptr is not None:
            raise InvalidArgumentError(
                f'qo_indptr was given with mode "{mode}", whose requests have equally many tokens; pass'
                " draft_token_num instead."
            )
        return _sglang_items_to_words(data, integer("draft_token_num", draft_token_num, 1))
    if qo_indptr is not None:
        bounds = request_bounds(qo_indptr)
    else:
        q_len = integer("draft_token_num", draft_token_num, 1)
        batch = data.size // q_len**2 if mode == "qlen_only" else integers("prefix_lens", prefix_lens).size
        bounds = [b * q_len for b in range(batch + 1)]
    q_lens = _lens_of(bounds)
    prefixes = _lengths("prefix_lens", prefix_lens, len(q_lens)) if mode == "full" else [0] * len(q_lens)
    sizes = [q_len * (prefix + q_len) for q_len, prefix in zip(q_lens, prefixes, strict=True)]
    counted = "q_len * (prefix_len + q_len)" if mode == "full" else "q_len * q_len"
    _check_size("mask", data, sum(sizes), f"elements, the sum of {counted}", "mode and lengths")
    bits = _no_bits(data, q_lens)
    start = 0
    for b, (q_len, prefix, size) in enumerate(zip(q_lens, prefixes, sizes, strict=True)):
        if not size:
            continue
        grid = data[start : start + size].reshape(q_len, prefix + q_len)
        grid = zero_one(f"mask of request {b}", grid if check_prefix else grid[:, prefix:])
        bits[bounds[b] : bounds[b + 1], :q_len] = _tail(grid, b)
        start += size
    return pack_rows(bits), bits.shape[1]


def words_to_sglang(words: Any, max_q: int, mode: str, prefix_lens: Any, qo_indptr: Any) -> Any:
    """Return SGLang's flat mask, the inverse of `sglang_to_words`."""
    check_mode(mode, prefix_lens)
    bounds = rows_bounds(qo_indptr, words.shape[0], max_q)
    q_lens = _lens_of(bounds)
    if mode == "qlen_only_bitpacking":
        if any(q_len != max_q for q_len in q_lens):
            raise UnsupportedError(
                f'the requests have {q_lens[:8]} draft tokens; mode "{mode}" needs max_q {max_q} in each: use'
                ' mode "full" or "qlen_only".'
            )
        item = _sglang_item(max_q)
        return (words[:, 0] & np.uint32((1 << max_q) - 1)).astype(item) if max_q else words.reshape(-1).astype(item)
    prefixes = _lengths("prefix_lens", prefix_lens, len(q_lens)) if mode == "full" else [0] * len(q_lens)
    bits = unpack_rows(words, max_q)
    size = sum(q_len * (prefix + q_len) for q_len, prefix in zip(q_lens, prefixes, strict=True))
    mask = namespace(words).ones(size, np.bool_)
    start = 0
    for b, (q_len, prefix) in enumerate(zip(q_lens, prefixes, strict=True)):
        if not q_len:
            continue
        stop = start + q_len * (prefix + q_len)
        grid = mask[start:stop].reshape(q_len, prefix + q_len)
        grid[:, prefix:] = bits[bounds[b] : bounds[b + 1], :q_len]
        start = stop
    return mask


def retrieve_to_parents(next_token: Any, next_sibling: Any) -> Int64s:
    """Return the parents, (B, S), of trees given as first child and next sibling."""
    first, sibling = integers("next_token", next_token), integers("next_sibling", next_sibling)
    if first.ndim != 2 or first.shape != sibling.shape:
        raise ShapeError(f"next_token has shape {first.shape} and next_sibling {sibling.shape}; both must be (B, S).")
    size = first.shape[1]
    for name, links in (("next_token", first), ("next_sibling", sibling)):
        wrong = np.argwhere((links < -1) | (links == 0) | (links >= size))
        if wrong.size:
            b, i = wrong[0].tolist()
            raise InvalidArgumentError(
                f"{name}[{b}, {i}] is {links[b, i]}; it must be -1 for none, or a draft token from 1 to {size - 1}:"
                " token 0 is the root."
            )
    return np.array([_walk(first[b], sibling[b], b) for b in range(len(first))], np.int64).reshape(first.shape)


def parents_to_retrieve(parents: Int64s) -> tuple[Int64s, Int64s]:
    """Return first child and next sibling of trees, (B, S), children in ascending order."""
    next_token, next_sibling = np.full_like(parents, -1), np.full_like(parents, -1)
    for first, sibling, own in zip(next_token, next_sibling, parents, strict=True):
        for i in range(len(own) - 1, 0, -1):
            sibling[i] = first[own[i]]
            first[own[i]] = i
    return next_token, next_sibling


def dense_to_bits(dense: Any) -> Bools:
    """Return the rows of bits of square matrices, on the host."""
    matrices = [_square_bools(to_host(f"dense[{b}]", matrix), b) for b, matrix in enumerate(dense)]
    bits = np.zeros((sum(map(len, matrices)), max(map(len, matrices), default=0)), np.bool_)
    row = 0
    for matrix in matrices:
        bits[row : row + len(matrix), : len(matrix)] = matrix
        row += len(matrix)
    return bits


def split_parents(parents: Any, qo_indptr: Any) -> list[Int64s]:
    """Return the parents of each request, on the host."""
    host = integers("parents", parents)
    if host.ndim == 2:
        if qo_indptr is not None:
            raise InvalidArgumentError(
                f"parents has shape {host.shape} and qo_indptr was given too; flatten parents, or leave qo_indptr out."
            )
        return list(host)
    if host.ndim != 1:
        raise ShapeError(f"parents has shape {host.shape}; it must be (T,) or (B, S).")
    bounds = rows_bounds(qo_indptr, host.size, max_q=host.size)
    return [host[bounds[b] : bounds[b + 1]] for b in range(len(bounds) - 1)]


def check_parents(parents: Int64s, b: int, forest: bool) -> None:
    """Refuse parents of request `b` that do not come before their children, or a second root."""
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


def ancestors(parents: Int64s, b: int, forest: bool) -> Bools:
    """Return the square matrix in which a token sees itself and its ancestors."""
    check_parents(parents, b, forest)
    sees = np.eye(parents.size, dtype=np.bool_)
    for i, parent in enumerate(parents):
        if parent >= 0:
            sees[i] |= sees[parent]
    return sees


def request_bounds(qo_indptr: Any) -> list[int]:
    """Return where each request begins and ends, read from `qo_indptr` alone."""
    bounds = integers("qo_indptr", qo_indptr)
    if bounds.ndim != 1 or bounds.size == 0:
        raise ShapeError(f"qo_indptr has shape {bounds.shape}; it must be (B + 1,).")
    if bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise InvalidArgumentError(f"qo_indptr is {bounds.tolist()}; it must rise from 0.")
    return [int(bound) for bound in bounds]


def rows_bounds(qo_indptr: Any, num_tokens: int, max_q: int) -> list[int]:
    """Return where each request begins and ends among `num_tokens` rows, each at most `max_q`."""
    if qo_indptr is None:
        if num_tokens % max_q if max_q else num_tokens:
            raise InvalidArgumentError(
                f"{num_tokens} rows are no multiple of max_q {max_q}; pass qo_indptr to say where requests begin."
            )
        return list(range(0, num_tokens + 1, max_q)) if max_q else [0]
    bounds = request_bounds(qo_indptr)
    if bounds[-1] != num_tokens or max(_lens_of(bounds), default=0) > max_q:
        raise InvalidArgumentError(
            f"qo_indptr is {bounds}; it must rise from 0 to {num_tokens} by at most {max_q} a request."
        )
    return bounds


def zero_one(name: str, array: Any) -> Any:
    """Return a matrix of bools, or of integers 0 and 1, as bools."""
    if array.dtype == np.bool_:
        return array
    if array.dtype.kind not in "iu":
        raise ShapeError(f"{name} is {array.dtype}; it must be bool, or integers 0 and 1.")
    wrong = (array != 0) & (array != 1)
    if wrong.any():
        i, j = namespace(array).argwhere(wrong)[0].tolist()
        raise InvalidArgumentError(
            f"{name}[{i}, {j}] is {array[i, j]}; it must be 0 or 1: compare an additive mask with 0 first."
        )
    return array.astype(np.bool_)


def module_of(array: Any) -> str:
    """Return the name of the library that an array is of."""
    return type(array).__module__.partition(".")[0]


def namespace(array: Any) -> Any:
    """Return the module whose functions work on an array: CuPy for its own, else NumPy."""
    return sys.modules["cupy"] if module_of(array) == "cupy" else np


def own_array(name: str, array: Any) -> Any:
    """Return a CuPy array as it is and anything else as a NumPy array."""
    return array if module_of(array) == "cupy" else to_host(name, array)


def array_like(host: npt.NDArray[Any], like: Any) -> Any:
    """Return a NumPy array in the module of `like`, which is NumPy for anything that is no CuPy array."""
    return namespace(like).asarray(host)


def integers(name: str, array: Any) -> Int64s:
    """Copy integers to the host, as int64; an empty array may be of any type."""
    host = to_host(name, array)
    if host.size and host.dtype.kind not in "iu":
        raise ShapeError(f"{name} is {host.dtype}; it must hold integers.")
    return host.astype(np.int64)


def to_host(name: str, array: Any) -> npt.NDArray[Any]:
    """Return a NumPy array of whatever makes one; a CuPy array is copied."""
    try:
        return np.asarray(array.get() if module_of(array) == "cupy" else array)
    except ValueError as error:
        raise ShapeError(f"{name} makes no array: {error} Its rows must have one length.") from error


def _lens_of(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(bounds)]


def _lengths(name: str, array: Any, batch: int) -> list[int]:
    lens = integers(name, array)
    if lens.shape != (batch,):
        raise ShapeError(f"{name} has shape {lens.shape}; it must be ({batch},), one length for each request.")
    if (lens < 0).any():
        raise InvalidArgumentError(f"{name} is {lens.tolist()}; no length may be negative.")
    return [int(length) for length in lens]


def _no_bits(like: Any, q_lens: list[int]) -> Any:
    return namespace(like).zeros((sum(q_lens), max(q_lens, default=0)), np.bool_)


def _tail(sees: Any, b: int) -> Any:
    """Return the last columns of request `b`, as many as it has draft tokens; all before must be set."""
    q_len, kv_len = sees.shape
    prefix_len = kv_len - min(q_len, kv_len)
    prefix = sees[:, :prefix_len]
    if not prefix.all():
        i, token = namespace(sees).argwhere(~prefix)[0].tolist()
        raise UnsupportedError(
            f"draft token {i} of request {b} does not see token {token}, which comes before the last {q_len}; a"
            " TreeMask hides among the last q_len tokens only. A window over the prefix is not supported; if there is"
            " none, check the lengths and the order of bits."
        )
    return sees[:, prefix_len:]


def check_bitorder(bitorder: Any) -> None:
    """Refuse an order of bits that is not one of two."""
    if not isinstance(bitorder, str) or bitorder not in ("little", "big"):
        raise InvalidArgumentError(
            f"bitorder is {bitorder!r}; it must be 'little', which FlashInfer's kernels read, or 'big', the default of"
            " numpy.packbits and flashinfer.packbits."
        )


def check_mode(mode: Any, prefix_lens: Any) -> None:
    """Refuse a mode that SGLang does not have, or that does not go with the lengths of prefixes."""
    if not isinstance(mode, str) or mode not in SGLANG_MODES:
        raise InvalidArgumentError(f"mode is {mode!r}; it must be one of {', '.join(map(repr, SGLANG_MODES))}.")
    if mode == "full" and prefix_lens is None:
        raise InvalidArgumentError(
            'prefix_lens was left out; mode "full" has columns of the prefix: pass its length for each request.'
        )
    if mode != "full" and prefix_lens is not None:
        raise InvalidArgumentError(
            f'prefix_lens was given with mode "{mode}", which has no columns of the prefix; leave it out.'
        )


def _check_size(name: str, data: Any, needed: int, unit: str, causes: str) -> None:
    if data.size != needed:
        raise ShapeError(
            f"{name} has {data.size} and these requests need {needed} {unit}. Check {causes}, unpad what is padded, and"
            " slice a larger buffer."
        )


def _sglang_item(q_len: int) -> np.dtype[Any]:
    if q_len > BITS_PER_WORD:
        raise UnsupportedError(
            f'a request has {q_len} draft tokens; mode "qlen_only_bitpacking" holds at most {BITS_PER_WORD}: use mode'
            ' "qlen_only".'
        )
    return np.dtype(np.uint8 if q_len <= 8 else np.uint16 if q_len <= 16 else np.uint32)


def _sglang_items_to_words(items: Any, q_len: int) -> tuple[Any, int]:
    item = _sglang_item(q_len)
    if items.dtype.kind not in "iu" or items.dtype.itemsize != item.itemsize:
        raise ShapeError(f"mask is {items.dtype}; for {q_len} draft tokens SGLang packs a row into one {item}.")
    if items.size % q_len:
        raise ShapeError(f"mask has {items.size} rows, no multiple of draft_token_num {q_len}; slice a larger buffer.")
    words = items.view(item).astype(np.uint32).reshape(-1, 1)
    stray = words > np.uint32((1 << q_len) - 1)
    if stray.any():
        row = int(stray.argmax())
        raise InvalidArgumentError(
            f"row {row} of mask is {int(words[row, 0]):#x}, with a bit past the {q_len} of draft_token_num; check it."
        )
    return words, q_len


def _walk(first: Int64s, sibling: Int64s, b: int) -> list[int]:
    """Follow the links of request `b` from its root; every token must be met exactly once."""
    if not first.size:
        return []
    parents: dict[int, int] = {0: -1}
    if sibling[0] != -1:
        raise InvalidArgumentError(f"next_sibling[{b}, 0] is {sibling[0]}; token 0, the root, has none: write -1.")
    queue = [0]
    for parent in queue:
        child = int(first[parent])
        while child != -1:
            if child in parents:
                raise InvalidArgumentError(
                    f"the links of request {b} lead to draft token {child} twice, below {parents[child]} and below"
                    f" {parent}; in a tree each token is one other's child: the links hold a cycle or share a child."
                )
            parents[child] = parent
            queue.append(child)
            child = int(sibling[child])
    missing = [i for i in range(first.size) if i not in parents]
    if missing:
        raise InvalidArgumentError(
            f"no link of request {b} leads to draft tokens {missing[:8]}; all of its {first.size} must be reached from"
            " token 0: cut off padding, and check the drafter's scores for NaN."
        )
    return [parents[i] for i in range(first.size)]


def _square_bools(matrix: npt.NDArray[Any], b: int) -> Bools:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ShapeError(
            f"dense[{b}] has shape {matrix.shape}; it must be square: one row and one column a draft token. "
            "A single request's matrix goes into a list."
        )
    square: Bools = zero_one(f"dense[{b}]", matrix)
    return square
