"""Moves of KV rows on a GPU: overlaps of every kind, graphs whose lists change, and what reads the rows then."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mlaflash
from mlaflash import CaptureError, Device, InvalidArgumentError, TreeMask, emulator, jit, kv, spec
from mlaflash.kv import compact, move
from mlaflash.lab.move_inputs import NAMES, Array, ids, moved, random_layers

pytestmark = pytest.mark.gpu

LAYERS = 61
BF16, FP8_ROW, FP8_SCALED_ROW = 1152, 576, 656


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(2026)


def to_gpu(*arrays: Array) -> list[Any]:
    import cupy

    return [cupy.asarray(array) for array in arrays]


@pytest.mark.parametrize(
    ("size", "row_bytes"),
    [(2, BF16), (64, BF16), (64, FP8_ROW), (64, FP8_SCALED_ROW), (1000, BF16), (5000, FP8_ROW), (64, 140), (900, 37)],
)
@pytest.mark.parametrize("name", NAMES)
def test_h2_h9_any_overlap_is_read_before_it_is_written(
    name: str, size: int, row_bytes: int, rng: np.random.Generator
) -> None:
    size = max(size, 3) if name == "cycles_of_three" else size
    src, dst = ids(name, size, rng)
    host = random_layers((2 * size, row_bytes), LAYERS if size <= 64 else 3, rng)
    layers = to_gpu(*host)
    for _ in range(3):
        kv.move_rows(layers, *to_gpu(src, dst.astype(np.int32)), validate=True)
        host = [moved(layer, src, dst) for layer in host]
    for layer, wanted in zip(layers, host, strict=True):
        np.testing.assert_array_equal(layer.get(), wanted)


def test_a_long_list_of_small_groups(rng: np.random.Generator) -> None:
    src, dst = ids("apart", 60_000, rng)
    host = random_layers((120_000, BF16), 2, rng)
    layers = to_gpu(*host)
    kv.move_rows(layers, *to_gpu(src, dst), None, 1)
    for layer, old in zip(layers, host, strict=True):
        np.testing.assert_array_equal(layer.get(), moved(old, src, dst))


def test_layers_side_by_side_and_in_pages(rng: np.random.Generator) -> None:
    import cupy

    src, dst = ids("one_cycle", 100, rng)
    side_by_side = cupy.asarray(rng.integers(0, 256, (256, 4, BF16), np.uint8))
    host = side_by_side.get()
    kv.move_rows([side_by_side[:, i] for i in range(4)], *to_gpu(src, dst))
    np.testing.assert_array_equal(side_by_side.get(), moved(host, src, dst))
    pages = cupy.asarray(rng.integers(0, 256, (4, 64, 1, BF16), np.uint8))
    host = pages.get()
    kv.move_rows([pages], *to_gpu(src, dst))
    np.testing.assert_array_equal(pages.get().reshape(256, BF16), moved(host.reshape(256, BF16), src, dst))


@pytest.mark.parametrize("size", [40, 4000])
def test_h5_a_graph_moves_what_the_lists_hold_at_its_replay(size: int, rng: np.random.Generator) -> None:
    import cupy

    host = random_layers((2 * size, FP8_ROW), 5, rng)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        layers = to_gpu(*host)
        src, dst, n = cupy.zeros(size, np.int64), cupy.zeros(size, np.int64), cupy.zeros(1, np.int32)
        mover = kv.RowMover(layers)
        needed = mover.scratch_bytes(size)
        assert bool(needed) == (size > 3072)
        scratch = cupy.empty(max(3 * needed, 16), np.uint8)
        mover.move(src, dst, n, scratch=scratch)  # zeros: moves nothing
        stream.synchronize()
        stream.begin_capture()
        mover.move(src, dst, n, scratch=scratch)
        graph = stream.end_capture()
        for name, count in (("one_cycle", size), ("shift_up", 0), ("swaps", size // 2), ("fan", 1), ("reversal", size)):
            new = ids(name, size, rng)
            src[...], dst[...], n[...] = *to_gpu(*new), count
            graph.launch(stream)
            host = [moved(layer, new[0][:count], new[1][:count]) for layer in host]
            stream.synchronize()
            for layer, wanted in zip(layers, host, strict=True):
                np.testing.assert_array_equal(layer.get(), wanted)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_h1_plans_are_those_of_the_emulator(dtype: Any, ragged: bool, rng: np.random.Generator) -> None:
    batch, q_len, width = 200, 16, 6
    slots = rng.permutation(batch * q_len).astype(dtype)
    index = np.sort(rng.random((batch, q_len)).argsort(1)[:, :width], 1) + np.arange(batch)[:, None] * q_len
    index[::7, 3:] = -1
    lens = rng.integers(0, width + 1, batch).astype(dtype)
    bounds = np.arange(batch + 1, dtype=np.int32) * q_len if ragged else None
    expected = emulator.plan_compact(slots, index, lens, qo_indptr=bounds)
    plan = kv.plan_compact(*to_gpu(slots, index, lens), qo_indptr=None if bounds is None else to_gpu(bounds)[0])
    assert plan.group == expected.group
    for got, wanted in zip(plan[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(got.get(), wanted)
        assert got.dtype == wanted.dtype


def test_defragmentation_gives_what_numpy_gives(rng: np.random.Generator) -> None:
    num_slots = 4096
    slots = rng.permutation(1500).astype(np.int32)
    runs = np.array([[1501, 700], [3000, 10], [0, 0], [3100, 900]])
    shared = rng.random(num_slots) < 0.002
    for max_moves in (None, 300):
        keywords: dict[str, Any] = {"num_slots": num_slots, "max_moves": max_moves}
        moves, remap = kv.plan_defrag(slots, runs, immovable=shared, **keywords)
        gpu_moves, gpu_remap = kv.plan_defrag(*to_gpu(slots, runs), immovable=to_gpu(shared)[0], **keywords)
        for got, wanted in zip((*gpu_moves[:3], gpu_remap), (*moves[:3], remap), strict=True):
            np.testing.assert_array_equal(got.get(), wanted)
        host = random_layers((num_slots, BF16), 2, rng)
        layers = to_gpu(*host)
        kv.move_rows(layers, *gpu_moves, validate=True)
        table = kv.apply_remap(to_gpu(slots)[0], gpu_remap)
        for layer, old in zip(layers, host, strict=True):
            np.testing.assert_array_equal(layer[table].get(), old[slots])
        in_place = to_gpu(slots)[0]
        assert kv.apply_remap(in_place, gpu_remap, out=in_place) is in_place
        np.testing.assert_array_equal(in_place.get(), table.get())


@pytest.mark.parametrize("drawn", ["greedy", "with", "without", "chosen"])
def test_acceptance_gives_what_numpy_gives_and_waits_for_nothing(drawn: str, rng: np.random.Generator) -> None:
    import cupy

    batch, size, vocabulary = 16, 12, 50
    parents = np.concatenate([np.full((batch, 1), -1), *[rng.integers(0, i, (batch, 1)) for i in range(1, size)]], 1)
    draft, target = (rng.integers(0, 3, (batch, size)) for _ in range(2))
    probs = [rng.dirichlet(np.full(vocabulary, 0.05), (batch, size)) for _ in range(2)]
    uniforms = rng.random((batch, size))

    def accept(to: Any) -> spec.Acceptance:
        tree = to(parents)
        if drawn == "greedy":
            return spec.accept_greedy(to(draft), to(target), parents=tree)
        q = None if drawn == "chosen" else to(probs[1])
        keywords = {"parents": tree, "with_replacement": drawn != "without"}
        return spec.accept_sampled(to(draft), to(probs[0]), q, to(uniforms), **keywords)

    for got, wanted in zip(accept(cupy.asarray), accept(np.asarray), strict=True):
        np.testing.assert_array_equal(got.get(), wanted)
        assert got.dtype == wanted.dtype
    # What synchronises cannot be captured.
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays = {id(array): cupy.asarray(array) for array in (parents, draft, target, *probs, uniforms)}
        accept(lambda array: arrays[id(array)])
        stream.synchronize()
        stream.begin_capture()
        result = accept(lambda array: arrays[id(array)])
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(result.accept_index.get(), accept(np.asarray).accept_index)


def test_h4_h10_the_next_verify_on_the_stream_sees_the_moved_rows(rng: np.random.Generator) -> None:
    import cupy

    size, heads, num_slots, prefix = 8, 8, 1024, 500
    parents = np.array([[-1, 0, 0, 1, 1, 2, 3, 4]])
    target = rng.integers(0, 100, (1, size))
    draft = np.full((1, size), 100)
    draft[0, [2, 5]] = target[0, [0, 2]]
    slots = rng.permutation(num_slots)
    window, fresh, after = slots[prefix : prefix + 8], slots[prefix + 8 : prefix + 16], slots[prefix + 16 : prefix + 24]
    pool = rng.standard_normal((num_slots, 576)).astype(ml_dtypes.bfloat16)
    linear = pool.copy()
    linear[fresh[:3]] = pool[window[[0, 2, 5]]]
    q = rng.standard_normal((size, heads, 576)).astype(ml_dtypes.bfloat16)

    def verify(cache: Any, tokens: Array) -> Any:
        return mlaflash.mla_verify(
            cupy.asarray(q),
            cache,
            sm_scale=0.05,
            kv_lens=cupy.asarray(np.array([tokens.size], np.int32)),
            kv_indptr=cupy.asarray(np.array([0, tokens.size], np.int32)),
            kv_indices=cupy.asarray(tokens.astype(np.int32)),
            mask=TreeMask(cupy.asarray(TreeMask.from_parents(parents).words), size),
        )

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ours, theirs = to_gpu(pool, linear)
        accepted = spec.accept_greedy(*to_gpu(draft, target), parents=cupy.asarray(parents), depth=4)
        plan = kv.plan_compact(cupy.asarray(window), accepted.accept_index, accepted.accept_lens)
        kv.move_rows([ours], *plan)
        got = verify(ours, np.concatenate([slots[:prefix], window[:3], after]))
        wanted = verify(theirs, np.concatenate([slots[:prefix], fresh[:3], after]))
        stream.synchronize()
    assert accepted.accept_lens.tolist() == [3]
    for mine, other in zip(got, wanted, strict=True):
        cupy.testing.assert_array_equal(mine, other)


def test_validation_reads_the_device(rng: np.random.Generator) -> None:
    layers = to_gpu(*random_layers((8, 64), 2, rng))
    with pytest.raises(InvalidArgumentError, match=r"dst\[0\] and dst\[1\] are both 5"):
        kv.move_rows(layers, *to_gpu(np.array([0, 1]), np.array([5, 5])), validate=True)


def test_a_cold_call_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from mlaflash.jit import kernel

    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(kernel, "_functions", {})
    layer, order = cupy.zeros((8, 64), np.uint8), cupy.arange(4)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(CaptureError, match="once before capturing"):
            kv.move_rows([layer], order, order)
        stream.end_capture()


def test_loaded_kernels_use_no_local_memory() -> None:
    device = Device.current()
    for launch in (*compact.every_launch(), *move.every_launch()):
        kernel = jit.load(launch.kernel, launch.defines, device, launch.shared_bytes)
        assert kernel.attributes()["local_bytes"] == 0
