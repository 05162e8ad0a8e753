"""Arrays as the kernels see them: an address, a shape, strides and an element type.

Arrays on a GPU may belong to any library. None is imported for it, and none is asked to wait for anything: work on the
arrays is ordered by the stream that it runs on. JAX alone, whose arrays belong to no stream of the caller's, lets the
launch's stream wait for them on the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from mlaflash import dlpack
from mlaflash.device import current_ordinal, pointer_ordinal
from mlaflash.errors import MlaFlashError, ShapeError
from mlaflash.params import numpy_dtype

_LEGACY_STREAM = 1
_NO_SYNC = -1
_MAX_WORK: Any = 10_000  # steps of NumPy's search for a common byte
_ON_A_GPU = (dlpack.CUDA, dlpack.CUDA_MANAGED)


class ArrayView(NamedTuple):
    """Where an array lies.

    Attributes
    ----------
    name : str
        The caller's name for it, used in messages.
    ptr : int
        Address of element 0.
    shape, strides : tuple of int
        Strides count elements.
    dtype : str
        NumPy's name of the element type; ``"bfloat16"`` and ``"float8_e4m3fn"`` are those of `ml_dtypes`.
    itemsize : int
        Bytes of an element.
    array : object
        The array itself, or what else keeps its memory alive as long as the view.
    read_only : str
        Why it must not be written; empty where it may be.
    """

    name: str
    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    array: Any
    read_only: str = ""

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


def dtype_name(dtype: Any) -> str:
    """Spell an element type of NumPy, torch or JAX as NumPy does.

    Parameters
    ----------
    dtype : dtype or type
    """
    try:
        name: str = np.dtype(dtype).name
    except TypeError:
        name = str(dtype).rpartition(".")[2]  # torch.bfloat16
    return name


# Name and bytes of the element types seen so far: libraries take longer to tell them than all else takes.
_elements: dict[Any, tuple[str, int]] = {}


def _element(name: str, dtype: Any) -> tuple[str, int]:
    known = _elements.get(dtype)
    if known is None:
        if not getattr(dtype, "isnative", True):
            raise ShapeError(
                f"{name} is {dtype.str}, of the other byte order than this machine's; the kernels read its own. "
                "Convert it with astype(dtype.newbyteorder('='))."
            )
        known = _elements[dtype] = dtype_name(dtype), dtype.itemsize
    return known


def _view(
    name: str, array: Any, ptr: int, shape: tuple[int, ...], byte_strides: tuple[int, ...], dtype: Any, read_only: str
) -> ArrayView:
    """View an array whose elements a kernel can load one by one."""
    element, itemsize = _element(name, dtype)
    # A type without bytes is no number's: whoever asked for the view refuses it by name.
    step = itemsize or 1
    strides = tuple([stride // step for stride in byte_strides])
    # Remainders are never negative, so that their sum is 0 where each of them is.
    if sum(byte_strides) != step * sum(strides) or (ptr % step and 0 not in shape):
        raise ShapeError(
            f"{name} begins at address {ptr:#x} and has strides of {byte_strides} bytes for elements of {step}; "
            "address and strides must be multiples of the element. Copy it."
        )
    return ArrayView(name, ptr, shape, strides, element, itemsize, array, read_only)


def numpy_view(name: str, array: Any) -> ArrayView:
    """View a NumPy array, for the emulator.

    Parameters
    ----------
    name : str
        The caller's name for it.
    array : numpy.ndarray

    Raises
    ------
    ShapeError
        It is something else, or its elements are not whole ones of this machine's byte order.
    """
    # What a masked array hides, the kernels would read.
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise ShapeError(
            f"{name} is a {_kind(array)}; the emulator takes NumPy arrays. Call mlaflash.mla_verify for arrays on a "
            "GPU."
        )
    read_only = "" if array.flags.writeable else "its flags say so"
    return _view(name, array, array.ctypes.data, array.shape, array.strides, array.dtype, read_only)


def device_view(name: str, array: Any, ordinal: int | None = None, stream: Any = None) -> ArrayView:
    """View an array on a GPU, whichever library it is of.

    Parameters
    ----------
    name : str
        The caller's name for it.
    array : cupy.ndarray, torch.Tensor, jax.Array, or object with ``__dlpack__`` or ``__cuda_array_interface__``
    ordinal : int or None
        CUDA's number of the GPU that it must lie on; None is CuPy's current one.
    stream : cupy.cuda.Stream or None
        That of the launch to come, for JAX arrays; None is CuPy's current one.

    Raises
    ------
    ShapeError
        It is no such array, lies on the host or on another GPU, or has no strided memory of whole elements.
    """
    if is_cupy(array):
        memory = array.data
        home = memory.device_id
        view = _view(name, array, memory.ptr, array.shape, array.strides, array.dtype, "")
    elif is_tensor(array):
        view, home = _tensor_view(name, array)
    elif hasattr(array, "__dlpack_device__"):
        view, home = _dlpack_view(name, array, stream)
    elif hasattr(array, "__cuda_array_interface__"):
        view, home = _interface_view(name, array)
    else:
        raise _not_on_a_gpu(name, array)
    wanted = current_ordinal() if ordinal is None else ordinal
    if home != wanted and 0 not in view.shape:
        raise ShapeError(
            f"{name} lies on GPU {home} and the call runs on GPU {wanted}{'' if ordinal is None else ', that of q'}; "
            "all arrays must lie on the same. Copy it there."
        )
    return view


def ordinal_of(array: Any) -> int | None:
    """Tell on which GPU an array lies, by CUDA's number; None for what no kernel can read.

    Parameters
    ----------
    array : object
        As in `device_view`.
    """
    if is_cupy(array):
        return int(array.data.device_id) if array.size else None
    if is_tensor(array):
        return int(array.get_device()) if array.is_cuda else None
    try:
        if hasattr(array, "__dlpack_device__"):
            kind, ordinal = array.__dlpack_device__()
            return int(ordinal) if kind == dlpack.CUDA else None
        if hasattr(array, "__cuda_array_interface__"):
            view, home = _interface_view("q", array)
            return None if 0 in view.shape else home
    except (BufferError, RuntimeError, MlaFlashError):
        pass  # the view says why
    return None


def _span(view: ArrayView) -> tuple[int, int]:
    """Return the first byte of an array with elements, and the one behind its last."""
    steps = [(length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True)]
    first, last = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    return view.ptr + first * view.itemsize, view.ptr + (last + 1) * view.itemsize


def _same_memory(view: ArrayView) -> np.ndarray[Any, Any]:
    """Make an array that lies where another does, never to be looked into."""
    interface = {
        "data": (view.ptr, True),
        "shape": view.shape,
        "strides": tuple(stride * view.itemsize for stride in view.strides),
        "typestr": f"|V{view.itemsize}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def share_memory(one: ArrayView, other: ArrayView) -> bool:
    """Whether two arrays have a byte in common, wherever they lie; True too where that is hard to tell.

    Parameters
    ----------
    one, other : ArrayView
    """
    if 0 in one.shape or 0 in other.shape:
        return False
    (begin, end), (other_begin, other_end) = _span(one), _span(other)
    if end <= other_begin or other_end <= begin:
        return False
    # Two views of one buffer may lie between each other, as slices of its last axis do.
    try:
        return np.shares_memory(_same_memory(one), _same_memory(other), max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True


def require_apart(results: Iterable[ArrayView], inputs: Iterable[ArrayView]) -> None:
    """Refuse results whose elements lie on each other, or on what is read.

    Parameters
    ----------
    results, inputs : iterable of ArrayView

    Raises
    ------
    ShapeError
        Naming the two arrays.
    """
    given, written = list(inputs), list(results)
    for place, result in enumerate(written):
        room = 1
        for stride, length in sorted((abs(s), n) for s, n in zip(result.strides, result.shape, strict=True) if n > 1):
            if stride < room and 0 not in result.shape:
                raise ShapeError(
                    f"{result.name} has strides {result.strides} (in elements) over shape {result.shape}, so that some "
                    "of its elements lie on each other. Give memory for each."
                )
            room += (length - 1) * stride
        for other in (*written[:place], *given):
            if share_memory(result, other):
                raise ShapeError(
                    f"{result.name} shares memory with {other.name}, and is written while that is in use. Give it "
                    "memory of its own."
                )


def is_cupy(array: Any) -> bool:
    """Whether this is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def is_tensor(array: Any) -> bool:
    """Whether this is a tensor of torch, by what it can do."""
    return hasattr(array, "is_cuda")


