"""Each promise of docs/reference/guarantees.md has a proof and a full run; tests that documents name are there."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from each import for_each
from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "reference" / "guarantees.md"
DOCUMENTS = sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")])
COMMAND = re.compile(r"`(?:codegen|python|pytest) [^`]+`")
TEST = re.compile(r"\btests/[\w/.*]+\w(?:::\w+)?")


def table_rows(text: str) -> list[list[str]]:
    """The rows of a table, without its head."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]


def sections() -> dict[str, list[list[str]]]:
    """The rows of the page's tables, by heading, without their heads."""
    parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: table_rows(part) for part in parts}


LOG = PROJECT / "docs" / "notebook" / "full-runs.md"
RUNS = {run[0]: run for run in table_rows(LOG.read_text(encoding="utf-8"))}
PROMISES = [row for heading, rows in sections().items() if heading not in ("Modes", "Not promised") for row in rows]


@cache
def names_in(path: Path) -> frozenset[str]:
    """The names of a file's tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_")


def is_there(named: str) -> bool:
    """Whether there is the file, and the test in it if one is named."""
    path, _, test = named.partition("::")
    return any(PROJECT.glob(path)) and (not test or test in names_in(PROJECT / path))


def named_of(path: Path) -> list[str]:
    return TEST.findall(path.read_text(encoding="utf-8"))


@for_each(
    "path", lambda: [path for path in DOCUMENTS if named_of(path)], lambda path: path.relative_to(PROJECT).as_posix()
)
def test_documents_name_tests_that_there_are(path: Path) -> None:
    assert not [named for named in named_of(path) if not is_there(named)]


def test_the_page_of_numerics_names_tests_that_there_are() -> None:
    told = re.findall(r"`(test_\w+)`", (PROJECT / "docs" / "reference" / "numerics.md").read_text(encoding="utf-8"))
    assert told and set(told) <= names_in(PROJECT / "tests" / "gpu" / "test_numerics.py")


@for_each("row", lambda: PROMISES, lambda row: row[0])
def test_a_promise_has_a_proof_and_a_run(row: list[str]) -> None:
    _, proof, run = row
    assert TEST.search(proof) or COMMAND.search(proof), proof
    assert run == "suite" or run in RUNS, run
    assert run != "suite" or "tests/gpu/" not in proof, "a GPU's tests have a run that is told"


def test_a_run_is_of_something_and_each_is_asked_for() -> None:
    assert all(len(run) == 4 and run[1] and run[2] for run in RUNS.values())
    assert set(RUNS) == {run for _, _, run in PROMISES} - {"suite"}


@pytest.mark.parametrize("run", ["all kernels", "drawn specs"])
def test_the_oldest_compiler_that_is_installed_was_tried(run: str) -> None:
    told = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = map(Requirement, told["project"]["optional-dependencies"]["cu12"])
    bounds = [bound for each in asked if each.name.endswith("-cu12") for bound in each.specifier]
    oldest = {bound.version for bound in bounds if bound.operator == ">="}
    assert len(oldest) == 1, "packages of several CUDAs"
    assert f"NVRTC {oldest.pop()}." in RUNS[run][1]


@pytest.mark.parametrize("named", ["tests/codegen/test_absent.py", "tests/project/test_guarantees.py::test_absent"])
def test_what_is_not_there_is_found_out(named: str) -> None:
    assert not is_there(named)
