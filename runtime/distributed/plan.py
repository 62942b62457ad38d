"""A plan: the non-tensor options of a distributed call, serialized to text as an argument of a torch operator."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from codegen.scored_pattern import ScoredPattern, scored_pattern
from runtime.distributed.layout import Layout
from runtime.distributed.lists import key_block
from runtime.distributed.masks import asks_for_heads
from runtime.distributed.steps import Steps, listed_steps, steps_of
from runtime.expressions.graphs import constant_in_graphs

_TILE = 128  # rows of the query tile of most kernels
_TILES = 264  # tiles per call: two per SM of an H100, so that a call of some heads fills the GPU
_GROWTH = 1.4  # growth of runs with lists, whose computation is little longer than their transfer
_PAIRS_A_KEY = 3000  # pairs that an H100 computes per transfer of a key and its value, at 600 TFLOPS and 200 GB/s
_SHARE = {"dense": 1.0, "causal": 0.5, "prefix_lm": 0.5}  # lower bound of the share of visible pairs
_LEAST_SLOWER = 4  # minimum ratio of a run's computation to its transfer: waiting for the first of two is then 3%
_MOST_RUNS_BY_HEADS = 2
_MOST_PIECES = 2  # pieces per rank, as in zigzag: each piece is one message per head
Caps = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Plan:
    """Plan of a distributed call.

    Attributes:
        group: name of the group.
        layout: assignment of rows to ranks.
        scored: the pattern.
        caps: upper bound of the key blocks that each rank sends to each other rank; None: everything is sent.
        heads: heads of k that are sent together; 0: few, then increasingly more.
        symmetric: read keys and values from the memory of peers.
        timeout: seconds that ranks wait for each other.
    """

    group: str
    layout: Layout
    scored: ScoredPattern
    caps: Caps | None
    heads: int
    symmetric: bool
    timeout: float

    def facts(self) -> dict[str, Any]:
        """Facts that must be the same on all ranks, as plain data."""
        caps = None if self.caps is None else [list(sent) for sent in self.caps]
        layout = [list(chunks) for chunks in self.layout.chunks]
        return {
            "pattern": self.scored.text,
            "layout": layout,
            "send": caps,
            "heads_at_once": self.heads,
            "symmetric": self.symmetric,
        }

    def steps(self, rank: int, q_len: int, kv_len: int) -> Steps:
        """Steps of a rank, with ``q_len`` queries and ``kv_len`` keys per rank."""
        ranks = self.layout.ranks
        if (caps := self.caps_of(kv_len)) is None:
            return steps_of(self.scored, self.layout, rank, ranks * q_len, ranks * kv_len)
        return listed_steps(self.scored, rank, (q_len, kv_len), key_block(self.scored), caps)

    def caps_of(self, kv_len: int) -> Caps | None:
        """Key blocks that ranks send, with ``kv_len`` keys per rank; None: all, in their order.

        With many chunks per rank, separate messages would be too many, so blocks are packed even if all are sent.
        """
        if self.caps is not None or self.scored.block is None or not packs_blocks(self.layout):
            return self.caps
        ranks, blocks = range(self.layout.ranks), kv_len // key_block(self.scored)
        return tuple(tuple(0 if source == rank else blocks for rank in ranks) for source in ranks)

    def runs(
        self, q_shape: tuple[int, ...], kv_heads: int, *, gives_back: bool = False, by_heads: bool = False
    ) -> tuple[slice, ...]:
        """Heads of k that are sent together, the same on all ranks.

        Nothing is computed until the first run has arrived, so it is just long enough to fill the GPU. Each further run
        has 50% more heads, and arrives while the previous run is computed. If the computation of a run takes much
        longer than its transfer, there are only two runs, because the last tiles of each call leave SMs idle.
        ``gives_back``: the last run's gradients return when nothing is left to compute, so with lists the last run is
        short too. ``by_heads``: each rank computes its own heads. A run moves four tensors, which takes the host longer
        than attention over few heads, so there are at most two runs.
        """
        batch, heads, q_len, _ = q_shape
        size = float(self.heads or max(1, _TILES * _TILE * kv_heads // max(1, batch * heads * q_len)))
        kind = self.scored.pattern.kind
        growth, slower = _GROWTH, _SHARE.get(kind, 0.0) * q_len * (heads // kv_heads) / _PAIRS_A_KEY
        if not self.heads and slower >= _LEAST_SLOWER:
            size, growth = max(size, kv_heads / (1 + slower)), kv_heads
        if asks_for_heads(self.scored) or kind == "sliding_window":
            size = kv_heads  # a mask indexes heads from the first; a window needs few keys of other ranks
        if gives_back and not self.heads and growth == _GROWTH and size < kv_heads:
            sizes = _short_at_both_ends(kv_heads, max(1, round(size)))
        else:
            sizes = _growing(kv_heads, size, 1.0 if self.heads else growth)
        if by_heads and not self.heads and len(sizes) > _MOST_RUNS_BY_HEADS:
            sizes = [kv_heads - kv_heads // 2, kv_heads // 2]
        ends = [*itertools.accumulate(sizes)]
        return tuple(slice(end - size, end) for end, size in zip(ends, sizes, strict=True))


def _growing(total: int, size: float, growth: float) -> list[int]:
    """Split a number into parts of growing size; the last part is the remainder."""
    found: list[int] = []
    while (left := total - sum(found)) > 0:
        found.append(min(left, max(1, round(size))))
        size *= growth
    return found


def _short_at_both_ends(total: int, least: int) -> list[int]:
    """Split a number into parts: the last is ``least``, each earlier one twice as large, and the first is short too."""
    ends: list[int] = []
    left, size = total, least
    while left - size >= 2 * size:
        ends.insert(0, size)
        left, size = left - size, 2 * size
    first = left // 3
    return [*([first] if first else []), left - first, *ends]


@lru_cache(maxsize=256)
def packs_blocks(layout: Layout) -> bool:
    """Whether key blocks of lists are packed, because a rank's part of the sequence has many pieces."""
    return max(len(layout.spans(rank, layout.count)) for rank in range(layout.ranks)) > _MOST_PIECES


@constant_in_graphs
def plan_text(*values: Any) -> str:
    """The text of a plan with these values and a layout's chunks; a traced graph holds it as a constant."""
    return json.dumps(values)


@lru_cache(maxsize=256)
def plan_of(text: str) -> Plan:
    """The plan of a text."""
    group, chunks, pattern, caps, heads, symmetric, timeout = json.loads(text)
    layout = Layout(tuple(map(tuple, chunks)))
    every = None if caps is None else tuple(map(tuple, caps))
    return Plan(group, layout, scored_pattern(pattern), every, heads, symmetric, timeout)
