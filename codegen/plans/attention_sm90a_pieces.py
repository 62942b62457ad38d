"""Which pieces the source of an sm_90a attention kernel is made of, and the words in which it says so."""

from __future__ import annotations

from codegen.flags import (
    AttentionSm90aFlags,
    AttentionSm90aListWords,
    AttentionSm90aPieces,
    AttentionSm90aRingWords,
    AttentionSm90aWords,
)
from codegen.plans.attention_expressions import expressions_flags
from codegen.plans.attention_fp8 import fp8_flags, is_fp8, load_words, output_words, promotion
from codegen.plans.attention_kv_lengths import key_end_words
from codegen.plans.attention_lists import list_words
from codegen.plans.attention_logits import formula, keys_of_pattern, logits_piece, softmax_scale
from codegen.plans.attention_sm90a_text import Arrangement, Sizes
from codegen.spec import AttentionSpec

PIECES = "attention/sm90a"
GROUPINGS = {"none": "listed", "given": "given", "search": "searched"}  # query_grouping to the piece's name


def flags(sizes: Sizes, at: Arrangement, *, uses_setmaxnreg: bool) -> AttentionSm90aFlags:
    """Return what the templates ask."""
    spec, rows, block = sizes.spec, sizes.rows, sizes.block
    return AttentionSm90aFlags(
        pattern_template=f"attention/patterns/{spec.pattern.kind}.cuh.j2",
        expressions=expressions_flags(spec, "column"),
        partial_range=spec.stream_k_tail or spec.kv_splits > 1,
        skip_masked=sizes.skip_masked,
        step_is=_step_is(sizes),
        lists=list_words(
            spec,
            partial=block is not None and (rows.packed or block.q > rows.sub_tile_queries),
            several_lists=rows.sub_tiles > 1,
            block_steps=sizes.block_steps,
            step_blocks=sizes.step_blocks,
        ),
        key_end_words=key_end_words(spec),
        uses_setmaxnreg=uses_setmaxnreg,
        surplus_first=surplus_first(sizes),
        o_aliases_q=at.o_aliases_q,
        softmax_scale=softmax_scale(spec),
        fp8=fp8_flags(sizes),
        pieces=pieces(sizes, at),
        words=words(sizes, at),
        ring_words=ring_words(sizes, at),
        list_words=key_words(sizes, at),
    )


def pieces(sizes: Sizes, at: Arrangement) -> AttentionSm90aPieces:
    """Return the files of the kernel's pieces."""
    spec, shared = sizes.spec, sizes.spec.share_kv_loads
    suffix = "_fp8" if is_fp8(spec) else ""
    names = {
        "grouping": GROUPINGS[spec.query_grouping],
        "kv_pipeline": "share_kv" if shared else "ring",
        "load_groups": "three" if sizes.sub_tiles == 3 else "two",
        "loads": ("several" if sizes.step_blocks > 1 else "one") + suffix,
        "lockstep": "on" if spec.l2_lockstep else "off",
        "mask": _mask(sizes),
        "roles": "share_kv" if shared else "publish",
        "row_sum": "sink" if spec.sink else "plain",
        "rows": "packed" if sizes.rows.packed else "plain",
        "q_operand": _q_operand(at),
        "q_stage": _q_stage(spec, at),
        "schedule": _schedule(sizes),
        "scheduler": _scheduler(spec),
        "steps": "if_any" if may_be_empty(sizes) else "always",
        "sub_tiles": _sub_tiles(sizes),
        "tile_order": _tile_order(sizes),
        "finish": _finish(spec),
        "info": "turns" if _schedule(sizes) == "ping_pong_lists" else "steps",
    }
    files = {f"{axis}_piece": f"{PIECES}/{axis}/{name}.cuh.j2" for axis, name in names.items()}
    files["q_operand_piece"] = f"{PIECES}/q_operand{suffix}/{names['q_operand']}.cuh.j2"
    place = f"{PIECES}/share_kv" if shared else PIECES
    searched = "_searched" if spec.query_grouping == "search" else ""
    return AttentionSm90aPieces(
        **files,
        logits_piece=logits_piece(spec),
        producer_piece=f"{place}/producer.cuh.j2",
        consumer_piece=f"{place}/consumer{suffix}.cuh.j2",
        overview_piece=f"{PIECES}/overview{suffix}.cuh.j2",
        gemm_piece=f"{PIECES}/gemm{suffix}.cuh.j2",
        softmax_piece=f"{PIECES}/softmax{suffix}.cuh.j2",
        promotion_piece=f"{PIECES}/promotion/{promotion(spec)}.cuh.j2",
        mainloop_piece=f"{PIECES}/mainloop{suffix}.cuh.j2",
        order_tiles_piece=f"{PIECES}/share_kv/order_tiles{searched}.cuh.j2",
        key_range_piece=files["grouping_piece" if shared else "sub_tiles_piece"],
    )


