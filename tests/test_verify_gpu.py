"""Every kernel on a GPU against the oracle, and what only a GPU can show: streams, captures, big pools."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from verify_cases import BASE, CASES, SCALE, config_id, configs, mma_configs, run_and_compare

import mlaflash
from mlaflash import Device, TreeMask, jit, oracle
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.mma_tiles import NARROW_32_DEEP
from mlaflash.tiles import KernelConfig, TileConfig, tile_candidates

pytestmark = pytest.mark.gpu
CONFIGS = list(configs())


def to_gpu(value: Any) -> Any:
    import cupy

    if isinstance(value, np.ndarray):
        return cupy.asarray(value)
    if isinstance(value, tuple):
        return tuple(map(cupy.asarray, value))
    if isinstance(value, TreeMask):
        return TreeMask(cupy.asarray(value.words), value.max_q)
    return value


def mla_verify(**arguments: Any) -> tuple[Any, Any]:
    out, lse = mlaflash.mla_verify(**{name: to_gpu(value) for name, value in arguments.items()})
    return out.get(), lse.get()


@pytest.mark.parametrize("config", [*CONFIGS, *mma_configs(), replace(NARROW_32_DEEP, nsplit=2)], ids=config_id)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_oracle(case: Case, config: KernelConfig) -> None:
    run_and_compare(mla_verify, case, config, seed=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("config", list(tile_candidates()), ids=config_id)
def test_every_tile_that_fits_agrees(config: TileConfig, dtype: str) -> None:
    if config.shared_bytes() > Device.current().shared_per_block:
        with pytest.raises(mlaflash.TileError, match=str(config.shared_bytes())):
            run_and_compare(mla_verify, BASE, config, seed=1)
        return
    case = replace(BASE, heads=20, q_lens=(2, 1), kv_lens=(75, 1300), mask="tree", dtype=dtype)
    run_and_compare(mla_verify, case, replace(config, nsplit=2), seed=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_contexts(dtype: str) -> None:
    case = Case(name="long", q_lens=(8,), kv_lens=(4100,), heads=8, sm_scale=SCALE, mask="tree", dtype=dtype)
    for config in (*CONFIGS, TileConfig(nsplit=64)):
        run_and_compare(mla_verify, case, config, seed=2)


def test_the_same_call_gives_the_same_bits() -> None:
    arguments = build(replace(BASE, kv_lens=(900, 70), dtype="bfloat16"), 1)
    first = mla_verify(**arguments)
    for _ in range(5):
        again = mla_verify(**arguments)
        np.testing.assert_array_equal(first[0], again[0])
        np.testing.assert_array_equal(first[1], again[1])


def test_work_runs_on_the_callers_stream() -> None:
    import cupy

    arguments = {name: to_gpu(value) for name, value in build(BASE, 3).items()}
    expected = mlaflash.mla_verify(**arguments)[0]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    out = cupy.zeros_like(expected)
    with stream:
        graph_input = arguments["q"] * 1
    mlaflash.mla_verify(**(arguments | {"q": graph_input}), out=out, stream=stream)
    stream.synchronize()
    cupy.testing.assert_array_equal(out, expected)


def test_a_warm_call_can_be_captured_and_replayed() -> None:
    import cupy

    arguments = {name: to_gpu(value) for name, value in build(replace(BASE, kv_lens=(300, 200)), 4).items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()  # the arrays are there
    with stream:
        out, lse = mlaflash.mla_verify(**arguments)
        expected = out.copy()
        stream.synchronize()
        out.fill(0)
        stream.begin_capture()
        mlaflash.mla_verify(**arguments, out=out, lse=lse)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    cupy.testing.assert_array_equal(out, expected)


def test_a_cold_call_is_refused_in_a_capture() -> None:
    import cupy

    arguments = {name: to_gpu(value) for name, value in build(replace(BASE, heads=3), 5).items()}
    config = TileConfig(ht=2, tk=64, nsplit=1)
    out = cupy.zeros((8, 3, 512), "float16")
    lse = cupy.zeros((8, 3), "float32")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(mlaflash.CaptureError, match="once before capturing"):
            mlaflash.mla_verify(**arguments, tiles=config, out=out, lse=lse)
        stream.end_capture()


def test_arrays_of_the_host_are_refused() -> None:
    arguments = {name: to_gpu(value) for name, value in build(BASE, 6).items()}
    with pytest.raises(mlaflash.ShapeError, match=r"kv_lens is a numpy.ndarray; mla_verify takes arrays on a GPU"):
        mlaflash.mla_verify(**(arguments | {"kv_lens": arguments["kv_lens"].get()}))


def test_e1_a_pool_past_two_to_the_31_elements() -> None:
    import cupy

    pool = cupy.empty((3_800_000, 576), "bfloat16")
    slots = np.array([3_728_270, 3_728_271, 3_799_999, 5], np.int32)
    rows = build(Case(name="rows", q_lens=(1,), kv_lens=(4,), heads=8, sm_scale=SCALE, addressing="dense"), 7)
    latent = rows["kv_cache"][0, :4]
    pool[cupy.asarray(slots)] = cupy.asarray(latent)
    lens = np.array([4], np.int32)
    expected = oracle.mla_verify(rows["q"], latent, sm_scale=SCALE, kv_lens=lens)
    for kernel in ("naive", "tile"):
        out, lse = mlaflash.mla_verify(
            cupy.asarray(rows["q"]),
            pool,
            sm_scale=SCALE,
            kv_lens=cupy.asarray(lens),
            kv_indptr=cupy.asarray([0, 4], dtype="int32"),
            kv_indices=cupy.asarray(slots),
            kernel=kernel,
        )
        result = compare(out.get(), lse.get(), *expected, tolerance("bfloat16", "bfloat16"))
        assert result.passed, result.reason


def test_loaded_kernels_use_no_local_memory() -> None:
    device = Device.current()
    from mlaflash.tiles import NaiveConfig, dtype_defines

    for config in (NaiveConfig(), TileConfig(), TileConfig(8, 32)):
        defines = dtype_defines("float32", "float32", "float32") | config.defines()
        kernel = jit.load(config.kernel, defines, device, config.shared_bytes("float32"))
        assert kernel.attributes()["local_bytes"] == 0
