"""The results of a tuner, in an SQLite file that survives an interruption.

Each candidate is committed separately, and existing results are not measured again. The key of a timing is its problem,
the hashes of spec and source, the device and the driver; the key of a compilation is the hashes and the compiler.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from codegen.errors import MOST_OF_MESSAGE, MOST_OF_PLACE, CodegenError, FileError
from codegen.files import check_replaceable
from codegen.library import NamedSpec
from codegen.receipts import source_sha256
from codegen.render import render
from codegen.select.problem import Problem
from codegen.spec import canonical
from codegen.wording import one_line
from runtime.tools.tune.columns import (
    BUSY_SECONDS,
    FORMAT,
    MOST_BYTES,
    OPERATIONS,
    RECOVER,
    REMEDY,
    SCHEMA,
    SECONDS,
    Begun,
    Candidate,
    Comparison,
    Compilation,
    Dense,
    Figures,
    Model,
    Outcome,
    Place,
    Tried,
    read,
    remedied,
)


class DatabaseError(CodegenError):
    """A database that cannot be opened or written."""


@dataclass(frozen=True)
class Device:
    """A GPU and its driver. Timings of different devices are never mixed."""

    name: str
    driver: str


@dataclass(frozen=True)
class Record:
    """The outcome of a candidate: figures, or the reason why it has none.

    Attributes:
        problem: its problem.
        named: the candidate; without a file in a record that was read.
        device: device of the run.
        date: date of the timing.
        failure: reason why it was not timed, or "".
        figures: timings in both modes.
        again: whether the figures are from a second, longer timing of the best candidates.
    """

    problem: Problem
    named: NamedSpec
    device: Device
    date: str
    failure: str = ""
    figures: Figures | None = None
    again: bool = False


def spelt_problem(problem: Problem) -> str:
    """A problem in canonical form."""
    return canonical({"op": problem.op, "arch": problem.arch, **problem.model_dump(mode="json", exclude_defaults=True)})


@lru_cache(maxsize=4096)  # rendering takes tens of milliseconds
def source_of(named: NamedSpec) -> str:
    """The hash of a candidate's source."""
    return source_sha256(render(named))


OF_PLACE = "problem=? AND spec_hash=? AND source_sha256=? AND device=? AND driver=?"


def _place(problem: Problem, named: NamedSpec, device: Device) -> tuple[str, ...]:
    """The key of a candidate."""
    return (spelt_problem(problem), named.spec.hash, source_of(named), device.name, device.driver)


