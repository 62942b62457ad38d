"""Calls and loads run in the primary context of their tensors' device, whatever is current; the driver is played."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.library import find_spec
from codegen.planning import plan_for

torch = pytest.importorskip("torch")

from host_streams import pretend_memory  # noqa: E402

from runtime import kernel as loading  # noqa: E402
from runtime.driver import context, enqueue  # noqa: E402
from runtime.errors import ArgumentError, DeviceError  # noqa: E402
from runtime.kernels import (  # noqa: E402
    attention,
    bsr_arguments,
    bsr_preparation,
    bsr_sddmm,
    bsr_spgemm,
    bsr_spmm,
    paged_attention,
    quantize,
    select_topk,
)
from runtime.kernels import tile_copy as copying  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
OWN, OTHERS, FOREIGN = 103, 104, 7  # handles of device 3's primary context, of device 4's, of another library's


class Contexts:
    """Plays the driver: each thread has a stack of contexts, the current one last."""

    def __init__(self) -> None:
        self.threads = threading.local()
        self.retained: list[int] = []
        self.entered: list[tuple[int, int]] = []  # (device that torch was given, context that was current then)
        self.status = 0

    @property
    def stack(self) -> list[int]:
        if not hasattr(self.threads, "stack"):
            self.threads.stack = []
        stack: list[int] = self.threads.stack
        return stack

    @property
    def current(self) -> int:
        return self.stack[-1] if self.stack else 0

    def cuInit(self, flags: int) -> tuple[int]:
        return (self.status,)

    def cuDeviceGet(self, device: int) -> tuple[int, int]:
        return 0, device

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        self.retained.append(device)
        return 0, 100 + device

    def cuCtxGetCurrent(self) -> tuple[int, int | None]:
        return self.status, None if self.status else self.current

    def cuCtxPushCurrent(self, handle: int) -> tuple[int]:
        if not self.status:
            self.stack.append(handle)
        return (self.status,)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        return 0, self.stack.pop()

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        """Play torch.cuda.device."""
        self.entered.append((device, self.current))
        yield


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Contexts:
    played = Contexts()
    monkeypatch.setattr(context, "driver", lambda: played)
    monkeypatch.setattr(context, "_primary", {})
    monkeypatch.setattr(torch.cuda, "device", played.device)
    return played


def of_device(device: int | None) -> Any:
    return SimpleNamespace(device=SimpleNamespace(index=device))


STACKS = {"none": [], "foreign": [FOREIGN], "of another device": [OTHERS], "own below a foreign one": [OWN, FOREIGN]}


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_a_context_is_entered_and_left(contexts: Contexts, stack: list[int]) -> None:
    contexts.stack.extend(stack)
    for _ in range(2):
        assert context.is_elsewhere(of_device(3))
        with context.entered(3):
            assert contexts.current == OWN and not context.is_elsewhere(of_device(3))
            assert context.is_elsewhere(of_device(4))
        assert contexts.stack == stack
    with pytest.raises(KeyError), context.entered(3):
        raise KeyError
    assert contexts.stack == stack
    assert contexts.entered == [(3, OWN)] * 3 and contexts.retained == [3, 4]


def test_a_context_that_is_current_is_not_entered(contexts: Contexts) -> None:
    contexts.stack.append(OWN)
    assert not context.is_elsewhere(of_device(3)) and not contexts.entered


def test_each_thread_has_a_current_context_of_its_own(contexts: Contexts) -> None:
    contexts.stack.append(OWN)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(context.is_elsewhere(of_device(3))))
    thread.start()
    thread.join()
    assert found == [True] and not context.is_elsewhere(of_device(3))
    assert contexts.retained == [3]


def test_what_is_no_tensor_of_a_device_enters_none(contexts: Contexts) -> None:
    for given in (3, None, of_device(None), SimpleNamespace(device="cuda"), torch.zeros(1)):
        assert not context.is_elsewhere(given)
    assert not contexts.retained


def test_a_driver_that_fails_is_an_error_of_the_device(contexts: Contexts) -> None:
    context.primary_context(3)
    contexts.status = 4
    assert context.is_elsewhere(of_device(3))
    with pytest.raises(DeviceError, match="cuCtxPushCurrent failed: 4"), context.entered(3):
        raise AssertionError("nothing runs")
    assert not contexts.stack


class Loaded:
    """Takes a kernel's place in the driver, and says in which context it was asked."""

    def __init__(self, contexts: Contexts) -> None:
        self.contexts = contexts
        self.launches = 0
        self.fails = False

    def slots(self, device: Any) -> int:
        assert self.contexts.current == OWN
        return 132

    sm_count = slots

    def signature(self, device: Any, tiles: int, values: Any, tensors: Any, extra: Any = None, **more: Any) -> Any:
        assert self.contexts.current == OWN
        return SimpleNamespace(extra=extra)

    def launch(self, *given: Any, **more: Any) -> None:
        assert self.contexts.current == OWN
        if self.fails:
            raise DeviceError("no launch")
        self.launches += 1

    def launch_prologue(self, *given: Any) -> None:
        assert self.contexts.current == OWN


