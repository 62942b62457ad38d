"""What a call hands to the driver, with a driver that only looks: numbers, addresses, tensor maps, signatures."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.library import find_spec
from codegen.plans import plan_for

torch = pytest.importorskip("torch")

from runtime import attention, launch, workspace  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402


class Driver:
    """Stands for cuLaunchKernel; keeps the parameter block of each launch, as the driver copies it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.launches: list[tuple[int, int, bytes]] = []

    def __call__(self, function: int, grid: int, *rest: Any) -> tuple[int]:
        *_, stream, arguments, _ = rest
        block = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        self.launches.append((grid, stream, ctypes.string_at(block, self.size)))
        return (0,)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[attention.AttentionKernel, Driver]]:
    """Makes kernels that take CPU tensors and are launched by a Driver on stream 7."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of the CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(attention, "check_tensor", lambda *arguments: None)
    monkeypatch.setattr(launch, "make_context_current", lambda device: None)
    monkeypatch.setattr(launch.MapEncoder, "_encode", lambda self, address: struct.pack("<Q", address) * 16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(workspace, "_counters", {})
    monkeypatch.setattr(workspace, "_scratch", {})

    def make(name: str) -> tuple[attention.AttentionKernel, Driver]:
        named = find_spec(name)
        plan = plan_for(named)
        loaded = launch.LoadedKernel.__new__(launch.LoadedKernel)
        loaded.plan, loaded.layout = plan, launch.ParameterLayout.of(plan.params)
        driver = Driver(loaded.layout.size)
        loaded._function, loaded._launch, loaded._sm_counts = 0, driver, {None: 132}  # type: ignore[dict-item]
        return attention.AttentionKernel(SimpleNamespace(named=named, plan=plan), loaded), driver  # type: ignore[arg-type]

    return make


def qkv(heads: int = 2, length: int = 256) -> list[Any]:
    return [torch.randn(1, heads, length, 128, dtype=torch.float16) for _ in range(3)]


def field(kernel: attention.AttentionKernel, block: bytes, name: str) -> Any:
    layout = kernel._loaded.layout
    size, _, code = launch._ABI[layout.types[name]]
    offset = layout.offsets[name]
    return struct.unpack("<16Q" if layout.types[name] == "tensor_map" else code, block[offset : offset + size])


@pytest.mark.parametrize("name", ["h100_dense", "h100_topk32", "h100_block_lists", "l4_causal", "l4_topk32"])
def test_each_launch_has_the_numbers_and_addresses_of_its_call(kernel: Any, name: str) -> None:
    call, driver = kernel(name)
    shapes = {"kv_indices": (1, 2, -1, 32), "kv_num_blocks": (1, 2, -1)}
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


def test_tiles_of_a_last_round_are_divided(kernel: Any) -> None:
    call, driver = kernel("h100_topk32")
    q, k, v = qkv()
    lists = torch.zeros(1, 2, 2, 32, dtype=torch.int32)
    call(q, k, v, lists)
    plan, ((grid, stream, block),) = call.compiled.plan, driver.launches
    # 2 heads x 2 tiles of 32 listed blocks each, for 132 thread blocks.
    divided = plan.split.divide(4, 32, 132)
    assert divided == (field(call, block, "split_tiles")[0], field(call, block, "split_blocks")[0])
    assert field(call, block, "shares") == (32,) and field(call, block, "tiles") == (4,)
    assert grid == divided[1] > 4
    counters, part_bytes = plan.split.workspace(*divided)
    kept = workspace._counters[None, stream], workspace._scratch[None, stream]  # type: ignore[index]
    assert kept[0].numel() >= counters and kept[1].numel() >= part_bytes
    assert field(call, block, "shares_done") == (kept[0].data_ptr(),)
    assert field(call, block, "parts") == (kept[1].data_ptr(),)


def test_a_call_that_fills_its_rounds_takes_no_memory(kernel: Any) -> None:
    call, driver = kernel("h100_topk32")
    q, k, v = qkv(heads=66)
    call(q, k, v, torch.zeros(1, 1, 2, 32, dtype=torch.int32))
    ((grid, _, block),) = driver.launches
    assert grid == 132
    for name in ("split_tiles", "split_blocks", "parts", "shares_done"):
        assert field(call, block, name) == (0,), name
    assert not workspace._counters and not workspace._scratch


def test_shares_are_those_of_the_problem(kernel: Any) -> None:
    for name, length, shares in (("h100_dense", 1000, 13), ("h100_window2k", 1000, 13), ("h100_window2k", 9000, 29)):
        call, driver = kernel(name)
        call(*qkv(length=length))
        ((_, _, block),) = driver.launches
        assert field(call, block, "shares") == (shares,), name


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


def test_a_gradient_is_checked_again_after_calls_without(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, tensor: Any, *rest: Any) -> None:
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ArgumentError(name, "requires a gradient")

    monkeypatch.setattr(attention, "check_tensor", refuse)
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
    with pytest.raises(ArgumentError, match=rf"{name}: extends over \d+ bytes, this kernel reaches 68719476736"):
        call(**tensors)
    assert not driver.launches


def test_a_failed_launch_raises_and_the_next_one_works(kernel: Any) -> None:
    call, driver = kernel("h100_dense")
    q, k, v = qkv()
    call._loaded._launch = lambda *arguments: (700,)
    with pytest.raises(launch.DeviceError, match="launch of h100_dense failed: 700"):
        call(q, k, v)
    call._loaded._launch = driver
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
