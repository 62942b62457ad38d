"""Operands of FP8 attention from existing codes and scales."""

from __future__ import annotations

import torch

from codegen.dtypes import FP8
from codegen.fp8 import KEYS_TOGETHER, V_KEYS
from codegen.wording import shown
from runtime.checks import check_dense
from runtime.errors import ArgumentError
from runtime.kernels.arguments import TORCH_DTYPES, check_number, check_shape
from runtime.ops.attention_choice import DTYPES
from runtime.ops.quantize import BLOCK_ROWS, check_head_dim
from runtime.ops.quantize_attention import KEY_AXES, QuantizedAttention, check_queries
from runtime.ops.static_scales import spread


def quantized_operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_scale: float | torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    q_rows: int = 128,
    k_rows: int = 128,
    output: torch.dtype = torch.bfloat16,
) -> QuantizedAttention:
    """Combine existing FP8 tensors and their scales into operands of attention: value = code * scale.

    Args:
        q: (batch, heads, q_len, head_dim), torch.float8_e4m3fn or torch.float8_e5m2.
        k: (batch, kv_heads, kv_len, head_dim), of the same dtype.
        v: as k; this function transposes it.
        q_scale: one number for the whole tensor, or float32 (), (heads,), (batch, heads) or (batch, heads, blocks).
        k_scale: a number, or float32 (), (kv_heads,), (batch, kv_heads) or (batch, kv_heads, blocks).
        v_scale: a number, or float32 (), (kv_heads,), (batch, kv_heads) or (batch, kv_heads, head_dim).
        q_rows: queries that share a scale, 64 or 128.
        k_rows: keys that share a scale, 64 or 128.
        output: dtype of the attention result.

    Returns:
        The operands of ``block_sparse_attention_fp8``. Scales with fewer elements are expanded views.

    Raises:
        ArgumentError: naming the argument.
    """
    codes = tuple(TORCH_DTYPES[name] for name in FP8)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in codes or tensor.dtype != q.dtype:
            what = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            expected = f"{' or '.join(map(str, codes))}, as q; other types: sparse_kernel_codegen.quantize_attention"
            raise ArgumentError(name, f"is {what}, expected {expected}")
        check_dense(name, tensor)
        check_head_dim(name, tensor, hadamard=False)
    if not isinstance(output, torch.dtype) or output not in DTYPES:
        raise ArgumentError("output", f"is {shown(output)}, expected {' or '.join(map(str, DTYPES))}")
    for name, rows in (("q_rows", q_rows), ("k_rows", k_rows)):
        if type(rows) is not int or rows not in BLOCK_ROWS:
            raise ArgumentError(name, f"is {shown(rows)}, expected {' or '.join(map(str, BLOCK_ROWS))}")
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(scale, torch.Tensor):
            check_dense(name, scale)
        elif isinstance(scale, int):
            check_number(name, scale)  # an int may have more digits than a message should
    batch, kv_heads, length, head_dim = k.shape
    check_queries(q, batch, kv_heads, head_dim)
    check_shape("v", v.shape, [(axis, (size,)) for axis, size in zip(KEY_AXES, k.shape, strict=True)])
    heads, q_len = q.shape[1:3]
    return QuantizedAttention(
        q=q,
        k=k,
        v_t=transposed_values(v),
        q_scale=spread("q_scale", q_scale, (batch, heads, -(-q_len // q_rows)), q.device, last=True),
        k_scale=spread("k_scale", k_scale, (batch, kv_heads, -(-length // k_rows)), q.device, last=True),
        v_scale=spread("v_scale", v_scale, (batch, kv_heads, head_dim), q.device, last=True),
        q_rows=q_rows,
        k_rows=k_rows,
        output=output,
    )


def transposed_values(v: torch.Tensor) -> torch.Tensor:
    """Return V^T of codes (batch, kv_heads, kv_len, head_dim), as ``QuantizedAttention.v_t`` has it."""
    bits = torch.nn.functional.pad(v.view(torch.uint8), (0, 0, 0, -v.shape[2] % V_KEYS))
    # KEY_ORDER interleaves the pairs of the two halves, 4 pairs each. Indexing with it would copy it from the host.
    ordered = bits.unflatten(2, (-1, 2, KEYS_TOGETHER // 4, 2)).transpose(3, 4).flatten(2, 5)
    found: torch.Tensor = ordered.mT.contiguous().view(v.dtype)
    return found
