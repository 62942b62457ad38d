"""The attention backends of SGLang's diffusion runtime: classes, which call ``runtime.integrations.sglang.diffusion``.

``diffusion_registration`` imports this module when a server selects one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
)
from sglang.multimodal_gen.runtime.layers.attention.backends.video_sparse_attn import (
    VideoSparseAttentionBackend,
    VideoSparseAttentionImpl,
    _compute_cur_topk,
)
from sglang.multimodal_gen.runtime.managers.forward_context import get_forward_context
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from sglang.multimodal_gen.runtime.server_args import get_global_server_args

from runtime.errors import ArgumentError
from runtime.integrations.sglang import diffusion
from runtime.integrations.sglang.diffusion import ELSEWHERE, HEAD_SIZES, NAME, Layer, Video, settings_of
from runtime.integrations.sglang.video_sparse import video_sparse_attention

_SIDE = 4  # tokens of a tile along each axis


class BlockSparseBackend(AttentionBackend):  # type: ignore[misc] # SGLang has no types where it is not installed
    """Layers of diffusion models: their own attention, or a pattern of self-attention."""

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Multiples of 8."""
        return list(HEAD_SIZES)

    @staticmethod
    def get_enum() -> Any:
        """The member that the plug-in adds."""
        return AttentionBackendEnum[NAME.upper()]

    @staticmethod
    def get_impl_cls() -> type[BlockSparseImpl]:
        """The class of a layer's attention."""
        return BlockSparseImpl

    @staticmethod
    def get_metadata_cls() -> Any:
        """SGLang's base class; layers read no metadata."""
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> Any:
        """None: SGLang's denoising stage then passes no metadata."""
        return None

    @classmethod
    def supports_packed_varlen(cls) -> bool:
        """Whether layers may have packed sequences: without a pattern."""
        return settings_of(get_global_server_args()).pattern is None

    @classmethod
    def supports_ring_rotation(cls) -> bool:
        """Whether layers may be ring-parallel: without a pattern."""
        return settings_of(get_global_server_args()).pattern is None


class BlockSparseImpl(AttentionImpl):  # type: ignore[misc] # SGLang has no types where it is not installed
    """The attention of a layer.

    Raises:
        ArgumentError: for a layer or a setting that is not supported, naming it.
    """

    def __init__(  # noqa: PLR0917 - SGLang's signature
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **extra_impl_args: Any,
    ) -> None:
        self._layer = _layer(num_heads, head_size, softmax_scale, causal, num_kv_heads, extra_impl_args)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: Any = None,
        *,
        return_softmax_lse: bool = False,
    ) -> Any:
        """Compute a layer.

        Args:
            query: (batch, q_len, heads, head_size).
            key, value: (batch, kv_len, kv_heads, head_size).
            attn_metadata: not read.
            return_softmax_lse: also return the log-sum-exp.

        Returns:
            (batch, q_len, heads, head_size); with ``return_softmax_lse`` also float32 (batch, heads, q_len).

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        return diffusion.forward(self._layer, query, key, value, video=_video, return_lse=return_softmax_lse)

    def forward_varlen(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        cu_seqlens_host: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Compute a layer for packed sequences.

        Args:
            query: (tokens, heads, head_size).
            key, value: (tokens, kv_heads, head_size).
            cu_seqlens: int32 (sequences + 1,), bounds of the sequences.
            max_seqlen: not read.
            cu_seqlens_host: not read.

        Returns:
            (tokens, heads, head_size).

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        return diffusion.forward_varlen(self._layer, query, key, value, cu_seqlens)

    def forward_ring_kv_chunk(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the part of ring attention that one chunk of keys contributes.

        Args:
            query: (tokens, heads, head_size).
            key, value: (keys, kv_heads, head_size).

        Returns:
            (tokens, heads, head_size), and the log-sum-exp, float32 (heads, tokens).

        Raises:
            ArgumentError: for a causal layer.
        """
        return diffusion.forward_chunk(self._layer, query, key, value)


class VideoSparseBackend(VideoSparseAttentionBackend):  # type: ignore[misc] # SGLang has no types here
    """SGLang's video sparse attention, with its tiles and metadata, on the kernels of this package."""

    @staticmethod
    def get_impl_cls() -> type[VideoSparseImpl]:
        """The class of a layer's attention."""
        return VideoSparseImpl


class VideoSparseImpl(VideoSparseAttentionImpl):  # type: ignore[misc] # SGLang has no types here
    """The video sparse attention of a layer.

    Raises:
        ArgumentError: for a layer or a setting that is not supported, naming it.
    """

    def __init__(  # noqa: PLR0917 - SGLang's signature
        self,
        num_heads: int,
        head_size: int,
        causal: bool,
        softmax_scale: float,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **extra_impl_args: Any,
    ) -> None:
        super().__init__(num_heads, head_size, causal, softmax_scale, num_kv_heads, prefix, **extra_impl_args)
        self._layer = _layer(num_heads, head_size, softmax_scale, causal, num_kv_heads, extra_impl_args)
        named = {
            "causal": causal,
            "num_kv_heads": self._layer.kv_heads != num_heads,
            "is_cross_attention": self._layer.is_cross_attention,
        }
        for name, is_given in named.items():
            if is_given:
                raise ArgumentError(name, f"is not that of video sparse attention: {ELSEWHERE}")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate_compress: torch.Tensor,
        attn_metadata: Any,
    ) -> torch.Tensor:
        """Compute a layer, whose tokens are in tiles.

        Args:
            query, key, value: (batch, tiles * 64, heads, head_size); padding is 0.
            gate_compress: as query, factors of the coarse part.
            attn_metadata: SGLang's, with the sizes of the tiles and the sparsity.

        Returns:
            As query.

        Raises:
            ArgumentError: naming the argument, before the fine part is launched.
        """
        q, k, v, gate = (x.transpose(1, 2) for x in (query, key, value, gate_compress))
        out = video_sparse_attention(
            q,
            k,
            v,
            gate,
            sizes=attn_metadata.variable_block_sizes,
            is_full=not any(size % _SIDE for size in attn_metadata.dit_seq_shape),
            topk=_compute_cur_topk(attn_metadata),
            scale=self._layer.scale,
        )
        return out.transpose(1, 2)


def _layer(  # noqa: PLR0917 - SGLang's arguments
    heads: int, head_size: int, scale: float, causal: bool, kv_heads: int | None, others: dict[str, Any]
) -> Layer:
    """What is computed of a layer.

    Raises:
        ArgumentError: for a layer or a setting that is not supported, naming it.
    """
    others = dict(others)
    is_cross_attention = bool(others.pop("is_cross_attention", False))
    settings = settings_of(get_global_server_args())
    kv_heads = heads if kv_heads is None else kv_heads
    return Layer(heads, head_size, scale, causal, kv_heads, is_cross_attention, settings, others)


def _video() -> Video:
    """The video of the request that SGLang computes.

    Raises:
        ArgumentError: if the request has none.
    """
    latents = getattr(get_forward_context().forward_batch, "raw_latent_shape", None)
    if latents is None:
        raise ArgumentError("raw_latent_shape", "is missing in the request: omit the pattern for this model")
    return Video(tuple(latents), diffusion.patch_of(get_global_server_args().pipeline_config.dit_config))
