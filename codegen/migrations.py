"""Former names of fields and values, for specs, receipts and rows that still have them.

``codegen migrate`` rewrites spec files by this table and carries receipts and rows over; a spec with an old name gets
an error that has the new one. Each change is one line, in the order in which they were made:

    Renamed("attention", "share_kv", "share_kv_loads"),
    Renamed("attention", "schedule", "schedule", {"ping_pong": "pingpong"}),

An old name or value must not be legal any more, or else nobody could tell which one is meant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from codegen.errors import SpecError

LEFT_OUT: Final = object()
"""The new value of a field that says nothing now where it had a certain value."""


@dataclass(frozen=True)
class Change:
    """What one line of the table does to one spec.

    Attributes:
        field: dotted name of the field, as the spec has it.
        old: its value.
        name: what the field is called now, without the fields that it is in.
        new: the value it has now, or LEFT_OUT.
    """

    field: str
    old: Any
    name: str
    new: Any

    @property
    def _is_renamed(self) -> bool:
        return self.field.rpartition(".")[2] != self.name

    def __str__(self) -> str:
        """The change in words, as in "share_kv -> share_kv_loads"."""
        if self.new is LEFT_OUT:
            return f"{self.field}: {spelt(self.old)} -> left out"
        if self.new is self.old:
            return f"{self.field} -> {self.name}"
        return f"{self.field}: {spelt(self.old)} -> {f'{self.name}: ' if self._is_renamed else ''}{spelt(self.new)}"

    @property
    def reason(self) -> str:
        """What to tell somebody whose spec has the old name or value."""
        if self.new is LEFT_OUT and not self._is_renamed:
            return "is not a field any more: leave it out"
        if self.new is LEFT_OUT:
            return f"is {self.name} now, which is left out for {spelt(self.old)}"
        if self.new is self.old:
            return f"is called {self.name} now"
        if self._is_renamed:
            return f"is {spelt(self.old)}, which is {self.name}: {spelt(self.new)} now"
        return f"is {spelt(self.old)}, which is called {spelt(self.new)} now"


@dataclass(frozen=True)
class Renamed:
    """One line of the table: a field that has another name, or values that have.

    Attributes:
        op: the operator whose specs have it, as it was called at the time.
        field: dotted name of the field.
        name: what it is called now, without the fields that it is in; the same where only values changed.
        values: of each old value the new one, or LEFT_OUT. A field whose values have not changed has none of them;
            two booleans become one field with several values by two lines.
    """

    op: str
    field: str
    name: str
    values: Mapping[Any, Any] | None = None

    def change(self, spec: object) -> Change | None:
        """The change of a spec in plain data; None if the spec does not have the old name.

        Raises:
            SpecError: for a spec that has a field by both names.
        """
        op = spec.get("op") if isinstance(spec, Mapping) else None
        if not isinstance(op, str) or op != self.op:
            return None
        *outer, field = self.field.split(".")
        inner: Any = spec
        for part in outer:
            inner = inner.get(part) if isinstance(inner, Mapping) else None
        if not isinstance(inner, Mapping) or field not in inner:
            return None
        old = new = inner[field]
        if self.values is not None:
            found = [to for value, to in self.values.items() if (type(value), value) == (type(old), old)]
            if not found:
                return None
            (new,) = found
        if field != self.name and self.name in inner and new is not LEFT_OUT:
            reason = f"is called {self.name} now, and that is given too: leave one of them out"
            raise SpecError(self.field, reason)
        return Change(self.field, old, self.name, new)


TABLE: tuple[Renamed, ...] = (
    # Always 2 where tiles gather block rows, and nowhere else.
    Renamed("bsr_spmm", "cluster", "cluster", {1: LEFT_OUT, 2: LEFT_OUT}),
    Renamed("attention", "query_order", "query_grouping", {True: "given", False: LEFT_OUT}),
    Renamed("attention", "order_queries", "query_grouping", {True: "search", False: LEFT_OUT}),
    Renamed("attention", "share_kv", "share_kv_loads"),
    Renamed("attention", "split_tail", "stream_k_tail"),
    Renamed("attention", "key_parts", "kv_splits"),
    Renamed("attention", "packed_heads", "pack_gqa"),
    Renamed("attention", "paced", "l2_lockstep"),
    Renamed("bsr_spmm", "blocks_per_sm", "ctas_per_sm"),
    Renamed("bsr_sddmm", "blocks_per_sm", "ctas_per_sm"),
    Renamed("bsr_spmm", "balanced", "scheduler", {True: "dynamic", False: LEFT_OUT}),
    Renamed("bsr_spgemm", "balanced", "scheduler", {True: "dynamic", False: LEFT_OUT}),
    Renamed("quantise", "op", "op", {"quantise": "quantize"}),
)


def migrated(spec: Mapping[str, Any]) -> tuple[dict[str, Any], list[Change]]:
    """A spec as plain data with today's names, in its own order, and the changes.

    Raises:
        SpecError: for a spec that has a field by its old name and by its new one.
    """
    fields, changes = dict(spec), []
    for renamed in TABLE:
        if (change := renamed.change(fields)) is not None:
            changes.append(change)
            fields = applied(change, fields)
    return fields, changes


def applied(change: Change, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec after a change; those that were given stay as they are."""
    return _applied(change, change.field.split("."), fields)


def _applied(change: Change, path: list[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    field, *inner = path
    if inner:
        return {**fields, field: _applied(change, inner, fields[field])}
    items = [(change.name, change.new) if key == field else (key, value) for key, value in fields.items()]
    return {key: value for key, value in items if value is not LEFT_OUT}


def outdated(spec: Mapping[str, Any], file: str = "") -> SpecError | None:
    """Return the error of a spec that has a name of the table, or None if it has none.

    Args:
        spec: as plain data.
        file: what ``codegen migrate`` is to be given, if the spec is in a file.
    """
    try:
        _, changes = migrated(spec)
    except SpecError as error:
        return error
    if not changes:
        return None
    first, *later = changes
    outer = first.field.rpartition(".")[0]
    for change in later:  # of the same field: what it was called in between is of no use
        if change.field == (f"{outer}.{first.name}" if outer else first.name):
            first = replace(first, name=change.name, new=change.new)
    return SpecError(first.field, first.reason + (f"; run: codegen migrate {file}" if file else ""))


def spelt(value: object) -> str:
    """Return a value as a spec file has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
