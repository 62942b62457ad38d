"""Times the gradients of attention beside other libraries' backward, in one run.

    python benchmarks/attention_backward.py --all-peers --json benchmarks/results/attention_backward_h100.json
    python benchmarks/attention_backward.py --from benchmarks/results/attention_backward_h100.json  # no GPU: an old run
    python benchmarks/attention_backward.py --from benchmarks/results/attention_backward_h100.json --page
    python benchmarks/attention_backward.py --prologue  # how long statistics and transposed lists take by themselves

Effective TFLOPS are of five products over the pairs that the pattern shows, whatever a kernel computes; ours compute
seven over lists of 64 x 64 blocks. A call of ours is all that a backward does: statistics, transposed lists, dQ, dK and
dV. It is deterministic, as "FA4 deterministic" is; other peers may give other bits in each run, and so may "ours, any
order", of five products wherever it is written: what `deterministic=False` takes where it is faster. Lists are of
random different blocks.

The gradients of every call are checked against float64 on some queries and keys of the last head before it is timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import backward_peers
import backward_prologue
import harness
import torch
from backward_peers import Problem
from harness import Fields, check_calls, environment, free_memory, time_calls
from records import BACK_TO_BACK, DETERMINISTIC, SINGLE
from rich.console import Console
from rich.table import Table

from codegen.json_rows import json_rows
from codegen.parse import parse_spec
from codegen.select.backward import OP, BackwardKernels, backward_kernels
from runtime import load_kernel
from runtime.tools.bench.data_sets import make_data
from runtime.tools.bench.timing import Call

PACKAGES = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend")
OURS, ANY_ORDER = "ours", "ours, any order"
SAMPLES = 8  # queries and keys whose gradients are checked
REPEATS = 11
DATA = ("std1", "std4")
Pattern = dict[str, Any]
CAUSAL: Pattern = {"kind": "causal"}
DENSE: Pattern = {"kind": "dense"}


@dataclass(frozen=True)
class Row:
    """One workload, bf16.

    Attributes:
        batch: batches.
        heads: heads of Q, K and V.
        length: queries and keys.
        head_dim: elements of a head.
        pattern: of the specs.
        entries: of a list.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    pattern: Pattern
    entries: int = 0

    @property
    def name(self) -> str:
        block = self.pattern.get("block")
        kind = f"top {self.entries} of {block['q']} x {block['kv']}" if block else str(self.pattern["kind"])
        if "left" in self.pattern:
            kind = f"window {self.pattern['left'] + 1}"
        return f"{kind}, B{self.batch} H{self.heads} S{self.length} d{self.head_dim}"


def topk(block: int) -> Pattern:
    return {"kind": "topk", "block": {"q": block, "kv": block}}


ROWS = (
    *(Row(2, 16, 8192, 128, pattern) for pattern in (DENSE, CAUSAL)),
    *(Row(1, 16, 32768, 128, pattern) for pattern in (DENSE, CAUSAL)),
    *(Row(2, 16, 8192, 64, pattern) for pattern in (DENSE, CAUSAL)),
    Row(1, 16, 32768, 128, topk(128), 32),
    Row(1, 16, 32768, 128, topk(64), 32),
    Row(1, 8, 32768, 64, topk(128), 32),
    Row(1, 8, 8192, 128, topk(128), 16),
    Row(1, 8, 32768, 128, {"kind": "sliding_window", "left": 2047, "right": 0}),
)
LONG = Row(1, 16, 131072, 128, topk(128), 32)  # of --prologue


