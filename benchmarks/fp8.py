"""Time caches of 8 bits against one of 16 bits on one GPU, and write the table of the README.

    python benchmarks/fp8.py --out fp8.json [--every-kernel]
    python benchmarks/fp8.py --table fp8.json    # rewrites the table of the README, without a GPU

The same problems in one run: bfloat16 q, causal, shuffled pages of 64 tokens and of one, medians of CUDA events from a
cold level-2 cache, whole calls, within the limits of `--budget`. Results of the first request, in float32 and as they
are timed, are held against float64 on the same rows first.
"""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlaflash import VerifyShape, attention, cost, kv, warmup
from mlaflash.device import Device, apply_budget
from mlaflash.errors import MlaFlashError
from mlaflash.lab.timing import measure
from mlaflash.params import row_bytes

try:
    cupy: Any = importlib.import_module("cupy")
except ImportError:  # --table needs none
    cupy = None

SCALE = 0.14468
# batch, q_len, heads, kv_len
SHAPES = [
    *((1, 1, 8, 65536), (32, 1, 8, 8192), (32, 2, 8, 8192)),
    *((1, 4, 8, 65536), (32, 4, 8, 8192)),
    *((1, 8, 8, 16384), (1, 8, 8, 65536), (1, 8, 8, 200000), (32, 8, 8, 8192)),
    *((1, 64, 8, 65536), (8, 8, 64, 16384)),
]
FORMATS = ("bfloat16", "float8_e4m3", "fp8_ds_mla")
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- fp8-table -->\n", "<!-- /fp8-table -->"
PAGE_SIZES = (64, 1)
# Of bfloat16 results and of float32 ones, as a norm: rows of 8 bits meet weights in float16, others in bfloat16.
TOLERANCE = 5e-3
TOLERANCE_F32 = {"bfloat16": 5e-3, "float8_e4m3": 5e-4, "fp8_ds_mla": 5e-4}


@dataclass(frozen=True)
class Timed:
    """One format on one problem."""

    shape: tuple[int, int, int, int]
    page_size: int
    kv_dtype: str
    kernel: str
    splits: int
    us: float
    error: float
    error_f32: float
    is_chosen: bool

    @property
    def read_gb_s(self) -> float:
        batch, _, _, kv_len = self.shape
        return batch * kv_len * row_bytes(self.kv_dtype) / self.us / 1e3

    @property
    def tflop_s(self) -> float:
        batch, q_len, heads, kv_len = self.shape
        return 2 * 1088 * batch * q_len * heads * kv_len / self.us / 1e6


