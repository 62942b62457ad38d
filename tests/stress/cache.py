"""Processes and threads that use one kernel cache at once, are killed, find damage, a wrong clock, a full disk.

    python tests/stress/cache.py           # some seconds
    python tests/stress/cache.py --full    # 32 processes, 200 of them killed: two minutes on two cores

Prints a table and exits with 1 if a line of it is not ok. Nothing is compiled. Some lines need root (a device, a full
or a read-only file system); else they say that they were not tried.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from stress.cache_damage import damaged  # noqa: E402 - not installed
from stress.cache_load import FORK, Load, ask, left_behind, start, together  # noqa: E402
from stress.cache_mixed import clock_moved_back, two_versions, worker  # noqa: E402
from stress.cache_places import full_at_once, full_disk, lying_locks, no_locks, read_only, read_only_disk  # noqa: E402

from runtime.compile.cache import KernelCache  # noqa: E402
from runtime.errors import CacheError  # noqa: E402

SMALL, FULL = Load(4, 2, 12, 1.0, 6), Load(32, 4, 64, 20.0, 200)


def at_once(folder: Path, load: Load) -> str:
    """Compile, load, list, clear and evict at once, by clocks two days apart, some of them moved back all the time."""
    until = time.monotonic() + load.seconds
    together([partial(worker, folder, load, seed, until) for seed in range(load.processes)], load.seconds)
    return f"{load.processes} processes x {load.threads} threads; {left_behind(folder)}"


def killed(folder: Path, load: Load) -> str:
    """The same, while processes are killed and others take their place."""
    until = time.monotonic() + 3600
    processes = [start(partial(worker, folder, load, seed, until)) for seed in range(load.processes)]
    draw = random.Random(0)
    for number in range(load.kills):
        time.sleep(draw.uniform(0.005, 0.1))
        place = draw.randrange(len(processes))
        os.kill(processes[place].pid or 0, signal.SIGKILL)
        processes[place].join()
        assert processes[place].exitcode == -signal.SIGKILL, f"ended by itself with {processes[place].exitcode}"
        processes[place] = start(partial(worker, folder, load, load.processes + number, until))
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


def once(folder: Path, load: Load) -> str:
    """All processes ask for the same kernels at the same time: each is built once."""
    barrier = FORK.Barrier(load.processes)

    def run() -> None:
        cache = KernelCache(folder / "cache")
        barrier.wait()
        for number in range(load.kernels):
            if not ask(cache, number, pause=0.01):
                (folder / f"{number}.{os.getpid()}").touch()

    together([run] * load.processes, 60)
    built = [path for path in folder.iterdir() if path.is_file()]
    assert len(built) == load.kernels, f"{len(built)} builds"
    return f"{load.processes} processes, {load.kernels} kernels, {len(built)} builds"


SCENARIOS = (
    *(at_once, killed, once, damaged, two_versions, clock_moved_back),
    *(read_only, read_only_disk, full_disk, full_at_once, no_locks, lying_locks),
)


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
        print(f"{name.replace('_', ' '):16}  {'ok' if well else 'FAILED':6}  {seconds:6.1f} s  {told}")
    sys.exit(not all(well for _, well, _, _ in rows))


if __name__ == "__main__":
    main()
