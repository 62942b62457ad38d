"""Files that a user names: read if they are what they should be, written so that a failure leaves the old one."""

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
"""Of a file that is read: the largest of the project's own has a quarter of it."""


def read_text(path: Path) -> str:
    """Read a text file. Every text file that a user can name is read by this function.

    Raises:
        MissingFileError: if it is not there.
        FileError: if it cannot be read, is no regular file, is larger than MOST_BYTES or is not UTF-8.
    """
    data = read_bytes(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(path, f"is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})") from None


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file, at most ``most``.

    Raises:
        MissingFileError, FileError: as ``read_text`` does.
    """
    with errors_of(path, "cannot be read: "):
        # Before it is opened too: a device may act on that. Opened so, a fifo in its place does not wait for a writer.
        _check_regular(path, path.stat())
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with os.fdopen(descriptor, "rb") as file:
            _check_regular(path, os.fstat(file.fileno()))
            data = file.read(most + 1)  # it may say that it has 0 bytes, or grow
    if len(data) > most:
        raise FileError(path, f"is too large: at most {most >> 20} MiB is read")
    return data


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise FileError(path, f"cannot be read: {os.strerror(errno.EISDIR)}")
    if not stat.S_ISREG(status.st_mode):
        raise FileError(path, "is no regular file, and is not read: copy what it gives into one")


def check_replaceable(path: Path) -> None:
    """Refuse a place that anything but a regular file has: a device or a fifo would be gone, and all that use it fail.

    Raises:
        FileError: for such a place.
    """
    with errors_of(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):  # of a folder its maker tells
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise FileError(path, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise FileError(path, "is no regular file, and is not written over: name another file")


def is_file(path: Path) -> bool:
    """Whether there is a regular file; False in a folder that cannot be read, and for an impossible name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def resolved(path: Path) -> Path:
    """Return a path without links and dots; one that leads nowhere, as a loop of links does, stays as it is."""
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
    """Whether a file holds a text and nothing else.

    Raises:
        FileError: if it cannot be read.
    """
    data = text.encode("utf-8")
    return is_file(path) and _size(path) == len(data) and read_bytes(path, max(MOST_BYTES, len(data))) == data


def _size(path: Path) -> int:
    with errors_of(path, "cannot be read: "):
        return path.stat().st_size


def write_if_changed(path: Path, text: str) -> bool:
    """Make ``path`` hold ``text`` (UTF-8) and return whether it had to be written.

    The new file takes the old one's place in one step: a reader sees either of them whole, and a failed write changes
    nothing.

    Raises:
        FileError: when the folder cannot be written, or the path is one; it names ``path``.
    """
    return write_all({path: text})[path]


def write_all(texts: Mapping[Path, str]) -> dict[Path, bool]:
    """Do the same for several files that belong together, and return of each whether it had to be written.

    All of them are written beside the old ones before the first takes a place: a full disk changes none.

    Raises:
        FileError: as above.
    """
    changed: dict[Path, bool] = {}
    staged: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            with errors_of(path):  # it names the requested file, not its stand-in
                check_replaceable(path)
                changed[path] = not holds(path, text)
                if changed[path]:
                    _make_folder(path.parent)
                    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
                    with temporary.open("xb") as file:  # x: a link that somebody put there is not followed
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
    """Keep other processes that lock a folder waiting: between reading a file of it and writing it anew.

    The folder is made if it is not there. On a file system without locks nobody waits.

    Raises:
        FileError: if the folder cannot be made or opened.
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
    """Turn what the file system says of a path into one error; the boundary to it."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingFileError(path, f"{doing}{error.strerror or error}") from error
    except OSError as error:
        raise FileError(path, f"{doing}{error.strerror or error}") from error
    except ValueError as error:  # a null byte, or a character that no file system has
        raise FileError(path, f"is not the name of a file: {error}") from None


def display_path(path: Path) -> str:
    """A path relative to the current folder, if it is inside, on one line."""
    return one_line(relative_to_here(path), MOST_OF_PLACE)


def relative_to_here(path: Path) -> str:
    """A path relative to the current folder, if it is inside."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
