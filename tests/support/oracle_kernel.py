"""A kernel that computes by the definition, on any device, in place of those that ``block_sparse_attention`` loads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import attention_oracle
import pytest
import torch

from codegen.library import NamedSpec
from codegen.patterns import PatternBase
from codegen.spec import AttentionBackwardSpec, AttentionSpec
from runtime import checks
from runtime.errors import ArgumentError
from runtime.kernels import arguments
from runtime.kernels.attention import AttentionResult
from runtime.kernels.attention_backward import AttentionGradients
from runtime.kernels.aux_tensors import AuxArguments
from runtime.kernels.gradient_statistics import fill_statistics
from runtime.ops import (
    attention_calls,
    attention_checks,
    attention_choice,
    attention_differentiated,
    attention_gradients,
    attention_launches,
    few_queries,
)
from runtime.verify.aux_tensors import scored


def score_of(spec: AttentionSpec | AttentionBackwardSpec, aux: Any) -> Any:
    """Return what the score of a spec makes of logits; None without one."""
    return None if spec.score is None else partial(scored, spec.score.expression, aux=aux or {})


def pattern_text(pattern: PatternBase, numbers: dict[str, Any]) -> str:
    """The pattern of a call as JSON: with the ``numbers`` that the kernel leaves to the call."""
    assert bool(numbers) == pattern.is_general
    return (pattern.with_numbers(numbers) if numbers else pattern).model_dump_json()


class OracleKernel:
    """Stands for an AttentionKernel.

    Attributes:
        calls: their number.
        asked_lse: whether each of them asked for an LSE.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.calls = 0
        self.asked_lse: list[bool] = []

    def _bind_checked(self, *arguments: Any, **options: Any) -> None:
        """Nothing is kept for the call, which checks all again."""

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *tensors: Any,
        scale: Any,
        out: Any,
        sink: Any,
        return_lse: bool,
        validate: bool,
        aux: Any = None,
        **numbers: Any,
    ) -> AttentionResult:
        self.calls += 1
        self.asked_lse.append(return_lse)
        assert self.spec.lse
        _check_as_kernels_do(q, k, v, tensors, out=out, sink=sink, aux=aux)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise ArgumentError("q", "requires a gradient, but this kernel has no backward")
        if any(t is not None and t.device != q.device for t in tensors):
            raise ArgumentError("kv_indices", "is elsewhere")
        spec, shape = self.spec, (*q.shape[:3], k.shape[2])
        pattern, packed = pattern_text(spec.pattern, numbers), spec.pack_gqa
        names = [tensor.name for tensor in spec.index_tensors]
        lengths = tensors[names.index("kv_lengths")] if "kv_lengths" in names[: len(tensors)] else None
        lists = tensors[: len(spec.pattern.index_tensors)]
        for tensor in lists:
            if tensor is not None and tensor.dim() > 2 and tensor.shape[1] not in (1, q.shape[1] // packed):
                raise ArgumentError("kv_indices", f"has lists of {tensor.shape[1]} heads")
        _check_aux(spec, q, k, aux)

        def compute() -> tuple[Any, ...]:
            seen = attention_oracle.times_seen(pattern, lists, shape, lengths, aux)
            options = {"scale": scale, "softcap": spec.softcap, "sink": sink, "score": score_of(spec, aux)}
            return attention_oracle.attention(q, k, v, seen, **options)

        found, lse = _kept(compute, spec, pattern, q, k, v, lists, lengths, aux, scale, sink)
        out = torch.empty_like(q) if out is None else out
        out.copy_(found)
        return AttentionResult(out, lse if return_lse else None)


_KEPT = 8
_latest: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def _kept(compute: Callable[[], tuple[Any, ...]], *given: Any) -> tuple[Any, ...]:
    """Results by the contents of what they are computed from: tests compare calls with the same tensors.

    Args:
        compute: computes tensors of ``given`` and nothing else.
        given: tensors, also in tuples and mappings, and what else decides the results.
    """
    key = tuple(map(_contents, given))
    if key not in _latest:
        while len(_latest) >= _KEPT:
            del _latest[next(iter(_latest))]
        _latest[key] = compute()
    return tuple(tensor.clone() for tensor in _latest[key])


def _contents(value: Any) -> Any:
    """A value as part of a key; of a tensor its type, its shape and its bytes."""
    if isinstance(value, torch.Tensor):
        words = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return value.dtype, tuple(value.shape), words
    if isinstance(value, dict):
        return tuple((name, _contents(each)) for name, each in value.items())
    return tuple(map(_contents, value)) if isinstance(value, list | tuple) else value


def _check_as_kernels_do(q: Any, k: Any, v: Any, tensors: Any, *, out: Any, sink: Any, aux: Any) -> None:
    """Refuse what is no tensor of the right kind."""
    for name, tensor in (("q", q), ("k", k), ("v", v), *(() if out is None else (("out", out),))):
        _check_tensor(name, tensor.detach() if isinstance(tensor, torch.Tensor) else tensor, q.dtype, 4, q.device)
    arguments.check_shape("v", v.shape, [("k", (size,)) for size in k.shape])
    if out is not None:
        arguments.check_shape("out", out.shape, [("q", (size,)) for size in q.shape])
    if sink is not None:
        arguments.check_sink(sink.detach() if isinstance(sink, torch.Tensor) else sink, q.shape[1], q.device)
    for tensor in (*tensors, *(aux or {}).values()):
        if tensor is not None:
            checks.check_dense("an index tensor", tensor)
            if tensor.device != q.device:
                raise ArgumentError("an index tensor", f"is on {tensor.device}")


def _check_aux(spec: AttentionSpec, q: Any, k: Any, aux: Any) -> None:
    """Check the tensors of a spec's expressions, as kernels do."""
    checks_of: Any = AuxArguments(spec, SimpleNamespace(params=()))  # type: ignore[arg-type]
    checks_of.check(q, k.shape[2], arguments.aux_in_order(aux, checks_of.declared))


class OracleBackwardKernel:
    """Stands for an AttentionBackwardKernel: by the formulas in float64, from what that is given."""

    def __init__(self, spec: AttentionBackwardSpec) -> None:
        self.spec = spec
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *lists: Any,
        out: Any,
        dout: Any,
        lse: Any,
        scale: Any,
        dlse: Any,
        stats: Any = None,
        aux: Any = None,
        **numbers: Any,
    ) -> AttentionGradients:
        shape = (*q.shape[:3], k.shape[2])
        tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
        for name, tensor in tensors.items():
            assert tensor.dtype == arguments.TORCH_DTYPES[self.spec.dtype], name
            arguments.check_strides(name, tensor)
        for name, tensor in {**tensors, "lse": lse, "dlse": dlse, "stats": stats}.items():
            if tensor is not None:
                arguments.refuse_gradient(name, tensor)
        assert out.shape == dout.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
        assert all(t is None or t.dim() < 3 or t.shape[1] in (1, q.shape[1]) for t in lists)
        self.calls.append({**tensors, "lists": lists, "dlse": dlse, "stats": stats})
        spec, names = self.spec, [tensor.name for tensor in self.spec.forward.index_tensors]
        lengths = lists[names.index("kv_lengths")] if spec.kv_lengths else None
        own = lists[: len(spec.pattern.index_tensors)]
        _check_aux(spec.forward, q, k, aux)
        pattern = pattern_text(spec.pattern, numbers)

        def seen() -> Any:
            return attention_oracle.times_seen(pattern, own, shape, lengths, aux)

        def compute() -> tuple[Any, ...]:
            options = {"dlse": dlse, "scale": scale, "softcap": spec.softcap, "score": score_of(spec, aux)}
            found = attention_oracle.gradients(q, k, v, out, lse, dout, seen(), **options)
            return found["dq"], found["dk"], found["dv"]

        # Kernels of one pass share it: dQ, dK and dV are of the same formula, whichever of them a kernel computes.
        of_pass = pattern, spec.softcap, spec.score, own, lengths, aux, scale, dlse
        grads = _kept(compute, *of_pass, q, k, v, out, lse, dout)
        made = {
            name: torch.empty_like(tensor).copy_(gradient)
            for name, tensor, gradient in zip(("dq", "dk", "dv"), (q, k, v), grads, strict=True)
        }
        given = dict.fromkeys(("dq", "dk", "dv"))
        wanted = {"dq": ("dq",), "dkdv": ("dk", "dv"), "dq_dkdv": ("dq", "dk", "dv"), "daux": ()}[spec.gradients]
        of_aux = None
        if spec.gradients == "daux":
            names = spec.aux_gradients
            given_to = q, k, v, out, lse, dout, seen(), spec.score, aux
            of_aux = attention_oracle.aux_gradients(*given_to, names=names, dlse=dlse, scale=scale)
            of_aux = {name: gradient.to(aux[name].dtype) for name, gradient in of_aux.items()}
        if stats is None:
            stats = torch.full((*lse.shape[:2], lse.shape[2] + 1, 2), torch.nan)
            fill_statistics(stats, out, dout, lse, dlse)
        return AttentionGradients(**{**given, **{name: made[name] for name in wanted}}, stats=stats, daux=of_aux)


