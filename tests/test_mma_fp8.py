"""The tensor-core kernels over caches in 8 bits, on the emulator, against the oracle: numbers, bytes, builds."""

from dataclasses import replace

import numpy as np
import pytest

from mlaflash import Device, oracle
from mlaflash.cost import FP8_ROW_CLASSES
from mlaflash.emulator import mla_verify
from mlaflash.errors import EmulatorError, TileError, UnsupportedError
from mlaflash.jit import compile_kernel
from mlaflash.lab.inputs import KV_SCALE, Case, build
from mlaflash.lab.space import SPACES
from mlaflash.masks import TreeMask
from mlaflash.mma_tiles import (
    NARROW_32_E4M3,
    NARROW_DS_MLA,
    NARROW_E4M3,
    ROLES_32_E4M3,
    ROLES_E4M3,
    MmaNarrowConfig,
    feature_defines,
)
from mlaflash.tiles import dtype_defines

KIMI = 0.14468
E4M3, DS_MLA = "float8_e4m3", "fp8_ds_mla"
ROW_BYTES = {E4M3: 576, DS_MLA: 656}
BASE = Case(name="fp8", q_lens=(3, 2), kv_lens=(90, 40), heads=8, sm_scale=KIMI, kv_dtype=E4M3)
NORM = 5e-4
"""Largest relative norm of the error of out, in float32: weights are float16, and nothing else is rounded so."""

# One step of two tiles and one of one, one group and two, one buffer and two.
BUILDS = {
    "narrow": (E4M3, NARROW_E4M3),
    "narrow-groups": (E4M3, MmaNarrowConfig(2, 3, 2, 1)),
    "narrow-steps": (E4M3, MmaNarrowConfig(1, 2, 1, 2)),
    "narrow-32": (E4M3, NARROW_32_E4M3),
    "narrow-32-groups": (E4M3, MmaNarrowConfig(2, 3, 1, 1, 2, shared_steps=1)),
    "roles": (E4M3, ROLES_E4M3),
    "roles-32": (E4M3, ROLES_32_E4M3),
    "narrow-ds": (DS_MLA, NARROW_DS_MLA),
}


@pytest.fixture(params=BUILDS)
def kv_build(request):
    return BUILDS[request.param]


def each_build(*both):
    """Parametrize by build and the type of q: bfloat16 and float16 for builds in `both`, else the slow ones apart."""
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(name, dtype, marks=() if dtype == first or name in both else pytest.mark.slow)
            for name, first in zip(BUILDS, ["bfloat16", "float16"] * len(BUILDS), strict=False)
            for dtype in ("bfloat16", "float16")
        ],
    )


def run(arguments, config, *, splits=1, seed=0, **extra):
    """Run the kernel and return out in float32, lse and its report."""
    reports = []
    tiles = replace(config, nsplit=splits)
    out, lse = mla_verify(
        **arguments, kernel=config.kernel, tiles=tiles, seed=seed, reports=reports, out_dtype="float32", **extra
    )
    return out, lse, reports[0]


def check(arguments, config, **how):
    """Run the kernel, compare with the oracle, and return the report of the split kernel."""
    out, lse, report = run(arguments, config, **how)
    expected, expected_lse = oracle.mla_verify(**arguments)
    assert np.linalg.norm(out - expected) <= NORM * np.linalg.norm(expected)
    np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(expected_lse))
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6, atol=1e-5)
    assert report.bank["ldmatrix"][1] == 0
    return report


def cache_rows(arguments):
    """Return the cache as rows of bytes, which may be written."""
    rows = arguments["kv_cache"].view(np.uint8)
    return rows.reshape(-1, rows.shape[-1])


@pytest.mark.parametrize("mask", ["causal", "tree"])
@each_build("roles", "narrow-ds")
def test_element_types_and_masks(name, dtype, mask):
    kv_dtype, config = BUILDS[name]
    case = replace(BASE, q_lens=(9, 0, 2), kv_lens=(171, 0, 33), kv_dtype=kv_dtype, dtype=dtype, mask=mask)
    check(build(case, 1), config, splits=2, seed=1)


