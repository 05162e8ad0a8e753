"""Arrays of CuPy, torch, JAX and others on a GPU: the same bits whichever library they are of, on its stream."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from verify_cases import BASE

import mlaflash
from mlaflash import TreeMask, oracle
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.tiles import TileConfig

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The pynvml package:FutureWarning")]

TREE = replace(BASE, name="tree", q_lens=(8, 8), kv_lens=(700, 1300), mask="tree", dtype="bfloat16")
# About 50 ms: what does not wait for its stream comes before it.
LONG = 100_000_000


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def map_arrays(convert: Callable[[np.ndarray[Any, Any]], Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert the arrays of a call, but for the words of a mask, which become CuPy's."""
    import cupy

    def one(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return convert(value)
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        if isinstance(value, TreeMask):
            return TreeMask(cupy.asarray(value.words), value.max_q)
        return value

    return {name: one(value) for name, value in arguments.items()}


def to_cupy(value: np.ndarray[Any, Any]) -> Any:
    import cupy

    return cupy.asarray(value)


def to_torch(value: np.ndarray[Any, Any], device: str = "cuda:0") -> Any:
    import torch

    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16).copy()).to(device).view(torch.bfloat16)
    return torch.from_numpy(value.copy()).to(device)


def raw(array: Any) -> np.ndarray[Any, Any]:
    """Give the bytes of a result of any library, once its device is done."""
    import cupy

    if isinstance(array, cupy.ndarray):
        with array.device:
            host = array.get()
    else:
        import torch

        torch.cuda.synchronize()
        host = array.detach().contiguous().view(torch.uint8).cpu().numpy()
    return np.ascontiguousarray(host).view(np.uint8)


def assert_same_bits(left: tuple[Any, Any], right: tuple[Any, Any]) -> None:
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(raw(one), raw(other))


def both(case: Case, seed: int) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """Return a case's arguments as tensors, and what CuPy arrays give for them."""
    arguments = build(case, seed)
    expected = mlaflash.mla_verify(**map_arrays(to_cupy, arguments))
    return map_arrays(to_torch, arguments), expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_g7_tensors_in_tensors_out(torch: Any, dtype: str) -> None:
    case = replace(TREE, dtype=dtype)
    tensors, expected = both(case, 1)
    out, lse = mlaflash.mla_verify(**tensors, validate=True)
    assert (type(out), out.dtype, out.device, tuple(out.shape)) == (
        torch.Tensor,
        getattr(torch, dtype),
        torch.device("cuda:0"),
        (16, 8, 512),
    )
    assert (lse.dtype, tuple(lse.shape), out.requires_grad) == (torch.float32, (16, 8), False)
    assert_same_bits((out, lse), expected)
    oracles = oracle.mla_verify(**build(case, 1))
    result = compare(expected[0].get(), expected[1].get(), *oracles, tolerance(dtype, dtype))
    assert result.passed, result.reason


@pytest.mark.parametrize(
    "case",
    [
        replace(TREE, name="int64-table", addressing="block_table", id_dtype="int64"),
        replace(TREE, name="dense", addressing="dense"),
        replace(TREE, name="ragged-pairs", paired=True, q_lens=(1, 7), mask="causal"),
        replace(TREE, name="new-kv", new_kv=True),
    ],
    ids=lambda case: case.name,
)
def test_every_argument_may_be_a_tensor(torch: Any, case: Case) -> None:
    tensors, expected = both(case, 2)
    assert_same_bits(mlaflash.mla_verify(**tensors), expected)


