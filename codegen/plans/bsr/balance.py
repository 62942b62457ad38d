"""Order of the tiles of BSR x dense on sm_90a, and additions of a dynamic tile scheduler to the plans."""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.flags import SchedulerFlags
from codegen.plan import Constant, Param, i32, pointer
from codegen.spec import BsrSpmmSpec

QUEUE = 2  # published work tiles: the current one, and the next one
WARP = 32  # threads; a queue entry has a block column for each lane of a warp
L2_BYTES = 16 << 20  # of B at a time: a third of the L2, whose halves keep copies, and which A and C use too
HIGH_TILE = 128  # rows: such tiles have the most FLOPs per byte; a dynamic scheduler is faster with twice the L2 bytes
PLACE_PARAMS = (
    i32("column_tiles", "tiles per block row"),
    i32("group_tiles", "column tiles per band: those that thread blocks work on at the same time"),
)
SCHEDULER = "tiles drawn after each thread block's first, finished thread blocks; both are 0 between launches"


def cuts_rows(spec: BsrSpmmSpec) -> bool:
    """Whether long block rows are split along K: with a dynamic scheduler and small blocks."""
    return spec.is_dynamic and spec.block.rows < 64


def announcement_bytes(spec: BsrSpmmSpec) -> int:
    """Bytes of a queue entry for a tile, or for a unit, which has two more words."""
    return 4 * ((6 if cuts_rows(spec) else 4) + WARP)


def queue(spec: BsrSpmmSpec) -> tuple[int, str]:
    """Bytes and description of the queue from the scheduler to the other warps."""
    work = "units" if cuts_rows(spec) else "tiles"
    return QUEUE * announcement_bytes(spec), f"published {work} and their first block columns"


def queue_barriers() -> tuple[int, str]:
    """Bytes and description of the mbarriers of the queue."""
    return 8 * (1 + 2 * QUEUE), "mbarriers of the queue: requested, then full, then empty"


def schedule_flags(spec: BsrSpmmSpec, step_blocks: int = 1) -> SchedulerFlags:
    """Template parameters of the tile scheduler."""
    work = "unit" if cuts_rows(spec) else "tile"
    return SchedulerFlags(
        in_bands=in_bands(spec),
        work=work,
        work_type=work.capitalize(),
        step_blocks=step_blocks,
    )


def queue_constants(spec: BsrSpmmSpec) -> tuple[Constant, ...]:
    """Constants of the queue."""
    work = "units" if cuts_rows(spec) else "tiles"
    return (
        Constant("kQueue", QUEUE, f"depth of the queue of {work} that the scheduler publishes"),
        Constant("kAnnouncementBytes", announcement_bytes(spec), "bytes per queue entry"),
    )


def _is_high(spec: BsrSpmmSpec) -> bool:
    """Whether a tile has 128 rows of a single block."""
    return spec.tile.m == HIGH_TILE == (spec.block.cols if spec.transpose_a else spec.block.rows)


def group_tiles(spec: BsrSpmmSpec, depth: int) -> int:
    """Number of column tiles that are processed at the same time, at least one.

    Their parts of B, of ``depth`` rows, fit the L2. With a static scheduler, tiles with fewer rows are processed one
    column tile at a time: they read more of B per FLOP, and the L2 limits them.
    """
    if not (spec.is_dynamic or _is_high(spec)):
        return 1
    l2_bytes = L2_BYTES * (2 if spec.is_dynamic and _is_high(spec) else 1)
    return max(1, l2_bytes // (depth * spec.tile.n * DTYPES[spec.dtype].bytes))


def in_bands(spec: BsrSpmmSpec) -> bool:
    """Whether tiles are computed in bands of column tiles, without a dynamic scheduler."""
    return not spec.is_dynamic and _is_high(spec)


def place_params(spec: BsrSpmmSpec, rows: str, doc: str) -> tuple[Param, ...]:
    """Parameters of the number and the order of tiles; ``rows`` names the number of rows of tiles."""
    bands = PLACE_PARAMS if spec.is_dynamic or _is_high(spec) else ()
    return (i32(rows, doc), *bands, i32("tiles", f"{rows} * tiles per row"))


def order_params(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    """Parameters of the order of tiles."""
    place = place_params(spec, "block_rows", "block rows of A")
    if not spec.is_dynamic:
        return place
    order = pointer("row_order", "int", "block rows of A, longest first")
    return (order, *place, pointer("scheduler", "int", SCHEDULER, writes=True))


def order_constants(spec: BsrSpmmSpec) -> tuple[Constant, ...]:
    """Constants of the queue of tiles, if there is one."""
    return queue_constants(spec) if spec.is_dynamic else ()


def producers(spec: BsrSpmmSpec) -> str:
    """Description of the warps other than consumers, for ``explain``."""
    return "one scheduler warp, one producer warp" if spec.is_dynamic else "one producer warp"


def order_summary(spec: BsrSpmmSpec) -> str:
    """Description of the thread blocks of a launch and the order of their tiles."""
    blocks = "one thread block per SM" if spec.ctas_per_sm == 1 else f"{spec.ctas_per_sm} thread blocks per SM"
    if spec.is_dynamic:
        return f"{blocks}; dynamic tile scheduler, starting with a few of the longest block rows"
    if _is_high(spec):
        return f"{blocks}, looping over tiles (persistent), {L2_BYTES >> 20} MB of B at a time"
    return f"{blocks}, looping over tiles (persistent), block rows fastest"
