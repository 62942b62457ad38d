"""The kernel cache: compiled code on disk, keyed by everything that the code depends on."""

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
    """A file where an entry belongs.

    Attributes:
        path: the file.
        size: bytes of the file.
        entry: the entry; None if the file is damaged or is not an entry.
    """

    path: Path
    size: int
    entry: Entry | None


class KernelCache:
    """Compiled kernels in a folder, which any number of threads and processes may share.

    Args:
        folder: the folder; by default ``CODEGEN_CACHE_DIR``, else the user's cache folder.
        max_bytes: size limit. A larger cache evicts its least recently used entries, but never the newest one; by
            default ``CODEGEN_CACHE_MAX_BYTES``, else 512 MiB.

    Raises:
        CacheError: if an environment variable has an invalid value, or there is no home folder.
    """

    def __init__(self, folder: Path | str | None = None, max_bytes: int | None = None) -> None:
        self.folder = Path(folder) if folder else cache_environment.default_folder()
        self.max_bytes = max_bytes or cache_environment.max_bytes()
        self._lock_seconds = cache_environment.lock_seconds()
        self._trusts_others = cache_environment.trusts_others()

    def get_or_build(self, identity: Identity, build: Callable[[], tuple[bytes, str]]) -> tuple[Entry, bool]:
        """Get a kernel's entry and whether it was cached. A missing entry is built once for all processes.

        Args:
            identity: the kernel's identity. An entry with another identity is ignored.
            build: returns the code and the compiler's log.

        Raises:
            CacheError: if the entry is missing and the folder is not writable, if other users could write to the
                folder, or if another process holds the entry's lock for too long.
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
            with self._opened(make=True) as files:  # another process may have removed the folders
                self._put(files, entry)
            return entry, False

    def find(self, identity: Identity) -> Entry | None:
        """Get the entry of a kernel; None if it is not cached.

        Raises:
            CacheError: if the folder cannot be read, or other users could write to it.
        """
        return self._load(identity)

    def keep_findings(self, identity: Identity, findings: str) -> None:
        """Store findings about a kernel's code in its entry, if the entry still exists.

        Raises:
            CacheError: if the folder cannot be written, or other users could write to it.
        """
        entry = self._load(identity)
        if entry is None or entry.findings == findings:
            return
        with self._opened(make=True) as files, files.held_if_free(identity.key) as free:
            entry = self._found(files, identity) if free else None  # another process writes the same findings
            if entry is not None:
                self._put(files, replace(entry, findings=findings))

    def file_of(self, key: str) -> Path | None:
        """Get the file of a key's entry; None if the key is not cached.

        Raises:
            CacheError: if the folder cannot be read, or other users could write to it.
        """
        with self._opened() as files, contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(files.entries.status(key).st_mode):
                return self._place(key)
        return None

    def entries(self) -> Iterator[Stored]:
        """Yield the stored files. A file that another process removes meanwhile is skipped.

        Raises:
            CacheError: if the path is not a readable folder, or other users could write to it. A missing folder has no
                entries.
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
        """Remove every entry and return the number of removed entries.

        Raises:
            CacheError: if the path is not a writable folder, or other users could write to it.
        """
        with self._opened() as files:
            count = sum(files.remove(name) for name, _ in files.stored())
            files.sweep()
            return count

    def _load(self, identity: Identity) -> Entry | None:
        """The entry if it is cached, without waiting for a lock or requiring write access."""
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
        """The entry in a file; None if the file is damaged or the entry belongs elsewhere."""
        data = files.read(name)
        entry = None if data is None else Entry.unpack(data)
        return entry if entry is not None and entry.identity.key == name else None

    def _place(self, name: str) -> Path:
        return self.folder / "entries" / name

    def _put(self, files: CacheFiles, entry: Entry) -> None:
        """Write an entry and evict old ones. The caller holds the entry's lock."""
        data = entry.pack()
        files.write(entry.identity.key, data)
        make_room(files, entry.identity.key, len(data), self.max_bytes)

    @contextlib.contextmanager
    def _locked(self, identity: Identity) -> Iterator[None]:
        """Hold the lock of a kernel. File system errors inside the block are not attributed to the lock."""
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
        """Open and check the folders. A file system error inside the block becomes a CacheError with a remedy."""
        with (
            self._usable(),
            CacheFiles.opened(self.folder, make=make, trusts_others=self._trusts_others) as files,
        ):
            yield files

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Turn a file system error into a CacheError with a remedy."""
        try:
            yield
        except OSError as error:
            place = f"; it was {error.filename}" if error.filename else ""
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise CacheError(
                f"the kernel cache {self.folder} cannot be used ({error.strerror or error}); "
                f"{'free some space (codegen cache clear), or ' if full else ''}"
                f"set CODEGEN_CACHE_DIR to a writable folder{place}"
            ) from None
        except ValueError as error:  # a null byte, or a character that file systems do not support
            raise CacheError(f"{shown(str(self.folder))} cannot be the folder of the kernel cache: {error}") from None
