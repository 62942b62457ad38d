"""Users of one kernel cache who do not agree: on what time it is, or on how an entry looks."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stress.cache_load import TODAY, Load, Use, Version, ask, identity, left_behind, now_ns, repeat, together, user

from runtime.compile import cache_entry
from runtime.compile.cache import KernelCache

HOUR_NS = 3600 * 10**9
DAY_NS = 24 * HOUR_NS
STEPS = 400
"""Uses of the cache of which the order is checked."""


def wrong_clock(seed: int) -> Callable[[], int]:
    """Return a clock that is right, a day fast, a day slow, or is moved back by an hour at each look."""
    if seed % 4 == 3:
        looks = itertools.count()
        return lambda: now_ns() - next(looks) * HOUR_NS
    offset = (seed % 4 - 1) * DAY_NS
    return lambda: now_ns() + offset


def worker(folder: Path, load: Load, seed: int, until: float) -> None:
    """Use the cache by one of the wrong clocks."""
    time.time_ns = wrong_clock(seed)
    repeat(user(folder, load), load, seed, until)


def clock_moved_back(folder: Path, load: Load) -> str:
    """Whatever the clock says from one use to the next, the least recently used kernels go first."""

    def run() -> None:
        draw, order = random.Random(0), list[int]()  # the kernels by their last use
        for _ in range(STEPS):
            cache, number = KernelCache(folder, load.limit), draw.randrange(load.kernels)
            back = draw.choice((0, HOUR_NS, DAY_NS, 10_000 * DAY_NS, now_ns()))
            time.time_ns = lambda back=back: now_ns() - back  # type: ignore[misc]
            were = kept(order)
            assert ask(cache, number) == (number in were), f"{number} of {were}"
            order[:] = [other for other in order if other != number] + [number]
            assert set(kept(order)) == set(order[-len(kept(order)) :]), f"{kept(order)} of {order}"

    def kept(order: list[int]) -> list[int]:
        return [number for number in order if (folder / "entries" / identity(number).key).exists()]

    together([run], 60)
    return f"{STEPS} uses by a clock that was moved back; {left_behind(folder)}"


@dataclass(frozen=True)
class Another(Version):
    """A version that writes what that of today does not read.

    Attributes:
        magic: with which its entries begin to say what they are.
    """

    magic: str = cache_entry.MAGIC


VERSIONS = (
    TODAY,
    Another("another key", first_key=1 << 128),
    Another("another entry", magic="codegen-kernel-of-another-version"),
)


def two_versions(folder: Path, load: Load) -> str:
    """Versions with other keys, with other entries in the same places, and with another layout use it at once."""
    until = time.monotonic() + load.seconds
    runs = [
        partial(_use_by, VERSIONS[seed % len(VERSIONS)], folder, load, seed, until)
        for seed in range(max(load.processes, 3))
    ]
    together([*runs, partial(repeat, _first_layout(folder), load, len(runs), until)], load.seconds)
    for version in VERSIONS:
        together([partial(_asks_twice, version, folder, load)], 60)
    return f"{len(VERSIONS) + 1} versions in {len(runs) + 1} processes; {left_behind(folder)}"


def _becomes(version: Version) -> None:
    if isinstance(version, Another):
        cache_entry.MAGIC = version.magic


def _use_by(version: Version, folder: Path, load: Load, seed: int, until: float) -> None:
    """Ask, list and clear; what is served is of this version, and what another has there is no error."""
    _becomes(version)

    def use(draw: random.Random) -> None:
        cache = KernelCache(folder, load.limit)
        what = draw.random()
        if what < 0.02:
            cache.clear()
        elif what < 0.07:
            list(cache.entries())
        else:
            ask(cache, draw.randrange(load.kernels), pause=0.005, version=version)

    repeat(use, load, seed, until)


def _first_layout(folder: Path) -> Use:
    """Return a user by the first layout, which had a folder for the first two digits of a key."""

    def use(draw: random.Random) -> None:
        key = f"{draw.getrandbits(256):064x}"
        with contextlib.suppress(FileNotFoundError):  # others clear
            place = folder / "entries" / key[:2]
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            (place / key[2:]).write_bytes(b"code")
        time.sleep(0.005)

    return use


def _asks_twice(version: Version, folder: Path, load: Load) -> None:
    """What a version has asked for is there the second time, whoever was there before."""
    _becomes(version)
    cache = KernelCache(folder)
    for number in range(load.kernels):
        ask(cache, number, version=version)
    for number in range(load.kernels):
        assert ask(cache, number, version=version), f"{version.name} builds {number} each time"
