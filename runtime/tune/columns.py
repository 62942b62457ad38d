"""What the file of a tuner holds: tables and values of columns; and what to do where it is not as it should be."""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass
from typing import Any

from codegen.errors import MOST_OF_MESSAGE, CodegenError
from codegen.plain import json_value
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
"""Of one use of the file, the wait for other processes among them; a tuner's takes milliseconds."""
OPERATIONS = 10_000
"""Of SQLite's machine, between looks at the clock: less than a millisecond."""
MOST_BYTES = 64 << 20
"""Of one value or statement."""
FORMAT = 1
"""In the file's header (``user_version``). Files without one are older, and of the same tables but those that are made
where they are missing."""
REMEDY = "nothing was changed; move it away, or name another file with --db"
RECOVER = (
    "nothing was changed; what can still be read of it goes into a new file by "
    "`sqlite3 FILE .recover | sqlite3 NEW`, else move it away, or name another one with --db"
)


@dataclass(frozen=True)
class Figures:
    """What a call takes, in microseconds."""

    single_us: float
    back_to_back_us: float | None = None


def fields_of(text: Any) -> dict[str, Any]:
    """Return the fields of a spec that was kept.

    Raises:
        CodegenError: for a text that is none.
    """
    if not isinstance(fields := json_value(text), dict):
        raise CodegenError(f"{shown(text)} is no spec")
    return fields


def word_of(value: Any) -> str:
    """Return a text of a row.

    Raises:
        CodegenError: for a column that is none.
    """
    if not isinstance(value, str):
        raise CodegenError(f"{shown(value)} is no text")
    return value


def count_of(value: Any) -> int:
    """Return a count of a row.

    Raises:
        CodegenError: for a column that is none.
    """
    if not isinstance(value, int) or value < 0:
        raise CodegenError(f"{shown(value)} is no count")
    return value


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


def figures_of(single: Any, back_to_back: Any) -> Figures:
    """Return the figures of a row.

    Raises:
        CodegenError: for columns that are no finite numbers above 0: SQLite keeps any value in any of them.
    """
    if not (_is_time(single) and (back_to_back is None or _is_time(back_to_back))):
        raise CodegenError(f"{shown((single, back_to_back))} are no figures in microseconds")
    return Figures(single, back_to_back)


def repeats_of(told: Any) -> tuple[list[Figures], list[Figures]]:
    """Return the repeats of two candidates.

    Raises:
        CodegenError: for a text that is none of those.
    """
    match json_value(told):
        case [[_, *_] as one, [_, *_] as other] if all(
            isinstance(each, list) and len(each) == 2 for each in one + other
        ):
            first, second = ([figures_of(single, block) for single, block in side] for side in (one, other))
            return first, second
    raise CodegenError(f"{shown(told)} are no repeats of two timings")


def remedied(error: sqlite3.Error) -> str:
    """Return what SQLite says, with what to do."""
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF  # the rest says which of its kind
    remedies = {
        sqlite3.SQLITE_CORRUPT: RECOVER,
        sqlite3.SQLITE_NOTADB: REMEDY,
        sqlite3.SQLITE_BUSY: f"another process has written to it for {BUSY_SECONDS} s: wait for it, and run again",
        sqlite3.SQLITE_FULL: "what was kept before stays: make room, and run again",
        sqlite3.SQLITE_READONLY: "it or its folder cannot be written to: copy it elsewhere, and name that with --db",
        sqlite3.SQLITE_CANTOPEN: "is its folder there, and may it be written to?",
    }
    told = one_line(str(error), MOST_OF_MESSAGE)  # it may quote names and values of the file
    return f"{told}; {remedies[primary]}" if primary in remedies else told
