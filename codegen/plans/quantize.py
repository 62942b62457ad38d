"""Plan of the quantize kernels: FP8 codes and scales of rows (Q, K, matrices), or of columns and transposed (V)."""

from __future__ import annotations

import math

from codegen.arch import ARCHS
from codegen.dtypes import DTYPES, LARGEST
from codegen.flags import QuantizeFlags
from codegen.fp8 import KEY_ORDER, KEYS_TOGETHER, LEAST_AMAX, ROTARY_HEADS, ROTATED_HEADS, V_KEYS, sign_words
from codegen.plan import (
    Constant,
    Param,
    Plan,
    Registers,
    SharedLayout,
    check_budget,
    i32,
    i64,
    pointer,
    require,
)
from codegen.problem import LaunchArgs, QuantizeShape
from codegen.spec import QuantizeSpec
from codegen.tile_rules import OneOf, Rule, check_tile

CHUNK = 8  # elements per 16 bytes
WARP = 32  # threads
ROW_LANES = {64: 4, 96: 4, 128: 4, 192: 8, 256: 8}  # threads per row, so that each has 2 to 4 chunks
ROW_THREADS = 256
FLOAT_ROWS_AT_ONCE = 64  # most rows that threads can keep as floats in registers
BLOCK_ROWS = (64, 128)  # rows per scale in attention
CHANNEL_THREADS = 256  # at least one thread per column
CHANNEL_LANES = 8  # threads per row: together they load 128 bytes
STATISTIC_ROWS = 512  # per thread block that reduces columns
COLUMN_UNROLL = 1  # rows that a thread loads at a time: with two, the sums would spill
AHEAD = 96  # chunks of columns between the last one of a head and its rows, so that thread blocks do not wait
OVERHEAD_REGISTERS = 32  # addresses and loop state: an allowance
COLUMN_REGISTERS = 16  # column sums, or values to subtract: likewise
ROTARY_REGISTERS = 16  # cosines and sines: likewise
FLOAT = 4  # bytes


