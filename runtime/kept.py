"""Cached tensors that serve every later call, in any mode and on any stream."""

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
_making = threading.RLock()  # making a value may need another cached value


def may_keep() -> bool:
    """Whether new tensors are plain tensors, outside torch.compile, dispatch modes, transforms and tracers."""
    return not (torch.compiler.is_compiling() or _dispatch_modes() or _functorch() is not None or _is_tracing())


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph, which would own new tensors' memory, captures the device's current stream."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


class _Streams:
    """The streams that read cached tensors of a device.

    Freed memory returns to the stream that allocated it, where it could be reused while other streams still read it;
    ``record_stream`` prevents that. Streams need not wait for the stream that fills the tensors, because the host has
    synchronized with it.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda]
        self._known: set[int] = set()
        if self._tensors:
            stream = torch.cuda.current_stream(self._tensors[0].device)
            stream.synchronize()
            self._known.add(stream.cuda_stream)

    def read(self) -> None:
        """Record that the current stream reads the tensors."""
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
    """Cache of values by key, made independently of the caller's inference mode, gradient mode and default device.

    Attributes:
        most: size of the cache: a further value replaces the oldest one.
    """

    def __init__(self, most: int, tensors_of: Callable[[Made], Sequence[Any]] = pytree.tree_leaves) -> None:
        """Create an empty cache.

        Args:
            most: size of the cache.
            tensors_of: the tensors of a value.
        """
        self.most, self._tensors_of = most, tensors_of
        self._entries: dict[Any, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Any) -> Made | None:
        """Get the cached value of a key; None without one."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def get(self, key: Any, make: Callable[[], Made]) -> Made:
        """Get the value of a key for reads on the current stream; make it if it is not cached."""
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
    """Cache the results of a function whose last argument is the device of its tensors.

    Results are not cached if new tensors are not plain tensors or belong to a CUDA graph.

    Args:
        most: size of the cache.
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
