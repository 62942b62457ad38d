"""Attention of packed sequences over lists of keys without a GPU: the decode kernel runs on the host."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_paged  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.key_list_cases import KeyListCase  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.render import render  # noqa: E402
from runtime import KeyLists, varlen_attention  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.ops import key_list_calls, paged_calls, varlen_calls  # noqa: E402
from runtime.verify import key_lists as verified  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CPU = torch.device("cpu")
CASES = (
    (KeyListCase("sequences", (40, 0, 70, 1), (40, 0, 90, 33), entries=3), 4, 16),
    (KeyListCase("around", (30, 20), (30, 50), entries=7, before=9, counted=True), 8, 4),
    (KeyListCase("fewer_keys", (60, 9), (20, 0), entries=5, head_lists=False, wild=True), 16, 8),
    (KeyListCase("one_head", (50,), (150,), kv_heads=1, entries=9, scale=0.3), 1, 64),
)


SPEC = {"op": "paged_attention", "arch": "sm_89", "dtype": "fp16", "head_dim": 64}


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], host_paged.HostKernel]:
    """Returns the kernel of every call, with tensors of the CPU; compiles it when it is needed."""
    pretend_stream(monkeypatch)
    host_paged.on_cpu(monkeypatch)
    build = cache(lambda: host_paged.HostKernel(find_spec(SPEC), tmp_path))
    monkeypatch.setattr(varlen_calls, "check_tensor", lambda *given: None)
    monkeypatch.setattr(paged_calls, "check_place", lambda q: None)
    monkeypatch.setattr(paged_calls, "_kernel", lambda *given: build())
    monkeypatch.setattr(key_list_calls, "arch_of", lambda device: "sm_89")
    return build


def attend(case: KeyListCase, inputs: verified.Inputs, keys: int, **options: Any) -> Any:
    pattern = KeyLists(inputs.lists, inputs.counts, keys)
    bounds = {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
    return varlen_attention(inputs.q, inputs.k, inputs.v, pattern, **bounds, scale=case.scale, **options)


def test_results_are_those_of_the_definition(
    build: Callable[[], host_paged.HostKernel], recorded: Callable[..., None]
) -> None:
    recorded(render(find_spec(SPEC)), repr(CASES))
    kernel = build()
    for order, (case, group, keys) in enumerate(CASES):
        for late in (True, False):
            kernel.host.late, kernel.host.order = late, order
            inputs = verified.inputs_of(case, group=group, head_dim=64, keys=keys, dtype=torch.float16, device=CPU)
            right = verified.oracle(case, inputs, keys)
            out = torch.full_like(inputs.q, float("nan"))
            found = attend(case, inputs, keys, out=out, return_lse=True)
            inside = slice(case.before, inputs.q.shape[0] - case.before)
            close: dict[str, Any] = {"atol": 2e-3, "rtol": 2e-3}
            torch.testing.assert_close(out[inside].double(), right.out[inside], **close, msg=case.describe())
            torch.testing.assert_close(found.lse[:, inside].double(), right.lse[:, inside], atol=2e-3, rtol=1e-3)
            assert out[: case.before].isnan().all() and out[inside.stop :].isnan().all()


def test_k_and_v_may_be_strided_and_bounds_may_hold_anything(
    build: Callable[[], host_paged.HostKernel], recorded: Callable[..., None]
) -> None:
    """Every load lies in a tensor, which the host checks."""
    recorded(render(find_spec(SPEC)))
    case, group, keys = CASES[0]
    inputs = verified.inputs_of(case, group=group, head_dim=64, keys=keys, dtype=torch.float16, device=CPU)
    k = torch.stack((inputs.k, inputs.k), 2)[:, :, 0]
    v = inputs.v.transpose(0, 1).contiguous().transpose(0, 1)
    expected = attend(case, inputs, keys)
    first = inputs.cu_seqlens_q[0], inputs.cu_seqlens_q[-1]
    found = attend(case, inputs._replace(k=k, v=v), keys)
    assert torch.equal(expected[first[0] : first[1]], found[first[0] : first[1]])
    for bounds in ([-5, 3, 2, 900, 7], [2**31 - 1, -(2**31), 5, 5, 5], [0, 0, 0, 0, 1000]):
        odd = torch.tensor(bounds, dtype=torch.int32)
        attend(case, inputs._replace(cu_seqlens_k=odd), keys)
        attend(case, inputs._replace(cu_seqlens_q=odd, cu_seqlens_k=odd), keys)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"indices": (3, 111, 2)}, r"^pattern.indices: has shape \(3, 111, 2\), expected 2"),
        ({"indices": (2, 110, 2)}, r"^pattern.indices: has shape \(2, 110, 2\), expected 2"),
        ({"indices": (2, 111, 0)}, r"^pattern.indices: has 0 entries per list"),
        ({"head_dim": 96}, r"^q: has head_dim 96, expected 64, 128, 192, 256 with KeyLists"),
    ],
)
def test_bad_lists_are_named(build: Callable[[], Any], changes: dict[str, Any], says: str) -> None:
    d = changes.pop("head_dim", 64)
    q, k = torch.randn(111, 8, d).half(), torch.randn(111, 2, d).half()
    lists = KeyLists(torch.zeros(changes.get("indices", (2, 111, 2)), dtype=torch.int32), keys=64)
    with pytest.raises(ArgumentError, match=says):
        varlen_attention(q, k, k, lists, cu_seqlens_q=torch.tensor([0, 111], dtype=torch.int32))