def test_given_results_are_filled_in_place(torch: Any) -> None:
    tensors, expected = both(TREE, 3)
    out = torch.full((16, 8, 576), float("nan"), dtype=torch.bfloat16, device="cuda")[..., 64:]
    lse = torch.full((8, 16), float("nan"), device="cuda").T
    results = mlaflash.mla_verify(**tensors, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    assert_same_bits(results, expected)
    wide = torch.empty((16, 8, 512), device="cuda")
    assert mlaflash.mla_verify(**tensors, out=wide)[0] is wide
    asked = mlaflash.mla_verify(**tensors, out_dtype=torch.float32)[0]
    np.testing.assert_array_equal(raw(asked), raw(wide))
    assert (wide - out.float()).abs().max() < 0.02


def test_results_share_no_memory_with_what_is_read(torch: Any) -> None:
    tensors, expected = both(TREE, 3)
    room = torch.zeros((16, 8, 1088), dtype=torch.bfloat16, device="cuda")
    room[..., :576] = tensors["q"]
    given = tensors | {"q": room[..., :576]}
    # Between the rows of q, and on them, which a call that goes on with a known layout is asked for by validate alone.
    assert_same_bits(mlaflash.mla_verify(**given, out=room[..., 576:]), expected)
    with pytest.raises(mlaflash.ShapeError, match="out shares memory with q"):
        mlaflash.mla_verify(**given, out=room[..., 512:1024], validate=True)
    rows = tensors["kv_cache"].view(-1)[: 16 * 8 * 512].view(16, 8, 512)
    with pytest.raises(mlaflash.ShapeError, match="out shares memory with kv_cache"):
        mlaflash.mla_verify(**tensors, out=rows, validate=True)
    one = torch.zeros((16, 1), device="cuda").expand(16, 8)
    with pytest.raises(mlaflash.ShapeError, match=r"lse has strides .* lie on each other"):
        mlaflash.mla_verify(**tensors, lse=one)


def test_libraries_may_be_mixed(torch: Any) -> None:
    import cupy

    tensors, expected = both(TREE, 4)
    arrays = map_arrays(to_cupy, build(TREE, 4))
    out = torch.empty((16, 8, 512), dtype=torch.bfloat16, device="cuda")
    results = mlaflash.mla_verify(**(arrays | {"kv_cache": tensors["kv_cache"]}), out=out)
    assert results[0] is out
    assert isinstance(results[1], cupy.ndarray)
    assert_same_bits(results, expected)


def test_e7_views_of_other_layouts(torch: Any) -> None:
    tensors, expected = both(TREE, 5)
    q = tensors["q"]
    # q_nope as an absorbing bmm leaves it, heads outermost; q_pe out of a longer row.
    nope = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    assert nope.stride() == (512, 16 * 512, 1)
    rope = torch.nn.functional.pad(q, (0, 64))[..., 512:576]
    assert rope.stride() == (8 * 640, 640, 1)
    results = mlaflash.mla_verify(**(tensors | {"q": (nope, rope)}))
    assert_same_bits(results, expected)
    wide = torch.nn.functional.pad(q, (64, 0))[..., 64:]
    assert_same_bits(mlaflash.mla_verify(**(tensors | {"q": wide})), expected)


def test_inputs_may_require_grad_and_results_not(torch: Any) -> None:
    tensors, expected = both(TREE, 6)
    learnt = {"q": torch.nn.Parameter(tensors["q"]), "kv_cache": tensors["kv_cache"].requires_grad_()}
    out, lse = mlaflash.mla_verify(**(tensors | learnt))
    assert not out.requires_grad
    assert_same_bits((out, lse), expected)
    with pytest.raises(mlaflash.ShapeError, match=r"out is read-only .*detach"):
        mlaflash.mla_verify(**tensors, out=out.requires_grad_())


def streams_of(torch: Any, side: Any) -> dict[str, Any]:
    import cupy

    return {
        "int": side.cuda_stream,
        "torch": side,
        "protocol": SimpleNamespace(__cuda_stream__=lambda: (0, side.cuda_stream)),
        "cupy": cupy.cuda.Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, side.cuda_stream))),
        "current": None,
    }


@pytest.mark.parametrize("kind", ["int", "torch", "protocol", "cupy", "current"])
@pytest.mark.parametrize("given", [False, True], ids=["new-out", "given-out"])
def test_work_is_ordered_by_the_callers_stream(torch: Any, kind: str, given: bool) -> None:
    tensors, expected = both(TREE, 7)
    q = torch.zeros_like(tensors["q"])
    results = {
        "out": torch.zeros((16, 8, 512), dtype=torch.bfloat16, device="cuda"),
        "lse": torch.zeros((16, 8), device="cuda"),
    }
    side = torch.cuda.Stream()
    # What is allocated in its order can be had again without asking CUDA.
    mlaflash.mla_verify(**tensors, stream=side)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        # A call on any other stream would see zeros.
        torch.cuda._sleep(LONG)
        q.copy_(tensors["q"])
    late = tensors | {"q": q} | (results if given else {})
    if kind == "current":
        with torch.cuda.stream(side):
            out, lse = mlaflash.mla_verify(**late)
            ended = side.record_event()
    else:
        out, lse = mlaflash.mla_verify(**late, stream=streams_of(torch, side)[kind])
        ended = side.record_event()
    # Nor did the call wait for its stream.
    assert not ended.query()
    side.synchronize()
    assert_same_bits((out, lse), expected)


def test_another_library_of_q_means_cupys_stream(torch: Any) -> None:
    import cupy

    tensors, expected = both(TREE, 8)
    arrays = map_arrays(to_cupy, build(TREE, 8))
    q = cupy.zeros_like(arrays["q"])
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(LONG)
        q[...] = arrays["q"]
        results = mlaflash.mla_verify(**(tensors | {"q": q}))
    stream.synchronize()
    assert_same_bits(results, expected)


