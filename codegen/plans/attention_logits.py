"""What an attention kernel computes, in words, and what becomes of its logits."""

from __future__ import annotations

from codegen.spec import AttentionBackwardSpec, AttentionSpec

PIECES = "attention/logits"


def keys_of_pattern(spec: AttentionSpec) -> str:
    """Return the keys that attention is over."""
    end = ", up to each batch's kv_lengths" if spec.kv_lengths else ""
    shown = "keys that the pattern shows" if spec.pattern.fixed_block is None else "key blocks that the pattern lists"
    return shown + end


def formula(spec: AttentionSpec) -> str:
    """Return O as a formula."""
    sink = "exp(sink of its head) joins each row's sum"
    if spec.score is not None:
        return f"softmax(score(scale * Q K^T)) V{f', where {sink}' if spec.sink else ''}: see score_log2"
    if spec.softcap is None:
        return f"softmax(scale * Q K^T) V{f', where {sink}' if spec.sink else ''}"
    return f"softmax(c tanh(scale * Q K^T / c)) V, where c is the softcap{f' and {sink}' if spec.sink else ''}"


def logits_piece(spec: AttentionSpec) -> str:
    """Return the file of what becomes of scores before the mask."""
    if spec.score is not None:
        return f"{PIECES}/scored.cuh.j2"
    return f"{PIECES}/{'scaled' if spec.softcap is None else 'capped'}.cuh.j2"


def softmax_scale(spec: AttentionSpec | AttentionBackwardSpec) -> str:
    """Return what logits are multiplied by, as templates have them: of a score and of capped ones, nothing more."""
    if spec.score is not None:
        return "kScoreScale"
    return "p.scale_log2" if spec.softcap is None else "kCappedScale"
