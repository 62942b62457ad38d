"""Who has what, which calls a rank makes of it, and what lists are called: in one process, without any transfer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from runtime.distributed import Layout, SendPlan, keys_received, local_lists  # noqa: E402
from runtime.distributed.exchange import add_up  # noqa: E402
from runtime.distributed.layout import layout_of  # noqa: E402
from runtime.distributed.lists import blocks_of, chosen, names_of, relabeled, wanted_blocks  # noqa: E402
from runtime.distributed.plan import Plan  # noqa: E402
from runtime.distributed.steps import OWN, Steps, listed_steps, steps_of  # noqa: E402
from runtime.distributed.strided import strided_lists  # noqa: E402
from runtime.distributed.transfer import Message, Transfer  # noqa: E402
from runtime.errors import ArgumentError, CollectiveError  # noqa: E402
from runtime.patterns import (  # noqa: E402
    BlockLists,
    Causal,
    Dense,
    Pattern,
    PrefixLM,
    SinkWindow,
    SlidingWindow,
    Strided,
    TopK,
    scored_of,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts of 2 to 4 ranks, of up to three chunks each, in any order."""
    ranks, each = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    order = draw(st.permutations(range(ranks * each)))
    return Layout(tuple(tuple(order[rank * each : (rank + 1) * each]) for rank in range(ranks)))


def prefixes(draw: Any) -> PrefixLM:
    return PrefixLM(torch.tensor([draw(st.integers(0, 60))], dtype=torch.int32))


@st.composite
def patterns(draw: st.DrawFn) -> Any:
    """Patterns that positions define."""
    few = st.integers(0, 30)
    kinds = {
        "dense": Dense,
        "causal": lambda: Causal(align=draw(st.sampled_from(["bottom_right", "top_left"]))),
        "window": lambda: SlidingWindow(draw(few), draw(few)),
        "sinks": lambda: SinkWindow(draw(st.integers(1, 9)), draw(few), draw(few)),
        "prefix": lambda: prefixes(draw),
    }
    return kinds[draw(st.sampled_from(sorted(kinds)))]()


def seen_by_steps(steps: Steps, layout: Layout, rank: int, lengths: tuple[int, int], tensors: Any) -> Any:
    """Return how often each of a rank's queries sees each key of the whole sequence, by the calls of its steps."""
    total = torch.zeros(lengths[0] // layout.ranks, lengths[1], dtype=torch.int32)
    own = layout.positions(rank, lengths[1])
    for step in steps.steps:
        places = own
        if step.buffer != OWN:
            pieces = steps.buffers[step.buffer]
            places = torch.cat([layout.positions(p.rank, lengths[1])[p.source : p.source + p.size] for p in pieces])
            assert [p.target for p in pieces] == [sum(p.size for p in pieces[:n]) for n in range(len(pieces))]
        keys = places[slice(*step.keys)]
        assert torch.equal(keys, torch.cat([torch.arange(*span) for span in step.spans])), "what spans say"
        limit = tensors[0] if step.prefix else None
        kv_lengths = None
        if limit is not None:
            kv_lengths = sum((limit - span.start).clamp(0, span.size) for span in step.spans)
        given_ = tensors if step.scored.pattern.kind == "prefix_lm" else ()
        shape = (1, 1, step.rows.size, len(keys))
        seen = attention_oracle.times_seen(step.scored.text, given_, shape, kv_lengths)
        total[slice(*step.rows)] = total[slice(*step.rows)].index_add(1, keys, seen[0, 0])
    return total


@given(layouts(), patterns(), st.integers(1, 4), st.integers(1, 4))
def test_calls_see_what_the_pattern_shows_once(layout: Layout, pattern: Any, q_rows: int, k_rows: int) -> None:
    lengths = layout.count * q_rows, layout.count * k_rows
    tensors = pattern.index_tensors()
    right = attention_oracle.times_seen(pattern.spec_json, tensors, (1, 1, *lengths))[0, 0]
    for rank in range(layout.ranks):
        steps = steps_of(scored_of(pattern), layout, rank, *lengths)
        found = seen_by_steps(steps, layout, rank, lengths, tensors)
        assert torch.equal(found, right[layout.positions(rank, lengths[0])])


def test_a_window_needs_little_of_others_and_works_on_its_own_first() -> None:
    layout, pattern = Layout.contiguous(4), SlidingWindow(10)
    steps = steps_of(scored_of(pattern), layout, 1, 400, 400)
    assert [step.rows for step in steps.steps if step.buffer == OWN] == [(10, 100)]
    assert steps.steps[0].buffer == OWN and steps.steps[0].scored == scored_of(pattern)
    assert keys_received(pattern, layout, 1, 400, 400) == 10 and keys_received(pattern, layout, 0, 400, 400) == 0
    assert keys_received(Causal(), Layout.zigzag(2), 1, 400, 400) == 100
    assert keys_received(Dense(), layout, 0, 400, 400) == 300


def test_zigzag_gives_all_ranks_the_same_causal_work() -> None:
    layout = Layout.zigzag(3)
    work = [int((layout.positions(rank, 600) + 1).sum()) for rank in range(3)]
    assert len(set(work)) == 1


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 4))
def test_balanced_layouts(each: list[int], ranks: int) -> None:
    work = [float(value) for value in each for _ in range(ranks)]
    layout = Layout.balanced(work, ranks)
    loads = [sum(work[chunk] for chunk in chunks) for chunks in layout.chunks]
    assert max(loads) - min(loads) <= max(work)
    assert layout == Layout.balanced(torch.tensor(work).expand(1, 1, -1), ranks)


