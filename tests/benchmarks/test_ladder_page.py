"""The records of the ladders, and the lists that are written from them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

script = load_script("ladder_page")
RECORDS = {name: script.read(path) for name, path in script.RECORDS.items()}


def record(**changes: Any) -> dict[str, Any]:
    return {
        "step": "7",
        "title": "a change",
        "what": "A change, at length",
        "prediction": "3%",
        "measured": [{"row": "dense", "figures": "600 -> 620"}, {"row": "causal", "figures": "500 -> 490"}],
        "kept": True,
        "in_todays_kernels": True,
        **changes,
    }


def test_pages_are_those_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", RECORDS)
def test_steps_have_one_record_each_and_what_supersedes_them_is_one(name: str) -> None:
    steps = [record["step"] for record in RECORDS[name]]
    assert len(set(steps)) == len(steps)
    for record in RECORDS[name]:
        if isinstance(record["kept"], str):
            later, _, other = record["kept"].removeprefix(script.SUPERSEDED).partition(" ")
            of = RECORDS[other.strip("()")] if other else RECORDS[name]
            assert later in [other["step"] for other in of]
        if record["kept"] is True and not record["in_todays_kernels"]:
            assert "notes" in record  # what today's kernels have instead


@pytest.mark.parametrize("name", RECORDS)
def test_notes_that_records_name_are_there(name: str) -> None:
    for page, anchor in re.findall(r"(notes-[a-z]+\.md)#([\w-]+)", json.dumps(RECORDS[name])):
        headings = re.findall(r"^#+ (.*)$", (script.DOCS / "ladder" / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_field_is_documented() -> None:
    text = (script.DOCS / "ladder" / "README.md").read_text(encoding="utf-8")
    assert not [field for field in script.REQUIRED | script.OPTIONAL if f"| `{field}` |" not in text]
    assert not [field for field in script.OF_AN_ENTRY if f"`{field}`" not in text]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"measured": "slower"}, None),
        ({"kept": "superseded by 9", "in_todays_kernels": False}, None),
        ({"kept": "perhaps", "in_todays_kernels": False}, "kept is 'perhaps'"),
        ({"kept": False}, "in current kernels, but not kept"),
        ({"measured": [{"row": "dense"}]}, "measured is neither a text nor a list of figures"),
        ({"measured": [{"figures": "1", "median": 1}]}, "measured is neither a text nor a list of figures"),
        ({"color": "red"}, "unknown field color"),
    ],
)
def test_faults_of_a_record(changes: dict[str, Any], fault: str | None) -> None:
    assert script.faults(record(**changes)) == ([fault] if fault else [])


def test_a_record_that_is_not_as_documented_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    found = record()
    del found["what"]
    path.write_text(json.dumps(record()) + "\n" + json.dumps(found) + "\n")
    with pytest.raises(ValueError, match=r"records\.jsonl, step 7: no what"):
        script.read(path)


def test_lists() -> None:
    records = [
        record(step="1", gain="dense 600 -> 620", notes="Since 9 also causal."),
        record(step="2", where="dense"),
        record(step="3", kept="superseded by 9", in_todays_kernels=False),
        record(step="4", kept=False, in_todays_kernels=False, because="slower"),
        record(step="5", kept=False, in_todays_kernels=False, measured="slower"),
        record(step="6", prediction="2% (notes-bsr.md#few-rows)", gain="1%"),
    ]
    assert script.lists(records, "sm_89-") == {
        "sm_89-gained": "- **1**: a change. Expected: 3%. Gained: dense 600 -> 620. Since 9 also causal.\n"
        "- **6**: a change. Expected: 2% ([notes](ladder/notes-bsr.md#few-rows)). Gained: 1%.",
        "sm_89-kept": "- 2: a change. Kept: dense",
        "sm_89-replaced": "- 3: a change. Superseded by 9",
        "sm_89-not-kept": "- 4: a change: dense 600 -> 620\n- 5: a change",
    }


def test_a_list_without_a_step_needs_no_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- kept:begin -->\nold\n<!-- kept:end -->\nbelow\n")
    assert script.with_markers(page, {"kept": "new", "gained": ""}) == {"kept": "new"}
    assert script.with_markers(page, {"kept": ""}) == {"kept": ""}
    assert script.with_markers(page, {"gained": "- 1: a step"}) == {"gained": "- 1: a step"}
