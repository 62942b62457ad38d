"""The case table of `codegen verify`, one test a kernel and case. A failure prints how to repeat it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.library import find_spec, shipped_names  # noqa: E402
from codegen.plans import plan_for  # noqa: E402
from runtime.kernel import Kernel, load_kernel  # noqa: E402
from runtime.verification.run import MODULES  # noqa: E402

PAIRS = [(name, case) for name in shipped_names() for case in MODULES[find_spec(name).spec.op].CASES]


@cache
def kernel_of(name: str) -> Kernel:
    return load_kernel(name, forward_compatible=True)


@pytest.mark.parametrize(("name", "case"), PAIRS, ids=[f"{name}-{case.name}" for name, case in PAIRS])
def test_case(name: str, case: Any) -> None:
    named = find_spec(name)
    needed = plan_for(named).arch.compute_capability
    if torch.cuda.get_device_capability() < needed:
        pytest.skip(f"{name} is written for sm_{needed[0]}{needed[1]}")
    outcome = MODULES[named.spec.op].run_case(kernel_of(name), case, torch.device("cuda", 0))
    assert outcome.passed, f"{outcome}\nrepeat: pytest tests/gpu/test_cases.py -k {name}-{case.name}"
