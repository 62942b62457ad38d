"""JSON of records that people compare: one field, or one row of a table, on each line."""

from __future__ import annotations

import json
from typing import Any

OPEN_DEPTH = 2  # objects within objects that are spread over lines


def json_rows(document: dict[str, Any] | list[Any]) -> str:
    """JSON text of a document, with a field on each line and each object of a list on a line of its own.

    Args:
        document: plain data, without NaN and infinity.

    Raises:
        ValueError: for a number that JSON does not have.
    """
    return _text(document, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    """JSON text of a value, whose lines but the first are indented by two spaces for each depth."""
    inner, outer = "\n" + "  " * (depth + 1), "\n" + "  " * depth
    if isinstance(value, dict) and value and depth < OPEN_DEPTH:
        fields = (f"{json.dumps(str(key))}: {_text(field, depth + 1)}" for key, field in value.items())
        return "{" + inner + f",{inner}".join(fields) + outer + "}"
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value) and depth <= OPEN_DEPTH:
        return "[" + inner + f",{inner}".join(json.dumps(row, allow_nan=False) for row in value) + outer + "]"
    return json.dumps(value, allow_nan=False)
