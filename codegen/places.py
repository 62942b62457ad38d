"""Paths of a kernel's files, and command lines that name them."""

from __future__ import annotations

from pathlib import Path

from codegen.files import is_file
from codegen.library import NamedSpec
from codegen.project import GENERATED, IN_SOURCE_TREE


def home_of(named: NamedSpec) -> Path:
    """Default folder of a source."""
    return GENERATED if IN_SOURCE_TREE and named.is_shipped else Path()


def place_of(named: NamedSpec, suffix: str) -> Path:
    """Path of a kernel's source or receipt: in its home folder or, for a shipped spec, in the package.

    A twin shares the files of its first type.
    """
    inside = named.subfolder / f"{named.main.stem}{suffix}"
    own = home_of(named) / inside
    return GENERATED / inside if named.is_shipped and not is_file(own) else own


def verify_line(named: NamedSpec) -> str:
    """Command that verifies a spec."""
    return f"codegen verify {named.argument}"