@pytest.mark.parametrize(("kv_len", "page_size"), [(1, 48), (31, 16), (33, 1), (64, 16), (81, 48)])
def test_pages_and_lengths_around_steps(kv_build, kv_len, page_size):
    kv_dtype, config = kv_build
    ids = "int64" if page_size == 16 else "int32"
    case = replace(BASE, q_lens=(1,), kv_lens=(kv_len,), page_size=page_size, kv_dtype=kv_dtype, id_dtype=ids)
    check(build(case, 2), config)


@pytest.mark.parametrize("mask", ["causal", "tree"])
@each_build()
def test_new_rows_are_as_precise_as_q(name, dtype, mask):
    kv_dtype, config = BUILDS[name]
    case = replace(
        BASE, q_lens=(3, 17, 2), kv_lens=(148, 50, 2), kv_dtype=kv_dtype, dtype=dtype, mask=mask, new_kv=True
    )
    arguments = build(replace(case, paired=kv_dtype == E4M3), 3)
    if config.kernel == "mma_narrow":
        check(arguments, config, splits=2)
    else:
        with pytest.raises(UnsupportedError, match="does not take new_kv beside a float8_e4m3 cache; mma_narrow does"):
            run(arguments, config)


@pytest.mark.parametrize("name", ["narrow", "narrow-32", "roles", "narrow-ds"])
@pytest.mark.parametrize("logit_cap", [0.5, 30.0])
def test_soft_cap(name, logit_cap):
    kv_dtype, config = BUILDS[name]
    check(build(replace(BASE, kv_dtype=kv_dtype, logit_cap=logit_cap), 4), config)


@pytest.mark.parametrize("logit_cap", [0.0, 30.0])
@pytest.mark.parametrize("name", ["narrow", "narrow-32", "roles"])
def test_rows_in_two_pieces(name, logit_cap):
    kv_dtype, config = BUILDS[name]
    case = replace(BASE, q_lens=(9, 2), kv_lens=(171, 33), kv_dtype=kv_dtype, logit_cap=logit_cap, mask="tree")
    case = replace(case, paired=True, new_kv=config.kernel == "mma_narrow")
    check(build(case, 15), config, splits=2, seed=2)


@pytest.mark.parametrize("sm_scale", [0.0, -KIMI, 3.0])
def test_any_finite_scale(kv_build, sm_scale):
    kv_dtype, config = kv_build
    check(build(replace(BASE, kv_dtype=kv_dtype, sm_scale=sm_scale), 5), config, splits=2)


def scaled_q(arguments, factors):
    q = arguments["q"]
    return arguments | {"q": (q.astype(np.float64) * factors).astype(q.dtype)}


@pytest.mark.parametrize("exponent", [-100, 60])
def test_rows_of_q_that_float16_cannot_hold(kv_build, exponent):
    """Above its largest number or below its smallest, all rows together; the scale brings the scores back."""
    kv_dtype, config = kv_build
    arguments = scaled_q(build(replace(BASE, kv_dtype=kv_dtype), 6), 2.0**exponent)
    check(arguments | {"sm_scale": KIMI * 2.0**-exponent}, config)


@pytest.mark.parametrize("name", ["roles", "narrow-ds"])
def test_subnormal_q_of_float16(name):
    kv_dtype, config = BUILDS[name]
    arguments = build(replace(BASE, kv_dtype=kv_dtype, dtype="float16"), 7)
    q = np.round(arguments["q"].astype(np.float64) * 8) * 2.0**-24
    check(arguments | {"q": q.astype(np.float16), "sm_scale": KIMI * 2.0**21}, config)


def test_rows_of_very_different_size_share_a_block(kv_build):
    kv_dtype, config = kv_build
    arguments = build(replace(BASE, kv_dtype=kv_dtype), 8)
    factors = np.array([0, 2.0**-60, 1, 2.0**-20, 0, 2.0**-3, 2.0**-100, 1])
    check(scaled_q(arguments, factors[:, None]), config)


