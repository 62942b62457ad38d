"""Launches of earlier calls, found by options and by what tensors are like, so that no call checks the same twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from runtime.kernels.arguments import call_key

Launch = Callable[[tuple[torch.Tensor, ...]], Any]
"""Launches with tensors like those of an earlier call; returns the result, or None where a call must be checked."""
Alike = Callable[..., bool]
"""Whether tensors are like the first ones, in order."""
KEYS_KEPT = 256
LAUNCHES_KEPT = 4  # of a key: tensors of one shape differ in little else
_stride = torch.Tensor.stride
_compiled_guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def alike(tensors: Sequence[torch.Tensor]) -> Alike:
    """A check that later tensors have the types, dtypes, devices, sizes, strides and gradient flags of these.

    torch.compile checks the inputs of compiled regions by the same class of torch, which takes a fifth of the time of
    ``call_key``. It keeps no tensor alive. It also compares dispatch keys, those of the thread's modes included, and
    takes a tensor that is given twice for unlike, so that False may mean no difference.

    Args:
        tensors: dense tensors.

    Returns:
        A function of as many dense tensors; others would end the process.
    """
    if _compiled_guards is None:
        return _by_key(tensors)
    found: Alike = _compiled_guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return found


def _by_key(tensors: Sequence[torch.Tensor]) -> Alike:
    """The same check in Python, for versions of torch without that class."""
    first = call_key(*tensors)

    def check(*others: torch.Tensor) -> bool:
        return first is not None and call_key(*others) == first

    return check


class Launches:
    """Launches of earlier calls. Threads may share it: what is kept of a key is replaced, never changed.

    Keys have all that decides about a launch beside its tensors. All launches are forgotten when there are too many.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[tuple[Alike, Launch], ...]] = {}

    def find(self, key: Any, tensors: tuple[torch.Tensor, ...]) -> Launch | None:
        """The launch of an earlier call of the same key with tensors like these; None without one.

        Raises:
            RuntimeError, TypeError: for an argument that is no dense tensor, which the checks of a call name.
        """
        kept = self._kept.get(key)
        if kept is None:
            return None
        tuple(map(_stride, tensors))  # refuses nested, sparse and opaque tensors, which a compiled check must not meet
        for like, launch in kept:
            if like(*tensors):
                return launch
        return None

    def keep(self, key: Any, tensors: tuple[torch.Tensor, ...], launch: Launch | None) -> None:
        """Keep the launch of a call; None: calls like it have none, and ``find`` returns one that does nothing.

        Nothing is kept of a call that is given one tensor twice, as ``alike`` would not find it again.
        """
        if len(set(map(id, tensors))) < len(tensors):
            return
        if len(self._kept) >= KEYS_KEPT and key not in self._kept:
            self._kept.clear()
        first = (alike(tensors), _nothing if launch is None else launch)
        self._kept[key] = (first, *self._kept.get(key, ())[: LAUNCHES_KEPT - 1])

    def clear(self) -> None:
        """Forget all launches."""
        self._kept.clear()


def _nothing(tensors: tuple[torch.Tensor, ...]) -> None:
    """The launch of calls that are checked each time."""
