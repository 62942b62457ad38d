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
import key_list_garbage  # noqa: E402
from gpu import small_call  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.key_list_cases import KeyListCase  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.plans import key_lists_forward as forward_plans  # noqa: E402
from codegen.plans.backward import key_lists as plans  # noqa: E402
from codegen.problem import KeyListsShape  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime.kernels import key_lists_backward, key_lists_forward, key_lists_paged, paged_attention  # noqa: E402
from runtime.kernels.arguments import Signatures  # noqa: E402
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
    "groups of 16, blocks of 16": {"dtype": "bf16", "head_dim": 128, "entry_keys": 16, "group": 16},
    "groups of 16, blocks of 32": {"dtype": "fp16", "head_dim": 64, "entry_keys": 32, "group": 16},
    "groups of 8, blocks of 16": {"dtype": "fp16", "head_dim": 128, "entry_keys": 16, "group": 8},
    "groups of 8, blocks of 32": {"dtype": "bf16", "head_dim": 64, "entry_keys": 32, "group": 8},
    "groups of 4, blocks of 16": {"dtype": "bf16", "head_dim": 64, "entry_keys": 16, "group": 4},
    "groups of 4, blocks of 32": {"dtype": "fp16", "head_dim": 128, "entry_keys": 32, "group": 4},
}
SMALL_BLOCKS = (
    KeyListCase("all_of_a_tile", (90, 20), (90, 45), kv_heads=1, entries=30, shared_block=True, before=3),
    KeyListCase("repeated_in_a_tile", (30,), (100,), kv_heads=1, entries=20, counted=True, head_lists=False),
)
"""Of lists that have most blocks of a tile, and some several times."""


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    for module in (key_lists_backward, key_lists_forward, key_lists_paged, paged_attention):
        monkeypatch.setattr(module, "check_tensor", lambda *arguments: None)
    monkeypatch.setattr(plans, "CHUNK_ROWS", 640)
    monkeypatch.setattr(forward_plans, "CHUNK_ROWS", 640)
    monkeypatch.setattr(forward_plans, "SLICE_BYTES", 1 << 19)


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec({"op": "key_lists_backward", "arch": "sm_90a", **KERNELS[name]})
    cases = CASES + (SMALL_BLOCKS if KERNELS[name]["entry_keys"] < plans.WARPGROUP_ROWS else ())
    recorded(generate(named).source, repr(cases))
    kernel = host_key_lists.HostKernel(named, tmp_path)
    for order, (case, late) in enumerate(product(cases, (True, False))):
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


@pytest.mark.parametrize("name", FORWARD)
def test_results_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    named = find_spec({"op": "key_lists_forward", "arch": "sm_90a", **FORWARD[name]})
    recorded(generate(named).source, repr(CASES))
    kernel = host_key_lists.HostForward(named, tmp_path)
    for order, (case, late) in enumerate(product(CASES, (True, False))):
        kernel.host.late, kernel.host.order = late, order
        outcome = verified.run_forward_case(kernel, case, CPU)
        assert outcome.passed, outcome


