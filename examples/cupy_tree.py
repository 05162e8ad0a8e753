"""Verify a tree of eight drafts on a GPU, with CuPy arrays, and hold the result against the float64 oracle.

Run it with: python examples/cupy_tree.py
"""

import cupy as cp

import mlaflash

HEADS, PAGE_SIZE, KV_LEN = 8, 64, 6000
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3]  # of each draft token; -1 is the root

num_pages = -(-KV_LEN // PAGE_SIZE)
cp.random.seed(0)
q = cp.random.standard_normal((len(PARENTS), HEADS, 576), dtype="float32").astype("bfloat16")
kv_cache = cp.random.standard_normal((num_pages, PAGE_SIZE, 576), dtype="float32").astype("bfloat16")
kv_lens = cp.array([KV_LEN], "int32")  # the draft included
block_table = cp.random.permutation(num_pages).astype("int32")[None]
mask = mlaflash.TreeMask.from_parents(cp.array(PARENTS))
sm_scale = mlaflash.yarn_sm_scale(factor=64)  # Kimi K2.x

out, lse = mlaflash.mla_verify(
    q, kv_cache, sm_scale=sm_scale, kv_lens=kv_lens, block_table=block_table, mask=mask, validate=True
)

expected_out, expected_lse = mlaflash.oracle.mla_verify(
    q.get(),
    kv_cache.get(),
    sm_scale=sm_scale,
    kv_lens=kv_lens.get(),
    block_table=block_table.get(),
    mask=mlaflash.TreeMask(mask.words.get(), mask.max_q),
)
print(f"out {out.shape} {out.dtype}, lse {lse.shape} {lse.dtype}")
out_error = abs(out.get().astype("float64") - expected_out).max()
print(f"farthest from the float64 oracle: out {out_error:.5f}, lse {abs(lse.get() - expected_lse).max():.6f}")
