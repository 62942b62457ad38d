"""Input of ``codegen warm``: problems and specs in YAML or JSON lines, and records of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from codegen.errors import CodegenError, FileError, SpecError
from codegen.files import read_text
from codegen.library import NamedSpec, as_shipped, find_spec, unnamed_stem
from codegen.parse import parse_spec
from codegen.patterns.base import SpecModel
from codegen.plain import first_reason, json_value
from codegen.select import choose, parse_problem
from codegen.wording import shown
from codegen.yaml_text import read_yaml

YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class Request:
    """A kernel to compile in advance.

    Attributes:
        named: its spec.
        target: the output to compile; "ptx" for GPUs newer than its architecture.
    """

    named: NamedSpec
    target: Literal["cubin", "ptx"]


class _Line(SpecModel):
    """A spec, written by CODEGEN_RECORD or by a user."""

    spec: str | dict[str, Any]
    name: str = ""
    origin: str = ""
    target: Literal["cubin", "ptx"] = "cubin"


def read_requests(path: Path) -> list[Request]:
    """Read a file, and choose a kernel for each of its problems.

    Args:
        path: ``.yaml`` or ``.yml``: a list; otherwise, one JSON value per line. An entry is the name of a shipped
            spec, the fields of a problem, or a mapping with ``spec``.

    Returns:
        Each kernel once, in the order of the file.

    Raises:
        FileError: if the file cannot be read, or has no entry.
        SpecError: if an entry is not a kernel, with file and line.
    """
    requests = dict.fromkeys(_request(place, entry) for place, entry in _entries(path))
    if not requests:
        raise FileError(path, "has no entry, expected problems or specs")
    return list(requests)


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """The entries of a file with their locations."""
    text = read_text(path)
    if path.suffix in YAML:
        document = read_yaml(text, str(path))
        if not isinstance(document.fields, list):
            kind = "a mapping" if isinstance(document.fields, dict) else shown(document.fields)
            raise SpecError("", f"is {kind}, expected a list of problems and specs", str(path))
        for number, entry in enumerate(document.fields, 1):
            yield f"{path}: entry {number}", entry
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            place = f"{path}:{number}"
            try:
                yield place, json_value(line)
            except CodegenError as error:
                raise SpecError("", str(error), place) from None


def _request(place: str, entry: Any) -> Request:
    """The kernel of an entry."""
    try:
        if isinstance(entry, str):
            return Request(find_spec(entry), "cubin")
        if not isinstance(entry, Mapping):
            raise SpecError("", f"is {shown(entry)}, expected the name of a spec or a mapping")
        return _of_line(entry) if "spec" in entry else Request(choose(parse_problem(entry)).named, "cubin")
    except SpecError as error:
        raise (error if error.location else error.at(place)) from None


def _of_line(entry: Mapping[str, Any]) -> Request:
    """The kernel of a mapping with ``spec``, under the name with which a recorded run loaded it."""
    try:
        line = _Line.model_validate(entry)
    except ValidationError as error:
        raise SpecError("", first_reason(error)) from None
    if isinstance(line.spec, str):
        return Request(find_spec(line.spec), line.target)
    spec = parse_spec(line.spec)
    named = as_shipped(NamedSpec(line.name or unnamed_stem(spec), spec))
    if line.name and (named.stem, named.origin) != (line.name, line.origin):
        named = NamedSpec(line.name, spec, line.origin)
    return Request(named, line.target)
