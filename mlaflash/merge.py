"""Combine attention that was computed over two disjoint sets of tokens."""

import sys
from typing import Any

from mlaflash.errors import ShapeError

_LSE_DTYPES = ("float32", "float64")
_OUT_DTYPES = ("bfloat16", "float16", *_LSE_DTYPES)


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Merge two partial attention results into that of the union of their tokens.

    Works on NumPy and on CuPy arrays alike, with the arrays' own module and, for CuPy, on its
    current stream. Use it for context parallelism and for prefixes that several requests share;
    merging is associative, so any number of parts can be folded in. A part with no tokens has a
    log-sum-exp of -inf, or of +inf as FlashAttention and FlashMLA write it; it weighs nothing
    whatever its `out` holds, and the other part comes back unchanged.

    Parameters
    ----------
    out_a, out_b : array, shape (..., H, 512), bfloat16, float16, float32 or float64
        Normalised partial outputs, such as ``(T, H, 512)`` or ``(B, S, H, 512)``.
    lse_a, lse_b : array, shape (..., H), float32 or float64
        Their log-sum-exps, natural logarithm (``lse_base="e"``). Sixteen bits are refused: at a typical magnitude of
        12 a bfloat16 number is 0.03 away from its neighbour, a 3 % error of the weight.

    Returns
    -------
    out : array, shape (..., H, 512), dtype of `out_a`
        Computed in float32, or in float64 where an input is float64.
    lse : array, shape (..., H), float32 (float64 where both are)
        -inf where both parts are empty; `out` is 0 there.

    Raises
    ------
    ShapeError
        Shapes disagree, an array is of another dtype, or the arrays belong to different modules.
    """
    arrays = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    modules = {name: type(array).__module__.partition(".")[0] for name, array in arrays.items()}
    if len(set(modules.values())) > 1 or modules["out_a"] not in ("numpy", "cupy"):
        raise ShapeError(
            f"the four arrays come from {modules}; all must be NumPy arrays or all CuPy arrays: convert them first."
        )
    if out_a.ndim < 2 or out_a.shape != out_b.shape:
        raise ShapeError(
            f"out_a has shape {out_a.shape} and out_b {out_b.shape}; both must have the same shape (..., H, 512)."
        )
    for name in ("out_a", "out_b"):
        if arrays[name].dtype.name not in _OUT_DTYPES:
            raise ShapeError(
                f"{name} is {arrays[name].dtype.name}; it must be one of {', '.join(_OUT_DTYPES)}: a weighted sum is"
                " no integer."
            )
    for name in ("lse_a", "lse_b"):
        lse = arrays[name]
        if lse.shape != out_a.shape[:-1]:
            raise ShapeError(
                f"{name} has shape {lse.shape} and out_a {out_a.shape}; it must be out_a's without the last axis."
            )
        if lse.dtype.name not in _LSE_DTYPES:
            raise ShapeError(
                f"{name} is {lse.dtype.name}; it must be float32 or float64: keep the log-sum-exp"
                " that mla_verify returned."
            )

    xp: Any = sys.modules[modules["out_a"]]
    wide_lse = lse_a.dtype.name == lse_b.dtype.name == "float64"
    wide_out = any(array.dtype.name == "float64" for array in arrays.values())
    work = xp.float64 if wide_out else xp.float32

    lses = [lse.astype(work) for lse in (lse_a, lse_b)]
    empty = [xp.isinf(lse) for lse in lses]
    lses = [xp.where(none, -xp.inf, lse) for none, lse in zip(empty, lses, strict=True)]
    both_empty = empty[0] & empty[1]
    maximum = xp.where(both_empty, 0, xp.maximum(*lses))
    weights = [xp.exp(lse - maximum) for lse in lses]
    total = xp.where(both_empty, 1, weights[0] + weights[1])

    out = xp.zeros(out_a.shape, work)
    for part, none, weight in zip((out_a, out_b), empty, weights, strict=True):
        # Selected, not multiplied by a weight of 0: an empty part's buffer may hold NaN.
        share = (weight / total).astype(work)[..., None]
        out += xp.where(none[..., None], 0, part.astype(work) * share)
    merged = xp.where(both_empty, -xp.inf, maximum + xp.log(total))
    return out.astype(out_a.dtype), merged.astype(xp.float64 if wide_lse else xp.float32)
