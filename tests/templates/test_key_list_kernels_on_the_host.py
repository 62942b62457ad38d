"""Attention over lists of keys and its gradients without a GPU: generated sources run on the host, thread by thread."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_key_lists  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.key_list_cases import KeyListCase  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.plans.backward import key_lists as plans  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime.kernels import key_lists_backward, key_lists_forward  # noqa: E402
from runtime.verify import key_lists as verified  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CPU = torch.device("cpu")
CASES = (
    KeyListCase("odd_lengths", (150, 0, 1, 33), (197, 0, 130, 33), kv_heads=1, entries=2, before=5),
    KeyListCase("repeated", (40,), (140,), kv_heads=2, entries=9, head_lists=False, wild=True, counted=True),
    KeyListCase("in_chunks", (130,), (130,), kv_heads=1, entries=3, shared_block=True, lse_gradient=True, scale=0.2),
    KeyListCase("fewer_keys", (70, 9), (20, 0), kv_heads=1, entries=2),
)
KERNELS: dict[str, dict[str, Any]] = {
    "groups of 16": {"dtype": "bf16", "head_dim": 128, "entry_keys": 128, "group": 16},
    "groups of 8, heads of 64": {"dtype": "fp16", "head_dim": 64, "entry_keys": 128, "group": 8},
    "groups of 4, blocks of 64": {"dtype": "fp16", "head_dim": 64, "entry_keys": 64, "group": 4},
    "groups of 16, blocks of 64": {"dtype": "bf16", "head_dim": 128, "entry_keys": 64, "group": 16},
    "groups of 4": {"dtype": "bf16", "head_dim": 128, "entry_keys": 128, "group": 4},
    "groups of 8": {"dtype": "fp16", "head_dim": 128, "entry_keys": 128, "group": 8},
}


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    for module in (key_lists_backward, key_lists_forward):
        monkeypatch.setattr(module, "check_tensor", lambda *arguments: None)
    monkeypatch.setattr(plans, "CHUNK_ROWS", 640)


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec({"op": "key_lists_backward", "arch": "sm_90a", **KERNELS[name]})
    recorded(generate(named).source, repr(CASES))
    kernel = host_key_lists.HostKernel(named, tmp_path)
    for order, (case, late) in enumerate(product(CASES, (True, False))):
        kernel.host.late, kernel.host.order = late, order
        outcome = verified.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


def test_what_fixed_point_does_not_hold_is_nan(recorded: Callable[..., None], tmp_path: Path) -> None:
    sizes = {"head_dim": 64, "group": 4}
    case = KeyListCase("not_finite", (40, 40), (40, 40), kv_heads=1, entries=1)
    named = find_spec({"op": "key_lists_backward", "arch": "sm_90a", "dtype": "fp16", "entry_keys": 64, **sizes})
    recorded(generate(named).source, repr(case))
    kernel = host_key_lists.HostKernel(named, tmp_path)
    inputs = verified.inputs_of(case, **sizes, keys=64, dtype=torch.float16, device=CPU)
    inputs = inputs._replace(lists=torch.zeros_like(inputs.lists))
    right = verified.oracle(case, inputs, 64)

    def found(lse: Any, dout: Any, k: Any = inputs.k) -> Any:
        bounds = {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
        given = {"lists": inputs.lists, "out": right.out.half(), "dout": dout, "lse": lse}
        return kernel(inputs.q, k, inputs.v, **bounds, **given).dq

    lse, dout = right.lse.float().contiguous(), inputs.dout
    plain = found(lse, dout)
    assert bool(plain.isfinite().all())
    of_another, nan_key = lse.clone(), inputs.k.clone()
    of_another[1, 7] -= 30.0  # weights of row (7, 1) add up to e^30
    nan_key[50] = torch.nan
    large = dout.clone()
    large[1, 2] = 60000.0 * inputs.v[0, 0].sign()  # dS of row (1, 2) exceeds fp16
    for changed, where in (
        (found(of_another, dout), (7, 1)),
        (found(lse, large), (1, 2)),
        (found(lse, dout, nan_key), slice(40, None)),
    ):
        assert bool(changed[where].isnan().all())
        same = torch.ones(plain.shape[:2], dtype=torch.bool)
        same[where] = False
        assert torch.equal(changed[same], plain[same])


FORWARD: dict[str, dict[str, Any]] = {
    "groups of 16": {"dtype": "bf16", "head_dim": 128, "entry_keys": 128, "group": 16},
    "groups of 8, blocks of 64": {"dtype": "fp16", "head_dim": 128, "entry_keys": 64, "group": 8},
    "groups of 4, heads of 64": {"dtype": "fp16", "head_dim": 64, "entry_keys": 64, "group": 4},
}


@pytest.mark.parametrize("computes", ["lse", "out"])
@pytest.mark.parametrize("name", FORWARD)
def test_results_are_those_of_the_definition(
    name: str, computes: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    named = find_spec({"op": "key_lists_forward", "arch": "sm_90a", "computes": computes, **FORWARD[name]})
    recorded(generate(named).source, repr(CASES))
    kernel = host_key_lists.HostForward(named, tmp_path)
    for order, (case, late) in enumerate(product(CASES, (True, False))):
        kernel.host.late, kernel.host.order = late, order
        outcome = verified.run_forward_case(kernel, case, CPU)
        assert outcome.passed, outcome
