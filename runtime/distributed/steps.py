"""The keys that a rank needs, and its kernel calls over them.

A *step* is one call of a kernel: some of the rank's queries over contiguous keys, either the rank's own or those in a
gathered buffer. Kernels align positions bottom right. So the keys of a step end with those of its last query, or the
pattern's parameters compensate for the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from codegen.patterns import PatternBase
from codegen.patterns.causal import Causal
from codegen.patterns.dense import Dense
from codegen.patterns.prefix_lm import PrefixLM
from codegen.patterns.sink_window import SinkWindow
from codegen.patterns.sliding_window import SlidingWindow
from codegen.scored_pattern import ScoredPattern
from runtime.distributed.layout import Layout, Span, union

OWN = -1
"""Buffer index of a step over the rank's own keys."""
DENSE = ScoredPattern(Dense(kind="dense"))
CAUSAL = ScoredPattern(Causal(kind="causal", align="bottom_right"))
PREFIX = ScoredPattern(PrefixLM(kind="prefix_lm"))


class Piece(NamedTuple):
    """Rows of a buffer that come from one rank.

    Attributes:
        rank: owner of the rows.
        source: first row in that rank's k and v.
        target: first row in the buffer.
        size: number of rows.
    """

    rank: int
    source: int
    target: int
    size: int


class Step(NamedTuple):
    """One call of a kernel.

    Attributes:
        rows: rows of the rank's queries.
        keys: rows of the buffer.
        buffer: index of the buffer; OWN: the rank's k and v.
        scored: the pattern over these queries and keys.
        spans: positions of the keys in the whole sequence.
        prefix: whether keys after the prefix length are hidden.
        merges: whether these queries already have a result over other keys.
    """

    rows: Span
    keys: Span
    buffer: int
    scored: ScoredPattern
    spans: tuple[Span, ...]
    prefix: bool = False
    merges: bool = False


class Steps(NamedTuple):
    """The buffers and steps of a rank.

    Attributes:
        buffers: pieces of each buffer.
        steps: steps, those over the rank's own keys first.
    """

    buffers: tuple[tuple[Piece, ...], ...]
    steps: tuple[Step, ...]

    def rows(self, buffer: int) -> int:
        """Number of rows of a buffer."""
        return sum(piece.size for piece in self.buffers[buffer])


class _Part(NamedTuple):
    """Queries of the whole sequence, and the keys that they see."""

    queries: Span
    keys: tuple[Span, ...]
    scored: ScoredPattern
    prefix: bool = False


