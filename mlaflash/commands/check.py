"""``mlaflash check``."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

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
from mlaflash.errors import InvalidArgumentError
from mlaflash.lab import check as lab
from mlaflash.lab import token_exact as tokens
from mlaflash.lab.inputs import Case
from mlaflash.lab.presets import PRESETS, cases
from mlaflash.lab.target import Target, select_target

_COLUMNS = (
    Column("kernel", "left", head=True),
    Column("case", "left", fold=True, head=True),
    Column("max abs"),
    Column("max rel"),
    Column("tolerance"),
    Column("", "left", head=True),
)

_TOKEN_COLUMNS = (
    Column("type", "left", head=True),
    Column("decoding", "left", head=True),
    Column("accepted"),
    Column("by steps"),
    Column("by time"),
    Column("same tokens"),
    Column("from plain"),
    Column("from oracle"),
    Column("gap (bound)"),
    Column("", "left", head=True),
)


@click.command()
@click.option(
    "--preset",
    type=click.Choice(tuple(PRESETS)),
    default=next(iter(PRESETS)),
    show_default=True,
    help="Problems to run; fewer and shorter ones on the emulator.",
)
@click.option(
    "--kernel",
    "kernels",
    type=click.Choice(lab.CHECKED),
    multiple=True,
    help="Kernel to run (repeatable; default all).",
)
@click.option(
    "--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="Element type (repeatable; default all)."
)
@click.option(
    "--kv-dtype",
    "kv_dtypes",
    type=click.Choice(KV_DTYPES),
    multiple=True,
    help="What the cache holds (repeatable; default all).",
)
@click.option("--case", "names", metavar="NAME", multiple=True, help="Problem of the preset (repeatable; default all).")
@axis_options(several=False)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random inputs.")
@click.option(
    "--token-exact",
    is_flag=True,
    help="Instead, decode with a small model: plainly, by chains and by trees of drafts, token by token the same.",
)
@device_option
@json_option("one JSON document")
def check(
    preset: str,
    kernels: tuple[str, ...],
    dtypes: tuple[str, ...],
    kv_dtypes: tuple[str, ...],
    names: tuple[str, ...],
    seed: int,
    token_exact: bool,
    device: str,
    as_json: bool,
    **constants: Any,
) -> None:
    """Hold every kernel against the oracle.

    Runs on the GPU when there is one, else on the emulator, and says which. A row of combine is the kernel tile with
    its KV split, whose parts combine merges. The relative error of an element is relative to the root mean square of
    its row where that is larger than the element.
    """
    started = time.perf_counter()
    target, reason = select_target(device)
    axes = given_axes(constants)
    if token_exact:
        if kernels or kv_dtypes or names or axes:
            raise InvalidArgumentError(
                "--token-exact was given with options of single kernels and problems; it takes --dtype, --seed, "
                "--device and --json. Leave the others out."
            )
        _token_exact(target, reason, dtypes or tokens.DTYPES, seed, as_json, started)
        return
    selected = lab.select(cases(preset, target.kind), dtypes, names, kv_dtypes)
    labels = lab.labels(kernels, axes.get("nsplit"), selected)
    say = render.note if as_json else render.paragraph
    by_name = {case.name: case for case in selected}
    results: list[lab.CheckResult] = []
    with render.progress() as progress:
        found = lab.check(
            target, selected, kernels=labels, required=kernels, constants=axes, seed=seed, progress=progress
        )
        say(_where(target, preset, selected, reason))
        for result in found:
            if isinstance(result, lab.Skip):
                if not kernels and not lab.takes(result.kernel, by_name[result.case]):
                    continue  # of element types that the table shows; whoever names the kernel is told
                render.note(f"skipped {result.kernel} on {result.case}: {result.reason}")
            else:
                results.append(result)

    idle = [label for label in labels if label not in {result.kernel for result in results}]
    failed = [result for result in results if not result.passed]
    passed = not failed and not idle
    if as_json:
        render.document({"device": target.name, "passed": passed, "results": [r.as_dict() for r in results]})
    else:
        render.table(_COLUMNS, [_row(result) for result in results])
    tell = render.note if as_json else render.line
    told: set[str] = set()
    for result in failed:
        why = _why(result)
        # A compiler's log is told once, not for every problem.
        tell(f"FAIL {result.kernel} on {result.case}: {why if why not in told else 'as above'}")
        told |= {why} if "\n" in why else set()
        tell(f"  repeat with: {repeat(result, preset, seed, target)}")
    for label in idle:
        tell(f"FAIL {label}: it ran no problem of this selection")
    seconds = time.perf_counter() - started
    say(
        f"{'passed' if passed else 'FAILED'}: {len(results) - len(failed)} of {len(results)} results are right "
        f"({target.name}, {seconds:.1f} s)"
    )
    if not passed:
        sys.exit(FAILED)


def _token_exact(target: Target, reason: str, dtypes: Sequence[str], seed: int, as_json: bool, started: float) -> None:
    place, config, requests, count, defrag_steps = tokens.settings_for(target.kind)
    say = render.note if as_json else render.paragraph
    outcomes: list[tokens.Outcome] = []
    with render.progress() as progress:
        where = target.name if target.kind == "gpu" else f"the emulator{f' ({reason})' if reason else ''}"
        say(
            f"token-exact decoding on {where}: {requests} requests of {count} tokens, a model of {config.layers} "
            f"layers and {config.heads} heads; compaction in every step, defragmentation every {defrag_steps}"
        )
        for dtype, deterministic in itertools.product(dtypes, (True, False)):
            outcomes += tokens.check_tokens(
                place,
                dataclasses.replace(config, dtype=dtype),
                requests=requests,
                count=count,
                deterministic=deterministic,
                seed=seed,
                defrag_steps=defrag_steps,
                progress=progress,
            )
    failed = [outcome for outcome in outcomes if outcome.failure]
    if as_json:
        passed = not failed
        render.document({"device": target.name, "passed": passed, "results": [o.as_dict() for o in outcomes]})
    else:
        render.table(_TOKEN_COLUMNS, [_token_row(outcome, target.kind == "gpu") for outcome in outcomes])
        render.paragraph(
            "speed-up: of plain decoding, by steps and by time. gap: the widest between the oracle's two best logits "
            "where a sequence first leaves plain decoding; it must stay below the bound, twice the largest error that "
            "a logit may have."
        )
    tell = render.note if as_json else render.line
    for outcome in failed:
        tell(f"FAIL {outcome.decoding}, {outcome.dtype}, deterministic={outcome.deterministic}: {outcome.failure}")
    seconds = time.perf_counter() - started
    say(
        f"{'FAILED' if failed else 'passed'}: {len(outcomes) - len(failed)} of {len(outcomes)} ways to decode are "
        f"right ({target.name}, {seconds:.1f} s)"
    )
    if failed:
        sys.exit(FAILED)


def _token_row(outcome: tokens.Outcome, is_timed: bool) -> tuple[str, ...]:
    same = outcome.requests - len(outcome.divergences)
    return (
        f"{outcome.dtype}{', deterministic' if outcome.deterministic else ''}",
        outcome.decoding,
        f"{outcome.accepted:.2f}",
        f"{outcome.plain_steps / outcome.steps:.2f}x",
        f"{outcome.plain_seconds / outcome.seconds:.2f}x" if is_timed else "-",
        f"{same}/{outcome.requests}",
        f"{outcome.difference:.1e}" if outcome.difference else "same bits",
        f"{outcome.logit_error:.1e}",
        f"{outcome.widest_gap:.1e} ({outcome.bound:.0e})" if outcome.divergences else "-",
        "FAIL" if outcome.failure else "ok",
    )


def repeat(result: lab.CheckResult, preset: str, seed: int, target: Target) -> str:
    """Spell the command that repeats one result.

    Parameters
    ----------
    result : CheckResult
    preset : str
    seed : int
    target : Target
    """
    constants = result.config.as_dict() if result.config is not None else {}
    where = {"seed": seed, "device": target.kind}
    options = {"preset": preset, "case": result.case, "kernel": result.kernel, **constants, **where}
    return f"mlaflash check {as_options(options)}"


def _where(target: Target, preset: str, selected: Sequence[Case], reason: str) -> str:
    longest = max(max(case.kv_lens, default=0) for case in selected)
    if target.kind == "gpu":
        return f"{preset} on {target.name} ({target.device.arch}), contexts up to {longest} tokens"
    why = f" ({reason})" if reason else ""
    return (
        f"{preset} on the emulator{why}: the kernels' source compiled for this CPU, nothing has run on a GPU; contexts "
        f"up to {longest} tokens, limits of shared memory as on {target.device.arch}"
    )


def _row(result: lab.CheckResult) -> tuple[str, ...]:
    found = result.comparison
    return (
        result.kernel,
        result.case,
        f"{found.max_abs:.1e}" if found else "-",
        f"{found.max_rel:.1e}" if found else "-",
        f"{result.tolerance:.1e}",
        "ok" if result.passed else "FAIL",
    )


def _why(result: lab.CheckResult) -> str:
    return lab.describe(result.comparison) if result.comparison else result.error
