"""Rows of benchmarks/engines.py: layers of published models as engines call them, their inputs, and float32 results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import serving_rows
import torch
from serving_rows import make_table

BF16 = torch.bfloat16
COMPARED = 128
"""Tokens of a result that are compared with float32: evenly spread ones, the first and the last among them."""
TILE = (4, 4, 4)
"""Tokens of a tile of video sparse attention along each axis of a video."""


class Model(NamedTuple):
    """A model, or a layer of one.

    Attributes:
        name: of the model.
        source: URL of its sizes.
        heads: query heads.
        kv_heads: heads of K and V.
        head_dim: elements per head.
        layers: how many such layers it has; None if the source does not say.
    """

    name: str
    source: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int | None


HUB = "https://huggingface.co"
LLAMA = Model("Llama 3 8B", f"{HUB}/meta-llama/Meta-Llama-3-8B/blob/main/config.json", 32, 8, 128, 32)
QWEN = Model("Qwen3 8B", f"{HUB}/Qwen/Qwen3-8B/blob/main/config.json", 32, 8, 128, 36)
WAN = Model("Wan 2.1 14B", f"{HUB}/Wan-AI/Wan2.1-T2V-14B-Diffusers/blob/main/transformer/config.json", 40, 40, 128, 40)
TRANSFORMERS = "https://github.com/huggingface/transformers/blob/main/src/transformers/models"
MINIMAX = Model("MiniMax M3", f"{TRANSFORMERS}/minimax_m3_vl/configuration_minimax_m3_vl.py", 64, 4, 128, None)
QSA = Model("Qwen4Exp", "../notebook/serving.md#lists-of-tokens", 24, 2, 256, None)


class Window(NamedTuple):
    """A streaming window.

    Attributes:
        sink: first keys.
        left: keys before the query's own.
    """

    sink: int
    left: int

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether queries at these positions see keys at these, as far as causality allows."""
        return (key < self.sink) | (key >= query - self.left)


class Pages(NamedTuple):
    """Requests whose keys are in pages, as vLLM, SGLang and transformers call a layer.

    Attributes:
        lengths: keys of each request.
        queries: queries of each request, at its last keys.
        page: tokens of a page.
        window: what a query sees; None for all keys up to its own.
    """

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    page: int
    window: Window | None = None


class Video(NamedTuple):
    """A video of one request.

    Attributes:
        grid: frames, rows and columns of tokens.
        pattern: dense, window (of tiles) or VSA.
        window: tiles that a tile sees along each axis.
        tile: tokens of a tile along each axis.
        sparsity: of VSA.
    """

    grid: tuple[int, int, int]
    pattern: str
    window: tuple[int, int, int] = (3, 3, 3)
    tile: tuple[int, int, int] = (2, 8, 8)
    sparsity: float = 0.9


class Prompt(NamedTuple):
    """The prompt of one request, without a cache.

    Attributes:
        length: tokens.
        window: what a query sees; None for all keys up to its own.
    """

    length: int
    window: Window | None = None


Sizes = Pages | Video | Prompt | serving_rows.Row


@dataclass(frozen=True)
class Row:
    """A call of a layer.

    Attributes:
        page: table of the row, a key of ``engines_page.PAGES``.
        text: the call, in the table.
        model: whose layer is called.
        sizes: of the call.
    """

    page: str
    text: str
    model: Model
    sizes: Sizes

    @property
    def name(self) -> str:
        """Name in results."""
        return f"{self.page}: {self.model.name}, {self.text}"

    @property
    def tokens(self) -> int:
        """Queries of the call."""
        sizes = self.sizes
        if isinstance(sizes, Pages):
            return sum(sizes.queries)
        if isinstance(sizes, Video):
            return math.prod(sizes.grid)
        return sizes.length if isinstance(sizes, Prompt) else len(sizes.lengths) * sizes.queries

    @property
    def shape(self) -> dict[str, Any]:
        """Sizes for the record."""
        if isinstance(self.sizes, serving_rows.Row):
            return self.sizes.shape
        found = {
            name: list(value) if isinstance(value, tuple) else value for name, value in self.sizes._asdict().items()
        }
        if isinstance(self.sizes, Pages):
            pairs = list(zip(self.sizes.lengths, self.sizes.queries, strict=True))
            del found["lengths"], found["queries"]
            found["requests"] = [[*pair, pairs.count(pair)] for pair in dict.fromkeys(pairs)]
        return found


