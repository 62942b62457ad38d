"""The files of the cache: lock-free reads, atomic writes, and an order of last use.

    entries/KEY      an entry; its modification time is its last use
    tmp/KEY.RANDOM   an entry that the holder of KEY's lock is writing
    locks/KEY.lock   held while KEY is compiled or its entry is rewritten
    clock            its modification time is the last use of any entry

No decision depends on a system clock, because machines that share a cache may disagree about the time. Each use gets a
time later than the last use. A file in ``tmp`` is stale if no process holds its lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from runtime.compile.cache_folder import Folder
from runtime.compile.cache_lock import try_lock, unlock
from runtime.compile.cache_trust import check, open_inner, open_way
from runtime.errors import CacheError

_TICK = 1_000_000  # nanoseconds between two uses, at least: some file systems store coarser times
_MOST_BYTES = 256 << 20  # a cubin has less than one MiB; larger files are not entries and are not read
_FORMER = re.compile("[0-9a-f]{2}")  # folders of the first layout
_CLOCK = "clock"
_INNER = ("entries", "tmp", "locks")


class CacheFiles:
    """The files in one open folder. Methods raise OSError, FileNotFoundError if the folder is missing, and CacheError
    for files that other users could have written.

    Args:
        folders: the folder itself as ``"."`` and its existing subfolders, by name.
        trusts_others: whether to skip the check of who could write there.
    """

    def __init__(self, path: Path, folders: Mapping[str, Folder], *, trusts_others: bool) -> None:
        self.path, self._folders, self.trusts_others = path, folders, trusts_others

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, *, trusts_others: bool, make: bool = False) -> Iterator[CacheFiles]:
        """Open a folder and its subfolders, and check who could write to them.

        Args:
            path: the folder.
            trusts_others: whether to skip the check of who could write there.
            make: whether to create missing folders, accessible to the user only.
        """
        path, how = path.absolute(), {"make": make, "trusts_others": trusts_others}
        with contextlib.ExitStack() as stack:
            folders = {}
            with contextlib.suppress(FileNotFoundError):
                folders["."] = stack.enter_context(closing(open_way(path, **how)))
            for name in _INNER if folders else ():
                with contextlib.suppress(FileNotFoundError):
                    folders[name] = stack.enter_context(closing(open_inner(folders["."], name, **how)))
            yield cls(path, folders, trusts_others=trusts_others)

    @property
    def entries(self) -> Folder:
        """The folder of entries."""
        return self._folder("entries")

    @property
    def locks(self) -> Folder:
        """The folder of locks."""
        return self._folder("locks")

    def _folder(self, name: str) -> Folder:
        if name not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path / name))
        return self._folders[name]

    def _names(self, name: str) -> list[str]:
        return self._folders[name].names() if name in self._folders else []

    def stored(self) -> list[tuple[str, os.stat_result]]:
        """Sorted names of all files in the folder of entries."""
        found = []
        for name in self._names("entries"):
            if not _FORMER.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    found.append((name, self.entries.status(name)))
        return found

    def read(self, name: str) -> bytes | None:
        """Read the bytes of an entry; None for anything but a regular file.

        Raises:
            FileNotFoundError: if the file does not exist.
        """
        if not _may_hold_entry(self.entries.status(name)):  # opening a device may have side effects
            return None
        descriptor = self.entries.open(name, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not _may_hold_entry(status):
                return None
            if not self.trusts_others:
                check(self.entries.name(name), status, descriptor)
            return file.read()

    def write(self, key: str, data: bytes) -> None:
        """Replace a key's entry. The caller holds the key's lock."""
        time_ns, tmp, name = self._next_use(), self._folder("tmp"), f"{key}.{secrets.token_hex(8)}"
        descriptor = tmp.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o600)  # whatever the umask
                file.write(data)
                file.flush()
                os.utime(descriptor, ns=(time_ns, time_ns))
            try:
                tmp.move(name, self.entries, key)
            except IsADirectoryError:
                self.remove(key)
                tmp.move(name, self.entries, key)
        except BaseException:
            with contextlib.suppress(OSError):
                tmp.remove(name)
            raise

    def touch(self, name: str) -> None:
        """Record a use of an entry. Read-only caches are left alone, since they evict nothing."""
        time_ns = self._next_use()
        with contextlib.suppress(OSError):
            self.entries.set_time(name, time_ns)

    def remove(self, name: str) -> bool:
        """Remove the file of an entry and return whether it still existed."""
        return self.entries.remove(name)

    def sweep(self) -> None:
        """Remove leftovers of killed processes and entries of the first layout, as far as permissions allow."""
        for name in self._names("entries"):
            if _FORMER.fullmatch(name):
                with contextlib.suppress(OSError):
                    self.remove(name)
        for name in self._names("tmp"):
            with contextlib.suppress(OSError, CacheError), self.held_if_free(name.partition(".")[0]) as free:
                if free:
                    self._folder("tmp").remove(name)
        for name in self._names("locks"):
            with contextlib.suppress(OSError, CacheError):
                if not stat.S_ISREG(self.locks.status(name).st_mode):  # never a lock
                    self.locks.remove(name)
                elif (descriptor := try_lock(self.locks, name)) is not None:
                    unlock(self.locks, name, descriptor)

    @contextlib.contextmanager
    def held_if_free(self, key: str) -> Iterator[bool]:
        """Hold a key's lock if it is free, and yield whether it was. The lock file is removed afterwards."""
        name = lock_name(key)
        descriptor = try_lock(self.locks, name)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                unlock(self.locks, name, descriptor)

    def _next_use(self) -> int:
        """A time later than every earlier use, which becomes the time of the last use."""
        folder, time_ns = self._folder("."), time.time_ns()
        with contextlib.suppress(OSError):
            time_ns = max(time_ns, folder.status(_CLOCK).st_mtime_ns + _TICK)
        with contextlib.suppress(OSError):
            os.close(folder.open(_CLOCK, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK))
            folder.set_time(_CLOCK, time_ns)
        return time_ns

    def not_before(self, time_ns: int) -> None:
        """Make later uses count as later than ``time_ns``, the time of an entry."""
        with contextlib.suppress(OSError):
            folder = self._folder(".")
            if folder.status(_CLOCK).st_mtime_ns < time_ns:
                folder.set_time(_CLOCK, time_ns)


def lock_name(key: str) -> str:
    """Name of the lock file of a key."""
    return f"{key}.lock"


def _may_hold_entry(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_BYTES
