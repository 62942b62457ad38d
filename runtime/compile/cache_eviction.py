"""Eviction of entries from a full cache. It reads only names, sizes and times."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from runtime.compile.cache_files import CacheFiles

# Share of the limit that a process writes before it scans the folder again. An eviction frees the same share. N writes
# then scan N entries a few dozen times, not N times.
_SHARE = 32
# Folder -> bytes at the last scan, bytes written since. Threads may overwrite each other's sum, which delays the scan.
_seen: dict[Path, tuple[int, int]] = {}


def make_room(files: CacheFiles, written: str, size: int, limit: int) -> None:
    """Evict the least recently used entries of a cache above ``limit`` bytes, but never the newest one.

    Args:
        files: the files of the cache.
        written: name of the newest entry.
        size: bytes of the newest entry.
        limit: bytes of the cache, at most. Each concurrent process may exceed it by one share.
    """
    total, since = _seen.get(files.path, (limit, 0))
    since += size
    if total + since > limit or since > limit // _SHARE:
        total, since = _evict(files, written, limit), 0
    _seen[files.path] = total, since


def _evict(files: CacheFiles, written: str, limit: int) -> int:
    """Remove the oldest entries of a cache above its limit; return the bytes that remain."""
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
    """Remove an entry unless it was used or rewritten meanwhile; return whether it is gone."""
    try:
        now = files.entries.status(name)
        if now.st_mtime_ns != status.st_mtime_ns or not stat.S_ISREG(now.st_mode):
            return False
        files.remove(name)
    except FileNotFoundError:
        pass
    except PermissionError:  # in a shared folder another user owns it, and that user's processes remove it
        return False
    return True
