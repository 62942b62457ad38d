"""Timing of the launches before the main kernels of attention's gradients: attention_backward.py --prologue.

These launches compute the statistics of all queries, before dQ, and the transposed lists, before dK and dV. Each is a
separate launch, so a kernel without its main launch takes the time of the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from backward_peers import Problem
from harness import Fields
from rich.console import Console
from rich.table import Table

from runtime.tools.bench.timing import Call, back_to_back, single_calls

WHOLE, STATISTICS, LISTS = "whole backward", "statistics", "transposed lists"
PROLOGUE = f"{STATISTICS} and {LISTS}"  # the sum of both
FIGURES = "milliseconds", "back_to_back_milliseconds"


def alone(kernel: Any) -> Any:
    """Make a kernel leave its main launch out, for good; return it. Its gradients are then memory as it was."""
    kernel._loaded._launch_by = lambda *_: (0,)  # the driver's answer to a launch that it took
    return kernel


def calls_of(problem: Problem, whole: Call, load: Callable[[], tuple[Any, Any]]) -> dict[str, Call]:
    """Timed calls, by label.

    Args:
        problem: with lists.
        whole: a backward of it.
        load: loads the kernels of dQ and of dK and dV, again in each call.

    Raises:
        SystemExit: if the statistics alone are not those of the whole kernel.
    """
    inputs = problem.q, problem.k, problem.v, *problem.lists
    of_call = {"out": problem.out, "dout": problem.dout, "lse": problem.lse}
    stats = load()[0](*inputs, **of_call).stats
    dq, dkdv = map(alone, load())
    if not torch.equal(dq(*inputs, **of_call).stats, stats):
        raise SystemExit(f"error: {STATISTICS} alone are not those of the whole kernel; nothing was timed")
    return {
        WHOLE: whole,
        STATISTICS: lambda: dq(*inputs, **of_call),
        LISTS: lambda: dkdv(*inputs, **of_call, stats=stats),
    }


def times_of(calls: dict[str, Call], repeats: int) -> dict[str, Fields]:
    """The milliseconds of each call in both ways, and of both parts of the prologue together."""
    times = {
        figure: way(calls)
        for figure, way in zip(FIGURES, (lambda calls: single_calls(calls, repeats=repeats), back_to_back), strict=True)
    }
    for found in times.values():
        found[PROLOGUE] = found[STATISTICS] + found[LISTS]
    return {label: {figure: round(times[figure][label], 4) for figure in FIGURES} for label in (*calls, PROLOGUE)}


def table_rows(record: Fields) -> list[list[str]]:
    """The cells of the table: milliseconds and the share of the whole backward, in both ways."""
    times = record["prologue"]
    rows = []
    for label, found in times.items():
        cells = [label]
        for figure in FIGURES:
            cells += [f"{found[figure]:.3f}", f"{found[figure] / times[WHOLE][figure]:.1%}"]
        rows.append(cells)
    return rows


def show(report: Fields) -> None:
    """Print a table for each row."""
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    for record in report["rows"]:
        title = f"{report['device']}, driver {report['driver']}, {report['date']}; {record['name']}, {record['data']}"
        table = Table(title=title)
        for heading in ("", "ms, single calls", "of the whole", "ms, back to back", "of the whole"):
            table.add_column(heading, justify="right" if heading else "left")
        for cells in table_rows(record):
            table.add_row(*cells)
        console.print(table)
