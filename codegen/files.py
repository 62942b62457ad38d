"""Reading and writing of files that a user names: checked reads, and writes that keep the old file on failure."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from codegen.errors import MOST_OF_PLACE, FileError, MissingFileError
from codegen.wording import one_line

MOST_BYTES = 1 << 20
"""Most bytes of a file to read; four times the largest file of the project."""


def read_text(path: Path) -> str:
    """Text of a file. All text files that a user can name are read here.

    Raises:
        MissingFileError: if the file does not exist.
        FileError: if it cannot be read, is not a regular file, is larger than MOST_BYTES or is not UTF-8.
    """
    data = read_bytes(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(path, f"is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})") from None


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Bytes of a file of at most ``most`` bytes.

    Raises:
        MissingFileError, FileError: like ``read_text``.
    """
    with errors_of(path, "cannot be read: "):
        # Check before opening too, as opening a device may have effects. O_NONBLOCK: a fifo does not wait for a writer.
        _check_regular(path, path.stat())
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb") as file:
            _check_regular(path, os.fstat(file.fileno()))
            data = file.read(most + 1)  # its reported size may be 0, or it may grow
    if len(data) > most:
        raise FileError(path, f"is too large: the limit is {most >> 20} MiB")
    return data


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise FileError(path, f"cannot be read: {os.strerror(errno.EISDIR)}")
    if not stat.S_ISREG(status.st_mode):
        raise FileError(path, "is not a regular file and is not read: copy its contents to a file")


def check_replaceable(path: Path) -> None:
    """Reject a path of anything but a regular file: writing would replace a device or a fifo that others use.

    Raises:
        FileError: for such a path.
    """
    with errors_of(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):  # reported later
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise FileError(path, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise FileError(path, "is not a regular file and is not overwritten: name another file")


def is_file(path: Path) -> bool:
    """Whether a path is a regular file; False in a folder that cannot be read, and for an invalid name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def resolved(path: Path) -> Path:
    """Path without links and dots; a path that cannot be resolved, such as a loop of links, is returned unchanged."""
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError):
        return path


def is_folder(path: Path) -> bool:
    """Whether a path is a folder; False too for a path that cannot exist."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def holds(path: Path, text: str) -> bool:
    """Whether the contents of a file equal a text.

    Raises:
        FileError: if the file cannot be read.
    """
    data = text.encode("utf-8")
    return is_file(path) and _size(path) == len(data) and read_bytes(path, max(MOST_BYTES, len(data))) == data


def _size(path: Path) -> int:
    with errors_of(path, "cannot be read: "):
        return path.stat().st_size


def write_if_changed(path: Path, text: str) -> bool:
    """Write ``text`` (UTF-8) to ``path`` if the file differs; return whether it was written.

    The new file replaces the old one atomically: a reader sees one of them completely, and a failed write changes
    nothing.

    Raises:
        FileError: if the folder cannot be written, or the path is a folder; names ``path``.
    """
    return write_all({path: text})[path]


def write_all(texts: Mapping[Path, str]) -> dict[Path, bool]:
    """Write several files that belong together, like ``write_if_changed``; return for each whether it was written.

    All temporary files are written before the first one is renamed, so that a full disk changes nothing.

    Raises:
        FileError: like ``write_if_changed``.
    """
    changed: dict[Path, bool] = {}
    staged: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            with errors_of(path):  # errors name the requested file, not the temporary one
                check_replaceable(path)
                changed[path] = not holds(path, text)
                if changed[path]:
                    _make_folder(path.parent)
                    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
                    with temporary.open("xb") as file:  # x: does not follow a link that somebody created there
                        staged[path] = temporary
                        file.write(text.encode("utf-8"))
        for path, temporary in staged.items():
            with errors_of(path):
                temporary.replace(path)
    finally:
        for temporary in staged.values():
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()
    return changed


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, for reading a file in it and rewriting it.

    The folder is created if it does not exist. On a file system without locks, nothing is locked.

    Raises:
        FileError: if the folder cannot be created or opened.
    """
    _make_folder(folder)
    with errors_of(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    with errors_of(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def errors_of(path: Path, doing: str = "") -> Iterator[None]:
    """Convert errors of the file system into a FileError with the path."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(path, f"{doing}{error.strerror or error}") from error
    except OSError as error:
        raise FileError(path, f"{doing}{error.strerror or error}") from error
    except ValueError as error:  # a null byte, or a character that file names cannot have
        raise FileError(path, f"is not the name of a file: {error}") from None


def display_path(path: Path) -> str:
    """A path on one line, relative to the current folder if it is inside."""
    return one_line(relative_to_here(path), MOST_OF_PLACE)


def relative_to_here(path: Path) -> str:
    """A path, relative to the current folder if it is inside."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
