"""Tensors that are made once and serve every later call, in any mode and on any stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils import _pytree as pytree

Made = TypeVar("Made")

_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing
_making = threading.RLock()  # what is made may need something else that is made once


def may_keep() -> bool:
    """Whether new tensors are plain ones: not within torch.compile, dispatch modes, transforms or tracers."""
    return not (torch.compiler.is_compiling() or _dispatch_modes() or _functorch() is not None or _is_tracing())


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is captured into a CUDA graph, which owns the memory of new tensors."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


class _Streams:
    """The streams that read kept tensors of a device.

    Memory goes back to the stream that it was taken on, and is handed out there while others may still read it;
    ``record_stream`` prevents that. No stream waits for the one that fills the tensors: the host has waited.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda]
        self._known: set[int] = set()
        if self._tensors:
            stream = torch.cuda.current_stream(self._tensors[0].device)
            stream.synchronize()
            self._known.add(stream.cuda_stream)

    def read(self) -> None:
        """Note that the current stream reads the tensors."""
        if not self._tensors:
            return
        stream = torch.cuda.current_stream(self._tensors[0].device)
        if stream.cuda_stream not in self._known:
            for tensor in self._tensors:
                tensor.record_stream(stream)
            self._known.add(stream.cuda_stream)


class _Entry(NamedTuple):
    value: Any
    streams: _Streams


class Kept(Generic[Made]):
    """Values by hashed keys, made outside the caller's inference mode, gradients and default device.

    Attributes:
        most: the number of values that are kept: one more replaces the oldest.
    """

    def __init__(self, most: int, tensors_of: Callable[[Made], Sequence[Any]] = pytree.tree_leaves) -> None:
        """Start with none.

        Args:
            most: the number of values that are kept.
            tensors_of: the tensors of a value.
        """
        self.most, self._tensors_of = most, tensors_of
        self._entries: dict[Any, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Any) -> Made | None:
        """Get the value of a key, if it is kept."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def get(self, key: Any, make: Callable[[], Made]) -> Made:
        """Get the value of a key, for reads on the current stream; make it if it is not kept."""
        entry = self._entries.get(key)
        if entry is None:
            with _making, torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
                entry = self._entries.get(key) or self._add(key, make())
        entry.streams.read()
        value: Made = entry.value
        return value

    def _add(self, key: Any, value: Made) -> _Entry:
        entry = _Entry(value, _Streams(self._tensors_of(value)))
        if len(self._entries) >= self.most:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = entry
        return entry


def made_once(most: int) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Keep the results of a function whose last argument is the device of its tensors.

    Nothing is kept where new tensors are not plain ones, or belong to a CUDA graph.

    Args:
        most: the number of results that are kept.
    """

    def decorate(make: Callable[..., Made]) -> Callable[..., Made]:
        kept: Kept[Made] = Kept(most)

        @wraps(make)
        def get(*arguments: Any) -> Made:
            if may_keep() and not is_capturing(arguments[-1]):
                return kept.get(arguments, lambda: make(*arguments))
            return make(*arguments)

        return get

    return decorate
