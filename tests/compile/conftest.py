"""Compile tests: skipped, with the reason, where NVRTC is not installed; each run has a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.compile import toolchain
from runtime.errors import ToolchainError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        toolchain.compiler_version()
        toolchain.cuobjdump()
    except ToolchainError as error:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=str(error)))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(folder))
    yield folder
