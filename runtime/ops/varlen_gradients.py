"""Gradients of attention of packed sequences on real tensors: the choice of kernels, and their calls."""

from __future__ import annotations

from typing import Any

import torch

from codegen.library import NamedSpec
from codegen.scored_pattern import ScoredPattern
from runtime.errors import ArgumentError
from runtime.kernels.arguments import Signatures, check_sink
from runtime.kernels.attention_backward import AttentionGradients
from runtime.kernels.gradient_statistics import packed_delta, packed_sink_gradient
from runtime.ops.attention_extras import Extras
from runtime.ops.attention_gradients import (
    GradientChoice,
    GradientRoute,
    Gradients,
    addressable,
    chosen_for,
)
from runtime.ops.packed_lists import Lists, check_lists, of_heads
from runtime.ops.varlen_calls import Bounds, check_bounds, check_operands
from runtime.receipts.mode import mode

LEAST_OF_ONE_KERNEL = 256
"""Queries of a sequence, on average, from which one kernel computes all gradients: it sums dQ of whole steps."""
_routes = Signatures()


def check_gradients(
    q: torch.Tensor, scored: ScoredPattern, *, softcap: float | None, deterministic: bool
) -> GradientChoice:
    """The kernels of the gradients of a call.

    Raises:
        DeviceError, ArgumentError, SpecError: for what has no gradient.
        UnverifiedError: where kernels without a receipt are refused.
    """
    features = Extras(softcap=softcap).features()
    return chosen_for(q, scored, features, deterministic=deterministic, layout="varlen")


def attend_varlen_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    scored: ScoredPattern,
    *,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    lists: Lists = (),
    scale: float | None = None,
    softcap: float | None = None,
    deterministic: bool = True,
    dq: bool = True,
    dkdv: bool = True,
    dsink: bool = False,
) -> Gradients:
    """Compute the gradients of a call of ``varlen_attention``.

    Args:
        q, k, v: the operands.
        bounds: of the sequences.
        scored: the pattern.
        dout: (tokens, heads, head_dim), the gradient of the result.
        out: the result.
        lse: float32 (heads, tokens), its log-sum-exp.
        dlse: the gradient of lse; None where the loss does not depend on it.
        sink: float32 (heads,), those of the call.
        lists: those of the call.
        scale, softcap, deterministic: of the call.
        dq: whether the gradient of q is wanted.
        dkdv: whether those of k and v are.
        dsink: whether that of the sinks is.

    Raises:
        ArgumentError, SpecError: before anything is launched.
        DeviceError, ToolchainError, CompileError, CacheError, UnverifiedError: at the first call of a kind.
    """
    route = _route_of(q, scored, softcap, deterministic)
    if dsink:
        check_sink(sink, q.shape[1], q.device)
    rows: dict[str, Any] = {"out": out, "dout": dout, "lse": lse, "dlse": dlse}
    if q.shape[0] == 0 or k.shape[0] == 0:
        check_operands(q, k, v)
        check_bounds(q, bounds)
        check_lists(q, k, bounds, scored, lists)
        of_q, of_k, of_v = (torch.zeros_like(t) if w else None for t, w in ((q, dq), (k, dkdv), (v, dkdv)))
        return Gradients(of_q, of_k, of_v, _sink_gradient(q, sink, bounds, rows) if dsink else None, ())
    inputs = [*(t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)), *of_heads(lists, q.shape[1], k.shape[1]), *bounds]
    options: dict[str, Any] = {**_heads_first(**rows), "scale": scale, **route.numbers}

    def computed(named: NamedSpec, **more: Any) -> AttentionGradients:
        kernel: Any = route.kernel(named)
        found: AttentionGradients = kernel(*inputs, **options, **more)
        return found

    of_q = of_k = of_v = stats = None
    kernels, long = route.kernels, q.shape[0] >= LEAST_OF_ONE_KERNEL * (bounds.cu_seqlens_q.shape[0] - 1)
    if dq and dkdv and long and kernels.dq_dkdv is not None:
        of_q, of_k, of_v, stats, _ = computed(kernels.dq_dkdv)
        dq = dkdv = False
    if dq:
        of_q, _, _, stats, _ = computed(kernels.dq)
    if dkdv:
        _, of_k, of_v, stats, _ = computed(kernels.dkdv, stats=stats)
    of_sink = _sink_gradient(q, sink, bounds, rows, stats) if dsink else None
    of_q, of_k, of_v = (None if t is None else t[0].transpose(0, 1) for t in (of_q, of_k, of_v))
    return Gradients(of_q, of_k, of_v, of_sink, ())


def _route_of(q: torch.Tensor, scored: ScoredPattern, softcap: float | None, deterministic: bool) -> GradientRoute:
    """How the gradients of a call are computed."""
    softcap = None if softcap is None else float(softcap)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    key = (scored.text, q.shape[2], q.dtype, q.device, softcap, deterministic, mode())
    last, route = _routes.last
    if last != key:
        route = _routes.find(key)
    if route is None:
        choice = check_gradients(q, scored, softcap=softcap, deterministic=deterministic)
        route = _routes.keep(key, GradientRoute.of(choice, scored, q.device))
    found: GradientRoute = route
    return found


def _heads_first(
    *, out: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    """What the forward pass returned, and its gradients, as kernels take them: with a batch of 1."""
    return {
        "out": out.transpose(0, 1).unsqueeze(0),
        "dout": addressable(dout.transpose(0, 1).unsqueeze(0)),
        "lse": lse.unsqueeze(0),
        "dlse": None if dlse is None else dlse.contiguous().unsqueeze(0),
    }


def _sink_gradient(
    q: torch.Tensor,
    sink: torch.Tensor | None,
    bounds: Bounds,
    rows: dict[str, Any],
    stats: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of the sinks, of the statistics of a kernel if there are any."""
    assert sink is not None
    if stats is not None:
        return packed_sink_gradient(sink, stats)
    for name, tensor in rows.items():
        expected = q.shape if name in ("out", "dout") else (q.shape[1], q.shape[0])
        if tensor is not None and tensor.shape != expected:
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}, expected {tuple(expected)}")
    return packed_sink_gradient(sink, packed_delta(bounds.cu_seqlens_q, **rows))
