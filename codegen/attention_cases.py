"""Test cases of attention kernels, forward and backward: parameters of their random inputs, without tensors.

They are separate from the oracle, so that a receipt can be checked against them without torch.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from codegen.dtypes import DTYPES
from codegen.patterns import PatternBase
from codegen.spec import AttentionBackwardSpec, AttentionSpec


@dataclass(frozen=True)
class Case:
    """One set of inputs. Every kernel runs every case of CASES, without the inputs that its pattern does not have.

    Attributes:
        name: unique; also the seed.
        lists: contents of the index lists: ``random`` (distinct blocks, shuffled), ``repeated`` (drawn with
            replacement), ``out_of_range`` (some entries are not valid block indices; in tensors with one value per
            batch, some values are too small or too large), ``padded`` (distinct blocks; if a list is longer than the
            number of blocks, invalid entries follow, where the other modes repeat blocks).
        counts: lengths of block_lists rows, and values of tensors with one value per batch: ``random`` (0 to all),
            ``empty`` (all 0), ``full`` (all), ``mixed`` (each row 0 or all; with topk, about half of the rows have no
            valid entry), ``edges`` (by batch: 0, 1, an odd number in the middle, all but one and all, in turn),
            ``block_edges`` (by batch: one less than a multiple of 64, the multiple, one more, in turn), ``left_out``
            (block_lists without a mask: every entry counts).
        heads: a multiple of kv_heads; :func:`fitted` makes it a multiple of the packed heads too.
        shared_lists: whether all batches and heads share one list.
        overlap: for topk, the share of entries that every second list has in common with the list before it, in
            another order; None if each list is drawn independently. If there are enough blocks, the remaining entries
            of the two lists are distinct.
        full_lists: whether block_lists gets its list of full blocks.
        masks: for block_lists with ``mask: bits``, the mode of ``draw_bits``; or ``few``, random bits for no more
            entries than the longest list has.
        width: for topk without k, the entries per list.
        layout: memory order of q, k, v: ``bhsd`` or ``bshd`` (a transposed view).
        expanded: k and v are one batch, expanded (stride 0).
        values: contents of q, k and v: ``normal`` (random), ``equal_keys`` (all keys of a head are equal, and so are
            all weights), ``huge_logit`` (for every fifth query one key has the scaled logit HUGE_LOGIT, and values
            in HUGE_LOGIT_VALUES; the rest is normal), ``large_products`` (q.k reaches LARGEST_PRODUCT before scaling),
            ``rising`` and ``falling`` (the scaled logits rise or fall by RISE from the first key to the last, so that
            the keys of a block outweigh the keys of all blocks on one side of it).
        spread: factor on q; large values make one key win.
        scale: the softmax scale, or None for the default.
        columns: elements per head, fewer than the kernel's; None for the same number. NaN follows them in memory.
        sinks: ``normal`` (similar to the LSE of an ordinary row) or ``huge`` (10000 and -10000 in turn).
        window: keys before and after a query's own position, for a pattern that takes them from the call;
            :func:`fitted` draws them if they are None.
        sink_keys: keys at the beginning, likewise.
    """

    name: str
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 512
    kv_len: int = 512
    lists: str = "random"
    counts: str = "random"
    shared_lists: bool = False
    overlap: float | None = None
    full_lists: bool = True
    masks: str = "random"
    width: int = 9
    layout: str = "bhsd"
    expanded: bool = False
    values: str = "normal"
    spread: float = 1.0
    scale: float | None = None
    columns: int | None = None
    sinks: str = "normal"
    window: tuple[int, int] | None = None
    sink_keys: int | None = None

    def describe(self) -> str:
        """Parameters that differ from the default case, in words."""
        text = (
            f"B{self.batch} H{self.heads}:{self.kv_heads} S{self.q_len}x{self.kv_len} {self.layout} lists {self.lists}"
        )
        extras = {
            "shared lists": self.shared_lists,
            f"overlap {self.overlap}": self.overlap is not None,
            "expanded k, v": self.expanded,
            self.values.replace("_", " "): self.values != "normal",
            f"q x {self.spread:g}": self.spread != 1.0,
            f"scale {self.scale}": self.scale is not None,
            f"d {self.columns}": self.columns is not None,
            f"lists of {self.width}": self.width != Case.width,
            f"counts {self.counts}": self.counts != "random",
            "one list only": not self.full_lists,
            f"bits {self.masks}": self.masks != "random",
            f"{self.sinks} sinks": self.sinks != "normal",
            f"window {self.window}": self.window is not None,
            f"{self.sink_keys} sink keys": self.sink_keys is not None,
        }
        return ", ".join([text, *(word for word, said in extras.items() if said)])


AnyCase = TypeVar("AnyCase", bound=Any)

CASES = (
    Case("plain", batch=2, heads=4, kv_heads=4, q_len=1024, kv_len=1024),
    Case("long", q_len=8192, kv_len=8192, heads=2, kv_heads=1),
    Case("many_tiles", heads=100, kv_heads=50, q_len=520, kv_len=900),  # several per thread block
    Case("odd_lengths", heads=3, kv_heads=3, q_len=333, kv_len=777),
    Case("one_query", batch=2, heads=2, kv_heads=1, q_len=1, kv_len=1000),
    Case("one_block", heads=1, kv_heads=1, q_len=17, kv_len=50, lists="repeated"),
    Case("one_pair", heads=1, kv_heads=1, q_len=1, kv_len=1, lists="repeated"),
    Case("few_queries", heads=2, kv_heads=2, q_len=200, kv_len=3000),
    Case("few_queries_many_keys", heads=3, kv_heads=1, q_len=129, kv_len=5001),
    Case("few_keys", heads=2, kv_heads=2, q_len=1500, kv_len=200, lists="repeated"),
    Case("gqa_8_to_1", batch=2, heads=8, kv_heads=1, q_len=640, kv_len=640),
    Case("gqa_4_to_1", heads=8, kv_heads=2, q_len=321, kv_len=960),
    Case("gqa_3_to_1", heads=6, kv_heads=2, q_len=129, kv_len=1025),
    Case("shared_lists", batch=2, heads=4, kv_heads=2, q_len=700, kv_len=900, shared_lists=True),
    Case("transposed", batch=2, heads=4, kv_heads=2, q_len=500, kv_len=600, layout="bshd"),
    Case("expanded", batch=3, heads=2, kv_heads=2, q_len=300, kv_len=400, expanded=True),
    Case("repeated_blocks", batch=1, heads=4, kv_heads=4, q_len=512, kv_len=1024, lists="repeated"),
    Case("out_of_range", batch=1, heads=2, kv_heads=2, q_len=512, kv_len=1000, lists="out_of_range"),
    Case("empty_rows", heads=2, kv_heads=2, q_len=512, kv_len=512, counts="empty"),
    Case("full_rows", heads=2, kv_heads=2, q_len=512, kv_len=512, counts="full"),
    Case("empty_and_full_rows", heads=4, kv_heads=2, q_len=1000, kv_len=900, lists="padded", counts="mixed"),
    Case("one_list", heads=2, kv_heads=2, q_len=512, kv_len=900, full_lists=False),
    Case("one_key_wins", heads=2, kv_heads=2, q_len=512, kv_len=512, spread=40.0),
    Case("equal_keys", heads=2, kv_heads=2, q_len=512, kv_len=700, lists="padded", values="equal_keys"),
    Case("huge_logit", heads=2, kv_heads=2, q_len=512, kv_len=512, lists="padded", values="huge_logit"),
    Case(
        "large_products",
        heads=2,
        kv_heads=1,
        q_len=300,
        kv_len=512,
        lists="padded",
        values="large_products",
        scale=0.05,
    ),
    Case("own_scale", heads=2, kv_heads=2, q_len=400, kv_len=400, scale=0.31),
)
LARGEST_PAIRS = 2 * 8192 * 8192  # per case, over all heads: the oracle holds float64 matrices of this size
# Logits far beyond the cap, so that 2^x in its tanh overflows: the capped logits are +-softcap.
SOFTCAP_CASES = (Case("beyond_the_cap", heads=4, kv_heads=2, q_len=300, kv_len=500, spread=4000.0),)

SINK_CASES = (
    Case("huge_sinks", heads=4, kv_heads=2, q_len=200, kv_len=300, sinks="huge"),
    Case("sinks_and_no_keys", heads=4, kv_heads=2, q_len=300, kv_len=100, counts="empty"),
)

# Lists of other lengths: no entry, one entry, 33 entries (a warp and one more), more entries than blocks.
WIDTH_CASES = (
    Case("no_entries", heads=2, kv_heads=1, q_len=300, kv_len=400, width=0),
    Case("one_entry", batch=2, heads=4, kv_heads=2, q_len=700, kv_len=900, width=1),
    Case("two_entries", heads=2, kv_heads=2, q_len=333, kv_len=1500, lists="out_of_range", width=2),
    Case("a_warp_of_entries", heads=2, kv_heads=2, q_len=1000, kv_len=4999, width=32),
    Case("one_more_than_a_warp", heads=60, kv_heads=20, q_len=640, kv_len=5001, layout="bshd", width=33),
    Case("long_lists", heads=2, kv_heads=1, q_len=520, kv_len=2500, lists="repeated", width=157),
    Case("padded_lists", heads=2, kv_heads=2, q_len=512, kv_len=777, lists="padded", counts="mixed", width=101),
)

# A kernel that keeps the scale of a row's exponentials between steps must change it at each step of one of these cases.
MONOTONE_CASES = (
    Case("rising_logits", heads=2, kv_heads=2, q_len=300, kv_len=1500, lists="padded", values="rising"),
    Case("falling_logits", heads=2, kv_heads=2, q_len=300, kv_len=1500, lists="padded", values="falling"),
)

# Neighboring query blocks whose lists share all, some or none of their entries. With an odd number of query blocks, one
# has no partner. 4100 keys are 65 blocks of 64, enough for two lists of 32 without a common entry.
SHARE_KV_CASES = (
    Case("same_lists", heads=4, kv_heads=2, q_len=1000, kv_len=2500, overlap=1.0),
    Case("three_quarters_in_common", batch=2, heads=4, kv_heads=1, q_len=670, kv_len=5001, overlap=0.75),
    Case("nothing_in_common", heads=3, kv_heads=1, q_len=640, kv_len=4100, overlap=0.0),
    Case("repeated_in_common", heads=4, kv_heads=4, q_len=333, kv_len=1500, lists="repeated", overlap=0.75),
    Case("out_of_range_in_common", heads=2, kv_heads=2, q_len=700, kv_len=4999, lists="out_of_range", overlap=0.5),
    Case("one_entry_in_common", heads=2, kv_heads=2, q_len=960, kv_len=4100, layout="bshd", overlap=1 / 32),
    Case("long_in_common", heads=2, kv_heads=1, q_len=8192, kv_len=8192, overlap=0.75),
)

# Enough tiles that every thread block has some after the early rounds, and more than a window holds.
ORDER_QUERIES_CASES = (
    Case("many_in_common", batch=2, heads=40, kv_heads=20, q_len=1620, kv_len=1000, overlap=0.5),
    Case("many_out_of_range", heads=60, kv_heads=60, q_len=1300, kv_len=1500, lists="out_of_range", layout="bshd"),
    Case("two_windows", heads=4, kv_heads=2, q_len=18_700, kv_len=700, lists="repeated"),
)

# Tensors with one value per batch: several values in one call, with more keys than queries and with fewer.
PER_BATCH_CASES = (
    Case("edges_of_batches", batch=5, heads=2, kv_heads=1, q_len=700, kv_len=700, counts="edges"),
    Case("edges_and_few_queries", batch=5, heads=2, kv_heads=2, q_len=70, kv_len=1111, counts="edges", layout="bshd"),
    Case("edges_and_few_keys", batch=5, heads=2, kv_heads=2, q_len=900, kv_len=333, counts="edges"),
    Case("values_out_of_range", batch=9, heads=1, kv_heads=1, q_len=400, kv_len=500, lists="out_of_range"),
)

# Smaller heads: one chunk of 16 bytes, parts of every group of 64 columns and of 32, all but one chunk.
HEAD_SIZE_CASES = tuple(
    Case(f"columns_{d}", batch=2, heads=4, kv_heads=2, q_len=333, kv_len=777, layout=layout, columns=d)
    for d, layout in zip((8, 32, 40, 56, 72, 80, 112, 120, 136, 160, 200, 248), ("bhsd", "bshd") * 6, strict=True)
)

# Lengths next to block boundaries, which random lengths rarely hit; rows without keys; no keys at all.
KV_LENGTH_CASES = (
    Case("block_edges", batch=9, heads=2, kv_heads=1, q_len=300, kv_len=1000, counts="block_edges"),
    Case("block_edges_and_one_query", batch=9, heads=4, kv_heads=2, q_len=1, kv_len=700, counts="block_edges"),
    Case("no_keys_in_any_batch", batch=2, heads=2, kv_heads=2, q_len=200, kv_len=300, counts="empty"),
    Case("a_length_for_all", batch=3, heads=2, kv_heads=2, q_len=400, kv_len=900, shared_lists=True, layout="bshd"),
    Case("many_batches", batch=40, heads=8, kv_heads=4, q_len=260, kv_len=600, lists="padded"),
)


# Windows set by the call: one key, within a block, whole blocks, as long as the keys, longer than the sequence, on one
# side; sinks: none, those of a block, one of all keys, all keys and more.
WINDOW_CASES = tuple(
    Case(f"window_{left}_{right}", 2, 4, 2, q_len, kv_len, window=(left, right), sink_keys=sinks)
    for left, right, q_len, kv_len, sinks in (
        (0, 0, 700, 700, 0),
        (7, 0, 333, 777, 1),
        (127, 0, 1000, 1000, 64),
        (300, 64, 640, 900, 70),
        (0, 200, 500, 500, 129),
        (899, 0, 900, 900, 64),
        (5000, 0, 700, 700, 5000),
        (100, 5000, 333, 1200, 4),
        (1 << 24, 1 << 24, 300, 200, 1 << 24),
    )
)


def drawn_numbers(case: AnyCase, pattern: PatternBase) -> AnyCase:
    """Case with the numbers that the pattern takes from the call; missing ones are drawn, seeded by its name."""
    draw = random.Random(f"window of {case.name}")
    most = case.kv_len
    left = draw.choice((0, draw.randint(1, 70), draw.randint(1, 1 + most // 2), most - 1, most + case.q_len))
    right = draw.choice((0, 0, draw.randint(1, 70), draw.randint(1, 1 + most // 2), most + case.q_len))
    sinks = draw.choice((0, draw.randint(1, 9), 64, draw.randint(1, most), most + 1))
    arguments = {number.argument for number in pattern.call_numbers}
    window = (left, right) if case.window is None else case.window
    sink_keys = sinks if case.sink_keys is None else case.sink_keys
    return replace(case, window=window, sink_keys=sink_keys if "sink_keys" in arguments else None)


def head_size_cases(spec: AttentionSpec) -> tuple[Case, ...]:
    """Cases with a smaller head_dim than the kernel's, and with numbers of heads that it can pack."""
    step = 16 // DTYPES[spec.dtype].bytes  # a row of a tensor has whole chunks of 16 bytes
    sizes = {case.columns or 0: case for case in HEAD_SIZE_CASES}
    return tuple(fitted(case, spec) for d, case in sizes.items() if d < spec.head_dim and d % step == 0)


