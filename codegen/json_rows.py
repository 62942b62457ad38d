"""JSON for line-by-line comparison: one field, or one row of a table, per line."""

from __future__ import annotations

import json
from typing import Any

OPEN_DEPTH = 2  # nesting depth up to which objects are spread over lines


def json_rows(document: dict[str, Any] | list[Any], parts: tuple[str, ...] = ()) -> str:
    """JSON text of a document, with one field, or one object of a list, per line.

    Args:
        document: plain data, without NaN and infinity.
        parts: names of fields whose objects are formatted like documents.

    Raises:
        ValueError: for a number that JSON cannot represent.
    """
    return _text(document, 0, 0, parts) + "\n"


def _text(value: Any, depth: int, level: int, parts: tuple[str, ...]) -> str:
    """JSON text of a value; lines after the first are indented by two spaces per level."""
    inner, outer = "\n" + "  " * (level + 1), "\n" + "  " * level
    if isinstance(value, dict) and value and depth < OPEN_DEPTH:
        texts = (
            f"{json.dumps(str(key))}: {_text(field, -1 if key in parts else depth + 1, level + 1, parts)}"
            for key, field in value.items()
        )
        return "{" + inner + f",{inner}".join(texts) + outer + "}"
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value) and depth <= OPEN_DEPTH:
        return "[" + inner + f",{inner}".join(json.dumps(row, allow_nan=False) for row in value) + outer + "]"
    return json.dumps(value, allow_nan=False)
