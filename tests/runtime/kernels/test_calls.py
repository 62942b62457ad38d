"""What a call hands to the driver, with a driver that only looks: numbers, addresses, tensor maps, signatures."""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from each import for_each
from scripts import imported

from codegen.dtypes import FP8
from codegen.library import find_spec, shipped_specs
from codegen.plan import PARAM_ABI, Plan
from codegen.planning import plan_for
from codegen.spec import AttentionBackwardSpec, AttentionSpec

torch = pytest.importorskip("torch")

import oracle_kernel  # noqa: E402
from host_streams import pretend_stream  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from runtime import block_sparse_attention  # noqa: E402
from runtime.driver import launch, tensor_map, workspace  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.expressions.draw import draw_aux  # noqa: E402
from runtime.kernels import arguments, attention, attention_backward, attention_fp8  # noqa: E402
from runtime.kernels.pattern_numbers import numbers_for  # noqa: E402
from runtime.ops import attention_calls, attention_choice  # noqa: E402
from runtime.patterns import Causal, Dense, Score  # noqa: E402
from runtime.prepare.prepared import PreparedLists  # noqa: E402
from runtime.prepare.quantized import quantize  # noqa: E402

PROJECT = Path(__file__).resolve().parents[3]
GRADIENTS: Any = attention_backward.AttentionBackwardKernel


class Driver:
    """Stands for cuLaunchKernel, which launches prologues, and cuLaunchKernelEx; keeps each launch's parameters."""

    def __init__(self, plan: Plan, size: int) -> None:
        self.plan, self.size = plan, size
        self.overlaps = plan.prologue is not None and plan.prologue.overlaps
        self.launches: list[tuple[int, int, bytes]] = []

    def __call__(self, function: int, grid: int, *rest: Any) -> tuple[int]:
        *_, stream, arguments, _ = rest
        block = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        self.launches.append((grid, stream, ctypes.string_at(block, self.size)))
        return (0,)

    def by(self, config: Any, function: int, arguments: int, extra: int) -> tuple[int]:
        assert config.numAttrs == len(config.attrs) == self.overlaps
        assert all(attribute.value.programmaticStreamSerializationAllowed == 1 for attribute in config.attrs)
        plan = self.plan
        assert (config.blockDimX, config.sharedMemBytes) == (plan.threads, plan.shared_bytes)
        assert (config.gridDimY, config.gridDimZ, config.blockDimY, config.blockDimZ) == (1, 1, 1, 1)
        return self(function, config.gridDimX, int(config.hStream), arguments, extra)


def loaded_kernel(plan: Plan) -> tuple[launch.LoadedKernel, Driver]:
    loaded = launch.LoadedKernel.__new__(launch.LoadedKernel)
    loaded.plan, loaded.layout = plan, launch.ParameterLayout.of(plan.params)
    driver = Driver(plan, loaded.layout.size)
    loaded._function, loaded._launch, loaded._sm_counts = 0, driver, {None: 132}  # type: ignore[dict-item]
    loaded._prologue, loaded._epilogue, loaded._launch_by = 0, 0, driver.by  # type: ignore[assignment]
    return loaded, driver


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[attention.AttentionKernel, Driver]]:
    """Makes kernels that take CPU tensors and are launched by a Driver on stream 7."""
    pretend_stream(monkeypatch, 7)
    for module in (attention, attention_backward, attention_fp8):
        monkeypatch.setattr(module, "check_tensor", lambda *arguments: None)
    monkeypatch.setattr(tensor_map.MapEncoder, "_encode", lambda self, address: struct.pack("<Q", address) * 16)

    def make(name: str) -> tuple[attention.AttentionKernel, Driver]:
        named = find_spec(name)
        loaded, driver = loaded_kernel(plan_for(named))
        called = attention.AttentionKernel if isinstance(named.spec, AttentionSpec) else GRADIENTS
        called = attention_fp8.Fp8AttentionKernel if named.spec.dtype in FP8 else called
        return called(SimpleNamespace(named=named, plan=loaded.plan), loaded), driver  # type: ignore[arg-type]

    return make


def qkv(heads: int = 2, length: int = 256) -> list[Any]:
    return [torch.randn(1, heads, length, 128, dtype=torch.float16) for _ in range(3)]


def field(kernel: attention.AttentionKernel, block: bytes, name: str) -> Any:
    layout = kernel._loaded.layout
    size, code = PARAM_ABI[layout.types[name]][0], launch._FORMATS[layout.types[name]]
    offset = layout.offsets[name]
    return struct.unpack("<16Q" if layout.types[name] == "tensor_map" else code, block[offset : offset + size])


