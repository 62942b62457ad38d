"""Times the attention kernels beside their peers, in one run on the same inputs.

    python benchmarks/attention.py --json attention.json         # every row
    python benchmarks/attention.py --rows topk32 --peers fa4     # one row, one peer
    python benchmarks/attention.py --groups k length --budget 120    # two sweeps; no row is begun after 120 seconds
    python benchmarks/attention.py --from attention.json --plot attention   # no GPU: print and draw an earlier run

    python benchmarks/attention.py --rows topk32 --data std1 heads  # two of runtime/tools/bench/data_sets.py

Groups: "main"; "data", the rows that benchmarks/data.py runs on every data set; "ordered", lists of 64 x 64 blocks with
query blocks in the given order and in one found beforehand; "bf16", some main rows in that type; "k" and "length",
sweeps of the lists' length and of the sequence's; "short" sequences; "overlap", lists whose neighbors have entries
in common, by a kernel that loads those once and by one that does not; "ada", the kernels for sm_89, which a newer GPU
runs through PTX.

Before a call is timed, a part of its result is compared with exact (float64) attention over the same pairs; a call that
fails or computes something else gets no time, and the report has the reason. docs/notebook/measuring.md says how
numbers are taken.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import harness
import torch
from attention_peers import PEERS, Problem
from harness import (
    OURS,
    OWN_STYLE,
    Fields,
    can_plot,
    check_and_time,
    check_own,
    free_memory,
    of_group,
    plot_rows,
    report_of,
    save,
    show,
)
from records import PLAIN

from codegen.library import find_spec
from codegen.parse import parse_spec
from codegen.patterns.block_lists import BlockLists
from codegen.select import choose
from codegen.spec import AttentionSpec
from runtime import load_kernel
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.tools.bench import data_sets
from runtime.tools.bench.data_sets import make_data
from runtime.tools.bench.measurement import LIST_LENGTH, pairs_of_head, pattern_lists, pattern_values, random_lists
from runtime.tools.bench.timing import Call
from runtime.verify.rows import kernel_fields

PACKAGES = (
    *("torch", "triton", "flash-attn-4", "fa3-fwd", "flashinfer-python"),
    *("nvidia-cudnn-frontend", "nvidia-cutlass-dsl"),
)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what --rows takes.
        written: what the row writes of its kernel's spec; codegen.select chooses the rest.
        heads: query heads, and
        length: queries and keys of each.
        peers: names of PEERS that can compute it.
        target: effective TFLOPS on an H200 that the project set out to reach, if it did.
        groups: what --groups takes.
        batch: batch size.
        kv_heads: K/V heads; as many as query heads by default.
        quick: whether --quick takes it.
        data: a data set of runtime.tools.bench.data_sets; names of rows with another than PLAIN end in it.
        overlap: the share of its entries that a list has in common with the one before, in each NEIGHBORS lists; None
            if each list is drawn on its own.
    """

    name: str
    written: Fields
    heads: int
    length: int
    peers: tuple[str, ...]
    target: float | None = None
    groups: tuple[str, ...] = ("main",)
    batch: int = 1
    kv_heads: int | None = None
    quick: bool = False
    data: str = PLAIN
    overlap: float | None = None

    @cached_property
    def fields(self) -> Fields:
        """Fields of the kernel's spec, as chosen."""
        sizes = problem_sizes(self.written["pattern"], self.batch, self.heads, self.kv_heads, self.length, self.overlap)
        chosen: Fields = json.loads(choose(self.written, sizes).spec.canonical_json())
        return chosen


def problem_sizes(
    pattern: Fields, batch: int, heads: int, kv_heads: int | None, length: int, overlap: float | None
) -> Fields:
    """The sizes of a row's problem, as codegen.select has them."""
    sizes: Fields = {"batch": batch, "heads": heads, "kv_heads": kv_heads or heads, "q_len": length, "kv_len": length}
    if "block" in pattern:
        sizes["overlap"] = overlap or 0.0
        if pattern.get("k") is None:
            sizes["list_length"] = LIST_LENGTH
    return sizes


