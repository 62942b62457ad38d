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


CALLS = """
import torch
from torch.nn.attention.flex_attention import BlockMask
from sparse_kernel_codegen import QuantizedAttention, block_sparse_attention, block_sparse_attention_fp8
from sparse_kernel_codegen.patterns import Causal


def right(q: torch.Tensor, operands: QuantizedAttention, mask: BlockMask) -> None:
    out: torch.Tensor = block_sparse_attention(q, q, q, Causal() & Causal())
    out = block_sparse_attention(q, q, q, mask)
    out = block_sparse_attention(q, q, q, Causal(), return_lse=True).out
    out = block_sparse_attention_fp8(operands, Causal())


def wrong(q: torch.Tensor, operands: QuantizedAttention) -> None:
    block_sparse_attention(q, q, q, "causal")  # wrong
    block_sparse_attention(q, q, q, Causal)  # wrong
    block_sparse_attention(q, q, q, Causal(), causal=True)  # wrong
    block_sparse_attention(operands, Causal())  # wrong
    block_sparse_attention_fp8(q, Causal())  # wrong
"""


@pytest.mark.nightly
def test_calls_of_attention_are_typed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """mypy accepts patterns and masks of torch, and refuses what the calls refuse: words, classes, other keywords."""
    pytest.importorskip("mypy")
    pytest.importorskip("torch")
    file = tmp_path / "calls.py"
    file.write_text(CALLS, encoding="utf-8")
    cache = request.config.cache.mkdir("mypy-of-calls")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, "--no-error-summary", file]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    lines = {int(line.split(":")[1]) for line in result.stdout.splitlines() if ": error: " in line}
    wanted = {number for number, line in enumerate(CALLS.splitlines(), 1) if "# wrong" in line}
    assert lines == wanted, result.stdout + result.stderr
