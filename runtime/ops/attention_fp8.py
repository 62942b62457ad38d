"""Calls of block-sparse attention with operands in FP8."""

from __future__ import annotations

from typing import Any

import torch

from codegen.scored_pattern import ScoredPattern
from codegen.wording import shown
from runtime.errors import ArgumentError
from runtime.kernels.arguments import FP8_DTYPES, Signatures, check_keys, check_scale, check_shape, check_tensor
from runtime.kernels.attention import AttentionResult
from runtime.ops.attention_calls import Route, bound_launch, remember
from runtime.ops.attention_checks import (
    RANK,
    check_lists,
    check_out,
    check_overflow,
    check_values,
    read_tensors,
)
from runtime.ops.attention_choice import DTYPES, Call, Fp8Call
from runtime.ops.attention_extras import TENSORS, Extras
from runtime.ops.attention_launches import Place, launch_again, launches
from runtime.ops.block_sizes import Tensors
from runtime.ops.quantize import BLOCK_ROWS
from runtime.ops.quantize_attention import QuantizedAttention
from runtime.patterns import split_tensors
from runtime.receipts.mode import mode

_SMOOTHED = (
    "is given, but k is without its mean, and a query's logits are off by a number of their own: call "
    "quantize_attention with smooth_k=False"
)
_NUMBERS = frozenset({int, float, type(None)})
_routes = Signatures()


def attend_quantized(
    given: QuantizedAttention,
    tensors: Tensors,
    scored: ScoredPattern,
    *,
    extras: Extras,
    lse: bool,
    out: torch.Tensor | None,
    validate: bool,
    overflow: torch.Tensor | None,
) -> AttentionResult:
    """Compute attention, as ``block_sparse_attention`` describes it, of operands in FP8.

    Args:
        given: the operands.
        tensors: index tensors of the pattern, in order.
        scored: the pattern and the score.
        extras: the optional tensors and numbers.
        out, validate: as there.
        lse: whether to return the log-sum-exp.
        overflow: of the lists.

    Raises:
        ArgumentError, SpecError: before anything is launched.
    """
    q, k, place = given.q, given.k, None
    if not validate:
        found, place = launch_quantized(given, tensors, scored, extras=extras, lse=lse, out=out)
        if found is not None:
            return found
    tensors, aux = split_tensors(scored, tensors)
    if given.k_mean is not None:
        for name, option in (("softcap", extras.softcap), ("score", scored.score), ("sink", extras.sink)):
            if option is not None:
                raise ArgumentError(name, _SMOOTHED)
    if extras.scale is not None:
        check_scale(extras.scale)
    if extras.softcap is not None:
        extras = extras.with_softcap()  # before it is a part of a key
    options: dict[str, Any] = {"lse": lse, "out": out, "validate": validate, "overflow": overflow}
    key: Any = None
    route: Route | None = None
    try:
        fp8 = Fp8Call(given.output, given.q_rows, given.k_rows)
        shape = tensors[0].shape if tensors else ()  # type: ignore[union-attr]
        key = (scored.text, shape, q.shape, k.shape, q.dtype, q.device, extras.kind(), mode(), fp8)
        last, route = _routes.last
        if key != last:
            route = _routes.find(key)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        key = route = None  # something is of another type, which the checks name
    if route is None:
        _check(given, tensors, scored, extras)
        route = remember(Call(scored, shape, q.shape, k.shape, q.dtype, q.device, extras.features(), mode(), fp8))
        _routes.keep(key, route)
    try:
        found = _call(given, tensors, aux, scored, route, extras=extras, place=place, **options)
    except (ArgumentError, AttributeError, IndexError, RuntimeError, TypeError):
        _check(given, tensors, scored, extras)
        raise
    return _with_mean(given, found, extras.scale)


def launch_quantized(
    given: QuantizedAttention,
    tensors: Tensors,
    scored: ScoredPattern,
    *,
    extras: Extras,
    lse: bool,
    out: Any,
) -> tuple[AttentionResult | None, Place | None]:
    """Compute attention by the launch of an earlier call with arguments like these, those of ``attend_quantized``.

    Returns:
        The result, None without such a launch; the place where one is to be kept, None if it is not.
    """
    if not _NUMBERS.issuperset(map(type, extras[TENSORS:])):
        return None, None
    others = (given.q_scale, given.k_scale, given.v_scale, given.k_mean, given.mean_logits)
    options = (*extras[TENSORS:], lse, given.output, given.q_rows, given.k_rows)
    read = (*tensors, *extras[:TENSORS], *others)
    found, place = launch_again(scored, read, (given.q, given.k, given.v_t), options, out)
    return None if found is None else _with_mean(given, found, extras.scale), place


