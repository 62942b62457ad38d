"""The benchmark of gradients, as far as it goes without a GPU: its problems, its table, its page."""

from __future__ import annotations

import json
import sys
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
    timed, rows = {record["name"] for record in report["rows"]}, {row.name for row in script.ROWS}
    assert timed and timed <= rows and all(f"\n- {name}\n" in page for name in rows - timed)


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


class Blocks:
    """Stands for FlashAttention 4's tensors of lists."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def seen(self, rows: int, columns: int) -> Any:
        """Which blocks the lists show, (batch, heads, rows, columns)."""
        assert int(self.mask_block_cnt.max()) == 0 and self.full_block_cnt.shape == self.full_block_idx.shape[:3]
        counted = torch.arange(self.full_block_idx.shape[3]) < self.full_block_cnt[..., None]
        found = torch.zeros(*self.full_block_cnt.shape, columns + 1, dtype=torch.bool)
        found.scatter_(3, torch.where(counted, self.full_block_idx, columns).long(), True)
        assert found.shape[2] == rows and torch.equal(found[..., :columns].sum(-1), self.full_block_cnt)
        return found[..., :columns]


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A package that attends as it is told to, in place of FlashAttention 4; what it was told."""
    told = []

    def attend(q: Any, k: Any, v: Any, deterministic: bool = False, **options: Any) -> Any:
        told.append({"deterministic": deterministic, **options})
        length = q.shape[1]
        query, key = torch.arange(length)[:, None], torch.arange(length)
        seen = key <= query if options.get("causal") else torch.ones(length, length, dtype=torch.bool)
        if window := options.get("window_size"):
            seen = seen & (key >= query - window[0]) & (key <= query + window[1])
        if lists := options.get("block_sparse_tensors"):
            rows, columns = lists.block_size
            found = lists.seen(length // rows, length // columns)
            backward = options["block_sparse_tensors_bwd"]
            assert backward.block_size == lists.block_size
            assert torch.equal(backward.seen(length // columns, length // rows).mT, found), "not the transpose"
            seen = seen & found.repeat_interleave(rows, 2).repeat_interleave(columns, 3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    package, sparse = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.block_sparsity")
    package.flash_attn_func = attend  # type: ignore[attr-defined]
    sparse.BlockSparseTensorsTorch = Blocks  # type: ignore[attr-defined]
    for module in (ModuleType("flash_attn"), package, sparse):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return told


@pytest.mark.parametrize("name", PATTERNS)
def test_fa4_is_asked_for_the_same_gradients_in_both_modes(
    script: ModuleType, fa4: list[dict[str, Any]], name: str
) -> None:
    row = script.Row(1, 2, 256, 64, PATTERNS[name], entries=2)
    given, _ = problem(script, row)
    error = script.error_of(given)
    assert error("FA4", script.backward_peers.fa4(given)()) < 1e-9
    if name == "lists":
        with pytest.raises(ValueError, match="write order made on the host"):
            script.backward_peers.fa4_deterministic(given)
    else:
        assert error("FA4", script.backward_peers.fa4_deterministic(given)()) < 1e-9
    assert [call["deterministic"] for call in fa4] == ([False] if name == "lists" else [False, True])


def test_a_peer_that_fails_is_told_and_the_others_are_there(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(given: Any) -> Any:
        raise ImportError("no module\nand more")

    peers = script.backward_peers
    listed, _ = problem(script, script.Row(1, 1, 256, 64, PATTERNS["lists"], entries=2))
    dense, _ = problem(script, script.Row(1, 1, 256, 64, PATTERNS["dense"]))
    own = peers.Peer("works", lambda given: lambda: 1, ("dense",)), peers.Peer("fails", fails)
    monkeypatch.setattr(peers, "PEERS", own)
    assert peers.calls_of(listed) == ({}, {"fails": "ImportError: no module"})
    calls, failed = peers.calls_of(dense)
    assert list(calls) == ["works"] and list(failed) == ["fails"]


def test_every_peer_is_asked_for_the_patterns_that_it_has(script: ModuleType) -> None:
    def asked(kind: str) -> list[str]:
        return [peer.label for peer in script.backward_peers.PEERS if peer.kinds is None or kind in peer.kinds]

    everywhere = ["FA4", "FA4 deterministic", "FlexAttention"]
    assert asked("dense") == asked("causal") == ["SDPA flash", "SDPA cuDNN", *everywhere]
    assert asked("sliding_window") == everywhere
    assert asked("topk") == ["FA4", "FA4 deterministic", "cuDNN BSA", "FlexAttention"]


def test_peers_that_cannot_be_imported_are_told_before_anything_is_timed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ran: list[Any] = []

    def measure(rows: Any, path: Any) -> Any:
        ran.append(rows)
        return {"device": "a GPU", "driver": "1", "date": "2026-01-01", "rows": []}

    monkeypatch.setattr(script, "measure", measure)
    with pytest.raises(SystemExit, match="peers are missing"):
        script.main(["--all-peers"])
    told = capsys.readouterr().err
    for label in ("FA4", "FA4 deterministic", "cuDNN BSA"):
        assert f"{label} cannot be imported: ModuleNotFoundError: " in told
    assert not ran
    script.main([])
    assert len(ran) == 1 and "FA4 cannot be imported" in capsys.readouterr().err
