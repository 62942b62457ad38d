"""FP8 in the plan of an sm_90a attention kernel: one-byte operands, their scales, V^T.

WGMMA's 8-bit operands are K-major, so the kernel takes V transposed, with its keys permuted such that the scores of a
thread form an A operand.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.flags import Fp8Flags
from codegen.plan import Constant, Param, SharedLayout, TensorMap, i32, i64, pointer, require, require_left_out
from codegen.plans.attention.params import check_head_dim
from codegen.plans.attention.rows import SWIZZLE
from codegen.plans.attention.sizes import Sizes
from codegen.plans.lengths import lengths_of
from codegen.select.defaults import has_few_registers
from codegen.spec import AttentionSpec
from codegen.tile_rules import Fits, Rule, check_tile, listed

STEPS = (64, 128, 256)
FMA_GROUPS = 2
SUM_COLUMNS = 8
"""Extra rows after those of V^T in shared memory: one row of ones, so that P V also gives the sums of P's rounded rows,
and seven rows of zeros, as wgmma has columns in multiples of eight."""
PIECE = 64  # columns of O that are computed at a time, if registers do not suffice for all
MOST_KEYS_PENDING = 128  # most keys per step, if P V of several steps has its own registers
UNWRITTEN = ("share_kv_loads", "kv_splits", "query_grouping", "l2_lockstep", "pad_heads")


def is_fp8(spec: AttentionSpec) -> bool:
    """Whether a spec's inputs are FP8."""
    return spec.is_fp8


TILE: tuple[Rule[AttentionSpec], ...] = (
    Fits(
        "n",
        lambda spec: not is_fp8(spec) or spec.tile.n in STEPS,
        lambda spec: f"allowed with dtype {spec.dtype}: {listed(STEPS)}",
    ),
    Fits(
        "n",
        lambda spec: not is_fp8(spec) or spec.tile.n == STEPS[0] or not has_few_registers(spec),
        lambda spec: (
            f"with pack_gqa {spec.pack_gqa}, a score that reads a table of four axes leaves registers for {STEPS[0]}"
        ),
    ),
)


def check_fp8_tile(spec: AttentionSpec) -> None:
    """Reject an FP8 spec that the kernel cannot support.

    Raises:
        SpecError: names the field.
    """
    n = spec.tile.n
    check_head_dim(spec, f"dtype {spec.dtype}")
    require_left_out(spec, UNWRITTEN, f"dtype {spec.dtype}")
    if spec.head_dim > 128:  # a partial O in addition to the tile's O spills
        require_left_out(spec, ("stream_k_tail",), f"dtype {spec.dtype} and head_dim {spec.head_dim}")
    check_tile(spec, TILE)
    every = spec.accumulate_every
    few = f"is {every}; above 1, registers suffice for tile.n up to 128 and head_dim up to 128"
    require(every < 2 or (n <= MOST_KEYS_PENDING and spec.head_dim <= 128), "accumulate_every", few)


def fp8_flags(sizes: Sizes) -> Fp8Flags:
    """Template parameters."""
    spec = sizes.spec
    return Fp8Flags(
        piece_columns=output_columns(spec) // pieces(spec),
        sums_by_mma=sum_columns(spec) > 0,
        first_keys=first_keys(spec),
        other_keys=spec.tile.n - first_keys(spec),
        fence_scores=fences_scores(spec),
        narrow_v=v_group_keys(sizes) < SWIZZLE,
        dequantizes=spec.softcap is not None or spec.score is not None,
    )


