"""The attention benchmark, as far as it goes without a GPU: rows, work, the exact reference, what is printed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from codegen.library import find_spec
from codegen.render import render
from codegen.spec import AttentionSpec, parse_spec

torch = pytest.importorskip("torch")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "attention.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # as when it is run
        spec = importlib.util.spec_from_file_location("attention_benchmark", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look themselves up
        spec.loader.exec_module(module)
        yield module


def spec_of(fields: dict[str, Any]) -> AttentionSpec:
    spec = parse_spec(fields)
    assert isinstance(spec, AttentionSpec)
    return spec


def record(name: str, **tflops: float) -> dict[str, Any]:
    results = {label: {"milliseconds": 1.0, "tflops": value, "error": 1e-3} for label, value in tflops.items()}
    return {
        "name": name,
        "groups": ["main"],
        "target_tflops": 700.0,
        "results": results,
        "failed": {"FA4": "ImportError: [no] FA4"},
    }


def test_every_row_is_a_kernel_that_can_be_built(script: ModuleType) -> None:
    assert len({row.name for row in script.ROWS}) == len(script.ROWS) == 70
    for row in script.ROWS:
        assert render(find_spec(row.fields))
        assert set(row.peers) <= set(script.PEERS)
        assert row.groups and set(row.groups) <= set(script.GROUPS)
        assert "main" not in row.groups or row.target is not None
        assert row.target is None or {"main", "ada"} & set(row.groups)
        assert row.fields["arch"] == ("sm_89" if row.groups == ("ada",) else "sm_90a")


def test_groups_have_the_shapes_they_are_for(script: ModuleType) -> None:
    def group(name: str) -> list[Any]:
        return [row for row in script.ROWS if name in row.groups]

    assert len(group("main")) == 20
    assert sorted(row.fields["pattern"]["k"] for row in group("k")) == [8, 16, 32, 64, 128]
    assert {(row.heads, row.length, row.fields["head_dim"]) for row in group("k")} == {(16, 32768, 128)}
    assert sorted(row.length for row in group("length")) == [2**power for power in range(12, 18)]
    assert {(row.heads, row.fields["pattern"]["k"]) for row in group("length")} == {(8, 32)}
    short = {(row.fields["pattern"]["kind"], row.length, row.heads, row.fields["head_dim"]) for row in group("short")}
    positional = {
        (kind, s, h, d) for kind in ("dense", "causal") for s in (1024, 4096) for h in (8, 16) for d in (64, 128)
    }
    assert short == positional | {("topk", 4096, h, d) for h in (8, 16) for d in (64, 128)}

    assert [row.overlap for row in group("overlap")] == [1.0, 0.75, None]
    assert all(row.fields["share_kv"] for row in group("overlap"))


def test_neighbouring_lists_have_entries_in_common(script: ModuleType) -> None:
    drawn = torch.stack([torch.randperm(500)[: 32 + 5 * 8] for _ in range(4)]).view(1, 2, 2, -1)
    lists = script.neighbours(drawn, 32)
    assert lists.shape == (1, 2, 12, 32)
    for head in range(2):
        for row in range(11):
            first, second = (set(lists[0, head, one].tolist()) for one in (row, row + 1))
            assert len(first) == 32
            assert row % 6 == 5 or len(first & second) == 24


@pytest.mark.parametrize(("overlap", "common"), [(1.0, 32), (0.75, 24)])
def test_lists_of_a_row_that_overlap(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, overlap: float, common: int
) -> None:
    def drawn(heads: int, rows: int, columns: int, k: int) -> torch.Tensor:
        return torch.stack([torch.randperm(columns)[:k] for _ in range(heads * rows)]).view(1, heads, rows, k)

    monkeypatch.setattr(script, "random_lists", drawn)
    row = next(row for row in script.ROWS if row.overlap == overlap)
    lists = script.drawn_lists(row, spec_of(row.fields), 2)
    assert lists.shape == (1, 2, row.length // 64, 32)
    assert len(set(lists[0, 1, 7].tolist()) & set(lists[0, 1, 8].tolist())) == common


def test_work_counts_visible_pairs(script: ModuleType) -> None:
    rows = {row.name: row for row in script.ROWS}

    def pairs(name: str, *lists: Any) -> float:
        row = replace(rows[name], length=8192)
        spec = spec_of(row.fields)
        work = script.flops(row, spec, lists, device="cpu")
        return work / (4 * row.batch * row.heads * spec.head_dim)

    assert pairs("dense_d64") == 8192**2
    assert pairs("causal") == 8192 * 8193 / 2
    assert pairs("window2k") == 2048 * 2049 / 2 + (8192 - 2048) * 2048
    assert pairs("gqa_topk32_b64", torch.zeros(1, 64, 128, 32)) == 8192 * 32 * 64
    assert pairs("topk64_b128x64", torch.zeros(1, 16, 64, 64)) == 8192 * 64 * 64


@pytest.mark.parametrize("name", ["topk32_b64", "topk64_b128x64", "window2k", "causal", "dense"])
def test_exact_is_attention_over_the_visible_pairs(script: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    (row,) = (row for row in script.ROWS if row.name == name)
    spec, length, heads, kv_heads = spec_of(row.fields), 4096, 4, 2
    q, k, v = (torch.randn(1, h, length, spec.head_dim, dtype=torch.float16) for h in (heads, kv_heads, kv_heads))
    position = torch.arange(length)
    seen = spec.pattern.visible(position[:, None], position[None], length, length).expand(length, length)
    lists: tuple[Any, ...] = ()
    if (block := spec.pattern.fixed_block) is not None:
        grid = (1, heads, length // block.q, length // block.kv)
        drawn = torch.rand(grid).argsort(-1)[..., : row.fields["pattern"]["k"]]
        listed = torch.zeros(grid, dtype=torch.bool).scatter_(3, drawn, True)[0, -1]
        seen = seen & listed.repeat_interleave(block.q, 0).repeat_interleave(block.kv, 1)
        lists = (drawn.int(),)
    problem = script.Problem(spec, q, k, v, lists)
    weights = (q[0, -1].double() @ k[0, -1].double().T * spec.head_dim**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    out = torch.zeros(q.shape, dtype=torch.float64)
    out[0, -1] = weights @ v[0, -1].double()
    assert script.largest_error(problem, out) < 1e-12
    assert script.largest_error(problem, out.half()) < script.harness.TOLERANCE
    out[0, -1, length // 2, 0] += 0.1
    assert not script.largest_error(problem, out) <= script.harness.TOLERANCE
    out[0, -1, 0, 0] = torch.nan
    assert not script.largest_error(problem, out) <= script.harness.TOLERANCE
    with pytest.raises(ValueError, match="has shape"):
        script.largest_error(problem, out[:, :1])


def test_what_a_row_says(script: ModuleType) -> None:
    assert script.harness.cells(record("x", ours=630.0, FA4=600.0, flex=400.0)) == [
        *("x", "1.000", "630", "700", "600", "FA4", "1.05", "1e-03"),
    ]
    assert script.harness.cells(record("x", ours=630.0)) == ["x", "1.000", "630", "700", "-", "-", "-", "1e-03"]
    assert script.harness.cells(record("x", ours=630.0) | {"target_tflops": None})[3] == "-"
    assert script.harness.cells(record("x", FA4=600.0)) == ["x", "-", "-", "700", "600", "FA4", "-", "-"]


def test_shows_an_earlier_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    report = {"device": "a device", "driver": "580.0", "rows": [record("x", ours=1.0)], "not_run": ["y", "z"]}
    path.write_text(json.dumps(report))
    monkeypatch.setattr("sys.argv", ["attention.py", "--from", str(path)])
    script.main()
    out = capsys.readouterr().out
    assert "a device, driver 580.0" in out
    assert "x: FA4 has no time: ImportError: [no] FA4" in out
    assert "rows not run: y, z" in out


def test_runs_of_one_kind_of_machine_become_one(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = {"device": "a device", "driver": "580.0", "versions": {"torch": "2.11"}}
    first = {**machine, "rows": [record("x", ours=1.0), record("y", ours=2.0)], "not_run": ["z", "u"]}
    second = {**machine, "rows": [record("z", ours=3.0), record("y", ours=4.0)], "not_installed": ["fa3"]}
    second["versions"] = {"torch": "2.11", "triton": "3.6"}
    paths = [tmp_path / name for name in ("first.json", "second.json", "both.json")]
    for path, report in zip(paths, (first, second), strict=False):
        path.write_text(json.dumps(report))
    command = ["attention.py", "--from", *map(str, paths[:2]), "--json", str(paths[2])]
    monkeypatch.setattr("sys.argv", command)
    script.main()
    both = json.loads(paths[2].read_text())
    assert [(row["name"], row["results"]["ours"]["tflops"]) for row in both["rows"]] == [("x", 1), ("y", 4), ("z", 3)]
    assert (both["not_run"], both["not_installed"]) == (["u"], ["fa3"]) and both["versions"] == second["versions"]
    for change, message in (
        ({"driver": "590.0"}, "driver: 580.0; 590.0"),
        ({"versions": {"torch": "3"}}, "torch: 2.11; 3"),
    ):
        paths[1].write_text(json.dumps(second | change))
        with pytest.raises(SystemExit, match=f"differ in {message}"):
            script.main()


def test_arguments(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = script.parse_arguments(["--rows", "dense", "causal", "--peers", "fa4,sdpa", "--quick"])
    assert (options.rows, options.peers, options.quick) == (["dense", "causal"], ["fa4", "sdpa"], True)
    assert script.parse_arguments([]).peers == [
        *("not_shared", "sdpa", "flex", "fa3", "fa4", "cudnn_bsa", "flashinfer"),
    ]
    for wrong in (["--rows", "nothing"], ["--peers", "fa4,nothing"], ["--groups", "nothing"]):
        with pytest.raises(SystemExit, match="2"):
            script.parse_arguments(wrong)
        assert "nothing" in capsys.readouterr().err


def test_rows_are_chosen_by_name_group_or_quick(script: ModuleType) -> None:
    def names(*arguments: str) -> list[str]:
        return [row.name for row in script.harness.chosen_rows(script.parse_arguments([*arguments]), script.ROWS)]

    assert len(names()) == len(script.ROWS)
    assert names("--groups", "k") == ["topk16", "topk32", "topk64", "topk8", "topk128"]
    assert names("--groups", "k", "--rows", "dense") == ["topk16", "topk32", "topk64", "dense", "topk8", "topk128"]
    assert names("--quick") == [row.name for row in script.ROWS if row.quick]


@pytest.mark.parametrize(("budget", "run"), [(None, 3), (25.0, 3), (15.0, 2), (0.0, 1)])
def test_rows_beyond_the_budget_are_listed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float | None, run: int
) -> None:
    clock = [0.0]

    def run_row(row: Any, peers: list[str], quick: bool) -> dict[str, Any]:
        assert peers == ["sdpa", "flex"]  # what is not installed is not asked
        clock[0] += 10.0
        return record(row.name, ours=1.0)

    monkeypatch.setattr(script.harness.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(script, "run_row", run_row)
    monkeypatch.setattr(script.harness, "environment", lambda packages: {"device": "a device"})
    monkeypatch.setattr(script, "free_memory", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = tmp_path / "run.json"
    arguments = ["--rows", "topk16", "topk32", "topk64", "--json", str(path), "--peers", "sdpa,flex,fa4"]
    arguments += [] if budget is None else ["--budget", str(budget)]
    report = script.measure(script.parse_arguments(arguments))
    names = ["topk16", "topk32", "topk64"]
    assert [row["name"] for row in report["rows"]] == names[:run]
    assert report["not_run"] == names[run:] and report["not_installed"] == ["fa4"]
    assert json.loads(path.read_text()) == report


def test_a_sweep_is_a_line_for_each_label(script: ModuleType) -> None:
    def at(length: int, **tflops: float) -> dict[str, Any]:
        return record("x", **tflops) | {"length": length, "spec": {"pattern": {"k": length // 1024}}}

    records = [at(8192, ours=2.0, FA4=3.0), at(4096, ours=1.0)]
    assert script.sweep_lines("length", records) == {"ours": ([4096, 8192], [1.0, 2.0]), "FA4": ([8192], [3.0])}
    assert script.sweep_lines("k", records)["ours"] == ([4, 8], [1.0, 2.0])


def test_plots_are_drawn(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        record("x", ours=2.0, FA4=3.0) | {"length": length, "groups": ["main", "length"]} for length in (4096, 8192)
    ]
    script.plot({"device": "a device", "driver": "580.0", "rows": rows}, tmp_path / "run")
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["run.png", "run.svg", "run_sweeps.png", "run_sweeps.svg"]


def test_lists_of_a_pack_are_repeated_for_peers(script: ModuleType) -> None:
    q, k = torch.zeros(1, 8, 128, 64), torch.zeros(1, 2, 128, 64)
    lists = torch.arange(4, dtype=torch.int32).reshape(1, 4, 1, 1).expand(1, 4, 2, 3)
    problem = script.Problem(None, q, k, k, (lists,))
    (found,) = problem.head_lists
    assert found.shape == (1, 8, 2, 3) and found.is_contiguous()
    assert found[0, :, 0, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_exact_reads_the_list_of_the_heads_pack(script: ModuleType) -> None:
    torch.manual_seed(0)
    spec = spec_of(script.topk(128, 2, 64, 64))
    q, k, v = (torch.randn(1, heads, 512, 128, dtype=torch.float16) for heads in (4, 2, 2))
    packs = torch.rand(1, 2, 8, 8).argsort(-1)[..., :2].int()
    one = script.Problem(spec, q, k, v, (packs,))
    each = script.Problem(spec, q, k, v, one.head_lists)
    for head in range(4):
        assert torch.equal(script.exact(one, head, slice(64, 128)), script.exact(each, head, slice(64, 128)))


def test_flashinfer_gets_heads_one_after_the_other(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that multiplies blocks as it is told to, in place of the package."""
    planned: dict[str, Any] = {}

    class Wrapper:
        def __init__(self, workspace: Any, backend: str) -> None:
            pass

        def reset_workspace_buffer(self, *workspaces: Any) -> None:
            pass

        def plan(self, indptr: Any, indices: Any, m: int, n: int, r: int, c: int, **options: Any) -> None:
            planned.update(indptr=indptr, indices=indices, m=m, n=n, r=r, c=c)

        def run(self, q: Any, k: Any, v: Any) -> Any:
            assert q.shape[:2] == (planned["m"], 1) and k.shape[:2] == (planned["n"], 1)
            seen = torch.zeros(planned["m"] // planned["r"], planned["n"] // planned["c"], dtype=torch.bool)
            for row, (first, last) in enumerate(zip(planned["indptr"], planned["indptr"][1:], strict=False)):
                seen[row, planned["indices"][first:last].long()] = True
            mask = seen.repeat_interleave(planned["r"], 0).repeat_interleave(planned["c"], 1)
            scores = (q[:, 0].double() @ k[:, 0].double().T * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
            return (scores.softmax(-1) @ v[:, 0].double())[:, None]

    class Package(ModuleType):
        BlockSparseAttentionWrapper = Wrapper

    monkeypatch.setitem(sys.modules, "flashinfer", Package("flashinfer"))
    torch.manual_seed(0)
    spec = spec_of(script.topk(128, 2, 64, 64))
    q, k, v = (torch.randn(1, heads, 256, 128, dtype=torch.float16) for heads in (4, 2, 2))
    lists = torch.rand(1, 4, 4, 4).argsort(-1)[..., :2].int()
    problem = script.Problem(spec, q, k, v, (lists,))
    (call,) = script.PEERS["flashinfer"].make(problem).values()
    assert script.largest_error(problem, call()) < 1e-12


def test_rebind_is_for_earlier_runs(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.parse_arguments(["--rebind"])
    assert "--rebind needs --from" in capsys.readouterr().err
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps({"device": "a", "driver": "1", "versions": {"torch": "2"}, "rows": [record("x", ours=1)]})
    )

    def rebind(report: dict[str, Any], records: list[dict[str, Any]], kernel_of: object) -> None:
        records[0]["source_sha256"] = "new"

    monkeypatch.setattr(script.harness, "rebind", rebind)
    for more, found in (([], None), (["--rebind"], "new")):
        script.report_of(script.parse_arguments(["--from", str(path), "--json", str(path), *more]), script.measure)
        assert json.loads(path.read_text())["rows"][0].get("source_sha256") == found
