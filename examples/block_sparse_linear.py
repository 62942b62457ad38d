"""A linear layer with block-sparse weights, forward and backward, compared with torch's dense layer.

The layer is ``sparse_kernel_codegen.nn.BlockSparseLinear``; docs/guide/weights.md describes its copies. Results are
compared with float64, and times with torch's dense layer.

    python examples/block_sparse_linear.py [--features 8192] [--tokens 4096] [--block 128] [--density 0.125]
"""

from __future__ import annotations

import argparse

import torch

from runtime.tools.bench.timing import single_calls
from sparse_kernel_codegen import explain_matmul
from sparse_kernel_codegen.nn import BlockSparseLinear


def random_layer(size: int, block: int, stored: int) -> BlockSparseLinear:
    """A square layer with ``stored`` random blocks per block row."""
    blocks = size // block
    mask = torch.zeros((blocks, blocks), dtype=torch.bool, device="cuda")
    mask.scatter_(1, torch.rand((blocks, blocks), device="cuda").argsort(-1)[:, :stored], True)
    return BlockSparseLinear.from_mask(mask, block, bias=False)


def check(layer: BlockSparseLinear, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Compare the layer's results with float64, relative to the largest element of each."""
    block = layer.block[0]
    y = layer(x)
    y.backward(dy)
    w = layer.weight.with_values(layer.values.detach()).to_sparse().to_dense().double()
    rows = slice(0, 64)
    dw = dy.mT.double()[:block] @ x.detach().double()
    first = layer.col_indices[: int(layer.crow_indices[1])]
    pairs = {
        "y": (y[rows], x[rows].double() @ w.mT),
        "dx": (x.grad[rows], dy[rows].double() @ w),
        "dW": (layer.values.grad[: len(first)], dw.unflatten(1, (-1, block)).transpose(0, 1)[first]),
    }
    for name, (found, exact) in pairs.items():
        difference = float((found.double() - exact).abs().max() / exact.abs().max())
        print(f"{name}: largest difference {difference:.1e}")
        assert difference < 2e-3, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--block", type=int, default=128, choices=(16, 32, 64, 128))
    parser.add_argument("--density", type=float, default=0.125)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU")
    size, tokens = options.features, options.tokens
    stored = max(1, round(options.density * size / options.block))

    torch.manual_seed(0)
    layer = random_layer(size, options.block, stored)
    x = torch.randn((tokens, size), device="cuda").half().requires_grad_()
    dy = torch.randn((tokens, size), device="cuda").half()
    check(layer, x, dy)
    print(explain_matmul(layer.weight, x.mT, gradients=True))

    dense = torch.nn.Linear(size, size, bias=False, device="cuda", dtype=torch.float16)

    def step(module: torch.nn.Module) -> None:
        module(x).backward(dy)

    calls = {"block-sparse": lambda: step(layer), "torch, dense": lambda: step(dense)}
    times = single_calls(calls, repeats=9)
    print(f"{tokens} tokens, {size} features, {stored} of {size // options.block} blocks of {options.block} a row")
    for name, milliseconds in times.items():
        print(f"{name:14} forward and backward {milliseconds:7.3f} ms")


if __name__ == "__main__":
    main()
