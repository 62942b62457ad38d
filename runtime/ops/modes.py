"""torch's modes: whether a call must go through the dispatcher, and autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

# Every call evaluates these; torch's Python functions take ten times as long.
any_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
"""Argument types that cannot be tensor subclasses."""


def is_watched() -> bool:
    """Whether a mode, a transform, a tracer or forward-mode differentiation is active."""
    if _dispatch_modes() or _function_modes() or _is_tracing() or _functorch() is not None:
        return True
    return bool(forward_ad._current_level >= 0)


def is_unwatched() -> bool:
    """Whether a call can skip the dispatcher: no mode, transform or tracer is active, and autocast is off."""
    return not (
        any_autocast()
        or _dispatch_modes()
        or _function_modes()
        or _is_tracing()
        or _functorch() is not None
        or forward_ad._current_level >= 0
    )


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast floating-point GPU tensors other than float64 to autocast's dtype if autocast is on, as SDPA does."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(
        t.to(dtype)
        if isinstance(t, torch.Tensor) and t.is_cuda and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    )
