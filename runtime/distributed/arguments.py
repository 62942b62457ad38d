"""Checks of the arguments of distributed calls: groups, patterns and lengths."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from codegen.patterns import Block
from runtime.distributed.agreement import state_of
from runtime.distributed.layout import Layout
from runtime.distributed.masks import asks_for_heads
from runtime.distributed.strided import strided_lists
from runtime.errors import ArgumentError
from runtime.ops.attention import pattern_of
from runtime.ops.attention_checks import check_lists, check_operands
from runtime.patterns import Causal, Pattern, PrefixLM, Strided, scored_of, split_tensors


def group_from(mesh_or_group: Any) -> dist.ProcessGroup:
    """Return the group of ranks.

    Raises:
        ArgumentError: for other types, a mesh of several dimensions, and a group of one rank.
    """
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            names = mesh_or_group.mesh_dim_names or ("its", "dimensions")
            reason = f"is a mesh of {mesh_or_group.ndim} dimensions, expected one: pass mesh[{names[-1]!r}]"
            raise ArgumentError("mesh_or_group", reason)
        mesh_or_group = mesh_or_group.get_group()
    if not isinstance(mesh_or_group, dist.ProcessGroup):
        what = "a ProcessGroup or a DeviceMesh of one dimension"
        raise ArgumentError("mesh_or_group", f"is {type(mesh_or_group).__name__}, expected {what}")
    state_of(mesh_or_group)
    if mesh_or_group.size() < 2:
        raise ArgumentError("mesh_or_group", "has one rank: call block_sparse_attention instead")
    return mesh_or_group


def default_layout(pattern: Any) -> str:
    """The default layout of a pattern, which balances its work."""
    return "zigzag" if isinstance(pattern, Causal | PrefixLM) else "contiguous"


def as_pattern(pattern: Any, layout: Layout, rank: int, q: torch.Tensor, k: torch.Tensor) -> Pattern:
    """The pattern of a rank's queries: a ``BlockMask`` is converted, and ``Strided`` becomes lists.

    Raises:
        ArgumentError: naming the argument.
    """
    if isinstance(pattern, Pattern) and not isinstance(pattern, Strided):
        return pattern
    check_operands(q, k, k)
    lengths = q.shape[2] * layout.ranks, k.shape[2] * layout.ranks
    if isinstance(pattern, Strided):
        return strided_lists(pattern, layout, rank, lengths, q.device)
    return pattern_of(pattern, q, k.new_empty((k.shape[0], k.shape[1], lengths[1], 0)))


def check_pattern(pattern: Pattern, layout: Layout, q: torch.Tensor, k: torch.Tensor) -> None:
    """Check lengths and shapes of lists.

    Raises:
        ArgumentError: naming the argument.
    """
    lengths = q.shape[2] * layout.ranks, k.shape[2] * layout.ranks
    _check_chunks(layout, lengths)
    scored = scored_of(pattern)
    if scored.block is not None:
        _check_blocks(scored.block, layout, lengths)
    lists, _ = split_tensors(scored, pattern.index_tensors())
    check_lists(scored, lists, q, k)


def _check_chunks(layout: Layout, lengths: tuple[int, int]) -> None:
    """Refuse sequences that are not a multiple of the chunks."""
    for name, length in zip(("q", "k"), lengths, strict=True):
        if length % layout.count:
            rows, each = length // layout.ranks, layout.count // layout.ranks
            raise ArgumentError(name, f"has {rows} rows on a rank, expected a multiple of {each} chunks")


def _check_blocks(block: Block, layout: Layout, lengths: tuple[int, int]) -> None:
    """Refuse chunks that are not a multiple of the block size."""
    for name, size, length in zip(("q", "k"), (block.q, block.kv), lengths, strict=True):
        if (chunk := length // layout.count) % size:
            reason = f"has chunks of {chunk} rows, expected a multiple of the block size {size}"
            raise ArgumentError(name, f"{reason}: choose other lengths, another block size or another layout")


def check_heads(pattern: Pattern, layout: Layout, q: torch.Tensor, k: torch.Tensor) -> None:
    """Check heads, lengths and shapes of lists for head parallelism.

    Raises:
        ArgumentError: naming the argument.
    """
    ranks = layout.ranks
    if k.shape[1] % ranks:
        raise ArgumentError("k", f"has {k.shape[1]} heads, expected a multiple of {ranks} ranks")
    scored = scored_of(pattern)
    if asks_for_heads(scored):
        raise ArgumentError("pattern", "has a mask that depends on the head, but ranks have different heads")
    _check_chunks(layout, (q.shape[2] * ranks, k.shape[2] * ranks))
    whole_q, whole_k = (t.new_empty((t.shape[0], t.shape[1] // ranks, t.shape[2] * ranks, 0)) for t in (q, k))
    lists, _ = split_tensors(scored, pattern.index_tensors())
    check_lists(scored, lists, whole_q, whole_k)