class Problem(Protocol):
    """Inputs of a row, and what is right."""

    def exact(self, *, all_keys: bool) -> torch.Tensor:
        """float32, of the tokens that are compared; ``all_keys``: without the pattern of the row."""

    def compared(self, out: torch.Tensor) -> torch.Tensor:
        """The same tokens of a result."""


def compared_tokens(count: int, device: torch.device) -> torch.Tensor:
    """Indices of the tokens that are compared."""
    return torch.linspace(0, count - 1, min(count, COMPARED), device=device).round().long()


@dataclass(frozen=True)
class PagedProblem:
    """Tensors of ``Pages``.

    Attributes:
        row: the row.
        q: (tokens, heads, head_dim).
        rows: (pages, page_size, kv_heads, 2 * head_dim), K and V of a token in a row, as vLLM keeps them.
        table: int32 (batch, pages of the longest request).
        lengths: int32 (batch,).
        bounds: int32 (batch + 1,), first token of each request, then the end of the last one.
    """

    row: Row
    q: torch.Tensor
    rows: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    bounds: torch.Tensor

    @property
    def sizes(self) -> Pages:
        """Sizes of the row."""
        assert isinstance(self.row.sizes, Pages)
        return self.row.sizes

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (pages, page_size, kv_heads, head_dim), views."""
        k, v = self.rows.split(self.row.model.head_dim, -1)
        return k, v

    def exact(self, *, all_keys: bool) -> torch.Tensor:
        """Attention of the tokens that are compared."""
        sizes, found = self.sizes, []
        firsts = self.bounds.tolist()
        kept: tuple[int, Any] = (-1, None)
        for token in compared_tokens(len(self.q), self.q.device).tolist():
            request = next(i for i in range(len(sizes.lengths)) if token < firsts[i + 1])
            length = sizes.lengths[request]
            if kept[0] != request:
                pages = self.table[request, : -(-length // sizes.page)].long()
                kept = (request, self.rows[pages].flatten(0, 1)[:length].transpose(0, 1).float())
            k, v = kept[1].split(self.row.model.head_dim, -1)
            position = length - sizes.queries[request] + token - firsts[request]
            key = torch.arange(length, device=k.device)
            seen = key <= position
            if sizes.window is not None and not all_keys:
                seen &= sizes.window.sees(torch.tensor(position, device=k.device), key)
            found.append(attended(self.q[token, :, None], k, v, seen)[:, 0])
        return torch.stack(found)

    def compared(self, out: torch.Tensor) -> torch.Tensor:
        """The tokens of a result that are compared; a result may be flat."""
        out = out.view(self.q.shape)
        return out[compared_tokens(len(out), out.device)]


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """float32 attention of q (heads, queries, d) over k and v (kv_heads, keys, d), with a mask for all heads."""
    grouped = q.float().unflatten(0, (k.shape[0], -1))
    logits = grouped @ k.float()[:, None].mT * q.shape[-1] ** -0.5
    return (logits.masked_fill(~seen, -torch.inf).softmax(-1) @ v.float()[:, None]).flatten(0, 1)


def make_pages(row: Row, device: torch.device) -> PagedProblem:
    """Normal numbers, pages in random order."""
    sizes, model = row.sizes, row.model
    assert isinstance(sizes, Pages)
    table, pages = make_table(sizes.lengths, sizes.page, device)
    bounds = torch.tensor([0, *sizes.queries]).cumsum(0).int()
    return PagedProblem(
        row,
        torch.randn(sum(sizes.queries), model.heads, model.head_dim, dtype=BF16, device=device),
        torch.randn(pages, sizes.page, model.kv_heads, 2 * model.head_dim, dtype=BF16, device=device),
        table,
        torch.tensor(sizes.lengths, dtype=torch.int32, device=device),
        bounds.to(device),
    )


@dataclass(frozen=True)
class ListedProblem:
    """Tensors of a row of benchmarks/serving.py, all of whose result is compared.

    Attributes:
        row: the row.
        inputs: of that benchmark.
    """

    row: Row
    inputs: serving_rows.Inputs

    def exact(self, *, all_keys: bool) -> torch.Tensor:
        """Attention over the lists."""
        return self.inputs.exact()

    def compared(self, out: torch.Tensor) -> torch.Tensor:
        """The result."""
        return out


Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Which keys queries see, both int64 of tokens: bool (queries, keys)."""


