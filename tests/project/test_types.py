"""mypy without torch's types: torch is not installed where only codegen is used. ``mypy`` alone runs with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
NO_TORCH = '\n[[tool.mypy.overrides]]\nmodule = ["torch.*"]\nfollow_imports = "skip"\n'
"""What mypy then knows of torch is what it knows where there is none: every name is Any."""


@pytest.mark.nightly
def test_mypy_without_torch(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("mypy")
    config = tmp_path / "pyproject.toml"
    config.write_text((PROJECT / "pyproject.toml").read_text(encoding="utf-8") + NO_TORCH, encoding="utf-8")
    cache = request.config.cache.mkdir("mypy-without-torch")
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", cache],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
