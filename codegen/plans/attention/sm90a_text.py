"""Parts of the source of an sm_90a attention kernel: constants, parameters, tensor maps, flags, summary."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.plan import Constant, Param, Registers, TensorMap, i32, pointer, tensor_map
from codegen.plans.attention.e4m3_cache import code_constants, code_params
from codegen.plans.attention.fp8 import fp8_constants, fp8_maps, fp8_params, is_fp8
from codegen.plans.attention.kv_splits import computing, partial_constants, what_sub_tiles_are
from codegen.plans.attention.lockstep import lockstep_constants, lockstep_params, lockstep_summary
from codegen.plans.attention.order import order_params
from codegen.plans.attention.params import (
    block_constants,
    index_params,
    logit_constants,
    lse_params,
    options_summary,
    output_params,
    sink_params,
    size_params,
)
from codegen.plans.attention.queries import q_slice_constants
from codegen.plans.attention.query_order import query_order_constants, query_order_params
from codegen.plans.attention.registers import register_sum
from codegen.plans.attention.rows import KV_DIMS, SWIZZLE, WARPGROUP_ROWS
from codegen.plans.attention.share_kv import (
    flight_owner,
    order_constants,
    producers,
    q_places,
    shared_summary,
    sub_tile_owns,
)
from codegen.plans.attention.sizes import WARPGROUP, Sizes
from codegen.plans.attention.split_kv import SUMMARY as SPLIT_SUMMARY
from codegen.plans.attention.split_kv import split_constants, split_params
from codegen.problem import LARGE_PAGE_ROWS, PAGE_ROWS
from codegen.spec import AttentionSpec

PAGE_DIMS = ("head_dim", "page_size", "kv_heads", "pages")
"""Dimensions of the tensor maps of K and V in pages, innermost first."""
V_TRANSPOSED = tensor_map("v_map", "V^T", ("padded_kv_len", "head_dim", "kv_heads", "batch"))
TILE_RING = {1: "Q buffers; the ring of work tiles has two entries", 2: "depth of the ring of work tiles and of Q"}
PARTIAL_FLOATS = "floats of a warpgroup's partial result"
SUB_TILE_SHARERS = "warpgroups of a sub-tile"
STREAM_K_SUMMARY = ("stream-K tail", "the tiles of the last wave are split among the thread blocks")
STREAM_K_PARAMS = (
    pointer("partials", "float", "partial results: unnormalized O and softmax state of split tiles", writes=True),
    pointer("units_done", "int", "finished units of each split tile, by warpgroup; 0 between launches", writes=True),
    i32("stream_k_tiles", "tiles at the start that are split among thread blocks"),
    i32("stream_k_ctas", "thread blocks that share these tiles"),
    i32("units", "work units per split tile"),
)


@dataclass(frozen=True)
class Arrangement:
    """Location of Q and O in a kernel.

    Attributes:
        q_in_registers: whether all of Q is kept in registers.
        tile_stages: stages of Q in shared memory.
        o_aliases_q: whether O is staged in the buffer of its tile's Q.
        q_slices: slices of 16 columns of Q in registers.
    """

    q_in_registers: bool
    tile_stages: int
    o_aliases_q: bool
    q_slices: int = 0


def constants(
    sizes: Sizes, at: Arrangement, setmaxnreg: tuple[Constant, ...], registers: Registers
) -> tuple[Constant, ...]:
    """Constants at the top of the source.

    Args:
        sizes: sizes derived from the tile.
        at: location of Q and O.
        setmaxnreg: operands of setmaxnreg.
        registers: budget per consumer thread.
    """
    spec = sizes.spec
    step = register_sum(spec, registers, holds_q=at.q_slices > 0)
    owner = f"{what_sub_tiles_are(spec)}, each with its own {sub_tile_owns(spec)}"
    return (
        Constant("kHeadDim", spec.head_dim, "elements per head"),
        *_row_constants(sizes),
        Constant("kTileN", spec.tile.n, f"keys of one step; registers: {step}"),
        Constant("kStages", spec.stages, "depth of the K ring and of the V ring"),
        *_ring_constants(sizes, at),
        *q_slice_constants(spec, at.q_slices),
        *query_order_constants(spec, sizes.sub_tiles),
        *lockstep_constants(spec),
        *([Constant("kSubTiles", sizes.sub_tiles, owner)] if sizes.sub_tiles > 1 else []),
        *_sub_tile_rows(sizes),
        Constant("kConsumerWarpgroups", sizes.consumers, computing(spec)),
        *_sub_tile_constants(sizes),
        Constant("kThreads", WARPGROUP * (1 + sizes.consumers), "warpgroup 0 produces, the others consume"),
        *setmaxnreg,
        *_group_constants(sizes, at),
        *_load_constants(sizes),
        *code_constants(spec),
        *_block_constants(sizes),
        *([Constant("kPartialFloats", sizes.partial_floats, PARTIAL_FLOATS)] if spec.stream_k_tail else []),
        *partial_constants(spec, sizes.partial_floats),
        *split_constants(spec, sizes.partial_floats),
        *(Constant(name, value, comment) for name, (value, comment) in spec.pattern.constants().items()),
        *logit_constants(spec),
        *(fp8_constants(sizes) if is_fp8(spec) else []),
    )


def _sub_tile_rows(sizes: Sizes) -> list[Constant]:
    rows, block = sizes.rows, sizes.block
    every_key = block is None and not sizes.spec.pattern.masks_pairs
    in_part = block is not None and block.q > rows.sub_tile_queries
    if not rows.packed and sizes.sub_tiles == 1 and (every_key or in_part):
        return []  # visible keys do not depend on the query, or kBlockQueries is used
    part = "a part of a tile with its own key blocks" if rows.sub_tiles > 1 else "here a whole tile"
    doc = f"{'queries' if rows.packed else 'query rows'} of a sub-tile, {part}"
    return [Constant("kSubTileRows", rows.sub_tile_queries, doc)]


def _load_constants(sizes: Sizes) -> list[Constant]:
    if sizes.spec.layout == "paged":
        large = Constant(
            "kLargeCopyShift", LARGE_PAGE_ROWS.bit_length() - 1, "log2 of the keys per copy from a large page"
        )
        small = "keys whose page is looked up at once" if sizes.spec.has_codes else "keys per copy from a small page"
        return [Constant("kPageRows", PAGE_ROWS, small), *([] if sizes.spec.has_codes else [large])]
    if sizes.step_blocks == 1:
        return []
    return [
        Constant("kStepBlocks", sizes.step_blocks, "loads per step: its listed blocks"),
        Constant("kLoadKeys", sizes.spec.tile.n // sizes.step_blocks, "keys per load"),
    ]


def _row_constants(sizes: Sizes) -> list[Constant]:
    if sizes.rows.packed:
        return sizes.rows.constants(sizes.groups, sizes.block)
    return [Constant("kTileM", sizes.spec.tile.m, "query rows of a tile")]


def _ring_constants(sizes: Sizes, at: Arrangement) -> list[Constant]:
    if not sizes.spec.share_kv_loads:
        return [Constant("kTileStages", at.tile_stages, TILE_RING[at.tile_stages])]
    return [*order_constants(sizes.sub_tiles), *([] if at.q_in_registers else q_places(at.tile_stages))]


def _sub_tile_constants(sizes: Sizes) -> list[Constant]:
    if sizes.spec.share_kv_loads or sizes.sub_tiles == 1:
        return []
    return [Constant("kSubTileWarpgroups", sizes.consumers // sizes.sub_tiles, SUB_TILE_SHARERS)]


def _group_constants(sizes: Sizes, at: Arrangement) -> list[Constant]:
    """Constants of the layout of Q, K, V and O in shared memory, by column group."""
    spec = sizes.spec
    o_group = Constant("kOGroupBytes", WARPGROUP_ROWS * SWIZZLE, "bytes of one column group of a warpgroup's O")
    if at.o_aliases_q and not spec.share_kv_loads:  # a warpgroup's rows of O replace its rows of Q
        doc = "stride between column groups of a warpgroup's O, in bytes"
        o_group = Constant("kOGroupBytes", spec.tile.m * SWIZZLE, doc)
    filled = "" if sizes.fills_groups else "; TMA zero-fills the last"
    q_owner = "warpgroup's Q" if spec.share_kv_loads else "Q tile"
    return [
        Constant("kGroupColumns", sizes.columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kGroups", sizes.groups, f"column groups of a head{filled}"),
        Constant("kQGroupBytes", sizes.q_rows * SWIZZLE, "bytes of one column group of Q"),
        Constant("kKvGroupBytes", spec.tile.n * SWIZZLE, "bytes of one column group of K or V"),
        o_group,
        Constant("kQBytes", sizes.q_rows * sizes.groups * SWIZZLE, f"bytes of a {q_owner}"),
        Constant("kKvBytes", sizes.kv_bytes, "bytes of K, or of V, of one step"),
    ]


def _block_constants(sizes: Sizes) -> list[Constant]:
    block, rows = sizes.block, sizes.rows
    if block is None:
        return []
    return block_constants(block, block.q if rows.packed else rows.sub_tile_queries, sizes.spec.tile.n)


def params(sizes: Sizes) -> tuple[Param, ...]:
    """Parameters of the kernel."""
    spec = sizes.spec
    return (
        tensor_map("q_map", "Q", sizes.rows.dims),
        *_kv_maps(spec),
        tensor_map("o_map", "O", sizes.rows.dims, like="Q", writes=True),
        *(fp8_params() if is_fp8(spec) else ()),
        *(code_params() if spec.has_codes else ()),
        *output_params(spec, "unsigned short"),
        *lse_params(spec),
        *sink_params(spec),
        *index_params(spec),
        *query_order_params(spec),
        *order_params(spec),
        *lockstep_params(spec),
        *(STREAM_K_PARAMS if spec.stream_k_tail else ()),
        *split_params(spec),
        *size_params(spec),
    )


def _kv_maps(spec: AttentionSpec) -> tuple[Param, ...]:
    """Parameters of the tensor maps of K and V."""
    if spec.has_codes:
        return ()
    if spec.layout == "paged":
        return (
            tensor_map("k_map", "K", PAGE_DIMS),
            tensor_map("k_part_map", "K", PAGE_DIMS, like="K, in copies from small pages"),
            tensor_map("v_map", "V", PAGE_DIMS, like="K"),
            tensor_map("v_part_map", "V", PAGE_DIMS, like="K, in copies from small pages"),
            tensor_map("v_row_map", "V", PAGE_DIMS, like="K, in copies of one row"),
        )
    v_map = V_TRANSPOSED if is_fp8(spec) else tensor_map("v_map", "V", KV_DIMS, like="K")
    return tensor_map("k_map", "K", KV_DIMS), v_map


def tensor_maps(sizes: Sizes) -> dict[str, TensorMap]:
    """Tensor maps of Q, K, V and O."""
    spec, rows, columns = sizes.spec, sizes.rows, sizes.columns
    kv_map = TensorMap((columns, spec.tile.n // sizes.step_blocks, 1, 1), SWIZZLE)
    q_queries = WARPGROUP_ROWS if spec.share_kv_loads else rows.box_queries
    maps = {
        "q_map": TensorMap((columns, *rows.box(q_queries)), SWIZZLE),
        **({} if spec.has_codes else {"k_map": kv_map, "v_map": kv_map}),
        "o_map": TensorMap((columns, *rows.box(rows.warpgroup_queries)), SWIZZLE),
    }
    if spec.has_codes:
        return maps
    if spec.layout == "paged":
        maps["k_map"] = maps["v_map"] = TensorMap((columns, LARGE_PAGE_ROWS, 1, 1), SWIZZLE)
        maps["k_part_map"] = maps["v_part_map"] = TensorMap((columns, PAGE_ROWS, 1, 1), SWIZZLE)
        maps["v_row_map"] = TensorMap((columns, 1, 1, 1), SWIZZLE)
    return fp8_maps(sizes, maps) if is_fp8(spec) else maps


def summary(sizes: Sizes) -> tuple[tuple[str, str], ...]:
    """Lines for ``explain``."""
    spec, rows, parts = sizes.spec, sizes.rows, sizes.spec.kv_splits
    workers = "one consumer warpgroup" if sizes.consumers == 1 else f"{sizes.consumers} consumer warpgroups"
    heads = f" of {spec.pack_gqa} heads" if spec.pack_gqa > 1 else ""
    each = f" in each of {sizes.sub_tiles} sub-tiles" if rows.sub_tiles > 1 else ""
    keys = f", their keys in {parts} splits" if parts > 1 else ""
    division = f"{rows.sub_tile_queries} queries{heads}{each}{keys}"
    return (
        ("pattern", spec.pattern.describe()),
        *options_summary(spec),
        ("tile", f"{spec.tile.m} {'rows' if rows.packed else 'queries'} x {spec.tile.n} keys: {division}"),
        ("schedule", f"{spec.schedule}: {_loads(spec)}, {workers} (WGMMA)"),
        ("pipeline", f"{spec.stages} K blocks and {spec.stages} V blocks in flight{flight_owner(spec)}"),
        *shared_summary(spec),
        *lockstep_summary(spec),
        *([STREAM_K_SUMMARY] if spec.stream_k_tail else []),
        *([SPLIT_SUMMARY] if spec.split_kv else []),
    )


def _loads(spec: AttentionSpec) -> str:
    """How the rings are filled, in words."""
    return "four producer warps (cp.async, conversion to fp16)" if spec.has_codes else f"{producers(spec)} (TMA)"
