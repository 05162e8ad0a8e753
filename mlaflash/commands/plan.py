"""``mlaflash plan``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from mlaflash.commands import render
from mlaflash.commands.options import DTYPES, FAILED, KV_DTYPES, given_shape, json_option, shape_options
from mlaflash.commands.render import Column
from mlaflash.device import Device, apply_budget
from mlaflash.errors import MissingDependencyError
from mlaflash.lab.explain import Explanation, PlanChoice, explain
from mlaflash.lab.target import device_or_default
from mlaflash.lab.variants import Compilation, compile_all, spell, variant
from mlaflash.mma_tiles import MmaConfig
from mlaflash.schedule import Launch
from mlaflash.tiles import KernelConfig

_COLUMNS = (
    Column("kernel", "left", head=True),
    Column("config", "left", fold=True, head=True),
    Column("threads"),
    Column("shared"),
    Column("regs"),
    Column("spills"),
)


@click.command("plan")
@shape_options
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True, help="Element type.")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), help="What the cache holds. By default --dtype.")
@click.option("--out-dtype", type=click.Choice(DTYPES), help="Element type of out. By default --dtype.")
@click.option(
    "--max-kv-len",
    type=click.IntRange(min=1),
    help="Longest request that page table and plan are made for. By default the longest of --kv-len.",
)
@click.option(
    "--arch", metavar="ARCH", help="Such as sm_120. By default MLAFLASH_ARCH, else the GPU's own, else sm_120."
)
@json_option("one JSON document")
def plan(
    dtype: str,
    kv_dtype: str | None,
    out_dtype: str | None,
    max_kv_len: int | None,
    arch: str | None,
    budget: str | None,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Explain a verify step without running it.

    Tells the least time by the data sheet; what one call of mla_verify chooses, and what a VerifyPlan does: kernel and
    row tile, splits or blocks, memory, reads of KV, predicted time, and why. Times are predictions: nothing is
    measured. Registers and spills need NVRTC, how even the blocks of a VerifyPlan are loaded a C++ compiler.
    """
    shape, kv_lens = given_shape(arguments, dtype, kv_dtype, out_dtype, max_kv_len)
    device = device_or_default(arch)
    limits = device if budget is None else apply_budget(device, budget)
    found = explain(shape, limits, kv_lens)
    call = found.call.schedule.launches
    launches = [*call, *(found.plan.launches if found.plan else ())]
    results, missing = _compile(launches, limits)
    if as_json:
        document = found.as_dict()
        kernels = [result.as_dict() for result in results]
        document["mla_verify"]["kernels"] = kernels[: len(call)]
        document["verify_plan"]["kernels"] = kernels[len(call) :]
        render.document(document)
    else:
        render.facts(_facts(found), wrap=True)
        render.line()
        render.table(_COLUMNS, [_row(launch, result) for launch, result in zip(launches, results, strict=True)])
    if missing:
        (render.note if as_json else render.paragraph)(f"registers and spills are not known: {missing}")
        return
    refused = [result for result in results if result.compiled is None]
    for result in refused:
        render.note(f"FAIL {result.variant.kernel}: {result.error}")
    if refused:
        sys.exit(FAILED)


def _compile(launches: Sequence[Launch], device: Device) -> tuple[list[Compilation], str]:
    """Compile, and say why that cannot be done here."""
    wanted = [variant(launch, device) for launch in launches]
    try:
        with render.progress() as progress:
            return list(compile_all(wanted, progress)), ""
    except MissingDependencyError as error:
        return [Compilation(each, None, str(error)) for each in wanted], str(error)


