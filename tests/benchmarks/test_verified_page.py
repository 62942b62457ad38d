"""The tables of docs/reference/verified.md: what receipts say, and nothing of a kernel that they do not vouch for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import load_script

from codegen.cases import case_names
from codegen.library import NamedSpec, find_spec, shipped_specs
from codegen.planning import plan_for
from codegen.receipts import Receipt
from codegen.render import render

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "reference" / "verified.md"
Make = Callable[[NamedSpec, str], Receipt]


script = load_script("verified_page")
SPECS = [find_spec(name) for name in ("h100_topk32", "h100_causal", "l4_causal")]


@pytest.fixture
def receipts(receipt: Make) -> dict[str, Receipt]:
    """Receipts of two of the three specs."""
    return {named.stem: receipt(named, render(named)) for named in SPECS if named.stem != "h100_causal"}


def test_the_page_is_what_the_receipts_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_that_is_not_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "verified.md"
    page.write_text(PAGE.read_text(encoding="utf-8").replace("`h100_causal`, ", ""), encoding="utf-8")
    monkeypatch.setattr(script, "PAGE", page)
    assert script.main(["--check"]) == 1
    assert script.STALE in capsys.readouterr().out


def test_every_shipped_kernel_is_on_the_page_once() -> None:
    (table,) = PAGE.read_text(encoding="utf-8").split("<!-- kernels:begin -->")[1:]
    table = table.partition("<!-- kernels:end -->")[0]
    assert all(table.count(f"`{named.stem}`") == 1 for named in shipped_specs())


def test_kernels_are_told_by_what_ran_where(receipts: dict[str, Receipt]) -> None:
    found = script.runs(SPECS, receipts)
    assert {run: [named.stem for named in those] for run, those in found.items()} == {
        ("sm_89", "sm_89 cubin", "a device"): ["l4_causal"],
        ("sm_90a", "sm_90a cubin", "a device"): ["h100_topk32"],
    }
    rows = script.kernel_table(SPECS, found).splitlines()
    assert rows[-1] == "| not verified | - | `h100_causal` |"
    operators = script.operator_table(receipts, found).splitlines()[2:]
    counts = [len(case_names(plan_for(find_spec(stem)))) for stem in ("l4_causal", "h100_topk32")]
    assert operators == [
        f"| `attention` | {arch} cubin | a device | 1 | {count} | fp16 5.0e-04 |"
        for arch, count in zip(("sm_89", "sm_90a"), counts, strict=True)
    ]


def test_compilations_are_counted_by_architecture(receipts: dict[str, Receipt]) -> None:
    records = ["h100_topk32", "l4_causal", "attention_sm_80_fp16_d128_dense_a0561fd1", "bsr_spmm_sm_90a_fp16_b16_0a"]
    assert script.compiled(SPECS, records) == {"sm_90a": 2, "sm_89": 1, "sm_80": 1}
    table = script.architecture_table(SPECS, records, script.runs(SPECS, receipts))
    assert "| `sm_80` | 0 | 1 | - |" in table
    assert "| `sm_90a` | 2 | 2 | 1 on a device as sm_90a cubin |" in table


def test_every_record_is_of_a_known_architecture() -> None:
    records = json.loads(script.KNOWN.read_text(encoding="utf-8"))
    assert set(script.compiled(shipped_specs(), records)) <= set(script.ARCHS)
