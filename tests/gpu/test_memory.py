"""Memory of calls: the stream of every block, code that leaves the driver, and sizes that stay the same."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime import (  # noqa: E402
    block_sparse_attention,
    block_sparse_attention_fp8,
    bsr_matmul,
    create_block_mask,
    load_kernel,
    quantize_attention,
    select_topk_blocks,
)
from runtime.driver import library, streams, workspace  # noqa: E402
from runtime.patterns import Dense, SlidingWindow, TopK  # noqa: E402

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs sm_90")
MIB = 1 << 20


def operands(length: int = 512, heads: int = 2, *, gradients: bool = False) -> list[Any]:
    made = [torch.randn(1, heads, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    return [tensor.requires_grad_(gradients) for tensor in made]


def gradient(length: int) -> tuple[Any, ...]:
    q, k, v = operands(length, gradients=True)
    return torch.autograd.grad(block_sparse_attention(q, k, v, Dense()).float().sum(), (q, k, v))


def product(length: int) -> Any:
    mask = torch.eye(length // 32, device="cuda").repeat_interleave(32, 0).repeat_interleave(32, 1).bfloat16()
    return bsr_matmul(mask.to_sparse_bsr((32, 32)), torch.randn(length, 200, device="cuda", dtype=torch.bfloat16))


def selection(length: int) -> Any:
    q, k, v = operands(length)
    return block_sparse_attention(q, k, v, TopK(select_topk_blocks(q, k, (64, 64), 4, causal=False), block=(64, 64)))


CALLS: dict[str, Callable[[int], Any]] = {
    "attention": lambda length: block_sparse_attention(*operands(length), SlidingWindow(100)),
    "gradients": gradient,
    "products": product,
    "selection": selection,
    "masks": lambda length: create_block_mask(lambda b, h, q, k: q >= k, 1, 1, length, length),
    "quantized": lambda length: block_sparse_attention_fp8(quantize_attention(*operands(length)), Dense()),
}


@contextmanager
def external_stream() -> Iterator[Any]:
    """A stream that torch did not make, destroyed at the end."""
    from cuda.bindings import runtime as cuda

    _, stream = cuda.cudaStreamCreateWithFlags(1)  # non-blocking
    try:
        yield torch.cuda.ExternalStream(int(stream))
    finally:
        cuda.cudaStreamDestroy(stream)


@contextmanager
def blocks() -> Iterator[list[Any]]:
    """Every block of memory that torch hands out meanwhile, in any thread."""
    found: list[Any] = []
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        yield found
        (trace,) = torch.cuda.memory._snapshot()["device_traces"][:1]
        found += [event for event in trace if event["action"] == "alloc"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["default", "pool", "external"])
def test_every_block_is_of_the_stream_of_the_call(name: str, kind: str) -> None:
    """Also those that are kept, and those of larger calls, which replace them."""
    with external_stream() as external:
        stream = {"default": torch.cuda.default_stream(), "pool": torch.cuda.Stream(), "external": external}[kind]
        with torch.cuda.stream(stream), blocks() as found:
            for length in (512, 4096):
                CALLS[name](length)
            stream.synchronize()
    assert found and {event["stream"] for event in found} == {stream.cuda_stream}


def test_torch_numbers_its_own_streams_apart_from_those_of_others() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    known = streams._lasting.copy()
    streams._lasting.clear()
    with external_stream() as external:
        made = [torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(40)]
        for stream in (torch.cuda.default_stream(), *made, external, torch.cuda.ExternalStream(2)):
            with torch.cuda.stream(stream):
                lasting = streams.is_lasting(device, streams.current_stream(device))
            assert lasting is (stream not in (external, torch.cuda.ExternalStream(2)))
    assert len(streams._lasting) == 65
    streams._lasting.update(known)


def test_streams_that_come_and_go_leave_nothing() -> None:
    """The next stream often has the handle of the last one, which may still be at work."""
    right = gradient_of_ones(1024)
    kept, size = set(workspace._counters), 0
    for turn in range(60):
        with external_stream() as stream:
            with torch.cuda.stream(stream):
                found = gradient_of_ones(1024)
            if turn % 3 == 0:
                stream.synchronize()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, right))
        del found
        torch.cuda.empty_cache()
        size = size or torch.cuda.memory_allocated()
    assert set(workspace._counters) == kept and torch.cuda.memory_allocated() <= size


def gradient_of_ones(length: int) -> list[Any]:
    torch.manual_seed(0)
    q, k, v = operands(length, gradients=True)
    out = block_sparse_attention(q, k, v, Dense())
    return list(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))


def test_the_default_stream_beside_busy_pool_streams() -> None:
    """Its counters are not cleared behind other work, and its memory is not given away."""
    right = gradient_of_ones(2048)
    workspace._counters.clear()
    torch.cuda.synchronize()
    pool = [torch.cuda.Stream() for _ in range(32)]
    for stream in pool:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)  # a fifth of a second
    found = gradient_of_ones(2048)
    done, began = torch.cuda.current_stream().record_event(), time.monotonic()
    while not done.query():
        assert time.monotonic() - began < 20, "it hangs"
        time.sleep(0.001)
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, right))


def test_code_of_kernels_leaves_the_gpu() -> None:
    """1,000 loads of 10 kernels, launched or not, of which two are held at a time."""
    specs = [{"op": "select_topk", "arch": "sm_90a", "dtype": dtype} for dtype in ("fp16", "bf16")]
    specs += ["h100_tile_copy_tma", "h100_quantise_v", "h100_select_topk", "h100_causal", "h100_dense", "h100_window2k"]
    q, k, _ = operands()
    held: list[Any] = []
    left = 0
    for turn in range(1000):
        held = [*held[-1:], load_kernel(specs[turn % len(specs)])]
        if turn % len(specs) == 1:
            held[-1](q, k, (64, 64), 4, causal=True, always=())
        if turn == 100:
            torch.cuda.synchronize()
            gc.collect()
            left = torch.cuda.mem_get_info()[0]
    torch.cuda.synchronize()
    gc.collect()
    assert left - torch.cuda.mem_get_info()[0] < 4 * MIB
    assert len(library._loaded) < 40 and len(library._waiting) < 40


def test_code_that_a_graph_holds_stays() -> None:
    kernel: Any = load_kernel({"op": "select_topk", "arch": "sm_90a", "dtype": "bf16"})
    q, k, _ = operands()
    expected = [tensor.clone() for tensor in kernel(q, k, (64, 64), 4, causal=True, always=())]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(q, k, (64, 64), 4, causal=True, always=())
    del kernel
    gc.collect()
    for name in ("h100_dense", "h100_causal", "h100_dense", "h100_causal"):
        load_kernel(name)
        torch.cuda.synchronize()
    for tensor in found:
        tensor.fill_(-7)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))


def test_loads_beside_a_capture_of_another_thread() -> None:
    """A load, and what it unloads, neither ends the capture nor waits for it."""
    x = torch.ones(1000, device="cuda")
    begun, loaded = threading.Event(), threading.Event()

    def load() -> None:
        begun.wait(20)
        for name in ("h100_dense", "h100_causal", "h100_window2k", "h100_dense", "h100_causal"):
            load_kernel(name)
        loaded.set()

    thread = threading.Thread(target=load)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(2)
        begun.set()
        assert loaded.wait(60)
        x.add_(1)
    thread.join()
    x.fill_(1)
    graph.replay()
    assert x.eq(3).all()


def test_ten_thousand_calls_of_changing_shapes_and_streams_keep_nothing() -> None:
    pool = [torch.cuda.Stream() for _ in range(4)]
    sizes = []
    for turn in range(10_000):
        length = 64 * (1 + turn * 7 % 61)
        with torch.cuda.stream(pool[turn % 4]):
            block_sparse_attention(*operands(length), SlidingWindow(100))
        if turn % 2000 == 1999:
            torch.cuda.synchronize()
            gc.collect()
            sizes.append((torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]))
    assert sizes[-1][0] <= sizes[1][0] and sizes[1][1] - sizes[-1][1] < 32 * MIB, sizes
