"""Verify a tree of eight drafts without a GPU: the CUDA kernels themselves, run and watched on the CPU.

On NumPy arrays; needs a C++ compiler. Run it with: python examples/emulator.py
"""

import ml_dtypes
import numpy as np

import mlaflash

HEADS, PAGE_SIZE, KV_LEN = 8, 16, 100
PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3, 3])  # of each draft token; -1 is the root

rng = np.random.default_rng(0)
num_pages = -(-KV_LEN // PAGE_SIZE)
arguments = {
    "q": rng.standard_normal((len(PARENTS), HEADS, 576)).astype(ml_dtypes.bfloat16),
    "kv_cache": rng.standard_normal((num_pages, PAGE_SIZE, 576)).astype(ml_dtypes.bfloat16),
    "kv_lens": np.array([KV_LEN], np.int32),  # the draft included
    "block_table": rng.permutation(num_pages).astype(np.int32)[None],
    "sm_scale": mlaflash.yarn_sm_scale(factor=64),  # Kimi K2.x
    "mask": mlaflash.TreeMask.from_parents(PARENTS),
}

out, lse = mlaflash.emulator.mla_verify(**arguments)
expected_out, expected_lse = mlaflash.oracle.mla_verify(**arguments)

print(f"out {out.shape} {out.dtype}, lse {lse.shape} {lse.dtype}")
out_error = abs(out.astype(np.float64) - expected_out).max()
print(f"farthest from the float64 oracle: out {out_error:.5f}, lse {abs(lse - expected_lse).max():.6f}")
