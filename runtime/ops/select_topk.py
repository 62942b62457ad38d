"""Which key blocks a query block attends to: the blocks whose mean key has the largest products with its mean query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from runtime.convert.checks import check_count, check_pair, check_tensor
from runtime.errors import ArgumentError

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def select_topk_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    block: tuple[int, int],
    topk: int,
    causal: bool,
    always: Sequence[int] = (),
) -> torch.Tensor:
    """Select key blocks by the product of block means, in torch: the definition that kernels are checked against.

    A score is the plain product, not scaled, of the mean query of a query block and the mean key of a key block, both
    means and the product in float32 (in float64 for float64). The last block of a sequence has the mean of what it has.

    Args:
        q: (batch, heads, q_len, head_dim), fp16, bf16, fp32 or fp64.
        k: (batch, kv_heads, kv_len, head_dim), the same type; heads is a multiple of kv_heads.
        block: queries and keys of a block.
        topk: blocks to select for each query block.
        causal: whether blocks are out of the question that no query of the block sees: whose first key is more than its
            last query + kv_len - q_len.
        always: blocks that are selected first, if they are in question: from 0 on by their number, and below relative
            to the query block's own block, the one of the key at its last query + kv_len - q_len: -1 is that block, -2
            the one before it. Where there is no such block it does not count.

    Returns:
        int32 (batch, heads, query_blocks, topk): after those of ``always`` the blocks with the largest scores, of equal
        ones those with the lower number; NaN counts as the least. In ascending order; -1 behind the last one where
        fewer than ``topk`` are in question.

    Raises:
        ArgumentError: naming the argument.
    """
    _check(q, k, block, topk, always)
    q_len, kv_len = q.shape[2], k.shape[2]
    mean_keys = _block_means(k, block[1]).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = _block_means(q, block[0]) @ mean_keys.transpose(2, 3)
    rows, columns = scores.shape[2:]
    numbers = torch.arange(columns, device=q.device)
    last = ((torch.arange(rows, device=q.device) + 1) * block[0]).clamp(max=q_len) - 1 + (kv_len - q_len)
    last = last[:, None]
    # What is selected first, 0: always; 1: by score; 2: not at all.
    rank = torch.where((numbers * block[1] > last) & causal, 2, 1)
    for which in always:
        chosen = numbers == (which if which >= 0 else last.clamp(min=-1) // block[1] + 1 + which)
        rank = torch.where(chosen & (rank == 1), 0, rank)
    # Stable sorts keep the lower number first: by score, then by what comes before the score.
    by_score = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    ranks = rank.expand(scores.shape).gather(-1, by_score)
    order = by_score.gather(-1, ranks.argsort(dim=-1, stable=True))[..., :topk]
    selected = torch.where(rank.expand(scores.shape).gather(-1, order) < 2, order, columns).sort(-1).values
    lists = torch.where(selected < columns, selected, -1).to(torch.int32)
    return F.pad(lists, (0, topk - lists.shape[-1]), value=-1)


def _check(q: Any, k: Any, block: Any, topk: Any, always: Any) -> None:
    """Check the arguments of a selection."""
    check_tensor("q", q, _FLOATS, (4,))
    check_tensor("k", k, (q.dtype,), (4,), q.device)
    for name, tensor in (("q", q), ("k", k)):
        if tensor.numel() == 0:
            raise ArgumentError(name, f"is empty: {tuple(tensor.shape)}")
    if (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]) or q.shape[1] % k.shape[1]:
        raise ArgumentError("k", f"has shape {tuple(k.shape)}, which does not fit q's {tuple(q.shape)}")
    check_pair("block", block)
    check_count("topk", topk)
    for which in always:
        if not isinstance(which, int) or isinstance(which, bool):
            raise ArgumentError("always", f"has {which!r}, expected whole numbers")
    if len(set(always)) > topk:
        raise ArgumentError("always", f"has {len(set(always))} blocks, topk is {topk}")


def _block_means(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean row of each block, the last one's over the rows that it has: at least float32."""
    length = x.shape[2]
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    sums = F.pad(exact, (0, 0, 0, -length % size)).unflatten(2, (-1, size)).sum(3)
    first = torch.arange(sums.shape[2], device=x.device) * size
    rows = (length - first).clamp(max=size).to(sums.dtype)
    means: torch.Tensor = sums / rows[:, None]
    return means
