"""Packed sequences whose queries have lists of key blocks: inputs, and the oracle of results and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from codegen.key_list_cases import CASES, KeyListCase, cases_of, random_cases
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.gradient_statistics import LOG2_E
from runtime.kernels.key_lists_backward import KeyListsBackwardKernel
from runtime.kernels.key_lists_forward import KeyListsForwardKernel
from runtime.kernels.key_lists_paged import KeyListsPagedKernel
from runtime.verify.attention_backward import FLOAT_NOISE, LEAST_NOISE, RELATIVE_LARGEST, Gradients, rms
from runtime.verify.common import (
    RELATIVE_TO_TORCH,
    Outcome,
    Verification,
    generator,
    max_error,
    poisoned_memory,
    worst,
)

LARGEST_ENTRY = 2**31 - 1
LSE_TOLERANCE = 2e-3
PAGE_SIZES = (16, 64, 128, 32, 256)
"""Tokens of the pages of cases over pages."""
SPARE_PAGES = 3
"""Pages of no sequence."""


class Inputs(NamedTuple):
    """Tensors of a case.

    Attributes:
        q: (tokens, heads, head_dim).
        k: (key tokens, kv_heads, head_dim).
        v: as k.
        cu_seqlens_q: int32 (sequences + 1,).
        cu_seqlens_k: int32 (sequences + 1,).
        lists: int32 (kv_heads or 1, tokens, entries).
        counts: int32 (kv_heads or 1, tokens), or None.
        dout: as q, the gradient of the result.
        dlse: float32 (heads, tokens), the gradient of the log-sum-exp, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    lists: torch.Tensor
    counts: torch.Tensor | None
    dout: torch.Tensor
    dlse: torch.Tensor | None


class Exact(NamedTuple):
    """A case in float64.

    Attributes:
        out: (tokens, heads, head_dim), the result; NaN for tokens of no sequence.
        rounded_out: the result with weights and itself rounded to the kernel's dtype.
        lse: (heads, tokens), its log-sum-exp, likewise; -inf for a query that sees no key.
        gradients: dq, dk and dv, 0 for tokens of no sequence.
        rounded: gradients with the roundings of a kernel, as ``attention_backward.Exact`` has them.
        unseen: where a gradient is 0, because no pair is seen.
        noise: the error floor of float32 arithmetic.
    """

    out: torch.Tensor
    rounded_out: torch.Tensor
    lse: torch.Tensor
    gradients: Gradients
    rounded: Gradients
    unseen: dict[str, torch.Tensor]
    noise: float