@pytest.mark.parametrize("kv_scale", [1e-6, 3.7e-3, 1e4])
@pytest.mark.parametrize("name", ["narrow", "roles"])
def test_scales_of_the_cache(name, kv_scale):
    kv_dtype, config = BUILDS[name]
    arguments = build(replace(BASE, kv_dtype=kv_dtype), 9)
    changed = {"kv_scale": kv_scale, "sm_scale": KIMI * KV_SCALE / kv_scale}
    check(arguments | changed, config, splits=2)
    check(arguments | changed | {"kv_scale": np.array([kv_scale], np.float32)}, config)


@pytest.mark.parametrize("kind", ["small", "large", "any", "one in seven", "of tokens that nobody heeds"])
@pytest.mark.parametrize("name", ["narrow-ds"])
def test_scales_of_tokens(name, kind):
    """Weights times scales fit float16 whatever the scales are, and what counts is not lost."""
    _, config = BUILDS[name]
    arguments = build(replace(BASE, kv_dtype=DS_MLA), 10)
    rows = cache_rows(arguments)
    scales = rows[:, 512:528].copy().view(np.float32)
    rng, token = np.random.default_rng(10), np.arange(len(scales))[:, None]
    sm_scale = 1e-6
    if kind == "small":
        scales[:], sm_scale = 1e-6 * rng.uniform(1, 2, scales.shape), KIMI * 1e6
    elif kind == "large":
        scales[:] = 1e4 * rng.uniform(1, 2, scales.shape)
    elif kind == "any":
        scales[:] = 10 ** rng.uniform(-6, 4, scales.shape)
    elif kind == "one in seven":
        scales[:] = np.where(token % 7 == 3, 1e4, 1e-6)
    else:
        # Large values of weight 2^-100 and less in the first tile: those after them have small scales and all weight.
        first = arguments["kv_indices"][:16]
        rows[:, :128] = 0x38
        scales[:, :] = 1e-6
        scales[first, 1:] = 1e4
        rows[first, 128:512] = np.where(rng.integers(0, 2, (16, 384)), 0x38, 0xB8)
        scales[first, 0] = -1e3
        arguments |= {"q": np.abs(arguments["q"])}
        arguments["q"][..., 128:] = 0
        sm_scale = 1.0
    rows[:, 512:528] = scales.view(np.uint8)
    check(arguments | {"sm_scale": sm_scale}, config, splits=2)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_reach_those_who_see_them(kv_build, code):
    kv_dtype, config = kv_build
    arguments = build(replace(BASE, q_lens=(4,), kv_lens=(40,), heads=4, kv_dtype=kv_dtype, mask="tree"), 11)
    seen = np.tril(np.ones((4, 4), bool))
    seen[:, 2] = False
    arguments |= {"mask": TreeMask.from_dense([seen])}
    cache_rows(arguments)[arguments["kv_indices"][38]] = code
    out, lse, _ = run(arguments, config)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    cache_rows(arguments)[arguments["kv_indices"][5], 300] = code
    out, lse, _ = run(arguments, config, splits=2)
    assert np.isnan(lse).all()
    assert np.isnan(out).all()


