"""Whether others could have put code into the cache: who owns the way to it, and who may write there.

What is loaded from the cache runs with the rights of the user. Trusted are the user and root, nobody else.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from codegen.wording import in_shell
from runtime.compile.cache_environment import TRUST_OTHERS
from runtime.errors import CacheError

_MOST_LINKS = 40  # as many as Linux follows


def check_way(folder: Path) -> None:
    """Check all that decides what ``folder`` is: each folder above it, each link on the way, itself.

    Raises:
        CacheError: when somebody else could put another folder there, or files into it.
        OSError: when one of them cannot be looked at. What is not there yet is in order.
    """
    for path, status, last in _way_to(folder):
        reason = _owner_fault(status, parent=not last)
        if not reason and not stat.S_ISLNK(status.st_mode) and (last or not status.st_mode & stat.S_ISVTX):
            reason = _mode_fault(status)  # in a folder such as /tmp (sticky), nobody can replace what others own
        if reason:
            raise _refusal(path, status, reason)


def check(path: Path, status: os.stat_result) -> None:
    """Check a folder or a file of the cache.

    Raises:
        CacheError: when somebody else owns it or could write it.
    """
    reason = _owner_fault(status, parent=False) or _mode_fault(status)
    if reason:
        raise _refusal(path, status, reason)


def _way_to(folder: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Yield each folder and each link that is passed on the way, and whether it is where the way ends."""
    here, todo, links = Path(folder.anchor), list(folder.parts[:0:-1]), 0
    while True:
        try:
            status = here.lstat()
        except FileNotFoundError:
            return
        link = stat.S_ISLNK(status.st_mode)
        yield here, status, not todo and not link
        if link:
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            target = here.readlink()
            todo += target.parts[:0:-1] if target.is_absolute() else target.parts[::-1]
            here = Path(target.anchor) if target.is_absolute() else here.parent
            continue
        if not todo:
            return
        part = todo.pop()
        here = here.parent if part == ".." else here / part


def _owner_fault(status: os.stat_result, *, parent: bool) -> str:
    trusted = {os.geteuid(), 0, *(_unknown_outside() if parent else ())}
    return "" if status.st_uid in trusted else f"belongs to {_name_of(status.st_uid)}"


def _mode_fault(status: os.stat_result) -> str:
    mode = stat.S_IMODE(status.st_mode)
    if mode & stat.S_IWOTH:
        return f"can be written by everybody (mode {mode:04o})"
    if mode & stat.S_IWGRP and not _is_private(status.st_gid, os.geteuid()):
        return f"can be written by its group, {status.st_gid} (mode {mode:04o})"
    return ""


def _refusal(path: Path, status: os.stat_result, reason: str) -> CacheError:
    if stat.S_ISREG(status.st_mode):
        remedy = f"run: rm {in_shell(str(path))}; or set"
    else:
        mine = status.st_uid == os.geteuid()
        remedy = f"run: chmod go-w {in_shell(str(path))}; or set" if mine else "set"
    return CacheError(
        f"the kernel cache is not used: {path} {reason}, so others could put code there that you would run; "
        f"{remedy} CODEGEN_CACHE_DIR to a folder of your own; or set {TRUST_OTHERS}=1 if you trust them"
    )


def _name_of(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


@cache
def _is_private(gid: int, uid: int) -> bool:
    """Return whether a group is the user's alone. Many systems make such groups, and let them write (umask 002)."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


@cache
def _unknown_outside() -> tuple[int, ...]:
    """Return the uid that stands for all whom a container's user namespace does not know, the machine's root too."""
    try:
        unknown = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
        ranges = [[int(number) for number in line.split()] for line in lines]
    except (OSError, ValueError):  # not Linux
        return ()
    return () if any(first <= unknown < first + count for first, _, count in ranges) else (unknown,)
