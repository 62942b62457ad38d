"""Calls of attention kernels with FP8 inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from codegen.fp8 import KEYS_TOGETHER
from runtime.compile.compiler import Compiled
from runtime.driver.launch import LoadedKernel
from runtime.errors import ArgumentError
from runtime.kernels.arguments import MAX_EXTENT, check_shape, check_tensor
from runtime.kernels.attention import SCALES, AttentionKernel, AttentionResult
from runtime.prepare.prepared import PreparedLists


class Fp8AttentionKernel(AttentionKernel):
    """softmax(scale * Q K^T) V of FP8 inputs with their scales: what a number is times, to be what was quantized.

    Call it with what ``quantize_attention`` returns, or with tensors and scales of your own.
    """

    def __init__(self, compiled: Compiled, loaded: LoadedKernel) -> None:
        super().__init__(compiled, loaded)
        self._argument_names = ("q", "k", "v_t", *self._index_names)

    def __call__(  # type: ignore[override]
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v_t: torch.Tensor,
        *indices: torch.Tensor | PreparedLists | None,
        q_scale: torch.Tensor,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        scale: float | None = None,
        out: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        return_lse: bool | None = None,
        window: tuple[int, int] | None = None,
        sink_keys: int | None = None,
        validate: bool = False,
        aux: Mapping[str, torch.Tensor] | None = None,
        **named_indices: torch.Tensor | PreparedLists | None,
    ) -> AttentionResult:
        """Compute attention.

        Args:
            q: (batch, heads, q_len, d), the spec's dtype; the last dimension contiguous, other strides any multiple of
                16 bytes. d is the spec's head_dim; kernels for sm_90a also take any multiple of 16 below it.
            k: (batch, kv_heads, kv_len, d); heads is a multiple of kv_heads.
            v_t: (batch, kv_heads, d, kv_len rounded up to a multiple of 16, or more), V transposed, the keys of each 16
                in the order of ``codegen.fp8.KEY_ORDER``, zeros behind the last key.
            indices: as of other kernels.
            q_scale: float32 (batch, heads, ceil(q_len / scale_rows.q)), any strides: one for all is an expanded view.
                What a number of q is times is the number that was quantized.
            k_scale: float32 (batch, kv_heads, ceil(kv_len / scale_rows.k)), any strides.
            v_scale: float32 (batch, kv_heads, d), any strides.
            scale: softmax scale, of the numbers that were quantized; by default 1 / sqrt(d).
            out: (batch, heads, q_len, d) of the spec's ``output`` to write into; allocated like q by default.
            sink, return_lse, window, sink_keys: as of other kernels.
            validate: also check the values of the index tensors, of the sink and of the scales: each is positive and
                finite. Costs a kernel and a synchronization.
            aux: as of other kernels.
            named_indices: the index tensors by name.

        Returns:
            (out, lse), as of other kernels, of the numbers that were quantized.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        options: dict[str, Any] = {"scale": scale, "out": out, "sink": sink, "return_lse": return_lse}
        options |= {"window": window, "sink_keys": sink_keys, "validate": validate, "aux": aux}
        options |= {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, **named_indices}
        return super().__call__(q, k, v_t, *indices, **options)

    def _check_v(self, v: torch.Tensor, k: torch.Tensor) -> None:
        batch, kv_heads, kv_len, d = k.shape
        padded = -(-kv_len // KEYS_TOGETHER) * KEYS_TOGETHER
        keys = f"kv_len {kv_len} rounded up to a multiple of {KEYS_TOGETHER}: {padded} or more"
        if v.shape[3] >= padded and v.shape[3] % KEYS_TOGETHER == 0:
            padded = v.shape[3]
        sizes = [("batch", (batch,)), ("kv_heads", (kv_heads,)), ("head_dim", (d,)), (keys, (padded,))]
        check_shape("v_t", v.shape, [(name, sizes) for name, sizes in sizes])

    def _check_scales(self, q: torch.Tensor, k: torch.Tensor, scales: tuple[Any, ...]) -> dict[str, int]:
        rows = self.spec.scale_rows
        q_rows, k_rows = -(-q.shape[2] // rows.q), -(-k.shape[2] // rows.k)
        last = {
            "q_scale": (q.shape[1], "row", f"ceil(q_len / scale_rows.q {rows.q})", q_rows),
            "k_scale": (k.shape[1], "row", f"ceil(kv_len / scale_rows.k {rows.k})", k_rows),
            "v_scale": (k.shape[1], "column", "head_dim", k.shape[3]),
        }
        values: dict[str, int] = {name: int(n) for name, n in self._plan.own({"last_column": k.shape[3] - 1}).items()}
        for name, tensor in zip(SCALES, scales, strict=True):
            heads, axis, what, count = last[name]
            check_tensor(name, tensor, torch.float32, 3, q.device)
            sizes = [("batch", (q.shape[0],)), ("heads", (heads,)), (what, (count,))]
            check_shape(name, tensor.shape, sizes)
            if max(tensor.stride()) * max(tensor.shape) >= MAX_EXTENT:
                what = f"has strides {tensor.stride()}: its scales must lie within {MAX_EXTENT} elements"
                raise ArgumentError(name, what)
            for of, stride in zip(("batch", "head", axis), tensor.stride(), strict=True):
                values[f"{name}_{of}_stride"] = stride
        return values

    def _check_values(self, scales: tuple[Any, ...]) -> None:
        for name, tensor in zip(SCALES, scales, strict=True):
            wrong = tensor[~((tensor > 0) & torch.isfinite(tensor))].tolist()
            if wrong:
                raise ArgumentError(name, f"has {wrong[0]}, expected positive, finite numbers")
