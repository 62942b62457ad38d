"""Additions of ``query_grouping: search`` to the plan of an attention kernel: a prologue that finds the order."""

from __future__ import annotations

from typing import NamedTuple

from codegen.plan import Constant, Param, Prologue, i32, i64, pointer
from codegen.plans.attention.share_kv import list_length
from codegen.plans.bsr.balance import SCHEDULER
from codegen.spec import AttentionSpec

WINDOW_TILES = {2: 128, 3: 96}  # by query blocks per tile; steps 75 and 82 of the ladder measure others
LIST_BITS = 1024  # bits per list: key blocks modulo 1024, 64 K keys in blocks of 64
PAD = 16  # bytes after a list, and after the weights of a tile, so that eight of them start in different banks
ORDER_THREADS = 1024
WINDOW_ALIGN = 16
HALVES = 2  # per thread block; each processes one window at a time
BLOCK_WINDOWS = 4  # per thread block: few, as thread blocks of the main kernel wait for the SMs
EARLY_ENTRIES = 32  # per list: the search most likely takes less time than one tile of such lists


class OrderSearch(NamedTuple):
    """Launch of the prologue kernel that finds an order.

    Attributes:
        values: kernel parameters.
        thread_blocks: thread blocks of the prologue.
        bytes: bytes of global memory for the order.
    """

    values: dict[str, int]
    thread_blocks: int
    bytes: int


def order_search(batches: int, heads: int, query_blocks: int, *, query_tiles: int, sub_tiles: int) -> OrderSearch:
    """Launch for lists (batches, heads, query_blocks, k), with ``query_tiles`` tiles per head."""
    values = {
        "order_heads": heads,
        "query_order_head_stride": query_blocks if heads > 1 else 0,
        "query_order_batch_stride": heads * query_blocks if batches > 1 else 0,
    }
    windows = -(-query_tiles // WINDOW_TILES[sub_tiles])
    blocks = batches * heads * -(-windows // BLOCK_WINDOWS)
    return OrderSearch(values, blocks, 4 * batches * heads * query_blocks)


class OrderWindow(NamedTuple):
    """Shared memory of half a thread block of the prologue.

    Attributes:
        offered: query blocks of a window offered to its tiles.
        list_stride: stride between lists, in words.
        weight_stride: stride between the weights of adjacent tiles, in 16-bit numbers.
        bytes: total size.
    """

    offered: int
    list_stride: int
    weight_stride: int
    bytes: int


def order_window(sub_tiles: int) -> OrderWindow:
    """Layout of a window of tiles of ``sub_tiles`` query blocks, in the order of the template's Window."""
    tiles, others = WINDOW_TILES[sub_tiles], sub_tiles - 1
    offered = tiles * others
    list_stride, weight_stride = (LIST_BITS // 8 + PAD) // 4, offered + PAD // 2
    size = 4 * tiles * sub_tiles * list_stride + 2 * tiles * weight_stride  # lists, weights
    size += offered // 8 + 4 * offered  # left, asked
    size += 4 * (tiles * others + others + 2)  # taken, lacking, loads
    return OrderWindow(offered, list_stride, weight_stride, -(-size // WINDOW_ALIGN) * WINDOW_ALIGN)


def query_order_prologue(spec: AttentionSpec, stem: str, sub_tiles: int) -> Prologue | None:
    """Prologue that finds the order, or None."""
    if spec.query_grouping != "search":
        return None
    shared_bytes = HALVES * order_window(sub_tiles).bytes
    return Prologue(f"{stem}_order_queries", ORDER_THREADS, shared_bytes=shared_bytes, overlaps=True)


def query_order_constants(spec: AttentionSpec, sub_tiles: int) -> list[Constant]:
    """Constants of the prologue."""
    if spec.query_grouping != "search":
        return []
    window = order_window(sub_tiles)
    early = -(-EARLY_ENTRIES // list_length(spec))
    return [
        Constant("kWindowTiles", WINDOW_TILES[sub_tiles], "tiles per window; they exchange query blocks"),
        Constant("kEarlyRounds", early, "tiles that a thread block starts before query_order is known"),
        Constant("kListBits", LIST_BITS, "key blocks distinguished when lists are compared"),
        Constant("kOrderThreads", ORDER_THREADS, "threads per block of the prologue"),
        Constant("kBlockWindows", BLOCK_WINDOWS, "windows per thread block of the prologue"),
        Constant("kOffered", window.offered, "query blocks of a window offered to its tiles"),
        Constant(
            "kListStride",
            window.list_stride,
            "stride between lists of bits, in words: eight lists start in different banks",
        ),
        Constant(
            "kWeightStride", window.weight_stride, "stride between tiles, in weights; it avoids bank conflicts likewise"
        ),
        Constant("kWindowBytes", window.bytes, "bytes of a window in shared memory"),
    ]


def query_order_params(spec: AttentionSpec) -> list[Param]:
    """Parameters of the order."""
    if spec.query_grouping != "search":
        return []
    return [
        pointer(
            "query_order", "int", "query blocks of each head, grouped by tile; the prologue computes it", writes=True
        ),
        i64("query_order_batch_stride", "batch stride, in elements (0: shared)"),
        i64("query_order_head_stride", "head stride, in elements (0: shared)"),
        i32("order_heads", "heads of kv_indices"),
        pointer("scheduler", "int", SCHEDULER, writes=True),
    ]
