"""Gradients of attention over lists of keys on real tensors: checks, and the call of a kernel."""

from __future__ import annotations

import json
from typing import Any

import torch

from codegen.select.key_lists import LIMITS, gradient_fields
from runtime.checks import refuse_capture
from runtime.errors import ArgumentError
from runtime.kernel import load_kernel
from runtime.kernels.key_lists_backward import KeyListGradients, KeyListsBackwardKernel
from runtime.ops.attention_choice import DTYPES, arch_of
from runtime.ops.attention_gradients import addressable
from runtime.ops.key_list_calls import Lists, check_list_call
from runtime.ops.paged_calls import has_receipt
from runtime.ops.varlen_calls import Bounds
from runtime.receipts.mode import KERNELS_KEPT, kept_by_mode

_WORDS = {
    "head_dim": ("q", "has head_dim {}"),
    "entry_keys": ("pattern", "has entries of {} keys"),
    "group": ("k", "has a head for {} query heads"),
}
"""Argument, and a size of it in words, by field of the spec."""


def check_gradients(q: torch.Tensor, k: torch.Tensor, lists: Lists, *, softcap: Any, sink: Any) -> None:
    """Refuse what has no gradient.

    Raises:
        ArgumentError: naming the argument, its value and what is allowed.
        DeviceError: for a device without kernels.
    """
    for name, value in (("softcap", softcap), ("sink", sink)):
        if value is not None:
            raise ArgumentError(name, "is given, and KeyLists have no gradient with it: call under torch.no_grad()")
    fields = _fields(q, k, lists)
    if not has_receipt(tuple(fields.items())):
        how = f"run codegen verify '{json.dumps(fields)}' on this GPU, or call under torch.no_grad()"
        raise ArgumentError("pattern", f"is KeyLists, whose kernel of gradients for these sizes has no receipt: {how}")


def _fields(q: torch.Tensor, k: torch.Tensor, lists: Lists) -> dict[str, Any]:
    """Fields of the spec of a call."""
    sizes = {"head_dim": q.shape[2], "entry_keys": lists.keys, "group": q.shape[1] // k.shape[1]}
    for name, allowed in LIMITS.items():
        if sizes[name] not in allowed:
            argument, words = _WORDS[name]
            choices = f"expected {', '.join(map(str, allowed))} with a gradient, or torch.no_grad()"
            raise ArgumentError(argument, f"{words.format(sizes[name])}, {choices}")
    return gradient_fields(arch_of(q.device), DTYPES[q.dtype], **sizes)


@kept_by_mode(KERNELS_KEPT)
def _kernel(index: int, fields: tuple[tuple[str, Any], ...]) -> KeyListsBackwardKernel:
    """Kernel of calls of a kind."""
    device = torch.device("cuda", index)
    refuse_capture("q", device)
    kernel = load_kernel(dict(fields), device=device)
    assert isinstance(kernel, KeyListsBackwardKernel)
    return kernel


def attend_key_lists_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    lists: Lists,
    *,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None = None,
    scale: float | None = None,
) -> KeyListGradients:
    """Compute the gradients of a call of ``varlen_attention`` with ``KeyLists``.

    Args:
        q, k, v, bounds, lists: of the call.
        dout: (tokens, heads, head_dim), the gradient of the result.
        out: the result.
        lse: float32 (heads, tokens), its log-sum-exp.
        dlse: the gradient of lse; None where the loss does not depend on it.
        scale: of the call.

    Raises:
        ArgumentError: before anything is launched.
        DeviceError, ToolchainError, CompileError, CacheError, UnverifiedError: at the first call of a kind.
    """
    check_list_call(q, k, v, bounds, lists, sink=None)
    if q.shape[0] == 0 or k.shape[0] == 0:
        return KeyListGradients(*map(torch.zeros_like, (q, k, v)))
    fields = _fields(q, k, lists)
    kernel = _kernel(q.device.index, tuple(fields.items()))
    rows: dict[str, Any] = {"out": out, "dout": addressable(dout), "lse": lse}
    rows["dlse"] = None if dlse is None else dlse.contiguous()
    indices: dict[str, Any] = {**bounds._asdict(), "lists": lists.indices, "counts": lists.counts}
    return kernel(q, k, v, **indices, **rows, scale=scale)
