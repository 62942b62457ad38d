"""docs/guide/cli.md and environment.md are what the code says; every environment variable is in the list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import load_script

from runtime.variables import VARIABLES

PROJECT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"(?<![A-Z_])CODEGEN_[A-Z_]+")
SOURCES = [
    path
    for folder in ("codegen", "runtime", "scripts", "templates", "benchmarks", "examples")
    for path in sorted((PROJECT / folder).rglob("*"))
    if path.suffix in (".py", ".j2", ".sh")
]

script = load_script("command_pages")


def test_the_pages_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_page_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script, "VARIABLES", VARIABLES[1:])
    assert script.main(["--check"]) == 1
    assert capsys.readouterr().err.startswith("environment.md: is not what the code says today; run: ")


def test_every_variable_of_the_code_is_listed() -> None:
    found = {
        name: path.relative_to(PROJECT).as_posix()
        for path in SOURCES
        for name in NAME.findall(path.read_text(encoding="utf-8"))
    }
    listed = [each.name for each in VARIABLES]
    assert {name: path for name, path in found.items() if name not in listed} == {}
    assert listed == sorted(set(listed)) and not set(listed) - set(found)


def test_the_module_of_a_variable_names_it() -> None:
    for each in VARIABLES:
        path = PROJECT / f"{each.module.replace('.', '/')}.py"
        assert f'"{each.name}"' in path.read_text(encoding="utf-8"), each


def test_every_command_has_a_section_with_an_example() -> None:
    text = script.cli_page()
    sections = text.split("\n### ")[1:]
    assert len(sections) > 20
    for section in sections:
        name = section.partition("\n")[0]
        assert f"\n{name} " in section or f"\n{name}\n" in section or f"; {name} " in section, name
        assert "```sh\n" in section, name
