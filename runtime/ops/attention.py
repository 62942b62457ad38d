"""block_sparse_attention: attention with any pattern in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from runtime.checks import check_dense, check_flag
from runtime.errors import ArgumentError
from runtime.kernels.attention import AttentionResult
from runtime.ops.attention_calls import attend
from runtime.ops.attention_checks import RANK, refuse_transformed
from runtime.ops.attention_differentiated import attend_with_gradients
from runtime.ops.attention_extras import TENSORS, Extras, check_numbers
from runtime.ops.attention_fp8 import attend_quantized, launch_quantized
from runtime.ops.attention_fp8_operator import operator as operator_fp8
from runtime.ops.attention_hints import refuse_keywords, refuse_pattern
from runtime.ops.attention_operator import operator
from runtime.ops.block_sizes import mask_block
from runtime.ops.modes import PLAIN, any_autocast, autocast, is_unwatched, is_watched
from runtime.ops.quantize_attention import OPERAND_TENSORS, QuantizedAttention
from runtime.patterns import BlockLists, Pattern, Score, operator_text, scored_of, with_score

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_grad_enabled = torch.is_grad_enabled  # every call asks: the look-up in torch is spared
_is_traced = torch.compiler.is_dynamo_compiling


@overload
def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | BlockMask,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    score: Score | str | Callable[..., Any] | None = ...,
    sink: torch.Tensor | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
    validate: bool = ...,
    deterministic: bool = ...,
) -> torch.Tensor: ...


@overload
def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | BlockMask,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    score: Score | str | Callable[..., Any] | None = ...,
    sink: torch.Tensor | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    return_lse: Literal[True],
    out: torch.Tensor | None = ...,
    validate: bool = ...,
    deterministic: bool = ...,
) -> AttentionResult: ...


def block_sparse_attention(
    q: torch.Tensor | QuantizedAttention,
    k: Any,
    v: Any = None,
    pattern: Any = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    score: Score | str | Callable[..., Any] | None = None,
    sink: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    validate: bool = False,
    deterministic: bool = True,
    **unknown: Any,
) -> torch.Tensor | AttentionResult:
    """Compute softmax(scale * q k^T) v over the keys that a pattern lets each query see.

    ``codegen.select`` chooses the kernel, and ``explain_attention`` shows the choice and the reason. The first call
    of a class of shapes compiles the kernel in seconds, and the cache keeps it. A call runs on torch's current stream
    and does not synchronize. A CUDA graph can capture it after a first call outside of the graph. Under
    ``torch.compile``, ``torch.export`` and dispatch modes, it is the operator
    ``sparse_kernel_codegen::block_sparse_attention``. Under ``torch.autocast``, q, k and v are cast to its type.

    A few queries over many keys, as in decoding, take the kernel of ``paged_attention``, whose thread blocks divide the
    keys (docs/guide/calling.md#few-queries). A call that needs gradients takes another kernel, whose result may differ
    in its last bits.

    q, k, v and ``sink`` have gradients, with every pattern and option; by default, they have the same bits in every
    call. Gradients over lists need blocks of 64 queries and keys, or multiples (docs/guide/training.md). If a gradient
    is required, ``out`` and arguments without gradients are refused. The backward pass keeps q, k, v, the result, its
    log-sum-exp, the lists, the sinks and ``kv_lengths``. Double backward and forward-mode differentiation
    (``torch.func.jvp``, dual tensors) are refused, also under ``torch.no_grad``.

    ``block_sparse_attention_fp8`` takes operands in FP8.

    Args:
        q: (batch, heads, q_len, head_dim), float16 or bfloat16, on a GPU; head_dim a multiple of 8 up to 256. The last
            dimension is contiguous, other strides are multiples of 8 elements.
        k: (batch, kv_heads, kv_len, head_dim); heads is a multiple of kv_heads.
        v: as k.
        pattern: an object of ``patterns``, or a FlexAttention ``BlockMask``. Each call converts a ``BlockMask``;
            ``convert.from_block_mask`` converts it once. If the mask has one batch or head for all, its ``mask_mod``
            is evaluated for the first one only. Its lists are on the device of q. If no kernel has its block size,
            each call splits or merges blocks without changing the mask; sizes that do not allow this are refused.
        scale: softmax scale, from 1e-37 to 1e38; by default 1 / sqrt(head_dim).
        softcap: cap of the logits, from 0.001 to 1000: softcap * tanh(scale * q k^T / softcap). Each value needs a
            kernel of its own.
        score: transform of the logits, scale * q k^T, before the softmax: a ``patterns.Score``, or a text or function,
            which each call converts to one (docs/reference/expressions.md). Not with ``softcap``. Its floating-point
            tensors have gradients if their indices are batch, head, q_idx, kv_idx or q_idx - kv_idx.
        sink: float32 (heads,), a logit that is added to the softmax sum of each row of its head.
        kv_lengths: int32 (batch or 1,), number of keys of each batch: later keys are hidden from all queries. The
            positions of the pattern stay the same.
        return_lse: also return the log-sum-exp.
        out: (batch, heads, q_len, head_dim), the tensor for the result; it overlaps no input. By default, a new tensor
            in the layout of q.
        validate: also check the values of lists, lengths and sinks, and that the lists are complete. Synchronizes.
        deterministic: gradients have the same bits in every call. If False, the gradient of q may be summed in any
            order if that is faster: on sm_90a, causal with heads of up to 64.
            ``torch.use_deterministic_algorithms(True)`` has precedence. The result has the same bits either way.
        unknown: other keywords are refused. For keywords of other libraries, the error names the counterpart.

    Returns:
        The result, in q's type: 0 for a query that sees no key. With ``return_lse`` an ``AttentionResult`` (out, lse);
        lse is float32 (batch, heads, q_len), the natural logarithm of each row's sum of exp(logit), -inf without keys.

    Raises:
        ArgumentError: with the argument, its value and the allowed values, before anything is launched.
        DeviceError: for a device without kernels.
        SpecError: for an option that no kernel has, or a required gradient that no kernel computes.
        ToolchainError, CompileError, CacheError: if a kernel cannot be built, at the first call.
    """
    if not (type(return_lse) is type(validate) is type(deterministic) is bool):
        _check_flags(return_lse=return_lse, validate=validate, deterministic=deterministic)
    if unknown:
        refuse_keywords(unknown, block_sparse_attention.__kwdefaults__ or ())
    if v is None or not isinstance(pattern, Pattern):
        if isinstance(q, QuantizedAttention):
            options = {"scale": scale, "softcap": softcap, "score": score, "sink": sink, "kv_lengths": kv_lengths}
            return _former(q, (k, v, pattern), return_lse=return_lse, out=out, validate=validate, **options)
        pattern = pattern_of(pattern, q, k)
    tensors = pattern.index_tensors()
    if score is not None:
        score, tensors = with_score(pattern, tensors, score, q, k)
    extras = Extras(sink, kv_lengths, scale, softcap)
    traced = _is_traced()
    if traced or any_autocast():
        q, k, v = autocast(q, k, v)
    overflow = pattern.overflow if validate and isinstance(pattern, BlockLists) else None
    plain = not traced and _is_plain((q, k, v, out, *extras[:TENSORS], *tensors))
    compute: Callable[..., AttentionResult] = attend
    computed: Any
    if plain and not _needs_gradients(q, k, v, sink, tensors):
        computed = scored_of(pattern, score)
    elif plain and out is None and not (_learns(tensors) or _has_inference(q, k, v, *extras[:TENSORS], *tensors)):
        compute, computed = partial(attend_with_gradients, deterministic=deterministic), scored_of(pattern, score)
    else:
        _check_operator(extras, q=q, k=k, v=v, out=out)
        compute, computed = partial(operator, deterministic=deterministic), operator_text(pattern, score)
    result = compute(
        q,
        k,
        v,
        tensors,
        computed,
        extras=extras,
        lse=return_lse,
        out=out,
        validate=validate,
        overflow=overflow,
    )
    return result if return_lse else result[0]


def _former(given: QuantizedAttention, others: tuple[Any, Any, Any], **options: Any) -> torch.Tensor | AttentionResult:
    """The former call of operands in FP8; of the others, k or the pattern is the pattern."""
    k, v, pattern = others
    if v is not None or (k is not None and pattern is not None):
        raise ArgumentError("v" if v is not None else "k", "is given beside operands in FP8: pass the pattern alone")
    if not _is_traced():
        words = "block_sparse_attention of operands in FP8 is now block_sparse_attention_fp8(operands, pattern, ...)"
        warnings.warn(words, DeprecationWarning, stacklevel=3)
    call: Callable[..., torch.Tensor | AttentionResult] = block_sparse_attention_fp8
    return call(given, k if pattern is None else pattern, **options)


@overload
def block_sparse_attention_fp8(
    operands: QuantizedAttention,
    pattern: Pattern | BlockMask,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    score: Score | str | Callable[..., Any] | None = ...,
    sink: torch.Tensor | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
    validate: bool = ...,
) -> torch.Tensor: ...


@overload
def block_sparse_attention_fp8(
    operands: QuantizedAttention,
    pattern: Pattern | BlockMask,
    *,
    scale: float | None = ...,
    softcap: float | None = ...,
    score: Score | str | Callable[..., Any] | None = ...,
    sink: torch.Tensor | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    return_lse: Literal[True],
    out: torch.Tensor | None = ...,
    validate: bool = ...,
) -> AttentionResult: ...


def block_sparse_attention_fp8(
    operands: QuantizedAttention,
    pattern: Pattern | BlockMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    score: Score | str | Callable[..., Any] | None = None,
    sink: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor | AttentionResult:
    """Compute the attention of ``block_sparse_attention`` with operands in FP8 (docs/guide/fp8.md).

    Under ``torch.compile``, ``torch.export`` and dispatch modes it is the operator
    ``sparse_kernel_codegen::block_sparse_attention_fp8``. It has no gradients.

    Args:
        operands: q, k and v in FP8, of ``quantize_attention`` or ``quantized_operands``.
        pattern: an object of ``runtime.patterns``, or a FlexAttention ``BlockMask``, as there.
        scale: softmax scale, from 1e-37 to 1e38; by default 1 / sqrt(head_dim).
        softcap: cap of the logits, from 0.001 to 1000, as there. Not with keys whose mean was subtracted
            (``smooth_k=True``); neither are ``score`` and ``sink``.
        score: what becomes of the logits, as there.
        sink: float32 (heads,), as there.
        kv_lengths: int32 (batch or 1,), keys of each batch that exist, as there.
        return_lse: whether to return the log-sum-exp too.
        out: (batch, heads, q_len, head_dim) of type ``operands.output``, where to write the result; by default new.
        validate: also check the values of lists, lengths, scales and sinks, and that the lists are whole. Synchronizes.

    Returns:
        The result, in ``operands.output``: (batch, heads, q_len, head_dim), 0 for a query that sees no key. With
        ``return_lse`` an ``AttentionResult`` (out, lse): lse is float32 (batch, heads, q_len), the natural logarithm.

    Raises:
        ArgumentError: naming the argument, before anything is launched; for an operand that requires a gradient too.
        DeviceError: for a GPU without kernels.
        SpecError: for an option that no kernel has.
        ToolchainError, CompileError, CacheError: if a kernel cannot be built, at the first call.
    """
    for name, flag in (("return_lse", return_lse), ("validate", validate)):
        check_flag(name, flag)
    if not isinstance(operands, QuantizedAttention):
        hint = "quantize_attention(q, k, v) makes it"
        raise ArgumentError("operands", f"is {type(operands).__name__}, expected a QuantizedAttention: {hint}")
    extras = Extras(sink, kv_lengths, scale, softcap)
    options: dict[str, Any] = {"extras": extras, "lse": return_lse, "out": out}
    pattern = pattern_of(pattern, operands.q, operands.k)
    tensors = pattern.index_tensors()
    if score is not None:
        score, tensors = with_score(pattern, tensors, score, operands.q, operands.k)
    if not (validate or _is_traced()) and is_unwatched():
        result, _ = launch_quantized(operands, tensors, scored_of(pattern, score), **options)
        if result is not None:
            return result if return_lse else result[0]
    # vars(operands) is nothing that torch 2.11 traces
    named = {**{name: getattr(operands, name) for name in OPERAND_TENSORS}, **extras.tensors(), "out": out}
    _refuse_gradients(named, tensors)
    overflow = pattern.overflow if validate and isinstance(pattern, BlockLists) else None
    options |= {"validate": validate, "overflow": overflow}
    direct = not _is_traced() and _is_plain((*named.values(), *tensors))
    if direct and not _needs_gradients(operands.q, operands.k, operands.v_t, sink, ()):
        found = attend_quantized(operands, tensors, scored_of(pattern, score), **options)
    else:
        _check_operator(extras)
        found = operator_fp8(operands, tensors, operator_text(pattern, score), **options)
    return found if return_lse else found[0]


def _refuse_gradients(named: dict[str, Any], tensors: tuple[Any, ...]) -> None:
    """Refuse tensors of a call in FP8 that require a gradient.

    Raises:
        ArgumentError: naming the first one.
    """
    for name, tensor in (*named.items(), *(("score or mask", tensor) for tensor in tensors)):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and _grad_enabled():
            raise ArgumentError(name, "requires a gradient, and FP8 has no backward: use bf16, or torch.no_grad()")


def _check_operator(extras: Extras, **tensors: Any) -> None:
    """Check arguments that torch's operators would refuse in their own words."""
    if _is_traced():
        return
    check_numbers(extras.scale, extras.softcap)
    for name, tensor in {**tensors, **extras.tensors()}.items():
        if tensor is not None:
            check_dense(name, tensor)


def _is_plain(tensors: tuple[Any, ...]) -> bool:
    """Whether a call needs no dispatcher: it has no mode, transform, tracer or subclass.

    Raises:
        ArgumentError: as ``_is_refused`` does.
    """
    if is_watched() or not PLAIN.issuperset(map(type, tensors)):
        return _is_refused(tensors)
    return True


def _needs_gradients(q: Any, k: Any, v: Any, sink: Any, tensors: tuple[Any, ...]) -> bool:
    """Whether autograd records a call."""
    if not _grad_enabled():
        return False
    try:
        if q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad):
            return True
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    except AttributeError:  # an argument is no tensor, which the checks of a call report
        pass
    return False


