"""Checks of the arguments of ``block_sparse_attention``: before a kernel is chosen, and after a kernel has refused."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from codegen.scored_pattern import ScoredPattern
from runtime.checks import check_dense
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    FP8_DTYPES,
    KV_AXES,
    NO_TANGENT,
    Q_AXES,
    check_keys,
    check_output,
    check_shape,
    check_sizes,
    check_strides,
    check_tensor,
    has_tangent,
)
from runtime.kernels.index_values import check_index, check_index_values
from runtime.ops.attention_choice import DTYPES, LIST_RANK, kernel_head_dim
from runtime.ops.attention_extras import Extras
from runtime.ops.block_sizes import Tensors
from runtime.patterns import split_tensors

RANK = 4  # of q, k and v


def refuse_transformed(
    tensors: Sequence[Any],
    names: str = "q, k, v and pattern",
    mapped: str = "pass the batch as a dimension, (batch, heads, length, head_dim)",
) -> None:
    """Refuse tensors that stand for several, for parts on several devices, or that have a tangent.

    Args:
        tensors: arguments of a call.
        names: of the arguments.
        mapped: the alternative to a mapped one.

    Raises:
        ArgumentError: for one under ``torch.vmap``, of forward-mode differentiation, and for a DTensor.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        if torch._C._functorch.is_batchedtensor(tensor):
            raise ArgumentError(names, f"one of them is mapped by torch.vmap: {mapped}")
        if has_tangent(tensor):
            raise ArgumentError(names, f"one of them {NO_TANGENT}")
        if distributed is not None and isinstance(tensor, distributed.DTensor):
            reason = "is a DTensor: pass each rank's part, tensor.to_local()"
            raise ArgumentError(names, f"one of them {reason}")


def check_types(q: Any, k: Any, v: Any, tensors: Tensors, scored: ScoredPattern, *, extras: Extras) -> None:
    """Check types and devices, of tensors whose sizes may not be known.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_operand(name, tensor, q)
    indices, aux = split_tensors(scored, tuple(tensors))
    for tensor in indices:
        if tensor is not None:
            check_index("pattern", tensor, q.device)
    for name, tensor in aux.items():
        if tensor is None or tensor.device != q.device:
            has = "is missing" if tensor is None else f"is on {tensor.device}, q is on {q.device}"
            raise ArgumentError(f"aux[{name!r}]", has)
    extras.check_types(q)


def _check_operand(name: str, tensor: Any, q: Any) -> None:
    """Check the type, rank and device of q, k or v."""
    check_dense(name, tensor)
    if tensor.dtype not in DTYPES:
        how = ": FP8 needs its scales (sparse_kernel_codegen.quantized_operands)" if tensor.dtype in FP8_DTYPES else ""
        raise ArgumentError(name, f"is {tensor.dtype}, expected torch.float16 or torch.bfloat16{how}")
    if tensor.dtype != q.dtype:
        raise ArgumentError(name, f"is {tensor.dtype}, q is {q.dtype}: pass one type")
    if tensor.device != q.device:
        raise ArgumentError(name, f"is on {tensor.device}, q is on {q.device}")
    if tensor.dim() != RANK:
        raise ArgumentError(name, f"has {tensor.dim()} dimensions {tuple(tensor.shape)}, expected {RANK}")


def check_operands(q: Any, k: Any, v: Any, *, on_gpu: bool = True) -> None:
    """Check q, k and v against each other.

    Args:
        q, k, v: the operands.
        on_gpu: whether they must be there, and such as a kernel can address.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_operand(name, tensor, q)
        if on_gpu:  # gradients are the operator's, whatever a kernel alone says of them
            check_tensor(name, tensor.detach(), q.dtype, RANK, q.device)
    kernel_head_dim(q.shape[3])
    check_keys(q, k)
    check_sizes("v", v, KV_AXES, k.shape)
    for name, tensor in (("q", q), ("k", k), ("v", v)) if on_gpu else ():
        check_strides(name, tensor)


def read_tensors(
    q: Any, k: Any, v: Any, tensors: Tensors, aux: dict[str, torch.Tensor], *, extras: Extras
) -> dict[str, Any]:
    """All tensors that a call reads, by their names in error messages."""
    listed = {f"the pattern's tensor {place}": tensor for place, tensor in enumerate(tensors)}
    of_aux = {f"aux[{name!r}]": tensor for name, tensor in aux.items()}
    return {"q": q, "k": k, "v": v, **listed, **of_aux, **extras.tensors()}


