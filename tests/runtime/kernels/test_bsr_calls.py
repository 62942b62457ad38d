"""Calls of BSR kernels up to the launch, on the CPU: what is refused, what a launch is given."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from host_streams import pretend_stream  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from codegen.problem import SpgemmShape  # noqa: E402
from runtime.driver import workspace  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels import (  # noqa: E402
    arguments,
    bsr_arguments,
    bsr_batch,
    bsr_preparation,
    bsr_scales,
    bsr_sddmm,
    bsr_spgemm,
    bsr_spmm,
)
from runtime.kernels.bsr_preparation import Parts  # noqa: E402
from runtime.prepare import row_clusters  # noqa: E402
from runtime.prepare.bsr_matrix import parts_of_prepared, prepared_of  # noqa: E402
from runtime.prepare.prepared import PreparedBsr  # noqa: E402
from runtime.prepare.row_clusters import cluster_rows  # noqa: E402
from runtime.prepare.row_split import split_rows  # noqa: E402
from runtime.prepare.transpose import TransposedIndex  # noqa: E402

pytestmark = [pytest.mark.nvrtc, pytest.mark.filterwarnings("ignore:Sparse")]
Make = Callable[..., Any]
COUNTERS = torch.zeros(2, dtype=torch.int32)


class Loaded:
    """Takes a kernel's place in the driver: records signatures and launches, and checks their names by the plan."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.signatures: list[dict[str, Any]] = []
        self.launches: list[dict[str, int]] = []
        self.prologues: list[bool] = []  # whether a launch had one before it
        self.packed: list[tuple[int, dict[str, int]]] = []

    def slots(self, device: int | None) -> int:
        return 132

    def signature(
        self,
        device: Any,
        tiles: int,
        numbers: Mapping[str, Any],
        tensors: Mapping[str, Any],
        *,
        prologue_grid: int = 0,
        **more: Any,
    ) -> Any:
        wanted = {param.name for param in self.plan.params if param.type in ("i32", "i64", "f32")}
        assert set(numbers) == wanted
        assert {name.removesuffix("_map") for name in self.plan.tensor_maps} <= set(tensors)
        self.signatures.append(
            {"tiles": tiles, "numbers": dict(numbers), "tensors": dict(tensors), "prologue_grid": prologue_grid}
        )
        return self.signatures[-1]

    def sm_count(self, device: int) -> int:
        return 132

    def launch_prologue(self, device: int, grid: int, addresses: Mapping[str, int], stream: int) -> None:
        assert set(addresses) <= {param.name for param in self.plan.params if param.type == "pointer"}
        assert self.plan.prologue is not None and min(addresses.values()) > 0
        self.packed.append((grid, dict(addresses)))

    def launch(self, signature: Any, addresses: Mapping[str, int], stream: int, *, prologue: bool = True) -> None:
        for param in self.plan.params:
            if param.type in ("pointer", "tensor_map") and param.name != "parts":
                assert addresses[param.name.removesuffix("_map")] > 0
        self.launches.append(dict(addresses))
        self.prologues.append(prologue)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a kernel that takes tensors of the CPU; its launches do nothing."""

    def check(name: str, tensor: Any, dtype: Any, rank: int, device: Any = None) -> None:
        with pytest.raises(ArgumentError, match="is on cpu, expected a CUDA device"):
            arguments.check_tensor(name, tensor, dtype, rank, device)
        if tensor.dtype != dtype or tensor.dim() != rank:
            raise ArgumentError(name, "dtype or rank")

    for module in (bsr_arguments, bsr_sddmm, bsr_spmm, bsr_preparation, bsr_scales):
        monkeypatch.setattr(module, "check_tensor", check)

    def on_gpu(name: str, tensor: Any) -> None:
        with pytest.raises(ArgumentError, match=f"{name}: is on cpu, expected a CUDA device"):
            bsr_arguments.check_on_gpu(name, tensor)

    monkeypatch.setattr(bsr_spgemm, "check_on_gpu", on_gpu)
    monkeypatch.setattr(workspace, "counters", lambda device, stream, number: torch.zeros(number, dtype=torch.int32))
    monkeypatch.setattr(workspace, "scratch", lambda device, size: torch.zeros(size, dtype=torch.uint8))
    pretend_stream(monkeypatch)

    def make(arch: str = "sm_90a", size: int = 64, **fields: Any) -> Any:
        block = {"rows": size, "cols": size}
        named = find_spec({"op": "bsr_spmm", "arch": arch, "block": block, **fields})
        compiled: Any = SimpleNamespace(plan=plan_for(named), named=named)
        loaded: Any = Loaded(compiled.plan)
        if named.spec.op == "bsr_spgemm":
            return bsr_spgemm.BsrSpgemmKernel(compiled, loaded)
        if named.spec.op == "bsr_sddmm":
            return bsr_sddmm.BsrSddmmKernel(compiled, loaded)
        return bsr_spmm.BsrSpmmKernel(compiled, loaded)

    return make


def dense(*shape: int, fill: float = 0.0) -> Any:
    return torch.full(shape, fill, dtype=torch.float16)


def matrix(crow: list[int], col: list[int], columns: int = 3, index: Any = torch.int64, size: int = 64) -> Any:
    indices = (torch.tensor(crow, dtype=index), torch.tensor(col, dtype=index))
    shape = ((len(crow) - 1) * size, columns * size)
    values = dense(len(col), size, size)
    return torch.sparse_bsr_tensor(*indices, values, size=shape, check_invariants=False)


A = matrix([0, 1, 1, 3], [2, 0, 1])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(("arch", "size"), [("sm_90a", 128), ("sm_90a", 64), ("sm_90a", 32), ("sm_89", 64)])
def test_a_call_hands_over_what_the_kernel_reads(make: Make, arch: str, size: int, index: Any) -> None:
    kernel = make(arch, size)
    a, b = matrix([0, 1, 1, 3], [2, 0, 1], index=index, size=size), dense(3 * size, 1000)
    out = kernel(a, b, validate=True)
    assert out.shape == (3 * size, 1000)
    (signature,), (launch,) = kernel._loaded.signatures, kernel._loaded.launches
    assert signature["numbers"]["index_words"] == (1 if index == torch.int32 else 2)
    assert signature["tiles"] == 3 * -(-1000 // kernel.spec.tile.n)
    assert launch["crow_indices"] == a.crow_indices().data_ptr() and launch["c"] == out.data_ptr()
    if arch == "sm_89":
        assert signature["numbers"]["group_rows"] == 3
        assert signature["numbers"]["column_tiles"] == -(-1000 // kernel.spec.tile.n)
    kernel(a, b, out=out)
    kernel(a, b, out=out)
    assert len(kernel._loaded.signatures) == 2 and len(kernel._loaded.launches) == 3


@pytest.mark.parametrize(("arch", "rows", "cols"), [("sm_90a", 64, 128), ("sm_90a", 128, 64), ("sm_89", 64, 128)])
def test_blocks_need_not_be_square(make: Make, arch: str, rows: int, cols: int) -> None:
    kernel = make(arch, block={"rows": rows, "cols": cols})
    indices = (torch.tensor([0, 1, 1, 3]), torch.tensor([2, 0, 3]))
    shape = (3 * rows, 4 * cols)
    a = torch.sparse_bsr_tensor(*indices, dense(3, rows, cols), size=shape, check_invariants=False)
    assert kernel(a, dense(4 * cols, 304), validate=True).shape == (3 * rows, 304)
    (signature,) = kernel._loaded.signatures
    assert signature["tiles"] == 3 * -(-304 // kernel.spec.tile.n)
    with pytest.raises(ArgumentError, match=rf"b: has shape \({4 * rows}, 304\), expected \(K {4 * cols}, N\)"):
        kernel(a, dense(4 * rows, 304))
    turned = torch.sparse_bsr_tensor(*indices, dense(3, cols, rows), size=(3 * cols, 4 * rows), check_invariants=False)
    message = rf"a: has blocks of \({cols}, {rows}\), this kernel takes \({rows}, {cols}\)"
    with pytest.raises(ArgumentError, match=message):
        kernel(turned, dense(4 * rows, 304))
    uneven = torch.sparse_bsr_tensor(
        *indices, dense(3, rows, cols), size=(3 * rows, 4 * cols - 16), check_invariants=False
    )
    with pytest.raises(ArgumentError, match=rf"a: has shape .*, expected a multiple of its blocks, \({rows}, {cols}\)"):
        kernel(uneven, dense(4 * cols - 16, 304))


def test_columns_of_b_may_be_what_is_contiguous(make: Make) -> None:
    kernel = make(size=128, b_layout="column_major")
    a, b = matrix([0, 1, 1, 3], [2, 0, 1], size=128), dense(304, 384).mT
    assert kernel(a, b).shape == (384, 304) and kernel(a, b).is_contiguous()
    assert kernel(a, dense(2, 304, 384).mT).shape == (2, 384, 304)
    (launch, *_), (signature, *_) = kernel._loaded.launches, kernel._loaded.signatures
    assert launch["b"] == b.data_ptr() and signature["tensors"]["b"] == ((304, 384), (384, 1))
    for stored, of, layout in (("row_major", kernel, "column_major"), ("column_major", make(size=128), "row_major")):
        wrong = dense(384, 304) if stored == "row_major" else b
        message = rf"b: has strides .*: it is {stored}, .* is for b_layout {layout}; .* a spec with b_layout: {stored}"
        with pytest.raises(ArgumentError, match=message):
            of(a, wrong)
    with pytest.raises(ArgumentError, match="b: has stride 388 in dimension 0; strides must be multiples of 8"):
        kernel(a, dense(304, 388)[:, :384].mT)


@pytest.mark.parametrize("size", [16, 32])
def test_columns_of_b_are_copied_by_rows_for_small_blocks(make: Make, size: int) -> None:
    kernel = make(size=size, b_layout="column_major")
    a, b = matrix([0, 1, 1, 3], [2, 0, 1], size=size), dense(300, 3 * size).mT
    assert kernel(a, b).shape == (3 * size, 300)
    (launch, *_), (signature, *_) = kernel._loaded.launches, kernel._loaded.signatures
    assert launch["b_columns"] == b.data_ptr() != launch["b"] == launch["b_groups"]
    tensors, numbers = signature["tensors"], signature["numbers"]
    assert tensors["b_columns"] == ((300, 3 * size), (3 * size, 1)) and tensors["b"] == ((3 * size, 300), (320, 1))
    assert tensors["b_groups"] == ((5, 3 * size, 64), (64, 320, 1))
    # Tiles of 64 rows and 128 columns.
    assert not {"whole_rows", "n"} & numbers.keys()  # rows of the copy are whole column groups
    assert numbers["copy_rows"] == -(-3 * size // 64) and signature["prologue_grid"] == 3 * numbers["copy_rows"]


@pytest.mark.parametrize(
    ("columns", "rows"), [(512, 96), (64, 96), (576, 96), (1000, 64), (72, 64), (63, 64), (8, 64), (1, 64)]
)
def test_rows_that_one_copy_brings_have_a_row_below(make: Make, columns: int, rows: int) -> None:
    kernel = make(size=32)
    kernel(matrix([0, 1, 1, 3], [2, 0, 1], size=32), dense(96, -(-columns // 8) * 8)[:, :columns])
    (signature,) = kernel._loaded.signatures
    assert signature["numbers"]["whole_rows"] == rows
    (groups, depth, width), (across, row, _) = signature["tensors"]["b_groups"]
    last = (groups - 1) * across + (rows - 1) * row + width  # behind the last element that such a copy reads
    assert last <= 95 * row + columns and (depth, width) == (96, 64)


def test_rows_that_overlap_may_have_too_little_below(make: Make) -> None:
    kernel, a = make(size=32), matrix([0, 1, 1, 3], [2, 0, 1], size=32)
    for columns, stride, rows in ((1000, 0, 0), (1000, 8, 64), (1000, 24, 64), (8, 8, 64), (904, 8, 64), (1, 8, 64)):
        kernel(a, dense(1, 3280).as_strided((96, columns), (stride, 1)))
        assert kernel._loaded.signatures[-1]["numbers"]["whole_rows"] == rows
        # The last element that such a copy reads is one of B's.
        assert rows == 0 or (rows - 1) * stride + -(-columns // 64) * 64 <= 95 * stride + columns


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_a_strided_kernel_reads_b_and_writes_c_as_they_are(make: Make, columns: int) -> None:
    kernel, a = make(size=32, b_layout="strided"), matrix([0, 1, 1, 3], [2, 0, 1], size=32)
    by_rows, by_columns = dense(96, columns), dense(columns, 96).mT
    odd = dense(1 + columns * 97)[1:].as_strided((96, columns), (1, 97))  # neither address nor stride is aligned
    apart = dense(96, 3 * columns + 5)[:, : 3 * columns : 3]
    for b in (by_rows, by_columns, odd, apart):
        out = kernel(a, b)
        assert out.shape == (96, columns) and out.stride(0) == 8
        into = dense(96, 2 * columns + 1)[:, 1::2]
        assert kernel(a, b, out=into) is into
        *_, own, given = [signature["numbers"] for signature in kernel._loaded.signatures]
        strides = [(numbers["c_row_stride"], numbers["c_column_stride"]) for numbers in (own, given)]
        assert strides == [(8, 1), into.stride()]
        wanted = [stride if size > 1 else 0 for size, stride in zip(b.shape, b.stride(), strict=True)]
        assert [given["b_row_stride"], given["b_column_stride"]] == wanted
        assert [launch["b"] for launch in kernel._loaded.launches[-2:]] == [b.data_ptr()] * 2
        assert kernel._loaded.launches[-1]["c"] == into.data_ptr()


def test_a_strided_kernel_adds_c_as_it_is(make: Make) -> None:
    kernel = make(size=32, b_layout="strided", accumulate=True, epilogue={"activation": "silu", "bias": True})
    a, b, c = matrix([0, 1, 1, 3], [2, 0, 1], size=32), dense(96, 2), dense(96, 7)[:, 1:6:4]
    kernel(a, b, c=c, bias=dense(96), beta=0.5)
    numbers = kernel._loaded.signatures[-1]["numbers"]
    assert (numbers["c_in_row_stride"], numbers["c_in_column_stride"], numbers["beta"]) == (7, 4, 0.5)
    assert kernel(a, b, c=c, bias=dense(96), out=c) is c


def test_a_strided_kernel_takes_batches(make: Make) -> None:
    kernel, a = make(size=32, b_layout="strided"), matrix([0, 1, 1, 3], [2, 0, 1], size=32)
    for batch, columns in ((1, 1), (3, 5), (2, 8)):
        assert kernel(a, dense(batch, 96, columns)).shape == (batch, 96, columns)
    with pytest.raises(ArgumentError, match=r"out: has shape .* its elements may share memory"):
        kernel(a, dense(96, 2), out=dense(200).as_strided((96, 2), (1, 50)))


@pytest.mark.parametrize("mma", ["mma", "wmma"])
def test_kernels_without_tensor_maps_know_how_far_columns_of_b_are_apart(make: Make, mma: str) -> None:
    kernel = make("sm_89", size=64, mma=mma, b_layout="column_major")
    b = dense(2, 304, 256)[:, :, :192].mT
    assert kernel(matrix([0, 1, 1, 3], [2, 0, 1], size=64), b).shape == (2, 192, 304)
    (signature,), launches = kernel._loaded.signatures, kernel._loaded.launches
    assert signature["numbers"]["b_column_stride"] == 256 and "b_row_stride" not in signature["numbers"]
    assert [launch["b"] for launch in launches] == [b.data_ptr()], "columns of both follow each other"
    # A column beyond the only one must lie where copies may begin, though nothing is read there.
    kernel(matrix([0, 1, 1, 3], [2, 0, 1], size=64), dense(192)[:, None])
    assert kernel._loaded.signatures[-1]["numbers"]["b_column_stride"] == 0


def test_columns_of_b_where_a_is_transposed(make: Make) -> None:
    kernel = make(size=64, transpose_a=True, b_layout="column_major")
    a = matrix([0, 1, 1, 3], [2, 0, 1], size=64)
    assert kernel(a, dense(304, 192).mT).shape == (192, 304)
    (signature,) = kernel._loaded.signatures
    assert signature["tensors"]["b"] == ((304, 192), (192, 1))
    with pytest.raises(ArgumentError, match=r"b: has strides .*: it is row_major"):
        kernel(a, dense(192, 304))


def test_a_batch_whose_matrices_lie_side_by_side_is_one_launch_without_copies(make: Make) -> None:
    kernel = make(accumulate=True)
    b, c = (dense(192, 4, 80).transpose(0, 1) for _ in range(2))
    out = kernel(A, b, c=c)
    assert out.shape == (4, 192, 80) and out.stride() == (80, 4 * 80, 1)
    again = kernel(A, out, c=c, out=c)
    assert again is c and len(kernel._loaded.signatures) == 2
    places = [(launch["b"], launch["c_in"], launch["c"]) for launch in kernel._loaded.launches]
    assert places == [tuple(t.data_ptr() for t in given) for given in ((b, c, out), (out, c, c))]


def test_large_matrices_are_not_copied(make: Make) -> None:
    kernel, a = make(), matrix([0, 1, 1, 3], [2, 0, 1])
    b = torch.empty(3, 192, 45000, dtype=torch.float16)
    out = kernel(a, b)
    places = [(launch["b"], launch["c"]) for launch in kernel._loaded.launches]
    assert places == [(b[i].data_ptr(), out[i].data_ptr()) for i in range(3)]
    (signature,) = kernel._loaded.signatures
    assert signature["numbers"]["n"] == 45000 and signature["tensors"]["c"] == ((192, 45000), (3 * 45000, 1))


def computing(kernel: Any, launched: list[int]) -> Any:
    """Return a kernel whose launches compute by torch, in float32; the columns of each are put into a list."""

    def launch(a: Any, b: Any, **given: Any) -> Any:
        launched.append(b.shape[1])
        w = a.matrix.to_dense().float()
        found = (w.mT if kernel.spec.transpose_a else w) @ b.float()
        if given["c"] is not None and given["beta"] != 0:
            found = found + given["beta"] * given["c"].float()
        if given["bias"] is not None:
            found = found + given["bias"].float()[:, None]
        checked = {name: given[name] for name in ("c", "beta", "bias", "out", "scales")}
        own = given["own_out"]
        kernel._check(a.matrix, b, **checked, own_stride=None if own is None else own.stride(0))
        into = given["out"] if given["out"] is not None else own
        into = kernel._empty(found.shape, b) if into is None else into
        return into.copy_(found)

    kernel._one = launch
    return kernel


def random_batch(batch: int, rows: int, columns: int, how: str) -> Any:
    """Return a batch as callers may have stored it."""
    padded = -(-columns // 8) * 8
    if how == "columns":
        return torch.randn(batch, columns, rows).half().mT
    if how == "side by side":
        return torch.randn(rows, batch, padded).half().transpose(0, 1)[..., :columns]
    made = torch.randn(1 if how == "expanded" else batch, rows, padded + 8 * (how == "strided")).half()[..., :columns]
    return made.expand(batch, -1, -1)


@pytest.mark.parametrize("columns", [8, 24, 77])
def test_a_batch_is_computed_in_few_launches(make: Make, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, launched = 50, []
    a = torch.sparse_bsr_tensor(
        A.crow_indices(), A.col_indices(), torch.randn(3, 64, 64).half(), size=A.shape, check_invariants=False
    )
    kernel = computing(make(accumulate=True), launched)
    for how in ("rows", "strided", "side by side", "expanded"):
        b, c = random_batch(batch, 192, columns, how), random_batch(batch, 192, columns, "rows")
        right = a.to_dense().float() @ b.float() - 0.5 * c.float()
        out = kernel(a, b, c=c, beta=-0.5)
        torch.testing.assert_close(out.float(), right, atol=2e-2, rtol=1e-2)
        assert not out._is_view(), "a view of a custom function must not be written to"
        nothing = random_batch(batch, 192, columns, "rows").fill_(torch.nan)
        torch.testing.assert_close(
            kernel(a, b, c=nothing, beta=0.0).float(), right + 0.5 * c.float(), atol=2e-2, rtol=1e-2
        )
        if columns % 8 == 0:
            for into in ("rows", "strided", "side by side"):
                given = random_batch(batch, 192, columns, into)
                assert kernel(a, b, c=c, beta=-0.5, out=given) is given
                torch.testing.assert_close(given.float(), right, atol=2e-2, rtol=1e-2)
            torch.testing.assert_close(kernel(a, b, c=c, beta=-0.5, out=c).float(), right, atol=2e-2, rtol=1e-2)
    assert set(launched) == {batch * (-(-columns // 8) * 8)}, "one launch for each call"
    launched.clear()
    by_columns = computing(make(b_layout="column_major"), launched)
    b = random_batch(batch, 192, columns, "columns")
    torch.testing.assert_close(by_columns(a, b).float(), a.to_dense().float() @ b.float(), atol=2e-2, rtol=1e-2)
    assert len(launched) == 1
    monkeypatch.setattr(bsr_batch, "COPIED_BYTES", 7 * 192 * 2 * 80)  # of memory for seven matrices, or three and c
    found = computing(make(), launched)(a, random_batch(batch, 192, columns, "strided"))
    assert found.shape == (batch, 192, columns) and len(launched) == 1 + -(-batch * (-(-columns // 8) * 8) // (7 * 80))


def test_a_batch_of_many_matrices_is_one_launch(make: Make) -> None:
    launched: list[int] = []
    many = torch.zeros(192, 66_000, 8, dtype=torch.float16).transpose(0, 1)  # side by side
    assert computing(make(), launched)(A, many).shape == (66_000, 192, 8) and launched == [66_000 * 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": dense(0, 192, 128)}, r"b: is empty: \(0, 192, 128\)"),
        ({"b": dense(2, 64, 128)}, r"b: has shape \(64, 128\), expected \(K 192, N\)"),
        ({"out": dense(192, 128)}, r"out: is \(192, 128\), expected \(batch 2, M, N\)"),
        ({"out": dense(3, 192, 128)}, r"out: is \(3, 192, 128\), expected \(batch 2, M, N\)"),
        ({"out": dense(1, 192, 128).expand(2, -1, -1)}, "out: is expanded in dimension 0"),
        ({"c": dense(192, 128)}, r"c: is \(192, 128\), expected \(batch 2, M, N\)"),
        ({"c": 3}, r"c: is int, expected \(batch 2, M, N\)"),
        ({"b": dense(2, 192, 132)}, "b: has stride 132 in dimension 0"),
    ],
)
def test_what_is_wrong_with_a_batch(make: Make, change: dict[str, Any], message: str) -> None:
    kernel = make(accumulate=True)
    call = {"b": dense(2, 192, 128), "c": dense(2, 192, 128)} | change
    with pytest.raises(ArgumentError, match=message):
        kernel(A, **call)
    assert not kernel._loaded.launches


def test_beta_reaches_the_kernel(make: Make) -> None:
    kernel = make(accumulate=True)
    b, c = dense(192, 128), dense(192, 128)
    kernel(A, b, c=c)
    kernel(A, b, c=c, beta=-2)
    kernel(A, b, c=c, beta=0.0, out=c)
    assert [signature["numbers"]["beta"] for signature in kernel._loaded.signatures] == [1.0, -2.0, 0.0]
    assert {launch["c_in"] for launch in kernel._loaded.launches} == {c.data_ptr()}


WIDE = dense(192, 256)


@pytest.mark.parametrize(
    ("accumulate", "change", "message"),
    [
        (False, {"c": dense(192, 128)}, r"c: is not an argument of bsr_spmm_\w+: its spec does not accumulate"),
        (False, {"beta": 0.5}, r"beta: is not an argument of bsr_spmm_\w+: its spec does not accumulate"),
        (True, {}, r"c: is missing: bsr_spmm_\w+ computes A @ B \+ beta c"),
        (True, {"c": dense(192, 120)}, r"c: has shape \(192, 120\), expected \(M 192, N 128\)"),
        (True, {"c": dense(192, 129)[:, :128]}, r"c: has stride 129 in dimension 0"),
        (True, {"c": dense(192, 128), "beta": float("nan")}, "beta: is nan, expected a finite float32"),
        (True, {"c": dense(192, 128), "beta": 1e39}, r"beta: is 1e\+39, expected a finite float32"),
        (True, {"c": dense(192, 128), "beta": "1"}, "beta: is str, expected a number"),
        (True, {"c": WIDE[:, :128], "out": WIDE[:, 64:192]}, "c: overlaps out; it must be out itself"),
        (True, {"c": WIDE[:96].view(192, 128), "out": WIDE[:, :128]}, "c: overlaps out"),
    ],
)
def test_what_is_wrong_with_c_and_beta(make: Make, accumulate: bool, change: dict[str, Any], message: str) -> None:
    kernel = make(**({"accumulate": True} if accumulate else {}))
    with pytest.raises(ArgumentError, match=message):
        kernel(A, dense(192, 128), **change)
    assert not kernel._loaded.launches


def test_c_may_lie_beside_out(make: Make) -> None:
    kernel = make(accumulate=True)
    kernel(A, dense(192, 128), c=WIDE[:, :128], out=WIDE[:, 128:])
    kernel(A, dense(192, 128), c=WIDE[:, 128:], out=WIDE[:, :128])
    kernel(A, dense(192, 128), c=WIDE[:, :128], out=WIDE[:, :128])
    assert len(kernel._loaded.launches) == 3


@pytest.mark.parametrize("epilogue", [None, {"activation": "relu"}, {"bias": True, "activation": "gelu"}])
@pytest.mark.parametrize("beta", [None, 0.0, -1.0])
def test_without_blocks_only_the_epilogue_is_computed(
    make: Make, epilogue: dict[str, Any] | None, beta: float | None
) -> None:
    fields: dict[str, Any] = {} if epilogue is None else {"epilogue": epilogue}
    kernel = make(**fields, **({} if beta is None else {"accumulate": True}))
    torch.manual_seed(0)
    c, bias = torch.randn(192, 40).half(), torch.randn(192).half()
    if beta == 0:
        c[0, 0] = torch.nan
    call: dict[str, Any] = {} if beta is None else {"c": c, "beta": beta}
    expected = torch.zeros(192, 40) + (beta * c.float() if beta else 0)
    if epilogue and epilogue.get("bias"):
        call["bias"] = bias
        expected += bias.float()[:, None]
    if epilogue:
        expected = bsr_spmm.ACTIVATIONS[epilogue["activation"]](expected)
    found = kernel(matrix([0, 0, 0, 0], []), dense(192, 40), **call)
    assert torch.equal(found, expected.half()) and not kernel._loaded.launches


def test_a_gradient_is_refused_unless_it_is_off(make: Make) -> None:
    kernel = make(accumulate=True)
    a = A.detach().requires_grad_()
    with pytest.raises(ArgumentError, match="a: requires a gradient"):
        kernel(a, dense(192, 128), c=dense(192, 128))
    with torch.no_grad():
        kernel(a, dense(192, 128), c=dense(192, 128))
    with pytest.raises(ArgumentError, match="a: requires a gradient"):  # also where the shape is known by now
        kernel(a, dense(192, 128), c=dense(192, 128))


def test_block_rows_are_ordered_by_length(make: Make) -> None:
    kernel = make(scheduler="dynamic")
    a, b = matrix([0, 1, 1, 3], [2, 0, 1]), dense(192, 304)
    prepared = kernel.prepare(a)
    order = prepared.row_order
    assert order.tolist() == [2, 0, 1] and order.dtype == torch.int32 and prepared.matrix is a
    kernel(prepared, b, validate=True)
    kernel(a, dense(3, 192, 304))
    given, *found = kernel._loaded.launches
    assert given["row_order"] == order.data_ptr()
    assert len(found) == 1 and found[0]["row_order"] > 0
    assert [signature["numbers"]["column_tiles"] for signature in kernel._loaded.signatures] == [1, 2]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (torch.tensor([0, 1]).int(), r"a\.row_order: has shape \(2,\), expected \(block rows 3\)"),
        (torch.tensor([0, 1, 2]), r"a\.row_order: dtype or rank"),
        (torch.tensor([0, 9, 1, 9, 2, 9]).int()[::2], r"a\.row_order: has stride 2"),
        (torch.tensor([0, 1, 1]).int(), r"a\.row_order: does not name each of the 3 block rows once"),
    ],
)
def test_what_is_wrong_with_an_order(make: Make, order: Any, message: str) -> None:
    kernel = make(scheduler="dynamic")
    with pytest.raises(ArgumentError, match=message):
        kernel(PreparedBsr(A, order), dense(192, 128), validate=True)
    assert not kernel._loaded.launches


PREPARED_BY: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"size": 16}, r"has no order of block rows"),
    "cut": ({"size": 16, "scheduler": "dynamic"}, "has split block rows"),
    "gathered": (
        {"size": 16, "tile": {"m": 384, "n": 128, "k": 16}, "stages": 4},
        "has row clusters",
    ),
    "transposed": ({"size": 64, "transpose_a": True}, "has a transposed index|has no order of block rows"),
    "ordered": ({"size": 64, "scheduler": "dynamic"}, "has block rows by length"),
    "plain": ({"size": 64}, "has no transposed index|has no order of block rows"),
}


@pytest.mark.parametrize("other", PREPARED_BY)
@pytest.mark.parametrize("name", PREPARED_BY)
def test_a_matrix_is_prepared_for_one_kind_of_kernel(make: Make, name: str, other: str) -> None:
    (fields, _), (others, message) = PREPARED_BY[name], PREPARED_BY[other]
    if fields["size"] != others["size"]:
        message = "has blocks of"
    kernel, a = make(**fields), matrix([0, 1, 1, 3], [2, 0, 1], size=others["size"])
    prepared = make(**others).prepare(a)
    if name == other:
        kernel(prepared, dense(3 * others["size"], 128), validate=True)
        return
    with pytest.raises(ArgumentError, match=rf"^a: (is prepared for another kernel: it )?({message})"):
        kernel(prepared, dense(3 * others["size"], 128))
    assert not kernel._loaded.launches


@pytest.mark.parametrize(
    ("fields", "more", "message"),
    [
        ({}, {"pack": True}, r"pack: is True, but bsr_spmm_\w+ reads a where it is"),
        ({}, {"effort": "some"}, "effort: is 'some'; allowed: fast, best"),
        ({"scheduler": "dynamic"}, {"columns": dense(192, 128)}, "columns: is Tensor, expected the columns of b"),
        ({}, {"columns": 0}, "columns: is 0, expected the columns of b"),
    ],
)
def test_what_cannot_be_prepared(make: Make, fields: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        make(**fields).prepare(A, **more)


def test_what_is_prepared_stays_with_other_values(make: Make) -> None:
    kernel = make(scheduler="dynamic")
    prepared = kernel.prepare(A)
    other = prepared.with_values(dense(3, 64, 64, fill=2.0))
    assert other.row_order is prepared.row_order and other.matrix.values().unique().tolist() == [2.0]
    assert torch.equal(other.matrix.col_indices(), A.col_indices()) and other.matrix.shape == A.shape
    kernel(other, dense(192, 128), validate=True)
    assert kernel._loaded.launches[0]["a"] == other.matrix.values().data_ptr()
    with pytest.raises(ArgumentError, match=r"values: has shape \(2, 64, 64\), expected \(3, 64, 64\)"):
        prepared.with_values(dense(2, 64, 64))
    with pytest.raises(ArgumentError, match="values: is on meta, but the matrix is on cpu"):
        prepared.with_values(dense(3, 64, 64).to("meta"))
    with pytest.raises(ArgumentError, match=r"values: is list, expected a torch\.Tensor"):
        prepared.with_values([1.0])
    with pytest.raises(ArgumentError, match=r"another kernel: it has list, bsr_spmm_\w+ takes block rows by length"):
        kernel(replace(prepared, row_order=[2, 0, 1]), dense(192, 128))


def test_a_prepared_matrix_says_what_it_has(make: Make) -> None:
    a = matrix([0, 1], [0], size=16)
    stored = r"<prepared BSR matrix (16, 48), 1 stored blocks"
    assert repr(make(size=16).prepare(a)) == f"{stored}>"
    assert repr(make(**GATHERED).prepare(a, pack=True)) == f"{stored}, row clusters, packed>"
    transposed = make(transpose_a=True).prepare(A)
    assert repr(transposed) == "<prepared BSR matrix (192, 192), 3 stored blocks, transposed index>"


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_long_block_rows_are_cut(make: Make, index: Any) -> None:
    kernel = make(size=16, scheduler="dynamic")
    lengths = [2, 250, 0, 120]
    crow = [0, 2, 252, 252, 372]
    a, b = matrix(crow, [0] * 372, index=index, size=16), dense(48, 1000)
    prepared = kernel.prepare(a)
    order = prepared.row_order
    assert order.total.tolist() == [6] and order.chunks.shape == (4 + sum(lengths) // 120, 4)
    first, second, third, *whole = order.chunks[:6].tolist()
    assert [first, second, third] == [[1, 2, 85, 0], [1, 85, 168, 0], [1, 168, 252, 0]]
    assert whole == [[3, 252, 372, -1], [0, 0, 2, -1], [2, 252, 252, -1]]
    kernel(prepared, b, validate=True)
    kernel(a, b)
    given, found = kernel._loaded.launches
    assert given["chunks"] == order.chunks.data_ptr() and given["chunk_count"] == order.total.data_ptr()
    assert all(launch["parts"] and launch["chunks_done"] == launch["scheduler"] + 8 for launch in (given, found))
    (signature,) = kernel._loaded.signatures
    numbers = {"index_words": 2 if index == torch.int64 else 1, "n": 1000, "chunk_blocks": 120}
    assert signature["numbers"] == numbers | {"column_tiles": 2, "group_tiles": 2, "whole_rows": 32}
    assert signature["tiles"] == 7 * 2  # as many as there can be


def test_rows_are_cut_for_a_number_of_columns(make: Make) -> None:
    kernel = make(size=16, scheduler="dynamic")
    a = matrix([0, 64, 128, 128], [0] * 128, size=16)
    cut = kernel.compiled.plan.row_cutting.cut(3, 128, 2, 132)
    order = split_rows(a.crow_indices(), cut, 1)  # on a GPU, that of prepare(a, 1000)
    assert kernel.prepare(a, 1000).row_order.limit == 120 > cut.limit == order.limit
    kernel(PreparedBsr(a, order), dense(48, 1000), validate=True)
    kernel(a, dense(48, 1000))
    cut_signature, whole = kernel._loaded.signatures
    assert cut_signature["numbers"]["chunk_blocks"] == cut.limit and cut_signature["tiles"] == cut.chunks * 2
    assert whole["numbers"]["chunk_blocks"] == 120 and whole["tiles"] == 4 * 2
    for columns in (0, True, 1000.0):
        with pytest.raises(ArgumentError, match=r"columns: is .*, expected the columns of b, an int of at least 1"):
            kernel.prepare(a, columns)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 64),
        ({"scheduler": "dynamic"}, 64),
        ({"scheduler": "dynamic"}, 16),
        ({"transpose_a": True}, 64),
        ({"tile": {"m": 384, "n": 128, "k": 16}}, 16),
    ],
    ids=str,
)
def test_parts_are_read_as_the_matrix_that_they_make(
    make: Make, fields: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, b = make(size=size, **fields), dense(3 * size, 304)
    prepared = kernel.prepare(matrix([0, 1, 1, 3], [2, 0, 1], size=size, index=torch.int32), 304)
    of_matrix = parts_of_prepared(prepared)
    how = json.loads(of_matrix.how) if of_matrix.order else {}
    parts = Parts(of_matrix, how, of_matrix.index)
    kernel(prepared, b)
    kernel._multiply_parts(parts, b)
    assembled = []
    monkeypatch.setattr(Parts, "assembled", lambda parts: assembled.append(parts) or prepared)
    for _ in range(2):
        assert kernel._multiply_parts(parts, b).shape == (3 * size, 304)
    assert len(kernel._loaded.signatures) == 1 and not assembled  # like parts are neither checked nor put together
    tensors = (of_matrix.values, of_matrix.crow_indices, of_matrix.col_indices, *of_matrix.order, *of_matrix.index, b)
    given = {tensor.data_ptr() for tensor in tensors}
    read = [{name: at for name, at in launch.items() if at in given} for launch in kernel._loaded.launches]
    assert len(read) == 4 and all(each == read[0] for each in read) and len(read[0]) > 3
    kernel._multiply_parts(parts, b, validate=True)
    assert len(assembled) == 1
    indices = [*of_matrix.order, *of_matrix.index]
    if indices:  # at an address that copies cannot begin at
        moved = [torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape) for x in indices]
        order, index = tuple(moved[: len(of_matrix.order)]), tuple(moved[len(of_matrix.order) :])
        kernel._multiply_parts(Parts(replace(of_matrix, order=order, index=index), how, index), b)
        assert len(assembled) == 2


def test_what_is_left_of_cut_rows_has_places(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(workspace, "scratch", lambda device, size: asked.append(size) or torch.zeros(1))
    monkeypatch.setattr(
        workspace, "counters", lambda device, stream, number: asked.append(number) or torch.zeros(number).int()
    )
    kernel = make(size=32, scheduler="dynamic")
    kernel(matrix([0, 120, 120], [0] * 120, size=32), dense(96, 1000))
    assert asked == [2] and kernel._loaded.launches[0]["parts"] == 0
    kernel(matrix([0, 121, 121], [0] * 121, size=32), dense(96, 1000))
    assert asked[1:] == [2 + 2 * 2 * 2, 2 * 2 * 32 * 512 * 4]  # two parts, column tiles, warpgroups


GATHERED = {"size": 16, "tile": {"m": 384, "n": 128, "k": 16}, "stages": 4}


def test_block_rows_are_gathered(make: Make) -> None:
    kernel = make(**GATHERED)
    rows = 30
    a = matrix(list(range(0, 2 * rows + 1, 2)), [0, 7] * rows, columns=8, size=16)
    prepared = kernel.prepare(a)
    order = prepared.row_order
    assert order.rows.shape == (2, 24) and order.rounds.shape[0] == 4  # two groups of rows with the same columns
    kernel(prepared, dense(128, 1000), validate=True)
    kernel(prepared, dense(2, 128, 1000))
    given, *found = kernel._loaded.launches
    assert given["rounds"] == order.rounds.data_ptr() and given["slot_rows"] == order.rows.data_ptr()
    assert len(found) == 1
    signature, of_both = kernel._loaded.signatures
    assert of_both["numbers"]["n"] == 2000
    # Four clusters of two column tiles; a launch has as many thread blocks as these have.
    assert signature["numbers"] == {"groups": 2, "tiles": 8, "n": 1000, "whole_rows": 112}
    assert signature["tiles"] == 16 and signature["prologue_grid"] == 4


def test_groups_are_counted_for_clusters(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(bsr_preparation, "count_groups", lambda *given: asked.append(given) or 2)
    make(**GATHERED).prepare(matrix([0] * 31, [], size=16), 1100)
    assert asked == [(30, 24, 5, 0)]  # nine column tiles


@pytest.mark.parametrize(("more", "anneals"), [({}, False), ({"effort": "fast"}, False), ({"effort": "best"}, True)])
def test_rows_are_exchanged_where_that_is_asked_for(
    make: Make, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], anneals: bool
) -> None:
    annealed: list[Any] = []
    monkeypatch.setattr(row_clusters, "_anneal", lambda wants, group, lengths: annealed.append(group) or group)
    a = matrix(list(range(31)), [0, 1, 2] * 10, columns=40, size=16)
    make(**GATHERED).prepare(a, **more)
    assert bool(annealed) == anneals


def test_columns_out_of_range_are_gathered(make: Make) -> None:
    kernel = make(**GATHERED)
    a = matrix([0, 2, 3], [5, -1, 1], columns=3, size=16)
    prepared = kernel.prepare(a)
    columns = prepared.row_order.rounds[:, :15]
    assert set(columns.flatten().tolist()) <= {0, 1, 3}  # 3: behind B, whose rows there are zeros
    kernel(prepared, dense(48, 128))
    with pytest.raises(ArgumentError, match=r"a.col_indices\(\): ranges from -1 to 5, allowed: 0 to 2"):
        kernel(prepared, dense(48, 128), validate=True)


def test_a_matrix_without_blocks_is_gathered(make: Make) -> None:
    kernel = make(**GATHERED)
    a = matrix([0, 0, 0], [], size=16)
    found = kernel(kernel.prepare(a), dense(48, 128), validate=True)
    assert found.shape == (32, 128) and not found.any() and not kernel._loaded.launches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda order: None,
            r"another kernel: it has no order of block rows, bsr_spmm_\w+ takes row clusters",
        ),
        (
            lambda order: order.rows,
            r"another kernel: it has block rows by length, bsr_spmm_\w+ takes row clusters",
        ),
        (lambda order: order._replace(rounds=order.rounds[:1]), r"row_order.entries: is torch.int32 \(2, 24, 2\)"),
        (lambda order: order._replace(starts=order.starts.long()), "row_order.starts: is torch.int64"),
        (lambda order: order._replace(rounds=None), r"row_order.rounds: is None, expected a tensor"),
        (lambda order: order._replace(starts=[0, 1]), r"row_order.starts: is \[0, 1\], expected a tensor"),
        (lambda order: order._replace(rows=order.rows[:0]), r"row_order.starts: is torch.int32 \(2,\)"),
        (lambda order: order._replace(rounds=order.rounds.T.contiguous().T), "row_order.rounds: has strides"),
        (
            lambda order: order._replace(ring_columns=5),
            "row_order: is for a ring of 5 columns, that of this kernel has",
        ),
        (lambda order: order._replace(rows=order.rows.flip(1)), r"row_order: is not what prepare\(a\) returns"),
        (lambda order: order._replace(entries=order.entries.flip(0)), r"row_order: is not what prepare\(a\) returns"),
    ],
)
def test_what_is_wrong_with_groups(make: Make, change: Any, message: str) -> None:
    kernel = make(**GATHERED)
    a = matrix([0, 2, 4, 5], [2, 0, 1, 2, 0], size=16)
    prepared = kernel.prepare(a)
    with pytest.raises(ArgumentError, match=message):
        kernel(replace(prepared, row_order=change(prepared.row_order)), dense(48, 128), validate=True)
    with pytest.raises(ArgumentError, match=r"^a: is not prepared: bsr_spmm_\w+ takes what its prepare\(a, columns\)"):
        kernel(a, dense(48, 128))
    assert not kernel._loaded.launches


def test_groups_of_another_matrix(make: Make) -> None:
    kernel = make(**GATHERED)
    small, large = matrix([0, 1, 2], [0, 1], size=16), matrix(list(range(31)), [0] * 30, size=16)
    wide = matrix([0, 1, 2], [0, 1], columns=4, size=16)
    for a, other in ((small, large), (large, small), (small, wide)):
        with pytest.raises(ArgumentError, match=r"row_order: is of a matrix of \d+ x [34] blocks, \d+ of them stored"):
            kernel(replace(kernel.prepare(other), matrix=a), dense(48, 128))
    assert not kernel._loaded.launches


def test_a_matrix_that_cannot_be_gathered(make: Make) -> None:
    kernel = make(**GATHERED)
    for crow, blocks in (([0, 2, 1], 1), ([0, 1, 1], 2), ([1, 2, 3], 3)):
        a = matrix(crow, [0] * blocks, size=16)
        with pytest.raises(
            ArgumentError, match=r"a.crow_indices\(\): must ascend from 0 to the number of stored blocks"
        ):
            kernel.prepare(a)
        prepared = kernel.prepare(matrix([0, blocks, blocks], [0] * blocks, size=16))
        with pytest.raises(
            ArgumentError, match=r"a.crow_indices\(\): must ascend from 0 to the number of stored blocks"
        ):
            kernel(replace(prepared, matrix=a), dense(48, 128), validate=True)
    other = matrix([0, 1], [0], size=32)
    prepared = make(**GATHERED | {"size": 32, "tile": {"m": 384, "n": 128, "k": 32}, "stages": 3}).prepare(other)
    with pytest.raises(ArgumentError, match=r"a: has blocks of \(32, 32\), this kernel takes \(16, 16\)"):
        kernel(prepared, dense(96, 128))


def test_packets_are_of_one_call(make: Make) -> None:
    kernel = make(**GATHERED)
    a = matrix([0, 2, 4, 5], [2, 0, 1, 2, 0], size=16)
    prepared, kept = kernel.prepare(a), []
    kernel._loaded.launch = lambda signature, addresses, stream, prologue: kept.append(addresses["packets"])
    allocate, held = torch.empty, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **more: held.append(allocate(*shape, **more)) or held[-1])
        for _ in range(2):
            kernel(prepared, dense(48, 128), out=dense(48, 128))
    size = prepared.row_order.rounds.shape[0] * (24 * 512 + 96)
    assert len(set(kept)) == 2 and {tensor.numel() for tensor in held} == {size}


def test_a_is_packed_once_where_calls_are_given_it(make: Make) -> None:
    kernel = make(**GATHERED)
    a = matrix([0, 2, 4, 5], [2, 0, 1, 2, 0], size=16)
    prepared = kernel.prepare(a, pack=True)
    order, packed = prepared.row_order, prepared.packed
    assert packed.dtype == torch.uint8 and packed.shape == (order.rounds.shape[0] * (24 * 512 + 96),)
    addresses = {"a": a.values(), "packets": packed, "entries": order.entries}
    assert kernel._loaded.packed == [(order.rounds.shape[0], {name: t.data_ptr() for name, t in addresses.items()})]
    kernel(prepared, dense(48, 128))
    kernel(prepared, dense(2, 48, 128))
    assert {launch["packets"] for launch in kernel._loaded.launches} == {packed.data_ptr()}
    assert kernel._loaded.prologues == [False] * 2 and len(kernel._loaded.packed) == 1
    other = prepared.with_values(dense(5, 16, 16, fill=1.0))
    assert other.packed is None
    again = kernel.prepare(other, pack=True)
    assert again.row_order is order and again.packed is not packed and kernel.prepare(again).packed is None
    assert kernel._loaded.packed[1][1]["a"] == other.matrix.values().data_ptr()
    with pytest.raises(ArgumentError, match="columns: is 128, but a is prepared: what follows from the places"):
        kernel.prepare(again, 128)


def test_a_batch_packs_a_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bsr_batch, "ALONE_BYTES", 0)  # as if matrices were large
    kernel = make(**GATHERED)
    a = matrix([0, 2, 4, 5], [2, 0, 1, 2, 0], size=16)
    kernel(kernel.prepare(a), dense(3, 48, 128))
    assert kernel._loaded.prologues == [True, False, False]
    assert len({launch["packets"] for launch in kernel._loaded.launches}) == 1
    copying = make(size=16, b_layout="column_major")  # which copies each B
    copying(matrix([0, 1], [0], size=16), dense(3, 132, 48)[:, :128].mT)
    assert copying._loaded.prologues == [True] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda packed: [packed], r"a\.packed: is list, expected a torch\.Tensor"),
        (
            lambda packed: packed[:-1],
            r"packed: is torch.uint8 \(24767,\) on cpu, expected torch.uint8 \(24768,\) on cpu",
        ),
        (lambda packed: packed.view(torch.int8), r"packed: is torch.int8 \(24768,\) on cpu"),
        (lambda packed: packed.to("meta"), r"packed: is torch.uint8 \(24768,\) on meta"),
        (lambda packed: packed.repeat(2)[::2], r"packed: has strides \(2,\), expected a contiguous tensor"),
        (lambda packed: packed.repeat(2)[1:24769], r"packed: starts at address 0x\w+, which is not a multiple of 16"),
        (lambda packed: packed ^ 1, r"a\.packed: is not what prepare\(a, pack=True\) returns: a has other values now"),
    ],
)
def test_what_is_wrong_with_packed(make: Make, change: Any, message: str) -> None:
    kernel = make(**GATHERED)
    a = matrix([0, 2, 4, 5], [2, 0, 1, 2, 0], size=16)
    prepared = kernel.prepare(a, pack=True)  # zeros: nothing writes what is packed here
    kernel(prepared, dense(48, 128), validate=True)
    with pytest.raises(ArgumentError, match=message):
        kernel(replace(prepared, packed=change(prepared.packed)), dense(48, 128), validate=True)
    assert len(kernel._loaded.launches) == 1


def test_packed_values_do_not_outlive_their_type(make: Make) -> None:
    """Bytes that were packed of one 16-bit type are as many as those of another."""
    kernel, other = make(**GATHERED), make(**GATHERED, dtype="bf16")
    a = matrix([0, 2, 4, 5], [2, 0, 1, 2, 0], size=16)
    prepared = kernel.prepare(a, pack=True)
    cast = replace(prepared, matrix=a.to(torch.bfloat16))
    with pytest.raises(ArgumentError, match=r"^a\.packed: is of fp16, bsr_spmm_\w+ takes bf16: pack the values by"):
        other(cast, dense(48, 128).bfloat16())
    with pytest.raises(ArgumentError, match=r"^a\.packed: is of an unknown type"):
        kernel(replace(prepared, kernel=""), dense(48, 128))
    parts = parts_of_prepared(prepared)
    how = json.loads(parts.how)
    kernel(prepared_of(parts.to_sparse(), how, parts.order, parts.index), dense(48, 128))  # of their own type
    for values in (parts.values.bfloat16(), parts.values.clone()):
        given = parts.with_values(values)
        assert len(given.order) == 4 and len(parts.order) == 5
        assert prepared_of(given.to_sparse(), how, given.order, given.index).packed is None
    assert not other._loaded.launches and len(kernel._loaded.launches) == 1


def test_what_cannot_be_packed(make: Make) -> None:
    kernel, plain = make(**GATHERED), make(size=16)
    a = matrix([0, 1], [0], size=16)
    prepared = kernel.prepare(a, pack=True)
    with pytest.raises(ArgumentError, match=r"^a: is prepared for another kernel: it is packed, bsr_spmm_\w+ takes"):
        plain(replace(plain.prepare(a), packed=prepared.packed), dense(48, 128))
    with pytest.raises(ArgumentError, match=r"^a: has blocks of \(32, 32\), this kernel takes \(16, 16\)"):
        kernel.prepare(matrix([0, 1], [0], size=32), pack=True)
    other = replace(prepared, matrix=a.to(torch.bfloat16))
    for given in (
        lambda: kernel.prepare(other, pack=True),
        lambda: kernel(other, dense(48, 128)),
        lambda: kernel(other, dense(48, 128), validate=True),  # nothing is packed to compare it
    ):
        with pytest.raises(ArgumentError, match=r"^a: is torch.bfloat16, this kernel takes torch.float16"):
            given()
    with pytest.raises(ArgumentError, match=r"^a\.values\(\): starts at address 0x"):
        kernel.prepare(shifted_values(a), pack=True)
    assert len(kernel._loaded.packed) == 1 and not plain._loaded.launches


def test_nothing_is_packed_where_nothing_is_stored(make: Make) -> None:
    kernel = make(**GATHERED)
    prepared = kernel.prepare(matrix([0, 0, 0], [], size=16), pack=True)
    assert prepared.packed.shape == (0,) and not kernel._loaded.packed
    assert not kernel(prepared, dense(48, 128), validate=True).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda order: order.chunks,
            r"another kernel: it has block rows by length, bsr_spmm_\w+ takes split block rows",
        ),
        (lambda order: order._replace(chunks=order.chunks[1:]), r"row_order.chunks: is torch.int32 \(3, 4\)"),
        (lambda order: order._replace(total=order.total.long()), "row_order.total: is torch.int64"),
        (lambda order: order._replace(chunks=order.chunks.T.contiguous().T), "row_order.chunks: has strides"),
        (lambda order: order._replace(limit=0), "row_order.limit: is 0, expected a positive multiple of 1"),
        (lambda order: order._replace(limit=40), r"row_order.chunks: is torch.int32 \(4, 4\)"),
        (lambda order: order._replace(total=order.total - 1), r"row_order: is not what prepare\(a\) returns"),
        (lambda order: order._replace(chunks=order.chunks.flip(0)), r"row_order: is not what prepare\(a\) returns"),
    ],
)
def test_what_is_wrong_with_chunks(make: Make, change: Any, message: str) -> None:
    kernel = make(size=32, scheduler="dynamic")
    a = matrix([0, 140, 141, 143], [0] * 143, size=32)
    prepared = kernel.prepare(a)
    with pytest.raises(ArgumentError, match=message):
        kernel(replace(prepared, row_order=change(prepared.row_order)), dense(96, 128), validate=True)
    assert not kernel._loaded.launches


def test_tiles_of_two_block_rows_are_numbered_in_pairs(make: Make) -> None:
    kernel = make(tile={"m": 128, "n": 256, "k": 64})
    kernel(A, dense(192, 512))
    (signature,) = kernel._loaded.signatures
    assert signature["numbers"] == {"index_words": 2, "block_rows": 3, "row_pairs": 2, "tiles": 4, "n": 512}
    assert signature["tiles"] == 4


def test_blocks_are_listed_by_column(make: Make) -> None:
    kernel = make(transpose_a=True)
    a = matrix([0, 2, 2, 5], [2, 0, 7, 0, 2], columns=4)  # a column out of range belongs to none
    prepared = kernel.prepare(a)
    index = prepared.index
    assert index.column_starts.tolist() == [0, 2, 2, 4, 4]
    assert index.entries[:4].tolist() == [[1, 0], [3, 2], [0, 0], [4, 2]]
    assert index.column_starts.dtype == index.entries.dtype == torch.int32
    out = kernel(prepared, dense(192, 304))
    assert out.shape == (256, 304)
    assert kernel(a, dense(2, 192, 304)).shape == (2, 256, 304)
    given, *found = kernel._loaded.launches
    assert (given["column_starts"], given["entries"]) == tuple(tensor.data_ptr() for tensor in index)
    assert len(found) == 1 and found[0]["entries"] > 0
    assert kernel._loaded.signatures[0]["numbers"] == {
        "tiles": 8,
        "block_columns": 4,
        "n": 304,
    }
    assert kernel(matrix([0, 0, 0, 0], [], columns=4), dense(192, 8)).tolist() == [[0.0] * 8] * 256


INDEX = TransposedIndex(torch.zeros(4, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32))


def with_index(**parts: Any) -> dict[str, Any]:
    return {"a": PreparedBsr(A, index=INDEX._replace(**parts))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": PreparedBsr(A, index=3)}, r"a\.index: is int, expected a TransposedIndex"),
        (with_index(column_starts=torch.zeros(5).int()), r"a\.index\.column_starts: is .*\(4,\)"),
        (with_index(entries=torch.zeros(3, 2)), r"a\.index\.entries: is torch\.float32 \(3, 2\)"),
        (with_index(entries=torch.zeros(2, 3).int().T), r"a\.index\.entries: has strides \(1, 3\)"),
        (with_index(entries=torch.zeros(7).int()[1:].view(3, 2)),
            r"a\.index\.entries: starts at address .* not a multiple of 8 bytes"),
        (with_index() | {"validate": True}, r"a\.index: is not what prepare\(a\) returns: a has other indices now"),
        ({"b": dense(128, 128)}, r"b: has shape \(128, 128\), expected \(M 192, N\)"),
        ({"a": torch.sparse_bsr_tensor(torch.zeros(2, 4).long(), torch.zeros(2, 0).long(),
            dense(2, 0, 64, 64), size=(2, 192, 192), check_invariants=False)}, "a: has 3 dimensions"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_index(make: Make, change: dict[str, Any], message: str) -> None:
    kernel = make(transpose_a=True)
    with pytest.raises(ArgumentError, match=message):
        kernel(**({"a": A, "b": dense(192, 128)} | change))
    assert not kernel._loaded.launches


@pytest.mark.parametrize("crow", [[0, 1, 1, 5], [0, 1, 1, 2], [1, 1, 1, 3], [0, 2, 1, 3]])
def test_row_pointers_are_validated_before_blocks_are_listed_by_column(make: Make, crow: list[int]) -> None:
    kernel = make(transpose_a=True)
    with pytest.raises(
        ArgumentError, match=r"a\.crow_indices\(\): must ascend from 0 to the number of stored blocks, 3"
    ):
        kernel(matrix(crow, [2, 0, 1]), dense(192, 128), validate=True)
    assert not kernel._loaded.launches


B = matrix([0, 1, 1, 2], [1, 0], columns=2)
PATTERN = matrix([0, 1, 3, 3], [1, 0, 1], columns=2)


def test_a_dense_product_of_two_sparse_matrices(make: Make) -> None:
    kernel = make(op="bsr_spgemm")
    out = kernel(A, B, validate=True)
    assert out.shape == (192, 128)
    (signature,), (launch,) = kernel._loaded.signatures, kernel._loaded.launches
    assert signature["numbers"]["runs"] == signature["tiles"] == 3 and launch["c"] == out.data_ptr()
    wide = dense(192, 192)
    assert kernel(A, B, out=wide[:, :128]).data_ptr() == wide.data_ptr()
    assert kernel._loaded.signatures[1]["tensors"]["c"] == ((192, 128), (192, 1))
    assert kernel(A, matrix([0, 0, 0, 0], [], columns=2), out=dense(192, 128, fill=1)).count_nonzero() == 0
    assert len(kernel._loaded.launches) == 2
    with pytest.raises(ArgumentError, match=r"pattern: is not an argument of bsr_spgemm_\w+: .* is dense"):
        kernel(A, B, PATTERN)


def test_tiles_that_are_handed_out_have_counters(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(workspace, "counters", lambda device, stream, number: asked.append(number) or COUNTERS)
    kernel = make(op="bsr_spgemm", scheduler="dynamic")
    kernel(A, B)
    kernel(A, B, out=dense(192, 256)[:, :128])
    (signature, _), (launch, _) = kernel._loaded.signatures, kernel._loaded.launches
    assert signature["numbers"]["column_blocks"] == 2 and signature["tiles"] == signature["numbers"]["tiles"] == 6
    assert launch["scheduler"] == COUNTERS.data_ptr()
    assert asked == [4 + 6, 4 + 6]  # an entry for each tile, all of which may be put off


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_no_tiles_and_too_many(make: Make, scheduler: str) -> None:
    kernel = make(op="bsr_spgemm", scheduler=scheduler)
    with pytest.raises(ArgumentError, match=r"^b: is empty: \(192, 0\)"):
        kernel(A, matrix([0, 0, 0, 0], [], columns=0))
    a = matrix([0] * 257, [])  # 256 block rows, each with a tile or, if static, a run of 4 tiles at a time
    most = (2**21 - 1) * (1 if scheduler == "dynamic" else 4)
    for columns in (most, most + 1):
        b = matrix([0, 1, 1, 1], [0], columns=columns)
        if columns == most:
            args = kernel.compiled.plan.problem(SpgemmShape(256 * 64, 192, b.shape[1]))
            assert args.numbers["column_blocks"] == most and args.tiles < 2**29
            continue
        with pytest.raises(
            ArgumentError, match=r"^b: has shape .*: with 16384 rows of a 2\^29 (runs of )?tiles or more"
        ):
            kernel(a, b)
    assert not kernel._loaded.launches


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [64, 128])
def test_a_product_on_a_pattern(make: Make, size: int, index: Any) -> None:
    kernel = make(op="bsr_spgemm", size=size, output="bsr")
    a, b = matrix([0, 1, 1, 3], [2, 0, 1], size=size), matrix([0, 1, 1, 2], [1, 0], columns=2, size=size)
    indices = (torch.tensor([0, 1, 3, 3], dtype=index), torch.tensor([1, 1, 0], dtype=index))
    values = torch.full((3, size, size), torch.nan)  # of another type, and not read
    pattern = torch.sparse_bsr_tensor(*indices, values, size=(3 * size, 2 * size), check_invariants=False)
    out = dense(3, size, size)
    c = kernel(a, b, pattern, out=out, validate=True)
    assert c.layout == torch.sparse_bsr and c.shape == (3 * size, 2 * size) and c.dtype == torch.float16
    assert c.values().data_ptr() == out.data_ptr() and torch.equal(c.col_indices(), pattern.col_indices())
    (signature,), (launch,) = kernel._loaded.signatures, kernel._loaded.launches
    words = 1 if index == torch.int32 else 2
    expected = {"a_index_words": 2, "b_index_words": 2, "c_index_words": words}
    assert signature["numbers"] == expected | {"inner_blocks": 3, "block_rows": 3, "blocks": 3}
    assert signature["tiles"] == 3
    assert signature["tensors"]["c"] == ((3, size, size), (size * size, size, 1))
    assert launch["c_col_indices"] == pattern.col_indices().data_ptr() and launch["c"] == out.data_ptr()
    kernel(a, b, pattern, out=out)
    assert kernel(a, b, pattern).values().shape == out.shape
    assert len(kernel._loaded.signatures) == 2 and len(kernel._loaded.launches) == 3


def test_a_pattern_without_blocks_and_matrices_without_blocks(make: Make) -> None:
    kernel = make(op="bsr_spgemm", output="bsr")
    nothing = matrix([0, 0, 0, 0], [], columns=2)
    assert kernel(A, B, nothing).values().shape == (0, 64, 64)
    out = dense(3, 64, 64, fill=1)
    assert kernel(A, nothing, PATTERN, out=out).values().count_nonzero() == 0 and not out.any()
    assert not kernel._loaded.launches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": None}, r"pattern: is missing: bsr_spgemm_\w+ computes the blocks of A @ B that it lists"),
        ({"pattern": dense(192, 128)}, r"pattern: is torch\.strided, expected a torch\.sparse_bsr tensor"),
        ({"pattern": A}, r"pattern: has shape \(192, 192\), expected \(M 192, N 128\)"),
        ({"pattern": matrix([0, 1, 1, 1], [0], size=128)}, r"pattern: has blocks of \(128, 128\), .* \(64, 64\)"),
        ({"pattern": matrix([0, 1, 1, 1], [7], columns=2)}, r"pattern\.col_indices\(\): ranges from 7 to 7, .* 0 to 1"),
        ({"b": matrix([0, 2, 2, 2], [1, 0], columns=2)}, r"b\.col_indices\(\): does not rise in block row 0"),
        ({"b": A, "a": B}, r"b: has shape \(192, 192\), expected \(K 128, N\)"),
        ({"out": dense(192, 128)}, "out: dtype or rank"),
        ({"out": dense(2, 64, 64)}, r"out: has shape \(2, 64, 64\), expected \(stored blocks 3, rows 64, cols 64\)"),
        ({"out": dense(3, 64, 64).mT}, r"out: has strides \(4096, 1, 64\), expected a contiguous tensor"),
    ],
)
def test_what_is_wrong_with_a_product_on_a_pattern(make: Make, change: dict[str, Any], message: str) -> None:
    kernel = make(op="bsr_spgemm", output="bsr")
    with pytest.raises(ArgumentError, match=message):
        kernel(**({"a": A, "b": B, "pattern": PATTERN, "validate": True} | change))
    assert not kernel._loaded.launches


def test_a_sampled_product_of_small_blocks(make: Make) -> None:
    kernel = make(op="bsr_sddmm", size=32)
    kernel(dense(96, 72), dense(96, 72), matrix([0, 1, 1, 3], [2, 0, 1], size=32))
    (signature,) = kernel._loaded.signatures
    numbers = {"index_words": 2, "block_rows": 3, "block_columns": 3, "blocks": 3, "steps": 2, "tiles": 1}
    assert signature["numbers"] == numbers and signature["tiles"] == 1


def test_groups_of_another_number_make_a_new_signature(make: Make) -> None:
    kernel = make(**GATHERED)
    a, b = matrix(list(range(31)), [0, 1, 2] * 10, size=16), dense(48, 128)
    whole = kernel.prepare(a).row_order
    indices = (a.crow_indices(), a.col_indices())
    split = cluster_rows(*indices, 3, slots=24, groups=3, ring_columns=whole.ring_columns)
    for order in (whole, split, whole):
        kernel(PreparedBsr(a, order), b, validate=True)
    first, second = kernel._loaded.signatures
    assert (first["numbers"]["groups"], second["numbers"]["groups"]) == (2, 3)
    assert (first["prologue_grid"], second["prologue_grid"]) == (whole.rounds.shape[0], split.rounds.shape[0])


def shifted(*shape: int) -> Any:
    """Return a tensor that begins 2 bytes behind a place where copies may begin."""
    size = torch.Size(shape).numel()
    return dense(size + 8)[1 : size + 1].view(shape)


@pytest.mark.parametrize("argument", ["b", "c", "out"])
def test_matrices_begin_where_copies_may(make: Make, argument: str) -> None:
    kernel = make(accumulate=True)
    call = {"b": dense(192, 128), "c": dense(192, 128), "out": dense(192, 128)}
    with pytest.raises(ArgumentError, match=rf"^{argument}: starts at address 0x"):
        kernel(A, **call | {argument: shifted(*call[argument].shape)})
    assert not kernel._loaded.launches


def test_orders_begin_where_copies_may(make: Make) -> None:
    kernel, a = make(size=32, scheduler="dynamic"), matrix([0, 140, 141, 143], [0] * 143, size=32)
    order = kernel.prepare(a).row_order
    table = torch.zeros(order.chunks.numel() + 4).int()[1:-3].view_as(order.chunks)
    with pytest.raises(ArgumentError, match=r"^a\.row_order\.chunks: starts at address 0x"):
        kernel(PreparedBsr(a, order._replace(chunks=table)), dense(96, 128))
    with pytest.raises(ArgumentError, match=r"^a\.row_order\.limit: is 120\.0, expected a positive multiple of 1"):
        kernel(PreparedBsr(a, order._replace(limit=120.0)), dense(96, 128))
    gathering, a = make(**GATHERED), matrix([0, 2, 4, 5], [2, 0, 1, 2, 0], size=16)
    groups = gathering.prepare(a).row_order
    entries = torch.zeros(groups.entries.numel() + 4).int()[1:-3].view_as(groups.entries)
    with pytest.raises(ArgumentError, match=r"^a\.row_order\.entries: starts at address 0x"):
        gathering(PreparedBsr(a, groups._replace(entries=entries)), dense(48, 128))


def shifted_values(a: Any) -> Any:
    indices, values = (a.crow_indices(), a.col_indices()), shifted(*a.values().shape)
    return torch.sparse_bsr_tensor(*indices, values, size=a.shape, check_invariants=False)


def test_stored_blocks_begin_where_copies_may(make: Make) -> None:
    with pytest.raises(ArgumentError, match=r"^a\.values\(\): starts at address 0x"):
        make()(shifted_values(A), dense(192, 128))
    for a, b, name in ((shifted_values(A), B, "a"), (A, shifted_values(B), "b")):
        with pytest.raises(ArgumentError, match=rf"^{name}\.values\(\): starts at address 0x"):
            make(op="bsr_spgemm")(a, b)
    sampled = [dense(192, 72), dense(192, 72), dense(3, 64, 64)]
    for place, name in enumerate(("a", "b", "out")):
        a, b, out = (shifted(*x.shape) if i == place else x for i, x in enumerate(sampled))
        with pytest.raises(ArgumentError, match=rf"^{name}: starts at address 0x"):
            make(op="bsr_sddmm")(a, b, A, out=out)


def test_a_batch_of_one_is_a_batch_and_its_matrix_is_validated(make: Make) -> None:
    kernel = make()
    assert kernel(A, dense(1, 192, 80)[:, :, :77], validate=True).shape == (1, 192, 77)
    wrong = matrix([0, 1, 1, 3], [2, 0, 9])
    for batch in (1, 3):
        with pytest.raises(ArgumentError, match=r"a\.col_indices\(\): ranges from 0 to 9, allowed: 0 to 2"):
            kernel(wrong, dense(batch, 192, 128), validate=True)
    assert len(kernel._loaded.launches) == 1


def test_a_factor_without_blocks_is_not_launched(make: Make) -> None:
    nothing = matrix([0, 0, 0, 0], [])
    for output, more, values in (("dense", (), (192, 128)), ("bsr", (PATTERN,), (3, 64, 64))):
        kernel, out = make(op="bsr_spgemm", output=output), dense(*values, fill=1)
        kernel(nothing, B, *more, out=out)
        assert not out.any() and not kernel._loaded.launches


def test_both_factors_are_validated_and_on_a_gpu(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make(op="bsr_spgemm")
    with pytest.raises(ArgumentError, match=r"a\.col_indices\(\): ranges from 0 to 9, allowed: 0 to 2"):
        kernel(matrix([0, 1, 1, 3], [2, 0, 9]), B, validate=True)
    for a, b, message in ((dense(192, 192), B, "a: is torch.strided"), (A, dense(192, 128), "b: is torch.strided")):
        with pytest.raises(ArgumentError, match=message):
            kernel(a, b)
    floats = torch.sparse_bsr_tensor(B.crow_indices(), B.col_indices(), B.values().float(), size=B.shape)
    with pytest.raises(ArgumentError, match=r"b: is torch\.float32, this kernel takes torch\.float16"):
        kernel(A, floats)
    assert not kernel._loaded.launches
    monkeypatch.setattr(bsr_spgemm, "check_on_gpu", bsr_arguments.check_on_gpu)
    with pytest.raises(ArgumentError, match="a: is on cpu, expected a CUDA device"):
        make(op="bsr_spgemm")(A, B)


@pytest.mark.parametrize("size", [32, 64])
def test_a_sampled_product_hands_over_what_the_kernel_reads(make: Make, size: int) -> None:
    kernel, pattern = make(op="bsr_sddmm", size=size), matrix([0, 1, 1, 3], [2, 0, 1], size=size)
    a, b = dense(3 * size, 80)[:, :72], dense(3 * size, 72)
    found = kernel(a, b, pattern, validate=True)
    assert found.layout == torch.sparse_bsr and found.shape == pattern.shape and found.dtype == torch.float16
    assert torch.equal(found.crow_indices(), pattern.crow_indices())
    assert torch.equal(found.col_indices(), pattern.col_indices())
    out = dense(3, size, size)
    assert kernel(a, b, pattern, out=out).values().data_ptr() == out.data_ptr()
    first, second = kernel._loaded.launches
    assert (first["a"], first["b"], first["c"]) == (a.data_ptr(), b.data_ptr(), found.values().data_ptr())
    assert second["c"] == out.data_ptr() and second["col_indices"] == pattern.col_indices().data_ptr()
    tensors = kernel._loaded.signatures[0]["tensors"]
    assert tensors["a"] == ((3 * size, 72), (80, 1)) and tensors["c"] == ((3, size, size), (size * size, size, 1))
    kernel(a, b, pattern)
    assert len(kernel._loaded.signatures) == 2 and len(kernel._loaded.launches) == 3
    nothing = matrix([0, 0, 0, 0], [], size=size)
    assert kernel(a, b, nothing).values().shape == (0, size, size) and len(kernel._loaded.launches) == 3


def test_a_sampled_product_reads_operands_by_columns(make: Make) -> None:
    kernel = make(op="bsr_sddmm", a_layout="column_major", b_layout="column_major")
    a, b = dense(72, 192).mT, dense(72, 200)[:, :192].mT
    kernel(a, b, A)
    tensors = kernel._loaded.signatures[0]["tensors"]
    assert tensors["a"] == ((72, 192), (192, 1)) and tensors["b"] == ((72, 192), (200, 1))
    for change, message in (
        ({"a": dense(192, 72)}, r"^a: has strides \(72, 1\), and \w+ reads it by columns; .*a_layout: row_major"),
        ({"b": dense(72, 193)[:, :192].mT}, "^b: has stride 193 in dimension 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            kernel(**({"a": a, "b": b, "pattern": A} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": dense(128, 72)}, r"a: has shape \(128, 72\), expected \(M 192, K\)"),
        ({"b": dense(128, 72)}, r"b: has shape \(128, 72\), expected \(N 192, K 72\)"),
        ({"b": dense(192, 64)}, r"b: has shape \(192, 64\), expected \(N 192, K 72\)"),
        ({"a": dense(192, 73)[:, :72]}, "a: has stride 73 in dimension 0"),
        ({"b": dense(72, 192).T}, "b: has stride 192 in its last dimension"),
        ({"a": dense(192, 72).float()}, "a: dtype or rank"),
        ({"b": dense(192, 72).bfloat16()}, "b: dtype or rank"),
        ({"pattern": dense(192, 192)}, r"pattern: is torch\.strided, expected a torch\.sparse_bsr tensor"),
        ({"pattern": matrix([0, 1, 1, 1], [0], size=128)}, r"pattern: has blocks of \(128, 128\), .* \(64, 64\)"),
        ({"pattern": matrix([0, 1, 1, 3], [2, 0, 9])}, r"pattern\.col_indices\(\): ranges from 0 to 9"),
        ({"out": dense(2, 64, 64)}, r"out: has shape \(2, 64, 64\), expected \(stored blocks 3, rows 64, cols 64\)"),
        ({"out": dense(3, 64, 64).mT}, r"out: has strides \(4096, 1, 64\), expected a contiguous tensor"),
    ],
)
def test_what_is_wrong_with_a_sampled_product(make: Make, change: dict[str, Any], message: str) -> None:
    kernel = make(op="bsr_sddmm")
    with pytest.raises(ArgumentError, match=message):
        kernel(**({"a": dense(192, 72), "b": dense(192, 72), "pattern": A, "validate": True} | change))
    assert not kernel._loaded.launches


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (dense(128, 128), r"out: has shape \(128, 128\), expected \(M 192, N 128\)"),
        (dense(192, 128).float(), "out: dtype or rank"),
        (dense(192, 129)[:, :128], "out: has stride 129 in dimension 0"),
        (dense(1, 128).expand(192, 128), "out: is expanded in dimension 0"),
    ],
)
@pytest.mark.parametrize("op", ["bsr_spmm", "bsr_spgemm"])
def test_what_is_wrong_with_out(make: Make, op: str, out: Any, message: str) -> None:
    kernel = make(op=op)
    with pytest.raises(ArgumentError, match=message):
        kernel(A, B if op == "bsr_spgemm" else dense(192, 128), out=out)
    assert not kernel._loaded.launches


def test_columns_that_out_cannot_store_alone(make: Make) -> None:
    kernel = make()
    with pytest.raises(ArgumentError, match="out: has 100 columns; results are stored 8 at a time"):
        kernel(A, dense(192, 104)[:, :100], out=dense(192, 104)[:, :100])
    assert kernel(A, dense(192, 104)[:, :100]).stride() == (104, 1)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_rows_of_out_may_be_far_apart(make: Make, arch: str) -> None:
    kernel, out = make(arch), dense(192, 256)[:, :128]
    assert kernel(matrix([0, 1, 1, 3], [2, 0, 1], columns=4), dense(256, 128), out=out) is out
    (signature,), (launch,) = kernel._loaded.signatures, kernel._loaded.launches
    assert signature["tensors"]["c"] == ((192, 128), (256, 1)) and launch["c"] == out.data_ptr()
    assert signature["numbers"].get("c_row_stride", 256) == 256
    assert signature["numbers"].get("block_columns", 4) == 4


def test_a_bias_reaches_the_kernel(make: Make) -> None:
    kernel, bias = make(epilogue={"bias": True}), dense(192)
    kernel(A, dense(192, 128), bias=bias)
    assert kernel._loaded.launches[0]["bias"] == bias.data_ptr()


@pytest.mark.parametrize(
    ("epilogue", "bias", "message"),
    [
        ({"bias": True}, None, r"bias: is missing: the epilogue of bsr_spmm_\w+ adds a bias \(M 192,\)"),
        ({"bias": True}, dense(128), r"bias: has shape \(128,\), expected \(M 192\)"),
        ({"bias": True}, dense(192).float(), "bias: dtype or rank"),
        ({"bias": True}, dense(192, 1), "bias: dtype or rank"),
        ({"bias": True}, dense(192, 2)[:, 0], "bias: has stride 2, expected a contiguous tensor"),
        ({"activation": "relu"}, dense(192), r"bias: is not an argument of bsr_spmm_\w+: its epilogue has no bias"),
        (None, dense(192), r"bias: is not an argument of bsr_spmm_\w+: its epilogue has no bias"),
    ],
)
def test_what_is_wrong_with_a_bias(make: Make, epilogue: dict[str, Any] | None, bias: Any, message: str) -> None:
    kernel = make(**({} if epilogue is None else {"epilogue": epilogue}))
    with pytest.raises(ArgumentError, match=message):
        kernel(A, dense(192, 128), bias=bias)
    assert not kernel._loaded.launches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": dense(192, 192)}, r"a: is torch\.strided, expected a torch\.sparse_bsr tensor"),
        ({"b": dense(192, 128).float()}, "b: dtype or rank"),
        ({"a": matrix([0, 1, 1, 3], [2, 0, 9]), "validate": True}, r"a\.col_indices\(\): ranges from 0 to 9"),
    ],
)
def test_what_is_wrong_with_a_and_b(make: Make, change: dict[str, Any], message: str) -> None:
    kernel = make()
    with pytest.raises(ArgumentError, match=message):
        kernel(**({"a": A, "b": dense(192, 128)} | change))
    assert not kernel._loaded.launches


def test_sparse_matrices_are_prepared(make: Make) -> None:
    for kernel in (make(scheduler="dynamic"), make(transpose_a=True), make()):
        with pytest.raises(ArgumentError, match=r"a: is torch\.strided, expected a torch\.sparse_bsr tensor"):
            kernel.prepare(dense(192, 192))


def test_what_was_prepared_is_trusted_unless_it_is_to_be_validated(make: Make) -> None:
    rows, chunks = make(scheduler="dynamic"), make(size=32, scheduler="dynamic")
    a = matrix([0, 140, 141, 143], [0] * 143, size=32)
    order = chunks.prepare(a).row_order
    for kernel, wrong, b in (
        (rows, PreparedBsr(A, torch.tensor([0, 1, 1]).int()), dense(192, 128)),
        (chunks, PreparedBsr(a, order._replace(total=order.total - 1)), dense(96, 128)),
    ):
        kernel(wrong, b)  # no synchronization: it may be captured in a graph
        assert len(kernel._loaded.launches) == 1
        with pytest.raises(ArgumentError, match=r"^a\.row_order: "):
            kernel(wrong, b, validate=True)


def test_one_column_is_enough_to_find_an_order(make: Make) -> None:
    kernel = make(size=16, scheduler="dynamic")
    a = matrix([0, 1, 1], [0], size=16)
    assert kernel.prepare(a, 1).row_order.limit == kernel.prepare(a).row_order.limit
    with pytest.raises(ArgumentError, match=r"^b: "):
        kernel(a, dense(48, 0))


def test_c_beside_out_in_matrices_that_are_no_whole_rows_apart(make: Make) -> None:
    kernel, apart = make(accumulate=True), 191 * 256 + 192  # the next matrix begins in the last row of the one before
    store = dense(2 * 192 * 256)
    c, out = (store.as_strided((2, 192, 128), (apart, 256, 1), first) for first in (0, 128))
    with pytest.raises(ArgumentError, match="c: overlaps out"):
        kernel(A, dense(2, 192, 128), c=c, out=out)
    assert not kernel._loaded.launches


@pytest.mark.parametrize("op", ["bsr_spmm", "bsr_sddmm", "bsr_spgemm"])
def test_few_signatures_are_kept(make: Make, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setattr(arguments, "SIGNATURES_KEPT", 2)
    kernel = make(op=op)
    for columns in (8, 16, 24, 24):
        a, b = (dense(192, columns), dense(192, columns)) if op == "bsr_sddmm" else (A, dense(192, columns))
        if op == "bsr_spgemm":
            b = matrix([0, 1, 1, 2], [0, 0], columns=columns)
        kernel(a, b, *((A,) if op == "bsr_sddmm" else ()))
        assert len(kernel._signatures) <= 2
    assert len(kernel._loaded.signatures) == 3  # the last one was kept


def test_two_shapes_in_turn_are_both_remembered(make: Make) -> None:
    pairs: dict[str, tuple[Any, Any]] = {
        "bsr_spmm": (dense(192, 8), dense(192, 16)),
        "bsr_spgemm": (B, matrix([0, 1, 1, 2], [1, 0], columns=4)),
    }
    for op, bs in pairs.items():
        kernel = make(op=op)
        for b in (*bs, *bs):
            kernel(A, b)
        assert len(kernel._loaded.signatures) == 2 and len(kernel._loaded.launches) == 4


def test_patterns_are_trusted_unless_they_are_to_be_validated(make: Make) -> None:
    kernel, wrong = make(op="bsr_sddmm"), matrix([0, 1, 1, 3], [2, 0, 9])
    kernel(dense(192, 72), dense(192, 72), wrong)  # no synchronization: it may be captured in a graph
    assert len(kernel._loaded.launches) == 1
    with pytest.raises(ArgumentError, match=r"pattern\.col_indices\(\): ranges from 0 to 9"):
        kernel(dense(192, 72), dense(192, 72), wrong, validate=True)


def test_what_is_no_matrix_at_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make(accumulate=True)
    with pytest.raises(ArgumentError, match="c: dtype or rank"):
        kernel(A, dense(192, 128), c=dense(192, 128).float())
    monkeypatch.setattr(bsr_spmm, "check_tensor", arguments.check_tensor)
    with pytest.raises(ArgumentError, match=r"b: is int, expected a torch\.Tensor"):
        kernel(A, 3, c=dense(192, 128))


def test_more_tiles_of_a_product_than_can_be_numbered(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bsr_spmm, "check_tensor", lambda *given: None)  # nothing of this size is anywhere
    kernel = make(tile={"m": 64, "n": 256, "k": 64}, stages=3)
    rest: dict[str, Any] = {"c": None, "beta": 1.0, "bias": None, "out": None}
    a, b = matrix([0] * 513, []).to("meta"), torch.empty(192, 2**30, dtype=torch.float16, device="meta")
    with pytest.raises(ArgumentError, match=r"b: has shape \(192, 1073741824\): more than 2\^31 tiles"):
        kernel._check(a, b, **rest)
    kernel._check(a, b[:, : 2**30 - 256], **rest)
    assert [signature["tiles"] for signature in kernel._loaded.signatures] == [2**31 - 512]


def test_an_order_is_found_for_the_columns_of_b(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, columns = make(size=16, scheduler="dynamic"), []
    find = kernel._preparation._find_order
    monkeypatch.setattr(
        kernel._preparation, "_find_order", lambda a, wanted, effort: columns.append(wanted) or find(a, wanted, effort)
    )
    a = matrix([0, 1, 1], [0], size=16)
    kernel(a, dense(48, 304))
    kernel(a, dense(2, 48, 200))
    assert columns == [304, 400]


def test_matrices_are_prepared_that_the_kernel_takes(make: Make) -> None:
    for kernel in (make(size=32), make(size=32, scheduler="dynamic"), make(**GATHERED)):
        with pytest.raises(ArgumentError, match=r"a: has blocks of \(64, 64\), this kernel takes"):
            kernel.prepare(A)
    kernel, a = make(**GATHERED), matrix([0, 2, 4, 5], [2, 0, 1, 2, 0], size=16)
    prepared = kernel.prepare(a)
    wrong = replace(prepared, row_order=prepared.row_order._replace(rounds=torch.tensor(3).int()))
    with pytest.raises(ArgumentError, match=r"row_order\.rounds: is tensor\(3.*, expected a tensor with dimensions"):
        kernel(wrong, dense(48, 128))


def misaligned(t: Any) -> Any:
    """Return a tensor like another that begins one element behind a place where copies may begin."""
    return torch.zeros(t.numel() + 8, dtype=t.dtype)[1 : t.numel() + 1].view(t.shape)


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("b", misaligned, "b: starts at address 0x"),
        ("out", misaligned, "out: starts at address 0x"),
        ("b", lambda t: t.float(), "b: dtype or rank"),
        ("b", lambda t: t.to("meta"), "a: is on cpu, the other arguments are on meta"),
        ("b", lambda t: t.mT.contiguous().mT, r"b: has strides \(1, 192\): it is column_major"),
        ("b", lambda t: t[:128], r"b: has shape \(128, 128\), expected \(K 192, N\)"),
        ("b", lambda t: 3, "b: dtype or rank|b: is int"),
        ("out", lambda t: t[:, :64], r"out: has shape \(192, 64\), expected \(M 192, N 128\)"),
        ("bias", lambda t: torch.zeros(192).half(), "bias: is not an argument of"),
        ("c", lambda t: dense(192, 128), "c: is not an argument of"),
        ("beta", lambda t: True, "beta: is bool, expected a number"),
    ],
)
def test_a_second_call_refuses_what_a_first_one_does(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_prepared: bool, name: str, spoil: Any, message: str
) -> None:
    kernel = make()
    if name == "b":
        monkeypatch.setattr(bsr_spmm, "check_tensor", unplaced)
    call = {"a": kernel.prepare(A) if is_prepared else A, "b": dense(192, 128), "out": dense(192, 128)}
    wrong = call | {name: spoil(call.get(name))}
    for launches in range(3):
        assert len(kernel._loaded.launches) == launches
        with pytest.raises(ArgumentError, match=message):
            kernel(**wrong)
        kernel(**call)


def unplaced(name: str, tensor: Any, dtype: Any, rank: int, device: Any = None) -> None:
    """Check what arguments.check_tensor does, less the device."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tensor.dim() != rank:
        raise ArgumentError(name, "dtype or rank")


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_a_prepared_matrix_is_checked_once(make: Make, monkeypatch: pytest.MonkeyPatch, scheduler: str) -> None:
    kernel = make(scheduler=scheduler)
    prepared, checked = kernel.prepare(A), []
    check = kernel._preparation._check
    monkeypatch.setattr(kernel._preparation, "_check", lambda *given: checked.append(given) or check(*given))
    for columns in (128, 128, 256):
        kernel(prepared, dense(192, columns))
    assert checked == [(prepared, False)]
    kernel(prepared, dense(192, 128), validate=True)
    kernel(kernel.prepare(A), dense(192, 128))
    assert [validate for _, validate in checked] == [False, True, False]
    assert {launch["a"] for launch in kernel._loaded.launches} == {A.values().data_ptr()}


