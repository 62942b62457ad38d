"""Parts of the cases of all operators: outcomes, tolerances, poisoned outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from codegen.cases import ABSOLUTE
from codegen.plan import Plan

RELATIVE_TO_TORCH = 2.0
# Unit roundoff: a correctly rounded result may be off by this much of its size.
ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}


@dataclass(frozen=True)
class Outcome:
    """One case on one device.

    Attributes:
        name: the case.
        description: its parameters in words.
        max_error: largest absolute difference from the oracle; NaN if anything was not finite.
        torch_error: the same for torch's own kernel in the kernel's type; None where torch has none.
        tolerance: what max_error was held to.
        problem: what else was wrong (bits that differ between runs, a wrong LSE), or "".
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
        oracle: what results are compared with, in words.
        cases: cases of a kernel, by its plan and its spec.
        run_case: runs a case on a device; the kernel is called through guard bands.
        random_cases: further ones of a spec, of random shapes, which count as one.
    """

    oracle: str
    cases: Callable[[Plan, Any], tuple[Any, ...]]
    run_case: Callable[[Any, Any, torch.device], Outcome]
    random_cases: Callable[[Any], Sequence[Any]] = lambda spec: ()


def worst(errors: Iterable[float]) -> float:
    """Return the largest of some errors; NaN counts as larger than any number."""
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def share_used(outcome: Outcome) -> float:
    """Return the share of its tolerance that an outcome used. A result that must be 0 has a tolerance of 0."""
    if outcome.max_error == outcome.tolerance == 0:
        return 0.0
    return outcome.max_error / outcome.tolerance if outcome.tolerance else math.inf


def summary(name: str, outcomes: Sequence[Outcome]) -> Outcome:
    """Return many outcomes as one: the largest of each number, how many passed, and each failure by its name.

    The description has the worst ratio to torch's error, where that is not 0, and the worst share of a tolerance used.
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
    """The tolerance of an error.

    The absolute limit always holds. Where torch has a kernel of its own, twice its error holds too, but no less than
    the rounding of the result itself.
    """
    if torch_error is None:
        return ABSOLUTE[dtype]
    return min(ABSOLUTE[dtype], max(RELATIVE_TO_TORCH * torch_error, ROUNDOFF[dtype] * largest))


def max_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest absolute difference (float64), NaN if the result has one."""
    return float((result.double() - reference).abs().max())


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Have torch fill every new tensor with NaN, so that an element a kernel leaves out is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module with a property, which torch's types do not have
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        memory.fill_uninitialized_memory = filled


def generator(name: str, device: torch.device) -> torch.Generator:
    """Return a random generator whose seed depends on the case's name alone."""
    seed = int.from_bytes(name.encode(), "little") % (2**31 - 1)
    return torch.Generator(device=device).manual_seed(seed)
