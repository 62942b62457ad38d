"""Times attention and BSR products in FP8 beside ours in fp16 and cuDNN, FlashInfer and cuBLAS in FP8, in one run.

    python benchmarks/fp8.py --without "FlashInfer fmha_v2" --json fp8_h100.json
    python benchmarks/fp8.py --from benchmarks/results/fp8_h100.json     # no GPU: prints an earlier run

Attention, on the data sets std1 and std4 of runtime/tools/bench/data_sets.py; all calls of a row get the same
values:

- ours: shipped kernels, on operands that were quantized before, and with the quantizing in the call; as chosen: what
  block_sparse_attention_fp8 takes of the former; fp16: what block_sparse_attention takes of tensors in fp16.
- cuDNN SDPA: nvidia-cudnn-frontend's sdpa_fp8 on codes with one scale of each tensor, result in e4m3, in memory as
  (batch, heads, length, head_dim) and, heads inside, (batch, length, heads, head_dim); and with a result in bf16.
- cuDNN BSA: its block-sparse attention, which quantizes q, k and v in the call.
- FlashInfer fmha_v2: codes with one scale of each tensor. It is compiled in its first call, which takes minutes.

Products: ours with scales of tensors or of blocks, with 1 x 128 scales of B made in the call, in fp16, and
torch._scaled_mm, with fast accumulation and without, of as many FLOPs and of 8192 cubed (whose FLOPs are its own).

A call has the root mean square of what its result is off, relative to the result's, against float64 on sampled rows,
of the values before quantizing; above LARGEST_RMSE it gets no time. Products have codes as inputs, so their errors are
those of sums, but where B is quantized in the call.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bsr
import fp8_page
import fp8_peers
import harness
import torch
from fp8_peers import Makers, Result, relative
from fp8_products import product_error, product_makers
from fp8_rows import (
    ATTENTION,
    BSA,
    CHOSEN,
    CUBE,
    DATA,
    FLASHINFER,
    FP16,
    HEADS,
    PRODUCTS,
    QUANTIZING,
    RMSE,
    ROWS,
    SDPA,
    SDPA_BF16,
    SDPA_BSHD,
    AttentionRow,
    ProductRow,
    Row,
)
from harness import Fields, check_calls, reason
from records import BACK_TO_BACK, OURS, SINGLE

from codegen.library import find_spec
from runtime import (
    QuantizedAttention,
    block_sparse_attention,
    block_sparse_attention_fp8,
    load_kernel,
    quantize_attention,
)
from runtime.patterns import Causal, Dense, Pattern, TopK
from runtime.tools.bench.data_sets import make_data
from runtime.tools.bench.timing import Call

PACKAGES = ("torch", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "flashinfer-python")
LARGEST_RMSE = 0.25  # relative: what is beyond computes something else
CHECKED = 32  # queries of each of three heads
REPEATS, REPEATS_OF_DATA = 21, 7
ROUNDS, ROUNDS_OF_DATA = 3, 1


def inputs(row: AttentionRow, data: str, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """q, k and v of a data set, bf16, with fixed values."""
    shape = (row.batch, HEADS, row.length, row.head_dim)
    q, k, v = (torch.empty(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    make_data(data, q, k, v, torch.Generator(device).manual_seed(0))
    return q, k, v


def lists_of(row: AttentionRow, device: str = "cuda") -> torch.Tensor | None:
    """The listed blocks of each block of queries, random and in order; None: the row has no lists."""
    if row.blocks is None:
        return None
    count, draw = row.length // row.block, torch.Generator(device).manual_seed(0)
    weights = torch.rand((row.batch, HEADS, count, count), generator=draw, device=device)
    return weights.topk(row.blocks, -1).indices.sort(-1).values.int().contiguous()


def pattern_of(row: AttentionRow, lists: torch.Tensor | None) -> Pattern:
    if lists is not None:
        return TopK(lists, block=(row.block, row.block))
    return Causal() if row.causal else Dense()


def kernel_of(row: AttentionRow) -> Any:
    """Our FP8 kernel."""
    fields = json.loads(find_spec(row.spec).spec.canonical_json())
    if row.blocks is not None:
        fields["pattern"]["k"] = row.blocks
    return load_kernel(fields)


def attend(kernel: Any, given: QuantizedAttention, lists: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Call a kernel of FP8."""
    scales = {name: getattr(given, name) for name in ("q_scale", "k_scale", "v_scale")}
    indices = () if lists is None else (lists,)
    kernel(given.q, given.k, given.v_t, *indices, **scales, out=out)
    return out


