"""Kernel parameters and constants that attention kernels share."""

from __future__ import annotations

import math

from codegen.arch import ARCHS
from codegen.patterns import Block
from codegen.plan import Constant, Param, f32, i32, i64, pointer, require
from codegen.plans.attention.expressions import aux_params, expressions_summary
from codegen.plans.lengths import length_params, lengths_of
from codegen.spec import NARROW_HEADS, AttentionBackwardSpec, AttentionSpec

WARPGROUP_ROWS = 64  # rows of one wgmma


def check_head_dim(spec: AttentionSpec, option: str) -> None:
    """Reject the head size that only kernels by WGMMA with 16-bit operands have.

    Raises:
        SpecError: names the field, and the option that does not allow it.
    """
    allowed = f"is {NARROW_HEADS}; allowed with {option}: 64, 96, 128, 192, 256"
    require(spec.head_dim != NARROW_HEADS, "head_dim", allowed)


def tensor_params(name: str, element: str, doc: str, *, writes: bool = False, has_batches: bool = True) -> list[Param]:
    """The address and strides of a tensor, whose rows are contiguous and 16-byte aligned."""
    batch = [i64(f"{name}_batch_stride", "batch stride, in elements")]
    return [
        pointer(name, element, doc, writes=writes),
        *(batch if has_batches else []),
        i64(f"{name}_head_stride", "head stride, in elements"),
        i64(f"{name}_row_stride", "row stride, in elements"),
    ]


def sub_tile_doc(listed: bool) -> str:
    """Comment on the queries that iterate over key blocks together."""
    return "queries of a tile" + (": they share a list of key blocks" if listed else ", over one range of keys")


def asks_heads(spec: AttentionSpec) -> bool:
    """Whether a kernel for sm_90a needs the head, or the query, of a row; other kernels always do."""
    asks = spec.pattern.masks_pairs or spec.sink or spec.lse or spec.score is not None or spec.is_fp8
    return asks or not ARCHS[spec.arch].has_wgmma


def lse_params(spec: AttentionSpec) -> list[Param]:
    """Parameter of the log-sum-exp, if the spec has one."""
    heads = "heads * kPackGqa" if spec.pack_gqa > 1 else "heads"
    shape = f"({heads}, q_len)" if spec.layout != "padded" else f"(batch, {heads}, q_len)"
    doc = f"log-sum-exp, {shape} contiguous; not stored if null"
    return [pointer("lse", "float", doc, writes=True)] if spec.lse else []


def sink_params(spec: AttentionSpec) -> list[Param]:
    """Parameter of the sinks, if the spec has them."""
    heads = "heads * kPackGqa" if spec.pack_gqa > 1 else "heads"
    doc = f"attention sink: logit added to the softmax sum of each row, ({heads})"
    return [pointer("sink", "float", doc)] if spec.sink else []


def padding_params(spec: AttentionSpec) -> list[Param]:
    """Parameter of ``pad_heads``."""
    doc = "16-byte chunks per row of Q, K, V and O; the remaining columns up to kHeadDim are zeros"
    return [i32("head_chunks", doc)] if spec.pad_heads else []


def size_params(spec: AttentionSpec) -> list[Param]:
    """Sizes of a problem and its softmax scale."""
    return [
        *length_params(lengths_of(spec)),
        *(_pack_sizes(spec) if spec.pack_gqa > 1 else _head_sizes()),
        i32("tiles", _tiles_doc(spec)),
        f32("scale_log2", "scale * log2(e); the host checks that it is positive"),
    ]


def _tiles_doc(spec: AttentionSpec) -> str:
    """Comment on the number of work tiles."""
    of_heads = "heads * query_tiles" if spec.layout != "padded" else "batch * heads * query_tiles"
    return of_heads + (" * splits" if spec.split_kv else "")


def index_params(spec: AttentionSpec) -> list[Param]:
    """Parameters of the pattern: addresses, strides and list lengths of its tensors, and its numbers.

    Aux tensors come last.
    """
    params = []
    owner = "pack" if spec.pack_gqa > 1 else "head"
    docs = (
        ("batch", "batch stride, in elements (0: shared)"),
        ("head", f"{owner} stride, in elements (0: shared)"),
        ("row", "query block stride, in elements"),
        ("entry", "entry stride, in elements"),
    )
    for tensor in spec.index_tensors:
        params.append(pointer(tensor.name, "int", tensor.doc))
        params += [i64(f"{tensor.name}_{axis}_stride", doc) for axis, doc in docs if axis in tensor.strided_axes]
        if "any" in tensor.dims:
            params.append(i32(f"{tensor.name}_length", "entries per list"))
    params += [i32(name, doc) for name, doc in spec.pattern.number_params.items()]
    if needs_query_blocks(spec):
        params.append(i32("query_blocks", "query blocks per head: rows of the lists"))
    return [*params, *aux_params(spec)]


