"""Merging partial attention, empty parts included."""

from itertools import permutations
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mlaflash.errors import ShapeError
from mlaflash.merge import merge_states

Array = np.ndarray[Any, np.dtype[Any]]
EMPTY = pytest.mark.parametrize("empty", [-np.inf, np.inf], ids=["minus-inf", "plus-inf"])


def part(seed: int, dtype: Any = np.float32, shape: tuple[int, ...] = (3, 2)) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    out = rng.standard_normal((*shape, 512)).astype(dtype)
    return out, (12 + rng.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2), (0, 4)])
def test_merge_is_the_weighted_mean(shape: tuple[int, ...]) -> None:
    (out_a, lse_a), (out_b, lse_b) = part(1, shape=shape), part(2, shape=shape)
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    weight = np.exp(np.stack([lse_a, lse_b]).astype(np.float64))
    expected = (weight[0, ..., None] * out_a + weight[1, ..., None] * out_b) / weight.sum(0)[..., None]
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, np.log(weight.sum(0)), rtol=2e-7)


@EMPTY
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("first", [True, False])
def test_a4_a5_an_empty_part_leaves_the_other_unchanged(empty: float, dtype: Any, first: bool) -> None:
    full = part(1, dtype)
    hollow = np.full_like(full[0], np.nan), np.full_like(full[1], empty)
    out, lse = merge_states(*hollow, *full) if first else merge_states(*full, *hollow)
    assert out.dtype == full[0].dtype
    np.testing.assert_array_equal(out, full[0])
    np.testing.assert_array_equal(lse, full[1])


@pytest.mark.parametrize(
    ("empty_a", "empty_b"), [*permutations([-np.inf, np.inf]), (-np.inf, -np.inf), (np.inf, np.inf)]
)
def test_a4_a5_two_empty_parts_are_empty(empty_a: float, empty_b: float) -> None:
    out, lse = merge_states(
        np.full((3, 2, 512), np.nan, np.float32),
        np.full((3, 2), empty_a, np.float32),
        np.zeros((3, 2, 512), np.float32),
        np.full((3, 2), empty_b, np.float32),
    )
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_a4_only_the_empty_rows_are_treated_so() -> None:
    (out_a, lse_a), (out_b, lse_b) = part(1), part(2)
    whole, whole_lse = merge_states(out_a, lse_a, out_b, lse_b)
    lse_a[1, 0] = -np.inf
    out_a[1, 0] = np.nan
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    np.testing.assert_array_equal(out[1, 0], out_b[1, 0])
    kept = np.ones((3, 2), bool)
    kept[1, 0] = False
    np.testing.assert_array_equal(out[kept], whole[kept])
    np.testing.assert_array_equal(lse[kept], whole_lse[kept])


def test_a_nan_in_a_part_that_counts_is_not_hidden() -> None:
    (out_a, lse_a), b = part(1), part(2)
    out_a[0, 0, 5] = np.nan
    out, _ = merge_states(out_a, lse_a, *b)
    assert np.isnan(out[0, 0, 5])
    assert np.isnan(out).sum() == 1


def test_large_and_distant_magnitudes_neither_overflow_nor_warn() -> None:
    out, lse = merge_states(
        np.ones((1, 1, 512), np.float32),
        np.full((1, 1), 1e38, np.float32),
        np.zeros((1, 1, 512), np.float32),
        np.full((1, 1), -1e38, np.float32),
    )
    np.testing.assert_array_equal(out, 1)
    np.testing.assert_array_equal(lse, np.float32(1e38))


def test_float64_stays_float64() -> None:
    (out_a, lse_a), (out_b, lse_b) = part(1, np.float64), part(2, np.float64)
    out, lse = merge_states(out_a, lse_a.astype(np.float64), out_b, lse_b.astype(np.float64))
    assert out.dtype == lse.dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_b4_a_sixteen_bit_lse_is_refused(dtype: Any) -> None:
    out, lse = part(1)
    with pytest.raises(ShapeError, match="lse_b is"):
        merge_states(out, lse, out, lse.astype(dtype))


def test_disagreeing_arrays_are_refused() -> None:
    out, lse = part(1)
    with pytest.raises(ShapeError, match="out_b"):
        merge_states(out, lse, out[:2], lse)
    with pytest.raises(ShapeError, match="lse_a"):
        merge_states(out, lse[:2], out, lse)
    with pytest.raises(ShapeError, match="NumPy"):
        merge_states(out.tolist(), lse, out, lse)
    with pytest.raises(ShapeError, match="out_a is int64"):
        merge_states(out.astype(np.int64), lse, out, lse)


@pytest.mark.gpu
@EMPTY
def test_a4_a5_cupy_arrays_merge_like_numpy_ones(empty: float) -> None:
    import cupy

    host = [*part(1), *part(2)]
    host[1][0], host[0][0] = empty, np.nan
    host[1][1, 0] = host[3][1, 0] = empty
    out, lse = merge_states(*(cupy.asarray(array) for array in host))
    expected_out, expected_lse = merge_states(*host)
    assert isinstance(out, cupy.ndarray)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out.get(), expected_out, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse.get(), expected_lse, rtol=1e-6)
    np.testing.assert_array_equal(out[0].get(), host[2][0])
