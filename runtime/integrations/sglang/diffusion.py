"""What the backend computes of a layer of SGLang's diffusion models, without SGLang's classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from codegen.arch import ARCHS
from runtime.errors import ArgumentError
from runtime.integrations.choosers import Chooser, chooser_of
from runtime.integrations.chosen import attend, window_of
from runtime.ops.attention_choice import HEAD_DIMS
from runtime.ops.varlen import varlen_attention
from runtime.patterns import Causal, Dense, Pattern

NAME = "block_sparse"
"""Name of the backend in SGLang, and value of ``kernels`` for video sparse attention."""
OPTION = "--attention-backend-config"
ELSEWHERE = "select another --attention-backend, such as fa"
KEYS = ("pattern", "kernels", "VSA_sparsity", "sparsity")
"""Keys of the option: of this backend, and of video sparse attention."""
HEAD_SIZES = tuple(range(8, HEAD_DIMS[-1] + 1, 8))
UNREAD = ("quant_config", "allow_cudnn_sdp", "packed_trailing_padding")
"""Arguments of SGLang's layers that do not change the result of attention."""
_WINDOW = "video_window"
_SIZES = 5  # of latents: batch, channels, frames, rows, columns


def capability() -> tuple[int, int]:
    """Compute capability of the GPU.

    Raises:
        ArgumentError: without a GPU.
    """
    if not torch.cuda.is_available():
        raise ArgumentError("--attention-backend", f"is {NAME}, and torch finds no CUDA GPU: {ELSEWHERE}")
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def check_device(head_size: int, dtype: torch.dtype) -> None:
    """Check that kernels exist for a layer.

    Raises:
        ArgumentError: naming the option or the attribute of the layer.
    """
    found = capability()
    if not any(each.compute_capability == found for each in ARCHS.values()):
        runs = f"runs on sm_{found[0]}{found[1]}, kernels are written for {', '.join(ARCHS)}"
        raise ArgumentError("--attention-backend", f"{runs}: {ELSEWHERE}")
    if dtype not in (torch.float16, torch.bfloat16):
        raise ArgumentError("dtype", f"is {dtype}, expected torch.float16 or torch.bfloat16: {ELSEWHERE}")
    if head_size not in HEAD_SIZES:
        raise ArgumentError(
            "head_size", f"is {head_size}, expected a multiple of 8 up to {HEAD_SIZES[-1]}: {ELSEWHERE}"
        )


class Settings(NamedTuple):
    """What the backend knows of a server.

    Attributes:
        pattern: fields of the pattern of self-attention; None for the attention of the model.
        kernels: value of ``kernels``; None if it is missing.
        ring: ring-parallel degree.
        kv_gather: degree of sequence parallelism that gathers K and V.
        compiled: whether models are compiled by torch.compile.
    """

    pattern: Mapping[str, Any] | None = None
    kernels: str | None = None
    ring: int = 1
    kv_gather: int = 1
    compiled: bool = False

    def check(self) -> None:
        """Check that the pattern works with the other settings.

        Raises:
            ArgumentError: naming the option.
        """
        if self.kernels not in (None, NAME):
            raise ArgumentError(f"{OPTION} kernels", f"is {self.kernels!r}, expected {NAME!r}")
        if self.pattern is None:
            return
        with_pattern = "with a pattern, which needs all queries and keys of the video in one call"
        if self.ring > 1:
            raise ArgumentError("--ring-degree", f"is {self.ring} {with_pattern}: set --ulysses-degree")
        if self.kv_gather > 1:
            raise ArgumentError("--kv-gather-degree", f"is {self.kv_gather} {with_pattern}: set --ulysses-degree")
        if self.compiled:
            raise ArgumentError(
                "--enable-torch-compile", "is set with a pattern, whose lists are no constants: omit it"
            )
        _check_pattern(self.pattern)


