"""Trust in the cache and in the user's receipts: who owns, and who may write to, the folders on their path.

Code from the cache runs with the user's privileges. Only the user and root are trusted.
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
    """A file, or a folder on the path to it, that another user owns or could write to.

    Attributes:
        reason: its path, and the user.
        remedy: the command that fixes it; "" if only another folder helps.
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
    """Open a folder and check the folder, each folder above it and each link on its path.

    Each one is opened relative to the previous one and checked by its descriptor, so that nobody can replace it between
    the check and the use.

    Args:
        folder: an absolute path.
        make: whether to create missing folders, accessible to the user only.
        trusts_others: whether to skip the check of who could write there.

    Raises:
        CacheError: if another user could replace the folder or write files into it.
        OSError: if one of them is missing, cannot be opened, or is not a folder.
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
    """Open and check a subfolder of the cache, without following links.

    Raises:
        CacheError: if another user owns it or could write to it.
        OSError: if it is missing, cannot be opened, or is not a folder.
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
    """Check an open file or folder of the cache.

    Raises:
        CacheError: if another user owns it or could write to it.
    """
    reason = _owner_fault(status, above=False) or _mode_fault(status, descriptor)
    if reason:
        raise _refusal(path, status, reason)


def _check_folder(found: Folder, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), found.path)


def _check_passed(found: Folder, status: os.stat_result, *, above: bool) -> None:
    """Check a folder or a link on the path; ``above``: whether the path continues below it."""
    if not above:
        check(found.path, status, found.descriptor)
    elif reason := _owner_fault(status, above=True) or _fault_above(status, found.descriptor):
        raise _refusal(found.path, status, reason)


def _fault_above(status: os.stat_result, descriptor: int) -> str:
    # Links are not writable, and users of a sticky folder such as /tmp cannot replace files of other users.
    if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX:
        return ""
    # Many systems have one group per user, with write access (umask 002). A member could at most replace the cache by
    # another folder that the user owns.
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) == stat.S_IWGRP and _is_private(status.st_gid, os.geteuid()):
        return _mode_fault(status, descriptor) if _has_acl(descriptor) else ""
    return _mode_fault(status, descriptor)


def _owner_fault(status: os.stat_result, *, above: bool) -> str:
    trusted = {os.geteuid(), 0, *(_unknown_outside() if above else ())}
    return "" if status.st_uid in trusted else f"belongs to {_name_of(status.st_uid)}"


def _mode_fault(status: os.stat_result, descriptor: int) -> str:
    """Description of the other users who may write to it; "" if there are none.

    With an access control list, the group bits are the upper limit for everybody but the owner.
    """
    mode = stat.S_IMODE(status.st_mode)
    if mode & stat.S_IWOTH:
        return f"is writable by everybody (mode {mode:04o})"
    if mode & stat.S_IWGRP:
        named = " and the users on its access control list" if _has_acl(descriptor) else ""
        return f"is writable by its group, {status.st_gid}{named} (mode {mode:04o})"
    return ""


def _has_acl(descriptor: int) -> bool:
    """Whether a file has an access control list; True if that is unknown."""
    try:
        os.getxattr(f"/proc/self/fd/{descriptor}", _ACL)  # attributes cannot be read through an O_PATH descriptor
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
    """Whether the user is the only member of a group by the system's lists; never for root.

    In containers all users may be in root's group without being listed.
    """
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    own = gid != 0 and user.pw_gid == gid and group.gr_name == user.pw_name
    return own and set(group.gr_mem) <= {user.pw_name}


@cache
def _unknown_outside() -> tuple[int, ...]:
    """The uid that stands for all users outside a container's user namespace, the machine's root included."""
    try:
        unknown = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
        ranges = [[int(number) for number in line.split()] for line in lines]
    except (OSError, ValueError):  # not Linux
        return ()
    return () if any(first <= unknown < first + count for first, _, count in ranges) else (unknown,)
