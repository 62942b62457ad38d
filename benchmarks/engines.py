"""Times the attention layers that engines call, by this package's adapters and by what an engine runs without them.

    python benchmarks/engines.py --json benchmarks/results/engines_h200.jsonl                # beside torch's SDPA
    python benchmarks/engines.py --json benchmarks/results/engines_h200.jsonl --peers DIR    # beside FA3 and Triton
    python benchmarks/engines.py --only 'sglang*'                                            # rows whose names match
    python benchmarks/engines.py --page benchmarks/results/engines_h200.jsonl                # no GPU: writes the tables
    python benchmarks/engines.py --page benchmarks/results/engines_h200.jsonl --check        # exits 1 if one is stale

DIR has files of an unpacked vllm wheel: see benchmarks/serving_peers.py. A row is one layer of a model, called at the
entry of its engine with tensors that lie as the engine's do. What an engine computes once for all layers is not timed,
such as the metadata of a batch.

128 tokens of each result are compared with float32 before its call is timed; all of it where lists are given. A call
that fails or is wrong gets no time: its reason is in the row. Times are medians: in a CUDA graph of several calls, of a
single call after a pause, and of eager calls back to back.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import engines_calls
import engines_page
import torch
from engines_page import BACK_TO_BACK, GRAPH, SINGLE
from engines_rows import ROWS, Problem, Row, make_problem
from harness import Fields, check_calls, environment, free_memory, matching, reason, run_rows
from records import OURS
from serving import SECONDS, TOLERANCE, graph_times
from serving_peers import check_folder

from codegen.library import find_spec, shipped_specs
from runtime.driver.launch import LoadedKernel
from runtime.receipts.permit import provenance
from runtime.tools.bench.timing import Call, back_to_back, single_calls
from runtime.verify.rows import kernel_fields

PACKAGES = ("torch", "triton", "transformers", "diffusers")
REPEATS, WARM_UP = 5, 1
"""Of single calls."""
ROUNDS, SLOW_MILLISECONDS = 3, 10.0
"""Blocks of calls back to back; calls that take longer have one."""


@contextmanager
def launched() -> Iterator[dict[str, Any]]:
    """Specs of the kernels that prepare a call of other sizes than before, by the kernels' names."""
    specs: dict[str, Any] = {}
    prepare = LoadedKernel.signature

    def signature(self: LoadedKernel, *given: Any, **named: Any) -> Any:
        specs[self.plan.stem] = self.plan.spec
        return prepare(self, *given, **named)

    with patch.object(LoadedKernel, "signature", signature):
        yield specs


def kernel_record(name: str, spec: Any) -> Fields:
    """Kernel of a record: its name, whether it has a receipt, and the fields that ``codegen migrate`` needs."""
    named = next((each for each in shipped_specs() if each.stem == name), None) or find_spec(spec)
    return {"name": name, "receipt": provenance(named).is_verified, **kernel_fields(named), "results": {}}


class Made(NamedTuple):
    """Calls of a row.

    Attributes:
        calls: by label.
        failed: why others cannot be made.
        all_keys: whether a peer sees all keys, by label.
        adapter: the entry of our call; None without one.
    """

    calls: dict[str, Call]
    failed: dict[str, str]
    all_keys: dict[str, bool]
    adapter: str | None


def calls_of(row: Row, problem: Any, folder: Path | None) -> Made:
    """The calls of a row, ours first."""
    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    adapter, peers = None, engines_calls.peers_of(row, folder)
    try:
        calls[OURS], adapter = engines_calls.ours(problem)
    except Exception as error:  # the peers are timed nevertheless
        failed[OURS] = reason(error)
    for label, peer in peers.items():
        try:
            calls[label] = peer.make(problem)
        except Exception as error:  # of a foreign library, which may raise anything
            failed[label] = reason(error)
    return Made(calls, failed, {label: peer.all_keys for label, peer in peers.items()}, adapter)


