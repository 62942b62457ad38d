"""``codegen tune``, after option parsing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import typer

from codegen.errors import MOST_OF_MESSAGE, MOST_OF_PLACE, CodegenError, SpecError
from codegen.files import read_text, write_if_changed
from codegen.library import NamedSpec
from codegen.plain import json_value
from codegen.select.candidates import candidates
from codegen.select.choice import choose, planned
from codegen.select.limits import MOST
from codegen.select.problem import Fields, Problem, parse_problem, problem_fields, said_by
from codegen.select.space import Space, parse_axes, space
from codegen.select.table import written
from codegen.tools.progress import progress
from codegen.tools.report import Report
from codegen.wording import one_line, shown
from runtime.compile import jit, toolchain
from runtime.compile.compiler import compile_spec
from runtime.tools.tune.database import Database, Device
from runtime.tools.tune.exported import exported
from runtime.tools.tune.sampler import Sampler
from runtime.tools.tune.search import optuna, search
from runtime.tools.tune.told import tell, tell_space
from runtime.tools.tune.tuner import Course, compile_all, cost

FEWEST_AT_ONCE = 8
"""Number of parts of a budget. The candidates of a part are proposed together, so that they compile in parallel."""


@dataclass(frozen=True)
class Options:
    """Options of tuning.

    Attributes:
        compile_only: compile without timing.
        most: maximum number of variations per problem, without a space.
        jobs: parallel compilations; None for one per CPU.
        over: the space, as given on the command line.
        trials: number of candidates of a space to try; None for all.
        sampler: method that proposes them.
        write: write a faster spec to its file.
    """

    compile_only: bool = False
    most: int = MOST
    jobs: int | None = None
    over: tuple[str, ...] = ()
    trials: int | None = None
    sampler: Sampler = Sampler.TPE
    write: bool = False

    def check(self) -> None:
        """Refuse incompatible options.

        Raises:
            CodegenError: naming the options.
        """
        if self.trials is not None and not self.over:
            raise CodegenError("--trials is a budget for a space: name one with --over")
        if self.trials is not None and self.compile_only:
            raise CodegenError("--trials with --compile-only: what is tried follows from timings; leave one out")
        if self.write and self.compile_only:
            raise CodegenError("--write with --compile-only: nothing is timed, so nothing is proposed")


@dataclass(frozen=True)
class Task:
    """A problem with its candidates.

    Attributes:
        problem: the problem.
        current: the spec to improve; the results of others must agree with it.
        candidates: the kernels to try, the current one first.
        space: the space of the candidates, if the user gave one.
    """

    problem: Problem
    current: NamedSpec
    candidates: list[NamedSpec] = field(repr=False)
    space: Space | None = field(default=None, repr=False)


def read_problems(texts: Sequence[str], file: Path | None, spec: NamedSpec | None = None) -> list[Problem]:
    """Read the problems of a command line and of a file, without duplicates.

    Args:
        texts: FIELD=VALUE,... each; fields of ``spec`` may be omitted.
        file: problems as JSON, one per line.
        spec: the spec that computes them.

    Raises:
        CodegenError: for an invalid problem, with the line of the file, or one that contradicts the spec.
    """

    def of(fields: Fields) -> Problem:
        own = {} if spec is None else said_by(spec.spec)
        for name in own.keys() & fields.keys():
            if own[name] != fields[name]:
                raise SpecError(f"problem.{name}", f"is {shown(fields[name])}, but the spec's is {shown(own[name])}")
        return parse_problem({**fields, **own})

    found = [of(problem_fields(text)) for text in texts]
    if file is not None:
        for number, line in enumerate(read_text(file).splitlines(), 1):
            try:
                fields = json_value(line)
                found.append(of(fields) if isinstance(fields, dict) else parse_problem(fields))
            except CodegenError as error:
                raise CodegenError(f"{one_line(str(file), MOST_OF_PLACE)}:{number}: {error}") from None
    return list(dict.fromkeys(found))


def task_of(problem: Problem, spec: NamedSpec | None, options: Options) -> Task:
    """The task of a problem.

    Args:
        problem: the problem.
        spec: the current spec; None for the choice of codegen.select.
        options: options of the command.

    Raises:
        CodegenError: for an invalid space, or one without legal candidates.
    """
    if not options.over:
        found = candidates(problem, options.most)
        if spec is None:
            return Task(problem, found[0], found)
        others = [named for named in found if named.spec != spec.spec]
        return Task(problem, spec, [spec, *others])
    current = spec or planned(choose(problem)).named
    made = space(current, problem, parse_axes(options.over, current.spec))
    return Task(problem, current, made.candidates, made)


def run(told: Report, database: Database, tasks: Sequence[Task], options: Options) -> None:
    """Compile the candidates of tasks and, unless ``compile_only``, time them."""
    try:
        _run(told, database, tasks, options)
    except KeyboardInterrupt:
        line = f"interrupted; {database.place} keeps the results: run the same command to continue"
        raise KeyboardInterrupt(line) from None


def _run(told: Report, database: Database, tasks: Sequence[Task], options: Options) -> None:
    searched = [task for task in tasks if task.space and options.trials and options.trials < len(task.candidates)]
    if searched:
        optuna()  # before anything is compiled
    for task in tasks:
        if task.space is not None:
            tell_space(told, task.problem, task.current, task.space)
    every = [named for task in tasks if task not in searched for named in task.candidates]
    compiler = " ".join(toolchain.compiler_version())
    failures = _compiled(database, every, compiler, options.jobs)
    count = len({named.spec.hash for named in every})
    if every:
        told.note("candidates", count, f"compiling {count} candidates of {len(tasks) - len(searched)} problems")
    if not options.compile_only:
        _time(told, database, tasks, options, failures)


def _compiled(database: Database, every: Sequence[NamedSpec], compiler: str, jobs: int | None) -> dict[str, str]:
    """Compile candidates, report failures, and return their reasons by spec hash."""
    if jit.is_forbidden():  # before the first candidate, because a missing one would count as a failure
        for named in every:
            if not database.compilation(named, compiler):
                compile_spec(named)
    with progress("compiling", len({named.spec.hash for named in every})) as at:
        failures = compile_all(database, every, compiler, compile_spec, progress=at, jobs=jobs)
    for spec_hash, failure in failures.items():
        stem = next(named.stem for named in every if named.spec.hash == spec_hash)
        typer.echo(f"{stem} does not compile: {one_line(failure.splitlines()[0], MOST_OF_MESSAGE)}", err=True)
    return failures


def _time(told: Report, database: Database, tasks: Sequence[Task], options: Options, failures: dict[str, str]) -> None:
    from runtime.tools.tune.gpu import GpuBench, device  # noqa: PLC0415

    here = device([task.problem for task in tasks])
    tell_other_devices(told, database, here)
    budgets = [min(options.trials or len(task.candidates), len(task.candidates)) for task in tasks]
    with progress("timing", sum(budgets)) as at:
        for task, budget in zip(tasks, budgets, strict=True):
            course = Course(database, task.problem, task.current, here, GpuBench)
            tried = _tried(database, task, course, options=options, budget=budget, failures=failures, at=at)
            records = course.finish(tried, beside=task.current)
            tell(told, task.problem, task.current, records, course, write=options.write)


def _tried(
    database: Database,
    task: Task,
    course: Course,
    *,
    options: Options,
    budget: int,
    failures: dict[str, str],
    at: Callable[[str], None],
) -> list[NamedSpec]:
    """Try the candidates of a task, or as many as the budget allows, and return them."""

    def attempt(group: Sequence[NamedSpec], failed: dict[str, str]) -> list[float | None]:
        costs = []
        for named in group:
            at(f"{task.problem}: {named.stem}")
            record = course.attempt(named, failed.get(named.spec.hash, ""))
            costs.append(None if record.figures is None else cost(record.figures))
        return costs

    if task.space is None or budget == len(task.candidates):
        attempt(task.candidates, failures)
        return task.candidates
    compiler = " ".join(toolchain.compiler_version())

    def compiled(group: Sequence[NamedSpec]) -> list[float | None]:
        return attempt(group, _compiled(database, group, compiler, options.jobs))

    return search(task.space, budget, options.sampler, compiled, max(1, budget // FEWEST_AT_ONCE))


def tell_other_devices(told: Report, database: Database, here: Device) -> None:
    """Report timings of other devices or drivers in the database, which are kept but not used."""
    others = [(device, count) for device, count in database.devices() if device != here]
    if others:
        named = "; ".join(
            f"{count} of {one_line(device.name)}, driver {one_line(device.driver)}" for device, count in others
        )
        told.note(
            "other_devices",
            [{"device": device.name, "driver": device.driver, "candidates": count} for device, count in others],
            f"{database.place} has timings of other devices or drivers ({named}): they are kept, but not used for "
            f"{here.name}, driver {here.driver}",
        )


def export_rows(database: Database, path: Path) -> int:
    """Write a database as rows of the table of measurements; return their number."""
    rows = exported(database)
    write_if_changed(path, written(rows))
    return len(rows)
