"""``mlaflash compile``."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import click
from click.core import ParameterSource

from mlaflash.commands import render
from mlaflash.commands.options import DTYPES, FAILED, KV_DTYPES, SHAPE_NAMES, given_shape, json_option, shape_options
from mlaflash.commands.render import Column
from mlaflash.device import apply_budget
from mlaflash.errors import InvalidArgumentError
from mlaflash.lab.target import Built, built_key, device_or_default
from mlaflash.lab.variants import ARCHS, COMPILED, Compilation, compile_all, spell, variant, variants
from mlaflash.schedule import Launch
from mlaflash.shape import mask_launches, plan_launches

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
    "--dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    help="Element type (repeatable; default all, with --plan bfloat16).",
)
@click.option(
    "--kv-dtype",
    "kv_dtypes",
    type=click.Choice(KV_DTYPES),
    multiple=True,
    help="What the cache holds (repeatable; default --dtype itself and all of 8 bits, with --plan --dtype alone).",
)
@click.option(
    "--out-dtype",
    "out_dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    help="Element type of out (repeatable; default that of --dtype, and without --plan float32).",
)
@click.option(
    "--tiles",
    type=click.Choice(("shipped", "all")),
    default="shipped",
    show_default=True,
    help="Tiles that a call chooses by itself, or also all that sweep tries and the architecture has the memory for.",
)
@click.option(
    "--plan", "is_plan", is_flag=True, help="Only what a VerifyPlan needs that is made for these steps at most:"
)
@shape_options
@json_option("one JSON array")
def compile_(
    archs: tuple[str, ...],
    everything: bool,
    kernels: tuple[str, ...],
    dtypes: tuple[str, ...],
    kv_dtypes: tuple[str, ...],
    out_dtypes: tuple[str, ...],
    tiles: str,
    as_json: bool,
    is_plan: bool,
    budget: str | None,
    **arguments: Any,
) -> None:
    """Compile kernels into the cache; needs no GPU.

    Compiles every form that a call chooses by itself: with and without a soft cap, new_kv, and a cache in two parts.
    With --plan, exactly the kernels of a VerifyPlan, and those that pack its tree masks: made on an architecture's
    usual card, or on this machine's GPU where no architecture is named. Prints registers, spilled bytes and shared
    memory of each. Exit status 1 where one does not compile, or is shipped and spills; a tile that only sweep tries
    may spill, and its row says so.
    """
    _check_together(click.get_current_context(), is_plan)
    names = archs or (ARCHS if everything else (None,))
    wanted, refused = [], []
    for device in map(device_or_default, dict.fromkeys(names)):
        if is_plan:
            limits = device if budget is None else apply_budget(device, budget)
            launches: dict[Built, Launch] = {}
            types = itertools.product(dtypes or ("bfloat16",), kv_dtypes or (None,), out_dtypes or (None,))
            for dtype, kv_dtype, out_dtype in types:
                shape, _ = given_shape(arguments, dtype, kv_dtype, out_dtype)
                steps = *plan_launches(shape, limits), *mask_launches(shape)
                launches |= {built_key(step): step for step in steps}
            wanted += [variant(step, limits) for step in launches.values()]
            continue
        found, reasons = variants(
            device.arch,
            dtypes or DTYPES,
            kernels or COMPILED,
            out_dtypes=out_dtypes,
            kv_dtypes=kv_dtypes,
            every_tile=tiles == "all",
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
    if is_plan:
        shape, _ = given_shape(arguments, "bfloat16", None, None)
        say(
            f"for a VerifyPlan of {shape.num_heads} heads, at most {shape.batch} requests, {shape.q_len} query tokens "
            f"and {shape.kv_len} KV tokens"
        )
    say(f"{len(results)} kernels, {cached} of them from the cache, {len(failed)} failed{spill}")
    if failed:
        sys.exit(FAILED)


def _check_together(ctx: click.Context, is_plan: bool) -> None:
    """Refuse options that do nothing with, or without, ``--plan``."""
    idle = ("kernels", "tiles") if is_plan else SHAPE_NAMES
    for param in ctx.command.params:
        if param.name in idle and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
            raise InvalidArgumentError(
                f"{param.opts[0]} is given {'with' if is_plan else 'without'} --plan; "
                + ("a plan chooses its own kernels. Leave it out." if is_plan else "it describes a plan. Add --plan.")
            )


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
