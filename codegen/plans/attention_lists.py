"""Walks over lists of key blocks."""

from __future__ import annotations

from codegen.arch import ARCHS
from codegen.spec import AttentionSpec

PIECES = "attention/lists"


def step_words(block_steps: int, step_blocks: int) -> str:
    """Keys of a step, in words."""
    if step_blocks > 1:
        return "kStepBlocks listed key blocks"
    return "one key block, or an equal part of it" if block_steps > 1 else "one key block"


def list_piece(spec: AttentionSpec) -> str:
    """Template of the iterator over a list."""
    if ARCHS[spec.arch].has_wgmma:
        return f"{PIECES}/{'shared' if spec.share_kv_loads else 'walked'}.cuh.j2"
    return f"{PIECES}/{'taken' if spec.pattern.list_length is None else 'taken_fixed'}.cuh.j2"
