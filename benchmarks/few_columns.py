"""Times BSR x dense with few columns of B, as in decoding with sparse weights.

    python benchmarks/few_columns.py --json benchmarks/results/few_columns_h200.json
    python benchmarks/few_columns.py --from benchmarks/results/few_columns_h200.json    # no GPU: prints an earlier run
    python benchmarks/few_columns.py --kernels h100_bsr_spmm_b16_n16 h100_bsr_spmm_b16_n32    # not the chosen ones
    python benchmarks/results_table.py                                                  # writes its table into docs/

Such a product takes as long as its stored blocks take to be read. Times are of calls in a CUDA graph, in microseconds:

- cold: each call has operands of its own, which together fill ROTATED bytes, so that none is in the L2.
- warm: all calls have the same operands.

Their target is LAUNCH_US + stored bytes / (a share of the copy bandwidth that the same run measured). Block
rows are even or their lengths follow a power law. Beside ours stand cuBLAS on the dense matrix and Triton's kernel, the
fastest of a list of options. Results are compared with the product in fp32 before they are timed.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bsr
import few_columns_page as page
import torch
from few_columns_page import COLD, WARM
from harness import TOLERANCE, Fields, environment, free_memory, reason
from records import OURS, failures

from codegen.json_rows import json_rows
from codegen.library import NamedSpec, find_spec
from codegen.select import choose, parse_problem
from codegen.spec import BsrSpmmSpec
from runtime import load_kernel
from runtime.kernels.bsr_arguments import STORE
from runtime.tools.bench.timing import Call, captured, median
from runtime.verify.rows import kernel_fields

PACKAGES = ("torch", "triton")
ROTATED = 2**28  # bytes: several times the L2
MOST_COPIES = 40  # of the operands, in one graph
WARM_CALLS = 20
REPLAYS = 7
LAUNCH_US = 4.0
SHARES = {16: 0.55}  # of the copy bandwidth, by rows of a block
SHARE = 0.85
COLUMNS = (1, 2, 4, 16, 64)
CUBLAS, TRITON = "cuBLAS, dense", "Triton bsr_dense_addmm"
TRITON_OPTIONS = ((4, 3), (4, 4), (2, 4), (8, 3), (4, 2))  # warps and stages


@dataclass(frozen=True)
class Layer:
    """A matrix: M x K, blocks of ``block`` x ``block``; ``density`` of them are stored."""

    m: int
    k: int
    block: int
    density: float
    power_law: bool = False

    @property
    def name(self) -> str:
        """How the table calls it."""
        kind = ", power law" if self.power_law else ""
        return f"{self.m} x {self.k}, blocks of {self.block}, {self.density:.0%}{kind}"

    @property
    def row_blocks(self) -> int:
        """Stored blocks of a block row, on average."""
        return max(1, round(self.k // self.block * self.density))

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored blocks, in 16 bits."""
        return self.m // self.block * self.row_blocks * self.block**2 * 2


LAYERS = (
    *(Layer(14336, 4096, block, 0.3) for block in (128, 64, 32, 16)),
    *(Layer(14336, 4096, block, 0.1) for block in (32, 16)),
    *(Layer(4096, 4096, block, 0.3) for block in (128, 64, 32, 16)),
    *(Layer(4096, 4096, block, 0.1) for block in (32, 16)),
    *(Layer(4096, 14336, block, 0.3) for block in (128, 64, 32, 16)),
    *(Layer(14336, 4096, block, 0.3, power_law=True) for block in (64, 16)),
)


def graph_microseconds(calls: Sequence[Call]) -> float:
    """Time per call in a CUDA graph of all calls, the median of REPLAYS."""
    replay = captured(calls)
    replay()
    times = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return median(times)


