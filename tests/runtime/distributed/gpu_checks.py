"""What is checked on two GPUs or more: calls over ranks beside the same call on one GPU that has everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from runtime import ArgumentError, CollectiveError, block_sparse_attention
from runtime.distributed import (
    Layout,
    context_parallel_attention,
    head_parallel_attention,
    local_lists,
    plan_sends,
    shared_keys,
)
from runtime.patterns import BlockLists, Causal, Dense, PrefixLM, SinkWindow, SlidingWindow, Strided, TopK

BACKEND = "nccl"
CHECKS: dict[str, Callable[[Any], None]] = {}
LENGTH, BLOCK, DIM = 4096, 128, 128


def here() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def check(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CHECKS[function.__name__] = function
    return function


def whole(length: int = LENGTH, heads: int = 4, kv_heads: int = 2, batch: int = 2, dtype: Any = torch.bfloat16) -> Any:
    """Return q, k and v of the whole sequence, the same on each rank."""
    made = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(batch, count, length, DIM, generator=made, device="cuda").to(dtype)
        for count in (heads, kv_heads, kv_heads)
    ]


def lists(heads: int = 4, entries: int = 6, batch: int = 2, length: int = LENGTH) -> Any:
    """Return lists of the whole sequence, the same on each rank."""
    made = torch.Generator("cuda").manual_seed(1)
    blocks = length // BLOCK
    order = torch.rand(batch, heads, blocks, blocks, generator=made, device="cuda").argsort(-1)
    return order[..., :entries].to(torch.int32).contiguous()


def near(heads: int = 4, batch: int = 2, length: int = LENGTH) -> Any:
    """Return lists of the whole sequence: the own block and three before it, and a drawn one of every fourth row."""
    made = torch.Generator("cuda").manual_seed(2)
    blocks = length // BLOCK
    own = torch.arange(blocks, device="cuda")[:, None]
    window = (own - torch.arange(4, device="cuda")).expand(batch, heads, -1, -1)
    drawn = torch.randint(0, blocks, (batch, heads, blocks, 1), generator=made, device="cuda")
    drawn = torch.where((own % 4 == 0) & ((drawn > own) | (drawn < own - 3)), drawn, -1)
    every = torch.cat([window, drawn], -1).clamp(min=-1)
    order = (every < 0).to(torch.int32).argsort(dim=-1, stable=True)
    return every.take_along_dim(order, -1).to(torch.int32).contiguous()


def results(call: Callable[..., Any], tensors: list[Any], weights: Any) -> dict[str, Any]:
    """Return result, log-sum-exp and gradients of a loss that both are in."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out, lse = call(*leaves)
    ((out.float() * weights).sum() + (torch.where(lse == -torch.inf, 0.0, lse) * weights[..., 0]).sum()).backward()
    found = {"out": out.detach(), "lse": lse.detach()}
    return found | {f"d{name}": leaf.grad for name, leaf in zip("qkv", leaves, strict=True)}


