"""The published scales, and what is refused."""

import math

import pytest

from mlaflash.errors import InvalidArgumentError
from mlaflash.scale import yarn_sm_scale


@pytest.mark.parametrize(("factor", "expected"), [(64.0, 0.14468), (40.0, 0.13523)], ids=["kimi-k2", "deepseek-v3"])
def test_c9_scale_of_published_configs_to_five_digits(factor: float, expected: float) -> None:
    # Both configs: qk_nope_head_dim 128, qk_rope_head_dim 64, mscale_all_dim 1.0.
    assert round(yarn_sm_scale(128, 64, factor=factor, mscale_all_dim=1.0), 5) == expected


def test_c9_the_scale_is_neither_of_the_usual_guesses() -> None:
    scale = yarn_sm_scale(factor=64)
    assert abs(scale - 1 / math.sqrt(576)) > 0.1
    assert abs(scale - 1 / math.sqrt(192)) > 0.07


@pytest.mark.parametrize(("factor", "mscale_all_dim"), [(1.0, 1.0), (0.5, 1.0), (40.0, 0.0)])
def test_no_extension_leaves_the_plain_scale(factor: float, mscale_all_dim: float) -> None:
    assert yarn_sm_scale(factor=factor, mscale_all_dim=mscale_all_dim) == 1 / math.sqrt(192)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"factor": 0.0}, "factor"),
        ({"factor": math.nan}, "factor"),
        ({"factor": math.inf}, "factor"),
        ({"factor": "64"}, "factor"),
        ({"factor": 10**400}, "factor"),
        ({"factor": 40, "mscale_all_dim": None}, "mscale_all_dim"),
        ({"factor": 40, "mscale_all_dim": -1.0}, "mscale_all_dim"),
        ({"factor": 40, "qk_nope_head_dim": 0}, "qk_nope_head_dim"),
        ({"factor": 40, "qk_rope_head_dim": 64.0}, "qk_rope_head_dim"),
    ],
)
def test_wrong_numbers_are_refused_by_name(arguments: dict[str, float], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        yarn_sm_scale(**arguments)  # type: ignore[arg-type]
