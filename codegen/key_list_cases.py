"""Cases of packed sequences whose queries have lists of key blocks: lengths and lists, without a tensor."""

from __future__ import annotations

import random
from dataclasses import dataclass

RANDOM_CASES = 40


@dataclass(frozen=True)
class KeyListCase:
    """One set of packed sequences.

    Attributes:
        name: unique; also the seed.
        q_lens: queries of each sequence.
        kv_lens: keys of each sequence.
        kv_heads: heads of K and V; the kernel has the query heads of each.
        entries: entries of a list.
        before: tokens of all tensors before the first sequence, and as many behind the last one.
        head_lists: whether each KV head has its own lists.
        counted: whether a tensor gives the entries that count.
        shared_block: whether block 0 is in every list.
        wild: whether some entries are any integers.
        spread: factor on q; large values make one key win.
        scale: the softmax scale, or None for the default.
        lse_gradient: whether the loss depends on the log-sum-exp.
    """

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    kv_heads: int = 2
    entries: int = 4
    before: int = 0
    head_lists: bool = True
    counted: bool = False
    shared_block: bool = False
    wild: bool = False
    spread: float = 1.0
    scale: float | None = None
    lse_gradient: bool = False

    def describe(self) -> str:
        """The parameters that differ from a plain case."""
        count = len(self.q_lens)
        text = f"{count} sequences, {self.kv_heads} KV heads, of at most {max(self.q_lens)} x {max(self.kv_lens)}"
        extras = {
            f"{self.before} tokens around": self.before > 0,
            "lists for all heads": not self.head_lists,
            "counts": self.counted,
            "block 0 in every list": self.shared_block,
            "wild entries": self.wild,
            f"q x {self.spread:g}": self.spread != 1.0,
            f"scale {self.scale}": self.scale is not None,
            "a gradient of the LSE": self.lse_gradient,
        }
        return ", ".join([text, f"{self.entries} entries", *(word for word, said in extras.items() if said)])


def _same(name: str, *lengths: int, kv_heads: int = 2, entries: int = 4) -> KeyListCase:
    return KeyListCase(name, lengths, lengths, kv_heads, entries)


CASES = (
    _same("one_sequence", 1000, kv_heads=1, entries=5),
    _same("sequences", 300, 129, 64, 1),
    _same("long", 2500, kv_heads=1, entries=16),
    _same("many_sequences", *(1 + 29 * i % 150 for i in range(40)), entries=2),
    _same("empty_sequences", 0, 100, 0, 333, 0),
    KeyListCase("chunks", (64, 129, 200), (1000, 777, 200), entries=6),
    KeyListCase("more_queries_than_keys", (300, 200), (100, 199)),
    KeyListCase("without_keys", (100, 50), (0, 70)),
    KeyListCase("without_queries", (0, 50), (100, 130)),
    KeyListCase("tokens_around", (100, 333), (333, 77), before=37),
    KeyListCase("shared_lists", (700, 300), (700, 300), head_lists=False),
    KeyListCase("counts", (700, 300), (700, 300), entries=7, counted=True),
    KeyListCase("one_block", (900,), (900,), kv_heads=1, entries=1, shared_block=True),
    KeyListCase("block_of_all", (1500,), (1500,), kv_heads=1, entries=5, shared_block=True),
    KeyListCase("repeated", (150, 90), (150, 90), entries=24),
    KeyListCase("wild", (400, 90), (400, 190), entries=9, wild=True),
    KeyListCase("one_key_wins", (300, 77), (300, 77), spread=40.0),
    KeyListCase("scaled", (300, 77), (300, 77), scale=0.2),
    KeyListCase("of_the_lse", (300, 77), (300, 77), lse_gradient=True),
)


SMALL_BLOCKS = (_same("crowded", 300, 77, entries=96),)
"""Of lists that have most blocks of a tile, several times each."""
TILE_KEYS = 64  # of tiles that have several smaller blocks


def cases_of(entry_keys: int) -> tuple[KeyListCase, ...]:
    """Cases of a kernel of gradients for lists of blocks of `entry_keys` keys."""
    return CASES + (SMALL_BLOCKS if entry_keys < TILE_KEYS else ())


def random_cases() -> tuple[KeyListCase, ...]:
    """Small cases of random lengths and lists: the same ones every time."""
    draw = random.Random(0)

    def case(number: int) -> KeyListCase:
        count = draw.randint(1, 5)
        q_lens = tuple(draw.choice((0, draw.randint(1, 300), 64 * draw.randint(1, 4))) for _ in range(count))
        q_lens = q_lens if any(q_lens) else (7, *q_lens[1:])
        longer = draw.random() < 0.5
        kv_lens = tuple(length + draw.randint(0, 200) if longer else length for length in q_lens)
        return KeyListCase(
            f"random_{number:03}",
            q_lens,
            kv_lens,
            draw.randint(1, 3),
            draw.randint(1, 20),
            before=draw.choice((0, 0, 19)),
            head_lists=draw.random() < 0.8,
            counted=draw.random() < 0.3,
            shared_block=draw.random() < 0.3,
            wild=draw.random() < 0.3,
        )

    return tuple(case(number) for number in range(RANDOM_CASES))
