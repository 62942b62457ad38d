"""Gradients of a score's tensors: the final reduction, in a fixed order, of partial sums from the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from codegen.aux_gradients import DISTANCE, Index, Read, indices_of, lines_of, reads_of, sums_name
from codegen.spec import AttentionBackwardSpec

_DIMS = {"batch": 0, "head": 1, "q_idx": 2, "kv_idx": 2, DISTANCE: 2}
"""Dimensions of the sums by the size that they index, after the reduction over a head's thread blocks."""


class AuxSums:
    """Partial sums of a kernel with ``gradients: daux``."""

    def __init__(self, spec: AttentionBackwardSpec) -> None:
        """Take the places that are summed."""
        assert spec.score is not None
        self._reads = reads_of(spec.score, spec.aux_gradients)

    def added_up(
        self, sums: Mapping[str, torch.Tensor], aux: Mapping[str, torch.Tensor], q_shape: Sequence[int], kv_len: int
    ) -> dict[str, torch.Tensor]:
        """Compute the gradients.

        Args:
            sums: the kernel's sums, by parameter.
            aux: the tensors of the call, by name.
            q_shape: (batch, heads, q_len, d).
            kv_len: keys of a head.

        Returns:
            Gradients by name, in the dtype of each tensor.
        """
        lengths = {"q_len": q_shape[2], "kv_len": kv_len}
        found: dict[str, torch.Tensor] = {}
        for number, read in enumerate(self._reads):
            of_lines = sums[sums_name(self._reads, number)].view(*q_shape[:2], -1, lines_of(read, **lengths)).sum(2)
            name = read.item.aux.name
            made = of_read(read, of_lines, aux[name].shape, lengths)
            found[name] = found[name] + made if name in found else made
        return {name: gradient.to(aux[name].dtype) for name, gradient in found.items()}


def of_read(read: Read, sums: torch.Tensor, shape: Sequence[int], lengths: Mapping[str, int]) -> torch.Tensor:
    """Gradient of a tensor's elements from the sums of one lookup.

    Args:
        read: the lookup.
        sums: (batch, heads, queries, keys or distances); the first distance is between query 0 and the last key.
        shape: shape of the tensor.
        lengths: q_len and kv_len.
    """
    indices = indices_of(read.item, lengths)
    dims = [_DIMS[index.counts] for index in indices if index.counts]
    rest = [dim for dim in range(sums.ndim) if dim not in dims]
    for dim in rest:
        sums = sums.sum(dim, keepdim=True)
    sums = sums.permute(*dims, *rest).flatten(len(dims) - 1) if dims else sums.reshape(())
    for axis, index in enumerate(indices):
        sums = sums if index.counts else sums.unsqueeze(axis)
        first = 1 - lengths["kv_len"] if index.counts == DISTANCE else 0
        sums = _by_index(sums, axis, index, first, shape[axis])
    return sums


def _by_index(sums: torch.Tensor, axis: int, index: Index, first: int, size: int) -> torch.Tensor:
    """Sums by index, from sums by position that begin at ``first``.

    Indices beyond an end are clamped to it. Every other index belongs to one position, so only the ends are reduced.
    """
    number = sums.shape[axis]
    if index.sign < 0:
        sums, first = sums.flip(axis), -(first + number - 1)
    start = first + index.offset  # index of the first position, before clamping
    low, high = (int(max(0, min(bound, size - 1))) for bound in (index.low, index.high))
    before = max(0, min(low - start + 1, number))  # positions clamped to the lowest index
    behind = max(0, min(number - (high - start), number - before))  # positions clamped to the highest index
    between = number - before - behind
    found = sums.new_zeros((*sums.shape[:axis], size, *sums.shape[axis + 1 :]))
    found.narrow(axis, low, 1).add_(sums.narrow(axis, 0, before).sum(axis, keepdim=True))
    found.narrow(axis, high, 1).add_(sums.narrow(axis, number - behind, behind).sum(axis, keepdim=True))
    if between:
        found.narrow(axis, start + before, between).add_(sums.narrow(axis, before, between))
    return found
