"""Context parallelism over NCCL: one rank, two ranks, ranks that die or hang; and its parts on one GPU."""

import os
import time
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import RAGGED, TWO, Problem
from test_distributed import partials

import mlaflash
from mlaflash import MaskSource, TreeMask, VerifyShape, emulator, oracle
from mlaflash.device import device_count, gpu_available
from mlaflash.distributed import (
    Interleaved,
    NcclCommunicator,
    ShardedPlan,
    correct_partial,
    merge_partials,
    shard_lens,
    shard_mask,
)
from mlaflash.errors import CommunicationError, LaunchError
from mlaflash.lab.plan_inputs import judge
from mlaflash.lab.ranks import free_address, run_ranks
from mlaflash.mma_tiles import NARROW

SHORTER = 5  # tokens less at the second replay


def nccl_is_missing() -> bool:
    if not gpu_available():
        return True
    from cupy.cuda import nccl

    return not nccl.available


needs_nccl = pytest.mark.skipif(nccl_is_missing(), reason="no NCCL")
needs_two = pytest.mark.skipif(not gpu_available() or device_count() < 2, reason="fewer than two GPUs")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The pynvml package:FutureWarning")]


# --- ranks -----------------------------------------------------------------------------------------------------------


def start(rank: int, num_ranks: int, address: tuple[str, int], timeout: float = 30.0) -> NcclCommunicator:
    import cupy

    cupy.cuda.Device(rank).use()
    return NcclCommunicator(num_ranks, rank, address, timeout=timeout)


def solve(rank: int, num_ranks: int, address: tuple[str, int], problems: list[Problem]) -> list[Any]:
    """Solve each problem three times: at once, in a graph, and in its replay with shorter requests."""
    with start(rank, num_ranks, address) as communicator:
        return [solve_one(communicator, problem) for problem in problems]


def solve_one(communicator: NcclCommunicator, problem: Problem) -> list[tuple[Any, Any]]:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        sharding = problem.sharding
        if not isinstance(sharding, Interleaved):
            sharding = replace(sharding, begins=cupy.asarray(sharding.begins))
        plan = ShardedPlan(communicator, sharding, **problem.arguments(), tiles=NARROW)
        local = {name: cupy.asarray(array) for name, array in problem.local(communicator.rank).items()}
        step = {name: to_gpu(value) for name, value in problem.update().items()}
        scale = problem.scale(communicator.rank)
        scale = scale if isinstance(scale, float) else cupy.asarray(scale)

        def update_and_run(**results: Any) -> tuple[Any, Any]:
            plan.update(**step, block_table=local["block_table"])
            return plan.run(local["q"], local["kv_cache"], kv_scale=scale, **results)

        out, lse = update_and_run()
        communicator.synchronize(stream)
        found = [(out.get(), lse.get())]
        stream.begin_capture()
        update_and_run(out=out, lse=lse)
        graph = stream.end_capture()
        for shorter in (0, SHORTER):
            step["kv_lens"] -= shorter
            cupy.maximum(step["kv_lens"], 0, out=step["kv_lens"])
            out.view("uint16" if out.itemsize == 2 else "uint32")[...] = 0xFFFF
            graph.launch(stream)
            communicator.synchronize(stream)
            found.append((out.get(), lse.get()))
        del graph
    return found


def to_gpu(value: Any) -> Any:
    import cupy

    if isinstance(value, TreeMask):
        return TreeMask(cupy.asarray(value.words), value.max_q)
    return None if value is None else cupy.asarray(value)


def expect(problem: Problem, found: list[list[tuple[Any, Any]]]) -> None:
    """Fail unless every rank has the oracle's result, as long as it was and shorter."""
    whole = problem.whole()
    shorter = whole | {"kv_lens": np.maximum(whole["kv_lens"] - SHORTER, 0)}
    unit = np.log(2) if problem.plan.get("lse_base") == "2" else 1.0
    for rank, (eager, replayed, shortened) in enumerate(found):
        for result, arguments in ((eager, whole), (shortened, shorter)):
            out, lse = oracle.mla_verify(**arguments)
            comparison = judge(result, problem.of_rank((out, lse / unit), rank), "bfloat16")
            assert comparison.passed, (rank, comparison)
        assert all(one.tobytes() == other.tobytes() for one, other in zip(eager, replayed, strict=True))


ALONE = {
    "chain": Problem(Interleaved(1), **RAGGED, heads=4, page_size=4),
    "tree, groups": Problem(Interleaved(1), **RAGGED, heads=4, mask="tree", plan={"head_groups": 2}),
}
LARGE = {
    "large chain": Problem(Interleaved(2, 16), (8, 3), (5000, 333), heads=8, page_size=16, seed=7),
    "large tree in groups": Problem(
        Interleaved(2, 1), (16, 33), (3000, 1500), heads=4, mask="tree", seed=8, plan={"head_groups": 4}
    ),
}


