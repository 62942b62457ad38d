"""Attention of packed sequences: the oracle, and how one case is run."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from codegen.attention_cases import Case
from codegen.spec import AttentionSpec
from codegen.varlen_cases import VarlenCase
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.attention import AttentionKernel
from runtime.verify.common import Outcome, generator, max_error, poisoned_memory, tolerance, torch_attention
from runtime.verify.multiplicity import Inputs, multiplicity


@dataclass(frozen=True)
class VarlenInputs:
    """Tensors of one call.

    Attributes:
        q: (1, heads, tokens, head_dim), a view of (tokens, heads, head_dim).
        k: (1, kv_heads, tokens, head_dim), likewise.
        v: as k.
        cu_seqlens_q: int32 (sequences + 1,).
        cu_seqlens_k: int32 (sequences + 1,).
        sink: float32 (heads,); None without sinks.
        lists: counts and lists of key blocks, in the order of ``spec.pattern.index_tensors``; none without lists.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    sink: torch.Tensor | None
    lists: tuple[torch.Tensor | None, ...] = ()

    def of_call(self) -> tuple[Any, ...]:
        """The tensors that a call of a kernel takes by place."""
        return (self.q, self.k, self.v, *self.lists, self.cu_seqlens_q, self.cu_seqlens_k)


def make_inputs(spec: AttentionSpec, case: VarlenCase, device: torch.device, *, sinks: bool = False) -> VarlenInputs:
    """Fresh random inputs of a case.

    Args:
        spec: of the kernel.
        case: the case.
        device: where they are made.
        sinks: whether the case has sinks although the spec says none.
    """
    source = generator(case.name, device)
    width = case.columns or spec.head_dim

    def tensor(heads: int, lengths: tuple[int, ...]) -> torch.Tensor:
        tokens = max(1, case.before + sum(lengths) + case.after)
        drawn = torch.randn((tokens, heads, spec.head_dim), generator=source, device=device).to(
            TORCH_DTYPES[spec.dtype]
        )
        drawn[..., width:] = torch.nan
        return drawn[..., :width].transpose(0, 1)[None]

    def bounds(lengths: tuple[int, ...]) -> torch.Tensor:
        places = itertools.accumulate(lengths, initial=case.before)
        return torch.tensor(list(places), dtype=torch.int32, device=device)

    q = tensor(case.heads, case.q_lens)
    q *= case.spread
    k, v = tensor(case.kv_heads, case.kv_lens), tensor(case.kv_heads, case.kv_lens)
    sink = None
    if (spec.sink or sinks) and case.sinks == "huge":
        sink = torch.tensor([1e4, -1e4], device=device).repeat(case.heads)[: case.heads].contiguous()
    elif spec.sink or (sinks and case.sinks != "none"):
        sink = math.log(case.kv_len) + 2.0 * torch.randn(case.heads, generator=source, device=device)
    lists = _make_lists(spec, case, q.shape[2], source)
    return VarlenInputs(q, k, v, bounds(case.q_lens), bounds(case.kv_lens), sink, lists)


