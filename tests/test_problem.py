"""Bad input: a typed error that names the argument, the value and what is allowed, before anything is launched."""

from typing import Any

import numpy as np
import pytest

from mlaflash import InvalidArgumentError, ShapeError, TreeMask, UnsupportedError
from mlaflash.emulator import mla_verify
from mlaflash.lab.inputs import Case, build
from mlaflash.tiles import NaiveConfig, TileConfig

CASE = Case(name="good", q_lens=(2, 3), kv_lens=(20, 33), heads=4, sm_scale=0.14468, page_size=16, dtype="float32")


def call(**changes: Any) -> list[Any]:
    """Run the case with some arguments changed; "omit" leaves one out. Returns the reports of what was launched."""
    reports: list[Any] = []
    arguments = {name: value for name, value in (build(CASE, 1) | changes).items() if not isinstance(value, Omit)}
    try:
        mla_verify(**arguments, reports=reports)
    except Exception:
        assert reports == []
        raise
    return reports


class Omit:
    """Marks an argument to leave out."""


def test_the_case_itself_is_fine() -> None:
    assert len(call(tiles=TileConfig(nsplit=2))) == 2


ZEROS = np.zeros
F32 = np.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": ZEROS((5, 576), F32)}, r"q has shape \(5, 576\), of rank 2"),
        ({"q": ZEROS((5, 4, 512), F32)}, r"q has shape .* 512 wide; its last axis must be 576"),
        ({"q": ZEROS((5, 4, 576), np.float64)}, "q is float64; allowed are float32, bfloat16, float16"),
        ({"q": ZEROS((5, 4, 576), np.float16)}, "kv_cache is float32 and q is float16"),
        ({"q": ZEROS((5, 4, 1152), F32)[..., ::2]}, "q has strides .* contiguous"),
        ({"q": ZEROS((5, 4, 576), F32)[::-1]}, "q has strides .* negative"),
        ({"q": ZEROS((5, 0, 576), F32)}, "q has 0 heads"),
        ({"q": [1, 2, 3]}, "q is a list of 3"),
        ({"q": (ZEROS((5, 4, 512), F32), ZEROS((5, 3, 64), F32))}, r"q\[0\] is .* and q\[1\] is"),
        ({"q": (ZEROS((5, 4, 512), F32), ZEROS((5, 4, 32), F32))}, r"q\[1\] has shape .* must be 64"),
        ({"q": "draft"}, "q is a builtins.str; the emulator takes NumPy arrays"),
        ({"kv_cache": ZEROS((7, 16, 2, 576), F32)}, "fourth axis counts KV heads"),
        ({"kv_cache": ZEROS((7, 16, 320), F32)}, "320 wide; its last axis must be 576"),
        ({"kv_lens": ZEROS(2, np.int64)}, "kv_lens is int64; allowed: int32"),
        ({"kv_lens": ZEROS((2, 1), np.int32)}, r"kv_lens has shape \(2, 1\)"),
        ({"qo_indptr": ZEROS(4, np.int32)}, r"qo_indptr has shape \(4,\); it must have shape \(3,\)"),
        ({"kv_indices": ZEROS(9, np.int16)}, "kv_indices is int16"),
        ({"kv_indptr": ZEROS(3, F32)}, "kv_indptr is float32"),
        ({"kv_indptr": ZEROS(2, np.int32)}, r"kv_indptr has shape \(2,\)"),
        ({"new_kv": ZEROS((4, 576), F32)}, "new_kv has 4 rows"),
        ({"mask": TreeMask.causal([2, 2])}, "mask has 4 rows and q has 5 query tokens"),
        ({"out": ZEROS((5, 4, 576), F32)}, "out is float32"),
        ({"out": ZEROS((5, 4, 1024), F32)[..., ::2]}, "out has strides"),
        ({"out": ZEROS((5, 4, 513), F32)[..., 1:]}, "must start on 16 bytes"),
        ({"lse": ZEROS((5, 4), np.float64)}, "lse is float64"),
        ({"qo_indptr": Omit()}, "q holds 5 query tokens and kv_lens 2 requests"),
        ({"q": ZEROS((2, 2, 4, 576), F32)}, "qo_indptr is given too"),
        ({"kv_indptr": Omit(), "kv_indices": Omit(), "page_size": Omit(), "kv_cache": ZEROS((1, 16, 576), F32)},
         "holds 1 pages for 2 requests"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sm_scale": float("nan")}, "sm_scale is nan; it must be finite"),
        ({"sm_scale": float("inf")}, "sm_scale is inf"),
        ({"sm_scale": None}, "sm_scale is None"),
        ({"logit_cap": -1.0}, "logit_cap is -1.0"),
        ({"logit_cap": float("nan")}, "logit_cap is nan"),
        ({"mask": None}, "mask is None; allowed are 'causal', 'none' and a TreeMask"),
        ({"mask": "tree"}, "mask is 'tree'"),
        ({"mask": np.ones((5, 3), bool)}, "mask is array"),
        ({"tail_lens": ZEROS(2, np.int32)}, "tail_lens is given with mask='causal'"),
        ({"kv_indices": Omit()}, "kv_indptr is given without kv_indices"),
        ({"kv_indptr": Omit()}, "kv_indices is given without kv_indptr"),
        ({"block_table": ZEROS((2, 3), np.int32)}, "block_table and kv_indptr/kv_indices are both given"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 8}, "page_size is 8 and kv_cache has shape"),
        ({"max_kv_len": -1}, "max_kv_len is -1"),
        ({"max_q_len": -1}, "max_q_len is -1"),
        ({"kernel": "naive", "tiles": TileConfig()}, "tiles is .* and kernel is 'naive'"),
        ({"kernel": "tile", "tiles": NaiveConfig()}, "tiles is .* and kernel is 'tile'"),
    ],
)
def test_values_that_are_not_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lens": np.array([20, -1], np.int32)}, r"kv_lens\[1\] is -1"),
        ({"kv_lens": np.array([20, 70], np.int32)}, r"kv_lens\[1\] is 70 and needs 5 pages .* names 4"),
        ({"kv_lens": np.array([20, 10_000], np.int32)}, r"kv_lens\[1\] is 10000; allowed is 0 \.\."),
        ({"kv_indices": np.array([1, 99, 0, 1, 2, 3, 4, 5], np.int32)}, "page 1 of request 0 has id 99"),
        ({"kv_indices": np.array([1, -2, 0, 1, 2, 3, 4, 5], np.int32)}, "page 1 of request 0 has id -2"),
        ({"kv_indptr": np.array([0, 4, 2], np.int32)}, "kv_indptr is .* never fall"),
        ({"kv_indptr": np.array([0, 3, 900], np.int32)}, "kv_indptr is .* end at or below"),
        ({"qo_indptr": np.array([0, 3, 2], np.int32)}, "qo_indptr is .* never fall"),
        ({"qo_indptr": np.array([1, 3, 5], np.int32)}, "qo_indptr is .* begin with 0"),
        ({"qo_indptr": np.array([0, 3, 6], np.int32)}, "qo_indptr is .* 5 query tokens"),
        ({"max_q_len": 2}, "max_q_len is 2 and request 1 has 3 query tokens"),
        ({"mask": TreeMask.from_packed(ZEROS((5, 1), np.uint32), 2)}, "request 1 needs 3 mask columns"),
        ({"mask": TreeMask.from_packed(ZEROS((5, 1), np.uint32), 3), "tail_lens": np.array([1, 4], np.int32)},
         "tail_lens 1 needs 4 mask columns"),
    ],
)  # fmt: skip
def test_checked_mode_reads_what_only_the_device_knows(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call(**changes)


def test_unknown_kernels_and_out_types_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="kernel is 'flash'; allowed are naive, tile"):
        call(kernel="flash")
    with pytest.raises(UnsupportedError, match="out_dtype is 'int8'"):
        call(out_dtype="int8")
    with pytest.raises(UnsupportedError, match="naive keeps a score"):
        call(
            kernel="naive",
            kv_cache=np.lib.stride_tricks.as_strided(ZEROS(576, F32), (1 << 22, 16, 576), (0, 0, 4)),
            kv_indptr=Omit(),
            kv_indices=Omit(),
            page_size=Omit(),
            block_table=np.lib.stride_tricks.as_strided(ZEROS(1 << 22, np.int32), (2, 1 << 22), (0, 4)),
        )


def test_the_scale_has_no_default() -> None:
    with pytest.raises(TypeError, match="sm_scale"):
        call(sm_scale=Omit())


def test_queries_longer_than_the_kv_are_legal() -> None:
    assert call(kv_lens=np.array([1, 0], np.int32))