def is_step_of_pattern(spec: AttentionSpec | AttentionBackwardSpec) -> bool:
    """Whether a step is a block that the pattern fixes, an equal part of one, or two."""
    keys = spec.pattern.block_keys
    return keys is None or keys % spec.tile.n == 0 or spec.tile.n == 2 * keys


def step_of_pattern(spec: AttentionSpec | AttentionBackwardSpec) -> str:
    """The legal steps of ``is_step_of_pattern``, in words."""
    return f"a block of the pattern, {spec.pattern.block_keys} keys, an equal part of one, or two"


def block_of(spec: AttentionSpec | AttentionBackwardSpec) -> Block:
    """Block of the lists of a pattern that has lists."""
    block = spec.pattern.fixed_block
    assert block is not None
    return block


def needs_query_blocks(spec: AttentionSpec) -> bool:
    """Whether the kernel needs the number of lists.

    A tile for sm_90a may have several lists, and the last one may not exist. A tile with one list starts with a query,
    so its list exists.
    """
    block = spec.pattern.fixed_block
    if block is None:
        return False
    several = ARCHS[spec.arch].has_wgmma and spec.tile.m > max(block.q * spec.pack_gqa, WARPGROUP_ROWS)
    return several or spec.pattern.lists > 1


def list_constants(block: Block, block_steps: int) -> list[Constant]:
    """Constants of the blocks of index lists."""
    return [
        Constant("kBlockKeys", block.kv, "keys of a listed block"),
        *([Constant("kBlockSteps", block_steps, "steps in a listed block")] if block_steps > 1 else []),
    ]


def block_constants(block: Block, m: int, n: int) -> list[Constant]:
    """Constants of the blocks of index lists, for a tile of m queries and steps of n keys."""
    queries = Constant("kBlockQueries", block.q, "queries that share a list")
    return [*list_constants(block, max(1, block.kv // n)), *([queries] if block.q > m else [])]


def _head_sizes() -> list[Param]:
    return [
        i32("heads", "query heads"),
        i32("heads_per_kv_head", "query heads per K/V head"),
        i32("query_tiles", "tiles of kTileM queries per head"),
    ]


def output_params(spec: AttentionSpec, element: str) -> list[Param]:
    """Where rows of O lie, for tiles that are not stored whole: those at the ends of packed sequences."""
    if spec.layout == "padded":
        return []
    return [
        *tensor_params("o", element, "O (tokens, heads, head_dim)", writes=True, has_batches=False),
        i32("head_chunks", "16-byte chunks of a row"),
    ]


def _pack_sizes(spec: AttentionSpec) -> list[Param]:
    return [
        i32("heads", f"packs of {'kPackGqa' if asks_heads(spec) else spec.pack_gqa} query heads"),
        i32("heads_per_kv_head", "packs per K/V head"),
        i32("query_tiles", "tiles of kTileQueries queries per pack"),
    ]


def logit_constants(spec: AttentionSpec) -> list[Constant]:
    """Constants of the scale, softcap and score of logits.

    A softcap is softcap * tanh(x / softcap) = softcap - 2 softcap / (1 + 2^(2 log2(e) x / softcap)).
    """
    if spec.score is not None:
        return [Constant("kScoreScale", 1.0, "scores already include log2(e)")]
    if spec.softcap is None:
        return []
    return [
        Constant("kCapArgument", 2 / spec.softcap, "2 / softcap, for 2^x instead of tanh"),
        Constant(
            "kCap",
            spec.softcap * math.log2(math.e),
            f"softcap * log2(e): the cap {spec.softcap:g}, for 2^x",
        ),
        Constant("kCappedScale", 1.0, "capped logits already include log2(e)"),
    ]


def options_summary(spec: AttentionSpec) -> list[tuple[str, str]]:
    """Lines for ``explain``, one for each option that the spec uses."""
    lines = []
    if spec.softcap is not None:
        lines.append(("softcap", f"logits are {spec.softcap:g} tanh(scale q.k / {spec.softcap:g})"))
    if spec.sink:
        lines.append(("sink", "each head has a logit that is added to the softmax sum of its rows"))
    if spec.kv_lengths:
        lines.append(("KV lengths", "keys past a batch's length are masked, in addition to the pattern"))
    if spec.layout == "varlen":
        lines.append(("varlen", "packed sequences with bounds cu_seqlens_q and cu_seqlens_k"))
    if spec.layout == "paged":
        lines.append(("paged", "keys in the pages of block_table, queries with bounds cu_seqlens_q"))
    if spec.pad_heads:
        lines.append(("padded heads", f"any head size from 8 to {spec.head_dim}"))
    if spec.pack_gqa > 1:
        heads = spec.pack_gqa
        lines.append(("pack GQA", f"{heads} query heads share their keys and tiles: row = query * {heads} + head"))
    return lines + expressions_summary(spec)
