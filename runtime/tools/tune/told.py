"""Output of ``codegen tune`` for a problem: its space, the fastest kernels, the model's ranking, a proposed spec."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from codegen.errors import MOST_OF_MESSAGE
from codegen.library import NamedSpec
from codegen.select.problem import Problem, tuning_of
from codegen.select.proposal import propose, write_proposal
from codegen.select.ranking import ranking
from codegen.select.space import Space, differences, spelt
from codegen.tools.report import Report
from codegen.wording import one_line
from runtime.tools.bench.noise import Interval, change, interval
from runtime.tools.tune.database import Record
from runtime.tools.tune.tuner import Course, best_of, cost

SHOWN = 3  # number of fastest kernels shown per problem
WIDTH = 80


def _fill(text: str, indent: str = "    ") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False)


def tell_space(told: Report, problem: Problem, current: NamedSpec, space: Space) -> None:
    """Print the size of a space and of its legal part."""
    told.say(_fill(f"{problem}: beside {current.stem} {space.told()}", ""))
    told.document.setdefault("spaces", []).append(
        {
            "problem": str(problem),
            "current": current.stem,
            "over": {name: list(values) for name, values in space.axes.items()},
            "combinations": space.points,
            "legal": len(space.members),
            "ruled_out": [asdict(each) for each in space.ruled_out],
        }
    )


def tell(
    told: Report, problem: Problem, current: NamedSpec, records: Sequence[Record], course: Course, *, write: bool
) -> None:
    """Print the fastest kernels of a problem, failures, the model's ranking, and the proposal.

    Args:
        told: the report.
        problem: the problem.
        current: the current spec.
        records: records of the tried candidates.
        course: comparison of two candidates.
        write: write a faster spec to the file of the current one.
    """
    told.say(str(problem))
    timed = best_of(records)
    fastest = {id(record) for record in timed[:SHOWN]}
    for record in timed:
        is_shown = id(record) in fastest or record.named.spec == current.spec
        told.row(_row(problem, record), _line(record, current) if is_shown else "")
    for record in records:
        if record.failure:
            failure = one_line(record.failure.splitlines()[0], MOST_OF_MESSAGE)
            told.row({"problem": str(problem), "kernel": record.named.stem, "failure": record.failure})
            typer.echo(f"    no time: {record.named.stem} {failure}", err=True)
    summary: dict[str, Any] = {"problem": str(problem), "current": current.stem, "timed": len(timed)}
    costs = [cost(record.figures) for record in timed if record.figures is not None]
    if ranked := ranking(problem, [record.named for record in timed], costs):
        summary["ranking"] = asdict(ranked)
        told.say(_fill(f"model: {ranked.told()}"))
    if timed:
        summary |= _proposed(told, current, timed, course, write=write)
    told.document.setdefault("problems", []).append(summary)


def _row(problem: Problem, record: Record) -> dict[str, Any]:
    assert record.figures is not None
    tuning = tuning_of(record.named.spec)
    return {"problem": str(problem), "kernel": record.named.stem, **asdict(record.figures), "tuning": tuning}


def _line(record: Record, current: NamedSpec) -> str:
    assert record.figures is not None
    back_to_back = record.figures.back_to_back_us
    more = "" if back_to_back is None else f" / {back_to_back:.4g}"
    differs = differences(record.named.spec, current.spec)
    how = ", ".join(f"{name} {'off' if value is None else spelt(value)}" for name, value in differs.items())
    named = record.named.stem if record.named.path is not None or not how else ""
    return f"    {record.figures.single_us:.4g}{more} us  " + "; ".join(filter(None, [named, how]))


def _proposed(
    told: Report, current: NamedSpec, timed: Sequence[Record], course: Course, *, write: bool
) -> dict[str, Any]:
    """Propose the fastest kernel if it beats the current one by more than noise."""
    best = timed[0].named
    if all(record.named.spec != current.spec for record in timed):
        told.say(_fill(f"{current.stem} has no time: nothing is proposed in its place"))
        return {"best": best.stem, "verdict": "no time of the current spec"}
    if best.spec == current.spec:
        told.say(_fill(f"{current.stem} is the fastest of {len(timed)} that were timed"))
        return {"best": best.stem, "verdict": "the current spec is the fastest"}
    sides = course.compare(best, current)
    new, old = (interval([cost(each) for each in side]) for side in sides)
    found: dict[str, Any] = {
        "best": best.stem,
        "best_us": asdict(new),
        "current_us": asdict(old),
        "ratio": old.middle / new.middle,
    }
    both = f"{_spelt(new)} beside {_spelt(old)} us"
    if change(new, old) != "faster":
        told.say(_fill(f"{current.stem} is not beaten: {best.stem} takes {both}, within noise"))
        return {**found, "verdict": "within noise"}
    proposal = propose(current, best.spec)
    told.say(_fill(f"proposed: {old.middle / new.middle:.3f} x as fast as {current.stem}, beyond noise: {both}"))
    told.say(textwrap.indent(proposal.diff(), "    "))
    found |= {"verdict": "faster", "diff": proposal.diff(), "written": False}
    if write:
        found["written"] = write_proposal(current, proposal)
        told.say(
            f"    wrote {proposal.place}; its comments may describe the previous spec: read them. "
            f"Next: codegen render {current.argument}"
        )
    else:
        told.say("    --write writes it")
    return found


def _spelt(times: Interval) -> str:
    return f"{times.middle:.4g} ({times.low:.4g} to {times.high:.4g})"