@dataclass(frozen=True)
class WholeProblem:
    """Tensors of a sequence without a cache.

    Attributes:
        row: the row.
        q: (1, tokens, heads, head_dim).
        k: (1, tokens, kv_heads, head_dim).
        v: as k.
        mask: of the row.
        all_keys: that of the model.
        gate: as q, factors of the coarse part of VSA; None otherwise.
        kept: of VSA, once a call is made: its coarse part, its lists and its tiles.
    """

    row: Row
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: Mask
    all_keys: Mask
    gate: torch.Tensor | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> torch.Tensor:
        """Tokens that are compared."""
        return compared_tokens(self.q.shape[1], self.q.device)

    def exact(self, *, all_keys: bool) -> torch.Tensor:
        """Attention of the tokens that are compared: (tokens, heads, head_dim)."""
        query, key = self.tokens, torch.arange(self.k.shape[1], device=self.k.device)
        q, k, v = (x[0].transpose(0, 1) for x in (self.q[:, query], self.k, self.v))
        coarse = None
        if all_keys or self.gate is None:
            seen = (self.all_keys if all_keys else self.mask)(query, key)[None].expand(q.shape[0], -1, -1)
        else:
            tile = self.kept["tile"]
            selected, means = self.kept["selected"][0], self.kept["coarse"][0]
            chosen = torch.zeros(*selected.shape[:2], len(self.kept["sizes"]), dtype=torch.bool, device=q.device)
            seen = chosen.scatter_(-1, selected, True)[:, tile[query]][:, :, tile]
            coarse = means[:, tile[query]].float() * self.gate[0, query].transpose(0, 1).float()
        parts = []
        for head in range(self.row.model.kv_heads):
            group = self.row.model.heads // self.row.model.kv_heads
            heads = slice(head * group, (head + 1) * group)
            parts += [attended(q[heads], k[head : head + 1], v[head : head + 1], seen[heads])]
        found = torch.cat(parts)
        return (found if coarse is None else found + coarse).transpose(0, 1)

    def compared(self, out: torch.Tensor) -> torch.Tensor:
        """The tokens of a result (1, tokens, heads, head_dim) that are compared."""
        return out[0, self.tokens]


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= query[:, None]


def _everything(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(query), len(key), dtype=torch.bool, device=key.device)


