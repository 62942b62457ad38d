"""Times attention over a KV cache, as serving engines call it to decode and to prefill, compared with other libraries.

    python benchmarks/serving.py --json serving.jsonl               # beside torch, and FlashAttention 4 if installed
    python benchmarks/serving.py --json serving.jsonl --peers DIR   # and beside what vLLM calls on Hopper
    python benchmarks/serving.py --only 'MSA*'                      # rows whose names match
    python benchmarks/serving.py --page serving.jsonl               # no GPU: writes docs/notebook/serving.md

DIR has files of an unpacked vllm wheel: see benchmarks/serving_peers.py. Our side of a row is one call of
``paged_attention`` with ``out`` and ``workspace``; "ours, batch_invariant" is the same call with that argument. Rows of
the front door call ``block_sparse_attention`` with ``out``. K, V
and q are normal numbers, different in each run, and pages are in random order. A peer has its own layout of the same
values. SDPA has contiguous copies of K and V and is called where all requests have the same length.

Each result is compared with float32 before its call is timed, all rows of it. A call that fails or is wrong gets no
time: its reason is in the row. Four times of each call, medians: in a CUDA graph of several calls, a single call after
a pause, calls back to back, and the host's time of a call, until it returns. The GB/s of a call are the bytes of K and
V that some query sees, each once for a request and K/V head, over the time in a graph. What fits the L2 cache is read
from there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import serving_page
import torch
from harness import Fields, check_calls, environment, free_memory, matching, reason, run_rows
from host import host_microseconds
from records import OURS
from serving_page import BACK_TO_BACK, FLOP_RATE, GRAPH, HOST, INVARIANT, RATE, SINGLE
from serving_peers import check_folder, peers_of
from serving_rows import FRONT_DOOR, ROWS, Inputs, Make, Row, make_inputs

from codegen.library import NamedSpec
from runtime import (
    block_sparse_attention,
    explain_attention,
    explain_paged_attention,
    paged_attention,
    paged_workspace,
)
from runtime.patterns import Causal
from runtime.receipts.permit import provenance
from runtime.tools.bench.timing import SLEEP_CYCLES, Call, back_to_back, captured, median, single_calls
from runtime.verify.rows import kernel_fields

PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl")
TOLERANCE = 2e-2
"""The largest error of a right result, of its largest element."""
SECONDS, ROUNDS = 0.03, 3
"""Of calls back to back: the least length of a block, and blocks of each call."""
REPEATS, WARM_UP = 9, 2
"""Of single calls."""
MOST_OF_GRAPH, GRAPH_MILLISECONDS = 20, 4.0
"""Calls of a graph: at most so many, and about so long together."""
REPLAYS, GRAPH_ROUNDS = 5, 3
"""Replays between two events, and how often those are timed."""
HOST_REPEATS = 5


def ours(inputs: Inputs, *, batch_invariant: bool = False) -> Call:
    """The call of ``paged_attention``."""
    row, q = inputs.row, inputs.q
    heads_first = inputs.rows is not None or inputs.table is None
    caches = (inputs.k, inputs.v)
    k, v = (cache.transpose(1, 2) for cache in caches) if heads_first else caches
    out = torch.full_like(q, torch.nan)
    sizes = {"heads": row.heads, "kv_heads": row.kv_heads, "head_dim": row.head_dim}
    workspace = paged_workspace(
        batch=len(q) if row.entries else len(row.lengths),
        tokens=len(q),
        **sizes,
        batch_invariant=batch_invariant,
        device=q.device,
    )
    options: Fields = {
        "block_table": inputs.table,
        "seq_lens": None if inputs.table is None else inputs.lengths,
        "cu_seqlens_q": inputs.bounds if row.is_prefill else None,
        "layout": "HND" if heads_first else "NHD",
        "k_scale": inputs.scale,
        "v_scale": inputs.scale,
        "out": out,
        "workspace": workspace,
        "batch_invariant": batch_invariant,
    }
    pattern = inputs.pattern
    return lambda: paged_attention(q, k, v, pattern, **options)


def front_door(inputs: Inputs) -> Call:
    """The call of ``block_sparse_attention``, for requests of one query over contiguous K and V."""
    q, pattern = inputs.q.unsqueeze(2), inputs.pattern
    assert isinstance(pattern, Causal)
    k, v = inputs.contiguous()
    out = torch.full_like(q, torch.nan)

    def call() -> torch.Tensor:
        return block_sparse_attention(q, k, v, pattern, out=out).squeeze(2)

    return call


def makers_of(row: Row, folder: Path | None) -> list[tuple[str, Make]]:
    """What makes the calls of a row, by label."""
    invariant: Make = lambda inputs: ours(inputs, batch_invariant=True)  # noqa: E731
    peers = [(peer.label, peer.make) for peer in peers_of(folder) if peer.computes(row)]
    own = [(OURS, front_door)] if row.work == FRONT_DOOR else [(OURS, ours), (INVARIANT, invariant)]
    return [*own, *peers]


def checked(inputs: Inputs, makers: Sequence[tuple[str, Make]]) -> tuple[dict[str, Call], dict[str, float], Fields]:
    """The calls whose results are right, their errors, and why others have no time."""
    calls: dict[str, Call] = {}
    failed: Fields = {}
    for label, make in makers:
        try:
            calls[label] = make(inputs)
        except Exception as error:  # of a foreign library, which may raise anything
            failed[label] = reason(error)
    exact = inputs.exact()
    largest = float(exact.abs().max())

    def error_of(label: str, out: Any) -> float:
        del label
        if out.shape != exact.shape:
            raise ValueError(f"the result has shape {tuple(out.shape)}, expected {tuple(exact.shape)}")
        return float((out.float() - exact).abs().max()) / largest

    errors, wrong = check_calls(calls, error_of, TOLERANCE)
    return {label: calls[label] for label in errors}, errors, failed | wrong


def graph_times(calls: Mapping[str, Call], single: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds of each call in a replayed CUDA graph of several, and why others have none.

    Args:
        calls: by label; their rounds take turns.
        single: milliseconds of a single call.
    """
    replays: dict[str, tuple[Call, int]] = {}
    failed: dict[str, str] = {}
    for label, call in calls.items():
        number = max(1, min(MOST_OF_GRAPH, int(GRAPH_MILLISECONDS / single[label])))
        try:
            replays[label] = captured([call] * number), number
            replays[label][0]()
            torch.cuda.synchronize()
        except Exception as error:
            replays.pop(label, None)
            torch.cuda.synchronize()
            failed[label] = f"not captured: {reason(error)}"
    times: dict[str, list[float]] = {label: [] for label in replays}
    for _ in range(GRAPH_ROUNDS):
        for label, (replay, number) in replays.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)  # the host runs ahead
            start.record()
            for _ in range(REPLAYS):
                replay()
            stop.record()
            stop.synchronize()
            times[label].append(start.elapsed_time(stop) / number / REPLAYS)
    return {label: median(found) for label, found in times.items()}, failed


