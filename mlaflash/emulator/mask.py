"""The kernel that packs masks, on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlaflash.checks import integer
from mlaflash.emulator.run import Report, run_kernel
from mlaflash.interop import numpy_view, require_apart
from mlaflash.mask_formats import words_per_row
from mlaflash.mask_pack import build
from mlaflash.mask_source import MaskSource
from mlaflash.masks import TreeMask


def pack_mask(
    source: MaskSource,
    num_tokens: int,
    max_q: int,
    *,
    qo_indptr: Any = None,
    words: Any = None,
    seed: int = 0,
    reports: list[Report] | None = None,
) -> TreeMask:
    """Run `mlaflash.pack_mask` on NumPy arrays: the same kernel, checked at every access, slowly.

    Parameters
    ----------
    source, num_tokens, max_q, qo_indptr, words
        As in `mlaflash.pack_mask`.
    seed : int
        Of the order in which threads take their turns.
    reports : list, optional
        The `Report` of the launch is appended.

    Returns
    -------
    TreeMask

    Raises
    ------
    EmulatorError
        The kernel did something that is wrong on a GPU.
    MlaFlashError
        As in `mlaflash.pack_mask`; there is no GPU to miss.
    """
    if words is None:
        # Ones: what the kernel forgets to write cannot pass for a result.
        shape = integer("num_tokens", num_tokens, 0), words_per_row(integer("max_q", max_q, 0))
        words = np.full(shape, 2**32 - 1, np.uint32)
    packing = build(numpy_view, source, words, num_tokens, max_q, qo_indptr=qo_indptr)
    require_apart([packing.words], packing.arrays.values())
    if not packing.is_empty:
        step = packing.launch
        arrays = {name: view.array for name, view in packing.arrays.items()} | {"result": words}
        report = run_kernel(
            step.kernel, step.defines, step.grid, step.block, step.shared_bytes, packing.params, arrays, seed=seed
        )
        if reports is not None:
            reports.append(report)
    return TreeMask(words, max_q)
