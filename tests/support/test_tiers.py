"""Groups of the second tier (tests/support/tiers.py), and what their digests cover; runs are in test_tiers_runs.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiers
from small_project import GROUPS, Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture
def digests(project: Project, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, str]]:
    """The digests of the project's groups, worked out in this process."""
    tests = project.folder / "tests"
    monkeypatch.setattr(tiers, "PROJECT", project.folder)
    monkeypatch.setattr(tiers, "TESTS", tests)
    monkeypatch.setattr(tiers, "HELPERS", (tests, tests / "support", project.folder / "benchmarks"))

    def of_groups() -> dict[str, str]:
        tiers.forget_files()
        return {name: tiers.digest_of(group) for name, group in GROUPS.items()}

    return of_groups


def test_each_group_has_its_day() -> None:
    names = sorted(tiers.GROUPS)
    days = [tiers.group_of_the_day(names, 20261101 + day) for day in range(30 * len(names))]
    assert set(days) == set(names)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("tests/test_tool.py", {"tool"}),
        ("tests/support/helper.py", {"tool"}),
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


@pytest.mark.parametrize("name", tiers.GROUPS)
def test_each_pattern_of_a_group_has_a_file(name: str) -> None:
    group = tiers.GROUPS[name]
    assert not [pattern for pattern in (*group.tests, *group.proves) if not tiers.files_of([pattern])]


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
    assert {
        "tests/support/scripts.py",
        "benchmarks/harness.py",
        "benchmarks/records.py",
        "codegen/library.py",
    } <= inputs