# Mask bits of partial blocks: shared while lists are not, no visible pair with and without full blocks, and
# fewer entries than the lists have.
BITS_CASES = (
    Case("shared_bits", batch=2, heads=4, kv_heads=2, q_len=700, kv_len=900, masks="shared"),
    Case("bits_of_shared_lists", batch=2, heads=4, kv_heads=2, q_len=555, kv_len=1111, shared_lists=True),
    Case("bits_apart", batch=2, heads=4, kv_heads=1, q_len=513, kv_len=1023, layout="bshd", masks="apart"),
    Case("few_entries", heads=3, kv_heads=3, q_len=900, kv_len=2000, masks="few"),
    Case("hidden_and_full_blocks", heads=4, kv_heads=2, q_len=640, kv_len=640, masks="hidden", counts="full"),
    Case("hidden_blocks", heads=2, kv_heads=2, q_len=300, kv_len=500, masks="hidden", full_lists=False, counts="full"),
)

# Lists without counts: every entry counts, -1 marks an unused entry.
WHOLE_LIST_CASES = (
    Case("whole_lists", batch=2, heads=4, kv_heads=2, q_len=700, kv_len=900, counts="left_out"),
    Case("whole_lists_padded", heads=2, kv_heads=2, q_len=333, kv_len=777, lists="out_of_range", counts="left_out"),
)


