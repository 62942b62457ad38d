"""The benchmark of gradients, as far as it goes without a GPU: its problems, its table, its page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from scripts import BENCHMARKS, imported

torch = pytest.importorskip("torch")

RESULTS = BENCHMARKS / "results" / "attention_backward_h100.json"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("attention_backward") as module:
        yield module


PATTERNS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense"},
    "causal": {"kind": "causal"},
    "window": {"kind": "sliding_window", "left": 40, "right": 0},
    "lists": {"kind": "topk", "block": {"q": 64, "kv": 64}},
}


def problem(script: ModuleType, row: Any) -> Any:
    """A problem on the CPU, with the forward by its definition."""
    spec = script.parse_spec(
        {"op": "attention", "arch": "sm_90a", "dtype": "fp16", "head_dim": row.head_dim, "pattern": row.pattern}
    )
    q, k, v, dout = (torch.randn(row.batch, row.heads, row.length, row.head_dim).double() for _ in range(4))
    block = row.pattern.get("block")
    lists: tuple[Any, ...] = ()
    if block:
        drawn = torch.rand(row.batch, row.heads, row.length // block["q"], row.length // block["kv"])
        lists = (drawn.topk(row.entries, -1).indices.int(),)
    every = torch.arange(row.length)
    empty = script.Problem(spec, q, k, v, dout, q, q[..., 0], lists)
    seen = script.seen(empty, every, every)
    scores = (q @ k.mT * row.head_dim**-0.5).masked_fill(seen == 0, -torch.inf)
    return script.Problem(spec, q, k, v, dout, scores.softmax(-1) @ v, scores.logsumexp(-1), lists), seen


@pytest.mark.parametrize("name", PATTERNS)
def test_right_gradients_pass_and_wrong_ones_do_not(script: ModuleType, name: str) -> None:
    row = script.Row(1, 1, 256, 64, PATTERNS[name], entries=2)
    given, seen = problem(script, row)
    assert float(seen.sum()) == script.pairs_of(row)
    leaves = [t.clone().requires_grad_() for t in (given.q, given.k, given.v)]
    scores = (leaves[0] @ leaves[1].mT * 64**-0.5).masked_fill(seen == 0, -torch.inf)
    right = torch.autograd.grad(scores.softmax(-1) @ leaves[2], leaves, given.dout)
    error = script.error_of(given)
    assert error("ours", right) < 1e-9
    for which in range(3):
        wrong = [gradient * 1.1 if place == which else gradient for place, gradient in enumerate(right)]
        assert error("ours", wrong) > 0.05


def test_the_page_has_the_table_of_the_results(script: ModuleType) -> None:
    report = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.with_table(page, report) == page, "run it with --from the results and --page"
    assert {record["name"] for record in report["rows"]} == {row.name for row in script.ROWS}


def test_an_earlier_run_is_shown(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--from", str(RESULTS)])
    assert "top 32 of 64 x 64" in capsys.readouterr().out


def test_the_prologue_is_told_as_a_share_of_the_whole(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prologue = script.backward_prologue
    times = {prologue.WHOLE: 200.0, prologue.STATISTICS: 3.0, prologue.LISTS: 1.5}
    monkeypatch.setattr(prologue, "single_calls", lambda calls, repeats: {label: times[label] for label in calls})
    monkeypatch.setattr(prologue, "back_to_back", lambda calls: {label: 2 * times[label] for label in calls})
    found = prologue.times_of(dict.fromkeys(times, lambda: None), repeats=3)
    assert found[prologue.PROLOGUE] == {"milliseconds": 4.5, "back_to_back_milliseconds": 9.0}
    record = {"name": script.LONG.name, "data": "std1", "prologue": found}
    report = {"device": "a GPU", "driver": "1", "date": "2026-01-01", "rows": [record]}
    assert prologue.table_rows(record)[-1] == [prologue.PROLOGUE, "4.500", "2.2%", "9.000", "2.2%"]
    path = tmp_path / "prologue.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    script.main(["--from", str(path), "--prologue"])
    told = capsys.readouterr().out
    assert "top 32 of 128 x 128, B1 H16 S131072 d128" in told and "2.2%" in told


def test_statistics_alone_must_be_those_of_the_whole_kernel(script: ModuleType) -> None:
    class Kernel:
        """Leaves half of the statistics out where it is alone."""

        def __init__(self) -> None:
            self._loaded = SimpleNamespace(_launch_by=None)

        def __call__(self, *inputs: Any, **of_call: Any) -> Any:
            return SimpleNamespace(stats=torch.tensor([1.0, float(self._loaded._launch_by is None)]))

    problem = SimpleNamespace(q=0, k=0, v=0, lists=(), out=0, dout=0, lse=0)
    with pytest.raises(SystemExit, match="statistics alone are not those of the whole kernel; nothing was timed"):
        script.backward_prologue.calls_of(problem, lambda: None, lambda: (Kernel(), Kernel()))
