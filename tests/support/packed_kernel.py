"""Kernels of packed sequences that compute by the definition, on any device, in place of those that are loaded."""

from __future__ import annotations

import itertools
from typing import Any

import attention_oracle
import pytest
import torch
from oracle_kernel import _check_tensor, pattern_text

from codegen.library import NamedSpec
from codegen.scored_pattern import scored_pattern
from codegen.spec import AttentionBackwardSpec, AttentionSpec
from runtime.kernels import arguments
from runtime.kernels.attention import AttentionResult, packed_layout_like
from runtime.kernels.attention_backward import AttentionGradients
from runtime.kernels.gradient_statistics import LOG2_E
from runtime.ops import attention_checks, attention_gradients, varlen_calls, varlen_differentiated, varlen_gradients


def seen_by(pattern: str, q: Any, k: Any, of_q: Any, of_k: Any, lists: Any = ()) -> torch.Tensor:
    """How often each query sees each key: (1, heads, tokens, key tokens)."""
    seen = torch.zeros((1, q.shape[1], q.shape[2], k.shape[2]))
    model = scored_pattern(pattern).pattern
    ends = zip(itertools.pairwise(of_q.tolist()), itertools.pairwise(of_k.tolist()), strict=True)
    for number, ((q_begin, q_end), (k_begin, k_end)) in enumerate(ends):
        query = torch.arange(q_end - q_begin)[:, None]
        key = torch.arange(k_end - k_begin)[None, :]
        visible = torch.as_tensor(model.visible(query, key, q_end - q_begin, k_end - k_begin))
        shown = visible.expand(query.shape[0], key.shape[1]).float()
        seen[:, :, q_begin:q_end, k_begin:k_end] = _listed(model, lists, number, q_begin, shown)
    return seen


def _listed(model: Any, lists: Any, number: int, q_begin: int, shown: torch.Tensor) -> torch.Tensor:
    """How often the lists of a sequence show its pairs; ``shown`` are those of its partial blocks."""
    if not lists:
        return shown
    counts, partial, full_counts, full = lists
    total = torch.zeros((q_heads := max(partial.shape[1], 1), *shown.shape))
    for count, entries, mask in ((counts, partial, shown), (full_counts, full, torch.ones_like(shown))):
        for head in range(q_heads if entries is not None else 0):
            for query in range(shown.shape[0]):
                row = q_begin // model.block.q + number + query // model.block.q
                of_head = head % entries.shape[1]
                listed = entries[0, of_head, row].tolist()[: None if count is None else int(count[0, of_head, row])]
                for block in listed:
                    keys = slice(block * model.block.kv, (block + 1) * model.block.kv)
                    if block >= 0:
                        total[head, query, keys] += mask[query, keys]
    return total


def _inside(bounds: Any, tokens: int) -> torch.Tensor:
    token = torch.arange(tokens)
    return (token >= bounds[0]) & (token < bounds[-1])


def _like(tensor: torch.Tensor) -> torch.Tensor:
    shape, strides, dtype = packed_layout_like(tensor, tensor.dtype)
    return torch.empty_strided(shape, strides, dtype=dtype)


class PackedKernel:
    """Stands for an AttentionKernel. What it does not write is NaN."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *indices: Any,
        scale: Any,
        out: Any,
        sink: Any,
        return_lse: bool,
        **numbers: Any,
    ) -> AttentionResult:
        self.calls.append({"q": q, "out": out, "sink": sink, "return_lse": return_lse})
        *lists, of_q, of_k = indices
        assert (sink is not None) == self.spec.sink
        seen = seen_by(pattern_text(self.spec.pattern, numbers), q, k, of_q, of_k, lists)
        found, lse = attention_oracle.attention(q, k, v, seen, scale=scale, softcap=self.spec.softcap, sink=sink)
        outside = ~_inside(of_q, q.shape[2])
        unwritten = torch.nan if out is None else out[:, :, outside].clone()
        out = _like(q) if out is None else out
        out.copy_(found)
        out[:, :, outside], lse[:, :, outside] = unwritten, torch.nan
        return AttentionResult(out, lse.float() if return_lse else None)


class PackedBackwardKernel:
    """Stands for an AttentionBackwardKernel."""

    def __init__(self, spec: AttentionBackwardSpec) -> None:
        self.spec = spec
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *indices: Any,
        out: Any,
        dout: Any,
        lse: Any,
        scale: Any,
        dlse: Any = None,
        stats: Any = None,
        **numbers: Any,
    ) -> AttentionGradients:
        for name, tensor in {"q": q, "k": k, "v": v, "out": out, "dout": dout}.items():
            arguments.check_strides(name, tensor)
        assert lse.is_contiguous() and (dlse is None or dlse.is_contiguous())
        self.calls.append({"dlse": dlse, "stats": stats})
        *lists, of_q, of_k = indices
        outside = ~_inside(of_q, q.shape[2])
        out, lse = out.clone(), lse.clone()
        out[:, :, outside], lse[:, :, outside] = 0.0, -torch.inf
        seen = seen_by(pattern_text(self.spec.pattern, numbers), q, k, of_q, of_k, lists)
        options = {"dlse": dlse, "scale": scale, "softcap": self.spec.softcap}
        grads = attention_oracle.gradients(q, k, v, out, lse, dout, seen, **options)
        made = {name: _like(t).copy_(grads[name]) for name, t in (("dq", q), ("dk", k), ("dv", v))}
        wanted = {"dq": ("dq",), "dkdv": ("dk", "dv"), "dq_dkdv": ("dq", "dk", "dv")}[self.spec.gradients]
        if stats is None:
            delta = (out.float() * dout.float()).sum(-1) - (0.0 if dlse is None else dlse)
            exists = lse > -torch.inf
            rows = torch.where(exists, lse * LOG2_E, torch.inf), torch.where(exists, delta, 0.0)
            stats = torch.stack(rows, -1).flip(2)  # in another order than tokens
        given = {name: made[name] if name in wanted else None for name in ("dq", "dk", "dv")}
        return AttentionGradients(**given, stats=stats)


class Loaded(dict[NamedSpec, Any]):
    """The kernels that were asked for, by their spec."""

    def __call__(self, named: NamedSpec, device: torch.device) -> Any:
        assert named.spec.layout == "varlen"  # type: ignore[union-attr]
        kernel = PackedKernel if isinstance(named.spec, AttentionSpec) else PackedBackwardKernel
        return self.setdefault(named, kernel(named.spec))  # type: ignore[arg-type]


def install(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a") -> Loaded:
    """Make ``varlen_attention`` compute by the definition, with the choice of kernels of an H100."""
    loaded = Loaded()
    for module in (varlen_calls, attention_gradients):
        monkeypatch.setattr(module, "_loaded", loaded)
        monkeypatch.setattr(module, "arch_of", lambda device: arch)
    for module in (varlen_calls, varlen_gradients):
        monkeypatch.setattr(module, "_routes", arguments.Signatures())
    monkeypatch.setattr(varlen_differentiated, "_permitted", arguments.Signatures())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    for checked in (varlen_calls, attention_checks, arguments):
        monkeypatch.setattr(checked, "check_tensor", _check_tensor)
    return loaded