def half(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.float16)


def bsr(size: int) -> Any:
    indices = torch.tensor([0, 1, 1, 3]), torch.tensor([2, 0, 1])
    return torch.sparse_bsr_tensor(*indices, half(3, size, size), size=(3 * size, 3 * size), check_invariants=False)


QKV = [half(1, 2, 256, 128)] * 3
GATHERED = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 16, "cols": 16}, "stages": 4}
CALLS: dict[str, tuple[Any, Callable[[Any], list[Any]]]] = {
    "attention": ("h100_causal", lambda kernel: QKV),
    "lists": ("h100_topk32", lambda kernel: [*QKV, torch.zeros(1, 2, 2, 32, dtype=torch.int32)]),
    "lists that are prepared": (
        "h100_topk32_b64_ordered",
        lambda kernel: [*QKV, kernel.prepare(torch.zeros(1, 2, 4, 32, dtype=torch.int32), 256)],
    ),
    "spmm": ("h100_bsr_spmm_b64", lambda kernel: [bsr(64), half(192, 64)]),
    "spmm, a batch": ("h100_bsr_spmm_b64", lambda kernel: [bsr(64), half(2, 192, 64)]),
    "spmm, ordered in the call": ("h100_bsr_spmm_b64_balanced", lambda kernel: [bsr(64), half(192, 64)]),
    "spmm, transposed": ("h100_bsr_spmm_b128_transposed", lambda kernel: [kernel.prepare(bsr(128)), half(384, 64)]),
    "spmm, packed": (
        {**GATHERED, "tile": {"m": 384, "n": 128, "k": 16}},
        lambda kernel: [kernel.prepare(bsr(16), 64, pack=True), half(48, 64)],
    ),
    "sddmm": ("h100_bsr_sddmm_b64", lambda kernel: [half(192, 64), half(192, 64), bsr(64)]),
    "spgemm": ("h100_bsr_spgemm_b64", lambda kernel: [bsr(64), bsr(64)]),
    "pages": ("h100_paged_d64", lambda kernel: [half(2, 4, 64), *(half(2, 16, 2, 64) for _ in "kv")]),
    "quantize": ("h100_quantise_v", lambda kernel: [half(1, 2, 192, 128)]),
    "selection": ("h100_select_topk", lambda kernel: [half(1, 2, 192, 64), half(1, 2, 192, 64), (64, 64), 2]),
    "tile copy": ("h100_tile_copy_tma", lambda kernel: [half(64, 64)]),
}
KERNELS = {
    "attention": attention.AttentionKernel,
    "bsr_spmm": bsr_spmm.BsrSpmmKernel,
    "bsr_sddmm": bsr_sddmm.BsrSddmmKernel,
    "bsr_spgemm": bsr_spgemm.BsrSpgemmKernel,
    "paged_attention": paged_attention.PagedAttentionKernel,
    "quantize": quantize.QuantizeKernel,
    "select_topk": select_topk.SelectTopkKernel,
    "tile_copy": copying.TileCopyKernel,
}
WITHOUT_VALUES = ("paged_attention", "quantize", "select_topk", "tile_copy")
"""Operators whose kernel objects have no values to check."""