def fingerprint(array: Any) -> tuple[int, Hashable] | None:
    """Return an array's address, and all else that decides what a call does with it; None where that takes longer.

    Parameters
    ----------
    array : object

    Returns
    -------
    tuple or None
        For CuPy arrays and tensors of torch. The second can be hashed: shape, strides, element type, GPU, alignment.
    """
    if is_cupy(array):
        memory = array.data
        ptr = memory.ptr
        return ptr, (array.shape, array.strides, array.dtype, memory.device_id, ptr & 15)
    if is_tensor(array):
        try:
            ptr, strides = array.data_ptr(), array.stride()
        except RuntimeError:  # no strided memory: whoever views it says so
            return None
        return ptr, (array.shape, strides, array.dtype, array.get_device(), array.requires_grad, ptr & 15)
    return None


def is_jax(array: Any) -> bool:
    """Whether this is a JAX array."""
    return library_name(array) == "jax"


def library_name(array: Any) -> str:
    """Name the module that an array's library is imported by."""
    root = type(array).__module__.partition(".")[0]
    return "jax" if root == "jaxlib" else root


def _tensor_view(name: str, tensor: Any) -> tuple[ArrayView, int]:
    if not tensor.is_cuda:
        raise _not_on_a_gpu(name, tensor, f" on {tensor.device}")
    try:
        ptr, shape, strides = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
    except RuntimeError as error:
        raise ShapeError(
            f"{name} is a tensor of layout {tensor.layout} without strides ({str(error).splitlines()[0]}); the kernels "
            "read strided memory. Convert it with to_dense() or to_padded_tensor()."
        ) from error
    if not ptr and 0 not in shape:
        raise ShapeError(
            f"{name} is a {_kind(tensor)} of layout {tensor.layout} without memory of its own, such as a fake, nested "
            "or distributed one; give the tensor that holds the data, and call "
            "mlaflash.integrations.torch.mla_verify in code that torch traces."
        )
    read_only = "it requires grad: give its detach()" if tensor.requires_grad else ""
    view = ArrayView(name, ptr, shape, strides, *_element(name, tensor.dtype), tensor, read_only)
    return view, tensor.get_device()


