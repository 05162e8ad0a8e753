"""``mlaflash report``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from mlaflash.commands import render
from mlaflash.commands.bench import make_runner, repeat
from mlaflash.commands.info import collect
from mlaflash.commands.options import FAILED, json_option
from mlaflash.errors import InvalidArgumentError
from mlaflash.lab import bench as lab
from mlaflash.lab import check as lab_check
from mlaflash.lab.ceilings import known_ceilings
from mlaflash.lab.environment import revision
from mlaflash.lab.presets import PRESETS, cases
from mlaflash.lab.records import model_error, to_document
from mlaflash.lab.runner import Step
from mlaflash.lab.suites import SUITES, suite
from mlaflash.lab.target import Target, select_target

KIND = "mlaflash report"
_SAMPLES = 20
_SEED = 0
_CHECK_SHARE = 0.4
_PRESET = next(iter(PRESETS))


@click.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("mlaflash-report.json"),
    show_default=True,
    help="File to write.",
)
@click.option("--budget", metavar="ARCH", help="Keep the shared memory of another architecture, such as sm_120.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=280.0,
    show_default=True,
    help="Seconds after which nothing more is begun.",
)
@json_option("the document")
def report(out: Path, budget: str | None, time_limit: float, as_json: bool) -> None:
    """Check and time everything on this GPU, for a bug report.

    Holds every kernel against the oracle, measures the ceilings of the GPU, and times both suites of bench, measured
    beside predicted: one JSON file, in under five minutes. What the time did not allow is said. Exit status 1 where
    something is wrong.
    """
    begin = time.monotonic()

    def left() -> float:
        return time_limit - (time.monotonic() - begin)

    runner = make_runner(budget)
    target, _ = select_target("gpu", None, budget)
    steps = [Step(shape, shape.check_lens(None)) for name in SUITES for shape in suite(name)]
    with render.progress() as progress:
        checked = _check(target, _CHECK_SHARE * time_limit, progress)
        ceilings = known_ceilings(runner.device, anew=True)
        limits = {"budget": budget} if budget is not None else {}
        run = lab.Bench(
            runner,
            ceilings,
            seed=_SEED,
            samples=_SAMPLES,
            budget=budget,
            command=lambda step: repeat(step, {"seed": _SEED, "samples": _SAMPLES, **limits}),
        )
        records = list(run.run(steps, progress, seconds=left()))
    error = model_error(records)
    wrong = [record for record in records if record.status != "ok"]
    document: dict[str, Any] = {
        "kind": KIND,
        "environment": collect(),
        "revision": revision(),
        "device": asdict(runner.device),
        "budget": budget,
        "check": checked,
        "ceilings": asdict(ceilings),
        "bench": to_document(records),
        "steps_not_begun": len(steps) - len(records),
        "model_error": None if error is None else {"median": error[0], "largest": error[1]},
        "passed": checked["failed"] == 0 and not wrong,
        "seconds": round(time.monotonic() - begin, 1),
    }
    try:
        out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as problem:
        raise InvalidArgumentError(f"--out is {out}, which cannot be written: {problem}. Name another file.") from None
    say = render.note if as_json else render.line
    if as_json:
        render.document(document)
    say(
        f"check: {checked['right']} results right, {checked['failed']} wrong, {checked['not_begun']} problems not begun"
    )
    say(
        f"ceilings: {ceilings.read_gb_s:,.0f} GB/s streaming read, {ceilings.mma_tflop_s:,.0f} TFLOP/s mma.sync, "
        f"{ceilings.fma_tflop_s:,.0f} TFLOP/s float32"
    )
    say(f"suites: {len(records)} of {len(steps)} steps timed, {len(wrong)} of them wrong or failed")
    if error is not None:
        say(f"cost model against measured times: {error[0]:.1%} off in the median, {error[1]:.1%} at most")
    for record in wrong:
        say(f"{record.status}: {record.reason}\n  repeat with: {record.command}")
    say(f"{document['seconds']} s; the report is {out}")
    if not document["passed"]:
        sys.exit(FAILED)


def _check(target: Target, seconds: float, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Hold the kernels against the oracle, as long as the time allows, the problems of the preset in their order."""
    begin = time.monotonic()
    results: list[dict[str, Any]] = []
    failures: list[str] = []
    # Shorter ones first: what the time cuts off are the long contexts.
    selected = sorted(cases(_PRESET, target.kind), key=lambda case: case.macs)
    reached: set[str] = set()
    for result in lab_check.check(
        target, selected, kernels=lab_check.labels((), None, selected), seed=_SEED, progress=progress
    ):
        if result.case not in reached and time.monotonic() - begin > seconds:
            break
        reached.add(result.case)
        if isinstance(result, lab_check.CheckResult):
            results.append(result.as_dict())
            if not result.passed:
                failures.append(f"{result.kernel} on {result.case}: {result.error or 'wrong'}")
    return {
        "preset": _PRESET,
        "right": sum(result["passed"] for result in results),
        "failed": len(failures),
        "failures": failures,
        "not_begun": len(selected) - len(reached),
        "results": results,
    }