@given(layouts(), st.integers(1, 5))
def test_parts_make_the_whole(layout: Layout, rows: int) -> None:
    whole = torch.randn(1, 2, layout.count * rows, 3)
    parts = [layout.shard(whole, rank) for rank in range(layout.ranks)]
    assert torch.equal(layout.join(parts), whole)
    assert torch.equal(parts[0], whole[:, :, layout.positions(0, whole.shape[2])])


@pytest.mark.parametrize("chunks", [(), ((0,), (0,)), ((0, 1), (2,)), ((0,), (2,)), 5, (("a",),)])
def test_layouts_that_are_none(chunks: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^layout: "):
        Layout(chunks)


def test_names_of_layouts() -> None:
    assert layout_of("zigzag", 2) == Layout(((0, 3), (1, 2)))
    with pytest.raises(ArgumentError, match="layout: is 'ring', expected 'contiguous', 'zigzag' or a Layout"):
        layout_of("ring", 2)
    with pytest.raises(ArgumentError, match="work: has 3 chunks, expected a multiple of 2 ranks"):
        Layout.balanced([1.0, 2.0, 3.0], 2)
    with pytest.raises(ArgumentError, match="length: is 7"):
        Layout.zigzag(2).spans(0, 7)


BLOCK = 4


@st.composite
def listed(draw: st.DrawFn) -> tuple[Layout, BlockLists]:
    """A layout, and two lists of the whole sequence: of heads and of all, with counts, and what names no block."""
    layout = draw(layouts())
    blocks = layout.count * draw(st.integers(1, 2))
    made = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    sizes = [(2, 4, blocks, 3), (1, 1, blocks, 2)]
    every = [torch.randint(-2, blocks + 2, size, generator=made, dtype=torch.int32) for size in sizes]
    counts = [torch.randint(0, 4, size[:3], generator=made, dtype=torch.int32) for size in sizes]
    return layout, BlockLists(counts[0], every[0], counts[1], every[1], block=(BLOCK, BLOCK))


@given(listed(), st.integers(0, 2))
def test_lists_name_the_same_keys_where_they_arrive(drawn: tuple[Layout, BlockLists], room: int) -> None:
    layout, pattern = drawn
    kv_heads, length = 2, pattern.kv_indices.shape[2] * BLOCK
    blocks = length // BLOCK
    whole = torch.arange(2 * kv_heads * length).view(2, kv_heads, length)
    wanted = []
    for rank in range(layout.ranks):
        tensors = local_lists(pattern, layout, rank).index_tensors()
        wanted.append(wanted_blocks(scored_of(pattern), tensors, kv_heads, blocks))
    theirs = [blocks_of(layout, rank, length, BLOCK, torch.device("cpu")) for rank in range(layout.ranks)]
    caps = tuple(
        tuple(
            0 if source == rank else min(len(theirs[0]), int(wanted[rank][..., theirs[source]].sum(-1).max()) + room)
            for rank in range(layout.ranks)
        )
        for source in range(layout.ranks)
    )
    local = length // layout.ranks
    for rank in range(layout.ranks):
        lists = local_lists(pattern, layout, rank)
        steps = listed_steps(scored_of(pattern), rank, (local, local), BLOCK, caps)
        own = layout.positions(rank, length)
        parts = [whole[:, :, own].unflatten(2, (-1, BLOCK))]
        for piece in steps.buffers[0][1:] if steps.buffers else ():
            there = whole[:, :, layout.positions(piece.rank, length)].unflatten(2, (-1, BLOCK))
            index = chosen(wanted[rank][..., theirs[piece.rank]], caps[piece.rank][rank])
            assert index.shape[-1] * BLOCK == piece.size
            parts.append(there.take_along_dim(index[..., None], 2))
        buffer = torch.cat(parts, 2)
        names = names_of(wanted[rank], layout, rank, length, block=BLOCK, caps=caps)
        assert not names.missing
        found = relabeled(scored_of(pattern), lists.index_tensors(), names.table)
        for counts, before, after in (
            (lists.kv_num_blocks, lists.kv_indices, found[1]),
            (lists.full_kv_num_blocks, lists.full_kv_indices, found[3]),
        ):
            assert before is not None and after is not None and counts is not None
            old, new = before.expand(2, after.shape[1], -1, -1), after.expand(2, -1, -1, -1)
            counted = torch.arange(old.shape[3]) < counts.unsqueeze(3)
            is_block = (old >= 0) & (old < blocks) & counted
            assert not (new >= 0)[counted.expand_as(new) & ~is_block].any()
            for head in range(new.shape[1]):
                k = head * kv_heads // new.shape[1] if new.shape[1] > 1 else slice(None)
                for batch in range(2):
                    kept = is_block[batch, head]
                    keys = buffer[batch, k][..., new[batch, head][kept].long(), :]
                    right = whole[batch, k].unflatten(-1, (-1, BLOCK))[..., old[batch, head][kept].long(), :]
                    assert torch.equal(keys, right)


def test_more_than_there_is_room_for_is_told() -> None:
    layout, wanted = Layout.contiguous(2), torch.tensor([[[False, False, True, True]]])
    names = names_of(wanted, layout, 0, 16, block=4, caps=((0, 0), (1, 0)))
    assert names.missing and names.table.tolist() == [[[0, 1, 2, -1, -1]]]
    assert not names_of(wanted, layout, 0, 16, block=4, caps=((0, 0), (2, 0))).missing


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", [Layout.contiguous(2), Layout.zigzag(2)], ids=["contiguous", "zigzag"])
def test_lists_of_strides(causal: bool, layout: Layout) -> None:
    pattern, length = Strided(stride=3, local=1, block=64, causal=causal), 512
    right = attention_oracle.times_seen(pattern.spec_json, (), (1, 1, length, length))[0, 0]
    for rank in range(2):
        found = strided_lists(pattern, layout, rank, (length, length), torch.device("cpu"))
        own = layout.positions(rank, length)
        lists = found.index_tensors()
        text = found.spec_json.replace("causal", "none")
        seen = attention_oracle.times_seen(text, lists, (1, 1, length // 2, length))[0, 0]
        if causal:
            seen = seen * (torch.arange(length) <= own[:, None])
        assert torch.equal(seen, right[own])
    with pytest.raises(ArgumentError, match="blocks of 64, expected divisors of the chunks"):
        strided_lists(pattern, Layout.zigzag(8), 0, (length, length), torch.device("cpu"))


def test_runs_of_heads_grow() -> None:
    def sizes(pattern: Pattern, shape: tuple[int, ...], kv_heads: int = 16, heads: int = 0) -> list[int]:
        plan = Plan("g", Layout.contiguous(2), scored_of(pattern), None, heads, False, 1.0)
        return [run.stop - run.start for run in plan.runs(shape, kv_heads)]

    lists = TopK(torch.zeros(1, 16, 256, 32, dtype=torch.int32), block=(128, 128))
    assert sizes(lists, (1, 16, 32768, 128)) == [1, 1, 2, 3, 4, 5]
    assert sizes(Dense(), (1, 16, 9, 8), heads=6) == [6, 6, 4]
    # Of long sequences most time is in the kernels, and a second run is the last.
    assert sizes(Dense(), (1, 16, 32768, 128)) == [1, 15]
    assert sizes(Causal(), (1, 16, 32768, 128)) == [2, 14]
    assert sizes(Causal(), (1, 16, 32768, 128), kv_heads=4) == [1, 3]
    assert sizes(SlidingWindow(5), (1, 16, 32768, 128)) == [16]


def test_ranks_with_heads_of_their_own_have_two_runs() -> None:
    def sizes(heads: int, at_once: int = 0) -> list[int]:
        lists = TopK(torch.zeros(1, heads, 512, 32, dtype=torch.int32), block=(128, 128))
        plan = Plan("g", Layout.contiguous(2), scored_of(lists), None, at_once, True, 1.0)
        return [run.stop - run.start for run in plan.runs((1, heads, 65536, 128), heads, by_heads=True)]

    assert [sizes(heads) for heads in (1, 2, 3, 8)] == [[1], [1, 1], [2, 1], [4, 4]]
    assert sizes(8, at_once=2) == [2, 2, 2, 2]


@pytest.mark.parametrize("heads", range(1, 40))
def test_runs_of_gradients_are_short_at_both_ends(heads: int) -> None:
    lists = TopK(torch.zeros(1, heads, 256, 32, dtype=torch.int32), block=(128, 128))
    plan = Plan("g", Layout.contiguous(2), scored_of(lists), None, 0, False, 1.0)
    runs = plan.runs((1, heads, 32768, 128), heads, gives_back=True)
    sizes = [run.stop - run.start for run in runs]
    assert [place for run in runs for place in range(run.start, run.stop)] == list(range(heads))
    assert heads != 16 or sizes == [3, 6, 4, 2, 1]
    assert heads < 4 or (sizes[-1] == 1 and sizes[0] < max(sizes))


def test_sums_have_one_order_and_are_of_float32() -> None:
    parts = [(start, torch.randn(1, 1, size, 2).bfloat16()) for start, size in ((0, 4), (2, 4), (0, 6), (3, 1))]
    total = torch.full((1, 1, 8, 2), torch.nan).bfloat16()
    add_up(total, parts)
    right = torch.zeros(1, 1, 8, 2)
    for start, part in parts:
        right[:, :, start : start + part.shape[2]] += part.float()
    assert torch.equal(total, right.bfloat16())
    assert not total[:, :, 6:].any()


def test_bytes_of_a_plan() -> None:
    plan = SendPlan(((0, 3), (2, 0)), ((0, 5), (4, 0)), block=64, pairs=4, blocks=8)
    of_block = 2 * 64 * 128 * 2
    assert plan.traffic(0, 128) == (4 * of_block, 2 * 4 * of_block, 8 * 4 * of_block)
    everything = SendPlan(None, plan.wanted, block=64, pairs=4, blocks=8).traffic(1, 128)
    assert everything == (5 * of_block, 8 * 4 * of_block, 8 * 4 * of_block)


def test_a_rank_that_fails_has_a_name() -> None:
    def fail() -> None:
        raise RuntimeError("Connection reset by peer\nand more")

    transfer = Transfer.__new__(Transfer)
    transfer.what = "keys of heads 0 to 3"
    transfer.messages = [Message(2, torch.zeros(1)), Message(3, torch.zeros(1))]
    transfer.works = [SimpleNamespace(wait=lambda: None), SimpleNamespace(wait=fail)]
    with pytest.raises(
        CollectiveError, match=r"^keys of heads 0 to 3: rank 3: late or failed \(Connection reset by peer\)"
    ):
        transfer.wait()
    transfer.works = [SimpleNamespace(wait=fail)]  # one for all of them, as NCCL has
    with pytest.raises(CollectiveError) as caught:
        transfer.wait()
    assert caught.value.ranks == (2, 3)


def test_local_lists_of_other_patterns_are_those_of_all() -> None:
    pattern = Causal()
    assert local_lists(pattern, Layout.zigzag(2), 0) is pattern
    every = TopK(torch.arange(8, dtype=torch.int32).view(1, 1, 4, 2))
    assert local_lists(every, Layout.zigzag(2), 0).index_tensors()[0].tolist() == [[[[0, 1], [6, 7]]]]