def _dlpack_view(name: str, array: Any, stream: Any) -> tuple[ArrayView, int]:
    capsule = _capsule(name, array, stream)
    layout = dlpack.read(name, capsule)
    kind, home = layout.device
    if kind not in _ON_A_GPU:
        raise _not_on_a_gpu(name, array)
    if kind == dlpack.CUDA_MANAGED:
        home = pointer_ordinal(layout.ptr)
    read_only = layout.read_only
    if is_jax(array):
        read_only = "JAX arrays are immutable: leave it out, and take what the call returns"
    keeper = (array, capsule)
    return ArrayView(
        name, layout.ptr, layout.shape, layout.strides, layout.dtype, layout.itemsize, keeper, read_only
    ), home


def _capsule(name: str, array: Any, stream: Any) -> Any:
    try:
        if array.__dlpack_device__()[0] in _ON_A_GPU:
            # JAX takes -1, no synchronisation, for a stream like any other.
            handle = _legacy_or(stream) if is_jax(array) else _NO_SYNC
            try:
                return array.__dlpack__(stream=handle, max_version=dlpack.VERSION)
            except TypeError:  # a library from before version 1.0
                return array.__dlpack__(stream=handle)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ShapeError(
            f"{name} is a {_kind(array)} that does not export itself through DLPack: {error}. Pass a CuPy array or a "
            "torch tensor."
        ) from error
    raise _not_on_a_gpu(name, array)


def _legacy_or(stream: Any) -> int:
    """Give a stream as DLPack counts them, for which 0 is none."""
    if stream is None:
        import cupy

        stream = cupy.cuda.get_current_stream()
    return int(stream.ptr) or _LEGACY_STREAM


def _interface_view(name: str, array: Any) -> tuple[ArrayView, int]:
    interface = array.__cuda_array_interface__
    if interface.get("version", 0) < 2 or interface.get("mask") is not None:
        raise ShapeError(
            f"{name} has a __cuda_array_interface__ of version {interface.get('version')}"
            f"{'' if interface.get('mask') is None else ' with a mask'}; allowed are versions 2 and 3 without one. "
            "Pass a CuPy array."
        )
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    ptr, is_read_only = interface["data"]
    byte_strides = interface.get("strides")
    if byte_strides is None:
        byte_strides = tuple(dtype.itemsize * stride for stride in dlpack.contiguous_strides(shape))
    read_only = "its __cuda_array_interface__ says so" if is_read_only else ""
    home = -1 if 0 in shape else pointer_ordinal(ptr)
    if home < 0 and 0 not in shape:
        raise _not_on_a_gpu(name, array, " of the host's memory")
    return _view(name, array, ptr, shape, tuple(byte_strides), dtype, read_only), home


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"


def _not_on_a_gpu(name: str, array: Any, where: str = "") -> ShapeError:
    if isinstance(array, np.ndarray):
        hint = "Call mlaflash.emulator.mla_verify for NumPy arrays, or copy it with cupy.asarray."
    elif hasattr(array, "is_cuda"):
        hint = "Copy it with .cuda()."
    else:
        hint = "Make it one of those."
    return ShapeError(
        f"{name} is a {_kind(array)}{where}; mla_verify takes arrays on a GPU: of CuPy, torch or JAX, or with "
        f"__dlpack__ or __cuda_array_interface__. {hint}"
    )


def as_cupy(view: ArrayView, ordinal: int | None = None) -> Any:
    """Give an array on a GPU as a CuPy array of the same memory.

    Parameters
    ----------
    view : ArrayView
        Of `device_view`.
    ordinal : int or None
        CUDA's number of the GPU; None is CuPy's current one.

    Returns
    -------
    cupy.ndarray
    """
    if is_cupy(view.array):
        return view.array
    import cupy

    dtype = numpy_dtype(view.dtype)
    extent = 0 if 0 in view.shape else 1 + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    home = current_ordinal() if ordinal is None else ordinal
    memory = cupy.cuda.UnownedMemory(view.ptr, extent * view.itemsize, view.array, home)
    strides = tuple(stride * view.itemsize for stride in view.strides)
    return cupy.ndarray(view.shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def to_host(view: ArrayView) -> np.ndarray[Any, Any]:
    """Copy an array to the host; with a GPU this synchronises CuPy's current stream."""
    array = view.array
    host: np.ndarray[Any, Any] = array if isinstance(array, np.ndarray) else as_cupy(view).get()
    return host