def _streaming(window: Window, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return _causal(query, key) & window.sees(query[:, None], key)


def _tiles(sizes: Video, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Which tiles see each other: a window around the query's, moved inside of the video."""
    seen = _everything(query, key)
    for axis, side in enumerate(sizes.grid):
        stride = math.prod(sizes.grid[axis + 1 :])
        own, other = (token // stride % side // sizes.tile[axis] for token in (query, key))
        count = -(-side // sizes.tile[axis])
        first = (own - sizes.window[axis] // 2).clamp(0, max(count - sizes.window[axis], 0))[:, None]
        seen &= (other >= first) & (other < first + sizes.window[axis])
    return seen


def make_whole(row: Row, device: torch.device) -> WholeProblem:
    """Normal numbers."""
    model, sizes = row.model, row.sizes
    assert isinstance(sizes, (Video, Prompt))
    rows = torch.randn(1, row.tokens, model.heads + 2 * model.kv_heads, model.head_dim, dtype=BF16, device=device)
    q, k, v = rows.split([model.heads, model.kv_heads, model.kv_heads], 2)
    if isinstance(sizes, Prompt):
        mask: Mask = _causal if sizes.window is None else partial(_streaming, sizes.window)
        return WholeProblem(row, q, k, v, mask, _causal)
    q, k, v = (x.contiguous() for x in (q, k, v))
    mask = partial(_tiles, sizes) if sizes.pattern == "window" else _everything
    gate = torch.rand(q.shape, dtype=BF16, device=device) if sizes.pattern == "VSA" else None
    return WholeProblem(row, q, k, v, mask, _everything, gate)


def make_problem(row: Row, device: torch.device) -> Any:
    """Inputs of a row."""
    if isinstance(row.sizes, Pages):
        return make_pages(row, device)
    if isinstance(row.sizes, serving_rows.Row):
        return ListedProblem(row, serving_rows.make_inputs(row.sizes, device))
    return make_whole(row, device)


def _listed(name: str) -> serving_rows.Row:
    """A row of benchmarks/serving.py."""
    named: Mapping[str, serving_rows.Row] = {row.name: row for row in serving_rows.ROWS}
    return named[name]


def _chunk(of: serving_rows.Row) -> serving_rows.Row:
    """A chunk of 2048 queries, where benchmarks/serving.py has more."""
    return serving_rows.replace(of, batch=of.batch.replace(str(of.queries), "2048"), queries=2048)


MSA_PREFILL = "MSA prefill 8192 queries over 32768 keys h64:4"
QSA_PREFILL = "QSA prefill 4096 queries over 32768 keys h24:2"
STEPS = ((4096,) * 64, (1,) * 64)
STREAM = Window(4, 4095)
VIDEO = (21, 30, 52)
"""Tokens of 81 frames of 832 x 480: 4 frames and 16 x 16 pixels each, the first frame alone."""
ROWS = (
    Row("vllm", "64 steps over 4096 keys", LLAMA, Pages(*STEPS, 16)),
    Row("vllm", "16 steps over 32768 keys", LLAMA, Pages((32768,) * 16, (1,) * 16, 16)),
    Row(
        "vllm", "the same, policy: window of 4096 and 4 first keys", LLAMA, Pages((32768,) * 16, (1,) * 16, 16, STREAM)
    ),
    Row(
        "vllm",
        "a prompt of 2048 beside 32 steps over 4096",
        LLAMA,
        Pages((*(4096,) * 32, 2048), (*(1,) * 32, 2048), 16),
    ),
    Row("vllm", "a prompt of 8192", LLAMA, Pages((8192,), (8192,), 16)),
    Row("vllm", "32 steps over lists of 16 blocks, bf16 cache", MINIMAX, _listed("MSA batch 32, 1 query h64:4 bf16")),
    Row("vllm", "32 steps over lists of 16 blocks, e4m3 cache", MINIMAX, _listed("MSA batch 32, 1 query h64:4 e4m3")),
    Row("vllm", "2048 queries of a prompt over lists of 16 blocks", MINIMAX, _chunk(_listed(MSA_PREFILL))),
    Row("vllm", "32 steps over lists of 2048 tokens", QSA, _listed("QSA batch 32 h24:2")),
    Row("sglang", "64 steps over 4096 keys, pages of 64", QWEN, Pages(*STEPS, 64)),
    Row("sglang", "64 steps over 4096 keys, pages of 1", QWEN, Pages(*STEPS, 1)),
    Row("sglang", "64 verifications of 4 drafts over 4096 keys, pages of 64", QWEN, Pages((4096,) * 64, (4,) * 64, 64)),
    Row("sglang", "a prompt of 8192, pages of 64", QWEN, Pages((8192,), (8192,), 64)),
    Row("sglang", "a prompt of 8192, pages of 1", QWEN, Pages((8192,), (8192,), 1)),
    Row("sglang", "32 steps over lists of 16 blocks, bf16 cache", MINIMAX, _listed("MSA batch 32, 1 query h64:4 bf16")),
    Row("sglang", "32 steps over lists of 16 blocks, e4m3 cache", MINIMAX, _listed("MSA batch 32, 1 query h64:4 e4m3")),
    Row("sglang", "2048 queries of a prompt over lists of 16 blocks", MINIMAX, _chunk(_listed(MSA_PREFILL))),
    Row("sglang", "2048 queries of a prompt over lists of 2048 tokens", QSA, _chunk(_listed(QSA_PREFILL))),
    Row("sglang-diffusion", "the model's own attention", WAN, Video(VIDEO, "dense")),
    Row("sglang-diffusion", "VSA, a tenth of the tiles", WAN, Video(VIDEO, "VSA")),
    Row("sglang-diffusion", "window of 3 x 3 x 3 tiles of 2 x 8 x 8", WAN, Video(VIDEO, "window")),
    Row("transformers", "a prompt of 8192", LLAMA, Prompt(8192)),
    Row("transformers", "a prompt of 8192, window of 1024 and 4 first keys", LLAMA, Prompt(8192, Window(4, 1023))),
    Row("transformers", "continuous batching, 32 steps over 4096 keys", LLAMA, Pages((4096,) * 32, (1,) * 32, 64)),
    Row("diffusers", "the model's own attention", WAN, Video(VIDEO, "dense")),
    Row("diffusers", "window of 3 x 3 x 3 tiles of 2 x 8 x 8", WAN, Video(VIDEO, "window")),
)
