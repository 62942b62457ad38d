"""The kernel cache: one compilation for many processes, damaged entries, limits, folders that cannot be used."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import platformdirs
import pytest
from cache_values import build, build_never, entry, identity

from codegen.library import find_spec
from runtime.compile.cache import KernelCache
from runtime.compile.cache_entry import Entry, cache_key
from runtime.compile.cache_environment import default_folder
from runtime.compile.compiler import compile_spec
from runtime.errors import CacheError, CompileError

pytestmark = pytest.mark.nvrtc

ENTRY = entry("key")
PARTS = {"spec": "{}", "source": "x", "compiler": "c", "options": ("-a", "-b"), "headers": "h", "target": "cubin"}


def stored(cache: KernelCache) -> Path:
    (found,) = cache.entries()
    return found.path


def test_a_second_request_does_not_build(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    assert cache.get_or_build(ENTRY.identity, build) == (ENTRY, False)
    assert KernelCache(tmp_path).get_or_build(ENTRY.identity, build_never) == (ENTRY, True)


def test_the_file_begins_with_the_code(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.get_or_build(ENTRY.identity, build)
    assert stored(cache).read_bytes().startswith(ENTRY.code)
    assert cache.file_of(ENTRY.identity.key) == stored(cache)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, len(ENTRY.pack()) - 1])
def test_a_truncated_entry_is_rebuilt(tmp_path: Path, length: int) -> None:
    cache = KernelCache(tmp_path)
    cache.get_or_build(ENTRY.identity, build)
    path = stored(cache)
    path.write_bytes(path.read_bytes()[:length])
    assert cache.get_or_build(ENTRY.identity, build) == (ENTRY, False)
    assert cache.get_or_build(ENTRY.identity, build_never) == (ENTRY, True)


def test_any_flipped_bit_is_noticed() -> None:
    whole = ENTRY.pack()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        assert Entry.unpack(bytes(damaged)) is None, place
    assert Entry.unpack(whole) == ENTRY


@pytest.mark.parametrize("part", PARTS)
def test_the_key_depends_on_every_part(part: str) -> None:
    value = PARTS[part]
    changed = (*value, "-c") if isinstance(value, tuple) else value + "!"
    assert cache_key(**PARTS) != cache_key(**{**PARTS, part: changed})  # type: ignore[arg-type]


def test_the_key_does_not_confuse_neighboring_parts() -> None:
    one = cache_key(**{**PARTS, "spec": "ab", "source": "c"})  # type: ignore[arg-type]
    assert one != cache_key(**{**PARTS, "spec": "a", "source": "bc"})  # type: ignore[arg-type]
    assert cache_key(**PARTS) != cache_key(**{**PARTS, "options": ("-b", "-a")})  # type: ignore[arg-type]
    assert cache_key(**PARTS) != cache_key(**PARTS, schema="2")  # type: ignore[arg-type]


def test_the_cache_is_bounded_and_forgets_the_least_recently_used(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, max_bytes=5 * len(entry("0").pack()))
    for i in range(4):
        cache.get_or_build(identity(str(i)), build)
    cache.get_or_build(identity("0"), build_never)
    for i in range(4, 8):
        cache.get_or_build(identity(str(i)), build)
        cache.get_or_build(identity("0"), build_never)
    assert sum(found.size for found in cache.entries()) <= cache.max_bytes


def test_clear_removes_everything(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    for key in "abc":
        cache.get_or_build(identity(key), build)
    assert cache.clear() == 3
    assert not list(cache.entries())


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)

    def fail() -> tuple[bytes, str]:
        raise CompileError("k.cu", "k.cu(1): error")

    with pytest.raises(CompileError):
        cache.get_or_build(ENTRY.identity, fail)
    assert not list(cache.entries())
    assert cache.get_or_build(ENTRY.identity, build) == (ENTRY, False)


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match=r"cannot be used .* set CODEGEN_CACHE_DIR"):
        KernelCache(tmp_path / "file" / "cache").get_or_build(ENTRY.identity, build)


READER = """
import os, sys
from pathlib import Path
from runtime.compile.cache import KernelCache
from runtime.compile.cache_entry import Entry, Identity
from runtime.errors import CacheError
folder = Path(sys.argv[1])
cache = KernelCache(folder)
first, other = (Identity(digit * 64, "name", "sm_90a", "cubin") for digit in "01")
cache.get_or_build(first, lambda: (b"code", ""))
(folder / "locks").rmdir()
everything = [folder, *folder.rglob("*")]
for path in everything:
    if path.is_dir():
        path.chmod(0o555)
if os.geteuid() == 0:  # root may write everywhere: go on as somebody who may not
    for path in everything:
        os.chown(path, 65534, 65534)
    os.setuid(65534)
assert cache.get_or_build(first, None) == (Entry(first, "", b"code"), True)
try:
    cache.get_or_build(other, None)  # refused before it is built
except CacheError as error:
    print(error)
