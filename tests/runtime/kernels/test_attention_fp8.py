"""Attention with FP8 inputs: order of V's keys, what is refused, and what a call's checks say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from codegen.dtypes import LARGEST
from codegen.errors import SpecError
from codegen.fp8 import KEY_ORDER
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for

torch = pytest.importorskip("torch")

from host_streams import pretend_stream  # noqa: E402

from runtime.driver import launch  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels import arguments, attention, attention_fp8  # noqa: E402
from runtime.prepare.quantized import FP8_TYPES, QuantizedInputs, quantize, transposed  # noqa: E402

FP8: dict[str, Any] = {"op": "attention", "arch": "sm_90a", "dtype": "e4m3", "head_dim": 128}
DENSE = {"kind": "dense"}


def test_keys_of_an_accumulator_are_columns_of_an_operand() -> None:
    """PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32" and accumulators of m64nN.

    "Matrix Fragments for mma.m16n8k32" has the same columns in a lane, and accumulators of m16n8 too.
    """
    for lane in range(4):
        held = [8 * group + 2 * lane + i for group in range(2) for i in range(2)]
        assert [KEY_ORDER[4 * lane + i] for i in range(4)] == held
    assert sorted(KEY_ORDER) == list(range(16))


def test_v_is_transposed_in_that_order() -> None:
    v = torch.randn(2, 3, 37, 32).to(torch.float8_e4m3fn)
    v_t = transposed(v)
    assert v_t.shape == (2, 3, 32, 48)
    for position in range(48):
        key = position // 16 * 16 + KEY_ORDER[position % 16]
        expected = v[:, :, key].float() if key < 37 else torch.zeros(2, 3, 32)
        assert torch.equal(v_t[..., position].float(), expected)


@pytest.mark.parametrize("dtype", FP8_TYPES)
@pytest.mark.parametrize("scales", ["blocks", "heads", "tensor"])
def test_quantized_inputs_are_near_what_they_stand_for(dtype: str, scales: str) -> None:
    q, k, v = torch.randn(2, 4, 100, 64), torch.randn(2, 2, 201, 64), torch.randn(2, 2, 201, 64)
    given = quantize(q, k, v, dtype, q_rows=64, k_rows=128, scales=scales)
    for exact, found in zip((q, k, v), given.dequantized(), strict=True):
        assert (found - exact).abs().max() <= exact.abs().max() * (2.0**-4 if dtype == "e4m3" else 2.0**-3)
    assert given.q_scale.shape == (2, 4, 2) and given.k_scale.shape == (2, 2, 2) and given.v_scale.shape == (2, 2, 64)
    assert (given.q_scale.stride() == (0, 0, 0)) == (scales == "tensor")
    assert float(given.q.float().abs().max()) <= LARGEST[dtype]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"arch": "sm_80", "pattern": DENSE}, "dtype"),
        ({"arch": "sm_86", "pattern": DENSE}, "dtype"),
        ({"arch": "sm_89", "pattern": DENSE, "mma": "wmma"}, "dtype"),
        ({"arch": "sm_89", "pattern": DENSE, "tile": {"m": 64, "n": 96}}, "tile.n"),
        ({"arch": "sm_89", "pattern": DENSE, "stages": 2}, "stages"),
        ({"arch": "sm_89", "pattern": DENSE, "warp_rows": 32}, "warp_rows"),
        ({"arch": "sm_89", "pattern": DENSE, "accumulate_every": 4}, "accumulate_every"),
        ({"arch": "sm_89", "pattern": DENSE, "pad_heads": True}, "pad_heads"),
        ({"pattern": DENSE, "tile": {"m": 128, "n": 96}}, "tile.n"),
        ({"pattern": DENSE, "kv_splits": 2, "schedule": "cooperative", "tile": {"m": 64, "n": 64}}, "kv_splits"),
        ({"pattern": DENSE, "accumulate_every": 2}, "accumulate_every"),
        ({"pattern": DENSE, "accumulate_every": -1}, "accumulate_every"),
        ({"pattern": DENSE, "scale_rows": {"q": 32}}, "scale_rows.q"),
        ({"pattern": DENSE, "output": "fp32"}, "output"),
        ({"pattern": DENSE, "dtype": "fp16", "output": "fp16"}, "output"),
        ({"pattern": DENSE, "dtype": "bf16", "accumulate_every": 4, "tile": {"m": 128, "n": 128}}, "accumulate_every"),
        ({"pattern": DENSE, "dtype": "fp16", "scale_rows": {"q": 64}}, "scale_rows"),
        ({"op": "attention_backward", "gradients": "dq", "pattern": DENSE}, "dtype"),
    ],
)
def test_what_has_no_kernel_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan_for(find_spec({**FP8, **fields}))
    assert caught.value.field == field


def test_shared_loads_are_refused() -> None:
    fields = {"pattern": {"kind": "topk", "k": 8, "block": {"q": 64, "kv": 64}}, "share_kv_loads": True}
    with pytest.raises(SpecError, match="share_kv_loads"):
        plan_for(find_spec({**FP8, **fields}))


def test_other_kernels_keep_their_hash() -> None:
    spec = find_spec("h100_dense").spec
    assert not {"output", "scale_rows", "accumulate_every"} & set(spec.canonical_json().replace('"', " ").split())


class Looks(launch.LoadedKernel):
    """Stands for a kernel in the driver: launches nothing."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.layout = plan, launch.ParameterLayout.of(plan.params)
        self._sm_counts = {None: 132}  # type: ignore[dict-item]

    def _config(self, grid: int, size: launch.BlockSize) -> None:
        pass

    def launch(self, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        assert {name for name, _ in signature.pointers} <= set(addresses)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    def check(name: str, tensor: Any, dtype: Any, rank: int, device: Any = None) -> None:
        if tensor.dtype != dtype:
            raise ArgumentError(name, f"is {tensor.dtype}, this kernel takes {dtype}")
        assert tensor.dim() == rank

    for module in (arguments, attention, attention_fp8):
        monkeypatch.setattr(module, "check_tensor", check)
    pretend_stream(monkeypatch, 7)
    named = find_spec({**FP8, "pattern": DENSE, "output": "fp16"})
    plan = plan_for(named)
    return attention_fp8.Fp8AttentionKernel(SimpleNamespace(named=named, plan=plan), Looks(plan))  # type: ignore[arg-type]


def drawn() -> QuantizedInputs:
    q, k, v = torch.randn(2, 4, 200, 128), torch.randn(2, 2, 300, 128), torch.randn(2, 2, 300, 128)
    return quantize(q, k, v, "e4m3", q_rows=128, k_rows=128)


def test_results_have_the_type_of_output(kernel: Any) -> None:
    given = drawn()
    for v_t in (given.v_t, torch.nn.functional.pad(given.v_t.view(torch.uint8), (0, 80)).view(torch.float8_e4m3fn)):
        out, lse = kernel(given.q, given.k, v_t, **given.scales())
        assert out.dtype == torch.float16 and out.shape == given.q.shape and lse.shape == (2, 4, 200)


def test_refusals_name_the_argument(kernel: Any) -> None:
    given = drawn()
    scales = given.scales()
    with pytest.raises(ArgumentError, match=r"q: is torch\.float32, this kernel takes torch\.float8_e4m3fn"):
        kernel(given.q.float(), given.k, given.v_t, **scales)
    with pytest.raises(ArgumentError, match=r"v_t: has shape .* expected .*kv_len 300 rounded up to a multiple of 16"):
        kernel(given.q, given.k, given.v_t[..., :256], **scales)
    with pytest.raises(ArgumentError, match="v_t: has shape"):
        kernel(given.q, given.k, given.v, **scales)
    for name in attention.SCALES:
        with pytest.raises(ArgumentError, match=f"{name}: has shape"):
            kernel(given.q, given.k, given.v_t, **{**scales, name: scales[name][..., :1]})
        with pytest.raises(TypeError, match=name):
            kernel(given.q, given.k, given.v_t, **{key: value for key, value in scales.items() if key != name})
        for wrong in (0.0, -1.0, torch.nan, torch.inf):
            bad = scales[name].clone()
            bad[1, 1, 1] = wrong
            with pytest.raises(ArgumentError, match=f"{name}: has {wrong}, expected positive, finite numbers"):
                kernel(given.q, given.k, given.v_t, **{**scales, name: bad}, validate=True)
    with pytest.raises(ArgumentError, match=r"out: has|out: is"):
        kernel(given.q, given.k, given.v_t, **scales, out=torch.empty(given.q.shape, dtype=torch.bfloat16))


def test_the_quantize_call_is_named() -> None:
    given: Any = SimpleNamespace(
        layout=torch.strided, is_nested=False, device=torch.device("cuda", 0), dtype=torch.float16
    )
    real = torch.Tensor
    with pytest.MonkeyPatch.context() as context:
        context.setattr(arguments.torch, "Tensor", SimpleNamespace)
        with pytest.raises(ArgumentError, match="quantize it first"):
            arguments.check_tensor("q", given, torch.float8_e4m3fn, 4)
    assert torch.Tensor is real