@pytest.fixture
def on_cpu(contexts: Contexts, monkeypatch: pytest.MonkeyPatch) -> Contexts:
    """Lets tensors of the CPU, whose device has no number, pass for those of device 3."""
    context._primary[None] = OWN, contexts.cuCtxGetCurrent  # type: ignore[index]
    for module in (
        attention,
        bsr_arguments,
        bsr_preparation,
        bsr_sddmm,
        bsr_spmm,
        copying,
        paged_attention,
        quantize,
        select_topk,
    ):
        if hasattr(module, "check_tensor"):
            monkeypatch.setattr(module, "check_tensor", lambda *given: None)
    monkeypatch.setattr(bsr_spgemm, "check_on_gpu", lambda *given: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    pretend_memory(monkeypatch)

    def capturing() -> bool:
        assert contexts.current == OWN
        return False

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    monkeypatch.setattr(enqueue, "note_launch", lambda *given: capturing())
    for module in (attention, bsr_spmm, bsr_sddmm, bsr_spgemm, copying, paged_attention, quantize, select_topk):
        allocator = module.allocator

        def watched(device: Any, allocator: Any = allocator) -> Any:
            assert contexts.current == OWN
            return allocator(device)

        monkeypatch.setattr(module, "allocator", watched)
    find = attention.find_query_order

    def find_watched(*given: Any) -> Any:
        assert contexts.current == OWN
        return find(*given)

    monkeypatch.setattr(attention, "find_query_order", find_watched)
    return contexts


@pytest.mark.parametrize("stack", [[], [FOREIGN], [OWN]], ids=["none", "foreign", "own"])
@pytest.mark.parametrize("name", CALLS)
def test_a_whole_call_runs_in_the_context_of_its_tensors(on_cpu: Contexts, name: str, stack: list[int]) -> None:
    """What torch allocates too: a cached allocation of a foreign context would outlive it."""
    on_cpu.stack.extend(stack)
    spec, arguments = CALLS[name]
    named = find_spec(spec)
    loaded = Loaded(on_cpu)
    compiled: Any = SimpleNamespace(named=named, plan=plan_for(named))
    kernel = KERNELS[named.spec.op](compiled, loaded)  # type: ignore[arg-type]
    given = arguments(kernel)
    more: dict[str, Any] = {} if named.spec.op in WITHOUT_VALUES else {"validate": True}
    for _ in range(2):
        kernel(*given, **more)
    assert loaded.launches == 2
    assert on_cpu.stack == stack and bool(on_cpu.entered) is (stack != [OWN])
    loaded.fails = True
    with pytest.raises(DeviceError, match="no launch"):
        kernel(*given, **more)
    assert on_cpu.stack == stack


@pytest.mark.parametrize("stack", [[], [FOREIGN], [OTHERS]], ids=["none", "foreign", "of another device"])
@pytest.mark.parametrize("device", [None, 3, "cuda:3", "cuda", torch.device("cuda", 3)], ids=str)
def test_a_kernel_is_loaded_in_the_context_of_its_device(
    contexts: Contexts, monkeypatch: pytest.MonkeyPatch, stack: list[int], device: Any
) -> None:
    contexts.stack.extend(stack)
    _fake_gpu(monkeypatch)
    seen: list[int] = []
    monkeypatch.setattr(loading, "LoadedKernel", lambda compiled: seen.append(contexts.current))
    loading.load_kernel("h100_topk32", device=device)
    assert seen == [OWN] and contexts.stack == stack


def test_what_is_chosen_is_a_line_of_the_log(
    contexts: Contexts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _fake_gpu(monkeypatch)
    monkeypatch.setattr(loading, "LoadedKernel", lambda compiled: None)
    problem = {"heads": 16, "q_len": 8192, "kv_len": 8192}
    with caplog.at_level(logging.DEBUG, "sparse_kernel_codegen"):
        loading.load_kernel("h100_topk32")
        assert caplog.records == [], "without choices"
        fields = {"op": "attention", "arch": "sm_90a", "dtype": "fp16", "head_dim": 128, "pattern": {"kind": "causal"}}
        loading.load_kernel(fields, problem)
    (record,) = caplog.records
    assert re.match(r"\w+causal\w*: (measured|nearest|predicted): ", record.getMessage())


def _fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a machine with H100s, the fourth of four torch's current one, and a compiler."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        loading,
        "code_of",
        lambda generated, target, cache: SimpleNamespace(plan=generated.plan, named=find_spec("h100_topk32")),
    )


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu", "device: is 'cpu', expected a CUDA device, such as 'cuda:0'"),
        ("gpu", "device: is 'gpu', expected a device such as 'cuda:0': "),
        ([0], r"device: is \[0\], expected a device such as 'cuda:0'$"),
        ("cuda:4", "device: is 'cuda:4', torch sees 4 CUDA devices, 0 to 3"),
    ],
)
def test_what_is_no_device(monkeypatch: pytest.MonkeyPatch, device: Any, message: str) -> None:
    _fake_gpu(monkeypatch)
    with pytest.raises(ArgumentError, match=message):
        loading.load_kernel("h100_topk32", device=device)
