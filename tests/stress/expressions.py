"""Draw scores and masks, and compare what torch, their trees and a program in C++ make of them.

python tests/stress/expressions.py --count 20000 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]

import drawn_scores  # noqa: E402

TOGETHER = 100
"""Scores of a program, and as many masks."""


def main() -> int:
    """Print what differs, and how many values were compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    values = wrong = 0
    for first in range(0, asked.count, TOGETHER):
        cases = []
        for number in range(first, min(first + TOGETHER, asked.count)):
            for what, case_of in (("score", drawn_scores.case_of), ("mask", drawn_scores.mask_case_of)):
                try:
                    cases.append(case_of(asked.seed * 1_000_000 + number))
                except Exception as error:  # all of them are told
                    wrong += 1
                    print(f"{what} {number}: {type(error).__name__}: {error}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                values += drawn_scores.check_programs(cases, Path(folder))
            except AssertionError as error:
                wrong += 1
                print(error, flush=True)
    print(f"{asked.count} scores and as many masks, {values} values of kernels' forms, {wrong} that differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
