"""Kernel specs: complete, frozen descriptions of kernels.

A spec object has all decisions; :mod:`codegen.parse` fills in the fields that a file leaves out. :mod:`codegen.arch`
and :mod:`codegen.combinations` define legal combinations; :mod:`codegen.plans` checks that a spec fits its
architecture.
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
    """Tile of a thread block of an attention kernel."""

    m: int = Field(description="query rows")
    n: int = Field(description="keys per step")


class ScaleRows(SpecModel):
    """Rows of FP8 inputs that share a scale."""

    q: Annotated[Literal[64, 128], StrictInt] = Field(default=128, description="rows of Q")
    k: Annotated[Literal[64, 128], StrictInt] = Field(default=128, description="rows of K")


class GemmTile(SpecModel):
    """Tile of a thread block of a GEMM kernel."""

    m: int = Field(description="rows of C")
    n: int = Field(description="columns of C")
    k: int = Field(description="depth of one step")


class CopyTile(SpecModel):
    """Tile of a thread block of a copy."""

    m: int = Field(description="rows")
    n: int = Field(description="columns")


class BlockShape(SpecModel):
    """Shape of one stored block of a BSR matrix."""

    rows: int = Field(description="rows per block")
    cols: int = Field(description="columns per block")


class Epilogue(SpecModel):
    """Epilogue of a product: activation(x + bias) of each element in fp32, before it is stored."""

    bias: bool = Field(default=False, description="bias with one element per row of C")
    activation: Literal["none", "relu", "gelu", "silu"] = Field(default="none", description="function applied last")

    @model_validator(mode="after")
    def _does_something(self) -> Epilogue:
        if not self.bias and self.activation == "none":
            raise ValueError("has no effect without bias and activation: leave the epilogue out")
        return self


def canonical(fields: Mapping[str, Any]) -> str:
    """Canonical JSON of plain data."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


class SpecBase(SpecModel):
    """Fields of all kernels."""

    arch: ArchName = Field(description="architecture of the kernel")
    dtype: DTypeName = Field(
        default="fp16", description="type of the inputs and, except for FP8, of the outputs; accumulation is in fp32"
    )
    mma: Literal["wmma", "mma", "wgmma", "none"] = Field(description="matrix instruction")
    copy_: Literal["ld_global", "cp_async", "tma"] = Field(
        alias="copy", description="copy instruction from global to shared memory; ld_global copies through registers"
    )
    schedule: Literal["multistage", "cooperative", "ping_pong"] = Field(
        description="division of loads and products between warps"
    )
    stages: int = Field(ge=1, le=8, description="depth of the shared-memory ring")

    options: ClassVar[tuple[str, ...]] = ()
    """Options that the canonical JSON omits if they are off (the default), so that new options do not change the hashes
    of kernels that do not use them."""

    @property
    def is_fp8(self) -> bool:
        """Whether inputs are FP8."""
        return self.dtype in FP8

    def canonical_json(self) -> str:
        """Canonical JSON of the spec, without unused options; the input of its hash."""
        return canonical(self.model_dump(mode="json", by_alias=True, exclude=self._unused()))

    def _unused(self) -> set[str]:
        """Options that are off, as they would be by default."""
        return {name for name in self.options if getattr(self, name) == type(self).model_fields[name].default}

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


KV_LENGTHS = IndexTensor(
    "kv_lengths", ("batch",), "number of keys of each batch; later keys are hidden", upper="kv_len"
)
QUERY_ORDER = IndexTensor(
    "query_order", ("batch", "heads", "query_blocks"), "query blocks, grouped by tile", upper="query_blocks"
)


CU_SEQLENS = (
    IndexTensor(
        "cu_seqlens_q", ("bounds",), "bounds of the sequences in q: first tokens, then the end of the last", upper=""
    ),
    IndexTensor("cu_seqlens_k", ("bounds",), "bounds of the sequences in k and v", upper=""),
)


NARROW_HEADS = 80
"""Head size of kernels by WGMMA with 16-bit operands alone, for some patterns."""