def compare(
    group: Any,
    pattern: Any,
    layout: str | Layout = "contiguous",
    *,
    tensors: Any = None,
    local: Any = None,
    by: Any = context_parallel_attention,
    **options: Any,
) -> None:
    """Hold a call on the ranks against one GPU with everything; the same call gives the same bits."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    where = layout if isinstance(layout, Layout) else getattr(Layout, layout)(ranks)
    tensors = whole() if tensors is None else tensors
    weights = torch.randn(tensors[0].shape, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    of_one = {name: value for name, value in options.items() if name in ("scale", "softcap", "sink", "kv_lengths")}
    right = results(lambda *t: block_sparse_attention(*t, pattern, return_lse=True, **of_one), tensors, weights)
    local = local_lists(pattern, where, rank) if local is None else local
    parts = [where.shard(tensor, rank) for tensor in tensors]
    mine = where.shard(weights, rank)

    def again() -> dict[str, Any]:
        return results(
            lambda *t: by(*t, local, group, layout=layout, return_lse=True, **options),
            parts,
            mine,
        )

    found = again()
    for name, value in found.items():
        expected = where.shard(right[name], rank).float()
        limit = 1.6e-2 * max(1.0, float(expected.nan_to_num(0, 0, 0).abs().max()))
        torch.testing.assert_close(value.float(), expected, atol=limit, rtol=1.6e-2, msg=lambda m, n=name: f"{n}: {m}")
    for _ in range(3):
        assert all(torch.equal(value, found[name]) for name, value in again().items()), "the same bits"


@check
def dense_and_causal(group: Any) -> None:
    compare(group, Dense())
    compare(group, Dense(), "zigzag", heads_at_once=1)
    compare(group, Causal(), "zigzag")
    compare(group, Causal(), "contiguous", tensors=whole(dtype=torch.float16))


@check
def windows(group: Any) -> None:
    compare(group, SlidingWindow(300))
    compare(group, SlidingWindow(100, 50), "zigzag")
    compare(group, SinkWindow(4, 300))


@check
def prefixes(group: Any) -> None:
    compare(group, PrefixLM(torch.tensor([100, LENGTH - 7], dtype=torch.int32, device="cuda")), "zigzag")


@check
def block_lists(group: Any) -> None:
    compare(group, TopK(lists()))
    compare(group, TopK(lists(2)), "zigzag")
    compare(group, TopK(lists(1, batch=1)), heads_at_once=1)


@check
def lists_with_locality(group: Any) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    work = (near() >= 0).sum(-1)
    for where in (Layout.contiguous(ranks), Layout.balanced(work, ranks)):
        pattern = TopK(near())
        q, k, _ = (where.shard(tensor, rank) for tensor in whole())
        plan = plan_sends(q, k, local_lists(pattern, where, rank), group, layout=where, most=1.1)
        assert plan.caps is not None
        compare(group, pattern, where, send=plan)
        compare(group, pattern, where, send=plan, validate=True, heads_at_once=1)
        compare(group, pattern, where, send=plan, symmetric=True)
        compare(group, pattern, where, send=plan, symmetric=True, heads_at_once=1)


@check
def symmetric_memory(group: Any) -> None:
    """Peers' memory is read: the result has the bits of NCCL's, also where keys are in that memory already."""
    where, rank = Layout.contiguous(dist.get_world_size(group)), dist.get_rank(group)
    compare(group, Dense(), symmetric=True)
    compare(group, Causal(), "zigzag", symmetric=True, heads_at_once=1)
    compare(group, TopK(lists()), symmetric=True)
    compare(group, SlidingWindow(300), symmetric=True)
    compare(group, SinkWindow(4, 300), symmetric=True)
    q, k, v = (where.shard(tensor, rank) for tensor in whole())
    local = local_lists(TopK(lists()), where, rank)
    expected = context_parallel_attention(q, k, v, local, group)
    shared_k, shared_v = shared_keys(k, group)
    for scale in (1.0, 2.0, 3.0):
        shared_k.copy_(k * scale), shared_v.copy_(v)
        found = context_parallel_attention(q, shared_k, shared_v, local, group, symmetric=True, scale=DIM**-0.5 / scale)
        torch.testing.assert_close(found, expected, atol=1.6e-2, rtol=1.6e-2)
    try:
        context_parallel_attention(q.requires_grad_(), shared_k, shared_v, local, group, symmetric=True)
    except ArgumentError as error:
        assert "shared_keys" in str(error)
    else:
        raise AssertionError("gradients with shared keys")


@check
def symmetric_memory_of_busy_gpus(group: Any) -> None:
    """Memory is made while one GPU is far behind: what the other one has signalled by then is not cleared."""
    rank, cycles = dist.get_rank(group), 1 << 29  # some 0.3 s
    where = Layout.contiguous(dist.get_world_size(group))
    for length, late in ((LENGTH // 2, 0), (LENGTH // 4, 1)):  # memory of other shapes than that of other checks
        q, k, v = (where.shard(tensor, rank).requires_grad_() for tensor in whole(length))
        torch.cuda._sleep(cycles if rank == late else 1)
        out = context_parallel_attention(q, k, v, Dense(), group, symmetric=True)
        torch.cuda._sleep(cycles if rank == late else 1)
        out.float().sum().backward()
        torch.cuda.synchronize()
        compare(group, Dense(), tensors=whole(length), symmetric=True)


@check
def masks(group: Any) -> None:
    """Masks that ask where a key is, as causal lists and ``Strided`` have them."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    blocks = LENGTH // BLOCK
    own = torch.arange(blocks, dtype=torch.int32, device="cuda")[None, None, :, None].contiguous()
    counts = torch.ones(1, 1, blocks, dtype=torch.int32, device="cuda")
    pattern = BlockLists(counts, own, (own[..., 0] > 1).to(torch.int32), (own - 2).clamp(min=0), mask="causal")
    compare(group, pattern)
    compare(group, pattern, "zigzag")
    where = Layout.contiguous(ranks)
    q, k, _ = (where.shard(tensor, rank) for tensor in whole())
    plan = plan_sends(q, k, local_lists(pattern, where, rank), group, most=1.1)
    compare(group, pattern, send=plan)
    compare(group, Strided(stride=4, local=1))


