"""In which words templates of attention say where the keys of a batch end: with the tensor, or at its length."""

from __future__ import annotations

from codegen.flags import KeyEndWords
from codegen.spec import AttentionSpec


def key_end_words(spec: AttentionSpec) -> KeyEndWords:
    """Return what the templates insert."""
    if not spec.kv_lengths:
        return KeyEndWords("p.kv_len", "p.kv_len", "", "", "", "", "key_blocks")
    return KeyEndWords(
        key_end_of_batch="key_end_of(p, batch)",
        key_end="key_end",
        key_end_parameter=", int key_end",
        key_end_argument=", key_end",
        key_end_of_tile="const int key_end = key_end_of(p, tile.batch);",
        key_end_of_mask=", key_end_of(p, tile.batch)",
        no_block="kNoBlock",
    )
