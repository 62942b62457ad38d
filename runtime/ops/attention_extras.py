"""Optional tensors and numbers of an attention call: one value from the public function to the kernel.

A new one is a field of ``Extras`` and, if it selects the kernel, of ``Features``. Calls, operators, autograd and ranks
pass both on as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from runtime.ops.block_sizes import Tensors

TENSORS: Final = 2
"""Fields of ``Extras`` that are tensors: the first ones."""
TENSOR_SCHEMA = "Tensor? sink, Tensor? kv_lengths"
"""These fields as arguments of torch's operators."""
NUMBER_SCHEMA = "float? scale=None, float? softcap=None"
"""The other fields, as keyword arguments of torch's operators."""


class Features(NamedTuple):
    """Properties of the extras that select a kernel: fields of its spec.

    Attributes:
        softcap: cap of the logits.
        sink: whether the call has sinks.
        kv_lengths: whether it has lengths.
    """

    softcap: float | None = None
    sink: bool = False
    kv_lengths: bool = False

    def fields(self) -> dict[str, Any]:
        """Fields of the spec, without those that are off."""
        softcap = None if self.softcap is None else float(self.softcap)
        return {name: value for name, value in self._replace(softcap=softcap)._asdict().items() if value}


class Extras(NamedTuple):
    """Optional tensors and numbers of a call, None if not given. Tensors come first; of these, ``sink`` is the first.

    Attributes:
        sink: float32 (heads,), a logit per head that is added to the softmax sum of its rows. It has a gradient.
        kv_lengths: int32 (batch or 1,), number of keys of each batch.
        scale: softmax scale.
        softcap: cap of the logits.
    """

    sink: torch.Tensor | None = None
    kv_lengths: torch.Tensor | None = None
    scale: float | None = None
    softcap: float | None = None

    @classmethod
    def of(cls, tensors: Sequence[Any], options: dict[str, Any]) -> Extras:
        """The extras of an operator's arguments: tensors in order, and numbers, which are removed from ``options``."""
        return cls(*tensors, *(options.pop(name, None) for name in cls._fields[TENSORS:]))

    def features(self) -> Features:
        """The properties that select a kernel."""
        return Features(self.softcap, self.sink is not None, self.kv_lengths is not None)

    def kind(self) -> tuple[Any, ...]:
        """Key of ``features``, which takes less time."""
        return (self.softcap, self.sink is None, self.kv_lengths is None)

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The tensors by name."""
        return dict(zip(self._fields[:TENSORS], self[:TENSORS], strict=True))

    def numbers(self) -> dict[str, float | None]:
        """The numbers by name."""
        return dict(zip(self._fields[TENSORS:], self[TENSORS:], strict=True))

    def options(self, scale: float | None) -> dict[str, Any]:
        """Keyword arguments of a kernel; ``scale`` is the default scale."""
        return {"scale": scale if self.scale is None else self.scale, "sink": self.sink}

    def indices(self, lists: Tensors, count: int) -> Tensors:
        """Index tensors of a kernel that has ``count`` of them: the given ones, and ``kv_lengths`` as the last."""
        if self.kv_lengths is None:
            return lists
        return (*lists, *(None,) * (count - 1 - len(lists)), self.kv_lengths)
