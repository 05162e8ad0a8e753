"""Arrays of any library as views, streams of any library as CuPy's, and a whole call on tensors; no GPU is touched."""

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mlaflash
from mlaflash import attention, device, dlpack, interop, streams
from mlaflash.errors import InvalidArgumentError, ShapeError, UnsupportedError
from mlaflash.interop import ArrayView, as_cupy, device_view, numpy_view, ordinal_of
from mlaflash.streams import as_stream

cupy = pytest.importorskip("cupy")

DTYPES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "int32": 4,
    "int64": 8,
    "uint32": 4,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
}


class TorchDtype:
    """As torch spells and sizes it; hashed by identity."""

    def __init__(self, name: str) -> None:
        self.name_in_torch, self.itemsize = f"torch.{name}", DTYPES[name]

    def __str__(self) -> str:
        return self.name_in_torch


TORCH_DTYPES = {name: TorchDtype(name) for name in DTYPES}


class Tensor:
    """What is asked of a tensor of torch, over memory of the host."""

    def __init__(self, shape: Any, dtype: str = "float32", gpu: int | None = 0, **overrides: Any) -> None:
        itemsize = DTYPES[dtype]
        self.memory = np.zeros(shape, f"u{itemsize}")
        self.shape, self.dtype = tuple(shape), TORCH_DTYPES[dtype]
        self.strides = tuple(step // itemsize for step in self.memory.strides)
        self.is_cuda, self.gpu, self.device = gpu is not None, gpu, "cpu" if gpu is None else f"cuda:{gpu}"
        self.requires_grad, self.layout = False, "torch.strided"
        self.made_on: int | None = None
        vars(self).update(overrides)

    def data_ptr(self) -> int:
        return self.memory.ctypes.data if self.memory.size else 0

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def get_device(self) -> int:
        return -1 if self.gpu is None else self.gpu

    def new_empty(self, shape: Any, dtype: TorchDtype) -> "Tensor":
        made = Tensor(shape, str(dtype).removeprefix("torch."), self.gpu)
        made.made_on = Torch.current
        return made


class Torch:
    """What is asked of the module torch."""

    current = 0
    """Handle of the current stream."""

    def __init__(self) -> None:
        Torch.current = 0
        self.asked_for: list[int] = []
        vars(self).update(TORCH_DTYPES)
        self.cuda = SimpleNamespace(current_stream=self._current_stream, stream=self._stream, ExternalStream=External)

    def _current_stream(self, ordinal: int) -> Any:
        self.asked_for.append(ordinal)
        return SimpleNamespace(cuda_stream=Torch.current)

    @contextmanager
    def _stream(self, stream: "External") -> Iterator[None]:
        before, Torch.current = Torch.current, stream.cuda_stream
        yield
        Torch.current = before

    def arange(self, length: int, dtype: TorchDtype, device: str) -> Tensor:
        made = Tensor((length,), "int32", int(device.removeprefix("cuda:")))
        made.made_on = Torch.current
        return made


class External:
    def __init__(self, handle: int, device: int) -> None:
        self.cuda_stream, self.device_index = handle, device


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    module = Torch()
    monkeypatch.setitem(interop.sys.modules, "torch", module)
    return module


def cupy_array(shape: Any, dtype: Any = "float32", gpu: int = 0, strides: Any = None) -> Any:
    """Make a CuPy array whose memory is the host's: nobody looks at it."""
    memory = np.zeros(1 << 16, np.uint8)
    unowned = cupy.cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, gpu)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(unowned, 0), strides)


new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class Exporter:
    """An array that only DLPack leads to."""

    def __init__(self, *, versioned: bool, device: tuple[int, int] = (dlpack.CUDA, 0), **fields: Any) -> None:
        self.device, self.versioned = device, versioned
        self.asked: list[dict[str, Any]] = []
        rows, columns = fields.pop("shape", (3, 5))
        self.shape, self.steps = (ctypes.c_int64 * 2)(rows, columns), (ctypes.c_int64 * 2)(columns + 2, 1)
        code, bits, lanes = fields.pop("element", (2, 32, 1))
        tensor = dlpack._Tensor(
            4096, *device, 2, code, bits, lanes, self.shape, self.steps, fields.pop("byte_offset", 0)
        )
        if fields.pop("contiguous", False):
            tensor.strides = None
        if versioned:
            self.managed: Any = dlpack._Versioned(fields.pop("major", 1), 1, None, None, fields.pop("flags", 0), tensor)
        else:
            self.managed = dlpack._Managed(tensor, None, None)
        assert not fields

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **asked: Any) -> Any:
        self.asked.append(asked)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return new_capsule(ctypes.addressof(self.managed), name, None)


