"""torch's operators of block-sparse attention: what ``torch.compile``, ``torch.export`` and dispatch modes see.

They are registered when this module is imported. Their arguments are tensors, numbers and the pattern of the kernel's
spec as JSON, so that an exported program can be saved, and depends on lengths and lists as on any tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from runtime.errors import ArgumentError
from runtime.kernels.attention import AttentionResult
from runtime.ops.attention_calls import attend
from runtime.ops.attention_checks import check_types, refuse_gradients
from runtime.ops.block_sizes import Tensors

NAMESPACE = "sparse_kernel_codegen"
_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor?[] tensors, Tensor? sink, Tensor? kv_lengths, Tensor? overflow"
_NUMBERS = "str spec_json, *, float? scale=None, float? softcap=None, bool lse=False, bool validate=False"
pytree._register_namedtuple(AttentionResult, serialized_type_name="runtime.AttentionResult")  # a program may return it
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)  # of inputs, as traced
for _schema in (
    f"block_sparse_attention({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)",
    f"block_sparse_attention_out({_TENSORS}, Tensor(a!) out, {_NUMBERS}) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, _STRIDES))


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    """Return what the operators return in place of an LSE that was not asked for."""
    return torch.empty((0,), dtype=torch.float32, device=q.device)


def _run(*arguments: Any, out: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the operator."""
    q, k, v, tensors, sink, kv_lengths, overflow, spec_json = arguments
    options |= {"sink": sink, "kv_lengths": kv_lengths, "overflow": overflow}
    out, lse = attend(q, k, v, tuple(tensors), spec_json, out=out, **options)
    return out, _no_lse(q) if lse is None else lse


def _run_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """Compute the operator that writes into ``out``."""
    *inputs, out, spec_json = arguments
    return _run(*inputs, spec_json, out=out, **options)[1]


def like(q: torch.Tensor) -> torch.Tensor:
    """Return a new tensor with the layout of the result: that of q, where it has no gaps, else contiguous."""
    found = torch.empty_like(q)
    return found if found.stride() == q.stride() else q.new_empty(q.shape)


def _fake(*arguments: Any, lse: bool = False, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors like the results, without values."""
    q, k, v, tensors, sink, kv_lengths, *_rest = arguments
    check_types(q, k, v, tensors, sink=sink, kv_lengths=kv_lengths)
    return like(q), q.new_empty(q.shape[:3], dtype=torch.float32) if lse else _no_lse(q)


def _fake_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """Return a tensor like the LSE, without values."""
    return _fake(*arguments, **options)[1]


def _refuse_vmap(*_: Any) -> NoReturn:
    reason = "is mapped by torch.vmap: pass the batch as a dimension, (batch, heads, length, head_dim)"
    raise ArgumentError("q, k, v and pattern", f"one of them {reason}")


def _without_gradients(overload: Any) -> Callable[..., Any]:
    """Return what autograd does with an operator: refuse inputs that require a gradient, and go on below."""

    def called(keys: Any, *arguments: Any, **options: Any) -> Any:
        refuse_gradients(overload, arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *arguments, **options)

    return called


for _name, _implementation, _without_values in (
    ("block_sparse_attention", _run, _fake),
    ("block_sparse_attention_out", _run_out, _fake_out),
):
    _overload = getattr(torch.ops.sparse_kernel_codegen, _name).default
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    _library.impl(_name, _without_gradients(_overload), "Autograd", with_keyset=True)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _without_values, lib=_library)
    torch.library.register_vmap(f"{NAMESPACE}::{_name}", _refuse_vmap, lib=_library)


def operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Tensors,
    spec_json: str,
    *,
    sink: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
    overflow: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: bool,
    **options: Any,
) -> AttentionResult:
    """Call the operator, or the one that writes into ``out``."""
    operators = torch.ops.sparse_kernel_codegen
    inputs = q, k, v, tensors, sink, kv_lengths, overflow
    if out is not None:
        found = operators.block_sparse_attention_out(*inputs, out, spec_json, lse=lse, **options)
    else:
        out, found = operators.block_sparse_attention(*inputs, spec_json, lse=lse, **options)
    return AttentionResult(out, found if lse else None)
