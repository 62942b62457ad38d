"""Times masks of bits beside the built-in masks on the same lists, and beside FlexAttention, in one run.

    python benchmarks/bit_masks.py --json benchmarks/results/bit_masks_h100.json
    python benchmarks/bit_masks.py --from benchmarks/results/bit_masks_h100.json     # no GPU: prints an earlier run

A row has one BlockMask, in lists of full and partial blocks that all heads share, and four calls:

- bits: which pairs of the partial blocks are visible, bit by bit. What is computed is the row's mask.
- causal: `mask: causal` on the same lists, which is the row's mask only where that is causal.
- none: `mask: none` on the same lists, so that partial blocks are not masked: what the lists alone cost.
- FlexAttention: compiled, with the row's mask as mask_mod, and its block size that of the lists.

Bits and FlexAttention are checked against float64 on ROWS queries before they are timed; so is causal where it computes
the same. Documents are of uneven length: a query sees the keys of its own one up to its position.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import torch
from harness import Fields, check_calls, time_calls
from torch.nn.attention.flex_attention import BlockMask

from codegen.library import find_spec
from runtime import load_kernel
from runtime.prepare.mask_bits import pack_mask_bits
from runtime.tools.bench.measurement import flex_call
from runtime.tools.bench.timing import Call

PACKAGES = ("torch",)
BITS, CAUSAL, NONE, FLEX = "bits", "causal", "none", "FlexAttention"
KERNELS = {BITS: "h100_lists128_bits", CAUSAL: "h100_block_lists"}
BLOCK, HEADS, HEAD_DIM = 128, 16, 128
ROWS = 16  # queries whose results are checked
REPEATS = 21
SHORTEST = 40  # keys of a document
Lists = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Sees = Callable[[Any, Any, Any, Any], Any]  # mask_mod: batch, head, query, key


@dataclass(frozen=True)
class Row:
    """One workload.

    Attributes:
        length: queries and keys of a head.
        documents: documents in it; one is a causal mask.
    """

    length: int
    documents: int

    @property
    def name(self) -> str:
        mask = "causal" if self.documents == 1 else f"{self.documents} documents"
        return f"B1 H{HEADS} S{self.length} d{HEAD_DIM}, {mask}"


CASES = tuple(Row(length, documents) for length in (8192, 32768) for documents in (1, length // 1024))


def document_of(row: Row, device: str) -> torch.Tensor:
    """The number of the document of each position: uneven ones, the same in every run."""
    source = torch.Generator().manual_seed(row.length + row.documents)
    free = row.length - SHORTEST * row.documents
    inner = (torch.rand(row.documents - 1, generator=source) * free).sort().values.long()
    ends = inner + SHORTEST * torch.arange(1, row.documents)
    return torch.bucketize(torch.arange(row.length), ends, right=True).to(device)


def mask_mod(row: Row, device: str) -> Sees:
    """The key that a query sees."""
    document = document_of(row, device)

    def sees(b: Any, h: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (document[query] == document[key])

    return sees


def lists_of(sees: Sees, length: int, device: str) -> Lists:
    """The lists of partial and of full blocks of a mask, and the bits of the partial ones.

    As kernels take them, int32: kv_num_blocks (1, 1, rows), kv_indices (1, 1, rows, longest), the same of full blocks,
    mask_bits (1, 1, rows, longest, words).
    """
    rows = length // BLOCK
    key = torch.arange(length, device=device)
    partial: list[torch.Tensor] = []
    full: list[torch.Tensor] = []
    bits: list[torch.Tensor] = []
    for row in range(rows):
        seen = sees(0, 0, key[row * BLOCK : (row + 1) * BLOCK, None], key[None, :])
        blocks = seen.view(BLOCK, rows, BLOCK).transpose(0, 1)
        some, every = blocks.flatten(1).any(1), blocks.flatten(1).all(1)
        partial.append((some & ~every).nonzero()[:, 0].int())
        full.append(every.nonzero()[:, 0].int())
        bits.append(pack_mask_bits(blocks[partial[-1].long()][None, None, None])[0, 0, 0])
    return *padded(partial), *padded(full), padded(bits)[1]


def padded(each: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of entries per row, and the rows in one tensor, with two leading dimensions of 1."""
    counts = torch.tensor([len(entries) for entries in each], dtype=torch.int32, device=each[0].device)
    lists = torch.nn.utils.rnn.pad_sequence(list(each), batch_first=True)
    return counts[None, None].contiguous(), lists[None, None].contiguous()


