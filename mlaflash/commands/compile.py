"""``mlaflash compile``."""

from __future__ import annotations

import sys

import click

from mlaflash.commands import render
from mlaflash.commands.options import DTYPES, FAILED, json_option
from mlaflash.commands.render import Column
from mlaflash.device import Device
from mlaflash.errors import MissingDependencyError, NoDeviceError
from mlaflash.lab.target import DEFAULT_ARCH
from mlaflash.lab.variants import ARCHS, COMPILED, Compilation, compile_all, spell, variants
from mlaflash.settings import settings

_COLUMNS = (
    Column("kernel", "left", head=True),
    Column("arch", "left", head=True),
    Column("config", "left", fold=True, head=True),
    Column("regs"),
    Column("spills"),
    Column("shared"),
    Column("limit"),
    Column("s"),
    Column("", "left", head=True),
)


@click.command("compile")
@click.option(
    "--arch",
    "archs",
    metavar="ARCH",
    multiple=True,
    help="Such as sm_120 (repeatable). By default MLAFLASH_ARCH, else the GPU's own, else sm_120.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help=f"All of {', '.join(ARCHS)} in place of one by default; where --arch is given, that counts and not --all.",
)
@click.option(
    "--kernel", "kernels", type=click.Choice(COMPILED), multiple=True, help="Kernel (repeatable; default all)."
)
@click.option(
    "--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, help="Element type (repeatable; default all)."
)
@click.option(
    "--out-dtype",
    "out_dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    help="Element type of out (repeatable; default that of --dtype, and float32).",
)
@click.option(
    "--tiles",
    type=click.Choice(("shipped", "all")),
    default="shipped",
    show_default=True,
    help="Tiles that a call chooses by itself, or also all that sweep tries and the architecture has the memory for.",
)
@json_option("one JSON array")
def compile_(
    archs: tuple[str, ...],
    everything: bool,
    kernels: tuple[str, ...],
    dtypes: tuple[str, ...],
    out_dtypes: tuple[str, ...],
    tiles: str,
    as_json: bool,
) -> None:
    """Compile kernels into the cache; needs no GPU.

    Compiles every form that a call chooses by itself: with and without a soft cap, new_kv, and a cache in two parts.
    Prints registers, spilled bytes and shared memory of each. Exit status 1 where one does not compile, or is shipped
    and spills; a tile that only sweep tries may spill, and its row says so.
    """
    if not archs:
        archs = ARCHS if everything else (_default_arch(),)
    wanted, refused = [], []
    for arch in dict.fromkeys(archs):
        found, reasons = variants(
            arch, dtypes or DTYPES, kernels or COMPILED, out_dtypes=out_dtypes, every_tile=tiles == "all"
        )
        wanted += found
        refused += reasons
    with render.progress() as progress:
        results = list(compile_all(wanted, progress))
    if as_json:
        render.document([result.as_dict() for result in results])
    elif results:
        render.table(_COLUMNS, [_row(result) for result in results])
    say = render.note if as_json else render.line
    for reason in refused:
        say(f"left out: {reason}")
    failed = [result for result in results if not result.passed]
    for result in failed:
        say(f"FAIL {_name(result)}: {_why(result)}")
    cached = sum(result.compiled is not None and result.compiled.cached for result in results)
    spilling = sum(result.passed and result.spills for result in results)
    spill = f", {spilling} spill and no call chooses them" if spilling else ""
    say(f"{len(results)} kernels, {cached} of them from the cache, {len(failed)} failed{spill}")
    if failed:
        sys.exit(FAILED)


def _default_arch() -> str:
    configured = settings().arch
    if configured is not None:
        return configured
    try:
        return Device.current().arch
    except (MissingDependencyError, NoDeviceError):
        return DEFAULT_ARCH


def _name(result: Compilation) -> str:
    return f"{result.variant.kernel} for {result.variant.arch} ({spell(result.variant.config)})"


def _why(result: Compilation) -> str:
    if result.compiled is None:
        return result.error
    if result.spills:
        return f"{result.compiled.spill_bytes} bytes of registers are spilled"
    return f"{result.shared_bytes} bytes of shared memory where {result.variant.shared_limit} are allowed"


def _row(result: Compilation) -> tuple[str, ...]:
    compiled = result.compiled
    return (
        result.variant.kernel,
        result.variant.arch,
        spell(result.variant.config),
        str(compiled.registers) if compiled else "-",
        str(compiled.spill_bytes) if compiled else "-",
        str(result.shared_bytes),
        str(result.variant.shared_limit),
        "cached" if compiled and compiled.cached else f"{compiled.seconds:.1f}" if compiled else "-",
        "FAIL" if not result.passed else "spills" if result.spills else "ok",
    )
