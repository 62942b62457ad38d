"""Modules of classes without contents, for compiled packages that modules of an engine import."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any


class Absent(ModuleType):
    """A module that has every name as a class without contents."""

    __path__: list[str] = []  # noqa: RUF012 - what importlib reads

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def without_torchvision() -> None:
    """Put such modules in place of torchvision, unless it is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    import transformers.utils

    assert not transformers.utils.is_torchvision_available()  # kept by transformers
    for absent in ("torchvision", *(f"torchvision.{name}" for name in ("io", "transforms", "transforms.functional"))):
        sys.modules[absent] = Absent(absent)
        sys.modules[absent].__spec__ = importlib.machinery.ModuleSpec(absent, None)
        parent, _, own = absent.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, sys.modules[absent])
