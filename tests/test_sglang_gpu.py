"""The plugin in the backend class of SGLang itself: on the GPU, or from its sources where no GPU is."""

import dataclasses
import importlib
from typing import Any

import engine_sources
import numpy as np
import pytest

from mlaflash.integrations import signatures
from mlaflash.integrations.sglang import attach
from mlaflash.integrations.sglang_check import (
    Engine,
    _backend,
    _forward_batch,
    _layer,
    _mask,
    check_engine,
    load_engine,
)


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


class Step:
    """What a graph of one batch size reads: arrays that stay, and what they hold for one step."""

    def __init__(self, engine: Engine, batch: int, q_len: int, heads: int, room: int) -> None:
        import torch

        gpu: dict[str, Any] = {"device": "cuda"}
        self.batch, self.q_len, self.room = batch, q_len, room
        self.q, self.k = (torch.randn(batch * q_len, n, 576, **gpu).to(torch.bfloat16) for n in (heads, 1))
        self.out = torch.empty(batch * q_len, heads * 512, dtype=torch.bfloat16, **gpu)
        self.mask = torch.zeros(batch * q_len * (room + q_len), dtype=torch.uint8, **gpu)
        fields = {field.name: None for field in dataclasses.fields(engine.metadata)}
        self.metadata = engine.metadata(
            **fields
            | {
                "max_extend_len": q_len,
                "kv_indptr": torch.zeros(batch + 1, dtype=torch.int32, **gpu),
                "kv_indices": torch.zeros(batch * room, dtype=torch.int64, **gpu),
                "qo_indptr": torch.arange(0, batch * q_len + 1, q_len, **gpu),
                "custom_mask": self.mask,
                "mask_indptr": torch.zeros(batch + 1, dtype=torch.int64, **gpu),
            }
        )

    def load(self, kind: str, prefix_lens: list[int], rng: np.random.Generator) -> None:
        """Fill the arrays; without a tree the mask is stale, and nobody would see even itself."""
        import torch

        _, flat, starts = _mask(kind, prefix_lens, self.q_len, rng)
        self.metadata.kv_indptr.copy_(torch.tensor(np.cumsum([0, *prefix_lens])))
        slots = torch.randperm(2 * self.room, device="cuda")[: sum(prefix_lens)]
        self.metadata.kv_indices[: len(slots)] = slots
        self.metadata.mask_indptr.copy_(torch.from_numpy(starts))
        self.mask.zero_()
        if flat is not None:
            self.mask[: len(flat)] = torch.from_numpy(flat.view(np.uint8)).cuda()
        self.q.normal_()
        self.out.zero_()


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [1, 4])
def test_f9_graphs_replay_with_other_lengths_ids_and_masks(engine: Engine, topk: int) -> None:
    """A chain ignores the mask that was there at its capture; a tree follows the one of the replay.

    Graphs of two batch sizes share a plan, and replay in turn. Each has three layers, of which the first plans.
    """
    import torch

    room, heads, kind = 5000, 8, "chain" if topk == 1 else "tree"
    rng = np.random.default_rng(topk)
    pools = [torch.randn(2 * room, 1, 576, device="cuda").to(torch.bfloat16) for _ in range(3)]
    layers, forward_batch = [_layer(engine, heads, index) for index in range(3)], _forward_batch()
    backend = _backend(engine, None, pools, 4, room, topk, "cuda")
    assert attach(backend) == ""
    steps = [Step(engine, batch, 8, heads, room) for batch in (4, 2)]

    def call(step: Step, *, serve: bool) -> Any:
        """Return the sum over layers, so that each counts."""
        backend.use_verify_splitkv, forward_batch._attn_output = serve, step.out
        stale = dataclasses.replace(step.metadata, custom_mask=None if topk == 1 else step.mask)
        backend.forward_metadata = step.metadata if serve else stale
        total = torch.zeros_like(step.out, dtype=torch.float32)
        for layer in layers:
            total += backend.forward_extend(
                step.q, step.k, step.k[..., :512], layer, forward_batch, save_kv_cache=False
            ).float()
        return total

    graphs = []
    stream = torch.cuda.Stream()
    for step in steps:
        step.load("chain", [1] * step.batch, rng)
        with torch.cuda.stream(stream):
            call(step, serve=True)
            call(step, serve=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                total = call(step, serve=True)
        graphs.append((step, graph, total))
    torch.cuda.synchronize()
    for prefix_lens in ([4000, 17, 1, 600], [4000, 17], [1, 1], [900, 1, 900, 4900], [900, 4900]):
        ((step, graph, total),) = (each for each in graphs if each[0].batch == len(prefix_lens))
        step.load(kind, prefix_lens, rng)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        ours = total.clone()
        theirs = call(step, serve=False)
        assert float((ours - theirs).norm() / theirs.norm()) < 0.01
