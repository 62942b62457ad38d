"""Faults of one of two ranks at some steps; all of them: tests/stress/ranks_faults.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[2] / "stress" / "ranks_faults.py"


def test_a_fault_of_one_rank_gives_no_other_data_and_no_long_wait() -> None:
    """Two faults of each kind, in processes of their own, at once: most of the time ranks wait."""
    command = [sys.executable, str(SCRIPT), "--sample", "5", "--jobs", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, json.dumps([done.stdout[-4000:], done.stderr[-4000:]])


KERNELS = """
import sys, time
sys.path.insert(0, sys.argv[1])
import faults

FIRST = {"attend": (0, 2, 3, 4, 5, 6), "attend_backward": (2, 5)}
every = [faults.Fault(kernel, rank, call) for kernel, calls in FIRST.items() for call in calls for rank in range(2)]
began = time.monotonic()
told = faults.run(list(every))
wrong = [text for fault, each in zip(every, told, strict=True) for text in faults.kernel_wrongs(fault, each)]
print("\\n".join(wrong))
sys.exit(bool(wrong))
"""


def test_an_error_of_a_kernel_in_a_first_call_is_one_of_all_ranks_and_the_next_call_is_right() -> None:
    command = [sys.executable, "-c", KERNELS, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, json.dumps([done.stdout[-4000:], done.stderr[-4000:]])
