"""The steps of tuning: compile, verify, time, store. Existing results are reused.

Functions that need a compiler or a GPU are parameters: see :class:`Bench` and :mod:`runtime.tools.tune.gpu`.
"""

from __future__ import annotations

import datetime
import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from codegen.errors import CodegenError, SpecError
from codegen.library import NamedSpec
from codegen.select.problem import Problem
from runtime.errors import CompileError
from runtime.tools.tune.columns import Figures
from runtime.tools.tune.database import Database, Device, Record

BEST = 4  # best candidates of a problem, which are timed again in turns
CLOSE = 1.1  # maximum ratio to the fastest in the first timing to be among the best
MOST_AGAIN = 3  # maximum number of repeated timings of the best
MOST_BEGUN = 2  # a kernel is not started again after so many starts without an end
Progress = Callable[[str], None]


class TuneError(CodegenError):
    """Tuning cannot continue."""


class Bench(Protocol):
    """Timing of the kernels of one problem, on its data."""

    def verify(self, named: NamedSpec) -> str:
        """Verify a kernel; return its failure, or ""."""

    def time(self, named: NamedSpec) -> Figures:
        """Time a kernel by itself."""

    def again(self, named: Sequence[NamedSpec]) -> list[Figures]:
        """Time some kernels longer, in turns."""

    def rounds(self, named: Sequence[NamedSpec]) -> list[list[Figures]]:
        """Time some kernels in turns, several times: all figures of each."""

    def lost(self) -> str:
        """The reason why this process cannot run kernels any more, or ""."""

    def dense(self) -> tuple[str, Figures | None]:
        """Time a library's dense product or dense attention; without figures if there is none."""


def compile_all(
    database: Database,
    named: Iterable[NamedSpec],
    compiler: str,
    compile_one: Callable[[NamedSpec], object],
    *,
    progress: Progress = lambda _: None,
    jobs: int | None = None,
) -> dict[str, str]:
    """Compile unknown candidates in parallel, and return the failures by spec hash.

    Args:
        database: database of the results.
        named: the candidates.
        compiler: name and version of the compiler.
        compile_one: raises CompileError or SpecError if a candidate does not compile. Each call starts its own compiler
            process, so threads suffice. Any other error is unrelated to the candidate and stops the tuning.
        progress: called with the stem of each finished candidate.
        jobs: parallel compilations. Default: one per CPU.
    """
    unique = {each.spec.hash: each for each in named}
    failures: dict[str, str] = {}
    left = []
    for spec_hash, each in unique.items():
        known = database.compilation(each, compiler)
        if known is None:
            left.append(each)
        elif known:
            failures[spec_hash] = known

    def attempt(each: NamedSpec) -> tuple[NamedSpec, str]:
        try:
            compile_one(each)
        except CompileError as error:
            return each, error.log
        except SpecError as error:
            return each, str(error)
        return each, ""

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        for each, failure in pool.map(attempt, left):
            database.write_compilation(each, compiler, failure)
            if failure:
                failures[each.spec.hash] = failure
            progress(each.stem)
    return failures


