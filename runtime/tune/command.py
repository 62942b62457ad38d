"""What ``codegen tune`` does between its options and the tuner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from codegen.errors import MOST_OF_MESSAGE, MOST_OF_PLACE, CodegenError
from codegen.files import read_text, write_if_changed
from codegen.library import NamedSpec
from codegen.plain import json_value
from codegen.progress import progress
from codegen.report import Report
from codegen.select.candidates import candidates
from codegen.select.problem import Problem, parse_problem, problem_fields
from codegen.select.table import written
from codegen.wording import one_line
from runtime.compile import jit, toolchain
from runtime.compile.compiler import compile_spec
from runtime.tune.database import Database, Record
from runtime.tune.tuner import best_of, compile_all, exported, tune

SHOWN = 3  # of the fastest kernels of a problem


def read_problems(texts: Sequence[str], file: Path | None) -> list[Problem]:
    """Read the problems of a command line and of a file, each once.

    Raises:
        CodegenError: for one that is none, with the line of the file.
    """
    found = [parse_problem(problem_fields(text)) for text in texts]
    if file is not None:
        for number, line in enumerate(read_text(file).splitlines(), 1):
            try:
                found.append(parse_problem(json_value(line)))
            except CodegenError as error:
                raise CodegenError(f"{one_line(str(file), MOST_OF_PLACE)}:{number}: {error}") from None
    return list(dict.fromkeys(found))


def run(
    told: Report, database: Database, problems: Sequence[Problem], *, compile_only: bool, most: int, jobs: int | None
) -> None:
    """Compile the candidates of problems and, unless told otherwise, time them."""
    of_problem = {problem: candidates(problem, most) for problem in told.steps("finding candidates", problems, str)}
    every = [named for group in of_problem.values() for named in group]
    compiler = " ".join(toolchain.compiler_version())
    if jit.is_forbidden():  # before a candidate is begun: one that is missing would count as one that fails
        for named in every:
            if not database.compilation(named, compiler):
                compile_spec(named)
    with progress("compiling", len({named.spec.hash for named in every})) as at:
        failures = compile_all(database, every, compiler, compile_spec, progress=at, jobs=jobs)
    for spec_hash, failure in failures.items():
        stem = next(named.stem for named in every if named.spec.hash == spec_hash)
        typer.echo(f"{stem} does not compile: {one_line(failure.splitlines()[0], MOST_OF_MESSAGE)}", err=True)
    count = len({named.spec.hash for named in every})
    told.note("candidates", count, f"{count} candidates of {len(of_problem)} problems are compiled")
    if not compile_only:
        _time(told, database, of_problem, failures)


def _time(
    told: Report, database: Database, of_problem: dict[Problem, list[NamedSpec]], failures: dict[str, str]
) -> None:
    from runtime.tune.gpu import GpuBench, device  # noqa: PLC0415

    here = device(of_problem)
    with progress("timing", sum(map(len, of_problem.values()))) as at:
        for problem, named in of_problem.items():

            def done(stem: str, problem: Problem = problem) -> None:
                at(f"{problem}: {stem}")

            _tell(told, problem, tune(database, problem, named, here, GpuBench, failures=failures, progress=done))


def _tell(told: Report, problem: Problem, records: Sequence[Record]) -> None:
    """Print the fastest kernels of a problem and those that failed."""
    told.say(str(problem))
    for place, record in enumerate(best_of(records)):
        assert record.figures is not None
        back_to_back = record.figures.back_to_back_us
        more = "" if back_to_back is None else f" / {back_to_back:.4g}"
        line = f"    {record.figures.single_us:.4g}{more} us  {record.named.stem}" if place < SHOWN else ""
        told.row({"problem": str(problem), "kernel": record.named.stem, **asdict(record.figures)}, line)
    for record in records:
        if record.failure:
            failure = one_line(record.failure.splitlines()[0], MOST_OF_MESSAGE)
            told.row({"problem": str(problem), "kernel": record.named.stem, "failure": record.failure})
            typer.echo(f"    no time: {record.named.stem} {failure}", err=True)


def export_rows(database: Database, path: Path) -> int:
    """Write what a database has as rows of the table of measurements; return how many."""
    rows = exported(database)
    write_if_changed(path, written(rows))
    return len(rows)
