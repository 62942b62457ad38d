"""Tensors that are made once and serve every later call, whatever mode and stream the first one has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing


def may_keep() -> bool:
    """Whether tensors that are made now are plain ones: under dispatch modes, transforms and tracers they are not."""
    return not (_dispatch_modes() or _functorch() is not None or _is_tracing() or torch.compiler.is_compiling())


@contextmanager
def outside_modes() -> Iterator[None]:
    """What is made within belongs to no mode of the caller: neither inference mode nor a default device."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        yield


class Streams:
    """The streams on which kept tensors of a device are read, so that their memory outlives that.

    The tensors come from the CPU by copies that the host waited for: no stream has to wait for another one to read
    them. Their memory goes back to the stream that it was taken on, and is handed out there while others may still
    read it; ``record_stream`` prevents that.
    """

    def __init__(self, tensors: tuple[Any, ...]) -> None:
        self._tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_cuda]
        self._known: set[int] = set()
        if self._tensors:
            self._known.add(torch.cuda.current_stream(self._tensors[0].device).cuda_stream)

    def read(self) -> None:
        """Note that the current stream reads the tensors."""
        if not self._tensors:
            return
        stream = torch.cuda.current_stream(self._tensors[0].device)
        if stream.cuda_stream not in self._known:
            for tensor in self._tensors:
                tensor.record_stream(stream)
            self._known.add(stream.cuda_stream)
