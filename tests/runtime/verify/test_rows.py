"""Rows of benchmarks and the code that they were measured with; nothing is compiled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from codegen import migrations
from codegen.library import NamedSpec, find_spec
from codegen.migrations import Renamed
from codegen.planning import plan_for
from codegen.receipts import ReceiptError, source_sha256
from codegen.render import render
from codegen.spec import canonical
from runtime.verify import rows, version1

PACKAGE = "nvidia-cuda-nvrtc 13.0.88"
Row = dict[str, Any]


@pytest.fixture(autouse=True)
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Each kernel and target that was compiled: to its name, which is in the code of any kernel."""
    asked: list[tuple[str, str]] = []

    def compile_spec(named: NamedSpec, target: str) -> SimpleNamespace:
        asked.append((named.stem, target))
        return SimpleNamespace(code=b"code of " + named.stem.encode(), plan=plan_for(named))

    monkeypatch.setattr(rows, "compile_spec", compile_spec)
    monkeypatch.setattr(rows.toolchain, "compiler_version", lambda: ("NVRTC 13.0", PACKAGE))
    return asked


@pytest.fixture
def carried(tmp_path: Path) -> Callable[..., tuple[rows.Outcome, list[Row]]]:
    """Writes a report of the rows that it is given, and returns what becomes of them."""

    def carry(*found: Row, compiler: str = PACKAGE) -> tuple[rows.Outcome, list[Row]]:
        path = tmp_path / "report.json"
        path.write_text(json.dumps({"versions": {"compiler": compiler}, "rows": found}))
        outcome = rows.carried_over(path)
        return outcome, json.loads(outcome.text)["rows"]

    return carry


def row_of(named: NamedSpec, **more: Any) -> Row:
    return {"name": "a row", **rows.kernel_fields(named), "results": {"ours": 1}, **more}


def older(named: NamedSpec) -> Row:
    """Return a row as it was before launches had a hash of their own, of another source."""
    row = row_of(named, source_sha256="0" * 64)
    row["code_sha256"] = version1.code_sha256(b"code of " + named.stem.encode(), plan_for(named))
    del row["launch_sha256"]
    return row


@pytest.fixture
def unnamed(named: NamedSpec) -> NamedSpec:
    """A spec that came from no file, as those of most rows."""
    return find_spec(named.spec)


def test_a_row_names_spec_source_code_and_launch(named: NamedSpec, compilations: list[tuple[str, str]]) -> None:
    found = rows.kernel_fields(named)
    assert found["spec"]["op"] == "attention" and found["source_sha256"] == source_sha256(render(named))
    assert found["code_sha256"] == hashlib.sha256(b"code of h100_topk32").hexdigest()
    assert found["launch_sha256"] == plan_for(named).launch_sha256
    failed = rows.kernel_fields(named, ran=False)
    assert failed == {"spec": found["spec"], **dict.fromkeys(["source_sha256", "code_sha256", "launch_sha256"])}
    rows.kernel_fields(find_spec("l4_dense"))
    assert compilations == [("h100_topk32", "cubin"), ("l4_dense", "ptx")]


def test_an_older_row_gets_the_hash_of_its_launch(unnamed: NamedSpec, carried: Any) -> None:
    row = older(unnamed)
    outcome, (found,) = carried(row)
    assert outcome.carried == ["a row"] and not outcome.left and outcome.current == 0
    assert found == row_of(unnamed)
    assert list(found) == list(row_of(unnamed))
    again, (same,) = carried(found)
    assert (again.carried, again.current, same) == ([], 1, found)


def test_what_is_up_to_date_is_not_compiled(
    unnamed: NamedSpec, carried: Any, compilations: list[tuple[str, str]]
) -> None:
    row = row_of(unnamed)
    compilations.clear()
    outcome, (found,) = carried(row)
    assert (outcome.current, found, compilations) == (1, row, [])


def test_the_kernel_of_a_row_may_be_a_shipped_one(named: NamedSpec, carried: Any) -> None:
    outcome, (found,) = carried(older(named) | {"name": named.stem})
    assert outcome.carried == [named.stem] and found["source_sha256"] == source_sha256(render(named))
    outcome, _ = carried(older(named))  # which the row does not tell: it was compiled under another name
    assert list(outcome.left) == ["its machine code or its launch has changed"]


@pytest.mark.parametrize("change", [{"code_sha256": "0" * 64}, {"launch_sha256": "0" * 64}])
def test_another_code_or_launch_stays(unnamed: NamedSpec, carried: Any, change: Row) -> None:
    row = row_of(unnamed, source_sha256="0" * 64, **change)
    outcome, found = carried(row, older(unnamed) | {"code_sha256": "0" * 64})
    assert outcome.left == {"its machine code or its launch has changed": ["a row", "a row"]}
    assert found[0] == row and outcome.carried == []


