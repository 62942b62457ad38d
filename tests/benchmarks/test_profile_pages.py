"""The pages of profiles: written from what is kept, and nothing of it lost to a machine without counters."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import load_script

from codegen.library import find_spec


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("profile_pages")


def found(**more: Any) -> dict[str, Any]:
    rows = [{"about": "roofline", "text": "both bound it", "counted": False}]
    return {"rows": rows, "counters": None, "no_counters": "ncu is not found; install it", "complete": True} | more


COUNTED = {
    "counters": "ncu on an H100: a shape",
    "power": {"watts": 600.0},
    "rows": [
        *found()["rows"],
        {"about": "power", "text": "600 of 700 W", "counted": True},
        {"about": "tensor pipe", "text": "80% of its peak", "counted": True},
    ],
}


def test_pages_are_what_the_results_say(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_is_kept_for_each_kernel(script: ModuleType) -> None:
    known = json.loads(script.RESULTS.read_text(encoding="utf-8"))
    assert set(known) == set(script.KERNELS) and len(known) == 6
    assert find_spec(script.KERNELS[-1]).spec.op == "attention_backward"
    texts = script.pages(known)
    assert {path.name for path in texts} == {"README.md", *(f"{stem}.md" for stem in known)}


def test_a_page_has_three_parts(script: ModuleType) -> None:
    place = {"date": "2026-01-01", "device": "H100", "driver": "580"}
    text = script.page("h100_dense", found(**COUNTED, **place, source_sha256="0123"))
    assert "about the source with SHA-256 0123 on H100, driver 580, 2026-01-01" in " ".join(text.split())
    static, _, rest = text.partition("## Measured while calls run back to back")
    measured, _, counted = rest.partition("## Counted by Nsight Compute")
    assert "- **roofline**: both bound it\n" in static and "- **power**: 600 of 700 W\n" in measured
    assert "ncu on an H100: a shape." in counted and "- **tensor pipe**: 80% of its peak\n" in counted


def test_a_page_without_counters_says_why(script: ModuleType) -> None:
    text = script.page("h100_dense", found(source_sha256="0", date="2026-01-01"))
    assert text.endswith("## Counted by Nsight Compute\n\nNo counters: ncu is not found.\n") and "Measured" not in text


def test_a_stale_page_and_one_of_no_kernel_are_told(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "PAGES", tmp_path / "pages")
    assert script.main([]) == 0 and script.main(["--check"]) == 0
    capsys.readouterr()
    (tmp_path / "pages" / "h100_dense.md").write_text("by hand")
    (tmp_path / "pages" / "h100_gone.md").write_text("")
    assert script.main(["--check"]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "pages/h100_dense.md",
        "pages/h100_gone.md",
    ]
    assert script.main([]) == 0 and script.main(["--check"]) == 0


def test_counters_are_not_lost_to_a_machine_without(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "profiles.json", found(source_sha256="0")
    monkeypatch.setattr(script, "KERNELS", ("h100_dense",))
    monkeypatch.setattr(script, "machine", dict)
    monkeypatch.setattr(script, "profiled", lambda stem, *, static: dict(now))

    def kept() -> dict[str, Any]:
        script.collect(path, 600)
        kernel: dict[str, Any] = json.loads(path.read_text())["h100_dense"]
        return kernel

    assert kept()["counters"] is None
    now = found(**COUNTED, source_sha256="0")
    assert kept()["counters"] == "ncu on an H100: a shape"
    now = found(source_sha256="0")
    assert kept()["counters"] == "ncu on an H100: a shape", "of the same source"
    now = found(source_sha256="1")
    assert kept()["counters"] is None, "those were of another source"
    script.collect(path, -1)
    assert json.loads(path.read_text())["h100_dense"]["no_counters"] == "the run had no time left for it"


def test_an_ncu_that_fails_leaves_what_was_told_before(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    document = found(counters=None, complete=False)
    document.pop("no_counters")

    class Done:
        stdout, stderr = json.dumps(document), "profiling 1 of 1\nerror: ncu failed: no permission\n"

    monkeypatch.setattr(script.subprocess, "run", lambda *given, **more: Done)
    assert script.profiled("h100_dense", static=False)["no_counters"] == "ncu failed: no permission"
    Done.stdout = json.dumps(document | {"rows": []})
    with pytest.raises(SystemExit, match="h100_dense: error: ncu failed: no permission"):
        script.profiled("h100_dense", static=False)
