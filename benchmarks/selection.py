"""Compares the kernels that codegen.select chooses with the best ones found, on problems that are not in its table.

    python benchmarks/selection.py --draw              # no GPU: writes the problems, and those for tuning, by seeds
    python benchmarks/selection.py --compile-only      # no GPU: compiles every candidate into the cache
    python benchmarks/selection.py --db selection.sqlite --json selection.json --budget 500
    python benchmarks/selection.py --from selection.json --markdown   # no GPU: print an earlier run
    python benchmarks/selection.py --leave-one-out     # no GPU: each row of the table by the choice without it

For each problem: the chosen kernel, the fastest of the shipped specs and of the tuner's candidates, both timings, and
how much slower the choice is. All candidates are those of ``codegen tune``, verified before they are timed; the choice
is timed again with the best, in turns. The database lets a run that was interrupted, or whose budget was spent, go on.
Rows that are exported from it are not to join the table before the comparison is repeated on other problems: these
would be unseen no longer. What the table is tuned on is drawn by another seed, none of them among the 60; beside these
products with few columns, of other sizes:

    codegen tune --file benchmarks/tuning_problems.jsonl --db tune.sqlite --export rows.jsonl
    python benchmarks/measurement_rows.py --tuned rows.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import selection_page as page
from rich.console import Console
from rich.table import Table
from selection_page import HEADINGS, cells, remarks

from codegen.json_rows import json_rows
from codegen.library import NamedSpec
from codegen.select import Choice, choose, parse_problem
from codegen.select.calibration import FEWEST
from codegen.select.candidates import candidates
from codegen.select.estimate import seen_keys
from codegen.select.problem import AttentionProblem, Problem, tuning_of
from codegen.select.table import Measurement, measurements
from codegen.spec import canonical
from runtime.compile import toolchain
from runtime.compile.compiler import compile_spec
from runtime.tools.tune.command import read_problems
from runtime.tools.tune.database import Database, Device, Record
from runtime.tools.tune.tuner import best_of, compile_all, cost, tune

Fields = dict[str, Any]
PROBLEMS = Path(__file__).with_name("selection_problems.jsonl")
TUNING_PROBLEMS = Path(__file__).with_name("tuning_problems.jsonl")
SEED = 20261128
OF_EACH = (30, 30)  # problems of attention, and of BSR products
TUNING = ((20261125, (30, 30)), (20261126, (24, 44)), (20261127, (30, 30)))  # seeds, and how many of each
FEW = ((14336, 4096), (4096, 4096)), (16, 64), 0.3  # M and K, N, density of further products that are tuned on
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
HEADS = (1, 2, 4, 8, 16, 32, 64)
GROUPS = (1, 2, 4, 8)
LAYERS = ((4096, 4096), (11008, 4096), (4096, 14336))  # M, K
COLUMNS = (1, 16, 128, 640, 2048, 8192)
BLOCKS = (16, 32, 64, 128)
DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
POWER_LAWS = (2.0, 4.0, 8.0)  # longest row over the mean one
MOST_FLOPS = 1.5e13  # of a problem: about 25 ms
MOST_ELEMENTS = 1 << 30  # of q: 2 GB


# Problems


def draw() -> list[Problem]:
    """Draw the problems: the same at any time."""
    return _drawn(SEED, OF_EACH, frozenset(draw_tuning()))


def draw_tuning() -> list[Problem]:
    """Draw the problems that the table is tuned on."""
    found = _few()
    for seed, of_each in TUNING:
        found += _drawn(seed, of_each, frozenset(found))
    return found


def _few() -> list[Problem]:
    layers, columns, density = FEW
    found = []
    for (m, k), block, n in itertools.product(layers, BLOCKS, columns):
        stored = round(round(k // block * density) / (k // block), 6)
        sizes = {"m": m, "n": n, "k": k, "density": stored, "evenness": 1.0, "overlap": 0.0}
        found.append(parse_problem({"op": "bsr_spmm", "block": {"rows": block, "cols": block}, **sizes}))
    return found


def _drawn(seed: int, of_each: tuple[int, int], without: frozenset[Problem] = frozenset()) -> list[Problem]:
    source = random.Random(seed)
    kinds = ((_attention(source) for _ in iter(int, 1)), (_bsr(source) for _ in iter(int, 1)))
    return [each for drawn, count in zip(kinds, of_each, strict=True) for each in _distinct(drawn, count, without)]


def _distinct(drawn: Iterable[Problem | None], count: int, without: frozenset[Problem]) -> list[Problem]:
    found: dict[Problem, None] = {}
    for problem in drawn:
        if problem is not None and problem not in without:
            found[problem] = None
        if len(found) == count:
            break
    return list(found)


def _patterns(source: random.Random) -> list[Fields]:
    """A pattern of each kind."""
    block = {"q": source.choice((64, 128)), "kv": source.choice((64, 128))}
    wide = source.choice((255, 1023, 4095))
    return [
        {"kind": "dense"},
        {"kind": "causal"},
        {"kind": "topk", "k": source.choice((4, 8, 24, 48)), "block": block},
        {"kind": "sliding_window", "left": wide, "right": source.choice((0, wide))},
        {"kind": "block_lists", "block": {"q": 128, "kv": 128}, "mask": "causal"},
        {"kind": "prefix_lm"},
        {"kind": "sink_window", "sink": 64, "left": wide, "right": 0},
        {"kind": "strided", "stride": source.choice((4, 8, 16)), "local": source.choice((3, 7)), "block": 128},
    ]


def _attention(source: random.Random) -> Problem | None:
    """Draw an attention problem; None for one that is too large, or has more listed blocks than blocks."""
    pattern, heads, length = source.choice(_patterns(source)), source.choice(HEADS), source.choice(LENGTHS)
    group = source.choice([each for each in GROUPS if each <= heads])
    sizes: Fields = {"batch": 1, "heads": heads, "kv_heads": heads // group, "q_len": length, "kv_len": length}
    if "block" in pattern and isinstance(pattern["block"], dict):
        listed = pattern.get("k", 32)
        if 2 * listed * pattern["block"]["kv"] > length:
            return None
        sizes["overlap"] = 0.0
        if "k" not in pattern:
            sizes["list_length"] = listed
    head_dim = source.choice((64, 128))
    problem = parse_problem({"op": "attention", "head_dim": head_dim, "pattern": pattern, **sizes})
    assert isinstance(problem, AttentionProblem)
    keys = seen_keys(problem, 128)
    assert keys is not None
    flops = 4.0 * heads * length * keys[0] * head_dim
    return problem if flops <= MOST_FLOPS and heads * length * head_dim <= MOST_ELEMENTS else None


def _bsr(source: random.Random) -> Problem:
    """Draw a product of a layer's sparse weights and dense activations; a few are sampled products, or sparse both."""
    (m, k), block, density = source.choice(LAYERS), source.choice(BLOCKS), source.choice(DENSITIES)
    op = source.choices(("bsr_spmm", "bsr_sddmm", "bsr_spgemm"), (8, 1, 1))[0]
    columns = source.choice(COLUMNS if op == "bsr_spmm" else (2048, 8192))
    evenness = source.choice((1.0, 1.0, source.choice(POWER_LAWS)))
    across = (columns if op == "bsr_sddmm" else k) // block
    mean = max(1.0, density * across)
    sizes = {"m": m, "n": columns, "k": k, "density": density, "evenness": round(min(evenness, across / mean), 2)}
    return parse_problem({"op": op, "block": {"rows": block, "cols": block}, **sizes, "overlap": 0.0})