@lru_cache(maxsize=1024)
def steps_of(scored: ScoredPattern, layout: Layout, rank: int, q_len: int, kv_len: int) -> Steps:
    """Steps of a rank, for a whole sequence of ``q_len`` queries and ``kv_len`` keys.

    Lists have one step over all keys, in their order, because their entries are on the device.
    """
    own_keys = layout.spans(rank, kv_len)
    local = layout.spans(rank, q_len)
    if scored.block is not None:
        everything, rows = Span(0, kv_len), Span(0, q_len // layout.ranks)
        pieces = _pieces((everything,), layout, kv_len)
        return Steps((pieces,), (Step(rows, everything, 0, scored, (everything,)),))
    parts = [part for span in local for part in _parts(scored.pattern, span, own_keys, q_len, kv_len)]
    return _placed(parts, local, own_keys, layout, kv_len)


def listed_steps(
    scored: ScoredPattern, rank: int, rows: tuple[int, int], block: int, caps: tuple[tuple[int, ...], ...]
) -> Steps:
    """Steps of a rank with lists: first over its own keys, then over the keys of the other ranks, in rank order.

    Args:
        scored: the pattern.
        rank: the rank.
        rows: queries and keys per rank.
        block: keys per block.
        caps: upper bound of the blocks that each rank sends to each other rank.
    """
    q_len, kv_len = rows
    pieces, end = [Piece(rank, 0, 0, kv_len)], kv_len
    for source, sent in enumerate(caps):
        if source != rank and sent[rank]:
            pieces.append(Piece(source, 0, end, sent[rank] * block))
            end += sent[rank] * block
    everything = Span(0, end)
    buffer = OWN if len(pieces) == 1 else 0
    step = Step(Span(0, q_len), everything, buffer, scored, (everything,))
    return Steps(() if buffer == OWN else (tuple(pieces),), (step,))


def _placed(
    parts: Sequence[_Part], local: Sequence[Span], own_keys: Sequence[Span], layout: Layout, kv_len: int
) -> Steps:
    """Assign the keys of parts to buffers: a shared one, and one for each part whose keys are not contiguous in it."""
    away = [part for part in parts if _own_place(part, own_keys) is None]
    shared = union(part.keys[0] for part in away if len(part.keys) == 1)
    buffers = [_pieces(shared, layout, kv_len)] if shared else []
    own, gathered = [], []
    for part in parts:
        rows = _place(part.queries, local)
        assert rows is not None
        made = part.scored, part.keys, part.prefix
        if (keys := _own_place(part, own_keys)) is not None:
            own.append(Step(rows, keys, OWN, *made))
        elif len(part.keys) == 1:
            place = _place(part.keys[0], shared)
            assert place is not None
            gathered.append(Step(rows, place, 0, *made))
        else:
            buffers.append(_pieces(part.keys, layout, kv_len))
            size = sum(span.size for span in part.keys)
            gathered.append(Step(rows, Span(0, size), len(buffers) - 1, *made))
    steps = [*own, *gathered]
    done = [step.rows for step in steps]
    return Steps(
        tuple(buffers), tuple(step._replace(merges=step.rows in done[:place]) for place, step in enumerate(steps))
    )


def _own_place(part: _Part, own_keys: Sequence[Span]) -> Span | None:
    """Place of a part's keys among the rank's own keys; None if it is not there."""
    return _place(part.keys[0], own_keys) if len(part.keys) == 1 else None


def _place(wanted: Span, spans: Sequence[Span]) -> Span | None:
    """Place of rows in the concatenation of spans; None if no single span contains them."""
    before = 0
    for span in spans:
        if span.start <= wanted.start and wanted.stop <= span.stop:
            first = before + wanted.start - span.start
            return Span(first, first + wanted.size)
        before += span.size
    return None


def _pieces(spans: Sequence[Span], layout: Layout, length: int) -> tuple[Piece, ...]:
    """The pieces of a buffer of these rows, in its order."""
    found, target = [], 0
    for span in spans:
        for piece in sorted(_overlaps(span, layout, length), key=lambda piece: piece.target):
            found.append(piece._replace(target=target + piece.target - span.start))
        target += span.size
    return tuple(found)


def _overlaps(span: Span, layout: Layout, length: int) -> Iterator[Piece]:
    """Each rank's pieces of a span; ``target`` is the position in the whole sequence."""
    for rank in range(layout.ranks):
        before = 0
        for each in layout.spans(rank, length):
            start, stop = max(each.start, span.start), min(each.stop, span.stop)
            if start < stop:
                yield Piece(rank, before + start - each.start, start, stop - start)
            before += each.size


def _parts(pattern: PatternBase, span: Span, own_keys: Sequence[Span], q_len: int, kv_len: int) -> Iterator[_Part]:
    """The parts of a span of the rank's queries."""
    shift = kv_len - q_len
    if isinstance(pattern, Dense):
        yield _Part(span, (Span(0, kv_len),), DENSE)
    elif isinstance(pattern, Causal):
        yield from _causal(span, shift if pattern.align == "bottom_right" else 0, kv_len)
    elif isinstance(pattern, PrefixLM):
        yield from _prefix(span, shift, kv_len)
    else:
        assert isinstance(pattern, SlidingWindow | SinkWindow)
        for rows in _inner_and_outer(pattern, span, own_keys, shift, kv_len):
            yield from _window(pattern, rows, shift, kv_len)


def _causal(span: Span, shift: int, kv_len: int) -> Iterator[_Part]:
    """The queries whose diagonal lies within the keys, then the queries after it, which see all keys."""
    rows = Span(max(span.start, -shift), min(span.stop, kv_len - shift))
    if rows.size > 0:
        yield _Part(rows, (Span(0, rows.stop + shift),), CAUSAL)
    behind = Span(max(span.start, kv_len - shift), span.stop)
    if behind.size > 0:
        yield _Part(behind, (Span(0, kv_len),), DENSE)


def _prefix(span: Span, shift: int, kv_len: int) -> Iterator[_Part]:
    """The keys up to the last query's position, then the later keys, which are visible up to the prefix length."""
    own = max(0, span.stop + shift)
    if own:
        yield _Part(span, (Span(0, own),), PREFIX)
    if own < kv_len:
        yield _Part(span, (Span(own, kv_len),), DENSE, prefix=True)


def _inner_and_outer(
    pattern: SlidingWindow | SinkWindow, span: Span, own_keys: Sequence[Span], shift: int, kv_len: int
) -> tuple[Span, ...]:
    """The queries that see only this rank's keys, and the nonempty parts before and after them."""
    if isinstance(pattern, SinkWindow):
        return (span,)
    inner = span
    left, right = pattern.numbers()["window"]
    for own in own_keys:
        if own.start <= span.start + shift < own.stop:
            first = span.start if own.start == 0 else max(span.start, own.start + left - shift)
            last = span.stop if own.stop == kv_len else min(span.stop, own.stop - right - shift)
            inner = Span(first, last)
    if inner.size <= 0:
        return (span,)
    every = Span(span.start, inner.start), inner, Span(inner.stop, span.stop)
    return tuple(rows for rows in every if rows.size > 0)


def _window(pattern: SlidingWindow | SinkWindow, span: Span, shift: int, kv_len: int) -> Iterator[_Part]:
    """A window over the keys that its queries see, with bounds relative to the last of these keys."""
    numbers = pattern.numbers()
    (left, right), sink = numbers["window"], numbers.get("sink_keys", 0)
    rows = Span(max(span.start, -right - shift), span.stop)
    last = min(kv_len, rows.stop + shift + right)
    if rows.size <= 0 or last <= 0:
        return
    first = min(max(0, rows.start + shift - left), last)
    beyond = last - rows.stop - shift
    moved = ScoredPattern(pattern).with_pattern(left=left + beyond, right=right - beyond)
    yield _Part(rows, union((Span(0, min(sink, last)), Span(first, last))), moved)
