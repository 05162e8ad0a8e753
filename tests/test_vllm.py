"""The plugin for vLLM on the emulator, in classes that have the recorded signatures of vLLM's own."""

import importlib
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from sglang_cases import EmulatorRuntime

from mlaflash import UnsupportedError, kv, merge_states, oracle
from mlaflash.integrations import signatures, vllm
from mlaflash.lab.compare import compare, tolerance

SCALE, BLOCK_SIZE = 0.14468, 16
MODULE = "vllm.v1.attention.backends.mla.triton_mla"


class Runtime(EmulatorRuntime):
    def empty_out(self, like: Any, shape: tuple[int, int, int]) -> Any:
        return np.full(shape, np.nan, like.dtype)


@pytest.fixture
def record() -> signatures.Record:
    return signatures.load("vllm", "0.33.0")


def parameters(record: signatures.Record, name: str) -> list[str]:
    (found,) = (names for place, names in record["functions"].items() if place.endswith(f":{name}"))
    return list(found)


@pytest.fixture
def backend(record: signatures.Record, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the classes over stand-ins for vLLM's, whose methods take the recorded parameters and no others."""
    (_, *init), (_, *forward) = (parameters(record, f"TritonMLAImpl.{name}") for name in ("__init__", "forward_mqa"))
    space: dict[str, Any] = {}
    exec(
        f"class TritonMLAImpl:\n"
        f"  def __init__(self, {', '.join(init)}):\n"
        f"    self.scale, self.num_heads, self.kv_cache_dtype = float(scale), num_heads, kv_cache_dtype\n"
        f"  def forward_mqa(self, {', '.join(forward)}):\n"
        f"    return 'out of vLLM', 'lse of vLLM'\n"
        f"class TritonMLABackend:\n"
        f"  supported_kv_cache_dtypes = ['auto', 'fp8']\n"
        f"  @staticmethod\n"
        f"  def get_name(): return 'TRITON_MLA'\n",
        space,
    )
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.envs", "vllm.forward_context")}
    parts = MODULE.split(".")
    modules |= {".".join(parts[:i]): ModuleType(".".join(parts[:i])) for i in range(2, len(parts) + 1)}
    modules["vllm"].envs = modules["vllm.envs"]
    modules["vllm.envs"].VLLM_BATCH_INVARIANT = False
    context = modules["vllm.forward_context"]
    context.current = object()
    context.get_forward_context = lambda: context.current
    context.is_forward_context_available = lambda: True
    modules[MODULE].TritonMLABackend = space["TritonMLABackend"]
    modules[MODULE].TritonMLAImpl = space["TritonMLAImpl"]
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    name = "mlaflash.integrations.vllm_backend"
    monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module(name)
    served = vllm.StepServer(Runtime())
    monkeypatch.setattr(found, "server", lambda: served)
    yield found
    sys.modules.pop(name, None)


def impl_of(backend: Any, *, dcp_world_size: int = 1, kv_cache_dtype: str = "auto") -> Any:
    class_ = backend.MlaFlashBackend.get_impl_cls()
    impl = class_(4, 576, SCALE, 1, None, None, kv_cache_dtype, None, "decoder", None, kv_lora_rank=512)
    impl.dcp_world_size = dcp_world_size
    impl._vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=6), model_config=SimpleNamespace(max_model_len=512)
    )
    return impl


