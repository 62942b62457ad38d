"""The second tier (tests/tiers.py): what runs again, what is left out and what is recorded, in a project of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiers

GROUPS = {
    "tool": tiers.Group(("tests/test_tool.py",), ("tool", "page.md")),
    "script": tiers.Group(("tests/test_script.py",), ("benchmarks/script.py",)),
}
CONFTEST = f"""
import tiers
from tiers import Group

pytest_plugins = ["tiers"]
tiers.GROUPS = {GROUPS!r}


def pytest_addoption(parser):
    parser.addoption("--kernel-seed", type=int, default=1)
"""
FILES = {
    "pytest.ini": "[pytest]\ntestpaths = tests\npythonpath = tests .\naddopts = --import-mode=importlib\n"
    "markers = nightly: at night\n",
    "tests/conftest.py": CONFTEST,
    "tests/helper.py": "VALUE = 1\n",
    "tests/test_tool.py": "import helper\nfrom tool.run import run\n\n"
    "def test_one(): assert run() == helper.VALUE\ndef test_two(): pass\n",
    "tests/test_script.py": "def test_script(): pass\n",
    "tests/test_core.py": "import pytest\n\ndef test_core(): pass\n\n@pytest.mark.nightly\ndef test_at_night(): pass\n",
    "tool/run.py": "from core.values import value\n\ndef run(): return value()\n",
    "core/values.py": "import core.deep\n\ndef value(): return 1\n",
    "core/deep.py": "",
    "core/other.py": "",
    "page.md": "a page\n",
    "benchmarks/script.py": "import part\n",
    "benchmarks/part.py": "import part_of_part\n",
    "benchmarks/part_of_part.py": "",
}
TWO = ("-p", "xdist.plugin", "-n2")  # processes
TOOL, SCRIPT, CORE = {"test_one", "test_two"}, {"test_script"}, {"test_core"}


class Project:
    """A small project with two groups, and runs of its tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in FILES.items():
            self.write(name, text)
        shutil.copy(tiers.__file__, folder / "tests")

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run(self, *arguments: str) -> tuple[set[str], str]:
        """The tests that passed or failed in a run, and its last lines."""
        command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *arguments]
        environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": ""}
        done = subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, check=False)
        names = re.findall(r"^(?:PASSED|FAILED) \S+::(\w+)", done.stdout, re.MULTILINE)
        return set(names), "\n".join(done.stdout.splitlines()[-12:]) + done.stderr

    def record(self) -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = json.loads((self.folder / "tests" / "tiers.json").read_text())
        return found

    def seed_for(self, group: str) -> str:
        """An option with a seed whose group of the day is this one."""
        draws = {name: seed for seed in range(20) for name in [tiers.group_of_the_day(["script", "tool"], seed)]}
        return f"--kernel-seed={draws[group]}"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project after a run that was recorded."""
    project = Project(tmp_path_factory.mktemp("project"))
    ran, said = project.run("--record-tiers")
    assert ran == TOOL | SCRIPT | CORE, said
    assert "tiers.json: 2 groups recorded" in said
    return project


@pytest.fixture
def passed(first_run: Project, tmp_path: Path) -> Project:
    """A copy of the project after its first run."""
    shutil.copytree(first_run.folder, tmp_path, dirs_exist_ok=True)
    return Project(tmp_path)


@pytest.fixture
def digests(project: Project, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, str]]:
    """The digests of the project's groups, worked out in this process."""
    tests = project.folder / "tests"
    monkeypatch.setattr(tiers, "PROJECT", project.folder)
    monkeypatch.setattr(tiers, "TESTS", tests)
    monkeypatch.setattr(tiers, "HELPERS", (tests, project.folder / "benchmarks"))

    def of_groups() -> dict[str, str]:
        tiers.forget_files()
        return {name: tiers.digest_of(group) for name, group in GROUPS.items()}

    return of_groups


def test_an_unchanged_group_is_left_out_and_one_of_the_day_runs(passed: Project) -> None:
    ran, said = passed.run(passed.seed_for("script"))
    assert ran == SCRIPT | CORE
    assert "tiers: 2 tests of 1 groups unchanged since they passed; 1 tests run at night; all: --all-tiers" in said
    ran, _ = passed.run(passed.seed_for("tool"))
    assert ran == TOOL | CORE


def test_processes_of_a_run_leave_out_the_same(project: Project) -> None:
    ran, said = project.run("--record-tiers", *TWO)
    assert ran == TOOL | SCRIPT | CORE
    assert "2 groups recorded" in said and "1 tests run at night" in said
    ran, said = project.run(*TWO, project.seed_for("script"))
    assert ran == SCRIPT | CORE
    assert "2 tests of 1 groups unchanged" in said


def test_each_group_has_its_day() -> None:
    names = sorted(tiers.GROUPS)
    days = [tiers.group_of_the_day(names, 20261101 + day) for day in range(30 * len(names))]
    assert set(days) == set(names)


