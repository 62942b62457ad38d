"""Shapes of problems, and the launch arguments that a plan derives from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

SCHEDULER_COUNTERS = 2  # tiles taken, finished thread blocks
COUNTER_BYTES = 4  # per counter in device memory
SCHEDULER_BYTES = {"scheduler": str(SCHEDULER_COUNTERS * COUNTER_BYTES)}
"""Workspace of a dynamic tile scheduler."""


PAGE_ROWS = 16
"""Keys of a copy from a page, with ``layout: paged``: a page has a multiple of them."""
LARGE_PAGE_ROWS = 64
"""Keys of a copy from a page that has a multiple of these."""
Layout = Literal["padded", "varlen", "paged"]
"""Arrangement of the sequences of attention in memory.

``padded``: (batch, heads, length, head_dim) tensors, in which all batches have one length.
``varlen``: (tokens, heads, head_dim) tensors, in which sequences follow each other; ``cu_seqlens`` has their bounds.
``paged``: queries as ``varlen``, keys in the pages of a cache; ``block_table`` has the pages of each request.
"""


def blocks_of(tokens: int, sequences: int, rows: int) -> int:
    """Blocks of ``rows`` tokens of a head.

    Sequence i of a packed batch has the blocks from cu_seqlens[i] / rows + i on, so that a kernel finds the sequence of
    a block by a search in cu_seqlens. Up to one block of a sequence has no token.
    """
    return tokens // rows + sequences if sequences else -(-tokens // rows)


@dataclass(frozen=True)
class Lengths:
    """Source of the sequence lengths in a kernel.

    Attributes:
        layout: arrangement of the sequences; ``templates/attention/seqlen_info/`` has a file for each.
        by_batch: whether each batch has its own number of keys.
        asks_keys: whether the kernel reads the number of keys.
        covers_gaps: whether tiles also cover the tokens before the first and behind the last packed sequence.
    """

    layout: Layout = "padded"
    by_batch: bool = False
    asks_keys: bool = True
    covers_gaps: bool = False

    @property
    def packs_queries(self) -> bool:
        """Whether the sequences of Q follow each other."""
        return self.layout != "padded"

    @property
    def has_pages(self) -> bool:
        """Whether K and V are pages of a cache."""
        return self.layout == "paged"


@dataclass(frozen=True)
class AttentionShape:
    """The shape of an attention problem.

    Attributes:
        batch: batches.
        heads: query heads, a multiple of ``kv_heads``.
        kv_heads: heads of K and V.
        q_len: queries per head.
        kv_len: keys per head.
        list_batches: batches with their own index lists; 1 if lists are shared, 0 without lists.
        list_heads: heads, or packs of heads, likewise.
        list_length: entries per list, if the pattern does not fix their number.
        window_left: keys of the window before a query's own position, if the pattern takes the window from the call.
        window_right: keys of the window after it, likewise.
        sink_keys: keys at the beginning that all later queries see, likewise.
        sequences: number of packed sequences in a batch of 1, with q_len and kv_len as totals; 0 if sequences are
            padded. If K and V are pages, kv_len is the most keys of a request.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    list_batches: int = 0
    list_heads: int = 0
    list_length: int = 0
    window_left: int | None = None
    window_right: int | None = None
    sink_keys: int | None = None
    sequences: int = 0


@dataclass(frozen=True)
class SpmmShape:
    """The shape of a product C = op(A) @ B with A in block-sparse rows.

    Attributes:
        rows: rows of C.
        depth: rows of B.
        columns: columns of B and C.
        blocks: stored blocks of A.
        b_row_stride: row stride of B, in elements.
        chunk_blocks: most blocks per chunk, if long block rows are split.
        groups: groups of block rows, if tiles gather them.
        rounds: rounds of all groups.
    """

    rows: int
    depth: int
    columns: int
    blocks: int
    b_row_stride: int = 0
    chunk_blocks: int | None = None
    groups: int | None = None
    rounds: int = 0


@dataclass(frozen=True)
class SddmmShape:
    """The shape of a sampled product: the stored blocks of C (rows, columns) = A (rows, depth) @ B (columns, depth)^T.

    Attributes:
        rows: rows of A and C.
        columns: rows of B, columns of C.
        depth: columns of A and B.
        blocks: stored blocks of C.
    """

    rows: int
    columns: int
    depth: int
    blocks: int


