"""Kernel specs: the complete, frozen description of one kernel.

A spec object shows every decision: what a file leaves out is filled in by :mod:`codegen.parse`. What a spec may combine
is in :mod:`codegen.arch` and :mod:`codegen.combinations`; whether it fits its architecture is found out by
:mod:`codegen.plans`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, TypeAdapter, model_validator

from codegen.arch import ARCHS
from codegen.dtypes import FP8, TWINS
from codegen.expressions.nodes import Aux, Node
from codegen.patterns import IndexTensor, PatternBase, pattern_union
from codegen.patterns.base import SpecModel, StrictInt
from codegen.problem import Layout
from codegen.score import Score

if TYPE_CHECKING:
    AnyPattern = PatternBase
else:
    AnyPattern = Annotated[pattern_union(), Field(discriminator="kind")]

ArchName = Literal["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"]
HalfName = Literal["fp16", "bf16"]
DTypeName = Literal["fp16", "bf16", "e4m3", "e5m2"]
ProductName = Literal["fp16", "bf16", "fp32"]


class AttentionTile(SpecModel):
    """What a thread block of an attention kernel works on at a time."""

    m: int = Field(description="query rows")
    n: int = Field(description="keys of one step")


class ScaleRows(SpecModel):
    """How many rows of FP8 inputs share a scale."""

    q: Annotated[Literal[64, 128], StrictInt] = Field(default=128, description="rows of Q")
    k: Annotated[Literal[64, 128], StrictInt] = Field(default=128, description="rows of K")


class GemmTile(SpecModel):
    """What a thread block of a GEMM kernel works on at a time."""

    m: int = Field(description="rows of C")
    n: int = Field(description="columns of C")
    k: int = Field(description="depth of one step")


class CopyTile(SpecModel):
    """What a thread block of a copy moves at a time."""

    m: int = Field(description="rows")
    n: int = Field(description="columns")


class BlockShape(SpecModel):
    """Shape of one stored block of a BSR matrix."""

    rows: int = Field(description="rows of a block")
    cols: int = Field(description="columns of a block")


class Epilogue(SpecModel):
    """What becomes of an element of a product before it is stored: activation(x + bias), in fp32."""

    bias: bool = Field(default=False, description="bias of one element for each row of C")
    activation: Literal["none", "relu", "gelu", "silu"] = Field(default="none", description="function applied last")

    @model_validator(mode="after")
    def _does_something(self) -> Epilogue:
        if not self.bias and self.activation == "none":
            raise ValueError("does nothing: without bias and activation, leave the epilogue out")
        return self


def canonical(fields: Mapping[str, Any]) -> str:
    """Return plain data in the one spelling of the canonical JSON."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


class SpecBase(SpecModel):
    """Fields that every kernel has."""

    arch: ArchName = Field(description="architecture that the kernel is written for")
    dtype: DTypeName = Field(
        default="fp16", description="type of the inputs and, but for FP8, outputs; accumulation is fp32"
    )
    mma: Literal["wmma", "mma", "wgmma", "none"] = Field(description="matrix instruction")
    copy_: Literal["ld_global", "cp_async", "tma"] = Field(
        alias="copy", description="path of tiles to shared memory; ld_global goes through registers"
    )
    schedule: Literal["multistage", "cooperative", "ping_pong"] = Field(
        description="division of loads and products between warps"
    )
    stages: int = Field(ge=1, le=8, description="depth of the shared-memory ring")

    options: ClassVar[tuple[str, ...]] = ()
    """Fields that are left out of the canonical JSON where they are off, as by default: kernels that do not use an
    option keep their hash when it is added."""

    @property
    def is_fp8(self) -> bool:
        """Whether inputs are FP8."""
        return self.dtype in FP8

    def canonical_json(self) -> str:
        """Canonical JSON of the spec, without unused options: the input of its hash."""
        return canonical(self.model_dump(mode="json", by_alias=True, exclude=self._unused()))

    def _unused(self) -> set[str]:
        """Return the options that are off, and would be if they were left out."""
        return {name for name in self.options if getattr(self, name) == type(self).model_fields[name].default}

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


KV_LENGTHS = IndexTensor("kv_lengths", ("batch",), "keys of each batch; those behind them are hidden", upper="kv_len")
QUERY_ORDER = IndexTensor(
    "query_order", ("batch", "heads", "query_blocks"), "query blocks, those of a tile together", upper="query_blocks"
)


CU_SEQLENS = (
    IndexTensor("cu_seqlens_q", ("bounds",), "bounds of the sequences in q: first tokens, and the end", upper=""),
    IndexTensor("cu_seqlens_k", ("bounds",), "bounds of the sequences in k and v", upper=""),
)


