"""``mlaflash bench``."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mlaflash.commands import render
from mlaflash.commands.bench_ranks import show_ranks
from mlaflash.commands.options import (
    DTYPES,
    FAILED,
    KV_DTYPES,
    SHAPE_NAMES,
    as_options,
    axis_options,
    given_axes,
    given_shape,
    json_option,
    shape_options,
)
from mlaflash.commands.render import Column
from mlaflash.device import CARDS, Device, apply_budget
from mlaflash.errors import InvalidArgumentError, MissingDependencyError, NoDeviceError
from mlaflash.lab import bench as lab
from mlaflash.lab.ceilings import Ceilings, known_ceilings
from mlaflash.lab.records import (
    BenchRecord,
    compare_records,
    geometric_mean,
    model_error,
    read_records,
    to_csv,
    to_document,
)
from mlaflash.lab.runner import GpuRunner, Runner, Step, plan_step
from mlaflash.lab.space import SPACES, check_axes
from mlaflash.lab.suites import SUITES, suite

_PROBLEM = (
    Column("B"),
    Column("q"),
    Column("H"),
    Column("kv"),
    Column("rows"),
    Column("kernel", "left", head=True),
    Column("splits"),
)
_MEASURED = (
    Column("us"),
    Column("p10"),
    Column("p90"),
    Column("TB/s"),
    Column("of read"),
    Column("TFLOP/s"),
    Column("of mma"),
    Column("roof", "left"),
    Column("model"),
    Column("graph"),
    Column("host"),
    Column("", "left", head=True),
)
_PREDICTED = (Column("predicted us"), Column("floor us"), Column("bound by", "left"))
_COMPARED = (Column("A us"), Column("B us"), Column("B / A"))


@click.command()
@click.option("--suite", "suites", type=click.Choice(tuple(SUITES)), multiple=True, help="Problems (repeatable), or:")
@shape_options
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True, help="Element type.")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), help="What the cache holds. By default --dtype.")
@click.option("--out-dtype", type=click.Choice(DTYPES), help="Element type of out. By default --dtype.")
@click.option("--kernel", type=click.Choice(tuple(SPACES)), help="By default that which a call chooses.")
@axis_options(several=False)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random inputs.")
@click.option("--samples", type=click.IntRange(min=1), default=50, show_default=True, help="Timings of a step.")
@click.option("--measure-ceilings", is_flag=True, help="Measure the ceilings anew, whatever is known of this card.")
@click.option("--predict", "card", type=click.Choice(tuple(CARDS)), help="Predict for a card; needs no GPU.")
@click.option("--ranks", type=click.IntRange(min=1), help="One step on as many GPUs, its tokens spread over them.")
@click.option(
    "--head-groups",
    type=click.IntRange(min=1),
    multiple=True,
    help="With --ranks: parts of the heads, each exchanged beside the attention of others (repeatable; default 1).",
)
@click.option(
    "--compare",
    "files",
    type=(click.Path(exists=True, dir_okay=False, path_type=Path), click.Path(dir_okay=False, path_type=Path)),
    metavar="A B",
    help="Only compare two files that --json has made; needs no GPU.",
)
@json_option("one JSON document")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV and nothing else on stdout.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a figure, such as bench.svg.")
def bench(
    suites: tuple[str, ...],
    dtype: str,
    kv_dtype: str | None,
    out_dtype: str | None,
    kernel: str | None,
    seed: int,
    samples: int,
    measure_ceilings: bool,
    card: str | None,
    ranks: int | None,
    head_groups: tuple[int, ...],
    files: tuple[Path, Path] | None,
    as_json: bool,
    as_csv: bool,
    plot: Path | None,
    budget: str | None,
    **arguments: Any,
) -> None:
    """Time verify steps and hold them against what a GPU can do.

    Of each step: median, 10th and 90th percentile of the launches' time on the GPU from a cold level-2 cache, merge
    included; bytes (each KV row counted once) and operations a second, and their shares of the measured ceilings of
    streaming reads and of mma.sync; what the cost model says; a CUDA graph's time, and the time for which a repeated
    call keeps the host. A few rows are held against float64 first. Exit status 1 where one is wrong.

    With --ranks: one layer on several GPUs, --heads and --kv-len those of all together, against one GPU.
    """
    if ranks is not None:
        show_ranks(ranks, head_groups, arguments, dtype=dtype, out_dtype=out_dtype, card=card, as_json=as_json)
        return
    if head_groups:
        raise InvalidArgumentError("--head-groups is given without --ranks. Say on how many GPUs.")
    if as_json and as_csv:
        raise InvalidArgumentError("--json and --csv are given; stdout holds one of them. Leave one out.")
    if files is not None:
        if card is not None or plot is not None or as_csv:
            raise InvalidArgumentError("--compare takes neither --predict nor --plot nor --csv. Leave them out.")
        _compare(*files, as_json)
        return
    steps = _steps(suites, arguments, dtype, kv_dtype, out_dtype)
    limits = {"budget": budget} if budget is not None else {}
    if card is not None:
        device = Device.for_card(card)
        limited = device if budget is None else apply_budget(device, budget)
        steps = _with_kernel(steps, kernel, given_axes(arguments), limited)
        records = lab.predict_steps(
            steps, limited, budget=budget, command=lambda step: repeat(step, {"predict": card, **limits})
        )
        _show(records, as_json, as_csv)
    else:
        runner = make_runner(budget)
        steps = _with_kernel(steps, kernel, given_axes(arguments), runner.device)
        where = {"seed": seed, "samples": samples, **limits}
        ceilings = known_ceilings(runner.device, anew=measure_ceilings)
        run = lab.Bench(
            runner,
            ceilings,
            seed=seed,
            samples=samples,
            budget=budget,
            command=lambda step: repeat(step, where),
        )
        with render.progress() as progress:
            records = list(run.run(steps, progress))
        (render.note if as_json or as_csv else render.paragraph)(_head(records[0], ceilings))
        _show(records, as_json, as_csv)
    if plot is not None:
        from mlaflash.lab.plots import plot_bench

        plot_bench(records, plot)
    if any(record.status in ("wrong", "failed") for record in records):
        sys.exit(FAILED)


def repeat(step: Step, where: Mapping[str, Any]) -> str:
    """Spell the command that repeats one step.

    Parameters
    ----------
    step : Step
    where : mapping of str to Any
        How and where it runs.
    """
    shape, lens = step.shape, step.kv_lens
    values: dict[str, Any] = {
        "heads": shape.num_heads,
        "batch": len(lens),
        "q_len": shape.q_len,
        "kv_len": ",".join(map(str, lens[:1] if len(set(lens)) == 1 else lens)),
        "page_size": shape.page_size,
        "mask": shape.mask,
        "dtype": shape.dtype,
    }
    values |= {"kv_dtype": shape.kv_dtype} if shape.kv_dtype else {}
    values |= {"out_dtype": shape.out_dtype} if shape.out_dtype else {}
    values |= {"kernel": step.kernel} if step.kernel else {}
    values |= step.config.as_dict() if step.config else {}
    flags = [f" --{name.replace('_', '-')}" for name in ("new_kv", "split_kv", "soft_cap") if getattr(shape, name)]
    return f"mlaflash bench {as_options(values | dict(where))}{''.join(flags)}"


def make_runner(budget: str | None) -> Runner:
    """Take this machine's GPU.

    Parameters
    ----------
    budget : str or None
        Architecture whose shared memory to keep to.

    Raises
    ------
    NoDeviceError
        There is none, or no CuPy.
    """
    try:
        return GpuRunner(budget)
    except (MissingDependencyError, NoDeviceError) as error:
        raise NoDeviceError(f"{error} Without a GPU there is --predict, and bench --compare.") from error


def _steps(
    suites: Sequence[str], arguments: Mapping[str, Any], dtype: str, kv_dtype: str | None, out_dtype: str | None
) -> list[Step]:
    if not suites:
        return [Step(*given_shape(arguments, dtype, kv_dtype, out_dtype))]
    context = click.get_current_context()
    for param in context.command.params:
        is_idle = param.name in {*SHAPE_NAMES, "dtype", "out_dtype"} - {"budget"}
        if is_idle and context.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            raise InvalidArgumentError(
                f"{param.opts[0]} is given with --suite, whose problems are fixed. Leave one of both out."
            )
    return suite_steps(suites, kv_dtype)


def suite_steps(suites: Sequence[str], kv_dtype: str | None) -> list[Step]:
    """Return the steps of suites.

    Parameters
    ----------
    suites : sequence of str
    kv_dtype : str or None
        What their caches hold, where it is not what they say.
    """
    shapes = [shape if kv_dtype is None else replace(shape, kv_dtype=kv_dtype) for n in suites for shape in suite(n)]
    return [Step(shape, shape.check_lens(None)) for shape in shapes]


def _with_kernel(steps: Sequence[Step], kernel: str | None, axes: Mapping[str, int], device: Device) -> list[Step]:
    """Give steps the kernel and constants that were asked for; constants that were not are those that a call takes."""
    if kernel is None:
        if axes:
            raise InvalidArgumentError("a kernel's constants are given without --kernel. Name the kernel.")
        return list(steps)
    check_axes([kernel], list(axes))
    found = []
    for step in steps:
        schedule = plan_step(Step(step.shape, step.kv_lens, kernel), device)
        chosen = SPACES[kernel].change(schedule.config, axes) if axes else schedule.config
        found.append(Step(step.shape, step.kv_lens, kernel, chosen))
    return found


def _head(record: BenchRecord, ceilings: Ceilings) -> str:
    limits = f", limits of {record.budget}" if record.budget else ""
    return (
        f"{record.gpu} ({record.arch}){limits}; measured ceilings: {ceilings.read_gb_s:,.0f} GB/s streaming read, "
        f"{ceilings.mma_tflop_s:,.0f} TFLOP/s mma.sync; medians of {record.samples} from a cold level-2 cache"
    )


def _show(records: Sequence[BenchRecord], as_json: bool, as_csv: bool) -> None:
    if as_json:
        render.document(to_document(records))
        return
    if as_csv:
        render.line(to_csv(records).rstrip("\n"))
        return
    if records[0].status == "predicted":
        _show_predicted(records)
        return
    render.table((*_PROBLEM, *_MEASURED), [(*_problem_cells(r), *_measured_cells(r)) for r in records])
    for record in records:
        if record.status != "ok":
            render.line(f"{record.status}: {record.reason}")
            render.line(f"  repeat with: {record.command}")
    error = model_error(records)
    if error is not None:
        render.line(
            f"cost model against measured times: {error[0]:.1%} off in the median, {error[1]:.1%} at most, "
            f"over {len(records)} steps"
        )


def _show_predicted(records: Sequence[BenchRecord]) -> None:
    first = records[0]
    limits = f", limits of {first.budget}" if first.budget else ""
    render.paragraph(
        f"PREDICTED for {first.gpu} ({first.arch}){limits}, by the cost model from counts and data sheets: nothing was "
        "measured on such a card"
    )
    rows = [
        (*_problem_cells(r), _number(r.predicted_us), _number(r.floor_us), r.predicted_limit or "-") for r in records
    ]
    render.table((*_PROBLEM, *_PREDICTED), rows)
    shared = {
        name: value
        for name, value in first.predicted_from.items()
        if all(record.predicted_from.get(name) == value for record in records)
    }
    render.paragraph("from: " + ", ".join(f"{name} {value:g}" for name, value in shared.items()))
    if len(records) > 1:
        render.paragraph("and of each step what --json shows as predicted_from")


def _choice(record: BenchRecord) -> str:
    return f"{record.kernel} / {record.num_splits}"


def _problem_cells(record: BenchRecord) -> tuple[str, ...]:
    return (
        str(record.batch),
        str(record.q_len),
        str(record.rows // record.q_len),
        f"{record.kv_len:,}",
        str(record.rows),
        record.kernel,
        str(record.num_splits),
    )


def _measured_cells(record: BenchRecord) -> tuple[str, ...]:
    return (
        _number(record.median_us),
        _number(record.p10_us),
        _number(record.p90_us),
        _number(record.tb_s, 2),
        _share(record.of_read),
        _number(record.tflop_s, 0),
        _share(record.of_mma),
        record.roof,
        _number(record.predicted_us),
        _number(record.graph_us),
        _number(record.host_us),
        record.status,
    )


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _compare(before: Path, after: Path, as_json: bool) -> None:
    pairs = compare_records(read_records(before), read_records(after))
    ratios = [pair.ratio for pair in pairs]
    mean = geometric_mean(ratios)
    furthest = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    if as_json:
        render.document(
            {
                "a": str(before),
                "b": str(after),
                "geometric_mean": mean,
                "furthest": furthest,
                "problems": [
                    {
                        "problem": pair.before.problem,
                        "a_us": pair.before.us,
                        "b_us": pair.after.us,
                        "ratio": pair.ratio,
                        "a_is_predicted": pair.before.status == "predicted",
                        "b_is_predicted": pair.after.status == "predicted",
                    }
                    for pair in pairs
                ],
            }
        )
        return
    for letter, path, record in (("A", before, pairs[0].before), ("B", after, pairs[0].after)):
        how = "PREDICTED, not measured" if record.status == "predicted" else "measured"
        render.paragraph(f"{letter}: {path}, {record.gpu}, {how}, revision {record.revision or 'unknown'}")
    rows = [
        (
            *_problem_cells(pair.before)[:5],
            *(" -> ".join(dict.fromkeys(map(_choice, (pair.before, pair.after)))),),
            _number(pair.before.us),
            _number(pair.after.us),
            f"{pair.ratio:.3f}",
        )
        for pair in pairs
    ]
    render.table((*_PROBLEM[:5], Column("kernel / splits", "left", head=True), *_COMPARED), rows)
    render.line(f"B / A over {len(pairs)} problems: {mean:.3f} in the geometric mean, furthest from 1: {furthest:.3f}")