@pytest.mark.parametrize("case", [TREE, replace(TREE, name="dense", addressing="dense")], ids=lambda case: case.name)
def test_f4_f5_a_warm_call_is_captured_by_torch_and_replayed(torch: Any, case: Case) -> None:
    tensors, expected = both(case, 9)
    mlaflash.mla_verify(**tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        captured = mlaflash.mla_verify(**tensors)
    # What lies between the kernels belongs to the graph: nobody else may get it.
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    graph.replay()
    assert_same_bits(captured, expected)

    # New values in the same places.
    tensors["kv_lens"].copy_(torch.tensor([600, 30], dtype=torch.int32))
    tensors["q"].mul_(-0.5)
    graph.replay()
    eager = mlaflash.mla_verify(**tensors)
    assert_same_bits(captured, eager)
    with pytest.raises(AssertionError):
        assert_same_bits(captured, expected)
    assert len(others) == 64


def test_f1_given_results_in_a_capture_on_a_given_stream(torch: Any) -> None:
    tensors, expected = both(TREE, 10)
    out = torch.zeros((16, 8, 512), dtype=torch.bfloat16, device="cuda")
    lse = torch.zeros((16, 8), device="cuda")
    side = torch.cuda.Stream()
    mlaflash.mla_verify(**tensors, out=out, lse=lse, stream=side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="global"):
        mlaflash.mla_verify(**tensors, out=out, lse=lse, stream=side.cuda_stream)
    out.zero_()
    lse.zero_()
    graph.replay()
    assert_same_bits((out, lse), expected)


def test_f3_a_cold_call_in_torchs_capture_is_refused(torch: Any) -> None:
    tensors, _ = both(replace(TREE, heads=3), 11)
    graph = torch.cuda.CUDAGraph()
    # Constants and a type of out that no other test asks for.
    config = TileConfig(ht=4, tk=64, nsplit=1)
    with torch.cuda.graph(graph, capture_error_mode="global"):
        tensors["q"].add_(0)  # torch warns of a graph without a node
        with pytest.raises(mlaflash.CaptureError, match="once before capturing"):
            mlaflash.mla_verify(**tensors, tiles=config, out_dtype="float16")


class ByDlpack:
    """An array that only DLPack leads to, and that tells what it was asked for."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, stream: Any = None, **others: Any) -> Any:
        self.asked.append(stream)
        return self.array.__dlpack__(stream=stream, **others)


class ByInterface:
    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self.array = array


def hidden(kind: type, arguments: dict[str, Any]) -> dict[str, Any]:
    names = {"q", "kv_cache", "kv_lens", "kv_indptr", "kv_indices"}
    return {name: kind(value) if name in names else value for name, value in arguments.items()}


@pytest.mark.parametrize(("kind", "dtype"), [(ByDlpack, "bfloat16"), (ByDlpack, "float16"), (ByInterface, "float16")])
def test_protocols_alone_lead_to_the_arrays(kind: type, dtype: str) -> None:
    import cupy

    case = replace(TREE, dtype=dtype)
    arrays = map_arrays(to_cupy, build(case, 12))
    expected = mlaflash.mla_verify(**arrays)
    arguments = hidden(kind, arrays)
    results = mlaflash.mla_verify(**arguments, validate=True)
    assert {type(result) for result in results} == {cupy.ndarray}
    assert_same_bits(results, expected)
    out, lse = cupy.zeros_like(expected[0]), cupy.zeros_like(expected[1])
    mlaflash.mla_verify(**arguments, out=kind(out), lse=kind(lse))
    assert_same_bits((out, lse), expected)
    if kind is ByDlpack:
        assert set(arguments["q"].asked) == {-1}


@pytest.mark.parametrize(("kind", "dtype"), [(ByDlpack, "bfloat16"), (ByInterface, "float16")])
def test_f4_protocols_put_nothing_into_a_capture(torch: Any, kind: type, dtype: str) -> None:
    # One split and given results: nothing is allocated either.
    config = TileConfig(nsplit=1)
    case = replace(TREE, dtype=dtype)
    arguments = build(case, 13)
    expected = mlaflash.mla_verify(**map_arrays(to_cupy, arguments), tiles=config)
    tensors = hidden(kind, map_arrays(to_torch, arguments))
    out = torch.zeros((16, 8, 512), dtype=getattr(torch, dtype), device="cuda")
    lse = torch.zeros((16, 8), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        stream = torch.cuda.current_stream().cuda_stream
        mlaflash.mla_verify(**tensors, tiles=config, out=out, lse=lse, stream=stream)
    graph.replay()
    assert_same_bits((out, lse), expected)


def test_a_capture_by_cupy_in_the_global_mode() -> None:
    import cupy

    arrays = map_arrays(to_cupy, build(TREE, 14))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # the arrays are there
    with stream:
        out, lse = mlaflash.mla_verify(**arrays)
        expected = out.copy(), lse.copy()
        out.fill(0)
        # What lies between the kernels is free again after this, in the order of this stream.
        mlaflash.mla_verify(**arrays, out=out, lse=lse)
        out.fill(0)
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        mlaflash.mla_verify(**arrays, out=out, lse=lse)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert_same_bits((out, lse), expected)


def test_other_memory_is_refused(torch: Any) -> None:
    tensors, _ = both(TREE, 15)
    with pytest.raises(mlaflash.ShapeError, match=r"kv_lens is a torch.Tensor on cpu; .*\.cuda\(\)"):
        mlaflash.mla_verify(**(tensors | {"kv_lens": tensors["kv_lens"].cpu()}))
    with pytest.raises(mlaflash.ShapeError, match="q is float8_e4m3fn"):
        mlaflash.mla_verify(**(tensors | {"q": tensors["q"].to(torch.float8_e4m3fn)}))
    with pytest.raises(mlaflash.ShapeError, match=r"layout torch\.sparse_coo"):
        mlaflash.mla_verify(**(tensors | {"q": tensors["q"].float().to_sparse()}))
    bad = tensors["kv_lens"].clone()
    bad[1] = 10**6
    with pytest.raises(mlaflash.InvalidArgumentError, match=r"kv_lens\[1\] is 1000000"):
        mlaflash.mla_verify(**(tensors | {"kv_lens": bad}), validate=True)


def test_f6_the_call_runs_where_q_lies(torch: Any) -> None:
    import cupy

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    arguments = build(TREE, 16)
    expected = mlaflash.mla_verify(**map_arrays(to_cupy, arguments))
    with cupy.cuda.Device(1):
        arrays = map_arrays(to_cupy, arguments)
    tensors = map_arrays(lambda value: to_torch(value, "cuda:1"), arguments)
    tensors["mask"] = arrays["mask"]
    assert cupy.cuda.runtime.getDevice() == torch.cuda.current_device() == 0
    on_cupy, on_torch = mlaflash.mla_verify(**arrays), mlaflash.mla_verify(**tensors)
    assert cupy.cuda.runtime.getDevice() == torch.cuda.current_device() == 0
    assert on_cupy[0].device.id == on_torch[0].get_device() == 1
    torch.cuda.synchronize(1)
    assert_same_bits(on_cupy, expected)
    assert_same_bits(on_torch, expected)
    with pytest.raises(mlaflash.ShapeError, match="kv_lens lies on GPU 0 and the call runs on GPU 1, that of q"):
        mlaflash.mla_verify(**(tensors | {"kv_lens": tensors["kv_lens"].to("cuda:0")}))
    with pytest.raises(mlaflash.InvalidArgumentError, match="stream is one of GPU 0 and the arrays lie on GPU 1"):
        mlaflash.mla_verify(**tensors, stream=torch.cuda.Stream(device=0))


def test_the_operator(torch: Any) -> None:
    from mlaflash.integrations.torch import mla_verify

    case = replace(TREE, addressing="block_table")
    tensors, expected = both(case, 17)
    mask = tensors.pop("mask")
    words = to_torch(mask.words.get().view(np.int32))
    positional = (tensors.pop("q"), tensors.pop("kv_cache"), tensors.pop("kv_lens"))
    named = tensors | {"mask": "tree", "mask_words": words, "max_q": mask.max_q}
    assert_same_bits(mla_verify(*positional, **named), expected)
    checks = torch.library.opcheck(mla_verify, positional, named)
    assert set(checks.values()) == {"SUCCESS"}

    def layer(q: Any, kv_cache: Any, kv_lens: Any) -> Any:
        out, lse = mla_verify(q * 1, kv_cache, kv_lens, **named)
        return out * 1, lse

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_same_bits(compiled(*positional), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        captured = compiled(*positional)
    graph.replay()
    assert_same_bits(captured, expected)


# CuPy makes the wait for JAX's stream with a class of its own that it calls deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_jax_arrays_in_jax_arrays_out(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX finds no GPU")
    import cupy

    case = replace(TREE, dtype=dtype)
    arguments = build(case, 18)
    expected = mlaflash.mla_verify(**map_arrays(to_cupy, arguments))
    arrays = map_arrays(jax.numpy.asarray, arguments)
    arrays["q"] = jax.jit(lambda q: q * 1)(arrays["q"])
    out, lse = mlaflash.mla_verify(**arrays)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    for result, wanted in zip((out * 1, lse * 1), expected, strict=True):
        assert result.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(result).view(np.uint8), wanted.get().view(np.uint8))
    with pytest.raises(mlaflash.ShapeError, match="JAX arrays are immutable"):
        mlaflash.mla_verify(**arrays, out=out)
    given = cupy.empty_like(expected[0])
    assert mlaflash.mla_verify(**arrays, out=given)[0] is given
