"""Attention over ranks on four processes with gloo, in pairs and all together; kernels are by the definition."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

RANKS = Path(__file__).parent / "ranks.py"


def test_on_ranks() -> None:
    """All of checks.py, as the processes are started once; what fails is told by its name and rank."""
    done = subprocess.run(
        [sys.executable, str(RANKS), "checks", "4"], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stdout, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    told = [f"{name}, rank {rank}: {text}" for name, each in found.items() for rank, text in enumerate(each) if text]
    assert found and not told, "\n".join([*told, done.stderr[-4000:]])
