"""A grid of problems that people have, as calls of the front door.

Attention: fp16 and bf16; heads of 64 to 256 elements, those of ViT-L (64), ViT-SO400M (72), Phi-2 (80), GPT-NeoX (96),
Llama (128), DeepSeek (192) and Gemma (256); whole, causal, causal windows (of Mistral and Gemma, and a short one),
packed documents, lists of blocks of 64 and 128 keys, the best 16 or 32 blocks; few and many heads, grouped and not;
1,024 to 32,768 tokens; the forward pass, and all that a training step runs.

Products with block-sparse weights: A B, A^T B and sampled products with blocks of 16 to 128, 1 to 8,192 tokens, square
and wide layers of a 7B model, a tenth to a half of the blocks stored.

And every row of benchmarks/models.yaml, the shapes of published models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from model_problems import Row, rows

from codegen.library import NamedSpec
from runtime import explain_attention, explain_matmul
from runtime.ops.explain import Explanation
from runtime.ops.explain_packed import KernelsExplanation
from runtime.patterns import BlockLists, Causal, Dense, Pattern, SlidingWindow, TopK

ARCHS = ("sm_90a", "sm_89")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
HEAD_DIMS = (64, 72, 80, 96, 128, 192, 256)
HEADS = ((1, 8, 8), (1, 32, 8), (4, 16, 16))
"""Batches, query heads and K/V heads."""
LENGTHS = (1024, 8192, 32768)
BLOCKS = (16, 32, 64, 128)
TOKENS = (1, 8, 16, 64, 256, 1024, 8192)
LAYERS = ((4096, 4096), (14336, 4096))
"""Rows and columns of a weight."""
DENSITIES = (0.1, 0.25, 0.5)
PRODUCTS = ("bsr_spmm", "bsr_spmm_transposed", "bsr_sddmm")
DOCUMENTS = "doc[batch, q_idx] == doc[batch, kv_idx] and q_idx >= kv_idx"


def _indices(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _lists(block: int, entries: int = 16, **more: Any) -> Callable[[int, int, int], Pattern]:
    """Lists of each head, of full blocks and of partial ones."""

    def made(batch: int, heads: int, length: int) -> Pattern:
        rows, most = length // block, min(entries, length // block)
        aux = {"aux": {"doc": _indices(batch, length)}} if more else {}
        full = (_indices(batch, heads, rows), _indices(batch, heads, rows, most))
        return BlockLists(*full, *full, block=(block, block), **more, **aux)

    return made


def _topk(block: int, entries: int) -> Callable[[int, int, int], Pattern]:
    def made(batch: int, heads: int, length: int) -> Pattern:
        rows = length // block
        return TopK(_indices(batch, heads, rows, min(entries, rows)), block=(block, block))

    return made


PATTERNS: dict[str, Callable[[int, int, int], Pattern]] = {
    "dense": lambda *sizes: Dense(),
    "causal": lambda *sizes: Causal(),
    "window of 512": lambda *sizes: SlidingWindow(511, 0),
    "window of 1024": lambda *sizes: SlidingWindow(1023, 0),
    "window of 4096": lambda *sizes: SlidingWindow(4095, 0),
    "documents": _lists(128, mask=DOCUMENTS),
    "lists of 64": _lists(64),
    "lists of 128": _lists(128),
    "16 blocks of 64": _topk(64, 16),
    "16 blocks of 128": _topk(128, 16),
    "32 blocks of 128": _topk(128, 32),
}
"""Patterns from batch, heads and length."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of ``block_sparse_attention``, or a training step with it."""

    arch: str
    dtype: str
    head_dim: int
    pattern: str
    sizes: tuple[int, int, int]
    length: int
    training: bool

    @property
    def group(self) -> str:
        """Problems that are counted together."""
        return f"{self.arch} {'training step' if self.training else 'forward'}"

    def kernels(self) -> list[NamedSpec]:
        """The kernels that it runs."""
        batch, heads, kv_heads = self.sizes
        shapes = [(batch, count, self.length, self.head_dim) for count in (heads, kv_heads, kv_heads)]
        q, k, v = (torch.empty(shape, dtype=DTYPES[self.dtype], device="meta") for shape in shapes)
        pattern = PATTERNS[self.pattern](batch, heads, self.length)
        return _attention_kernels(explain_attention(q, k, v, pattern, arch=self.arch, gradients=self.training))


@dataclass(frozen=True)
class Product:
    """A product with a block-sparse weight."""

    arch: str
    dtype: str
    product: str
    block: int
    layer: tuple[int, int]
    density: float
    tokens: int

    @property
    def group(self) -> str:
        """Problems that are counted together."""
        return f"{self.arch} {self.product}"

    def kernels(self) -> list[NamedSpec]:
        """The kernels that it runs."""
        rows, columns = self.layer
        stored = max(1, round(rows * columns * self.density / self.block**2))
        pointers = torch.linspace(0, stored, rows // self.block + 1).to(torch.int32)
        places = torch.zeros(stored, dtype=torch.int32)
        values = torch.empty((1, 1, 1), dtype=DTYPES[self.dtype]).expand(stored, self.block, self.block)
        a = torch.sparse_bsr_tensor(pointers, places, values, size=self.layer, check_invariants=False)
        wide = rows if self.product == "bsr_spmm_transposed" else columns
        b = torch.empty((wide, self.tokens), dtype=DTYPES[self.dtype])
        if self.product == "bsr_sddmm":
            return [explain_matmul(a, b, arch=self.arch, gradients=True).products["dA"].choice.named]
        transposed = self.product == "bsr_spmm_transposed"
        return [explain_matmul(a, b, arch=self.arch, transpose_a=transposed).choice.named]


@dataclass(frozen=True)
class ModelCall:
    """A row of benchmarks/models.yaml; a row of gradients is a training step."""

    arch: str
    row: Row

    @property
    def group(self) -> str:
        """Problems that are counted together."""
        return f"{self.arch} published models"

    def kernels(self) -> list[NamedSpec]:
        """The kernels that it runs."""
        backward = self.row.backward
        found = self.row.inputs(torch.device("meta")).explain(gradients=backward, arch=self.arch)
        if isinstance(found, Explanation):
            return _attention_kernels(found)
        if isinstance(found, KernelsExplanation):
            return list(found.kernels.values())
        return [each.choice.named for each in found.products.values()]


def _attention_kernels(found: Explanation) -> list[NamedSpec]:
    """The kernel of the result, and those of the gradients if they are explained."""
    kernels = [found.choice.named]
    if (gradients := found.gradients) is not None:
        whole = gradients.dq_dkdv
        kernels += [gradients.dq, gradients.dkdv] if whole is None else [whole]
    return kernels


Problem = AttentionCall | Product | ModelCall


def problems() -> Iterator[Problem]:
    """All problems of the grid."""
    yield from itertools.starmap(
        AttentionCall, itertools.product(ARCHS, DTYPES, HEAD_DIMS, PATTERNS, HEADS, LENGTHS, (False, True))
    )
    yield from itertools.starmap(Product, itertools.product(ARCHS, DTYPES, PRODUCTS, BLOCKS, LAYERS, DENSITIES, TOKENS))
    yield from itertools.starmap(ModelCall, itertools.product(ARCHS, rows()))
