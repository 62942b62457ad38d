"""Legal combinations of the fields of a spec: instructions of its architecture, options of attention."""

from __future__ import annotations

from collections.abc import Container

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.expressions.declared import MOST_AUX
from codegen.expressions.nodes import Item, Node, Variable, children
from codegen.select.defaults import COMBINED
from codegen.spec import AttentionBackwardSpec, AttentionSpec, Spec

FP8_OPS: tuple[str, ...] = ("attention", "bsr_spmm", "bsr_sddmm")
"""Operators that support FP8."""
FP8_OPTIONS = ("output", "accumulate_every", "scale_rows", "scales")
"""Fields that only apply to FP8 inputs."""
NO_KERNEL = "does not support it: leave it out"


def check_combination(spec: Spec, given: Container[str]) -> None:
    """Reject the first of the given fields that no kernel supports together with the fields before it.

    Raises:
        SpecError: names the field.
    """
    legal = ARCHS[spec.arch].of(spec.op)
    values = {"mma": spec.mma, "copy": spec.copy_, "schedule": spec.schedule}
    left, before = legal, ""
    for field in filter(given.__contains__, COMBINED):
        left = tuple(c for c in left if getattr(c, field) == values[field])
        if not left:
            choices = "; ".join(f"mma: {c.mma}, copy: {c.copy}, schedule: {c.schedule}" for c in legal)
            where = f"with {before}" if before else "here"
            reason = f"{values[field]} is not possible {where}; {spec.op} on {spec.arch} has: {choices}"
            raise SpecError(field, reason)
        before += f"{', ' if before else ''}{field}: {values[field]}"


def check_fp8(spec: Spec) -> None:
    """Reject FP8 if no kernel supports it, and an output type for inputs that are not FP8.

    Raises:
        SpecError: names the field.
    """
    if not spec.is_fp8:
        for option in FP8_OPTIONS if spec.op in ("attention", "bsr_spmm", "bsr_sddmm") else ():
            field = type(spec).model_fields.get(option)
            if field is not None and getattr(spec, option) != field.default:
                reason = f"is {getattr(spec, option)}; it requires FP8 inputs, and dtype is {spec.dtype}: leave it out"
                raise SpecError(option, reason)
        return
    if spec.op not in FP8_OPS:
        raise SpecError("dtype", f"is {spec.dtype}; {spec.op} does not support FP8: use bf16")
    by_mma_sync = spec.mma == "mma" and ARCHS[spec.arch].has_fp8
    if spec.mma != "wgmma" and not (by_mma_sync and (spec.op == "attention" or spec.copy_ == "cp_async")):
        by_wgmma = " and ".join(arch.name for arch in ARCHS.values() if arch.has_fp8_wgmma)
        by_mma = " and ".join(arch.name for arch in ARCHS.values() if arch.has_fp8_mma_sync)
        first = next(arch.name for arch in ARCHS.values() if arch.has_fp8)
        where = f"from {first} on" if spec.op == "attention" else f"with cp_async on {by_mma}"
        written = f"wgmma on {by_wgmma}, or mma {where}"
        raise SpecError("dtype", f"is {spec.dtype}; FP8 requires {written}: use bf16")


def check_options(spec: AttentionSpec) -> None:
    """Reject the first option of attention that the pattern, the architecture or another option does not support.

    Raises:
        SpecError: names the option.
    """
    kind, has_wgmma = f"{spec.pattern.kind} on {spec.arch}", ARCHS[spec.arch].has_wgmma
    one_list_by_wgmma = has_wgmma and spec.pattern.lists == 1
    if has_wgmma and spec.warp_rows != 16:
        raise SpecError("warp_rows", f"is {spec.warp_rows}; {spec.arch} multiplies 64 rows at a time: leave it out")
    if spec.pad_heads and has_wgmma:
        reason = f"is true; kernels for {spec.arch} always support smaller heads: leave it out"
        raise SpecError("pad_heads", reason)
    if spec.share_kv_loads and not one_list_by_wgmma:
        raise SpecError("share_kv_loads", f"is true; {kind} {NO_KERNEL}")
    by_expression = spec.pattern.expression
    if spec.pack_gqa > 1 and by_expression is not None and asks_head(by_expression):
        raise SpecError("pack_gqa", f"is {spec.pack_gqa}; an expression depends on the head: leave it out")
    _check_options_of_pages(spec)
    _check_kv_splits(spec)
    _check_query_grouping(spec)
    if spec.l2_lockstep and not one_list_by_wgmma:
        raise SpecError("l2_lockstep", f"is true; {kind} {NO_KERNEL}")
    if spec.stream_k_tail and not spec.can_split:
        more = (
            " with share_kv_loads"
            if spec.share_kv_loads
            else f" with kv_splits {spec.kv_splits}"
            if spec.kv_splits > 1
            else ""
        )
        raise SpecError("stream_k_tail", f"is true; {kind}{more} {NO_KERNEL}")


