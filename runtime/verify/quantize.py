"""Quantize kernels: case table, oracle, and the run of one case.

Codes and scales must match torch's bit for bit. The mean of K is compared with the float64 mean; the oracle subtracts
the kernel's own mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from codegen.dtypes import LARGEST
from codegen.fp8 import KEY_ORDER, KEYS_TOGETHER, LEAST_AMAX, SIGN_BITS, V_KEYS, sign_words
from codegen.spec import QuantizeSpec
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.quantize import Quantized, QuantizeKernel, Rotary
from runtime.verify.common import Outcome, Verification, generator, poisoned_memory

CLOSE = 2.0**-20  # relative to the largest magnitude, for means and products in fp32
_NAN_CODE = 0x7F  # for both dtypes


@dataclass(frozen=True)
class Case:
    """One tensor.

    Attributes:
        name: unique; also the seed.
        length: rows of a head.
        heads: heads; kv_heads: heads of the mean, if rows are multiplied by it.
        batch: batches.
        data: "normal"; "outliers", 0.1% with std 10 instead of 1; "offset", columns with a mean far from 0; "small";
            "zeros" in whole blocks; "strange", with infinities and NaN.
        strided: x is a view of (batch, length, heads, head_dim), cosines and sines are views of wider rows.
        given: the caller passes the mean to subtract or the scales of columns. Scales of heads, which the caller always
            passes, are then one scale for all heads, and cosines and sines are the same for all batches.
        into: results are written into a larger tensor of the caller.
    """

    name: str
    length: int
    heads: int = 2
    kv_heads: int = 2
    batch: int = 1
    data: str = "normal"
    strided: bool = False
    given: bool = False
    into: bool = False

    def describe(self) -> str:
        """Description of the parameters."""
        said = {"strided": self.strided, "statistic given": self.given, "written into": self.into}
        sizes = f"{self.batch} x {self.heads}:{self.kv_heads} heads, length {self.length}, {self.data} data"
        return ", ".join([sizes, *(word for word, holds in said.items() if holds)])


CASES = (
    Case("plain", 4096, heads=4, batch=2),
    Case("many_heads", 1000, heads=48, kv_heads=8, batch=3),
    Case("long", 70001, heads=1, kv_heads=1),
    Case("one_row", 1),
    Case("odd_length", 1001, heads=6, kv_heads=3, strided=True),
    Case("short_of_a_block", 127, heads=3, kv_heads=1, data="offset"),
    Case("outliers", 2048, data="outliers"),
    Case("offset", 2300, data="offset", strided=True),
    Case("small", 513, data="small"),
    Case("zeros", 1300, data="zeros"),
    Case("strange", 1300, data="strange"),
    Case("given", 700, data="offset", given=True),
    Case("into", 900, data="offset", into=True),
    Case("given_into", 512, given=True, into=True, strided=True),
)


def drawn(case: Case, head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Draw the tensor of a case."""
    draw = generator(case.name, device)
    shape = (case.batch, case.heads, case.length, head_dim)
    x = torch.randn(shape, generator=draw, device=device)
    if case.data == "outliers":
        x += (
            10
            * torch.randn(shape, generator=draw, device=device)
            * (torch.rand(shape, generator=draw, device=device) < 1e-3)
        )
    if case.data == "offset":
        x += 20 * torch.randn((*shape[:2], 1, head_dim), generator=draw, device=device)
    if case.data == "small":
        x *= 1e-6
    if case.data == "zeros":
        x[:, :, 128:400] = 0.0
        x[..., 3:20] = 0.0
    if case.data == "strange":
        x[:, :, 5, 7], x[:, :, 700, 9], x[:, 0, 900, 3] = math.inf, -math.inf, math.nan
        x[:, 1, 1024:1152] = math.nan
        x[:, 0, :, 11] = math.inf
    x = x.to(dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if case.strided else x


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rows times signs and the unnormalized Hadamard matrix, in the kernel's order of additions."""
    head_dim = x.shape[-1]
    signs = [1 - 2 * (word >> bit & 1) for word in sign_words(head_dim) for bit in range(SIGN_BITS)]
    x = x * torch.tensor(signs, dtype=torch.float32, device=x.device)
    half = 1
    while half < head_dim:
        pairs = x.unflatten(-1, (-1, 2, half))
        a, b = pairs.unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return x


def embedded(x: torch.Tensor, rotary: Rotary, pairs: str) -> torch.Tensor:
    """Rows with the rotary embedding, float32. Each product is rounded, then their sum, as in the kernel."""
    cosines, sines = (each if each.dim() == 2 else each[:, None] for each in rotary)
    x = x.float()
    if pairs == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cosines - b * sines, b * cosines + a * sines), -1).flatten(-2)


