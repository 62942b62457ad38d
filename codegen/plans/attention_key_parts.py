"""What ``key_parts`` changes in the plan of an sm_90a attention kernel, and what it asks of a spec.

The keys of a tile are two streams, each with rings and warpgroups of its own. Those of the second one leave O, shifts
and sums in shared memory, and those of the first one take them in.
"""

from __future__ import annotations

from codegen.plan import Constant, SharedLayout, require
from codegen.plans.attention_rows import WARPGROUP_ROWS
from codegen.spec import AttentionSpec


def check_key_parts(spec: AttentionSpec, warpgroups: int) -> None:
    """Refuse a spec for which the kernel is not written.

    Args:
        spec: with more than one part.
        warpgroups: that compute, at most.

    Raises:
        SpecError: names the first field that is in the way.
    """
    given = f"is {spec.schedule}; with key_parts warpgroups take no turns: cooperative"
    require(spec.schedule == "cooperative", "schedule", given)
    require(spec.packed_heads == 1, "packed_heads", f"is {spec.packed_heads}; allowed with key_parts: 1")
    m, allowed = spec.tile.m, [WARPGROUP_ROWS * count for count in range(1, warpgroups // spec.key_parts + 1)]
    require(m in allowed, "tile.m", f"is {m}; allowed with key_parts: {', '.join(map(str, allowed))}")
    block = spec.pattern.fixed_block
    if block is not None:
        rows, keys = f"is {block.q}; with key_parts a tile has one list", f"is {spec.tile.n}; with key_parts a step"
        require(m <= block.q, "pattern.block.q", f"{rows}: tile.m, {m}, or more")
        require(spec.tile.n >= block.kv, "tile.n", f"{keys} is a listed block or two: {block.kv}, {2 * block.kv}")


def what_streams_are(spec: AttentionSpec) -> str:
    """Return the doc of the number of streams, without what each of them owns."""
    return "parts of the keys of a tile" if spec.key_parts > 1 else "query blocks in a tile"


def part_constants(spec: AttentionSpec, floats: int) -> list[Constant]:
    """Return the constant of what a warpgroup leaves."""
    return [Constant("kPartFloats", floats, "floats that a warpgroup leaves of its rows")] if spec.key_parts > 1 else []


def add_parts(shared: SharedLayout, spec: AttentionSpec, floats: int) -> int:
    """Lay out the places for what warpgroups leave; return how many barriers these need."""
    if spec.key_parts == 1:
        return 0
    places = spec.tile.m // WARPGROUP_ROWS
    shared.add("Parts", 4 * places * floats, "what warpgroups of stream 1 leave for those of stream 0")
    return 2 * places
