"""Rows of benchmarks: which kernel each was measured with, and how they follow one whose names have changed.

A row has its spec, the hash of its source, and those of the code that was compiled from it and of the launch.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codegen.arch import ARCHS
from codegen.errors import CodegenError
from codegen.files import read_text, write_if_changed
from codegen.json_rows import json_rows
from codegen.library import NamedSpec, find_spec, shipped_names
from codegen.migrations import migrated
from codegen.parse import parse_spec
from codegen.receipts import ReceiptError, source_sha256
from codegen.render import render
from codegen.spec import canonical
from codegen.wording import one_line
from runtime.compile import toolchain
from runtime.compile.compiler import Compiled, compile_spec
from runtime.result_rows import KernelRow, documents, rows_in
from runtime.verify import version1

Fields = dict[str, Any]


def kernel_fields(named: NamedSpec, ran: bool = True) -> Fields:
    """The fields of a row that name its kernel; the hashes of one that did not run are None."""
    compiled = _compiled(named) if ran else None
    return {
        "spec": json.loads(named.spec.canonical_json()),
        "source_sha256": source_sha256(render(named)) if ran else None,
        "code_sha256": hashlib.sha256(compiled.code).hexdigest() if compiled else None,
        "launch_sha256": compiled.plan.launch_sha256 if compiled else None,
    }


def _compiled(named: NamedSpec) -> Compiled:
    """Compile a kernel to PTX, from which a cubin follows, or to a cubin where PTX is not for other devices."""
    return compile_spec(named, "ptx" if ARCHS[named.spec.arch].forward_compatible else "cubin")


@dataclass
class Outcome:
    """What became of the rows of a file.

    Attributes:
        text: the file as it is to be.
        current: number of rows that are up to date.
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
    """Carry over the rows of a report (``.json``) or of a file with one on each line (``.jsonl``).

    A row is carried over if the code that was measured is compiled from today's source of its spec, whose fields may
    have been renamed. Others are left as they are: tables mark them.

    Raises:
        ReceiptError: for a file that cannot be read or is not JSON; for a row with a field that is missing or not of
            its type, with row and field.
    """
    lines = path.suffix == ".jsonl"
    try:
        text = read_text(path)
        reports = documents(str(path), text, lines)
        every = [(found, found.kernel_row()) for place, report in reports for found in rows_in(place, report)]
    except CodegenError as error:
        raise ReceiptError(str(error)) from None
    outcome = Outcome(text)
    for found, row in every:
        if row is not None and row.source_sha256 is not None and row.code_sha256 is not None:
            _carry(found.kernel_node(), row, outcome)
    if outcome.carried:
        rest = text[text.rfind("\n") + 1 :] if lines else ""
        outcome.text = "".join(f"{json.dumps(each)}\n" if lines else json_rows(each) for _, each in reports) + rest
    return outcome


def _carry(node: Fields, row: KernelRow, outcome: Outcome) -> None:
    """Carry one row over, or say why not.

    Args:
        node: the object with the row's hashes, which is changed.
        row: its fields.
        outcome: gets the row's name.
    """
    try:
        kernels = _kernels(row)
        if any(_is_current(row, named) for named in kernels):
            outcome.current += 1
            return
        reason = _rebind(node, row, kernels)
    except CodegenError as error:
        reason = f"its spec is none of today: {error}"
    if reason:
        outcome.left[reason].append(row.title)
    else:
        outcome.carried.append(row.title)


def _kernels(row: KernelRow) -> list[NamedSpec]:
    """The kernels of today that may be a row's: a shipped one whose name the row has, and that of its spec alone.

    Raises:
        CodegenError: if its spec, with the names of today, is not a whole one of today.
    """
    fields, _ = migrated(row.spec)
    named = find_spec(parse_spec(fields))
    if canonical(fields) != named.spec.canonical_json():
        raise CodegenError("more than names has changed")
    shipped = [find_spec(row.name)] if row.name in shipped_names() else []
    return [*(each for each in shipped if each.spec == named.spec), named]


def _is_current(row: KernelRow, named: NamedSpec) -> bool:
    return (
        row.launch_sha256 is not None
        and canonical(row.spec) == named.spec.canonical_json()
        and row.source_sha256 == source_sha256(render(named))
    )


def _rebind(node: Fields, row: KernelRow, kernels: list[NamedSpec]) -> str:
    """Bind a row to today's source of its kernel, or return the reason that forbids it."""
    present = toolchain.compiler_version()[1]
    if row.versions.compiler != present:
        compiler = one_line(row.versions.compiler) or "a compiler that is not named"
        return f"measured with {compiler}, and this is {present}"
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
        items = [(key, fields.pop(key, value)) for key, value in node.items()]
        node.clear()
        for key, value in items:
            node[key] = value
            if key == "code_sha256":
                node.update(fields)  # of an older row, the launch
        return ""
    return "its machine code or its launch is another today"


def _stem_of(row: KernelRow, named: NamedSpec) -> str:
    """The name that the kernel of a row had: it ends in the hash of the spec."""
    digest = hashlib.sha256(canonical(row.spec).encode()).hexdigest()
    return named.stem.removesuffix(named.spec.hash[:8]) + digest[:8]


def _is_code_of(row: KernelRow, compiled: Compiled) -> bool:
    """Whether a row was measured with this code, launched as today."""
    if row.launch_sha256 is None:  # an older one: both in one hash
        return row.code_sha256 == version1.code_sha256(compiled.code, compiled.plan)
    measured = row.code_sha256, row.launch_sha256
    return measured == (hashlib.sha256(compiled.code).hexdigest(), compiled.plan.launch_sha256)
