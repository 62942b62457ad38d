"""Lengths of sequences: parameters of a kernel, and their values in a launch."""

from __future__ import annotations

from codegen.plan import Param, i32
from codegen.problem import AttentionShape, BlockMaskShape, Lengths, SelectShape
from codegen.spec import AttentionBackwardSpec, AttentionSpec

Q_LEN = i32("q_len", "queries per head")
KV_LEN = i32("kv_len", "keys per head")


def lengths_of(spec: AttentionSpec | AttentionBackwardSpec) -> Lengths:
    """Lengths of the sequences of attention, or of its gradients.

    A kernel of dK and dV knows its keys by its tiles. It asks for their number where the pattern or the score places
    them, or where it loads or hides keys itself.
    """
    if isinstance(spec, AttentionSpec) or spec.gradients != "dkdv" or spec.mma == "mma":
        return Lengths(by_batch=spec.kv_lengths)
    by_position = spec.pattern.masks_pairs and not spec.pattern.masks_by_bits
    asks_keys = by_position or spec.kv_lengths or spec.score is not None
    return Lengths(by_batch=spec.kv_lengths, asks_keys=asks_keys)


def kv_len_params(lengths: Lengths) -> tuple[Param, ...]:
    """The number of keys, if the kernel asks for it."""
    return (KV_LEN,) if lengths.asks_keys else ()


def length_numbers(shape: AttentionShape | BlockMaskShape | SelectShape) -> dict[str, int]:
    """Values of these parameters in a launch."""
    return {"q_len": shape.q_len, "kv_len": shape.kv_len}
