"""Times the host overhead of a call, compared with SDPA and torch.mm, in one run.

    python benchmarks/host.py --json benchmarks/results/host_h200.json
    python benchmarks/host.py --from benchmarks/results/host_h200.json     # no GPU: prints an earlier run
    python benchmarks/results_table.py                            # writes its table into docs/notebook/measuring.md

Three times of each call, medians, in microseconds:

- host: from its begin to its return. AHEAD calls follow a synchronization, and the clock stops before the GPU has done
  them: it is never waited for.
- in a loop: LOOP calls back to back and a synchronization, by the clock of the host; the longer of the host's time and
  the GPU's.
- in a graph: AHEAD calls captured in a CUDA graph, by CUDA events; the GPU's time and what lies between two kernels.

Calls have been seen before, with the same shapes. Calls of a row take turns. Results are not compared here:
benchmarks/attention.py and benchmarks/bsr.py do that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import host_page
import torch
from harness import OURS, Fields, environment, free_memory, reason
from host_page import GRAPH, HOST, LOOP
from rich.console import Console
from rich.table import Table

from codegen.json_rows import json_rows
from runtime import (
    block_sparse_attention,
    block_sparse_attention_fp8,
    bsr_matmul,
    bsr_sddmm,
    explain_attention,
    load_kernel,
    patterns,
    prepare_bsr,
    quantize_attention,
)
from runtime.nn import BlockSparseLinear
from runtime.tools.bench.measurement import random_lists
from runtime.tools.bench.timing import Call, captured, median

PACKAGES = ("torch", "cuda-bindings")
AHEAD = 20  # calls; a stream takes about a thousand launches before the host must wait
REPEATS = 200  # of AHEAD calls
LOOP_CALLS = 200
ROUNDS = 7  # of a loop, and of a graph
SDPA, MM, FRONT, LINEAR = "SDPA", "torch.mm, dense A", "block_sparse_attention", "torch.nn.Linear"
SIZE, BLOCK, DENSITY = 4096, 64, 0.3  # of sparse matrices


@dataclass(frozen=True)
class Row:
    """One workload.

    Attributes:
        name: what --rows takes, and the table shows.
        make: returns its calls by label.
        peer: the label of the one that host times are compared with.
    """

    name: str
    make: Callable[[], dict[str, Call]]
    peer: str


def attention(kernel: str, length: int, head_dim: int, lists: int = 0) -> Callable[[], dict[str, Call]]:
    """A function that makes a row of attention: 8 heads, with a number of key blocks of 128 per query block, if any."""

    def make() -> dict[str, Call]:
        q, k, v = (torch.randn(1, 8, length, head_dim, device="cuda").half() for _ in range(3))
        call, blocks = load_kernel(kernel), length // 128
        indices: list[torch.Tensor] = []
        if lists:
            kv_indices = random_lists(8, blocks, blocks, lists)
            counts = torch.full((1, 8, blocks), lists, dtype=torch.int32, device="cuda")
            indices = [counts, kv_indices] if "block_lists" in kernel else [kv_indices]
        causal = "causal" in kernel
        return {
            OURS: lambda: call(q, k, v, *indices),
            SDPA: lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
        }

    return make


def front() -> dict[str, Call]:
    """The calls of block_sparse_attention, of the kernel that it takes and of the operator that torch sees."""
    q, k, v = (torch.randn(1, 8, 4096, 128, device="cuda").half() for _ in range(3))
    pattern = patterns.TopK(random_lists(8, 32, 32, 8))
    kernel = load_kernel(explain_attention(q, k, v, pattern).choice.named)
    operator = torch.ops.sparse_kernel_codegen.block_sparse_attention
    out = torch.empty_like(q)
    return {
        OURS: lambda: kernel(q, k, v, pattern.kv_indices),
        FRONT: lambda: block_sparse_attention(q, k, v, pattern),
        f"{FRONT}, new pattern": lambda: block_sparse_attention(q, k, v, patterns.TopK(pattern.kv_indices)),
        f"{FRONT}, out": lambda: block_sparse_attention(q, k, v, pattern, out=out),
        "its operator": lambda: operator(q, k, v, [pattern.kv_indices], None, None, None, pattern.spec_json),
        SDPA: lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }


def sparse() -> torch.Tensor:
    """A BSR matrix with DENSITY of its blocks, as many in each block row."""
    blocks = SIZE // BLOCK
    length = round(DENSITY * blocks)
    col = random_lists(1, blocks, blocks, length)[0, 0].sort(-1).values.flatten()
    crow = torch.arange(0, blocks + 1, dtype=torch.int32, device="cuda") * length
    values = torch.randn(col.numel(), BLOCK, BLOCK, device="cuda").half()
    return torch.sparse_bsr_tensor(crow, col, values, size=(SIZE, SIZE), check_invariants=False)


def spmm(kernel: str, columns: int) -> Callable[[], dict[str, Call]]:
    """A function that makes a row of BSR x dense, also with rows sorted by length, raw and prepared."""

    def make() -> dict[str, Call]:
        a, b = sparse(), torch.randn(SIZE, columns, device="cuda").half()
        dense = torch.randn(SIZE, SIZE, device="cuda").half()
        plain, balanced = load_kernel(kernel), load_kernel("h100_bsr_spmm_b64_balanced")
        prepared, ordered = plain.prepare(a, columns), balanced.prepare(a, columns)  # type: ignore[union-attr]
        parts = prepare_bsr(a)
        return {
            OURS: lambda: plain(a, b),
            f"{OURS}, prepared": lambda: plain(prepared, b),
            f"{OURS}, balanced": lambda: balanced(a, b),
            f"{OURS}, balanced, prepared": lambda: balanced(ordered, b),
            "bsr_matmul, BsrMatrix": lambda: bsr_matmul(parts, b),
            "bsr_matmul, torch.sparse_bsr": lambda: bsr_matmul(a, b),
            MM: lambda: torch.mm(dense, b),
        }

    return make


def sddmm() -> dict[str, Call]:
    """The calls of a sampled product."""
    pattern, kernel = sparse(), load_kernel("h100_bsr_sddmm_b64")
    a, b = (torch.randn(SIZE, 256, device="cuda").half() for _ in range(2))
    parts = prepare_bsr(pattern)
    return {
        OURS: lambda: kernel(a, b, pattern),
        "bsr_sddmm, BsrMatrix": lambda: bsr_sddmm(a, b, parts),
        "bsr_sddmm, torch.sparse_bsr": lambda: bsr_sddmm(a, b, pattern),
        MM: lambda: torch.mm(a, b.mT),
    }


def layer() -> dict[str, Call]:
    """The calls of a layer with sparse weights, with and without gradients, beside a dense one."""
    weight, bias = sparse(), torch.randn(SIZE, device="cuda").half()
    ours, dense = BlockSparseLinear(weight, bias), torch.nn.Linear(SIZE, SIZE, device="cuda").half()
    x = torch.randn(16, SIZE, device="cuda").half()
    return {
        "BlockSparseLinear": lambda: ours(x),
        "BlockSparseLinear, with gradients": with_gradients(lambda: ours(x)),
        LINEAR: lambda: dense(x),
        f"{LINEAR}, with gradients": with_gradients(lambda: dense(x)),
    }


def with_gradients(call: Call) -> Call:
    """The same call, recorded by autograd."""

    def run() -> None:
        with torch.enable_grad():
            call()

    return run


def options() -> dict[str, Call]:
    """Calls of block_sparse_attention with expressions and with FP8 operands, and a plain call."""
    q, k, v = (torch.randn(1, 8, 4096, 128, device="cuda").half() for _ in range(3))
    causal, slopes = patterns.Causal(), torch.rand(8, device="cuda")
    score = patterns.Score("score + 0.5 * (q_idx - kv_idx)")
    of_tensor = patterns.Score("score + slope[head]", aux={"slope": slopes})
    given = quantize_attention(q, k, v)
    return {
        FRONT: lambda: block_sparse_attention(q, k, v, causal),
        f"{FRONT}, a score": lambda: block_sparse_attention(q, k, v, causal, score=score),
        f"{FRONT}, a score of a tensor": lambda: block_sparse_attention(q, k, v, causal, score=of_tensor),
        f"{FRONT}, operands in FP8": lambda: block_sparse_attention_fp8(given, causal),
        SDPA: lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    }


def spgemm() -> dict[str, Call]:
    """The calls of a product of two sparse matrices."""
    a, b, kernel = sparse(), sparse(), load_kernel("h100_bsr_spgemm_b64")
    left, right = (torch.randn(SIZE, SIZE, device="cuda").half() for _ in range(2))
    return {OURS: lambda: kernel(a, b), MM: lambda: torch.mm(left, right)}


ROWS = (
    Row("dense, S1024 H8 d128", attention("h100_dense_few_tiles", 1024, 128), SDPA),
    Row("causal, S1024 H8 d64", attention("h100_causal_d64_few_tiles", 1024, 64), SDPA),
    Row("topk32, S4096 H8 d128", attention("h100_topk32", 4096, 128, 32), SDPA),
    Row("block_lists, S4096 H8 d128", attention("h100_block_lists", 4096, 128, 8), SDPA),
    Row("any pattern in one call: topk8, S4096 H8 d128", front, SDPA),
    Row("bsr_spmm, N16", spmm("h100_bsr_spmm_b64_few_columns", 16), MM),
    Row("bsr_spmm, N128", spmm("h100_bsr_spmm_b64_few_columns", 128), MM),
    Row("bsr_spmm, N1024", spmm("h100_bsr_spmm_b64", 1024), MM),
    Row("bsr_sddmm, K256", sddmm, MM),
    Row("bsr_spgemm, N4096", spgemm, MM),
    Row("a layer, 16 tokens", layer, LINEAR),
    Row("causal in one call, S4096 H8 d128", options, SDPA),
)


def host_microseconds(call: Call) -> float:
    """The host's time of a call, the mean of AHEAD that the GPU has not done when the clock stops."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(AHEAD):
        call()
    return 1e6 * (time.perf_counter() - began) / AHEAD


