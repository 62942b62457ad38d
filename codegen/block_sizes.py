"""Blocks of index lists that attention kernels are written for."""

from __future__ import annotations

from typing import get_args

from codegen.arch import ARCHS
from codegen.patterns.base import QueryBlockSize

QUERIES: tuple[int, ...] = get_args(get_args(QueryBlockSize)[0])
KEYS = {"wgmma": (64, 128), "mma": (16, 32, 64, 128), "wmma": (16, 32, 64, 128)}
"""Keys of a block, by matrix instruction."""
LEAST_ROWS = 16
"""Rows of a query block: queries times packed heads. With fewer, most rows of a matrix instruction would be padding."""


def query_sizes(pack_gqa: int) -> tuple[int, ...]:
    """Queries of a block, where so many query heads are packed."""
    return tuple(size for size in QUERIES if size * pack_gqa >= LEAST_ROWS)


def key_sizes(arch: str) -> tuple[int, ...]:
    """Keys of a block for which an architecture has a kernel."""
    return tuple(sorted({size for each in ARCHS[arch].of("attention") for size in KEYS[each.mma]}))


def common_key_sizes() -> tuple[int, ...]:
    """Keys of a block for which every architecture has a kernel."""
    return tuple(sorted(set.intersection(*(set(key_sizes(arch)) for arch in ARCHS))))
