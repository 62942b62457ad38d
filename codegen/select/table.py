"""The table of measurements: which kernels were timed for which problem, on which device, and how long they took.

``measurements.jsonl`` has one row a line, written by ``benchmarks/measurement_rows.py`` from the results of benchmarks
and by ``codegen tune --export``; nothing in it is typed by hand.
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
"""Two devices of an architecture share a row where the choice of one loses no more than this on the other."""
UNMEASURED = 1.25
"""What a kernel is taken to lose in a row in which it was not measured: more than the tuned one of the next row."""
Fields = dict[str, Any]
Microseconds = Annotated[float, Field(gt=0)]


class TableError(CodegenError):
    """A table of measurements that cannot be read."""


class Timing(SpecModel):
    """How long one kernel took."""

    spec: str | dict[str, Any] = Field(description="name of a shipped spec, or the fields that say how it computes")
    single_us: Microseconds = Field(description="of a single call after a pause, median")
    back_to_back_us: Microseconds | None = Field(default=None, description="of a call among others back to back")
    prepared: Literal["rows", "packed"] | None = Field(
        default=None, description="what was done to A before: see BsrProblem; None if the kernel makes no use of it"
    )
    earlier_source: bool = Field(default=False, description="whether its source has changed since")

    @model_validator(mode="after")
    def _is_whole(self) -> Timing:
        if not isinstance(self.spec, str) and not {"tile", "stages"} <= self.spec.keys():
            raise ValueError("spec has no tile or no stages: it is none that was timed")
        return self

    @property
    def tuning(self) -> Fields:
        """The fields that say how it computes."""
        return dict(_tuning(self.spec)) if isinstance(self.spec, str) else self.spec

    @property
    def label(self) -> str:
        """Its tuning in one spelling, unique within its problem."""
        return canonical(self.tuning)


@cache
def _tuning(stem: str) -> Fields:
    return tuning_of(find_spec(stem).spec)


class Dense(SpecModel):
    """The fastest dense product or dense attention of a library, on the same problem."""

    name: str
    single_us: Microseconds
    back_to_back_us: Microseconds | None = None


class Measurement(SpecModel):
    """One row: the kernels that were timed for a problem on a device, the fastest first."""

    problem: Annotated[Problem, Field(discriminator="op")]
    device: str = Field(description="as torch names it")
    date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$", description="of the measurement; of converted rows, of its file")
    source: str = Field(description="where it is from")
    kernels: Annotated[tuple[Timing, ...], Field(min_length=1)]
    dense: Dense | None = None

    def costs(self) -> list[float]:
        """The cost of each kernel in microseconds: the mean of both figures where all have both, else single calls.

        The mean is geometric: a kernel is not to win by long calls alone.
        """
        if all(each.back_to_back_us for each in self.kernels):
            return [math.sqrt(each.single_us * (each.back_to_back_us or 0)) for each in self.kernels]
        return [each.single_us for each in self.kernels]

    def dense_wins(self, timing: Timing) -> bool:
        """Whether a library's dense product is faster than a kernel of the row."""
        return self.dense is not None and self.dense.single_us < timing.single_us

    def line(self) -> str:
        """Row as the file has it."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True) | {"problem": _plain(self.problem)})


def _plain(problem: Problem) -> Fields:
    """Problem as plain data, ``op`` first."""
    return {"op": problem.op, "arch": problem.arch, **problem.model_dump(mode="json", exclude_defaults=True)}


def place_of(row: Measurement) -> tuple[str, str]:
    """The key of a row: its problem, in one spelling, and its device."""
    return json.dumps(_plain(row.problem), sort_keys=True), row.device


def ordered(row: Measurement) -> Measurement:
    """Row with its fastest kernel first."""
    by_cost = sorted(zip(row.costs(), range(len(row.kernels)), strict=True))
    return row.model_copy(update={"kernels": tuple(row.kernels[i] for _, i in by_cost)})


def read_rows(path: Path) -> tuple[Measurement, ...]:
    """Read a file of rows.

    Raises:
        TableError: for a file that cannot be read, or a line that is no row: with its number.
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
    """Committed rows, as a process first read them."""
    return read_rows(TABLE)


def written(rows: Iterable[Measurement]) -> str:
    """Text of a file of rows, in one order."""
    return "".join(f"{row.line()}\n" for row in sorted(rows, key=lambda row: (row.line(), row.device)))


def merged(rows: Iterable[Measurement]) -> list[Measurement]:
    """One row for each problem on each device: of a kernel in several, the latest figures, in their order."""
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
    """Rows without those of a second device whose choice is that of the first, or loses little by it.

    The first device is the one with most rows.
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
    """Whether the choice of one row loses little in another one, among those that any preparation allows."""
    for prepared in (None, "rows", "packed"):
        chosen, best = _best(first, prepared), _best(second, prepared)
        if chosen is None or best is None:
            if chosen is not best:
                return False
            continue
        costs = {each.label: cost for each, cost in zip(second.kernels, second.costs(), strict=True)}
        if chosen.label not in costs:  # the first row knows more kernels, if that one lost there
            if best.label not in {each.label for each in first.kernels}:
                return False
        elif costs[chosen.label] > (1 + SAME) * costs[best.label]:
            return False
    return True


def _best(row: Measurement, prepared: str | None) -> Timing | None:
    allowed = {None: (None,), "rows": (None, "rows"), "packed": (None, "rows", "packed")}[prepared]
    return next((each for each in ordered(row).kernels if each.prepared in allowed), None)
