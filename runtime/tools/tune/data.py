"""Random inputs of a problem, and the calls of kernels and of a library's dense products on them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from codegen.errors import CodegenError
from codegen.patterns.topk import TopK
from codegen.select.problem import AttentionProblem, BsrProblem, Problem
from codegen.spec import AttentionSpec
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.pattern_numbers import numbers_for
from runtime.operators import OPERATORS, part
from runtime.tools.bench.measurement import every_key, operands, pattern_lists, pattern_values
from runtime.tools.bench.timing import Call

STORE = 8  # elements of a store
FROM = "bf16"  # dtype before quantization, for FP8 problems
RUN = 6  # consecutive lists that share entries, if a problem has overlap
MOST_DENSE = 1e14  # maximum floating-point operations of a timed dense product
STEPS = 60  # steps of a bisection


def inputs_of(problem: Problem, device: str = "cuda") -> AttentionInputs | BsrInputs:
    """Random inputs of a problem on a device."""
    place = OPERATORS[problem.op].inputs
    assert place is not None
    made: AttentionInputs | BsrInputs = part(place)(problem, device)
    return made


def row_lengths(rows: int, columns: int, density: float, longest: float) -> list[int]:
    """Stored blocks per block row, the longest first: a power law with a given density and longest row.

    Args:
        rows: block rows.
        columns: block columns, the upper bound of a row's length.
        density: share of stored blocks.
        longest: ratio of the longest row to the mean, as far as ``columns`` allows.
    """
    total = max(rows, min(rows * columns, round(rows * columns * density)))
    most = min(columns, max(math.ceil(total / rows), round(longest * total / rows)))

    def lengths(power: float) -> list[int]:
        return [min(columns, max(1, round(most * (rank + 1) ** -power))) for rank in range(rows)]

    low, high = 0.0, 8.0  # a larger power gives shorter rows
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths(middle)) > total else (low, middle)
    found = lengths(high)
    missing = total - sum(found)
    for rank in range(rows - 1, -1, -1):  # distribute the rounding remainder to short rows
        more = max(0, min(most - found[rank], math.ceil(missing / (rank + 1)), missing))
        found[rank] += more
        missing -= more
    return found


def draw_bsr(
    shape: tuple[int, int], block: tuple[int, int], lengths: list[int], overlap: float, like: torch.Tensor
) -> torch.Tensor:
    """A BSR matrix of normal values with these row lengths, in a random order.

    Columns are ascending. A row shares a fraction ``overlap`` of its columns with the previous row. Dtype and device
    are those of ``like``.
    """
    columns = shape[1] // block[1]
    counts = torch.tensor(lengths)[torch.randperm(len(lengths))]
    drawn: list[torch.Tensor] = []
    for length in counts.tolist():
        order = torch.randperm(columns)
        if overlap and drawn:
            kept = drawn[-1][torch.randperm(len(drawn[-1]))[: round(overlap * length)]]
            order = torch.cat([kept, order[~torch.isin(order, kept)]])
        drawn.append(order[:length].sort().values)
    crow = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(like.device)
    col = torch.cat(drawn).to(like.device)
    values = torch.randn((col.numel(), *block), device=like.device, dtype=like.dtype)
    return torch.sparse_bsr_tensor(crow, col, values, size=shape, device=values.device, check_invariants=False)


def need(problem: Problem, *names: str) -> list[int]:
    """Sizes of a problem.

    Raises:
        CodegenError: for a missing size.
    """
    missing = [name for name in names if getattr(problem, name) is None]
    if missing:
        raise CodegenError(f"timing a problem requires {', '.join(missing)}: {problem}")
    return [getattr(problem, name) for name in names]


class AttentionInputs:
    """q, k, v and index lists."""

    def __init__(self, problem: AttentionProblem, device: str = "cuda") -> None:
        heads, q_len, kv_len = need(problem, "heads", "q_len", "kv_len")
        batch, kv_heads = problem.batch or 1, problem.kv_heads or heads
        dtype = TORCH_DTYPES[FROM if problem.is_fp8 else problem.dtype]
        self.problem = problem
        self.q = torch.randn((batch, heads, q_len, problem.head_dim), device=device, dtype=dtype)
        self.k, self.v = (
            torch.randn((batch, kv_heads, kv_len, problem.head_dim), device=device, dtype=dtype) for _ in range(2)
        )
        self.sink = torch.randn(heads, device=device) if problem.sink else None
        self.lists: tuple[torch.Tensor, ...] | None = None
        self._given: dict[tuple[int, int], tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {}
        self._outs: dict[torch.dtype, torch.Tensor] = {}
        if isinstance(problem.pattern, TopK):
            self.lists = (self._topk(problem.pattern, heads // problem.pack_gqa, q_len, kv_len),)

    def _topk(self, pattern: TopK, packs: int, q_len: int, kv_len: int) -> torch.Tensor:
        rows, columns = -(-q_len // pattern.block.q), -(-kv_len // pattern.block.kv)
        (length,) = [pattern.k] if pattern.k is not None else need(self.problem, "list_length")
        length = min(length, columns) if pattern.k is None else length
        if length > columns:
            raise CodegenError(f"lists of {length} blocks, and {kv_len} keys have {columns}: {self.problem}")
        fresh = length - round((self.problem.overlap or 0.0) * length)
        wide = min(columns, length + (RUN - 1) * fresh)
        if not self.problem.overlap:
            return self._random_lists(packs, rows, columns, length)
        drawn = self._random_lists(packs, -(-rows // RUN), columns, wide)
        step = (wide - length) // (RUN - 1)
        parts = [drawn[..., i * step : i * step + length] for i in range(RUN)]
        return torch.stack(parts, 3).flatten(2, 3)[:, :, :rows].contiguous()

    def _random_lists(self, packs: int, rows: int, columns: int, length: int) -> torch.Tensor:
        lists = torch.empty((1, packs, rows, length), dtype=torch.int32, device=self.q.device)
        for pack in range(packs):
            lists[0, pack] = torch.rand((rows, columns), device=self.q.device).argsort(-1)[:, :length]
        return lists

    def call(self, kernel: Any) -> Call:
        """The call of a kernel; it returns the result."""
        batch, heads, q_len, _ = self.q.shape
        if self.lists is None:
            fixed = kernel.spec.pattern.fixed_block
            values = pattern_values(kernel.spec, batch, self.k.shape[2])
            self.lists = values if fixed is None else pattern_lists(kernel.spec, heads // kernel.spec.pack_gqa, q_len)
        lists: tuple[Any, ...] = self.lists
        if kernel.spec.query_grouping == "given":
            lists = (kernel.prepare(self.lists[0], self.k.shape[2]),)

        given, scales = self._operands(kernel.spec)
        numbers = numbers_for(kernel.spec.pattern, self.problem.pattern.example())
        options = {"sink": self.sink, **every_key(kernel.spec, self.k.shape[2]), **scales, **numbers}
        out = self._out(kernel.spec)

        def call() -> torch.Tensor:
            kernel(*given, *lists, out=out, **options)
            return out

        return call

    def _operands(self, spec: AttentionSpec) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        """q, k and v, quantized once for FP8 kernels, and scales."""
        rows = (spec.scale_rows.q, spec.scale_rows.k)
        if rows not in self._given:
            self._given[rows] = operands(spec, self.q, self.k, self.v)
        return self._given[rows]

    def _out(self, spec: AttentionSpec) -> torch.Tensor:
        """Memory for a result, shared by all kernels of its dtype, which run one after the other."""
        dtype = TORCH_DTYPES[spec.output if spec.is_fp8 else spec.dtype]
        if dtype not in self._outs:
            self._outs[dtype] = torch.empty_like(self.q, dtype=dtype)
        return self._outs[dtype]

    def dense(self) -> dict[str, Call]:
        """SDPA through its fast backends, over every key unless the pattern is causal."""
        causal = self.problem.pattern.kind == "causal" and self.q.shape[2] == self.k.shape[2]
        batch, heads, q_len, head_dim = self.q.shape
        if 4.0 * batch * heads * q_len * self.k.shape[2] * head_dim > MOST_DENSE:
            return {}

        def through(backend: SDPBackend) -> Call:
            def run() -> torch.Tensor:
                with sdpa_kernel(backend):
                    grouped = self.q.shape[1] != self.k.shape[1]
                    return scaled_dot_product_attention(self.q, self.k, self.v, is_causal=causal, enable_gqa=grouped)

            return run

        told = "" if self.problem.pattern.kind in ("dense", "causal") else ", every key"
        backends = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
        return {name + told: through(backend) for name, backend in backends.items()}


class BsrInputs(ABC):
    """A and B of a product with BSR matrices."""

    def __init__(self, problem: BsrProblem, device: str = "cuda") -> None:
        self.problem, self._device, self._dtype = problem, device, TORCH_DTYPES[problem.dtype]
        m, n, k = need(problem, "m", "n", "k")
        need(problem, "density")
        self.shape = (m, n, k)
        self.pattern: torch.Tensor | None = None
        self.a, self.b = self._operands(m, n, k)
        # Shared by all kernels, which run one after the other.
        self.out: torch.Tensor | None = (
            self._dense(m, n) if self.pattern is None else torch.empty_like(self.pattern.values())
        )
        if self.pattern is None and n % STORE:
            self.out = None  # rows of C are stored in whole chunks: each call allocates C with room for them

    def _dense(self, rows: int, columns: int) -> torch.Tensor:
        """A random dense matrix."""
        padded = -(-columns // STORE) * STORE  # kernels read rows 16 bytes at a time
        return torch.randn((rows, padded), device=self._device, dtype=self._dtype)[:, :columns]

    def _sparse(self, rows: int, columns: int) -> torch.Tensor:
        """A random BSR matrix."""
        problem, block = self.problem, (self.problem.block.rows, self.problem.block.cols)
        longest = problem.longest_row or 1.0
        lengths = row_lengths(rows // block[0], columns // block[1], problem.density or 0.0, longest)
        return draw_bsr((rows, columns), block, lengths, problem.overlap or 0.0, self._dense(1, 1))

    @abstractmethod
    def _operands(self, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random A, B and, if the kernel takes one, the pattern of C."""

    def call(self, kernel: Any) -> Call:
        """The call of a kernel; it returns the result."""

        def call() -> torch.Tensor:
            found: torch.Tensor = kernel(self.a, self.b, self.pattern, out=self.out)
            return found if self.out is None else self.out

        return call

    def dense(self) -> dict[str, Call]:
        """cuBLAS on dense matrices of normal values, because zeros draw less power."""
        m, n, k = self.shape
        if 2.0 * m * n * k > MOST_DENSE:
            return {}
        left, right = (torch.randn(shape, device=self.b.device, dtype=self.b.dtype) for shape in ((m, k), (k, n)))
        return {"cuBLAS, dense": lambda: torch.mm(left, right)}


