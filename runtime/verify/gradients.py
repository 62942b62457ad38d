"""Verification of kernels of gradients: of padded and of packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from codegen import varlen_cases
from codegen.attention_cases import fitted, random_cases
from codegen.spec import AttentionBackwardSpec
from runtime.kernels.attention_backward import AttentionBackwardKernel
from runtime.verify import attention_backward, varlen_backward
from runtime.verify.common import Outcome, Verification


def _cases(spec: AttentionBackwardSpec) -> tuple[Any, ...]:
    return (varlen_cases.gradient_cases_of if spec.layout == "varlen" else attention_backward.cases_of)(spec)


def _random_cases(spec: AttentionBackwardSpec) -> Sequence[Any]:
    if spec.layout == "varlen":
        return varlen_cases.random_gradient_cases(spec)
    return [fitted(case, spec.forward) for case in random_cases()]


def _run_any(kernel: AttentionBackwardKernel, case: Any, device: torch.device) -> Outcome:
    if isinstance(case, varlen_cases.VarlenCase):
        return varlen_backward.run_case(kernel, case, device)
    return attention_backward.run_case(kernel, case, device)


VERIFICATION = Verification(
    oracle="float64 gradients over the same pairs, on the GPU",
    cases=lambda plan, spec: _cases(spec),
    run_case=_run_any,
    random_cases=_random_cases,
)
