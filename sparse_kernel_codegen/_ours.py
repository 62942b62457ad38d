"""Imported before ``codegen`` and ``runtime``: raises ImportError if one of them belongs to another project."""

from __future__ import annotations

from sparse_kernel_codegen._names import foreign

if (_error := foreign()) is not None:
    raise ImportError(_error)
