"""Optional tensors and numbers of an attention call: one value from the public function to the kernel.

A new one is a field of ``Extras``, with its checks, and, if it selects the kernel, of ``Features``. Calls, operators,
autograd and ranks pass both on as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from codegen.spec import KV_LENGTHS
from runtime.checks import check_dense
from runtime.errors import ArgumentError
from runtime.kernels.arguments import check_number, check_scale, check_shape, check_sink, check_sink_values
from runtime.kernels.index_values import check_index, check_index_values
from runtime.ops.block_sizes import Tensors

TENSORS: Final = 2
"""Fields of ``Extras`` that are tensors: the first ones."""
TENSOR_SCHEMA = "Tensor? sink, Tensor? kv_lengths"
"""These fields as arguments of torch's operators."""
NUMBER_SCHEMA = "float? scale=None, float? softcap=None"
"""The other fields, as keyword arguments of torch's operators."""
SOFTCAPS = (0.001, 1000)


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

    def check_types(self, q: torch.Tensor) -> None:
        """Check the types of tensors whose sizes may not be known.

        Raises:
            ArgumentError: for the first wrong field.
        """
        if self.sink is not None:
            _check_sink_type(self.sink)
        if self.kv_lengths is not None:
            check_index(KV_LENGTHS.name, self.kv_lengths, q.device)

    def check_tensors(self, q: torch.Tensor, *, on_gpu: bool = True) -> None:
        """Check types and sizes of the tensors of a call.

        Args:
            q: its queries.
            on_gpu: whether the tensors are on a GPU, as a kernel takes them.

        Raises:
            ArgumentError: for the first wrong field.
        """
        sink: Any = self.sink
        if sink is not None and on_gpu:  # its gradient is the operator's, as those of q, k and v
            check_sink(sink.detach() if isinstance(sink, torch.Tensor) else sink, q.shape[1], q.device)
        elif sink is not None:
            _check_sink_type(sink)
            check_shape("sink", sink.shape, [("heads", (q.shape[1],))])
        if self.kv_lengths is not None:
            check_index(KV_LENGTHS.name, self.kv_lengths, q.device)
            check_shape(KV_LENGTHS.name, self.kv_lengths.shape, [("batch", tuple(sorted({1, q.shape[0]})))])

    def check(self, q: torch.Tensor, *, on_gpu: bool = True) -> None:
        """Check numbers and tensors of a call with the queries ``q``.

        Raises:
            ArgumentError: for the first wrong field.
        """
        check_numbers(self.scale, self.softcap)
        self.check_tensors(q, on_gpu=on_gpu)

    def check_values(self, limits: Mapping[str, int]) -> None:
        """Check the values of the tensors (synchronizes).

        Args:
            limits: exclusive upper bounds of values, by ``IndexTensor.upper``.

        Raises:
            ArgumentError: for the first wrong value.
        """
        if self.kv_lengths is not None:
            given, limit = {KV_LENGTHS.name: self.kv_lengths}, {KV_LENGTHS.name: limits[KV_LENGTHS.upper]}
            check_index_values([KV_LENGTHS], given, limit)
        check_sink_values(self.sink)

    def with_softcap(self) -> Extras:
        """The extras with their softcap as a float.

        Raises:
            ArgumentError: as ``check_softcap``.
        """
        softcap = check_softcap(self.softcap)
        return self if softcap is self.softcap else self._replace(softcap=softcap)


def _check_sink_type(sink: Any) -> None:
    """Check the type of sinks on any device."""
    check_dense("sink", sink)
    if sink.dtype != torch.float32:
        raise ArgumentError("sink", f"is {sink.dtype}, expected torch.float32")


def check_softcap(softcap: Any) -> float:
    """The softcap of a call as a float.

    Raises:
        ArgumentError: unless it is a number that kernels are made for.
    """
    number = check_number("softcap", softcap)
    if not SOFTCAPS[0] <= number <= SOFTCAPS[1]:
        raise ArgumentError("softcap", f"is {softcap}, expected a number from {SOFTCAPS[0]} to {SOFTCAPS[1]}")
    return number


def check_numbers(scale: Any, softcap: Any) -> None:
    """Check the softmax scale and the softcap of a call, where they are given.

    Raises:
        ArgumentError: naming the first that is wrong.
    """
    if scale is not None:
        check_scale(scale)
    if softcap is not None:
        check_softcap(softcap)
