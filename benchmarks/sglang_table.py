"""Write the README's table of the SGLang path from what `mlaflash sglang-check` measured.

mlaflash sglang-check --json > sglang.json
python benchmarks/sglang_table.py sglang.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- sglang-table -->\n", "<!-- /sglang-table -->"


def table(document: dict[str, Any]) -> str:
    """Return the table, a line for each shape."""
    lines = [
        f"{document['device']}, SGLang {document['version']}: a call of its Triton backend with either kernel, us.",
        "",
        "| requests, prefix, draft | tree | SGLang | | chain | SGLang | | planning of a step: tree, chain |",
        "|---|---|---|---|---|---|---|---|",
    ]
    shapes: dict[tuple[int, ...], dict[str, Any]] = {}
    for result in document["results"]:
        if result["pool"] != "bfloat16":
            continue
        shapes.setdefault((result["batch"], result["prefix"], result["q_len"]), {})[result["kind"]] = result
    for (batch, prefix, q_len), kinds in shapes.items():
        cells = [f"{batch}, {prefix:,}, {q_len}"]
        for kind in ("tree", "chain"):
            ours, theirs = kinds[kind]["layer_us"], kinds[kind]["sglang_us"]
            cells += [f"{ours:.1f}", f"{theirs:,.0f}", f"**{theirs / ours:.1f}x**"]
        cells.append(", ".join(f"{kinds[kind]['step_us']:.1f}" for kind in ("tree", "chain")))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrite the part of the README between the markers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path, help="what mlaflash sglang-check --json has written")
    document = json.loads(parser.parse_args().document.read_text())
    if not document["passed"] or not document["results"]:
        raise SystemExit("The check did not pass, or measured nothing: no table.")
    text = README.read_text()
    head, rest = text.split(BEGIN)
    README.write_text(head + BEGIN + table(document) + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
