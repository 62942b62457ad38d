"""Receipt and source of a kernel; without a valid receipt, the nearest shipped kernel and its differences."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from codegen.errors import MOST_OF_MESSAGE
from codegen.files import holds
from codegen.library import GENERATED, IN_SOURCE_TREE, NamedSpec, shipped_specs
from codegen.receipts import (
    MissingReceipt,
    Receipt,
    ReceiptError,
    ReceiptState,
    ReceiptStatus,
    judged,
    read_receipt,
    receipt_path,
)
from codegen.render import render
from codegen.select.problem import TUNING_FIELDS
from codegen.spec import Spec
from codegen.wording import one_line

KEPT = 1024
"""Most specs whose flat fields are cached: the same number as sources."""
NONE = "none"
"""Stands for a field that a spec does not have."""


@dataclass(frozen=True)
class Vouched:
    """A receipt and its state for the current source of a kernel.

    Attributes:
        file: path of the receipt.
        state: state of the receipt, with an explanation.
        receipt: contents; None if the receipt cannot be read or does not exist.
    """

    file: str
    state: ReceiptState
    receipt: Receipt | None = None

    @property
    def holds(self) -> bool:
        """Whether a GPU passed all cases with the current source."""
        return self.state.standing is ReceiptStatus.OK

    def __str__(self) -> str:
        """The file and the state of the receipt."""
        told = f"{self.file}: {self.state.explanation}"
        if not self.holds or self.receipt is None:
            return told
        return f"{told}; of this source, compiled by {one_line(self.receipt.cubin.compiler_package)}"

    def facts(self) -> dict[str, Any]:
        """The same, as JSON data."""
        told: dict[str, Any] = {
            "file": self.file,
            "standing": self.state.standing.value,
            "says": self.state.explanation,
            "of_this_source": self.holds,
        }
        if self.receipt is not None:
            told["compiler"] = self.receipt.cubin.compiler_package
            if found := self.receipt.verification:
                told |= {"device": found.device, "driver": found.driver, "target": found.target}
                told["cases"] = len(found.cases)
        return told


Finder = Callable[[NamedSpec], Vouched | None]
"""Function that finds the receipt of a kernel, or returns None."""


class Difference(NamedTuple):
    """A field in which two specs differ, with values as JSON.

    Attributes:
        field: dotted name.
        ours: value in the first spec.
        theirs: value in the second spec.
    """

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        """The field with both values."""
        return f"{self.field}: {self.ours} vs {self.theirs}"


@dataclass(frozen=True)
class Sibling:
    """The shipped kernel with the fewest differing fields from another kernel.

    Attributes:
        named: its spec.
        differences: differing fields, the other kernel's first; () if only the name differs.
        vouched: its receipt, or None.
    """

    named: NamedSpec
    differences: tuple[Difference, ...]
    vouched: Vouched | None

    def __str__(self) -> str:
        """Its name and the differing fields."""
        has = "" if self.is_verified else " (which has no valid receipt either)"
        what = ", ".join(map(str, self.differences)) or "its name"
        return f"{self.named.stem}{has}, which differs in {what}"

    @property
    def is_verified(self) -> bool:
        """Whether it has a valid receipt for the current source."""
        return self.vouched is not None and self.vouched.holds


@dataclass(frozen=True)
class Provenance:
    """Receipt and source of a kernel.

    Attributes:
        kernel: name of the kernel.
        vouched: its receipt, valid or not; None if there is none.
        sibling: the nearest shipped kernel if the receipt is not valid; else None.
        source: path of its source, or the command that prints it.
        caveat: limits of the receipt with the installed compiler; "" if there are none.
    """

    kernel: str
    vouched: Vouched | None
    sibling: Sibling | None
    source: str
    caveat: str = ""

    @property
    def is_verified(self) -> bool:
        """Whether it has a valid receipt for the current source."""
        return self.vouched is not None and self.vouched.holds

    @property
    def receipt(self) -> str:
        """State of its receipt, or the nearest shipped kernel, in words."""
        if self.is_verified:
            return f"{self.vouched}; {self.caveat}" if self.caveat else str(self.vouched)
        why = "no receipt" if self.vouched is None else f"no receipt of this source ({self.vouched})"
        return one_line(why if self.sibling is None else f"{why}: a sibling of {self.sibling}", MOST_OF_MESSAGE)

    def lines(self) -> list[str]:
        """One line on the receipt and one on the source."""
        return [f"receipt: {self.receipt}", f"source: {self.source}"]

    def facts(self) -> dict[str, Any]:
        """The same, as JSON data."""
        sibling = None
        if self.sibling is not None:
            sibling = {
                "kernel": self.sibling.named.stem,
                "differences": [difference._asdict() for difference in self.sibling.differences],
                "verified": self.sibling.is_verified,
            }
        receipt = None if self.vouched is None else self.vouched.facts()
        told: dict[str, Any] = {"verified": self.is_verified, "receipt": receipt, "sibling": sibling}
        return told | {"source": self.source, "caveat": self.caveat}


def packaged(named: NamedSpec) -> Vouched | None:
    """Receipt of a kernel in the package; None if the kernel is not shipped or has none."""
    if not named.is_shipped:
        return None
    place = _shown(named, ".json")
    try:
        receipt = read_receipt(named, receipt_path(named, GENERATED))
    except MissingReceipt:
        return None
    except ReceiptError as error:
        return Vouched(place, ReceiptState(ReceiptStatus.UNREADABLE, str(error)))
    return Vouched(place, judged(named, receipt, render(named)), receipt)


def provenance_of(named: NamedSpec, own: Finder | None = None) -> Provenance:
    """Receipt and source of a kernel.

    Args:
        named: spec of the kernel.
        own: finds receipts outside of the package.

    Raises:
        SpecError: for a spec without a plan.
    """
    found = vouched(named, own)
    sibling = None if found is not None and found.holds else nearest_shipped(named)
    return Provenance(named.stem, found, sibling, source_of(named))


def vouched(named: NamedSpec, own: Finder | None = None) -> Vouched | None:
    """Receipt of a kernel: that of the package or, if it is not valid, a valid one; else the first found.

    Args:
        named: spec of the kernel.
        own: finds receipts outside of the package.
    """
    shipped = packaged(named)
    if own is None or (shipped is not None and shipped.holds):
        return shipped
    found = own(named)
    return found if found is not None and (shipped is None or found.holds) else shipped


def source_of(named: NamedSpec) -> str:
    """Path of a kernel's source, or the command that prints it."""
    printed = f"codegen render {named.argument} --out -"
    if not named.is_shipped or not holds(GENERATED / named.subfolder / f"{named.main.stem}.cu", render(named.main)):
        return printed
    place = _shown(named, ".cu")
    return place if named.twin_of is None else f"{place}, with the words of its type replaced ({printed})"


