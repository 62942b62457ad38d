"""Attention by its definition: how often each query sees each key, the softmax over those, and its gradients."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from codegen.patterns import PATTERNS
from codegen.patterns.block_lists import NAMED_MASKS, expression_of
from codegen.score import Score
from runtime.expressions.evaluate import evaluate
from runtime.verify.aux_gradients import added_to_elements
from runtime.verify.aux_tensors import scored

STEP = 1e-5  # of a difference of float64


def times_seen(
    spec_json: str,
    tensors: tuple[Any, ...],
    shape: tuple[int, int, int, int],
    kv_lengths: Any = None,
    aux: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Return how often each query sees each key, (batch, heads, q_len, kv_len), of shape that."""
    pattern = json.loads(spec_json)
    q_len, kv_len = shape[2:]
    device = next((t.device for t in (*tensors, kv_lengths) if t is not None), None)
    block = pattern.get("block")
    fields = {**pattern, "block": SimpleNamespace(**block)} if isinstance(block, dict) else pattern
    if bits := pattern.get("mask") == "bits":
        fields["mask"] = "none"
    model = PATTERNS[pattern["kind"]].model_construct(**fields)
    q, k = torch.arange(q_len, device=device)[:, None], torch.arange(kv_len, device=device)
    values = {name: t.reshape(-1, 1, 1, 1) for name, t in model.values_of(tensors).items()}
    seen = torch.as_tensor(model.visible(q, k, q_len, kv_len, values)).to(torch.int32).expand(shape)
    if pattern["kind"] == "block_lists" and pattern["mask"] not in NAMED_MASKS:
        seen = seen * by_expression(pattern, shape, aux or {}, device)
    if isinstance(block, dict):
        size = block["q"], block["kv"]
        if pattern["kind"] == "topk":
            seen = listed(tensors[0], None, size, shape) * seen
        else:
            inside = of_bits(tensors[1], tensors[0], tensors[4], size, shape) if bits else seen
            seen = listed(tensors[1], tensors[0], size, shape) * (1 if bits else inside)
            seen = inside if bits else seen
            if len(tensors) > 3 and tensors[3] is not None:
                seen = seen + listed(tensors[3], tensors[2], size, shape)
    if kv_lengths is not None:
        seen = seen * (torch.arange(kv_len, device=device) < kv_lengths.reshape(-1, 1, 1, 1))
    return seen


def by_expression(pattern: dict[str, Any], shape: tuple[int, ...], aux: Mapping[str, Any], device: Any) -> Any:
    """Return which pairs an expression shows."""
    node = expression_of(pattern["mask"], pattern.get("aux", {}))
    values: dict[str, Any] = {"q_len": shape[2], "kv_len": shape[3]}
    for axis, name in enumerate(("batch", "head", "q_idx", "kv_idx")):
        values[name] = torch.arange(shape[axis], device=device).view([-1 if axis == place else 1 for place in range(4)])
    return evaluate(node, values, aux)


