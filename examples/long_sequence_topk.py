"""Top-k block-sparse attention over a long sequence, with block lists selected from the data.

Key blocks are scored by the product of mean-pooled queries and keys; each query block keeps the best ones and its own
diagonal block. The kernel's result is compared with dense attention restricted to the same blocks, and its time with
torch's dense attention and with FlexAttention on the same lists.

    python examples/long_sequence_topk.py [--length 32768] [--heads 16] [--kernel h100_topk32]
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from runtime.tools.bench.timing import single_calls
from sparse_kernel_codegen import load_kernel


def choose_blocks(q: torch.Tensor, k: torch.Tensor, block: int, count: int) -> torch.Tensor:
    """The ``count`` best key blocks of each query block, int32 (batch, heads, length / block, count)."""

    def pooled(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (-1, block)).mean(3)

    group = q.shape[1] // k.shape[1]
    scores = pooled(q).float() @ pooled(k.repeat_interleave(group, 1)).float().mT
    scores.diagonal(dim1=2, dim2=3).fill_(torch.inf)  # every query block sees its own keys
    return scores.topk(count, sorted=False).indices.sort(-1).values.to(torch.int32)  # sorted lists are faster


def restricted_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: torch.Tensor, block: int, head: int, rows: slice
) -> torch.Tensor:
    """Exact (float64) attention of some query blocks of one head over their listed blocks."""
    results = []
    for row in range(rows.start, rows.stop):
        keys = (lists[0, head, row].long()[:, None] * block + torch.arange(block, device=q.device)).flatten()
        queries = q[0, head, row * block : (row + 1) * block].double()
        scores = queries @ k[0, head].double()[keys].T * q.shape[3] ** -0.5
        results.append(scores.softmax(-1) @ v[0, head].double()[keys])
    return torch.cat(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kernel", default="h100_topk32", help="an fp16 topk spec with square blocks")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU")

    attn = load_kernel(options.kernel, forward_compatible=True)
    spec = attn.spec
    if spec.pattern.kind != "topk" or spec.pattern.block.q != spec.pattern.block.kv or spec.dtype != "fp16":
        parser.error(f"--kernel: {options.kernel} is not an fp16 topk spec with square blocks")
    if spec.query_grouping == "given" or spec.pack_gqa > 1:
        parser.error(f"--kernel: {options.kernel} needs inputs other than one list per head (query_order, pack_gqa)")
    block, count = spec.pattern.block.q, spec.pattern.k or 32
    shape = (1, options.heads, options.length, spec.head_dim)
    torch.manual_seed(0)
    # Neighboring positions are similar, as in real sequences, so that pooled scores are meaningful.
    drift = torch.randn((1, options.heads, options.length // 512, spec.head_dim), device="cuda").repeat_interleave(
        512, 2
    )
    q, k = ((torch.randn(shape, device="cuda") + drift).half() for _ in range(2))
    v = torch.randn(shape, device="cuda").half()
    lists = choose_blocks(q, k, block, count)
    out, _ = attn(q, k, v, lists, validate=True)

    rows = slice(0, 4)
    expected = restricted_dense(q, k, v, lists, block, head=0, rows=rows)
    error = (out[0, 0, : rows.stop * block].double() - expected).abs().max()
    print(f"{options.length} keys, {options.heads} heads, {count} blocks of {block} per block of {block} queries")
    print(f"largest difference from exact attention over the same blocks: {error:.2e}")
    if not error < 2e-3:
        raise SystemExit("the difference is too large")

    blocks = options.length // block
    counts = torch.full(lists.shape[:3], count, dtype=torch.int32, device="cuda")
    padded = torch.nn.functional.pad(lists, (0, blocks - count)).contiguous()
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(padded), counts, padded, BLOCK_SIZE=(block, block)
    )
    flex = torch.compile(flex_attention, dynamic=False)
    small = {"kernel_options": {"BLOCK_M": block, "BLOCK_N": block}} if block < 128 else {}
    dense_flops = 4 * options.heads * options.length**2 * spec.head_dim
    sparse_flops = dense_flops * count // blocks
    calls = {
        options.kernel: (lambda: attn(q, k, v, lists, out=out), sparse_flops),
        "FlexAttention, same lists": (lambda: flex(q, k, v, block_mask=mask, **small), sparse_flops),
        "torch SDPA, dense": (lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v), dense_flops),
    }
    times = single_calls({name: call for name, (call, _) in calls.items()}, repeats=9)
    for name, milliseconds in times.items():
        print(f"{name:28} {milliseconds:8.3f} ms  {calls[name][1] / milliseconds / 1e9:5.0f} TFLOPS")


if __name__ == "__main__":
    main()
