"""Launch arguments for the shape of an attention problem."""

from __future__ import annotations

from codegen.expressions.nodes import PATTERN_VARIABLES
from codegen.patterns.base import MOST_KEYS
from codegen.plan import Plan, require
from codegen.plans.attention.order import heads_in_l2
from codegen.plans.attention.query_order import order_search
from codegen.plans.attention.sizes import Sizes
from codegen.plans.attention.split_kv import split_memory, splits_of
from codegen.plans.lengths import length_numbers, paged_numbers, query_tiles
from codegen.problem import COUNTER_BYTES, SCHEDULER_BYTES, SCHEDULER_COUNTERS, AttentionShape, LaunchArgs, blocks_of
from codegen.spec import AttentionBackwardSpec, AttentionSpec
from codegen.stream_k import StreamK


def arguments(plan: Plan, shape: AttentionShape, slots: int) -> LaunchArgs:
    """Launch arguments for a device that runs ``slots`` thread blocks concurrently."""
    spec = plan.spec
    assert isinstance(spec, AttentionSpec)
    heads, group = shape.heads // spec.pack_gqa, shape.heads // shape.kv_heads // spec.pack_gqa
    head_tiles = query_tiles(shape, plan.tile_queries)
    splits = splits_of(spec, shape, plan.tile_queries, slots)
    tiles = shape.batch * heads * head_tiles * splits
    block = spec.pattern.fixed_block
    numbers = {
        **(paged_numbers(shape) if spec.layout == "paged" else length_numbers(shape)),
        "heads": heads,
        "heads_per_kv_head": group,
        "query_tiles": head_tiles,
        "tiles": tiles,
        "query_blocks": 0 if block is None else blocks_of(shape.q_len, shape.sequences, block.q),
        "heads_in_l2": heads_in_l2(spec, shape.kv_len, group, shape.batch * heads),
        **pattern_numbers(spec, shape),
    }
    counters, scratch = {}, {}
    prologue_grid = stream_k_ctas = 0
    if plan.dynamic_scheduler:
        counters["scheduler"] = SCHEDULER_COUNTERS
    if spec.l2_lockstep:
        counters["progress"] = SCHEDULER_COUNTERS
    if spec.split_kv:
        numbers["splits"] = splits
        sizes = Sizes.of(spec)
        memory = split_memory(sizes.consumers, sizes.partial_floats, slots, splits)
        counters["parts_done"], scratch["partials"] = memory
    if plan.prologue is not None:
        search = order_search(
            shape.list_batches,
            shape.list_heads,
            numbers["query_blocks"],
            query_tiles=head_tiles,
            sub_tiles=plan.sub_tiles,
        )
        numbers |= search.values
        prologue_grid, scratch["query_order"] = search.thread_blocks, search.bytes
    if plan.stream_k is not None:
        units = spec.pattern.with_params(pattern_numbers(spec, shape)).stream_k_units(
            shape.kv_len, plan.tile_queries // plan.sub_tiles, spec.tile.n, shape.list_length
        )
        stream_k_tiles, stream_k_ctas = plan.stream_k.divide(tiles, units, slots)
        numbers |= {"units": units, "stream_k_tiles": stream_k_tiles, "stream_k_ctas": stream_k_ctas}
        counters["units_done"], scratch["partials"] = plan.stream_k.workspace(stream_k_tiles, stream_k_ctas)
    return LaunchArgs(numbers, max(tiles, stream_k_ctas), prologue_grid, counters, scratch)


def pattern_numbers(spec: AttentionSpec | AttentionBackwardSpec, shape: AttentionShape) -> dict[str, int]:
    """Numbers of the pattern that the call sets, by kernel parameter.

    Raises:
        SpecError: for a number that is missing in the shape, is too large, or is not a parameter of the kernel.
    """
    numbers = {name: getattr(shape, name) for name in PATTERN_VARIABLES}
    taken = spec.pattern.number_params
    for name, value in numbers.items():
        if name in taken:
            require(value is not None, f"shape.{name}", "is missing; the spec's pattern takes it from the call")
            require(value <= MOST_KEYS, f"shape.{name}", f"is {value}, expected 0 to {MOST_KEYS}")
        else:
            require(value is None, f"shape.{name}", f"is {value}; the spec's pattern does not take it from the call")
    return {name: numbers[name] for name in taken}


def workspace_bytes(spec: AttentionSpec, stream_k: StreamK | None, *, dynamic: bool) -> dict[str, str]:
    """Bytes of workspace parameters whose size depends on other parameters.

    Args:
        spec: spec of the kernel.
        stream_k: division of its tiles, or None.
        dynamic: whether thread blocks take tiles from a counter.
    """
    return {
        **(SCHEDULER_BYTES if dynamic else {}),
        **({"progress": str(SCHEDULER_COUNTERS * COUNTER_BYTES)} if spec.l2_lockstep else {}),
        **(stream_k.workspace_bytes if stream_k else {}),
    }
