"""Shared by the plans of the gradients of attention: parameters, the loop over a tile's steps, launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from codegen.arch import WARP
from codegen.flags import AttentionBackwardFlags, AttentionBackwardPatternFlags
from codegen.patterns import without_gradient
from codegen.plan import Constant, Param, Plan, SharedLayout, f32, i32, pointer, require
from codegen.plans.attention.expressions import Side, expressions_flags
from codegen.plans.attention.launch import pattern_numbers
from codegen.plans.attention.params import (
    block_of,
    index_params,
    is_step_of_pattern,
    list_constants,
    logit_constants,
    step_of_pattern,
    tensor_params,
)
from codegen.plans.lengths import (
    GAPS,
    Q_LEN,
    VARLEN_PARAMS,
    check_layout,
    clears_rows,
    kv_len_params,
    length_numbers,
    lengths_of,
    tiles_of,
)
from codegen.problem import AttentionShape, LaunchArgs, blocks_of
from codegen.spec import AttentionBackwardSpec
from codegen.tile_rules import Fits, Rule, check_tile

PIECES = "attention_backward"  # folder of templates
STATS_BYTES = 8  # per query: log-sum-exp and delta
STATS_ROWS = 128  # rows of the largest tile, and of the largest step
STATS_SPARE = 2  # blocks of STATS_ROWS rows of each segment of packed sequences, besides those that its tokens fill
ELEMENT = "unsigned short"  # C++ type of an element in the kernel
PROLOGUE_THREADS = 1024  # the warps of a thread block split the lists of a head


def check_pattern(spec: AttentionBackwardSpec) -> None:
    """Reject a pattern without gradients, a layout or an order of sums that the kernel does not have."""
    reason = without_gradient(spec.pattern.kind)
    require(not reason, "pattern", reason)
    check_layout(spec)
    ordered = spec.deterministic or spec.gradients == "dq_dkdv"
    reason = f"is false; {spec.gradients} always sums in a fixed order: leave it out, or use gradients: dq_dkdv"
    require(ordered, "deterministic", reason)


def _is_part(field: str, side: str) -> Callable[[AttentionBackwardSpec], bool]:
    """Condition that a side of the tile is a block of the lists, or an equal part of one."""

    def holds(spec: AttentionBackwardSpec) -> bool:
        block = spec.pattern.fixed_block
        return block is None or int(getattr(block, side)) % int(getattr(spec.tile, field)) == 0

    return holds


def _of_queries(spec: AttentionBackwardSpec) -> str:
    what, unit = ("tile", "rows") if spec.by_queries else ("step", "queries")
    return f"a {what} is a query block or an equal part of one: {block_of(spec).q} {unit}"


def _of_keys(spec: AttentionBackwardSpec) -> str:
    return f"a {'step' if spec.by_queries else 'tile'} is a key block or an equal part of one: {block_of(spec).kv} keys"


OF_BLOCKS: tuple[Rule[AttentionBackwardSpec], ...] = (
    Fits(
        "n",
        lambda spec: spec.pattern.fixed_block is not None or is_step_of_pattern(spec),
        lambda spec: f"it is {step_of_pattern(spec)}",
    ),
    Fits("m", _is_part("m", "q"), _of_queries),
    Fits("n", _is_part("n", "kv"), _of_keys),
)
"""Rules for the tiles of all gradients."""


def check_blocks(spec: AttentionBackwardSpec) -> None:
    """Reject list blocks that are not whole tiles or steps."""
    block = spec.pattern.fixed_block
    if block is not None:
        for name, size in (("q", block.q), ("kv", block.kv)):
            require(size in (64, 128), f"pattern.block.{name}", f"is {size}; allowed in a gradient: 64, 128")
    check_tile(spec, OF_BLOCKS)


def params(spec: AttentionBackwardSpec, operands: tuple[Param, ...]) -> tuple[Param, ...]:
    """Parameters of the kernel: operands and gradients, then the common parameters."""
    is_dq = spec.by_queries
    lists = index_params(spec.forward)
    if transposes(spec):
        rows = i32("query_blocks", "query blocks per head: rows of the lists")
        lists += [
            *([] if rows in lists else [rows]),
            *([i32("key_blocks", "key blocks per head")] if divides_key_blocks(spec) else []),
            pointer("q_offsets", "int", "start of each key block's list, then the end of the last list", writes=True),
            pointer("q_entries", "int", "lists of query blocks, by key block", writes=True),
            *(
                [
                    pointer(
                        "q_entry_places", "int", "positions of these entries in the lists of query blocks", writes=True
                    )
                ]
                if spec.pattern.masks_by_bits
                else []
            ),
            pointer(
                "q_places", "int", "destinations of entries, for each warp of the prologue and key block", writes=True
            ),
            i32("list_batches", "batches with their own lists; 1: shared"),
            i32("list_heads", "heads with their own lists; 1: shared"),
            i32("list_entries", "entries of all lists of a head"),
            i32("list_blocks", "thread blocks of the prologue that transpose lists; the next ones compute statistics"),
        ]
    return (
        *operands,
        *(_packed_rows() if is_packed(spec) else _padded_rows()),
        *lists,
        *_sizes(spec),
        i32("heads", "query heads"),
        i32("heads_per_kv_head", "query heads per K/V head"),
        *([] if is_packed(spec) else [i32("batch_heads", "batch * heads")]),
        i32("query_tiles", "tiles of kTileM queries per head") if is_dq else i32("key_tiles", "tiles per K/V head"),
        i32("head_chunks", "16-byte chunks per row of a head"),
        f32("scale_log2", "scale * log2(e); the host checks that it is positive"),
        f32("scale", "the softmax scale"),
    )


def is_packed(spec: AttentionBackwardSpec) -> bool:
    """Whether sequences are packed."""
    return spec.layout == "varlen"


def input_params(spec: AttentionBackwardSpec) -> tuple[Param, ...]:
    """Addresses and strides of Q, K and V."""
    q, kv = "(batch, heads, q_len, head_dim)", "(batch, kv_heads, kv_len, head_dim)"
    if is_packed(spec):
        q, kv = "(tokens, heads, head_dim)", "(tokens, kv_heads, head_dim)"
    return _addressed(spec, {"q": f"Q {q}", "k": f"K {kv}", "v": "V, as K"}, writes=False)


def gradient_params(spec: AttentionBackwardSpec) -> tuple[Param, ...]:
    """Addresses and strides of the gradients."""
    docs = {"dq": "dQ, as Q", "dk": "dK, as K", "dv": "dV, as K"}
    return _addressed(spec, {name: doc for name, doc in docs.items() if name in spec.gradients}, writes=True)


def _addressed(spec: AttentionBackwardSpec, docs: dict[str, str], *, writes: bool) -> tuple[Param, ...]:
    has_batches = not is_packed(spec)
    params = (tensor_params(name, ELEMENT, docs[name], writes=writes, has_batches=has_batches) for name in docs)
    return tuple(param for of_tensor in params for param in of_tensor)


def _padded_rows() -> tuple[Param, ...]:
    """What the prologue reads and writes, of padded sequences."""
    return (
        *tensor_params("out", ELEMENT, "O (batch, heads, q_len, head_dim)"),
        *tensor_params("dout", ELEMENT, "dO, as O"),
        pointer("lse", "float", "log-sum-exp of the forward, (batch, heads, q_len) contiguous"),
        pointer("stats", "RowStats", "statistics of all rows, (batch, heads, padded_q_len)", writes=True),
    )


def _packed_rows() -> tuple[Param, ...]:
    """What the prologue reads and writes, of packed sequences."""
    return (
        *tensor_params("out", ELEMENT, "O (tokens, heads, head_dim)", has_batches=False),
        *tensor_params("dout", ELEMENT, "dO, as O", has_batches=False),
        pointer("lse", "float", "log-sum-exp of the forward, (heads, tokens) contiguous"),
        pointer("dlse", "float", "gradient of the log-sum-exp, as lse; 0 if null"),
        pointer("stats", "RowStats", "statistics of all rows, (heads, padded_q_len)", writes=True),
    )


def _sizes(spec: AttentionBackwardSpec) -> tuple[Param, ...]:
    """Numbers of queries and keys, and rows of statistics."""
    if is_packed(spec):
        rows = (
            f"rows of statistics per head: all tokens, and at least {STATS_ROWS} rows of padding behind each sequence"
        )
        return (*VARLEN_PARAMS, i32("padded_q_len", rows))
    rows = f"rows of statistics per head: q_len and at least {STATS_ROWS} rows of padding"
    return (Q_LEN, i32("padded_q_len", rows), *kv_len_params(lengths_of(spec)))


def step_meta(shared: SharedLayout, spec: AttentionBackwardSpec) -> None:
    """Allocate metadata of the steps in the ring, if pairs are masked; for expressions, with the head."""
    is_dq, stages = spec.by_queries, spec.stages
    if spec.pattern.masks_by_bits and not is_dq:
        shared.add("StepBits", 8 * stages, "start of the mask bits of each step in the ring", align=8)
    elif is_dq or spec.pattern.masks_pairs:
        size = 8 if not is_dq and spec.pattern.expression is not None else 4
        shared.add("StepMeta", size * stages, "metadata of the steps in the ring", align=size)


def tile_segment(shared: SharedLayout, spec: AttentionBackwardSpec) -> None:
    """Allocate the segment of the tile, if sequences are packed."""
    if is_packed(spec):
        shared.add("Segment", 28, "segment of the tile", align=8)


def arrived_barrier(shared: SharedLayout, spec: AttentionBackwardSpec) -> None:
    """Allocate the barrier of steps that contain the end of a sequence.

    It is the last region, and not among the barriers: in some kernels, other alignments of the regions behind them made
    consumers spill.
    """
    if clears_rows(spec):
        shared.add("Arrived", 8, "mbarrier of a step that contains the end of a sequence", align=8)


def step_places(shared: SharedLayout, spec: AttentionBackwardSpec) -> None:
    """Allocate the first query and head of the steps in the ring, for a score."""
    shared.add("StepPlaces", 8 * spec.stages, "first query and head of the steps in the ring", align=8)


def transposes(spec: AttentionBackwardSpec) -> bool:
    """Whether the kernel iterates over transposed lists."""
    return not spec.by_queries and spec.pattern.fixed_block is not None


def sums_in_fixed_point(spec: AttentionBackwardSpec) -> bool:
    """Whether tiles add integers to dQ, which have the same bits in any order: those of lists, in one kernel."""
    return spec.gradients == "dq_dkdv" and spec.pattern.fixed_block is not None


def divides_key_blocks(spec: AttentionBackwardSpec) -> bool:
    """Whether key blocks are counted apart from tiles: several share a block, or sequences are packed."""
    block = spec.pattern.fixed_block
    return transposes(spec) and block is not None and (block.kv > spec.tile.n or is_packed(spec))


def row_lanes(spec: AttentionBackwardSpec) -> int:
    """Threads per row in the prologue: a power of two, so that a warp has whole rows; some threads may be idle."""
    return 1 << (spec.head_dim // 8 - 1).bit_length()


def size_constants(spec: AttentionBackwardSpec) -> tuple[Constant, ...]:
    """Sizes of a tile and its steps."""
    is_dq, block, m, n = spec.by_queries, spec.pattern.fixed_block, spec.tile.m, spec.tile.n
    asks_rows = is_dq and (spec.pattern.masks_pairs if block is None else block.q <= m)
    return (
        Constant("kHeadDim", spec.head_dim, "elements per head"),
        Constant("kTileM", m, "query rows of a tile" if is_dq else "queries per step"),
        Constant("kTileN", n, "keys per step" if is_dq else "keys of a tile"),
        *((Constant("kSubTileRows", m, "queries of a tile, over one range of keys"),) if asks_rows else ()),
        Constant("kStages", spec.stages, "depth of the ring"),
    )


def walk_constants(spec: AttentionBackwardSpec) -> tuple[Constant, ...]:
    """Constants of the prologue and of the loop over a tile's steps."""
    block, m, n = spec.pattern.fixed_block, spec.tile.m, spec.tile.n
    listed: list[Constant] = []
    if block is not None and spec.by_queries:
        listed = list_constants(block, block.kv // n)
        listed += [Constant("kBlockQueries", block.q, "queries that share a list")] if block.q > m else []
    elif block is not None:
        listed = [Constant("kBlockSteps", block.q // m, "steps in a listed query block")]
        if divides_key_blocks(spec):
            listed.append(Constant("kBlockKeys", block.kv, "keys that share a list"))
    if spec.pattern.masks_by_bits and not spec.by_queries:
        listed += [Constant("kLaneWords", -(-m // 64), "pairs of words per step and lane, shared by eight lanes")]
    packed = (
        Constant("kStatsRows", STATS_ROWS, "rows of a block of statistics: those of the largest tile or step"),
        Constant("kStatsSpare", STATS_SPARE, "blocks of statistics of a segment, besides those that its tokens fill"),
    )
    return (
        *(packed if is_packed(spec) else ()),
        Constant("kPrologueThreads", PROLOGUE_THREADS, "threads per block of the prologue"),
        Constant("kRowLanes", row_lanes(spec), "threads per row in the prologue, 16 bytes each"),
        *listed,
        *(Constant(name, value, comment) for name, (value, comment) in spec.pattern.constants().items()),
        *logit_constants(spec.forward),
    )


def pattern_flags(spec: AttentionBackwardSpec) -> AttentionBackwardPatternFlags:
    """Template parameters of the pattern."""
    forward, block = spec.forward, spec.pattern.fixed_block
    block_steps = 1 if block is None else max(1, block.kv // spec.tile.n)
    shared: Side = "" if spec.mma == "mma" else "column" if spec.gradients == "dq" else "row"
    return AttentionBackwardPatternFlags(
        pattern_template=f"attention/patterns/{spec.pattern.kind}.cuh.j2",
        lengths=lengths_of(spec),
        expressions=expressions_flags(forward, shared, gradients=True),
        partial_range=False,
        skip_masked=False,
        block_steps=block_steps,
        step_blocks=1,
        divides_block=block is not None and block.q > spec.tile.m,
        masks_pairs=spec.pattern.masks_pairs,
        transposes=transposes(spec),
        fixed_point=sums_in_fixed_point(spec),
    )


def walk_flags(spec: AttentionBackwardSpec) -> AttentionBackwardFlags:
    """Template parameters of the pattern and of the loop over the steps of a tile."""
    of_pattern = pattern_flags(spec)
    return AttentionBackwardFlags(
        **{field.name: getattr(of_pattern, field.name) for field in fields(of_pattern)},
        divides_key_blocks=divides_key_blocks(spec),
        several_lists=spec.pattern.lists > 1,
    )


def arguments(plan: Plan, shape: AttentionShape, slots: int) -> LaunchArgs:
    """Launch arguments, with one thread block per tile."""
    del slots
    spec = plan.spec
    assert isinstance(spec, AttentionBackwardSpec)
    padded = padded_rows(shape.q_len, shape.sequences)
    if spec.by_queries:
        heads, tiles = shape.heads, {"query_tiles": tiles_of(shape.q_len, shape.sequences, spec.tile.m)}
    else:
        heads, tiles = shape.kv_heads, {"key_tiles": tiles_of(shape.kv_len, shape.sequences, spec.tile.n)}
    count = heads * sum(tiles.values())
    block = spec.pattern.fixed_block
    numbers = {
        **tiles,
        **length_numbers(shape),
        "padded_q_len": padded,
        "heads": shape.heads,
        "heads_per_kv_head": shape.heads // shape.kv_heads,
        "batch_heads": shape.batch * shape.heads,
        **pattern_numbers(spec, shape),
        **(
            {}
            if block is None
            else {
                "query_blocks": blocks_of(shape.q_len, shape.sequences, block.q),
                "key_blocks": blocks_of(shape.kv_len, shape.sequences, block.kv),
            }
        ),
    }
    rows_of_block = PROLOGUE_THREADS // row_lanes(spec)
    stats_blocks = -(-shape.batch * shape.heads * padded // rows_of_block)
    if not transposes(spec):
        return LaunchArgs(numbers, shape.batch * count, prologue_grid=stats_blocks)
    lists, entries = shape.list_batches * shape.list_heads, numbers["query_blocks"] * shape.list_length
    numbers |= {
        "list_batches": shape.list_batches,
        "list_heads": shape.list_heads,
        "list_entries": entries,
        "list_blocks": lists,
    }
    places = PROLOGUE_THREADS // WARP * numbers["key_blocks"]
    scratch = {"q_offsets": numbers["key_blocks"] + 1, "q_entries": max(1, entries), "q_places": places}
    if spec.pattern.masks_by_bits:
        scratch["q_entry_places"] = max(1, entries)
    return LaunchArgs(
        numbers,
        shape.batch * count,
        prologue_grid=lists + stats_blocks,
        scratch={name: 4 * lists * size for name, size in scratch.items()},
    )


def padded_rows(q_len: int, sequences: int = 0) -> int:
    """Rows of statistics per head; tiles and steps that start at a query do not extend beyond them.

    Args:
        q_len: queries, of all sequences if they are packed.
        sequences: packed sequences; 0 if sequences are padded.
    """
    if sequences:
        return (q_len // STATS_ROWS + STATS_SPARE * (sequences + GAPS)) * STATS_ROWS
    return -(-q_len // STATS_ROWS) * STATS_ROWS + STATS_ROWS