def test_a_prepared_matrix_belongs_to_its_kernel_after_calls_too(make: Make) -> None:
    kernel, other = make(scheduler="dynamic"), make(transpose_a=True)
    prepared = kernel.prepare(A)
    for _ in range(2):
        kernel(prepared, dense(192, 128))
        with pytest.raises(ArgumentError, match="a: is prepared for another kernel: it has block rows by length"):
            other(prepared, dense(192, 128))
    assert len(kernel._loaded.launches) == 2 and not other._loaded.launches


def test_a_gradient_of_a_prepared_matrix_is_refused_unless_it_is_off(make: Make) -> None:
    kernel, a = make(), A.detach().requires_grad_()
    prepared, b = kernel.prepare(a), dense(192, 128)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="a: requires a gradient"):
            kernel(prepared, b)
        with torch.no_grad():
            kernel(prepared, b)
    a.requires_grad_(False)
    kernel(prepared, b)
    a.requires_grad_()
    with pytest.raises(ArgumentError, match="a: requires a gradient"):
        kernel(prepared, b)
    assert len(kernel._loaded.launches) == 3


def test_a_prepared_matrix_may_get_other_tensors(make: Make) -> None:
    kernel, a, b = make(), matrix([0, 1, 1, 3], [2, 0, 1]), dense(192, 128)
    prepared, larger = kernel.prepare(a), matrix([0, 3, 3, 6], [0, 1, 2, 0, 1, 2])
    kernel(prepared, b)
    a.values().fill_(2.0)
    kernel(prepared, b)
    a.resize_as_sparse_(larger).copy_(larger)
    kernel(prepared, b)
    first, second, third = kernel._loaded.launches
    assert first["a"] == second["a"] != third["a"] == a.values().data_ptr()
    assert third["col_indices"] == a.col_indices().data_ptr() != first["col_indices"]
    a.resize_as_sparse_(matrix([0, 1, 1, 3], [2, 0, 1], size=32))  # the values stay where they are
    assert a.values().data_ptr() == third["a"]
    with pytest.raises(ArgumentError, match=r"a: has blocks of \(32, 32\), this kernel takes \(64, 64\)"):
        kernel(prepared, b)