def cases_of(spec: AttentionSpec) -> tuple[Case, ...]:
    """Cases of a kernel: the common cases and the cases of its options, with numbers of heads that it can pack."""
    cases = (*CASES, *(SOFTCAP_CASES if spec.softcap is not None else ()), *(SINK_CASES if spec.sink else ()))
    cases = (*cases, *(MONOTONE_CASES if spec.mma != "wmma" else ()), *(SHARE_KV_CASES if spec.share_kv_loads else ()))
    cases = (*cases, *(WIDTH_CASES if _takes_any_width(spec) else ()))
    cases = (*cases, *(PER_BATCH_CASES if any(tensor.per_batch for tensor in spec.index_tensors) else ()))
    cases = (*cases, *(WHOLE_LIST_CASES if any(tensor.alone for tensor in spec.index_tensors) else ()))
    cases = (*cases, *(BITS_CASES if spec.pattern.masks_by_bits else ()))
    cases = (*cases, *(KV_LENGTH_CASES if spec.kv_lengths else ()))
    cases = (*cases, *(ORDER_QUERIES_CASES if spec.query_grouping == "search" else ()))
    cases = (*cases, *(WINDOW_CASES if spec.pattern.is_general else ()))
    return (*(fitted(case, spec) for case in cases), *(head_size_cases(spec) if spec.pad_heads else ()))


