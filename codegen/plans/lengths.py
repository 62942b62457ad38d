"""Lengths of sequences: parameters of a kernel, and their values in a launch."""

from __future__ import annotations

from codegen.arch import ARCHS
from codegen.expressions.nodes import PATTERN_VARIABLES
from codegen.patterns import PATTERNS
from codegen.plan import Param, i32, pointer, require
from codegen.problem import LARGE_PAGE_ROWS, AttentionShape, BlockMaskShape, Lengths, SelectShape, blocks_of
from codegen.spec import AttentionBackwardSpec, AttentionSpec

Q_LEN = i32("q_len", "queries per head")
KV_LEN = i32("kv_len", "keys per head")
VARLEN_PARAMS = (
    i32("q_len", "queries of all sequences"),
    i32("kv_len", "keys of all sequences"),
    i32("sequences", "sequences: one less than cu_seqlens_q has entries"),
)
PAGED_PARAMS = (
    pointer("cu_seqlens_q", "int", "first token of each request, then the end of the last one"),
    pointer("seq_lens", "int", "keys of each request"),
    pointer("block_table", "int", "pages of each request; null: page i has all keys of request i"),
    i32("q_len", "queries of all requests"),
    i32("sequences", "requests"),
    i32("has_bounds", "1; or 0 if cu_seqlens_q has one readable element without meaning"),
    i32("has_lengths", "1; or 0 if seq_lens has one readable element without meaning"),
    i32("request_queries", "queries of each request without bounds; otherwise 0"),
    i32("request_keys", "keys of each request without lengths; otherwise 0"),
    i32("max_keys", "keys of a request at most"),
    i32("pages", "pages of the cache"),
    i32("page_shift", "log2 of the keys of a page; 31 without block_table"),
    i32("page_mask", "keys of a page, less 1"),
    i32("table_stride", "row stride of block_table, in elements"),
    i32("copy_shift", "log2 of the keys per copy from a page"),
)
_PADDED_ONLY = ("query_grouping", "score", "kv_lengths", "stream_k_tail", "kv_splits", "share_kv_loads", "l2_lockstep")
GAPS = 2  # segments that tiles of gradients cover beside the sequences: the tokens before the first, behind the last


def lengths_of(spec: AttentionSpec | AttentionBackwardSpec) -> Lengths:
    """Lengths of the sequences of attention, or of its gradients.

    A kernel of dK and dV knows its keys by its tiles. It asks for their number where the pattern or the score places
    them, or where it loads or hides keys itself.
    """
    if spec.layout != "padded":
        return Lengths(layout=spec.layout, by_batch=True, covers_gaps=isinstance(spec, AttentionBackwardSpec))
    if isinstance(spec, AttentionSpec) or spec.gradients != "dkdv" or spec.mma == "mma":
        return Lengths(by_batch=spec.kv_lengths)
    by_position = spec.pattern.masks_pairs and not spec.pattern.masks_by_bits
    asks_keys = by_position or spec.kv_lengths or spec.score is not None
    return Lengths(by_batch=spec.kv_lengths, asks_keys=asks_keys)


def clears_values(spec: AttentionSpec) -> bool:
    """Whether the producer of an sm_90a kernel clears what a step of V holds behind the end of its batch's keys.

    Over pages, the loads of V leave it out.
    """
    lengths = lengths_of(spec)
    return lengths.by_batch and not lengths.has_pages


def clears_rows(spec: AttentionBackwardSpec) -> bool:
    """Whether the producer of gradients clears what a step holds behind the end of its keys, or of its queries.

    Behind the queries of a padded batch, copies are zeros.
    """
    return spec.layout == "varlen" or (spec.gradients == "dq" and spec.kv_lengths)


