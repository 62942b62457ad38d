"""GPU tests: skipped, with the reason, where there is no GPU that can run them."""

from __future__ import annotations

from pathlib import Path

import pytest


def _reason() -> str:
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU; receipts in generated/ say what a GPU showed"
    if torch.cuda.get_device_capability() < (8, 9):
        return f"needs sm_89 or newer, {torch.cuda.get_device_name()} is older"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason, here = _reason(), Path(__file__).parent
    for item in items:
        if reason and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
