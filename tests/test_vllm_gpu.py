"""The plugin in the classes of vLLM itself, from its sources: on the GPU beside vLLM's kernel, or imported alone."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import engine_sources
import pytest

from mlaflash.integrations import signatures, vllm

SCALE, HEADS, BLOCK_SIZE, WIDTH = 0.14468, 8, 64, 40


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    """Register the backend as the plugin does, and take what vLLM's registry gives then."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    root = engine_sources.sources("VLLM_SOURCES")
    if root is None:
        pytest.skip("VLLM_SOURCES names no folder")
    finder = engine_sources.install_vllm(root)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm, "installed", lambda package: ("0.33.0", root))
            vllm.register()
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        yield registry.AttentionBackendEnum.TRITON_MLA.get_class()
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.pop("mlaflash.integrations.vllm_backend", None)


def test_the_sources_are_those_recorded(backend: Any) -> None:
    root = engine_sources.sources("VLLM_SOURCES")
    assert root is not None
    record = signatures.load("vllm", "0.33.0")
    assert signatures.differences(record, signatures.read(record, root)) == []


def test_the_registry_gives_our_class(backend: Any) -> None:
    theirs = importlib.import_module("vllm.v1.attention.backends.mla.triton_mla")
    assert backend.__name__ == "MlaFlashBackend"
    assert issubclass(backend, theirs.TritonMLABackend)
    assert backend.get_name() == "TRITON_MLA"
    assert backend.get_builder_cls() is theirs.TritonMLAMetadataBuilder
    impl = backend.get_impl_cls()
    assert issubclass(impl, theirs.TritonMLAImpl)
    assert list(inspect.signature(impl.forward_mqa).parameters) == list(
        inspect.signature(theirs.TritonMLAImpl.forward_mqa).parameters
    )
    made = impl_of(backend, "auto")
    assert (made.scale, made._vllm_config.model_config.max_model_len) == (SCALE, 8192)


def impl_of(backend: Any, kv_cache_dtype: str) -> Any:
    class_ = backend.get_impl_cls()
    return class_(HEADS, 576, SCALE, 1, None, None, kv_cache_dtype, None, "decoder", None, kv_lora_rank=512)


def make_step(lens: list[int], q_len: int, *, causal: bool, fp8: bool) -> dict[str, Any]:
    import torch

    generator = torch.Generator("cuda").manual_seed(len(lens) * q_len)
    blocks = len(lens) * WIDTH
    cache = torch.randn(blocks, BLOCK_SIZE, 576, generator=generator, device="cuda")
    cache = (cache / 0.5).to(torch.float8_e4m3fn) if fp8 else cache.to(torch.bfloat16)
    table = torch.randperm(blocks, generator=generator, device="cuda").to(torch.int32).view(len(lens), WIDTH)
    decode = SimpleNamespace(block_table=table, seq_lens=torch.tensor(lens, dtype=torch.int32, device="cuda"))
    q = 0.5 * torch.randn(len(lens) * q_len, HEADS, 576, generator=generator, device="cuda")
    return {
        "q": tuple(q.to(torch.bfloat16).split((512, 64), dim=-1)),
        "kv_c_and_k_pe_cache": cache,
        "attn_metadata": SimpleNamespace(causal=causal, decode=decode, max_seq_len=WIDTH * BLOCK_SIZE),
        "layer": SimpleNamespace(_k_scale=torch.tensor(0.5 if fp8 else 1.0, device="cuda")),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("q_len", "causal"), [(1, True), (5, True), (4, False)])
def test_a_step_is_what_vllm_computes(backend: Any, q_len: int, causal: bool, fp8: bool) -> None:
    """vLLM's log-sum-exp is rounded to bfloat16: it is held to that."""
    import torch

    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit floats need sm_89")
    impl = impl_of(backend, "fp8" if fp8 else "auto")
    call = make_step([2000, 17, 300, 64], q_len, causal=causal, fp8=fp8)
    served = sys.modules[backend.__module__].server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "_leave", lambda reason: pytest.fail(f"left to vLLM: {reason}"))
        out, lse = impl.forward_mqa(**call)
    theirs, their_lse = super(type(impl), impl).forward_mqa(**call)
    error = (out.float() - theirs.float()).norm() / theirs.float().norm()
    assert float(error) < 0.01
    assert lse.dtype == torch.float32
    assert float((lse - their_lse.float()).abs().max()) < 2**-8 * float(lse.abs().max()) + 1e-3


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths_and_blocks(backend: Any) -> None:
    import torch

    impl = impl_of(backend, "auto")
    call = make_step([1000, 3], 4, causal=True, fp8=False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        impl.forward_mqa(**call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out, _ = impl.forward_mqa(**call)
    torch.cuda.synchronize()
    decode = call["attn_metadata"].decode
    for lens in ([5, 2400], [1300, 0]):
        decode.seq_lens.copy_(torch.tensor(lens))
        decode.block_table.copy_(decode.block_table.flip(0, 1).clone())
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        theirs, _ = super(type(impl), impl).forward_mqa(**call)
        live = slice(0, 4 * sum(length > 0 for length in lens))
        error = (out[live].float() - theirs[live].float()).norm() / theirs[live].float().norm()
        assert float(error) < 0.01
        assert bool((out[live.stop :] == 0).all())