def loop_microseconds(call: Call) -> float:
    """The wall time of a call among LOOP_CALLS back to back."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(LOOP_CALLS):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - began) / LOOP_CALLS


def graph_microseconds(replay: Call) -> float:
    """The GPU's time of a call of a replayed graph."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop) / AHEAD


def times_of(calls: dict[str, Call]) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """The three times of each call by label, and why others have none, or none in a graph."""
    results: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    right: dict[str, Call] = {}
    replays: dict[str, Call] = {}
    for label, call in calls.items():
        try:
            for _ in range(AHEAD):
                call()
            torch.cuda.synchronize()
            right[label] = call
            replays[label] = captured([call] * AHEAD)
            replays[label]()
        except Exception as error:
            failed[label] = reason(error)
    for key, timed, repeats, clock in (
        (HOST, right, REPEATS, host_microseconds),
        (LOOP, right, ROUNDS, loop_microseconds),
        (GRAPH, replays, ROUNDS, graph_microseconds),
    ):
        found: dict[str, list[float]] = {label: [] for label in timed}
        for _ in range(repeats):
            for label, call in timed.items():
                found[label].append(clock(call))
        for label, values in found.items():
            results.setdefault(label, {})[key] = round(median(values), 2)
    torch.cuda.synchronize()
    return results, failed


