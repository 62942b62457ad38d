"""Rows of benchmark results: their places in a file, and models of their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from codegen.errors import MOST_OF_PLACE, CodegenError
from codegen.plain import first_reason, json_value
from codegen.receipts import Sha256
from codegen.wording import one_line

OURS = "ours"
MARKS = frozenset({"results", "milliseconds", "source_sha256", "code_sha256"})
"""An object with one of these fields and an object ``spec`` is a row."""
_HASHES = frozenset({"source_sha256", "code_sha256", "launch_sha256"})
_TIMES = ("tflops", "milliseconds", "cold_us", "warm_us")
_OF_REPORT = ("device", "versions")
"""Fields that the enclosing report may have instead of the row."""
Number = int | float


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class Versions(_Read):
    """Software versions of a row's measurement."""

    compiler: str = ""


class _Row(_Read):
    name: str = ""
    layer: str = ""
    spec: dict[str, Any]

    @property
    def title(self) -> str:
        """Name of the workload."""
        return self.name or self.layer


class KernelRow(_Row):
    """The kernel of a row: its spec, and hashes of its source, its code and its launch.

    A kernel that failed has null for each hash. Without ``launch_sha256``, ``code_sha256`` is one hash of code and
    launch.
    """

    source_sha256: Sha256 | None
    code_sha256: Sha256 | None
    launch_sha256: Sha256 | None = None
    versions: Versions = Versions()


class Result(_Read):
    """Measurements of one call, as in reports."""

    tflops: float | None = None
    back_to_back_tflops: float | None = None
    milliseconds: float | None = None
    cold_us: float | None = None
    warm_us: float | None = None
    error: float | None = None
    absolute_error: float | None = None

    @model_validator(mode="after")
    def _timed(self) -> Result:
        if all(getattr(self, name) is None for name in _TIMES):
            raise ValueError(f"has no time; expected one of {', '.join(_TIMES)}")
        return self


class ResultRow(_Row):
    """A workload with the results of the project's kernel and of its peers."""

    source_sha256: Sha256 | None = None
    results: dict[str, Result]
    failed: dict[str, str] = {}
    device: str = ""
    data: str = ""
    batch: Number | None = None
    heads: Number | None = None
    kv_heads: Number | None = None
    length: Number | None = None
    height: Number | None = None
    size: Number | None = None
    columns: Number | None = None
    row_blocks: Number | None = None
    density: Number | None = None
    pattern: str | None = None


Model = TypeVar("Model", bound=_Row)


@dataclass(frozen=True)
class Found:
    """A row in a file.

    Attributes:
        place: file and position of the row, for messages.
        node: the row as part of the document: changing it changes the document.
        around: fields of the enclosing report that apply to the row.
    """

    place: str
    node: dict[str, Any]
    around: Mapping[str, Any]

    def kernel_node(self) -> dict[str, Any]:
        """Get the object with the kernel's fields: the row, or its ``spec`` if that holds the hashes."""
        spec: dict[str, Any] = self.node["spec"]
        return spec if isinstance(spec.get("spec"), dict) else self.node

    def kernel_row(self) -> KernelRow | None:
        """Read the row's kernel; None for a row without hashes.

        Raises:
            CodegenError: if a field is missing or has another type, with file, row and field.
        """
        node = self.kernel_node()
        return self._read(KernelRow, {**self.node, **node}) if node.keys() & _HASHES else None

    def result_row(self) -> ResultRow:
        """Read the row's workload and results. A row of one call has its measurements beside the spec.

        Raises:
            CodegenError: if a field is missing or has another type, with file, row and field.
        """
        node = self.node
        results = {"results": {OURS: node}} if "milliseconds" in node else {}
        return self._read(ResultRow, {**results, **node, **self.kernel_node()})

    def _read(self, model: type[Model], fields: Mapping[str, Any]) -> Model:
        try:
            row = model.model_validate({**self.around, **fields})
        except ValidationError as error:
            raise CodegenError(f"{self.place}: {first_reason(error)}") from None
        if not row.title:
            raise CodegenError(f"{self.place}: name: is missing; expected a string there or in layer")
        return row


def documents(file: str, text: str, lines: bool) -> list[tuple[str, Any]]:
    """Parse a file of results: the place, for messages, and the value of each document.

    Args:
        file: name of the file.
        text: content of the file.
        lines: whether each line is a document. An incomplete last line, left by a killed run, is skipped.

    Raises:
        CodegenError: if the text is not JSON, with its place.
    """
    place = one_line(file, MOST_OF_PLACE)
    if not lines:
        return [(place, _parsed(place, text))]
    numbered = enumerate(text.split("\n")[:-1], 1)
    return [(f"{place}:{number}", _parsed(f"{place}:{number}", line)) for number, line in numbered if line]


def _parsed(place: str, text: str) -> Any:
    try:
        return json_value(text)
    except CodegenError as error:
        raise CodegenError(f"{place}: {error}") from None


def rows_in(place: str, document: Any) -> Iterator[Found]:
    """Yield the rows of a document in order."""
    yield from _rows(document, place, "", {})


def _rows(node: Any, place: str, path: str, around: Mapping[str, Any]) -> Iterator[Found]:
    if isinstance(node, list):
        for i, part in enumerate(node):
            yield from _rows(part, place, f"{path}.{i}", around)
    elif isinstance(node, dict):
        if isinstance(node.get("spec"), dict) and node.keys() & MARKS:
            where = f"{place}: {one_line(path[1:])}" if path else place
            name = node.get("name") or node.get("layer")
            yield Found(f"{where} ({one_line(name)})" if isinstance(name, str) else where, node, around)
            return
        around = {**around, **{name: node[name] for name in _OF_REPORT if name in node}}
        for name, part in node.items():
            yield from _rows(part, place, f"{path}.{name}", around)