def _make_lists(
    spec: AttentionSpec, case: VarlenCase, tokens: int, source: torch.Generator
) -> tuple[torch.Tensor | None, ...]:
    """Random lists with repeated and out-of-range entries, and with random counts; garbage in rows of no block."""
    block = spec.pattern.fixed_block
    if block is None:
        return ()
    rows = tokens // block.q + len(case.q_lens)
    heads = 1 if case.name.endswith("s") else case.heads  # shared, in some cases
    length = -(-case.kv_len // block.kv)
    device = source.device

    def draw(entries: int) -> tuple[torch.Tensor, torch.Tensor]:
        picks = torch.randint(-1, length + 2, (1, heads, rows, entries), generator=source, device=device)
        counts = torch.randint(-1, entries + 2, (1, heads, rows), generator=source, device=device)
        return counts.int(), picks.int()

    counts, partial = draw(min(length + 1, 40))
    if "one" in case.name and not spec.pattern.masks_pairs:
        return None, partial, None, None
    return (counts, partial, None, None) if "tile" in case.name else (counts, partial, *draw(min(length, 35)))


def lists_of(
    spec: AttentionSpec, inputs: VarlenInputs, number: int, q_begin: int, q_len: int
) -> tuple[torch.Tensor | None, ...]:
    """The lists of one sequence, as those of padded attention.

    Args:
        spec: the spec.
        inputs: of the call.
        number: the sequence.
        q_begin: its first token in q.
        q_len: its queries.
    """
    block = spec.pattern.fixed_block
    if block is None:
        return ()
    first = q_begin // block.q + number
    rows = slice(first, first - (-q_len // block.q))
    return tuple(None if t is None else t[:, :, rows] for t in inputs.lists)


def _weights(spec: AttentionSpec, case: VarlenCase, inputs: VarlenInputs, number: int, rows: slice) -> torch.Tensor:
    """How often each pair of a sequence counts, (heads, q_len, kv_len)."""
    q_len, kv_len = case.q_lens[number], case.kv_lens[number]
    if not q_len or not kv_len:
        return torch.zeros((case.heads, q_len, kv_len), dtype=torch.float64, device=inputs.q.device)
    alone = Case(case.name, heads=case.heads, kv_heads=case.kv_heads, q_len=q_len, kv_len=kv_len)
    lists = lists_of(spec, inputs, number, rows.start, q_len)
    of_one = Inputs(inputs.q[:, :, rows], inputs.k, inputs.v, lists, None, numbers=numbers_of(spec, case))
    return multiplicity(spec.model_copy(update={"layout": "padded"}), alone, of_one)[0]


def numbers_of(spec: AttentionSpec, case: VarlenCase) -> dict[str, Any]:
    """Numbers of the pattern by argument of a call; empty where the spec has them."""
    arguments = {number.argument for number in spec.pattern.call_numbers} if spec.pattern.is_general else ()
    return {name: getattr(case, name) for name in sorted(arguments)}


def oracle(
    spec: AttentionSpec, case: VarlenCase, inputs: VarlenInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result and the LSE in float64, NaN for tokens of no sequence, and torch's own result in the kernel's type."""
    width = case.columns or spec.head_dim
    scale = width**-0.5 if case.scale is None else case.scale
    group = case.heads // case.kv_heads
    out = torch.full(inputs.q.shape, torch.nan, dtype=torch.float64, device=inputs.q.device)
    lse = torch.full(inputs.q.shape[:3], torch.nan, dtype=torch.float64, device=inputs.q.device)
    theirs = torch.full_like(inputs.q, torch.nan)
    q_at = kv_at = case.before
    for number, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        rows, keys = slice(q_at, q_at + q_len), slice(kv_at, kv_at + kv_len)
        q_at, kv_at = rows.stop, keys.stop
        q = inputs.q[0, :, rows]
        k, v = (t[0, :, keys].repeat_interleave(group, 0) for t in (inputs.k, inputs.v))
        weight = _weights(spec, case, inputs, number, rows)
        scores = q.double() @ k.double().transpose(1, 2) * scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores + weight.log()
        if inputs.sink is not None:
            column = inputs.sink.double()[:, None, None].expand(-1, q_len, 1)
            scores = torch.cat((scores, column), 2)
            v = torch.cat((v, v.new_zeros(v.shape[0], 1, v.shape[2])), 1)
        of_rows = torch.logsumexp(scores, 2) if scores.shape[2] else torch.full_like(scores.sum(2), -torch.inf)
        lse[0, :, rows] = of_rows
        weights = torch.exp(scores - of_rows.nan_to_num(neginf=0.0)[..., None])
        out[0, :, rows] = weights @ v.double()
        if inputs.sink is None and spec.softcap is None and kv_len and not bool((weight > 1).any()):
            seen = weight > 0
            found = torch_attention(q[None], k[None], v[None], seen, scale=scale)[0]
            theirs[0, :, rows] = torch.where(seen.any(2)[:, :, None], found, 0.0)
    return out, lse, theirs


def run_case(kernel: AttentionKernel, case: VarlenCase, device: torch.device) -> Outcome:
    """Run one case twice on poisoned outputs and compare it with the oracle and with torch."""
    spec = kernel.spec
    inputs = make_inputs(spec, case, device)
    reference, reference_lse, theirs = oracle(spec, case, inputs)
    given = inputs.of_call()
    results, problems = [], []
    for _ in range(2):
        memory = torch.full(
            (inputs.q.shape[2], case.heads, spec.head_dim), torch.nan, dtype=inputs.q.dtype, device=device
        )
        out = memory[..., : inputs.q.shape[3]].transpose(0, 1)[None]
        options: dict[str, Any] = {"scale": case.scale, "out": out, "sink": inputs.sink, **numbers_of(spec, case)}
        with poisoned_memory():
            results.append(kernel(*given, **options))
        if not bool(memory[..., inputs.q.shape[3] :].isnan().all()):
            problems.append("columns were written that the heads do not have")
    (out, lse), (again, lse_again) = results
    inside = ~reference[0, 0, :, 0].isnan()
    if not bool(out[:, :, ~inside].isnan().all()):
        problems.append("tokens of no sequence were written")
    if not torch.equal(out[:, :, inside], again[:, :, inside]):
        problems.append("two runs differ")
    if lse is not None:
        problems += _lse_problems(lse[:, :, inside], reference_lse[:, :, inside])
        if lse_again is None or not torch.equal(lse[:, :, inside], lse_again[:, :, inside]):
            problems.append("the LSE of two runs differs")
    empty = reference_lse[:, :, inside].isneginf()
    if bool((out[:, :, inside][empty] != 0).any()):
        problems.append("a row without keys is not 0")
    out, reference, theirs = out[:, :, inside], reference[:, :, inside], theirs[:, :, inside]
    compared = not bool(theirs.isnan().any()) and theirs.numel() > 0
    torch_error = max_error(theirs, reference) if compared else None
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    return Outcome(
        name=case.name,
        description=case.describe(),
        max_error=max_error(out, reference) if reference.numel() else 0.0,
        torch_error=torch_error,
        tolerance=tolerance(spec.dtype, torch_error, largest),
        problem="; ".join(problems),
    )


def _lse_problems(lse: torch.Tensor, reference: torch.Tensor, allowed: float = 1e-4) -> list[str]:
    """Faults of the LSE of a case, in words."""
    empty = reference.isneginf()
    if not torch.equal(lse.isneginf(), empty):
        return ["LSE is not -inf exactly where a row has no keys"]
    error = (lse.double() - reference)[~empty].abs() / reference[~empty].abs().clamp(min=1.0)
    if error.numel() and not float(error.max()) < allowed:
        return [f"LSE is off by {float(error.max()):.2g}"]
    return []
