"""What an inspection found stays with a kernel's entry of the cache: it is disassembled once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from codegen.library import find_spec
from runtime.compile import inspection
from runtime.compile.cache import KernelCache
from runtime.compile.compiler import compile_spec
from runtime.compile.inspection import INSTRUCTIONS, LEFT_OUT, usage
from runtime.errors import CacheError

NAME = "l4_bsr_spmm_b16"


@pytest.fixture
def disassembled(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The cubins that the disassembler was run for."""
    codes: list[bytes] = []
    run = inspection.disassemble
    monkeypatch.setattr(inspection, "disassemble", lambda cubin: (codes.append(cubin), run(cubin))[1])
    return codes


def test_a_kernel_is_disassembled_once(disassembled: list[bytes]) -> None:
    first = usage(compile_spec(find_spec(NAME)))
    compiled = compile_spec(find_spec(NAME))
    assert compiled.was_cached and json.loads(compiled.findings) == dict.fromkeys(LEFT_OUT, 0) | first.instructions
    assert usage(compiled) == first and len(disassembled) == 1
    KernelCache().clear()
    compiled = compile_spec(find_spec(NAME))
    assert not compiled.was_cached and compiled.findings == ""
    assert usage(compiled) == first and len(disassembled) == 2


def test_a_damaged_entry_is_compiled_and_disassembled_again(disassembled: list[bytes]) -> None:
    compiled = compile_spec(find_spec(NAME))
    first = usage(compiled)
    path = KernelCache().file_of(compiled.key)
    assert path is not None
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"MUFU\\": 0', b'"MUFU\\": 7') if b'"MUFU\\": 0' in data else data[:-1])
    compiled = compile_spec(find_spec(NAME))
    assert not compiled.was_cached and usage(compiled) == first and len(disassembled) == 2


def test_counts_of_other_instructions_are_none(disassembled: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    usage(compile_spec(find_spec(NAME)))
    monkeypatch.setattr(inspection, "INSTRUCTIONS", {**INSTRUCTIONS, "BAR": "barrier"})
    assert usage(compile_spec(find_spec(NAME))).instructions["BAR"] > 0
    assert usage(compile_spec(find_spec(NAME))).instructions["BAR"] > 0 and len(disassembled) == 2


@pytest.mark.parametrize("findings", ["{", "[]", "7", "[" * 100_000])
def test_findings_that_nobody_found_are_none(findings: str, disassembled: list[bytes]) -> None:
    compiled = compile_spec(find_spec(NAME))
    KernelCache().keep_findings(compiled.identity, findings)
    compiled = compile_spec(find_spec(NAME))
    assert compiled.findings == findings
    assert usage(compiled).instructions.keys() == INSTRUCTIONS.keys() - LEFT_OUT and len(disassembled) == 1


def test_a_cache_that_cannot_be_written_serves_what_it_has(
    disassembled: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise CacheError("cannot be written")

    compiled = compile_spec(find_spec(NAME))
    monkeypatch.setattr(KernelCache, "keep_findings", refuse)
    assert usage(compiled) == usage(compiled) and len(disassembled) == 2


def test_findings_are_not_kept_of_what_is_not_there(tmp_path: Path) -> None:
    compiled = compile_spec(find_spec(NAME))
    cache = KernelCache(tmp_path / "other")
    cache.keep_findings(compiled.identity, "{}")
    assert not list(cache.entries())