class AttentionSpec(SpecBase):
    """softmax(scale * Q K^T) V over the key blocks that ``pattern`` selects."""

    op: Literal["attention"] = Field(description="operator")
    head_dim: Annotated[Literal[64, 96, 128, 192, 256], StrictInt] = Field(description="elements of a head")
    pattern: AnyPattern = Field(description="keys that a query sees")
    tile: AttentionTile = Field(description="tile of one thread block")
    lse: bool = Field(default=True, description="natural log-sum-exp of each row, beside O where a call asks for it")
    softcap: float | None = Field(
        default=None,
        ge=0.001,
        le=1000,  # beyond, fp32 loses digits that the softmax needs
        description="cap of the logits before the mask: softcap * tanh(scale * q.k / softcap)",
    )
    score: Score | None = Field(
        default=None, description="what becomes of the logits before the mask: an expression; not beside softcap"
    )
    stream_k_tail: bool = Field(
        default=False,
        description="stream-K tail: tiles of the last wave are divided by their key blocks between thread blocks",
    )
    sink: bool = Field(
        default=False,
        description="attention sink: a logit of each head, from the caller, in the sum of each of its rows",
    )
    kv_lengths: bool = Field(
        default=False,
        description="number of keys of each batch, from the caller: those behind it are hidden, on top of the pattern",
    )
    layout: Layout = Field(
        default="padded",
        description="arrangement of sequences: padded to one length, or varlen: one behind the other, with the bounds "
        "cu_seqlens_q and cu_seqlens_k from the caller",
    )
    pad_heads: bool = Field(
        default=False,
        description="heads of fewer elements, filled up to head_dim with zeros; what copies by TMA does so anyway",
    )
    kv_splits: Annotated[Literal[1, 2], StrictInt] = Field(
        default=1,
        description="split-KV within a thread block: parts of a tile's keys, each with warpgroups of its own",
    )
    pack_gqa: Annotated[Literal[1, 2, 4, 8, 16, 32, 64], StrictInt] = Field(
        default=1,
        description="GQA packing: query heads of a K/V head in the rows of a tile, those of one query together",
    )
    warp_rows: Annotated[Literal[16, 32], StrictInt] = Field(
        default=16,
        description="query rows of a warp; with 32 it reads K and V from shared memory half as often",
    )
    share_kv_loads: bool = Field(
        default=False,
        description="one load of a key block for all query blocks of a tile that list it",
    )
    query_grouping: Literal["none", "given", "search"] = Field(
        default="none",
        description="query blocks that form a tile: neighbors, those that the caller's query_order puts together, or "
        "those with overlapping lists, searched in each call",
    )
    l2_lockstep: bool = Field(
        default=False,
        description="lockstep of thread blocks, which read the same keys from the L2; for K and V that exceed it",
    )
    output: HalfName = Field(default="bf16", description="type of O where the inputs are FP8")
    scale_rows: ScaleRows = Field(default=ScaleRows(), description="rows that share a scale where the inputs are FP8")
    accumulate_every: Annotated[Literal[0, 1, 2, 3, 4, 8, 16, 64], StrictInt] = Field(
        default=1,
        description="promotion interval where the inputs are FP8: steps whose P V the tensor core adds up, in about 14 "
        "bits, before fp32 registers take it in; 0: all of a row",
    )
    options: ClassVar[tuple[str, ...]] = (
        "output",
        "scale_rows",
        "accumulate_every",
        "softcap",
        "score",
        "sink",
        "kv_lengths",
        "layout",
        "pad_heads",
        "pack_gqa",
        "stream_k_tail",
        "kv_splits",
        "warp_rows",
        "share_kv_loads",
        "query_grouping",
        "l2_lockstep",
    )

    @property
    def can_split(self) -> bool:
        """Whether there is a kernel with ``stream_k_tail``: it then has that unless the spec says no."""
        undivided = not self.share_kv_loads and self.kv_splits == 1 and self.layout == "padded"
        return ARCHS[self.arch].has_wgmma and self.pattern.supports_stream_k and undivided

    @property
    def index_tensors(self) -> tuple[IndexTensor, ...]:
        """The int32 tensors that a call takes beside q, k and v."""
        order = (QUERY_ORDER,) if self.query_grouping == "given" else ()
        bounds = CU_SEQLENS if self.layout == "varlen" else ()
        return (*self.pattern.index_tensors, *order, *((KV_LENGTHS,) if self.kv_lengths else ()), *bounds)

    @property
    def aux_tensors(self) -> tuple[Aux, ...]:
        """The tensors of expressions that a call takes by name, in the order of their names."""
        if self.score is None:
            return self.pattern.aux_tensors
        of_both = {tensor.name: tensor for tensor in (*self.pattern.aux_tensors, *self.score.aux_tensors)}
        return tuple(of_both[name] for name in sorted(of_both))

    @property
    def expressions(self) -> tuple[Node, ...]:
        """The expressions of the spec."""
        of_score = None if self.score is None else self.score.expression
        return tuple(node for node in (self.pattern.expression, of_score) if node is not None)

    def _unused(self) -> set[str]:
        # Of these the default is not the field's: it depends on other fields.
        by_warps = not ARCHS[self.arch].has_wgmma
        used = ({"stream_k_tail"} if self.can_split else set()) | ({"warp_rows"} if by_warps else set())
        return super()._unused() - used


