"""A linear layer with block-sparse weights and its gradients: y = x W^T, dx = dy W, dW = dy^T x where W is stored.

The kernels compute with W on the left: y^T = W x^T, dx^T = W^T dy^T. Where x and dy are row-major, their transposes are
stored by columns, so neither is copied for these two. The sampled product dy^T x takes both by rows, so there they are.
Results are compared with float64, and the times with torch's dense layer.

    python examples/block_sparse_linear.py [--features 8192] [--tokens 4096] [--block 128] [--density 0.125]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from runtime import load_kernel
from runtime.bench.timing import single_calls


class BlockSparseLinear(torch.nn.Module):
    """y = x W^T, x (tokens, in_features); W (out_features, in_features) has ``stored`` random blocks a block row."""

    def __init__(self, out_features: int, in_features: int, block: int, stored: int) -> None:
        super().__init__()
        rows, columns = out_features // block, in_features // block
        self.shape = (out_features, in_features)
        picks = torch.rand((rows, columns), device="cuda").argsort(-1)[:, :stored].sort(-1).values
        self.register_buffer("crow_indices", torch.arange(0, rows + 1, device="cuda") * stored)
        self.register_buffer("col_indices", picks.flatten())
        scale = (stored * block) ** -0.5
        values = torch.randn((rows * stored, block, block), device="cuda") * scale
        self.values = torch.nn.Parameter(values.half())
        self.forward_kernel = load_kernel(f"h100_bsr_spmm_b{block}_column_major")
        transposed = {"transpose_a": True, "b_layout": "column_major", "block": {"rows": block, "cols": block}}
        self.input_kernel = load_kernel({"op": "bsr_spmm", "arch": "sm_90a", **transposed})
        self.weight_kernel = load_kernel(f"h100_bsr_sddmm_b{block}")
        self.transposed = self.input_kernel.prepare(self.matrix(self.values.detach()))

    def matrix(self, values: torch.Tensor) -> torch.Tensor:
        """Return W as the kernels take it."""
        return torch.sparse_bsr_tensor(
            self.crow_indices, self.col_indices, values, size=self.shape, check_invariants=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.values, self)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, values: torch.Tensor, layer: BlockSparseLinear) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, values)
        ctx.layer = layer
        return layer.forward_kernel(layer.matrix(values), x.mT).mT

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x, values), layer = ctx.saved_tensors, ctx.layer
        w, dy = layer.matrix(values), dy.contiguous()
        dx = layer.input_kernel(layer.transposed.with_values(values), dy.mT).mT if ctx.needs_input_grad[0] else None
        dw = layer.weight_kernel(dy.mT.contiguous(), x.mT.contiguous(), w).values()
        return dx, dw, None


def check(layer: BlockSparseLinear, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Compare the layer's results with float64's, relative to the largest element of each."""
    block = layer.values.shape[-1]
    y = layer(x)
    y.backward(dy)
    w = layer.matrix(layer.values.detach()).to_dense().double()
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
    parser.add_argument("--block", type=int, default=128, choices=(64, 128))
    parser.add_argument("--density", type=float, default=0.125)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU")
    size, tokens = options.features, options.tokens
    stored = max(1, round(options.density * size / options.block))

    torch.manual_seed(0)
    layer = BlockSparseLinear(size, size, options.block, stored)
    x = torch.randn((tokens, size), device="cuda").half().requires_grad_()
    dy = torch.randn((tokens, size), device="cuda").half()
    check(layer, x, dy)

    dense = torch.nn.Linear(size, size, bias=False, device="cuda", dtype=torch.float16)

    def step(module: torch.nn.Module) -> None:
        module(x).backward(dy)

    calls = {"block-sparse": lambda: step(layer), "torch, dense": lambda: step(dense)}
    times = single_calls(calls, repeats=9)
    print(f"{tokens} tokens, {size} features, {stored} of {size // options.block} blocks of {options.block} a row")
    for name, milliseconds in times.items():
        print(f"{name:14} forwards and backwards {milliseconds:7.3f} ms")


if __name__ == "__main__":
    main()
