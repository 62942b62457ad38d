"""explain_attention: the kernel that a call of block_sparse_attention uses, and the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from codegen.arch import ARCHS
from codegen.library import NamedSpec
from codegen.provenance import Provenance
from codegen.scored_pattern import ScoredPattern
from codegen.select import Choice, choose
from codegen.select.backward import BackwardKernels
from codegen.select.few_queries import may_decode
from codegen.select.paged import decode_fields
from codegen.select.shipped import Verified
from codegen.spec import AttentionBackwardSpec
from runtime.checks import check_dense, check_flag
from runtime.errors import ArgumentError
from runtime.ops.attention import pattern_of
from runtime.ops.attention_autograd import is_differentiated
from runtime.ops.attention_checks import check_lists, check_operands
from runtime.ops.attention_choice import DTYPES, Call, ShapeClass, arch_of, resolve
from runtime.ops.attention_extras import Extras
from runtime.ops.attention_gradients import check_gradients, gradient_choice, learned_aux
from runtime.ops.few_queries import decoding_of
from runtime.patterns import Pattern, Score, scored_of, with_score
from runtime.receipts import permit
from runtime.receipts.mode import is_on, mode
from runtime.receipts.permit import provenance

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FIELDS = ("batch", "heads", "kv_heads", "q_len", "kv_len", "list_length")


@dataclass(frozen=True)
class Explanation:
    """The kernels of a call, and the reasons for the choice. ``str()`` gives one fact per line.

    Attributes:
        choice: the kernel's spec, the rule and the reason of ``codegen.select``.
        shape_class: the class of call shapes that share the kernel.
        head_dim: head dimension of the call; the kernel's is ``shape_class.head_dim``.
        lists: how the caller's lists are converted for the kernel; "" if they are used as they are.
        gradients: the gradient kernels; None without ``gradients=True``.
        is_decoding: whether the kernel is that for decoding, whose thread blocks divide the keys of a request.
        tiles_reason: reason why a call with few queries takes another kernel; "" for all other calls.
    """

    choice: Choice
    shape_class: ShapeClass
    head_dim: int
    lists: str
    gradients: BackwardKernels | None = None
    is_decoding: bool = False
    tiles_reason: str = ""

    @property
    def provenance(self) -> dict[str, Provenance]:
        """The receipt and source of each kernel, keyed by its outputs: "O", "dQ, dK and dV", ..."""
        return {what: provenance(named) for what, named in self._kernels().items()}

    def _kernels(self) -> dict[str, NamedSpec]:
        """The kernels, keyed by their outputs."""
        found = {"O": self.choice.named}
        if self.gradients is None:
            return found
        if self.gradients.dq_dkdv is not None:
            found["dQ, dK and dV"] = self.gradients.dq_dkdv
        found |= {"dQ alone": self.gradients.dq, "dK and dV alone": self.gradients.dkdv}
        if self.gradients.daux is not None:
            of = self.gradients.daux.spec
            assert isinstance(of, AttentionBackwardSpec)
            found[f"gradients of {', '.join(of.aux_gradients)}"] = self.gradients.daux
        return found

    @property
    def padding(self) -> float:
        """Share of the kernel's multiplications spent on padding of the head dimension."""
        return 1 - self.head_dim / self.shape_class.head_dim

    def __str__(self) -> str:
        """All fields, in words."""
        wanted = self.shape_class
        sizes = ", ".join(f"{name} {size}" for name in FIELDS if (size := getattr(wanted, name)) is not None)
        found = self.provenance
        lines = [
            f"kernel: {self.choice.named.stem} ({wanted.arch}, {wanted.dtype}, d {wanted.head_dim})",
            *found.pop("O").lines(),
            f"rule: {self.choice.rule}: {self.choice.reason}",
            f"class of shapes: {sizes}",
        ]
        if self.padding:
            lines.append(
                f"head size: {self.head_dim} is filled up to {wanted.head_dim}: {self.padding:.0%} of the products"
            )
        if self.lists:
            lines.append(f"lists: {self.lists}")
        if wanted.pack_gqa > 1:
            lines.append(f"heads: {wanted.pack_gqa} query heads that share their lists fill a tile together")
        if self.is_decoding:
            lines.append("few queries: thread blocks divide the keys; a call that needs gradients takes another kernel")
        elif self.tiles_reason:
            lines.append(f"few queries: no thread blocks divide the keys, because {self.tiles_reason}")
        if not self.is_decoding:
            dense = self.choice.dense or "no measured row near has a faster one"
            lines.append(f"dense attention of a library: {dense}")
        for what, each in found.items():
            lines += [f"{what}: {each.kernel}", *(f"  {line}" for line in each.lines())]
        return "\n".join(lines)


