"""Times the shapes of published models through the public API, compared with other libraries, in one run on the same
inputs.

    python benchmarks/models.py --warm 14                                # compiles everything that the run below calls
    python benchmarks/models.py --json models.jsonl                      # headline rows, forward and backward
    python benchmarks/models.py --json models.jsonl --all                # every row that the file lacks
    python benchmarks/models.py --only 'llama3-*' --part 1/2             # the first of every two rows that match
    python benchmarks/models.py --choices models.jsonl                   # no GPU: marks rows whose kernel has changed
    python benchmarks/models.py --page models.jsonl                      # no GPU: writes docs/notebook/models.md

benchmarks/models.yaml has the problems and where their numbers come from. Our side of a row is one call of
``block_sparse_attention`` or ``bsr_matmul`` (of ``prepare_bsr``'s weight), or ``torch.autograd.grad`` of its result;
a peer's side is its own function in its own layout. Inputs are normal numbers, drawn again in each run. A result is
compared with float32 on a sample of rows before its call is timed, and a call that fails or is wrong gets no time: its
reason is in the row.

Four times of each call, medians: a single call after a pause, calls back to back (both by CUDA events, see
docs/notebook/measuring.md), calls of a CUDA graph, and the host's time of a call, until it returns. Gradients are not
captured in graphs. The caches of Inductor, Triton and FlashAttention 4 are on: a run after ``--warm`` loads what that
compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import models_page
import records
import torch
from harness import Fields, check_calls, environment, free_memory, matching, reason, run_rows
from host import host_microseconds
from model_peers import PEERS, differentiated, leaves, packed_layout
from model_problems import AttentionInputs, AttentionRow, ProductInputs, Row, rows
from models_page import BACK_TO_BACK, GRAPH, HOST, SINGLE
from records import OURS

from codegen.library import NamedSpec
from runtime import block_sparse_attention, bsr_matmul, varlen_attention
from runtime.ops.bsr_explain import MatmulExplanation
from runtime.ops.explain import Explanation
from runtime.ops.explain_packed import KernelsExplanation
from runtime.tools.bench.timing import Call, back_to_back, captured, median, single_calls
from runtime.verify.rows import kernel_fields

PACKAGES = (
    *("torch", "triton", "flash-attn-4", "fa3-fwd"),
    *("nvidia-cudnn-frontend", "nvidia-cutlass-dsl"),
)
TOLERANCES = {"fp16": 1e-2, "bf16": 2e-2}
"""The largest error of a right result, of the largest element of a sample."""
GRADIENT_TOLERANCES = {"fp16": 2e-2, "bf16": 4e-2}
SAMPLE = 64
"""Rows of a head, or of a product, that are compared."""
SECONDS, ROUNDS = 0.12, 3
"""Of calls back to back: the least length of a block, and blocks of each call."""
REPEATS, WARM_UP = 9, 2
"""Of single calls."""
SLOW_MILLISECONDS = 20.0
"""Single calls that take longer are repeated FEW times."""
FEW = 3
GRAPH_MILLISECONDS = 4.0
"""The calls of a graph take about as long together, and are at least one and at most MOST_OF_GRAPH."""
MOST_OF_GRAPH = 20
GRAPH_REPEATS = 5
HOST_REPEATS = 7
LONG_MILLISECONDS = 1.0
"""The host's time of calls that take longer is taken once: the GPU has to do them."""
GRACE = 60.0
"""Seconds that a process of --warm may take beyond the budget, for the row that it is at."""
CACHES = Path(tempfile.gettempdir()) / "models_benchmark"

Inputs = AttentionInputs | ProductInputs