class SpmmInputs(BsrInputs):
    """A, B and the addend of their product."""

    def _operands(self, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        problem = self.problem
        self.bias = self._dense(1, m)[0] if problem.epilogue is not None and problem.epilogue.bias else None
        self.c = self._dense(m, n) if problem.accumulate else None
        a = self._sparse(k, m) if problem.transpose_a else self._sparse(m, k)
        return a, self._dense(k, n) if problem.b_layout == "row_major" else self._dense(n, k).T

    def call(self, kernel: Any) -> Call:
        """The call of a kernel; it returns the result."""
        a: Any = self.a
        if self.problem.prepared != "none":
            a = kernel.prepare(self.a, self.shape[1], pack=self.problem.prepared == "packed")

        def call() -> torch.Tensor:
            found: torch.Tensor = kernel(a, self.b, c=self.c, bias=self.bias, out=self.out)
            return found if self.out is None else self.out

        return call


class SddmmInputs(BsrInputs):
    """A, B and the pattern of C."""

    def _operands(self, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        layouts = self.problem.a_layout, self.problem.b_layout
        a, b = (
            self._dense(rows, k) if layout == "row_major" else self._dense(k, rows).T
            for rows, layout in zip((m, n), layouts, strict=True)
        )
        self.pattern = self._sparse(m, n)
        return a, b


class SpgemmInputs(BsrInputs):
    """A, B and, if C is in BSR, its pattern."""

    def _operands(self, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self._sparse(m, k), self._sparse(k, n)
        self.pattern = self._sparse(m, n) if self.problem.output == "bsr" else None
        return a, b
