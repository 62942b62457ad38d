"""Gradients of block-sparse attention on real tensors: the choice of kernels, and their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from codegen.library import NamedSpec
from codegen.problem import Layout
from codegen.scored_pattern import ScoredPattern
from codegen.select.backward import (
    BLOCK_SIZES,
    BackwardKernels,
    aux_with_gradients,
    backward_archs,
    backward_kernels,
    check_arch,
    check_pattern,
)
from codegen.spec import AttentionBackwardSpec
from runtime.checks import refuse_capture
from runtime.errors import ArgumentError
from runtime.kernel import load_kernel
from runtime.kernels.arguments import TMA_ALIGNMENT, Signatures, check_sink
from runtime.kernels.attention_backward import AttentionBackwardKernel, AttentionGradients
from runtime.kernels.gradient_launch import GradientLaunch, Step
from runtime.kernels.gradient_statistics import fill_statistics, sink_gradient
from runtime.kernels.launches import Launches
from runtime.kernels.pattern_numbers import numbers_for
from runtime.ops.attention_choice import CLASSES_KEPT, DTYPES, LIST_RANK, arch_of, placed
from runtime.ops.attention_extras import TENSORS, Extras, Features
from runtime.ops.attention_launches import Place
from runtime.ops.block_sizes import BlockFit, Tensors, block_fit
from runtime.patterns import split_tensors
from runtime.receipts import permit
from runtime.receipts.mode import is_on, kept_by_mode, mode

KERNELS_KEPT = 256


class Gradients(NamedTuple):
    """Gradients of one call; None: not requested.

    Attributes:
        dq: as q.
        dk: as k.
        dv: as v.
        dsink: float32 (heads,).
        daux: of the tensors of the score that were named, in their order.
    """

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    dsink: torch.Tensor | None
    daux: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class GradientChoice:
    """How the gradients of calls of a kind are computed.

    Attributes:
        kernels: their specs.
        fit: how the caller's lists become those of the kernels; None where they are the same.
    """

    kernels: BackwardKernels
    fit: BlockFit | None

    @property
    def spec(self) -> AttentionBackwardSpec:
        """The spec of the kernel of dQ. Those of the others have the same pattern and options."""
        spec = self.kernels.dq.spec
        assert isinstance(spec, AttentionBackwardSpec)
        return spec


def check_gradients(scored: ScoredPattern, aux_gradients: Sequence[str] = ()) -> None:
    """Refuse patterns and tensors without a gradient on any device; sizes need not be known.

    Args:
        scored: the pattern and the score.
        aux_gradients: tensors of the score that require one.

    Raises:
        ArgumentError, SpecError: naming the argument.
    """
    check_pattern(scored.pattern)
    if aux_gradients:
        aux_with_gradients(scored.score, aux_gradients)
    _fitted(scored, backward_archs()[0])


def _fitted(scored: ScoredPattern, arch: str) -> BlockFit | None:
    """How the caller's lists become those of the kernels; None where they are the same."""
    fit, block = block_fit(scored, arch, 1), scored.block
    if block is None:
        return fit
    sizes = (block.q, block.kv) if fit is None else fit.split
    if (fit is not None and fit.merges) or not set(sizes) <= set(BLOCK_SIZES):
        least = BLOCK_SIZES[0]
        allowed = f"with a gradient blocks have {least} queries, {least} keys or multiples of them"
        raise ArgumentError("block", f"is {(block.q, block.kv)}; {allowed}")
    return fit


