"""block_sparse_attention_fp8: what reaches the kernel, what is added to the LSE, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from runtime import block_sparse_attention, block_sparse_attention_fp8  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels.attention import AttentionResult  # noqa: E402
from runtime.ops import attention_checks, attention_fp8, attention_launches  # noqa: E402
from runtime.ops.attention_calls import Route  # noqa: E402
from runtime.ops.attention_choice import Call, Fp8Call, resolve  # noqa: E402
from runtime.ops.attention_extras import Features  # noqa: E402
from runtime.ops.quantize_attention import QuantizedAttention  # noqa: E402
from runtime.ops.quantized_operands import quantized_operands  # noqa: E402
from runtime.patterns import Causal, Dense, Score, TopK, scored_of  # noqa: E402

E4M3 = torch.float8_e4m3fn
LSE = 2.0


class Kernel:
    """Stands for the kernel: returns zeros and an LSE of twos, and keeps what it was given."""

    given: tuple[Any, ...]
    named: dict[str, Any]

    def __call__(self, q: Any, k: Any, v_t: Any, *indices: Any, **named: Any) -> AttentionResult:
        self.given, self.named = (q, k, v_t, *indices), named
        out = torch.zeros(q.shape, dtype=torch.bfloat16) if named["out"] is None else named["out"].zero_()
        return AttentionResult(out, torch.full(q.shape[:3], LSE))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel of every call, and tensors of the CPU pass for those of a GPU."""
    kernel = Kernel()
    monkeypatch.setattr(attention_fp8, "check_tensor", lambda *given: None)
    monkeypatch.setattr(attention_checks, "check_tensor", lambda *given: None)
    monkeypatch.setattr(attention_fp8, "_routes", attention_fp8.Signatures())
    monkeypatch.setattr(attention_launches.launches, "_kept", {})
    monkeypatch.setattr(attention_fp8, "remember", lambda call: Route(kernel, None, None, 0))  # type: ignore[arg-type]
    return kernel


def operands(**changes: Any) -> QuantizedAttention:
    shape = (1, 2, 300, 64)
    q, k, v = (torch.randn(shape).to(E4M3) for _ in range(3))
    given = quantized_operands(q, k, v, q_scale=0.5, k_scale=0.25, v_scale=2.0)
    return replace(given, **changes)


def smoothed(**changes: Any) -> QuantizedAttention:
    return operands(k_mean=torch.ones(1, 2, 64), mean_logits=torch.randn(1, 2, 300), **changes)


def test_the_kernel_gets_codes_and_scales(kernel: Kernel) -> None:
    given = operands()
    lists = torch.zeros(1, 1, 3, 2, dtype=torch.int32)
    out = block_sparse_attention_fp8(given, TopK(lists, block=(128, 128)))
    assert out.dtype == torch.bfloat16 and out.shape == given.q.shape
    assert [x is y for x, y in zip(kernel.given, (given.q, given.k, given.v_t, lists), strict=True)] == [True] * 4
    assert all(kernel.named[name] is getattr(given, name) for name in ("q_scale", "k_scale", "v_scale"))
    assert kernel.named["scale"] is None and kernel.named["validate"] is False
    into = torch.ones_like(out)
    assert block_sparse_attention_fp8(given, pattern=Dense(), out=into) is into and not into.any()


@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_mean_of_k_comes_back_into_the_lse(kernel: Kernel, scale: float | None) -> None:
    given = smoothed()
    found = block_sparse_attention_fp8(given, Causal(), scale=scale, return_lse=True)
    assert given.mean_logits is not None
    assert torch.allclose(found.lse, LSE + (scale or 64**-0.5) * given.mean_logits)
    plain = block_sparse_attention_fp8(operands(), Causal(), scale=scale, return_lse=True)
    assert bool((plain.lse == LSE).all())


@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        (smoothed(), {"softcap": 30.0}, "softcap: is given, but k is without its mean"),
        (smoothed(), {"score": "score * 2.0"}, "score: is given, but k is without its mean"),
        (smoothed(), {"sink": torch.zeros(2)}, "sink: is given, but k is without its mean"),
        (operands(), {"scale": 0.0}, "scale: is 0.0"),
        (operands(), {"pattern": "causal"}, "pattern: is 'causal', expected"),
        (operands(q_scale=torch.ones(1, 2, 2)), {}, r"q_scale: has shape \(1, 2, 2\), expected"),
        (operands(k_scale=torch.ones(1, 1, 3)), {}, r"k_scale: has shape \(1, 1, 3\), expected"),
        (operands(v_scale=torch.ones(1, 2, 32)), {}, r"v_scale: has shape \(1, 2, 32\), expected"),
        (operands(v_t=torch.zeros(1, 2, 32, 384).to(E4M3)), {}, r"v_t: has shape \(1, 2, 32, 384\), expected"),
        (operands(k=torch.zeros(1, 3, 300, 64).to(E4M3)), {}, "k: has 3 heads, q has 2: not a multiple"),
        (
            operands(q=torch.zeros(1, 2, 300, 64).half()),
            {},
            "q: is torch.float16, expected .*quantize_attention makes it",
        ),
        (operands(output=torch.float32), {}, "output: is torch.float32, expected"),
        (
            operands(),
            {"sink": torch.zeros(2, requires_grad=True)},
            "sink: requires a gradient, and FP8 has no backward",
        ),
        (
            operands(),
            {"score": Score("score + slope[head]", aux={"slope": torch.zeros(2, requires_grad=True)})},
            "score or mask: requires a gradient, and FP8 has no backward",
        ),
    ],
)
def test_what_is_refused(kernel: Kernel, given: Any, named: dict[str, Any], message: str) -> None:
    arguments = {"pattern": Dense(), **named}
    with pytest.raises(ArgumentError, match=rf"^{message}"):
        block_sparse_attention_fp8(given, **arguments)
    assert not hasattr(kernel, "given")


