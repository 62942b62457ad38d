"""Attacks what reads specs, problems and receipts: whatever the input, the outcome is success or a CodegenError.

    python tests/stress/loader.py --executions 1000000 --jobs 2 --json totals.json     # the same again goes on
    python tests/stress/loader.py --seed 7 --start 40000 --executions 1000             # goes on, or repeats

An execution is known by the seed and its number. Its input is a shipped spec that was mutated by bytes, by tokens or by
structure, or a dict, a problem or a receipt; of each hundred some are drawn by Hypothesis. A failure is anything else
than success or a CodegenError of one line, or more than 20 s; it is printed with its input and the command that
repeats it. The last line has the totals. With --json a file has them too, those of earlier runs added, and with the
hash of the code that was attacked: that of codegen/, templates/ and specs/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from stress.executions import BATCH, Failure, Tally, batch  # noqa: E402 - not installed

REPORT_SECONDS = 30
DIGITS = 16
"""Of the hash of a spec: enough to tell a million apart."""


@cache
def attacked() -> str:
    """Return the first digits of a SHA-256 over the files that are attacked, as this run found them."""
    digest = hashlib.sha256()
    for folder in ("codegen", "templates", "specs"):
        for path in sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".j2", ".yaml")):
            data = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT).as_posix()}:{len(data)}:".encode() + data)
    return digest.hexdigest()[:DIGITS]


@dataclass
class Totals:
    """What the runs of a seed came to.

    Attributes:
        seed: of the executions.
        next: number of the first one that was not done.
        seconds: how long they took.
        accepted, refused: as in ``Tally``.
        failures: the first of each kind.
        sources: of each state of the code that was attacked, how many executions.
        specs: first digits of the hashes of the specs that were accepted.
    """

    seed: int = 0
    next: int = 0
    seconds: float = 0.0
    accepted: int = 0
    refused: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    specs: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> Totals:
        """Return what an earlier run wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        for name in ("executions", "distinct_specs"):
            del fields[name]
        return cls(**{**fields, "sources": Counter(fields["sources"]), "specs": set(fields["specs"])})

    def write(self, path: Path) -> None:
        """Write them, the specs last."""
        told = {**asdict(self), "sources": dict(self.sources), "specs": sorted(self.specs)}
        specs = {"distinct_specs": len(self.specs), "specs": told.pop("specs")}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"executions": self.executions, **told, **specs}) + "\n", encoding="utf-8")
        temporary.replace(path)

    @property
    def executions(self) -> int:
        """How many there were."""
        return self.sources.total()

    def add(self, tally: Tally) -> list[Failure]:
        """Count a batch; return the failures that are of a kind which was not seen before."""
        self.next += BATCH
        self.accepted += tally.accepted
        self.refused += tally.refused
        self.sources[attacked()] += tally.executions
        self.specs |= {spec[:DIGITS] for spec in tally.specs}
        known = {(failure["what"][:60], failure["where"]) for failure in self.failures}
        new = {(failure.what[:60], failure.where): failure for failure in reversed(tally.failures)}
        found = [failure for kind, failure in new.items() if kind not in known]
        self.failures += map(asdict, found)
        return found

    def __str__(self) -> str:
        """Return them in one line."""
        rate = self.executions / max(self.seconds, 1e-9)
        return (
            f"{self.executions} executions in {self.seconds:.0f} s ({rate:.0f}/s): "
            f"{self.refused} refused, {self.accepted} accepted, {len(self.specs)} distinct specs accepted, "
            f"{len(self.failures)} kinds of failure; go on: --seed {self.seed} --start {self.next}"
        )


def _batch(task: tuple[int, int]) -> tuple[int, Tally]:
    return task[1], batch(*task)


def run(totals: Totals, options: argparse.Namespace) -> bool:
    """Execute, add to the totals, and report; return whether nothing failed."""
    begun = told = time.monotonic()
    before, failed = totals.seconds, 0
    tasks = ((totals.seed, start) for start in range(totals.next, totals.next + options.executions, BATCH))
    with multiprocessing.Pool(options.jobs) as pool:
        for start, tally in pool.imap(_batch, tasks):
            for failure in totals.add(tally):
                again = f"--seed {totals.seed} --start {start} --executions {BATCH}"
                print(f"FAILED {failure.number}: {failure.what}\n{failure.where}    given: {failure.given}")
                print(f"    repeat: python tests/stress/loader.py {again}", flush=True)
            failed += len(tally.failures)
            now = time.monotonic()
            totals.seconds = round(before + now - begun, 1)
            if now - told > REPORT_SECONDS:
                told = now
                print(totals, flush=True)
                if options.json:
                    totals.write(options.json)
            if now - begun > options.seconds:
                break
    print(totals, flush=True)
    if options.json:
        totals.write(options.json)
    return not failed


def main() -> int:
    """Run as many executions as asked for; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=10_000, help=f"rounded up to whole batches of {BATCH}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, help="number of the first one (0, or where FILE ends)")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the totals of all runs of the seed are kept")
    options = parser.parse_args()
    totals = Totals(options.seed)
    if options.json and options.json.exists():
        totals = Totals.read(options.json)
        if (totals.seed, options.start or totals.next) != (options.seed, totals.next):
            parser.error(
                f"{options.json} goes on with --seed {totals.seed} --start {totals.next}, or leave out --start"
            )
    elif options.start:
        totals.next = options.start - options.start % BATCH
    return 0 if run(totals, options) else 1


if __name__ == "__main__":
    sys.exit(main())
