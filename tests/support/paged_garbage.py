"""Calls over pages whose tables, lengths, bounds and lists hold anything, and what is right for them.

What is promised: a kernel reads and writes nothing outside its tensors, and ends. A length is the nearest one that the
pages have room for, and a bound the nearest token; a page that the cache does not have hides its keys; an entry that is
negative or behind the last key is absent, and of a count the nearest that a list has entries for is taken.
"""

from __future__ import annotations

import math
from typing import Any

import torch

INT32 = torch.iinfo(torch.int32)
PAGES, PAGE, KV_HEADS, ENTRIES = 9, 16, 2, 6
GROUP = 3  # query heads of a K/V head, unless a kernel packs others
LENGTHS, QUERIES = (40, 1, 64, 17), (1, 2, 3, 0)
MOST_PAGES = 4


def is_over_pages(spec: Any) -> bool:
    """Whether K and V of a spec's kernels are pages."""
    return spec.op == "paged_attention" or (spec.op == "attention" and spec.layout == "paged")


def anything(shape: tuple[int, ...], most: int, draw: torch.Generator, valid: float) -> torch.Tensor:
    """int32 values: a part from 0 to ``most`` - 1, the others next to these, at an end of the type, or anywhere."""
    extremes = torch.tensor([INT32.min, INT32.min + 1, -2, -1, most, most + 1, 1 << 16, 1 << 25, INT32.max])
    other = extremes[torch.randint(0, len(extremes), shape, generator=draw)]
    wild = torch.randint(INT32.min, INT32.max, shape, generator=draw)
    odd = torch.where(torch.rand(shape, generator=draw) < 0.5, other, wild)
    right = torch.randint(0, most, shape, generator=draw)
    return torch.where(torch.rand(shape, generator=draw) < valid, right, odd).int()


def drawn_call(
    seed: int, dtype: torch.dtype, cache: torch.dtype, d: int, *, lists: bool, bounds: bool = False, group: int = GROUP
) -> dict[str, Any]:
    """Arguments of a kernel object's call on the CPU.

    Args:
        seed: of what is drawn.
        dtype: of q.
        cache: type of K and V.
        d: elements per head.
        lists: whether each query has a list.
        bounds: whether bounds hold anything; they rise otherwise, within the tokens or not.
        group: query heads of a K/V head.
    """
    draw = torch.Generator().manual_seed(seed)
    batch, tokens = len(LENGTHS), sum(QUERIES)
    ends = torch.tensor([0, *QUERIES]).cumsum(0).int()
    if seed % 3 == 1:  # clamped to the tokens
        ends[0], ends[-1] = -5, tokens + 1000
    given: dict[str, Any] = {"q": torch.randn(tokens, KV_HEADS * group, d, generator=draw).to(dtype)}
    for name in ("k_cache", "v_cache"):
        given[name] = torch.randn(PAGES, PAGE, KV_HEADS, d, generator=draw).to(cache)
    given["block_table"] = anything((batch, MOST_PAGES), PAGES, draw, 0.7)
    given["seq_lens"] = anything((batch,), MOST_PAGES * PAGE + 1, draw, 0.6)
    given["cu_seqlens_q"] = anything((batch + 1,), tokens + 1, draw, 0.5) if bounds else ends
    if lists:
        given["lists"] = anything((KV_HEADS, tokens, ENTRIES), MOST_PAGES * PAGE // 4, draw, 0.6)
        given["counts"] = anything((KV_HEADS, tokens), ENTRIES + 1, draw, 0.6)
        given["entry_keys"] = 4
    return given


def expected(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the log-sum-exp in float64 for rising bounds; NaN for tokens of no request."""
    q, k, v = (given[name].cpu().double() for name in ("q", "k_cache", "v_cache"))
    tokens, heads, d = q.shape
    group, softcap, sinks = heads // KV_HEADS, given.get("softcap"), given.get("sink")
    table, lengths, bounds = (given[name].tolist() for name in ("block_table", "seq_lens", "cu_seqlens_q"))
    out = torch.full(q.shape, math.nan, dtype=torch.float64)
    lse = torch.full((heads, tokens), math.nan, dtype=torch.float64)
    for request, row in enumerate(table):
        begin, end = (min(max(bounds[request + i], 0), tokens) for i in (0, 1))
        length = min(max(lengths[request], 0), MOST_PAGES * PAGE)
        for token in range(begin, end):
            position = length - (end - begin) + token - begin
            for head in range(heads):
                keys = [key for key in _listed(given, head // group, token, length) if key <= position]
                places = [(row[key // PAGE], key % PAGE) for key in keys if 0 <= row[key // PAGE] < PAGES]
                page, place = [page for page, _ in places], [place for _, place in places]
                logits = k[page, place, head // group] @ q[token, head] / math.sqrt(d)
                logits = logits if softcap is None else softcap * (logits / softcap).tanh()
                hidden = [] if sinks is None else [float(sinks[head])]
                total = torch.cat([logits, logits.new_tensor(hidden)]).logsumexp(0)
                lse[head, token] = total if places or hidden else -math.inf
                out[token, head] = (logits - total).exp() @ v[page, place, head // group] if places else 0.0
    return out, lse


def _listed(given: dict[str, Any], head: int, token: int, length: int) -> list[int]:
    """Keys of a list, or all; a repeated entry counts as often as it is there."""
    if "lists" not in given:
        return list(range(length))
    count = min(max(int(given["counts"][head, token]), 0), ENTRIES)
    entries = [entry for entry in given["lists"][head, token, :count].tolist() if entry >= 0]
    keys = [entry * given["entry_keys"] + i for entry in entries for i in range(given["entry_keys"])]
    return [key for key in keys if key < length]


def check(kernel: Any, seed: int, device: str = "cpu") -> None:
    """Call a kernel, and compare its result; the memory around that must stay as it was.

    Args:
        kernel: a kernel object.
        seed: of the call.
        device: of its tensors.
    """
    dtype, bounds = kernel._dtype, seed % 4 == 3
    decodes = kernel.spec.op == "paged_attention"
    cache = torch.float8_e4m3fn if kernel.spec.cache == "e4m3" else dtype
    group = GROUP if decodes or kernel.spec.pack_gqa == 1 else kernel.spec.pack_gqa
    lists = decodes and seed % 2 == 0
    drawn = drawn_call(seed, dtype, cache, kernel.spec.head_dim, lists=lists, bounds=bounds, group=group)
    if not decodes:
        drawn["softcap"] = kernel.spec.softcap
        drawn["sink"] = torch.randn(KV_HEADS * group) if kernel.spec.sink else None
    given = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in drawn.items()}
    q = given["q"]
    around = torch.full((q.shape[0] + 8, *q.shape[1:]), float("nan"), dtype=dtype, device=device)
    out = around[4:-4]
    _, lse = kernel(**given, out=out, return_lse=True, batch_invariant=seed % 5 == 4)
    assert around[:4].isnan().all() and around[-4:].isnan().all()
    if bounds:  # several requests may write a token
        return
    right, right_lse = expected(drawn)
    torch.testing.assert_close(out.double().cpu(), right, atol=1e-2, rtol=1e-2, equal_nan=True, msg=str(seed))
    inside = ~right_lse.isnan()
    torch.testing.assert_close(lse.double().cpu()[inside], right_lse[inside], atol=2e-3, rtol=1e-3, msg=str(seed))
