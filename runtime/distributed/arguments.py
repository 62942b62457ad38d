"""What calls over ranks are given: groups, patterns, and whether lengths divide."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime.distributed.layout import Layout
from runtime.distributed.strided import strided_lists
from runtime.errors import ArgumentError
from runtime.ops.attention import pattern_of
from runtime.ops.attention_checks import check_lists, check_operands
from runtime.ops.aux_tensors import apart
from runtime.patterns import Causal, Pattern, PrefixLM, Strided


def group_from(mesh_or_group: Any) -> dist.ProcessGroup:
    """Return the group of ranks.

    Raises:
        ArgumentError: for what is none, a mesh of several dimensions, and a group of one.
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
    if mesh_or_group.size() < 2:
        raise ArgumentError("mesh_or_group", "has one rank: call block_sparse_attention, which needs no group")
    return mesh_or_group


def default_layout(pattern: Any) -> str:
    """Return the layout that balances a pattern's work where a call names none."""
    return "zigzag" if isinstance(pattern, Causal | PrefixLM) else "contiguous"


def checked_pattern(pattern: Any, layout: Layout, rank: int, q: torch.Tensor, k: torch.Tensor) -> Pattern:
    """Return the pattern of a rank's queries, of which shapes are checked.

    Raises:
        ArgumentError: naming the argument.
    """
    check_operands(q, k, k)
    ranks = layout.ranks
    lengths = q.shape[2] * ranks, k.shape[2] * ranks
    for name, length in zip(("q", "k"), lengths, strict=True):
        if length % layout.count:
            each = layout.count // ranks
            raise ArgumentError(name, f"has {length // ranks} rows on a rank, which {each} chunks do not divide")
    if not isinstance(pattern, Pattern):
        whole = k.new_empty((k.shape[0], k.shape[1], lengths[1], 0))
        pattern = pattern_of(pattern, q, whole)
    if isinstance(pattern, Strided):
        pattern = strided_lists(pattern, layout, rank, lengths, q.device)
    found: Pattern = pattern
    block = json.loads(found.spec_json).get("block")
    if isinstance(block, dict):
        _check_blocks(block, layout, lengths)
    lists, _ = apart(found.spec_json, found.index_tensors())
    check_lists(found.spec_json, lists, q, k)
    return found


def _check_blocks(block: dict[str, int], layout: Layout, lengths: tuple[int, int]) -> None:
    """Refuse chunks that are no whole blocks."""
    for name, size, length in zip(("q", "k"), (block["q"], block["kv"]), lengths, strict=True):
        if (chunk := length // layout.count) % size:
            reason = f"has chunks of {chunk} rows, which blocks of {size} do not divide"
            raise ArgumentError(name, f"{reason}: choose other lengths, blocks or another layout")
