"""The attention backend of SGLang: its class, which calls ``runtime.integrations.sglang.layers``.

``registration`` imports this module when a server selects the backend.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec, get_parallel

from runtime.errors import ArgumentError
from runtime.integrations.sglang.layers import (
    ELSEWHERE,
    Layer,
    Requests,
    Server,
    attend,
    in_pages,
    layer_of,
    sink_of,
    write_page_table,
)
from runtime.log import logger
from runtime.ops.paged import paged_workspace

_PADDED_LENGTH = 1
"""Keys of a request that pads a batch to the size of a CUDA graph."""


class PagedBackend(AttentionBackend):  # type: ignore[misc] # SGLang has no types where it is not installed
    """Layers of decoders with a KV cache, by ``paged_attention``.

    Args:
        model_runner: SGLang's, whose model is loaded and whose KV pool is allocated.

    Raises:
        ArgumentError: for a setting or a layer that is not supported, naming it.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self._server = _server(model_runner)
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.kv_index_translator = model_runner.kv_index_translator
        self.page_size = self._server.page_size
        self._firsts = self.req_to_token[:, :: self.page_size]
        self._window_layers = _window_layers(self.token_to_kv_pool)
        self._batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        self._graph: Requests | None = None
        self._layers: dict[Any, Layer] = {}
        self._workspaces: dict[int, torch.Tensor] = {}
        layers = [each for each in model_runner.model.modules() if isinstance(each, RadixAttention)]
        for each in layers:
            self._layer(each)
        logger().info("SGLang: %s attention layers are computed by paged_attention", len(layers))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of a batch outside of CUDA graphs.

        Raises:
            ArgumentError: for a batch of speculative decoding or of a diffusion model.
        """
        count, mode = forward_batch.batch_size, forward_batch.forward_mode
        bounds = None
        if not mode.is_decode_or_idle():
            if mode.is_target_verify() or mode.is_dllm_extend() or not mode.is_extend():
                raise ArgumentError("forward_mode", f"is {mode.name}, expected DECODE, EXTEND or MIXED: {ELSEWHERE}")
            ends = torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32)
            bounds = torch.nn.functional.pad(ends, (1, 0))
        requests = self._memory(count, forward_batch.seq_lens.device)
        self._write(forward_batch, requests)
        self.forward_metadata = requests._replace(cu_seqlens_q=bounds, window_slots=self._window_slots(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the metadata that CUDA graphs read.

        Args:
            max_bs: requests of the largest graph.
            max_num_tokens: not read: each request has one query.
        """
        self._graph = self._memory(max_bs, self.req_to_token.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Choose the metadata of a CUDA graph; its values are computed in the graph.

        Args:
            forward_batch: of the graph.
            in_capture: not read.

        Raises:
            ArgumentError: for a graph of prompts.
        """
        mode = forward_batch.forward_mode
        if not mode.is_decode_or_idle():
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
        """Compute a layer for prompts, and steps beside them; arguments as for ``forward_decode``."""
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
            places = KVWriteLoc(forward_batch.out_cache_loc, requests.window_slots)
            pool.set_kv_buffer(layer, places, k, v, layer.k_scale, layer.v_scale)
        buffers = zip(("k_buffer", "v_buffer"), pool.get_kv_buffer(layer.layer_id), strict=True)
        k_cache, v_cache = (in_pages(name, each, mine, self.page_size) for name, each in buffers)
        keeps_window = layer.layer_id in self._window_layers
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

    def _memory(self, count: int, device: torch.device) -> Requests:
        """Uninitialized metadata of ``count`` requests."""
        tables = [torch.empty(count, self._firsts.shape[1], dtype=torch.int32, device=device) for _ in range(2)]
        lengths = torch.empty(count, dtype=torch.int32, device=device)
        return Requests(tables[0], lengths, window_table=tables[1] if self._window_layers else None)

    def _write(self, forward_batch: Any, requests: Requests) -> None:
        """Compute tables and lengths of a batch, without synchronization."""
        count = requests.seq_lens.shape[0]
        requests.seq_lens.copy_(forward_batch.seq_lens[:count])
        slots = self._firsts.index_select(0, forward_batch.req_pool_indices[:count])
        write_page_table(slots, self.page_size, requests.block_table)
        if requests.window_table is not None:
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
            write_page_table(slots, self.page_size, requests.window_table)

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


def _server(runner: Any) -> Server:
    """What the backend knows of a server.

    Raises:
        ArgumentError: for a setting that is not supported, naming it.
    """
    refused = {
        ("MLA", f"K and V have one head size, and MLA's have two; {ELSEWHERE}"): runner.use_mla_backend,
        ("cross attention", ELSEWHERE): runner.model_config.is_encoder_decoder,
        ("--speculative-algorithm", "omit it, or select --attention-backend fa3"): (
            runner.spec_algorithm.is_speculative()
        ),
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
