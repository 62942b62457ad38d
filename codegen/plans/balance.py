"""What handing tiles out, longest block rows first, brings into the plans of BSR x dense kernels."""

from __future__ import annotations

from codegen.plan import Constant, Param, i32, pointer
from codegen.spec import BsrSpmmSpec

QUEUE = 2  # tiles announced: while one is worked on, the next is known
QUEUE_BYTES = 16 * QUEUE
L2_BYTES = 24 << 20  # of B at once: less than half of the L2, which two halves of the chip keep copies in
SCHEDULER = "tiles handed out, thread blocks that ended: both 0 between launches"


def order_params(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    """Return the parameters that say which tile is where."""
    column_tiles = "column_tiles" if spec.cluster == 1 else "clusters of column tiles"
    tiles = i32("tiles", f"block_rows * {column_tiles}")
    if not spec.balanced:
        return (i32("block_rows", "block rows of A"), tiles)
    return (
        pointer("row_order", "int", "block rows of A, longest first"),
        i32("block_rows", "block rows of A"),
        i32("column_tiles", "tiles of a block row"),
        i32("group_tiles", "column tiles whose part of B is meant to be in the L2 at once"),
        tiles,
        pointer("scheduler", "int", SCHEDULER, writes=True),
    )


def order_constants(spec: BsrSpmmSpec) -> tuple[Constant, ...]:
    """Return the constants of the queue of tiles, if there is one."""
    return (Constant("kQueue", QUEUE, "tiles announced to the consumers"),) if spec.balanced else ()


def order_summary(spec: BsrSpmmSpec) -> tuple[str, str]:
    """Return the line for ``explain``."""
    if spec.balanced:
        return ("grid", "one thread block per SM; tiles are handed out, those of the longest block rows first")
    return ("grid", "one thread block per SM, looping over tiles (persistent), block rows fastest")
