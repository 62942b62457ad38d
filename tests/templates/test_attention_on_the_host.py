"""Attention with 16-bit operands on sm_90a without a GPU: generated sources run on the host, thread by thread."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import host_sm90a  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from runtime.kernels import arguments, attention  # noqa: E402
from runtime.verify import attention as verified  # noqa: E402
from runtime.verify.attention import Case, fitted  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CASE = Case("ragged", heads=2, kv_heads=1, q_len=250, kv_len=333, lists="out_of_range", counts="mixed")
KERNELS = (
    *(
        "h100_dense_bf16",
        "h100_causal",
        "h100_causal_d64",
        "h100_causal_d80",
        "h100_causal_d96",
        "h100_causal_d192",
        "h100_causal_d256",
    ),
    *("h100_causal_few_tiles", "h100_causal_kv_lengths", "h100_causal_softcap", "h100_causal_alibi_bf16"),
    *("h100_window", "h100_sink_window", "h100_topk_bf16", "h100_topk_b64", "h100_documents"),
    "h100_lists128_bits",
)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    for module in (arguments, attention):
        monkeypatch.setattr(module, "check_tensor", lambda *given: None)


@pytest.mark.parametrize("name", KERNELS)
def test_results_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec(name)
    assert isinstance(named.spec, AttentionSpec)
    case = fitted(CASE, named.spec)
    recorded(generate(named).source, repr(case))
    kernel = host_sm90a.HostAttention(named, tmp_path)
    for late in (True, False):
        kernel.host.late, kernel.host.order = late, int(late)
        outcome = verified.run_case(kernel, case, torch.device("cpu"))
        assert outcome.passed, outcome


@pytest.mark.parametrize(
    ("was", "instead"),
    [
        ("wgmma_wait<1>();", ""),
        ("newest_visible = newest - after", "newest_visible = newest"),
        ("* kKvBytes >> 4", "* 0"),
    ],
    ids=["the wait for scores", "steps of a warpgroup", "the stage of the rings"],
)
def test_what_is_wrong_shows(was: str, instead: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec("h100_causal")
    assert isinstance(named.spec, AttentionSpec)
    source, case = generate(named).source, fitted(CASE, named.spec)
    assert was in source
    changed = source.replace(was, instead)
    recorded(changed, repr(case))
    kernel = host_sm90a.HostAttention(named, tmp_path, changed)
    assert not verified.run_case(kernel, case, torch.device("cpu")).passed
