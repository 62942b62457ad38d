"""Lookup and parsing of specs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from codegen import project
from codegen.dtypes import TWINS
from codegen.errors import FileError, MissingFileError, SpecError
from codegen.files import is_file, is_folder, read_text, resolved
from codegen.names import check_name
from codegen.operators import operator_of
from codegen.parse import parse_spec
from codegen.spec import Spec
from codegen.wording import alternatives, in_shell, shown
from codegen.yaml_text import Document, location_of, read_yaml

IN_SOURCE_TREE = project.IN_SOURCE_TREE
ROOT = project.ROOT
TEMPLATES = project.TEMPLATES
SPECS = project.SPECS
GENERATED = project.GENERATED
OF_TWIN = f"_{TWINS[1]}"
"""Suffix of a twin's name."""


@dataclass(frozen=True)
class NamedSpec:
    """A spec with the name of its kernel.

    A file that lists two types defines two kernels, whose sources differ in a few words. They share a generated file
    and a receipt under the name of the first.

    Attributes:
        stem: name, such as ``h100_topk32``; for a spec without a file, a name made of its fields and hash.
        spec: the spec.
        origin: ``specs/h100_topk32.yaml``, relative to the project; only the name of a file elsewhere; "" without one.
        path: the file, if there is one.
        lines: line of each field in the file, by dotted name.
        has_twin: whether the file names a second type.
        twin_of: for a kernel of the second type, the kernel of the first.
    """

    stem: str
    spec: Spec
    origin: str = ""
    path: Path | None = None
    lines: Mapping[str, int] | None = field(default=None, compare=False, repr=False)
    has_twin: bool = False
    twin_of: NamedSpec | None = None

    def __post_init__(self) -> None:
        """Reject an invalid name of a kernel: the source contains it.

        Raises:
            SpecError: for such a name.
        """
        check_name(self.stem)

    @property
    def main(self) -> NamedSpec:
        """The kernel that names the generated file and the receipt: this one, or that of the first type."""
        return self.twin_of or self

    @property
    def is_shipped(self) -> bool:
        """Whether the spec is shipped with the project."""
        return self.path is not None and resolved(self.path).is_relative_to(SPECS)

    @property
    def subfolder(self) -> Path:
        """Subfolder of a shipped spec in specs/, and of its source and receipt in generated/; else ``.``."""
        parent = SPECS if self.path is None else resolved(self.path).parent
        return parent.relative_to(SPECS) if parent.is_relative_to(SPECS) else Path()

    @property
    def source_file(self) -> str:
        """Path of the source, relative to the project; a twin's source is this file with words replaced."""
        return ("generated" / self.subfolder / f"{self.main.stem}.cu").as_posix()

    @property
    def argument(self) -> str:
        """Argument of a command line for this spec: for a shipped spec its name, which also works without a checkout.

        For a spec without a file it is the canonical JSON. A file that is not shipped stands for both of its types.
        """
        if self.path is None:
            return in_shell(self.spec.canonical_json())
        return self.stem if self.is_shipped else in_shell(str(self.path))

    def located(self, error: SpecError) -> SpecError:
        """``error`` with the file and line of its field."""
        lines = self.lines or {}
        return error.located(lambda field: location_of(self.place, lines, field)) if self.place else error

    @property
    def place(self) -> str:
        """Path of the file in messages: relative to the project if it is inside, else as the user gave it."""
        inside = self.path is None or resolved(self.path).is_relative_to(ROOT)
        return self.origin if inside else str(self.path)


def shipped_files() -> dict[str, Path]:
    """Files of the shipped specs in all folders of specs/, sorted by stem."""
    return _files(SPECS)


def _files(folder: Path) -> dict[str, Path]:
    return {stem: Path(place) for stem, place in sorted(_places(folder).items())}


def _places(folder: Path) -> dict[str, str]:
    """Paths of spec files by stem. A path as a text takes less time, and most callers need one of some hundred."""
    walk = ((place, name) for place, _, names in os.walk(folder) for name in names)
    return {stem: f"{place}/{name}" for place, name in walk if (stem := name.removesuffix(".yaml")) != name}


