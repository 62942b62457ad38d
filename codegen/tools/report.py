"""Reports of commands: immediate lines, or one document with ``--json``, even after an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from codegen.tools.progress import Item, steps

if TYPE_CHECKING:
    from rich.console import RenderableType

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
BAD_INPUT = 2
"""Exit code after an error in the user's input."""
CHECK_FAILED = 1
"""Exit code of a command that found a problem or a difference."""
WIDTH = 220
"""Columns of output that is not a terminal: long lines are not wrapped."""

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to standard output. Errors still go to standard error.")
]


class Report:
    """Rows of a command, and notes about them.

    Attributes:
        rows: the fields of each row.
        document: the output of ``--json``: ``rows``, ``complete`` (whether the command finished), and the fields that
            ``note`` added.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.open = ExitStack()  # closed with the report
        self.rows: list[dict[str, Any]] = []
        self.document: dict[str, Any] = {"complete": False, "rows": self.rows}

    def steps(self, what: str, items: Iterable[Item], name: Callable[[Item], str]) -> Iterator[Item]:
        """Yield items and show the current one, like ``codegen.tools.progress``, until the report ends."""
        each = steps(what, items, name)
        self.open.callback(each.close)
        return each

    def row(self, fields: dict[str, Any], text: str = "") -> None:
        """Add a row: fields for JSON, and a printed text, which may be empty."""
        self.rows.append(fields)
        if text:
            self.say(text)

    def note(self, name: str, value: Any, text: str = "") -> None:
        """Add a fact about all rows: a field for JSON, and a printed text, which may be empty."""
        self.document[name] = value
        if text:
            self.say(text)

    def say(self, text: str) -> None:
        """Print a line; with ``--json``, print nothing."""
        if not self.as_json:
            typer.echo(text)

    def show(self, what: RenderableType) -> None:
        """Print a table; with ``--json``, print nothing."""
        if not self.as_json:
            show(what)


@contextmanager
def report(*, as_json: bool) -> Iterator[Report]:
    """Yield a report. With ``--json``, print it when the block ends, even after an error or Ctrl-C."""
    made = Report(as_json=as_json)
    try:
        with made.open:
            yield made
        made.document["complete"] = True
    except typer.Exit:
        made.document["complete"] = True  # with the exit code of the rows
        raise
    finally:
        if as_json:
            typer.echo(json.dumps(made.document, indent=2))


def show(what: RenderableType) -> None:
    """Print a rich object, to the width of a terminal, or without trailing blanks to a file or a pipe."""
    from rich.console import Console  # noqa: PLC0415 - slow to import, and not every command prints with it

    console = Console()
    if console.is_terminal:
        console.print(what)
        return
    console.width = WIDTH
    with console.capture() as capture:
        console.print(what)
    for line in capture.get().splitlines():
        typer.echo(line.rstrip())
