"""Gradients of varlen_attention with KeyLists without a GPU: kernels run on the host; what is refused; fakes."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_key_lists  # noqa: E402
import host_paged  # noqa: E402
from host_streams import pretend_stream  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from codegen.errors import SpecError  # noqa: E402
from codegen.key_list_cases import KeyListCase  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from codegen.select import key_lists as select  # noqa: E402
from runtime import KeyLists, varlen_attention  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels import key_lists_backward, key_lists_forward  # noqa: E402
from runtime.ops import key_list_calls, key_list_gradients, paged_calls, varlen_calls  # noqa: E402
from runtime.verify import key_lists as verified  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
CPU = torch.device("cpu")
CASE = KeyListCase("step", (50, 0, 21), (50, 9, 80), entries=2, before=3, lse_gradient=True)
SIZES = {"group": 4, "head_dim": 64}
BOUNDS = torch.tensor([0, 3, 10], dtype=torch.int32)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU pass for those of a Hopper GPU."""
    pretend_stream(monkeypatch)
    host_paged.on_cpu(monkeypatch)
    for module in (varlen_calls, key_lists_backward, key_lists_forward):
        monkeypatch.setattr(module, "check_tensor", lambda *given: None)
    monkeypatch.setattr(paged_calls, "check_place", lambda q: None)
    for module in (key_list_calls, key_list_gradients):
        monkeypatch.setattr(module, "arch_of", lambda device: "sm_90a")
        monkeypatch.setattr(module, "has_receipt", lambda fields: True)


@pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
@pytest.mark.parametrize(("by_keys", "keys"), [(True, 64), (False, 64), (False, 32), (False, 16)])
def test_a_step_has_the_gradients_of_the_definition(
    by_keys: bool,
    keys: int,
    on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    recorded: Callable[..., None],
    tmp_path: Path,
) -> None:
    forward = find_spec({"op": "paged_attention", "arch": "sm_90a", "dtype": "fp16", "head_dim": 64})
    by_blocks = find_spec({"op": "key_lists_forward", "arch": "sm_90a", "dtype": "fp16", "entry_keys": 64, **SIZES})
    fields = {"op": "key_lists_backward", "arch": "sm_90a", "dtype": "fp16", "entry_keys": keys, **SIZES}
    backward = find_spec(fields)
    recorded(*(generate(named).source for named in (forward, backward, by_blocks)), repr(CASE))
    for name in ("forward", "backward", "by_blocks"):
        (tmp_path / name).mkdir()
    attends = host_paged.HostKernel(forward, tmp_path / "forward")
    differentiates = host_key_lists.HostKernel(backward, tmp_path / "backward")
    asked: list[Any] = []
    if by_keys:
        kernel = host_key_lists.HostForward(by_blocks, tmp_path / "by_blocks")
        monkeypatch.setattr(key_list_calls, "_kernel", lambda *given: kernel)
        monkeypatch.setattr(select, "LEAST_QUERIES", 0)
    else:
        monkeypatch.setattr(select, "LEAST_QUERIES", 1000 if keys == 64 else 0)  # blocks of 64 could take the other
        monkeypatch.setattr(paged_calls, "_kernel", lambda *given: attends)
    monkeypatch.setattr(key_list_gradients, "_kernel", lambda *given: asked.append(given) or differentiates)
    inputs = verified.inputs_of(CASE, **SIZES, keys=keys, dtype=torch.float16, device=CPU)
    right = verified.oracle(CASE, inputs, keys)
    operands = {name: getattr(inputs, name).clone().requires_grad_() for name in "qkv"}
    pattern = KeyLists(inputs.lists, inputs.counts, keys)
    bounds = {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
    found: Any = varlen_attention(**operands, pattern=pattern, **bounds, return_lse=True)
    inside = slice(CASE.before, inputs.q.shape[0] - CASE.before)
    assert inputs.dlse is not None
    sees = right.lse[:, inside].isfinite()
    lse = torch.where(sees, found.lse[:, inside], 0.0)
    loss = (found.out[inside] * inputs.dout[inside]).sum() + (lse * inputs.dlse[:, inside]).sum()
    loss.backward()
    ((_, chosen),) = asked
    assert dict(chosen) == fields
    for name, operand in operands.items():
        torch.testing.assert_close(operand.grad.double(), right.gradients[f"d{name}"], atol=1e-2, rtol=1e-2)
    with pytest.raises(ArgumentError, match=r"double backward"):
        out = varlen_attention(**operands, pattern=pattern, **bounds)
        (of_q,) = torch.autograd.grad(out.sum(), operands["q"], create_graph=True)
        of_q.sum().backward()


def call(*, head_dim: int = 64, kv_heads: int = 2, keys: int = 64, **changes: Any) -> dict[str, Any]:
    """Arguments of a call with gradients."""
    q = torch.randn(10, 8, head_dim).half().requires_grad_()
    k, v = (torch.randn(10, kv_heads, head_dim).half() for _ in range(2))
    lists = KeyLists(torch.zeros(kv_heads, 10, 2, dtype=torch.int32), keys=keys)
    return {"q": q, "k": k, "v": v, "pattern": lists, "cu_seqlens_q": BOUNDS} | changes


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"head_dim": 192}, r"^q: has head_dim 192, expected 64, 128 with a gradient, or torch.no_grad\(\)"),
        ({"keys": 8}, r"^pattern: has entries of 8 keys, expected 16, 32, 64, 128 with a gradient"),
        ({"kv_heads": 4}, r"^k: has a head for 2 query heads, expected 4, 8, 16 with a gradient"),
        ({"softcap": 5.0}, r"^softcap: is given, and KeyLists have no gradient with it"),
        ({"sink": torch.zeros(8)}, r"^sink: is given, and KeyLists have no gradient with it"),
        ({"out": torch.zeros(10, 8, 64).half()}, r"^out: is given, and q requires a gradient"),
    ],
)
def test_what_has_no_gradient_is_named(on_cpu: None, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        varlen_attention(**call(**given))


def test_other_architectures_have_no_gradient(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (key_list_calls, key_list_gradients):
        monkeypatch.setattr(module, "arch_of", lambda device: "sm_89")
    with pytest.raises(SpecError, match=r"^arch: is sm_89; gradients over lists of keys support sm_90a"):
        varlen_attention(**call())


def test_fakes_have_the_shapes_of_results_and_gradients() -> None:
    with FakeTensorMode():
        q = torch.empty(100, 8, 128, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(50, 2, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        lists = KeyLists(torch.empty(1, 100, 4, dtype=torch.int32), keys=128)
        of_q, of_k = (torch.empty(5, dtype=torch.int32) for _ in range(2))
        found: Any = varlen_attention(q, k, v, lists, cu_seqlens_q=of_q, cu_seqlens_k=of_k, return_lse=True)
        assert found.out.shape == q.shape and found.out.dtype == q.dtype and found.lse.shape == (8, 100)
        gradients = torch.autograd.grad(found.out.sum() + found.lse.sum(), (q, k, v))
        assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
        with pytest.raises(ArgumentError, match=r"^pattern.indices: has shape"):
            varlen_attention(q[:7], k, v, lists, cu_seqlens_q=of_q, cu_seqlens_k=of_k)


def test_without_tokens_gradients_are_zeros(on_cpu: None) -> None:
    given = call()
    empty = {name: given[name][:0] for name in "kv"}
    none = torch.zeros(3, dtype=torch.int32)
    out: Any = varlen_attention(**{**given, **empty}, cu_seqlens_k=none)
    out.sum().backward()
    assert not given["q"].grad.any()


def test_without_a_receipt_a_call_decodes_and_has_no_gradient(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (key_list_calls, key_list_gradients):
        monkeypatch.setattr(module, "has_receipt", lambda fields: False)
    fields = select.KeyListsCall("sm_90a", "fp16", 64, 64, 4, queries=4096, keys=4096, entries=8).kernel()
    assert key_list_calls._kernel(0, fields) is None
    q, k, v = (torch.randn(10, heads, 64).half().requires_grad_() for heads in (4, 1, 1))
    lists = KeyLists(torch.zeros(1, 10, 2, dtype=torch.int32), keys=64)
    with pytest.raises(
        ArgumentError, match=r"^pattern: is KeyLists, whose kernel of gradients .* has no receipt: run "
    ):
        varlen_attention(q, k, v, lists, cu_seqlens_q=BOUNDS)


def test_a_kernel_that_is_not_shipped_has_no_receipt() -> None:
    fields = select.gradient_fields("sm_90a", "bf16", head_dim=64, entry_keys=64, group=8)
    assert not key_list_calls.has_receipt(tuple(fields.items()))
