"""Calls of kernels for attention over lists of keys, with many queries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from codegen.plan import Plan
from codegen.problem import KeyListsShape, LaunchArgs
from codegen.spec import KeyListsForwardSpec
from runtime.driver.allocate import allocator, contiguous
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.streams import current_stream
from runtime.driver.workspace import Memory, reserve
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    call_key,
    check_addresses,
    check_memory,
    check_output,
    check_scale,
    check_shape,
    check_strides,
    check_tensor,
    row_strides,
    written,
)
from runtime.kernels.attention import AttentionResult
from runtime.kernels.bound_call import BoundCall
from runtime.kernels.gradient_statistics import LOG2_E
from runtime.kernels.key_lists_backward import MOST, check_indices

PARTS = {"parts": "earlier_parts", "part_lse": "earlier_lse"}
"""Workspaces of the parts of a slice, and of those of the slices before."""


def enqueue_slices(
    loaded: LoadedKernel,
    launches: Sequence[Signature],
    addresses: dict[str, int],
    device: torch.device,
    *,
    memory: Memory,
    sizes: Mapping[str, int],
) -> None:
    """Launch the slices of a call on torch's current stream.

    They share their workspaces. Of parts there are those of three slices: a launch writes its own, and combines those
    of the slice before, while the launch before it may still combine older ones.

    Args:
        loaded: the kernel.
        launches: signature of each slice.
        addresses: addresses of the call's tensors by name; workspaces are added.
        device: device of the tensors; its primary context is current.
        memory: workspaces of the call.
        sizes: bytes of each workspace, by name.
    """
    held = reserve(device, current_stream(device), memory, addresses)
    rings = {}
    for mine, others in PARTS.items():
        rings[mine, others] = addresses[mine], addresses[others], addresses[others] + sizes[mine]
    for i, launch in enumerate(launches):
        for (mine, earlier), ring in rings.items():
            addresses[mine], addresses[earlier] = ring[i % len(ring)], ring[(i - 1) % len(ring)]
        enqueue(loaded, launch, addresses, device, prologue=i == 0)
    del held  # kept until here: freed memory could be allocated again


def arguments_of_slices(plan: Plan, shape: KeyListsShape) -> list[LaunchArgs]:
    """Launch arguments of each slice of a call.

    Raises:
        ArgumentError: if there are too many.
    """
    entries = shape.kv_heads * shape.tokens * shape.list_length
    if entries >= MOST:
        raise ArgumentError("lists", f"has {entries} entries of all heads, expected less than {MOST}")
    slices = plan.problem(shape).launches
    args = [plan.problem(replace(shape, slice=i)) for i in range(slices)]
    chunks, tiles = sum(of_slice.tiles for of_slice in args), slices * shape.kv_heads * args[0].numbers["tiles"]
    if max(chunks, tiles, args[0].prologue_grid) >= MOST:
        raise ArgumentError("q", f"has {shape.tokens} tokens: 2^31 thread blocks or more, which is too many")
    return args


def list_strides(indices: Mapping[str, Any]) -> dict[str, int]:
    """Strides of lists and counts by kernel parameter; lists that all heads share have one head."""
    found: dict[str, int] = {}
    for name in ("lists", "counts"):
        tensor = indices[name]
        of_head, of_row = (0, 0) if tensor is None else tensor.stride()[:2]
        found |= {f"{name}_head_stride": 0 if tensor is None or tensor.shape[0] == 1 else of_head}
        found |= {f"{name}_row_stride": of_row}
    return found


class _Bound(NamedTuple):
    """What later calls of a signature need: workspaces of a call, and signatures of its launches after the first."""

    memory: Memory
    sizes: Mapping[str, int]
    launches: tuple[Signature, ...]


class KeyListsForwardKernel(BoundCall[KeyListsForwardSpec]):
    """Attention of packed sequences in which each query has a list of key blocks.

    Calls run on torch's current stream, do not synchronize and can be captured in a CUDA graph. The same arguments give
    the same bits in every call.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    _argument_names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "lists")

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        lists: torch.Tensor,
        counts: torch.Tensor | None = None,
        scale: float | None = None,
        out: torch.Tensor | None = None,
    ) -> AttentionResult:
        """Compute attention.

        Args:
            q: (tokens, heads, head_dim), the spec's dtype; the last dimension contiguous, other strides any multiple of
                16 bytes. heads is the spec's group times kv_heads.
            k: (key tokens, kv_heads, head_dim).
            v: as k.
            cu_seqlens_q: int32 (sequences + 1,), contiguous: where each sequence begins in q, then the end of the last.
            cu_seqlens_k: the same of k and v.
            lists: int32 (kv_heads or 1, tokens, entries): the key blocks that each query sees.
            counts: int32 (kv_heads or 1, tokens): entries of each list that count, from the first one on.
            scale: softmax scale, from 1e-37 to 1e38; by default 1 / sqrt(head_dim).
            out: (tokens, heads, head_dim), where to write the result.

        Returns:
            The result, 0 for a query without keys, and the log-sum-exp, minus infinity for such a query. Tokens of no
            sequence are not written.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        indices = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "lists": lists, "counts": counts}
        if is_elsewhere(q):
            with entered(q.device.index):
                return self(q, k, v, **indices, scale=scale, out=out)  # type: ignore[arg-type, unused-ignore]
        given = {"q": q, "k": k, "v": v, "out": out}
        key = (scale, call_key(*given.values(), *indices.values()))
        signature = self._bound(key)
        if signature is None:
            signature = self._signatures.keep(key, self._check(given, indices, scale))
        bound: _Bound = signature.extra
        allocate, (tokens, heads, _) = allocator(q.device), q.shape
        made = {
            "out": allocate(*contiguous(q.shape), q.dtype) if out is None else written(out),
            "lse": allocate(*contiguous((heads, tokens)), torch.float32),
        }
        tensors = {"q": q, "k": k, "v": v, **made, **indices}
        addresses = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
        check_addresses({name: addresses[name] for name in ("q", "k", "v", *made)})
        enqueue_slices(
            self._loaded, (signature, *bound.launches), addresses, q.device, memory=bound.memory, sizes=bound.sizes
        )
        return AttentionResult(made["out"], made["lse"])

    def _check(self, given: dict[str, Any], indices: dict[str, Any], scale: Any) -> Signature:
        """Check a call of a new signature and prepare its launches."""
        self._check_operands(given)
        q, k = given["q"], given["k"]
        tokens, _, d = q.shape
        key_tokens, kv_heads, _ = k.shape
        check_indices(indices, q, kv_heads)
        if indices["lists"].shape[2] > 1 and indices["lists"].stride(2) != 1:
            raise ArgumentError("lists", f"has stride {indices['lists'].stride(2)} between entries, expected 1")
        sequences, list_length = indices["cu_seqlens_q"].shape[0] - 1, indices["lists"].shape[2]
        args = arguments_of_slices(self._plan, KeyListsShape(sequences, tokens, key_tokens, kv_heads, list_length))
        factor = 1 / math.sqrt(d) if scale is None else check_scale(scale)
        out = torch.empty(q.shape, dtype=q.dtype, device="meta") if given["out"] is None else given["out"]
        views = {
            name: tensor.transpose(0, 1).unsqueeze(0)
            for name, tensor in (("q", q), ("k", k), ("v", given["v"]), ("out", out))
        }
        strides = row_strides(**views)
        names = (param.name for param in self._plan.params)
        values: dict[str, int | float] = {name: strides[name] for name in names if name in strides}
        values["scale_log2"] = factor * LOG2_E
        values |= list_strides(indices)
        maps = {name: (tuple(view.shape), view.stride()) for name, view in views.items()}
        check_memory(**{name: tensor for name, tensor in given.items() if tensor is not None})
        later = tuple(self._signature(q.device, of_slice, values, maps) for of_slice in args[1:])
        return self._signature(q.device, args[0], values, maps, _Bound(Memory.of(args[0]), args[0].scratch, later))

    def _check_operands(self, given: dict[str, Any]) -> None:
        """Check types, shapes and strides of q, k and v, and of out if it is given."""
        q, k, group = given["q"], given["k"], self.spec.group
        check_tensor("q", q, self._dtype, 3)
        for name in ("k", "v"):
            check_tensor(name, given[name], self._dtype, 3, q.device)
        tokens, heads, d = q.shape
        if d != self.spec.head_dim:
            raise ArgumentError("q", f"has head_dim {d}, expected {self.spec.head_dim}")
        if heads % group:
            raise ArgumentError("q", f"has {heads} heads, expected a multiple of the kernel's group of {group}")
        of_k = [("key tokens", None), ("kv_heads", (heads // group,)), ("head_dim", (d,))]
        check_shape("k", k.shape, of_k)
        check_shape("v", given["v"].shape, [("key tokens", (k.shape[0],)), *of_k[1:]])
        for name in ("q", "k", "v"):
            check_strides(name, given[name])
        if given["out"] is not None:
            out = given["out"]
            check_tensor("out", out, self._dtype, 3, q.device)
            check_shape("out", out.shape, [("tokens", (tokens,)), ("heads", (heads,)), ("head_dim", (d,))])
            check_strides("out", out)
            check_output("out", out)