class AttentionSpec(SpecBase):
    """softmax(scale * Q K^T) V over the key blocks that ``pattern`` selects."""

    op: Literal["attention"] = Field(description="operator")
    head_dim: Annotated[Literal[64, 80, 96, 128, 192, 256], StrictInt] = Field(description="elements per head")
    pattern: AnyPattern = Field(description="pattern of the keys that each query sees")
    tile: AttentionTile = Field(description="tile of a thread block")
    lse: bool = Field(default=True, description="natural log-sum-exp of each row, returned in addition to O on request")
    softcap: float | None = Field(
        default=None,
        ge=0.001,
        le=1000,  # above, fp32 loses digits that the softmax needs
        description="cap of the logits before the mask: softcap * tanh(scale * q.k / softcap)",
    )
    score: Score | None = Field(
        default=None, description="transform of the logits before the mask: an expression; not together with softcap"
    )
    stream_k_tail: bool = Field(
        default=False,
        description="stream-K tail: thread blocks share the tiles of the last wave, split by key blocks",
    )
    sink: bool = Field(
        default=False,
        description="attention sink: a logit per head, from the caller, that is added to the softmax sum of each row",
    )
    kv_lengths: bool = Field(
        default=False,
        description="number of keys of each batch, from the caller; later keys are hidden, in addition to the pattern",
    )
    layout: Layout = Field(
        default="padded",
        description="arrangement of sequences: padded to one length; varlen: one behind the other, with the bounds "
        "cu_seqlens_q and cu_seqlens_k from the caller; or paged: queries as in varlen, keys in the pages of a cache",
    )
    cache: Literal["same", "e4m3"] = Field(
        default="same",
        description="type of K and V with layout paged: that of Q, or e4m3 with scales from the call; products are in "
        "fp16",
    )
    pad_heads: bool = Field(
        default=False,
        description="smaller heads, padded to head_dim with zeros; kernels with TMA always support them",
    )
    kv_splits: Annotated[Literal[1, 2], StrictInt] = Field(
        default=1,
        description="split-KV within a thread block: parts of a tile's keys, each with its own warpgroups",
    )
    split_kv: bool = Field(
        default=False,
        description="split-KV across thread blocks: parts of a tile's keys, as many as fill the GPU; the last to end "
        "adds their results in order",
    )
    pack_gqa: Annotated[Literal[1, 2, 4, 8, 16, 32, 64], StrictInt] = Field(
        default=1,
        description="GQA packing: query heads of a K/V head that share a tile; the heads of a query are adjacent rows",
    )
    warp_rows: Annotated[Literal[16, 32], StrictInt] = Field(
        default=16,
        description="query rows per warp; with 32, a warp reads K and V from shared memory half as often",
    )
    share_kv_loads: bool = Field(
        default=False,
        description="load a key block once for all query blocks of a tile that list it",
    )
    query_grouping: Literal["none", "given", "search"] = Field(
        default="none",
        description="query blocks that form a tile: adjacent ones, those that the caller's query_order groups, or "
        "those with overlapping lists, found by a search in each call",
    )
    l2_lockstep: bool = Field(
        default=False,
        description="lockstep of thread blocks, which then read the same keys from the L2; for K and V that exceed it",
    )
    output: HalfName = Field(default="bf16", description="type of O if the inputs are FP8")
    scale_rows: ScaleRows = Field(default=ScaleRows(), description="rows that share a scale if the inputs are FP8")
    accumulate_every: Annotated[Literal[0, 1, 2, 3, 4, 8, 16, 64], StrictInt] = Field(
        default=1,
        description="promotion interval if the inputs are FP8: steps whose P V the tensor core accumulates, in about "
        "14 bits, before promotion to fp32 registers; 0: all steps of a row",
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
        "cache",
        "pad_heads",
        "pack_gqa",
        "stream_k_tail",
        "kv_splits",
        "split_kv",
        "warp_rows",
        "share_kv_loads",
        "query_grouping",
        "l2_lockstep",
    )

    @property
    def has_codes(self) -> bool:
        """Whether K and V are e4m3, which the kernel converts to fp16."""
        return self.cache == "e4m3"

    @property
    def can_split(self) -> bool:
        """Whether the kernel supports ``stream_k_tail``, which is then on by default."""
        undivided = not self.share_kv_loads and self.kv_splits == 1 and self.layout == "padded"
        return ARCHS[self.arch].has_wgmma and self.pattern.supports_stream_k and undivided

    @property
    def index_tensors(self) -> tuple[IndexTensor, ...]:
        """int32 tensors that a call takes besides q, k and v."""
        order = (QUERY_ORDER,) if self.query_grouping == "given" else ()
        bounds = CU_SEQLENS if self.layout == "varlen" else ()
        return (*self.pattern.index_tensors, *order, *((KV_LENGTHS,) if self.kv_lengths else ()), *bounds)

    @property
    def aux_tensors(self) -> tuple[Aux, ...]:
        """Tensors of expressions that a call takes by name, sorted by name."""
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
        # The defaults of these depend on other fields.
        by_warps = not ARCHS[self.arch].has_wgmma
        used = ({"stream_k_tail"} if self.can_split else set()) | ({"warp_rows"} if by_warps else set())
        return super()._unused() - used


