"""Calls of kernels for the gradients of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from codegen.problem import AttentionShape, LaunchArgs
from codegen.spec import AttentionBackwardSpec
from runtime.compile.compiler import Compiled
from runtime.driver.allocate import allocator
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import LoadedKernel, Signature
from runtime.driver.workspace import Memory
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    KV_AXES,
    Q_AXES,
    TMA_ALIGNMENT,
    aux_in_order,
    call_key,
    check_addresses,
    check_head_dim,
    check_keys,
    check_memory,
    check_scale,
    check_sizes,
    check_strides,
    check_tensor,
    row_strides,
)
from runtime.kernels.attention import layout_like, packed_layout_like
from runtime.kernels.attention_indices import IndexArguments
from runtime.kernels.aux_gradients import AuxSums
from runtime.kernels.aux_tensors import AuxArguments
from runtime.kernels.bound_call import BoundCall
from runtime.kernels.gradient_launch import Outputs, Step
from runtime.kernels.gradient_statistics import LOG2_E, fill_statistics
from runtime.kernels.pattern_numbers import PatternNumbers

SUMS = ("dq_accum",)
"""Scratch memory as large as an operand, which each call allocates: of the rest, a stream keeps the most it needed."""


def _sums(args: LaunchArgs) -> dict[str, int]:
    """Return the bytes of the memory that each call allocates."""
    return {**{name: size for name, size in args.scratch.items() if name in SUMS}, **args.sums}


class AttentionGradients(NamedTuple):
    """What a call of a gradient kernel returns.

    Attributes:
        dq: (batch, heads, q_len, d), the gradient of q; None from kernels that do not compute it.
        dk: (batch, kv_heads, kv_len, d), that of k; None likewise.
        dv: that of v, likewise.
        stats: float32 (batch, heads, rows, 2), what another kernel of the same call may be given.
        daux: those of the spec's ``aux_gradients``, by name, each as its tensor, contiguous; None without.
    """

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    stats: torch.Tensor
    daux: dict[str, torch.Tensor] | None = None


_GRADIENTS = {"dq": ("dq",), "dkdv": ("dk", "dv"), "dq_dkdv": ("dq", "dk", "dv"), "daux": ()}


class AttentionBackwardKernel(BoundCall[AttentionBackwardSpec]):
    """Gradients of softmax(scale * Q K^T) V over the keys of the spec's pattern, with its softcap.

    Calls run on torch's current stream, do not synchronize and can be captured in a CUDA graph. The same arguments give
    the same bits in every call, but in dQ of a spec with ``deterministic: false``.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        super().__init__(compiled, loaded)
        self._names = _GRADIENTS[self.spec.gradients]
        self._listed = self.spec.pattern.fixed_block is not None
        self._transposes = self._listed and "dk" in self._names
        self._packs = self.spec.layout == "varlen"
        self._layout_like = packed_layout_like if self._packs else layout_like
        self._param_names = frozenset(param.name for param in compiled.plan.params)
        self._has_dlse = "dlse" in self._param_names
        # The prologue also writes bounds that the main kernel reads: of sequences, or of elements of dQ.
        self._writes_bounds = not self._param_names.isdisjoint(("rising_q", "norms"))
        self._arguments = IndexArguments(self.spec.forward, compiled.named.stem, ("scale", "stats", "validate"))
        self._numbers = PatternNumbers(self.spec.pattern, compiled.named.stem)
        self._aux = AuxArguments(self.spec.forward, compiled.plan)
        self._sums = AuxSums(self.spec) if self.spec.gradients == "daux" else None
        self._argument_names = ("q", "k", "v", *self._arguments.names, "out", "dout", "lse")

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *indices: torch.Tensor | None,
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        scale: float | None = None,
        dlse: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        window: tuple[int, int] | None = None,
        sink_keys: int | None = None,
        validate: bool = False,
        aux: Mapping[str, torch.Tensor] | None = None,
    ) -> AttentionGradients:
        """Compute gradients.

        Args:
            q: (batch, heads, q_len, d), the spec's dtype; the last dimension contiguous, other strides any multiple of
                16 bytes; d is any multiple of 8 up to the spec's head_dim.
            k: (batch, kv_heads, kv_len, d); heads is a multiple of kv_heads.
            v: as k.
            indices: the index tensors that the forward was given, in its order: int32, lists (batch|1, heads|1,
                query_blocks, any) and their counts (batch|1, heads|1, query_blocks), bits of partial blocks, values of
                batches (batch|1,), ``kv_lengths`` last; None for missing full lists. With ``layout: varlen``, the
                bounds of the sequences in q and in k, each (sequences + 1,): tensors are (1, heads, tokens, d), and
                gradients of tokens in no sequence are zeros.
            out: as q, the result of the forward.
            dout: as q, the gradient of out.
            lse: float32 (batch, heads, q_len), contiguous, the forward's log-sum-exp; with sinks it has those.
            scale: softmax scale of the forward, from 1e-37 to 1e38; by default 1 / sqrt(d).
            dlse: float32 (batch, heads, q_len), the gradient of lse, where the loss depends on it too. Torch then
                computes the statistics, which takes memory for out and dout in float32. With ``layout: varlen``, and
                with lists where one kernel computes all gradients, the kernel does, and dlse is contiguous.
            stats: what the other kernel returned for the same q, out, dout, lse and dlse: it is not computed again.
            window: (left, right) of the forward, if the spec's pattern leaves them out.
            sink_keys: the keys at the beginning of the forward, likewise.
            validate: also check the values of the index tensors. Costs a kernel and a synchronization.
            aux: the tensors of the spec's expressions by name, int32 (batch, q_len) say, as the forward was given them.

        Returns:
            The gradients, in the layouts of q, k and v: 0 for a query without keys, and for keys that no query sees or
            that lie behind the length of their batch.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        if is_elsewhere(q):
            with entered(q.device.index):
                options: dict[str, Any] = {
                    "scale": scale,
                    "dlse": dlse,
                    "stats": stats,
                    "window": window,
                    "sink_keys": sink_keys,
                    "validate": validate,
                    "aux": aux,
                }
                return self(q, k, v, *indices, out=out, dout=dout, lse=lse, **options)
        if scale is not None:
            check_scale(scale)  # also so that it can be a part of a key
        if self._writes_bounds:
            stats = None
        looked_up = aux_in_order(aux, self._aux.declared)
        numbers = self._numbers.checked(window, sink_keys)
        key = (scale, numbers, call_key(q, k, v, out, dout, lse, dlse, stats, *indices, *looked_up))
        signature = self._bound(key)
        if signature is None:
            operands = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse, "dlse": dlse}
            checked = self._check(operands, indices, numbers=numbers, aux=looked_up, scale=scale, stats=stats)
            signature = self._signatures.keep(key, checked)
        if validate:
            self._arguments.check_values(q, k, indices)
        outputs: Outputs = signature.extra
        made = {name: outputs.allocate(*layout) for name, layout in outputs.gradients.items()}
        row_stats = outputs.allocate(*outputs.stats) if stats is None else stats
        given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "stats": row_stats, **made}
        addresses = {name: tensor.data_ptr() for name, tensor in given.items()}
        check_addresses(addresses)
        sums = outputs.new_sums()
        addresses |= {"lse": lse.data_ptr(), "dlse": 0 if dlse is None else dlse.data_ptr(), **outputs.left_out}
        addresses |= {name: tensor.data_ptr() for name, tensor in sums.items()}
        named = zip(self._arguments.names, indices, strict=False)
        addresses |= {name: tensor.data_ptr() for name, tensor in named if tensor is not None}
        addresses |= {name: tensor.data_ptr() for name, tensor in zip(self._aux.params, looked_up, strict=True)}
        by_torch = stats is None and dlse is not None and not self._has_dlse
        if by_torch:
            fill_statistics(row_stats, out, dout, lse, dlse)
        prologue = not (by_torch or stats is not None) or self._transposes
        enqueue(self._loaded, signature, addresses, q.device, outputs.memory, prologue=prologue)
        of_aux = self._aux_gradients(sums, looked_up, q, k)
        return AttentionGradients(made.get("dq"), made.get("dk"), made.get("dv"), row_stats, of_aux)

    def _bound_step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *indices: torch.Tensor | None,
        tensors: tuple[torch.Tensor, ...],
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        scale: float | None = None,
        dlse: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        window: tuple[int, int] | None = None,
        sink_keys: int | None = None,
    ) -> Step | None:
        """The launch of a call without aux tensors that was made just before, for ``runtime.ops``.

        Args:
            q, k, v, indices, out, dout, lse, scale, dlse, stats, window, sink_keys: as of that call.
            tensors: those that stand for the tensors of later calls, in their order.

        Returns:
            The launch; None if the kernel reads a tensor that is none of those, or torch computed its statistics.
        """
        if self._writes_bounds:
            stats = None
        numbers = self._numbers.checked(window, sink_keys)
        signature = self._bound((scale, numbers, call_key(q, k, v, out, dout, lse, dlse, stats, *indices)))
        read = [("q", q), ("k", k), ("v", v), ("out", out), ("dout", dout), ("lse", lse), ("dlse", dlse)]
        read += zip(self._arguments.names, indices, strict=False)
        names = {id(tensor): name for name, tensor in read if tensor is not None}
        by_torch = stats is None and dlse is not None and not self._has_dlse
        if signature is None or by_torch or self._sums is not None or not names.keys() <= set(map(id, tensors)):
            return None
        return Step(
            self._loaded,
            signature,
            tuple(names.get(id(tensor), "") for tensor in tensors),
            {**signature.extra.left_out, **({"dlse": 0} if dlse is None else {})},
            stats is None or self._transposes,
            stats is None,
        )

    def _aux_gradients(
        self, sums: dict[str, torch.Tensor], aux: tuple[torch.Tensor, ...], q: torch.Tensor, k: torch.Tensor
    ) -> dict[str, torch.Tensor] | None:
        """Return the gradients of the spec's ``aux_gradients``; None without any."""
        if self._sums is None:
            return None
        return self._sums.added_up(sums, dict(zip(self._aux.names, aux, strict=True)), q.shape, k.shape[2])

    def _check(
        self,
        operands: dict[str, Any],
        indices: tuple[Any, ...],
        *,
        aux: tuple[Any, ...],
        scale: Any,
        stats: Any,
        numbers: tuple[int, ...] = (),
    ) -> Signature:
        """Check a call of a new signature and prepare it."""
        self._check_operands(operands)
        q, k, v, out, dout = (operands[name] for name in ("q", "k", "v", "out", "dout"))
        batch, heads, q_len, d = q.shape
        index_values = self._arguments.check(q, indices) | self._aux.check(q, k.shape[2], aux)
        factor = 1 / math.sqrt(d) if scale is None else check_scale(scale)
        lists = self._lists(indices)
        of_pattern = self._numbers.of_shape(numbers)
        sequences = self._sequences(indices, batch)
        sizes = (batch, heads, k.shape[1], q_len, k.shape[2])
        args = self._plan.problem(AttentionShape(*sizes, *lists, **of_pattern, sequences=sequences))
        if max(args.tiles, args.prologue_grid, args.epilogue_grid) >= 2**31:
            raise ArgumentError("q", f"has shape {tuple(q.shape)}: 2^31 thread blocks or more, which is too many")
        rows = args.numbers["padded_q_len"]
        stats_shape = (batch, heads, rows, 2)
        if stats is not None:
            _check_stats(stats, stats_shape, q.device)
        values: dict[str, int | float] = {
            **index_values,
            "scale": factor,
            "scale_log2": factor * LOG2_E,
            "head_chunks": d * q.element_size() // TMA_ALIGNMENT,
        }
        by_kernel = stats is None and (self._has_dlse or operands["dlse"] is None)
        if not by_kernel and self._transposes:  # it transposes lists all the same
            args = replace(args, prologue_grid=args.numbers["list_blocks"])
        gradients = {
            name: self._layout_like(t, t.dtype) for name, t in (("dq", q), ("dk", k), ("dv", v)) if name in self._names
        }
        written = {name: torch.empty_strided(s, st, dtype=t, device="meta") for name, (s, st, t) in gradients.items()}
        tensors = {"q": q, "k": k, "v": v, "dout": dout, **written}
        values |= self._strides({**tensors, "out": out})
        shapes = {name: (tuple(tensor.shape), tensor.stride()) for name, tensor in tensors.items()}
        left_out = [name for name, tensor in zip_longest(self._arguments.names, indices) if tensor is None]
        made = Outputs(
            gradients,
            (stats_shape, (heads * rows * 2, rows * 2, 2, 1), torch.float32),
            {name: ((size // 4,), (1,), torch.float32) for name, size in _sums(args).items()},
            tuple(args.sums),
            allocator(q.device),
            dict.fromkeys(left_out, 0),
            Memory.of(replace(args, scratch={name: size for name, size in args.scratch.items() if name not in SUMS})),
        )
        check_memory(**{name: operands[name] for name in ("q", "k", "v", "out", "dout", "lse")})
        return self._signature(q.device, args, values, shapes, made)

    def _sequences(self, indices: tuple[Any, ...], batch: int) -> int:
        """Return the packed sequences of a call; 0 where sequences are padded."""
        sequences = self._arguments.sequences(indices)
        if sequences and batch != 1:
            raise ArgumentError("q", f"has a batch of {batch}; packed sequences are (1, heads, tokens, head_dim)")
        return sequences

    def _strides(self, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        """Return the strides of the tensors that the kernels address themselves."""
        strides = row_strides(**tensors)
        return {name: stride for name, stride in strides.items() if name in self._param_names}

    def _check_operands(self, operands: dict[str, Any]) -> None:
        """Check q, k, v, out, dout, lse and, if there is one, dlse: types, shapes, strides."""
        q, k = operands["q"], operands["k"]
        dense = {name: tensor for name, tensor in operands.items() if name not in ("lse", "dlse")}
        check_tensor("q", q, self._dtype, 4)
        for name, tensor in dense.items():
            check_tensor(name, tensor, self._dtype, 4, q.device)
        check_head_dim(q.shape, self.spec.head_dim, padded=True)
        check_keys(q, k)
        check_sizes("v", operands["v"], KV_AXES, k.shape)
        for name in ("out", "dout"):
            check_sizes(name, operands[name], Q_AXES, q.shape)
        for name, tensor in dense.items():
            check_strides(name, tensor)
        lse, dlse = operands["lse"], operands["dlse"]
        for name, tensor in (("lse", lse), *(() if dlse is None else (("dlse", dlse),))):
            check_tensor(name, tensor, torch.float32, 3, q.device)
            check_sizes(name, tensor, Q_AXES[:3], q.shape[:3])
        for name, tensor in (("lse", lse), *((("dlse", dlse),) if self._has_dlse and dlse is not None else ())):
            if not tensor.is_contiguous():
                raise ArgumentError(name, f"has strides {tensor.stride()}, expected a contiguous tensor")

    def _lists(self, indices: tuple[Any, ...]) -> tuple[int, int, int]:
        """Batches and heads with lists of their own, and the number of entries of a query block.

        Where lists of partial and of full blocks are shared by different dimensions, those of both are taken.
        """
        if not self._listed:
            return 0, 0, 0
        named = zip(self._arguments.names, indices, strict=False)
        lists = [tensor for name, tensor in named if name.endswith("kv_indices") and tensor is not None]
        batches, heads = (max(tensor.shape[axis] for tensor in lists) for axis in (0, 1))
        return batches, heads, sum(tensor.shape[3] for tensor in lists)


def _check_stats(stats: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse statistics of another call."""
    check_tensor("stats", stats, torch.float32, 4, device)
    if stats.shape != shape or not stats.is_contiguous():
        raise ArgumentError("stats", f"is {tuple(stats.shape)}, expected {shape}, contiguous: of another call")
