"""Gradients of packed sequences by mma.sync without a GPU: generated sources run on the host (host_kernel.py)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_kernel  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import NamedSpec, find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from codegen.varlen_cases import VarlenCase  # noqa: E402
from runtime.kernels import attention_backward  # noqa: E402
from runtime.verify.gradients import VERIFICATION  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CASES = (
    VarlenCase("packed", (70, 0, 1, 64, 33), (70, 0, 1, 64, 33), heads=2, kv_heads=1, sinks="none"),
    VarlenCase("around", (65, 40), (20, 101), before=37, after=70, columns=40, sinks="none"),
    VarlenCase("without_keys", (30, 20, 3), (0, 70, 0), heads=1, kv_heads=1, after=5),
    VarlenCase("without_queries", (0, 20, 0), (100, 70, 30), heads=1, kv_heads=1, sinks="none"),
)
PATTERNS: tuple[dict[str, Any], ...] = (
    {"kind": "dense"},
    {"kind": "causal"},
    {"kind": "causal", "align": "top_left"},
    {"kind": "sliding_window", "left": 40, "right": 3},
    {"kind": "sink_window"},
)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    monkeypatch.setattr(attention_backward, "check_tensor", lambda *arguments: None)


def named(**fields: Any) -> NamedSpec:
    return find_spec({"op": "attention_backward", "arch": "sm_89", "layout": "varlen", "head_dim": 64, **fields})


def run(spec: NamedSpec, cases: tuple[VarlenCase, ...], recorded: Callable[..., None], folder: Path) -> None:
    if spec.spec.pattern.is_general:  # type: ignore[union-attr]
        cases = tuple(replace(case, window=(40, 3), sink_keys=10) for case in cases)
    recorded(generate(spec).source, repr(cases))
    kernel = host_kernel.HostKernel(spec, folder)
    for order, case in enumerate(cases):
        kernel.host.late, kernel.host.order = order % 2 == 0, order
        outcome = VERIFICATION.run_case(kernel, case, torch.device("cpu"))
        assert outcome.passed, outcome


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: "_".join(map(str, pattern.values())))
@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_gradients_are_those_of_each_sequence(
    gradients: str, pattern: dict[str, Any], recorded: Callable[..., None], tmp_path: Path
) -> None:
    run(named(gradients=gradients, pattern=pattern, dtype="bf16"), CASES, recorded, tmp_path)


@pytest.mark.parametrize("head_dim", [128, 192])
@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_wide_heads_and_a_softcap(gradients: str, head_dim: int, recorded: Callable[..., None], tmp_path: Path) -> None:
    spec = named(gradients=gradients, pattern={"kind": "causal"}, head_dim=head_dim, softcap=2.0)
    run(spec, CASES[:2], recorded, tmp_path)