@check
def options(group: Any) -> None:
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], device="cuda")
    lengths = torch.tensor([LENGTH, 777], dtype=torch.int32, device="cuda")
    compare(group, Causal(), "zigzag", softcap=20.0, sink=sink, kv_lengths=lengths, scale=0.1)
    compare(group, TopK(lists()), kv_lengths=lengths)
    transposed = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in whole()]
    compare(group, Causal(), "zigzag", tensors=transposed)


@check
def heads(group: Any) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    tensors = whole(heads=4 * ranks, kv_heads=2 * ranks)
    by = head_parallel_attention
    compare(group, Causal(), tensors=tensors, by=by)
    compare(group, Dense(), tensors=tensors, by=by, heads_at_once=1)
    compare(group, Causal(), tensors=tensors, by=by, symmetric=True, heads_at_once=1)
    compare(group, Dense(), "zigzag", tensors=tensors, by=by, symmetric=True)
    every = lists(4 * ranks)
    local = TopK(every[:, 4 * rank : 4 * rank + 4].contiguous())
    compare(group, TopK(every), tensors=tensors, local=local, by=by)


@check
def graphs(group: Any) -> None:
    """A CUDA graph holds a call, with what it sends."""
    where = Layout.zigzag(dist.get_world_size(group))
    q, k, v = (where.shard(tensor, dist.get_rank(group)) for tensor in whole())
    expected = context_parallel_attention(q, k, v, Causal(), group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = context_parallel_attention(q, k, v, Causal(), group)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    torch.cuda.synchronize()
    del graph


@check
def compiled_models(group: Any) -> None:
    where = Layout.zigzag(dist.get_world_size(group))

    def model(q: Any, k: Any, v: Any) -> Any:
        return context_parallel_attention(q * 2, k, v, Causal(), group) + 1

    parts = [where.shard(tensor, dist.get_rank(group)).requires_grad_() for tensor in whole()]
    expected = model(*parts)
    right = torch.autograd.grad(expected.float().square().sum(), parts)
    out = torch.compile(model, fullgraph=True)(*parts)
    found = torch.autograd.grad(out.float().square().sum(), parts)
    torch.testing.assert_close(out, expected)
    for here_, there in zip(found, right, strict=True):
        torch.testing.assert_close(here_, there, atol=0.1, rtol=2e-2)


@check
def dtensors(group: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cuda")
    tensors = whole(heads=2 * dist.get_world_size(group), kv_heads=dist.get_world_size(group))
    expected = block_sparse_attention(*tensors, Causal())
    for dim in (1, 2):
        parts = [distribute_tensor(tensor, mesh, [Shard(dim)]) for tensor in tensors]
        out = context_parallel_attention(*parts, Causal())
        assert isinstance(out, DTensor) and out.placements == (Shard(dim),)
        torch.testing.assert_close(out.full_tensor(), expected, atol=1.6e-2, rtol=1.6e-2)


@check
def errors(group: Any) -> None:
    """What ranks do not do alike, or one does too late, is an error on all of them."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    q, k, v = (Layout.contiguous(ranks).shard(tensor, rank) for tensor in whole())
    size = 1024 if rank == 0 else 512
    try:
        context_parallel_attention(*(tensor[:, :, :size] for tensor in (q, k, v)), Dense(), group)
    except ArgumentError as error:
        assert "on rank 1" in str(error), str(error)
    else:
        raise AssertionError("ranks with other lengths")
    barrier = dist.new_group(backend="gloo")
    if rank == 1:
        dist.barrier(barrier)  # until rank 0 has given up
    try:
        context_parallel_attention(q, k, v, SlidingWindow(10), group, timeout=1.0)
    except CollectiveError as error:
        assert error.ranks == (1,) and "no message within 1 s" in str(error), str(error)
    else:
        raise AssertionError("a late rank")
    if rank != 1:
        dist.barrier(barrier)
