"""The kernel cache: compiled code on disk, keyed by everything it depends on."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from codegen.wording import shown
from runtime.compile import cache_environment
from runtime.compile.cache_entry import Entry, Identity
from runtime.compile.cache_eviction import make_room
from runtime.compile.cache_files import CacheFiles
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
        self._files = CacheFiles(self.folder, trusts_others=cache_environment.trusts_others())

    def get_or_build(self, identity: Identity, build: Callable[[], tuple[bytes, str]]) -> tuple[Entry, bool]:
        """Return the entry of a kernel and whether it was there; else build and publish it, once for all processes.

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
        with self._usable():
            self._files.prepare()
        with self._locked(identity):
            entry = self._load(identity)
            if entry is not None:
                return entry, True
            code, log = build()
            entry = Entry(identity, log, code)
            self._publish(entry)
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
        if entry is not None and entry.findings != findings:
            self._publish(replace(entry, findings=findings))

    def file_of(self, key: str) -> Path | None:
        """Return the file that holds the entry of a key, if it is there.

        Raises:
            CacheError: when the folder cannot be read, or others could write there.
        """
        with self._usable():
            self._files.check()
            path = self._files.path(key)
            return path if path.is_file() else None

    def entries(self) -> Iterator[Stored]:
        """Yield what is stored. What another process removes meanwhile is left out.

        Raises:
            CacheError: when the folder cannot be read, or is none, or others could write there; one that is not there
                has no entries.
        """
        with self._usable():
            self._files.check()
            found = self._files.stored()
        for path, status in found:
            with self._usable(), contextlib.suppress(FileNotFoundError):
                yield Stored(path, status.st_size, self._unpacked(path))

    def clear(self) -> int:
        """Remove every entry and return how many there were.

        Raises:
            CacheError: when the folder cannot be read or written, or is none, or others could write there.
        """
        with self._usable():
            self._files.check()
            count = sum(self._files.remove(path) for path, _ in self._files.stored())
            self._files.sweep()
            return count

    def _load(self, identity: Identity) -> Entry | None:
        """Return the entry if it is there. Nothing is written for it that must be, and nobody waited for."""
        with self._usable(), contextlib.suppress(FileNotFoundError):
            self._files.check()
            path = self._files.path(identity.key)
            entry = self._unpacked(path)
            if entry is not None and entry.identity == identity:
                self._files.touch(path)
                return entry
        return None

    def _unpacked(self, path: Path) -> Entry | None:
        """Return the entry in a file, or None if it is damaged or no entry of this place."""
        data = self._files.read(path)
        entry = None if data is None else Entry.unpack(data)
        return entry if entry is not None and entry.identity.key == path.name else None

    def _publish(self, entry: Entry) -> None:
        data = entry.pack()
        with self._usable():
            path = self._files.write(entry.identity.key, data)
            make_room(self._files, path, len(data), self.max_bytes)

    @contextlib.contextmanager
    def _locked(self, identity: Identity) -> Iterator[None]:
        """Hold the lock of a kernel. Errors of the file system inside are not the lock's."""
        with contextlib.ExitStack() as stack:
            with self._usable():
                lock = locked(self._files.lock(identity.key), f"to compile {identity.stem}", self._lock_seconds)
                stack.enter_context(lock)
            yield

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
