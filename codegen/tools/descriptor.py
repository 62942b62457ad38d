"""Data that a host needs to launch a kernel, from the plan that the runtime uses.

``codegen export`` writes it as ``kernel.json``; docs/guide/export.md describes the fields.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from codegen.dtypes import DTYPES
from codegen.encode_tiled import STRIDE_BYTES, encode_tiled
from codegen.patterns.base import SpecModel
from codegen.plan import PARAM_ABI, Param, ParamType, Plan, param_offsets, params_alignment, params_size
from codegen.problem import COUNTER_BYTES
from codegen.tools.sized_launch import SizedLaunch, smallest_shape

Size = Annotated[int, Field(ge=0)]
Dim3 = tuple[int, int, int]
WORKSPACE_ALIGNMENT = 256
"""Alignment in bytes that cuMemAlloc guarantees; more than any kernel requires."""
# Element type of a pointer parameter -> alignment of its address, in bytes. Kernels load matrix elements and copy row
# statistics in units of 16 bytes.
_POINTEES = {"int": 4, "float": 4, "float2": 8, "int2": 8, "int64": 8, "unsigned char": 1}
_POINTEES |= dict.fromkeys(
    ("int4", "uint4", "uint32", "unsigned short", "RowStats", "RowRanges", "ColumnRanges", "Code"), 16
)
_POINTEES |= {dtype.cuda: 16 for dtype in DTYPES.values()}


class ParamRecord(SpecModel):
    """A field of the kernel's only parameter, a struct that is passed by value."""

    name: str
    type: ParamType = Field(description="tensor_map: a CUtensorMap; pointer: a CUdeviceptr; else a number")
    offset: Size = Field(description="bytes from the struct's first")
    size: Size = Field(description="bytes")
    points_to: str | None = Field(description="C type of the elements of a pointer")
    address_alignment: Size | None = Field(description="alignment of the address of a tensor, in bytes")
    what: str


class TensorMapRecord(SpecModel):
    """Arguments of cuTensorMapEncodeTiled for one parameter; the call provides the others."""

    param: str
    tensor: str = Field(description="tensor at globalAddress")
    data_type: str = Field(description="tensorDataType")
    rank: Size = Field(description="tensorRank")
    global_dim: tuple[str, ...] = Field(description="globalDim: names of the sizes, innermost first")
    stride_alignment: Size = Field(description="alignment of each of globalStrides, in bytes")
    box_dim: tuple[int, ...] = Field(description="boxDim: elements of one copy, innermost dimension first")
    element_strides: tuple[int, ...] = Field(description="elementStrides")
    interleave: str
    swizzle: str
    l2_promotion: str = Field(description="l2Promotion")
    oob_fill: str = Field(description="oobFill")


class GridRecord(SpecModel):
    """Inputs of the rule for the number of thread blocks of a launch (docs/guide/export.md)."""

    persistent: bool = Field(
        description="thread blocks loop over tiles; the grid has at most the concurrent thread blocks"
    )
    even_rounds: bool = Field(description="and at most those that the number of rounds requires")
    ctas_per_sm: int = Field(description="concurrent thread blocks per SM")
    what: str


