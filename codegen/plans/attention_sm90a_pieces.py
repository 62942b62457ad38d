"""Template parameters of the sm_90a attention kernel."""

from __future__ import annotations

from codegen.flags import AttentionSm90aFlags, AttentionSm90aPieces
from codegen.plans.attention_expressions import expressions_flags
from codegen.plans.attention_fp8 import fp8_flags, is_fp8, promotion
from codegen.plans.attention_kv_lengths import key_end_words
from codegen.plans.attention_lists import list_piece
from codegen.plans.attention_logits import formula, keys_of_pattern, logits_piece, softmax_scale
from codegen.plans.attention_sm90a_text import Arrangement, Sizes
from codegen.spec import AttentionSpec

PIECES = "attention/sm90a"
GROUPINGS = {"none": "listed", "given": "given", "search": "searched"}  # query_grouping to the piece's name


def flags(sizes: Sizes, at: Arrangement, *, uses_setmaxnreg: bool) -> AttentionSm90aFlags:
    """Template parameters."""
    spec, rows, block = sizes.spec, sizes.rows, sizes.block
    takes_work = spec.stream_k_tail or spec.pattern.serpentine
    return AttentionSm90aFlags(
        pattern_template=f"attention/patterns/{spec.pattern.kind}.cuh.j2",
        expressions=expressions_flags(spec, "column"),
        partial_range=spec.stream_k_tail or spec.kv_splits > 1,
        skip_masked=sizes.skip_masked,
        step_is=_step_is(sizes),
        list_piece=list_piece(spec),
        block_steps=sizes.block_steps,
        step_blocks=sizes.step_blocks,
        divides_block=block is not None and (rows.packed or block.q > rows.sub_tile_queries),
        may_lack_list=rows.sub_tiles > 1,
        key_end_words=key_end_words(spec),
        softmax_scale=softmax_scale(spec),
        keys_of_pattern=keys_of_pattern(spec),
        formula=formula(spec),
        consumers=sizes.consumers,
        sub_tiles=sizes.sub_tiles,
        tile_stages=at.tile_stages,
        packed=rows.packed,
        asks_heads=rows.asks_heads,
        q_in_registers=at.q_in_registers,
        o_aliases_q=at.o_aliases_q,
        surplus_first=surplus_first(sizes),
        takes_work=takes_work,
        restricts=takes_work or spec.kv_splits > 1,
        uses_setmaxnreg=uses_setmaxnreg,
        fp8=fp8_flags(sizes) if is_fp8(spec) else None,
        pieces=pieces(sizes, at),
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


def _step_is(sizes: Sizes) -> str:
    if sizes.step_blocks > 1:
        return "kStepBlocks listed key blocks"
    if sizes.block_steps > 1:
        return "one of kBlockSteps equal parts of a listed key block"
    return "a key block. Blocks are numbered from the first key on" if sizes.block is None else "one listed key block"