def attention_makers(row: AttentionRow, tensors: Sequence[torch.Tensor], lists: torch.Tensor | None) -> Makers:
    """A function that makes the calls of a row, by label."""
    q, k, v = tensors
    pattern = pattern_of(row, lists)
    # No more keys share a scale than are in a listed block.
    quantize = functools.partial(quantize_attention, q, k, v, q_rows=row.block, k_rows=row.block)

    def prepared() -> Result:
        kernel, given, out = kernel_of(row), quantize(), torch.empty_like(q)
        return Result(lambda: attend(kernel, given, lists, out))

    def quantizing() -> Result:
        kernel, out = kernel_of(row), torch.empty_like(q)
        return Result(lambda: attend(kernel, quantize(), lists, out))

    def chosen() -> Result:
        return Result(functools.partial(block_sparse_attention_fp8, quantize(), pattern, out=torch.empty_like(q)))

    def fp16() -> Result:
        halves = [x.half() for x in tensors]
        return Result(functools.partial(block_sparse_attention, *halves, pattern, out=torch.empty_like(halves[0])))

    makers: Makers = {OURS: prepared, QUANTIZING: quantizing, CHOSEN: chosen, FP16: fp16}
    if lists is not None:
        return {**makers, BSA: lambda: fp8_peers.cudnn_bsa(q, k, v, lists, row.block)}
    sdpa = functools.partial(fp8_peers.cudnn_sdpa, q, k, v, causal=row.causal)
    return {
        **makers,
        SDPA: sdpa,
        SDPA_BSHD: functools.partial(sdpa, heads_inside=True),
        SDPA_BF16: functools.partial(sdpa, output=torch.bfloat16),
        FLASHINFER: functools.partial(fp8_peers.flashinfer, q, k, v, causal=row.causal),
    }


