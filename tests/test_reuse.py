"""Calls like one before: which are alike, and what becomes of their addresses."""

from types import SimpleNamespace

import numpy as np
import pytest

from mlaflash import reuse
from mlaflash.params import PARAMS_DTYPE, new_params
from mlaflash.schedule import Workspace

ROPE_OFFSETS = {"q": 1024, "kv_cache": 528, "new_kv": 1024}


class FakeTensor:
    """What a call asks of a tensor of torch."""

    is_cuda = True

    def __init__(self, ptr, shape=(4, 8), dtype="bfloat16", strides=None, requires_grad=False, device=0):
        self.shape, self.dtype, self.requires_grad, self.device = shape, dtype, requires_grad, device
        self.ptr, self.strides = ptr, strides or (8, 1)

    def data_ptr(self):
        return self.ptr

    def stride(self):
        return self.strides

    def get_device(self):
        return self.device


@pytest.fixture(autouse=True)
def _fresh():
    reuse.forget()
    yield
    reuse.forget()


def signature(options=(0.1,), **arrays):
    return reuse.Signature({"q": FakeTensor(0x1000), "kv_cache": FakeTensor(0x2000)} | arrays, options)


def reusable(out_shape=(1,)):
    params = new_params()
    return reuse.Reusable.of(0, out_shape, "bfloat16", ROPE_OFFSETS, (), params, ())


def test_other_addresses_are_the_same_call():
    assert signature().key == signature(q=FakeTensor(0x7770), kv_cache=FakeTensor(0x10)).key


@pytest.mark.parametrize(
    "other",
    [
        {"q": FakeTensor(0x1008)},  # no longer on 16 bytes
        {"q": FakeTensor(0x1000, shape=(5, 8))},
        {"q": FakeTensor(0x1000, strides=(16, 1))},
        {"q": FakeTensor(0x1000, dtype="float16")},
        {"q": FakeTensor(0x1000, device=1)},
        {"out": FakeTensor(0x3000)},
        {"options": (0.2,)},
        {"q": (FakeTensor(0x1000), FakeTensor(0x1400))},
    ],
    ids=["alignment", "shape", "strides", "dtype", "device", "out", "options", "pair"],
)
def test_anything_else_is_another_call(other):
    assert signature().key != signature(**other).key


def test_a_result_that_requires_grad_is_another_call():
    plain, grad = (signature(out=FakeTensor(0x3000, requires_grad=flag)).key for flag in (False, True))
    assert plain != grad


def test_a_pair_that_becomes_one_row_is_another_call():
    apart = signature(kv_cache=(FakeTensor(0x2000), FakeTensor(0x9000))).key
    joined = signature(kv_cache=(FakeTensor(0x2000), FakeTensor(0x2400))).key
    assert apart != joined


def test_arrays_of_other_libraries_have_no_key():
    assert signature(kv_lens=np.zeros(3, np.int32)).key is None


def test_recall_finds_what_was_remembered_by_this_thread_until_it_is_forgotten():
    one, other = signature(), signature(q=FakeTensor(0x9990))
    assert reuse.recall(one) is None
    kept = reusable()
    reuse.remember(one, kept)
    assert reuse.recall(other) is kept
    reuse.forget()
    assert reuse.recall(other) is None


def test_options_that_cannot_be_hashed_are_never_known():
    one = signature(options=([],))
    assert reuse.recall(one) is None


def test_no_more_calls_are_kept_than_the_capacity():
    first = signature(options=(-1.0,))
    reuse.remember(first, reusable())
    for i in range(reuse.CAPACITY):
        assert (reuse.recall(first) is None) == (i >= reuse.CAPACITY)
        reuse.remember(signature(options=(float(i),)), reusable())
    # The first was asked for until the end, so that another one went.
    assert reuse.recall(first) is not None
    assert reuse.recall(signature(options=(0.0,))) is None


def test_addresses_go_where_the_kernels_look():
    params = new_params(sm_scale=0.5, num_tokens=7)
    kept = reuse.Reusable.of(
        0, (1,), "bfloat16", ROPE_OFFSETS, (Workspace("partial_out", (1,), "float32"),), params, ()
    )
    arrays = {
        "q": FakeTensor(0x1000),
        "kv_cache": (FakeTensor(0x2000), FakeTensor(0x3000)),
        "kv_lens": FakeTensor(0x4000),
        "kv_indptr": FakeTensor(0x5000),
        "kv_indices": FakeTensor(0x6000),
        "qo_indptr": FakeTensor(0x7000),
        "tail_lens": FakeTensor(0x8000),
        "words": FakeTensor(0x9000),
        "new_kv": FakeTensor(0xA000),
        "kv_scale": FakeTensor(0xF000),
        "out": FakeTensor(0xB000),
        "lse": FakeTensor(0xC000),
    }
    kept.point(reuse.Signature(arrays, ()).addresses, {"partial_out": 0xD000, "partial_lse": 0xE000})
    pointers = {name: int(params[name][0]) for name in PARAMS_DTYPE.names if PARAMS_DTYPE[name] == np.uint64}
    assert {name: value for name, value in pointers.items() if value} == {
        "q_nope": 0x1000,
        "q_pe": 0x1400,
        "kv_c": 0x2000,
        "k_pe": 0x3000,
        "kv_lens": 0x4000,
        "kv_indptr": 0x5000,
        "page_ids": 0x6000,
        "qo_indptr": 0x7000,
        "tail_lens": 0x8000,
        "mask_words": 0x9000,
        "new_kv_c": 0xA000,
        "new_k_pe": 0xA400,
        "kv_scale": 0xF000,
        "out": 0xB000,
        "lse": 0xC000,
        "partial_out": 0xD000,
        "partial_lse": 0xE000,
    }
    assert params["sm_scale"] == np.float32(0.5)
    assert params["num_tokens"] == 7


def test_a_tensor_without_strides_is_left_to_whoever_views_it():
    sparse = SimpleNamespace(is_cuda=True, data_ptr=lambda: (_ for _ in ()).throw(RuntimeError("no strides")))
    assert signature(q=sparse).key is None


def test_lists_are_the_kernels_page_ids():
    params = new_params(max_kv_len=64)
    kept = reuse.Reusable.of(0, (1,), "bfloat16", ROPE_OFFSETS, (), params, ())
    lists = {"indices": FakeTensor(0x3000), "topk_lens": FakeTensor(0x4000)}
    kept.point(signature(**lists).addresses, {})
    assert (params["q_pe"], params["k_pe"]) == (0x1400, 0x2210)  # each row has its own rope columns
    assert (params["page_ids"], params["kv_lens"], params["max_kv_len"]) == (0x3000, 0x4000, 64)
    assert signature(**lists).key != signature(**(lists | {"topk_lens": None})).key
