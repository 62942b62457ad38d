"""What the backend computes of a layer of SGLang, without SGLang's classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from codegen.arch import ARCHS
from codegen.problem import PAGE_ROWS
from codegen.select.paged import PREFILL_QUERIES
from runtime.errors import ArgumentError
from runtime.ops.paged import paged_attention
from runtime.ops.paged_calls import HEAD_DIMS
from runtime.ops.varlen import varlen_attention
from runtime.ops.varlen_calls import refuses_unverified
from runtime.patterns import Causal, Pattern, SlidingWindow

NAME = "block_sparse"
"""Name of the backend in SGLang."""
ELSEWHERE = "select another --attention-backend, such as fa3, for this model"
MOST_PACKED = 2**17
"""Keys of a batch of prompts that are copied out of pages, 0.5 GB in a layer with 8 K/V heads of 128."""
CACHES = ("auto", "bf16", "bfloat16", "fp8_e4m3")
"""Values of ``--kv-cache-dtype``."""
_HEAD_SIZES = "head sizes are {}, with an e4m3 cache {}".format(
    *(", ".join(map(str, HEAD_DIMS[cache])) for cache in ("same", "e4m3"))
)


@dataclass(frozen=True)
class Server:
    """What the backend knows of a server.

    Attributes:
        dtype: of the model.
        cache: type of the KV cache.
        cache_name: ``--kv-cache-dtype``.
        page_size: tokens of a page.
        capability: compute capability of the GPU.
        refused: features that are not supported, each with what to choose instead, by whether the server has them.
        chunk: keys of a chunk that layers with rotary embeddings see alone; None for all.
    """

    dtype: torch.dtype
    cache: torch.dtype
    cache_name: str
    page_size: int
    capability: tuple[int, int]
    refused: dict[tuple[str, str], bool]
    chunk: int | None = None

    def __post_init__(self) -> None:
        for (name, instead), given in self.refused.items():
            if given:
                raise ArgumentError(name, f"is not supported: {instead}")
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ArgumentError("--dtype", f"is {self.dtype}, expected float16 or bfloat16")
        if self.cache_name not in CACHES or self.cache not in (self.dtype, torch.float8_e4m3fn):
            found = f"is {self.cache_name}, {self.cache} with a model in {self.dtype}"
            raise ArgumentError("--kv-cache-dtype", f"{found}, expected auto or fp8_e4m3")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ArgumentError("--page-size", f"is {self.page_size}, expected a power of two")
        arch = next((each for each in ARCHS.values() if each.compute_capability == self.capability), None)
        found = f"runs on sm_{self.capability[0]}{self.capability[1]}"
        if arch is None:
            raise ArgumentError("--attention-backend", f"{found}, kernels are written for {', '.join(ARCHS)}")
        if self.is_e4m3 and not arch.has_fp8:
            raise ArgumentError("--kv-cache-dtype", f"{found}, which has no FP8 instructions: choose auto")

    @property
    def is_e4m3(self) -> bool:
        """Whether the cache is e4m3."""
        return bool(self.cache == torch.float8_e4m3fn)

    @property
    def has_fast_prompts(self) -> bool:
        """Whether a prefill kernel reads the pages of prompts."""
        hopper = any(arch.has_wgmma and arch.compute_capability == self.capability for arch in ARCHS.values())
        return hopper and self.page_size >= PAGE_ROWS

    def packs(self, *, requests: int, queries: int, keys: int) -> bool:
        """Whether a batch of prompts is computed over packed keys, as packed sequences.

        Args:
            requests: of the batch.
            queries: of all requests.
            keys: of all requests.
        """
        many = queries >= PREFILL_QUERIES * requests and keys <= MOST_PACKED
        # With verified_only, kernels of packed sequences without a receipt are refused; those over pages have receipts.
        return many and not self.is_e4m3 and not self.has_fast_prompts and not refuses_unverified()


class PackedKeys(NamedTuple):
    """Keys of prompts in one tensor, sequence after sequence.

    Attributes:
        cu_seqlens: int32 (batch + 1,), first key of each request, then the end of the last one.
        slots: int64 (keys,), their places in the token pool; None if they are the tokens of the prompts.
    """

    cu_seqlens: torch.Tensor
    slots: torch.Tensor | None


class Requests(NamedTuple):
    """The requests of a batch.

    Attributes:
        block_table: int32 (batch, pages of the longest request), pages of layers with all keys.
        seq_lens: int32 (batch,), keys of each request.
        cu_seqlens_q: int32 (batch + 1,), first token of each request, then the end of the last one; None if all have
            the same number of queries.
        window_table: as block_table, pages of layers that keep only a window of keys; None without such layers.
        window_slots: (tokens,), where such layers write K and V; None without such layers.
        ahead: keys of each request that SGLang's batch does not count, and ``seq_lens`` does.
        packed: keys of prompts whose pages no kernel reads fast; None where layers read pages.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    window_table: torch.Tensor | None = None
    window_slots: torch.Tensor | None = None
    ahead: int = 0
    packed: PackedKeys | None = None


