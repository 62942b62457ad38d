"""Runs of a kernel's case table on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from codegen.cases import RANDOM_SHAPES
from codegen.library import NamedSpec
from codegen.receipts import CaseRecord, VerificationRecord
from codegen.spec import Spec
from runtime.compile import prebuilt
from runtime.driver.api import call, driver
from runtime.kernel import Kernel, load_kernel
from runtime.operators import operator_of, part
from runtime.receipts.mode import verified_only
from runtime.verify.common import Outcome, Verification, summary, worst
from runtime.verify.guard import Guarded


def verification_of(spec: Spec) -> Verification:
    """Cases of the operator of a spec, and their oracle."""
    found: Verification = part(operator_of(spec).verification)
    return found


def run_case(kernel: Kernel, case: Any, device: torch.device) -> Outcome:
    """Run one case with guard bands around its tensors, and compare it with its oracle."""
    guarded = Guarded(kernel)
    outcome = verification_of(kernel.spec).run_case(guarded, case, device)
    return replace(outcome, problem="; ".join(filter(None, (outcome.problem, *guarded.faults))))


def outcomes(kernel: Kernel) -> Iterator[Outcome]:
    """Run every case of the kernel's operator on the current device; the random shapes count as one case."""
    device = torch.device("cuda", torch.cuda.current_device())
    spec, verification = kernel.spec, verification_of(kernel.spec)
    for case in verification.cases(kernel.compiled.plan, spec):
        yield run_case(kernel, case, device)
    if shapes := verification.random_cases(spec):
        yield summary(RANDOM_SHAPES, [run_case(kernel, case, device) for case in shapes])


def plain_failure(kernel: Kernel) -> str:
    """Run the first, plain case of a kernel; return a description of its failure, or ""."""
    for outcome in itertools.islice(outcomes(kernel), 1):
        if not outcome.passed:
            told = f"{outcome.name}: error {outcome.max_error:.3g}, allowed {outcome.tolerance:.3g}"
            return f"{told}; {outcome.problem}" if outcome.problem else told
    return ""


def verify(named: NamedSpec) -> tuple[Kernel, VerificationRecord]:
    """Load a kernel, through PTX on a newer device, and run its cases.

    Raises:
        DeviceError: if no GPU can run it.
    """
    with prebuilt.ignored(), verified_only(False):  # the receipt does not exist yet
        kernel = load_kernel(named, forward_compatible=True)
        return _verified(kernel)


def _verified(kernel: Kernel) -> tuple[Kernel, VerificationRecord]:
    """The kernel and the record of its cases on the current device."""
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
        oracle=verification_of(compiled.plan.spec).oracle,
        torch=torch.__version__,
        worst_error=worst(case.max_error for case in cases),
        cases=cases,
    )
    return kernel, record


def driver_version() -> str:
    """Version of the installed driver, or of the CUDA that it supports if its own version is unknown."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
        return next(word for word in words if "." in word and word[0].isdigit())
    except (OSError, StopIteration):
        version = call(driver().cuDriverGetVersion)
        return f"CUDA {version // 1000}.{version % 1000 // 10}"
