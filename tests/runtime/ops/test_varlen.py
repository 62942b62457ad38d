"""varlen_attention: what reaches the kernel, what is refused, its operator, and the choice of a kernel."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from codegen.spec import AttentionSpec  # noqa: E402
from runtime import varlen_attention  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels import arguments  # noqa: E402
from runtime.kernels.attention import AttentionResult  # noqa: E402
from runtime.ops import varlen_calls  # noqa: E402
from runtime.patterns import Causal, Dense, PrefixLM, SinkWindow, SlidingWindow, scored_of  # noqa: E402

BOUNDS = torch.tensor([0, 3, 3, 10], dtype=torch.int32)


class Kernel:
    """Stands for the kernel: returns zeros and an LSE of ones, and keeps what it was given."""

    given: tuple[Any, ...]
    named: dict[str, Any]

    def __call__(self, *given: Any, **named: Any) -> AttentionResult:
        self.given, self.named = given, named
        q = given[0]
        out = torch.zeros_like(q) if named["out"] is None else named["out"].zero_()
        return AttentionResult(out, torch.ones(q.shape[:3]) if named["return_lse"] else None)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel of every call, and tensors of the CPU pass for those of a GPU."""
    kernel = Kernel()
    for module in (varlen_calls, arguments):
        monkeypatch.setattr(module, "check_tensor", lambda *given: None)
    monkeypatch.setattr(varlen_calls, "_routes", varlen_calls.Signatures())
    monkeypatch.setattr(varlen_calls, "_remember", lambda *given, **named: varlen_calls._Route(kernel, 0.5, {}))  # type: ignore[arg-type]
    return kernel


def operands(tokens: int = 10, heads: int = 4, kv_heads: int = 2, head_dim: int = 64) -> tuple[Any, Any, Any]:
    q = torch.randn(tokens, heads, head_dim).to(torch.bfloat16)
    return q, *(torch.randn(tokens, kv_heads, head_dim).to(torch.bfloat16) for _ in range(2))


def test_the_kernel_sees_heads_first_and_the_bounds(kernel: Kernel) -> None:
    q, k, v = operands()
    out = varlen_attention(q, k, v, Causal(), cu_seqlens_q=BOUNDS)
    assert out.shape == q.shape and out.is_contiguous()
    given = kernel.given
    assert [tuple(t.shape) for t in given[:3]] == [(1, 4, 10, 64), (1, 2, 10, 64), (1, 2, 10, 64)]
    assert given[0].data_ptr() == q.data_ptr() and given[0].stride()[1:] == (64, 256, 1)
    assert given[3] is given[4] is BOUNDS and kernel.named["scale"] == 0.5
    found = varlen_attention(q, k, v, Dense(), cu_seqlens_q=BOUNDS, scale=2.0, return_lse=True)
    assert isinstance(found, AttentionResult) and found.lse is not None and found.lse.shape == (4, 10)
    assert kernel.named["scale"] == 2.0
    mine = torch.full_like(q, 7.0)
    assert varlen_attention(q, k, v, Dense(), cu_seqlens_q=BOUNDS, out=mine) is mine
    assert not mine.any()