def _mask(sizes: Sizes) -> str:
    if sizes.skip_masked:
        return "visible_range"
    if sizes.spec.pattern.expression is not None:
        return "expression"
    if sizes.spec.pattern.masks_by_bits:
        return "bits"
    return "pairs" if sizes.spec.pattern.masks_pairs else "tail"


def _q_operand(at: Arrangement) -> str:
    if at.q_in_registers:
        return "registers"
    return "slices" if at.q_slices else "shared"


def _q_stage(spec: AttentionSpec, at: Arrangement) -> str:
    if spec.share_kv_loads:
        places = "two" if at.tile_stages > 1 else "one"
        return f"share_kv_{'registers' if at.q_in_registers else places}"
    if at.q_in_registers:
        return "freed_by_load"
    return "freed_by_store" if at.o_aliases_q else "freed_by_scores"


def _schedule(sizes: Sizes) -> str:
    if sizes.spec.schedule != "ping_pong":
        return "cooperative"
    return "ping_pong" if sizes.sub_tiles == 1 else "ping_pong_lists"


def _scheduler(spec: AttentionSpec) -> str:
    if spec.stream_k_tail:
        return "stream_k"
    return "dynamic" if spec.pattern.load_imbalanced or spec.query_grouping == "search" else "static"


def _sub_tiles(sizes: Sizes) -> str:
    if sizes.spec.kv_splits > 1:
        return "kv_splits"
    return "query_blocks" if sizes.sub_tiles > 1 else "one"


def may_be_empty(sizes: Sizes) -> bool:
    """Return whether a work tile, or a sub-tile of it, may have no step.

    Each tile begins with a query, and every query of a dense matrix has keys, unless its batch has none. A list of
    fixed length has as many steps, whatever they show.
    """
    pattern = sizes.spec.pattern
    without_keys = sizes.spec.kv_lengths and sizes.block is None
    return sizes.sub_tiles > 1 or without_keys or not pattern.never_empty


def surplus_first(sizes: Sizes) -> bool:
    """Return whether surplus rows of a head's tiles lie before query 0."""
    return sizes.spec.pattern.surplus_first and not sizes.rows.packed


def _tile_order(sizes: Sizes) -> str:
    if not sizes.spec.pattern.load_imbalanced:
        return "by_head"
    return "surplus_first" if surplus_first(sizes) else "late_first"


def _finish(spec: AttentionSpec) -> str:
    if spec.stream_k_tail:
        return "combine"
    return "merge" if spec.kv_splits > 1 else "store"


