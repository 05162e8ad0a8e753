"""Time caches of 8 bits against one of 16 bits on one GPU, and write the table of the README.

    python benchmarks/fp8.py [--out fp8.json] [--update-readme] [--every-kernel]

The same problems in one run: bfloat16 q, causal, shuffled pages, medians of CUDA events from a cold level-2 cache,
whole calls, within the limits of `--budget`. Results of the first request are held against float64 on the same rows
first.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cupy

from mlaflash import VerifyShape, attention, cost, kv, warmup
from mlaflash.device import Device, apply_budget
from mlaflash.errors import MlaFlashError
from mlaflash.lab.timing import measure
from mlaflash.params import row_bytes

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
TOLERANCE = 5e-3  # of bfloat16 results, as a norm


@dataclass(frozen=True)
class Timed:
    """One format on one problem."""

    shape: tuple[int, int, int, int]
    kv_dtype: str
    kernel: str
    splits: int
    us: float
    error: float
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
        classes += cost.fitting_classes(limits, page_size=problem.page_size, kv_dtype=kv_dtype)
    expected = problem.expected(numbers)
    found = []
    for row_class in classes:
        tiles = None
        if row_class is not None:
            same = {"row_tile": row_class.config.rows, "page_size": problem.page_size, "kv_dtype": kv_dtype}
            splits = cost.choose(q_len * heads, batch, kv_len, limits, **same).num_splits
            tiles = replace(row_class.config, nsplit=splits)
        call = attention.prepare(**given, tiles=tiles)
        call.launch()
        error = cupy.linalg.norm(call.out[0].astype("float64") - expected) / cupy.linalg.norm(expected)
        if not float(error) < TOLERANCE:
            raise SystemExit(
                f"{problem.shape} {kv_dtype} {call.schedule.config}: off by {float(error):.3g} of its norm"
            )
        us = measure(call.launch, device, samples=options.samples).median_us
        config = call.schedule.config
        name = f"{config.kernel} {config.rows}"
        found.append(
            Timed(problem.shape, kv_dtype, name, call.schedule.num_splits, us, float(error), row_class is None)
        )
    return found


def line(chosen: dict[str, Timed]) -> str:
    plain = chosen["bfloat16"]
    batch, q_len, heads, kv_len = plain.shape
    cells = [f"{batch}, {q_len}, {heads}, {kv_len}", str(q_len * heads), f"{plain.us:,.1f} ({plain.kernel})"]
    for name in FORMATS[1:]:
        one = chosen[name]
        cells += [f"{one.us:,.1f} ({one.kernel})", f"{one.read_gb_s:,.0f}", f"{one.tflop_s:,.0f}"]
        cells.append(f"**{plain.us / one.us:.2f}x**")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the records")
    parser.add_argument("--budget", default="sm_120", help="limits that are kept; 'none' is the GPU's own")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--every-kernel", action="store_true", help="also time what the model did not choose")
    parser.add_argument("--update-readme", action="store_true", help="write the table between its markers")
    options = parser.parse_args()
    options.budget = None if options.budget == "none" else options.budget
    try:
        device = Device.current()
    except MlaFlashError as error:
        raise SystemExit(str(error)) from None
    limits = f", limits of {options.budget}" if options.budget else ""
    lines = [
        f"{device.name}{limits}, pages of {options.page_size}; a ratio above 1 is how many times faster than bfloat16.",
        "",
        "| B, q, H, kv | rows | bfloat16, us (kernel, rows of a tile) "
        + "".join(f"| {name}, us | GB/s | TFLOP/s | ratio " for name in FORMATS[1:])
        + "|",
        "|---" * (3 + 4 * len(FORMATS[1:])) + "|",
    ]
    sizes = ("batch", "q_len", "num_heads", "kv_len")
    shapes = [
        VerifyShape(**dict(zip(sizes, shape, strict=True)), page_size=options.page_size, kv_dtype=name)
        for shape in SHAPES
        for name in FORMATS
    ]
    warmup(shapes, budget=options.budget)  # compiles side by side
    records: list[Timed] = []
    for shape in SHAPES:
        problem = Problem(shape, options.page_size)
        of_shape = [one for name in FORMATS for one in timed(problem, name, device, options)]
        records += of_shape
        lines.append(line({one.kv_dtype: one for one in of_shape if one.is_chosen}))
        del problem
        cupy.get_default_memory_pool().free_all_blocks()
    table = "\n".join(lines) + "\n"
    print(table)
    for one in records:
        if options.every_kernel:
            print(f"{one.shape!s:>22} {one.kv_dtype:<12} {one.kernel:<14} {one.splits:>4} {one.us:8.1f} us")
    if options.out is not None:
        options.out.write_text(json.dumps([vars(one) for one in records]))
    if options.update_readme:
        text = README.read_text()
        head, rest = text.split(BEGIN)
        README.write_text(head + BEGIN + table + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
