"""Selection of KV blocks: case table, oracle, and the run of one case."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.select_topk import SelectTopkKernel
from runtime.verify.common import Outcome, Verification, generator, poisoned_memory

CLOSE = 2.0**-20  # relative to the largest product: closer products may swap ranks in fp32


@dataclass(frozen=True)
class Case:
    """One selection.

    Attributes:
        name: unique; also the seed.
        q_len: queries; kv_len: keys, of a head.
        block: queries and keys of a block.
        topk: entries of a list.
        heads: query heads; kv_heads: heads of k.
        batch: batches.
        head_dim: elements of a head.
        causal: KV blocks of the future are hidden.
        always: blocks that are selected first.
        whole: elements are -1, 0 or 1, so that products are exact and many of them equal.
        strided: q and k are views of (batch, length, heads, head_dim).
    """

    name: str
    q_len: int
    kv_len: int
    block: tuple[int, int]
    topk: int
    heads: int = 2
    kv_heads: int = 2
    batch: int = 1
    head_dim: int = 128
    causal: bool = False
    always: tuple[int, ...] = ()
    whole: bool = False
    strided: bool = False

    def describe(self) -> str:
        """Description of the parameters."""
        sizes = f"{self.batch} x {self.heads}:{self.kv_heads} heads, {self.q_len} x {self.kv_len}, d {self.head_dim}"
        said = {"causal": self.causal, "exact ties": self.whole, "strided": self.strided}
        always = [f"always {', '.join(map(str, self.always))}"] if self.always else []
        told = [sizes, f"blocks {self.block[0]} x {self.block[1]}", f"top {self.topk}", *always]
        return ", ".join([*told, *(word for word, holds in said.items() if holds)])


CASES = (
    Case("plain", 4096, 4096, (128, 128), 8),
    Case("causal", 4096, 4096, (128, 128), 8, causal=True, always=(0, -1)),
    Case("causal_short_queries", 300, 1111, (64, 64), 5, causal=True, always=(-1, -2)),
    Case("causal_more_queries", 1111, 300, (64, 64), 3, causal=True),
    Case("ties", 2048, 2048, (64, 32), 12, whole=True),
    Case("ties_causal", 1024, 1024, (16, 16), 9, whole=True, causal=True, always=(0, 3, -1)),
    Case("one_block", 1, 1, (128, 128), 4),
    Case("more_than_there_are", 257, 513, (128, 64), 40),
    Case("odd_lengths", 1001, 777, (48, 80), 3, heads=6, kv_heads=2, batch=2),
    Case("narrow_head", 512, 512, (64, 64), 2, head_dim=8),
    Case("odd_head", 512, 512, (64, 64), 3, head_dim=72, strided=True),
    Case("wide_head", 512, 512, (64, 64), 3, head_dim=256),
    Case("many_key_blocks", 64, 49152, (64, 16), 64, heads=1, kv_heads=1),
    Case("many_query_blocks", 32768, 256, (1, 16), 2, heads=1, kv_heads=1, head_dim=64),
    Case("always_beyond", 256, 256, (64, 64), 2, always=(31, -32, 1)),
    Case("always_near", 512, 700, (64, 64), 4, always=(0, -1, -2)),
)


def ranks(q: torch.Tensor, k: torch.Tensor, case: Case) -> torch.Tensor:
    """Products of means, float64 (batch, heads, query blocks, KV blocks): -inf if hidden, inf if always selected."""
    means = [_means(tensor, size) for tensor, size in zip((q, k), case.block, strict=True)]
    product = means[0] @ means[1].repeat_interleave(case.heads // case.kv_heads, 1).mT
    rows, columns = product.shape[2:]
    last_query = ((torch.arange(rows, device=q.device) + 1) * case.block[0]).clamp(max=case.q_len) - 1
    last_key = last_query + case.kv_len - case.q_len
    own = torch.where(last_key < 0, -1, last_key.clamp(0) // case.block[1])
    visible = own + 1 if case.causal else torch.full_like(own, columns)
    block = torch.arange(columns, device=q.device)
    for number in case.always:
        chosen = block == (number if number >= 0 else own[:, None] + 1 + number)
        product = product.masked_fill(chosen, math.inf)
    return product.masked_fill(block >= visible[:, None], -math.inf)


def _means(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return torch.stack([part.double().mean(2) for part in tensor.split(size, 2)], 2)


def selected(ranked: torch.Tensor, topk: int) -> torch.Tensor:
    """Expected lists: the largest products, lower numbers first among equal ones, in ascending order, then -1."""
    columns = ranked.shape[-1]
    order = ranked.sort(stable=True, dim=-1, descending=True)
    taken = order.indices[..., :topk].masked_fill(order.values[..., :topk] == -math.inf, columns).sort(-1).values
    lists = torch.full((*ranked.shape[:-1], topk), -1, dtype=torch.int32, device=ranked.device)
    lists[..., : taken.shape[-1]] = taken.masked_fill(taken == columns, -1).int()
    return lists


def gap(lists: torch.Tensor, ranked: torch.Tensor, topk: int) -> float:
    """Largest excess of an omitted product over a selected one; NaN for invalid lists."""
    columns = ranked.shape[-1]
    there = lists >= 0
    count = (ranked > -math.inf).sum(-1).clamp(max=topk)
    ascending = ((lists[..., 1:] > lists[..., :-1]) | ~there[..., 1:]).all()
    front = (there.sum(-1) == count).all() & (there.int().diff(dim=-1) <= 0).all()
    if lists.dtype != torch.int32 or not bool(ascending & front & (lists < columns).all() & (lists >= -1).all()):
        return math.nan
    mark = torch.zeros((*ranked.shape[:-1], columns + 1), dtype=torch.bool, device=ranked.device)
    mark.scatter_(-1, torch.where(there, lists, columns).long(), True)
    taken = mark[..., :columns]
    if bool((taken & (ranked == -math.inf)).any()):
        return math.nan
    least = ranked.masked_fill(~taken, math.inf).amin(-1)
    most = ranked.masked_fill(taken, -math.inf).amax(-1)
    over = torch.where(most > least, most - least, torch.zeros_like(most))
    return float(over.max())


def run_case(kernel: SelectTopkKernel, case: Case, device: torch.device) -> Outcome:
    """Run one case twice in poisoned memory."""
    draw, dtype = generator(case.name, device), TORCH_DTYPES[kernel.spec.dtype]

    def made(heads: int, length: int) -> torch.Tensor:
        shape = (case.batch, length, heads, case.head_dim)
        if not case.strided:
            shape = (case.batch, heads, length, case.head_dim)
        if case.whole:
            tensor = torch.randint(-1, 2, shape, generator=draw, device=device).to(dtype)
        else:
            tensor = torch.randn(shape, generator=draw, device=device).to(dtype)
        return tensor.transpose(1, 2) if case.strided else tensor

    q, k = made(case.heads, case.q_len), made(case.kv_heads, case.kv_len)
    ranked = ranks(q, k, case)
    finite = ranked.masked_fill(ranked.isinf(), 0.0)
    with poisoned_memory():
        lists, again = (kernel(q, k, case.block, case.topk, causal=case.causal, always=case.always) for _ in range(2))
    problem = "" if torch.equal(lists, again) else "two runs differ"
    if case.whole and not torch.equal(lists, selected(ranked, case.topk)):
        problem = "ties are not taken in order"
    error = gap(lists, ranked, case.topk)
    return Outcome(case.name, case.describe(), error, None, CLOSE * float(finite.abs().max()), problem)


VERIFICATION = Verification(
    oracle="float64 products of means, on the GPU: lists are right if no product that is left out is larger",
    cases=lambda plan, spec: CASES,
    run_case=run_case,
)
