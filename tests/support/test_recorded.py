"""Host runs with a record are not repeated (recorded.py); all else runs, and only passed runs get a record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import recorded

CONFTEST = """\
from pathlib import Path

pytest_plugins = ["recorded"]


def pytest_addoption(parser):
    parser.addoption("--kernel-seed", type=int, default=0)


def pytest_configure(config):
    import recorded

    recorded.KNOWN = Path(__file__).with_name("known.json")
    recorded.sample = lambda known, seed: frozenset(sorted(known)[:seed])
"""
MODULE = """\
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def text(request):
    text = (HERE / request.node.callspec.params["name"]).read_text()
    yield text
    assert text != "breaks afterwards"


@pytest.mark.parametrize("name", ["a", "b"])
def test_run(name, text, recorded):
    recorded(text)
    (HERE / f"{name}.ran").touch()
    assert text != "fails"
"""
PATHS = os.pathsep.join(map(str, (recorded.SUPPORT, recorded.SUPPORT.parents[1])))
A, B = "test_one.py::test_run[a]", "test_one.py::test_run[b]"


class Runs:
    """A folder with two host runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = {"pytest.ini": "[pytest]", "conftest.py": CONFTEST, "test_one.py": MODULE, "a": "good", "b": "good"}
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        self.output = ""

    def run(self, *options: str, code: int = 0) -> set[str]:
        """Run pytest, and take the names of the runs that were not ended by a record."""
        for file in self.folder.glob("*.ran"):
            file.unlink()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        environment = {**os.environ, "PYTHONPATH": PATHS, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        self.output = done.stdout
        assert done.returncode == code, done.stdout + done.stderr
        return {file.stem for file in self.folder.glob("*.ran")}

    def key(self, node_id: str, text: str = "good") -> str:
        return recorded.key_of(node_id, self.folder / "test_one.py", text)

    @property
    def known(self) -> dict[str, str]:
        return json.loads((self.folder / "known.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    @known.setter
    def known(self, records: dict[str, str]) -> None:
        (self.folder / "known.json").write_text(json.dumps(records), encoding="utf-8")


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_a_run_with_a_record_is_repeated_when_it_is_drawn_and_on_demand(runs: Runs) -> None:
    assert runs.run() == {"a", "b"} and not (runs.folder / "known.json").exists()
    assert "2 host runs are repeated until this is run: pytest --record-host" in runs.output
    assert runs.run("--record-host") == {"a", "b"} and runs.known.keys() == {A, B}
    assert runs.run() == set()
    assert "2 passed" in runs.output and "host runs: 2 known from an earlier run; " in runs.output
    assert runs.run("--kernel-seed", "1") == {"a"}
    assert "host runs: 1 run (sample), 1 known from an earlier run; " in runs.output
    assert runs.run("--all-host") == {"a", "b"}


def test_another_text_runs_and_a_failure_gets_no_record(runs: Runs) -> None:
    runs.known = before = {A: runs.key(A), B: runs.key(B)}
    (runs.folder / "a").write_text("fails")
    (runs.folder / "b").write_text("breaks afterwards")
    assert runs.run("--record-host", code=1) == {"a", "b"} and runs.known == before
    (runs.folder / "a").write_text("better")
    (runs.folder / "b").write_text("good")
    assert runs.run() == {"a"} and runs.known == before
    assert runs.run("--record-host") == {"a"} and runs.known == {A: runs.key(A, "better"), B: before[B]}


def test_a_record_of_another_run_does_not_count(runs: Runs) -> None:
    runs.known = {A: runs.key(B), B: runs.key(A)}
    assert runs.run() == {"a", "b"}
    runs.known = {A: runs.key(A), B: runs.key(B)}
    (runs.folder / "test_one.py").write_text(MODULE + "C = 1\n", encoding="utf-8")
    assert runs.run() == {"a", "b"}


def test_records_of_tests_outside_the_run_stay_and_those_of_no_test_go(runs: Runs) -> None:
    gone, elsewhere = "test_one.py::test_run[c]", "test_two.py::test_run"
    runs.known = known = {A: runs.key(A), B: runs.key(B), gone: "0", elsewhere: "0"}
    for some in (("-k", "a"), (A,)):
        runs.run("--record-host", *some)
        assert runs.known == known
    runs.run("--record-host")
    assert runs.known.keys() == {A, B, elsewhere}


def test_processes_of_one_run_share_the_records(runs: Runs) -> None:
    pytest.importorskip("xdist")
    processes = ("-p", "xdist", "-n", "2")
    assert runs.run("--record-host", *processes) == {"a", "b"} and runs.known.keys() == {A, B}
    assert runs.run(*processes) == set() and "host runs: 2 known from an earlier run; " in runs.output


def test_the_sample_is_another_each_day_and_the_same_for_a_seed() -> None:
    names = [f"test_{number}" for number in range(500)]
    drawn = recorded.sample(names, 20260101)
    assert len(drawn) == 20 and drawn == recorded.sample(reversed(names), 20260101) != recorded.sample(names, 20260102)
    assert len(recorded.sample(names[:30], 1)) == 4 and len(recorded.sample(names[:3], 1)) == 3


def test_comments_and_docstrings_of_modules_do_not_count() -> None:
    code = 'X = "# no comment"{}\n{}\n\ndef f():\n{}    return """\n# text\n"""\n'
    prose = code.format("  # one", '"""Of X."""\n', '    """Of f,\n    two lines."""\n    # more\n')
    assert recorded.python_code('"""Module."""\n' + prose) == code.format("", "", "")
    assert recorded.python_code(prose.replace("# text", "# another")) != code.format("", "", "")


def test_a_key_covers_the_modules_that_build_and_run_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded.SUPPORT.parent / "templates" / "test_bsr_fp8_on_the_host.py"
    names = {module.name for module in recorded.modules_of(path)}
    assert {path.name, "host_bsr_fp8.py", "host_mma_fp8.py", "host_launch.py", "host_kernel.py"} <= names
    before = recorded.key_of("a", path, "f(1);", ["case // 2"])
    assert before == recorded.key_of("a", path, "f(1);  // a comment\n", ["case // 2"])
    others = (("b", "f(1);", "case // 2"), ("a", "f(2);", "case // 2"), ("a", "f(1);", "case // 3"))
    assert before not in {recorded.key_of(node_id, path, source, [case]) for node_id, source, case in others}
    digest_of = recorded.digest_of
    for name in ("host_launch.py", "mma_fp8.h"):
        with monkeypatch.context() as patch:
            patch.setattr(recorded, "digest_of", lambda file, name=name: file.name == name or digest_of(file))
            assert recorded.key_of("a", path, "f(1);", ["case // 2"]) != before
    monkeypatch.setattr(recorded, "digest_of", lambda file: file.name == "paged.h" or digest_of(file))
    assert recorded.key_of("a", path, "f(1);", ["case // 2"]) == before, "a header that no text of the run names"


def test_headers_are_those_that_are_named_also_by_headers_and_all_are_used() -> None:
    names = {path.name for path in recorded.headers_of(['x\n#include "hopper.h"\n'])}
    assert {"hopper.h", "votes.h", "arithmetic.h"} <= names and "paged.h" not in names
    assert recorded.headers_of(['#include "nothing.h"', "no header"]) == ()
    modules = [path.read_text(encoding="utf-8") for path in recorded.SUPPORT.glob("host_*.py")]
    every = {path.name for path in recorded.headers_of(modules)}
    assert every == {path.name for path in recorded.SUPPORT.glob("host/*.h")}
