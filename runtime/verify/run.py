"""Runs the case table of a kernel on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from codegen.library import NamedSpec
from codegen.receipts import CaseRecord, VerificationRecord
from runtime.driver.api import call, driver
from runtime.kernel import Kernel, load_kernel
from runtime.kernels.attention import AttentionKernel
from runtime.kernels.bsr_spgemm import BsrSpgemmKernel
from runtime.kernels.bsr_spmm import BsrSpmmKernel
from runtime.verify import attention, bsr_sddmm, bsr_spgemm, bsr_spmm, select_topk, tile_copy
from runtime.verify.common import Outcome, summary, worst

# Of each operator: CASES, and run_case(kernel, case, device).
MODULES: dict[str, ModuleType] = {
    "attention": attention,
    "bsr_spmm": bsr_spmm,
    "bsr_sddmm": bsr_sddmm,
    "bsr_spgemm": bsr_spgemm,
    "select_topk": select_topk,
    "tile_copy": tile_copy,
}
ORACLE = {
    "attention": "float64 softmax over the same pairs, on the GPU",
    "bsr_spmm": "float64 product with the dense matrix, on the GPU",
    "bsr_sddmm": "blocks of the float64 dense product, on the GPU",
    "bsr_spgemm": "float64 product of the dense matrices, on the GPU",
    "select_topk": "float64 products of means, on the GPU: lists are right if no product that is left out is larger",
    "tile_copy": "the input, bit for bit, on the GPU",
}


def outcomes(kernel: Kernel) -> Iterator[Outcome]:
    """Run every case of the kernel's operator on the current device; the random shapes count as one."""
    device = torch.device("cuda", torch.cuda.current_device())
    if isinstance(kernel, AttentionKernel):
        for attention_case in attention.cases_of(kernel.spec):
            yield attention.run_case(kernel, attention_case, device)
        shapes = [attention.fitted(case, kernel.spec) for case in attention.random_cases()]
        yield summary("random_shapes", [attention.run_case(kernel, case, device) for case in shapes])
        return
    module = MODULES[kernel.spec.op]
    cases = module.CASES
    if isinstance(kernel, BsrSpgemmKernel):
        cases = bsr_spgemm.cases_of(kernel.spec)
    elif isinstance(kernel, BsrSpmmKernel):
        cases = bsr_spmm.cases_of(kernel.compiled.plan)
    for case in cases:
        yield module.run_case(kernel, case, device)


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
