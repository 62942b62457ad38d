"""What options of attention become in its gradients: softcap, scores, lengths of batches, masks."""

from __future__ import annotations

from codegen.flags import AttentionBackwardOptionFlags
from codegen.plans.attention_backward_parts import PIECES
from codegen.spec import AttentionBackwardSpec

MMA_SYNC_PIECES = f"{PIECES}/mma_sync"


def option_flags(spec: AttentionBackwardSpec) -> AttentionBackwardOptionFlags:
    """Return what the templates ask."""
    return AttentionBackwardOptionFlags(
        logits_piece=_logits_piece(spec),
        mask_piece=_mask_piece(spec),
    )


def _folder(spec: AttentionBackwardSpec) -> str:
    """Return where the pieces are that go over a thread's accumulators: those of mma.sync are lists of tiles."""
    return MMA_SYNC_PIECES if spec.mma == "mma" else PIECES


def _logits_piece(spec: AttentionBackwardSpec) -> str:
    """Return the piece of what becomes of scores before the mask."""
    if spec.score is not None:
        return f"{_folder(spec)}/logits/{'scored_dq' if spec.gradients == 'dq' else 'scored_dkdv'}.cuh.j2"
    return f"{PIECES}/logits/scaled.cuh.j2" if spec.softcap is None else f"{_folder(spec)}/logits/capped.cuh.j2"


def _mask_piece(spec: AttentionBackwardSpec) -> str:
    """Return the piece that hides pairs: dQ always has one, for the end of the keys."""
    if spec.gradients != "dq":
        kind = _mask(spec, "pairs" if spec.pattern.masks_pairs else "none")
        return f"{PIECES if kind == 'none' else _folder(spec)}/dkdv_mask/{kind}.cuh.j2"
    last_key = spec.mma != "mma" and spec.pattern.has_last_key
    return f"{_folder(spec)}/dq_mask/{_mask(spec, 'last_key' if last_key else 'pairs')}.cuh.j2"


def _mask(spec: AttentionBackwardSpec, otherwise: str) -> str:
    """Return what hides the pairs of partial blocks, or what does where that is neither bits nor an expression."""
    if spec.pattern.masks_by_bits:
        return "bits"
    return otherwise if spec.pattern.expression is None else "expression"
