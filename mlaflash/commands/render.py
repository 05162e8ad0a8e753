"""All that the command line prints: results to stdout, everything else to stderr."""

from __future__ import annotations

import io
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_STYLES: Final = {
    "ok": "green",
    "FAIL": "bold red",
    "wrong": "bold red",
    "compile_failed": "bold red",
    "launch_failed": "bold red",
    "invalid": "yellow",
    "skipped": "yellow",
    "spills": "yellow",
}
_GAP: Final = 2
_USUAL_WIDTH: Final = 80
_LEAST_FOLDED: Final = 24


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    title : str
    align : {"left", "right"}
    fold : bool
        Whether its cells may go over several lines where the terminal is narrow.
    head : bool
        Whether its cell stands without its title at the head of a row that takes several lines.
    """

    title: str
    align: Literal["left", "right"] = "right"
    fold: bool = False
    head: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; where the terminal is too narrow for one, a few lines for each row.

    Parameters
    ----------
    columns : sequence of Column
    rows : sequence of sequence of str
    """
    console = _stdout()
    widths = [max([len(column.title), *(len(row[i]) for row in rows)]) for i, column in enumerate(columns)]
    least = [min(width, _LEAST_FOLDED) if column.fold else width for column, width in zip(columns, widths, strict=True)]
    if sum(least) + _GAP * (len(columns) - 1) > console.width:
        for row in rows:
            _stacked(console, columns, row)
        return
    folding = sum(column.fold for column in columns)
    rest = sum(width for column, width in zip(columns, widths, strict=True) if not column.fold)
    room = (console.width - rest - _GAP * (len(columns) - 1)) // max(folding, 1)
    grid = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        grid.add_column(column.title, justify=column.align, no_wrap=True)
    for row in rows:
        texts = [_fold(text, room) if column.fold else [text] for column, text in zip(columns, row, strict=True)]
        grid.add_row(*(_cell("\n".join(lines)) for lines in texts))
    console.print(grid)


def _stacked(console: Console, columns: Sequence[Column], row: Sequence[str]) -> None:
    heads = [text for column, text in zip(columns, row, strict=True) if column.head]
    others = [f"{column.title} {text}" for column, text in zip(columns, row, strict=True) if text and not column.head]
    for number, line in enumerate(_fold("  ".join(filter(None, heads)), max(console.width - _GAP, 1))):
        console.print(_cell(" " * _GAP * (number > 0) + line), soft_wrap=True)
    # A no-break space keeps a name and its value on one line.
    pairs = "  ".join(pair.replace(" ", "\N{NO-BREAK SPACE}") for pair in others)
    indent = "  " if heads else ""
    for line in textwrap.wrap(pairs, console.width, initial_indent=indent, subsequent_indent="  "):
        console.print(Text(line.replace("\N{NO-BREAK SPACE}", " ")), soft_wrap=True)


def _fold(text: str, width: int) -> list[str]:
    """Break a text into lines behind blanks and hyphens, and within a word only where it alone is too long."""
    lines = [""]
    for piece in re.findall(r"[^\s-]*-|[^\s-]+\s*|\s+", text):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


def _cell(text: str) -> Text:
    cell = Text(text, style=_STYLES.get(text, ""))
    if not cell.style:
        for word in text.split():
            if word in _STYLES:
                cell.highlight_words([word], _STYLES[word])
    return cell


def line(text: str = "") -> None:
    """Print a line of the result."""
    _print(_stdout(), text)


def document(value: Any) -> None:
    """Print one JSON document.

    Parameters
    ----------
    value : Any
        What JSON holds; a number that is not finite is a defect of the caller.
    """
    _print(_stdout(), json.dumps(value, indent=2, allow_nan=False))


def json_line(text: str) -> None:
    """Print one line of JSON Lines at once: a reader may wait for it."""
    console = _stdout()
    _print(console, text)
    console.file.flush()


def note(text: str) -> None:
    """Print a line that is no result."""
    _print(_stderr(), text)


def error(text: str) -> None:
    """Print why a command failed."""
    _print(_stderr(), f"error: {text}", "bold red")


def facts(values: Iterable[tuple[str, str]], *, wrap: bool = False) -> None:
    """Print names and values, one pair a line.

    Parameters
    ----------
    values : iterable of (str, str)
        Without a value, a name is a title.
    wrap : bool
        Whether a value is wrapped between words, beside its name.
    """
    values = list(values)
    console = _stdout()
    width = max((len(name) for name, _ in values), default=0) + _GAP
    for name, value in values:
        lines = [value]
        if wrap:
            room = max(console.width - width, _LEAST_FOLDED)
            lines = textwrap.wrap(value, room, break_long_words=False, break_on_hyphens=False)
        for number, text in enumerate(lines or [""]):
            _print(console, f"{'' if number else name:<{width}}{text}".rstrip())


def paragraph(text: str) -> None:
    """Print a result in words, wrapped between words."""
    for wrapped in textwrap.wrap(text, _stdout().width, break_long_words=False, break_on_hyphens=False):
        line(wrapped)


Progressed = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much."""


@contextmanager
def progress() -> Iterator[Progressed]:
    """Show on stderr how far something is: a bar on a terminal, else one line for each thing that is begun.

    Yields
    ------
    callable
        To be told what is being done, how many are done, and of how many.
    """
    console = _stderr()
    if not console.is_terminal:
        announced: set[str] = set()

        def announce(what: str, done: int, total: int) -> None:
            if total and what not in announced:
                announced.add(what)
                _print(console, f"{what}: {total} to do")

        yield announce
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        # A result that is printed meanwhile belongs to stdout.
        redirect_stdout=False,
    )
    tasks: dict[str, TaskID] = {}

    def update(what: str, done: int, total: int) -> None:
        if what not in tasks:
            bar.start()
            for earlier in tasks.values():
                bar.update(earlier, visible=False)
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield update
    finally:
        bar.stop()


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


def _stdout() -> Console:
    # A path may hold what the encoding lacks, or bytes that are no text: it is spelled, where stdout would refuse.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return _console(stderr=False)


def _stderr() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if console.width < 1:  # COLUMNS=0, as some terminals and CI systems set it
        console.width = _USUAL_WIDTH
    return console
