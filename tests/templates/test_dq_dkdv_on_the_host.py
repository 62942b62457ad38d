"""All gradients in one kernel without a GPU: the generated source runs on the host, thread by thread."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_gradients  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime.kernels import attention_backward  # noqa: E402
from runtime.verify import attention_backward as verified  # noqa: E402
from runtime.verify.attention import Case  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CPU = torch.device("cpu")
CASES = (
    Case("grouped_heads", heads=2, kv_heads=1, q_len=150, kv_len=197),
    Case("few_queries", heads=1, kv_heads=1, q_len=70, kv_len=130, layout="bshd"),
)
KERNELS: dict[str, dict[str, Any]] = {
    "causal": {"dtype": "bf16", "head_dim": 128, "pattern": {"kind": "causal"}},
    "dense, heads of 64": {"dtype": "fp16", "head_dim": 64, "pattern": {"kind": "dense"}},
    "causal, heads of 96": {"dtype": "bf16", "head_dim": 96, "pattern": {"kind": "causal"}},
    "dense, heads of 96": {"dtype": "fp16", "head_dim": 96, "pattern": {"kind": "dense"}},
    "dense, any order": {"dtype": "fp16", "head_dim": 128, "pattern": {"kind": "dense"}, "deterministic": False},
}


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    monkeypatch.setattr(attention_backward, "check_tensor", lambda *arguments: None)


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    fields = {"op": "attention_backward", "arch": "sm_90a", "gradients": "dq_dkdv", **KERNELS[name]}
    named = find_spec(fields)
    recorded(generate(named).source, repr(CASES))
    kernel = host_gradients.HostKernel(named, tmp_path)
    for order, (case, late) in enumerate(product(CASES, (True, False))):
        kernel.host.late, kernel.host.order = late, order
        outcome = verified.run_case(kernel, case, CPU)
        assert outcome.passed, outcome
