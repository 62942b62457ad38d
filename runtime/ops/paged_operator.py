"""torch's operators of attention over pages, which ``torch.compile`` and dispatch modes see.

They are registered when this module is imported. They have no backward, and refuse operands that require one.
"""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.attention import AttentionResult
from runtime.kernels.paged_attention import Given, Options, Window
from runtime.ops.attention_autograd import never_with_gradients
from runtime.ops.operators import NAMESPACE, STRIDES, like, nothing
from runtime.ops.paged_calls import attend_paged, check_operands

_TENSORS = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? block_table, Tensor? seq_lens, Tensor? cu_seqlens_q, "
    "Tensor? lists, Tensor? counts, Tensor? sink, Tensor? k_scale, Tensor? v_scale"
)
_NUMBERS = (
    "Tensor(b!)? workspace, *, int[] window, int entry_keys, float? scale=None, float? softcap=None, "
    "bool batch_invariant=False, bool lse=False, bool heads_first=False, bool validate=False"
)
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _schema in (
    f"paged_attention({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor)",
    f"paged_attention_out({_TENSORS}, Tensor(a!) out, {_NUMBERS}) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))


def _run(
    *arguments: Any,
    out: torch.Tensor | None = None,
    window: list[int],
    entry_keys: int,
    scale: float | None = None,
    softcap: float | None = None,
    batch_invariant: bool = False,
    lse: bool = False,
    **modes: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the operator."""
    *inputs, workspace = arguments
    options = Options(Window(*window), entry_keys, scale, softcap, batch_invariant, lse)
    modes = {"heads_first": False, "validate": False} | modes
    written, found = attend_paged((*inputs, out, workspace), options, **modes)
    return written, nothing(inputs[0]) if found is None else found


def _run_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """Compute the operator that writes into ``out``."""
    *inputs, out, workspace = arguments
    return _run(*inputs, workspace, out=out, **options)[1]


def _fake(*arguments: Any, lse: bool = False, heads_first: bool = False, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors like the results, without values."""
    q, k_cache, v_cache, *_others = arguments
    check_operands(q, k_cache, v_cache, heads_first=heads_first)
    of_rows = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if lse else nothing(q)
    return like(q), of_rows


def _fake_out(*arguments: Any, **options: Any) -> torch.Tensor:
    """A tensor like the LSE, without values."""
    return _fake(*arguments, **options)[1]


for _name, _implementation, _without_values in (
    ("paged_attention", _run, _fake),
    ("paged_attention_out", _run_out, _fake_out),
):
    _overload = getattr(torch.ops.sparse_kernel_codegen, _name).default
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    _library.impl(
        _name,
        never_with_gradients(_overload, "attention over pages has no backward: use torch.no_grad()"),
        "Autograd",
        with_keyset=True,
    )
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _without_values, lib=_library)


def paged_operator(given: Given, options: Options, *, heads_first: bool, validate: bool) -> AttentionResult:
    """Call the operator, or the one that writes into ``out``."""
    operators = torch.ops.sparse_kernel_codegen
    *inputs, out, workspace = given
    numbers: dict[str, Any] = {
        "window": list(options.window),
        "entry_keys": options.entry_keys,
        "scale": options.scale,
        "softcap": options.softcap,
        "batch_invariant": options.batch_invariant,
        "lse": options.return_lse,
        "heads_first": heads_first,
        "validate": validate,
    }
    if out is not None:
        found = operators.paged_attention_out(*inputs, out, workspace, **numbers)
    else:
        out, found = operators.paged_attention(*inputs, workspace, **numbers)
    return AttentionResult(out, found if options.return_lse else None)