def _with_mean(given: QuantizedAttention, found: AttentionResult, scale: float | None) -> AttentionResult:
    """The result, with the mean of the keys in its log-sum-exp."""
    if found.lse is None or given.mean_logits is None:
        return found
    factor = given.q.shape[3] ** -0.5 if scale is None else scale
    return AttentionResult(found.out, found.lse.add_(given.mean_logits, alpha=factor))


def _check(given: QuantizedAttention, tensors: Tensors, scored: ScoredPattern, extras: Extras) -> None:
    """Check all arguments of a call."""
    check_codes(given)
    extras.check(given.q)
    check_lists(scored, tensors, given.q, given.k)


def _call(
    given: QuantizedAttention,
    tensors: Tensors,
    aux: dict[str, torch.Tensor],
    scored: ScoredPattern,
    route: Route,
    *,
    extras: Extras,
    place: Place | None,
    lse: bool,
    out: torch.Tensor | None,
    validate: bool,
    overflow: torch.Tensor | None,
) -> AttentionResult:
    """Call the kernel of a route."""
    q, k = given.q, given.k
    if given.mean_logits is not None and lse:
        check_tensor("mean_logits", given.mean_logits, torch.float32, RANK - 1, q.device)
        sizes = [(name, (size,)) for name, size in zip(("batch", "heads", "q_len"), q.shape, strict=False)]
        check_shape("mean_logits", given.mean_logits.shape, sizes)
    scales = {"q_scale": given.q_scale, "k_scale": given.k_scale, "v_scale": given.v_scale}
    if out is not None:
        inputs = read_tensors(q, k, given.v_t, tensors, aux, extras=extras)
        check_out(out, q, {**inputs, **scales, "mean_logits": given.mean_logits}, dtype=given.output)
    if validate:
        check_overflow(overflow)
    indices = route.indices_of(scored, tensors, q, k, extras)
    if validate and route.arranged is not None:
        check_values(scored, tensors, (q.shape[2], k.shape[2]), extras)
        check_scales(scales)
    kernel: Any = route.kernel
    options = {**extras.options(route.scale), "out": out, "return_lse": lse, "aux": aux, **route.numbers}
    validate = validate and route.arranged is None
    found: AttentionResult = kernel(q, k, given.v_t, *indices, **scales, validate=validate, **options)
    if place is not None:
        options["scales"] = tuple(scales.values())
        launches.keep(*place, bound_launch(route, (q, k, given.v_t, *indices), place, **options))
    return found


def check_scales(scales: dict[str, torch.Tensor]) -> None:
    """Check that scales are positive and finite (synchronizes).

    Raises:
        ArgumentError: with the first one that is not.
    """
    for name, tensor in scales.items():
        check_tensor(name, tensor, torch.float32, RANK - 1)
        wrong = tensor[~((tensor > 0) & tensor.isfinite())].tolist()
        if wrong:
            raise ArgumentError(name, f"has {wrong[0]}, expected positive, finite numbers")


def check_codes(given: QuantizedAttention) -> None:
    """Check operands in FP8 against each other.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    q, k, v_t = given.q, given.k, given.v_t
    if not isinstance(q, torch.Tensor) or q.dtype not in FP8_DTYPES:
        what = q.dtype if isinstance(q, torch.Tensor) else type(q).__name__
        expected = " or ".join(map(str, FP8_DTYPES))
        raise ArgumentError("q", f"is {what}, expected {expected}: sparse_kernel_codegen.quantize_attention makes it")
    for name, tensor in (("q", q), ("k", k), ("v_t", v_t)):
        check_tensor(name, tensor, q.dtype, RANK, q.device)
    if not isinstance(given.output, torch.dtype) or given.output not in DTYPES:
        raise ArgumentError("output", f"is {shown(given.output)}, expected {' or '.join(map(str, DTYPES))}")
    for name, rows in (("q_rows", given.q_rows), ("k_rows", given.k_rows)):
        if type(rows) is not int or rows not in BLOCK_ROWS:
            raise ArgumentError(name, f"is {shown(rows)}, expected {' or '.join(map(str, BLOCK_ROWS))}")
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    check_keys(q, k)
    of_v = [("batch", (batch,)), ("kv_heads", (kv_heads,)), ("head_dim", (head_dim,)), ("keys", None)]
    check_shape("v_t", v_t.shape, of_v)
    for name, tensor, count, rows, length in (
        ("q_scale", given.q_scale, heads, given.q_rows, q_len),
        ("k_scale", given.k_scale, kv_heads, given.k_rows, kv_len),
    ):
        check_tensor(name, tensor, torch.float32, RANK - 1, q.device)
        blocks = (f"blocks of {rows} rows", (-(-length // rows),))
        check_shape(name, tensor.shape, [("batch", (batch,)), ("heads", (count,)), blocks])
    check_tensor("v_scale", given.v_scale, torch.float32, RANK - 1, q.device)
    sizes = [("batch", (batch,)), ("heads", (kv_heads,)), ("head_dim", (head_dim,))]
    check_shape("v_scale", given.v_scale.shape, sizes)
