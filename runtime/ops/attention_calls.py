"""Calls of block-sparse attention on real tensors; kernels are remembered by pattern, shapes and options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from codegen.library import NamedSpec
from codegen.scored_pattern import ScoredPattern
from runtime.checks import refuse_capture
from runtime.errors import ArgumentError
from runtime.kernel import load_kernel
from runtime.kernels.arguments import Signatures, call_key, check_scale
from runtime.kernels.attention import AttentionKernel, AttentionResult
from runtime.kernels.attention_launch import AttentionLaunch
from runtime.kernels.pattern_numbers import numbers_for
from runtime.log import logger
from runtime.ops.attention_checks import (
    check_lists,
    check_no_overlap,
    check_operands,
    check_out,
    check_overflow,
    check_values,
    overlaps,
    read_tensors,
)
from runtime.ops.attention_choice import (
    CLASSES_KEPT,
    Call,
    ShapeClass,
    arch_of,
    chosen,
    kernel_head_dim,
    resolve,
)
from runtime.ops.attention_extras import TENSORS, Extras
from runtime.ops.attention_launches import Place, launch_again, launches
from runtime.ops.block_sizes import Tensors
from runtime.ops.few_queries import attend_few
from runtime.patterns import split_tensors
from runtime.receipts.mode import mode

KERNELS_KEPT = 256


@dataclass(frozen=True, slots=True)
class Route:
    """How calls of one kind are computed.

    Attributes:
        kernel: the kernel.
        scale: the softmax scale where a call gives none; None: the kernel's default.
        arranged: makes the kernel's index tensors of the caller's, q_len and kv_len; None if they are the same.
        indices: how many index tensors the kernel takes.
        numbers: numbers of the pattern by argument of the kernel; none where its spec has them.
        checked: keys of index tensors that are checked before ``arranged`` makes others of them.
    """

    kernel: AttentionKernel
    scale: float | None
    arranged: Callable[[Tensors, int, int], Tensors] | None
    indices: int
    numbers: Mapping[str, Any] = field(default_factory=dict)
    checked: Signatures = field(default_factory=Signatures)

    def indices_of(
        self,
        scored: ScoredPattern,
        tensors: Tensors,
        q: torch.Tensor,
        k: torch.Tensor,
        extras: Extras,
    ) -> Tensors:
        """The kernel's index tensors, made of the caller's.

        Raises:
            ArgumentError: for tensors that do not fit the pattern.
        """
        if self.arranged is not None:
            key = call_key(*tensors)
            if key is None or key not in self.checked:
                check_lists(scored, tensors, q, k)
                self.checked.keep(key, True)
            tensors = self.arranged(tensors, q.shape[2], k.shape[2])
        return extras.indices(tensors, self.indices)


_routes = Signatures()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Tensors,
    scored: ScoredPattern,
    *,
    extras: Extras,
    lse: bool = False,
    out: torch.Tensor | None = None,
    validate: bool = False,
    overflow: torch.Tensor | None = None,
    for_gradients: bool = False,
) -> AttentionResult:
    """Compute attention, as ``block_sparse_attention`` describes it.

    Args:
        q, k, v: the operands.
        tensors: index tensors of the pattern, in order.
        scored: the pattern and the score.
        extras: the optional tensors and numbers.
        out, validate: as there.
        lse: whether to return the log-sum-exp.
        overflow: of the lists.
        for_gradients: whether a backward pass reads the result, which then no kernel for decoding computes.

    Raises:
        ArgumentError, SpecError: before anything is launched.
        DeviceError, ToolchainError, CompileError, CacheError, UnverifiedError: at the first call of a kind.
    """
    if extras.scale is not None:
        check_scale(extras.scale)
    if extras.softcap is not None:
        extras = extras.with_softcap()  # before it is a part of a key
    place = None
    if not validate:
        read, options = tensors + extras[:TENSORS], (extras[TENSORS:], lse, for_gradients)
        result, place = launch_again(scored, read, (q, k, v), options, out)
        if result is not None:
            return result
    return _attend(
        q,
        k,
        v,
        tensors,
        scored,
        extras=extras,
        lse=lse,
        out=out,
        validate=validate,
        overflow=overflow,
        for_gradients=for_gradients,
        place=place,
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Tensors,
    scored: ScoredPattern,
    *,
    extras: Extras,
    lse: bool,
    out: torch.Tensor | None,
    validate: bool,
    overflow: torch.Tensor | None,
    for_gradients: bool,
    place: Place | None,
) -> AttentionResult:
    """Check a call and compute it; ``place`` is where its launch is kept for later calls, or None."""
    if not (tensors or for_gradients):
        options: dict[str, Any] = {"extras": extras, "lse": lse, "out": out, "validate": validate, "place": place}
        few = attend_few(q, k, v, scored, **options, arch_of=arch_of)
        if few is not None:
            return few
    key: Any = None
    route: Route | None = None
    aux: dict[str, torch.Tensor] = {}
    if scored.aux_names:
        tensors, aux = split_tensors(scored, tensors)
    try:
        shape = tensors[0].shape if tensors else ()  # type: ignore[union-attr]
        key = (scored.text, shape, q.shape, k.shape, q.dtype, q.device, extras.kind(), mode())
        last, route = _routes.last
        if key != last:
            route = _routes.find(key)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        key = route = None  # an argument is of another type, which the checks name
    is_new = route is None
    if route is None:
        _check(q, k, v, tensors, scored, extras=extras, aux=aux, out=out)
        call = Call(scored, shape, q.shape, k.shape, q.dtype, q.device, extras.features(), mode())
        route = _routes.keep(key, remember(call))
        route.checked.keep(call_key(*tensors), True)
    try:
        if out is not None and overlaps(out, (q, k, v, *extras[:TENSORS], *tensors, *aux.values())):
            check_no_overlap(out, read_tensors(q, k, v, tensors, aux, extras=extras))
        if validate:
            check_overflow(overflow)
        given = route.indices_of(scored, tensors, q, k, extras)
        if validate and route.arranged is not None:
            check_values(scored, tensors, (q.shape[2], k.shape[2]), extras)
            validate = False
        options = {**extras.options(route.scale), "out": out, "return_lse": lse, "aux": aux, **route.numbers}
        if is_new:
            route.kernel._bind_checked(q, k, v, *given, **options)
        found = route.kernel(q, k, v, *given, **options, validate=validate)
        if place is not None:
            launches.keep(*place, bound_launch(route, (q, k, v, *given), place, **options))
        return found
    except (ArgumentError, AttributeError, IndexError, RuntimeError, TypeError):
        _check(q, k, v, tensors, scored, extras=extras, aux=aux, out=out)  # says more
        raise


def bound_launch(route: Route, given: tuple[Any, ...], place: Place, **options: Any) -> AttentionLaunch | None:
    """The launch of a call of the kernel of a route that was made just before, with ``given`` and these options.

    Returns:
        The launch; None where later calls do more than launch: if index tensors are made for the kernel.
    """
    if route.arranged is not None or not isinstance(route.kernel, AttentionKernel):
        return None
    return route.kernel._bound_launch(*given, tensors=place.tensors, **options)


def _check(
    q: Any,
    k: Any,
    v: Any,
    tensors: Tensors,
    scored: ScoredPattern,
    *,
    extras: Extras,
    aux: dict[str, torch.Tensor],
    out: Any,
) -> None:
    """Check all tensors of a call, less those of expressions, which the kernel checks."""
    check_operands(q, k, v)
    extras.check_tensors(q)
    check_lists(scored, tensors, q, k)
    if out is not None:
        check_out(out, q, read_tensors(q, k, v, tensors, aux, extras=extras))


def remember(call: Call) -> Route:
    """Choose, compile and load the kernel of calls of a kind, whose arguments are checked."""
    device = call.device
    assert device is not None
    resolution = resolve(call, arch_of(device), torch.cuda.get_device_name(device))
    kernel = _kernel_of(resolution.shape_class, device)
    head_dim = call.q_shape[3]
    return Route(
        kernel,
        None if head_dim == kernel_head_dim(head_dim) else 1 / math.sqrt(head_dim),
        resolution.lists_of(),
        len(kernel.spec.index_tensors),
        numbers_for(kernel.spec.pattern, call.scored.pattern),
    )


@lru_cache(maxsize=CLASSES_KEPT)
def _kernel_of(shape_class: ShapeClass, device: torch.device) -> AttentionKernel:
    """The kernel of a class of calls on a device; classes may share it."""
    choice = chosen(shape_class)
    logger().debug("%s: %s: %s", choice.named.stem, choice.rule, choice.reason)
    return _loaded(choice.named, device)


@lru_cache(maxsize=KERNELS_KEPT)
def _loaded(named: NamedSpec, device: torch.device) -> AttentionKernel:
    """Compile and load a kernel for a device."""
    refuse_capture("q", device)
    kernel = load_kernel(named, device=device)
    assert isinstance(kernel, AttentionKernel)
    return kernel
