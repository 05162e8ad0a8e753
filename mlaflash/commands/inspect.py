"""``mlaflash inspect``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click

from mlaflash.commands import render
from mlaflash.commands.options import DTYPES, FAILED, KV_DTYPES, axis_options, given_axes, json_option
from mlaflash.commands.render import Column
from mlaflash.device import Device, occupancy_blocks
from mlaflash.errors import InvalidArgumentError
from mlaflash.lab.inspection import Inspection, grouped
from mlaflash.lab.inspection import inspect as look_into
from mlaflash.lab.space import check_axes
from mlaflash.lab.target import device_or_default
from mlaflash.lab.variants import COMPILED, Variant, compile_all, is_plain, spell, variants
from mlaflash.schedule import KERNELS

_COLUMNS = (
    Column("kernel", "left", head=True),
    Column("arch", "left", head=True),
    Column("config", "left", fold=True, head=True),
    Column("regs"),
    Column("spills"),
    Column("shared"),
    Column("limit"),
    Column("blocks/SM"),
    Column("instructions"),
    Column("in tile loops"),
    Column("mma"),
    Column("ldmatrix"),
)


@click.command("inspect")
@click.option(
    "--arch",
    "archs",
    metavar="ARCH",
    multiple=True,
    help="Such as sm_120 (repeatable). By default MLAFLASH_ARCH, else the GPU's own, else sm_120.",
)
@click.option(
    "--kernel",
    "kernels",
    type=click.Choice(COMPILED),
    multiple=True,
    help="Kernel (repeatable), shown in detail. By default a line for each that reads KV, and for combine.",
)
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True, help="Element type.")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), help="What the cache holds. By default --dtype.")
@click.option(
    "--tiles",
    type=click.Choice(("shipped", "all")),
    default="shipped",
    show_default=True,
    help="Tiles that a call chooses, or all that sweep tries; among these, constants that are given choose.",
)
@axis_options(several=False)
@json_option("one JSON array")
def inspect(
    archs: tuple[str, ...],
    kernels: tuple[str, ...],
    dtype: str,
    kv_dtype: str | None,
    tiles: str,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Look into compiled kernels; needs no GPU.

    Registers, spilled bytes, the map of shared memory, how many blocks' shared memory an SM holds, and the mix of
    machine instructions, of the loops over KV tiles too. Instructions need NVIDIA's nvdisasm, on the PATH or installed
    by the extra inspect; the map of shared memory needs a C++ compiler.
    """
    axes = given_axes(arguments)
    names = kernels or (*KERNELS, "combine")
    if "nsplit" in axes:
        raise InvalidArgumentError(
            "--nsplit is given, a run-time number: no compiled form depends on it. Leave it out."
        )
    check_axes(names, list(axes))
    wanted = list(_wanted(archs, names, (dtype, kv_dtype or dtype), tiles == "all" or bool(axes), axes))
    if not wanted:
        raise InvalidArgumentError("no form that fits the architecture has these constants. See mlaflash sweep --help.")
    notes: list[str] = []
    found: list[Inspection] = []
    with render.progress() as progress:
        results = list(compile_all(wanted, progress))
        for done, result in enumerate(results):
            progress("inspecting", done, len(results))
            if result.compiled is not None:
                found.append(look_into(result, notes))
    if as_json:
        render.document([each.as_dict() for each in found])
    else:
        render.table(_COLUMNS, [_row(each) for each in found])
        for each in found if kernels else ():
            variant = each.compilation.variant
            render.line(f"\n{variant.kernel} for {variant.arch}, {spell(variant.config)}")
            render.facts(_facts(each), wrap=True)
    for note in notes:
        render.note(note)
    refused = [result for result in results if result.compiled is None]
    for result in refused:
        render.note(f"FAIL {result.variant.kernel} for {result.variant.arch}: {result.error}")
    if refused:
        sys.exit(FAILED)


def _wanted(
    archs: tuple[str, ...], kernels: tuple[str, ...], dtypes: tuple[str, str], every_tile: bool, axes: Mapping[str, int]
) -> Iterator[Variant]:
    for device in map(device_or_default, archs or (None,)):
        for variant in variants(
            device.arch, dtypes[:1], kernels, out_dtypes=dtypes[:1], kv_dtypes=dtypes[1:], every_tile=every_tile
        )[0]:
            if is_plain(variant.config) and all(variant.config.get(name) == value for name, value in axes.items()):
                yield variant


def _row(found: Inspection) -> tuple[str, ...]:
    result, machine = found.compilation, found.machine
    variant, compiled = result.variant, result.compiled
    loops = machine.loops if machine else ()
    numbers = (
        compiled.registers if compiled else None,
        compiled.spill_bytes if compiled else None,
        result.shared_bytes,
        variant.shared_limit,
        occupancy_blocks(result.shared_bytes, Device.for_arch(variant.arch)),
        sum(machine.opcodes.values()) if machine else None,
    )
    in_loops = [" + ".join(str(_count(loop.opcodes, name)) for loop in loops) or "-" for name in (None, "HMMA", "LDSM")]
    cells = ["-" if number is None else f"{number}" for number in numbers]
    return variant.kernel, variant.arch, spell(variant.config), *cells, *in_loops


def _count(opcodes: Mapping[str, int], name: str | None) -> int:
    return sum(opcodes.values()) if name is None else opcodes.get(name, 0)


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    compiled = found.compilation.compiled
    if compiled is not None:
        static = (
            f", {compiled.static_shared_bytes} bytes of static shared memory" if compiled.static_shared_bytes else ""
        )
        yield "  registers", f"{compiled.registers}, {compiled.spill_bytes} bytes spilled{static}"
    for region in found.regions or ():
        yield f"  {region.name}", f"{region.num_bytes:,} bytes at {region.offset:,}: {region.holds}"
    if found.machine is not None:
        yield "  instructions", _mix(found.machine.opcodes)
        for loop in found.machine.loops:
            yield "  loop over tiles", f"{loop.begin:#x} .. {loop.end:#x}: {_mix(loop.opcodes)}"


def _mix(opcodes: Mapping[str, int]) -> str:
    total = sum(opcodes.values())
    return f"{total:,}: " + ", ".join(f"{group} {count:,}" for group, count in grouped(opcodes).items())
