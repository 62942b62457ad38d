"""What ``order_queries`` adds to the plan of an attention kernel with ``share_kv``: a kernel that begins before it."""

from __future__ import annotations

from typing import NamedTuple

from codegen.plan import Constant, Param, Prologue, i32, i64, pointer
from codegen.plans.attention_share_kv import list_length
from codegen.spec import AttentionSpec

WINDOW_TILES = {2: 128, 3: 96}  # by query blocks of a tile; docs/ladder-attention.md has other windows
LIST_BITS = 1024  # key blocks that are told apart: 64 K keys in blocks of 64; others with the same remainder are as one
LIST_PAD = WEIGHT_PAD = 16  # bytes behind a list, and behind the weights of a tile: the template says why
ORDER_THREADS = 1024
HALVES = 2  # of a thread block: each has a window at a time
BLOCK_WINDOWS = 4  # of a thread block: few are wanted, as thread blocks of the main kernel wait for their SMs
EARLY_ENTRIES = 32  # of a list: the order is found before a thread block has worked on a tile of such lists


class OrderSearch(NamedTuple):
    """What a call needs to find an order.

    Attributes:
        values: kernel parameters.
        thread_blocks: of the kernel that finds it.
        bytes: global memory for the order.
    """

    values: dict[str, int]
    thread_blocks: int
    bytes: int


NO_SEARCH = OrderSearch({}, 0, 0)


def order_search(batches: int, heads: int, query_blocks: int, *, query_tiles: int, streams: int) -> OrderSearch:
    """Return what it takes to find the order of lists (batches, heads, query_blocks, k) in ``query_tiles`` a head."""
    values = {
        "order_heads": heads,
        "query_order_head_stride": query_blocks if heads > 1 else 0,
        "query_order_batch_stride": heads * query_blocks if batches > 1 else 0,
    }
    windows = -(-query_tiles // WINDOW_TILES[streams])
    blocks = batches * heads * -(-windows // BLOCK_WINDOWS)
    return OrderSearch(values, blocks, 4 * batches * heads * query_blocks)


def query_order_prologue(spec: AttentionSpec, stem: str, streams: int) -> Prologue | None:
    """Return the kernel that finds the order."""
    if not spec.order_queries:
        return None
    tiles, others = WINDOW_TILES[streams], streams - 1
    offered = tiles * others
    window = tiles * streams * (LIST_BITS // 8 + LIST_PAD) + tiles * (2 * offered + WEIGHT_PAD)
    window += offered // 8 + 4 * offered  # which are left, and what is asked for
    window += 4 * (offered + others + 2)  # which are taken, tiles that lack some, loads of both orders
    window = -(-window // 16) * 16
    return Prologue(f"{stem}_order_queries", ORDER_THREADS, shared_bytes=HALVES * window, overlaps=True)


def query_order_constants(spec: AttentionSpec, streams: int) -> list[Constant]:
    """Return the constants of that kernel."""
    if not spec.order_queries:
        return []
    return [
        Constant("kWindowTiles", WINDOW_TILES[streams], "tiles of a window, whose query blocks it may exchange"),
        Constant("kEarlyRounds", -(-EARLY_ENTRIES // list_length(spec)), "tiles of a thread block that are begun before an order is found"),
        Constant("kListBits", LIST_BITS, "key blocks that are told apart when lists are compared"),
        Constant("kOrderThreads", ORDER_THREADS, "threads of a block that finds an order"),
        Constant("kBlockWindows", BLOCK_WINDOWS, "windows of such a thread block"),
    ]


def query_order_params(spec: AttentionSpec) -> list[Param]:
    """Return the parameters of the order."""
    if not spec.order_queries:
        return []
    return [
        pointer("query_order", "int", "query blocks of each head, those of a tile together: found before", writes=True),
        i64("query_order_batch_stride", "elements from one batch to the next (0: shared)"),
        i64("query_order_head_stride", "elements from one head to the next (0: shared)"),
        i32("order_heads", "heads of kv_indices"),
        pointer("scheduler", "int", "tiles handed out, thread blocks that ended: both 0 between launches", writes=True),
    ]
