"""What ``kv_splits`` changes in the plan of an sm_90a attention kernel, and its conditions.

The keys of a tile are two sub-tiles, each with rings and warpgroups of its own. Warpgroups of the second one store O,
maxima and sums in shared memory (partials), and those of the first one merge them.
"""

from __future__ import annotations

from codegen.plan import Constant, SharedLayout, require
from codegen.plans.attention_rows import WARPGROUP_ROWS
from codegen.spec import AttentionSpec

WIDEST_HEAD = 128  # with steps of 128 keys: two rings each of K and V of wider ones exceed shared memory
HIGH = (64, 64)  # head_dim and keys of a step with which the registers of four warpgroups suffice


def check_kv_splits(spec: AttentionSpec) -> None:
    """Refuse a spec with KV splits for which the kernel is not written.

    Raises:
        SpecError: names the first field that is in the way.
    """
    given = f"is {spec.schedule}; with kv_splits {spec.kv_splits} warpgroups have no order: cooperative"
    require(spec.schedule == "cooperative", "schedule", given)
    require(spec.pack_gqa == 1, "pack_gqa", f"is {spec.pack_gqa}; allowed with kv_splits: 1")
    m, n, block = spec.tile.m, spec.tile.n, spec.pattern.fixed_block
    if block is not None:
        those = f"allowed with kv_splits and blocks of {block.kv} keys: 64, 96, 128"
        require(block.kv < 128 or spec.head_dim <= WIDEST_HEAD, "head_dim", f"is {spec.head_dim}; {those}")
        steps = sorted({block.kv, 128})
        listed = f"is {n}; with kv_splits a step is a listed block, or two of 64: {' or '.join(map(str, steps))}"
        require(n in steps, "tile.n", listed)
    one, two = WARPGROUP_ROWS, 2 * WARPGROUP_ROWS
    those = f"allowed with kv_splits: {one}; with head_dim {HIGH[0]} and tile.n {HIGH[1]} {two} too"
    require(m == one or (m, spec.head_dim, n) == (two, *HIGH), "tile.m", f"is {m}; {those}")
    if block is not None:
        rows = f"is {block.q}; with kv_splits a tile has one list: tile.m, {m}, or more"
        require(m <= block.q, "pattern.block.q", rows)


def what_sub_tiles_are(spec: AttentionSpec) -> str:
    """Return the doc of the number of sub-tiles, without what each of them owns."""
    return "sub-tiles of a tile: KV splits" if spec.kv_splits > 1 else "sub-tiles of a tile: query blocks"


def computing(spec: AttentionSpec) -> str:
    """Return the doc of the number of warpgroups that compute."""
    return (
        "warpgroups that compute, two for each 64 rows"
        if spec.kv_splits > 1
        else "warpgroups that compute, 64 rows each"
    )


def partial_constants(spec: AttentionSpec, floats: int) -> list[Constant]:
    """Return the constant of a warpgroup's partial."""
    return [Constant("kPartialFloats", floats, "floats of a warpgroup's partial")] if spec.kv_splits > 1 else []


def add_partials(shared: SharedLayout, spec: AttentionSpec, floats: int) -> int:
    """Lay out the partials in shared memory; return how many barriers these need."""
    if spec.kv_splits == 1:
        return 0
    places = spec.tile.m // WARPGROUP_ROWS
    shared.add("Partials", 4 * places * floats, "partials of sub-tile 1, for the warpgroups of sub-tile 0")
    return 2 * places