class AttentionBackwardTile(SpecModel):
    """Tile of a gradient of attention."""

    m: int = Field(description="query rows: of a tile (dq, daux), or of one step (dkdv)")
    n: int = Field(description="keys: of one step (dq, daux), or of a tile (dkdv)")


class AttentionBackwardSpec(SpecBase):
    """Gradients of softmax(scale * Q K^T) V over the key blocks that ``pattern`` selects.

    A sink needs no field: the log-sum-exp that a call is given has it; its own gradient is a sum over statistics.
    """

    op: Literal["attention_backward"] = Field(description="operator")
    gradients: Literal["dq", "dkdv", "dq_dkdv", "daux"] = Field(
        description="what the kernel computes: dQ; dK and dV; all three, with five products in place of seven; or "
        "gradients of tensors of the score"
    )
    head_dim: Annotated[Literal[64, 96, 128, 192, 256], StrictInt] = Field(description="elements of a head, at most")
    pattern: AnyPattern = Field(description="keys that a query sees")
    tile: AttentionBackwardTile = Field(description="tile of one thread block, and what a step adds to it")
    softcap: float | None = Field(
        default=None, ge=0.001, le=1000, description="cap of the forward's logits: its derivative joins dS"
    )
    score: Score | None = Field(
        default=None, description="what became of the forward's logits: its derivative joins dS; not beside softcap"
    )
    aux_gradients: tuple[str, ...] = Field(
        default=(),
        strict=False,  # plain data has a list
        description="tensors of the score whose gradients the kernel computes (gradients: daux)",
    )
    kv_lengths: bool = Field(
        default=False, description="number of keys of each batch, as the forward was given: later ones have zeros"
    )
    deterministic: bool = Field(
        default=True,
        description="the same bits in every run; false: tiles add to dQ in any order (gradients: dq_dkdv alone)",
    )
    options: ClassVar[tuple[str, ...]] = ("softcap", "score", "aux_gradients", "kv_lengths", "deterministic")

    @property
    def by_queries(self) -> bool:
        """Whether a tile has queries, and steps have keys, as the forward's."""
        return self.gradients in ("dq", "daux")

    @property
    def forward(self) -> AttentionSpec:
        """A forward kernel of the same problem: the text of its pattern is the same."""
        return AttentionSpec(
            op="attention",
            arch=self.arch,
            dtype=self.dtype,
            head_dim=self.head_dim,
            pattern=self.pattern,
            softcap=self.softcap,
            score=self.score,
            kv_lengths=self.kv_lengths,
            tile=AttentionTile(m=self.tile.m, n=self.tile.n),
            mma=self.mma,
            copy=self.copy_,
            schedule=self.schedule,
            stages=self.stages,
        )