class LoadedGradients(dict[NamedSpec, OracleBackwardKernel]):
    """The gradient kernels that were asked for, by their spec."""

    def __call__(self, named: NamedSpec, device: torch.device) -> OracleBackwardKernel:
        assert isinstance(named.spec, AttentionBackwardSpec)
        return self.setdefault(named, OracleBackwardKernel(named.spec))


class Loaded(dict[str, OracleKernel]):
    """The kernels that were asked for, by their spec.

    Attributes:
        gradients: those of gradients.
        general: whether the spec leaves the pattern's numbers to the call, where it can.
    """

    def __init__(self) -> None:
        super().__init__()
        self.general = False
        self.gradients = LoadedGradients()

    def __call__(self, shape_class: attention_choice.ShapeClass, device: torch.device) -> OracleKernel:
        spec = attention_choice.chosen(shape_class).spec
        assert isinstance(spec, AttentionSpec)
        if self.general:
            spec = spec.model_copy(update={"pattern": spec.pattern.general()})
        return self.setdefault(spec.canonical_json(), OracleKernel(spec))


def install(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a") -> Loaded:
    """Make ``block_sparse_attention`` compute by the definition, with the choice of kernels of an H100."""
    loaded = Loaded()
    monkeypatch.setattr(attention_calls, "_kernel_of", loaded)
    for module in (attention_calls, attention_gradients):
        monkeypatch.setattr(module, "_routes", arguments.Signatures())
    monkeypatch.setattr(attention_differentiated, "_permitted", arguments.Signatures())
    for launches in (attention_launches.launches, attention_gradients._launches):
        monkeypatch.setattr(launches, "_kept", {})
    monkeypatch.setattr(few_queries, "has_receipt", lambda fields: False)  # this stands for the kernels of tiles alone
    monkeypatch.setattr(attention_calls, "arch_of", lambda device: arch)
    monkeypatch.setattr(attention_gradients, "arch_of", lambda device: arch)
    monkeypatch.setattr(attention_gradients, "_loaded", loaded.gradients)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(attention_checks, "check_tensor", _check_tensor)
    monkeypatch.setattr(arguments, "check_tensor", _check_tensor)  # of sinks
    return loaded


_real_check = arguments.check_tensor


def _check_tensor(name: str, tensor: Any, dtype: Any, rank: int, device: Any = None) -> None:
    """Check a tensor as one on a GPU is."""
    checks.check_dense(name, tensor)
    if tensor.device.type == "cpu" and not tensor.is_quantized:
        assert device in (None, tensor.device)
        wants = tensor.requires_grad  # what a kernel without a backward refuses
        tensor = torch.empty_like(tensor, device="meta").as_subclass(_OnGpu).requires_grad_(wants)
        device = None
    _real_check(name, tensor, dtype, rank, device)


class _OnGpu(torch.Tensor):
    device = torch.device("cuda", 0)  # type: ignore[assignment]