def fields(head_dim: int, pattern: Fields, **more: Any) -> Fields:
    """Fields of a row's spec; ``more`` are fields that its kernel must have, even if others are faster."""
    return {"op": "attention", "arch": "sm_90a", "head_dim": head_dim, "pattern": pattern, **more}


def topk(head_dim: int, k: int, q: int, kv: int, **more: Any) -> Fields:
    """Spec fields of a row of a list kernel."""
    return fields(head_dim, {"kind": "topk", "k": k, "block": {"q": q, "kv": kv}}, **more)


DENSE: Fields = {"kind": "dense"}
CAUSAL: Fields = {"kind": "causal"}
WINDOW = fields(128, {"kind": "sliding_window", "left": 2047, "right": 0})
SELF_ORDERED = {"share_kv_loads": True, "query_grouping": "search"}
SHARED = topk(128, 32, 64, 64, share_kv_loads=True, query_grouping="none")
NEIGHBORS = 6  # lists that have entries in common: two or three tiles of a kernel with share_kv_loads
FLEX = ("flex", "flex_tuned")
FLASHINFER = ("flashinfer", "flashinfer_cake")
LIST_PEERS = (*FLEX, "fa4", "cudnn_bsa", *FLASHINFER)
DENSE_PEERS = ("sdpa", "fa4", "fa3")

DATA = ("main", "data")  # groups of main rows that benchmarks/data.py runs on every data set

MAIN_ROWS = (
    Row("topk16", topk(128, 16, 128, 128), 16, 32768, LIST_PEERS, 690, groups=("main", "k")),
    Row("topk32", topk(128, 32, 128, 128), 16, 32768, LIST_PEERS, 720, groups=(*DATA, "k"), quick=True),
    Row("topk64", topk(128, 64, 128, 128), 16, 32768, LIST_PEERS, 720, groups=("main", "k")),
    Row("topk32_128k", topk(128, 32, 128, 128), 8, 131072, LIST_PEERS, 690, groups=("main", "length")),
    Row("topk64_8k", topk(128, 64, 128, 128), 8, 8192, LIST_PEERS, 730),
    Row("topk32_d64", topk(64, 32, 128, 128), 8, 32768, LIST_PEERS, 520, quick=True),
    Row("topk32_d64_128k", topk(64, 32, 128, 128), 8, 131072, LIST_PEERS, 490),
    Row("topk16_b64", topk(128, 16, 64, 64, **SELF_ORDERED), 16, 32768, LIST_PEERS, 580),
    Row("topk32_b64", topk(128, 32, 64, 64, **SELF_ORDERED), 16, 32768, LIST_PEERS, 620, groups=DATA, quick=True),
    Row("topk64_b64", topk(128, 64, 64, 64, **SELF_ORDERED), 16, 32768, LIST_PEERS, 640),
    Row("topk32_b64_128k", SHARED, 8, 131072, LIST_PEERS, 560),
    Row("topk64_b128x64", topk(128, 64, 128, 64), 16, 32768, (*FLEX, "fa4", *FLASHINFER), 690, groups=DATA),
    Row("topk32_d64_b64", topk(64, 32, 64, 64), 8, 32768, LIST_PEERS, 440, groups=DATA),
    Row("gqa_topk32_b64", topk(128, 32, 64, 64, pack_gqa=8), 64, 32768, LIST_PEERS, 650, groups=DATA, kv_heads=8),
    Row("window2k", WINDOW, 8, 32768, (*FLEX, "fa4"), 650, quick=True),
    Row("window2k_128k", WINDOW, 8, 131072, (*FLEX, "fa4"), 660),
    Row("dense", fields(128, DENSE), 16, 16384, DENSE_PEERS, 690, batch=2),
    Row("causal", fields(128, CAUSAL), 16, 16384, DENSE_PEERS, 715, batch=2, quick=True),
    Row("dense_d64", fields(64, DENSE), 8, 16384, DENSE_PEERS, 540),
    Row("causal_d64", fields(64, CAUSAL), 8, 16384, DENSE_PEERS, 570),
)
LISTS: Fields = {"kind": "block_lists", "block": {"q": 128, "kv": 128}, "mask": "causal"}
# Beside the main rows of that group; in shapes that every peer has room and time for.
DATA_ROWS = (
    *(
        Row(name, fields(head_dim, {"kind": kind}), 16, 8192, DENSE_PEERS, groups=("data",), batch=2)
        for name, head_dim, kind in (
            *(("dense_8k", 128, "dense"), ("causal_8k", 128, "causal")),
            *(("dense_8k_d64", 64, "dense"), ("causal_8k_d64", 64, "causal")),
        )
    ),
    Row("window2k_h16", WINDOW, 16, 32768, (*FLEX, "fa4", "fa3"), groups=("data",)),
    Row("block_lists", fields(128, LISTS), 16, 32768, FLEX, groups=("data",)),
)
K_ROWS = tuple(Row(f"topk{k}", topk(128, k, 128, 128), 16, 32768, LIST_PEERS, groups=("k",)) for k in (8, 128))
LENGTH_ROWS = tuple(
    Row(f"topk32_{length}", topk(128, 32, 128, 128), 8, length, LIST_PEERS, groups=("length",))
    for length in (4096, 8192, 16384, 32768, 65536)
)
SHORT_ROWS = tuple(
    Row(
        f"{kind}_h{heads}_s{length}_d{head_dim}",
        fields(head_dim, {"kind": kind}),
        heads,
        length,
        ("sdpa", *FLEX, "fa4", "fa3"),
        groups=("short",),
    )
    for head_dim in (128, 64)
    for length in (1024, 4096)
    for heads in (8, 16)
    for kind in ("dense", "causal")
) + tuple(
    Row(f"topk8_h{heads}_s4096_d{head_dim}", topk(head_dim, 8, 128, 128), heads, 4096, LIST_PEERS, groups=("short",))
    for head_dim in (128, 64)
    for heads in (8, 16)
)