def check_layout(spec: AttentionSpec | AttentionBackwardSpec) -> None:
    """Refuse what kernels of packed sequences, or of pages, are not written for.

    Raises:
        SpecError: naming the field.
    """
    if spec.layout == "padded":
        return
    has = f"is not written for layout {spec.layout}"
    require(not spec.is_fp8, "dtype", f"is {spec.dtype}, which {has}; allowed: fp16, bf16")
    packing = ", ".join(name for name, pattern in PATTERNS.items() if pattern.packs_sequences)
    require(spec.pattern.packs_sequences, "pattern.kind", f"is {spec.pattern.kind}, which {has}; allowed: {packing}")
    if spec.pattern.fixed_block is not None:
        _check_lists(spec)
    fields = type(spec).model_fields
    if isinstance(spec, AttentionBackwardSpec):
        require(spec.gradients != "daux", "gradients", f"is daux, which {has}; allowed: dq, dkdv, dq_dkdv")
    padded_only = _PADDED_ONLY if spec.layout == "paged" else (*_PADDED_ONLY, "pack_gqa")
    for name in padded_only:
        require(name not in fields or getattr(spec, name) == fields[name].default, name, f"{has}; leave it out")
    if spec.layout == "paged":
        _check_paged(spec)


def _check_lists(spec: AttentionSpec | AttentionBackwardSpec) -> None:
    """Refuse lists that kernels of packed sequences are not written for."""
    has = f"is not written for layout {spec.layout}"
    require(spec.layout == "varlen", "pattern.kind", f"is {spec.pattern.kind}, which {has}; allowed: sink_window")
    require(ARCHS[spec.arch].has_wgmma, "arch", f"is {spec.arch}; lists in packed sequences are for: sm_90a")
    plain = not spec.pattern.masks_by_bits and spec.pattern.expression is None
    require(plain, "pattern.mask", f"{has}; allowed: none, causal")


def _check_paged(spec: AttentionSpec | AttentionBackwardSpec) -> None:
    """Refuse what kernels of pages are not written for: they have one pattern, which all others are cases of."""
    has = "is not written for layout paged"
    require(isinstance(spec, AttentionSpec), "layout", "is paged; allowed for gradients: padded, varlen")
    require(ARCHS[spec.arch].has_wgmma, "arch", f"is {spec.arch}, which {has}; allowed: sm_90a")
    general = "allowed: sink_window, with its numbers from the call"
    takes_all = set(spec.pattern.number_params) == set(PATTERN_VARIABLES)
    require(takes_all, "pattern", f"is {spec.pattern.stem()}, which {has}; {general}")
    steps = f"allowed: multiples of {LARGE_PAGE_ROWS}"
    require(spec.tile.n % LARGE_PAGE_ROWS == 0, "tile.n", f"is {spec.tile.n}, which {has}; {steps}")


def length_params(lengths: Lengths) -> tuple[Param, ...]:
    """The numbers of queries and keys."""
    if lengths.has_pages:
        return PAGED_PARAMS
    return VARLEN_PARAMS if lengths.packs_queries else (Q_LEN, *kv_len_params(lengths))


def kv_len_params(lengths: Lengths) -> tuple[Param, ...]:
    """The number of keys, if the kernel asks for it."""
    return (KV_LEN,) if lengths.asks_keys else ()


def paged_numbers(shape: AttentionShape) -> dict[str, int]:
    """Values of the parameters of requests in a launch; those of pages follow from the cache."""
    return {"q_len": shape.q_len, "sequences": shape.sequences, "max_keys": shape.kv_len}


def length_numbers(shape: AttentionShape | BlockMaskShape | SelectShape) -> dict[str, int]:
    """Values of these parameters in a launch."""
    numbers = {"q_len": shape.q_len, "kv_len": shape.kv_len}
    return numbers | ({"sequences": shape.sequences} if isinstance(shape, AttentionShape) and shape.sequences else {})


def tiles_of(tokens: int, sequences: int, rows: int) -> int:
    """Tiles of the gradients of a head, which cover all tokens.

    Segment i, counted from 0, has the tiles from begin / rows + i on: the first one holds the tokens before the first
    sequence, the last one those behind the last. Up to one tile of a segment has no token.
    """
    return tokens // rows + sequences + GAPS if sequences else -(-tokens // rows)


def query_tiles(shape: AttentionShape, tile_queries: int) -> int:
    """Tiles of a head."""
    return blocks_of(shape.q_len, shape.sequences, tile_queries)
