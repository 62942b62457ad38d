"""The kernel cache beyond its limit and where its folder is none, and what ``codegen compile`` tells of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_values import build, build_never, entry, identity
from typer.testing import CliRunner

from codegen.library import NamedSpec
from codegen.planning import plan_for
from codegen.render import Generated
from runtime import cli, commands
from runtime.compile.cache import KernelCache
from runtime.compile.compiler import Compiled
from runtime.compile.inspection import INSTRUCTIONS, Usage
from runtime.errors import CacheError

ENTRY = entry("key")


def test_an_entry_beyond_the_limit_is_built_once(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, max_bytes=1)
    assert cache.get_or_build(ENTRY.identity, build) == (ENTRY, False)
    assert cache.get_or_build(ENTRY.identity, build_never) == (ENTRY, True)
    assert KernelCache(tmp_path, max_bytes=1).get_or_build(ENTRY.identity, build_never) == (ENTRY, True)


def test_beyond_the_limit_the_last_entry_stays(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, max_bytes=1)
    for i in range(4):
        last, _ = cache.get_or_build(identity(str(i)), lambda i=i: (b"code" * (100 - i), ""))  # type: ignore[misc]
        assert [found.entry for found in cache.entries()] == [last]


@pytest.mark.parametrize("place", [".", "entries"])
def test_a_file_in_the_place_of_the_folder_is_a_clear_error(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "cache"
    path = folder / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("in the way")
    cache = KernelCache(folder)
    for use in (lambda: list(cache.entries()), cache.clear, lambda: cache.file_of("0" * 64)):
        with pytest.raises(CacheError, match=r"cache cannot be used \(Not a directory\); set CODEGEN_CACHE_DIR"):
            use()


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache")
    assert not list(cache.entries()) and cache.clear() == 0 and cache.file_of("0" * 64) is None
    assert not cache.folder.exists()


@pytest.mark.parametrize("command", ["list", "clear"])
def test_commands_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path / "file"))
    result = CliRunner().invoke(cli.app, ["cache", command])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: the kernel cache {tmp_path / 'file'} cannot be used (Not a directory)")


def test_a_limit_is_a_decimal_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEGEN_CACHE_MAX_BYTES", "\N{SUPERSCRIPT TWO}")
    with pytest.raises(CacheError, match="expected a positive number of bytes"):
        KernelCache()


def test_compile_tells_the_stack_and_which_cubins_had_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: NamedSpec
) -> None:
    def compile_spec(named: NamedSpec) -> Compiled:
        entry, cached = KernelCache().get_or_build(identity(named.stem), lambda: (named.stem.encode(), ""))
        key = entry.identity.key
        return Compiled(Generated(named, plan_for(named), ""), "cubin", entry.code, "", (), key, cached)

    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CODEGEN_CACHE_MAX_BYTES", "1")
    monkeypatch.setattr(commands, "compile_spec", compile_spec)
    monkeypatch.setattr(commands, "usage", lambda compiled: Usage(168, 0, 40, 0, 0, dict.fromkeys(INSTRUCTIONS, 0)))
    result = CliRunner().invoke(cli.app, ["compile", "h100_dense", named.stem])
    header, row, _, _, _, first, last = result.stdout.splitlines()
    cells = dict(zip(header.replace(" B", "").replace(" KB", "").split(), row.split(), strict=True))
    assert (cells["spill"], cells["stack"]) == ("0", "40")
    assert first.endswith("cubin evicted from the cache, which keeps at most 1 bytes (CODEGEN_CACHE_MAX_BYTES)")
    assert last.endswith(f"cubin {KernelCache().file_of(identity(named.stem).key)}")