def test_another_compiler_proves_nothing(unnamed: NamedSpec, carried: Any) -> None:
    outcome, _ = carried(older(unnamed), compiler="nvidia-cuda-nvrtc 12.8.93")
    assert list(outcome.left) == [f"measured with nvidia-cuda-nvrtc 12.8.93, but the compiler is {PACKAGE}"]


def test_a_renamed_field_renames_the_kernel(
    unnamed: NamedSpec, carried: Any, monkeypatch: pytest.MonkeyPatch, compilations: list[tuple[str, str]]
) -> None:
    """The name of a kernel without a file ends in the hash of its spec, and is in its code."""
    monkeypatch.setattr(migrations, "TABLE", (Renamed("attention", "depth", "stages"),))
    spec = json.loads(unnamed.spec.canonical_json())
    spec["depth"] = spec.pop("stages")
    stem = unnamed.stem[:-8] + hashlib.sha256(canonical(spec).encode()).hexdigest()[:8]
    code = hashlib.sha256(b"code of " + stem.encode()).hexdigest()
    row = row_of(unnamed, spec=spec, source_sha256="0" * 64, code_sha256=code)
    outcome, (found,) = carried(row)
    assert outcome.carried == ["a row"] and found == row_of(unnamed)

    def compiled(named: NamedSpec, target: str) -> SimpleNamespace:
        odd = b"" if named.stem == stem else b", in another order"
        return SimpleNamespace(code=b"code of " + named.stem.encode() + odd, plan=plan_for(named))

    monkeypatch.setattr(rows, "compile_spec", compiled)
    outcome, (found,) = carried(row)
    assert found == row and "the name changes the compiled code" in next(iter(outcome.left))


def test_rows_whose_spec_is_gone_or_that_did_not_run_stay(unnamed: NamedSpec, carried: Any) -> None:
    spec = row_of(unnamed)["spec"]
    found = [
        row_of(unnamed, spec=spec | {"warps": 4}),
        row_of(unnamed, spec={name: value for name, value in spec.items() if name != "stages"}),
        row_of(unnamed) | rows.kernel_fields(unnamed, ran=False),
    ]
    outcome, after = carried(*found)
    assert after == found and outcome.current == 0
    assert [reason.partition(":")[0] for reason in outcome.left] == ["its spec is no longer valid"] * 2


def test_lines_of_cells(unnamed: NamedSpec, tmp_path: Path) -> None:
    cells = [older(unnamed) | {"versions": {"compiler": PACKAGE}}, {"no": "row"}]
    path = tmp_path / "cells.jsonl"
    path.write_text("".join(json.dumps(cell) + "\n" for cell in cells) + '{"cut of')
    outcome = rows.carried_over(path)
    assert outcome.write(path) and not rows.carried_over(path).write(path)
    first, second, last = path.read_text().split("\n")
    assert json.loads(first) == row_of(unnamed) | {"versions": {"compiler": PACKAGE}}
    assert (json.loads(second), last) == ({"no": "row"}, '{"cut of')


@pytest.mark.parametrize(
    ("text", "says"), [("{", "is not JSON"), (b"\xff".decode("latin-1"), "is not UTF-8"), (None, "No such file")]
)
def test_no_file_of_rows(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(ReceiptError, match=rf"report\.json: .*{says}"):
        rows.carried_over(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"code_sha256": None}, None),
        ({"source_sha256": "0" * 63}, r"source_sha256: is '0+'; String should match pattern"),
        ({"launch_sha256": 1}, r"launch_sha256: is 1; Input should be a valid string"),
        ({"versions": {"compiler": 13}}, r"versions.compiler: is 13; Input should be a valid string"),
        ({"name": ["a"]}, r"name: is \['a'\]; Input should be a valid string"),
        ({"name": ""}, r"name: is missing; expected a string"),
        ({"code_sha256": ...}, r"code_sha256: Field required"),
    ],
)
def test_a_row_with_a_wrong_field_is_refused(unnamed: NamedSpec, tmp_path: Path, change: Row, says: str | None) -> None:
    row = {name: value for name, value in (row_of(unnamed) | change).items() if value is not ...}
    path, lines = tmp_path / "report.json", tmp_path / "report.jsonl"
    path.write_text(json.dumps({"rows": [row_of(unnamed), row]}))
    lines.write_text(json.dumps(row_of(unnamed)) + "\n" + json.dumps(row) + "\n")
    for file, place in ((path, r"report\.json: rows\.1"), (lines, r"report\.jsonl:2")):
        if says is None:
            assert rows.carried_over(file).current == 1
        else:
            with pytest.raises(ReceiptError, match=rf"{place}( \(a row\))?: {says}"):
                rows.carried_over(file)
