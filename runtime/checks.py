"""Checks of arguments that functions of every kind have: options, names, devices, dense tensors, and graph captures."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from codegen.wording import one_line, shown
from runtime.errors import ArgumentError

FIRST_CALL = "the first call of a kind compiles and loads its kernel"


def check_flag(name: str, value: Any) -> None:
    """Check an option that is on or off.

    Raises:
        ArgumentError: for anything but True and False.
    """
    if not isinstance(value, bool):
        raise ArgumentError(name, f"is {shown(value)}, expected True or False")


def check_word(name: str, value: Any, allowed: Collection[str]) -> None:
    """Check an option that is one of some words.

    Raises:
        ArgumentError: with those that are allowed.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(name, f"is {shown(value)}, expected {' or '.join(allowed)}")


def check_dense(name: str, tensor: Any) -> None:
    """Check that an argument is a dense tensor, of one shape.

    Raises:
        ArgumentError: for anything else.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, f"is {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_nested:
        what = "is a nested tensor" if tensor.is_nested else f"has layout {tensor.layout}"
        raise ArgumentError(name, f"{what}, expected a dense tensor")


def check_dim(name: str, dim: Any, tensor: torch.Tensor) -> None:
    """Check the number of a dimension of a tensor, which counts back from the last one if it is negative.

    Raises:
        ArgumentError: for one that the tensor does not have.
    """
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(name, f"is {shown(dim)}, the tensor has {tensor.dim()} dimensions")


def named_device(name: str, device: Any) -> torch.device:
    """A device, which need not exist.

    Args:
        name: of the argument.
        device: a ``torch.device``, its name or the number of a CUDA device.

    Raises:
        ArgumentError: for what torch knows no device by.
    """
    if isinstance(device, torch.device):
        return device
    reason = ""
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            return torch.device("cuda", device)
        if isinstance(device, str):
            return torch.device(device)
    except (RuntimeError, OverflowError, ValueError) as error:  # numbers out of range, and unknown names
        reason = f": {one_line(str(error))}"
    raise ArgumentError(name, f"is {shown(device)}, expected a device such as 'cuda:0'{reason}")


def present_device(name: str, device: Any) -> torch.device:
    """Return a device that tensors can be made on; fake ones, and those of a trace, can on all.

    Raises:
        ArgumentError: as ``named_device``, and for a CUDA device that torch does not see.
    """
    found = named_device(name, device)
    # Dynamo cannot trace the depth of the stack of modes: what it compiles must not come to it.
    if found.type != "cuda" or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return found
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise ArgumentError(name, f"is {shown(device)}, torch sees {count} CUDA devices")
    return found


def refuse_capture(argument: str, device: torch.device | None, reason: str = FIRST_CALL) -> None:
    """Refuse what a CUDA graph cannot have in it, while one captures the current stream of a device.

    Args:
        argument: to be named.
        device: of the call's tensors, which need not be torch's current one; None: that one. Only CUDA devices capture.
        reason: why nothing can be captured yet.

    Raises:
        ArgumentError: if that stream is being captured.
    """
    if not torch.cuda.is_initialized() or (device is not None and device.type != "cuda"):
        return
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise ArgumentError(argument, f"is in a CUDA graph capture, and {reason}: make one before the capture")
