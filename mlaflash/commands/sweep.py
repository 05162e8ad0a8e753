"""``mlaflash sweep``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from mlaflash import tuned
from mlaflash.commands import render
from mlaflash.commands.options import (
    DTYPES,
    FAILED,
    KV_DTYPES,
    as_options,
    axis_options,
    device_option,
    given_axes,
    json_option,
)
from mlaflash.commands.render import Column
from mlaflash.commands.tune import save_table, tune_suites
from mlaflash.device import CARDS
from mlaflash.errors import InvalidArgumentError
from mlaflash.lab.inputs import Case
from mlaflash.lab.presets import KIMI_K2_SM_SCALE
from mlaflash.lab.space import SPACES, all_axes, check_axes, swept_kernels
from mlaflash.lab.suites import SUITES
from mlaflash.lab.sweep import Record, RecordFile, Sweep, rank, restrict
from mlaflash.lab.target import Target, select_target
from mlaflash.schedule import MMA_KERNELS
from mlaflash.tiles import KernelConfig

_KV_LEN = {"gpu": 16384, "emulator": 128}
_MASKS = ("causal", "none", "chain", "tree")
_OF_ONE_PROBLEM = (
    *("q_len", "heads", "kv_len", "batch", "dtype", "mask", "page_size", "sm_scale", "kernels", "device", "arch"),
    *("out", "resume", "plot", *(axis.name for axis in all_axes())),
)
_FAILURES = ("wrong", "compile_failed", "launch_failed")


@click.command()
@click.option("--suite", "suites", type=click.Choice(tuple(SUITES)), multiple=True, help="Problems (repeatable), or:")
@click.option("--q-len", type=click.IntRange(min=1), default=8, show_default=True, help="Draft tokens of a request.")
@click.option("--heads", type=click.IntRange(min=1), default=8, show_default=True, help="Query heads.")
@click.option(
    "--kv-len",
    type=click.IntRange(min=1),
    help=f"KV tokens of a request, its draft included. By default {_KV_LEN['gpu']} on a GPU, "
    f"{_KV_LEN['emulator']} on the emulator.",
)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Requests.")
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True, help="Element type.")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), help="What the cache holds. By default --dtype.")
@click.option("--mask", type=click.Choice(_MASKS), default="causal", show_default=True, help="Mask of the draft.")
@click.option("--page-size", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens of a page.")
@click.option("--sm-scale", type=float, default=KIMI_K2_SM_SCALE, show_default=True, help="Scale of the scores.")
@click.option(
    "--kernel",
    "kernels",
    type=click.Choice(tuple(SPACES)),
    multiple=True,
    help="Kernel to sweep (repeatable; default those that have the constants given and take --dtype).",
)
@axis_options(several=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random inputs.")
@click.option("--samples", type=click.IntRange(min=1), default=30, show_default=True, help="Timings of a candidate.")
@device_option
@click.option("--arch", metavar="ARCH", help="Without a GPU: whose limits and code to use. By default sm_120.")
@click.option("--budget", metavar="ARCH", help="On a GPU: keep the shared memory of another architecture.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON Lines file to which each record is added as soon as it is there.",
)
@click.option("--resume", is_flag=True, help="Continue --out: skip what it holds of this problem and environment.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a heat map, such as sweep.svg.")
@click.option(
    "--save-best",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Table of best choices, for MLAFLASH_TUNED; entries that it has of other problems stay.",
)
@click.option("--predict", "card", type=click.Choice(tuple(CARDS)), help="With --suite: the cost model's choices.")
@click.option("--time-limit", type=click.FloatRange(min=0), help="With --suite: begin no problem after these seconds.")
@json_option("one JSON line for each candidate; with --suite for each problem")
def sweep(
    suites: tuple[str, ...],
    q_len: int,
    heads: int,
    kv_len: int | None,
    batch: int,
    dtype: str,
    kv_dtype: str | None,
    mask: Any,
    page_size: int,
    sm_scale: float,
    kernels: tuple[str, ...],
    seed: int,
    samples: int,
    device: str,
    arch: str | None,
    out: Path | None,
    resume: bool,
    budget: str | None,
    plot: Path | None,
    save_best: Path | None,
    card: str | None,
    time_limit: float | None,
    as_json: bool,
    **constants: Any,
) -> None:
    """Try kernels' constants on a problem or a suite; rank them.

    Each candidate is held against the oracle before it is timed. On a GPU the median time from a cold level-2 cache
    ranks; without one, which is no timing, those that spill registers come last, and the bytes of KV that the kernel
    loads rank, then spilled bytes, shared memory and registers. With --suite, on a GPU: what the cost model finds
    likely is tried for each problem, and the cost model's choice held against the best of it.
    """
    if suites:
        _refuse_given(_OF_ONE_PROBLEM, "with --suite, whose problems and candidates are fixed")
        tune_suites(suites, kv_dtype, seed, samples, budget, save_best, card, time_limit, as_json)
        return
    _refuse_given(("card", "time_limit"), "without --suite")
    if resume and out is None:
        raise InvalidArgumentError("--resume is given without --out. Name the file to continue.")
    if arch is not None and device == "gpu":
        raise InvalidArgumentError(f"--arch is {arch} with --device gpu, which has its own. Leave one out.")
    target, reason = select_target("emulator" if arch else device, arch, budget)
    if target.kind != "gpu" and (budget is not None or save_best is not None):
        name, value = ("--budget", budget) if budget is not None else ("--save-best", save_best)
        raise InvalidArgumentError(f"{name} is {value} and there is no GPU to time on ({reason}). Leave it out.")
    chosen = given_axes(constants)
    stored = kv_dtype or dtype
    names = kernels or tuple(swept_kernels(stored, list(chosen)) or swept_kernels(stored))
    check_axes(names, list(chosen))
    configs = [config for name in names for config in SPACES[name].candidates(target.kind, chosen, stored)]
    if not configs:
        values = as_options({name: ",".join(map(str, chosen[name])) for name in chosen})
        raise InvalidArgumentError(f"{', '.join(names)} is not built for {values}. See the values of sweep --help.")
    options = {
        "q_len": q_len,
        "heads": heads,
        "kv_len": kv_len or _KV_LEN[target.kind],
        "batch": batch,
        "dtype": dtype,
        **({} if stored == dtype else {"kv_dtype": stored}),
        "mask": mask,
        "page_size": page_size,
        "sm_scale": sm_scale,
    }
    case = _case(options)
    configs, passed_over = restrict(configs, target.device, case, chosen)
    where: dict[str, Any] = {"seed": seed, "device": target.kind}
    where |= {"samples": samples} if target.kind == "gpu" else {"arch": target.device.arch}
    where |= {"budget": budget} if budget is not None else {}

    def command(config: KernelConfig) -> str:
        return repeat(config, options | where)

    file = RecordFile(out, resume=resume) if out is not None else None
    run = Sweep(target, case, seed=seed, command=command, samples=samples)
    records = run.kept(configs, file.records if file else [])
    say = render.note if as_json else render.paragraph
    try:
        with render.progress() as progress:
            found = run.run(configs, done=records, progress=progress)
            say(_where(target, case, len(configs), reason))
            for why, count in passed_over.items():
                say(f"{count} more {why}: passed over")
            if records:
                say(f"{len(records)} of them are in {out} already")
            for record in records if as_json else ():
                render.json_line(record.to_json())
            for record in found:
                if file is not None:
                    file.append(record)
                if as_json:
                    render.json_line(record.to_json())
                records.append(record)
    except KeyboardInterrupt:
        kept = f"{len(records)} records are in {out}; go on with --resume" if out else "there was no --out to keep them"
        render.note(f"interrupted: {kept}")
        raise
    for text in run.notes:
        render.note(text)
    if not as_json:
        _show(records, target)
    ranked = rank(records)
    if plot is not None:
        from mlaflash.lab.plots import plot_sweep

        plot_sweep(records, plot)
    if save_best is not None:
        _save_best(save_best, ranked, case, target, as_json)
    if not ranked or any(record.status in _FAILURES for record in records):
        sys.exit(FAILED)


def _refuse_given(names: Sequence[str], why: str) -> None:
    context = click.get_current_context()
    for param in context.command.params:
        if param.name in names and context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            raise InvalidArgumentError(f"{param.opts[0]} is given {why}. Leave it out.")


def _save_best(path: Path, ranked: Sequence[Record], case: Case, target: Target, as_json: bool) -> None:
    """Keep the fastest tensor-core candidate of one problem."""
    tried = [record for record in ranked if record.kernel in MMA_KERNELS]
    if not tried or case.dtype == "float32" or case.kv_dtype is not None:
        raise InvalidArgumentError(
            "--save-best is given and no tensor-core kernel is ok on a 16-bit cache; tables hold these alone."
        )
    best = tried[0]
    config = SPACES[best.kernel].config(**{name: value for name, value in best.config.items() if name != "nsplit"})
    us = best.median_us or 0.0
    rows = case.q_lens[0] * case.heads
    entry = tuned.Entry(
        rows, case.batch, case.kv_lens[0], case.page_size, cast(Any, config), best.config["nsplit"], us, us
    )
    save_table(path, target.device, [entry], is_predicted=False, say=render.note if as_json else render.line)


def repeat(config: KernelConfig, options: Mapping[str, Any]) -> str:
    """Spell the command that repeats one candidate.

    Parameters
    ----------
    config : KernelConfig
    options : mapping of str to Any
        The problem, and where it runs.
    """
    return f"mlaflash sweep {as_options({'kernel': config.kernel, **config.as_dict(), **options})}"


def _case(options: Mapping[str, Any]) -> Case:
    batch = options["batch"]
    return Case(
        name="-".join(str(value) for value in options.values()),
        q_lens=(options["q_len"],) * batch,
        kv_lens=(options["kv_len"],) * batch,
        heads=options["heads"],
        sm_scale=options["sm_scale"],
        page_size=options["page_size"],
        dtype=options["dtype"],
        kv_dtype=options.get("kv_dtype"),
        mask=options["mask"],
    )


def _where(target: Target, case: Case, count: int, reason: str) -> str:
    problem = (
        f"{count} candidates on {case.batch} x {case.q_lens[0]} tokens x {case.heads} heads, {case.kv_lens[0]} KV "
        f"tokens, {case.dtype}{f', KV {case.kv_dtype}' if case.kv_dtype else ''}, mask {case.mask}"
    )
    if target.kind == "gpu":
        return f"{problem}; {target.name} ({target.device.arch}), medians from a cold level-2 cache"
    why = f" ({reason})" if reason else ""
    return (
        f"{problem}; on the emulator{why} with the limits and the compiler of {target.device.arch}: THIS IS NO TIMING, "
        "it ranks by bytes of KV loaded, spilled bytes, shared memory and registers, and those that spill last"
    )


def _show(records: Sequence[Record], target: Target) -> None:
    # Kernels have other constants: side by side, each names its own.
    is_mixed = len({record.kernel for record in records}) > 1
    axes = [] if is_mixed else list(dict.fromkeys(name for record in records for name in record.config))
    timed = ("median us", "p10", "p90") if target.kind == "gpu" else ()
    columns = [Column("rank", head=True), Column("kernel", "left", head=True)]
    columns += [Column("config", "left", fold=True, head=True)] if is_mixed else []
    columns += [Column(title) for title in (*axes, *timed, "KV bytes", "shared", "regs", "spills")]
    columns.append(Column("", "left", head=True))
    ranked = rank(records)
    others = [record for record in records if record.status != "ok"]
    rows = []
    for place, record in enumerate([*ranked, *others], 1):
        numbers: list[float | None] = [record.config.get(name) for name in axes]
        if timed:
            numbers += [record.median_us, record.p10_us, record.p90_us]
        numbers += [record.kv_bytes, record.shared_bytes, record.registers, record.spill_bytes]
        shown_place = str(place) if record.status == "ok" else "-"
        config = (" ".join(f"{name}={value}" for name, value in record.config.items()),) if is_mixed else ()
        rows.append((shown_place, record.kernel, *config, *map(_number, numbers), record.status))
    if rows:
        render.table(columns, rows)
    over = [record for record in others if record.status == "invalid" and record.shared_bytes > record.shared_limit]
    if over:
        render.paragraph(
            f"{len(over)} invalid: they ask for more shared memory than the {over[0].shared_limit} bytes that "
            f"{target.device.name} ({target.device.arch}) allows a block"
        )
    for record in others:
        if record not in over:
            render.line(f"{record.status}: {record.reason}")
            render.line(f"  repeat with: {record.command}")
    if not ranked:
        render.line("no candidate is ok")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
