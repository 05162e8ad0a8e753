"""Context parallelism without GPUs: emulator ranks in processes, with an exchange in shared memory, equal one rank."""

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ranks import RAGGED, SCALE, THREE, TWO, Problem, solve, tokens_of

from mlaflash import TreeMask, emulator, mask_pack
from mlaflash.device import Device
from mlaflash.distributed import Contiguous, Interleaved, ShardedPlan, merging, shard_lens, transposing
from mlaflash.distributed.plan import Lanes
from mlaflash.emulator import SharedMemory, correct_partial, merge_partials, run_kernel, shard_mask
from mlaflash.errors import CommunicationError, InvalidArgumentError, LaunchError, ShapeError, UnsupportedError
from mlaflash.jit import compile_kernel
from mlaflash.lab.mask_inputs import NAMES, Batch, encode
from mlaflash.lab.plan_inputs import judge
from mlaflash.lab.ranks import run_ranks
from mlaflash.mma_tiles import NARROW
from mlaflash.sharding import Sharding

CAPACITY = 1 << 22


@pytest.fixture(scope="module")
def results() -> dict[str, list[tuple[Any, Any]]]:
    """Results of every problem, rank by rank."""
    found = {}
    for ranks, problems in ((2, TWO), (3, THREE)):
        memory = SharedMemory(ranks, CAPACITY, timeout=30)
        for solved in run_ranks(solve, ranks, memory, list(problems.values()), timeout=120):
            for name, result in zip(problems, solved, strict=True):
                found.setdefault(name, []).append(result)
    return found


@pytest.mark.parametrize("name", [*TWO, *THREE])
def test_ranks_equal_one_rank(name: str, results: dict[str, list[tuple[Any, Any]]]) -> None:
    problem = (TWO | THREE)[name]
    out, lse = problem.expected()
    if problem.plan.get("lse_base") == "2":
        lse = lse / np.log(2)
    for rank, result in enumerate(results[name]):
        comparison = judge(result, problem.of_rank((out, lse), rank), "bfloat16")
        assert comparison.passed, (rank, comparison)


def test_the_merged_result_is_the_same_on_every_rank(results: dict[str, list[tuple[Any, Any]]]) -> None:
    (out, lse), other = results["all heads everywhere"]
    assert out.tobytes() == other[0].tobytes()
    assert lse.tobytes() == other[1].tobytes()


# --- lengths and masks -----------------------------------------------------------------------------------------------

SHARDINGS: list[Sharding] = [
    Interleaved(1),
    Interleaved(2),
    Interleaved(3, 5),
    Contiguous(np.array([0, 7, 7, 40], np.int32)),
    Contiguous(np.array([[0, 9], [0, 0], [0, 70], [0, 31], [0, 2]], np.int32)),
]
BATCH = Batch((8, 0, 40, 3, 5), (20, 33, 0, 64, 1), 3)


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_lengths_are_those_of_the_tokens(sharding: Sharding) -> None:
    kv_lens = np.array([28, 33, 40, 67, 3], np.int32)
    for rank in range(sharding.num_ranks):
        expected = [len(tokens_of(sharding, rank, b, kv_len)) for b, kv_len in enumerate(kv_lens.tolist())]
        lens = shard_lens(kv_lens, sharding, rank)
        assert (lens.dtype, lens.tolist()) == (np.int32, expected)
        assert max(expected) <= sharding.most_tokens(67)


