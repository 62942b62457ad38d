"""The table of measurements: times of kernels by problem and device.

``measurements.jsonl`` has one row per line. ``benchmarks/measurement_rows.py`` and ``codegen tune --export`` write it
from the results of benchmarks; it is never edited by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from codegen.errors import MOST_OF_PLACE, CodegenError, FileError
from codegen.files import read_text
from codegen.library import find_spec
from codegen.patterns.base import SpecModel
from codegen.plain import json_model
from codegen.select.problem import Problem, tuning_of
from codegen.spec import canonical
from codegen.wording import one_line

TABLE = Path(__file__).with_name("measurements.jsonl")
SAME = 0.03
"""Two devices of an architecture share a row if the choice for one loses at most this much on the other."""
UNMEASURED = 1.25
"""Assumed loss of a kernel in a row without its measurement: more than that of the next row's best kernel."""
Fields = dict[str, Any]
Microseconds = Annotated[float, Field(gt=0)]


class TableError(CodegenError):
    """A table of measurements cannot be read."""


class Timing(SpecModel):
    """Times of one kernel."""

    spec: str | dict[str, Any] = Field(description="name of a shipped spec, or tuning fields")
    single_us: Microseconds = Field(description="median time of a single call after a pause")
    back_to_back_us: Microseconds | None = Field(default=None, description="time of a call in a back-to-back sequence")
    prepared: Literal["rows", "packed"] | None = Field(
        default=None, description="preparation of A, see BsrProblem; None if the kernel does not use it"
    )
    earlier_source: bool = Field(default=False, description="whether its source has changed since the measurement")

    @model_validator(mode="after")
    def _is_whole(self) -> Timing:
        if not isinstance(self.spec, str) and not {"tile", "stages"} <= self.spec.keys():
            raise ValueError("spec has no tile or no stages, so it is not a timed kernel")
        return self

    @property
    def tuning(self) -> Fields:
        """Its tuning fields."""
        return dict(_tuning(self.spec)) if isinstance(self.spec, str) else self.spec

    @property
    def label(self) -> str:
        """Canonical text of its tuning, unique within its problem."""
        return canonical(self.tuning)


@cache
def _tuning(stem: str) -> Fields:
    return tuning_of(find_spec(stem).spec)


class Dense(SpecModel):
    """The fastest dense product or dense attention of a library for the same problem."""

    name: str
    single_us: Microseconds
    back_to_back_us: Microseconds | None = None


class Measurement(SpecModel):
    """One row: kernels that were timed for a problem on a device, fastest first."""

    problem: Annotated[Problem, Field(discriminator="op")]
    device: str = Field(description="name in torch")
    date: str = Field(
        pattern=r"^\d{4}-\d\d-\d\d$", description="date of the measurement; for converted rows, of its file"
    )
    source: str = Field(description="source of the row")
    kernels: Annotated[tuple[Timing, ...], Field(min_length=1)]
    dense: Dense | None = None

    def costs(self) -> list[float]:
        """Cost of each kernel in microseconds: geometric mean of both times if all have both, else of single calls.

        The geometric mean gives both times equal weight.
        """
        if all(each.back_to_back_us for each in self.kernels):
            return [math.sqrt(each.single_us * (each.back_to_back_us or 0)) for each in self.kernels]
        return [each.single_us for each in self.kernels]

    def dense_wins(self, timing: Timing) -> bool:
        """Whether a library's dense product is faster than a kernel of the row."""
        return self.dense is not None and self.dense.single_us < timing.single_us

    def line(self) -> str:
        """Row as a line of the file."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True) | {"problem": _plain(self.problem)})


def _plain(problem: Problem) -> Fields:
    """Problem as plain data, ``op`` first."""
    return {"op": problem.op, "arch": problem.arch, **problem.model_dump(mode="json", exclude_defaults=True)}


def place_of(row: Measurement) -> tuple[str, str]:
    """Key of a row: canonical text of its problem, and its device."""
    return json.dumps(_plain(row.problem), sort_keys=True), row.device


def ordered(row: Measurement) -> Measurement:
    """Row with its fastest kernel first."""
    by_cost = sorted(zip(row.costs(), range(len(row.kernels)), strict=True))
    return row.model_copy(update={"kernels": tuple(row.kernels[i] for _, i in by_cost)})


def read_rows(path: Path) -> tuple[Measurement, ...]:
    """Rows of a file.

    Raises:
        TableError: for a file that cannot be read, or an invalid line, with its number.
    """
    try:
        lines = read_text(path).split("\n")
    except FileError as error:
        raise TableError(str(error)) from None
    rows = []
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        try:
            rows.append(json_model(Measurement, line))
        except CodegenError as error:
            raise TableError(f"{one_line(str(path), MOST_OF_PLACE)}:{number}: {error}") from None
    return tuple(rows)


@cache
def measurements() -> tuple[Measurement, ...]:
    """Committed rows; each process reads them once."""
    return read_rows(TABLE)


def written(rows: Iterable[Measurement]) -> str:
    """Text of a file of rows, in canonical order."""
    return "".join(f"{row.line()}\n" for row in sorted(rows, key=lambda row: (row.line(), row.device)))


def merged(rows: Iterable[Measurement]) -> list[Measurement]:
    """Rows merged by problem and device; a kernel in several rows has its latest times."""
    found: dict[tuple[str, str], Measurement] = {}
    for row in sorted(rows, key=lambda row: row.date):
        place = place_of(row)
        earlier = found.get(place)
        if earlier is not None:
            kernels = {(each.label, each.prepared): each for each in (*earlier.kernels, *row.kernels)}
            sources = dict.fromkeys((*earlier.source.split("; "), *row.source.split("; ")))
            update = {"kernels": tuple(kernels.values()), "source": "; ".join(sources)}
            found[place] = ordered(row.model_copy(update={**update, "dense": row.dense or earlier.dense}))
        else:
            found[place] = ordered(row)
    return list(found.values())


def shared(rows: Sequence[Measurement]) -> list[Measurement]:
    """Rows without those of a second device for which the first device's choice is the same or loses little.

    The first device is the one with the most rows.
    """
    devices = sorted({row.device for row in rows}, key=lambda name: (-sum(r.device == name for r in rows), name))
    kept: dict[str, list[Measurement]] = {}
    for device in devices:
        for row in (row for row in rows if row.device == device):
            others = kept.setdefault(place_of(row)[0], [])
            if not any(_agree(other, row) for other in others):
                others.append(row)
    return [row for group in kept.values() for row in group]


def _agree(first: Measurement, second: Measurement) -> bool:
    """Whether the choice of one row loses little in another one, for every preparation."""
    for prepared in (None, "rows", "packed"):
        chosen, best = _best(first, prepared), _best(second, prepared)
        if chosen is None or best is None:
            if chosen is not best:
                return False
            continue
        costs = {each.label: cost for each, cost in zip(second.kernels, second.costs(), strict=True)}
        if chosen.label not in costs:  # the first row may have more kernels
            if best.label not in {each.label for each in first.kernels}:
                return False
        elif costs[chosen.label] > (1 + SAME) * costs[best.label]:
            return False
    return True


def _best(row: Measurement, prepared: str | None) -> Timing | None:
    allowed = {None: (None,), "rows": (None, "rows"), "packed": (None, "rows", "packed")}[prepared]
    return next((each for each in ordered(row).kernels if each.prepared in allowed), None)
