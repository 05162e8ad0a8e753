"""When defragmentation pays, on one GPU: attention on scattered slots against runs, and what moving the rows costs.

    python benchmarks/defrag.py [--quick] [--json FILE] [--update-docs]

bfloat16, page size 1, the same kernel in the same run. Times are medians of CUDA events from a cold level-2 cache. The
rates of `move_rows` count each row once read and once written, as those of the copy that they are held against do.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from mlaflash import attention, kv
from mlaflash.device import Device
from mlaflash.errors import MlaFlashError
from mlaflash.lab.timing import measure

LAYERS, TOKENS, ROW = 61, 65536, 576
RUN = 64
SHAPES = ((1, 1, 8, 65536), (1, 8, 8, 65536), (1, 16, 8, 65536), (8, 8, 8, 32768), (32, 1, 8, 8192), (1, 8, 8, 200_000))
DOCS = Path(__file__).parents[1] / "docs" / "defragmentation.md"


@dataclass(frozen=True)
class Attention:
    """Microseconds of one layer by how the slots of its tokens lie."""

    batch: int
    q_len: int
    heads: int
    kv_len: int
    kernel: str
    contiguous: float
    runs: float
    shuffled: float

    @property
    def gain(self) -> float:
        """Microseconds that a layer saves when shuffled slots become runs."""
        return self.shuffled - self.runs

    def break_even(self, us_per_token: float) -> float | None:
        """Steps behind which moving all tokens has paid, or None; below half a percent is noise."""
        if self.gain <= 0.005 * self.shuffled:
            return None
        return self.batch * self.kv_len * us_per_token / (LAYERS * self.gain)


@dataclass(frozen=True)
class Movement:
    """One list of moves over all layers."""

    name: str
    rows: int
    us: float
    gb_s: float
    of_copy: float


def slots(kind: str, count: int, rng: np.random.Generator) -> Any:
    order = np.arange(count)
    if kind == "runs":
        starts = rng.permutation(-(-count // RUN)) * RUN
        order = (starts[:, None] + np.arange(RUN)).reshape(-1)
        order = order[order < count]
    if kind == "shuffled":
        order = rng.permutation(count)
    return cupy.asarray(order.astype(np.int32))


def attend(shape: tuple[int, int, int, int], device: Device) -> Attention:
    batch, q_len, heads, kv_len = shape
    rng = np.random.default_rng(kv_len)
    total = batch * kv_len
    pool = cupy.random.standard_normal((total, ROW), dtype="float32").astype("bfloat16")
    q = cupy.random.standard_normal((batch, q_len, heads, ROW), dtype="float32").astype("bfloat16")
    times, kernels = [], set()
    for kind in ("contiguous", "runs", "shuffled"):
        call = attention.prepare(
            q,
            pool,
            sm_scale=0.14468,
            kv_lens=cupy.full(batch, kv_len, "int32"),
            kv_indptr=cupy.arange(batch + 1, dtype="int32") * kv_len,
            kv_indices=slots(kind, total, rng),
            max_kv_len=kv_len,
        )
        times.append(measure(call.launch, device, samples=25).median_us)
        kernels.add(call.schedule.config.kernel)
    (kernel,) = kernels
    return Attention(*shape, kernel, *times)


def copy_rate(num_bytes: int, device: Device) -> float:
    """Time a device-to-device copy: GB/s, reads and writes counted."""
    source, target = (cupy.empty(num_bytes, "uint8") for _ in range(2))
    stream = cupy.cuda.get_current_stream()

    def copy() -> None:
        target.data.copy_from_device_async(source.data, num_bytes, stream)

    rate = 2 * num_bytes / measure(copy, device, samples=9).median_us / 1e3
    return float(rate)


def movements(device: Device, tokens: int) -> tuple[list[Movement], float]:
    """Time lists of moves, and the copy that they are held against, in GB/s."""
    rng = np.random.default_rng(0)
    row_bytes = 2 * ROW
    layers = [cupy.empty((2 * tokens, ROW), "uint16") for _ in range(LAYERS)]
    ceiling = copy_rate(LAYERS * tokens * row_bytes // 2, device)
    cupy.get_default_memory_pool().free_all_blocks()
    half = np.arange(tokens)
    ring = rng.permutation(2 * tokens)[:tokens]
    mixed = rng.permutation(2 * tokens)
    lists: list[tuple[str, Any, Any, int | None]] = [
        ("no hazard, both ends scattered", mixed[:tokens], mixed[tokens:], 1),
        ("no hazard, scattered to runs (defragmentation)", rng.permutation(tokens), half + tokens, 1),
        ("no hazard, runs to runs", half, half + tokens, 1),
        ("everything overlaps: one cycle", ring, np.roll(ring, 1), None),
        ("everything overlaps: a shift by one", half, half + 1, None),
    ]
    found = []
    mover = kv.RowMover(layers)
    needed = mover.scratch_bytes(tokens)
    scratch = cupy.empty(max(256 << 20, needed), "uint8")
    for name, src, dst, group in lists:
        ids = [cupy.asarray(part.astype(np.int64)) for part in (src, dst)]
        us = measure(lambda i=ids, g=group: mover.move(*i, None, g, scratch=scratch), device, samples=9).median_us
        rate = 2 * LAYERS * tokens * row_bytes / us / 1e3
        found.append(Movement(name, tokens, us, rate, rate / ceiling))
    few = [cupy.asarray(part[:16].astype(np.int64)) for part in (ring, np.roll(ring, 1))]

    def layer_by_layer() -> None:
        for layer in layers:
            layer[few[1]] = layer[few[0]]

    for name, enqueue in (
        ("16 rows, move_rows", lambda: mover.move(*few)),
        ("16 rows, gather and scatter of each layer", layer_by_layer),
    ):
        us = measure(enqueue, device, samples=25).median_us
        rate = 2 * LAYERS * 16 * row_bytes / us / 1e3
        found.append(Movement(name, 16, us, rate, rate / ceiling))
    return found, ceiling


def report(attentions: list[Attention], moved: list[Movement], ceiling: float, device: Device) -> str:
    (defragmentation,) = (m for m in moved if "defragmentation" in m.name)
    us_per_token = defragmentation.us / defragmentation.rows
    steps = [a.break_even(us_per_token) for a in attentions]
    paid = [count for count in steps if count is not None]
    lines = [
        "**For these kernels defragmentation "
        + ("never pays**" if not paid else "hardly ever pays**" if len(paid) <= len(steps) / 3 else "can pay**")
        + f": in {len(paid)} of {len(steps)} shapes"
        + (f", after {min(paid):,.0f} steps at the least" if paid else "")
        + f". Shuffled slots cost at most {max(a.shuffled / a.runs for a in attentions) - 1:.1%} over runs of {RUN}.",
        "",
        f"{device.name}: one layer, us, and the steps behind which moving all tokens of the batch in {LAYERS} layers "
        f"({us_per_token * 1e3:.1f} ns a token) has paid.",
        "",
        "| B, q, H, kv | kernel | contiguous | runs of 64 | shuffled | shuffled / runs | pays after, steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for a, count in zip(attentions, steps, strict=True):
        pays = "never" if count is None else f"{count:,.0f}"
        lines.append(
            f"| {a.batch}, {a.q_len}, {a.heads}, {a.kv_len} | `{a.kernel}` | {a.contiguous:.1f} | {a.runs:.1f} "
            f"| {a.shuffled:.1f} | {a.shuffled / a.runs:.3f} | {pays} |"
        )
    lines += [
        "",
        f"`move_rows` over {LAYERS} layers of 1,152-byte rows; a device-to-device copy runs at {ceiling:,.0f} GB/s, "
        "reads and writes counted.",
        "",
        "| list | rows | us | GB/s | of the copy |",
        "|---|---|---|---|---|",
        *(f"| {m.name} | {m.rows:,} | {m.us:,.1f} | {m.gb_s:,.0f} | {m.of_copy:.1%} |" for m in moved),
    ]
    few = [m.us for m in moved if m.rows == 16]
    lines += ["", f"16 rows: {few[1] / few[0]:.1f} times faster than a gather and a scatter of each layer."]
    return "\n".join(lines) + "\n"


FOOT = """
So `kv.plan_defrag` is for what asks for runs: another kernel that reads whole pages, a transfer of a request to another
machine, pages that must be given back. Where a step does pay, it does so only for requests that live on for longer than
the break-even, and whose new tokens land in runs too. Compaction after a tree was verified is another matter: it is
needed, and moves a few rows.
"""

HEAD = """\
# When defragmentation pays

A page table of single tokens hands out slots from anywhere. A row of the cache is 1,152 bytes, nine whole lines, so
that a scattered read wastes none of what it fetches, and the kernels read ids ahead of rows; what is left is the reach
of the GPU's address translation. Moving a request costs twice its KV in traffic, in all layers. Measured by
`python benchmarks/defrag.py`:

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes, and an eighth of the rows")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--update-docs", action="store_true", help="write docs/defragmentation.md")
    options = parser.parse_args()
    try:
        device = Device.current()
    except MlaFlashError as error:
        raise SystemExit(str(error)) from None
    attentions = [attend(shape, device) for shape in (SHAPES[1:2] if options.quick else SHAPES)]
    cupy.get_default_memory_pool().free_all_blocks()
    moved, ceiling = movements(device, TOKENS // 8 if options.quick else TOKENS)
    text = report(attentions, moved, ceiling, device)
    print(text)
    if options.json:
        numbers = {"attention": [asdict(a) for a in attentions], "moves": [asdict(m) for m in moved], "copy": ceiling}
        options.json.write_text(json.dumps(numbers, indent=2))
    if options.update_docs:
        DOCS.write_text(HEAD + text + FOOT)


if __name__ == "__main__":
    main()