"""


def test_a_read_only_folder_serves_what_it_has_and_refuses_the_rest() -> None:
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        folder = Path(parent) / "cache"
        result = subprocess.run(
            [sys.executable, "-c", READER, str(folder)], capture_output=True, text=True, check=True, timeout=60
        )
        for path in folder.rglob("*"):
            if path.is_dir():
                path.chmod(0o755)
        folder.chmod(0o755)
    assert "cannot be used (Permission denied); set CODEGEN_CACHE_DIR" in result.stdout


def test_the_folder_and_the_limit_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CODEGEN_CACHE_MAX_BYTES", "12345")
    assert default_folder() == tmp_path
    assert KernelCache().max_bytes == 12345
    monkeypatch.setenv("CODEGEN_CACHE_MAX_BYTES", "many")
    with pytest.raises(CacheError, match="CODEGEN_CACHE_MAX_BYTES is 'many'"):
        KernelCache()


WORKER = """
import sys, time
from pathlib import Path
from runtime.compile.cache import KernelCache
from runtime.compile.cache_entry import Identity
folder = Path(sys.argv[1])
def build():
    with (folder / "builds").open("a") as file:
        file.write("x")
    time.sleep(0.5)
    return b"code", ""
entry, _ = KernelCache(folder / "cache").get_or_build(Identity("0" * 64, "k", "sm_90a", "cubin"), build)
assert entry.code == b"code"
"""


def test_four_processes_build_once(tmp_path: Path) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)]) for _ in range(4)]
    assert [worker.wait(timeout=60) for worker in workers] == [0, 0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"


def test_a_tampered_kernel_is_compiled_again() -> None:
    named = find_spec("l4_topk32_d64")
    first = compile_spec(named)
    path = KernelCache().file_of(first.key)
    assert path is not None and not first.was_cached
    data = bytearray(path.read_bytes())
    data[1000] ^= 0xFF
    path.write_bytes(bytes(data))
    second = compile_spec(named)
    assert not second.was_cached and second.code == first.code
    assert compile_spec(named).was_cached


def test_a_kernel_of_the_same_name_is_another_one() -> None:
    dense, causal = find_spec("l4_dense"), replace(find_spec("l4_causal"), stem="l4_dense")
    first, second = compile_spec(dense), compile_spec(causal)
    files = [KernelCache().file_of(compiled.key) for compiled in (first, second)]
    assert files[0] is not None and files[1] is not None and first.code != second.code
    files[0].write_bytes(files[1].read_bytes())
    again = compile_spec(dense)
    assert not again.was_cached and again.code == first.code


def test_the_file_of_a_kernel_is_found_among_others(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    for name in ("first", "second"):
        cache.get_or_build(identity(name), lambda name=name: (name.encode(), ""))  # type: ignore[misc]
    for name in ("first", "second"):
        file = cache.file_of(identity(name).key)
        assert file is not None and file.read_bytes().startswith(name.encode())
    assert cache.file_of(identity("third").key) is None


def test_what_is_compiled_leaves_no_lock(tmp_path: Path) -> None:
    KernelCache(tmp_path).get_or_build(ENTRY.identity, build)
    assert not list((tmp_path / "locks").iterdir()) and not list((tmp_path / "tmp").iterdir())


def test_without_an_environment_the_users_folder_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CODEGEN_CACHE_DIR", "CODEGEN_CACHE_MAX_BYTES"):
        monkeypatch.delenv(name, raising=False)
    assert default_folder() == platformdirs.user_cache_path("sparse-kernel-codegen")
    assert KernelCache().folder == default_folder() and KernelCache().max_bytes == 512 << 20


@pytest.mark.parametrize(
    "name", ["CODEGEN_CACHE_MAX_BYTES", "CODEGEN_CACHE_LOCK_SECONDS", "CODEGEN_CACHE_TRUST_OTHERS"]
)
def test_a_value_of_the_environment_is_not_echoed_whole(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "9" * 5000)
    with pytest.raises(CacheError, match=f"{name} is '9+ ... 9+'; ") as caught:
        KernelCache()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("limit", ["0", "-1", "1.5", ""])
def test_a_limit_is_a_positive_number_of_bytes(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setenv("CODEGEN_CACHE_MAX_BYTES", limit)
    with pytest.raises(CacheError, match=f"CODEGEN_CACHE_MAX_BYTES is '{limit}'; expected a positive number of bytes"):
        KernelCache()
    monkeypatch.setenv("CODEGEN_CACHE_MAX_BYTES", "1")
    assert KernelCache().max_bytes == 1


def test_what_is_in_the_cache_is_read_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KernelCache(tmp_path).get_or_build(ENTRY.identity, build)
    monkeypatch.setattr("runtime.compile.cache.locked", lambda *_: pytest.fail("waited for a lock"))
    assert KernelCache(tmp_path).get_or_build(ENTRY.identity, build_never) == (ENTRY, True)
