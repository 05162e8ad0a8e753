"""Rows of the cache in 8 bits: every code, every rounding, and the way back."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mlaflash
from mlaflash import kv

E4M3 = ml_dtypes.float8_e4m3fn
CODES = np.arange(256, dtype=np.uint8)
NUMBERS = CODES.view(E4M3).astype(np.float32)


def nearest(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Codes of the nearest numbers, by another library's rounding."""
    return np.clip(x, -448, 448).astype(E4M3).view(np.uint8)


def draw(count: int, seed: int) -> np.ndarray[Any, Any]:
    """Any finite float32; and numbers around those of e4m3, down to the smallest and up to the largest."""
    rng = np.random.default_rng(seed)
    anything = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
    near = (np.exp2(rng.uniform(-14, 10, count)) * rng.choice([-1, 1], count)).astype(np.float32)
    return np.concatenate([anything[np.isfinite(anything)], near])


def test_every_code_is_the_number_that_others_take_it_for() -> None:
    found = kv.dequantize_e4m3(CODES)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, NUMBERS)
    np.testing.assert_array_equal(np.signbit(found), CODES >= 128)


def test_every_code_comes_back() -> None:
    codes, scale = kv.quantize_e4m3(NUMBERS, 1.0)
    assert (codes.dtype, scale) == (np.uint8, 1.0)
    np.testing.assert_array_equal(codes, CODES)


def test_numbers_are_rounded_as_by_others() -> None:
    x = draw(200_000, seed=0)
    np.testing.assert_array_equal(kv.quantize_e4m3(x, 1.0)[0], nearest(x))


def test_ties_go_to_the_even_code() -> None:
    between = (NUMBERS[:126] + NUMBERS[1:127]) / 2
    codes, _ = kv.quantize_e4m3(between, 1.0)
    assert (codes % 2 == 0).all()
    np.testing.assert_array_equal(np.abs(codes - (CODES[:126] + 0.5)), 0.5)


def test_what_is_too_large_is_448_and_nan_stays() -> None:
    x = np.array([449, 465, 1e30, np.inf, -481, -np.inf, np.nan, -0.0], np.float32)
    codes, _ = kv.quantize_e4m3(x, 1.0)
    np.testing.assert_array_equal(codes, [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F, 0x80])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_largest_magnitude_is_scaled_to_448(dtype: Any) -> None:
    x = np.random.default_rng(1).standard_normal((3, 7, 576)).astype(dtype)
    codes, scale = kv.quantize_e4m3(x)
    assert (codes.shape, scale.shape, scale.dtype) == (x.shape, (1,), np.float32)
    assert np.abs(kv.dequantize_e4m3(codes)).max() == 448
    plain = x.astype(np.float32)
    error = np.abs(kv.dequantize_e4m3(codes, scale) - plain)
    # Half a unit of three bits of mantissa; 2**-10 of the scale below the normal numbers.
    assert (error <= np.maximum(2.0**-4 * np.abs(plain), 2.0**-10 * scale) * 1.001).all()
    again, _ = kv.quantize_e4m3(x, scale)
    np.testing.assert_array_equal(again, codes)


def test_what_is_not_finite_makes_no_scale() -> None:
    codes, scale = kv.quantize_e4m3(np.array([[2.0, np.nan], [-np.inf, -4.0]]))
    assert scale == np.float32(4 / 448)
    np.testing.assert_array_equal(codes, [[nearest(np.float32(224)), 0x7F], [0xFE, 0xFE]])
    for nothing in (np.zeros((2, 576)), np.zeros((0, 576)), np.full((1, 576), np.nan)):
        assert kv.quantize_e4m3(nothing)[1] == 1


def test_rows_of_fp8_ds_mla_hold_what_the_format_says() -> None:
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((4, 3, 576)) * np.exp2(rng.uniform(-30, 30, (4, 3, 1)))).astype(np.float32)
    x[0, 0, 128:256] = 0
    x[1, 1, 5], x[1, 1, 600 - 32] = np.nan, np.nan
    rows = kv.quantize_ds_mla(x)
    assert (rows.dtype, rows.shape) == (np.uint8, (4, 3, 656))
    for row, numbers in zip(rows.reshape(-1, 656), x.reshape(-1, 576), strict=True):
        scales = np.frombuffer(row[512:528].tobytes(), np.float32)
        for group, scale in enumerate(scales):
            part = numbers[128 * group : 128 * (group + 1)]
            assert scale == (np.float32(np.nanmax(np.abs(part)) / np.float32(448)) if part.any() else 1)
            np.testing.assert_array_equal(row[128 * group : 128 * (group + 1)] & 0x7F, nearest(part / scale) & 0x7F)
        rope = np.frombuffer(row[528:].tobytes(), ml_dtypes.bfloat16)
        rounded = numbers[512:].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(rope.astype(np.float32), rounded.astype(np.float32))