def shipped_names() -> list[str]:
    """Names of the shipped specs, twins among them, sorted."""
    return [named.stem for named in _specs(SPECS)]


def shipped_file(name: str) -> Path | None:
    """File of the shipped spec or twin with this name; None if there is none."""
    shipped = _places(SPECS)
    if name in shipped:
        return Path(shipped[name])
    place = shipped.get(name.removesuffix(OF_TWIN)) if name.endswith(OF_TWIN) else None
    return Path(place) if place is not None and len(read_specs(Path(place))) > 1 else None


def file_of(name: str) -> Path:
    """File of the shipped spec or twin with this name.

    Raises:
        SpecError: if there is none, with near matches.
    """
    path = shipped_file(name)
    if path is None:
        raise SpecError("", f"no spec is named {shown(name)}, and there is no such file; {_hint_for(name)}")
    return path


def _hint_for(name: str) -> str:
    """The end of a message on an unknown name: a file or a folder of that name, or the nearest shipped specs."""
    for suffix in (".yaml", ".yml"):
        if is_file(Path(f"{name}{suffix}")):
            return f"did you mean the file {in_shell(f'{name}{suffix}')}?"
    if name and is_folder(Path(name)):
        return "this is a folder: name a spec file in it"
    names = shipped_names()
    prefix = f"{name.partition('_')[0]}_"
    return alternatives(name, [each for each in names if each.startswith(prefix)] or names, "codegen list shows all")


def shipped_specs() -> list[NamedSpec]:
    """All shipped specs, including twins, as a new list; each process reads the files once."""
    return list(_specs(SPECS))


@cache  # a spec takes 1 ms, and advice for another architecture searches all of them
def _specs(folder: Path) -> tuple[NamedSpec, ...]:
    specs = (named for path in _files(folder).values() for named in read_specs(path))
    return tuple(sorted(specs, key=lambda named: named.stem))


def as_shipped(named: NamedSpec) -> NamedSpec:
    """The shipped spec with the same fields, which has a committed source and a receipt; else the spec itself.

    A spec from a file keeps the name of the file.
    """
    return named if named.path is not None else _by_hash(SPECS).get(named.spec.hash, named)


@cache
def _by_hash(folder: Path) -> dict[str, NamedSpec]:
    return {named.spec.hash: named for named in reversed(_specs(folder))}


def find_spec(source: str | Path | Mapping[str, Any] | Spec | NamedSpec) -> NamedSpec:
    """Named spec for any form in which a user gives a spec.

    Args:
        source: a path of a YAML file, the name of a shipped spec or of its twin, the fields as JSON (``{...}``) or as a
            mapping, or a spec model. A path is the kernel of the file's first type; ``read_specs`` returns both.

    Raises:
        SpecError: for an unknown name (with near matches), an unreadable file or an illegal spec.
    """
    if isinstance(source, NamedSpec):
        return source
    if isinstance(source, str) and source.startswith("{") and source.rstrip().endswith("}"):
        source = read_yaml(source, "spec").fields  # JSON is YAML, and this reader rejects duplicate fields
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix in (".yaml", ".yml") or is_file(path):
            return read_spec(path)
        return next(named for named in read_specs(file_of(str(source))) if named.stem == str(source))
    spec = parse_spec(source)
    return NamedSpec(stem=unnamed_stem(spec), spec=spec)


def find_specs(source: str | Path | Mapping[str, Any] | Spec | NamedSpec) -> tuple[NamedSpec, ...]:
    """Named specs for any form of a spec: a file, or the name of its first type, stands for all of its types.

    Raises:
        SpecError: like ``find_spec``.
    """
    named = find_spec(source)
    return read_specs(named.path) if named.has_twin and named.path is not None else (named,)


