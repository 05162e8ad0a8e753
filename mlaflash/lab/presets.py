"""The named lists of problems that `check` runs, sized for where they run.

A GPU gets the context lengths of serving. The emulator runs every thread of a kernel one after the
other, so contexts there end at a few hundred tokens and lie around the edges of tiles and pages.
`MAX_EMULATOR_MACS` bounds what one kernel computes for a whole preset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mlaflash.errors import InvalidArgumentError
from mlaflash.lab.inputs import Case, MaskKind

KIMI_K2_SM_SCALE: Final = 0.14468
DEEPSEEK_V3_SM_SCALE: Final = 0.13523
MAX_EMULATOR_MACS: Final = 29_000_000

_DEVICE_KINDS = ("gpu", "emulator")


def kimi_k2_tp8(device: str) -> list[Case]:
    """Return problems of Kimi K2.x on eight GPUs: 8 heads each, drafts of 8 and 16 tokens.

    Parameters
    ----------
    device : {"gpu", "emulator"}
        Where they run.

    Returns
    -------
    list of Case
    """
    corners = _corners(heads=8, sm_scale=KIMI_K2_SM_SCALE)
    if device == "gpu":
        return _serving(heads=8, sm_scale=KIMI_K2_SM_SCALE) + corners
    return [
        _draft("bfloat16", "chain", 8, 129, heads=8, sm_scale=KIMI_K2_SM_SCALE, page_size=64),
        _draft("bfloat16", "tree", 16, 31, heads=8, sm_scale=KIMI_K2_SM_SCALE, page_size=16),
        _draft("float16", "causal", 16, 17, heads=8, sm_scale=KIMI_K2_SM_SCALE),
        _draft("float32", "causal", 8, 33, heads=8, sm_scale=KIMI_K2_SM_SCALE, page_size=16),
        _draft("float32", "causal", 1, 301, heads=8, sm_scale=KIMI_K2_SM_SCALE, page_size=64),
        *corners,
    ]


def deepseek_v3_tp8(device: str) -> list[Case]:
    """Return problems of DeepSeek-V3 on eight GPUs: 16 heads each, drafts of 8 and 16 tokens.

    Parameters
    ----------
    device : {"gpu", "emulator"}
        Where they run.

    Returns
    -------
    list of Case
    """
    corners = _corners(heads=16, sm_scale=DEEPSEEK_V3_SM_SCALE)
    if device == "gpu":
        return _serving(heads=16, sm_scale=DEEPSEEK_V3_SM_SCALE) + corners
    return [
        _draft("bfloat16", "chain", 8, 49, heads=16, sm_scale=DEEPSEEK_V3_SM_SCALE, page_size=16),
        _draft("float16", "tree", 16, 31, heads=16, sm_scale=DEEPSEEK_V3_SM_SCALE),
        _draft("float32", "causal", 8, 15, heads=16, sm_scale=DEEPSEEK_V3_SM_SCALE),
        _draft("float32", "causal", 1, 129, heads=16, sm_scale=DEEPSEEK_V3_SM_SCALE, page_size=64),
        *corners,
    ]


def quick(device: str) -> list[Case]:
    """Return a few tiny problems, for seconds on the emulator and under a memory checker.

    Parameters
    ----------
    device : {"gpu", "emulator"}
        Where they run; the problems are the same.

    Returns
    -------
    list of Case
    """
    del device
    scale = KIMI_K2_SM_SCALE
    return [
        *_corners(heads=4, sm_scale=scale),
        _draft("bfloat16", "tree", 2, 66, heads=4, sm_scale=scale, page_size=64),
        _draft("float32", "causal", 2, 18, heads=5, sm_scale=scale),
    ]


PRESETS: Final[dict[str, Callable[[str], list[Case]]]] = {
    "kimi-k2-tp8": kimi_k2_tp8,
    "deepseek-v3-tp8": deepseek_v3_tp8,
    "quick": quick,
}


def cases(preset: str, device: str) -> list[Case]:
    """Return the problems of a preset.

    Parameters
    ----------
    preset : str
        A key of `PRESETS`.
    device : {"gpu", "emulator"}
        Where they run.

    Returns
    -------
    list of Case

    Raises
    ------
    InvalidArgumentError
        There is no such preset or kind of device.
    """
    if preset not in PRESETS:
        raise InvalidArgumentError(f"preset is {preset!r}; it must be one of {', '.join(PRESETS)}.")
    if device not in _DEVICE_KINDS:
        raise InvalidArgumentError(f"device is {device!r}; it must be one of {', '.join(_DEVICE_KINDS)}.")
    return PRESETS[preset](device)


def _draft(
    dtype: str,
    mask: MaskKind,
    q_len: int,
    kv_len: int,
    *,
    heads: int,
    sm_scale: float,
    page_size: int = 1,
    id_dtype: str = "int32",
    kv_dtype: str | None = None,
) -> Case:
    """One request whose draft is a chain, a tree or plainly causal."""
    return Case(
        name=f"{mask}-q{q_len}-kv{kv_len}-h{heads}-p{page_size}-{'-'.join(filter(None, (dtype, kv_dtype)))}",
        q_lens=(q_len,),
        kv_lens=(kv_len,),
        heads=heads,
        sm_scale=sm_scale,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        mask=mask,
        id_dtype=id_dtype,
    )


def _serving(*, heads: int, sm_scale: float) -> list[Case]:
    """Drafts of 8 and 16 tokens on contexts of 4 k to 64 k, and a batch of unlike requests."""
    dtypes = ("float32", "bfloat16", "float16")
    contexts: tuple[tuple[MaskKind, int, int, int], ...] = (
        ("chain", 8, 4096, 64),
        ("tree", 16, 4101, 16),
        ("causal", 16, 16384, 1),
        ("tree", 8, 16391, 64),
    )
    longest: tuple[tuple[str, MaskKind, int], ...] = (
        ("float32", "causal", 8),
        ("bfloat16", "tree", 16),
        ("float16", "chain", 8),
    )
    drafts = [
        _draft(dtype, mask, q_len, kv_len, heads=heads, sm_scale=sm_scale, page_size=page_size)
        for dtype in dtypes
        for mask, q_len, kv_len, page_size in contexts
    ]
    drafts += [
        _draft(
            dtype,
            mask,
            q_len,
            65536,
            heads=heads,
            sm_scale=sm_scale,
            page_size=64,
            id_dtype="int64",
        )
        for dtype, mask, q_len in longest
    ]
    fp8: tuple[tuple[str, str, MaskKind, int, int, int], ...] = (
        ("float8_e4m3", "bfloat16", "chain", 1, 65536, 64),
        ("float8_e4m3", "float16", "tree", 8, 16391, 1),
        ("float8_e4m3", "bfloat16", "tree", 16, 4101, 16),
        ("fp8_ds_mla", "float16", "chain", 2, 16384, 16),
        ("fp8_ds_mla", "bfloat16", "tree", 8, 65536, 64),
    )
    drafts += [
        _draft(dtype, mask, q_len, kv_len, heads=heads, sm_scale=sm_scale, page_size=page_size, kv_dtype=kv_dtype)
        for kv_dtype, dtype, mask, q_len, kv_len, page_size in fp8
    ]
    batches = [
        Case(
            name=f"batch-tree-h{heads}-{dtype}",
            q_lens=(8, 1, 16, 0, 8, 3),
            kv_lens=(4096, 5000, 6001, 0, 63, 2),
            heads=heads,
            sm_scale=sm_scale,
            page_size=16,
            dtype=dtype,
            mask="tree",
            addressing="block_table",
        )
        for dtype in dtypes
    ]
    return drafts + batches


def _corners(*, heads: int, sm_scale: float) -> list[Case]:
    """Small problems, each about one thing that kernels get wrong."""
    return [
        Case(
            name=f"ragged-tree-empty-requests-h{heads}-float16",
            q_lens=(1, 4, 2, 0, 3),
            kv_lens=(17, 3, 0, 5, 16),
            heads=heads,
            sm_scale=sm_scale,
            dtype="float16",
            mask="tree",
            id_dtype="int64",
        ),
        Case(
            name=f"ragged-causal-block-table-h{heads}-float32",
            q_lens=(1, 2, 5),
            kv_lens=(17, 0, 3),
            heads=heads,
            sm_scale=sm_scale,
            page_size=16,
            dtype="float32",
            id_dtype="int64",
            addressing="block_table",
        ),
        Case(
            name=f"no-mask-soft-cap-page-3-h{heads}-float32",
            q_lens=(3,),
            kv_lens=(16,),
            heads=heads,
            sm_scale=sm_scale,
            page_size=3,
            dtype="float32",
            mask="none",
            logit_cap=2.5,
            paired=True,
        ),
        Case(
            name=f"new-tokens-apart-h{heads}-bfloat16",
            q_lens=(4, 4),
            kv_lens=(9, 2),
            heads=heads,
            sm_scale=sm_scale,
            page_size=2,
            dtype="bfloat16",
            mask="chain",
            paired=True,
            new_kv=True,
        ),
        Case(
            name=f"mask-sees-later-tokens-dense-cache-h{heads}-bfloat16",
            q_lens=(4, 4),
            kv_lens=(15, 4),
            heads=heads,
            sm_scale=sm_scale,
            dtype="bfloat16",
            mask="dense",
            addressing="dense",
        ),
        Case(
            name=f"tree-two-arrays-h{heads}-bfloat16-float8_e4m3",
            q_lens=(1, 3),
            kv_lens=(18, 9),
            heads=heads,
            sm_scale=sm_scale,
            page_size=16,
            kv_dtype="float8_e4m3",
            mask="tree",
            paired=True,
        ),
        Case(
            name=f"new-tokens-apart-h{heads}-bfloat16-float8_e4m3",
            q_lens=(1, 3, 2),
            kv_lens=(18, 2, 17),
            heads=heads,
            sm_scale=sm_scale,
            page_size=16,
            kv_dtype="float8_e4m3",
            mask="tree",
            paired=True,
            new_kv=True,
        ),
        Case(
            name=f"ragged-soft-cap-block-table-h{heads}-float16-fp8_ds_mla",
            q_lens=(2, 0, 3),
            kv_lens=(17, 4, 12),
            heads=heads,
            sm_scale=sm_scale,
            page_size=3,
            dtype="float16",
            kv_dtype="fp8_ds_mla",
            logit_cap=2.5,
            id_dtype="int64",
            addressing="block_table",
        ),
        Case(
            name=f"lists-h{heads}-bfloat16",
            q_lens=(3, 1),
            kv_lens=(40, 9),
            heads=heads,
            sm_scale=sm_scale,
            page_size=4,
            dtype="bfloat16",
            mask="none",
            id_dtype="int64",
            topk=18,
        ),
    ]
