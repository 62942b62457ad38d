"""Default tiles and stages, one table per operator: the best measured ones, or the largest that fit.

A row applies to specs with certain values of fields, of ``rows`` and ``cols`` of a block, and of features that
:mod:`codegen.select.defaults` derives from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Fields = dict[str, Any]

FP8: Fields = {"dtype": ("e4m3", "e5m2")}
GATHERED_ROWS = 384  # rows per tile of many small block rows


@dataclass(frozen=True)
class Row:
    """One row of a table of defaults.

    Attributes:
        where: values of features of the specs that the row applies to; a tuple allows several values.
        tile: the sizes; a name refers to the feature with the size.
        stages: numbers of stages; the first one that a plan accepts is used.
        options: values of other fields.
    """

    where: Mapping[str, object]
    tile: tuple[int | str, ...]
    stages: Sequence[int]
    options: Mapping[str, object] = field(default_factory=dict)

    def fits(self, features: Mapping[str, Any]) -> bool:
        """Whether the row applies to a spec with these features."""
        return all(
            features[name] in (value if isinstance(value, tuple) else (value,)) for name, value in self.where.items()
        )


Rows = tuple[Row, ...]
"""Rows of an operator; the first one that fits applies."""
WMMA: Fields = {"mma": "wmma"}
MMA: Fields = {"mma": "mma"}
WGMMA: Fields = {"mma": "wgmma"}
SMALL: Fields = WGMMA | {"rows": (16, 32)}
ADDING: Fields = SMALL | {"accumulate": True}
STRIDED: Fields = {"b_layout": "strided"}
SPLIT_KV: Fields = WGMMA | {"kv_splits": 2}
ATTENTION: Rows = (
    Row(SPLIT_KV | {"step": 64 * 64, "kind": "dense"}, (128, "keys"), (4,)),
    Row(SPLIT_KV | {"step": 64 * 64}, (64, "keys"), (4,)),
    Row(SPLIT_KV | {"step": 64 * 128}, (64, "keys"), (2,)),
    Row(SPLIT_KV, (64, "keys"), (1,)),
    Row(WGMMA | {"share_kv_loads": True}, (128, "keys"), (4, 2)),
    Row(WGMMA | {"can_split": True}, (128, "keys"), (2, 1), {"stream_k_tail": True}),
    Row(WGMMA, (128, "keys"), (2, 1)),
    *(  # two thread blocks fit 100 KB
        Row(WMMA | rows | head, (m, n), (3,))
        for rows, m in (({"rows": (16, 32)}, "rows"), ({}, 64))
        for head, n in (({"head_dim": 64}, 64), ({}, 32))
    ),
    Row(MMA | FP8, ("m", "n"), (4,)),  # whole steps, with the bytes of two 16-bit stages
    Row({"tall": True}, ("m", "n"), (2,), {"warp_rows": 32}),
    Row({}, ("m", "n"), (2,)),
)
ATTENTION_BACKWARD: Rows = (
    Row({"gradients": "daux"}, ("rows", "step"), (2,)),
    Row(MMA | {"gradients": "dq", "head_dim": (192, 256)}, ("rows", "step"), (2,)),
    Row(MMA | {"gradients": "dq", "rows": 64}, ("rows", "step"), (3, 2)),
    Row(MMA | {"gradients": "dq"}, ("rows", "step"), (4, 2)),  # Q and dO are loaded through the ring
    Row(MMA | {"keys": 64, "head_dim": 64}, ("step", "keys"), (3, 2)),
    Row(MMA, ("step", "keys"), (2,)),
    Row({"gradients": "dq"}, ("rows", "step"), (2,)),
    Row({"gradients": "dq_dkdv"}, ("step", "keys"), (2, 1)),
    Row({"keys": 64, "head_dim": (96, 128)}, ("step", "keys"), (2, 1)),  # two thread blocks fit an SM
    Row({"head_dim": (192, 256)}, ("step", "keys"), (3, 2)),
    Row({}, ("step", "keys"), (3, 2, 1)),
)
BSR_SPMM: Rows = (
    # Stages of 32 KB of B; as many as fit.
    *(
        Row(WGMMA | FP8 | {"longest_side": side}, ("rows", 32768 // side, "cols"), range(6, 1, -1))
        for side in (32, 64, 128)
    ),
    Row(MMA | {"copy": "tma", "depth": 16}, (GATHERED_ROWS, 128, "depth"), (4,)),
    Row(MMA | {"copy": "tma"}, (GATHERED_ROWS, 128, "depth"), (3,)),  # the rest of shared memory is for rows of B
    Row(MMA | STRIDED | {"depth": 16}, (16, 8, 16), (4,)),
    Row(MMA | STRIDED | {"whole_lines": True}, (16, 8, 64), (3,)),
    Row(MMA | STRIDED, (16, 8, 32), (3,)),
    *(
        Row(MMA | {"copy": "ld_global"} | rows | cols, (m, 16, k), (2,))
        for rows, m in (({"rows": 16}, 16), ({}, 32))
        for cols, k in (({"cols": 16}, 16), ({}, 32))
    ),
    Row({"copy": "ld_global"}, ("rows", 128, "depth"), (1,)),
    Row(WMMA, ("rows", 128, "depth"), (3,)),
    Row(MMA | FP8 | {"scales": "block", "rows": 128}, ("rows", 128, 64), (3,)),
    Row(MMA | FP8 | {"scales": "block"}, ("rows", 256, 64), (3,)),
    Row(MMA | FP8 | {"rows": 128}, ("rows", 128, 32), (4,)),
    Row(MMA | FP8, ("rows", 256, 32), (3,)),
    # The most stages with which two thread blocks fit an SM.
    Row(MMA | {"rows": 128}, ("rows", 128, "depth"), (3,)),
    Row(MMA | {"depth": 16}, ("rows", 256, "depth"), (3,)),
    Row(MMA, ("rows", 256, "depth"), (2,)),
    Row(SMALL | {"one_block_row": False}, ("rows", 128, "cols"), (3,)),
    # Small blocks are bound by loads: a wide tile, many stages. Thread blocks share the registers of an SM: a dynamic
    # scheduler takes some of them; the addend takes memory in addition to large blocks of A.
    *(
        Row(blocks | where, ("rows", n, "cols"), range(most, 1, -1))
        for blocks, most in ((ADDING, 5), (SMALL, 6))
        for where, n in (
            ({"rows": 16, "ctas_per_sm": 3, "scheduler": "dynamic"}, 256),
            ({"rows": 16, "ctas_per_sm": 3, "cols": 32, "accumulate": True}, 256),
            ({"rows": 32, "ctas_per_sm": 3, "scheduler": "dynamic"}, 128),
            ({"rows": 32, "ctas_per_sm": (2, 3)}, 256),
            ({}, 512),
        )
    ),
    Row({"may_be_wide": True, "sizes_given": False}, ("rows", 512, 32), (5,)),  # bound by loads
    Row({"may_be_wide": True}, ("rows", 512, 32), (3,)),
    Row({"transpose_a": True}, ("cols", 256, 64), (3,)),
    Row({}, ("rows", 256, 64), (3,)),
)
BSR_SDDMM: Rows = (
    Row(WGMMA | FP8, ("rows", 256, 128), (5, 4)),
    # The same bytes as 16-bit steps.
    Row(MMA | FP8 | {"rows": 128}, ("rows", 128, 64), (3,)),
    Row(MMA | FP8 | {"rows": 32}, ("rows", 256, 128), (2,)),
    Row(MMA | FP8, ("rows", 256, 64), (2,)),
    # Bound by loads: several thread blocks that wait at different times, or wide tiles with larger copies.
    Row(WGMMA | {"rows": 32, "ctas_per_sm": 3}, ("rows", 128, 64), (3, 2)),
    Row(SMALL | {"ctas_per_sm": (2, 3)}, ("rows", 256, 64), (3, 2)),
    Row(SMALL | {"cols": 32}, ("rows", 512, 64), (3,)),
    Row(SMALL | {"tuned": False}, ("rows", 256, 64), (3,), {"ctas_per_sm": 2}),
    Row(SMALL, ("rows", 256, 64), (3,)),
    Row(WGMMA, ("rows", 256, 64), (4,)),
    # Two or more thread blocks share an SM.
    Row(MMA | {"rows": 128}, ("rows", 128, 32), (3,)),
    *(
        Row(MMA | where | rows, ("rows", n, k), stages)
        for where, stages in (({"arch": "sm_90a"}, (3,)), ({}, (2,)))
        for rows, n, k in (({"rows": 16}, 128, 64), ({"rows": (32, 64)}, 256, 32), ({}, 128, 32))
    ),
    Row({"rows": 16}, ("rows", 128, 64), (2,)),
    Row({}, ("rows", 128, 32), (2,)),
)
BSR_SPGEMM: Rows = (  # the most stages with which several thread blocks share an SM
    Row(WGMMA | {"rows": 64}, ("rows", "rows", 64), (4,)),
    Row(WGMMA, ("rows", "rows", 64), (3,)),
    Row(MMA | {"rows": 16, "arch": "sm_90a"}, ("rows", "rows", 16), (2,)),
    Row(MMA | {"rows": 16}, ("rows", "rows", 16), (3,)),
    Row(MMA | {"rows": 32}, ("rows", "rows", 32), (2,)),
    Row(MMA, ("rows", "rows", 32), (3,)),
    Row({"rows": 16}, ("rows", "rows", 16), (2,)),
    Row({}, ("rows", "rows", 32), (2,)),
)
BLOCK_MASK: Rows = (Row({}, (256,), (1,)),)
QUANTIZE: Rows = (
    Row({"scales": "row"}, (64,), (1,)),
    Row({"scales": "given", "rotary": ("half", "interleaved")}, (64,), (1,)),
    Row({}, (128,), (1,)),
)
KEY_LISTS_BACKWARD: Rows = (
    # Rows of a step: the most that fit registers and shared memory; of blocks of 64 keys, two thread blocks fit an SM.
    Row({"keys": 128, "head_dim": 128}, (80, "keys"), (2,)),
    Row({"keys": 128, "head_dim": 64}, (96, "keys"), (2,)),
    Row({"head_dim": 128}, (48, "keys"), (2,)),
    Row({"head_dim": 64}, (96, "keys"), (2,)),
)
KEY_LISTS_FORWARD: Rows = (
    # The deepest ring with which two thread blocks fit an SM, up to 4 stages.
    Row({"keys": 128, "head_dim": 128}, (64, "keys"), (3,)),
    Row({}, (64, "keys"), (4,)),
)
PAGED_ATTENTION: Rows = (
    # At most 100 KB of rings where a block has no more; on sm_90a two thread blocks fit an SM, but for large heads.
    *(
        Row({"cache": cache, "head_dim": head_dim, **where}, (16, keys), stages)
        for cache, head_dim, where, keys, stages in (
            ("same", 64, {"arch": "sm_90a"}, 64, (6,)),
            ("same", 64, {}, 64, (4,)),
            ("same", 128, {}, 64, (2,)),
            ("same", 192, {"arch": "sm_90a"}, 64, (3,)),
            ("same", 256, {"arch": "sm_90a"}, 64, (2,)),
            ("same", (192, 256), {}, 32, (2,)),
            ("e4m3", 64, {}, 128, (4,)),
            ("e4m3", 128, {}, 128, (2,)),
            ("e4m3", 256, {"arch": "sm_90a"}, 128, (2,)),
            ("e4m3", (192, 256), {}, 64, (2,)),  # 192 is refused by name
        )
    ),
)
SELECT_TOPK: Rows = (Row({}, (32, 64), (1,)),)
TILE_COPY: Rows = (Row({"copy": "ld_global"}, (64, 128), (1,)), Row({}, (64, 128), (3,)))