def v_group_keys(sizes: Sizes) -> int:
    """Keys per row of V^T in shared memory: those of a load, at most 128."""
    return min(SWIZZLE, sizes.spec.tile.n // sizes.step_blocks)


def scale_keys(sizes: Sizes) -> int:
    """Keys of a step that share a scale of K."""
    return min(sizes.spec.scale_rows.k, sizes.spec.tile.n // sizes.step_blocks)


def output_columns(spec: AttentionSpec) -> int:
    """Columns of the P V product: those of O, plus SUM_COLUMNS for the row sums of P."""
    return spec.head_dim + sum_columns(spec)


def sum_columns(spec: AttentionSpec) -> int:
    """Columns of P V after those of O, for row sums; 0 if registers are few and O is computed in pieces."""
    fits = spec.head_dim + SUM_COLUMNS < spec.tile.n or spec.accumulate_every != 1
    return SUM_COLUMNS if spec.head_dim <= 128 and fits else 0


def pieces(spec: AttentionSpec) -> int:
    """Pieces of O's columns for which P V is computed one after the other."""
    return 1 if spec.head_dim <= 128 or spec.accumulate_every == 0 else spec.head_dim // PIECE


def first_keys(spec: AttentionSpec) -> int:
    """Keys of the first wgmma of Q K^T: the number of columns of P V, if registers are shared."""
    return min(spec.tile.n, output_columns(spec) // pieces(spec)) if fences_scores(spec) else spec.tile.n


def fences_scores(spec: AttentionSpec) -> bool:
    """Whether a register fence keeps scores live across the step's P V, which shares their registers.

    Without it the compiler spills if registers are few.
    """
    return spec.accumulate_every == 1


def v_bytes(sizes: Sizes) -> int:
    """Bytes of V^T per step."""
    return sizes.spec.tile.n * output_columns(sizes.spec)


def registers(spec: AttentionSpec) -> int:
    """Accumulators and fragments per consumer thread: scores, or weights and a step's output."""
    scores, weights = spec.tile.n // 2, spec.tile.n // 8
    output = output_columns(spec) // 2
    if spec.accumulate_every != 1:
        return output * (2 if spec.accumulate_every else 1) + max(scores, weights)
    return output + max(scores, weights + output // pieces(spec))


def producer_has_more(sizes: Sizes) -> bool:
    """Whether a producer thread spills with 40 registers: with lists of many scales, or two scales per sub-tile.

    One list of 64-key blocks does not spill if tiles are split and all sequences have full length; with 40 registers it
    is 1 to 2% faster (771 / 709 and 757 / 700 TFLOPS of topk32, H200).
    """
    spec, lists = sizes.spec, sizes.spec.pattern.lists
    blocks_of_64 = lists == 1 and v_group_keys(sizes) < SWIZZLE
    suffices = blocks_of_64 and spec.stream_k_tail and not lengths_of(spec).by_batch
    many_scales = lists > 0 and scale_keys(sizes) < SWIZZLE and not suffices
    return spec.head_dim > 128 or many_scales or (lists > 1 and sizes.sub_tiles > 1)


def fp8_constants(sizes: Sizes) -> list[Constant]:
    """Constants of FP8."""
    spec, every = sizes.spec, sizes.spec.accumulate_every
    keys, rows = v_group_keys(sizes), output_columns(spec)
    o_columns = SWIZZLE // DTYPES[spec.output].bytes
    return [
        Constant("kOutputs", rows // 2, "elements of O per thread"),
        Constant("kPieces", pieces(spec), "pieces of O's columns; their P V products run one after the other"),
        Constant("kPieceOutputs", rows // 2 // pieces(spec), "elements of a piece per thread"),
        Constant("kAccumulators", max(spec.tile.n, rows // pieces(spec)) // 2, "registers of scores, or of P V"),
        Constant("kFirstKeys", first_keys(spec), "keys of the first Q K^T product; a second product covers the others"),
        *([Constant("kSumColumns", SUM_COLUMNS, "columns of P V after those of O")] if sum_columns(spec) else []),
        Constant("kOColumns", o_columns, "columns of a group of O: one 128-byte swizzled row"),
        Constant("kOGroups", o_groups(spec), "column groups of O"),
        Constant("kVGroupKeys", keys, "keys per group of V^T, one byte each: one swizzled row"),
        *([Constant("kVGroups", spec.tile.n // keys, "groups of keys of a step")] if asks_groups(sizes) else []),
        Constant("kVGroupBytes", keys * rows, "bytes per group of V^T"),
        Constant("kVBytes", v_bytes(sizes), "bytes of V^T of one step"),
        Constant("kVLoadBytes", spec.tile.n * spec.head_dim, "bytes of V^T per step that the copies load"),
        *([Constant("kAccumulateEvery", every, "steps whose P V the tensor core accumulates")] if every > 1 else []),
        Constant("kQScaleRows", spec.scale_rows.q, "rows of Q that share a scale"),
        Constant("kKScaleRows", spec.scale_rows.k, "rows of K that share a scale"),
        Constant("kScaleKeys", scale_keys(sizes), "keys of a step that share a scale"),
        Constant("kScaleParts", spec.tile.n // scale_keys(sizes), "parts of a step, each with its own scale"),
        Constant(
            "kFmaGroups", fma_groups(spec), "groups of 16 keys, of every four, that compute a quarter of 2^x with FMA"
        ),
    ]


def fma_groups(spec: AttentionSpec) -> int:
    """Groups of 16 keys, of every four, in which FMA computes a quarter of the exponentials.

    0 if fp32 weights are summed: exponentials by FMA are never 0.
    """
    return FMA_GROUPS if sum_columns(spec) else 0


def asks_groups(sizes: Sizes) -> bool:
    """Whether the kernel loops over groups of keys: those of one load, or of the row of ones."""
    return sizes.step_blocks == 1 or sum_columns(sizes.spec) > 0


def o_groups(spec: AttentionSpec) -> int:
    """Column groups of O."""
    return -(-spec.head_dim * DTYPES[spec.output].bytes // SWIZZLE)


def o_bytes(spec: AttentionSpec) -> int:
    """Bytes of a staged tile of O."""
    return o_groups(spec) * spec.tile.m * SWIZZLE


def fp8_params() -> tuple[Param, ...]:
    """Parameters of the scales, and the last column of a head."""
    return (*scale_params(), i32("last_column", "last column of a head"))


def scale_params() -> tuple[Param, ...]:
    """Parameters of the scales."""
    return (
        *_scale("q", "of Q", "row", "group of rows"),
        *_scale("k", "of K", "row", "group of rows"),
        *_scale("v", "of V", "column", "column"),
    )


def _scale(name: str, of: str, axis: str, unit: str) -> tuple[Param, ...]:
    return (
        pointer(f"{name}_scale", "float", f"scales {of}: value = code * scale"),
        i64(f"{name}_scale_batch_stride", "batch stride, in elements (0: shared)"),
        i64(f"{name}_scale_head_stride", "head stride, in elements (0: shared)"),
        i32(f"{name}_scale_{axis}_stride", f"{unit} stride, in elements (0: shared)"),
    )


def add_scales(shared: SharedLayout, sizes: Sizes, depth: int) -> None:
    """Allocate the scales of the steps in flight in shared memory."""
    parts = sizes.spec.tile.n // scale_keys(sizes)
    shared.add("KScales", 4 * depth * parts, "scales of the keys in the K rings", align=4)


def fp8_maps(sizes: Sizes, maps: dict[str, TensorMap]) -> dict[str, TensorMap]:
    """Tensor maps of an FP8 kernel: columns of V^T are keys, and O is wider."""
    spec, keys = sizes.spec, v_group_keys(sizes)
    o_columns = SWIZZLE // DTYPES[spec.output].bytes
    return {
        "q_map": TensorMap(maps["q_map"].box, SWIZZLE, dtype=spec.dtype),
        "k_map": TensorMap(maps["k_map"].box, SWIZZLE, dtype=spec.dtype),
        "v_map": TensorMap((keys, spec.head_dim, 1, 1), keys, dtype=spec.dtype),
        "o_map": TensorMap((o_columns, *maps["o_map"].box[1:]), SWIZZLE, dtype=spec.output),
    }
