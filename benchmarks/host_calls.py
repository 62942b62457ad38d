"""Counts and times what a call costs the host up to the driver, which takes launches and runs none: needs no GPU.

    python benchmarks/host_calls.py --json benchmarks/results/host_calls.json
    python benchmarks/host_calls.py --profile "bsr_matmul"     # where the time of a row goes, by function
    python benchmarks/results_table.py                         # writes the table into docs/notebook/measuring.md

Each call follows earlier ones with arguments like its own. A row has the function beside a kernel object of the same
operator; a backward pass, called by ``torch.autograd.grad``, beside one of each product. Calls of Python functions do
not depend on the load of the machine; times are the least of many, in microseconds. benchmarks/host.py measures with a
GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import platform
import pstats
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import host_page
import torch
from pretended import kernel_object, pretended

from codegen.json_rows import json_rows
from runtime import (
    KeyLists,
    block_sparse_attention,
    block_sparse_attention_fp8,
    bsr_matmul,
    bsr_sddmm,
    paged_attention,
    patterns,
    prepare_bsr,
)
from runtime.nn import BlockSparseLinear
from runtime.ops import attention_fp8
from runtime.ops.quantized_operands import quantized_operands

Call = Callable[[], Any]
SIZE, BLOCK, STORED, COLUMNS = 1024, 64, 5, 128  # of sparse matrices; blocks of a block row; columns of B
REPEATS, CALLS = 60, 100


@dataclass(frozen=True)
class Timed:
    """A call.

    Attributes:
        name: of the row.
        call: makes it.
        object: the call of a kernel object of the same operator.
    """

    name: str
    call: Call
    object: Call


def sparse() -> torch.Tensor:
    """A BSR matrix with as many blocks in each block row, at random places."""
    rows = SIZE // BLOCK
    col = torch.stack([torch.randperm(rows)[:STORED].sort().values for _ in range(rows)]).flatten().int()
    crow = torch.arange(0, rows + 1, dtype=torch.int32) * STORED
    values = torch.zeros(col.numel(), BLOCK, BLOCK).half()
    return torch.sparse_bsr_tensor(crow, col, values, size=(SIZE, SIZE), check_invariants=False)


def without_gradients(call: Call) -> Call:
    """The same call under ``torch.no_grad``."""

    def run() -> None:
        with torch.no_grad():
            call()

    return run


def again(result: torch.Tensor, *inputs: torch.Tensor) -> Call:
    """The backward pass of a result that is kept; here it runs in the calling thread, on a GPU in one of autograd's."""
    grad = torch.zeros_like(result)
    return lambda: torch.autograd.grad(result, inputs, grad, retain_graph=True)


