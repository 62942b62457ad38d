"""From the shape of an attention problem to the arguments of its launch."""

from __future__ import annotations

from codegen.plan import Plan
from codegen.plans.attention_order import section_heads
from codegen.plans.attention_query_order import order_search
from codegen.problem import SCHEDULER_COUNTERS, AttentionShape, LaunchArgs
from codegen.spec import AttentionSpec


def arguments(plan: Plan, shape: AttentionShape, slots: int) -> LaunchArgs:
    """Work out a launch on a device that runs ``slots`` thread blocks at once."""
    spec = plan.spec
    assert isinstance(spec, AttentionSpec)
    heads, group = shape.heads // spec.packed_heads, shape.heads // shape.kv_heads // spec.packed_heads
    query_tiles = -(-shape.q_len // plan.tile_queries)
    tiles = shape.batch * heads * query_tiles
    block = spec.pattern.fixed_block
    numbers = {
        "q_len": shape.q_len,
        "kv_len": shape.kv_len,
        "heads": heads,
        "heads_per_kv_head": group,
        "query_tiles": query_tiles,
        "tiles": tiles,
        "query_blocks": 0 if block is None else -(-shape.q_len // block.q),
        "section": section_heads(spec, shape.kv_len, group, shape.batch * heads),
    }
    counters, scratch = {}, {}
    prologue_grid = split_blocks = 0
    if plan.dynamic_scheduler:
        counters["scheduler"] = SCHEDULER_COUNTERS
    if spec.paced:
        counters["progress"] = SCHEDULER_COUNTERS
    if plan.prologue is not None:
        search = order_search(
            shape.list_batches, shape.list_heads, numbers["query_blocks"], query_tiles=query_tiles, streams=plan.streams
        )
        numbers |= search.values
        prologue_grid, scratch["query_order"] = search.thread_blocks, search.bytes
    if plan.split is not None:
        shares = spec.pattern.shares(shape.kv_len, plan.tile_queries // plan.streams, spec.tile.n, shape.list_length)
        split_tiles, split_blocks = plan.split.divide(tiles, shares, slots)
        numbers |= {"shares": shares, "split_tiles": split_tiles, "split_blocks": split_blocks}
        counters["shares_done"], scratch["parts"] = plan.split.workspace(split_tiles, split_blocks)
    return LaunchArgs(numbers, max(tiles, split_blocks), prologue_grid, counters, scratch)
