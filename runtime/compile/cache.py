"""The kernel cache: compiled code on disk, keyed by everything it depends on."""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from codegen.wording import shown
from runtime.compile import cache_environment
from runtime.compile.cache_entry import Entry, Identity
from runtime.compile.cache_eviction import make_room
from runtime.compile.cache_files import CacheFiles, lock_name
from runtime.compile.cache_folder import Folder
from runtime.compile.cache_lock import locked
from runtime.errors import CacheError


@dataclass(frozen=True)
class Stored:
    """What is in the place of an entry.

    Attributes:
        path: where.
        size: its bytes.
        entry: the entry, or None if it is damaged or something else.
    """

    path: Path
    size: int
    entry: Entry | None


class KernelCache:
    """Compiled kernels in a folder. Any number of threads and processes may use it at the same time.

    Args:
        folder: where; by default ``CODEGEN_CACHE_DIR``, else the user's cache folder.
        max_bytes: least recently used entries go when the cache grows beyond this, but never the one just written; by
            default ``CODEGEN_CACHE_MAX_BYTES``, else 512 MiB.

    Raises:
        CacheError: for a variable of the environment that makes no sense, or without a home folder.
    """

    def __init__(self, folder: Path | str | None = None, max_bytes: int | None = None) -> None:
        self.folder = Path(folder) if folder else cache_environment.default_folder()
        self.max_bytes = max_bytes or cache_environment.max_bytes()
        self._lock_seconds = cache_environment.lock_seconds()
        self._trusts_others = cache_environment.trusts_others()

    def get_or_build(self, identity: Identity, build: Callable[[], tuple[bytes, str]]) -> tuple[Entry, bool]:
        """Entry of a kernel, and whether it was there; a missing one is built and published once for all processes.

        Args:
            identity: of the kernel. An entry of another one does not count, wherever it lies.
            build: returns the code and the compiler's log.

        Raises:
            CacheError: when the entry is missing and the folder cannot be written, when others could write there, or
                when another process builds it for too long.
        """
        entry = self._load(identity)
        if entry is not None:
            return entry, True
        with self._locked(identity):
            entry = self._load(identity)
            if entry is not None:
                return entry, True
            code, log = build()
            entry = Entry(identity, log, code)
            with self._opened(make=True) as files:  # others may have removed the folders meanwhile
                self._put(files, entry)
            return entry, False

    def find(self, identity: Identity) -> Entry | None:
        """Return the entry of a kernel, or None if it is not there.

        Raises:
            CacheError: when the folder cannot be read, or others could write there.
        """
        return self._load(identity)

    def keep_findings(self, identity: Identity, findings: str) -> None:
        """Put what was found out about a kernel's code into its entry, if that is still there.

        Raises:
            CacheError: when the folder cannot be written, or others could write there.
        """
        entry = self._load(identity)
        if entry is None or entry.findings == findings:
            return
        with self._opened(make=True) as files, files.held_if_free(identity.key) as free:
            entry = self._found(files, identity) if free else None  # another one writes it, and finds out the same
            if entry is not None:
                self._put(files, replace(entry, findings=findings))

    def file_of(self, key: str) -> Path | None:
        """Return the file that holds the entry of a key, if it is there.

        Raises:
            CacheError: when the folder cannot be read, or others could write there.
        """
        with self._opened() as files, contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(files.entries.status(key).st_mode):
                return self._place(key)
        return None

    def entries(self) -> Iterator[Stored]:
        """Yield what is stored. What another process removes meanwhile is left out.

        Raises:
            CacheError: when the folder cannot be read, or is none, or others could write there; one that is not there
                has no entries.
        """
        with self._opened() as files:
            found = files.stored()
        for name, status in found:
            there, entry = False, None
            with self._opened() as files, contextlib.suppress(FileNotFoundError):
                entry, there = self._unpacked(files, name), True
            if there:
                yield Stored(self._place(name), status.st_size, entry)

    def clear(self) -> int:
        """Remove every entry and return how many there were.

        Raises:
            CacheError: when the folder cannot be read or written, or is none, or others could write there.
        """
        with self._opened() as files:
            count = sum(files.remove(name) for name, _ in files.stored())
            files.sweep()
            return count

    def _load(self, identity: Identity) -> Entry | None:
        """Return the entry if it is there. Nothing is written for it that must be, and nobody waited for."""
        with self._opened() as files:
            entry = self._found(files, identity)
            if entry is not None:
                files.touch(identity.key)
            return entry

    def _found(self, files: CacheFiles, identity: Identity) -> Entry | None:
        with contextlib.suppress(FileNotFoundError):
            entry = self._unpacked(files, identity.key)
            return entry if entry is not None and entry.identity == identity else None
        return None

    def _unpacked(self, files: CacheFiles, name: str) -> Entry | None:
        """Return the entry in a file, or None if it is damaged or no entry of this place."""
        data = files.read(name)
        entry = None if data is None else Entry.unpack(data)
        return entry if entry is not None and entry.identity.key == name else None

    def _place(self, name: str) -> Path:
        return self.folder / "entries" / name

    def _put(self, files: CacheFiles, entry: Entry) -> None:
        """Write an entry, whose lock is held, and make room for it."""
        data = entry.pack()
        files.write(entry.identity.key, data)
        make_room(files, entry.identity.key, len(data), self.max_bytes)

    @contextlib.contextmanager
    def _locked(self, identity: Identity) -> Iterator[None]:
        """Hold the lock of a kernel. Errors of the file system inside are not the lock's."""
        with contextlib.ExitStack() as stack:
            with self._usable():
                name, purpose = lock_name(identity.key), f"to compile {identity.stem}"
                stack.enter_context(locked(self._lock_folder, name, purpose, self._lock_seconds))
            yield

    @contextlib.contextmanager
    def _lock_folder(self) -> Iterator[Folder]:
        with CacheFiles.opened(self.folder, make=True, trusts_others=self._trusts_others) as files:
            yield files.locks

    @contextlib.contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[CacheFiles]:
        """Open the folders and check them; an error of the file system inside says what to do."""
        with (
            self._usable(),
            CacheFiles.opened(self.folder, make=make, trusts_others=self._trusts_others) as files,
        ):
            yield files

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Turn an error of the file system into one that says what to do."""
        try:
            yield
        except OSError as error:
            place = f"; it was {error.filename}" if error.filename else ""
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise CacheError(
                f"the kernel cache {self.folder} cannot be used ({error.strerror or error}); "
                f"{'free some space (codegen cache clear), or ' if full else ''}"
                f"set CODEGEN_CACHE_DIR to a folder that can be written{place}"
            ) from None
        except ValueError as error:  # a null byte, or a character that no file system has
            raise CacheError(f"{shown(str(self.folder))} cannot be the folder of the kernel cache: {error}") from None
