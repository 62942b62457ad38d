"""Times block lists that are made on the GPU from a mask, beside FlexAttention's create_block_mask, compiled.

    python benchmarks/block_mask.py --json benchmarks/results/block_mask_h100.json
    python benchmarks/block_mask.py --from benchmarks/results/block_mask_h100.json     # no GPU: prints an earlier run

Blocks of 128 x 128, one batch and head, as the masks ask for neither. Three calls a row:

- create_block_mask: of this package, with the mask as text, as a user calls it.
- in a graph: the same, captured: the GPU's time alone.
- FlexAttention: torch.compile(create_block_mask) of the same mask as mask_mod.

Before they are timed, the blocks of the lists are compared: FlexAttention's are partial and full where ours are. Masks
that FlexAttention has too little memory for are listed below the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness
import torch
from harness import Fields, free_memory, reason
from torch.nn.attention import flex_attention as flex

from runtime import create_block_mask
from runtime.patterns import BlockLists
from runtime.tools.bench.timing import Call, back_to_back, captured, single_calls

PACKAGES = ("torch",)
OURS, GRAPH, FLEX = "create_block_mask", "in a graph", "FlexAttention"
BLOCK = 128
LENGTHS = (32768, 131072)
DOCUMENTS = 8
WIDTH = 256  # of the image
REACH = 6  # neighbors to either side
WINDOW = 4096
PREFIX = 3000
REPEATS = 21
Sees = Callable[[Any, Any, Any, Any], Any]  # mask_mod: batch, head, query, key


@dataclass(frozen=True)
class Mask:
    """A mask, twice.

    Attributes:
        text: the expression.
        sees: the same as a function, given a length and the documents.
    """

    text: str
    sees: Callable[[int, torch.Tensor], Sees]


def documents_of(length: int, device: str) -> torch.Tensor:
    """The number of the document of each position: uneven ones, the same in every run."""
    source = torch.Generator().manual_seed(length)
    ends = (torch.rand(DOCUMENTS - 1, generator=source) * length).sort().values
    return torch.bucketize(torch.arange(length), ends, right=True, out_int32=True).to(device)


def _causal_documents(length: int, doc: torch.Tensor) -> Sees:
    return lambda b, h, q, k: (doc[q] == doc[k]) & (q >= k)


def _windows(length: int, doc: torch.Tensor) -> Sees:
    return lambda b, h, q, k: (doc[q] == doc[k]) & (q >= k) & (q - k < WINDOW)


def _prefix(length: int, doc: torch.Tensor) -> Sees:
    return lambda b, h, q, k: (q >= k) | (k < PREFIX)


def _natten(length: int, doc: torch.Tensor) -> Sees:
    height = length // WIDTH

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        row, column = (q // WIDTH).clamp(REACH, height - 1 - REACH), (q % WIDTH).clamp(REACH, WIDTH - 1 - REACH)
        return ((row - k // WIDTH).abs() <= REACH) & ((column - k % WIDTH).abs() <= REACH)

    return sees


_SAME = "doc[q_idx] == doc[kv_idx] and q_idx >= kv_idx"
_ROW = f"abs(min(max(q_idx // {WIDTH}, {REACH}), q_len // {WIDTH} - {1 + REACH}) - kv_idx // {WIDTH}) <= {REACH}"
_COLUMN = f"abs(min(max(q_idx % {WIDTH}, {REACH}), {WIDTH - 1 - REACH}) - kv_idx % {WIDTH}) <= {REACH}"
MASKS = {
    "causal documents": Mask(_SAME, _causal_documents),
    f"windows of {WINDOW} in documents": Mask(f"{_SAME} and q_idx - kv_idx < {WINDOW}", _windows),
    f"prefix of {PREFIX}, causal": Mask(f"q_idx >= kv_idx or kv_idx < {PREFIX}", _prefix),
    f"natten, {WIDTH} wide, {2 * REACH + 1} x {2 * REACH + 1}": Mask(f"{_ROW} and {_COLUMN}", _natten),
}


@dataclass(frozen=True)
class Row:
    """One workload: a mask and the queries, and keys, of a head."""

    mask: str
    length: int

    @property
    def name(self) -> str:
        return f"S{self.length}, {self.mask}"


CASES = tuple(Row(mask, length) for length in LENGTHS for mask in MASKS)


def ours(row: Row, device: str) -> Callable[[], BlockLists]:
    """A function that makes this package's lists."""
    mask = MASKS[row.mask]
    aux = {"doc": documents_of(row.length, device)} if "doc" in mask.text else None
    return lambda: create_block_mask(
        mask.text, 1, 1, row.length, row.length, BLOCK_SIZE=(BLOCK, BLOCK), aux=aux, device=device
    )


