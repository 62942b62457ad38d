"""Choices on the command lines of ``codegen disasm`` and ``codegen diff``."""

from __future__ import annotations

from enum import StrEnum

WIDTH = 80
"""Columns of printed text."""


class Section(StrEnum):
    """A part of two kernels that is compared."""

    SPEC = "spec"
    PLAN = "plan"
    SOURCE = "source"
    SASS = "sass"


class Show(StrEnum):
    """Instructions that are listed."""

    ALL = "all"
    LOOP = "loop"
    SUMMARY = "summary"
