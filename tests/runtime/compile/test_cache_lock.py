"""Who waits for whom, for how long, and what becomes of locks of those who are gone."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest
from cache_values import build, build_never, identity
from stress.cache import SMALL, run_all

from runtime.compile import cache_lock
from runtime.compile.cache import KernelCache
from runtime.compile.cache_folder import Folder
from runtime.compile.cache_lock import locked, try_lock, unlock
from runtime.errors import CacheError

KERNEL = identity("kernel")
HOLDER = """
import sys
from contextlib import closing
from pathlib import Path
from runtime.compile.cache_folder import Folder
from runtime.compile.cache_folder import Folder
from runtime.compile.cache_lock import locked
path = Path(sys.argv[1])
with locked(lambda: closing(Folder.at(str(path.parent))), path.name, "to hold it", 1):
    print("held", flush=True)
    sys.stdin.read()
"""


def opened(lock: Path) -> AbstractContextManager[Folder]:
    """Open the folder of a lock file."""
    return closing(Folder.at(str(lock.parent)))


def taken(lock: Path) -> int | None:
    """Try to hold a lock."""
    with opened(lock) as folder:
        return try_lock(folder, lock.name)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """The lock of KERNEL in a cache in ``tmp_path``."""
    (tmp_path / "locks").mkdir(mode=0o700)
    return tmp_path / "locks" / f"{KERNEL.key}.lock"


@pytest.fixture
def holder(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds it."""
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_who_waits_says_for_whom_and_gives_up(
    tmp_path: Path,
    lock: Path,
    holder: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CODEGEN_CACHE_LOCK_SECONDS", "1")
    monkeypatch.setattr(cache_lock, "NOTICE_SECONDS", 0.1)
    with pytest.raises(CacheError) as caught:
        KernelCache(tmp_path).get_or_build(KERNEL, build_never)
    by = rf"process {holder.pid} on \S+"
    assert re.fullmatch(
        rf"gave up waiting to compile kernel: {by} has held {lock} for 1 s; "
        r"end it if it hangs, or set CODEGEN_CACHE_LOCK_SECONDS, which is 1, to wait longer",
        str(caught.value),
    )
    assert re.fullmatch(
        rf"codegen: process {os.getpid()} waits to compile kernel: {by} holds {lock}; "
        r"it gives up after 1 s \(CODEGEN_CACHE_LOCK_SECONDS\)\n",
        capsys.readouterr().err,
    )


def test_who_need_not_wait_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    KernelCache(tmp_path).get_or_build(KERNEL, build)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("seconds", ["0", "-1", "x", "", "9" * 30])
def test_the_time_to_wait_is_a_positive_number(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEGEN_CACHE_LOCK_SECONDS", seconds)
    with pytest.raises(
        CacheError, match=f"CODEGEN_CACHE_LOCK_SECONDS is '{seconds}'; expected a positive number of seconds"
    ):
        KernelCache()


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path, lock: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait(timeout=60)
    assert lock.exists()
    assert not KernelCache(tmp_path).get_or_build(KERNEL, build)[1] and not lock.exists()


def test_clear_leaves_locks_that_are_held(tmp_path: Path, lock: Path, holder: subprocess.Popen[str]) -> None:
    left = lock.with_name("left.lock")
    left.touch()
    KernelCache(tmp_path).clear()
    assert lock.exists() and not left.exists() and taken(lock) is None


def test_a_lock_on_a_removed_file_does_not_count(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def remove_then_lock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(cache_lock.fcntl, "flock", flock)
        lock.unlink()  # its holder has just done so, and given it up
        flock(descriptor, operation)

    monkeypatch.setattr(cache_lock.fcntl, "flock", remove_then_lock)
    assert taken(lock) is None
    descriptor = taken(lock)
    assert descriptor is not None and taken(lock) is None
    with opened(lock) as folder:
        unlock(folder, lock.name, descriptor)
    assert not lock.exists()


def test_threads_exclude_each_other(lock: Path) -> None:
    inside, most = [], []

    def run() -> None:
        for _ in range(20):
            with locked(lambda: opened(lock), lock.name, "to count", 60):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert most == [1] * 80


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_it_says_where_there_are_some(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache(tmp_path)
    cache.get_or_build(KERNEL, build)

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache_lock.fcntl, "flock", flock)
    assert cache.get_or_build(KERNEL, build_never)[1]  # needs none
    with pytest.raises(CacheError, match=r"has no locks \(.*\), .*; set CODEGEN_CACHE_DIR to a folder on another one"):
        cache.get_or_build(identity("other"), build_never)
    assert cache.clear() == 1


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path, lock: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    lock.symlink_to(precious)
    with pytest.raises(CacheError, match=f"it was {lock}"):
        KernelCache(tmp_path).get_or_build(KERNEL, build_never)
    assert precious.read_text() == "as it was"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_lock_is_named_and_cleared(make: object, tmp_path: Path, lock: Path) -> None:
    make(lock)  # type: ignore[operator]
    cache = KernelCache(tmp_path)
    with pytest.raises(CacheError, match=f"it was {lock}"):
        cache.get_or_build(KERNEL, build_never)
    cache.clear()
    assert not cache.get_or_build(KERNEL, build)[1]


def test_all_of_it_at_once() -> None:
    """A small version of ``python tests/stress/cache.py --full``."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is for its user alone
        rows = run_all(SMALL, Path(folder))
    assert not [row for row in rows if not row[1]]