def test_a_prepared_matrix_is_freed_with_its_last_name(make: Make) -> None:
    kernel = make(scheduler="dynamic")
    prepared = kernel.prepare(matrix([0, 1, 1, 3], [2, 0, 1]))
    kernel(prepared, dense(192, 128))
    alive = weakref.ref(prepared.row_order)
    del prepared
    assert alive() is None and not kernel._preparation._operands


@pytest.mark.parametrize("fields", [{"scheduler": "dynamic"}, {"transpose_a": True}])
def test_structures_that_each_call_prepares_are_checked_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(arguments, "SIGNATURES_KEPT", 2)
    kernel, b, checked = make(**fields), dense(192, 128), []
    check = bsr_preparation.check_structure
    monkeypatch.setattr(bsr_preparation, "check_structure", lambda *given: checked.append(given) or check(*given))
    crow, col, values = A.crow_indices(), A.col_indices(), A.values()
    for _ in range(2):
        kernel(A, b)
        for parts in ((crow, col.int(), values), (crow, col, values[:, :32]), (crow[:-1], col, values)):
            with pytest.raises(ArgumentError, match=r"^a(\.c\w+_indices\(\))?: (is|has)"):
                kernel(torch.sparse_bsr_tensor(*parts, size=A.shape, check_invariants=False), b)
    assert len(checked) == 1 + 2 * 3 and len(kernel._loaded.launches) == 2
    for blocks in (1, 2, 3):
        kernel(matrix([0, 0, 0, blocks], list(range(blocks))), b)
        assert len(kernel._preparation._structures) <= 2


