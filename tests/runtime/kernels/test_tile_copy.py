"""Tile copies: what their plan refuses, what a call checks, and an oracle that sees a wrong bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.planning import plan_for
from codegen.render import render

torch = pytest.importorskip("torch")

from runtime.driver.launch import ParameterLayout  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels import tile_copy  # noqa: E402
from runtime.verify.tile_copy import CASES, Case, run_case  # noqa: E402

NAMES = ["l4_tile_copy_ld_global", "l4_tile_copy_cp_async", "h100_tile_copy_tma"]
CPU = torch.device("cpu")


def kernel_of(name: str) -> tuple[tile_copy.TileCopyKernel, dict[str, Any]]:
    """A kernel whose launches are only noted down."""
    named = find_spec(name)
    plan, seen = plan_for(named), {}

    def signature(device: Any, tiles: int, numbers: dict[str, int], tensors: Any, **more: Any) -> None:
        ParameterLayout.of(plan.params).pack(numbers)  # raises where a number is on one side only
        seen.update(numbers, tensors=tensors)

    loaded = SimpleNamespace(signature=signature)
    return tile_copy.TileCopyKernel(SimpleNamespace(named=named, plan=plan), loaded), seen  # type: ignore[arg-type]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_copy, "check_tensor", lambda *arguments: None)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("tile.m", {"tile": {"m": 16, "n": 128}}),
        ("tile.n", {"tile": {"m": 64, "n": 512}}),
        ("stages", {"stages": 1}),
        ("stages", {"copy": "ld_global", "stages": 2}),
        ("stages", {"tile": {"m": 128, "n": 256}}),
        ("mma", {"mma": "wmma"}),
    ],
)
def test_what_it_is_not_written_for_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=rf"^{field}: "):
        plan_for(find_spec({"op": "tile_copy", "arch": "sm_89", **changes}))


@pytest.mark.parametrize("op", ["attention", "bsr_spmm"])
def test_other_operators_have_a_matrix_instruction(op: str) -> None:
    rest = {
        "attention": {"head_dim": 64, "pattern": {"kind": "dense"}},
        "bsr_spmm": {"block": {"rows": 64, "cols": 64}},
    }
    with pytest.raises(SpecError, match=r"^mma: none is not possible here"):
        find_spec({"op": op, "arch": "sm_90a", "mma": "none", **rest[op]})


def test_only_the_way_of_loading_differs() -> None:
    sources = [render(find_spec(name)) for name in NAMES]
    stores = [
        source[source.index("__device__ __forceinline__ void store_tile") : source.index('extern "C"')]
        for source in sources
    ]
    assert len(set(stores)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_call_knows_every_number(on_cpu: None, name: str) -> None:
    kernel, seen = kernel_of(name)
    kernel._check(torch.zeros((130, 264), dtype=torch.float16), None)
    assert (seen["tiles"], seen["column_tiles"], seen["out_row_stride"]) == (9, 3, 264)
    assert seen["tensors"] == {"in": ((130, 264), (264, 1))}


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        ((4, 12), None, r"x: has 12 columns, expected a multiple of 8"),
        ((4, 16), (4, 8), r"out: has shape \(4, 8\), expected \(rows 4, columns 16\)"),
    ],
)
def test_what_a_call_refuses(on_cpu: None, x: Any, out: Any, message: str) -> None:
    kernel, _ = kernel_of(NAMES[0])
    tensors = [None if shape is None else torch.zeros(shape, dtype=torch.float16) for shape in (x, out)]
    with pytest.raises(ArgumentError, match=message):
        kernel._check(*tensors)


class Copy:
    """Stands for a kernel: a copy, and what goes wrong with it."""

    spec = find_spec(NAMES[0]).spec

    def __init__(self, fault: Any = lambda out: None) -> None:
        self.fault = fault

    def __call__(self, x: Any, out: Any = None) -> Any:
        out = torch.empty_like(x) if out is None else out
        out.copy_(x)
        self.fault(out)
        return out


@pytest.mark.parametrize("case", [case for case in CASES if case.rows * case.columns < 1 << 20], ids=lambda c: c.name)
def test_a_right_copy_passes(case: Case) -> None:
    assert run_case(Copy(), case, CPU).passed  # type: ignore[arg-type]


def _wrong_bit(out: Any) -> None:
    out.view(torch.int16)[3, 5] ^= 1


def _hole(out: Any) -> None:
    out[7, 9] = float("nan")


def _beside(out: Any) -> None:
    out.as_strided((1,), (1,), out.shape[1])[0] = 1.0


@pytest.mark.parametrize("fault", [_wrong_bit, _hole, _beside])
def test_a_wrong_copy_fails(fault: Any) -> None:
    (strided,) = (case for case in CASES if case.strided)
    assert not run_case(Copy(fault), strided, CPU).passed  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (((4, 16), (20, 1)), None, r"x: has stride 20 in dimension 0"),
        (((4, 16), (16, 1)), ((4, 16), (20, 1)), r"out: has stride 20 in dimension 0"),
        (((4, 16), (16, 1)), ((4, 16), (0, 1)), r"out: is expanded in dimension 0"),
        (((2**36, 8), (8, 1)), None, r"x: has shape \(68719476736, 8\): expected fewer than 1073741824 tiles"),
    ],
)
def test_what_cannot_be_copied(on_cpu: None, x: Any, out: Any, message: str) -> None:
    kernel, _ = kernel_of(NAMES[0])
    tensors = [
        None if given is None else torch.empty_strided(*given, dtype=torch.float16, device="meta") for given in (x, out)
    ]
    with pytest.raises(ArgumentError, match=message):
        kernel._check(*tensors)


def test_tensors_of_a_copy_are_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(tile_copy, "check_tensor", lambda *given: checked.append(given))
    kernel, _ = kernel_of(NAMES[0])
    x, out = (torch.zeros((4, 16), dtype=torch.float16) for _ in range(2))
    kernel._check(x, out)
    assert [(name, dtype, rank) for name, _, dtype, rank, *_ in checked] == [
        ("x", torch.float16, 2),
        ("out", torch.float16, 2),
    ]
    assert checked[0][1] is x and checked[1][1] is out and checked[1][4] == x.device


def test_inputs_lie_and_outputs_are_given_as_the_case_says() -> None:
    for case in (case for case in CASES if case.rows * case.columns < 1 << 20):
        seen: list[tuple[int, bool]] = []

        class Watched(Copy):
            def __call__(self, x: Any, out: Any = None, seen: Any = seen) -> Any:
                seen.append((x.stride(0) - x.shape[1], out is None))
                return super().__call__(x, out)

        assert run_case(Watched(), case, CPU).passed  # type: ignore[arg-type]
        assert seen == [(64 if case.strided else 0, case.own_out)] * 2, case.name
        assert ("strided" in case.describe(), "own out" in case.describe()) == (case.strided, case.own_out)