@pytest.mark.parametrize(("q_len", "heads"), [(2, 8), (3, 8), (1, 64)])
def test_every_byte_is_read_once_for_a_row_tile(kv_build, q_len, heads):
    kv_dtype, config = kv_build
    case = replace(BASE, q_lens=(q_len,), kv_lens=(203,), heads=heads, kv_dtype=kv_dtype, mask="none")
    report = check(build(case, 12), config, splits=2)
    row_tiles = -(-q_len * heads // config.rows)
    read = sum(n for name, n in report.bytes_read.items() if name.startswith("kv_cache"))
    assert read == row_tiles * 203 * ROW_BYTES[kv_dtype]


def test_schedules_give_the_same_bits(kv_build):
    kv_dtype, config = kv_build
    arguments = build(replace(BASE, q_lens=(9, 2), kv_lens=(130, 21), mask="tree", kv_dtype=kv_dtype), 13)
    first = run(arguments, config, splits=2, seed=1)
    for seed in (2, 3):
        other = run(arguments, config, splits=2, seed=seed)
        np.testing.assert_array_equal(first[0], other[0])
        np.testing.assert_array_equal(first[1], other[1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_many_schedules_are_free_of_races(kv_build, seed):
    kv_dtype, config = kv_build
    case = replace(BASE, q_lens=(9, 1), kv_lens=(130, 17), mask="tree", page_size=(1, 16)[seed % 2], kv_dtype=kv_dtype)
    case = replace(case, new_kv=seed % 3 == 0 and config.kernel == "mma_narrow")
    check(build(case, seed), config, splits=1 + seed % 3, seed=seed)


def test_shared_memory_is_what_the_kernel_uses(kv_build, monkeypatch):
    kv_dtype, config = kv_build
    arguments = build(replace(BASE, q_lens=(9,), kv_lens=(150,), kv_dtype=kv_dtype), 14)
    bytes_of = type(config).shared_bytes
    run(arguments, config)
    monkeypatch.setattr(type(config), "shared_bytes", lambda self, kv="bfloat16": bytes_of(self, kv) - 32)
    with pytest.raises(EmulatorError, match="bounds"):
        run(arguments, config)


def test_the_shipped_constants_fit_the_sm_120_budget():
    limit = Device.for_arch("sm_120")
    for kv_dtype, classes in FP8_ROW_CLASSES.items():
        for row_class in classes:
            held = row_class.config.shared_bytes(kv_dtype)
            assert held <= limit.shared_per_block
            assert row_class.blocks_per_sm * (held + 1024) <= limit.shared_per_sm


SHIPPED = {
    "narrow": (E4M3, NARROW_E4M3),
    "narrow-32": (E4M3, NARROW_32_E4M3),
    "roles": (E4M3, ROLES_E4M3),
    "roles-32": (E4M3, ROLES_32_E4M3),
    "narrow-ds": (DS_MLA, NARROW_DS_MLA),
}


@pytest.mark.parametrize("config", [ROLES_E4M3, ROLES_32_E4M3])
def test_a_sweep_of_mma_roles_tries_what_is_shipped(config):
    assert replace(config, nsplit=1) in SPACES["mma_roles"].candidates("gpu", {"nsplit": (1,)}, E4M3)


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
@pytest.mark.parametrize("name", SHIPPED)
def test_it_compiles_without_spills(name, arch):
    assert_no_spills(*SHIPPED[name], ("bfloat16", "bfloat16", "bfloat16"), (0.0, False, False), {}, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("types", [("bfloat16", "float32", "float32"), ("float16", "float16", "float16")])
@pytest.mark.parametrize("features", [(0.0, False, False), (30.0, True, True), (0.0, True, False), (0.0, False, True)])
@pytest.mark.parametrize("planned", [False, True])
def test_every_build_compiles_without_spills(name, types, features, planned, arch):
    kv_dtype, config = SHIPPED[name]
    soft_cap, has_new_kv, is_split_kv = features
    features = (soft_cap, has_new_kv and config.kernel == "mma_narrow", is_split_kv)
    extra = {"PLANNED_ROWS": config.rows} if planned else {}
    assert_no_spills(kv_dtype, config, types, features, extra, arch)


def assert_no_spills(kv_dtype, config, types, features, extra, arch):
    defines = dtype_defines(*types, kv_dtype) | config.defines() | feature_defines(*features) | extra
    compiled = compile_kernel(config.kernel, defines, arch)
    assert (compiled.spill_bytes, compiled.stack_bytes, compiled.static_shared_bytes) == (0, 0, 0), compiled.log
    assert compiled.registers * config.threads <= 65_536


def test_steps_of_three_tiles_are_refused():
    with pytest.raises(TileError, match="step_tiles is 3"):
        MmaNarrowConfig(step_tiles=3)


def test_two_row_tiles_have_one_exchange_buffer():
    with pytest.raises(TileError, match="row_tiles is 2 and exchange_buffers 2"):
        MmaNarrowConfig(row_tiles=2)