def products() -> list[Timed]:
    """Calls of products with a block-sparse matrix, and of layers."""
    a = sparse()
    prepared = prepare_bsr(a)
    b, c, bias = torch.zeros(SIZE, COLUMNS).half(), torch.zeros(SIZE, COLUMNS).half(), torch.zeros(SIZE).half()
    spmm, sddmm = kernel_object("h100_bsr_spmm_b64_few_columns"), kernel_object("h100_bsr_sddmm_b64")
    own = spmm.prepare(a, COLUMNS)
    x, left, right = torch.zeros(COLUMNS, SIZE).half(), torch.zeros(SIZE, 256).half(), torch.zeros(SIZE, 256).half()
    layer, of_own = BlockSparseLinear(a, bias), lambda: spmm(own, b)
    values, b_leaf, x_leaf = (t.detach().clone().requires_grad_() for t in (prepared.values, b, x))
    weight = prepared.with_values(values)
    of_both = lambda: (sddmm(left, right, a), spmm(own, b))  # noqa: E731
    plain = BlockSparseLinear(a)  # torch's sum for the gradient of a bias would take most of the time here
    of_layer = again(plain(x_leaf), x_leaf, plain.values)
    return [
        Timed("bsr_matmul, BsrMatrix", lambda: bsr_matmul(prepared, b), of_own),
        Timed("bsr_matmul, of a kernel's prepare", lambda: bsr_matmul(own, b), of_own),
        Timed("bsr_matmul, torch.sparse_bsr", lambda: bsr_matmul(a, b), lambda: spmm(a, b)),
        Timed("bsr_matmul, transpose_a", lambda: bsr_matmul(prepared, b, transpose_a=True), of_own),
        Timed("bsr_matmul, bias and relu", lambda: bsr_matmul(prepared, b, bias=bias, activation="relu"), of_own),
        Timed("bsr_matmul, c and beta", lambda: bsr_matmul(prepared, b, c=c, beta=0.5), of_own),
        Timed("bsr_sddmm, BsrMatrix", lambda: bsr_sddmm(left, right, prepared), lambda: sddmm(left, right, a)),
        Timed("bsr_sddmm, torch.sparse_bsr", lambda: bsr_sddmm(left, right, a), lambda: sddmm(left, right, a)),
        Timed(
            "BlockSparseLinear, no_grad",
            without_gradients(lambda: layer(x)),
            of_own,
        ),
        Timed("BlockSparseLinear, with gradients", lambda: layer(x), of_own),
        Timed("bsr_matmul, with gradients", lambda: bsr_matmul(weight, b_leaf), of_own),
        Timed("bsr_matmul, gradients", again(bsr_matmul(weight, b_leaf), values, b_leaf), of_both),
        Timed("BlockSparseLinear, gradients", of_layer, of_both),
    ]


def attention() -> list[Timed]:
    """Calls of attention, with options, expressions and operands in FP8."""
    q, k, v = (torch.zeros(1, 8, SIZE, 128).half() for _ in range(3))
    out, sink, lists = torch.empty_like(q), torch.zeros(8), torch.zeros(1, 8, 8, 4, dtype=torch.int32)
    causal, topk = patterns.Causal(), patterns.TopK(lists)
    kernel = kernel_object("h100_causal")
    score = patterns.Score("score + 0.5 * (q_idx - kv_idx)")
    slopes = patterns.Score("score + slope[head]", aux={"slope": torch.zeros(8)})
    codes = [torch.zeros(1, 8, SIZE, 128).to(torch.float8_e4m3fn) for _ in range(3)]
    one, keys, values = torch.zeros(4, 8, 1, 128).half(), *(torch.zeros(4, 2, SIZE, 128).half() for _ in "kv")
    decode = kernel_object("h100_paged_d128")
    of_pages = lambda: decode(one[:, :, 0], keys.transpose(1, 2), values.transpose(1, 2))  # noqa: E731
    given = quantized_operands(*codes, q_scale=1.0, k_scale=1.0, v_scale=1.0)
    scales = {"q_scale": given.q_scale, "k_scale": given.k_scale, "v_scale": given.v_scale}
    block_sparse_attention_fp8(given, causal)
    fp8 = attention_fp8._routes.last[1].kernel
    plain, into = lambda: kernel(q, k, v, return_lse=False), lambda: kernel(q, k, v, out=out, return_lse=False)
    of_fp8 = lambda: fp8(given.q, given.k, given.v_t, **scales, return_lse=False)  # noqa: E731
    calls: list[tuple[str, Call, Call]] = [
        ("", lambda: block_sparse_attention(q, k, v, causal), plain),
        (", lists", lambda: block_sparse_attention(q, k, v, topk), plain),
        (", out", lambda: block_sparse_attention(q, k, v, causal, out=out), into),
        (", sink and lse", lambda: block_sparse_attention(q, k, v, causal, sink=sink, return_lse=True), plain),
        (", a score", lambda: block_sparse_attention(q, k, v, causal, score=score), plain),
        (", a score that reads a tensor", lambda: block_sparse_attention(q, k, v, causal, score=slopes), plain),
        (", few queries", lambda: block_sparse_attention(one, keys, values, causal), of_pages),
        (", operands in FP8", lambda: block_sparse_attention_fp8(given, causal), of_fp8),
    ]
    calls.append((", gradients", *gradients()))
    return [Timed(f"block_sparse_attention{name}", call, own) for name, call, own in calls]