class OldExporter(Exporter):
    def __dlpack__(self, stream: int | None = None) -> Any:
        return super().__dlpack__(stream=stream)


class Interface:
    """An array that only ``__cuda_array_interface__`` leads to."""

    def __init__(self, **fields: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (3, 5),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
            "stream": 1,
        } | fields


@pytest.fixture
def pointers_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def place(ordinal: int) -> None:
        monkeypatch.setattr(interop, "pointer_ordinal", lambda ptr: ordinal)

    return place


# Views.


@pytest.mark.parametrize("name", DTYPES)
def test_g7_a_tensors_type_is_told_by_its_name(name: str) -> None:
    tensor = Tensor((4, 3), name)
    view = device_view("q", tensor, 0)
    assert view == ArrayView("q", tensor.data_ptr(), (4, 3), (3, 1), name, DTYPES[name], tensor)
    assert view.array is tensor


def test_e7_a_tensors_strides_are_kept() -> None:
    # q_nope of an absorbing bmm: heads are the outer axis in memory.
    view = device_view("q", Tensor((8, 4, 512), "bfloat16", strides=(512, 8 * 512, 1)), 0)
    assert view.strides == (512, 8 * 512, 1)
    assert type(view.shape) is type(view.strides) is tuple


def test_only_results_must_not_require_grad() -> None:
    view = device_view("q", Tensor((2,), requires_grad=True), 0)
    assert "detach" in view.read_only


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int32", "int64", "uint32", "uint8", "bool"])
def test_cupy_arrays(name: str) -> None:
    array = cupy_array((4, 3), getattr(ml_dtypes, name, name))
    view = device_view("q", array[:, ::2], 0)
    assert view[:6] == ("q", array.data.ptr, (4, 2), (3, 2), name, DTYPES[name])
    assert view.read_only == ""


def test_cupy_elements_must_be_whole() -> None:
    odd = cupy_array((2, 2), "float32", strides=(6, 4))
    with pytest.raises(ShapeError, match=r"strides of \(6, 4\) bytes for elements of 4"):
        device_view("q", odd, 0)
    # Remainders of 2 and -2 bytes do not cancel.
    with pytest.raises(ShapeError, match="multiples of the element"):
        device_view("q", cupy_array((2, 2), "float32", strides=(6, -6)), 0)
    with pytest.raises(ShapeError, match="other byte order"):
        numpy_view("q", np.zeros(2, ">f4"))


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize(
    ("element", "dtype", "itemsize"),
    [
        ((2, 32, 1), "float32", 4),
        ((2, 16, 1), "float16", 2),
        ((4, 16, 1), "bfloat16", 2),
        ((0, 32, 1), "int32", 4),
        ((0, 64, 1), "int64", 8),
        ((1, 32, 1), "uint32", 4),
        ((1, 8, 1), "uint8", 1),
        ((6, 8, 1), "bool", 1),
        ((10, 8, 1), "float8_e4m3fn", 1),
        ((12, 8, 1), "float8_e5m2", 1),
    ],
)
def test_dlpack_capsules(versioned: bool, element: Any, dtype: str, itemsize: int) -> None:
    array = Exporter(versioned=versioned, element=element, byte_offset=64)
    view = device_view("q", array, 0)
    assert view[:6] == ("q", 4096 + 64, (3, 5), (7, 1), dtype, itemsize)
    assert view.read_only == ""


def test_f4_dlpack_is_asked_for_no_synchronisation() -> None:
    array, old = Exporter(versioned=True), OldExporter(versioned=False)
    device_view("q", array, 0)
    device_view("q", old, 0)
    assert array.asked == [{"stream": -1, "max_version": (1, 0)}]
    assert old.asked == [{"stream": -1}]


def test_a_capsule_without_strides_is_contiguous() -> None:
    assert device_view("q", Exporter(versioned=True, contiguous=True), 0).strides == (5, 1)
    assert dlpack.contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert dlpack.contiguous_strides(()) == ()


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_numpys_own_capsules_are_read_and_left_to_numpy(max_version: tuple[int, int] | None) -> None:
    array = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]
    alive = weakref.ref(array)
    capsule = array.__dlpack__(max_version=max_version)
    layout = dlpack.read("a", capsule)
    assert layout == (array.ctypes.data, (3, 2), (4, 2), "int64", 8, (1, 0), "")
    assert dlpack.read("a", capsule) == layout
    del array
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None


