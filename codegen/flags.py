"""Values that only template text reads: instruction shapes, suffixes, features of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from codegen.expressions.cuda import Statement
from codegen.problem import Lengths

Value = int | str | bool | tuple[Any, ...] | None


@dataclass(frozen=True)
class Flags:
    """Base of the flags of a template, each a name in it; a field that is flags itself stands for all of its own."""

    def named(self) -> dict[str, Value]:
        """Return the names that a template is rendered with, and their values."""
        found: dict[str, Value] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            found |= value.named() if isinstance(value, Flags) else {field.name: value}
        return found


@dataclass(frozen=True)
class AuxFlags:
    """How a kernel looks a value of an aux tensor up.

    Attributes:
        name: of the tensor.
        declared: its type and sizes.
        dtype: of an element.
        value: type of the value, in C++.
        parameters: of the function, after the kernel's: its indices.
        place: what is added to the address, in elements.
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
        text: the expression; empty: there is none.
        row: what depends on the query alone.
        column: what depends on the key alone.
        used_row: what of ``row`` the rest names.
        used_column: what of ``column`` it names.
        pair: parts of the rest.
        result: the expression in terms of these.
        helpers: device functions that it calls.
        looks_up_keys: whether an element of a tensor depends on the key.
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
    """The mask of partial blocks, where it is an expression.

    Attributes:
        mask_expression: the expression.
        mask_lines: its text, in lines of a comment.
        shares_row_parts: whether lanes of a warp share what it asks of the queries of a step.
        shares_column_parts: the same of keys.
    """

    mask_expression: ExpressionFlags
    mask_lines: tuple[str, ...]
    shares_row_parts: bool
    shares_column_parts: bool


@dataclass(frozen=True)
class PairFlags(Flags):
    """The mask of the pairs that a built-in pattern hides.

    Attributes:
        pair_expression: the expression.
        pair_lines: its text, in lines of a comment.
    """

    pair_expression: ExpressionFlags
    pair_lines: tuple[str, ...]


@dataclass(frozen=True)
class ScoreFlags(Flags):
    """What becomes of scores before the mask, where that is an expression.

    Attributes:
        score_expression: log2(e) times the expression.
        score_lines: its text, in lines of a comment.
        slope_expression: its derivative by the score, in gradients, if that is not 1.
        slope_lines: the text of that.
    """

    score_expression: ExpressionFlags
    score_lines: tuple[str, ...]
    slope_expression: ExpressionFlags
    slope_lines: tuple[str, ...]


@dataclass(frozen=True)
class ExpressionsFlags(Flags):
    """The expressions of a spec.

    Attributes:
        mask: that of partial blocks.
        pairs: that of the pairs of a built-in pattern.
        score: that of scores.
        expression_helpers: device functions and constants that they need.
        aux: the tensors that they look values up in.
    """

    mask: MaskFlags
    pairs: PairFlags
    score: ScoreFlags
    expression_helpers: tuple[str, ...]
    aux: tuple[AuxFlags, ...]


