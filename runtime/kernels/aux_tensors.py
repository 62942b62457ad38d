"""Aux tensors of attention calls: lookup tables of a spec's expressions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from codegen.expressions.bounds import MOST_POSITIONS
from codegen.expressions.nodes import SIZES, Aux
from codegen.plan import Plan
from codegen.spec import AttentionSpec, BlockMaskSpec
from runtime.checks import check_dense
from runtime.errors import ArgumentError
from runtime.expressions.dtypes import TORCH_DTYPES
from runtime.kernels.arguments import NO_TANGENT, check_shape, has_tangent


class AuxArguments:
    """The aux tensors of a kernel.

    Attributes:
        declared: the tensors that the spec declares, in the kernel's order.
        names: names of the tensors.
        params: kernel parameters for their addresses.
    """

    def __init__(self, spec: AttentionSpec | BlockMaskSpec, plan: Plan) -> None:
        self.declared = spec.aux_tensors
        self._has_expressions = bool(spec.expressions)
        self.names = tuple(tensor.name for tensor in self.declared)
        self.params = tuple(f"aux_{name}" for name in self.names)
        self._numbers = frozenset(param.name for param in plan.params)

    def check(self, q: torch.Tensor, kv_len: int, tensors: tuple[Any, ...]) -> dict[str, int | float]:
        """Check the tensors; return the kernel parameters that describe them.

        Raises:
            ArgumentError: with the tensor's name, its value and the expected one.
        """
        self.check_lengths({"q": q.shape[2], "k": kv_len})
        sizes = {"batch": q.shape[0], "heads": q.shape[1], "q_len": q.shape[2], "kv_len": kv_len}
        return self.check_sizes(sizes, q.device, tensors)

    def check_lengths(self, lengths: Mapping[str, int]) -> None:
        """Refuse a length, by argument name, for which an expression's integers could overflow."""
        for name, length in lengths.items():
            if self._has_expressions and length > MOST_POSITIONS:
                most = f"expressions of masks and scores support at most {MOST_POSITIONS}"
                raise ArgumentError(name, f"has a length of {length}; {most}")

    def check_sizes(
        self, sizes: Mapping[str, int], device: torch.device, tensors: tuple[Any, ...]
    ) -> dict[str, int | float]:
        """Check the tensors of a call without q; see ``check``.

        Args:
            sizes: sizes by name.
            device: expected device.
            tensors: the tensors in the kernel's order.
        """
        values: dict[str, int | float] = {}
        for aux, tensor in zip(self.declared, tensors, strict=True):
            values |= self._describe(aux, tensor, device, sizes)
        return values

    def _describe(self, aux: Aux, tensor: Any, device: torch.device, sizes: Mapping[str, int]) -> dict[str, int]:
        name = f"aux[{aux.name!r}]"
        check_dense(name, tensor)
        if tensor.device != device:
            raise ArgumentError(name, f"is on {tensor.device}, expected {device}: call .to({str(device)!r})")
        if tensor.dtype != TORCH_DTYPES[aux.dtype]:
            raise ArgumentError(name, f"is {tensor.dtype}, expected {TORCH_DTYPES[aux.dtype]}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(name, "requires a gradient, which this kernel does not compute: pass it with .detach()")
        if has_tangent(tensor):
            raise ArgumentError(name, NO_TANGENT)
        expected: list[tuple[str, tuple[int, ...] | None]] = [
            (str(dim), tuple(sorted({1, sizes[str(dim)]})) if dim in SIZES else (int(dim),)) for dim in aux.dims
        ]
        check_shape(name, tensor.shape, expected)
        numbers: dict[str, int] = {}
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            numbers[f"aux_{aux.name}_stride{axis}"] = 0 if size == 1 else stride
            if f"aux_{aux.name}_size{axis}" in self._numbers:
                numbers[f"aux_{aux.name}_size{axis}"] = size
        return numbers