# The same lists with query blocks as they come, where the row above searches; and where lists are used again and again,
# in an order that is found once, before.
ORDERED_ROWS = tuple(
    replace(
        row,
        name=f"{row.name}_{name}",
        written={**row.written, "share_kv_loads": True, "query_grouping": "none", **more},
        target=None,
        groups=("ordered",),
        quick=False,
    )
    for name, more in (("as_they_come", {}), ("ordered", {"query_grouping": "given"}))
    for row in MAIN_ROWS
    if row.written.get("query_grouping") == "search" or (row.name == "topk32_b64_128k" and more)
)
OVERLAP_ROWS = tuple(
    Row(name, SHARED, 16, 32768, ("not_shared", *LIST_PEERS), groups=("overlap",), overlap=overlap)
    for name, overlap in (("overlap_all", 1.0), ("overlap_three_quarters", 0.75), ("overlap_by_chance", None))
)


def ada(head_dim: int, pattern: Fields, tile: tuple[int, int], stages: int, warp_rows: int = 32) -> Fields:
    """The spec of a kernel for sm_89 with a tile that ladder-attention.md found best on an H200."""
    how = {"tile": {"m": tile[0], "n": tile[1]}, "stages": stages, "warp_rows": warp_rows}
    return {**fields(head_dim, pattern, **how), "arch": "sm_89"}


def wmma(head_dim: int, pattern: Fields) -> Fields:
    """The spec of a kernel for sm_89 by WMMA, with the tile of the shipped ones."""
    return {**ada(head_dim, pattern, (64, 32), 4, 16), "mma": "wmma"}


def listed(size: int) -> Fields:
    return {"kind": "topk", "k": 32, "block": {"q": size, "kv": size}}


