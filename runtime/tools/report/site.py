"""The files of the site, reproducible for a tree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import jinja2
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from codegen.errors import CodegenError
from codegen.files import is_file, read_text
from codegen.folders import check_folder, has_hash, write_folder
from codegen.indexing import row_of
from codegen.library import spec_text
from codegen.plain import json_value
from codegen.receipts import Sha256, VerificationRecord
from codegen.tools.explain import explained
from codegen.tools.outline import functions
from runtime.compile.inspection import INSTRUCTIONS
from runtime.tools.report import memory, patterns, pipeline
from runtime.tools.report.chain import links
from runtime.tools.report.changes import PARTS, Changes
from runtime.tools.report.highlight import anchor_of, cuda_html, yaml_html
from runtime.tools.report.kernels import Kernel
from runtime.tools.report.measurements import Found, Row, current, rows_of
from runtime.tools.report.resources import Resources, resources_of
from runtime.tools.report.roofline import roofline
from runtime.tools.report.tree import Tree

PAGES = Path(__file__).parent / "pages"
MARK = "report.json"
"""The file that identifies a report, with the names and hashes of all other files."""
SECTIONS = {
    "spec": "Spec",
    "plan": "Plan",
    "pipeline": "Pipeline",
    "memory": "Shared memory",
    "pattern": "Sparsity pattern",
    "resources": "Resources",
    "instructions": "Machine code",
    "verification": "Verification",
    "measurements": "Measurements",
    "roofline": "Roofline",
    "hashes": "Hashes",
    "source": "Source",
}
CHOICES = (("operator", "Operator"), ("arch", "Architecture"), ("dtype", "Type"), ("receipt", "Receipt"))


@cache
def environment() -> jinja2.Environment:
    """The template environment of the pages: everything is escaped, and undefined names are errors."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    found.filters["name"] = _breakable
    return found


def _printable(value: Any) -> Any:
    """A value for a page, with unprintable characters as escapes."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in value)


def _breakable(name: str) -> Markup:
    """The name of a kernel with line-break opportunities after underscores."""
    return Markup("_<wbr>").join(name.split("_"))


@dataclass(frozen=True)
class View:
    """A kernel with its measurements and resources.

    Attributes:
        kernel: the kernel.
        rows: its measurements.
        resources: resources of its cubin, if known.
        missing: the reason why resources are unknown.
    """

    kernel: Kernel
    rows: tuple[Row, ...]
    resources: Resources | None
    missing: str


def view_of(kernel: Kernel, found: Found) -> View:
    """The view of a kernel; ``found`` has the rows of all measurements."""
    return View(kernel, tuple(rows_of(kernel, found)), *resources_of(kernel))


def kernel_page(view: View, tree: Tree, neighbors: tuple[Kernel | None, Kernel | None]) -> str:
    """The page of a kernel.

    Args:
        view: the kernel and its data.
        tree: tree of the report.
        neighbors: the kernels before and after it in the index.
    """
    kernel, rows = view.kernel, view.rows
    named = kernel.named
    text = named.spec.canonical_json() if named.path is None else spec_text(named.path)
    return (
        environment()
        .get_template("kernel.html.j2")
        .render(
            tree=tree,
            kernel=kernel,
            before=neighbors[0],
            after=neighbors[1],
            listing=row_of(named, kernel.standing),
            sections=list(SECTIONS.items()),
            titles=SECTIONS,
            spec_text=yaml_html(text),
            plan=explained(kernel.plan),
            pipeline=pipeline.picture(kernel.plan),
            overview=kernel.overview,
            memory=memory.picture(kernel.plan),
            pattern=patterns.example(kernel.plan),
            resources=view.resources,
            resources_missing=view.missing,
            opcodes=INSTRUCTIONS,
            verification=kernel.receipt.verification if kernel.receipt else None,
            workloads=_workloads(rows),
            outdated=any(not row.is_current for row in rows),
            roofline=roofline(kernel.plan, rows),
            links=links(kernel),
            functions=[(anchor_of(each), each.name, each.first) for each in functions(kernel.source)],
            line_numbers="\n".join(str(i + 1) for i in range(kernel.source.count("\n"))),
            source=cuda_html(kernel.source),
        )
    )


def _workloads(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows grouped by workload; rows of a group differ only in the data set."""
    found = []
    for (file, name, shape, device, unit), group in groupby(
        rows, lambda r: (r.file, r.name, r.shape, r.device, r.unit)
    ):
        of_workload = list(group)
        most = max((call.single or 0.0 for row in of_workload for call in row.calls), default=0.0)
        has_data = any(row.data for row in of_workload)
        told = {"file": file, "name": name, "shape": shape, "device": device, "unit": unit, "most": most or 1.0}
        found.append({**told, "has_data": has_data, "rows": of_workload})
    return found