def check_gradients(spec: AttentionBackwardSpec) -> None:
    """Reject tensors whose gradients the kernel does not compute, and mma.sync if wgmma has the other gradients.

    Raises:
        SpecError: names the field.
    """
    if spec.aux_gradients and spec.gradients != "daux":
        reason = (
            f"names {len(spec.aux_gradients)} tensors, but gradients {spec.gradients} do not include them: leave it out"
        )
        raise SpecError("aux_gradients", reason)
    if ARCHS[spec.arch].has_wgmma and spec.mma == "mma" and spec.gradients != "daux":
        raise SpecError("mma", f"is mma; allowed on {spec.arch} with gradients {spec.gradients}: wgmma")


def check_score(spec: AttentionSpec | AttentionBackwardSpec) -> None:
    """Reject a score together with a softcap, and tensors that the score and the mask declare differently.

    Raises:
        SpecError: names the field.
    """
    if spec.score is None:
        return
    if spec.softcap is not None:
        cap = f"{spec.softcap:g}"
        instead = f"write the tanh in score.value, as in {cap} * tanh(score / {cap})"
        raise SpecError("softcap", f"is {cap}; a kernel has a softcap or a score: {instead}")
    of_mask = {tensor.name: tensor for tensor in spec.pattern.aux_tensors}
    for tensor in spec.score.aux_tensors:
        other = of_mask.get(tensor.name, tensor)
        if other != tensor:
            reason = f"is {tensor}, but pattern.aux has {other}: mask and score share tensors by name"
            raise SpecError(f"score.aux.{tensor.name}", reason)
    count = len({*of_mask, *(tensor.name for tensor in spec.score.aux_tensors)})
    if count > MOST_AUX:
        raise SpecError("score.aux", f"has, with pattern.aux, {count} tensors; at most {MOST_AUX} are allowed")


def asks_head(node: Node) -> bool:
    """Whether an expression depends on the head of its row: by name, or through a tensor with a head dimension."""
    if isinstance(node, Variable):
        return node.name == "head"
    of_heads = isinstance(node, Item) and "heads" in node.aux.dims
    return of_heads or any(map(asks_head, children(node)))


def _check_options_of_pages(spec: AttentionSpec) -> None:
    if spec.split_kv and spec.layout != "paged":
        raise SpecError("split_kv", f"is true; layout {spec.layout} {NO_KERNEL}")
    if spec.cache != "same" and spec.layout != "paged":
        raise SpecError("cache", f"is {spec.cache}; layout {spec.layout} {NO_KERNEL}")


def _check_kv_splits(spec: AttentionSpec) -> None:
    may_split = ARCHS[spec.arch].has_wgmma and spec.pattern.supports_kv_splits and not spec.share_kv_loads
    if spec.kv_splits > 1 and not may_split:
        that = f"{spec.pattern.kind} on {spec.arch}{' with share_kv_loads' if spec.share_kv_loads else ''}"
        raise SpecError("kv_splits", f"is {spec.kv_splits}; {that} {NO_KERNEL}")


def _check_query_grouping(spec: AttentionSpec) -> None:
    grouping = spec.query_grouping
    if grouping != "none" and not spec.share_kv_loads:
        raise SpecError("query_grouping", f"is {grouping}; grouping requires share_kv_loads: true")
    if grouping == "search" and spec.l2_lockstep:
        raise SpecError(
            "l2_lockstep",
            "is true; not supported with the dynamic tile scheduler of query_grouping search: leave it out",
        )
