"""The benchmark of BSR products, as far as it goes without a GPU: rows, patterns, work, exact products, remarks."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

from codegen.library import find_spec
from codegen.render import render

torch = pytest.importorskip("torch")
# Rows of the groups with targets for which none was set.
WITHOUT_TARGET = {
    *("spgemm_b128_bsr", "ada_spmm_b16", "ada_spmm_wmma_b16", "ada_sddmm_b128", "ada_sddmm_b64", "ada_sddmm_b32"),
    *("e4m3_sddmm_b128", "ada_sddmm_wmma", "ada_spgemm_b128", "ada_spgemm_b64", "ada_spgemm_wmma"),
}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("bsr") as module:
        yield module


def small(script: ModuleType, name: str, size: int, **changes: Any) -> Any:
    """Return a row's problem on a smaller matrix, on the CPU."""
    (row,) = (row for row in script.ROWS if row.name == name)
    return script.make_problem(replace(row, columns=size, **changes), "cpu", size)


def dense(matrix: Any) -> Any:
    """Return a BSR matrix without repeated blocks, dense, float64."""
    values = matrix.values().double()
    out = torch.zeros(matrix.shape, dtype=torch.float64)
    crow, col = matrix.crow_indices().tolist(), matrix.col_indices().tolist()
    rows, cols = values.shape[1:]
    for i in range(len(crow) - 1):
        for block in range(crow[i], crow[i + 1]):
            out[i * rows : (i + 1) * rows, col[block] * cols : (col[block] + 1) * cols] = values[block]
    return out


def record(name: str, **changes: Any) -> dict[str, Any]:
    results = {
        "ours": {"milliseconds": 1.0, "tflops": 600.0, "error": 1e-3},
        "cuBLAS, dense": {"milliseconds": 2.0, "tflops": 300.0, "error": 1e-3},
    }
    base = {"groups": ["main"], "target_tflops": 700.0, "target_ratio": None, "even": None, "failed": {}}
    return {"name": name, **base, "results": results, "spec": {"block": {"rows": 128}}, "density": 0.25, **changes}


def test_rows_are_shipped_kernels_and_groups(script: ModuleType) -> None:
    names = [row.name for row in script.ROWS]
    assert len(set(names)) == len(names) and set(names) >= WITHOUT_TARGET
    for row in script.ROWS:
        spec = script.spec_of(row)
        assert render(find_spec(spec)) and row.dynamic == getattr(spec, "is_dynamic", False)
        assert spec.arch == ("sm_89" if row.groups == ("ada",) else "sm_90a")
        assert (spec.block.rows, spec.block.cols) == (row.block, row.block_columns or row.block)
        assert set(row.peers) <= set(script.PEERS)
        assert row.groups and set(row.groups) <= set(script.GROUPS)
        has_target = row.target is not None or row.target_ratio is not None
        assert has_target == (bool({"main", "ada", "fp8"} & set(row.groups)) and row.name not in WITHOUT_TARGET)
        assert row.even is None or row.even in names
        assert row.row_blocks <= script.SIZE // spec.block.cols
    uneven = [row for row in script.ROWS if "uneven" in row.groups]
    assert {row.even for row in uneven if row.pattern == "power_law"} == {
        row.name for row in uneven if row.pattern == "random"
    }


@pytest.mark.parametrize(("rows", "total", "most"), [(64, 1024, 64), (512, 8192, 512), (128, 128, 7), (8, 56, 7)])
def test_power_law_shares_everything_out(script: ModuleType, rows: int, total: int, most: int) -> None:
    counts = script.power_law(rows, total, most)
    assert sum(counts) == total and min(counts) >= 1 and max(counts) <= most
    assert counts == sorted(counts, reverse=True)
    if rows >= 64 and total > rows:
        assert counts[0] > 3 * total / rows
        full = counts.count(most)  # the others: a share that falls as 1 / rank
        tail = [count * (rank + 1) for rank, count in enumerate(counts) if rank >= full and count > 8]
        assert max(tail) < 1.15 * min(tail)


