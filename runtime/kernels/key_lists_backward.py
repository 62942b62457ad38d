"""Calls of kernels for the gradients of attention over lists of keys."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from codegen.plan import aligned
from codegen.problem import KeyListsShape, LaunchArgs
from codegen.spec import KeyListsBackwardSpec
from runtime.driver.allocate import allocator, contiguous
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import Signature
from runtime.driver.workspace import Memory
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    call_key,
    check_addresses,
    check_memory,
    check_scale,
    check_shape,
    check_strides,
    check_tensor,
    row_strides,
)
from runtime.kernels.bound_call import BoundCall
from runtime.kernels.gradient_statistics import LOG2_E
from runtime.prepare.key_list_order import order_of_chunks
from runtime.prepare.key_lists import transposed_key_lists

MOST = 2**31
"""Entries, and thread blocks, that the kernel cannot count."""
ALIGNMENT = 256  # bytes
_HEADS_FIRST = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")


class KeyListGradients(NamedTuple):
    """What a call returns.

    Attributes:
        dq: (tokens, heads, head_dim), the gradient of q.
        dk: (key tokens, kv_heads, head_dim), that of k.
        dv: as dk, that of v.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class _Bound(NamedTuple):
    """What later calls of a signature need: sizes of the transposed lists, workspaces, and memory that is 0: where it
    has each sum, and its bytes."""

    sizes: dict[str, int]
    memory: Memory
    sums: dict[str, int]
    zeros: int