def words(sizes: Sizes, at: Arrangement) -> AttentionSm90aWords:
    """Return the words that differ from kernel to kernel in text that they share."""
    spec, rows, pattern = sizes.spec, sizes.rows, sizes.spec.pattern
    listed, splits, masked = sizes.block is not None, spec.kv_splits > 1, pattern.masks_pairs
    return AttentionSm90aWords(
        keys_of_pattern=keys_of_pattern(spec),
        formula=formula(spec),
        unit="listed key block" if sizes.block_steps > 1 else "step",
        barrier_owner="the w-th 64 rows" if splits else "consumer warpgroup w",
        store_rank=5 if rows.packed else 4,
        producer_warps=_producer_warps(sizes),
        consumer_warpgroups="warpgroup 1    " if sizes.consumers == 1 else "warpgroups 1.. ",
        consumers_own=_consumers_own(sizes),
        consumers_run=_consumers_run(sizes),
        other_workers="other warpgroups" if sizes.consumers > 1 else "the SM's other thread block, if it has one",
        consumer_number="consumer" if splits else "warpgroup",
        consumer_works_on="its part of the keys of 64 rows" if splits else "its 64 rows",
        packed_heads="kPackGqa" if rows.asks_heads else str(rows.heads),
        tile_is=_tile_is(sizes),
        tiles_are_long=_tiles_are_long(spec),
        tile_queries="kTileQueries" if rows.packed else "kTileM",
        warpgroup_queries="kWarpgroupQueries" if rows.packed else "kWarpgroupRows",
        score_rows=f"tile, {_first_query(sizes)}",
        as_listed=", as an entry out of range does" if listed else "",
        masked_if="the pattern or the end of the keys hides some pair" if masked else "some key is past the last one",
        full_or="(number % 2 == 0) | " if listed else "",
        steps_of_tile="kTopK" if spec.share_kv_loads else "count" if sizes.skip_masked else "info.count",
        q_operands=("q, q_descriptor" if at.q_slices else "q_descriptor") if not at.q_in_registers else "q",
        row_without_keys=_row_without_keys(spec),
        **output_words(spec),
    )


def ring_words(sizes: Sizes, at: Arrangement) -> AttentionSm90aRingWords:
    """Return the same for the rings: of each sub-tile, where there are several."""
    one, stream_k = sizes.sub_tiles == 1, sizes.spec.stream_k_tail
    one_ring = one or sizes.spec.share_kv_loads
    meta = " * kStepBlocks" if sizes.step_blocks > 1 else ""
    work_words = 3 if stream_k else 1
    of_loads = load_words(sizes.spec)
    sub_tile_parameter = "" if one else ", int sub_tile"
    return AttentionSm90aRingWords(
        work_words=work_words,
        entry_readers=f"kConsumerWarpgroups * kWarpsPerWarpgroup{'' if one else ' + kSubTiles - 1'}",
        entry_readers_are="consumers and other producer warps" if sizes.sub_tiles > 1 else "the consumers",
        less_warp_0=", less warp 0, which writes the entries" if sizes.sub_tiles > 1 else "",
        and_metadata="" if sizes.skip_masked else ", and the metadata of its loads",
        ring_stages="kStages" if one else "kSubTiles * kStages",
        ring_warpgroups="kConsumerWarpgroups" if one else "kSubTileWarpgroups",
        plus_sub_tile_ring="" if one else " + sub_tile * kStages * kKvBytes",
        plus_sub_tile_meta="" if one_ring else f" + sub_tile * kStages{meta}",
        plus_sub_tile_v_ring="" if one else f" + sub_tile * kStages * {of_loads['v_bytes']}",
        plus_sub_tile_scales="" if one_ring else " + sub_tile * kStages * kScaleParts",
        **of_loads,
        barriers="base" if one_ring else "barriers",
        producer_is=_producer_is(sizes),
        producer_parameter=sub_tile_parameter,
        first_producer="" if one else "sub_tile == 0 && ",
        of_sub_tile="" if one else " of its sub-tile",
        sub_tile_parameter=sub_tile_parameter,
        steps_word=str(work_words) if one else f"{work_words} + sub_tile",
        range_argument="" if one else ", sub_tile",
    )