def explain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Pattern | BlockMask,
    *,
    softcap: float | None = None,
    score: Score | str | Callable[..., Any] | None = None,
    sink: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    return_lse: bool = False,
    arch: str | None = None,
    gradients: bool = False,
    deterministic: bool = True,
) -> Explanation:
    """Explain which kernel ``block_sparse_attention`` uses for a call. Nothing is compiled or launched.

    Args:
        q, k, v, pattern, softcap, score, sink, kv_lengths, return_lse, deterministic: as in the call.
            ``return_lse`` does not change the kernel.
        arch: architecture of the kernel, needed if the tensors are not on a GPU (for example ``device="meta"``).
            Default: the architecture of q's device.
        gradients: also explain the kernels that compute the gradients of q, k, v, and of the score's tensors that
            require a gradient.

    Returns:
        The choice. Its ``str()`` has the kernel, its receipt or the nearest shipped kernel, the path of its source, the
        rule and the measured row, the shape class, the cost of padding the head dimension, the conversion of the lists,
        whether thread blocks divide the keys of few queries, and whether a library's dense attention is faster in that
        row.

    Raises:
        ArgumentError, SpecError, DeviceError: as the call itself would.
    """
    for flag, value in (("return_lse", return_lse), ("gradients", gradients), ("deterministic", deterministic)):
        check_flag(flag, value)
    check_arch(arch, q)
    pattern = pattern_of(pattern, q, k)
    tensors = pattern.index_tensors()
    if score is not None:
        score, tensors = with_score(pattern, tensors, score, q, k)
    scored = scored_of(pattern, score)
    with torch.no_grad():  # inputs may require gradients, which forward kernels refuse
        check_operands(q, k, v, on_gpu=arch is None)
    check_lists(scored, tensors, q, k)
    extras = Extras(sink, kv_lengths, softcap=softcap)
    extras.check(q, on_gpu=q.is_cuda)
    where = arch_of(q.device) if arch is None else arch
    fields, tiles_reason = _decoding(q, k, v, scored, extras=extras, arch=where, gradients=gradients)
    call = Call(
        scored,
        tuple(tensors[0].shape) if tensors and tensors[0] is not None else (),
        tuple(q.shape),
        tuple(k.shape),
        q.dtype,
        None,
        extras.features(),
        mode=mode() if fields is None else False,
    )
    backward = None
    if gradients:
        learned = learned_aux(scored, tensors)
        check_gradients(scored, learned)
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        options: dict[str, Any] = {"deterministic": deterministic, "aux_gradients": learned, "verified_only": is_on()}
        kind = scored, where, q.dtype, q.shape[3]
        backward = gradient_choice(*kind, extras.features(), **options).kernels
    name = torch.cuda.get_device_name(q.device) if q.is_cuda else None
    found = resolve(call, where, name)
    steps = [] if found.repeated == 1 else [f"each head is repeated {found.repeated} times, in each call"]
    steps += [] if found.fit is None else [str(found.fit)]
    choice = found.choice if fields is None else chosen_by_fields(fields, name)
    lines = "; ".join(steps)
    return Explanation(
        choice,
        found.shape_class,
        q.shape[3],
        lines,
        backward,
        is_decoding=fields is not None,
        tiles_reason=tiles_reason,
    )


def _decoding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scored: ScoredPattern,
    *,
    extras: Extras,
    arch: str,
    gradients: bool,
) -> tuple[dict[str, Any] | None, str]:
    """Fields of the kernel for decoding if the call takes it, otherwise the reason, for a call with few queries."""
    if arch not in ARCHS or not may_decode(scored.pattern, q.shape[1], k.shape[1], q.shape[2], k.shape[2]):
        return None, ""
    if gradients or is_differentiated(q, k, v, extras.sink):
        return None, "the call needs gradients"
    fold, reason = decoding_of(q, k, v, scored, extras=extras, arch=arch)
    return None if fold is None else decode_fields(arch, DTYPES[q.dtype], "same", q.shape[3]), reason


def chosen_by_fields(fields: dict[str, Any], device: str | None) -> Choice:
    """The kernel of fields of a spec, in the mode of receipts.

    Args:
        fields: of the spec.
        device: name of the GPU, None without one.

    Raises:
        UnverifiedError: if kernels without a receipt are refused.
    """

    def choice(verified: Verified | None) -> Choice:
        return choose(fields, device=device, verified=verified)

    return permit.chosen(choice) if is_on() else choice(None)


def check_arch(arch: Any, q: Any) -> None:
    """Check that the architecture is known, from ``arch`` or from the tensors' device."""
    if arch is not None and not isinstance(arch, str):
        raise ArgumentError("arch", f"is {type(arch).__name__}, expected a name")
    check_dense("q", q)
    if arch is None and not q.is_cuda:
        raise ArgumentError("arch", f"is missing: q is on {q.device}, not on a GPU; pass an architecture")
