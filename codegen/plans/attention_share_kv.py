"""What ``share_kv`` changes in the plan of an sm_90a attention kernel, and what it asks of a spec."""

from __future__ import annotations

from codegen.patterns.topk import TopK
from codegen.plan import require
from codegen.plans.attention_rows import WARPGROUP_ROWS
from codegen.spec import AttentionSpec

QUERY_BLOCKS = 2  # of a tile
FULL_BARRIERS = 1 + QUERY_BLOCKS  # of a place of a ring: for loads of both query blocks, and of each alone
LONGEST_LIST = 128  # lists of two tiles lie in shared memory; matching them takes time with the square of their length
WIDEST_HEAD = 128  # wider ones leave no registers for Q


def check_share_kv(spec: AttentionSpec) -> None:
    """Refuse a spec for which the kernel is not written.

    Raises:
        SpecError: names the first field that is in the way.
    """
    block, m, rows = spec.pattern.fixed_block, spec.tile.m, QUERY_BLOCKS * WARPGROUP_ROWS
    assert block is not None  # the pattern is topk
    given = f"is {spec.schedule}; with share_kv warpgroups take no turns: cooperative"
    require(spec.schedule == "cooperative", "schedule", given)
    require(spec.packed_heads == 1, "packed_heads", f"is {spec.packed_heads}; allowed with share_kv: 1")
    require(block.q == WARPGROUP_ROWS, "pattern.block.q", f"is {block.q}; allowed with share_kv: {WARPGROUP_ROWS}")
    require(m == rows, "tile.m", f"is {m}; with share_kv a tile is two query blocks: {rows}")
    require(spec.tile.n == block.kv, "tile.n", f"is {spec.tile.n}; with share_kv a step is a listed block: {block.kv}")
    require(spec.head_dim <= WIDEST_HEAD, "head_dim", f"is {spec.head_dim}; allowed with share_kv: 64, 96, 128")
    length = list_length(spec)
    require(length <= LONGEST_LIST, "pattern.k", f"is {length}; allowed with share_kv: 1 to {LONGEST_LIST}")


def list_length(spec: AttentionSpec) -> int:
    """Return the entries of a list."""
    assert isinstance(spec.pattern, TopK)
    return spec.pattern.k


def stream_owns(spec: AttentionSpec) -> str:
    """Return what each query block of a tile has for itself, in words."""
    return "list" if spec.share_kv else "key blocks and K/V rings"


def producers(spec: AttentionSpec) -> str:
    """Return the warps that bring tiles, in words."""
    return "a warp for K, one for V, one that matches lists" if spec.share_kv else "one producer warp a stream"
