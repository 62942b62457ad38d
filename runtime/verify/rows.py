"""Rows of benchmarks: the kernel of each row, and the migration of rows to renamed kernels.

A row has the kernel's spec and the hashes of its source, its compiled code and its launch.
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
    """Fields of a row that identify its kernel; the hashes of a kernel that did not run are None."""
    compiled = _compiled(named) if ran else None
    return {
        "spec": json.loads(named.spec.canonical_json()),
        "source_sha256": source_sha256(render(named)) if ran else None,
        "code_sha256": hashlib.sha256(compiled.code).hexdigest() if compiled else None,
        "launch_sha256": compiled.plan.launch_sha256 if compiled else None,
    }


def _compiled(named: NamedSpec) -> Compiled:
    """Compile a kernel to PTX, which determines the cubin, or to a cubin if its PTX does not run on other devices."""
    return compile_spec(named, "ptx" if ARCHS[named.spec.arch].forward_compatible else "cubin")


@dataclass
class Outcome:
    """Outcome of migrating the rows of a file.

    Attributes:
        text: new content of the file.
        current: number of up-to-date rows.
        carried: names of migrated rows.
        left: names of unchanged outdated rows, by reason.
    """

    text: str
    current: int = 0
    carried: list[str] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def write(self, path: Path) -> bool:
        """Write the file and return whether it changed."""
        return write_if_changed(path, self.text)


def carried_over(path: Path) -> Outcome:
    """Migrate the rows of a report (``.json``) or of a file with one row per line (``.jsonl``).

    A row is migrated if its spec, with renamed fields, still compiles to the measured code. Other rows stay unchanged,
    and tables mark them.

    Raises:
        ReceiptError: if the file cannot be read or is not JSON, or a field of a row is missing or has another type,
            with row and field.
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
    """Migrate one row, or record why not.

    Args:
        node: the object with the row's hashes, which is modified.
        row: fields of the row.
        outcome: outcome to which the row's name is added.
    """
    try:
        kernels = _kernels(row)
        if any(_is_current(row, named) for named in kernels):
            outcome.current += 1
            return
        reason = _rebind(node, row, kernels)
    except CodegenError as error:
        reason = f"its spec is no longer valid: {error}"
    if reason:
        outcome.left[reason].append(row.title)
    else:
        outcome.carried.append(row.title)


def _kernels(row: KernelRow) -> list[NamedSpec]:
    """Current kernels that may be the row's: the shipped one with the row's name, and the one of its spec alone.

    Raises:
        CodegenError: if its spec, with current names, is not a valid complete spec.
    """
    fields, _ = migrated(row.spec)
    named = find_spec(parse_spec(fields))
    if canonical(fields) != named.spec.canonical_json():
        raise CodegenError("more than names have changed")
    shipped = [find_spec(row.name)] if row.name in shipped_names() else []
    return [*(each for each in shipped if each.spec == named.spec), named]


def _is_current(row: KernelRow, named: NamedSpec) -> bool:
    return (
        row.launch_sha256 is not None
        and canonical(row.spec) == named.spec.canonical_json()
        and row.source_sha256 == source_sha256(render(named))
    )


def _rebind(node: Fields, row: KernelRow, kernels: list[NamedSpec]) -> str:
    """Bind a row to the current source of its kernel, or return the reason why that is impossible."""
    present = toolchain.compiler_version()[1]
    if row.versions.compiler != present:
        compiler = one_line(row.versions.compiler) or "an unnamed compiler"
        return f"measured with {compiler}, but the compiler is {present}"
    for named in kernels:
        # The name of a kernel without a file derives from its spec, with the field names of its time.
        older = NamedSpec(_stem_of(row, named), named.spec) if named.path is None else named
        compiled = _compiled(older)
        if not _is_code_of(row, compiled):
            continue
        if older.stem != named.stem:
            renamed = compiled.code.replace(older.stem.encode(), named.stem.encode())
            if renamed != _compiled(named).code:
                return "its kernel's name derives from the spec, and the name changes the compiled code"
        fields = kernel_fields(named)
        items = [(key, fields.pop(key, value)) for key, value in node.items()]
        node.clear()
        for key, value in items:
            node[key] = value
            if key == "code_sha256":
                node.update(fields)  # the launch of an older row
        return ""
    return "its machine code or its launch has changed"


def _stem_of(row: KernelRow, named: NamedSpec) -> str:
    """Name of a row's kernel at the time, which ends in the hash of the spec."""
    digest = hashlib.sha256(canonical(row.spec).encode()).hexdigest()
    return named.stem.removesuffix(named.spec.hash[:8]) + digest[:8]


def _is_code_of(row: KernelRow, compiled: Compiled) -> bool:
    """Whether a row was measured with this code and the current launch."""
    if row.launch_sha256 is None:  # an older row: one hash of both
        return row.code_sha256 == version1.code_sha256(compiled.code, compiled.plan)
    measured = row.code_sha256, row.launch_sha256
    return measured == (hashlib.sha256(compiled.code).hexdigest(), compiled.plan.launch_sha256)
