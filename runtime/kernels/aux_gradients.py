"""Gradients of tensors of a score, of the sums that their kernel leaves: what is added up behind it, in one order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from codegen.aux_gradients import DISTANCE, Index, Read, indices_of, lines_of, reads_of, sums_name
from codegen.spec import AttentionBackwardSpec

_DIMS = {"batch": 0, "head": 1, "q_idx": 2, "kv_idx": 2, DISTANCE: 2}
"""Dims of sums by what they count, those of a head's thread blocks added up."""


class AuxSums:
    """The sums of a kernel of ``gradients: daux``."""

    def __init__(self, spec: AttentionBackwardSpec) -> None:
        """Take over what is summed up."""
        assert spec.score is not None
        self._reads = reads_of(spec.score, spec.aux_gradients)

    def added_up(
        self, sums: Mapping[str, torch.Tensor], aux: Mapping[str, torch.Tensor], q_shape: Sequence[int], kv_len: int
    ) -> dict[str, torch.Tensor]:
        """Return the gradients.

        Args:
            sums: as the kernel leaves them, by parameter.
            aux: the tensors of the call, by name.
            q_shape: (batch, heads, q_len, d).
            kv_len: keys of a head.

        Returns:
            By name, in the type of each tensor.
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
    """Gradient of a tensor's elements, from the sums of one place that reads it.

    Args:
        read: the place.
        sums: (batch, heads, queries, keys or distances); distances begin with that of query 0 and the last key.
        shape: of the tensor.
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
    """Sums of positions from ``first`` on, by index.

    An index beyond an end is that end's. One between is that of one position: only at the ends sums are added up.
    """
    number = sums.shape[axis]
    if index.sign < 0:
        sums, first = sums.flip(axis), -(first + number - 1)
    start = first + index.offset  # index of the first position, before it is held
    low, high = (int(max(0, min(bound, size - 1))) for bound in (index.low, index.high))
    before = max(0, min(low - start + 1, number))  # positions that have the least index
    behind = max(0, min(number - (high - start), number - before))  # those that have the largest
    between = number - before - behind
    found = sums.new_zeros((*sums.shape[:axis], size, *sums.shape[axis + 1 :]))
    found.narrow(axis, low, 1).add_(sums.narrow(axis, 0, before).sum(axis, keepdim=True))
    found.narrow(axis, high, 1).add_(sums.narrow(axis, number - behind, behind).sum(axis, keepdim=True))
    if between:
        found.narrow(axis, start + before, between).add_(sums.narrow(axis, before, between))
    return found
