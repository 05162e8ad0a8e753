"""Judge a result against the oracle's, with tolerances that follow from the dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlaflash.errors import ShapeError, UnsupportedError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may be from the oracle's; see `tolerance` for where the numbers come from.

    Attributes
    ----------
    rel : float
        Of one element of `out`: ``|error| <= rel * max(|expected|, root mean square of its row)``.
    row_norm : float
        Of one row of `out` (a query token and a head): ``|error row| <= row_norm * |expected
        row|``.
    norm : float
        Of the whole `out`, in the same way.
    lse_abs, lse_rel : float
        Of one element of `lse`: ``|error| <= lse_abs + lse_rel * |expected|``.
    """

    rel: float
    row_norm: float
    norm: float
    lse_abs: float
    lse_rel: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found.

    Attributes
    ----------
    passed : bool
        Every criterion holds.
    reason : str
        The criterion that failed, in words; empty where all hold.
    max_abs : float
        Largest ``|error|`` in `out`.
    max_rel : float
        Largest ``|error| / max(|expected|, root mean square of its row)`` in `out`; held against
        ``tolerance.rel``.
    rel_norm : float
        ``|error| / |expected|`` of the whole `out`; held against ``tolerance.norm``.
    lse_max_abs : float
        Largest ``|error|`` in `lse`.
    tolerance : Tolerance
        What it was held against.
    worst_array : {"out", "lse"}
        Where the worst element is: the failed criterion's array, or `out`.
    worst_index : tuple of int
        Index of that element; empty where the arrays are.
    worst_actual, worst_expected : float
        Its two values.
    """

    passed: bool
    reason: str
    max_abs: float
    max_rel: float
    rel_norm: float
    lse_max_abs: float
    tolerance: Tolerance
    worst_array: str
    worst_index: tuple[int, ...]
    worst_actual: float
    worst_expected: float


_SIXTEEN_BIT_UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def tolerance(q_dtype: Any, out_dtype: Any, *, partials: bool = False) -> Tolerance:
    """Return the tolerance that a kernel on these dtypes can keep and a wrong one cannot.

    With ``u`` the unit roundoff of the coarser 16-bit dtype (2**-8 for bfloat16, 2**-11 for float16):

    * Rounding `out` is an error of at most ``u`` of the element and, over all mantissas, 0.42 u of a norm.
    * A kernel for tensor cores rounds each softmax weight to q's dtype, once more 0.42 u, now of the row: weights err
      independently, so an element errs by a normal deviate of 0.42 u times the row's root mean square. The dominant
      weight of a row is exactly 1 relative to the row's maximum.
    * Of one element: ``u + 5.5 * 0.42 u`` stays below ``rel = 2.01 * 2 u``, which for bfloat16 is FlashMLA's 2.01 / 128
      (there beside an absolute 8e-4, which long flat rows of small values would hide in; the row's own size stands in
      its place here).
    * Of the whole: ``sqrt(2) * 0.42 u = 0.59 u`` stays below ``norm = 0.64 u`` (2.5e-3 for bfloat16). A single row can
      be dominated by a few weights: ``0.42 u + u`` stays below ``row_norm = 1.6 u``, still less than 1 %.

    A call whose splits, or whose plan's blocks, leave partial results in an `out` type of 16 bits rounds once more
    (`partials`): again 0.42 u of the row, and independent of the rest.

    * Of the whole: ``sqrt(3) * 0.42 u = 0.73 u`` stays below ``norm = 0.8 u``. Of a row, ``u + sqrt(2) * 0.42 u`` is
      still below 1.6 u.
    * Of one element: the rounding is as large as the partial results of that column, and these can be large where
      their sum is small. So it is no normal deviate: the worst are two partial results that weigh as much, where 3e7
      simulated elements stay below 4.2 u and the tail falls tenfold every 0.5 u. Hence ``rel = 5 u``, which one in
      2,000 calls of half a million elements may pass.

    float32 has nothing to round but the arithmetic itself: a score of magnitude 5 is a sum of 576 products and errs by
    about 2e-6, the weight then by as much; a sum over 64 k tokens one after the other errs by 5e-6. Hence ``norm`` 1e-5
    and twice that for a row and, at 5.5 deviations, four times for an element.

    The log-sum-exp is float32 arithmetic for every dtype: 1e-5 for the scores and the sum, and 2e-6 of its magnitude
    (16 u) for the rounding of scores and of the result.

    Parameters
    ----------
    q_dtype, out_dtype : dtype or str
        float32, bfloat16 or float16.
    partials : bool
        Whether partial results were kept in `out`'s type; says nothing of a float32 one.

    Returns
    -------
    Tolerance
    """
    names = [np.dtype(dtype).name if not isinstance(dtype, str) else dtype for dtype in (q_dtype, out_dtype)]
    for name in names:
        if name not in (*_SIXTEEN_BIT_UNITS, "float32"):
            raise UnsupportedError(f"there is no tolerance for {name}; there is one for float32, bfloat16 and float16.")
    unit = max(_SIXTEEN_BIT_UNITS.get(name, 0.0) for name in names)
    if partials and names[1] in _SIXTEEN_BIT_UNITS:
        return Tolerance(rel=5 * unit, row_norm=1.6 * unit, norm=0.8 * unit, lse_abs=1e-5, lse_rel=2e-6)
    if unit:
        return Tolerance(rel=2.01 * 2 * unit, row_norm=1.6 * unit, norm=0.64 * unit, lse_abs=1e-5, lse_rel=2e-6)
    return Tolerance(rel=4e-5, row_norm=2e-5, norm=1e-5, lse_abs=1e-5, lse_rel=2e-6)


def tolerance_of_few(limits: Tolerance, expected_out: npt.ArrayLike) -> Tolerance:
    """Return the tolerance of a result whose rows may be too few for their errors to average out.

    The squared relative error of the whole is the mean of the rows', each weighed by its share of the squared norm. The
    shares make ``n = 1 / sum(share**2)`` rows of one size. With one of these at its own bound and the others at the
    bound of the whole, that becomes ``sqrt(norm**2 + (row_norm**2 - norm**2) / n)``: a single row is held to its own
    bound, hundreds of them to `norm`.

    Parameters
    ----------
    limits : Tolerance
    expected_out : array_like, shape (..., H, 512)

    Returns
    -------
    Tolerance
        `limits` with another `norm`.
    """
    expected = _float64(expected_out)
    sizes = np.sum(np.where(np.isfinite(expected), expected, 0.0) ** 2, axis=-1)
    total = sizes.sum()
    share = float(np.sum((sizes / total) ** 2)) if total > 0 else 1.0
    return replace(limits, norm=math.sqrt(limits.norm**2 + (limits.row_norm**2 - limits.norm**2) * share))


def compare(
    out: npt.ArrayLike,
    lse: npt.ArrayLike,
    expected_out: npt.ArrayLike,
    expected_lse: npt.ArrayLike,
    tolerance: Tolerance,
) -> Comparison:
    """Hold a result against the oracle's.

    First NaN and infinities must be in the same places; then each element, each row, and the whole
    must be close. An empty row must be exactly 0.

    Parameters
    ----------
    out, expected_out : array_like, shape (..., H, 512)
        Actual and expected output.
    lse, expected_lse : array_like, shape (..., H)
        Actual and expected log-sum-exp.
    tolerance : Tolerance
        See `tolerance`.

    Returns
    -------
    Comparison
        The worst element is the one furthest beyond its tolerance, or nearest to it.

    Raises
    ------
    ShapeError
        The shapes of the actual and the expected arrays differ.
    """
    arrays = {
        "out": (_float64(out), _float64(expected_out)),
        "lse": (_float64(lse), _float64(expected_lse)),
    }
    for name, (actual, expected) in arrays.items():
        if actual.shape != expected.shape:
            raise ShapeError(f"{name} has shape {actual.shape} and the expected one {expected.shape}; they must agree.")
    failures: list[tuple[str, str, tuple[int, ...]]] = []
    for name, (actual, expected) in arrays.items():
        elsewhere = _special(actual) != _special(expected)
        if elsewhere.any():
            failures.append(
                (
                    f"{name} has {elsewhere.sum()} NaN or infinities in the wrong place",
                    name,
                    _first(elsewhere),
                )
            )

    actual, expected = arrays["out"]
    error = _error(actual, expected)
    size = np.where(np.isfinite(expected), np.abs(expected), 0.0)
    row_rms = np.sqrt(np.mean(size**2, axis=-1, keepdims=True)) if size.size else size
    scaled = _ratio(error, np.maximum(size, row_rms))
    rows = _ratio(np.linalg.norm(error, axis=-1), np.linalg.norm(size, axis=-1))
    whole = float(_ratio(np.linalg.norm(error), np.linalg.norm(size)))
    worst = _peak(scaled)
    max_rel = float(scaled[worst]) if worst else 0.0
    worst_row = _peak(rows)
    if worst and max_rel > tolerance.rel:
        failures.append((f"an element is off by {max_rel:.3g} of its size or its row's", "out", worst))
    if worst_row and rows[worst_row] > tolerance.row_norm:
        inside = (*worst_row, int(np.argmax(scaled[worst_row])))
        failures.append((f"row {worst_row} is off by {rows[worst_row]:.3g} of its norm", "out", inside))
    if whole > tolerance.norm:
        failures.append((f"out is off by {whole:.3g} of its norm", "out", worst))

    actual_lse, expected_lse64 = arrays["lse"]
    lse_error = _error(actual_lse, expected_lse64)
    lse_size = np.where(np.isfinite(expected_lse64), np.abs(expected_lse64), 0.0)
    lse_excess = lse_error / (tolerance.lse_abs + tolerance.lse_rel * lse_size)
    worst_lse = _peak(lse_excess)
    if worst_lse and lse_excess[worst_lse] > 1:
        failures.append((f"lse is off by {lse_error[worst_lse]:.3g}", "lse", worst_lse))

    reason, array, index = failures[0] if failures else ("", "out", worst)
    pair = arrays[array]
    return Comparison(
        passed=not failures,
        reason=reason,
        max_abs=float(error.max(initial=0.0)),
        max_rel=max_rel,
        rel_norm=whole,
        lse_max_abs=float(lse_error.max(initial=0.0)),
        tolerance=tolerance,
        worst_array=array,
        worst_index=index,
        worst_actual=float(pair[0][index]) if index else math.nan,
        worst_expected=float(pair[1][index]) if index else math.nan,
    )


def _float64(array: npt.ArrayLike) -> Floats:
    return np.asarray(array).astype(np.float64)


def _special(array: Floats) -> npt.NDArray[np.int8]:
    """Return 0 for a finite number, 1 for NaN, 2 and 3 for the infinities."""
    return np.select([np.isnan(array), array == np.inf, array == -np.inf], [1, 2, 3], 0).astype(np.int8)


def _error(actual: Floats, expected: Floats) -> Floats:
    """Return the absolute error, 0 where either number is not finite: `_special` judges those."""
    finite = np.isfinite(actual) & np.isfinite(expected)
    return np.abs(np.subtract(actual, expected, out=np.zeros_like(actual), where=finite))


def _ratio(error: Any, size: Any) -> Floats:
    """Return error / size, where 0 / 0 is 0 and the error of an empty row is infinitely large."""
    ratio = np.where(np.asarray(error) > 0, np.inf, 0.0)
    np.divide(error, size, out=ratio, where=np.asarray(size) > 0)
    return ratio


def _peak(values: Floats) -> tuple[int, ...]:
    if not values.size:
        return ()
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(values)), values.shape))


def _first(flags: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(flags)[0])


def finite_only(values: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON cannot hold by None.

    Parameters
    ----------
    values : dict of str to Any
    """
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in values.items()
    }
