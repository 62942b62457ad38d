"""Rows of benchmarks: which kernel each was measured with, and how they follow one whose names have changed.

A row has its spec, the hash of its source, and those of the code that was compiled from it and of the launch.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codegen.arch import ARCHS
from codegen.errors import MOST_OF_PLACE, CodegenError, FileError
from codegen.files import read_text, write_if_changed
from codegen.json_rows import json_rows
from codegen.library import NamedSpec, find_spec, shipped_names
from codegen.migrations import migrated
from codegen.parse import parse_spec
from codegen.plain import json_value
from codegen.receipts import ReceiptError, source_sha256
from codegen.render import render
from codegen.spec import canonical
from codegen.wording import one_line
from runtime.compile import toolchain
from runtime.compile.compiler import Compiled, compile_spec
from runtime.verify import version1

Row = dict[str, Any]


def kernel_fields(named: NamedSpec, ran: bool = True) -> Row:
    """Return what a row says of its kernel; of one that did not run, the spec."""
    compiled = _compiled(named) if ran else None
    return {
        "spec": json.loads(named.spec.canonical_json()),
        "source_sha256": source_sha256(render(named)) if ran else None,
        "code_sha256": hashlib.sha256(compiled.code).hexdigest() if compiled else None,
        "launch_sha256": compiled.plan.launch_sha256 if compiled else None,
    }


def _compiled(named: NamedSpec) -> Compiled:
    """Return a kernel's code: the PTX, from which a cubin follows, or the cubin where PTX is not for other devices."""
    return compile_spec(named, "ptx" if ARCHS[named.spec.arch].forward_compatible else "cubin")


@dataclass
class Outcome:
    """What became of the rows of a file.

    Attributes:
        text: the file as it is to be.
        current: rows that say what is so today.
        carried: names of rows that were carried over.
        left: names of rows that were left as they are, by the reason.
    """

    text: str
    current: int = 0
    carried: list[str] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def write(self, path: Path) -> bool:
        """Write the file; return whether it changed."""
        return write_if_changed(path, self.text)


def carried_over(path: Path) -> Outcome:
    """Return the rows of a report (``.json``) or of a file with one on each line (``.jsonl``), carried over.

    A row is carried over if the code that was measured is compiled from today's source of its spec, whose fields may
    have been renamed. Others are left as they are: tables mark them.

    Raises:
        ReceiptError: for a file that cannot be read or is not JSON.
    """
    try:
        text = read_text(path)
        lines = path.suffix == ".jsonl"
        # What a killed run left of its last line is none.
        reports = [json_value(line) for line in text.split("\n")[:-1] if line] if lines else [json_value(text)]
    except CodegenError as error:
        reason = error.reason if isinstance(error, FileError) else error
        raise ReceiptError(f"{one_line(str(path), MOST_OF_PLACE)}: is no file of rows: {reason}") from None
    outcome = Outcome(text)
    for report in reports:
        for row, compiler in _rows(report):
            _carry(row, compiler, outcome)
    if outcome.carried:
        rest = text[text.rfind("\n") + 1 :] if lines else ""
        outcome.text = "".join(f"{json.dumps(each)}\n" if lines else json_rows(each) for each in reports) + rest
    return outcome


def _rows(node: Any, compiler: str | None = None) -> Iterator[tuple[Row, str | None]]:
    """Yield each row that ran with the compiler's package, which the row or the report around it names."""
    if isinstance(node, list):
        for part in node:
            yield from _rows(part, compiler)
    elif isinstance(node, dict):
        versions = node.get("versions")
        compiler = versions.get("compiler") if isinstance(versions, Mapping) else compiler
        if isinstance(node.get("spec"), Mapping) and node.get("source_sha256") and node.get("code_sha256"):
            yield node, compiler
        else:
            for part in node.values():
                yield from _rows(part, compiler)


def _carry(row: Row, compiler: str | None, outcome: Outcome) -> None:
    """Carry one row over, or say why not."""
    try:
        kernels = _kernels(row)
        if any(_is_current(row, named) for named in kernels):
            outcome.current += 1
            return
        reason = _rebind(row, kernels, compiler)
    except CodegenError as error:
        reason = f"its spec is none of today: {error}"
    name = str(row.get("name"))
    if reason:
        outcome.left[reason].append(name)
    else:
        outcome.carried.append(name)


def _kernels(row: Row) -> list[NamedSpec]:
    """Return what the kernel of a row may be today: by its spec alone, or a shipped one whose name the row has.

    Raises:
        CodegenError: if its spec, with the names of today, is not a whole one of today.
    """
    fields, _ = migrated(row["spec"])
    named = find_spec(parse_spec(fields))
    if canonical(fields) != named.spec.canonical_json():
        raise CodegenError("more than names has changed")
    shipped = [find_spec(row["name"])] if row.get("name") in shipped_names() else []
    return [*(each for each in shipped if each.spec == named.spec), named]


def _is_current(row: Row, named: NamedSpec) -> bool:
    return (
        "launch_sha256" in row
        and canonical(row["spec"]) == named.spec.canonical_json()
        and row["source_sha256"] == source_sha256(render(named))
    )


def _rebind(row: Row, kernels: list[NamedSpec], compiler: str | None) -> str:
    """Bind a row to today's source of its kernel, or return why it cannot be."""
    present = toolchain.compiler_version()[1]
    if compiler != present:
        return f"measured with {one_line(str(compiler))}, and this is {present}"
    for named in kernels:
        # The name of a kernel that has no file is made of its spec, by whichever names that had.
        older = NamedSpec(_stem_of(row, named), named.spec) if named.path is None else named
        compiled = _compiled(older)
        if not _is_code_of(row, compiled):
            continue
        if older.stem != named.stem:
            renamed = compiled.code.replace(older.stem.encode(), named.stem.encode())
            if renamed != _compiled(named).code:
                return "its kernel's name is made of the spec, and the compiler makes other code under another name"
        fields = kernel_fields(named)
        items = [(key, fields.pop(key, value)) for key, value in row.items()]
        row.clear()
        for key, value in items:
            row[key] = value
            if key == "code_sha256":
                row.update(fields)  # of an older row, the launch
        return ""
    return "its machine code or its launch is another today"


def _stem_of(row: Row, named: NamedSpec) -> str:
    """Return the name that the kernel of a row had: it ends in the hash of the spec."""
    digest = hashlib.sha256(canonical(row["spec"]).encode()).hexdigest()
    return named.stem.removesuffix(named.spec.hash[:8]) + digest[:8]


def _is_code_of(row: Row, compiled: Compiled) -> bool:
    """Return whether a row was measured with this code, launched as today."""
    if "launch_sha256" not in row:  # an older one: both in one hash
        return bool(row["code_sha256"] == version1.code_sha256(compiled.code, compiled.plan))
    told = row["code_sha256"], row["launch_sha256"]
    return told == (hashlib.sha256(compiled.code).hexdigest(), compiled.plan.launch_sha256)
