"""Tensors of the real torch, and its operator; no GPU is needed, so that tensors of the CPU stand in for others."""

import importlib
import sys
from typing import Any

import numpy as np
import pytest

from mlaflash import attention
from mlaflash.errors import InvalidArgumentError, MissingDependencyError, ShapeError
from mlaflash.interop import device_view, dtype_name, ordinal_of

SCALE = 0.14468


def test_without_torch_the_integration_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "mlaflash.integrations.torch", raising=False)
    with pytest.raises(MissingDependencyError, match=r"needs torch.*pytorch\.org"):
        importlib.import_module("mlaflash.integrations.torch")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def operator(torch: Any) -> Any:
    from mlaflash.integrations import torch as integration

    return integration.mla_verify


def on_gpu(tensor: Any) -> Any:
    """Let a tensor say that it lies on GPU 0."""
    import torch

    class Pretending(torch.Tensor):
        is_cuda = True

        def get_device(self) -> int:
            return 0

    return torch.Tensor._make_subclass(Pretending, tensor)


@pytest.mark.parametrize(
    ("name", "itemsize"),
    [
        *[("bfloat16", 2), ("float16", 2), ("float32", 4), ("int32", 4), ("int64", 8), ("uint32", 4), ("uint8", 1)],
        *[("bool", 1), ("float8_e4m3fn", 1)],
    ],
)
def test_g7_types_strides_and_addresses(torch: Any, name: str, itemsize: int) -> None:
    dtype = getattr(torch, name)
    storage = torch.zeros(4, 8, 576, dtype=dtype)
    tensor = on_gpu(storage.transpose(0, 1)[:, :, 512:])
    view = device_view("q", tensor, 0)
    assert view[:6] == ("q", storage.data_ptr() + 512 * itemsize, (8, 4, 64), (576, 8 * 576, 1), name, itemsize)
    assert dtype_name(dtype) == name
    assert ordinal_of(tensor) == 0


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_strided_memory_are_refused(torch: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    parts = [torch.zeros(2, 3), torch.zeros(1, 3)]
    refused = {
        "sparse_coo": on_gpu(torch.eye(3).to_sparse()),
        "sparse_csr": on_gpu(torch.eye(3).to_sparse_csr()),
        "strided": on_gpu(torch.nested.nested_tensor(parts)),
    }
    for layout, tensor in refused.items():
        with pytest.raises(ShapeError, match=f"layout torch.{layout} without strides"):
            device_view("q", tensor, 0)
    with FakeTensorMode():
        fake = torch.empty(2, 3, device="cuda")
    with pytest.raises(ShapeError, match=r"without memory .* mlaflash\.integrations\.torch"):
        device_view("q", fake, 0)
    for tensor in (torch.zeros(2), torch.zeros(2, device="meta")):
        assert ordinal_of(tensor) is None
        with pytest.raises(ShapeError, match=f"q is a torch.Tensor on {tensor.device.type}"):
            device_view("q", tensor, 0)


def meta_arguments(torch: Any, device: str = "meta", heads: int = 4) -> tuple[Any, ...]:
    return (
        torch.empty(8, heads, 576, dtype=torch.bfloat16, device=device),
        torch.empty(100, 64, 576, dtype=torch.bfloat16, device=device),
        torch.empty(2, dtype=torch.int32, device=device),
    )


def test_the_operators_schema(torch: Any, operator: Any) -> None:
    schema = torch.ops.mlaflash.mla_verify.default._schema
    assert not schema.is_mutable
    tensors = ("q", "kv_cache", "kv_lens", "kv_indptr", "kv_indices", "block_table", "qo_indptr", "mask_words")
    tensors += ("kv_scale",)
    assert tuple(argument.name for argument in schema.arguments if not argument.kwarg_only) == tensors
    required = [argument.name for argument in schema.arguments if not argument.has_default_value()]
    assert required == ["q", "kv_cache", "kv_lens", "sm_scale"]
    assert torch.ops.mlaflash.mla_verify.default is operator._opoverload


def test_the_operators_traced_results(torch: Any, operator: Any) -> None:
    out, lse = operator(*meta_arguments(torch), sm_scale=SCALE)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((8, 4, 512), torch.bfloat16, (8, 4), torch.float32)
    uniform = torch.empty(2, 4, 4, 576, dtype=torch.float32, device="meta")
    out, lse = operator(uniform, *meta_arguments(torch)[1:], sm_scale=SCALE)
    assert (out.shape, out.dtype, lse.shape) == ((2, 4, 4, 512), torch.float32, (2, 4, 4))


def test_torchs_own_checks_of_the_operator(torch: Any, operator: Any) -> None:
    results = torch.library.opcheck(operator, meta_arguments(torch), {"sm_scale": SCALE, "mask": "none"})
    assert results
    assert set(results.values()) == {"SUCCESS"}


def test_a_traced_function_keeps_the_operator_whole(torch: Any, operator: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def layer(q: Any, kv_cache: Any, kv_lens: Any) -> Any:
        out, lse = operator(q * 2, kv_cache, kv_lens, sm_scale=SCALE)
        return out + 1, lse

    graph = make_fx(layer, tracing_mode="symbolic")(*meta_arguments(torch)).graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.mlaflash.mla_verify.default) == 1
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    out, lse = compiled(*meta_arguments(torch, heads=8))
    assert (out.shape, lse.shape) == ((8, 8, 512), (8, 8))


def test_the_operator_hands_its_arguments_to_the_call(
    torch: Any, operator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cupy")
    from mlaflash.integrations import torch as integration

    seen: dict[str, Any] = {}
    monkeypatch.setattr(attention, "mla_verify", lambda q, kv_cache, **named: seen.update(named) or (q, kv_cache))
    q, kv_cache, kv_lens = map(on_gpu, meta_arguments(torch, "cpu"))
    words = torch.arange(8, dtype=torch.int32).view(8, 1)
    table = on_gpu(torch.zeros(2, 50, dtype=torch.int64))
    given = {"block_table": table, "page_size": 64, "max_q_len": 4, "max_kv_len": 3200, "logit_cap": 30.0}
    given |= {"kv_dtype": "float8_e4m3", "kv_scale": torch.ones(1)}
    tree = {"mask": "tree", "max_q": 4, "mask_words": on_gpu(words)}
    assert integration._run(q, kv_cache, kv_lens, sm_scale=SCALE, **given, **tree) == (q, kv_cache)
    mask = seen.pop("mask")
    assert (mask.num_tokens, mask.max_q, mask.words.dtype) == (8, 4, np.uint32)
    assert mask.words.data.ptr == words.data_ptr()
    nothing = dict.fromkeys(["kv_indptr", "kv_indices", "qo_indptr"])
    assert seen == given | nothing | {"sm_scale": SCALE, "kv_lens": kv_lens}

    integration._run(q, kv_cache, kv_lens, sm_scale=SCALE, mask="none")
    assert (seen["mask"], seen["kv_dtype"], seen["kv_scale"]) == ("none", None, 1.0)
    for wrong in ({"mask": "tree"}, {"mask_words": on_gpu(words)}):
        with pytest.raises(InvalidArgumentError, match="mask='tree' and its words belong together"):
            integration._run(q, kv_cache, kv_lens, sm_scale=SCALE, **wrong)