class Problem:
    """Arrays of one shape."""

    def __init__(self, shape: tuple[int, int, int, int], page_size: int) -> None:
        self.shape = batch, q_len, heads, kv_len = shape
        rng = cupy.random.RandomState(batch * 7919 + q_len * 31 + heads + kv_len)
        pages = -(-kv_len // page_size)
        self.page_size = page_size
        self.table = rng.permutation(batch * pages).astype("int32").reshape(batch, pages)
        self.rows = rng.standard_normal((batch * pages * page_size, 576), "float32").astype("bfloat16")
        self.q = (0.5 * rng.standard_normal((batch, q_len, heads, 576), "float32")).astype("bfloat16")

    def cache(self, kv_dtype: str) -> tuple[dict[str, Any], Any]:
        """Return the arguments about the cache, and a function from slots to the numbers of their rows."""
        if kv_dtype == "float8_e4m3":
            codes, scale = kv.quantize_e4m3(self.rows)
            given = {"kv_cache": codes, "kv_dtype": kv_dtype, "kv_scale": scale}
            return given, lambda slots: kv.dequantize_e4m3(codes[slots], scale)
        if kv_dtype == "fp8_ds_mla":
            rows = kv.quantize_ds_mla(self.rows)
            return {"kv_cache": rows}, lambda slots: kv.dequantize_ds_mla(rows[slots])
        return {"kv_cache": self.rows}, lambda slots: self.rows[slots].astype("float32")

    def expected(self, numbers: Any) -> Any:
        """Return the output of the first request in float64, head by head."""
        _, q_len, heads, kv_len = self.shape
        token = cupy.arange(kv_len)
        slots = self.table[0, token // self.page_size].astype("int64") * self.page_size + token % self.page_size
        keys = numbers(slots).astype("float64")
        hidden = token[None] > kv_len - q_len + cupy.arange(q_len)[:, None]
        out = cupy.empty((q_len, heads, 512))
        for head in range(heads):
            scores = self.q[0, :, head].astype("float64") @ keys.T * SCALE
            scores[hidden] = -cupy.inf
            weights = cupy.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights @ keys[:, :512] / weights.sum(-1, keepdims=True)
        return out


def timed(problem: Problem, kv_dtype: str, device: Device, options: argparse.Namespace) -> list[Timed]:
    batch, q_len, heads, kv_len = problem.shape
    given, numbers = problem.cache(kv_dtype)
    given |= {
        "q": problem.q,
        "sm_scale": SCALE,
        "kv_lens": cupy.full(batch, kv_len, "int32"),
        "block_table": problem.table,
        "page_size": problem.page_size,
        "max_kv_len": kv_len,
        "budget": options.budget,
    }
    limits = device if options.budget is None else apply_budget(device, options.budget)
    classes: list[Any] = [None]
    if options.every_kernel:
        classes += cost.fitting_classes(limits, kv_dtype=kv_dtype)
    expected = problem.expected(numbers)
    found = []
    for row_class in classes:
        tiles = None
        if row_class is not None:
            same = {"row_tile": row_class.config.rows, "kv_dtype": kv_dtype}
            splits = cost.choose(q_len * heads, batch, kv_len, limits, **same).num_splits
            tiles = replace(row_class.config, nsplit=splits)
        errors = []
        for out_dtype, tolerance in (("float32", TOLERANCE_F32[kv_dtype]), ("bfloat16", TOLERANCE)):
            call = attention.prepare(**given, tiles=tiles, out_dtype=out_dtype)
            call.launch()
            errors.append(float(cupy.linalg.norm(call.out[0] - expected) / cupy.linalg.norm(expected)))
            if not errors[-1] < tolerance:
                what = f"{problem.shape} {kv_dtype} {call.schedule.config}: {out_dtype}"
                raise SystemExit(f"{what} off by {errors[-1]:.3g} of its norm")
        us = measure(call.launch, device, samples=options.samples).median_us
        config = call.schedule.config
        name = f"{config.kernel} {config.rows}"
        found.append(
            Timed(
                *(problem.shape, problem.page_size, kv_dtype, name, call.schedule.num_splits, us),
                *(errors[1], errors[0], row_class is None),
            )
        )
    return found


def table(document: dict[str, Any]) -> str:
    """Return the table of what was chosen, with times over pages of one token in brackets."""
    records = [
        Timed(**{**record, "shape": tuple(record["shape"])}) for record in document["records"] if record["is_chosen"]
    ]
    worst = {name: max(one.error_f32 for one in records if one.kv_dtype == name) for name in FORMATS}
    limits = f", limits of {document['budget']}" if document["budget"] else ""
    lines = [
        f"{document['gpu']}{limits}, pages of {PAGE_SIZES[0]} tokens (in brackets: of {PAGE_SIZES[1]}); a ratio is how "
        "many times faster than bfloat16. Largest error of float32 results against float64 over the same cache, as a "
        "norm: " + ", ".join(f"{name} {error:.1e}" for name, error in worst.items()) + ".",
        "",
        "| B, q, H, kv | rows | bfloat16, us | " + "".join(f"{name}, us | GB/s | ratio | " for name in FORMATS[1:]),
        "|" + "---|" * (3 + 3 * len(FORMATS[1:])),
    ]
    lines[-2] = lines[-2].rstrip()
    of = {(one.shape, one.page_size, one.kv_dtype): one for one in records}
    for shape in dict.fromkeys(one.shape for one in records):
        cells = [", ".join(map(str, shape)), str(shape[1] * shape[2])]
        plain = [of[shape, page, FORMATS[0]] for page in PAGE_SIZES]
        cells.append(f"{plain[0].us:,.1f} ({plain[1].us:,.1f}), {plain[0].kernel}")
        for name in FORMATS[1:]:
            one = [of[shape, page, name] for page in PAGE_SIZES]
            cells += [f"{one[0].us:,.1f} ({one[1].us:,.1f}), {one[0].kernel}", f"{one[0].read_gb_s:,.0f}"]
            cells.append(f"**{plain[0].us / one[0].us:.2f}x** ({plain[1].us / one[1].us:.2f}x)")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    parser.add_argument("--budget", default="sm_120", help="limits that are kept; 'none' is the GPU's own")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--every-kernel", action="store_true", help="also time what the model did not choose")
    parser.add_argument("--table", type=Path, help="only write the table of the README, from this JSON file")
    options = parser.parse_args()
    if options.table is not None:
        text = README.read_text()
        head, rest = text.split(BEGIN)
        README.write_text(head + BEGIN + table(json.loads(options.table.read_text())) + END + rest.split(END)[1])
        return
    options.budget = None if options.budget == "none" else options.budget
    try:
        device = Device.current()
    except MlaFlashError as error:
        raise SystemExit(str(error)) from None
    sizes = ("batch", "q_len", "num_heads", "kv_len")
    shapes = [
        VerifyShape(**dict(zip(sizes, shape, strict=True)), page_size=page_size, kv_dtype=name, out_dtype=out)
        for shape in SHAPES
        for page_size in PAGE_SIZES
        for name in FORMATS
        for out in ("bfloat16", "float32")
    ]
    warmup(shapes, budget=options.budget)  # compiles side by side
    records: list[Timed] = []
    for shape in SHAPES:
        for page_size in PAGE_SIZES:
            problem = Problem(shape, page_size)
            records += [one for name in FORMATS for one in timed(problem, name, device, options)]
            del problem
            cupy.get_default_memory_pool().free_all_blocks()
    document = {"gpu": device.name, "budget": options.budget, "records": [vars(one) for one in records]}
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1))
    if options.every_kernel:
        for one in records:
            print(f"{one.shape!s:>22} {one.kv_dtype:<12} {one.kernel:<14} {one.splits:>4} {one.us:8.1f} us")
    print(table(document))


if __name__ == "__main__":
    main()
