"""Times the sm_90a attention kernels beside their peers, in one run on the same inputs.

    python benchmarks/attention.py --json attention.json         # every row
    python benchmarks/attention.py --rows topk32 --peers fa4     # one row, one peer
    python benchmarks/attention.py --from attention.json --plot attention   # no GPU: print and draw an earlier run

Before a call is timed, a part of its result is compared with exact (float64) attention over the same pairs; a call that
fails or computes something else gets no time, and the reason is told. docs/measuring.md says how numbers are taken.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from attention_peers import PEERS, Fields, Problem, flex_tuned
from rich.console import Console
from rich.table import Table

from codegen.library import find_spec
from codegen.receipts import source_sha256
from codegen.render import render
from codegen.spec import AttentionSpec, parse_spec
from runtime import load_kernel, toolchain
from runtime.arguments import TORCH_DTYPES
from runtime.measurement import Call, median_milliseconds, pairs_of_head, random_lists
from runtime.verification.run import driver_version

OURS = "ours"
TOLERANCE = 1e-2  # of the largest element of a block; a correct fp16 result is within about 2e-3


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what --rows takes.
        fields: the kernel's spec.
        heads: query heads, and
        length: queries and keys of each.
        target: effective TFLOPS on an H200 that the project set out to reach.
        peers: names of PEERS that can compute it.
        batch: batch size.
        kv_heads: K/V heads; as many as query heads by default.
        quick: whether --quick takes it.
    """

    name: str
    fields: Fields
    heads: int
    length: int
    target: float
    peers: tuple[str, ...]
    batch: int = 1
    kv_heads: int | None = None
    quick: bool = False


def fields(head_dim: int, pattern: Fields, stages: int = 2) -> Fields:
    return {"op": "attention", "arch": "sm_90a", "head_dim": head_dim, "pattern": pattern, "stages": stages}


def topk(k: int, q: int, kv: int) -> Fields:
    return {"kind": "topk", "k": k, "block": {"q": q, "kv": kv}}


WINDOW: Fields = {"kind": "sliding_window", "left": 2047, "right": 0}
DENSE: Fields = {"kind": "dense"}
CAUSAL: Fields = {"kind": "causal"}
LIST_PEERS = ("flex", "fa4", "cudnn_bsa")
DENSE_PEERS = ("sdpa", "fa4")

ROWS = (
    Row("topk16", fields(128, topk(16, 128, 128)), 16, 32768, 690, LIST_PEERS),
    Row("topk32", fields(128, topk(32, 128, 128)), 16, 32768, 720, LIST_PEERS, quick=True),
    Row("topk64", fields(128, topk(64, 128, 128)), 16, 32768, 720, LIST_PEERS),
    Row("topk32_128k", fields(128, topk(32, 128, 128)), 8, 131072, 690, LIST_PEERS),
    Row("topk64_8k", fields(128, topk(64, 128, 128)), 8, 8192, 730, LIST_PEERS),
    Row("topk32_d64", fields(64, topk(32, 128, 128), stages=4), 8, 32768, 520, LIST_PEERS, quick=True),
    Row("topk32_d64_128k", fields(64, topk(32, 128, 128), stages=4), 8, 131072, 490, LIST_PEERS),
    Row("topk16_b64", fields(128, topk(16, 64, 64)), 16, 32768, 580, LIST_PEERS),
    Row("topk32_b64", fields(128, topk(32, 64, 64)), 16, 32768, 620, LIST_PEERS, quick=True),
    Row("topk64_b64", fields(128, topk(64, 64, 64)), 16, 32768, 640, LIST_PEERS),
    Row("topk32_b64_128k", fields(128, topk(32, 64, 64)), 8, 131072, 560, LIST_PEERS),
    Row("topk64_b128x64", fields(128, topk(64, 128, 64), stages=4), 16, 32768, 690, ("flex", "fa4")),
    Row("topk32_d64_b64", fields(64, topk(32, 64, 64), stages=4), 8, 32768, 440, LIST_PEERS),
    Row("gqa_topk32_b64", fields(128, topk(32, 64, 64)), 64, 32768, 650, LIST_PEERS, kv_heads=8),
    Row("window2k", fields(128, WINDOW), 8, 32768, 650, ("flex", "fa4"), quick=True),
    Row("window2k_128k", fields(128, WINDOW), 8, 131072, 660, ("flex", "fa4")),
    Row("dense", fields(128, DENSE), 16, 16384, 690, DENSE_PEERS, batch=2),
    Row("causal", fields(128, CAUSAL), 16, 16384, 715, DENSE_PEERS, batch=2, quick=True),
    Row("dense_d64", fields(64, DENSE, stages=4), 8, 16384, 540, DENSE_PEERS),
    Row("causal_d64", fields(64, CAUSAL, stages=4), 8, 16384, 570, DENSE_PEERS),
)


