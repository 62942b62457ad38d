"""Writes docs/reference/api.md from signatures and docstrings: every public name, by module.

    python benchmarks/api_page.py            # rewrites what is between the markers
    python benchmarks/api_page.py --check    # exits 1 if that would change the page

Public is what ``__all__`` of a package in runtime/ or of a module in PUBLIC names. Sources are read, not imported (by
griffe, an extra of dev), so that neither torch nor an optional package has to be there.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from pydantic import BaseModel
from results_table import PAGE_WIDTH, update, wrapped
from spec_page import FIELD_HEADINGS, field_rows, wrapped_table

import sparse_kernel_codegen as skc
from codegen.library import ROOT

PAGE = ROOT / "docs" / "reference" / "api.md"
STALE = "it differs from the docstrings; run: python benchmarks/api_page.py"
PUBLIC = ("runtime.patterns", "codegen.select")
"""Public modules beside the packages of runtime/."""
LINE = 120
"""Characters of a line at most."""
ITEMS = {"parameters": "Arguments", "attributes": "Attributes", "raises": "Raises"}
"""Sections of a docstring that have items, and their headings on the page."""

Entry = griffe.Function | griffe.Class | griffe.Attribute


# What there is


@cache
def project() -> griffe.GriffeLoader:
    """A loader that has read the project's packages."""
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)], allow_inspection=False)
    for package in ("codegen", "runtime"):
        loader.load(package)
    return loader


def found(path: str) -> Any:
    """The definition at a dotted path, following imports."""
    there = project().modules_collection[path]
    return there.final_target if there.is_alias else there


def public_modules(root: Path = ROOT) -> list[str]:
    """The public modules: those whose names users import."""
    packages = sorted((root / "runtime").rglob("__init__.py"))
    named = [path.parent.relative_to(root) for path in packages if "__all__" in path.read_text(encoding="utf-8")]
    return [*(".".join(path.parts) for path in named), *PUBLIC]


def public(module: str) -> str:
    """The name that users import a module by."""
    _, dot, rest = module.partition(".")
    assert not dot or rest in skc.__all__, module
    return f"{skc.__name__}{dot}{rest}"


def public_names(module: str) -> list[str]:
    """The names of a public module, in the order of ``__all__``; modules have sections of their own."""
    exported = [str(name) for name in found(module).exports or ()]
    return [name for name in exported if not found(f"{module}.{name}").is_module]


OF_PAGES = "runtime.kernels.paged_attention.PagedKernel"
"""The base of two kernel objects, which has their call."""


def kind_of(entry: Entry) -> int:
    """Sort key of an entry: functions, then classes and types, then exceptions."""
    return 0 if isinstance(entry, griffe.Function) else 2 if is_error(entry) else 1


def entries(module: str) -> list[Entry]:
    """Entries of a module: its public names, then classes of this package that they alias or return."""
    paths = {name: [f"{name}.{each}" for each in public_names(name)] for name in public_modules()}
    earlier = list(paths)[: list(paths).index(module)]
    elsewhere = {found(path).canonical_path for name in earlier for path in paths[name]}
    listed: list[Entry] = [each for path in paths[module] if (each := found(path)).canonical_path not in elsewhere]
    known = {found(path).canonical_path for every in paths.values() for path in every}
    for entry in listed:  # grows
        named = entry.value if entry.is_attribute else getattr(entry, "returns", None)
        listed += [each for each in _classes(named) if each.canonical_path not in known]
        known |= {each.canonical_path for each in listed}
    return sorted(listed, key=kind_of)


def _classes(expression: Any) -> list[griffe.Class]:
    """The classes of ours in a type."""
    names = expression.iterate() if isinstance(expression, griffe.Expr) else ()
    paths = [name.canonical_path for name in names if isinstance(name, griffe.ExprName)]
    ours = [found(path) for path in dict.fromkeys(paths) if path.partition(".")[0] in ("codegen", "runtime")]
    return [each for each in ours if each.is_class]


def members(entry: griffe.Class) -> list[griffe.Function | griffe.Attribute]:
    """The public methods and properties of a class and of its bases that have no entry; others have theirs."""
    private = [base for base in entry.mro() if base.name.startswith("_") or base.canonical_path == OF_PAGES]
    inherited = {name for base in entry.mro() if base not in private for name in base.members}
    every = {name: member for each in (*reversed(private), entry) for name, member in each.members.items()}
    return [
        member
        for name, member in every.items()
        if name == "__call__" or not (name.startswith("_") or name in inherited)
        if isinstance(member, griffe.Function) or "property" in member.labels
    ]


# Text


def plain(text: str) -> str:
    """A docstring's text as Markdown: one kind of quotes, roles by their last name."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def alias(value: str) -> str:
    """The value of an alias; each type of a long union on a line of its own."""
    return value if len(value) <= LINE else "(\n    " + value.replace(" | ", "\n    | ") + "\n)"


def paragraphs(text: str) -> Iterator[str]:
    """Text wrapped to the page's width, paragraph by paragraph."""
    for paragraph in re.split(r"\n\s*\n", plain(text).strip()):
        yield wrapped(" ".join(paragraph.split()))


def signature(entry: griffe.Function | griffe.Class, name: str) -> str:
    """A signature as Python has it, one parameter a line where it is long."""
    short = entry.signature(name=name)
    if len(short) <= PAGE_WIDTH:
        return short
    inner, _, returns = short.removeprefix(f"{name}(").rpartition(")")
    return "\n".join([f"{name}(", *(f"    {part}," for part in _split(inner)), f"){returns}"])