def _all_heads(t: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    t = t.expand(batch, *t.shape[1:])
    return t.repeat_interleave(heads // t.shape[1], 1)


def _entries(lists: Any, counts: Any, size: tuple[int, int], shape: tuple[int, ...]) -> Any:
    """Yield each entry of lists: its column, and its block, or one that does not exist, (batch, heads, blocks)."""
    lists = _all_heads(lists, *shape[:2])
    blocks = -(-shape[3] // size[1])
    for column in range(lists.shape[3]):
        found = lists[..., column]
        named = (found >= 0) & (found < blocks)
        if counts is not None:
            named &= column < _all_heads(counts, *shape[:2])
        yield column, torch.where(named, found, blocks).long()


def listed(lists: Any, counts: Any, size: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """Return how often the block of each pair is listed."""
    rows, blocks = -(-shape[2] // size[0]), -(-shape[3] // size[1])
    total = torch.zeros(*shape[:2], rows, blocks + 1, dtype=torch.int32, device=lists.device)
    for _, block in _entries(lists, counts, size, shape):
        total.scatter_add_(3, block[..., None], torch.ones_like(block[..., None], dtype=torch.int32))
    pairs = total[..., :-1].repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)
    return pairs[:, :, : shape[2], : shape[3]]


def of_bits(lists: Any, counts: Any, bits: Any, size: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """Return how often each pair is listed with its bit set."""
    rows, blocks = -(-shape[2] // size[0]), -(-shape[3] // size[1])
    words = _all_heads(bits, *shape[:2]).unflatten(-1, (size[0], size[1] // 32))
    pairs = ((words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=bits.device)) & 1).flatten(-2)
    total = torch.zeros(*shape[:2], rows, blocks + 1, *size, dtype=torch.int32, device=bits.device)
    for column, block in _entries(lists, counts, size, shape):
        index = block[..., None, None, None].expand(*block.shape, 1, *size)
        total.scatter_add_(3, index, pairs[:, :, :, column : column + 1])
    return total[:, :, :, :-1].transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, : shape[2], : shape[3]]


def attention(
    q: Any,
    k: Any,
    v: Any,
    seen: torch.Tensor,
    *,
    scale: Any = None,
    softcap: Any = None,
    sink: Any = None,
    score: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and the log-sum-exp in float32, where each key counts as often as it is seen."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    logits = q.float() @ k.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if score is not None:
        logits = torch.where(seen.to(q.device) > 0, score(logits), -math.inf)  # whatever it makes of hidden pairs
    logits = logits + seen.to(q.device).float().log()
    every = (
        logits if sink is None else torch.cat([logits, sink.float().reshape(1, -1, 1, 1).expand(*q.shape[:3], 1)], 3)
    )
    lse = every.logsumexp(3)
    weights = torch.where(logits == -math.inf, 0.0, (logits - lse[..., None]).exp())
    return weights @ v, lse


def with_slope(score: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return what a score makes of logits in float64, and its derivative by them, by differences."""
    slope = (score(logits + STEP) - score(logits - STEP)) / (2 * STEP)
    return score(logits), slope.nan_to_num(nan=0.0)  # of -inf - -inf


def gradients(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    seen: torch.Tensor,
    *,
    dlse: Any = None,
    scale: Any = None,
    softcap: Any = None,
    score: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the gradients in float64, of what the passes share: out and lse as they were returned."""
    group = q.shape[1] // k.shape[1]
    q, k, v, out, lse, dout = (t.double() for t in (q, k, v, out, lse, dout))
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    logits, slope = q @ keys.mT * scale, torch.ones((), dtype=torch.float64, device=q.device)
    if softcap is not None:
        tanh = torch.tanh(logits / softcap)
        logits, slope = softcap * tanh, 1 - tanh**2
    if score is not None:
        logits, slope = with_slope(score, logits)
    weights = torch.where(seen > 0, (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp() * seen, 0.0)
    delta = (dout * out).sum(-1) - (0 if dlse is None else dlse.double())
    of_logits = weights * (dout @ values.mT - delta[..., None]) * slope
    of_heads = {"dk": scale * (of_logits.mT @ q), "dv": weights.mT @ dout}
    shared = {name: t.unflatten(1, (k.shape[1], group)).sum(2) for name, t in of_heads.items()}
    return {"dq": scale * (of_logits @ keys), **shared}


def aux_gradients(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    seen: torch.Tensor,
    score: Score,
    aux: Mapping[str, torch.Tensor],
    *,
    names: Sequence[str],
    dlse: Any = None,
    scale: Any = None,
    sizes: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the gradients of some tensors of a score in float64, of what the passes share.

    With ``sizes``, the parts of pairs are added up without their signs: what errors are compared with.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v, out, lse, dout = (t.double() for t in (q, k, v, out, lse, dout))
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    logits = q @ keys.mT * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    scores = scored(score.expression, logits, aux)
    weights = torch.where(seen > 0, (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp() * seen, 0.0)
    delta = (dout * out).sum(-1) - (0 if dlse is None else dlse.double())
    of_scores = weights * (dout @ values.mT - delta[..., None])
    return added_to_elements(score, tuple(names), logits, of_scores, aux, sizes=sizes)