def text_of(problems: Sequence[Problem]) -> str:
    """The file of the problems."""
    plain = ({"op": each.op, **each.model_dump(mode="json", exclude_defaults=True)} for each in problems)
    return "".join(f"{json.dumps(each)}\n" for each in plain)


# Runs


def group_of(problem: Problem, choice: Choice) -> list[NamedSpec]:
    """The candidates of a problem, the chosen one among them."""
    found = candidates(problem)
    return found if any(named.spec == choice.spec for named in found) else [*found, choice.named]


def record_of(problem: Problem, choice: Choice, records: Sequence[Record], dense: Any) -> Fields:
    """Entry of a problem in the report.

    Args:
        problem: the problem.
        choice: what is chosen.
        records: what became of each candidate.
        dense: name and figures of a dense product, if there is one.
    """
    timed = [record for record in best_of(records) if record.again] or best_of(records)
    own = next((record for record in records if record.named.spec == choice.spec), None)
    shipped = next((record for record in timed if record.named.path is not None), None)
    return {
        "problem": json.loads(text_of([problem])),
        "words": str(problem),
        "rule": choice.rule,
        "reason": choice.reason,
        "choice": _entry(own),
        "best": _entry(timed[0] if timed else None),
        "best_shipped": _entry(shipped),
        "ratios": _ratios(own, timed[0] if timed else None),
        "dense": {"name": dense[0], **_figures(dense[1])} if dense and dense[1] else None,
        "candidates": len(records),
        "failed": {record.named.stem: record.failure for record in records if record.failure},
    }


def _figures(figures: Any) -> Fields:
    return {"single_us": figures.single_us, "back_to_back_us": figures.back_to_back_us}


def _entry(record: Record | None) -> Fields | None:
    if record is None or record.figures is None:
        return None
    spec = json.loads(record.named.spec.canonical_json())
    return {"stem": record.named.stem, "spec": spec, **_figures(record.figures)}