def gradients() -> tuple[Call, Call]:
    """A backward pass by torch.autograd, and the call of its kernel."""
    q, k, v = (torch.zeros(1, 8, SIZE, 128).half().requires_grad_() for _ in range(3))
    out = block_sparse_attention(q, k, v, patterns.Causal())
    rows: dict[str, Any] = {"out": torch.empty_like(q), "dout": torch.empty_like(q), "lse": torch.zeros(1, 8, SIZE)}
    kernel, dout, leaves = kernel_object("h100_causal_dq_dkdv"), rows["dout"].detach(), (q, k, v)
    rows = {name: tensor.detach() for name, tensor in rows.items()}
    given = [tensor.detach() for tensor in leaves]
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), lambda: kernel(*given, **rows)


def pages() -> list[Timed]:
    """Calls of attention over pages: decoding, with everything from the caller, and with lists."""
    q, cache = torch.zeros(4, 8, 128).half(), torch.zeros(64, 2, 16, 2, 128).half()
    k, v = cache.unbind(1)
    options: dict[str, Any] = {"block_table": torch.zeros(4, 8, dtype=torch.int32)}
    options["seq_lens"] = torch.full((4,), 100, dtype=torch.int32)
    kernel = kernel_object("h100_paged_d128")
    own = {"out": torch.empty_like(q)}
    own["workspace"] = torch.zeros(1 << 24, dtype=torch.uint8)
    lists, causal = KeyLists(torch.zeros(2, 4, 8, dtype=torch.int32), keys=16), patterns.Causal()
    plain, into = lambda: kernel(q, k, v, **options), lambda: kernel(q, k, v, **options, **own)
    return [
        Timed("paged_attention", lambda: paged_attention(q, k, v, causal, **options), plain),
        Timed("paged_attention, out and workspace", lambda: paged_attention(q, k, v, causal, **options, **own), into),
        Timed("paged_attention, lists", lambda: paged_attention(q, k, v, lists, **options), plain),
    ]


def python_calls(call: Call) -> int:
    """Calls of Python functions in a call made before, without those of the pretended driver: the least of three.

    A result at another address than the last one takes two more, which put its tensor map into the parameters.
    """
    for _ in range(3):
        call()
    return min(_counted(call) for _ in range(3))


def _counted(call: Call) -> int:
    """Calls of Python functions in one call."""
    driver = kernel_object.__code__.co_filename
    found = [0]

    def note(frame: Any, event: str, argument: Any) -> None:
        found[0] += event == "call" and frame.f_code.co_filename != driver

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found[0] - 1  # its own


def microseconds(call: Call) -> float:
    """The least mean time of CALLS calls."""
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - began)
    return round(1e6 * best / CALLS, 2)


def measured(row: Timed) -> dict[str, Any]:
    """Counts and times of a row."""
    calls = {"function": row.call, "object": row.object}
    timed = {key: {"python_calls": python_calls(call), "us": microseconds(call)} for key, call in calls.items()}
    return {"name": row.name, **timed}


def profiled(call: Call, times: int = 3000) -> None:
    """Print where the time of a call goes, by function."""
    for _ in range(3):
        call()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(times):
        call()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def parse(arguments: list[str] | None = None) -> Any:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="rows whose names contain this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    parser.add_argument("--profile", metavar="TEXT", help="profile the rows whose names contain this instead")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
    torch.manual_seed(0)
    with pretended():
        rows = [row for row in (*products(), *attention(), *pages()) if (options.profile or options.rows) in row.name]
        if options.profile:
            for row in rows:
                print(row.name)
                profiled(row.call)
            return
        report: dict[str, Any] = {"rows": [measured(row) for row in rows]}
    report["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    report |= {"processor": host_page.processor(), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    if options.json:
        options.json.write_text(json_rows(report), encoding="utf-8")
    print(host_page.calls_table(report))


if __name__ == "__main__":
    main()