def test_a_capsule_lives_as_long_as_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    class Host:
        """Memory of the host, whose export nothing but the capsule keeps alive."""

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **asked: Any) -> Any:
            array = np.zeros(3)
            exported.append(weakref.ref(array))
            return array.__dlpack__(max_version=asked["max_version"])

    exported: list[weakref.ref[Any]] = []
    monkeypatch.setattr(interop, "_ON_A_GPU", (1,))
    view = device_view("q", Host(), 0)
    gc.collect()
    assert exported[0]() is not None
    del view
    gc.collect()
    assert exported[0]() is None


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (Exporter(versioned=True, major=2), r"DLPack 2\.1; versions 0 and 1 are read"),
        (Exporter(versioned=True, element=(2, 32, 4)), "4 lanes"),
        (Exporter(versioned=True, element=(14, 8, 1)), "code 14"),
        (Exporter(versioned=True, element=(0, 4, 1)), "4 bits"),
        (Exporter(versioned=True, device=(1, 0)), "takes arrays on a GPU"),
        (Exporter(versioned=False, device=(10, 0)), "takes arrays on a GPU"),
        (np.zeros(3), r"q is a numpy.ndarray; .*emulator"),
        ([1, 2], r"q is a builtins.list"),
        (None, r"q is a builtins.NoneType"),
        (Tensor((2,), gpu=None), r"Tensor on cpu; .* \.cuda\(\)"),
        (Tensor((2,), data_ptr=lambda: 0), "without memory of its own"),
        (Interface(version=1), "of version 1; allowed are versions 2 and 3"),
        (Interface(mask=object()), "with a mask"),
    ],
)
def test_what_no_kernel_can_read_is_refused_by_name(
    array: Any, message: str, pointers_on: Callable[[int], None]
) -> None:
    pointers_on(0)
    with pytest.raises(ShapeError, match=message) as caught:
        device_view("q", array, 0)
    assert "q " in str(caught.value)


def test_a_failing_export_is_told() -> None:
    class Sharded(Exporter):
        def __dlpack_device__(self) -> Any:
            raise BufferError("only for unsharded arrays")

    array = Sharded(versioned=True)
    assert ordinal_of(array) is None
    with pytest.raises(ShapeError, match="only for unsharded arrays"):
        device_view("q", array, 0)


def test_a_sparse_tensor_is_told_from_a_strided_one() -> None:
    def refuse() -> int:
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    with pytest.raises(ShapeError, match=r"layout torch.sparse_coo .* to_dense"):
        device_view("q", Tensor((2,), data_ptr=refuse, layout="torch.sparse_coo"), 0)


def test_cuda_array_interface(pointers_on: Callable[[int], None]) -> None:
    pointers_on(1)
    contiguous = Interface()
    assert device_view("q", contiguous, 1)[:6] == ("q", 4096, (3, 5), (5, 1), "float32", 4)
    strided = device_view("q", Interface(strides=(40, 8), typestr="<i8", version=2, data=(4096, True)), 1)
    assert strided[:6] == ("q", 4096, (3, 5), (5, 1), "int64", 8)
    assert strided.read_only
    assert ordinal_of(contiguous) == 1
    # torch's bfloat16, where somebody hides a tensor behind this.
    assert device_view("q", Interface(typestr="<V2"), 1).dtype == "void16"


def test_an_interface_to_memory_of_the_host_is_refused(pointers_on: Callable[[int], None]) -> None:
    pointers_on(-2)
    assert ordinal_of(Interface()) is None
    with pytest.raises(ShapeError, match="of the host's memory; mla_verify takes arrays on a GPU"):
        device_view("q", Interface(), 0)
    empty = Interface(shape=(0, 5), data=(0, False))
    assert ordinal_of(empty) is None
    assert device_view("q", empty, 0).shape == (0, 5)


@pytest.mark.parametrize(
    "array",
    [
        cupy_array((3,), gpu=1),
        Tensor((3,), gpu=1),
        Exporter(versioned=True, device=(dlpack.CUDA, 1)),
        Exporter(versioned=False, device=(dlpack.CUDA_MANAGED, 0)),
        Interface(),
    ],
    ids=lambda array: type(array).__name__,
)
def test_another_gpu_is_refused_naming_both(array: Any, pointers_on: Callable[[int], None]) -> None:
    pointers_on(1)
    assert device_view("kv_lens", array, 1).name == "kv_lens"
    with pytest.raises(ShapeError, match="kv_lens lies on GPU 1 and the call runs on GPU 0, that of q"):
        device_view("kv_lens", array, 0)


