"""The choice of a kernel for a problem, by measurements."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from codegen.select import AttentionProblem, BsrProblem, Choice, Problem, choose, parse_problem, planned

__all__ = ["AttentionProblem", "BsrProblem", "Choice", "Problem", "choose", "parse_problem", "planned"]
