"""What stands for torch's current stream where launches only pretend to have a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.driver import enqueue, streams, workspace


class _All:
    def __contains__(self, stream: object) -> bool:
        return True


def pretend_stream(monkeypatch: pytest.MonkeyPatch, handle: int = 0) -> None:
    """Make every device's current stream one of a handle that lasts and is not captured, with no memory kept for it."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: handle, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(enqueue, "note_launch", lambda loaded, device, stream: None)
    pretend_memory(monkeypatch)


def pretend_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make counters of each stream in host memory, as if no stream ended before the process."""

    def cleared(device: torch.device, stream: int, number: int) -> Any:
        return torch.zeros(number, dtype=torch.int32, device=device)

    for name in ("_cleared", "_kept"):
        monkeypatch.setattr(workspace, name, cleared)
    monkeypatch.setattr(streams, "_lasting", _All())
    monkeypatch.setattr(workspace, "_counters", {})
