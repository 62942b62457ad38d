"""Plan of attention over lists of keys on sm_90a, for many queries: tiles are key blocks, steps the queries that list
them. One kernel computes the log-sum-exp, another one the result, which is summed in a fixed order."""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.flags import KeyListsForwardFlags
from codegen.plan import (
    Constant,
    Epilogue,
    Param,
    Plan,
    Registers,
    Ring,
    SharedLayout,
    TensorMap,
    check_budget,
    f32,
    i32,
    i64,
    pointer,
    require,
    tensor_map,
)
from codegen.plans.attention.rows import KV_DIMS, Q_DIMS, SWIZZLE, WARPGROUP_ROWS
from codegen.plans.backward import key_lists as backward
from codegen.plans.backward.parts import ELEMENT
from codegen.plans.backward.wgmma import WARPGROUP
from codegen.problem import COUNTER_BYTES, KeyListsShape, LaunchArgs
from codegen.spec import KeyListsForwardSpec
from codegen.tile_rules import OneOf, Rule, check_tile

CONSUMERS = 2  # warpgroups that compute, each with its own steps; warps that add have one of them each
THREADS_OF_ROWS = 256  # per block of the epilogue
REGISTERS = 40, 232  # per producer and per consumer thread
OVERHEAD_REGISTERS = 24  # addresses, loop state, statistics: an allowance
FLOAT = 4  # bytes

TILE: tuple[Rule[KeyListsForwardSpec], ...] = (
    OneOf("m", lambda spec: (WARPGROUP_ROWS,), lambda spec, sizes: f"allowed: {sizes} (rows of a warpgroup)"),
    OneOf("n", lambda spec: (spec.entry_keys,), lambda spec, sizes: f"allowed: {sizes}, the keys of an entry"),
)


