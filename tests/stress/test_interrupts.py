"""Ctrl-C and a full disk end the command line with one line, whenever they come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interrupts import PROJECT, interrupted


@pytest.mark.parametrize("command", [["render", "l4_topk32_d64", "--out", "out"]])
def test_ctrl_c_is_one_line_at_any_moment(command: list[str], tmp_path: Path) -> None:
    for seconds in (0.05, 0.6, 1.4):  # modules are imported; tests/stress/interrupts.py draws many more
        assert not interrupted(command, seconds, tmp_path)


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        call = [sys.executable, "-m", "sparse_kernel_codegen", "--help"]
        environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
        done = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")
