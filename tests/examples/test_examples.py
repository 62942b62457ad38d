"""Examples say in one line what they need, and what of them needs no GPU works."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import oracle_kernel  # noqa: E402

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_without_a_gpu_an_example_says_so(example: Path) -> None:
    with (
        patch.object(torch.cuda, "is_available", return_value=False),
        patch.object(sys, "argv", [str(example)]),
        pytest.raises(SystemExit, match=r"^error: torch sees no GPU$"),
    ):
        runpy.run_path(str(example), run_name="__main__")


TINY = {"layers": 2, "heads": 2, "head_dim": 16, "length": 768, "batch": 1, "steps": 4, "device": "cpu"}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    oracle_kernel.install(monkeypatch)
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES[0].parent / "train_transformer.py"), run_name="example"))


def test_the_transformers_see_the_same_keys(training: Any) -> None:
    config = training.Config(**TINY)
    lists = training.make_lists(config)
    seen = attention_oracle.times_seen(lists.spec_json, lists.index_tensors(), (1, 2, 768, 768))
    mask = training.dense_mask(lists, config)
    assert torch.equal(seen, mask.to(torch.int32)), "each once, where the mask is"
    causal = torch.ones(768, 768, dtype=torch.bool).tril()
    assert bool((mask <= causal).all()) and not bool((mask == causal).all()) and bool(mask.diagonal(0, 2, 3).all())


def test_the_transformers_learn_alike(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = torch.frombuffer(bytearray(b"Attention over the blocks of a list, causal. " * 2000), dtype=torch.uint8)
    monkeypatch.setitem(training.compare.__globals__, "read_text", lambda: text)
    report = training.compare(training.Config(**TINY), seeds=1)
    sparse, dense = (run["losses"] for run in report["runs"])
    assert len(sparse) == 4 and sparse[-1] < sparse[0]
    assert max(abs(a - b) for a, b in zip(sparse, dense, strict=True)) < 0.02
    training.say_apart(report)
    assert "block-sparse minus dense, by seed: " in capsys.readouterr().out
    file = tmp_path / "run.json"
    file.write_text(json.dumps(report), encoding="utf-8")
    with patch.object(sys, "argv", ["train_transformer.py", "--from", str(file)]):
        training.main()
