"""The locked test environment is the one that pyproject.toml and the constraints ask for, and each file has a hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[2]
LOCK = PROJECT / "tests" / "requirements.lock"
CONSTRAINTS = PROJECT / "tests" / "constraints.txt"
EXTRAS = ("cu13", "torch", "dev")
MEND = "lock again, by the command in the file's head"


def locked() -> list[tuple[Requirement, list[str]]]:
    """Return what is locked, with the hashes of its files."""
    entries = re.split(r"^(?=[a-z])", LOCK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return [(Requirement(entry.partition("\\")[0]), re.findall(r"--hash=(\S+)", entry)) for entry in entries]


def wanted() -> list[Requirement]:
    """Return what the project, its tests and its build ask for, and what the constraints pin."""
    told = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    project = told["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    pins = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return list(map(Requirement, [*project["dependencies"], *extras, *told["build-system"]["requires"], *pins]))


@pytest.mark.parametrize("asked", wanted(), ids=str)
def test_what_is_asked_for_is_locked(asked: Requirement) -> None:
    name = canonicalize_name(asked.name)
    found = [pin.specifier for pin, _ in locked() if canonicalize_name(pin.name) == name]
    assert found, f"{asked} is not in {LOCK.name}: {MEND}"
    for specifier in found:
        (pin,) = specifier
        assert asked.specifier.contains(pin.version), f"{name} {pin} does not fit {asked}: {MEND}"


def test_every_file_has_a_hash() -> None:
    for pin, hashes in locked():
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), f"{pin} is no version: {MEND}"
        assert hashes, f"{pin} has no hash: {MEND}"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), f"{pin}: {MEND}"


def test_the_head_is_the_documented_command() -> None:
    (command,) = re.findall(r"^#    (uv pip compile .*)$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    documented = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace(" \\\n       ", "")
    assert command in documented
    assert [f"--extra {extra}" in command for extra in EXTRAS] == [True] * len(EXTRAS)
