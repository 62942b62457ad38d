"""Files that the source of an mma.sync attention kernel is made of."""

from __future__ import annotations

from codegen.flags import AttentionMmaSyncPieces
from codegen.plans.attention_fp8 import is_fp8
from codegen.spec import AttentionSpec

PIECES = "attention/mma_sync"


def pieces(spec: AttentionSpec, *, q_in_registers: bool, paired: bool) -> AttentionMmaSyncPieces:
    """Return the files of the kernel's pieces; ``paired`` is whether K and V of a step are waited for together."""
    fp8 = is_fp8(spec)
    of_fp8 = "_fp8" if fp8 else ""
    names = {
        "columns": "fp8" if fp8 else "padded" if spec.pad_heads else "whole",
        "kv_pipeline": f"steps{of_fp8}" if paired else "tiles",
        "mask": _mask(spec),
        "q_operand": "registers" if q_in_registers else f"shared{of_fp8}",
        "row_sum": "sink" if spec.sink else "plain",
        "rows": "packed" if spec.pack_gqa > 1 else "plain",
        "walk": "numbered" if spec.pattern.fixed_block is None else "listed",
    }
    files = {f"{axis}_piece": f"{PIECES}/{axis}/{name}.cuh.j2" for axis, name in names.items()}
    return AttentionMmaSyncPieces(
        **files,
        softmax_piece=f"{PIECES}/softmax{of_fp8}.cuh.j2",
        pv_gemm_piece=f"{PIECES}/pv_gemm{of_fp8}.cuh.j2",
        promotion_piece=f"{PIECES}/promotion/{'each' if spec.accumulate_every else 'never'}.cuh.j2",
    )


def _mask(spec: AttentionSpec) -> str:
    if spec.pattern.expression is not None:
        return "expression"
    if spec.pattern.masks_by_bits:
        return "bits"
    return "pairs" if spec.pattern.masks_pairs else "tail"