class BsrSpmmSpec(SpecBase):
    """C = A @ B with A in block-sparse rows (BSR) and B dense."""

    op: Literal["bsr_spmm"] = Field(description="operator")
    block: BlockShape = Field(description="shape of a stored block of A")
    tile: GemmTile = Field(description="tile of C of one thread block, and the depth of one step")
    epilogue: Epilogue | None = Field(
        default=None, description="activation(x + bias) of each element of C, in fp32, before C is rounded"
    )
    accumulate: bool = Field(default=False, description="C = A B + beta c, in fp32; the caller passes c and beta")
    scheduler: Literal["static", "dynamic"] = Field(
        default="static",
        description="dynamic tile scheduler, long rows first or, of small blocks, divided; for uneven rows",
    )
    transpose_a: bool = Field(default=False, description="C = A^T B")
    b_layout: Literal["row_major", "column_major", "strided"] = Field(
        default="row_major",
        description="memory layout of B; C is row-major. strided: B and C have any strides; for up to 8 columns",
    )
    ctas_per_sm: Annotated[Literal[1, 2, 3], StrictInt] = Field(
        default=1,
        description="thread blocks that share an SM, each with a ring of its own",
    )
    output: ProductName = Field(default="bf16", description="type of C where A and B are FP8")
    accumulate_every: Annotated[Literal[0, 1, 2, 4], StrictInt] = Field(
        default=2,
        description="promotion interval of FP8: steps that the tensor core accumulates, in about 14 bits, before sums "
        "in fp32 take them in; 0: all of a row",
    )
    scales: Literal["tensor", "block"] = Field(
        default="tensor",
        description="scales of FP8: one of A and one of B; or of each stored block and of 128 rows of a column of B",
    )
    options: ClassVar[tuple[str, ...]] = (
        "output",
        "accumulate_every",
        "scales",
        "epilogue",
        "accumulate",
        "scheduler",
        "transpose_a",
        "b_layout",
        "ctas_per_sm",
    )

    @property
    def is_dynamic(self) -> bool:
        """Whether the tile scheduler is dynamic."""
        return self.scheduler == "dynamic"


class BsrSddmmSpec(SpecBase):
    """The blocks of A @ B^T that a BSR pattern lists, A and B dense, row-major."""

    op: Literal["bsr_sddmm"] = Field(description="operator")
    block: BlockShape = Field(description="shape of a stored block of C")
    tile: GemmTile = Field(description="stored blocks of C side by side that a thread block computes, depth of a step")
    ctas_per_sm: Annotated[Literal[1, 2, 3], StrictInt] = Field(
        default=1,
        description="thread blocks that share an SM, each with a ring of its own",
    )
    output: ProductName = Field(default="bf16", description="type of C where A and B are FP8")
    accumulate_every: Annotated[Literal[0, 1, 2, 4], StrictInt] = Field(
        default=1,
        description="promotion interval of FP8: steps that the tensor core accumulates, in about 14 bits, before sums "
        "in fp32 take them in; 0: all of a row",
    )
    scales: Literal["tensor", "row"] = Field(
        default="tensor",
        description="scales of FP8: one of A and one of B; or of 128 columns of each row of both (1 x 128)",
    )
    options: ClassVar[tuple[str, ...]] = ("output", "accumulate_every", "scales", "ctas_per_sm")


class BsrSpgemmSpec(SpecBase):
    """C = A @ B with A and B in block-sparse rows (BSR) of the same square blocks, C dense, row-major, or in BSR."""

    op: Literal["bsr_spgemm"] = Field(description="operator")
    block: BlockShape = Field(description="shape of a stored block of A and of B")
    tile: GemmTile = Field(description="tile of C of one thread block, and the depth of one step")
    output: Literal["dense", "bsr"] = Field(
        default="dense", description="form of C: dense, or the blocks of a BSR pattern from the caller"
    )
    scheduler: Literal["static", "dynamic"] = Field(
        default="static",
        description="dynamic tile scheduler; for tiles that differ in how many blocks meet",
    )
    options: ClassVar[tuple[str, ...]] = ("output", "scheduler")

    @property
    def is_dynamic(self) -> bool:
        """Whether the tile scheduler is dynamic."""
        return self.scheduler == "dynamic"


class TileCopySpec(SpecBase):
    """out = in, tile by tile through shared memory: measures one way of loading tiles."""

    op: Literal["tile_copy"] = Field(description="operator")
    tile: CopyTile = Field(description="what is copied at a time")


class SelectTile(SpecModel):
    """What a thread block of a selection works on at a time."""

    m: int = Field(description="query blocks, at most")
    n: int = Field(description="key blocks of one step")


class SelectTopkSpec(SpecBase):
    """For each query block the key blocks whose mean key has the largest product with the mean query."""

    widest_head: ClassVar[int] = 256
    """Elements of a head, at most: a call's may be any multiple of 8 up to that."""
    op: Literal["select_topk"] = Field(description="operator")
    tile: SelectTile = Field(description="blocks that a thread block works on at a time")


class BlockMaskTile(SpecModel):
    """What a thread block works on at a time that makes block lists."""

    n: int = Field(description="key blocks, a thread each, of one query block")


class BlockMaskSpec(SpecBase):
    """Block lists of a mask: for each query block the key blocks of which it sees some pairs, and those of which all.

    FlexAttention's ``create_block_mask``. The mask is an expression. ``dtype`` changes nothing: lists are int32.
    """

    op: Literal["block_mask"] = Field(description="operator")
    pattern: AnyPattern = Field(description="block_lists, with the blocks and the mask of the lists")
    tile: BlockMaskTile = Field(description="blocks that a thread block works on at a time")

    @property
    def aux_tensors(self) -> tuple[Aux, ...]:
        """The tensors of the mask, which a call takes by name."""
        return self.pattern.aux_tensors

    @property
    def expressions(self) -> tuple[Node, ...]:
        """The mask; none where it is no expression."""
        return () if self.pattern.expression is None else (self.pattern.expression,)


