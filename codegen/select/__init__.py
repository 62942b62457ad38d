"""Selection of fast kernels: the spec for a problem or a partial spec.

:mod:`codegen.select.choice` uses the table of measurements; :mod:`codegen.select.defaults` has the rules with which
``parse_spec`` fills in missing fields.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codegen.select.choice import Choice, choose, planned
    from codegen.select.problem import AttentionProblem, BsrProblem, Problem, parse_problem

# Imported on first use: codegen.parse reads the rules, and the choice imports codegen.parse.
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
    """Import a public name on first use."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'codegen.select' has no attribute {name!r}")
