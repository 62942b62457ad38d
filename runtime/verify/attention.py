"""Attention: the oracle and the run of one case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from codegen import varlen_cases
from codegen.attention_cases import (
    BITS_CASES,
    CASES,
    HEAD_SIZE_CASES,
    KV_LENGTH_CASES,
    LARGEST_PAIRS,
    MONOTONE_CASES,
    ORDER_QUERIES_CASES,
    PER_BATCH_CASES,
    RANDOM_SHAPES,
    SHARE_KV_CASES,
    SINK_CASES,
    SOFTCAP_CASES,
    WIDTH_CASES,
    WINDOW_CASES,
    Case,
    cases_of,
    fitted,
    head_size_cases,
    random_cases,
)
from codegen.patterns import IndexTensor
from codegen.patterns.block_lists import BlockLists
from codegen.spec import KV_LENGTHS, AttentionSpec
from runtime.expressions.draw import draw_aux
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.attention import AttentionKernel
from runtime.prepare.query_grouping import find_query_order
from runtime.verify import varlen
from runtime.verify.aux_tensors import scored
from runtime.verify.common import (
    Outcome,
    Verification,
    generator,
    max_error,
    poisoned_memory,
    tolerance,
    torch_attention,
)
from runtime.verify.mask_bits import draw_bits
from runtime.verify.multiplicity import Inputs, multiplicity, sizes_of

__all__ = [  # cases and run_case, as in the modules of other operators
    "BITS_CASES",
    "CASES",
    "HEAD_SIZE_CASES",
    "KV_LENGTH_CASES",
    "LARGEST_PAIRS",
    "MONOTONE_CASES",
    "ORDER_QUERIES_CASES",
    "PER_BATCH_CASES",
    "RANDOM_SHAPES",
    "SHARE_KV_CASES",
    "SINK_CASES",
    "SOFTCAP_CASES",
    "WIDTH_CASES",
    "WINDOW_CASES",
    "Case",
    "Inputs",
    "cases_of",
    "fitted",
    "head_size_cases",
    "make_inputs",
    "multiplicity",
    "oracle",
    "random_cases",
    "run_case",
]
HUGE_LOGIT = 1e4  # its exponential is far beyond fp32
# Times log2(e) it is 14427, whose ulp is 2^-10. A kernel that fuses this product with the subtraction of the maximum
# has an error of up to 2^-11 in the exponent, or 3.4e-4 in the weight. That is less than half an ulp of an fp16 number
# from 1.1 to 1.4, so a query whose largest logit is this key's must still have an exact result.
HUGE_LOGIT_VALUES = (1.1, 1.4)
RISE = 80.0  # over all keys: 3.4 from one block of 64 keys to the next for 1500 keys
LARGEST_PRODUCT = 6e4  # the largest finite fp16 is 65504: scores in fp16 would come close to overflow


def make_inputs(spec: AttentionSpec, case: Case, device: torch.device) -> Inputs:
    """Draw random inputs of a case; future FP8 inputs are in float32."""
    source = generator(case.name, device)
    dtype = torch.float32 if spec.is_fp8 else TORCH_DTYPES[spec.dtype]

    def tensor(batch: int, heads: int, length: int) -> torch.Tensor:
        shape = (batch, heads, length, spec.head_dim)
        if case.layout == "bshd":
            shape = (batch, length, heads, spec.head_dim)
        drawn = torch.randn(shape, generator=source, device=device, dtype=torch.float32).to(dtype)
        if case.columns is not None:
            drawn[..., case.columns :] = torch.nan
            drawn = drawn[..., : case.columns]
        return drawn.transpose(1, 2) if case.layout == "bshd" else drawn

    q = tensor(case.batch, case.heads, case.q_len)
    q *= case.spread
    stored = 1 if case.expanded else case.batch
    k, v = (tensor(stored, case.kv_heads, case.kv_len) for _ in range(2))
    _set_values(spec, case, q, k, v)
    k, v = (t.expand(case.batch, -1, -1, -1) for t in (k, v))
    lists = (*_make_lists(spec, case, device, source), *_make_values(spec.pattern.index_tensors, case, device, source))
    if spec.pattern.masks_by_bits:
        lists = (*lists, *(None for _ in range(4 - len(lists))), _make_bits(spec, case, lists, source))
    if spec.query_grouping == "given":
        lists = (*lists, _make_order(spec, case, lists[0], source))
    if spec.kv_lengths:
        if len(lists) == 2 and isinstance(spec.pattern, BlockLists):
            lists = (*lists, None, None)
        lists = (*lists, *_make_values((KV_LENGTHS,), case, device, source))
    sink = _make_sink(case, device, source) if spec.sink else None
    aux = draw_aux(spec.aux_tensors, sizes_of(case), source, device)
    return Inputs(q, k, v, lists, sink, aux, _numbers(spec, case))


def _numbers(spec: AttentionSpec, case: Case) -> dict[str, Any]:
    """Pattern numbers by argument of a call; empty if the spec has them."""
    arguments = {number.argument for number in spec.pattern.call_numbers} if spec.pattern.is_general else ()
    return {name: getattr(case, name) for name in sorted(arguments)}


def _set_values(spec: AttentionSpec, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Change normally distributed q, k and v in place to the values of the case."""
    if case.values == "equal_keys":
        k.copy_(k[:, :, :1].clone())
    elif case.values == "huge_logit":
        # One element of q and k is reserved for this, so that other logits hardly change.
        root = (HUGE_LOGIT / softmax_scale(spec, case)) ** 0.5
        q[..., 0] = k[..., 0] = 0.0
        winner = case.kv_len // 2 + 3
        q[:, :, ::5, 0] = k[:, :, winner, 0] = root
        v[:, :, winner] = v[:, :, winner].sign() * v[:, :, winner].abs().clamp(*HUGE_LOGIT_VALUES)
    elif case.values in ("rising", "falling"):
        root = (RISE / softmax_scale(spec, case)) ** 0.5
        ramp = torch.linspace(0.0, root, case.kv_len, device=k.device)
        q[..., 0] = root
        k[..., 0] = ramp if case.values == "rising" else ramp.flip(0)
    elif case.values == "large_products":
        keys = k.float().repeat_interleave(case.heads // case.kv_heads, 1)
        factor = (LARGEST_PRODUCT / (q.float() @ keys.transpose(2, 3)).abs().max()) ** 0.5
        q *= factor
        k *= factor


def softmax_scale(spec: AttentionSpec, case: Case) -> float:
    """Softmax scale of a case."""
    return (case.columns or spec.head_dim) ** -0.5 if case.scale is None else case.scale


def _make_sink(case: Case, device: torch.device, source: torch.Generator) -> torch.Tensor:
    if case.sinks == "huge":
        return torch.tensor([1e4, -1e4], device=device).repeat(case.heads)[: case.heads].contiguous()
    drawn = torch.randn(case.heads, generator=source, device=device, dtype=torch.float32)
    return math.log(case.kv_len) + 2.0 * drawn


def _make_lists(
    spec: AttentionSpec, case: Case, device: torch.device, source: torch.Generator
) -> tuple[torch.Tensor | None, ...]:
    block = spec.pattern.fixed_block
    if block is None:
        return ()
    batch, heads = (1, 1) if case.shared_lists else (case.batch, case.heads // spec.pack_gqa)
    rows, key_blocks = -(-case.q_len // block.q), -(-case.kv_len // block.kv)

    def draw(length: int, rows: int = rows) -> torch.Tensor:
        shape = (batch, heads, rows)
        if case.lists == "padded" or (case.lists == "random" and length <= key_blocks):
            picks = torch.rand((*shape, key_blocks), generator=source, device=device).argsort(-1)[..., :length]
            picks = torch.nn.functional.pad(picks, (0, length - picks.shape[3]), value=-1)
        else:
            picks = torch.randint(0, key_blocks, (*shape, length), generator=source, device=device)
        if case.lists == "out_of_range":
            wild = torch.rand(picks.shape, generator=source, device=device)
            picks = torch.where(wild < 0.2, -1, torch.where(wild > 0.8, key_blocks + 3, picks))
        return picks.to(torch.int32).contiguous()

    def pairs(length: int, overlap: float) -> torch.Tensor:
        """Draw pairs of lists that share a part of their entries, and shuffle each list."""
        common = round(overlap * length)
        both = draw(2 * length - common, -(-rows // 2))
        two = torch.stack((both[..., :length], both[..., length - common :]), 3)
        order = torch.rand(two.shape, generator=source, device=device).argsort(-1)
        return two.gather(4, order).flatten(2, 3)[:, :, :rows].contiguous()

    def chosen_rows() -> torch.Tensor:
        return torch.rand((batch, heads, rows), generator=source, device=device) < 0.5

    def count(length: int) -> torch.Tensor:
        if case.counts == "random":
            drawn = torch.randint(0, length + 1, (batch, heads, rows), generator=source, device=device)
            return drawn.to(torch.int32)
        if case.counts == "mixed":
            return torch.where(chosen_rows(), length, 0).to(torch.int32)
        return torch.full(
            (batch, heads, rows), 0 if case.counts == "empty" else length, dtype=torch.int32, device=device
        )

    names = [tensor.name for tensor in spec.pattern.index_tensors]
    if case.counts == "left_out":
        return None, draw(key_blocks)
    if names == ["kv_indices"]:
        k = spec.pattern.index_tensors[0].dims[3]
        k = case.width if k == "any" else int(k)
        drawn = draw(k) if case.overlap is None else pairs(k, case.overlap)
        return (drawn.masked_fill(~chosen_rows()[..., None], -1) if case.counts == "mixed" else drawn,)
    # The two lists of block_lists partition the KV blocks, as in a BlockMask.
    partial = draw(key_blocks)
    half = max(1, key_blocks // 2)
    if not case.full_lists:
        return count(key_blocks), partial
    full = partial[..., half:].contiguous() if key_blocks > 1 else partial
    return count(half), partial[..., :half].contiguous(), count(full.shape[3]), full


def _make_bits(
    spec: AttentionSpec, case: Case, lists: tuple[torch.Tensor | None, ...], source: torch.Generator
) -> torch.Tensor:
    counts, partial, block = lists[0], lists[1], spec.pattern.fixed_block
    assert counts is not None and partial is not None and block is not None
    entries = int(counts.max()) if case.masks == "few" else partial.shape[3]
    batch, heads = case.batch, case.heads // spec.pack_gqa
    return draw_bits((batch, heads, partial.shape[2], entries), block, case.masks, source, partial.device)


def _make_values(
    tensors: Sequence[IndexTensor], case: Case, device: torch.device, source: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """Draw the tensors with one count per batch, from 0 to the size that they count."""

    def draw(tensor: IndexTensor) -> torch.Tensor:
        batch, most = 1 if case.shared_lists else case.batch, {"kv_len": case.kv_len}[tensor.upper]
        places = torch.arange(batch, device=device)
        edges = torch.tensor([0, 1, most // 2 | 1, most - 1, most], device=device)
        drawn = {
            "random": lambda: torch.randint(0, most + 1, (batch,), generator=source, device=device),
            "empty": lambda: torch.zeros_like(places),
            "full": lambda: torch.full_like(places, most),
            "mixed": lambda: torch.randint(0, 2, (batch,), generator=source, device=device) * most,
            "edges": lambda: edges[places % len(edges)],
            "block_edges": lambda: (64 * (places // 3 + 1) + places % 3 - 1).clamp(max=most),
        }[case.counts]()
        if case.lists == "out_of_range":
            wild = torch.tensor([-1, most + 3, -(2**31), 2**31 - 1], device=device)
            drawn = torch.where(places % 2 == 0, wild[places // 2 % len(wild)], drawn)
        return drawn.to(torch.int32)

    return tuple(draw(tensor) for tensor in tensors if tensor.per_batch)


def _make_order(spec: AttentionSpec, case: Case, lists: torch.Tensor | None, source: torch.Generator) -> torch.Tensor:
    """Query order of a case: the optimized one for overlapping lists, a random one for others."""
    block = spec.pattern.fixed_block
    assert lists is not None and block is not None
    if case.overlap is not None:
        return find_query_order(lists, -(-case.kv_len // block.kv), spec.tile.m // block.q)
    return torch.rand(lists.shape[:3], generator=source, device=lists.device).argsort(-1).to(torch.int32)


def oracle(spec: AttentionSpec, case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute out, lse and multiplicity in float64."""
    out, lse, weight, _, _ = oracle_with_weights(spec, case, inputs)
    return out, lse, weight


def oracle_with_weights(
    spec: AttentionSpec, case: Case, inputs: Inputs, products: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Compute out, lse, multiplicity, exp(logit - its row's maximum) of each pair, and the sink's term of each row sum.

    Args:
        spec: spec of the kernel.
        case: the case.
        inputs: tensors of the case.
        products: Q K^T of all heads, float64, instead of the exact product.
    """
    q, k, v = (t.double() for t in (inputs.q, inputs.k, inputs.v))
    group = case.heads // case.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = softmax_scale(spec, case)
    weight = multiplicity(spec, case, inputs)
    scores = (q @ k.transpose(2, 3) if products is None else products) * scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.score is not None:
        scores = scored(spec.score.expression, scores, inputs.aux)
    scores = scores.masked_fill(weight == 0, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    sink = None if inputs.sink is None else inputs.sink.double()[:, None, None]
    top = (top if sink is None else torch.maximum(top, sink)).nan_to_num(neginf=0.0)
    each = torch.exp(scores - top)
    weighted = weight * each
    rest = torch.zeros_like(top) if sink is None else torch.exp(sink - top)
    total = weighted.sum(-1, keepdim=True) + rest
    out = torch.where(total > 0, weighted / total, 0.0) @ v
    return out, (total.log() + top).squeeze(-1), weight, each, rest


def torch_result(spec: AttentionSpec, case: Case, inputs: Inputs, weight: torch.Tensor) -> torch.Tensor | None:
    """Compute torch's own attention in the kernel's dtype; None for repeated pairs, softcap, scores and sinks, which
    torch lacks."""
    if spec.softcap is not None or spec.score is not None or spec.sink or bool((weight > 1).any()):
        return None
    group = case.heads // case.kv_heads
    k, v = inputs.k.repeat_interleave(group, 1), inputs.v.repeat_interleave(group, 1)
    return torch_attention(inputs.q, k, v, weight > 0, scale=case.scale)


def run_case(kernel: AttentionKernel, case: Case, device: torch.device) -> Outcome:
    """Run one case twice on poisoned outputs and compare it with the oracle and with torch."""
    spec = kernel.spec
    inputs = make_inputs(spec, case, device)
    reference, reference_lse, weight = oracle(spec, case, inputs)
    problems = []
    results = []
    for _ in range(2):
        memory, out = poisoned_output(spec, inputs.q)
        options: dict[str, Any] = {"scale": case.scale, "out": out, "sink": inputs.sink, **inputs.options()}
        with poisoned_memory():
            results.append(kernel(inputs.q, inputs.k, inputs.v, *inputs.indices, **options))
        if not bool(memory[..., inputs.q.shape[3] :].isnan().all()):
            problems.append("columns beyond the head dimension were written")
    (out, lse), (again, lse_again) = results
    if not torch.equal(out, again) or (lse is not None and lse_again is not None and not torch.equal(lse, lse_again)):
        problems.append("two runs differ")
    if lse is not None:
        problems += check_lse(lse, reference_lse)
        problems += check_without_lse(kernel, (inputs.q, inputs.k, inputs.v, *inputs.indices), options, out)
    unseen = weight.sum(-1) == 0
    if bool((out[unseen] != 0).any()):
        problems.append("a row without keys is not 0")
    theirs = torch_result(spec, case, inputs, weight)
    torch_error = None
    if theirs is not None and not bool(unseen.all()):
        torch_error = max_error(theirs[~unseen], reference[~unseen])
    return Outcome(
        name=case.name,
        description=case.describe(),
        max_error=max_error(out, reference),
        torch_error=torch_error,
        tolerance=tolerance(spec.dtype, torch_error, float(reference.abs().max())),
        problem="; ".join(problems),
    )


def poisoned_output(spec: AttentionSpec, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate NaN memory for a result, and the result: the columns of the memory that q has."""
    if q.shape[3] == spec.head_dim:
        memory = torch.full_like(q, torch.nan)
        return memory, memory
    memory = torch.full((*q.shape[:3], spec.head_dim), torch.nan, dtype=q.dtype, device=q.device)
    return memory, memory[..., : q.shape[3]]


def check_without_lse(kernel: Any, given: Sequence[Any], options: dict[str, Any], right: torch.Tensor) -> list[str]:
    """Check that a call without an LSE has the same result; return descriptions of faults.

    Args:
        kernel: a kernel with an LSE.
        given: positional arguments of the call.
        options: keyword arguments of the call; ``out`` is overwritten.
        right: result of a call with an LSE.
    """
    options["out"].fill_(torch.nan)
    with poisoned_memory():
        found = kernel(*given, **options, return_lse=False)
    if found.lse is not None:
        return ["an LSE was returned without return_lse"]
    return [] if torch.equal(found.out, right) else ["the result differs without an LSE"]


def check_lse(lse: torch.Tensor, reference: torch.Tensor, allowed: float = 1e-4) -> list[str]:
    """Check the LSE of a case with a tolerance relative to max(|LSE|, 1); return descriptions of faults."""
    empty = torch.isinf(reference)
    if not torch.equal(torch.isneginf(lse), empty):
        return ["LSE is not -inf exactly where a row has no keys"]
    error = (lse.double() - reference)[~empty].abs() / reference[~empty].abs().clamp(min=1.0)
    if error.numel() and not float(error.max()) < allowed:
        return [f"LSE is off by {float(error.max()):.2g}"]
    return []


def _cases(spec: AttentionSpec) -> tuple[Any, ...]:
    return varlen_cases.cases_of(spec) if spec.layout == "varlen" else cases_of(spec)


def _random_cases(spec: AttentionSpec) -> Sequence[Any]:
    if spec.layout == "varlen":
        return varlen_cases.random_cases(spec)
    return [fitted(case, spec) for case in random_cases()]


def _run_any(kernel: AttentionKernel, case: Any, device: torch.device) -> Outcome:
    return (varlen.run_case if isinstance(case, varlen_cases.VarlenCase) else run_case)(kernel, case, device)


VERIFICATION = Verification(
    oracle="float64 softmax over the same pairs, on the GPU",
    cases=lambda plan, spec: _cases(spec),
    run_case=_run_any,
    random_cases=_random_cases,
)
