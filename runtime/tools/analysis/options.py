"""Choices of command-line options of ``codegen disasm`` and ``codegen diff``."""

from __future__ import annotations

from enum import StrEnum

WIDTH = 80
"""Columns of printed text."""


class Section(StrEnum):
    """Section of two kernels to compare."""

    SPEC = "spec"
    PLAN = "plan"
    SOURCE = "source"
    SASS = "sass"


class Show(StrEnum):
    """Instructions to list."""

    ALL = "all"
    LOOP = "loop"
    SUMMARY = "summary"
