"""Exported kernels: a folder with source, cubin, header, receipt, and ``kernel.json``, which describes and seals them.

docs/export.md is their page.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from codegen import __version__
from codegen.c_header import c_header
from codegen.descriptor import KernelFacts, LaunchRecord, facts_of, launch_record
from codegen.errors import CodegenError, ExportError, MissingFileError, SpecError
from codegen.files import is_file, read_bytes, read_text
from codegen.library import NamedSpec
from codegen.parse import parse_spec
from codegen.patterns.base import SpecModel
from codegen.receipts import Receipt, Sha256
from codegen.render import Generated, generate
from codegen.sized_launch import SizedLaunch
from codegen.wording import one_line

RECORD = "kernel.json"
"""The file by which an exported kernel is known."""
MOST_NAMED = 8  # folders, in a message
MOST_OF_CUBIN = 64 << 20
"""Bytes: the largest of the project's own has a third of a MiB."""


class FileRecord(SpecModel):
    """A file of the folder."""

    file: str
    sha256: Sha256


class KernelRecord(SpecModel):
    """What ``kernel.json`` holds."""

    schema_version: Literal[1] = 1
    made_by: str = Field(description="codegen and its version")
    kernel: KernelFacts
    launch: LaunchRecord | None = Field(description="of the shape that was named, if one was")
    source: FileRecord
    cubin: FileRecord
    header: FileRecord
    receipt: FileRecord
    compiler_log: str
    seal: str = Field(description="SHA-256 of all others, as compact JSON with sorted keys")

    def sealed(self) -> KernelRecord:
        """Return the record with the seal that it should have."""
        text = json.dumps(self.model_dump(mode="json", exclude={"seal"}), sort_keys=True, separators=(",", ":"))
        return self.model_copy(update={"seal": _sha256(text.encode())})


@dataclass(frozen=True)
class Export:
    """An exported kernel that was read.

    Attributes:
        generated: the spec, its plan, and the source as exported.
        cubin: the machine code.
        record: what ``kernel.json`` says.
        receipt: the receipt.
    """

    generated: Generated
    cubin: bytes
    record: KernelRecord
    receipt: Receipt


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def names_of(stem: str) -> dict[str, str]:
    """Return the files of the folder of a kernel, by what they are; ``kernel.json`` is beside them."""
    return {"source": f"{stem}.cu", "cubin": f"{stem}.cubin", "header": f"{stem}.h", "receipt": f"{stem}.json"}


def check_exportable(named: NamedSpec) -> None:
    """Refuse a kernel whose receipt would have the name of the record.

    Raises:
        SpecError: for that name.
    """
    if RECORD in names_of(named.stem).values():
        raise SpecError("", f"{named.stem} names a kernel whose receipt would be {RECORD}: name its file otherwise")


def files_of(
    generated: Generated, cubin: bytes, log: str, receipt: Receipt, sized: SizedLaunch | None = None
) -> dict[str, bytes]:
    """Return the files of an exported kernel: always the same bytes for the same facts.

    Args:
        generated: the spec, its plan and its source.
        cubin: what was compiled of it.
        log: what the compiler said.
        receipt: of that cubin.
        sized: the launch of a problem of known shape, if one is to be told.
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


def read_export(folder: Path) -> Export:
    """Read an exported kernel, and check that it is what was exported and what this version launches.

    Raises:
        ExportError: naming the file, what it was and what helps.
        FileError: for a file that cannot be read.
    """
    record = _record(folder)
    names = names_of(record.kernel.symbol)
    data = {what: _checked(folder, names[what], getattr(record, what)) for what in names}
    receipt = Receipt.read(folder / names["receipt"])
    generated = _generated(folder, record, data["source"].decode(), receipt.spec.file)
    return Export(generated, data["cubin"], record, receipt)


def _record(folder: Path) -> KernelRecord:
    path = folder / RECORD
    try:
        record = KernelRecord.model_validate_json(read_text(path))
    except MissingFileError:
        raise ExportError(folder, f"is no exported kernel, it has no {RECORD}{_inside(folder)}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = one_line(".".join(str(part) for part in first["loc"]))
        raise ExportError(path, f"{field + ': ' if field else ''}{first['msg']}; export the kernel again") from None
    if record.sealed().seal != record.seal:
        raise ExportError(path, "was changed after it was exported: its seal does not fit; export the kernel again")
    return record


def _inside(folder: Path) -> str:
    """Return which exported kernels a folder has in it, in words."""
    try:
        found = sorted(each.name for each in folder.iterdir() if is_file(each / RECORD))
    except OSError:
        return ""
    named = ", ".join(map(one_line, found[:MOST_NAMED]))
    return f"; exported kernels in it: {named}: name one of these folders" if found else ""


def _checked(folder: Path, name: str, told: FileRecord) -> bytes:
    """Return what a file holds that has the name and the hash that it should have."""
    path = folder / name
    if told.file != name:
        raise ExportError(folder / RECORD, f"names the file {one_line(told.file)}, where {name} is expected")
    data = read_bytes(path, MOST_OF_CUBIN)
    found = _sha256(data)
    if found != told.sha256:
        reason = f"is not the file that was exported: its SHA-256 is {found}, {RECORD} says {told.sha256}"
        raise ExportError(path, f"{reason}; export the kernel again")
    return data


def _generated(folder: Path, record: KernelRecord, source: str, origin: str) -> Generated:
    """Return what this version makes of the spec, with the source as it was exported; their code is the same."""
    try:
        own = generate(NamedSpec(stem=record.kernel.symbol, spec=parse_spec(record.kernel.spec), origin=origin))
    except CodegenError as error:
        raise ExportError(folder, f"{_another(record)}: {error}") from None
    if facts_of(own.plan) != record.kernel:
        raise ExportError(folder, f"{_another(record)}, which launches this kernel in another way")
    if _code(own.source) != _code(source):
        raise ExportError(folder, f"{_another(record)}, which makes another source of this spec")
    return Generated(own.named, own.plan, source)


def _another(record: KernelRecord) -> str:
    made_by = one_line(record.made_by)
    return f"export it again, or load it with what exported it ({made_by}); this is codegen {__version__}"


def _code(source: str) -> str:
    """Return a source without its banner, which names files."""
    return source.partition("\n\n")[2]
