"""Quantize kernels on a GPU: CUDA graphs, streams, many launches, and what attention makes of quantized operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from codegen.combinations import FP8_OPS
from runtime import (
    block_sparse_attention,
    block_sparse_attention_fp8,
    load_kernel,
    quantize_attention,
    quantize_matrix,
    scales_of,
)
from runtime.driver import workspace
from runtime.kernels.quantize import Quantized, QuantizeKernel
from runtime.ops.attention_choice import arch_of
from runtime.patterns import Causal, Dense
from runtime.verify import quantize as verified
from runtime.verify.run import run_case

attends = pytest.mark.skipif(
    torch.cuda.get_device_capability() != (9, 0) or "attention" not in FP8_OPS,
    reason="attention in FP8 is written for sm_90a",
)
VARIANTS: list[dict[str, Any]] = [
    {"scales": scales, "head_dim": head_dim, "dtype": dtype, **more}
    for head_dim, dtype in ((64, "bf16"), (96, "fp16"), (192, "fp16"), (256, "bf16"))
    for scales, more in (
        ("row", {"codes": "e5m2"}),
        ("row_block", {"mean": "subtract", "tile": {"m": 64}}),
        ("row_block", {"mean": "product"}),
        ("channel", {}),
        ("given", {"mean": "subtract", "tile": {"m": 64}}),
        ("given", {"mean": "product", "codes": "e5m2"}),
    )
] + [
    {"scales": scales, "head_dim": head_dim, "hadamard": True, "mean": mean}
    for scales in ("row_block", "given")
    for head_dim in (64, 128, 256)
    for mean in ("none", "subtract", "product")
]
ROTARY: list[dict[str, Any]] = [
    {"scales": scales, "head_dim": head_dim, "rotary": pairs, **more}
    for pairs in ("half", "interleaved")
    for head_dim in (64, 128, 256)
    for scales, more in (
        ("row", {"codes": "e5m2", "dtype": "bf16"}),
        ("row_block", {"mean": "subtract"}),
        ("row_block", {"mean": "subtract", "hadamard": True, "tile": {"m": 64}}),
        ("row_block", {"mean": "product", "dtype": "bf16"}),
        ("given", {"mean": "product", "hadamard": True}),
    )
]


def kernel_of(**fields: Any) -> QuantizeKernel:
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = load_kernel({"op": "quantize", "arch": arch_of(device), **fields})
    assert isinstance(kernel, QuantizeKernel)
    return kernel


def same(one: Quantized, other: Quantized) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is b or torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)  # type: ignore[union-attr]


@pytest.mark.parametrize("fields", VARIANTS + ROTARY, ids=str)
def test_variants_that_are_not_shipped(fields: dict[str, Any]) -> None:
    kernel = kernel_of(**fields)
    for case in verified.CASES:
        outcome = run_case(kernel, case, torch.device("cuda", torch.cuda.current_device()))
        assert outcome.passed, outcome


@pytest.mark.parametrize("scales", ["row_block", "channel"])
def test_many_launches_leave_counters_at_zero(scales: str) -> None:
    kernel = kernel_of(scales=scales, head_dim=128, **({"mean": "subtract"} if scales == "row_block" else {}))
    shapes = ((1, 1, 1), (3, 7, 513), (2, 40, 700), (1, 2, 40000), (1, 64, 128))
    tensors = [torch.randn((*shape, 128), device="cuda", dtype=torch.float16) for shape in shapes]
    first = [kernel(x) for x in tensors]
    for _ in range(200):
        for x, before in zip(tensors, first, strict=True):
            assert same(kernel(x), before)
    torch.cuda.synchronize()
    assert not any(bool(kept.any()) for kept in workspace._counters.values())


def test_a_graph_and_streams_beside_each_other() -> None:
    x = torch.randn(2, 16, 4096, 128, device="cuda", dtype=torch.bfloat16)
    kernel = kernel_of(scales="channel", head_dim=128, dtype="bf16")
    right = kernel(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for _ in range(20):
        graph.replay()
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(kernel(x))
    torch.cuda.synchronize()
    assert same(captured, right) and all(same(each, right) for each in found)


def test_compiled_code_calls_the_operator() -> None:
    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: quantize_matrix(x)[1] * 2.0, fullgraph=False)
    assert torch.equal(compiled(x), quantize_matrix(x).scales * 2.0)


@attends
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("pattern", [Dense(), Causal()], ids=["dense", "causal"])
def test_attention_of_what_was_quantized(pattern: Any, smooth_k: bool, hadamard: bool) -> None:
    source = torch.Generator("cuda").manual_seed(1)
    q, k, v = (torch.randn(2, heads, 1111, 128, generator=source, device="cuda").bfloat16() for heads in (8, 2, 2))
    k = k + 2 * torch.randn(128, generator=source, device="cuda").bfloat16()
    given = quantize_attention(q, k, v, smooth_k=smooth_k, hadamard=hadamard)
    found = block_sparse_attention_fp8(given, pattern, return_lse=True, validate=True)
    right = block_sparse_attention(q, k, v, pattern, return_lse=True)
    error = (found.out.float() - right.out.float()).square().mean().sqrt() / right.out.float().square().mean().sqrt()
    assert float(error) < 0.1
    assert float((found.lse - right.lse).abs().max()) < 0.1 * float(right.lse.abs().max())


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("per", ["tensor", "head"])
def test_scales_that_are_given_make_the_codes_of_torch(per: Any, hadamard: bool) -> None:
    source = torch.Generator("cuda").manual_seed(2)
    q, k, v = (torch.randn(2, heads, 700, 128, generator=source, device="cuda").bfloat16() for heads in (8, 2, 2))
    options: dict[str, Any] = {"smooth_k": False, "hadamard": hadamard}
    scales = {name: scales_of(x, per=per) / 2 for name, x in (("q_scale", q), ("k_scale", k), ("v_scale", v))}
    given = quantize_attention(q, k, v, validate=True, **scales, **options)
    factor = torch.tensor(128**-0.5, device="cuda")
    for codes, x, scale in ((given.q, q, given.q_scale), (given.k, k, given.k_scale)):
        assert scale.stride(2) == 0
        values, before = (verified.rotated(x.float()), scale / factor) if hadamard else (x.float(), scale)
        right = verified.coded(values, before[:, :, :1, None], "e4m3")
        assert torch.equal(codes.view(torch.uint8), right.view(torch.uint8))
    right = verified.in_key_order(verified.coded(v.float(), given.v_scale[:, :, None], "e4m3"))
    assert torch.equal(given.v_t.view(torch.uint8), right.view(torch.uint8))


def test_given_scales_are_captured_in_a_graph_and_read_at_each_replay() -> None:
    q, k, v = (torch.randn(1, 4, 512, 128, device="cuda", dtype=torch.float16) for _ in range(3))
    scale = torch.full((4,), 0.01, device="cuda")
    quantize_attention(q, k, v, q_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize_attention(q, k, v, q_scale=scale)
    for value in (0.01, 0.02):
        scale.fill_(value)
        graph.replay()
        right = verified.coded(q.float(), scale[None, :, None, None], "e4m3")
        assert torch.equal(captured.q.view(torch.uint8), right.view(torch.uint8))


@attends
@pytest.mark.parametrize("hadamard", [False, True])
def test_attention_with_given_scales_that_hold_everything(hadamard: bool) -> None:
    q, k, v = (torch.randn(1, heads, 1024, 128, device="cuda").bfloat16() for heads in (8, 2, 2))
    found = quantize_attention(q, k, v, hadamard=hadamard)
    scales = {name: getattr(found, name).amax() for name in ("q_scale", "k_scale", "v_scale")}
    given = quantize_attention(q, k, v, hadamard=hadamard, **scales, validate=True)
    out, right = block_sparse_attention_fp8(given, Dense()), block_sparse_attention(q, k, v, Dense())
    error = (out.float() - right.float()).square().mean().sqrt() / right.float().square().mean().sqrt()
    assert float(error) < 0.1


def angles(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(length, device="cuda")
    found = torch.outer(positions, 10000.0 ** (-torch.arange(64, device="cuda") / 64))
    return found.cos(), found.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("hadamard", [False, True])
def test_the_rotary_embedding_makes_the_codes_of_torch(hadamard: bool, interleaved: bool) -> None:
    source = torch.Generator("cuda").manual_seed(4)
    q, k, v = (torch.randn(2, heads, 700, 128, generator=source, device="cuda").bfloat16() for heads in (8, 2, 2))
    rotary, pairs = angles(700), "interleaved" if interleaved else "half"
    given = quantize_attention(q, k, v, hadamard=hadamard, rotary=rotary, rotary_interleaved=interleaved)
    fields = {"scales": "row_block", "head_dim": 128, "dtype": "bf16", "rotary": pairs, "hadamard": hadamard}
    for x, mean, codes, scales in ((q, None, given.q, given.q_scale), (k, given.k_mean, given.k, given.k_scale)):
        spec = kernel_of(**fields, mean="none" if mean is None else "subtract").spec
        assert same(Quantized(codes, scales), verified.expected(x, spec, mean, None, rotary))


def test_cosines_are_captured_in_a_graph_and_read_at_each_replay() -> None:
    x = torch.randn(1, 4, 512, 128, device="cuda", dtype=torch.float16)
    kernel = kernel_of(scales="row_block", head_dim=128, rotary="half")
    rotary = angles(512)
    kernel(x, rotary=rotary)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel(x, rotary=rotary)
    for shift in (0, 1):
        for tensor, later in zip(rotary, angles(513), strict=True):
            tensor.copy_(later[shift : shift + 512])
        graph.replay()
        assert same(captured, verified.expected(x, kernel.spec, None, None, rotary))


@attends
@pytest.mark.parametrize("smooth_k", [False, True])
def test_attention_of_what_was_rotated(smooth_k: bool) -> None:
    q, k, v = (torch.randn(1, heads, 1024, 128, device="cuda").bfloat16() for heads in (8, 2, 2))
    k = k + 2 * torch.randn(128, device="cuda").bfloat16()
    rotary = angles(1024)
    given = quantize_attention(q, k, v, smooth_k=smooth_k, rotary=rotary)
    turned = [verified.embedded(x, rotary, "half").bfloat16() for x in (q, k)]
    found = block_sparse_attention_fp8(given, Causal(), return_lse=True)
    right = block_sparse_attention(*turned, v, Causal(), return_lse=True)
    error = (found.out.float() - right.out.float()).square().mean().sqrt() / right.out.float().square().mean().sqrt()
    assert float(error) < 0.1
    assert float((found.lse - right.lse).abs().max()) < 0.1 * float(right.lse.abs().max())


@attends
def test_a_cache_of_rotated_keys_gives_what_all_keys_at_once_give() -> None:
    q, k, v = (torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.float16).clamp(-2, 2) for _ in range(3))
    cos, sin = angles(1024)
    before, behind, last = ((cos[part], sin[part]) for part in (slice(640), slice(640, None), slice(-64, None)))
    parts = [x[:, :, :640] for x in (q, k, v)]
    first = quantize_attention(*parts, smooth_k=False, rotary=before, kv_capacity=2048)
    grown = first.append(k[:, :, 640:], v[:, :, 640:], rotary=behind).with_queries(q[:, :, -64:], rotary=last)
    turned = [verified.embedded(x, (cos, sin), "half").half() for x in (q, k)]
    out = block_sparse_attention_fp8(grown, Causal())
    right = block_sparse_attention(turned[0][:, :, -64:], turned[1], v, Causal())
    error = (out.float() - right.float()).square().mean().sqrt() / right.float().square().mean().sqrt()
    assert float(error) < 0.1


@attends
def test_a_cache_gives_what_all_keys_at_once_give() -> None:
    q, k, v = (torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.float16) for _ in range(3))
    v = v.clamp(-2, 2)  # later values are no larger
    first = quantize_attention(q, k[:, :, :640], v[:, :, :640], smooth_k=False, kv_capacity=2048)
    grown = first.append(k[:, :, 640:], v[:, :, 640:])
    out = block_sparse_attention_fp8(grown.with_queries(q[:, :, -64:]), Causal())
    right = block_sparse_attention(q[:, :, -64:], k, v, Causal())
    error = (out.float() - right.float()).square().mean().sqrt() / right.float().square().mean().sqrt()
    assert float(error) < 0.1
