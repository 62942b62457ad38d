"""Training of transformers' models over processes with gloo; kernels are by the definition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.17")

FOLDER = Path(__file__).parent
RANKS = FOLDER.parent / "distributed" / "ranks.py"
PARTS = ("parts_of_sequences", "parts_of_sequences_and_batches", "refusals_of_parts")


@pytest.mark.parametrize(("ranks", "names"), [(2, ()), (4, PARTS)], ids=["2", "4"])
def test_on_ranks(ranks: int, names: tuple[str, ...]) -> None:
    """Checks of training_checks.py; what fails is named with its rank."""
    command = [sys.executable, str(RANKS), "training_checks", str(ranks), *names]
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.stdout, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    failed = [f"{name}, rank {rank}: {text}" for name, each in found.items() for rank, text in enumerate(each) if text]
    assert found and not failed, "\n".join([*failed, done.stderr[-4000:]])
