"""Attention over ranks on four processes with gloo, in pairs and all together; kernels are by the definition."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

HERE = Path(__file__).parent
NAMES = re.findall(r"^@check(?:_two)?\ndef (\w+)", (HERE / "checks.py").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    """What each rank has to say of each check; the processes are started once."""
    command = [sys.executable, str(HERE / "ranks.py"), "checks", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_on_ranks(name: str, answers: dict[str, list[str]]) -> None:
    told = [f"rank {rank}: {text}" for rank, text in enumerate(answers[name]) if text]
    assert not told, "\n".join(told)