def test_bits_do_not_depend_on_slices(
    recorded: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice may have one query, or no entry at all; then its thread blocks still combine the one before it."""
    named = find_spec({"op": "key_lists_forward", "arch": "sm_90a", **FORWARD["groups of 4, heads of 64"]})
    recorded(generate(named).source)
    kernel = host_key_lists.HostForward(named, tmp_path)
    case = KeyListCase("slices", (40, 70), (340, 400), entries=3, before=3)  # several scans of tiles
    inputs = verified.inputs_of(case, group=4, head_dim=64, keys=64, dtype=torch.float16, device=CPU)
    options = {name: getattr(inputs, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "lists")}
    found = []
    for size in (1 << 19, 1, 1 << 16):
        monkeypatch.setattr(forward_plans, "SLICE_BYTES", size)
        shape = KeyListsShape(2, inputs.q.shape[0], inputs.k.shape[0], 2, 3)
        slices, each = forward_plans.slices_of(named.spec, shape)
        assert (slices - 1) * each < shape.tokens <= slices * each
        kernel._signatures = Signatures()
        out = torch.full_like(inputs.q, float("nan"))
        rows = kernel(inputs.q, inputs.k, inputs.v, **options, out=out)
        found.append((slices, out, rows.lse))
    assert [slices for slices, _, _ in found] == [1, 116, 6]
    for _, out, lse in found[1:]:
        torch.testing.assert_close(out, found[0][1], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(lse[:, 3:-3], found[0][2][:, 3:-3])


PAGED: dict[str, dict[str, Any]] = {
    "groups of 16": {"dtype": "bf16", "head_dim": 128, "entry_keys": 128, "group": 16},
    "groups of 4, heads of 64": {"dtype": "fp16", "head_dim": 64, "entry_keys": 64, "group": 4},
}


@pytest.mark.parametrize("name", PAGED)
def test_results_over_pages_are_those_of_the_definition(
    name: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    named = find_spec({"op": "key_lists_forward", "arch": "sm_90a", "layout": "paged", **PAGED[name]})
    recorded(generate(named).source, repr(CASES))
    kernel = host_key_lists.HostPaged(named, tmp_path)
    for order, (case, late) in enumerate(product(CASES, (True, False))):
        kernel.host.late, kernel.host.order = late, order
        outcome = verified.run_forward_case(kernel, case, CPU)
        assert outcome.passed, outcome


def test_pages_outside_of_the_cache_are_hidden_and_lengths_may_be_left_out(
    recorded: Callable[..., None], tmp_path: Path
) -> None:
    fields = {"op": "key_lists_forward", "arch": "sm_90a", "layout": "paged"}
    named = find_spec({**fields, **PAGED["groups of 4, heads of 64"]})
    recorded(generate(named).source)
    kernel = host_key_lists.HostPaged(named, tmp_path)
    case = KeyListCase("outside", (30, 30), (192, 192), entries=3)
    inputs = verified.inputs_of(case, group=4, head_dim=64, keys=64, dtype=torch.float16, device=CPU)
    k, v, table, _ = verified.pages_of(case, inputs, 32)
    table = table[:, :6].contiguous()
    common = {"lists": inputs.lists, "entry_keys": 64, "return_lse": True}
    right = kernel(inputs.q, k, v, block_table=table, **{**common, "lists": inputs.lists.where(inputs.lists != 1, -1)})
    for outside in (-1, len(k), 2**31 - 1):
        table[:, 2:4] = outside  # block 1
        found = kernel(inputs.q, k, v, block_table=table, **common)
        assert right.lse is not None and found.lse is not None
        assert torch.equal(found.out, right.out) and torch.equal(found.lse, right.lse)
    rows = [t.reshape(2, 192, 2, 64) for t in (inputs.k, inputs.v)]
    without_table = kernel(inputs.q, *rows, **{**common, "lists": inputs.lists.where(inputs.lists != 1, -1)})
    assert torch.equal(without_table.out, right.out)


@pytest.mark.parametrize(
    ("kind", "host"),
    [
        ({"op": "key_lists_backward"}, host_key_lists.HostKernel),
        ({"op": "key_lists_backward", "entry_keys": 16}, host_key_lists.HostKernel),
        ({"op": "key_lists_forward"}, host_key_lists.HostForward),
        ({"op": "key_lists_forward", "layout": "paged"}, host_key_lists.HostPaged),
    ],
    ids=["gradients", "gradients of blocks of 16", "results", "over pages"],
)
def test_indices_may_hold_anything(
    kind: dict[str, Any], host: Any, recorded: Callable[..., None], tmp_path: Path
) -> None:
    named = find_spec({"arch": "sm_90a", **PAGED["groups of 4, heads of 64"], **kind})
    recorded(generate(named).source)
    kernel = host(named, tmp_path)
    torch.manual_seed(0)
    positional, more = small_call.arguments_of(named.spec, "cpu")
    for seed in range(small_call.ROUNDS):
        key_list_garbage.check(kernel, positional, more, seed)
