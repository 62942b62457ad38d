"""Attention: case table, oracle, and how one case is run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from codegen.dtypes import DTYPES, FP8
from codegen.patterns import IndexTensor
from codegen.patterns.block_lists import BlockLists
from codegen.patterns.topk import TopK
from codegen.spec import KV_LENGTHS, AttentionSpec
from runtime.expressions.draw import draw_aux
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.attention import AttentionKernel
from runtime.prepare.query_grouping import find_query_order
from runtime.verify.aux_tensors import scored, seen_by_expression
from runtime.verify.common import Outcome, generator, max_error, poisoned_memory, tolerance
from runtime.verify.mask_bits import draw_bits, visible_pairs


@dataclass(frozen=True)
class Case:
    """One set of inputs. Every case of CASES runs for every kernel; what its pattern does not have is left out.

    Attributes:
        name: unique; also the seed.
        lists: how the index lists are made: ``random`` (different blocks, shuffled), ``repeated`` (drawn with
            replacement), ``out_of_range`` (some entries name no block; of tensors with one value for each batch, some
            values are too small or too large), ``padded`` (different blocks, then entries that name none where a list
            is longer than there are blocks; otherwise such a list repeats some).
        counts: lengths of block_lists rows, and values of tensors with one for each batch: ``random`` (0 to all),
            ``empty`` (all 0), ``full`` (all), ``mixed`` (each row 0 or all; of topk, about half the rows then name no
            block), ``edges`` (of batches: 0, 1, an odd number in the middle, all but one and all, in turn),
            ``block_edges`` (of batches: one less than a multiple of 64, the multiple, one more, in turn).
        heads: a multiple of kv_heads; :func:`fitted` makes it one of the heads that a kernel packs too.
        shared_lists: one list for all batches and heads.
        overlap: of topk, the share of its entries that every second list has in common with the one before, in
            another order; None if each list is drawn on its own. Different blocks are then different in both lists,
            as far as there are as many.
        full_lists: whether block_lists gets its second list.
        masks: of block_lists with ``mask: bits``, what ``draw_bits`` makes of them; or ``few``, random ones of no more
            entries than the longest list has.
        width: of topk that leaves k out, the entries of a list.
        layout: memory order of q, k, v: ``bhsd`` or ``bshd`` (a transposed view).
        expanded: k and v are one batch, expanded (stride 0).
        values: what q, k and v hold: ``normal`` (random), ``equal_keys`` (all keys of a head are one: every weight is
            the same), ``huge_logit`` (one key has the scaled logit HUGE_LOGIT for every fifth query, and values
            in HUGE_LOGIT_VALUES; all else is normal), ``large_products`` (q.k reaches LARGEST_PRODUCT before scaling),
            ``rising`` and ``falling`` (the scaled logits rise or fall by RISE from the first key to the last, so that
            the keys of a block outweigh those of all blocks on one side of it).
        spread: factor on q; large values make one key win.
        scale: the softmax scale, or None for the default.
        columns: elements of a head, fewer than the kernel's; None for as many. NaN follows them in memory.
        sinks: ``normal`` (of the size of an ordinary row's LSE) or ``huge`` (10000 and -10000 in turn).
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

    def describe(self) -> str:
        """Return the parameters that differ from a plain case."""
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
        }
        return ", ".join([text, *(word for word, said in extras.items() if said)])


HUGE_LOGIT = 1e4  # its exponential is far beyond fp32
# Times log2(e) it is 14427, whose ulp is 2^-10: a kernel that fuses this product with the difference to the maximum is
# off by up to 2^-11 in the exponent, 3.4e-4 in the weight. That is less than half an ulp of an fp16 number from 1.1 to
# 1.4, so the result of a query that this key wins must still be exact.
HUGE_LOGIT_VALUES = (1.1, 1.4)
RISE = 80.0  # over all keys: 3.4 from one block of 64 keys to the next, where there are 1500
LARGEST_PRODUCT = 6e4  # the largest finite fp16 is 65504: scores that were kept in fp16 would be near its end

