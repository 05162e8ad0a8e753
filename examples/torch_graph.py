"""Verify trees of drafts on torch tensors inside a CUDA graph, and replay it with new lengths, pages and trees.

A graph reads its inputs again at each replay: write the new values into the same tensors. `max_kv_len` is the longest
context that the graph shall serve, for the split of the work is chosen when it is captured. Run it with:
python examples/torch_graph.py
"""

import cupy as cp
import ml_dtypes
import numpy as np
import torch

import mlaflash

BATCH, HEADS, DRAFTS, PAGE_SIZE, MAX_KV_LEN = 2, 8, 8, 64, 8192
SM_SCALE = 0.14468  # Kimi K2.x
CHAIN = [-1, 0, 1, 2, 3, 4, 5, 6]
TREE = [-1, 0, 0, 1, 1, 2, 3, 3]

gpu = torch.device("cuda")
torch.manual_seed(0)
pages_per_request = MAX_KV_LEN // PAGE_SIZE
q = torch.randn(BATCH * DRAFTS, HEADS, 576, dtype=torch.bfloat16, device=gpu)
kv_cache = torch.randn(BATCH * pages_per_request, PAGE_SIZE, 576, dtype=torch.bfloat16, device=gpu)
kv_lens = torch.tensor([100, 200], dtype=torch.int32, device=gpu)
block_table = torch.randperm(BATCH * pages_per_request, device=gpu).to(torch.int32).view(BATCH, -1)
words = torch.zeros(BATCH * DRAFTS, 1, dtype=torch.int32, device=gpu)
out = torch.empty(BATCH * DRAFTS, HEADS, 512, dtype=torch.bfloat16, device=gpu)
lse = torch.empty(BATCH * DRAFTS, HEADS, dtype=torch.float32, device=gpu)
# The mask keeps the words that it is given: the tensor's own memory.
mask = mlaflash.TreeMask.from_packed(cp.from_dlpack(words), DRAFTS)


def pack(*parents: list[int]) -> np.ndarray:
    return mlaflash.TreeMask.from_parents(np.array(parents)).words


def verify() -> None:
    mlaflash.mla_verify(
        q, kv_cache, sm_scale=SM_SCALE, kv_lens=kv_lens, block_table=block_table, mask=mask, out=out, lse=lse
    )


def worst_error() -> float:
    expected, _ = mlaflash.oracle.mla_verify(
        *(to_numpy(tensor) for tensor in (q, kv_cache)),
        sm_scale=SM_SCALE,
        kv_lens=kv_lens.cpu().numpy(),
        block_table=block_table.cpu().numpy(),
        mask=mlaflash.TreeMask.from_packed(words.cpu().numpy(), DRAFTS),
    )
    return float(abs(out.double().cpu().numpy() - expected).max())


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)


words.copy_(torch.from_numpy(pack(CHAIN, CHAIN).view(np.int32)))
verify()  # outside the graph once: compiles and loads the kernels
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    verify()

for lengths, trees in (([100, 200], (CHAIN, CHAIN)), ([MAX_KV_LEN, 3000], (TREE, CHAIN)), ([9, 5000], (TREE, TREE))):
    q.normal_()
    kv_lens.copy_(torch.tensor(lengths))
    words.copy_(torch.from_numpy(pack(*trees).view(np.int32)))
    out.zero_()
    graph.replay()
    print(f"kv_lens {lengths}: farthest from the float64 oracle {worst_error():.5f}")
