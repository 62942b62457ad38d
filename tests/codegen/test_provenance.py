"""What vouches for a kernel, and where its source is."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from codegen import cli, provenance
from codegen.library import NamedSpec, as_shipped, find_spec
from codegen.provenance import Difference, Vouched, nearest_shipped, provenance_of, source_of
from codegen.receipts import Receipt, ReceiptState, ReceiptStatus, receipt_path, write_receipt
from codegen.render import render

Make = Callable[[NamedSpec, str], Receipt]
TWIN = "h100_topk32_bf16"


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the package's sources and receipts."""
    monkeypatch.setattr(provenance, "GENERATED", tmp_path / "generated")
    return tmp_path / "generated"


def keep(named: NamedSpec, receipt: Receipt, folder: Path) -> None:
    write_receipt(named, receipt, receipt_path(named, folder), source=render(named.main))


def unnamed(**fields: Any) -> NamedSpec:
    """A kernel like h100_topk32 with some fields of its own, and no file."""
    return find_spec({**json.loads(find_spec("h100_topk32").spec.canonical_json()), **fields})


def test_a_receipt_of_this_source_is_named_with_its_device_and_compiler(
    named: NamedSpec, receipt: Make, generated: Path
) -> None:
    keep(named, receipt(named, render(named)), generated)
    found = provenance_of(named)
    assert found.is_verified and found.sibling is None and found.vouched is not None
    receipt_line, source_line = found.lines()
    assert receipt_line.startswith("receipt: generated/h100_topk32.json: ") and " cases on a device, " in receipt_line
    package = found.vouched.receipt.cubin.compiler_package  # type: ignore[union-attr]
    assert receipt_line.endswith(f"; of this source, compiled by {package}")
    assert source_line == "source: generated/h100_topk32.cu"
    facts = found.facts()
    assert facts["verified"] and facts["sibling"] is None and facts["source"] == "generated/h100_topk32.cu"
    assert facts["receipt"]["standing"] == "ok" and facts["receipt"]["of_this_source"]
    assert (facts["receipt"]["device"], facts["receipt"]["compiler"]) == ("a device", package)
    assert json.loads(json.dumps(facts)) == facts


def test_a_receipt_of_another_source_vouches_for_nothing(named: NamedSpec, receipt: Make, generated: Path) -> None:
    keep(named, receipt(named, "another source"), generated)
    found = provenance_of(named)
    assert not found.is_verified and found.sibling is not None and found.sibling.named.stem != named.stem
    stale = "no receipt of this source (generated/h100_topk32.json: the source changed after the receipt was written)"
    assert found.receipt.startswith(f"{stale}: a sibling of ")
    assert found.facts()["receipt"]["standing"] == "stale" and not found.facts()["receipt"]["of_this_source"]


def test_a_kernel_without_a_file_is_a_sibling_of_the_shipped_one_with_the_fewest_other_fields(
    named: NamedSpec, receipt: Make, generated: Path
) -> None:
    keep(named, receipt(named, render(named)), generated)
    kernel = unnamed(softcap=25.0)
    found = provenance_of(kernel)
    assert found.vouched is None and found.sibling is not None and found.sibling.named == named
    assert found.sibling.differences == (Difference("softcap", "25.0", "none"),)
    assert found.receipt == "no receipt: a sibling of h100_topk32, which differs in softcap: 25.0 vs none"
    sibling = {"kernel": "h100_topk32", "verified": True}
    differences = [{"field": "softcap", "ours": "25.0", "theirs": "none"}]
    assert found.facts()["sibling"] == {**sibling, "differences": differences}
    receipt_path(named, generated).unlink()
    assert "h100_topk32 (which has no valid receipt either), which differs" in provenance_of(kernel).receipt


def test_inner_fields_are_compared_one_by_one() -> None:
    kernel = unnamed(tile={"m": 128, "n": 64}, stages=1)
    found = nearest_shipped(kernel)
    assert found is not None and found.named.stem == "h100_topk32"
    assert [str(each) for each in found.differences] == ["stages: 1 vs 2", "tile.n: 64 vs 128"]


def test_a_copy_of_a_shipped_spec_differs_by_its_name(write_yaml: Callable[..., Path], generated: Path) -> None:
    path = write_yaml((Path(find_spec("h100_topk32").path or "")).read_bytes(), "mine.yaml")
    found = provenance_of(find_spec(path))
    assert found.vouched is None and "h100_topk32" in found.receipt and found.receipt.endswith("differs in its name")
    assert found.source == "codegen render mine.yaml --out -"


def test_an_operator_that_is_not_shipped_for_an_architecture_has_no_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "shipped_specs", list)
    found = provenance_of(unnamed(softcap=25.0))
    assert found.sibling is None and found.receipt == "no receipt" and found.facts()["sibling"] is None


