"""Put what `mlaflash bench` measured into the README, from its JSON files; needs no GPU.

    mlaflash bench --suite verify --budget sm_120 --json > verify.json
    python benchmarks/readme.py verify.json                                # the table between its markers
    python benchmarks/readme.py verify.json kimi.json --plot docs/figures/h200.svg

The first file is that of the table; a figure shows the problems of all. With --plot the README is left as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mlaflash.errors import MlaFlashError
from mlaflash.lab.plots import plot_bench
from mlaflash.lab.records import BenchRecord, model_error, read_records

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- bench-table -->\n", "<!-- /bench-table -->"


def table(records: Sequence[BenchRecord]) -> str:
    """Return the table, and where its numbers come from."""
    first, error = records[0], model_error(records)
    if first.ceilings is None or error is None or any(record.status != "ok" for record in records):
        raise SystemExit("this file holds steps that are not measured, or not right. Make it with mlaflash bench.")
    limits = f", limits of {first.budget}" if first.budget else ""
    lines = [
        f"{first.gpu}{limits}, revision {first.revision}; {first.samples} samples of each step, measured ceilings "
        f"{first.ceilings['read_gb_s']:,.0f} GB/s streaming read and {first.ceilings['mma_tflop_s']:.0f} TFLOP/s "
        f"`mma.sync`. The cost model is {error[0]:.1%} off in the median, {error[1]:.1%} at most.",
        "",
        "| B, q, H, kv | kernel x splits | us (p10 to p90) | in a graph | model | TB/s (of read) | TFLOP/s (of mma) |",
        "|" + "---|" * 7,
    ]
    for r in records:
        share = f" ({r.of_mma:.0%})" if r.of_mma is not None else ""
        lines.append(
            f"| {r.batch}, {r.q_len}, {r.rows // r.q_len}, {r.kv_len} | {r.kernel} x {r.num_splits} "
            f"| {r.median_us:.1f} ({r.p10_us:.1f} to {r.p90_us:.1f}) | {r.graph_us:.1f} | {r.predicted_us:.1f} "
            f"| {r.tb_s:.2f} ({r.of_read:.0%}) | {r.tflop_s:.0f}{share} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="JSON files of mlaflash bench or report")
    parser.add_argument("--plot", type=Path, help="draw a figure, such as docs/figures/h200.svg, and nothing else")
    options = parser.parse_args()
    try:
        records = [read_records(path) for path in options.files]
        if options.plot is not None:
            plot_bench([record for each in records for record in each], options.plot)
            return
    except MlaFlashError as error:
        raise SystemExit(str(error)) from None
    text = README.read_text()
    head, rest = text.split(BEGIN)
    README.write_text(head + BEGIN + table(records[0]) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
