"""The problems of benchmarks/models.yaml: their table, their inputs, and what is exact.

A row is a problem at one size, forward or backward. :func:`rows` lists them, headline rows first; each makes its inputs
on any device, on ``meta`` too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, PositiveFloat, PositiveInt

from runtime import convert, explain_attention, explain_matmul, explain_varlen_attention
from runtime.ops.bsr_explain import MatmulExplanation
from runtime.ops.explain import Explanation
from runtime.ops.explain_packed import KernelsExplanation
from runtime.patterns import BlockLists, Causal, Dense, Pattern, SinkWindow, SlidingWindow, TopK
from runtime.prepare.bsr_matrix import BsrMatrix, prepare_bsr

TABLE = Path(__file__).with_name("models.yaml")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
NEIGHBORS = 4
"""Query blocks whose lists share entries."""
LEAST_DOCUMENT = 64
"""Tokens of the shortest document of a packed sequence."""


@dataclass(frozen=True)
class Lists:
    """Key blocks of each query block, as the oracle and the peers take them.

    Attributes:
        block: queries, and keys, of a block.
        full: int32 (1, list heads, query blocks, entries), ascending.
        full_counts: int32 (1, list heads, query blocks), valid entries of ``full``.
        diagonal: whether a query block also sees its own key block, causally.
    """

    block: int
    full: torch.Tensor
    full_counts: torch.Tensor
    diagonal: bool

    def of_heads(self, heads: int) -> Lists:
        """Lists of each query head."""
        repeats = heads // self.full.shape[1]
        full, counts = (t.repeat_interleave(repeats, 1).contiguous() for t in (self.full, self.full_counts))
        return replace(self, full=full, full_counts=counts)

    def pairs(self) -> int:
        """Visible pairs of all list heads."""
        own = self.full_counts.numel() * self.block * (self.block + 1) // 2 if self.diagonal else 0
        return int(self.full_counts.sum()) * self.block**2 + own

    def visible(self, head: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Bool (queries, keys): which keys the queries of a list head see."""
        blocks = torch.div(queries, self.block, rounding_mode="floor")
        listed = torch.zeros((len(queries), -(-len(keys) // self.block)), dtype=torch.int32, device=queries.device)
        entries, counts = self.full[0, head, blocks].long(), self.full_counts[0, head, blocks]
        counted = torch.arange(entries.shape[1], device=queries.device) < counts[:, None]
        listed.scatter_add_(1, entries.clamp(min=0), counted.int())
        seen = listed.repeat_interleave(self.block, 1)[:, : len(keys)] > 0
        if not self.diagonal:
            return seen
        own = torch.div(keys, self.block, rounding_mode="floor")[None] == blocks[:, None]
        return seen | (own & (keys[None] <= queries[:, None]))


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Pattern(_Model):
    """What the patterns of the table have in common."""

    def made(self, problem: AttentionProblem, size: Size, device: torch.device) -> tuple[Pattern, Lists | None]:
        """The pattern of a call, and its lists if it has some."""
        raise NotImplementedError


class DensePattern(_Pattern):
    kind: Literal["dense"]

    def made(self, problem: AttentionProblem, size: Size, device: torch.device) -> tuple[Pattern, Lists | None]:
        return Dense(), None


class CausalPattern(_Pattern):
    kind: Literal["causal"]

    def made(self, problem: AttentionProblem, size: Size, device: torch.device) -> tuple[Pattern, Lists | None]:
        return Causal(), None


class Window(_Pattern):
    kind: Literal["window"]
    left: PositiveInt
    right: int = 0

    def made(self, problem: AttentionProblem, size: Size, device: torch.device) -> tuple[Pattern, Lists | None]:
        return SlidingWindow(self.left, self.right), None


class BandWithSink(_Pattern):
    """A band around the diagonal, and the first keys."""

    kind: Literal["sink_window"]
    sink: PositiveInt
    left: PositiveInt
    right: PositiveInt

    def made(self, problem: AttentionProblem, size: Size, device: torch.device) -> tuple[Pattern, Lists | None]:
        return SinkWindow(self.sink, self.left, self.right), None


class Documents(_Pattern):
    """Packed documents: of ``tokens`` tokens, or of lengths that are drawn.

    Attributes:
        tokens: mean length; the median of log-normal lengths.
        equal: whether all documents have this length.
        sigma: standard deviation of the logarithm of log-normal lengths; without it, cut points are uniform.
        packed: whether our call is ``varlen_attention`` of packed sequences; otherwise it has lists of blocks.
    """

    kind: Literal["documents"]
    tokens: PositiveInt
    equal: bool = True
    sigma: PositiveFloat | None = None
    causal: bool = True
    packed: bool = False

    def boundaries(self, total: int) -> torch.Tensor:
        """int32 (documents + 1,) on the CPU: where documents begin, and the end of the last one."""
        count = total // self.tokens
        if self.equal:
            return torch.arange(0, total + 1, self.tokens, dtype=torch.int32)
        if self.sigma is not None:
            return self._log_normal(total, self.sigma)
        # Cut points of what is left once each document has its least length.
        cuts = torch.randint(0, total - count * LEAST_DOCUMENT + 1, (count - 1,)).sort().values
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), cuts + LEAST_DOCUMENT * torch.arange(1, count)))
        return torch.cat((starts, torch.tensor([total]))).to(torch.int32)

    def _log_normal(self, total: int, sigma: float) -> torch.Tensor:
        """Boundaries of log-normal lengths of at least one token; the last document ends with the sequence."""
        ends = [0]
        while ends[-1] < total:
            length = round(self.tokens * math.exp(sigma * float(torch.randn(()))))
            ends.append(min(ends[-1] + max(length, 1), total))
        return torch.tensor(ends, dtype=torch.int32)


