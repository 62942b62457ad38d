"""Processes and threads that use one kernel cache at once, are killed, find damage, a wrong clock, a full disk.

    python tests/stress/cache.py           # some seconds
    python tests/stress/cache.py --full    # 32 processes, 200 of them killed: one to two minutes on two cores

Prints a table and exits with 1 if a line of it is not ok. Nothing is compiled: builds return bytes made of the key, so
that each load can be compared. Some lines need root (a device, a full file system); else they say so.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.compile import cache_lock
from runtime.compile.cache import KernelCache
from runtime.compile.cache_entry import Identity
from runtime.errors import CacheError

DAY_NS = 86_400 * 10**9
NOBODY = 65534
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


SMALL, FULL = Load(3, 2, 12, 1.0, 6), Load(32, 4, 64, 20.0, 200)


def identity(number: int) -> Identity:
    return Identity(f"{number:064x}", f"kernel{number}", "sm_90a", "cubin")


def code_of(number: int) -> bytes:
    return random.Random(number).randbytes(2000 + 37 * number)


def ask(cache: KernelCache, number: int, pause: float = 0.0) -> bool:
    """Ask for a kernel, compare it, and return whether it was there."""

    def build() -> tuple[bytes, str]:
        time.sleep(pause)
        return code_of(number), f"log {number}"

    entry, was_there = cache.get_or_build(identity(number), build)
    assert (entry.identity, entry.code, entry.log) == (identity(number), code_of(number), f"log {number}")
    return was_there


def use(folder: Path, load: Load, seed: int, stop: Callable[[], bool], max_bytes: int) -> None:
    """Do what users do, at random, until it is time to stop."""
    draw = random.Random(seed)
    while not stop():
        cache = KernelCache(folder, max_bytes)
        what = draw.random()
        if what < 0.02:
            cache.clear()
        elif what < 0.07:
            damaged = [found.path for found in cache.entries() if found.entry is None]
            assert not [path for path in damaged if path.exists()], f"damaged: {damaged}"
        else:
            ask(cache, draw.randrange(load.kernels), pause=0.005)


def worker(folder: Path, load: Load, seed: int, until: float, max_bytes: int) -> None:
    """Use the cache in threads; the clock of this process is right, a day fast, or a day slow."""
    cache_lock.NOTICE_SECONDS = float("inf")  # on two cores, 128 threads wait for longer than that
    offset = (seed % 3 - 1) * DAY_NS
    time.time_ns = lambda: now_ns() + offset
    failed = threading.Event()

    def run(thread: int) -> None:
        try:
            use(folder, load, 1000 * seed + thread, lambda: time.monotonic() > until, max_bytes)
        except BaseException:
            traceback.print_exc()
            failed.set()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(load.threads)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    os._exit(int(failed.is_set()))


def start(folder: Path, load: Load, seed: int, until: float, max_bytes: int) -> multiprocessing.process.BaseProcess:
    process = FORK.Process(target=worker, args=(folder, load, seed, until, max_bytes))
    process.start()
    return process


def limit_of(load: Load) -> int:
    """Return a limit that two thirds of the kernels fill: there are always evictions."""
    return sum(len(code_of(number)) + 400 for number in range(load.kernels)) * 2 // 3


def at_once(folder: Path, load: Load) -> str:
    """Compile, load, list, clear and evict at once, by clocks two days apart."""
    until = time.monotonic() + load.seconds
    processes = [start(folder, load, seed, until, limit_of(load)) for seed in range(load.processes)]
    codes = end(processes, load.seconds)
    assert not any(codes), f"exit codes {codes}"
    return f"{load.processes} processes x {load.threads} threads; {left_behind(folder)}"


def killed(folder: Path, load: Load) -> str:
    """The same, while processes are killed and others take their place."""
    until = time.monotonic() + 3600
    processes = [start(folder, load, seed, until, limit_of(load)) for seed in range(load.processes)]
    draw = random.Random(0)
    for number in range(load.kills):
        time.sleep(draw.uniform(0.005, 0.1))
        place = draw.randrange(len(processes))
        os.kill(processes[place].pid or 0, signal.SIGKILL)
        processes[place].join()
        assert processes[place].exitcode == -signal.SIGKILL, f"ended by itself with {processes[place].exitcode}"
        processes[place] = start(folder, load, load.processes + number, until, limit_of(load))
    for process in processes:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    locks, temporaries = (len(list((folder / name).iterdir())) for name in ("locks", "tmp"))
    damaged = [found.path.name for found in KernelCache(folder).entries() if found.entry is None]
    assert not damaged, f"damaged: {damaged}"
    for number in range(load.kernels):
        ask(KernelCache(folder), number)
    left = left_behind(folder)
    return f"{load.kills} killed; then {locks} locks, {temporaries} temporary files, 0 damaged; {left}"


def end(processes: list[multiprocessing.process.BaseProcess], seconds: float) -> list[int | None]:
    """Wait for processes, and return their exit codes: None of one that hung, and is killed."""
    limit = time.monotonic() + seconds + 120
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def left_behind(folder: Path) -> str:
    """Return what is in the folder after it was cleared: nothing, or it is an error."""
    cache = KernelCache(folder)
    count = cache.clear()
    left = [path.name for name in ("entries", "locks", "tmp") for path in (folder / name).iterdir()]
    assert not left, f"left behind: {left}"
    return f"cleared {count}, nothing left"


def once(folder: Path, load: Load) -> str:
    """All processes ask for the same kernels at the same time: each is built once."""
    barrier = FORK.Barrier(load.processes)

    def run() -> None:
        cache = KernelCache(folder / "cache")
        barrier.wait()
        for number in range(load.kernels):
            if not ask(cache, number, pause=0.01):
                (folder / f"{number}.{os.getpid()}").touch()

    processes = [FORK.Process(target=run) for _ in range(load.processes)]
    for process in processes:
        process.start()
    codes = end(processes, 60)
    built = [path for path in folder.iterdir() if path.is_file()]
    assert not any(codes) and len(built) == load.kernels, f"exit codes {codes}, {len(built)} builds"
    return f"{load.processes} processes, {load.kernels} kernels, {len(built)} builds"


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
        assert ask(KernelCache(folder), 0)
        try:
            ask(KernelCache(folder), 1)
        except CacheError as error:
            os._exit(0 if "set CODEGEN_CACHE_DIR" in str(error) else 2)
        os._exit(3)

    process = FORK.Process(target=run)
    process.start()
    codes = end([process], 10)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    assert codes == [0], f"exit codes {codes}"
    return "served, and refused with the remedy"


def full_disk(folder: Path, load: Load) -> str:
    """On a file system without space a kernel is refused with the remedy, and nothing is left behind."""
    with mounted(folder, "size=64k") as there:
        if not there:
            return "not tried: no file system can be mounted here"
        cache = KernelCache(folder / "cache")
        ask(cache, 0)
        (folder / "filler").write_bytes(b"")
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        refused = 0
        for number in range(1, 10):
            try:
                ask(cache, number)
            except CacheError as error:
                assert "No space left on device" in str(error) and "codegen cache clear" in str(error), str(error)
                refused += 1
        assert refused == 9 and ask(cache, 0) and not list((cache.folder / "tmp").iterdir())
        cache.clear()
        (folder / "filler").unlink()
        assert not ask(cache, 1)
    return f"{refused} refused with the remedy, what was there served, nothing left behind"


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[bool]:
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


SCENARIOS = (at_once, killed, once, damaged, read_only, full_disk)


def run_all(load: Load, folder: Path) -> list[tuple[str, bool, float, str]]:
    """Return of each scenario its name, whether it went well, how long it took, and what it says."""
    folder.chmod(0o755)  # others go through it in read_only
    rows = []
    for scenario in SCENARIOS:
        place = folder / scenario.__name__
        place.mkdir(mode=0o755)
        begun = time.monotonic()
        try:
            told, well = scenario(place, load), True
        except (AssertionError, CacheError, OSError) as error:
            told, well = f"{type(error).__name__}: {error}", False
        rows.append((scenario.__name__, well, time.monotonic() - begun, told))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="32 processes, 200 of them killed")
    load = FULL if parser.parse_args().full else SMALL
    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(load, Path(folder))
    for name, well, seconds, told in rows:
        print(f"{name.replace('_', ' '):10}  {'ok' if well else 'FAILED':6}  {seconds:6.1f} s  {told}")
    sys.exit(not all(well for _, well, _, _ in rows))


if __name__ == "__main__":
    main()
