"""Plan of the block lists of a mask: intervals over blocks, pairs of inconclusive blocks, then lists from bits."""

from __future__ import annotations

from codegen.arch import ARCHS, WARP
from codegen.expressions.ranges import Looked, Ranges, bytes_of, list_sizes, ranges_of
from codegen.flags import BlockMaskFlags, LookedFlags, RangesFlags
from codegen.plan import (
    Constant,
    Epilogue,
    Param,
    Plan,
    Prologue,
    Registers,
    SharedLayout,
    check_budget,
    i32,
    pointer,
    require,
)
from codegen.plans.attention.expressions import LINE, aux_params, expression_registers, expressions_flags
from codegen.plans.lengths import KV_LEN, Q_LEN, length_numbers
from codegen.problem import BlockMaskShape, LaunchArgs
from codegen.spec import BlockMaskSpec
from codegen.tile_rules import OneOf, Rule, check_tile

WIDTHS = (128, 256)
OVERHEAD_REGISTERS = 40  # addresses and loop state: an allowance
WORD = 4  # bytes
SCRATCH_UNIT = 16  # bytes: alignment of each part of the scratch memory

TILE: tuple[Rule[BlockMaskSpec], ...] = (OneOf("n", lambda spec: WIDTHS, lambda spec, sizes: f"allowed: {sizes}"),)


