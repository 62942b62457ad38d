"""The second tier (tiers.py) in runs of a small project: what runs again, what is left out, what is recorded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_project import CORE, SCRIPT, TOOL, TWO, Project


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


def test_an_unchanged_group_is_left_out_and_one_of_the_day_runs(passed: Project) -> None:
    ran, said = passed.run(passed.seed_for("script"))
    assert ran == SCRIPT | CORE
    assert "tiers: 2 tests of 1 groups unchanged since they passed; 1 marked nightly; all: --all-tiers" in said
    ran, _ = passed.run(passed.seed_for("tool"))
    assert ran == TOOL | CORE


def test_processes_of_a_run_leave_out_the_same(project: Project) -> None:
    ran, said = project.run("--record-tiers", *TWO)
    assert ran == TOOL | SCRIPT | CORE
    assert "2 groups recorded" in said and "1 marked nightly" in said
    ran, said = project.run(*TWO, project.seed_for("script"))
    assert ran == SCRIPT | CORE
    assert "2 tests of 1 groups unchanged" in said


def test_a_changed_group_runs(passed: Project) -> None:
    passed.write("core/values.py", "def value(): return 1\n")
    ran, said = passed.run(passed.seed_for("script"))
    assert ran == TOOL | SCRIPT | CORE
    assert "1 groups run each time until this is run: pytest --record-tiers" in said
    passed.run("--record-tiers", passed.seed_for("script"))
    assert passed.run(passed.seed_for("script"))[0] == SCRIPT | CORE


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
CHANGES = "from pathlib import Path\n\ndef test_one(): Path('page.md').write_text('another')\ndef test_two(): pass\n"


@pytest.mark.parametrize("text", [FAILS, CHANGES, "import nothing_of_this_name\n"])
def test_a_group_is_recorded_only_if_all_its_tests_ran_and_none_failed(project: Project, text: str) -> None:
    project.write("tests/test_tool.py", text)
    project.run("--record-tiers", "--continue-on-collection-errors")
    assert project.record().keys() == {"script"}


ONE_SKIPPED = """
import pathlib, pytest

def test_one():
    if not pathlib.Path("library").exists():
        pytest.skip("there is no library")
def test_two(): pass
"""
ALL_SKIPPED = """
import pathlib, pytest

if not pathlib.Path("library").exists():
    pytest.skip("there is no library", allow_module_level=True)
def test_one(): pass
def test_two(): pass
"""


@pytest.mark.parametrize(
    ("text", "skipped", "again"),
    [
        (ONE_SKIPPED, ["tests/test_tool.py::test_one"], {"test_one"}),
        (ALL_SKIPPED, ["tests/test_tool.py"], {"test_one", "test_two"}),
    ],
)
def test_what_was_skipped_runs_where_it_can(project: Project, text: str, skipped: list[str], again: set[str]) -> None:
    project.write("tests/test_tool.py", text)
    project.run("--record-tiers", *TWO)
    assert project.record()["tool"]["skipped"] == skipped
    assert project.run(project.seed_for("script"))[0] == SCRIPT | CORE
    project.write("library", "")
    assert project.run(project.seed_for("script"))[0] == SCRIPT | CORE | again


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
