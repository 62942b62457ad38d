"""Machine code of compiled kernels, by stages and loops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from codegen.library import find_spec
from runtime.cli import app
from runtime.compile import toolchain
from runtime.compile.compiler import compile_spec
from runtime.errors import ToolchainError
from runtime.tools.analysis import disassembly
from runtime.tools.analysis.disasm import fields_of, lines_of
from runtime.tools.analysis.disassembly import Disassembly, disassemble
from runtime.tools.analysis.kinds import OTHER, by_kind
from runtime.tools.analysis.options import Show

pytestmark = pytest.mark.nvrtc

run = CliRunner()
HOPPER, ADA = "h100_bsr_spmm_b128", "l4_bsr_spmm_b64"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Disassembly]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODEGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return {stem: disassemble(find_spec(stem)) for stem in (HOPPER, ADA)}


def test_the_main_loop_has_the_products_of_a_step(found: dict[str, Disassembly]) -> None:
    hopper, ada = found[HOPPER], found[ADA]
    assert hopper.main is not None and ada.main is not None
    spec = hopper.compiled.plan.spec
    assert hopper.main.tensor == spec.tile.k // 16  # type: ignore[union-attr] # wgmma of k16, each of the whole tile
    step = ada.compiled.plan
    each_warp = step.flops // (step.threads // 32)
    assert ada.main.tensor * 2 * 16 * 8 * 16 == each_warp  # mma.sync of m16n8k16


@pytest.mark.parametrize("stem", [HOPPER, ADA])
def test_every_instruction_has_a_stage_and_a_kind(found: dict[str, Disassembly], stem: str) -> None:
    each = found[stem]
    assert each.has_stages
    assert all(each.stage(instruction) for instruction in each.own.instructions)
    assert OTHER not in by_kind(each.own.instructions)


def test_stages_are_functions_of_the_source(found: dict[str, Disassembly]) -> None:
    told = fields_of(found[HOPPER], Show.SUMMARY)
    assert any(stage.startswith("consume") for stage in told["main_loop"]["stages"])
    assert sum(told["main_loop"]["stages"].values()) == told["main_loop"]["instructions"]
    assert told["registers"]["setmaxnreg"] and told["barriers"]["mbarriers"] and told["functions"] == []
    assert fields_of(found[ADA], Show.SUMMARY)["barriers"] == {"named": 1, "mbarriers": 0}


def test_the_listing_has_all_instructions_and_marks_the_main_loop(found: dict[str, Disassembly]) -> None:
    text = "\n".join(lines_of(found[ADA], Show.ALL))
    assert all(f"  {each.address:04x}  {each.text}" in text for each in found[ADA].own.instructions)
    inside = text.partition("==== main loop")[2].partition("==== end of the main loop")[0]
    assert inside.count(" HMMA.") == (found[ADA].main or pytest.fail()).tensor
    assert max(len(line) for line in lines_of(found[ADA], Show.SUMMARY)) <= 80


def test_other_instructions_are_not_marked(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    other = compile_spec(find_spec(ADA)).code
    monkeypatch.setattr(disassembly, "run_nvrtc", lambda *arguments: (other, ""))
    result = run.invoke(app, ["disasm", HOPPER])
    assert result.exit_code == 0
    assert "unknown: with line information, the compiler generates different instructions" in result.stdout
    assert " HGMMA." in result.stdout and " HMMA." not in result.stdout


def test_json(found: dict[str, Disassembly], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembly, "disassemble", lambda named: found[named.stem])
    result = run.invoke(app, ["disasm", HOPPER, "--show", "loop", "--json"])
    (row,) = json.loads(result.stdout)["rows"]
    (function,) = row["functions"]
    assert len(function["listing"]) == row["main_loop"]["instructions"]
    assert {"address", "text", "stage", "line"} == set(function["listing"][0])


def test_without_nvdisasm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_packaged", lambda *arguments: ())
    monkeypatch.setattr(toolchain, "_located", lambda *arguments: None)
    toolchain.nvdisasm.cache_clear()
    result = run.invoke(app, ["disasm", HOPPER])
    toolchain.nvdisasm.cache_clear()
    last = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and last.startswith("error: nvdisasm, which ") and toolchain.install() in last


def test_a_tool_that_fails_is_one_error(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setattr(disassembly.toolchain, "nvdisasm", lambda: "/bin/false")
    with pytest.raises(ToolchainError, match=r"^false failed: "):
        disassemble(find_spec(ADA))