def _ratios(own: Record | None, best: Record | None) -> Fields | None:
    """Time of the choice relative to the best: single calls, back to back, both."""
    if own is None or best is None or own.figures is None or best.figures is None:
        return None
    mine, other = own.figures, best.figures
    found = {"single": mine.single_us / other.single_us, "both": cost(mine) / cost(other)}
    if mine.back_to_back_us and other.back_to_back_us:
        found["back_to_back"] = mine.back_to_back_us / other.back_to_back_us
    return found


def measure(options: argparse.Namespace) -> Fields:
    """Tune each problem until the budget is spent; the JSON is written after each."""
    problems = read_problems((), options.problems)
    began = time.monotonic()
    here = None if options.compile_only else _device(problems)
    choices = {problem: choose(problem, device=here.name if here else None) for problem in problems}
    groups = {problem: group_of(problem, choices[problem]) for problem in problems}
    database = Database(options.db)
    compiler = " ".join(toolchain.compiler_version())
    failures = compile_all(database, [n for group in groups.values() for n in group], compiler, compile_spec)
    print(f"{sum(map(len, groups.values()))} candidates are compiled, {len(failures)} are not", flush=True)
    report: Fields = {"device": here and here.name, "driver": here and here.driver, "rows": [], "not_run": []}
    if here is None:
        return report
    for problem in problems:
        if options.budget is not None and time.monotonic() - began > options.budget:
            report["not_run"].append(str(problem))
            continue
        from runtime.tools.tune.gpu import GpuBench

        choice = choices[problem]
        records = tune(*(database, problem, groups[problem], here, GpuBench), failures=failures, beside=choice.named)
        report["rows"].append(record_of(problem, choice, records, database.dense(problem, here)))
        print(" | ".join(cells(report["rows"][-1])), flush=True)
        if options.json:
            options.json.write_text(json_rows(report), encoding="utf-8")
    return report


def _device(problems: Sequence[Problem]) -> Device:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; --from FILE shows an earlier run, --compile-only needs none")
    from runtime.tools.tune.gpu import device

    return device(problems)


# Without a GPU: rows of the table


def leave_one_out(table: Sequence[Measurement]) -> list[Fields]:
    """Choose for the problem of each row that has enough kernels, as if the table had not that row.

    Returns:
        Rows as :func:`remarks` takes them; without ratios where the chosen kernel was not timed.
    """
    found = []
    for row in table:
        if len(row.kernels) < FEWEST:
            continue
        choice = choose(row.problem, rows=[each for each in table if each.problem != row.problem])
        costs = dict(zip((each.label for each in row.kernels), row.costs(), strict=True))
        cost_of_choice = costs.get(canonical(tuning_of(choice.spec)))
        ratios = {"both": cost_of_choice / min(costs.values())} if cost_of_choice else None
        found.append({"words": str(row.problem), "rule": choice.rule, "ratios": ratios})
    return found


# Tables


def show(report: Mapping[str, Any], markdown: bool) -> None:
    """Print the table and the remarks."""
    rows = sorted(report["rows"], key=lambda row: -(row["ratios"] or {"both": math.inf})["both"])
    if markdown:
        print(page.table(report))
        return
    table = Table(title=f"{report['device']}, driver {report['driver']}; single calls / back to back")
    for heading in HEADINGS:
        table.add_column(heading)
    for row in rows:
        table.add_row(*cells(row))
    console = Console(width=None if Console().is_terminal else 200, highlight=False)
    console.print(table)
    for text in remarks(report):
        console.print(text, markup=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="write the problems")
    parser.add_argument("--leave-one-out", action="store_true", help="no GPU: rows of the table, each without itself")
    parser.add_argument("--problems", type=Path, default=PROBLEMS, metavar="FILE", help="problems as JSON, one a line")
    parser.add_argument("--compile-only", action="store_true", help="time nothing")
    parser.add_argument("--db", type=Path, default=Path("selection.sqlite"), metavar="FILE", help="database of timings")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no problem after this time; skipped ones are listed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the report")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show an earlier report")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    if options.leave_one_out:
        rows = leave_one_out(measurements())
        print("\n".join(page.summary(rows)))
        print(f"{sum(row['ratios'] is None for row in rows)} choices were not timed for their problem")
        return 0
    if options.draw:
        options.problems.write_text(text_of(draw()), encoding="utf-8")
        TUNING_PROBLEMS.write_text(text_of(draw_tuning()), encoding="utf-8")
        print(f"wrote {options.problems}")
        return 0
    report = json.loads(options.source.read_text(encoding="utf-8")) if options.source else measure(options)
    if not options.compile_only:
        show(report, options.markdown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