def unnamed_stem(spec: Spec) -> str:
    """Readable, unique name for a spec without a file."""
    what = [spec.op, spec.arch, spec.dtype, *operator_of(spec).stem(spec)]
    return "_".join([*what, spec.hash[:8]]).replace("-", "minus")  # sizes that a plan rejects have a name too


def read_spec(path: Path, text: str | None = None) -> NamedSpec:
    """Read one YAML spec file strictly; if it lists several types, return the kernel of the first.

    Args:
        path: the file.
        text: contents to use instead of those of the file.

    Raises:
        SpecError: like ``read_specs``.
    """
    return read_specs(path, text)[0]


def read_specs(path: Path, text: str | None = None) -> tuple[NamedSpec, ...]:
    """Read one YAML spec file strictly.

    Args:
        path: the file.
        text: contents to use instead of those of the file.

    Returns:
        The kernel of the file, or one for each type that it lists: ``NAME``, then ``NAME_bf16``.

    Raises:
        SpecError: for a file that cannot be read, is too large, is not UTF-8, is not YAML, repeats a key, or is not a
            legal spec; with file and line.
    """
    origin = shown_place(path)
    try:
        check_name(path.stem)
    except SpecError as error:
        raise error.at(origin) from None
    text = spec_text(path) if text is None else text
    if not text.strip():
        raise SpecError("", "is empty; a spec is a mapping of fields, such as op: attention", origin)
    document = read_yaml(text, origin)
    try:
        specs = _parsed(document, in_shell(origin))
    except SpecError as error:
        raise error.located(lambda field: location_of(origin, document.lines, field)) from None
    first = NamedSpec(path.stem, specs[0], _origin(path), path, document.lines, has_twin=len(specs) > 1)
    twins = (replace(first, stem=f"{path.stem}_{spec.dtype}", spec=spec, has_twin=False) for spec in specs[1:])
    return (first, *(replace(twin, twin_of=first) for twin in twins))


def _parsed(document: Document, file: str) -> list[Spec]:
    """Specs of a file, one per type; they differ in the type only."""
    fields = document.fields
    dtypes = fields.get("dtype") if isinstance(fields, dict) else None
    if not isinstance(dtypes, list):
        return [parse_spec(fields, file)]
    if dtypes != [*TWINS]:
        reason = "kernels of other types differ in more than words and need separate specs"
        raise SpecError("dtype", f"is {shown(dtypes)}; a list is [{', '.join(TWINS)}]: {reason}")
    specs = [parse_spec(fields | {"dtype": dtype}, file) for dtype in dtypes]
    first, other = (json.loads(spec.canonical_json()) for spec in specs)
    different = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
    if different != ["dtype"]:
        raise SpecError("dtype", f"lists types whose {', '.join(different)} differ: write a spec for each")
    del first["dtype"]
    if re.search(rf"\b{TWINS[0]}\b", json.dumps(first)):
        raise SpecError("dtype", f"lists types, and {TWINS[0]} is in another field too: write a spec for each")
    return specs


def spec_text(path: Path) -> str:
    """Text of a spec file.

    Raises:
        SpecError: for a file that cannot be read, is too large or is not UTF-8.
    """
    try:
        return read_text(path)
    except MissingFileError as error:
        known = shipped_file(path.stem)
        hint = f"; {path.stem} is a shipped spec: leave out the folder and {path.suffix}" if known else ""
        raise SpecError("", f"{error.reason}{hint}", shown_place(path)) from None
    except FileError as error:
        raise SpecError("", error.reason, shown_place(path)) from None


def shown_place(path: Path) -> str:
    """Path of a spec file in messages: relative to the project if it is inside, else as the user gave it."""
    return _origin(path) if resolved(path).is_relative_to(ROOT) else str(path)


def _origin(path: Path) -> str:
    """Path in a generated file: relative to the project, or only the name of a file elsewhere."""
    try:
        return resolved(path).relative_to(ROOT).as_posix()
    except ValueError:
        return path.name  # independent of the path that the user gave
