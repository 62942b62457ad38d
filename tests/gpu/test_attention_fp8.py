"""FP8 attention on a GPU: kernels that are not shipped, against float64 and an emulation of their rounding."""

from __future__ import annotations

import pytest
from fp8_specs import KERNELS, MMA_SYNC_KERNELS

torch = pytest.importorskip("torch")

from runtime import block_sparse_attention_fp8, load_kernel, quantize_attention, quantized_operands  # noqa: E402
from runtime.patterns import Causal  # noqa: E402
from runtime.verify.run import outcomes  # noqa: E402
from runtime.verify.tensor_core_fp8 import products  # noqa: E402

NEWER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs sm_89 or newer"
)
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)


@HOPPER
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_the_model_of_the_tensor_core_is_as_exact_as_cublas(spread: float) -> None:
    """Cases are held to errors of the model, so these must be no larger than those of the tensor core."""
    draw = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn((512, 2048), generator=draw, device="cuda") * spread for _ in range(2))
    a, b = (x.to(torch.float8_e4m3fn) for x in (a, b))
    one = torch.ones((), device="cuda")
    theirs = torch._scaled_mm(a, b.T, one, one, out_dtype=torch.float32, use_fast_accum=True).double()
    exact = a.double() @ b.double().T
    errors = [(x.double() - exact).square().mean().sqrt() for x in (theirs, products(a, b))]
    assert 0.8 < errors[1] / errors[0] < 1.25, errors


@HOPPER
@pytest.mark.parametrize("name", KERNELS)
def test_every_case(name: str) -> None:
    kernel = load_kernel({"op": "attention", "arch": "sm_90a", "dtype": "e4m3", "head_dim": 128, **KERNELS[name]})
    failed = [outcome for outcome in outcomes(kernel) if not outcome.passed]
    assert not failed, failed


@NEWER
@pytest.mark.parametrize("name", MMA_SYNC_KERNELS)
def test_every_case_by_mma_sync(name: str) -> None:
    """By the kernels of sm_89, which newer GPUs run through PTX."""
    fields = {"op": "attention", "arch": "sm_89", "dtype": "e4m3", "head_dim": 128, **MMA_SYNC_KERNELS[name]}
    kernel = load_kernel(fields, forward_compatible=True)
    failed = [outcome for outcome in outcomes(kernel) if not outcome.passed]
    assert not failed, failed


@HOPPER
def test_compiled_code_calls_operators() -> None:
    """A graph of CUDA replays them on what the tensors hold then."""
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn((1, 4, 1000, 128), generator=draw, device="cuda").bfloat16() for _ in range(3))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return block_sparse_attention_fp8(quantize_attention(q, k, v), Causal()) * 2.0

    given = quantize_attention(q, k, v)
    compiled = torch.compile(lambda x: block_sparse_attention_fp8(x, Causal()) * 2.0, fullgraph=True)
    assert torch.equal(compiled(given), call(q, k, v))
    assert torch.equal(torch.compile(call)(q, k, v), call(q, k, v))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(q, k, v)
    q.normal_(generator=draw)
    graph.replay()
    assert torch.equal(out, call(q, k, v))


@NEWER
def test_operands_from_elsewhere_are_put_together_without_the_host() -> None:
    """Nothing waits for the GPU, so that a graph of CUDA can do it anew."""
    draw = torch.Generator("cuda").manual_seed(0)
    codes = [torch.randn((1, 2, 200, 64), generator=draw, device="cuda").to(torch.float8_e4m3fn) for _ in range(3)]
    scales = {"q_scale": 1.0, "k_scale": torch.full((2,), 0.5, device="cuda"), "v_scale": 2.0}
    right = quantized_operands(*codes, **scales)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    waiting = torch.cuda.Event()
    waiting.record()
    quantized_operands(*codes, **scales)
    assert not waiting.query()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = quantized_operands(*codes, **scales)
    graph.replay()
    assert torch.equal(found.v_t.view(torch.uint8), right.v_t.view(torch.uint8))
