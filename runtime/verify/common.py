"""Shared parts of all operators' cases: outcomes, tolerances, poisoned outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from codegen.cases import ABSOLUTE
from codegen.plan import Plan

RELATIVE_TO_TORCH = 2.0
# Unit roundoff: relative error of a correctly rounded result.
ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}


@dataclass(frozen=True)
class Outcome:
    """One case on one device.

    Attributes:
        name: the case.
        description: its parameters.
        max_error: largest absolute difference from the oracle; NaN if a result was not finite.
        torch_error: the same for torch's own kernel in the kernel's dtype; None if torch has none.
        tolerance: limit of max_error.
        problem: other faults (bits that differ between runs, a wrong LSE), or "".
    """

    name: str
    description: str
    max_error: float
    torch_error: float | None
    tolerance: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether the case holds. NaN never passes."""
        return self.max_error <= self.tolerance and not self.problem


@dataclass(frozen=True)
class Verification:
    """Cases of an operator, and their oracle.

    Attributes:
        oracle: description of the reference.
        cases: function from a kernel's plan and spec to its cases.
        run_case: runs a case on a device, with guard bands around the kernel's tensors.
        random_cases: function from a spec to cases of random shapes, which count as one case.
    """

    oracle: str
    cases: Callable[[Plan, Any], tuple[Any, ...]]
    run_case: Callable[[Any, Any, torch.device], Outcome]
    random_cases: Callable[[Any], Sequence[Any]] = lambda spec: ()


def worst(errors: Iterable[float]) -> float:
    """Largest error; NaN counts as larger than any number."""
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def share_used(outcome: Outcome) -> float:
    """Error of an outcome as a share of its tolerance. An exact result may have a tolerance of 0."""
    if outcome.max_error == outcome.tolerance == 0:
        return 0.0
    return outcome.max_error / outcome.tolerance if outcome.tolerance else math.inf


def summary(name: str, outcomes: Sequence[Outcome]) -> Outcome:
    """Combine outcomes into one: the largest of each number, the number of passed cases, and each failure by name.

    The description has the worst ratio to a nonzero error of torch, and the worst error as a share of its tolerance.
    """
    failed = [o for o in outcomes if not o.passed]
    passed = len(outcomes) - len(failed)
    compared = [o for o in outcomes if o.torch_error]
    used = worst(share_used(o) for o in outcomes)
    ratio = f"{worst(o.max_error / (o.torch_error or 1.0) for o in compared):.2f} of torch's and " if compared else ""
    return Outcome(
        name=name,
        description=f"{passed} of {len(outcomes)} passed, errors at most {ratio}{used:.2f} of what is allowed",
        max_error=worst(o.max_error for o in outcomes),
        torch_error=worst(o.torch_error or 0.0 for o in compared) if compared else None,
        tolerance=max(o.tolerance for o in outcomes),
        problem="; ".join(
            f"{o.name} ({o.description}): error {o.max_error:.3g}, allowed {o.tolerance:.3g}"
            + (f", {o.problem}" if o.problem else "")
            for o in failed
        ),
    )


def tolerance(dtype: str, torch_error: float | None, largest: float) -> float:
    """Tolerance of an error.

    The absolute limit always applies. If torch has its own kernel, twice that kernel's error is a limit too, but at
    least the rounding error of the result.
    """
    if torch_error is None:
        return ABSOLUTE[dtype]
    return min(ABSOLUTE[dtype], max(RELATIVE_TO_TORCH * torch_error, ROUNDOFF[dtype] * largest))


def torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, **options: Any
) -> torch.Tensor:
    """torch's attention (batch, heads, queries, head_dim) without cuDNN's, which takes 0.1 s to build for each new
    shape.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, heads, keys, head_dim).
        v: as k.
        mask: bool, broadcast to (batch, heads, queries, keys): the pairs that are seen.
        options: other arguments of ``scaled_dot_product_attention``.
    """
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def max_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference (float64); NaN if the result has a NaN."""
    return float((result.double() - reference).abs().max())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let torch fill every new tensor with NaN, which exposes elements that a kernel does not write."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module with a property that torch's type stubs lack
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        memory.fill_uninitialized_memory = filled


def generator(name: str, device: torch.device) -> torch.Generator:
    """Random generator seeded by the case's name."""
    seed = int.from_bytes(name.encode(), "little") % (2**31 - 1)
    return torch.Generator(device=device).manual_seed(seed)
