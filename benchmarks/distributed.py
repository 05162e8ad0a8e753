"""Predict how verify steps scale over GPUs that share a cache: the table of docs/distributed.md.

    python benchmarks/distributed.py [--update-docs]

Needs no GPU. On GPUs, ``mlaflash bench --ranks 2`` measures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mlaflash import Device, VerifyShape
from mlaflash.lab.sharded import predict_ranks

DOCS = Path(__file__).parents[1] / "docs" / "distributed.md"
BEGIN, END = "<!-- predicted-table -->\n", "<!-- /predicted-table -->"
RANKS = (2, 4, 8)
STEPS = [(1, 8, 32_768), (1, 8, 262_144), (1, 1, 262_144), (32, 8, 32_768)]


def predicted_table() -> str:
    """Write the model's times of one layer, for 64 heads in all."""
    lines = [
        "Predicted, not measured: microseconds of one layer, 64 heads in all, bfloat16; "
        "`python benchmarks/distributed.py`.",
        "",
        f"| GPU | B, q, tokens | 1 GPU | link | {' | '.join(f'{n} GPUs' for n in RANKS)} |",
        "|---|---|---|---|---|---|---|",
    ]
    for device in (Device.for_card("h200"), Device.for_card("rtx-pro-6000")):
        for batch, q_len, kv_len in STEPS:
            shape = VerifyShape(num_heads=64, q_len=q_len, kv_len=kv_len, batch=batch, page_size=64)
            for records in zip(*(predict_ranks(shape, ranks, device) for ranks in RANKS), strict=True):
                first = records[0]
                link = "none: tokens on every GPU" if first.link == "none" else first.link
                lines.append(
                    f"| {device.name} | {batch}, {q_len}, {kv_len:,} | {first.us['one_gpu']:,.0f} | {link} | "
                    + " | ".join(f"{record.us['step']:,.0f} ({record.ratio:.2f})" for record in records)
                    + " |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update-docs", action="store_true", help="write the table into the docs")
    text = predicted_table()
    print(text)
    if parser.parse_args().update_docs:
        head, rest = DOCS.read_text().split(BEGIN)
        DOCS.write_text(head + BEGIN + text + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