@dataclass(frozen=True)
class SpgemmShape:
    """The shape of a product of two matrices in block-sparse rows.

    Attributes:
        rows: rows of A and C.
        depth: columns of A, rows of B.
        columns: columns of B and C.
        blocks: stored blocks of a C in block-sparse rows; not used if C is dense.
    """

    rows: int
    depth: int
    columns: int
    blocks: int = 0


@dataclass(frozen=True)
class CopyShape:
    """The shape of a matrix to copy."""

    rows: int
    columns: int


@dataclass(frozen=True)
class SelectShape:
    """The shape of a selection of key blocks.

    Attributes:
        batch: batches.
        heads: query heads, a multiple of ``kv_heads``.
        kv_heads: heads of K.
        q_len: queries per head.
        kv_len: keys per head.
        head_dim: elements per head.
        block_q: queries per block.
        block_kv: keys per block.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    block_q: int
    block_kv: int


@dataclass(frozen=True)
class BlockMaskShape:
    """The shape of an attention problem whose block lists are built.

    Attributes:
        batch: batches; 1 if lists are shared.
        heads: query heads, likewise.
        q_len: queries per head.
        kv_len: keys per head.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int


@dataclass(frozen=True)
class QuantizeShape:
    """The shape of a tensor to quantize.

    Attributes:
        batch: batches.
        heads: heads.
        length: rows per head.
        kv_heads: heads of the mean, with ``mean: product``; otherwise 0.
        is_given: 1 if the caller passes the column scales or the mean, 0 if the kernel computes them first.
    """

    batch: int
    heads: int
    length: int
    kv_heads: int = 0
    is_given: int = 0


@dataclass(frozen=True)
class PagedShape:
    """The shape of attention over pages.

    Attributes:
        batch: requests.
        tokens: queries of all requests.
        heads: query heads, a multiple of ``kv_heads``.
        kv_heads: heads of K and V.
        max_keys: keys of a request at most.
        list_length: entries per list; 0 without lists.
        entry_keys: keys per entry, a power of two.
        most_parts: most parts of a tile whose division depends on its own length alone; 0 if a tile is divided by the
            steps of the whole launch.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    max_keys: int = 1
    list_length: int = 0
    entry_keys: int = 1
    most_parts: int = 0


@dataclass(frozen=True)
class KeyListsShape:
    """The shape of attention of packed sequences over lists of keys.

    Attributes:
        sequences: packed sequences.
        tokens: queries of all sequences.
        key_tokens: keys of all sequences; over pages, those that a request has room for.
        kv_heads: heads of K and V.
        list_length: entries per list.
        slice: the slice of the queries that a launch computes, if the kernel divides them.
    """

    sequences: int
    tokens: int
    key_tokens: int
    kv_heads: int
    list_length: int
    slice: int = 0


Shape = (
    AttentionShape
    | SpmmShape
    | SddmmShape
    | SpgemmShape
    | CopyShape
    | SelectShape
    | BlockMaskShape
    | KeyListsShape
    | PagedShape
    | QuantizeShape
)


@dataclass(frozen=True)
class BlockSize:
    """Threads and bytes of dynamic shared memory per thread block."""

    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class LaunchArgs:
    """Launch arguments that depend on the shape of a problem.

    Attributes:
        numbers: values of the kernel's integer parameters that depend on the shape, by name.
        tiles: number of tiles, or of their parts if tiles are split; whole clusters. ``Plan.thread_blocks`` derives the
            grid from it.
        prologue_grid: thread blocks of the plan's prologue.
        counters: 32-bit counters that are 0 between launches, by the pointer parameter that they are passed as.
        scratch: bytes of uninitialized device memory, by pointer parameter.
        copy_stride: row stride of the copy of B that the prologue writes, in elements; None if there is no copy.
        block: size of thread blocks, if it depends on the shape; None for that of the plan, the largest.
        epilogue_grid: thread blocks of the plan's epilogue.
        sums: bytes of device memory that must be 0 before each launch, by pointer parameter.
        units: units of work at most, if the kernel counts them in 32 bits.
        launches: launches of a call, if each computes a slice of its queries.
    """

    numbers: Mapping[str, int]
    tiles: int
    prologue_grid: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    scratch: Mapping[str, int] = field(default_factory=dict)
    copy_stride: int | None = None
    block: BlockSize | None = None
    epilogue_grid: int = 0
    sums: Mapping[str, int] = field(default_factory=dict)
    units: int = 0
    launches: int = 1
