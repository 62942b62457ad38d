"""What the backend computes of a layer of vLLM, without vLLM's classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from codegen.arch import ARCHS
from codegen.select.paged import PREFILL_QUERIES, PagedCall, queries_of_kernels
from runtime.errors import ArgumentError
from runtime.integrations.vllm.policies import LayerCall, Policy
from runtime.key_lists import KeyLists
from runtime.ops.attention_choice import DTYPES, arch_of
from runtime.ops.paged import paged_attention, paged_workspace
from runtime.ops.paged_calls import HEAD_DIMS, verified_packs
from runtime.ops.varlen import varlen_attention
from runtime.ops.varlen_calls import refuses_unverified
from runtime.patterns import Causal, Dense, Pattern, SlidingWindow

NAME = "CUSTOM"
"""Name of the backend in vLLM: the one that it keeps for other packages."""
E4M3_CACHES = ("fp8", "fp8_e4m3")
"""Names of e4m3 caches in vLLM, which stores them as uint8."""
SAME_CACHES = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types of caches with 16 bits by name; None for that of the model."""
PAGE_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Tokens of a page. vLLM divides other blocks of n * 16 tokens into such pages."""
ELSEWHERE = "select another --attention-backend, such as FLASH_ATTN, for this model"
_HEAD_SIZES = "head sizes are {}, with an e4m3 cache {}".format(
    *(", ".join(map(str, HEAD_DIMS[cache])) for cache in ("same", "e4m3"))
)
HINTS = {
    "head_size": _HEAD_SIZES,
    "dtype": "dtypes are float16 and bfloat16: --dtype",
    "kv_cache_dtype": f"caches are {', '.join((*SAME_CACHES, *E4M3_CACHES))}: --kv-cache-dtype",
    "block_size": "blocks are multiples of 16 tokens: --block-size",
    "compute capability": f"kernels are written for {', '.join(ARCHS)}",
    "MLA": "K and V have one head size, and MLA's have two",
    "sparse": "a model that selects keys imports functions of sparse_kernel_codegen.integrations.vllm instead",
    "attention type": "only layers of decoders, which have a KV cache, are computed",
    "DCP": "context parallelism divides the keys of a request: --decode-context-parallel-size 1",
    "PCP": "context parallelism divides the keys of a request: --prefill-context-parallel-size 1",
}
"""What is served, by the beginning of vLLM's reason."""


_PROMPT = 4096
"""Tokens of a long prompt."""


def are_new(queries: torch.Tensor, keys: torch.Tensor | None) -> bool:
    """Whether requests are prompts without earlier keys, of many queries on average.

    Args:
        queries: (requests,), queries of each request, on the CPU.
        keys: (requests,), keys of each request or more, on the CPU; None if not known there.
    """
    many = int(queries.sum()) >= PREFILL_QUERIES * queries.shape[0]
    return keys is not None and many and bool((queries == keys).all())


def explained(reasons: list[str]) -> list[str]:
    """vLLM's reasons against a layer, with what is served instead.

    Args:
        reasons: as ``validate_configuration`` of vLLM's base class returns them; empty for a layer that is served.
    """
    if not reasons:
        return []
    hints = ((reason, next((HINTS[name] for name in HINTS if reason.startswith(name)), "")) for reason in reasons)
    return [*(f"{reason} ({hint})" if hint else reason for reason, hint in hints), ELSEWHERE]


def unserved(head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, capability: tuple[int, int]) -> str | None:
    """The reason against a layer whose parts are served alone, but not together; None for none.

    Args:
        head_size: elements of a head.
        dtype: of the model.
        kv_cache_dtype: vLLM's name of the type of the cache.
        capability: compute capability of the GPU.
    """
    cache = SAME_CACHES.get(kv_cache_dtype or "auto")
    if cache is not None and cache != dtype:
        return f"kv_cache_dtype {kv_cache_dtype} with queries in {dtype}: --kv-cache-dtype auto"
    if kv_cache_dtype not in E4M3_CACHES:
        return None
    if head_size in HEAD_DIMS["same"] and head_size not in HEAD_DIMS["e4m3"]:
        return f"head_size {head_size} with kv_cache_dtype {kv_cache_dtype} ({_HEAD_SIZES})"
    arch = next((arch for arch in ARCHS.values() if arch.compute_capability == capability), None)
    if arch is not None and not arch.has_fp8:
        return f"kv_cache_dtype {kv_cache_dtype} on sm_{capability[0]}{capability[1]}, which has no FP8 instructions"
    return None


