"""Kernels of gradients of tensors of a score, run on the host, thread by thread (tests/support/host_kernel.py)."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_kernel  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import NamedSpec, find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime.kernels import attention_backward  # noqa: E402
from runtime.verify import attention_backward as verified  # noqa: E402
from runtime.verify.attention import Case  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CASES = {
    "bias": Case("grouped_heads", batch=2, heads=2, kv_heads=1, q_len=150, kv_len=97, lists="padded", counts="mixed"),
    "gain": Case("few_queries", heads=2, kv_heads=1, q_len=70, kv_len=130, columns=40, layout="bshd"),
}
BIAS = {
    "value": "score + bias[head, min(max(q_idx - kv_idx, -16), 16) + 16] + row[head, q_idx] * key[batch, kv_idx]",
    "aux": {"bias": "fp32[heads, 33]", "row": "bf16[heads, q_len]", "key": "fp16[batch, kv_len]"},
}
GAIN = {
    "value": "4 * tanh(score * gain[head] / 4) + where(kv_idx > q_idx, far * (q_idx - kv_idx), at[q_idx] * at[kv_idx])",
    "aux": {"gain": "fp32[heads]", "far": "fp32[]", "at": "fp32[100]"},
}
DOCUMENTS = {"mask": "doc[batch, q_idx] < doc[batch, kv_idx] or kv_idx % 3 == head", "aux": {"doc": "int32[1, kv_len]"}}
KERNELS: dict[str, dict[str, Any]] = {
    "bias": {"dtype": "bf16", "head_dim": 64, "score": BIAS, "aux_gradients": ["bias", "key", "row"]},
    "gain": {"dtype": "fp16", "head_dim": 256, "score": GAIN, "aux_gradients": ["at", "far", "gain"]},
}
PATTERNS: dict[str, dict[str, Any]] = {
    "bias": {"pattern": {"kind": "block_lists", "block": {"q": 128, "kv": 64}, **DOCUMENTS}, "kv_lengths": True},
    "gain": {"pattern": {"kind": "sliding_window", "left": 90, "right": 33}},
}


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    monkeypatch.setattr(attention_backward, "check_tensor", lambda *arguments: None)


def named(name: str) -> NamedSpec:
    fields = {"op": "attention_backward", "arch": "sm_90a", "gradients": "daux"}
    return find_spec({**fields, **KERNELS[name], **PATTERNS[name]})


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    spec = named(name)
    recorded(generate(spec).source, repr(CASES[name]))
    kernel = host_kernel.HostKernel(spec, tmp_path)
    kernel.host.late = name == "bias"
    outcome = verified.run_case(kernel, CASES[name], torch.device("cpu"))
    assert outcome.passed, outcome


def test_a_barrier_that_is_missing_shows(recorded: Callable[..., None], tmp_path: Path) -> None:
    spec, (was, instead) = named("bias"), ("  __syncthreads();\n}", "}")
    source = generate(spec).source
    assert source.count(was) == 1  # behind what lays pairs out
    changed = source.replace(was, instead)
    recorded(changed, repr(CASES["bias"]))
    kernel = host_kernel.HostKernel(spec, tmp_path, changed)
    assert not verified.run_case(kernel, CASES["bias"], torch.device("cpu")).passed
