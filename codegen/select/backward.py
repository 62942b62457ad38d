"""Selection of kernels for the gradients of attention (dQ; dK and dV; all three), by rules for missing fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from codegen.arch import ARCHS
from codegen.aux_gradients import reads_of
from codegen.errors import SpecError
from codegen.library import NamedSpec, as_shipped, find_spec
from codegen.patterns import PatternBase, without_gradient
from codegen.planning import plan_for
from codegen.plans.backward import daux as attention_backward_daux
from codegen.plans.backward import dq_dkdv as attention_backward_dq_dkdv
from codegen.plans.backward import mma_sync as attention_backward_mma_sync
from codegen.plans.backward import wgmma as attention_backward_wgmma
from codegen.score import Score
from codegen.select.shipped import cases_of
from codegen.wording import shown

OP = "attention_backward"
HEAD_DIMS = {"wgmma": attention_backward_wgmma.HEAD_DIMS, "mma": attention_backward_mma_sync.HEAD_DIMS}
"""Head sizes of the kernels, by instruction; other sizes are padded to the next."""
DAUX_HEAD_DIMS = attention_backward_daux.HEAD_DIMS
"""Head sizes of the kernels for gradients of a score's tensors."""
DQ_DKDV_HEAD_DIMS = attention_backward_dq_dkdv.HEAD_DIMS
"""Head sizes of the kernels for all gradients: the sums of other sizes exceed the registers."""
DQ_DKDV_KEYS = attention_backward_dq_dkdv.KEYS
"""Keys per list block in these kernels, with nondeterministic order."""
BLOCK_SIZES = (64, 128)
"""Legal queries and keys per list block."""


@dataclass(frozen=True)
class BackwardKernels:
    """The kernels of the gradients of one kind of attention.

    Attributes:
        dq: kernel of dQ.
        dkdv: kernel of dK and dV.
        dq_dkdv: kernel of all three, with five products instead of seven; None if there is none.
        daux: kernel of the gradients of the score's tensors; None if no nonzero gradient is requested.
    """

    dq: NamedSpec
    dkdv: NamedSpec
    dq_dkdv: NamedSpec | None = None
    daux: NamedSpec | None = None

    def of_a_step(self) -> list[NamedSpec]:
        """Kernels of a training step: those of the gradients of q, k and v together, and of the score's tensors."""
        whole = [self.dq, self.dkdv] if self.dq_dkdv is None else [self.dq_dkdv]
        return whole if self.daux is None else [*whole, self.daux]


def backward_archs() -> tuple[str, ...]:
    """Architectures with gradient kernels."""
    return tuple(name for name, arch in ARCHS.items() if arch.of(OP))


def check_arch(arch: str) -> None:
    """Reject an architecture without gradient kernels.

    Raises:
        SpecError: names those that have them.
    """
    if arch not in backward_archs():
        raise SpecError("arch", f"is {arch}; gradients of attention support {', '.join(backward_archs())}")


def check_pattern(pattern: PatternBase) -> None:
    """Reject a pattern that has no gradient.

    Args:
        pattern: pattern of a spec; its blocks may have any size.

    Raises:
        SpecError: names ``pattern`` and the patterns with a gradient.
    """
    if reason := without_gradient(pattern.kind):
        raise SpecError("pattern", reason)