def key_words(sizes: Sizes, at: Arrangement) -> AttentionSm90aListWords:
    """Return the same for the key blocks of a work tile, and for lists that share loads."""
    spec, three = sizes.spec, sizes.sub_tiles == 3
    asks_work = spec.stream_k_tail or spec.pattern.serpentine
    restricts = asks_work or spec.kv_splits > 1
    sub_tile_parameter = "" if sizes.sub_tiles == 1 else ", int sub_tile"
    stream_k = spec.stream_k_tail
    what = "tile, work units" if stream_k else "number of the tile"
    return AttentionSm90aListWords(
        entry_has=f"{what}, {'its steps' if sizes.sub_tiles == 1 else 'steps of its sub-tiles'}",
        entry_words="number, begin, end" if stream_k else "number",
        entry_place="index" if at.tile_stages > 1 else "phase",
        and_units=", its work units" if stream_k else "",
        range_owner=_range_owner(sizes),
        range_begins="KvBlockIterator blocks" if restricts else "return KvBlockIterator",
        range_ends="return blocks;" if restricts else "",
        range_parameter=", int first_query" if spec.query_grouping == "search" else sub_tile_parameter,
        work_parameter="const WorkTile& work, " if asks_work else "",
        work_argument="work, " if asks_work else "",
        q_place="0" if at.q_in_registers else "q_place",
        order_has=_order_has(spec),
        or_two=", or two" if three else "",
        load_group_kinds="2 + kSubTiles" if three else "2",
        with_fewer="at the end of the queries, or by query_order," if spec.query_grouping == "given" else _AT_END,
        all_taken="two" if three else "both",
    )


_AT_END = "at the end of the queries"


def _first_query(sizes: Sizes) -> str:
    """Return the first query of a warpgroup."""
    if sizes.spec.query_grouping != "none":
        return "first_query"
    return f"tile.first_query + warpgroup * {'kWarpgroupQueries' if sizes.rows.packed else 'kWarpgroupRows'}"


def _step_is(sizes: Sizes) -> str:
    if sizes.step_blocks > 1:
        return "kStepBlocks listed key blocks"
    if sizes.block_steps > 1:
        return "one of kBlockSteps equal parts of a listed key block"
    return "a key block. Blocks are numbered from the first key on" if sizes.block is None else "one listed key block"


def _producer_warps(sizes: Sizes) -> str:
    if sizes.sub_tiles == 1:
        return "Warp 0 fills the rings by TMA, and loads Q."
    return "Warp s fills the rings of sub-tile s by TMA; warp 0 also loads Q."


def _producer_is(sizes: Sizes) -> str:
    if sizes.sub_tiles == 1:
        return "Producer: one warp fills the rings. It publishes the work tiles too, one ahead: the first one has been."
    return "Producer: one warp fills the rings of one sub-tile. Warp 0 also publishes the work tiles, one ahead."


def _consumers_own(sizes: Sizes) -> str:
    if sizes.spec.kv_splits > 1:
        return "consumers. Each has 64 query rows and a part of their keys"
    return "consumer. It owns the tile's 64 rows" if sizes.consumers == 1 else "consumers. Each owns 64 query rows"


def _consumers_run(sizes: Sizes) -> str:
    if sizes.spec.kv_splits > 1:
        return "the consumers run with no order between them, up to the end of a tile: see merge_partial"
    if sizes.consumers == 1:
        return "one consumer runs alone"
    return "the consumers share a tile, with no order between their matrix products"


def _range_owner(sizes: Sizes) -> str:
    if sizes.spec.query_grouping == "search":
        return "a query block"
    return "a work tile" if sizes.sub_tiles == 1 else "one sub-tile of a work tile"


def _tile_is(sizes: Sizes) -> str:
    if sizes.spec.query_grouping != "none":
        return "kSubTiles query blocks of one head, as query_order has them. first_query counts in that order"
    return f"{'kTileQueries' if sizes.rows.packed else 'kTileM'} queries of one head"


def _tiles_are_long(spec: AttentionSpec) -> str:
    if not spec.pattern.ramps_up:
        return "Whole tiles are all equally long" if spec.stream_k_tail else "All tiles are equally long"
    return "Tiles are taken as equally long, though early ones are shorter"


def _row_without_keys(spec: AttentionSpec) -> str:
    lse = "Stores the LSE then. " if spec.lse else ""
    if spec.sink:
        return f"{lse}A row without keys has O = 0{', and the sink as its LSE' if spec.lse else ''}."
    return f"{lse}A row without keys has sum 0: O = 0{', LSE = -inf' if spec.lse else ''}."


def _order_has(spec: AttentionSpec) -> str:
    if spec.query_grouping == "search":
        return "query blocks and loads of a tile, steps of warpgroups"
    return "the loads of a tile, the steps of each warpgroup"
