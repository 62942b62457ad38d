"""Which pieces the source of an mma.sync attention kernel is made of, and the words in which it says so."""

from __future__ import annotations

from codegen.flags import AttentionMmaSyncPieces, AttentionMmaSyncWords
from codegen.plans.attention_fp8 import is_fp8
from codegen.plans.attention_logits import formula, keys_of_pattern, logits_piece
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
    return AttentionMmaSyncPieces(**files, logits_piece=logits_piece(spec))


def _mask(spec: AttentionSpec) -> str:
    if spec.pattern.expression is not None:
        return "expression"
    if spec.pattern.masks_by_bits:
        return "bits"
    return "pairs" if spec.pattern.masks_pairs else "tail"


def words(spec: AttentionSpec, *, paired: bool, overlaps: bool, q_beyond: bool, rereads: bool) -> AttentionMmaSyncWords:
    """Return the words that differ from kernel to kernel in text that they share.

    Args:
        spec: the spec.
        paired: whether K and V of a step are waited for together.
        overlaps: whether exponentials of a group overlap P V products of the one before.
        q_beyond: whether Q extends beyond the slots that are filled last.
        rereads: whether the thread's number is read at each use, as registers are few.
    """
    packed = spec.pack_gqa > 1
    overlaps = overlaps and not is_fp8(spec)
    return AttentionMmaSyncWords(
        keys_of_pattern=keys_of_pattern(spec),
        formula=formula(spec),
        thread="tid_x()" if rereads else "threadIdx.x",
        tile_is="kTileQueries queries of one pack" if packed else "kTileM queries of one head",
        score_rows="tile, warp_row + lane / 4",
        tile_queries="kTileQueries" if packed else "kTileM",
        rows_are="rows of Q" if packed else "queries",
        q_place=_q_place(paired=paired, q_beyond=q_beyond),
        weights_come=_weights_come(paired=paired, overlaps=overlaps),
        of_capped_scores=_of_capped_scores(spec),
        scores_become_weights=(
            "on the way: a group is exponentiated beside the products of the one before"
            if overlaps
            else "first. There is one group here"
        ),
    )


def _of_capped_scores(spec: AttentionSpec) -> str:
    if spec.score is not None:
        return " of scores: scale_log2 is kScoreScale"
    return "" if spec.softcap is None else " of capped scores: scale_log2 is kCappedScale"


def _q_place(*, paired: bool, q_beyond: bool) -> str:
    slots = "the slots that are" if paired else "the slot that is"
    return f"{slots} filled last{' and the room after it' if q_beyond else ''}"


def _weights_come(*, paired: bool, overlaps: bool) -> str:
    if overlaps:
        return "Within a step, a group of keys is exponentiated while the tensor cores multiply the one before."
    once = "those of a step" if paired else "half of a step"
    return f"All keys that are multiplied in one go, {once}, are exponentiated first."
