"""The one place that knows which kernel is fast: from a problem, or a partial spec, to a spec.

:mod:`codegen.select.choice` asks the table of measurements; :mod:`codegen.select.defaults` has the rules by which
``parse_spec`` fills in what a spec leaves out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codegen.select.choice import Choice, choose, planned
    from codegen.select.problem import AttentionProblem, BsrProblem, Problem, parse_problem

# Imported on first use: codegen.parse reads the rules, and the choice needs codegen.parse.
_HOMES = {
    "AttentionProblem": "codegen.select.problem",
    "BsrProblem": "codegen.select.problem",
    "Choice": "codegen.select.choice",
    "Problem": "codegen.select.problem",
    "choose": "codegen.select.choice",
    "parse_problem": "codegen.select.problem",
    "planned": "codegen.select.choice",
}

__all__ = ["AttentionProblem", "BsrProblem", "Choice", "Problem", "choose", "parse_problem", "planned"]


def __getattr__(name: str) -> Any:
    """Import what the package offers."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'codegen.select' has no attribute {name!r}")