def test_a_changed_group_runs(passed: Project) -> None:
    passed.write("core/values.py", "def value(): return 1\n")
    ran, said = passed.run(passed.seed_for("script"))
    assert ran == TOOL | SCRIPT | CORE
    assert "1 groups run each time until this is run: pytest --record-tiers" in said
    passed.run("--record-tiers", passed.seed_for("script"))
    assert passed.run(passed.seed_for("script"))[0] == SCRIPT | CORE


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("tests/test_tool.py", {"tool"}),
        ("tests/helper.py", {"tool"}),
        ("tests/conftest.py", {"tool", "script"}),
        ("tool/run.py", {"tool"}),
        ("tool/new_file.txt", {"tool"}),
        ("page.md", {"tool"}),
        ("core/values.py", {"tool"}),
        ("benchmarks/script.py", {"script"}),
        ("benchmarks/part.py", {"script"}),
        ("benchmarks/part_of_part.py", {"script"}),
        ("core/deep.py", set()),  # of a module that is imported, what it imports in turn is not covered
        ("core/other.py", set()),
        ("README.md", set()),
    ],
)
def test_a_digest_changes_with_what_a_group_proves(
    project: Project, digests: Callable[[], dict[str, str]], name: str, groups: set[str]
) -> None:
    before = digests()
    assert digests() == before
    path = project.folder / name
    project.write(name, (path.read_text(encoding="utf-8") if path.is_file() else "") + "\n")
    after = digests()
    assert {name for name in after if after[name] != before[name]} == groups


def test_another_compiler_is_another_digest(
    digests: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digests()
    assert any(version.startswith("torch 2.") for version in tiers.versions())
    monkeypatch.setattr(tiers, "versions", lambda: ("torch 1.0",))
    assert not set(before.values()) & set(digests().values())


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        (["--all-tiers"], TOOL | SCRIPT | CORE | {"test_at_night"}),
        (["tests/test_tool.py", "tests/test_core.py::test_at_night"], TOOL | {"test_at_night"}),
        (["tests/test_tool.py::test_two", "tests/test_core.py"], {"test_two"} | CORE),
        (["-k", "two or night"], {"test_two"}),
        (["-m", "nightly"], {"test_at_night"}),
    ],
)
def test_what_the_command_line_names_runs(passed: Project, arguments: list[str], runs: set[str]) -> None:
    assert passed.run(passed.seed_for("script"), *arguments)[0] == runs


FAILS = "def test_one(): assert 0\ndef test_two(): pass\n"
SKIPS = "import pytest\n\ndef test_one(): pytest.skip('no')\ndef test_two(): pass\n"
CHANGES = "from pathlib import Path\n\ndef test_one(): Path('page.md').write_text('another')\ndef test_two(): pass\n"


@pytest.mark.parametrize("text", [FAILS, SKIPS, CHANGES, "import pytest\npytest.skip('no', allow_module_level=True)"])
def test_a_group_is_recorded_only_if_all_its_tests_ran_and_passed(project: Project, text: str) -> None:
    project.write("tests/test_tool.py", text)
    project.run("--record-tiers")
    assert project.record().keys() == {"script"}


@pytest.mark.parametrize(
    "arguments", [["-k", "two or script"], ["tests/test_tool.py::test_two", "tests/test_script.py"]]
)
def test_a_part_of_a_group_is_not_recorded(project: Project, arguments: list[str]) -> None:
    project.run("--record-tiers", *arguments)
    assert project.record().keys() == {"script"}


def test_a_group_that_fails_on_its_day_loses_its_record(passed: Project) -> None:
    passed.write("core/deep.py", "raise ValueError\n")
    assert passed.run("--record-tiers", passed.seed_for("script"))[0] == SCRIPT | CORE
    assert passed.record().keys() == {"script", "tool"}
    _, said = passed.run("--record-tiers", passed.seed_for("tool"))
    assert passed.record().keys() == {"script"}, said


def test_a_pattern_without_a_file_is_an_error(project: Project, digests: Callable[[], dict[str, str]]) -> None:
    (project.folder / "page.md").unlink()
    with pytest.raises(pytest.UsageError, match=r"no file is page\.md"):
        digests()


def test_files_are_in_one_group_each() -> None:
    every = [path for group in tiers.GROUPS.values() for path in tiers.files_of(group.tests)]
    assert len(every) == len(set(every))
    assert all(path.name.startswith("test_") and "gpu" not in path.parts for path in every)


def test_the_record_is_of_groups_that_there_are() -> None:
    assert tiers.recorded().keys() <= tiers.GROUPS.keys()


def test_a_group_has_inputs_that_it_proves() -> None:
    for group in tiers.GROUPS.values():
        assert {*tiers.files_of(group.tests), *tiers.files_of(group.proves)} <= {*tiers.inputs_of(group)}
    inputs = {path.relative_to(tiers.PROJECT).as_posix() for path in tiers.inputs_of(tiers.GROUPS["BSR benchmarks"])}
    assert {"tests/scripts.py", "benchmarks/harness.py", "benchmarks/records.py", "codegen/library.py"} <= inputs
