"""Ctrl-C at drawn moments of commands: status 130 and one line on standard error, whenever it comes.

PYTHONPATH=. python tests/stress/interrupts.py --count 200 --seed 1
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from interrupts import interrupted

COMMANDS = [
    ["--help"],
    ["render", "l4_topk32_d64", "--out", "out"],
    ["compile", "l4_topk32_d64"],
    ["export", "l4_topk32_d64", "--out", "exported"],
    ["list", "--json"],
]


def main() -> None:
    """Interrupt commands, and end with 1 if one of them ends in another way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=4.0, help="seconds")
    asked = parser.parse_args()
    draw, wrong = random.Random(asked.seed), 0
    for _ in range(asked.count):
        arguments, seconds = draw.choice(COMMANDS), draw.uniform(0, asked.longest)
        with tempfile.TemporaryDirectory() as folder:
            if found := interrupted(arguments, seconds, Path(folder)):
                print(found, flush=True)
                wrong += 1
    print(f"{wrong} of {asked.count} ended in another way")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
