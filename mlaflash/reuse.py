"""Calls like one before: what was checked, chosen and made ready for that one serves again, at other addresses."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mlaflash.interop import fingerprint
from mlaflash.params import PARAMS_DTYPE
from mlaflash.schedule import Workspace

T = TypeVar("T")

CAPACITY: Final = 256
"""Calls that a thread remembers, and layouts that a plan does."""

# The kernels' pointer to each array; of rows, to the latent and the rope columns.
_POINTERS: Final = {
    "kv_lens": "kv_lens",
    "kv_indptr": "kv_indptr",
    "kv_indices": "page_ids",
    "block_table": "page_ids",
    "indices": "page_ids",
    "topk_lens": "kv_lens",
    "qo_indptr": "qo_indptr",
    "tail_lens": "tail_lens",
    "words": "mask_words",
    "kv_scale": "kv_scale",
    "out": "out",
    "lse": "lse",
}
_ROW_POINTERS: Final = {
    "q": ("q_nope", "q_pe"),
    "kv_cache": ("kv_c", "k_pe"),
    "new_kv": ("new_kv_c", "new_k_pe"),
}


_POINTER_WORDS: Final = {
    name: offset // 8 for name, (dtype, offset, *_) in (PARAMS_DTYPE.fields or {}).items() if dtype == np.uint64
}
"""Place of each pointer among the 64-bit words of the kernels' argument."""

_WORDS: Final = {name: _POINTER_WORDS[pointer] for name, pointer in _POINTERS.items()}
_ROW_WORDS: Final = {
    name: (_POINTER_WORDS[latent], _POINTER_WORDS[rope]) for name, (latent, rope) in _ROW_POINTERS.items()
}


@dataclass(frozen=True, slots=True)
class Reusable:
    """What is left of a call once its addresses are taken away.

    Attributes
    ----------
    ordinal : int
        CUDA's number of the GPU.
    out_shape : tuple of int
    out_dtype : str
    rope_offsets : dict of str to int
        Bytes from the latent to the rope columns of a fused row, by the name of the argument.
    workspaces : tuple of Workspace
        Memory between the kernels, new in every call.
    params : numpy.ndarray
        The kernels' argument, of this thread's calls alone.
    words : memoryview
        The same memory as 64-bit words.
    launches : tuple
        With `params` as their argument.
    """

    ordinal: int
    out_shape: tuple[int, ...]
    out_dtype: str
    rope_offsets: dict[str, int]
    workspaces: tuple[Workspace, ...]
    params: npt.NDArray[np.void]
    words: memoryview[int]
    launches: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        ordinal: int,
        out_shape: tuple[int, ...],
        out_dtype: str,
        rope_offsets: dict[str, int],
        workspaces: tuple[Workspace, ...],
        params: npt.NDArray[np.void],
        launches: tuple[Any, ...],
    ) -> Reusable:
        """Keep what a prepared call made.

        Parameters
        ----------
        ordinal : int
        out_shape : tuple of int
        out_dtype : str
        rope_offsets : dict of str to int
        workspaces : tuple of Workspace
        params : numpy.ndarray
        launches : tuple
        """
        words = memoryview(params.view(np.uint64).data)
        return cls(ordinal, out_shape, out_dtype, rope_offsets, workspaces, params, words, launches)

    def point(self, addresses: Mapping[str, Any], pointers: Mapping[str, int]) -> None:
        """Set the addresses of the next launch.

        Parameters
        ----------
        addresses : mapping of str to int or pair of int
            Of the arrays by the name of the argument.
        pointers : mapping of str to int
            Of workspaces, by their pointer.
        """
        words = self.words
        for name, address in addresses.items():
            word = _WORDS.get(name)
            if word is not None:
                words[word] = address
                continue
            latent, rope = _ROW_WORDS[name]
            if isinstance(address, int):
                words[latent], words[rope] = address, address + self.rope_offsets[name]
            else:
                words[latent], words[rope] = address
        for name, pointer in pointers.items():
            words[_POINTER_WORDS[name]] = pointer


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
    addresses : dict of str to int or pair of int
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
        addresses: dict[str, int | tuple[int, int]] = {}
        self.addresses = addresses
        self.key: tuple[Hashable, ...] | None = None
        key: list[Hashable] = [options]
        for name, array in arrays.items():
            if array is None:
                key.append(None)
            elif isinstance(array, tuple | list):
                found = [locate(piece) for piece in array]
                if len(found) != 2 or found[0] is None or found[1] is None:
                    return
                latent, rope = found[0][0], found[1][0]
                addresses[name] = latent, rope
                # Rope columns right behind the latent ones are another kernel's than those that lie elsewhere.
                key.append((rope - latent, found[0][1], found[1][1]))
            else:
                one = locate(array)
                if one is None:
                    return
                addresses[name] = one[0]
                key.append(one[1])
        self.key = tuple(key)


class Recent(Generic[T]):
    """What was made ready for the `CAPACITY` keys that were used last."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable) -> T | None:
        """Return what was put for a key; None where there is nothing, or no more.

        Parameters
        ----------
        key : hashable
        """
        found = self._found.get(key)
        if found is not None:
            self._found.move_to_end(key)
        return found

    def put(self, key: Hashable, found: T) -> None:
        """Keep something for a key.

        Parameters
        ----------
        key : hashable
        found : Reusable, or another
        """
        self._found[key] = found
        if len(self._found) > CAPACITY:
            self._found.popitem(last=False)


class _Memory(threading.local):
    """Of one thread: its calls share the memory of their arguments."""

    def __init__(self) -> None:
        self.calls: Recent[Reusable] = Recent()


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
        return _memory.calls.get(signature.key)
    except TypeError:  # an option that cannot be hashed is none that is allowed
        return None


def remember(signature: Signature, reusable: Reusable) -> None:
    """Keep what a call made ready, for equal calls of this thread.

    Parameters
    ----------
    signature : Signature
    reusable : Reusable
    """
    if signature.key is not None:
        _memory.calls.put(signature.key, reusable)


def forget() -> None:
    """Forget this thread's calls: what the environment says is asked again."""
    _memory.calls = Recent()