@pytest.mark.parametrize(
    "name",
    ["h100_dense", "h100_topk32", "h100_block_lists", "h100_prefix_lm", "l4_causal", "l4_prefix_lm", "l4_topk32"],
)
def test_each_launch_has_the_numbers_and_addresses_of_its_call(kernel: Any, name: str) -> None:
    call, driver = kernel(name)
    shapes = {"kv_indices": (1, 2, -1, 32), "kv_num_blocks": (1, 2, -1), "prefix_len": (1,)}
    rows = 256 // call.spec.pattern.fixed_block.q if call.spec.pattern.fixed_block else 0
    kept = []
    for _ in range(3):
        q, k, v = qkv()
        indices = [
            torch.zeros([rows if n == -1 else n for n in shapes[spec.name]], dtype=torch.int32)
            for spec in call.spec.index_tensors
            if not spec.optional
        ]
        out, lse = call(q, k, v, *indices, scale=0.25)
        kept.append((q, k, v, indices, out, lse))
    assert len(driver.launches) == 3 and len(call._signatures) == 1
    for (grid, stream, block), (q, k, v, indices, out, lse) in zip(driver.launches, kept, strict=True):
        assert stream == 7 and grid > 0
        assert field(call, block, "q_len") == (256,) and field(call, block, "kv_len") == (256,)
        assert field(call, block, "scale_log2") == pytest.approx((0.25 * math.log2(math.e),))
        assert field(call, block, "lse") == (lse.data_ptr(),) and lse.shape == (1, 2, 256)
        for letter, tensor in (("q", q), ("k", k), ("v", v), ("o", out)):
            name_of_map = f"{letter}_map"
            if name_of_map in call.compiled.plan.tensor_maps:
                assert field(call, block, name_of_map) == (tensor.data_ptr(),) * 16
            else:
                assert field(call, block, letter) == (tensor.data_ptr(),)
        required = [spec for spec in call.spec.index_tensors if not spec.optional]
        for spec, tensor in zip(required, indices, strict=True):
            assert field(call, block, spec.name) == (tensor.data_ptr(),)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The scratch memory of each launch."""
    made: list[Any] = []
    scratch = workspace.scratch
    monkeypatch.setattr(workspace, "scratch", lambda *given: (made.append(scratch(*given)), made[-1])[1])
    return made


def test_tiles_of_a_last_round_are_divided(kernel: Any, taken: list[Any]) -> None:
    call, driver = kernel("h100_topk32")
    q, k, v = qkv()
    lists = torch.zeros(1, 2, 2, 32, dtype=torch.int32)
    call(q, k, v, lists)
    plan, ((grid, stream, block),) = call.compiled.plan, driver.launches
    # 2 heads x 2 tiles of 32 listed blocks each, for 132 thread blocks.
    divided = plan.stream_k.divide(4, 32, 132)
    assert divided == (field(call, block, "stream_k_tiles")[0], field(call, block, "stream_k_ctas")[0])
    assert field(call, block, "units") == (32,) and field(call, block, "tiles") == (4,)
    assert grid == divided[1] > 4
    counters, partial_bytes = plan.stream_k.workspace(*divided)
    kept = workspace._counters[None, stream]  # type: ignore[index] # the CPU has no number
    assert kept.numel() >= counters and taken[0].numel() >= partial_bytes
    assert field(call, block, "units_done") == (kept.data_ptr(),)
    assert field(call, block, "partials") == (taken[0].data_ptr(),)


def test_a_call_that_fills_its_rounds_takes_no_memory(kernel: Any, taken: list[Any]) -> None:
    call, driver = kernel("h100_topk32")
    q, k, v = qkv(heads=66)
    call(q, k, v, torch.zeros(1, 1, 2, 32, dtype=torch.int32))
    ((grid, _, block),) = driver.launches
    assert grid == 132
    for name in ("stream_k_tiles", "stream_k_ctas", "partials", "units_done"):
        assert field(call, block, name) == (0,), name
    assert not workspace._counters and not taken


def test_shares_are_those_of_the_problem(kernel: Any) -> None:
    for name, length, units in (("h100_dense", 1000, 13), ("h100_window2k", 1000, 13), ("h100_window2k", 9000, 29)):
        call, driver = kernel(name)
        call(*qkv(length=length))
        ((_, _, block),) = driver.launches
        assert field(call, block, "units") == (units,), name


@pytest.mark.parametrize("length", [0, 1, 7, 32, 33, 500])
def test_lists_without_a_fixed_length_have_that_of_the_call(kernel: Any, length: int) -> None:
    call, driver = kernel("h100_topk")
    q, k, v = qkv()
    call(q, k, v, torch.zeros(1, 2, 2, length, dtype=torch.int32), validate=True)
    ((grid, _, block),) = driver.launches
    divided = call.compiled.plan.stream_k.divide(4, length, 132)
    assert field(call, block, "kv_indices_length") == field(call, block, "units") == (length,)
    assert divided == (field(call, block, "stream_k_tiles")[0], field(call, block, "stream_k_ctas")[0])
    assert grid == max(4, divided[1]) and (length > 1 or divided == (0, 0))


def test_lists_of_another_length_are_another_signature(kernel: Any) -> None:
    call, driver = kernel("h100_topk")
    q, k, v = qkv()
    for length in (3, 5, 3):
        call(q, k, v, torch.zeros(1, 2, 2, length, dtype=torch.int32))
    assert [field(call, block, "kv_indices_length") for _, _, block in driver.launches] == [(3,), (5,), (3,)]
    assert len(call._signatures) == 2
    with pytest.raises(ArgumentError, match=r"kv_indices: has shape \(1, 2, 2\)"):
        call(q, k, v, torch.zeros(1, 2, 2, dtype=torch.int32))


def test_lists_that_a_later_call_leaves_out_are_not_those_of_an_earlier_one(kernel: Any) -> None:
    call, driver = kernel("h100_block_lists")
    q, k, v = qkv()
    counts, lists = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    call(q, k, v, counts, lists, counts, lists)
    call(q, k, v, counts, lists)
    call(q, k, v, full_kv_indices=lists, full_kv_num_blocks=counts, kv_num_blocks=counts, kv_indices=lists)
    found = [field(call, block, "full_kv_indices")[0] for _, _, block in driver.launches]
    assert found == [lists.data_ptr(), 0, lists.data_ptr()]


def test_threads_do_not_mix_their_addresses(kernel: Any) -> None:
    call, driver = kernel("h100_dense")
    inputs = [qkv() for _ in range(4)]
    call(*inputs[0])
    driver.launches.clear()

    def work(q: Any, k: Any, v: Any) -> None:
        for _ in range(200):
            call(q, k, v)

    threads = [threading.Thread(target=work, args=three) for three in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = {tuple(field(call, block, f"{letter}_map")[0] for letter in "qkv") for _, _, block in driver.launches}
    assert len(driver.launches) == 800
    assert seen == {tuple(t.data_ptr() for t in three) for three in inputs}


def test_nothing_comes_between_a_kernel_and_the_one_before_it(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream has one place for the orders that its calls find: two calls must not take turns there."""
    seen: list[int] = []

    def launched(self: Driver, function: int, grid: int, *rest: Any) -> tuple[int]:
        seen.append(threading.get_ident())
        time.sleep(0.001)  # as the driver does, this lets other threads run
        return (0,)

    monkeypatch.setattr(Driver, "__call__", launched)
    q, k, v = qkv(heads=1)
    lists = torch.zeros(1, 1, 4, 32, dtype=torch.int32)
    calls = [kernel("h100_topk32_b64_self_ordered")[0] for _ in range(3)]
    threads = [threading.Thread(target=lambda call=call: [call(q, k, v, lists) for _ in range(10)]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 60
    assert all(first == second for first, second in zip(seen[::2], seen[1::2], strict=True))


def test_a_dimension_of_one_element_has_no_stride(kernel: Any) -> None:
    """A kernel's rows beyond the only one must lie where copies may begin, though nothing is read there."""
    call, driver = kernel("l4_causal")
    one = torch.zeros(1, 2, 4, 132).half()[:, :, :1, :128]
    call(one, one, one)
    names = [f"{letter}_{axis}_stride" for letter in "qkv" for axis in ("batch", "head", "row")]
    assert [field(call, driver.launches[-1][2], name)[0] for name in names] == [0, 4 * 132, 0] * 3


def test_tensor_maps_have_the_strides_of_views(kernel: Any) -> None:
    call, _ = kernel("h100_topk32_b64_shared")
    q = torch.zeros(2, 4, 320, 128).half()
    k = torch.zeros(2, 400, 2, 256).half()[..., :128].transpose(1, 2)
    call(q, k, k[:, :1].expand(-1, 2, -1, -1), torch.zeros(2, 4, 5, 32, dtype=torch.int32))
    (signature,) = call._signatures.values()
    (of_q, of_k, of_v) = (next(each.encoder for each in signature.maps if each.name == letter) for letter in "qkv")
    assert (of_q.dims, of_q.how.box) == ((128, 320, 4, 2), (64, 64, 1, 1))
    assert (of_k.dims, of_k.how.box) == ((128, 400, 2, 2), (64, 64, 1, 1)) == (of_v.dims, of_v.how.box)
    assert of_k.strides == (512, 256, 204800)  # keys, heads, batches
    assert of_v.strides == (512, 0, 204800)


def test_whatever_a_check_depends_on_makes_a_new_signature(kernel: Any) -> None:
    call, _ = kernel("h100_dense")
    q, k, v = qkv()
    transposed = torch.empty_like(q.transpose(1, 2).contiguous()).transpose(1, 2)
    narrow = q[:, :, :128]
    variants: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, k, v), {}),
        ((q, k, v), {"scale": 0.5}),
        ((q, k, v), {"out": torch.empty_like(q)}),
        ((q, k, v), {"out": transposed}),
        ((transposed, k, v), {}),
        ((narrow, k, v), {}),
        ((q, k[:, :1], v[:, :1]), {}),
        ((q.bfloat16(), k, v), {}),  # the check that would refuse it is switched off here
    ]
    for number, (tensors, named) in enumerate(variants, start=1):
        call(*tensors, **named)
        call(*tensors, **named)
        assert len(call._signatures) == number


