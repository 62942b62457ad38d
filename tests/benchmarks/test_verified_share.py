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
    step = script.AttentionCall("sm_90a", "fp16", 192, "lists of 64", (1, 8, 8), 1024, training=True)
    kernels = step.kernels()
    assert len(kernels) == 3 and len({named.stem for named in kernels}) == 3
    monkeypatch.setattr(script, "is_verified", lambda named: named != kernels[1])
    groups, missing = script.share([step])
    assert groups == {"sm_90a training step": (0, 1)} and missing == Counter([kernels[1].stem])
    monkeypatch.setattr(script, "is_verified", lambda named: True)
    assert script.share([step]) == ({"sm_90a training step": (1, 1)}, Counter())
