"""Tensors that are made once for all calls: outside of the modes of the first one, and ready for every stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


def made_once(kept: int) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Keep what a function makes of arguments that are hashed, the last of which is the device.

    What is kept are plain tensors, whatever mode a call is in (inference, fake tensors, another default device), and a
    stream that reads them need not wait for the one that has filled them. In a CUDA graph capture, where memory is the
    graph's, under fake tensors, and while a graph is made by torch.compile, nothing is kept.

    Args:
        kept: how many results are kept.
    """

    def decorate(make: Callable[..., Made]) -> Callable[..., Made]:
        @lru_cache(maxsize=kept)
        def lasting(*arguments: Any) -> Made:
            with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
                found = make(*arguments)
            if arguments[-1].type == "cuda":
                torch.cuda.current_stream(arguments[-1]).synchronize()
            return found

        @wraps(make)
        def get(*arguments: Any) -> Made:
            if torch.compiler.is_dynamo_compiling() or _is_passing(arguments[-1]):
                return make(*arguments)
            return lasting(*arguments)

        return get

    return decorate


def _is_passing(device: torch.device) -> bool:
    """Return whether what is made now is not for later calls."""
    if torch._C._len_torch_dispatch_stack() > 0:
        return True
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())
