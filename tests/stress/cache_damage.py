"""What may lie in the place of an entry of a kernel cache."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

from stress.cache_load import Load, ask, identity

from runtime.compile.cache import KernelCache


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def deep(path: Path) -> None:
    footer = b"[" * 100_000
    path.write_bytes(b"code" + footer + len(footer).to_bytes(8, "little"))


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def folder_with_file(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


def bound_socket(path: Path) -> None:
    """Make a socket, in its folder: the name of one may have about a hundred bytes."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
        Path("socket").rename(path.name)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: put(path, b""),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: put(path, path.read_bytes() + b"\0"),
    "a flipped bit": flip,
    "random bytes": lambda path: put(path, random.Random(1).randbytes(5000)),
    "a huge length": lambda path: put(path, path.read_bytes()[:-8] + b"\xff" * 8),
    "deep JSON": deep,
    "not an object": lambda path: put(path, b"code[1]" + (3).to_bytes(8, "little")),
    "another kernel's entry": lambda path: put(path, path.with_name(identity(1).key).read_bytes()),
    "a huge file": replaced(lambda path: (path.touch(0o600), os.truncate(path, 1 << 42))),
    "a link to another entry": replaced(lambda path: path.symlink_to(identity(1).key)),
    "a link to nowhere": replaced(lambda path: path.symlink_to("nowhere")),
    "a link to itself": replaced(lambda path: path.symlink_to(path.name)),
    "a pipe": replaced(os.mkfifo),
    "a socket": replaced(bound_socket),
    "a folder": replaced(folder_with_file),
    "a device": replaced(lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))),  # /dev/zero
}


def damaged(folder: Path, load: Load) -> str:
    """Each kind of damage is mended by the next one who asks, and disturbs nobody who lists or clears."""
    done = 0
    for name, damage in DAMAGE.items():
        cache = KernelCache(folder)
        for number in (0, 1):
            ask(cache, number)
        try:
            damage(cache.folder / "entries" / identity(0).key)
        except PermissionError:
            continue  # only root makes devices
        assert [found.entry is None for found in cache.entries()] == [True, False], f"{name}: not noticed by list"
        assert not ask(cache, 0), f"{name}: not built again"
        assert ask(cache, 0), f"{name}: built again each time"
        damage(cache.folder / "entries" / identity(0).key)
        assert cache.clear() == 2, f"{name}: not cleared"
        done += 1
    return f"{done} of {len(DAMAGE)} kinds of damage built again, listed, cleared"
