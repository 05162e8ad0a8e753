"""Options that several commands share, and the way from an exception to an exit status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from mlaflash.errors import InvalidArgumentError, MlaFlashError, NoDeviceError, UnsupportedError
from mlaflash.lab.space import all_axes, option_name
from mlaflash.params import DTYPE_CODES, FP8_CODES, MASK_CODES
from mlaflash.shape import VerifyShape

FAILED: Final = 1
USAGE: Final = 2
NO_GPU: Final = 3

_Command = TypeVar("_Command", bound=Callable[..., Any])

DTYPES: Final = tuple(DTYPE_CODES)
KV_DTYPES: Final = (*DTYPE_CODES, *FP8_CODES)


def exit_status(error: MlaFlashError) -> int:
    """Tell the exit status that an error ends a command with.

    Parameters
    ----------
    error : MlaFlashError
    """
    if isinstance(error, NoDeviceError):
        return NO_GPU
    return USAGE if isinstance(error, InvalidArgumentError | UnsupportedError) else FAILED


def device_option(command: _Command) -> _Command:
    """Add ``--device``."""
    return click.option(
        "--device",
        type=click.Choice(("auto", "gpu", "emulator")),
        default="auto",
        show_default=True,
        help="Where to run; auto is the GPU where there is one.",
    )(command)


def json_option(text: str) -> Callable[[_Command], _Command]:
    """Add ``--json``.

    Parameters
    ----------
    text : str
        What it prints.
    """
    return click.option("--json", "as_json", is_flag=True, help=f"Print {text} and nothing else on stdout.")


def _int_list(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        return tuple(dict.fromkeys(int(part) for part in value.split(",")))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of integers such as 4,8,16.", ctx, param) from None


def _lengths(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    """Read ``8,16`` and repeated options; unlike constants to try, a length may come twice."""
    try:
        return tuple(int(part) for value in values for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{','.join(values)!r} is no list of integers such as 128,4096.", ctx, param) from None


_SHAPE_OPTIONS: Final = (
    click.option("--heads", type=click.IntRange(min=1), default=8, show_default=True, help="Query heads."),
    click.option("--batch", type=click.IntRange(min=1), help="Requests. By default one for each length of --kv-len."),
    click.option(
        "--q-len", type=click.IntRange(min=1), default=8, show_default=True, help="Query tokens of a request."
    ),
    click.option(
        "--kv-len",
        "kv_lens",
        metavar="INT,...",
        multiple=True,
        default=("16384",),
        show_default=True,
        callback=_lengths,
        help="KV tokens of a request, its new ones included; several (repeatable) are those of the requests, in turn.",
    ),
    click.option("--page-size", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens of a page."),
    click.option(
        "--mask", type=click.Choice(tuple(MASK_CODES)), default="causal", show_default=True, help="Mask of the draft."
    ),
    click.option("--new-kv", is_flag=True, help="The new tokens come apart from the cache."),
    click.option("--split-kv", is_flag=True, help="The rope columns of the cache lie apart from its latent ones."),
    click.option("--soft-cap", is_flag=True, help="Scores are capped: there is a logit_cap."),
    click.option("--budget", metavar="ARCH", help="Keep the shared memory of another architecture, such as sm_120."),
)
SHAPE_NAMES: Final = (
    "heads",
    "batch",
    "q_len",
    "kv_lens",
    "page_size",
    "mask",
    "new_kv",
    "split_kv",
    "soft_cap",
    "budget",
)


def shape_options(command: _Command) -> _Command:
    """Add the options that describe a verify step: `SHAPE_NAMES`."""
    for option in reversed(_SHAPE_OPTIONS):
        command = option(command)
    return command


def given_shape(
    arguments: Mapping[str, Any],
    dtype: str,
    kv_dtype: str | None,
    out_dtype: str | None,
    max_kv_len: int | None = None,
) -> tuple[VerifyShape, tuple[int, ...]]:
    """Make a shape of a command's arguments.

    Parameters
    ----------
    arguments : mapping of str to Any
        Those of `shape_options`; others are passed over.
    dtype : str
    kv_dtype, out_dtype : str or None
    max_kv_len : int or None
        Longest request of the shape, where it is not that of the step.

    Returns
    -------
    shape : VerifyShape
    kv_lens : tuple of int
        Of each request.

    Raises
    ------
    InvalidArgumentError
        There are more lengths than requests, or one that is not allowed.
    UnsupportedError
        The element types do not go together.
    """
    lens = arguments["kv_lens"]
    batch = arguments["batch"] or len(lens)
    if len(lens) > batch:
        raise InvalidArgumentError(
            f"--kv-len names {len(lens)} lengths and --batch is {batch}; each request has one. Leave --batch out."
        )
    if max_kv_len is not None and max(lens) > max_kv_len:
        raise InvalidArgumentError(
            f"--kv-len names {max(lens)} tokens and --max-kv-len is {max_kv_len}; no request may be longer. Raise it."
        )
    kv_lens = tuple(lens[request % len(lens)] for request in range(batch))
    shape = VerifyShape(
        num_heads=arguments["heads"],
        batch=batch,
        kv_len=max(kv_lens) if max_kv_len is None else max_kv_len,
        dtype=dtype,
        kv_dtype=kv_dtype,
        out_dtype=out_dtype,
        **{name: arguments[name] for name in ("q_len", "page_size", "mask", "new_kv", "split_kv", "soft_cap")},
    )
    return shape, shape.check_lens(kv_lens)


def axis_options(*, several: bool) -> Callable[[_Command], _Command]:
    """Add an option for each constant of each kernel, such as ``--kv-groups``.

    Parameters
    ----------
    several : bool
        Whether an option takes a list of values.
    """

    def add(command: _Command) -> _Command:
        for axis in reversed(all_axes()):
            if several:
                values = ",".join(map(str, axis.values))
                few = ",".join(map(str, axis.emulator_values))
                where = f" on a GPU, {few} on the emulator" if few != values else ""
                text = f"{axis.help} By default {values}{where}."
                option = click.option(axis.option, metavar="INT,...", callback=_int_list, help=text)
            else:
                option = click.option(axis.option, type=int, help=axis.help)
            command = option(command)
        return command

    return add


def given_axes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Take the constants that were given from a command's arguments.

    Parameters
    ----------
    arguments : mapping of str to Any
    """
    names = {axis.name for axis in all_axes()}
    return {name: value for name, value in arguments.items() if name in names and value is not None}


def as_options(values: Mapping[str, Any]) -> str:
    """Spell arguments as options: ``{"q_len": 8}`` is ``--q-len 8``.

    Parameters
    ----------
    values : mapping of str to Any
    """
    return " ".join(f"{option_name(name)} {value}" for name, value in values.items())
