"""What an inspection found stays with a kernel's entry of the cache: it is disassembled once."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cache_values import build, identity

from codegen.library import find_spec
from runtime.compile import inspection
from runtime.compile.cache import KernelCache
from runtime.compile.compiler import compile_spec
from runtime.compile.inspection import INSTRUCTIONS, LEFT_OUT, usage
from runtime.errors import CacheError

pytestmark = pytest.mark.nvrtc

NAME = "l4_bsr_spmm_b16"
run = functools.cache(inspection.disassemble)  # the same text for the same cubin


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has the kernel, and nothing that an inspection found."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODEGEN_CACHE_DIR", str(folder))
        compile_spec(find_spec(NAME))
    return folder


@pytest.fixture(autouse=True)
def copied(compiled: Path, own_cache: Path) -> None:
    """The kernel is in the cache of each test."""
    shutil.copytree(compiled, own_cache, dirs_exist_ok=True)


@pytest.fixture
def disassembled(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The cubins whose disassembly was asked for."""
    codes: list[bytes] = []
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


def test_findings_that_nobody_found_are_none(disassembled: list[bytes]) -> None:
    compiled = compile_spec(find_spec(NAME))
    first = usage(compiled)
    right = compile_spec(find_spec(NAME)).findings
    counts = json.loads(right)
    values = ("many", "7", -1, 1.5, 7.0, None, True, [7], {"of": 7}, 10**6, 10**300)
    odd = [json.dumps(counts | {"MUFU": value}) for value in values] + [json.dumps({**counts, "NEW": 1})]
    for findings in (*odd, "{", "[]", "7", "null", "NaN", "[" * 100_000, right.replace(" ", "") + "x", "9" * 5000):
        KernelCache().keep_findings(compiled.identity, findings)
        kept = compile_spec(find_spec(NAME))
        assert kept.was_cached and kept.findings == findings
        before = len(disassembled)
        assert usage(kept) == first and len(disassembled) == before + 1, findings[:80]
        assert compile_spec(find_spec(NAME)).findings == right


def test_a_log_with_a_number_that_python_does_not_read_is_no_error() -> None:
    log = f"ptxas info : Used {'9' * 5000} registers, {'9' * 5000} bytes spill stores"
    assert inspection.told_by_compiler("kernel", log).registers >= 0


def test_findings_are_written_by_the_holder_of_the_lock(tmp_path: Path) -> None:
    cache, kernel = KernelCache(tmp_path), identity("kernel")
    cache.get_or_build(kernel, build)
    with cache._locked(kernel):
        cache.keep_findings(kernel, "{}")  # another one writes this entry: nothing waits, and nothing is written
        assert [found.entry.findings for found in cache.entries() if found.entry] == [""]
    cache.keep_findings(kernel, "{}")
    assert [found.entry.findings for found in cache.entries() if found.entry] == ["{}"]
    assert not list((tmp_path / "locks").iterdir()) and not list((tmp_path / "tmp").iterdir())


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
