"""The kernel cache: compiled code on disk, keyed by everything it depends on.

Storage, atomic publication and eviction are cuda-core's FileStreamProgramCache. Added here: a digest in every entry,
checked at each read, and one lock for each key, so that many processes compile a kernel once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from cuda.core.utils import FileStreamProgramCache
from filelock import FileLock

from runtime.errors import CacheError

SCHEMA = "1"
MAGIC = "codegen-kernel"
_LENGTH_BYTES = 8
_CLOCK_TICK = 0.02  # seconds within which a file system may give files the same time
DEFAULT_MAX_BYTES = 512 << 20


def cache_key(
    *, spec: str, source: str, compiler: str, options: tuple[str, ...], headers: str, target: str, schema: str = SCHEMA
) -> str:
    """Return the SHA-256 over everything a kernel's code depends on, each part labelled and length-prefixed.

    Args:
        spec: canonical JSON of the spec.
        source: the rendered CUDA.
        compiler: compiler and package version.
        options: compiler options in order, without folders.
        headers: digest of the included headers' content.
        target: "cubin" or "ptx".
        schema: version of this layout.
    """
    digest = hashlib.sha256()
    parts = {
        "schema": schema,
        "spec": spec,
        "source": source,
        "compiler": compiler,
        "headers": headers,
        "target": target,
    }
    for label, value in [*parts.items(), *((f"option {i}", option) for i, option in enumerate(options))]:
        data = value.encode()
        digest.update(f"{label}:{len(data)}:".encode() + data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Entry:
    """One compiled kernel.

    Attributes:
        stem: the kernel's name.
        target: "cubin" or "ptx".
        log: the compiler's log.
        code: the code itself.
    """

    stem: str
    target: str
    log: str
    code: bytes

    def pack(self) -> bytes:
        """Return the entry as bytes: the code, so that CUDA's tools can read the file, then a footer with a digest."""
        about = {"magic": MAGIC, "stem": self.stem, "target": self.target, "log": self.log, "sha256": self._digest()}
        footer = json.dumps(about, sort_keys=True).encode()
        return self.code + footer + len(footer).to_bytes(_LENGTH_BYTES, "little")

    @classmethod
    def unpack(cls, data: bytes) -> Entry | None:
        """Return the entry, or None when the bytes are not a whole, untouched entry."""
        end = len(data) - _LENGTH_BYTES
        start = end - int.from_bytes(data[max(end, 0) :], "little")
        if start < 0:
            return None
        try:
            about = json.loads(data[start:end])
            entry = cls(about["stem"], about["target"], about["log"], data[:start])
            intact = about["magic"] == MAGIC and about["sha256"] == entry._digest()
        except (ValueError, KeyError, TypeError):
            return None
        return entry if intact else None

    def _digest(self) -> str:
        named = json.dumps([self.stem, self.target, self.log]).encode()
        return hashlib.sha256(named + b"\n" + self.code).hexdigest()


class KernelCache:
    """Compiled kernels in a folder.

    Args:
        folder: where; by default ``CODEGEN_CACHE_DIR``, else the user's cache folder.
        max_bytes: least recently used entries go when the cache grows beyond this, but never the one just written; by
            default ``CODEGEN_CACHE_MAX_BYTES``, else 512 MiB.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int | None = None) -> None:
        self.folder = folder or default_folder()
        self.max_bytes = max_bytes or _max_bytes_from_environment()

    def get_or_build(self, key: str, build: Callable[[], Entry]) -> tuple[Entry, bool]:
        """Return the entry of ``key`` and whether it was there; else build and publish it, once for all processes.

        Raises:
            CacheError: when the entry is missing and the folder cannot be written.
        """
        with self._usable():
            entry = self._read(key)
            if entry is not None:
                return entry, True
            locks = self.folder / "locks"
            locks.mkdir(exist_ok=True)
            with FileLock(locks / f"{key}.lock"):
                entry = self._read(key)
                if entry is not None:
                    return entry, True
                entry = build()
                self._write(key, entry.pack())
                return entry, False

    def file_of(self, code: bytes) -> Path | None:
        """Return the file that holds ``code``.

        Raises:
            CacheError: when the folder cannot be read.
        """
        return next((path for path, entry in self.entries() if entry is not None and entry.code == code), None)

    def entries(self) -> Iterator[tuple[Path, Entry | None]]:
        """Yield each stored file with its entry, or with None when it is corrupt.

        Raises:
            CacheError: when the folder cannot be read, or is none; one that is not there has no entries.
        """
        for path in self._files():
            yield path, Entry.unpack(path.read_bytes())

    def clear(self) -> int:
        """Remove every entry and return how many there were.

        Raises:
            CacheError: when the folder cannot be read or written, or is none.
        """
        with self._usable():
            count = len(self._files())
            if count:
                self._store(self.max_bytes).clear()
            for lock in (self.folder / "locks").glob("*.lock"):
                lock.unlink(missing_ok=True)
        return count

    def _files(self) -> list[Path]:
        entries = self.folder / "entries"
        with self._usable(), contextlib.suppress(FileNotFoundError):
            next(entries.iterdir(), None)  # rglob finds nothing where it may not look
        return sorted(path for path in entries.rglob("*") if path.is_file())

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Turn an error of the file system into one that says what to do."""
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"the kernel cache {self.folder} cannot be used ({error.strerror or error}); "
                "set CODEGEN_CACHE_DIR to a folder that can be written"
            ) from None

    def _store(self, max_bytes: int) -> FileStreamProgramCache:
        return FileStreamProgramCache(self.folder, max_size_bytes=max_bytes)

    def _read(self, key: str) -> Entry | None:
        data = self._store(self.max_bytes).get(key.encode())
        return None if data is None else Entry.unpack(bytes(data))

    def _write(self, key: str, data: bytes) -> None:
        # The store would drop an entry beyond the limit at once, and it would be built anew at each call.
        store = self._store(max(self.max_bytes, len(data)))
        store[key.encode()] = data
        if store.get(key.encode()) is None:  # it was no newer than the others, by the file system's clock
            time.sleep(_CLOCK_TICK)
            store[key.encode()] = data


def default_folder() -> Path:
    """Return the folder of the cache."""
    given = os.environ.get("CODEGEN_CACHE_DIR")
    return Path(given) if given else platformdirs.user_cache_path("sparse-kernel-codegen")


def _max_bytes_from_environment() -> int:
    given = os.environ.get("CODEGEN_CACHE_MAX_BYTES")
    if given is None:
        return DEFAULT_MAX_BYTES
    if not given.isdecimal() or int(given) == 0:  # ² is a digit, but not a number
        raise CacheError(f"CODEGEN_CACHE_MAX_BYTES is {given!r}; a positive number of bytes is expected")
    return int(given)