def scales_of(amax: torch.Tensor, codes: str) -> torch.Tensor:
    """Scales of groups, float32."""
    largest = torch.full_like(amax, LARGEST[codes])  # torch divides by a number by multiplying with its reciprocal
    return torch.where(amax >= LEAST_AMAX, amax / largest, torch.ones_like(amax))


def coded(x: torch.Tensor, scales: torch.Tensor, codes: str) -> torch.Tensor:
    """Codes of x, float32, for scales that broadcast to x."""
    largest = LARGEST[codes]
    found = (x * (torch.ones_like(scales) / scales)).clamp(-largest, largest)
    bits = found.to(TORCH_DTYPES[codes]).view(torch.uint8)
    return torch.where(found.isnan(), torch.full_like(bits, _NAN_CODE), bits).view(TORCH_DTYPES[codes])


def in_key_order(codes: torch.Tensor) -> torch.Tensor:
    """V^T from codes (batch, heads, length, head_dim), padded with zeros and with its keys in the kernels' order."""
    bits = codes.view(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, 0, 0, -codes.shape[2] % V_KEYS)).mT
    order = torch.tensor(KEY_ORDER, device=codes.device)
    found: torch.Tensor = bits.unflatten(-1, (-1, KEYS_TOGETHER))[..., order].flatten(-2).contiguous()
    return found.view(codes.dtype)


