"""``mlaflash fuzz``."""

from __future__ import annotations

import sys
from typing import Any

import click

from mlaflash.commands import render
from mlaflash.commands.options import FAILED, device_option, json_option
from mlaflash.commands.render import Column
from mlaflash.lab import fuzz as lab
from mlaflash.lab.target import select_target

_COLUMNS = (
    Column("about", "left", head=True),
    Column("right"),
    Column("refused"),
    Column("findings"),
)


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="How long to go on."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all trials.")
@click.option("--trial", type=click.IntRange(min=0), help="Repeat this one alone.")
@device_option
@json_option("one JSON document")
def fuzz(minutes: float, seed: int, trial: int | None, device: str, as_json: bool) -> None:
    """Make random calls, right and wrong ones.

    They cover the whole interface, in checked mode. Each must give the reference's answer or one of the library's own
    errors. Anything else is printed with the command that repeats it, and ends with exit status 1.
    """
    target, reason = select_target(device)
    where = target.name if target.kind == "gpu" else f"the emulator{f' ({reason})' if reason else ''}"
    say = render.note if as_json else render.paragraph
    tell = render.note if as_json else render.line
    say(f"fuzz on {where}, seed {seed}: {f'trial {trial}' if trial is not None else f'{minutes:g} minutes'}")
    tally = lab.Tally()
    with render.progress() as progress:
        found = lab.fuzz(
            lab.Place(target.kind),
            seed,
            seconds=60 * minutes if trial is None else None,
            trials=None if trial is None else [trial],
            progress=progress,
        )
        for result in found:
            if isinstance(result, lab.Tally):
                tally = result
                continue
            tell(f"FINDING in trial {result.trial}, {result.kind}: {result.reason}")
            tell(f"  {result.problem}")
            tell(f"  repeat with: mlaflash fuzz --device {target.kind} --seed {seed} --trial {result.trial}")
    if as_json:
        render.document(_document(tally, target.name, seed))
    elif trial is None:
        render.table(_COLUMNS, [_row(kind, tally) for kind in lab.KINDS])
    count = len(tally.findings)
    say(
        f"{'FAILED' if count else 'passed'}: {tally.trials} trials, {tally.right.total()} right, "
        f"{tally.refused.total()} refused, {count} findings"
    )
    if count:
        sys.exit(FAILED)


def _row(kind: str, tally: lab.Tally) -> tuple[str, ...]:
    findings = sum(finding.kind == kind for finding in tally.findings)
    return kind, str(tally.right[kind]), str(tally.refused[kind]), str(findings)


def _document(tally: lab.Tally, device: str, seed: int) -> dict[str, Any]:
    return {
        "device": device,
        "seed": seed,
        "trials": tally.trials,
        "right": dict(tally.right),
        "refused": dict(tally.refused),
        "findings": [
            {"trial": finding.trial, "kind": finding.kind, "problem": finding.problem, "reason": finding.reason}
            for finding in tally.findings
        ],
        "passed": not tally.findings,
    }
