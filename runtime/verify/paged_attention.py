"""Attention over pages: inputs, oracle, and the run of one case."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from codegen.paged_cases import UNSEEN_PAGE, PagedCase, cases_of, prefill_cases, random_prefill_cases
from codegen.spec import AttentionSpec, PagedAttentionSpec
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.paged_attention import UNBOUNDED, PagedAttentionKernel, Window
from runtime.kernels.paged_prefill import PagedPrefillKernel
from runtime.verify.common import (
    Outcome,
    Verification,
    generator,
    max_error,
    poisoned_memory,
    tolerance,
    torch_attention,
)

K_SCALE, V_SCALE = 0.5, 0.75
"""Factors of the first head of e4m3 caches."""
E4M3_NAN = 0x7F
"""Bits of a NaN in e4m3."""
LSE_TOLERANCE = 2e-3
MOST_BY_TORCH = 8
"""Requests of the cases that are compared with torch's attention."""
SPARE_PAGES = 3
"""Pages of no request."""


class Inputs(NamedTuple):
    """Tensors of a case.

    Attributes:
        q: (tokens, heads, head_dim).
        k: (pages, page_size, kv_heads, head_dim).
        v: as k.
        options: other arguments of the kernel.
        bounds: first token of each request, then the end of the last.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: dict[str, Any]
    bounds: list[int]


def inputs_of(case: PagedCase, spec: PagedAttentionSpec | AttentionSpec, device: torch.device) -> Inputs:
    """Random inputs of a case: the same ones every time."""
    draw, dtype, d = generator(case.name, device), TORCH_DTYPES[spec.dtype], spec.head_dim
    cache = TORCH_DTYPES["e4m3"] if spec.cache == "e4m3" else dtype
    batch, bounds = len(case.kv_lens), [case.before, *(case.before + end for end in accumulate(case.q_lens))]
    tokens = bounds[-1] + case.before

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=device)

    table = _table(case, draw, device) if case.page_size else None
    pages = batch if table is None else int(table.max()) + 1 + SPARE_PAGES
    size = case.page_size or max(*case.kv_lens, 1)
    k, v = _caches(case, (pages, size), d, cache, normal)
    options: dict[str, Any] = {"block_table": table, "seq_lens": _int32(case.kv_lens, device)}
    if case.packed:
        options["cu_seqlens_q"] = _int32(bounds, device)
    if case.entries:
        heads = case.kv_heads if case.head_lists else 1
        most = max(case.kv_lens) // case.entry_keys + 2  # some entries lie behind the last key
        shape = (heads, tokens, case.entries)
        options["lists"] = torch.randint(-1, most, shape, generator=draw, device=device, dtype=torch.int32)
        if case.repeated:
            half = case.entries // 2
            options["lists"][..., half : 2 * half] = options["lists"][..., :half]
        options["entry_keys"] = case.entry_keys
        if case.counted:
            options["counts"] = torch.randint(
                -1, case.entries + 2, shape[:2], generator=draw, device=device, dtype=torch.int32
            )
    if case.sinks:
        options["sink"] = 2 * normal(case.heads)
    if case.token_scales:
        for name in ("k_scale", "v_scale"):
            options[name] = 0.25 + torch.rand((pages, case.kv_heads, size), generator=draw, device=device).transpose(
                1, 2
            )
    elif spec.cache == "e4m3":
        number = case.kv_heads if case.packed else 1  # factors of heads, or one for all
        for name, scale in (("k_scale", K_SCALE), ("v_scale", V_SCALE)):
            options[name] = scale / (1 + torch.arange(number, device=device) / 4)
    left, right = (UNBOUNDED if bound is None else bound for bound in case.window)
    options |= {"window": Window(left, right, case.sink_keys), "softcap": case.softcap}
    options["batch_invariant"] = case.batch_invariant
    inputs = Inputs((case.spread * normal(tokens, case.heads, d)).to(dtype), k, v, options, bounds)
    if case.spoiled:
        _spoil(case, inputs)
    return inputs


def _caches(
    case: PagedCase, shape: tuple[int, int], d: int, dtype: torch.dtype, normal: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """K and V (pages, page_size, kv_heads, head_dim) in the layout of a case."""
    pages, size = shape
    if case.layout == "NHD":
        return tuple(normal(pages, size, case.kv_heads, d).to(dtype) for _ in "kv")
    if case.layout == "HND":
        return tuple(normal(pages, case.kv_heads, size, d).to(dtype).transpose(1, 2) for _ in "kv")
    rows = normal(pages, case.kv_heads, size, 2 * d).to(dtype).transpose(1, 2)
    return rows[..., :d], rows[..., d:]


def _spoil(case: PagedCase, inputs: Inputs) -> None:
    """Replace what no query sees by NaN, and its pages in the table by anything.

    Of each request, a page that queries see lies outside of the cache: nothing is there.
    """
    _, k, v, options, bounds = inputs
    table, size, number = options["block_table"], case.page_size, k.shape[0]
    seen = torch.zeros(k.shape[:3], dtype=torch.bool, device=k.device)
    columns = torch.zeros_like(table, dtype=torch.bool)
    for request, (first, end) in enumerate(pairwise(bounds)):
        if case.kv_lens[request] and end > first:
            page, row, _ = _places(case, inputs, request)
            mine = (_counts(case, inputs, request) > 0).any(1)  # (kv_heads, keys)
            seen[page, row] |= mine.T
            columns[request, mine.any(0).nonzero()[:, 0] // size] = True
    for tensor in (k, v):
        unseen = ~seen[..., None]
        if tensor.element_size() == 1:
            tensor.view(torch.uint8).masked_fill_(unseen, E4M3_NAN)
        else:
            tensor.masked_fill_(unseen, math.nan)
    if case.token_scales:
        for name in ("k_scale", "v_scale"):
            options[name].masked_fill_(~seen, math.nan)
    outside = (number, -1, 2**31 - 1, number - 1, -(2**31))  # number - 1: a page of NaN
    for request in range(len(case.kv_lens)):
        freed, used = (which.nonzero()[:, 0].tolist() for which in (~columns[request], columns[request]))
        for column in freed:
            table[request, column] = outside[(request + column) % len(outside)]
        if used:
            table[request, used[len(used) // 2]] = outside[request % 3]


def _int32(values: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def _table(case: PagedCase, draw: torch.Generator, device: torch.device) -> torch.Tensor:
    """Page tables: pages in any order, with one column more than any request needs."""
    counts = [-(-length // case.page_size) for length in case.kv_lens]
    total = max(counts) if case.shared else sum(counts)
    order = torch.randperm(max(total, 1), generator=draw, device=device).int()
    table = torch.full((len(counts), max(counts) + 1), UNSEEN_PAGE, dtype=torch.int32, device=device)
    first = 0
    for request, count in enumerate(counts):
        table[request, :count] = order[first : first + count]
        first += 0 if case.shared else count
    return table


def oracle(
    case: PagedCase, spec: PagedAttentionSpec | AttentionSpec, inputs: Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result (tokens, heads, head_dim) and the log-sum-exp (heads, tokens) in float64; NaN for other tokens."""
    q, k, v, options, bounds = inputs
    tokens, heads, d = q.shape
    out = torch.full(q.shape, math.nan, dtype=torch.float64, device=q.device)
    lse = torch.full((heads, tokens), math.nan, dtype=torch.float64, device=q.device)
    factors: tuple[Any, Any] = options.get("k_scale"), options.get("v_scale")
    for request, (first, end) in enumerate(pairwise(bounds)):
        length = case.kv_lens[request]
        if end == first:
            continue
        page, row, _ = _places(case, inputs, request)
        keys, values = (
            _scaled(tensor[page, row], factor[page, row] if case.token_scales else factor).transpose(0, 1)
            for tensor, factor in zip((k, v), factors, strict=True)
        )
        counts = _counts(case, inputs, request)  # (kv_heads, queries, keys)
        group = case.heads // case.kv_heads
        mine = q[first:end].double().unflatten(1, (case.kv_heads, group)).permute(1, 2, 0, 3)
        logits = mine @ keys.mT[:, None] / math.sqrt(d)
        if case.softcap is not None:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        logits = logits + counts.log()[:, None]
        if case.sinks:
            sink = options["sink"].double().view(case.kv_heads, group, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], -1)
        total = logits.logsumexp(-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -math.inf)
        weights = (logits - total.masked_fill(total == -math.inf, 0.0)[..., None]).exp()[..., :length]
        out[first:end] = (weights @ values[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
        lse[:, first:end] = total.flatten(0, 1)
    return out, lse


def _scaled(codes: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Rows of K or V (keys, kv_heads, head_dim) in float64; NaN counts as 0."""
    values = codes.double() if factor is None else codes.double() * factor[..., None].double()
    return values.nan_to_num(0.0)


def _places(case: PagedCase, inputs: Inputs, request: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Page and row of each key of a request, and whether the cache has the page; page 0 if it has not."""
    key, table = torch.arange(case.kv_lens[request], device=inputs.q.device), inputs.options["block_table"]
    if table is None:
        return torch.full_like(key, request), key, torch.ones_like(key, dtype=torch.bool)
    page = table[request, key // case.page_size].long()
    there = (page >= 0) & (page < inputs.k.shape[0])
    return page.where(there, 0), key % case.page_size, there


def _counts(case: PagedCase, inputs: Inputs, request: int) -> torch.Tensor:
    """How often each query of a request sees each key, float64 (kv_heads, queries, keys)."""
    device, options = inputs.q.device, inputs.options
    first, end = inputs.bounds[request : request + 2]
    length = case.kv_lens[request]
    position = torch.arange(length - (end - first), length, device=device)[:, None]
    key = torch.arange(length, device=device)
    left, right, sink = options["window"]
    _, _, there = _places(case, inputs, request)
    seen: torch.Tensor = ((key <= position + right) & ((key >= position - left) | (key < sink)) & there).double()
    if not case.entries:
        return seen.expand(case.kv_heads, -1, -1)
    lists = options["lists"][:, first:end].long()
    valid = lists >= 0
    if case.counted:
        valid &= torch.arange(case.entries, device=device) < options["counts"][:, first:end, None]
    listed = lists[..., None] * case.entry_keys + torch.arange(case.entry_keys, device=device)
    valid = (valid[..., None] & (listed < length)).flatten(2)
    listed = torch.where(valid, listed.flatten(2), length)
    found: torch.Tensor = seen.new_zeros((*lists.shape[:2], length + 1)).scatter_add_(2, listed, valid.double())[
        ..., :length
    ]
    return found.expand(case.kv_heads, -1, -1) * seen


def run_case(kernel: PagedAttentionKernel | PagedPrefillKernel, case: PagedCase, device: torch.device) -> Outcome:
    """Run one case twice in poisoned memory; the bits must agree. Tokens of no request must not be written."""
    spec = kernel.spec
    inputs = inputs_of(case, spec, device)
    q, k, v, options, bounds = inputs
    right, right_lse = oracle(case, spec, inputs)
    with poisoned_memory():
        out, lse = kernel(q, k, v, **options, return_lse=True)
        again, _ = kernel(q, k, v, **options)
    assert lse is not None
    inside = slice(bounds[0], bounds[-1])
    problems = [] if torch.equal(out[inside], again[inside]) else ["two runs differ"]
    if not all(part.isnan().all() for part in (out[: bounds[0]], out[bounds[-1] :])):
        problems.append("a token of no request was written")
    here, there = lse[:, inside].double(), right_lse[:, inside]
    off = torch.where(here == there, 0.0, (here - there).abs())  # both -inf
    if off.numel() and not float(off.max()) <= LSE_TOLERANCE:
        problems.append(f"the log-sum-exp is off by {float(off.max()):.3g}")
    error = max_error(out[inside], right[inside])
    by_torch = _torch_error(case, spec, inputs, right)
    limit = tolerance(spec.dtype, by_torch, float(right[inside].abs().max()))
    return Outcome(case.name, case.describe(), error, by_torch, limit, "; ".join(problems))


def _torch_error(
    case: PagedCase, spec: PagedAttentionSpec | AttentionSpec, inputs: Inputs, right: torch.Tensor
) -> float | None:
    """Largest error of torch's attention, request by request; None for calls that torch does not compute."""
    plain = not (case.entries or case.sinks or case.spoiled) and case.softcap is None and spec.cache == "same"
    if not plain or len(case.kv_lens) > MOST_BY_TORCH:
        return None
    q, k, v, _, bounds = inputs
    errors = [0.0]
    for request, (first, end) in enumerate(pairwise(bounds)):
        length = case.kv_lens[request]
        if end == first or not length:
            continue
        page, row, _ = _places(case, inputs, request)
        keys, values = (tensor[page, row].transpose(0, 1) for tensor in (k, v))
        mask = _counts(case, inputs, request)[0] > 0
        sees = mask.any(-1)
        queries = q[first:end].transpose(0, 1)
        found = torch_attention(queries[None], keys[None], values[None], mask, enable_gqa=True)[0].transpose(0, 1)
        errors.append(max_error(found[sees], right[first:end][sees]) if bool(sees.any()) else 0.0)
    return max(errors)


VERIFICATION = Verification(
    oracle="float64 softmax over the keys of each request, on the GPU, of the values in its pages",
    cases=lambda plan, spec: cases_of(spec),
    run_case=run_case,
)
PREFILL_VERIFICATION = Verification(
    oracle=VERIFICATION.oracle,
    cases=lambda plan, spec: prefill_cases(spec),
    run_case=run_case,
    random_cases=random_prefill_cases,
)
