"""torch's operators of attention with operands in FP8, which ``torch.compile`` and dispatch modes see.

They are registered when this module is imported. They have no backward, and refuse operands that require one.
"""

from __future__ import annotations

from typing import Any

import torch

from codegen.scored_pattern import scored_pattern
from runtime.kernels.attention import AttentionResult
from runtime.ops.attention_autograd import never_with_gradients
from runtime.ops.attention_extras import NUMBER_SCHEMA, TENSOR_SCHEMA, TENSORS, Extras
from runtime.ops.attention_fp8 import attend_quantized
from runtime.ops.block_sizes import Tensors
from runtime.ops.operators import NAMESPACE, STRIDES, like, nothing
from runtime.ops.quantize_attention import QuantizedAttention

_CODES = ("q", "k", "v_t", "q_scale", "k_scale", "v_scale", "k_mean", "mean_logits")
"""Fields of ``QuantizedAttention`` that are tensors, in the order of the operators' arguments."""
_TENSORS = (
    "Tensor q, Tensor k, Tensor v_t, Tensor q_scale, Tensor k_scale, Tensor v_scale, Tensor? k_mean, "
    f"Tensor? mean_logits, Tensor?[] tensors, {TENSOR_SCHEMA}, Tensor? overflow"
)
_NUMBERS = (
    f"str spec_json, *, int q_rows, int k_rows, ScalarType output, {NUMBER_SCHEMA}, bool lse=False, bool validate=False"
)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _schema in (
    f"block_sparse_attention_fp8({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)",
    f"block_sparse_attention_fp8_out({_TENSORS}, Tensor(a!) out, {_NUMBERS}) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))


def _run(
    *arguments: Any,
    q_rows: int,
    k_rows: int,
    output: torch.dtype,
    lse: bool = False,
    validate: bool = False,
    out: torch.Tensor | None = None,
    **numbers: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the operator."""
    codes = dict(zip(_CODES, arguments, strict=False))
    tensors, *optional, overflow, text = arguments[len(_CODES) :]
    given = QuantizedAttention(**codes, q_rows=q_rows, k_rows=k_rows, output=output)
    options: dict[str, Any] = {"lse": lse, "out": out, "validate": validate, "overflow": overflow}
    options["extras"] = Extras.of(optional, numbers)
    written, found = attend_quantized(given, tuple(tensors), scored_pattern(text), **options)
    return written, nothing(given.q) if found is None or not lse else found


def _run_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """Compute the operator that writes into ``out``."""
    *inputs, out, text = arguments
    return _run(*inputs, text, out=out, **options)[1]


def _fake(*arguments: Any, output: torch.dtype, lse: bool = False, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors like the results, without values."""
    q: torch.Tensor = arguments[0]
    return like(q, output), q.new_empty(q.shape[:3], dtype=torch.float32) if lse else nothing(q)


def _fake_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """A tensor like the LSE, without values."""
    return _fake(*arguments, **options)[1]


for _name, _implementation, _without_values in (
    ("block_sparse_attention_fp8", _run, _fake),
    ("block_sparse_attention_fp8_out", _run_out, _fake_out),
):
    _overload = getattr(torch.ops.sparse_kernel_codegen, _name).default
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    _library.impl(_name, never_with_gradients(_overload), "Autograd", with_keyset=True)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _without_values, lib=_library)


def operator(
    given: QuantizedAttention,
    tensors: Tensors,
    text: str,
    *,
    extras: Extras,
    overflow: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: bool,
    **options: Any,
) -> AttentionResult:
    """Call the operator, or the one that writes into ``out``. ``text`` is the pattern, and the score."""
    operators = torch.ops.sparse_kernel_codegen
    inputs = (*(getattr(given, name) for name in _CODES), list(tensors), *extras[:TENSORS], overflow)
    options |= {"q_rows": given.q_rows, "k_rows": given.k_rows, "output": given.output, "lse": lse, **extras.numbers()}
    if out is not None:
        found = operators.block_sparse_attention_fp8_out(*inputs, out, text, **options)
    else:
        out, found = operators.block_sparse_attention_fp8(*inputs, text, **options)
    return AttentionResult(out, found if lse else None)
