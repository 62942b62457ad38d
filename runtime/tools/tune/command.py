"""``codegen tune``, between its options and the tuner."""

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
"""Parts of a budget: as many candidates at most are proposed at once, so that they are compiled together."""


@dataclass(frozen=True)
class Options:
    """How problems are tuned.

    Attributes:
        compile_only: whether nothing is timed.
        most: variations of a problem, without a space.
        jobs: compilations at a time; None for one for each CPU.
        over: the space, as the command line has it.
        trials: candidates of a space that are tried; None for all.
        sampler: what proposes them.
        write: whether a faster spec is written to its file.
    """

    compile_only: bool = False
    most: int = MOST
    jobs: int | None = None
    over: tuple[str, ...] = ()
    trials: int | None = None
    sampler: Sampler = Sampler.TPE
    write: bool = False

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            CodegenError: for such options.
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
        current: the spec that another one is proposed for, which others must agree with.
        candidates: the kernels to try; the current one is the first.
        space: the space that they are of, if one was given by hand.
    """

    problem: Problem
    current: NamedSpec
    candidates: list[NamedSpec] = field(repr=False)
    space: Space | None = field(default=None, repr=False)


def read_problems(texts: Sequence[str], file: Path | None, spec: NamedSpec | None = None) -> list[Problem]:
    """Read the problems of a command line and of a file, each once.

    Args:
        texts: FIELD=VALUE,... each; beside a spec they need not say what that says.
        file: problems as JSON, one a line.
        spec: the spec that computes them.

    Raises:
        CodegenError: for one that is none, with the line of the file; for one that the spec contradicts.
    """

    def of(fields: Fields) -> Problem:
        own = {} if spec is None else said_by(spec.spec)
        for name in own.keys() & fields.keys():
            if own[name] != fields[name]:
                raise SpecError(f"problem.{name}", f"is {shown(fields[name])}, and the spec's is {shown(own[name])}")
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
    """The task of a problem: the candidates to try.

    Args:
        problem: the problem.
        spec: the current spec; None for the one that codegen.select chooses.
        options: of the command.

    Raises:
        CodegenError: for a space that is none, or in which nothing is legal.
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
    """Compile the candidates of tasks and, unless told otherwise, time them."""
    try:
        _run(told, database, tasks, options)
    except KeyboardInterrupt:
        line = f"interrupted; {database.place} keeps what was found: the same command goes on from there"
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
        told.note("candidates", count, f"{count} candidates of {len(tasks) - len(searched)} problems are compiled")
    if not options.compile_only:
        _time(told, database, tasks, options, failures)


def _compiled(database: Database, every: Sequence[NamedSpec], compiler: str, jobs: int | None) -> dict[str, str]:
    """Compile candidates, tell those that do not compile, and return why by spec hash."""
    if jit.is_forbidden():  # before a candidate is begun: one that is missing would count as one that fails
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
    """Try the candidates of a task, or as many as the budget has, and return them."""

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
    """Say what the database has of other devices or drivers: that is kept, and not used."""
    others = [(device, count) for device, count in database.devices() if device != here]
    if others:
        named = "; ".join(
            f"{count} of {one_line(device.name)}, driver {one_line(device.driver)}" for device, count in others
        )
        told.note(
            "other_devices",
            [{"device": device.name, "driver": device.driver, "candidates": count} for device, count in others],
            f"{database.place} has timings of other devices or drivers ({named}): they are kept, and not used for "
            f"{here.name}, driver {here.driver}",
        )


def export_rows(database: Database, path: Path) -> int:
    """Write what a database has as rows of the table of measurements; return how many."""
    rows = exported(database)
    write_if_changed(path, written(rows))
    return len(rows)