class Layer(NamedTuple):
    """An attention layer.

    Attributes:
        heads: query heads.
        kv_heads: heads of K and V.
        head_size: elements of a head.
        scale: softmax scale.
        softcap: cap of the logits, or None.
        pattern: keys that a query sees.
    """

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    softcap: float | None
    pattern: Pattern


def layer_of(layer: Any, server: Server) -> Layer:
    """Read a layer of SGLang.

    Args:
        layer: a ``RadixAttention``.
        server: of the layer.

    Raises:
        ArgumentError: naming what is not supported, with what to choose instead.
    """
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    refused = {
        ("cross attention", layer.is_cross_attention): False,
        ("attn_type", kind): "decoder",
        ("pos_encoding_mode", layer.pos_encoding_mode): "NONE",
        ("xai_temperature_len", layer.xai_temperature_len): -1,
        ("v_head_dim", layer.v_head_dim): layer.qk_head_dim,
    }
    if layer.logit_cap:
        refused["logit_capping_method", layer.logit_capping_method] = "tanh"
    if server.chunk is not None:
        refused["attention_chunk_size", server.chunk if layer.use_irope else None] = None
    for (name, value), expected in refused.items():
        if value != expected:
            raise ArgumentError(name, f"is {value} in layer {layer.layer_id}, expected {expected}: {ELSEWHERE}")
    if layer.qk_head_dim not in HEAD_DIMS["e4m3" if server.is_e4m3 else "same"]:
        found = f"is {layer.qk_head_dim} in layer {layer.layer_id} with a cache of {server.cache}"
        raise ArgumentError("head_dim", f"{found}: {_HEAD_SIZES}; {ELSEWHERE}")
    window = layer.sliding_window_size
    pattern: Pattern = Causal() if window is None or window < 0 else SlidingWindow(window)
    sizes = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
    return Layer(*sizes, float(layer.scaling), layer.logit_cap or None, pattern)