@dataclass(frozen=True)
class PatternFlags(Flags):
    """Template parameters of patterns, which all kernels of attention and of its gradients include.

    Attributes:
        pattern_template: the pattern's template.
        lengths: lengths of the sequences.
        partial_range: whether a ``KvBlockIterator`` can be restricted to some of its blocks.
        skip_masked: whether warpgroups skip steps of their tile without visible keys.
        block_steps: steps in a listed block.
        step_blocks: listed blocks of a step.
        divides_block: whether a tile has a part of the queries that share a list.
        expressions: the mask of partial blocks, and what becomes of scores, where they are expressions.
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
        paired: whether K and V of a step are waited for together.
        overlaps: whether exponentials of a group of keys overlap P V of the one before.
        q_beyond: whether Q extends beyond the slots of the ring that are filled last.
        rereads_thread: whether the thread's number is read at each use, as registers are few.
        q_in_registers: whether Q is in registers throughout.
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
        piece_columns: columns of one product P V.
        sums_by_mma: whether P V has the sums of P's rows.
        first_keys: keys of the first wgmma of Q K^T.
        other_keys: keys of the second one; 0 without.
        fence_scores: whether a register fence keeps scores live across the step's P V, which shares their registers.
        narrow_v: whether rows of V^T in shared memory are narrower than the widest swizzle.
        dequantizes: whether scores are multiplied by their scales before anything else.
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
        sub_tiles: parts of a tile with key blocks of their own.
        tile_stages: stages of Q in shared memory.
        packed: whether rows are anything but consecutive queries of one head.
        asks_heads: whether the kernel asks which head of its pack a row is of.
        q_in_registers: whether all of Q is kept in registers.
        q_slices: slices of 16 columns of Q that are kept there; 0 in FP8.
        o_aliases_q: whether O is staged where Q was.
        surplus_first: whether surplus rows of a head's tiles lie before query 0.
        takes_work: whether the key blocks of a tile depend on the work tile: on its part of them, or on its round.
        may_be_empty: whether a tile or a sub-tile may have no step.
        uses_setmaxnreg: whether setmaxnreg moves registers from the producer to the consumers.
        fp8: what FP8 inputs change; None of others.
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
    uses_setmaxnreg: bool
    fp8: Fp8Flags | None


@dataclass(frozen=True)
class EpilogueFlags(Flags):
    """What is done to a product before it is stored.

    Attributes:
        adds_bias: whether a bias is added.
        activation: name of the activation, and of the function that computes it.
        formula: C as a formula.
        bias_rows: what a bias is, in words.
        epilogue: the template of a consumer's end of a tile.
    """

    adds_bias: bool
    activation: str
    formula: str
    bias_rows: str
    epilogue: str


@dataclass(frozen=True)
class WgmmaFlags(Flags):
    """What kernels ask whose only choice is the N of their wgmma."""

    mma_n: int


@dataclass(frozen=True)
class SddmmSm90aFlags(WgmmaFlags):
    """What bsr_sddmm/sm90a.cu.j2 asks: ``by_rows``, whether parts of a tile lie one above the other, too."""

    by_rows: bool


@dataclass(frozen=True)
class SpgemmSm90aFlags(WgmmaFlags):
    """What bsr_spgemm/sm90a.cu.j2 asks: ``tile_order``, the template of the order of C's tiles, too."""

    tile_order: str


@dataclass(frozen=True)
class SpmmFlags(WgmmaFlags):
    """What kernels ask in which B is on the N side of a wgmma: bsr_spmm/sm90a_pairs.cu.j2 asks no more.

    Attributes:
        b_tile: the template of what a B tile is.
        b_major: whether it is MN-major or K-major, in names of instructions.
        b_and_c: how B and C are stored, in words.
        grouped: operands that lie in column groups, in words.
        b_columns: how B lies, where it does not, in words.
        epilogue: what is done to the product.
    """

    b_tile: str
    b_major: str
    b_and_c: str
    grouped: str
    b_columns: str
    epilogue: EpilogueFlags


@dataclass(frozen=True)
class SpmmTransposedFlags(Flags):
    """What bsr_spmm/sm90a_transposed.cu.j2 asks.

    Attributes:
        product: operands and product.
        tile_place: the template of the order of tiles.
        tile_rows: the parameter that says how many rows of tiles there are.
        by_rows: whether the warpgroups' parts of a tile lie one above the other.
    """

    product: SpmmFlags
    tile_place: str
    tile_rows: str
    by_rows: bool


@dataclass(frozen=True)
class SchedulerFlags(Flags):
    """How thread blocks of BSR x dense get their work.

    Attributes:
        scheduler: the template of the scheduler and of the producer.
        work: what a thread block works on: a tile, or a unit.
        work_type: its type.
        walk_from: what a consumer needs to go through it.
        next_block: how the producer goes on to the block of A that it loads next, in C++.
    """

    scheduler: str
    work: str
    work_type: str
    walk_from: str
    next_block: str


