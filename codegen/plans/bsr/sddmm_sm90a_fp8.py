"""Plan of the sm_90a sampled product in FP8, with blocks of 32, 64 and 128."""

from __future__ import annotations

from codegen.arch import WARP
from codegen.flags import SddmmFp8Flags
from codegen.plan import Constant, Plan, TensorMap, check_budget, i32, tensor_map
from codegen.plans.bsr.fp8 import (
    BLOCK_TILE,
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
from codegen.plans.bsr.parts import CONSUMERS, INDEX_PARAMS, ONE_ROW, SDDMM_MAPS, SWIZZLE, THREADS
from codegen.plans.bsr.sddmm_launch import arguments
from codegen.spec import BsrSddmmSpec
from codegen.tile_rules import Fits, OneOf, Rule, check_tile

ROW_SCALES = (
    tensor_map("a_scale_map", "scales of A, one for each 128 columns of a row", ("M", "K / 128")),
    tensor_map("b_scale_map", "scales of B, one for each 128 columns of a row", ("N", "K / 128")),
)

FURTHER: tuple[Rule[BsrSddmmSpec], ...] = (
    OneOf("k", lambda spec: (SWIZZLE,), lambda spec, sizes: f"{ONE_ROW}: {sizes}"),
    Fits(
        "n",
        lambda spec: spec.tile.n // spec.block.cols <= WARP,
        lambda spec: f"a tile has at most {WARP} blocks, one for each lane: block.cols is {spec.block.cols}",
    ),
)
TILE = (*BLOCK_TILE, *FURTHER)


def plan(spec: BsrSddmmSpec, stem: str) -> Plan:
    """Plan of the kernel of a spec."""
    cols = spec.block.cols
    m, n, k = spec.tile.m, spec.tile.n, spec.tile.k
    check_blocks(spec)
    check_tile(spec, FURTHER)
    by_row = spec.scales == "row"
    check_scales(spec)
    pieces = staging_pieces(spec)
    shared = shared_layout(spec, pieces)
    if by_row:
        shared.add("AScales", spec.stages * m * 4, f"scales of the {m} rows of A of each stage", align=128)
        shared.add("BScales", spec.stages * n * 4, f"scales of the {n} rows of B of each stage", align=128)
    shared.add("Barriers", 8 * 2 * spec.stages, "mbarriers: full, then empty", align=8)
    shared.add("Counts", 4 * spec.stages, "stored blocks of the unit of each stage", align=4)
    check_budget(spec, shared.size, registers(spec))
    return Plan(
        spec=spec,
        stem=stem,
        template="bsr_sddmm/sm90a_fp8.cu.j2",
        threads=THREADS,
        ctas_per_sm=1,
        persistent=True,
        shared=tuple(shared.regions),
        shared_bytes=shared.size,
        registers=registers(spec),
        params=(
            *SDDMM_MAPS,
            *INDEX_PARAMS,
            *(ROW_SCALES if by_row else TENSOR_SCALES),
            i32("block_rows", "block rows of C"),
            i32("blocks", "stored blocks of C"),
            i32("steps", "K / kTileK, rounded up"),
            i32("tiles", "blocks / kTileBlocks, rounded up"),
        ),
        tensor_maps={
            "a_map": TensorMap((k, m), SWIZZLE),
            "b_map": TensorMap((k, cols), SWIZZLE),
            "c_map": c_map(spec),
            **(_scale_maps(spec) if by_row else {}),
        },
        constants=(
            *constants(spec, pieces),
            Constant("kBlockCols", cols, "columns of a stored block of C"),
            Constant("kTileBlocks", n // cols, "most stored blocks per tile"),
            Constant("kBBlockBytes", cols * k, "bytes of a B tile per stored block"),
            *(_scale_constants(spec) if by_row else ()),
            Constant("kStageBytes", m * (k + 4 * by_row), "bytes of a stage, excluding those of stored blocks"),
            Constant("kBlockBytes", cols * (k + 4 * by_row), "bytes of a stage for each stored block"),
        ),
        flags=SddmmFp8Flags(fp8=fp8_flags(spec), row_scales=by_row, scaling=scaling(spec), work="unit"),
        grid_summary="one thread block per SM, looping over tiles (persistent), in the order of storage",
        summary=(
            ("blocks of C", f"{spec.block.rows} x {cols}"),
            (
                "tile",
                f"{n // cols} stored blocks in steps of {k}; those of one block row are computed together, transposed; "
                f"each warpgroup has {groups(spec)} groups of 64 columns",
            ),
            ("schedule", f"{spec.schedule}: one producer warp (TMA), {CONSUMERS} consumer warpgroups (WGMMA)"),
            ("scales", scaling(spec)),
            ("pipeline", f"ring of {spec.stages} pairs of A and B tiles"),
        ),
        flops=2 * m * n * k,
        bytes=(m + n) * k,
        arguments=arguments,
    )


def _scale_maps(spec: BsrSddmmSpec) -> dict[str, TensorMap]:
    return {
        "a_scale_map": TensorMap((spec.tile.m, 1), 0, dtype="fp32"),
        "b_scale_map": TensorMap((spec.block.cols, 1), 0, dtype="fp32"),
    }


def _scale_constants(spec: BsrSddmmSpec) -> tuple[Constant, ...]:
    return (
        Constant("kAScaleBytes", 4 * spec.tile.m, "bytes of the scales of an A tile"),
        Constant("kBScaleBytes", 4 * spec.tile.n, "bytes of the scales of a B tile"),
    )