def times_of(calls: dict[str, Call], seconds: float) -> tuple[dict[str, Fields], dict[str, str]]:
    """The four times of each call by label, and why a call has none in a graph."""
    single = single_calls(calls, repeats=REPEATS, warm_up=WARM_UP)
    many = back_to_back(calls, seconds=seconds, rounds=ROUNDS)
    graphs, failed = graph_times(calls, single)
    results: dict[str, Fields] = {}
    for label, call in calls.items():
        host = median([host_microseconds(call) for _ in range(HOST_REPEATS)])
        results[label] = {SINGLE: round(single[label], 5), BACK_TO_BACK: round(many[label], 5), HOST: round(host, 2)}
        if label in graphs:
            results[label][GRAPH] = round(graphs[label], 5)
    torch.cuda.synchronize()
    return results, failed


def kernel_of(inputs: Inputs) -> NamedSpec:
    """The kernel of our call."""
    if inputs.row.work == FRONT_DOOR:
        return explain_attention(inputs.q.unsqueeze(2), *inputs.contiguous(), Causal()).choice.named
    heads_first = inputs.rows is not None or inputs.table is None
    k, v = (cache.transpose(1, 2) if heads_first else cache for cache in (inputs.k, inputs.v))
    found = explain_paged_attention(
        inputs.q,
        k,
        v,
        inputs.pattern,
        block_table=inputs.table,
        cu_seqlens_q=inputs.bounds if inputs.row.is_prefill else None,
        layout="HND" if heads_first else "NHD",
    )
    return found.kernels["O"]


@cache
def kernel_record(named: NamedSpec) -> str:
    """Kernel of a record as JSON: its name, whether it has a receipt, and the fields that ``codegen migrate`` needs."""
    receipt = provenance(named).is_verified
    return json.dumps({"name": named.stem, "receipt": receipt, **kernel_fields(named), "results": {}})


def record_of(row: Row, folder: Path | None, seconds: float, device: str = "cuda") -> Fields:
    """Check and time one row."""
    seed = int.from_bytes(os.urandom(4), "big")
    torch.manual_seed(seed)
    began = time.monotonic()
    inputs = make_inputs(row, torch.device(device))
    size = inputs.bytes_read()
    calls, errors, failed = checked(inputs, makers_of(row, folder))
    results, uncaptured = times_of(calls, seconds)
    for label, result in results.items():
        result["error"] = float(f"{errors[label]:.2e}")
        if GRAPH in result and row.is_prefill:
            result[FLOP_RATE] = round(row.flops / result[GRAPH] / 1e9, 1)
        elif GRAPH in result:
            result[RATE] = round(size / result[GRAPH] / 1e6, 1)
    kernels = [json.loads(kernel_record(kernel_of(inputs)))] if OURS in results else []
    return {
        "name": row.name,
        "work": row.work,
        "shape": row.shape,
        "bytes": size,
        "seed": seed,
        "kernels": kernels,
        "results": results,
        "failed": failed | uncaptured,
        "seconds": round(time.monotonic() - began, 1),
    }


def shape_of(row: Row) -> Fields:
    """Fields of a record whose inputs could not be made."""
    return {"name": row.name, "work": row.work, "shape": row.shape, "bytes": 0}


@torch.no_grad()
def measure(options: argparse.Namespace, record: Callable[..., Fields] = record_of) -> None:
    """Run the rows that the command line names."""
    if options.peers:
        check_folder(options.peers)
    run_rows(
        matching(ROWS, options.only),
        lambda row: record(row, options.peers, options.seconds),
        shape_of,
        line=serving_page.line,
        about=environment(PACKAGES),
        path=options.json,
        budget=options.budget,
        after=lambda row: free_memory(),
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="JSON lines; rows are appended, and the last one counts"
    )
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with files of an unpacked vllm wheel")
    parser.add_argument("--only", action="append", metavar="GLOB", help="rows whose names match; may be repeated")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="duration of a block of back-to-back calls")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no row after this time; skipped rows are printed"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write docs/notebook/serving.md from results")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.page:
        serving_page.write(options.page)
    elif options.list:
        print("\n".join(row.name for row in matching(ROWS, options.only)))
    elif not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; --page FILE shows an earlier run")
    else:
        measure(options)


if __name__ == "__main__":
    main()
