"""block_sparse_attention: attention with any pattern in one call."""

from __future__ import annotations

import importlib
from typing import Any, Literal, overload

import torch

from runtime.errors import ArgumentError
from runtime.kernels.attention import AttentionResult
from runtime.ops.attention_calls import attend
from runtime.ops.attention_checks import refuse_gradients, refuse_transformed
from runtime.ops.attention_operator import operator
from runtime.patterns import BlockLists, Pattern

# What a call asks in a tenth of the time that torch's own functions of Python take.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


@overload
def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink: torch.Tensor | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
    validate: bool = ...,
) -> torch.Tensor: ...


@overload
def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink: torch.Tensor | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    return_lse: Literal[True],
    out: torch.Tensor | None = ...,
    validate: bool = ...,
) -> AttentionResult: ...


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor | AttentionResult:
    """Compute softmax(scale * q k^T) v over the keys that a pattern lets each query see.

    The kernel is chosen by ``codegen.select``, compiled at the first call of its class of shapes (seconds, once: the
    cache keeps it) and remembered; ``runtime.explain_attention`` says which one it is, and why. A call runs on torch's
    current stream, does not synchronise and can be captured in a CUDA graph after a first call outside of it. Under
    ``torch.compile``, ``torch.export`` and dispatch modes it is the operator
    ``sparse_kernel_codegen::block_sparse_attention``. Under ``torch.autocast`` q, k and v are cast to its type.

    Args:
        q: (batch, heads, q_len, head_dim), float16 or bfloat16, on a GPU; head_dim a multiple of 8 up to 256. The last
            dimension is contiguous, other strides are multiples of 8 elements.
        k: (batch, kv_heads, kv_len, head_dim); heads is a multiple of kv_heads.
        v: as k.
        pattern: an object of ``runtime.patterns``, or a FlexAttention ``BlockMask``, which is converted in each call:
            ``runtime.convert.from_block_mask`` does it once. Its lists lie on the device of q. Blocks of other sizes
            than kernels are made for are split or merged in each call, exactly; where that is impossible they are
            refused.
        scale: softmax scale, from 1e-37 to 1e38; by default 1 / sqrt(head_dim).
        softcap: cap of the logits, from 0.001 to 1000: softcap * tanh(scale * q k^T / softcap). Each value is a kernel.
        sink: float32 (heads,), a logit that joins the sum of each row of its head, as a key without a value would.
        kv_lengths: int32 (batch or 1,), keys of each batch that exist: later ones are hidden from all queries. The
            pattern's positions do not move.
        return_lse: whether to return the log-sum-exp too.
        out: (batch, heads, q_len, head_dim), where to write the result; it overlaps no input. By default it is new,
            in the layout of q.
        validate: also check the values of lists, lengths and sinks, and that the lists are whole. Synchronises.

    Returns:
        The result, in q's type: 0 for a query that sees no key. With ``return_lse`` an ``AttentionResult`` (out, lse);
        lse is float32 (batch, heads, q_len), the natural logarithm of each row's sum of exp(logit), -inf without keys.

    Raises:
        ArgumentError: naming the argument, what it was and what is allowed, before anything is launched.
        DeviceError: for a device that no kernels are written for.
        SpecError: for an option that no kernel has.
        ToolchainError, CompileError, CacheError: where a kernel cannot be built, at the first call.
    """
    pattern = pattern_of(pattern, q, k)
    tensors = pattern.index_tensors()
    if torch.is_autocast_enabled("cuda"):
        q, k, v = _cast(q), _cast(k), _cast(v)
    overflow = pattern.overflow if validate and isinstance(pattern, BlockLists) else None
    if not torch.compiler.is_compiling() and _is_plain(q, k, v, tensors, sink, kv_lengths, out):
        result = attend(
            q,
            k,
            v,
            tensors,
            pattern.spec_json,
            scale=scale,
            softcap=softcap,
            sink=sink,
            kv_lengths=kv_lengths,
            lse=return_lse,
            out=out,
            validate=validate,
            overflow=overflow,
        )
        return result if return_lse else result[0]
    refuse_gradients(q, k, v, sink, out)
    if not torch.compiler.is_compiling():
        refuse_transformed((q, k, v, sink, kv_lengths, out, *tensors))
    result = operator(
        q,
        k,
        v,
        tensors,
        pattern.spec_json,
        scale=scale,
        softcap=softcap,
        sink=sink,
        kv_lengths=kv_lengths,
        lse=return_lse,
        out=out,
        validate=validate,
        overflow=overflow,
    )
    return result if return_lse else result[0]


def _is_plain(q: Any, k: Any, v: Any, tensors: tuple[Any, ...], *others: Any) -> bool:
    """Return whether nothing but the kernel is to see a call: no mode, no transform, no tracer and no subclass.

    What is no tensor at all is plain too: the checks name it.
    """
    if _dispatch_modes() or _function_modes() or _is_tracing() or _functorch() is not None:
        return False
    for tensor in (q, k, v, *tensors, *others):
        if tensor is not None and type(tensor) not in _TENSORS and hasattr(type(tensor), "__torch_function__"):
            return False
    return True


def pattern_of(pattern: Any, q: torch.Tensor, k: torch.Tensor) -> Pattern:
    """Return a pattern, or that of a BlockMask.

    Raises:
        ArgumentError: for what is neither.
    """
    if isinstance(pattern, Pattern):
        return pattern
    from torch.nn.attention.flex_attention import BlockMask  # noqa: PLC0415 - takes long, and few calls need it

    if not isinstance(pattern, BlockMask):
        what = "an object of runtime.patterns or a FlexAttention BlockMask"
        raise ArgumentError("pattern", f"is {type(pattern).__name__}, expected {what}")
    found: Pattern = importlib.import_module("runtime.convert").from_block_mask(
        pattern, q_len=q.shape[2], kv_len=k.shape[2]
    )
    return found


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor of a GPU in autocast's type, as SDPA takes it; double stays."""
    if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.is_floating_point():
        return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype("cuda"))
    return tensor