def test_rows_of_fp8_ds_mla_come_back() -> None:
    x = np.random.default_rng(3).standard_normal((6, 576)).astype(np.float32)
    x[2, :128], x[3] = 0, np.nan
    rows = kv.quantize_ds_mla(x)
    numbers = kv.dequantize_ds_mla(rows)
    assert (numbers.dtype, numbers.shape) == (np.float32, x.shape)
    assert (np.isnan(numbers) == np.isnan(x)).all()
    fine = np.isfinite(x)
    largest = np.nanmax(np.abs(x[:, :512].reshape(-1, 4, 128)), axis=-1, initial=0).repeat(128, axis=1)
    error = np.abs(np.where(fine, numbers - x, 0))
    assert (error[:, :512] <= np.maximum(2.0**-4 * np.abs(np.nan_to_num(x[:, :512])), 2.0**-18 * largest)).all()
    assert (error[:, 512:] <= 2.0**-8 * np.abs(np.nan_to_num(x[:, 512:]))).all()
    np.testing.assert_array_equal(kv.quantize_ds_mla(numbers), rows)


@pytest.mark.parametrize("value", [2.0**-126, 2.0**-149, 3e38])
def test_scales_of_extreme_rows_are_normal_numbers(value: float) -> None:
    numbers = kv.dequantize_ds_mla(kv.quantize_ds_mla(np.full((1, 576), value, np.float32)))
    assert np.isfinite(numbers).all()
    assert (np.abs(numbers[:, :512] - value) <= max(2.0**-4 * value, 2.0**-126 * 2.0**-10)).all()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: kv.quantize_e4m3([1.0]), "x is a list"),
        (lambda: kv.quantize_e4m3(np.arange(4)), "x is int64; it must be floating"),
        (lambda: kv.dequantize_e4m3(np.zeros(4, np.int8)), "codes is int8; it must be uint8"),
        (lambda: kv.quantize_ds_mla(np.zeros((2, 512))), r"x has shape \(2, 512\); its last axis must be 576"),
        (lambda: kv.dequantize_ds_mla(np.zeros((2, 576), np.uint8)), "rows has shape .*must be 656"),
        (lambda: kv.dequantize_ds_mla(np.zeros((2, 656))), "rows is float64"),
    ],
)
def test_other_arrays_are_refused(call: Any, named: str) -> None:
    with pytest.raises(mlaflash.ShapeError, match=named):
        call()


@pytest.mark.gpu
def test_cupy_gives_the_same_bits() -> None:
    import cupy

    x = draw(50_000, seed=4)
    rows = np.random.default_rng(5).standard_normal((5, 3, 576)).astype(np.float32)
    rows[0, 0], rows[1, 1, 3], rows[2, 2, 570] = 0, np.nan, np.inf
    for case, scale in ((x, 1.0), (rows, None), (rows, 0.25)):
        codes, given = kv.quantize_e4m3(case, scale)
        found, found_scale = kv.quantize_e4m3(cupy.asarray(case), scale)
        np.testing.assert_array_equal(cupy.asnumpy(found), codes)
        np.testing.assert_array_equal(cupy.asnumpy(found_scale), given)
        back = kv.dequantize_e4m3(found, found_scale)
        np.testing.assert_array_equal(back.get(), kv.dequantize_e4m3(codes, given))
    packed = kv.quantize_ds_mla(cupy.asarray(rows))
    np.testing.assert_array_equal(packed.get(), kv.quantize_ds_mla(rows))
    np.testing.assert_array_equal(kv.dequantize_ds_mla(packed).get(), kv.dequantize_ds_mla(packed.get()))
    half = cupy.asarray(rows).astype("float16")
    np.testing.assert_array_equal(kv.quantize_ds_mla(half).get(), kv.quantize_ds_mla(half.get()))