def _learns(tensors: tuple[Any, ...]) -> bool:
    """Whether a tensor of the score or of the mask requires a gradient, which the direct calls do not compute."""
    return any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def _check_flags(**flags: Any) -> None:
    """Check options that are bools.

    Raises:
        ArgumentError: naming the first that is not.
    """
    for name, flag in flags.items():
        check_flag(name, flag)


def _has_inference(*tensors: Any) -> bool:
    """Whether autograd cannot keep a tensor: it was made under ``torch.inference_mode``."""
    return any(isinstance(tensor, torch.Tensor) and tensor.is_inference() for tensor in tensors)


def _is_refused(tensors: tuple[Any, ...]) -> bool:
    """Whether an argument is not a tensor, which the checks of a call name; refuse some tensors.

    Raises:
        ArgumentError: for a tensor under ``torch.vmap``, and for a DTensor.
    """
    refuse_transformed(tensors)
    return any(t is not None and not hasattr(type(t), "__torch_function__") for t in tensors)


def pattern_of(pattern: Any, q: torch.Tensor, k: torch.Tensor) -> Pattern:
    """A pattern as it is, or that of a BlockMask.

    Raises:
        ArgumentError: for what is neither.
    """
    if isinstance(pattern, Pattern):
        return pattern
    from torch.nn.attention.flex_attention import BlockMask  # noqa: PLC0415 - takes long, and few calls need it

    if not isinstance(pattern, BlockMask):
        refuse_pattern(pattern)
    for name, tensor in (("q", q), ("k", k)):
        check_dense(name, tensor)
        if tensor.dim() != RANK:
            raise ArgumentError(name, f"has {tensor.dim()} dimensions {tuple(tensor.shape)}, expected {RANK}")
    from runtime.convert import from_block_mask  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    q_block, kv_block = pattern.BLOCK_SIZE
    block = mask_block((q_block, kv_block))
    found: Pattern = from_block_mask(pattern, q_len=q.shape[2], kv_len=k.shape[2], target=block)
    return found
