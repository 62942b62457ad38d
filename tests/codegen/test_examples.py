"""Examples say in one line what they need."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_without_a_gpu_an_example_says_so(example: Path) -> None:
    with (
        patch.object(torch.cuda, "is_available", return_value=False),
        patch.object(sys, "argv", [str(example)]),
        pytest.raises(SystemExit, match=r"^error: torch sees no GPU$"),
    ):
        runpy.run_path(str(example), run_name="__main__")