def _amax(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    magnitudes = x.abs()
    found: torch.Tensor = torch.where(magnitudes.isfinite(), magnitudes, torch.zeros_like(x)).amax(axes)
    return found


def expected(
    x: torch.Tensor,
    spec: QuantizeSpec,
    mean: torch.Tensor | None,
    scales: torch.Tensor | None,
    rotary: Rotary | None = None,
) -> Quantized:
    """Expected result for x: ``mean`` is subtracted, ``scales`` are the call's."""
    values = x.float() if rotary is None else embedded(x, rotary, spec.rotary)
    if spec.scales == "channel":
        scales = scales_of(_amax(values, (2,)), spec.codes) if scales is None else scales
        return Quantized(in_key_order(coded(values, scales[:, :, None], spec.codes)), scales)
    if mean is not None:
        values = values - mean[:, :, None]
    if spec.hadamard:
        values = rotated(values)
    factor = torch.tensor(1.0 / math.sqrt(spec.head_dim), dtype=torch.float32, device=x.device)
    if spec.scales == "given":
        assert scales is not None
        return Quantized(coded(values, (scales / factor if spec.hadamard else scales)[..., None], spec.codes), scales)
    if spec.scales == "row":
        scales = scales_of(_amax(values, (3,)), spec.codes)
        spread = scales
    else:
        parts = [_amax(part, (2, 3)) for part in values.split(spec.tile.m, 2)]
        scales = scales_of(torch.stack(parts, 2), spec.codes)
        spread = scales.repeat_interleave(spec.tile.m, 2)[:, :, : x.shape[2]]
    return Quantized(coded(values, spread[..., None], spec.codes), scales * factor if spec.hadamard else scales)


def run_case(kernel: QuantizeKernel, case: Case, device: torch.device) -> Outcome:
    """Run one case twice in poisoned memory; the error is the number of wrong codes and scales."""
    spec = kernel.spec
    x = drawn(case, spec.head_dim, TORCH_DTYPES[spec.dtype], device)
    named = _arguments(spec, case, x)
    with poisoned_memory():
        (found, at), (again, _) = (_call(kernel, case, x, named) for _ in range(2))
    problems = [] if all(_same(one, other) for one, other in zip(found, again, strict=True)) else ["two runs differ"]
    right = expected(x, spec, found.mean, named.get("scales"), named.get("rotary"))
    wrong = float("nan")
    if found.codes.shape == right.codes.shape and found.scales.shape == right.scales.shape:
        wrong = float((found.codes.view(torch.uint8) != right.codes.view(torch.uint8)).sum())
        wrong += float((found.scales != right.scales).sum())
    problems += [] if at is None or not at else [at]
    problems += _columns(spec, case, x, found, named)
    return Outcome(case.name, case.describe(), wrong, None, 0.0, "; ".join(problems))


def _arguments(spec: QuantizeSpec, case: Case, x: torch.Tensor) -> dict[str, Any]:
    """Arguments of a call other than x."""
    draw = generator(f"{case.name} given", x.device)
    found: dict[str, Any] = {}
    if spec.mean == "product":
        found["mean"] = torch.randn((case.batch, case.kv_heads, spec.head_dim), generator=draw, device=x.device)
    if case.given and spec.mean == "subtract":
        found["mean"] = torch.randn((case.batch, case.heads, spec.head_dim), generator=draw, device=x.device)
    of = {"given": (1, 1, 1) if case.given else (case.batch, case.heads, 1)}
    of |= {"channel": (case.batch, case.heads, spec.head_dim)} if case.given else {}
    if spec.scales in of:  # some elements exceed these scales
        drawn = torch.rand(of[spec.scales], generator=draw, device=x.device)
        found["scales"] = (0.5 + drawn) * 4 / LARGEST[spec.codes]
    if spec.rotary != "none":
        found["rotary"] = angles(case, spec.head_dim, x.device)
    return found


def angles(case: Case, head_dim: int, device: torch.device) -> Rotary:
    """Cosines and sines of positions, with another first position in each batch.

    They are parts of wider rows if x is a view, and shared by all batches if the case is ``given``.
    """
    half = head_dim // 2
    positions = torch.arange(case.length, device=device) + 1000.0 * torch.arange(case.batch, device=device)[:, None]
    frequencies = 10000.0 ** (-torch.arange(half, device=device) / half)
    of_rows = positions[..., None] * frequencies
    wide = of_rows.repeat(1, 1, 2) if case.strided else of_rows
    found = wide.cos()[..., :half], wide.sin()[..., :half]
    return (found[0][0], found[1][0]) if case.given else found


def _call(kernel: QuantizeKernel, case: Case, x: torch.Tensor, named: dict[str, Any]) -> tuple[Quantized, str | None]:
    """Call the kernel, into a part of a larger tensor for ``into``; also describe writes outside the part."""
    if not case.into:
        return kernel(x, **named), None
    spec = kernel.spec
    by_columns = spec.scales == "channel"
    keys = -(-case.length // V_KEYS) * V_KEYS
    shape = (
        case.batch,
        case.heads,
        *((spec.head_dim, keys + 2 * V_KEYS) if by_columns else (case.length + 9, spec.head_dim)),
    )
    whole = torch.full(shape, 0x11, dtype=torch.uint8, device=x.device)
    part = whole[..., V_KEYS:-V_KEYS] if by_columns else whole[:, :, 4:-5]
    more: dict[str, Any] = {"out": part.view(TORCH_DTYPES[spec.codes])}
    if spec.scales in ("row", "row_block"):
        blocks = case.length if spec.scales == "row" else -(-case.length // spec.tile.m)
        more["out_scales"] = torch.zeros((blocks, case.heads, case.batch), device=x.device).permute(2, 1, 0)
    found = kernel(x, **named, **more)
    beside = int((whole != 0x11).sum()) - int((part != 0x11).sum())
    return found, f"{beside} codes were written outside the part" if beside else ""


def _columns(spec: QuantizeSpec, case: Case, x: torch.Tensor, found: Quantized, named: Any) -> list[str]:
    """Check the mean and the products with it; return descriptions of faults."""
    values = embedded(x, named["rotary"], spec.rotary).double() if "rotary" in named else x.double()
    finite = torch.where(values.isfinite(), values, torch.zeros_like(values))
    if spec.mean == "subtract" and not case.given:
        error = float((found.mean.double() - finite.mean(2)).abs().max()) if found.mean is not None else math.nan
        return [] if error <= CLOSE * float(finite.abs().max()) else [f"the mean is off by {error:.3g}"]
    if spec.mean == "product":
        mean = named["mean"].double().repeat_interleave(case.heads // case.kv_heads, 1)
        right, got = (values @ mean[..., None])[..., 0], found.product
        assert got is not None
        where = right.isfinite()
        error = float(torch.where(where, got.double() - right, torch.zeros_like(right)).abs().max())
        sizes = (finite.abs() @ mean.abs()[..., None]).max()
        same = torch.equal(got.isfinite(), where)
        return [] if same and error <= CLOSE * float(sizes) else [f"products with the mean are off by {error:.3g}"]
    return []


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (one, other)]
    return bool(torch.equal(*bits))


VERIFICATION = Verification(
    oracle="codes and scales by torch in fp32, bit for bit, on the GPU: errors are numbers that differ",
    cases=lambda plan, spec: CASES,
    run_case=run_case,
)