@pytest.fixture
def refused_gradients(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check nothing of a tensor but its gradient, where ``kernel`` checks nothing at all."""

    def refuse(name: str, tensor: Any, *rest: Any) -> None:
        arguments.refuse_gradient(name, tensor)

    monkeypatch.setattr(attention, "check_tensor", refuse)


@pytest.mark.parametrize("name", ["h100_dense_dq", "h100_topk_dq", "h100_dense_dkdv", "h100_topk_dkdv"])
def test_a_gradient_of_the_log_sum_exp_makes_the_statistics_of_a_gradient(kernel: Any, name: str) -> None:
    call, driver = kernel(name)
    lists = [torch.zeros(1, 1, 2, 4, dtype=torch.int32)] if "topk" in name else []
    q, k, v = qkv()
    rows = {"out": torch.randn_like(q), "dout": torch.randn_like(q), "lse": torch.randn(1, 2, 256)}
    rows["lse"][0, 1, 3] = -math.inf
    stats = call(q, k, v, *lists, **rows).stats
    assert len(driver.launches) == 2, "the prologue, and the kernel"
    for given in ({"dlse": torch.randn(1, 2, 256)}, {}):
        driver.launches.clear()
        stats = call(q, k, v, *lists, **rows, **(given or {"stats": stats})).stats
        assert len(driver.launches) == 1 + (name == "h100_topk_dkdv"), "lists are transposed all the same"
        _, _, block = driver.launches[-1]
        assert field(call, block, "stats") == (stats.data_ptr(),)
        if name == "h100_topk_dkdv":
            assert driver.launches[0][0] == 1 and field(call, block, "list_blocks") == (1,)
        if given:
            delta = (rows["out"].float() * rows["dout"].float()).sum(-1) - given["dlse"]
            delta[0, 1, 3] = 0
            torch.testing.assert_close(stats[:, :, :256, 1], delta)
            right = rows["lse"] * math.log2(math.e)
            torch.testing.assert_close(stats[:, :, :256, 0], torch.where(right > -math.inf, right, math.inf))
            assert not stats[:, :, 256:, 1].any() and bool((stats[:, :, 256:, 0] == math.inf).all())


def test_the_prologue_of_a_gradient_alone_is_one_launch(kernel: Any) -> None:
    q, k, v = qkv()
    lists = torch.zeros(1, 1, 2, 4, dtype=torch.int32)
    rows = {"out": torch.randn_like(q), "dout": torch.randn_like(q), "lse": torch.randn(1, 2, 256)}
    with imported("backward_prologue") as script:
        for name in ("h100_topk_dq", "h100_topk_dkdv"):
            call, driver = kernel(name)
            stats = call(q, k, v, lists, **rows).stats
            (of_prologue, _, _), (of_kernel, _, _) = driver.launches
            assert of_prologue != of_kernel
            driver.launches.clear()
            script.alone(call)(q, k, v, lists, **rows)
            assert [grid for grid, *_ in driver.launches] == [of_prologue]
            driver.launches.clear()
            script.alone(call)(q, k, v, lists, **rows, stats=stats)
            assert [grid for grid, *_ in driver.launches] == ([1] if name == "h100_topk_dkdv" else []), "lists alone"


@pytest.mark.parametrize("which", ["dq", "dkdv"])
def test_gradients_by_mma_sync_are_told_where_rows_lie(kernel: Any, which: str) -> None:
    call, driver = kernel(f"l4_dense_{which}")
    q = torch.randn(1, 300, 4, 72).half().transpose(1, 2)  # strides of another order, heads of 72 of 128 elements
    k = torch.randn(1, 2, 200, 80).half()[..., :72]
    rows = {"out": torch.randn_like(q), "dout": torch.randn(1, 4, 300, 72).half(), "lse": torch.randn(1, 4, 300)}
    found = call(q, k, k, **rows)
    made = {"dq": found.dq} if which == "dq" else {"dk": found.dk, "dv": found.dv}
    assert {name for name in ("dq", "dk", "dv") if getattr(found, name) is not None} == set(made)
    (before, *_), (grid, _, block) = driver.launches
    assert before == -(-4 * 512 // 64) and grid == (4 * 3 if which == "dq" else 2 * 2)
    tensors = {"q": q, "k": k, "v": k, "out": rows["out"], "dout": rows["dout"], **made}
    for name, tensor in tensors.items():
        assert field(call, block, name) == (tensor.data_ptr(),), name
        strides = [field(call, block, f"{name}_{axis}_stride")[0] for axis in ("batch", "head", "row")]
        assert strides == [0, *tensor.stride()[1:3]], name
    numbers = {"q_len": 300, "kv_len": 200, "heads": 4, "heads_per_kv_head": 2, "head_chunks": 9, "padded_q_len": 512}
    assert {name: field(call, block, name)[0] for name in numbers} == numbers
    stats = torch.empty(found.stats.numel() + 1)[1:].view_as(found.stats)
    with pytest.raises(ArgumentError, match="stats: starts at address"):
        call(q, k, k, **rows, stats=stats)


@pytest.mark.usefixtures("refused_gradients")
def test_a_gradient_is_checked_again_after_calls_without(kernel: Any) -> None:
    call, driver = kernel("h100_dense")
    q, k, v = qkv()
    k.requires_grad_()
    with torch.no_grad():
        call(q, k, v)
    with pytest.raises(ArgumentError, match="k: requires a gradient"):
        call(q, k, v)
    with torch.no_grad():
        call(q, k, v)
    assert len(driver.launches) == 2


@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_and_values_that_numbers_of_chunks_do_not_reach(kernel: Any, name: str) -> None:
    call, driver = kernel("l4_dense")
    tensors = dict(zip("qkv", qkv(), strict=True))
    shape = tensors[name].shape
    tensors[name] = torch.empty_strided(shape, (2**36, 2**35, shape[3], 1), dtype=torch.float16, device="meta")
    with pytest.raises(ArgumentError, match=rf"{name}: extends over \d+ bytes, but this kernel reaches 68719476736"):
        call(**tensors)
    assert not driver.launches


def test_a_failed_launch_raises_and_the_next_one_works(kernel: Any) -> None:
    call, driver = kernel("h100_dense")
    q, k, v = qkv()
    call._loaded._launch_by = lambda *arguments: (700,)
    with pytest.raises(launch.DeviceError, match="launch of h100_dense failed: 700"):
        call(q, k, v)
    call._loaded._launch_by = driver.by
    call(q, k, v)
    assert len(driver.launches) == 1


@pytest.mark.parametrize("name", ["h100_dense", "l4_causal"])
def test_every_kernel_is_prepared_for_its_device(
    name: str,
    kernel: Callable[[str], tuple[attention.AttentionKernel, Driver]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread block gets more than 48 KB of shared memory only where that was asked for, whatever the grid."""
    prepared: list[int] = []
    monkeypatch.setattr(launch.LoadedKernel, "sm_count", lambda self, device: prepared.append(device) or 132)
    call, driver = kernel(name)
    q, k, v = (torch.randn(1, 2, 256, call.spec.head_dim, dtype=torch.float16) for _ in range(3))
    call(q, k, v)
    assert prepared and driver.launches


def listed(heads: int = 4, kv_heads: int = 2, q_len: int = 256, kv_len: int = 4096) -> dict[str, Any]:
    """Arguments of l4_topk32."""
    q, k, v = (torch.zeros(2, h, s, 128).half() for h, s in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)))
    return {"q": q, "k": k, "v": v, "kv_indices": torch.zeros(2, heads, q_len // 64, 32, dtype=torch.int32)}


def holed(t: Any) -> Any:
    """Return lists of which one has padding before its last block."""
    t[1, 2, 3, 20:31] = -1
    return t


def shifted(t: Any) -> Any:
    """Return a tensor like another that begins one element behind a place where copies may begin."""
    return torch.zeros(t.numel() + 8, dtype=t.dtype)[1 : t.numel() + 1].view(t.shape)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("q", lambda t: t[..., :64], r"q: has shape .* head_dim 128"),
        ("k", lambda t: t[:1], r"k: has shape .*batch 2"),
        ("v", lambda t: t[:1], r"v: has shape .*batch 2"),
        ("v", lambda t: t[:, :1], r"v: has shape .*kv_heads 2"),
        ("v", lambda t: t[:, :, :100], r"v: has shape .* kv_len 4096"),
        ("q", lambda t: t[:, :3], r"k: has 2 heads, q has 3: not a multiple"),
        ("q", lambda t: t.mT.contiguous().mT, r"q: has stride 256 in its last dimension"),
        ("k", lambda t: torch.nn.functional.pad(t, (0, 1))[..., :128], r"k: has stride \d+ .* multiples of 8"),
        ("q", shifted, r"q: starts at address 0x"),
        ("k", shifted, r"k: starts at address 0x"),
        ("v", shifted, r"v: starts at address 0x"),
        ("out", lambda _: shifted(torch.zeros(2, 4, 256, 128).half()), r"out: starts at address 0x"),
        ("out", lambda _: torch.zeros(2, 4, 128, 128).half(), r"out: has shape \(2, 4, 128, 128\)"),
        ("out", lambda _: torch.zeros(2, 4, 128, 256).half().mT, r"out: has stride 256 in its last dimension"),
        ("out", lambda _: torch.zeros(1, 4, 256, 128).half().expand(2, -1, -1, -1), r"out: is expanded in dimension 0"),
        ("kv_indices", lambda t: 3, r"kv_indices: is int, expected a torch\.Tensor"),
        ("kv_indices", lambda t: t.to("meta"), r"kv_indices: is on meta, q is on cpu"),
        ("kv_indices", lambda t: t.long(), r"kv_indices: is torch\.int64, expected torch\.int32"),
        ("kv_indices", lambda t: t[0], r"kv_indices: has shape .* expected"),
        ("kv_indices", lambda t: t[..., :31], r"kv_indices: has shape .* k 32"),
        ("kv_indices", lambda t: t[:, :, :3], r"kv_indices: has shape .* query_blocks 4"),
        ("kv_indices", lambda t: t[:, :2], r"kv_indices: has shape .* heads 1 or 4"),
        ("kv_indices", lambda t: t.mT.contiguous().mT, r"kv_indices: has stride 4 in its last dimension, expected 1"),
        ("kv_indices", lambda t: None, r"kv_indices: is missing"),
        (
            "kv_indices",
            lambda t: t.fill_(64),
            r"kv_indices: is 64 at batch 0, head 0, row 0, column 0; allowed: 0 to 63, and -1 after",
        ),
        ("kv_indices", lambda t: t.fill_(-2), r"kv_indices: is -2 at batch 0, head 0, row 0, column 0; allowed"),
        ("kv_indices", holed, "kv_indices: is -1 at batch 1, head 2, row 3, column 30, and block 0 follows"),
        ("scale", lambda _: -1.0, r"scale: is -1\.0"),
        ("sink", lambda _: torch.zeros(4), r"sink: is given, but the spec of l4_topk32 says sink: false"),
        ("mask", lambda _: None, r"mask: is not an argument of l4_topk32; allowed: kv_indices, scale, out, sink"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_wrong_with_an_argument(
    kernel: Any, is_first: bool, name: str, spoil: Callable[[Any], Any], message: str
) -> None:
    call, driver = kernel("l4_topk32")
    arguments = listed()
    if not is_first:
        call(**arguments, validate=True)
        driver.launches.clear()
    arguments[name] = spoil(arguments.get(name))
    with pytest.raises(ArgumentError, match=message):
        call(**arguments, validate=True)
    assert not driver.launches


def test_lists_are_given_once_and_no_more_than_there_are(kernel: Any) -> None:
    call, driver = kernel("l4_topk32")
    q, k, v, lists = listed().values()
    with pytest.raises(ArgumentError, match="kv_indices: is given twice"):
        call(q, k, v, lists, kv_indices=lists)
    with pytest.raises(ArgumentError, match="indices: 2 index tensors were given; this kernel takes: kv_indices"):
        call(q, k, v, lists, lists)
    call, other = kernel("l4_causal")
    with pytest.raises(ArgumentError, match="indices: 1 index tensors were given; this kernel takes: none"):
        call(q, k, v, lists)
    assert not driver.launches and not other.launches


def test_values_are_checked_only_on_request(kernel: Any) -> None:
    call, driver = kernel("l4_topk32")
    arguments = listed()
    arguments["kv_indices"].fill_(64)
    call(**arguments)
    with pytest.raises(ArgumentError, match="kv_indices: is 64"):
        call(**arguments, validate=True)
    assert len(driver.launches) == 1


def test_entries_behind_the_count_of_a_list_are_not_checked(kernel: Any) -> None:
    call, driver = kernel("h100_block_lists")
    q, k, v = qkv()
    counts, lists = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    lists[..., 1] = 99
    call(q, k, v, counts, lists, validate=True)
    assert field(call, driver.launches[-1][2], "kv_indices_length") == (2,)
    with pytest.raises(ArgumentError, match="kv_num_blocks: is 3 at batch 0, head 0, row 0; allowed: 0 to 2"):
        call(q, k, v, counts * 3, lists, validate=True)
    lists[..., 0] = 98
    counted = "allowed: 0 to 1 in the first kv_num_blocks entries"
    with pytest.raises(ArgumentError, match=f"kv_indices: is 98 at batch 0, head 0, row 0, column 0; {counted}"):
        call(q, k, v, counts, lists, validate=True)
    with pytest.raises(ArgumentError, match="full_kv_num_blocks and full_kv_indices: belong together"):
        call(q, k, v, counts, lists, counts)


def bits(*shape: int) -> Any:
    return torch.full(shape, -1, dtype=torch.int32)


def test_bits_lie_anywhere_and_are_described(kernel: Any) -> None:
    call, driver = kernel("h100_lists128_bits")
    q, k, v = qkv()
    counts, lists = torch.full((1, 2, 2), 2, dtype=torch.int32), torch.zeros(1, 2, 2, 2, dtype=torch.int32)
    wide = bits(1, 2, 2, 5, 600)
    for given, strides in (
        (wide[:, :, :, 1:4, 7:519], (0, 6000, 3000, 600)),
        (wide[:, :1, :, 1:3, :512], (0, 0, 3000, 600)),
        (bits(1, 1, 1, 3, 512).expand(1, 2, 2, -1, -1), (0, 0, 0, 512)),
        (bits(1, 1, 2, 0, 512), (0, 0, 512, 512)),
    ):
        call(q, k, v, counts, lists, mask_bits=given)
        found = [
            field(call, driver.launches[-1][2], f"mask_bits_{axis}_stride")[0] for axis in ("batch", "head", "row")
        ]
        entry = field(call, driver.launches[-1][2], "mask_bits_entry_stride")[0]
        assert (*found, entry) == strides
        assert field(call, driver.launches[-1][2], "mask_bits_length") == (given.shape[3],)
        assert field(call, driver.launches[-1][2], "mask_bits") == (given.data_ptr(),)
        assert field(call, driver.launches[-1][2], "full_kv_indices") == (0,)
    huge = torch.empty_strided((1, 2, 2, 2, 512), (0, 1 << 40, 1 << 35, 1 << 33, 1), dtype=torch.int32, device="meta")
    assert call._arguments._describe(call._indices[-1], huge, q.to("meta"), 0)["mask_bits_head_stride"] == 1 << 40


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            None,
            r"mask_bits: is missing: int32 \(batch 1, heads 1 or 2, query_blocks 2, entries of kv_indices, words 512\)",
        ),
        ([1, 2, 2, 2, 256], r"mask_bits: has shape \(1, 2, 2, 2, 256\), expected .*words 512"),
        ([1, 3, 2, 2, 512], r"mask_bits: has shape \(1, 3, 2, 2, 512\), expected .*heads 1 or 2"),
        ([1, 2, 1, 2, 512], r"mask_bits: has shape .*query_blocks 2"),
        ([1, 2, 2, 512], r"mask_bits: has shape \(1, 2, 2, 512\), expected"),
    ],
)
def test_bits_of_other_shapes_are_refused(kernel: Any, given: list[int] | None, message: str) -> None:
    call, driver = kernel("h100_lists128_bits")
    counts, lists = torch.ones(1, 2, 2, dtype=torch.int32), torch.zeros(1, 2, 2, 2, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=message):
        call(*qkv(), counts, lists, mask_bits=None if given is None else bits(*given))
    assert not driver.launches


