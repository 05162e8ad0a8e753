"""The `combine` kernel on the emulator: weights, empty splits, strides, element types, and where its blocks are."""

import numpy as np
import pytest

from mlaflash import combine
from mlaflash.emulator import Report, run_kernel
from mlaflash.errors import InvalidArgumentError
from mlaflash.params import new_params, numpy_dtype
from mlaflash.tiles import dtype_defines

TOKENS, HEADS = 3, 5
ROWS = TOKENS * HEADS
NEG_INF = np.float32(-np.inf)
# Half a unit in the last place, of the result and of the partials.
ROUNDING = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}


def make_partials(splits, dtype, rng):
    """Return partial outputs and base-2 log-sum-exps that span many powers of two."""
    out = rng.standard_normal((splits, ROWS, 512), np.float32).astype(numpy_dtype(dtype))
    lse = (4 * rng.standard_normal((splits, ROWS)) + 20).astype(np.float32)
    return out, lse


def merged(partial_out, partial_lse):
    """Return what the kernel should give, in float64, and the natural log-sum-exp."""
    lse = partial_lse.astype(np.float64)
    values = partial_out.astype(np.float64)
    largest = lse.max(0)
    empty = np.isneginf(largest)
    weights = np.where(np.isneginf(lse), 0.0, np.exp2(lse - np.where(empty, 0.0, largest)))
    total = weights.sum(0)
    parts = np.where(weights[..., None] > 0, weights[..., None] * np.where(np.isnan(values), 0.0, values), 0.0)
    with np.errstate(divide="ignore"):
        lse = np.where(empty, -np.inf, np.log(2.0) * largest + np.log(total))
    return parts.sum(0) / np.where(empty, 1.0, total)[:, None], lse


def run(partial_out, partial_lse, out_dtype="float32", *, seed=0, split_warps=None, num_rows=ROWS):
    """Launch the kernel into strided arrays that hold NaN."""
    splits = partial_out.shape[0]
    out = np.full((TOKENS, 2 * HEADS, 544), np.nan, numpy_dtype(out_dtype))[:, ::2, :512]
    lse = np.full((HEADS, TOKENS), np.nan, np.float32).T
    defines = dtype_defines("bfloat16", out_dtype, partial_out.dtype.name)
    params = new_params(
        partial_out=partial_out.ctypes.data,
        out=out.ctypes.data,
        lse=lse.ctypes.data,
        out_stride_t=out.strides[0] // out.itemsize,
        out_stride_h=out.strides[1] // out.itemsize,
        lse_stride_t=lse.strides[0] // 4,
        lse_stride_h=lse.strides[1] // 4,
        num_tokens=TOKENS,
        num_heads=HEADS,
        num_splits=splits,
    )
    partial_lse = np.ascontiguousarray(partial_lse.T)
    partial_out.flags.writeable = partial_lse.flags.writeable = False
    params["partial_lse"] = partial_lse.ctypes.data
    report = run_kernel(
        "combine",
        defines | combine.defines(splits, num_rows),
        combine.grid(ROWS, splits)[:1] + combine.grid(num_rows, splits)[1:],
        combine.block(splits, num_rows),
        combine.shared_bytes(splits, num_rows),
        params,
        {"partial_out": partial_out, "partial_lse": partial_lse, "out": out, "lse": lse},
        seed=seed,
    )
    return out.reshape(ROWS, 512).astype(np.float64), lse.reshape(ROWS), report


def check(partial_out, partial_lse, out_dtype="float32", **how) -> Report:
    expected_out, expected_lse = merged(partial_out, partial_lse)
    out, lse, report = run(partial_out, partial_lse, out_dtype, **how)
    scale = np.abs(expected_out) + np.sqrt(np.mean(expected_out**2, -1, keepdims=True))
    assert np.all(np.abs(out - expected_out) <= ROUNDING[out_dtype] * scale + 1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)
    return report


@pytest.mark.parametrize("splits", [1, 2, 4, 5, 8, 9, 31, 32, 33, 64, 65, 132, 129, 300])
def test_it_merges_any_number_of_splits(splits, rng):
    check(*make_partials(splits, "float32", rng))


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1023, 1024])
def test_it_merges_as_many_splits_as_it_says(splits, rng):
    check(*make_partials(splits, "bfloat16", rng))


@pytest.mark.parametrize("num_rows", [1, 48, 4096])
@pytest.mark.parametrize("splits", [3, 20, 40, 70])
def test_every_shape_of_block_gives_the_same_merge(splits, num_rows, rng):
    check(*make_partials(splits, "float32", rng), num_rows=num_rows)