@lru_cache(maxsize=CLASSES_KEPT)
def gradient_choice(
    scored: ScoredPattern,
    arch: str,
    dtype: torch.dtype,
    head_dim: int,
    features: Features,
    *,
    aux_gradients: tuple[str, ...] = (),
    layout: Layout = "padded",
    deterministic: bool = True,
    verified_only: bool = False,
) -> GradientChoice:
    """Choose the kernels of the gradients of a call.

    Args:
        scored: the pattern and the score.
        arch: architecture of the device.
        dtype: of q, k and v.
        head_dim: of the call.
        features: of the call's extras.
        aux_gradients: tensors of the score whose gradients are wanted.
        layout: arrangement of the sequences.
        deterministic: whether the gradients have the same bits in every run.
        verified_only: whether kernels without a receipt are refused.

    Raises:
        ArgumentError, SpecError: naming what has no gradient.
        UnverifiedError: with ``verified_only``, where no kernels with receipts compute it.
    """
    check_arch(arch)
    check_pattern(scored.pattern)
    fit = _fitted(scored, arch)
    fitted = scored if fit is None else fit.fitted(scored)
    options: dict[str, Any] = {"score": fitted.score, "aux_gradients": aux_gradients, "deterministic": deterministic}
    options |= {"dtype": DTYPES[dtype], "head_dim": head_dim, "layout": layout}
    known = AttentionBackwardSpec.model_fields  # no sink, which the log-sum-exp has
    options |= {name: value for name, value in features.fields().items() if name in known}
    if verified_only:
        options["holds"] = permit.is_verified
    found = backward_kernels(fitted.pattern, arch=arch, **options)
    used = [*found.of_a_step(), *([found.dq, found.dkdv] if layout == "varlen" else [])]
    for named in used if verified_only else ():
        permit.check(named)
    return GradientChoice(found, fit)


def chosen_for(
    q: torch.Tensor,
    scored: ScoredPattern,
    features: Features,
    *,
    deterministic: bool,
    aux_gradients: Sequence[str] = (),
    layout: Layout = "padded",
) -> GradientChoice:
    """The choice for a call.

    Raises:
        DeviceError, ArgumentError, SpecError: for what has no gradient.
    """
    options: dict[str, Any] = {"aux_gradients": tuple(aux_gradients), "layout": layout, "verified_only": is_on()}
    options["deterministic"] = deterministic or torch.are_deterministic_algorithms_enabled()
    return gradient_choice(scored, arch_of(q.device), q.dtype, q.shape[-1], features, **options)


@dataclass(slots=True)
class GradientRoute:
    """How the gradients of calls of a kind are computed on a device.

    Attributes:
        kernels: their specs.
        fit: how the caller's lists become those of the kernels; None where they are the same.
        place: puts index tensors into the order of the kernels; None where it is the caller's.
        indices: how many index tensors the kernels take.
        numbers: numbers of the pattern by argument of the kernels; none where their specs have them.
        device: of the calls.
        loaded: kernels that calls have used, by the name of their spec.
    """

    kernels: BackwardKernels
    fit: BlockFit | None
    place: Callable[[Tensors], Tensors] | None
    indices: int
    numbers: dict[str, Any]
    device: torch.device
    loaded: dict[str, AttentionBackwardKernel] = field(default_factory=dict)

    @classmethod
    def of(cls, choice: GradientChoice, scored: ScoredPattern, device: torch.device) -> GradientRoute:
        """The route of a choice."""
        pattern, indices = choice.spec.pattern, choice.spec.forward.index_tensors
        place, numbers = placed(scored.pattern, pattern), numbers_for(pattern, scored.pattern)
        return cls(choice.kernels, choice.fit, place, len(indices), numbers, device)

    def kernel(self, named: NamedSpec) -> AttentionBackwardKernel:
        """A kernel of the route, compiled and loaded at its first use."""
        found = self.loaded.get(named.stem)
        if found is None:
            found = self.loaded[named.stem] = _loaded(named, self.device)
        return found

    def lists_of(self, tensors: Tensors, q: torch.Tensor, k: torch.Tensor, extras: Extras) -> Tensors:
        """Index tensors of the kernels, made of those of the call."""
        if tensors:
            lists = tensors if self.fit is None else self.fit.apply(tensors, q.shape[2], k.shape[2])
            lists = _of_heads(lists, q.shape[1])
            tensors = lists if self.place is None else self.place(lists)
        return extras.indices(tensors, self.indices)


_routes = Signatures()


def attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Tensors,
    scored: ScoredPattern,
    *,
    extras: Extras,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None = None,
    deterministic: bool = True,
    dq: bool = True,
    dkdv: bool = True,
    dsink: bool = False,
    daux: Sequence[str] = (),
) -> Gradients:
    """Compute the gradients of a call of ``block_sparse_attention``.

    Nothing is copied but ``dout`` where a kernel cannot address it, as the gradient of a sum is one expanded element.

    Args:
        q, k, v: the operands.
        tensors: index tensors of the pattern, as the call was given them.
        scored: the pattern and the score.
        extras: those of the call. lse has the sinks: only their own gradient reads them.
        dout: (batch, heads, q_len, head_dim), the gradient of the result.
        out: the result.
        lse: float32 (batch, heads, q_len), its log-sum-exp.
        dlse: the gradient of lse; None where the loss does not depend on it.
        deterministic: of the call.
        dq: whether the gradient of q is wanted.
        dkdv: whether those of k and v are.
        dsink: whether that of the sinks is.
        daux: tensors of the score whose gradients are wanted.

    Raises:
        ArgumentError, SpecError: before anything is launched.
        DeviceError, ToolchainError, CompileError, CacheError, UnverifiedError: at the first call of a kind.
    """
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    place = None
    if not (dsink or daux):
        rows = (lse, dlse), (q, k, v, out, dout)
        place = _place_of(scored, tensors, rows, extras=extras, options=(deterministic, dq, dkdv))
        found, place = (None, None) if place is None else _launched(place)
        if found is not None:
            return found
    options: dict[str, Any] = {"dout": dout, "out": out, "lse": lse, "dlse": dlse, "deterministic": deterministic}
    options |= {"dq": dq, "dkdv": dkdv, "dsink": dsink, "daux": daux, "place": place}
    return _attend_backward(q, k, v, tensors, scored, extras=extras, **options)


_launches = Launches()
"""Those of earlier backward passes without gradients of sinks and of tensors of the score."""
_ALIGNED = 5
"""Last tensors of a place, which begin at multiples of 16 bytes: q, k, v, out and dout."""


def _place_of(
    scored: ScoredPattern,
    tensors: Tensors,
    rows: tuple[tuple[Any, ...], tuple[Any, ...]],
    *,
    extras: Extras,
    options: tuple[Any, ...],
) -> Place | None:
    """Where the launch of a call is kept; None for arguments of other types, which the checks name.

    Args:
        scored, tensors, extras: of the call.
        rows: lse and dlse, and q, k, v, out and dout.
        options: all else that decides about the launch.
    """
    read = (*tensors, *extras[1:TENSORS], *rows[0])  # no sinks: lse has them
    try:
        shapes = rows[1][0].shape, rows[1][1].shape
        key = (scored.text, tuple(map(type, read)), *shapes, extras[TENSORS:], extras.kind(), options, mode())
        return Place(key, (*(tensor for tensor in read if tensor is not None), *rows[1]))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _launched(place: Place) -> tuple[Gradients | None, Place | None]:
    """The gradients of a call, launched as an earlier one with arguments like these, and where to keep its launch.

    Returns:
        The gradients, None if the checks of a call are needed; the place, None if none is to be kept.
    """
    try:
        launch = _launches.find(*place)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None, None
    return (None, place) if launch is None else (launch(place.tensors), None)


def _of_launch(gradients: dict[str, torch.Tensor]) -> Gradients:
    """The gradients of a bound launch."""
    return Gradients(gradients.get("dq"), gradients.get("dk"), gradients.get("dv"), None, ())


def bound_gradients(
    steps: Sequence[Step | None], unaligned: int, result: Callable[[dict[str, torch.Tensor]], Gradients]
) -> GradientLaunch | None:
    """The launch of the kernels of a backward pass; None if one of them cannot be launched without checks."""
    found = tuple(step for step in steps if step is not None)
    return GradientLaunch(found, unaligned, result) if found and len(found) == len(steps) else None


