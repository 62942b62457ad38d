"""The benchmark of lists of single queries, as far as it goes without a GPU: its lists, its checks, its table."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

from codegen.key_list_cases import KeyListCase  # noqa: E402
from runtime.verify import key_lists as verified  # noqa: E402


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("key_lists") as module:
        yield module


@pytest.mark.parametrize("kind", ["random", "sink"])
def test_lists_are_of_different_visible_blocks(script: ModuleType, kind: str) -> None:
    row = script.Row(200, head_dim=16, keys=16, entries=5, kind=kind, kv_heads=2, group=2)
    lists = script.lists_of(row, "cpu")
    own = torch.arange(200) // 16
    assert (
        lists.shape == (2, 200, 5)
        and bool((lists <= own[:, None]).all())
        and bool((lists == own[:, None]).any(2).all())
    )
    assert bool(((lists >= 0).sum(2) == (own + 1).clamp(max=5)).all())
    every = torch.arange(200)
    assert script.pairs_of(row, lists) == 2 * sum(float(script.seen(row, of, every, every).sum()) for of in lists)


def test_runs_are_of_adjacent_blocks(script: ModuleType) -> None:
    row = script.Row(200, head_dim=16, keys=16, entries=8, kind="runs", kv_heads=2, group=2)
    lists = script.lists_of(row, "cpu")
    position = torch.arange(200)
    assert lists.shape == (2, 200, 8) and bool((lists <= position[:, None] // 16).all())
    for of_head in lists:
        listed = script.seen(row, of_head, position, position)
        runs = torch.nn.functional.pad(listed, (0, 56)).unflatten(1, (-1, 64)).amax(2)
        assert bool((runs.sum(1) == (position // 64 + 1).clamp(max=2)).all())
        whole = runs.repeat_interleave(64, 1)[:, :200] * (position <= position[:, None])
        assert torch.equal(listed, whole)
    assert script.pairs_of(row, lists) == 2 * sum(float(script.seen(row, of, position, position).sum()) for of in lists)


def test_right_results_pass_and_wrong_ones_do_not(script: ModuleType) -> None:
    row = script.Row(150, head_dim=16, keys=16, entries=3, kv_heads=2, group=4)
    lists = script.lists_of(row, "cpu")
    case = KeyListCase("benchmark", (150,), (150,), entries=3)
    inputs = verified.inputs_of(case, group=4, head_dim=16, keys=16, dtype=torch.float64, device=torch.device("cpu"))
    inputs = inputs._replace(lists=lists)
    right = verified.oracle(case, inputs, 16)
    given = script.Problem(*inputs[:3], inputs.dout, lists, inputs.cu_seqlens_q, right.out, right.lse)
    error = script.error_of(row, given)
    assert error(script.BY_KEYS, right.out) < 1e-6 < 0.1 < error(script.BY_KEYS, 2 * right.out)
    gradients = tuple(right.gradients[name] for name in ("dq", "dk", "dv"))
    assert error(script.OURS, gradients) < 1e-5
    for place in range(3):
        wrong: list[Any] = list(gradients)
        wrong[place] = 1.5 * wrong[place]
        assert error(script.OURS, wrong) > 0.1


def test_a_table_is_shown(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    times = {"milliseconds": 2.0, "back_to_back_milliseconds": 1.0, script.SINGLE: 100.0, script.BACK_TO_BACK: 200.0}
    record = {"name": "row", "results": {script.OURS: times}, "failed": {script.BY_KEYS: "why"}}
    script.show({"device": "H", "driver": "1", "date": "today", "rows": [record]})
    shown = capsys.readouterr().out
    assert "100 / 200" in shown and "row: forward, by key blocks has no time: why" in shown
