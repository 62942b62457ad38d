"""Block sizes of index lists that attention kernels support."""

from __future__ import annotations

from typing import get_args

from codegen.arch import ARCHS
from codegen.patterns.base import QueryBlockSize

QUERIES: tuple[int, ...] = get_args(get_args(QueryBlockSize)[0])
KEYS = {"wgmma": (64, 128), "mma": (16, 32, 64, 128), "wmma": (16, 32, 64, 128)}
"""Keys per block, by matrix instruction."""
LEAST_ROWS = 16
"""Rows per query block: queries times packed heads. With fewer, a matrix instruction would be mostly padding."""


def query_sizes(pack_gqa: int) -> tuple[int, ...]:
    """Legal queries per block, with ``pack_gqa`` packed query heads."""
    return tuple(size for size in QUERIES if size * pack_gqa >= LEAST_ROWS)


def key_sizes(arch: str) -> tuple[int, ...]:
    """Legal keys per block on an architecture."""
    return tuple(sorted({size for each in ARCHS[arch].of("attention") for size in KEYS[each.mma]}))


def common_key_sizes() -> tuple[int, ...]:
    """Keys per block that every architecture supports."""
    return tuple(sorted(set.intersection(*(set(key_sizes(arch)) for arch in ARCHS))))