def _split(parameters: str) -> list[str]:
    """The parameters of a signature: parted by commas outside of brackets."""
    parts, depth = [""], 0
    for letter in parameters:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def returns_of(text: str) -> str:
    """The Returns section of a docstring, unparsed: griffe would parse text before a colon as a type."""
    section = re.search(r"^Returns:\n((?:[ ]{4}.*\n?|\n)+)", text, re.MULTILINE)
    return textwrap.dedent(section.group(1)) if section else ""


def documentation(entry: Entry) -> Iterator[str]:
    """The docstring as Markdown, a block at a time."""
    if entry.docstring is None:
        return
    sections = entry.docstring.parse("google", returns_multiple_items=False, warnings=False)
    for section in sections:
        kind = section.kind.value
        if kind == "text":
            yield from paragraphs(str(section.value))
        elif kind in ITEMS:
            yield "\n".join([f"{ITEMS[kind]}:", "", *(item(part) for part in section.value)])
        elif kind == "returns":
            first, *others = paragraphs(f"Returns: {returns_of(entry.docstring.value)}")
            yield from (first, *others)


def item(part: Any) -> str:
    """An argument, an attribute or an exception, and what is said of it, as an item of a list."""
    name = str(part.annotation).strip("()") if isinstance(part, griffe.DocstringRaise) else part.name
    names = ", ".join(f"`{each.strip()}`" for each in name.split(","))
    return wrapped(f"- {names}: {' '.join(plain(part.description).split())}")


# Entries


def is_pydantic(entry: Entry) -> bool:
    """Whether an entry is a pydantic model, whose fields have their own documentation."""
    return any(str(base) in ("SpecModel", "_Problem") for base in getattr(entry, "bases", ()))


def model_table(entry: griffe.Class) -> str:
    """The fields of a model. It is imported: codegen needs neither torch nor CUDA."""
    module, _, name = entry.canonical_path.rpartition(".")
    model: type[BaseModel] = getattr(importlib.import_module(module), name)
    return wrapped_table(FIELD_HEADINGS, field_rows(model, {})).replace("](#", "](specs.md#")


def is_error(entry: Entry) -> bool:
    """Whether a class is an exception, which users catch but do not construct."""
    return entry.name.endswith("Error")


def is_made(entry: griffe.Class) -> bool:
    """Whether users call the constructor of a class; models have a table of their fields."""
    public = {found(f"{module}.{name}").canonical_path for module in public_modules() for name in public_names(module)}
    return entry.canonical_path in public and not is_error(entry) and not is_pydantic(entry)


def called(entry: griffe.Function, name: str) -> str:
    """Name of a callable in a signature: of a called object, a kernel or a class's instance."""
    if entry.name != "__call__":
        return name
    owner = name.removesuffix(".__call__")
    return "kernel" if owner.endswith("Kernel") else f"{owner}(...)"


def constructor(entry: griffe.Class) -> griffe.Function | None:
    """The constructor of a class that users make, if it says more than the fields do: not of dataclasses."""
    made = entry.members.get("__init__") if is_made(entry) else None
    return made if isinstance(made, griffe.Function) and made.docstring is not None else None


def blocks(entry: Entry, name: str, level: int = 3) -> Iterator[str]:
    """An entry as Markdown: heading, signature, docstring, methods."""
    yield f"{'#' * level} {name}"
    if isinstance(entry, griffe.Function):
        yield f"```text\n{signature(entry, called(entry, name))}\n```"
    elif isinstance(entry, griffe.Class) and is_made(entry):
        yield f"```text\n{signature(entry, name)}\n```"
    elif "property" not in entry.labels and not isinstance(entry, griffe.Class):
        yield f"```text\n{name} = {alias(str(entry.value))}\n```"
    yield from documentation(entry)
    if isinstance(entry, griffe.Class):
        if (made := constructor(entry)) is not None:
            yield from documentation(made)
        if is_pydantic(entry):
            yield model_table(entry)
        short, long = [], []
        for member in members(entry):
            (long if member.docstring and "\n\n" in member.docstring.value else short).append(member)
        if short:
            yield "\n".join(["Methods:", "", *(wrapped(f"- `{headline(m)}`: {summary(m)}") for m in short)])
        for member in long:
            yield from blocks(member, f"{name}.{member.name}", level + 1)


def headline(member: griffe.Function | griffe.Attribute) -> str:
    """A method with its arguments, or the name of a property."""
    return str(member.signature(name=member.name)) if isinstance(member, griffe.Function) else member.name


def summary(member: griffe.Function | griffe.Attribute) -> str:
    """The docstring of a short method in one line."""
    return " ".join(plain(member.docstring.value).split()) if member.docstring else ""


def reference() -> str:
    """The page: what there is, then each module."""
    every = {module: entries(module) for module in public_modules()}
    parts = ["\n".join(contents_line(module, listed) for module, listed in every.items())]
    for module, listed in every.items():
        parts += [f"## {public(module)}", *paragraphs(_first(found(module)))]
        parts += [block for entry in listed for block in blocks(entry, entry.name)]
    return "\n\n".join(parts)


def contents_line(module: str, listed: Sequence[Entry]) -> str:
    """A module's line of contents."""
    names = ", ".join(f"[{entry.name}](#{anchor(entry.name)})" for entry in listed)
    return wrapped(f"- [{public(module)}](#{anchor(public(module))}): {names}")


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _first(module: griffe.Module) -> str:
    """A module's docstring."""
    return inspect.cleandoc(module.docstring.value) if module.docstring else ""


def texts() -> Mapping[str, str]:
    """Texts by the name of their markers."""
    return {"api": reference()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    check = parser.parse_args(arguments).check
    return update(PAGE, texts(), check=check, stale=STALE)


if __name__ == "__main__":
    raise SystemExit(main())
