"""Two kernels compared."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from codegen.library import find_spec
from codegen.render import render
from runtime.cli import app
from runtime.tools.analysis import sides
from runtime.tools.analysis.diff import compare
from runtime.tools.analysis.options import Section
from runtime.tools.analysis.sides import side_of

pytestmark = pytest.mark.nvrtc

run = CliRunner()
ONE, OTHER = "l4_bsr_spmm_b64", "l4_bsr_spmm_b128"


def compared(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = run.invoke(app, ["diff", *arguments, "--json"])
    assert "error: " not in result.stderr, result.stderr
    return result.exit_code, {row["section"]: row for row in json.loads(result.stdout)["rows"]}


@pytest.fixture(autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile a kernel for the first test that wants it."""
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache of test_diff"))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a generated source of former times; returns its folder."""
    monkeypatch.setattr(sides, "ROOT", tmp_path)
    source = tmp_path / "generated" / "older" / f"{ONE}.cu"
    source.parent.mkdir(parents=True)
    source.write_text(render(find_spec(ONE)).replace("constexpr int kTileN = 256;", "constexpr int kTileN = 256 + 0;"))
    (source.parent / "bare.cu").write_text("void f() {}\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_kernel_is_the_same_as_itself() -> None:
    code, rows = compared(ONE, ONE)
    assert code == 0 and list(rows) == ["spec", "plan", "source", "sass"]
    assert all(row["same"] and not row["values"] and not row["lines"] for row in rows.values())


def test_what_differs_is_told_from_the_spec_to_the_machine_code() -> None:
    code, rows = compared(ONE, OTHER)
    assert code == 1 and not any(row["same"] for row in rows.values())
    assert ["block.rows", 64, 128] in rows["spec"]["values"]
    assert any(name.startswith("shared_memory") for name, *_ in rows["plan"]["values"])
    assert any(line.startswith("+constexpr int kBlockCols = 128;") for line in rows["source"]["lines"])
    names = [name for name, *_ in rows["sass"]["values"]]
    assert "instructions" in names and any(name.startswith("main loop, LDGSTS") for name in names)


def test_names_and_banners_are_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_bytes((find_spec(ONE).path or Path()).read_bytes())
    code, rows = compared(ONE, "mine.yaml")
    assert code == 0 and rows["source"]["same"]


def test_one_section_alone_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "code_of", pytest.fail)
    result = run.invoke(app, ["diff", "h100_topk32", "h100_topk64", "--only", "spec", "--only", "plan"])
    assert result.exit_code == 1
    first, second, third, *_ = result.stdout.splitlines()
    assert (first, second, third) == ("spec: differs", "  pattern.k  32 -> 64", "plan: differs")


def test_a_kernel_of_a_commit(repository: Path) -> None:
    code, rows = compared(f"HEAD:{ONE}", ONE)
    assert code == 1
    assert {name for name, row in rows.items() if not row["same"]} == {"plan", "source"}
    assert rows["plan"]["values"] == [["kTileN", "256 + 0", "256"]]
    assert "constants of the sources" in rows["plan"]["note"]
    same, other = side_of(f"HEAD:generated/older/{ONE}.cu"), side_of(f"HEAD:{ONE}")
    assert compare(same, other, Section.SOURCE)["same"]


@pytest.mark.parametrize(
    ("side", "said"),
    [
        ("h100_topk23", "no spec is named 'h100_topk23'"),
        ("nothing:x", "'nothing' is not a commit of "),
        ("--help:x", "'--help' is not a commit of "),
        ("HEAD:l4_bsr_spmm_b65", "has no generated/l4_bsr_spmm_b65.cu; did you mean l4_bsr_spmm_b64?"),
        ("HEAD:no/such.cu", "git: fatal: path 'no/such.cu' does not exist in "),
        ("HEAD:generated/older/bare.cu", "has no banner with a spec: it is not a generated source"),
        ("{op: attention}", "pattern: is missing"),
    ],
)
def test_what_is_no_kernel_is_one_line(repository: Path, side: str, said: str) -> None:
    result = run.invoke(app, ["diff", "--", side, ONE])
    last = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and last.startswith("error: ") and said in last


def test_no_repository_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run.invoke(app, ["diff", f"HEAD:{ONE}", ONE]).stderr.startswith("error: git: ")
    monkeypatch.setenv("PATH", "")
    assert "git cannot be started" in run.invoke(app, ["diff", f"HEAD:{ONE}", ONE]).stderr
