"""docs/reference/api.md is what signatures and docstrings say, and these say what a caller has to know."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from each import for_each
from scripts import load_script

griffe = pytest.importorskip("griffe")

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "reference" / "api.md"
SHAPE = re.compile(r"\(.*\)|\bas \S|\bsame\b|\bthose\b")
"""What the description of a tensor has: a shape, or the argument whose shape it shares."""


script = load_script("api_page")


@cache
def entries() -> list[Any]:
    """What the public modules offer."""
    return [entry for module in script.public_modules() for entry in script.entries(module)]


def functions() -> list[Any]:
    """Public functions and methods."""
    members = [script.members(each) if isinstance(each, griffe.Class) else [each] for each in entries()]
    return [each for group in members for each in group if isinstance(each, griffe.Function)]


def classes() -> list[Any]:
    """Public classes that callers make objects of."""
    return [entry for entry in entries() if isinstance(entry, griffe.Class) and script.is_made(entry)]


every_function = for_each("function", functions, lambda function: function.canonical_path)


def parameters(entry: Any) -> dict[str, Any]:
    """The parameters that a caller passes, by name, without stars."""
    return {p.name.lstrip("*"): p for p in entry.parameters if p.name not in ("self", "cls")}


def sections(entry: Any) -> dict[str, Any]:
    assert entry.docstring is not None, "no docstring"
    found = entry.docstring.parse("google", returns_multiple_items=False, warnings=False)
    return {section.kind.value: section.value for section in found}


def described(entry: Any, kind: str) -> dict[str, str]:
    """What the items of a section say, by name; several names may share a description."""
    items = sections(entry).get(kind, ())
    return {name.strip(): item.description for item in items for name in item.name.split(",")}


def is_short(function: Any) -> bool:
    """Whether a method's docstring is one sentence, as it may be where that says all."""
    return isinstance(function.parent, griffe.Class) and "\n" not in function.docstring.value.strip()


def test_the_page_is_what_the_docstrings_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_that_is_not_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "api.md"
    page.write_text(PAGE.read_text(encoding="utf-8").replace("### TopK", "### TopKeys"), encoding="utf-8")
    monkeypatch.setattr(script, "PAGE", page)
    assert script.main(["--check"]) == 1
    assert script.STALE in capsys.readouterr().out


def test_every_public_name_has_one_heading() -> None:
    headings = re.findall(r"^### (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    public = [name for module in script.public_modules() for name in script.public_names(module)]
    assert {"block_sparse_attention", "load_kernel", "TopK", "from_block_mask", "choose"} <= set(public)
    assert set(public) <= set(headings)
    assert len(headings) == len({heading.lower() for heading in headings}), "two headings with one anchor"


def test_packages_with_public_names_are_found(tmp_path: Path) -> None:
    assert "runtime.convert" in script.public_modules()
    for name, text in (("runtime", "__all__ = []"), ("runtime/new", "__all__ = []"), ("runtime/inner", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    assert script.public_modules(tmp_path) == ["runtime", "runtime.new", *script.PUBLIC]


@every_function
def test_arguments_are_described(function: Any) -> None:
    if is_short(function):
        return
    told, passed = described(function, "parameters"), parameters(function)
    assert set(passed) <= set(told)
    more_by_name = any(p.kind.value == "variadic keyword" for p in passed.values())
    assert set(told) <= set(passed) or more_by_name


@every_function
def test_results_and_errors_are_described(function: Any) -> None:
    told = sections(function)
    if not is_short(function):
        assert "returns" in told or str(function.returns) == "None"
        assert "raises" in told or not parameters(function)


@every_function
def test_tensors_have_shapes(function: Any) -> None:
    told = described(function, "parameters")
    tensors = [name for name, p in parameters(function).items() if "Tensor" in str(p.annotation)]
    assert not [name for name in tensors if not is_short(function) and not SHAPE.search(told[name])]


@for_each("entry", classes, lambda entry: entry.canonical_path)
def test_fields_are_described(entry: Any) -> None:
    """In a class with a constructor of its own, that describes what it takes."""
    made, passed = script.constructor(entry), parameters(entry)
    told = described(entry, "attributes") if made is None else described(made, "parameters")
    assert set(passed) <= set(told)
    assert made is None or "raises" in sections(made)
    tensors = [name for name, p in passed.items() if "Tensor" in str(p.annotation)]
    assert not [name for name in tensors if not SHAPE.search(told[name])]


def test_text_of_a_docstring() -> None:
    assert script.plain(":class:`~runtime.patterns.TopK` or ``k``") == "`TopK` or `k`"
    text = "Do.\n\nReturns:\n    (out, lse); None if ``lse: false``.\n\nRaises:\n    ValueError: no.\n"
    assert script.returns_of(text).strip() == "(out, lse); None if ``lse: false``."
    assert script._split("a: dict[str, int], *, b: tuple[int, int] = (1, 2)") == [
        "a: dict[str, int]",
        "*",
        "b: tuple[int, int] = (1, 2)",
    ]
