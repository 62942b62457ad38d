"""The plan: every number of one kernel, worked out before a template is opened.

A plan is what the templates read, what the runtime launches by, and what ``codegen explain`` prints.
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
"""From a plan, the shape of a problem of its operator, and how many thread blocks run at once."""
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
        type: how it is passed; ``pointer`` is a 64-bit device address.
        ctype: its C type in the source.
        doc: the comment behind it.
        dims: names of the dimensions of a ``tensor_map``'s tensor, innermost first.
        element: C type of what a ``pointer`` points to.
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
    """Return the first multiple of ``alignment`` from ``end`` on."""
    return -(-end // alignment) * alignment


def param_offsets(params: Iterable[Param]) -> tuple[int, ...]:
    """Return the byte offset of each field of a parameter struct, as C++ lays it out."""
    offsets, end = [], 0
    for param in params:
        size, alignment = PARAM_ABI[param.type]
        offsets.append(aligned(end, alignment))
        end = offsets[-1] + size
    return tuple(offsets)


def params_size(params: Sequence[Param]) -> int:
    """Return the bytes of a parameter struct, a multiple of its strictest alignment."""
    placed = zip(param_offsets(params), params, strict=True)
    end = max((offset + PARAM_ABI[param.type][0] for offset, param in placed), default=0)
    return aligned(end, params_alignment(params))


def params_alignment(params: Iterable[Param]) -> int:
    """Return the alignment of a parameter struct."""
    return max((PARAM_ABI[param.type][1] for param in params), default=1)


def tensor_map(name: str, tensor: str, dims: tuple[str, ...], *, like: str = "", writes: bool = False) -> Param:
    """TMA descriptor parameter.

    Args:
        name: field name in the CUDA struct.
        tensor: its tensor, as the comment names it.
        dims: names of the tensor's dimensions, innermost first.
        like: a tensor of the same dimensions, which the comment names in place of them.
        writes: whether the kernel writes the tensor.
    """
    doc = f"{tensor}, as {like}" if like else f"{tensor} ({', '.join(dims)})"
    return Param(name, "tensor_map", "TensorMap", doc, dims, writes=writes)


def pointer(name: str, element: str, doc: str, *, writes: bool = False) -> Param:
    """Return a device pointer parameter."""
    ctype = f"{element}*" if writes else f"const {element}*"
    return Param(name, "pointer", ctype, doc, element=element, writes=writes)


def i32(name: str, doc: str) -> Param:
    """Return a 32-bit integer parameter."""
    return Param(name, "i32", "int", doc)


def i64(name: str, doc: str) -> Param:
    """Return a 64-bit integer parameter (strides, in elements)."""
    return Param(name, "i64", "int64", doc)


def f32(name: str, doc: str) -> Param:
    """Return a float parameter."""
    return Param(name, "f32", "float", doc)


@dataclass(frozen=True)
class TensorMap:
    """How a TMA descriptor reads or writes its tensor.

    Attributes:
        box: elements of one copy, innermost dimension first.
        swizzle: bytes of the shared-memory swizzle (128, 64, 32) or 0.
        promotion: bytes that the L2 reads from device memory at a time, 256 or 128 (``CUtensorMapL2promotion`` of the
            CUDA driver API). Results do not depend on it.
        dtype: type of an element, where it is not the spec's.
    """

    box: tuple[int, ...]
    swizzle: int
    promotion: int = 256
    dtype: str | None = None

    def describe(self) -> str:
        """Return the box and the swizzle in words, as sources have them."""
        return f"box {' x '.join(map(str, self.box))}, swizzle {self.swizzle}"


@dataclass(frozen=True)
class Constant:
    """One ``constexpr`` at the top of a generated source."""

    name: str
    value: int | float | bool
    comment: str

    @property
    def ctype(self) -> str:
        """Return the C++ type."""
        return {bool: "bool", float: "float"}.get(type(self.value), "int")

    @property
    def literal(self) -> str:
        """Return the C++ literal."""
        return {bool: str(self.value).lower(), float: f"{self.value!r}f"}.get(type(self.value), str(self.value))


@dataclass(frozen=True)
class Ring:
    """Places of a shared-memory region that are filled and read in turn.

    Attributes:
        stages: places, those of all sub-tiles.
        full: mbarrier that completes when a place is filled, as the source names it; "" where a barrier of the whole
            thread block stands in for it.
        empty: mbarrier that completes when a place has been read, likewise.
    """

    stages: int
    full: str = ""
    empty: str = ""


@dataclass(frozen=True)
class SharedRegion:
    """One named part of shared memory.

    Attributes:
        name: k<Name>Offset in the source.
        offset: bytes from the start of shared memory.
        bytes: its size.
        doc: what it holds.
        aliases: the first region that it lies over, whose memory it takes over while that is idle.
        ring: its places, if they are filled in turn.
        stores: whether results lie in it on their way to global memory.
    """

    name: str
    offset: int
    bytes: int
    doc: str
    aliases: str | None = None
    ring: Ring | None = None
    stores: bool = False

    def overlaps(self, other: SharedRegion) -> bool:
        """Whether two regions have bytes in common."""
        return self.offset < other.offset + other.bytes and other.offset < self.offset + self.bytes


@dataclass(frozen=True)
class Epilogue:
    """A kernel of the same source that is launched behind the main one, with the same parameters.

    Attributes:
        symbol: its name in the source.
        threads: threads of a block.
    """

    symbol: str
    threads: int


@dataclass(frozen=True)
class Prologue:
    """A kernel of the same source that is launched before the main one, with the same parameters.

    Attributes:
        symbol: its name in the source.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a thread block.
        overlaps: whether the main kernel may begin before this one has ended (programmatic dependent launch).
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
"""Registers that an expression has in any kernel, however many its parts are."""
HEAVY_EXPRESSION = 32
"""Registers of an expression beyond which the compiler was seen to spill some bytes though there were as many."""