class RandomBlocks(_Pattern):
    """Lists of random key blocks, ``shared`` of them in common between four neighboring query blocks."""

    kind: Literal["topk"]
    block: PositiveInt
    blocks: PositiveInt
    shared: float = 0.0

    def made(self, problem: AttentionProblem, size: Size, device: torch.device) -> tuple[Pattern, Lists | None]:
        rows, columns = size.q_len // self.block, size.keys // self.block
        shape = (1, problem.heads, rows, self.blocks)
        full = torch.empty(shape, dtype=torch.int32, device=device)
        if device.type != "meta":
            common = round(self.shared * self.blocks)
            for head in range(problem.heads):
                scores = torch.rand((rows, columns), device=device)
                if common:
                    groups = torch.rand((-(-rows // NEIGHBORS), columns), device=device).topk(common).indices
                    scores.scatter_(1, groups.repeat_interleave(NEIGHBORS, 0)[:rows], 2.0)
                full[0, head] = scores.topk(self.blocks).indices.sort(-1).values
        lists = _whole(self.block, full)
        return TopK(full, block=(self.block, self.block)), lists


class Tiles(_Pattern):
    """Sliding tiles: a tile of tokens sees a window of tiles around it, which stays inside of the grid."""

    kind: Literal["tiles"]
    tile: PositiveInt
    grid: tuple[PositiveInt, PositiveInt, PositiveInt]
    window: tuple[PositiveInt, PositiveInt, PositiveInt]
    block: ClassVar[int] = 128

    def made(self, problem: AttentionProblem, size: Size, device: torch.device) -> tuple[Pattern, Lists | None]:
        axes = []
        for length, window in zip(self.grid, self.window, strict=True):
            first = (torch.arange(length) - window // 2).clamp(0, length - window)
            axes.append(first[:, None] + torch.arange(window))
        sizes = torch.tensor([self.grid[1] * self.grid[2], self.grid[2], 1])
        tiles = torch.stack(
            [
                (a[:, None, None] * sizes[0] + b[None, :, None] * sizes[1] + c[None, None] * sizes[2]).flatten()
                for a, b, c in itertools.product(*axes)
            ]
        )
        parts = self.tile // self.block
        listed = (tiles[..., None] * parts + torch.arange(parts)).flatten(1).sort(-1).values
        full = listed.repeat_interleave(parts, 0)[None, None].to(device, torch.int32)
        return TopK(full, block=(self.block, self.block)), _whole(self.block, full)


class CausalBlocks(_Pattern):
    """A query's own unit of ``unit`` blocks up to the query itself, and ``units - 1`` earlier ones at random."""

    kind: Literal["causal_topk"]
    block: PositiveInt
    unit: PositiveInt = 1
    units: PositiveInt
    lists: Literal["heads", "kv_heads"] = "heads"

    def made(self, problem: AttentionProblem, size: Size, device: torch.device) -> tuple[Pattern, Lists | None]:
        rows, heads = size.q_len // self.block, problem.kv_count if self.lists == "kv_heads" else problem.heads
        shape, width = (1, heads, rows), self.units * self.unit - 1
        diagonal, ones, counts = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(3))
        full = torch.empty((*shape, width), dtype=torch.int32, device=device)
        if device.type != "meta":
            row = torch.arange(rows, device=device)
            ones.fill_(1)
            diagonal.copy_(row)
            own, inside = row // self.unit, row % self.unit
            counts.copy_(own.clamp(max=self.units - 1) * self.unit + inside)
            for head in range(heads):
                full[0, head] = self._drawn(own, inside, width)
        lists = Lists(self.block, full, counts, diagonal=True)
        block = (self.block, self.block)
        return BlockLists(ones, diagonal[..., None], counts, full, block=block, mask="causal"), lists

    def _drawn(self, own: torch.Tensor, inside: torch.Tensor, width: int) -> torch.Tensor:
        """int32 (rows, width): full blocks of one head, ascending, 0 behind the last one that counts."""
        rows, units = len(own), -(-len(own) // self.unit)
        numbers = torch.arange(units, device=own.device)
        scores = torch.rand((units, units), device=own.device).masked_fill(numbers[None] >= numbers[:, None], -1.0)
        chosen = torch.zeros((units, units), dtype=torch.bool, device=own.device)
        if self.units > 1:
            best = scores.topk(min(self.units - 1, units))
            chosen.scatter_(1, best.indices, best.values >= 0)
        listed = chosen[own].repeat_interleave(self.unit, 1)
        blocks = torch.arange(units * self.unit, device=own.device)
        before = (blocks >= (own * self.unit)[:, None]) & (blocks < (own * self.unit + inside)[:, None])
        listed |= before
        order = torch.where(listed, blocks, units * self.unit).sort(-1).values[:, :width]
        order = torch.nn.functional.pad(order, (0, width - order.shape[1]), value=units * self.unit)
        return order.masked_fill(order >= rows, 0).to(torch.int32)


def _whole(block: int, full: torch.Tensor) -> Lists:
    counts = torch.full(full.shape[:3], full.shape[3], dtype=torch.int32, device=full.device)
    return Lists(block, full, counts, diagonal=False)


AnyPattern = Annotated[
    DensePattern | CausalPattern | Window | BandWithSink | Documents | RandomBlocks | Tiles | CausalBlocks,
    Field(discriminator="kind"),
]


class Size(_Model):
    """Sizes of an attention problem.

    Attributes:
        q_len: queries of a head.
        kv_len: keys of a head; as many as queries by default.
        pattern: in the place of the problem's, of the same kind.
        headline: whether the page's picture shows the row.
        gradients: whether the row is also run backward.
    """

    q_len: PositiveInt
    kv_len: PositiveInt | None = None
    batch: PositiveInt = 1
    pattern: AnyPattern | None = None
    headline: bool = False
    gradients: bool = False

    @property
    def keys(self) -> int:
        """Keys of a head."""
        return self.kv_len or self.q_len

    @property
    def label(self) -> str:
        """The end of a row's name."""
        keys = f"x{self.kv_len}" if self.kv_len else ""
        return f"{self.q_len}{keys}" + (f"-b{self.batch}" if self.batch > 1 else "")


class _Problem(_Model):
    """What all problems say of themselves.

    Attributes:
        name: how the names of its rows begin.
        source: URL of a configuration file or paper.
        checked: where the numbers were read.
        assumed: what no source says, and why it is so.
    """

    name: str
    model: str
    layer: str
    source: HttpUrl
    dtype: Literal["fp16", "bf16"] = "bf16"
    checked: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


class AttentionProblem(_Problem):
    """Attention of a model, in the shapes of a call.

    Attributes:
        sink: whether each head has a learned logit beside its keys.
    """

    heads: PositiveInt
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt
    pattern: AnyPattern
    sink: bool = False
    sizes: tuple[Size, ...]

    @property
    def kv_count(self) -> int:
        """K/V heads."""
        return self.kv_heads or self.heads

    def at(self, size: Size) -> AttentionProblem:
        """The problem with the pattern of a size."""
        return self if size.pattern is None else self.model_copy(update={"pattern": size.pattern})


class ProductSize(_Model):
    """Sizes of a product with a sparse weight.

    Attributes:
        block: rows and columns of a block.
        sparsity: share of the blocks that are not stored.
        tokens: columns of B.
    """

    block: Literal[16, 32, 64, 128]
    sparsity: float = Field(gt=0, lt=1)
    tokens: PositiveInt
    headline: bool = False
    gradients: bool = False

    @property
    def label(self) -> str:
        """The end of a row's name."""
        return f"b{self.block}-{self.sparsity:.0%}-n{self.tokens}".replace("%", "")


class ProductProblem(_Problem):
    """A sparse weight of a model.

    Attributes:
        rows: output features.
        columns: input features.
        activations: how B lies: ``tokens`` as (tokens, features) of a layer's input, ``features`` as (features, tokens)
            of what another sparse layer wrote.
    """

    rows: PositiveInt
    columns: PositiveInt
    activations: Literal["tokens", "features"]
    sizes: tuple[ProductSize, ...]


class Table(_Model):
    """The file."""

    attention: tuple[AttentionProblem, ...]
    products: tuple[ProductProblem, ...]


@dataclass(frozen=True)
class AttentionInputs:
    """Tensors of a call of ``block_sparse_attention``, and what the oracle knows of them.

    Attributes:
        q: (batch, heads, q_len, head_dim); k and v alike, with kv_heads.
        dout: the gradient of the result; None forward.
        cu_seqlens: int32 (documents + 1,), of packed documents.
    """

    problem: AttentionProblem
    size: Size
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pattern: Pattern
    lists: Lists | None
    cu_seqlens: torch.Tensor | None
    sink: torch.Tensor | None
    dout: torch.Tensor | None
    documents: torch.Tensor | None = field(default=None)

    def visible(self, head: int, queries: torch.Tensor) -> torch.Tensor:
        """Bool (queries, keys): which keys some queries of a head see, by the pattern's definition."""
        keys = torch.arange(self.size.keys, device=queries.device)
        if self.lists is not None:
            return self.lists.visible(head * self.lists.full.shape[1] // self.problem.heads, queries, keys)
        pattern, place = self.problem.pattern, queries[:, None] + self.size.keys - self.size.q_len
        if isinstance(pattern, CausalPattern):
            return keys[None] <= place
        if isinstance(pattern, Window):
            return (keys[None] >= place - pattern.left) & (keys[None] <= place + pattern.right)
        if isinstance(pattern, BandWithSink):
            near = (keys[None] >= place - pattern.left) | (keys[None] < pattern.sink)
            return near & (keys[None] <= place + pattern.right)
        if isinstance(pattern, Documents):
            assert self.documents is not None
            same = self.documents[queries][:, None] == self.documents[None]
            return same & (keys[None] <= place) if pattern.causal else same
        return torch.ones((len(queries), len(keys)), dtype=torch.bool, device=queries.device)

    def pairs(self) -> int:
        """Visible pairs of all batches and heads."""
        if self.lists is not None:
            return self.size.batch * self.problem.heads // self.lists.full.shape[1] * self.lists.pairs()
        of_head = sum(
            int(self.visible(0, queries).sum())
            for queries in torch.arange(self.size.q_len, device=self.q.device).split(2048)
        )
        return self.size.batch * self.problem.heads * of_head

    def is_packed(self) -> bool:
        """Whether our call is ``varlen_attention``."""
        return isinstance(self.problem.pattern, Documents) and self.problem.pattern.packed

    def packed_call(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], **options: Any) -> Any:
        """What ``varlen_attention`` or its explanation returns for tensors (length, heads, head_dim)."""
        assert isinstance(self.problem.pattern, Documents)
        pattern = Causal() if self.problem.pattern.causal else Dense()
        return function(*tensors, pattern, cu_seqlens_q=self.cu_seqlens, **options)

    def explain(self, *, gradients: bool, arch: str | None = None) -> Explanation | KernelsExplanation:
        """The kernels that the front door takes."""
        if self.is_packed():
            tensors = [t[0].transpose(0, 1) for t in (self.q, self.k, self.v)]
            found = self.packed_call(explain_varlen_attention, tensors, gradients=gradients, arch=arch)
            assert isinstance(found, KernelsExplanation)
            return found
        inputs = (self.q, self.k, self.v, self.pattern)
        return explain_attention(*inputs, sink=self.sink, gradients=gradients, arch=arch)


@dataclass(frozen=True)
class ProductInputs:
    """Tensors of a call of ``bsr_matmul``.

    Attributes:
        sparse: (rows, columns), layout torch.sparse_bsr.
        b: (columns, tokens), stored as the problem's activations are.
        dense: (rows, columns) without zeros, for dense products: with a matrix that is mostly zeros, which draws less
            power, cuBLAS would run faster than with a model's weights.
        dout: the gradient of the result; None forward.
    """

    problem: ProductProblem
    size: ProductSize
    sparse: torch.Tensor
    b: torch.Tensor
    dense: torch.Tensor
    dout: torch.Tensor | None

    @cached_property
    def prepared(self) -> BsrMatrix:
        """The weight as it is used in many calls."""
        return prepare_bsr(self.sparse)

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 (stored blocks,): block rows, and block columns."""
        counts = self.sparse.crow_indices().diff().long()
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        return rows, self.sparse.col_indices().long()

    def stored(self) -> torch.Tensor:
        """(rows, columns): the weight with zeros where no block is stored."""
        size, values = self.size.block, self.sparse.values()
        shape = (self.problem.rows // size, self.problem.columns // size, size, size)
        blocks = torch.zeros(shape, device=values.device, dtype=values.dtype)
        blocks[self.places()] = values
        return blocks.transpose(1, 2).reshape(self.problem.rows, self.problem.columns)

    def explain(self, *, gradients: bool, arch: str | None = None) -> MatmulExplanation:
        """The kernels that the front door takes."""
        return explain_matmul(self.prepared, self.b, gradients=gradients, arch=arch)


@dataclass(frozen=True)
class AttentionRow:
    """An attention problem at one size.

    Attributes:
        backward: whether the gradients are what is timed.
    """

    problem: AttentionProblem
    size: Size
    backward: bool = False

    @property
    def name(self) -> str:
        """What --only matches."""
        return f"{self.problem.name}-{self.size.label}" + ("-backward" if self.backward else "")

    def inputs(self, device: torch.device) -> AttentionInputs:
        """Random normal tensors and lists."""
        problem, size, dtype = self.problem, self.size, DTYPES[self.problem.dtype]

        def tensor(heads: int, length: int) -> torch.Tensor:
            return torch.randn((size.batch, heads, length, problem.head_dim), device=device, dtype=dtype)

        q, k, v = (
            tensor(heads, length)
            for heads, length in (
                (problem.heads, size.q_len),
                (problem.kv_count, size.keys),
                (problem.kv_count, size.keys),
            )
        )
        cu_seqlens = documents = None
        if isinstance(problem.pattern, Documents):
            bounds = problem.pattern.boundaries(size.q_len)
            tokens = torch.arange(size.q_len, dtype=torch.int32)
            documents = torch.searchsorted(bounds, tokens, right=True).to(device)
            cu_seqlens = bounds.to(device)
            pattern: Pattern = convert.from_cu_seqlens(cu_seqlens, total=size.q_len, causal=problem.pattern.causal)
            lists = None
        else:
            pattern, lists = problem.pattern.made(problem, size, device)
        sink = torch.randn(problem.heads, device=device) if problem.sink else None
        dout = torch.randn_like(q) if self.backward else None
        return AttentionInputs(problem, size, q, k, v, pattern, lists, cu_seqlens, sink, dout, documents)

    def flops(self, inputs: AttentionInputs) -> float:
        """Two products over each visible pair, backward five."""
        return (10.0 if self.backward else 4.0) * self.problem.head_dim * inputs.pairs()


@dataclass(frozen=True)
class ProductRow:
    """A product at one size.

    Attributes:
        backward: whether the gradients are what is timed.
    """

    problem: ProductProblem
    size: ProductSize
    backward: bool = False

    @property
    def name(self) -> str:
        """What --only matches."""
        return f"{self.problem.name}-{self.size.label}" + ("-backward" if self.backward else "")

    def inputs(self, device: torch.device) -> ProductInputs:
        """Random normal tensors; of the weight's blocks a random share. On ``meta`` the places are on the CPU."""
        problem, size, dtype = self.problem, self.size, DTYPES[self.problem.dtype]
        places = torch.device("cpu") if device.type == "meta" else device
        shape = (problem.rows // size.block, problem.columns // size.block)
        stored = round(shape[0] * shape[1] * (1 - size.sparsity))
        chosen = torch.rand(shape[0] * shape[1], device=places).topk(stored).indices.sort().values
        counts = torch.bincount(torch.div(chosen, shape[1], rounding_mode="floor"), minlength=shape[0])
        pointers = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        columns = (chosen % shape[1]).to(torch.int32)
        of_block = (stored, size.block, size.block)
        if device.type == "meta":  # values on the CPU too, of which nothing is read
            values = torch.empty((1, 1, 1), dtype=dtype).expand(of_block)
        else:
            values = torch.randn(of_block, device=device, dtype=dtype)
        whole = (problem.rows, problem.columns)
        sparse = torch.sparse_bsr_tensor(pointers, columns, values, size=whole, check_invariants=False)

        def tensor(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, device=places, dtype=dtype)

        by_tokens = problem.activations == "tokens"
        b = tensor(size.tokens, problem.columns).mT if by_tokens else tensor(problem.columns, size.tokens)
        dense = torch.empty(whole, device="meta", dtype=dtype) if device.type == "meta" else tensor(*whole)
        dout = tensor(problem.rows, size.tokens) if self.backward else None
        return ProductInputs(problem, size, sparse, b, dense, dout)

    def flops(self, inputs: ProductInputs) -> float:
        """Two for each stored element and token, backward four."""
        return (4.0 if self.backward else 2.0) * inputs.sparse.values().numel() * self.size.tokens


Row = AttentionRow | ProductRow


@cache
def table() -> Table:
    """The table as it is in models.yaml."""
    return Table.model_validate(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


def rows() -> list[Row]:
    """All rows: headline rows forward, those backward, then the rest."""
    every = list(_rows())
    return sorted(every, key=lambda row: (not row.size.headline, row.backward))


def _rows() -> Iterator[Row]:
    kinds: tuple[tuple[Sequence[Any], Callable[..., Row]], ...] = (
        (table().attention, lambda problem, size, **more: AttentionRow(problem.at(size), size, **more)),
        (table().products, ProductRow),
    )
    for problems, make in kinds:
        for problem in problems:
            for size in problem.sizes:
                yield make(problem, size)
                if size.gradients:
                    yield make(problem, size, backward=True)
