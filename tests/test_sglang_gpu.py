"""The plugin in the backend class of SGLang itself: on the GPU, or from its sources where no GPU is."""

import dataclasses
import importlib
from typing import Any

import engine_sources
import numpy as np
import pytest

from mlaflash.integrations import signatures
from mlaflash.integrations.sglang import attach
from mlaflash.integrations.sglang_check import Engine, check_engine, load_engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    root = engine_sources.sources()
    if root is None:
        pytest.importorskip("sglang", reason="SGLANG_SOURCES names no folder, and SGLang is not installed")
    else:
        engine_sources.install(root)
    return load_engine()


def test_the_sources_are_those_recorded(engine: Engine) -> None:
    root = engine_sources.sources()
    root = root if root is not None else signatures.installed("sglang")[1]
    for version in signatures.known_versions("sglang"):
        record = signatures.load("sglang", version)
        found = signatures.read(record, root)
        if signatures.differences(record, found) == []:
            return
    raise AssertionError(f"{root} holds no version that is recorded")


def test_the_hook_reaches_every_backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooked: list[Any] = []

    class Stand:
        def __init__(self, size: int) -> None:
            self.size = size

    monkeypatch.setattr(importlib.import_module(engine.backend.__module__), "Stand", Stand, raising=False)
    monkeypatch.setattr("mlaflash.integrations.sglang.attach", hooked.append)
    from mlaflash.integrations.sglang import _after_init

    registry.HookRegistry.register(f"{engine.backend.__module__}.Stand.__init__", _after_init, registry.HookType.AFTER)
    registry.HookRegistry.apply_hooks()
    made = Stand(3)
    assert hooked == [made]
    assert made.size == 3


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4096, 8), (8, 1000, 16), (3, 70, 5)])
@pytest.mark.parametrize("pool", ["bfloat16", "float8_e4m3"])
def test_the_verify_call_is_right(engine: Engine, shape: tuple[int, int, int], pool: str) -> None:
    import torch

    is_fp8 = pool == "float8_e4m3"
    if is_fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("8-bit floats need sm_89")
    shapes = ([], [shape]) if is_fp8 else ([shape], [])
    outcomes = list(check_engine(engine, shapes=shapes[0], fp8_shapes=shapes[1], samples=0))
    assert {outcome.pool for outcome in outcomes} == {pool}
    assert [outcome.kind for outcome in outcomes] == ["chain", "tree"]
    for outcome in outcomes:
        assert outcome.failure == ""
        assert outcome.oracle_error is not None


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [1, 4])
def test_f9_a_graph_replays_with_other_lengths_ids_and_masks(engine: Engine, topk: int) -> None:
    """A chain ignores the mask that was there at its capture; a tree follows the one of the replay."""
    import torch

    from mlaflash.integrations.sglang_check import _backend, _forward_batch, _layer, _mask

    batch, q_len, heads, room = 2, 8, 8, 5000
    gpu: dict[str, Any] = {"device": "cuda"}
    rng = np.random.default_rng(topk)
    pool = torch.randn(2 * room, 1, 576, **gpu).to(torch.bfloat16)
    q, k = (torch.randn(batch * q_len, n, 576, **gpu).to(torch.bfloat16) for n in (heads, 1))
    out = torch.empty(batch * q_len, heads * 512, dtype=torch.bfloat16, **gpu)
    indptr = torch.zeros(batch + 1, dtype=torch.int32, **gpu)
    slots = torch.zeros(batch * room, dtype=torch.int64, **gpu)
    mask = torch.zeros(batch * q_len * (room + q_len), dtype=torch.uint8, **gpu)
    mask_indptr = torch.zeros(batch + 1, dtype=torch.int64, **gpu)
    fields = {field.name: None for field in dataclasses.fields(engine.metadata)}
    metadata = engine.metadata(
        **fields
        | {
            "max_extend_len": q_len,
            "kv_indptr": indptr,
            "kv_indices": slots,
            "qo_indptr": torch.arange(0, batch * q_len + 1, q_len, **gpu),
            "custom_mask": mask,
            "mask_indptr": mask_indptr,
        }
    )
    backend = _backend(engine, metadata, [pool], batch, room, topk, "cuda")
    layer, forward_batch = _layer(engine, heads), _forward_batch()
    forward_batch._attn_output = out

    def load(prefix_lens: list[int], flat: Any, starts: Any) -> None:
        indptr.copy_(torch.tensor(np.cumsum([0, *prefix_lens])))
        slots[: sum(prefix_lens)] = torch.randperm(2 * room, **gpu)[: sum(prefix_lens)]
        mask_indptr.copy_(torch.from_numpy(starts))
        mask.zero_()  # stale: nobody would see even itself
        if flat is not None:
            mask[: len(flat)] = torch.from_numpy(flat.view(np.uint8)).cuda()

    def call() -> Any:
        return backend.forward_extend(q, k, k[..., :512], layer, forward_batch, save_kv_cache=False)

    assert attach(backend) == ""
    load([1, 1], *_mask("chain", [1, 1], q_len, rng)[1:])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.cuda.synchronize()
    for prefix_lens in ([4000, 17], [1, 1], [900, 4900]):
        _, flat, starts = _mask("chain" if topk == 1 else "tree", prefix_lens, q_len, rng)
        load(prefix_lens, flat, starts)
        q.normal_()
        out.zero_()
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        ours = out.clone()
        backend.use_verify_splitkv = False
        backend.forward_metadata = dataclasses.replace(metadata, custom_mask=None if topk == 1 else mask)
        theirs = call()
        backend.use_verify_splitkv, backend.forward_metadata = True, metadata
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert float(error) < 0.01