def test_bits_of_another_type_or_apart_are_refused(kernel: Any) -> None:
    call, driver = kernel("h100_lists128_bits")
    counts, lists = torch.ones(1, 2, 2, dtype=torch.int32), torch.zeros(1, 2, 2, 2, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"mask_bits: is torch\.int64, expected torch\.int32"):
        call(*qkv(), counts, lists, mask_bits=bits(1, 2, 2, 2, 512).long())
    with pytest.raises(ArgumentError, match="mask_bits: has stride 2 in its last dimension, expected 1"):
        call(*qkv(), counts, lists, mask_bits=bits(1, 2, 2, 2, 1024)[..., ::2])
    assert not driver.launches


def test_each_counted_block_has_bits(kernel: Any) -> None:
    call, driver = kernel("h100_lists128_bits")
    counts, lists = torch.full((1, 2, 2), 2, dtype=torch.int32), torch.zeros(1, 2, 2, 4, dtype=torch.int32)
    call(*qkv(), counts, lists, mask_bits=bits(1, 1, 2, 2, 512), validate=True)
    with pytest.raises(ArgumentError, match="kv_num_blocks: is 2 at batch 0, head 0, row 0; allowed: 0 to 1"):
        call(*qkv(), counts, lists, mask_bits=bits(1, 1, 2, 1, 512), validate=True)
    assert len(driver.launches) == 1


def test_lists_may_be_shared_and_lie_anywhere(kernel: Any) -> None:
    call, driver = kernel("l4_topk32")
    q, k, v, _ = listed().values()
    lists = torch.zeros(2, 4, 5, 40, dtype=torch.int32)[:, :, :4, :32]
    for given, strides in ((lists, (800, 200, 40)), (lists[:1], (0, 200, 40)), (lists[:, :1], (800, 0, 40))):
        call(q, k, v, given)
        names = [f"kv_indices_{axis}_stride" for axis in ("batch", "head", "row")]
        assert tuple(field(call, driver.launches[-1][2], name)[0] for name in names) == strides


def prefixed(prefix_len: Any) -> dict[str, Any]:
    """Arguments of l4_prefix_lm with three batches of 300 keys."""
    q, k, v = (torch.zeros(3, 2, length, 128).half() for length in (256, 300, 300))
    return {"q": q, "k": k, "v": v, "prefix_len": prefix_len}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"prefix_len: is missing: int32 \(batch 1 or 3\)"),
        (7, r"prefix_len: is int, expected a torch\.Tensor"),
        (torch.zeros(3, dtype=torch.int32, device="meta"), "prefix_len: is on meta, q is on cpu"),
        (torch.zeros(3, dtype=torch.int64), r"prefix_len: is torch\.int64, expected torch\.int32"),
        (torch.zeros(2, dtype=torch.int32), r"prefix_len: has shape \(2,\), expected \(batch 1 or 3\)"),
        (torch.zeros(3, 1, dtype=torch.int32), r"prefix_len: has shape \(3, 1\), expected \(batch 1 or 3\)"),
        (torch.tensor([0, 301, 5], dtype=torch.int32), r"prefix_len: is 301 at batch 1; allowed: 0 to 300"),
        (torch.tensor([-1], dtype=torch.int32), r"prefix_len: is -1 at batch 0; allowed: 0 to 300"),
    ],
)
def test_what_is_wrong_with_the_value_of_each_batch(kernel: Any, given: Any, message: str) -> None:
    call, driver = kernel("l4_prefix_lm")
    with pytest.raises(ArgumentError, match=message):
        call(**prefixed(given), validate=True)
    assert not driver.launches


@pytest.mark.parametrize("name", ["l4_prefix_lm", "h100_prefix_lm"])
def test_the_value_of_each_batch_may_be_shared_and_lie_anywhere(kernel: Any, name: str) -> None:
    call, driver = kernel(name)
    lengths = torch.tensor([0, 9, 1, 9, 300, 9], dtype=torch.int32)
    for given, stride in ((lengths[:3], 1), (lengths[::2], 2), (lengths[4:5], 0), (lengths[:1].expand(3), 0)):
        call(**prefixed(given), validate=True)
        launched = driver.launches[-1][2]
        assert field(call, launched, "prefix_len") == (given.data_ptr(),)
        assert field(call, launched, "prefix_len_batch_stride") == (stride,)


