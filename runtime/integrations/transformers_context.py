"""Context parallelism for Hugging Face transformers: each rank of a group has a part of every sequence."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from runtime.checks import check_dense
from runtime.distributed import Layout, context_parallel_attention
from runtime.distributed.agreement import report
from runtime.distributed.arguments import group_from
from runtime.distributed.layout import layout_of
from runtime.errors import ArgumentError
from runtime.integrations.transformers_masks import AttentionMask, MaskInterface, pattern_within, pattern_without_mask
from runtime.patterns import Pattern

IGNORED = -100
"""Label of tokens without a loss."""
REFUSED = ("cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of packed sequences."""


@dataclass(frozen=True)
class ContextParallel:
    """Ranks that each have a part of every sequence, for ``register_transformers(context_parallel=...)``.

    Attributes:
        mesh_or_group: a ``ProcessGroup``, or a ``DeviceMesh`` of one dimension.
        layout: assignment of tokens to ranks: ``"zigzag"``, which balances causal attention, ``"contiguous"``, or a
            ``Layout``.
        symmetric: read keys and values from the memory of peers, as for ``context_parallel_attention``.

    Raises:
        ArgumentError: naming the argument.
    """

    mesh_or_group: Any
    layout: Layout | str = "zigzag"
    symmetric: bool = False
    _positions: list[tuple[Any, int]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        group = group_from(self.mesh_or_group)
        if not isinstance(self.symmetric, bool):
            raise ArgumentError("symmetric", f"is {type(self.symmetric).__name__}, expected True or False")
        object.__setattr__(self, "mesh_or_group", group)
        object.__setattr__(self, "layout", layout_of(self.layout, group.size()))

    def shard(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        """Return this rank's part of a batch, as arguments of a causal language model.

        The mean over ranks of the model's ``loss`` is the mean over all labels of the batch. FSDP2 and
        ``DistributedDataParallel`` average gradients over ranks, which gives the gradients of that mean.

        Args:
            input_ids: int64 (batch, length), the same on all ranks; ``length`` is a multiple of the layout's chunks.
            labels: int64 (batch, length), where labels[:, i] is the token i, or -100 for tokens without a loss; it is
                not shifted. Reading the number of labels synchronizes if they are on a GPU.

        Returns:
            By name: ``input_ids`` (batch, length / ranks) and ``position_ids`` (1, length / ranks), and with labels
            ``labels`` and ``shift_labels`` (batch, length / ranks) and ``num_items_in_batch``, the number of labels of
            the batch divided by the number of ranks.

        Raises:
            ArgumentError: naming the argument.
        """
        check_dense("input_ids", input_ids)
        if input_ids.dim() != 2:
            raise ArgumentError("input_ids", f"is {tuple(input_ids.shape)}, expected (batch, length)")
        layout, rank = self._layout(), self.mesh_or_group.rank()
        positions = layout.positions(rank, input_ids.shape[1], input_ids.device)[None]
        found: dict[str, Any] = {"input_ids": layout.shard(input_ids, rank, dim=1), "position_ids": positions}
        if labels is None:
            return found
        check_dense("labels", labels)
        if labels.shape != input_ids.shape:
            raise ArgumentError("labels", f"is {tuple(labels.shape)}, input_ids is {tuple(input_ids.shape)}")
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        items = int((shifted != IGNORED).sum())
        found |= {name: layout.shard(x, rank, dim=1) for name, x in (("labels", labels), ("shift_labels", shifted))}
        return found | {"num_items_in_batch": items / layout.ranks}

    def _layout(self) -> Layout:
        assert isinstance(self.layout, Layout)
        return self.layout


@dataclass(frozen=True)
class ContextMasks(MaskInterface):
    """Makes the mask of a forward pass over parts of sequences.

    Attributes:
        ranks: number of ranks.
    """

    ranks: int

    def __call__(
        self,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: int = 0,
        mask_function: Any = None,
        attention_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> AttentionMask:
        """Make the mask: full, causal or a sliding window over the whole sequence.

        Positions of a part are not consecutive, so transformers takes them for those of packed sequences. That part of
        the mask is dropped here, and ``attend_parts`` checks the positions.

        Raises:
            ArgumentError: for a padding mask, keys of a cache, and any other mask.
        """
        if attention_mask is not None:
            reason = "is given with context_parallel: leave it out, and pad on the right of a causal model"
            raise ArgumentError("attention_mask", f"{reason}, with the label {IGNORED}")
        if q_length != kv_length or not isinstance(q_offset, int) or q_offset != 0:
            reason = "has keys of earlier calls, which context_parallel does not support: pass use_cache=False"
            raise ArgumentError("cache", reason)
        function = self.masks.causal_mask_function if mask_function is None else mask_function
        pattern = pattern_within(self.masks, function, kv_length * self.ranks)
        if pattern is None:
            reason = "is not full, causal or a sliding window, which context_parallel needs: leave context_parallel out"
            raise ArgumentError("attention_mask", reason)
        return AttentionMask(self.masks, pattern, None, None, q_length, kv_length, dict(others))


def exact_pattern(mask: Any, is_causal: bool, window: int | None) -> Pattern:
    """The pattern of a call over the whole sequence.

    Args:
        mask: an ``AttentionMask`` of ``ContextMasks``, or None.
        is_causal: used without a mask.
        window: used without a mask: number of keys that a causal query sees, including its own.

    Raises:
        ArgumentError: for any other mask.
    """
    if isinstance(mask, AttentionMask):
        return mask.pattern
    if mask is not None:
        raise ArgumentError("attention_mask", f"is {type(mask).__name__}, expected None with context_parallel")
    return pattern_without_mask(is_causal=is_causal, window=window)


def attend_parts(
    parallel: ContextParallel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: Any,
    *,
    others: dict[str, Any],
    **options: Any,
) -> torch.Tensor:
    """Compute the attention of this rank's queries to the whole sequence.

    Args:
        parallel: the ranks.
        query: (batch, heads, length / ranks, head_dim).
        key, value: (batch, kv_heads, length / ranks, head_dim).
        pattern: of the whole sequence.
        others: arguments of the layer's call, with ``position_ids`` if the model passes them.
        options: scale, softcap and sink.

    Returns:
        (batch, length / ranks, heads, head_dim).

    Raises:
        ArgumentError: naming the argument; the other ranks get a ``CollectiveError`` if they wait for this one.
        CollectiveError: as ``context_parallel_attention``.
    """
    try:
        for name in REFUSED:
            if others.get(name) is not None:
                reason = "is given with context_parallel, whose ranks have parts of each sequence: leave it out"
                raise ArgumentError(name, reason)
        if key.shape[2] != query.shape[2]:
            reason = f"has {key.shape[2]} tokens, query {query.shape[2]}, which cross attention and caches have"
            raise ArgumentError("key", f"{reason}: context_parallel needs equal parts")
        if not isinstance(pattern, Pattern) or pattern.index_tensors():
            what = f"returned {type(pattern).__name__}, expected a pattern without tensors with context_parallel"
            raise ArgumentError("pattern_for", what)
        _check_positions(parallel, others.get("position_ids"), query.shape[2])
    except ArgumentError as error:
        report(parallel.mesh_or_group, error)
        raise
    options |= {"layout": parallel.layout, "symmetric": parallel.symmetric}
    out: Any = context_parallel_attention(query, key, value, pattern, parallel.mesh_or_group, **options)
    result: torch.Tensor = out.transpose(1, 2).contiguous()
    return result


def _check_positions(parallel: ContextParallel, positions: Any, tokens: int) -> None:
    """Refuse positions of other tokens. Reads the values of a tensor once; traced code has no values.

    Raises:
        ArgumentError: for positions of other tokens.
    """
    if not isinstance(positions, torch.Tensor) or torch.compiler.is_compiling():
        return
    if (
        parallel._positions
        and parallel._positions[0][0]() is positions
        and parallel._positions[0][1] == positions._version
    ):
        return
    layout = parallel._layout()
    right = layout.positions(parallel.mesh_or_group.rank(), tokens * layout.ranks, positions.device)
    if positions.shape[-1] != tokens or not bool((positions == right).all()):
        reason = "are not those of this rank's tokens: pass what ContextParallel.shard returns"
        raise ArgumentError("position_ids", reason)
    parallel._positions[:] = [(weakref.ref(positions), positions._version)]
