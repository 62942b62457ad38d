"""Tunes rows of the overview in results.md over hand-written spaces, to check that their kernel is the best of its
space.

    python benchmarks/tuning.py --compile-only --db tuning.sqlite          # needs no GPU; the candidates into the cache
    python benchmarks/tuning.py --db tuning.sqlite --json benchmarks/results/tuning_h100.json
    python benchmarks/tuning.py --from benchmarks/results/tuning_h100.json

`python benchmarks/results_table.py` writes its table into docs/reference/select.md.

A row is `codegen tune SIZES --spec KERNEL --over SPACE`. The database keeps each candidate: a run that was interrupted
goes on where it ended. The JSON is written after each row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from dataclasses import dataclass
from pathlib import Path

from tuning_page import table

from codegen.json_rows import json_rows
from codegen.library import find_spec
from codegen.tools.report import Report
from runtime.tools.bench.required import require_gpu
from runtime.tools.tune.command import Options, read_problems, run, task_of
from runtime.tools.tune.database import Database


@dataclass(frozen=True)
class Row:
    """A row of the overview in results.md: its kernel, the sizes of its workload, and the space."""

    kernel: str
    sizes: str
    over: tuple[str, ...]


LONG = "batch=1,heads=16,q_len=32768,kv_len=32768"
SQUARE = "batch=2,heads=16,q_len=8192,kv_len=8192"
SCHEDULES, TAIL = "schedule=ping_pong,cooperative", "stream_k_tail=true,false"
# Of d 128: all tiles with two or three warpgroups whose steps are not short.
TILES = "tile=128x96,128x112,128x128,128x144,128x160,128x176,192x64,192x80"
D64 = ("tile.m=128,192,256", "tile.n=64,80,96,112,128,144,160,176,192", "stages=2,3", SCHEDULES)
ROWS = (
    Row(
        "h100_topk32",
        LONG,
        ("tile=64x64,64x128,128x64,128x128", "stages=2,3,4,5,6", SCHEDULES, TAIL, "l2_lockstep=false,true"),
    ),
    Row("h100_causal_d64", SQUARE, D64),
    Row("h100_dense_d64", SQUARE, D64),
    Row("h100_window2k", LONG, (TILES, "stages=2,3,4", SCHEDULES, TAIL)),
    Row("h100_dense", SQUARE, (TILES, "stages=2,3,4", SCHEDULES, TAIL)),
    Row("h100_causal", SQUARE, (TILES, "stages=2,3,4", SCHEDULES)),
    Row(
        "h100_topk32_d64",
        LONG.replace("heads=16", "heads=8"),
        ("tile=128x64,128x128,256x64", "stages=2,3,4,5,6", SCHEDULES, TAIL),
    ),
)


def tuned(row: Row, database: Database, *, compile_only: bool, told: Report) -> dict[str, object]:
    """Tune a row; the result is its record."""
    named = find_spec(row.kernel)
    options = Options(compile_only=compile_only, over=row.over)
    (problem,) = read_problems([row.sizes], None, named)
    began = time.perf_counter()
    run(told, database, [task_of(problem, named, options)], options)
    kept = {"kernel": row.kernel, "sizes": row.sizes, **told.document["spaces"][-1]}
    if compile_only:
        return kept
    rows = [each for each in told.rows if each["problem"] == str(problem)]
    summary = told.document["problems"][-1]
    return kept | summary | {"rows": rows, "seconds": round(time.perf_counter() - began, 1)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.kernel for row in ROWS]
    parser.add_argument("--kernels", nargs="+", choices=names, default=names, metavar="NAME", help="rows to tune")
    parser.add_argument("--db", type=Path, default=Path("tuning.sqlite"), metavar="FILE", help="what was found")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write what is to be kept")
    parser.add_argument("--compile-only", action="store_true", help="compile the candidates; needs no GPU")
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="no row is begun after so many")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="show an earlier run's JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.earlier:
        print(table(json.loads(options.earlier.read_text(encoding="utf-8"))))
        return
    report: dict[str, object] = {}
    if not options.compile_only:
        require_gpu("tuning", "timed")
        from harness import environment

        report = environment(("torch",)) | {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    began, database, told, done = time.monotonic(), Database(options.db), Report(as_json=False), []
    for row in ROWS:
        if row.kernel not in options.kernels:
            continue
        if time.monotonic() - began > options.seconds:
            print(f"{row.kernel}: not begun, {options.seconds:.0f} s are over; the same command goes on from here")
            continue
        done.append(tuned(row, database, compile_only=options.compile_only, told=told))
        if options.json and not options.compile_only:
            options.json.write_text(json_rows(report | {"rows": done}), encoding="utf-8")
    if not options.compile_only:
        print(table(report | {"rows": done}))


if __name__ == "__main__":
    main()