def settings_of(server_args: Any) -> Settings:
    """The settings of a server.

    Args:
        server_args: SGLang's.

    Raises:
        ArgumentError: for a key of the option that does not exist, and for a pattern that does not.
    """
    config = server_args.attention_backend_config or {}
    unknown = sorted(set(config) - set(KEYS))
    if unknown:
        raise ArgumentError(OPTION, f"has {', '.join(unknown)}, expected some of {', '.join(KEYS)}")
    pattern = config.get("pattern")
    if pattern is not None and not isinstance(pattern, Mapping):
        raise ArgumentError(f"{OPTION} pattern", f"is {pattern!r}, expected a mapping such as {{'kind': '{_WINDOW}'}}")
    return Settings(
        None if pattern is None or pattern.get("kind") == Dense.kind else dict(pattern),
        config.get("kernels"),
        server_args.ring_degree or 1,
        server_args.kv_gather_degree or 1,
        bool(server_args.enable_torch_compile),
    )


def _check_pattern(fields: Mapping[str, Any]) -> None:
    """Check the fields of a pattern.

    Raises:
        ArgumentError: naming the field.
    """
    if fields.get("kind") == _WINDOW:
        for key in ("grid", "text"):
            if key in fields:
                raise ArgumentError(f"{OPTION} pattern.{key}", "is given, and each request sets it: omit it")
        window_of(_without_kind(fields) | {"grid": (1, 1, 1)}, f"{OPTION} pattern").made(torch.device("cpu"))
    else:
        chooser_of(fields, f"{OPTION} pattern")


def _without_kind(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != "kind"}


@dataclass(frozen=True)
class Layer:
    """What is computed of a layer.

    Attributes:
        heads: of q.
        head_size: of q, k and v.
        scale: softmax scale.
        causal: query i sees the keys up to its own position, which are aligned at the end.
        kv_heads: of k and v.
        is_cross_attention: the layer attends over other tokens than its own.
        settings: of the server.
        others: SGLang's other arguments of the layer.
    """

    heads: int
    head_size: int
    scale: float
    causal: bool
    kv_heads: int
    is_cross_attention: bool
    settings: Settings
    others: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.head_size not in HEAD_SIZES:
            reason = f"is {self.head_size}, expected a multiple of 8 up to {HEAD_SIZES[-1]}: {ELSEWHERE}"
            raise ArgumentError("head_size", reason)
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ArgumentError("num_kv_heads", f"is {self.kv_heads}, expected a divisor of num_heads {self.heads}")
        for name, value in self.others.items():
            if name not in UNREAD and value is not None and value is not False and value != 0:
                raise ArgumentError(name, f"is {value!r}, which is not supported: {ELSEWHERE}")
        self.settings.check()
        if self.causal and self.settings.pattern is not None:
            raise ArgumentError(f"{OPTION} pattern", "is given, and the layer is causal: omit it")

    @property
    def pattern(self) -> Mapping[str, Any] | None:
        """Fields of the pattern; None for the attention of the model."""
        return None if self.is_cross_attention else self.settings.pattern

    @property
    def exact(self) -> Pattern:
        """The attention of the model."""
        return Causal() if self.causal else Dense()