def test_without_tokens_nothing_is_launched(kernel: Kernel) -> None:
    q, k, v = operands()
    zeros = torch.zeros(4, dtype=torch.int32)
    found = varlen_attention(q, k[:0], v[:0], Dense(), cu_seqlens_q=BOUNDS, cu_seqlens_k=zeros, return_lse=True)
    assert isinstance(found, AttentionResult) and found.lse is not None
    assert not found.out.any() and bool(found.lse.isneginf().all()) and not hasattr(kernel, "given")
    sink = torch.arange(4.0)
    found = varlen_attention(
        q, k[:0], v[:0], Dense(), cu_seqlens_q=BOUNDS, cu_seqlens_k=zeros, return_lse=True, sink=sink
    )
    assert isinstance(found, AttentionResult) and found.lse is not None
    assert torch.equal(found.lse, sink[:, None].expand(4, 10))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"q": torch.zeros(1, 10, 4, 64, dtype=torch.bfloat16)}, r"^q: has 4 dimensions \(1, 10, 4, 64\), expected 3"),
        ({"q": torch.zeros(10, 4, 64)}, r"^q: is torch.float32, expected torch.float16 or torch.bfloat16"),
        ({"k": torch.zeros(10, 3, 64, dtype=torch.bfloat16)}, r"^k: has 3 heads, q has 4: expected a divisor"),
        ({"k": torch.zeros(10, 2, 32, dtype=torch.bfloat16)}, r"^k: has heads of 32, q has heads of 64"),
        ({"v": torch.zeros(9, 2, 64, dtype=torch.bfloat16)}, r"^v: has shape \(9, 2, 64\), k has \(10, 2, 64\)"),
        ({"pattern": "causal"}, r"^pattern: is str; allowed for packed sequences: block_lists, causal"),
        ({"pattern": PrefixLM(torch.zeros(1, dtype=torch.int32))}, r"^pattern: is prefix_lm; allowed"),
        ({"cu_seqlens_q": BOUNDS.long()}, r"^cu_seqlens_q: is torch.int64, expected torch.int32: pass cu_seqlens_q.to"),
        ({"cu_seqlens_q": BOUNDS[:1]}, r"^cu_seqlens_q: has shape \(1,\), expected \(sequences \+ 1,\)"),
        ({"cu_seqlens_k": BOUNDS[:3]}, r"^cu_seqlens_k: has 3 entries, cu_seqlens_q has 4: pass as many"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 3, 10], dtype=torch.int32), "validate": True}, r"falls from 5 to 3"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 7, 11], dtype=torch.int32), "validate": True}, r"falls from 11 to 10"),
        ({"out": torch.zeros(10, 4, 32, dtype=torch.bfloat16)}, r"^out: has shape \(10, 4, 32\), q has"),
        ({"softcap": 0.0}, r"^softcap: is 0.0"),
        ({"scale": -1.0}, r"^scale: is -1"),
        ({"return_lse": 1}, r"^return_lse: is 1"),
    ],
)
def test_bad_arguments_are_named(kernel: Kernel, changes: dict[str, Any], says: str) -> None:
    q, k, v = operands()
    given = {"q": q, "k": k, "v": v, "pattern": Causal(), "cu_seqlens_q": BOUNDS} | changes
    with pytest.raises(ArgumentError, match=says):
        varlen_attention(**given)
    assert not hasattr(kernel, "given")


def test_fakes_have_the_shapes_of_results() -> None:
    with FakeTensorMode():
        q = torch.empty(100, 8, 72, dtype=torch.float16, device="cuda")
        k = torch.empty(50, 2, 72, dtype=torch.float16, device="cuda")
        of_q, of_k = (torch.empty(5, dtype=torch.int32, device="cuda") for _ in range(2))
        found = varlen_attention(q, k, k, Causal(), cu_seqlens_q=of_q, cu_seqlens_k=of_k, return_lse=True)
        assert isinstance(found, AttentionResult) and found.lse is not None
        assert found.out.shape == q.shape and found.out.dtype == q.dtype and found.lse.shape == (8, 100)
        with pytest.raises(ArgumentError, match=r"^v: has shape"):
            varlen_attention(q, k, q, Causal(), cu_seqlens_q=of_q, cu_seqlens_k=of_k)


def test_every_pattern_and_head_size_has_a_kernel_of_packed_sequences() -> None:
    for pattern in (Dense(), Causal(), Causal(align="top_left"), SlidingWindow(5), SinkWindow(4, 100)):
        for arch, head_dim, sink in (
            ("sm_90a", 128, False),
            ("sm_90a", 72, True),
            ("sm_89", 64, True),
            ("sm_89", 80, False),
        ):
            kind = varlen_calls.VarlenClass(
                scored_of(pattern), arch, None, "bf16", head_dim, None, sink, 8, 2, 4, 4096, 4096
            )
            spec = varlen_calls.choice_of(kind).spec
            assert isinstance(spec, AttentionSpec) and spec.layout == "varlen" and spec.sink is sink
            assert spec.head_dim >= head_dim and (spec.mma == "wgmma") is (arch == "sm_90a")
