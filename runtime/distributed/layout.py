"""Assignment of a sequence to ranks: chunks of equal length, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

import torch

from codegen.wording import shown
from runtime.checks import check_dense, check_dim, present_device
from runtime.errors import ArgumentError

NAMED_LAYOUTS = ("contiguous", "zigzag")
_MOST_RANKS, _LONGEST = 1 << 20, 1 << 48


class Span(NamedTuple):
    """Rows from ``start`` to before ``stop``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Assignment of the equal chunks of a sequence to ranks.

    A rank's tensors hold its chunks in the order given here. Queries and keys share one layout.

    Attributes:
        chunks: chunk indices of each rank. Each chunk belongs to one rank, and all ranks have equally many.
    """

    chunks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        try:
            chunks = tuple(tuple(index(chunk) for chunk in of_rank) for of_rank in self.chunks)
        except Exception:  # not a sequence of sequences of ints
            reason = f"is {shown(self.chunks)}, expected a sequence of chunk indices per rank"
            raise ArgumentError("layout", reason) from None
        named = sorted(chunk for of_rank in chunks for chunk in of_rank)
        equal = len({len(of_rank) for of_rank in chunks}) == 1
        if not named or not equal or named != list(range(len(named))):
            reason = "expected each chunk index from 0 once, and equally many per rank"
            raise ArgumentError("layout", f"has the chunks {shown(self.chunks)}, {reason}")
        object.__setattr__(self, "chunks", chunks)

    @staticmethod
    def contiguous(ranks: int) -> Layout:
        """Return the layout that gives rank r the r-th of ``ranks`` equal parts."""
        return Layout(tuple((rank,) for rank in range(_ranks(ranks))))

    @staticmethod
    def zigzag(ranks: int) -> Layout:
        """Return the layout that gives rank r the chunks r and 2 ranks - 1 - r, which balances causal work."""
        ranks = _ranks(ranks)
        return Layout(tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)))

    @staticmethod
    def balanced(work: torch.Tensor | Sequence[float], ranks: int) -> Layout:
        """Return a layout in which all ranks have about the same work, and equally many chunks.

        Chunks are assigned in descending order of work, each to the rank with the least work so far. Ranks that pass
        the same ``work`` get the same layout.

        Args:
            work: work per chunk, (chunks,), or lengths of lists (batch, heads, chunks), which are summed.
            ranks: number of ranks, a divisor of the number of chunks.

        Returns:
            The layout; each rank's chunks are ascending.

        Raises:
            ArgumentError: if the chunks are not a multiple of the ranks, or if ``work`` is not finite numbers.
        """
        ranks, each = _ranks(ranks), _work(work)
        if not each or len(each) % ranks:
            raise ArgumentError("work", f"has {len(each)} chunks, expected a multiple of {ranks} ranks")
        room, loads = len(each) // ranks, [0.0] * ranks
        found: list[list[int]] = [[] for _ in range(ranks)]
        for chunk in sorted(range(len(each)), key=lambda chunk: (-each[chunk], chunk)):
            rank = min((r for r in range(ranks) if len(found[r]) < room), key=lambda r: (loads[r], r))
            found[rank].append(chunk)
            loads[rank] += each[chunk]
        return Layout(tuple(tuple(sorted(chunks)) for chunks in found))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.chunks)

    @property
    def count(self) -> int:
        """Number of chunks."""
        return sum(map(len, self.chunks))

    def chunk_size(self, length: int) -> int:
        """Return the rows per chunk. ArgumentError if ``length`` is not a multiple of the number of chunks."""
        if check_count("length", length) % self.count:
            raise ArgumentError("length", f"is {length}, expected a multiple of {self.count} chunks")
        return length // self.count

    def spans(self, rank: int, length: int) -> tuple[Span, ...]:
        """Return a rank's rows of the whole sequence, in its order. Adjacent chunks are joined."""
        size = self.chunk_size(length)
        check_rank(rank, self.ranks)
        return joined(Span(chunk * size, (chunk + 1) * size) for chunk in self.chunks[rank])

    def positions(self, rank: int, length: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the positions of a rank's rows in the whole sequence, as RoPE needs: int64 (length / ranks,)."""
        spans = self.spans(rank, length)
        where = None if device is None else present_device("device", device)
        if not spans:
            return torch.empty(0, dtype=torch.int64, device=where)
        return torch.cat([torch.arange(*span, device=where) for span in spans])

    def shard(self, tensor: torch.Tensor, rank: int, dim: int = 2) -> torch.Tensor:
        """Return a rank's part of a tensor with the sequence in ``dim``; default: (batch, heads, length, head_dim)."""
        spans = self.spans(rank, _length(tensor, dim, "tensor"))
        if not spans:
            return tensor.narrow(dim, 0, 0)
        return torch.cat([tensor.narrow(dim, span.start, span.size) for span in spans], dim)

    def join(self, parts: Sequence[torch.Tensor], dim: int = 2) -> torch.Tensor:
        """Return the whole tensor from all ranks' parts (batch, heads, length / ranks, head_dim), in rank order."""
        if not isinstance(parts, Sequence) or len(parts) != self.ranks:
            has = len(parts) if isinstance(parts, Sequence) else type(parts).__name__
            raise ArgumentError("parts", f"is {has}, expected one tensor for each of the {self.ranks} ranks")
        rows = [_length(part, dim, "parts") for part in parts]
        if len({(part.shape, part.dtype, part.device) for part in parts}) > 1:
            shapes = ", ".join(f"{tuple(part.shape)} {part.dtype} on {part.device}" for part in parts)
            raise ArgumentError("parts", f"are {shapes}, expected one shape, dtype and device")
        everything = torch.cat(list(parts), dim)
        places = [self.positions(rank, sum(rows), everything.device) for rank in range(self.ranks)]
        return everything.index_select(dim, torch.cat(places).argsort())


def check_count(name: str, value: Any) -> Any:
    """A checked length or number; during tracing it may be symbolic.

    Raises:
        ArgumentError: unless it is an integer from 0 to the largest length.
    """
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or not 0 <= value <= _LONGEST:
        raise ArgumentError(name, f"is {shown(value)}, expected an integer from 0 to {_LONGEST}")
    return value


def check_rank(rank: Any, ranks: int) -> None:
    """Check a rank.

    Raises:
        ArgumentError: unless it is an integer from 0 to ``ranks`` - 1.
    """
    if check_count("rank", rank) >= ranks:
        raise ArgumentError("rank", f"is {rank}, expected an integer from 0 to {ranks - 1}")


def _ranks(ranks: Any) -> int:
    """A checked number of ranks.

    Raises:
        ArgumentError: unless it is an integer from 1.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= _MOST_RANKS:
        raise ArgumentError("ranks", f"is {shown(ranks)}, expected an integer from 1 to {_MOST_RANKS}")
    return ranks


def _work(work: Any) -> list[float]:
    """Work per chunk.

    Raises:
        ArgumentError: unless it is finite numbers.
    """
    try:
        if isinstance(work, str | bytes | bytearray | Set | Mapping):
            raise TypeError("not a sequence of numbers")
        if isinstance(work, torch.Tensor):
            if work.is_complex():
                raise TypeError("not real numbers")
            work = work.reshape(-1, work.shape[-1]).double().sum(0).tolist()
        each = [float(value) for value in work]
    except Exception:  # not iterable, or not numbers
        raise ArgumentError("work", f"is {shown(work)}, expected a number per chunk") from None
    if not all(map(math.isfinite, each)):
        raise ArgumentError("work", f"is {shown(each)}, expected finite numbers")
    return each


def _length(tensor: Any, dim: Any, name: str) -> int:
    """Size of a dimension.

    Raises:
        ArgumentError: for anything but a tensor with that dimension.
    """
    check_dense(name, tensor)
    check_dim("dim", dim, tensor)
    return int(tensor.shape[dim])


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans in their order, with adjacent spans joined and empty ones dropped."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].stop == span.start and span.size > 0:
            found[-1] = Span(found[-1].start, span.stop)
        elif span.size > 0:
            found.append(span)
    return tuple(found)


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The union of spans, ascending."""
    found: list[Span] = []
    for span in sorted(span for span in spans if span.size > 0):
        if found and span.start <= found[-1].stop:
            found[-1] = Span(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return tuple(found)


def layout_of(layout: Layout | str, ranks: int) -> Layout:
    """A layout, given by itself or by name.

    Raises:
        ArgumentError: for an unknown name, or a layout with another number of ranks.
    """
    if isinstance(layout, str) and layout in NAMED_LAYOUTS:
        found: Layout = getattr(Layout, layout)(ranks)
        return found
    if not isinstance(layout, Layout):
        names = ", ".join(map(repr, NAMED_LAYOUTS))
        raise ArgumentError("layout", f"is {shown(layout)}, expected {names} or a Layout")
    if layout.ranks != ranks:
        raise ArgumentError("layout", f"has {layout.ranks} ranks, the group has {ranks}")
    return layout
