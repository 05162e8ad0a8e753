"""Problems for several ranks, what each rank has of them, and how ranks of the emulator solve them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlaflash import emulator, oracle
from mlaflash.distributed import Contiguous, Interleaved
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
            kv_dtype=self.plan.get("kv_dtype"),
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
        pool = whole["kv_cache"].reshape(-1, whole["kv_cache"].shape[-1])
        nan = np.nan if pool.itemsize > 1 else 0xFF
        cache = np.full((len(self.kv_lens) * width + 1, self.page_size, pool.shape[1]), nan, pool.dtype)
        table = np.full((len(self.kv_lens), width), NAN_ID, np.int32)
        free = rng.permutation(len(cache)).astype(np.int32).tolist()
        for b, kv_len in enumerate(self.kv_lens):
            rows = pool[ids[bounds[b] : bounds[b] + kv_len]]
            rows = rows[tokens_of(self.sharding, rank, b, kv_len)]
            for page in range(-(-len(rows) // self.page_size)):
                table[b, page] = free.pop()
                piece = rows[page * self.page_size : (page + 1) * self.page_size]
                cache[table[b, page], : len(piece)] = piece
        heads = slice(rank * self.heads, (rank + 1) * self.heads)
        return {"q": whole["q"][:, heads], "kv_cache": cache, "block_table": table}

    def scale(self, rank: int) -> Any:
        """Give the scale of one rank's cache: a number for even ranks, an array for odd ones."""
        scale = self.whole().get("kv_scale", 1.0)
        return np.array([scale], np.float32) if rank % 2 and scale != 1 else scale

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


def solve(rank: int, memory: emulator.SharedMemory, problems: list[Problem]) -> list[tuple[Any, Any]]:
    """Solve all problems as one rank of the emulator."""
    communicator = memory.communicator(rank)
    results = []
    for problem in problems:
        plan = emulator.ShardedPlan(
            communicator, problem.sharding, **problem.arguments(), tiles=NARROW, num_sms=3, seed=problem.seed
        )
        local = problem.local(rank)
        plan.update(**problem.update(), block_table=local["block_table"], validate=True)
        results.append(plan.run(local["q"], local["kv_cache"], kv_scale=problem.scale(rank)))
    return results


def every_split(kv_len: int, q_len: int) -> dict[str, Any]:
    """Give a batch of equal requests: request b has its first b tokens on rank 0, so that some are cut in the draft."""
    begins = np.stack([np.zeros(kv_len + 1), np.arange(kv_len + 1)], axis=1).astype(np.int32)
    return {"sharding": Contiguous(begins), "q_lens": (q_len,) * (kv_len + 1), "kv_lens": (kv_len,) * (kv_len + 1)}


RAGGED: dict[str, Any] = {"q_lens": (7, 1, 0, 5, 3), "kv_lens": (61, 17, 33, 3, 0)}
TWO = {
    "every split of a chain": Problem(**every_split(21, 6)),
    "every split of a tree": Problem(**every_split(21, 6), mask="tree", seed=1),
    "interleaved tokens": Problem(Interleaved(2), **RAGGED),
    "interleaved pages, tree": Problem(Interleaved(2, 4), **RAGGED, mask="tree", page_size=4),
    "decode": Problem(Interleaved(2, 16), (1, 1), (40, 16), page_size=16),
    "no mask": Problem(Interleaved(2, 3), **RAGGED, mask="none"),
    "an empty shard": Problem(Contiguous(np.array([0, 1000], np.int32)), **RAGGED, mask="tree"),
    "all heads everywhere": Problem(Interleaved(2), **RAGGED, mask="tree", plan={"merge": "all_gather"}),
    "groups of heads": Problem(Interleaved(2), **RAGGED, plan={"head_groups": 2}),
    "float32 partials in base 2": Problem(
        Interleaved(2, 2), **RAGGED, plan={"partial_dtype": "float32", "out_dtype": "float32", "lse_base": "2"}
    ),
    "8 bits with a scale": Problem(Interleaved(2, 4), **RAGGED, page_size=4, plan={"kv_dtype": "float8_e4m3"}),
    "8 bits with scales in the rows": Problem(Interleaved(2), **RAGGED, mask="tree", plan={"kv_dtype": "fp8_ds_mla"}),
}
THREE = {
    "interleaved chain": Problem(Interleaved(3, 2), **RAGGED, heads=1),
    "runs, tree": Problem(even_runs(3, 61), **RAGGED, heads=1, mask="tree", seed=5),
}
