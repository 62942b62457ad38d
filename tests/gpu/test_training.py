"""Training of transformers' models on two GPUs, with NCCL, beside one process: the checks of gpu_training_checks.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.17")

RUNTIME = Path(__file__).parents[1] / "runtime"
RANKS = 2


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
def test_on_gpus() -> None:
    """What fails is named with its rank."""
    command = [sys.executable, str(RUNTIME / "distributed" / "ranks.py"), "gpu_training_checks", str(RANKS)]
    paths = [str(RUNTIME / "integrations"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False, env=environment)
    assert "{" in done.stdout, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout[done.stdout.index("{") :])
    failed = [f"{name}, rank {rank}: {text}" for name, each in found.items() for rank, text in enumerate(each) if text]
    assert found and not failed, "\n".join([*failed, done.stderr[-4000:]])
