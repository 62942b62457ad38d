"""Block lists of a mask: case table, oracle, and the run of one case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from codegen.expressions.nodes import Node
from codegen.expressions.ranges import list_sizes
from codegen.spec import BlockMaskSpec
from runtime.expressions.draw import draw_aux
from runtime.expressions.evaluate import evaluate
from runtime.kernels.block_mask import BlockMaskKernel, BlockMaskLists
from runtime.verify.common import Outcome, Verification, generator, poisoned_memory


@dataclass(frozen=True)
class Case:
    """The lists of one problem.

    Attributes:
        name: unique; also the seed.
        batch: batches; heads: query heads.
        q_len: queries; kv_len: keys, of a head.
        ascending: tensors ascend along their last dimension, like document numbers, so that interval arithmetic
            classifies most blocks.
    """

    name: str
    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 2
    ascending: bool = True

    def describe(self) -> str:
        """Description of the parameters."""
        drawn = "ascending tensors" if self.ascending else "tensors in no order"
        return f"{self.batch} x {self.heads} heads, {self.q_len} x {self.kv_len}, {drawn}"


CASES = (
    Case("plain", 4096, 4096, batch=2),
    Case("no_order", 1024, 1024, batch=2, ascending=False),
    Case("odd_lengths", 1001, 777, batch=3),
    Case("few_queries", 1, 5000),
    Case("few_keys", 5000, 1),
    Case("one_pair", 1, 1),
    Case("block_ends", 129, 256, batch=2),
    Case("many_key_blocks", 300, 40000),
    Case("many_batches", 200, 300, batch=37, heads=3),
)


def seen_pairs(
    mask: Node, sizes: Mapping[str, int], aux: Mapping[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Visible pairs of a mask: bool (batch or 1, heads or 1, q_len, kv_len)."""
    lists = list_sizes(mask, sizes["batch"], sizes["heads"])
    extents = {"batch": lists[0], "head": lists[1], "q_idx": sizes["q_len"], "kv_idx": sizes["kv_len"]}
    places: dict[str, torch.Tensor | int | float] = {
        name: torch.arange(size, device=device).view([-1 if axis == at else 1 for at in range(4)])
        for axis, (name, size) in enumerate(extents.items())
    }
    seen = evaluate(mask, {**places, "q_len": sizes["q_len"], "kv_len": sizes["kv_len"]}, aux)
    return seen.expand(*extents.values())


def lists_of(seen: torch.Tensor, block: tuple[int, int]) -> BlockMaskLists:
    """Compute the block lists of visible pairs by definition."""
    down, across = (-length % size for length, size in zip(seen.shape[2:], block, strict=True))

    def any_of_blocks(pairs: torch.Tensor) -> torch.Tensor:
        whole = F.pad(pairs, (0, across, 0, down)).unflatten(3, (-1, block[1])).any(4)
        found: torch.Tensor = whole.unflatten(2, (-1, block[0])).any(3)
        return found

    some, every = any_of_blocks(seen), ~any_of_blocks(~seen)
    return BlockMaskLists(*_listed(some & ~every), *_listed(every))


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and ascending lists, padded with -1."""
    columns = blocks.shape[-1]
    numbers = torch.arange(columns, device=blocks.device).expand(blocks.shape)
    ascending = torch.where(blocks, numbers, columns).sort(-1).values
    return blocks.sum(-1, dtype=torch.int32), ascending.masked_fill(ascending == columns, -1).int()


def run_case(kernel: BlockMaskKernel, case: Case, device: torch.device) -> Outcome:
    """Run one case twice in poisoned memory; the error is the number of wrong elements in lists."""
    spec = kernel.spec
    assert isinstance(spec, BlockMaskSpec)
    block, mask = spec.pattern.fixed_block, spec.pattern.expression
    assert block is not None and mask is not None
    sizes = {"batch": case.batch, "heads": case.heads, "q_len": case.q_len, "kv_len": case.kv_len}
    aux = draw_aux(spec.aux_tensors, sizes, generator(case.name, device), device)
    if case.ascending:
        aux = {name: tensor.sort(-1).values if tensor.dim() else tensor for name, tensor in aux.items()}
    with poisoned_memory():
        found, again = (kernel(*sizes.values(), aux=aux, device=device) for _ in range(2))
    right = lists_of(seen_pairs(mask, sizes, aux, device), (block.q, block.kv))
    same = all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    shapes = [tuple(one.shape) for one in found] == [tuple(one.shape) for one in right]
    wrong = (
        sum(float((one != other).sum()) for one, other in zip(found, right, strict=True)) if shapes else float("nan")
    )
    return Outcome(case.name, case.describe(), wrong, None, 0.0, "" if same else "two runs differ")


VERIFICATION = Verification(
    oracle="the mask of every pair, by torch, on the GPU: errors are elements of lists that differ",
    cases=lambda plan, spec: CASES,
    run_case=run_case,
)
