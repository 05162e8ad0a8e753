"""Sparse calls on a GPU against the oracle: the emulator's problems, serving sizes, captures, big pools."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_verify_gpu import to_gpu
from verify_cases import (
    LISTS,
    SCALE,
    SPARSE_CASES,
    WIDE_PAIR,
    assert_same,
    config_id,
    configs,
    list_configs,
    run_and_compare,
)

import mlaflash
from mlaflash import oracle
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.mma_tiles import NARROW_PAIR
from mlaflash.tiles import KernelConfig

pytestmark = pytest.mark.gpu
CONFIGS = [*configs(), *list_configs(), replace(NARROW_PAIR, nsplit=2), WIDE_PAIR]
MMA = list(list_configs())


def mla_sparse(**arguments: Any) -> tuple[Any, Any]:
    out, lse = mlaflash.mla_sparse(**{name: to_gpu(value) for name, value in arguments.items()})
    return out.get(), lse.get()


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
@pytest.mark.parametrize("case", SPARSE_CASES, ids=lambda case: case.name)
def test_agrees_with_the_oracle(case: Case, config: KernelConfig) -> None:
    run_and_compare(mla_sparse, case, config, seed=1)


@pytest.mark.parametrize("budget", [None, "sm_120"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_decode_with_2048_of_many_slots(heads: int, dtype: str, budget: str | None) -> None:
    case = replace(LISTS, q_lens=(1, 4, 2), kv_lens=(30_000, 9000, 70), heads=heads, topk=2048, dtype=dtype)
    arguments = build(replace(case, page_size=64, id_dtype="int64" if heads == 16 else "int32"), 2)
    out, lse = mla_sparse(**arguments, budget=budget, validate=True)
    result = compare(out, lse, *oracle.mla_sparse(**arguments), tolerance(dtype, dtype))
    assert result.passed, result.reason


@pytest.mark.parametrize("config", [None, *MMA], ids=lambda config: config_id(config) if config else "chosen")
def test_the_same_call_gives_the_same_bits(config: KernelConfig | None) -> None:
    arguments = build(replace(LISTS, heads=64, topk=700, kv_lens=(2000, 900)), 3)
    first = mla_sparse(**arguments, tiles=config)
    for _ in range(5):
        assert_same(first, mla_sparse(**arguments, tiles=config))


def test_an_equal_call_reads_its_own_arrays() -> None:
    for seed in range(3):
        arguments = build(replace(LISTS, heads=64, topk=300, kv_lens=(400, 200)), seed)
        out, lse = mla_sparse(**arguments)
        result = compare(out, lse, *oracle.mla_sparse(**arguments), tolerance("bfloat16", "bfloat16"))
        assert result.passed, result.reason


@pytest.mark.parametrize("heads", [16, 128])
def test_a_prefill_of_thousands_of_tokens(heads: int) -> None:
    tokens, slots, topk = 5000, 20_000, 512
    rng = np.random.default_rng(4)
    of_token, of_head = (rng.standard_normal(shape, np.float32) for shape in ((tokens, 1, 576), (heads, 576)))
    q = (0.1 * (of_token + of_head)).astype(ml_dtypes.bfloat16)
    kv_cache = rng.standard_normal((slots, 576), np.float32).astype(ml_dtypes.bfloat16)
    indices = rng.integers(-1, slots, (tokens, topk), np.int32)
    # As of a causal prompt: the first tokens have few to choose from.
    indices[np.arange(topk) > np.arange(tokens)[:, None]] = -1
    out, lse = mla_sparse(q=q, kv_cache=kv_cache, indices=indices, sm_scale=SCALE, validate=True)
    picked = [0, 1, 15, 16, 17, 511, 2500, 4999]
    expected = oracle.mla_sparse(q[picked], kv_cache, indices[picked], sm_scale=SCALE)
    result = compare(out[picked], lse[picked], *expected, tolerance("bfloat16", "bfloat16"))
    assert result.passed, result.reason
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("config", MMA, ids=config_id)
def test_a_warm_call_can_be_captured_and_replayed(config: KernelConfig) -> None:
    import cupy

    first, second = (build(replace(LISTS, kv_lens=(300, 200), topk=260), seed) for seed in (5, 6))
    arguments = {name: to_gpu(value) for name, value in first.items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # the arrays are there
    with stream:
        out, lse = mlaflash.mla_sparse(**arguments, tiles=config)
        stream.synchronize()
        stream.begin_capture()
        mlaflash.mla_sparse(**arguments, tiles=config, out=out, lse=lse)
        graph = stream.end_capture()
        # Other lists of other lengths over another cache: all of it is read at the replay.
        for name in ("q", "kv_cache", "indices", "topk_lens"):
            arguments[name].set(second[name], stream=stream)
        graph.launch(stream)
        stream.synchronize()
    result = compare(out.get(), lse.get(), *oracle.mla_sparse(**second), tolerance("bfloat16", "bfloat16"))
    assert result.passed, result.reason


def test_work_runs_on_the_callers_stream() -> None:
    import cupy

    arguments = {name: to_gpu(value) for name, value in build(LISTS, 7).items()}
    expected = mlaflash.mla_sparse(**arguments)[0]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    out = cupy.zeros_like(expected)
    with stream:
        lists = arguments["indices"] * 1
    mlaflash.mla_sparse(**(arguments | {"indices": lists}), out=out, stream=stream)
    stream.synchronize()
    cupy.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("config", CONFIGS, ids=config_id)
def test_a_pool_past_two_to_the_31_elements(config: KernelConfig) -> None:
    import cupy

    pool = cupy.empty((3_800_000, 576), "bfloat16")
    slots = np.array([3_728_270, 3_728_271, 3_799_999, 5], np.int32)
    rows = build(Case(name="rows", q_lens=(1,), kv_lens=(4,), heads=8, sm_scale=SCALE, addressing="dense"), 8)
    latent = rows["kv_cache"][0, :4]
    pool[cupy.asarray(slots)] = cupy.asarray(latent)
    indices = np.full((1, 20), -1, np.int64)
    indices[0, [0, 3, 17, 19]] = slots
    expected = oracle.mla_verify(rows["q"], latent, sm_scale=SCALE, kv_lens=np.array([4], np.int32))
    out, lse = mlaflash.mla_sparse(
        cupy.asarray(rows["q"]), pool, cupy.asarray(indices), sm_scale=SCALE, kernel=config.kernel, tiles=config
    )
    result = compare(out.get(), lse.get(), *expected, tolerance("bfloat16", "bfloat16"))
    assert result.passed, result.reason


def test_what_only_the_device_knows_is_checked_when_asked_for() -> None:
    arguments = build(LISTS, 9)
    arguments["indices"][0, 9] = 10_000
    with pytest.raises(mlaflash.InvalidArgumentError, match=r"indices\[0, 9\] is 10000"):
        mla_sparse(**arguments, validate=True)
    arguments["indices"] = arguments["indices"].astype(np.int16)
    with pytest.raises(mlaflash.ShapeError, match="indices is int16"):
        mla_sparse(**arguments)