def expected_mask(dense: list[Any], sharding: Sharding, rank: int, kv_lens: list[int], max_q: int) -> Any:
    """Say which of the rank's draft tokens each row sees, token by token."""
    rows, tails = [], []
    for b, (sees, kv_len) in enumerate(zip(dense, kv_lens, strict=True)):
        drafts = [i - (kv_len - len(sees)) for i in tokens_of(sharding, rank, b, kv_len) if i >= kv_len - len(sees)]
        local = np.zeros((len(sees), max_q), bool)
        local[:, : len(drafts)] = sees[:, drafts]
        rows.append(local)
        tails.append(len(drafts))
    return np.concatenate(rows), tails


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
@pytest.mark.parametrize("name", [*NAMES, "tree_mask", "causal"])
def test_masks_are_those_of_the_tokens(name: str, sharding: Sharding) -> None:
    max_q, kv_lens = 40, [q + p for q, p in zip(BATCH.q_lens, BATCH.prefix_lens, strict=True)]
    kv_lens[3] = 2  # shorter than its draft
    indptr = np.array([0, *np.cumsum(BATCH.q_lens)], np.int32)
    mask: Any = "causal"
    dense = [np.tri(q_len, dtype=bool) for q_len in BATCH.q_lens]
    if name == "tree_mask":
        dense = BATCH.dense()
        mask = TreeMask.from_dense(dense)
    elif name != "causal":
        encoded = encode(name, BATCH, max_q, wide=False)
        mask, dense = encoded.make(**encoded.arrays), encoded.expected.to_dense(indptr)
    for rank in range(sharding.num_ranks):
        local = shard_mask(
            mask,
            sharding,
            rank,
            kv_lens=np.array(kv_lens, np.int32),
            num_tokens=int(indptr[-1]) + 2,
            max_q=max_q,
            qo_indptr=indptr,
            seed=rank,
        )
        expected, tails = expected_mask(dense, sharding, rank, kv_lens, max_q)
        assert local.tail_lens.tolist() == tails
        assert local.kv_lens.tolist() == shard_lens(np.array(kv_lens), sharding, rank).tolist()
        assert np.array_equal(local.mask.bits()[:-2], expected)
        assert not local.mask.words[-2:].any()


def test_a_local_call_takes_what_shard_mask_gives() -> None:
    problem = Problem(Interleaved(2, 2), **RAGGED, mask="tree")
    whole, outs, lses = problem.whole(), [], []
    for rank in range(2):
        local = shard_mask(
            whole["mask"],
            problem.sharding,
            rank,
            kv_lens=whole["kv_lens"],
            num_tokens=len(whole["q"]),
            max_q=7,
            qo_indptr=whole["qo_indptr"],
        )
        mine = problem.local(rank) | {"q": whole["q"]}
        out, lse = emulator.mla_verify(
            **mine, **local._asdict(), qo_indptr=whole["qo_indptr"], sm_scale=SCALE, max_q_len=7, kernel="tile"
        )
        outs.append(out)
        lses.append(lse)
    merged = merge_partials(np.stack(outs), np.stack(lses))
    comparison = judge(merged, problem.expected(), "bfloat16")
    assert comparison.passed, comparison


# --- the merge -------------------------------------------------------------------------------------------------------


