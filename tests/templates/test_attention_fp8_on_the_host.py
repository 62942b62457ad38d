"""FP8 attention without a GPU: generated sources run on the host, thread by thread (tests/support/host_sm90a.py)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import host_sm90a  # noqa: E402
from fp8_specs import KERNELS, cases_for  # noqa: E402
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


@pytest.mark.parametrize("name", KERNELS)
def test_results_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec({"op": "attention", "arch": "sm_90a", "dtype": "e4m3", "head_dim": 128, **KERNELS[name]})
    assert isinstance(named.spec, AttentionSpec)
    cases = cases_for(CASE, named.spec)
    recorded(generate(named).source, repr(cases))
    kernel = host_sm90a.HostKernel(named, tmp_path)
    for order, (case, late) in enumerate(product(cases, (True, False))):
        kernel.host.late, kernel.host.order = late, order
        outcome = verified.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("wgmma_wait<0>();\n        warpgroup_fence_operand(part);", ""),
        ("pack_e4m3(weights[0], weights[1],", "pack_e4m3(weights[1], weights[0],"),
        ("k_scales[stage * kScaleParts + part] = step_scales[part]", "k_scales[part] = step_scales[part]"),
        ("        add_part(o, part, rescale, piece);\n", ""),
    ],
    ids=["a wait", "the order of keys", "scales of a stage", "a promotion"],
)
def test_what_is_wrong_shows(was: str, instead: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec("h100_e4m3_dense")
    assert isinstance(named.spec, AttentionSpec)
    source, case = generate(named).source, fitted(CASE, named.spec)
    assert was in source
    changed = source.replace(was, instead, 1)
    recorded(changed, repr(case))
    kernel = host_sm90a.HostKernel(named, tmp_path, changed)
    assert not verified.run_case(kernel, case, CPU).passed
