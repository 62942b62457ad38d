"""The attention backend of vLLM v1: its classes, which call ``runtime.integrations.vllm.layers``.

``registration`` imports this module when a layer selects the backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    max_decode_query_len,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from codegen.arch import ARCHS
from runtime.errors import ArgumentError
from runtime.integrations.vllm.layers import (
    E4M3_CACHES,
    ELSEWHERE,
    NAME,
    PAGE_SIZES,
    SAME_CACHES,
    Layer,
    Most,
    Requests,
    are_new,
    explained,
    unserved,
)
from runtime.integrations.vllm.policies import SETTING, policy_of
from runtime.log import logger
from runtime.ops.paged_calls import HEAD_DIMS

NOTHING = {"chunk_lookback": -1}
"""Values of arguments that change nothing."""


class PagedBackend(AttentionBackend):  # type: ignore[misc] # vLLM has no types where it is not installed
    """Layers of decoders with a KV cache, by ``paged_attention``."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*SAME_CACHES, *E4M3_CACHES]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        """Name of the backend in vLLM's enumeration."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[PagedImpl]:
        """Class that computes a layer."""
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[PagedMetadataBuilder]:
        """Class that makes the metadata of a batch."""
        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Tokens of a page. vLLM divides its blocks into pages of the largest size that fits."""
        return list(PAGE_SIZES)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Elements of a head."""
        return list(HEAD_DIMS["same"])

    @classmethod
    def supports_sink(cls) -> bool:
        """Whether logits join the sums."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Whether layers may have windows."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Whether a batch may see later keys."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether results can be independent of the other requests of a batch."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Whether K and V may have a factor for each KV head."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether there are kernels for a GPU."""
        return (capability.major, capability.minor) in {arch.compute_capability for arch in ARCHS.values()}

    @classmethod
    def supports_combination(  # noqa: PLR0917 - vLLM's signature
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """The reason against a combination; None for none."""
        return unserved(head_size, dtype, kv_cache_dtype, (device_capability.major, device_capability.minor))

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Reasons against a layer, with what is served instead; empty for none."""
        return explained(super().validate_configuration(*args, **kwargs))


@dataclass
class PagedMetadata(AttentionMetadata):  # type: ignore[misc]
    """Metadata of a batch: tensors of vLLM, which a CUDA graph reads again.

    Attributes:
        parts: requests with few queries, then those with many, each computed by one call.
        slot_mapping: int64 (tokens,), the place of each token in the cache.
    """

    parts: tuple[Requests, ...]
    slot_mapping: torch.Tensor


class PagedMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):  # type: ignore[misc]
    """Makes the metadata of a batch."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    """Graphs have decoding steps. Their division from prompts is on the CPU, so that both take the faster kernel."""
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        head_size, head_size_v = kv_cache_spec.head_size, getattr(kv_cache_spec, "head_size_v", None)
        if head_size_v not in (None, head_size):
            reason = f"is {head_size_v} in {', '.join(layer_names)}, expected head_size {head_size}: {ELSEWHERE}"
            raise ArgumentError("head_size_v", reason)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Queries of a request up to which a graph serves any numbers of them."""
        most: int = max_decode_query_len(vllm_config)
        return most

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> PagedMetadata:
        """Make the metadata of a batch.

        Args:
            common_prefix_len: not read.
            common_attn_metadata: vLLM's metadata.
            fast_build: not read.

        Raises:
            ArgumentError: for a batch with causal and non-causal requests.
        """
        batch = common_attn_metadata
        if not isinstance(batch.causal, bool):
            reason = f"is {type(batch.causal).__name__}, one value for each request, expected a bool: {ELSEWHERE}"
            raise ArgumentError("causal", reason)
        few, _, few_tokens, many_tokens = split_decodes_and_prefills(batch, self.reorder_batch_threshold)
        bounds, parts = batch.query_start_loc, []
        most = getattr(batch, "seq_lens_cpu_upper_bound", None)
        for first, end, first_token, tokens in (
            (0, few, 0, few_tokens),
            (few, batch.num_reqs, few_tokens, many_tokens),
        ):
            if not tokens:
                continue
            rebased = bounds[first : end + 1]
            part = Requests(
                batch.block_table_tensor[first:end],
                batch.seq_lens[first:end],
                rebased - first_token if first_token else rebased,
                min(batch.max_query_len, self.reorder_batch_threshold) if end == few else batch.max_query_len,
                batch.causal,
                slice(first_token, first_token + tokens),
                end > few
                and are_new(batch.query_start_loc_cpu.diff()[first:end], None if most is None else most[first:end]),
            )
            parts.append(part)
        return PagedMetadata(tuple(parts), batch.slot_mapping)

    def update_block_table(
        self, metadata: PagedMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PagedMetadata:
        """The metadata of the same batch in another group of layers."""
        ends = list(accumulate(part.seq_lens.shape[0] for part in metadata.parts))
        parts = zip(metadata.parts, [0, *ends], ends, strict=False)
        tables = (part._replace(block_table=blk_table[first:end]) for part, first, end in parts)
        return replace(metadata, parts=tuple(tables), slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: PagedMetadata) -> None:
        """Nothing to do: the metadata has vLLM's own tensors."""


class PagedImpl(AttentionImpl[PagedMetadata]):  # type: ignore[misc]
    """Computes a layer."""

    def __init__(  # noqa: PLR0917 - vLLM's signature
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        for name, value in {"alibi_slopes": alibi_slopes, **others}.items():
            if value is not None and value != NOTHING.get(name):
                raise ArgumentError(name, f"is given, which is not supported: {ELSEWHERE}")
        if attn_type != AttentionType.DECODER:
            raise ArgumentError("attn_type", f"is {attn_type}, expected {AttentionType.DECODER}: {ELSEWHERE}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._sinks = sinks
        config = get_current_vllm_config_or_none()
        settings = {} if config is None or not isinstance(config.additional_config, dict) else config.additional_config
        self._layer = Layer(
            num_heads,
            self.num_kv_heads,
            head_size,
            self.scale,
            sliding_window,
            logits_soft_cap or None,
            sinks,
            is_e4m3=kv_cache_dtype in E4M3_CACHES,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            policy=policy_of(settings.get(SETTING)),
            most=None if config is None else _most(config),
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Load the kernel and allocate memory, which vLLM then counts as memory of the model."""
        self._layer.prepare(act_dtype, self._sinks)
        logger().info("vLLM: a layer of %s heads is computed by paged_attention", self.num_heads)

    def forward(  # noqa: PLR0917 - vLLM's signature
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a layer, whose K and V are in the cache.

        Args:
            layer: vLLM's layer, with the factors of an e4m3 cache.
            query: (tokens, num_heads, head_size).
            key, value: (tokens, num_kv_heads, head_size); read for prompts that have no fast kernel over pages.
            kv_cache: (pages, num_kv_heads, page_size, 2 * head_size).
            attn_metadata: metadata of the batch; None in a run that measures memory, whose result is 0.
            output: (tokens, num_heads, head_size), where to write the result.
            output_scale, output_block_scale: not supported.

        Returns:
            ``output``.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        for name, scale in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if scale is not None:
                raise ArgumentError(name, "is given, but results are not quantized: set fuse_attn_quant to false")
        if attn_metadata is None:
            return output.fill_(0)
        scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        new = None if key is None or self.kv_sharing_target_layer_name is not None else (key, value)
        for part in attn_metadata.parts:
            self._layer.attend(layer.layer_name, query, kv_cache, part, output, new=new, **scales)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write K and V of new tokens to the cache, by vLLM's own operation."""
        caches = kv_cache.transpose(1, 2).split(self.head_size, -1)
        ops.reshape_and_cache_flash(
            key, value, *caches, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )


def _most(config: Any) -> Most:
    """The largest batch of an engine, with that of its CUDA graphs."""
    captured = config.compilation_config.max_cudagraph_capture_size or 0
    scheduler = config.scheduler_config
    return Most(max(scheduler.max_num_seqs, captured), max(scheduler.max_num_batched_tokens, captured))