def watched_orders(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the matrices of which an order is found, in calls to come."""
    found: list[Any] = []
    find = kernel._preparation._find_order
    monkeypatch.setattr(kernel._preparation, "_find_order", lambda a, *rest: found.append(a) or find(a, *rest))
    return found


WRITES: dict[str, Callable[[Any], Any]] = {
    "row pointers": lambda a: a.crow_indices().copy_(torch.tensor([0, 2, 3, 3])),
    "columns": lambda a: a.col_indices().fill_(1),
    "one column": lambda a: a.col_indices().__setitem__(0, 1),
    "all of it": lambda a: a.copy_(matrix([0, 2, 3, 3], [0, 1, 2])),
    "other tensors": lambda a: a.resize_as_sparse_(matrix([0, 3, 4, 4], [0, 1, 2, 0])).zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_raw_matrix_is_ordered_again_when_it_was_written(
    make: Make, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    kernel, a = make(scheduler="dynamic"), matrix([0, 1, 1, 3], [2, 0, 1])
    found = watched_orders(kernel, monkeypatch)
    for columns in (128, 128, 256):
        kernel(a, dense(192, columns))
    kernel(a, dense(2, 192, 128))
    assert found == [a] and len({launch["row_order"] for launch in kernel._loaded.launches}) == 1
    write(a)
    for _ in range(2):
        kernel(a, dense(192, 128))
    assert found == [a, a]
    order = next(iter(kernel._preparation._orders._known[id(a)].orders.values()))
    assert order.tolist() == a.crow_indices().diff().argsort(descending=True).tolist()
    kernel(a, dense(192, 128), validate=True)
    assert found == [a, a, a]  # it is not only trusted


def test_an_old_order_is_one_still(make: Make) -> None:
    """Writes to the tensors that a matrix was built of are not seen, so nothing else than an order may be kept."""
    crow, col = torch.tensor([0, 1, 1, 3]), torch.tensor([2, 0, 1])
    a = torch.sparse_bsr_tensor(crow, col, dense(3, 64, 64), size=(192, 192), check_invariants=False)
    kernel = make(scheduler="dynamic")
    kernel(a, dense(192, 128))
    version = a._version
    crow.copy_(torch.tensor([0, 3, 3, 3]))
    assert a._version == version and a.crow_indices().tolist() == [0, 3, 3, 3]
    kernel(a, dense(192, 128))
    first, second = kernel._loaded.launches
    assert first["row_order"] == second["row_order"] and first["crow_indices"] == second["crow_indices"]


@pytest.mark.parametrize("fields", [{"size": 16, "scheduler": "dynamic"}, {"size": 64, "transpose_a": True}])
def test_where_blocks_lie_is_found_by_each_call(
    make: Make, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    size, made = fields["size"], []
    kernel, a = make(**fields), matrix([0, 1, 1, 3], [2, 0, 1], size=size)
    for name in ("split_rows", "transposed_index"):
        work = getattr(bsr_preparation, name)
        monkeypatch.setattr(bsr_preparation, name, lambda *given, work=work: made.append(work(*given)) or made[-1])
    for _ in range(2):
        kernel(a, dense(3 * size, 128))
    assert len(made) == 2


def test_each_stream_finds_its_own_order(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another stream may not be written yet."""
    kernel, stream = make(scheduler="dynamic"), [7]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream[-1], raising=False)
    found = watched_orders(kernel, monkeypatch)
    for handle in (7, 8, 7, 8):
        stream.append(handle)
        kernel(A, dense(192, 128))
    first, second, *again = [launch["row_order"] for launch in kernel._loaded.launches]
    assert len(found) == 2 and first != second and again == [first, second]


