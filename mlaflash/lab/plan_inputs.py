"""Random problems that `VerifyPlan` and `mla_verify` must solve alike, on the emulator and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlaflash.lab.compare import Comparison, compare, tolerance, tolerance_of_few
from mlaflash.lab.inputs import Case, build
from mlaflash.lab.mask_inputs import NAMES, Array, Batch, Encoded, encode, widened
from mlaflash.mask_source import MaskSource
from mlaflash.masks import TreeMask
from mlaflash.mma_tiles import (
    NARROW,
    NARROW_32,
    NARROW_32_E4M3,
    NARROW_DS_MLA,
    NARROW_E4M3,
    NARROW_PAIR,
    ROLES_32_E4M3,
    ROLES_E4M3,
    ROWS_32,
    ROWS_64,
    ROWS_64_ROLES,
    MmaKernelConfig,
)

HEADS = (1, 4, 5, 8, 12, 16, 20, 64)
Q_LENS = (0, 1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65)
PAGE_SIZES = (1, 3, 16, 64)
KV_EDGES = (0, 1, *(edge + step for edge in (16, 32, 48, 64, 96, 128, 256) for step in (-1, 0, 1)))
SCALES = (0.14468, -0.13523, 0.0)
MAX_BATCH = 6
FORMATS = (*NAMES, "sglang_bitpacking", "tree_mask")

TILES = {
    "NARROW": NARROW,
    "NARROW_PAIR": NARROW_PAIR,
    "NARROW_32": NARROW_32,
    "ROWS_32": ROWS_32,
    "ROWS_64": ROWS_64,
    "ROWS_64_ROLES": ROWS_64_ROLES,
}

Map = Callable[[Any], Any]


@dataclass(frozen=True)
class Build:
    """What decides which kernels are compiled: a few of these, so that random problems need no more than they do."""

    tiles: MmaKernelConfig
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    logit_cap: float = 0.0
    new_kv: bool = False
    split_kv: bool = False
    kv_dtype: str | None = None


BUILDS = (
    Build(NARROW),
    Build(NARROW_PAIR, "float16", "float32", new_kv=True),
    Build(NARROW_32, "float16", "float32", new_kv=True),
    Build(ROWS_32, "float16", "float16", logit_cap=3.0, split_kv=True),
    Build(ROWS_32, "bfloat16", "float32", new_kv=True, split_kv=True),
    Build(ROWS_64),
    Build(ROWS_64_ROLES),
    Build(ROWS_64, "float16", "float16", new_kv=True),
    Build(ROWS_64_ROLES, "float16", "float32", logit_cap=30.0, new_kv=True, split_kv=True),
)
FP8_BUILDS = (
    Build(NARROW_E4M3, kv_dtype="float8_e4m3"),
    Build(NARROW_32_E4M3, "float16", "float16", kv_dtype="float8_e4m3", new_kv=True),
    Build(NARROW_DS_MLA, kv_dtype="fp8_ds_mla"),
    Build(NARROW_DS_MLA, "float16", "float32", kv_dtype="fp8_ds_mla", new_kv=True),
    Build(ROLES_32_E4M3, "float16", "float16", kv_dtype="float8_e4m3", logit_cap=3.0),
    Build(ROLES_E4M3, "bfloat16", "float32", kv_dtype="float8_e4m3", split_kv=True),
)


@dataclass(frozen=True)
class Setup:
    """What a plan is made for."""

    build: Build
    heads: int
    page_size: int
    id_dtype: str
    mask: str
    block_table: bool
    sm_scale: float
    max_kv_len: int

    def arguments(self) -> dict[str, Any]:
        """Give the arguments of `VerifyPlan`."""
        build = self.build
        return {
            "num_heads": self.heads,
            "max_batch": MAX_BATCH,
            "max_q_len": max(Q_LENS),
            "max_kv_len": self.max_kv_len,
            "max_ids": MAX_BATCH * (-(-self.max_kv_len // self.page_size) + 1) + 1,
            "page_size": self.page_size,
            "id_dtype": self.id_dtype,
            "sm_scale": self.sm_scale,
            "mask": self.mask,
            "block_table": self.block_table,
            "q_dtype": build.dtype,
            "kv_dtype": build.kv_dtype,
            "out_dtype": build.out_dtype,
            "logit_cap": build.logit_cap,
            "new_kv": build.new_kv,
            "split_kv": build.split_kv,
            "tiles": build.tiles,
        }


@dataclass(frozen=True)
class Step:
    """A batch: the arguments of `mla_verify`, and the same mask as an engine may hold it."""

    arguments: dict[str, Any]
    source: Encoded | None = None

    def update(self, to: Map = lambda array: array) -> dict[str, Any]:
        """Give the arguments of `VerifyPlan.update`, with each array as `to` makes it."""
        names = ("kv_lens", "qo_indptr", "kv_indptr", "kv_indices", "block_table", "tail_lens")
        given = {name: to(self.arguments[name]) for name in names if self.arguments.get(name) is not None}
        mask = self.arguments["mask"]
        if self.source is not None:
            given["mask"] = self.source.make(**{name: to(array) for name, array in self.source.arrays.items()})
        elif isinstance(mask, TreeMask):
            given["mask"] = TreeMask(to(mask.words), mask.max_q)
        return given

    def run(self, to: Map = lambda array: array) -> dict[str, Any]:
        """Give the arguments of `VerifyPlan.run`."""
        return {
            name: tuple(map(to, array)) if isinstance(array, tuple) else to(array)
            for name in ("q", "kv_cache", "new_kv", "kv_scale")
            if (array := self.arguments.get(name)) is not None
        }


def plan_arguments(case: Case, **extra: Any) -> dict[str, Any]:
    """Give the arguments of a `VerifyPlan` that a case fits exactly."""
    return {
        "num_heads": case.heads,
        "max_batch": case.batch,
        "max_q_len": max(1, *case.q_lens),
        "max_kv_len": max(1, *case.kv_lens),
        "max_ids": sum(-(-kv_len // case.page_size) + 1 for kv_len in case.kv_lens) + 1,
        "page_size": case.page_size,
        "id_dtype": case.id_dtype,
        "sm_scale": case.sm_scale,
        "mask": case.mask if case.mask in ("causal", "none") else "tree",
        "block_table": case.addressing == "block_table",
        "q_dtype": case.dtype,
        "logit_cap": case.logit_cap,
        "new_kv": case.new_kv,
        "split_kv": case.is_split_kv,
    } | extra


def judge(result: tuple[Any, Any], expected: tuple[Any, Any], dtype: str) -> Comparison:
    """Hold a result in NumPy against the oracle's; `dtype` is q's."""
    limits = tolerance(dtype, result[0].dtype.name, partials=True)
    return compare(*result, *expected, tolerance_of_few(limits, expected[0]))


def random_setup(rng: np.random.Generator, builds: Sequence[Build] = BUILDS, *, longest: int = 600) -> Setup:
    """Draw what a plan is made for, requests of `longest` tokens at most."""
    return Setup(
        build=builds[int(rng.integers(len(builds)))],
        heads=int(rng.choice(HEADS)),
        page_size=int(rng.choice(PAGE_SIZES)),
        id_dtype=str(rng.choice(("int32", "int64"))),
        mask=str(rng.choice(("causal", "none", "tree", "tree", "tree"))),
        block_table=bool(rng.integers(2)),
        sm_scale=float(rng.choice(SCALES, p=(0.8, 0.15, 0.05))),
        max_kv_len=longest,
    )


def random_step(rng: np.random.Generator, setup: Setup, *, pairs: int = 150_000) -> Step:
    """Draw a batch for a plan, of at most about `pairs` pairs of a row and a token; poison as in `lab.inputs`."""
    lens = _lengths(rng, setup, pairs)
    case = Case(
        name="random",
        q_lens=tuple(q_len for q_len, _ in lens),
        kv_lens=tuple(kv_len for _, kv_len in lens),
        heads=setup.heads,
        sm_scale=setup.sm_scale,
        page_size=setup.page_size,
        dtype=setup.build.dtype,
        kv_dtype=setup.build.kv_dtype,
        logit_cap=setup.build.logit_cap,
        id_dtype=setup.id_dtype,
        addressing="block_table" if setup.block_table else "indices",
        paired=setup.build.split_kv,
        new_kv=setup.build.new_kv,
    )
    arguments = build(case, int(rng.integers(2**32)))
    _share_pages(rng, case, arguments)
    arguments["mask"], source = setup.mask, None
    if setup.mask == "tree":
        arguments["mask"], source = _mask(rng, case)
        if rng.random() < 0.2:
            tails = rng.integers(0, arguments["mask"].max_q + 1, case.batch)
            arguments["tail_lens"] = tails.astype(np.int32)
    if rng.random() < 0.2:
        _pad(arguments, int(rng.integers(1, 20)))
    return Step(arguments, source)


def _lengths(rng: np.random.Generator, setup: Setup, pairs: int) -> list[tuple[int, int]]:
    lens = []
    for _ in range(int(rng.integers(1, MAX_BATCH + 1))):
        q_len, kind = int(rng.choice(Q_LENS)), rng.random()
        if kind < 0.5:
            kv_len = int(rng.choice(KV_EDGES))
        else:
            kv_len = int(rng.integers(0, min(setup.max_kv_len, 600 if kind < 0.97 else 2**31) + 1))
        while q_len * kv_len * setup.heads > pairs:
            if q_len * setup.heads > kv_len:
                q_len //= 2
            else:
                kv_len //= 2
        pairs -= q_len * kv_len * setup.heads
        lens.append((q_len, min(kv_len, setup.max_kv_len)))
    return lens


def _share_pages(rng: np.random.Generator, case: Case, arguments: dict[str, Any]) -> None:
    """Let the second request begin with pages of the first, as after one prompt."""
    if case.batch < 2 or rng.random() < 0.5:
        return
    full = [(kv_len - (q_len if case.new_kv else 0)) // case.page_size for q_len, kv_len in
            zip(case.q_lens[:2], case.kv_lens[:2], strict=True)]  # fmt: skip
    shared = max(min(full), 0)
    if "block_table" in arguments:
        arguments["block_table"][1, :shared] = arguments["block_table"][0, :shared]
    else:
        ids, begin = arguments["kv_indices"], arguments["kv_indptr"][1]
        ids[begin : begin + shared] = ids[:shared]


def _mask(rng: np.random.Generator, case: Case) -> tuple[TreeMask, Encoded | None]:
    prefix_lens = tuple(max(kv - q, 0) for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    batch = Batch(case.q_lens, prefix_lens, int(rng.integers(2**32)))
    longest = max(case.q_lens)
    name = str(rng.choice(FORMATS))
    if name == "tree_mask" or (name == "sglang_bitpacking" and longest > 32):
        return TreeMask.from_dense(batch.dense()), None
    if name == "sglang_bitpacking":
        return bitpacked(batch).expected, bitpacked(batch)
    source = encode(name, batch, longest, wide=bool(rng.integers(2)))
    if source.expected.max_q != longest:  # of no request
        source = replace(source, expected=TreeMask(widened(source.expected, case.num_tokens, longest), longest))
    return source.expected, source


def bitpacked(batch: Batch) -> Encoded:
    """Write a batch in SGLang's packed rows."""
    expected = TreeMask.from_dense(batch.dense())
    items = expected.words[:, 0].copy() if expected.max_q else np.zeros(0, np.uint32)

    def make(mask: Any) -> MaskSource:
        return MaskSource.from_sglang(mask, mode="qlen_only_bitpacking")

    return Encoded({"mask": items}, make, expected)


def _pad(arguments: dict[str, Any], rows: int) -> None:
    """Add rows of NaN behind the last request."""

    def padded(array: Array) -> Array:
        return np.concatenate([array, np.full((rows, *array.shape[1:]), np.nan, array.dtype)])

    for name in ("q", "new_kv"):
        given = arguments.get(name)
        if given is not None:
            arguments[name] = tuple(map(padded, given)) if isinstance(given, tuple) else padded(given)
    mask = arguments["mask"]
    if isinstance(mask, TreeMask):
        arguments["mask"] = TreeMask(widened(mask, mask.num_tokens + rows, mask.max_q), mask.max_q)
