"""Figures of what was measured or predicted; needs the extra ``plot``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlaflash.errors import InvalidArgumentError, MissingDependencyError
from mlaflash.floors import mma_tflop_s
from mlaflash.lab.records import BenchRecord
from mlaflash.lab.sweep import Record
from mlaflash.params import row_bytes

_PANEL = 5.2  # inches
_MAX_LINES = 12
_MAX_CONSTANTS = 24
_COLUMNS = 4


def plot_bench(records: Sequence[BenchRecord], path: Path) -> None:
    """Draw a roofline, time against KV tokens, and time against rows.

    Parameters
    ----------
    records : sequence of BenchRecord
        Those without a time are left out.
    path : Path
        Its suffix decides the format, such as ``.png`` or ``.svg``.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    InvalidArgumentError
        No record has a time, or the file cannot be written.
    """
    timed = [record for record in records if record.us]
    if not timed:
        raise InvalidArgumentError("there is nothing to plot: no step has a time. See why in their rows.")
    figure, (roof, by_length, by_rows) = _figure(3, 1)
    _roofline(roof, timed)
    _lines(by_length, timed, "kv_len", ("batch", "rows"), "KV tokens of a request")
    _lines(by_rows, timed, "rows", ("batch", "kv_len"), "rows of a request")
    is_predicted = any(record.status == "predicted" for record in timed)
    figure.suptitle(f"{timed[0].gpu}, {'PREDICTED by the cost model, not measured' if is_predicted else 'measured'}")
    save(figure, path)


def _roofline(axes: Any, records: Sequence[BenchRecord]) -> None:
    ceilings, inputs = records[0].ceilings, records[0].predicted_from
    if ceilings is not None:
        read, mma = ceilings["read_gb_s"] / 1e3, ceilings["mma_tflop_s"]
    else:
        read = inputs["dram_gbps"] / 1e3
        mma = mma_tflop_s(inputs["num_sms"], inputs["sm_ghz"], inputs["mma_clocks"])
    intensities, rates = [], []
    for record in records:
        flop, num_bytes = work(record)
        intensities.append(flop / num_bytes)
        rates.append(flop / (record.us or 1.0) / 1e6)
    axes.scatter(intensities, rates, s=14, zorder=3)
    span = sorted([min(intensities) / 2, mma / read, max(intensities) * 2])
    axes.plot(
        span,
        [min(read * x, mma) for x in span],
        color="black",
        linewidth=1,
        label=f"read {read:.2f} TB/s, mma.sync {mma:.0f} TFLOP/s",
    )
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte of KV, q and out", ylabel="TFLOP/s", title="roofline")
    axes.legend(fontsize=7)


def work(record: BenchRecord) -> tuple[float, float]:
    """Return the operations of a step and its bytes, every KV row counted once, and all tokens as if seen.

    Parameters
    ----------
    record : BenchRecord
    """
    itemsize = 4 if record.problem["dtype"] == "float32" else 2
    kv_bytes = row_bytes(record.problem.get("kv_dtype") or record.problem["dtype"])
    lens = record.problem["kv_lens"]
    tokens = sum(lens) if len(lens) == record.batch else record.batch * lens[0]
    flop = 2.0 * (576 + 512) * record.rows * tokens
    return flop, float(kv_bytes * tokens + itemsize * record.batch * record.rows * (576 + 512))


def _lines(axes: Any, records: Sequence[BenchRecord], x: str, group: tuple[str, str], label: str) -> None:
    lines: dict[tuple[int, ...], list[BenchRecord]] = defaultdict(list)
    for record in records:
        # Lengths that a draft tells apart belong together.
        key = [_octaves(record.kv_len) if name == "kv_len" else getattr(record, name) for name in group]
        lines[tuple(key)].append(record)
    longest = sorted(lines.items(), key=lambda item: (-len(item[1]), item[0]))[:_MAX_LINES]
    for _, line in sorted(longest, key=lambda item: item[0]):
        least = min(line, key=lambda record: record.kv_len)
        points = sorted((getattr(record, x), record.us or 0.0) for record in line)
        name = ", ".join(f"{each.replace('_', ' ')} {getattr(least, each):,}" for each in group)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=name)
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="us", title=f"time against {label}")
    axes.legend(fontsize=6)


def _octaves(tokens: int) -> int:
    return round(2 * math.log2(max(tokens, 1)))


def plot_sweep(records: Sequence[Record], path: Path) -> None:
    """Draw a heat map of a sweep's candidates.

    Of `tile` one of HT against TK for each number of splits; of every other kernel one of its constants, the best of
    them, against splits.

    Parameters
    ----------
    records : sequence of Record
        Those that are not ok are left out.
    path : Path

    Raises
    ------
    MissingDependencyError, InvalidArgumentError
        As `plot_bench`.
    """
    passed = [record for record in records if record.status == "ok" and record.config]
    if not passed:
        raise InvalidArgumentError("there is nothing to plot: no candidate is ok. See why in their rows.")
    is_timed = all(record.median_us is not None for record in passed)
    panels: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for record in passed:
        value = record.median_us if is_timed else (record.kv_bytes or 0) / 1e3
        if record.kernel == "tile":
            panel = f"tile, {record.config['nsplit']} splits: HT down, TK right"
            cell = str(record.config["ht"]), str(record.config["tk"])
        else:
            panel = f"{record.kernel}: splits right"
            constants = " ".join(f"{name} {value}" for name, value in record.config.items() if name != "nsplit")
            cell = constants, str(record.config["nsplit"])
        panels[panel][cell] = value or 0.0
    figure, axes = _figure(len(panels), 1)
    values = [value for cells in panels.values() for value in cells.values()]
    for place, (name, cells) in zip(axes, panels.items(), strict=True):
        _heat_map(place, _fastest(cells), name, (min(values), max(values)))
    unit = "median us from a cold level-2 cache" if is_timed else "kB of KV loaded (counted; THIS IS NO TIMING)"
    figure.suptitle(f"{passed[0].device}, {passed[0].arch}: {unit}")
    save(figure, path)


def _fastest(cells: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Keep the rows of a heat map that hold the least values, in their order."""
    least: dict[str, float] = {}
    for (down, _), value in cells.items():
        least[down] = min(value, least.get(down, value))
    kept = set(sorted(least, key=least.__getitem__)[:_MAX_CONSTANTS])
    return {cell: value for cell, value in cells.items() if cell[0] in kept}


