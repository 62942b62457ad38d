"""Walks over lists of key blocks."""

from __future__ import annotations

from codegen.spec import AttentionSpec

PIECES = "attention/lists"


def list_piece(spec: AttentionSpec) -> str:
    """Template of the iterator over a list."""
    if spec.arch == "sm_90a":
        return f"{PIECES}/{'shared' if spec.share_kv_loads else 'walked'}.cuh.j2"
    return f"{PIECES}/{'taken' if spec.pattern.list_length is None else 'taken_fixed'}.cuh.j2"
