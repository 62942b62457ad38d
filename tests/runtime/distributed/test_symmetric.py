"""Keys and values in symmetric memory, where two ranks are one process and their memory is the CPU's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.scored_pattern import ScoredPattern  # noqa: E402
from runtime.distributed import shuffle, symmetric  # noqa: E402
from runtime.distributed.exchange import Exchange  # noqa: E402
from runtime.distributed.layout import Layout  # noqa: E402
from runtime.distributed.steps import CAUSAL, DENSE, Steps, steps_of  # noqa: E402
from runtime.distributed.symmetric import Symmetric, SymmetricExchange, check_not_kept, fits  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.patterns import SlidingWindow, scored_of  # noqa: E402

RANKS, LENGTH = 2, 64


class Handle:
    """Stands for torch's: the memory of all ranks, and what was waited for."""

    def __init__(self, everywhere: list[Any]) -> None:
        self.everywhere = everywhere
        self.waited: list[int] = []

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: Any) -> Any:
        assert self.everywhere[rank].shape == sizes and self.everywhere[rank].dtype == dtype
        return self.everywhere[rank]

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self.waited.append(channel)


def exchanges(scored: ScoredPattern, layout: Layout) -> tuple[list[SymmetricExchange], Any, Any]:
    whole_k, whole_v = torch.randn(2, 1, 4, LENGTH, 8).unbind()
    everywhere = [torch.full((2, 1, 4, LENGTH, 8), torch.nan) for _ in range(RANKS)]
    steps = [steps_of(scored, layout, rank, LENGTH, LENGTH) for rank in range(RANKS)]
    assert fits(steps)
    found = []
    for rank in range(RANKS):
        k, v = (layout.shard(whole, rank) for whole in (whole_k, whole_v))
        given: dict[str, Any] = {"group": None, "rank": rank, "steps": steps, "k": k, "v": v, "sent": None}
        found.append(SymmetricExchange(Symmetric(everywhere[rank], Handle(everywhere)), layout, **given))
    return found, whole_k, whole_v


