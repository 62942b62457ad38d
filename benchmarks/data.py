"""Times attention kernels and their peers on every data set, in both ways, and goes on where an earlier run ended.

    python benchmarks/data.py --cells benchmarks/results/attention_data_h100.jsonl --budget 540
    python benchmarks/data.py --cells cells.jsonl --rows topk32 --data std1 rising --dtypes fp16 --peers fa4

A cell is a row of benchmarks/attention.py (group "data") on a data set of runtime/tools/bench/data_sets.py in one
type. It is appended to the file as a JSON line once it is measured. Those that the file has of the same device and of
today's source are skipped. One of an older source is measured again, and the newest counts. A file with cells of
another device is refused. Where only comments or names of a source have changed, so that today's code is what was
measured, ``codegen migrate FILE`` makes its cells today's. benchmarks/results_table.py makes the tables.

FlexAttention, which takes longer to compile than to time, runs where no other peer computes a row, or where --peers
names it. FlashAttention 3 runs beside our bf16 kernels alone: its wheel has no other type.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attention
import data_cells
import harness
import torch
from attention import PACKAGES, PEERS, Part, Row, errors_of, exact_parts, flops, in_bf16, make_problem, ours
from attention_peers import Problem
from harness import OURS, Fields, check_calls, free_memory, make_calls, time_calls
from records import BACK_TO_BACK, SINGLE, best_peer, both, ratio_to_best, speeds

from codegen.library import NamedSpec, find_spec
from codegen.receipts import source_sha256
from codegen.render import render
from codegen.spec import AttentionSpec
from runtime.tools.bench.data_sets import DATA, make_data
from runtime.tools.bench.timing import BLOCK_SECONDS, ROUNDS, SETTLING_SHARE, Call
from runtime.verify.rows import kernel_fields

USUAL_PEERS = ("sdpa", "fa4", "cudnn_bsa", "fa3")
LAST_RESORT = "flex"
REPEATS = 11  # single calls
PARTS = 5  # of each head that is compared: the first and the last rows, and three between
SINGLE_SECONDS = 0.05  # of one call's single runs, about
CHECK_SECONDS = 0.5  # of making a cell's data and of comparing its results, about


@dataclass(frozen=True)
class Column:
    """A row in one type: what is made once for all data sets.

    Attributes:
        row: with the kernel's spec of that type.
        dtype: fp16 or bf16.
        named: the spec.
        source: hash of its source.
        peers: names of PEERS.
        data: the data sets that are left to measure.
    """

    row: Row
    dtype: str
    named: NamedSpec
    source: str
    peers: tuple[str, ...]
    data: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """About how long the column takes, but for what is compiled."""
        calls = 1 + len(self.peers) + ("sdpa" in self.peers)  # which has two backends
        timing = ROUNDS * BLOCK_SECONDS * (1 + SETTLING_SHARE) + SINGLE_SECONDS
        return len(self.data) * (calls * timing + CHECK_SECONDS)


def peers_of(row: Row, dtype: str, asked: Sequence[str] | None) -> tuple[str, ...]:
    """The peers of a row in a type: those requested, or the usual ones, or the last resort."""
    names = [name for name in row.peers if name in (asked or USUAL_PEERS)]
    if dtype == "fp16":
        names = [name for name in names if name != "fa3"]
    if not names and asked is None and LAST_RESORT in row.peers:
        names = [LAST_RESORT]
    return tuple(names)


def planned(options: argparse.Namespace, found: dict[data_cells.Key, data_cells.Cell]) -> list[Column]:
    """The columns with cells that are left to measure, fp16 first."""
    rows = {row.name: row for row in attention.ROWS}
    columns = []
    for dtype in options.dtypes:
        for name in options.rows:
            row = in_bf16(rows[name]) if dtype == "bf16" else rows[name]
            named = find_spec(row.fields)
            source, shape = source_sha256(render(named)), attention.shape_fields(row)
            data = tuple(
                data
                for data in data_cells.DATA[dtype]
                if data in options.data
                and not data_cells.is_measured(found.get((name, data, dtype)), source, shape, OURS)
            )
            if data:
                columns.append(Column(row, dtype, named, source, peers_of(row, dtype, options.peers), data))
    return columns


def compared_heads(heads: int) -> list[int]:
    """The heads whose parts are compared: the first, the middle and the last one."""
    return list(dict.fromkeys((0, heads // 2, heads - 1)))


def measure_cell(
    problem: Problem, data: str, calls: dict[str, Call], work: float
) -> tuple[dict[str, Fields], dict[str, str]]:
    """Fill the tensors with a data set, check every call on it and time those that are right.

    Returns:
        The results by label (also ``absolute_error``), and what is wrong with the others.
    """
    generator = torch.Generator(problem.q.device).manual_seed(0)
    make_data(data, problem.q, problem.k, problem.v, generator)
    problem.refresh_copies()
    parts: list[Part] = exact_parts(problem, compared_heads(problem.q.shape[1]), PARTS)
    absolute: dict[str, float] = {}

    def error_of(label: str, out: Any) -> float:
        absolute[label], relative = errors_of(problem, parts, out)
        return relative

    errors, wrong = check_calls(calls, error_of)
    times = time_calls({label: calls[label] for label in errors}, work, REPEATS)
    results = {
        label: {**time, "error": float(f"{errors[label]:.2e}"), "absolute_error": float(f"{absolute[label]:.2e}")}
        for label, time in times.items()
    }
    return results, wrong


def measure_column(
    column: Column, environment: Fields, installed: Sequence[str], may_begin: Callable[[], bool]
) -> Iterator[data_cells.Cell]:
    """The cells of a column; its tensors are made and its peers compiled once.

    Args:
        column: what to measure.
        environment: device, driver and versions.
        installed: peers that can run.
        may_begin: whether there is time for another cell.
    """
    spec = column.named.spec
    assert isinstance(spec, AttentionSpec)
    problem = make_problem(column.row, spec)
    work = flops(column.row, spec, problem.lists)
    makers = [ours, *(PEERS[name].make for name in column.peers if name in installed)]
    calls, failed = make_calls(makers, problem)
    kernel = {**kernel_fields(column.named, ran=OURS in calls), "source_sha256": column.source}
    for data in column.data:
        if not may_begin():
            return
        results, wrong = measure_cell(problem, data, calls, work)
        torch.cuda.synchronize()  # a device that a call has left unusable ends the run here, before a cell is written
        yield {
            **environment,
            **attention.shape_fields(column.row),
            "data": data,
            **kernel,
            "flops": work,
            "results": results,
            "failed": failed | wrong,
            "not_installed": [name for name in column.peers if name not in installed],
        }


def told(cell: data_cells.Cell) -> str:
    """A finished cell in one line."""
    results, peer = cell["results"], best_peer(cell, BACK_TO_BACK)
    own = results.get(OURS)
    words = [f"{cell['name']} {cell['data']} {cell['spec']['dtype']}: {speeds(own)}"]
    if peer:
        words.append(f"{peer} {speeds(results[peer])}")
    words.append(f"ratio {both(ratio_to_best(cell, SINGLE), ratio_to_best(cell, BACK_TO_BACK), '.3f')}")
    words += [f"error of {label} {result['absolute_error']:.1e}" for label, result in results.items()]
    return ", ".join([*words, *(f"{label} has no time: {why}" for label, why in cell["failed"].items())])


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--cells", type=Path, required=True, metavar="FILE", help="where cells are read and appended")
    rows = f"of {', '.join(data_cells.ROWS)}"
    parser.add_argument(
        "--rows", nargs="+", choices=data_cells.ROWS, default=data_cells.ROWS, metavar="NAME", help=rows
    )
    harness.add_data_option(parser, DATA, "all")
    parser.add_argument("--dtypes", nargs="+", choices=data_cells.DATA, default=tuple(data_cells.DATA), metavar="NAME")
    peers = f"of {','.join(PEERS)}; by default {','.join(USUAL_PEERS)}, or {LAST_RESORT} where none of them computes it"
    parser.add_argument("--peers", type=harness.peer_names(PEERS), metavar="NAME,...", help=peers)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="no cell is begun later")
    options = parser.parse_args(arguments)
    options.data = harness.chosen_data(options, DATA)
    return options


@torch.no_grad()
def measure(options: argparse.Namespace) -> int:
    """Measure what the file lacks until the budget is spent; return how many cells are left."""
    begun = time.monotonic()
    environment = harness.environment(PACKAGES)
    found = data_cells.read(options.cells)
    data_cells.check_one_device(options.cells, found.values(), environment["device"])
    data_cells.drop_short_line(options.cells)
    columns = planned(options, found)
    left = sum(len(column.data) for column in columns)
    seconds = sum(column.seconds for column in columns)
    print(f"{left} cells to measure on {environment['device']}, about {seconds:.0f} s and what is compiled", flush=True)
    wanted = dict.fromkeys(name for column in columns for name in column.peers)
    installed = [name for name in wanted if PEERS[name].installed]
    if absent := [name for name in wanted if name not in installed]:
        print(f"peers not installed: {', '.join(absent)}", flush=True)

    def may_begin() -> bool:
        return options.budget is None or time.monotonic() - begun < options.budget

    for column in columns:
        if not may_begin():
            break
        for cell in measure_column(column, environment, installed, may_begin):
            data_cells.append(options.cells, cell)
            left -= 1
            print(f"{time.monotonic() - begun:.0f} s, {left} left: {told(cell)}", flush=True)
        free_memory()
    return left


def main() -> int:
    options = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; benchmarks/results_table.py shows the cells of an earlier run")
    left = measure(options)
    if left:
        print(f"the budget is spent; the same command measures the {left} cells that are left")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
