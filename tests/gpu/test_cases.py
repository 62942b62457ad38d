"""The case table of `codegen verify`, one test a kernel and case. A failure prints how to repeat it."""

from __future__ import annotations

from functools import cache

import pytest

torch = pytest.importorskip("torch")

from codegen.library import find_spec, shipped_names  # noqa: E402
from codegen.plans import plan_for  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from runtime.kernel import Kernel, load_kernel  # noqa: E402
from runtime.verification import attention, bsr_spmm  # noqa: E402


def cases_of(name: str) -> tuple[attention.Case, ...] | tuple[bsr_spmm.Case, ...]:
    spec = find_spec(name).spec
    return attention.cases_of(spec) if isinstance(spec, AttentionSpec) else bsr_spmm.CASES


PAIRS = [(name, case) for name in shipped_names() for case in cases_of(name)]


@cache
def kernel_of(name: str) -> Kernel:
    return load_kernel(name, forward_compatible=True)


@pytest.mark.parametrize(("name", "case"), PAIRS, ids=[f"{name}-{case.name}" for name, case in PAIRS])
def test_case(name: str, case: attention.Case | bsr_spmm.Case) -> None:
    named = find_spec(name)
    needed = plan_for(named).arch.compute_capability
    if torch.cuda.get_device_capability() < needed:
        pytest.skip(f"{name} is written for sm_{needed[0]}{needed[1]}")
    module = attention if named.spec.op == "attention" else bsr_spmm
    outcome = module.run_case(kernel_of(name), case, torch.device("cuda", 0))  # type: ignore[arg-type]
    assert outcome.passed, f"{outcome}\nrepeat: pytest tests/gpu/test_cases.py -k {name}-{case.name}"