def attention_error(
    row: AttentionRow, tensors: Sequence[torch.Tensor], lists: torch.Tensor | None
) -> Callable[[torch.Tensor], float]:
    """A function that returns the error of a result on CHECKED queries of the first, a middle and the last head."""
    picked = torch.linspace(0, row.length - 1, CHECKED, device=tensors[0].device).long()
    places = torch.arange(row.length, device=picked.device)
    heads = [(0, 0), (0, HEADS // 2), (row.batch - 1, HEADS - 1)]
    exact = []
    for b, h in heads:
        q, k, v = (x[b, h].double() for x in tensors)
        logits = q[picked] @ k.T * row.head_dim**-0.5
        if row.causal:
            logits = logits.masked_fill(places > picked[:, None], -torch.inf)
        if lists is not None:
            seen = torch.zeros((CHECKED, row.length // row.block), dtype=torch.bool, device=picked.device)
            seen.scatter_(1, lists[b, h, picked // row.block].long(), True)
            logits = logits.masked_fill(~seen.repeat_interleave(row.block, 1), -torch.inf)
        exact.append(logits.softmax(-1) @ v)
    expected = torch.stack(exact)

    def error(out: torch.Tensor) -> float:
        if out.shape != tensors[0].shape:
            raise ValueError(f"the result has shape {tuple(out.shape)}, expected {tuple(tensors[0].shape)}")
        return relative(torch.stack([out[b, h, picked] for b, h in heads]), expected)

    return error


def check_and_time(
    makers: Makers, error_of: Callable[[str, torch.Tensor], float], work: float, repeats: int, rounds: int
) -> tuple[dict[str, Fields], dict[str, str]]:
    """Make, check and time calls.

    Args:
        makers: of each label's call.
        error_of: takes a label and the numbers of a result; returns its relative error.
        work: FLOPs.
        repeats: single calls of each.
        rounds: blocks of calls back to back.

    Returns:
        Results by label, and why others have none.
    """
    made: dict[str, Result] = {}
    failed: dict[str, str] = {}
    for label, make in makers.items():
        try:
            made[label] = make()
        except Exception as failure:
            failed[label] = reason(failure)
    calls: dict[str, Call] = {label: result.call for label, result in made.items()}

    def error(label: str, out: torch.Tensor) -> float:
        return error_of(label, made[label].numbers(out))

    errors, wrong = check_calls(calls, error, LARGEST_RMSE, "the result's root mean square")
    times = harness.time_calls({label: calls[label] for label in errors}, work, repeats, rounds)
    results = {label: {**time, RMSE: float(f"{errors[label]:.3e}")} for label, time in times.items()}
    return results, failed | wrong


def kept(makers: Makers, without: Sequence[str]) -> Makers:
    return {label: make for label, make in makers.items() if label not in without}


def of_attention(row: AttentionRow, data: Sequence[str], without: Sequence[str]) -> Fields:
    """Run a row of attention on data sets; the first one is timed in more calls."""
    found: dict[str, dict[str, Fields]] = {}
    failed: dict[str, str] = {}
    lists = lists_of(row)
    for name in data:
        tensors = inputs(row, name)
        exact = attention_error(row, tensors, lists)
        makers = kept(attention_makers(row, tensors, lists), without)
        often = (REPEATS, ROUNDS) if not found else (REPEATS_OF_DATA, ROUNDS_OF_DATA)
        found[name], wrong = check_and_time(makers, lambda _, out, exact=exact: exact(out), row.work, *often)  # type: ignore[misc]
        failed |= {f"{label} on {name}": why for label, why in wrong.items()}
        del tensors, makers
        harness.free_memory()
    return {"results": found[data[0]], "failed": failed, "data": found}


def of_product(row: ProductRow, without: Sequence[str]) -> Fields:
    """Run a product, whose codes are normal."""
    problem = bsr.make_problem(next(written for written in bsr.FP8_ROWS if written.name == row.written))
    makers = kept(product_makers(row, problem), without)
    work = bsr.flops(problem)
    results, failed = check_and_time(makers, functools.partial(product_error, problem), work, REPEATS, ROUNDS)
    whole = 2.0 * problem.dense[0].numel() * problem.dense[1].shape[1]
    for label, result in results.items():
        if label.startswith(CUBE):
            result |= {figure: round(result[figure] * whole / work, 1) for figure in (SINGLE, BACK_TO_BACK)}
    return {"results": results, "failed": failed, "data": {}}


@torch.no_grad()
def record_of(row: Row, data: Sequence[str], without: Sequence[str]) -> Fields:
    """Run one row; its record has its targets."""
    begin = {"name": row.name, "targets": [dataclasses.asdict(target) for target in row.targets]}
    if isinstance(row, ProductRow):
        return {**begin, "kind": "product", **of_product(row, without)}
    sizes = {name: getattr(row, name) for name in ("spec", "batch", "length", "head_dim", "causal", "blocks", "block")}
    kind = "lists" if row.blocks else "attention"
    return {**begin, "kind": kind, "heads": HEADS, **sizes, **of_attention(row, data, without)}


def measure(options: argparse.Namespace) -> Fields:
    """Run the rows that the options ask for."""
    chosen = [row for row in ROWS if not options.row or row.name in options.row]
    record = functools.partial(record_of, data=harness.chosen_data(options, DATA), without=options.without)
    return harness.measure_rows(options, chosen, record, PACKAGES)


def show(report: Mapping[str, Any]) -> None:
    """Print the tables of docs/notebook/fp8.md, and below them what failed."""
    for part in fp8_page.parts(report):
        harness.show_cells({**report, "rows": [], "not_run": []}, part.headings, part.cells)
    harness.show_cells(dict(report), fp8_page.TARGET_HEADINGS, fp8_page.target_cells(report))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = harness.report_parser(__doc__)
    known, labels = [row.name for row in ROWS], dict.fromkeys([*ATTENTION, *PRODUCTS])
    parser.add_argument("--row", action="append", default=[], choices=known, metavar="NAME", help=", ".join(known))
    told = f"leave a call out, of {', '.join(labels)}"
    parser.add_argument("--without", action="append", default=[], choices=[*labels], metavar="CALL", help=told)
    parser.add_argument("--data", nargs="+", choices=DATA, default=[*DATA], help="of attention; by default both")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    report = harness.report_of(parse_arguments(arguments), measure)
    show(report)
    harness.check_own(report, OURS)


if __name__ == "__main__":
    main()
