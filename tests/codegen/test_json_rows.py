"""JSON records: the same data, a row on each line."""

from __future__ import annotations

import json

import pytest

from codegen.json_rows import json_rows
from codegen.library import ROOT


def test_each_row_has_a_line_and_the_data_stay() -> None:
    document = {
        "device": "one",
        "empty": {},
        "versions": {"torch": "2", "options": ["a", "b"]},
        "verification": {"cases": [{"name": "plain", "error": 1e-7}, {"name": "odd", "inner": {"x": [1, 2]}}]},
        "rows": [{"name": "\u00e9\n", "results": {"ours": {"tflops": 1.5}}}],
        "none": [],
    }
    text = json_rows(document)
    assert json.loads(text) == document
    assert '\n      {"name": "plain", "error": 1e-07},\n      {"name": "odd"' in text
    assert '\n    "options": ["a", "b"]\n' in text and '\n    {"name": "\\u00e9\\n", "results"' in text
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_rows({"rows": [{"error": float("nan")}]})


def test_committed_records_are_in_this_form() -> None:
    files = [*(ROOT / "generated").rglob("*.json"), *(ROOT / "benchmarks" / "results").glob("*.json")]
    other = [path.name for path in files if json_rows(json.loads(path.read_text()), ("twins",)) != path.read_text()]
    assert len(files) > 250 and not other