def test_a_captured_call_finds_its_order_in_the_graph(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, capturing = make(scheduler="dynamic"), [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[-1])
    found = watched_orders(kernel, monkeypatch)
    for state, orders in ((True, 1), (False, 2), (True, 3), (False, 3)):
        capturing.append(state)
        kernel(A, dense(192, 128))
        assert len(found) == orders


def test_an_order_is_freed_with_its_matrix(make: Make) -> None:
    kernel, a = make(scheduler="dynamic"), matrix([0, 1, 1, 3], [2, 0, 1])
    kernel(a, dense(192, 128))
    memory = kernel._preparation._orders
    order = weakref.ref(next(iter(memory._known[id(a)].orders.values())))
    kernel._loaded.launches.clear()
    del a
    assert not memory._known and order() is None


def test_a_matrix_in_the_place_of_another_is_not_taken_for_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, a, other = make(scheduler="dynamic"), matrix([0, 1, 1, 3], [2, 0, 1]), matrix([0, 2, 3, 3], [0, 1, 2])
    kernel(a, dense(192, 128))
    known = kernel._preparation._orders._known
    known[id(other)] = known.pop(id(a))
    found = watched_orders(kernel, monkeypatch)
    kernel(other, dense(192, 128))
    assert found == [other] and known[id(other)].matrix() is other
    del a  # whose number was the other's
    assert list(known) == [id(other)]


def test_tensors_without_a_version_are_ordered_by_each_call(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = make(scheduler="dynamic")
    found = watched_orders(kernel, monkeypatch)
    with torch.inference_mode():
        a = matrix([0, 1, 1, 3], [2, 0, 1])
        for _ in range(2):
            kernel(a, dense(192, 128))
    assert len(found) == 2 and not kernel._preparation._orders._known


def test_a_matrix_with_an_order_is_checked_as_one_without(make: Make) -> None:
    kernel, a, b = make(scheduler="dynamic"), matrix([0, 1, 1, 3], [2, 0, 1]), dense(192, 128)
    kernel(a, b)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="a: requires a gradient"):
            kernel(a.requires_grad_(), b)
        kernel(a.requires_grad_(False), b)
    a.resize_as_sparse_(matrix([0, 1, 1, 3], [2, 0, 1], size=32))
    with pytest.raises(ArgumentError, match=r"a: has blocks of \(32, 32\), this kernel takes \(64, 64\)"):
        kernel(a, b)


def fp8_matrix(size: int = 128, dtype: Any = torch.float8_e4m3fn) -> Any:
    values = torch.zeros((3, size, size)).to(dtype)
    indices = torch.tensor([0, 1, 1, 3]), torch.tensor([2, 0, 1])
    return torch.sparse_bsr_tensor(*indices, values, size=(3 * size, 3 * size), check_invariants=False)


def codes(*shape: int, dtype: Any = torch.float8_e4m3fn) -> Any:
    return torch.zeros(shape).to(dtype)


FP8 = {"dtype": "e4m3", "b_layout": "column_major", "size": 128}
ONE = torch.ones(())


def test_products_in_fp8_take_a_scale_of_each_operand(make: Make) -> None:
    kernel = make(**FP8)
    a, b = fp8_matrix(), codes(304, 384).mT
    out = kernel(a, b, scale_a=ONE, scale_b=torch.ones(3, 1)[1], validate=True)
    assert out.shape == (384, 304) and out.dtype == torch.bfloat16
    (launch,) = kernel._loaded.launches
    assert launch["a_scale"] == ONE.data_ptr()
    assert kernel(a, codes(2, 304, 384).mT, scale_a=ONE, scale_b=ONE).shape == (2, 384, 304)
    assert make(**FP8, output="fp32")(a, b, scale_a=ONE, scale_b=ONE).dtype == torch.float32
    assert len(kernel._loaded.signatures) == 2


@pytest.mark.parametrize(
    ("message", "more"),
    [
        (
            r"scale_a: is missing: a float32 tensor \(\) or \(1,\); a number is its code times its scale",
            {"scale_a": None},
        ),
        ("scale_b: is missing", {"scale_b": None}),
        (r"scale_b: has shape \(3,\), expected one scale: \(\) or \(1,\)", {"scale_b": torch.ones(3)}),
        ("scale_a: dtype or rank", {"scale_a": torch.ones((), dtype=torch.float64)}),
        (r"scale_a: has shape \(1, 1\), expected one scale", {"scale_a": torch.ones(1, 1)}),
        (r"scale_a: has 0\.0, expected positive finite numbers", {"scale_a": torch.zeros(1)}),
        (r"scale_a: has -1\.0, expected positive finite numbers", {"scale_a": -ONE}),
        ("scale_b: has nan, expected positive finite numbers", {"scale_b": torch.full((), torch.nan)}),
        ("out: dtype or rank", {"out": codes(384, 304)}),
        ("b: dtype or rank", {"b": dense(304, 384).mT}),
        (
            r"a: is torch.float16, .*_e4m3fn: quantize it first \(sparse_kernel_codegen\.quantize_matrix\)",
            {"a": matrix([0, 1], [0], size=128)},
        ),
        ("a: is torch.float8_e5m2, this kernel takes torch.float8_e4m3fn", {"a": fp8_matrix(dtype=torch.float8_e5m2)}),
        ("b: has stride 392 in dimension 0; strides must be multiples of 16", {"b": codes(304, 392)[:, :384].mT}),
        ("b: has strides .*: it is row_major", {"b": codes(384, 304)}),
    ],
)
def test_what_is_wrong_with_a_call_in_fp8_is_told(make: Make, message: str, more: dict[str, Any]) -> None:
    given = {"a": fp8_matrix(), "b": codes(304, 384).mT, "scale_a": ONE, "scale_b": ONE, **more}
    kernel = make(**FP8)
    with pytest.raises(ArgumentError, match=message):
        kernel(given.pop("a"), given.pop("b"), **given, validate=True)
    assert not kernel._loaded.launches


def test_scales_of_blocks_lie_side_by_side(make: Make) -> None:
    kernel = make(**FP8, scales="block")
    a, b, of_blocks = fp8_matrix(), codes(306, 384).mT, torch.ones(3)
    of_columns = torch.ones(3, 308).mT[:306]
    assert kernel(a, b, scale_a=of_blocks, scale_b=of_columns, validate=True).shape == (384, 306)
    (launch,), (signature,) = kernel._loaded.launches, kernel._loaded.signatures
    assert launch["a_scale"] == of_blocks.data_ptr() and launch["b_scale"] == of_columns.data_ptr()
    assert signature["tensors"]["b_scale"] == ((3, 306), (308, 1))
    for message, more in (
        (r"scale_a: is missing: float32 \(stored blocks 3,\)", {"scale_a": None}),
        (r"scale_b: is missing: float32 \(N 306, K / 128 3\), N contiguous", {"scale_b": None}),
        (r"scale_a: has shape \(4,\), expected \(stored blocks 3\)", {"scale_a": torch.ones(4)}),
        ("scale_a: has stride 2, expected a contiguous tensor", {"scale_a": torch.ones(6)[::2]}),
        (r"scale_b: has shape \(3, 306\), expected \(N 306, K / 128 3\)", {"scale_b": torch.ones(3, 306)}),
        (r"scale_b: has strides \(3, 1\); .*pass scale.mT.contiguous\(\).mT", {"scale_b": torch.ones(306, 3)}),
        (r"scale_b: has strides \(1, 306\); .* a multiple of 4", {"scale_b": torch.ones(3, 306).mT}),
        ("scale_b: starts at address", {"scale_b": torch.ones(3, 312).mT[1:307]}),
        ("scale_b: has inf, expected positive finite numbers", {"scale_b": torch.full((3, 308), torch.inf).mT[:306]}),
    ):
        given = {"scale_a": of_blocks, "scale_b": of_columns, **more}
        with pytest.raises(ArgumentError, match=message):
            kernel(a, b, **given, validate=True)
    batch = torch.ones(2, 3, 308).mT[:, :306]
    assert kernel(a, codes(2, 306, 384).mT, scale_a=of_blocks, scale_b=batch).shape == (2, 384, 306)
    assert kernel._loaded.signatures[-1]["tensors"]["b_scale"] == ((3, 2 * 320), (2 * 320, 1))
    with pytest.raises(ArgumentError, match=r"scale_b: has shape \(3, 306, 3\), expected \(batch 2, N, K / 128\)"):
        kernel(a, codes(2, 306, 384).mT, scale_a=of_blocks, scale_b=torch.ones(3, 3, 308).mT[:, :306])


def test_sampled_products_in_fp8(make: Make) -> None:
    kernel = make(op="bsr_sddmm", dtype="e4m3", size=128)
    pattern, a, b = fp8_matrix(), codes(384, 208), codes(384, 208)
    c = kernel(a, b, pattern, scale_a=ONE, scale_b=ONE, validate=True)
    assert c.values().dtype == torch.bfloat16 and kernel._loaded.launches[0]["b_scale"] == ONE.data_ptr()
    for message, more in (
        ("scale_a: is missing", {"scale_a": None}),
        ("scale_b: has shape", {"scale_b": torch.ones(2)}),
    ):
        with pytest.raises(ArgumentError, match=message):
            kernel(a, b, pattern, **{"scale_a": ONE, "scale_b": ONE, **more})


def test_scales_of_rows_lie_side_by_side(make: Make) -> None:
    kernel = make(op="bsr_sddmm", dtype="e4m3", size=128, scales="row")
    pattern, a, b = fp8_matrix(), codes(384, 208), codes(384, 208)
    of_a, of_b = torch.ones(2, 388).mT[:384], torch.ones(2, 384).mT
    assert kernel(a, b, pattern, scale_a=of_a, scale_b=of_b, validate=True).shape == (384, 384)
    (launch,), (signature,) = kernel._loaded.launches, kernel._loaded.signatures
    assert launch["a_scale"] == of_a.data_ptr() and launch["b_scale"] == of_b.data_ptr()
    assert signature["tensors"]["a_scale"] == ((2, 384), (388, 1))
    assert signature["tensors"]["b_scale"] == ((2, 384), (384, 1))
    for message, more in (
        (r"scale_a: is missing: float32 \(M 384, K / 128 2\), M contiguous", {"scale_a": None}),
        (r"scale_b: is missing: float32 \(N 384, K / 128 2\), N contiguous", {"scale_b": None}),
        ("scale_a: dtype or rank", {"scale_a": ONE}),
        (r"scale_a: has shape \(384, 1\), expected \(M 384, K / 128 2\)", {"scale_a": torch.ones(384, 1)}),
        (r"scale_a: has strides \(2, 1\); .*of M padded so", {"scale_a": torch.ones(384, 2)}),
        (r"scale_b: has strides \(1, 386\); .* a multiple of 4", {"scale_b": torch.ones(2, 386).mT[:384]}),
        ("scale_a: starts at address", {"scale_a": torch.ones(2, 392).mT[1:385]}),
        ("scale_a: has nan, expected positive finite", {"scale_a": torch.full((2, 384), torch.nan).mT}),
    ):
        with pytest.raises(ArgumentError, match=message):
            kernel(a, b, pattern, **{"scale_a": of_a, "scale_b": of_b, **more}, validate=True)
    assert len(kernel._loaded.launches) == 1


def test_other_types_have_no_scales(make: Make) -> None:
    message = "scale_b: is not an argument of .*: only kernels in FP8 have scales"
    with pytest.raises(ArgumentError, match=message):
        make()(A, dense(192, 64), scale_b=ONE)
    with pytest.raises(ArgumentError, match=message):
        make(op="bsr_sddmm")(dense(192, 64), dense(192, 64), A, scale_b=ONE)
