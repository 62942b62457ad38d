"""Runs compute-sanitizer on small calls of shipped kernels, and says which kernels have which run of their source.

    python scripts/sanitizers.py --jobs 15 --only 'h100_*' --seconds 240    # on a GPU: kernels without a run first
    python scripts/sanitizers.py --table                                    # rewrites a table of verified.md

A run is a process with one call of tests/gpu/small_call.py. tests/records/sanitizers.jsonl has a line for each kernel
and tool: the hash of the generated source without comments, the number of errors or hazards, and the exit code. A run
of another source does not count.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from results_table import DASH, line, update  # noqa: E402

from codegen.library import NamedSpec, shipped_specs  # noqa: E402
from codegen.prune import without_comments  # noqa: E402

RECORD = ROOT / "tests" / "records" / "sanitizers.jsonl"
PAGE = ROOT / "docs" / "reference" / "verified.md"
STALE = "its table of sanitizer runs is not what the record says; run: python scripts/sanitizers.py --table"
TOOLS: Mapping[str, tuple[str, ...]] = {
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": (),
}
"""Tools, with their options."""
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
ERRORS_FOUND = 7
"""Exit code of a call in which a tool found errors."""
Run = dict[str, Any]


@cache
def source_hash(named: NamedSpec) -> str:
    """Hash of the generated file of a kernel without its comments; its twin shares the file."""
    return sha256(without_comments((ROOT / named.source_file).read_text(encoding="utf-8")).encode()).hexdigest()


def recorded(path: Path = RECORD) -> dict[tuple[str, str], Run]:
    """The runs on record, by kernel and tool."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    runs = (json.loads(text) for text in lines)
    return {(run["kernel"], run["tool"]): run for run in runs}


def write(runs: Iterable[Run], path: Path = RECORD) -> None:
    """Write the record, sorted by kernel and tool."""
    rows = sorted(runs, key=lambda run: (run["kernel"], run["tool"]))
    path.write_text("".join(json.dumps(run) + "\n" for run in rows), encoding="utf-8")


def current(runs: Mapping[tuple[str, str], Run], specs: Iterable[NamedSpec]) -> list[Run]:
    """The finished runs of today's sources."""
    pairs = ((named, runs.get((named.stem, tool))) for named in specs for tool in TOOLS)
    return [run for named, run in pairs if run and run["count"] is not None and run["source"] == source_hash(named)]


def missing(runs: Mapping[tuple[str, str], Run], specs: Sequence[NamedSpec]) -> list[tuple[NamedSpec, str]]:
    """Kernels and tools without a finished run of today's source: those without any run first."""
    known = {(run["kernel"], run["tool"]) for run in current(runs, specs)}
    pairs = [(named, tool) for named in specs for tool in TOOLS if (named.stem, tool) not in known]
    return sorted(pairs, key=lambda pair: (pair[0].stem, pair[1]) in runs)


def output_of(command: Sequence[str], seconds: float) -> tuple[int, str] | None:
    """Exit code and output; None, with all its processes ended, if a command does not end within the time."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
        return process.returncode, said


def sanitized(named: NamedSpec, tool: str, seconds: float) -> Run | None:
    """A run of a tool on a kernel's small call; None if it does not end within the time."""
    pattern = "kns=" + named.stem.partition("_")[0] + "_"
    call = [sys.executable, str(ROOT / "tests" / "gpu" / "small_call.py"), named.stem]
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], "--error-exitcode", str(ERRORS_FOUND)]
    done = output_of([*command, "--kernel-regex", pattern, *call], seconds)
    if done is None:
        return None
    code, said = done
    summary = SUMMARY.search(said)
    run: Run = {"kernel": named.stem, "tool": tool, "source": source_hash(named), "count": None, "rc": code}
    if summary is not None and f"{named.stem}: ran" in said:
        run["count"] = int(summary[1] or summary[2])
    else:
        print(f"{named.stem} {tool}: rc {code}\n{said[-600:]}", file=sys.stderr)
    return run


def run_missing(only: Sequence[str], jobs: int, seconds: float) -> int:
    """Run what is missing until the time is over, write the record, and report; 1 if a tool found something."""
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("error: compute-sanitizer is not installed; nothing was run")
    end, runs = time.monotonic() + seconds, recorded()
    waiting: dict[NamedSpec, list[str]] = {}
    specs = [named for named in shipped_specs() if any(fnmatch.fnmatch(named.stem, glob) for glob in only)]
    for named, tool in missing(runs, specs):
        waiting.setdefault(named, []).append(tool)

    def of_kernel(named: NamedSpec) -> list[Run]:  # one tool after the other: the second finds the compiled kernel
        found = []
        for tool in waiting[named]:
            left = end - time.monotonic()
            found.append(sanitized(named, tool, left) if left > 0 else None)
        return [run for run in found if run is not None]

    with ThreadPoolExecutor(jobs) as pool:
        made = [run for those in pool.map(of_kernel, waiting) for run in those]
    write((runs | {(run["kernel"], run["tool"]): run for run in made}).values())
    found = [run for run in made if run["count"] != 0]
    print(f"{len(made)} of {sum(map(len, waiting.values()))} runs ended, {len(found)} with reports or without a result")
    for run in found:
        print(f"{run['kernel']} {run['tool']}: {run['count']} (rc {run['rc']})")
    return int(bool(found))


def table(runs: Mapping[tuple[str, str], Run], specs: Sequence[NamedSpec]) -> str:
    """For each operator, how many kernels have a run of their source, and how many of them with reports."""
    rows = [line(["operator", "kernels", *TOOLS, "with reports"]), line(["---"] * (3 + len(TOOLS)))]
    found = current(runs, specs)
    for arch, op in sorted({(named.spec.arch, named.spec.op) for named in specs}):
        stems = {named.stem for named in specs if (named.spec.arch, named.spec.op) == (arch, op)}
        ended = [run for run in found if run["kernel"] in stems]
        counts = [str(sum(run["tool"] == tool for run in ended)) for tool in TOOLS]
        reports = Counter(run["tool"] for run in ended if run["count"])
        shown = ", ".join(f"{number} by {tool}" for tool, number in reports.items())
        rows.append(line([f"`{op}`, {arch}", str(len(stems)), *counts, shown or DASH]))
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tools, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time; default: 4")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="names of kernels; default: all")
    parser.add_argument("--seconds", type=float, default=240, help="when to stop; default: 240")
    parser.add_argument("--table", action="store_true", help="write the table of docs/reference/verified.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 if that would change the page")
    given = parser.parse_args(arguments)
    if given.table or given.check:
        texts = {"sanitizers": table(recorded(), shipped_specs())}
        return int(update(PAGE, texts, check=given.check, stale=STALE))
    return run_missing(given.only, given.jobs, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