class AttentionBackwardTile(SpecModel):
    """Tile of a gradient of attention."""

    m: int = Field(description="query rows per tile (dq, daux), or per step (dkdv)")
    n: int = Field(description="keys per step (dq, daux), or per tile (dkdv)")


class AttentionBackwardSpec(SpecBase):
    """Gradients of softmax(scale * Q K^T) V over the key blocks that ``pattern`` selects.

    A sink needs no field: the log-sum-exp of the call includes it, and its own gradient is a sum over statistics.
    """

    op: Literal["attention_backward"] = Field(description="operator")
    gradients: Literal["dq", "dkdv", "dq_dkdv", "daux"] = Field(
        description="gradients that the kernel computes: dQ; dK and dV; all three, with five products instead of "
        "seven; or those of tensors of the score"
    )
    head_dim: Annotated[Literal[64, 80, 96, 128, 192, 256], StrictInt] = Field(description="most elements per head")
    pattern: AnyPattern = Field(description="pattern of the keys that each query sees")
    tile: AttentionBackwardTile = Field(description="tile of a thread block, and the size of a step")
    softcap: float | None = Field(
        default=None, ge=0.001, le=1000, description="cap of the forward's logits; dS includes its derivative"
    )
    score: Score | None = Field(
        default=None,
        description="transform of the forward's logits; dS includes its derivative; not together with softcap",
    )
    aux_gradients: tuple[str, ...] = Field(
        default=(),
        strict=False,  # a list in plain data
        description="tensors of the score whose gradients the kernel computes (gradients: daux)",
    )
    kv_lengths: bool = Field(
        default=False, description="number of keys of each batch, as in the forward; gradients of later keys are zeros"
    )
    layout: Layout = Field(
        default="padded",
        description="arrangement of sequences, as in the forward; with varlen, gradients of tokens in no sequence are "
        "zeros",
    )
    deterministic: bool = Field(
        default=True,
        description="bitwise reproducible; false (only with gradients: dq_dkdv): tiles add to dQ in any order",
    )
    options: ClassVar[tuple[str, ...]] = ("softcap", "score", "aux_gradients", "kv_lengths", "layout", "deterministic")

    @property
    def by_queries(self) -> bool:
        """Whether tiles are of queries and steps of keys, like in the forward kernel."""
        return self.gradients in ("dq", "daux")

    @property
    def forward(self) -> AttentionSpec:
        """A forward kernel of the same problem, with the same pattern text."""
        return AttentionSpec(
            op="attention",
            arch=self.arch,
            dtype=self.dtype,
            head_dim=self.head_dim,
            pattern=self.pattern,
            softcap=self.softcap,
            score=self.score,
            kv_lengths=self.kv_lengths,
            layout=self.layout,
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
    tile: GemmTile = Field(description="tile of C per thread block, and the depth of a step")
    epilogue: Epilogue | None = Field(
        default=None, description="activation(x + bias) of each element of C, in fp32, before C is rounded"
    )
    accumulate: bool = Field(default=False, description="C = A B + beta c, in fp32; the caller passes c and beta")
    scheduler: Literal["static", "dynamic"] = Field(
        default="static",
        description="dynamic tile scheduler for uneven rows: long rows first; with small blocks, long rows are split",
    )
    transpose_a: bool = Field(default=False, description="C = A^T B")
    b_layout: Literal["row_major", "column_major", "strided"] = Field(
        default="row_major",
        description="memory layout of B; C is row-major. strided: B and C have any strides; for up to 8 columns",
    )
    ctas_per_sm: Annotated[Literal[1, 2, 3], StrictInt] = Field(
        default=1,
        description="thread blocks per SM, each with its own ring",
    )
    output: ProductName = Field(default="bf16", description="type of C if A and B are FP8")
    accumulate_every: Annotated[Literal[0, 1, 2, 4], StrictInt] = Field(
        default=2,
        description="promotion interval of FP8: steps that the tensor core accumulates, in about 14 bits, before "
        "promotion to fp32; 0: all steps of a row",
    )
    scales: Literal["tensor", "block"] = Field(
        default="tensor",
        description="scales of FP8: one each for A and B; or one per block of A and per 128 rows of a column of B",
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
    """Sampled product: the blocks of A @ B^T in a BSR pattern, with A and B dense."""

    op: Literal["bsr_sddmm"] = Field(description="operator")
    block: BlockShape = Field(description="shape of a stored block of C")
    tile: GemmTile = Field(description="adjacent stored blocks of C per thread block, and the depth of a step")
    ctas_per_sm: Annotated[Literal[1, 2, 3], StrictInt] = Field(
        default=1,
        description="thread blocks per SM, each with its own ring",
    )
    output: ProductName = Field(default="bf16", description="type of C if A and B are FP8")
    accumulate_every: Annotated[Literal[0, 1, 2, 4], StrictInt] = Field(
        default=1,
        description="promotion interval of FP8: steps that the tensor core accumulates, in about 14 bits, before "
        "promotion to fp32; 0: all steps of a row",
    )
    scales: Literal["tensor", "row"] = Field(
        default="tensor",
        description="scales of FP8: one each for A and B; or one per 128 columns of each row of both (1 x 128)",
    )
    a_layout: Literal["row_major", "column_major"] = Field(default="row_major", description="memory layout of A (M, K)")
    b_layout: Literal["row_major", "column_major"] = Field(default="row_major", description="memory layout of B (N, K)")
    options: ClassVar[tuple[str, ...]] = (
        "output",
        "accumulate_every",
        "scales",
        "ctas_per_sm",
        "a_layout",
        "b_layout",
    )


class BsrSpgemmSpec(SpecBase):
    """C = A @ B with A and B in block-sparse rows (BSR) of the same square blocks; C is dense, row-major, or in BSR."""

    op: Literal["bsr_spgemm"] = Field(description="operator")
    block: BlockShape = Field(description="shape of a stored block of A and of B")
    tile: GemmTile = Field(description="tile of C per thread block, and the depth of a step")
    output: Literal["dense", "bsr"] = Field(
        default="dense", description="form of C: dense, or the blocks of a BSR pattern from the caller"
    )
    scheduler: Literal["static", "dynamic"] = Field(
        default="static",
        description="dynamic tile scheduler, for tiles with different numbers of products",
    )
    options: ClassVar[tuple[str, ...]] = ("output", "scheduler")

    @property
    def is_dynamic(self) -> bool:
        """Whether the tile scheduler is dynamic."""
        return self.scheduler == "dynamic"


class TileCopySpec(SpecBase):
    """out = in, tile by tile through shared memory; measures one copy instruction."""

    op: Literal["tile_copy"] = Field(description="operator")
    tile: CopyTile = Field(description="tile that is copied at a time")


class SelectTile(SpecModel):
    """Tile of a thread block of a selection."""

    m: int = Field(description="most query blocks")
    n: int = Field(description="key blocks per step")


class SelectTopkSpec(SpecBase):
    """For each query block, the key blocks whose mean key has the largest product with the mean query."""

    widest_head: ClassVar[int] = 256
    """Most elements per head; a call may have any multiple of 8 up to that."""
    op: Literal["select_topk"] = Field(description="operator")
    tile: SelectTile = Field(description="blocks per thread block")


class BlockMaskTile(SpecModel):
    """Tile of a thread block that builds block lists."""

    n: int = Field(description="key blocks of one query block, one per thread")


class BlockMaskSpec(SpecBase):
    """Block lists of a mask: for each query block, the partially visible and the fully visible key blocks.

    FlexAttention's ``create_block_mask``. The mask is an expression. ``dtype`` has no effect: lists are int32.
    """

    op: Literal["block_mask"] = Field(description="operator")
    pattern: AnyPattern = Field(description="block_lists with the blocks and the mask of the lists")
    tile: BlockMaskTile = Field(description="blocks per thread block")

    @property
    def aux_tensors(self) -> tuple[Aux, ...]:
        """Tensors of the mask, which a call takes by name."""
        return self.pattern.aux_tensors

    @property
    def expressions(self) -> tuple[Node, ...]:
        """The mask; empty if it is not an expression."""
        return () if self.pattern.expression is None else (self.pattern.expression,)


class PagedTile(SpecModel):
    """Tile of a thread block of attention over pages."""

    m: int = Field(description="rows: query heads of one KV head, of one token or of adjacent ones")
    n: int = Field(description="keys per step: 16 for each warp, or 32 with an e4m3 cache")


class PagedAttentionSpec(SpecBase):
    """Attention of a few queries over K and V in pages, with the keys of a request split over thread blocks.

    Pages, lengths, windows, lists, sinks, the softcap and the log-sum-exp are arguments of a call.
    """

    op: Literal["paged_attention"] = Field(description="operator")
    head_dim: Annotated[Literal[64, 128, 192, 256], StrictInt] = Field(description="elements per head")
    cache: Literal["same", "e4m3"] = Field(
        default="same",
        description="type of K and V: that of Q, or e4m3 with scales from the call; products are in fp16",
    )
    tile: PagedTile = Field(description="rows and keys per thread block")
    options: ClassVar[tuple[str, ...]] = ("cache",)


class KeyListsBackwardTile(SpecModel):
    """Tile of the gradients of attention over lists of keys."""

    m: int = Field(description="rows of a step: the query heads of its queries")
    n: int = Field(description="keys of a tile: those of an entry, or 64 if it has fewer")


class KeyListsBackwardSpec(SpecBase):
    """Gradients of attention of packed sequences in which each query has a list of key blocks, for each KV head.

    Lists, bounds, the scale and the gradient of the log-sum-exp are arguments of a call.
    """

    op: Literal["key_lists_backward"] = Field(description="operator")
    head_dim: Annotated[Literal[64, 128], StrictInt] = Field(description="elements per head")
    entry_keys: Annotated[Literal[16, 32, 64, 128], StrictInt] = Field(description="keys of an entry of a list")
    group: Annotated[Literal[4, 8, 16], StrictInt] = Field(description="query heads per KV head")
    tile: KeyListsBackwardTile = Field(description="tile of a thread block, and the size of a step")


class KeyListsForwardTile(SpecModel):
    """Tile of attention over lists of keys."""

    m: int = Field(description="rows of a step: the query heads of its queries")
    n: int = Field(description="keys of a tile: those of an entry")


class KeyListsForwardSpec(SpecBase):
    """Attention of many queries of packed sequences in which each query has a list of key blocks, for each KV head.

    Lists, bounds and the scale are arguments of a call.
    """

    op: Literal["key_lists_forward"] = Field(description="operator")
    head_dim: Annotated[Literal[64, 128], StrictInt] = Field(description="elements per head")
    entry_keys: Annotated[Literal[64, 128], StrictInt] = Field(description="keys of an entry of a list")
    group: Annotated[Literal[4, 8, 16], StrictInt] = Field(description="query heads per KV head")
    layout: Literal["varlen", "paged"] = Field(
        default="varlen", description="K and V: varlen: packed sequences; paged: in the pages of a cache"
    )
    tile: KeyListsForwardTile = Field(description="tile of a thread block, and the size of a step")
    options: ClassVar[tuple[str, ...]] = ("layout",)


class QuantizeTile(SpecModel):
    """Tile of a thread block of a quantize kernel."""

    m: int = Field(description="rows: those that share a scale with scales: row_block, else the most that fit")


class QuantizeSpec(SpecBase):
    """FP8 codes and fp32 scales of operands of FP8 attention or products: x = code * scale."""

    op: Literal["quantize"] = Field(description="operator")
    codes: Literal["e4m3", "e5m2"] = Field(default="e4m3", description="type of the codes")
    head_dim: Annotated[Literal[64, 96, 128, 192, 256], StrictInt] = Field(
        description="elements per head, or the columns of a matrix that share a scale"
    )
    scales: Literal["row", "row_block", "channel", "given"] = Field(
        description="granularity of scales: a row, tile.m rows (Q and K), or a column of a head, whose codes are "
        "transposed (V); given: one scale per head from the caller (static quantization)"
    )
    mean: Literal["none", "subtract", "product"] = Field(
        default="none",
        description="mean of K over its keys: subtract it from K, or multiply each row of Q by it, for the log-sum-exp",
    )
    hadamard: bool = Field(
        default=False, description="Hadamard rotation of Q and K, which spreads outliers of a column over all columns"
    )
    rotary: Literal["none", "half", "interleaved"] = Field(
        default="none",
        description="rotary embedding of Q and K, before the other steps: pairs are elements i and i + head_dim / 2 "
        "(Llama), or 2 i and 2 i + 1 (GPT-J)",
    )
    tile: QuantizeTile = Field(description="rows per thread block")
    options: ClassVar[tuple[str, ...]] = ("mean", "hadamard", "rotary")


Spec = (
    AttentionSpec
    | AttentionBackwardSpec
    | BlockMaskSpec
    | BsrSpmmSpec
    | BsrSddmmSpec
    | BsrSpgemmSpec
    | KeyListsBackwardSpec
    | KeyListsForwardSpec
    | PagedAttentionSpec
    | QuantizeSpec
    | SelectTopkSpec
    | TileCopySpec
)
MODELS: tuple[type[SpecBase], ...] = get_args(Spec)
OPS: tuple[str, ...] = tuple(get_args(model.model_fields["op"].annotation)[0] for model in MODELS)
UnchosenSpec = (
    AttentionBackwardSpec
    | BlockMaskSpec
    | KeyListsBackwardSpec
    | KeyListsForwardSpec
    | PagedAttentionSpec
    | QuantizeSpec
    | SelectTopkSpec
    | TileCopySpec
)
"""Operators whose kernel follows from the arguments of a call, without ``codegen.select``."""
SPEC_ADAPTER: TypeAdapter[Spec] = TypeAdapter(Annotated[Spec, Field(discriminator="op")])
FILLED_IN = ("mma", "copy", "schedule", "stages", "tile")
"""Fields that a spec file may leave out although the model requires them."""


def _allow_twins(dtype: dict[str, Any]) -> None:
    """Allow a list of the types of twins in a file."""
    one = {name: dtype.pop(name) for name in ("enum", "type")}
    dtype["anyOf"] = [one, {"const": [*TWINS]}]


def json_schema() -> dict[str, Any]:
    """JSON schema of a spec file, for editors."""
    schema = SPEC_ADAPTER.json_schema(by_alias=True)
    for model in MODELS:
        definition = schema["$defs"][model.__name__]
        definition["required"] = [name for name in definition["required"] if name not in FILLED_IN]
        _allow_twins(definition["properties"]["dtype"])
    for tile in (
        AttentionTile,
        AttentionBackwardTile,
        BlockMaskTile,
        GemmTile,
        CopyTile,
        KeyListsBackwardTile,
        KeyListsForwardTile,
        PagedTile,
        QuantizeTile,
        SelectTile,
    ):
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
    "KeyListsBackwardSpec",
    "KeyListsBackwardTile",
    "KeyListsForwardSpec",
    "KeyListsForwardTile",
    "PagedAttentionSpec",
    "PagedTile",
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
