"""Attention over ranks on two GPUs, with NCCL, beside one GPU that has everything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

RANKS_SCRIPT = Path(__file__).parents[1] / "runtime" / "distributed" / "ranks.py"
RANKS = 2


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
def test_on_gpus() -> None:
    """All of gpu_checks.py, as the processes are started once; what fails is told by its name and rank."""
    command = [sys.executable, str(RANKS_SCRIPT), "gpu_checks", str(RANKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert "{" in done.stdout, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout[done.stdout.index("{") :])
    told = [f"{name}, rank {rank}: {text}" for name, each in found.items() for rank, text in enumerate(each) if text]
    assert found and not told, "\n".join([*told, done.stderr[-4000:]])