def nearest_shipped(named: NamedSpec) -> Sibling | None:
    """The shipped kernel of the same architecture whose spec has the fewest differing fields.

    Of several, the one that computes the most similar result; None if no kernel of the operator is shipped.
    """
    spec = named.spec
    others = [
        (differences(spec, other.spec), other)
        for other in shipped_specs()
        if (other.spec.op, other.spec.arch) == (spec.op, spec.arch) and other.stem != named.stem
    ]
    if not others:
        return None
    found, other = min(others, key=lambda each: (len(each[0]), sum(map(_is_semantic, each[0])), each[1].stem))
    return Sibling(other, found, packaged(other))


def differences(ours: Spec, theirs: Spec) -> tuple[Difference, ...]:
    """Fields in which two specs differ, sorted by dotted name."""
    first, second = _flat(ours.canonical_json()), _flat(theirs.canonical_json())
    names = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    return tuple(Difference(name, first.get(name, NONE), second.get(name, NONE)) for name in names)


def _is_semantic(difference: Difference) -> bool:
    return difference.field.partition(".")[0] not in TUNING_FIELDS


@lru_cache(maxsize=KEPT)
def _flat(canonical: str) -> dict[str, str]:
    """Fields of a spec by dotted name, with values as JSON."""
    found: dict[str, str] = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for inner in value:
                add(value[inner], f"{name}.{inner}" if name else inner)
        elif value is not None:
            found[name] = value if isinstance(value, str) else json.dumps(value)

    add(json.loads(canonical), "")
    return found


def _shown(named: NamedSpec, suffix: str) -> str:
    """Path of a shipped kernel's file: relative to the project in a source tree, else inside the package."""
    inside = named.subfolder / f"{named.main.stem}{suffix}"
    return ("generated" / inside).as_posix() if IN_SOURCE_TREE else one_line(str(GENERATED / inside))
