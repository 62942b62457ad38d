"""Where the project's files are, and how specs are found and read.

In a source tree ``templates/``, ``specs/`` and ``generated/`` stand beside the package; in an installed wheel they are
inside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from codegen.errors import FileError, SpecError
from codegen.files import is_file, read_text, resolved
from codegen.names import check_name
from codegen.operators import operator_of
from codegen.parse import parse_spec
from codegen.spec import Spec
from codegen.wording import alternatives, in_shell, shown
from codegen.yaml_text import location_of, read_yaml

_PACKAGE = Path(__file__).resolve().parent
IN_SOURCE_TREE = not (_PACKAGE / "data").is_dir()
"""Whether this is a source tree: what an installed package carries is not written to."""
ROOT = _PACKAGE.parent if IN_SOURCE_TREE else _PACKAGE / "data"
"""Folder that holds templates/, specs/ and generated/."""
TEMPLATES = ROOT / "templates"
SPECS = ROOT / "specs"
GENERATED = ROOT / "generated"


@dataclass(frozen=True)
class NamedSpec:
    """A spec with the name its generated file, kernel symbol and receipt carry.

    Attributes:
        stem: ``h100_topk32``; for a spec that came from no file, a name made of its fields and hash.
        spec: the spec itself.
        origin: ``specs/h100_topk32.yaml``, relative to the project; of a file elsewhere its name; "" for no file.
        path: the file, if there is one.
        lines: line of each field in the file, by dotted name.
    """

    stem: str
    spec: Spec
    origin: str = ""
    path: Path | None = None
    lines: Mapping[str, int] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse a name that no kernel can have: it is written into the source.

        Raises:
            SpecError: for such a name.
        """
        check_name(self.stem)

    @property
    def is_shipped(self) -> bool:
        """Whether it is one of the project's own."""
        return self.path is not None and resolved(self.path).is_relative_to(SPECS)

    @property
    def subfolder(self) -> Path:
        """Folder of a shipped spec below specs/, and of its source and receipt below generated/; else ``.``."""
        parent = SPECS if self.path is None else resolved(self.path).parent
        return parent.relative_to(SPECS) if parent.is_relative_to(SPECS) else Path()

    @property
    def source_file(self) -> str:
        """Where its source belongs, relative to the project."""
        return ("generated" / self.subfolder / f"{self.stem}.cu").as_posix()

    @property
    def argument(self) -> str:
        """How a command line names it: a shipped spec by its name, which an installed package knows too.

        A spec without a file is named by its canonical JSON, of which a command makes the same kernel.
        """
        if self.path is None:
            return in_shell(self.spec.canonical_json())
        return self.stem if self.is_shipped else in_shell(str(self.path))

    def located(self, error: SpecError) -> SpecError:
        """Return ``error`` with the file and line of its field."""
        return error.at(location_of(self.place, self.lines or {}, error.field)) if self.place else error

    @property
    def place(self) -> str:
        """The file as messages name it: in the project its place there, elsewhere the path that was typed."""
        inside = self.path is None or resolved(self.path).is_relative_to(ROOT)
        return self.origin if inside else str(self.path)


def shipped_files() -> dict[str, Path]:
    """Return the shipped specs, in whichever folder of specs/ they are, by stem, sorted."""
    return _files(SPECS)


def _files(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.rglob("*.yaml"), key=lambda path: path.stem)}


def shipped_names() -> list[str]:
    """Return the stems of the shipped specs, sorted."""
    return list(shipped_files())


def shipped_specs() -> list[NamedSpec]:
    """Return every shipped spec, as a process first read it, in a list of the caller's own."""
    return list(_specs(SPECS))


@cache  # a spec takes 1 ms, and each advice for another architecture looks through all of them
def _specs(folder: Path) -> tuple[NamedSpec, ...]:
    return tuple(read_spec(path) for path in _files(folder).values())


def as_shipped(named: NamedSpec) -> NamedSpec:
    """The shipped spec with the same fields, which has a committed source and a receipt; itself without one.

    A spec from a file keeps the name of the file.
    """
    return named if named.path is not None else _by_hash(SPECS).get(named.spec.hash, named)


@cache
def _by_hash(folder: Path) -> dict[str, NamedSpec]:
    return {named.spec.hash: named for named in reversed(_specs(folder))}


def find_spec(source: str | Path | Mapping[str, Any] | Spec | NamedSpec) -> NamedSpec:
    """Turn whatever a user may call a spec into a named spec.

    Args:
        source: a path of a YAML file, the name of a shipped spec, the fields as JSON (``{...}``) or as a mapping, or a
            spec model.

    Raises:
        SpecError: for an unknown name (with near matches), an unreadable file or an illegal spec.
    """
    if isinstance(source, NamedSpec):
        return source
    if isinstance(source, str) and source.startswith("{") and source.rstrip().endswith("}"):
        source = read_yaml(source, "spec").fields  # JSON is YAML, and this reader refuses a field that is named twice
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix in (".yaml", ".yml") or is_file(path):
            return read_spec(path)
        name = str(source)
        shipped = shipped_files()
        if name in shipped:
            return read_spec(shipped[name])
        hint = alternatives(name, shipped, "codegen list names all")
        raise SpecError("", f"no spec is called {shown(name)}, and there is no such file; {hint}")
    spec = parse_spec(source)
    return NamedSpec(stem=unnamed_stem(spec), spec=spec)


def unnamed_stem(spec: Spec) -> str:
    """Return a readable, unique name for a spec that came from no file."""
    what = [spec.op, spec.arch, spec.dtype, *operator_of(spec).stem(spec)]
    return "_".join([*what, spec.hash[:8]]).replace("-", "minus")  # sizes that a plan refuses have a name too


def read_spec(path: Path, text: str | None = None) -> NamedSpec:
    """Read one YAML spec file strictly.

    Args:
        path: the file.
        text: what it will hold, if that is not what it holds.

    Raises:
        SpecError: for a file that cannot be read, is too large, is not UTF-8, is not YAML, repeats a key, or is not a
            legal spec; with file and line.
    """
    origin = shown_place(path)
    try:
        check_name(path.stem)
    except SpecError as error:
        raise error.at(origin) from None
    document = read_yaml(spec_text(path) if text is None else text, origin)
    try:
        spec = parse_spec(document.fields, in_shell(origin))
    except SpecError as error:
        raise error.at(location_of(origin, document.lines, error.field)) from None
    return NamedSpec(stem=path.stem, spec=spec, origin=_origin(path), path=path, lines=document.lines)


def spec_text(path: Path) -> str:
    """Read a spec file.

    Raises:
        SpecError: for a file that cannot be read, is too large or is not UTF-8.
    """
    try:
        return read_text(path)
    except FileError as error:
        raise SpecError("", error.reason, shown_place(path)) from None


def shown_place(path: Path) -> str:
    """Return a spec file as messages name it: in the project its place there, elsewhere the path that was typed."""
    return _origin(path) if resolved(path).is_relative_to(ROOT) else str(path)


def _origin(path: Path) -> str:
    """Return the path as a generated file has it: that in the project, or the name of a file that is elsewhere."""
    try:
        return resolved(path).relative_to(ROOT).as_posix()
    except ValueError:
        return path.name  # however it was typed