class QuantizeTile(SpecModel):
    """What a thread block of a quantize kernel works on at a time."""

    m: int = Field(description="rows: those that share a scale with scales: row_block, else as many as fit")


class QuantizeSpec(SpecBase):
    """FP8 codes and fp32 scales of what attention or a product in FP8 takes: x = code * scale."""

    op: Literal["quantize"] = Field(description="operator")
    codes: Literal["e4m3", "e5m2"] = Field(default="e4m3", description="type of the codes")
    head_dim: Annotated[Literal[64, 96, 128, 192, 256], StrictInt] = Field(
        description="elements of a head, or the columns of a matrix that share a scale"
    )
    scales: Literal["row", "row_block", "channel", "given"] = Field(
        description="what shares a scale: a row, tile.m rows (Q and K), or a column of a head, whose codes are then "
        "transposed (V); given: the rows of a head, whose scale the caller has (static quantization)"
    )
    mean: Literal["none", "subtract", "product"] = Field(
        default="none",
        description="mean of K over its keys: subtracted from K, or multiplied by each row of Q, for the log-sum-exp",
    )
    hadamard: bool = Field(
        default=False, description="Hadamard rotation of Q and K: outliers of one column are spread over all"
    )
    rotary: Literal["none", "half", "interleaved"] = Field(
        default="none",
        description="rotary embedding of Q and K, before all else: of elements i and i + head_dim / 2 (Llama), or "
        "2 i and 2 i + 1 (GPT-J)",
    )
    tile: QuantizeTile = Field(description="rows that a thread block works on at a time")
    options: ClassVar[tuple[str, ...]] = ("mean", "hadamard", "rotary")


Spec = (
    AttentionSpec
    | AttentionBackwardSpec
    | BlockMaskSpec
    | BsrSpmmSpec
    | BsrSddmmSpec
    | BsrSpgemmSpec
    | QuantizeSpec
    | SelectTopkSpec
    | TileCopySpec
)
MODELS: tuple[type[SpecBase], ...] = get_args(Spec)
OPS: tuple[str, ...] = tuple(get_args(model.model_fields["op"].annotation)[0] for model in MODELS)
UnchosenSpec = AttentionBackwardSpec | BlockMaskSpec | QuantizeSpec | SelectTopkSpec | TileCopySpec
"""Operators whose kernel follows from the arguments of a call: ``codegen.select`` chooses nothing."""
SPEC_ADAPTER: TypeAdapter[Spec] = TypeAdapter(Annotated[Spec, Field(discriminator="op")])
FILLED_IN = ("mma", "copy", "schedule", "stages", "tile")
"""Fields a spec file may leave out although the model always has them."""


def _allow_twins(dtype: dict[str, Any]) -> None:
    """Let a file list the types of twins."""
    one = {name: dtype.pop(name) for name in ("enum", "type")}
    dtype["anyOf"] = [one, {"const": [*TWINS]}]


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a spec file, for editors."""
    schema = SPEC_ADAPTER.json_schema(by_alias=True)
    for model in MODELS:
        definition = schema["$defs"][model.__name__]
        definition["required"] = [name for name in definition["required"] if name not in FILLED_IN]
        _allow_twins(definition["properties"]["dtype"])
    for tile in (AttentionTile, AttentionBackwardTile, BlockMaskTile, GemmTile, CopyTile, QuantizeTile, SelectTile):
        schema["$defs"][tile.__name__].pop("required")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Kernel spec", **schema}


__all__ = [
    "MODELS",
    "SPEC_ADAPTER",
    "AttentionBackwardSpec",
    "AttentionBackwardTile",
    "AttentionSpec",
    "AttentionTile",
    "BlockMaskSpec",
    "BlockMaskTile",
    "BlockShape",
    "BsrSddmmSpec",
    "BsrSpgemmSpec",
    "BsrSpmmSpec",
    "CopyTile",
    "Epilogue",
    "GemmTile",
    "QuantizeSpec",
    "QuantizeTile",
    "ScaleRows",
    "SelectTile",
    "SelectTopkSpec",
    "Spec",
    "SpecBase",
    "TileCopySpec",
    "UnchosenSpec",
    "canonical",
    "json_schema",
]
