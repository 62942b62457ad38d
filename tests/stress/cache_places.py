"""Folders in which a kernel cache cannot do all it does: without permission, without space, without locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from stress.cache_load import Load, ask, left_behind, repeat, together

from runtime.compile.cache import KernelCache
from runtime.errors import CacheError

NOBODY = 65534
NOT_TRIED = "not tried: no file system can be mounted here"
REMEDY = "set CODEGEN_CACHE_DIR"


def refusal(run: Callable[[], object]) -> str:
    """Return why the cache refuses it, which it must."""
    try:
        run()
    except CacheError as error:
        return str(error)
    raise AssertionError("not refused")


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[bool]:
    """Mount a file system in memory, if that can be done here, and say whether it was."""
    command = ["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "tmpfs", str(folder)]
    try:
        there = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        there = False
    try:
        yield there
    finally:
        if there:
            subprocess.run(["umount", str(folder)], check=True)


def _served_and_refused(folder: Path, reason: str) -> None:
    """Kernel 0 is there, and nothing else can be."""
    cache = KernelCache(folder)
    assert ask(cache, 0)
    told = refusal(partial(ask, cache, 1))
    assert reason in told and REMEDY in told, told
    assert [found.entry is not None for found in cache.entries()] == [True]
    assert ask(cache, 0)


def read_only(folder: Path, load: Load) -> str:
    """What is there is served from a folder that cannot be written, and has no locks; the rest is refused."""
    ask(KernelCache(folder), 0)
    for name in ("locks", "tmp"):
        (folder / name).rmdir()
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def run() -> None:
        if os.geteuid() == 0:
            os.setuid(NOBODY)  # root may write everywhere; what is root's is trusted
        _served_and_refused(folder, "Permission denied")

    try:
        together([run] * load.processes, 10)
    finally:
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
    return "served, and refused with the remedy"


def read_only_disk(folder: Path, load: Load) -> str:
    """The same on a file system that is mounted read-only; it cannot be cleared either."""
    with mounted(folder, "size=1m") as there:
        if not there:
            return NOT_TRIED
        place = folder / "cache"
        ask(KernelCache(place), 0)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        together([partial(_served_and_refused, place, "Read-only file system")] * load.processes, 10)
        assert REMEDY in refusal(KernelCache(place).clear) and ask(KernelCache(place), 0)
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        assert not ask(KernelCache(place), 1)
        return f"served, and refused with the remedy; then written again: {left_behind(place)}"


def full_disk(folder: Path, load: Load) -> str:
    """On a file system without space a kernel is refused with the remedy, and nothing is left behind."""
    with mounted(folder, "size=64k") as there:
        if not there:
            return NOT_TRIED
        cache = KernelCache(folder / "cache")
        ask(cache, 0)
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for number in range(1, 10):
            _is_of_space(refusal(partial(ask, cache, number)))
        assert ask(cache, 0) and not list((cache.folder / "tmp").iterdir())
        cache.clear()
        (folder / "filler").unlink()
        assert not ask(cache, 1)
    return "9 refused with the remedy, what was there served, nothing left behind"


def _is_of_space(told: str) -> None:
    assert "No space left on device" in told and "codegen cache clear" in told, told


def full_at_once(folder: Path, load: Load) -> str:
    """Many fill a file system that has space for half of their kernels, and clear it: all is right or refused."""
    kilobytes = 4 * load.kernels // 2
    with mounted(folder, f"size={kilobytes}k") as there:
        if not there:
            return NOT_TRIED
        place = folder / "cache"
        ask(KernelCache(place), 0)  # on a busy machine nobody else may come to it in time
        until = time.monotonic() + load.seconds / 4

        def use(draw: random.Random) -> None:
            try:
                if draw.random() < 0.02:
                    KernelCache(place).clear()
                else:
                    ask(KernelCache(place), draw.randrange(load.kernels), pause=0.005)
            except CacheError as error:
                _is_of_space(str(error))

        together([partial(repeat, use, load, seed, until) for seed in range(load.processes)], load.seconds)
        damaged = [found.path.name for found in KernelCache(place).entries() if found.entry is None]
        left = [path.name for path in (place / "tmp").iterdir()]
        assert not damaged and not left, f"damaged: {damaged}, left behind: {left}"
        return f"{load.processes} processes, {load.kernels} kernels in {kilobytes} KiB; {left_behind(place)}"


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def no_locks(folder: Path, load: Load) -> str:
    """Where locks cannot be had, what is there is served, and the rest is refused with the remedy."""
    ask(KernelCache(folder), 0)

    def run(code: int) -> None:
        def flock(descriptor: int, operation: int) -> None:
            raise OSError(code, os.strerror(code))

        fcntl.flock = flock
        _served_and_refused(folder, f"has no locks ({os.strerror(code)})")

    together([partial(run, code) for code in NO_LOCKS for _ in range(-(-load.processes // len(NO_LOCKS)))], 10)
    assert not list((folder / "tmp").iterdir())
    assert not ask(KernelCache(folder), 1), "not built once there are locks"
    return f"{len(NO_LOCKS)} reasons, each served and refused with the remedy; then {left_behind(folder)}"


def lying_locks(folder: Path, load: Load) -> str:
    """Where everybody gets every lock, a kernel may be built twice or refused, and is right whenever it is served."""
    until = time.monotonic() + load.seconds / 4

    def use(draw: random.Random) -> None:
        with contextlib.suppress(CacheError):
            ask(KernelCache(folder, load.limit), draw.randrange(load.kernels), pause=0.001)

    def run(seed: int) -> None:
        fcntl.flock = lambda descriptor, operation: None
        repeat(use, load, seed, until)

    together([partial(run, seed) for seed in range(load.processes)], load.seconds)
    damaged = [found.path.name for found in KernelCache(folder).entries() if found.entry is None]
    assert not damaged, f"damaged: {damaged}"
    for number in range(load.kernels):
        ask(KernelCache(folder), number)
        assert ask(KernelCache(folder), number)
    return f"{load.processes} processes, 0 damaged; then {left_behind(folder)}"
