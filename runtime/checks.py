"""Argument checks that all operators share: options, names, devices, dense tensors and graph captures."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from codegen.wording import one_line, shown
from runtime.errors import ArgumentError

FIRST_CALL = "the first call with new options compiles and loads a kernel"


def check_flag(name: str, value: Any) -> None:
    """Check a boolean option.

    Raises:
        ArgumentError: if the value is neither True nor False.
    """
    if not isinstance(value, bool):
        raise ArgumentError(name, f"is {shown(value)}, expected True or False")


def check_word(name: str, value: Any, allowed: Collection[str]) -> None:
    """Check an option that takes one of several words.

    Raises:
        ArgumentError: if the value is another one, with the allowed words.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(name, f"is {shown(value)}, expected {' or '.join(allowed)}")


def check_dense(name: str, tensor: Any) -> None:
    """Check that an argument is a dense tensor.

    Raises:
        ArgumentError: if it is not a tensor, is sparse, or is nested.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, f"is {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_nested:
        what = "is a nested tensor" if tensor.is_nested else f"has layout {tensor.layout}"
        raise ArgumentError(name, f"{what}, expected a dense tensor")


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are one object, or equal views of one."""
    if one is other:
        return True
    if one._base is None or one._base is not other._base or one.dtype != other.dtype:
        return False
    alike = one.shape == other.shape and one.stride() == other.stride()
    return bool(alike and one.storage_offset() == other.storage_offset())


def check_dim(name: str, dim: Any, tensor: torch.Tensor) -> None:
    """Normalize the index of a tensor dimension; a negative index counts from the end.

    Raises:
        ArgumentError: if the tensor does not have the dimension.
    """
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(name, f"is {shown(dim)}, but the tensor has {tensor.dim()} dimensions")


def named_device(name: str, device: Any) -> torch.device:
    """Convert an argument to a device, which need not exist.

    Args:
        name: name of the argument.
        device: a ``torch.device``, its name or the number of a CUDA device.

    Raises:
        ArgumentError: if torch does not accept it as a device.
    """
    if isinstance(device, torch.device):
        return device
    reason = ""
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            return torch.device("cuda", device)
        if isinstance(device, str):
            return torch.device(device)
    except (RuntimeError, OverflowError, ValueError) as error:  # numbers out of range and unknown names
        reason = f": {one_line(str(error))}"
    raise ArgumentError(name, f"is {shown(device)}, expected a device such as 'cuda:0'{reason}")


def present_device(name: str, device: Any) -> torch.device:
    """Convert an argument to a device that exists. Fake tensors and traces accept any device.

    Raises:
        ArgumentError: as ``named_device``, and if torch does not see the CUDA device.
    """
    found = named_device(name, device)
    # Dynamo cannot trace the depth of the mode stack, so compiled code must not reach that check.
    if found.type != "cuda" or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return found
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise ArgumentError(name, f"is {shown(device)}, torch sees {count} CUDA devices")
    return found


def refuse_capture(argument: str, device: torch.device | None, reason: str = FIRST_CALL) -> None:
    """Refuse a call that a CUDA graph cannot contain while the device's current stream is being captured.

    Args:
        argument: argument that the error names.
        device: device of the call's tensors; None: torch's current device. Only CUDA devices can capture.
        reason: why the call cannot be captured.

    Raises:
        ArgumentError: if the stream is being captured.
    """
    if not torch.cuda.is_initialized() or (device is not None and device.type != "cuda"):
        return
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise ArgumentError(argument, f"is in a CUDA graph capture, and {reason}: make one call before the capture")
