"""Cases of attention kernels for packed sequences: their lengths, without a tensor."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from codegen.attention_cases import GRADIENT_PAIRS, drawn_numbers
from codegen.dtypes import DTYPES
from codegen.spec import AttentionBackwardSpec, AttentionSpec

RANDOM_SHAPES = 60


@dataclass(frozen=True)
class VarlenCase:
    """One set of packed sequences.

    Attributes:
        name: unique; also the seed.
        q_lens: queries of each sequence.
        kv_lens: keys of each sequence.
        heads: a multiple of kv_heads.
        kv_heads: heads of K and V.
        before: tokens of all tensors before the first sequence; nothing is written there.
        after: tokens behind the last sequence, likewise.
        spread: factor on q; large values make one key win.
        scale: the softmax scale, or None for the default.
        columns: elements of a head, fewer than the kernel's; None for as many.
        sinks: ``normal`` (of the size of an ordinary row's LSE) or ``huge`` (10000 and -10000 in turn); ``none``: in
            gradients, which need no sinks but their part of the LSE.
        window: keys before and after a query's own, of a pattern that leaves them to the call.
        sink_keys: keys at the beginning, likewise.
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 2
    before: int = 0
    after: int = 0
    spread: float = 1.0
    scale: float | None = None
    columns: int | None = None
    sinks: str = "normal"
    window: tuple[int, int] | None = None
    sink_keys: int | None = None

    @property
    def q_len(self) -> int:
        """Queries of the longest sequence."""
        return max(self.q_lens)

    @property
    def kv_len(self) -> int:
        """Keys of the longest sequence, 1 at least."""
        return max(*self.kv_lens, 1)

    @property
    def pairs(self) -> int:
        """Pairs of queries and keys of all heads."""
        return self.heads * sum(q_len * kv_len for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True))

    def describe(self) -> str:
        """The parameters that differ from a plain case."""
        count = len(self.q_lens)
        text = f"{count} sequences H{self.heads}:{self.kv_heads} of at most {self.q_len}x{self.kv_len}"
        extras = {
            f"{self.before} tokens before, {self.after} after": self.before + self.after > 0,
            f"q x {self.spread:g}": self.spread != 1.0,
            f"scale {self.scale}": self.scale is not None,
            f"d {self.columns}": self.columns is not None,
            f"{self.sinks} sinks": self.sinks == "huge",
            f"window {self.window}": self.window is not None,
            f"{self.sink_keys} sink keys": self.sink_keys is not None,
        }
        return ", ".join([text, *(word for word, said in extras.items() if said)])


def _same(name: str, *lengths: int, heads: int = 2, kv_heads: int = 2, spread: float = 1.0) -> VarlenCase:
    return VarlenCase(name, lengths, lengths, heads=heads, kv_heads=kv_heads, spread=spread)


CASES = (
    _same("plain", 700, 1024, 300, 1),
    _same("one_sequence", 1024),
    _same("long", 8192, 1, heads=2, kv_heads=1),
    _same("many_sequences", *(1 + 37 * i % 200 for i in range(150))),
    _same("many_tiles", 520, 33, 700, heads=100, kv_heads=50),
    _same("tile_edges", 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257),
    _same("empty_sequences", 0, 100, 0, 0, 333, 0),
    VarlenCase("without_keys", (100, 50, 3), (0, 70, 0)),
    VarlenCase("without_queries", (0, 50, 0), (100, 70, 30)),
    VarlenCase("one_query_each", (1,) * 17, tuple(1 + 61 * i for i in range(17)), heads=8, kv_heads=1),
    VarlenCase("chunks_of_queries", (64, 129, 200), (1000, 777, 200)),
    VarlenCase("more_queries_than_keys", (300, 200, 1000), (100, 199, 30)),
    _same("gqa_8_to_1", 640, 129, 50, heads=8, kv_heads=1),
    _same("gqa_3_to_1", 129, 1025, heads=6, kv_heads=2),
    VarlenCase("tokens_around", (100, 333), (333, 77), before=37, after=501),
    _same("one_key_wins", 512, 77, spread=40.0),
    replace(_same("scaled", 333, 200), scale=0.2),
)
SINK_CASES = (replace(_same("huge_sinks", 200, 0, 333), sinks="huge"),)
HEAD_SIZES = (8, 56, 72, 80, 120, 136, 168, 200)


def cases_of(spec: AttentionSpec) -> tuple[VarlenCase, ...]:
    """The cases of a kernel."""
    cases = (*CASES, *(SINK_CASES if spec.sink else ()))
    step = 16 // DTYPES[spec.dtype].bytes
    if spec.pad_heads or spec.mma == "wgmma":
        sizes = [size for size in HEAD_SIZES if size < spec.head_dim and size % step == 0]
        cases += tuple(replace(_same(f"d{size}", 200, 65, 129), columns=size) for size in sizes[-3:])
    return tuple(_fitted(case, spec) for case in cases)


GRADIENT_CASES = (
    *(replace(case, sinks="none") for case in CASES),
    replace(_same("long_gradients", 4000, 3), sinks="none"),
    _same("sinks", 300, 0, 129, heads=4),
    replace(_same("huge_sinks", 200, 0, 333), sinks="huge"),
    VarlenCase("sinks_without_keys", (100, 50, 3), (0, 70, 0), before=5, after=70),
    VarlenCase("tokens_far_around", (1, 0), (3, 1), before=700, after=900, sinks="none"),
)


def gradient_cases_of(spec: AttentionBackwardSpec) -> tuple[VarlenCase, ...]:
    """The cases of a kernel of gradients: those that fit the limit of the oracle."""
    step = 16 // DTYPES[spec.dtype].bytes
    sizes = [size for size in HEAD_SIZES if size < spec.head_dim and size % step == 0]
    narrow = (replace(_same(f"d{size}", 200, 65, 129), columns=size, sinks="none") for size in sizes[-3:])
    cases = (*GRADIENT_CASES, *narrow)
    return tuple(_fitted(case, spec.forward) for case in cases if case.pairs <= GRADIENT_PAIRS)


def random_gradient_cases(spec: AttentionBackwardSpec) -> tuple[VarlenCase, ...]:
    """The cases of random lengths of a kernel of gradients."""
    return tuple(replace(case, sinks="none") for case in random_cases(spec.forward))


def random_cases(spec: AttentionSpec) -> tuple[VarlenCase, ...]:
    """Small cases of random lengths: the same ones every time."""
    draw = random.Random(0)

    def length() -> int:
        kind = draw.random()
        if kind < 0.1:
            return 0
        if kind < 0.4:  # at the edge of a tile
            return max(0, 64 * draw.randint(0, 6) + draw.choice((-1, 0, 1)))
        return draw.randint(1, 500)

    def case(number: int) -> VarlenCase:
        count, kv_heads, group = draw.randint(1, 9), draw.randint(1, 3), draw.randint(1, 4)
        q_lens = tuple(length() for _ in range(count))
        kv_lens = q_lens if draw.random() < 0.5 else tuple(length() for _ in range(count))
        around = (draw.randint(0, 200), draw.randint(0, 200)) if draw.random() < 0.3 else (0, 0)
        heads = kv_heads * group
        return VarlenCase(f"random_{number:03}", q_lens, kv_lens, heads, kv_heads, *around)

    return tuple(_fitted(case(number), spec) for number in range(RANDOM_SHAPES))


def _fitted(case: VarlenCase, spec: AttentionSpec) -> VarlenCase:
    return drawn_numbers(case, spec.pattern) if spec.pattern.is_general else case
