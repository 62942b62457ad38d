"""Gradients by mma.sync without a GPU: generated sources run on the host, thread by thread (host_kernel.py)."""

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
from runtime.kernels import attention_backward  # noqa: E402
from runtime.verify import attention_backward as verified  # noqa: E402
from runtime.verify.attention import Case, make_inputs  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CASES = (
    Case("grouped_heads", heads=2, kv_heads=1, q_len=150, kv_len=197, lists="padded", counts="mixed"),
    Case("few_queries", heads=1, kv_heads=1, q_len=70, kv_len=130, lists="repeated", columns=40, layout="bshd"),
)
CAUSAL_LISTS = {"kind": "block_lists", "block": {"q": 128, "kv": 64}, "mask": "causal"}
KERNELS: tuple[dict[str, Any], ...] = (
    {"gradients": "dq", "dtype": "bf16", "head_dim": 128, "pattern": CAUSAL_LISTS, "tile": {"m": 64, "n": 16}},
    {"gradients": "dkdv", "dtype": "fp16", "head_dim": 64, "pattern": CAUSAL_LISTS, "tile": {"m": 16, "n": 64}},
)
WINDOWS: tuple[tuple[dict[str, Any], Any, int | None], ...] = (
    ({"gradients": "dq", "pattern": {"kind": "sliding_window"}}, ((0, 0), (40, 9), (9000, 0)), None),
    ({"gradients": "dkdv", "pattern": {"kind": "sink_window"}}, ((0, 0), (40, 9), (9000, 9000)), 70),
)
RAGGED = Case(
    *("ragged", 4, 2, 1, 45, 130), lists="padded", counts="edges", full_lists=False, columns=56, layout="bshd"
)
ALL_OPTIONS: dict[str, Any] = {"softcap": 2.0, "kv_lengths": True}
DOCUMENTS = {"mask": "doc[batch, q_idx] < doc[batch, kv_idx] or kv_idx % 3 == head", "aux": {"doc": "int32[1, kv_len]"}}
SCORE = {
    "value": "9 * tanh(score / 9) * gain[head] + table[head, q_idx - kv_idx + 3] - abs(q_idx - kv_idx) / 9 + a[kv_idx]",
    "aux": {"gain": "fp32[heads]", "table": "bf16[heads, 7]", "a": "fp32[kv_len]"},
}
OF_OPTIONS: dict[str, dict[str, Any]] = {
    "bits, a step of half a word": {"gradients": "dq", "head_dim": 256, **ALL_OPTIONS, "pattern": {"mask": "bits"}},
    "bits, dV and dK apart": {"gradients": "dkdv", "head_dim": 192, **ALL_OPTIONS, "pattern": {"mask": "bits"}},
    "an expression, dQ": {"gradients": "dq", "head_dim": 64, "kv_lengths": True, "pattern": DOCUMENTS},
    "a score, dQ": {
        "gradients": "dq",
        "head_dim": 64,
        "kv_lengths": True,
        "pattern": {"mask": "causal"},
        "score": SCORE,
    },
    "a score, dK and dV": {
        "gradients": "dkdv",
        "head_dim": 64,
        "kv_lengths": True,
        "pattern": DOCUMENTS,
        "score": SCORE,
    },
    "an expression, dK and dV": {"gradients": "dkdv", "head_dim": 64, **ALL_OPTIONS, "pattern": DOCUMENTS},
}


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    monkeypatch.setattr(attention_backward, "check_tensor", lambda *arguments: None)


def named(fields: dict[str, Any]) -> NamedSpec:
    return find_spec({"op": "attention_backward", "arch": "sm_89", **fields})


@pytest.mark.parametrize("fields", KERNELS, ids=lambda fields: fields["gradients"])
def test_gradients_are_those_of_the_definition(
    fields: dict[str, Any], recorded: Callable[..., None], tmp_path: Path
) -> None:
    spec = named(fields)
    recorded(generate(spec).source, repr(CASES))
    kernel = host_kernel.HostKernel(spec, tmp_path)
    for order, case in enumerate(CASES):
        for late in (True, False):
            kernel.host.late, kernel.host.order = late, order
            outcome = verified.run_case(kernel, case, torch.device("cpu"))
            assert outcome.passed, outcome


@pytest.mark.parametrize(("fields", "windows", "sinks"), WINDOWS, ids=["dq", "dkdv"])
def test_one_kernel_has_the_gradients_of_any_window(
    fields: dict[str, Any], windows: Any, sinks: int | None, recorded: Callable[..., None], tmp_path: Path
) -> None:
    spec = named({"dtype": "bf16", "head_dim": 64, **fields})
    cases = [replace(CASES[0], window=window, sink_keys=sinks) for window in windows]
    recorded(generate(spec).source, repr(cases))
    kernel = host_kernel.HostKernel(spec, tmp_path)
    for case in cases:
        outcome = verified.run_case(kernel, case, torch.device("cpu"))
        assert outcome.passed, outcome


@pytest.mark.parametrize("name", OF_OPTIONS)
def test_options_and_wide_heads(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    """Beside the definition; then what is behind the lengths is NaN, and nothing changes.

    Logits are far below zero there: what is hidden has one of 0, and a weight that would be infinite.
    """
    fields = OF_OPTIONS[name]
    pattern = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, **fields["pattern"]}
    of_options = named({"dtype": "bf16", **fields, "pattern": pattern})
    recorded(generate(of_options).source, repr(RAGGED))
    kernel = host_kernel.HostKernel(of_options, tmp_path)
    outcome = verified.run_case(kernel, RAGGED, torch.device("cpu"))
    assert outcome.passed, outcome
    spec = kernel.spec
    inputs = make_inputs(spec.forward, RAGGED, torch.device("cpu"))
    inputs.q.abs_().mul_(9)
    inputs.k.abs_().mul_(-9)
    dout = torch.randn(inputs.q.shape).to(inputs.q.dtype)
    exact = verified.oracle(spec, RAGGED, inputs, dout)
    made = exact.out.to(inputs.q.dtype), dout, verified.given_lse(spec, RAGGED, exact)
    right = verified.run(kernel, RAGGED, inputs, made)
    lengths = inputs.indices[-1]
    assert lengths is not None
    behind = (torch.arange(RAGGED.kv_len) >= lengths[:, None])[:, None, :, None]
    inputs.k.masked_fill_(behind, torch.nan)
    inputs.v.masked_fill_(behind, torch.nan)
    found = verified.run(kernel, RAGGED, inputs, made)
    for one, other in zip(found[:3], right[:3], strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.isfinite().all() and torch.equal(one, other))
    for gradient in filter(lambda given: given is not None, found[1:3]):
        assert not gradient[behind.expand_as(gradient)].any()


@pytest.mark.parametrize(
    ("was", "instead", "late"),
    [
        ("cp_async_wait<kStages - 2>()", "cp_async_wait<kStages - 1>()", True),
        ("__syncthreads();\n    fetch(", "fetch(", False),
    ],
    ids=["a wait", "a barrier"],
)
def test_what_is_missing_shows(
    was: str, instead: str, late: bool, recorded: Callable[..., None], tmp_path: Path
) -> None:
    spec = named(KERNELS[1])
    source = generate(spec).source
    assert source.count(was) == 1
    changed = source.replace(was, instead)
    recorded(changed, repr(CASES[0]))
    kernel = host_kernel.HostKernel(spec, tmp_path, changed)
    kernel.host.late = late
    assert not verified.run_case(kernel, CASES[0], torch.device("cpu")).passed