def _takes_any_width(spec: AttentionSpec) -> bool:
    """Whether the call decides the width of the lists, and all entries count."""
    tensors = spec.pattern.index_tensors
    return len(tensors) == 1 and tensors[0].dims[-1] == "any"


def fitted(case: Case, spec: AttentionSpec) -> Case:
    """Case with whole packs of heads per K/V head, and no more pairs than the oracle can hold.

    If the pattern takes its numbers from the call, the case has them.
    """
    heads = case.kv_heads * math.lcm(case.heads // case.kv_heads, spec.pack_gqa)
    most = LARGEST_PAIRS // (case.batch * heads * case.kv_len)
    fits = replace(case, heads=heads, q_len=min(case.q_len, most))
    return drawn_numbers(fits, spec.pattern) if spec.pattern.is_general else fits


RANDOM_SHAPES = 100


def random_cases() -> tuple[Case, ...]:
    """RANDOM_SHAPES small cases with random shapes, lists, layouts and scales; the same cases on every call."""
    draw = random.Random(0)

    def length() -> int:
        kind = draw.random()
        if kind < 0.05:
            return draw.randint(701, 1500)
        if kind < 0.3:  # at a block boundary
            return 64 * draw.randint(1, 10) + draw.choice((-1, 0, 1))
        return draw.randint(1, 700)

    def case(number: int) -> Case:
        group = draw.randint(1, 8)
        kv_heads = draw.randint(1, max(1, 8 // group))
        return Case(
            f"random_{number:03}",
            batch=draw.randint(1, 3),
            heads=group * kv_heads,
            kv_heads=kv_heads,
            q_len=length(),
            kv_len=length(),
            lists=draw.choice(("random", "repeated", "out_of_range", "padded")),
            counts=draw.choice(("random", "random", "mixed", "mixed", "full", "empty")),
            shared_lists=draw.random() < 0.25,
            full_lists=draw.random() < 0.75,
            layout=draw.choice(("bhsd", "bshd")),
            expanded=draw.random() < 0.25,
            scale=draw.choice((None, round(draw.uniform(0.02, 0.3), 3))),
        )

    return tuple(case(number) for number in range(RANDOM_SHAPES))


GRADIENT_PAIRS = 2 * 4096 * 4096  # the same limit for gradients, whose oracle keeps several float64 matrices


def gradient_cases_of(spec: AttentionBackwardSpec) -> tuple[Case, ...]:
    """Cases of a backward kernel: the forward cases that fit the oracle's limit."""
    cases = (*cases_of(spec.forward), *head_size_cases(spec.forward))
    return tuple(case for case in cases if case.heads * case.batch * case.q_len * case.kv_len <= GRADIENT_PAIRS)
