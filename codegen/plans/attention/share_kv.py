"""Changes of ``share_kv_loads`` to the plan of an sm_90a attention kernel, and its conditions."""

from __future__ import annotations

import math

from codegen.plan import Constant, Ring, SharedLayout, require
from codegen.plans.attention.params import block_of
from codegen.plans.attention.rows import WARPGROUP_ROWS
from codegen.plans.lengths import clears_values
from codegen.spec import AttentionSpec
from codegen.tile_rules import Fits, Rule, check_tile

QUERY_BLOCKS = (2, 3)  # per tile
HEIGHTS = [WARPGROUP_ROWS * count for count in QUERY_BLOCKS]  # rows of a tile
ORDERS = 2  # schedules in flight: the current tile's, and the next one's
LONGEST_LIST = 128  # the time to match lists grows with the square of their length
MOST_STAGES = 8  # indices of full barriers have six bits: seven sets of warpgroups, eight stages
WIDEST_HEAD = 128  # wider heads leave no registers
NARROW_HEAD, LARGE_STEP = 64, 128  # with wider heads, three stages of that many keys and three query blocks do not fit
LONG_TILE = 64  # least entries per list for which loading Q slices to registers at the start of a tile pays off


def _has_room(spec: AttentionSpec) -> bool:
    """Whether three stages fit, or the tile needs only two."""
    if not spec.share_kv_loads or spec.tile.m == HEIGHTS[0]:
        return True
    return block_of(spec).kv < LARGE_STEP or spec.head_dim <= NARROW_HEAD


def _two_stages(spec: AttentionSpec) -> str:
    steps = f"of steps of {block_of(spec).kv} keys with head_dim {spec.head_dim}"
    return f"{steps} two stages fit, for two query blocks: {HEIGHTS[0]}"


TILE: tuple[Rule[AttentionSpec], ...] = (
    Fits(
        "m",
        lambda spec: not spec.share_kv_loads or spec.tile.m in HEIGHTS,
        lambda spec: f"with share_kv_loads a tile is two or three query blocks: {' or '.join(map(str, HEIGHTS))}",
    ),
    Fits(
        "n",
        lambda spec: not spec.share_kv_loads or spec.tile.n == block_of(spec).kv,
        lambda spec: f"with share_kv_loads a step is a listed block: {block_of(spec).kv}",
    ),
    Fits("m", _has_room, _two_stages),
)


def check_share_kv_loads(spec: AttentionSpec) -> None:
    """Reject a spec that the kernel does not support.

    Raises:
        SpecError: names the first unsupported field.
    """
    block, m = block_of(spec), spec.tile.m
    given = f"is {spec.schedule}; share_kv_loads with tile.m {m} does not order warpgroups: cooperative"
    require(spec.schedule == "cooperative", "schedule", given)
    # Before the tile, whose default depends on head_dim.
    require(spec.head_dim <= WIDEST_HEAD, "head_dim", f"is {spec.head_dim}; allowed with share_kv_loads: 64, 96, 128")
    require(spec.pack_gqa == 1, "pack_gqa", f"is {spec.pack_gqa}; allowed with share_kv_loads: 1")
    require(
        block.q == WARPGROUP_ROWS, "pattern.block.q", f"is {block.q}; allowed with share_kv_loads: {WARPGROUP_ROWS}"
    )
    check_tile(spec, TILE)
    unknown = f"is omitted; lists that share loads have one length: 1 to {LONGEST_LIST}"
    require(spec.pattern.list_length is not None, "pattern.k", unknown)
    length = list_length(spec)
    require(length <= LONGEST_LIST, "pattern.k", f"is {length}; allowed with share_kv_loads: 1 to {LONGEST_LIST}")
    least = m // WARPGROUP_ROWS  # the template explains why
    places = f"is {spec.stages}; allowed with share_kv_loads and {least} query blocks a tile: {least} to {MOST_STAGES}"
    require(least <= spec.stages <= MOST_STAGES, "stages", places)


def list_length(spec: AttentionSpec) -> int:
    """Entries per list; :func:`check_share_kv_loads` requires a fixed number."""
    length = spec.pattern.list_length
    assert length is not None
    return length


def has_long_tiles(spec: AttentionSpec) -> bool:
    """Whether tiles have enough steps for a longer start of the tile to pay off."""
    return spec.share_kv_loads and (spec.l2_lockstep or list_length(spec) >= LONG_TILE)


def order_constants(sub_tiles: int) -> list[Constant]:
    """Constants of load schedules. The one, two or three users of a load contribute equal parts of the arrivals."""
    arrivals = math.lcm(*range(1, sub_tiles + 1))
    return [
        Constant("kTileStages", ORDERS, "depth of the ring of schedules"),
        Constant("kArrivals", arrivals, "arrivals that release a slot of a ring, for each warp of a warpgroup"),
    ]


def q_places(number: int) -> list[Constant]:
    """Constant of the Q buffers in shared memory."""
    return [Constant("kQPlaces", number, "Q buffers of each warpgroup")]


def add_orders(shared: SharedLayout, spec: AttentionSpec, sub_tiles: int) -> None:
    """Allocate barriers, load schedules of tiles, and the lists that they are made from in shared memory."""
    sets, entries = (1 << sub_tiles) - 1, sub_tiles * list_length(spec)
    barriers = sub_tiles + 2 * ORDERS + 2 * (sets + 1) * spec.stages + clears_values(spec)
    shared.add("Barriers", 8 * barriers, "mbarriers", align=8)
    shared.add("BlockMeta", 4 * spec.stages, "metadata of the loads in the K ring", align=4)
    searched = (
        ("Queries", sub_tiles, "first queries of a tile's query blocks"),
        ("Tiles", 1, "index of the tile"),
    )
    orders = (
        ("Loads", entries, "key blocks of a tile in load order"),
        ("Steps", entries, "encoded steps of each warpgroup"),
        ("Numbers", 1, "loads per tile"),
        *(searched if spec.query_grouping == "search" else ()),
    )
    ring = Ring(ORDERS, "order_full[i]", "order_empty[i]")
    for name, words, doc in orders:
        shared.add(name, 4 * ORDERS * words, f"ring of schedules: {doc}", align=4, ring=ring)
    shared.add("Blocks", 4 * entries, "key block lists of the tile that is being scheduled", align=4)
    shared.add("Grouped", 4 * entries, "key blocks that this tile loads, grouped by the lists they serve", align=4)
    shared.add("Sets", entries, "set of lists that each entry is loaded for", align=1)


def sub_tile_owns(spec: AttentionSpec) -> str:
    """The resources that each sub-tile owns, in words."""
    return "list" if spec.share_kv_loads else "key blocks and K/V rings"


def shared_summary(spec: AttentionSpec) -> list[tuple[str, str]]:
    """Lines for ``explain`` on the loads that lists of a tile share."""
    if not spec.share_kv_loads:
        return []
    order = [("order", "the caller chooses the query blocks of each tile")] if spec.query_grouping == "given" else []
    if spec.query_grouping == "search":
        found = "a prologue groups query blocks with similar lists into tiles; it overlaps this kernel"
        order = [("query order", found)]
    return [
        ("shared", "key blocks shared by several lists of a tile are loaded once"),
        *order,
    ]


def producers(spec: AttentionSpec) -> str:
    """Producer warps, in words."""
    return (
        "one warp for K, one for V, one that schedules loads"
        if spec.share_kv_loads
        else "one producer warp per sub-tile"
    )


def flight_owner(spec: AttentionSpec) -> str:
    """Owner of the blocks in flight, in words."""
    return "" if spec.share_kv_loads else " for each sub-tile"
