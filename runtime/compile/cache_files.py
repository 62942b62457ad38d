"""The files of the cache: read without waiting, written so that nobody sees half of one, used in an order.

    entries/KEY      what is stored; its time of modification says when it was last used
    tmp/KEY.RANDOM   what is being written by the process that holds the lock of KEY
    locks/KEY.lock   held while KEY is compiled, or its entry written anew
    clock            its time of modification is that of the last use of all

No decision depends on what a clock says: those of two machines that share a cache may differ. A use gets a time after
that of the last use, and a file in ``tmp`` is a leftover if nobody holds its lock.
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

_TICK = 1_000_000  # nanoseconds from one use to the next at least: some file systems keep no finer times
_MOST_BYTES = 256 << 20  # a cubin has less than one MiB; a larger file is none, and is not read into memory
_FORMER = re.compile("[0-9a-f]{2}")  # folders of the first layout
_CLOCK = "clock"
_INNER = ("entries", "tmp", "locks")


class CacheFiles:
    """The files below one folder, which is open. Its methods raise OSError, FileNotFoundError if there is no folder,
    and CacheError for what others could have written.

    Args:
        folders: the folder itself as ``"."`` and those in it, by name, as far as they are there.
        trusts_others: whether it does not matter who could write there.
    """

    def __init__(self, path: Path, folders: Mapping[str, Folder], *, trusts_others: bool) -> None:
        self.path, self._folders, self.trusts_others = path, folders, trusts_others

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path, *, trusts_others: bool, make: bool = False) -> Iterator[CacheFiles]:
        """Open the folder at a path and those in it, and check who could write there.

        Args:
            path: where.
            trusts_others: whether it does not matter who could write there.
            make: whether to make what is missing, for the user alone.
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
        """The folder of what is stored."""
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
        """Sorted names of all files in the places of entries."""
        found = []
        for name in self._names("entries"):
            if not _FORMER.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    found.append((name, self.entries.status(name)))
        return found

    def read(self, name: str) -> bytes | None:
        """Read the bytes of an entry; None if there is none, or something else: a pipe, a folder, a link, ...

        Raises:
            FileNotFoundError: if nothing is there.
        """
        if not _may_hold_entry(self.entries.status(name)):  # opening a device may do something
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
        """Put data in the place of a key's entry, whatever is there. Only for the holder of its lock."""
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
        """Note that an entry is used; not where nothing can be written: nothing can be removed there either."""
        time_ns = self._next_use()
        with contextlib.suppress(OSError):
            self.entries.set_time(name, time_ns)

    def remove(self, name: str) -> bool:
        """Remove what is in the place of an entry and return whether it was still there."""
        return self.entries.remove(name)

    def sweep(self) -> None:
        """Remove what killed processes have left, and the first layout's entries; what cannot be removed stays."""
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
        """Hold the lock of a key if nobody does, and say whether it was so; its file is gone then."""
        name = lock_name(key)
        descriptor = try_lock(self.locks, name)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                unlock(self.locks, name, descriptor)

    def _next_use(self) -> int:
        """Return a time after that of every earlier use, and keep it as that of the last one."""
        folder, time_ns = self._folder("."), time.time_ns()
        with contextlib.suppress(OSError):
            time_ns = max(time_ns, folder.status(_CLOCK).st_mtime_ns + _TICK)
        with contextlib.suppress(OSError):
            os.close(folder.open(_CLOCK, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK))
            folder.set_time(_CLOCK, time_ns)
        return time_ns

    def not_before(self, time_ns: int) -> None:
        """Let later uses count as later than ``time_ns``, which was found on an entry."""
        with contextlib.suppress(OSError):
            folder = self._folder(".")
            if folder.status(_CLOCK).st_mtime_ns < time_ns:
                folder.set_time(_CLOCK, time_ns)


def lock_name(key: str) -> str:
    """Return the name of the lock file of a key."""
    return f"{key}.lock"


def _may_hold_entry(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_BYTES
