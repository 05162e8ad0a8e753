"""A right answer passes and every kind of wrong answer fails, for every dtype."""

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mlaflash.errors import ShapeError, UnsupportedError
from mlaflash.lab.compare import Comparison, compare, tolerance, tolerance_of_few
from mlaflash.lab.inputs import Case, build
from mlaflash.oracle import mla_verify

Array = np.ndarray[Any, np.dtype[Any]]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KV_LENS = (2, 3, 17, 129, 2000)


def problem(dtype: str, kv_len: int) -> dict[str, Any]:
    case = Case(
        name=f"compare-{kv_len}",
        q_lens=(4,),
        kv_lens=(kv_len,),
        heads=4,
        sm_scale=0.14468,
        dtype=dtype,
        mask="none",
    )
    return build(case, 0)


def kernel_like(arguments: dict[str, Any], dtype: str, *, round_weights: bool) -> tuple[Array, Array]:
    """Compute as a kernel does: float32 throughout, weights and result rounded to 16 bits."""
    kv_len = int(arguments["kv_lens"][0])
    rows = arguments["kv_cache"][arguments["kv_indices"][:kv_len], 0].astype(np.float32)
    scores = np.float32(arguments["sm_scale"]) * (arguments["q"].astype(np.float32) @ rows.T)
    maximum = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - maximum)
    total = np.add.accumulate(weights, axis=-1)[..., -1:]
    if round_weights:
        weights = weights.astype(DTYPES[dtype]).astype(np.float32)
    return ((weights @ rows[:, :512]) / total).astype(DTYPES[dtype]), (maximum + np.log(total))[..., 0]


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def expected(dtype: str) -> tuple[Array, Array]:
    return mla_verify(**problem(dtype, 129))


def judge(out: Array, lse: Array, expected: tuple[Array, Array], dtype: str) -> Comparison:
    return compare(out.astype(DTYPES[dtype]), lse, *expected, tolerance(dtype, dtype))


@pytest.mark.parametrize("kv_len", KV_LENS)
@pytest.mark.parametrize("round_weights", [False, True])
def test_a_kernel_of_that_dtype_passes_with_room_to_spare(dtype: str, kv_len: int, round_weights: bool) -> None:
    arguments = problem(dtype, kv_len)
    out, lse = kernel_like(arguments, dtype, round_weights=round_weights)
    limits = tolerance(dtype, dtype)
    result = compare(out, lse, *mla_verify(**arguments), limits)
    assert result.passed, result
    assert result.reason == ""
    assert result.max_rel < 0.6 * limits.rel
    assert result.rel_norm < 0.85 * limits.norm


def in_parts(arguments: dict[str, Any], dtype: str, parts: int) -> tuple[Array, Array]:
    """Compute as splits do: partial results, rounded to 16 bits, are merged by their log-sum-exps."""
    edges = np.linspace(0, int(arguments["kv_lens"][0]), parts + 1, dtype=int)
    ids = arguments["kv_indices"]
    pieces = [
        kernel_like(arguments | {"kv_lens": np.array([b - a]), "kv_indices": ids[a:b]}, dtype, round_weights=True)
        for a, b in itertools.pairwise(edges)
    ]
    lse = np.logaddexp.reduce([lse for _, lse in pieces])
    out = sum(np.exp(part - lse)[..., None] * out.astype(np.float32) for out, part in pieces)
    return np.asarray(out).astype(DTYPES[dtype]), lse


def test_few_rows_are_held_to_more_than_their_mean() -> None:
    limits = tolerance("float16", "float16")
    rows = np.random.default_rng(1).standard_normal((400, 512))
    assert tolerance_of_few(limits, rows[:1]).norm == pytest.approx(limits.row_norm)
    assert tolerance_of_few(limits, 0 * rows).norm == pytest.approx(limits.row_norm)
    assert tolerance_of_few(limits, rows).norm == pytest.approx(limits.norm, rel=0.01)
    # One row of a weight beside many that weigh nothing is one row.
    rows[1:] *= 1e-4
    assert tolerance_of_few(limits, rows).norm == pytest.approx(limits.row_norm, rel=1e-4)
    lse = np.zeros(400)
    off = rows.copy()
    off[0] *= 1 + 1.2 * 2.0**-11
    assert not compare(off, lse, rows, lse, limits).passed
    assert compare(off, lse, rows, lse, tolerance_of_few(limits, rows)).passed
    off[0] *= 1 + 0.5 * 2.0**-11
    assert not compare(off, lse, rows, lse, tolerance_of_few(limits, rows)).passed


