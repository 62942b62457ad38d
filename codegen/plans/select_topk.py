"""Plan of the selection of key blocks: means of blocks, their products in fp32, and the largest of each row."""

from __future__ import annotations

from codegen.arch import ARCHS
from codegen.dtypes import DTYPES
from codegen.flags import SelectTopkFlags
from codegen.plan import (
    Constant,
    Plan,
    Prologue,
    Registers,
    SharedLayout,
    check_budget,
    i32,
    i64,
    pointer,
    require,
)
from codegen.plans.lengths import KV_LEN, Q_LEN, length_numbers
from codegen.problem import BlockSize, LaunchArgs, SelectShape
from codegen.spec import SelectTopkSpec
from codegen.tile_rules import OneOf, Rule, check_tile

WARPS = (8, 4, 2, 1)  # per thread block: as many as shared memory for the ranks allows
WARP_ROWS = 4  # query blocks per warp
WIDTHS = (32, 64, 128)
DEPTH = 32  # columns of the means in shared memory at a time
PAD = 4  # floats after these columns, so that eight 16-byte reads start in different banks
MEAN_THREADS = 256
OVERHEAD_REGISTERS = 48  # addresses, ranks and loop state: an allowance
FLOAT = 4  # bytes, also per rank

TILE: tuple[Rule[SelectTopkSpec], ...] = (
    OneOf("m", lambda spec: (WARPS[0] * WARP_ROWS,), lambda spec, sizes: f"allowed: {sizes}"),
    OneOf("n", lambda spec: WIDTHS, lambda spec, sizes: f"allowed: {sizes}"),
)


def plan(spec: SelectTopkSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    arch, dtype = ARCHS[spec.arch], DTYPES[spec.dtype]
    rows, width = WARPS[0] * WARP_ROWS, spec.tile.n
    check_tile(spec, TILE)
    require(spec.stages == 1, "stages", f"is {spec.stages}; the kernel reads means once, into one buffer; allowed: 1")

    shared = SharedLayout()
    shared.add("KTile", FLOAT * width * (DEPTH + PAD), f"means of {width} key blocks, {DEPTH} columns of them")
    shared.add("QRows", FLOAT * rows * spec.widest_head, "means of the query blocks")
    left = arch.shared_memory_per_block - shared.size
    shared.add("Ranks", left, "ranks of all key blocks of a launch", align=16)
    products = WARP_ROWS * width // 32
    limit = arch.registers_for(32 * WARPS[0], 1)
    registers = Registers(accumulators=products + 4 * width // 32, overhead=OVERHEAD_REGISTERS, limit=limit)
    check_budget(spec, shared.size, registers)
    element = "unsigned short"
    return Plan(
        spec=spec,
        stem=stem,
        template="select_topk/select_topk.cu.j2",
        threads=32 * WARPS[0],
        ctas_per_sm=1,
        persistent=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=(
            pointer("q", element, "Q (batch, heads, q_len, head_dim)"),
            *(i64(f"q_{axis}_stride", f"{axis} stride, in elements") for axis in ("batch", "head", "row")),
            pointer("k", element, "K (batch, kv_heads, kv_len, head_dim)"),
            *(i64(f"k_{axis}_stride", f"{axis} stride, in elements") for axis in ("batch", "head", "row")),
            pointer("means", "float", "means of all blocks of Q, then of K: head_dim elements each", writes=True),
            pointer("kv_indices", "int", "lists (batch, heads, query_blocks, topk)", writes=True),
            i64("q_blocks", "query blocks of all heads"),
            Q_LEN,
            KV_LEN,
            i32("head_dim", "elements of a head, a multiple of 8"),
            i32("heads", "query heads"),
            i32("kv_heads", "heads of K"),
            i32("heads_per_kv_head", "query heads per head of K"),
            i32("block_q", "queries per block"),
            i32("block_kv", "keys per block"),
            i32("query_blocks", "query blocks per head"),
            i32("key_blocks", "key blocks per head"),
            i32("query_tiles", "thread blocks per head"),
            i32("topk", "entries per list"),
            i32("causal", "1 if a query block does not see key blocks after its last query"),
            i32("always_first", "bit mask of key blocks that are always selected, counted from the first key block"),
            i32("always_last", "the same, counted back from the key block at a query block's last query"),
        ),
        tensor_maps={},
        constants=(
            Constant("kTileN", width, "key blocks per step"),
            Constant("kLaneBlocks", width // 32, "key blocks of a lane in a step"),
            Constant("kWarpRows", WARP_ROWS, "query blocks per warp"),
            Constant("kThreads", 32 * WARPS[0], "most threads per block"),
            Constant("kMeanThreads", MEAN_THREADS, "threads per block of the prologue, which computes means"),
            Constant("kChunk", 16 // dtype.bytes, "elements per 16-byte load of a thread"),
            Constant("kDepth", DEPTH, "columns of the means of K in shared memory"),
            Constant("kKStride", DEPTH + PAD, "row stride of these means, in floats"),
            Constant("kQStride", spec.widest_head, "row stride of the means of Q, in floats"),
        ),
        flags=SelectTopkFlags(),
        grid_summary=f"one thread block for {WARP_ROWS} query blocks a warp, with 1 to {WARPS[0]} warps",
        summary=(
            ("tile", f"{WARP_ROWS} query blocks a warp, {width} key blocks at a time"),
            ("schedule", f"{spec.schedule}: means of blocks (by a prologue), products in fp32, bitwise selection"),
        ),
        flops=2 * rows * width * DEPTH,
        bytes=FLOAT * (rows + width) * DEPTH,
        arguments=_arguments,
        sized_by_launch=True,
        prologue=Prologue(f"{stem}_block_means", MEAN_THREADS),
    )


def _arguments(plan: Plan, shape: SelectShape, slots: int) -> LaunchArgs:
    """Launch arguments, with the most warps that share means of K for which all SMs have thread blocks."""
    query_blocks, key_blocks = -(-shape.q_len // shape.block_q), -(-shape.kv_len // shape.block_kv)
    batch_heads = shape.batch * shape.heads
    ranks = next(region for region in plan.shared if region.name == "Ranks")
    row_bytes = FLOAT * WARP_ROWS * key_blocks  # per warp
    fitting = [warps for warps in WARPS if warps * row_bytes <= ranks.bytes] or [WARPS[-1]]
    tiles_of = {warps: -(-query_blocks // (WARP_ROWS * warps)) for warps in fitting}
    warps = next((warps for warps in fitting if batch_heads * tiles_of[warps] >= slots), fitting[-1])
    blocks_of_q, blocks_of_k = batch_heads * query_blocks, shape.batch * shape.kv_heads * key_blocks
    numbers = {
        "q_blocks": blocks_of_q,
        **length_numbers(shape),
        "head_dim": shape.head_dim,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "heads_per_kv_head": shape.heads // shape.kv_heads,
        "block_q": shape.block_q,
        "block_kv": shape.block_kv,
        "query_blocks": query_blocks,
        "key_blocks": key_blocks,
        "query_tiles": tiles_of[warps],
    }
    return LaunchArgs(
        numbers,
        batch_heads * tiles_of[warps],
        prologue_grid=blocks_of_q + blocks_of_k,
        scratch={"means": FLOAT * shape.head_dim * (blocks_of_q + blocks_of_k)},
        block=BlockSize(32 * warps, ranks.offset + warps * row_bytes),
    )
