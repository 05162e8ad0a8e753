"""The command ``mlaflash``."""

from __future__ import annotations

import errno
from typing import Any

import click

import mlaflash
from mlaflash.commands import render
from mlaflash.commands.bench import bench
from mlaflash.commands.cache import cache
from mlaflash.commands.check import check
from mlaflash.commands.compile import compile_
from mlaflash.commands.fuzz import fuzz
from mlaflash.commands.info import info
from mlaflash.commands.inspect import inspect
from mlaflash.commands.options import FAILED, exit_status
from mlaflash.commands.plan import plan
from mlaflash.commands.report import report
from mlaflash.commands.sglang_check import sglang_check
from mlaflash.commands.soak import soak
from mlaflash.commands.sweep import sweep
from mlaflash.errors import MlaFlashError


class _Group(click.Group):
    """Turns the library's exceptions into a message on stderr and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MlaFlashError as error:
            render.error(str(error))
            ctx.exit(exit_status(error))
        except MemoryError as error:
            render.error(f"there is not enough memory ({error}). Use a smaller problem.")
            ctx.exit(FAILED)
        except OSError as error:
            if error.errno == errno.EPIPE:  # a reader that has seen enough; click ends the command quietly
                raise
            render.error(f"{error}. Where that is standard output, send it elsewhere.")
            ctx.exit(FAILED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mlaflash.__version__, prog_name="mlaflash")
def main() -> None:
    """MLA verify attention: check, time, sweep, explain, compile and inspect its CUDA kernels.

    Exit status: 0 passed, 1 wrong numbers or failed, 2 usage, 3 no GPU where one was asked for.
    """


for _command in (check, fuzz, soak, bench, sweep, report, plan, compile_, inspect, sglang_check, info, cache):
    main.add_command(_command)
