"""Entries that are none, entries in another's place, files that others remove meanwhile, clocks, cost."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cache_values import build, build_never, entry, identity
from stress.cache import SMALL as LOAD
from stress.cache_damage import DAMAGE, damaged

from runtime.compile import cache_eviction, cache_files, cache_lock
from runtime.compile.cache import KernelCache
from runtime.compile.cache_entry import Entry, Identity
from runtime.compile.cache_files import CacheFiles
from runtime.compile.cache_folder import Folder
from runtime.errors import CacheError

DAY = 86_400 * 10**9
KERNEL = identity("kernel")
SIZE = len(entry("kernel").pack())


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """End a test that waits for a pipe or a lock."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture(autouse=True)
def looked_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process know nothing of folders of other tests."""
    monkeypatch.setattr(cache_eviction, "_seen", {})


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_no_entry_is_built_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stress.cache_damage.DAMAGE", {kind: DAMAGE[kind]})
    if damaged(tmp_path, LOAD).startswith("0 of 1"):
        pytest.skip("only root can make it")


@pytest.mark.parametrize("part", ["key", "stem", "arch", "target"])
def test_an_entry_of_another_kernel_is_not_served(part: str, tmp_path: Path) -> None:
    value = "0" * 64 if part == "key" else "another"
    other = replace(KERNEL, **{part: value})
    cache = KernelCache(tmp_path)
    cache.get_or_build(KERNEL, build)
    (tmp_path / "entries" / KERNEL.key).write_bytes(Entry(other, "", b"wrong code").pack())
    assert cache.get_or_build(KERNEL, build) == (entry("kernel"), False)
    assert cache.get_or_build(KERNEL, build_never) == (entry("kernel"), True)


def test_a_footer_with_another_identity_has_another_digest() -> None:
    whole = entry("kernel").pack()
    for was, becomes in ((b'"kernel"', b'"kernem"'), (b"sm_90a", b"sm_89a"), (KERNEL.key.encode(), b"0" * 64)):
        assert was in whole and Entry.unpack(whole.replace(was, becomes)) is None


@pytest.mark.parametrize("value", [1, None, ["log"], {"log": 1}, "\ud800"])
def test_a_footer_that_is_not_text_is_no_entry(value: object) -> None:
    for made in (replace(entry("kernel"), log=value), Entry(replace(KERNEL, stem=value), "", b"")):  # type: ignore[type-var,arg-type]
        assert Entry.unpack(made.pack()) is None


@pytest.mark.parametrize("key", ["", "name", "../" * 21 + "a", "A" * 64, "0" * 64 + "\n"])
def test_a_key_is_the_name_of_a_file(key: str) -> None:
    with pytest.raises(CacheError, match=r"key: is .*; 64 hex digits are expected"):
        Identity(key, "kernel", "sm_90a", "cubin")


def test_a_list_leaves_out_what_is_removed_meanwhile(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    for name in "abc":
        cache.get_or_build(identity(name), build)
    entries = cache.entries()
    first = next(entries)
    assert KernelCache(tmp_path).clear() == 3
    assert first.entry is not None and not list(entries)


def test_two_clears_count_each_entry_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, listed = KernelCache(tmp_path), CacheFiles.stored
    cache.get_or_build(KERNEL, build)
    counts = []

    def stored(files: CacheFiles) -> list[tuple[str, os.stat_result]]:
        found = listed(files)
        monkeypatch.setattr(CacheFiles, "stored", listed)
        counts.append(KernelCache(tmp_path).clear())  # after this one has listed, before it removes
        return found

    monkeypatch.setattr(CacheFiles, "stored", stored)
    assert cache.clear() == 0 and counts == [1]


def test_clear_removes_the_entries_of_the_first_layout(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.get_or_build(KERNEL, build)
    former = tmp_path / "entries" / "ab"
    former.mkdir()
    (former / ("0" * 62)).touch()
    assert len(list(cache.entries())) == 1 and cache.clear() == 1 and not former.exists()


@pytest.mark.parametrize("shift", [DAY, -DAY])
def test_the_least_recently_used_goes_whatever_clocks_say(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    cache = KernelCache(tmp_path, max_bytes=7 * SIZE // 2)

    def use(name: str, offset: int) -> None:
        monkeypatch.setattr(cache_files.time, "time_ns", lambda: now + offset)
        cache.get_or_build(identity(name), build)

    for name, offset in (("a", 0), ("b", shift), ("c", -shift), ("a", 0)):
        use(name, offset)
    for offset, name, left in ((2 * shift, "d", "acd"), (-2 * shift, "e", "ade"), (0, "f", "def")):
        use(name, offset)
        stems = [found.entry.identity.stem for found in cache.entries() if found.entry]
        assert sorted(stems) == list(left)


@pytest.mark.parametrize("shift", [DAY, -DAY])
def test_entries_with_times_of_another_clock_do_not_push_out_new_ones(shift: int, tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, max_bytes=7 * SIZE // 2)
    for name in "abc":
        cache.get_or_build(identity(name), build)
    for path in (tmp_path / "entries").iterdir():
        os.utime(path, ns=(0, path.stat().st_mtime_ns + shift))
    for name in "def":
        cache.get_or_build(identity(name), build)
        assert cache.get_or_build(identity(name), build_never)[1]
    assert {found.entry.identity.stem for found in cache.entries() if found.entry} == set("def")


@pytest.mark.parametrize("shift", [DAY, -DAY])
def test_only_a_file_that_nobody_writes_is_a_leftover(shift: int, tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.get_or_build(KERNEL, build)
    temporary = tmp_path / "tmp" / f"{KERNEL.key}.abc"
    temporary.touch()
    os.utime(temporary, ns=(0, time.time_ns() + 10 * shift))
    with cache_lock.locked(lambda: closing(Folder.at(str(tmp_path / "locks"))), f"{KERNEL.key}.lock", "to write it", 1):
        cache.clear()
        assert temporary.exists()
    cache.clear()
    assert not temporary.exists() and not list((tmp_path / "locks").iterdir())


def test_an_entry_that_is_used_meanwhile_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, listed = KernelCache(tmp_path, max_bytes=5 * SIZE // 2), CacheFiles.stored
    for name in "ab":
        cache.get_or_build(identity(name), build)

    def stored(files: CacheFiles) -> list[tuple[str, os.stat_result]]:
        found = listed(files)
        files.touch(identity("a").key)
        return found

    monkeypatch.setattr(CacheFiles, "stored", stored)
    cache.get_or_build(identity("c"), build)
    monkeypatch.setattr(CacheFiles, "stored", listed)
    assert {found.entry.identity.stem for found in cache.entries() if found.entry} == set("ac")


def test_an_entry_that_cannot_be_removed_does_not_disturb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(files: CacheFiles, name: str) -> bool:
        raise PermissionError(errno.EPERM, "Operation not permitted", name)

    monkeypatch.setattr(CacheFiles, "remove", remove)
    cache = KernelCache(tmp_path, max_bytes=1)
    for name in "ab":
        assert cache.get_or_build(identity(name), build) == (entry(name), False)
    assert len(list(cache.entries())) == 2


def test_many_kernels_cost_no_look_at_all_others_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, looks = [], []
    read, stored = CacheFiles.read, CacheFiles.stored
    monkeypatch.setattr(CacheFiles, "read", lambda files, name: reads.append(read(files, name)) or reads[-1])
    monkeypatch.setattr(CacheFiles, "stored", lambda files: (looks.append(files), stored(files))[1])
    for number in range(128):
        KernelCache(tmp_path, max_bytes=512 * SIZE).get_or_build(identity(str(number)), build)
    assert not reads  # nothing was there
    assert len(looks) <= 1 + 128 // 16  # at first, then each time a thirty-second of the limit was written
    for number in range(128):
        KernelCache(tmp_path).get_or_build(identity(str(number)), build_never)
    assert len(reads) == 128


def test_what_other_processes_write_is_seen_before_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, processes = 64 * SIZE, ({}, {})  # what each of two has seen
    for number in range(256):
        monkeypatch.setattr(cache_eviction, "_seen", processes[number % 2])
        KernelCache(tmp_path, limit).get_or_build(identity(str(number)), build)
        assert sum(path.stat().st_size for path in (tmp_path / "entries").iterdir()) <= limit + 2 * (limit // 32 + SIZE)


def test_without_space_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def utime(descriptor: int, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = KernelCache(tmp_path)
    monkeypatch.setattr(cache_files.os, "utime", utime)
    with pytest.raises(CacheError, match=r"\(No space left on device\); free some space \(codegen cache clear\), or"):
        cache.get_or_build(KERNEL, build)
    assert not [path for name in ("entries", "locks", "tmp") for path in (tmp_path / name).iterdir()]


def test_an_error_of_a_build_is_not_the_caches(tmp_path: Path) -> None:
    def fail() -> tuple[bytes, str]:
        raise OSError(errno.EIO, "Input/output error", "kernel.cu")

    with pytest.raises(OSError, match="Input/output error"):
        KernelCache(tmp_path).get_or_build(KERNEL, fail)
    assert KernelCache(tmp_path).get_or_build(KERNEL, build) == (entry("kernel"), False)


def test_a_link_in_the_place_of_the_clock_is_not_followed(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache")
    cache.folder.mkdir(mode=0o700)
    precious, nowhere = tmp_path / "precious", tmp_path / "nowhere"
    precious.touch()
    os.utime(precious, ns=(0, 0))
    for target in (precious, nowhere):
        (cache.folder / "clock").unlink(missing_ok=True)
        (cache.folder / "clock").symlink_to(target)
        cache.get_or_build(KERNEL, build)
        assert cache.get_or_build(KERNEL, build_never)[1]
    assert precious.stat().st_mtime_ns == 0 and not nowhere.exists()
