"""The caller's stream, and memory in the order of it, whichever library the caller works with."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from mlaflash.errors import InvalidArgumentError
from mlaflash.interop import is_cupy, is_tensor, library_name

_HERE = nullcontext()


class _Handle:
    """A stream by its handle, in CUDA's stream protocol."""

    __slots__ = ("owner", "ptr")

    def __init__(self, ptr: int, owner: Any) -> None:
        self.ptr = ptr
        self.owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


def as_stream(stream: Any, q: Any, ordinal: int) -> Any:
    """Give the stream that a call runs on as CuPy's, without an event and without waiting.

    Parameters
    ----------
    stream : object or None
        A CuPy stream; the handle of a ``cudaStream_t`` as an integer; an object with ``__cuda_stream__``,
        ``cuda_stream`` or ``ptr``, such as a stream of torch. None is the current stream of the library of `q` on that
        GPU: torch's for a tensor, else CuPy's.
    q : array
        Decides what None means.
    ordinal : int
        CUDA's number of the GPU, the current one.

    Returns
    -------
    cupy.cuda.Stream
        Owns nothing but CuPy's own streams; keeps `stream` alive.

    Raises
    ------
    InvalidArgumentError
        It is no stream, or one of another GPU.
    """
    import cupy

    if stream is None:
        if is_tensor(q):
            return _stream_of(sys.modules["torch"].cuda.current_stream(ordinal).cuda_stream)
        return cupy.cuda.get_current_stream()
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return _stream_of(stream)
    home = getattr(stream, "device_id", getattr(stream, "device_index", None))
    # A stream without a GPU of its own, such as the default one, says -1.
    if isinstance(home, int) and home not in (-1, ordinal):
        raise InvalidArgumentError(
            f"stream is one of GPU {home} and the arrays lie on GPU {ordinal}; both must be on one GPU. Give a stream "
            "of that one."
        )
    if isinstance(stream, cupy.cuda.Stream | cupy.cuda.ExternalStream):
        return stream
    return cupy.cuda.Stream.from_external(_Handle(_handle(stream), stream))


def _handle(stream: Any) -> int:
    if hasattr(stream, "__cuda_stream__"):
        version, handle = stream.__cuda_stream__()
        if version != 0:
            raise InvalidArgumentError(
                f"stream speaks version {version} of CUDA's stream protocol; version 0 is read. Give its handle, an "
                "integer."
            )
    else:
        handle = getattr(stream, "cuda_stream", None)
        if handle is None:
            handle = getattr(stream, "ptr", None)
    if not isinstance(handle, int) or isinstance(handle, bool) or handle < 0:
        raise InvalidArgumentError(
            f"stream is {stream!r}; it must be a stream of CuPy or torch, an object with __cuda_stream__, or the "
            "handle of one, an integer of at least 0."
        )
    return handle


@functools.lru_cache(maxsize=64)
def _stream_of(handle: int) -> Any:
    """Give a handle as CuPy's stream: no more than the number, which is no older tomorrow."""
    import cupy

    return cupy.cuda.Stream.from_external(_Handle(handle, None))


class Memory(NamedTuple):
    """Where new arrays of a call come from: the allocator of q's library, in the order of the call's stream.

    An allocator hands memory back in the order of one stream: that of the launches must be it. torch's also keeps what
    is allocated while a graph is captured for as long as the graph lives.

    Attributes
    ----------
    scope : context manager
        To allocate in.
    empty : callable
        Of a shape and a type's name.
    arange : callable
        Of a length; int32.
    address : callable
        Of an array that it made.
    export : callable or None
        Turns a result into an array of q's library, within the scope and after the launches; None where it is one.
    """

    scope: AbstractContextManager[Any]
    empty: Callable[[tuple[int, ...], str], Any]
    arange: Callable[[int], Any]
    address: Callable[[Any], int]
    export: Callable[[Any], Any] | None


def memory_for(q: Any, stream: Any, ordinal: int, *, is_current: bool) -> Memory:
    """Choose the allocator for the results of a call and for what lies between its kernels.

    Parameters
    ----------
    q : array
        Its library's.
    stream : cupy.cuda.Stream
        Of the launches.
    ordinal : int
        CUDA's number of the GPU, the current one.
    is_current : bool
        Whether the stream is known to be the current one of that library.
    """
    if is_tensor(q):
        return _torch_memory(q, None if is_current else stream.ptr, ordinal)
    import cupy

    return Memory(stream, cupy.empty, _cupy_arange, _cupy_address, None if is_cupy(q) else _exporter(q))


def _cupy_arange(length: int) -> Any:
    import cupy

    return cupy.arange(length, dtype="int32")


def _cupy_address(array: Any) -> int:
    return int(array.data.ptr)


def _exporter(q: Any) -> Callable[[Any], Any] | None:
    """Find the function that takes an array over through DLPack into the library of `q`; None where it has none."""
    module: Any = sys.modules.get(library_name(q))
    for place in (module, getattr(module, "dlpack", None)):
        function: Callable[[Any], Any] | None = getattr(place, "from_dlpack", None)
        if function is not None:
            return function
    return None


def _torch_memory(q: Any, handle: int | None, ordinal: int) -> Memory:
    torch = sys.modules["torch"]
    scope: AbstractContextManager[Any] = _HERE
    if handle is not None and handle != torch.cuda.current_stream(ordinal).cuda_stream:
        scope = torch.cuda.stream(torch.cuda.ExternalStream(handle, device=ordinal))

    def empty(shape: tuple[int, ...], dtype: str) -> Any:
        return q.new_empty(shape, dtype=getattr(torch, dtype))

    def arange(length: int) -> Any:
        return torch.arange(length, dtype=torch.int32, device=q.device)

    return Memory(scope, empty, arange, _torch_address, None)


def _torch_address(tensor: Any) -> int:
    return int(tensor.data_ptr())
