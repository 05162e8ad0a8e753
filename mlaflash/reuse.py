"""Calls like one before: what was checked, chosen and made ready for that one serves again, at other addresses."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mlaflash.interop import fingerprint
from mlaflash.params import DL, PARAMS_DTYPE, numpy_dtype
from mlaflash.schedule import Workspace

CAPACITY: Final = 256
"""Calls that a thread remembers: those used last."""

# The kernels' pointer to each array; of rows, to the latent and the rope columns.
_POINTERS: Final = {
    "kv_lens": "kv_lens",
    "kv_indptr": "kv_indptr",
    "kv_indices": "page_ids",
    "block_table": "page_ids",
    "qo_indptr": "qo_indptr",
    "tail_lens": "tail_lens",
    "words": "mask_words",
    "out": "out",
    "lse": "lse",
}
_ROW_POINTERS: Final = {
    "q": ("q_nope", "q_pe"),
    "kv_cache": ("kv_c", "k_pe"),
    "new_kv": ("new_kv_c", "new_k_pe"),
}


def word_of(pointer: str) -> int:
    """Return the place of a pointer among the 64-bit words of the kernels' argument.

    Parameters
    ----------
    pointer : str
        A field of `mlaflash.params.PARAMS_DTYPE`.
    """
    fields: Mapping[str, Any] = PARAMS_DTYPE.fields or {}
    return int(fields[pointer][1]) // 8


_WORDS: Final = {name: word_of(pointer) for name, pointer in _POINTERS.items()}
_ROW_WORDS: Final = {name: (word_of(latent), word_of(rope)) for name, (latent, rope) in _ROW_POINTERS.items()}


@dataclass(frozen=True, slots=True)
class Reusable:
    """What is left of a call once its addresses are taken away.

    Attributes
    ----------
    ordinal : int
        CUDA's number of the GPU.
    out_shape : tuple of int
    out_dtype : str
    rope_offset : int
        Bytes from the latent to the rope columns of a fused row.
    workspaces : tuple of Workspace
        Memory between the kernels, new in every call.
    params : numpy.ndarray
        The kernels' argument, of this thread's calls alone.
    words : numpy.ndarray
        The same memory as 64-bit words.
    launches : tuple
        With `params` as their argument.
    """

    ordinal: int
    out_shape: tuple[int, ...]
    out_dtype: str
    rope_offset: int
    workspaces: tuple[Workspace, ...]
    params: npt.NDArray[np.void]
    words: npt.NDArray[np.uint64]
    launches: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        ordinal: int,
        out_shape: tuple[int, ...],
        out_dtype: str,
        dtype: str,
        workspaces: tuple[Workspace, ...],
        params: npt.NDArray[np.void],
        launches: tuple[Any, ...],
    ) -> Reusable:
        """Keep what a prepared call made.

        Parameters
        ----------
        ordinal : int
        out_shape : tuple of int
        out_dtype, dtype : str
            Of the result, and of q and the cache.
        workspaces : tuple of Workspace
        params : numpy.ndarray
        launches : tuple
        """
        rope_offset = DL * numpy_dtype(dtype).itemsize
        return cls(ordinal, out_shape, out_dtype, rope_offset, workspaces, params, params.view(np.uint64), launches)

    def point(self, addresses: Mapping[str, tuple[int, ...]], pointers: Mapping[str, int]) -> None:
        """Set the addresses of the next launch.

        Parameters
        ----------
        addresses : mapping of str to tuple of int
            Of the arrays by the name of the argument; two for a pair.
        pointers : mapping of str to int
            Of workspaces, by their pointer.
        """
        words = self.words
        for name, found in addresses.items():
            if name in _ROW_WORDS:
                latent, rope = _ROW_WORDS[name]
                words[latent] = found[0]
                words[rope] = found[1] if len(found) > 1 else found[0] + self.rope_offset
            else:
                words[_WORDS[name]] = found[0]
        for name, pointer in pointers.items():
            words[word_of(name)] = pointer


class Signature:
    """Where the arrays of a call lie, and a key that is equal for calls that differ in addresses alone.

    Parameters
    ----------
    arrays : mapping of str to array, pair or None
        By the names of the arguments.
    options : tuple
        All else that decides what the call does.
    locate : callable
        Of an array: its address and all else, as `mlaflash.interop.fingerprint`.

    Attributes
    ----------
    addresses : dict of str to tuple of int
    key : tuple or None
        None where an array is of a library that takes longer to ask.
    """

    __slots__ = ("addresses", "key")

    def __init__(
        self,
        arrays: Mapping[str, Any],
        options: tuple[Hashable, ...],
        locate: Callable[[Any], tuple[int, Hashable] | None] = fingerprint,
    ) -> None:
        self.addresses: dict[str, tuple[int, ...]] = {}
        self.key: tuple[Hashable, ...] | None = None
        key: list[Hashable] = [options]
        for name, array in arrays.items():
            if array is None:
                continue
            found = [locate(piece) for piece in _pieces(array)]
            if any(one is None for one in found):
                return
            self.addresses[name] = addresses = tuple(one[0] for one in found)  # type: ignore[index]
            # Rope columns right behind the latent ones are another kernel's than those that lie elsewhere.
            gap = addresses[1] - addresses[0] if len(addresses) == 2 else 0
            key.append((name, gap, *(one[1] for one in found)))  # type: ignore[index]
        self.key = tuple(key)


def _pieces(array: Any) -> Iterator[Any]:
    if isinstance(array, tuple | list):
        yield from array
    else:
        yield array


class _Memory(threading.local):
    """Of one thread: its calls share the memory of their arguments."""

    def __init__(self) -> None:
        self.calls: OrderedDict[Hashable, Reusable] = OrderedDict()


_memory = _Memory()


def recall(signature: Signature) -> Reusable | None:
    """Return what an equal call of this thread left, if there was one.

    Parameters
    ----------
    signature : Signature
    """
    if signature.key is None:
        return None
    try:
        found = _memory.calls.get(signature.key)
    except TypeError:  # an option that cannot be hashed is none that is allowed
        return None
    if found is not None:
        _memory.calls.move_to_end(signature.key)
    return found


def remember(signature: Signature, reusable: Reusable) -> None:
    """Keep what a call made ready, for equal calls of this thread.

    Parameters
    ----------
    signature : Signature
    reusable : Reusable
    """
    if signature.key is None:
        return
    _memory.calls[signature.key] = reusable
    if len(_memory.calls) > CAPACITY:
        _memory.calls.popitem(last=False)


def forget() -> None:
    """Forget this thread's calls: what the environment says is asked again."""
    _memory.calls.clear()
