"""The problem of a given matrix: what is read of it, and that a choice takes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec, shipped_specs
from codegen.planning import plan_for
from codegen.select import BsrProblem, choose, parse_problem
from codegen.select.problem import AttentionProblem, is_chosen, problem_fields, problem_of
from codegen.select.table import measurements

torch = pytest.importorskip("torch")

from runtime import bsr_problem, prepare_bsr  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels.bsr_spmm import BsrSpmmKernel  # noqa: E402
from runtime.prepare.matrix import check_row_pointers  # noqa: E402
from runtime.prepare.prepared import PreparedBsr  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
LENGTHS = [1, 0, 4, 3]


def matrix(lengths: list[int] = LENGTHS, rows: int = 64, cols: int = 64, columns: int = 5, dtype: Any = None) -> Any:
    """Return a matrix with so many stored blocks in each block row."""
    crow = torch.tensor([0, *lengths]).cumsum(0)
    col = torch.cat([torch.arange(n) for n in lengths])
    values = torch.zeros(sum(lengths), rows, cols, dtype=dtype or torch.float16)
    size = (len(lengths) * rows, columns * cols)
    return torch.sparse_bsr_tensor(crow, col, values, size=size, check_invariants=False)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_sizes_density_and_evenness_are_those_of_the_matrix(index: Any) -> None:
    a = matrix()
    a = torch.sparse_bsr_tensor(
        a.crow_indices().to(index), a.col_indices().to(index), a.values(), size=a.shape, check_invariants=False
    )
    problem = bsr_problem(a, 16)
    assert (problem.op, problem.arch, problem.dtype, problem.prepared) == ("bsr_spmm", "sm_90a", "fp16", None)
    assert (problem.m, problem.n, problem.k) == (256, 16, 320)
    assert (problem.block.rows, problem.block.cols) == (64, 64)
    assert (problem.density, problem.evenness) == (8 / 20, 4 / 2)
    assert bsr_problem(a).n is None


@pytest.mark.parametrize(
    ("rows", "cols", "fields", "wanted"),
    [
        (32, 16, {"n": 8}, {"m": 128, "k": 80, "n": 8}),
        (64, 64, {"n": 8, "transpose_a": True}, {"k": 256, "m": 320, "n": 8}),
        (64, 64, {"op": "bsr_sddmm", "k": 8}, {"m": 256, "n": 320, "k": 8}),
        (64, 64, {"op": "bsr_spgemm", "n": 128}, {"m": 256, "k": 320, "n": 128}),
        (64, 64, {"arch": "sm_89", "prepared": "packed"}, {"arch": "sm_89", "prepared": "packed"}),
        (64, 64, {"dtype": "bf16"}, {"dtype": "bf16"}),
    ],
)
def test_other_products(rows: int, cols: int, fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    problem = bsr_problem(matrix(rows=rows, cols=cols), **fields)
    assert {name: getattr(problem, name) for name in wanted} == wanted
    assert (problem.density, problem.evenness) == (0.4, 2.0)


def test_the_type_is_that_of_the_values() -> None:
    assert bsr_problem(matrix(dtype=torch.bfloat16)).dtype == "bf16"
    with pytest.raises(
        ArgumentError, match=r"a: is torch\.float32; kernels support torch\.float16 and torch\.bfloat16"
    ):
        bsr_problem(matrix(dtype=torch.float32))
    assert bsr_problem(matrix(dtype=torch.float32), op="bsr_sddmm", dtype="fp16").dtype == "fp16"


def test_a_matrix_without_blocks_has_a_problem() -> None:
    problem = bsr_problem(matrix([0, 0]), 16)
    assert (problem.density, problem.evenness) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("a", "fields", "message"),
    [
        (torch.zeros(64, 64), {}, r"a: is torch\.strided, expected a torch\.sparse_bsr tensor"),
        (3, {}, r"a: is int, expected a torch\.sparse_bsr tensor"),
        (matrix(), {"m": 256}, "m: is given, but a determines it"),
        (matrix(), {"k": 320}, "k: is given, but a determines it"),
        (matrix(), {"n": 8, "op": "bsr_sddmm"}, "n: is given, but a determines it"),
        (matrix(), {"density": 0.5}, "density: is given, but a determines it"),
    ],
)
def test_what_is_no_problem(a: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        bsr_problem(a, **fields)


def test_fields_are_those_of_problems() -> None:
    for fields, message in (
        ({"op": "attention"}, r"problem\.\w+"),
        ({"heads": 2}, r"problem\.heads: is not a field of a problem"),
        ({"n": 0}, r"problem\.n: is 0"),
        ({"prepared": "yes"}, r"problem\.prepared: is 'yes'"),
    ):
        with pytest.raises(SpecError, match=message):
            bsr_problem(matrix(), **fields)  # type: ignore[arg-type]


def test_row_pointers_that_do_not_rise_are_refused() -> None:
    indices = torch.tensor([0, 2, 1]), torch.tensor([0])
    values = torch.zeros(1, 64, 64).half()
    a = torch.sparse_bsr_tensor(*indices, values, size=(128, 64), check_invariants=False)
    with pytest.raises(ArgumentError, match=r"a\.crow_indices\(\): must ascend from 0"):
        bsr_problem(a)


@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90a"), ((8, 9), "sm_89"), ((12, 0), "sm_120")])
def test_the_architecture_is_that_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str
) -> None:
    from runtime.prepare import problem

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert problem._arch(torch.device("cuda", 0)) == arch
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ArgumentError, match="a: is on an sm_75, which has no kernels; pass arch, one of sm_80"):
        problem._arch(torch.device("cuda", 0))


@pytest.mark.parametrize(("lengths", "stem"), [([10] * 64, "even"), ([64] * 4 + [4] * 60, "uneven")])
def test_a_choice_takes_it_as_one_that_was_written(lengths: list[int], stem: str) -> None:
    a = matrix(lengths, columns=64)
    problem = bsr_problem(a, 4096)
    written = parse_problem(
        {
            "op": "bsr_spmm",
            "block": {"rows": 64, "cols": 64},
            **dict.fromkeys("mk", 4096),
            "n": 4096,
            "density": sum(lengths) / 4096,
            "evenness": max(lengths) * 64 / sum(lengths),
        }
    )
    assert problem == written
    partial = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 64, "cols": 64}}
    assert choose(partial, problem).named == choose(problem).named == choose(written).named
    with pytest.raises(SpecError, match=r"problem\.block: is"):
        choose({**partial, "block": {"rows": 32, "cols": 32}}, problem)
    assert parse_problem(problem_fields(problem.text())) == problem


def kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    named = find_spec(name)
    compiled: Any = SimpleNamespace(named=named, plan=plan_for(named))
    return BsrSpmmKernel(compiled, SimpleNamespace(sm_count=lambda device: 132))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("h100_bsr_spmm_b64", 64),
        ("h100_bsr_spmm_b64_balanced", 64),
        ("h100_bsr_spmm_b16_balanced", 16),
        ("h100_bsr_spmm_b16_gathered", 16),
        ("h100_bsr_spmm_b128_transposed", 128),
        ("h100_bsr_spmm_b128_bias_gelu", 128),
        ("h100_bsr_spmm_b64_column_major", 64),
    ],
)
def test_a_prepared_matrix_knows_its_problem(monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    made = kernel(name, monkeypatch)
    prepared = made.prepare(matrix(rows=size, cols=size), 48)
    problem = prepared.problem
    assert problem is prepared.problem  # read once
    assert problem.fields() == problem_of(made.spec).fields()
    assert (problem.n, problem.density, problem.evenness, problem.prepared) == (48, 0.4, 2.0, "rows")
    assert {problem.m, problem.k} == {4 * size, 5 * size}
    assert choose(made.spec, problem).named.spec == made.spec
    values = prepared.matrix.values() + 1
    assert prepared.with_values(values).problem == problem
    assert made.prepare(prepared.matrix).problem.n is None


def test_neither_prepare_nor_a_call_reads_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """They synchronize."""
    from runtime.prepare import prepared as module

    monkeypatch.setattr(module, "bsr_problem", lambda *given, **fields: pytest.fail("it was read"))
    made = kernel("h100_bsr_spmm_b64_balanced", monkeypatch)
    assert made.prepare(matrix(), 48).row_order.tolist() == [2, 3, 0, 1]


def test_a_matrix_that_was_put_together_has_the_problem_of_its_tensor() -> None:
    a = matrix()
    problem = PreparedBsr(a).problem
    assert problem == bsr_problem(a, prepared="rows")
    packed = PreparedBsr(a, packed=torch.zeros(1)).problem
    assert (packed.prepared, packed.evenness) == ("packed", 2.0)


def test_problems_are_read_as_they_are_written() -> None:
    problems = [row.problem for row in measurements()]
    problems += [problem_of(named.spec) for named in shipped_specs() if is_chosen(named.spec)]
    assert {type(problem).__name__ for problem in problems} == {"AttentionProblem", "BsrProblem"}
    for problem in problems:
        if isinstance(problem, AttentionProblem) and (problem.score or problem.pattern.expression):
            continue  # declarations of tensors have commas: such a problem is written in a file
        assert parse_problem(problem_fields(problem.text())) == problem
    topk = problem_fields("head_dim=64,pattern=topk,pattern.k=8,pattern.block=64")
    assert topk["pattern"]["block"] == {"q": 64, "kv": 64}  # and that of `strided` is a number
    square = BsrProblem(op="bsr_spmm", block={"rows": 64, "cols": 64}, density=0.25)  # type: ignore[arg-type]
    assert square.text() == "op=bsr_spmm,block.rows=64,block.cols=64,density=0.25"


def test_reads_of_row_pointers_in_a_capture_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    @contextmanager
    def device(which: Any) -> Iterator[None]:
        entered.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: entered[-1] == torch.device("cuda", 5))
    there = SimpleNamespace(is_meta=False, device=torch.device("cuda", 5))  # whose row pointers nobody reads
    with pytest.raises(ArgumentError, match="a: is in a CUDA graph capture, and the host reads its row pointers"):
        check_row_pointers("a", there)  # type: ignore[arg-type]
    assert bsr_problem(matrix()).m == 256  # a capture concerns no matrix on the CPU

    def refuse(name: str, device: torch.device, reason: str) -> None:
        raise ArgumentError(name, f"on {device}: {reason}")

    monkeypatch.setattr("runtime.prepare.matrix.refuse_capture", refuse)
    for read in (bsr_problem, prepare_bsr):
        with pytest.raises(ArgumentError, match="a: on cpu: the host reads its row pointers"):
            read(matrix())