class KeyListsBackwardKernel(BoundCall[KeyListsBackwardSpec]):
    """Gradients of attention of packed sequences in which each query has a list of key blocks.

    Calls run on torch's current stream, do not synchronize and can be captured in a CUDA graph. The same arguments give
    the same bits in every call.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    _argument_names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "lists", "out", "dout", "lse")

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
        out: torch.Tensor,
        dout: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> KeyListGradients:
        """Compute gradients.

        Args:
            q: (tokens, heads, head_dim), the spec's dtype; the last dimension contiguous, other strides any multiple of
                16 bytes. heads is the spec's group times kv_heads.
            k: (key tokens, kv_heads, head_dim).
            v: as k.
            cu_seqlens_q: int32 (sequences + 1,), contiguous: where each sequence begins in q, then the end of the last.
            cu_seqlens_k: the same of k and v.
            lists: int32 (kv_heads or 1, tokens, entries): the key blocks that each query sees, as of the forward.
            counts: int32 (kv_heads or 1, tokens): entries of each list that count, from the first one on.
            out: as q, the result of the forward.
            dout: as q, the gradient of out.
            lse: float32 (heads, tokens), contiguous, the forward's log-sum-exp.
            dlse: float32 (heads, tokens), its gradient, contiguous, where the loss depends on it.
            scale: softmax scale of the forward, from 1e-37 to 1e38; by default 1 / sqrt(head_dim).

        Returns:
            The gradients, contiguous: 0 for a query without keys, for keys that no query sees, and for tokens of no
            sequence.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        rows = {"out": out, "dout": dout, "lse": lse, "dlse": dlse}
        indices = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "lists": lists, "counts": counts}
        if is_elsewhere(q):
            with entered(q.device.index):
                options: dict[str, Any] = {**indices, **rows, "scale": scale}
                return self(q, k, v, **options)
        given = {"q": q, "k": k, "v": v, **rows}
        key = (scale, call_key(*given.values(), *indices.values()))
        signature = self._bound(key)
        if signature is None:
            signature = self._signatures.keep(key, self._check(given, indices, scale))
        bound: _Bound = signature.extra
        transposed = transposed_key_lists(
            lists, counts, cu_seqlens_q, cu_seqlens_k, keys=self.spec.entry_keys, **bound.sizes
        )
        allocate = allocator(q.device)
        found = KeyListGradients(*(allocate(*contiguous(t.shape), t.dtype) for t in (q, k, v)))
        found.dk.zero_()  # tokens of no sequence
        found.dv.zero_()
        made = {"stats": allocate(*contiguous((*q.shape[:2], 2)), torch.float32)}
        zeros = allocate((bound.zeros // 4,), (1,), torch.float32).zero_()
        tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
        order = order_of_chunks(transposed, kv_heads=k.shape[1], chunk=bound.sizes["chunk"])
        tensors |= {**found._asdict(), **made, "chunk_order": order}
        tensors |= {name: tensor for name, tensor in transposed._asdict().items() if tensor is not None}
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        addresses |= {name: zeros.data_ptr() + at for name, at in bound.sums.items()}
        addresses |= {"dlse": 0} if dlse is None else {}
        check_addresses({name: addresses[name] for name in ("q", "k", "v", "out", "dout")})
        enqueue(self._loaded, signature, addresses, q.device, bound.memory)
        return found

    def _check(self, given: dict[str, Any], indices: dict[str, Any], scale: Any) -> Signature:
        """Check a call of a new signature and prepare it."""
        self._check_operands(given)
        q, k = given["q"], given["k"]
        tokens, _, d = q.shape
        key_tokens, kv_heads, _ = k.shape
        check_indices(indices, q, kv_heads)
        sequences, list_length = indices["cu_seqlens_q"].shape[0] - 1, indices["lists"].shape[2]
        if kv_heads * tokens * list_length >= MOST:
            raise ArgumentError("lists", f"has {kv_heads * tokens * list_length} entries of all heads, expected fewer")
        shape = KeyListsShape(sequences, tokens, key_tokens, kv_heads, list_length)
        args = self._plan.problem(shape)
        if max(args.tiles, args.prologue_grid, args.epilogue_grid) >= MOST:
            raise ArgumentError("q", f"has shape {tuple(q.shape)}: 2^31 thread blocks or more, which is too many")
        factor = 1 / math.sqrt(d) if scale is None else check_scale(scale)
        made = {
            name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in (("dq", q), ("dk", k), ("dv", k))
        }
        views = {
            name: tensor.transpose(0, 1).unsqueeze(0)
            for name, tensor in {**given, **made}.items()
            if name in _HEADS_FIRST
        }
        strides = row_strides(**views)
        values: dict[str, int | float] = {
            **{name: strides[name] for name in (param.name for param in self._plan.params) if name in strides},
            "scale": factor,
            "scale_log2": factor * LOG2_E,
        }
        maps = {name: (tuple(view.shape), view.stride()) for name, view in views.items()}
        check_memory(**{name: tensor for name, tensor in given.items() if tensor is not None})
        return self._signature(q.device, args, values, maps, self._bound_of(args, kv_heads, key_tokens))

    def _bound_of(self, args: LaunchArgs, kv_heads: int, key_tokens: int) -> _Bound:
        """What later calls need."""
        tiles, chunk = args.numbers["tiles"], args.numbers["chunk_entries"]
        sizes = {"kv_heads": kv_heads, "key_tokens": key_tokens, "tiles": tiles, "chunk": chunk, "chunks": args.tiles}
        sizes["pieces"] = self.spec.tile.n // self.spec.entry_keys
        *starts, zeros = accumulate((aligned(size, ALIGNMENT) for size in args.sums.values()), initial=0)
        return _Bound(sizes, Memory.of(args), dict(zip(args.sums, starts, strict=True)), zeros)

    def _check_operands(self, given: dict[str, Any]) -> None:
        """Check q, k, v, out, dout, lse and, if there is one, dlse: types, shapes, strides."""
        q, k, group = given["q"], given["k"], self.spec.group
        check_tensor("q", q, self._dtype, 3)
        for name in ("k", "v", "out", "dout"):
            check_tensor(name, given[name], self._dtype, 3, q.device)
        tokens, heads, d = q.shape
        if d != self.spec.head_dim:
            raise ArgumentError("q", f"has head_dim {d}, expected {self.spec.head_dim}")
        if heads % group:
            raise ArgumentError("q", f"has {heads} heads, expected a multiple of the kernel's group of {group}")
        of_k = [("key tokens", None), ("kv_heads", (heads // group,)), ("head_dim", (d,))]
        check_shape("k", k.shape, of_k)
        check_shape("v", given["v"].shape, [("key tokens", (k.shape[0],)), *of_k[1:]])
        for name in ("out", "dout"):
            check_shape(name, given[name].shape, [("tokens", (tokens,)), ("heads", (heads,)), ("head_dim", (d,))])
        for name in ("q", "k", "v", "out", "dout"):
            check_strides(name, given[name])
        for name in ("lse", "dlse"):
            tensor = given[name]
            if tensor is None:
                continue
            check_tensor(name, tensor, torch.float32, 2, q.device)
            check_shape(name, tensor.shape, [("heads", (heads,)), ("tokens", (tokens,))])
            if not tensor.is_contiguous():
                raise ArgumentError(name, f"has strides {tensor.stride()}, expected a contiguous tensor")


def check_indices(indices: dict[str, Any], q: torch.Tensor, kv_heads: int) -> None:
    """Check bounds and lists.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    for name, rank in (("cu_seqlens_q", 1), ("cu_seqlens_k", 1), ("lists", 3), ("counts", 2)):
        if name == "counts" and indices[name] is None:
            continue
        check_tensor(name, indices[name], torch.int32, rank, q.device)
    bounds = indices["cu_seqlens_q"].shape[0]
    if bounds < 2:
        raise ArgumentError("cu_seqlens_q", f"has {bounds} entries, expected 2 or more")
    check_shape("cu_seqlens_k", indices["cu_seqlens_k"].shape, [("as cu_seqlens_q", (bounds,))])
    heads = ("kv_heads", tuple(sorted({1, kv_heads})))
    check_shape("lists", indices["lists"].shape, [heads, ("tokens", (q.shape[0],)), ("entries", None)])
    if indices["lists"].shape[2] == 0:
        raise ArgumentError("lists", "has no entries, expected 1 per list or more")
    if indices["counts"] is not None:
        of_lists = ("heads of lists", (indices["lists"].shape[0],))
        check_shape("counts", indices["counts"].shape, [of_lists, ("tokens", (q.shape[0],))])
