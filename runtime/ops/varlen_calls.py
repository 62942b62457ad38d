"""Attention of packed sequences on real tensors: checks, the choice of a kernel, and its calls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from codegen.arch import ARCHS
from codegen.library import NamedSpec
from codegen.scored_pattern import ScoredPattern
from codegen.select.choice import Choice, choose
from codegen.select.problem import rounded
from codegen.select.shipped import Verified
from runtime.checks import check_dense, refuse_capture
from runtime.errors import ArgumentError
from runtime.kernel import load_kernel
from runtime.kernels.arguments import Signatures, check_scale, check_sink, check_strides, check_tensor
from runtime.kernels.attention import AttentionKernel, AttentionResult
from runtime.kernels.pattern_numbers import numbers_for
from runtime.log import logger
from runtime.ops.attention_checks import check_no_overlap
from runtime.ops.attention_choice import (
    CLASSES_KEPT,
    DTYPES,
    HEAD_DIMS,
    arch_of,
    kernel_head_dim,
)
from runtime.ops.attention_extras import check_softcap
from runtime.ops.packed_lists import NAMES, Lists, check_list_values, check_lists, of_heads
from runtime.receipts import permit
from runtime.receipts.mode import is_on, mode

RANK = 3  # of q, k and v
KERNELS_KEPT = 64


class Bounds(NamedTuple):
    """Where sequences lie in packed tensors: each int32 (sequences + 1,).

    Attributes:
        cu_seqlens_q: in q, the result and the log-sum-exp.
        cu_seqlens_k: in k and v.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


@dataclass(frozen=True)
class VarlenClass:
    """A class of calls that share a kernel.

    Attributes:
        scored: the pattern.
        arch: architecture of the device.
        device_name: as torch has it; None if there is no device.
        dtype: name of the type of q, k and v.
        head_dim: of the calls.
        softcap: cap of the logits.
        sink: whether calls have sinks.
        heads: query heads.
        kv_heads: heads of K and V.
        sequences: packed sequences, rounded.
        q_tokens: tokens of q for each sequence, rounded.
        k_tokens: those of k, likewise.
        verified_only: whether kernels without a receipt are refused.
    """

    scored: ScoredPattern
    arch: str
    device_name: str | None
    dtype: str
    head_dim: int
    softcap: float | None
    sink: bool
    heads: int
    kv_heads: int
    sequences: int
    q_tokens: int
    k_tokens: int
    verified_only: bool = False

    def fields(self) -> dict[str, Any]:
        """Fields of the spec that define the problem, without options that are off."""
        pads = self.head_dim not in HEAD_DIMS and not ARCHS[self.arch].has_tma
        options = {"softcap": self.softcap, "sink": self.sink, "pad_heads": pads}
        return {
            "op": "attention",
            "arch": self.arch,
            "dtype": self.dtype,
            "head_dim": kernel_head_dim(self.head_dim),
            "pattern": self.scored.pattern_fields,
            "layout": "varlen",
            **{name: value for name, value in options.items() if value},
        }

    def sizes(self) -> dict[str, int]:
        """Sizes of the problem, by name."""
        lengths = {"q_len": self.q_tokens, "kv_len": self.k_tokens}
        return {"batch": self.sequences, "heads": self.heads, "kv_heads": self.kv_heads, **lengths}


@dataclass(frozen=True, slots=True)
class _Route:
    """How calls of one kind are computed.

    Attributes:
        kernel: the kernel.
        scale: the softmax scale where a call gives none.
        numbers: numbers of the pattern by argument of the kernel; none where its spec has them.
    """

    kernel: AttentionKernel
    scale: float
    numbers: dict[str, Any]