def plan(spec: BlockMaskSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    arch, block, mask = ARCHS[spec.arch], spec.pattern.fixed_block, spec.pattern.expression
    kind = spec.pattern.kind
    require(kind == "block_lists", "pattern.kind", f"is {kind}; allowed: block_lists")
    problem = "is not an expression; a block_mask kernel evaluates one (docs/reference/expressions.md)"
    require(mask is not None, "pattern.mask", problem)
    width = spec.tile.n
    check_tile(spec, TILE)
    require(spec.stages == 1, "stages", f"is {spec.stages}; the kernel has no ring of stages; allowed: 1")
    assert block is not None and mask is not None

    shared = SharedLayout()
    shared.add("Undecided", WORD * width // WARP, "bits of key blocks that interval arithmetic cannot classify")
    limit = arch.registers_for(width, 1)
    kept = min(expression_registers(spec), limit - OVERHEAD_REGISTERS)  # larger masks spill
    registers = Registers(accumulators=kept, overhead=OVERHEAD_REGISTERS, limit=limit)
    check_budget(spec, shared.size, registers)
    found = ranges_of(mask)
    return Plan(
        spec=spec,
        stem=stem,
        template="block_mask/block_mask.cu.j2",
        threads=width,
        ctas_per_sm=1,
        persistent=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=(*_lists(), *_ranges(found), *_sizes(), *aux_params(spec)),
        tensor_maps={},
        constants=(
            Constant("kBlockQ", block.q, "queries per block"),
            Constant("kBlockKv", block.kv, "keys per block"),
            Constant("kThreads", width, "threads per block"),
            Constant("kWarps", width // WARP, "warps per block"),
        ),
        flags=_flags(spec, found),
        grid_summary=f"one thread block for a query block and {width} key blocks",
        summary=(
            ("tile", f"{block.q} x {block.kv}: one query block, {width} key blocks, one thread each"),
            ("schedule", f"{spec.schedule}: interval arithmetic over blocks, then the pairs of inconclusive ones"),
        ),
        flops=0,
        bytes=_bytes(found),
        arguments=_arguments,
        prologue=Prologue(f"{stem}_ranges", width) if found.rows or found.columns else None,
        epilogue=Epilogue(f"{stem}_lists", width),
    )


def _lists() -> tuple[Param, ...]:
    rows, words = "(batch, heads, query_blocks)", "(batch, heads, query_blocks, words)"
    return (
        pointer("kv_num_blocks", "int", f"{rows}: number of partial blocks", writes=True),
        pointer("kv_indices", "int", "(batch, heads, query_blocks, key_blocks): partial blocks", writes=True),
        pointer("full_kv_num_blocks", "int", f"{rows}: number of full blocks", writes=True),
        pointer("full_kv_indices", "int", "(batch, heads, query_blocks, key_blocks): full blocks", writes=True),
        pointer("partial_blocks", "uint32", f"{words}: bits of partial blocks", writes=True),
        pointer("full_blocks", "uint32", f"{words}: bits of full blocks", writes=True),
    )


def _ranges(found: Ranges) -> tuple[Param, ...]:
    rows = (pointer("row_ranges", "RowRanges", "(batch, heads, query_blocks)", writes=True),)
    columns = (pointer("column_ranges", "ColumnRanges", "(batch, heads, key_blocks)", writes=True),)
    return (*(rows if found.rows else ()), *(columns if found.columns else ()))


def _sizes() -> tuple[Param, ...]:
    return (
        i32("list_heads", "heads with their own lists; 1: shared"),
        Q_LEN,
        KV_LEN,
        i32("query_blocks", "query blocks per head"),
        i32("key_blocks", "key blocks per head"),
        i32("parts", "thread blocks per query block"),
        i32("words", "words of bits per query block"),
        i32("rows", "query blocks of all lists"),
        i32("blocks", "query blocks and key blocks of all lists"),
    )


def _bytes(found: Ranges) -> int:
    return 2 * WORD + bytes_of(found.columns)


def _flags(spec: BlockMaskSpec, found: Ranges) -> BlockMaskFlags:
    rows, columns, fixed = (
        tuple(_looked(each, side, index) for each in looked)
        for looked, side, index in (
            (found.rows, "row", ", int query"),
            (found.columns, "column", ", int key"),
            (found.fixed, "fixed", ""),
        )
    )
    return BlockMaskFlags(
        expressions=expressions_flags(spec),
        mask_ranges=RangesFlags(rows, columns, (*rows, *columns, *fixed), found.statements, found.result),
        row_parameter=", const RowRanges& rows" if rows else "",
        column_parameter=", const ColumnRanges& columns" if columns else "",
        row_argument=", rows" if rows else "",
        column_argument=", columns" if columns else "",
    )


def _looked(each: Looked, side: str, index: str) -> LookedFlags:
    made = each.printed
    return LookedFlags(
        name=each.name,
        ctype=each.ctype,
        over={"Range": "range_over", "FloatRange": "float_range_over", "Truth": "truth_over"}[each.ctype],
        function=f"{side}_{each.name}",
        index=index,
        value=each.value,
        text=each.text if len(each.text) <= LINE else f"{each.text[: LINE - 4]} ...",
        parts=(*made.column, *made.row, *made.pair),
        result=made.result,
    )


def _arguments(plan: Plan, shape: BlockMaskShape, slots: int) -> LaunchArgs:
    """Launch arguments."""
    del slots
    assert isinstance(plan.spec, BlockMaskSpec)
    block, mask, warps = plan.spec.pattern.fixed_block, plan.spec.pattern.expression, plan.threads // WARP
    assert block is not None and mask is not None
    batches, heads = list_sizes(mask, shape.batch, shape.heads)
    query_blocks, key_blocks = -(-shape.q_len // block.q), -(-shape.kv_len // block.kv)
    rows, columns = batches * heads * query_blocks, batches * heads * key_blocks
    words, parts = -(-key_blocks // WARP), -(-key_blocks // plan.threads)
    found = ranges_of(mask)
    scratch = {"partial_blocks": WORD * rows * words, "full_blocks": WORD * rows * words}
    scratch |= {"row_ranges": bytes_of(found.rows) * rows} if found.rows else {}
    scratch |= {"column_ranges": bytes_of(found.columns) * columns} if found.columns else {}
    return LaunchArgs(
        {
            "list_heads": heads,
            **length_numbers(shape),
            "query_blocks": query_blocks,
            "key_blocks": key_blocks,
            "parts": parts,
            "words": words,
            "rows": rows,
            "blocks": rows + columns,
        },
        rows * parts,
        prologue_grid=-(-(rows + columns) // warps),
        scratch={name: -(-size // SCRATCH_UNIT) * SCRATCH_UNIT for name, size in scratch.items()},
        epilogue_grid=-(-rows // warps),
    )