def inputs_of(
    case: KeyListCase, *, group: int, head_dim: int, keys: int, dtype: torch.dtype, device: torch.device
) -> Inputs:
    """Random inputs of a case: the same ones every time.

    Args:
        case: the case.
        group: query heads per KV head.
        head_dim: elements per head.
        keys: keys of an entry.
        dtype: of q, k and v.
        device: of all tensors.
    """
    draw = generator(case.name, device)
    tokens, key_tokens = (2 * case.before + sum(lengths) for lengths in (case.q_lens, case.kv_lens))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=device)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw, device=device, dtype=torch.int32)

    def bounds(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([*accumulate(lengths, initial=case.before)], dtype=torch.int32, device=device)

    heads = case.kv_heads * group
    q = (case.spread * normal(tokens, heads, head_dim)).to(dtype)
    k, v = (normal(key_tokens, case.kv_heads, head_dim).to(dtype) for _ in range(2))
    shape = (case.kv_heads if case.head_lists else 1, tokens, case.entries)
    lists = integers(-1, max(case.kv_lens) // keys + 2, *shape)
    if case.shared_block:
        lists[..., -1] = 0
    if case.wild:
        anything = integers(-LARGEST_ENTRY, LARGEST_ENTRY, *shape)
        lists = torch.where(integers(0, 5, *shape) == 0, anything, lists)
    counts = integers(-1, case.entries + 2, *shape[:2]) if case.counted else None
    dout = normal(*q.shape).to(dtype)
    dlse = normal(heads, tokens) if case.lse_gradient else None
    return Inputs(q, k, v, bounds(case.q_lens), bounds(case.kv_lens), lists, counts, dout, dlse)


def counts_of(inputs: Inputs, rows: slice, length: int, keys: int) -> torch.Tensor:
    """How often each query of a sequence sees each key, float64 (kv_heads, queries, keys)."""
    device, kv_heads = inputs.q.device, inputs.k.shape[1]
    lists = inputs.lists[:, rows].long()
    there = (lists >= 0) & (lists * keys < length)
    if inputs.counts is not None:
        there &= torch.arange(lists.shape[2], device=device) < inputs.counts[:, rows, None]
    blocks = -(-length // keys)
    listed = lists.where(there, blocks)
    found = torch.zeros((*lists.shape[:2], blocks + 1), dtype=torch.float64, device=device)
    found.scatter_add_(2, listed, there.double())
    of_keys = found[..., :blocks].repeat_interleave(keys, 2)[..., :length]
    position = torch.arange(length - lists.shape[1], length, device=device)[:, None]
    return (of_keys * (torch.arange(length, device=device) <= position)).expand(kv_heads, -1, -1)


def _sequences(case: KeyListCase) -> Iterator[tuple[slice, slice]]:
    """Tokens of each sequence in q, and in k."""
    q_at = k_at = case.before
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        yield slice(q_at, q_at + q_len), slice(k_at, k_at + kv_len)
        q_at, k_at = q_at + q_len, k_at + kv_len


def oracle(case: KeyListCase, inputs: Inputs, keys: int) -> Exact:
    """Compute the result and the gradients of each sequence by formula."""
    q, k, v = inputs.q, inputs.k, inputs.v
    operands = {"dq": q, "dk": k, "dv": v}
    exact = Exact(
        torch.full(q.shape, math.nan, dtype=torch.float64, device=q.device),
        torch.full(q.shape, math.nan, dtype=torch.float64, device=q.device),
        torch.full((q.shape[1], q.shape[0]), math.nan, dtype=torch.float64, device=q.device),
        {name: torch.zeros_like(t, dtype=torch.float64) for name, t in operands.items()},
        {name: torch.zeros_like(t, dtype=torch.float64) for name, t in operands.items()},
        {name: torch.ones(t.shape[:2], dtype=torch.bool, device=t.device) for name, t in operands.items()},
        0.0,
    )
    noise = 0.0
    for rows, columns in _sequences(case):
        if rows.start == rows.stop:
            continue
        if columns.start == columns.stop:
            exact.out[rows], exact.rounded_out[rows], exact.lse[:, rows] = 0.0, 0.0, -math.inf
            continue
        noise = max(noise, _of_sequence(case, inputs, exact, (rows, columns), keys))
    return exact._replace(noise=noise)


def _of_sequence(case: KeyListCase, inputs: Inputs, exact: Exact, at: tuple[slice, slice], keys: int) -> float:
    """Fill in one sequence; return the error floor of its gradients."""
    rows, columns = at
    dtype, kv_heads = inputs.q.dtype, case.kv_heads
    scale = 1 / math.sqrt(inputs.q.shape[2]) if case.scale is None else case.scale
    weight = counts_of(inputs, rows, columns.stop - columns.start, keys)[:, None]
    q, do = (t[rows].double().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for t in (inputs.q, inputs.dout))
    k, v = (t[columns].double().transpose(0, 1)[:, None] for t in (inputs.k, inputs.v))
    logits = q @ k.mT * scale
    lse = (logits + weight.log()).logsumexp(-1)
    finite = lse.nan_to_num(neginf=0.0)
    dp = do @ v.mT
    dlse = 0.0
    if inputs.dlse is not None:
        dlse = inputs.dlse[:, rows].double().unflatten(0, (kv_heads, -1))[..., None]

    def weights(lse: torch.Tensor) -> torch.Tensor:
        return torch.where(weight > 0, (logits - lse[..., None]).exp(), 0.0)

    out = (weight * weights(finite)) @ v

    def gradients(lse: torch.Tensor, round_: Callable[[torch.Tensor], torch.Tensor]) -> Gradients:
        p = weights(lse)
        ds = weight * round_(p * (dp - (do * round_(out)).sum(-1, keepdim=True) + dlse))
        of_k, of_v = scale * (ds.mT @ q).sum(1), ((weight * round_(p)).mT @ do).sum(1)
        of_q = (scale * (ds @ k)).permute(2, 0, 1, 3).flatten(1, 2)
        return {"dq": round_(of_q), "dk": round_(of_k.transpose(0, 1)), "dv": round_(of_v.transpose(0, 1))}

    off = torch.nextafter(finite.float(), torch.full_like(finite, math.inf).float()).double()
    exact.out[rows] = out.permute(2, 0, 1, 3).flatten(1, 2)
    rounded_out = (weight * weights(off).to(dtype).double()) @ v
    exact.rounded_out[rows] = rounded_out.permute(2, 0, 1, 3).flatten(1, 2).to(dtype).double()
    exact.lse[:, rows] = lse.flatten(0, 1)
    unseen = {"dq": weight.sum(-1) == 0, "dk": weight.sum(-2) == 0}
    of_queries = unseen["dq"].expand(-1, q.shape[1], -1).flatten(0, 1).transpose(0, 1)
    of_keys = unseen["dk"][:, 0].transpose(0, 1)
    found, rounded = gradients(finite, lambda x: x), gradients(off, lambda x: x.to(dtype).double())
    for name, part, none in (("dq", rows, of_queries), ("dk", columns, of_keys), ("dv", columns, of_keys)):
        exact.gradients[name][part], exact.rounded[name][part] = found[name], rounded[name]
        exact.unseen[name][part] = none
    largest = float((do.abs() @ v.abs().mT).max()) * max(float(q.abs().max()), float(k.abs().max()))
    return FLOAT_NOISE * scale * largest


def run_case(kernel: KeyListsBackwardKernel, case: KeyListCase, device: torch.device) -> Outcome:
    """Run one case twice in poisoned memory and compare it with the oracle.

    Errors are relative to the tolerance of each gradient, as those of attention over blocks.
    """
    spec = kernel.spec
    dtype = TORCH_DTYPES[spec.dtype]
    sizes = {"group": spec.group, "head_dim": spec.head_dim, "keys": spec.entry_keys}
    inputs = inputs_of(case, **sizes, dtype=dtype, device=device)
    exact = oracle(case, inputs, spec.entry_keys)
    scale = 1 / math.sqrt(spec.head_dim) if case.scale is None else case.scale
    factor = torch.tensor(scale * LOG2_E, dtype=torch.float32).double()  # as a forward rounds it
    lse = (exact.lse * float(factor / LOG2_E / scale)).float().contiguous()
    options: dict[str, Any] = {"out": exact.out.to(dtype), "dout": inputs.dout, "lse": lse, "dlse": inputs.dlse}
    options |= {name: getattr(inputs, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "lists", "counts")}
    with poisoned_memory():
        first, again = (kernel(inputs.q, inputs.k, inputs.v, **options, scale=case.scale)._asdict() for _ in range(2))
    problems, used = [], [0.0]
    for name, found in first.items():
        right = exact.gradients[name]
        if not torch.equal(found, again[name]):
            problems.append(f"two runs of {name} differ")
        if bool((found[exact.unseen[name]] != 0).any()):
            problems.append(f"{name} is not 0 where no pair is seen")
        shares = []
        for share, error in ((RELATIVE_LARGEST, max_error), (RELATIVE_TO_TORCH, rms)):
            allowed = max(exact.noise, LEAST_NOISE, share * error(exact.rounded[name], right))
            shares.append(error(found, right) / allowed)
        used.append(worst(shares))
        if not used[-1] <= 1.0:
            problems.append(_place_of(name, found, right))
    return Outcome(
        name=case.name,
        description=f"{case.describe()}; errors as shares of what is allowed",
        max_error=worst(used),
        torch_error=None,
        tolerance=1.0,
        problem="; ".join(problems),
    )


def _place_of(name: str, found: torch.Tensor, right: torch.Tensor) -> str:
    """Where a gradient is off by the most, in words."""
    error = (found.double() - right).abs().nan_to_num(nan=math.inf)
    token, head, column = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    values = f"{float(found[token, head, column]):.4g}, expected {float(right[token, head, column]):.4g}"
    return f"{name}: {values} at token {token}, head {head}, column {column}"


class Pages(NamedTuple):
    """K and V of a case in pages.

    Attributes:
        k: (pages, page_size, kv_heads, head_dim), NaN where no key is.
        v: as k.
        table: int32 (sequences, most pages of a sequence), any integers behind the last page.
        lengths: int32 (sequences,): keys of each sequence.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def pages_of(case: KeyListCase, inputs: Inputs, page_size: int) -> Pages:
    """Put K and V of a case into pages in random order."""
    device = inputs.k.device
    lengths = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    needed = [-(-length // page_size) for length in case.kv_lens]
    pages = sum(needed) + SPARE_PAGES
    order = torch.randperm(pages, generator=generator(f"pages of {case.name}", device), device=device).int()
    k, v = (torch.full((pages, page_size, *t.shape[1:]), math.nan, dtype=t.dtype, device=device) for t in inputs[1:3])
    table = torch.full((len(needed), max(needed) + 1), LARGEST_ENTRY, dtype=torch.int32, device=device)
    first_page, first_key = 0, case.before
    for sequence, (number, length) in enumerate(zip(needed, case.kv_lens, strict=True)):
        table[sequence, :number] = order[first_page : first_page + number]
        position = torch.arange(length, device=device)
        page = table[sequence].long()[position // page_size]
        for cache, rows in ((k, inputs.k), (v, inputs.v)):
            cache[page, position % page_size] = rows[first_key : first_key + length]
        first_page, first_key = first_page + number, first_key + length
    return Pages(k, v, table, lengths)


def _attend(kernel: Any, case: KeyListCase, inputs: Inputs, out: torch.Tensor) -> torch.Tensor:
    """Compute a case into ``out`` by a kernel, which may be a guarded one; return the log-sum-exp."""
    options: dict[str, Any] = {"scale": case.scale, "out": out, "cu_seqlens_q": inputs.cu_seqlens_q}
    options |= {"lists": inputs.lists, "counts": inputs.counts}
    if kernel.spec.layout == "paged":
        found = pages_of(case, inputs, PAGE_SIZES[len(case.name) % len(PAGE_SIZES)])
        options |= {"block_table": found.table, "seq_lens": found.lengths, "return_lse": True}
        result = kernel(inputs.q, found.k, found.v, **options, entry_keys=kernel.spec.entry_keys)
    else:
        result = kernel(inputs.q, inputs.k, inputs.v, **options, cu_seqlens_k=inputs.cu_seqlens_k)
    assert isinstance(result.lse, torch.Tensor)
    return result.lse


def run_forward_case(
    kernel: KeyListsForwardKernel | KeyListsPagedKernel, case: KeyListCase, device: torch.device
) -> Outcome:
    """Run one case twice in poisoned memory; the bits must agree. Tokens of no sequence must not be written.

    Errors are relative to the tolerance: of the result, multiples of what rounding costs, as of gradients.
    """
    spec = kernel.spec
    dtype = TORCH_DTYPES[spec.dtype]
    sizes = {"group": spec.group, "head_dim": spec.head_dim, "keys": spec.entry_keys}
    inputs = inputs_of(case, **sizes, dtype=dtype, device=device)
    exact = oracle(case, inputs, spec.entry_keys)
    out, again = (torch.full_like(inputs.q, math.nan) for _ in range(2))
    with poisoned_memory():
        lse, lse_again = (_attend(kernel, case, inputs, to) for to in (out, again))
    inside = slice(case.before, inputs.q.shape[0] - case.before)
    same = torch.equal(out[inside], again[inside]) and torch.equal(lse[:, inside], lse_again[:, inside])
    problems = [] if same else ["two runs differ"]
    if not all(part.isnan().all() for part in (out[: case.before], out[inside.stop :])):
        problems.append("a token of no sequence was written")
    right, rounded, right_lse = exact.out[inside], exact.rounded_out[inside], exact.lse[:, inside]
    off_lse = torch.where(lse[:, inside] == right_lse, 0.0, lse[:, inside].double() - right_lse)  # both may be -inf
    used = [max_error(off_lse, torch.zeros_like(off_lse)) / LSE_TOLERANCE]
    for share, error in ((RELATIVE_LARGEST, max_error), (RELATIVE_TO_TORCH, rms)):
        used.append(error(out[inside], right) / max(LEAST_NOISE, share * error(rounded, right)))
    return Outcome(
        case.name,
        f"{case.describe()}; errors as shares of what is allowed",
        worst(used),
        None,
        1.0,
        "; ".join(problems),
    )


FORWARD_VERIFICATION = Verification(
    oracle="float64 softmax over the listed keys of each sequence, on the GPU",
    cases=lambda plan, spec: CASES,
    run_case=run_forward_case,
    random_cases=lambda spec: random_cases(),
)
VERIFICATION = Verification(
    oracle="float64 gradients over the listed keys of each sequence, on the GPU",
    cases=lambda plan, spec: cases_of(spec.entry_keys),
    run_case=run_case,
    random_cases=lambda spec: random_cases(),
)
