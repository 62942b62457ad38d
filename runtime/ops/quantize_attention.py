"""Operands of FP8 attention: quantized from q, k and v, and kept as a KV cache."""

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
"""Names of the fields of :class:`QuantizedAttention` that hold a tensor or None."""


@dataclass(frozen=True)
class QuantizedAttention:
    """q, k and v in FP8, the operands of ``block_sparse_attention_fp8``: value = code * scale.

    Attributes:
        q: codes (batch, heads, q_len, head_dim).
        k: codes (batch, kv_heads, kv_len, head_dim).
        v_t: codes of V^T (batch, kv_heads, head_dim, keys). Keys are padded with zeros to a multiple of 16, and each 16
            are in the order of ``codegen.fp8.KEY_ORDER``.
        q_scale: float32 (batch, heads, blocks of ``q_rows``), any strides.
        k_scale: float32 (batch, kv_heads, blocks of ``k_rows``), any strides.
        v_scale: float32 (batch, kv_heads, head_dim), any strides.
        k_mean: float32 (batch, kv_heads, head_dim), the mean subtracted from each key, or None. It does not change the
            attention result: all logits of a query shift by the same number.
        mean_logits: float32 (batch, heads, q_len), that shift before the softmax scale: q times ``k_mean``. It is added
            to the log-sum-exp, if requested.
        q_rows: queries that share a scale.
        k_rows: keys that share a scale.
        hadamard: whether q and k are rotated.
        rotary: pairing of the rotary embedding applied to q and k, ``half`` or ``interleaved``, as in the spec's field;
            ``none`` without one.
        output: dtype of the result.
        cache: reserved memory of k, v_t and k_scale, into which ``append`` writes; None without ``kv_capacity``.
        static_q_scale: whether q_scale was given, one scale per head; later queries use it too.
        static_k_scale: whether k_scale was given, one scale per head; later keys use it too.
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
        """Name of the codes' dtype."""
        return next(name for name in FP8 if TORCH_DTYPES[name] == self.q.dtype)

    @property
    def kv_len(self) -> int:
        """Keys per head."""
        return int(self.k.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        tensors = (getattr(self, name) for name in OPERAND_TENSORS)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    def with_queries(self, q: torch.Tensor, *, rotary: Rotary | None = None) -> QuantizedAttention:
        """Return operands with the same keys and values and new queries, which are quantized here.

        A q_scale passed to ``quantize_attention`` is used for them too.

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
            given = given[:, :1]  # one scale for all heads, of any number
        if given is not None and given.shape[1] not in (1, q.shape[1]):
            raise ArgumentError("q", f"has {q.shape[1]} heads, but the given q_scale has {given.shape[1]}")
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
        """Append keys and values, in the memory reserved by ``kv_capacity``; the queries stay the same.

        The first keys and values determine the mean of K and the scales of V's channels. Later values beyond these or
        any given scales saturate. Appending requires that the current length is a multiple of 128.

        Args:
            k: keys to append, (batch, kv_heads, any length, head_dim), fp16 or bf16.
            v: as k.
            rotary: (cos, sin) of these keys' positions, if the operands have a rotary embedding: float32 (length,
                head_dim / 2) or (batch or 1, length, head_dim / 2).

        Returns:
            Operands with the longer K and V, in the same memory.

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
        """Check that new rows have a rotary embedding exactly if the existing ones have one."""
        if rotary is not None and self.rotary == "none":
            raise ArgumentError("rotary", "is given, but the operands were quantized without rotary: leave it out")
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

    Generated kernels read each tensor once from device memory. The call does not synchronize.

    Scales are computed, or given (static quantization): value = code * scale. They apply to k after ``smooth_k``, and
    to q and k after ``rotary`` and ``hadamard``. Values beyond a given scale saturate.

    Args:
        q: (batch, heads, q_len, head_dim), fp16 or bf16, on a GPU with FP8; head_dim 64, 96, 128, 192 or 256. The last
            dimension is contiguous, other strides are multiples of 8 elements. The attention result has the dtype of q.
        k: (batch, kv_heads, kv_len, head_dim); heads is a multiple of kv_heads.
        v: as k.
        dtype: "e4m3", or "e5m2", which has more range and one mantissa bit less.
        q_rows: queries that share a scale, 64 or 128.
        k_rows: keys that share a scale, 64 or 128; at most the keys of a block of the pattern.
        smooth_k: subtract the mean over keys from K, which removes the component that all keys share. The attention
            result does not change, and the log-sum-exp is corrected. Pass False with softcaps, scores and sinks, which
            depend on the original logits.
        hadamard: multiply q and k by a Hadamard matrix, which spreads outliers of a few columns over all; head_dim 64,
            128 or 256.
        rotary: (cos, sin) of the rotary embedding, applied first to q and k in float32: float32 (length, head_dim / 2)
            or (batch or 1, length, head_dim / 2). q and k must have the same length; head_dim 64, 128 or 256. The last
            dimension is contiguous, other strides are multiples of 4 elements. None: no rotary embedding.
        rotary_interleaved: pair elements 2 i and 2 i + 1 (GPT-J) instead of i and i + head_dim / 2 (GPT-NeoX, Llama).
        kv_capacity: keys to reserve memory for, so that ``append`` can add keys. None: no reserve.
        q_scale: scale of q, from 2^-120 to 2^120: a number, or float32 (), (heads,) or (batch, heads), as ``scales_of``
            returns it. None: computed per block.
        k_scale: scale of k, in the same forms: a number, or float32 (), (kv_heads,) or (batch, kv_heads).
        v_scale: scale of v, as k_scale, or float32 (batch, kv_heads, head_dim). None: computed per channel.
        validate: also check the values of given scale tensors (synchronizes).

    Returns:
        The operands of ``block_sparse_attention_fp8``. Given scales are expanded views.

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
    """Checked cosines and sines, and the pairing of elements that they rotate."""
    if rotary is None:
        if interleaved:
            raise ArgumentError("rotary_interleaved", "is True without rotary: pass (cos, sin), or leave it out")
        return None, "none"
    found = check_rotary(rotary, q)
    if q.shape[2] != kv_len:
        raise ArgumentError(
            "rotary",
            f"is given for {q.shape[2]} queries and {kv_len} keys, expected equal lengths: quantize as many "
            "queries as keys, and others by with_queries",
        )
    return found, "interleaved" if interleaved else "half"


def _given_scales(
    scales: dict[str, float | torch.Tensor | None],
    shapes: dict[str, tuple[int, int, int]],
    device: torch.device,
    *,
    validate: bool,
) -> dict[str, torch.Tensor]:
    """Given scales as views with one scale per head and block, or per head and column."""
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
        ArgumentError: with the expected shape.
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
    """Reserved memory of k, v_t and k_scale. A given k_scale is expanded as a view.

    Codes are initialized to zeros, because attention multiplies the codes after the last key.
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
        torch.ones(scales, dtype=torch.float32, device=k.device) if k_scale is None else k_scale.expand(scales),
    )
