"""torch's operators of block-sparse attention, which ``torch.compile``, ``torch.export`` and dispatch modes see.

They are registered when this module is imported. Their arguments are tensors, numbers and the pattern of the kernel's
spec as JSON, so that an exported program can be saved, and depends on lengths and lists as on any tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from codegen.scored_pattern import scored_pattern
from runtime.errors import ArgumentError
from runtime.kernels.attention import AttentionResult
from runtime.ops.attention_autograd import with_gradients, without_gradients
from runtime.ops.attention_calls import attend
from runtime.ops.attention_checks import check_operands, check_types
from runtime.ops.attention_extras import NUMBER_SCHEMA, TENSOR_SCHEMA, TENSORS, Extras
from runtime.ops.attention_gradients import check_gradients, chosen_for
from runtime.ops.block_sizes import Tensors
from runtime.ops.operators import NAMESPACE, STRIDES, like, nothing

_TENSORS = f"Tensor q, Tensor k, Tensor v, Tensor?[] tensors, {TENSOR_SCHEMA}, Tensor? overflow"
_NUMBERS = f"str spec_json, *, {NUMBER_SCHEMA}, bool lse=False, bool validate=False, bool deterministic=True"
pytree._register_namedtuple(AttentionResult, serialized_type_name="runtime.AttentionResult")  # a program may return it
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _schema in (
    f"block_sparse_attention({_TENSORS}, {_NUMBERS}, bool gradients=False, str[]? aux_gradients=None) "
    "-> (Tensor, Tensor)",
    f"block_sparse_attention_out({_TENSORS}, Tensor(a!) out, {_NUMBERS}) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))


def _run(
    *arguments: Any,
    out: torch.Tensor | None = None,
    lse: bool = False,
    validate: bool = False,
    gradients: bool = False,
    aux_gradients: Sequence[str] | None = None,
    deterministic: bool = True,
    **numbers: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the operator; with ``gradients`` also the LSE that they want, if they can be computed at all."""
    q, k, v, tensors, *optional, overflow, text = arguments
    scored, extras = scored_pattern(text), Extras.of(optional, numbers)
    if gradients:
        check_operands(q, k, v)
        extras.check(q)
        asked: dict[str, Any] = {"deterministic": deterministic, "aux_gradients": aux_gradients or ()}
        chosen_for(q, scored, extras.features(), **asked)
    options: dict[str, Any] = {"lse": lse or gradients, "out": out, "validate": validate, "overflow": overflow}
    options |= {"for_gradients": gradients}
    out, found = attend(q, k, v, tuple(tensors), scored, extras=extras, **options)
    return out, nothing(q) if found is None else found


def _run_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """Compute the operator that writes into ``out``."""
    *inputs, out, text = arguments
    return _run(*inputs, text, out=out, **options)[1]


def _fake(
    *arguments: Any, lse: bool = False, gradients: bool = False, aux_gradients: Sequence[str] | None = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors like the results, without values."""
    q, k, v, tensors, *optional, text = arguments
    scored = scored_pattern(text)
    check_types(q, k, v, tensors, scored, extras=Extras(*optional[:TENSORS]))
    if gradients:
        check_gradients(scored, aux_gradients or ())
    return like(q), q.new_empty(q.shape[:3], dtype=torch.float32) if lse or gradients else nothing(q)


def _fake_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """A tensor like the LSE, without values."""
    return _fake(*arguments, **options)[1]


def _refuse_vmap(*_: Any) -> NoReturn:
    reason = "is mapped by torch.vmap: pass the batch as a dimension, (batch, heads, length, head_dim)"
    raise ArgumentError("q, k, v and pattern", f"one of them {reason}")


for _name, _implementation, _without_values, _differentiated in (
    ("block_sparse_attention", _run, _fake, with_gradients),
    ("block_sparse_attention_out", _run_out, _fake_out, without_gradients),
):
    _overload = getattr(torch.ops.sparse_kernel_codegen, _name).default
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    _library.impl(_name, _differentiated(_overload), "Autograd", with_keyset=True)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _without_values, lib=_library)
    torch.library.register_vmap(f"{NAMESPACE}::{_name}", _refuse_vmap, lib=_library)


def operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Tensors,
    text: str,
    *,
    extras: Extras,
    overflow: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: bool,
    **options: Any,
) -> AttentionResult:
    """Call the operator, or the one that writes into ``out``."""
    operators = torch.ops.sparse_kernel_codegen
    inputs = q, k, v, tensors, *extras[:TENSORS], overflow
    options |= {"lse": lse, **extras.numbers()}
    if out is not None:
        found = operators.block_sparse_attention_out(*inputs, out, text, **options)
    else:
        out, found = operators.block_sparse_attention(*inputs, text, **options)
    return AttentionResult(out, found if lse else None)