@dataclass(frozen=True)
class SpmmSm90aFlags(Flags):
    """What bsr_spmm/sm90a.cu.j2 asks.

    Attributes:
        product: operands and product.
        tile_place: the template of the order of tiles.
        tile_rows: the parameter that says how many rows of tiles there are.
        by_rows: whether the warpgroups' parts of a tile lie one above the other.
        schedule: how thread blocks get their tiles.
        a_row_bytes: bytes of a row of a tile of A.
        b_bytes: bytes of a B tile, in C++.
        clips: where a tile reaches beyond B, whether columns that are not there are neither loaded nor, by a warpgroup
            that has no others, multiplied. One that has others multiplies what its stage had there before, and the
            store of C leaves it out.
    """

    product: SpmmFlags
    tile_place: str
    tile_rows: str
    by_rows: bool
    schedule: SchedulerFlags
    a_row_bytes: int
    b_bytes: str
    clips: bool


@dataclass(frozen=True)
class SpmmSwapAbFlags(WgmmaFlags):
    """What bsr_spmm/sm90a_swap_ab.cu.j2 asks.

    Attributes:
        a_row_bytes: bytes of a row of a block of A.
        step_blocks: blocks of A of a step, at most.
        step: the template of a step.
        tile: the template of what a thread block works on.
        tile_place: the template of the order of tiles, where that is a tile.
        tile_rows: the parameter that says how many rows of tiles there are.
        b_tile: the template of what a B tile is.
        b_and_c: how B and C are stored, in words.
        copies_b: whether B is copied by rows before.
        schedule: how thread blocks get their work.
        epilogue: what is done to the product.
    """

    a_row_bytes: int
    step_blocks: int
    step: str
    tile: str
    tile_place: str
    tile_rows: str
    b_tile: str
    b_and_c: str
    copies_b: bool
    schedule: SchedulerFlags
    epilogue: EpilogueFlags


@dataclass(frozen=True)
class BsrFp8Flags(WgmmaFlags):
    """What products of BSR matrices in FP8 ask.

    Attributes:
        products: the template of how products are summed up.
        piece: the template of how a piece of C goes through shared memory.
        pipeline: the template of how a consumer's products follow each other, in words.
    """

    products: str
    piece: str
    pipeline: str


@dataclass(frozen=True)
class SddmmFp8Flags(Flags):
    """What bsr_sddmm/sm90a_fp8.cu.j2 asks.

    Attributes:
        fp8: products and pieces.
        row_scales: whether rows of A and of B have scales of their own.
        scaling: what the scales are, in words.
        work: what a thread block works on, in words.
    """

    fp8: BsrFp8Flags
    row_scales: bool
    scaling: str
    work: str


@dataclass(frozen=True)
class SpmmFp8Flags(Flags):
    """What bsr_spmm/sm90a_fp8.cu.j2 asks.

    Attributes:
        fp8: products and pieces.
        block_scales: whether blocks of A and of columns of B have scales of their own.
        scaling: what the scales are, in words.
        tile_place: the template of the order of tiles.
        tile_rows: the parameter that says how many rows of tiles there are.
        schedule: how thread blocks get their tiles.
    """

    fp8: BsrFp8Flags
    block_scales: bool
    scaling: str
    tile_place: str
    tile_rows: str
    schedule: SchedulerFlags


@dataclass(frozen=True)
class SpmmGatheredFlags(WgmmaFlags):
    """What bsr_spmm/sm90a_gathered.cu.j2 asks: ``a_row_bytes``, those of a row of a block of A, too."""

    a_row_bytes: int


@dataclass(frozen=True)
class SpmmGatheredMmaFlags(Flags):
    """What bsr_spmm/sm90a_gathered_mma.cu.j2 asks: ``words_bytes``, a packet's for two rounds of all warps."""

    words_bytes: int


@dataclass(frozen=True)
class MmaSyncFp8Flags:
    """What products of BSR matrices in FP8 by mma.sync ask.

    Attributes:
        multiply: the template of products and sums of a slice.
        strip: the template of C on its way out, by its type.
        element: C++ type of the elements of C.
        scaling: what the scales are, in words.
        one_scale: whether the scales of A and B are one each, by which C is multiplied on its way out.
    """

    multiply: str
    strip: str
    element: str
    scaling: str
    one_scale: bool


