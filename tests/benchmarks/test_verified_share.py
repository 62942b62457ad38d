"""The share of the grid's problems that get a kernel with a receipt."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import date
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

pytest.importorskip("torch")

SAMPLE = 150
LEAST = 0.9


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("verified_share") as module:
        yield module


def test_nine_problems_of_ten_get_a_kernel_with_a_receipt(script: Any) -> None:
    """Problems are drawn afresh each day."""
    drawn = random.Random(date.today().toordinal()).sample(list(script.problems()), SAMPLE)
    groups, missing = script.share(drawn)
    verified, total = map(sum, zip(*groups.values(), strict=True))
    assert total == SAMPLE and verified >= LEAST * total, missing.most_common(10)


def test_a_problem_counts_if_all_of_its_kernels_have_receipts(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from problem_grid import AttentionCall

    step = AttentionCall("sm_90a", "fp16", 192, "lists of 64", (1, 8, 8), 1024, training=True)
    kernels = step.kernels()
    assert len(kernels) == 3 and len({named.stem for named in kernels}) == 3
    monkeypatch.setattr(script, "is_verified", lambda named: named != kernels[1])
    groups, missing = script.share([step])
    assert groups == {"sm_90a training step": (0, 1)} and missing == Counter([kernels[1].stem])
    monkeypatch.setattr(script, "is_verified", lambda named: True)
    assert script.share([step]) == ({"sm_90a training step": (1, 1)}, Counter())


def test_rows_of_published_models_are_in_the_grid(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row forward, one of gradients, and both of a product."""
    from problem_grid import ModelCall

    calls = [call for call in script.problems() if isinstance(call, ModelCall) and call.arch == "sm_90a"]
    names = ("llama3-8b-8192", "llama3-8b-8192-backward", "llama3-8b-up-b64-50-n512-backward")
    assert len(calls) > 80
    of_name = {call.row.name: call for call in calls if call.row.name in names}
    assert [len(of_name[name].kernels()) for name in names] == [1, 2, 3]
    monkeypatch.setattr(script, "is_verified", lambda named: named.spec.op != "bsr_sddmm")
    groups, missing = script.share([of_name[name] for name in names])
    assert groups == {"sm_90a published models": (2, 3)} and list(missing.values()) == [1]