class Requests(NamedTuple):
    """Requests of a batch that a call computes.

    Attributes:
        block_table: int32 (batch, pages of the longest request).
        seq_lens: int32 (batch,), keys of each request.
        cu_seqlens_q: int32 (batch + 1,), first token of each request, counted from the first one of ``tokens``, then
            the end of the last one.
        max_query_len: queries of a request at most.
        causal: whether a query sees no later keys.
        tokens: their tokens in the batch, and padding behind them.
        are_new: whether they are prompts without earlier keys, of many queries each.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_query_len: int
    causal: bool
    tokens: slice
    are_new: bool = False


class Most(NamedTuple):
    """The largest batch of an engine.

    Attributes:
        batch: requests.
        tokens: queries of all requests.
    """

    batch: int
    tokens: int


@dataclass
class Layer:
    """An attention layer.

    Attributes:
        heads: query heads.
        kv_heads: heads of K and V.
        head_size: elements of a head.
        scale: softmax scale.
        window: keys that a query sees, with its own; None for all.
        softcap: cap of the logits, or None.
        sink: (heads,), logits that join the sums, or None.
        is_e4m3: whether the cache is e4m3.
        batch_invariant: whether results do not depend on the other requests of a batch.
        policy: chooses the keys of a layer without a window; None for all keys.
        most: the largest batch; None if it is not known.
        workspace: memory of calls, None before ``prepare``.
    """

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sink: torch.Tensor | None = None
    is_e4m3: bool = False
    batch_invariant: bool = False
    policy: Policy | None = None
    most: Most | None = None
    workspace: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.sink is not None and tuple(self.sink.shape) != (self.heads,):
            raise ArgumentError("sinks", f"has shape {tuple(self.sink.shape)}, expected (num_heads {self.heads},)")
        left = None if self.window is None else self.window - 1
        self._causal: Pattern = Causal() if left is None else SlidingWindow(left)
        self._all: Pattern = Dense() if left is None else SlidingWindow(left, left)
        self._packs = False

    def prepare(self, dtype: torch.dtype, sink: torch.Tensor | None) -> None:
        """Allocate memory and load the kernel, on the current GPU. Called again, it clears the memory.

        Args:
            dtype: of queries.
            sink: the loaded logits, in any floating-point type.

        Raises:
            CodegenError: if the kernel cannot be loaded.
        """
        self.sink = None if sink is None else sink.detach().float().contiguous()
        device, sizes = torch.cuda.current_device(), (1, 1, 1, 1)
        if self.batch_invariant and self.most is not None:
            batch = self.most.batch if self.policy is None else max(self.most)
            sizes = (batch, self.most.tokens, self.heads, self.kv_heads)
        if not self.batch_invariant or self.most is not None:
            self.workspace = _workspace(device, self.head_size, sizes, self.batch_invariant).zero_()
        self._packs = self._has_slow_prompts(arch_of(torch.device("cuda", device)), dtype)
        group, has_sink = self.heads // self.kv_heads, sink is not None
        _load(device, dtype, self.head_size, group, is_e4m3=self.is_e4m3, has_sink=has_sink, softcap=self.softcap)
        if self._packs:
            self._load_packed(torch.device("cuda", device), dtype)

    def _load_packed(self, device: torch.device, dtype: torch.dtype) -> None:
        """Load the kernel of packed prompts, by a call."""
        q, k = (torch.zeros(1, n, self.head_size, dtype=dtype, device=device) for n in (self.heads, self.kv_heads))
        bounds = torch.tensor([0, 1], dtype=torch.int32, device=device)
        options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sink": self.sink}
        varlen_attention(q, k, k, self._causal, cu_seqlens_q=bounds, **options)

    def _has_slow_prompts(self, arch: str, dtype: torch.dtype) -> bool:
        """Whether no prefill kernel computes prompts of the layer, and packed sequences have its results."""
        options: dict[str, Any] = {"sink": self.sink is not None, "softcap": self.softcap}
        name = DTYPES[dtype]
        call = PagedCall(
            *(arch, name, self.head_size, self.heads, self.kv_heads),
            queries=_PROMPT,
            requests=1,
            page_size=PAGE_SIZES[0],
            max_keys=_PROMPT,
            verified=verified_packs(arch, name, self.head_size, **options),
            **options,
        )
        keeps_pages = (
            self.is_e4m3 or self.batch_invariant or refuses_unverified()
        )  # kernels over pages have receipts for all options
        return bool(call.decode_reason()) and not keeps_pages

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (pages, kv_heads, page_size, head_size) of vLLM's cache, whose rows have both."""
        if self.is_e4m3:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        k_cache, v_cache = kv_cache.split(self.head_size, -1)
        return k_cache, v_cache

    def attend(
        self,
        name: str,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        requests: Requests,
        out: torch.Tensor,
        *,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Compute a call.

        Args:
            name: of the layer.
            query: (tokens, heads, head_size) of the batch.
            kv_cache: (pages, kv_heads, page_size, 2 * head_size), any strides.
            requests: requests of the batch. Tokens of others are not written.
            out: (tokens, heads, head_size), where to write the result.
            k_scale: float32 of 1 or kv_heads elements: K is an e4m3 cache times k_scale.
            v_scale: the same for V.
            new: K and V (tokens, kv_heads, head_size) of the batch's tokens; None for a layer that reads the cache of
                another.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        query, out = query[requests.tokens], out[requests.tokens]
        k_cache, v_cache = self.caches(kv_cache)
        scales: dict[str, Any] = {"k_scale": k_scale.view(-1), "v_scale": v_scale.view(-1)} if self.is_e4m3 else {}
        pattern: Pattern | KeyLists = self._causal if requests.causal else self._all
        if self.policy is not None and self.window is None and requests.causal:
            call = LayerCall(name, query, k_cache, v_cache, *requests[:4])
            chosen = self.policy(call)
            pattern = pattern if chosen is None else chosen
        if self._packs and requests.are_new and new is not None and isinstance(pattern, Pattern):
            k, v = (rows[requests.tokens] for rows in new)
            options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sink": self.sink}
            varlen_attention(query, k, v, pattern, cu_seqlens_q=requests.cu_seqlens_q, out=out, **options)
            return
        paged_attention(
            query,
            k_cache,
            v_cache,
            pattern,
            block_table=requests.block_table,
            seq_lens=requests.seq_lens,
            cu_seqlens_q=requests.cu_seqlens_q,
            layout="HND",
            scale=self.scale,
            softcap=self.softcap,
            sink=self.sink,
            out=out,
            workspace=self._memory(query.shape[0], requests.seq_lens.shape[0]),
            batch_invariant=self.batch_invariant,
            **scales,
        )

    def _memory(self, tokens: int, batch: int) -> torch.Tensor | None:
        """Workspace of a call; None if the call is larger than the largest batch, and allocates its own."""
        if not self.batch_invariant or (
            self.most is not None and batch <= self.most.batch and tokens <= self.most.tokens
        ):
            return self.workspace
        return None


@lru_cache(maxsize=16)
def _workspace(device: int, head_size: int, sizes: tuple[int, int, int, int], batch_invariant: bool) -> torch.Tensor:
    """Workspace that layers share. Attention layers of an engine run one after the other."""
    names = zip(("batch", "tokens", "heads", "kv_heads"), sizes, strict=True)
    return paged_workspace(**dict(names), head_dim=head_size, batch_invariant=batch_invariant, device=device)


@lru_cache(maxsize=64)
def _load(
    device: int,
    dtype: torch.dtype,
    head_size: int,
    group: int,
    *,
    is_e4m3: bool,
    has_sink: bool,
    softcap: float | None,
) -> None:
    """Load the kernels of layers of a kind, by calls of one request."""
    where: dict[str, Any] = {"device": torch.device("cuda", device)}
    cache = torch.zeros(2, 1, PAGE_SIZES[0], head_size, dtype=torch.float8_e4m3fn if is_e4m3 else dtype, **where)
    table = torch.zeros(1, 1, dtype=torch.int32, **where)
    options: dict[str, Any] = {
        "block_table": table,
        "layout": "HND",
        "workspace": _workspace(device, head_size, (1, 1, 1, 1), False),
        "sink": torch.zeros(group, dtype=torch.float32, **where) if has_sink else None,
        "softcap": softcap,
    }
    for queries in queries_of_kernels(arch_of(where["device"]), group):
        query = torch.zeros(queries, group, head_size, dtype=dtype, **where)
        paged_attention(query, cache[:1], cache[1:], Causal(), **options)
