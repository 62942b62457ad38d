"""The benchmark on all data sets as far as it goes without a GPU: what is left, its file, a run on a fake device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from scripts import imported

from codegen.library import find_spec
from codegen.receipts import source_sha256
from codegen.render import render

torch = pytest.importorskip("torch")

from runtime.verify import rows  # noqa: E402


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("data") as module:
        yield module


@pytest.fixture
def cells(script: ModuleType) -> ModuleType:
    module: ModuleType = script.data_cells
    return module


def row_named(script: ModuleType, name: str) -> Any:
    (row,) = (row for row in script.attention.ROWS if row.name == name)
    return row


def cell_of(script: ModuleType, name: str = "topk32", data: str = "std1", dtype: str = "fp16", **changes: Any) -> Any:
    row = row_named(script, name)
    named = find_spec({**row.fields, "dtype": dtype})
    return {
        "device": "a device",
        **script.attention.shape_fields(row),
        "data": data,
        "spec": json.loads(named.spec.canonical_json()),
        "source_sha256": source_sha256(render(named)),
        "results": {"ours": {"tflops": 700.0, "back_to_back_tflops": 650.0, "absolute_error": 1e-4}},
        "failed": {},
        **changes,
    }


def write(path: Path, *cells: Any) -> Path:
    path.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    return path


def left(script: ModuleType, path: Path, *arguments: str) -> list[tuple[str, str, str]]:
    options = script.parse_arguments(["--cells", str(path), *arguments])
    columns = script.planned(options, script.data_cells.read(path))
    return [(column.row.name, data, column.dtype) for column in columns for data in column.data]


ONE_ROW = ("--rows", "topk32", "--dtypes", "fp16", "--data", "std1", "heads")


def test_a_complete_file_has_the_group_of_rows_and_every_data_set(script: ModuleType, cells: ModuleType) -> None:
    assert set(cells.ROWS) == {row.name for row in script.attention.ROWS if "data" in row.groups}
    assert cells.DATA["fp16"] == tuple(script.DATA)
    assert set(cells.DATA["bf16"]) <= set(script.DATA)
    found = left(script, Path("no such file"))
    assert len(found) == len(set(found)) == 11 * 10 + 11 * 4
    assert [dtype for *_, dtype in found] == ["fp16"] * 110 + ["bf16"] * 44


def test_peers_that_compile_for_long_are_the_last_resort(script: ModuleType) -> None:
    def peers(name: str, dtype: str = "fp16", asked: list[str] | None = None) -> tuple[str, ...]:
        found: tuple[str, ...] = script.peers_of(row_named(script, name), dtype, asked)
        return found

    assert peers("dense_8k") == ("sdpa", "fa4")
    assert peers("dense_8k", "bf16") == ("sdpa", "fa4", "fa3")  # its wheel has this type alone
    assert peers("window2k_h16", "bf16") == ("fa4", "fa3")
    assert peers("topk32") == ("fa4", "cudnn_bsa")
    assert peers("topk64_b128x64") == ("fa4",)
    assert peers("block_lists") == ("flex",)
    assert peers("topk32", asked=["flex", "fa4"]) == ("flex", "fa4")
    assert peers("block_lists", asked=["fa4"]) == ()


def test_cells_that_are_there_are_skipped(script: ModuleType, tmp_path: Path) -> None:
    path = write(tmp_path / "cells.jsonl", cell_of(script), cell_of(script, data="heads", dtype="bf16"))
    assert left(script, path, *ONE_ROW) == [("topk32", "heads", "fp16")]
    assert left(script, path, *ONE_ROW[:2], "--data", "heads") == [("topk32", "heads", "fp16")]


@pytest.mark.parametrize(
    "change", [{"source_sha256": "0" * 64}, {"length": 8192}, {"results": {}, "failed": {"ours": "RuntimeError: no"}}]
)
def test_what_has_changed_or_has_no_time_of_ours_is_measured_again(
    script: ModuleType, tmp_path: Path, change: dict[str, Any]
) -> None:
    older, heads = cell_of(script, **change), cell_of(script, data="heads")
    path = write(tmp_path / "cells.jsonl", older, heads)
    assert left(script, path, *ONE_ROW) == [("topk32", "std1", "fp16")]
    assert left(script, write(path, older, heads, cell_of(script)), *ONE_ROW) == []  # the newest counts
    assert left(script, write(path, cell_of(script), heads, older), *ONE_ROW) == [("topk32", "std1", "fp16")]


def test_the_newest_cell_counts(script: ModuleType, cells: ModuleType, tmp_path: Path) -> None:
    path = write(tmp_path / "cells.jsonl", cell_of(script, flops=1.0), cell_of(script, flops=2.0))
    assert [cell["flops"] for cell in cells.read(path).values()] == [2.0]


def test_a_line_of_a_killed_run_is_dropped(script: ModuleType, cells: ModuleType, tmp_path: Path) -> None:
    path = write(tmp_path / "cells.jsonl", cell_of(script), cell_of(script, data="heads"))
    whole = path.read_bytes()
    for missing in (1, 2, 300):
        path.write_bytes(whole[:-missing])
        assert [data for _, data, _ in cells.read(path)] == ["std1"]
        assert left(script, path, *ONE_ROW) == [("topk32", "heads", "fp16")]
    cells.drop_short_line(path)
    cells.append(path, cell_of(script, data="heads"))
    assert path.read_bytes() == whole
    cells.drop_short_line(path)
    assert path.read_bytes() == whole
    cells.drop_short_line(tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


def test_cells_of_two_devices_do_not_mix(
    script: ModuleType, cells: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "cells.jsonl", cell_of(script))
    monkeypatch.setattr(script.harness, "environment", lambda packages: {"device": "another"})
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"cells\.jsonl: cells of a device and of another; a file has those of one"):
        script.measure(script.parse_arguments(["--cells", str(path)]))
    assert path.read_bytes() == before
    write(path, cell_of(script), cell_of(script, data="heads", device="another"))
    with pytest.raises(SystemExit, match="of one device"):
        cells.read(path)


def test_cells_follow_a_source_whose_code_is_the_same(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.verify.rows.toolchain.compiler_version", lambda: ("", "a compiler"))
    monkeypatch.setattr("runtime.verify.rows._is_code_of", lambda row, compiled: row.code_sha256 == "c" * 64)
    monkeypatch.setattr("runtime.verify.rows._compiled", lambda named: SimpleNamespace(code=b"", plan=plan))
    plan = SimpleNamespace(launch_sha256="launch")
    older = {"source_sha256": "0" * 64, "versions": {"compiler": "a compiler"}}
    path = write(
        tmp_path / "cells.jsonl",
        cell_of(script, **older, code_sha256="c" * 64, flops=2.0),
        cell_of(script, data="heads", **older, code_sha256="a" * 64),
    )
    assert rows.carried_over(path).write(path)
    assert left(script, path, *ONE_ROW) == [("topk32", "heads", "fp16")]
    assert len(path.read_text().splitlines()) == 2


def test_measuring_needs_a_gpu(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["data.py", "--cells", str(tmp_path / "cells.jsonl")])
    with pytest.raises(SystemExit, match="torch sees no GPU"):
        script.main()


@pytest.mark.parametrize("arguments", [[], ["--rows", "nothing"], ["--data", "nothing"], ["--peers", "nothing"]])
def test_arguments_that_are_refused(script: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.parse_arguments([*arguments, *(["--cells", "x"] if arguments else [])])


class OnCpu(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined,misc]
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Run:
    """The benchmark with small rows, on a device whose calls take what ``milliseconds`` says, with no kernel.

    Attributes:
        made: how often each call was made.
        clock: seconds; each cell takes ten.
    """

    def __init__(self, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script, self.made, self.clock = script, [], 0.0
        self.milliseconds = {"ours": (1.0, 1.25), "FA4": (1.25, 1.2)}
        self.spoiled: set[str] = set()
        rows = tuple(
            replace(row, batch=1, heads=2, length=512, written={**row.fields, "pattern": self.small(row)})
            for row in (row_named(script, name) for name in ("causal_8k", "topk32"))
        )
        monkeypatch.setattr(script.attention, "ROWS", rows)
        monkeypatch.setattr(script.harness, "environment", lambda packages: {"device": "a device", "driver": "1"})
        monkeypatch.setattr(script, "ours", self.maker("ours"))
        peers = {"fa4": script.harness.Peer(self.maker("FA4")), "sdpa": script.harness.Peer(self.cannot)}
        peers["cudnn_bsa"] = script.harness.Peer(self.cannot, ("a_package_that_is_not_there",))
        monkeypatch.setattr(script, "PEERS", {**script.PEERS, **peers})
        monkeypatch.setattr(script.harness, "single_calls", lambda calls, repeats: self.times(calls, 0))
        monkeypatch.setattr(script.harness, "back_to_back", lambda calls, rounds: self.times(calls, 1))
        monkeypatch.setattr(script, "kernel_fields", self.kernel_fields)
        monkeypatch.setattr(script, "free_memory", lambda: None)
        monkeypatch.setattr(torch.cuda, "synchronize", self.after_a_cell)
        monkeypatch.setattr(script.time, "monotonic", lambda: self.clock)

    @staticmethod
    def small(row: Any) -> dict[str, Any]:
        pattern = row.fields["pattern"]
        return {**pattern, "k": 2} if "k" in pattern else pattern

    @staticmethod
    def kernel_fields(named: Any, ran: bool) -> dict[str, Any]:
        return {"spec": json.loads(named.spec.canonical_json()), "code_sha256": "code" if ran else None}

    @staticmethod
    def cannot(problem: Any) -> dict[str, Any]:
        raise RuntimeError("cannot")

    def after_a_cell(self) -> None:
        self.clock += 10.0

    def times(self, calls: dict[str, Any], way: int) -> dict[str, float]:
        return {label: self.milliseconds[label][way] for label in calls}

    def maker(self, label: str) -> Any:
        def make(problem: Any) -> dict[str, Any]:
            self.made.append(label)
            copies = problem.copies(lambda t: t.clone())

            def call() -> Any:
                attention, out = self.script.attention, torch.zeros_like(problem.q)
                own = replace(problem, q=copies[0], k=copies[1], v=copies[2])
                size = 128
                for head in range(problem.q.shape[1]):
                    for first in range(0, problem.q.shape[2], size):
                        rows = slice(first, first + size)
                        out[-1, head, rows] = attention.exact(own, head, rows).to(out.dtype)
                return out + (0.5 if label in self.spoiled else 0.0)

            return {label: call}

        return make

    def __call__(self, path: Path, *arguments: str) -> int:
        with OnCpu():
            options = self.script.parse_arguments(["--cells", str(path), "--rows", "causal_8k", "topk32", *arguments])
            found: int = self.script.measure(options)
            return found


@pytest.fixture
def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(script, monkeypatch)


def test_a_run_that_is_cut_short_goes_on(
    run: Run, cells: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cells.jsonl"
    fp16 = ("--dtypes", "fp16")
    assert run(path, *fp16, "--budget", "35") == 16  # no cell is begun later
    out = capsys.readouterr().out
    assert out.startswith("20 cells to measure on a device, about ")
    assert "peers not installed: cudnn_bsa\n" in out
    assert run.made == ["ours", "FA4"]  # once for all data sets
    first = path.read_bytes()
    assert len(first.splitlines()) == 4

    path.write_bytes(first[:-20])
    assert run(path, *fp16) == 0
    found = cells.read(path)
    assert len(found) == 20 == len(path.read_bytes().splitlines())
    assert path.read_bytes().startswith(first[: first[:-1].rfind(b"\n") + 1])
    assert run(path, *fp16) == 0
    assert len(path.read_bytes().splitlines()) == 20  # all of them were there
    assert run(path, "--dtypes", "bf16", "--data", "heads", "std2") == 0  # which bf16 has not
    assert list(cells.read(path))[20:] == [("causal_8k", "heads", "bf16"), ("topk32", "heads", "bf16")]


def test_what_a_cell_says(run: Run, cells: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cells.jsonl"
    run(path, "--dtypes", "fp16", "--data", "std4", "rising")
    cell = cells.read(path)["causal_8k", "rising", "fp16"]
    assert cell["spec"]["dtype"] == "fp16" and len(cell["source_sha256"]) == 64 and cell["code_sha256"] == "code"
    assert (cell["device"], cell["heads"], cell["length"], cell["data"]) == ("a device", 2, 512, "rising")
    assert cell["flops"] == 4.0 * 2 * 128 * 512 * 513 / 2
    assert cell["failed"] == {"cannot": "RuntimeError: cannot"}
    own = cell["results"]["ours"]
    assert (own["milliseconds"], own["back_to_back_milliseconds"]) == (1.0, 1.25)
    assert own["tflops"] == round(cell["flops"] / 1e9, 1)
    assert 0 < own["absolute_error"] < 2e-3 and 0 < own["error"] < 1e-3  # copies are of this data set: nothing failed
    listed = cells.read(path)["topk32", "std4", "fp16"]
    assert listed["not_installed"] == ["cudnn_bsa"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("40 s, 0 left: topk32 rising fp16: ") and "error of FA4" in lines[-1]


def test_a_wrong_result_has_no_time(run: Run, cells: ModuleType, tmp_path: Path) -> None:
    run.spoiled = {"FA4"}
    path = tmp_path / "cells.jsonl"
    run(path, "--dtypes", "fp16", "--data", "std1", "--peers", "fa4")
    for cell in cells.read(path).values():
        assert list(cell["results"]) == ["ours"] and "wrong result" in cell["failed"]["FA4"]
    run.spoiled = {"ours"}
    run(path, "--dtypes", "fp16", "--data", "std2", "--peers", "fa4")
    assert "ours" not in cells.read(path)["topk32", "std2", "fp16"]["results"]


def test_sources_are_those_that_tables_compare(script: ModuleType) -> None:
    from codegen.parse import parse_spec

    options = script.parse_arguments(["--cells", "none"])
    for column in script.planned(options, {}):
        spec = parse_spec(json.loads(column.named.spec.canonical_json()))
        assert column.source == source_sha256(render(find_spec(spec)))
        assert spec.dtype == column.dtype