def test_the_gpu_of_an_array() -> None:
    assert ordinal_of(cupy_array((3,), gpu=2)) == 2
    assert ordinal_of(Tensor((3,), gpu=3)) == 3
    assert ordinal_of(Exporter(versioned=True, device=(dlpack.CUDA, 4))) == 4
    for nowhere in (cupy_array((0,), gpu=2), Tensor((3,), gpu=None), np.zeros(3), [1], None):
        assert ordinal_of(nowhere) is None
    assert device_view("q", cupy_array((0, 2), gpu=2), 0).shape == (0, 2)


def test_a_view_becomes_a_cupy_array_of_the_same_memory() -> None:
    tensor = Tensor((4, 6), "int32", strides=(12, 1))
    array = as_cupy(device_view("mask", tensor, 0), 0)
    assert (array.data.ptr, array.shape, array.strides) == (tensor.data_ptr(), (4, 6), (48, 4))
    assert array.dtype == "int32"
    assert as_cupy(device_view("empty", Tensor((0, 6), "uint32"), 0), 0).shape == (0, 6)
    assert as_cupy(device_view("mask", array, 0), 0) is array
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None


# JAX.


class JaxArray(Exporter):
    pass


JaxArray.__module__ = "jaxlib._jax"


@pytest.mark.parametrize(("handle", "waiting"), [(0, 1), (7, 7)])
def test_jax_lets_the_launchs_stream_wait(handle: int, waiting: int) -> None:
    array = JaxArray(versioned=False)
    view = device_view("q", array, 0, SimpleNamespace(ptr=handle))
    # It would take -1 for a stream.
    assert [asked["stream"] for asked in array.asked] == [waiting]
    assert "immutable" in view.read_only


def test_jaxs_own_arrays_of_the_host_are_refused() -> None:
    jax = pytest.importorskip("jax")
    array = jax.numpy.ones(3, "bfloat16", device=jax.devices("cpu")[0])
    assert interop.is_jax(array)
    assert interop.dtype_name(jax.numpy.bfloat16) == "bfloat16"
    assert ordinal_of(array) is None
    with pytest.raises(ShapeError, match=r"ArrayImpl; mla_verify takes arrays on a GPU"):
        device_view("q", array, 0)

    def traced(q: Any) -> Any:
        with pytest.raises(ShapeError, match="Tracer; mla_verify takes arrays on a GPU"):
            device_view("q", q, 0)
        return q

    jax.jit(traced)(array)


def test_results_go_to_jax_by_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(array: Any) -> Any:
        return "jax", array

    monkeypatch.setitem(interop.sys.modules, "jax", SimpleNamespace(dlpack=SimpleNamespace(from_dlpack=take)))
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: cupy.cuda.Stream.null)
    memory = streams.memory_for(JaxArray(versioned=False), cupy.cuda.Stream.null, 0, is_current=True)
    assert memory.export is not None
    assert memory.export("out") == ("jax", "out")
    assert streams.memory_for(cupy_array((1,)), cupy.cuda.Stream.null, 0, is_current=True).export is None
    assert streams.memory_for(Interface(), cupy.cuda.Stream.null, 0, is_current=True).export is None


# Streams.


def test_cupys_streams_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    current = object()
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: current)
    assert as_stream(None, cupy_array((1,)), 0) is current
    assert as_stream(None, Interface(), 0) is current
    assert as_stream(cupy.cuda.Stream.null, cupy_array((1,)), 0) is cupy.cuda.Stream.null


def test_tensors_bring_torchs_current_stream(torch: Torch) -> None:
    Torch.current = 77
    assert as_stream(None, Tensor((1,), gpu=1), 1).ptr == 77
    assert torch.asked_for == [1]


class Protocol:
    device_index = 0

    def __init__(self, *answer: Any) -> None:
        self.answer = answer

    def __cuda_stream__(self) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (1234, 1234),
        (Protocol(0, 55), 55),
        (SimpleNamespace(cuda_stream=66), 66),
        (SimpleNamespace(ptr=67, device_id=-1), 67),
        (SimpleNamespace(cuda_stream=0, device_index=0), 0),
    ],
)
def test_streams_of_others(stream: Any, handle: int) -> None:
    found = as_stream(stream, cupy_array((1,)), 0)
    assert found.ptr == handle
    assert isinstance(found, cupy.cuda.Stream)
    # It belongs to no GPU, so that it can be entered on the current one, whichever that is.
    assert found.device_id == -1


