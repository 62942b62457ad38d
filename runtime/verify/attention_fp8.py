"""Cases of attention with FP8 inputs: the cases of other dtypes, quantized, and an emulation of the kernel's rounding.

The oracle computes in float64 with the values of codes times scales, so errors are the kernel's alone. Most errors come
from P, which is rounded to 3 bits, or with large logits from Q K^T: the tensor core keeps about 14 bits of it. The
rounding of a row depends on the maximum to which its weights are relative, so a kernel's error is compared with the
emulation's error, not with its bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from codegen.spec import AttentionSpec
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.prepare.quantized import QuantizedInputs, quantize
from runtime.verify import attention, tensor_core_fp8
from runtime.verify.common import ROUNDOFF, Outcome, max_error, poisoned_memory

WEIGHT_SHIFT = 7  # log2 of the largest weight in kernels
RMS_TO_EMULATION = 1.25
MAX_TO_EMULATION = 2.0
BELOW_MAXIMUM = (0.6, 1.2, 1.8)
"""Samples of log2 of the gap, up to kRescaleThreshold, between a row's maximum and the maximum that its weights are
relative to. The largest error of a case varies with the gap, more than twofold if few weights dominate a row."""
FEW = 4096  # up to this number of elements the rms error varies between roundings
RMS_OF_FEW = 2.0
LSE_ERROR = 2.0**-4
"""Tolerance of an LSE, relative to max(|LSE|, 1). The LSE sums the rounded weights, so that it merges results over
parts of the keys exactly, and the tensor core accumulates products of Q and K in about 14 bits."""
SCALES = ("blocks", "heads", "tensor")


def quantized(spec: AttentionSpec, case: attention.Case, inputs: attention.Inputs) -> QuantizedInputs:
    """Quantize the inputs of a case to FP8; its name determines which scales are shared."""
    scales = SCALES[sum(case.name.encode()) % len(SCALES)]
    rows = spec.scale_rows
    return quantize(inputs.q, inputs.k, inputs.v, spec.dtype, q_rows=rows.q, k_rows=rows.k, scales=scales)


def emulated_products(given: QuantizedInputs) -> torch.Tensor:
    """Compute Q K^T of all heads, float64, with the tensor core's accumulation."""
    group = given.q.shape[1] // given.k.shape[1]
    k, k_scale = (x.repeat_interleave(group, 1) for x in (given.k.float(), given.k_scale))
    of_queries = given.q_scale.double().repeat_interleave(given.q_rows, 2)[:, :, : given.q.shape[2], None]
    of_keys = k_scale.double().repeat_interleave(given.k_rows, 2)[:, :, None, : k.shape[2]]
    return tensor_core_fp8.products(given.q.float(), k).double() * of_queries * of_keys


def emulated(
    each: torch.Tensor, weight: torch.Tensor, given: QuantizedInputs, rest: torch.Tensor, kernel: Any
) -> torch.Tensor:
    """Compute O with P rounded as in the kernel, and P V with the tensor core's accumulation.

    Args:
        each: exp(logit - maximum of its row) of each pair.
        weight: multiplicity of each pair.
        given: the inputs; only V is used.
        rest: the sink's term of each row sum.
        kernel: the kernel, whose constants and spec determine the summation.
    """
    spec: AttentionSpec = kernel.spec
    v, v_scale = _of_all_heads(each, given)
    codes = _codes(each, weight, WEIGHT_SHIFT)
    constants = {constant.name: constant.value for constant in kernel.compiled.plan.constants}
    flush_every = spec.accumulate_every * int(constants["kTileN"]) or None
    out = tensor_core_fp8.products(codes, v.mT, flush_every=flush_every).double() * v_scale[:, :, None]
    # Kernels sum the rounded weights with a column of ones beside V, or sum the weights themselves.
    if "kSumColumns" in constants:
        ones = torch.ones((*v.shape[:2], 1, v.shape[2]), device=v.device)
        sums = tensor_core_fp8.products(codes, ones, flush_every=flush_every)
    else:
        sums = (weight * each).sum(-1, keepdim=True) * 2.0**WEIGHT_SHIFT
    total = sums.double() + rest * 2.0**WEIGHT_SHIFT
    return torch.where(total > 0, out / total, 0.0)


