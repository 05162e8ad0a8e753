"""Options that several commands share, and the way from an exception to an exit status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from mlaflash.errors import InvalidArgumentError, MlaFlashError, NoDeviceError, UnsupportedError
from mlaflash.lab.space import all_axes, option_name
from mlaflash.params import DTYPE_CODES

FAILED: Final = 1
USAGE: Final = 2
NO_GPU: Final = 3

_Command = TypeVar("_Command", bound=Callable[..., Any])

DTYPES: Final = tuple(DTYPE_CODES)


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
