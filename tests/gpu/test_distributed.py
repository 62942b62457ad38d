"""Attention over ranks on two GPUs, with NCCL: each check runs on both, in processes that are started once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

CHECKS = Path(__file__).parents[1] / "distributed"
NAMES = re.findall(r"^@check\ndef (\w+)", (CHECKS / "gpu_checks.py").read_text(encoding="utf-8"), re.MULTILINE)
RANKS = 2
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    """What each rank has to say of each check."""
    command = [sys.executable, str(CHECKS / "ranks.py"), "gpu_checks", str(RANKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.stdout, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_on_gpus(name: str, answers: dict[str, list[str]]) -> None:
    told = [f"rank {rank}: {text}" for rank, text in enumerate(answers[name]) if text]
    assert not told, "\n".join(told)