ADA_PEERS = ("sdpa", "flex", "flashinfer")
# On a GPU newer than Ada they run through PTX: right there, but no speed of an Ada GPU.
ADA_ROWS = (
    Row("ada_dense", ada(128, DENSE, (128, 64), 2), 16, 4096, ADA_PEERS, 375, groups=("ada",), batch=4),
    Row("ada_causal", ada(128, CAUSAL, (128, 48), 4), 16, 4096, ADA_PEERS, 320, groups=("ada",), batch=4),
    Row("ada_dense_d64", ada(64, DENSE, (128, 80), 4), 8, 16384, ADA_PEERS, 330, groups=("ada",)),
    Row("ada_causal_d64", ada(64, CAUSAL, (128, 64), 4), 8, 16384, ADA_PEERS, 280, groups=("ada",)),
    Row("ada_topk32", ada(128, listed(128), (128, 64), 2), 16, 32768, ADA_PEERS, 370, groups=("ada",)),
    Row("ada_topk32_b64", ada(128, listed(64), (64, 64), 2), 16, 32768, ADA_PEERS, 330, groups=("ada",)),
    Row("ada_topk32_b32", ada(128, listed(32), (32, 32), 3, 16), 16, 32768, ADA_PEERS, 190, groups=("ada",)),
    Row("ada_topk32_d64_b64", ada(64, listed(64), (64, 64), 6), 8, 32768, ADA_PEERS, 290, groups=("ada",)),
    Row(
        "ada_gqa_topk32_b64",
        {**ada(128, listed(64), (128, 32), 2), "pack_gqa": 8},
        64,
        32768,
        ADA_PEERS,
        groups=("ada",),
        kv_heads=8,
    ),
    # By WMMA, whose scores pass through shared memory: docs/notebook/ada.md says what differs.
    Row("ada_dense_wmma", wmma(128, DENSE), 16, 4096, ADA_PEERS, groups=("ada",), batch=4),
    Row("ada_topk32_b64_wmma", wmma(128, listed(64)), 16, 32768, ADA_PEERS, groups=("ada",)),
)


def in_bf16(row: Row) -> Row:
    """A row with the kernel of that type."""
    return replace(row, written={**row.written, "dtype": "bf16"})


BF16_ROWS = tuple(
    replace(in_bf16(row), name=f"{row.name}_bf16", target=None, groups=("bf16",), quick=False)
    for row in MAIN_ROWS
    if row.name in ("topk32", "topk32_d64", "topk32_b64", "window2k", "dense", "causal")
)
ROWS = MAIN_ROWS + DATA_ROWS + ORDERED_ROWS + BF16_ROWS + K_ROWS + LENGTH_ROWS + SHORT_ROWS + OVERLAP_ROWS + ADA_ROWS
SWEEPS = {"k": "blocks in each list", "length": "queries and keys"}
GROUPS = ("main", "data", "ordered", "bf16", *SWEEPS, "short", "overlap", "ada")