def copy_bandwidth() -> float:
    """Bytes read and written by a copy of ROTATED bytes, each microsecond."""
    source = torch.empty(ROTATED, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(source)
    return 2 * ROTATED / graph_microseconds([lambda: to.copy_(source)] * 4)


class Operands:
    """Operands of a layer, copied as often as it takes to fill ROTATED bytes."""

    def __init__(self, layer: Layer, columns: int) -> None:
        torch.manual_seed(0)
        row = bsr.Row(
            "",
            *(bsr.SPMM, layer.block, columns, ()),
            row_blocks=layer.row_blocks,
            pattern="power_law" if layer.power_law else "random",
        )
        crow, col = bsr.draw_pattern(row, layer.m // layer.block, layer.k // layer.block, "cuda")
        copies = min(MOST_COPIES, max(2, -(-ROTATED // layer.stored_bytes)))
        self.a = [self._matrix(layer, crow.clone(), col.clone()) for _ in range(copies)]
        self.b = [self._dense(layer.k, columns) for _ in range(copies)]
        self.out = [self._dense(layer.m, columns) for _ in range(copies)]
        self.exact = self.a[0].to_dense().float() @ self.b[0].float()

    @staticmethod
    def _dense(rows: int, columns: int) -> torch.Tensor:
        # A row of one column has room for eight: kernels and TMA want rows of 16 bytes.
        whole = torch.randn((rows, -(-columns // 8) * 8), device="cuda").half()
        return whole[:, :columns]

    @staticmethod
    def _matrix(layer: Layer, crow: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
        values = torch.randn((col.numel(), layer.block, layer.block), device="cuda").half()
        return torch.sparse_bsr_tensor(crow.int(), col.int(), values, size=(layer.m, layer.k), check_invariants=False)

    def ours(self, named: NamedSpec) -> list[Call]:
        """Calls of one of our kernels."""
        kernel: Any = load_kernel(named)
        if getattr(named.spec, "b_layout", "") == "strided":  # as a linear layer passes x^T
            columns = [b.mT.contiguous().mT for b in self.b]
            return [lambda a=a, b=b: kernel(a, b) for a, b in zip(self.a, columns, strict=True)]  # type: ignore[misc]
        if self.out[0].shape[1] % STORE:  # C is stored in whole chunks: a call makes one with room for them
            return [lambda a=a, b=b: kernel(a, b) for a, b in zip(self.a, self.b, strict=True)]  # type: ignore[misc]
        return [
            lambda a=a, b=b, out=out: kernel(a, b, out=out)  # type: ignore[misc]
            for a, b, out in zip(self.a, self.b, self.out, strict=True)
        ]

    def cublas(self) -> list[Call]:
        """Calls of the dense product, with A without zeros."""
        count = max(2, ROTATED // (2 * self.exact.shape[0] * self.b[0].shape[0]))
        dense = [self._dense(self.exact.shape[0], self.b[0].shape[0]) for _ in range(count)]
        return [lambda a=a, b=b: torch.mm(a, b) for a, b in zip(dense, itertools.cycle(self.b))]  # type: ignore[misc]

    def triton(self) -> list[Call]:
        """Calls of Triton's kernel with the fastest of TRITON_OPTIONS, in one column tile."""
        from torch.sparse._triton_ops import bsr_dense_addmm

        zeros = torch.zeros_like(self.out[0])

        def calls(options: Fields) -> list[Call]:
            return [
                lambda a=a, b=b, out=out: bsr_dense_addmm(zeros, a, b, beta=0, alpha=1, out=out, meta=options)  # type: ignore[misc]
                for a, b, out in zip(self.a, self.b, self.out, strict=True)
            ]

        found: dict[float, list[Call]] = {}
        for warps, stages in TRITON_OPTIONS:
            made = calls({"SPLIT_N": 1, "GROUP_SIZE_ROW": 4, "num_stages": stages, "num_warps": warps})
            try:
                found[graph_microseconds(made[:4])] = made
            except Exception:  # too much shared memory, for one
                continue
        if not found:
            raise ValueError("ran with none of the options")
        return found[min(found)]


def chosen(layer: Layer, columns: int) -> NamedSpec:
    """The kernel that codegen.select takes."""
    block = {"rows": layer.block, "cols": layer.block}
    pattern = "power_law" if layer.power_law else "random"
    sizes = bsr.problem_sizes(bsr.SPMM, block, layer.m, columns, layer.row_blocks, pattern, layer.k)
    return choose(parse_problem({"op": bsr.SPMM, "arch": "sm_90a", "dtype": "fp16", "block": block, **sizes})).named


def times_of(operands: Operands, calls: list[Call], compare: bool) -> Fields:
    """Check a result, then time the calls cold and warm."""
    if compare:
        operands.out[0].fill_(float("nan"))
        found = calls[0]()
        error = float((found.float() - operands.exact).abs().max() / operands.exact.abs().max())
        if not error <= TOLERANCE:
            raise ValueError(f"wrong result: off by {error:.1e} of the largest element")
    cold, warm = graph_microseconds(calls), graph_microseconds([calls[0]] * WARM_CALLS)
    return {COLD: round(cold, 2), WARM: round(warm, 2)}


def measure_row(layer: Layer, columns: int, kernels: Sequence[NamedSpec], alone: bool) -> Fields:
    """Time a layer with so many columns."""
    operands = Operands(layer, columns)
    labels = [OURS] if len(kernels) == 1 else [named.stem for named in kernels]
    makers: dict[str, Callable[[], list[Call]]] = {
        label: partial(operands.ours, named) for label, named in zip(labels, kernels, strict=True)
    }
    if not alone:
        makers |= {CUBLAS: operands.cublas, TRITON: operands.triton}
    results: Fields = {}
    failed: dict[str, str] = {}
    for label, make in makers.items():
        try:
            results[label] = times_of(operands, make(), compare=label != CUBLAS)
        except Exception as error:
            failed[label] = reason(error)
    return {
        **{"layer": layer.name, "columns": columns, "stored_bytes": layer.stored_bytes},
        **{"share": SHARES.get(layer.block, SHARE), "kernel": kernels[0].stem if len(kernels) == 1 else None},
        **{"spec": kernel_fields(kernels[0]) if len(kernels) == 1 else None},
        **{"results": results, "failed": failed},
    }


def kernels_for(layer: Layer, columns: int, stems: Sequence[str]) -> list[NamedSpec]:
    """The named kernels whose blocks are the layer's; without names the chosen one."""
    if not stems:
        return [chosen(layer, columns)]
    found = [find_spec(stem) for stem in stems]
    return [named for named in found if isinstance(named.spec, BsrSpmmSpec) and named.spec.block.rows == layer.block]


@torch.no_grad()
def measure(options: argparse.Namespace) -> Fields:
    """Run all rows; the JSON is written after each, so that a crash costs no finished one."""
    report = environment(PACKAGES)
    report |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "launch_us": LAUNCH_US}
    report |= {"copy_bytes_per_us": round(copy_bandwidth()), "rows": []}
    for layer, columns in itertools.product(LAYERS, options.columns):
        kernels = kernels_for(layer, columns, options.kernels)
        if not kernels:
            continue
        report["rows"].append(measure_row(layer, columns, kernels, options.alone))
        if options.json:
            options.json.write_text(json_rows(report), encoding="utf-8")
        free_memory()
    return report


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", nargs="+", type=int, default=COLUMNS, metavar="N", help="columns of B")
    parser.add_argument("--kernels", nargs="+", default=(), metavar="NAME", help="shipped kernels, not the chosen ones")
    parser.add_argument("--alone", action="store_true", help="without cuBLAS and Triton")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every median")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="show an earlier run's JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.earlier:
        print(page.table(json.loads(options.earlier.read_text(encoding="utf-8"))))
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; --from FILE shows an earlier run")
    report = measure(options)
    print(page.table(report))
    for (label, why), names in failures(report | {"rows": named_rows(report)}).items():
        print(f"{'; '.join(names)}: {label} has no time: {why}")


def named_rows(report: Fields) -> list[Fields]:
    """The rows with names, as messages have them."""
    return [record | {"name": f"{record['layer']}, N {record['columns']}"} for record in report["rows"]]


if __name__ == "__main__":
    main()