def partials(dtype: Any) -> tuple[Any, Any, Any, Any]:
    """Parts of three ranks with empty ones among them, and what they make in float64."""
    rng = np.random.default_rng(0)
    outs = rng.standard_normal((3, 5, 4, 512)).astype(dtype)
    lses = rng.normal(10, 3, (3, 5, 4)).astype(np.float32)
    lses[1, 2], lses[0, 3], lses[2, 3], lses[:, 4] = -np.inf, np.inf, -np.inf, -np.inf
    empty = np.isinf(lses)
    weights = np.where(empty, 0, np.exp(np.where(empty, 0, lses.astype(np.float64))))
    total = weights.sum(0)
    out = np.einsum("nth,nthd->thd", weights, outs.astype(np.float64)) / np.where(total, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    outs[empty] = np.nan  # not read
    return outs, lses, out, lse


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_parts_merge_to_the_whole(dtype: Any, base: str) -> None:
    outs, lses, out, lse = partials(dtype)
    unit = 1.0 if base == "e" else np.log(2)
    merged, merged_lse = merge_partials(outs, (lses / unit).astype(np.float32), lse_base=base)
    np.testing.assert_allclose(merged.astype(np.float64), out, atol=2e-6 if dtype == np.float32 else 0.02)
    np.testing.assert_allclose(merged_lse * unit, lse, rtol=1e-5)
    assert not merged[4].any()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_shares_add_up_to_the_whole(dtype: Any) -> None:
    outs, lses, out, lse = partials(dtype)
    shares = []
    for rank in range(3):
        mine = outs[rank].copy()
        share, share_lse = correct_partial(mine, lses, rank)
        assert share is mine
        np.testing.assert_allclose(share_lse, lse, rtol=1e-5)
        shares.append(share.astype(np.float64))
    np.testing.assert_allclose(sum(shares), out, atol=2e-6 if dtype == np.float32 else 0.02)


def test_a_strided_result_is_written_where_it_lies() -> None:
    outs, lses, out, _ = partials(np.float32)
    memory = np.full((4, 5, 520), 7, np.float32)
    merge_partials(outs, lses, out=memory.transpose(1, 0, 2)[..., :512])
    np.testing.assert_allclose(memory.transpose(1, 0, 2)[..., :512], out, atol=2e-6)
    assert (memory[..., 512:] == 7).all()


PARAMS = {"MergeParams": merging.MERGE_PARAMS_DTYPE, "TransposeParams": transposing.TRANSPOSE_PARAMS_DTYPE}


@pytest.mark.parametrize("struct", PARAMS)
def test_layout_is_that_of_the_kernel(struct: str, tmp_path: Path) -> None:
    dtype = PARAMS[struct]
    places = [f"u32x2{{__builtin_offsetof({struct}, {name}), sizeof(p.{name})}}" for name in dtype.names]
    places.append(f"u32x2{{sizeof({struct}), alignof({struct})}}")
    target = dtype.names[2]  # of either, an address to write to
    stores = "".join(f"  st_global_u32x2((u8*)p.{target} + {8 * i}, {place});\n" for i, place in enumerate(places))
    kernel = tmp_path / "layout.cu"
    kernel.write_text(
        '#include "merge_params.cuh"\n#include "ptx.cuh"\n#include "transpose_params.cuh"\n'
        f"KERNEL_WITH({struct}, mlaflash_layout, 32, 1) {{\n  if (thread_idx()) return;\n{stores}}}\n"
    )
    out = np.zeros((len(places), 2), np.uint32)
    params = np.zeros(1, dtype)
    params[target] = out.ctypes.data
    run_kernel(kernel, {}, (1,), 32, 0, params, {target: out})
    for name, place in zip(dtype.names, out.tolist(), strict=False):
        field, offset = dtype.fields[name][:2]
        assert (name, *place) == (name, offset, field.itemsize)
    assert out[-1].tolist() == [dtype.itemsize, dtype.alignment]


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_every_form_compiles_without_spills(arch: str) -> None:
    masks = mask_pack.every_launch(is_sharded=True)
    for launch in (*merging.every_launch(), *masks, transposing.transpose_launch()):
        compiled = compile_kernel(launch.kernel, launch.defines, arch)
        assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0), compiled.log
        assert compiled.static_shared_bytes + launch.shared_bytes <= Device.for_arch(arch).shared_per_block


# --- what is refused -------------------------------------------------------------------------------------------------


def plan(sharding: Sharding | None = None, **changes: Any) -> ShardedPlan:
    problem = Problem(sharding or Interleaved(1), (4,), (30,))
    communicator = SharedMemory(1, CAPACITY).communicator(0)
    return emulator.ShardedPlan(communicator, problem.sharding, **problem.arguments() | changes, tiles=NARROW)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: plan(Interleaved(2)), InvalidArgumentError, "for 2 ranks and communicator for 1"),
        (lambda: plan(head_groups=3), InvalidArgumentError, "head_groups 3"),
        (lambda: plan(head_groups=2, merge="all_gather"), UnsupportedError, "give 1 with 'all_gather'"),
        (lambda: plan(new_kv=True), UnsupportedError, "new_kv is for a cache on one GPU"),
        (lambda: plan(merge="sum"), InvalidArgumentError, "merge is 'sum'"),
        (lambda: Interleaved(0), InvalidArgumentError, "num_ranks is 0"),
        (lambda: Interleaved(2**16, 2**15), InvalidArgumentError, "product must be below"),
        (lambda: Contiguous(np.zeros(2)), ShapeError, "begins is float64"),
        (lambda: shard_lens(np.ones(1, np.int32), Interleaved(2), 2), InvalidArgumentError, "rank is 2"),
        (lambda: correct_partial(*partials(np.float32)[:2], 0), ShapeError, r"must be \(T, H, 512\)"),
        (lambda: correct_partial(partials(np.float32)[0][0], partials(np.float32)[1], 3), InvalidArgumentError, "3"),
        (lambda: merge_partials(*partials(np.float64)[:2]), UnsupportedError, "float64"),
    ],
)
def test_what_cannot_work_is_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