def test_the_former_call_warns(kernel: Kernel) -> None:
    given, call = operands(), cast("Any", block_sparse_attention)
    into = torch.ones(1, 2, 300, 64).bfloat16()
    for former in ({"k": Causal()}, {"k": None, "pattern": Causal()}):
        with pytest.warns(DeprecationWarning, match=r"block_sparse_attention_fp8\(operands, pattern"):
            assert call(given, **former, out=into.fill_(1), return_lse=True).out is into
        assert not into.any()
    for more, message in (({"v": given.q}, "v"), ({"pattern": Dense()}, "k")):
        with pytest.raises(ArgumentError, match=f"^{message}: is given beside operands in FP8"):
            call(given, Causal(), **more)


def test_operands_are_quantized_ones(kernel: Kernel) -> None:
    call: Any = block_sparse_attention_fp8
    with pytest.raises(ArgumentError, match=r"^operands: is Tensor, expected a QuantizedAttention: quantize_attention"):
        call(operands().q, Causal())


def arguments(given: QuantizedAttention, pattern: Any) -> tuple[Any, ...]:
    codes = (given.q, given.k, given.v_t, given.q_scale, given.k_scale, given.v_scale, given.k_mean, given.mean_logits)
    return (*codes, list(pattern.index_tensors()), None, None, None, pattern.spec_json)


@pytest.mark.parametrize("made", [operands, smoothed])
def test_opcheck(kernel: Kernel, made: Any) -> None:
    numbers = {"q_rows": 128, "k_rows": 128, "output": torch.bfloat16}
    lists = TopK(torch.zeros(1, 1, 3, 2, dtype=torch.int32), block=(128, 128))
    operators = torch.ops.sparse_kernel_codegen
    checks = ("test_faketensor",)  # there is no backward, and the test of schemas multiplies codes
    for lse in (False, True):
        given, options = arguments(made(), lists), {**numbers, "lse": lse}
        torch.library.opcheck(operators.block_sparse_attention_fp8.default, given, options, test_utils=checks)
    *inputs, spec_json = arguments(made(), lists)
    given = (*inputs, torch.empty(1, 2, 300, 64, dtype=torch.bfloat16), spec_json)
    torch.library.opcheck(operators.block_sparse_attention_fp8_out.default, given, numbers, test_utils=checks)


@pytest.mark.parametrize("made", [operands, smoothed])
def test_compiled_code_has_one_operator(kernel: Kernel, made: Any) -> None:
    torch._dynamo.reset()
    given, graphs = made(), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def call(given: QuantizedAttention) -> Any:
        out, lse = block_sparse_attention_fp8(given, Causal(), return_lse=True, scale=0.5)
        return out * 2.0, lse + 1.0

    out, lse = torch.compile(call, fullgraph=True, backend=backend)(given)
    exact, plain = call(given)
    assert torch.equal(out, exact) and torch.equal(lse, plain) and out.dtype == torch.bfloat16
    (graph,) = graphs
    assert sum("block_sparse_attention_fp8" in str(node.target) for node in graph.graph.nodes) == 1
    into = torch.ones_like(exact)
    written = torch.compile(
        lambda x, to: block_sparse_attention_fp8(x, Causal(), out=to), fullgraph=True, backend=backend
    )
    written(given, into)
    assert not into.any()


def test_fp8_without_scales_is_refused() -> None:
    given = operands()
    with pytest.raises(
        ArgumentError, match=r"^q: is torch.float8_e4m3fn, expected .*sparse_kernel_codegen.quantized_operands"
    ):
        block_sparse_attention(given.q, given.k, given.k, Dense())


def test_scales_are_checked_on_request(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"q_scale": torch.full((1, 2, 3), 0.0), "k_scale": torch.full((1, 2, 3), torch.nan)}
    for name, scales in wrong.items():
        with pytest.raises(ArgumentError, match=rf"^{name}: has (0.0|nan), expected positive, finite numbers"):
            attention_fp8.check_scales({name: scales})
    attention_fp8.check_scales({"v_scale": torch.ones(1, 2, 64)})
    block_sparse_attention_fp8(operands(), Dense(), validate=True)
    assert kernel.named["validate"] is True  # the kernel's own check


def test_heads_that_would_be_filled_up_are_refused() -> None:
    shape = (1, 16, 8192, 80)
    fp8 = Fp8Call(torch.float16, 128, 64)
    call = Call(scored_of(Dense()), (), shape, shape, E4M3, None, Features(), fp8=fp8)
    with pytest.raises(ArgumentError, match=r"^q: has head size 80; kernels of FP8 for sm_89 have 64, 96, 128"):
        resolve(call, "sm_89", "NVIDIA L4")
    assert resolve(call, "sm_90a", None).choice.spec.head_dim == 96


@pytest.mark.parametrize(
    ("arch", "device"), [("sm_90a", "NVIDIA H100 80GB HBM3"), ("sm_89", "NVIDIA L4"), ("sm_120", None)]
)
def test_a_spec_is_told_the_rows_of_scales(arch: str, device: str | None) -> None:
    fp8 = Fp8Call(torch.float16, 128, 64)
    assert fp8.fields() == {"output": "fp16", "scale_rows": {"q": 128, "k": 64}}
    shape = (1, 16, 8192, 128)
    call = Call(scored_of(Dense()), (), shape, shape, E4M3, None, Features(), fp8=fp8)
    spec: Any = resolve(call, arch, device).choice.spec
    assert (spec.dtype, spec.output, spec.scale_rows.q, spec.scale_rows.k) == ("e4m3", "fp16", 128, 64)
