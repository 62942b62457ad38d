"""Data of a kernel in reports, without a GPU: current plan and source, receipt, record of its compilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from codegen.errors import CodegenError
from codegen.files import is_file, read_text
from codegen.library import ROOT, NamedSpec
from codegen.places import place_of
from codegen.plain import first_reason, json_value
from codegen.plan import Plan
from codegen.prune import without_comments
from codegen.receipts import Count, Receipt, ReceiptError, ReceiptState, Sha256, read_receipt, source_sha256, state
from codegen.render import generate
from codegen.wording import one_line

KNOWN = Path("tests", "records", "kernels.json")
"""Records of compilations in a source tree, of shipped and other kernels."""


class Record(BaseModel):
    """A record of a compilation in ``kernels.json``."""

    model_config = ConfigDict(frozen=True, strict=True)

    code: Sha256 = Field(description="of the source without comments, which the machine code depends on")
    compiler_package: str
    cubin: Sha256
    registers: Count
    spill_bytes: Count
    stack_bytes: Count
    static_shared_bytes: Count
    dynamic_shared_bytes: Count
    instructions: dict[str, Count]


@dataclass(frozen=True)
class Kernel:
    """One kernel of the report.

    Attributes:
        named: its spec.
        plan: its plan.
        source: its source, rendered by the current generator.
        overview: paragraphs of the source on roles, barriers and the pipeline.
        receipt: its receipt; None if there is none, or it cannot be read.
        receipt_path: path of the receipt.
        standing: state of the receipt for this source.
        record: record in ``kernels.json`` of a compilation of this source; None without one.
    """

    named: NamedSpec
    plan: Plan
    source: str
    overview: tuple[str, ...]
    receipt: Receipt | None
    receipt_path: Path
    standing: ReceiptState
    record: Record | None

    @property
    def stem(self) -> str:
        """Its name."""
        return self.named.stem

    @property
    def page(self) -> str:
        """The file of its page."""
        return page_of(self.stem)

    @cached_property
    def source_sha256(self) -> str:
        """The hash of its source."""
        return source_sha256(self.source)

    @property
    def constants(self) -> dict[str, int | float | bool]:
        """The named constants at the top of its source."""
        return {constant.name: constant.value for constant in self.plan.constants}

    @property
    def is_of_receipt(self) -> bool:
        """Whether the receipt is of this source."""
        return self.receipt is not None and self.receipt.source.sha256 == self.source_sha256


def page_of(stem: str) -> str:
    """The file of a kernel's page."""
    return f"kernel-{stem}.html"


def known_records(root: Path = ROOT) -> Mapping[str, Any]:
    """Records of compilations by kernel; {} if the tree has no such file.

    Raises:
        CodegenError: for a file that cannot be read.
    """
    path = root / KNOWN
    try:
        found = json_value(read_text(path)) if is_file(path) else {}
    except CodegenError as error:
        raise CodegenError(f"{KNOWN.as_posix()}: {one_line(str(error))}") from None
    if not isinstance(found, dict):
        raise CodegenError(f"{KNOWN.as_posix()}: is not an object of records")
    return found


def kernel_of(named: NamedSpec, known: Mapping[str, Any]) -> Kernel:
    """Collect the data of a kernel.

    Raises:
        SpecError: for a spec without a plan.
        CodegenError: for an invalid record.
    """
    made = generate(named)
    path = place_of(named, ".json")
    folder = path.parents[len(named.subfolder.parts)]
    try:
        receipt = read_receipt(named, path)
    except ReceiptError:
        receipt = None
    record = _record(named.stem, known)
    if record is not None and record.code != source_sha256(without_comments(made.source)):
        record = None
    standing = state(named, made.source, folder)
    return Kernel(named, made.plan, made.source, made.overview, receipt, path, standing, record)


def _record(stem: str, known: Mapping[str, Any]) -> Record | None:
    if stem not in known:
        return None
    try:
        return Record.model_validate(known[stem])
    except ValidationError as error:
        raise CodegenError(f"{KNOWN.as_posix()}: {first_reason(error, stem)}") from None