def flex_mask(row: Row, device: str) -> Callable[[], flex.BlockMask]:
    """A function that makes FlexAttention's lists."""
    sees = MASKS[row.mask].sees(row.length, documents_of(row.length, device))
    make = torch.compile(flex.create_block_mask)
    return lambda: make(sees, None, None, row.length, row.length, device=device, BLOCK_SIZE=BLOCK)


def differences(found: BlockLists, mask: flex.BlockMask) -> int:
    """Number of blocks that only one side lists, or that are partial on one side and full on the other."""
    assert found.full_kv_num_blocks is not None and found.full_kv_indices is not None
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    pairs = (
        (found.kv_num_blocks, found.kv_indices, mask.kv_num_blocks, mask.kv_indices),
        (found.full_kv_num_blocks, found.full_kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    return sum(int((marked(*each[:2]) != marked(*each[2:])).sum()) for each in pairs)


def marked(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Mask of the listed blocks."""
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < counts[..., None]
    place = torch.where(listed, indices, columns).long()
    blocks = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    return blocks.scatter(-1, place, True)[..., :columns]


def times(calls: dict[str, Call]) -> dict[str, Fields]:
    """The milliseconds of calls, single and back to back."""
    single, long = single_calls(calls, REPEATS), back_to_back(calls)
    return {label: {"milliseconds": single[label], "back_to_back_milliseconds": long[label]} for label in calls}


@torch.no_grad()
def record_of(row: Row) -> Fields:
    """Run one row."""
    make = ours(row, "cuda")
    lists = make()
    calls: dict[str, Call] = {OURS: make, GRAPH: captured([make])}
    failed: dict[str, str] = {}
    try:
        peer = flex_mask(row, "cuda")
        if wrong := differences(lists, peer()):
            failed[FLEX] = f"{wrong} blocks differ"
        else:
            calls[FLEX] = peer
    except Exception as error:
        failed[FLEX] = reason(error)
    free_memory()
    assert lists.full_kv_num_blocks is not None
    partial, full = int(lists.kv_num_blocks.sum()), int(lists.full_kv_num_blocks.sum())
    return {"name": row.name, "partial": partial, "full": full, "results": times(calls), "failed": failed}


def table_rows(report: Fields) -> list[list[str]]:
    """The cells of the table: microseconds of both ways."""
    found = []
    for record in report["rows"]:
        blocks = f"{record['partial']} partial, {record['full']} full"
        for label, result in record["results"].items():
            single, long = (1e3 * result[key] for key in ("milliseconds", "back_to_back_milliseconds"))
            found.append([record["name"], blocks, label, f"{single:.1f} / {long:.1f}"])
    return found


def show(report: Fields) -> None:
    """Print the table, and below it what failed."""
    harness.show_cells(report, ("workload", "blocks", "by", "us, single / back to back"), table_rows(report))


def measure(options: argparse.Namespace) -> Fields:
    """Run all rows."""
    return harness.measure_rows(options, CASES, record_of, PACKAGES)


def main(arguments: list[str] | None = None) -> None:
    report = harness.report_of(harness.report_parser(__doc__).parse_args(arguments), measure)
    show(report)


if __name__ == "__main__":
    main()
