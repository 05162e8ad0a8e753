"""The part of ``mlaflash sweep`` that tunes for suites, and the tables that it writes."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from mlaflash import tuned
from mlaflash.commands import render
from mlaflash.commands.bench import make_runner, suite_steps
from mlaflash.commands.options import FAILED
from mlaflash.commands.render import Column
from mlaflash.device import Device, apply_budget
from mlaflash.errors import InvalidArgumentError
from mlaflash.lab import tune as lab
from mlaflash.lab.environment import revision, versions
from mlaflash.lab.tune import Candidate, Tuned

_COLUMNS = (
    Column("B"),
    Column("rows"),
    Column("kv"),
    Column("page"),
    Column("tried"),
    Column("best us"),
    Column("best", "left", head=True),
    Column("model's us"),
    Column("slower by"),
    Column("model's choice", "left"),
)


def tune_suites(
    suites: Sequence[str],
    kv_dtype: str | None,
    seed: int,
    samples: int,
    budget: str | None,
    save_best: Path | None,
    card: str | None,
    time_limit: float | None,
    as_json: bool,
) -> None:
    """Tune for the problems of suites, or save what the cost model chooses for a card.

    Parameters
    ----------
    suites : sequence of str
    kv_dtype : str or None
        What the caches hold; None is what the suites say.
    seed, samples : int
    budget : str or None
    save_best : Path or None
    card : str or None
        Predict for it; nothing runs.
    time_limit : float or None
        Seconds.
    as_json : bool
    """
    steps = suite_steps(suites, kv_dtype)
    if save_best is not None and any(step.shape.kv_dtype for step in steps):
        raise InvalidArgumentError(
            f"--save-best is {save_best} and --kv-dtype {kv_dtype}; tables are of 16-bit caches. Leave one out."
        )
    say = render.note if as_json else render.line
    if card is not None:
        if save_best is None:
            raise InvalidArgumentError("--predict is given without --save-best; see predictions with mlaflash bench.")
        device = Device.for_card(card)
        limited = device if budget is None else apply_budget(device, budget)
        save_table(save_best, limited, lab.predicted(steps, limited), is_predicted=True, say=say)
        return
    runner = make_runner(budget)
    found: list[Tuned] = []
    with render.progress() as progress:
        seconds = math.inf if time_limit is None else time_limit
        for each in lab.tune(runner, steps, seed=seed, samples=samples, seconds=seconds, progress=progress):
            found.append(each)
            if as_json:
                render.json_line(json.dumps(each.as_dict(), allow_nan=False))
    if not as_json:
        _show(found, len(steps))
    if save_best is not None:
        measured = [(each, entry) for each in found if (entry := each.entry()) is not None]
        entries = [entry for each, entry in measured if each.is_worth_an_entry]
        settled = {entry.key for _, entry in measured}
        save_table(save_best, runner.device, entries, is_predicted=False, say=say, settled=settled)
    failed = [(each, tried) for each in found for tried in each.candidates if tried.median_us is None]
    for each, tried in failed:
        say(f"FAIL {_choice(tried)} on {each.step.problem}: {tried.reason}")
    if failed:
        sys.exit(FAILED)


def save_table(
    path: Path,
    device: Device,
    entries: Sequence[tuned.Entry],
    *,
    is_predicted: bool,
    say: Callable[[str], None],
    settled: Collection[tuned.Key] = (),
) -> None:
    """Write entries to a table, beside those that it has of other classes of problems.

    Parameters
    ----------
    path : Path
    device : Device
        With the limits of the budget where there is one.
    entries : sequence of Entry
    is_predicted : bool
    say : callable
        Told what was done.
    settled : collection of Key
        Classes that were measured: the entries that the table has of them go.

    Raises
    ------
    InvalidArgumentError
        The file cannot be written, or is a table of another GPU or budget, or is none.
    """
    used: dict[str, Any] = {"versions": versions(), "revision": revision()}
    origin = used | {"command": f"mlaflash {shlex.join(sys.argv[1:])}"}
    kept: Sequence[tuned.Entry] = ()
    if path.exists():
        old = tuned.read(path)
        if not old.fits(device) or old.is_predicted != is_predicted:
            raise InvalidArgumentError(
                f"--save-best is {path}, a table of {old.gpu} with {old.shared_per_block} bytes a block"
                f"{', predicted' if old.is_predicted else ''}; this one is of another. Name another file."
            )
        kept = old.entries
    table = tuned.Table.of(device, lab.merged(kept, entries, settled), is_predicted=is_predicted, origin=origin)
    try:
        path.write_text(table.to_json(), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"--save-best is {path}, which cannot be written: {error}.") from error
    say(f"{len(table.entries)} choices in {path}; use it with MLAFLASH_TUNED={path}")


def _show(found: Sequence[Tuned], wanted: int) -> None:
    rows = []
    for each in found:
        shape, best, chosen = each.step.shape, each.best, each.candidates[0]
        rows.append(
            (
                str(len(each.step.kv_lens)),
                str(shape.rows),
                f"{shape.kv_len:,}",
                str(shape.page_size),
                str(len(each.candidates)),
                _number(best.median_us if best else None),
                _choice(best) if best else "-",
                _number(chosen.median_us),
                "-" if each.regret is None else f"{each.regret:.1%}",
                _choice(chosen),
            )
        )
    render.table(_COLUMNS, rows)
    if len(found) < wanted:
        render.line(f"{wanted - len(found)} of {wanted} problems were not begun within the time limit")
    regrets = lab.regrets(found)
    if regrets is not None:
        render.line(
            f"the cost model's choices are slower than the best by {regrets[0]:.1%} in the median, "
            f"{regrets[1]:.1%} at most"
        )


def _choice(candidate: Candidate) -> str:
    config = candidate.config
    return f"{config.kernel} {config.rows} rows x {candidate.num_splits} splits"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
