"""Problems that every kernel must solve, shared by the tests on the emulator and on a GPU."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlaflash import oracle
from mlaflash.lab.compare import compare, tolerance
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.target import call_name
from mlaflash.mma_tiles import NARROW, NARROW_32, ROWS_32, ROWS_64, ROWS_64_ROLES, MmaWideConfig
from mlaflash.schedule import MMA_KERNELS
from mlaflash.tiles import KernelConfig, NaiveConfig, TileConfig

SCALE = 0.14468

BASE = Case(name="base", q_lens=(3, 5), kv_lens=(37, 70), heads=8, sm_scale=SCALE, page_size=16, dtype="float32")

# Named after the reports that they come from, where there is one.
CASES = [
    replace(BASE, name="a1-q-longer-than-kv", q_lens=(9, 4), kv_lens=(4, 4)),
    replace(BASE, name="a2-empty-request", q_lens=(2, 3, 2), kv_lens=(20, 0, 17)),
    replace(BASE, name="a8-zero-length-between", q_lens=(2, 0, 1), kv_lens=(19, 0, 33)),
    replace(BASE, name="c3-eight-tokens-own-masks", q_lens=(8,), kv_lens=(24,), mask="tree"),
    replace(BASE, name="c4-block-table", q_lens=(4, 4), kv_lens=(40, 9), addressing="block_table"),
    replace(BASE, name="c7-ragged", q_lens=(1, 4, 2), kv_lens=(33, 21, 5)),
    *(replace(BASE, name=f"c8-heads-{h}", heads=h, q_lens=(2,), kv_lens=(35,)) for h in (1, 4, 5, 10, 12, 16, 20, 96)),
    replace(BASE, name="c10-zero-scale", sm_scale=0.0),
    replace(BASE, name="c10-negative-scale", sm_scale=-SCALE, mask="tree"),
    replace(BASE, name="c12-long-prefix", q_lens=(1,), kv_lens=(300,)),
    replace(BASE, name="c13-soft-cap", logit_cap=30.0),
    replace(BASE, name="c13-tight-soft-cap", logit_cap=0.5, mask="tree", dtype="bfloat16"),
    replace(BASE, name="d1-later-columns", q_lens=(7, 12), kv_lens=(30, 50), mask="dense"),
    replace(BASE, name="none", mask="none"),
    replace(BASE, name="wide-tree", q_lens=(70,), kv_lens=(90,), heads=1, mask="tree", dtype="bfloat16"),
    replace(BASE, name="dense-cache", addressing="dense", mask="tree", dtype="float16"),
    replace(BASE, name="pairs", paired=True, dtype="bfloat16", id_dtype="int64"),
    replace(BASE, name="new-kv", new_kv=True, mask="tree", dtype="bfloat16"),
    replace(BASE, name="new-kv-short", new_kv=True, q_lens=(6, 3), kv_lens=(2, 3)),
    replace(BASE, name="new-kv-pairs", new_kv=True, paired=True, q_lens=(1, 3), kv_lens=(1, 50), dtype="float16"),
    *(
        replace(BASE, name=f"e9-page-{size}", page_size=size, id_dtype=ids, dtype="bfloat16")
        for size, ids in ((1, "int32"), (16, "int64"), (32, "int32"), (48, "int64"), (64, "int32"))
    ),
]


LISTS = Case(
    name="lists",
    q_lens=(3, 2),
    kv_lens=(60, 45),
    heads=8,
    sm_scale=SCALE,
    dtype="bfloat16",
    mask="none",
    topk=75,
)

SPARSE_CASES = [
    *(replace(LISTS, name=f"heads-{h}", heads=h) for h in (1, 5, 8, 16, 64, 128)),
    *(replace(LISTS, name=f"topk-{k}", topk=k) for k in (1, 15, 16, 17, 64)),
    replace(LISTS, name="float32", dtype="float32"),
    replace(LISTS, name="float16-int64", dtype="float16", id_dtype="int64", heads=20),
    replace(LISTS, name="pairs-int64", paired=True, id_dtype="int64", page_size=48),
    replace(LISTS, name="pages", page_size=16, heads=40),
    replace(LISTS, name="empty-request", q_lens=(2, 2), kv_lens=(0, 30)),
    replace(LISTS, name="soft-cap", logit_cap=2.5),
    replace(LISTS, name="negative-scale", sm_scale=-SCALE, topk=50),
    replace(LISTS, name="zero-scale", sm_scale=0.0, topk=50),
]


def run_and_compare(run: Any, case: Case, config: KernelConfig, seed: int, **extra: Any) -> None:
    """Hold `run(**arguments)` against the oracle on the case, in bfloat16 where the kernel takes no float32."""
    if case.dtype == "float32" and config.kernel in MMA_KERNELS:
        case = replace(case, dtype="bfloat16")
    arguments = build(case, seed)
    expected_out, expected_lse = getattr(oracle, call_name(arguments))(**arguments)
    out, lse = run(**arguments, **extra, kernel=config.kernel, tiles=config, validate=True)
    result = compare(out, lse, expected_out, expected_lse, tolerance(case.dtype, case.dtype))
    assert result.passed, (
        f"{case.name} {config}: {result.reason}; {result.worst_array}{list(result.worst_index)} is "
        f"{result.worst_actual}, expected {result.worst_expected}"
    )


WIDE_PAIR = MmaWideConfig(row_groups=2, column_warps=2, refill_at=5, nsplit=2)  # four warps a block


def configs() -> Iterator[KernelConfig]:
    """One configuration of each kernel and path: direct and split output, heads that HT does not divide."""
    yield NaiveConfig()
    yield TileConfig(nsplit=1)
    yield TileConfig(nsplit=5)


def mma_configs(kernels: Sequence[str] = MMA_KERNELS) -> Iterator[KernelConfig]:
    """Return what the cost model chooses from, direct and split."""
    for config in (NARROW, NARROW_32, ROWS_32, ROWS_64, ROWS_64_ROLES):
        if config.kernel in kernels:
            yield replace(config, nsplit=1)
            yield replace(config, nsplit=3)


def list_configs() -> Iterator[KernelConfig]:
    """Return those of them that attend over lists of slots."""
    yield from (c for c in mma_configs(("mma_narrow", "mma_wide")) if getattr(c, "row_tiles", 1) == 1)


def config_id(config: KernelConfig) -> str:
    return "-".join([config.kernel, *(f"{k}{v}" for k, v in config.as_dict().items())])


def assert_same(left: tuple[Any, Any], right: tuple[Any, Any]) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
