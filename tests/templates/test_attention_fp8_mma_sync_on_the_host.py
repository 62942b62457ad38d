"""FP8 attention by mma.sync without a GPU: sources run on the host, thread by thread (host_mma_fp8.py)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_mma_fp8  # noqa: E402
from fp8_specs import MMA_SYNC_KERNELS, cases_for  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from runtime.kernels import arguments, attention, attention_fp8  # noqa: E402
from runtime.verify import attention_fp8 as verified  # noqa: E402
from runtime.verify.attention import Case, fitted  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CPU = torch.device("cpu")
CASE = Case("ragged", heads=2, kv_heads=1, q_len=150, kv_len=533, lists="out_of_range", counts="mixed")


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    for module in (arguments, attention, attention_fp8):
        monkeypatch.setattr(module, "check_tensor", lambda *arguments: None)


@pytest.mark.parametrize("name", MMA_SYNC_KERNELS)
def test_results_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    fields: dict[str, Any] = {"op": "attention", "arch": "sm_89", "dtype": "e4m3", "head_dim": 128}
    named = find_spec({**fields, **MMA_SYNC_KERNELS[name]})
    assert isinstance(named.spec, AttentionSpec)
    cases = cases_for(CASE, named.spec)
    recorded(generate(named).source, repr(cases))
    kernel = host_mma_fp8.HostKernel(named, tmp_path)
    for order, (case, late) in enumerate(product(cases, (True, False))):
        kernel.host.late, kernel.host.order = late, order
        outcome = verified.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


@pytest.mark.parametrize(
    ("was", "instead", "late"),
    [
        ("cp_async_wait<kAhead - 2>()", "cp_async_wait<kAhead>()", True),
        ("pack_e4m3(weights[0], weights[1],", "pack_e4m3(weights[1], weights[0],", True),
        ("lane < 4 ? 0x38383838u : 0u", "0x38383838u", True),
        ("seqlen.kv_len() - 1) / kKScaleRows", "seqlen.kv_len() - 1) * 0", True),
        ("kv_len - first_key);", "kv_len - first_key - 64);", True),
        ("[i % 4] += part[tile]", "[i % 4] = part[tile]", True),
        ("__syncthreads();\n    const uint32 refill", "const uint32 refill", False),
    ],
    ids=[
        "a wait",
        "the order of keys",
        "sums of all lanes",
        "scales of K",
        "the last keys",
        "a sum",
        "a barrier",
    ],
)
def test_what_is_wrong_shows(was: str, instead: str, late: bool, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec("l4_e4m3_dense")
    assert isinstance(named.spec, AttentionSpec)
    source, case = generate(named).source, fitted(CASE, named.spec)
    assert source.count(was) == 1
    changed = source.replace(was, instead)
    recorded(changed, repr(case))
    kernel = host_mma_fp8.HostKernel(named, tmp_path, changed)
    kernel.host.late = late
    assert not verified.run_case(kernel, case, CPU).passed
