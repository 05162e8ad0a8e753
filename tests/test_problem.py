"""Bad input: a typed error that names the argument, the value and what is allowed, before anything is launched."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlaflash import InvalidArgumentError, ShapeError, TreeMask, UnsupportedError
from mlaflash.emulator import mla_verify
from mlaflash.interop import numpy_view
from mlaflash.lab.inputs import Case, build
from mlaflash.problem import Problem
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


def misaligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Zeros that begin one byte past a multiple of their element."""
    raw = np.zeros(np.prod(shape) * np.dtype(dtype).itemsize + 1, np.uint8)
    return raw[1:].view(dtype).reshape(shape)


def read_only(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.broadcast_to(F32(0), shape)


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
        ({"q": ZEROS((5, 4, 576), ">f4")}, "q is >f4, of the other byte order"),
        ({"kv_lens": np.array([20, 33], ">i4")}, "kv_lens is >i4, of the other byte order"),
        ({"q": misaligned((5, 4, 576), F32)}, "q begins at address 0x.* multiples of the element"),
        ({"kv_lens": misaligned((2,), np.int32)}, "kv_lens begins at address 0x"),
        ({"q": ZEROS((5, 4, 576), np.dtype([]))}, "q has strides"),
        ({"q": np.ma.masked_array(ZEROS((5, 4, 576), F32))}, "q is a numpy.ma.MaskedArray"),
        ({"out": ZEROS((5, 4, 512), ">f4")}, "out is >f4"),
        ({"out": np.frombuffer(bytes(5 * 4 * 512 * 4), F32).reshape(5, 4, 512)}, "out is read-only"),
        ({"out": [0.0]}, "out is a builtins.list"),
        ({"lse": read_only((5, 4))}, "lse is read-only"),
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
        ({"sm_scale": float("nan")}, "sm_scale is nan; it must be a finite number"),
        ({"sm_scale": float("inf")}, "sm_scale is inf"),
        ({"sm_scale": None}, "sm_scale is None"),
        ({"sm_scale": "0.14"}, "sm_scale is '0.14'"),
        ({"sm_scale": 1e39}, r"sm_scale is 1e\+39; .* the largest float32"),
        ({"sm_scale": 10**400}, "sm_scale is 1000"),
        ({"logit_cap": -1.0}, "logit_cap is -1.0"),
        ({"lse_base": 2}, "lse_base is 2; it must be 'e' or '2'"),
        ({"lse_base": "10"}, "lse_base is '10'; it must be 'e' or '2'"),
        ({"logit_cap": 1e39}, r"logit_cap is 1e\+39"),
        ({"logit_cap": 1e-46}, "logit_cap is 1e-46; it must be at least 1.18e-38, or 0"),
        ({"logit_cap": float("nan")}, "logit_cap is nan"),
        ({"mask": None}, "mask is None; allowed are 'causal', 'none' and a TreeMask"),
        ({"mask": "tree"}, "mask is 'tree'"),
        ({"mask": np.ones((5, 3), bool)}, r"mask is a numpy\.ndarray; allowed are .*TreeMask\.from_dense"),
        ({"tail_lens": ZEROS(2, np.int32)}, "tail_lens is given with mask='causal'"),
        ({"kv_indices": Omit()}, "kv_indptr is given without kv_indices"),
        ({"kv_indptr": Omit()}, "kv_indices is given without kv_indptr"),
        ({"block_table": ZEROS((2, 3), np.int32)}, "block_table and kv_indptr/kv_indices are both given"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": True}, "page_size is True"),
        ({"page_size": "16"}, "page_size is '16'"),
        ({"page_size": 8}, "page_size is 8 and kv_cache has shape"),
        ({"max_kv_len": -1}, "max_kv_len is -1"),
        ({"max_kv_len": 33.0}, "max_kv_len is 33.0"),
        ({"max_q_len": -1}, "max_q_len is -1"),
        ({"max_q_len": 3.5}, "max_q_len is 3.5"),
        ({"max_q_len": "3"}, "max_q_len is '3'"),
        ({"budget": 120}, "arch is 120"),
        ({"kernel": "naive", "tiles": TileConfig()}, "tiles is .* and kernel is 'naive'"),
        ({"kernel": "tile", "tiles": NaiveConfig()}, "tiles is .* and kernel is 'tile'"),
    ],
)
def test_values_that_are_not_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call(**changes)