class Video(NamedTuple):
    """The video or image of a request.

    Attributes:
        latents: shape of the latents (batch, channels, frames, rows, columns).
        patch: frames, rows and columns of a patch.
    """

    latents: tuple[int, ...]
    patch: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of tokens.

        Raises:
            ArgumentError: naming what is no video.
        """
        if len(self.latents) != _SIZES:
            reason = (
                f"has {len(self.latents)} dimensions {tuple(self.latents)}, expected (batch, channels, frames, rows"
            )
            raise ArgumentError("raw_latent_shape", f"{reason}, columns): omit the pattern for this model")
        sizes = self.latents[2:]
        if len(self.patch) != len(sizes) or any(size % part for size, part in zip(sizes, self.patch, strict=True)):
            raise ArgumentError("patch_size", f"is {self.patch}, which does not divide the latents {tuple(sizes)}")
        frames, rows, columns = (size // part for size, part in zip(sizes, self.patch, strict=True))
        return frames, rows, columns


def patch_of(config: Any) -> tuple[int, ...]:
    """Frames, rows and columns of a patch.

    Args:
        config: SGLang's of the transformer.
    """
    patch = config.patch_size
    if isinstance(patch, int):
        first = getattr(config, "patch_size_t", None)
        return (patch if first is None else first), patch, patch
    return tuple(patch)


def forward(
    layer: Layer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    video: Callable[[], Video],
    return_lse: bool = False,
) -> Any:
    """Compute a layer.

    Args:
        layer: what is computed.
        q: (batch, q_len, heads, head_size).
        k, v: (batch, kv_len, kv_heads, head_size).
        video: a function that returns the ``Video`` of the request.
        return_lse: also return the log-sum-exp.

    Returns:
        (batch, q_len, heads, head_size); with ``return_lse`` also float32 (batch, heads, q_len), natural logarithms.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    chooser = None if layer.pattern is None else _chooser(layer.pattern, q.shape[1], k.shape[1], video)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    result = attend(q, k, v, layer.exact, chooser, scale=layer.scale, return_lse=return_lse)
    return (result.out.transpose(1, 2), result.lse) if return_lse else result.transpose(1, 2)


def forward_varlen(
    layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Compute a layer for packed sequences.

    Args:
        layer: what is computed.
        q: (tokens, heads, head_size).
        k, v: (tokens, kv_heads, head_size).
        cu_seqlens: int32 (sequences + 1,), bounds of the sequences.

    Returns:
        (tokens, heads, head_size). Tokens in no sequence are not written.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
    """
    if layer.pattern is not None:
        raise ArgumentError(f"{OPTION} pattern", "is given, and the sequences are packed: omit it for this model")
    found = varlen_attention(q, k, v, layer.exact, cu_seqlens_q=cu_seqlens, scale=layer.scale)
    assert isinstance(found, torch.Tensor)
    return found


def forward_chunk(layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the part of ring attention that one chunk of keys contributes.

    Args:
        layer: what is computed.
        q: (tokens, heads, head_size).
        k, v: (keys, kv_heads, head_size).

    Returns:
        The normalized part (tokens, heads, head_size), and its log-sum-exp, float32 (heads, tokens), natural logarithm.

    Raises:
        ArgumentError: for a causal layer, and for a pattern.
    """
    if layer.causal:
        raise ArgumentError("causal", f"is True in ring attention, expected False: set --ring-degree 1, or {ELSEWHERE}")
    if layer.pattern is not None:
        raise ArgumentError(f"{OPTION} pattern", "is given in ring attention: set --ring-degree 1")
    q, k, v = q[None], k[None], v[None]
    out, lse = forward(layer, q, k, v, video=_no_video, return_lse=True)
    return out[0], lse[0]


def _no_video() -> Video:
    """The video of a call without a pattern, which reads none."""
    raise AssertionError


def _chooser(fields: Mapping[str, Any], q_len: int, kv_len: int, video: Callable[[], Video]) -> Chooser:
    """The chooser of the pattern of a call of self-attention.

    Raises:
        ArgumentError: for a call over other tokens than the video's.
    """
    if q_len != kv_len:
        reason = (
            f"is given, and a layer of self-attention has {q_len} queries and {kv_len} keys: omit it for this model"
        )
        raise ArgumentError(f"{OPTION} pattern", reason)
    if fields["kind"] != _WINDOW:
        return chooser_of(fields, f"{OPTION} pattern")
    grid = video().grid
    text = q_len - math.prod(grid)
    sizes = f"{q_len} tokens, and the video {' x '.join(map(str, grid))}"
    if text < 0:
        raise ArgumentError(f"{OPTION} pattern", f"is given, and a layer has {sizes}: omit it for this model")
    if text and "text_first" not in fields:
        raise ArgumentError(f"{OPTION} pattern.text_first", f"is missing, and a layer has {sizes}: expected a bool")
    return window_of({**_without_kind(fields), "grid": grid, "text": text}, f"{OPTION} pattern")
