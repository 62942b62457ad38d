"""The kernels of calls over packed sequences and over pages, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from codegen.library import NamedSpec
from codegen.provenance import Provenance
from codegen.scored_pattern import scored_pattern
from codegen.select import Choice
from codegen.select.paged import decode_fields, prefill_fields
from runtime.checks import check_flag, check_word
from runtime.errors import ArgumentError
from runtime.kernels.paged_attention import Options
from runtime.key_lists import KeyLists
from runtime.ops.attention_choice import arch_of
from runtime.ops.attention_extras import Extras, check_softcap
from runtime.ops.attention_gradients import check_gradients, gradient_choice
from runtime.ops.explain import check_arch, chosen_by_fields
from runtime.ops.packed_lists import check_lists, packed_pattern
from runtime.ops.paged import LAYOUTS
from runtime.ops.paged_calls import by_key_blocks, paged_call, window_of
from runtime.ops.paged_calls import check_operands as check_paged_operands
from runtime.ops.varlen_calls import Bounds, check_bounds, check_operands, choice_of, class_of, sizes_of
from runtime.ops.varlen_gradients import LEAST_OF_ONE_KERNEL
from runtime.patterns import Pattern
from runtime.receipts import permit
from runtime.receipts.mode import is_on


@dataclass(frozen=True)
class KernelsExplanation:
    """The kernels of a call, and the reasons. ``str()`` gives one fact per line.

    Attributes:
        kernels: specs by output: "O", "dQ alone", ...
        reasons: why these kernels, one fact each.
    """

    kernels: Mapping[str, NamedSpec]
    reasons: tuple[str, ...]

    @property
    def provenance(self) -> dict[str, Provenance]:
        """The receipt and source of each kernel, keyed by output."""
        return {what: permit.provenance(named) for what, named in self.kernels.items()}

    def __str__(self) -> str:
        """All fields, in words."""
        lines = []
        for what, each in self.provenance.items():
            lines += [f"{what}: {each.kernel}", *(f"  {line}" for line in each.lines())]
        return "\n".join([*lines, *self.reasons])


def explain_varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    arch: str | None = None,
    gradients: bool = False,
    deterministic: bool = True,
) -> KernelsExplanation:
    """Explain which kernels ``varlen_attention`` uses for a call. Nothing is compiled or launched.

    Args:
        q, k, v, pattern, cu_seqlens_q, cu_seqlens_k, softcap, sink, deterministic: as in the call.
        arch: architecture of the kernels, needed if the tensors are not on a GPU (for example ``device="meta"``).
            Default: the architecture of q's device.
        gradients: also explain the kernels that compute the gradients of q, k and v.

    Returns:
        The kernels, their receipts or the nearest shipped kernels, the paths of their sources, and the reasons.

    Raises:
        ArgumentError, SpecError, DeviceError: as the call itself would.
        UnverifiedError: if kernels without a receipt are refused.
    """
    for flag, value in (("gradients", gradients), ("deterministic", deterministic)):
        check_flag(flag, value)
    check_arch(arch, q)
    bounds = Bounds(cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    with torch.no_grad():  # inputs may require gradients, which forward kernels refuse
        check_operands(q, k, v, on_gpu=arch is None)
    check_bounds(q, bounds)
    softcap = None if softcap is None else check_softcap(softcap)
    if not isinstance(pattern, Pattern):
        raise ArgumentError("pattern", f"is {type(pattern).__name__}, expected one of sparse_kernel_codegen.patterns")
    text, lists = packed_pattern(pattern)
    scored, where = scored_pattern(text), arch_of(q.device) if arch is None else arch
    place = where, torch.cuda.get_device_name(q.device) if q.is_cuda else None
    check_lists(q, k, bounds, scored, lists)
    sizes = sizes_of(q, k, bounds)
    choice = choice_of(class_of(q, k, scored, sizes, place, softcap=softcap, sink=sink is not None))
    kernels, reasons = {"O": choice.named}, [_rule(choice)]
    if gradients:
        check_gradients(scored, ())
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        features = Extras(sink=sink, softcap=softcap).features()
        options: dict[str, Any] = {"deterministic": deterministic, "verified_only": is_on(), "layout": "varlen"}
        found = gradient_choice(scored, where, q.dtype, q.shape[2], features, **options).kernels
        if found.dq_dkdv is not None:
            kernels["dQ, dK and dV"] = found.dq_dkdv
            reasons.append(
                f"one kernel computes all gradients from {LEAST_OF_ONE_KERNEL} queries per sequence on average"
            )
        kernels |= {"dQ alone": found.dq, "dK and dV alone": found.dkdv}
    return KernelsExplanation(kernels, tuple(reasons))


def explain_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pattern: Pattern | KeyLists,
    *,
    block_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    layout: Literal["NHD", "HND"] = "NHD",
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    batch_invariant: bool = False,
    arch: str | None = None,
) -> KernelsExplanation:
    """Explain which kernel ``paged_attention`` uses for a call. Nothing is compiled or launched.

    Args:
        q, k_cache, v_cache, pattern, block_table, cu_seqlens_q, layout, softcap, sink, batch_invariant: as in the
            call. Its other arguments do not change the kernel.
        arch: architecture of the kernel, needed if the tensors are not on a GPU (for example ``device="meta"``).
            Default: the architecture of q's device.

    Returns:
        The kernel, its receipt or the nearest shipped kernel, the path of its source, and why it is the decode
        kernel, a prefill kernel or one by key blocks, and how many query heads share a tile of a prefill kernel.

    Raises:
        ArgumentError, SpecError, DeviceError: as the call itself would.
        UnverifiedError: if kernels without a receipt are refused.
    """
    check_flag("batch_invariant", batch_invariant)
    check_word("layout", layout, LAYOUTS)
    check_arch(arch, q)
    cache = check_paged_operands(q, k_cache, v_cache, heads_first=layout == "HND")
    softcap = None if softcap is None else check_softcap(softcap)
    where = arch_of(q.device) if arch is None else arch
    lists = pattern.indices if isinstance(pattern, KeyLists) else None
    caches = (each.transpose(1, 2) if layout == "HND" else each for each in (k_cache, v_cache))
    given = (q, *caches, block_table, None, cu_seqlens_q, lists, None, sink, None, None, None, None)
    entry_keys = pattern.keys if isinstance(pattern, KeyLists) else 1
    options = Options(window_of(pattern), entry_keys, None, softcap, batch_invariant, return_lse=False)
    call = paged_call(given, options, where)
    decodes, dtype, d = call.decode_reason(), call.dtype, call.head_dim
    of_lists = by_key_blocks(given, options, call)
    if of_lists is not None:
        fields, why = dict(of_lists), "kernel by key blocks: many queries list each block"
    elif decodes:
        fields, why = decode_fields(where, dtype, cache, d), f"decode kernel: {decodes}"
    else:
        fields = prefill_fields(where, dtype, d, call.pack, cache=cache, sink=call.sink, softcap=call.softcap)
        why = f"prefill kernel: {call.prefill_reason()}"
    name = torch.cuda.get_device_name(q.device) if q.is_cuda else None
    chosen = chosen_by_fields(fields, name)
    return KernelsExplanation({"O": chosen.named}, (_rule(chosen), why))


def _rule(choice: Choice) -> str:
    """Rule of a choice, and its reason."""
    return f"rule: {choice.rule}: {choice.reason}"
