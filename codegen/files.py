"""Writing files so that a failure leaves the old one."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


def write_if_changed(path: Path, text: str) -> bool:
    """Make ``path`` hold ``text`` (UTF-8) and return whether it had to be written.

    The new file takes the old one's place in one step: a reader sees either of them whole, and a failed write changes
    nothing.

    Raises:
        OSError: when the folder cannot be written, or the path is one; it names ``path``.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    data = text.encode("utf-8")
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:  # names the file that was asked for, of whose stand-in nobody knows
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return True
