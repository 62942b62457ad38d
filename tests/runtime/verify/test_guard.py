"""Guard bands: what a kernel writes outside of its tensors is found, wherever they come from, and nothing else is."""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from codegen.library import find_spec

torch = pytest.importorskip("torch")

import runtime.kernels  # noqa: E402
from runtime.driver import workspace  # noqa: E402
from runtime.driver.allocate import allocator, contiguous  # noqa: E402
from runtime.kernels.attention import AttentionResult  # noqa: E402
from runtime.prepare.prepared import PreparedBsr  # noqa: E402
from runtime.verify import guard, run, tile_copy  # noqa: E402
from runtime.verify.guard import BAND, Guarded  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


class Kernel:
    """Stands for a kernel: copies its first argument, and then does what it is told to."""

    def __init__(self, act: Any = lambda **_: None) -> None:
        self.spec = self.compiled = None
        self.act, self.seen = act, []
        self.prepared: Any = None

    def prepare(self, a: Any) -> Any:
        return PreparedBsr(a)

    def __call__(self, x: Any, *others: Any, out: Any = None, **named: Any) -> Any:
        self.seen += [x, *others, *named.values()]
        result = allocator(CPU)(*contiguous(x.shape), x.dtype) if out is None else out
        lse = allocator(CPU)(*contiguous(x.shape[:1]), torch.float32)
        counters, scratch = workspace.counters(CPU, 0, 3), workspace.scratch(CPU, 50)
        assert not counters.any() and counters.numel() == 3 and scratch.numel() == 50 and bool((scratch == 0xFF).all())
        assert bool(lse.isnan().all()) and (out is not None or bool(result.isnan().all()))
        result.copy_(x)
        lse.zero_()
        self.act(x=x, others=others, out=result, lse=lse, counters=counters, scratch=scratch)
        return AttentionResult(result, lse)


