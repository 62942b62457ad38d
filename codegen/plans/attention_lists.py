"""In which words templates walk through lists of key blocks."""

from __future__ import annotations

from codegen.flags import ListWords
from codegen.spec import AttentionSpec

PIECES = "attention/lists"
WORD = 32  # keys that a word of mask_bits is about


def step_words(block_steps: int, step_blocks: int) -> str:
    """Return what a step is."""
    if step_blocks > 1:
        return "kStepBlocks listed key blocks"
    return "one key block, or an equal part of it" if block_steps > 1 else "one key block"


def list_words(
    spec: AttentionSpec, *, partial: bool, several_lists: bool, block_steps: int, step_blocks: int
) -> ListWords:
    """Return what the templates of lists insert.

    Args:
        spec: the spec.
        partial: whether a tile has a part of a query block only.
        several_lists: whether a tile has several lists, the last of which there may not be.
        block_steps: steps in a listed block.
        step_blocks: listed blocks of a step.
    """
    fixed = spec.pattern.list_length is not None
    if spec.arch == "sm_90a":
        piece = "shared" if spec.share_kv_loads else "walked"
    else:
        piece = "taken_fixed" if fixed else "taken"
    length = "kTopK" if fixed else "p.kv_indices_length"
    entries = "kTopK" if piece == "taken_fixed" else "entries"
    steps = f"{entries} * kBlockSteps" if block_steps > 1 else entries
    if step_blocks > 1:
        steps = f"({entries} + kStepBlocks - 1) / kStepBlocks"
    listed = "entries" if piece == "taken" else length
    if several_lists:
        listed = f"row < p.query_blocks ? {length} : 0"
    masked = spec.pattern.masks_by_bits
    return ListWords(
        list_piece=f"{PIECES}/{piece}.cuh.j2",
        list_length=length,
        most_partial="min(p.kv_indices_length, p.mask_bits_length)" if masked else "p.kv_indices_length",
        list_queries="kBlockQueries" if partial else "kSubTileRows",
        list_entries=listed,
        steps_of_entries=steps,
        times_step_blocks=" * kStepBlocks" if step_blocks > 1 else "",
        over_block_steps=" / kBlockSteps" if block_steps > 1 else "",
        lane_steps="(32 * kBlockSteps)" if block_steps > 1 else "32",
        and_part=" * kBlockSteps + i % kBlockSteps" if block_steps > 1 else "",
        and_mask_words=_mask_words(spec, block_steps),
        range_units="work units" if spec.stream_k_tail else "steps",
    )


def _mask_words(spec: AttentionSpec, block_steps: int) -> str:
    """Return the way from the bits of an entry to those of one of its steps; two steps may share a word."""
    block = spec.pattern.fixed_block
    if block is None or block_steps == 1:
        return ""
    few = block.kv // block_steps < WORD
    return f" + i % kBlockSteps * kTileN / {WORD}" if few else f" + i % kBlockSteps * (kTileN / {WORD})"