def test_the_command_prints_the_source_of_a_kernel_without_a_file() -> None:
    kernel = unnamed(softcap=25.0)
    command = shlex.split(source_of(kernel))
    assert command[:2] == ["codegen", "render"]
    result = CliRunner().invoke(cli.app, command[1:])
    assert result.exit_code == 0 and result.stdout == render(kernel)


def test_the_source_of_a_twin_is_that_of_the_first_type_with_other_words(
    named: NamedSpec, receipt: Make, generated: Path
) -> None:
    twin = find_spec(TWIN)
    keep(named, receipt(named, render(named)), generated)
    words = f"generated/h100_topk32.cu, with the words of its type replaced (codegen render {TWIN} --out -)"
    found = provenance_of(twin)
    assert found.source == words and found.vouched is None
    assert found.sibling is not None and len(found.sibling.differences) == 1
    keep(twin, receipt(twin, render(twin)), generated)
    assert provenance_of(twin).is_verified and provenance_of(named).is_verified


def test_a_source_that_is_not_there_has_to_be_rendered(named: NamedSpec, generated: Path) -> None:
    assert source_of(named) == "codegen render h100_topk32 --out -"
    generated.mkdir()
    (generated / "h100_topk32.cu").write_text("edited")
    assert source_of(named) == "codegen render h100_topk32 --out -"


def test_a_receipt_elsewhere_counts_where_that_of_the_package_does_not(
    named: NamedSpec, receipt: Make, generated: Path
) -> None:
    own = Vouched("mine.json", ReceiptState(ReceiptStatus.OK, "all cases"), receipt(named, render(named)))
    failed = Vouched("mine.json", ReceiptState(ReceiptStatus.FAILED, "1 of 2 cases failed"))
    assert provenance.vouched(named, lambda _: own) is own and provenance.vouched(named, lambda _: failed) is failed
    keep(named, receipt(named, "another source"), generated)
    assert provenance.vouched(named, lambda _: own) is own
    for found in (provenance.vouched(named, lambda _: failed), provenance.vouched(named, lambda _: None)):
        assert found is not None and found.state.standing is ReceiptStatus.STALE
    keep(named, receipt(named, render(named)), generated)
    found = provenance.vouched(named, pytest.fail)
    assert found is not None and found.holds


def test_a_receipt_that_cannot_be_read_is_told_as_such(named: NamedSpec, generated: Path) -> None:
    generated.mkdir()
    receipt_path(named, generated).write_text("{")
    found = provenance_of(named)
    assert not found.is_verified and found.facts()["receipt"]["standing"] == "unreadable"
    assert found.receipt.startswith("no receipt of this source (generated/h100_topk32.json: h100_topk32.json: ")


def test_explain_has_the_receipt_and_the_source_in_words_and_as_json(
    named: NamedSpec, receipt: Make, generated: Path
) -> None:
    keep(named, receipt(named, render(named)), generated)
    run = CliRunner().invoke
    out = " ".join(run(cli.app, ["explain", "h100_topk32"]).stdout.split())
    assert "receipt generated/h100_topk32.json: " in out and "source generated/h100_topk32.cu" in out
    told = json.loads(run(cli.app, ["explain", "h100_topk32", "--json"]).stdout)
    assert told["verified"] and told["receipt"]["file"] == "generated/h100_topk32.json" and told["sibling"] is None
    spec = unnamed(softcap=25.0).spec.canonical_json()
    told = json.loads(run(cli.app, ["explain", spec, "--json"]).stdout)
    assert not told["verified"] and told["sibling"]["kernel"] == "h100_topk32" and told["receipt"] is None
    assert told["source"].startswith("codegen render '{")


def test_explain_says_whose_time_it_quotes() -> None:
    problem = "head_dim=128,pattern=causal,batch=2,heads=16,q_len=16384,kv_len=16384"
    told = json.loads(CliRunner().invoke(cli.app, ["explain", "--problem", problem, "--json"]).stdout)
    timed = told["choice"]["timed"]
    assert timed["chosen"] and timed["kernel"] == told["choice"]["kernel"] and timed["differences"] == []
    assert "the time is of this kernel" in told["choice"]["why"]
    softcap = json.loads(
        CliRunner().invoke(cli.app, ["explain", "--problem", f"{problem},softcap=20", "--json"]).stdout
    )
    timed = softcap["choice"]["timed"]
    assert timed is None or (not timed["chosen"] and timed["kernel"] != softcap["choice"]["kernel"])


def test_a_twin_has_the_name_of_its_shipped_kernel() -> None:
    assert as_shipped(unnamed(dtype="bf16")).stem == TWIN
