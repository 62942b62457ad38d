"""The masks and scores of benchmarks/expression_rows.py as functions for FlashAttention 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from expression_rows import CAP, FARTHEST, NEIGHBORS, SIDE, WINDOW, Row

from runtime.tools.bench.timing import Call

HALF = NEIGHBORS // 2


def functions() -> dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]]:
    """mask_mod and score_mod by the name of the row. They read the row's tensors in order."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def causal(b, h, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        return q_idx >= kv_idx

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def window(b, h, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= utils.scalar_to_ssa(WINDOW, cutlass.Int32))

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def of_document(b, h, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        own = utils.scalar_to_ssa(aux[0][q_idx[0]], cutlass.Int32)
        other = utils.scalar_to_ssa(aux[0][kv_idx[0]], cutlass.Int32)
        return (own == other) & (q_idx >= kv_idx)

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def of_window_and_document(b, h, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        own = utils.scalar_to_ssa(aux[0][q_idx[0]], cutlass.Int32)
        other = utils.scalar_to_ssa(aux[0][kv_idx[0]], cutlass.Int32)
        near = q_idx - kv_idx <= utils.scalar_to_ssa(WINDOW, cutlass.Int32)
        return (own == other) & (q_idx >= kv_idx) & near

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def of_prefix(b, h, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        return (kv_idx < utils.scalar_to_ssa(aux[0][b[0]], cutlass.Int32)) | (q_idx >= kv_idx)

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def natten(b, h, q_idx, kv_idx, seqlen_info, aux):  # type: ignore[no-untyped-def]
        query, key = q_idx[0], kv_idx[0]
        low, high = cutlass.Int32(HALF), cutlass.Int32(SIDE - 1 - HALF)
        rows = cutlass.min(cutlass.max(query // SIDE, low), high) - key // SIDE
        columns = cutlass.min(cutlass.max(query % SIDE, low), high) - key % SIDE
        is_row = (rows <= HALF) & (rows >= -HALF)
        return utils.scalar_to_ssa(is_row & (columns <= HALF) & (columns >= -HALF), cutlass.Boolean)

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def alibi(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        slope = utils.scalar_to_ssa(aux_tensors[0][h[0]], cutlass.Float32)
        return score + slope * (kv_idx - q_idx).to(cutlass.Float32)

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def relative(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        distance = q_idx[0] - kv_idx[0]
        held = cutlass.min(cutlass.max(distance, cutlass.Int32(-FARTHEST)), cutlass.Int32(FARTHEST))
        return score + utils.scalar_to_ssa(aux_tensors[0][h[0], held + FARTHEST], cutlass.Float32)

    @cute.jit  # type: ignore[untyped-decorator, unused-ignore]
    def capped(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return CAP * cute.math.tanh(score / CAP, fastmath=True)

    return {
        "causal": (causal, None),
        "window 2048": (window, None),
        "documents, causal": (of_document, None),
        "window 2048 and documents": (of_window_and_document, None),
        "prefix LM": (of_prefix, None),
        "natten 64 x 64, 13 x 13": (natten, None),
        "ALiBi, causal": (None, alibi),
        "relative bias": (None, relative),
        "softcap 30, causal": (None, capped),
    }


def fa4(row: Row, tensors: Sequence[torch.Tensor], lists: tuple[torch.Tensor, ...] | None) -> Call:
    """FlashAttention 4's call. It takes causal masks as an option.

    Args:
        row: the workload.
        tensors: q, k and v, (batch, length, heads, head_dim).
        lists: counts and entries of partial blocks, then those of full ones, of the row's mask; None: it has none.
    """
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    mask_mod, score_mod = functions()[row.name]
    q, k, v = tensors
    options: dict[str, Any] = {"score_mod": score_mod} if score_mod else {}
    options |= {"aux_tensors": list(row.tensors.values())} if row.tensors else {}
    if mask_mod is None:
        options["causal"] = row.sees is not None
    else:
        assert lists is not None
        counts, partial, full_counts, full = (
            t.expand(q.shape[0], q.shape[2], *t.shape[2:]).contiguous() for t in lists
        )
        options["mask_mod"] = mask_mod
        options["block_sparse_tensors"] = BlockSparseTensorsTorch(
            mask_block_cnt=counts,
            mask_block_idx=partial,
            full_block_cnt=full_counts,
            full_block_idx=full,
            block_size=(128, 128),
        )

    def call() -> torch.Tensor:
        out = flash_attn_func(q, k, v, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call
