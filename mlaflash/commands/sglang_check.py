"""``mlaflash sglang-check``."""

from __future__ import annotations

import sys
import time

import click

from mlaflash.commands import render
from mlaflash.commands.options import FAILED, json_option
from mlaflash.commands.render import Column
from mlaflash.device import Device, parse_arch
from mlaflash.integrations import signatures
from mlaflash.integrations.sglang import PACKAGE
from mlaflash.integrations.sglang_check import FP8_SHAPES, Outcome, check_engine, load_engine

_COLUMNS = (
    Column("mask", "left", head=True),
    Column("pool", "left", head=True),
    Column("requests", head=True),
    Column("prefix", head=True),
    Column("draft", head=True),
    Column("from oracle"),
    Column("from SGLang"),
    Column("planning, us"),
    Column("a layer, us"),
    Column("SGLang, us"),
    Column("ratio"),
    Column("", "left", head=True),
)


@click.command("sglang-check")
@click.option("--sources", "only_sources", is_flag=True, help="Compare the sources alone; needs no GPU.")
@json_option("one JSON document")
def sglang_check(only_sources: bool, as_json: bool) -> None:
    """Check the plugin against an installed SGLang.

    No server is started. First the sources that the plugin reaches into are compared with those it was made for. Then
    the Triton backend's own verify call runs on synthetic batches with mlaflash's kernels and with SGLang's. mlaflash's
    results are held against the oracle and against SGLang's, and both are timed: a call, as each layer makes one, and
    what planning adds to the first of a step.
    """
    started = time.perf_counter()
    say = render.note if as_json else render.paragraph
    version, root = signatures.installed(PACKAGE)
    record = signatures.load(PACKAGE, version)
    different = signatures.differences(record, signatures.read(record, root))
    say(f"SGLang {version}: {'its sources are not those recorded' if different else 'its sources are those recorded'}")
    for line in different:
        render.note(f"FAIL {line}")
    outcomes: list[Outcome] = []
    gpu = None
    if not different and not only_sources:
        device = Device.current()
        gpu = device.name
        say(f"verify calls of TritonAttnBackend on {gpu}: MLA, ragged prefixes, scattered slots")
        with render.progress() as progress:
            fp8_shapes = (
                FP8_SHAPES if parse_arch(device.arch)[0] >= (8, 9) else ()
            )  # others convert no numbers of 8 bits
            outcomes = list(check_engine(load_engine(), fp8_shapes=fp8_shapes, progress=progress))
    failed = [outcome for outcome in outcomes if outcome.failure]
    passed = not different and not failed
    if as_json:
        results = [outcome.as_dict() for outcome in outcomes]
        render.document(
            {"version": version, "device": gpu, "passed": passed, "differences": different, "results": results}
        )
    elif outcomes:
        render.table(_COLUMNS, [_row(outcome) for outcome in outcomes])
    for outcome in failed:
        shape = f"{outcome.batch} x {outcome.q_len} at {outcome.prefix}"
        render.note(f"FAIL {outcome.kind}, {outcome.pool}, {shape}: {outcome.failure}")
    say(f"{'passed' if passed else 'FAILED'} ({time.perf_counter() - started:.1f} s)")
    if not passed:
        sys.exit(FAILED)


def _row(outcome: Outcome) -> tuple[str, ...]:
    times = outcome.step_us, outcome.layer_us, outcome.sglang_us
    return (
        outcome.kind,
        outcome.pool,
        str(outcome.batch),
        str(outcome.prefix),
        str(outcome.q_len),
        f"{outcome.oracle_error:.1e}" if outcome.oracle_error is not None else "-",
        f"{outcome.sglang_error:.1e}",
        *("-" if us is None else f"{us:.1f}" for us in times),
        f"{outcome.sglang_us / outcome.layer_us:.1f}x" if outcome.sglang_us and outcome.layer_us else "-",
        "FAIL" if outcome.failure else "ok",
    )