@pytest.mark.parametrize("name", ["l4_causal", "h100_causal"])
def test_a_new_output_lies_as_the_kernel_writes_it(kernel: Any, name: str) -> None:
    call, driver = kernel(name)
    k, v = qkv()[:2]
    rows_first = torch.zeros(1, 256, 2, 128).half().transpose(1, 2)
    beside = torch.zeros(1, 256, 2, 256).half()[..., :128].transpose(1, 2)  # as a slice of a fused projection is
    for q, strides in ((rows_first, rows_first.stride()), (beside, (65536, 32768, 128, 1))):
        out = call(q, k, v)[0]
        assert out.stride() == strides
        if "o_map" not in call.compiled.plan.tensor_maps:
            (_, _, block) = driver.launches[-1]
            found = tuple(field(call, block, f"o_{axis}_stride")[0] for axis in ("batch", "head", "row"))
            assert found == (0, *strides[1:3])  # one batch
        else:
            (encoder,) = (each.encoder for each in list(call._signatures.values())[-1].maps if each.name == "o")
            assert encoder.strides == tuple(reversed(strides[:3]))


def test_the_result_is_written_where_the_caller_says(kernel: Any) -> None:
    call, driver = kernel("l4_causal")
    q, k, v = qkv()
    out = torch.zeros(1, 256, 2, 128).half().transpose(1, 2)
    assert call(q, k, v, out=out)[0] is out
    ((_, _, block),) = driver.launches
    assert field(call, block, "o") == (out.data_ptr(),) and field(call, block, "o_head_stride") == (128,)
    with torch.inference_mode():
        assert call(q, k, v, out=(of_inference := torch.empty_like(out)))[0] is of_inference


