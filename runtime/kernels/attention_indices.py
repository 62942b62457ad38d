"""Index tensors of attention calls: their order, their types and shapes, and the parameters that describe them."""

from __future__ import annotations

from typing import Any

import torch

from codegen.patterns import IndexTensor
from codegen.problem import blocks_of
from codegen.spec import AttentionSpec
from runtime.checks import check_dense
from runtime.errors import ArgumentError
from runtime.kernels.arguments import check_shape, shape_words
from runtime.kernels.index_values import check_index_values


class IndexArguments:
    """The index tensors that kernels of a spec take.

    Attributes:
        spec: the spec of the forward kernel; of a gradient that with the same pattern.
        names: of the tensors, in order.
    """

    def __init__(self, spec: AttentionSpec, stem: str, others: tuple[str, ...]) -> None:
        """Take over what messages name: the kernel, and the other arguments that are passed by name."""
        self.spec, self._stem, self._others = spec, stem, others
        self._indices = spec.index_tensors
        self.names = tuple(tensor.name for tensor in self._indices)

    def gather(self, indices: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Index tensors in order, given by place or by name."""
        names = self.names
        for name in named:
            if name not in names:
                allowed = ", ".join([*names, *self._others])
                raise ArgumentError(name, f"is not an argument of {self._stem}; allowed: {allowed}")
            if name in names[: len(indices)]:
                raise ArgumentError(name, "is given twice")
        return (*indices, *(named.get(name) for name in names[len(indices) :]))

    def check(self, q: torch.Tensor, indices: tuple[Any, ...]) -> dict[str, int | float]:
        """Check the index tensors' types and shapes; return the kernel parameters that describe them."""
        if len(indices) > len(self._indices):
            names = ", ".join(t.name for t in self._indices) or "none"
            raise ArgumentError("indices", f"{len(indices)} index tensors were given; this kernel takes: {names}")
        given = dict(zip((t.name for t in self._indices), indices, strict=False))
        optional = [t.name for t in self._indices if t.optional]
        if len({given.get(name) is None for name in optional}) > 1:
            raise ArgumentError(" and ".join(optional), "belong together: pass both or neither")
        values: dict[str, int | float] = {}
        sequences = self._sequences_of(given)
        for spec in self._indices:
            tensor = given.get(spec.name)
            if tensor is None and not spec.optional and not spec.alone:
                how = "; prepare(kv_indices, kv_len) finds it" if spec.name == "query_order" else ""
                raise ArgumentError(
                    spec.name, f"is missing: int32 ({shape_words(self._expected(spec, q, sequences))}){how}"
                )
            values |= self._describe(spec, tensor, q, sequences)
        return values

    def _describe(self, spec: IndexTensor, tensor: Any, q: torch.Tensor, sequences: int) -> dict[str, int | float]:
        names = [f"{spec.name}_{axis}_stride" for axis in spec.strided_axes]
        length = {f"{spec.name}_length": 0} if "any" in spec.dims else {}
        if tensor is None:
            return {**dict.fromkeys(names, 0), **length}
        check_dense(spec.name, tensor)
        if tensor.device != q.device:
            raise ArgumentError(spec.name, f"is on {tensor.device}, q is on {q.device}")
        if tensor.dtype != torch.int32:
            raise ArgumentError(spec.name, f"is {tensor.dtype}, expected torch.int32")
        check_shape(spec.name, tensor.shape, self._expected(spec, q, sequences))
        if len(spec.dims) >= 4:
            if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise ArgumentError(spec.name, f"has stride {tensor.stride(-1)} in its last dimension, expected 1")
            if length:
                length = {f"{spec.name}_length": tensor.shape[3]}
        if spec.dims == ("bounds",):
            return self._describe_bounds(spec.name, tensor)
        strides = [
            0 if size == 1 else stride for size, stride in zip(tensor.shape[:2], tensor.stride()[:2], strict=True)
        ]
        return {**dict(zip(names, (*strides, *tensor.stride()[2 : len(names)]), strict=True)), **length}

    @staticmethod
    def _describe_bounds(name: str, tensor: torch.Tensor) -> dict[str, int | float]:
        """Check the bounds of packed sequences; their number is not a parameter of its own."""
        if tensor.shape[0] < 2:
            raise ArgumentError(name, f"has {tensor.shape[0]} entries, expected 2 or more: the sequences and one more")
        if tensor.stride(0) != 1:
            raise ArgumentError(name, f"has stride {tensor.stride(0)}, expected 1: pass {name}.contiguous()")
        return {}

    def sequences(self, indices: tuple[Any, ...]) -> int:
        """Packed sequences of a call whose index tensors are checked; 0 where sequences are padded.

        Raises:
            ArgumentError: if the bounds in q and in k are of different numbers of sequences.
        """
        given = [t for spec, t in zip(self._indices, indices, strict=False) if spec.dims == ("bounds",)]
        if not given:
            return 0
        of_q, of_k = (int(tensor.shape[0]) for tensor in given)
        if of_q != of_k:
            raise ArgumentError("cu_seqlens_k", f"has {of_k} entries, cu_seqlens_q has {of_q}: pass as many")
        return of_q - 1

    def _expected(self, spec: IndexTensor, q: torch.Tensor, sequences: int) -> list[tuple[str, tuple[int, ...] | None]]:
        sizes: dict[str | int, tuple[int, ...] | None] = {
            "batch": tuple(sorted({1, q.shape[0]})),
            "heads": tuple(sorted({1, q.shape[1] // self.spec.pack_gqa})),
            "query_blocks": (self._query_blocks(q, sequences),),
            "any": None,
            "bounds": None,
        }
        labels: dict[str | int, str] = {"heads": f"heads / {self.spec.pack_gqa}"} if self.spec.pack_gqa > 1 else {}
        if spec.of_entries:
            labels["any"] = f"entries of {spec.of_entries}"
        fixed = "words" if spec.of_entries else "k"
        return [(fixed, (dim,)) if isinstance(dim, int) else (labels.get(dim, dim), sizes[dim]) for dim in spec.dims]

    def _sequences_of(self, given: dict[str, Any]) -> int:
        """Packed sequences by the shape of their bounds, which may not be checked yet; 0 for padded sequences."""
        bounds = given.get("cu_seqlens_q") if self.spec.layout == "varlen" else None
        return max(0, bounds.shape[0] - 1) if isinstance(bounds, torch.Tensor) and bounds.dim() == 1 else 0

    def _query_blocks(self, q: torch.Tensor, sequences: int) -> int:
        block = self.spec.pattern.fixed_block
        return 0 if block is None else blocks_of(q.shape[2], sequences, block.q)

    def _limit(self, spec: IndexTensor, q: torch.Tensor, k: torch.Tensor, given: dict[str, torch.Tensor]) -> int:
        """Exclusive upper bound of the values of an index tensor, one of those ``given``."""
        if spec.upper == "kv_len":
            return int(k.shape[2]) + 1
        if spec.upper == "query_blocks":
            return self._query_blocks(q, self._sequences_of(given))
        if spec.upper == "key_blocks":
            block = self.spec.pattern.fixed_block
            assert block is not None
            return -(-int(k.shape[2]) // block.kv)
        counted = (each.name for each in self._indices if spec.upper in (each.name, each.of_entries))
        return min(int(given[name].shape[3]) for name in counted) + 1

    def check_values(self, q: torch.Tensor, k: torch.Tensor, indices: tuple[Any, ...]) -> None:
        """Check the values of the index tensors (synchronizes)."""
        given = {spec.name: tensor for spec, tensor in zip(self._indices, indices, strict=False) if tensor is not None}
        checked = [spec for spec in self._indices if spec.name in given and spec.upper]
        limits = {spec.name: self._limit(spec, q, k, given) for spec in checked}
        check_index_values(self._indices, given, limits)
