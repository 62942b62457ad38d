"""Prefill of a long sequence over several GPUs: each rank has a part of the sequence, and computes its queries.

    torchrun --nproc-per-node 2 examples/long_context.py [--length 1000000] [--pattern topk|window|causal]

With ``topk``, each block of 128 queries sees 32 key blocks: a share ``--local`` of them around its own, the others from
256 blocks spread over the sequence. A rank receives only the key blocks in its lists. The result of the first head is
compared with a single rank that has all keys, and some queries with exact attention in float64.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

from runtime.tools.bench.timing import single_calls
from sparse_kernel_codegen import block_sparse_attention
from sparse_kernel_codegen.distributed import Layout, context_parallel_attention, keys_received, plan_sends
from sparse_kernel_codegen.patterns import Causal, Pattern, SlidingWindow, TopK

BLOCK, ENTRIES, WINDOW = 128, 32, 2048
LANDMARKS = 256  # blocks, evenly spaced, that any query block may see
SAMPLES = 16  # queries compared with exact attention
LIMIT = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def make_lists(layout: Layout, rank: int, length: int, heads: int, local: float) -> TopK:
    """Lists of a rank's queries: blocks around their own, and some of the landmarks, without duplicates."""
    device, blocks = torch.device("cuda"), length // BLOCK
    own = layout.positions(rank, length, device)[::BLOCK, None] // BLOCK
    near = round(ENTRIES * local)
    first = (own - near // 2).clamp(0, blocks - near)
    around = first + torch.arange(near, device=device)
    landmarks = torch.arange(LANDMARKS, device=device) * blocks // LANDMARKS
    order = torch.rand(heads, len(own), LANDMARKS, device=device)
    order[:, (landmarks >= first) & (landmarks < first + near)] = torch.inf  # already listed
    chosen = landmarks[order.argsort(-1)[..., : ENTRIES - near]]
    lists = torch.cat([around.expand(heads, -1, -1), chosen], 2).sort(2).values
    return TopK(lists.to(torch.int32)[None].contiguous(), block=(BLOCK, BLOCK))


def keys_seen(pattern: Pattern, positions: torch.Tensor) -> float:
    """Number of keys that a rank's queries see in total, per head."""
    if isinstance(pattern, TopK):
        return float(len(positions) * pattern.kv_indices.shape[3] * BLOCK)
    seen = positions + 1
    return float((seen.clamp(max=WINDOW) if isinstance(pattern, SlidingWindow) else seen).sum())


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: int, place: int, pattern: Pattern) -> torch.Tensor:
    """Exact attention of a query of the first head, float64, over all keys that it sees."""
    if isinstance(pattern, TopK):
        listed = pattern.kv_indices[0, 0, row // BLOCK].long()[:, None] * BLOCK
        keys = (listed + torch.arange(BLOCK, device=q.device)).flatten()
    else:
        first = max(0, place + 1 - WINDOW) if isinstance(pattern, SlidingWindow) else 0
        keys = torch.arange(first, place + 1, device=q.device)
    scores = k[keys].double() @ q.double() * q.shape[0] ** -0.5
    return scores.softmax(0) @ v[keys].double()


def run(options: argparse.Namespace, group: dist.ProcessGroup) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    layout = Layout.zigzag(ranks) if options.pattern == "causal" else Layout.contiguous(ranks)
    unit = BLOCK * layout.count
    length = -(-options.length // unit) * unit
    rows, dtype = length // ranks, getattr(torch, options.dtype)
    torch.manual_seed(rank)
    q, k, v = (
        torch.randn(1, heads, rows, 128, dtype=dtype, device="cuda")
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    )
    pattern: Pattern = {"causal": Causal(), "window": SlidingWindow(WINDOW - 1)}.get(options.pattern, Causal())
    send = None
    if options.pattern == "topk":
        pattern = make_lists(layout, rank, length, options.heads, options.local)
        send = None if options.symmetric else plan_sends(q, k, pattern, group, layout=layout)

    how: dict[str, Any] = {"layout": layout, "send": send, "symmetric": options.symmetric}

    def call(validate: bool = False) -> torch.Tensor:
        found = context_parallel_attention(q, k, v, pattern, group, validate=validate, **how)
        assert isinstance(found, torch.Tensor)
        return found

    out = call(validate=True)

    every = [[torch.empty_like(x[:, :1]) for _ in range(ranks)] for x in (k, v)]
    for parts, mine in zip(every, (k, v), strict=True):
        dist.all_gather(parts, mine[:, :1].contiguous(), group=group)
    whole_k, whole_v = (layout.join(parts) for parts in every)
    if isinstance(pattern, TopK):
        of_head = TopK(pattern.kv_indices[:, :1].contiguous(), block=pattern.block)
        one = block_sparse_attention(q[:, :1], whole_k, whole_v, of_head)
        alone = float((one - out[:, :1]).abs().max())
    else:
        last = layout.spans(rank, length)[-1]
        start = rows - min(last.size, 4 * BLOCK)
        part = q[:, :1, start:]  # queries that end where these keys end
        one = block_sparse_attention(part, whole_k[:, :, : last.stop], whole_v[:, :, : last.stop], pattern)
        alone = float((one - out[:, :1, start:]).abs().max())
    places = layout.positions(rank, length, "cuda")
    error = 0.0
    for row in torch.linspace(0, rows - 1, SAMPLES).long().tolist():
        right = exact(q[0, 0, row], whole_k[0, 0], whole_v[0, 0], row, int(places[row]), pattern)
        error = max(error, float((out[0, 0, row].double() - right).abs().max()))
    del every, whole_k, whole_v

    dist.barrier(group)
    milliseconds = single_calls({"call": call}, repeats=7)["call"]
    of_key = 2 * options.kv_heads * 128 * q.element_size()
    received = keys_received(pattern, layout, rank, length, length) * of_key
    needed = received
    if send is not None:
        needed, received, _ = send.traffic(rank, 128)
    tflops = 4 * options.heads * keys_seen(pattern, places) * 128 / milliseconds / 1e9
    told = [torch.empty(6, dtype=torch.float64, device="cuda") for _ in range(ranks)]
    mine = torch.tensor([milliseconds, tflops, received, needed, error, alone], dtype=torch.float64, device="cuda")
    dist.all_gather(told, mine, group=group)
    if rank == 0:
        print(f"{length} tokens over {ranks} ranks, {options.heads}:{options.kv_heads} heads of 128, {options.pattern}")
        for number, each in enumerate(told):
            took, speed, got, wanted, off, apart = each.tolist()
            print(f"rank {number}: {took:8.3f} ms, {speed:5.0f} TFLOPS; off exact attention by {off:.2e}, off one rank")
            print(
                f"        with all keys by {apart:.2e}; received {got / 1e6:.1f} MB, lists need {wanted / 1e6:.1f} MB"
            )
    if not error < LIMIT[dtype] or not alone < LIMIT[dtype]:
        raise SystemExit(f"rank {rank}: the difference is too large")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--length", type=int, default=1_000_000, help="number of tokens, rounded up to whole blocks on all ranks"
    )
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--pattern", choices=("topk", "window", "causal"), default="topk")
    parser.add_argument("--local", type=float, default=0.9, help="share of a list around the query's own block")
    parser.add_argument(
        "--symmetric", action="store_true", help="read everything from the memory of peers, on one host"
    )
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU")
    if "RANK" not in os.environ:
        raise SystemExit(f"error: start it with torchrun: torchrun --nproc-per-node 2 {__file__}")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # not used, and not available everywhere
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    assert dist.group.WORLD is not None
    try:
        run(options, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
