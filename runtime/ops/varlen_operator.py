"""torch's operators of attention of packed sequences, which ``torch.compile`` and dispatch modes see.

They are registered when this module is imported.
"""

from __future__ import annotations

from typing import Any

import torch

from codegen.scored_pattern import scored_pattern
from runtime.kernels.attention import AttentionResult
from runtime.ops.operators import NAMESPACE, STRIDES, like, nothing
from runtime.ops.packed_lists import Lists, check_lists
from runtime.ops.varlen_autograd import refuse_vmap, with_gradients, without_gradients
from runtime.ops.varlen_calls import Bounds, attend_varlen, check_bounds, check_call, check_operands
from runtime.ops.varlen_gradients import check_gradients

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? sink, Tensor?[] lists"
_NUMBERS = (
    "str spec_json, *, float? scale=None, float? softcap=None, bool lse=False, bool validate=False, "
    "bool deterministic=True"
)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _schema in (
    f"varlen_attention({_TENSORS}, {_NUMBERS}, bool gradients=False) -> (Tensor, Tensor)",
    f"varlen_attention_out({_TENSORS}, Tensor(a!) out, {_NUMBERS}) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))


def _run(
    *arguments: Any,
    out: torch.Tensor | None = None,
    lse: bool = False,
    gradients: bool = False,
    deterministic: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the operator; with ``gradients`` also the LSE that they want, if they can be computed at all."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, sink, lists, text = arguments
    bounds, scored = Bounds(cu_seqlens_q, cu_seqlens_k), scored_pattern(text)
    if gradients:
        numbers = {name: options.get(name) for name in ("scale", "softcap")}
        softcap = check_call(q, k, v, bounds, **numbers, sink=sink)
        check_gradients(q, scored, softcap=softcap, deterministic=deterministic)
    options |= {"sink": sink, "lists": tuple(lists), "out": out, "lse": lse or gradients}
    written, found = attend_varlen(q, k, v, bounds, scored, **options)
    return written, nothing(q) if found is None else found


def _run_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """Compute the operator that writes into ``out``."""
    *inputs, out, text = arguments
    return _run(*inputs, text, out=out, **options)[1]


def _fake(*arguments: Any, lse: bool = False, gradients: bool = False, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors like the results, without values."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, _sink, lists, *_others = arguments
    bounds = Bounds(cu_seqlens_q, cu_seqlens_k)
    check_operands(q, k, v, on_gpu=False)
    check_bounds(q, bounds)
    check_lists(q, k, bounds, scored_pattern(arguments[-1]), lists)
    of_rows = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if lse or gradients else nothing(q)
    return like(q), of_rows


def _fake_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """A tensor like the LSE, without values."""
    return _fake(*arguments, **options)[1]


for _name, _implementation, _without_values, _differentiated in (
    ("varlen_attention", _run, _fake, with_gradients),
    ("varlen_attention_out", _run_out, _fake_out, without_gradients),
):
    _overload = getattr(torch.ops.sparse_kernel_codegen, _name).default
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    _library.impl(_name, _differentiated(_overload), "Autograd", with_keyset=True)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _without_values, lib=_library)
    torch.library.register_vmap(f"{NAMESPACE}::{_name}", refuse_vmap, lib=_library)


def varlen_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    text: str,
    *,
    sink: torch.Tensor | None,
    lists: Lists,
    out: torch.Tensor | None,
    lse: bool,
    **options: Any,
) -> AttentionResult:
    """Call the operator, or the one that writes into ``out``."""
    operators = torch.ops.sparse_kernel_codegen
    inputs = q, k, v, *bounds, sink, lists
    if out is not None:
        found = operators.varlen_attention_out(*inputs, out, text, lse=lse, **options)
    else:
        out, found = operators.varlen_attention(*inputs, text, lse=lse, **options)
    return AttentionResult(out, found if lse else None)