def checked(
    problem: Problem, calls: dict[str, Call], all_keys: dict[str, bool]
) -> tuple[dict[str, float], dict[str, str]]:
    """Errors of the calls whose results are right, of the largest element, and why others have none."""
    exact: dict[bool, torch.Tensor] = {}

    def error_of(label: str, out: Any) -> float:
        kind = all_keys.get(label, False)
        right = exact[kind] if kind in exact else exact.setdefault(kind, problem.exact(all_keys=kind))
        found = problem.compared(out)
        if found.shape != right.shape:
            raise ValueError(f"the result has shape {tuple(found.shape)}, expected {tuple(right.shape)}")
        return float((found.float() - right).abs().max() / right.abs().max())

    return check_calls(calls, error_of, TOLERANCE)


def times_of(calls: dict[str, Call], seconds: float) -> tuple[dict[str, Fields], dict[str, str]]:
    """The times of each call by label, in milliseconds, and why a call has none in a graph."""
    single = single_calls(calls, repeats=REPEATS, warm_up=WARM_UP)
    slow = max(single.values(), default=0.0) > SLOW_MILLISECONDS
    many = back_to_back(calls, seconds=seconds, rounds=1 if slow else ROUNDS)
    graphs, failed = graph_times(calls, single)
    results: dict[str, Fields] = {
        label: {SINGLE: round(single[label], 5), BACK_TO_BACK: round(many[label], 5)} for label in calls
    }
    for label, milliseconds in graphs.items():
        results[label][GRAPH] = round(milliseconds, 5)
    return results, failed


def record_of(row: Row, folder: Path | None, seconds: float, device: str = "cuda") -> Fields:
    """Check and time one row."""
    seed = int.from_bytes(os.urandom(4), "big")
    torch.manual_seed(seed)
    began = time.monotonic()
    problem = make_problem(row, torch.device(device))
    with launched() as specs:
        made = calls_of(row, problem, folder)
        errors, wrong = checked(problem, made.calls, made.all_keys)
    results, uncaptured = times_of({label: made.calls[label] for label in errors}, seconds)
    for label, result in results.items():
        result["error"] = float(f"{errors[label]:.2e}")
    return {
        "name": row.name,
        "page": row.page,
        "model": row.model.name,
        "source": row.model.source,
        "layers": row.model.layers,
        "heads": [row.model.heads, row.model.kv_heads, row.model.head_dim],
        "text": row.text,
        "dtype": "bf16",
        "tokens": row.tokens,
        "shape": row.shape,
        "adapter": made.adapter,
        "seed": seed,
        "kernels": [kernel_record(name, spec) for name, spec in specs.items()] if OURS in results else [],
        "results": results,
        "failed": made.failed | wrong | uncaptured,
        "seconds": round(time.monotonic() - began, 1),
    }


def shape_of(row: Row) -> Fields:
    """Fields of a record whose inputs could not be made."""
    about = {"name": row.name, "page": row.page, "model": row.model.name, "source": row.model.source}
    about |= {"layers": row.model.layers, "text": row.text, "dtype": "bf16", "tokens": row.tokens, "adapter": None}
    return about


@torch.no_grad()
def measure(options: argparse.Namespace, record: Callable[..., Fields] = record_of) -> None:
    """Run the rows that the command line names."""
    if options.peers:
        check_folder(options.peers)
    run_rows(
        matching(ROWS, options.only),
        lambda row: record(row, options.peers, options.seconds),
        shape_of,
        line=engines_page.line,
        about=environment(PACKAGES),
        path=options.json,
        budget=options.budget,
        after=lambda row: free_memory(),
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON lines; rows are appended, the last one counts")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with files of an unpacked vllm wheel")
    parser.add_argument("--only", action="append", metavar="GLOB", help="rows whose names match; may be repeated")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="duration of a block of back-to-back calls")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no row after this time; skipped rows are printed"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables of docs/guide from results")
    parser.add_argument("--check", action="store_true", help="with --page: write nothing, exit 1 if a table is stale")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.page:
        raise SystemExit(engines_page.write(options.page, check=options.check))
    if options.list:
        print("\n".join(row.name for row in matching(ROWS, options.only)))
    elif not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; --page FILE writes the tables of an earlier run")
    else:
        measure(options)


if __name__ == "__main__":
    main()