_routes = Signatures()


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: Bounds,
    scored: ScoredPattern,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    lse: bool = False,
    out: torch.Tensor | None = None,
    validate: bool = False,
    lists: Lists = (),
) -> AttentionResult:
    """Compute attention of packed sequences, as ``varlen_attention`` describes it.

    Raises:
        ArgumentError: before anything is launched.
    """
    if scale is not None:
        check_scale(scale)
    if softcap is not None:
        softcap = check_softcap(softcap)
    route: _Route | None = None
    try:
        sizes = sizes_of(q, k, bounds)
        key = (
            scored.text,
            sizes,
            q.shape[1:],
            k.shape[1:],
            v.shape[1:],
            q.dtype,
            q.device,
            softcap,
            sink is not None,
            mode(),
        )
        route = _routes.find(key)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        key = None
    if route is None:
        _check(q, k, v, bounds, sink=sink, out=out)
        check_lists(q, k, bounds, scored, lists)
        route = _routes.keep(
            key, _remember(q, k, scored, sizes_of(q, k, bounds), softcap=softcap, sink=sink is not None)
        )
    try:
        if out is not None:
            check_no_overlap(
                out, {"q": q, "k": k, "v": v, **bounds._asdict(), "sink": sink, **dict(zip(NAMES, lists, strict=False))}
            )
        if validate:
            check_bound_values("cu_seqlens_q", bounds.cu_seqlens_q, q.shape[0])
            check_bound_values("cu_seqlens_k", bounds.cu_seqlens_k, k.shape[0])
            check_lists(q, k, bounds, scored, lists)
            check_list_values(q, bounds, scored, lists)
        if q.shape[0] == 0 or k.shape[0] == 0:
            _check(q, k, v, bounds, sink=sink, out=out)
            check_lists(q, k, bounds, scored, lists)
            return without_tokens(q, sink, out, lse=lse)
        heads_first = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        result = route.kernel(
            *heads_first,
            *of_heads(lists, q.shape[1], k.shape[1]),
            *bounds,
            scale=route.scale if scale is None else scale,
            out=None if out is None else out.transpose(0, 1).unsqueeze(0),
            sink=sink,
            return_lse=lse,
            **route.numbers,
        )
    except (ArgumentError, AttributeError, IndexError, RuntimeError, TypeError):
        _check(q, k, v, bounds, sink=sink, out=out)  # says more
        check_lists(q, k, bounds, scored, lists)
        raise
    written = result.out[0].transpose(0, 1) if out is None else out
    return AttentionResult(written, None if result.lse is None else result.lse[0])