def _facts(found: Explanation) -> Iterator[tuple[str, str]]:
    shape, device, floors = found.shape, found.device, found.floors
    yield "step", _step(found)
    where = "this machine's GPU" if device.is_present else "by the data sheet"
    limits = f"{device.num_sms} SMs, {device.shared_per_block:,} bytes of shared memory a block"
    yield "GPU", f"{device.name} ({device.arch}), {where}: {limits}"
    yield "floors", "predicted from data sheets; nothing is measured"
    moved = f"{_bytes(floors.kv_bytes)} of KV, each row once, and {_bytes(floors.other_bytes)} of q, out and lse"
    yield "  memory", f"{_number(floors.memory_us)} us: {moved} at {floors.read_gb_s:,.0f} GB/s"
    if floors.mma_us is not None:
        rate = f"{_number(floors.flop / 1e9)} GFLOP at {floors.mma_tflop_s:,.0f} TFLOP/s of mma.sync"
        yield "  tensor cores", f"{_number(floors.mma_us)} us: {rate}"
        yield "  bound by", floors.limit
    else:
        yield "  arithmetic", f"{_number(floors.flop / 1e9)} GFLOP of {shape.dtype}, which tensor cores do not take"
    yield "", ""
    call = found.call
    yield "mla_verify", "one call, its work split on the host" + _as_longest(found)
    yield "  kernel", _kernel(call.schedule.config, found)
    blocks = call.schedule.launches[0].grid
    yield "  splits", f"{call.schedule.num_splits}; {blocks[0] * blocks[1] * blocks[2]:,} blocks"
    yield "  KV read", _reads(call.kv_bytes, floors.kv_bytes)
    yield "  workspace", _bytes(call.workspace_bytes)
    if call.predicted_us is not None:
        yield "  predicted", f"{_number(call.predicted_us)} us from a cold level-2 cache"
    yield from _why(call.reasons)
    yield "", ""
    if found.plan is None:
        yield "VerifyPlan", f"none: {found.refusal}"
        return
    plan = found.plan
    yield "VerifyPlan", "blocks as many as run at once, their work shared out on the device"
    yield "  kernel", _kernel(plan.work.config, found)
    start = f"to start on a row tile costs one as much as {plan.work.start_tiles} KV tiles"
    yield "  blocks", f"{plan.work.blocks}; {start}"
    yield "  balance", _balance(plan)
    yield "  KV read", _reads(plan.kv_bytes, floors.kv_bytes)
    yield "  workspace", f"{_bytes(plan.workspace_bytes)}, with its copies of int32 page ids and of masks"
    yield from _why(plan.work.reasons)


def _step(found: Explanation) -> str:
    shape, lens = found.shape, found.kv_lens
    least, most = min(lens), max(lens)
    requests = "1 request" if len(lens) == 1 else f"{len(lens)} requests"
    each = " each" if len(lens) > 1 else ""
    kv = f"{most:,} KV tokens{each}" if least == most else f"{least:,} .. {most:,} KV tokens, {sum(lens):,} in all"
    longest = f" (made for {shape.kv_len:,})" if shape.kv_len > most else ""
    features = [f", {name.replace('_', '-')}" for name in ("new_kv", "split_kv", "soft_cap") if getattr(shape, name)]
    out = f", out {shape.out_dtype}" if shape.out_dtype not in (None, shape.dtype) else ""
    cache = f", KV {shape.kv_dtype}" if shape.kv_dtype else ""
    return (
        f"{requests} of {shape.q_len} query tokens x {shape.num_heads} heads, {kv}{longest}, mask {shape.mask}, "
        f"{shape.dtype}{cache}{out}, pages of {shape.page_size}{''.join(features)}"
    )


def _as_longest(found: Explanation) -> str:
    longest = found.shape.kv_len
    return f" as if each request had {longest:,} tokens" if min(found.kv_lens) < longest else ""


def _kernel(config: KernelConfig, found: Explanation) -> str:
    if not isinstance(config, MmaConfig):
        return f"{config.kernel}, {spell(config.as_dict())}"
    rows = found.shape.rows
    row_tiles = -(-rows // config.rows)
    idle = row_tiles * config.rows - rows
    tiles = "1 row tile" if row_tiles == 1 else f"{row_tiles} row tiles"
    return f"{config.kernel}, {tiles} of {config.rows} a request" + (f", {idle} rows of them idle" if idle else "")


def _reads(all_bytes: int, once: int) -> str:
    again = f", and {_bytes(all_bytes - once)} again, from the level-2 cache while it holds them"
    return f"{_bytes(once)} from memory" + (again if all_bytes > once else "")


def _balance(plan: PlanChoice) -> str:
    found = plan.balance
    mean = plan.kv_tiles / plan.work.blocks
    if found is None:
        return f"{_number(mean)} KV tiles a block on average; of the busiest one is not known: {plan.missing}"
    idle = f", {found.idle_blocks} blocks idle" if found.idle_blocks else ""
    return (
        f"KV tiles of the busiest block: {found.busiest_tiles:,}, on average {_number(mean)}{idle}; pieces: "
        f"{found.num_pieces:,}, at most {found.most_pieces} a block; row tiles to merge: {found.merged}"
    )


def _why(reasons: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, reason in enumerate(reasons):
        yield "  " if number else "  why", reason


def _number(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _bytes(number: int) -> str:
    if number < 10**5:
        return f"{number:,} bytes"
    return f"{number / 1e6:,.1f} MB" if number < 10**10 else f"{number / 1e9:,.1f} GB"


def _row(launch: Launch, result: Compilation) -> tuple[str, ...]:
    compiled = result.compiled
    return (
        launch.kernel,
        spell(result.variant.config),
        str(launch.block),
        str(result.shared_bytes),
        str(compiled.registers) if compiled else "-",
        str(compiled.spill_bytes) if compiled else "-",
    )