def make_problem(row: Row, spec: AttentionSpec) -> Problem:
    """Draw inputs of the row's data set and random lists, ascending as cuDNN's splits need them, one a K/V head.

    Our kernel gets a list for each head, or for each pack of heads where its spec packs the heads of a group.
    """
    torch.manual_seed(0)
    kv_heads = row.kv_heads or row.heads
    q, k, v = (
        torch.empty((row.batch, heads, row.length, spec.head_dim), device="cuda", dtype=TORCH_DTYPES[spec.dtype])
        for heads in (row.heads, kv_heads, kv_heads)
    )
    make_data(row.data, q, k, v)
    lists = pattern_values(spec, row.batch, row.length)
    if isinstance(spec.pattern, BlockLists):
        lists = pattern_lists(spec, row.heads, row.length)
    elif spec.pattern.fixed_block is not None:
        drawn = drawn_lists(row, spec, kv_heads)
        rows_of_lists = row.heads // getattr(spec, "pack_gqa", 1)
        lists = (drawn.sort(-1).values.repeat_interleave(rows_of_lists // kv_heads, 1).contiguous(),)
    return Problem(spec, q, k, v, lists)


def drawn_lists(row: Row, spec: AttentionSpec, heads: int) -> torch.Tensor:
    """Draw lists of different blocks for each head; neighbors have some in common, if the row says so."""
    block, k = spec.pattern.fixed_block, spec.pattern.k
    rows, columns = row.length // block.q, row.length // block.kv
    if row.overlap is None:
        return random_lists(heads, rows, columns, k)
    step = k - round(row.overlap * k)
    groups = -(-rows // NEIGHBORS)
    return neighbors(random_lists(heads, groups, columns, k + (NEIGHBORS - 1) * step), k)[:, :, :rows]


def neighbors(drawn: torch.Tensor, k: int) -> torch.Tensor:
    """Make NEIGHBORS lists of each one, (1, heads, rows, length): k entries each, from its first ones to its last."""
    step = (drawn.shape[-1] - k) // (NEIGHBORS - 1)
    return torch.stack([drawn[..., i * step : i * step + k] for i in range(NEIGHBORS)], 3).flatten(2, 3)


def flops(row: Row, spec: AttentionSpec, lists: tuple[torch.Tensor, ...], device: str = "cuda") -> float:
    """Count what a row has to compute: two products over each visible pair."""
    return 4.0 * row.batch * row.heads * spec.head_dim * pairs_of_head(spec, row.length, lists, device)


def listed_keys(problem: Problem, head: int, query_block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of a query block's lists, and which of them stand in a full block, of the last batch entry."""
    block, own = problem.spec.pattern.fixed_block, head // (problem.q.shape[1] // problem.lists[0].shape[1])
    lists = [tensor[-1, own, query_block] for tensor in problem.lists]
    if isinstance(problem.spec.pattern, BlockLists):
        partial_count, partial, full_count, full = lists
        partial, full = partial[:partial_count], full[:full_count]
    else:
        partial, full = lists[0], lists[0][:0]
    blocks = torch.cat((partial, full)).long()
    keys = (blocks[:, None] * block.kv + torch.arange(block.kv, device=blocks.device)).flatten()
    return keys, torch.arange(len(keys), device=keys.device) >= len(partial) * block.kv


def exact(problem: Problem, head: int, rows: slice) -> torch.Tensor:
    """float64 attention of some query rows within one query block, of the last batch entry."""
    spec, length, device = problem.spec, problem.q.shape[2], problem.q.device
    block = spec.pattern.fixed_block
    keys = torch.arange(length, device=device)
    in_full = torch.zeros_like(keys, dtype=torch.bool)
    if block is not None:
        keys, in_full = listed_keys(problem, head, rows.start // block.q)
    kv_head = head // (problem.q.shape[1] // problem.k.shape[1])
    queries = torch.arange(rows.start, rows.stop, device=device)
    scores = problem.q[-1, head, rows].double() @ problem.k[-1, kv_head, keys].double().T * spec.head_dim**-0.5
    values = {name: tensor[-1] for name, tensor in spec.pattern.values_of(problem.lists).items()}
    hidden = ~(spec.pattern.visible(queries[:, None], keys[None], length, length, values) | in_full)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ problem.v[-1, kv_head, keys].double()


@dataclass(frozen=True)
class Part:
    """Rows of one head, of the last batch entry, and what attention gives for them in float64."""

    head: int
    rows: slice
    expected: torch.Tensor


def exact_parts(problem: Problem, heads: Sequence[int], parts: int = 3) -> list[Part]:
    """Return parts of these heads: the first and the last rows, and ``parts - 2`` evenly spread between.

    A part is 64 rows, or as many as a query block has if these are fewer.
    """
    length, block = problem.q.shape[2], problem.spec.pattern.fixed_block
    number = 64 if block is None else min(64, block.q)
    firsts = [i * length // (parts - 1) // number * number for i in range(parts - 1)]
    slices = [slice(first, first + number) for first in (*firsts, length - number)]
    return [Part(head, rows, exact(problem, head, rows)) for head in heads for rows in slices]


def errors_of(problem: Problem, parts: Sequence[Part], out: torch.Tensor) -> tuple[float, float]:
    """The worst error of a result: the absolute one, and that relative to the largest element of its part."""
    if out.shape != problem.q.shape:
        raise ValueError(f"the result has shape {tuple(out.shape)}, expected {tuple(problem.q.shape)}")
    absolute = torch.stack([(out[-1, part.head, part.rows].double() - part.expected).abs().max() for part in parts])
    largest = torch.stack([part.expected.abs().max() for part in parts])
    return float(absolute.max()), float((absolute / largest).max())  # NaN if there is one


def largest_error(problem: Problem, out: torch.Tensor) -> float:
    """The worst error of the last head's first, middle and last rows, relative to their largest element."""
    return errors_of(problem, exact_parts(problem, [problem.q.shape[1] - 1]), out)[1]


def ours(problem: Problem) -> dict[str, Call]:
    kernel = load_kernel(problem.spec, forward_compatible=problem.spec.arch == "sm_89")
    out = torch.empty_like(problem.q)
    lists = problem.lists
    if problem.spec.query_grouping == "given":  # once for many calls with the same lists
        lists = (kernel.prepare(*lists, problem.k.shape[2]),)

    def call() -> torch.Tensor:
        kernel(problem.q, problem.k, problem.v, *lists, out=out)
        return out

    return {OURS: call}


def run_row(row: Row, peers: list[str], quick: bool) -> Fields:
    """Check and time one row; return its record."""
    spec = parse_spec(row.fields)
    assert isinstance(spec, AttentionSpec)
    problem = make_problem(row, spec)
    work = flops(row, spec, problem.lists)
    makers = [ours, *(PEERS[peer].make for peer in row.peers if peer in peers)]
    outcome = check_and_time(makers, problem, lambda _, out: largest_error(problem, out), work, quick)
    return {
        **shape_fields(row),
        **kernel_fields(find_spec(spec), ran=OURS in outcome["results"]),
        "flops": work,
        "target_tflops": row.target,
        **outcome,
    }


def shape_fields(row: Row) -> Fields:
    """Description of a record's row."""
    return {
        "name": row.name,
        "groups": row.groups,
        "data": row.data,
        "batch": row.batch,
        "heads": row.heads,
        "kv_heads": row.kv_heads or row.heads,
        "length": row.length,
    }


def on_data(row: Row, data: str) -> Row:
    """A row with another data set; it is in no group, so that tables and plots have each row once."""
    return row if data == PLAIN else replace(row, name=f"{row.name}, {data}", groups=(), target=None, data=data)


def plot(report: Fields, path: Path) -> None:
    """Draw the main rows, and beside them (``_sweeps``) the sweeps; each as a PNG and an SVG."""
    if not can_plot():
        return
    if records := of_group(report, "main"):
        plot_rows(report, records, path, "Attention")
    if sweeps := {group: records for group in SWEEPS if len(records := of_group(report, group)) > 1}:
        plot_sweeps(report, sweeps, path.with_name(f"{path.stem}_sweeps"))


def sweep_lines(group: str, records: list[Fields]) -> dict[str, tuple[list[int], list[float]]]:
    """Return places and TFLOPS of each label of a sweep, in ascending order; ours first."""
    place = {"k": lambda record: record["spec"]["pattern"]["k"], "length": lambda record: record["length"]}[group]
    lines: dict[str, tuple[list[int], list[float]]] = {OURS: ([], [])}
    for record in sorted(records, key=place):
        for label, result in record["results"].items():
            places, tflops = lines.setdefault(label, ([], []))
            places.append(place(record))
            tflops.append(result["tflops"])
    return lines


def plot_sweeps(report: Fields, sweeps: dict[str, list[Fields]], path: Path) -> None:
    """Draw a line for ours and one for each peer, over what the sweep varies."""
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        ncols=len(sweeps), figsize=(5.5 * len(sweeps), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (group, records) in zip(all_axes[0], sweeps.items(), strict=True):
        for label, (places, tflops) in sweep_lines(group, records).items():
            own = label == OURS
            style = OWN_STYLE if own else {"linewidth": 1}
            axes.plot(places, tflops, marker="o", markersize=4, label="this project" if own else label, **style)
        places = sorted({place for line in sweep_lines(group, records).values() for place in line[0]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places])
        axes.set_xlabel(SWEEPS[group])
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    all_axes[0][0].set_ylabel("effective TFLOPS")
    figure.suptitle(f"Top-k attention on {report['device']}, driver {report['driver']}", fontsize=10)
    save(figure, path)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return harness.parse_arguments(__doc__, ROWS, GROUPS, PEERS, arguments, data=data_sets.DATA)


@torch.no_grad()
def measure(options: argparse.Namespace) -> Fields:
    """Run the chosen rows, each on the chosen data."""
    rows = [on_data(row, data) for row in harness.chosen_rows(options, ROWS) for data in options.data]
    return harness.measure(options, rows, PEERS, run_row, harness.environment(PACKAGES), free_memory)


def main() -> None:
    options = parse_arguments()
    report = report_of(options, measure)
    show(report)
    if options.plot:
        plot(report, options.plot)
    check_own(report)


if __name__ == "__main__":
    main()