def test_a_foreign_stream_lives_as_long_as_cupys() -> None:
    class Owned(Protocol):
        pass

    stream = Owned(0, 5)
    alive = weakref.ref(stream)
    found = as_stream(stream, cupy_array((1,)), 0)
    del stream
    gc.collect()
    assert alive() is not None
    del found
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (-1, "stream is -1"),
        (True, "stream is True"),
        (1.0, r"stream is 1\.0"),
        ("side", "stream is 'side'"),
        (object(), "must be a stream of CuPy or torch"),
        (SimpleNamespace(cuda_stream="x"), "must be a stream"),
        (Protocol(1, 55), "version 1"),
        (SimpleNamespace(cuda_stream=5, device_index=1), "stream is one of GPU 1 and the arrays lie on GPU 0"),
    ],
)
def test_other_streams_are_refused(stream: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        as_stream(stream, cupy_array((1,)), 0)


# Whole calls on tensors, but for the kernels.


class Launches:
    """In place of the kernels: what would be launched, and where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, current: int = 0) -> None:
        self.seen: list[tuple[Any, int, int]] = []
        self.current = [current]
        monkeypatch.setattr(attention, "current_ordinal", lambda: self.current[-1])
        monkeypatch.setattr(attention, "on_device", self.on_device)
        monkeypatch.setattr(attention.Device, "current", lambda ordinal: mlaflash.Device.for_arch("sm_120"))
        monkeypatch.setattr(attention.jit, "load", self.load)
        monkeypatch.setattr(attention, "PreparedLaunch", self.prepare)

    @contextmanager
    def on_device(self, ordinal: int) -> Iterator[None]:
        self.current.append(ordinal)
        yield
        self.current.pop()

    def load(self, kernel: str, *_: Any, **__: Any) -> Any:
        self.loaded_on = self.current[-1]
        return kernel

    def prepare(self, kernel: str, grid: Any, block: int, params: Any, *, is_dependent: bool) -> Any:
        return SimpleNamespace(launch=lambda stream: self.seen.append((params[0], stream, self.current[-1])))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, torch: Torch) -> Launches:
    return Launches(monkeypatch)


def call(gpu: int = 0, dtype: str = "bfloat16", **changes: Any) -> dict[str, Any]:
    return {
        "q": Tensor((8, 4, 576), dtype, gpu),
        "kv_cache": Tensor((40, 64, 576), dtype, gpu),
        "sm_scale": 0.14468,
        "kv_lens": Tensor((2,), "int32", gpu),
        "block_table": Tensor((2, 20), "int64", gpu),
        **changes,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_results_are_tensors_of_torchs_own_memory(launches: Launches, dtype: str) -> None:
    Torch.current = 9
    arguments = call(dtype=dtype)
    out, lse = mlaflash.mla_verify(**arguments)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
        (8, 4, 512),
        TORCH_DTYPES[dtype],
        (8, 4),
        TORCH_DTYPES["float32"],
    )
    assert out.made_on == lse.made_on == 9
    assert {stream for _, stream, _ in launches.seen} == {9}
    for params, *_ in launches.seen:
        assert params["q_nope"] == arguments["q"].data_ptr()
        assert params["block_table_stride"] == 20
        assert params["wide_ids"] == 1
        assert (params["out"], params["lse"]) == (out.data_ptr(), lse.data_ptr())


def test_what_lies_between_the_kernels_is_torchs_too(launches: Launches) -> None:
    # A graph keeps what torch allocates while it is captured; CuPy's pool knows of no graph.
    arguments = call()
    prepared = attention.prepare(**arguments)
    assert {"partial_out", "partial_lse"} <= prepared.workspaces.keys()
    assert {type(array) for array in prepared.workspaces.values()} == {Tensor}
    del arguments["block_table"]
    dense = attention.prepare(**arguments)
    assert dense.workspaces["page_ids"].shape == (2,)
    dense.launch()
    assert launches.seen[0][0]["page_ids"] == dense.workspaces["page_ids"].data_ptr()


@pytest.mark.parametrize("stream", [33, SimpleNamespace(cuda_stream=33), Protocol(0, 33)], ids=["int", "attr", "cuda"])
def test_memory_comes_in_the_order_of_the_given_stream(launches: Launches, stream: Any) -> None:
    Torch.current = 9
    arguments = call()
    del arguments["block_table"]
    prepared = attention.prepare(**arguments, stream=stream)
    prepared.launch()
    assert Torch.current == 9
    assert {seen for _, seen, _ in launches.seen} == {33}
    made = [prepared.out, prepared.lse, *prepared.workspaces.values()]
    assert {array.made_on for array in made} == {33}


def test_given_results_are_filled_in_place(launches: Launches) -> None:
    out, lse = Tensor((8, 4, 512), "float32"), cupy_array((8, 4))
    given = mlaflash.mla_verify(**call(), out=out, lse=lse)
    assert given[0] is out
    assert given[1] is lse
    params = launches.seen[0][0]
    assert (params["out"], params["lse"]) == (out.data_ptr(), lse.data.ptr)


def test_out_dtype_may_be_torchs(launches: Launches) -> None:
    assert mlaflash.mla_verify(**call(), out_dtype=TORCH_DTYPES["float32"])[0].dtype is TORCH_DTYPES["float32"]
    with pytest.raises(UnsupportedError, match="out_dtype"):
        mlaflash.mla_verify(**call(), out_dtype=TORCH_DTYPES["int32"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": Tensor((8, 4, 512), "bfloat16", requires_grad=True)}, r"out is read-only .* detach\(\)"),
        ({"lse": Tensor((8, 4), requires_grad=True)}, "lse is read-only"),
        ({"kv_lens": Tensor((2,), "int32", 1)}, "kv_lens lies on GPU 1 and the call runs on GPU 0"),
        ({"kv_lens": Tensor((2,), "int32", None)}, "kv_lens is a .* on cpu"),
        ({"q": Tensor((8, 4, 576), "bfloat16", None)}, "q is a .* on cpu"),
        ({"q": Tensor((8, 4, 576), "float8_e4m3fn")}, "q is float8_e4m3fn; allowed are"),
        ({"lse": JaxArray(versioned=False, shape=(8, 4))}, "lse is read-only .JAX arrays are immutable"),
        ({"lse": Exporter(versioned=True, shape=(8, 4), flags=1)}, "lse is read-only .its DLPack export says so"),
        ({"lse": Exporter(versioned=True, shape=(8, 4), flags=2)}, "lse is read-only .its DLPack export is a copy"),
        ({"out": Tensor((8, 4, 512), "bfloat16", 1)}, "out lies on GPU 1"),
    ],
)
def test_wrong_tensors_are_refused_before_any_launch(launches: Launches, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        mlaflash.mla_verify(**(call() | changes))
    assert launches.seen == []


def test_inputs_may_require_grad(launches: Launches) -> None:
    mlaflash.mla_verify(**call(q=Tensor((8, 4, 576), "bfloat16", requires_grad=True)))
    assert launches.seen


def test_f6_the_call_runs_on_the_gpu_of_q(launches: Launches, torch: Torch) -> None:
    mlaflash.mla_verify(**call(gpu=1))
    assert {ordinal for *_, ordinal in launches.seen} == {1}
    assert launches.loaded_on == 1
    assert launches.current == [0]
    assert set(torch.asked_for) == {1}


def test_a_pair_of_tensors(launches: Launches) -> None:
    rows = Tensor((8, 4, 576), "bfloat16")
    nope = Tensor((8, 4, 512), "bfloat16", strides=(2304, 576, 1), data_ptr=rows.data_ptr)
    rope = Tensor((8, 4, 64), "bfloat16", strides=(2304, 576, 1), data_ptr=lambda: rows.data_ptr() + 1024)
    out, _ = mlaflash.mla_verify(**call(q=(nope, rope)))
    assert isinstance(out, Tensor)
    params = launches.seen[0][0]
    assert (params["q_nope"], params["q_pe"]) == (rows.data_ptr(), rows.data_ptr() + 1024)
    assert params["q_pe_stride_t"] == 2304


def test_exported_results_leave_out_what_was_given(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    prepared = attention.prepare(**call())
    entered: list[str] = []

    @contextmanager
    def stream() -> Iterator[None]:
        entered.append("in")
        yield

    def export(array: Any) -> Any:
        return "exported", array

    exported = replace(prepared, exports=(export, None), stream=stream()).results()
    assert exported == (("exported", prepared.out), prepared.lse)
    assert entered == ["in"]


def test_on_device_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current_ordinal", lambda: 0)
    assert device.on_device(0) is device.HERE
    assert device.on_device(1) is not device.HERE