@needs_nccl
@pytest.mark.parametrize("name", ALONE)
def test_one_rank_over_nccl(name: str) -> None:
    expect(ALONE[name], run_ranks(solve, 1, 1, free_address(), [ALONE[name]], timeout=120)[0])


def run_every_layout(rank: int, address: tuple[str, int]) -> list[bool]:
    """Run one step on q and results in several layouts, at once and in a graph; say whether all give the same bits."""
    import cupy

    problem = Problem(Interleaved(1), (3, 3), (60, 17), heads=4)
    stream = cupy.cuda.Stream(non_blocking=True)
    same = []
    with start(rank, 1, address) as communicator, stream:
        plan = ShardedPlan(communicator, problem.sharding, **problem.arguments(), head_groups=2)
        local = {name: cupy.asarray(array) for name, array in problem.local(0).items()}
        kv_lens = cupy.asarray(problem.update()["kv_lens"])
        plan.update(kv_lens=kv_lens, block_table=local["block_table"])
        q, cache = local["q"], local["kv_cache"]
        expected = [array.tobytes() for array in plan.run(q, cache)]
        padded = cupy.zeros((4, 6, 640), "uint16")
        padded[..., 32:608] = q.view("uint16").transpose(1, 0, 2)
        views = padded.view(q.dtype)[..., 32:608].transpose(1, 0, 2)
        by_request = q.reshape(2, 3, 4, 576)
        for given in (
            views,
            (q[..., :512], views[..., 512:]),
            by_request,
            (by_request[..., :512], by_request[..., 512:]),
        ):
            out, lse = plan.run(given, cache)
            stream.begin_capture()
            plan.run(given, cache, out=out, lse=lse)
            graph = stream.end_capture()
            for is_replay in (False, True):
                if is_replay:
                    out.view("uint16").fill(0)
                    graph.launch(stream)
                same.append([array.tobytes() for array in (out, lse)] == expected)
            del graph
    return same


@needs_nccl
def test_q_may_lie_in_any_way_that_a_plan_takes() -> None:
    (same,) = run_ranks(run_every_layout, 1, free_address(), timeout=120)
    assert same == [True] * 8


@pytest.fixture(scope="module")
def of_two() -> dict[str, list[Any]]:
    problems = TWO | LARGE
    found = run_ranks(solve, 2, 2, free_address(), list(problems.values()), timeout=200)
    return {name: [of_rank[i] for of_rank in found] for i, name in enumerate(problems)}


@needs_nccl
@needs_two
@pytest.mark.parametrize("name", [*TWO, *LARGE])
def test_two_ranks_equal_one(name: str, of_two: dict[str, list[Any]]) -> None:
    expect((TWO | LARGE)[name], of_two[name])


def refuse(*_: Any) -> None:
    raise LaunchError("refused")


def lose_a_rank(rank: int, address: tuple[str, int], how: str) -> tuple[str, float]:
    """Do steps in a graph until rank 1 dies, raises or stops coming; say what rank 0 is told, and after how long."""
    import cupy

    communicator = start(rank, 2, address)
    problem = TWO["interleaved tokens"]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        plan = ShardedPlan(communicator, problem.sharding, **problem.arguments(), tiles=NARROW)
        local = {name: cupy.asarray(array) for name, array in problem.local(rank).items()}
        plan.update(**{name: to_gpu(v) for name, v in problem.update().items()}, block_table=local["block_table"])
        out, lse = plan.run(local["q"], local["kv_cache"])
        communicator.synchronize(stream)
        stream.begin_capture()
        plan.run(local["q"], local["kv_cache"], out=out, lse=lse)
        graph = stream.end_capture()
        graph.launch(stream)
        communicator.synchronize(stream)
        if rank == 1:
            if how == "dies":
                os._exit(7)
            if how == "raises":
                plan.local._enqueue = refuse  # behind the gather
                with pytest.raises(LaunchError):
                    plan.run(local["q"], local["kv_cache"], out=out, lse=lse)
            else:
                time.sleep(6)
        begin = time.monotonic()
        said = "nothing"
        try:
            if rank == 0:
                graph.launch(stream)  # waits for rank 1 on the GPU
                communicator.synchronize(stream, timeout=2 if how == "hangs" else 20)
            communicator.check()
        except CommunicationError as error:
            said = str(error)
        seconds = time.monotonic() - begin
        stream.synchronize()  # the GPU is free again
    return said, seconds


@needs_nccl
@needs_two
def test_a_rank_that_dies_is_an_error_for_the_other() -> None:
    (said, seconds), _ = run_ranks(lose_a_rank, 2, free_address(), "dies", timeout=90, required=[0])
    assert "rank 0 of 2 cannot go on: rank 1 is gone" in said
    assert seconds < 15


@needs_nccl
@needs_two
def test_a_rank_that_raises_in_the_middle_of_a_step_is_an_error_for_both() -> None:
    (said, seconds), (told, _) = run_ranks(lose_a_rank, 2, free_address(), "raises", timeout=90)
    assert "rank 1 said that one is gone" in said
    assert seconds < 15
    assert "run() raised LaunchError in the middle of a step: refused" in told


