"""``mlaflash soak``."""

from __future__ import annotations

import sys
from typing import Any

import click

from mlaflash.commands import render
from mlaflash.commands.options import FAILED, device_option, json_option
from mlaflash.commands.render import Column
from mlaflash.lab import soak as lab
from mlaflash.lab.fuzz import Place
from mlaflash.lab.target import select_target

_COLUMNS = (Column("memory", "left", head=True), Column("first"), Column("last"), Column("grown"), Column("allowed"))


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="How long to go on."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all calls.")
@click.option(
    "--check-every",
    type=click.IntRange(min=1),
    default=lab.CHECK_EVERY,
    show_default=True,
    help="Of how many results one is held against the reference.",
)
@click.option("--shared", is_flag=True, help="Others use the GPU too: its free memory does not count.")
@device_option
@json_option("one JSON document")
def soak(minutes: float, seed: int, check_every: int, shared: bool, device: str, as_json: bool) -> None:
    """Replay CUDA graphs of changing shapes for minutes.

    Plans of every kind are made, captured, replayed with other requests, captured again and dropped, with plain calls
    in between. A wrong result, or memory that grows, ends with exit status 1. The time begins when the kernels are
    compiled. Without a GPU the emulator makes the calls, without graphs.
    """
    target, reason = select_target(device)
    where = target.name if target.kind == "gpu" else f"the emulator{f' ({reason})' if reason else ''}"
    say = render.note if as_json else render.paragraph
    say(f"soak on {where}, seed {seed}: {minutes:g} minutes")
    with render.progress() as progress:
        outcome = lab.soak(
            Place(target.kind), seed, 60 * minutes, check_every=check_every, is_shared=shared, progress=progress
        )
    if as_json:
        render.document(_document(outcome, target.name, seed, minutes))
    elif outcome.samples:
        render.table(_COLUMNS, [_row(name, outcome) for name in outcome.growth()])
    for text in (*outcome.findings, *outcome.complaints()):
        (render.note if as_json else render.line)(f"FINDING {text}")
    calls = outcome.calls
    say(
        f"{'passed' if outcome.passed else 'FAILED'}: {calls['replay']:,} replays of {calls['capture']:,} graphs, "
        f"{calls['run']:,} runs, {calls['call']:,} calls, {calls['plan']:,} plans; {calls['checked']:,} results "
        f"checked, {len(outcome.findings)} findings"
    )
    if not outcome.passed:
        sys.exit(FAILED)


def _row(name: str, outcome: lab.Outcome) -> tuple[str, ...]:
    first, last = (getattr(outcome.samples[at], name) for at in (0, -1))
    return tuple(map(str, (name, *(f"{n:,}" for n in (first, last, outcome.growth()[name], lab.LIMITS[name])))))


def _document(outcome: lab.Outcome, device: str, seed: int, minutes: float) -> dict[str, Any]:
    return {
        "device": device,
        "seed": seed,
        "minutes": minutes,
        "calls": dict(outcome.calls),
        "memory": {name: {"grown": grown, "allowed": lab.LIMITS[name]} for name, grown in outcome.growth().items()},
        "samples": [sample._asdict() for sample in outcome.samples],
        "findings": outcome.findings,
        "complaints": outcome.complaints(),
        "passed": outcome.passed,
    }
