"""Gradients of attention by autograd through the dense definition, in float64, and how far others may be off."""

from __future__ import annotations

import math
from typing import Any

import attention_oracle
import torch

from runtime.patterns import scored_of, split_tensors
from runtime.verify.attention_backward import FLOAT_NOISE

NAMES = ("dq", "dk", "dv")
ROUNDOFF = {torch.float16: 2**-11, torch.bfloat16: 2**-8}  # a rounded number is off by that share of itself at most


def dense(
    q: Any,
    k: Any,
    v: Any,
    seen: torch.Tensor,
    *,
    scale: Any = None,
    softcap: Any = None,
    sink: Any = None,
    score: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and the log-sum-exp, in the type of q, where each key counts as often as it is seen."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    logits = q @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits if score is None else score(logits)
    logits = torch.where(seen > 0, logits + seen.clamp(min=1).to(q.dtype).log(), -math.inf)
    if sink is not None:  # a key whose value is 0
        every = torch.cat([logits, sink.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)], 3)
        return every.softmax(-1)[..., :-1] @ v, every.logsumexp(-1)
    any_key = (logits > -math.inf).any(-1, keepdim=True)
    logits = torch.where(any_key, logits, 0.0)  # softmax of a row without keys would be NaN, and its gradients
    lse = torch.where(any_key[..., 0], logits.logsumexp(-1), -math.inf)
    return (logits.softmax(-1) * any_key) @ v, lse


def seen_by(pattern: Any, q: Any, k: Any, kv_lengths: Any = None) -> torch.Tensor:
    """Return how often each query sees each key, on q's device."""
    shape = (*q.shape[:3], k.shape[2])
    own, aux = split_tensors(scored_of(pattern), pattern.index_tensors())
    return attention_oracle.times_seen(pattern.spec_json, own, shape, kv_lengths, aux).to(q.device)


def exact(
    q: Any,
    k: Any,
    v: Any,
    pattern: Any,
    dout: Any,
    dlse: Any = None,
    *,
    kv_lengths: Any = None,
    sink: Any = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Return the gradients in float64; with ``sink`` its own too, ``dsink``."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v, *(() if sink is None else (sink,)))]
    given = None if sink is None else leaves[3]
    out, lse = dense(*leaves[:3], seen_by(pattern, q, k, kv_lengths), sink=given, **options)
    loss = (out * dout.double()).sum()
    if dlse is not None:
        some = lse > -math.inf
        loss = loss + (torch.where(some, lse, 0.0) * dlse.double()).sum()
    names = NAMES if sink is None else (*NAMES, "dsink")
    return dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))


def by_sdpa(
    q: Any, k: Any, v: Any, pattern: Any, dout: Any, *, scale: Any = None, kv_lengths: Any = None, **options: Any
) -> dict[str, torch.Tensor] | None:
    """Return the gradients of torch's SDPA in the type of q; None where it has no such attention."""
    seen = seen_by(pattern, q, k, kv_lengths)
    if options or bool((seen > 1).any()):
        return None
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(group, 1) for t in leaves[1:])
    any_key = (seen > 0).any(-1, keepdim=True)
    mask = (seen > 0) | ~any_key  # a row without keys may be NaN there: it sees all, and its gradient is 0
    out = torch.nn.functional.scaled_dot_product_attention(leaves[0], keys, values, attn_mask=mask, scale=scale)
    found = torch.autograd.grad(out, leaves, torch.where(any_key, dout, 0.0).to(out.dtype))
    return dict(zip(NAMES, found, strict=True))


