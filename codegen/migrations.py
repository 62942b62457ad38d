"""Former names of fields and values, for specs, receipts and rows that still have them.

``codegen migrate`` rewrites spec files with this table and carries receipts and rows over. A spec with an old name
raises an error that gives the new one. Each change is one line, in chronological order:

    Renamed("attention", "share_kv", "share_kv_loads"),
    Renamed("attention", "schedule", "schedule", {"ping_pong": "pingpong"}),

An old name or value must no longer be legal; otherwise its meaning would be ambiguous.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from codegen.errors import SpecError

LEFT_OUT: Final = object()
"""Marks a value that is now expressed by leaving the field out."""


@dataclass(frozen=True)
class Change:
    """The effect of one line of the table on one spec.

    Attributes:
        field: dotted name of the field in the spec.
        old: its value.
        name: current name of the field, without parent fields.
        new: current value, or LEFT_OUT.
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
        """Message for a spec with the old name or value."""
        if self.new is LEFT_OUT and not self._is_renamed:
            return "is no longer a field: leave it out"
        if self.new is LEFT_OUT:
            return f"is now {self.name}; leave it out for {spelt(self.old)}"
        if self.new is self.old:
            return f"is now named {self.name}"
        if self._is_renamed:
            return f"is {spelt(self.old)}, which is now {self.name}: {spelt(self.new)}"
        return f"is {spelt(self.old)}, which is now {spelt(self.new)}"


@dataclass(frozen=True)
class Renamed:
    """One line of the table: a renamed field, or renamed values of a field.

    Attributes:
        op: operator of the specs, by its name at the time.
        field: dotted name of the field.
        name: current name, without parent fields; equal to the last part of ``field`` if only values changed.
        values: new value, or LEFT_OUT, for each old value; empty if the values did not change. Two lines merge two
            booleans into one field with several values.
    """

    op: str
    field: str
    name: str
    values: Mapping[Any, Any] | None = None

    def change(self, spec: object) -> Change | None:
        """Change of a spec in plain data; None if the spec does not have the old name.

        Raises:
            SpecError: for a spec with both names of a field.
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
            reason = f"is now named {self.name}, which is given too: leave one of them out"
            raise SpecError(self.field, reason)
        return Change(self.field, old, self.name, new)


TABLE: tuple[Renamed, ...] = (
    # Always 2 if tiles gather block rows, and never otherwise.
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
    """A spec as plain data with the current names, in its own order, and the changes.

    Raises:
        SpecError: for a spec with both names of a field.
    """
    fields, changes = dict(spec), []
    for renamed in TABLE:
        if (change := renamed.change(fields)) is not None:
            changes.append(change)
            fields = applied(change, fields)
    return fields, changes


def applied(change: Change, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a spec after a change; the input is not modified."""
    return _applied(change, change.field.split("."), fields)


def _applied(change: Change, path: list[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    field, *inner = path
    if inner:
        return {**fields, field: _applied(change, inner, fields[field])}
    items = [(change.name, change.new) if key == field else (key, value) for key, value in fields.items()]
    return {key: value for key, value in items if value is not LEFT_OUT}


def outdated(spec: Mapping[str, Any], file: str = "") -> SpecError | None:
    """Error for a spec with an old name of the table, or None.

    Args:
        spec: the spec as plain data.
        file: argument of ``codegen migrate``, if the spec is in a file.
    """
    try:
        _, changes = migrated(spec)
    except SpecError as error:
        return error
    if not changes:
        return None
    first, *later = changes
    outer = first.field.rpartition(".")[0]
    for change in later:  # of the same field: skip intermediate names
        if change.field == (f"{outer}.{first.name}" if outer else first.name):
            first = replace(first, name=change.name, new=change.new)
    return SpecError(first.field, first.reason + (f"; run: codegen migrate {file}" if file else ""))


def spelt(value: object) -> str:
    """Value in the spelling of spec files."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
