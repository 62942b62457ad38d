"""Changes by input type in an mma.sync attention kernel: FP8 has one-byte operands, scales, and V^T.

The order of V's keys is the same as for wgmma: the A operand of m16n8k32 has the same columns per thread.
"""

from __future__ import annotations

from math import gcd

from codegen.dtypes import DTYPES
from codegen.plan import Constant, Param, require, require_left_out
from codegen.plans.attention.fp8 import SUM_COLUMNS, UNWRITTEN, is_fp8, scale_params
from codegen.plans.attention.params import tensor_params
from codegen.spec import AttentionSpec
from codegen.tile_rules import Fits, Rule, check_tile, listed

CHUNK = 16  # bytes of one cp.async, and of one row of an 8 x 8 matrix of ldmatrix
BANK_BYTES = 128  # of shared memory per conflict-free access: 32 banks
STEPS = (32, 64, 128)  # keys; a row of V^T has all keys of a step, in a power of two of chunks
STAGES = (4, 6, 8)
PROMOTED = (0, 1)
REGISTERS = 12  # besides accumulators: scales of Q and K, the operand of ones


FP8_STEP: Rule[AttentionSpec] = Fits(
    "n",
    lambda spec: not is_fp8(spec) or spec.tile.n in STEPS,
    lambda spec: f"allowed with dtype {spec.dtype} on {spec.arch}: {listed(STEPS)}",
)


def check_operands(spec: AttentionSpec) -> None:
    """Reject an FP8 spec that the kernel cannot support.

    Raises:
        SpecError: names the field.
    """
    if not is_fp8(spec):
        return
    with_dtype = f"with dtype {spec.dtype} on {spec.arch}"
    require_left_out(spec, UNWRITTEN, f"dtype {spec.dtype}")
    stages, every = spec.stages, spec.accumulate_every
    high = f"is {spec.warp_rows}; allowed {with_dtype}: 16 (the P V product of a step has its own registers)"
    require(spec.warp_rows == 16, "warp_rows", high)
    check_tile(spec, (FP8_STEP,))
    require(stages in STAGES, "stages", f"is {stages}; allowed {with_dtype}: {_list(STAGES)} (K and V of whole steps)")
    allowed = f"{_list(PROMOTED)} (the P V product of several steps would need its own registers)"
    require(every in PROMOTED, "accumulate_every", f"is {every}; allowed {with_dtype}: {allowed}")


def line_bytes(row_bytes: int) -> int:
    """Bytes per line of a row: all banks, or an equal part of them; a row has whole lines."""
    return gcd(row_bytes, BANK_BYTES)


def o_row_bytes(spec: AttentionSpec) -> int:
    """Bytes per row of O; without FP8, the same as a row of Q."""
    return spec.head_dim * (DTYPES[spec.output].bytes if is_fp8(spec) else DTYPES[spec.dtype].bytes)


def registers(spec: AttentionSpec) -> int:
    """Additional registers per thread for FP8 inputs."""
    return REGISTERS if is_fp8(spec) else 0


def rows_of(spec: AttentionSpec) -> str:
    """Names of the tensors whose rows are as wide as Q's."""
    return "Q and K" if is_fp8(spec) else "Q, K, V, O"


def operand_constants(spec: AttentionSpec, load_keys: int, group_keys: int) -> list[Constant]:
    """Constants of FP8, for ``load_keys`` keys per load; for other types, the constant of a group of keys."""
    if not is_fp8(spec):
        doc = "keys whose weights are computed together before their product"
        return [Constant("kGroupKeys", group_keys, doc)]
    n, row = spec.tile.n, o_row_bytes(spec)
    line = line_bytes(row)
    scale_keys = min(spec.scale_rows.k, load_keys)
    return [
        Constant("kVChunks", n // CHUNK, "16-byte chunks of a row of V^T: the keys of a step, one byte each"),
        Constant("kVSwizzleRows", BANK_BYTES // n, "consecutive rows of V^T with the same swizzle"),
        Constant("kORowBytes", row, "bytes of a row of O"),
        Constant("kOLineChunks", line // CHUNK, "16-byte chunks of a line of O"),
        Constant("kORowLines", row // line, "lines of a row of O"),
        Constant("kOSwizzleRows", BANK_BYTES // line, "consecutive rows of O with the same swizzle"),
        Constant("kSumColumns", SUM_COLUMNS, "columns of the product that sums P's rows"),
        Constant("kQScaleRows", spec.scale_rows.q, "rows of Q that share a scale"),
        Constant("kKScaleRows", spec.scale_rows.k, "rows of K that share a scale"),
        Constant("kScaleKeys", scale_keys, "keys of a step that share a scale"),
        Constant("kScaleParts", n // scale_keys, "parts of a step, each with its own scale"),
    ]


def operand_params(spec: AttentionSpec) -> list[Param]:
    """Parameters of Q, K, V and O, and of scales."""
    codes, bits = DTYPES[spec.dtype].bits, DTYPES[spec.output].bits
    if spec.layout == "varlen":
        return [
            *tensor_params("q", bits, "Q (tokens, heads, head_dim)", has_batches=False),
            *tensor_params("k", bits, "K (tokens, kv_heads, head_dim)", has_batches=False),
            *tensor_params("v", bits, "V, as K", has_batches=False),
            *tensor_params("o", bits, "O, as Q", writes=True, has_batches=False),
        ]
    if not is_fp8(spec):
        return [
            *tensor_params("q", bits, "Q (batch, heads, q_len, head_dim)"),
            *tensor_params("k", bits, "K (batch, kv_heads, kv_len, head_dim)"),
            *tensor_params("v", bits, "V, as K"),
            *tensor_params("o", bits, "O, as Q", writes=True),
        ]
    keys = "kv_len rounded up to 16, in the order of KEY_ORDER"
    return [
        *tensor_params("q", codes, "Q (batch, heads, q_len, head_dim)"),
        *tensor_params("k", codes, "K (batch, kv_heads, kv_len, head_dim)"),
        *tensor_params("v", codes, f"V^T (batch, kv_heads, head_dim, {keys})"),
        *tensor_params("o", bits, f"O, as Q, in {spec.output}", writes=True),
        *scale_params(),
    ]


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
