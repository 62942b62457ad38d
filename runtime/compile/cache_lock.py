"""Mutual exclusion of processes by a lock file. Its holder removes it, and the death of the holder frees it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from codegen.errors import MOST_OF_MESSAGE
from codegen.wording import one_line
from runtime.compile.cache_environment import LOCK_SECONDS
from runtime.compile.cache_folder import Folder
from runtime.errors import CacheError

NOTICE_SECONDS = 2.0  # after which a waiting process reports that it waits
_PAUSES = (0.01, 0.25)  # seconds between two attempts: initial, maximal
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def locked(
    opened: Callable[[], AbstractContextManager[Folder]], name: str, purpose: str, seconds: float
) -> Iterator[None]:
    """Hold a lock. A process that waits more than 2 s prints who holds the lock, and gives up after ``seconds``.

    Args:
        opened: opens the folder of the lock file. Each attempt calls it, since another process may remove the folder.
        name: name of the lock file.
        purpose: purpose of the lock, for messages.
        seconds: time limit.

    Raises:
        CacheError: after the time limit, or if the file system has no locks.
        OSError: if the file cannot be opened.
    """
    start, pause, told = time.monotonic(), _PAUSES[0], False
    while True:
        with opened() as folder:
            descriptor = try_lock(folder, name)
            if descriptor is not None:
                try:
                    yield
                finally:
                    unlock(folder, name, descriptor)
                return
            waited = time.monotonic() - start
            if waited >= seconds:
                raise CacheError(
                    f"gave up waiting {purpose}: {_holder(folder, name)} has held {folder.name(name)} for "
                    f"{waited:.0f} s; end it if it hangs, or set {LOCK_SECONDS}, which is {seconds:g}, to wait longer"
                )
            if waited >= NOTICE_SECONDS and not told:
                told = True
                _say(
                    f"codegen: process {os.getpid()} waits {purpose}: {_holder(folder, name)} holds "
                    f"{folder.name(name)}; it gives up after {seconds:g} s ({LOCK_SECONDS})"
                )
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])


def try_lock(folder: Folder, name: str) -> int | None:
    """Acquire the lock: its descriptor, or None if another process holds it.

    Raises:
        CacheError: if the file system has no locks.
        OSError: if the file cannot be opened or is not a regular file.
    """
    descriptor = folder.open(name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", folder.name(name))
        if _flock(folder.name(name), descriptor) and _is_there(folder, name, descriptor):
            with contextlib.suppress(OSError):  # the disk is full: messages cannot name the holder
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def unlock(folder: Folder, name: str, descriptor: int) -> None:
    """Remove the lock file before releasing the lock, so that waiting processes notice that the file is gone."""
    with contextlib.suppress(OSError):  # the next process locks a file that remains
        if _is_there(folder, name, descriptor):  # the folder may have been emptied by hand
            folder.remove(name)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone does not unlock if a forked child has the descriptor
    os.close(descriptor)


def _flock(path: str, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # some file systems report the latter for a held lock
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise CacheError(
            f"the file system of {path} has no locks ({error.strerror}), which keep processes from compiling a kernel "
            "at the same time; set CODEGEN_CACHE_DIR to a folder on another one, such as a local disk"
        ) from None
    return True


def _is_there(folder: Folder, name: str, descriptor: int) -> bool:
    """Whether the open file still has that name. A lock on a removed file excludes no process."""
    try:
        return os.path.samestat(folder.status(name), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(folder: Folder, name: str) -> str:
    try:
        with os.fdopen(folder.open(name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            told = file.read(200).decode("ascii", errors="replace")
    except OSError:
        told = ""
    return told if told.isprintable() and told else "another process"


def _say(message: str) -> None:
    if sys.stderr is not None:  # None under pythonw
        sys.stderr.write(one_line(message, MOST_OF_MESSAGE) + "\n")
        sys.stderr.flush()
