"""Files that processes map, in place of torch's symmetric memory, which needs GPUs."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as memory
from torch.distributed import distributed_c10d

_paths: dict[int, str] = {}


def _mapped(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def empty(*shape: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
    assert torch.device(device).type == "cpu"
    path = Path(tempfile.mkdtemp(prefix="symmetric_")) / "memory"
    found = _mapped(str(path), shape, dtype)
    _paths[found.data_ptr()] = str(path)
    return found


class Handle:
    """What each rank has mapped of all."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self.name, group = name, distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]
        _, store = distributed_c10d._world.pg_map[group]
        everybody = [f"symmetric/{rank}" for rank in range(group.size())]
        path = Path(_paths[tensor.data_ptr()])
        dist.barrier(group)
        store.set(everybody[group.rank()], str(path))
        dist.barrier(group)
        paths = [store.get(each).decode() for each in everybody]
        self.tensors = [_mapped(each, tuple(tensor.shape), tensor.dtype) for each in paths]
        dist.barrier(group)
        path.unlink()
        path.parent.rmdir()

    def get_remote_tensor(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        assert self.tensors[rank].shape == shape and self.tensors[rank].dtype == dtype
        return self.tensors[rank]

    get_buffer = get_remote_tensor

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert channel in range(4) and timeout_ms > 0
        dist.barrier(distributed_c10d._resolve_process_group(self.name))  # type: ignore[attr-defined]


def install() -> None:
    """Put them there."""
    memory.empty, memory.rendezvous = empty, Handle  # type: ignore[assignment]