def emulated_roundings(
    each: torch.Tensor, weight: torch.Tensor, given: QuantizedInputs, rest: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yield O with P rounded relative to other maxima than the row's; sums are exact. Arguments as in ``emulated``."""
    v, v_scale = _of_all_heads(each, given)
    for below in BELOW_MAXIMUM:
        codes = _codes(each, weight, WEIGHT_SHIFT + below)
        total = codes.sum(-1, keepdim=True) + rest * 2.0 ** (WEIGHT_SHIFT + below)
        yield torch.where(total > 0, codes / total, 0.0) @ v.double() * v_scale[:, :, None]


def _of_all_heads(each: torch.Tensor, given: QuantizedInputs) -> tuple[torch.Tensor, torch.Tensor]:
    group = each.shape[1] // given.v.shape[1]
    return given.v.float().repeat_interleave(group, 1), given.v_scale.double().repeat_interleave(group, 1)


def _codes(each: torch.Tensor, weight: torch.Tensor, shift: float) -> torch.Tensor:
    found: torch.Tensor = weight * (each * 2.0**shift).float().to(torch.float8_e4m3fn).double()
    return found


def run_case(kernel: Any, case: attention.Case, device: torch.device) -> Outcome:
    """Run one case twice on poisoned outputs and compare it with the oracle and with the emulation."""
    spec: AttentionSpec = kernel.spec
    drawn = attention.make_inputs(spec, case, device)
    given = quantized(spec, case, drawn)
    q, k, v = given.dequantized()
    inputs = replace(drawn, q=q, k=k, v=v)
    reference, reference_lse, weight, *_ = attention.oracle_with_weights(spec, case, inputs)
    problems, results = [], []
    for _ in range(2):
        memory, out = attention.poisoned_output(spec, drawn.q.to(TORCH_DTYPES[spec.output]))
        options: dict[str, Any] = {"scale": case.scale, "out": out, "sink": inputs.sink, **inputs.options()}
        with poisoned_memory():
            results.append(kernel(given.q, given.k, given.v_t, *inputs.indices, **given.scales(), **options))
        if not bool(memory[..., q.shape[3] :].isnan().all()):
            problems.append("columns beyond the head dimension were written")
    (out, lse), (again, lse_again) = results
    if not torch.equal(out, again) or (lse is not None and not torch.equal(lse, lse_again)):
        problems.append("two runs differ")
    if lse is not None:
        problems += attention.check_lse(lse, reference_lse, LSE_ERROR)
        arguments = given.q, given.k, given.v_t, *inputs.indices
        problems += attention.check_without_lse(kernel, arguments, {**given.scales(), **options}, out)
    if bool((out[weight.sum(-1) == 0] != 0).any()):
        problems.append("a row without keys is not 0")
    *_, their_each, their_rest = attention.oracle_with_weights(spec, case, inputs, emulated_products(given))
    theirs = emulated(their_each, weight, given, their_rest, kernel)
    rounding = ROUNDOFF[spec.output] * float(reference.abs().max())
    errors = [float((x.double() - reference).square().mean().sqrt()) for x in (out, theirs)]
    allowed = (RMS_OF_FEW if out.numel() < FEW else RMS_TO_EMULATION) * errors[1] + rounding
    if not errors[0] <= allowed:
        problems.append(f"rms error {errors[0]:.3g}, allowed {allowed:.3g}")
    roundings = emulated_roundings(their_each, weight, given, their_rest)
    emulation_error = max(max_error(each, reference) for each in (theirs, *roundings))
    return Outcome(
        name=case.name,
        description=f"{case.describe()}; rms error {errors[0]:.3g}, of the emulation {errors[1]:.3g}",
        max_error=max_error(out, reference),
        torch_error=emulation_error,
        tolerance=MAX_TO_EMULATION * emulation_error + rounding,
        problem="; ".join(problems),
    )


VERIFICATION = replace(attention.VERIFICATION, run_case=run_case)
