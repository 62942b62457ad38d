"""The files of the cache: read without waiting, written so that nobody sees half of one, used in an order.

    entries/KEY      what is stored; its time of modification says when it was last used
    tmp/KEY.RANDOM   what is being written by the process that holds the lock of KEY
    locks/KEY.lock   held while KEY is compiled
    clock            its time of modification is that of the last use of all

No decision depends on what a clock says: those of two machines that share a cache may differ. A use gets a time after
that of the last use, and a file in ``tmp`` is a leftover if nobody holds its lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from runtime.compile.cache_lock import try_lock, unlock
from runtime.compile.cache_trust import check, check_way
from runtime.errors import CacheError

_TICK = 1_000_000  # nanoseconds from one use to the next at least: some file systems keep no finer times
_MOST_BYTES = 256 << 20  # a cubin has less than one MiB; a larger file is none, and is not read into memory
_FORMER = re.compile("[0-9a-f]{2}")  # folders of the first layout


class CacheFiles:
    """The files below one folder. Its methods raise OSError, and CacheError for what others could have written.

    Args:
        folder: where.
        trusts_others: whether it does not matter who could write there.
    """

    def __init__(self, folder: Path, *, trusts_others: bool) -> None:
        self.folder = folder.absolute()
        self.entries, self.tmp, self.locks = (self.folder / name for name in ("entries", "tmp", "locks"))
        self.trusts_others = trusts_others

    def check(self) -> None:
        """Check who could write here. What is not there yet is in order."""
        if not self.trusts_others:
            check_way(self.folder)
        for path in (self.entries, self.tmp, self.locks):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
                if not self.trusts_others:
                    check(path, status)

    def prepare(self) -> None:
        """Make the folders, for the user alone, and check them."""
        missing, path = [self.entries, self.tmp, self.locks], self.folder
        while not path.exists():
            missing.insert(0, path)
            path = path.parent
        for path in missing:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        self.check()

    def path(self, key: str) -> Path:
        """Return where the entry of a key is, if there is one."""
        return self.entries / key

    def lock(self, key: str) -> Path:
        """Return the lock file of a key."""
        return self.locks / f"{key}.lock"

    def stored(self) -> list[tuple[Path, os.stat_result]]:
        """Return what is in the places of entries, entry or not, in the order of names."""
        found = []
        for path in self._listed(self.entries):
            if not _FORMER.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    found.append((path, path.lstat()))
        return found

    def read(self, path: Path) -> bytes | None:
        """Return what is in a file, or None if it is none that could hold an entry: a pipe, a folder, a link, ...

        Raises:
            FileNotFoundError: if nothing is there.
        """
        if not _may_hold_entry(path.lstat()):  # opening a device may do something
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not _may_hold_entry(status):
                return None
            if not self.trusts_others:
                check(path, status)
            return file.read()

    def write(self, key: str, data: bytes) -> Path:
        """Put data in the place of a key's entry, whatever is there, and return that. Only for who holds its lock."""
        path, time_ns = self.path(key), self._next_use()
        descriptor, name = tempfile.mkstemp(prefix=f"{key}.", dir=self.tmp)
        temporary = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.utime(temporary, ns=(time_ns, time_ns))
            with contextlib.suppress(IsADirectoryError):
                return temporary.replace(path)
            self.remove(path)
            return temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def touch(self, path: Path) -> None:
        """Note that an entry is used; not where nothing can be written: nothing can be removed there either."""
        time_ns = self._next_use()
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)

    def remove(self, path: Path) -> bool:
        """Remove what is in the place of an entry and return whether it was still there."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except IsADirectoryError:
            try:
                shutil.rmtree(path)
            except FileNotFoundError:  # another process removes it too
                return False
        return True

    def sweep(self) -> None:
        """Remove what killed processes have left, and the first layout's entries; what cannot be removed stays."""
        for path in self._listed(self.entries):
            if _FORMER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        for path in self._listed(self.tmp):
            with _free(self.lock(path.name.partition(".")[0])) as free:
                if free:
                    self.remove(path)
        for path in self._listed(self.locks):
            with _free(path), contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(path.lstat().st_mode):  # never a lock
                    self.remove(path)

    def _listed(self, folder: Path) -> list[Path]:
        try:
            return sorted(folder.iterdir())
        except FileNotFoundError:
            return []

    def _next_use(self) -> int:
        """Return a time after that of every earlier use, and keep it as that of the last one."""
        clock, time_ns = self.folder / "clock", time.time_ns()
        with contextlib.suppress(OSError):
            time_ns = max(time_ns, clock.lstat().st_mtime_ns + _TICK)
        with contextlib.suppress(OSError):
            os.close(os.open(clock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
            os.utime(clock, ns=(time_ns, time_ns), follow_symlinks=False)
        return time_ns

    def not_before(self, time_ns: int) -> None:
        """Let later uses count as later than ``time_ns``, which was found on an entry."""
        with contextlib.suppress(OSError):
            clock = self.folder / "clock"
            if clock.lstat().st_mtime_ns < time_ns:
                os.utime(clock, ns=(time_ns, time_ns), follow_symlinks=False)


def _may_hold_entry(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_BYTES


@contextlib.contextmanager
def _free(lock: Path) -> Iterator[bool]:
    """Hold a lock if nobody does, and say whether it was so; its file is gone then. Errors are for who needs it."""
    descriptor = None
    with contextlib.suppress(OSError, CacheError):
        descriptor = try_lock(lock)
    try:
        with contextlib.suppress(OSError):
            yield descriptor is not None
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                unlock(lock, descriptor)
