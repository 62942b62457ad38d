"""What ``codegen tune`` does between its options and the tuner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from codegen.errors import MOST_OF_PLACE, CodegenError
from codegen.files import read_text, write_if_changed
from codegen.library import NamedSpec
from codegen.plain import json_value
from codegen.select.candidates import candidates
from codegen.select.problem import Problem, parse_problem, problem_fields
from codegen.select.table import written
from codegen.wording import one_line
from runtime.compile import toolchain
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


def run(database: Database, problems: Sequence[Problem], *, compile_only: bool, most: int, jobs: int | None) -> None:
    """Compile the candidates of problems and, unless told otherwise, time them."""
    with _progress() as progress:
        task = progress.add_task("", what="candidates")
        of_problem: dict[Problem, list[NamedSpec]] = {}
        for problem in problems:
            progress.update(task, what=f"candidates of {problem}")
            of_problem[problem] = candidates(problem, most)
        every = [named for group in of_problem.values() for named in group]

        def done(stem: str) -> None:
            progress.update(task, what=f"compiled {stem}")

        compiler = " ".join(toolchain.compiler_version())
        failures = compile_all(database, every, compiler, compile_spec, progress=done, jobs=jobs)
    for spec_hash, failure in failures.items():
        stem = next(named.stem for named in every if named.spec.hash == spec_hash)
        typer.echo(f"{stem} does not compile: {failure.splitlines()[0]}", err=True)
    typer.echo(f"{len({named.spec.hash for named in every})} candidates of {len(of_problem)} problems are compiled")
    if not compile_only:
        _time(database, of_problem, failures)


def _time(database: Database, of_problem: dict[Problem, list[NamedSpec]], failures: dict[str, str]) -> None:
    from runtime.tune.gpu import GpuBench, device  # noqa: PLC0415

    here = device(of_problem)
    with _progress() as progress:
        task = progress.add_task("", what="")
        for problem, named in of_problem.items():

            def done(stem: str, problem: Problem = problem) -> None:
                progress.update(task, what=f"{problem}: {stem}")

            _tell(problem, tune(database, problem, named, here, GpuBench, failures=failures, progress=done))


def _tell(problem: Problem, records: Sequence[Record]) -> None:
    """Print the fastest kernels of a problem and those that failed."""
    typer.echo(str(problem))
    for record in best_of(records)[:SHOWN]:
        assert record.figures is not None
        back_to_back = record.figures.back_to_back_us
        more = "" if back_to_back is None else f" / {back_to_back:.4g}"
        typer.echo(f"    {record.figures.single_us:.4g}{more} us  {record.named.stem}")
    for record in records:
        if record.failure:
            typer.echo(f"    no time: {record.named.stem} {record.failure.splitlines()[0]}", err=True)


def _progress() -> Progress:
    """Return a line that says what is being done; on standard error, where that is a terminal."""
    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.fields[what]}"))
    return Progress(*columns, console=Console(stderr=True), transient=True)


def export_rows(database: Database, path: Path) -> int:
    """Write what a database has as rows of the table of measurements; return how many."""
    rows = exported(database)
    write_if_changed(path, written(rows))
    return len(rows)
