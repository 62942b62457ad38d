"""All Python of README.md and docs/ runs as it stands, the fences of a page one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import snippets
import torch

HOPPER = (9, 0)
OF_HOPPER = {"docs/guide/fp8.md", "docs/guide/training.md"}  # what they show is written for sm_90a alone


@pytest.mark.parametrize("page", snippets.pages(), ids=snippets.page_name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fences = snippets.python_of(page)
    if absent := snippets.absent_packages(page):
        pytest.skip(f"its Python needs {', '.join(absent)}")
    by_name = any('"h100_' in fence.text for fence in fences)
    if torch.cuda.get_device_capability() != HOPPER and (by_name or snippets.page_name(page) in OF_HOPPER):
        pytest.skip("it uses kernels of Hopper")
    monkeypatch.chdir(tmp_path)  # for what it writes
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for fence in fences:
        exec(fence.code(), namespace)
    torch.cuda.synchronize()  # a launch that fails is this page's
