"""Loads and calls in any thread, with any CUDA context or none current: torch goes on there, and so do kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime import load_kernel  # noqa: E402
from runtime.driver.api import call, driver  # noqa: E402

# The sm_89 kernels run on every device these tests accept.
ATTENTION, LISTS, SPMM, ORDERED = "l4_causal", "l4_topk32", "l4_bsr_spmm_b128", "h100_bsr_spmm_b64_balanced"
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
PAIR = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def load(name: str) -> Any:
    """Load a kernel; those of sm_89 also where the device is newer."""
    return load_kernel(name, forward_compatible=name.startswith("l4_"))


def current() -> int:
    """Return the context that is current in this thread; 0: none."""
    return int(call(driver().cuCtxGetCurrent))


def draw(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def bsr(block: int) -> Any:
    return draw(512, 768).to_sparse_bsr((block, block))


def attention_call(name: str) -> tuple[str, tuple[Any, ...]]:
    q, k, v = (draw(1, 4, 1024, 128) for _ in range(3))
    lists = torch.randint(0, 16, (1, 4, 16, 32), device="cuda", dtype=torch.int32)
    return name, (q, k, v, lists) if name == LISTS else (q, k, v)


CALLS: dict[str, Callable[[], tuple[str, tuple[Any, ...]]]] = {
    "attention": lambda: attention_call(ATTENTION),
    "lists": lambda: attention_call(LISTS),
    "spmm": lambda: (SPMM, (bsr(128), draw(768, 256))),
    "sddmm": lambda: (
        "l4_bsr_sddmm_b128",
        (draw(512, 256), draw(768, 256), bsr(128)),
    ),
    "spgemm": lambda: (
        "l4_bsr_spgemm_b128",
        (bsr(128), draw(768, 384).to_sparse_bsr((128, 128))),
    ),
    "copy": lambda: ("l4_tile_copy_cp_async", (draw(512, 256),)),
}
HOPPER_CALLS: dict[str, Callable[[], tuple[str, tuple[Any, ...]]]] = {
    "hopper attention": lambda: attention_call("h100_causal"),
    "hopper spmm": lambda: (ORDERED, (bsr(64), draw(768, 256))),
}
EVERY = [*CALLS, *(pytest.param(name, marks=HOPPER) for name in HOPPER_CALLS)]


def given(name: str) -> tuple[str, tuple[Any, ...]]:
    torch.manual_seed(0)
    kernel, arguments = {**CALLS, **HOPPER_CALLS}[name]()
    torch.cuda.synchronize()
    return kernel, arguments


def dense(result: Any) -> Any:
    """Return the tensor of a result, which may be sparse or have an LSE beside it."""
    out = result if isinstance(result, torch.Tensor) else result.out
    return out.to_dense() if out.layout == torch.sparse_bsr else out


@contextmanager
def no_context() -> Iterator[int]:
    """Take this thread's context away, as a library does that pops more than it pushed."""
    before = current()
    call(driver().cuCtxSetCurrent, 0)
    try:
        yield 0
    finally:
        call(driver().cuCtxSetCurrent, before)


@contextmanager
def foreign_context() -> Iterator[int]:
    """Make a context current that is not torch's, as another library does; destroy it at the end."""
    cuda = driver()
    device = call(cuda.cuDeviceGet, torch.cuda.current_device())
    try:
        created = call(cuda.cuCtxCreate, None, 0, device)  # from 13.0 on
    except TypeError:
        created = call(cuda.cuCtxCreate, 0, device)
    try:
        assert current() == int(created)
        yield int(created)
    finally:
        call(cuda.cuCtxDestroy, created)


WAYS = {"none": no_context, "foreign": foreign_context}


