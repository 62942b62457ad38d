"""Operands of FP8 attention: made of q, k and v, kept as a cache of K and V, or put together from codes and scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from codegen.dtypes import FP8
from codegen.fp8 import V_KEYS
from codegen.wording import shown
from runtime.checks import check_flag
from runtime.errors import ArgumentError
from runtime.kernels.arguments import MAX_EXTENT, TORCH_DTYPES, check_shape
from runtime.kernels.quantize import Rotary
from runtime.ops.quantize import (
    BLOCK_ROWS,
    Dtype,
    check_dtype,
    check_floats,
    check_head_dim,
    check_rotary,
    quantize_columns,
    quantize_rows,
)
from runtime.ops.static_scales import check_values, spread

KEY_AXES = ("batch", "kv_heads", "kv_len", "head_dim")
Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
OPERAND_TENSORS = ("q", "k", "v_t", "q_scale", "k_scale", "v_scale", "k_mean", "mean_logits")
"""Fields of :class:`QuantizedAttention` that hold a tensor, or None."""


@dataclass(frozen=True)
class QuantizedAttention:
    """q, k and v in FP8, the operands of ``block_sparse_attention_fp8``: value = code * scale.

    Attributes:
        q: codes (batch, heads, q_len, head_dim).
        k: codes (batch, kv_heads, kv_len, head_dim).
        v_t: codes of V^T (batch, kv_heads, head_dim, keys), keys filled up to a multiple of 16 with zeros, those of
            each 16 in the order of ``codegen.fp8.KEY_ORDER``.
        q_scale: float32 (batch, heads, blocks of ``q_rows``), of any strides.
        k_scale: float32 (batch, kv_heads, blocks of ``k_rows``), likewise.
        v_scale: float32 (batch, kv_heads, head_dim), likewise.
        k_mean: float32 (batch, kv_heads, head_dim), what was subtracted of each key; None if nothing was. The result of
            attention does not depend on it: all logits of a query change by the same number.
        mean_logits: float32 (batch, heads, q_len), that number, before the softmax scale: q times ``k_mean``. Where the
            log-sum-exp is asked for, it is added.
        q_rows: queries that share a scale.
        k_rows: keys that share a scale.
        hadamard: whether q and k are rotated.
        rotary: ``half`` or ``interleaved`` if the rotary embedding was applied to q and k, of pairs like those of the
            spec's field; ``none``.
        output: type of the result.
        cache: memory of k, v_t and k_scale that ``append`` writes on in; None without ``kv_capacity``.
        static_q_scale: whether q_scale was given, a scale of each head: later queries have it too.
        static_k_scale: whether k_scale was, likewise.
    """

    q: torch.Tensor
    k: torch.Tensor
    v_t: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    k_mean: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    q_rows: int = 128
    k_rows: int = 128
    hadamard: bool = False
    rotary: str = "none"
    output: torch.dtype = torch.bfloat16
    cache: Cache | None = None
    static_q_scale: bool = False
    static_k_scale: bool = False

    @property
    def dtype(self) -> str:
        """Name of the codes' type."""
        return next(name for name in FP8 if TORCH_DTYPES[name] == self.q.dtype)

    @property
    def kv_len(self) -> int:
        """Keys of a head."""
        return int(self.k.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        tensors = (getattr(self, name) for name in OPERAND_TENSORS)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    def with_queries(self, q: torch.Tensor, *, rotary: Rotary | None = None) -> QuantizedAttention:
        """The same keys and values with other queries, quantized here: those of the next step.

        A q_scale that was given is theirs too.

        Args:
            q: (batch, heads, q_len, head_dim), fp16 or bf16; heads is a multiple of kv_heads.
            rotary: (cos, sin) of these queries' positions, if the operands have a rotary embedding: float32 (q_len,
                head_dim / 2) or (batch or 1, q_len, head_dim / 2).

        Returns:
            Operands that share K and V with these.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        check_floats("q", q)
        check_head_dim("q", q, self.hadamard)
        if q.device != self.k.device:
            raise ArgumentError("q", f"is on {q.device}, k is on {self.k.device}")
        batch, kv_heads, _, head_dim = self.k.shape
        check_queries(q, batch, kv_heads, head_dim)
        self._check_rotary(rotary, q)
        given = self.q_scale[:, :, :1] if self.static_q_scale else None
        if given is not None and given.stride(1) == 0:
            given = given[:, :1]  # of all heads, however many
        if given is not None and given.shape[1] not in (1, q.shape[1]):
            raise ArgumentError("q", f"has {q.shape[1]} heads, the q_scale that was given is of {given.shape[1]}")
        made = quantize_rows(
            q,
            dtype=self.dtype,
            rows=self.q_rows,
            mode="none" if self.k_mean is None else "product",
            mean=self.k_mean,
            hadamard=self.hadamard,
            scales=given,
            rotary=rotary,
            pairs=self.rotary,
        )
        q_scale = made.scales if given is None else given.expand(*q.shape[:2], -(-q.shape[2] // self.q_rows))
        return replace(self, q=made.codes, q_scale=q_scale, mean_logits=made.product, output=q.dtype)

    def append(self, k: torch.Tensor, v: torch.Tensor, *, rotary: Rotary | None = None) -> QuantizedAttention:
        """Return the same queries with keys and values behind those that there are, in the memory of ``kv_capacity``.

        The first ones decide the mean of K and the scales of V's channels: later values that exceed them saturate, as
        do those that exceed scales that were given. Keys are appended to whole blocks of 128: a length that is none
        cannot be appended to.

        Args:
            k: (batch, kv_heads, any length, head_dim), fp16 or bf16, what comes behind.
            v: as k.
            rotary: (cos, sin) of these keys' positions, if the operands have a rotary embedding: float32 (length,
                head_dim / 2) or (batch or 1, length, head_dim / 2).

        Returns:
            Operands whose K and V are longer, in the same memory.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        _check_keys(k, v, self.hadamard)
        batch, kv_heads, length, head_dim = self.k.shape
        sizes = (("batch", (batch,)), ("kv_heads", (kv_heads,)), ("length", None), ("head_dim", (head_dim,)))
        check_shape("k", k.shape, sizes)
        for name, tensor in (("k", k), ("v", v)):
            if tensor.device != self.k.device:
                raise ArgumentError(name, f"is on {tensor.device}, expected {self.k.device}")
        self._check_rotary(rotary, k)
        if self.cache is None:
            raise ArgumentError("k", "cannot be appended: quantize_attention was called without kv_capacity")
        if length % V_KEYS:
            raise ArgumentError("k", f"cannot be appended to {length} keys, only to a multiple of {V_KEYS}")
        whole_k, whole_v, whole_scale = self.cache
        end = length + k.shape[2]
        if end > whole_k.shape[2]:
            raise ArgumentError("k", f"makes {end} keys, kv_capacity is {whole_k.shape[2]}")
        blocks, keys = slice(length // self.k_rows, -(-end // self.k_rows)), -(-end // V_KEYS) * V_KEYS
        quantize_rows(
            k,
            dtype=self.dtype,
            rows=self.k_rows,
            mode="none" if self.k_mean is None else "subtract",
            mean=self.k_mean,
            hadamard=self.hadamard,
            scales=whole_scale[:, :, :1] if self.static_k_scale else None,
            rotary=rotary,
            pairs=self.rotary,
            out=whole_k[:, :, length:end],
            out_scales=None if self.static_k_scale else whole_scale[:, :, blocks],
        )
        quantize_columns(v, dtype=self.dtype, scales=self.v_scale.contiguous(), out=whole_v[..., length:keys])
        return replace(self, k=whole_k[:, :, :end], v_t=whole_v[..., :keys], k_scale=whole_scale[:, :, : blocks.stop])

    def _check_rotary(self, rotary: Any, x: torch.Tensor) -> None:
        """Check that rows are rotated exactly if those that there are have been."""
        if rotary is not None and self.rotary == "none":
            raise ArgumentError("rotary", "is given, but the operands were quantized without: leave it out")
        if rotary is None and self.rotary != "none":
            raise ArgumentError(
                "rotary", f"is missing: the operands were rotated ({self.rotary}): (cos, sin) of {x.shape[2]} rows"
            )
        if rotary is not None:
            check_rotary(rotary, x)


def quantize_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dtype: Dtype = "e4m3",
    q_rows: int = 128,
    k_rows: int = 128,
    smooth_k: bool = True,
    hadamard: bool = False,
    rotary: Rotary | None = None,
    rotary_interleaved: bool = False,
    kv_capacity: int | None = None,
    q_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    validate: bool = False,
) -> QuantizedAttention:
    """Quantize the operands of attention to FP8: ``block_sparse_attention_fp8(quantize_attention(q, k, v), pattern)``.

    Each tensor is read once from device memory, by a generated kernel. Nothing waits for the GPU.

    Scales are found, or given (static quantization): value = code * scale, of what ``smooth_k`` leaves of k, and of q
    and k as they are rotated. Values beyond a given scale saturate.

    Args:
        q: (batch, heads, q_len, head_dim), fp16 or bf16, on a GPU with FP8; head_dim 64, 96, 128, 192 or 256. The last
            dimension is contiguous, other strides are multiples of 8 elements. Attention's result has its type.
        k: (batch, kv_heads, kv_len, head_dim); heads is a multiple of kv_heads.
        v: as k.
        dtype: e4m3, or e5m2 with more range and a digit less.
        q_rows: queries that share a scale, 64 or 128.
        k_rows: keys that share a scale, 64 or 128: no more than a block of the pattern's lists has.
        smooth_k: subtract from K its mean over keys, which takes away what all keys have in common. Attention's result
            and, corrected, its log-sum-exp stay what they are; softcaps, scores and sinks ask for the logits as they
            are: False.
        hadamard: rotate q and k, so that outliers of a few columns are spread over all; head_dim 64, 128 or 256.
        rotary: (cos, sin) of the rotary embedding, applied to q and k before all else, in float32: float32 (length,
            head_dim / 2) or (batch or 1, length, head_dim / 2), where q and k have the same length; head_dim 64, 128 or
            256. The last dimension is contiguous, other strides are multiples of 4 elements. None: q and k are as they
            are to be.
        rotary_interleaved: rotate elements 2 i and 2 i + 1 with each other (GPT-J), not i and i + head_dim / 2
            (GPT-NeoX, Llama).
        kv_capacity: keys to reserve memory for, so that ``append`` can add some; None: as many as there are.
        q_scale: scale of q, from 2^-120 to 2^120: a number, or float32 (), (heads,) or (batch, heads), as
            ``scales_of`` returns it. None: found, of each block.
        k_scale: scale of k, likewise, or float32 (kv_heads,) or (batch, kv_heads).
        v_scale: scale of v, as that of k, or float32 (batch, kv_heads, head_dim). None: found, of each channel.
        validate: also check the values of given tensors of scales, which waits for the GPU.

    Returns:
        The operands of ``block_sparse_attention_fp8``; scales that were given are expanded views.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
        DeviceError: for a GPU without FP8.
    """
    check_dtype(dtype)
    for name, rows in (("q_rows", q_rows), ("k_rows", k_rows)):
        if type(rows) is not int or rows not in BLOCK_ROWS:
            raise ArgumentError(name, f"is {shown(rows)}, expected {' or '.join(map(str, BLOCK_ROWS))}")
    for name, flag in (
        ("smooth_k", smooth_k),
        ("hadamard", hadamard),
        ("rotary_interleaved", rotary_interleaved),
        ("validate", validate),
    ):
        check_flag(name, flag)
    check_floats("q", q)
    check_head_dim("q", q, hadamard)
    _check_keys(k, v, hadamard)
    batch, kv_heads, length, head_dim = k.shape
    check_queries(q, batch, kv_heads, head_dim)
    for name, tensor in (("k", k), ("v", v)):
        if (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise ArgumentError(name, f"is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}")
    rotary, pairs = _rotary_of(rotary, q, length, interleaved=rotary_interleaved)
    blocks, keys = -(-length // k_rows), -(-length // V_KEYS) * V_KEYS
    shapes = {
        "q_scale": (batch, q.shape[1], -(-q.shape[2] // q_rows)),
        "k_scale": (batch, kv_heads, blocks),
        "v_scale": (batch, kv_heads, head_dim),
    }
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    given = _given_scales(scales, shapes, q.device, validate=validate)
    of_heads = {name: scale[:, :, :1] for name, scale in given.items()}
    cache = None if kv_capacity is None else _reserved(k, dtype, k_rows, kv_capacity, of_heads.get("k_scale"))
    into = {}
    if cache is not None:
        into = {"out": cache[0][:, :, :length], "out_scales": cache[2][:, :, :blocks] if k_scale is None else None}
    mode = "subtract" if smooth_k else "none"
    of_k = quantize_rows(
        k,
        dtype=dtype,
        rows=k_rows,
        mode=mode,
        hadamard=hadamard,
        scales=of_heads.get("k_scale"),
        rotary=rotary,
        pairs=pairs,
        **into,
    )
    of_v = quantize_columns(
        v,
        dtype=dtype,
        scales=given["v_scale"].contiguous() if "v_scale" in given else None,
        out=None if cache is None else cache[1][..., :keys],
    )
    mode = "product" if smooth_k else "none"
    of_q = quantize_rows(
        q,
        dtype=dtype,
        rows=q_rows,
        mode=mode,
        mean=of_k.mean,
        hadamard=hadamard,
        scales=of_heads.get("q_scale"),
        rotary=rotary,
        pairs=pairs,
    )
    return QuantizedAttention(
        q=of_q.codes,
        k=of_k.codes,
        v_t=of_v.codes,
        q_scale=given.get("q_scale", of_q.scales),
        k_scale=given.get("k_scale", of_k.scales),
        v_scale=given.get("v_scale", of_v.scales),
        k_mean=of_k.mean,
        mean_logits=of_q.product,
        q_rows=q_rows,
        k_rows=k_rows,
        hadamard=hadamard,
        rotary=pairs,
        output=q.dtype,
        cache=cache,
        static_q_scale=q_scale is not None,
        static_k_scale=k_scale is not None,
    )


def _rotary_of(
    rotary: Any, q: torch.Tensor, kv_len: int, *, interleaved: bool
) -> tuple[Rotary | None, Literal["none", "half", "interleaved"]]:
    """Return cosines and sines, checked against q and k, and which pairs of elements they rotate."""
    if rotary is None:
        if interleaved:
            raise ArgumentError("rotary_interleaved", "is True without rotary: pass (cos, sin), or leave it out")
        return None, "none"
    found = check_rotary(rotary, q)
    if q.shape[2] != kv_len:
        raise ArgumentError(
            "rotary",
            f"is given for {q.shape[2]} queries and {kv_len} keys, expected as many: quantize as many, and other "
            "queries by with_queries",
        )
    return found, "interleaved" if interleaved else "half"


def _given_scales(
    scales: dict[str, float | torch.Tensor | None],
    shapes: dict[str, tuple[int, int, int]],
    device: torch.device,
    *,
    validate: bool,
) -> dict[str, torch.Tensor]:
    """Return the scales that are given, as views of one for each head and block, or column."""
    given = {
        name: spread(name, scale, shapes[name], device, last=name == "v_scale")
        for name, scale in scales.items()
        if scale is not None
    }
    for name, scale in given.items() if validate else ():
        check_values(name, scale)
    return given


def check_queries(q: torch.Tensor, batch: int, kv_heads: int, head_dim: int) -> None:
    """Check q against k.

    Raises:
        ArgumentError: with the shape expected.
    """
    sizes = (("batch", (batch,)), ("heads", None), ("q_len", None), ("head_dim", (head_dim,)))
    check_shape("q", q.shape, sizes)
    if q.shape[1] % kv_heads:
        raise ArgumentError("q", f"has {q.shape[1]} heads, k has {kv_heads}: not a multiple")


def _check_keys(k: Any, v: Any, hadamard: bool) -> None:
    """Check k and v against each other."""
    for name, tensor in (("k", k), ("v", v)):
        check_floats(name, tensor)
        check_head_dim(name, tensor, hadamard)
    check_shape("v", v.shape, [(axis, (size,)) for axis, size in zip(KEY_AXES, k.shape, strict=True)])


def _reserved(k: torch.Tensor, dtype: str, k_rows: int, capacity: Any, k_scale: torch.Tensor | None) -> Cache:
    """Memory for k, v_t and k_scale; a given tensor is a view of it.

    Codes are zeros, as attention multiplies what lies behind the last key.
    """
    batch, kv_heads, length, head_dim = k.shape
    if isinstance(capacity, bool) or not isinstance(capacity, int) or not length <= capacity <= MAX_EXTENT:
        allowed = f"{length} keys or more, {MAX_EXTENT} at most"
        raise ArgumentError("kv_capacity", f"is {shown(capacity)}, expected {allowed}")
    keys = -(-capacity // V_KEYS) * V_KEYS
    codes = k.new_zeros(0, dtype=TORCH_DTYPES[dtype])
    scales = (batch, kv_heads, keys // k_rows)
    return (
        codes.new_zeros((batch, kv_heads, keys, head_dim)),
        codes.new_zeros((batch, kv_heads, head_dim, keys)),
        torch.ones(scales, device=k.device) if k_scale is None else k_scale.expand(scales),
    )
