"""Exported kernels: a folder with source, cubin, header, receipt, and ``kernel.json``, which describes and seals them.

docs/guide/export.md describes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from codegen import __version__
from codegen.errors import CodegenError, ExportError, MissingFileError, SpecError
from codegen.files import is_file, read_bytes, read_text
from codegen.folders import has_hash
from codegen.library import NamedSpec
from codegen.names import check_name
from codegen.parse import parse_spec
from codegen.patterns.base import SpecModel
from codegen.plain import json_model, json_value
from codegen.receipts import Receipt, Sha256
from codegen.render import Generated, generate, seal_is_intact, spec_json_of
from codegen.tools.c_header import c_header
from codegen.tools.descriptor import KernelFacts, LaunchRecord, facts_of, launch_record
from codegen.tools.sized_launch import SizedLaunch, sized_launch
from codegen.wording import one_line

RECORD = "kernel.json"
"""The file that identifies an exported kernel."""
MOST_NAMED = 8  # most folders in a message
MOST_OF_CUBIN = 64 << 20
"""Most bytes per file; the largest of the project's has a third of a MiB."""


class FileRecord(SpecModel):
    """A file of the folder."""

    file: str
    sha256: Sha256


class KernelRecord(SpecModel):
    """Contents of ``kernel.json``."""

    schema_version: Literal[1] = 1
    made_by: str = Field(description="codegen and its version")
    kernel: KernelFacts
    launch: LaunchRecord | None = Field(description="launch of the given shape, if any")
    source: FileRecord
    cubin: FileRecord
    header: FileRecord
    receipt: FileRecord
    compiler_log: str
    seal: str = Field(description="SHA-256 of all other fields, as compact JSON with sorted keys")

    def sealed(self) -> KernelRecord:
        """A copy of the record with the seal of its fields."""
        return self.model_copy(update={"seal": _seal_of(self.model_dump(mode="json"))})


@dataclass(frozen=True)
class Export:
    """An exported kernel.

    Attributes:
        generated: the spec, its plan, and the exported source.
        cubin: the machine code.
        record: contents of ``kernel.json``.
        receipt: the receipt.
    """

    generated: Generated
    cubin: bytes
    record: KernelRecord
    receipt: Receipt


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def names_of(stem: str) -> dict[str, str]:
    """Names of the files of an exported kernel by kind, without ``kernel.json``."""
    return {"source": f"{stem}.cu", "cubin": f"{stem}.cubin", "header": f"{stem}.h", "receipt": f"{stem}.json"}


def check_exportable(named: NamedSpec) -> None:
    """Reject a kernel whose receipt would have the name of the record.

    Raises:
        SpecError: for that name.
    """
    if RECORD in names_of(named.stem).values():
        raise SpecError("", f"{named.stem} names a kernel whose receipt would be {RECORD}: rename its file")


def files_of(
    generated: Generated, cubin: bytes, log: str, receipt: Receipt, sized: SizedLaunch | None = None
) -> dict[str, bytes]:
    """Files of an exported kernel, deterministic for the same inputs.

    Args:
        generated: the spec, its plan and its source.
        cubin: the compiled binary.
        log: output of the compiler.
        receipt: receipt of that cubin.
        sized: launch of a problem of known shape, or None.
    """
    facts = facts_of(generated.plan)
    launch = None if sized is None else launch_record(sized)
    names = names_of(facts.symbol)
    data = {
        "source": generated.source.encode(),
        "cubin": cubin,
        "header": c_header(facts, launch).encode(),
        "receipt": receipt.text.encode(),
    }
    told: dict[str, Any] = {
        what: FileRecord(file=names[what], sha256=hashlib.sha256(data[what]).hexdigest()) for what in data
    }
    record = KernelRecord(
        made_by=f"codegen {__version__}", kernel=facts, launch=launch, **told, compiler_log=log, seal=""
    ).sealed()
    text = record.model_dump_json(indent=2) + "\n"
    return {**{names[what]: each for what, each in data.items()}, RECORD: text.encode()}


def _seal_of(fields: Mapping[str, Any]) -> str:
    """SHA-256 of a record's fields without its seal."""
    sealed = {name: value for name, value in fields.items() if name != "seal"}
    return _sha256(json.dumps(sealed, sort_keys=True, separators=(",", ":")).encode())


def exported_names(folder: Path, symbol: str) -> tuple[str, ...]:
    """Files of a folder that are unchanged since the export of a kernel; empty if its record was changed.

    The export may be of another version: only seal and hashes of the record are read.

    Args:
        folder: the folder.
        symbol: the kernel's name.
    """
    try:
        record = json_value(read_text(folder / RECORD))
        if not isinstance(record, dict) or record.get("seal") != _seal_of(record):
            return ()
        hashes = {each.get("file"): str(each.get("sha256")) for each in record.values() if isinstance(each, dict)}
        names = [name for name in names_of(symbol).values() if name in hashes]
        return (RECORD, *(name for name in names if has_hash(folder / name, hashes[name], MOST_OF_CUBIN)))
    except (
        CodegenError,
        TypeError,
        ValueError,
    ):  # such as a "file" that is a list, or a huge integer
        return ()