@dataclass(frozen=True)
class SddmmMmaFlags(Flags):
    """Template parameters of bsr_sddmm/mma.cu.j2.

    Attributes:
        fp8: products and strips of FP8 operands; None of others.
        row_scales: whether rows of A and of B have scales of their own, in FP8.
    """

    fp8: MmaSyncFp8Flags | None
    row_scales: bool


@dataclass(frozen=True)
class SpmmMmaFlags(Flags):
    """Template parameters of bsr_spmm/mma.cu.j2.

    Attributes:
        b_tile: the template of tiles in shared memory, by how B is stored.
        lanes: the template of where a lane's operands begin in them.
        b_and_c: how B and C are stored, in words.
        mainloop: the template of the main loop.
        by_columns: whether B is stored by columns.
        some_copy_a: whether an A tile has fewer chunks than there are threads.
        fp8: products and strips of FP8 operands; None of others.
        block_scales: whether blocks of A and of columns of B have scales of their own, in FP8.
    """

    b_tile: str
    lanes: str
    b_and_c: str
    mainloop: str
    by_columns: bool
    some_copy_a: bool
    fp8: MmaSyncFp8Flags | None
    block_scales: bool


@dataclass(frozen=True)
class SpmmFewColumnsFlags(Flags):
    """What bsr_spmm/sm90a_few_columns.cu.j2 asks.

    Attributes:
        a_words: 32-bit words of a row of A that a lane loads for a step: 2 or 4.
        b_words: those of a row of B: 1, 2 or 4.
    """

    a_words: int
    b_words: int


@dataclass(frozen=True)
class SpmmGemvFlags(Flags):
    """What bsr_spmm/gemv.cu.j2 asks.

    Attributes:
        words: 32-bit words of a lane's part of a row of A, or of a column of B, in a step: 2 or 4.
        accumulate: whether c is added.
        epilogue: what is done to the product.
    """

    words: int
    accumulate: bool
    epilogue: EpilogueFlags


@dataclass(frozen=True)
class SpmmWmmaFlags(Flags):
    """What bsr_spmm/wmma.cu.j2 asks.

    Attributes:
        load: the template of how tiles are loaded.
        b_load: the template of how all threads load them.
        mainloop: the template of the main loop.
        loaders: who loads, in words.
        tma: whether tiles come by TMA.
        by_columns: whether B is stored by columns.
        b_and_c: how B and C are stored, in words.
        some_copy_a: whether an A tile has fewer chunks than its threads can copy.
    """

    load: str
    b_load: str
    mainloop: str
    loaders: str
    tma: bool
    by_columns: bool
    b_and_c: str
    some_copy_a: bool


@dataclass(frozen=True)
class AttentionBackwardPatternFlags(PatternFlags):
    """Template parameters of all kernels of attention_backward/.

    Attributes:
        masks_pairs: whether the pattern hides some pairs of blocks that it shows.
        transposes: whether the prologue transposes lists.
    """

    masks_pairs: bool
    transposes: bool


@dataclass(frozen=True)
class AttentionBackwardFlags(AttentionBackwardPatternFlags):
    """Template parameters of the kernels of dQ, dK and dV.

    Attributes:
        divides_key_blocks: whether several tiles share the list of a key block.
        several_lists: whether lists are of partial and of full blocks, with counts.
    """

    divides_key_blocks: bool
    several_lists: bool


@dataclass(frozen=True)
class AttentionBackwardSm90aFlags(Flags):
    """Template parameters of the kernels of dQ, dK and dV for sm_90a.

    Attributes:
        walk: those of all kernels.
        consumers: warpgroups that compute.
        divides_products: whether the consumers divide the products of the same keys (dK and dV).
        short_v_ring: whether the ring of V has fewer stages than that of K (dQ).
        dq_queries: queries of a step whose dQ a warpgroup computes, where one kernel has all gradients; else 0.
    """

    walk: AttentionBackwardFlags
    consumers: int
    divides_products: bool = False
    short_v_ring: bool = False
    dq_queries: int = 0


