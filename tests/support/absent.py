"""Modules of classes without contents, for compiled packages that modules of an engine import."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Kind(type):
    """Classes whose attributes are None."""

    def __getattr__(cls, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Absent(ModuleType):
    """A module that has every name as a class without contents."""

    __path__: list[str] = []  # noqa: RUF012 - what importlib reads

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds such modules in place of a package and all that is in it."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != self.package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return Absent(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing to execute."""


def without(package: str) -> None:
    """Put such modules in place of a package, unless it is installed."""
    if importlib.util.find_spec(package) is None:
        sys.meta_path.append(_Finder(package))


def without_torchvision() -> None:
    """Put such modules in place of torchvision, unless it is installed."""
    import transformers.utils

    transformers.utils.is_torchvision_available()  # kept by transformers
    without("torchvision")


def without_sglangs_kernels() -> None:
    """Put such modules in place of ``sgl_kernel``, unless it is installed."""
    if importlib.util.find_spec("sgl_kernel") is None:
        without("sgl_kernel")
        # What each backend of attention calls when it is made.
        importlib.import_module("sgl_kernel.utils").is_arch_support_pdl = lambda: False  # type: ignore[attr-defined]
