"""Plans of the key blocks that ranks send each other, for lists with few blocks of other ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from codegen.wording import shown
from runtime.distributed.agreement import (
    TIMEOUT,
    agree,
    as_collective,
    check_timeout,
    meet,
    report,
    same,
    underway,
)
from runtime.distributed.arguments import as_pattern, check_pattern, group_from
from runtime.distributed.layout import Layout, check_count, check_rank, layout_of
from runtime.distributed.lists import blocks_of, key_block, wanted_blocks
from runtime.distributed.masks import has_positions
from runtime.distributed.steps import steps_of
from runtime.errors import ArgumentError
from runtime.ops.attention_checks import check_operands
from runtime.patterns import BlockLists, Pattern, TopK, scored_of, split_tensors

MOST = 0.75
"""Share of other ranks' blocks above which everything is sent, without packing."""


class Traffic(NamedTuple):
    """Bytes of keys and values that a rank receives in a forward pass.

    Attributes:
        needed: bytes of the blocks that its lists need, each counted once.
        moved: bytes of the blocks that are sent.
        everything: bytes of all keys and values of other ranks.
    """

    needed: int
    moved: int
    everything: int


@dataclass(frozen=True)
class SendPlan:
    """Number of key blocks that each rank sends to each other rank.

    Lists may change from call to call, as long as they fit the plan. If they do not, ``validate=True`` raises an error;
    without it, the GPU stops with an assertion. Without a plan, everything is sent.

    Attributes:
        caps: upper bound of the blocks per batch and head, by sender and receiver; None: everything is sent, because
            the lists need most of it.
        wanted: blocks that the planned lists need, over all batches and heads, by sender and receiver.
        block: keys per block.
        pairs: number of batches times heads of k.
        blocks: key blocks per rank.
    """

    caps: tuple[tuple[int, ...], ...] | None
    wanted: tuple[tuple[int, ...], ...]
    block: int
    pairs: int
    blocks: int

    def traffic(self, rank: int, head_dim: int, element_bytes: int = 2) -> Traffic:
        """Return the bytes that a rank receives with these lists. ArgumentError for a rank out of range."""
        check_rank(rank, len(self.wanted))
        for name, value in (("head_dim", head_dim), ("element_bytes", element_bytes)):
            check_count(name, value)
        of_block = 2 * self.block * head_dim * element_bytes
        others = [source for source in range(len(self.wanted)) if source != rank]
        everything = len(others) * self.blocks * self.pairs * of_block
        needed = sum(self.wanted[source][rank] for source in others) * of_block
        if self.caps is None:
            return Traffic(needed, everything, everything)
        moved = sum(self.caps[source][rank] for source in others) * self.pairs * of_block
        return Traffic(needed, moved, everything)