@pytest.mark.parametrize("parts", [2, 9])
def test_partial_results_of_16_bits_are_one_rounding_more(parts: int) -> None:
    limits, tight = tolerance("bfloat16", "bfloat16", partials=True), tolerance("bfloat16", "bfloat16")
    assert tolerance("bfloat16", "float32", partials=True) == tolerance("bfloat16", "float32")
    assert tolerance("float32", "float32", partials=True) == tolerance("float32", "float32")
    arguments = problem("bfloat16", 2000) | {"sm_scale": 0.005}
    # No weight dominates, and values average out: rounding errors are as large as they come.
    rows = np.random.default_rng(0).standard_normal(arguments["kv_cache"].shape)
    arguments["kv_cache"] = rows.astype(ml_dtypes.bfloat16)
    expected = mla_verify(**arguments)
    result = compare(*in_parts(arguments, "bfloat16", parts), *expected, limits)
    assert result.passed, result
    assert result.rel_norm > tight.norm
    assert result.max_rel < 0.8 * limits.rel


def shuffled_heads(out: Array, lse: Array) -> None:
    out[:] = np.roll(out, 1, axis=1)


def shuffled_columns(out: Array, lse: Array) -> None:
    out[:] = np.roll(out, 1, axis=2)


def swapped_rows(out: Array, lse: Array) -> None:
    out[[0, 1]], lse[[0, 1]] = out[[1, 0]], lse[[1, 0]]


def constant(out: Array, lse: Array) -> None:
    out[:] = out.mean()


def zero(out: Array, lse: Array) -> None:
    out[:] = 0


def scaled(out: Array, lse: Array) -> None:
    out *= 1.01


def one_row_scaled(out: Array, lse: Array) -> None:
    out[2, 1] *= 1.01


def negated(out: Array, lse: Array) -> None:
    out *= -1


def one_element(out: Array, lse: Array) -> None:
    out[1, 2, 300] += 0.05 * out[1, 2].std() + 0.05 * abs(out[1, 2, 300])


def one_element_zero(out: Array, lse: Array) -> None:
    out[3, 0, np.argmax(np.abs(out[3, 0]))] = 0


def one_nan(out: Array, lse: Array) -> None:
    out[1, 2, 300] = np.nan


def one_infinity(out: Array, lse: Array) -> None:
    out[1, 2, 300] = np.inf


def lse_in_base_two(out: Array, lse: Array) -> None:
    lse /= np.log(2)


def lse_off_by_a_token(out: Array, lse: Array) -> None:
    lse[2, 2] += np.log1p(1 / 129)


def lse_of_sixteen_bits(out: Array, lse: Array) -> None:
    lse[:] = lse.astype(np.float16)


def lse_scaled(out: Array, lse: Array) -> None:
    lse *= 1.01


def lse_empty(out: Array, lse: Array) -> None:
    lse[0, 0] = -np.inf


WRONG = [
    (shuffled_heads, "out"),
    (shuffled_columns, "out"),
    (swapped_rows, "out"),
    (constant, "out"),
    (zero, "out"),
    (scaled, "out"),
    (one_row_scaled, "out"),
    (negated, "out"),
    (one_element, "out"),
    (one_element_zero, "out"),
    (one_nan, "out"),
    (one_infinity, "out"),
    (lse_in_base_two, "lse"),
    (lse_off_by_a_token, "lse"),
    (lse_of_sixteen_bits, "lse"),
    (lse_scaled, "lse"),
    (lse_empty, "lse"),
]


@pytest.mark.parametrize(("spoil", "array"), WRONG, ids=[spoil.__name__ for spoil, _ in WRONG])
def test_a_wrong_answer_fails(
    spoil: Callable[[Array, Array], None], array: str, dtype: str, expected: tuple[Array, Array]
) -> None:
    out, lse = expected[0].copy(), expected[1].copy()
    assert judge(out, lse, expected, dtype).passed
    spoil(out, lse)
    result = judge(out, lse, expected, dtype)
    assert not result.passed
    assert result.worst_array == array
    assert result.reason
    assert not compare(out.astype(DTYPES[dtype]), lse, *expected, tolerance(dtype, dtype, partials=True)).passed


