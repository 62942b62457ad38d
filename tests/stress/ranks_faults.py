"""Faults of one of two ranks at each step, of each kind: no data of other calls, no long wait, no bare error.

    python tests/stress/ranks_faults.py [--every 1] [--kinds error delay late kill] [--jobs 6]

What must not be is printed, a line each; the exit status is then 1. It takes a quarter of an
hour on two cores; most of that time ranks wait for each other.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "runtime" / "distributed")]
import faults  # noqa: E402

AT_ONCE = 12  # faults that two processes have, one after the other
KINDS = ("error", "delay", "late", "kill")


def batches(kinds: list[str], every: int, steps: int, sample: int) -> list[list[faults.Fault | None]]:
    """Return the faults of each pair of processes; one that is killed has no other."""
    found: list[list[faults.Fault | None]] = []
    for kind in kinds:
        of_kind = [
            faults.Fault(kind, rank, step) for step in range(1, steps + 1, every) for rank in range(faults.RANKS)
        ]
        if sample:
            of_kind = of_kind[:: -(-len(of_kind) * len(kinds) // sample)]
        size = 1 if kind == "kill" else AT_ONCE
        found += [list(of_kind[first : first + size]) for first in range(0, len(of_kind), size)]
    return found


def checked(batch: list[faults.Fault | None]) -> list[str]:
    """Return what is wrong with some faults."""
    told = faults.run(batch)
    return [text for fault, each in zip(batch, told, strict=True) for text in faults.wrongs(fault, each)]


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="of so many steps one")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--jobs", type=int, default=6, help="pairs of processes at once")
    parser.add_argument("--sample", type=int, default=0, help="so many of them alone, from all kinds and steps")
    given = parser.parse_args(arguments)
    calm = faults.run([None])[0]
    wrong = faults.wrongs(None, calm)
    steps = max((each[0] for each in calm if each is not None), default=0)
    every = batches(given.kinds, given.every, steps, given.sample)
    with ThreadPoolExecutor(given.jobs) as pool:
        for found in pool.map(checked, every):
            wrong += found
            for text in found:
                print(text, flush=True)
    print(f"{sum(map(len, every))} faults at {steps} steps, {len(wrong)} wrong")
    return 1 if wrong or not steps else 0


if __name__ == "__main__":
    sys.exit(main())
