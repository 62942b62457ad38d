"""Plan of the sm_90a BSR x dense kernel in FP8, with blocks of 32, 64 and 128."""

from __future__ import annotations

from codegen.flags import SpmmFp8Flags
from codegen.plan import Constant, Param, Plan, TensorMap, check_budget, pointer, require, require_left_out, tensor_map
from codegen.plans.bsr.balance import order_params, order_summary, producers, schedule_flags
from codegen.plans.bsr.fp8 import (
    BLOCK_TILE,
    COPY_COLUMNS,
    TENSOR_SCALES,
    c_map,
    check_blocks,
    check_scales,
    constants,
    fp8_flags,
    groups,
    registers,
    scaling,
    shared_layout,
    staging_pieces,
)
from codegen.plans.bsr.parts import A_MAP, C_MAP, CONSUMERS, INDEX_PARAMS, THREADS
from codegen.plans.bsr.spmm_launch import arguments
from codegen.spec import BsrSpmmSpec
from codegen.tile_rules import OneOf, Rule, check_tile

NOT_WRITTEN = ("epilogue", "accumulate", "scheduler", "transpose_a")
BLOCK_SCALES = (
    pointer("a_scale", "float", "scale of each stored block of A: value = code * scale"),
    tensor_map("b_scale_map", "scales of B, one for each 128 rows of a column", ("N", "K / 128")),
)


def plan(spec: BsrSpmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    _check(spec)
    by_block = spec.scales == "block"
    pieces = staging_pieces(spec)
    shared = shared_layout(spec, pieces)
    if by_block:
        shared.add("Scales", spec.stages * n * 4, f"scales of the {n} columns of each stage", align=128)
    shared.add("Barriers", 8 * 2 * spec.stages, "mbarriers: full, then empty", align=8)
    check_budget(spec, shared.size, registers(spec))
    copied = min(n, COPY_COLUMNS)
    flags = fp8_flags(spec)
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_spmm/sm90a_fp8.cu.j2",
        threads=THREADS,
        ctas_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers(spec),
        params=(
            A_MAP,
            tensor_map("b_map", "B, by columns", ("K", "N")),
            C_MAP,
            *INDEX_PARAMS,
            *_scales(spec),
            *order_params(spec),
        ),
        tensor_maps={
            "a_map": TensorMap((k, m, 1), k),
            "b_map": TensorMap((k, copied), k),
            "c_map": c_map(spec),
            **({"b_scale_map": TensorMap((copied, 1), 0, dtype="fp32")} if by_block else {}),
        },
        constants=(
            *constants(spec, pieces),
            Constant("kTileN", n, "columns of a C tile"),
            Constant("kCopyColumns", copied, "columns of B that one copy loads"),
            Constant("kStageBytes", (m + n) * k + (4 * n if by_block else 0), "bytes of a stage of the ring"),
        ),
        flags=SpmmFp8Flags(
            fp8=flags,
            block_scales=by_block,
            scaling=scaling(spec),
            schedule=schedule_flags(spec),
        ),
        grid_summary=order_summary(spec),
        summary=(
            ("blocks of A", f"{spec.block.rows} x {spec.block.cols}"),
            (
                "tile",
                f"{m} x {n} of C, computed transposed, in steps of {k}; each warpgroup has {groups(spec)} groups of 64",
            ),
            ("schedule", f"{spec.schedule}: {producers(spec)} (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            ("scales", scaling(spec)),
            ("pipeline", f"ring of {spec.stages} pairs of A blocks and B tiles"),
        ),
        flops=2 * m * n * k,
        bytes=(m + n) * k,
        arguments=arguments,
    )


DEPTH: tuple[Rule[BsrSpmmSpec], ...] = (
    OneOf("k", lambda spec: (spec.block.cols,), lambda spec, sizes: f"a step is one block of A: block.cols is {sizes}"),
)
TILE = (*BLOCK_TILE, *DEPTH)


def _check(spec: BsrSpmmSpec) -> None:
    """Reject specs that the kernel does not support."""
    require(
        spec.b_layout == "column_major",
        "b_layout",
        f"is {spec.b_layout}; wgmma of {spec.dtype} requires K-major operands, so B is stored by columns: column_major",
    )
    require_left_out(spec, NOT_WRITTEN, f"dtype {spec.dtype}")
    check_blocks(spec)
    check_tile(spec, DEPTH)
    check_scales(spec)


def _scales(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    return BLOCK_SCALES if spec.scales == "block" else TENSOR_SCALES
