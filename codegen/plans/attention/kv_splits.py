"""Changes of ``kv_splits`` to the plan of an sm_90a attention kernel, and its conditions.

The keys of a tile are split into two sub-tiles, each with its own rings and warpgroups. The warpgroups of the second
sub-tile store O, maxima and sums in shared memory (partials), and those of the first merge them.
"""

from __future__ import annotations

from codegen.plan import Constant, SharedLayout, require
from codegen.plans.attention.params import block_of
from codegen.plans.attention.rows import WARPGROUP_ROWS
from codegen.spec import AttentionSpec
from codegen.tile_rules import Fits, Rule, check_tile

WIDEST_HEAD = 128  # with steps of 128 keys; for wider heads, two rings each of K and V exceed shared memory
ONE, TWO = WARPGROUP_ROWS, 2 * WARPGROUP_ROWS  # rows of one or two warpgroups per sub-tile
HIGH = (64, 64)  # head_dim and keys per step for which the registers of four warpgroups suffice


def _is_listed_step(spec: AttentionSpec) -> bool:
    block = spec.pattern.fixed_block
    return spec.kv_splits == 1 or block is None or spec.tile.n in (block.kv, 128)


def _is_low_enough(spec: AttentionSpec) -> bool:
    m = spec.tile.m
    return spec.kv_splits == 1 or m == ONE or (m, spec.head_dim, spec.tile.n) == (TWO, *HIGH)


def _steps(spec: AttentionSpec) -> str:
    steps = " or ".join(map(str, sorted({block_of(spec).kv, 128})))
    return f"with kv_splits a step is one listed block, or two of 64 keys: {steps}"


TILE: tuple[Rule[AttentionSpec], ...] = (
    Fits("n", _is_listed_step, _steps),
    Fits(
        "m",
        _is_low_enough,
        lambda spec: f"allowed with kv_splits: {ONE}; with head_dim {HIGH[0]} and tile.n {HIGH[1]} {TWO} too",
    ),
)


def check_kv_splits(spec: AttentionSpec) -> None:
    """Reject a spec with KV splits that the kernel does not support.

    Raises:
        SpecError: names the first unsupported field.
    """
    given = f"is {spec.schedule}; allowed with kv_splits {spec.kv_splits}, which does not order warpgroups: cooperative"
    require(spec.schedule == "cooperative", "schedule", given)
    require(spec.pack_gqa == 1, "pack_gqa", f"is {spec.pack_gqa}; allowed with kv_splits: 1")
    m, block = spec.tile.m, spec.pattern.fixed_block
    if block is not None:
        those = f"allowed with kv_splits and blocks of {block.kv} keys: 64, 96, 128"
        require(block.kv < 128 or spec.head_dim <= WIDEST_HEAD, "head_dim", f"is {spec.head_dim}; {those}")
    check_tile(spec, TILE)
    if block is not None:
        rows = f"is {block.q}; with kv_splits all rows of a tile share a list, so block.q is at least tile.m, {m}"
        require(m <= block.q, "pattern.block.q", rows)


def what_sub_tiles_are(spec: AttentionSpec) -> str:
    """Comment on the number of sub-tiles."""
    return "sub-tiles of a tile: KV splits" if spec.kv_splits > 1 else "sub-tiles of a tile: query blocks"


def computing(spec: AttentionSpec) -> str:
    """Comment on the number of consumer warpgroups."""
    return (
        "warpgroups that compute, two for each 64 rows"
        if spec.kv_splits > 1
        else "warpgroups that compute, 64 rows each"
    )


def partial_constants(spec: AttentionSpec, floats: int) -> list[Constant]:
    """Constants of a warpgroup's partial result."""
    return [Constant("kPartialFloats", floats, "floats of a warpgroup's partial result")] if spec.kv_splits > 1 else []


def add_partials(shared: SharedLayout, spec: AttentionSpec, floats: int) -> int:
    """Allocate the partial results in shared memory; return the number of their barriers."""
    if spec.kv_splits == 1:
        return 0
    places = spec.tile.m // WARPGROUP_ROWS
    shared.add("Partials", 4 * places * floats, "partials of sub-tile 1, for the warpgroups of sub-tile 0")
    return 2 * places
