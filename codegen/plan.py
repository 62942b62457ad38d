"""The plan: all numbers of a kernel, computed before its template is rendered.

Templates, the runtime's launches and ``codegen explain`` read the plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from codegen.arch import ARCHS, KIB, Arch
from codegen.dtypes import DTYPES, DType
from codegen.errors import SpecError
from codegen.flags import Flags
from codegen.migrations import spelt
from codegen.preparation import GatheredLayout, RowCutting
from codegen.problem import LaunchArgs, Shape
from codegen.spec import Spec
from codegen.stream_k import StreamK

ParamType = Literal["tensor_map", "pointer", "i32", "i64", "f32"]
Arguments = Callable[["Plan", Any, int], LaunchArgs]
"""Function from a plan, the shape of a problem, and the number of concurrent thread blocks to launch arguments."""
Number = TypeVar("Number", int, float)
PARAM_ABI: dict[ParamType, tuple[int, int]] = {
    "tensor_map": (128, 64),
    "pointer": (8, 8),
    "i64": (8, 8),
    "i32": (4, 4),
    "f32": (4, 4),
}
"""Bytes and alignment of each type in the kernel's parameter struct, by the CUDA ABI."""


@dataclass(frozen=True)
class Param:
    """One field of the kernel's parameter struct.

    Attributes:
        name: field name in the CUDA struct.
        type: kind of the parameter; ``pointer`` is a 64-bit device address.
        ctype: C type in the source.
        doc: its comment in the source.
        dims: names of the dimensions of a ``tensor_map``'s tensor, innermost first.
        element: C type of the elements of a ``pointer``.
        writes: whether the kernel writes the tensor.
    """

    name: str
    type: ParamType
    ctype: str
    doc: str
    dims: tuple[str, ...] = ()
    element: str | None = None
    writes: bool = False


