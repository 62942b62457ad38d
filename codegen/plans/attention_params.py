"""Kernel parameters that every attention kernel has."""

from __future__ import annotations

from codegen.plan import Param, f32, i32, i64, pointer
from codegen.spec import AttentionSpec


def lse_params(spec: AttentionSpec) -> list[Param]:
    """Return the parameter of the log-sum-exp, if the spec asks for it."""
    doc = "log-sum-exp, (batch, heads, q_len) contiguous"
    return [pointer("lse", "float", doc, writes=True)] if spec.lse else []


def size_params() -> list[Param]:
    """Return the sizes of a problem and its softmax scale."""
    return [
        i32("q_len", "queries of a head"),
        i32("kv_len", "keys of a head"),
        i32("heads", "query heads"),
        i32("heads_per_kv_head", "query heads that share one K/V head"),
        i32("query_tiles", "tiles of kTileM queries of a head"),
        i32("tiles", "batch * heads * query_tiles"),
        f32("scale", "softmax scale"),
        f32("scale_log2", "scale * log2(e)"),
    ]


def index_params(spec: AttentionSpec) -> list[Param]:
    """Return the kernel parameters of the pattern's index tensors: address, strides, and the length of free lists."""
    params = []
    for tensor in spec.pattern.index_tensors:
        params += [
            pointer(tensor.name, "int", tensor.doc),
            i64(f"{tensor.name}_batch_stride", "elements from one batch to the next (0: shared)"),
            i64(f"{tensor.name}_head_stride", "elements from one head to the next (0: shared)"),
            i64(f"{tensor.name}_row_stride", "elements from one query block to the next"),
        ]
        if "any" in tensor.dims:
            params.append(i32(f"{tensor.name}_length", "entries of a list"))
    if spec.pattern.index_tensors:
        params.append(i32("query_blocks", "query blocks of a head: rows of the lists"))
    return params
