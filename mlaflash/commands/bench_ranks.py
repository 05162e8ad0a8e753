"""``mlaflash bench --ranks``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click
from click.core import ParameterSource

from mlaflash.commands import render
from mlaflash.commands.options import FAILED, given_shape
from mlaflash.commands.render import Column
from mlaflash.device import Device
from mlaflash.errors import InvalidArgumentError
from mlaflash.lab.sharded import TIMES, ShardedRecord, bench_ranks, fit_link, predict_ranks

_TAKEN = {
    *("ranks", "head_groups", "card", "as_json"),
    *("heads", "batch", "q_len", "kv_lens", "page_size", "mask", "dtype", "out_dtype"),
}
_PROBLEM = tuple(map(Column, ("B", "q", "H", "kv", "GPUs")))
_PREDICTED = ("one_gpu", "step", "attention", "gather", "exchange", "merge")


def show_ranks(
    num_ranks: int,
    head_groups: Sequence[int],
    arguments: Mapping[str, Any],
    *,
    dtype: str,
    out_dtype: str | None,
    card: str | None,
    as_json: bool,
) -> None:
    """Time or predict a step on several GPUs, and print it. Exits with status 1 where it is wrong.

    Parameters
    ----------
    num_ranks : int
    head_groups : sequence of int
    arguments : mapping of str to Any
        Those of `shape_options`.
    dtype, out_dtype : str
    card : str or None
        That to predict for.
    as_json : bool

    Raises
    ------
    InvalidArgumentError
        An option that says nothing about a step on several GPUs.
    """
    context = click.get_current_context()
    for param in context.command.params:
        name = param.name or ""
        if name not in _TAKEN and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise InvalidArgumentError(f"{param.opts[0]} is given with --ranks, which does without. Leave it out.")
    shape, kv_lens = given_shape(arguments, dtype, None, out_dtype)
    if card is not None:
        if len(set(kv_lens)) > 1 or list(head_groups) not in ([], [1]):
            raise InvalidArgumentError(
                "--kv-len names several lengths, or --head-groups is given; predictions with --ranks are for requests "
                "of one length and one group of heads. Give one length."
            )
        records = predict_ranks(shape, num_ranks, Device.for_card(card))
    else:
        records = bench_ranks(shape, kv_lens, num_ranks, tuple(dict.fromkeys(head_groups)) or (1,))
    if as_json:
        render.document({"kind": "mlaflash bench --ranks", "records": [asdict(record) for record in records]})
    else:
        _show(records)
    if any(record.status == "wrong" for record in records):
        sys.exit(FAILED)


def _show(records: Sequence[ShardedRecord]) -> None:
    first = records[0]
    if first.status == "predicted":
        render.paragraph(
            f"PREDICTED for {first.ranks} x {first.gpu} ({first.arch}): nothing ran. Link none: every GPU holds all "
            "tokens"
        )
        last = Column("link", "left")
    else:
        render.paragraph(
            f"{first.ranks} x {first.gpu} ({first.arch}): microseconds of one layer in CUDA graphs, medians, of the "
            "slowest rank; attention, gather and exchange by themselves, of one group of heads; host: of one run"
        )
        last = Column("head groups")
    names = _PREDICTED if first.status == "predicted" else TIMES
    columns = (*_PROBLEM, *(Column(name.replace("_", " ")) for name in names), Column("step / one GPU"), last)
    rows = [
        (
            str(len(record.kv_lens)),
            str(record.problem["q_len"]),
            str(record.problem["num_heads"]),
            f"{max(record.kv_lens):,}",
            str(record.ranks),
            *(f"{record.us[name]:,.1f}" for name in names),
            f"{record.ratio:.3f}",
            record.link or str(record.head_groups),
        )
        for record in records
    ]
    render.table(columns, rows)
    for record in records:
        if record.status == "wrong":
            render.line(f"wrong, {record.head_groups} head groups: {record.reason}")
    if first.messages:
        link = fit_link(first.messages)
        render.line(
            f"link fitted to messages of {first.messages[0][0]:,} to {first.messages[-1][0]:,} bytes: "
            f"{link.latency_us:.1f} us, {link.gb_s:.0f} GB/s received by a GPU"
        )
