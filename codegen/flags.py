"""Values that only templates read: instruction shapes, suffixes, features of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from codegen.dtypes import DType
from codegen.expressions.cuda import Statement
from codegen.problem import Lengths

Sums = Literal["fast", "promoted", "scaled", "scaled_rows"]
"""How products in FP8 are accumulated: in the tensor core, promoted to fp32 now and then, or scaled in each step."""
Value = int | str | bool | tuple[Any, ...] | DType | None


@dataclass(frozen=True)
class Flags:
    """Base of the flags of a template. Each field is a name in the template; fields of nested flags are names too."""

    def named(self) -> dict[str, Value]:
        """Names and values for rendering a template."""
        found: dict[str, Value] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            found |= value.named() if isinstance(value, Flags) else {field.name: value}
        return found


@dataclass(frozen=True)
class AuxFlags:
    """How a kernel reads a value of an aux tensor.

    Attributes:
        name: name of the tensor.
        declared: its type and sizes.
        dtype: type of an element.
        value: C++ type of the value.
        parameters: parameters of the load function after the kernel's parameters: the indices.
        place: offset from the address, in elements, in C++.
    """

    name: str
    declared: str
    dtype: str
    value: str
    parameters: str
    place: str


@dataclass(frozen=True)
class ExpressionFlags:
    """An expression as templates print it.

    Attributes:
        text: the expression; empty if there is none.
        row: statements that depend on the query only.
        column: statements that depend on the key only.
        used_row: statements of ``row`` that the other statements use.
        used_column: statements of ``column`` that the other statements use.
        pair: statements per pair.
        result: the expression in terms of these statements.
        helpers: device functions that it calls.
        looks_up_keys: whether it reads a tensor element whose index depends on the key.
    """

    text: str
    row: tuple[Statement, ...]
    column: tuple[Statement, ...]
    used_row: tuple[Statement, ...]
    used_column: tuple[Statement, ...]
    pair: tuple[Statement, ...]
    result: str
    helpers: tuple[str, ...]
    looks_up_keys: bool = False


@dataclass(frozen=True)
class MaskFlags(Flags):
    """The mask of partial blocks, if it is an expression.

    Attributes:
        mask_expression: the expression.
        mask_lines: its text, as lines of a comment.
        shares_row_parts: whether the lanes of a warp share its per-query values of a step.
        shares_column_parts: whether they share its per-key values of a step.
    """

    mask_expression: ExpressionFlags
    mask_lines: tuple[str, ...]
    shares_row_parts: bool
    shares_column_parts: bool


@dataclass(frozen=True)
class PairFlags(Flags):
    """The mask of a built-in pattern.

    Attributes:
        pair_expression: the expression.
        pair_lines: its text, as lines of a comment.
    """

    pair_expression: ExpressionFlags
    pair_lines: tuple[str, ...]


@dataclass(frozen=True)
class ScoreFlags(Flags):
    """The transform of scores before the mask, if it is an expression.

    Attributes:
        score_expression: log2(e) times the expression.
        score_lines: its text, as lines of a comment.
        slope_expression: in gradients, its derivative with respect to the score, unless it is 1.
        slope_lines: the text of the derivative.
    """

    score_expression: ExpressionFlags
    score_lines: tuple[str, ...]
    slope_expression: ExpressionFlags
    slope_lines: tuple[str, ...]


@dataclass(frozen=True)
class ExpressionsFlags(Flags):
    """The expressions of a spec.

    Attributes:
        mask: the mask of partial blocks.
        pairs: the mask of a built-in pattern.
        score: the transform of scores.
        expression_helpers: device functions and constants that they use.
        aux: the tensors that they read.
    """

    mask: MaskFlags
    pairs: PairFlags
    score: ScoreFlags
    expression_helpers: tuple[str, ...]
    aux: tuple[AuxFlags, ...]


@dataclass(frozen=True)
class PatternFlags(Flags):
    """Template parameters of patterns, for all kernels of attention and its gradients.

    Attributes:
        pattern_template: the pattern's template.
        lengths: lengths of the sequences.
        partial_range: whether a ``KvBlockIterator`` can be restricted to a range of its blocks.
        skip_masked: whether warpgroups skip steps of their tile without visible keys.
        block_steps: steps per listed block.
        step_blocks: listed blocks per step.
        divides_block: whether several tiles share the list of a query block.
        expressions: the mask and the transform of scores, if they are expressions.
    """

    pattern_template: str
    lengths: Lengths
    partial_range: bool
    skip_masked: bool
    block_steps: int
    step_blocks: int
    divides_block: bool
    expressions: ExpressionsFlags


@dataclass(frozen=True)
class AttentionMmaSyncFlags(PatternFlags):
    """Template parameters of attention/mma_sync.cu.j2.

    Attributes:
        paired: whether the kernel waits for K and V of a step together.
        overlaps: whether the exponentials of a group of keys overlap P V of the previous group.
        q_beyond: whether Q extends beyond the slots of the ring that are filled last.
        rereads_thread: whether the thread index is read at each use, to save registers.
        q_in_registers: whether Q stays in registers.
    """

    paired: bool
    overlaps: bool
    q_beyond: bool
    rereads_thread: bool
    q_in_registers: bool


@dataclass(frozen=True)
class Fp8Flags:
    """Template parameters of FP8 inputs.

    Attributes:
        piece_columns: columns of one P V product.
        sums_by_mma: whether P V also computes the row sums of P.
        first_keys: keys of the first wgmma of Q K^T.
        other_keys: keys of the second wgmma; 0 if there is none.
        fence_scores: whether a register fence keeps scores live across the step's P V, which shares their registers.
        narrow_v: whether rows of V^T in shared memory are narrower than the widest swizzle.
        dequantizes: whether scores are first multiplied by their scales.
    """

    piece_columns: int
    sums_by_mma: bool
    first_keys: int
    other_keys: int
    fence_scores: bool
    narrow_v: bool
    dequantizes: bool


@dataclass(frozen=True)
class AttentionSm90aFlags(PatternFlags):
    """Template parameters of attention/sm90a.cu.j2.

    Attributes:
        consumers: warpgroups that compute.
        sub_tiles: parts of a tile with their own key blocks.
        tile_stages: stages of Q in shared memory.
        packed: whether rows are not consecutive queries of one head.
        asks_heads: whether the kernel needs the head of a row within its pack.
        q_in_registers: whether all of Q is kept in registers.
        q_slices: slices of 16 columns of Q in registers; 0 in FP8.
        o_aliases_q: whether O is staged in the buffer of Q.
        surplus_first: whether surplus rows of a head's tiles lie before query 0.
        takes_work: whether the key blocks of a tile depend on its work tile: on its range of them, or on its round.
        may_be_empty: whether a tile or a sub-tile may have no step.
        clears_values: whether the producer clears what a step of V holds behind the end of the keys.
        uses_setmaxnreg: whether setmaxnreg moves registers from the producer to the consumers.
        product: row of the type of the products' operands.
        e4m3_cache: whether K and V are e4m3, which the producer converts.
        pack: function that packs two elements of the result.
        fp8: flags of FP8 inputs; None for other types.
    """

    consumers: int
    sub_tiles: int
    tile_stages: int
    packed: bool
    asks_heads: bool
    q_in_registers: bool
    q_slices: int
    o_aliases_q: bool
    surplus_first: bool
    takes_work: bool
    may_be_empty: bool
    clears_values: bool
    uses_setmaxnreg: bool
    product: DType
    e4m3_cache: bool
    pack: str
    fp8: Fp8Flags | None


@dataclass(frozen=True)
class EpilogueFlags(Flags):
    """The epilogue: operations on a product before it is stored.

    Attributes:
        adds_bias: whether a bias is added.
        activation: name of the activation, and of the function that computes it.
        formula: C as a formula.
    """

    adds_bias: bool
    activation: str
    formula: str


@dataclass(frozen=True)
class WgmmaFlags(Flags):
    """Template parameters of kernels that only vary the N of their wgmma."""

    mma_n: int


@dataclass(frozen=True)
class SddmmSm90aFlags(WgmmaFlags):
    """Template parameters of bsr_sddmm/sm90a.cu.j2.

    Attributes:
        by_rows: whether warpgroups split a tile by rows.
        a_columns: whether A is stored by columns.
        b_columns: whether B is.
    """

    by_rows: bool
    a_columns: bool
    b_columns: bool


@dataclass(frozen=True)
class SpmmFlags(WgmmaFlags):
    """Template parameters of kernels with B on the N side of a wgmma; all of those of bsr_spmm/sm90a_pairs.cu.j2.

    Attributes:
        by_columns: whether B is stored by columns.
        epilogue: flags of the epilogue.
    """

    by_columns: bool
    epilogue: EpilogueFlags


@dataclass(frozen=True)
class SpmmTransposedFlags(Flags):
    """Template parameters of bsr_spmm/sm90a_transposed.cu.j2.

    Attributes:
        product: flags of the operands and the product.
        in_bands: whether tiles are computed in bands of column tiles, without a dynamic scheduler.
        by_rows: whether warpgroups split a tile by rows.
    """

    product: SpmmFlags
    in_bands: bool
    by_rows: bool


@dataclass(frozen=True)
class SchedulerFlags(Flags):
    """How thread blocks of BSR x dense get their work.

    Attributes:
        in_bands: whether tiles are computed in bands of column tiles, without a dynamic scheduler.
        work: noun for the work of a thread block: ``tile`` or ``unit``.
        work_type: its C++ type.
        step_blocks: most blocks of A per step.
    """

    in_bands: bool
    work: str
    work_type: str
    step_blocks: int


@dataclass(frozen=True)
class SpmmSm90aFlags(Flags):
    """Template parameters of bsr_spmm/sm90a.cu.j2.

    Attributes:
        product: flags of the operands and the product.
        by_rows: whether warpgroups split a tile by rows.
        schedule: flags of the scheduler.
        a_row_bytes: bytes per row of an A tile.
        clips: whether a tile that extends beyond B skips the columns outside: they are not loaded, and a warpgroup with
            only such columns does not multiply. A warpgroup with other columns too multiplies the previous contents of
            the stage, and the store of C skips these columns.
    """

    product: SpmmFlags
    by_rows: bool
    schedule: SchedulerFlags
    a_row_bytes: int
    clips: bool


@dataclass(frozen=True)
class SpmmSwapAbFlags(WgmmaFlags):
    """Template parameters of bsr_spmm/sm90a_swap_ab.cu.j2.

    Attributes:
        a_row_bytes: bytes per row of a block of A.
        by_columns: whether B is stored by columns.
        copies_b: whether a prologue copies B by rows.
        schedule: flags of the scheduler.
        epilogue: flags of the epilogue.
    """

    a_row_bytes: int
    by_columns: bool
    copies_b: bool
    schedule: SchedulerFlags
    epilogue: EpilogueFlags


@dataclass(frozen=True)
class BsrFp8Flags(WgmmaFlags):
    """Template parameters of FP8 products of BSR matrices by wgmma.

    Attributes:
        sums: how products are accumulated.
    """

    sums: Sums


@dataclass(frozen=True)
class SddmmFp8Flags(Flags):
    """Template parameters of bsr_sddmm/sm90a_fp8.cu.j2.

    Attributes:
        fp8: flags of FP8 products.
        row_scales: whether rows of A and of B have their own scales.
        scaling: description of the scales.
        work: description of the work of a thread block.
    """

    fp8: BsrFp8Flags
    row_scales: bool
    scaling: str
    work: str


@dataclass(frozen=True)
class SpmmFp8Flags(Flags):
    """Template parameters of bsr_spmm/sm90a_fp8.cu.j2.

    Attributes:
        fp8: flags of FP8 products.
        block_scales: whether blocks of A and of columns of B have their own scales.
        scaling: description of the scales.
        schedule: flags of the scheduler.
    """

    fp8: BsrFp8Flags
    block_scales: bool
    scaling: str
    schedule: SchedulerFlags


@dataclass(frozen=True)
class SpmmGatheredFlags(WgmmaFlags):
    """Template parameters of bsr_spmm/sm90a_gathered.cu.j2; ``a_row_bytes``: bytes per row of a block of A."""

    a_row_bytes: int


@dataclass(frozen=True)
class SpmmGatheredMmaFlags(Flags):
    """Template parameters of bsr_spmm/sm90a_gathered_mma.cu.j2; ``words_bytes``: bytes of a packet for two rounds."""

    words_bytes: int


@dataclass(frozen=True)
class MmaSyncFp8Flags:
    """Template parameters of FP8 products of BSR matrices by mma.sync.

    Attributes:
        sums: how products are accumulated.
        element: C++ type of the elements of C.
        scaling: description of the scales.
        one_scale: whether A and B have a single scale each; the store of C multiplies by both.
    """

    sums: Sums
    element: str
    scaling: str
    one_scale: bool


@dataclass(frozen=True)
class SddmmMmaFlags(Flags):
    """Template parameters of bsr_sddmm/mma.cu.j2.

    Attributes:
        fp8: flags of FP8 operands; None for other types.
        row_scales: whether rows of A and of B have their own scales, in FP8.
    """

    fp8: MmaSyncFp8Flags | None
    row_scales: bool


@dataclass(frozen=True)
class SpmmMmaFlags(Flags):
    """Template parameters of bsr_spmm/mma.cu.j2.

    Attributes:
        one_slice: whether a step has one slice.
        by_columns: whether B is stored by columns.
        some_copy_a: whether an A tile has fewer chunks than a thread block has threads.
        fp8: flags of FP8 operands; None for other types.
        block_scales: whether blocks of A and of columns of B have their own scales, in FP8.
    """

    one_slice: bool
    by_columns: bool
    some_copy_a: bool
    fp8: MmaSyncFp8Flags | None
    block_scales: bool


@dataclass(frozen=True)
class SpmmFewColumnsFlags(Flags):
    """Template parameters of bsr_spmm/sm90a_few_columns.cu.j2.

    Attributes:
        a_words: 32-bit words of a row of A that a lane loads for a step: 2 or 4.
        b_words: 32-bit words of B of one load of a lane, of a row or, if it is stored by columns, of a column: 1, 2 or
            4.
        by_columns: whether B is stored by columns.
    """

    a_words: int
    b_words: int
    by_columns: bool


@dataclass(frozen=True)
class SpmmGemvFlags(Flags):
    """Template parameters of bsr_spmm/gemv.cu.j2.

    Attributes:
        words: 32-bit words of a lane's part of a row of A, or of a column of B, in a step: 2 or 4.
        accumulate: whether c is added.
        epilogue: flags of the epilogue.
    """

    words: int
    accumulate: bool
    epilogue: EpilogueFlags


@dataclass(frozen=True)
class SpmmWmmaFlags(Flags):
    """Template parameters of bsr_spmm/wmma.cu.j2.

    Attributes:
        tma: whether TMA loads tiles.
        has_ring: whether tiles are loaded asynchronously, into a ring.
        by_columns: whether B is stored by columns.
        some_copy_a: whether an A tile has fewer chunks than its threads can copy.
    """

    tma: bool
    has_ring: bool
    by_columns: bool
    some_copy_a: bool


@dataclass(frozen=True)
class AttentionBackwardPatternFlags(PatternFlags):
    """Template parameters of all kernels of attention_backward/.

    Attributes:
        masks_pairs: whether the pattern hides some pairs within visible blocks.
        transposes: whether the prologue transposes lists.
        fixed_point: whether sums of dQ are of integers.
    """

    masks_pairs: bool
    transposes: bool
    fixed_point: bool


@dataclass(frozen=True)
class AttentionBackwardFlags(AttentionBackwardPatternFlags):
    """Template parameters of the kernels of dQ, dK and dV.

    Attributes:
        divides_key_blocks: whether key blocks are counted apart from tiles: several tiles share a block, or sequences
            are packed.
        several_lists: whether partial and full blocks have separate lists, with counts.
    """

    divides_key_blocks: bool
    several_lists: bool


@dataclass(frozen=True)
class AttentionBackwardSm90aFlags(Flags):
    """Template parameters of the kernels of dQ, dK and dV for sm_90a.

    Attributes:
        walk: flags of all kernels.
        consumers: warpgroups that compute.
        divides_products: whether the consumers split the products of the same keys (dK and dV).
        short_v_ring: whether the ring of V has fewer stages than that of K (dQ).
        dq_queries: queries per step whose dQ a warpgroup computes, if one kernel has all gradients; else 0.
        row_bytes: bytes per row of a column group in shared memory: 128, or 64 if one kernel has all gradients.
        steps_first: whether each step comes for all query heads of a K/V head in turn, not head by head.
        takes_turns: whether tiles add to dQ in the order of their index.
    """

    walk: AttentionBackwardFlags
    consumers: int
    divides_products: bool = False
    short_v_ring: bool = False
    dq_queries: int = 0
    row_bytes: int = 128
    steps_first: bool = False
    takes_turns: bool = False


@dataclass(frozen=True)
class AttentionBackwardMmaSyncFlags(Flags):
    """Template parameters of the kernels of dQ, dK and dV by mma.sync.

    Attributes:
        walk: flags of all kernels.
        divides_sums: whether separate thread blocks accumulate dK and dV of the same keys (dK and dV).
        q_in_registers: whether Q and dO stay in registers (dQ).
    """

    walk: AttentionBackwardFlags
    divides_sums: bool
    q_in_registers: bool


@dataclass(frozen=True)
class AuxSumFlags:
    """The sums for one read of a tensor in a score.

    Attributes:
        name: name of the kernel parameter with the sums.
        number: number of the read, the suffix of function names.
        element: text of the element in the score.
        lines: the pairs that share an element: rows, columns or diagonals.
        slope: the derivative of the score with respect to the element; 1 if its text is empty.
        slope_lines: its text, as lines of a comment.
    """

    name: str
    number: int
    element: str
    lines: str
    slope: ExpressionFlags
    slope_lines: tuple[str, ...]


@dataclass(frozen=True)
class AttentionBackwardAuxFlags(Flags):
    """Template parameters of the kernel for gradients of a score's tensors.

    Attributes:
        pattern: flags of all kernels of gradients.
        aux_sums: the sums that it computes.
        has_pairs: whether some sums go through shared memory.
    """

    pattern: AttentionBackwardPatternFlags
    aux_sums: tuple[AuxSumFlags, ...]
    has_pairs: bool


@dataclass(frozen=True)
class SelectTopkFlags(Flags):
    """Template parameters of select_topk/select_topk.cu.j2: none beyond those of the plan."""


@dataclass(frozen=True)
class PagedFlags(Flags):
    """Template parameters of paged_attention/mma_sync.cu.j2.

    Attributes:
        product: row of the type of the products' operands.
        e4m3_cache: whether K and V are e4m3.
        pack: function that packs two elements of the result.
        q_in_registers: whether Q stays in registers.
    """

    product: DType
    e4m3_cache: bool
    pack: str
    q_in_registers: bool


@dataclass(frozen=True)
class KeyListsBackwardFlags(Flags):
    """Template parameters of key_lists_backward/sm90a.cu.j2.

    Attributes:
        dq_queries: rows of a step whose dQ one product has.
        in_pieces: whether a tile has several blocks, and an entry a bit for each.
    """

    dq_queries: int
    in_pieces: bool


@dataclass(frozen=True)
class KeyListsForwardFlags(Flags):
    """Template parameters of key_lists_forward/sm90a.cu.j2.

    Attributes:
        paged: whether K and V are in pages.
    """

    paged: bool


@dataclass(frozen=True)
class LookedFlags:
    """A part of a mask that is evaluated as a whole, as templates print it.

    Attributes:
        name: name of its range over a block.
        ctype: C++ type of the range.
        over: function that computes the range.
        function: name of the function that computes one value.
        index: parameter of that function, in C++: the query or the key; empty if it depends on neither.
        value: C++ type of the value.
        text: text of the part.
        parts: statements before the value.
        result: the value.
    """

    name: str
    ctype: str
    over: str
    function: str
    index: str
    value: str
    text: str
    parts: tuple[Statement, ...]
    result: str


@dataclass(frozen=True)
class RangesFlags:
    """A mask over a whole block.

    Attributes:
        rows: parts evaluated at each query.
        columns: parts evaluated at each key.
        functions: these parts, and parts that depend on neither.
        statements: statements over these parts.
        result: value of the mask.
    """

    rows: tuple[LookedFlags, ...]
    columns: tuple[LookedFlags, ...]
    functions: tuple[LookedFlags, ...]
    statements: tuple[Statement, ...]
    result: str


@dataclass(frozen=True)
class BlockMaskFlags(Flags):
    """Template parameters of block_mask/block_mask.cu.j2.

    Attributes:
        expressions: the mask of a pair.
        mask_ranges: the mask of a block.
        row_parameter: parameter with the ranges of queries, in C++; empty if there are none.
        column_parameter: parameter with the ranges of keys, in C++; empty if there are none.
        row_argument: argument for ``row_parameter``, in C++.
        column_argument: argument for ``column_parameter``, in C++.
    """

    expressions: ExpressionsFlags
    mask_ranges: RangesFlags
    row_parameter: str
    column_parameter: str
    row_argument: str
    column_argument: str


@dataclass(frozen=True)
class QuantizeFlags(Flags):
    """Template parameters of quantize kernels.

    Attributes:
        codes_name: type of the codes.
        chunk_type: C++ type of a chunk of a loaded row.
        rows_type: C++ type of a head's rows.
        rotary_pairs: ``half`` or ``interleaved``, the pairs of a row; empty without the rotary embedding.
        column_statistic: ``mean`` or ``channel_scale``, which precedes quantization; empty if there is none.
        product: whether the kernel computes products of rows and the mean.
        given_scale: whether the scales of rows are given, rather than computed by the kernel.
        scale_of_rows: whether each row has its own scale, rather than a block of rows.
        joins_warps: whether a thread block combines one number per warp in shared memory.
        signs: signs of columns before the rotation, in C++; empty without rotation.
    """

    codes_name: str
    chunk_type: str
    rows_type: str
    rotary_pairs: str
    column_statistic: str
    product: bool
    given_scale: bool
    scale_of_rows: bool
    joins_warps: bool
    signs: tuple[str, ...]


@dataclass(frozen=True)
class TileCopyFlags(Flags):
    """Template parameters of tile_copy/tile_copy.cu.j2: whether TMA loads tiles, and whether they go to a ring."""

    tma: bool
    ring: bool