def _attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Tensors,
    scored: ScoredPattern,
    *,
    extras: Extras,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    deterministic: bool,
    dq: bool,
    dkdv: bool,
    dsink: bool,
    daux: Sequence[str],
    place: Place | None,
) -> Gradients:
    """Check a call and compute its gradients; ``place`` is where its launch is kept for later calls, or None."""
    sink = extras.sink
    route = _route_of(q, scored, extras, deterministic=deterministic, daux=daux)
    if dsink:
        check_sink(sink, q.shape[1], q.device)
    tensors, aux = split_tensors(scored, tensors)
    lists = route.lists_of(tensors, q, k, extras)
    options: dict[str, Any] = {"dout": addressable(dout), "out": out, "lse": lse, "scale": extras.scale}
    options |= {"dlse": None if dlse is None else dlse.contiguous(), **route.numbers}
    steps: list[Step | None] = []

    def computed(named: NamedSpec, **more: Any) -> AttentionGradients:
        kernel = route.kernel(named)
        found: AttentionGradients = kernel(q, k, v, *lists, aux=aux, **options, **more)
        if place is not None:
            binds = isinstance(kernel, AttentionBackwardKernel) and not aux
            read = {"tensors": place.tensors, **options, **more}
            steps.append(kernel._bound_step(q, k, v, *lists, **read) if binds else None)
        return found

    of_q = of_k = of_v = stats = None
    kernels = route.kernels
    if dq and dkdv and kernels.dq_dkdv is not None:
        of_q, of_k, of_v, stats, _ = computed(kernels.dq_dkdv)
        dq = dkdv = False
    if dq:
        of_q, _, _, stats, _ = computed(kernels.dq)
    if dkdv:
        _, of_k, of_v, stats, _ = computed(kernels.dkdv, stats=stats)
    of_aux: dict[str, torch.Tensor] = {}
    if kernels.daux is not None:
        found = computed(kernels.daux, stats=stats)
        of_aux, stats = found.daux or {}, found.stats
    of_sink = None
    if dsink:
        assert sink is not None
        stats = _statistics(q, dout, out, lse, dlse) if stats is None else stats
        of_sink = sink_gradient(sink, lse, stats)
    if place is not None:
        launch = bound_gradients(steps, len(place.tensors) - _ALIGNED, _of_launch)
        _launches.keep(*place, launch)
    of_named = (of_aux[name] if name in of_aux else _zeros_like(aux[name]) for name in daux)
    return Gradients(of_q, of_k, of_v, of_sink, tuple(of_named))


def _route_of(
    q: torch.Tensor, scored: ScoredPattern, extras: Extras, *, deterministic: bool, daux: Sequence[str]
) -> GradientRoute:
    """How the gradients of a call are computed."""
    key = (scored.text, q.shape[3], q.dtype, q.device, extras.kind(), deterministic, tuple(daux), mode())
    last, route = _routes.last
    if last != key:
        route = _routes.find(key)
    if route is None:
        choice = chosen_for(q, scored, extras.features(), deterministic=deterministic, aux_gradients=daux)
        route = _routes.keep(key, GradientRoute.of(choice, scored, q.device))
    found: GradientRoute = route
    return found


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _statistics(q: Any, dout: Any, out: Any, lse: Any, dlse: Any) -> torch.Tensor:
    """Statistics of a call in which only the sinks have a gradient, so that no kernel makes them."""
    rows = {"lse": (lse, q.shape[:3]), "dlse": (dlse, q.shape[:3]), "out": (out, q.shape), "dout": (dout, q.shape)}
    for name, (tensor, shape) in rows.items():
        if tensor is not None and tensor.shape != shape:
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    stats = torch.empty((*lse.shape, 2), dtype=torch.float32, device=lse.device)
    fill_statistics(stats, out, dout, lse, dlse)
    return stats


def _of_heads(tensors: Tensors, heads: int) -> Tensors:
    """Repeat lists of fewer heads for the heads of q; lists for all heads at once stay."""
    return tuple(
        t
        if t is None or t.dim() < LIST_RANK or t.shape[1] in (1, heads)
        else t.repeat_interleave(heads // t.shape[1], 1)
        for t in tensors
    )


def addressable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose rows kernels can read: itself, or a contiguous copy."""
    step = TMA_ALIGNMENT // tensor.element_size()
    strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    fits = tensor.stride(-1) == 1 and all(size == 1 or stride % step == 0 for size, stride in strides)
    if fits and tensor.data_ptr() % TMA_ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@kept_by_mode(KERNELS_KEPT)
def _loaded(named: NamedSpec, device: torch.device) -> AttentionBackwardKernel:
    """Compile and load a kernel for a device."""
    refuse_capture("dout", device, "the first backward pass of a kind compiles and loads its kernels")
    kernel = load_kernel(named, device=device)
    assert isinstance(kernel, AttentionBackwardKernel)
    return kernel


def learned_aux(scored: ScoredPattern, tensors: Tensors) -> tuple[str, ...]:
    """Names of the score's tensors that require a gradient, of a call's tensors.

    Raises:
        ArgumentError: for a tensor of the mask alone that requires one: what a mask shows does not change by little.
    """
    aux = split_tensors(scored, tensors)[1]
    required = [name for name, tensor in aux.items() if tensor is not None and tensor.requires_grad]
    for name in required:
        if name not in scored.score_names:
            reason = "requires a gradient, and tensors of masks have none"
            raise ArgumentError(f"aux[{name!r}]", f"{reason}: pass it with .detach()")
    return tuple(name for name in scored.score_names if name in required)