def check_lists(scored: ScoredPattern, tensors: Tensors, q: torch.Tensor, k: torch.Tensor) -> None:
    """Check the index tensors of a pattern.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    block, heads, kv_heads = scored.block, q.shape[1], k.shape[1]
    sizes: dict[str | int, tuple[int, ...] | None] = {
        "batch": tuple(sorted({1, q.shape[0]})),
        "heads": tuple(sorted({1, *(n for n in range(kv_heads, heads + 1, kv_heads) if heads % n == 0)})),
    }
    if block is not None:
        sizes["query_blocks"] = (-(-q.shape[2] // block.q),)
    for spec, tensor in zip(scored.index_tensors, tensors, strict=False):
        if tensor is None:
            if spec.optional:
                continue
            raise ArgumentError(spec.name, "is missing: it is a tensor of the pattern")
        check_index(spec.name, tensor, q.device)
        if block is not None and len(spec.dims) >= LIST_RANK <= tensor.dim():
            _check_query_blocks(spec.name, tensor, q.shape[2], block.q)
        expected = [(str(dim), (dim,) if isinstance(dim, int) else sizes.get(dim)) for dim in spec.dims]
        check_shape(spec.name, tensor.shape, expected)


def _check_query_blocks(name: str, tensor: torch.Tensor, q_len: int, queries: int) -> None:
    """Check that lists are of as many query blocks as q has."""
    blocks = -(-q_len // queries)
    if tensor.shape[2] != blocks:
        those = f"q has {q_len} queries: {blocks} blocks of {queries}"
        raise ArgumentError(
            name, f"has lists of {tensor.shape[2]} query blocks, {those}; other lengths or block sizes?"
        )


def check_out(out: Any, q: torch.Tensor, inputs: dict[str, Any], dtype: torch.dtype | None = None) -> None:
    """Check a tensor to write into, of ``dtype``, by default that of q.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    check_tensor("out", out, q.dtype if dtype is None else dtype, RANK, q.device)
    check_sizes("out", out, Q_AXES, q.shape)
    check_strides("out", out)
    check_output("out", out)
    check_no_overlap(out, inputs)


def overlaps(out: torch.Tensor, inputs: Iterable[torch.Tensor | None]) -> bool:
    """Whether a dense tensor and one of others share memory; ``check_no_overlap`` names it, and takes longer."""
    first, end = _range(out)
    return any(each is not None and each.data_ptr() < end and first < _range(each)[1] for each in inputs)


def check_no_overlap(out: Any, inputs: dict[str, Any]) -> None:
    """Check that a tensor to write into shares no memory with what is read; what is no dense tensor is not looked at.

    Raises:
        ArgumentError: naming the input, if their ranges of memory overlap.
    """
    check_dense("out", out)
    first, end = _range(out)
    for name, tensor in inputs.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_nested:
            continue
        # Addresses of different devices differ.
        if tensor.data_ptr() < end and first < _range(tensor)[1]:
            raise ArgumentError("out", f"overlaps {name} in memory; it must lie elsewhere")


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of a tensor's first byte, and of the byte after its last one."""
    begins = tensor.data_ptr()
    if tensor.is_contiguous():
        return begins, begins + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begins, begins + (last + 1) * tensor.element_size()


def check_values(scored: ScoredPattern, tensors: Tensors, lengths: tuple[int, int], extras: Extras) -> None:
    """Check the values of index tensors and extras, of lists that a kernel does not get as they are (synchronizes).

    Raises:
        ArgumentError: for the first value that is wrong.
    """
    block = scored.block
    given = {spec.name: t for spec, t in zip(scored.index_tensors, tensors, strict=False) if t is not None}
    limits = {"kv_len": lengths[1] + 1}
    limits |= {} if block is None else {"key_blocks": -(-lengths[1] // block.kv)}
    limits |= {name: t.shape[3] + 1 for name, t in given.items() if t.dim() > LIST_RANK}
    indices = [spec for spec in scored.index_tensors if spec.name in given and spec.upper in limits]
    check_index_values(indices, given, {spec.name: limits[spec.upper] for spec in indices})
    extras.check_values(limits)


def check_overflow(overflow: torch.Tensor | None) -> None:
    """Check that lists were made with enough entries (synchronizes).

    Raises:
        ArgumentError: if it did.
    """
    if overflow is None:
        return
    check_dense("overflow", overflow)
    if overflow.dtype != torch.int32 or overflow.is_meta:
        raise ArgumentError("overflow", f"is {overflow.dtype} on {overflow.device}, expected torch.int32 on a GPU")
    if bool((overflow != 0).any()):
        raise ArgumentError("pattern", "has lists that are cut off: they were made with too few entries (max_blocks)")
