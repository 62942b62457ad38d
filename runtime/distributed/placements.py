"""DTensors: the sharded dimension of q, k and v, its ranks, and results with the same placement."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime.errors import ArgumentError
from runtime.kernels.attention import AttentionResult

BATCH, HEADS, SEQUENCE = 0, 1, 2
"""Dimensions of q, k and v that may be sharded."""


@dataclass(frozen=True)
class Placed:
    """Placement of DTensors.

    Attributes:
        local: this rank's q, k and v.
        sharded: SEQUENCE if the sequence is sharded, else HEADS.
        group: the ranks that share the sequence; None if it is not sharded.
        mesh: mesh of the DTensors.
        placements: placements of q.
        heads: number of heads of q over all ranks.
    """

    local: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sharded: int
    group: dist.ProcessGroup | None
    mesh: Any
    placements: tuple[Any, ...]
    heads: int

    def sink(self, sink: Any) -> Any:
        """Sinks of this rank's heads, selected from all heads if needed: float32 (heads,).

        Raises:
            ArgumentError: for a DTensor.
        """
        if not isinstance(sink, torch.Tensor):
            return sink
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow, and already imported at this point

        if isinstance(sink, DTensor):
            raise ArgumentError("sink", "is a DTensor: pass the sinks of all heads, or of this rank's, as a tensor")
        local = self.local[0].shape[1]
        dims = [place for place, placement in enumerate(self.placements) if placement.is_shard(HEADS)]
        if not dims or sink.shape != (self.heads,):
            return sink
        return sink.narrow(0, self.mesh.get_local_rank(dims[0]) * local, local)

    def wrapped(self, found: torch.Tensor | AttentionResult) -> torch.Tensor | AttentionResult:
        """The result as a DTensor with the placements of q."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow, and already imported at this point

        def of(tensor: torch.Tensor) -> torch.Tensor:
            return DTensor.from_local(tensor, self.mesh, self.placements, run_check=False)

        if isinstance(found, AttentionResult):
            assert found.lse is not None
            return AttentionResult(of(found.out), of(found.lse))
        return of(found)


def placed(q: Any, k: Any, v: Any, mesh_or_group: Any) -> Placed | None:
    """Placement of q, k and v; None if none of them is a DTensor.

    Raises:
        ArgumentError: for DTensors mixed with tensors, and for unsupported placements.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return None
    every: dict[str, Any] = {"q": q, "k": k, "v": v}
    are = [isinstance(tensor, module.DTensor) for tensor in every.values()]
    if not any(are):
        return None
    for name, tensor in every.items():
        if not isinstance(tensor, module.DTensor):
            raise ArgumentError(name, f"is {type(tensor).__name__}, but others are DTensors: pass one kind")
        if (tensor.device_mesh, tensor.placements) != (q.device_mesh, q.placements):
            raise ArgumentError(name, f"has placements {tensor.placements}, q has {q.placements}: use the same ones")
        _check(name, tensor)
    dims = [placement.dim if placement.is_shard() else None for placement in q.placements]
    mesh, group = q.device_mesh, None
    if SEQUENCE in dims:
        group = mesh.get_group(dims.index(SEQUENCE))
    allowed = mesh.get_all_groups() if group is None else [group]
    if mesh_or_group is not None and mesh_or_group != mesh and _group_in(mesh_or_group) not in allowed:
        raise ArgumentError("mesh_or_group", "differs from the mesh of the DTensors: leave it out")
    local = q.to_local(), k.to_local(), v.to_local()
    return Placed(local, HEADS if group is None else SEQUENCE, group, mesh, q.placements, q.shape[HEADS])


def _group_in(mesh_or_group: Any) -> Any:
    """The group of a one-dimensional mesh, such as ``mesh["cp"]``; other values are returned unchanged."""
    if isinstance(mesh_or_group, DeviceMesh) and mesh_or_group.ndim == 1:
        return mesh_or_group.get_group()
    return mesh_or_group


def _check(name: str, tensor: Any) -> None:
    """Refuse placements other than replicas and even shards of batch, heads and sequence, each at most once."""
    seen = []
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        is_known = placement.is_replicate() or (placement.is_shard() and placement.dim in (BATCH, HEADS, SEQUENCE))
        if not is_known or (placement.is_shard() and placement.dim in seen):
            allowed = (
                "Shard(2) (the sequence) or Shard(1) (heads); Shard(0) and Replicate() on other dimensions of a mesh"
            )
            raise ArgumentError(name, f"has placements {tensor.placements}, expected {allowed}")
        if placement.is_shard():
            seen.append(placement.dim)
            if tensor.shape[placement.dim] % size:
                length = tensor.shape[placement.dim]
                raise ArgumentError(
                    name, f"has {length} in dimension {placement.dim}, expected a multiple of {size} ranks"
                )
    if not {HEADS, SEQUENCE} & set(seen):
        raise ArgumentError(name, f"has placements {tensor.placements}, which shard neither the sequence nor the heads")