def plan(spec: KeyListsForwardSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    require(not spec.is_fp8, "dtype", f"is {spec.dtype}; allowed: fp16, bf16")
    check_tile(spec, TILE)
    require(spec.stages >= 2, "stages", f"is {spec.stages}; allowed: 2 to 8 (two warpgroups have a step each)")
    m, n, d, of_out = spec.tile.m, spec.tile.n, spec.head_dim, spec.computes == "out"
    shared = _shared(spec)
    # Per thread and column of 64 rows: half a register for a product, a quarter for a 16-bit operand.
    accumulators = n // 2 + (n // 4 + d // 2 if of_out else 0)
    registers = Registers(accumulators, OVERHEAD_REGISTERS, REGISTERS[1])
    check_budget(spec, shared.size, registers)
    element = DTYPES[spec.dtype].bytes
    return Plan(
        spec=spec,
        stem=stem,
        template="key_lists_forward/sm90a.cu.j2",
        threads=WARPGROUP * (1 + CONSUMERS),
        ctas_per_sm=1,
        persistent=False,
        dynamic_scheduler=of_out,
        workspace_bytes={"scheduler": str(COUNTER_BYTES)} if of_out else {},
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=_params(spec),
        tensor_maps=_tensor_maps(spec),
        constants=_constants(spec),
        flags=KeyListsForwardFlags(of_out=of_out),
        grid_summary="one thread block for each chunk of a tile's queries",
        summary=(
            ("tile", f"{n} keys, {m // spec.group} queries of {spec.group} heads a step"),
            ("schedule", f"{spec.schedule}: a TMA producer, {CONSUMERS} consumers with alternate steps"),
        ),
        flops=2 * d * m * n * (2 if of_out else 1),
        bytes=m * d * element + (FLOAT * m * d if of_out else 0),
        arguments=_arguments,
        epilogue=Epilogue(f"{stem}_{'convert' if of_out else 'combine'}", THREADS_OF_ROWS),
    )


def _columns(spec: KeyListsForwardSpec) -> int:
    """Columns of a group: those of one swizzled row."""
    return SWIZZLE // DTYPES[spec.dtype].bytes


def _shared(spec: KeyListsForwardSpec) -> SharedLayout:
    """Shared memory layout: operands of the tile, the ring of its steps, and parts of the result."""
    stages, m, element, of_out = spec.stages, spec.tile.m, DTYPES[spec.dtype].bytes, spec.computes == "out"
    q_bytes, kv_bytes = m * spec.head_dim * element, spec.tile.n * spec.head_dim * element
    shared = SharedLayout()
    shared.add("K", kv_bytes, "K of the tile in column groups")
    if of_out:
        shared.add("V", kv_bytes, "V of the tile")
    shared.add("Q", stages * q_bytes, "Q ring", ring=Ring(stages, "q_full[i]", "q_empty[i]"))
    if of_out:
        parts = CONSUMERS * m * spec.head_dim * FLOAT
        shared.add("Parts", parts, "staging of each consumer's part of O, query by query", stores=True)
        shared.add("RowLse", stages * m * FLOAT, "log-sum-exps of the rows in the ring", align=16)
    barriers = 2 * stages + 1 + (2 * CONSUMERS if of_out else 0)
    shared.add("Barriers", 8 * barriers, "mbarriers", align=8)
    last_keys = stages * (m // spec.group + 1) * 4
    shared.add("LastKeys", last_keys, "last key that each query of the ring sees; whether one sees fewer", align=4)
    if of_out:
        shared.add("ChunkIndex", 4, "index of the thread block's chunk", align=4)
    else:
        shared.add("Places", stages * (m // spec.group) * 8, "token and turn of each query of the ring", align=8)
    return shared


def _params(spec: KeyListsForwardSpec) -> tuple[Param, ...]:
    """Parameters of the kernel."""
    of_out = spec.computes == "out"
    own: tuple[Param, ...] = (
        pointer("partials", "float2", "maximum and sum of each entry and head, by query and turn", writes=True),
        pointer("row_lse", "float", "log-sum-exp to base 2, (tokens, heads)", writes=True),
        pointer("lse", "float", "log-sum-exp, (heads, tokens)", writes=True),
        i32("list_length", "entries of a list"),
    )
    if of_out:
        own = (
            pointer("row_lse", "float", "log-sum-exp to base 2, (tokens, heads)"),
            pointer("accum", "float", "sums of O, (kv_heads, tokens, kPartBytes / 4)", writes=True),
            pointer("semaphore", "int", "turns that have passed of each query, (kv_heads, tokens)", writes=True),
            pointer("scheduler", "int", "chunks that thread blocks have taken", writes=True),
            pointer("out", ELEMENT, "O (tokens, heads, head_dim)", writes=True),
            *(i64(f"out_{axis}_stride", f"{axis} stride, in elements") for axis in ("head", "row")),
        )
    return (
        tensor_map("q_map", "Q", Q_DIMS),
        tensor_map("k_map", "K", KV_DIMS),
        *((tensor_map("v_map", "V", KV_DIMS, like="K"),) if of_out else ()),
        *backward.list_params(),
        pointer("turns", "int", "entries that each query sees, (kv_heads, tokens)"),
        *own,
        i32("tokens", "queries of all sequences"),
        i32("heads", "query heads"),
        i32("kv_heads", "heads of K and V"),
        i32("tiles", "tiles of a head"),
        i32("chunk_entries", "entries of a chunk"),
        f32("scale_log2", "scale * log2(e); the host checks that it is positive"),
    )


def _tensor_maps(spec: KeyListsForwardSpec) -> dict[str, TensorMap]:
    """Tensor maps of the operands: the heads of one query, and the keys of a tile."""
    kv = TensorMap((_columns(spec), spec.tile.n, 1, 1), SWIZZLE)
    maps = {"q_map": TensorMap((_columns(spec), 1, spec.group, 1), SWIZZLE), "k_map": kv}
    return {**maps, "v_map": kv} if spec.computes == "out" else maps


def _constants(spec: KeyListsForwardSpec) -> tuple[Constant, ...]:
    """Constants of the source."""
    m, n, d, columns, element = spec.tile.m, spec.tile.n, spec.head_dim, _columns(spec), DTYPES[spec.dtype].bytes
    of_out = (
        Constant("kTileM", m, "rows per step"),
        Constant("kAddWarps", CONSUMERS, "warps that add to O, one for each consumer"),
        Constant("kPartBytes", spec.group * d * FLOAT, "bytes of a query's part of O, in fp32"),
    )
    return (
        Constant("kHeadDim", d, "elements per head"),
        Constant("kGroup", spec.group, "query heads per KV head"),
        Constant("kTileN", n, "keys of a tile"),
        Constant("kStepQueries", m // spec.group, "queries per step"),
        Constant("kStages", spec.stages, "depth of the ring"),
        Constant("kConsumerWarpgroups", CONSUMERS, "warpgroups that compute, in alternate steps"),
        Constant("kThreads", WARPGROUP * (1 + CONSUMERS), "warpgroup 0 produces, the others consume"),
        Constant("kProducerRegisters", REGISTERS[0], "registers per producer thread"),
        Constant("kConsumerRegisters", REGISTERS[1], "registers per consumer thread"),
        Constant("kGroupColumns", columns, "columns of a group: one 128-byte swizzled row"),
        Constant("kGroups", d // columns, "column groups per head"),
        Constant("kQGroupBytes", m * SWIZZLE, "bytes of one column group of Q"),
        Constant("kKvGroupBytes", n * SWIZZLE, "bytes of one column group of K or V"),
        Constant("kQBytes", m * d * element, "bytes of Q of a step"),
        Constant("kKvBytes", n * d * element, "bytes of K, or of V, of a tile"),
        Constant("kRowThreads", THREADS_OF_ROWS, "threads per block of the epilogue"),
        *(of_out if spec.computes == "out" else ()),
    )


def _arguments(plan: Plan, shape: KeyListsShape, slots: int) -> LaunchArgs:
    """Launch arguments, with one thread block per chunk."""
    del slots
    spec = plan.spec
    assert isinstance(spec, KeyListsForwardSpec)
    sizes, chunks = backward.chunk_sizes(shape, spec.entry_keys, spec.group)
    pairs = shape.kv_heads * shape.tokens
    numbers = {
        **sizes,
        "tokens": shape.tokens,
        "heads": shape.kv_heads * spec.group,
        "kv_heads": shape.kv_heads,
        "list_length": shape.list_length,
    }
    rows = pairs * spec.group
    if spec.computes == "lse":
        partials = {"partials": 2 * FLOAT * rows * shape.list_length}
        return LaunchArgs(numbers, chunks, scratch=partials, epilogue_grid=-(-rows // THREADS_OF_ROWS))
    return LaunchArgs(
        numbers,
        chunks,
        counters={"semaphore": pairs, "scheduler": 1},
        scratch={"accum": rows * spec.head_dim * FLOAT},
        epilogue_grid=-(-rows * spec.head_dim // 2 // THREADS_OF_ROWS),
    )
