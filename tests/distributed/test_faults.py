"""Faults of one of two ranks at some steps; all of them: tests/stress/ranks_faults.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[1] / "stress" / "ranks_faults.py"


def test_a_fault_of_one_rank_gives_no_other_data_and_no_long_wait() -> None:
    """Two faults of each kind, in processes of their own, at once: most of the time ranks wait."""
    command = [sys.executable, str(SCRIPT), "--sample", "5", "--jobs", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, json.dumps([done.stdout[-4000:], done.stderr[-4000:]])
