"""docs/guide/coming-from.md: which keys a query sees under causal masks and windows, here and elsewhere."""

from __future__ import annotations

import re

import pytest
import snippets

torch = pytest.importorskip("torch")
PAGE = snippets.PROJECT / "docs" / "guide" / "coming-from.md"


def test_alignment_and_windows_are_what_the_page_asserts() -> None:
    (fence,) = [fence for fence in snippets.python_of(PAGE) if 'device="cuda"' not in fence.text]
    assert fence.text.count("assert") == 3
    exec(fence.code(), {})
    with pytest.raises(AssertionError):
        exec(fence.text.replace("SlidingWindow(W - 1)", "SlidingWindow(W)"), {})


def test_fences_that_need_no_kernel_make_valid_patterns() -> None:
    """Patterns and scores of the other fences are made on the CPU; calls are left out."""
    for fence in snippets.python_of(PAGE):
        lines = re.split("out = block_sparse_attention|flexed = ", fence.text.replace('device="cuda"', 'device="cpu"'))
        exec(lines[0], {})
