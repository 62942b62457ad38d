"""What is checked on several ranks: each check is called on every rank, with the groups that it is in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import attention_oracle
import oracle_calls
import oracle_kernel
import pytest
import symmetric_files
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime import ArgumentError, CollectiveError
from runtime.distributed import (
    Layout,
    SendPlan,
    context_parallel_attention,
    head_parallel_attention,
    local_lists,
    plan_sends,
    shared_keys,
)
from runtime.distributed.agreement import state_of
from runtime.patterns import BlockLists, Causal, Dense, PrefixLM, SinkWindow, SlidingWindow, Strided, TopK, scored_of

LENGTH, BLOCK = 256, 32
BACKEND = "gloo"
SEND = SendPlan(((0, 1), (1, 0)), ((0, 1), (1, 0)), block=BLOCK, pairs=4, blocks=4)
CHECKS: dict[str, Callable[[Here], None]] = {}


@dataclass(frozen=True)
class Here:
    """The groups of a rank.

    Attributes:
        all: all four.
        pair: the first two; None on the others.
        late: the same two, of whom one will be late.
        short: the same two, with a time-out of two seconds.
        alone: this one.
    """

    all: Any
    pair: Any
    late: Any
    short: Any
    alone: Any


def here() -> Here:
    """Return the groups of a rank; kernels are by the definition from here on."""
    oracle_calls.install()
    symmetric_files.install()
    pairs = [dist.new_group([0, 1], timeout=timedelta(seconds=wait)) for wait in (60, 60, 2)]
    alone = dist.new_subgroups(1)[0]
    return Here(dist.group.WORLD, *(pairs if dist.get_rank() < 2 else [None] * 3), alone)


def check(function: Callable[[Here], None]) -> Callable[[Here], None]:
    """Check on all ranks."""
    CHECKS[function.__name__] = function
    return function


def check_two(function: Callable[[Here], None]) -> Callable[[Here], None]:
    """Check on the first two ranks; the others go on."""
    CHECKS[function.__name__] = lambda here: function(here) if here.pair else None
    return function


def whole(q_len: int = LENGTH, kv_len: int = LENGTH, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> list[Any]:
    """Return q, k and v of the whole sequence, the same on each rank."""
    made = torch.Generator().manual_seed(0)
    shapes = (2, heads, q_len, dim), (2, kv_heads, kv_len, dim), (2, kv_heads, kv_len, dim)
    return [torch.randn(shape, generator=made).bfloat16() for shape in shapes]


def lists(heads: int = 4, entries: int = 3, batch: int = 2, length: int = LENGTH) -> Any:
    """Return lists of the whole sequence, the same on each rank."""
    made = torch.Generator().manual_seed(1)
    blocks = length // BLOCK
    order = torch.rand(batch, heads, blocks, blocks, generator=made).argsort(-1)
    return order[..., :entries].to(torch.int32).contiguous()


def weights_of(q: Any) -> Any:
    return torch.randn(q.shape, generator=torch.Generator().manual_seed(2))


def definition(tensors: list[Any], pattern: Any, *, kv_lengths: Any = None, sink: Any = None, **options: Any) -> Any:
    """Return what is right for the whole sequence, by name: result, log-sum-exp and gradients of the loss."""
    q, k, v = tensors
    seen = oracle_calls.seen_by(q, k, pattern.index_tensors(), scored_of(pattern), kv_lengths)
    out, lse = attention_oracle.attention(q, k, v, seen, sink=sink, **options)
    weights = weights_of(q)
    dlse = torch.where(lse == -torch.inf, 0.0, weights[..., 0])
    found = attention_oracle.gradients(q, k, v, out, lse, weights, seen, dlse=dlse, **options)
    return {"out": out, "lse": lse, **found}


def loss(out: Any, lse: Any, weights: Any) -> Any:
    """Return a number that depends on all results."""
    return (out.float() * weights).sum() + (torch.where(lse == -torch.inf, 0.0, lse) * weights[..., 0]).sum()


def on_ranks(
    tensors: list[Any], pattern: Any, group: Any, where: Layout, *, by: Any = context_parallel_attention, **options: Any
) -> dict[str, Any]:
    """Return what this rank computes, by name."""
    rank = dist.get_rank(group)
    leaves = [where.shard(tensor, rank).requires_grad_() for tensor in tensors]
    out, lse = by(*leaves, pattern, group, return_lse=True, **options)
    loss(out, lse, where.shard(weights_of(tensors[0]), rank)).backward()
    found = {"out": out.detach(), "lse": lse.detach()}
    return found | {f"d{name}": leaf.grad for name, leaf in zip("qkv", leaves, strict=True)}


def compare(
    group: Any,
    pattern: Any,
    layout: Any = None,
    *,
    tensors: Any = None,
    local: Any = None,
    twice: bool = False,
    **options: Any,
) -> None:
    """Hold a call on the ranks of a group against the definition; ``twice``: the same call gives the same bits."""
    if group is None:
        return
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    where = layout
    if not isinstance(layout, Layout):
        where = getattr(Layout, layout or ("zigzag" if isinstance(pattern, Causal | PrefixLM) else "contiguous"))(ranks)
    tensors = whole() if tensors is None else tensors
    local = local_lists(pattern, where, rank) if local is None else local
    found = on_ranks(tensors, local, group, where, layout=layout, **options)
    of_one = {name: value for name, value in options.items() if name in ("scale", "softcap", "sink", "kv_lengths")}
    for name, right in definition(tensors, pattern, **of_one).items():
        close(name, found[name], where.shard(right, rank))
    again = on_ranks(tensors, local, group, where, layout=layout, **options) if twice else found
    assert all(torch.equal(found[name], again[name]) for name in found), "the same bits"


def close(name: str, found: Any, right: Any) -> None:
    """Hold values against right ones, by the largest."""
    limit = 2e-2 * max(1.0, float(right.nan_to_num(0, 0, 0).abs().max()))
    torch.testing.assert_close(found.float(), right.float(), atol=limit, rtol=2e-2, msg=lambda text: f"{name}: {text}")


@check
def dense(here: Here) -> None:
    compare(here.all, Dense())
    compare(here.pair, Dense(), "zigzag", heads_at_once=1, twice=True)


@check
def causal(here: Here) -> None:
    compare(here.all, Causal())
    compare(here.pair, Causal(), "contiguous", heads_at_once=1)
    compare(here.pair, Causal(), tensors=whole(128, 256))
    compare(here.pair, Causal(align="top_left"), tensors=whole(256, 128))
    compare(here.pair, Causal(), tensors=whole(256, 128))


@check
def windows(here: Here) -> None:
    compare(here.all, SlidingWindow(20))
    compare(here.all, SlidingWindow(150, 20))
    compare(here.pair, SlidingWindow(50, 30), "zigzag")
    compare(here.pair, SinkWindow(5, 60, 7))
    compare(here.pair, SinkWindow(5, 60), "zigzag")


@check
def prefixes(here: Here) -> None:
    compare(here.all, PrefixLM(torch.tensor([10, 200], dtype=torch.int32)))


@check_two
def strides(here: Here) -> None:
    compare(here.pair, Strided(stride=3, local=1, block=64))
    compare(here.pair, Strided(stride=3, local=1, block=64, causal=False))


@check
def block_lists(here: Here) -> None:
    compare(here.all, TopK(lists(), block=(BLOCK, BLOCK)), twice=True)
    compare(here.pair, TopK(lists(2), block=(BLOCK, BLOCK)), "zigzag", heads_at_once=1)
    compare(here.pair, TopK(lists(1, batch=1), block=(BLOCK, BLOCK)), Layout.balanced(list(range(8)), 2))


def near(layout: Layout, heads: int = 4, batch: int = 2) -> Any:
    """Return lists of the whole sequence: the own block, the one before it, and a drawn one where rows are even."""
    blocks = LENGTH // BLOCK
    own = torch.arange(blocks)[:, None]
    drawn = torch.randint(0, blocks, (batch, heads, blocks, 1), generator=torch.Generator().manual_seed(3))
    other = torch.where(own % 4 == 0, drawn, -1)
    every = torch.cat([own.expand(batch, heads, -1, -1), (own - 1).expand(batch, heads, -1, -1), other], -1)
    every = torch.where((every == own) & (torch.arange(3) > 0), -1, every).to(torch.int32)
    every[..., 2] = torch.where(every[..., 2] == every[..., 1], -1, every[..., 2])
    return every.take_along_dim((every < 0).to(torch.int32).argsort(dim=-1, stable=True), -1).contiguous()


@check
def lists_with_locality(here: Here) -> None:
    for group, layout, heads, batch in (
        (here.all, "contiguous", 4, 2),
        (here.pair, "contiguous", 2, 1),
        (here.pair, Layout.balanced([1.0, 5.0, 2.0, 2.0, 1.0, 1.0, 3.0, 1.0], 2), 1, 1),
    ):
        if group is None:
            continue
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        where = layout if isinstance(layout, Layout) else Layout.contiguous(ranks)
        pattern = TopK(near(where, heads, batch), block=(BLOCK, BLOCK))
        q, k, _ = (where.shard(tensor, rank) for tensor in whole())
        plan = plan_sends(q, k, local_lists(pattern, where, rank), group, layout=layout, most=1.1)
        assert plan.caps is not None and plan.caps[rank][rank] == 0
        traffic = plan.traffic(rank, 16)
        assert traffic.needed <= traffic.moved <= traffic.everything
        compare(group, pattern, layout, send=plan, validate=True, heads_at_once=1, twice=True)


@check_two
def lists_that_want_all_are_not_packed(here: Here) -> None:
    q, k, _ = (Layout.contiguous(2).shard(tensor, dist.get_rank(here.pair)) for tensor in whole())
    local = local_lists(TopK(lists(entries=7), block=(BLOCK, BLOCK)), Layout.contiguous(2), dist.get_rank(here.pair))
    plan = plan_sends(q, k, local, here.pair)
    assert plan.caps is None
    traffic = plan.traffic(0, 16)
    assert traffic.moved == traffic.everything == 2 * 2 * 2 * 128 * 16 * 2


def partial_lists(layout: Layout, mask: Any, aux: Any = None) -> BlockLists:
    """Return lists with blocks in part, and whole ones behind the diagonal and before it."""
    blocks = LENGTH // BLOCK
    own = torch.arange(blocks, dtype=torch.int32)[None, None, :, None]
    counts = torch.ones(1, 1, blocks, dtype=torch.int32)
    full = torch.where(own > 1, own - 2, blocks - 1)
    return BlockLists(counts, own.contiguous(), counts, full, block=(BLOCK, BLOCK), mask=mask, aux=aux)


@check_two
def masks(here: Here) -> None:
    where = Layout.contiguous(2)
    rank = dist.get_rank(here.pair)
    doc = torch.arange(LENGTH, dtype=torch.int32).div(50, rounding_mode="floor").expand(2, LENGTH).contiguous()
    text = "doc[batch, q_idx] == doc[batch, kv_idx] and q_idx + kv_len >= kv_idx + q_len"
    q, k, _ = (where.shard(tensor, rank) for tensor in whole())
    for mask, aux in (("causal", None), (text, {"doc": doc}), ("kv_idx % 2 == head % 2 or q_idx == kv_idx", None)):
        pattern = partial_lists(where, mask, aux)
        compare(here.pair, pattern)
        compare(here.pair, pattern, Layout.zigzag(2), heads_at_once=1)
        local = local_lists(pattern, where, rank)
        compare(here.pair, pattern, local=local, send=plan_sends(q, k, local, here.pair, most=1.1))
    bits = torch.randint(-(2**31), 2**31, (1, 1, LENGTH // BLOCK, 1, BLOCK), generator=torch.Generator().manual_seed(4))
    plain = partial_lists(where, "none")
    pattern = BlockLists(
        *(getattr(plain, name) for name in plain.tensors[:4]),
        block=plain.block,
        mask="bits",
        mask_bits=bits.to(torch.int32),
    )
    compare(here.pair, pattern, "zigzag")


@check_two
def block_masks(here: Here) -> None:
    """A mask of this rank's queries over all keys, as torch's context parallel has them."""
    from torch.nn.attention.flex_attention import create_block_mask

    rank, half = dist.get_rank(here.pair), LENGTH // 2
    local = create_block_mask(
        lambda b, h, q, k: q + rank * half >= k, None, None, half, LENGTH, device="cpu", BLOCK_SIZE=BLOCK
    )
    compare(here.pair, Causal(), "contiguous", local=local)


@check
def options(here: Here) -> None:
    lengths = torch.tensor([LENGTH, 77], dtype=torch.int32)
    compare(here.pair, Causal(), scale=0.4, softcap=5.0, kv_lengths=lengths)
    compare(here.all, SlidingWindow(40), kv_lengths=lengths)
    compare(here.pair, SinkWindow(5, 60), kv_lengths=lengths)
    compare(here.pair, TopK(lists(), block=(BLOCK, BLOCK)), kv_lengths=lengths, validate=True)
    compare(here.pair, PrefixLM(torch.tensor([10, 200], dtype=torch.int32)), kv_lengths=lengths)
    q, k, v = whole(kv_len=128)
    half = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v)]
    compare(here.pair, Dense(), tensors=half)


@check_two
def sinks(here: Here) -> None:
    """The gradients of sinks add up to that of the whole sequence."""
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    tensors = whole(256, 128)
    compare(here.pair, Causal(), tensors=tensors, sink=sink)
    where, rank = Layout.zigzag(2), dist.get_rank(here.pair)
    weights = weights_of(tensors[0])
    leaf = sink.clone().requires_grad_()
    here_q, here_k, here_v = (where.shard(tensor, rank) for tensor in tensors)
    out = context_parallel_attention(here_q, here_k, here_v, Causal(), here.pair, sink=leaf)
    (out.float() * where.shard(weights, rank)).sum().backward()
    dist.all_reduce(leaf.grad, group=here.pair)
    right = definition(tensors, Causal(), sink=sink)
    delta = (right["out"] * weights).sum(-1)
    expected = -((sink[:, None] - right["lse"]).exp() * delta).sum((0, 2))
    torch.testing.assert_close(leaf.grad, expected, atol=3e-2, rtol=3e-2)


def refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """Hold a call to an error that says something."""
    try:
        call()
    except error as found:
        assert text in str(found), str(found)
    else:
        raise AssertionError(f"no {error.__name__}: {text}")


@check_two
def refusals(here: Here) -> None:
    """What all ranks do wrong is refused on each, before anything is sent."""
    q, k, v = (Layout.contiguous(2).shard(tensor, 0) for tensor in whole())
    call = context_parallel_attention
    short = [tensor[:, :, :99] for tensor in (q, k, v)]
    refused(ArgumentError, "q: has 99 rows", lambda: call(*short, Causal(), here.pair))
    refused(
        ArgumentError,
        "expected a multiple of the block size 96",
        lambda: call(q, k, v, TopK(lists()[:, :, :4], block=(96, 96)), here.pair),
    )
    refused(
        ArgumentError,
        "has lists of 8 query blocks",
        lambda: call(q, k, v, TopK(lists(), block=(BLOCK, BLOCK)), here.pair),
    )
    refused(ArgumentError, "layout: is 'ring'", lambda: call(q, k, v, Dense(), here.pair, layout="ring"))
    refused(ArgumentError, "layout: has 3 ranks", lambda: call(q, k, v, Dense(), here.pair, layout=Layout.zigzag(3)))
    lengths = torch.tensor([9], dtype=torch.int32)
    fine, few = Layout(((0, 2, 4, 6), (1, 3, 5, 7))), TopK(lists()[:, :, :4].contiguous(), block=(BLOCK, BLOCK))
    for wrong in ({"layout": fine}, {"send": SEND}):
        refused(
            ArgumentError, "kv_lengths: are", lambda w=wrong: call(q, k, v, few, here.pair, kv_lengths=lengths, **w)
        )
    many = torch.tensor([LENGTH + 1], dtype=torch.int32)
    refused(ArgumentError, "kv_lengths", lambda: call(q, k, v, Dense(), here.pair, kv_lengths=many, validate=True))
    refused(ArgumentError, "mesh_or_group: is NoneType", lambda: call(q, k, v, Dense()))
    refused(ArgumentError, "mesh_or_group: has one rank", lambda: call(q, k, v, Dense(), here.alone))
    refused(ArgumentError, "k: is torch.float16", lambda: call(q, k.half(), v, Dense(), here.pair))
    plan = plan_sends(q, k, TopK(near(Layout.contiguous(2))[:, :, :4], block=(BLOCK, BLOCK)), here.pair)
    refused(ArgumentError, "send: was made for lists", lambda: call(q, k, v, Dense(), here.pair, send=plan))
    beyond = TopK(torch.full((1, 1, 4, 1), 8, dtype=torch.int32), block=(BLOCK, BLOCK))
    refused(ArgumentError, "kv_indices", lambda: call(q, k, v, beyond, here.pair, validate=True))


@check_two
def differences(here: Here) -> None:
    """What ranks do not do alike is an error on all of them."""
    rank = dist.get_rank(here.pair)
    q, k, v = (Layout.contiguous(2).shard(tensor, rank) for tensor in whole())
    call = context_parallel_attention
    more = [tensor[:, :, : 64 * (rank + 1)] for tensor in (q, k, v)]
    refused(ArgumentError, "q: is (2, 4, 64, 16)", lambda: call(*more, Dense(), here.pair))
    halves = [tensor.to([torch.bfloat16, torch.float16][rank]) for tensor in (q, k, v)]
    refused(ArgumentError, "on rank 1", lambda: call(*halves, Dense(), here.pair))
    refused(ArgumentError, "pattern: is", lambda: call(q, k, v, [Dense(), Causal()][rank], here.pair, layout="zigzag"))
    refused(
        ArgumentError, "layout: is", lambda: call(q, k, v, Dense(), here.pair, layout=["zigzag", "contiguous"][rank])
    )
    k_here, text = [k, k.half()][rank], ["rank 1: k: is torch.float16", "k: is"][rank]
    error = [CollectiveError, ArgumentError][rank]
    refused(error, text, lambda: call(q, k_here, v, Dense(), here.pair, scale=0.125))
    entry = torch.full((1, 1, 4, 1), [7, 8][rank], dtype=torch.int32)
    beyond = TopK(entry, block=(BLOCK, BLOCK))
    text = ["rank 1: kv_indices", "kv_indices"][rank]
    refused(
        CollectiveError if rank == 0 else ArgumentError, text, lambda: call(q, k, v, beyond, here.pair, validate=True)
    )


@check_two
def errors_that_are_caught(here: Here) -> None:
    """What one rank refuses and then does right shifts no call: each has data of its own."""
    group, rank, where = (
        dist.new_group([0, 1], use_local_synchronization=True),
        dist.get_rank(here.pair),
        Layout.contiguous(2),
    )

    def call(number: int, pattern: Any = None, **options: Any) -> None:
        tensors = [tensor * (1 + number / 8) for tensor in whole()]
        parts = [where.shard(tensor, rank) for tensor in tensors]
        pattern = Dense() if pattern is None else pattern
        options = {"timeout": 5, **options}
        found = context_parallel_attention(*parts, pattern, group, layout="contiguous", **options)
        close(f"call {number}", found, where.shard(definition(tensors, pattern)["out"], rank))

    def wrong(**options: Any) -> None:
        refused(ArgumentError, "scale", lambda: call(0, scale="x", **options))

    call(1)
    if rank == 1:  # of a known kind: the other one waits for the data
        wrong(), wrong()
    call(2)
    call(3, Causal())  # of a new kind: nobody hears of what was mended
    if rank == 1:
        wrong()
        refused(CollectiveError, "rank 0: no message within 0.3 s", lambda: call(4, validate=True, timeout=0.3))
    call(4)
    call(5, SlidingWindow(9), validate=True)
    if rank == 1:  # of a new kind: it is one call to both
        wrong()
    else:
        refused(CollectiveError, "rank 1: scale: is str", lambda: call(6, SlidingWindow(30)))
    call(7, SlidingWindow(30))
    wrong()  # on both
    call(8, SlidingWindow(31))
    assert state_of(group).attempts == 1 and len(state_of(group).written) == 2  # of the end of the first call of a kind
    leaves = [where.shard(tensor, rank).requires_grad_() for tensor in whole()]
    options: dict[str, Any] = {"layout": "contiguous", "timeout": 5, "return_lse": True}
    out, lse = context_parallel_attention(*leaves, Causal(), group, **options)
    if rank == 1:  # before the first pass of gradients of a kind, which ranks end together
        wrong(), wrong()
    loss(out, lse, where.shard(weights_of(whole()[0]), rank)).backward()
    right = definition(whole(), Causal())
    for name, leaf in zip("qkv", leaves, strict=True):
        close(f"d{name}", leaf.grad, where.shard(right[f"d{name}"], rank))
    call(9)


@check_two
def lists_beyond_a_plan(here: Here) -> None:
    rank = dist.get_rank(here.pair)
    q, k, v = (Layout.contiguous(2).shard(tensor, rank) for tensor in whole())
    few = TopK(torch.full((1, 1, 4, 1), [4, 0][rank], dtype=torch.int32), block=(BLOCK, BLOCK))
    plan = plan_sends(q, k, few, here.pair, slack=2)
    assert plan.caps == ((0, 2), (2, 0)) and plan.wanted == ((0, 4), (4, 0))
    more = TopK(torch.arange(3, dtype=torch.int32).expand(1, 1, 4, 3).contiguous() + 4 - 4 * rank, block=(BLOCK, BLOCK))
    refused(
        ArgumentError,
        "too little room",
        lambda: context_parallel_attention(q, k, v, more, here.pair, send=plan, validate=True),
    )
    one = more if rank == 1 else few  # of one rank alone: the other one hears of it, and the next call is right
    error, text = [(CollectiveError, "rank 1: send: has too little room"), (ArgumentError, "too little room")][rank]
    for validate in (False, True):
        refused(
            error,
            text,
            lambda v_=validate: context_parallel_attention(q, k, v, one, here.pair, send=plan, validate=v_),
        )
        context_parallel_attention(q, k, v, few, here.pair, send=plan, validate=validate)


@check_two
def late_ranks(here: Here) -> None:
    """Whoever waits learns who is late, and so does the late one."""
    rank = dist.get_rank(here.pair)
    q, k, v = (Layout.contiguous(2).shard(tensor, rank) for tensor in whole())
    waiting = torch.zeros(1)
    began = time.monotonic()
    if rank == 1:
        dist.recv(waiting, group=here.pair, group_src=0)  # comes when rank 0 has given up

    def call() -> Any:
        return context_parallel_attention(q, k, v, Dense(), here.late, timeout=0.3)

    refused(CollectiveError, "agreement on context_parallel_attention: rank 1: no message within 0.3 s", call)
    if rank == 0:
        dist.send(waiting, group=here.pair, group_dst=1)
    assert time.monotonic() - began < 60


@check_two
def ranks_that_stop(here: Here) -> None:
    """Data that does not come is an error with the rank and what was on its way, by the time-out of the group."""
    rank = dist.get_rank(here.pair)
    q, k, v = (Layout.contiguous(2).shard(tensor, rank) for tensor in whole())
    group = here.short
    context_parallel_attention(q, k, v, Dense(), group)
    if rank == 0:
        text = "keys and values of heads 0 to 1 of rank 0: rank 1: late or failed"
        refused(CollectiveError, text, lambda: context_parallel_attention(q, k, v, Dense(), group))
    dist.barrier(here.pair)


@check_two
def dtensors(here: Here) -> None:
    """Results are placed as q is; what attention cannot keep is refused."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(here.pair, "cpu")
    call = context_parallel_attention
    tensors = whole()
    right = definition(tensors, Causal())
    for placement in (Shard(2), Shard(1)):
        if placement == Shard(1):
            oracle_kernel.install(pytest.MonkeyPatch())  # a rank's heads are a call without others
        parts = [distribute_tensor(tensor, mesh, [placement]).requires_grad_() for tensor in tensors]
        out, lse = call(*parts, Causal(), return_lse=True)
        assert isinstance(out, DTensor) and out.placements == lse.placements == (placement,)
        loss(out.full_tensor(), lse.full_tensor(), weights_of(tensors[0])).backward()
        found = {"out": out, "lse": lse, "dq": parts[0].grad, "dk": parts[1].grad, "dv": parts[2].grad}
        for name, each in found.items():
            close(name, each.full_tensor().detach(), right[name])
    whole_everywhere = [distribute_tensor(tensor, mesh, [Replicate()]) for tensor in tensors]
    refused(ArgumentError, "q: has placements (Replicate(),)", lambda: call(*whole_everywhere, Causal()))
    by_dim = [distribute_tensor(tensor, mesh, [Shard(3)]) for tensor in tensors]
    refused(ArgumentError, "q: has placements (Shard(dim=3),)", lambda: call(*by_dim, Causal()))
    mixed = [parts[0], distribute_tensor(tensors[1], mesh, [Shard(2)]), parts[2]]
    refused(ArgumentError, "k: has placements (Shard(dim=2),)", lambda: call(*mixed, Causal()))
    refused(
        ArgumentError, "k: is Tensor, but others are DTensors", lambda: call(parts[0], tensors[1], parts[2], Causal())
    )