def sink_of(layer: Layer, sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Logits that join the sums, float32 (heads,), of those that SGLang passes in any floating-point type.

    Raises:
        ArgumentError: for another shape.
    """
    if sinks is None:
        return None
    if tuple(sinks.shape) != (layer.heads,):
        raise ArgumentError("sinks", f"has shape {tuple(sinks.shape)}, expected (heads {layer.heads},)")
    return sinks.detach().float().contiguous()


def write_page_table(slots: torch.Tensor, page_size: int, out: torch.Tensor) -> torch.Tensor:
    """Write the pages of slots.

    Args:
        slots: integers (batch, pages), slot page * page_size + offset of the first token of each page; -1 for none.
        page_size: tokens of a page, a power of two.
        out: int32 (batch, pages), where to write the result.

    Returns:
        ``out``, -1 where a slot is -1.
    """
    out.copy_(slots)
    return out.bitwise_right_shift_(page_size.bit_length() - 1)


def in_pages(name: str, buffer: torch.Tensor, layer: Layer, page_size: int) -> torch.Tensor:
    """View K or V of SGLang's token pool in pages.

    Args:
        name: of the buffer in errors.
        buffer: (slots, kv_heads, head_size).
        layer: of the buffer.
        page_size: tokens of a page.

    Returns:
        (pages, page_size, kv_heads, head_size).

    Raises:
        ArgumentError: for a pool with other dimensions.
    """
    expected = (layer.kv_heads, layer.head_size)
    if buffer.dim() != 1 + len(expected) or buffer.shape[1:] != expected:
        what = f"(slots, kv_heads {expected[0]}, head_dim {expected[1]})"
        reason = f"has shape {tuple(buffer.shape)}, expected {what}: unset SGLANG_USE_HND_KVCACHE, or {ELSEWHERE}"
        raise ArgumentError(name, reason)
    pages = buffer.shape[0] // page_size
    whole: torch.Tensor = buffer[: pages * page_size].unflatten(0, (pages, page_size))
    return whole


def attend(
    layer: Layer,
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    requests: Requests,
    *,
    sink: torch.Tensor | None = None,
    scales: dict[str, torch.Tensor | None] | None = None,
    workspace: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Compute a call.

    Args:
        layer: the layer.
        query: (tokens, heads * head_size).
        caches: K and V (pages, page_size, kv_heads, head_size).
        table: int32 (batch, pages), pages of the requests in these caches.
        requests: of the tokens.
        sink: float32 (heads,), logits that join the sums, or None.
        scales: factors of an e4m3 cache, ``k_scale`` and ``v_scale``, with one element; None for 1.
        workspace: memory of the call; None to allocate it.
        batch_invariant: whether results do not depend on the other requests of a batch.

    Returns:
        (tokens, heads * head_size). Tokens of no request are not written.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    factors: dict[str, Any] = {
        name: scale.detach().float().view(1) for name, scale in (scales or {}).items() if scale is not None
    }
    q = query.view(-1, layer.heads, layer.head_size)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.shape[0] > 0:
        paged_attention(
            q,
            *caches,
            layer.pattern,
            block_table=table,
            seq_lens=requests.seq_lens,
            cu_seqlens_q=requests.cu_seqlens_q,
            scale=layer.scale,
            softcap=layer.softcap,
            sink=sink,
            out=out,
            workspace=workspace,
            batch_invariant=batch_invariant,
            **factors,
        )
    return out.flatten(1)


def packed_slots(req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, keys: int) -> PackedKeys:
    """Places of the keys of requests, without a synchronization.

    Args:
        req_to_token: integers (requests of the pool, tokens), slots of SGLang's requests.
        rows: (batch,), rows of the requests in it.
        seq_lens: (batch,), keys of each request.
        keys: of all requests. Those behind the last request have any slot.
    """
    ends = torch.cumsum(seq_lens, 0, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(ends, (1, 0))
    key = torch.arange(keys, dtype=torch.int32, device=rows.device)
    request = torch.searchsorted(ends, key, right=True).clamp(max=rows.shape[0] - 1)
    positions = (key - cu_seqlens[request]).clamp(max=req_to_token.shape[1] - 1)
    return PackedKeys(cu_seqlens, req_to_token[rows[request], positions].long())


def attend_packed(
    layer: Layer,
    query: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    requests: Requests,
    *,
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a call of prompts as packed sequences.

    Args:
        layer: the layer.
        query: (tokens, heads * head_size).
        rows: K and V of ``requests.packed``, (keys, kv_heads, head_size), in the same order.
        requests: of the tokens.
        sink: as for ``attend``.

    Returns:
        (tokens, heads * head_size). Tokens of no request are not written.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    assert requests.packed is not None and requests.cu_seqlens_q is not None
    q = query.view(-1, layer.heads, layer.head_size)
    k, v = (each.view(-1, layer.kv_heads, layer.head_size) for each in rows)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    varlen_attention(
        q,
        k,
        v,
        layer.pattern,
        cu_seqlens_q=requests.cu_seqlens_q,
        cu_seqlens_k=requests.packed.cu_seqlens,
        scale=layer.scale,
        softcap=layer.softcap,
        sink=sink,
        out=out,
    )
    return out.flatten(1)
