"""The cases of BSR products, on the CPU: block by block products in place of kernels, right ones and wrong ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.library import find_spec
from codegen.planning import plan_for
from codegen.spec import BlockShape, BsrSpgemmSpec

torch = pytest.importorskip("torch")

from runtime.kernels.bsr_spmm import ACTIVATIONS  # noqa: E402
from runtime.verify import bsr_fp8, bsr_sddmm, bsr_spgemm, bsr_spmm  # noqa: E402
from runtime.verify.common import Outcome  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*deterministic")


def blocks(matrix: Any) -> Iterator[tuple[int, int, Any]]:
    """Block row, block column and values (float64) of each stored block that is inside the matrix."""
    crow, col, values = matrix.crow_indices().tolist(), matrix.col_indices().tolist(), matrix.values()
    for row in range(len(crow) - 1):
        for i in range(crow[row], crow[row + 1]):
            if col[i] * values.shape[2] < matrix.shape[1]:
                yield row, col[i], values[i].double()


def dense(matrix: Any) -> Any:
    """A BSR matrix whose repeated blocks count as often as they are stored, dense."""
    rows, cols = matrix.values().shape[1:]
    out = torch.zeros(matrix.shape, dtype=torch.float64)
    for row, col, block in blocks(matrix):
        out[row * rows : (row + 1) * rows, col * cols : (col + 1) * cols] += block
    return out


class Product:
    """Computes what a kernel does, in float64; ``spoil`` takes each result before it is returned."""

    def __init__(self, name: str, spoil: Callable[[Any, int], None] = lambda out, run: None) -> None:
        spec = find_spec(name).spec
        small = {"block": BlockShape(rows=16, cols=16)}  # no time is spent on large ones, where cases allow that
        self.spec: Any = spec.model_copy(update=small) if isinstance(spec, BsrSpgemmSpec) else spec
        self.compiled = SimpleNamespace(plan=plan_for(find_spec(name)))
        self.spoil = spoil
        self.calls: list[dict[str, Any]] = []

    def prepare(self, a: Any, columns: int | None = None, **how: Any) -> Any:
        return SimpleNamespace(matrix=a, prepared={"columns": columns, **how})

    def result(self, exact: Any, out: Any, dtype: Any) -> Any:
        out = torch.empty(exact.shape, dtype=dtype) if out is None else out
        if out.numel():
            assert self.calls[-1].get("c") is not None or bool(out.isnan().all())  # a fresh one, poisoned
        out.copy_(exact)
        self.spoil(out, len(self.calls))
        return out


class Spmm(Product):
    def __call__(self, a: Any, b: Any, *, out: Any = None, **more: Any) -> Any:
        a, prepared = (a.matrix, a.prepared) if isinstance(a, SimpleNamespace) else (a, None)
        self.calls.append({"a": a, "prepared": prepared, "b": b, "out": out, **more})
        left = dense(a).T if self.spec.transpose_a else dense(a)
        exact = left @ b.double()
        if more.get("beta"):
            exact = exact + more["beta"] * more["c"].double()
        if self.spec.epilogue is not None:
            bias = 0 if more["bias"] is None else more["bias"].double()[:, None]
            exact = ACTIVATIONS[self.spec.epilogue.activation](exact + bias)
        return self.result(exact, out, b.dtype)


class Fp8Spmm(Product):
    """The same in FP8, where numbers are codes times scales."""

    def __call__(self, a: Any, b: Any, *, scale_a: Any, scale_b: Any, out: Any = None, bias: Any = None) -> Any:
        self.calls.append({"a": a, "b": b, "out": out, "scale_a": scale_a, "scale_b": scale_b})
        of_blocks = scale_a.double()[:, None, None] if self.spec.scales == "block" else scale_a.double()
        of_b = scale_b.double().repeat_interleave(128, -1).mT if self.spec.scales == "block" else scale_b.double()
        indices = a.crow_indices(), a.col_indices()
        numbers = a.values().double() * of_blocks
        scaled = torch.sparse_bsr_tensor(*indices, numbers, size=a.shape, check_invariants=False)
        exact = dense(scaled) @ (b.double() * of_b)
        return self.result(exact, out, torch.bfloat16)


class Patterned(Product):
    """A product of which the blocks that a pattern lists are computed."""

    other_pattern = False

    def patterned(self, exact: Any, pattern: Any, out: Any, dtype: Any) -> Any:
        rows, cols = pattern.values().shape[1:]
        found = torch.zeros(pattern.values().shape, dtype=torch.float64)
        crow, col = pattern.crow_indices().tolist(), pattern.col_indices().tolist()
        for row in range(len(crow) - 1):
            for i in range(crow[row], crow[row + 1]):
                part = exact[row * rows : (row + 1) * rows, col[i] * cols : (col[i] + 1) * cols]
                if part.numel():
                    found[i] = part
        values = self.result(found, out, dtype)
        listed = pattern.col_indices() + 1 if self.other_pattern else pattern.col_indices()
        indices = pattern.crow_indices(), listed
        return torch.sparse_bsr_tensor(*indices, values, size=pattern.shape, check_invariants=False)


class Sddmm(Patterned):
    def __call__(self, a: Any, b: Any, pattern: Any, *, out: Any = None) -> Any:
        self.calls.append({"a": a, "b": b, "pattern": pattern, "out": out})
        return self.patterned(a.double() @ b.double().T, pattern, out, a.dtype)


class Fp8Sddmm(Patterned):
    def __call__(self, a: Any, b: Any, pattern: Any, *, scale_a: Any, scale_b: Any, out: Any = None) -> Any:
        self.calls.append({"a": a, "b": b, "pattern": pattern, "out": out})
        numbers = [
            x.double() * (s.double().repeat_interleave(128, 1)[:, : x.shape[1]] if self.spec.scales == "row" else s)
            for x, s in ((a, scale_a), (b, scale_b))
        ]
        return self.patterned(numbers[0] @ numbers[1].T, pattern, out, torch.bfloat16)


class Spgemm(Patterned):
    def __call__(self, a: Any, b: Any, pattern: Any = None, *, out: Any = None) -> Any:
        self.calls.append({"a": a, "b": b, "pattern": pattern, "out": out})
        exact = dense(a) @ dense(b)
        if pattern is None:
            return self.result(exact, out, a.values().dtype)
        return self.patterned(exact, pattern, out, a.values().dtype)


MODULES: dict[type[Product], Any] = {Spmm: bsr_spmm, Sddmm: bsr_sddmm, Spgemm: bsr_spgemm}
MODULES |= {Fp8Spmm: bsr_spmm, Fp8Sddmm: bsr_sddmm}
KERNELS = [
    *((Spmm, f"h100_bsr_spmm_b{end}") for end in ("16", "128_accumulate", "64_column_major", "16_gathered", "16_n8")),
    *((Spmm, f"h100_bsr_spmm_b128_{end}") for end in ("transposed", "bias_gelu")),
    *((Spmm, "h100_bsr_spmm_b64x128"), (Sddmm, "l4_bsr_sddmm_b32"), (Sddmm, "h100_bsr_sddmm_b16")),
    *((Spgemm, "h100_bsr_spgemm_b16"), (Spgemm, "h100_bsr_spgemm_b128_bsr")),
]
# Small ones, of which each has a property of its own.
NAMES = {
    *("int32", "odd_n", "padded_n", "no_blocks", "repeated_columns", "columns_out_of_range"),
    *("strided", "batch_strided", "row_groups_batch", "odd_k", "padded_k", "one_a_row", "empty_rows", "own_out"),
    *("int32_and_int64", "no_blocks_of_a", "nothing_meets", "unsorted", "one_of_a_row", "last_row_of_c"),
    *("one_column_apart", "one_column_not_aligned", "two_columns", "five_columns_by_rows", "six_columns_apart"),
    *("nothing_of_c", "repeated_blocks_of_c", "columns_of_c_out_of_range", "wide"),
}


def cases_of(kernel: Product) -> list[Any]:
    module = MODULES[type(kernel)]
    cases = (
        module.CASES
        if module is bsr_sddmm
        else module.cases_of(kernel.compiled.plan if module is bsr_spmm else kernel.spec)
    )
    return [case for case in cases if case.name in NAMES]


@pytest.mark.parametrize(("make", "name"), KERNELS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_right_product_passes_every_case(make: type[Product], name: str) -> None:
    kernel = make(name)
    cases = cases_of(kernel)
    assert len(cases) >= 6
    for case in cases:
        found = MODULES[make].run_case(kernel, case, CPU)
        assert found.passed and found.name == case.name, found
        assert found.tolerance <= (0.016 if kernel.spec.dtype == "bf16" else 0.002)
        repeated = getattr(case, "repeated", False) or getattr(case, "unsorted", False)
        assert (found.torch_error is None) == (repeated and make is not Sddmm)
    assert len(kernel.calls) == 2 * len(cases)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((Fp8Spmm, f"h100_e4m3_bsr_spmm_b{end}") for end in ("64", "128", "128_block_scales")),
        (Fp8Sddmm, "h100_e4m3_bsr_sddmm_b128"),
        (Fp8Sddmm, "h100_e4m3_bsr_sddmm_b128_row_scales"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_right_product_in_fp8_passes_every_case_and_a_wrong_one_fails(make: type[Product], name: str) -> None:
    kernel = make(name)
    cases = [case for case in MODULES[make].CASES if case.name in NAMES]
    assert len(cases) >= 6
    for case in cases:
        found = MODULES[make].run_case(kernel, case, CPU)
        assert found.passed and not found.torch_error and found.tolerance <= 0.032, found
    plain = replace(MODULES[make].CASES[0], name="plain_small", block_rows=2, block_columns=4)
    spoiled = make(name, off_by(0.05))
    wrong = MODULES[make].run_case(spoiled, plain, CPU)
    assert not wrong.passed and wrong.max_error == pytest.approx(0.05, abs=0.02)
    exact = spoiled.calls[-1]
    assert exact["a"].dtype == exact["b"].dtype == torch.float8_e4m3fn
    if make is Fp8Spmm:  # C's elements have a variance of about 1, which limits of errors are for
        scales = {scale: exact[scale] for scale in ("scale_a", "scale_b")}
        out = torch.full_like(exact["out"], torch.nan)
        found = make(name)(exact["a"], exact["b"], **scales, out=out)
        assert 0.2 < float(found.double().square().mean()) < 1.6


class NeverPromoted(Fp8Spmm):
    """What the tensor core makes of it by itself, with errors that are so many times larger."""

    def __init__(self, times: float) -> None:
        fields = {"op": "bsr_spmm", "arch": "sm_90a", "dtype": "e4m3", "b_layout": "column_major"}
        block = {"rows": 128, "cols": 128}
        super().__init__({**fields, "block": block, "output": "fp32", "accumulate_every": 0})  # type: ignore[arg-type]
        self.times = times

    def __call__(self, a: Any, b: Any, **given: Any) -> Any:
        exact = super().__call__(a, b, **given)
        scales = {name: given[name] for name in ("scale_a", "scale_b")}
        model = bsr_fp8.model_product(self.spec, dense(a), b, scales)
        assert model is not None
        return exact.copy_(exact.double() + self.times * (model - exact.double()))


def test_what_is_never_promoted_is_held_to_a_model() -> None:
    case = bsr_spmm.Case("long", block_rows=1, block_columns=300, n=16, row_counts="even")
    found = bsr_spmm.run_case(NeverPromoted(1.0), case, CPU)  # type: ignore[arg-type]
    assert found.passed and found.max_error > bsr_fp8.ABSOLUTE["fp32"], found
    assert found.tolerance == pytest.approx(2 * found.max_error, rel=0.05)
    assert not bsr_spmm.run_case(NeverPromoted(3.0), case, CPU).passed  # type: ignore[arg-type]


def off_by(amount: float) -> Callable[[Any, int], None]:
    def spoil(out: Any, run: int) -> None:
        out[..., -1, -1] += amount

    return spoil


def second_differs(out: Any, run: int) -> None:
    out[..., 0, 0] += 1e-3 * (run % 2)


def leaves_one_out(out: Any, run: int) -> None:
    out[..., 0, 0] = torch.nan


ONE_EACH = [(Spmm, "h100_bsr_spmm_b16"), (Sddmm, "h100_bsr_sddmm_b16"), (Spgemm, "h100_bsr_spgemm_b16")]
ONE_EACH += [(Spgemm, "h100_bsr_spgemm_b128_bsr")]


@pytest.mark.parametrize(("make", "name"), ONE_EACH, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_product_fails(make: type[Product], name: str) -> None:
    def outcome(spoil: Callable[[Any, int], None]) -> Outcome:
        return MODULES[make].run_case(make(name, spoil), case, CPU)  # type: ignore[no-any-return]

    case = replace(MODULES[make].CASES[0], name="plain_small")
    assert outcome(lambda out, run: None).passed
    wrong = outcome(off_by(0.05))
    assert not wrong.passed and wrong.max_error == pytest.approx(0.05, abs=0.01) and not wrong.problem
    assert outcome(second_differs).problem == "two runs differ"
    nothing = outcome(leaves_one_out)
    assert not nothing.passed and nothing.max_error != nothing.max_error


@pytest.mark.parametrize(
    ("make", "name"), [(Spmm, "h100_bsr_spmm_b16"), (Spgemm, "h100_bsr_spgemm_b16")], ids=["spmm", "spgemm"]
)
def test_writing_beside_out_fails(make: type[Product], name: str) -> None:
    def spoil(out: Any, run: int) -> None:
        if run == 1:
            torch.as_strided(out, (1,), (1,), out.stride(0) - 1).zero_()

    case = next(case for case in MODULES[make].CASES if case.name == "strided")
    found = MODULES[make].run_case(make(name, spoil), case, CPU)
    assert found.problem == "wrote beside out" and not found.passed


@pytest.mark.parametrize(("make", "name"), [KERNELS[-3], KERNELS[-1]], ids=["sddmm", "spgemm"])
def test_a_result_of_another_pattern_or_place_fails(make: type[Patterned], name: str) -> None:
    case, kernel = MODULES[make].CASES[0], make(name)
    kernel.other_pattern = True
    assert MODULES[make].run_case(kernel, case, CPU).problem == "the result has another pattern"
    kernel = make(name)
    kernel.result = lambda exact, out, dtype: exact.to(dtype)  # type: ignore[method-assign]
    assert MODULES[make].run_case(kernel, case, CPU).problem == "the result does not contain out"


def calls_of(make: type[Product], name: str, **fields: Any) -> list[dict[str, Any]]:
    kernel = make(name)
    assert MODULES[make].run_case(kernel, MODULES[make].Case("a_case", **fields), CPU).passed
    return kernel.calls


def rows_of(matrix: Any) -> list[list[int]]:
    crow, col = matrix.crow_indices().tolist(), matrix.col_indices().tolist()
    return [col[first:end] for first, end in itertools.pairwise(crow)]


def columns_of(matrix: Any) -> list[int]:
    found: list[int] = matrix.col_indices().tolist()
    return found


def test_inputs_of_a_product_are_what_the_case_says() -> None:
    name = "h100_bsr_spmm_b16"
    first, second = calls_of(Spmm, name, block_rows=60, strided=True, n=77, batch=2, index_dtype=torch.int32)
    rows = rows_of(first["a"])
    assert first["a"].crow_indices().dtype == first["a"].col_indices().dtype == torch.int32
    assert {len(row) for row in rows} == {0, 1, 2, 3, 4, 5, 6} and all(len(set(row)) == len(row) for row in rows)
    assert any(row != sorted(row) for row in rows)
    assert first["b"].shape == (2, 96, 77) and first["b"].stride(1) == first["out"].stride(1) == 80 + 64
    assert torch.equal(first["b"], second["b"]) and first["out"].data_ptr() != second["out"].data_ptr()
    rows = rows_of(calls_of(Spmm, name, repeated=True)[0]["a"])
    assert any(len(set(row)) < len(row) for row in rows)
    rows = rows_of(calls_of(Spmm, name, block_columns=40, rising=True)[0]["a"])
    assert all(row == sorted(row) for row in rows) and any(rows)
    columns = columns_of(calls_of(Spmm, name, block_columns=64, wild=True, row_counts="even")[0]["a"])
    assert 0.1 < sum(column == 64 + 5 for column in columns) / len(columns) < 0.3
    assert all(call["out"] is None for call in calls_of(Spmm, name, own_out=True))
    narrow = calls_of(Spmm, "h100_bsr_spmm_b64_column_major", strided=True, n=24)[0]["b"]
    assert narrow.shape == (384, 24) and narrow.stride() == (1, 384 + 64)


def test_what_is_added_is_not_read_with_beta_0() -> None:
    name = "h100_bsr_spmm_b128_accumulate"
    for beta, in_place in ((0.0, False), (0.5, True), (-0.5, False)):
        case = bsr_spmm.Case("a_case", beta=beta, in_place=in_place)
        told = bsr_spmm.run_case(Spmm(name), case, CPU).description  # type: ignore[arg-type]
        assert told == f"{case.describe()}, beta {beta}" + ", in place" * in_place
        for call in calls_of(Spmm, name, beta=beta, in_place=in_place):
            assert call["beta"] == beta and bool(call["c"].isnan().all()) == (beta == 0)
            assert (call["c"] is call["out"]) == in_place and call["c"].stride(0) == 512
    assert calls_of(Spmm, name, strided=True)[0]["c"].stride(0) == 512 + 64


def test_matrices_are_given_prepared() -> None:
    def given(name: str, **fields: Any) -> list[dict[str, Any] | None]:
        return [call["prepared"] for call in calls_of(Spmm, name, **fields)]

    plain = bsr_spmm.Case("a_case")
    assert bsr_spmm.run_case(Spmm("h100_bsr_spmm_b16"), plain, CPU).description == plain.describe()  # type: ignore[arg-type]
    assert given("h100_bsr_spmm_b16") == [None] * 2
    gathered = {"columns": 24, "effort": "best"}
    assert given("h100_bsr_spmm_b16_gathered", n=24) == [gathered | {"pack": pack} for pack in (False, True)]
    assert given("h100_bsr_spmm_b16_balanced", n=24) == [None, {"columns": 24}]
    cut = given("h100_bsr_spmm_b16_balanced", n=24, row_counts="limit", block_rows=9, block_columns=960)
    assert cut == [{"columns": None}] * 2
    assert given("h100_bsr_spmm_b128_transposed", n=24) == [None, {"columns": 24}]


def test_rows_of_the_counts_that_a_case_names() -> None:
    plan = plan_for(find_spec("h100_bsr_spmm_b16_balanced"))
    assert plan.row_cutting is not None

    def counts(kind: str, rows: int = 9, columns: int = 960) -> list[int]:
        case = bsr_spmm.Case("x", block_rows=rows, block_columns=columns, row_counts=kind)
        found: list[int] = bsr_spmm.row_counts(plan, case, torch.Generator().manual_seed(0), CPU).tolist()
        return found

    limit = plan.row_cutting.cut(9, 0).limit
    assert counts("limit") == [0, limit, 1, limit + 1, 2 * limit, 0, 2 * limit + 1, 3, 4 * limit - 1]
    few = counts("few_long", 120, 300)
    assert [few[0], few[60], few[119]] == [300, 293, 262] and max(few[1:60] + few[61:119]) == 3
    half = counts("half_empty", 400)
    assert 0.4 < half.count(0) / 400 < 0.6 and max(half) > 480
    assert counts("none") == [0] * 9 and counts("even", 2, 1) == [1, 1]
    drawn = counts("random", 400, 6)
    assert len({*drawn}) == 7 and drawn.count(0) < 100


def test_inputs_of_a_sampled_product_are_what_the_case_says() -> None:
    (call, _) = calls_of(Sddmm, "h100_bsr_sddmm_b16", k=77, strided=True, index_dtype=torch.int32)
    assert call["a"].shape == (64, 77) and call["b"].shape == (96, 77)
    assert call["a"].stride(0) == call["b"].stride(0) == 80 + 64
    assert call["pattern"].crow_indices().dtype == call["pattern"].col_indices().dtype == torch.int32
    assert bool(call["pattern"].values().isnan().all())  # nothing reads them
    (call, _) = calls_of(Sddmm, "h100_bsr_sddmm_b16", own_out=True)
    assert call["a"].is_contiguous() and call["b"].is_contiguous() and call["out"] is None
    columns = columns_of(calls_of(Sddmm, "h100_bsr_sddmm_b16", block_columns=64, wild=True)[0]["pattern"])
    assert 0.1 < columns.count(64 + 5) / len(columns) < 0.3
    rows = rows_of(calls_of(Sddmm, "h100_bsr_sddmm_b16", repeated=True, row_counts="even")[0]["pattern"])
    assert any(len(set(row)) < len(row) for row in rows) and {len(row) for row in rows} == {3}
    for kind, lengths in (("last", [0, 0, 0, 6]), ("one", [1] * 4), ("none", [0] * 4)):
        found = rows_of(calls_of(Sddmm, "h100_bsr_sddmm_b16", row_counts=kind)[0]["pattern"])
        assert [len(row) for row in found] == lengths


def test_inputs_of_a_sparse_product_are_what_the_case_says() -> None:
    name = "h100_bsr_spgemm_b16"
    (call, _) = calls_of(Spgemm, name, a_indices=torch.int32, strided=True, unsorted=True, a_counts="even", inner=12)
    assert call["a"].col_indices().dtype == torch.int32 and call["b"].crow_indices().dtype == torch.int64
    rows = rows_of(call["a"])
    assert {len(row) for row in rows} == {8} and {len(set(row)) for row in rows} == {6}
    assert all(row == sorted(row) and len(set(row)) == len(row) for row in rows_of(call["b"]))
    assert call["out"].stride(0) == 5 * 16 + 64
    (call, _) = calls_of(Spgemm, name, a_counts="one", b_counts="all")
    assert [{len(row) for row in rows_of(call[side])} for side in "ab"] == [{1}, {5}]
    apart = calls_of(Spgemm, name, apart=True, rows=8, inner=9, a_counts="all", b_counts="all")[0]
    assert all(column % 2 == 0 for row in rows_of(apart["a"]) for column in row) and any(rows_of(apart["a"]))
    assert [len(row) > 0 for row in rows_of(apart["b"])] == [row % 2 == 1 for row in range(9)]
    columns = columns_of(calls_of(Spgemm, name, wild=True, inner=64, a_counts="all")[0]["a"])
    assert 0.1 < columns.count(64 + 5) / len(columns) < 0.3
    pattern = calls_of(Spgemm, "h100_bsr_spgemm_b128_bsr", c_counts="last", c_wild=True, columns=40)[0]["pattern"]
    rows = rows_of(pattern)
    assert [len(row) for row in rows] == [0, 0, 0, 40] and 0 < rows[3].count(40 + 5) < 20
    assert rows[3] != sorted(rows[3]) and bool(pattern.values().isnan().all())
    spec = find_spec("h100_bsr_spgemm_b128_balanced").spec
    assert isinstance(spec, BsrSpgemmSpec)
    assert bsr_spgemm.cases_of(spec) == bsr_spgemm.CASES + bsr_spgemm.BALANCED_CASES


def test_cases_have_names_of_their_own() -> None:
    further = bsr_spmm.CUT_CASES + bsr_spmm.GATHER_CASES
    assert len({case.name for case in bsr_spmm.STRIDED_CASES}) == len(bsr_spmm.STRIDED_CASES)
    for cases in (bsr_spmm.CASES + further, bsr_sddmm.CASES, bsr_spgemm.CASES + bsr_spgemm.PATTERN_CASES):
        assert len({case.name for case in cases}) == len(cases)


def test_the_tables_have_what_matters() -> None:
    shared = {"index_dtype", "strided", "own_out", "wild", "repeated"}
    for cases, fields in (
        (bsr_spmm.CASES, shared | {"rising", "batch", "in_place"}),
        (bsr_spmm.STRIDED_CASES, shared | {"batch", "in_place", "b_steps", "b_offset"}),
        (bsr_sddmm.CASES, shared),
        (bsr_spgemm.CASES, {"a_indices", "b_indices", "strided", "own_out", "wild", "unsorted", "apart"}),
        (bsr_spgemm.PATTERN_CASES, {"c_repeated", "c_wild"}),
    ):
        plain = type(cases[0])("plain")
        for field in fields:
            assert any(getattr(case, field) != getattr(plain, field) for case in cases), field
    assert {case.beta for case in bsr_spmm.CASES} >= {0.0, 0.5, 1.0, -0.5}
    assert any(case.n % 8 for case in bsr_spmm.CASES) and any(case.k % 8 for case in bsr_sddmm.CASES)
    assert any(case.row_counts == "none" for case in bsr_spmm.CASES) and len(bsr_spmm.CASES) >= 17
