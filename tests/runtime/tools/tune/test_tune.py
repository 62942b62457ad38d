"""The tuner, with a compiler and a GPU of the test's own."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from codegen.errors import CodegenError
from codegen.library import NamedSpec, find_spec
from codegen.planning import plan_for
from codegen.select import choose, parse_problem
from codegen.select.candidates import candidates
from codegen.select.limits import MOST
from codegen.select.problem import Problem, problem_of, tuning_of
from codegen.select.table import read_rows, written

pytest.importorskip("runtime.tools.tune.tuner", exc_type=ImportError)

from runtime.errors import CompileError, ToolchainError
from runtime.tools.tune.columns import Figures
from runtime.tools.tune.command import read_problems
from runtime.tools.tune.database import Database, DatabaseError, Device
from runtime.tools.tune.exported import exported
from runtime.tools.tune.tuner import BEST, Bench, Course, TuneError, best_of, compile_all, tune

PROBLEM = parse_problem(
    {"op": "bsr_spmm", "block": {"rows": 64, "cols": 64}, "m": 4096, "n": 16, "k": 4096, "density": 0.3}
)
OTHER = PROBLEM.model_copy(update={"n": 4096})
KERNELS = [
    find_spec(stem) for stem in ("h100_bsr_spmm_b64", "h100_bsr_spmm_b64_few_columns", "h100_bsr_spmm_b64_pairs")
]
H100, H200 = Device("H100", "580.1"), Device("H200", "580.1")


class FakeBench:
    """Times kernels as a table says; stops where a test wants it."""

    def __init__(self, **more: Any) -> None:
        self.timed: list[str] = []
        self.verified: list[str] = []
        self.longer: list[list[str]] = []
        self.made = 0
        self.times = {named.stem: 10 + i / 4 for i, named in enumerate(KERNELS)} | more.get("times", {})
        self.wrong: dict[str, str] = more.get("wrong", {})
        self.stop_after: int | None = more.get("stop_after")

    def __call__(self, problem: Problem, reference: NamedSpec) -> Bench:
        self.made += 1
        return self

    def verify(self, named: NamedSpec) -> str:
        self.verified.append(named.stem)
        return self.wrong.get(named.stem, "")

    def time(self, named: NamedSpec) -> Figures:
        if len(self.timed) == self.stop_after:
            raise KeyboardInterrupt
        self.timed.append(named.stem)
        return Figures(self.times[named.stem], self.times[named.stem])

    def again(self, named: Sequence[NamedSpec]) -> list[Figures]:
        self.longer.append([each.stem for each in named])
        return [Figures(self.times[each.stem] + 0.5, self.times[each.stem] + 0.5) for each in named]

    def rounds(self, named: Sequence[NamedSpec]) -> list[list[Figures]]:
        self.longer.append([each.stem for each in named])
        return [[Figures(self.times[each.stem] + i, 2.0) for i in range(2)] for each in named]

    def lost(self) -> str:
        return ""

    def dense(self) -> tuple[str, Figures | None]:
        return "cuBLAS, dense", Figures(9.0, 8.0)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "tune.sqlite")


def test_an_interrupted_run_goes_on_where_it_ended(database: Database) -> None:
    first = FakeBench(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        tune(database, PROBLEM, KERNELS, H100, first)
    second = FakeBench()
    records = tune(Database(database.path), PROBLEM, KERNELS, H100, second)
    assert (first.timed, second.timed) == ([each.stem for each in KERNELS[:2]], [KERNELS[2].stem])
    assert [record.named.stem for record in records] == [each.stem for each in KERNELS]
    assert all(record.figures is not None and record.again for record in records)
    assert second.longer == [[each.stem for each in KERNELS]]
    third = FakeBench()
    assert tune(database, PROBLEM, KERNELS, H100, third) == records
    assert third.made == 0, "nothing was left to do"


def test_a_wrong_kernel_gets_no_time_and_is_never_chosen(database: Database) -> None:
    wrong = KERNELS[1].stem
    bench = FakeBench(wrong={wrong: "error 1, allowed 0.1"}, times={wrong: 1.0})
    records = tune(database, PROBLEM, KERNELS, H100, bench)
    assert wrong not in bench.timed and wrong not in bench.longer[0]
    assert records[1].figures is None and records[1].failure == "is wrong: error 1, allowed 0.1"
    (row,) = exported(database)
    assert [each.spec for each in row.kernels] == [KERNELS[0].stem, KERNELS[2].stem]
    assert choose(PROBLEM, rows=(row,)).named == KERNELS[0]
    again = FakeBench(times={wrong: 1.0})
    tune(database, PROBLEM, KERNELS, H100, again)
    assert again.verified == [], "it was tried with this source"


def test_a_kernel_that_cannot_be_run_is_recorded(database: Database) -> None:
    class Raising(FakeBench):
        def time(self, named: NamedSpec) -> Figures:
            if named == KERNELS[0]:
                raise CodegenError("more than 2^31 tiles")
            return super().time(named)

    records = tune(database, PROBLEM, KERNELS, H100, Raising())
    assert records[0].failure == "cannot be run: more than 2^31 tiles" and best_of(records)[0].named == KERNELS[1]


def test_a_kernel_that_costs_the_gpu_is_recorded_and_ends_the_run(database: Database) -> None:
    class Lost(FakeBench):
        def verify(self, named: NamedSpec) -> str:
            if named == KERNELS[1]:
                raise CodegenError("an illegal address")
            return super().verify(named)

        def lost(self) -> str:
            return "an illegal address"

    with pytest.raises(TuneError, match=f"{KERNELS[1].stem} cannot be run: an illegal address; the GPU is lost"):
        tune(database, PROBLEM, KERNELS, H100, Lost())
    second = FakeBench()
    records = tune(database, PROBLEM, KERNELS, H100, second)
    assert second.timed == [KERNELS[2].stem] and records[1].failure == "cannot be run: an illegal address"


def test_a_kernel_that_never_ends_is_begun_twice(database: Database) -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):  # as a process that is ended
            tune(database, PROBLEM, KERNELS, H100, FakeBench(stop_after=0))
    third = FakeBench(stop_after=2)
    records = tune(database, PROBLEM, KERNELS, H100, third)
    assert records[0].failure == "did not end, 2 times" and third.timed == [each.stem for each in KERNELS[1:]]


def test_a_failed_compilation_is_recorded_and_not_tried_again(database: Database) -> None:
    lock, tried = threading.Lock(), []

    def compile_one(named: NamedSpec) -> None:
        with lock:
            tried.append(named.stem)
        if named == KERNELS[2]:
            raise CompileError(named.stem, "ptxas: too many registers")

    done: list[str] = []
    for _ in range(2):
        failures = compile_all(database, [*KERNELS, KERNELS[0]], "NVRTC 13.0", compile_one, progress=done.append)
        assert failures == {KERNELS[2].spec.hash: "ptxas: too many registers"}
    assert sorted(tried) == sorted(done) == sorted(each.stem for each in KERNELS)
    compile_all(database, KERNELS, "NVRTC 13.1", compile_one)
    assert len(tried) == 6, "another compiler may do better"
    bench = FakeBench()
    records = tune(database, PROBLEM, KERNELS, H100, bench, failures=failures)
    assert records[2].failure == "does not compile: ptxas: too many registers"
    assert KERNELS[2].stem not in bench.verified


def test_a_compiler_that_was_killed_says_nothing_of_the_candidate(database: Database) -> None:
    def killed(named: NamedSpec) -> None:
        raise ToolchainError("the process that compiles it was ended by SIGKILL")

    with pytest.raises(ToolchainError, match="SIGKILL"):
        compile_all(database, KERNELS, "NVRTC 13.0", killed)
    assert compile_all(database, KERNELS, "NVRTC 13.0", lambda named: None) == {}


def test_devices_drivers_and_problems_are_never_mixed(database: Database) -> None:
    fast, slow = KERNELS[0].stem, KERNELS[1].stem
    tune(database, PROBLEM, KERNELS, H100, FakeBench())
    other = FakeBench(times={fast: 30.0, slow: 20.0, KERNELS[2].stem: 40.0})
    tune(database, PROBLEM, KERNELS, H200, other)
    newer = FakeBench()
    tune(database, PROBLEM, KERNELS, Device(H100.name, "590.0"), newer)
    apart = FakeBench()
    tune(database, OTHER, KERNELS, H100, apart)
    assert all(len(bench.timed) == 3 for bench in (other, newer, apart))
    rows = {(row.problem.n, row.device, row.source): row for row in exported(database)}  # type: ignore[union-attr]
    assert len(rows) == 4
    h100, h200 = (rows[16, each.name, "codegen tune, driver 580.1"] for each in (H100, H200))
    assert (h100.kernels[0].spec, h200.kernels[0].spec) == (fast, slow)
    assert [each.single_us for each in h200.kernels] == [20.5, 30.0, 40.0]  # what is not close is not timed again
    assert choose(PROBLEM, rows=(h100, h200), device="H200").named.stem == slow


def test_the_best_are_timed_again_and_no_more(database: Database) -> None:
    several = candidates(PROBLEM)
    times = {named.stem: 100.0 - i for i, named in enumerate(several)}
    bench = FakeBench(times=times)
    records = tune(database, PROBLEM, several, H100, bench)
    assert bench.longer == [[named.stem for named in several[: -BEST - 1 : -1]]]
    assert sum(record.again for record in records) == BEST
    assert [record.named for record in best_of(records)[:1]] == [several[-1]]


def test_the_next_ones_are_timed_again_where_the_best_lose(database: Database) -> None:
    several = candidates(PROBLEM)

    class Slower(FakeBench):
        def again(self, named: Sequence[NamedSpec]) -> list[Figures]:
            return [Figures(2 * each.single_us, each.back_to_back_us) for each in super().again(named)]

    bench = Slower(times={named.stem: 100.0 - i for i, named in enumerate(several)})
    records = tune(database, PROBLEM, several, H100, bench)
    assert len(bench.longer) == 3 and sum(record.again for record in records) == 3 * BEST


def test_exported_rows_are_rows_of_the_table(database: Database, tmp_path: Path) -> None:
    tune(database, PROBLEM, candidates(PROBLEM)[:8], H100, FakeBench(times=dict.fromkeys(_stems(), 12.0)))
    path = tmp_path / "rows.jsonl"
    path.write_text(written(exported(database)))
    (row,) = read_rows(path)
    assert row.problem == PROBLEM and row.dense is not None and row.dense.single_us == 9.0
    assert len(row.kernels) == 8 and {each.label for each in row.kernels} == {
        json.dumps(tuning_of(named.spec), sort_keys=True, separators=(",", ":")) for named in candidates(PROBLEM)[:8]
    }
    (short,) = exported(database, most=1)
    shipped = {named.stem for named in candidates(PROBLEM)[:8] if named.path is not None}
    assert shipped <= {each.spec for each in short.kernels if isinstance(each.spec, str)} and len(short.kernels) < 8
    choice = choose(PROBLEM, rows=(row,))
    assert choice.rule == "measured" and choice.dense.startswith("cuBLAS, dense 9 us")


def _stems() -> list[str]:
    return [named.stem for named in candidates(PROBLEM)]


def test_a_kernel_whose_source_has_changed_is_not_exported(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(database, PROBLEM, KERNELS, H100, FakeBench())
    monkeypatch.setattr("runtime.tools.tune.exported.render", lambda named: f"another source of {named.stem}")
    assert exported(database) == []


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "tune.sqlite"
    path.write_text("no database, but long enough to be taken for one" * 100)
    with pytest.raises(DatabaseError, match=r"tune.sqlite: cannot be opened"):
        Database(path)


def test_a_half_written_database_says_what_can_be_saved(database: Database) -> None:
    tune(database, PROBLEM, candidates(PROBLEM), H100, FakeBench(times=dict.fromkeys(_stems(), 12.0)))
    with closing(sqlite3.connect(database.path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = database.path.read_bytes()
    database.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatabaseError, match=r"tune.sqlite: .*nothing was changed; .*sqlite3 FILE .recover"):
        Database(database.path)
    assert database.path.read_bytes() == whole[: len(whole) // 2]


def test_a_page_that_was_overwritten_is_found_before_anything_is_timed(database: Database) -> None:
    tune(database, PROBLEM, candidates(PROBLEM), H100, FakeBench(times=dict.fromkeys(_stems(), 12.0)))
    with closing(sqlite3.connect(database.path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(database.path.read_bytes())
    data[4096:8192] = b"x" * 4096
    database.path.write_bytes(data)
    with pytest.raises(DatabaseError, match=r"tune.sqlite: .*sqlite3 FILE .recover"):
        Database(database.path)


def test_what_was_committed_before_a_process_was_killed_is_there(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom codegen.library import find_spec\n"
        "from runtime.tools.tune.database import *\nfrom runtime.tools.tune.columns import Figures\n"
        "from codegen.select import parse_problem\n"
        f"problem = parse_problem({PROBLEM.model_dump(mode='json', exclude_none=True)!r})\n"
        "database = Database(Path(sys.argv[1]))\n"
        "named, device = find_spec('h100_bsr_spmm_b64'), Device('H100', '1')\n"
        "database.write(Record(problem, named, device, '2026-01-01', '', Figures(1.0, 2.0)))\nos.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "tune.sqlite"
    root = str(Path(__file__).resolve().parents[4])
    done = subprocess.run([sys.executable, "-c", code, str(path)], env={**os.environ, "PYTHONPATH": root}, check=False)
    assert done.returncode == -9
    found = Database(path).record(PROBLEM, KERNELS[0], Device("H100", "1"))
    assert found is not None and found.figures == Figures(1.0, 2.0)


def test_a_database_of_something_else_or_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    other, later = tmp_path / "other.sqlite", tmp_path / "later.sqlite"
    for path, statement in ((other, "CREATE TABLE people (name TEXT)"), (later, "PRAGMA user_version=7")):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(statement)
    before = other.read_bytes(), later.read_bytes()
    with pytest.raises(DatabaseError, match=r"is a database of something else \(people\): nothing was changed; "):
        Database(other)
    with pytest.raises(DatabaseError, match=r"has format 7, but this version reads 1: nothing was changed"):
        Database(later)
    assert (other.read_bytes(), later.read_bytes()) == before


def test_a_database_of_before_there_was_a_format_goes_on(database: Database) -> None:
    tune(database, PROBLEM, KERNELS, H100, FakeBench())
    with closing(sqlite3.connect(database.path)) as connection, connection:
        connection.execute("DROP TABLE comparisons")
        connection.execute("PRAGMA user_version=0")
    third = FakeBench()
    tune(Database(database.path), PROBLEM, KERNELS, H100, third)
    assert third.made == 0


def test_a_database_that_another_process_writes_to(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.tools.tune.database.BUSY_SECONDS", 0)
    with closing(sqlite3.connect(database.path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match=r"locked; another process .* wait for it, and run again"):
            database.write_dense(PROBLEM, H100, "", None)


def test_repeats_of_two_candidates_are_kept(database: Database) -> None:
    bench = FakeBench()
    course = Course(database, PROBLEM, KERNELS[0], H100, bench)
    one, other = course.compare(KERNELS[1], KERNELS[0])
    assert (one[1].single_us, other[0].single_us, len(one)) == (11.25, 10.0, 2)
    assert Course(Database(database.path), PROBLEM, KERNELS[0], H100, bench).compare(KERNELS[1], KERNELS[0]) == (
        one,
        other,
    )
    assert bench.longer == [[KERNELS[1].stem, KERNELS[0].stem]]
    with closing(sqlite3.connect(database.path)) as connection, connection:
        connection.execute("UPDATE comparisons SET figures = '[[1], [2]]'")
    with pytest.raises(DatabaseError, match=r"comparisons, row 1: figures.0.0: is 1; Input should be a valid tuple"):
        course.compare(KERNELS[1], KERNELS[0])


def test_a_fifo_or_a_device_is_no_database(tmp_path: Path) -> None:
    fifo, device = tmp_path / "fifo", tmp_path / "device"
    os.mkfifo(fifo)
    device.symlink_to("/dev/null")  # SQLite follows a link, but none is to get that far
    for path in (fifo, device, tmp_path / "a\0"):
        with pytest.raises(DatabaseError, match=r"is not a regular file|is not the name of a file"):
            Database(path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE timings SET problem = '[[['", "timings, row \\d: problem: is '\\[\\[\\['; is not JSON"),
        ("UPDATE timings SET problem = '{}'", "timings, row \\d: problem: is '{}'; problem.op: is missing"),
        ("UPDATE timings SET spec = '[]'", "timings, row \\d: spec: is \\[\\]; Input should be a valid dictionary"),
        (
            "UPDATE timings SET problem = 7",
            "timings, row \\d: problem: is '7'; problem: must be a mapping of fields, this is int",
        ),
        (
            "UPDATE timings SET stem = x'00', date = x'00'",
            "timings, row \\d: stem: is b'.x00'; Input should be a valid str",
        ),
        ("UPDATE timings SET date = 'today'", "holds what no tuner wrote there: date: is 'today'; "),
        ("UPDATE timings SET single_us = -1", "timings, row \\d: single_us: is -1.0; Input should be greater than 0"),
        ("UPDATE timings SET single_us = 'x'", "timings, row \\d: single_us: is 'x'; Input should be a valid number"),
        ("UPDATE timings SET single_us = NULL", "timings, row \\d: single_us: is None; Input should be a valid number"),
        (
            "UPDATE timings SET back_to_back_us = x'00'",
            "timings, row \\d: back_to_back_us: is b'.x00'; Input should be",
        ),
    ],
)
def test_a_database_that_no_tuner_wrote(database: Database, statement: str, message: str) -> None:
    tune(database, PROBLEM, KERNELS, H100, FakeBench())
    with closing(sqlite3.connect(database.path)) as connection, connection:
        connection.execute(statement)
    with pytest.raises(DatabaseError, match=message):
        exported(database)


ROWS_WITHOUT_END = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i"
COLUMNS = {
    "timings": "problem spec_hash source_sha256 device driver stem spec date failure single_us back_to_back_us again",
    "begun": "problem spec_hash device times",
    "dense": "problem device driver name single_us back_to_back_us",
    "comparisons": "problem other_hash figures",
    "compilations": "compiler stem failure",
}
VALUES = [
    *("x'00ff'", "7", "-1", "-1.5", "9e999", "-9e999", "''", "'[[[['", "'{}'", "'\x1b[2J'", "char(27, 10)", "1e-320"),
    *("CAST(x'1bff' AS TEXT)", "'[[[-1, 2]], [[9e999, 2]]]'", "zeroblob(1000000)", "printf('%.*c', 100000, '[')"),
]
SCHEMAS = [
    f"DROP TABLE timings; CREATE VIEW timings AS {ROWS_WITHOUT_END} AS problem, i AS device, i AS driver, '' AS failure"
    " FROM n",
    f"DROP TABLE dense; CREATE VIEW dense AS {ROWS_WITHOUT_END} AS name FROM n",
    f"CREATE VIEW 'a\x1b[2J' AS {ROWS_WITHOUT_END} FROM n",
    f"CREATE TRIGGER endless AFTER INSERT ON begun BEGIN SELECT max(i) FROM ({ROWS_WITHOUT_END} FROM n); END",
    "DROP TABLE begun; CREATE VIRTUAL TABLE begun USING fts5(problem)",
    "DROP TABLE timings; CREATE TABLE timings ('\x1b[2J' TEXT)",
    "ALTER TABLE timings RENAME COLUMN date TO 'a\x1bdate'",
    *(f"DROP TABLE {table}; CREATE TABLE '\x1b[2J' (a)" for table in COLUMNS),
    ";".join(f"DROP TABLE {table}" for table in COLUMNS) + "; CREATE TABLE '\x1b[2J' (a)",
]


def _refusals(path: Path, uses: Sequence[Callable[[Database], object]], edit: str) -> int:
    """Number of uses of a file that end with an error; its message prints."""
    count = 0
    found: Database | None = None
    for use in (None, *uses):
        try:
            if use is None:
                found = Database(path)
            elif found is not None:
                use(found)
        except CodegenError as error:
            assert str(error).isprintable() and len(str(error)) < 3000, edit
            count += 1
    return count


def test_an_edited_database_gives_a_result_or_an_error_in_bounded_time(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(database, PROBLEM, KERNELS, H100, FakeBench())
    Course(database, PROBLEM, KERNELS[0], H100, FakeBench()).compare(KERNELS[1], KERNELS[0])
    database.write_compilation(KERNELS[0], "nvrtc", "")
    database.begin(OTHER, KERNELS[0], H100)
    monkeypatch.setattr("runtime.tools.tune.database.SECONDS", 0.5)
    with closing(sqlite3.connect(database.path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole, draw, refused = database.path.read_bytes(), random.Random(0), 0
    edits = [(table, column, value) for table in COLUMNS for column in COLUMNS[table].split() for value in VALUES]
    updates = [f"UPDATE {table} SET {column} = {value}" for table, column, value in draw.sample(edits, 30)]
    uses: list[Callable[[Database], object]] = [
        exported,
        Database.devices,
        lambda found: found.record(PROBLEM, KERNELS[0], H100),
        lambda found: found.dense(PROBLEM, H100),
        lambda found: found.comparison(PROBLEM, KERNELS[1], KERNELS[0], H100),
        lambda found: found.compilation(KERNELS[0], "nvrtc"),
        lambda found: found.begin(OTHER, KERNELS[0], H100),
    ]
    for i, edit in enumerate([*SCHEMAS, *updates]):
        path, begun = tmp_path / f"edited_{i}.sqlite", time.process_time()
        path.write_bytes(whole)
        with closing(sqlite3.connect(path)) as connection, suppress(sqlite3.IntegrityError):
            connection.executescript(f"PRAGMA synchronous=OFF; BEGIN; {edit}; COMMIT")
        count = _refusals(path, uses, edit)
        assert count or edit not in SCHEMAS[:5], edit
        refused += bool(count)
        assert time.process_time() - begun < 5, edit
    assert refused > 20


@pytest.mark.parametrize("ending", ["the clock", "Ctrl-C"])
def test_a_query_that_never_ends(database: Database, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect(database.path)) as connection:  # after the file was checked
        connection.executescript(SCHEMAS[0])
    if ending == "the clock":
        monkeypatch.setattr("runtime.tools.tune.database.SECONDS", 0.1)
        with pytest.raises(DatabaseError, match=r"takes longer than 0.1 s: nothing was changed"):
            database.problems()
        return
    assert threading.current_thread() is threading.main_thread(), "the one that Ctrl-C is raised in"
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of xdist ignore it
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            database.problems()
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("column", ["date", "failure"])
def test_a_record_that_no_tuner_wrote(database: Database, column: str) -> None:
    tune(database, PROBLEM, KERNELS, H100, FakeBench())
    with closing(sqlite3.connect(database.path)) as connection, connection:
        connection.execute(f"UPDATE timings SET {column} = x'00'")
    with pytest.raises(DatabaseError, match=rf"holds what no tuner wrote there: timings, row \d: {column}: is b'.x00'"):
        database.record(PROBLEM, KERNELS[0], H100)


def test_problems_of_a_command_line_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"op": "bsr_spmm", "block": {"rows": 64, "cols": 64}, "m": 64}) + "\n")
    text = "op=bsr_spmm,block=64,m=64"
    assert read_problems([text], path) == read_problems([text], None)
    path.write_text("{}\n[]\n")
    with pytest.raises(CodegenError, match=r"problems.jsonl:1: problem"):
        read_problems([], path)


# Candidates


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        parse_problem(
            {
                "op": "bsr_spmm",
                "block": {"rows": 16, "cols": 16},
                **{"m": 4096, "n": 640, "k": 4096, "density": 0.1, "evenness": 4.0, "prepared": "rows"},
            }
        ),
        parse_problem({"op": "bsr_sddmm", "block": {"rows": 32, "cols": 32}, "m": 4096, "n": 4096, "k": 4096}),
        parse_problem({"op": "bsr_spgemm", "block": {"rows": 64, "cols": 64}, "output": "bsr"}),
        parse_problem({"op": "attention", "head_dim": 64, "pattern": {"kind": "causal"}, "softcap": 30.0}),
        parse_problem(
            {
                "op": "attention",
                "head_dim": 128,
                "pattern": {"kind": "topk", "k": 24, "block": {"q": 64, "kv": 64}},
                **{"heads": 16, "q_len": 32768, "kv_len": 32768, "query_grouping": "given"},
            }
        ),
        parse_problem({"op": "attention", "arch": "sm_89", "head_dim": 96, "pattern": {"kind": "dense"}}),
    ],
    ids=str,
)
def test_candidates_compute_the_problem_and_have_plans(problem: Problem) -> None:
    found = candidates(problem)
    assert 1 <= len(found) <= MOST + 12 and len({named.spec.hash for named in found}) == len(found)
    for named in found:
        plan_for(named)
        fields = json.loads(named.spec.canonical_json())
        for name, value in problem.fields().items():
            told = {key: fields[name][key] for key in value} if isinstance(value, dict) else fields[name]
            assert told == value


@pytest.mark.parametrize(("prepared", "has"), [("none", False), (None, False), ("rows", True)])
def test_gathered_rows_are_candidates_where_a_is_prepared(prepared: str | None, has: bool) -> None:
    problem = PROBLEM.model_copy(update={"block": find_spec("h100_bsr_spmm_b16").spec.block, "prepared": prepared})  # type: ignore[union-attr]
    assert ("h100_bsr_spmm_b16_gathered" in [named.stem for named in candidates(problem)]) == has


class FakeKernel:
    """Remembers the arguments of a call."""

    def __init__(self, stem: str) -> None:
        self.spec = find_spec(stem).spec
        self.called: tuple[Any, ...] = ()
        self.prepared: list[Any] = []

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.called = (arguments, named)

    def prepare(self, a: Any, *sizes: int, **more: Any) -> Any:
        self.prepared.append((a, sizes, more))
        return "prepared"


def test_inputs_of_attention_are_what_the_problem_says() -> None:
    data: Any = pytest.importorskip("runtime.tools.tune.data", exc_type=ImportError)
    fields = {"op": "attention", "head_dim": 64, "pattern": {"kind": "topk", "k": 4, "block": {"q": 64, "kv": 64}}}
    sizes = {"heads": 4, "kv_heads": 2, "q_len": 1000, "kv_len": 2048, "pack_gqa": 2, "overlap": 0.75}
    inputs = data.AttentionInputs(parse_problem({**fields, **sizes}), "cpu")
    kernel = FakeKernel("h100_topk32_d64_b64")
    assert inputs.call(kernel)().shape == (1, 4, 1000, 64)
    (_, k, _, lists), named = kernel.called
    assert k.shape == (1, 2, 2048, 64) and lists.shape == (1, 2, 16, 4) and named["sink"] is None
    assert len(set(lists[0, 0, 1].tolist()) & set(lists[0, 0, 2].tolist())) == 3
    assert all(len(set(each)) == 4 for each in lists.flatten(0, 2).tolist()) and int(lists.max()) < 32
    with pytest.raises(CodegenError, match="requires heads, q_len, kv_len"):
        data.AttentionInputs(parse_problem(fields), "cpu")
    with pytest.raises(CodegenError, match="lists of 4 blocks, and 100 keys have 2"):
        data.AttentionInputs(parse_problem({**fields, "heads": 1, "q_len": 100, "kv_len": 100}), "cpu")


def test_inputs_of_fp8_attention_are_quantized_once() -> None:
    data: Any = pytest.importorskip("runtime.tools.tune.data", exc_type=ImportError)
    torch = pytest.importorskip("torch")
    kernel = FakeKernel("h100_e4m3_topk32_b64")
    problem = problem_of(kernel.spec, {"heads": 2, "q_len": 300, "kv_len": 4096})
    inputs = data.AttentionInputs(problem, "cpu")
    call = inputs.call(kernel)
    assert call().shape == (1, 2, 300, 128) and call().dtype == torch.bfloat16
    (q, k, v_t, lists), named = kernel.called
    assert {x.dtype for x in (q, k, v_t)} == {torch.float8_e4m3fn} and v_t.shape == (1, 2, 128, 4096)
    assert named["q_scale"].shape == (1, 2, 5) and named["k_scale"].shape == (1, 2, 64) and lists.shape == (1, 2, 5, 32)
    inputs.call(kernel)()
    assert kernel.called[0][0] is q


@pytest.mark.parametrize(("op", "shape"), [("bsr_spmm", (256, 40)), ("bsr_sddmm", None), ("bsr_spgemm", (256, 192))])
def test_inputs_of_bsr_products_are_what_the_problem_says(op: str, shape: tuple[int, int] | None) -> None:
    data: Any = pytest.importorskip("runtime.tools.tune.data", exc_type=ImportError)
    sizes = {"m": 256, "n": 40 if op == "bsr_spmm" else 192, "k": 512, "density": 0.25, "evenness": 2.0}
    problem = parse_problem({"op": op, "block": {"rows": 32, "cols": 32}, **sizes})
    inputs, kernel = data.inputs_of(problem, "cpu"), FakeKernel(f"h100_{op}_b32")
    out = inputs.call(kernel)()
    (a, b, *_), named = kernel.called
    sparse = inputs.pattern if op == "bsr_sddmm" else inputs.a
    blocks = sparse.shape[1] // 32
    assert sparse.values().shape[0] == round(0.25 * 8 * blocks)
    lengths = sparse.crow_indices().diff()
    assert int(lengths.max()) == round(2 * 0.25 * blocks) and named["out"] is out
    assert out.shape == (sparse.values().shape if shape is None else shape)
    assert len(kernel.prepared) == (op == "bsr_spmm") and (a == "prepared") == (op == "bsr_spmm")  # type: ignore[comparison-overlap]
    assert b.shape == {"bsr_spmm": (512, 40), "bsr_sddmm": (192, 512), "bsr_spgemm": (512, 192)}[op]
    assert set(inputs.dense()) == {"cuBLAS, dense"}


def test_rows_have_the_density_and_the_longest_row_that_a_problem_says() -> None:
    lengths: Callable[..., list[int]] = pytest.importorskip("runtime.tools.tune.data", exc_type=ImportError).row_lengths
    for rows, columns, density, longest in ((64, 64, 0.25, 1.0), (224, 64, 0.3, 3.0), (896, 256, 0.02, 8.0)):
        found = lengths(rows, columns, density, longest)
        total = round(rows * columns * density)
        assert sum(found) == total and len(found) == rows and min(found) >= 1
        assert abs(max(found) - min(columns, longest * total / rows)) <= 1
    assert lengths(4, 8, 0.0, 1.0) == [1, 1, 1, 1]
