"""What a rank computes of a pattern that positions define: which keys it needs, and its kernel calls over them.

A *step* is one call of a kernel: some of the rank's queries over keys that lie together, either the rank's own or in a
buffer that is gathered. Kernels align positions at the last query and the last key, so the keys of a step end where
those of its last query do, or numbers of the pattern make up for it.
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
"""The number of the buffer of a step over the rank's own keys, as they are."""
DENSE = ScoredPattern(Dense(kind="dense"))
CAUSAL = ScoredPattern(Causal(kind="causal", align="bottom_right"))
PREFIX = ScoredPattern(PrefixLM(kind="prefix_lm"))


class Piece(NamedTuple):
    """Rows that a buffer has from a rank.

    Attributes:
        rank: whose they are.
        source: the first one, in that rank's k and v.
        target: the first one, in the buffer.
        size: how many.
    """

    rank: int
    source: int
    target: int
    size: int


class Step(NamedTuple):
    """One call of a kernel.

    Attributes:
        rows: of the rank's queries.
        keys: rows of the buffer.
        buffer: its number; OWN: the rank's k and v.
        scored: the pattern over these queries and keys.
        spans: the keys in the whole sequence.
        prefix: whether keys behind the length of the prefix are hidden.
        merges: whether these queries have a result over other keys already.
    """

    rows: Span
    keys: Span
    buffer: int
    scored: ScoredPattern
    spans: tuple[Span, ...]
    prefix: bool = False
    merges: bool = False


class Steps(NamedTuple):
    """What a rank computes.

    Attributes:
        buffers: what each buffer is made of.
        steps: those over the rank's own keys first.
    """

    buffers: tuple[tuple[Piece, ...], ...]
    steps: tuple[Step, ...]

    def rows(self, buffer: int) -> int:
        """Return the rows of a buffer."""
        return sum(piece.size for piece in self.buffers[buffer])


class _Part(NamedTuple):
    """Queries of the whole sequence, and the keys that they see."""

    queries: Span
    keys: tuple[Span, ...]
    scored: ScoredPattern
    prefix: bool = False


@lru_cache(maxsize=1024)
def steps_of(scored: ScoredPattern, layout: Layout, rank: int, q_len: int, kv_len: int) -> Steps:
    """Steps of a rank, for a sequence of ``q_len`` queries and ``kv_len`` keys in all.

    For lists that is one step over all keys, in their order: their entries are on the device.
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
    """Steps of a rank over lists: first over its own keys, then over those that other ranks send, by rank.

    Args:
        scored: the pattern.
        rank: whose steps.
        rows: queries and keys of a rank.
        block: keys of a block.
        caps: of each rank, how many blocks at most it sends to each.
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
    """Put the keys of parts into buffers: one for all, and one for each part whose keys do not lie together."""
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
    """Return where a part's keys lie in the rank's own; None if they do not."""
    return _place(part.keys[0], own_keys) if len(part.keys) == 1 else None


def _place(wanted: Span, spans: Sequence[Span]) -> Span | None:
    """Return where rows lie in what spans make one after the other; None where no single span has them."""
    before = 0
    for span in spans:
        if span.start <= wanted.start and wanted.stop <= span.stop:
            first = before + wanted.start - span.start
            return Span(first, first + wanted.size)
        before += span.size
    return None


def _pieces(spans: Sequence[Span], layout: Layout, length: int) -> tuple[Piece, ...]:
    """Pieces of a buffer of these rows, in its order."""
    found, target = [], 0
    for span in spans:
        for piece in sorted(_overlaps(span, layout, length), key=lambda piece: piece.target):
            found.append(piece._replace(target=target + piece.target - span.start))
        target += span.size
    return tuple(found)


def _overlaps(span: Span, layout: Layout, length: int) -> Iterator[Piece]:
    """Yield what each rank has of a span; ``target`` is the place in the whole sequence."""
    for rank in range(layout.ranks):
        before = 0
        for each in layout.spans(rank, length):
            start, stop = max(each.start, span.start), min(each.stop, span.stop)
            if start < stop:
                yield Piece(rank, before + start - each.start, start, stop - start)
            before += each.size


def _parts(pattern: PatternBase, span: Span, own_keys: Sequence[Span], q_len: int, kv_len: int) -> Iterator[_Part]:
    """Yield the parts of a run of the rank's queries."""
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
    """Yield the queries whose diagonal is among the keys, then those behind it, which see all."""
    rows = Span(max(span.start, -shift), min(span.stop, kv_len - shift))
    if rows.size > 0:
        yield _Part(rows, (Span(0, rows.stop + shift),), CAUSAL)
    behind = Span(max(span.start, kv_len - shift), span.stop)
    if behind.size > 0:
        yield _Part(behind, (Span(0, kv_len),), DENSE)


def _prefix(span: Span, shift: int, kv_len: int) -> Iterator[_Part]:
    """Yield the keys up to the last query's own, then those behind it, of which the prefix is seen."""
    own = max(0, span.stop + shift)
    if own:
        yield _Part(span, (Span(0, own),), PREFIX)
    if own < kv_len:
        yield _Part(span, (Span(own, kv_len),), DENSE, prefix=True)


def _inner_and_outer(
    pattern: SlidingWindow | SinkWindow, span: Span, own_keys: Sequence[Span], shift: int, kv_len: int
) -> tuple[Span, ...]:
    """Return the queries that see keys of this rank alone, and those before and after them, as far as there are any."""
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
    """Yield a window over the keys that its queries see; its numbers count from where these end."""
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
