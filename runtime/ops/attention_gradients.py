"""Gradients of block-sparse attention on real tensors: which kernels compute them, and their calls."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from codegen.library import NamedSpec
from codegen.select.backward import (
    BLOCK_SIZES,
    BackwardKernels,
    backward_archs,
    backward_kernels,
    check_arch,
    check_pattern,
)
from runtime.errors import ArgumentError
from runtime.kernel import load_kernel
from runtime.kernels.arguments import TMA_ALIGNMENT
from runtime.kernels.attention_backward import AttentionBackwardKernel
from runtime.ops.attention_choice import CLASSES_KEPT, DTYPES, LIST_RANK, arch_of
from runtime.ops.block_sizes import BlockFit, Tensors, block_fit

KERNELS_KEPT = 256
WITHOUT = "has no gradient yet: leave it out, or call it under torch.no_grad()"


class Gradients(NamedTuple):
    """Gradients of one call; None: not asked for.

    Attributes:
        dq: as q.
        dk: as k.
        dv: as v.
    """

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None


@dataclass(frozen=True)
class GradientChoice:
    """How the gradients of calls of a kind are computed.

    Attributes:
        kernels: their specs.
        fit: what becomes of the caller's lists; None: nothing.
    """

    kernels: BackwardKernels
    fit: BlockFit | None


def refuse_options(*, softcap: Any, sink: Any, kv_lengths: Any) -> None:
    """Refuse options that have no gradient.

    Raises:
        ArgumentError: naming the first that is given.
    """
    for name, value in (("softcap", softcap), ("sink", sink), ("kv_lengths", kv_lengths)):
        if value is not None:
            raise ArgumentError(name, f"is given, and attention with it {WITHOUT}")


def check_gradients(spec_json: str, *, softcap: Any, sink: Any, kv_lengths: Any) -> None:
    """Refuse what has no gradient on any device, of tensors whose sizes may not be known.

    Raises:
        ArgumentError, SpecError: naming the argument.
    """
    refuse_options(softcap=softcap, sink=sink, kv_lengths=kv_lengths)
    check_pattern(json.loads(spec_json))
    _fitted(spec_json, backward_archs()[0])


def _fitted(spec_json: str, arch: str) -> BlockFit | None:
    """Return what becomes of the caller's lists."""
    fit = block_fit(spec_json, arch, 1)
    pattern = json.loads(spec_json)
    block = pattern.get("block")
    if not isinstance(block, dict):
        return fit
    sizes = (block["q"], block["kv"]) if fit is None else fit.split
    if (fit is not None and fit.merges) or not set(sizes) <= set(BLOCK_SIZES):
        least = BLOCK_SIZES[0]
        allowed = f"with a gradient blocks have {least} queries, {least} keys or multiples of them"
        raise ArgumentError("block", f"is {(block['q'], block['kv'])}; {allowed}")
    return fit


@lru_cache(maxsize=CLASSES_KEPT)
def gradient_choice(spec_json: str, arch: str, dtype: torch.dtype, head_dim: int) -> GradientChoice:
    """Choose the kernels of the gradients of a call.

    Args:
        spec_json: the pattern, as JSON.
        arch: architecture of the device.
        dtype: of q, k and v.
        head_dim: of the call.

    Raises:
        ArgumentError, SpecError: naming what has no gradient.
    """
    check_arch(arch)
    check_pattern(json.loads(spec_json))
    fit = _fitted(spec_json, arch)
    pattern = json.loads(spec_json if fit is None else fit.spec_json(spec_json))
    return GradientChoice(backward_kernels(pattern, arch=arch, dtype=DTYPES[dtype], head_dim=head_dim), fit)


def chosen_for(q: torch.Tensor, spec_json: str) -> GradientChoice:
    """Return the choice for a call.

    Raises:
        DeviceError, ArgumentError, SpecError: for what has no gradient.
    """
    return gradient_choice(spec_json, arch_of(q.device), q.dtype, q.shape[3])


def attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Tensors,
    spec_json: str,
    *,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None = None,
    scale: float | None = None,
    dq: bool = True,
    dkdv: bool = True,
) -> Gradients:
    """Compute the gradients of a call of ``block_sparse_attention``.

    Nothing is copied but ``dout`` where a kernel cannot address it, as the gradient of a sum is one expanded element.

    Args:
        q, k, v: the operands.
        tensors: index tensors of the pattern, as the call was given them.
        spec_json: the pattern, as JSON.
        dout: (batch, heads, q_len, head_dim), the gradient of the result.
        out: the result.
        lse: float32 (batch, heads, q_len), its log-sum-exp.
        dlse: the gradient of lse; None where the loss does not depend on it.
        scale: of the call.
        dq: whether the gradient of q is wanted.
        dkdv: whether those of k and v are.

    Raises:
        ArgumentError, SpecError: before anything is launched.
        DeviceError, ToolchainError, CompileError, CacheError: at the first call of a kind.
    """
    choice = chosen_for(q, spec_json)
    if not (dq or dkdv):
        return Gradients(None, None, None)
    lists = tensors if choice.fit is None else choice.fit.apply(tensors, q.shape[2], k.shape[2])
    lists = _of_heads(lists, q.shape[1])
    options: dict[str, Any] = {"dout": _addressable(dout), "out": out, "lse": lse, "dlse": dlse, "scale": scale}
    of_q = of_k = of_v = stats = None
    if dq:
        kernel = _loaded(choice.kernels.dq, q.device)
        of_q, _, _, stats = kernel(q, k, v, *lists, **options)
    if dkdv:
        kernel = _loaded(choice.kernels.dkdv, q.device)
        _, of_k, of_v, _ = kernel(q, k, v, *lists, **options, stats=stats)
    return Gradients(of_q, of_k, of_v)


def _of_heads(tensors: Tensors, heads: int) -> Tensors:
    """Return lists of the heads of q, or of all at once, of lists of fewer heads."""
    return tuple(
        t if t is None or t.dim() < LIST_RANK or t.shape[1] in (1, heads) else t.repeat_interleave(heads // t.shape[1], 1)
        for t in tensors
    )


def _addressable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows kernels can read: itself, or a contiguous copy."""
    step = TMA_ALIGNMENT // tensor.element_size()
    strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    fits = tensor.stride(-1) == 1 and all(size == 1 or stride % step == 0 for size, stride in strides)
    if fits and tensor.data_ptr() % TMA_ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=KERNELS_KEPT)
def _loaded(named: NamedSpec, device: torch.device) -> AttentionBackwardKernel:
    """Compile and load a kernel for a device."""
    if torch.cuda.is_current_stream_capturing():
        reason = "the first backward pass of a kind compiles and loads its kernels: make one before the capture"
        raise ArgumentError("dout", f"is in a CUDA graph capture, and {reason}")
    kernel = load_kernel(named, device=device)
    assert isinstance(kernel, AttentionBackwardKernel)
    return kernel
