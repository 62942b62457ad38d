"""Order of the tiles of BSR x dense on sm_90a, and what a dynamic tile scheduler adds to the plans."""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.flags import SchedulerFlags
from codegen.plan import Constant, Param, i32, pointer
from codegen.spec import BsrSpmmSpec

QUEUE = 2  # published work tiles: the current one, and the next one
WARP = 32  # threads; an announcement has a block column for each lane of one
L2_BYTES = 16 << 20  # of B at once: a third of the L2, whose two halves keep copies, and through which A and C go too
HIGH_TILE = 128  # rows: such tiles do most FLOPs for each byte; a dynamic scheduler is faster with twice that
PLACE_PARAMS = (
    i32("column_tiles", "tiles per block row"),
    i32("group_tiles", "column tiles per band: those that thread blocks work on at the same time"),
)
SCHEDULER = "tiles drawn after each thread block's first, finished thread blocks; both are 0 between launches"


def cuts_rows(spec: BsrSpmmSpec) -> bool:
    """Whether long block rows are split along K: with a dynamic scheduler and small blocks."""
    return spec.is_dynamic and spec.block.rows < 64


def announcement_bytes(spec: BsrSpmmSpec) -> int:
    """Bytes that the scheduler publishes for a tile, or for a unit, which has two more words."""
    return 4 * ((6 if cuts_rows(spec) else 4) + WARP)


def queue(spec: BsrSpmmSpec) -> tuple[int, str]:
    """Bytes of the queue from the scheduler to the other warps, and its contents in words."""
    work = "units" if cuts_rows(spec) else "tiles"
    return QUEUE * announcement_bytes(spec), f"published {work} and their first block columns"


def queue_barriers() -> tuple[int, str]:
    """Return the bytes of the mbarriers of the queue, and their order."""
    return 8 * (1 + 2 * QUEUE), "mbarriers of the queue: requested, then full, then empty"


def schedule_flags(spec: BsrSpmmSpec, next_block: str = "++block") -> SchedulerFlags:
    """Template parameters of the tile scheduler."""
    work = "unit" if cuts_rows(spec) else "tile"
    return SchedulerFlags(
        scheduler=f"bsr_spmm/{'dynamic' if spec.is_dynamic else 'static'}_scheduler.cuh.j2",
        work=work,
        work_type=work.capitalize(),
        walk_from="base" if spec.is_dynamic else "p",
        next_block=next_block,
    )


def queue_constants(spec: BsrSpmmSpec) -> tuple[Constant, ...]:
    """Return the constants of the queue."""
    work = "units" if cuts_rows(spec) else "tiles"
    return (
        Constant("kQueue", QUEUE, f"depth of the queue of {work} that the scheduler publishes"),
        Constant("kAnnouncementBytes", announcement_bytes(spec), "bytes per queue entry"),
    )


def _is_high(spec: BsrSpmmSpec) -> bool:
    """Whether a tile has 128 rows, all of one block."""
    return spec.tile.m == HIGH_TILE == (spec.block.cols if spec.transpose_a else spec.block.rows)


def group_tiles(spec: BsrSpmmSpec, depth: int) -> int:
    """Column tiles that are worked on at once, at least one.

    As many as have their part of B, ``depth`` rows of it, in the L2. With a static scheduler, lower tiles come one at a
    time: they read more of B for their FLOPs, and the L2 limits them.
    """
    if not (spec.is_dynamic or _is_high(spec)):
        return 1
    l2_bytes = L2_BYTES * (2 if spec.is_dynamic and _is_high(spec) else 1)
    return max(1, l2_bytes // (depth * spec.tile.n * DTYPES[spec.dtype].bytes))


def tile_place(spec: BsrSpmmSpec) -> str:
    """Return the template of the order of tiles."""
    order = "by_length" if spec.is_dynamic else "in_bands" if _is_high(spec) else "by_rows"
    return f"bsr_spmm/tile_{order}.cuh.j2"


def place_params(spec: BsrSpmmSpec, rows: str, doc: str) -> tuple[Param, ...]:
    """Parameters of the number of tiles and their places; ``rows`` names the rows of tiles."""
    bands = PLACE_PARAMS if spec.is_dynamic or _is_high(spec) else ()
    return (i32(rows, doc), *bands, i32("tiles", f"{rows} * tiles per row"))


def order_params(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    """Parameters of the places of tiles."""
    place = place_params(spec, "block_rows", "block rows of A")
    if not spec.is_dynamic:
        return place
    order = pointer("row_order", "int", "block rows of A, longest first")
    return (order, *place, pointer("scheduler", "int", SCHEDULER, writes=True))


def order_constants(spec: BsrSpmmSpec) -> tuple[Constant, ...]:
    """Return the constants of the queue of tiles, if there is one."""
    return queue_constants(spec) if spec.is_dynamic else ()


def producers(spec: BsrSpmmSpec) -> str:
    """Return the warps beside the consumers, for ``explain``."""
    return "one scheduler warp, one producer warp" if spec.is_dynamic else "one producer warp"


def order_summary(spec: BsrSpmmSpec) -> str:
    """Return in words which thread blocks a launch has, and the order of their tiles."""
    blocks = "one thread block per SM" if spec.ctas_per_sm == 1 else f"{spec.ctas_per_sm} thread blocks per SM"
    if spec.is_dynamic:
        return f"{blocks}; dynamic tile scheduler, starting with a few of the longest block rows"
    if _is_high(spec):
        return f"{blocks}, looping over tiles (persistent), {L2_BYTES >> 20} MB of B at a time"
    return f"{blocks}, looping over tiles (persistent), block rows fastest"
