"""Kernels by the definition in place of all that the table of modes calls, so that its cells run on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bsr_oracle
import oracle_kernel
import pytest
import torch
from mode_rows import values_of

from codegen.library import NamedSpec, find_spec, unnamed_stem
from codegen.parse import parse_spec
from codegen.patterns.block_lists import expression_of
from codegen.select import Choice
from codegen.spec import QuantizeSpec
from runtime.errors import ArgumentError
from runtime.kernels.quantize import Quantized
from runtime.ops import (
    attention_calls,
    attention_choice,
    attention_fp8,
    attention_launches,
    block_mask,
    bsr_choice,
    quantize,
)
from runtime.ops.attention_calls import Route
from runtime.ops.quantize_attention import QuantizedAttention
from runtime.verify import block_mask as lists_by_definition
from runtime.verify.quantize import expected

CPU = torch.device("cpu")


class Fp8Oracle:
    """Stands for an Fp8AttentionKernel: computes with what codes and scales stand for."""

    def __init__(self, kernel: oracle_kernel.OracleKernel) -> None:
        self.spec = kernel.spec
        self._kernel = kernel

    def __call__(self, q: Any, k: Any, v_t: Any, *lists: Any, **options: Any) -> Any:
        scales = {name: options.pop(name) for name in ("q_scale", "k_scale", "v_scale")}
        given = values_of(QuantizedAttention(q, k, v_t, **scales))
        out = options.pop("out")
        found = self._kernel(*given, *lists, out=None, **options)
        made = torch.empty(q.shape, dtype=torch.bfloat16) if out is None else out
        return type(found)(made.copy_(found.out), found.lse)


class QuantizeOracle:
    """Stands for a QuantizeKernel."""

    def __init__(self, fields: str) -> None:
        spec = find_spec({"op": "quantize", "arch": "sm_90a", **json.loads(fields)}).spec
        assert isinstance(spec, QuantizeSpec)
        self.spec = spec

    def __call__(
        self, x: Any, *, mean: Any, scales: Any, rotary: Any, out: Any = None, out_scales: Any = None
    ) -> Quantized:
        product = None
        if self.spec.mean == "subtract" and mean is None:
            mean = x.float().mean(2)
        if self.spec.mean == "product":
            product = (x.float() * mean.repeat_interleave(x.shape[1] // mean.shape[1], 1)[:, :, None]).sum(-1)
        found = expected(x, self.spec, mean if self.spec.mean == "subtract" else None, scales, rotary)
        codes = found.codes if out is None else out.copy_(found.codes[..., : out.shape[-1]])
        kept = found.scales if out_scales is None else out_scales.copy_(found.scales)
        return Quantized(codes, kept, mean if self.spec.mean == "subtract" else None, product)


class BlockMaskOracle:
    """Stands for a BlockMaskKernel."""

    def __init__(self, pattern: str) -> None:
        self.spec: Any = find_spec({"op": "block_mask", "arch": "sm_90a", "pattern": json.loads(pattern)}).spec

    def __call__(self, batch: int, heads: int, q_len: int, kv_len: int, *, aux: Any, device: Any) -> Any:
        pattern = self.spec.pattern
        node = expression_of(pattern.mask, {tensor.name: str(tensor) for tensor in self.spec.aux_tensors})
        sizes = {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len}
        seen = lists_by_definition.seen_pairs(node, sizes, aux, CPU)
        return lists_by_definition.lists_of(seen, (pattern.block.q, pattern.block.kv))


def _selected(
    q: Any, k: Any, *, block_q: int, block_kv: int, topk: int, causal: bool, always: list[int]
) -> torch.Tensor:
    """Select by the definition, blocks that divide the lengths."""
    assert not always
    means = [x.double().unflatten(2, (-1, size)).mean(3) for x, size in ((q, block_q), (k, block_kv))]
    product = means[0] @ means[1].repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    last = (torch.arange(product.shape[2]) + 1) * block_q + k.shape[2] - q.shape[2]
    if causal:
        product = product.masked_fill(torch.arange(product.shape[3]) * block_kv >= last[:, None], -torch.inf)
    found = product.topk(topk, -1)
    blocks = torch.where(found.values == -torch.inf, product.shape[3], found.indices).sort(-1).values
    return torch.where(blocks == product.shape[3], -1, blocks).int()


@contextmanager
def installed() -> Iterator[None]:
    """Let every call compute by the definition, on the CPU, with the choice of kernels of an H100."""
    with pytest.MonkeyPatch.context() as patch:
        oracle_kernel.install(patch)
        bsr_oracle.install(patch)
        for module in (attention_choice, bsr_choice):
            patch.setattr(module, "choose", _default)
        chosen = [
            each for m in (attention_choice, bsr_choice) for each in vars(m).values() if hasattr(each, "cache_clear")
        ]
        for each in chosen:
            each.cache_clear()
        patch.setattr(attention_fp8, "check_tensor", oracle_kernel._check_tensor)
        patch.setattr(attention_fp8, "_routes", attention_fp8.Signatures())
        patch.setattr(attention_launches.launches, "_kept", {})
        patch.setattr(attention_fp8, "remember", _remember)
        patch.setattr(quantize, "DEVICES", ("cpu", "cuda", "meta"))
        patch.setattr(quantize, "_kernel", lambda index, spec: QuantizeOracle(spec))
        patch.setattr(block_mask, "_kernel", lambda index, pattern: BlockMaskOracle(pattern))
        patch.setattr(block_mask, "device_of", _device_of)
        library = torch.library.Library("sparse_kernel_codegen", "IMPL")
        library.impl("select_topk_blocks", _selected, "CPU")
        try:
            yield
        finally:
            library._destroy()
            for each in chosen:  # which are not those of the table of measurements
                each.cache_clear()


def _remember(call: Any) -> Route:
    found = attention_calls.remember(call)
    return Route(Fp8Oracle(found.kernel), found.scale, found.arranged, found.indices)  # type: ignore[arg-type]


def _default(given: Any, sizes: Any = None, **_: Any) -> Choice:
    """Choose the rules' default, in place of the fastest: that takes seconds for a class that was not measured."""
    spec = parse_spec(given if isinstance(given, dict) else given.fields())
    return Choice(NamedSpec(stem=unnamed_stem(spec), spec=spec), "default", "nothing was measured here")


def _device_of(device: Any, tensors: tuple[Any, ...]) -> torch.device:
    found = next((tensor.device for tensor in tensors), CPU)
    if found != CPU:
        raise ArgumentError("device", f"is {found}, expected the CPU, where oracles stand for kernels")
    return CPU