@torch.no_grad()
def measure(rows: list[Row], path: Path | None) -> Fields:
    """Run rows; the JSON is written after each, so that a crash costs no finished one."""
    report: Fields = environment(PACKAGES)
    report["versions"]["python"] = platform.python_version()
    report |= {
        "processor": host_page.processor(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": [],
    }
    for row in rows:
        torch.manual_seed(0)
        results, failed = times_of(row.make())
        report["rows"].append({"name": row.name, "peer": row.peer, "results": results, "failed": failed})
        if path:
            path.write_text(json_rows(report), encoding="utf-8")
        free_memory()
    return report


def show(report: Fields) -> None:
    """Print the table, and below it what failed."""
    printed = Table(title=host_page.machine(report))
    for heading, alignment in zip(host_page.HEADINGS, host_page.ALIGNMENT, strict=True):
        printed.add_column(heading, justify="right" if alignment.endswith(":") else "left")
    for cells in host_page.rows(report):
        printed.add_row(*cells)
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    console.print(printed)
    for (label, why), names in harness.failures(report).items():
        console.print(f"{'; '.join(names)}: {label} has no time: {why}", markup=False, soft_wrap=True)


def parse(arguments: list[str] | None = None) -> Any:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help=f"of {'; '.join(names)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every median")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="show an earlier run's JSON")
    return parser.parse_args(arguments)


def main() -> None:
    given = parse()
    if given.earlier:
        show(json.loads(given.earlier.read_text(encoding="utf-8")))
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; --from FILE shows an earlier run")
    report = measure([row for row in ROWS if not given.rows or row.name in given.rows], given.json)
    show(report)
    harness.check_own(report)


if __name__ == "__main__":
    main()
