"""Masks packed on a GPU: every format against the host's converters, and graphs whose inputs change between replays."""

from typing import Any

import numpy as np
import pytest

import mlaflash
from mlaflash import CaptureError, Device, MaskSource, TreeMask, jit, pack_mask
from mlaflash.lab.mask_inputs import NAMES, Array, Batch, encode, widened
from mlaflash.mask_pack import FORMAT_CODES, defines, shared_bytes

pytestmark = pytest.mark.gpu

FIRST = Batch((16, 5, 0, 33, 64, 1), (100, 0, 9, 4095, 31, 8), seed=1)
SECOND = Batch((3, 64, 40, 0, 7, 9), (17, 2000, 1, 5, 0, 64), seed=2)
MAX_Q, NUM_TOKENS = 64, 130


def to_gpu(arrays: dict[str, Array]) -> dict[str, Any]:
    import cupy

    return {name: cupy.asarray(array) for name, array in arrays.items()}


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("batch", [FIRST, SECOND, Batch((1024, 30), (7, 5), 3), Batch((), ())], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_words_of_the_hosts_converter(name: str, batch: Batch, wide: bool) -> None:
    import cupy

    if name.endswith("indptr") and not batch.q_lens:
        return  # nothing to lay apart
    max_q = max(batch.q_lens, default=40)
    num_tokens = batch.num_tokens + 20
    case = encode(name, batch, max_q, wide=wide)
    mask = pack_mask(case.make(**to_gpu(case.arrays)), num_tokens, max_q, qo_indptr=cupy.asarray(batch.qo_indptr))
    np.testing.assert_array_equal(mask.words.get(), widened(case.expected, num_tokens, max_q))


@pytest.mark.parametrize("name", NAMES)
def test_f1_a_graph_packs_what_the_arrays_hold_at_its_replay(name: str) -> None:
    import cupy

    cases = [encode(name, batch, MAX_Q) for batch in (FIRST, SECOND)]
    sizes = {key: tuple(np.maximum(*(case.arrays[key].shape for case in cases)).tolist()) for key in cases[0].arrays}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # Room for both; what a batch leaves is garbage.
        arrays = {key: cupy.full(size, 1, cases[0].arrays[key].dtype) for key, size in sizes.items()}
        bounds = cupy.zeros(len(FIRST.q_lens) + 1, np.int32)
        words = cupy.zeros((NUM_TOKENS, 2), np.uint32)
        source = cases[0].make(**arrays)
        pack_mask(source, NUM_TOKENS, MAX_Q, qo_indptr=bounds, words=words)
        stream.synchronize()
        stream.begin_capture()
        mask = pack_mask(source, NUM_TOKENS, MAX_Q, qo_indptr=bounds, words=words)
        graph = stream.end_capture()
        for batch, case in zip((FIRST, SECOND, FIRST), (*cases, cases[0]), strict=True):
            for key, own in case.arrays.items():
                arrays[key][tuple(slice(length) for length in own.shape)] = cupy.asarray(own)
            bounds[...] = cupy.asarray(batch.qo_indptr)
            words.fill(0xFFFFFFFF)
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(mask.words.get(), widened(case.expected, NUM_TOKENS, MAX_Q))


def test_work_runs_on_the_callers_stream() -> None:
    import cupy

    batch = Batch((16,) * 8, (0,) * 8)
    case = encode("parents_table", batch, 16)
    parents = cupy.asarray(case.arrays["parents"])
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        made_there = parents * 1
    mask = pack_mask(MaskSource.from_parents(made_there), 128, 16, stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(mask.words.get(), case.expected.words)


def test_a_cold_call_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from mlaflash.jit import kernel

    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(kernel, "_functions", {})
    parents = cupy.asarray(np.array([[-1, 0, 0]], np.int32))
    words = cupy.zeros((3, 1), np.uint32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(CaptureError, match="once before capturing"):
            pack_mask(MaskSource.from_parents(parents), 3, 3, words=words)
        stream.end_capture()


def test_garbage_stays_inside_and_repeats() -> None:
    import cupy

    rng = np.random.default_rng(5)
    links = [cupy.asarray(rng.integers(-3, 70, (40, 64))) for _ in range(2)]
    first = pack_mask(MaskSource.from_retrieve(*links), 40 * 64, 64).words.get()
    expected = mlaflash.emulator.pack_mask(MaskSource.from_retrieve(*(link.get() for link in links)), 40 * 64, 64)
    np.testing.assert_array_equal(first, expected.words)
    for _ in range(3):
        np.testing.assert_array_equal(pack_mask(MaskSource.from_retrieve(*links), 40 * 64, 64).words.get(), first)


def test_d7_offsets_past_two_to_the_31() -> None:
    import cupy

    q_lens, prefix = (16, 3), 2**27
    dense = Batch(q_lens, (0, 0)).dense()
    mask = cupy.zeros(16 * (prefix + 16) + 3 * 5, np.bool_)
    mask[: 16 * (prefix + 16)].reshape(16, -1)[:, prefix:] = cupy.asarray(dense[0])
    mask[16 * (prefix + 16) :].reshape(3, 5)[:, 2:] = cupy.asarray(dense[1])
    source = MaskSource.from_sglang(mask, mode="full", prefix_lens=cupy.asarray([prefix, 2]))
    packed = pack_mask(source, 19, 16, qo_indptr=cupy.asarray(np.array([0, 16, 19], np.int32)))
    np.testing.assert_array_equal(packed.words.get(), TreeMask.from_dense(dense).words)


def test_the_words_are_a_mask_of_the_verify_call() -> None:
    import cupy

    rng = np.random.default_rng(6)
    batch = Batch((8, 8), (40, 9))
    case = encode("parents_table", batch, 8)
    q = cupy.asarray(rng.standard_normal((16, 4, 576)), np.float32)
    cache = cupy.asarray(rng.standard_normal((2, 64, 576)), np.float32)
    lens = cupy.asarray(np.array([48, 17], np.int32))
    packed = pack_mask(case.make(**to_gpu(case.arrays)), 16, 8)
    host = TreeMask(cupy.asarray(case.expected.words), 8)
    results = [mlaflash.mla_verify(q, cache, sm_scale=0.1, kv_lens=lens, mask=mask) for mask in (packed, host)]
    for got, wanted in zip(*results, strict=True):
        cupy.testing.assert_array_equal(got, wanted)


def test_loaded_kernels_use_no_local_memory() -> None:
    device = Device.current()
    for name in FORMAT_CODES:
        assert jit.load("mask", defines(name), device, shared_bytes(name)).attributes()["local_bytes"] == 0
