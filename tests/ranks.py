"""Emulator ranks in processes of their own, and what each of them has of a problem."""

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlaflash import emulator, oracle
from mlaflash.distributed import Contiguous, Interleaved
from mlaflash.errors import CommunicationError
from mlaflash.lab.inputs import Case, build
from mlaflash.mma_tiles import NARROW
from mlaflash.sharding import Sharding

SCALE = 0.14468
NAN_ID = 2147480000


@dataclass(frozen=True)
class Problem:
    """A step of all ranks; `heads` are those of one."""

    sharding: Sharding
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    mask: str = "causal"
    heads: int = 2
    page_size: int = 1
    seed: int = 0
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.sharding.num_ranks

    def whole(self) -> dict[str, Any]:
        """Give the arguments of `mla_verify` for all heads and all tokens."""
        case = Case(
            name="ranks",
            q_lens=self.q_lens,
            kv_lens=self.kv_lens,
            heads=self.heads * self.ranks,
            mask=self.mask,
            sm_scale=SCALE,
            page_size=1,
            dtype="bfloat16",
        )
        return build(case, self.seed)

    def expected(self) -> tuple[Any, Any]:
        return oracle.mla_verify(**self.whole())

    def local(self, rank: int) -> dict[str, Any]:
        """Give one rank's heads of q, its cache with NaN around the tokens, and its page table."""
        whole = self.whole()
        rng = np.random.default_rng([self.seed, rank])
        bounds, ids = whole["kv_indptr"], whole["kv_indices"]
        width = max(1, *(-(-kv_len // self.page_size) for kv_len in self.kv_lens))
        cache = np.full((len(self.kv_lens) * width + 1, self.page_size, 576), np.nan, whole["kv_cache"].dtype)
        table = np.full((len(self.kv_lens), width), NAN_ID, np.int32)
        free = rng.permutation(len(cache)).astype(np.int32).tolist()
        for b, kv_len in enumerate(self.kv_lens):
            rows = whole["kv_cache"].reshape(-1, 576)[ids[bounds[b] : bounds[b] + kv_len]]
            rows = rows[tokens_of(self.sharding, rank, b, kv_len)]
            for page in range(-(-len(rows) // self.page_size)):
                table[b, page] = free.pop()
                piece = rows[page * self.page_size : (page + 1) * self.page_size]
                cache[table[b, page], : len(piece)] = piece
        heads = slice(rank * self.heads, (rank + 1) * self.heads)
        return {"q": whole["q"][:, heads], "kv_cache": cache, "block_table": table}

    def arguments(self) -> dict[str, Any]:
        """Give those of the plan."""
        return {
            "num_heads": self.heads,
            "max_batch": len(self.kv_lens),
            "max_q_len": max(1, *self.q_lens),
            "max_kv_len": max(1, *self.kv_lens),
            "page_size": self.page_size,
            "block_table": True,
            "mask": self.mask if self.mask in ("causal", "none") else "tree",
            "sm_scale": SCALE,
        } | self.plan

    def update(self) -> dict[str, Any]:
        """Give the arguments of `update`, the page table apart."""
        whole = self.whole()
        step = {"kv_lens": whole["kv_lens"], "qo_indptr": whole.get("qo_indptr")}
        return step | ({} if isinstance(whole["mask"], str) else {"mask": whole["mask"]})

    def of_rank(self, result: tuple[Any, Any], rank: int) -> tuple[Any, Any]:
        """Cut what a rank gets out of the whole result."""
        if self.plan.get("merge") == "all_gather":
            return result
        heads = slice(rank * self.heads, (rank + 1) * self.heads)
        return result[0][:, heads], result[1][:, heads]


def tokens_of(sharding: Sharding, rank: int, request: int, kv_len: int) -> list[int]:
    """List the tokens of a request that lie on a rank, one by one."""
    if isinstance(sharding, Interleaved):
        return [i for i in range(kv_len) if i // sharding.interleave % sharding.num_ranks == rank]
    begins = sharding.begins if sharding.begins.ndim == 1 else sharding.begins[request]
    end = kv_len if rank + 1 == sharding.num_ranks else begins[rank + 1]
    return [i for i in range(kv_len) if begins[rank] <= i < end]


def even_runs(num_ranks: int, kv_len: int) -> Contiguous:
    return Contiguous((np.arange(num_ranks) * kv_len // num_ranks).astype(np.int32))


def solve(memory: emulator.SharedMemory, rank: int, problems: list[Problem]) -> list[tuple[Any, Any]]:
    """Solve all problems as one rank."""
    communicator = memory.communicator(rank)
    results = []
    for problem in problems:
        plan = emulator.ShardedPlan(
            communicator, problem.sharding, **problem.arguments(), tiles=NARROW, num_sms=3, seed=problem.seed
        )
        local = problem.local(rank)
        plan.update(**problem.update(), block_table=local["block_table"], validate=True)
        results.append(plan.run(local["q"], local["kv_cache"]))
    return results


def run_ranks(work: Callable[..., Any], memory: emulator.SharedMemory, *arguments: Any) -> list[Any]:
    """Call ``work(memory, rank, *arguments)`` in a process for each rank, and return what they return or raise."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_call, args=(results, work, memory, rank, arguments), daemon=True)
        for rank in range(memory.num_ranks)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
    return [found[rank] for rank in range(memory.num_ranks)]


def _call(results: Any, work: Callable[..., Any], memory: emulator.SharedMemory, rank: int, arguments: Any) -> None:
    try:
        results.put((rank, work(memory, rank, *arguments)))
    except CommunicationError as error:
        results.put((rank, error))
    except Exception:  # not all can be sent
        results.put((rank, RuntimeError(traceback.format_exc())))
