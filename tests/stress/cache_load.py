"""Users of a kernel cache: kernels that are never compiled, and processes and threads that ask for them.

Builds return bytes made of the key, so that each load can be compared.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from runtime.compile import cache_lock
from runtime.compile.cache import KernelCache
from runtime.compile.cache_entry import Identity

FORK = multiprocessing.get_context("fork")
now_ns = time.time_ns


@dataclass(frozen=True)
class Load:
    """How much at once.

    Attributes:
        processes: how many.
        threads: of each process.
        kernels: how many are asked for.
        seconds: how long.
        kills: how many processes are killed.
    """

    processes: int
    threads: int
    kernels: int
    seconds: float
    kills: int

    @property
    def limit(self) -> int:
        """Bytes that two thirds of the kernels fill: there are always evictions."""
        return sum(len(code_of(number)) + 400 for number in range(self.kernels)) * 2 // 3


@dataclass(frozen=True)
class Version:
    """How a version of the package knows kernels.

    Attributes:
        name: which its builds leave in the log.
        first_key: of its kernels, as a number.
    """

    name: str = "today"
    first_key: int = 0


TODAY = Version()
Use = Callable[[random.Random], None]


def identity(number: int, version: Version = TODAY) -> Identity:
    return Identity(f"{version.first_key + number:064x}", f"kernel{number}", "sm_90a", "cubin")


def code_of(number: int) -> bytes:
    return random.Random(number).randbytes(2000 + 37 * number)


def ask(cache: KernelCache, number: int, pause: float = 0.0, version: Version = TODAY) -> bool:
    """Ask for a kernel, compare it, and return whether it was there."""
    log = f"log of {version.name} {number}"

    def build() -> tuple[bytes, str]:
        time.sleep(pause)
        return code_of(number), log

    entry, was_there = cache.get_or_build(identity(number, version), build)
    assert (entry.identity, entry.code, entry.log) == (identity(number, version), code_of(number), log)
    return was_there


def user(folder: Path, load: Load) -> Use:
    """Return one who mostly asks, now and then lists or clears, where the least recently used must go."""

    def use(draw: random.Random) -> None:
        cache = KernelCache(folder, load.limit)
        what = draw.random()
        if what < 0.02:
            cache.clear()
        elif what < 0.07:
            damaged = [found.path for found in cache.entries() if found.entry is None]
            assert not [path for path in damaged if path.exists()], f"damaged: {damaged}"
        else:
            ask(cache, draw.randrange(load.kernels), pause=0.005)

    return use


def repeat(use: Use, load: Load, seed: int, until: float) -> None:
    """Use the cache in threads until it is time to stop, and end the process: with 1 if a thread failed."""
    cache_lock.NOTICE_SECONDS = float("inf")  # on two cores, 128 threads wait for longer than that
    failed = threading.Event()

    def run(thread: int) -> None:
        draw = random.Random(1000 * seed + thread)
        try:
            while time.monotonic() < until:
                use(draw)
        except BaseException:
            traceback.print_exc()
            failed.set()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(load.threads)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    os._exit(int(failed.is_set()))


def start(run: Callable[[], None]) -> BaseProcess:
    """Run in a process of its own."""
    process = FORK.Process(target=run)
    process.start()
    return process


def end(processes: list[BaseProcess], seconds: float) -> list[int | None]:
    """Wait for processes, and return their exit codes: None of one that hung, and is killed."""
    limit = time.monotonic() + seconds + 120
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def together(runs: list[Callable[[], None]], seconds: float) -> None:
    """Run each in a process of its own, and check that all ended well."""
    codes = end([start(run) for run in runs], seconds)
    assert not any(codes) and None not in codes, f"exit codes {codes}"


def left_behind(folder: Path) -> str:
    """Return what is in the folder after it was cleared: nothing, or it is an error."""
    cache = KernelCache(folder)
    count = cache.clear()
    left = [path.name for name in ("entries", "locks", "tmp") for path in (folder / name).iterdir()]
    assert not left, f"left behind: {left}"
    return f"cleared {count}, nothing left"