def plan_sends(
    q: torch.Tensor,
    k: torch.Tensor,
    pattern: Any,
    mesh_or_group: Any,
    *,
    layout: Layout | str = "contiguous",
    slack: float = 1.0,
    most: float = MOST,
    timeout: float = TIMEOUT,
) -> SendPlan:
    """Count the key blocks of other ranks in the lists of each rank, and fix how many are sent.

    All ranks call it. It synchronizes. The plan has room for the largest number of blocks that any batch and head needs
    of another rank, times ``slack``. Unused room is sent too, and ignored.

    Args:
        q: (batch, heads, q_len, head_dim), this rank's queries.
        k: (batch, kv_heads, kv_len, head_dim), this rank's keys.
        pattern: lists of this rank's queries: ``TopK``, ``BlockLists``, ``Strided`` or a ``BlockMask``, with key block
            indices of the whole sequence.
        mesh_or_group: a ``ProcessGroup``, or a ``DeviceMesh`` of one dimension.
        layout: assignment of rows to ranks, as in the calls.
        slack: room for lists of later calls: 1.25 reserves a quarter more than these lists need.
        most: share of other ranks' blocks above which everything is sent.
        timeout: seconds that ranks wait for each other.

    Returns:
        The plan, the same on all ranks, for ``context_parallel_attention(..., send=plan)``.

    Raises:
        ArgumentError: naming the argument, also if ranks differ.
        CollectiveError: for a rank that is late or has failed.
    """
    group = group_from(mesh_or_group)
    ranks, rank = group.size(), group.rank()
    try:
        layout = layout_of(layout, ranks)
        _check_numbers(slack, most)
        check_timeout(timeout)
        check_operands(q, k, k)
        lists = as_pattern(pattern, layout, rank, q, k)
        if not isinstance(lists, TopK | BlockLists):
            raise ArgumentError("pattern", f"is {type(lists).__name__}, expected lists; other patterns need no plan")
        check_pattern(lists, layout, q, k)
    except Exception as error:
        report(group, error)
        raise
    scored = scored_of(lists)
    facts: dict[str, Any] = {
        "function": "plan_sends",
        "pattern": scored.text,
        "layout": [list(c) for c in layout.chunks],
    }
    facts |= {"k": str(tuple(k.shape)), "slack": slack, "most": most}
    same(agree(group, "plan_sends", facts, timeout))
    block, kv_len = key_block(scored), k.shape[2] * ranks
    pairs = k.shape[0] * k.shape[1]
    with underway(group, "plan_sends"):
        meet(group, k.device)
        indices, _ = split_tensors(scored, lists.index_tensors())
        together = has_positions(scored)
        wanted = wanted_blocks(scored, indices, k.shape[1], kv_len // block, together=together)
        each = []
        for source in range(ranks):
            counts = wanted[..., blocks_of(layout, source, kv_len, block, k.device)].sum(-1)
            each.append(torch.stack([counts.max(), counts.sum() * (pairs // counts.numel())]))
        told = [torch.empty(ranks, 2, dtype=torch.int64, device=k.device) for _ in range(ranks)]
        with as_collective(group, "blocks that each rank needs"):
            dist.all_gather(told, torch.stack(each), group=group)
            by_receiver = [table.tolist() for table in told]
    blocks = k.shape[2] // block
    longest, total = (
        tuple(tuple(0 if s == r else by_receiver[r][s][which] for r in range(ranks)) for s in range(ranks))
        for which in (0, 1)
    )
    caps = tuple(tuple(min(blocks, math.ceil(count * slack)) for count in of_sender) for of_sender in longest)
    plan = SendPlan(caps, total, block, pairs, blocks)
    is_most = sum(map(sum, caps)) >= most * ranks * (ranks - 1) * blocks
    return replace(plan, caps=None) if is_most else plan


def _check_numbers(slack: Any, most: Any) -> None:
    """Check ``slack`` and ``most``.

    Raises:
        ArgumentError: naming the argument.
    """
    for name, value in (("slack", slack), ("most", most)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ArgumentError(name, f"is {shown(value)}, expected a number")
    if slack < 1:
        raise ArgumentError("slack", f"is {shown(slack)}, expected a number from 1")


def _check_kind(pattern: Any, layout: Any) -> None:
    """Check the types of a pattern and a layout.

    Raises:
        ArgumentError: naming the wrong one.
    """
    if not isinstance(pattern, Pattern):
        raise ArgumentError(
            "pattern", f"is {type(pattern).__name__}, expected an object of sparse_kernel_codegen.patterns"
        )
    if not isinstance(layout, Layout):
        raise ArgumentError("layout", f"is {shown(layout)}, expected a Layout")


def keys_received(pattern: Pattern, layout: Layout, rank: int, q_len: int, kv_len: int) -> int:
    """Return the number of keys that a rank receives per batch and head, without a ``SendPlan``.

    Args:
        pattern: a pattern of ``sparse_kernel_codegen.patterns``. With lists, all keys are sent.
        layout: assignment of keys to ranks.
        rank: the receiving rank.
        q_len: queries of the whole sequence.
        kv_len: keys of the whole sequence.

    Returns:
        The number of keys; each is sent with its value.

    Raises:
        ArgumentError: if a length is not a multiple of the number of chunks.
    """
    _check_kind(pattern, layout)
    check_rank(rank, layout.ranks)
    for length in (q_len, kv_len):
        layout.chunk_size(length)
    steps = steps_of(scored_of(pattern), layout, rank, q_len, kv_len)
    return sum(piece.size for pieces in steps.buffers for piece in pieces if piece.rank != rank)


def local_lists(pattern: Pattern, layout: Layout, rank: int) -> Pattern:
    """Return the lists of a rank's queries from lists of the whole sequence. Other patterns are returned unchanged.

    Args:
        pattern: ``TopK`` or ``BlockLists`` for the queries of all ranks, or any other pattern.
        layout: assignment of keys to ranks.
        rank: the rank.

    Returns:
        The pattern. Key blocks keep their indices, and tensors of an expression stay those of the whole sequence.

    Raises:
        ArgumentError: if the chunks are not a multiple of the block size.
    """
    _check_kind(pattern, layout)
    check_rank(rank, layout.ranks)
    if not isinstance(pattern, TopK | BlockLists):
        return pattern
    rows = pattern.kv_indices.shape[2]
    blocks = layout.positions(rank, rows, pattern.kv_indices.device)
    names = [name for name in pattern.tensors if name not in ("overflow", "aux") and getattr(pattern, name) is not None]
    return replace(pattern, **{name: getattr(pattern, name).index_select(2, blocks) for name in names})
