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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from codegen.errors import MOST_OF_MESSAGE
from codegen.wording import one_line
from runtime.compile.cache_environment import LOCK_SECONDS
from runtime.compile.cache_folder import Folder
from runtime.errors import CacheError

NOTICE_SECONDS = 2.0  # after which a process that waits says so
_PAUSES = (0.01, 0.25)  # seconds between two attempts, at first and at most
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def locked(
    opened: Callable[[], AbstractContextManager[Folder]], name: str, purpose: str, seconds: float
) -> Iterator[None]:
    """Hold a lock; where another holds it, wait, say so on stderr after two seconds, and give up after ``seconds``.

    Args:
        opened: opens the folder of the lock file, at each attempt: others may have removed it meanwhile.
        name: of the file in it.
        purpose: what it is wanted for, as the message says it.
        seconds: how long to wait.

    Raises:
        CacheError: when another holds it for so long, or where there are no locks.
        OSError: when the file cannot be opened.
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
    """Return a descriptor that holds the lock, or None if another one does.

    Raises:
        CacheError: where there are no locks.
        OSError: when the file cannot be opened, or is none.
    """
    descriptor = folder.open(name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", folder.name(name))
        if _flock(folder.name(name), descriptor) and _is_there(folder, name, descriptor):
            with contextlib.suppress(OSError):  # a full disk: then nobody can say who holds it
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def unlock(folder: Folder, name: str, descriptor: int) -> None:
    """Remove the lock file while it is held, then release it: processes that waited for it see that it is gone."""
    with contextlib.suppress(OSError):  # a file that stays is locked by the next one
        if _is_there(folder, name, descriptor):  # not after somebody emptied the folder by hand
            folder.remove(name)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if a forked child has the descriptor too
    os.close(descriptor)


def _flock(path: str, descriptor: int) -> bool:
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


def _is_there(folder: Folder, name: str, descriptor: int) -> bool:
    """Whether the open file still has that name: a lock on a file that was removed excludes no process."""
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
    if sys.stderr is not None:  # there is none under pythonw
        sys.stderr.write(one_line(message, MOST_OF_MESSAGE) + "\n")
        sys.stderr.flush()