class Database:
    """The database file. Several processes may read it while one writes (WAL)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = one_line(str(path), MOST_OF_PLACE)
        try:
            check_replaceable(path)  # SQLite writes its journal beside the file
        except FileError as error:
            raise DatabaseError(str(error)) from None
        try:
            with self._opened("cannot be opened: ") as connection:
                self._check(connection)
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(SCHEMA)
                connection.execute(f"PRAGMA user_version={FORMAT}")
        except ValueError as error:  # a null byte in the name
            raise DatabaseError(f"{self.place}: cannot be opened: {one_line(str(error))}") from None

    def _check(self, connection: sqlite3.Connection) -> None:
        """Refuse a file of another kind, or a damaged one, before writing to it."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        parts = list(connection.execute("SELECT type, name, sql FROM sqlite_master"))
        tables = {name for kind, name, _ in parts if kind == "table"}
        known = set(re.findall(r"CREATE TABLE IF NOT EXISTS (\w+)", SCHEMA))
        if version > FORMAT:
            raise DatabaseError(f"{self.place}: has format {version}, but this version reads {FORMAT}: {REMEDY}")
        if tables and not tables & known:
            others = one_line(", ".join(sorted(map(str, tables))))
            raise DatabaseError(f"{self.place}: is a database of something else ({others}): {REMEDY}")
        for kind, name, sql in parts:  # a view may have endless rows, a trigger may write them
            if kind not in ("table", "index") or re.match(r"\s*create\s+virtual", str(sql), re.IGNORECASE):
                told = one_line(f"a {kind} {name}" if kind != "table" else f"a virtual table {name}")
                raise DatabaseError(f"{self.place}: holds {told}, which is not from a tuner: {REMEDY}")
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise DatabaseError(f"{self.place}: is damaged ({one_line(found)}); {RECOVER}")

    @contextmanager
    def _opened(self, doing: str = "") -> Iterator[sqlite3.Connection]:
        """Open the file for statements with bounded time and memory, whatever its contents."""
        last = time.monotonic() + SECONDS
        try:
            with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS)) as connection:
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
                connection.set_progress_handler(lambda: time.monotonic() > last, OPERATIONS)
                yield connection
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_INTERRUPT:
                raise DatabaseError(f"{self.place}: {doing}{remedied(error)}") from None
            if time.monotonic() <= last:  # Ctrl-C in the progress handler: sqlite3 drops its exception
                raise KeyboardInterrupt from None
            raise DatabaseError(f"{self.place}: {doing}it takes longer than {SECONDS:g} s: {REMEDY}") from None

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one statement, committed at the end."""
        with self._opened() as connection, connection:
            yield connection

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Add the file's name to errors about its contents."""
        try:
            yield
        except CodegenError as error:
            told = one_line(str(error), MOST_OF_MESSAGE)
            raise DatabaseError(f"{self.place}: holds what no tuner wrote there: {told}") from None

    def _rows(
        self, model: type[Model], table: str, rest: str, values: tuple[Any, ...] = (), *, names: str = ""
    ) -> list[Model]:
        """Read rows of a table.

        Args:
            model: model of a row; its fields are columns.
            table: the table's name.
            rest: the rest of the statement.
            values: values of its parameters.
            names: expressions of the row index and the model's fields, if they are not just columns.
        """
        selected = names or ", ".join(("rowid", *model.model_fields))
        with self._connection() as connection:
            found = list(connection.execute(f"SELECT {selected} FROM {table} {rest}", values))
        with self._kept():
            rows = ((number, dict(zip(model.model_fields, row, strict=True))) for number, *row in found)
            return [read(model, table, number, columns) for number, columns in rows]

    def begin(self, problem: Problem, named: NamedSpec, device: Device) -> int:
        """Record the start of a candidate; return the number of earlier starts without an end (hangs, crashes)."""
        place = _place(problem, named, device)
        with self._connection() as connection:
            found = connection.execute(f"SELECT rowid, times FROM begun WHERE {OF_PLACE}", place).fetchone()
            with self._kept():
                before = read(Begun, "begun", found[0], {"times": found[1]}).times if found else 0
            connection.execute("INSERT OR REPLACE INTO begun VALUES (?,?,?,?,?,?)", (*place, before + 1))
        return before

    def write(self, record: Record) -> None:
        """Store the outcome of a candidate."""
        place, figures = _place(record.problem, record.named, record.device), record.figures or Figures(0.0)
        times = (figures.single_us, figures.back_to_back_us) if record.figures else (None, None)
        with self._connection() as connection:
            connection.execute(f"DELETE FROM begun WHERE {OF_PLACE}", place)
            connection.execute(
                "INSERT OR REPLACE INTO timings VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    *place,
                    *(record.named.stem, record.named.spec.canonical_json(), record.date),
                    *(record.failure, *times, int(record.again)),
                ),
            )

    def record(self, problem: Problem, named: NamedSpec, device: Device) -> Record | None:
        """The outcome of a candidate on a device; None if its current source was not tried."""
        for row in self._rows(Outcome, "timings", f"WHERE {OF_PLACE}", _place(problem, named, device)):
            return Record(problem, named, device, row.date, row.failure, row.figures, bool(row.again))
        return None

    def problems(self) -> list[tuple[Problem, Device]]:
        """Each problem with the devices on which candidates were timed, in a fixed order."""
        order = "problem, device, driver"
        grouped = f"WHERE failure='' GROUP BY {order} ORDER BY {order}"
        found = self._rows(Place, "timings", grouped, names=f"min(rowid), {order}")
        return [(row.problem, Device(row.device, row.driver)) for row in found]

    def rows(self, problem: Problem, device: Device) -> list[Candidate]:
        """The timed candidates of a problem on a device, the fastest first."""
        place = (spelt_problem(problem), device.name, device.driver)
        ordered = "WHERE problem=? AND device=? AND driver=? AND failure='' ORDER BY single_us"
        return self._rows(Candidate, "timings", ordered, place)

    def write_dense(self, problem: Problem, device: Device, name: str, figures: Figures | None) -> None:
        """Store the timing of a library's dense product; without figures, that there is none."""
        times = (figures.single_us, figures.back_to_back_us) if figures else (None, None)
        place = (spelt_problem(problem), device.name, device.driver)
        with self._connection() as connection:
            connection.execute("INSERT OR REPLACE INTO dense VALUES (?,?,?,?,?,?)", (*place, name, *times))

    def dense(self, problem: Problem, device: Device) -> tuple[str, Figures | None] | None:
        """The dense product and its figures; None if it was not tried."""
        place = (spelt_problem(problem), device.name, device.driver)
        for row in self._rows(Dense, "dense", "WHERE problem=? AND device=? AND driver=?", place):
            return row.name, row.figures
        return None

    def write_comparison(
        self,
        problem: Problem,
        one: NamedSpec,
        other: NamedSpec,
        device: Device,
        figures: tuple[Sequence[Figures], Sequence[Figures]],
    ) -> None:
        """Store repeats of the timings of two candidates."""
        told = json.dumps([[[each.single_us, each.back_to_back_us] for each in side] for side in figures])
        place = (*_place(problem, one, device), other.spec.hash, source_of(other), told)
        with self._connection() as connection:
            connection.execute("INSERT OR REPLACE INTO comparisons VALUES (?,?,?,?,?,?,?,?)", place)

    def comparison(
        self, problem: Problem, one: NamedSpec, other: NamedSpec, device: Device
    ) -> tuple[list[Figures], list[Figures]] | None:
        """Repeats of the timings of two candidates; None if they were not compared."""
        place = (*_place(problem, one, device), other.spec.hash, source_of(other))
        pair = f"WHERE {OF_PLACE} AND other_hash=? AND other_source=?"
        for row in self._rows(Comparison, "comparisons", pair, place):
            return row.repeats
        return None

    def devices(self) -> list[tuple[Device, int]]:
        """The devices on which candidates were tried, and the number of candidates on each."""
        grouped = "GROUP BY device, driver ORDER BY device, driver"
        found = self._rows(Tried, "timings", grouped, names="min(rowid), device, driver, count(*)")
        return [(Device(row.device, row.driver), row.count) for row in found]

    def write_compilation(self, named: NamedSpec, compiler: str, failure: str) -> None:
        """Store whether a candidate compiles: ``failure`` is the compiler's error, or ""."""
        with self._connection() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO compilations VALUES (?,?,?,?,?)",
                (named.spec.hash, source_of(named), compiler, named.stem, failure),
            )

    def compilation(self, named: NamedSpec, compiler: str) -> str | None:
        """The reason why a candidate does not compile, or ""; None if it was not compiled."""
        place = (named.spec.hash, source_of(named), compiler)
        found = self._rows(Compilation, "compilations", "WHERE spec_hash=? AND source_sha256=? AND compiler=?", place)
        return found[0].failure if found else None
