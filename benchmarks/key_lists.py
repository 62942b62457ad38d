"""Times attention over lists of single queries (MiniMax's MSA, NSA's selection), forward and backward.

    python benchmarks/key_lists.py --json benchmarks/results/key_lists_h200.json
    python benchmarks/key_lists.py --from benchmarks/results/key_lists_h200.json  # no GPU: an old run
    python benchmarks/key_lists.py --rows S4096  # one row
    python benchmarks/key_lists.py --rows 'of 16,'  # rows of blocks of 16 keys
    python benchmarks/key_lists.py --rows 'top 16 of 64' --backward '{"tile": {"m": 32, "n": 64}, "stages": 3}'

Effective TFLOPS are of two products (forward) and of five (backward) over the pairs that the lists and the causal mask
show. A forward by key blocks is all that a call does: transposed lists and the result. So is a backward: transposed
lists, statistics, dQ, dK and dV. "transposition" is the part of a backward that transposes lists, and has no TFLOPS.

Each query lists its own block and different random earlier ones, for each KV head; `sink` also has block 0 and the
block before its own in every list. The blocks of `runs` come in aligned runs of 64 keys, up to the query's own block.
Lists of a model are less random: adjacent queries share blocks. Blocks of 16 and 32 keys have no forward by key blocks.

--backward and --forward add kernels whose specs have other fields than those that calls take, beside them.

Results and gradients are checked against float64 on some queries and keys of the last KV head before they are timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import Fields, check_calls, environment, free_memory, time_calls
from records import BACK_TO_BACK, SINGLE
from rich.console import Console
from rich.table import Table

from codegen.json_rows import json_rows
from codegen.library import find_spec
from codegen.planning import plan_for
from codegen.problem import KeyListsShape
from codegen.select.key_lists import FORWARD, FORWARD_LIMITS, gradient_fields
from runtime import KeyLists, load_kernel, varlen_attention
from runtime.kernels.key_lists_backward import KeyListsBackwardKernel
from runtime.kernels.key_lists_forward import KeyListsForwardKernel
from runtime.ops.key_list_calls import Lists, attend_by_keys, attend_by_queries, options_of
from runtime.ops.key_list_gradients import attend_key_lists_backward
from runtime.ops.varlen_calls import Bounds
from runtime.prepare.key_lists import transposed_key_lists
from runtime.tools.bench.timing import Call

PACKAGES = ("torch",)
BY_KEYS, BY_QUERIES = "forward, by key blocks", "forward, decode kernel"
OURS, TRANSPOSITION = "backward", "transposition"
SAMPLES = 8  # queries and keys that are checked
REPEATS = 11
RUN_KEYS = 64  # keys of a run


@dataclass(frozen=True)
class Row:
    """One workload, bf16, of one sequence.

    Attributes:
        length: queries and keys.
        head_dim: elements of a head.
        keys: keys of an entry.
        entries: of a list.
        kind: random, sink or runs.
        kv_heads: heads of K and V.
        group: query heads for each of them.
    """

    length: int
    head_dim: int = 128
    keys: int = 128
    entries: int = 16
    kind: str = "random"
    kv_heads: int = 4
    group: int = 16

    @property
    def name(self) -> str:
        heads = f"H{self.kv_heads * self.group}:{self.kv_heads} S{self.length} d{self.head_dim}"
        return f"top {self.entries} of {self.keys}, {self.kind}, {heads}"


ROWS = (
    Row(32768),
    Row(32768, kind="sink"),
    Row(4096),
    Row(1024),
    Row(32768, keys=64),
    Row(32768, head_dim=64, keys=64),
    Row(32768, kv_heads=8, group=8),
    Row(32768, keys=64, kv_heads=8, group=8),
    Row(32768, kv_heads=16, group=4),
    Row(32768, keys=32, entries=32),
    Row(32768, keys=16, entries=64),
    Row(32768, keys=16, entries=64, kind="runs"),
    Row(32768, keys=16),
    Row(32768, head_dim=64, keys=16, entries=64),
    Row(32768, keys=16, entries=64, kv_heads=8, group=8),
)
Variants = dict[str, list[Fields]]
"""Other fields of specs, for "forward" and "backward"."""


class Problem(NamedTuple):
    """Tensors of a row, and what the forward returned."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    lists: torch.Tensor
    bounds: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def lists_of(row: Row, device: str = "cuda") -> torch.Tensor:
    """Draw lists: int32 (kv_heads, tokens, entries), -1 where a query has fewer blocks."""
    if row.kind == "runs":
        each = RUN_KEYS // row.keys
        runs = lists_of(replace(row, kind="random", keys=RUN_KEYS, entries=row.entries // each), device)
        blocks = (runs[..., None] * each + torch.arange(each, dtype=torch.int32, device=device)).flatten(2)
        last = torch.arange(row.length, device=device)[:, None] // row.keys
        return blocks.where((blocks >= 0) & (blocks <= last), -1)
    own = torch.arange(row.length, device=device)[:, None] // row.keys
    block = torch.arange(-(-row.length // row.keys), device=device)
    always = block == own
    if row.kind == "sink":
        always = always | (block == 0) | (block == own - 1)
    found = []
    for _ in range(row.kv_heads):
        score = torch.rand(row.length, len(block), device=device).masked_fill(always, 2.0).masked_fill(block > own, -1)
        best = score.topk(min(row.entries, len(block)), 1)
        found.append(torch.where(best.values < 0, -1, best.indices))
    return torch.stack(found).int()


def seen(row: Row, lists: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Visibility of selected pairs in a KV head, of its lists (tokens, entries): float64 (queries, keys)."""
    listed = (lists[queries][:, None] == (keys // row.keys)[:, None]).any(2)
    return (listed & (keys <= queries[:, None])).double()


def pairs_of(row: Row, lists: torch.Tensor) -> float:
    """Pairs of all query heads that are seen."""
    position = torch.arange(row.length, device=lists.device)[:, None]
    keys = (position + 1 - lists * row.keys).clamp(0, row.keys).where(lists >= 0, 0)
    return float(keys.sum(dtype=torch.float64)) * row.group


def problem_of(row: Row) -> Problem:
    """Draw the inputs of a row, and compute its forward."""
    heads = row.kv_heads * row.group
    q, dout = (torch.randn(row.length, heads, row.head_dim, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(row.length, row.kv_heads, row.head_dim, device="cuda").bfloat16() for _ in range(2))
    bounds = torch.tensor([0, row.length], dtype=torch.int32, device="cuda")
    lists = lists_of(row)
    found: Any = varlen_attention(q, k, v, KeyLists(lists, keys=row.keys), cu_seqlens_q=bounds, return_lse=True)
    return Problem(q, k, v, dout, lists, bounds, found.out, found.lse)


def error_of(row: Row, problem: Problem) -> Callable[[str, Any], float]:
    """A function that returns the errors of results, relative to the largest checked element of each."""
    group = slice(problem.q.shape[1] - row.group, None)
    q, dout = (t[:, group].double().transpose(0, 1) for t in (problem.q, problem.dout))
    k, v = (t[:, -1].double() for t in (problem.k, problem.v))
    every = torch.arange(row.length, device=k.device)
    some = torch.linspace(0, row.length - 1, SAMPLES, device=k.device).long()
    scale = row.head_dim**-0.5

    def logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        hidden = seen(row, problem.lists[-1], queries, keys) == 0
        return (q[:, queries] @ k[keys].T * scale).masked_fill(hidden, -torch.inf)

    rows = logits(some, every)
    out = rows.softmax(-1) @ v
    lse, delta = (t[..., None].double() for t in (problem.lse[group], (dout * _of_group(problem.out, group)).sum(-1)))
    p_rows, p_columns = (rows - lse[:, some]).exp(), (logits(every, some) - lse).exp()
    ds_rows = p_rows * (dout[:, some] @ v.T - delta[:, some])
    ds_columns = p_columns * (dout @ v[some].T - delta)
    exact = (scale * ds_rows @ k, scale * (ds_columns.mT @ q).sum(0), (p_columns.mT @ dout).sum(0))

    def off(found: torch.Tensor, right: torch.Tensor) -> float:
        return float((found - right).abs().max() / right.abs().max())

    def error(label: str, found: Any) -> float:
        if label == TRANSPOSITION:
            return 0.0
        if label.startswith("forward"):
            return off(_of_group(found, group)[:, some], out)
        of_k, of_v = (gradient[some, -1].double() for gradient in found[1:])
        return max(off(_of_group(found[0], group)[:, some], exact[0]), off(of_k, exact[1]), off(of_v, exact[2]))

    return error


def _of_group(tensor: torch.Tensor, group: slice) -> torch.Tensor:
    return tensor[:, group].double().transpose(0, 1)


def products_of(label: str) -> int:
    """Products over the pairs that are seen, of a call."""
    return 0 if label == TRANSPOSITION else 2 if label.startswith("forward") else 5


def calls_of(row: Row, problem: Problem, variants: Variants) -> dict[str, Call]:
    """Our calls by label."""
    q, k, v, dout, indices, bounds, out, lse = problem
    lists, both = Lists(indices, None, row.keys), Bounds(bounds, bounds)
    fields = gradient_fields("sm_90a", "bf16", head_dim=row.head_dim, entry_keys=row.keys, group=row.group)
    named = find_spec(fields)
    args = plan_for(named).problem(KeyListsShape(1, row.length, row.length, row.kv_heads, indices.shape[2]))
    sizes = {"tiles": args.numbers["tiles"], "chunk": args.numbers["chunk_entries"], "chunks": args.tiles}
    sizes |= {"kv_heads": row.kv_heads, "key_tokens": row.length, "pieces": named.spec.tile.n // row.keys}

    def forward(other: Fields) -> Call:
        kernel = load_kernel({**fields, "op": FORWARD, **other})
        assert isinstance(kernel, KeyListsForwardKernel)
        return lambda: attend_by_keys(kernel, q, k, v, bounds=both, lists=lists).out

    given = {"dout": dout, "out": out, "lse": lse}

    def backward(other: Fields) -> Call:
        kernel = load_kernel({**fields, **other})
        assert isinstance(kernel, KeyListsBackwardKernel)
        return lambda: kernel(q, k, v, **both._asdict(), lists=indices, **given)

    return {
        **({BY_KEYS: forward({})} if row.keys in FORWARD_LIMITS["entry_keys"] else {}),
        BY_QUERIES: lambda: attend_by_queries(q, k, v, both, lists, options=options_of(lists)).out,
        OURS: lambda: attend_key_lists_backward(q, k, v, both, lists, **given),
        TRANSPOSITION: lambda: transposed_key_lists(indices, None, *both, keys=row.keys, **sizes),
        **{f"forward, {json.dumps(other)}": forward(other) for other in variants["forward"]},
        **{f"{OURS}, {json.dumps(other)}": backward(other) for other in variants["backward"]},
    }


def measure(rows: Sequence[Row], path: Path | None, variants: Variants) -> Fields:
    """Run rows; the JSON is written after each, so that a crash costs no finished one."""
    report: Fields = environment(PACKAGES)
    report |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "rows": []}
    for row in rows:
        torch.manual_seed(0)
        problem = problem_of(row)
        calls = calls_of(row, problem, variants)
        errors, failed = check_calls(calls, error_of(row, problem))
        results: Fields = {}
        for label in errors:
            work = 2.0 * products_of(label) * row.head_dim * pairs_of(row, problem.lists)
            results |= time_calls({label: calls[label]}, work, REPEATS)
        report["rows"].append({"name": row.name, "results": results, "failed": failed})
        if path:
            path.write_text(json_rows(report), encoding="utf-8")
        del problem, calls
        free_memory()
    return report


def show(report: Fields) -> None:
    """Print the table, and below it what failed."""
    printed = Table(title=f"{report['device']}, driver {report['driver']}, {report['date']}; single / back to back")
    for heading in ("workload", "call", "ms", "TFLOPS"):
        printed.add_column(heading)
    for record in report["rows"]:
        for label, result in record["results"].items():
            times = f"{result['milliseconds']:.3f} / {result['back_to_back_milliseconds']:.3f}"
            speeds = f"{result[SINGLE]:.0f} / {result[BACK_TO_BACK]:.0f}" if result[SINGLE] else "-"
            printed.add_row(record["name"], label, times, speeds)
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    console.print(printed)
    for record in report["rows"]:
        for label, why in record["failed"].items():
            console.print(f"{record['name']}: {label} has no time: {why}", markup=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every median")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="show an earlier run's JSON")
    parser.add_argument("--rows", default="", metavar="TEXT", help="rows whose names contain this text")
    for name in ("forward", "backward"):
        more = {"type": json.loads, "action": "append", "default": [], "metavar": "JSON"}
        parser.add_argument(f"--{name}", **more, help="other fields of a spec that is timed too; repeatable")
    options = parser.parse_args(arguments)
    if options.earlier:
        show(json.loads(options.earlier.read_text(encoding="utf-8")))
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; --from FILE shows an earlier run")
    variants = {"forward": options.forward, "backward": options.backward}
    report = measure([row for row in ROWS if options.rows in row.name], options.json, variants)
    show(report)
    if any(record["failed"] for record in report["rows"]):
        raise SystemExit("error: calls without a time, see above")


if __name__ == "__main__":
    main()