def in_a_new_thread(work: Callable[[], Any]) -> Any:
    """Run something where no CUDA context is current, and raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("name", EVERY)
def test_a_new_thread_loads_and_calls(name: str) -> None:
    kernel, arguments = given(name)
    expected = dense(load(kernel)(*arguments))
    torch.cuda.synchronize()

    def work() -> Any:
        assert current() == 0
        loaded = load(kernel)
        assert current() == 0
        results = [loaded(*arguments) for _ in range(2)]
        assert current() == 0
        return results

    results = in_a_new_thread(work)
    torch.cuda.synchronize()
    assert all(torch.equal(dense(result), expected) for result in results)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EVERY)
def test_a_call_enters_the_context_of_its_tensors_and_leaves_the_threads(name: str, way: str) -> None:
    """New memory is torch's own: results outlive the context that was current."""
    kernel, arguments = given(name)
    before = load(kernel)
    expected = dense(before(*arguments))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # so that a call allocates anew
    own = current()
    with WAYS[way]() as there:
        loaded = load(kernel)
        assert current() == there
        results = [call_it(*arguments) for call_it in (before, loaded, before)]
        assert current() == there
    assert current() == own
    torch.cuda.synchronize()
    assert all(torch.equal(dense(result), expected) for result in results)


@pytest.mark.parametrize("way", WAYS)
@HOPPER
def test_what_is_prepared_elsewhere_is_that_of_its_matrix(way: str) -> None:
    gathered, ordered = load("h100_bsr_spmm_b16_gathered"), load("h100_topk32_b64_ordered")
    a, b = bsr(16), draw(768, 256)
    q, k, v = (draw(1, 2, 1024, 128) for _ in range(3))
    lists = torch.randint(0, 16, (1, 2, 16, 32), device="cuda", dtype=torch.int32)
    expected = gathered(gathered.prepare(a, 256), b), ordered(q, k, v, ordered.prepare(lists, 1024)).out
    torch.cuda.synchronize()
    with WAYS[way]() as there:
        prepared = gathered.prepare(a, 256, pack=True), ordered.prepare(lists, 1024)
        found = gathered(prepared[0], b, validate=True), ordered(q, k, v, prepared[1], validate=True).out
        assert current() == there
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_call_is_captured_where_no_context_is_current() -> None:
    kernel, arguments = given("lists")
    loaded = load(kernel)
    expected = dense(loaded(*arguments))
    out, graph = torch.empty_like(expected), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), no_context():
        loaded(*arguments, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_an_error_leaves_the_context_too() -> None:
    kernel, arguments = given("attention")
    loaded = load(kernel)
    with foreign_context() as there:
        with pytest.raises(ValueError, match="k: is int"):
            loaded(arguments[0], 3, arguments[2])
        assert current() == there


def test_the_context_of_the_device_is_not_entered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ordinary call: torch's context is current, and a call asks for it once and changes nothing."""
    kernel, arguments = given("attention")
    loaded = load(kernel)
    expected = dense(loaded(*arguments))
    monkeypatch.setattr("runtime.kernels.attention.entered", lambda device: pytest.fail("it was entered"))
    assert torch.equal(dense(loaded(*arguments)), expected)


@pytest.mark.own_allocator
@PAIR
@pytest.mark.parametrize("name", EVERY)
def test_a_call_runs_on_the_device_of_its_tensors(name: str) -> None:
    kernel, arguments = given(name)
    loaded = load(kernel)
    expected = dense(loaded(*arguments))
    elsewhere = tuple(tensor.to("cuda:1") for tensor in arguments)
    torch.cuda.synchronize(1)
    before = current()
    found = dense(loaded(*elsewhere))
    assert found.device == torch.device("cuda", 1) and torch.cuda.current_device() == 0 and current() == before
    with torch.cuda.device(1):
        again = dense(loaded(*arguments)), dense(loaded(*elsewhere))
    torch.cuda.synchronize()
    torch.cuda.synchronize(1)
    assert all(torch.equal(each.to("cuda:0"), expected) for each in (found, *again))
    assert torch.equal(dense(load_kernel(kernel, device=1, forward_compatible=True)(*elsewhere)), found)