@pytest.mark.parametrize("gives_back", [False, True])
@pytest.mark.parametrize("layout", [Layout.contiguous(RANKS), Layout.zigzag(RANKS)], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("scored", [DENSE, CAUSAL])
def test_each_rank_has_the_keys_that_its_steps_see(scored: ScoredPattern, layout: Layout, *, gives_back: bool) -> None:
    ranks, whole_k, whole_v = exchanges(scored, layout)
    for each in ranks:
        each.fill()
    for each in ranks:
        runs = [slice(0, 1), slice(1, 4)]
        came = list(each.arrivals(runs, gives_back=gives_back))
        assert [run for run, _ in came] == runs and each.whole.handle.waited == ([0] if gives_back else [0, 1])
        for run, ((k, v),) in came:
            for step in each.mine.steps:
                keys = slice(*step.keys)
                if step.buffer == 0:
                    assert torch.equal(k[:, :, keys], whole_k[:, run, keys])
                    assert torch.equal(v[:, :, keys], whole_v[:, run, keys])


def test_keys_that_are_there_are_not_copied() -> None:
    (first, _), _, _ = exchanges(DENSE, Layout.contiguous(RANKS))
    own = first.whole.here[:, :, :, : LENGTH // 2]
    first.k, first.v = own[0], own[1]
    version = first.whole.here._version
    first.fill()
    assert first.whole.here._version == version


def test_keys_that_later_calls_write_to_have_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, _), _, _ = exchanges(DENSE, Layout.contiguous(RANKS))
    state = SimpleNamespace(memory={(symmetric.KEYS, first.whole.here.shape): first.whole})
    monkeypatch.setattr(symmetric, "state_of", lambda group: state)
    group: Any = None
    with pytest.raises(ArgumentError, match="k: is from shared_keys"):
        check_not_kept(first.whole.here[0], group)
    check_not_kept(first.k, group)


def test_only_whole_sequences_are_read_from_peers() -> None:
    window = scored_of(SlidingWindow(5))
    every = [steps_of(window, Layout.contiguous(RANKS), rank, LENGTH, LENGTH) for rank in range(RANKS)]
    assert not fits(every)
    assert fits([Steps((), ())])
    assert issubclass(SymmetricExchange, Exchange)


def test_gradients_are_written_where_the_keys_are() -> None:
    layout = Layout.zigzag(RANKS)
    ranks, whole_k, _ = exchanges(CAUSAL, layout)
    half = LENGTH // RANKS
    everywhere = [torch.full((RANKS, 2, 1, 4, half, 8), torch.nan) for _ in range(RANKS)]
    inboxes = [Symmetric(everywhere[rank], Handle(everywhere)) for rank in range(RANKS)]
    run = slice(1, 3)
    # Of each key the gradients are those of the whole sequence, times one more than the rank that has computed them.
    grads = [
        [(whole_k[:, run, : each.mine.rows(0)] * (rank + 1),) * 2] if each.mine.buffers else []
        for rank, each in enumerate(ranks)
    ]
    for rank, each in enumerate(ranks):
        each.push(inboxes[rank], run, grads[rank])
    for rank, each in enumerate(ranks):
        sums = tuple(torch.empty(1, 2, half, 8) for _ in range(2))
        each.collect(inboxes[rank], run, list(each._own(grads[rank])), sums)
        right = torch.zeros(1, 2, LENGTH, 8)
        for other, computed in enumerate(ranks):
            end = computed.mine.rows(0) if computed.mine.buffers else 0
            right[:, :, :end] += whole_k[:, run, :end] * (other + 1)
        for found in sums:
            torch.testing.assert_close(found, layout.shard(right, rank))


@pytest.mark.parametrize("layout", [Layout.contiguous(RANKS), Layout.zigzag(RANKS)], ids=["contiguous", "zigzag"])
def test_heads_go_where_they_are_computed_and_back(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    memory: dict[tuple[str, tuple[int, ...]], list[Any]] = {}

    def memory_of(group: int, what: str, shape: tuple[int, ...], like: Any) -> Symmetric:
        everywhere = memory.setdefault((what, shape), [like.new_full(shape, torch.nan) for _ in range(RANKS)])
        return Symmetric(everywhere[group], Handle(everywhere))

    monkeypatch.setattr(shuffle, "memory_of", memory_of)
    monkeypatch.setattr(shuffle.dist, "get_rank", lambda group: group)
    q, k = torch.randn(1, 8, LENGTH, 8), torch.randn(1, 4, LENGTH, 8)
    half, runs = LENGTH // RANKS, [slice(0, 1), slice(1, 2)]
    ranks, given = [], []
    for rank in range(RANKS):
        each: Any = shuffle.SymmetricShuffle(rank, layout, 2, torch.device("cpu"))  # type: ignore[arg-type]
        parts = [
            shuffle.Parted(layout.shard(x, rank), x.new_empty(1, x.shape[1] // RANKS, LENGTH, 8), group)
            for x, group in ((q, 2), (k, 1))
        ]
        each.show(parts)
        ranks.append(each)
        given.append(parts)
    for rank, each in enumerate(ranks):
        for run in runs:
            each.read(run, given[rank])
        for x, part in zip((q, k), given[rank], strict=True):
            heads = part.whole.shape[1]
            assert torch.equal(part.whole, x[:, rank * heads : (rank + 1) * heads])
        assert torch.equal(each.room(tuple(given[rank][0].whole.shape), q).fill_(0), torch.zeros(1, 4, LENGTH, 8))
        each.rooms[0].here.copy_(given[rank][0].whole)
    for rank, each in enumerate(ranks):
        found = torch.empty(1, 8, half, 8)
        for run in runs:
            each.give_back(run, [shuffle.Parted(found, each.rooms[0].here, 2)])
        assert torch.equal(found, layout.shard(q, rank))


def test_peers_get_memory_that_is_cleared_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch clears it, and the signals of barriers, in the default stream; a peer that has it may signal at once."""
    from torch.distributed import _symmetric_memory as memory

    done: list[str] = []
    group: Any = SimpleNamespace(group_name="", size=lambda: RANKS, rank=lambda: 0)
    monkeypatch.setattr(symmetric, "state_of", lambda group: SimpleNamespace(memory={}))
    monkeypatch.setattr(symmetric, "fail_together", lambda *_: done.append("agree"))
    monkeypatch.setattr(symmetric, "_settle", lambda group, device: done.append("settle"))
    monkeypatch.setattr(memory, "empty", lambda *shape, **options: done.append("empty") or torch.empty(shape))
    handle = SimpleNamespace(get_buffer=None)
    monkeypatch.setattr(memory, "rendezvous", lambda here, name: done.append("rendezvous") or handle)
    symmetric.memory_of(group, "keys", (2, 3), torch.empty(1))
    assert done == ["empty", "settle", "agree", "rendezvous", "agree"]
