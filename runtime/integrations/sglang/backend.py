"""The attention backend of SGLang: its class, which calls ``runtime.integrations.sglang.layers``.

``registration`` imports this module when a server selects the backend.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, maybe_create_verify_mask
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

from runtime.errors import ArgumentError
from runtime.integrations.sglang.layers import (
    ELSEWHERE,
    Layer,
    PackedKeys,
    Requests,
    Server,
    attend,
    attend_packed,
    in_pages,
    layer_of,
    packed_slots,
    sink_of,
    write_page_table,
)
from runtime.log import logger
from runtime.ops.paged import paged_workspace

_PADDED_LENGTH = 1
"""Keys of a request that pads a batch to the size of a CUDA graph."""
ALGORITHMS = ("NONE", "EAGLE", "EAGLE3", "STANDALONE")
"""Algorithms of speculative decoding whose drafts are a chain with a top-k of 1."""
CHAIN = "set --speculative-eagle-topk 1"


class PagedBackend(AttentionBackend):  # type: ignore[misc] # SGLang has no types where it is not installed
    """Layers of decoders with a KV cache, by ``paged_attention``.

    Args:
        model_runner: SGLang's, whose model is loaded and whose KV pool is allocated.
        step: number of the step from 0 on that the backend computes, in a draft model that decodes several tokens one
            after the other; None otherwise.

    Raises:
        ArgumentError: for a setting or a layer that is not supported, naming it.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, step: int | None = None) -> None:
        super().__init__()
        self._server = _server(model_runner)
        self._step = step
        self._drafts = model_runner.decode_num_tokens_per_req()
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.kv_index_translator = model_runner.kv_index_translator
        self.page_size = self._server.page_size
        self.max_context_len = self.req_to_token.shape[1]
        self._firsts = self.req_to_token[:, :: self.page_size]
        self._window_layers = _window_layers(self.token_to_kv_pool)
        self._batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        self._graph: Requests | None = None
        self._layers: dict[Any, Layer] = {}
        self._workspaces: dict[int, torch.Tensor] = {}
        layers = [each for each in model_runner.model.modules() if isinstance(each, RadixAttention)]
        for each in layers:
            self._layer(each)
        self._verify_mask = maybe_create_verify_mask(
            is_draft_runner=model_runner.is_draft_worker,
            skip_prefill=step is not None,
            max_bs=self.req_to_token.shape[0],
            max_context_len=self.max_context_len,
            num_draft_tokens=get_spec().speculative_num_draft_tokens,
            device=self.req_to_token.device,
            is_read=False,
        )
        logger().info("SGLang: %s attention layers are computed by paged_attention", len(layers))

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Where SGLang writes the mask of drafts, which is not read: they are a chain."""
        return self._verify_mask

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of a batch outside of CUDA graphs.

        Raises:
            ArgumentError: for a batch of a diffusion model, and for drafts that are no chain.
        """
        count, mode = forward_batch.batch_size, forward_batch.forward_mode
        bounds = None
        if not mode.is_decode_or_idle() and not mode.is_target_verify() and self._step is None:
            if mode.is_dllm_extend() or not mode.is_extend(include_draft_extend_v2=True):
                expected = "DECODE, EXTEND, MIXED, TARGET_VERIFY or DRAFT_EXTEND_V2"
                raise ArgumentError("forward_mode", f"is {mode.name}, expected {expected}: {ELSEWHERE}")
            ends = torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32)
            bounds = torch.nn.functional.pad(ends, (1, 0))
        requests = self._memory(count, forward_batch.seq_lens.device)._replace(ahead=self._ahead(forward_batch))
        self._write(forward_batch, requests)
        self.forward_metadata = requests._replace(
            cu_seqlens_q=bounds,
            window_slots=self._window_slots(forward_batch),
            packed=None if bounds is None else self._packed(forward_batch, bounds),
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the metadata that CUDA graphs read.

        Args:
            max_bs: requests of the largest graph.
            max_num_tokens: not read: requests of a graph have the same number of queries.
        """
        self._graph = self._memory(max_bs, self.req_to_token.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Choose the metadata of a CUDA graph; its values are computed in the graph.

        Args:
            forward_batch: of the graph.
            in_capture: not read.

        Raises:
            ArgumentError: for a graph of prompts, and for drafts that are no chain.
        """
        mode = forward_batch.forward_mode
        uniform = mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()
        if not uniform and self._step is None:
            instead = "set --cuda-graph-backend-prefill to breakable or disabled"
            raise ArgumentError("forward_mode", f"is {mode.name} in a CUDA graph, expected DECODE: {instead}")
        if self._graph is None:
            raise ArgumentError("forward_batch", "is of a CUDA graph, before init_cuda_graph_state")
        count = forward_batch.batch_size
        window = self._graph.window_table
        self.forward_metadata = Requests(
            self._graph.block_table[:count],
            self._graph.seq_lens[:count],
            window_table=None if window is None else window[:count],
            ahead=self._ahead(forward_batch),
        )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Compute the metadata of a CUDA graph: operations that it captures."""
        self._write(forward_batch, self.forward_metadata)
        self.forward_metadata = self.forward_metadata._replace(window_slots=self._window_slots(forward_batch))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a request that pads a batch."""
        return _PADDED_LENGTH

    def forward_decode(  # noqa: PLR0917 - SGLang's signature
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute a layer for requests with one query each.

        Args:
            q: (tokens, heads * head_size).
            k: (tokens, kv_heads, head_size), K of the queries; None for a layer that reads the cache of another.
            v: as k.
            layer: SGLang's layer.
            forward_batch: the batch, whose metadata was made.
            save_kv_cache: whether to write k and v to the cache.
            **kwargs: ``sinks``, logits that join the sums. Others are not supported.

        Returns:
            (tokens, heads * head_size).

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(  # noqa: PLR0917 - SGLang's signature
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute a layer for prompts, steps beside them, and drafts; arguments as for ``forward_decode``."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _forward(  # noqa: PLR0917 - those of SGLang
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool, others: dict[str, Any]
    ) -> torch.Tensor:
        """Write K and V, then compute a layer."""
        mine = self._layer(layer)
        sink = sink_of(mine, others.pop("sinks", None))
        for name, value in others.items():
            if value is not None and value is not False:
                raise ArgumentError(name, f"is given in layer {layer.layer_id}, which is not supported: {ELSEWHERE}")
        requests, pool = self.forward_metadata, self.token_to_kv_pool
        if save_kv_cache and k is not None:
            # All steps of a draft model have one batch, whose slots change from step to step.
            slots = requests.window_slots if self._step is None else self._window_slots(forward_batch)
            places = KVWriteLoc(forward_batch.out_cache_loc, slots)
            pool.set_kv_buffer(layer, places, k, v, layer.k_scale, layer.v_scale)
        keeps_window = layer.layer_id in self._window_layers
        buffers = pool.get_kv_buffer(layer.layer_id)
        rows = _packed_rows(requests.packed, k, v, buffers, keeps_window=keeps_window)
        if rows is not None:
            return attend_packed(mine, q, rows, requests, sink=sink)
        named = zip(("k_buffer", "v_buffer"), buffers, strict=True)
        k_cache, v_cache = (in_pages(name, each, mine, self.page_size) for name, each in named)
        table: Any = requests.window_table if keeps_window else requests.block_table
        return attend(
            mine,
            q,
            (k_cache, v_cache),
            table,
            requests,
            sink=sink,
            scales={"k_scale": layer.k_scale, "v_scale": layer.v_scale} if self._server.is_e4m3 else None,
            workspace=self._workspace(mine, q.device),
            batch_invariant=self._batch_invariant,
        )

    def _layer(self, layer: Any) -> Layer:
        """What is computed of a layer, checked at the first call."""
        if layer not in self._layers:
            self._layers[layer] = layer_of(layer, self._server)
        return self._layers[layer]

    def _ahead(self, forward_batch: Any) -> int:
        """Keys of a request behind those that the batch counts: of its drafts, or of steps of a draft model.

        Raises:
            ArgumentError: for drafts that are no chain.
        """
        if self._step is not None:
            return self._step + 1
        if not forward_batch.forward_mode.is_target_verify():
            return 0
        drafts = forward_batch.spec_info
        if getattr(drafts, "ragged_verify_layout", None) is not None:
            reason = "gives requests different numbers of drafts, expected the same number"
            raise ArgumentError("ragged_verify_layout", f"{reason}: {ELSEWHERE}")
        branches = getattr(drafts, "tree_topk", 1)
        if branches not in (None, 1):
            found = f"is {type(drafts).__name__} with a tree of drafts (tree_topk {branches}), expected a chain"
            raise ArgumentError("spec_info", f"{found}: {CHAIN}")
        count: int = getattr(drafts, "num_tokens_per_req", -1)
        return count if count > 0 else int(self._drafts)

    def _memory(self, count: int, device: torch.device) -> Requests:
        """Uninitialized metadata of ``count`` requests."""
        tables = [torch.empty(count, self._firsts.shape[1], dtype=torch.int32, device=device) for _ in range(2)]
        lengths = torch.empty(count, dtype=torch.int32, device=device)
        return Requests(tables[0], lengths, window_table=tables[1] if self._window_layers else None)

    def _write(self, forward_batch: Any, requests: Requests) -> None:
        """Compute tables and lengths of a batch, without synchronization."""
        count = requests.seq_lens.shape[0]
        requests.seq_lens.copy_(forward_batch.seq_lens[:count])
        if requests.ahead:
            requests.seq_lens.add_(requests.ahead)
        slots = self._firsts.index_select(0, forward_batch.req_pool_indices[:count])
        write_page_table(slots, self.page_size, requests.block_table)
        if requests.window_table is not None:
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
            write_page_table(slots, self.page_size, requests.window_table)

    def _packed(self, forward_batch: Any, bounds: torch.Tensor) -> PackedKeys | None:
        """Keys of a batch of prompts, if layers compute it over packed keys."""
        counts, prefixes = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        if counts is None or prefixes is None or self._batch_invariant:
            return None
        requests, queries, before = forward_batch.batch_size, sum(counts), sum(prefixes)
        if not self._server.packs(requests=requests, queries=queries, keys=queries + before):
            return None
        if not before:
            return PackedKeys(bounds, None)
        rows, lengths = forward_batch.req_pool_indices[:requests], forward_batch.seq_lens[:requests]
        return packed_slots(self.req_to_token, rows, lengths, queries + before)

    def _window_slots(self, forward_batch: Any) -> torch.Tensor | None:
        """Where layers that keep a window write K and V."""
        if not self._window_layers or forward_batch.out_cache_loc is None:
            return None
        slots: torch.Tensor = self.token_to_kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
        return slots

    def _workspace(self, layer: Layer, device: torch.device) -> torch.Tensor | None:
        """Memory that layers share, which run one after the other; None if its size depends on the batch."""
        if self._batch_invariant or device.type != "cuda":
            return None
        found = self._workspaces.get(layer.head_size)
        if found is None:
            found = paged_workspace(batch=1, tokens=1, heads=1, kv_heads=1, head_dim=layer.head_size, device=device)
            self._workspaces[layer.head_size] = found
        return found


class PagedDraftBackend(AttentionBackend):  # type: ignore[misc]
    """Steps of a draft model, which decodes several tokens one after the other: a backend for each step.

    Args:
        model_runner: SGLang's, of the draft model.
        steps: tokens that are drafted; the first one needs no step of its own.

    Raises:
        ArgumentError: as for :class:`PagedBackend`.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, steps: int) -> None:
        super().__init__()
        self.kv_index_translator = model_runner.kv_index_translator
        self.attn_backends = [PagedBackend(model_runner, step) for step in range(steps - 1)]
        self.attn_backend_list = self.attn_backends

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of each step outside of CUDA graphs."""
        for each in self.attn_backends:
            each.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the metadata of each step; arguments as for :class:`PagedBackend`."""
        for each in self.attn_backends:
            each.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Choose the metadata of each step of a CUDA graph; arguments as for :class:`PagedBackend`."""
        for each in self.attn_backends:
            each.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Compute the metadata of each step of a CUDA graph: operations that it captures."""
        for each in self.attn_backends:
            each.init_forward_metadata_in_graph(forward_batch)


def _server(runner: Any) -> Server:
    """What the backend knows of a server.

    Raises:
        ArgumentError: for a setting that is not supported, naming it.
    """
    algorithm, branches = runner.spec_algorithm.name, get_spec().speculative_eagle_topk or 1
    refused = {
        ("MLA", f"K and V have one head size, and MLA's have two; {ELSEWHERE}"): runner.use_mla_backend,
        ("cross attention", ELSEWHERE): runner.model_config.is_encoder_decoder,
        (f"--speculative-algorithm {algorithm}", "set EAGLE, EAGLE3, NEXTN or STANDALONE, or omit it"): (
            algorithm not in ALGORITHMS
        ),
        (f"--speculative-eagle-topk {branches}", f"drafts must be a chain, not a tree: {CHAIN}"): branches > 1,
        ("--dllm-algorithm", ELSEWHERE): get_exec().dllm.dllm_algorithm is not None,
        ("--enable-unified-memory", "omit it"): runner.kv_index_translator.is_translating,
        ("prefill-aware windows", ELSEWHERE): getattr(runner, "prefill_aware_swa", False),
        ("decode context parallelism", "set --dcp-size to 1"): get_parallel().attn_dcp_size > 1,
    }
    major, minor = torch.cuda.get_device_capability()
    return Server(
        runner.dtype,
        runner.kv_cache_dtype,
        runner.kv_cache_dtype_str,
        runner.page_size,
        (major, minor),
        {name: bool(given) for name, given in refused.items()},
        runner.attention_chunk_size,
    )


def _window_layers(pool: Any) -> frozenset[int]:
    """Layers that keep a window of keys in a pool of their own."""
    if not isinstance(pool, BaseSWAKVPool):
        return frozenset()
    return frozenset(layer for layer, (_, is_window) in pool.layers_mapping.items() if is_window)


def _packed_rows(
    packed: PackedKeys | None, k: Any, v: Any, buffers: tuple[torch.Tensor, torch.Tensor], *, keeps_window: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """K and V of packed keys; None for a layer that reads pages.

    Args:
        packed: keys of the batch; None if it reads pages.
        k, v: of the queries; None for a layer that reads the cache of another.
        buffers: K and V of the token pool.
        keeps_window: whether the pool keeps a window of the layer's keys.
    """
    if packed is None or (packed.slots is None and k is None) or (packed.slots is not None and keeps_window):
        return None
    if packed.slots is None:
        return k, v
    k_buffer, v_buffer = (each.index_select(0, packed.slots) for each in buffers)
    return k_buffer, v_buffer