CASES = (
    Case("plain", batch=2, heads=4, kv_heads=4, q_len=1024, kv_len=1024),
    Case("long", q_len=8192, kv_len=8192, heads=2, kv_heads=1),
    Case("many_tiles", heads=100, kv_heads=50, q_len=520, kv_len=900),  # several for each thread block
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
LARGEST_PAIRS = 2 * 8192 * 8192  # of a case, all heads counted: the oracle's matrices of them are float64
# Logits far beyond the cap, so that 2^x in its tanh overflows: they come out as +-softcap.
SOFTCAP_CASES = (Case("beyond_the_cap", heads=4, kv_heads=2, q_len=300, kv_len=500, spread=4000.0),)

SINK_CASES = (
    Case("huge_sinks", heads=4, kv_heads=2, q_len=200, kv_len=300, sinks="huge"),
    Case("sinks_and_no_keys", heads=4, kv_heads=2, q_len=300, kv_len=100, counts="empty"),
)

# Lists of other lengths: none, one, a warp's lanes and one more, more than there are blocks.
WIDTH_CASES = (
    Case("no_entries", heads=2, kv_heads=1, q_len=300, kv_len=400, width=0),
    Case("one_entry", batch=2, heads=4, kv_heads=2, q_len=700, kv_len=900, width=1),
    Case("two_entries", heads=2, kv_heads=2, q_len=333, kv_len=1500, lists="out_of_range", width=2),
    Case("a_warp_of_entries", heads=2, kv_heads=2, q_len=1000, kv_len=4999, width=32),
    Case("one_more_than_a_warp", heads=60, kv_heads=20, q_len=640, kv_len=5001, layout="bshd", width=33),
    Case("long_lists", heads=2, kv_heads=1, q_len=520, kv_len=2500, lists="repeated", width=157),
    Case("padded_lists", heads=2, kv_heads=2, q_len=512, kv_len=777, lists="padded", counts="mixed", width=101),
)

# A kernel that keeps the scale of a row's exponentials from step to step has to change it at each step of one of these.
MONOTONE_CASES = (
    Case("rising_logits", heads=2, kv_heads=2, q_len=300, kv_len=1500, lists="padded", values="rising"),
    Case("falling_logits", heads=2, kv_heads=2, q_len=300, kv_len=1500, lists="padded", values="falling"),
)

# Lists of neighbouring query blocks that have all, some or none of their entries in common. An odd number of query
# blocks leaves one alone; 4100 keys are 65 blocks of 64, enough for two lists of 32 without a common entry.
SHARE_KV_CASES = (
    Case("same_lists", heads=4, kv_heads=2, q_len=1000, kv_len=2500, overlap=1.0),
    Case("three_quarters_in_common", batch=2, heads=4, kv_heads=1, q_len=670, kv_len=5001, overlap=0.75),
    Case("nothing_in_common", heads=3, kv_heads=1, q_len=640, kv_len=4100, overlap=0.0),
    Case("repeated_in_common", heads=4, kv_heads=4, q_len=333, kv_len=1500, lists="repeated", overlap=0.75),
    Case("out_of_range_in_common", heads=2, kv_heads=2, q_len=700, kv_len=4999, lists="out_of_range", overlap=0.5),
    Case("one_entry_in_common", heads=2, kv_heads=2, q_len=960, kv_len=4100, layout="bshd", overlap=1 / 32),
    Case("long_in_common", heads=2, kv_heads=1, q_len=8192, kv_len=8192, overlap=0.75),
)

# Enough tiles for every thread block to have some after those that it takes as they come; more than a window's.
ORDER_QUERIES_CASES = (
    Case("many_in_common", batch=2, heads=40, kv_heads=20, q_len=1620, kv_len=1000, overlap=0.5),
    Case("many_out_of_range", heads=60, kv_heads=60, q_len=1300, kv_len=1500, lists="out_of_range", layout="bshd"),
    Case("two_windows", heads=4, kv_heads=2, q_len=18_700, kv_len=700, lists="repeated"),
)

# Of tensors with one value for each batch: several in one call, with more keys than queries and with fewer.
PER_BATCH_CASES = (
    Case("edges_of_batches", batch=5, heads=2, kv_heads=1, q_len=700, kv_len=700, counts="edges"),
    Case("edges_and_few_queries", batch=5, heads=2, kv_heads=2, q_len=70, kv_len=1111, counts="edges", layout="bshd"),
    Case("edges_and_few_keys", batch=5, heads=2, kv_heads=2, q_len=900, kv_len=333, counts="edges"),
    Case("values_out_of_range", batch=9, heads=1, kv_heads=1, q_len=400, kv_len=500, lists="out_of_range"),
)

# Heads of fewer elements: one chunk of 16 bytes, parts of every group of 64 columns and of 32, all but one chunk.
HEAD_SIZE_CASES = tuple(
    Case(f"columns_{d}", batch=2, heads=4, kv_heads=2, q_len=333, kv_len=777, layout=layout, columns=d)
    for d, layout in zip((8, 32, 40, 56, 72, 80, 112, 120, 136, 160, 200, 248), ("bhsd", "bshd") * 6, strict=True)
)

# Lengths of batches beside the edges of blocks, which most batches leave out; without rows of keys, without any key.
KV_LENGTH_CASES = (
    Case("block_edges", batch=9, heads=2, kv_heads=1, q_len=300, kv_len=1000, counts="block_edges"),
    Case("block_edges_and_one_query", batch=9, heads=4, kv_heads=2, q_len=1, kv_len=700, counts="block_edges"),
    Case("no_keys_in_any_batch", batch=2, heads=2, kv_heads=2, q_len=200, kv_len=300, counts="empty"),
    Case("a_length_for_all", batch=3, heads=2, kv_heads=2, q_len=400, kv_len=900, shared_lists=True, layout="bshd"),
    Case("many_batches", batch=40, heads=8, kv_heads=4, q_len=260, kv_len=600, lists="padded"),
)


def head_size_cases(spec: AttentionSpec) -> tuple[Case, ...]:
    """Return the cases with heads of fewer elements than a kernel's, with heads that it can pack."""
    step = 16 // DTYPES[spec.dtype].bytes  # a row of a tensor has whole chunks of 16 bytes
    sizes = {case.columns or 0: case for case in HEAD_SIZE_CASES}
    return tuple(fitted(case, spec) for d, case in sizes.items() if d < spec.head_dim and d % step == 0)


# Bits of the pairs of partial blocks: shared where lists are not, no pair visible beside full blocks and without any,
# fewer entries than lists have.
BITS_CASES = (
    Case("shared_bits", batch=2, heads=4, kv_heads=2, q_len=700, kv_len=900, masks="shared"),
    Case("bits_of_shared_lists", batch=2, heads=4, kv_heads=2, q_len=555, kv_len=1111, shared_lists=True),
    Case("bits_apart", batch=2, heads=4, kv_heads=1, q_len=513, kv_len=1023, layout="bshd", masks="apart"),
    Case("few_entries", heads=3, kv_heads=3, q_len=900, kv_len=2000, masks="few"),
    Case("hidden_and_full_blocks", heads=4, kv_heads=2, q_len=640, kv_len=640, masks="hidden", counts="full"),
    Case("hidden_blocks", heads=2, kv_heads=2, q_len=300, kv_len=500, masks="hidden", full_lists=False, counts="full"),
)


def cases_of(spec: AttentionSpec) -> tuple[Case, ...]:
    """Return the cases of a kernel: those of every kernel and those of its options, with heads that it can pack."""
    cases = (*CASES, *(SOFTCAP_CASES if spec.softcap is not None else ()), *(SINK_CASES if spec.sink else ()))
    cases = (*cases, *(MONOTONE_CASES if spec.mma != "wmma" else ()), *(SHARE_KV_CASES if spec.share_kv_loads else ()))
    cases = (*cases, *(WIDTH_CASES if isinstance(spec.pattern, TopK) and spec.pattern.k is None else ()))
    cases = (*cases, *(PER_BATCH_CASES if any(tensor.per_batch for tensor in spec.index_tensors) else ()))
    cases = (*cases, *(BITS_CASES if spec.pattern.masks_by_bits else ()))
    cases = (*cases, *(KV_LENGTH_CASES if spec.kv_lengths else ()))
    cases = (*cases, *(ORDER_QUERIES_CASES if spec.query_grouping == "search" else ()))
    return (*(fitted(case, spec) for case in cases), *(head_size_cases(spec) if spec.pad_heads else ()))


def fitted(case: Case, spec: AttentionSpec) -> Case:
    """Return a case with whole packs of heads to each K/V head, and for that no more pairs than the oracle can hold."""
    heads = case.kv_heads * math.lcm(case.heads // case.kv_heads, spec.pack_gqa)
    most = LARGEST_PAIRS // (case.batch * heads * case.kv_len)
    return replace(case, heads=heads, q_len=min(case.q_len, most))


RANDOM_SHAPES = 100


def random_cases() -> tuple[Case, ...]:
    """Return RANDOM_SHAPES small cases of random shape, lists, layout and scale: the same ones every time."""
    draw = random.Random(0)

    def length() -> int:
        kind = draw.random()
        if kind < 0.05:
            return draw.randint(701, 1500)
        if kind < 0.3:  # at the edge of a block
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


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    indices: tuple[torch.Tensor | None, ...]
    sink: torch.Tensor | None
    aux: dict[str, torch.Tensor] = field(default_factory=dict)

    def looked_up(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the aux tensors as a call is given them, if there are any."""
        return {"aux": self.aux} if self.aux else {}


def make_inputs(spec: AttentionSpec, case: Case, device: torch.device) -> Inputs:
    """Draw fresh random inputs of a case; those that are to be FP8 in float32."""
    source = generator(case.name, device)
    dtype = torch.float32 if spec.dtype in FP8 else TORCH_DTYPES[spec.dtype]

    def tensor(batch: int, heads: int, length: int) -> torch.Tensor:
        shape = (batch, heads, length, spec.head_dim)
        if case.layout == "bshd":
            shape = (batch, length, heads, spec.head_dim)
        drawn = torch.randn(shape, generator=source, device=device, dtype=torch.float32).to(dtype)
        if case.columns is not None:
            drawn[..., case.columns :] = torch.nan
            drawn = drawn[..., : case.columns]
        return drawn.transpose(1, 2) if case.layout == "bshd" else drawn

    q = tensor(case.batch, case.heads, case.q_len)
    q *= case.spread
    stored = 1 if case.expanded else case.batch
    k, v = (tensor(stored, case.kv_heads, case.kv_len) for _ in range(2))
    _set_values(spec, case, q, k, v)
    k, v = (t.expand(case.batch, -1, -1, -1) for t in (k, v))
    lists = (*_make_lists(spec, case, device, source), *_make_values(spec.pattern.index_tensors, case, device, source))
    if spec.pattern.masks_by_bits:
        lists = (*lists, *(None for _ in range(4 - len(lists))), _make_bits(spec, case, lists, source))
    if spec.query_grouping == "given":
        lists = (*lists, _make_order(spec, case, lists[0], source))
    if spec.kv_lengths:
        if len(lists) == 2 and isinstance(spec.pattern, BlockLists):
            lists = (*lists, None, None)
        lists = (*lists, *_make_values((KV_LENGTHS,), case, device, source))
    sink = _make_sink(case, device, source) if spec.sink else None
    return Inputs(q, k, v, lists, sink, draw_aux(spec.aux_tensors, _sizes(case), source, device))


def _sizes(case: Case) -> dict[str, int]:
    """Return what the sizes of aux tensors are."""
    return {"batch": case.batch, "heads": case.heads, "q_len": case.q_len, "kv_len": case.kv_len}


def _set_values(spec: AttentionSpec, case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Change normal q, k and v in place to what the case asks for."""
    if case.values == "equal_keys":
        k.copy_(k[:, :, :1].clone())
    elif case.values == "huge_logit":
        # One element of q and k is used for this alone, so that no other logit changes much.
        root = (HUGE_LOGIT / softmax_scale(spec, case)) ** 0.5
        q[..., 0] = k[..., 0] = 0.0
        winner = case.kv_len // 2 + 3
        q[:, :, ::5, 0] = k[:, :, winner, 0] = root
        v[:, :, winner] = v[:, :, winner].sign() * v[:, :, winner].abs().clamp(*HUGE_LOGIT_VALUES)
    elif case.values in ("rising", "falling"):
        root = (RISE / softmax_scale(spec, case)) ** 0.5
        ramp = torch.linspace(0.0, root, case.kv_len, device=k.device)
        q[..., 0] = root
        k[..., 0] = ramp if case.values == "rising" else ramp.flip(0)
    elif case.values == "large_products":
        keys = k.float().repeat_interleave(case.heads // case.kv_heads, 1)
        factor = (LARGEST_PRODUCT / (q.float() @ keys.transpose(2, 3)).abs().max()) ** 0.5
        q *= factor
        k *= factor


def softmax_scale(spec: AttentionSpec, case: Case) -> float:
    """Return what the logits of a case are multiplied by."""
    return (case.columns or spec.head_dim) ** -0.5 if case.scale is None else case.scale


def _make_sink(case: Case, device: torch.device, source: torch.Generator) -> torch.Tensor:
    if case.sinks == "huge":
        return torch.tensor([1e4, -1e4], device=device).repeat(case.heads)[: case.heads].contiguous()
    drawn = torch.randn(case.heads, generator=source, device=device, dtype=torch.float32)
    return math.log(case.kv_len) + 2.0 * drawn


def _make_lists(
    spec: AttentionSpec, case: Case, device: torch.device, source: torch.Generator
) -> tuple[torch.Tensor | None, ...]:
    block = spec.pattern.fixed_block
    if block is None:
        return ()
    batch, heads = (1, 1) if case.shared_lists else (case.batch, case.heads // spec.pack_gqa)
    rows, key_blocks = -(-case.q_len // block.q), -(-case.kv_len // block.kv)

    def draw(length: int, rows: int = rows) -> torch.Tensor:
        shape = (batch, heads, rows)
        if case.lists == "padded" or (case.lists == "random" and length <= key_blocks):
            picks = torch.rand((*shape, key_blocks), generator=source, device=device).argsort(-1)[..., :length]
            picks = torch.nn.functional.pad(picks, (0, length - picks.shape[3]), value=-1)
        else:
            picks = torch.randint(0, key_blocks, (*shape, length), generator=source, device=device)
        if case.lists == "out_of_range":
            wild = torch.rand(picks.shape, generator=source, device=device)
            picks = torch.where(wild < 0.2, -1, torch.where(wild > 0.8, key_blocks + 3, picks))
        return picks.to(torch.int32).contiguous()

    def pairs(length: int, overlap: float) -> torch.Tensor:
        """Draw two lists at once, which begin and end in the same entries, and shuffle both."""
        common = round(overlap * length)
        both = draw(2 * length - common, -(-rows // 2))
        two = torch.stack((both[..., :length], both[..., length - common :]), 3)
        order = torch.rand(two.shape, generator=source, device=device).argsort(-1)
        return two.gather(4, order).flatten(2, 3)[:, :, :rows].contiguous()

    def chosen_rows() -> torch.Tensor:
        return torch.rand((batch, heads, rows), generator=source, device=device) < 0.5

    def count(length: int) -> torch.Tensor:
        if case.counts == "random":
            drawn = torch.randint(0, length + 1, (batch, heads, rows), generator=source, device=device)
            return drawn.to(torch.int32)
        if case.counts == "mixed":
            return torch.where(chosen_rows(), length, 0).to(torch.int32)
        return torch.full(
            (batch, heads, rows), 0 if case.counts == "empty" else length, dtype=torch.int32, device=device
        )

    names = [tensor.name for tensor in spec.pattern.index_tensors]
    if names == ["kv_indices"]:
        k = spec.pattern.index_tensors[0].dims[3]
        k = case.width if k == "any" else int(k)
        drawn = draw(k) if case.overlap is None else pairs(k, case.overlap)
        return (drawn.masked_fill(~chosen_rows()[..., None], -1) if case.counts == "mixed" else drawn,)
    # The two lists of block_lists split the key blocks between them, as a BlockMask does.
    partial = draw(key_blocks)
    half = max(1, key_blocks // 2)
    if not case.full_lists:
        return count(key_blocks), partial
    full = partial[..., half:].contiguous() if key_blocks > 1 else partial
    return count(half), partial[..., :half].contiguous(), count(full.shape[3]), full


def _make_bits(
    spec: AttentionSpec, case: Case, lists: tuple[torch.Tensor | None, ...], source: torch.Generator
) -> torch.Tensor:
    counts, partial, block = lists[0], lists[1], spec.pattern.fixed_block
    assert counts is not None and partial is not None and block is not None
    entries = int(counts.max()) if case.masks == "few" else partial.shape[3]
    batch, heads = case.batch, case.heads // spec.pack_gqa
    return draw_bits((batch, heads, partial.shape[2], entries), block, case.masks, source, partial.device)


def _make_values(
    tensors: Sequence[IndexTensor], case: Case, device: torch.device, source: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """Draw those of the tensors that have one value for each batch: from none to all of what they count."""

    def draw(tensor: IndexTensor) -> torch.Tensor:
        batch, most = 1 if case.shared_lists else case.batch, {"kv_len": case.kv_len}[tensor.upper]
        places = torch.arange(batch, device=device)
        edges = torch.tensor([0, 1, most // 2 | 1, most - 1, most], device=device)
        drawn = {
            "random": lambda: torch.randint(0, most + 1, (batch,), generator=source, device=device),
            "empty": lambda: torch.zeros_like(places),
            "full": lambda: torch.full_like(places, most),
            "mixed": lambda: torch.randint(0, 2, (batch,), generator=source, device=device) * most,
            "edges": lambda: edges[places % len(edges)],
            "block_edges": lambda: (64 * (places // 3 + 1) + places % 3 - 1).clamp(max=most),
        }[case.counts]()
        if case.lists == "out_of_range":
            wild = torch.tensor([-1, most + 3, -(2**31), 2**31 - 1], device=device)
            drawn = torch.where(places % 2 == 0, wild[places // 2 % len(wild)], drawn)
        return drawn.to(torch.int32)

    return tuple(draw(tensor) for tensor in tensors if tensor.per_batch)


def _make_order(spec: AttentionSpec, case: Case, lists: torch.Tensor | None, source: torch.Generator) -> torch.Tensor:
    """Return the order that is found for lists that overlap, and any for others."""
    block = spec.pattern.fixed_block
    assert lists is not None and block is not None
    if case.overlap is not None:
        return find_query_order(lists, -(-case.kv_len // block.kv), spec.tile.m // block.q)
    return torch.rand(lists.shape[:3], generator=source, device=lists.device).argsort(-1).to(torch.int32)


def multiplicity(spec: AttentionSpec, case: Case, inputs: Inputs) -> torch.Tensor:
    """Return how often each pair counts: float64 (batch, heads, q_len, kv_len), 0 where it is hidden."""
    shown = _shown_by_pattern(spec, case, inputs)
    if not spec.kv_lengths:
        return shown
    lengths = dict(zip((t.name for t in spec.index_tensors), inputs.indices, strict=True))["kv_lengths"]
    assert lengths is not None
    return shown * (torch.arange(case.kv_len, device=shown.device) < lengths[:, None, None, None])


def _shown_by_pattern(spec: AttentionSpec, case: Case, inputs: Inputs) -> torch.Tensor:
    """Return how often the pattern shows each pair."""
    device = inputs.q.device
    q_len, kv_len = case.q_len, case.kv_len
    query = torch.arange(q_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)[None, :]
    values = {name: t[:, None, None, None] for name, t in spec.pattern.values_of(inputs.indices).items()}
    seen: torch.Tensor = spec.pattern.visible(query, key, q_len, kv_len, values)
    if spec.pattern.expression is not None:
        seen = seen & seen_by_expression(spec, _sizes(case), inputs.aux, device)
    block = spec.pattern.fixed_block
    if block is None:
        return seen.double().expand(case.batch, case.heads, q_len, kv_len)
    key_blocks = -(-kv_len // block.kv)

    def listed(lists: torch.Tensor, counts: torch.Tensor | None, bits: torch.Tensor | None = None) -> Any:
        used = (lists >= 0) & (lists < key_blocks)
        if counts is not None:
            used = used & (torch.arange(lists.shape[3], device=device) < counts[..., None])
        if bits is not None:
            pairs = visible_pairs(bits, lists, used, block, key_blocks)[:, :, :q_len, :kv_len]
        else:
            total = torch.zeros((*lists.shape[:3], key_blocks), dtype=torch.float64, device=device)
            total.scatter_add_(3, lists.clamp(0, key_blocks - 1).long(), used.double())
            pairs = total.repeat_interleave(block.q, 2)[:, :, :q_len].repeat_interleave(block.kv, 3)[..., :kv_len]
        if pairs.shape[1] > 1:  # one list for each pack
            pairs = pairs.repeat_interleave(spec.pack_gqa, 1)
        return pairs.expand(case.batch, case.heads, -1, -1)

    given = dict(zip((t.name for t in spec.pattern.index_tensors), inputs.indices, strict=False))
    lists = given["kv_indices"]
    assert lists is not None
    result: torch.Tensor = listed(lists, given.get("kv_num_blocks"), given.get("mask_bits")) * seen
    full = given.get("full_kv_indices")
    return result if full is None else result + listed(full, given["full_kv_num_blocks"])


def oracle(spec: AttentionSpec, case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return out, lse and multiplicity in float64."""
    out, lse, weight, _, _ = oracle_with_weights(spec, case, inputs)
    return out, lse, weight


def oracle_with_weights(
    spec: AttentionSpec, case: Case, inputs: Inputs, products: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Return them, exp(logit - its row's maximum) of each pair, and what joins the sums of the rows.

    Args:
        spec: of the kernel.
        case: what is run.
        inputs: its tensors.
        products: Q K^T of all heads, float64, where it is not to be the exact one.
    """
    q, k, v = (t.double() for t in (inputs.q, inputs.k, inputs.v))
    group = case.heads // case.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = softmax_scale(spec, case)
    weight = multiplicity(spec, case, inputs)
    scores = (q @ k.transpose(2, 3) if products is None else products) * scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.score is not None:
        scores = scored(spec.score.expression, scores, inputs.aux)
    scores = scores.masked_fill(weight == 0, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    sink = None if inputs.sink is None else inputs.sink.double()[:, None, None]
    top = (top if sink is None else torch.maximum(top, sink)).nan_to_num(neginf=0.0)
    each = torch.exp(scores - top)
    weighted = weight * each
    rest = torch.zeros_like(top) if sink is None else torch.exp(sink - top)
    total = weighted.sum(-1, keepdim=True) + rest
    out = torch.where(total > 0, weighted / total, 0.0) @ v
    return out, (total.log() + top).squeeze(-1), weight, each, rest


def torch_result(spec: AttentionSpec, case: Case, inputs: Inputs, weight: torch.Tensor) -> torch.Tensor | None:
    """Return torch's own attention in the kernel's type; None for what torch cannot say: a pair that counts twice, a
    softcap, a score, a sink."""
    if spec.softcap is not None or spec.score is not None or spec.sink or bool((weight > 1).any()):
        return None
    group = case.heads // case.kv_heads
    k, v = inputs.k.repeat_interleave(group, 1), inputs.v.repeat_interleave(group, 1)
    return torch.nn.functional.scaled_dot_product_attention(inputs.q, k, v, attn_mask=weight > 0, scale=case.scale)


def run_case(kernel: AttentionKernel, case: Case, device: torch.device) -> Outcome:
    """Run one case twice on poisoned outputs and compare it with the oracle and with torch."""
    spec = kernel.spec
    inputs = make_inputs(spec, case, device)
    reference, reference_lse, weight = oracle(spec, case, inputs)
    problems = []
    results = []
    for _ in range(2):
        memory, out = poisoned_output(spec, inputs.q)
        options: dict[str, Any] = {"scale": case.scale, "out": out, "sink": inputs.sink, **inputs.looked_up()}
        with poisoned_memory():
            results.append(kernel(inputs.q, inputs.k, inputs.v, *inputs.indices, **options))
        if not bool(memory[..., inputs.q.shape[3] :].isnan().all()):
            problems.append("columns were written that the heads do not have")
    (out, lse), (again, lse_again) = results
    if not torch.equal(out, again) or (lse is not None and lse_again is not None and not torch.equal(lse, lse_again)):
        problems.append("two runs differ")
    if lse is not None:
        problems += check_lse(lse, reference_lse)
    unseen = weight.sum(-1) == 0
    if bool((out[unseen] != 0).any()):
        problems.append("a row without keys is not 0")
    theirs = torch_result(spec, case, inputs, weight)
    torch_error = None
    if theirs is not None and not bool(unseen.all()):
        torch_error = max_error(theirs[~unseen], reference[~unseen])
    return Outcome(
        name=case.name,
        description=case.describe(),
        max_error=max_error(out, reference),
        torch_error=torch_error,
        tolerance=tolerance(spec.dtype, torch_error, float(reference.abs().max())),
        problem="; ".join(problems),
    )


def poisoned_output(spec: AttentionSpec, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for a result, all NaN, and the result: as q, or those of the memory's columns that q has."""
    if q.shape[3] == spec.head_dim:
        memory = torch.full_like(q, torch.nan)
        return memory, memory
    memory = torch.full((*q.shape[:3], spec.head_dim), torch.nan, dtype=q.dtype, device=q.device)
    return memory, memory[..., : q.shape[3]]


def check_lse(lse: torch.Tensor, reference: torch.Tensor, allowed: float = 1e-4) -> list[str]:
    """Return what is wrong with the LSE of a case, which may be off by a share of it, or of 1."""
    empty = torch.isinf(reference)
    if not torch.equal(torch.isneginf(lse), empty):
        return ["LSE is not -inf exactly where a row has no keys"]
    error = (lse.double() - reference)[~empty].abs() / reference[~empty].abs().clamp(min=1.0)
    if error.numel() and not float(error.max()) < allowed:
        return [f"LSE is off by {float(error.max()):.2g}"]
    return []