def seen(problem: Problem, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Visibility of selected pairs in the last head: float64 (queries, keys)."""
    length, pattern = problem.q.shape[2], problem.spec.pattern
    block = pattern.fixed_block
    if block is None:
        found: torch.Tensor = pattern.visible(queries[:, None], keys[None, :], length, length)
        return found.double().expand(len(queries), len(keys))
    blocks = torch.zeros(length // block.q, length // block.kv, dtype=torch.float64, device=queries.device)
    lists = problem.lists[0][-1, -1].long()
    blocks.scatter_(1, lists, 1.0)
    return blocks[queries // block.q][:, keys // block.kv]


def error_of(problem: Problem) -> Callable[[str, Any], float]:
    """A function that returns the errors of gradients, relative to the largest checked element of each."""
    q, k, v, dout, out = (t[-1, -1].double() for t in (problem.q, problem.k, problem.v, problem.dout, problem.out))
    lse, every = problem.lse[-1, -1].double(), torch.arange(q.shape[0], device=q.device)
    some = torch.linspace(0, q.shape[0] - 1, SAMPLES, device=q.device).long()
    scale, delta = q.shape[1] ** -0.5, (dout * out).sum(-1)

    def weights(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        scores = q[queries] @ k[keys].T * scale
        return seen(problem, queries, keys) * (scores - lse[queries, None]).exp().nan_to_num()

    rows, columns = weights(some, every), weights(every, some)
    ds_rows = rows * (dout[some] @ v.T - delta[some, None])
    ds_columns = columns * (dout @ v[some].T - delta[:, None])
    exact = (scale * ds_rows @ k, scale * ds_columns.T @ q, columns.T @ dout)

    def error(label: str, gradients: Any) -> float:
        del label
        found = (gradient[-1, -1, some].double() for gradient in gradients)
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))

    return error


def kernels_of(problem: Problem) -> BackwardKernels:
    """Choose our kernels as ``block_sparse_attention`` does."""
    fields = problem.spec.model_dump(include={"arch", "dtype", "head_dim"})
    return backward_kernels(problem.spec.pattern, **fields)


def loaded_apart(problem: Problem) -> tuple[Any, Any]:
    """Load our kernels of dQ, and of dK and dV."""
    kernels = kernels_of(problem)
    return load_kernel(kernels.dq), load_kernel(kernels.dkdv)


def ours(problem: Problem) -> Call:
    """The call of our kernels: all of a backward."""
    kernels = kernels_of(problem)
    q, k, v = problem.q, problem.k, problem.v
    of_call = {"out": problem.out, "dout": problem.dout, "lse": problem.lse}
    if kernels.dq_dkdv is not None:
        dq_dkdv = load_kernel(kernels.dq_dkdv)

        def call_one() -> tuple[torch.Tensor, ...]:
            found: Any = dq_dkdv(q, k, v, *problem.lists, **of_call)
            return found.dq, found.dk, found.dv

        return call_one
    dq, dkdv = loaded_apart(problem)

    def call() -> tuple[torch.Tensor, ...]:
        first: Any = dq(q, k, v, *problem.lists, **of_call)
        second: Any = dkdv(q, k, v, *problem.lists, **of_call, stats=first.stats)
        return first.dq, second.dk, second.dv

    return call


def ours_in_any_order(problem: Problem) -> dict[str, Call]:
    """The call of our kernel whose tiles add to dQ in any order, by its label; empty for lists, which have none."""
    if problem.spec.pattern.fixed_block is not None:
        return {}
    fields = {"op": OP, "gradients": "dq_dkdv", "deterministic": False, "pattern": problem.spec.pattern.model_dump()}
    kernel = load_kernel(parse_spec(fields | problem.spec.model_dump(include={"arch", "dtype", "head_dim"})))
    q, k, v, of_call = problem.q, problem.k, problem.v, {"dout": problem.dout, "lse": problem.lse}

    def call() -> tuple[torch.Tensor, ...]:
        found: Any = kernel(q, k, v, *problem.lists, out=problem.out, **of_call)
        return found.dq, found.dk, found.dv

    return {ANY_ORDER: call}


def problem_of(row: Row, data: str) -> Problem:
    """Draw the inputs of a row, and compute its forward."""
    shape = (row.batch, row.heads, row.length, row.head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda").bfloat16() for _ in range(4))
    make_data(data, q, k, v)
    fields = {"op": "attention", "arch": "sm_90a", "dtype": "bf16", "head_dim": row.head_dim, "pattern": row.pattern}
    spec, block = parse_spec(fields), row.pattern.get("block")
    lists: tuple[torch.Tensor, ...] = ()
    if block:
        sizes = (row.batch, row.heads, row.length // block["q"], row.length // block["kv"])
        drawn = torch.rand(sizes, device="cuda").topk(row.entries, -1).indices.sort(-1).values
        lists = (drawn.int().contiguous(),)
    out, lse = load_kernel(spec)(q, k, v, *lists)
    return Problem(spec, q, k, v, dout, out, lse, lists)


def pairs_of(row: Row) -> float:
    """The pairs that the pattern shows in a head."""
    if block := row.pattern.get("block"):
        return float(row.length * row.entries * block["kv"])
    if left := row.pattern.get("left"):
        return (left + 1) * (left + 2) / 2 + (row.length - left - 1) * (left + 1.0)
    return row.length * (row.length + 1) / 2 if row.pattern == CAUSAL else float(row.length) ** 2


def tell(line: str) -> None:
    """Say at once what would else be seen at the end of a run, or not at all."""
    print(line, file=sys.stderr, flush=True)


def measure(rows: Sequence[Row], path: Path | None) -> Fields:
    """Run rows; the JSON is written after each, so that a crash costs no finished one."""
    report: Fields = environment(PACKAGES)
    report |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "rows": []}
    for row in rows:
        for data in DATA:
            torch.manual_seed(0)
            problem = problem_of(row, data)
            made, failed = backward_peers.calls_of(problem)
            calls = {OURS: ours(problem), **ours_in_any_order(problem), **made}
            errors, wrong = check_calls(calls, error_of(problem))
            failed |= wrong
            for label, why in failed.items():
                tell(f"{row.name}, {data}: {label} has no time: {why}")
            work = 10.0 * row.head_dim * row.heads * row.batch * pairs_of(row)
            results = time_calls({label: calls[label] for label in errors}, work, REPEATS)
            report["rows"].append({"name": row.name, "data": data, "results": results, "failed": failed})
            if path:
                path.write_text(json_rows(report), encoding="utf-8")
            del problem, made, calls
            free_memory()
    return report


def measure_prologue(row: Row, path: Path | None) -> Fields:
    """Time the parts of a backward that are not its main kernels, on data of std 1."""
    report: Fields = environment(PACKAGES)
    torch.manual_seed(0)
    problem = problem_of(row, DATA[0])
    whole = ours(problem)
    _, failed = check_calls({OURS: whole}, error_of(problem))
    if failed:
        raise SystemExit(f"error: {failed[OURS]}; nothing was timed")
    calls = backward_prologue.calls_of(problem, whole, lambda: loaded_apart(problem))
    record = {"name": row.name, "data": DATA[0], "prologue": backward_prologue.times_of(calls, REPEATS)}
    report |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "rows": [record]}
    if path:
        path.write_text(json_rows(report), encoding="utf-8")
    return report


def table_rows(report: Fields) -> list[list[str]]:
    """The cells of the table: TFLOPS of both ways, and ours beside the best peer and the deterministic one."""
    found = []
    for record in report["rows"]:
        results = record["results"]
        cells = [record["name"], record["data"]]
        for figure in (SINGLE, BACK_TO_BACK):
            own = results.get(OURS, {}).get(figure)
            peers = {label: result[figure] for label, result in results.items() if label not in (OURS, ANY_ORDER)}
            best = max(peers, key=lambda label, of=peers: of[label], default=None)
            steady = peers.get(DETERMINISTIC)
            cells.append("-" if own is None else f"{own:.0f}")
            cells.append("-" if best is None else f"{peers[best]:.0f} {best}")
            cells.append("-" if own is None or best is None else f"{own / peers[best]:.2f}")
            cells.append("-" if own is None or steady is None else f"{own / steady:.2f}")
        found.append(cells)
    return found


def show(report: Fields) -> None:
    """Print the table, and below it what failed."""
    printed = Table(title=f"{report['device']}, driver {report['driver']}, {report['date']}; TFLOPS of five products")
    headings = ("ours", "best peer", "ratio", "over deterministic FA4")
    for heading in ("workload", "data", *headings, *(f"{heading}, back to back" for heading in headings)):
        printed.add_column(heading)
    for cells in table_rows(report):
        printed.add_row(*cells)
    console = Console(width=None if Console().is_terminal else 200, highlight=False)
    console.print(printed)
    for (label, why), names in harness.failures(report).items():
        console.print(f"{'; '.join(dict.fromkeys(names))}: {label} has no time: {why}", markup=False, soft_wrap=True)


PAGE = Path(__file__).resolve().parents[1] / "docs" / "notebook" / "results.md"
MARKERS = "<!-- gradients:begin -->", "<!-- gradients:end -->"
ALWAYS = ("SDPA cuDNN", "SDPA flash", "FlexAttention")  # the first columns of peers


def page_table(report: Fields) -> str:
    """The table of docs/notebook/results.md."""
    timed_labels = {label for record in report["rows"] for label in record["results"]}
    labels = [ANY_ORDER, *ALWAYS, *sorted(timed_labels - {OURS, ANY_ORDER, *ALWAYS})]
    lines = [
        f"{report['device']}, driver {report['driver']}, {report['date']}, bf16. TFLOPS of five products: single calls",
        "/ calls back to back. B, H, S, d: batch size, heads, length, head_dim. std1, std4: the logits have a standard",
        'deviation of 1, of 4. What determinism costs: by how much "ours" is slower than "ours, any order"; it is',
        "negative if ours is faster.",
        "",
        f"| workload | data | ours | what determinism costs | {' | '.join(labels)} |",
        f"| --- | --- |{' ---: |' * (2 + len(labels))}",
    ]
    for record in report["rows"]:
        results = record["results"]
        told = (results.get(label) for label in (OURS, *labels))
        cells = ["-" if r is None else f"{r[SINGLE]:.0f} / {r[BACK_TO_BACK]:.0f}" for r in told]
        cells.insert(1, cost_of_order(results))
        lines.append(f"| {record['name']} | {record['data']} | {' | '.join(cells)} |")
    timed = {record["name"] for record in report["rows"]}
    if missing := [row.name for row in ROWS if row.name not in timed]:
        lines += ["", "Not in this run:", *(f"- {name}" for name in missing)]
    return "\n".join(lines)


def cost_of_order(results: Fields) -> str:
    """Share of the nondeterministic kernel's speed that the deterministic kernel loses, in both modes."""
    if not {OURS, ANY_ORDER} <= results.keys():
        return "-"
    shares = (1 - results[OURS][figure] / results[ANY_ORDER][figure] for figure in (SINGLE, BACK_TO_BACK))
    return " / ".join(f"{share:.0%}" for share in shares)


def with_table(page: str, report: Fields) -> str:
    """The page with the table between its markers."""
    before, rest = page.split(MARKERS[0])
    return f"{before}{MARKERS[0]}\n{page_table(report)}\n{MARKERS[1]}{rest.split(MARKERS[1])[1]}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every median")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="show an earlier run's JSON")
    parser.add_argument("--rows", default="", metavar="TEXT", help="rows whose names contain this text")
    parser.add_argument("--all-peers", action="store_true", help="stop at once if a peer cannot be imported")
    parser.add_argument("--page", action="store_true", help="with --from: write the table of docs/notebook/results.md")
    parser.add_argument("--prologue", action="store_true", help=f"time what is no main kernel: {LONG.name}")
    options = parser.parse_args(arguments)
    if options.earlier and options.prologue:
        backward_prologue.show(json.loads(options.earlier.read_text(encoding="utf-8")))
        return
    if options.earlier:
        report = json.loads(options.earlier.read_text(encoding="utf-8"))
        if options.page:
            PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")
        show(report)
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; --from FILE shows an earlier run")
    if options.prologue:
        backward_prologue.show(measure_prologue(LONG, options.json))
        return
    missing = backward_peers.not_importable()
    for label, why in missing.items():
        tell(f"{label} cannot be imported: {why}")
    if missing and options.all_peers:
        raise SystemExit("error: peers are missing, see docs/notebook/measuring.md; nothing was timed")
    report = measure([row for row in ROWS if options.rows in row.name], options.json)
    show(report)
    if any(OURS not in record["results"] for record in report["rows"]):
        raise SystemExit("error: rows without a time of ours, see above")


if __name__ == "__main__":
    main()