@needs_nccl
@needs_two
def test_a_rank_that_does_not_come_is_an_error_for_both() -> None:
    (said, seconds), (told, _) = run_ranks(lose_a_rank, 2, free_address(), "hangs", timeout=90)
    assert "a step did not end within 2 s" in said
    assert seconds < 5
    assert "rank 0 said that one is gone" in told


# --- parts on one GPU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_parts_merge_on_the_gpu(library: str) -> None:
    import cupy

    outs, lses, out, lse = partials(np.float32)
    given: list[Any] = [cupy.asarray(outs), cupy.asarray(lses)]
    if library == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.as_tensor(array, device="cuda") for array in given]
    merged, merged_lse = (cupy.asarray(array).get() for array in merge_partials(*given))
    np.testing.assert_allclose(merged, out, atol=1e-5)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-5)
    shares = []
    for rank in range(3):
        share, share_lse = correct_partial(given[0][rank], given[1], rank)
        shares.append(cupy.asarray(share).get())
        np.testing.assert_allclose(cupy.asarray(share_lse).get(), lse, rtol=1e-5)
    np.testing.assert_allclose(sum(shares), out, atol=1e-5)


@pytest.mark.parametrize("kind", ["causal", "tree", "parents"])
def test_shards_are_packed_as_on_the_emulator(kind: str) -> None:
    import cupy

    rng = np.random.default_rng(3)
    parents = np.stack([[-1, *(rng.integers(0, i) for i in range(1, 40))] for _ in range(3)]).astype(np.int32)
    kv_lens = np.array([100, 41, 12], np.int32)
    masks: dict[str, tuple[Any, Any]] = {
        "causal": ("causal", "causal"),
        "tree": (TreeMask.from_parents(parents), TreeMask.from_parents(cupy.asarray(parents))),
        "parents": (MaskSource.from_parents(parents), MaskSource.from_parents(cupy.asarray(parents))),
    }
    for rank in range(3):
        sizes: dict[str, Any] = {"num_tokens": 120, "max_q": 40}
        sharding = Interleaved(3, 4)
        expected = emulator.shard_mask(masks[kind][0], sharding, rank, kv_lens=kv_lens, **sizes)
        found = shard_mask(masks[kind][1], sharding, rank, kv_lens=cupy.asarray(kv_lens), **sizes)
        assert np.array_equal(found.mask.words.get(), expected.mask.words)
        assert found.kv_lens.get().tolist() == expected.kv_lens.tolist()
        assert found.tail_lens.get().tolist() == expected.tail_lens.tolist()
        assert shard_lens(cupy.asarray(kv_lens), sharding, rank).get().tolist() == expected.kv_lens.tolist()


def first_use_in_a_capture(rank: int) -> list[str]:
    """Use GPU 0, then capture the first call of GPU 1: without and with its kernels loaded there."""
    import cupy

    shape = VerifyShape(num_heads=4, q_len=2, kv_len=256, page_size=64)
    rng = np.random.default_rng(0)
    host: dict[str, Any] = {
        "q": (0.3 * rng.standard_normal((1, 2, 4, 576))).astype(ml_dtypes.bfloat16),
        "kv_cache": rng.standard_normal((4, 64, 576)).astype(ml_dtypes.bfloat16),
        "kv_lens": np.array([250], np.int32),
        "block_table": np.arange(4, dtype=np.int32)[None],
    }
    said = []
    for ordinal in (0, 1):
        with cupy.cuda.Device(ordinal):
            arrays = {name: cupy.asarray(array) for name, array in host.items()}
            out, lse = cupy.zeros((1, 2, 4, 512), "bfloat16"), cupy.zeros((1, 2, 4), "float32")
            stream = cupy.cuda.Stream(non_blocking=True)
            cupy.cuda.Device().synchronize()
            for is_warm in (ordinal == 0, True):
                if is_warm:
                    mlaflash.warmup([shape])
                with stream:
                    stream.begin_capture()
                    try:
                        mlaflash.mla_verify(**arrays, sm_scale=0.1, out=out, lse=lse)
                    except mlaflash.CaptureError:
                        said.append(f"GPU {ordinal} refused")
                    graph = stream.end_capture()
                    if said and said[-1] == f"GPU {ordinal} refused" and not is_warm:
                        continue
                    graph.launch(stream)
                    stream.synchronize()
                result = judge((out.get(), lse.get()), oracle.mla_verify(**host, sm_scale=0.1), "bfloat16")
                said.append(f"GPU {ordinal} {'right' if result.passed else result}")
    return said


@needs_two
def test_f6_each_gpu_is_warmed_for_itself() -> None:
    (said,) = run_ranks(first_use_in_a_capture, 1, timeout=120)
    assert said == ["GPU 0 right", "GPU 0 right", "GPU 1 refused", "GPU 1 right"]
