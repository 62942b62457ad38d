"""Times masks and scores that are expressions beside what is built in, FlexAttention and FlashAttention 4, in one run.

    python benchmarks/expressions.py --data std1 std4 std9 key_norms sink --json expressions_h100.json
    python benchmarks/expressions.py --from benchmarks/results/expressions_h100.json     # no GPU: prints an earlier run

Every call of a row computes the same function of the same tensors (benchmarks/expression_rows.py):

- expression: block_sparse_attention with the functions that FlexAttention takes; masks on lists of 128 x 128 blocks.
- built in: a pattern, or an option, of the same meaning, if one exists.
- FlexAttention: compiled, with the same functions and blocks, and the best of a short list of options.
- FA4: FlashAttention 4 with functions of its own language, on the same lists; causal where it is its option.

All are checked against float64 on CHECKED queries before they are timed. TFLOPS are of the blocks that are listed, or
of the pairs that a causal pattern or none leaves. They are of plain normal data (std1). On other data sets that --data
names (runtime/tools/bench/data_sets.py) the expression is checked and timed beside FlexAttention and FA4 alone, in
fewer calls: the table has the least of all ratios.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import expressions_page
import harness
import torch
from expression_peers import fa4
from expression_rows import BLOCK, HEAD_DIM, HEADS, Row, rows
from expressions_page import BUILT_IN, FA4, FLEX, OURS
from harness import Fields, check_calls, reason, time_calls
from records import PLAIN
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from runtime import block_sparse_attention
from runtime.patterns import BlockLists, Causal, Dense, Score
from runtime.tools.bench.data_sets import DATA, make_data
from runtime.tools.bench.measurement import flex_call
from runtime.tools.bench.timing import Call, single_calls

PACKAGES = ("torch", "flash-attn-4")
CHECKED = 16  # queries of a head
REPEATS = 21
REPEATS_OF_DATA, ROUNDS_OF_DATA = 7, 1
FLEX_OPTIONS: tuple[dict[str, int] | None, ...] = (
    None,
    *(
        {"BLOCK_M": 128, "BLOCK_N": columns, "num_warps": warps, "num_stages": stages}
        for columns, warps, stages in ((64, 4, 3), (64, 8, 3))
    ),
)


@dataclass(frozen=True)
class Inputs:
    """q, k and v of a row.

    Attributes:
        own: (batch, heads, length, head_dim).
        transposed: copies of them, (batch, length, heads, head_dim), for FlashAttention 4.
    """

    own: list[torch.Tensor]
    transposed: list[torch.Tensor]

    @classmethod
    def of(cls, row: Row, device: str) -> Inputs:
        """Uninitialized tensors."""
        shape = (row.batch, HEADS, row.length, HEAD_DIM)
        own = [torch.empty(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
        return cls(own, [tensor.transpose(1, 2).contiguous() for tensor in own])

    def fill(self, data: str) -> None:
        """Fill them with a data set, the same values each time."""
        q, k, v = self.own
        make_data(data, q, k, v, torch.Generator(q.device).manual_seed(0))
        for copy, tensor in zip(self.transposed, self.own, strict=True):
            copy.copy_(tensor.transpose(1, 2))


def block_mask_of(row: Row) -> BlockMask | None:
    """FlexAttention's lists of the row's mask; None without a mask."""
    if row.sees is None:
        return None
    made: BlockMask = create_block_mask(row.sees, None, None, row.length, row.length, "cuda", BLOCK, _compile=True)
    return made


def lists_of(mask: BlockMask) -> tuple[torch.Tensor, ...]:
    """Counts and entries of its partial and full blocks."""
    return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices


def ours(row: Row, tensors: list[torch.Tensor], mask: BlockMask | None) -> Call:
    """The call with the row's functions. A mask that is causal and a score keep the built-in mask."""
    pattern: Any = Dense() if row.sees is None else Causal()
    if row.score is None:
        assert mask is not None
        pattern = BlockLists(*lists_of(mask), block=(BLOCK, BLOCK), mask=row.sees)
    options = {} if row.score is None else {"score": Score(row.score)}
    return functools.partial(block_sparse_attention, *tensors, pattern, out=torch.empty_like(tensors[0]), **options)


def built_in(row: Row, tensors: list[torch.Tensor]) -> Call:
    """The call of what means the same."""
    assert row.built_in is not None
    pattern, options = row.built_in
    return functools.partial(block_sparse_attention, *tensors, pattern, out=torch.empty_like(tensors[0]), **options)


