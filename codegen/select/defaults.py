"""Features of partial specs, for the tables of tiles and stages.

Each field of a partial spec is valid; missing fields are None. :mod:`codegen.parse` fills them in: the combination of
instructions is the first legal one of the architecture, and tile and stages come from
:mod:`codegen.select.default_tables`.
"""

from __future__ import annotations

from typing import Any

from codegen.arch import ARCHS
from codegen.select.default_tables import GATHERED_ROWS
from codegen.spec import (
    AttentionBackwardSpec,
    AttentionSpec,
    BsrSddmmSpec,
    BsrSpgemmSpec,
    BsrSpmmSpec,
    Spec,
)

Fields = dict[str, Any]
Choice = tuple[str, str, str]  # mma, copy, schedule

COOPERATIVE: Choice = ("wgmma", "tma", "cooperative")
GATHERING: Choice = ("mma", "tma", "cooperative")  # block rows of 16 rows
STRIDED: Choice = ("mma", "cp_async", "multistage")  # B and C with any strides
COMBINED = ("mma", "copy", "schedule")
NARROW_64 = ("accumulate", "transpose_a")
"""Options whose default tiles of 64 rows are not wide: ``accumulate`` takes the memory of a stage, and the transposed
kernel, like the one for B stored by columns, has no such tiles."""


def _size(given: Spec, name: str, default: int) -> int:
    """Size of the tile, or its default if it is missing."""
    size: int | None = getattr(given.tile, name)
    return default if size is None else size


def _block(given: AttentionSpec | AttentionBackwardSpec, side: str, default: int) -> int:
    """Side of the blocks of the pattern's lists, or the default without lists."""
    block = given.pattern.fixed_block
    return default if block is None else int(getattr(block, side))


def _has_heavy_score(given: AttentionSpec | AttentionBackwardSpec) -> bool:
    """Whether a score takes so many registers that larger steps would spill."""
    score = given.score
    return score is not None and (score.looks_up_pairs or given.pattern.expression is not None)


