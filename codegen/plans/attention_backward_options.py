"""What options of attention become in its gradients on sm_90a: softcap, scores, lengths of batches, masks."""

from __future__ import annotations

from codegen.flags import AttentionBackwardOptionFlags
from codegen.plans.attention_backward_parts import PIECES, divides_key_blocks
from codegen.plans.attention_kv_lengths import key_end_of_masks
from codegen.plans.attention_logits import softmax_scale
from codegen.spec import AttentionBackwardSpec


def option_flags(spec: AttentionBackwardSpec) -> AttentionBackwardOptionFlags:
    """Return what the templates ask."""
    heads, walks_queries = "p.heads_per_kv_head", spec.gradients != "dq"
    return AttentionBackwardOptionFlags(
        key_end_words=key_end_of_masks(spec.forward),
        logits_piece=f"{PIECES}/logits/{_logits(spec)}.cuh.j2",
        mask_piece=f"{PIECES}/{'dkdv' if walks_queries else 'dq'}_mask/{_mask(spec)}.cuh.j2",
        key_of_list="tile.first_key % kBlockKeys + " if divides_key_blocks(spec) else "",
        heads_of_tile=f"(tile.first_key < key_end_of(p, tile.batch) ? {heads} : 0)" if spec.kv_lengths else heads,
        softmax_scale=softmax_scale(spec),
    )


def _logits(spec: AttentionBackwardSpec) -> str:
    """Return the piece of what becomes of scores."""
    if spec.score is not None:
        return "scored_dq" if spec.gradients == "dq" else "scored_dkdv"
    return "scaled" if spec.softcap is None else "capped"


def _mask(spec: AttentionBackwardSpec) -> str:
    """Return the piece that hides pairs: dQ always has one, for the end of the keys."""
    if spec.pattern.masks_by_bits:
        return "bits"
    if spec.pattern.expression is not None:
        return "expression"
    if spec.gradients != "dq":
        return "pairs" if spec.pattern.masks_pairs else "none"
    return "last_key" if spec.pattern.has_last_key else "pairs"
