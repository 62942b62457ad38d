"""GPU tests: not collected where there is no GPU that can run them; the reason is told once, at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gpu.guard_bands import GuardBands


@cache
def _guard_bands() -> GuardBands:
    from tests.gpu.guard_bands import GuardBands

    return GuardBands()


@cache
def _reason() -> str:
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch sees no GPU; receipts in generated/ say what a GPU showed"
    if torch.cuda.get_device_capability() < (8, 9):
        return f"needs sm_89 or newer, {torch.cuda.get_device_name()} is older"
    return ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the modules: to collect 4,000 tests takes 20 seconds, only to skip each of them."""
    if config.getoption("--guard-bands"):
        _guard_bands()  # before anything initializes CUDA
    if not _reason() or collection_path.suffix != ".py":
        return None
    config.not_collected["tests/gpu"] = _reason()  # type: ignore[attr-defined]
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests of a module that the command line names, and those that guard bands cannot be in."""
    here, bands = f"{Path(__file__).parent}{os.sep}", config.getoption("--guard-bands")
    for item in items:
        if bands and item.get_closest_marker("own_allocator"):
            item.add_marker(pytest.mark.skip(reason="needs torch's own allocator, not that of --guard-bands"))
        if str(item.path).startswith(here) and _reason():
            item.add_marker(pytest.mark.skip(reason=_reason()))


@pytest.fixture(autouse=True, scope="session")
def _no_graph_ends_in_a_capture() -> None:
    """Collect garbage before each capture: the graph of an earlier test that is freed in one invalidates it."""
    import torch

    torch.compiler.config.force_cudagraph_gc = True


MOST_KEPT = 1 << 30  # bytes
"""Of the GPU's memory that torch keeps for a process after a test: oracles take up to 10 GB, and processes share it."""


@pytest.fixture(autouse=True)
def _memory_for_others(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.config.getoption("--guard-bands"):  # which give freed memory back themselves
        return
    import torch

    kept = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
    if kept > MOST_KEPT:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _nothing_outside_of_tensors(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--guard-bands``: fail a test in which anything wrote outside of a tensor."""
    yield
    faults = _guard_bands().faults() if request.config.getoption("--guard-bands") else []
    assert not faults, faults
