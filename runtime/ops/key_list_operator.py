"""torch's operators of attention of packed sequences over lists of keys.

They are registered when this module is imported.
"""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.attention import AttentionResult
from runtime.key_lists import KeyLists
from runtime.ops.key_list_autograd import with_gradients
from runtime.ops.key_list_calls import Lists, attend_key_lists, check_list_call
from runtime.ops.key_list_gradients import check_gradients
from runtime.ops.operators import NAMESPACE, STRIDES, nothing
from runtime.ops.varlen_autograd import refuse_vmap, without_gradients
from runtime.ops.varlen_calls import Bounds

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor lists, Tensor? counts, Tensor? sink"
)
_NUMBERS = (
    "*, int entry_keys, float? scale=None, float? softcap=None, bool lse=False, bool validate=False, "
    "bool deterministic=True"
)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _schema in (
    f"key_list_attention({_TENSORS}, {_NUMBERS}, bool gradients=False) -> (Tensor, Tensor)",
    f"key_list_attention_out({_TENSORS}, Tensor(a!) out, {_NUMBERS}) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))


def _run(
    *arguments: Any,
    out: torch.Tensor | None = None,
    entry_keys: int,
    lse: bool = False,
    gradients: bool = False,
    deterministic: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the operator; with ``gradients`` also the LSE that they want, if they can be computed at all."""
    del deterministic  # gradients are
    q, k, v, cu_seqlens_q, cu_seqlens_k, lists, counts, sink = arguments
    listed, bounds = Lists(lists, counts, entry_keys), Bounds(cu_seqlens_q, cu_seqlens_k)
    if gradients:
        check_list_call(q, k, v, bounds, listed, sink=sink)
        check_gradients(q, k, listed, softcap=options.get("softcap"), sink=sink)
    options["lse"] = lse or gradients
    written, found = attend_key_lists(q, k, v, bounds, listed, sink=sink, out=out, **options)
    return written, nothing(q) if found is None else found


def _run_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """Compute the operator that writes into ``out``."""
    *inputs, out = arguments
    return _run(*inputs, out=out, **options)[1]


def _fake(
    *arguments: Any, entry_keys: int, lse: bool = False, gradients: bool = False, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors like the results, without values."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, lists, counts, sink = arguments
    listed, bounds = Lists(lists, counts, entry_keys), Bounds(cu_seqlens_q, cu_seqlens_k)
    check_list_call(q, k, v, bounds, listed, sink=sink, on_gpu=False)
    of_rows = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if lse or gradients else nothing(q)
    return q.new_empty(q.shape), of_rows


def _fake_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """A tensor like the LSE, without values."""
    *inputs, _ = arguments
    return _fake(*inputs, **options)[1]


for _name, _implementation, _without_values, _differentiated in (
    ("key_list_attention", _run, _fake, with_gradients),
    ("key_list_attention_out", _run_out, _fake_out, without_gradients),
):
    _overload = getattr(torch.ops.sparse_kernel_codegen, _name).default
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    _library.impl(_name, _differentiated(_overload), "Autograd", with_keyset=True)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _without_values, lib=_library)
    torch.library.register_vmap(f"{NAMESPACE}::{_name}", refuse_vmap, lib=_library)


def key_list_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    pattern: KeyLists,
    *,
    sink: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: bool,
    **options: Any,
) -> AttentionResult:
    """Call the operator, or the one that writes into ``out``."""
    operators = torch.ops.sparse_kernel_codegen
    inputs = q, k, v, *bounds, pattern.indices, pattern.counts, sink
    options = {**options, "lse": lse, "entry_keys": pattern.keys}
    if out is not None:
        found = operators.key_list_attention_out(*inputs, out, **options)
    else:
        out, found = operators.key_list_attention(*inputs, **options)
    return AttentionResult(out, found if lse else None)