@check
def dtensors_of_two_dimensions(here: Here) -> None:
    """Heads and the sequence are sharded; the mesh is named by its dimension, and sinks are those of all heads."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("tp", "cp"))
    sink, tensors = torch.tensor([0.5, -1.0, 2.0, 0.0]), whole()
    right = definition(tensors, Causal(), sink=sink)["out"]
    parts = [distribute_tensor(tensor, mesh, [Shard(1), Shard(2)]) for tensor in tensors]
    own = sink.narrow(0, 2 * mesh.get_local_rank("tp"), 2)
    for where in (None, mesh, mesh["cp"], mesh.get_group("cp")):
        for given in (sink, own):
            out = context_parallel_attention(*parts, Causal(), where, sink=given)
            close("out", out.full_tensor(), right)
    refused(
        ArgumentError,
        "mesh_or_group: differs from",
        lambda: context_parallel_attention(*parts, Causal(), mesh["tp"]),
    )


@check_two
def compiled_models(here: Here) -> None:
    """The operators stay in one graph, with gradients."""
    where, rank = Layout.zigzag(2), dist.get_rank(here.pair)
    group = here.pair

    lists_here = local_lists(TopK(near(where, 1, 1), block=(BLOCK, BLOCK)), where, rank)

    plan = plan_sends(*(where.shard(tensor, rank) for tensor in whole()[:2]), lists_here, group, layout=where, most=1.1)

    def model(q: Any, k: Any, v: Any) -> Any:
        out = context_parallel_attention(q * 2, k, v, Causal(), group) + 1
        out = context_parallel_attention(out, k, v, lists_here, group, layout=where, send=plan)
        return head_parallel_attention(out, k, v, SlidingWindow(9), group, layout="zigzag")

    tensors = [where.shard(tensor, rank).requires_grad_() for tensor in whole()]
    expected = model(*tensors)
    right = torch.autograd.grad(expected.float().square().sum(), tensors)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(*tensors)
    found = torch.autograd.grad(out.float().square().sum(), tensors)
    assert torch.equal(out, expected) and all(map(torch.equal, found, right))


@check
def heads(here: Here) -> None:
    """Each rank computes some of the heads, over the whole sequence."""
    by = {"by": head_parallel_attention, "layout": "contiguous"}
    lengths = torch.tensor([LENGTH, 77], dtype=torch.int32)
    four = whole(heads=8, kv_heads=4)
    compare(here.all, Causal(), tensors=four, twice=True, **by)
    q, k, v = (Layout.contiguous(4).shard(tensor, 0) for tensor in whole())
    refused(ArgumentError, "k: has 2 heads", lambda: head_parallel_attention(q, k, v, Dense(), here.all))
    if here.pair is None:
        return
    compare(here.pair, Dense(), tensors=four, by=head_parallel_attention, layout="zigzag", heads_at_once=1)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    compare(here.pair, SlidingWindow(40), softcap=5.0, kv_lengths=lengths, sink=sink, **by)
    every = lists(4)
    half = slice(2 * dist.get_rank(here.pair), 2 * dist.get_rank(here.pair) + 2)
    pattern, local = (TopK(each, block=(BLOCK, BLOCK)) for each in (every, every[:, half].contiguous()))
    compare(here.pair, pattern, local=local, validate=True, **by)
    transposed = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in whole()]
    compare(here.pair, Causal(), tensors=transposed, **by)


@check
def symmetric_memory(here: Here) -> None:
    """Peers read keys and write gradients where they lie."""
    compare(here.all, Dense(), symmetric=True, heads_at_once=1, twice=True)
    compare(here.all, Causal(), symmetric=True, twice=True)
    compare(here.pair, Causal(), "contiguous", symmetric=True)
    compare(here.pair, TopK(lists(), block=(BLOCK, BLOCK)), "zigzag", symmetric=True, heads_at_once=1)
    assert {what for what, *_ in state_of(here.all).memory} == {"keys", "gradients"}
    by: dict[str, Any] = {"by": head_parallel_attention, "symmetric": True}
    compare(here.all, Causal(), "zigzag", tensors=whole(heads=8, kv_heads=4), twice=True, **by)
    compare(here.pair, Dense(), "contiguous", tensors=whole(heads=8, kv_heads=4), heads_at_once=1, **by)


@check
def rows_from_outboxes(here: Here) -> None:
    """Where others need less than everything, peers read that alone, and write gradients of it back."""
    compare(here.all, SlidingWindow(40), symmetric=True, twice=True)
    compare(here.pair, SlidingWindow(40, 9), "zigzag", symmetric=True)
    compare(here.all, SinkWindow(5, 60, 7), symmetric=True, twice=True)
    for group in (here.all, here.pair):
        if group is not None:
            where, rank = Layout.contiguous(dist.get_world_size(group)), dist.get_rank(group)
            pattern = TopK(near(where), block=(BLOCK, BLOCK))
            q, k, _ = (where.shard(tensor, rank) for tensor in whole())
            plan = plan_sends(q, k, local_lists(pattern, where, rank), group, layout=where, most=1.1)
            assert plan.caps is not None
            for heads in (0, 1):
                compare(group, pattern, where, send=plan, symmetric=True, heads_at_once=heads, twice=True)
    assert {what for what, *_ in state_of(here.all).memory} >= {"rows", "gradients of rows"}


@check_two
def keys_in_shared_memory(here: Here) -> None:
    where, rank = Layout.contiguous(2), dist.get_rank(here.pair)
    q, k, v = (where.shard(tensor, rank) for tensor in whole())
    shared_k, shared_v = shared_keys(k, here.pair)
    for scale in (1, 2, 3):
        shared_k.copy_(k * scale)
        shared_v.copy_(v * scale)
        found = context_parallel_attention(q, shared_k, shared_v, Dense(), here.pair, symmetric=True)
        assert torch.equal(found, context_parallel_attention(q, k * scale, v * scale, Dense(), here.pair))
    q.requires_grad_()
    call = context_parallel_attention
    refused(
        ArgumentError, "k: is from shared_keys", lambda: call(q, shared_k, shared_v, Dense(), here.pair, symmetric=True)
    )
