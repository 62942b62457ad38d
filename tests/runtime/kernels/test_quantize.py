"""Quantize kernels: the plan, what a call checks, and the generated source run on the host, thread by thread."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.fp8 import KEY_ORDER, sign_words
from codegen.library import find_spec
from codegen.planning import plan_for
from codegen.plans.quantize import STATISTIC_ROWS
from codegen.problem import QuantizeShape
from codegen.render import generate, render
from codegen.tools.sized_launch import sized_launch

torch = pytest.importorskip("torch")

import host_quantize  # noqa: E402

from runtime.driver import workspace  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels.quantize import QuantizeKernel  # noqa: E402
from runtime.verify import quantize as verified  # noqa: E402

CPU = torch.device("cpu")
RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
on_the_host = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
ROWS: dict[str, Any] = {"op": "quantize", "arch": "sm_90a", "dtype": "bf16", "head_dim": 128, "scales": "row_block"}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"scales": "row", "codes": "e5m2", "head_dim": 96},
    {"tile": {"m": 64}, "head_dim": 256, "dtype": "fp16"},
    {"mean": "subtract", "head_dim": 64},
    {"mean": "subtract", "hadamard": True},
    {"mean": "product", "hadamard": True, "head_dim": 256},
    {"mean": "product", "dtype": "fp16"},
    {"scales": "given", "tile": {"m": 64}, "head_dim": 192, "codes": "e5m2"},
    {"scales": "given", "mean": "product", "dtype": "fp16"},
    {"scales": "given", "mean": "subtract", "hadamard": True},
    {"rotary": "half", "mean": "product", "dtype": "fp16"},
    {"rotary": "half", "scales": "row", "head_dim": 64, "codes": "e5m2"},
    {"rotary": "half", "mean": "subtract", "hadamard": True},
    {"rotary": "half", "mean": "product", "hadamard": True, "head_dim": 256},
    {"rotary": "interleaved", "mean": "subtract", "tile": {"m": 64}, "head_dim": 256},
    {"rotary": "interleaved", "scales": "given", "mean": "product", "head_dim": 64},
    {"rotary": "interleaved", "hadamard": True, "dtype": "fp16"},
    {"scales": "channel", "dtype": "fp16"},
    {"scales": "channel", "head_dim": 192, "codes": "e5m2"},
]
SMALL = (
    verified.Case("short", 300, heads=2, kv_heads=1),
    verified.Case("several_chunks_of_columns", 1100, data="offset", strided=True),
    verified.Case("strange", 1160, data="strange"),
    verified.Case("zeros", 450, data="zeros"),
    verified.Case("one_row", 1),
    verified.Case("given_into", 300, data="offset", given=True, into=True),
    verified.Case("of_each_batch", 70, batch=2, heads=3, kv_heads=1),
)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host_quantize.on_cpu(monkeypatch)


def kernel_of(folder: Path, source: str | None = None, **changes: Any) -> host_quantize.HostKernel:
    return host_quantize.HostKernel(find_spec({**ROWS, **changes}), folder, source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile": {"m": 32}}, "tile.m: is 32; allowed: 64, 128"),
        ({"stages": 2}, "stages: is 2"),
        ({"mma": "mma"}, "mma: mma is not possible here"),
        (
            {"head_dim": 96, "hadamard": True},
            "hadamard: is true; the Hadamard rotation supports head_dim 64, 128, 256, not 96",
        ),
        (
            {"head_dim": 96, "rotary": "half"},
            "rotary: is half; with head_dim 96 a thread has 3 chunks .*; allowed: head_dim 64, 128, 256",
        ),
        ({"head_dim": 192, "rotary": "interleaved"}, "rotary: is interleaved; with head_dim 192 a thread has 3 chunks"),
        ({"scales": "channel", "rotary": "half"}, "rotary: is half; columns with their own scales"),
        ({"rotary": "neox"}, "rotary: "),
        (
            {"scales": "given", "rotary": "half", "tile": {"m": 128}},
            "tile.m: is 128; with a given scale and rotary, registers suffice for 64",
        ),
        ({"scales": "channel", "tile": {"m": 64}}, "tile.m: is 64; V\\^T has keys by 128: 128"),
        ({"scales": "channel", "mean": "subtract"}, "mean: is subtract; columns with their own scales"),
        ({"scales": "channel", "hadamard": True}, "hadamard: is true; columns with their own scales"),
        ({"arch": "sm_86"}, "arch: is sm_86; quantize is written for sm_89, sm_90a, sm_120"),
        ({"dtype": "e4m3"}, "dtype: is e4m3; quantize does not support FP8"),
        ({"head_dim": 80}, "head_dim: "),
        ({"codes": "fp16"}, "codes: "),
    ],
)
def test_what_it_is_not_written_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=rf"^{message}"):
        plan_for(find_spec({**ROWS, **changes}))


def test_the_order_of_keys_makes_scores_an_operand() -> None:
    of_accumulator = [(2 * lane, 2 * lane + 1, 8 + 2 * lane, 9 + 2 * lane) for lane in range(4)]
    assert [KEY_ORDER[4 * lane : 4 * lane + 4] for lane in range(4)] == of_accumulator
    assert sorted(KEY_ORDER) == list(range(16))


def test_signs_are_the_same_everywhere() -> None:
    assert sign_words(256)[:4] == sign_words(128) == (3682848681, 1273297330, 2836666020, 2287819204)
    assert 100 < sum(word.bit_count() for word in sign_words(256)) < 156


def test_a_rotation_keeps_lengths_and_products() -> None:
    x, y = torch.randn(2, 5, 128).double()
    turned = verified.rotated(x.float()).double() / 128**0.5, verified.rotated(y.float()).double() / 128**0.5
    assert torch.allclose((turned[0] * turned[1]).sum(-1), (x * y).sum(-1), atol=1e-4)
    spike = torch.zeros(128)
    spike[17] = 10.0
    assert (verified.rotated(spike).abs() == 10.0).all()


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_the_rotary_embedding_is_that_of_complex_numbers(pairs: str) -> None:
    x, angle = torch.randn(2, 3, 5, 64).bfloat16(), torch.rand(2, 5, 32) * 6
    found = verified.embedded(x, (angle.cos(), angle.sin()), pairs)
    parts = [x[..., :32], x[..., 32:]] if pairs == "half" else [x[..., ::2], x[..., 1::2]]
    turned = (
        torch.complex(*(part.double() for part in parts))
        * torch.polar(torch.ones(()).double(), angle.double())[:, None]
    )
    right = torch.cat((turned.real, turned.imag), -1)
    right = right if pairs == "half" else right.unflatten(-1, (2, 32)).mT.flatten(-2)
    assert (found - right).abs().max() < 1e-5
    one = verified.embedded(x[1:], (angle[1].cos(), angle[1].sin()), pairs)  # of all batches
    assert torch.equal(one, found[1:])


def test_halves_are_rotated_to_the_bits_of_transformers() -> None:
    x, angle = torch.randn(2, 3, 5, 64), torch.rand(5, 32) * 6
    cos, sin = angle.repeat(1, 2).cos(), angle.repeat(1, 2).sin()
    rotated_half = torch.cat((-x[..., 32:], x[..., :32]), -1)
    right = x * cos + rotated_half * sin
    assert torch.equal(verified.embedded(x, (cos[:, :32], sin[:, :32]), "half"), right)


def work(numbers: Any, ticket: int, rows: int) -> tuple[int, int, bool]:
    """What templates/quantize/columns.cuh.j2 says of a ticket: head, chunk, whether columns are added up."""
    share, parts, lead = STATISTIC_ROWS // rows, numbers["statistic_chunks"], numbers["lead"]
    if parts == 0:
        return ticket // numbers["chunks"], ticket % numbers["chunks"], False
    turn, place = (ticket - lead) % (share + 1), (ticket - lead) // (share + 1)
    adds_up = ticket < lead or turn == 0
    place = ticket if ticket < lead else lead + place if adds_up else place
    if adds_up:
        return place // parts, place % parts, True
    chunk = (parts - 1 - place % parts) * share + turn - 1
    return (place // parts if chunk < numbers["chunks"] else numbers["all_heads"]), chunk, False


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(("heads", "length"), [(1, 1), (3, 700), (40, 513), (2, 70000), (7, 4096)])
def test_every_chunk_is_done_once_and_waits_for_earlier_tickets(heads: int, length: int, rows: int) -> None:
    plan = plan_for(find_spec({**ROWS, "mean": "subtract", "tile": {"m": rows}}))
    args = plan.problem(QuantizeShape(1, heads, length))
    added: dict[int, set[int]] = {head: set() for head in range(heads)}
    done = set()
    for ticket in range(args.tiles):
        head, chunk, adds_up = work(args.numbers, ticket, rows)
        if head >= heads:
            continue
        if adds_up:
            assert chunk not in added[head]
            added[head].add(chunk)
        else:
            assert len(added[head]) == -(-length // STATISTIC_ROWS) and (head, chunk) not in done
            done.add((head, chunk))
    assert done == {(head, chunk) for head in range(heads) for chunk in range(-(-length // rows))}


def test_a_launch_with_a_given_statistic_adds_nothing_up() -> None:
    plan = plan_for(find_spec("h100_quantise_v"))
    args = plan.problem(QuantizeShape(2, 3, 1000, is_given=1))
    assert (args.tiles, args.numbers["statistic_chunks"]) == (2 * 3 * 8, 0)


def test_a_launch_of_products_wants_the_heads_of_the_mean() -> None:
    plan = plan_for(find_spec("h100_quantise_q"))
    sized = sized_launch(plan, {"batch": 1, "heads": 8, "length": 300, "kv_heads": 2}, 132)
    assert sized.args.numbers["heads_per_kv_head"] == 4
    with pytest.raises(SpecError, match=r"shape\.kv_heads: is 0, h100_quantise_q needs 1 or more"):
        sized_launch(plan, {"batch": 1, "heads": 8, "length": 300}, 132)
    with pytest.raises(SpecError, match=r"shape\.heads: is 9, expected a multiple of 2, the heads of the mean"):
        sized_launch(plan, {"batch": 1, "heads": 9, "length": 300, "kv_heads": 2}, 132)


def test_one_text_for_all_architectures() -> None:
    texts = [render(find_spec({**ROWS, "mean": "subtract", "arch": arch})) for arch in ("sm_89", "sm_90a", "sm_120")]
    stems = [find_spec({**ROWS, "mean": "subtract", "arch": arch}).stem for arch in ("sm_89", "sm_90a", "sm_120")]
    bodies = {text.partition("struct Params")[2].replace(stem, "") for text, stem in zip(texts, stems, strict=True)}
    assert len({body.partition("__launch_bounds__(kThreads, ")[0] for body in bodies}) == 1


@on_the_host
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_codes_and_scales_are_those_of_torch(
    changes: dict[str, Any], recorded: Callable[..., None], tmp_path: Path
) -> None:
    recorded(generate(find_spec({**ROWS, **changes})).source, repr(SMALL))
    kernel = kernel_of(tmp_path, **changes)
    for case in SMALL:
        for kernel.host.order in (1, 2):
            outcome = verified.run_case(kernel, case, CPU)  # type: ignore[arg-type]
            assert outcome.passed, outcome


@on_the_host
@pytest.mark.parametrize(
    ("changes", "line", "instead"),
    [
        ({"mean": "subtract"}, "x[e] -= of_chunk[e];", "x[e] += of_chunk[e];"),
        ({"scales": "channel"}, "quad % 4 * 2;", "quad % 4 * 4;"),
        ({"scales": "channel"}, "fmaxf(amax, fabsf(x))", "fmaxf(amax, x)"),
        ({"hadamard": True}, "b = a - b;", "b = b - a;"),
        ({"hadamard": True}, "^ (signs", "^ (~signs"),
        ({}, "amax / kLargest : 1.0f", "amax * 1.0001f / kLargest : 1.0f"),
        ({"mean": "product"}, "sum += x[e]", "sum -= x[e]"),
        ({"mean": "subtract"}, "*counter = 0;", ";"),
        ({"mean": "subtract"}, "if (!finite)", "if (false)"),
        ({"rotary": "half"}, "__fsub_rn(__fmul_rn(a, cosine)", "__fadd_rn(__fmul_rn(a, cosine)"),
        (
            {"rotary": "half"},
            "__fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine))",
            "fmaf(b, cosine, __fmul_rn(a, sine))",
        ),
        ({"rotary": "half"}, "* (kChunk / 4) + j;", "* (kChunk / 4);"),
        ({"rotary": "interleaved"}, "load_quad(sine, sines,", "load_quad(sine, cosines,"),
        ({"rotary": "half"}, "p.cosines + batch * p.cosines_batch_stride", "p.cosines"),
        ({"rotary": "half"}, "sines + row * p.sines_row_stride", "sines + (row + 1) * p.sines_row_stride"),
        ({"rotary": "half", "mean": "subtract"}, "load_rotated(chunks, p, x, row);", "load_rotated(chunks, p, x, 0);"),
        ({"scales": "given"}, "p.scales[batch * p.scales_batch_stride", "p.scales[0 * p.scales_batch_stride"),
        ({"scales": "given"}, "+ head * p.scales_head_stride] /", "] /"),
        ({"scales": "given", "hadamard": True}, "p.scales_head_stride] / kScaleFactor", "p.scales_head_stride]"),
    ],
    ids=str,
)
def test_a_wrong_kernel_is_found(
    changes: dict[str, Any], line: str, instead: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    source = generate(find_spec({**ROWS, **changes})).source
    assert source.count(line) == 1
    changed = source.replace(line, instead)
    recorded(changed, repr(SMALL))
    kernel = kernel_of(tmp_path, changed, **changes)
    workspace._counters.clear()
    outcomes = [verified.run_case(kernel, case, CPU) for case in SMALL]  # type: ignore[arg-type]
    left = any(bool(kept.any()) for kept in workspace._counters.values())
    workspace._counters.clear()
    assert left or not all(outcome.passed for outcome in outcomes)


def call(x: Any, fields: dict[str, Any], **named: Any) -> Any:
    """Call a kernel that is never launched, with tensors of the CPU that pass for those of a GPU."""
    named_spec = find_spec({**ROWS, **fields})
    compiled: Any = SimpleNamespace(named=named_spec, plan=plan_for(named_spec))
    return QuantizeKernel(compiled, SimpleNamespace())(x, **named)  # type: ignore[arg-type]


HALF = torch.zeros(2, 4, 300, 128, dtype=torch.bfloat16)
MEAN = torch.zeros(2, 4, 128)
ANGLES = torch.zeros(2, 300, 64)
HALVES = {"rotary": "half"}


@pytest.mark.parametrize(
    ("fields", "x", "named", "message"),
    [
        ({}, HALF[..., :64], {}, "x: has head_dim 64, this kernel takes 128"),
        ({}, HALF.mT.contiguous().mT, {}, "x: has stride 300 in its last dimension"),
        ({}, HALF[:, :, :, :1].expand(-1, -1, -1, 128), {}, "x: has stride 0 in its last dimension"),
        ({}, HALF, {"mean": MEAN}, "mean: is given, but the spec has mean: none"),
        ({}, HALF, {"scales": MEAN}, "scales: is given, but this kernel computes the scales of rows"),
        ({"mean": "product"}, HALF, {}, r"mean: is missing: float32 \(batch 2, kv_heads, head_dim 128\)"),
        ({"mean": "product"}, HALF, {"mean": MEAN[:, :3]}, "mean: has strides .*, expected a contiguous tensor"),
        ({"mean": "product"}, HALF, {"mean": torch.zeros(2, 3, 128)}, "mean: has 3 heads, x has 4: not a multiple"),
        ({"mean": "subtract"}, HALF, {"mean": torch.zeros(2, 2, 128)}, r"mean: has shape \(2, 2, 128\), expected"),
        ({"scales": "channel"}, HALF, {"scales": torch.zeros(2, 4, 64)}, r"scales: has shape \(2, 4, 64\), expected"),
        (
            {"scales": "channel"},
            HALF,
            {"out_scales": MEAN},
            "out_scales: is given, but this kernel has column scales",
        ),
        ({"scales": "given"}, HALF, {}, r"scales: is missing: float32 \(batch 2 or 1, heads 4 or 1, 1\)"),
        ({"scales": "given"}, HALF, {"scales": MEAN}, r"scales: has shape \(2, 4, 128\), expected"),
        ({"scales": "given"}, HALF, {"scales": torch.ones(2, 2, 1)}, r"scales: has shape \(2, 2, 1\), expected"),
        (
            {"scales": "given"},
            HALF,
            {"scales": torch.ones(1, 1, 1), "out_scales": torch.zeros(2, 4, 3)},
            "out_scales: is given, but this kernel has given scales",
        ),
        ({}, HALF, {"rotary": (ANGLES, ANGLES)}, "rotary: is given, but the spec has rotary: none"),
        (HALVES, HALF, {}, r"rotary: is missing: .* float32 \(length 300, 64\) or \(batch 2 or 1, length 300, 64\)"),
        (HALVES, HALF, {"rotary": ANGLES}, r"rotary: is Tensor, expected a pair of tensors \(cos, sin\)"),
        (HALVES, HALF, {"rotary": (ANGLES, 1)}, r"rotary: is a tuple of \(Tensor, int\), expected a pair"),
        (HALVES, HALF, {"rotary": (ANGLES,) * 3}, r"rotary: is a tuple of \(Tensor, Tensor, Tensor\), expected a pair"),
        (HALVES, HALF, {"rotary": (ANGLES[0, 1:], ANGLES[0])}, r"rotary\[0\]: has shape \(299, 64\), expected"),
        (HALVES, HALF, {"rotary": (ANGLES, ANGLES[..., 1:])}, r"rotary\[1\]: has shape \(2, 300, 63\), expected"),
        (
            HALVES,
            HALF,
            {"rotary": (ANGLES, ANGLES.repeat(2, 1, 1))},
            r"rotary\[1\]: has shape \(4, 300, 64\), expected",
        ),
        (HALVES, HALF, {"rotary": (ANGLES.mT.contiguous().mT, ANGLES)}, r"rotary\[0\]: has stride 300 in its last dim"),
        (
            HALVES,
            HALF,
            {"rotary": (ANGLES, torch.zeros(300, 65)[:, :64])},
            r"rotary\[1\]: has stride 65 in dimension 0; strides must be multiples of 4 elements",
        ),
        ({"scales": "channel"}, HALF, {"out": HALF}, r"out: has shape \(2, 4, 300, 128\), expected"),
        ({}, HALF, {"out": HALF[:, :1].expand(-1, 4, -1, -1)}, "out: is expanded in dimension 1"),
        ({}, HALF, {"out_scales": torch.zeros(2, 4, 2)}, r"out_scales: has shape \(2, 4, 2\), expected"),
        ({}, HALF, {"out_scales": torch.zeros(2, 1, 3).expand(2, 4, 3)}, "out_scales: is expanded in dimension 1"),
    ],
)
def test_what_a_call_refuses(fields: dict[str, Any], x: Any, named: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{message}"):
        call(x, fields, **named)