def ours(inputs: Inputs) -> Call:
    """The front door's call."""
    if isinstance(inputs, ProductInputs):
        return _product(inputs)
    if inputs.is_packed():
        tensors = leaves(inputs, packed_layout)
        return differentiated(inputs, tensors, lambda: inputs.packed_call(varlen_attention, tensors), packed_layout)
    pattern, sink = inputs.pattern, inputs.sink
    if inputs.dout is None:
        q, k, v = inputs.q, inputs.k, inputs.v
        return lambda: block_sparse_attention(q, k, v, pattern, sink=sink)
    q, k, v = (t.detach().clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    out = block_sparse_attention(q, k, v, pattern, sink=sink)
    return lambda: torch.autograd.grad(out, (q, k, v), inputs.dout, retain_graph=True)


def _product(inputs: ProductInputs) -> Call:
    weight, b = inputs.prepared, inputs.b
    if inputs.dout is None:
        return lambda: bsr_matmul(weight, b)
    values, b = (t.detach().clone().requires_grad_() for t in (weight.values, b))
    out = bsr_matmul(weight.with_values(values), b)
    return lambda: torch.autograd.grad(out, (values, b), inputs.dout, retain_graph=True)


def calls_of(inputs: Inputs, *, every: bool) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of a row by label, and why others have none."""
    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    makers: list[tuple[str, Callable[[Any], Call]]] = [(OURS, ours)]
    makers += [(peer.label, peer.make) for peer in PEERS if peer.computes(inputs, every=every)]
    for label, make in makers:
        try:
            calls[label] = make(inputs)
        except Exception as error:  # of a foreign library, which may raise anything
            failed[label] = reason(error)
    return calls, failed


def error_of(row: Row, inputs: Inputs) -> Callable[[str, Any], float]:
    """What tells how far a result is off, relative to the largest element of the sample, by label and result."""
    if isinstance(inputs, ProductInputs):
        return _product_error(inputs)
    return _gradient_error(inputs) if row.backward else _attention_error(inputs)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest element: NaN if there is one."""
    return float((found.float() - expected).abs().max() / expected.abs().max())


def exact_attention(inputs: AttentionInputs, head: int, queries: torch.Tensor) -> torch.Tensor:
    """float32 (queries, head_dim): some rows of a head of the last batch."""
    own = head // (inputs.problem.heads // inputs.problem.kv_count)
    scores = inputs.q[-1, head, queries].float() @ inputs.k[-1, own].float().T * inputs.problem.head_dim**-0.5
    scores = scores.masked_fill(~inputs.visible(head, queries), -torch.inf)
    if inputs.sink is not None:
        scores = torch.cat((scores, inputs.sink[head].expand(len(scores), 1)), 1)
    out: torch.Tensor = scores.softmax(-1)[:, : inputs.size.keys] @ inputs.v[-1, own].float()
    return out


def _attention_error(inputs: AttentionInputs) -> Callable[[str, Any], float]:
    samples = []
    for head in sorted({0, inputs.problem.heads - 1}):
        queries = torch.randint(inputs.size.q_len, (SAMPLE,), device=inputs.q.device)
        queries[0], queries[1] = 0, inputs.size.q_len - 1
        samples.append((head, queries, exact_attention(inputs, head, queries)))

    def error(label: str, out: Any) -> float:
        del label
        if out.shape != inputs.q.shape:
            raise ValueError(f"the result has shape {tuple(out.shape)}, expected {tuple(inputs.q.shape)}")
        return max(relative(out[-1, head, queries], expected) for head, queries, expected in samples)

    return error


def exact_gradients(inputs: AttentionInputs) -> tuple[torch.Tensor, ...]:
    """float32: dq of the last head of the last batch, dk and dv of its K/V head, which has several query heads."""
    assert inputs.dout is not None
    group = inputs.problem.heads // inputs.problem.kv_count
    k, v = (t[-1, -1].float().requires_grad_() for t in (inputs.k, inputs.v))
    every = torch.arange(inputs.size.q_len, device=inputs.q.device)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for head in range(inputs.problem.heads - group, inputs.problem.heads):
        q = inputs.q[-1, head].float().requires_grad_()
        dq = torch.zeros_like(q)
        for part in every.split(4096):
            scores = (q[part] @ k.T * inputs.problem.head_dim**-0.5).masked_fill(
                ~inputs.visible(head, part), -torch.inf
            )
            if inputs.sink is not None:
                scores = torch.cat((scores, inputs.sink[head].expand(len(scores), 1)), 1)
            out = scores.softmax(-1)[:, : inputs.size.keys] @ v
            found = torch.autograd.grad(out, (q, k, v), inputs.dout[-1, head, part].float())
            dq, dk, dv = dq + found[0], dk + found[1], dv + found[2]
    return dq, dk, dv


def _gradient_error(inputs: AttentionInputs) -> Callable[[str, Any], float]:
    expected = exact_gradients(inputs)

    def error(label: str, gradients: Any) -> float:
        del label
        return max(relative(found[-1, -1], exact) for found, exact in zip(gradients, expected, strict=True))

    return error


def _product_error(inputs: ProductInputs) -> Callable[[str, Any], float]:
    """The error of some rows of C, or of dB, and of some blocks of dA; dense peers multiply with another matrix."""
    size, device = inputs.size, inputs.b.device
    some = torch.randint(inputs.problem.rows, (SAMPLE,), device=device)
    lefts = {False: inputs.stored().float(), True: inputs.dense.float()}
    dense = {peer.label for peer in PEERS if peer.dense}
    if inputs.dout is None:
        return lambda label, out: relative(out[some], lefts[label in dense][some] @ inputs.b.float())
    columns = torch.randint(inputs.problem.columns, (SAMPLE,), device=device)
    dout, whole = inputs.dout.float(), inputs.dout.float()[some] @ inputs.b.float().T
    block_rows, block_columns = (places.tolist() for places in inputs.places())

    def error(label: str, gradients: Any) -> float:
        da, db = gradients
        of_b = relative(db[columns], lefts[label in dense][:, columns].T @ dout)
        if label in dense:
            return max(of_b, relative(da[some], whole))
        chosen = torch.randint(len(da), (SAMPLE,)).tolist()
        expected = torch.stack(
            [
                dout[block_rows[i] * size.block :][: size.block]
                @ inputs.b[block_columns[i] * size.block :][: size.block].float().T
                for i in chosen
            ]
        )
        return max(of_b, relative(da[chosen], expected))

    return error


def graph_milliseconds(call: Call, expected: float) -> float:
    """A call's milliseconds in a replayed CUDA graph of several."""
    number = max(1, min(MOST_OF_GRAPH, int(GRAPH_MILLISECONDS / expected)))
    replay = captured([call] * number)
    replay()
    times = []
    for _ in range(GRAPH_REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / number)
    return median(times)


def host_times(calls: dict[str, Call], long: Container[str]) -> dict[str, list[float]]:
    """Microseconds of the host by label. The calls take turns, so that what disturbs the host disturbs all of them."""
    found: dict[str, list[float]] = {label: [] for label in calls}
    for turn in range(HOST_REPEATS):
        for label, call in calls.items():
            if turn == 0 or label not in long:
                found[label].append(host_microseconds(call))
    return found


def times_of(calls: dict[str, Call], *, graphs: bool, seconds: float) -> tuple[dict[str, Fields], dict[str, str]]:
    """The four times of each call by label, and why a call has none in a graph."""
    first = single_calls(calls, repeats=1, warm_up=1)
    slow = max(first.values(), default=0.0) > SLOW_MILLISECONDS
    single = single_calls(calls, repeats=FEW if slow else REPEATS, warm_up=0 if slow else WARM_UP)
    many = back_to_back(calls, seconds=seconds, rounds=1 if slow else ROUNDS)
    results = {label: {SINGLE: round(single[label], 5), BACK_TO_BACK: round(many[label], 5)} for label in calls}
    failed: dict[str, str] = {}
    hosts = host_times(calls, {label for label in calls if single[label] > LONG_MILLISECONDS})
    for label, call in calls.items():
        results[label][HOST] = round(median(hosts[label]), 2)
        if graphs:
            try:
                results[label][GRAPH] = round(graph_milliseconds(call, single[label]), 5)
            except Exception as error:
                torch.cuda.synchronize()
                failed[label] = f"not captured: {reason(error)}"
    return results, failed


def kernels_of(found: Explanation | KernelsExplanation | MatmulExplanation, *, backward: bool) -> dict[str, NamedSpec]:
    """The kernels that a timed call runs, by their result."""
    if isinstance(found, KernelsExplanation):
        return {what: named for what, named in found.kernels.items() if backward == (what != "O")}
    if isinstance(found, MatmulExplanation):
        return {what: each.choice.named for what, each in found.products.items() if backward == (what != "C")}
    if not backward:
        return {"O": found.choice.named}
    gradients = found.gradients
    assert gradients is not None
    if gradients.dq_dkdv is not None:
        return {"dQ, dK and dV": gradients.dq_dkdv}
    return {"dQ alone": gradients.dq, "dK and dV alone": gradients.dkdv}


def kernel_records(row: Row, found: Explanation | KernelsExplanation | MatmulExplanation, *, ran: bool) -> list[Fields]:
    """A record's data about its kernels: names, whether they have receipts, and the fields that ``codegen migrate``
    needs."""
    return [
        {
            "name": named.stem,
            "computes": what,
            "receipt": found.provenance[what].is_verified,
            **kernel_fields(named, ran),
            "results": {},  # they are those of the row
        }
        for what, named in kernels_of(found, backward=row.backward).items()
    ]


def shape_of(row: Row) -> Fields:
    """What a record says of its row: its sizes are in ``shape``."""
    problem, size = row.problem, row.size
    found: Fields = {
        "name": row.name,
        "model": problem.model,
        "layer": problem.layer,
        "source": str(problem.source),
        "assumed": list(problem.assumed),
        "dtype": problem.dtype,
        "backward": row.backward,
        "headline": size.headline,
    }
    if isinstance(row, AttentionRow):
        attention = row.problem
        sizes = {"batch": row.size.batch, "q_len": row.size.q_len, "kv_len": row.size.keys}
        heads = {"heads": attention.heads, "kv_heads": attention.kv_count, "head_dim": attention.head_dim}
        pattern = {"pattern": attention.pattern.model_dump(mode="json", exclude_none=True), "sink": attention.sink}
        return found | {"shape": sizes | heads | pattern}
    weight = {"rows": row.problem.rows, "columns": row.problem.columns, "activations": row.problem.activations}
    blocks = {"block": row.size.block, "sparsity": row.size.sparsity, "tokens": row.size.tokens}
    return found | {"shape": weight | blocks}


def inputs_of(row: Row, std: float, device: str = "cuda") -> Inputs:
    """Inputs of a row; the logits of attention before its mask have the given standard deviation."""
    inputs = row.inputs(torch.device(device))
    return replace(inputs, q=inputs.q * std) if isinstance(inputs, AttentionInputs) else inputs


def record_of(row: Row, *, every: bool, seconds: float, std: float = 1.0, device: str = "cuda") -> Fields:
    """Check and time one row."""
    seed = int.from_bytes(os.urandom(4), "big")
    torch.manual_seed(seed)
    began = time.monotonic()
    with torch.set_grad_enabled(row.backward):
        inputs = inputs_of(row, std, device)
        found = inputs.explain(gradients=row.backward)
        calls, failed = calls_of(inputs, every=every)
        errors, wrong = checked(row, inputs, calls)
        torch.cuda.empty_cache()  # what the oracle took
        right = {label: calls[label] for label in errors}
        results, uncaptured = times_of(right, graphs=not row.backward, seconds=seconds)
    flops = row.flops(inputs)  # type: ignore[arg-type]
    for label, result in results.items():
        result["error"] = float(f"{errors[label]:.2e}")
        for figure, rate in ((SINGLE, records.SINGLE), (BACK_TO_BACK, records.BACK_TO_BACK)):
            result[rate] = round(flops / result[figure] / 1e9, 1)
    return {
        **shape_of(row),
        "flops": flops,
        "seed": seed,
        "kernels": kernel_records(row, found, ran=OURS in results),
        "results": results,
        "failed": failed | wrong | uncaptured,
        "seconds": round(time.monotonic() - began, 1),
    }


def checked(row: Row, inputs: Inputs, calls: dict[str, Call]) -> tuple[dict[str, float], dict[str, str]]:
    """Errors of the calls whose results are right, and what is wrong with the others."""
    limits = GRADIENT_TOLERANCES if row.backward else TOLERANCES
    only = {peer.label: peer.dtype for peer in PEERS}
    error = error_of(row, inputs)
    errors: dict[str, float] = {}
    wrong: dict[str, str] = {}
    for label, call in calls.items():
        limit = limits[only.get(label) or row.problem.dtype]
        found = check_calls({label: call}, error, limit, "the largest element of the sample")
        errors, wrong = errors | found[0], wrong | found[1]
    return errors, wrong


def call_once(row: Row, *, every: bool) -> dict[str, str]:
    """Call everything of a row once, so that it is compiled; return why something could not be called."""
    with torch.set_grad_enabled(row.backward):
        inputs = row.inputs(torch.device("cuda"))
        calls, failed = calls_of(inputs, every=every)
        for label, call in calls.items():
            try:
                call()
                torch.cuda.synchronize()
            except Exception as error:
                failed[label] = reason(error)
    return failed


def chosen_rows(options: argparse.Namespace) -> list[Row]:
    """The rows that the command line asks for, without those that its file has."""
    wanted = [row for row in rows() if options.all or options.only or row.size.headline]
    wanted = matching(wanted, options.only)
    if options.forward or options.backward:
        wanted = [row for row in wanted if row.backward == options.backward]
    i, n = options.part
    wanted = wanted[i - 1 :: n]
    done = {} if options.again else finished(options.json)
    return [row for row in wanted if done.get(row.name) != shape_of(row)["shape"]]


def finished(path: Path | None) -> dict[str, Fields]:
    """Names and shapes of the rows that a file of results has; a row whose problem has other numbers now is measured
    again."""
    records = models_page.read(path) if path and path.is_file() else []
    return {record["name"]: record["shape"] for record in records}


def measure(options: argparse.Namespace) -> None:
    """Run rows until the budget is spent; each is appended to the file when it is done."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # a gradient is taken many times

    def check(row: Row) -> None:
        if is_lost():
            raise SystemExit(f"error: a call of {row.name} broke the CUDA context; run again, rows in the file stay")
        free_memory()

    run_rows(
        chosen_rows(options),
        lambda row: record_of(row, every=options.all_peers, seconds=options.seconds, std=options.std),
        shape_of,
        line=models_page.line,
        about=environment(PACKAGES),
        path=options.json,
        budget=options.budget,
        after=check,
    )


def is_lost() -> bool:
    """Whether a kernel's fault has made CUDA unusable in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def warm(options: argparse.Namespace) -> None:
    """Run --once in several processes, each with its part of the rows: a crash costs the rest of one part."""
    passed = [*(["--all"] if options.all else []), *(["--all-peers"] if options.all_peers else [])]
    passed += ["--forward"] if options.forward else ["--backward"] if options.backward else []
    passed += list(itertools.chain.from_iterable(("--only", glob) for glob in options.only or ()))
    budget = [] if options.budget is None else ["--budget", str(options.budget)]
    limit = None if options.budget is None else options.budget + GRACE

    def run(part: int) -> str:
        command = [sys.executable, __file__, "--once", "--part", f"{part}/{options.warm}", *passed, *budget]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            return f"part {part} was ended: it took longer than its budget and {GRACE:.0f} seconds\n"
        end = "" if found.returncode == 0 else f"part {part} ended with {found.returncode}: {found.stderr[-500:]}\n"
        return found.stdout + end

    with ThreadPoolExecutor(options.warm) as pool:
        for text in pool.map(run, range(1, options.warm + 1)):
            print(text, end="", flush=True)


def once(options: argparse.Namespace) -> None:
    """Call the rows of a part once."""
    began = time.monotonic()
    for row in chosen_rows(options):
        if options.budget is not None and time.monotonic() - began > options.budget:
            print(f"{row.name}: not warmed, the budget is spent")
            continue
        with contextlib.suppress(Exception):  # the run tells
            for label, why in call_once(row, every=options.all_peers).items():
                print(f"{row.name}: {label}: {why}", flush=True)
        free_memory()


def use_caches() -> None:
    """Let libraries keep compiled code where other processes find it."""
    for variable, value in {
        "TORCHINDUCTOR_CACHE_DIR": str(CACHES / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TRITON_CACHE_DIR": str(CACHES / "triton"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(CACHES / "fa4"),
    }.items():
        os.environ.setdefault(variable, value)
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # in this process, which may have read the variable before


def part(text: str) -> tuple[int, int]:
    """Read i/n of --part."""
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text}: expected i/n, from 1/n to n/n")
    return int(i), int(n)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON lines; rows are appended, those in it are kept")
    parser.add_argument(
        "--again", action="store_true", help="repeat rows that the file already has; the last one counts"
    )
    parser.add_argument("--all", action="store_true", help="every row, not only the headline rows")
    parser.add_argument("--only", action="append", metavar="GLOB", help="rows whose names match; may be repeated")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--backward", action="store_true", help="only gradients")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help="each n-th row from the i-th on")
    parser.add_argument(
        "--std", type=float, default=1.0, help="standard deviation of the logits of attention, for a file of its own"
    )
    parser.add_argument("--all-peers", action="store_true", help="FlexAttention on dense and causal rows too")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="duration of a block of back-to-back calls")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no row after this time; skipped rows are printed"
    )
    parser.add_argument("--warm", type=int, metavar="N", help="call every row once, in N processes, and time nothing")
    parser.add_argument("--once", action="store_true", help="call every row once, and time nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--choices", type=Path, metavar="FILE", help="mark rows that calls take another kernel for")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write docs/notebook/models.md from results")
    options = parser.parse_args(arguments)
    if options.forward and options.backward:
        parser.error("--forward and --backward: one of them")
    return options


