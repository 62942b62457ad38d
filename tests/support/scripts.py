"""Scripts of benchmarks/ and scripts/, as modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = BENCHMARKS.with_name("scripts")


@contextmanager
def imported(name: str, folder: Path = BENCHMARKS) -> Iterator[ModuleType]:
    """The script of this name; until the end it finds the others, as when it is run."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look themselves up
        spec.loader.exec_module(module)
        yield module


def load_script(name: str, folder: Path = BENCHMARKS) -> ModuleType:
    """The script of this name, for what imports nothing later."""
    with imported(name, folder) as module:
        return module
