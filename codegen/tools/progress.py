"""Progress of a command on standard error: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

FIRST = 2.0
"""Seconds before the first line; shorter commands print none."""
EVERY = 10.0
"""Seconds between lines."""

Item = TypeVar("Item")
At = Callable[[str], None]


def steps(what: str, items: Iterable[Item], name: Callable[[Item], str]) -> Generator[Item, None, None]:
    """Yield items and show the current one, until the generator is closed."""
    every = list(items)
    with progress(what, len(every)) as at:
        for item in every:
            at(name(item))
            yield item


@contextmanager
def progress(what: str, total: int) -> Iterator[At]:
    """Show progress over ``total`` items: the block calls the yielded function with the name of each item it starts."""
    with _bar(what, total) if sys.stderr.isatty() else _lines(what, total) as at:
        yield at


@contextmanager
def _bar(what: str, total: int) -> Iterator[At]:
    from rich.console import Console  # noqa: PLC0415 - slow to import, and only needed on a terminal
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}"),
    )
    # Rows for the same terminal are printed above the bar; redirected standard output is left alone.
    same = sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=same) as shown:
        task = shown.add_task(what, total=total, name="")
        begun = 0

        def at(name: str) -> None:
            nonlocal begun
            shown.update(task, completed=begun, name=name)
            begun += 1

        yield at


@contextmanager
def _lines(what: str, total: int) -> Iterator[At]:
    start, stream, ended = time.monotonic(), sys.stderr, threading.Event()
    names: list[str] = []

    def tell() -> None:
        pause = FIRST
        while not ended.wait(pause):
            pause = EVERY
            name = f": {names[-1]}" if names else ""
            print(f"{what} {len(names)} of {total}{name} ({time.monotonic() - start:.0f} s)", file=stream, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield names.append
    finally:
        ended.set()
        thread.join()