def attention_features(given: AttentionSpec) -> tuple[Choice | None, Fields]:
    """Preferred combination and features of attention."""
    keys = _block(given, "kv", 64 if given.kv_splits > 1 else 128)
    if _has_heavy_score(given) and not given.share_kv_loads:
        keys = min(keys, 64)
    step = _size(given, "n", keys) * -(-given.head_dim // 64) * 64  # elements of K in shared memory
    if given.is_fp8 and given.kv_splits == 1:
        keys = _fp8_keys(given, keys)
    # With the widest heads, steps of 128 keys and the output exceed both registers and shared memory.
    wide = given.head_dim in (192, 256) and given.kv_splits == 1
    features: Fields = {
        "rows": _block(given, "q", 64),
        "keys": 64 if wide else keys,
        "step": next((most for most in (64 * 64, 64 * 128) if step <= most), None),  # each part has its own rings
        "kind": given.pattern.kind,
        "can_split": given.can_split and not (given.is_fp8 and given.head_dim > 128),
    }
    if ARCHS[given.arch].has_wgmma:
        alone = given.share_kv_loads or given.kv_splits > 1 or given.tile.m == 64  # without ping_pong
        return COOPERATIVE if alone else None, features
    m, n = _mma_sync_fp8_tile(given) if given.is_fp8 else _mma_sync_tile(given)
    # O of 32 rows of a wider head would not fit a thread's registers.
    high = (64, 128, 256) if _copies_few_rows(given) else (128, 256)
    tall = _size(given, "m", m) in high and given.head_dim <= 128
    return None, {**features, "m": m, "n": n, "tall": tall}


def has_few_registers(given: AttentionSpec) -> bool:
    """Whether steps of 128 keys with FP8 inputs spill on sm_90a: with 32 packed heads and a table of four axes.

    Found by compilation; other packs, smaller tables and heads of 96 do not spill.
    """
    if given.score is None or given.pack_gqa != 32 or given.head_dim <= 96:
        return False
    return any(len(aux.dims) > 3 for aux in given.score.aux_tensors)


def _fp8_keys(given: AttentionSpec, keys: int) -> int:
    """Keys per step with FP8 inputs on sm_90a: two blocks, if registers suffice."""
    if given.head_dim > 128 or has_few_registers(given):
        return 64
    # A producer with two kinds of lists per half of a tile, or with more scales, takes registers from consumers.
    halves = given.pattern.lists > 1 and _block(given, "q", 128) * given.pack_gqa < 128
    scales = given.pattern.lists > 0 and keys == 128 and given.scale_rows.k == 64
    return keys if halves or scales else 2 * keys


def _load_part(given: AttentionSpec) -> int:
    """Largest power of two, at least 16, that divides the keys per load on sm_89, a block or a step."""
    keys = _size(given, "n", 32)
    keys = min(keys, _block(given, "kv", keys))
    return max(16, keys & -keys)


def _copies_few_rows(given: AttentionSpec) -> bool:
    """Whether more than two warps would copy more rows at a time than a load has, with rows of 192 bytes."""
    return given.head_dim == 96 and _load_part(given) == 16


def _mma_sync_tile(given: AttentionSpec) -> tuple[int, int]:
    """Tile sizes for mma.sync, with which two thread blocks fit 100 KB."""
    head_dim, wide = given.head_dim, given.head_dim in (192, 256)
    warp_rows = given.warp_rows if "warp_rows" in given.model_fields_set else None
    largest = 64 if wide else 128
    if _copies_few_rows(given):
        largest = 64 if given.pack_gqa == 64 else 32  # the heads of a query stay together
    elif warp_rows == 16 and not wide:  # warps copy 8 or 4 rows of 192 bytes each, together at most a load
        largest = min(largest, 16 * _load_part(given) // (8 if head_dim == 96 else 4))
    m = _size(given, "m", min(_block(given, "q", largest) * given.pack_gqa, largest))
    # With O of 128 elements, warps of 32 rows have no registers for more scores if pairs are masked or a step has
    # several loads.
    several = _block(given, "kv", 64) in (16, 32) or given.pattern.masks_pairs
    narrow = warp_rows == 32 and head_dim == 128 and several
    narrow |= _has_heavy_score(given)
    return m, 64 if not narrow and (head_dim == 64 or (m < 128 and not wide)) else 32


def _mma_sync_fp8_tile(given: AttentionSpec) -> tuple[int, int]:
    """Tile sizes for mma.sync with FP8 inputs: threads copy at most the rows of a load at a time."""
    of_pass = {64: 2, 96: 1, 192: 2}.get(given.head_dim, 4)  # rows of the tile per row that is copied at a time
    asks_much = _has_heavy_score(given) or (given.head_dim == 192 and given.pattern.expression is not None)
    n = _size(given, "n", 32 if given.head_dim == 256 or asks_much else 64)
    largest = min(64, of_pass * min(n, _block(given, "kv", n)))
    return _size(given, "m", min(_block(given, "q", largest) * given.pack_gqa, largest)), n


def bsr_spmm_features(given: BsrSpmmSpec) -> tuple[Choice | None, Fields]:
    """Preferred combination and features of BSR x dense."""
    rows, cols = given.block.rows, given.block.cols
    gathering = ARCHS[given.arch].has_kernel(given.op, *GATHERING)
    gathers = gathering and rows == 16 and given.tile.m == GATHERED_ROWS
    by_rows = given.b_layout == "row_major" and not any(getattr(given, option) for option in NARROW_64)
    preferred = STRIDED if given.b_layout == "strided" else GATHERING if gathers else None
    return preferred, {
        "rows": rows,
        "cols": cols,
        "longest_side": max(rows, cols),
        "depth": 16 if cols % 32 else 32,
        "whole_lines": cols % 64 == 0,  # of the L2, in a row of a step
        "one_block_row": _size(given, "m", rows) == rows,
        "may_be_wide": rows == 64 and by_rows and (_size(given, "n", 512), _size(given, "k", 32)) == (512, 32),
        "sizes_given": bool({"n", "k"} & given.tile.model_fields_set),
    }


def bsr_sddmm_features(given: BsrSddmmSpec) -> tuple[Choice | None, Fields]:
    """Preferred combination and features of a sampled product."""
    tuned = bool({"tile", "stages", "ctas_per_sm"} & given.model_fields_set)
    return None, {"rows": given.block.rows, "cols": given.block.cols, "tuned": tuned}


def bsr_spgemm_features(given: BsrSpgemmSpec) -> tuple[Choice | None, Fields]:
    """Preferred combination and features of BSR x BSR."""
    small = ARCHS[given.arch].has_wgmma and given.block.rows in (16, 32)  # fewer than the 64 rows of a wgmma
    return ("mma", "cp_async", "multistage") if small else None, {"rows": given.block.rows}


STEP_OF_GRADIENTS = {
    "dq": {64: 128, 96: 128, 128: 128, 192: 96, 256: 64},
    "dkdv": {64: 128, 96: 96, 128: 80, 192: 96, 256: 64},
    "dq_dkdv": {64: 128, 80: 64, 96: 96, 128: 80, 192: 80, 256: 80},  # 192 and 256 have no kernel
}
"""Keys or queries per step, by head size: the most that fit registers and shared memory.

With all gradients of heads of 80, 80 queries fit too. Steps of 64 are up to 8% faster than these up to 2048 tokens, and
1 to 2% slower with 4096 (H200, docs/notebook/ladder/notes-attention.md).
"""


MMA_SYNC_STEP_OF_GRADIENTS = {64: 64, 128: 32, 192: 32, 256: 16}
"""Keys or queries per step with mma.sync, by head size: the most that fit registers and shared memory."""


def _mma_sync_gradient(given: AttentionBackwardSpec, rows: int, keys: int) -> Fields:
    """Features of an mma.sync gradient, for list blocks of these rows and keys."""
    step = MMA_SYNC_STEP_OF_GRADIENTS.get(given.head_dim, 64)  # other sizes are rejected later
    if given.head_dim > 128:  # more than 64 rows and their ring do not fit shared memory
        return {"rows": 64, "keys": 64, "step": step}
    if given.gradients == "dkdv" and keys == 64:
        step //= 2  # so that two thread blocks fit an SM
    return {"rows": rows, "keys": keys, "step": step}


def attention_backward_features(given: AttentionBackwardSpec) -> tuple[Choice | None, Fields]:
    """Preferred combination and features of the gradients of attention."""
    rows, keys = _block(given, "q", 128), _block(given, "kv", 128)
    if given.gradients == "daux":  # by mma.sync on all architectures
        step = 16 if given.head_dim == 256 else 32  # registers
        return ("mma", "cp_async", "multistage"), {"rows": 64, "keys": keys, "step": step}
    if not ARCHS[given.arch].has_wgmma:
        return None, _mma_sync_gradient(given, rows, keys)
    if given.gradients == "dkdv" and given.head_dim > 128:
        keys = 64  # a consumer has registers for 64 keys of dK or dV
    most = STEP_OF_GRADIENTS[given.gradients].get(given.head_dim, 64)  # other sizes are rejected later
    if given.pattern.fixed_block is not None and (most < 128 or keys < 128):
        most = 64  # a step is an equal part of a block; two thread blocks with one consumer have less memory
    if given.gradients == "dq" and given.pattern.block_keys is not None and most < 128:
        most = 64  # for blocks of the pattern likewise
    if given.pattern.expression is not None or given.score is not None:  # registers for its row and column values
        most = 32 if given.gradients == "dq" and given.head_dim == 256 else 64
    if _has_heavy_score(given) and given.gradients != "dq":
        most = 32
    return COOPERATIVE, {"rows": rows, "keys": keys, "step": min(keys if given.gradients == "dq" else rows, most)}