def read_export(folder: Path) -> Export:
    """Read an exported kernel, and check that it is unchanged and that this version can launch it.

    Raises:
        ExportError: names the file, its state and a remedy.
        FileError: for a file that cannot be read.
    """
    record = _record(folder)
    names = names_of(record.kernel.symbol)
    data = {what: _checked(folder, names[what], getattr(record, what)) for what in names}
    receipt = _receipt(folder / names["receipt"], data["receipt"])
    source = _text(folder / names["source"], data["source"])
    generated = _generated(folder, record, source, receipt.spec.file)
    _check_receipt(folder / names["receipt"], receipt, record)
    _check_launch(folder, record, generated)
    if data["header"] != c_header(record.kernel, record.launch).encode():
        raise ExportError(folder / names["header"], f"is not the header of {RECORD}; {_another(record)}")
    return Export(generated, data["cubin"], record, receipt)


def _record(folder: Path) -> KernelRecord:
    path = folder / RECORD
    try:
        text = read_text(path)
    except MissingFileError:
        raise ExportError(folder, f"is not an exported kernel: it has no {RECORD}{_inside(folder)}") from None
    try:
        record = json_model(KernelRecord, text)
        check_name(record.kernel.symbol)  # file names contain it
        fits = record.sealed().seal == record.seal
    except (CodegenError, ValueError, RecursionError) as error:  # for example an integer too large to print
        raise ExportError(path, f"{error}; export the kernel again") from None
    if not fits:
        raise ExportError(path, "was changed after the export: its seal does not match; export the kernel again")
    return record


def _inside(folder: Path) -> str:
    """Exported kernels in a folder, as the end of a message; "" if there are none."""
    try:
        found = sorted(each.name for each in folder.iterdir() if is_file(each / RECORD))
    except OSError:
        return ""
    named = ", ".join(map(one_line, found[:MOST_NAMED]))
    return f"; it has exported kernels: {named}: name one of these folders" if found else ""


def _checked(folder: Path, name: str, told: FileRecord) -> bytes:
    """Contents of a file of an export, after checks of its name and hash."""
    path = folder / name
    if told.file != name:
        raise ExportError(folder / RECORD, f"names the file {one_line(told.file)}, expected {name}")
    data = read_bytes(path, MOST_OF_CUBIN)
    found = _sha256(data)
    if found != told.sha256:
        reason = f"is not the exported file: its SHA-256 is {found}, expected {told.sha256} ({RECORD})"
        raise ExportError(path, f"{reason}; export the kernel again")
    return data


def _receipt(path: Path, data: bytes) -> Receipt:
    try:
        return json_model(Receipt, data)
    except CodegenError as error:
        raise ExportError(path, f"{error}; export the kernel again") from None


def _check_receipt(path: Path, receipt: Receipt, record: KernelRecord) -> None:
    """Reject a receipt of other files: the seal only proves that the folder is unchanged.

    Raises:
        ExportError: for such a receipt.
    """
    kernel, cubin = record.kernel, receipt.cubin
    for what, found, expected in (
        ("spec.hash", receipt.spec.hash, kernel.spec_hash),
        ("source.sha256", receipt.source.sha256, record.source.sha256),
        ("cubin.sha256", cubin.sha256, record.cubin.sha256),
        ("cubin.launch_sha256", cubin.launch_sha256, kernel.launch_sha256),
        ("cubin.arch", cubin.arch, kernel.arch),
        ("cubin.dynamic_shared_bytes", cubin.dynamic_shared_bytes, kernel.dynamic_shared_bytes),
    ):
        if found != expected:
            reason = f"is the receipt of something else: {what} is {one_line(str(found))}, expected {expected}"
            raise ExportError(path, f"{reason}; export the kernel again")


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExportError(
            path, f"is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); export the kernel again"
        ) from None


def _generated(folder: Path, record: KernelRecord, source: str, origin: str) -> Generated:
    """The spec as generated by this version, with the exported source; their code must be the same."""
    try:
        own = generate(NamedSpec(stem=record.kernel.symbol, spec=parse_spec(record.kernel.spec), origin=origin))
    except CodegenError as error:
        raise ExportError(folder, f"{_another(record)}: {error}") from None
    if facts_of(own.plan).model_dump_json() != record.kernel.model_dump_json():  # == treats true as 1
        raise ExportError(folder, f"{_another(record)}, which launches this kernel differently")
    if not _same_but_for_names(own.source, source):
        raise ExportError(folder, f"{_another(record)}, which renders this spec differently")
    return replace(own, source=source)


def _check_launch(folder: Path, record: KernelRecord, generated: Generated) -> None:
    """Reject a launch of a known shape that differs from this version's launch.

    Raises:
        ExportError: for such a launch.
    """
    if record.launch is None:
        return
    try:
        own = launch_record(sized_launch(generated.plan, record.launch.shape, record.launch.sm_count))
    except CodegenError as error:
        raise ExportError(folder / RECORD, f"launch: {error}; export the kernel again") from None
    if own.model_dump_json() != record.launch.model_dump_json():
        raise ExportError(folder, f"{_another(record)}, which launches a problem of this shape differently")


def _another(record: KernelRecord) -> str:
    made_by = one_line(record.made_by)
    return f"export it again, or load it with the version that exported it ({made_by}); this is codegen {__version__}"


def _same_but_for_names(own: str, source: str) -> bool:
    """Whether a source equals this version's, except for file names in its banner, and has an intact seal.

    The banner ends where this version's banner ends; everything after it is code.
    """
    lines = own.partition("\n\n")[0].count("\n") + 1
    (*own_banner, own_code), (*banner, code) = own.split("\n", lines), source.split("\n", lines)
    if len(banner) != lines or code != own_code or not seal_is_intact(source):
        return False
    comments = all(line.startswith("// ") and line.isascii() and line.isprintable() for line in banner)
    return comments and spec_json_of("\n".join(banner)) == spec_json_of("\n".join(own_banner))
