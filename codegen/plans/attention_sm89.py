"""Plan of the sm_89 attention kernel: a cp.async ring of K and V blocks, mma.sync in every warp."""

from __future__ import annotations

from codegen.arch import ARCHS, KIB
from codegen.dtypes import DTYPES
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Registers,
    SharedLayout,
    SharedRegion,
    check_budget,
    i64,
    pointer,
    require,
)
from codegen.plans.attention_params import index_params, list_constants, lse_params, size_params
from codegen.spec import AttentionSpec

WARP = 32  # threads
WARP_ROWS = 16  # rows of one mma.sync
CHUNK = 16  # bytes of one cp.async, and of one row of an 8 x 8 matrix of ldmatrix
# Shared memory the system takes from each block (CUDA C++ Programming Guide, "Compute Capability 8.x").
RESERVED = 1 * KIB
# Addresses, loop state, softmax state, operands in flight. The compiler takes a few more where they are free.
REGISTER_OVERHEAD = 56
ONE_LOAD = Constant("kStepBlocks", 1, "listed blocks of a step")


def plan(spec: AttentionSpec, stem: str) -> Plan:
    """Work out every number of the kernel."""
    arch, dtype, pattern = ARCHS[spec.arch], DTYPES[spec.dtype], spec.pattern
    block = pattern.fixed_block
    m, n, d = spec.tile.m, spec.tile.n, spec.head_dim
    require(d in (64, 128), "head_dim", f"is {d}; allowed on {arch.name}: 64, 128")
    require(spec.softcap is None, "softcap", f"is {spec.softcap}; {arch.name} has no kernel with it: leave it out")
    require(not spec.sink, "sink", f"is true; {arch.name} has no kernel with it: leave it out")
    packed = spec.packed_heads
    require(packed == 1, "packed_heads", f"is {packed}; {arch.name} has no kernel with it: leave it out")
    if block is not None:
        require(block.q >= WARP_ROWS, "pattern.block.q", f"is {block.q}; allowed on {arch.name}: 16, 32, 64, 128")
        require(block.kv in (32, 64, 128), "pattern.block.kv", f"is {block.kv}; allowed on {arch.name}: 32, 64, 128")
        require(m == block.q, "tile.m", f"is {m}; a tile is one query block: pattern.block.q is {block.q}")
        require(n == block.kv, "tile.n", f"is {n}; a step is one listed block: pattern.block.kv is {block.kv}")
    require(m in (16, 32, 64, 128), "tile.m", f"is {m}; allowed: 16, 32, 64, 128 (one warp computes 16 rows)")
    require(n in (32, 64, 128), "tile.n", f"is {n}; allowed: 32, 64, 128")
    require(spec.stages >= 2, "stages", f"is {spec.stages}; allowed: 2 to 8 (one slot fills while another is read)")
    warps = m // WARP_ROWS
    threads = warps * WARP
    ahead = spec.stages - 1
    row_bytes = d * dtype.bytes
    chunks = row_bytes // CHUNK
    q_bytes, slot_bytes = m * row_bytes, n * row_bytes

    # Q waits in the last slot until it is in registers, and O leaves through the ring: neither costs memory of its own.
    shared = SharedLayout()
    ring = shared.add(
        "Ring", ahead * slot_bytes + max(slot_bytes, q_bytes), f"{spec.stages} slots, each one block of K or V"
    )
    regions = (
        ring,
        SharedRegion("Q", ring.offset + ahead * slot_bytes, q_bytes, "Q tile: in the slot that is filled last"),
        SharedRegion("O", ring.offset, q_bytes, "O tile on its way out: in the ring once it is idle"),
    )

    scores, output, queries = (WARP_ROWS * size // WARP for size in (n, d, d // 2))
    accumulators = scores + scores // 2 + output + queries
    needed = -(-(accumulators + REGISTER_OVERHEAD) // 8) * 8  # the hardware hands them out in eights
    blocks_per_sm = max(
        1,
        min(
            arch.shared_memory_per_sm // (shared.size + RESERVED),
            arch.registers_per_sm // (threads * needed),
            arch.warps_per_sm // warps,
        ),
    )
    limit = min(arch.registers_per_thread, arch.registers_per_sm // (threads * blocks_per_sm) // 8 * 8)
    registers = Registers(accumulators=accumulators, overhead=REGISTER_OVERHEAD, limit=limit)
    check_budget(spec, shared.size, registers)

    constants = [
        Constant("kHeadDim", d, "elements of a head"),
        Constant("kTileM", m, "query rows of a thread block"),
        Constant("kTileN", n, "keys of one step"),
        Constant("kStages", spec.stages, "slots of the ring"),
        Constant("kAhead", ahead, "K and V blocks in flight while one is read"),
        Constant("kStreamRows", m, "query rows that share a list of key blocks"),
        Constant("kThreads", threads, f"{warps} warps, {WARP_ROWS} query rows each"),
        Constant("kRowBytes", row_bytes, "bytes of a row of Q, K, V, O"),
        Constant("kRowChunks", chunks, "16-byte chunks of a row"),
        Constant("kPassRows", threads // chunks, "rows that all threads copy at a time, one chunk each"),
        Constant("kWarpPassRows", WARP // chunks, "rows that a warp stores at a time"),
        Constant("kSlotBytes", slot_bytes, "bytes of a K or V block"),
        *([*list_constants(block, 1), ONE_LOAD] if block is not None else []),
        *(Constant(name, value, comment) for name, (value, comment) in pattern.constants().items()),
    ]
    params = [
        *_tensor_params("q", "Q (batch, heads, q_len, head_dim)"),
        *_tensor_params("k", "K (batch, kv_heads, kv_len, head_dim)"),
        *_tensor_params("v", "V, as K"),
        *_tensor_params("o", "O, as Q", writes=True),
        *lse_params(spec),
        *index_params(spec),
        *size_params(spec),
    ]
    return Plan(
        spec=spec,
        stem=stem,
        template="attention/sm89.cu.j2",
        threads=threads,
        blocks_per_sm=blocks_per_sm,
        persistent=False,
        shared=regions,
        shared_bytes=shared.size,
        registers=registers,
        params=tuple(params),
        tensor_maps={},
        constants=tuple(constants),
        values={
            "pattern_template": f"attention/patterns/{pattern.kind}.cuh.j2",
            "splits": False,
            "packed": False,
        },
        summary=(
            ("pattern", pattern.describe()),
            ("tile", f"{m} queries x {n} keys"),
            ("schedule", f"{spec.schedule}: {warps} warps load (cp.async) and compute (mma.sync, 16 rows each)"),
            ("pipeline", f"{ahead} K or V blocks in flight while one is read"),
            ("grid", f"one thread block for each tile, {blocks_per_sm} at a time on an SM"),
        ),
        flops=4 * m * n * d,
        bytes=2 * slot_bytes,
        tile_queries=m,
    )


def _tensor_params(name: str, doc: str, *, writes: bool = False) -> list[Param]:
    """Return the address and strides of a tensor; its rows are contiguous and 16-byte aligned."""
    return [
        pointer(name, "unsigned short", doc, writes=writes),
        i64(f"{name}_batch_stride", "elements from one batch to the next"),
        i64(f"{name}_head_stride", "elements from one head to the next"),
        i64(f"{name}_row_stride", "elements from one row to the next"),
    ]