@dataclass(frozen=True)
class AttentionBackwardMmaSyncFlags(Flags):
    """Template parameters of the kernels of dQ, dK and dV by mma.sync.

    Attributes:
        walk: those of all kernels.
        divides_sums: whether one thread block sums up dK of its keys and another one dV (dK and dV).
        q_in_registers: whether Q and dO are in registers throughout (dQ).
    """

    walk: AttentionBackwardFlags
    divides_sums: bool
    q_in_registers: bool


@dataclass(frozen=True)
class AuxSumFlags:
    """What is summed up for the elements of a tensor that a score reads in one place.

    Attributes:
        name: of the kernel's parameter with the sums.
        number: of the place, which names of functions end in.
        element: the element, as the score has it.
        lines: which pairs share it: rows, columns or diagonals.
        slope: the derivative of the score by it; without a text it is 1.
        slope_lines: its text, in lines of a comment.
    """

    name: str
    number: int
    element: str
    lines: str
    slope: ExpressionFlags
    slope_lines: tuple[str, ...]


@dataclass(frozen=True)
class AttentionBackwardAuxFlags(Flags):
    """Template parameters of the kernel of gradients of tensors of a score.

    Attributes:
        pattern: what all kernels of gradients ask.
        aux_sums: what is summed up.
        has_pairs: whether some of it goes through shared memory.
    """

    pattern: AttentionBackwardPatternFlags
    aux_sums: tuple[AuxSumFlags, ...]
    has_pairs: bool


@dataclass(frozen=True)
class SelectTopkFlags(Flags):
    """What select_topk/select_topk.cu.j2 asks beside the plan: nothing."""


@dataclass(frozen=True)
class LookedFlags:
    """A part of a mask that is evaluated as a whole, as templates print it.

    Attributes:
        name: of what it is over a block.
        ctype: type of that.
        over: function that finds it.
        function: name of the function of one value.
        index: parameter of that, in C++: the query or the key; empty where neither matters.
        value: type of the value.
        text: the part.
        parts: statements that lead to the value.
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
        rows: what of it is looked at of queries.
        columns: what of it is looked at of keys.
        functions: these, and what neither changes.
        statements: what is made of them.
        result: what the mask is.
    """

    rows: tuple[LookedFlags, ...]
    columns: tuple[LookedFlags, ...]
    functions: tuple[LookedFlags, ...]
    statements: tuple[Statement, ...]
    result: str


@dataclass(frozen=True)
class BlockMaskFlags(Flags):
    """What block_mask/block_mask.cu.j2 asks.

    Attributes:
        expressions: the mask of a pair.
        mask_ranges: the mask of a block.
        row_parameter: the parameter that is looked at of queries, in C++; empty without, as are the next three.
        column_parameter: the same of keys.
        row_argument: the argument for it, in C++.
        column_argument: likewise.
    """

    expressions: ExpressionsFlags
    mask_ranges: RangesFlags
    row_parameter: str
    column_parameter: str
    row_argument: str
    column_argument: str


@dataclass(frozen=True)
class QuantizeFlags(Flags):
    """What the templates of quantize kernels ask.

    Attributes:
        codes_name: type of the codes.
        kept_piece: the template of what a thread keeps of a row.
        chunk_type: type of a chunk of a loaded row, in C++.
        rows_type: type of a head's rows, in C++.
        rotary_pairs: the template that rotates the pairs of a row; empty without the rotary embedding.
        column_statistic: the template of what is found of each column first; empty without.
        product: whether rows are multiplied by the mean.
        given_scale: the template of a row's scale where that is given; empty if it is found.
        scale_of_rows: whether each row has a scale, and not a block of them.
        joins_warps: whether a thread block has a number of each warp in shared memory.
        signs: signs of columns before the rotation, in C++; none without.
    """

    codes_name: str
    kept_piece: str
    chunk_type: str
    rows_type: str
    rotary_pairs: str
    column_statistic: str
    product: bool
    given_scale: str
    scale_of_rows: bool
    joins_warps: bool
    signs: tuple[str, ...]


@dataclass(frozen=True)
class TileCopyFlags(Flags):
    """What tile_copy/tile_copy.cu.j2 asks: whether tiles come by TMA, and whether they come into a ring."""

    tma: bool
    ring: bool