class Course:
    """The candidates of one problem on one device. Candidates without a result in the database are verified and timed.

    Args:
        database: database of the results, stored candidate by candidate.
        problem: the problem.
        reference: the kernel whose results others must match.
        device: device of the run.
        make_bench: called once, if there is anything to do.
    """

    def __init__(
        self,
        database: Database,
        problem: Problem,
        reference: NamedSpec,
        device: Device,
        make_bench: Callable[[Problem, NamedSpec], Bench],
    ) -> None:
        self._database, self._problem, self._device = database, problem, device
        self._make = functools.partial(make_bench, problem, reference)
        self._made: Bench | None = None

    def _bench(self) -> Bench:
        self._made = self._made or self._make()
        return self._made

    def attempt(self, named: NamedSpec, failure: str = "") -> Record:
        """Verify and time a candidate, unless the database has it. ``failure`` is its compile error, or ""."""
        known = self._database.record(self._problem, named, self._device)
        if known is not None:
            return known
        if failure:
            record = Record(self._problem, named, self._device, today(), f"does not compile: {failure}")
        else:
            record = _tried(self._database, self._problem, named, self._device, self._bench)
        self._database.write(record)
        return record

    def finish(self, candidates: Sequence[NamedSpec], beside: NamedSpec | None = None) -> list[Record]:
        """Time the dense product, then the best candidates again in turns; return a record of each candidate.

        Args:
            candidates: the tried candidates.
            beside: a candidate that is always timed again with the best.
        """
        database, problem, device = self._database, self._problem, self._device
        if database.dense(problem, device) is None:
            name, figures = self._bench().dense()
            database.write_dense(problem, device, name, figures)

        def recorded() -> list[Record]:
            return [found for named in candidates if (found := database.record(problem, named, device)) is not None]

        for _ in range(MOST_AGAIN):  # longer timings may change the best
            timed = best_of(recorded())
            best = [
                each for i, each in enumerate(timed) if (i < BEST and _is_close(each, timed[0])) or _is(each, beside)
            ]
            if all(record.again for record in best):
                break
            for record, figures in zip(best, self._bench().again([record.named for record in best]), strict=True):
                database.write(Record(problem, record.named, device, today(), "", figures, again=True))
        return recorded()

    def compare(self, one: NamedSpec, other: NamedSpec) -> tuple[list[Figures], list[Figures]]:
        """Repeats of the timings of two candidates, in turns."""
        known = self._database.comparison(self._problem, one, other, self._device)
        if known is None:
            first, second = self._bench().rounds([one, other])
            known = first, second
            self._database.write_comparison(self._problem, one, other, self._device, known)
        return known


def tune(
    database: Database,
    problem: Problem,
    candidates: Sequence[NamedSpec],
    device: Device,
    make_bench: Callable[[Problem, NamedSpec], Bench],
    *,
    failures: dict[str, str] | None = None,
    beside: NamedSpec | None = None,
    progress: Progress = lambda _: None,
) -> list[Record]:
    """Time the candidates of a problem that are not in the database, then the best of all again.

    Args:
        database: database of the results, stored candidate by candidate.
        problem: the problem.
        candidates: kernels that compute the problem.
        device: device of the run.
        make_bench: called once, if there is anything to do, with the first candidate, whose results others must match.
        failures: candidates that do not compile, by spec hash.
        beside: a candidate that is always timed again with the best.
        progress: called with the stem of each finished candidate.

    Returns:
        A record of each candidate, in their order.
    """
    course = Course(database, problem, candidates[0], device, make_bench)
    for named in candidates:
        course.attempt(named, (failures or {}).get(named.spec.hash, ""))
        progress(named.stem)
    return course.finish(candidates, beside)


def _is_close(record: Record, fastest: Record) -> bool:
    assert record.figures is not None and fastest.figures is not None
    return cost(record.figures) <= CLOSE * cost(fastest.figures)


def _is(record: Record, named: NamedSpec | None) -> bool:
    return named is not None and record.named.spec == named.spec


def _tried(
    database: Database, problem: Problem, named: NamedSpec, device: Device, the_bench: Callable[[], Bench]
) -> Record:
    """Verify one candidate and, if its result is correct, time it."""
    record = functools.partial(Record, problem, named, device, today())
    bench = the_bench()
    before = database.begin(problem, named, device)
    if before >= MOST_BEGUN:
        return record(f"did not end, {before} times")
    try:
        wrong = bench.verify(named)
        return record(f"is wrong: {wrong}") if wrong else record("", bench.time(named))
    except CodegenError as error:
        failed = record(f"cannot be run: {error}")
    if lost := bench.lost():
        database.write(failed)
        raise TuneError(f"{named.stem} {failed.failure}; the GPU is lost ({lost}): run again to continue")
    return failed


def today() -> str:
    """The date."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def cost(figures: Figures) -> float:
    """The cost that ranks kernels: the geometric mean of both figures, in microseconds."""
    return math.sqrt(figures.single_us * (figures.back_to_back_us or figures.single_us))


def best_of(records: Iterable[Record]) -> list[Record]:
    """The candidates with a time, the fastest first."""
    timed = [(cost(record.figures), i, record) for i, record in enumerate(records) if record.figures is not None]
    return [record for _, _, record in sorted(timed, key=lambda each: each[:2])]
