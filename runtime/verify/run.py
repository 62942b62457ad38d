"""Runs the case table of a kernel on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from codegen.cases import RANDOM_SHAPES
from codegen.library import NamedSpec
from codegen.receipts import CaseRecord, VerificationRecord
from runtime.driver.api import call, driver
from runtime.kernel import Kernel, load_kernel
from runtime.kernels.attention import AttentionKernel
from runtime.kernels.attention_backward import AttentionBackwardKernel
from runtime.kernels.attention_fp8 import Fp8AttentionKernel
from runtime.kernels.bsr_spgemm import BsrSpgemmKernel
from runtime.kernels.bsr_spmm import BsrSpmmKernel
from runtime.verify import (
    attention,
    attention_backward,
    attention_fp8,
    block_mask,
    bsr_sddmm,
    bsr_spgemm,
    bsr_spmm,
    quantise,
    select_topk,
    tile_copy,
)
from runtime.verify.common import Outcome, summary, worst
from runtime.verify.guard import Guarded

# Of each operator: CASES, and run_case(kernel, case, device).
MODULES: dict[str, ModuleType] = {
    "attention": attention,
    "attention_backward": attention_backward,
    "block_mask": block_mask,
    "bsr_spmm": bsr_spmm,
    "bsr_sddmm": bsr_sddmm,
    "bsr_spgemm": bsr_spgemm,
    "quantise": quantise,
    "select_topk": select_topk,
    "tile_copy": tile_copy,
}
ORACLE = {
    "attention_backward": "float64 gradients over the same pairs, on the GPU",
    "attention": "float64 softmax over the same pairs, on the GPU",
    "block_mask": "the mask of every pair, by torch, on the GPU: errors are elements of lists that differ",
    "bsr_spmm": "float64 product with the dense matrix, on the GPU",
    "bsr_sddmm": "blocks of the float64 dense product, on the GPU",
    "bsr_spgemm": "float64 product of the dense matrices, on the GPU",
    "quantise": "codes and scales by torch in fp32, bit for bit, on the GPU: errors are numbers that differ",
    "select_topk": "float64 products of means, on the GPU: lists are right if no product that is left out is larger",
    "tile_copy": "the input, bit for bit, on the GPU",
}


def cases_of(kernel: Kernel) -> tuple[Any, ...]:
    """Return the cases of a kernel, without the random shapes of attention."""
    if isinstance(kernel, AttentionKernel):
        return attention.cases_of(kernel.spec)
    if isinstance(kernel, AttentionBackwardKernel):
        return attention_backward.cases_of(kernel.spec)
    if isinstance(kernel, BsrSpgemmKernel):
        return bsr_spgemm.cases_of(kernel.spec)
    if isinstance(kernel, BsrSpmmKernel):
        return bsr_spmm.cases_of(kernel.compiled.plan)
    cases: tuple[Any, ...] = MODULES[kernel.spec.op].CASES
    return cases


def run_case(kernel: Kernel, case: Any, device: torch.device) -> Outcome:
    """Run one case with guard bands around its tensors, and beside its oracle."""
    guarded = Guarded(kernel)
    module = attention_fp8 if isinstance(kernel, Fp8AttentionKernel) else MODULES[kernel.spec.op]
    outcome: Outcome = module.run_case(guarded, case, device)
    return replace(outcome, problem="; ".join(filter(None, (outcome.problem, *guarded.faults))))


def outcomes(kernel: Kernel) -> Iterator[Outcome]:
    """Run every case of the kernel's operator on the current device; the random shapes count as one."""
    device = torch.device("cuda", torch.cuda.current_device())
    for case in cases_of(kernel):
        yield run_case(kernel, case, device)
    if isinstance(kernel, AttentionKernel | AttentionBackwardKernel):
        forward = kernel.spec if isinstance(kernel, AttentionKernel) else kernel.spec.forward
        shapes = [attention.fitted(case, forward) for case in attention.random_cases()]
        yield summary(RANDOM_SHAPES, [run_case(kernel, case, device) for case in shapes])


def plain_failure(kernel: Kernel) -> str:
    """Run the first case of a kernel, which is its plain one; return what is wrong, or ""."""
    for outcome in itertools.islice(outcomes(kernel), 1):
        if not outcome.passed:
            told = f"{outcome.name}: error {outcome.max_error:.3g}, allowed {outcome.tolerance:.3g}"
            return f"{told}; {outcome.problem}" if outcome.problem else told
    return ""


def verify(named: NamedSpec) -> tuple[Kernel, VerificationRecord]:
    """Load a kernel, through PTX where the device is newer than it, and run its cases.

    Raises:
        DeviceError: without a GPU that can run it.
    """
    kernel = load_kernel(named, forward_compatible=True)
    cases = tuple(
        CaseRecord(
            name=o.name,
            description=o.description + (f"; {o.problem}" if o.problem else ""),
            max_error=o.max_error,
            torch_error=o.torch_error,
            tolerance=o.tolerance,
            passed=o.passed,
        )
        for o in outcomes(kernel)
    )
    compiled = kernel.compiled
    arch = compiled.plan.arch
    record = VerificationRecord(
        device=torch.cuda.get_device_name(),
        driver=driver_version(),
        target=f"{arch.name} cubin" if compiled.target == "cubin" else f"{arch.virtual} PTX",
        oracle=ORACLE[compiled.plan.spec.op],
        torch=torch.__version__,
        worst_error=worst(case.max_error for case in cases),
        cases=cases,
    )
    return kernel, record


def driver_version() -> str:
    """Return the version of the installed driver, or, where that is not told, of the CUDA it supports."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next(word for word in words if "." in word and word[0].isdigit())
    except (OSError, StopIteration):
        version = call(driver().cuDriverGetVersion)
        return f"CUDA {version // 1000}.{version % 1000 // 10}"
