"""In which words templates of attention say where the keys of a batch end: with the tensor, or at its length."""

from __future__ import annotations

from codegen.arch import ARCHS
from codegen.flags import KeyEndOfLoads, KeyEndOfMasks, KeyEndOfThread, KeyEndWords
from codegen.spec import AttentionSpec

PLAIN = {
    "key_end_of_batch": "p.kv_len",
    "key_end": "p.kv_len",
    "key_end_owner": "const Params& p",
    "key_end_parameter": "",
    "key_end_of_tile": "",
    "no_block": "key_blocks",
}
OF_BATCH = {
    "key_end_of_batch": "key_end_of(p, batch)",
    "key_end": "key_end",
    "key_end_owner": "int key_end",
    "key_end_parameter": ", int key_end",
    "key_end_of_tile": "const int key_end = key_end_of(p, tile.batch);",
    "no_block": "kNoBlock",
}


def key_end_words(spec: AttentionSpec) -> KeyEndWords:
    """Return what the templates insert."""
    if not ARCHS[spec.arch].has_wgmma:
        return key_end_of_threads(spec)
    return KeyEndOfLoads(**_words_of_masks(spec), its_key_end=_owner(spec))


def key_end_of_threads(spec: AttentionSpec) -> KeyEndOfThread:
    """Return what the templates insert whose threads all load and compute."""
    words = OF_BATCH if spec.kv_lengths else PLAIN
    return KeyEndOfThread(**words, its_key_end=_owner(spec), and_key_end=", key_end" if spec.kv_lengths else "")


def _owner(spec: AttentionSpec) -> str:
    return "key_end" if spec.kv_lengths else "p"


def key_end_of_masks(spec: AttentionSpec) -> KeyEndOfMasks:
    """Return what the templates of gradients insert."""
    return KeyEndOfMasks(**_words_of_masks(spec))


def _words_of_masks(spec: AttentionSpec) -> dict[str, str]:
    """Return the words where consumers need the end in masks alone."""
    anew = "key_end_of(p, tile.batch)" if spec.kv_lengths else ""
    words = OF_BATCH if spec.kv_lengths else PLAIN
    return {**words, "masks_key_end": anew or "p", "and_masks_key_end": f", {anew}" if anew else ""}