def entry_of(view: View) -> dict[str, Any]:
    """The fields of a kernel in the index."""
    kernel, resources, rows = view.kernel, view.resources, current(view.rows)
    speeds = [row.ours.single for row in rows if row.ours and row.ours.single and row.unit == "TFLOPS"]
    ratios = [ratio for row in rows if (ratio := row.ratio("single")) is not None]
    verification = kernel.receipt.verification if kernel.receipt and kernel.is_of_receipt else None
    listing = row_of(kernel.named, kernel.standing)
    return {
        "stem": kernel.stem,
        "page": kernel.page,
        "operator": listing["operator"],
        "arch": listing["arch"],
        "dtype": listing["type"],
        "what": ", ".join(dict.fromkeys((listing["operator"], listing["what"], listing["type"]))),
        "receipt": listing["receipt"],
        "error": _share_of_limit(verification) if verification else None,
        "tflops": max(speeds, default=None),
        "ratio": min(ratios, default=None),
        "older": any(not row.is_current for row in rows),
        "registers": resources.registers if resources else None,
        "shared": kernel.plan.shared_bytes,
    }


def _share_of_limit(verification: VerificationRecord) -> float | None:
    """The largest error relative to its limit over all cases, because gradients and products have errors of different
    size.

    None if a case did not pass: its error may be missing, and its limit 0.
    """
    if verification.failed:
        return None
    return max(case.max_error / case.tolerance if case.max_error else 0.0 for case in verification.cases)


def index_page(entries: Sequence[dict[str, Any]], tree: Tree, changes: Changes | None) -> str:
    """The index page."""
    choices = [(name, title, sorted({entry[name] for entry in entries})) for name, title in CHOICES]
    script = Markup((PAGES / "report.js").read_text(encoding="utf-8"))
    template = environment().get_template("index.html.j2")
    return template.render(tree=tree, entries=entries, choices=choices, changes=changes, script=script)


def changes_page(changes: Changes, tree: Tree, kernels: Iterable[Kernel]) -> str:
    """The page of the differences between two commits."""
    pages = {kernel.stem: kernel.page for kernel in kernels}
    return environment().get_template("changes.html.j2").render(tree=tree, changes=changes, pages=pages, parts=PARTS)


def with_mark(pages: dict[str, str]) -> dict[str, bytes]:
    """The files of a report, including the style sheet and the mark."""
    files = {name: text.encode() for name, text in pages.items()}
    files["report.css"] = (PAGES / "report.css").read_bytes()
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    mark = {"schema_version": 1, "made_by": "codegen report", "files": hashes}
    return {**files, MARK: (json.dumps(mark, indent=2) + "\n").encode()}


class _Mark(BaseModel):
    """The mark of a report: the names and hashes of its files."""

    model_config = ConfigDict(strict=True, extra="forbid")

    schema_version: Literal[1]
    made_by: Literal["codegen report"]
    files: dict[Annotated[str, Field(pattern=r"^(index\.html|changes\.html|report\.css|kernel-\w+\.html)$")], Sha256]


def check_place(out: Path) -> Collection[str]:
    """Refuse a folder that holds anything but an unchanged report; return the names of its files.

    Raises:
        FileError: for any other content.
    """
    check_folder(out, MARK, _names_of_mark, "report")
    return _names_of_mark(out)


def write(out: Path, files: dict[str, bytes]) -> bool:
    """Write a report atomically; return whether anything changed.

    Raises:
        FileError: as ``check_place``, or if it cannot be written.
    """
    return write_folder(out, files, MARK, _names_of_mark, "report")


def _names_of_mark(folder: Path) -> tuple[str, ...]:
    """The mark of a folder and the files that it names, if they are unchanged; empty without a mark."""
    path = folder / MARK
    if not is_file(path):
        return ()
    try:
        mark = _Mark.model_validate(json_value(read_text(path)))
        return (MARK, *(name for name, sha256 in mark.files.items() if has_hash(folder / name, sha256)))
    except (CodegenError, ValidationError):
        return ()
