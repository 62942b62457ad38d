"""Calls of attention with NaN or infinity behind the ends of sequences, beside the same calls without.

Behind the length of a padded batch, K and V are spoiled; around a packed sequence, all operands are. A rule of the
softmax lets rows share a maximum (docs/reference/numerics.md), so that what is in another sequence's Q may change how a
result is rounded. Everything else has the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from codegen.fp8 import KEY_ORDER
from codegen.spec import AttentionBackwardSpec, AttentionSpec
from codegen.varlen_cases import VarlenCase
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.verify import attention, attention_backward, attention_fp8, varlen, varlen_backward
from runtime.verify.attention import Case, fitted
from runtime.verify.common import generator

VALUES = (torch.nan, torch.inf)
CLOSE = {"fp16": 2e-3, "bf16": 1.6e-2}
FP8_NAN = 0x7F  # of e4m3 and of e5m2

Found = dict[str, torch.Tensor]


def _drawn_like(q: torch.Tensor, name: str) -> torch.Tensor:
    drawn = torch.randn(q.shape, generator=generator("dout " + name, q.device), device=q.device)
    return torch.empty_like(q).copy_(drawn.to(q.dtype))


def _wrong(found: Found, right: Found, where: str, close: float | None = None) -> list[str]:
    """A line for each result that is not the right one: bit for bit, or within ``close``."""
    lines = []
    for name, one in right.items():
        other = found[name]
        same = torch.equal(one, other)
        if close is not None and not same:
            same = torch.allclose(one.float(), other.float(), atol=close, rtol=close)
        if not same:
            off = int((one != other).sum())
            lines.append(f"{name}, {where}: {off} of {one.numel()} differ, {int((~other.isfinite()).sum())} not finite")
    return lines


def wrong_behind_lengths(kernel: Any, case: Case, device: torch.device) -> list[str]:
    """What NaN and infinity in K and V behind ``kv_lengths`` change, a line for each result; nothing if right.

    Args:
        kernel: a kernel of attention or of its gradients, with ``kv_lengths``; not for FP8.
        case: with lengths, whose query heads are fitted to the kernel.
        device: where it runs.
    """
    spec = kernel.spec
    forward = spec.forward if isinstance(spec, AttentionBackwardSpec) else spec
    case = fitted(case, forward)
    inputs = attention.make_inputs(forward, case, device)
    if isinstance(spec, AttentionBackwardSpec):
        dout = _drawn_like(inputs.q, case.name)
        exact = attention_backward.oracle(spec, case, inputs, dout)
        made = exact.out.to(inputs.q.dtype), dout, attention_backward.given_lse(spec, case, exact)

    def run() -> Found:
        if isinstance(spec, AttentionBackwardSpec):
            return attention_backward.by_name(attention_backward.run(kernel, case, inputs, made))
        out, lse = kernel(
            inputs.q, inputs.k, inputs.v, *inputs.indices, scale=case.scale, sink=inputs.sink, **inputs.options()
        )
        return {"out": out, **({} if lse is None else {"lse": lse})}

    right = run()
    lengths = inputs.indices[-1]
    assert lengths is not None
    behind = (torch.arange(case.kv_len, device=device) >= lengths[:, None])[:, None, :, None]
    wrong = []
    for name, value in itertools.product("kv", VALUES):
        operand = getattr(inputs, name)
        kept = operand.clone()
        operand.masked_fill_(behind, value)
        wrong += _wrong(run(), right, f"{value} in {name.upper()}")
        operand.copy_(kept)
    return wrong


def wrong_behind_lengths_in_fp8(kernel: Any, case: Case, device: torch.device) -> list[str]:
    """What NaN in an FP8 kernel's K, V^T and scales of K behind ``kv_lengths`` changes, as ``wrong_behind_lengths``."""
    spec: AttentionSpec = kernel.spec
    case = fitted(case, spec)
    drawn = attention.make_inputs(spec, case, device)
    given = attention_fp8.quantized(spec, case, drawn)
    lengths = drawn.indices[-1]
    assert lengths is not None
    keys = given.v_t.shape[-1]
    order = torch.tensor(KEY_ORDER, device=device).repeat(keys // 16) + torch.arange(keys, device=device) // 16 * 16
    behind = (order >= lengths[:, None])[:, None, None]

    def run() -> Found:
        options = {**given.scales(), "scale": case.scale, "sink": drawn.sink, **drawn.options()}
        out, lse = kernel(given.q, given.k, given.v_t, *drawn.indices, **options)
        return {"out": out, **({} if lse is None else {"lse": lse})}

    right = run()
    of_scales = torch.arange(given.k_scale.shape[2], device=device) * given.k_rows >= lengths[:, None, None]
    scales = given.k_scale.expand(len(lengths), -1, -1)
    wrong = []
    for value in (torch.nan, 0.0):
        given = replace(given, k_scale=scales.masked_fill(of_scales, value))
        wrong += _wrong(run(), right, f"scales of K of {value}")
    in_k = (torch.arange(keys, device=device) >= lengths[:, None])[:, None, : given.k.shape[2], None]
    given.k.view(torch.uint8).masked_fill_(in_k, FP8_NAN)
    wrong += _wrong(run(), right, "NaN in K")
    given.v_t.view(torch.uint8).masked_fill_(behind, FP8_NAN)
    return wrong + _wrong(run(), right, "NaN in V^T")


def _spans(case: VarlenCase, lengths: tuple[int, ...]) -> Iterator[slice]:
    ends = list(itertools.accumulate(lengths, initial=case.before))
    return (slice(begin, end) for begin, end in itertools.pairwise(ends))


def _outside(case: VarlenCase, gradients: Found) -> Found:
    """The gradients of tokens of no sequence."""
    before = {f"{name} before": gradient[:, :, : case.before] for name, gradient in gradients.items()}
    behind = {
        f"{name} behind": gradient[:, :, gradient.shape[2] - case.after :] for name, gradient in gradients.items()
    }
    return before | behind


def wrong_around_sequences(kernel: Any, case: VarlenCase, device: torch.device) -> list[str]:
    """What NaN and infinity in all tokens but those of one sequence change in its results, for each sequence in turn.

    Args:
        kernel: a kernel of attention of packed sequences, or of its gradients.
        case: with at least two sequences. ``deterministic`` gradients have the same bits.
        device: where it runs.
    """
    spec = kernel.spec
    is_backward = isinstance(spec, AttentionBackwardSpec)
    forward = spec.forward if isinstance(spec, AttentionBackwardSpec) else spec
    inputs = varlen.make_inputs(forward, case, device, sinks=is_backward)
    options: dict[str, Any] = {"scale": case.scale, **varlen.numbers_of(forward, case)}
    operands = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if isinstance(spec, AttentionBackwardSpec):
        dout = _drawn_like(inputs.q, case.name)
        exact = varlen_backward.oracle(spec, case, inputs, dout)
        out = torch.empty_like(inputs.q).copy_(exact.out.to(TORCH_DTYPES[spec.dtype]))
        options |= {"out": out, "dout": dout, "lse": exact.lse}
        operands |= {"out": out, "dout": dout, "lse": exact.lse}
    else:
        options |= {"sink": inputs.sink}

    def run() -> Found:
        found = kernel(*inputs.of_call(), **options)
        if is_backward:
            return attention_backward.by_name(found)
        return {"out": found.out, **({} if found.lse is None else {"lse": found.lse})}

    of_queries = {"q", "out", "dout", "lse", "dq"}
    together = [tuple(operands)] if is_backward else [("k", "v"), ("q",)]
    right = {name: result.clone() for name, result in run().items()}
    wrong = []
    spans = zip(_spans(case, case.q_lens), _spans(case, case.kv_lens), strict=True)
    for number, (rows, keys) in enumerate(spans):
        for names, value in itertools.product(together, VALUES):
            kept = {name: operands[name].clone() for name in names}
            for name in names:
                place = rows if name in of_queries else keys
                operands[name][:, :, : place.start] = value
                operands[name][:, :, place.stop :] = value
            found = run()
            for name in names:
                operands[name].copy_(kept[name])
            mine = [
                {name: r[:, :, rows if name in of_queries else keys] for name, r in results.items()}
                for results in (found, right)
            ]
            if is_backward:
                wrong += _wrong(_outside(case, found), _outside(case, right), f"{value} in tokens of no sequence")
            exactly = names != ("q",) and getattr(spec, "deterministic", True)
            where = f"sequence {number}, {value} around it in {', '.join(names)}"
            wrong += _wrong(mine[0], mine[1], where, None if exactly else CLOSE[forward.dtype])
    return wrong
