"""Calls of kernels for the gradients of attention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from codegen.problem import AttentionShape
from codegen.spec import AttentionBackwardSpec
from runtime.compile.compiler import Compiled
from runtime.driver.allocate import Allocate, allocator
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import NO_MEMORY
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    TMA_ALIGNMENT,
    TORCH_DTYPES,
    Signatures,
    call_key,
    check_address,
    check_scale,
    check_shape,
    check_tensor,
    used_strides,
)
from runtime.kernels.attention import Layout, layout_like
from runtime.kernels.attention_indices import IndexArguments
from runtime.kernels.gradient_rows import LOG2_E, check_lse, check_operands, fill_statistics
from runtime.prepare.transpose_lists import TransposedLists


class AttentionGradients(NamedTuple):
    """What a call of a gradient kernel returns.

    Attributes:
        dq: (batch, heads, q_len, d), the gradient of q; None from kernels of ``gradients: dkdv``.
        dk: (batch, kv_heads, kv_len, d), that of k; None from kernels of ``gradients: dq``.
        dv: that of v, likewise.
        stats: float32 (batch, heads, rows, 2), what the other kernel of the same call may be given.
    """

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    stats: torch.Tensor


class _Outputs(NamedTuple):
    """What a signature knows of what the kernel writes: the gradients by name, and the statistics."""

    gradients: dict[str, Layout]
    stats: Layout
    allocate: Allocate
    left_out: dict[str, int]


class AttentionBackwardKernel:
    """Gradients of softmax(scale * Q K^T) V over the key blocks of the spec's pattern.

    Calls run on torch's current stream, do not synchronise and can be captured in a CUDA graph. The same arguments give
    the same bits in every call.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        self.compiled = compiled
        assert isinstance(compiled.plan.spec, AttentionBackwardSpec)
        self.spec: AttentionBackwardSpec = compiled.plan.spec
        self._loaded = loaded
        self._dtype = TORCH_DTYPES[self.spec.dtype]
        self._is_dq = self.spec.gradients == "dq"
        self._listed = self.spec.pattern.fixed_block is not None
        self._arguments = IndexArguments(self.spec.forward, compiled.named.stem, ("scale", "stats", "validate"))
        self._signatures = Signatures()

    def __repr__(self) -> str:
        lists = self._arguments.names if self._is_dq else ("lists",) * self._listed
        names = ", ".join(["q", "k", "v", *lists, "out", "dout", "lse"])
        return f"<attention_backward kernel {self.compiled.named.stem}({names}) for {self.spec.arch}>"

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *indices: torch.Tensor | TransposedLists | None,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        scale: float | None = None,
        dlse: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        validate: bool = False,
    ) -> AttentionGradients:
        """Compute gradients.

        Args:
            q: (batch, heads, q_len, d), the spec's dtype; the last dimension contiguous, other strides any multiple of
                16 bytes; d is any multiple of 8 up to the spec's head_dim.
            k: (batch, kv_heads, kv_len, d); heads is a multiple of kv_heads.
            v: as k.
            indices: with ``gradients: dq`` the index tensors that the forward was given, in its order; with ``dkdv``
                their transpose (``runtime.prepare.transpose_lists``), nothing where the pattern has no lists.
            out: as q, the result of the forward.
            dout: as q, the gradient of out.
            lse: float32 (batch, heads, q_len), contiguous, the forward's log-sum-exp.
            scale: softmax scale of the forward, from 1e-37 to 1e38; by default 1 / sqrt(d).
            dlse: float32 (batch, heads, q_len), the gradient of lse, where the loss depends on it too. Torch then works
                the statistics out, which takes memory for out and dout in float32.
            stats: what the other kernel returned for the same q, out, dout, lse and dlse: it is not worked out again.
            validate: also check the values of the index tensors of ``dq``. Costs a kernel and a synchronisation.

        Returns:
            The gradients, in the layouts of q, k and v: 0 for a query without keys, and for keys that no query sees.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        if is_elsewhere(q):
            with entered(q.device.index):
                options: dict[str, Any] = {"scale": scale, "dlse": dlse, "stats": stats, "validate": validate}
                return self(q, k, v, *indices, out=out, dout=dout, lse=lse, **options)
        tensors: tuple[Any, ...] = indices
        if not self._is_dq and indices and isinstance(indices[0], TransposedLists):
            tensors = indices[0]
        if scale is not None:
            check_scale(scale)  # also so that it can be a part of a key
        key = (scale, call_key(q, k, v, out, dout, lse, dlse, stats, *tensors))
        last, signature = self._signatures.last
        if key != last:
            signature = self._signatures.find(key)
        if signature is None:
            operands = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
            checked = self._check(operands, tensors, scale=scale, dlse=dlse, stats=stats)
            signature = self._signatures.keep(key, checked)
        if validate and self._is_dq:
            self._arguments.check_values(q, k, tensors)
        outputs: _Outputs = signature.extra
        made = {name: outputs.allocate(*layout) for name, layout in outputs.gradients.items()}
        row_stats = outputs.allocate(*outputs.stats) if stats is None else stats
        given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, **made}
        addresses = {name: tensor.data_ptr() for name, tensor in given.items()}
        for name, address in addresses.items():
            if address % TMA_ALIGNMENT:
                check_address(name, address)
        addresses |= {"lse": lse.data_ptr(), "stats": row_stats.data_ptr(), **outputs.left_out}
        names = self._arguments.names if self._is_dq else ("q_offsets", "q_entries")
        addresses |= {n: t.data_ptr() for n, t in zip(names, tensors, strict=False) if t is not None}
        if dlse is not None and stats is None:
            fill_statistics(row_stats, out, dout, lse, dlse)
        enqueue(self._loaded, signature, addresses, q.device, NO_MEMORY, prologue=dlse is None and stats is None)
        return AttentionGradients(made.get("dq"), made.get("dk"), made.get("dv"), row_stats)

    def _check(
        self, operands: dict[str, Any], indices: tuple[Any, ...], *, scale: Any, dlse: Any, stats: Any
    ) -> Signature:
        """Check a call of a new signature and prepare it."""
        q, k, v, out, dout, lse = operands.values()
        check_operands(
            {name: operands[name] for name in ("q", "k", "v", "out", "dout")}, self._dtype, self.spec.head_dim
        )
        check_lse(q, lse, dlse, stats)
        batch, heads, q_len, d = q.shape
        kv_heads, kv_len = k.shape[1:3]
        block = self.spec.pattern.fixed_block
        index_values = self._arguments.check(q, indices) if self._is_dq else self._check_lists(q, k, indices)
        factor = 1 / math.sqrt(d) if scale is None else check_scale(scale)
        lists = (0, 0) if block is None else indices[0].shape[:2]
        args = self.compiled.plan.problem(AttentionShape(batch, heads, kv_heads, q_len, kv_len, *lists))
        stats_shape = (batch, heads, args.numbers["padded_q_len"], 2)
        if stats is not None:
            check_tensor("stats", stats, torch.float32, 4, q.device)
            if stats.shape != stats_shape:
                raise ArgumentError("stats", f"has shape {tuple(stats.shape)}, expected {stats_shape}: of another call")
        for count in (args.tiles, args.prologue_grid):
            if count >= 2**31:
                raise ArgumentError("q", f"has shape {tuple(q.shape)}: {count} thread blocks, expected less than 2^31")
        values: dict[str, int | float] = {**args.numbers, **index_values}
        values |= {
            "scale": factor,
            "scale_log2": factor * LOG2_E,
            "head_chunks": d * q.element_size() // TMA_ALIGNMENT,
        }
        for name, tensor in (("out", out), ("dout", dout)):
            for axis, stride in zip(("batch", "head", "row"), used_strides(tensor)[:3], strict=True):
                values[f"{name}_{axis}_stride"] = stride
        written = {"dq": q} if self._is_dq else {"dk": k, "dv": v}
        gradients = {name: layout_like(tensor) for name, tensor in written.items()}
        maps = {name: (tuple(t.shape), t.stride()) for name, t in (("q", q), ("k", k), ("v", v), ("dout", dout))}
        maps |= {name: (shape, strides) for name, (shape, strides, _) in gradients.items()}
        stats_strides = (heads * stats_shape[2] * 2, stats_shape[2] * 2, 2, 1)
        given = self._arguments.names[: len(indices)] if self._is_dq else ()
        missing = [name for name in self._arguments.names if name not in given] if self._is_dq else []
        missing += [name for name, tensor in zip(given, indices, strict=False) if tensor is None]
        return self._loaded.signature(
            q.device.index,
            args.tiles,
            values,
            maps,
            extra=_Outputs(
                gradients,
                (stats_shape, stats_strides, torch.float32),
                allocator(q.device),
                dict.fromkeys(missing, 0),
            ),
            prologue_grid=args.prologue_grid,
        )

    def _check_lists(self, q: torch.Tensor, k: torch.Tensor, indices: tuple[Any, ...]) -> dict[str, int | float]:
        """Check transposed lists; return the kernel parameters that describe them."""
        block = self.spec.pattern.fixed_block
        if block is None:
            if indices:
                raise ArgumentError("lists", f"{len(indices)} were given; this kernel's pattern has none")
            return {}
        if len(indices) != 2:
            what = "what runtime.prepare.transpose_lists returns"
            raise ArgumentError("lists", f"{len(indices)} index tensors were given, expected {what}")
        values: dict[str, int | float] = {}
        ends = -(-k.shape[2] // block.kv) + 1
        for name, tensor, length in zip(("q_offsets", "q_entries"), indices, ((ends,), None), strict=True):
            if not (isinstance(tensor, torch.Tensor) and tensor.numel() == 0 and length is None):  # lists may be empty
                check_tensor(name, tensor, torch.int32, 3, q.device)
            heads = [("batch", tuple(sorted({1, q.shape[0]}))), ("heads", tuple(sorted({1, q.shape[1]})))]
            check_shape(name, tensor.shape, [*heads, ("entries", length)])
            if tensor.shape[2] > 1 and tensor.stride(2) != 1:
                raise ArgumentError(name, f"has stride {tensor.stride(2)} in its last dimension, expected 1")
            for axis, size, stride in zip(("batch", "head"), tensor.shape, tensor.stride(), strict=False):
                values[f"{name}_{axis}_stride"] = 0 if size == 1 else stride
        return values