@pytest.mark.parametrize("partial_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_it_converts_between_element_types(partial_dtype, out_dtype, rng):
    check(*make_partials(7, partial_dtype, rng), out_dtype)


def test_log_sum_exp_does_not_depend_on_the_number_of_splits(rng):
    """B1: the same scores, grouped into 2, 16 and 64 splits."""
    scores = rng.standard_normal((64, ROWS)).astype(np.float32) * 5
    found = []
    for splits in (2, 16, 64):
        groups = scores.reshape(splits, -1, ROWS).astype(np.float64)
        lse = np.log2(np.exp2(groups).sum(1)).astype(np.float32)
        out = np.zeros((splits, ROWS, 512), np.float32)
        found.append(run(out, lse)[1])
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    np.testing.assert_allclose(found[0], found[2], atol=1e-5)


@pytest.mark.parametrize("splits", [4, 24, 80])
def test_empty_splits_weigh_nothing_and_their_poison_stays_where_it_is(splits, rng):
    """A6: more splits than tokens. What an empty split left in memory is NaN here."""
    partial_out, partial_lse = make_partials(splits, "bfloat16", rng)
    empty = rng.random((splits, ROWS)) < 0.6
    empty[:, 3] = True
    empty[1:, 4] = True
    empty[0, 4] = False
    partial_lse[empty] = NEG_INF
    partial_out[empty] = np.nan
    check(partial_out, partial_lse)


@pytest.mark.parametrize("splits", [2, 33])
def test_all_empty_is_zero_and_minus_infinity(splits):
    out, lse, _ = run(np.full((splits, ROWS, 512), np.nan, np.float32), np.full((splits, ROWS), NEG_INF))
    assert not out.any()
    assert np.all(np.isneginf(lse))


def test_far_apart_log_sum_exps_neither_overflow_nor_lose_the_largest(rng):
    partial_out, partial_lse = make_partials(6, "float32", rng)
    partial_lse[:] = np.array([-3e38, -1e4, 0, 500, 5e3, 3e4], np.float32)[:, None]
    out, lse, _ = run(partial_out, partial_lse)
    np.testing.assert_array_equal(out, partial_out[5].astype(np.float64))
    np.testing.assert_allclose(lse, 3e4 * np.log(2.0), rtol=1e-6)


def test_a_nan_of_a_split_that_saw_tokens_is_not_hidden(rng):
    partial_out, partial_lse = make_partials(5, "float32", rng)
    partial_lse[2, 7] = np.nan
    out, lse, _ = run(partial_out, partial_lse)
    assert np.isnan(out[7]).all()
    assert np.isnan(lse[7])
    assert np.isfinite(np.delete(out, 7, 0)).all()


def test_schedules_give_the_same_bits(rng):
    partial_out, partial_lse = make_partials(40, "bfloat16", rng)
    first = run(partial_out, partial_lse, seed=1)
    second = run(partial_out, partial_lse, seed=2)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.parametrize(
    ("splits", "num_rows", "reads"), [(4, ROWS, 4), (6, ROWS, 6), (3, ROWS, 4), (9, ROWS, 32), (32, ROWS, 32)]
)
def test_it_reads_each_partial_once(splits, num_rows, reads, rng):
    """But that a first batch is whole: instead of splits past the last one, it reads that one again."""
    partial_out, partial_lse = make_partials(splits, "bfloat16", rng)
    report = check(partial_out, partial_lse, num_rows=num_rows)
    assert report.bytes_read["partial_out"] == reads * partial_out[0].nbytes
    assert report.bytes_written["out"] == ROWS * 512 * 4


@pytest.mark.parametrize("splits", [0, 1025])
def test_numbers_of_splits_that_do_not_fit_are_refused(splits):
    with pytest.raises(InvalidArgumentError, match=f"{splits}.*1 to 1024"):
        combine.split_warps(splits)


@pytest.mark.parametrize("num_rows", [1, 32, 64, 100, 5000])
@pytest.mark.parametrize("splits", [1, 8, 9, 33, 65, 1024])
def test_blocks_cover_every_column(splits, num_rows):
    _, column_blocks, _ = combine.grid(num_rows, splits)
    items = combine.block(splits, num_rows) // 32 // combine.split_warps(splits, num_rows)
    assert column_blocks * items * 128 == 512


@pytest.fixture
def rng():
    return np.random.default_rng(7)