def kernel_of(row: AttentionRow) -> str:
    """The kernel that a call of an H100 or H200 takes today."""
    found = row.inputs(torch.device("meta")).explain(gradients=False, arch="sm_90a")
    return found.kernels["O"].stem if isinstance(found, KernelsExplanation) else found.choice.named.stem


def mark_choices(path: Path) -> None:
    """Note today's kernel in forward rows of attention that were measured with another one."""
    records = {record["name"]: record for record in models_page.read(path)}
    for row in rows():
        if row.name in records and isinstance(row, AttentionRow) and not row.backward:
            record, kernel = records[row.name], kernel_of(row)
            record.pop(models_page.CALLS_TAKE, None)
            if kernel not in {each["name"] for each in record["kernels"]}:
                record[models_page.CALLS_TAKE] = kernel
                print(f"{row.name}: calls take {kernel}")
    path.write_text("".join(json.dumps(record) + "\n" for record in records.values()), encoding="utf-8")


def names(options: argparse.Namespace) -> Iterator[str]:
    """Names of the chosen rows."""
    return (row.name for row in chosen_rows(options))


def main() -> None:
    options = parse()
    use_caches()
    if options.choices:
        mark_choices(options.choices)
    elif options.page:
        models_page.write(options.page, today={row.name: shape_of(row) for row in rows()})
    elif options.list:
        print("\n".join(names(options)))
    elif not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; --page FILE shows an earlier run")
    elif options.warm:
        warm(options)
    elif options.once:
        once(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
