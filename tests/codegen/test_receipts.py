"""Receipts: stable files that say what they vouch for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codegen.library import NamedSpec
from codegen.receipts import Receipt, ReceiptError, ReceiptStatus, receipt_path, source_sha256, state
from codegen.render import render

Make = Callable[[NamedSpec, str], Receipt]


@pytest.fixture
def data(receipt: Make, named: NamedSpec) -> dict[str, Any]:
    return json.loads(receipt(named, render(named)).model_dump_json())


def written(folder: Path, named: NamedSpec, data: dict[str, Any]) -> Path:
    path = receipt_path(named, folder)
    path.write_text(json.dumps(data))
    return path


def test_writes_the_same_bytes_for_the_same_facts(receipt: Make, named: NamedSpec, tmp_path: Path) -> None:
    path = tmp_path / "new" / "kernel.json"
    assert receipt(named, "source").write(path)
    first = path.read_bytes()
    before = path.stat()
    assert not receipt(named, "source").write(path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino
    assert first.endswith(b"}\n")
    assert first.startswith(b'{\n  "schema_version": 2,\n  "spec": {\n')
    assert Receipt.read(path) == receipt(named, "source")
    assert [p.name for p in path.parent.iterdir()] == ["kernel.json"]


def test_instructions_are_sorted(data: dict[str, Any]) -> None:
    data["cubin"]["instructions"] = {"UTMALDG": 1, "HGMMA": 2, "LDL": 0}
    assert list(Receipt.model_validate_json(json.dumps(data)).cubin.instructions) == ["HGMMA", "LDL", "UTMALDG"]


def test_errors_that_are_no_numbers_survive(data: dict[str, Any], tmp_path: Path) -> None:
    data["verification"]["worst_error"] = "NaN"
    data["verification"]["cases"][0]["max_error"] = "Infinity"
    path = tmp_path / "x.json"
    Receipt.model_validate_json(json.dumps(data)).write(path)
    json.loads(path.read_text(), parse_constant=lambda token: pytest.fail(f"{token} is not JSON"))
    again = Receipt.read(path).verification
    assert again is not None
    assert math.isnan(again.worst_error)
    assert again.cases[0].max_error == math.inf


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 3}, "schema_version"),
        ({"author": "me"}, "author: Extra inputs are not permitted"),
        ({"spec": {"file": "specs/x.yaml", "hash": "abc"}}, "spec.hash"),
        ({"measurement": [{"shape": "x"}]}, "measurement.0.milliseconds"),
    ],
)
def test_not_a_receipt(data: dict[str, Any], tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(data | change))
    with pytest.raises(ReceiptError, match=rf"^x\.json: {says}"):
        Receipt.read(path)


def test_a_verification_has_cases(data: dict[str, Any]) -> None:
    data["verification"]["cases"] = []
    with pytest.raises(ValueError, match="at least 1 item"):
        Receipt.model_validate_json(json.dumps(data))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff"])
def test_unreadable(named: NamedSpec, tmp_path: Path, text: bytes) -> None:
    receipt_path(named, tmp_path).write_bytes(text)
    found = state(named, "source", tmp_path)
    assert found.standing is ReceiptStatus.UNREADABLE
    assert found.explanation.startswith(f"{named.stem}.json: ")


def test_a_folder_in_its_place_is_unreadable(named: NamedSpec, tmp_path: Path) -> None:
    receipt_path(named, tmp_path).mkdir()
    assert state(named, "source", tmp_path).standing is ReceiptStatus.UNREADABLE


def test_missing(named: NamedSpec, tmp_path: Path) -> None:
    assert state(named, "source", tmp_path).standing is ReceiptStatus.MISSING


def test_ok(named: NamedSpec, data: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, named, data)
    found = state(named, render(named), tmp_path)
    assert found.standing is ReceiptStatus.OK
    assert found.explanation == f"{len(data['verification']['cases'])} cases on a device, worst error 0.0005"


def test_changed_source_is_stale(named: NamedSpec, data: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, named, data)
    found = state(named, render(named) + "\n", tmp_path)
    assert found.standing is ReceiptStatus.STALE
    assert "source changed" in found.explanation


@pytest.mark.parametrize("comment", ["", "// another\n"])
def test_version_1_is_stale(named: NamedSpec, data: dict[str, Any], tmp_path: Path, comment: str) -> None:
    written(tmp_path, named, data | {"schema_version": 1})
    found = state(named, render(named) + comment, tmp_path)
    assert found.standing is ReceiptStatus.STALE and found.explanation.endswith(
        "it has version 1, whose launch hash includes names"
    )
    assert ("source changed" in found.explanation) is bool(comment)


def test_changed_spec_is_stale(named: NamedSpec, data: dict[str, Any], tmp_path: Path) -> None:
    data["spec"]["hash"] = "0" * 64
    written(tmp_path, named, data)
    found = state(named, render(named), tmp_path)
    assert found.standing is ReceiptStatus.STALE
    assert "spec changed" in found.explanation


def test_unverified(named: NamedSpec, data: dict[str, Any], tmp_path: Path) -> None:
    data["verification"] = None
    written(tmp_path, named, data)
    assert state(named, render(named), tmp_path).standing is ReceiptStatus.UNVERIFIED


def test_failed_names_the_cases(named: NamedSpec, data: dict[str, Any], tmp_path: Path) -> None:
    cases = data["verification"]["cases"]
    cases.append({**cases[0], "name": "tail", "passed": False})
    written(tmp_path, named, data)
    found = state(named, render(named), tmp_path)
    assert found.standing is ReceiptStatus.FAILED
    assert found.explanation == f"1 of {len(cases)} cases failed: tail"


def test_stale_outweighs_failed(named: NamedSpec, data: dict[str, Any], tmp_path: Path) -> None:
    data["verification"]["cases"][0]["passed"] = False
    written(tmp_path, named, data)
    assert state(named, "another source", tmp_path).standing is ReceiptStatus.STALE


def test_hash_is_over_the_bytes() -> None:
    assert source_sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
