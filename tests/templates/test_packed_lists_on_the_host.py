"""Lists of blocks in packed sequences without a GPU: generated sources run on the host, thread by thread."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_gradients  # noqa: E402
import host_sm90a  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import NamedSpec, find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from codegen.varlen_cases import VarlenCase  # noqa: E402
from runtime.kernels import arguments, attention, attention_backward  # noqa: E402
from runtime.verify import varlen, varlen_backward  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CPU = torch.device("cpu")
CASES = (
    VarlenCase("grouped", (150, 0, 1, 128), (150, 0, 1, 128), heads=2, kv_heads=1, sinks="none"),
    VarlenCase("tokens_around", (65, 140), (300, 101), before=37, after=150, columns=56, sinks="none"),
    VarlenCase("without_keys", (30, 20, 3), (0, 70, 0), heads=1, kv_heads=1, after=5),
    VarlenCase("one_list", (129, 0), (400, 70), heads=1, kv_heads=1, sinks="none"),
)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    for module in (arguments, attention, attention_backward):
        monkeypatch.setattr(module, "check_tensor", lambda *given: None)


def named(mask: str, block: int = 128, **fields: Any) -> NamedSpec:
    pattern = {"kind": "block_lists", "block": {"q": block, "kv": block}, "mask": mask}
    common = {"arch": "sm_90a", "layout": "varlen", "head_dim": 64, "pattern": pattern}
    return find_spec({**common, **fields})


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("options", [{"dtype": "fp16"}, {"dtype": "bf16", "softcap": 2.0, "sink": True}], ids=str)
def test_results_are_those_of_each_sequence(
    mask: str, options: dict[str, Any], recorded: Callable[..., None], tmp_path: Path
) -> None:
    spec = named(mask, op="attention", tile={"m": 128, "n": 128}, schedule="ping_pong", lse=True, **options)
    recorded(generate(spec).source, repr(CASES))
    kernel = host_sm90a.HostAttention(spec, tmp_path)
    for order, case in enumerate(CASES):
        kernel.host.late, kernel.host.order = order % 2 == 0, order
        outcome = varlen.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_gradients_are_those_of_each_sequence(
    gradients: str, mask: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    spec = named(mask, op="attention_backward", gradients=gradients, dtype="bf16", head_dim=128, softcap=2.0)
    recorded(generate(spec).source, repr(CASES))
    kernel = host_gradients.HostKernel(spec, tmp_path)
    for order, case in enumerate(CASES):
        kernel.host.late, kernel.host.order = order % 2 == 0, order
        outcome = varlen_backward.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


@pytest.mark.parametrize("gradients", ["", "dq", "dkdv"])
def test_blocks_of_64(gradients: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    op = {"op": "attention_backward", "gradients": gradients} if gradients else {"op": "attention", "lse": True}
    spec = named("causal", 64, dtype="bf16", **op)
    recorded(generate(spec).source, repr(CASES))
    make, verified = (host_gradients.HostKernel, varlen_backward) if gradients else (host_sm90a.HostAttention, varlen)
    kernel: Any = make(spec, tmp_path)
    for order, case in enumerate(CASES):
        kernel.host.late, kernel.host.order = order % 2 == 0, order
        outcome = verified.run_case(kernel, case, CPU)
        assert outcome.passed, outcome
