"""The attention benchmark, as far as it goes without a GPU: rows, work, the exact reference, what is printed."""

from __future__ import annotations

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
from codegen.parse import parse_spec
from codegen.render import render
from codegen.spec import AttentionSpec

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("attention") as module:
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
    assert len({row.name for row in script.ROWS}) == len(script.ROWS) == 80
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
    assert all(row.fields["share_kv_loads"] for row in group("overlap"))


def test_neighboring_lists_have_entries_in_common(script: ModuleType) -> None:
    drawn = torch.stack([torch.randperm(500)[: 32 + 5 * 8] for _ in range(4)]).view(1, 2, 2, -1)
    lists = script.neighbors(drawn, 32)
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
    assert int(lists.max()) < row.length // 64


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


@pytest.mark.parametrize("name", ["topk32_b64", "topk64_b128x64", "ada_topk32_b32", "window2k", "causal", "dense"])
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
    spoiled = out.clone()
    spoiled[0, -1] *= 1.015  # an error is relative: of small and of large results it is the same
    for size in (1.0, 0.125, 8.0):
        found = script.largest_error(replace(problem, v=v * size), spoiled * size)
        assert found == pytest.approx(0.015, rel=1e-2)
    out[0, -1, length // 2, 0] += 0.1
    assert not script.largest_error(problem, out) <= script.harness.TOLERANCE
    out[0, -1, 0, 0] = torch.nan
    assert not script.largest_error(problem, out) <= script.harness.TOLERANCE
    with pytest.raises(ValueError, match="has shape"):
        script.largest_error(problem, out[:, :1])


def test_what_a_row_says(script: ModuleType) -> None:
    def told(**changes: float) -> list[str]:
        found = record("x", ours=630.0, FA4=600.0, flex=400.0)
        for label, tflops in changes.items():
            found["results"][label] |= {"back_to_back_milliseconds": 1.25, "back_to_back_tflops": tflops}
        return script.harness.cells(found)

    ours = ("x", "1.000 / 1.250", "630 / 504", "700")
    assert told(ours=504.0, FA4=420.0, flex=400.0) == [*ours, "600 / 420", "FA4", "1.05 / 1.20", "1e-03"]
    assert told(ours=504.0, FA4=420.0, flex=504.0) == [*ours, "600 / 504", "FA4 / flex", "1.05 / 1.00", "1e-03"]
    older = ("x", "1.000 / -", "630 / -", "700")  # without the times back to back
    assert told() == [*older, "600 / -", "FA4", "1.05 / -", "1e-03"]
    assert script.harness.cells(record("x", ours=630.0)) == [*older, "-", "-", "-", "1e-03"]
    assert script.harness.cells(record("x", ours=630.0) | {"target_tflops": None})[3] == "-"
    assert script.harness.cells(record("x", FA4=600.0)) == ["x", "-", "-", "700", "600 / -", "FA4", "-", "-"]


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
    path.write_text(json.dumps(report | {"rows": [record("x", ours=1.0), record("y", FA4=1.0)]}))
    with pytest.raises(SystemExit, match="without a time of ours"):
        script.main()


def test_runs_of_one_kind_of_machine_become_one(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = {"device": "a device", "driver": "580.0", "versions": {"torch": "2.11"}}
    first = {**machine, "rows": [record("x", ours=1.0), record("y", ours=2.0)], "not_run": ["z", "u"]}
    second = {**machine, "rows": [record("z", ours=3.0), record("y", ours=4.0) | {"not_installed": ["fa3"]}]}
    second["versions"] = {"torch": "2.11", "triton": "3.6"}
    paths = [tmp_path / name for name in ("first.json", "second.json", "both.json")]
    for path, report in zip(paths, (first, second), strict=False):
        path.write_text(json.dumps(report))
    command = ["attention.py", "--from", *map(str, paths[:2]), "--json", str(paths[2])]
    monkeypatch.setattr("sys.argv", command)
    script.main()
    both = json.loads(paths[2].read_text())
    assert [(row["name"], row["results"]["ours"]["tflops"]) for row in both["rows"]] == [("x", 1), ("y", 4), ("z", 3)]
    assert both["not_run"] == ["u"] and both["versions"] == second["versions"]
    assert "peer not installed: fa3, for y\n" in capsys.readouterr().out
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
        *("not_shared", "sdpa", "flex", "fa3", "fa4", "cudnn_bsa", "flashinfer", "flashinfer_cake"),
    ]
    for wrong in (["--rows", "nothing"], ["--peers", "fa4,nothing"], ["--groups", "nothing"]):
        with pytest.raises(SystemExit, match="2"):
            script.parse_arguments(wrong)
        assert "nothing" in capsys.readouterr().err


def test_rows_are_run_on_the_data_that_are_asked_for(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*arguments: str) -> list[tuple[str, str, tuple[str, ...], float | None]]:
        given: list[Any] = []
        monkeypatch.setattr(script.harness, "environment", lambda packages: {})
        monkeypatch.setattr(script.harness, "measure", lambda options, rows, *more: given.extend(rows))
        script.measure(script.parse_arguments(["--rows", "dense", *arguments]))
        return [(row.name, row.data, row.groups, row.target) for row in given]

    plain = ("dense", "std1", ("main",), 690)
    assert rows() == [plain]
    assert rows("--data", "std4", "std1", "std4") == [("dense, std4", "std4", (), None), plain]
    assert [data for _, data, *_ in rows("--data", "all")] == list(script.data_sets.DATA)
    with pytest.raises(SystemExit, match="2"):
        script.parse_arguments(["--data", "nothing"])


def test_copies_of_a_peer_are_brought_up_to_date(script: ModuleType) -> None:
    q, k, v = (torch.full((1, heads, 4, 2), value) for heads, value in ((2, 1.0), (1, 2.0), (1, 3.0)))
    problem = script.Problem(None, q, k, v, ())
    first = problem.copies(lambda t: t.transpose(1, 2).contiguous())
    second = problem.copies(lambda t: t[0].to(torch.bfloat16))
    q.copy_(torch.arange(16.0).view(q.shape))
    k.fill_(7.0)
    problem.refresh_copies()
    for tensor, one, two in zip((q, k, v), first, second, strict=True):
        assert torch.equal(one, tensor.transpose(1, 2)) and torch.equal(two.float(), tensor[0])
    assert replace(problem, v=k)._copies == []  # those of another problem are not its own


def test_exact_sees_full_blocks_whole_and_partial_ones_masked(script: ModuleType) -> None:
    torch.manual_seed(0)
    (row,) = (row for row in script.ROWS if row.name == "block_lists")
    spec, length, size = spec_of(row.fields), 1024, 128
    assert spec.hash == find_spec("h100_block_lists").spec.hash
    q, k, v = (torch.randn(1, 2, length, 128) for _ in range(3))
    blocks = length // size
    diagonal = torch.arange(blocks, dtype=torch.int32).expand(1, 2, blocks)
    counts = (diagonal - 1).clamp(min=0).contiguous()  # full: block 0 to the one before the last before its own
    full = torch.arange(blocks, dtype=torch.int32).expand(1, 2, blocks, blocks).contiguous()
    lists = (torch.ones_like(counts), diagonal[..., None].contiguous(), counts, full)
    problem = script.Problem(spec, q, k, v, lists)
    position = torch.arange(length)
    own = position // size
    seen = (own[None] < (own[:, None] - 1)) | ((own[None] == own[:, None]) & (position[None] <= position[:, None]))
    scores = (q[0, 1].double() @ k[0, 1].double().T * 128**-0.5).masked_fill(~seen, -torch.inf)
    out = torch.zeros(q.shape, dtype=torch.float64)
    out[0, 1] = scores.softmax(-1) @ v[0, 1].double()
    parts = script.exact_parts(problem, [1], parts=5)
    assert [part.rows.start for part in parts] == [0, 256, 512, 768, 960]
    absolute, relative = script.errors_of(problem, parts, out)
    assert absolute < 1e-12 and relative < 1e-12
    out[0, 1, 1023, 5] += 0.25
    absolute, relative = script.errors_of(problem, parts, out)
    assert absolute == pytest.approx(0.25) and relative == pytest.approx(0.25 / float(parts[-1].expected.abs().max()))


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
    freed: list[None] = []
    monkeypatch.setattr(script, "free_memory", lambda: freed.append(None))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = tmp_path / "run.json"
    arguments = ["--rows", "topk16", "topk32", "topk64", "--json", str(path), "--peers", "sdpa,flex,fa4"]
    arguments += [] if budget is None else ["--budget", str(budget)]
    report = script.measure(script.parse_arguments(arguments))
    names = ["topk16", "topk32", "topk64"]
    assert [row["name"] for row in report["rows"]] == names[:run] and len(freed) == run
    assert report["not_run"] == names[run:]
    assert [row["not_installed"] for row in report["rows"]] == [["fa4"]] * run
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
    assert found == ["run.svg", "run_sweeps.svg"]


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


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_flashinfer_gets_heads_one_after_the_other(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, kv_heads: int
) -> None:
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
    q, k, v = (torch.randn(1, heads, 256, 128, dtype=torch.float16) for heads in (4, kv_heads, kv_heads))
    lists = torch.rand(1, 4, 4, 4).argsort(-1)[..., :2].int()
    problem = script.Problem(spec, q, k, v, (lists,))
    (call,) = script.PEERS["flashinfer"].make(problem).values()
    assert script.largest_error(problem, call()) < 1e-12
    with pytest.raises(ValueError, match="batch is 2"):
        script.PEERS["flashinfer"].make(replace(problem, q=q.expand(2, -1, -1, -1)))


@pytest.mark.parametrize("block", [(64, 64), (128, 64), (128, 128)])
def test_flashinfer_cake_gets_blocks_of_64(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, block: tuple[int, int]
) -> None:
    """A wrapper that sees what its mask says, in place of the package."""
    planned: list[Any] = []

    class Wrapper:
        def __init__(self, workspace: Any, backend: str) -> None:
            assert backend == "cake"

        def plan(
            self, mask: Any, rows: Any, columns: Any, heads: int, kv_heads: int, size: int, q_data_type: Any
        ) -> None:
            assert (rows.tolist(), columns.tolist()) == ([[64] * 4] * 2, [[64] * 8] * 2)
            assert (heads, kv_heads, size, q_data_type) == (2, 2, 128, torch.bfloat16)
            planned[:] = [mask]

        def run(self, q: Any, k: Any, v: Any) -> Any:
            assert {t.dtype for t in (q, k, v)} == {torch.bfloat16}
            mask = planned[0].repeat_interleave(64, 1).repeat_interleave(64, 2)
            scores = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
            return scores.softmax(-1) @ v.double()

    package = ModuleType("flashinfer")
    package.VariableBlockSparseAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    torch.manual_seed(0)
    spec = spec_of(script.topk(128, 2, *block, dtype="bf16"))
    q, k, v = (torch.randn(1, 2, length, 128).bfloat16() for length in (256, 512, 512))
    lists = torch.rand(1, 2, 256 // block[0], 512 // block[1]).argsort(-1)[..., :2].int()
    problem = script.Problem(spec, q, k, v, (lists,))
    ((label, call),) = script.PEERS["flashinfer_cake"].make(problem).items()
    found, scores = call(), q.double() @ k.double().mT * 128**-0.5
    seen = torch.zeros(scores.shape, dtype=torch.bool)
    for head, row, block_of_keys in (
        (h, i, j) for h in range(2) for i in range(lists.shape[2]) for j in lists[0, h, i]
    ):
        rows, keys = (slice(at * size, (at + 1) * size) for at, size in zip((row, block_of_keys), block, strict=True))
        seen[0, head, rows, keys] = True
    assert label == "FlashInfer cake (bf16)" and found.shape == q.shape
    assert torch.allclose(found, scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double())
    with pytest.raises(ValueError, match="batch is 2"):
        script.PEERS["flashinfer_cake"].make(replace(problem, q=q.expand(2, -1, -1, -1)))


def test_only_calls_with_right_results_are_timed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"ours": 1e-2, "wrong": 1.01e-2, "nan": float("nan"), "good": 0.00123456}
    repeated: list[int] = []

    def median(calls: dict[str, Any], repeats: int) -> dict[str, float]:
        repeated.append(repeats)
        return dict.fromkeys(calls, 2.00001)

    def many(problem: str) -> dict[str, Any]:
        return {label: lambda label=label: (problem, label) for label in errors}

    def raises(problem: str) -> dict[str, Any]:
        raise ValueError("\n  takes another\nsecond line")

    def cannot() -> None:
        raise RuntimeError

    def error_of(label: str, result: tuple[str, str]) -> float:
        assert result == ("a problem", label)
        return errors[label]

    def blocks(calls: dict[str, Any], rounds: int) -> dict[str, float]:
        repeated.append(rounds)
        return dict.fromkeys(calls, 2.5)

    monkeypatch.setattr(script.harness, "single_calls", median)
    monkeypatch.setattr(script.harness, "back_to_back", blocks)
    times = {"milliseconds": 2.0, "tflops": 1500.0, "back_to_back_milliseconds": 2.5, "back_to_back_tflops": 1200.0}
    makers = [raises, many, lambda problem: {"cannot": cannot}]
    for quick in (True, False):
        found = script.harness.check_and_time(makers, "a problem", error_of, 3e12, quick)
        assert found["results"] == {
            "ours": {**times, "error": 1e-2},
            "good": {**times, "error": 1.23e-3},
        }
        assert found["failed"] == {
            "raises": "ValueError: takes another",
            "wrong": "wrong result: off by 1.0e-02 of the largest element",
            "nan": "wrong result: off by nan of the largest element",
            "cannot": "RuntimeError: ",
        }
    assert repeated == [7, 1, 21, 3]


def test_a_row_without_a_time_of_ours_is_a_failure(script: ModuleType) -> None:
    script.harness.check_own({"rows": [record("x", ours=1.0, FA4=2.0)]})
    with pytest.raises(SystemExit, match="without a time of ours"):
        script.harness.check_own({"rows": [record("x", ours=1.0), record("y", FA4=2.0)]})


def test_measuring_needs_a_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    options = script.parse_arguments([])
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        if there:
            assert script.report_of(options, lambda given: (given, "measured")) == (options, "measured")
        else:
            with pytest.raises(SystemExit, match="torch sees no GPU"):
                script.report_of(options, script.measure)


def test_a_record_says_what_was_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (row for row in script.ROWS if row.name == "causal")
    q = torch.zeros(2, 2, 128, 128)
    problem = script.Problem(spec_of(row.fields), q, q, q, ())
    asked: list[Any] = []

    def check(makers: list[Any], given: Any, error_of: Any, work: float, quick: bool) -> dict[str, Any]:
        asked.append((makers, given, work, quick))
        with pytest.raises(ValueError, match="has shape"):
            error_of("ours", torch.zeros(1))
        return {"results": results, "failed": {}}

    monkeypatch.setattr(script, "make_problem", lambda row, spec: problem)
    monkeypatch.setattr(script, "flops", lambda row, spec, lists: 5.0)
    monkeypatch.setattr(script, "check_and_time", check)
    monkeypatch.setattr(script, "kernel_fields", lambda named, ran: {"spec": named.spec.op, "ran": ran})
    for results in ({"ours": {}}, {"FA4": {}}):
        found = script.run_row(row, ["fa4", "flex"], True)
        assert found == {
            **{"name": "causal", "groups": ("main",), "data": "std1"},
            **{"batch": 2, "heads": 16, "kv_heads": 16, "length": 16384},
            **{"spec": "attention", "ran": "ours" in results, "flops": 5.0, "target_tflops": 715},
            **{"results": results, "failed": {}},
        }
        assert asked.pop() == ([script.ours, script.PEERS["fa4"].make], problem, 5.0, True)
    (packed,) = (row for row in script.ROWS if row.name == "gqa_topk32_b64")
    assert script.run_row(packed, [], False)["kv_heads"] == 8 and asked[0][0] == [script.ours]


@pytest.mark.parametrize("kind", ["dense", "causal", "sliding_window", "topk"])
def test_fa4_is_asked_for_the_same_pairs(script: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Functions that attend as they are told to, in place of the package."""

    class Blocks:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

    def attend(q: Any, k: Any, v: Any, causal: bool = False, window_size: Any = None, block_sparse_tensors: Any = None):
        length = q.shape[1]
        query, key = torch.arange(length)[:, None], torch.arange(length)[None]
        seen = torch.ones(q.shape[2], length, length, dtype=torch.bool)
        if causal:
            seen &= key <= query
        if window_size is not None:
            seen &= (key >= query - window_size[0]) & (key <= query + window_size[1])
        if (lists := block_sparse_tensors) is not None:
            rows, columns = lists.block_size
            assert int(lists.mask_block_cnt.max()) == 0
            for head in range(q.shape[2]):
                blocks = torch.zeros(length // rows, length // columns, dtype=torch.bool)
                for row in range(length // rows):
                    blocks[row, lists.full_block_idx[0, head, row, : lists.full_block_cnt[0, head, row]].long()] = True
                seen[head] &= blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    package, sparse = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.block_sparsity")
    package.flash_attn_func = attend  # type: ignore[attr-defined]
    sparse.BlockSparseTensorsTorch = Blocks  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, sparse.__name__, sparse)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **more: zeros(*sizes, **(more | {"device": "cpu"})))
    torch.manual_seed(0)
    fields = {
        "topk": script.topk(128, 2, 64, 64),
        "sliding_window": script.fields(128, {"kind": kind, "left": 70, "right": 3}),
    }
    spec = spec_of(fields.get(kind) or script.fields(128, {"kind": kind}))
    q, k, v = (torch.randn(1, heads, 256, 128, dtype=torch.float16) for heads in (4, 2, 2))
    lists = (torch.rand(1, 4, 4, 4).argsort(-1)[..., :2].int(),) if kind == "topk" else ()
    problem = script.Problem(spec, q, k, v, lists)
    (call,) = script.PEERS["fa4"].make(problem).values()
    assert script.largest_error(problem, call()) < 1e-12
    if kind in ("dense", "causal"):
        monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
        (call,) = script.PEERS["fa3"].make(problem).values()
        assert script.largest_error(problem, call()) <= script.harness.TOLERANCE


def test_a_peer_is_installed_with_one_of_its_packages(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "b" or None)
    installed = [script.harness.Peer(None, packages).installed for packages in ((), ("a",), ("a", "b"))]
    assert installed == [True, False, True]


@pytest.mark.parametrize("name", ["topk32_b64", "gqa_topk32_b64", "causal", "ada_topk32_b64", "topk32_b64_ordered"])
def test_our_call_takes_the_lists_that_are_drawn(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given: list[Any] = []

    class Kernel:
        def __init__(self, spec: AttentionSpec, forward_compatible: bool) -> None:
            assert forward_compatible == (spec.arch == "sm_89")

        def prepare(self, lists: Any, length: int) -> tuple[Any, int]:
            return lists, length

        def __call__(self, *tensors: Any, out: Any) -> None:
            given.append((tensors, out))

    def drawn(heads: int, rows: int, columns: int, k: int) -> torch.Tensor:
        return torch.stack([torch.randperm(columns)[:k] for _ in range(heads * rows)]).view(1, heads, rows, k)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda sizes, **more: empty(sizes, **(more | {"device": "cpu"})))
    monkeypatch.setattr(script, "load_kernel", Kernel)
    monkeypatch.setattr(script, "random_lists", drawn)
    (row,) = (replace(row, length=4096) for row in script.ROWS if row.name == name)
    spec = spec_of(row.fields)
    problem = script.make_problem(row, spec)
    kv_heads = row.kv_heads or row.heads
    assert problem.q.shape == (row.batch, row.heads, 4096, spec.head_dim)
    assert problem.k.shape == problem.v.shape == (row.batch, kv_heads, 4096, spec.head_dim)
    for lists in problem.lists:
        assert lists.shape == (1, row.heads // spec.pack_gqa, 64, 32) and lists.is_contiguous()
        assert torch.equal(lists, lists.sort(-1).values)
    (call,) = script.ours(problem).values()
    out = call()
    (q, k, v, *lists), written = given[0]
    assert out is written and out.shape == problem.q.shape
    assert q is problem.q and k is problem.k and v is problem.v
    if spec.query_grouping == "given":
        ((*lists, length),) = lists
        assert length == 4096
    assert all(one is two for one, two in zip(lists, problem.lists, strict=True))


def test_not_shared_is_the_kernel_without_what_sharing_needs(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[AttentionSpec] = []

    def load(spec: AttentionSpec) -> Any:
        loaded.append(spec)
        return lambda *tensors, out: None

    monkeypatch.setattr(sys.modules["attention_peers"], "load_kernel", load)
    q = torch.zeros(1, 2, 128, 128)
    for name in ("overlap_all", "topk32_b64_128k", "topk32_b64_ordered"):
        (row,) = (row for row in script.ROWS if row.name == name)
        ((label, call),) = script.PEERS["not_shared"].make(script.Problem(spec_of(row.fields), q, q, q, ())).items()
        spec = loaded.pop()
        assert label == "ours, not shared" and call().shape == q.shape
        assert not (spec.share_kv_loads or spec.l2_lockstep or spec.query_grouping != "none") and (
            spec.tile.m,
            spec.tile.n,
        ) == (
            128,
            64,
        )
        assert spec.pattern == spec_of(row.fields).pattern


def test_a_tuned_flex_call_is_the_fastest_of_its_options(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = sys.modules["attention_peers"]

    def flex_call(q: Any, k: Any, v: Any, mask: Any, options: Any = None) -> Any:
        def call() -> str:
            if options["num_warps"] in refused:
                raise RuntimeError("too much shared memory")
            return f"{options['num_warps']} {options['num_stages']}"

        return call

    def median(calls: dict[str, Any], repeats: int, warm_up: int) -> dict[str, float]:
        return {label: 1.0 if label.endswith("8 warps 3 stages") else 2.0 for label in calls}

    monkeypatch.setattr(peers, "flex_mask", lambda *given: type("Mask", (), {"BLOCK_SIZE": (128, 64)}))
    monkeypatch.setattr(peers, "flex_call", flex_call)
    monkeypatch.setattr(peers, "single_calls", median)
    q = torch.zeros(1, 2, 128, 128)
    problem, refused = script.Problem(None, q, q, q, ()), {4}
    ((label, call),) = script.PEERS["flex_tuned"].make(problem).items()
    assert (label, call()) == ("FlexAttention 128x64 8 warps 3 stages", "8 3")
    refused = {4, 8}
    with pytest.raises(RuntimeError, match="too much shared memory"):
        script.PEERS["flex_tuned"].make(problem)


@pytest.mark.parametrize(("length", "splits"), [(256, (1,)), (131072, (1, 2, 4))])
def test_cudnn_gets_the_lists_of_each_head(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, length: int, splits: tuple[int, ...]
) -> None:
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    class Bsa:
        @staticmethod
        def block_sparse_attention_forward(*tensors: Any, **options: Any) -> dict[str, str]:
            given.append((tensors, options))
            return {"o_tensor": "the result"}

    package = ModuleType("cudnn")
    package.BSA = Bsa  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cudnn", package)
    spec = spec_of(script.topk(128, 2, 64, 64))
    q, k = torch.zeros(1).expand(1, 4, length, 128), torch.zeros(1).expand(1, 2, length, 128)
    problem = script.Problem(spec, q, k, k, (torch.arange(8, dtype=torch.int32).view(1, 2, 2, 2),))
    calls = script.PEERS["cudnn_bsa"].make(problem)
    assert list(calls) == ["cuDNN BSA", "cuDNN BSA 2 splits", "cuDNN BSA 4 splits"][: len(splits)]
    for call, parts in zip(calls.values(), splits, strict=True):
        assert call() == "the result"
        (tensors, options) = given.pop()
        assert tensors[:3] == (q, k, k) and torch.equal(tensors[3], problem.head_lists[0])
        assert options == {"sparse_block_size": 64, "layout": "bhsd", "kv_splits": parts}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense_8k", {"causal": False}),
        ("causal_8k", {"causal": True}),
        ("window2k_h16", {"causal": False, "window_size": (2047, 0)}),
    ],
)
def test_fa3_is_asked_for_the_same_pairs_in_bf16(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    given: list[Any] = []

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given.append(((q, k, v), options))
        return q, None

    package = ModuleType("flash_attn_interface")
    package.flash_attn_func = attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    (row,) = (row for row in script.ROWS if row.name == name)
    q, k = torch.randn(1, 2, 8, 128).half(), torch.randn(1, 1, 8, 128).half()
    problem = script.Problem(spec_of(row.fields), q, k, k, ())
    (call,) = script.PEERS["fa3"].make(problem).values()
    q.fill_(3.0)
    problem.refresh_copies()
    assert torch.equal(call(), q.bfloat16())
    ((tensors, told),) = given
    assert told == options
    assert [(t.dtype, tuple(t.shape)) for t in tensors] == [(torch.bfloat16, (1, 8, heads, 128)) for heads in (2, 1, 1)]
