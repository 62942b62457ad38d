"""Additions of ``l2_lockstep`` to the plan of an sm_90a attention kernel, and its conditions."""

from __future__ import annotations

from codegen.plan import Constant, Param, pointer, require
from codegen.spec import AttentionSpec

LEAD_SHARE = 8  # a quarter of a tile is up to 3% slower on an H100, a sixteenth 0.5% on an H200
MOST_TRIES = 32  # bounds the wait for thread blocks that are not resident


def check_lockstep(spec: AttentionSpec, sub_tiles: int) -> None:
    """Reject a spec whose tiles have several producers, as each of them would count the tile.

    Raises:
        SpecError: names ``l2_lockstep``.
    """
    given = f"is true; tiles with {sub_tiles} lists or parts of lists support it only with share_kv_loads"
    require(not spec.l2_lockstep or spec.share_kv_loads or sub_tiles == 1, "l2_lockstep", given)


def lockstep_constants(spec: AttentionSpec) -> list[Constant]:
    """Constants of ``l2_lockstep``."""
    if not spec.l2_lockstep:
        return []
    return [
        Constant(
            "kLockstepShare", LEAD_SHARE, "a thread block may be 1 / kLockstepShare of a tile ahead of the average"
        ),
        Constant("kLockstepTries", MOST_TRIES, "polls per tile before it stops waiting for the other thread blocks"),
    ]


def lockstep_params(spec: AttentionSpec) -> list[Param]:
    """Parameter of ``l2_lockstep``."""
    doc = "tiles started by all thread blocks, then finished thread blocks; 0 between launches"
    return [pointer("progress", "int", doc, writes=True)] if spec.l2_lockstep else []


def lockstep_summary(spec: AttentionSpec) -> list[tuple[str, str]]:
    """Line for ``explain``."""
    doc = "thread blocks that are ahead wait, so that all of them stream the same K and V through the L2"
    return [("lockstep", doc)] if spec.l2_lockstep else []
