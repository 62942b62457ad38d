"""Reports of commands: lines as soon as they are known, or with ``--json`` one document, whatever ends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from codegen.tools.progress import Item, steps

WIDTH = 220
"""Of what is not a terminal: lines need not be wrapped."""

JsonOption = Annotated[
    bool, typer.Option("--json", help="Report as one JSON document on standard output; errors stay on standard error.")
]


class Report:
    """Rows of a command, and what it says beside them.

    Attributes:
        rows: the fields of each.
        document: what ``--json`` prints: ``rows``, ``complete`` (whether the command came to its end) and what ``note``
            added.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.open = ExitStack()  # what ends with the report
        self.rows: list[dict[str, Any]] = []
        self.document: dict[str, Any] = {"complete": False, "rows": self.rows}

    def steps(self, what: str, items: Iterable[Item], name: Callable[[Item], str]) -> Iterator[Item]:
        """Yield items and show which one the loop is at, as ``codegen.tools.progress`` does, until the report."""
        each = steps(what, items, name)
        self.open.callback(each.close)
        return each

    def row(self, fields: dict[str, Any], text: str = "") -> None:
        """Report a row: its fields, or the text of it, which may be nothing."""
        self.rows.append(fields)
        if text:
            self.say(text)

    def note(self, name: str, value: Any, text: str = "") -> None:
        """Report something about all rows."""
        self.document[name] = value
        if text:
            self.say(text)

    def say(self, text: str) -> None:
        """Print a line that only people need."""
        if not self.as_json:
            typer.echo(text)

    def show(self, what: RenderableType) -> None:
        """Print a table that only people need, to the width of the terminal."""
        if not self.as_json:
            console().print(what)


@contextmanager
def report(*, as_json: bool) -> Iterator[Report]:
    """Give the block a report. With ``--json`` it is printed when the block ends: by an error or Ctrl-C too."""
    made = Report(as_json=as_json)
    try:
        with made.open:
            yield made
        made.document["complete"] = True
    except typer.Exit:
        made.document["complete"] = True  # with the exit code that the rows are worth
        raise
    finally:
        if as_json:
            typer.echo(json.dumps(made.document, indent=2))


def console() -> Console:
    """Return standard output as rich prints to it."""
    found = Console()
    if not found.is_terminal:
        found.width = WIDTH
    return found