def test_rows_and_the_whole_each_have_their_own_limit(dtype: str, expected: tuple[Array, Array]) -> None:
    limits = tolerance(dtype, dtype)
    many = np.tile(expected[0], (16, 1, 1)), np.tile(expected[1], (16, 1))
    one_row = many[0].copy()
    one_row[5, 3] *= 1 + 1.3 * limits.row_norm
    row = compare(one_row, many[1], *many, limits)
    assert not row.passed
    assert row.reason.startswith("row (5, 3)")
    assert row.worst_index[:2] == (5, 3)
    assert row.rel_norm < limits.norm
    whole = compare(many[0] * (1 + 1.3 * limits.norm), many[1], *many, limits)
    assert not whole.passed
    assert whole.reason.startswith("out is off")
    assert compare(many[0] * (1 + 0.7 * limits.norm), many[1], *many, limits).passed


def test_the_worst_element_is_named_with_both_values(dtype: str, expected: tuple[Array, Array]) -> None:
    out, lse = expected[0].copy(), expected[1].copy()
    out[1, 2, 300] = 9.0
    out[3, 3, 3] += 1.0
    result = judge(out, lse, expected, dtype)
    assert (result.worst_array, result.worst_index) == ("out", (1, 2, 300))
    assert result.worst_actual == 9.0
    assert result.worst_expected == expected[0][1, 2, 300]
    assert result.max_abs == pytest.approx(9.0 - expected[0][1, 2, 300])
    lse[2, 1] = 7.0
    only_lse = judge(expected[0], lse, expected, dtype)
    assert (only_lse.worst_array, only_lse.worst_index, only_lse.worst_actual) == (
        "lse",
        (2, 1),
        7.0,
    )
    assert only_lse.lse_max_abs == pytest.approx(abs(7.0 - expected[1][2, 1]))


def test_nan_must_be_in_the_same_place(dtype: str, expected: tuple[Array, Array]) -> None:
    reference = expected[0].copy()
    reference[0, 0] = np.nan
    out = reference.copy()
    assert judge(out, expected[1], (reference, expected[1]), dtype).passed
    out[0], out[1] = expected[0][0], np.nan
    moved = judge(out, expected[1], (reference, expected[1]), dtype)
    assert not moved.passed
    assert "wrong place" in moved.reason


@pytest.mark.parametrize("leftover", [1e-30, np.nan])
def test_a1_an_empty_row_must_be_exactly_zero(leftover: float, dtype: str, expected: tuple[Array, Array]) -> None:
    reference, logs = expected[0].copy(), expected[1].copy()
    reference[1], logs[1] = 0, -np.inf
    assert judge(reference, logs, (reference, logs), dtype).passed
    out = reference.astype(np.float32)
    out[1, 1, 1] = leftover
    assert not compare(out, logs, reference, logs, tolerance(dtype, dtype)).passed
    positive = logs.copy()
    positive[1] = np.inf
    assert not judge(reference, positive, (reference, logs), dtype).passed


def test_a15_empty_results_pass() -> None:
    result = compare(
        np.zeros((0, 8, 512)),
        np.zeros((0, 8)),
        np.zeros((0, 8, 512)),
        np.zeros((0, 8)),
        tolerance("bfloat16", "bfloat16"),
    )
    assert result.passed
    assert result.worst_index == ()


def test_the_coarser_dtype_decides() -> None:
    assert tolerance("float32", "bfloat16") == tolerance("bfloat16", "float32") == tolerance("bfloat16", "float16")
    assert tolerance("float16", ml_dtypes.bfloat16) == tolerance("bfloat16", np.float32)
    assert (
        tolerance("float32", "float32").norm
        < tolerance("float16", "float16").norm
        < tolerance("bfloat16", "bfloat16").norm
    )
    assert tolerance("bfloat16", "bfloat16").rel == pytest.approx(2.01 / 128)
    with pytest.raises(UnsupportedError, match="int8"):
        tolerance("int8", "float32")


def test_shapes_must_agree(expected: tuple[Array, Array], dtype: str) -> None:
    limits = tolerance(dtype, dtype)
    with pytest.raises(ShapeError, match="out has shape"):
        compare(expected[0][:1], expected[1], *expected, limits)
    with pytest.raises(ShapeError, match="lse has shape"):
        compare(expected[0], expected[1][:1], *expected, limits)