def plan(spec: QuantizeSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    require(spec.stages == 1, "stages", f"is {spec.stages}; rows stay in registers, without a ring; allowed: 1")
    if spec.scales == "channel":
        return _channels(spec, stem)
    return _rows(spec, stem)


def _rows(spec: QuantizeSpec, stem: str) -> Plan:
    """Plan of a kernel with scales of rows."""
    rows, lanes, head_dim = spec.tile.m, ROW_LANES[spec.head_dim], spec.head_dim
    _check_rows(spec)
    in_floats = spec.hadamard or spec.rotary != "none"
    smooth, is_given = spec.mean == "subtract", spec.scales == "given"
    threads = FLOAT_ROWS_AT_ONCE * lanes if in_floats else ROW_THREADS
    elements = rows * head_dim // threads  # per thread
    return _plan(
        spec,
        stem,
        template="quantize/rows.cu.j2",
        threads=threads,
        lanes=lanes,
        kept=elements if in_floats else elements // 2,
        statistic="mean" if smooth else "",
        params=_row_params(spec),
        constants=(
            Constant("kRows", rows, "rows per thread block"),
            Constant("kThreadRows", rows * lanes // threads, "rows per thread"),
            Constant("kInverseNorm", 1.0 / math.sqrt(head_dim), "factor of the rotation, folded into the scales"),
        )
        if spec.hadamard
        else (
            Constant("kRows", rows, "rows per thread block"),
            Constant("kThreadRows", rows * lanes // threads, "rows per thread"),
        ),
        flags=QuantizeFlags(
            codes_name=spec.codes,
            **_rotary_flags(spec),
            column_statistic="mean" if smooth else "",
            product=spec.mean == "product",
            given_scale=is_given,
            scale_of_rows=spec.scales == "row",
            joins_warps=smooth or spec.scales == "row_block",
            signs=tuple(f"0x{word:08X}" for word in sign_words(head_dim)) if spec.hadamard else (),
        ),
    )


TILE: tuple[Rule[QuantizeSpec], ...] = (
    OneOf(
        "m",
        lambda spec: (V_KEYS,) if spec.scales == "channel" else BLOCK_ROWS,
        lambda spec, sizes: f"{f'V^T has keys by {V_KEYS}' if spec.scales == 'channel' else 'allowed'}: {sizes}",
    ),
)


def _check_rows(spec: QuantizeSpec) -> None:
    """Reject specs that kernels with scales of rows do not support.

    Raises:
        SpecError: names the field.
    """
    rows, head_dim = spec.tile.m, spec.head_dim
    check_tile(spec, TILE)
    require(
        not spec.hadamard or head_dim in ROTATED_HEADS,
        "hadamard",
        f"is true; the Hadamard rotation supports head_dim {', '.join(map(str, ROTATED_HEADS))}, not {head_dim}",
    )
    require(
        spec.rotary == "none" or head_dim in ROTARY_HEADS,
        "rotary",
        f"is {spec.rotary}; with head_dim {head_dim} a thread has 3 chunks of a row, and pairs need an even number; "
        f"allowed: head_dim {', '.join(map(str, ROTARY_HEADS))}",
    )
    require(
        spec.rotary == "none" or spec.scales != "given" or rows == FLOAT_ROWS_AT_ONCE,
        "tile.m",
        f"is {rows}; with a given scale and rotary, registers suffice for {FLOAT_ROWS_AT_ONCE} rows",
    )


def _row_params(spec: QuantizeSpec) -> tuple[Param, ...]:
    """Parameters of kernels with scales of rows."""
    is_given = spec.scales == "given"
    return (
        pointer("codes", "Code", "codes, as x", writes=True),
        *(i64(f"codes_{axis}_stride", f"{axis} stride, in codes") for axis in ("batch", "head", "row")),
        pointer(
            "scales",
            "float",
            f"scales (batch, heads{'' if is_given else ', rows or blocks of them'})",
            writes=not is_given,
        ),
        *(
            i64(f"scales_{axis}_stride", f"{axis} stride, in scales")
            for axis in (("batch", "head") if is_given else ("batch", "head", "row"))
        ),
        *(
            (
                pointer("mean", "float", "means of K's columns (batch, kv_heads, head_dim)"),
                pointer("product", "float", "products of rows and means (batch, heads, length)", writes=True),
                i32("kv_heads", "K/V heads, each with a mean"),
                i32("heads_per_kv_head", "heads per mean"),
            )
            if spec.mean == "product"
            else ()
        ),
        *(_rotary_params() if spec.rotary != "none" else ()),
    )


def _channels(spec: QuantizeSpec, stem: str) -> Plan:
    """Plan of the kernel with scales of columns, which transposes."""
    check_tile(spec, TILE)
    require(
        spec.mean == "none", "mean", f"is {spec.mean}; columns with their own scales (V) have no mean: leave it out"
    )
    require(not spec.hadamard, "hadamard", "is true; columns with their own scales (V) are not rotated: leave it out")
    require(
        spec.rotary == "none",
        "rotary",
        f"is {spec.rotary}; columns with their own scales (V) are not rotated: leave it out",
    )
    assert tuple(KEY_ORDER[:4]) == (0, 1, 8, 9)  # the template relies on this order
    return _plan(
        spec,
        stem,
        template="quantize/channels.cu.j2",
        threads=CHANNEL_THREADS,
        lanes=ROW_LANES[spec.head_dim],
        kept=-(-spec.head_dim // (CHUNK * CHANNEL_LANES)) * 16,
        statistic="channel_scale",
        params=(
            pointer("codes", "Code", "V^T (batch, heads, head_dim, keys): codes", writes=True),
            *(i64(f"codes_{axis}_stride", f"{axis} stride, in codes") for axis in ("batch", "head", "column")),
        ),
        constants=(
            Constant("kRows", V_KEYS, "keys per thread block"),
            Constant("kKeysTogether", KEYS_TOGETHER, "keys that are permuted together"),
            Constant("kLanes", CHANNEL_LANES, "threads per row; each loads 8 elements at a time"),
            Constant("kLaneChunks", -(-spec.head_dim // (CHUNK * CHANNEL_LANES)), "most chunks per thread"),
        ),
        flags=QuantizeFlags(
            codes_name=spec.codes,
            chunk_type="",
            rows_type="const Element*",
            rotary_pairs="",
            column_statistic="channel_scale",
            product=False,
            given_scale=False,
            scale_of_rows=False,
            joins_warps=True,
            signs=(),
        ),
    )


def _plan(
    spec: QuantizeSpec,
    stem: str,
    *,
    template: str,
    threads: int,
    lanes: int,
    kept: int,
    statistic: str,
    params: tuple[Param, ...],
    constants: tuple[Constant, ...],
    flags: QuantizeFlags,
) -> Plan:
    """Common part of both plans."""
    arch, dtype, head_dim = ARCHS[spec.arch], DTYPES[spec.dtype], spec.head_dim
    until = "until they are quantized" if flags.given_scale else "while their scale is computed"
    shared = SharedLayout()
    if spec.scales == "channel":
        shared.add("Codes", head_dim * V_KEYS, "codes of a tile, columns of 128 keys", align=16)
    if statistic:
        shared.add("Columns", FLOAT * head_dim * (threads // WARP), "column statistics of each warp", align=16)
    shared.add("Row", FLOAT * head_dim, "statistic of each column", align=16)
    if flags.joins_warps:
        shared.add("Warps", FLOAT * WARP, "largest magnitude of each warp", align=16)
    asks_columns = statistic or flags.product or flags.signs
    overhead = OVERHEAD_REGISTERS + (COLUMN_REGISTERS if statistic or flags.product else 0)
    overhead += ROTARY_REGISTERS if flags.rotary_pairs else 0
    joined = min(4 * threads // head_dim, threads // WARP)  # each thread has four columns
    registers = Registers(kept, overhead, arch.registers_for(threads, 1))
    ctas_per_sm = max(
        1,
        min(
            arch.blocks_for(threads, registers.needed),
            arch.warps_per_sm * WARP // threads,
            arch.shared_memory_per_sm // (shared.size + 1024),
        ),
    )
    registers = Registers(kept, overhead, arch.registers_for(threads, ctas_per_sm))
    check_budget(spec, shared.size, registers)
    return Plan(
        spec=spec,
        stem=stem,
        template=template,
        threads=threads,
        ctas_per_sm=ctas_per_sm,
        persistent=False,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers,
        params=(
            pointer("x", "unsigned short", "x (batch, heads, length, head_dim)"),
            *(i64(f"x_{axis}_stride", f"{axis} stride, in elements") for axis in ("batch", "head", "row")),
            *params,
            *(_statistic_params(statistic) if statistic else ()),
            i32("heads", "heads"),
            *((i32("all_heads", "heads of all batches"),) if statistic else ()),
            i32("length", "rows per head"),
            i32("chunks", "thread blocks per head"),
        ),
        tensor_maps={},
        constants=(
            *((Constant("kHeadDim", head_dim, "elements per row"),) if asks_columns else ()),
            *constants,
            Constant("kThreads", threads, "threads per block"),
            Constant("kChunk", CHUNK, "elements per 16-byte load of a thread"),
            Constant("kRowLanes", lanes, "threads that share a row"),
            Constant("kThreadChunks", head_dim // (CHUNK * lanes), "chunks of a row per thread"),
            *(
                (
                    Constant("kStatisticRows", STATISTIC_ROWS, "rows of a chunk of column statistics"),
                    Constant("kColumnUnroll", COLUMN_UNROLL, "rows that a thread loads before it reduces them"),
                    Constant("kJoinedRows", joined, "chunks that are reduced at a time"),
                )
                if statistic
                else ()
            ),
            *(
                ()
                if flags.given_scale
                else (
                    Constant("kLargest", LARGEST[spec.codes], f"largest number of {spec.codes}"),
                    Constant("kLeastAmax", LEAST_AMAX, "smaller magnitudes count as 0"),
                )
            ),
        ),
        flags=flags,
        grid_summary=f"one thread block for {spec.tile.m} rows"
        + (f", preceded by one for each {STATISTIC_ROWS} rows whose columns are reduced" if statistic else ""),
        summary=(
            ("tile", f"{spec.tile.m} rows of {head_dim} elements"),
            ("schedule", f"{spec.schedule}: loads of 16 bytes, rows stay in registers {until}"),
        ),
        flops=0,
        bytes=spec.tile.m * head_dim * dtype.bytes,
        arguments=_arguments,
    )


def _rotary_flags(spec: QuantizeSpec) -> dict[str, str]:
    """Template parameters of the rotary embedding."""
    if spec.rotary == "none":
        return {
            "chunk_type": "uint4",
            "rows_type": "const Element*",
            "rotary_pairs": "",
        }
    return {
        "chunk_type": "Chunk",
        "rows_type": "const Rows&",
        "rotary_pairs": spec.rotary,
    }


def _rotary_params() -> tuple[Param, ...]:
    """Parameters of the rotary embedding."""
    axes = ("batch", "row")
    return (
        pointer("cosines", "float", "cosines (batch or none, length, head_dim / 2)"),
        *(i64(f"cosines_{axis}_stride", f"{axis} stride, in elements (0: shared)") for axis in axes),
        pointer("sines", "float", "sines, as cosines"),
        *(i64(f"sines_{axis}_stride", f"{axis} stride, in elements (0: shared)") for axis in axes),
    )


def _statistic_params(statistic: str) -> tuple[Param, ...]:
    what = {"mean": "means of the columns", "channel_scale": "scales of the columns"}[statistic]
    return (
        pointer("statistic", "float", f"{what} (batch, heads, head_dim)", writes=True),
        pointer("partials", "float", "partial statistics of each chunk of rows", writes=True),
        pointer("tickets", "int", "tickets drawn", writes=True),
        pointer("heads_done", "int", "finished thread blocks of each head", writes=True),
        i32("statistic_chunks", "chunks of a head's columns; 0 if the caller passes the statistic"),
        i32("lead", "chunks of columns that precede the first rows"),
    )


def _arguments(plan: Plan, shape: QuantizeShape, slots: int) -> LaunchArgs:
    """Launch arguments.

    Columns are reduced slightly more than one head ahead of the second read of the rows, which then hits the L2 if a
    head is not too large.
    """
    del slots
    spec = plan.spec
    assert isinstance(spec, QuantizeSpec)
    all_heads, chunks = shape.batch * shape.heads, -(-shape.length // spec.tile.m)
    numbers = {"heads": shape.heads, "length": shape.length, "chunks": chunks}
    if spec.mean == "product":
        numbers |= {"kv_heads": shape.kv_heads, "heads_per_kv_head": shape.heads // shape.kv_heads}
    if spec.scales != "channel" and spec.mean != "subtract":
        return LaunchArgs(numbers, all_heads * chunks)
    parts = 0 if shape.is_given else -(-shape.length // STATISTIC_ROWS)
    lead = min(all_heads * parts, parts + AHEAD)
    share = STATISTIC_ROWS // spec.tile.m  # chunks of rows per chunk of columns
    return LaunchArgs(
        {**numbers, "all_heads": all_heads, "statistic_chunks": parts, "lead": lead},
        lead + all_heads * parts * (share + 1) if parts else all_heads * chunks,
        counters={"tickets": 1, "heads_done": all_heads},
        scratch={"partials": FLOAT * max(1, all_heads * parts) * spec.head_dim},
    )
