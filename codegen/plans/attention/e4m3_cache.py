"""An e4m3 cache in the plan of an sm_90a attention kernel: the producer converts K and V to fp16 as it loads them.

Numbers first, for a step of 128 keys with heads of 128 and tiles of 128 rows. The two products take the tensor cores
2,048 cycles. The producer has 16,384 pairs to convert: 256 cycles at 64 threads per cycle, 1,024 at 16. Of shared
memory at 128 bytes per cycle, the codes take 512 cycles, written and read once, their fp16 another 512, and the
products 1,024, as both warpgroups read them. The codes of a step are in flight while the step before it is converted:
32 KB, where a latency of 1,000 cycles needs 16. Held in registers, they spilled.
"""

from __future__ import annotations

from codegen.plan import Constant, Param, SharedLayout, i32, pointer, require, require_left_out
from codegen.plans.attention.sizes import Sizes
from codegen.plans.cache_scales import scale_params
from codegen.spec import AttentionSpec

HEAD_DIMS = (64, 128)
UNWRITTEN = ("softcap", "score")
PRODUCER_WARPS = 4
OPERAND_WARPS = 2
"""Warps that convert K, and as many that convert V: each half of the rows of a step."""
BATCHES = 2
"""Parts of those rows, each a group of copies: their codes of the next step follow as soon as they are converted."""
CHUNK = 16  # codes of one copy of a lane
WARP = 32


def check_e4m3_cache(spec: AttentionSpec) -> None:
    """Refuse what kernels of an e4m3 cache are not written for.

    Raises:
        SpecError: naming the field.
    """
    if not spec.has_codes:
        return
    sizes = ", ".join(map(str, HEAD_DIMS))
    require(spec.head_dim in HEAD_DIMS, "head_dim", f"is {spec.head_dim}; allowed with cache e4m3: {sizes}")
    require(spec.tile.m == 128, "tile.m", f"is {spec.tile.m}; allowed with cache e4m3: 128")
    require_left_out(spec, UNWRITTEN, "cache e4m3")


def code_constants(spec: AttentionSpec) -> list[Constant]:
    """Constants of the conversion."""
    if not spec.has_codes:
        return []
    rows = spec.tile.n // OPERAND_WARPS // BATCHES
    return [
        Constant(
            "kOperandWarps", OPERAND_WARPS, "producer warps for each of K and V, with equal parts of a step's rows"
        ),
        Constant("kBatches", BATCHES, "parts of a warp's rows, each a group of copies"),
        Constant("kBatchRows", rows, "rows of such a part"),
        Constant(
            "kCopyRows", WARP * CHUNK // spec.head_dim, "rows that a warp copies at a time, 16 bytes for each lane"
        ),
    ]


def code_params() -> tuple[Param, ...]:
    """Parameters of K and V, which the producer reads without TMA, and of their scales."""
    codes = "unsigned char"
    return (
        pointer("k_cache", codes, "K (pages, tokens of a page, kv_heads, head_dim), in any order but for head_dim"),
        pointer("v_cache", codes, "V, as K and with the same strides"),
        i32("page_chunks", "page stride of K and V, in 16 bytes"),
        i32("token_chunks", "token stride, likewise"),
        i32("kv_head_chunks", "head stride, likewise"),
        *scale_params(),
    )


def add_codes(shared: SharedLayout, sizes: Sizes, depth: int) -> None:
    """Shared memory of codes, and of the scales of tokens beside the rings of K and V."""
    spec = sizes.spec
    shared.add("Codes", 2 * spec.tile.n * spec.head_dim, "codes of a step of K and V, before their conversion")
    size = 4 * depth * spec.tile.n
    shared.add("KScales", size, "factors of the keys in the K ring, if each token has its own", align=16)
    shared.add("VScales", size, "factors of the values in the V ring, likewise", align=16)