class PrologueRecord(SpecModel):
    """A kernel of the same cubin that is launched before the main one, on the same stream, with the same parameter."""

    symbol: str
    block: Dim3
    dynamic_shared_bytes: Size
    programmatic_stream_serialization: bool = Field(
        description="the main kernel is launched with CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    )


class EpilogueRecord(SpecModel):
    """A kernel of the same cubin that is launched after the main one, on the same stream, with the same parameter."""

    symbol: str
    block: Dim3


Kind = Literal["counters", "scratch", "sums"]


class WorkspaceRecord(SpecModel):
    """Device memory that a launch needs in addition to its arguments."""

    param: str
    kind: Kind = Field(
        description="counters: int32, 0 before the first launch, reset to 0 by each launch; scratch: any contents; "
        "sums: 0 before each launch"
    )
    alignment: Size
    bytes: str | None = Field(description="expression of parameters; null if only a launch of known shape has it")


class LaunchRecord(SpecModel):
    """A launch of a problem of known shape: ``codegen export --shape``."""

    shape: dict[str, int]
    sm_count: int
    grid: Dim3
    block: Dim3
    dynamic_shared_bytes: Size
    prologue_grid: Dim3 | None
    epilogue_grid: Dim3 | None = None
    numbers: dict[str, int] = Field(description="values of parameters that depend on the shape")
    workspace: dict[str, int] = Field(description="bytes, by parameter; 0 for a null pointer")
    copy_stride: int | None = Field(description="row stride of the copy of B that the prologue writes, in elements")


class KernelFacts(SpecModel):
    """All data about a kernel for a host."""

    symbol: str = Field(description="name of the kernel in the cubin, for cuModuleGetFunction")
    op: str
    spec: dict[str, Any]
    spec_hash: str
    arch: str
    compute_capability: tuple[int, int] = Field(description="compute capability of devices that run the cubin")
    block: Dim3 = Field(description="threads per block; the most, if sized_by_launch")
    dynamic_shared_bytes: Size = Field(description="sharedMemBytes, the most if sized_by_launch")
    sized_by_launch: bool = Field(description="whether block and shared memory depend on the shape")
    cluster: Dim3 = Field(
        description="thread blocks per cluster; compiled in: a launch needs whole clusters, but no attribute"
    )
    grid: GridRecord
    prologue: PrologueRecord | None
    epilogue: EpilogueRecord | None = None
    params_bytes: Size = Field(description="of the struct")
    params_alignment: Size
    params: tuple[ParamRecord, ...]
    tensor_maps: tuple[TensorMapRecord, ...]
    workspace: tuple[WorkspaceRecord, ...]
    constants: dict[str, int | float | bool] = Field(description="constants of the source that descriptions refer to")
    launch_sha256: str = Field(description="launch hash, as in receipts")


def facts_of(plan: Plan) -> KernelFacts:
    """Data of a plan that a host needs."""
    workspace = _workspace(plan)
    kinds = {record.param for record in workspace}
    prologue = plan.prologue
    return KernelFacts(
        symbol=plan.stem,
        op=plan.spec.op,
        spec=json.loads(plan.spec.canonical_json()),
        spec_hash=plan.spec.hash,
        arch=plan.arch.name,
        compute_capability=plan.arch.compute_capability,
        block=(plan.threads, 1, 1),
        dynamic_shared_bytes=plan.shared_bytes,
        sized_by_launch=plan.sized_by_launch,
        cluster=(plan.cluster, 1, 1),
        grid=GridRecord(
            persistent=plan.persistent,
            even_rounds=plan.has_even_rounds,
            ctas_per_sm=plan.ctas_per_sm,
            what=plan.grid_summary,
        ),
        prologue=None
        if prologue is None
        else PrologueRecord(
            symbol=prologue.symbol,
            block=(prologue.threads, 1, 1),
            dynamic_shared_bytes=prologue.shared_bytes,
            programmatic_stream_serialization=prologue.overlaps,
        ),
        epilogue=None
        if plan.epilogue is None
        else EpilogueRecord(symbol=plan.epilogue.symbol, block=(plan.epilogue.threads, 1, 1)),
        params_bytes=params_size(plan.params),
        params_alignment=params_alignment(plan.params),
        params=tuple(
            _param(param, offset, in_workspace=param.name in kinds)
            for param, offset in zip(plan.params, param_offsets(plan.params), strict=True)
        ),
        tensor_maps=tuple(_tensor_map(plan, name) for name in plan.tensor_maps),
        workspace=workspace,
        constants={constant.name: constant.value for constant in plan.constants},
        launch_sha256=plan.launch_sha256,
    )


def launch_record(sized: SizedLaunch) -> LaunchRecord:
    """Launch of a known shape, as data."""
    args, size = sized.args, sized.block
    counters = {name: COUNTER_BYTES * count for name, count in args.counters.items()}
    return LaunchRecord(
        shape=asdict_without_none(sized.shape),
        sm_count=sized.sm_count,
        grid=(sized.grid, 1, 1),
        block=(size.threads, 1, 1),
        dynamic_shared_bytes=size.shared_bytes,
        prologue_grid=None if sized.plan.prologue is None else (args.prologue_grid, 1, 1),
        epilogue_grid=None if sized.plan.epilogue is None else (args.epilogue_grid, 1, 1),
        numbers=dict(args.numbers),
        workspace={**counters, **args.scratch, **args.sums},
        copy_stride=args.copy_stride,
    )


def asdict_without_none(shape: Any) -> dict[str, int]:
    """Fields of a shape that have a value."""
    return {name: value for name, value in asdict(shape).items() if value is not None}


def _param(param: Param, offset: int, *, in_workspace: bool) -> ParamRecord:
    alignment = None if param.element is None else _POINTEES[param.element]
    return ParamRecord(
        name=param.name,
        type=param.type,
        offset=offset,
        size=PARAM_ABI[param.type][0],
        points_to=param.element,
        address_alignment=WORKSPACE_ALIGNMENT if in_workspace else alignment,
        what=param.doc,
    )


def _tensor_map(plan: Plan, name: str) -> TensorMapRecord:
    told = asdict(encode_tiled(plan.tensor_maps[name], plan.spec.dtype))
    return TensorMapRecord(
        param=name,
        tensor=name.removesuffix("_map"),
        global_dim=next(param.dims for param in plan.params if param.name == name),
        stride_alignment=STRIDE_BYTES,
        **told,
    )


def _workspace(plan: Plan) -> tuple[WorkspaceRecord, ...]:
    """Memory of launches, with the names in the launch of the smallest problem."""
    args = plan.problem(smallest_shape(plan), slots=1)
    named: tuple[tuple[Kind, Any], ...] = (("counters", args.counters), ("scratch", args.scratch), ("sums", args.sums))
    return tuple(
        WorkspaceRecord(param=name, kind=kind, alignment=WORKSPACE_ALIGNMENT, bytes=plan.workspace_bytes.get(name))
        for kind, names in named
        for name in names
    )
