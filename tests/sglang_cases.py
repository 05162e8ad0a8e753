"""Verify steps as SGLang's Triton backend hands them over, on NumPy arrays, and what they must come to."""

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mlaflash import TreeMask, emulator, oracle
from mlaflash.integrations.sglang import VerifySeam
from mlaflash.interop import dtype_name
from mlaflash.lab.compare import compare, tolerance

Array = npt.NDArray[Any]
SCALE = 0.14468
MAX_CONTEXT = 400


class EmulatorRuntime:
    """Takes the place of torch: NumPy arrays and plans of the emulator."""

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.capturing = False

    def make_plan(self, **capacity: Any) -> Any:
        self.plans.append(emulator.VerifyPlan(**capacity))
        return self.plans[-1]

    def opaque(self, function: Any) -> Any:
        return function

    def is_capturing(self) -> bool:
        return self.capturing

    def empty_lse(self, like: Any, shape: tuple[int, int]) -> Array:
        return np.full(shape, np.nan, np.float32)

    def dtype_name(self, array: Any) -> str:
        return dtype_name(array.dtype)

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)


def backend(topk: int = 1, **other: Any) -> Any:
    """Return what a seam reads of a backend."""
    attributes = {
        "forward_metadata": object(),
        "max_context_len": MAX_CONTEXT,
        "topk": topk,
        "use_mla": True,
        "use_verify_shared_kv": False,
        "use_verify_splitkv": False,
        "verify_splitkv_fwd": None,
        "dcp_size": 1,
        "enable_deterministic": False,
        "device": "cuda",
    }
    return SimpleNamespace(**(attributes | other))


def seam_of(owner: Any) -> VerifySeam:
    return VerifySeam(owner, EmulatorRuntime())


def step(
    prefix_lens: list[int],
    q_len: int,
    *,
    heads: int = 4,
    tree: Array | None = None,
    seed: int = 0,
    dtype: Any = None,
    fp8_scale: float | None = None,
) -> dict[str, Any]:
    """Return the arguments of a call, by name; `tree` holds each request's matrix of visibility."""
    dtype = ml_dtypes.bfloat16 if dtype is None else dtype
    rng = np.random.default_rng(seed)
    batch, tokens = len(prefix_lens), len(prefix_lens) * q_len
    slots = 1 + rng.permutation(sum(prefix_lens) + 50)
    pool = np.full((len(slots) + 1, 1, 576), np.nan, dtype if fp8_scale is None else ml_dtypes.float8_e4m3fn)
    pool[slots[: sum(prefix_lens)]] = rng.standard_normal((sum(prefix_lens), 1, 576)) / (fp8_scale or 1)
    k = rng.standard_normal((tokens, 1, 576)).astype(dtype)
    # As after an eager step without lengths on the host: more room than is used.
    ids = np.concatenate([slots[: sum(prefix_lens)], np.full(20, 2**40)])
    mask, mask_indptr = None, None
    if tree is not None:
        rows = [
            np.concatenate([np.ones((q_len, length), bool), own], axis=1).reshape(-1)
            for length, own in zip(prefix_lens, tree, strict=True)
        ]
        mask = np.concatenate([*rows, np.ones(7, bool)])
        mask_indptr = np.cumsum([0, *map(len, rows)])
    return {
        "q_extend": rng.standard_normal((tokens, heads, 576)).astype(dtype),
        "k_extend": k,
        "v_extend": k[..., :512].copy(),
        "o_extend": np.full((tokens, heads, 512), np.nan, dtype),
        "k_buffer": pool,
        "v_buffer": pool[..., :512],
        "qo_indptr": np.arange(batch + 1) * q_len,
        "kv_indptr": np.cumsum([0, *prefix_lens]).astype(np.int32),
        "kv_indices": ids,
        "custom_mask": mask,
        "is_causal": True,
        "mask_indptr": mask_indptr,
        "max_len_extend": q_len,
        "k_scale": fp8_scale or 1.0,
        "v_scale": fp8_scale or 1.0,
        "sm_scale": SCALE,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "sinks": None,
        "window_kv_offsets": None,
        "xai_temperature_len": -1,
        "max_bs": 8,
    }


def expected(call: dict[str, Any], mask: Any) -> tuple[Array, Array]:
    """Return what the oracle gives."""
    out, lse = oracle.mla_verify(
        call["q_extend"],
        call["k_buffer"][:, 0],
        sm_scale=call["sm_scale"],
        kv_lens=np.diff(call["kv_indptr"]) + np.int32(call["max_len_extend"]),
        kv_indptr=call["kv_indptr"],
        kv_indices=call["kv_indices"][: call["kv_indptr"][-1]],
        mask=mask,
        new_kv=call["k_extend"][:, 0],
        kv_scale=call["k_scale"],
        logit_cap=call["logit_cap"],
    )
    return np.asarray(out), np.asarray(lse)


def assert_right(seam: VerifySeam, call: dict[str, Any], mask: Any) -> None:
    out = call["o_extend"]
    lse = list(seam._plans._plans.values())[-1].lse[: len(out)]
    result = compare(out, lse, *expected(call, mask), tolerance("bfloat16", "bfloat16", partials=True))
    assert result.passed, result.reason


def trees(parents: list[list[int]]) -> tuple[Array, TreeMask]:
    """Return trees as matrices, and as a mask."""
    mask = TreeMask.from_parents(np.array(parents))
    return np.stack(mask.to_dense()), mask
