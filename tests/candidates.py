"""Measured times of the candidates of both suites, `data/candidates_*.json`: what the cost model is held against.

From what ``mlaflash sweep --suite verify --suite kimi --save-best TABLE --json`` printed, a file for each budget:
``python tests/candidates.py SWEEP.jsonl NAME``.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mlaflash.cost import ROW_CLASSES
from mlaflash.device import Device, apply_budget

FOLDER = Path(__file__).parent / "data"
H200 = replace(Device.for_card("h200"), name="NVIDIA H200")
DEVICES = {"h200": H200, "h200_sm120": apply_budget(H200, "sm_120")}


class Problem(NamedTuple):
    """One problem; times by the index of a row class and by splits, in microseconds from a cold level-2 cache."""

    batch: int
    rows: int
    kv_len: int
    page_size: int
    times: dict[tuple[int, int], float]


def read(name: str) -> list[Problem]:
    """Read the problems of a file in the order of the suites."""
    return [
        Problem(*numbers, {(index, splits): us for index, splits, us in times})
        for *numbers, times in json.loads((FOLDER / f"candidates_{name}.json").read_text())
    ]


def write(sweep: Path, name: str) -> None:
    """Keep what the tests need of a sweep; candidates that failed, were wrong, or are none now are left out."""
    known = {(c.config.kernel, json.dumps(c.config.as_dict())): index for index, c in enumerate(ROW_CLASSES)}
    lines = []
    for text in sweep.read_text().splitlines():
        found = json.loads(text)
        problem = found["problem"]
        rows = problem["q_len"] * problem["num_heads"]
        times = [
            [known[c["kernel"], json.dumps(c["config"])], c["num_splits"], round(c["median_us"], 2)]
            for c in found["candidates"]
            if c["median_us"] is not None and (c["kernel"], json.dumps(c["config"])) in known
        ]
        numbers = [problem["batch"], rows, problem["kv_len"], problem["page_size"]]
        lines.append(json.dumps([*numbers, times], separators=(",", ":")))
    (FOLDER / f"candidates_{name}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
