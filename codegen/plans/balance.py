"""What handing work out, longest block rows first, brings into the plans of BSR x dense kernels."""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import Constant, Param, i32, pointer
from codegen.spec import BsrSpmmSpec

QUEUE = 2  # tiles announced: while one is worked on, the next is known
L2_BYTES = 16 << 20  # of B at once: a third of the L2, whose two halves keep copies, and through which A and C go too
SCHEDULER = "tiles handed out, thread blocks that ended: both 0 between launches"


def cuts_rows(spec: BsrSpmmSpec) -> bool:
    """Return whether long block rows are divided: those of small blocks, where work is handed out."""
    return spec.balanced and spec.block.rows < 64


def queue(spec: BsrSpmmSpec) -> tuple[int, str]:
    """Return the bytes of the queue between producer and consumers, and what it holds."""
    if cuts_rows(spec):
        return 4 * QUEUE, "numbers of announced units"
    return 16 * QUEUE, "announced tiles: number, block row, its first block, its end"


def group_tiles(spec: BsrSpmmSpec, depth: int) -> int:
    """Return how many column tiles have their part of B, ``depth`` rows of it, in the L2 at once: one at least."""
    return max(1, L2_BYTES // (depth * spec.tile.n * DTYPES[spec.dtype].bytes))


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
    blocks = "one thread block per SM" if spec.blocks_per_sm == 1 else f"{spec.blocks_per_sm} thread blocks per SM"
    if spec.balanced:
        return ("grid", f"{blocks}; tiles are handed out, a few of the longest block rows first")
    return ("grid", f"{blocks}, looping over tiles (persistent), block rows fastest")
