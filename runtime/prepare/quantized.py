"""FP8 inputs of attention, quantized by torch on any device, for oracles and measurements."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from codegen.dtypes import LARGEST
from codegen.fp8 import KEY_ORDER, KEYS_TOGETHER

FP8_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_LEAST = 1e-12  # amax of a block of zeros, so that its scale is positive


@dataclass(frozen=True)
class QuantizedInputs:
    """Arguments of an FP8 kernel, with the quantized tensors.

    Attributes:
        q: (batch, heads, q_len, d) in FP8.
        k: (batch, kv_heads, kv_len, d).
        v: as k.
        v_t: V in the kernels' layout, (batch, kv_heads, d, kv_len rounded up to a multiple of 16).
        q_scale: float32 (batch, heads, blocks of rows).
        k_scale: float32 (batch, kv_heads, blocks of rows).
        v_scale: float32 (batch, kv_heads, d).
        q_rows: rows of Q that share a scale.
        k_rows: rows of K that share a scale.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    v_t: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    q_rows: int
    k_rows: int

    def scales(self) -> dict[str, torch.Tensor]:
        """Scale arguments of a call."""
        return {"q_scale": self.q_scale, "k_scale": self.k_scale, "v_scale": self.v_scale}

    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Dequantized q, k and v, in float64."""
        q, k = (
            x.double() * scale.double().repeat_interleave(rows, 2)[:, :, : x.shape[2], None]
            for x, scale, rows in ((self.q, self.q_scale, self.q_rows), (self.k, self.k_scale, self.k_rows))
        )
        return q, k, self.v.double() * self.v_scale.double()[:, :, None]


def transposed(v: torch.Tensor) -> torch.Tensor:
    """Convert V (batch, kv_heads, kv_len, d) to the FP8 kernels' layout: transposed, with each 16 keys in the kernels'
    order."""
    batch, heads, length, d = v.shape
    groups = -(-length // KEYS_TOGETHER)
    padded = torch.zeros((batch, heads, groups * KEYS_TOGETHER, d), dtype=torch.uint8, device=v.device)
    padded[:, :, :length] = v.view(torch.uint8)
    ordered = padded.unflatten(2, (groups, KEYS_TOGETHER))[:, :, :, list(KEY_ORDER)].flatten(2, 3)
    found: torch.Tensor = ordered.transpose(2, 3).contiguous().view(v.dtype)
    return found


def quantize(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: str, *, q_rows: int, k_rows: int, scales: str = "blocks"
) -> QuantizedInputs:
    """Quantize q, k and v by their largest elements.

    Args:
        q: (batch, heads, q_len, d).
        k: (batch, kv_heads, kv_len, d).
        v: as k.
        dtype: ``e4m3`` or ``e5m2``.
        q_rows: rows of Q that share a scale.
        k_rows: rows of K that share a scale.
        scales: ``blocks``: scales of row blocks of Q and K, and of each channel of V; ``heads`` or ``tensor``: one
            scale per head or tensor, as expanded views with strides of 0.
    """
    to, largest = FP8_TYPES[dtype], LARGEST[dtype]

    def of_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
        blocks = -(-x.shape[2] // rows)
        padded: torch.Tensor = torch.nn.functional.pad(x.float(), (0, 0, 0, blocks * rows - x.shape[2]))
        return torch.amax(padded.unflatten(2, (blocks, rows)).abs(), (3, 4))

    def shared(amax: torch.Tensor) -> torch.Tensor:
        dims = {"blocks": (), "heads": (2,), "tensor": (0, 1, 2)}[scales]
        return (amax.amax(dims, keepdim=True) if dims else amax).clamp(min=_LEAST).div(largest).expand(amax.shape)

    q_scale, k_scale = shared(of_rows(q, q_rows)), shared(of_rows(k, k_rows))
    v_scale = shared(v.float().abs().amax(2))
    q8, k8 = (
        (x.float() / scale.repeat_interleave(rows, 2)[:, :, : x.shape[2], None]).clamp(-largest, largest).to(to)
        for x, scale, rows in ((q, q_scale, q_rows), (k, k_scale, k_rows))
    )
    v8 = (v.float() / v_scale[:, :, None]).clamp(-largest, largest).to(to)
    return QuantizedInputs(q8, k8, v8, transposed(v8), q_scale, k_scale, v_scale, q_rows, k_rows)
