"""Operands of FP8 attention and quantized matrices: made by kernels that run on the host, kept, appended, refused."""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from codegen.library import find_spec

torch = pytest.importorskip("torch")

import host_quantize  # noqa: E402
from recorded import digest_of  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from runtime.errors import ArgumentError  # noqa: E402
from runtime.ops import quantize as ops  # noqa: E402
from runtime.ops.quantize import quantize_matrix  # noqa: E402
from runtime.ops.quantize_attention import (  # noqa: E402
    QuantizedAttention,
    quantize_attention,
)
from runtime.ops.quantized_operands import quantized_operands, transposed_values  # noqa: E402
from runtime.ops.static_scales import scales_of  # noqa: E402
from runtime.verify.quantize import coded, embedded, in_key_order, rotated  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
E4M3 = torch.float8_e4m3fn
PROJECT = Path(__file__).resolve().parents[3]
TEMPLATES = [
    *sorted((PROJECT / "templates" / "quantize").rglob("*.j2")),
    *(PROJECT / "templates" / f"{name}.cuh.j2" for name in ("common/declarations", "ptx/semaphore", "ptx/warp")),
]
SUBJECT = [
    PROJECT / f"{name}.py"
    for name in (
        *("codegen/fp8", "codegen/plans/quantize", "runtime/kernels/quantize", "runtime/verify/quantize"),
        *("runtime/ops/quantize", "runtime/ops/quantize_attention", "runtime/ops/static_scales"),
    )
]
"""Modules that are tested: they choose their kernels themselves, so that keys of runs are of templates and of these."""


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lets calls on the CPU run kernels on the host."""
    host_quantize.on_cpu(monkeypatch)
    monkeypatch.setattr(ops, "DEVICES", ("cpu",))
    monkeypatch.setattr(ops, "_kernel", _host_kernel)


@lru_cache
def _host_kernel(index: None, spec: str) -> host_quantize.HostKernel:
    import tempfile

    named = find_spec({"op": "quantize", "arch": "sm_90a", **json.loads(spec)})
    return host_quantize.HostKernel(named, Path(tempfile.mkdtemp()))


@pytest.fixture
def end_if_known(recorded: Callable[..., None]) -> Callable[[], None]:
    """A function that ends a test if the same run of these kernels has passed (tests/support/recorded.py)."""
    templates = (path.read_text(encoding="utf-8") for path in TEMPLATES)
    return lambda: recorded("".join(templates), *map(digest_of, SUBJECT))


def drawn(heads: int = 4, kv_heads: int = 2, q_len: int = 200, kv_len: int = 300, head_dim: int = 64) -> Any:
    source = torch.Generator().manual_seed(3)
    q = torch.randn(2, heads, q_len, head_dim, generator=source)
    k = torch.randn(2, kv_heads, kv_len, head_dim, generator=source) + 3 * torch.randn(head_dim, generator=source)
    v = torch.randn(2, kv_heads, kv_len, head_dim, generator=source)
    return tuple(x.bfloat16() for x in (q, k, v))


def dequantized(given: QuantizedAttention) -> Any:
    """q, k and v as codes and scales have them; q and k rotated if they are, k without its mean."""
    q, k = (
        x.float() * scale.repeat_interleave(rows, 2)[:, :, : x.shape[2], None]
        for x, scale, rows in ((given.q, given.q_scale, given.q_rows), (given.k, given.k_scale, given.k_rows))
    )
    order = in_key_order(torch.arange(16, dtype=torch.uint8).view(E4M3)[None, None, :, None].expand(1, 1, 16, 1))
    order = order.view(torch.uint8)[0, 0, 0, :16].long()
    codes = given.v_t.float().unflatten(-1, (-1, 16))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(16)
    v = (codes[..., inverse].flatten(-2) * given.v_scale[..., None]).mT
    return q, k, v[:, :, : given.kv_len]


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("smooth_k", [False, True])
def test_operands_stand_for_what_was_given(smooth_k: bool, hadamard: bool, end_if_known: Callable[[], None]) -> None:
    end_if_known()
    q, k, v = drawn()
    given = quantize_attention(q, k, v, smooth_k=smooth_k, hadamard=hadamard, q_rows=64)
    assert (given.dtype, given.output, given.q_rows, given.k_rows) == ("e4m3", torch.bfloat16, 64, 128)
    assert given.q_scale.shape == (2, 4, 4) and given.k_scale.shape == (2, 2, 3) and given.v_scale.shape == (2, 2, 64)
    of_q, of_k, of_v = dequantized(given)
    centered = k.float() - (0 if given.k_mean is None else given.k_mean[:, :, None])
    right = [rotated(x.float()) / 8 if hadamard else x.float() for x in (q, centered)]
    for found, expected in ((of_q, right[0]), (of_k, right[1]), (of_v, v.float())):
        assert (found - expected).abs().max() <= 2.0**-4 * expected.abs().max()
    logits = of_q @ of_k.repeat_interleave(2, 1).mT
    if given.mean_logits is not None:
        logits = logits + given.mean_logits[..., None]
    exact = q.float() @ k.float().repeat_interleave(2, 1).mT
    assert (given.k_mean is not None) is (given.mean_logits is not None) is smooth_k
    assert (logits - exact).square().mean().sqrt() < 0.06 * exact.square().mean().sqrt()


def test_smoothing_and_rotation_make_errors_smaller(end_if_known: Callable[[], None]) -> None:
    end_if_known()
    q, k, v = drawn(q_len=256, kv_len=512)
    spread = k.float().clone()
    spread[..., 5] += 40.0  # what all keys have in common
    q_spread = q.clone()
    q_spread[..., 9] *= 30  # one column with large elements

    def error(q: Any, k: Any, **options: bool) -> float:
        given = quantize_attention(q, k, v, **options)
        of_q, of_k, _ = dequantized(given)
        logits = of_q @ of_k.repeat_interleave(2, 1).mT
        exact = q.float() @ k.float().repeat_interleave(2, 1).mT
        both = (x - x.mean(-1, keepdim=True) for x in (logits, exact))  # of a row, the same number changes nothing
        found, right = both
        return float((found - right).square().mean().sqrt())

    assert error(q, spread.bfloat16(), smooth_k=True) < 0.5 * error(q, spread.bfloat16(), smooth_k=False)
    assert error(q_spread, k, smooth_k=True, hadamard=True) < 1.1 * error(q_spread, k, smooth_k=True)


def test_queries_of_a_later_step(end_if_known: Callable[[], None]) -> None:
    end_if_known()
    q, k, v = drawn()
    whole = quantize_attention(q, k, v, hadamard=True)
    later = quantize_attention(q[:, :, :64], k, v, hadamard=True).with_queries(q)
    for name in ("q", "q_scale", "mean_logits", "k", "v_t", "k_scale", "v_scale"):
        one, other = (getattr(x, name).contiguous().view(torch.uint8) for x in (whole, later))
        assert torch.equal(one, other), name


def test_keys_are_appended_in_place(end_if_known: Callable[[], None]) -> None:
    end_if_known()
    q, k, v = drawn(kv_len=256)
    _, more_k, more_v = drawn(kv_len=100)
    first = quantize_attention(q, k, v, k_rows=64, kv_capacity=512)
    assert first.k.shape[2] == 256 and first.v_t.shape[3] == 256 and first.k_scale.shape[2] == 4
    both = first.append(more_k, more_v)
    assert both.kv_len == 356 and both.v_t.shape[3] == 384 and both.k_scale.shape[2] == 6
    assert both.k.data_ptr() == first.k.data_ptr() and both.v_t.data_ptr() == first.v_t.data_ptr()
    assert torch.equal(both.k[:, :, :256].view(torch.uint8), first.k.view(torch.uint8))
    assert not bool(both.v_t[..., 368:].view(torch.uint8).any())  # behind the last 16 keys
    _, of_k, of_v = dequantized(both)
    assert both.k_mean is not None
    right = torch.cat((k, more_k), 2).float() - both.k_mean[:, :, None]
    assert (of_k - right).abs().max() <= 2.0**-4 * right.abs().max()
    limit = 448 * both.v_scale[:, :, None]
    values = torch.cat((v, more_v), 2).float()
    clipped = torch.minimum(torch.maximum(values, -limit), limit)  # scales are those of the first values
    assert (of_v - clipped).abs().max() <= 2.0**-4 * clipped.abs().max()
    for later, message in (
        (lambda: both.append(more_k, more_v), "k: cannot be appended to 356 keys, only to a multiple of 128"),
        (lambda: first.append(torch.cat([more_k] * 3, 2), torch.cat([more_v] * 3, 2)), "k: makes 556 keys, kv_cap"),
        (lambda: first.append(more_k[:, :1], more_v[:, :1]), r"k: has shape \(2, 1, 100, 64\), expected"),
        (lambda: first.append(more_k, more_v[:, :, :7]), r"v: has shape \(2, 2, 7, 64\), expected"),
        (lambda: replace(first, cache=None).append(more_k, more_v), "k: cannot be appended: .* without kv_capacity"),
    ):
        with pytest.raises(ArgumentError, match=rf"^{message}"):
            later()


def test_tensors_from_elsewhere_with_scales_of_any_kind() -> None:
    q, k, v = (x.float().to(E4M3) for x in drawn())
    per_head = torch.rand(2) + 0.1
    given = quantized_operands(q, k, v, q_scale=0.5, k_scale=per_head, v_scale=torch.rand(2, 2, 64), k_rows=64)
    assert given.q_scale.stride() == (0, 0, 0) and given.q_scale.shape == (2, 4, 2)
    assert given.k_scale.shape == (2, 2, 5) and given.k_scale.stride(2) == 0
    assert torch.equal(given.k_scale[1, :, 3], per_head)
    assert torch.equal(given.v_t.view(torch.uint8)[..., :300], in_key_order(v).view(torch.uint8)[..., :300])
    assert torch.equal(transposed_values(v).view(torch.uint8), in_key_order(v).view(torch.uint8))
    for changes, message in (
        ({"q_scale": 0.0}, "q_scale: is 0.0, expected a positive number"),
        ({"k_scale": torch.ones(3)}, r"k_scale: has shape \(3,\), expected one of \(\), \(2,\), \(2, 2\), \(2, 2, 5\)"),
        ({"v_scale": torch.ones(2).double()}, "v_scale: is torch.float64 on cpu, expected a number or torch.float32"),
        ({"output": torch.float32}, "output: is torch.float32, expected torch.float16 or torch.bfloat16"),
    ):
        options: dict[str, Any] = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "k_rows": 64, **changes}
        with pytest.raises(ArgumentError, match=rf"^{message}"):
            quantized_operands(q, k, v, **options)
    with pytest.raises(
        ArgumentError, match=r"^k: is torch.bfloat16, expected .*sparse_kernel_codegen.quantize_attention"
    ):
        quantized_operands(q, k.bfloat16(), v, q_scale=1.0, k_scale=1.0, v_scale=1.0)


def head_scale(shape: tuple[int, ...]) -> Any:
    return 0.004 * (1 + torch.arange(float(torch.Size(shape).numel())).view(shape))


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize(("q_shape", "k_shape"), [((), (2, 2)), ((2, 4), ()), ((4,), (2,))], ids=str)
def test_scales_that_are_given_make_the_codes_of_torch(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], smooth_k: bool, hadamard: bool, end_if_known: Callable[[], None]
) -> None:
    end_if_known()
    q, k, v = drawn()
    q[0, 1, 3, 5], q[1, 2, 4, 6], k[0, 1, 7, 9] = float("inf"), float("nan"), -float("inf")
    q_scale, k_scale = (float(head_scale(())) if not of else head_scale(of) for of in (q_shape, k_shape))
    given = quantize_attention(
        q, k, v, q_scale=q_scale, k_scale=k_scale, smooth_k=smooth_k, hadamard=hadamard, q_rows=64, validate=True
    )
    found = quantize_attention(q, k, v, smooth_k=smooth_k, hadamard=hadamard, q_rows=64)
    assert (given.static_q_scale, given.static_k_scale) == (True, True)
    assert (found.static_q_scale, found.static_k_scale) == (False, False)
    for name in ("k_mean", "mean_logits", "v_t", "v_scale"):
        one, other = (getattr(x, name) for x in (given, found))
        assert one is other is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
    centered = k.float() - (0 if given.k_mean is None else given.k_mean[:, :, None])
    factor = torch.tensor(64**-0.5)
    for codes, x, of, scale in (
        (given.q, q.float(), given.q_scale, q_scale),
        (given.k, centered, given.k_scale, k_scale),
    ):
        given_one = torch.as_tensor(scale)
        one = (given_one[..., None] if given_one.dim() else given_one).expand(2, x.shape[1], 1)
        assert torch.equal(of, one.expand(of.shape)) and of.stride(2) == 0 and of.untyped_storage().nbytes() <= 32
        values, before = (rotated(x), one / factor) if hadamard else (x, one)
        assert torch.equal(codes.view(torch.uint8), coded(values, before[..., None], "e4m3").view(torch.uint8))
        assert (codes.view(torch.uint8) & 0x7F == 0x7E).any()  # some saturate
    assert found.q_scale.stride(2) == 1


def test_a_scale_of_values_is_that_of_a_tensor_a_head_or_a_channel(end_if_known: Callable[[], None]) -> None:
    end_if_known()
    q, k, v = drawn()
    for scale in (0.01, torch.tensor(0.02), torch.rand(2) + 0.01, torch.rand(2, 2) + 0.01, torch.rand(2, 2, 64) + 0.01):
        given = quantize_attention(q, k, v, v_scale=scale)
        one = torch.as_tensor(scale)
        right = (one[..., None] if one.dim() in (1, 2) else one).expand(2, 2, 64)
        assert torch.equal(given.v_scale, right)
        assert one.dim() == 3 or given.v_scale.stride(2) == 0
        codes = in_key_order(coded(v.float(), right[:, :, None], "e4m3"))
        assert torch.equal(given.v_t.view(torch.uint8), codes.view(torch.uint8))


def test_later_queries_and_keys_have_the_scales_that_were_given(end_if_known: Callable[[], None]) -> None:
    end_if_known()
    q, k, v = drawn(kv_len=256)
    more_q, more_k, more_v = drawn(q_len=70, kv_len=100)
    options: dict[str, Any] = {"q_scale": head_scale((2, 4)), "k_scale": head_scale((2,)), "v_scale": 0.01}
    first = quantize_attention(q, k, v, k_rows=64, kv_capacity=512, **options)
    both = first.append(more_k, more_v).with_queries(more_q)
    assert both.static_q_scale and both.static_k_scale and both.kv_len == 356
    assert both.k_scale.shape == (2, 2, 6) and both.k_scale.stride() == (0, 1, 0) and both.q_scale.stride(2) == 0
    assert torch.equal(both.q_scale[..., 0], options["q_scale"]) and torch.equal(
        both.k_scale[1, :, 5], options["k_scale"]
    )
    assert both.k_mean is not None
    keys = torch.cat((k, more_k), 2).float() - both.k_mean[:, :, None]
    for codes, values, scale in (
        (both.q, more_q.float(), options["q_scale"][..., None]),
        (both.k, keys, options["k_scale"][:, None]),
    ):
        assert torch.equal(codes.view(torch.uint8), coded(values, scale[..., None], "e4m3").view(torch.uint8))
    values = coded(torch.cat((v, more_v), 2).float(), torch.full((2, 2, 1, 64), 0.01), "e4m3")
    assert torch.equal(both.v_t.view(torch.uint8), in_key_order(values).view(torch.uint8))
    with pytest.raises(ArgumentError, match=r"^q: has 2 heads, but the given q_scale has 4"):
        first.with_queries(more_q[:, :2])
    of_all = quantize_attention(q, k, v, q_scale=0.01).with_queries(more_q[:, :2])
    assert of_all.q_scale.shape == (2, 2, 1) and bool((of_all.q_scale == 0.01).all())


def angles(length: int, first: int = 0, batch: int = 2, head_dim: int = 64) -> Any:
    positions = first + torch.arange(length) + 50.0 * torch.arange(batch)[:, None]
    of_rows = positions[..., None] * 100.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    return of_rows.cos(), of_rows.sin()


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_rotary_embedding_comes_before_all_else(
    interleaved: bool, smooth_k: bool, hadamard: bool, end_if_known: Callable[[], None]
) -> None:
    end_if_known()
    q, k, v = drawn(q_len=300)
    rotary = angles(300)
    pairs = "interleaved" if interleaved else "half"
    given = quantize_attention(
        q, k, v, smooth_k=smooth_k, hadamard=hadamard, rotary=rotary, rotary_interleaved=interleaved
    )
    assert given.rotary == pairs
    turned_q, turned_k = (embedded(x, rotary, pairs) for x in (q, k))
    centered = turned_k - (0 if given.k_mean is None else given.k_mean[:, :, None])
    factor = torch.tensor(64**-0.5)
    for codes, x, of in ((given.q, turned_q, given.q_scale), (given.k, centered, given.k_scale)):
        values = rotated(x) if hadamard else x
        before = (
            (of.repeat_interleave(128, 2)[:, :, :300] / factor)
            if hadamard
            else of.repeat_interleave(128, 2)[:, :, :300]
        )
        assert torch.equal(codes.view(torch.uint8), coded(values, before[..., None], "e4m3").view(torch.uint8))
    of_q, of_k, _ = dequantized(given)
    logits = of_q @ of_k.repeat_interleave(2, 1).mT
    if given.mean_logits is not None:
        assert given.k_mean is not None
        assert torch.allclose(given.k_mean, turned_k.mean(2), atol=1e-4)
        products = (turned_q @ given.k_mean.repeat_interleave(2, 1)[..., None])[..., 0]
        assert torch.allclose(given.mean_logits, products, atol=1e-3)
        logits = logits + given.mean_logits[..., None]
    exact = turned_q @ turned_k.repeat_interleave(2, 1).mT
    assert (logits - exact).square().mean().sqrt() < 0.06 * exact.square().mean().sqrt()


def test_later_queries_and_keys_are_rotated_too(end_if_known: Callable[[], None]) -> None:
    end_if_known()
    q, k, v = drawn(q_len=256, kv_len=256)
    more_q, more_k, more_v = drawn(q_len=70, kv_len=100)
    options: dict[str, Any] = {"q_scale": 0.01, "k_scale": 0.01, "rotary": angles(256)}
    first = quantize_attention(q, k, v, kv_capacity=512, **options)
    both = first.append(more_k, more_v, rotary=angles(100, 256)).with_queries(more_q, rotary=angles(70, 286))
    assert both.rotary == "half" and both.kv_len == 356 and both.k_mean is not None
    keys = embedded(torch.cat((k, more_k), 2), angles(356), "half") - both.k_mean[:, :, None]
    for codes, values in ((both.q, embedded(more_q, angles(70, 286), "half")), (both.k, keys)):
        assert torch.equal(codes.view(torch.uint8), coded(values, torch.full((1,), 0.01), "e4m3").view(torch.uint8))
    plain = quantize_attention(q, k, v, kv_capacity=512)
    for later, message in (
        (lambda: first.with_queries(more_q), r"rotary: is missing: .* rotated \(half\): \(cos, sin\) of 70 rows"),
        (lambda: first.append(more_k, more_v), r"rotary: is missing: .* \(cos, sin\) of 100 rows"),
        (
            lambda: plain.with_queries(more_q, rotary=angles(70)),
            "rotary: is given, but the operands were quantized with",
        ),
        (lambda: plain.append(more_k, more_v, rotary=angles(100)), "rotary: is given, but the operands were quantized"),
        (lambda: first.with_queries(more_q, rotary=angles(71)), r"rotary\[0\]: has shape \(2, 71, 32\), expected"),
        (lambda: first.with_queries(more_q, rotary=(1, 2)), r"rotary: is a tuple of \(int, int\), expected a pair"),
    ):
        with pytest.raises(ArgumentError, match=rf"^{message}"):
            later()


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_the_scale_of_a_tensor_is_that_of_a_kernel(dtype: Any, end_if_known: Callable[[], None]) -> None:
    end_if_known()
    q, k, v = drawn(q_len=64, kv_len=64)
    q[0, 1, 3, 5], q[1, 2, 4, 6], k[:, 1] = float("inf"), float("nan"), 0.0
    found = quantize_attention(q, k, v, dtype=dtype, smooth_k=False)
    for x, scale in ((q, found.q_scale), (k, found.k_scale)):
        kept = scale if x is q else scale[:, :1]
        whole, heads = scales_of(x, dtype=dtype), scales_of(x, per="head", dtype=dtype)
        assert torch.equal(whole, kept.amax()) and torch.equal(heads[: kept.shape[1]], kept.amax((0, 2)))
    assert float(scales_of(k, per="head", dtype=dtype)[1]) == 1.0
    assert scales_of(q, "head").dtype == torch.float32 and float(scales_of(torch.zeros(3))) == 1.0
    again = quantize_attention(q, k, v, dtype=dtype, smooth_k=False, q_scale=scales_of(q, dtype=dtype), validate=True)
    assert not bool((again.q.float()[q.isfinite()].abs() > 448 * (1 if dtype == "e4m3" else 128)).any())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2), "row"), "per: is 'row', expected tensor or head"),
        ((torch.ones(2), "head"), r"x: has shape \(2,\), expected \(batch, heads, length, head_dim\)"),
        ((torch.ones(0),), r"x: has shape \(0,\), expected an element or more"),
        ((torch.ones(2).double(),), "x: is torch.float64, expected torch.float16, torch.bfloat16, torch.float32"),
        ((None,), "x: is NoneType, expected"),
        ((torch.ones(2), "tensor", "fp8"), "dtype: is 'fp8', expected e4m3 or e5m2"),
    ],
)
def test_scales_of_what_has_none_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{message}"):
        scales_of(*arguments)


Q, K, V = drawn()


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ((Q, K, V), {"dtype": "fp8"}, "dtype: is 'fp8', expected e4m3 or e5m2"),
        ((Q, K, V), {"q_rows": 32}, "q_rows: is 32, expected 64 or 128"),
        ((Q, K, V), {"k_rows": "64"}, "k_rows: is '64', expected 64 or 128"),
        ((Q, K, V), {"smooth_k": 1}, "smooth_k: is 1, expected True or False"),
        ((Q.float(), K, V), {}, "q: is torch.float32, expected torch.float16 or torch.bfloat16"),
        ((Q, K.half(), V), {}, "k: is torch.float16 on cpu, q is torch.bfloat16 on cpu"),
        ((Q, K, V[:, :, :7]), {}, r"v: has shape \(2, 2, 7, 64\), expected"),
        ((Q[..., :40], K, V), {}, r"q: has shape \(2, 4, 200, 40\), expected .*head_dim 64, 96, 128, 192, 256"),
        (
            (*(x.repeat(1, 1, 1, 2)[..., :96] for x in (Q, K, V)),),
            {"hadamard": True},
            "q: .* 64, 128, 256 with hadamard",
        ),
        ((Q[:, :3], K, V), {}, "q: has 3 heads, k has 2: not a multiple"),
        ((Q[:1], K, V), {}, r"q: has shape \(1, 4, 200, 64\), expected"),
        ((Q.clone().requires_grad_(), K, V), {}, "q: requires a gradient, and FP8 has no backward: use bf16"),
        ((Q, K, None), {}, "v: is NoneType, expected a torch.Tensor"),
        ((Q, K, V), {"kv_capacity": 299}, "kv_capacity: is 299, expected 300 keys or more"),
        ((Q, K, V), {"kv_capacity": 3e2}, "kv_capacity: is 300.0, expected 300 keys or more"),
        *(
            (
                (Q, K, V),
                {"q_scale": scale},
                rf"q_scale: is {re.escape(str(scale))}, expected a positive number from 2\^-120 to 2\^120",
            )
            for scale in (0.0, -1.0, float("nan"), float("inf"), 1e-40, 1.5e300, 0)
        ),
        ((Q, K, V), {"k_scale": True}, "k_scale: is bool, expected a number or torch.float32 on cpu"),
        ((Q, K, V), {"k_scale": torch.ones(2).half()}, "k_scale: is torch.float16 on cpu, expected a number or"),
        (
            (Q, K, V),
            {"k_scale": torch.ones(2, 2, 3)},
            r"k_scale: has shape \(2, 2, 3\), expected one of \(\), \(2,\), \(2, 2\)$",
        ),
        (
            (Q, K, V),
            {"v_scale": torch.ones(64)},
            r"v_scale: has shape \(64,\), expected one of \(\), \(2,\), \(2, 2\), \(2, 2, 64\)$",
        ),
        (
            (Q, K, V),
            {"q_scale": torch.ones(4).requires_grad_()},
            "q_scale: requires a gradient, and FP8 has no backward",
        ),
        *(
            ((Q, K, V), {"v_scale": torch.tensor([1.0, value]), "validate": True}, rf"v_scale: has {value}, expected")
            for value in (0.0, -2.0, float("nan"), float("inf"))
        ),
        ((Q, K, V), {"validate": 1}, "validate: is 1, expected True or False"),
        ((Q, K, V), {"rotary_interleaved": 1}, "rotary_interleaved: is 1, expected True or False"),
        ((Q, K, V), {"rotary_interleaved": True}, "rotary_interleaved: is True without rotary"),
        ((Q, K, V), {"rotary": angles(200)}, "rotary: is given for 200 queries and 300 keys, expected equal lengths"),
        (
            (Q, K[:, :, :200], V[:, :, :200]),
            {"rotary": angles(300)},
            r"rotary\[0\]: has shape \(2, 300, 32\), expected",
        ),
        ((Q, K, V), {"rotary": "half"}, r"rotary: is str, expected a pair of tensors \(cos, sin\)"),
        (
            (*(x.repeat(1, 1, 1, 2)[:, :, :200, :96] for x in (Q, K, V)),),
            {"rotary": angles(200, head_dim=96)},
            "rotary: is given for heads of 96, expected heads of 64, 128, 256, or None",
        ),
        (
            (Q, K[:, :, :200], V[:, :, :200]),
            {"rotary": tuple(x.requires_grad_() for x in angles(200))},
            "rotary: requires a gradient, and FP8 has no backward",
        ),
    ],
)
def test_what_is_refused(tensors: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{message}"):
        quantize_attention(*tensors, **options)


@pytest.mark.parametrize("block", [(1, 128), (64, 128), (128, 128)])
@pytest.mark.parametrize("shape", [(200, 384), (3, 129, 256)])
def test_matrices(block: tuple[int, int], shape: tuple[int, ...], end_if_known: Callable[[], None]) -> None:
    end_if_known()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[..., :2, 130:200] *= 100
    codes, scales = quantize_matrix(x, block)
    rows = -(-shape[-2] // block[0])
    assert codes.shape == shape and codes.is_contiguous() and scales.shape == (*shape[:-2], rows, shape[-1] // 128)
    assert scales.stride(-2) == 1
    spread = scales.repeat_interleave(block[0], -2)[..., : shape[-2], :].repeat_interleave(128, -1)
    found = codes.float() * spread
    assert ((found - x.float()).abs() <= (x.float().abs() * 2.0**-4).clamp(min=2.0**-9 * spread)).all()
    assert (codes.float().abs().amax() == 448.0).item()


@pytest.mark.parametrize(
    ("x", "block", "message"),
    [
        (Q[0, 0, :, :60], (1, 128), r"x: has shape \(200, 60\), expected .* columns a multiple of 128"),
        (Q, (1, 128), r"x: has shape \(2, 4, 200, 64\), expected"),
        (torch.zeros(4, 256).bfloat16(), (32, 128), r"block: is \(32, 128\), expected one of"),
    ],
)
def test_matrices_that_are_refused(x: Any, block: tuple[int, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{message}"):
        quantize_matrix(x, block)


@pytest.mark.parametrize(
    "fields",
    [
        {"scales": "row", "tile": {"m": 64}},
        {"scales": "row_block", "tile": {"m": 64}, "mean": "subtract"},
        {"scales": "row_block", "tile": {"m": 128}, "mean": "product"},
        {"scales": "channel"},
        {"scales": "given", "tile": {"m": 64}, "mean": "subtract"},
        {"scales": "row_block", "tile": {"m": 128}, "mean": "product", "rotary": "half"},
    ],
    ids=str,
)
def test_a_fake_result_is_like_the_real_one(fields: dict[str, Any], end_if_known: Callable[[], None]) -> None:
    end_if_known()
    spec = json.dumps({**fields, "codes": "e4m3", "dtype": "bf16", "head_dim": 64}, sort_keys=True)
    mean = torch.randn(2, 4, 64) if fields.get("mean") == "product" else None
    scales = torch.ones(1, 1, 1) if fields["scales"] == "given" else None
    rotary = angles(200) if "rotary" in fields else (None, None)
    real = torch.ops.sparse_kernel_codegen.quantize(Q, mean, scales, *rotary, spec=spec)
    with FakeTensorMode() as mode:
        fakes = [None if each is None else mode.from_tensor(each) for each in (Q, mean, scales, *rotary)]
        fake = torch.ops.sparse_kernel_codegen.quantize(*fakes, spec=spec)
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


class _Operators(TorchDispatchMode):
    """Keeps the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.names.add(function.overloadpacket.__name__)
        return function(*arguments, **(named or {}))


