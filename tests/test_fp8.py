"""Caches of 8 bits from the arguments to the results: what is read, what is refused, the kernels on the emulator."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fp8_cases import (
    BASE,
    E4M3,
    E4M3_CONFIGS,
    E4M3_READERS,
    FORMATS,
    JUDGED,
    NAMED,
    READERS,
    ROLES_32,
    asked,
    judge,
    numbers,
)
from verify_cases import SCALE, assert_same

import mlaflash
from mlaflash import Device, VerifyShape, emulator, oracle
from mlaflash.errors import InvalidArgumentError, ShapeError, TileError, UnsupportedError
from mlaflash.interop import numpy_view
from mlaflash.lab.inputs import KV_SCALE, Case, build
from mlaflash.lab.plan_inputs import plan_arguments
from mlaflash.lab.target import read_problem
from mlaflash.mma_tiles import (
    NARROW_32_E4M3,
    NARROW_PAIR,
    ROLES_32_E4M3,
    ROLES_E4M3,
    ROWS_64,
    MmaNarrowConfig,
)
from mlaflash.params import DS_MLA_BYTES, FP8_CODES, row_bytes
from mlaflash.plan import check_capacity, choose_work, run_launches
from mlaflash.schedule import FP8_KERNELS, build_params, plan
from mlaflash.shape import call_launches, plan_launches
from mlaflash.tiles import TileConfig

Arguments = dict[str, Any]
DEVICE = Device.for_arch("sm_120")


@pytest.fixture(params=FORMATS)
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(case: Case, seed: int, **extra: Any) -> None:
    arguments = build(case, seed) | {"out_dtype": "float32"}
    call = emulator.mla_sparse if case.topk else emulator.mla_verify
    judge(call(**arguments, **extra, seed=seed), arguments, case)


# --- the oracle ----------------------------------------------------------------------------------------------------


def test_the_oracle_attends_to_the_numbers_of_the_rows(kv_dtype: str) -> None:
    case = replace(BASE, q_lens=(2,), kv_lens=(40,), mask="none", addressing="dense", kv_dtype=kv_dtype)
    arguments = build(case, 0)
    out, lse = oracle.mla_verify(**arguments)
    rows = numbers(arguments["kv_cache"][0, :40], kv_dtype, arguments.get("kv_scale", 1.0))
    scores = SCALE * np.einsum("thd,kd->thk", arguments["q"].astype(np.float64), rows)
    weights = np.exp(scores)
    np.testing.assert_allclose(lse, np.log(weights.sum(-1)), rtol=1e-12)
    np.testing.assert_allclose(out, weights @ rows[:, :512] / weights.sum(-1, keepdims=True), rtol=1e-10, atol=1e-12)


def test_the_oracle_takes_a_scale_from_an_array_and_types_from_arrays() -> None:
    arguments = build(BASE, 1)
    expected = oracle.mla_verify(**arguments)
    arguments["kv_scale"] = np.full((1, 1), arguments["kv_scale"], np.float32)
    assert_same(oracle.mla_verify(**arguments), expected)
    del arguments["kv_dtype"]
    assert_same(oracle.mla_verify(**(arguments | {"kv_cache": arguments["kv_cache"].view(E4M3)})), expected)
    pair = arguments["kv_cache"].view(E4M3)
    assert_same(oracle.mla_verify(**(arguments | {"kv_cache": (pair[..., :512], pair[..., 512:])})), expected)
    with pytest.raises(InvalidArgumentError, match="kv_cache is uint8"):
        oracle.mla_verify(**arguments)


# --- arguments -----------------------------------------------------------------------------------------------------


def shapes(width: int) -> list[tuple[int, ...]]:
    return [(96, width), (96, 1, width), (6, 16, width), (6, 16, 1, width)]


@pytest.mark.parametrize("place", range(4))
def test_every_shape_of_a_cache_is_taken(place: int, kv_dtype: str) -> None:
    arguments = build(replace(BASE, kv_dtype=kv_dtype, q_lens=(2,), kv_lens=(61,)), 2)
    cache = arguments["kv_cache"]
    assert cache.shape == (6, 16, row_bytes(kv_dtype))
    found = read_problem(arguments | {"kv_cache": cache.reshape(shapes(cache.shape[-1])[place])})
    assert (found.kv_dtype, found.page_size, found.num_pages) == (kv_dtype, 16, 6)
    width = row_bytes(kv_dtype)
    assert found.page_strides == found.page_rope_strides == (16 * width, width)
    assert found.kv.rope_ptr - found.kv.latent_ptr == {576: 512, 656: 528}[width]
    assert found.is_aligned
    assert not found.is_split_kv


@pytest.mark.parametrize(
    ("dtype", "given", "found"),
    [
        (np.uint8, "float8_e4m3", "float8_e4m3"),
        (np.uint8, "float8_e4m3fn", "float8_e4m3"),
        (np.uint8, np.dtype(E4M3), "float8_e4m3"),
        (E4M3, None, "float8_e4m3"),
        (E4M3, "float8_e4m3", "float8_e4m3"),
        ("V1", "float8_e4m3", "float8_e4m3"),
    ],
)
@pytest.mark.parametrize("paired", [False, True])
def test_bytes_are_what_they_are_said_to_be(dtype: Any, given: Any, found: str, paired: bool) -> None:
    arguments = build(BASE, 3)
    cache = arguments["kv_cache"].view(dtype)
    arguments["kv_cache"] = (cache[..., :512], cache[..., 512:]) if paired else cache
    problem = read_problem(arguments | {"kv_dtype": given})
    assert (problem.kv_dtype, problem.dtype, problem.is_fp8) == (found, "bfloat16", True)
    assert not problem.is_split_kv


def test_rows_of_656_bytes_need_no_word() -> None:
    arguments = build(replace(BASE, kv_dtype="fp8_ds_mla"), 4)
    del arguments["kv_dtype"]
    assert read_problem(arguments).kv_dtype == "fp8_ds_mla"


def test_rows_in_two_arrays_lie_apart() -> None:
    assert read_problem(build(replace(BASE, paired=True), 5)).is_split_kv
    arguments = build(BASE, 5)
    cache = arguments["kv_cache"]
    assert not read_problem(arguments | {"kv_cache": (cache[..., :512], cache[..., 512:])}).is_split_kv


def test_16_bit_caches_may_be_named_too() -> None:
    arguments = build(replace(BASE, kv_dtype=None), 6)
    assert read_problem(arguments | {"kv_dtype": "bfloat16"}).kv_dtype == "bfloat16"
    assert read_problem(arguments).kv_scale_value == 1.0


def test_the_scale_reaches_the_kernels() -> None:
    arguments = build(BASE, 7)
    out = np.empty((8, 8, 512), ml_dtypes.bfloat16)
    views = [numpy_view("out", out), numpy_view("lse", np.empty((8, 8), np.float32))]
    problem = read_problem(arguments)
    params = build_params(problem, plan(problem, DEVICE), *views, {})
    assert (params["kv_scale"], params["kv_scale_value"]) == (0, np.float32(KV_SCALE))
    for shape in ((), (1,), (1, 1)):
        scale = np.full(shape, 0.5, np.float32)
        problem = read_problem(arguments | {"kv_scale": scale})
        params = build_params(problem, plan(problem, DEVICE), *views, {})
        assert params["kv_scale"] == scale.ctypes.data


def with_(**changes: Any) -> Callable[[Arguments], Arguments]:
    return lambda arguments: arguments | changes


def cast(dtype: Any, **changes: Any) -> Callable[[Arguments], Arguments]:
    return lambda arguments: arguments | {"kv_cache": arguments["kv_cache"].view(dtype)} | changes


def width(count: int, **changes: Any) -> Callable[[Arguments], Arguments]:
    return lambda arguments: arguments | {"kv_cache": np.zeros((6, 16, count), np.uint8)} | changes


REFUSED = [
    (with_(kv_dtype=None), ShapeError, r"kv_cache is uint8 .*Say kv_dtype='float8_e4m3'"),
    (cast(ml_dtypes.float8_e5m2), UnsupportedError, "kv_cache is float8_e5m2; .*float8_e4m3fn alone"),
    (cast(ml_dtypes.float8_e5m2, kv_dtype=None), UnsupportedError, "kv_cache is float8_e5m2; "),
    (cast(ml_dtypes.float8_e4m3fnuz), UnsupportedError, "kv_cache is float8_e4m3fnuz; "),
    (cast(ml_dtypes.float8_e4m3), UnsupportedError, "kv_cache is float8_e4m3; "),
    (with_(kv_dtype="float8_e5m2"), UnsupportedError, "kv_dtype is 'float8_e5m2'; allowed are float32"),
    (with_(kv_dtype=np.dtype(ml_dtypes.float8_e4m3)), UnsupportedError, "where float8_e4m3 is float8_e4m3fn"),
    (with_(kv_dtype="float8_e4m3fnuz"), UnsupportedError, "kv_dtype is 'float8_e4m3fnuz'"),
    (with_(kv_dtype="bfloat16"), ShapeError, "kv_cache is uint8 and kv_dtype 'bfloat16'"),
    (cast(np.int8), ShapeError, "kv_cache is int8 and kv_dtype 'float8_e4m3', which comes in arrays of uint8 or "),
    (width(656), ShapeError, "656 wide; its last axis must be 576"),
    (width(576, kv_dtype="fp8_ds_mla", kv_scale=1), ShapeError, "576 wide; its last axis must be 656"),
    (width(640, kv_dtype=None), ShapeError, r"uint8 \(6, 16, 640\), which does not say"),
    (width(656, kv_dtype=None), InvalidArgumentError, "kv_scale is given and kv_cache is fp8_ds_mla"),
    (with_(kv_scale=0.0), InvalidArgumentError, "kv_scale is 0.0; it must be greater than 0"),
    (with_(kv_scale=-1), InvalidArgumentError, "kv_scale is -1.0; it must be greater"),
    (with_(kv_scale=np.inf), InvalidArgumentError, "kv_scale is inf; it must be a finite"),
    (with_(kv_scale=None), InvalidArgumentError, "kv_scale is None; it must be a finite"),
    (with_(kv_scale="1"), InvalidArgumentError, "kv_scale is '1'"),
    (with_(kv_scale=np.ones(2, np.float32)), ShapeError, r"kv_scale is float32 \(2,\); .*one float32"),
    (with_(kv_scale=np.ones(1)), ShapeError, r"kv_scale is float64 \(1,\)"),
    (with_(kv_scale=np.zeros(1, np.float32)), InvalidArgumentError, "kv_scale is 0.0"),
    (with_(q=np.zeros((8, 8, 576), np.float32)), UnsupportedError, "q is float32 and kv_cache float8_e4m3"),
    (with_(new_kv=np.zeros((8, 576), np.uint8)), ShapeError, "new_kv has 8 rows of uint8; one bfloat16 row"),
]


@pytest.mark.parametrize(("change", "error", "named"), REFUSED, ids=[named for _, _, named in REFUSED])
def test_what_makes_no_sense_is_refused_by_name(
    change: Callable[[Arguments], Arguments], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        emulator.mla_verify(**change(build(BASE, 8)))


def test_a_pair_has_no_rows_of_656_bytes() -> None:
    arguments = build(replace(BASE, kv_dtype="fp8_ds_mla"), 9)
    pair = np.zeros((6, 16, 512), np.uint8), np.zeros((6, 16, 64), np.uint8)
    with pytest.raises(ShapeError, match=r"a pair and kv_dtype 'fp8_ds_mla'"):
        read_problem(arguments | {"kv_cache": pair})


def test_16_bit_caches_have_no_scale() -> None:
    arguments = build(replace(BASE, kv_dtype=None), 10)
    for scale in (0.5, np.ones(1, np.float32)):
        with pytest.raises(InvalidArgumentError, match="kv_scale is given and kv_cache is bfloat16"):
            emulator.mla_verify(**arguments, kv_scale=scale)


# --- what is chosen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("kv_len", [64, 4096, 200_000])
def test_kernels_that_read_8_bits_are_chosen_and_fit(heads: int, kv_len: int, kv_dtype: str) -> None:
    shape = VerifyShape(num_heads=heads, q_len=4, kv_len=kv_len, batch=4, page_size=64, kv_dtype=kv_dtype)
    for arch in ("sm_89", "sm_90", "sm_120"):
        device = Device.for_arch(arch)
        first, *merge = plan(shape.problem(), device).launches
        assert first.kernel in FP8_KERNELS[kv_dtype]
        assert first.defines["KV_DTYPE"] == FP8_CODES[kv_dtype]
        assert first.shared_bytes <= device.shared_per_block
        assert all(step.defines["KV_DTYPE"] == step.defines["Q_DTYPE"] == 1 for step in merge)
        _, planned, planned_merge = plan_launches(shape, device)
        assert (planned.kernel in FP8_KERNELS[kv_dtype], planned.defines["KV_DTYPE"]) == (True, FP8_CODES[kv_dtype])
        assert planned_merge.defines["KV_DTYPE"] == 1


@pytest.mark.parametrize(("kv_dtype", "kernel"), NAMED)
@pytest.mark.parametrize("rows", [1, 16, 32, 33, 200])
def test_a_kernel_may_be_asked_for_by_name(kernel: str, rows: int, kv_dtype: str) -> None:
    problem = VerifyShape(num_heads=rows, q_len=1, kv_len=500, kv_dtype=kv_dtype).problem()
    assert plan(problem, DEVICE, kernel=kernel).launches[0].kernel == kernel


@pytest.mark.parametrize(
    ("extra", "error", "named"),
    [
        ({"kernel": "tile"}, UnsupportedError, "'tile' does not read a {} cache; mma_narrow .*do.*. Leave kernel"),
        ({"kernel": "naive"}, UnsupportedError, "'naive' does not read a {} cache"),
        ({"kernel": "mma_wide"}, UnsupportedError, "'mma_wide' does not read a {} cache"),
        ({"tiles": TileConfig()}, UnsupportedError, "'tile' does not read a {} cache"),
        ({"tiles": ROWS_64}, UnsupportedError, "'mma_wide' does not read a {} cache"),
        ({"deterministic": True}, UnsupportedError, "deterministic is set and kv_cache is {}"),
    ],
)
def test_what_no_kernel_does_is_refused_by_name(extra: Any, error: type[Exception], named: str, kv_dtype: str) -> None:
    problem = read_problem(build(replace(BASE, kv_dtype=kv_dtype), 11))
    with pytest.raises(error, match=named.format(kv_dtype)):
        plan(problem, DEVICE, **extra)


def test_constants_for_the_other_width_are_refused() -> None:
    plain = read_problem(build(replace(BASE, kv_dtype=None), 11))
    with pytest.raises(TileError, match=r"step_tiles is 2 and kv_cache is bfloat16; .*Use 1"):
        plan(plain, DEVICE, tiles=MmaNarrowConfig(step_tiles=2, kv_groups=1))
    with pytest.raises(TileError, match=r"shared_steps is 1 and kv_cache is bfloat16; .*of float8_e4m3. Use 0"):
        plan(plain, DEVICE, tiles=NARROW_32_E4M3)
    with pytest.raises(TileError, match=r"row_tiles is 2 and kv_cache is bfloat16; .*of float8_e4m3. Use 4, or mma_na"):
        plan(plain, DEVICE, tiles=ROLES_32_E4M3)
    rows = read_problem(build(replace(BASE, kv_dtype="fp8_ds_mla"), 11))
    for narrower in (plain, rows):
        with pytest.raises(TileError, match=r"column_warps is 2 and kv_cache is .*of float8_e4m3. Use 4"):
            plan(narrower, DEVICE, tiles=MmaNarrowConfig(column_warps=2, kv_groups=1))
    with pytest.raises(TileError, match=r"row_tiles is 2 and kv_cache is fp8_ds_mla; .*of 16 bits and of .*. Use 1"):
        plan(rows, DEVICE, tiles=NARROW_32_E4M3)
    with pytest.raises(TileError, match=r"lookahead is 1 and kv_cache is float8_e4m3; it must be 2 there. Use 2"):
        plan(read_problem(build(BASE, 11)), DEVICE, tiles=replace(ROLES_E4M3, lookahead=1))
    lists = read_problem(build(replace(BASE, mask="none", topk=40), 11))
    with pytest.raises(UnsupportedError, match="'mma_roles' does not take lists of slots"):
        plan(lists, DEVICE, kernel="mma_roles")
    new = read_problem(build(replace(BASE, new_kv=True), 11))
    with pytest.raises(UnsupportedError, match=r"'mma_roles' does not take new_kv beside a float8_e4m3 cache; mma_"):
        plan(new, DEVICE, kernel="mma_roles")
    assert plan(new, DEVICE, kernel="mma_narrow").config == replace(NARROW_32_E4M3, nsplit=None)
    with pytest.raises(UnsupportedError, match=r"'mma_roles' does not read a fp8_ds_mla cache; mma_narrow does. Leave"):
        plan(read_problem(build(replace(BASE, kv_dtype="fp8_ds_mla"), 11)), DEVICE, kernel="mma_roles")


def test_rows_that_no_kernel_can_copy_are_refused_with_the_reason() -> None:
    arguments = build(BASE, 12)
    padded = np.zeros((*arguments["kv_cache"].shape[:-1], 580), np.uint8)
    padded[..., :576] = arguments["kv_cache"]
    with pytest.raises(UnsupportedError, match=r"mma_roles do, but not this problem: .*start on 16 bytes"):
        emulator.mla_verify(**(arguments | {"kv_cache": padded[..., :576]}))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_gpus_that_do_not_convert_8_bits_are_refused_by_name(arch: str, kv_dtype: str) -> None:
    shape = VerifyShape(num_heads=8, q_len=2, kv_len=500, kv_dtype=kv_dtype)
    device = Device.for_arch(arch)
    named = f"kv_cache is {kv_dtype} and .* is {arch}; sm_89 is the least"
    for ask in (lambda: plan(shape.problem(), device), lambda: plan_launches(shape, device)):
        with pytest.raises(UnsupportedError, match=named):
            ask()
    with pytest.raises(UnsupportedError, match=named):
        emulator.mla_verify(**build(replace(BASE, kv_dtype=kv_dtype), 13), budget=arch)


def test_padding_alone_needs_no_kernel_of_8_bits() -> None:
    arguments = build(replace(BASE, q_lens=(), kv_lens=(), mask="none"), 14)
    q = np.full((2, 8, 576), np.nan, ml_dtypes.bfloat16)
    out, lse = emulator.mla_verify(**(arguments | {"q": q}))
    assert not out.any()
    assert np.isneginf(lse).all()


def test_a_plan_says_what_it_does_not_do(kv_dtype: str) -> None:
    sizes = {"num_heads": 8, "max_batch": 2, "max_q_len": 4, "max_kv_len": 900, "sm_scale": SCALE}
    capacity = check_capacity(**sizes, kv_dtype=kv_dtype)
    assert capacity.kv_dtype == kv_dtype
    work = choose_work(capacity, DEVICE)
    assert run_launches(capacity, work)[0].defines["KV_DTYPE"] == FP8_CODES[kv_dtype]
    with pytest.raises(UnsupportedError, match=f"mma_wide, which does not read a {kv_dtype} cache"):
        choose_work(capacity, DEVICE, ROWS_64)
    for name in ("float8_e5m2", "float32", "float16"):
        with pytest.raises(UnsupportedError, match=f"kv_dtype is '{name}'"):
            check_capacity(**sizes, kv_dtype=name)
    with pytest.raises(UnsupportedError, match="split_kv is set and kv_dtype 'fp8_ds_mla'"):
        check_capacity(**sizes, kv_dtype="fp8_ds_mla", split_kv=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_dtype": "float8_e5m2"}, "kv_dtype is 'float8_e5m2'"),
        ({"kv_dtype": "float16"}, "kv_dtype is 'float16' and dtype 'bfloat16'"),
        ({"kv_dtype": "float8_e4m3", "dtype": "float32"}, "kv_dtype is 'float8_e4m3' and dtype 'float32'"),
        ({"kv_dtype": "fp8_ds_mla", "split_kv": True}, "split_kv is set"),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        VerifyShape(num_heads=8, q_len=2, kv_len=500, **changes)


def test_a_shape_counts_the_bytes_of_its_rows() -> None:
    shape = VerifyShape(num_heads=8, q_len=1, kv_len=1000)
    for kv_dtype, row in ((None, 1152), ("bfloat16", 1152), ("float8_e4m3", 576), ("fp8_ds_mla", DS_MLA_BYTES)):
        found = mlaflash.roofline(replace(shape, kv_dtype=kv_dtype), DEVICE)
        assert found.kv_bytes == 1000 * row
    with_8_bits = replace(shape, kv_dtype="float8_e4m3")
    assert mlaflash.roofline(with_8_bits, DEVICE).flop == mlaflash.roofline(shape, DEVICE).flop
    assert {launch.kernel for launch in call_launches(with_8_bits, DEVICE)} == {*FP8_KERNELS["float8_e4m3"], "combine"}


# --- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5, 8, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize(("kv_dtype", "kernel"), [*READERS, *((each, None) for each in FORMATS)])
def test_any_number_of_rows(rows: int, kernel: str | None, kv_dtype: str) -> None:
    case = replace(BASE, q_lens=(1,), kv_lens=(rows + 40,), heads=rows, kv_dtype=kv_dtype)
    check(case, rows, **asked(kernel))


@pytest.mark.parametrize(("kv_dtype", "kernel", "case"), JUDGED, ids=lambda each: getattr(each, "name", each))
def test_agrees_with_the_oracle(case: Case, kernel: str, kv_dtype: str) -> None:
    assert case.kv_dtype == kv_dtype
    check(case, 20, **asked(kernel))


@pytest.mark.parametrize(("kv_dtype", "kernel"), READERS)
def test_16_bit_results(kernel: str, kv_dtype: str) -> None:
    case = replace(BASE, kv_dtype=kv_dtype)
    arguments = build(case, 21)
    judge(emulator.mla_verify(**arguments, **asked(kernel)), arguments, case)


def test_rows_in_two_arrays_give_the_same_bits() -> None:
    arguments = build(replace(BASE, paired=True), 22)
    whole = np.concatenate(arguments["kv_cache"], -1)
    for cache in (whole, (whole[..., :512], whole[..., 512:])):
        assert_same(emulator.mla_verify(**(arguments | {"kv_cache": cache})), emulator.mla_verify(**arguments))


@pytest.mark.parametrize("heads", [4, 40])
def test_lists_of_slots(heads: int, kv_dtype: str) -> None:
    case = replace(BASE, name="lists", kv_lens=(60, 45), mask="none", topk=75, heads=heads, kv_dtype=kv_dtype)
    check(case, 23)


@pytest.mark.parametrize("kernel", E4M3_READERS)
def test_a_scale_on_the_device_is_the_same_as_its_number(kernel: str) -> None:
    arguments = build(replace(BASE, new_kv=kernel == "mma_narrow"), 24) | asked(kernel)
    expected = emulator.mla_verify(**arguments)
    arguments["kv_scale"] = np.full(1, arguments["kv_scale"], np.float32)
    assert_same(emulator.mla_verify(**arguments), expected)


@pytest.mark.parametrize("kernel", E4M3_READERS)
@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 37.5])
def test_scales_of_any_size(scale: float, kernel: str) -> None:
    # Scores keep their size.
    case = replace(BASE, sm_scale=SCALE * KV_SCALE / scale)
    arguments = build(case, 25) | {"kv_scale": scale, "out_dtype": "float32", "sm_scale": case.sm_scale}
    arguments["q"] = build(BASE, 25)["q"]
    judge(emulator.mla_verify(**arguments, **asked(kernel)), arguments, case)


@pytest.mark.parametrize(("kv_dtype", "kernel"), READERS)
def test_a_nan_code_is_nan_where_it_is_visible_and_nowhere_else(kernel: str, kv_dtype: str) -> None:
    case = replace(BASE, kv_dtype=kv_dtype, q_lens=(2, 2), mask="none", addressing="dense")
    arguments = build(case, 26)
    arguments["kv_cache"][1, 11, 300] = 0x7F
    out, lse = emulator.mla_verify(**arguments, **asked(kernel))
    assert np.isfinite(out[:2].astype(np.float32)).all()
    assert np.isfinite(lse[:2]).all()
    assert np.isnan(lse[2:]).all()
    assert np.isnan(out[2:].astype(np.float32)).all()


@pytest.mark.parametrize(("kv_dtype", "kernel"), READERS)
def test_bits_that_nobody_sees_change_nothing(kernel: str, kv_dtype: str) -> None:
    case = replace(BASE, page_size=64, kv_dtype=kv_dtype)
    arguments = build(case, 27)
    poisoned, clean = arguments["kv_cache"], arguments["kv_cache"].copy()
    clean[(poisoned == 0xFF).all(axis=-1)] = 0
    assert (clean != poisoned).any()
    expected = emulator.mla_verify(**(arguments | {"kv_cache": clean}), **asked(kernel))
    for byte in (0xFF, 0x7F, 0x7E):
        other = np.where((poisoned == 0xFF).all(axis=-1, keepdims=True), np.uint8(byte), poisoned)
        assert_same(emulator.mla_verify(**(arguments | {"kv_cache": other}), **asked(kernel)), expected)


@pytest.mark.parametrize(("kv_dtype", "kernel"), READERS)
def test_kv_is_read_once_for_all_rows(kernel: str, kv_dtype: str) -> None:
    q_len = {"mma_narrow": 2, ROLES_32: 4}.get(kernel, 8)  # of 8 heads
    case = replace(BASE, q_lens=(q_len,), kv_lens=(96,), kv_dtype=kv_dtype, mask="none")
    reports: list[Any] = []
    emulator.mla_verify(**build(case, 28), **asked(kernel), reports=reports)
    assert sum(report.bytes_read["kv_cache"] for report in reports) == 96 * row_bytes(kv_dtype)


# --- plans ---------------------------------------------------------------------------------------------------------


def make(case: Case, **extra: Any) -> emulator.VerifyPlan:
    arguments = plan_arguments(case, num_sms=5, kv_dtype=case.kv_dtype, out_dtype="float32")
    return emulator.VerifyPlan(**(arguments | extra))


def update(planned: emulator.VerifyPlan, arguments: Arguments) -> None:
    names = ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices", "block_table", "mask")
    planned.update(**{name: arguments[name] for name in names if name in arguments}, validate=True)


@pytest.mark.parametrize("heads", [2, 8, 24])
@pytest.mark.parametrize(("page_size", "addressing"), [(1, "indices"), (16, "block_table"), (64, "indices")])
def test_plans_agree_with_the_oracle(page_size: int, addressing: Any, heads: int, kv_dtype: str) -> None:
    case = replace(
        BASE,
        q_lens=(3, 0, 5),
        kv_lens=(140, 7, 333),
        heads=heads,
        page_size=page_size,
        addressing=addressing,
        kv_dtype=kv_dtype,
        new_kv=page_size == 16,
    )
    arguments = build(case, 30)
    planned = make(case)
    assert planned.work.config.kernel in FP8_KERNELS[kv_dtype]
    update(planned, arguments)
    given = {name: arguments[name] for name in ("new_kv", "kv_scale") if name in arguments}
    judge(planned.run(arguments["q"], arguments["kv_cache"], **given), arguments, case)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("logit_cap", [0.0, 30.0])
@pytest.mark.parametrize("config", E4M3_CONFIGS, ids=lambda config: f"{config.kernel}-{config.rows}")
def test_plans_with_every_feature_agree_with_the_oracle(config: Any, logit_cap: float, paired: bool) -> None:
    """Several items a block, and new rows over more than one tile."""
    case = replace(BASE, q_lens=(20, 0, 5), kv_lens=(140, 7, 333), mask="tree", logit_cap=logit_cap, paired=paired)
    case = replace(case, new_kv=config.kernel == "mma_narrow")
    arguments = build(case, 33)
    planned = make(case, tiles=config)
    update(planned, arguments)
    given = {name: arguments[name] for name in ("new_kv", "kv_scale") if name in arguments}
    judge(planned.run(arguments["q"], arguments["kv_cache"], **given), arguments, case)


def test_a_plan_follows_the_scale() -> None:
    arguments = build(BASE, 31)
    planned = make(BASE)
    update(planned, arguments)
    scale = np.full(1, KV_SCALE, np.float32)
    for value in (KV_SCALE, 0.5 * KV_SCALE, 2.0 * KV_SCALE):
        scale[0] = value
        results = [planned.run(arguments["q"], arguments["kv_cache"], kv_scale=each) for each in (value, scale)]
        assert_same(*results)
        judge(results[0], arguments | {"kv_scale": value}, BASE)


def test_a_plan_refuses_other_caches_and_scales() -> None:
    arguments = build(BASE, 32)
    planned = make(BASE)
    update(planned, arguments)
    plain = build(replace(BASE, kv_dtype=None), 32)
    with pytest.raises(ShapeError, match="kv_cache is bfloat16 and kv_dtype 'float8_e4m3'"):
        planned.run(plain["q"], plain["kv_cache"])
    for scale, named in ((0.0, "kv_scale is 0.0"), (None, "kv_scale is None")):
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match=named):
                planned.run(arguments["q"], arguments["kv_cache"], kv_scale=scale)
        planned.run(arguments["q"], arguments["kv_cache"], kv_scale=1.0)
    of_16_bits = make(replace(BASE, kv_dtype=None))
    update(of_16_bits, plain)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="kv_scale is given and kv_cache is bfloat16"):
            of_16_bits.run(plain["q"], plain["kv_cache"], kv_scale=0.5)
        of_16_bits.run(plain["q"], plain["kv_cache"])
    with pytest.raises(ShapeError, match="kv_cache is float8_e4m3; the plan was made for bfloat16"):
        of_16_bits.run(arguments["q"], arguments["kv_cache"].view(E4M3))
    with pytest.raises(TileError, match="101376"):
        choose_work(check_capacity(**_sizes(), kv_dtype="float8_e4m3"), DEVICE, replace(NARROW_PAIR, stages=40))


def _sizes() -> dict[str, Any]:
    return {"num_heads": 8, "max_batch": 2, "max_q_len": 4, "max_kv_len": 900, "sm_scale": SCALE}