def backward_kernels(
    pattern: PatternBase,
    *,
    arch: str,
    dtype: str,
    head_dim: int,
    score: Score | None = None,
    aux_gradients: Sequence[str] = (),
    deterministic: bool = True,
    holds: Callable[[NamedSpec], bool] | None = None,
    **options: Any,
) -> BackwardKernels:
    """Choose the kernels of the gradients.

    Args:
        pattern: pattern of the forward kernel's spec.
        arch: architecture of the device.
        dtype: ``fp16`` or ``bf16``.
        head_dim: elements per head.
        score: score of the forward kernel's spec, or None.
        aux_gradients: names of the score's tensors whose gradients are requested.
        deterministic: whether dQ must be bitwise reproducible; otherwise it may be summed in any order if that is
            faster.
        holds: whether a kernel has a valid receipt; such kernels are preferred among those with the same result.
        options: other fields of the spec, as in the forward kernel's: ``softcap``, ``layout``, ...

    Returns:
        Their specs, with shipped names if they are shipped.

    Raises:
        SpecError: names the field, its value and what has a gradient.
    """
    check_arch(arch)
    instruction = ARCHS[arch].of(OP)[0].mma
    sizes = HEAD_DIMS[instruction]
    if head_dim > sizes[-1]:
        where = f"gradients support heads of up to {sizes[-1]} on {arch}"
        raise SpecError("head_dim", f"is {head_dim}; {where}")
    check_pattern(pattern)
    block = pattern.fixed_block
    for side, length in (("q", block.q), ("kv", block.kv)) if block is not None else ():
        if length not in BLOCK_SIZES:
            allowed = ", ".join(map(str, BLOCK_SIZES))
            raise SpecError(f"pattern.block.{side}", f"is {length}; allowed in a gradient: {allowed}")
    fields = {
        "op": OP,
        "arch": arch,
        "dtype": dtype,
        "head_dim": next(size for size in sizes if size >= head_dim),
        "score": score,
        **options,
    }
    first: BackwardKernels | None = None
    for case in (case for patterns in cases_of(pattern) for case in patterns):
        found = _kernels_of(fields, case, head_dim, aux_gradients, deterministic=deterministic)
        first = first or found
        if holds is None:
            if all(named.is_shipped for named in found.of_a_step()):
                return found
            continue
        ways = [found] if deterministic else [found, _kernels_of(fields, case, head_dim, aux_gradients)]
        for way in (*ways, replace(found, dq_dkdv=None)):
            if all(map(holds, way.of_a_step())):
                return way
    assert first is not None
    return first


def _kernels_of(
    fields: Mapping[str, Any],
    pattern: PatternBase,
    head_dim: int,
    aux_gradients: Sequence[str],
    *,
    deterministic: bool = True,
) -> BackwardKernels:
    """The kernels for exactly this pattern."""
    fields = {**fields, "pattern": pattern.model_dump(mode="json", exclude_none=True)}
    instruction = ARCHS[fields["arch"]].of(OP)[0].mma
    dq, dkdv = (_named({**fields, "gradients": which}) for which in ("dq", "dkdv"))
    daux = _of_aux(fields, head_dim, aux_gradients)
    size = next((size for size in DQ_DKDV_HEAD_DIMS if size >= head_dim), None)
    if instruction != "wgmma" or size is None:
        return BackwardKernels(dq, dkdv, None, daux)
    in_one = {**fields, "head_dim": size, "gradients": "dq_dkdv"}
    if not deterministic and pattern.unordered_dq and size == DQ_DKDV_HEAD_DIMS[0]:
        return BackwardKernels(dq, dkdv, _named({**in_one, "deterministic": False}), daux)
    is_written = pattern.dq_order is not None or _sums_in_fixed_point(fields, pattern, size)
    return BackwardKernels(dq, dkdv, _named(in_one) if is_written else None, daux)


def _of_aux(fields: Mapping[str, Any], head_dim: int, names: Sequence[str]) -> NamedSpec | None:
    """Kernel of gradients of a score's tensors; None if all are 0."""
    if not names:
        return None
    read = aux_with_gradients(fields["score"], tuple(names))
    if not read:
        return None
    size = next(size for size in DAUX_HEAD_DIMS if size >= head_dim)
    return _named({**fields, "gradients": "daux", "head_dim": size, "aux_gradients": list(read)})


def aux_with_gradients(score: Score | None, names: Sequence[str]) -> tuple[str, ...]:
    """The given tensors of a score whose gradients a kernel computes; gradients of the others are 0.

    Raises:
        SpecError: names a tensor without a gradient, and the index that is the reason.
    """
    if score is None:
        raise SpecError("aux_gradients", f"has {', '.join(map(shown, names))}, but there is no score")
    read = {read.item.aux.name for read in reads_of(score, tuple(names))}
    return tuple(name for name in names if name in read)


def _sums_in_fixed_point(fields: Mapping[str, Any], pattern: PatternBase, head_dim: int) -> bool:
    """Whether all gradients of lists have one kernel: faster than two on lists of models (notes-attention.md)."""
    block = pattern.fixed_block
    if block is None or block.kv != DQ_DKDV_KEYS or head_dim % 64 or fields.get("layout") == "varlen":
        return False
    return pattern.expression is None and fields["score"] is None  # an expression needs the registers


def _named(fields: Mapping[str, Any]) -> NamedSpec:
    """Spec with its shipped name, which has a receipt, if it is shipped."""
    found = find_spec(fields)
    plan_for(found)  # rejects unsupported specs
    return as_shipped(found)
