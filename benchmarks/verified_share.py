"""Print how many problems of the grid get a kernel with a committed source and a receipt, through the front door.

    python benchmarks/verified_share.py                    # all problems: some minutes
    python benchmarks/verified_share.py --sample 500       # some of them, drawn
    python benchmarks/verified_share.py --missing          # also the kernels that have none, most needed first

A problem counts if each kernel that it runs does.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from functools import cache

from problem_grid import Problem, problems

from codegen.library import NamedSpec
from codegen.receipts import ReceiptStatus, state
from codegen.render import render


@cache
def is_verified(named: NamedSpec) -> bool:
    """Whether a kernel is shipped and its receipt is of its source of today."""
    return named.is_shipped and state(named, render(named)).standing is ReceiptStatus.OK


def share(asked: list[Problem]) -> tuple[dict[str, tuple[int, int]], Counter[str]]:
    """Verified and all problems of each group, and the kernels without a receipt, with how many problems need each."""
    groups: dict[str, tuple[int, int]] = {}
    missing: Counter[str] = Counter()
    for each in asked:
        kernels = each.kernels()
        lacking = [named.stem for named in kernels if not is_verified(named)]
        missing.update(lacking)
        verified, total = groups.get(each.group, (0, 0))
        groups[each.group] = verified + (not lacking), total + 1
    return groups, missing


def main() -> None:
    """Print the share of each group, and of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N", help="draw as many problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--missing", action="store_true", help="print the kernels without a receipt")
    options = parser.parse_args()
    asked = list(problems())
    if options.sample is not None:
        asked = random.Random(options.seed).sample(asked, min(options.sample, len(asked)))
    groups, missing = share(asked)
    for group, (verified, total) in [*groups.items(), ("all", tuple(map(sum, zip(*groups.values(), strict=True))))]:
        print(f"{group:32} {verified:5} of {total:5}  {verified / total:6.1%}")
    if options.missing:
        for stem, count in missing.most_common():
            print(f"{count:5}  {stem}")


if __name__ == "__main__":
    main()
