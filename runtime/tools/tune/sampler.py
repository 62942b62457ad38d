"""Choices of command-line options of ``codegen tune``."""

from __future__ import annotations

from enum import StrEnum


class Sampler(StrEnum):
    """Method that proposes candidates."""

    TPE = "tpe"
    RANDOM = "random"