def test_what_a_kernel_has_written_over_is_not_differentiated_with(kernel: Any) -> None:
    call, _ = kernel("l4_causal")
    q, k, v = qkv()
    out, weights = torch.zeros_like(q), torch.ones_like(q).requires_grad_()
    product = weights * out  # keeps out for the gradient of the weights
    call(q, k, v, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.usefixtures("refused_gradients")
def test_a_tangent_is_refused_after_calls_without(kernel: Any) -> None:
    call, driver = kernel("h100_dense")
    q, k, v = qkv()
    with forward_ad.dual_level():
        call(q, k, v)
        with torch.no_grad(), pytest.raises(ArgumentError, match="v: has a tangent"):
            call(q, k, forward_ad.make_dual(v, v))
        call(q, k, v)
    call(q, k, v)
    assert len(driver.launches) == 3


@pytest.mark.usefixtures("refused_gradients")
def test_a_gradient_is_checked_after_calls_that_need_none(kernel: Any) -> None:
    call, driver = kernel("h100_dense")
    q, k, v = qkv()
    call(q, k, v)
    with pytest.raises(ArgumentError, match="v: requires a gradient"):
        call(q, k, v.requires_grad_())
    assert len(driver.launches) == 1


def test_a_call_is_checked_once_and_few_are_remembered(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "SIGNATURES_KEPT", 2)
    call, _ = kernel("h100_dense")
    checked, check = [], call._check
    call._check = lambda *given, **more: checked.append(given) or check(*given, **more)
    for length in (128, 128, 256, 384, 384):
        call(*qkv(length=length))
        assert len(call._signatures) <= 2
    assert len(checked) == 3


def test_maps_of_one_address_are_made_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(tensor_map, "_MAPS_KEPT", 2)
    monkeypatch.setattr(tensor_map.MapEncoder, "_encode", lambda self, address: made.append(address) or b"")
    encoder = tensor_map.MapEncoder("fp16", (), (), None)  # type: ignore[arg-type]
    for address in (16, 16, 32, 16, 48, 48):
        encoder.at(address)
        assert len(encoder.known) <= 2
    assert made == [16, 32, 48]


def test_a_map_that_cannot_be_made_is_not_taken_for_another(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call, driver = kernel("h100_dense")
    first, second = qkv(), qkv()

    def refuse(self: Any, address: int) -> bytes:
        if address == second[1].data_ptr():
            raise launch.DeviceError("no map")
        return struct.pack("<Q", address) * 16

    call(*first)
    with monkeypatch.context() as context:
        context.setattr(tensor_map.MapEncoder, "_encode", refuse)
        with pytest.raises(launch.DeviceError, match="no map"):
            call(*second)
        call(*first)
    call(*second)
    found = [tuple(field(call, block, f"{letter}_map")[0] for letter in "qkv") for *_, block in driver.launches]
    assert found == [tuple(t.data_ptr() for t in three) for three in (first, first, second)]


def test_heads_of_fewer_elements_are_told_to_the_kernel(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = find_spec("l4_dense").spec.model_dump(mode="json", by_alias=True) | {"pad_heads": True}
    packed = find_spec("h100_topk32_gqa8_b64").spec.model_dump(mode="json", by_alias=True)
    encoders: list[Any] = []
    made = tensor_map.MapEncoder
    monkeypatch.setattr(launch, "MapEncoder", lambda *given: encoders.append(made(*given)) or encoders[-1])
    for spec, heads in ((padded, 4), ("h100_dense", 4), (packed, 16)):
        call, driver = kernel(spec)
        for d in (8, 72, 128):
            q, k, v = (torch.zeros(2, 128, h, d).half().transpose(1, 2) for h in (heads, 2, 2))
            lists = [torch.zeros(1, 1, 2, 32).int()] if heads == 16 else []
            assert call(q, k, v, *lists).out.shape == q.shape
            block = driver.launches[-1][2]
            assert field(call, block, "scale_log2") == pytest.approx((math.log2(math.e) / math.sqrt(d),))
            if spec is padded:
                assert field(call, block, "head_chunks") == (d // 8,)
                assert field(call, block, "k_row_stride") == (2 * d,)
        maps = [encoder.dims for encoder in encoders]
        rows = (128, heads, 2) if heads == 4 else (8, 128, 2, 2)
        kv = (128, 2, 2)
        assert maps == ([] if spec is padded else [(d, *of) for d in (8, 72, 128) for of in (rows, kv, kv, rows)])
        encoders.clear()


@pytest.mark.parametrize(
    ("spec", "d", "message"),
    [
        ("h100_dense", 12, r"q: has shape .*12\), expected \(.*, head_dim 128 or a multiple of 8 below it\)$"),
        ("h100_dense", 136, r"q: has shape \(1, 2, 64, 136\), expected"),
        ("l4_dense", 64, r"head_dim 128\); kernels with pad_heads: true accept smaller values$"),
        ("l4_dense", 192, r"q_len, head_dim 128\)$"),
    ],
)
def test_heads_that_a_kernel_does_not_take(kernel: Any, spec: str, d: int, message: str) -> None:
    call, _ = kernel(spec)
    q = torch.zeros(1, 2, 64, d).half()
    with pytest.raises(ArgumentError, match=message):
        call(q, q, q)


def test_all_heads_are_of_one_size(kernel: Any) -> None:
    call, _ = kernel("h100_dense")
    q, other = torch.zeros(1, 2, 64, 64).half(), torch.zeros(1, 2, 64, 128).half()
    for given in ((q, other, q), (q, q, other)):
        with pytest.raises(ArgumentError, match=r"[kv]: has shape .* head_dim 64"):
            call(*given)


def test_more_tiles_than_can_be_numbered(kernel: Any) -> None:
    call, _ = kernel("h100_dense")
    queries = call.compiled.plan.tile_queries
    for batch in (2**15 - 1, 2**15):
        q, k = (torch.zeros(1, 1, n, 128).half().expand(batch, 2**16, n, 128) for n in (queries, 128))
        if batch < 2**15:
            assert call._check(q, k, k, indices=(), scale=None, out=None, sink=None, return_lse=True).grid == 132
            continue
        with pytest.raises(ArgumentError, match=rf"q: has shape .*: more than 2\^31 tiles of {queries} queries"):
            call(q, k, k)


def test_keys_and_values_that_tensor_maps_reach_may_lie_far_apart(kernel: Any) -> None:
    call, driver = kernel("h100_dense")
    q, k, v = qkv()
    far = torch.empty_strided(k.shape, (2**36, 2**35, 128, 1), dtype=torch.float16, device="meta")
    call(q, far, v)
    assert len(driver.launches) == 1


ATTENTION = [
    named for named in shipped_specs() if isinstance(named.spec, AttentionSpec) and named.spec.layout != "paged"
]


@for_each("named", lambda: ATTENTION, lambda named: named.stem)
def test_every_kernel_gets_all_that_it_takes(kernel: Any, monkeypatch: pytest.MonkeyPatch, named: Any) -> None:
    monkeypatch.setattr(attention, "check_sink", lambda *given: None)  # it is on the CPU
    call, driver = kernel(named.stem)
    spec, block = named.spec, named.spec.pattern.fixed_block
    packed, kv_heads, length = spec.pack_gqa, 2, 600
    q, k, v = (torch.zeros(1, h, length, spec.head_dim).half() for h in (2 * packed * kv_heads, kv_heads, kv_heads))
    q, k, v = (t.to(arguments.TORCH_DTYPES[spec.dtype]) for t in (q, k, v))
    (q, k, v), scales = as_given(spec, q, k, v)
    sizes: dict[Any, int] = {
        "batch": 1,
        "heads": 1,
        "query_blocks": 0 if not block else length // block.q + 3 if spec.layout == "varlen" else -(-length // block.q),
        "any": 3,
        "bounds": 4,
    }
    indices = [torch.zeros([sizes.get(n, n) for n in t.dims], dtype=torch.int32) for t in call.spec.index_tensors]
    sink = torch.zeros(q.shape[1]) if spec.sink else None
    out, aux = torch.zeros(q.shape, dtype=arguments.TORCH_DTYPES[call.compiled.plan.output]), looked_up(spec, q)
    numbers = numbers_for(spec.pattern, spec.pattern.example())
    found = call(q, k, v, *indices, out=out, sink=sink, aux=aux, **scales, **numbers)
    assert (found if not spec.lse else found[0]) is out
    *before, (grid, _, launched) = driver.launches
    assert [parameters for *_, parameters in before] == [launched] * (call.compiled.plan.prologue is not None)
    tile_queries, sequences = call.compiled.plan.tile_queries, 3 if spec.layout == "varlen" else 0
    tiles = length // tile_queries + sequences if sequences else -(-length // tile_queries)
    wanted: dict[str, Any] = {
        "q_len": length,
        "kv_len": length,
        "heads": 2 * kv_heads,
        "heads_per_kv_head": 2,
        "query_tiles": tiles,
        "tiles": 2 * kv_heads * tiles,
        "scale_log2": pytest.approx(math.log2(math.e) / math.sqrt(spec.head_dim)),
        **{t.name: tensor.data_ptr() for t, tensor in zip(call.spec.index_tensors, indices, strict=True)},
        **({"sink": sink.data_ptr()} if sink is not None else {}),
        **{f"aux_{name}": tensor.data_ptr() for name, tensor in aux.items()},
        **({"window_left": 2047, "window_right": 0} if numbers else {}),
        **({"sink_keys": 64} if "sink_keys" in numbers else {}),
    }
    names = {param.name for param in call.compiled.plan.params}
    assert {name: field(call, launched, name)[0] for name in wanted if name in names} == {
        name: value for name, value in wanted.items() if name in names
    }
    for name in names & {"q", "k", "v", "o", "lse", "sink", "scheduler", "progress", "query_order"}:
        assert field(call, launched, name)[0] != 0, name
    assert grid > 0 and call._loaded.slots(None) == 132 * call.compiled.plan.ctas_per_sm


PACKED_GRADIENTS = [
    named
    for named in shipped_specs()
    if isinstance(named.spec, AttentionBackwardSpec) and named.spec.layout == "varlen"
]


@for_each("named", lambda: PACKED_GRADIENTS, lambda named: named.stem)
@pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "out and lse"])
def test_every_kernel_of_gradients_of_packed_sequences_gets_all_that_it_takes(
    kernel: Any, named: Any, with_dlse: bool
) -> None:
    call, driver = kernel(named.stem)
    spec, plan, sequences = named.spec, call.compiled.plan, 3
    dtype = arguments.TORCH_DTYPES[spec.dtype]

    def tensor(tokens: int, heads: int) -> Any:
        return torch.zeros(tokens, heads, spec.head_dim, dtype=dtype).transpose(0, 1)[None]

    q, k, v = tensor(600, 4), tensor(500, 2), tensor(500, 2)
    out, dout, lse = tensor(600, 4), tensor(600, 4), torch.zeros(1, 4, 600)
    lists = spec.pattern.fixed_block
    sizes: dict[Any, int] = {"batch": 1, "heads": 1, "any": 3, "bounds": sequences + 1}
    sizes["query_blocks"] = 600 // lists.q + sequences if lists else 0
    indices = [torch.zeros([sizes[n] for n in t.dims], dtype=torch.int32) for t in spec.forward.index_tensors]
    bounds = indices[-2:]
    dlse = torch.zeros(1, 4, 600) if with_dlse else None
    numbers = numbers_for(spec.pattern, spec.pattern.example())
    found = call(q, k, v, *indices, out=out, dout=dout, lse=lse, dlse=dlse, **numbers)
    whole = spec.gradients == "dq_dkdv"
    assert len(driver.launches) == (3 if whole else 2)
    launched = {parameters for *_, parameters in driver.launches}
    assert len(launched) == 1
    (block,) = launched
    own, tokens, heads = ("query", 600, 4) if spec.by_queries else ("key", 500, 2)
    rows = spec.tile.m if spec.by_queries else spec.tile.n
    tiles = tokens // rows + sequences + 2
    apart = 2 if plan.grid_summary.startswith("two") else 1  # dK and dV of wide heads by mma.sync
    assert driver.launches[1][0] == tiles * heads * apart
    wanted: dict[str, Any] = {
        "q_len": 600,
        "kv_len": 500,
        "sequences": sequences,
        f"{own}_tiles": tiles,
        "padded_q_len": (600 // 128 + 2 * (sequences + 2)) * 128,
        "heads": 4,
        "heads_per_kv_head": 2,
        "cu_seqlens_q": bounds[0].data_ptr(),
        "cu_seqlens_k": bounds[1].data_ptr(),
        "lse": lse.data_ptr(),
        "dlse": 0 if dlse is None else dlse.data_ptr(),
        "stats": found.stats.data_ptr(),
        "out": out.data_ptr(),
        "dout": dout.data_ptr(),
        "out_row_stride": 4 * spec.head_dim,
        "out_head_stride": spec.head_dim,
        "head_chunks": spec.head_dim // 8,
        **{name: t.data_ptr() for name, t in (("dq", found.dq), ("dk", found.dk), ("dv", found.dv)) if t is not None},
    }
    assert {name: field(call, block, name)[0] for name in wanted} == wanted
    assert found.stats.shape == (1, 4, wanted["padded_q_len"], 2)
    for gradient, like in ((found.dq, q), (found.dk, k), (found.dv, v)):
        assert gradient is None or (gradient.shape == like.shape and gradient[0].transpose(0, 1).is_contiguous())
    if whole:
        steps = 600 // spec.tile.m + sequences + 2
        assert field(call, block, "query_steps") == (steps,) and driver.launches[2][0] == 4 * steps
    if whole and spec.deterministic:
        assert all(field(call, block, f"rising_{name}")[0] for name in "qk")
    # Another kernel takes the statistics, and makes none; all but the one whose prologue writes the bounds.
    driver.launches.clear()
    call(q, k, v, *indices, out=out, dout=dout, lse=lse, dlse=dlse, stats=found.stats, **numbers)
    transposes = lists is not None and not spec.by_queries  # the prologue does, with statistics or without
    assert len(driver.launches) == (1 + transposes + whole + (whole and spec.deterministic))


def test_packed_sequences_in_one_tensor_with_others_have_contiguous_results(kernel: Any) -> None:
    qkv = torch.zeros(600, 3, 4, 128, dtype=torch.float16)
    q, k, v = (t.transpose(0, 1)[None] for t in qkv.unbind(1))
    bounds = torch.zeros(4, dtype=torch.int32)
    forward, _ = kernel("h100_varlen_causal")
    out, lse = forward(q, k, v, bounds, bounds)
    assert out[0].transpose(0, 1).is_contiguous()
    for name in ("h100_varlen_causal_dq", "h100_varlen_causal_dkdv", "h100_varlen_causal_dq_dkdv"):
        backward, _ = kernel(name)
        found = backward(q, k, v, bounds, bounds, out=out, dout=out, lse=lse)
        assert all(t is None or t[0].transpose(0, 1).is_contiguous() for t in found[:3])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}, r"^cu_seqlens_k: has 3 entries, cu_seqlens_q has 4"),
        ({"cu_seqlens_q": torch.zeros(4)}, r"^cu_seqlens_q: is torch.float32, expected torch.int32"),
        ({"q": torch.zeros(2, 4, 600, 128, dtype=torch.float16)}, r"^k: has shape"),
        ({"dlse": torch.zeros(1, 600, 4).transpose(1, 2)}, r"^dlse: has strides \(2400, 1, 4\), expected a contiguous"),
        ({"lse": torch.zeros(1, 4, 599)}, r"^lse: "),
    ],
)
def test_bad_rows_and_bounds_of_packed_sequences_are_named(kernel: Any, changes: dict[str, Any], says: str) -> None:
    call, driver = kernel("h100_varlen_causal_dq")
    q, bounds = torch.zeros(1, 4, 600, 128, dtype=torch.float16), torch.zeros(4, dtype=torch.int32)
    given = {"q": q, "k": q, "v": q, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "out": q, "dout": q}
    given |= {"lse": torch.zeros(1, 4, 600), **changes}
    positional = [given.pop(name) for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    with pytest.raises(ArgumentError, match=says):
        call(*positional, **given)
    assert not driver.launches


def as_given(spec: Any, q: Any, k: Any, v: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return q, k and v as a kernel takes them, and the scales of FP8 inputs."""
    if spec.dtype not in FP8:
        return [q, k, v], {}
    given = quantize(q.float(), k.float(), v.float(), spec.dtype, q_rows=spec.scale_rows.q, k_rows=spec.scale_rows.k)
    return [given.q, given.k, given.v_t], given.scales()


def looked_up(spec: Any, q: Any) -> dict[str, Any]:
    """Return the tensors of a spec's expressions, for as many keys as queries."""
    sizes = {"batch": q.shape[0], "heads": q.shape[1], "q_len": q.shape[2], "kv_len": q.shape[2]}
    return draw_aux(spec.aux_tensors, sizes, torch.Generator(), q.device)


LISTED = [named for named in ATTENTION if named.spec.pattern.fixed_block is not None and named.spec.layout == "padded"]


def listing(call: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return q, k and v, and lists of blocks 1 and 0 or the first of them alone, in two batches and two heads."""
    spec, block = call.spec, call.spec.pattern.fixed_block
    q, k, v = (torch.zeros(2, h, 256, spec.head_dim).half() for h in (2 * spec.pack_gqa, 2, 2))
    q, k, v = (t.to(arguments.TORCH_DTYPES[spec.dtype]) for t in (q, k, v))
    sizes = {"batch": 2, "heads": 2, "query_blocks": -(-256 // block.q), "any": 4}
    indices = {t.name: torch.full([sizes.get(n, n) for n in t.dims], -1).int() for t in spec.index_tensors}
    for name, tensor in indices.items():
        if name == "query_order":
            tensor.copy_(torch.arange(tensor.shape[2]))
        elif name.endswith("num_blocks"):
            tensor.fill_(2)
        else:
            tensor[..., :2] = torch.tensor([1, 0])
    given, scales = as_given(spec, q, k, v)
    return given, {**indices, "aux": looked_up(spec, q), **scales}


@pytest.mark.parametrize("named", LISTED, ids=lambda named: named.stem)
def test_lists_are_padded_at_their_end_and_nowhere_else(kernel: Any, named: Any) -> None:
    call, driver = kernel(named.stem)
    tensors, indices = listing(call)
    call(*tensors, **indices, validate=True)
    assert driver.launches
    driver.launches.clear()
    counted = "kv_num_blocks" in indices
    for name in indices.keys() & {"kv_indices", "full_kv_indices"}:
        lists = indices[name]
        lists[1, 1, 1, 0] = -1
        why = r"; allowed: 0 to \d in the first \w+ entries" if counted else ", and block 0 follows: -1 may only pad"
        with pytest.raises(ArgumentError, match=f"^{name}: is -1 at batch 1, head 1, row 1, column 0{why}"):
            call(*tensors, **indices, validate=True)
        lists[1, 1, 1] = -1  # an empty list
        if counted:
            indices[f"{name.removesuffix('indices')}num_blocks"][1, 1, 1] = 0
        lists[0, 1, 0, 1] = 1 << 20
        with pytest.raises(ArgumentError, match=f"^{name}: is 1048576 at batch 0, head 1, row 0, column 1; allowed: 0"):
            call(*tensors, **indices, validate=True)
        lists[0, 1, 0, 1] = 0
    assert not driver.launches
    call(*tensors, **indices, validate=True)
    assert driver.launches


def test_a_prologue_by_itself_gets_its_addresses_and_nothing_else() -> None:
    loaded, driver = loaded_kernel(plan_for(find_spec("h100_bsr_spmm_b16_gathered")))
    given = {"a": 2**40, "rounds": 48, "entries": 64, "packets": 80}
    loaded.launch_prologue(None, 5, given, 7)  # type: ignore[arg-type]
    ((grid, stream, block),) = driver.launches
    expected = bytearray(loaded.layout.size)
    for name, address in given.items():
        struct.pack_into("<Q", expected, loaded.layout.offsets[name], address)
    assert (grid, stream, block) == (5, 7, bytes(expected))


@pytest.mark.parametrize("prologue", [True, False])
def test_a_prologue_is_left_out_where_it_has_run(monkeypatch: pytest.MonkeyPatch, prologue: bool) -> None:
    monkeypatch.setattr(tensor_map.MapEncoder, "_encode", lambda self, address: bytes(128))
    plan = plan_for(find_spec("h100_bsr_spmm_b16_gathered"))
    loaded, driver = loaded_kernel(plan)
    numbers = {param.name: 1 for param in plan.params if param.type == "i32"}
    shapes = {name.removesuffix("_map"): ((8, 8, 8), (64, 8, 1)) for name in plan.tensor_maps}
    signature = loaded.signature(None, 4, numbers, shapes, prologue_grid=9)  # type: ignore[arg-type]
    addresses = {param.name.removesuffix("_map"): 16 for param in plan.params}
    loaded.launch(signature, addresses, 7, prologue=prologue)
    assert [grid for grid, *_ in driver.launches] == [9] * prologue + [4]


def test_every_tensor_is_checked(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(attention, "check_tensor", lambda *given: checked.append(given))
    call, _ = kernel("l4_topk32")
    arguments = {**listed(), "out": torch.zeros(2, 4, 256, 128).half()}
    call(**arguments)
    device = torch.device("cpu")
    assert [(name, tensor is arguments[name]) for name, tensor, *_ in checked] == [(x, True) for x in (*"qkv", "out")]
    assert [rest for _, _, *rest in checked] == [[torch.float16, 4], *[[torch.float16, 4, device]] * 3]


def test_a_kernel_without_lse_returns_none_in_its_place(kernel: Any) -> None:
    call, driver = kernel({**find_spec("l4_causal").spec.model_dump(mode="json", by_alias=True), "lse": False})
    q, k, v = qkv()
    result = call(q, k, v)
    assert isinstance(result, attention.AttentionResult) and result.lse is None
    assert result.out.shape == q.shape and len(driver.launches) == 1
    assert call(q, k, v, return_lse=False).lse is None and len(call._signatures) == 1
    with pytest.raises(ArgumentError, match=r"^return_lse: is True, but the spec of \w+ says lse: false$"):
        call(q, k, v, return_lse=True)
    assert len(driver.launches) == 2


@pytest.mark.parametrize("name", ["h100_causal", "h100_topk32", "l4_causal", "l4_dense_wmma"])
def test_an_lse_is_computed_where_the_call_asks_for_it(kernel: Any, name: str) -> None:
    call, driver = kernel(name)
    q, k, v = qkv()
    rows = 256 // call.spec.pattern.fixed_block.q if call.spec.pattern.fixed_block else 0
    lists = [torch.zeros(1, 1, rows, 32).int()] if call.spec.pattern.lists else []
    kept = [call(q, k, v, *lists, return_lse=flag) for flag in (None, True, False, True, False)]
    assert [found.lse is None for found in kept] == [False, False, True, False, True]
    assert len(call._signatures) == 2
    for (_, _, block), found in zip(driver.launches, kept, strict=True):
        assert field(call, block, "lse") == (0 if found.lse is None else found.lse.data_ptr(),)
    for value in (0, 1, "yes", torch.tensor(True)):
        with pytest.raises(ArgumentError, match=r"^return_lse: is .*, expected True or False$"):
            call(q, k, v, *lists, return_lse=value)


def test_prepared_lists_are_launched_as_what_they_stand_for(kernel: Any) -> None:
    call, driver = kernel("h100_topk32_b64_ordered")
    q, k, v = qkv()
    lists, order = torch.zeros(1, 2, 4, 32).int(), torch.arange(4).int().repeat(1, 2, 1)
    prepared = PreparedLists(lists, order)
    for given, named in (((lists, order), {}), ((prepared,), {}), ((), {"kv_indices": prepared})):
        out = torch.zeros_like(q)
        result = call(q, k, v, *given, **named, out=out)
        assert result.out is out and result.lse is not None
    assert len(call._signatures) == 1
    for _, _, block in driver.launches:
        assert field(call, block, "kv_indices") == (lists.data_ptr(),)
        assert field(call, block, "query_order") == (order.data_ptr(),)


@pytest.mark.parametrize(
    "name", ["h100_topk", "h100_topk32", "h100_topk_b64", "h100_topk32_b64_ordered", "l4_topk_d192"]
)
def test_lists_are_prepared_for_kernels_of_one_length_and_of_any(kernel: Any, name: str) -> None:
    call, driver = kernel(name)
    spec, k = call.spec, 32
    lists = torch.zeros(1, 2, -(-256 // spec.pattern.fixed_block.q), k, dtype=torch.int32)
    qkv = [torch.zeros(1, 2, 256, spec.head_dim, dtype=torch.float16) for _ in range(3)]
    call(*qkv, call.prepare(lists, kv_len=256))
    assert len(driver.launches) == 1
    if spec.pattern.k is not None:
        with pytest.raises(ArgumentError, match=rf"^kv_indices: has shape \(1, 2, \d, {k - 1}\), .*k {k}\)"):
            call.prepare(lists[..., 1:], kv_len=256)


def test_only_lists_of_one_entry_may_have_any_last_stride(kernel: Any) -> None:
    call, driver = kernel("h100_block_lists")
    q, k, v = qkv()
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    call(q, k, v, counts, torch.zeros(64, dtype=torch.int32).as_strided((1, 1, 2, 1), (16, 16, 8, 2)))
    with pytest.raises(ArgumentError, match="kv_indices: has stride 2 in its last dimension, expected 1"):
        call(q, k, v, counts, torch.zeros(1, 1, 2, 4, dtype=torch.int32)[..., ::2])
    assert len(driver.launches) == 1


@pytest.mark.parametrize("name", ["h100_topk32", "h100_causal", "h100_topk32_b64_shared_long"])
def test_memory_of_a_launch_is_held_until_it_is_enqueued(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In a capture nothing else holds it, and freed memory is allocated again at once."""
    made: list[Any] = []

    def make(*given: Any) -> Any:
        tensor = torch.zeros(max(given[-1], 1), dtype=torch.int32)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(workspace, "counters", make)
    monkeypatch.setattr(workspace, "scratch", make)
    call, _ = kernel(name)
    alive: list[bool] = []
    launch_it = call._loaded.launch
    call._loaded.launch = lambda *given, **more: (
        alive.extend(each() is not None for each in made),
        launch_it(*given, **more),
    )
    q, k, v = qkv(length=128)
    lists = [torch.zeros(1, 1, 128 // call.spec.pattern.fixed_block.q, 32).int()] if "topk" in name else []
    call(q, k, v, *lists)
    assert alive and all(alive)


@pytest.fixture
def front_end(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``block_sparse_attention`` calls kernels of CPU tensors."""
    oracle_kernel.install(monkeypatch)
    monkeypatch.setattr(
        attention_calls,
        "_kernel_of",
        lambda shape_class, device: kernel(attention_choice.chosen(shape_class).spec)[0],
    )


@cache
def place_of(file: str) -> str:
    """A file of ``codegen`` or ``runtime`` relative to the project; otherwise empty."""
    path = Path(file)
    is_ours = any(path.is_relative_to(PROJECT / folder) for folder in ("codegen", "runtime"))
    return path.relative_to(PROJECT).as_posix() if is_ours else ""


def entered_by(call: Callable[[], Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """File, name and arguments of each function of ``codegen`` and ``runtime`` that a call enters."""
    seen = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and (place := place_of(frame.f_code.co_filename)):
            seen.append((place, frame.f_code.co_name, dict(frame.f_locals)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


CHECKS_OF_OPERANDS = {"check_strides", "check_output", "check_keys", "check_sizes", "check_head_dim"}


@pytest.mark.usefixtures("front_end")
def test_operands_of_a_first_call_are_checked_once() -> None:
    q, k, v = qkv()
    out = torch.empty_like(q)
    block_sparse_attention(q, k, v, Dense(), scale=0.25)  # chooses the kernel, which takes seconds if it is watched
    first, again = (
        Counter(
            (name, local.get("name", ""))
            for _, name, local in entered_by(lambda: block_sparse_attention(q, k, v, Dense(), scale=0.25, out=out))
            if name in CHECKS_OF_OPERANDS
        )
        for _ in range(2)
    )
    names = [("check_strides", name) for name in ("q", "k", "v", "out")]
    assert set(first.values()) == {1} and first.keys() >= {*names, ("check_keys", ""), ("check_output", "out")}
    assert not again


@pytest.mark.usefixtures("front_end")
def test_other_strides_than_in_the_first_call_are_checked_by_the_kernel() -> None:
    q, k, v = qkv()
    block_sparse_attention(q, k, v, Dense())
    wide = torch.empty(*q.shape[:3], q.shape[3] + 1, dtype=q.dtype)[..., :-1]
    with pytest.raises(ArgumentError, match="v: has stride 129 in dimension 2"):
        block_sparse_attention(q, k, wide, Dense())


@pytest.mark.usefixtures("front_end")
@pytest.mark.parametrize(
    "score", [None, Score("score + slope[head]", aux={"slope": torch.zeros(2)})], ids=["", "score"]
)
def test_a_repeated_call_runs_through_few_files(score: Any) -> None:
    q, k, v = qkv()
    pattern = Causal()

    def call() -> None:
        block_sparse_attention(q, k, v, pattern, score=score)

    call()
    files = {file for file, *_ in entered_by(call)}
    files -= {"runtime/driver/tensor_map.py"}  # which makes the maps of new addresses
    assert 0 < len(files) <= 12, sorted(files)


@pytest.mark.parametrize("name", ["h100_window", "l4_window", "h100_sink_window", "l4_sink_window_d96"])
def test_a_call_decides_about_the_window(kernel: Any, name: str) -> None:
    call, driver = kernel(name)
    d, sinks = call.spec.head_dim, call.spec.pattern.kind == "sink_window"
    q, k, v = (torch.randn(1, 2, 256, d).to(arguments.TORCH_DTYPES[call.spec.dtype]) for _ in range(3))
    windows = [(0, 0), (100, 0), (100, 7), (1 << 24, 1 << 24), (100, 7)]
    for window in windows:
        call(q, k, v, window=window, **({"sink_keys": 64} if sinks else {}))
    found = [
        tuple(field(call, block, f"window_{side}")[0] for side in ("left", "right")) for *_, block in driver.launches
    ]
    assert found == windows and len(call._signatures) == 4
    if sinks:
        call(q, k, v, window=(100, 7), sink_keys=0)
        assert [field(call, driver.launches[i][2], "sink_keys") for i in (4, 5)] == [(64,), (0,)]
        assert len(call._signatures) == 5


def test_units_of_a_divided_tile_follow_the_window(kernel: Any) -> None:
    call, driver = kernel("h100_window")
    fixed = {**call.spec.model_dump(mode="json", by_alias=True), "pattern": {"kind": "sliding_window"}}
    q, k, v = qkv(heads=33, length=4096)
    for left, right in ((0, 0), (700, 9), (9000, 9000)):
        call(q, k, v, window=(left, right))
        numbers = {"left": left, "right": right}
        same, its_driver = kernel({**fixed, "pattern": {"kind": "sliding_window", **numbers}})
        same(q, k, v)
        for name in ("units", "stream_k_tiles", "stream_k_ctas"):
            assert field(call, driver.launches[-1][2], name) == field(same, its_driver.launches[-1][2], name), name
        assert driver.launches[-1][0] == its_driver.launches[-1][0]


@pytest.mark.parametrize("which", ["dq", "dkdv"])
def test_gradients_take_the_window_of_the_forward(kernel: Any, which: str) -> None:
    call, driver = kernel(f"h100_window_{which}_bf16")
    q, k, v = (t.bfloat16() for t in qkv())
    rows = {"out": torch.randn_like(q), "dout": torch.randn_like(q), "lse": torch.randn(1, 2, 256)}
    for window in ((5, 6), (7, 0)):
        call(q, k, v, **rows, window=window)
        block = driver.launches[-1][2]
        assert (field(call, block, "window_left") + field(call, block, "window_right")) == window
    with pytest.raises(ArgumentError, match=r"^window: is missing, expected \(left, right\)"):
        call(q, k, v, **rows)


WINDOW = r"expected \(left, right\): keys before and after the query's own position, each 0 to 16777216$"
SINKS = r"expected the number of initial keys that every later query sees, 0 to 16777216$"


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("h100_window", {}, f"window: is missing, {WINDOW}"),
        ("h100_window", {"window": 5}, f"window: is 5, {WINDOW}"),
        ("h100_window", {"window": (5,)}, rf"window: is \(5,\), {WINDOW}"),
        ("h100_window", {"window": (5, 6, 7)}, rf"window: is \(5, 6, 7\), {WINDOW}"),
        ("h100_window", {"window": (-1, 0)}, rf"window: is \(-1, 0\), {WINDOW}"),
        ("h100_window", {"window": (0, (1 << 24) + 1)}, rf"window: is \(0, 16777217\), {WINDOW}"),
        ("h100_window", {"window": (True, 0)}, rf"window: is \(True, 0\), {WINDOW}"),
        ("h100_window", {"window": (1.0, 0)}, rf"window: is \(1.0, 0\), {WINDOW}"),
        ("h100_window", {"window": "ab"}, f"window: is 'ab', {WINDOW}"),
        ("h100_window", {"window": (1, 0), "sink_keys": 4}, "sink_keys: is 4, but h100_window takes none: its pattern"),
        ("h100_sink_window", {"window": (1, 0)}, f"sink_keys: is missing, {SINKS}"),
        ("h100_sink_window", {"window": (1, 0), "sink_keys": -4}, f"sink_keys: is -4, {SINKS}"),
        ("h100_sink_window", {"window": (1, 0), "sink_keys": True}, f"sink_keys: is True, {SINKS}"),
        ("h100_sink_window", {"sink_keys": 4}, f"window: is missing, {WINDOW}"),
        ("h100_window2k", {"window": (2047, 0)}, r"window: is \(2047, 0\), but h100_window2k takes none: its spec has"),
        (
            "h100_causal",
            {"window": (5, 0)},
            r"window: is \(5, 0\), but h100_causal takes none: its pattern has no such",
        ),
    ],
)
def test_numbers_of_a_pattern_that_are_refused(kernel: Any, name: str, given: Any, says: str) -> None:
    call, driver = kernel(name)
    with pytest.raises(ArgumentError, match=f"^{says}"):
        call(*qkv(), **given)
    assert not driver.launches
