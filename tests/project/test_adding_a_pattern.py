"""A pattern is four files, as docs/reference/adding.md says: it renders, compiles, and the front door takes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
ADDED = Path(__file__).parent / "anticausal"
COPIED = ("codegen", "runtime", "templates", "specs", "tests/support", "tests/templates")
FILES = {
    "anticausal.py": "codegen/patterns/anticausal.py",
    "keys.cuh.j2": "templates/attention/patterns/anticausal.cuh.j2",
    "queries.cuh.j2": "templates/attention_backward/queries/anticausal.cuh.j2",
    "front.txt": "runtime/patterns.py",
}
"""Each file of the pattern, and the file that it becomes or is appended to."""


@pytest.mark.nvrtc
def test_a_pattern_takes_four_files(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host programs with")
    for folder in COPIED:
        shutil.copytree(PROJECT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "generated").mkdir()
    for file, place in FILES.items():
        with (tmp_path / place).open("a", encoding="utf-8") as target:
            target.write((ADDED / file).read_text(encoding="utf-8"))
    paths = os.pathsep.join(map(str, (tmp_path, tmp_path / "tests" / "support", tmp_path / "tests" / "templates")))
    run = subprocess.run(
        [sys.executable, ADDED / "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "attention_sm_90a_bf16_d64_anticausal" in run.stdout and "attention_backward" in run.stdout