def flex_best(row: Row, tensors: list[torch.Tensor], mask: BlockMask | None) -> Call:
    """FlexAttention with the fastest options in three calls."""
    if mask is None:
        mask = create_block_mask(lambda b, h, q, k: q >= 0, None, None, row.length, row.length, "cuda", BLOCK)
    calls, refused = {}, None
    for options in FLEX_OPTIONS:
        call = flex_call(*tensors, mask, options, score_mod=row.score)
        try:
            call()
            calls[str(options)] = call
        except Exception as error:  # too much shared memory, for one
            refused = error
    if not calls:
        assert refused is not None
        raise refused
    times = single_calls(calls, repeats=3, warm_up=1)
    return calls[min(times, key=lambda label: times[label])]


def calls_of(row: Row, inputs: Inputs, without: Sequence[str]) -> tuple[dict[str, Call], dict[str, str], float]:
    """The calls of a row by label, why others are not there, and its work in FLOPs."""
    mask, tensors = block_mask_of(row), inputs.own
    makers: dict[str, Callable[[], Call]] = {
        OURS: lambda: ours(row, tensors, mask),
        FLEX: lambda: flex_best(row, tensors, mask),
        FA4: lambda: fa4(row, inputs.transposed, None if mask is None else lists_of(mask)),
    }
    if row.built_in:
        makers[BUILT_IN] = lambda: built_in(row, tensors)
    calls, failed = {}, {}
    for label, make in makers.items():
        if label in without:
            continue
        try:
            calls[label] = make()
        except Exception as error:
            failed[label] = reason(error)
    pairs = float(row.length) ** 2
    if mask is not None:
        pairs = float(BLOCK**2 * int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()))
    return calls, failed, 4.0 * row.batch * HEADS * HEAD_DIM * pairs


def error_of(row: Row, tensors: list[torch.Tensor]) -> Callable[[str, Any], float]:
    """A function that returns the error of a result on some queries of one head, relative to the largest element."""
    q, k, v = (t[-1, -1].double() for t in tensors)
    picked = torch.linspace(0, row.length - 1, CHECKED, device=q.device).long()
    b, h = (torch.tensor(size - 1, device=q.device) for size in (row.batch, HEADS))
    places = b, h, picked[:, None], torch.arange(row.length, device=q.device)[None, :]
    scores = q[picked] @ k.T * HEAD_DIM**-0.5
    scores = row.score(scores, *places) if row.score else scores
    hidden = ~row.sees(*places) if row.sees else torch.zeros_like(scores, dtype=torch.bool)
    exact = scores.double().masked_fill(hidden, -torch.inf).softmax(-1) @ v

    def error(label: str, out: torch.Tensor) -> float:
        return float((out[-1, -1, picked].double() - exact).abs().max() / exact.abs().max())

    return error


@torch.no_grad()
def record_of(row: Row, data: Sequence[str], without: Sequence[str]) -> Fields:
    """Run one row."""
    inputs = Inputs.of(row, "cuda")
    inputs.fill(PLAIN)
    calls, failed, work = calls_of(row, inputs, without)
    errors, wrong = check_calls(calls, error_of(row, inputs.own))
    results = time_calls({label: calls[label] for label in errors}, work, REPEATS)
    record: Fields = {"name": row.name, "results": results, "failed": failed | wrong, "data": {}}
    compared = {label: calls[label] for label in results if label != BUILT_IN}
    for name in data:
        if name != PLAIN:
            inputs.fill(name)
            errors, wrong = check_calls(compared, error_of(row, inputs.own))
            right = {label: compared[label] for label in errors}
            record["data"][name] = time_calls(right, work, REPEATS_OF_DATA, ROUNDS_OF_DATA)
            record["failed"] |= {f"{label} on {name}": why for label, why in wrong.items()}
    return record


def measure(options: argparse.Namespace) -> Fields:
    """Run the rows that the options ask for."""
    chosen = [row for row in rows("cuda") if not options.row or row.name in options.row]
    record = functools.partial(record_of, data=harness.chosen_data(options, DATA), without=options.without)
    return harness.measure_rows(options, chosen, record, PACKAGES)


def show(report: Fields) -> None:
    """Print the table of docs/reference/expressions.md, and below it what failed."""
    headings, lines = expressions_page.headings_and_cells(report)
    harness.show_cells(report, headings, lines, f"; bf16, d {HEAD_DIM}; TFLOPS")


def main(arguments: list[str] | None = None) -> None:
    parser = harness.report_parser(__doc__)
    parser.add_argument("--row", action="append", default=[], metavar="NAME", help="measure this one; may be repeated")
    parser.add_argument("--without", action="append", default=[], choices=(FLEX, FA4), help="leave this one out")
    harness.add_data_option(parser, DATA)
    options = parser.parse_args(arguments)
    known = [row.name for row in rows("cpu")]
    if unknown := [name for name in options.row if name not in known]:
        raise SystemExit(f"error: --row: {unknown[0]!r}; rows: {', '.join(known)}")
    report = harness.report_of(options, measure)
    show(report)
    harness.check_own(report, OURS)


if __name__ == "__main__":
    main()
