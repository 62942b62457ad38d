"""Trust in the cache, and in the user's receipts: the owners of the folders on the path, and who may write there.

What is loaded from the cache runs with the rights of the user. Trusted are the user and root, nobody else.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from functools import cache
from pathlib import Path

from codegen.wording import in_shell
from runtime.compile.cache_environment import TRUST_OTHERS
from runtime.compile.cache_folder import Folder
from runtime.errors import CacheError

_MOST_LINKS = 40  # as many as Linux follows
_ACL = "system.posix_acl_access"


class TrustError(CacheError):
    """A folder on the way, or a file, that somebody else owns or could write.

    Attributes:
        reason: its path, and who.
        remedy: the command that mends it; "" where only another folder does.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason, self.remedy = reason, remedy
        told = f"the kernel cache is not used: {reason}, so others could put code there that you would run; "
        other = f"CODEGEN_CACHE_DIR to a folder of your own; or set {TRUST_OTHERS}=1 if you trust them"
        super().__init__(told + (f"run: {remedy}; or set {other}" if remedy else f"set {other}"))

    def __reduce__(self) -> tuple[type[TrustError], tuple[str, str]]:
        """The constructor and its arguments, for another process."""
        return type(self), (self.reason, self.remedy)


def open_way(folder: Path, *, make: bool, trusts_others: bool) -> Folder:
    """Open a folder, and check all that decides what it is: each folder above it, each link on the way, itself.

    Each is opened from the one before it and checked by its descriptor: nobody can put another one there between the
    check and the use.

    Args:
        folder: an absolute path.
        make: whether to make what is missing, for the user alone.
        trusts_others: whether it does not matter who could write there.

    Raises:
        CacheError: when somebody else could put another folder there, or files into it.
        OSError: when one of them is not there, cannot be opened, or is no folder.
    """
    here, todo, links = Folder.at(folder.anchor), list(folder.parts[:0:-1]), 0
    try:
        if not trusts_others:
            _check_passed(here, os.fstat(here.descriptor), above=bool(todo))
        while todo:
            part = todo.pop()
            found = here.inner(part, make=make)
            try:
                status = os.fstat(found.descriptor)
                link = stat.S_ISLNK(status.st_mode)
                if not trusts_others:
                    _check_passed(found, status, above=link or bool(todo))
                if not link:
                    _check_folder(found, status)
                    here, found = found, here
                    continue
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
                target = Path(found.target())
                todo += target.parts[:0:-1] if target.is_absolute() else target.parts[::-1]
                if target.is_absolute():
                    here, old = Folder.at(target.anchor), here
                    old.close()
            finally:
                found.close()
    except BaseException:
        here.close()
        raise
    return here


def open_inner(folder: Folder, name: str, *, make: bool, trusts_others: bool) -> Folder:
    """Open a folder of the cache that lies in its folder, and check it; a link is none.

    Raises:
        CacheError: when somebody else owns it or could write it.
        OSError: when it is not there, cannot be opened, or is no folder.
    """
    found = folder.inner(name, make=make)
    try:
        status = os.fstat(found.descriptor)
        _check_folder(found, status)
        if not trusts_others:
            _check_passed(found, status, above=False)
    except BaseException:
        found.close()
        raise
    return found


def check(path: str, status: os.stat_result, descriptor: int) -> None:
    """Check an open file of the cache, or its folder.

    Raises:
        CacheError: when somebody else owns it or could write it.
    """
    reason = _owner_fault(status, above=False) or _mode_fault(status, descriptor)
    if reason:
        raise _refusal(path, status, reason)


def _check_folder(found: Folder, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), found.path)


def _check_passed(found: Folder, status: os.stat_result, *, above: bool) -> None:
    """Check a folder or a link on the way; ``above``: if the way goes on."""
    if not above:
        check(found.path, status, found.descriptor)
    elif reason := _owner_fault(status, above=True) or _fault_above(status, found.descriptor):
        raise _refusal(found.path, status, reason)


def _fault_above(status: os.stat_result, descriptor: int) -> str:
    # Nobody can write a link, and in a folder such as /tmp (sticky) nobody can replace what others own.
    if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX:
        return ""
    # Many systems have a group for each user, and let it write (umask 002). Who may write there can replace the cache
    # by a folder of the user's own, no more.
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) == stat.S_IWGRP and _is_private(status.st_gid, os.geteuid()):
        return _mode_fault(status, descriptor) if _has_acl(descriptor) else ""
    return _mode_fault(status, descriptor)


def _owner_fault(status: os.stat_result, *, above: bool) -> str:
    trusted = {os.geteuid(), 0, *(_unknown_outside() if above else ())}
    return "" if status.st_uid in trusted else f"belongs to {_name_of(status.st_uid)}"


def _mode_fault(status: os.stat_result, descriptor: int) -> str:
    """Return who else may write it.

    Where there is an access control list, the bits of the group are the most that it gives to anybody but the owner.
    """
    mode = stat.S_IMODE(status.st_mode)
    if mode & stat.S_IWOTH:
        return f"can be written by everybody (mode {mode:04o})"
    if mode & stat.S_IWGRP:
        named = " and those whom its access control list names" if _has_acl(descriptor) else ""
        return f"can be written by its group, {status.st_gid}{named} (mode {mode:04o})"
    return ""


def _has_acl(descriptor: int) -> bool:
    """Whether a file has an access control list; True too where that is not known."""
    try:
        os.getxattr(f"/proc/self/fd/{descriptor}", _ACL)  # by its descriptor one of O_PATH has no attributes
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.EOPNOTSUPP)
    return True


def _refusal(path: str, status: os.stat_result, reason: str) -> TrustError:
    if stat.S_ISREG(status.st_mode):
        remedy = f"rm {in_shell(path)}"
    else:
        remedy = f"chmod go-w {in_shell(path)}" if status.st_uid == os.geteuid() else ""
    return TrustError(f"{path} {reason}", remedy)


def _name_of(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


@cache
def _is_private(gid: int, uid: int) -> bool:
    """Whether a group is the user's alone by the system's lists; never for root.

    In containers all users may have root's group, and no list says so.
    """
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    own = gid != 0 and user.pw_gid == gid and group.gr_name == user.pw_name
    return own and set(group.gr_mem) <= {user.pw_name}


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
