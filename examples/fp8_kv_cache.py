"""Prefill over an FP8 KV cache: error and time compared with fp16.

The prompt is quantized once, into a cache with reserved capacity. Chunks of further tokens then attend to all earlier
keys: their keys are appended to the cache, their queries are quantized, and causal attention runs on the FP8 operands.
For comparison, the same chunks attend in fp16 to an fp16 cache.

    python examples/fp8_kv_cache.py [--prompt 65536] [--chunk 2048] [--chunks 4] [--heads 32] [--kv-heads 8]
"""

from __future__ import annotations

import argparse

import torch

from runtime.tools.bench.timing import single_calls
from sparse_kernel_codegen import (
    QuantizedAttention,
    block_sparse_attention,
    block_sparse_attention_fp8,
    quantize_attention,
)
from sparse_kernel_codegen.patterns import Causal

HEAD_DIM = 128
APPENDED = 128  # the cache grows by multiples of this number of keys


def attended(
    cache: QuantizedAttention, chunk: list[torch.Tensor], seen: list[torch.Tensor]
) -> tuple[QuantizedAttention, str]:
    """Append a chunk's keys to a cache and attend to it; return the cache, and a summary of time and error.

    Args:
        cache: cache of the earlier keys.
        chunk: q, k and v of the chunk.
        seen: k and v of all keys up to the end of the chunk, fp16.
    """
    queries, keys, values = chunk

    def with_quantizing() -> torch.Tensor:
        return block_sparse_attention_fp8(cache.append(keys, values).with_queries(queries), Causal())

    grown = cache.append(keys, values).with_queries(queries)
    calls = {
        "FP8": lambda: block_sparse_attention_fp8(grown, Causal()),
        "FP8 with quantizing": with_quantizing,
        "fp16": lambda: block_sparse_attention(queries, *seen, Causal()),
    }
    out, exact = calls["FP8"]().float(), calls["fp16"]().float()
    error = float((out - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    times = ", ".join(f"{name} {time:.3f} ms" for name, time in single_calls(calls).items())
    return grown, f"{times}; error {error:.1%} of the result"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=65536)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--hadamard", action="store_true", help="rotate queries and keys")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU")
    for name in ("prompt", "chunk"):
        if getattr(options, name) % APPENDED:
            parser.error(f"--{name}: the cache grows by whole blocks of {APPENDED} keys")

    torch.manual_seed(0)
    length = options.prompt + options.chunks * options.chunk
    q = torch.randn(1, options.heads, length, HEAD_DIM, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, options.kv_heads, length, HEAD_DIM, device="cuda", dtype=torch.float16) for _ in range(2))
    k += torch.randn(HEAD_DIM, device="cuda", dtype=torch.float16)  # keys share a component

    def part(x: torch.Tensor, begin: int, count: int) -> torch.Tensor:
        return x[:, :, begin : begin + count]

    prompt = [part(x, 0, options.prompt) for x in (q, k, v)]
    cache = quantize_attention(*prompt, hadamard=options.hadamard, kv_capacity=length)
    whole = cache.cache
    assert whole is not None
    half = k.nbytes + v.nbytes
    print(f"cache of {length} keys: {sum(x.nbytes for x in whole) / 1e6:.0f} MB in FP8, {half / 1e6:.0f} MB in fp16")
    for begin in range(options.prompt, length, options.chunk):
        chunk = [part(x, begin, options.chunk) for x in (q, k, v)]
        seen = [part(x, 0, begin + options.chunk) for x in (k, v)]
        cache, told = attended(cache, chunk, seen)
        print(f"{options.chunk} tokens behind {begin}: {told}")


if __name__ == "__main__":
    main()
