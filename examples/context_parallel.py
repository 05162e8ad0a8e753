"""Verify a tree over a cache whose tokens are spread over ranks, and hold each rank's heads against the oracle.

One process a GPU, joined by NCCL; without a GPU two processes of the emulator, joined by shared memory. Run it with:
python examples/context_parallel.py
"""

import ml_dtypes
import numpy as np

import mlaflash
from mlaflash import distributed, emulator
from mlaflash.device import device_count, gpu_available
from mlaflash.lab.ranks import free_address, run_ranks

HEADS, PAGE_SIZE, KV_LEN, SM_SCALE = 4, 16, 200, 0.14468  # heads of one rank; tokens of all
PARENTS = np.array([[-1, 0, 0, 1, 1, 2, 3, 3]])

rng = np.random.default_rng(0)
TOKENS = rng.standard_normal((KV_LEN, 576)).astype(ml_dtypes.bfloat16)


def queries(num_ranks: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (0.3 * rng.standard_normal((PARENTS.size, num_ranks * HEADS, 576))).astype(ml_dtypes.bfloat16)


def verify(rank: int, num_ranks: int, address: tuple[str, int], memory: emulator.SharedMemory | None) -> float:
    """Do the step as one rank; return how far its heads are from the oracle's."""
    sharding = distributed.Interleaved(num_ranks, PAGE_SIZE)
    mine = TOKENS[np.arange(KV_LEN) // PAGE_SIZE % num_ranks == rank]
    pages = np.zeros((-(-len(mine) // PAGE_SIZE), PAGE_SIZE, 576), TOKENS.dtype)
    pages.reshape(-1, 576)[: len(mine)] = mine
    heads = slice(rank * HEADS, (rank + 1) * HEADS)
    arrays = {
        "q": np.ascontiguousarray(queries(num_ranks)[:, heads]),
        "kv_cache": pages,
        "kv_lens": np.array([KV_LEN], np.int32),  # of all ranks
        "block_table": np.arange(len(pages), dtype=np.int32)[None],  # of this one
        "parents": PARENTS.astype(np.int32),
    }
    plan_class = distributed.ShardedPlan
    if memory is None:
        import cupy as cp

        cp.cuda.Device(rank).use()
        arrays = {name: cp.asarray(array) for name, array in arrays.items()}
        communicator = distributed.NcclCommunicator(num_ranks, rank, address)
    else:
        plan_class, communicator = emulator.ShardedPlan, memory.communicator(rank)
    plan = plan_class(
        communicator,
        sharding,
        num_heads=HEADS,
        max_batch=1,
        max_q_len=PARENTS.size,
        max_kv_len=KV_LEN,
        page_size=PAGE_SIZE,
        block_table=True,
        mask="tree",
        sm_scale=SM_SCALE,
    )
    tree = mlaflash.MaskSource.from_parents(arrays["parents"])
    plan.update(kv_lens=arrays["kv_lens"], block_table=arrays["block_table"], mask=tree)
    out, _ = plan.run(arrays["q"], arrays["kv_cache"])
    if memory is None:
        communicator.synchronize()
        out = out.get()
        communicator.close()
    expected, _ = mlaflash.oracle.mla_verify(
        queries(num_ranks),
        TOKENS[None],
        kv_lens=np.array([KV_LEN], np.int32),
        sm_scale=SM_SCALE,
        mask=mlaflash.TreeMask.from_parents(PARENTS),
    )
    return float(abs(out.astype(np.float64) - expected[:, heads]).max())


def main() -> None:
    gpus = device_count() if gpu_available() else 0
    num_ranks = gpus or 2
    memory = None if gpus else emulator.SharedMemory(num_ranks, 1 << 20)
    errors = run_ranks(verify, num_ranks, num_ranks, free_address(), memory, timeout=120)
    for rank, error in enumerate(errors):
        print(f"rank {rank} of {num_ranks} on {'a GPU' if gpus else 'the emulator'}: from the oracle {error:.5f}")


if __name__ == "__main__":
    main()
