"""Caches of 8 bits on a GPU: against the oracle, as arrays of any library, and in CUDA graphs whose scale changes."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fp8_cases import BASE, E4M3_CONFIGS, FORMATS, JUDGED, asked, judge

import mlaflash
from mlaflash import TreeMask, VerifyPlan
from mlaflash.lab.inputs import KV_SCALE, Case, build
from mlaflash.lab.plan_inputs import plan_arguments

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The pynvml package:FutureWarning")]

Arguments = dict[str, Any]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def to_gpu(value: Any) -> Any:
    import cupy

    if isinstance(value, TreeMask):
        return TreeMask(cupy.asarray(value.words), value.max_q)
    if isinstance(value, tuple):
        return tuple(map(cupy.asarray, value))
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def host(result: Any) -> tuple[Any, Any]:
    return result[0].get(), result[1].get()


def call(arguments: Arguments, **extra: Any) -> tuple[Any, Any]:
    given = {name: to_gpu(value) for name, value in (arguments | extra).items()}
    function = mlaflash.mla_sparse if "indices" in arguments else mlaflash.mla_verify
    return host(function(**given))


def check(case: Case, seed: int, **extra: Any) -> None:
    arguments = build(case, seed) | {"out_dtype": "float32"}
    judge(call(arguments, **extra, validate=True), arguments, case)


@pytest.mark.parametrize(("kv_dtype", "kernel", "case"), JUDGED, ids=lambda each: getattr(each, "name", each))
def test_agrees_with_the_oracle(case: Case, kernel: str, kv_dtype: str) -> None:
    assert case.kv_dtype == kv_dtype
    check(case, 1, **asked(kernel))


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [1, 2, 8, 16, 64])
def test_long_contexts(heads: int, page_size: int, kv_dtype: str) -> None:
    case = replace(
        BASE, q_lens=(8, 3), kv_lens=(6001, 700), heads=heads, page_size=page_size, kv_dtype=kv_dtype, name="long"
    )
    check(case, 2)
    arguments = build(case, 2)
    judge(call(arguments, budget="sm_120"), arguments, case)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("heads", [8, 128])
def test_lists_of_slots(heads: int, kv_dtype: str) -> None:
    case = replace(BASE, name="lists", kv_lens=(900, 450), mask="none", topk=512, heads=heads, kv_dtype=kv_dtype)
    check(case, 3)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_bits_that_nobody_sees_change_nothing(kv_dtype: str) -> None:
    arguments = build(replace(BASE, kv_lens=(3001, 77), page_size=64, kv_dtype=kv_dtype), 4)
    unseen = (arguments["kv_cache"] == 0xFF).all(axis=-1, keepdims=True)
    results = [
        call(arguments | {"kv_cache": np.where(unseen, np.uint8(byte), arguments["kv_cache"])})
        for byte in (0, 0xFF, 0x7E)
    ]
    for result in results[1:]:
        for left, right in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_nan_code_is_nan_where_it_is_visible(kv_dtype: str) -> None:
    arguments = build(replace(BASE, mask="none", addressing="dense", kv_dtype=kv_dtype), 5)
    arguments["kv_cache"][1, 11, 300] = 0xFF
    out, lse = call(arguments)
    assert np.isfinite(out[:3].astype(np.float32)).all()
    assert np.isnan(out[3:].astype(np.float32)).all()
    assert np.isnan(lse[3:]).all()


def test_repeated_calls_follow_scales_and_addresses() -> None:
    import cupy

    arguments = build(BASE, 6)
    given = {name: to_gpu(value) for name, value in arguments.items()}
    for value in (KV_SCALE, 0.5 * KV_SCALE, KV_SCALE):
        expected = call(arguments, kv_scale=value)
        judge(expected, arguments | {"kv_scale": value}, BASE)
        for _ in range(2):  # the second is made of what the first one left
            scale = cupy.full(1, value, "float32")
            given |= {"kv_scale": scale, "kv_cache": given["kv_cache"].copy()}
            for left, right in zip(host(mlaflash.mla_verify(**given)), expected, strict=True):
                np.testing.assert_array_equal(left, right)


# --- plans ---------------------------------------------------------------------------------------------------------


def metadata(arguments: Arguments) -> Arguments:
    names = ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices", "block_table", "mask")
    return {name: to_gpu(arguments[name]) for name in names if not isinstance(arguments.get(name), str | None)}


def inputs(arguments: Arguments) -> Arguments:
    names = ("q", "kv_cache", "new_kv", "kv_scale")
    return {name: to_gpu(arguments[name]) for name in names if name in arguments}


def make(case: Case, **extra: Any) -> VerifyPlan:
    return VerifyPlan(**plan_arguments(case, kv_dtype=case.kv_dtype, **extra))


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [2, 8, 64])
def test_plans_agree_with_the_oracle(heads: int, page_size: int, kv_dtype: str) -> None:
    case = replace(
        BASE,
        q_lens=(3, 0, 5, 1),
        kv_lens=(3001, 5, 470, 9000),
        heads=heads,
        page_size=page_size,
        addressing="block_table" if page_size == 64 else "indices",
        kv_dtype=kv_dtype,
        new_kv=page_size == 16,
    )
    arguments = build(case, 7)
    planned = make(case, out_dtype="float32")
    planned.update(**metadata(arguments), validate=True)
    judge(host(planned.run(**inputs(arguments))), arguments, case)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("config", E4M3_CONFIGS, ids=lambda config: f"{config.kernel}-{config.rows}")
def test_each_kernels_plans_agree_with_the_oracle(config: Any, page_size: int) -> None:
    """Blocks with several items, a cap, rows in two pieces, and requests of one tile, of which groups have none."""
    case = replace(BASE, q_lens=(20, 0, 5, 1), kv_lens=(1400, 7, 3333, 16), page_size=page_size)
    for variant in (case, replace(case, logit_cap=30.0), replace(case, paired=True)):
        arguments = build(variant, 34)
        planned = make(variant, tiles=config, out_dtype="float32")
        planned.update(**metadata(arguments), validate=True)
        judge(host(planned.run(**inputs(arguments))), arguments, variant)


@pytest.mark.parametrize("heads", [2, 16])
def test_a_graph_follows_the_scale_on_the_device(heads: int) -> None:
    import cupy

    case = replace(BASE, kv_lens=(2001, 300), heads=heads)
    arguments = build(case, 8)
    planned = make(case, out_dtype="float32")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        scale = cupy.ones(1, "float32")
        updated, given = metadata(arguments), inputs(arguments) | {"kv_scale": scale}
        out, lse = cupy.empty((8, heads, 512), "float32"), cupy.empty((8, heads), "float32")
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        planned.update(**updated)
        planned.run(**given, out=out, lse=lse)
        graph = stream.end_capture()
        for value in (KV_SCALE, 0.25 * KV_SCALE, 2 * KV_SCALE):
            scale.fill(value)
            out.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            judge(host((out, lse)), arguments | {"kv_scale": value}, case)


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_call_may_be_captured(kv_dtype: str) -> None:
    import cupy

    case = replace(BASE, kv_dtype=kv_dtype)
    arguments = build(case, 9) | {"out_dtype": "float32"}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        given = {name: to_gpu(value) for name, value in arguments.items()}
        out, lse = mlaflash.mla_verify(**given)
        mlaflash.mla_verify(**given, out=out, lse=lse)  # the call that is captured has run: its memory is in the pool
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        mlaflash.mla_verify(**given, out=out, lse=lse)
        graph = stream.end_capture()
        out.fill(np.nan)
        graph.launch(stream)
        stream.synchronize()
        judge(host((out, lse)), arguments, case)


# --- other libraries -----------------------------------------------------------------------------------------------


def to_torch(value: Any) -> Any:
    import torch

    if isinstance(value, TreeMask):
        return to_gpu(value)
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16).copy()).cuda().view(torch.bfloat16)
    return torch.from_numpy(value.copy()).cuda()


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_tensors_give_the_same_bits(torch: Any, kv_dtype: str) -> None:
    arguments = build(replace(BASE, kv_dtype=kv_dtype), 10)
    expected = call(arguments)
    given = {name: to_torch(value) for name, value in arguments.items()}
    forms = [given]
    if kv_dtype == "float8_e4m3":
        typed = given["kv_cache"].view(torch.float8_e4m3fn)
        scale = torch.tensor(arguments["kv_scale"], device="cuda")
        del given["kv_dtype"]
        forms = [given | {"kv_cache": typed}, given | {"kv_cache": typed, "kv_scale": scale}]
        with pytest.raises(mlaflash.UnsupportedError, match="kv_cache is float8_e5m2"):
            mlaflash.mla_verify(**(given | {"kv_cache": given["kv_cache"].view(torch.float8_e5m2)}))
    for form in forms:
        out, lse = mlaflash.mla_verify(**form)
        np.testing.assert_array_equal(out.float().cpu().numpy(), expected[0].astype(np.float32))
        np.testing.assert_array_equal(lse.cpu().numpy(), expected[1])


def test_warmup_leaves_nothing_to_compile() -> None:
    from mlaflash import jit

    shape = mlaflash.VerifyShape(
        num_heads=8, q_len=8, kv_len=128, batch=2, page_size=16, mask="tree", kv_dtype="float8_e4m3"
    )
    mlaflash.warmup([shape])
    before = jit.stats().compiled
    call(build(BASE, 11))
    assert jit.stats().compiled == before