def check_call(q: Any, k: Any, v: Any, bounds: Bounds, *, scale: Any, softcap: Any, sink: Any) -> float | None:
    """Check the arguments of a call; return the softcap as a float.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    if scale is not None:
        check_scale(scale)
    checked = None if softcap is None else check_softcap(softcap)
    _check(q, k, v, bounds, sink=sink, out=None)
    return checked


def without_tokens(q: torch.Tensor, sink: Any, out: torch.Tensor | None, *, lse: bool) -> AttentionResult:
    """The result of a call without queries, or without keys."""
    out = torch.zeros_like(q) if out is None else out.zero_()
    if not lse:
        return AttentionResult(out, None)
    of_rows = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32, device=q.device)
    return AttentionResult(out, of_rows if sink is None else of_rows.copy_(sink[:, None]))


def check_operands(q: Any, k: Any, v: Any, *, on_gpu: bool = True) -> None:
    """Check q, k and v against each other.

    Args:
        q, k, v: the operands.
        on_gpu: whether they must be there, and such as a kernel can address.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(name, tensor)
        if tensor.dtype not in DTYPES:
            raise ArgumentError(name, f"is {tensor.dtype}, expected torch.float16 or torch.bfloat16")
        if tensor.dtype != q.dtype:
            raise ArgumentError(name, f"is {tensor.dtype}, q is {q.dtype}: pass one type")
        if tensor.device != q.device:
            raise ArgumentError(name, f"is on {tensor.device}, q is on {q.device}")
        if tensor.dim() != RANK:
            shape = f"has {tensor.dim()} dimensions {tuple(tensor.shape)}"
            raise ArgumentError(name, f"{shape}, expected {RANK}: (tokens, heads, head_dim)")
        if on_gpu and tensor.shape[0]:
            check_tensor(name, tensor.detach(), q.dtype, RANK, q.device)
            check_strides(name, tensor.unsqueeze(0))
    kernel_head_dim(q.shape[2])
    if k.shape[2] != q.shape[2]:
        raise ArgumentError("k", f"has heads of {k.shape[2]}, q has heads of {q.shape[2]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ArgumentError("k", f"has {k.shape[1]} heads, q has {q.shape[1]}: expected a divisor of those")
    if v.shape != k.shape:
        raise ArgumentError("v", f"has shape {tuple(v.shape)}, k has {tuple(k.shape)}: expected the same")


def check_bounds(q: Any, bounds: Bounds) -> None:
    """Check types and shapes of the bounds of sequences.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    for name, tensor in bounds._asdict().items():
        check_dense(name, tensor)
        if tensor.dtype != torch.int32:
            raise ArgumentError(name, f"is {tensor.dtype}, expected torch.int32: pass {name}.to(torch.int32)")
        if tensor.device != q.device:
            raise ArgumentError(name, f"is on {tensor.device}, q is on {q.device}: pass {name}.to(q.device)")
        if tensor.dim() != 1 or tensor.shape[0] < 2:
            expected = "(sequences + 1,): where each begins, and where the last one ends"
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}, expected {expected}")
    of_q, of_k = (tensor.shape[0] for tensor in bounds)
    if of_k != of_q:
        sizes = f"has {of_k} entries, cu_seqlens_q has {of_q}"
        raise ArgumentError("cu_seqlens_k", f"{sizes}: pass as many")


def _check(q: Any, k: Any, v: Any, bounds: Bounds, *, sink: Any, out: Any) -> None:
    """Check all tensors of a call."""
    check_operands(q, k, v)
    check_bounds(q, bounds)
    if sink is not None:
        check_sink(sink, q.shape[1], q.device)
    if out is not None:
        check_out(q, out)


def check_out(q: torch.Tensor, out: Any) -> None:
    """Check the tensor to write into.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    check_tensor("out", out, q.dtype, RANK, q.device)
    if out.shape != q.shape:
        raise ArgumentError("out", f"has shape {tuple(out.shape)}, q has {tuple(q.shape)}: expected the same")
    check_strides("out", out.unsqueeze(0))


def refuses_unverified() -> bool:
    """Whether kernels without a receipt are refused."""
    return is_on()


def check_bound_values(name: str, bounds: torch.Tensor, tokens: int) -> None:
    """Check that bounds rise, from 0 or more to the number of tokens or less (synchronizes).

    Raises:
        ArgumentError: naming the entry that falls.
    """
    values = bounds.tolist()
    for place, (one, other) in enumerate(zip([0, *values], [*values, tokens], strict=True)):
        if one > other:
            where = f"entry {place}" if place < len(values) else f"the {tokens} tokens, after entry {place - 1}"
            raise ArgumentError(name, f"falls from {one} to {other} at {where}; expected rising bounds, 0 to {tokens}")


def sizes_of(q: torch.Tensor, k: torch.Tensor, bounds: Bounds) -> tuple[int, int, int]:
    """Sequences, and tokens of q and of k for each of them, rounded."""
    sequences = max(1, bounds.cu_seqlens_q.shape[0] - 1)
    of_q, of_k = (rounded(max(1, tensor.shape[0] // sequences)) for tensor in (q, k))
    return rounded(sequences), of_q, of_k


def _remember(
    q: torch.Tensor, k: torch.Tensor, scored: ScoredPattern, sizes: tuple[int, int, int], *, softcap: Any, sink: bool
) -> _Route:
    """Choose, compile and load the kernel of calls of a kind, whose arguments are checked."""
    place = arch_of(q.device), torch.cuda.get_device_name(q.device)
    kind = class_of(q, k, scored, sizes, place, softcap=softcap, sink=sink)
    choice = choice_of(kind)
    logger().debug("%s: %s: %s", choice.named.stem, choice.rule, choice.reason)
    kernel = _loaded(choice.named, q.device)
    return _Route(kernel, 1 / math.sqrt(q.shape[2]), numbers_for(kernel.spec.pattern, scored.pattern))


def class_of(
    q: torch.Tensor,
    k: torch.Tensor,
    scored: ScoredPattern,
    sizes: tuple[int, int, int],
    place: tuple[str, str | None],
    *,
    softcap: float | None,
    sink: bool,
) -> VarlenClass:
    """The class of a call with checked arguments.

    Args:
        q, k, scored: of the call.
        sizes: of ``sizes_of``.
        place: architecture and name of the device.
        softcap: cap of the logits.
        sink: whether the call has sinks.
    """
    return VarlenClass(
        scored=scored,
        arch=place[0],
        device_name=place[1],
        dtype=DTYPES[q.dtype],
        head_dim=q.shape[2],
        softcap=softcap,
        sink=sink,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        sequences=sizes[0],
        q_tokens=sizes[1],
        k_tokens=sizes[2],
        verified_only=is_on(),
    )


@lru_cache(maxsize=CLASSES_KEPT)
def choice_of(kind: VarlenClass) -> Choice:
    """The kernel of a class of calls, and the reason."""
    fields, sizes = kind.fields(), kind.sizes()

    def choice(verified: Verified | None) -> Choice:
        return choose(fields, sizes, device=kind.device_name, general=True, verified=verified)

    return permit.chosen(choice) if kind.verified_only else choice(None)


@lru_cache(maxsize=KERNELS_KEPT)
def _loaded(named: NamedSpec, device: torch.device) -> AttentionKernel:
    """Compile and load a kernel for a device."""
    refuse_capture("q", device)
    kernel = load_kernel(named, device=device)
    assert isinstance(kernel, AttentionKernel)
    return kernel