def error_of(row: Row, sees: Sees, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[str, Any], float]:
    """A function that returns the error of a result, relative to the largest element; 0 for another mask."""
    picked = torch.linspace(0, row.length - 1, ROWS, device=q.device).long()
    hidden = ~sees(0, 0, picked[:, None], torch.arange(row.length, device=q.device)[None, :])
    scores = (q[0, -1, picked].double() @ k[0, -1].double().T) * HEAD_DIM**-0.5
    exact = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[0, -1].double()
    own = {BITS, FLEX} | ({CAUSAL} if row.documents == 1 else set())

    def error(label: str, out: torch.Tensor) -> float:
        if label not in own:
            return 0.0
        return float((out[0, -1, picked].double() - exact).abs().max() / exact.abs().max())

    return error


def calls_of(sees: Sees, lists: Lists, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    """The calls of a row by label."""
    spec = find_spec(KERNELS[CAUSAL]).spec
    unmasked = spec.model_copy(update={"pattern": spec.pattern.model_copy(update={"mask": "none"})})  # type: ignore[union-attr]
    kernels = {BITS: load_kernel(KERNELS[BITS]), CAUSAL: load_kernel(KERNELS[CAUSAL]), NONE: load_kernel(unmasked)}

    def ours(label: str) -> Call:
        kernel, out = kernels[label], torch.empty_like(q)
        tensors = lists if label == BITS else lists[:4]
        return lambda: kernel(q, k, v, *tensors, out=out).out

    counts, partial, full_counts, full = (tensor.contiguous() for tensor in lists[:4])
    columns = q.shape[2] // BLOCK
    wide = [torch.nn.functional.pad(each, (0, columns - each.shape[3])).contiguous() for each in (partial, full)]
    mask = BlockMask.from_kv_blocks(
        *(counts, wide[0], full_counts, wide[1]),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=sees,
        seq_lengths=(q.shape[2], q.shape[2]),
    )
    return {**{label: ours(label) for label in kernels}, FLEX: flex_call(q, k, v, mask)}


@torch.no_grad()
def record_of(row: Row) -> Fields:
    """Run one row."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, row.length, HEAD_DIM, device="cuda").half() for _ in range(3))
    sees = mask_mod(row, "cuda")
    lists = lists_of(sees, row.length, "cuda")
    calls = calls_of(sees, lists, q, k, v)
    errors, failed = check_calls(calls, error_of(row, sees, q, k, v))
    partial, full = int(lists[0].sum()), int(lists[2].sum())
    work = 4.0 * HEAD_DIM * HEADS * BLOCK * BLOCK * (partial + full)
    results = time_calls({label: calls[label] for label in errors}, work, REPEATS)
    return {"name": row.name, "partial": partial, "full": full, "results": results, "failed": failed}


def table_rows(report: Fields) -> list[list[str]]:
    """The cells of the table: microseconds of both ways, and how much longer than with no mask."""
    found = []
    for record in report["rows"]:
        bare = record["results"].get(NONE)
        for label, result in record["results"].items():
            single, long = (1e3 * result[key] for key in ("milliseconds", "back_to_back_milliseconds"))
            over = f"{result['milliseconds'] / bare['milliseconds']:.3f}" if bare else "-"
            over_long = f"{long / (1e3 * bare['back_to_back_milliseconds']):.3f}" if bare else "-"
            blocks = f"{record['partial']} partial, {record['full']} full"
            found.append([record["name"], blocks, label, f"{single:.1f} / {long:.1f}", f"{over} / {over_long}"])
    return found


def show(report: Fields) -> None:
    """Print the table, and below it what failed."""
    headings = ("workload", "blocks of a head", "mask", "us, single / back to back", "over none")
    harness.show_cells(report, headings, table_rows(report))


def measure(options: argparse.Namespace) -> Fields:
    """Run all rows."""
    return harness.measure_rows(options, CASES, record_of, PACKAGES)


def main(arguments: list[str] | None = None) -> None:
    report = harness.report_of(harness.report_parser(__doc__).parse_args(arguments), measure)
    show(report)
    harness.check_own(report, BITS)


if __name__ == "__main__":
    main()
