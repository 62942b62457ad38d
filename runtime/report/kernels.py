"""What is known of a kernel without a GPU: its plan and source of today, its receipt, the record of its compilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from codegen.cli import place_of
from codegen.files import is_file, read_text
from codegen.library import ROOT, NamedSpec
from codegen.plain import json_value
from codegen.plan import Plan
from codegen.receipts import MissingReceipt, Receipt, ReceiptError, ReceiptState, source_sha256, state
from codegen.render import generate

KNOWN = Path("tests", "compile", "known.json")
"""What compilations showed, in a source tree: of shipped kernels and of others."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of the report.

    Attributes:
        named: its spec.
        plan: its plan.
        source: its source, as it is rendered today.
        receipt: its receipt; None if there is none, or it cannot be read.
        receipt_path: where that is.
        standing: what the receipt says about this source.
        record: what ``known.json`` says of a compilation of this source; None if it says nothing.
    """

    named: NamedSpec
    plan: Plan
    source: str
    receipt: Receipt | None
    receipt_path: Path
    standing: ReceiptState
    record: Mapping[str, Any] | None

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
        """The named values at the top of its source."""
        return {constant.name: constant.value for constant in self.plan.constants}

    @property
    def is_of_receipt(self) -> bool:
        """Whether the receipt is of this source."""
        return self.receipt is not None and self.receipt.source.sha256 == self.source_sha256


def page_of(stem: str) -> str:
    """Return the file of a kernel's page."""
    return f"kernel-{stem}.html"


def known_records(root: Path = ROOT) -> Mapping[str, Any]:
    """Return what compilations showed, by the names of kernels; nothing where the tree has no such file.

    Raises:
        CodegenError: for a file that cannot be read.
    """
    path = root / KNOWN
    found = json_value(read_text(path)) if is_file(path) else {}
    return found if isinstance(found, dict) else {}


def kernel_of(named: NamedSpec, known: Mapping[str, Any]) -> Kernel:
    """Gather what is known of a kernel.

    Raises:
        SpecError: for a spec that has no plan.
    """
    made = generate(named)
    path = place_of(named, ".json")
    folder = path.parents[len(named.subfolder.parts)]
    try:
        receipt = Receipt.read(path)
    except (MissingReceipt, ReceiptError):
        receipt = None
    record = known.get(named.stem)
    is_current = isinstance(record, dict) and record.get("source") == source_sha256(made.source)
    return Kernel(
        named, made.plan, made.source, receipt, path, state(named, made.source, folder), record if is_current else None
    )
