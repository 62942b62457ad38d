"""Launches of earlier calls, by options and tensor properties, so that repeated calls skip the checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from runtime.kernels.arguments import call_key

Launch = Callable[[tuple[torch.Tensor, ...]], Any]
"""Launches with tensors like an earlier call's; returns the result, or None if the call needs checks."""
Alike = Callable[..., bool]
"""Whether tensors match the first ones, in order."""
KEYS_KEPT = 256
LAUNCHES_KEPT = 4  # per key: tensors of one shape have few other differences
_stride = torch.Tensor.stride
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_compiled_guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def alike(tensors: Sequence[torch.Tensor]) -> Alike:
    """Build a check that later tensors have the types, dtypes, devices, sizes, strides and gradient flags of these.

    torch.compile guards the inputs of compiled regions with the same class of torch, which takes a fifth of the time of
    ``call_key``. It keeps no tensor alive. It also compares dispatch keys, including the thread's modes, and reports a
    mismatch if a tensor is given twice. A result of False can therefore be a false alarm.

    Args:
        tensors: dense tensors.

    Returns:
        A function of the same number of dense tensors; other arguments would crash the process.
    """
    if _compiled_guards is None:
        return _by_key(tensors)
    found: Alike = _compiled_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return found


def _by_key(tensors: Sequence[torch.Tensor]) -> Alike:
    """Python version of the check, for versions of torch without that class."""
    first = call_key(*tensors)

    def check(*others: torch.Tensor) -> bool:
        return first is not None and call_key(*others) == first

    return check


class Launches:
    """Cache of launches of earlier calls. Threads may share it: the entry of a key is replaced, never modified.

    A key contains everything except the tensors that determines a launch. A full cache is cleared.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[tuple[Alike, Launch], ...]] = {}

    def find(self, key: Any, tensors: tuple[torch.Tensor, ...]) -> Launch | None:
        """Find the launch of an earlier call with the same key and matching tensors; None without one.

        Raises:
            RuntimeError, TypeError: if an argument is not a dense tensor. The checks of the call then name it.
        """
        kept = self._kept.get(key)
        if kept is None:
            return None
        tuple(map(_stride, tensors))  # refuses nested, sparse and opaque tensors, which would crash a compiled check
        for like, launch in kept:
            if like(*tensors):
                return launch
        return None

    def keep(self, key: Any, tensors: tuple[torch.Tensor, ...], launch: Launch | None) -> None:
        """Store the launch of a call. None: such calls have none, and ``find`` returns a launch that does nothing.

        Calls with one tensor given twice are not stored, because ``alike`` would not match them. Calls with a tensor
        that a transform of torch.func has left behind are not stored, because it has no memory of its own.
        """
        if len(set(map(id, tensors))) < len(tensors) or any(map(is_wrapped, tensors)):
            return
        if len(self._kept) >= KEYS_KEPT and key not in self._kept:
            self._kept.clear()
        first = (alike(tensors), _nothing if launch is None else launch)
        self._kept[key] = (first, *self._kept.get(key, ())[: LAUNCHES_KEPT - 1])

    def clear(self) -> None:
        """Clear the cache."""
        self._kept.clear()


def _nothing(tensors: tuple[torch.Tensor, ...]) -> None:
    """Launch of calls that need checks every time."""
