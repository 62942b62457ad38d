"""Writing files so that a failure leaves the old one."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path


def write_if_changed(path: Path, text: str) -> bool:
    """Make ``path`` hold ``text`` (UTF-8) and return whether it had to be written.

    The new file takes the old one's place in one step: a reader sees either of them whole, and a failed write changes
    nothing.

    Raises:
        OSError: when the folder cannot be written, or the path is one; it names ``path``.
    """
    return write_all({path: text})[path]


def write_all(texts: Mapping[Path, str]) -> dict[Path, bool]:
    """Do the same for several files that belong together, and return of each whether it had to be written.

    All of them are written beside the old ones before the first takes a place: a full disk changes none.

    Raises:
        OSError: as above.
    """
    changed: dict[Path, bool] = {}
    staged: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            data = text.encode("utf-8")
            changed[path] = not (path.is_file() and path.read_bytes() == data)
            if changed[path]:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
                with _names(path), temporary.open("xb") as file:  # x: a link that somebody put there is not followed
                    staged[path] = temporary
                    file.write(data)
        for path, temporary in staged.items():
            with _names(path):
                temporary.replace(path)
    finally:
        for temporary in staged.values():
            with contextlib.suppress(OSError):
                temporary.unlink()
    return changed


@contextlib.contextmanager
def _names(path: Path) -> Iterator[None]:
    """Let an error name the file that was asked for, of whose stand-in nobody knows."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