def _heat_map(axes: Any, cells: Mapping[tuple[str, str], float], title: str, limits: tuple[float, float]) -> None:
    down, right = (list(dict.fromkeys(cell[axis] for cell in cells)) for axis in range(2))
    grid = [[cells.get((y, x), math.nan) for x in right] for y in down]
    # Of a logarithm: candidates differ by factors.
    low, high = (math.log(max(limit, 1e-9)) for limit in limits)
    shades = [[math.log(max(value, 1e-9)) for value in row] for row in grid]
    axes.imshow(shades, aspect="auto", vmin=low, vmax=high)
    axes.set_xticks(range(len(right)), right)
    axes.set_yticks(range(len(down)), down, fontsize=6)
    axes.set_title(title, fontsize=9)
    best = min(cells.values())
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            if not math.isnan(value):
                weight = "bold" if value == best else "normal"
                ink = "white" if 2 * shades[row][column] < low + high else "black"
                axes.text(column, row, f"{value:,.0f}", ha="center", va="center", fontsize=6, weight=weight, color=ink)


def _figure(panels: int, scale: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"plotting needs matplotlib, which cannot be imported ({error}); pip install 'mlaflash[plot]'."
        ) from error
    columns = min(panels, _COLUMNS)
    lines = -(-panels // columns)
    figure = Figure(figsize=(_PANEL * scale * columns, _PANEL * scale * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for unused in axes[panels:]:
        unused.set_axis_off()
    return figure, axes[:panels]


def save(figure: Any, path: Path) -> None:
    """Write a figure.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    path : Path

    Raises
    ------
    InvalidArgumentError
        Its suffix is no format, or it cannot be written.
    """
    import matplotlib

    # Letters as letters and no date: small files, alike if what they show is.
    style = {"svg.fonttype": "none", "svg.hashsalt": "mlaflash"}
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        with matplotlib.rc_context(style):
            figure.savefig(path, dpi=150, metadata=metadata)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"--plot is {path}, which cannot be written: {error}. Name another file.") from error