def make_problem(row: Row, spec: AttentionSpec) -> Problem:
    """Draw random normal inputs and random lists, ascending as cuDNN's splits need them, one for each K/V head."""
    torch.manual_seed(0)
    kv_heads = row.kv_heads or row.heads
    q, k, v = (
        torch.randn((row.batch, heads, row.length, spec.head_dim), device="cuda", dtype=TORCH_DTYPES[spec.dtype])
        for heads in (row.heads, kv_heads, kv_heads)
    )
    block, lists = spec.pattern.fixed_block, ()
    if block is not None:
        drawn = random_lists(kv_heads, row.length // block.q, row.length // block.kv, spec.pattern.k)
        lists = (drawn.sort(-1).values.repeat_interleave(row.heads // kv_heads, 1).contiguous(),)
    return Problem(spec, q, k, v, lists)


def flops(row: Row, spec: AttentionSpec, lists: tuple[torch.Tensor, ...], device: str = "cuda") -> float:
    """Count what a row has to compute: two products over each visible pair."""
    return 4.0 * row.batch * row.heads * spec.head_dim * pairs_of_head(spec, row.length, lists, device)


def exact(problem: Problem, head: int, rows: slice) -> torch.Tensor:
    """Return float64 attention of some query rows, within one query block, of the last batch entry."""
    spec, length, device = problem.spec, problem.q.shape[2], problem.q.device
    block = spec.pattern.fixed_block
    keys = torch.arange(length, device=device)
    if block is not None:
        listed = problem.lists[0][-1, head, rows.start // block.q].long()
        keys = (listed[:, None] * block.kv + torch.arange(block.kv, device=device)).flatten()
    kv_head = head // (problem.q.shape[1] // problem.k.shape[1])
    queries = torch.arange(rows.start, rows.stop, device=device)
    scores = problem.q[-1, head, rows].double() @ problem.k[-1, kv_head, keys].double().T * spec.head_dim**-0.5
    hidden = ~spec.pattern.visible(queries[:, None], keys[None], length, length)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ problem.v[-1, kv_head, keys].double()


def largest_error(problem: Problem, out: torch.Tensor) -> float:
    """Return the worst error of the last head's first, middle and last 64 rows, relative to their largest element."""
    if out.shape != problem.q.shape:
        raise ValueError(f"the result has shape {tuple(out.shape)}, expected {tuple(problem.q.shape)}")
    head, length = problem.q.shape[1] - 1, problem.q.shape[2]
    errors = []
    for first in (0, length // 128 * 64, length - 64):
        rows = slice(first, first + 64)
        expected = exact(problem, head, rows)
        errors.append((out[-1, head, rows].double() - expected).abs().max() / expected.abs().max())
    return float(torch.stack(errors).max())  # NaN if there is one


def ours(problem: Problem) -> dict[str, Call]:
    kernel, out = load_kernel(problem.spec), torch.empty_like(problem.q)

    def call() -> torch.Tensor:
        kernel(problem.q, problem.k, problem.v, *problem.lists, out=out)
        return out

    return {OURS: call}


def reason(error: Exception) -> str:
    """Return an exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def run_row(row: Row, peers: list[str], quick: bool) -> Fields:
    """Check and time one row; return its record."""
    spec = parse_spec(row.fields)
    assert isinstance(spec, AttentionSpec)
    problem = make_problem(row, spec)
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    makers = [make for peer in row.peers if peer in peers for make in PEERS[peer]]
    for make in [ours, *(make for make in makers if not (quick and make is flex_tuned))]:
        try:
            made = make(problem)
        except Exception as error:
            failed[make.__name__] = reason(error)
            continue
        for label, call in made.items():
            try:
                errors[label] = largest_error(problem, call())
            except Exception as error:
                failed[label] = reason(error)
                continue
            if errors[label] <= TOLERANCE:
                calls[label] = call
            else:
                failed[label] = f"wrong result: off by {errors[label]:.1e} of the largest element"
    times = median_milliseconds(calls, repeats=7 if quick else 21)
    work = flops(row, spec, problem.lists)
    return {
        "name": row.name,
        "batch": row.batch,
        "heads": row.heads,
        "kv_heads": row.kv_heads or row.heads,
        "length": row.length,
        "spec": json.loads(spec.canonical_json()),
        "source_sha256": source_sha256(render(find_spec(spec))) if OURS in times else None,
        "flops": work,
        "target_tflops": row.target,
        "results": {
            label: {
                "milliseconds": round(time, 4),
                "tflops": round(work / time / 1e9, 1),
                "error": float(f"{errors[label]:.2e}"),
            }
            for label, time in times.items()
        },
        "failed": failed,
    }


def free_memory() -> None:
    """Give back what a row held, and let FlexAttention compile as often as it likes for the next."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def environment() -> Fields:
    """Return what the numbers depend on."""
    versions = {"compiler": toolchain.compiler_version()[1], "cuDNN": str(torch.backends.cudnn.version())}
    for package in ("torch", "triton", "flash-attn-4", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"device": torch.cuda.get_device_name(), "driver": driver_version(), "versions": versions}


def best_peer(record: Fields) -> str | None:
    """Return the fastest peer of a row, if any ran."""
    tflops = {label: result["tflops"] for label, result in record["results"].items() if label != OURS}
    return max(tflops, key=lambda label: tflops[label], default=None)


def cells(record: Fields) -> list[str]:
    """Return a row of the printed table."""
    results, peer = record["results"], best_peer(record)
    own, best = results.get(OURS), results.get(peer)
    return [
        record["name"],
        f"{own['milliseconds']:.3f}" if own else "-",
        f"{own['tflops']:.0f}" if own else "-",
        f"{record['target_tflops']:.0f}",
        f"{best['tflops']:.0f}" if best else "-",
        peer or "-",
        f"{own['tflops'] / best['tflops']:.2f}" if own and best else "-",
        f"{own['error']:.0e}" if own else "-",
    ]


def show(report: Fields) -> None:
    """Print the table, and below it what failed."""
    table = Table(title=f"{report['device']}, driver {report['driver']}; effective TFLOPS, medians of one run")
    for heading in ("row", "ms", "ours", "target", "best peer", "which", "ratio", "error"):
        table.add_column(heading, justify="left" if heading in ("row", "which") else "right")
    for record in report["rows"]:
        table.add_row(*cells(record))
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    console.print(table)
    for record in report["rows"]:
        for label, why in record["failed"].items():
            console.print(f"{record['name']}: {label} has no time: {why}", markup=False, soft_wrap=True)


def plot(report: Fields, path: Path) -> None:
    """Draw ours, the best peer and the target of each row; write a PNG and an SVG."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed; draw it elsewhere with --from FILE --plot FILE")
        return
    mpl.use("agg")
    from matplotlib import pyplot

    records = report["rows"][::-1]  # the first row on top
    own = [record["results"].get(OURS, {}).get("tflops", 0) for record in records]
    best = [record["results"].get(best_peer(record), {}).get("tflops", 0) for record in records]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.42 * len(records)), layout="constrained")
    places = range(len(records))
    axes.barh([place + 0.2 for place in places], own, height=0.38, label="this project", color="#1b7f5c")
    axes.barh([place - 0.2 for place in places], best, height=0.38, label="best peer", color="#b5b5b5")
    targets = [record["target_tflops"] for record in records]
    axes.plot(targets, [place + 0.2 for place in places], "|", markersize=14, color="black", label="target")
    for place, record in zip(places, records, strict=True):
        axes.text(4, place - 0.2, best_peer(record) or "no peer", va="center", fontsize=7)
    axes.margins(y=0.01)
    axes.set_yticks(places, [record["name"] for record in records])
    axes.set_xlabel("effective TFLOPS")
    axes.set_title(f"Attention on {report['device']}, driver {report['driver']}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3)
    for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
        figure.savefig(path.with_suffix(suffix), dpi=150, metadata=metadata)
        print(f"wrote {path.with_suffix(suffix)}")


def peer_names(text: str) -> list[str]:
    """Return the names in a comma-separated list."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(PEERS)}")
    return names


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="a few rows, fewer repeats, FlexAttention as it comes")
    parser.add_argument("--peers", type=peer_names, default=list(PEERS), help=f"of {','.join(PEERS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every median")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw them, as .png and .svg")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show an earlier run's JSON")
    return parser.parse_args(arguments)


@torch.no_grad()
def measure(options: argparse.Namespace) -> Fields:
    """Run the chosen rows; the JSON is written after each, so that a crash costs no finished one."""
    report: Fields = {**environment(), "rows": []}
    for row in ROWS:
        if row.name in options.rows if options.rows else row.quick or not options.quick:
            report["rows"].append(run_row(row, options.peers, options.quick))
            print(" ".join(cells(report["rows"][-1])), flush=True)
            if options.json:
                options.json.write_text(json.dumps(report, indent=2) + "\n")
            free_memory()
    return report


def main() -> None:
    options = parse_arguments()
    if options.source:
        report = json.loads(options.source.read_text())
    elif torch.cuda.is_available():
        report = measure(options)
    else:
        raise SystemExit("error: torch sees no GPU; --from FILE shows an earlier run")
    show(report)
    if options.plot:
        plot(report, options.plot)
    if any(OURS not in record["results"] for record in report["rows"]):
        raise SystemExit("error: rows without a time of ours, see above")


if __name__ == "__main__":
    main()