def step(lens: list[int], q_len: int, *, causal: bool = True, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    width = -(-512 // BLOCK_SIZE)
    cache = rng.standard_normal((len(lens) * 20 + 1, BLOCK_SIZE, 576)).astype(ml_dtypes.bfloat16)
    table = np.full((len(lens), width), 2**30, np.int32)
    order = rng.permutation(len(cache))
    for b, length in enumerate(lens):
        blocks = -(-length // BLOCK_SIZE)
        table[b, :blocks] = order[b * 20 : b * 20 + blocks]
    decode = SimpleNamespace(block_table=table, seq_lens=np.array(lens, np.int32), dcp_tot_seq_lens=None)
    return {
        "q": rng.standard_normal((len(lens) * q_len, 4, 576)).astype(ml_dtypes.bfloat16),
        "kv_c_and_k_pe_cache": cache,
        "attn_metadata": SimpleNamespace(causal=causal, decode=decode),
        "layer": SimpleNamespace(_k_scale=np.ones((), np.float32)),
    }


def expected(call: dict[str, Any], mask: str) -> Any:
    decode = call["attn_metadata"].decode
    return oracle.mla_verify(
        call["q"],
        call["kv_c_and_k_pe_cache"],
        sm_scale=SCALE,
        kv_lens=decode.seq_lens,
        block_table=decode.block_table,
        mask=mask,
        kv_scale=float(call["layer"]._k_scale),
    )


def assert_right(found: Any, call: dict[str, Any], mask: str) -> None:
    result = compare(*found, *expected(call, mask), tolerance("bfloat16", "bfloat16", partials=True))
    assert result.passed, result.reason
    assert found[1].dtype == np.float32


@pytest.mark.parametrize(("q_len", "causal", "mask"), [(1, True, "none"), (5, True, "causal"), (3, False, "none")])
def test_steps_are_what_the_oracle_says(backend: Any, q_len: int, causal: bool, mask: str) -> None:
    call = step([130, 5, 300, 17], q_len, causal=causal)
    assert_right(impl_of(backend).forward_mqa(**call), call, mask)


def test_a10_requests_that_pad_are_empty(backend: Any) -> None:
    call = step([40, 0, 0], 2)
    out, lse = impl_of(backend).forward_mqa(**call)
    assert (out[2:] == 0).all()
    assert np.isneginf(lse[2:]).all()


def test_queries_of_two_pieces(backend: Any) -> None:
    call = step([90, 33], 4)
    q = call["q"]
    latent = np.ascontiguousarray(q[..., :512].transpose(1, 0, 2)).transpose(1, 0, 2)
    found = impl_of(backend).forward_mqa(**call | {"q": (latent, q[..., 512:].copy())})
    assert_right(found, call, "causal")


def test_b2_b4_shards_of_a_context_merge_to_the_whole(backend: Any) -> None:
    """As with decode context parallelism: each GPU has some of the tokens, and log-sum-exps merge the results."""
    call = step([128, 64], 1)
    whole = expected(call, "none")
    decode = call["attn_metadata"].decode
    impl = impl_of(backend, dcp_world_size=2)
    parts = []
    for rank in range(2):
        table = np.full_like(decode.block_table, 2**30)
        for b, length in enumerate((128, 64)):
            half = length // BLOCK_SIZE // 2
            table[b, :half] = decode.block_table[b, rank * half : (rank + 1) * half]
        shard = SimpleNamespace(block_table=table, seq_lens=decode.seq_lens // 2, dcp_tot_seq_lens=decode.seq_lens)
        parts += impl.forward_mqa(**call | {"attn_metadata": SimpleNamespace(causal=True, decode=shard)})
    merged = merge_states(*(part.astype(np.float32) for part in parts))
    result = compare(*merged, *whole, tolerance("bfloat16", "bfloat16"))
    assert result.passed, result.reason


def test_caches_of_8_bits(backend: Any) -> None:
    call = step([130, 5, 300, 17], 5)
    rows = call["kv_c_and_k_pe_cache"].astype(np.float32)
    fp8 = call | {
        "kv_c_and_k_pe_cache": (rows / 0.5).astype(ml_dtypes.float8_e4m3fn),
        "layer": SimpleNamespace(_k_scale=np.full((), 0.5, np.float32)),
    }
    assert_right(impl_of(backend, kv_cache_dtype="fp8").forward_mqa(**fp8), fp8, "causal")
    packed = call | {"kv_c_and_k_pe_cache": kv.quantize_ds_mla(rows)}
    impl = impl_of(backend, kv_cache_dtype="fp8_ds_mla")
    assert_right(impl.forward_mqa(**packed), packed, "causal")
    assert [plan.capacity.kv_dtype for plan in backend.server().runtime.plans] == ["float8_e4m3", "fp8_ds_mla"]
    assert backend.MlaFlashBackend.supported_kv_cache_dtypes == ["auto", "fp8", "fp8_ds_mla"]
    # vLLM's kernel would read bytes as rows.
    with pytest.raises(UnsupportedError, match="reads no cache of fp8_ds_mla"):
        impl.forward_mqa(**packed | {"q": packed["q"][:7]})


def test_a_drafter_that_keeps_its_metadata_is_planned_anew(backend: Any) -> None:
    """Lengths grow in place, and the next pass goes through another layer."""
    call = step([60, 61], 1)
    impl = impl_of(backend)
    assert_right(impl.forward_mqa(**call), call, "none")
    call["attn_metadata"].decode.seq_lens[:] = [20, 33]
    other = call | {"kv_c_and_k_pe_cache": call["kv_c_and_k_pe_cache"][::-1].copy()}
    sys.modules["vllm.forward_context"].current = object()
    assert_right(impl.forward_mqa(**other), other, "none")


def test_layers_of_a_step_share_its_plan(backend: Any) -> None:
    call = step([60, 61], 3)
    served = backend.server()
    caches = [call["kv_c_and_k_pe_cache"], call["kv_c_and_k_pe_cache"][::-1].copy()]
    for cache in caches * 2:
        layer = call | {"kv_c_and_k_pe_cache": cache}
        assert_right(impl_of(backend).forward_mqa(**layer), layer, "causal")
    other = step([300, 2, 9], 3, seed=1)
    assert_right(impl_of(backend).forward_mqa(**other), other, "causal")
    (plan,) = served.runtime.plans
    assert (plan.capacity.max_batch, plan.capacity.max_kv_len, plan.capacity.page_size) == (6, 512, BLOCK_SIZE)


def test_what_is_not_served_is_left_to_vllm(backend: Any, caplog: pytest.LogCaptureFixture) -> None:
    theirs = ("out of vLLM", "lse of vLLM")
    call = step([60, 61], 3)
    impl = impl_of(backend)
    with caplog.at_level(logging.INFO, "vllm"):
        assert impl_of(backend, dcp_world_size=4).forward_mqa(**call) == theirs
        assert "over a context that GPUs share" in caplog.text
        assert impl.forward_mqa(**call | {"q": call["q"][:5]}) == theirs
        assert "5 query tokens of 2 requests" in caplog.text
        assert impl.forward_mqa(**call | {"q": call["q"].astype(np.float32)}) == theirs
        assert "queries of float32" in caplog.text
        assert impl.forward_mqa(**call | {"q": call["q"][..., :320]}) == theirs
        backend.server().runtime.capturing = True
        assert impl.forward_mqa(**call) == theirs
        assert "is being captured" in caplog.text
        backend.server().runtime.capturing = False
        backend.envs.VLLM_BATCH_INVARIANT = True
        assert impl.forward_mqa(**call) == theirs
        backend.envs.VLLM_BATCH_INVARIANT = False
    assert_right(impl.forward_mqa(**call), call, "causal")


# --- the sources -----------------------------------------------------------------------------------------------------


def test_the_classes_take_what_vllm_hands_over(backend: Any, record: signatures.Record) -> None:
    assert list(inspect.signature(backend.MlaFlashImpl.forward_mqa).parameters) == parameters(
        record, "TritonMLAImpl.forward_mqa"
    )
    (call,) = (found for place, found in record["calls"].items() if place.endswith(":self.impl.forward_mqa"))
    bound = inspect.signature(backend.MlaFlashImpl.forward_mqa).bind("self", *call["positional"], **call["keywords"])
    assert bound.arguments == {
        "self": "self",
        "q": "mqa_q",
        "kv_c_and_k_pe_cache": "kv_cache",
        "attn_metadata": "attn_metadata",
        "layer": "self",
    }
    assert backend.MlaFlashBackend.get_name() == "TRITON_MLA"
    constants = {place.rpartition(":")[2]: value for place, value in record["constants"].items()}
    assert constants["TritonMLAMetadataBuilder.query_len_support"] == "QueryLenSupport.UNIFORM"
    assert constants["TritonMLAImpl.supports_dcp"] is True
    assert constants["MLACommonDecodeMetadata.seq_lens"] == "torch.Tensor"


def test_the_entry_point_is_the_one_that_vllm_looks_for(record: signatures.Record) -> None:
    (group,) = (value for place, value in record["constants"].items() if place.endswith("DEFAULT_PLUGINS_GROUP"))
    text = (Path(vllm.__file__).parents[2] / "pyproject.toml").read_text()
    assert f'[project.entry-points."{group}"]\nmlaflash = "mlaflash.integrations.vllm:register"' in text


def test_register(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    registered: list[Any] = []
    registry = ModuleType("registry")
    registry.AttentionBackendEnum = SimpleNamespace(TRITON_MLA="TRITON_MLA")
    registry.register_backend = lambda *given: registered.append(given)
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", registry)
    monkeypatch.setattr(vllm, "installed", lambda package: ("9.9", tmp_path))
    vllm.register()
    assert "vllm 9.9 is installed" in caplog.records[-1].getMessage()
    monkeypatch.setattr(vllm, "installed", lambda package: ("0.33.0", tmp_path))
    vllm.register()
    assert "is not the recorded one" in caplog.records[-1].getMessage()
    assert not registered
    monkeypatch.setattr(vllm, "read", lambda record, root: record)
    vllm.register()
    assert registered == [("TRITON_MLA", "mlaflash.integrations.vllm_backend.MlaFlashBackend")]
    module, _, name = vllm.BACKEND.rpartition(".")
    assert f"class {name}(" in (Path(vllm.__file__).parents[2] / f"{module.replace('.', '/')}.py").read_text()
