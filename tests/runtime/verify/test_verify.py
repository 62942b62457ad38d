"""Which cases a kernel is run with, and what is written down of them, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.cases import case_names
from codegen.library import find_spec
from codegen.planning import plan_for
from codegen.spec import OPS

torch = pytest.importorskip("torch")

from runtime.kernel import kernel_class  # noqa: E402
from runtime.kernels.attention import AttentionKernel  # noqa: E402
from runtime.kernels.attention_fp8 import Fp8AttentionKernel  # noqa: E402
from runtime.kernels.bound_call import BoundCall  # noqa: E402
from runtime.kernels.bsr_sddmm import BsrSddmmKernel  # noqa: E402
from runtime.kernels.bsr_spgemm import BsrSpgemmKernel  # noqa: E402
from runtime.kernels.bsr_spmm import BsrSpmmKernel  # noqa: E402
from runtime.kernels.quantize import QuantizeKernel  # noqa: E402
from runtime.kernels.select_topk import SelectTopkKernel  # noqa: E402
from runtime.kernels.tile_copy import TileCopyKernel  # noqa: E402
from runtime.operators import OPERATORS, part  # noqa: E402
from runtime.verify import (  # noqa: E402
    attention,
    attention_fp8,
    bsr_sddmm,
    bsr_spgemm,
    bsr_spmm,
    quantize,
    run,
    select_topk,
    tile_copy,
)
from runtime.verify.common import ABSOLUTE, Outcome, Verification, tolerance  # noqa: E402
from runtime.verify.guard import Guarded  # noqa: E402

KINDS: list[tuple[str, Any, Any, Any]] = [
    ("h100_causal", AttentionKernel, attention, attention.cases_of),
    ("h100_bsr_spmm_b16_gathered", BsrSpmmKernel, bsr_spmm, lambda spec: bsr_spmm.CASES + bsr_spmm.GATHER_CASES),
    ("h100_bsr_sddmm_b16", BsrSddmmKernel, bsr_sddmm, lambda spec: bsr_sddmm.CASES),
    (
        "h100_bsr_spgemm_b128_bsr",
        BsrSpgemmKernel,
        bsr_spgemm,
        lambda spec: bsr_spgemm.CASES + bsr_spgemm.PATTERN_CASES,
    ),
    ("h100_quantise_k", QuantizeKernel, quantize, lambda spec: quantize.CASES),
    ("h100_select_topk", SelectTopkKernel, select_topk, lambda spec: select_topk.CASES),
    ("h100_tile_copy_tma", TileCopyKernel, tile_copy, lambda spec: tile_copy.CASES),
]


# Of each operator whose cases are a table of its own: the plain kernel, and one for each part that only some have.
TABLES = [
    "h100_block_mask",
    "h100_bsr_sddmm_b128",
    "h100_bsr_spgemm_b16",
    "h100_bsr_spgemm_b128_balanced",
    "h100_bsr_spgemm_b128_bsr",
    "h100_bsr_spmm_b128",
    "h100_bsr_spmm_b128_balanced",
    "h100_bsr_spmm_b128_n16",
    "h100_bsr_spmm_b32_balanced",
    "h100_bsr_spmm_b16_gathered",
    "h100_bsr_spmm_b128_transposed",
    "h100_bsr_spmm_b64",
    "l4_bsr_spmm_b64",
    "l4_bsr_spmm_wmma_b16",
    "h100_paged_d128",
    "l4_paged_e4m3_d64",
    "h100_quantise_k",
    "h100_select_topk",
    "h100_tile_copy_tma",
]


@pytest.mark.parametrize("name", TABLES)
def test_a_receipt_is_held_to_the_cases_that_are_run(name: str) -> None:
    plan = plan_for(find_spec(name))
    cases = run.verification_of(plan.spec).cases(plan, plan.spec)
    assert [case.name for case in cases] == case_names(plan)
    assert len({*case_names(plan)}) == len(case_names(plan))


def test_every_table_is_compared() -> None:
    ops = {find_spec(name).spec.op for name in TABLES}
    assert ops == {op for op in OPS if not op.startswith(("attention", "key_lists"))}
    found = [set(case_names(plan_for(find_spec(name)))) for name in TABLES]
    for table in (bsr_spmm.CUT_CASES, bsr_spmm.GATHER_CASES, bsr_spgemm.PATTERN_CASES, bsr_spgemm.BALANCED_CASES):
        assert any({case.name for case in table} <= names for names in found)
    assert sum("several_groups" in names for names in found) > 1


@pytest.mark.parametrize(("name", "kind", "module", "cases_of"), KINDS, ids=[name for name, *_ in KINDS])
def test_every_case_of_a_kernel_is_run(
    name: str, kind: Any, module: Any, cases_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = find_spec(name)
    kernel = kind.__new__(kind)
    kernel.spec, kernel.compiled = named.spec, SimpleNamespace(plan=plan_for(named))
    names: list[str] = []

    def run_case(given: Any, case: Any, device: Any) -> Outcome:
        assert isinstance(given, Guarded) and given.spec is kernel.spec and given.compiled is kernel.compiled
        assert device == torch.device("cuda", 3)
        names.append(case.name)
        return Outcome(case.name, "", 1e-3 if case.name == "random_042" else 0.0, 0.0, 5e-4)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(module, "VERIFICATION", replace(module.VERIFICATION, run_case=run_case))
    found = list(run.outcomes(kernel))
    expected = [case.name for case in cases_of(kernel.spec)]
    if module is attention:
        assert [o.name for o in found] == [*expected, "random_shapes"]
        expected += [case.name for case in attention.random_cases()]
        assert found[-1].problem.startswith("random_042") and not found[-1].passed
    assert names == expected and len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("target", "told"), [("cubin", "sm_89 cubin"), ("ptx", "compute_89 PTX")], ids=["cubin", "ptx"]
)
def test_a_record_has_every_case_and_what_was_wrong(target: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named = find_spec("l4_topk32_d64")
    compiled = SimpleNamespace(plan=plan_for(named), target=target)
    outcomes = [
        Outcome("right", "a shape", 1e-4, 2e-4, 4e-4),
        Outcome("far", "a shape", 3e-3, None, 2e-3),
        Outcome("nothing", "a shape", float("nan"), 1e-4, 2e-3),
        Outcome("differs", "a shape", 0.0, 1e-4, 2e-3, "two runs differ"),
    ]
    kernel = SimpleNamespace(compiled=compiled)

    def load(given: Any, forward_compatible: bool) -> Any:
        assert given is named and forward_compatible
        return kernel

    monkeypatch.setattr(run, "load_kernel", load)
    monkeypatch.setattr(run, "outcomes", lambda given: iter(outcomes))
    monkeypatch.setattr(run, "driver_version", lambda: "580.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    found, record = run.verify(named)
    assert found is kernel
    assert [case.passed for case in record.cases] == [True, False, False, False]
    assert record.failed == ["far", "nothing", "differs"] and record.worst_error != record.worst_error  # NaN
    assert [case.description for case in record.cases] == ["a shape"] * 3 + ["a shape; two runs differ"]
    assert [(case.max_error, case.torch_error, case.tolerance) for case in record.cases[:2]] == [
        (1e-4, 2e-4, 4e-4),
        (3e-3, None, 2e-3),
    ]
    assert (record.device, record.driver, record.target) == ("a device", "580.0", told)
    assert record.oracle == attention.VERIFICATION.oracle and record.torch == torch.__version__


def test_every_operator_has_all_parts_in_the_packages_that_use_them() -> None:
    assert tuple(OPERATORS) == OPS
    homes = {"kernel": "kernels", "verification": "verify", "workload": "tools.bench"}
    homes |= {"inputs": "tools.tune", "example": "tools.report"}
    for operator in (*OPERATORS.values(), *filter(None, (each.fp8 for each in OPERATORS.values()))):
        places = {name: getattr(operator, name) for name in homes if getattr(operator, name) is not None}
        assert all(place.startswith(f"runtime.{homes[name]}.") for name, place in places.items())
        parts = {name: part(place) for name, place in places.items()}
        assert issubclass(parts["kernel"], BoundCall) and isinstance(parts["verification"], Verification)
        assert parts["verification"].oracle and callable(parts["workload"]) and callable(parts.get("example", len))


def test_kernels_in_fp8_have_parts_of_their_own_where_these_differ() -> None:
    for dtype, kind in (("bf16", AttentionKernel), ("e4m3", Fp8AttentionKernel)):
        pattern = {"kind": "causal"}
        spec = find_spec(
            {"op": "attention", "arch": "sm_90a", "dtype": dtype, "head_dim": 128, "pattern": pattern}
        ).spec
        assert kernel_class(spec) is kind
        module = attention if dtype == "bf16" else attention_fp8
        assert run.verification_of(spec) is module.VERIFICATION


def test_the_driver_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: gcc 13.2.0"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert run.driver_version() == "580.95.05"

    def missing(path: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(run, "driver", lambda: SimpleNamespace(cuDriverGetVersion=None))
    monkeypatch.setattr(run, "call", lambda function: 13010)
    assert run.driver_version() == "CUDA 13.1"


def test_no_type_is_held_to_less_than_its_rounding() -> None:
    assert ABSOLUTE == {"fp16": 2e-3, "bf16": 1.6e-2}
    assert tolerance("bf16", 1e-4, 1.0) == 2.0**-8 and tolerance("bf16", 1.0, 9.0) == 1.6e-2
    assert not Outcome("x", "", 1.1, None, 1.0).passed and Outcome("x", "", 1.0, None, 1.0).passed