def rounded(
    q: Any,
    k: Any,
    v: Any,
    pattern: Any,
    dout: Any,
    *,
    scale: Any = None,
    softcap: Any = None,
    score: Any = None,
    sink: Any = None,
    kv_lengths: Any = None,
) -> dict[str, torch.Tensor]:
    """Return the gradients where P, dS, the result and they are rounded to the type of q: what any kernel does."""
    seen, group, dtype = seen_by(pattern, q, k, kv_lengths), q.shape[1] // k.shape[1], q.dtype
    q, k, v, dout = (t.detach().double() for t in (q, k, v, dout))
    sink = None if sink is None else sink.detach().double()
    out, lse = dense(q, k, v, seen, scale=scale, softcap=softcap, sink=sink, score=score)
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale

    def round_(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype).double()

    logits, slope = q @ keys.mT * factor, torch.ones((), dtype=torch.float64, device=q.device)
    if softcap is not None:
        tanh = torch.tanh(logits / softcap)
        logits, slope = softcap * tanh, 1 - tanh**2
    if score is not None:
        logits, slope = attention_oracle.with_slope(score, logits)
    # A pair that is listed several times is rounded each time: a kernel adds its parts one by one.
    weights = torch.where(seen > 0, (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp(), 0.0)
    ds = seen * round_(weights * (dout @ values.mT - (dout * round_(out)).sum(-1, keepdim=True)) * slope)
    of_heads = factor * ds.mT @ q, (seen * round_(weights)).mT @ dout
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in of_heads)
    return {name: round_(t) for name, t in zip(NAMES, (factor * ds @ keys, dk, dv), strict=True)}


def assert_sink_near(
    found: Any, q: Any, k: Any, v: Any, pattern: Any, dout: Any, dlse: Any = None, *, sink: Any, **options: Any
) -> None:
    """Compare the gradient of the sinks with the exact one: it is a sum over rows of dO O, where O is rounded.

    Errors of that rounding are independent: four times their root sum of squares, at most.
    """
    right = exact(q, k, v, pattern, dout, dlse, sink=sink, **options)["dsink"]
    seen = seen_by(pattern, q, k, options.pop("kv_lengths", None))
    doubles = (t.detach().double() for t in (q, k, v))
    out, lse = dense(*doubles, seen, sink=sink.detach().double(), **options)
    share = (sink.detach().double()[:, None] - lse).exp()
    squares = (share[..., None] * out * dout.double()).pow(2).sum((0, 2, 3))
    allowed = 4 * ROUNDOFF[q.dtype] * squares.sqrt() + 1e-5 * (share * (out * dout).abs().sum(-1)).sum((0, 2))
    assert found.dtype == torch.float32 and found.shape == sink.shape
    error = (found.double() - right).abs()
    assert bool((error <= allowed).all()), f"dsink: errors {error.tolist()}, allowed {allowed.tolist()}"


def noise(q: Any, k: Any, v: Any, dout: Any, scale: float | None = None) -> float:
    """Return what roundings of float32 leave of a difference of equal numbers, dO V^T and delta: see runtime/verify."""
    factor = q.shape[3] ** -0.5 if scale is None else scale
    values, dp = v.double().abs().repeat_interleave(q.shape[1] // v.shape[1], 1), dout.double().abs()
    largest = max(float(t.detach().abs().max()) for t in (q, k))
    return FLOAT_NOISE * factor * float((dp @ values.mT).detach().max()) * largest


def assert_near(
    found: Any, right: dict[str, torch.Tensor], *others: dict[str, torch.Tensor] | None, noise: float = 0.0
) -> None:
    """Compare gradients with exact ones, as runtime/verify does: by RMS twice others' error, the largest three times.

    Without others, and at least, three halves of the roundoff of the largest element.

    Args:
        found: dq, dk and dv, in this order.
        right: in float64.
        others: gradients in the type of ``found``: torch's own, and what rounding alone makes of them.
        noise: what an error may be in any case.
    """
    for name, gradient in zip(NAMES, found, strict=True):
        assert gradient is not None, name
        exact = right[name]
        floor = max(1.5 * ROUNDOFF[gradient.dtype] * float(exact.abs().max()), 1e-30, noise)
        for told, factor, measure in (("largest", 3, _largest), ("rms", 2, _rms)):
            theirs = [factor * measure(other[name].double() - exact) for other in others if other is not None]
            allowed = max(floor, *theirs) if theirs else floor
            error = measure(gradient.double() - exact)
            assert error <= allowed, f"{name}: {told} error {error:.3e}, allowed {allowed:.3e}"


def _largest(errors: torch.Tensor) -> float:
    return float(errors.abs().max())


def _rms(errors: torch.Tensor) -> float:
    return float(errors.pow(2).mean().sqrt())
