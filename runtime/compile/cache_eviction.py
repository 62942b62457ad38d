"""Eviction of entries from a cache that is too large. It reads names, sizes and times alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from runtime.compile.cache_files import CacheFiles

# Of the limit, how much a process may write until it looks again what others have written; as much is made free at a
# time. N entries then cost N times a few dozen looks, not N times N.
_SHARE = 32
# Folder -> bytes that were there, bytes written since. Threads may overwrite each other's sum: they look later then.
_seen: dict[Path, tuple[int, int]] = {}


def make_room(files: CacheFiles, written: str, size: int, limit: int) -> None:
    """Remove the least recently used entries if there are more than ``limit`` bytes, but never the one just written.

    Args:
        files: those of the cache.
        written: the name of the entry just written.
        size: its bytes.
        limit: how many bytes there may be. With several processes it may be exceeded by a share for each.
    """
    total, since = _seen.get(files.path, (limit, 0))
    since += size
    if total + since > limit or since > limit // _SHARE:
        total, since = _evict(files, written, limit), 0
    _seen[files.path] = total, since


def _evict(files: CacheFiles, written: str, limit: int) -> int:
    """Remove the oldest entries of a cache beyond its limit; return the bytes that are left."""
    files.sweep()
    stored = sorted(files.stored(), key=lambda item: item[1].st_mtime_ns)
    if stored:
        files.not_before(stored[-1][1].st_mtime_ns)
    total = sum(status.st_size for _, status in stored)
    if total > limit:
        for name, status in stored:
            if total <= limit - limit // _SHARE:
                break
            if name != written and _remove_unused(files, name, status):
                total -= status.st_size
    return total


def _remove_unused(files: CacheFiles, name: str, status: os.stat_result) -> bool:
    """Remove an entry, unless it was used or written anew meanwhile, and return whether it is gone."""
    try:
        now = files.entries.status(name)
        if now.st_mtime_ns != status.st_mtime_ns or not stat.S_ISREG(now.st_mode):
            return False
        files.remove(name)
    except FileNotFoundError:
        pass
    except PermissionError:  # another user's, in a shared folder: that user's processes remove it
        return False
    return True
