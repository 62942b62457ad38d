"""Small device memory that kernels need between launches."""

from __future__ import annotations

import torch

_counters: dict[tuple[int, int], torch.Tensor] = {}


def scheduler_counters(device: torch.device, stream: int) -> torch.Tensor:
    """Return the two counters that hand out tiles, both 0.

    A kernel leaves them at 0, and launches on one stream follow each other, so each stream needs one pair. A CUDA graph
    may run beside anything: a launch that is being captured gets its own pair, cleared by the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device.index, stream)
    if key not in _counters:
        _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _counters[key]
