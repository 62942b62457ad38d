"""Order of the tiles of load-imbalanced patterns: the dynamic tile scheduler of the sm_90a kernel."""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import Param, i32, pointer
from codegen.plans.bsr.balance import SCHEDULER
from codegen.spec import AttentionSpec

L2_BYTES = 32 << 20  # half of the L2 (H100: 50 MB, H200: 60 MB); the rest holds Q, O and lines that are written back


def is_ordered(spec: AttentionSpec) -> bool:
    """Whether tiles differ in length, so that long ones go first and thread blocks take them from a counter."""
    return spec.pattern.load_imbalanced or spec.layout != "padded"


def order_params(spec: AttentionSpec) -> list[Param]:
    """Parameters of the tile order, if tiles have different lengths."""
    if not is_ordered(spec):
        return []
    return [
        pointer("scheduler", "int", SCHEDULER, writes=True),
        i32("heads_in_l2", "(batch, query head) pairs whose tiles are scheduled together: their K and V fit the L2"),
    ]


def heads_in_l2(spec: AttentionSpec, kv_len: int, heads_per_kv_head: int, heads: int) -> int:
    """Heads (or packs of heads) of ``heads`` that are scheduled together: at least those of one K/V head."""
    kv_head_bytes = kv_len * 2 * spec.head_dim * DTYPES[spec.dtype].bytes
    return min(max(1, L2_BYTES // kv_head_bytes) * heads_per_kv_head, heads)
