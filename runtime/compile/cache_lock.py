"""One process at a time: a lock file that its holder removes, and that is free once the holder is dead."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from codegen.errors import MOST_OF_MESSAGE
from codegen.wording import one_line
from runtime.compile.cache_environment import LOCK_SECONDS
from runtime.errors import CacheError

NOTICE_SECONDS = 2.0  # after which a process that waits says so
_PAUSES = (0.01, 0.25)  # seconds between two attempts, at first and at most
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def locked(path: Path, purpose: str, seconds: float) -> Iterator[None]:
    """Hold a lock; where another holds it, wait, say so on stderr after two seconds, and give up after ``seconds``.

    Args:
        path: the lock file.
        purpose: what it is wanted for, as the message says it.
        seconds: how long to wait.

    Raises:
        CacheError: when another holds it for so long, or where there are no locks.
        OSError: when the file cannot be opened.
    """
    start, pause, told = time.monotonic(), _PAUSES[0], False
    while (descriptor := try_lock(path)) is None:
        waited = time.monotonic() - start
        if waited >= seconds:
            raise CacheError(
                f"gave up waiting {purpose}: {_holder(path)} has held {path} for {waited:.0f} s; "
                f"end it if it hangs, or set {LOCK_SECONDS}, which is {seconds:g}, to wait longer"
            )
        if waited >= NOTICE_SECONDS and not told:
            told = True
            _say(
                f"codegen: process {os.getpid()} waits {purpose}: {_holder(path)} holds {path}; "
                f"it gives up after {seconds:g} s ({LOCK_SECONDS})"
            )
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
    try:
        yield
    finally:
        unlock(path, descriptor)


def try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock, or None if another one does.

    Raises:
        CacheError: where there are no locks.
        OSError: when the file cannot be opened, or is none.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        if _flock(path, descriptor) and _is_at(path, descriptor):
            with contextlib.suppress(OSError):  # a full disk: then nobody can say who holds it
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def unlock(path: Path, descriptor: int) -> None:
    """Remove the lock file while it is held, then give it up: whoever waited for this file sees that it is gone."""
    with contextlib.suppress(OSError):  # a file that stays is locked by the next one
        if _is_at(path, descriptor):  # not after somebody emptied the folder by hand
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if a forked child has the descriptor too
    os.close(descriptor)


def _flock(path: Path, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # some file systems say the latter of a lock that is held
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise CacheError(
            f"the file system of {path} has no locks ({error.strerror}), which keep processes from compiling a kernel "
            "at the same time; set CODEGEN_CACHE_DIR to a folder on another one, such as a local disk"
        ) from None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the open file is still the one at ``path``: a lock on one that was removed holds nobody back."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            told = file.read(200).decode("ascii", errors="replace")
    except OSError:
        told = ""
    return told if told.isprintable() and told else "another process"


def _say(message: str) -> None:
    if sys.stderr is not None:  # there is none under pythonw
        sys.stderr.write(one_line(message, MOST_OF_MESSAGE) + "\n")
        sys.stderr.flush()