class Trace(Lanes):
    """Notes what the caller's stream and that of the communication wait for."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def fork(self, stream: Any) -> Any:
        self.steps.append("fork")

    def follow(self, stream: Any) -> None:
        self.steps.append("follow")

    def mark(self, point: int) -> None:
        self.steps.append(f"mark {point}")

    def wait(self, point: int, stream: Any) -> None:
        self.steps.append(f"wait {point}")


def test_groups_of_heads_are_gathered_and_merged_beside_the_attention_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(Interleaved(1), (4,), (30,))
    trace = Trace()
    made, local = plan(head_groups=2), problem.local(0)
    made.update(**problem.update(), block_table=local["block_table"])
    steps = trace.steps
    monkeypatch.setattr(made, "_lanes", trace)
    for target, name in (
        (made.communicator, "all_gather"),
        (made.communicator, "all_to_all"),
        (made.local, "_enqueue"),
    ):
        real = getattr(target, name)
        monkeypatch.setattr(target, name, lambda *a, n=name, f=real, **k: (steps.append(n), f(*a, **k))[1])
    made.run(local["q"], local["kv_cache"])
    assert steps == [
        *("fork", "all_gather", "mark 0", "all_gather", "mark 1"),
        *("wait 0", "_enqueue", "follow", "all_to_all"),
        *("wait 1", "_enqueue", "follow", "all_to_all"),
        *("mark 2", "wait 2"),
    ]


def test_a_plan_runs_again_with_other_results_and_other_numbers_of_tokens() -> None:
    problem = Problem(Interleaved(1), (4,), (30,))
    made, local = plan(head_groups=2), problem.local(0)
    made.update(**problem.update(), block_table=local["block_table"])
    expected = made.run(local["q"], local["kv_cache"])
    dtype = expected[0].dtype
    for _ in range(2):
        out = np.zeros((2, 4, 520), dtype).transpose(1, 0, 2)[..., :512]
        lse = np.zeros((4, 3), np.float32)[:, 1:]
        assert made.run(local["q"], local["kv_cache"], out=out, lse=lse) == (out, lse)
        assert out.tobytes() == expected[0].tobytes()
        assert lse.tobytes() == expected[1].tobytes()
    pair = local["q"][..., :512], local["q"][..., 512:]
    for again, first in zip(made.run(pair, local["kv_cache"]), expected, strict=True):
        assert again.tobytes() == first.tobytes()
    made.update(**problem.update() | {"qo_indptr": None, "q_len": 1}, block_table=local["block_table"])
    out, _ = made.run(local["q"][3:], local["kv_cache"])
    assert out.tobytes() == expected[0][3:].tobytes()
    with pytest.raises(ShapeError, match="planned 1 requests of 1 query tokens"):
        made.run(local["q"][:0], local["kv_cache"])
    made.update(**problem.update(), block_table=local["block_table"])
    out, lse = made.run(local["q"][:0], local["kv_cache"])
    assert (out.shape, lse.shape) == ((0, 2, 512), (0, 2))


def test_a_step_that_does_not_fit_its_plan_is_refused() -> None:
    problem = Problem(Interleaved(1), (4,), (30,))
    made, local, step = plan(), problem.local(0), problem.update()
    with pytest.raises(InvalidArgumentError, match="mask is given"):
        made.update(**step, block_table=local["block_table"], mask=TreeMask.causal(4))
    with pytest.raises(ShapeError, match="kv_lens has 2 requests"):
        made.update(kv_lens=np.ones(2, np.int32), block_table=local["block_table"])
    made.update(**step, block_table=local["block_table"])
    with pytest.raises(ShapeError, match="it must be bfloat16 with 2, the heads of this rank"):
        made.run(local["q"][:, :1], local["kv_cache"])
    with pytest.raises(ShapeError, match="made for 4 at most"):
        made.run(np.concatenate([local["q"]] * 2), local["kv_cache"])
    with pytest.raises(ShapeError, match="out is"):
        made.run(local["q"], local["kv_cache"], out=np.zeros((4, 2, 512), np.float32))
    shifted = np.zeros((4, 2, 584), local["q"].dtype)[..., 4:580]
    with pytest.raises(ShapeError, match="must start on 16 bytes"):
        made.run(shifted, local["kv_cache"])
    frozen = np.zeros((4, 2), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ShapeError, match="lse is read-only"):
        made.run(local["q"], local["kv_cache"], lse=frozen)
    with pytest.raises(ShapeError, match="kv_cache has shape"):
        made.run(local["q"], local["kv_cache"][..., :512])
    with pytest.raises(InvalidArgumentError, match="call update"):
        plan().run(local["q"], local["kv_cache"])
    made.run(local["q"], local["kv_cache"])  # nothing was begun: others did not wait in vain


def test_q_and_results_may_lie_in_any_way_that_a_plan_takes() -> None:
    problem = Problem(Interleaved(1), (3, 3), (30, 17))
    communicator = SharedMemory(1, CAPACITY).communicator(0)
    made = emulator.ShardedPlan(communicator, problem.sharding, **problem.arguments(), head_groups=2, tiles=NARROW)
    local, step = problem.local(0), problem.update() | {"qo_indptr": None}
    made.update(**step, block_table=local["block_table"])
    q, cache = local["q"], local["kv_cache"]
    expected = made.run(q, cache)
    padded = np.zeros((2, 6, 640), q.dtype)  # head by head
    padded[..., 32:608] = q.transpose(1, 0, 2)
    views = padded[..., 32:608].transpose(1, 0, 2)
    by_request = (2, 3, 2)
    for given, shape in (
        (views, (6, 2)),
        ((np.ascontiguousarray(q[..., :512]), views[..., 512:]), (6, 2)),
        (q.reshape(*by_request, 576), by_request),
        ((views[..., :512].reshape(*by_request, 512), q[..., 512:].reshape(*by_request, 64)), by_request),
    ):
        for result, first in zip(made.run(given, cache), expected, strict=True):
            assert result.shape[: len(shape)] == shape
            assert result.tobytes() == first.tobytes()
    out = np.zeros((2, 6, 512), expected[0].dtype).transpose(1, 0, 2).reshape(*by_request, 512)
    assert made.run(q.reshape(*by_request, 576), cache, out=out)[0] is out
    assert out.tobytes() == expected[0].tobytes()
    with pytest.raises(ShapeError, match="one run of tokens"):
        made.run(q.reshape(*by_request, 576), cache, out=np.zeros((3, 2, 2, 512), q.dtype).transpose(1, 0, 2, 3))


def test_arrays_like_those_before_are_only_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(Interleaved(1), (4,), (30,))
    made, local = plan(), problem.local(0)
    made.update(**problem.update(), block_table=local["block_table"])
    expected = made.run(local["q"], local["kv_cache"])
    monkeypatch.delattr(ShardedPlan, "_bind")
    monkeypatch.delattr(type(made.local).__mro__[1], "_bind")
    elsewhere = {name: np.copy(local[name]) for name in ("q", "kv_cache")}
    for array in local["q"], local["kv_cache"]:
        array[...] = np.nan
    for again, first in zip(made.run(**elsewhere), expected, strict=True):
        assert again.tobytes() == first.tobytes()


def test_an_error_in_the_middle_of_a_step_ends_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(Interleaved(1), (4,), (30,))
    made, local = plan(), problem.local(0)
    made.update(**problem.update(), block_table=local["block_table"])

    def refuse(*_: Any) -> None:
        raise LaunchError("refused")

    monkeypatch.setattr(made.local, "_enqueue", refuse)
    with pytest.raises(LaunchError, match="refused"):
        made.run(local["q"], local["kv_cache"])
    monkeypatch.undo()
    with pytest.raises(CommunicationError, match="rank 0"):
        made.run(local["q"], local["kv_cache"])


def leave_in_the_middle(rank: int, memory: SharedMemory) -> str:
    """Gather once; then rank 1 dies."""
    communicator = memory.communicator(rank)
    buffer = np.zeros((2, 4), np.uint8)
    communicator.all_gather(buffer, None)
    if rank == 1:
        os._exit(7)
    try:
        communicator.all_gather(buffer, None)
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_a_rank_that_leaves_is_an_error_for_the_others() -> None:
    memory = SharedMemory(2, 64, timeout=0.5)
    said, nothing = run_ranks(leave_in_the_middle, 2, memory, required=[0])
    assert "rank 0 of 2 waited for 0.5 s" in said
    assert nothing is None


def test_a_rank_without_a_result_is_named() -> None:
    with pytest.raises(CommunicationError, match=r"1 ended without a result .*rank 1: exit status 7"):
        run_ranks(leave_in_the_middle, 2, SharedMemory(2, 64, timeout=0.5))
