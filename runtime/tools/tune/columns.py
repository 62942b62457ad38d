"""The database file of a tuner: tables, models of their rows, and remedies for SQLite errors."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from codegen.errors import MOST_OF_MESSAGE, CodegenError
from codegen.plain import first_reason, json_value
from codegen.select.problem import Problem, parse_problem
from codegen.wording import one_line, shown

SCHEMA = """
CREATE TABLE IF NOT EXISTS timings (
    problem TEXT NOT NULL, spec_hash TEXT NOT NULL, source_sha256 TEXT NOT NULL,
    device TEXT NOT NULL, driver TEXT NOT NULL,
    stem TEXT NOT NULL, spec TEXT NOT NULL, date TEXT NOT NULL,
    failure TEXT NOT NULL, single_us REAL, back_to_back_us REAL, again INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (problem, spec_hash, source_sha256, device, driver)
);
CREATE TABLE IF NOT EXISTS begun (
    problem TEXT NOT NULL, spec_hash TEXT NOT NULL, source_sha256 TEXT NOT NULL,
    device TEXT NOT NULL, driver TEXT NOT NULL, times INTEGER NOT NULL,
    PRIMARY KEY (problem, spec_hash, source_sha256, device, driver)
);
CREATE TABLE IF NOT EXISTS dense (
    problem TEXT NOT NULL, device TEXT NOT NULL, driver TEXT NOT NULL,
    name TEXT NOT NULL, single_us REAL, back_to_back_us REAL,
    PRIMARY KEY (problem, device, driver)
);
CREATE TABLE IF NOT EXISTS comparisons (
    problem TEXT NOT NULL, spec_hash TEXT NOT NULL, source_sha256 TEXT NOT NULL,
    device TEXT NOT NULL, driver TEXT NOT NULL, other_hash TEXT NOT NULL, other_source TEXT NOT NULL,
    figures TEXT NOT NULL,
    PRIMARY KEY (problem, spec_hash, source_sha256, device, driver, other_hash, other_source)
);
CREATE TABLE IF NOT EXISTS compilations (
    spec_hash TEXT NOT NULL, source_sha256 TEXT NOT NULL, compiler TEXT NOT NULL, stem TEXT NOT NULL,
    failure TEXT NOT NULL,
    PRIMARY KEY (spec_hash, source_sha256, compiler)
);
"""


BUSY_SECONDS = 30
SECONDS = 60.0
"""Timeout of one use of the file, including the wait for other processes; a tuner's use takes milliseconds."""
OPERATIONS = 10_000
"""SQLite VM instructions between checks of the clock: less than a millisecond."""
MOST_BYTES = 64 << 20
"""Maximum size of a value or statement."""
FORMAT = 1
"""Format in the file's header (``user_version``). Files without one are older; their missing tables are created."""
REMEDY = "nothing was changed; move it away, or name another file with --db"
RECOVER = (
    "nothing was changed; recover the readable part into a new file with "
    "`sqlite3 FILE .recover | sqlite3 NEW`, or move it away, or name another one with --db"
)


def _parsed(value: object) -> Any:
    """Parse a column that holds JSON."""
    if not isinstance(value, str):
        raise ValueError("JSON in a text is expected")
    try:
        return json_value(value)
    except CodegenError as error:
        raise ValueError(str(error)) from None


def _problem(value: object) -> Problem:
    """Parse a column that holds a problem."""
    try:
        return parse_problem(_parsed(value))
    except CodegenError as error:
        raise ValueError(str(error)) from None


Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Model = TypeVar("Model", bound="Columns")


@dataclass(frozen=True)
class Figures:
    """Timings of a call, in microseconds."""

    single_us: float
    back_to_back_us: float | None = None


class Columns(BaseModel):
    """Columns of a row. They are validated, because SQLite stores values of any type in any column."""

    model_config = ConfigDict(frozen=True, strict=True)


class Begun(Columns):
    """Number of starts of a candidate without an end."""

    times: Count


class Place(Columns):
    """A problem, and a device on which candidates were timed for it."""

    problem: Annotated[Any, BeforeValidator(_problem)]
    device: str
    driver: str


class Tried(Columns):
    """A device, and the number of candidates tried on it."""

    device: str
    driver: str
    count: Count


class _Timed(Columns):
    single_us: Time | None
    back_to_back_us: Time | None

    @property
    def figures(self) -> Figures | None:
        """Both timings; None without one."""
        return None if self.single_us is None else Figures(self.single_us, self.back_to_back_us)


class Outcome(_Timed):
    """The outcome of a candidate."""

    date: str
    failure: str
    again: Count

    @model_validator(mode="after")
    def _explained(self) -> Outcome:
        if self.single_us is None and not self.failure:
            raise ValueError("has neither figures nor a failure")
        return self


class Candidate(_Timed):
    """A timed candidate."""

    stem: str
    spec: Annotated[dict[str, Any], BeforeValidator(_parsed)]
    source_sha256: str
    date: str
    single_us: Time


class Dense(_Timed):
    """A dense product of a library; without figures if it could not be timed."""

    name: str


_Repeat = Annotated[tuple[Time, Time | None], Field(strict=False)]
_Repeats = Annotated[list[_Repeat], Field(min_length=1)]


class Comparison(Columns):
    """Repeats of the timings of two candidates."""

    figures: Annotated[tuple[_Repeats, _Repeats], Field(strict=False), BeforeValidator(_parsed)]

    @property
    def repeats(self) -> tuple[list[Figures], list[Figures]]:
        """The figures of the first and of the second candidate."""
        first, second = ([Figures(*pair) for pair in side] for side in self.figures)
        return first, second


class Compilation(Columns):
    """The compiler's error for a candidate; "" if it compiles."""

    failure: str


def read(model: type[Model], table: str, number: object, columns: Mapping[str, Any]) -> Model:
    """Read a row of a table.

    Args:
        model: model of the row.
        table: name of the table.
        number: index of the row in the table (``rowid``).
        columns: values by column.

    Raises:
        CodegenError: for an invalid value, with table, row and column.
    """
    try:
        return model.model_validate(columns)
    except ValidationError as error:
        raise CodegenError(f"{table}, row {shown(number)}: {first_reason(error)}") from None


def remedied(error: sqlite3.Error) -> str:
    """The message of a SQLite error, with a remedy if there is one."""
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF  # the other bits are the extended code
    remedies = {
        sqlite3.SQLITE_CORRUPT: RECOVER,
        sqlite3.SQLITE_NOTADB: REMEDY,
        sqlite3.SQLITE_BUSY: f"another process has been writing to it for {BUSY_SECONDS} s: wait for it, and run again",
        sqlite3.SQLITE_FULL: "earlier results are kept: free disk space, and run again",
        sqlite3.SQLITE_READONLY: "it or its folder is not writable: copy it elsewhere, and name the copy with --db",
        sqlite3.SQLITE_CANTOPEN: "does its folder exist, and is it writable?",
    }
    told = one_line(str(error), MOST_OF_MESSAGE)  # it may quote names and values of the file
    return f"{told}; {remedies[primary]}" if primary in remedies else told
