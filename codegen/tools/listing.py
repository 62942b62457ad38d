"""The shipped specs, a row each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from codegen.library import NamedSpec
from codegen.operators import operator_of
from codegen.receipts import ReceiptState, ReceiptStatus
from codegen.score import Score
from codegen.spec import Epilogue, Spec

WIDE = 120
"""Columns that all of a table fits into; in fewer, what follows the name is one column."""
BY_DEFAULT = ("stream_k_tail", "warp_rows")  # options that follow from other fields, unless a spec says otherwise
_COLORS = {ReceiptStatus.OK: "green", ReceiptStatus.FAILED: "red", ReceiptStatus.UNREADABLE: "red"}


def row_of(named: NamedSpec, found: ReceiptState) -> dict[str, Any]:
    """The fields of a kernel in a listing."""
    spec = named.spec
    return {
        "spec": named.stem,
        "operator": spec.op,
        "arch": spec.arch,
        "type": spec.dtype,
        "what": what(spec),
        "tile": " x ".join(map(str, spec.tile.model_dump().values())),
        "how": f"{spec.mma}, {spec.copy_}, {spec.schedule}",
        "receipt": found.standing.value,
        "receipt_says": found.explanation,
        "fields": json.loads(spec.canonical_json()),
    }


def table_of(rows: Sequence[dict[str, Any]], width: int) -> Table:
    """Return the rows as a table of at most ``width`` columns, with every name whole."""
    table = Table(box=None, pad_edge=False, header_style="cyan")
    details = ("operator", "arch", "type", "what", "tile", "how")
    table.add_column("spec", no_wrap=True)  # a name can be copied
    for title in details if width >= WIDE else ("what",):
        table.add_column(title)
    table.add_column("receipt", no_wrap=True)
    for row in rows:
        told = [row[name] for name in details]
        if width < WIDE:
            told = [", ".join(told)]
        color = _COLORS.get(ReceiptStatus(row["receipt"]), "yellow")
        table.add_row(row["spec"], *told, f"[{color}]{row['receipt']}[/]")
    return table


def what(spec: Spec) -> str:
    """The computation of a kernel and its options, in words."""
    told = [operator_of(spec).title(spec)]
    for name in spec.options:
        value = getattr(spec, name)
        if value == type(spec).model_fields[name].default or name in BY_DEFAULT:
            continue
        if isinstance(value, tuple):
            value = " ".join(value)
        if isinstance(value, Epilogue):
            value = " ".join(["bias"] * value.bias + [value.activation] * (value.activation != "none"))
        told.append(value.stem() if isinstance(value, Score) else name if value is True else f"{name} {value}")
    return ", ".join(told)