def test_operands_from_elsewhere_copy_nothing_from_the_host() -> None:
    codes = [torch.randn(1, 2, 200, 64).to(torch.float8_e4m3fn) for _ in range(3)]
    with _Operators() as called:
        quantized_operands(*codes, q_scale=1.0, k_scale=0.5, v_scale=torch.ones(2))
    made_on_the_host = {"lift_fresh", "_to_copy", "copy_", "index"}  # torch.tensor(list), and indexing by one
    assert called.names and not called.names & made_on_the_host


def test_quantizing_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all lengths; the kernel is stood for by what the operator says of its results."""
    from runtime.ops import quantize as ops

    class Fake:
        def __init__(self, index: Any, spec: str) -> None:
            self.spec = spec

        def __call__(self, x: Any, *, mean: Any, scales: Any, rotary: Any) -> Any:
            codes, found, _ = ops._fake(x, mean, scales, spec=self.spec)
            return ops.Quantized(codes, found)

    monkeypatch.setattr(ops, "_kernel", Fake)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def call(x: Any) -> Any:
        made = ops.quantize_columns(x, dtype="e4m3")
        return made.codes.shape, made.scales.shape, ops.quantize_rows(x, dtype="e4m3", rows=128).scales.shape

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for length in range(200, 1200, 100):
        x = torch.zeros(2, 3, length, 64, dtype=torch.float16)
        assert compiled(x) == call(x)
    assert len(graphs) == 1