def test_a_reversed_block_table_is_refused() -> None:
    table = ZEROS((2, 4), np.int32)[::-1]
    with pytest.raises(ShapeError, match=r"block_table has strides .*none may be negative"):
        call(kv_indptr=None, kv_indices=None, block_table=table)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lens": np.array([20, -1], np.int32)}, r"kv_lens\[1\] is -1"),
        ({"kv_lens": np.array([20, 70], np.int32)}, r"kv_lens\[1\] leaves 70 tokens to the cache, 5 pages .* names 4"),
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
    for out_dtype in ("int8", 5, object()):
        with pytest.raises(UnsupportedError, match="out_dtype is"):
            call(out_dtype=out_dtype)
    with pytest.raises(UnsupportedError, match="naive keeps a score"):
        call(
            kernel="naive",
            kv_cache=np.lib.stride_tricks.as_strided(ZEROS(576, F32), (1 << 22, 16, 576), (0, 0, 4)),
            kv_indptr=Omit(),
            kv_indices=Omit(),
            page_size=Omit(),
            block_table=np.lib.stride_tricks.as_strided(ZEROS(1 << 22, np.int32), (2, 1 << 22), (0, 4)),
        )


def test_numpys_integers_are_integers() -> None:
    counts = {"page_size": np.int64(16), "max_q_len": np.int32(3), "max_kv_len": np.int64(40)}
    assert len(call(**counts, tiles=TileConfig(np.int64(8), np.int8(16), np.int32(2)))) == 2


@pytest.mark.parametrize("validate", [True, False])
def test_a_mask_narrower_than_the_requests_is_refused_without_reading_anything(validate: bool) -> None:
    narrow = TreeMask.from_packed(ZEROS((6, 1), np.uint32), 2)
    with pytest.raises(InvalidArgumentError, match=r"mask has 2 columns \(max_q\) and every request 3 query tokens"):
        call(q=ZEROS((6, 4, 576), F32), qo_indptr=Omit(), mask=narrow, validate=validate)
    call(q=ZEROS((6, 4, 576), F32), qo_indptr=Omit(), mask=narrow, tail_lens=np.array([2, 1], np.int32))


def test_pages_of_no_token_serve_requests_that_read_none() -> None:
    dense = {"kv_indptr": Omit(), "kv_indices": Omit(), "page_size": Omit(), "kv_cache": ZEROS((2, 0, 576), F32)}
    assert call(**dense, kv_lens=ZEROS(2, np.int32))
    assert call(**dense, kv_lens=np.array([2, 3], np.int32), new_kv=ZEROS((5, 576), F32))
    with pytest.raises(InvalidArgumentError, match=r"kv_lens\[0\] is 1; allowed is 0 \.\. 0"):
        call(**dense, kv_lens=np.array([1, 0], np.int32))


def test_the_scale_has_no_default() -> None:
    with pytest.raises(TypeError, match="sm_scale"):
        call(sm_scale=Omit())


def test_queries_longer_than_the_kv_are_legal() -> None:
    assert call(kv_lens=np.array([1, 0], np.int32))


def test_results_of_one_token_each_may_lie_apart() -> None:
    case = replace(CASE, q_lens=(1, 1))
    arguments = build(case, 1)
    del arguments["qo_indptr"]
    expected = mla_verify(**arguments)
    arguments["q"] = arguments["q"][:, None]
    out = np.zeros((2, 5, 4, 512), F32)[:, 2:3]
    lse = np.zeros((2, 5, 4), F32)[:, 2:3]
    mla_verify(**arguments, out=out, lse=lse)
    np.testing.assert_array_equal(out[:, 0], expected[0])
    np.testing.assert_array_equal(lse[:, 0], expected[1])


def test_results_of_several_tokens_must_be_one_run() -> None:
    case = replace(CASE, q_lens=(2, 2))
    arguments = build(case, 1)
    del arguments["qo_indptr"]
    arguments["q"] = arguments["q"].reshape(2, 2, 4, 576)
    with pytest.raises(ShapeError, match=r"out has strides .* one run of tokens"):
        mla_verify(**arguments, out=np.zeros((2, 5, 4, 512), F32)[:, 2:4])


def test_the_mask_bounds_ragged_query_lengths() -> None:
    arguments = build(replace(CASE, mask="tree"), 1)
    problem = Problem.from_arrays(numpy_view, **arguments)
    assert (problem.max_q_len, problem.num_tokens) == (3, 5)
    causal = Problem.from_arrays(numpy_view, **(arguments | {"mask": "causal"}))
    assert causal.max_q_len == 5
    # The columns say nothing of q where they describe other tokens.
    tails = arguments | {"tail_lens": np.array([2, 3], np.int32)}
    assert Problem.from_arrays(numpy_view, **tails).max_q_len == 5