@dataclass(frozen=True)
class Registers:
    """Register budget of one thread that computes.

    Attributes:
        accumulators: registers that hold accumulators and operand fragments for the whole main loop.
        overhead: addresses, loop state, softmax state: an allowance with which the compiler does not spill. It takes
            more where they are free, so their sum is no estimate of what it takes.
        limit: registers a thread can have.
        expression: those of ``overhead`` that an expression of the spec would have. Where there are fewer the compiler
            reads a part again or spills some bytes, so a kernel is not refused for them.
    """

    accumulators: int
    overhead: int
    limit: int
    expression: int = 0

    @property
    def needed(self) -> int:
        """Return with how many the compiler makes do without spills."""
        return self.accumulators + self.overhead

    @property
    def least(self) -> int:
        """Least registers of a thread for which a tile is accepted; any expression adds a few."""
        return self.needed - max(0, self.expression - EXPRESSION_REGISTERS)

    @property
    def may_spill(self) -> bool:
        """Whether an expression may spill some bytes: registers are short, or the expression is heavy."""
        return self.needed > self.limit or self.expression > HEAVY_EXPRESSION


@dataclass(frozen=True)
class Plan:
    """Everything a template, the runtime and ``explain`` need to know about one kernel.

    Attributes:
        spec: the spec this was made from.
        stem: name of the kernel: file, symbol and receipt.
        template: main template, relative to ``templates/``.
        threads: threads of a block.
        ctas_per_sm: thread blocks an SM must be able to hold (second argument of ``__launch_bounds__``).
        persistent: whether the grid is one block per SM slot at most and each block loops over tiles.
        shared: shared-memory map.
        registers: register budget.
        params: fields of the kernel's parameter struct, in order.
        tensor_maps: how each ``tensor_map`` parameter addresses its tensor.
        constants: named values at the top of the source.
        flags: what only template text asks (instruction shapes, suffixes).
        grid_summary: in words, which thread blocks a launch has.
        summary: further lines for ``explain``: (label, text).
        flops: floating-point operations of one tile step, and
        bytes: the bytes it loads: their ratio bounds what the memory system allows.
        arguments: how the arguments of a launch follow from the shape of a problem: see ``problem``.
        headers: CUDA headers the source includes.
        cluster: thread blocks of a cluster; a grid has whole clusters.
        sized_by_launch: whether a launch may have smaller thread blocks than these (``LaunchArgs.block``).
        dynamic_scheduler: whether thread blocks take tiles from a counter in device memory.
        stream_k: division of tiles into work units, if there is one.
        tile_queries: queries of a tile, in attention.
        sub_tiles: sub-tiles of such a tile, with key blocks of their own: query blocks, or KV splits.
        kv_bytes: bytes that K, or V, may extend over, if the kernel does not reach all.
        row_cutting: split-K of long block rows, if there is one.
        gathered: layout of prepared row clusters, if tiles gather block rows.
        prologue: the kernel that is launched before this one, if there is one.
        epilogue: the kernel that is launched behind it, likewise.
        workspace_bytes: bytes of the workspace parameters whose size follows from other parameters, as an expression
            of these.
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
        """Arguments that a host passes to launch the kernel, as JSON data without names.

        Parameters are known by their place: the code reads a value from its offset.
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
        """The hash of the launch, as receipts and rows of benchmarks carry it."""
        return hashlib.sha256(json.dumps(self.launch(), sort_keys=True).encode()).hexdigest()

    @property
    def promoted(self) -> str:
        """Tensor maps with L2 promotion to 128 bytes, in words."""
        return ", ".join(name for name, how in self.tensor_maps.items() if how.promotion == 128)

    @property
    def launch_notes(self) -> tuple[str, ...]:
        """Notes for a host that launches the kernel, the lines above its parameters."""
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
        """Return the architecture's row."""
        return ARCHS[self.spec.arch]

    @property
    def dtype(self) -> DType:
        """Return the element type's row."""
        return DTYPES[self.spec.dtype]

    @property
    def output(self) -> str:
        """Name of the type of results: that of the inputs, or the spec's ``output`` with FP8 inputs."""
        said = str(getattr(self.spec, "output", self.spec.dtype))
        return said if self.spec.is_fp8 else self.spec.dtype

    @property
    def output_dtype(self) -> DType:
        """The type of results, which has 16 bits here."""
        return DTYPES[self.output]

    def own(self, known: Mapping[str, Number]) -> dict[str, Number]:
        """Return the numbers of ``known`` that are parameters; dimensions of tensor maps, for one, are not."""
        return {param.name: known[param.name] for param in self.params if param.name in known}

    def problem(self, shape: Shape, slots: int = 0) -> LaunchArgs:
        """Return the arguments of a launch that follow from the shape of its problem.

        Args:
            shape: of the plan's operator.
            slots: thread blocks that run at once: read where tiles are divided between them (``stream_k``).
        """
        args = self.arguments(self, shape, slots)
        return replace(args, numbers=self.own(args.numbers))

    @property
    def has_even_rounds(self) -> bool:
        """Whether a persistent grid is no larger than the rounds of its largest number of tiles."""
        # A dynamic scheduler and stream-K balance by themselves; and two thread blocks of an SM overlap.
        by_number = self.stream_k is None and not self.dynamic_scheduler
        return self.persistent and by_number and self.ctas_per_sm == 1

    def thread_blocks(self, tiles: int, slots: int) -> int:
        """Number of thread blocks of a launch.

        Thread blocks that take their tiles by number, each of n every n-th, have ceil(tiles / slots) of them at most.
        As few are launched as that takes: more would not end sooner, but draw power and share the L2's bandwidth.

        Args:
            tiles: tiles of work, or parts of them if these are more; whole clusters.
            slots: thread blocks that run at once.
        """
        if not self.persistent:
            return tiles
        clusters, most = tiles // self.cluster, slots // self.cluster
        if self.has_even_rounds and clusters > most:
            most = -(-clusters // -(-clusters // most))
        return min(clusters, most) * self.cluster


def check_budget(spec: Spec, shared_bytes: int, registers: Registers) -> None:
    """Refuse a plan that does not fit its architecture.

    Raises:
        SpecError: with the numbers.
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
            f"{_tile(spec)} needs about {registers.least} registers a thread ({registers.accumulators} of them "
            f"accumulators and fragments), {registers.limit} are available; use a smaller tile",
        )


def _tile(spec: Spec) -> str:
    return " x ".join(str(value) for value in spec.tile.model_dump().values())


def require(condition: bool, field_name: str, reason: str) -> None:
    """Raise a SpecError unless ``condition`` holds."""
    if not condition:
        raise SpecError(field_name, reason)


def require_left_out(spec: Spec, options: Sequence[str], where: str) -> None:
    """Raise a SpecError if one of the options has another value than its default."""
    for option in options:
        value = getattr(spec, option)
        given = value == type(spec).model_fields[option].default
        require(given, option, f"is {spelt(value)}; not supported with {where}: leave it out")
