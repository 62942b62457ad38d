"""Sparsity patterns of attention. Modules of this package that define a pattern are discovered automatically."""

from __future__ import annotations

import importlib
import pkgutil
from functools import reduce
from operator import or_
from typing import Any

from codegen.patterns.base import NO_VALUES, Block, IndexTensor, PatternBase

__all__ = [
    "NO_VALUES",
    "PATTERNS",
    "Block",
    "IndexTensor",
    "PatternBase",
    "pattern_union",
    "without_gradient",
]


def _discover() -> dict[str, type[PatternBase]]:
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{module}")
    return {str(cls.model_fields["kind"].annotation.__args__[0]): cls for cls in PatternBase.__subclasses__()}  # type: ignore[union-attr]


PATTERNS: dict[str, type[PatternBase]] = dict(sorted(_discover().items()))
"""Every pattern by its ``kind``."""


def pattern_union() -> Any:
    """Union of all patterns, for a discriminated field."""
    return reduce(or_, PATTERNS.values())


def without_gradient(kind: str) -> str:
    """Reason why a kind of pattern has no gradient, with the kinds that have one; "" if it has one."""
    if PATTERNS[kind].queries is not None:
        return ""
    written = ", ".join(name for name, each in PATTERNS.items() if each.queries is not None)
    return f"is {kind}, which has no gradient; patterns with a gradient: {written}"
