"""Shared memory layout of an mma.sync attention kernel."""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import Ring, SharedLayout, SharedRegion
from codegen.plans.attention.mma_sync_operands import o_row_bytes
from codegen.spec import AttentionSpec

IN_RING = "staging of the O tile: in the ring, once it is idle"


def shared_regions(spec: AttentionSpec, q_in_registers: bool, ahead: int) -> tuple[SharedRegion, ...]:
    """Shared memory regions, with ``ahead`` K and V tiles in flight."""
    row_bytes, stages = spec.head_dim * DTYPES[spec.dtype].bytes, spec.stages
    q_bytes, slot_bytes, o_bytes = spec.tile.m * row_bytes, spec.tile.n * row_bytes, spec.tile.m * o_row_bytes(spec)
    shared = SharedLayout()
    slots = f"{stages} slots, each K or V of one step"
    if q_in_registers:
        # Q is loaded to the slots that are filled last, and O is staged in the ring: neither has its own memory.
        before, where = ahead * slot_bytes, "slot that is" if ahead == stages - 1 else "slots that are"
        free = (stages - ahead) * slot_bytes
        rest, beyond = (", then space for the rest of Q", " and the space after it") if q_bytes > free else ("", "")
        ring = shared.add("Ring", max(before + max(free, q_bytes), o_bytes), slots + rest, ring=Ring(stages))
        q = SharedRegion("Q", ring.offset + before, q_bytes, f"Q tile: in the {where} filled last{beyond}", "Ring")
        return ring, q, SharedRegion("O", ring.offset, o_bytes, IN_RING, "Ring", stores=True)
    q = shared.add("Q", q_bytes, "Q tile")
    if o_bytes == q_bytes:
        ring = shared.add("Ring", stages * slot_bytes, slots, ring=Ring(stages))
        o = SharedRegion("O", q.offset, q_bytes, "staging of the O tile: in Q's buffer", "Q", stores=True)
        return q, ring, o
    ring = shared.add("Ring", max(stages * slot_bytes, o_bytes), slots, ring=Ring(stages))
    return q, ring, SharedRegion("O", ring.offset, o_bytes, IN_RING, "Ring", stores=True)
