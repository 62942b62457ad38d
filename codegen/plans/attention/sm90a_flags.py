"""Template parameters of the sm_90a attention kernel."""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.flags import AttentionSm90aFlags
from codegen.plans.attention.expressions import expressions_flags
from codegen.plans.attention.fp8 import fp8_flags, is_fp8
from codegen.plans.attention.sizes import Sizes
from codegen.plans.attention.sm90a_text import Arrangement
from codegen.plans.lengths import clears_values, lengths_of


def flags(sizes: Sizes, at: Arrangement, *, uses_setmaxnreg: bool) -> AttentionSm90aFlags:
    """Template parameters."""
    spec, rows, block = sizes.spec, sizes.rows, sizes.block
    return AttentionSm90aFlags(
        pattern_template=f"attention/patterns/{spec.pattern.kind}.cuh.j2",
        lengths=lengths_of(spec),
        expressions=expressions_flags(spec, "column"),
        partial_range=spec.stream_k_tail or spec.kv_splits > 1 or spec.split_kv,
        skip_masked=sizes.skip_masked,
        block_steps=sizes.block_steps,
        step_blocks=sizes.step_blocks,
        divides_block=block is not None and (rows.packed or block.q > rows.sub_tile_queries),
        consumers=sizes.consumers,
        sub_tiles=sizes.sub_tiles,
        tile_stages=at.tile_stages,
        packed=rows.packed,
        asks_heads=rows.asks_heads,
        q_in_registers=at.q_in_registers,
        q_slices=at.q_slices,
        o_aliases_q=at.o_aliases_q,
        surplus_first=surplus_first(sizes),
        takes_work=spec.stream_k_tail or spec.pattern.serpentine or spec.split_kv,
        may_be_empty=may_be_empty(sizes),
        clears_values=clears_values(spec),
        uses_setmaxnreg=uses_setmaxnreg,
        product=DTYPES["fp16"] if spec.has_codes else DTYPES[spec.dtype],
        e4m3_cache=spec.has_codes,
        pack="pack_out" if spec.has_codes and spec.dtype != "fp16" else "pack",
        fp8=fp8_flags(sizes) if is_fp8(spec) else None,
    )


def may_be_empty(sizes: Sizes) -> bool:
    """Whether a work tile, or one of its sub-tiles, may have no steps.

    Each tile starts with a query, and every query of a dense matrix has keys, unless its batch is empty. A list of
    fixed length has a fixed number of steps, even if they are masked.
    """
    pattern = sizes.spec.pattern
    without_keys = lengths_of(sizes.spec).by_batch and sizes.block is None
    return sizes.sub_tiles > 1 or without_keys or not pattern.never_empty


def surplus_first(sizes: Sizes) -> bool:
    """Whether surplus rows of a head's tiles lie before query 0."""
    spec = sizes.spec
    return spec.pattern.surplus_first and not sizes.rows.packed and spec.layout == "padded"