def aligned(end: int, alignment: int) -> int:
    """``end`` rounded up to a multiple of ``alignment``."""
    return -(-end // alignment) * alignment


def param_offsets(params: Iterable[Param]) -> tuple[int, ...]:
    """Byte offset of each field of a parameter struct, in C++'s layout."""
    offsets, end = [], 0
    for param in params:
        size, alignment = PARAM_ABI[param.type]
        offsets.append(aligned(end, alignment))
        end = offsets[-1] + size
    return tuple(offsets)


def params_size(params: Sequence[Param]) -> int:
    """Bytes of a parameter struct, a multiple of its strictest alignment."""
    placed = zip(param_offsets(params), params, strict=True)
    end = max((offset + PARAM_ABI[param.type][0] for offset, param in placed), default=0)
    return aligned(end, params_alignment(params))


def params_alignment(params: Iterable[Param]) -> int:
    """Alignment of a parameter struct."""
    return max((PARAM_ABI[param.type][1] for param in params), default=1)


def tensor_map(name: str, tensor: str, dims: tuple[str, ...], *, like: str = "", writes: bool = False) -> Param:
    """TMA descriptor parameter.

    Args:
        name: field name in the CUDA struct.
        tensor: name of its tensor in the comment.
        dims: names of the tensor's dimensions, innermost first.
        like: name of a tensor of the same dimensions, which the comment gives instead of the dimensions.
        writes: whether the kernel writes the tensor.
    """
    doc = f"{tensor}, as {like}" if like else f"{tensor} ({', '.join(dims)})"
    return Param(name, "tensor_map", "TensorMap", doc, dims, writes=writes)


def pointer(name: str, element: str, doc: str, *, writes: bool = False) -> Param:
    """Device pointer parameter."""
    ctype = f"{element}*" if writes else f"const {element}*"
    return Param(name, "pointer", ctype, doc, element=element, writes=writes)


def i32(name: str, doc: str) -> Param:
    """32-bit integer parameter."""
    return Param(name, "i32", "int", doc)


def i64(name: str, doc: str) -> Param:
    """64-bit integer parameter (strides, in elements)."""
    return Param(name, "i64", "int64", doc)


def f32(name: str, doc: str) -> Param:
    """Float parameter."""
    return Param(name, "f32", "float", doc)


@dataclass(frozen=True)
class TensorMap:
    """Access of a TMA descriptor to its tensor.

    Attributes:
        box: elements of one copy, innermost dimension first.
        swizzle: bytes of the shared-memory swizzle (128, 64, 32) or 0.
        promotion: bytes of L2 promotion, 256 or 128 (``CUtensorMapL2promotion`` of the CUDA driver API); does not
            affect results.
        dtype: element type, if it is not the spec's.
    """

    box: tuple[int, ...]
    swizzle: int
    promotion: int = 256
    dtype: str | None = None

    def describe(self) -> str:
        """Box and swizzle, in the words of sources."""
        return f"box {' x '.join(map(str, self.box))}, swizzle {self.swizzle}"


@dataclass(frozen=True)
class Constant:
    """One ``constexpr`` at the top of a generated source."""

    name: str
    value: int | float | bool
    comment: str

    @property
    def ctype(self) -> str:
        """C++ type."""
        return {bool: "bool", float: "float"}.get(type(self.value), "int")

    @property
    def literal(self) -> str:
        """C++ literal."""
        return {bool: str(self.value).lower(), float: f"{self.value!r}f"}.get(type(self.value), str(self.value))


@dataclass(frozen=True)
class Ring:
    """Stages of a shared-memory region that are filled and read in turn.

    Attributes:
        stages: number of stages, over all sub-tiles.
        full: name in the source of the mbarrier that completes when a stage is filled; "" if a barrier of the whole
            thread block replaces it.
        empty: name of the mbarrier that completes when a stage has been read, likewise.
    """

    stages: int
    full: str = ""
    empty: str = ""


@dataclass(frozen=True)
class SharedRegion:
    """One named part of shared memory.

    Attributes:
        name: the source has ``k<Name>Offset``.
        offset: bytes from the start of shared memory.
        bytes: size in bytes.
        doc: description of its contents.
        aliases: first region whose memory it reuses while that region is idle.
        ring: its stages, if they are filled in turn.
        stores: whether it stages results for global memory.
    """

    name: str
    offset: int
    bytes: int
    doc: str
    aliases: str | None = None
    ring: Ring | None = None
    stores: bool = False

    def overlaps(self, other: SharedRegion) -> bool:
        """Whether two regions share bytes."""
        return self.offset < other.offset + other.bytes and other.offset < self.offset + self.bytes


@dataclass(frozen=True)
class Epilogue:
    """A kernel of the same source that is launched after the main one, with the same parameters.

    Attributes:
        symbol: its name in the source.
        threads: threads per block.
    """

    symbol: str
    threads: int


@dataclass(frozen=True)
class Prologue:
    """A kernel of the same source that is launched before the main one, with the same parameters.

    Attributes:
        symbol: its name in the source.
        threads: threads per block.
        shared_bytes: dynamic shared memory per thread block.
        overlaps: whether the main kernel may start before this one ends (programmatic dependent launch).
    """

    symbol: str
    threads: int
    shared_bytes: int = 0
    overlaps: bool = False


@dataclass
class SharedLayout:
    """Allocates shared memory front to back."""

    regions: list[SharedRegion] = field(default_factory=list)
    size: int = 0

    def add(
        self, name: str, size: int, doc: str, align: int = 1024, *, ring: Ring | None = None, stores: bool = False
    ) -> SharedRegion:
        """Append a region. TMA's 128-byte swizzle repeats every 1024 bytes, hence the default alignment."""
        offset = -(-self.size // align) * align
        region = SharedRegion(name, offset, size, doc, ring=ring, stores=stores)
        self.regions.append(region)
        self.size = offset + size
        return region


EXPRESSION_REGISTERS = 12
"""Registers that any kernel has for an expression, for any number of parts."""
HEAVY_EXPRESSION = 32
"""Registers of an expression above which the compiler was observed to spill although they were available."""


@dataclass(frozen=True)
class Registers:
    """Register budget of a computing thread.

    Attributes:
        accumulators: registers that hold accumulators and operand fragments for the whole main loop.
        overhead: addresses, loop state, softmax state: an allowance that avoids spills. The compiler uses more if they
            are free, so the sum does not estimate its use.
        limit: registers available per thread.
        expression: registers of ``overhead`` for an expression of the spec. With fewer, the compiler recomputes parts
            or spills some bytes, so a kernel is not rejected for them.
    """

    accumulators: int
    overhead: int
    limit: int
    expression: int = 0

    @property
    def needed(self) -> int:
        """Registers with which the compiler does not spill."""
        return self.accumulators + self.overhead

    @property
    def least(self) -> int:
        """Least registers per thread for which a tile is accepted; any expression adds a few."""
        return self.needed - max(0, self.expression - EXPRESSION_REGISTERS)

    @property
    def may_spill(self) -> bool:
        """Whether an expression may spill some bytes, as registers are few or the expression is large."""
        return self.needed > self.limit or self.expression > HEAVY_EXPRESSION


@dataclass(frozen=True)
class Plan:
    """Everything that templates, the runtime and ``explain`` need to know about a kernel.

    Attributes:
        spec: the spec this was made from.
        stem: name of the kernel: file, symbol and receipt.
        template: main template, relative to ``templates/``.
        threads: threads per block.
        ctas_per_sm: thread blocks that must fit an SM (second argument of ``__launch_bounds__``).
        persistent: whether the grid has at most one block per SM slot, and each block loops over tiles.
        shared: shared-memory map.
        registers: register budget.
        params: fields of the kernel's parameter struct, in order.
        tensor_maps: access of each ``tensor_map`` parameter to its tensor.
        constants: named values at the top of the source.
        flags: values that only templates read (instruction shapes, suffixes).
        grid_summary: description of the thread blocks of a launch.
        summary: further lines for ``explain``: (label, text).
        flops: floating-point operations of one step of a tile.
        bytes: bytes that the step loads; flops / bytes is its arithmetic intensity.
        arguments: function from the shape of a problem to launch arguments; see ``problem``.
        headers: CUDA headers that the source includes.
        cluster: thread blocks per cluster; a grid has whole clusters.
        sized_by_launch: whether a launch may have smaller thread blocks (``LaunchArgs.block``).
        divides_tiles: whether several thread blocks divide the steps of a tile where tiles are few.
        dynamic_scheduler: whether thread blocks take tiles from a counter in device memory.
        stream_k: division of tiles into work units, if the kernel has one.
        tile_queries: queries per tile, in attention.
        sub_tiles: sub-tiles per tile with their own key blocks, in attention: query blocks, or KV splits.
        kv_bytes: largest extent of K and of V in bytes, if the kernel limits it.
        row_cutting: split-K of long block rows, if the kernel has it.
        gathered: layout of prepared row clusters, if tiles gather block rows.
        prologue: kernel that is launched before this one, or None.
        epilogue: kernel that is launched after this one, or None.
        workspace_bytes: bytes of workspace parameters whose size depends on other parameters, as expressions.
    """

    spec: Spec
    stem: str
    template: str
    threads: int
    ctas_per_sm: int
    persistent: bool
    shared: tuple[SharedRegion, ...]
    shared_bytes: int
    registers: Registers
    params: tuple[Param, ...]
    tensor_maps: dict[str, TensorMap]
    constants: tuple[Constant, ...]
    flags: Flags
    grid_summary: str
    summary: tuple[tuple[str, str], ...]
    flops: int
    bytes: int
    arguments: Arguments
    headers: tuple[str, ...] = ()
    cluster: int = 1
    sized_by_launch: bool = False
    divides_tiles: bool = False
    dynamic_scheduler: bool = False
    stream_k: StreamK | None = None
    tile_queries: int = 0
    sub_tiles: int = 1
    kv_bytes: int | None = None
    row_cutting: RowCutting | None = None
    gathered: GatheredLayout | None = None
    prologue: Prologue | None = None
    epilogue: Epilogue | None = None
    workspace_bytes: Mapping[str, str] = field(default_factory=dict)

    def launch(self) -> dict[str, Any]:
        """Data that a host needs to launch the kernel, as JSON data without names.

        Parameters are identified by position, as the kernel reads each value at its offset.
        """
        places = {param.name: i for i, param in enumerate(self.params)}
        before = self.prologue
        return {
            "threads": self.threads,
            "dynamic_shared_bytes": self.shared_bytes,
            "cluster": self.cluster,
            "params": [
                [param.type, offset, PARAM_ABI[param.type][0]]
                for param, offset in zip(self.params, param_offsets(self.params), strict=True)
            ],
            "tensor_maps": sorted(
                [places[name], list(how.box), how.swizzle, how.promotion, *([how.dtype] if how.dtype else [])]
                for name, how in self.tensor_maps.items()
            ),
            "prologue": [before.threads, before.shared_bytes, before.overlaps] if before else None,
            **({"epilogue": [self.epilogue.threads]} if self.epilogue else {}),
        }

    @property
    def launch_sha256(self) -> str:
        """Hash of ``launch``, which receipts and rows of benchmarks store."""
        return hashlib.sha256(json.dumps(self.launch(), sort_keys=True).encode()).hexdigest()

    @property
    def promoted(self) -> str:
        """Names of the tensor maps with 128-byte L2 promotion, as a list in words."""
        return ", ".join(name for name, how in self.tensor_maps.items() if how.promotion == 128)

    @property
    def launch_notes(self) -> tuple[str, ...]:
        """Notes for a host that launches the kernel; the source has them above the parameters."""
        clusters = f", clusters of {self.cluster}" if self.cluster > 1 else ""
        most = "at most " if self.sized_by_launch else ""
        notes = [
            f"Launch: {most}{self.threads} threads per block, {self.shared_bytes} bytes of dynamic shared memory"
            f"{clusters}.",
            f"Grid: {self.grid_summary}.",
        ]
        if before := self.prologue:
            notes.append(f"Prologue, with the same parameters: {before.symbol}, {before.threads} threads per block.")
            overlaps = " and may overlap the start of the main kernel" if before.overlaps else ""
            if before.shared_bytes:
                notes.append(f"It uses {before.shared_bytes} bytes of dynamic shared memory{overlaps}.")
        if after := self.epilogue:
            notes.append(f"Epilogue, with the same parameters: {after.symbol}, {after.threads} threads per block.")
        if self.promoted:
            maps = self.promoted
            notes.append(f"L2 promotion of {maps}: 128 bytes; of all others: 256 bytes.")
        return tuple(notes)

    @property
    def arch(self) -> Arch:
        """The architecture."""
        return ARCHS[self.spec.arch]

    @property
    def dtype(self) -> DType:
        """The element type of the inputs."""
        return DTYPES[self.spec.dtype]

    @property
    def output(self) -> str:
        """Name of the output type: that of the inputs, or ``output`` of the spec for FP8 inputs."""
        said = str(getattr(self.spec, "output", self.spec.dtype))
        return said if self.spec.is_fp8 else self.spec.dtype

    @property
    def output_dtype(self) -> DType:
        """The output type, which must have 16 bits."""
        return DTYPES[self.output]

    def own(self, known: Mapping[str, Number]) -> dict[str, Number]:
        """Numbers of ``known`` that are parameters; dimensions of tensor maps, for example, are not."""
        return {param.name: known[param.name] for param in self.params if param.name in known}

    def problem(self, shape: Shape, slots: int = 0) -> LaunchArgs:
        """Launch arguments for the shape of a problem.

        Args:
            shape: shape of the plan's operator.
            slots: number of concurrent thread blocks; only used if they split tiles (``stream_k``).
        """
        args = self.arguments(self, shape, slots)
        return replace(args, numbers=self.own(args.numbers))

    @property
    def has_even_rounds(self) -> bool:
        """Whether a persistent grid is only as large as its number of rounds requires."""
        # A dynamic scheduler and stream-K balance the load themselves, and two thread blocks per SM overlap.
        by_number = self.stream_k is None and not self.dynamic_scheduler
        return self.persistent and by_number and self.ctas_per_sm == 1

    def thread_blocks(self, tiles: int, slots: int) -> int:
        """Number of thread blocks of a launch.

        If each of n thread blocks takes every n-th tile, it gets at most ceil(tiles / slots) tiles. The launch has the
        fewest thread blocks with that maximum: more would not finish sooner, but draw power and L2 bandwidth.

        Args:
            tiles: number of tiles, or of their parts if tiles are split; whole clusters.
            slots: number of concurrent thread blocks.
        """
        if not self.persistent:
            return tiles
        clusters, most = tiles // self.cluster, slots // self.cluster
        if self.has_even_rounds and clusters > most:
            most = -(-clusters // -(-clusters // most))
        return min(clusters, most) * self.cluster


def check_budget(spec: Spec, shared_bytes: int, registers: Registers) -> None:
    """Reject a plan that exceeds its architecture.

    Raises:
        SpecError: gives the numbers.
    """
    arch = ARCHS[spec.arch]
    if shared_bytes > arch.shared_memory_per_block:
        raise SpecError(
            "stages",
            f"{spec.stages} stages of tile {_tile(spec)} need {-(-shared_bytes // KIB)} KB of shared memory, "
            f"{arch.name} has {arch.shared_memory_per_block // KIB} KB; use fewer stages or a smaller tile",
        )
    if registers.least > registers.limit:
        raise SpecError(
            "tile",
            f"{_tile(spec)} needs about {registers.least} registers per thread ({registers.accumulators} of them "
            f"accumulators and fragments), {registers.limit} are available; use a smaller tile",
        )


def _tile(spec: Spec) -> str:
    return " x ".join(str(value) for value in spec.tile.model_dump().values())


def require(condition: bool, field_name: str, reason: str) -> None:
    """Raise a SpecError unless ``condition`` holds."""
    if not condition:
        raise SpecError(field_name, reason)


def require_left_out(spec: Spec, options: Sequence[str], where: str) -> None:
    """Raise a SpecError if one of the options differs from its default."""
    for option in options:
        value = getattr(spec, option)
        given = value == type(spec).model_fields[option].default
        require(given, option, f"is {spelt(value)}; not supported with {where}: leave it out")
