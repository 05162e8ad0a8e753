"""The softmax scale of a model whose context was extended with YaRN."""

import math

from mlaflash.checks import finite, integer
from mlaflash.errors import InvalidArgumentError


def yarn_sm_scale(
    qk_nope_head_dim: int = 128,
    qk_rope_head_dim: int = 64,
    *,
    factor: float,
    mscale_all_dim: float = 1.0,
) -> float:
    """Return `sm_scale` from the numbers of a model's ``config.json``.

    The scale is ``mscale**2 / sqrt(qk_nope_head_dim + qk_rope_head_dim)`` with ``mscale = 0.1 *
    mscale_all_dim * ln(factor) + 1``, and ``mscale = 1`` where `factor` is at most 1: the attention
    temperature of YaRN (arXiv:2309.00071, section 3.4) as the DeepSeek-V3 and Kimi K2 model codes
    apply it. The head widths are those before absorption (128 + 64), not the 576 columns of a cache
    row. The result is the whole factor on ``q . k``: hand it to `mla_verify` once and scale nothing
    else.

    Parameters
    ----------
    qk_nope_head_dim, qk_rope_head_dim : int
        Width of one head's key without and with rotary position, before absorption.
    factor : float
        ``rope_scaling.factor``: 64 for Kimi K2.x with 256 k of context, 40 for DeepSeek-V3.
    mscale_all_dim : float
        ``rope_scaling.mscale_all_dim``. A config that lacks it means 0, which leaves the scale
        alone.

    Returns
    -------
    float
        0.14468 for Kimi K2.x, 0.13523 for DeepSeek-V3.

    Raises
    ------
    InvalidArgumentError
        A width is not a positive integer, `factor` is not positive and finite, or `mscale_all_dim`
        is negative or not finite.

    Examples
    --------
    >>> round(yarn_sm_scale(factor=64), 5)
    0.14468
    >>> round(yarn_sm_scale(factor=40), 5)
    0.13523
    """
    for name, width in (
        ("qk_nope_head_dim", qk_nope_head_dim),
        ("qk_rope_head_dim", qk_rope_head_dim),
    ):
        integer(name, width, 1)
    factor, mscale_all_dim = finite("factor", factor), finite("mscale_all_dim", mscale_all_dim)
    if factor <= 0:
        raise InvalidArgumentError(
            f"factor is {factor!r}; it must be positive and finite: take rope_scaling.factor from"
            " the model's config.json."
        )
    if mscale_all_dim < 0:
        raise InvalidArgumentError(
            f"mscale_all_dim is {mscale_all_dim!r}; it must be finite and not negative: take"
            " rope_scaling.mscale_all_dim from the model's config.json."
        )
    mscale = 1.0 if factor <= 1 else 0.1 * mscale_all_dim * math.log(factor) + 1.0
    return mscale * mscale / math.sqrt(qk_nope_head_dim + qk_rope_head_dim)