def beside(tensor: Any, elements: int) -> Any:
    """The element so many after the first one of a tensor, or before it."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + elements)


def matrix() -> Any:
    indices = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    return torch.sparse_bsr_tensor(*indices, torch.randn(2, 4, 4), size=(8, 8))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("own_out", [False, True])
def test_a_kernel_that_keeps_to_its_tensors_has_no_faults(strided: bool, own_out: bool) -> None:
    kernel = Kernel()
    guarded = Guarded(kernel)
    real = torch._C._dynamo.guards._empty_strided_cpu
    x = torch.randn(6, 24)[:, :16] if strided else torch.randn(1, 16).expand(6, 16)
    whole = torch.full((6, 24), float("nan"))
    out = None if own_out else whole[:, :16]
    a = matrix()
    result = guarded(x, torch.zeros(0), None, a, scale=2.0, out=out)
    assert guarded.faults == [] and torch.equal(result.out, x) and result.lse.shape == (6,)
    assert own_out or (result.out is out and bool(whole[:, 16:].isnan().all()))
    seen = kernel.seen[0]
    assert seen.stride() == x.stride() and seen.data_ptr() != x.data_ptr() and torch.equal(seen, x)
    assert kernel.seen[1].shape == (0,) and kernel.seen[2] is None and kernel.seen[-1] == 2.0
    assert torch.equal(kernel.seen[3].to_dense(), a.to_dense()) and kernel.seen[3] is not a
    assert torch._C._dynamo.guards._empty_strided_cpu is real and workspace.counters.__module__ == workspace.__name__


WRITES = [
    ("behind out", lambda out, **_: beside(out, 96).fill_(1), "wrote 4 bytes behind out, the nearest 0 bytes away"),
    ("far before out", lambda out, **_: beside(out, -9).fill_(1), "wrote 4 bytes before out, the nearest 32 bytes"),
    ("at the end of a band", lambda out, **_: beside(out, 95 + BAND // 4).fill_(1), "4 bytes behind out"),
    ("before the LSE", lambda lse, **_: beside(lse, -1).fill_(1), r"wrote 4 bytes before a new tensor \(6,\)"),
    ("into an input", lambda x, **_: x[0, 0].fill_(7), "wrote into argument 0"),
    ("behind an input", lambda x, **_: beside(x, 96).fill_(7), "wrote 4 bytes behind argument 0"),
    ("behind scratch", lambda scratch, **_: beside(scratch, 50).fill_(0), "wrote 1 bytes behind scratch memory"),
    ("counters", lambda counters, **_: counters[1].fill_(2), "left nonzero values in counters"),
    ("values", lambda others, **_: others[0].values()[0].fill_(0), r"wrote into argument 1.values\(\)"),
    (
        "behind columns",
        lambda others, **_: beside(others[0].col_indices(), 2).fill_(0),
        r"wrote 8 bytes behind argument 1.col_indices\(\)",
    ),
]


@pytest.mark.parametrize(("act", "told"), [write[1:] for write in WRITES], ids=[write[0] for write in WRITES])
def test_a_write_outside_is_told_by_the_tensor(act: Any, told: str) -> None:
    guarded = Guarded(Kernel(act))
    x, out = torch.randn(6, 16), torch.full((6, 16), float("nan"))
    guarded(x, matrix(), out=out)
    (fault,) = guarded.faults
    assert re.search(told, fault), fault


def test_what_is_read_behind_an_input_is_nan_and_minus_1() -> None:
    found: list[Any] = []

    def act(x: Any, others: Any, **_: Any) -> None:
        found.extend((beside(x, 96), beside(x, -1), beside(others[0], 5)))

    Guarded(Kernel(act))(torch.randn(6, 16), torch.zeros(5, dtype=torch.int32))
    assert found[0].isnan() and found[1].isnan() and int(found[2]) == -1


def test_an_output_that_is_an_input_too_is_one_tensor() -> None:
    kernel = Kernel()
    guarded = Guarded(kernel)
    out = torch.zeros(6, 16)
    kernel.act = lambda out, **_: out.add_(kernel.seen[-1])
    result = guarded(torch.ones(6, 16), c=out, out=out)
    assert guarded.faults == [] and result.out is out and bool((out == 2).all())


def test_a_prepared_matrix_is_between_bands_in_later_calls_too() -> None:
    kernel = Kernel()
    guarded = Guarded(kernel)
    prepared = guarded.prepare(matrix())
    guarded(torch.ones(6, 16), prepared)
    assert guarded.faults == [] and kernel.seen[-1] is prepared
    kernel.act = lambda others, **_: beside(others[0].matrix.values(), 32).fill_(0)
    guarded(torch.ones(6, 16), prepared)
    assert guarded.faults == ["wrote 4 bytes behind a.values(), the nearest 0 bytes away"]


def test_what_a_kernel_keeps_to_allocate_by_works_without_a_guard() -> None:
    kept: list[Any] = []
    Guarded(Kernel(lambda **_: kept.append(allocator(CPU))))(torch.ones(6, 16))
    assert kept[0]((2, 3), (3, 1), torch.float16).shape == (2, 3)


@pytest.mark.parametrize("writes", [False, True])
def test_a_case_fails_by_a_fault(writes: bool) -> None:
    class Copy:
        def __init__(self) -> None:
            self.spec, self.compiled = find_spec("h100_tile_copy_tma").spec, SimpleNamespace()

        def __call__(self, x: Any, out: Any = None) -> Any:
            if writes:
                beside(x, -1).fill_(1)
            return out.copy_(x)

    kernel: Any = Copy()
    outcome = run.run_case(kernel, tile_copy.Case("one_tile", 32, 64), CPU)
    assert outcome.passed is not writes
    assert outcome.problem == ("wrote 2 bytes before argument 0, the nearest 0 bytes away" if writes else "")


def results() -> list[type]:
    """Every kind of named result that calls of kernels return."""
    modules = [
        import_module(f"runtime.kernels.{found.name}") for found in pkgutil.iter_modules(runtime.kernels.__path__)
    ]
    return [
        get_type_hints(kernel.__call__)["return"]
        for module in modules
        for kernel in vars(module).values()
        if isinstance(kernel, type) and kernel.__module__ == module.__name__ and "__call__" in vars(kernel)
        if hasattr(get_type_hints(kernel.__call__)["return"], "_fields")
    ]


def test_named_results_have_the_tensors_of_the_caller() -> None:
    kinds = results()
    assert len(kinds) >= 5
    for kind in kinds:
        call, out = guard._Call(), torch.zeros(4)
        copy = call.copy("out", out, written=True)
        copy.fill_(2.0)
        other = torch.ones(1)
        result = call.finish(kind(copy, *([other] * (len(kind._fields) - 1))))
        assert type(result) is kind
        assert result[0] is out
        assert out.tolist() == [2.0] * 4
        assert all(part is other for part in result[1:])