@pytest.mark.parametrize("pattern", ["random", "clustered", "power_law"])
def test_patterns_are_valid_and_as_said(script: ModuleType, pattern: str) -> None:
    row = replace(script.ROWS[0], pattern=pattern)
    crow, col = script.draw_pattern(row, 64, 64, "cpu")
    assert int(crow[0]) == 0 and int(crow[-1]) == col.numel() == 64 * 16
    rows = [set(col[first:end].tolist()) for first, end in itertools.pairwise(crow)]
    for i, columns in enumerate(rows):
        assert len(columns) == int(crow[i + 1] - crow[i])
        assert sorted(columns) == col[crow[i] : crow[i + 1]].tolist()
        assert min(columns) >= 0 and max(columns) < 64
    if pattern == "clustered":
        assert {len(one & two) for one, two in itertools.pairwise(rows)} == {12}
    assert (len({len(columns) for columns in rows}) == 1) == (pattern != "power_law")


def test_a_full_row_has_every_column(script: ModuleType) -> None:
    row = replace(script.ROWS[0], row_blocks=64)
    _, col = script.draw_pattern(row, 3, 64, "cpu")
    assert col.tolist() == list(range(64)) * 3


@pytest.mark.parametrize(
    "name",
    [
        *("spmm_b128", "spmm_b64x128", "spmm_b128x64", "spmm_b16_uneven", "ada_spmm_b16"),
        *("spgemm_b128", "spgemm_b128_bsr", "ada_spgemm_wmma", "sddmm_b128", "ada_sddmm_b128"),
    ],
)
def test_exact_is_the_product(script: ModuleType, name: str) -> None:
    size = 128 if "b16" in name else 1024
    problem = small(script, name, size, row_blocks=3)
    assert (problem.pattern is not None) == ("sddmm" in name or name.endswith("_bsr"))
    if problem.pattern is not None:
        of_sparse = problem.b.layout == torch.sparse_bsr
        a, b = (dense(problem.a), dense(problem.b)) if of_sparse else (problem.a.double(), problem.b.double().T)
        product = a @ b
        sampled = torch.sparse_bsr_tensor(
            problem.pattern.crow_indices(),
            problem.pattern.col_indices(),
            torch.ones_like(problem.pattern.values()),
            size=problem.pattern.shape,
            check_invariants=False,
        )
        blocks = dense(sampled) * product
        out = torch.sparse_bsr_tensor(
            problem.pattern.crow_indices(),
            problem.pattern.col_indices(),
            torch.stack(
                [
                    blocks[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
                    for i in range(size // 128)
                    for j in problem.pattern.col_indices()[3 * i : 3 * i + 3].tolist()
                ]
            ),
            size=problem.pattern.shape,
            check_invariants=False,
        )
        stored = dense(sampled)[::128, ::128]
        pairs = (a[::128, ::128] != 0).double() @ (b[::128, ::128] != 0).double()
        assert script.flops(problem) == 2.0 * float((stored * pairs).sum()) * 128**3
        right, wrong = out, product * 1.1
        spoiled = out.values()[0]
    else:
        a = dense(problem.a)
        b = dense(problem.b) if problem.b.layout == torch.sparse_bsr else problem.b.double()
        right = a @ b
        wrong = right + 1
        spoiled = right
        if problem.b.layout == torch.sparse_bsr:
            pairs = (a[::128, ::128] != 0).double().sum(0) @ (b[::128, ::128] != 0).double().sum(1)
            assert script.flops(problem) == 2.0 * float(pairs) * 128**3
        else:
            assert script.flops(problem) == 2.0 * a.count_nonzero() * size
    assert script.largest_error(problem, "ours", right) < 1e-12
    assert not script.largest_error(problem, "ours", wrong) <= script.harness.TOLERANCE
    full = problem.dense[0].double() @ problem.dense[1].double()
    assert script.largest_error(problem, script.DENSE, full) < 1e-12
    spoiled[0, 0] = torch.nan
    assert not script.largest_error(problem, "ours", right) <= script.harness.TOLERANCE
    with pytest.raises(ValueError, match="has shape"):
        script.largest_error(problem, "ours", full[:, :8])


@pytest.mark.parametrize("peer", ["torch", "triton", "blocked_ell"])
def test_what_a_peer_does_not_compute_raises(script: ModuleType, peer: str) -> None:
    with pytest.raises(ValueError, match="does not compute bsr_spgemm"):
        script.PEERS[peer].make(small(script, "spgemm_b128", 256, row_blocks=1))


def test_cublas_multiplies_full_matrices(script: ModuleType) -> None:
    problem = small(script, "spmm_b64", 256, row_blocks=2)
    (call,) = script.PEERS["cublas"].make(problem).values()
    assert script.largest_error(problem, script.DENSE, call()) <= script.harness.TOLERANCE


def test_uneven_rows_are_held_against_even_ones(script: ModuleType) -> None:
    slower = {"ours": {"milliseconds": 1.2, "tflops": 480.0, "error": 1e-3}}
    rows = [record("even"), record("uneven", even="even", results=slower), record("lonely", even="absent")]
    rows.append(record("failed", even="even", results={}))
    assert script.lost({"rows": rows}) == {"uneven": pytest.approx(0.2)}
    assert script.remarks({"rows": rows}) == ["uneven: 20.0% slower than even rows (10% allowed)"]


def at(density: float, milliseconds: float, block: int = 128, kernel: str = "a_kernel") -> dict[str, Any]:
    results = {
        "ours": {"milliseconds": milliseconds, "tflops": 1.0, "error": 1e-3},
        "cuBLAS, dense": {"milliseconds": 2.0, "tflops": 1.0, "error": 1e-3},
    }
    spec = {"block": {"rows": block}}
    return record("x", groups=["crossover"], density=density, results=results, spec=spec, kernel=kernel)


def test_crossover_lies_between_two_densities(script: ModuleType) -> None:
    rows = [at(0.5, 4.0), at(0.125, 1.0), at(0.25, 0.5, 64), at(0.5, 1.0, 64), at(0.5, 9.0, 16), at(1.0, 18.0, 16)]
    rows += [at(0.75, 1.0) | {"results": {label: {"milliseconds": 1.0}}} for label in ("ours", script.DENSE)]
    found = script.gains({"rows": rows})
    assert found == {"128": {0.125: 2.0, 0.5: 0.5}, "64": {0.25: 4.0, 0.5: 2.0}, "16": {0.5: 2 / 9, 1.0: 1 / 9}}
    gathered = script.gains({"rows": [at(0.5, 1.0, 16), at(0.5, 4.0, 16, "a_kernel_gathered")]})
    assert gathered == {"16": {0.5: 2.0}, "16, block rows gathered": {0.5: 0.5}}
    assert script.crossover(found["128"]) == pytest.approx(0.25)
    assert script.crossover(found["64"]) is None
    assert script.remarks({"rows": rows}) == [
        "blocks of 128: faster than cuBLAS on a dense A up to a density of 25.0%",
        "blocks of 64: faster than cuBLAS on a dense A at densities from 25.0% to 50.0%",
        "blocks of 16: faster than cuBLAS on a dense A nowhere from 50.0% to 100.0%",
    ]


def test_shows_an_earlier_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    rows = [record("x"), record("y", target_tflops=None, target_ratio=1.5), at(0.5, 1.0)]
    path.write_text(json.dumps({"device": "a device", "driver": "580.0", "rows": rows, "not_run": ["z"]}))
    monkeypatch.setattr("sys.argv", ["bsr.py", "--from", str(path)])
    script.main()
    out = capsys.readouterr().out
    assert "a device, driver 580.0" in out and "1.5x" in out
    assert "blocks of 128: faster than cuBLAS" in out and "rows not run: z" in out
    failed = [record("x"), record("y", results={"cuBLAS, dense": record("y")["results"]["cuBLAS, dense"]})]
    path.write_text(json.dumps({"device": "a device", "driver": "580.0", "rows": failed}))
    with pytest.raises(SystemExit, match="without a time of ours"):
        script.main()


def test_a_budget_leaves_rows_out(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [0.0]

    def run_row(row: Any, peers: list[str], quick: bool) -> dict[str, Any]:
        assert peers == ["cublas"] and quick  # what is not installed is not asked
        clock[0] += 10.0
        return record(row.name)

    monkeypatch.setattr(script.harness.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(script, "run_row", run_row)
    monkeypatch.setattr(script.harness, "environment", lambda packages: {"device": "a device"})
    monkeypatch.setattr(script, "free_memory", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = tmp_path / "run.json"
    arguments = ["--groups", "uneven", "--quick", "--peers", "cublas,triton", "--budget", "15", "--json", str(path)]
    report = script.measure(script.parse_arguments(arguments))
    assert [row["name"] for row in report["rows"]] == ["spmm_b128", "spmm_b64"]
    assert report["not_run"][0] == "spmm_b32" and len(report["not_run"]) == 10
    assert [row["not_installed"] for row in report["rows"]] == [["triton"]] * 2
    assert json.loads(path.read_text()) == report


def test_plots_are_drawn(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        record("x"),
        record("y", target_tflops=None, target_ratio=1.5),
        at(0.25, 1.0),
        at(0.5, 4.0),
        at(0.5, 1.0, 64),
    ]
    script.plot({"device": "a device", "driver": "580.0", "rows": rows}, tmp_path / "run")
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["run.svg", "run_crossover.svg"]


def test_a_record_says_what_was_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def check(makers: list[Any], given: Any, error_of: Any, work: float, quick: bool) -> dict[str, Any]:
        asked.append((makers, work, quick))
        right = given.dense[0].double() @ given.dense[1].double()
        assert error_of(script.DENSE, right) < 1e-12
        assert (error_of("ours", right) < 1e-12) == (given.spec.op == "bsr_sddmm")
        return {"results": results, "failed": {}}

    monkeypatch.setattr(script, "check_and_time", check)
    monkeypatch.setattr(script, "kernel_fields", lambda named, ran: {"spec": named.spec.op, "ran": ran})
    make = script.make_problem
    monkeypatch.setattr(script, "make_problem", lambda row: make(row, "cpu", 1024))
    for name, density in (("spmm_b128", 0.25), ("sddmm_b128", 0.25)):
        (row,) = (replace(row, row_blocks=2, columns=512) for row in script.ROWS if row.name == name)
        for results in ({"ours": {}}, {script.DENSE: {}}):
            found = script.run_row(row, ["cublas", "copied"], False)
            assert (found["density"], found["ran"]) == (density, "ours" in results)
            assert (found["size"], found["columns"], found["row_blocks"]) == (script.SIZE, 512, 2)
            assert (found["target_tflops"], found["target_ratio"]) == (row.target, row.target_ratio)
            makers, work, quick = asked.pop()
            assert makers == [script.ours, script.PEERS["cublas"].make] and not quick
            assert work == found["flops"] == 2.0 * density * 1024**2 * 512


def test_our_call_writes_what_the_peers_are_compared_with(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []

    class Kernel:
        def __init__(self, spec: Any, forward_compatible: bool) -> None:
            assert forward_compatible == (spec.arch == "sm_89")

        def prepare(self, a: Any, columns: int, *, pack: bool, effort: str) -> tuple[Any, ...]:
            return a, columns, pack, effort

        def __call__(self, *tensors: Any, **more: Any) -> None:
            given.append((*tensors, more))

    monkeypatch.setattr(script, "load_kernel", Kernel)
    for name in ("spmm_b128", "spmm_b16_uneven", "ada_spmm_b128", "spgemm_b128", "spgemm_b128_bsr", "sddmm_b128"):
        problem = small(script, name, 256, row_blocks=1)
        (call,) = script.ours(problem).values()
        call()
        a, b, *pattern, more = given.pop()
        if problem.spec.op == "bsr_spmm":
            a, *how = a
            assert how == [256, name == "spmm_b16_gathered_packed", "best"]
        assert a is problem.a and b is problem.b and pattern == ([] if problem.pattern is None else [problem.pattern])
        shape = (256, 256) if problem.pattern is None else problem.pattern.values().shape
        assert more["out"].shape == shape and more["out"].dtype == problem.dense[0].dtype
        assert set(more) == {"out"}


def test_a_triton_call_is_the_fastest_of_its_options(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch.sparse._triton_ops")
    problem, used = small(script, "spmm_b64", 512, row_blocks=2), []

    def product(zeros: Any, a: Any, b: Any, *, beta: float, alpha: float, out: Any, meta: Any) -> Any:
        used.append(meta)
        if meta is not None and meta["num_warps"] == 4:
            raise RuntimeError("too much shared memory")
        return out.copy_(beta * zeros + alpha * (dense(a) @ b.double()))

    def median(calls: dict[str, Any], repeats: int, warm_up: int) -> dict[str, float]:
        return {label: 1.0 if label.endswith("128 columns 8 warps 2 stages") else 2.0 for label in calls}

    peers = sys.modules["bsr_peers"]
    monkeypatch.setattr("torch.sparse._triton_ops.bsr_dense_addmm", product)
    monkeypatch.setattr(peers, "single_calls", median)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ((label, call),) = script.PEERS["triton"].make(problem).items()
    assert label == "Triton bsr_dense_addmm, 128 columns 8 warps 2 stages"
    assert script.largest_error(problem, label, call()) <= script.harness.TOLERANCE
    assert used[-1] == {"SPLIT_N": 4, "GROUP_SIZE_ROW": 4, "num_stages": 2, "num_warps": 8}
    monkeypatch.setattr(peers, "TUNING_SECONDS", -1.0)
    assert list(script.PEERS["triton"].make(problem)) == ["Triton bsr_dense_addmm, its stored options"]


def test_the_copied_b_is_part_of_the_call(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small(script, "spmm_b64_column_major", 256, row_blocks=1)
    assert problem.b.stride() == (1, 256)

    def load(spec: Any) -> Any:
        assert spec == find_spec("h100_bsr_spmm_b64").spec

        def kernel(a: Any, b: Any, *, out: Any) -> Any:
            assert b.is_contiguous()
            return out.copy_(dense(a) @ b.double())

        return kernel

    monkeypatch.setattr(sys.modules["bsr_peers"], "load_kernel", load)
    ((label, call),) = script.PEERS["copied"].make(problem).items()
    assert script.largest_error(problem, label, call()) <= script.harness.TOLERANCE


def test_blocked_ell_stores_block_rows_as_matrices(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class CuSparse:
        def blocked_ell_product(self, columns: Any, values: Any, length: int, b: Any, out: Any) -> Any:
            rows, size = values.shape[:2]
            stored = values.reshape(rows, size, length * size)  # cuSPARSE's layout
            for i in range(rows):
                listed = columns.view(rows, length)[i].tolist()
                parts = [stored[i, :, j * size : (j + 1) * size].double() for j in range(length)]
                pieces = [b[k * size : (k + 1) * size].double() for k in listed]
                out[i * size : (i + 1) * size] = sum(part @ piece for part, piece in zip(parts, pieces, strict=True))
            return lambda: out

    monkeypatch.setattr(sys.modules["bsr_peers"], "CuSparse", CuSparse)
    problem = small(script, "spmm_b64", 512, row_blocks=3)
    ((label, call),) = script.PEERS["blocked_ell"].make(problem).items()
    assert script.largest_error(problem, label, call()) <= script.harness.TOLERANCE
    for other in ("spmm_b64x128", "spmm_b64_uneven"):
        with pytest.raises(ValueError, match="takes square blocks"):
            script.PEERS["blocked_ell"].make(small(script, other, 1024, row_blocks=3))


@pytest.mark.parametrize("name", ["spmm_b128", "sddmm_b128", "spgemm_b128"])
def test_an_error_is_relative_to_the_largest_element(script: ModuleType, name: str) -> None:
    problem = small(script, name, 512, row_blocks=3)
    left, right = ((dense(m) if m.layout == torch.sparse_bsr else m.double()) for m in (problem.a, problem.b))
    out = left @ (right.T if problem.pattern is not None else right)
    for block_row in (0, 2, 3):  # the first, the middle and the last one
        spoiled, rows = out.clone(), slice(block_row * 128, (block_row + 1) * 128)
        spoiled[rows.start + 5, 7] += 0.015 * out[rows].abs().max()
        assert script.largest_error(problem, "ours", spoiled) == pytest.approx(0.015)


@pytest.mark.parametrize("name", ["spmm_b64", "spmm_b128_block_scales", "sddmm_b128"])
def test_products_in_fp8_are_of_codes_and_scales(script: ModuleType, name: str) -> None:
    problem = small(script, f"e4m3_{name}", 512)
    assert problem.a.dtype == problem.b.dtype == torch.float8_e4m3fn
    left, right = problem.equal
    assert 2 * left.shape[0] * left.shape[1] * right.shape[1] == script.flops(problem)
    assert all(operand.dtype == torch.float8_e4m3fn for operand in (*problem.equal, *problem.dense))
    ours = script.exact(problem, "ours", 1)
    if name == "sddmm_b128":
        scale = float(problem.scales["scale_a"] * problem.scales["scale_b"])
        right = problem.a[128:256].double() @ problem.b.double().T * scale
    else:
        rows = problem.spec.block.rows
        of_blocks = problem.scales["scale_a"].double().expand(problem.a.values().shape[0])[:, None, None]
        indices = problem.a.crow_indices(), problem.a.col_indices()
        numbers = problem.a.values().double() * of_blocks
        a = dense(torch.sparse_bsr_tensor(*indices, numbers, size=problem.a.shape))
        of_b = problem.scales["scale_b"].double()
        b = problem.b.double() * (of_b.repeat_interleave(128, 1).T if of_b.dim() else of_b)
        right = a[rows : 2 * rows] @ b
    torch.testing.assert_close(ours, right)
    equal = script.exact(problem, script.FP8_EQUAL, 0)
    torch.testing.assert_close(equal, left[: equal.shape[0]].double() @ problem.equal[1].double())
