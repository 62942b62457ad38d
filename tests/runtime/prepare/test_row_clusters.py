"""Groups of block rows and their rounds: every stored block comes once, and few columns are loaded in few rounds."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from runtime.prepare import cluster_rounds, row_clusters

torch = pytest.importorskip("torch")

from codegen.library import find_spec  # noqa: E402
from codegen.preparation import COUNT_BITS, ROUND_COLUMNS, count_groups, kept_rounds, round_columns  # noqa: E402
from codegen.render import render  # noqa: E402
from runtime.prepare.row_clusters import RowClusters, cluster_rows, covers  # noqa: E402

RING_COLUMNS = {24: 37, 12: 15}  # of the kernels, by the slots of their tiles


@dataclass(frozen=True)
class Matrix:
    """The stored columns of each block row, in the order in which they are stored, and how to divide the rows."""

    rows: list[list[int]]
    block_columns: int
    slots: int = 24
    groups: int = 1
    ring_columns: int = 20

    def indices(self, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
        crow = torch.tensor([0, *map(len, self.rows)], dtype=dtype).cumsum(0, dtype=dtype)
        return crow, torch.tensor([column for row in self.rows for column in row], dtype=dtype)

    def order(self, dtype: torch.dtype = torch.int64, *, anneal: bool = True) -> RowClusters:
        return cluster_rows(
            *self.indices(dtype),
            self.block_columns,
            slots=self.slots,
            groups=self.groups,
            ring_columns=self.ring_columns,
            anneal=anneal,
        )


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    block_columns = draw(st.one_of(st.integers(1, 6), st.integers(1, 60)))
    columns = st.integers(0, block_columns - 1)
    longest = draw(st.sampled_from([2, 6, 30]))
    rows = draw(st.lists(st.lists(columns, max_size=longest), min_size=1, max_size=60))
    slots = draw(st.sampled_from([12, 24]))
    fewest = -(-len(rows) // slots)
    groups = draw(st.integers(fewest, 2 * fewest + 1))
    return Matrix(rows, block_columns, slots, groups, draw(st.sampled_from([1, 3, 14, 15, 16, 20])))


def uniform(block_rows: int, length: int, block_columns: int, seed: int, slots: int = 24) -> Matrix:
    """Return a matrix whose rows have as many blocks each, of columns drawn without repetition."""
    noise = torch.rand(block_rows, block_columns, generator=torch.Generator().manual_seed(seed))
    rows = noise.argsort(1)[:, :length].tolist()
    return Matrix(rows, block_columns, slots, count_groups(block_rows, slots), RING_COLUMNS[slots])


def check_rounds(order: RowClusters, matrix: Matrix) -> None:
    """Check the rounds of an order one by one, against what the rows store."""
    left = {}
    for row, columns in enumerate(matrix.rows):
        start = sum(map(len, matrix.rows[:row]))
        left |= {start + i: (row, column) for i, column in enumerate(columns)}
    starts, rows, places = order.starts.tolist(), order.rows.tolist(), matrix.ring_columns
    assert starts[0] == 0 and starts[-1] == order.rounds.shape[0]
    for group, (first, end) in enumerate(pairwise(starts)):
        assert first <= end
        ring: dict[int, int] = {}  # the columns in places that are not free, in the order of their loads
        loaded = 0
        met: set[int] = set()  # places of what was loaded last
        for record, slots in zip(order.rounds[first:end].tolist(), order.entries[first:end].tolist(), strict=True):
            count, place, blocks, kept = (record[15] >> shift & 255 for shift in (0, 8, 16, 24))
            assert blocks == sum(block >= 0 for block, _ in slots) > 0
            assert count <= round_columns(places)
            assert place == loaded % places
            assert record[count:15] == [0] * (15 - count)
            assert kept <= len(ring)
            for place in list(ring)[: len(ring) - kept]:  # no column is loaded for nothing
                assert place in met
                del ring[place]
            for number, column in enumerate(record[:count], loaded):
                assert number % places not in ring
                ring[number % places] = column
            met -= {number % places for number in range(loaded, loaded + count)}
            loaded += count
            for row, (block, meets) in zip(rows[group], slots, strict=True):
                if block == -1:
                    assert meets == -1
                    continue
                assert left.pop(block) == (row, ring[meets])
                met.add(meets)
        assert met >= set(ring)
    assert not left


@given(matrix=matrices(), dtype=st.sampled_from([torch.int32, torch.int64]))
@example(matrix=Matrix([[]], 1), dtype=torch.int32)
@example(matrix=Matrix([[], [], []], 4, slots=12, groups=5), dtype=torch.int64)
@example(matrix=Matrix([[2] * 40, [2, 2, 1], [0, 2, 0]], 3), dtype=torch.int64)
@example(matrix=Matrix([[row] for row in range(24)], 24), dtype=torch.int64)
@example(matrix=Matrix([list(range(60)), *[[7]] * 23], 60, ring_columns=1), dtype=torch.int32)
@example(matrix=Matrix([[*range(row, 30)] for row in range(24)], 30, ring_columns=15), dtype=torch.int32)
def test_every_block_is_taken_once_where_its_column_is(matrix: Matrix, dtype: torch.dtype) -> None:
    order = matrix.order(dtype)
    assert {part.dtype for part in order[:4]} == {torch.int32}
    assert order.rounds.shape[1:] == (16,) and order.entries.shape == (order.rounds.shape[0], matrix.slots, 2)
    assert order.starts.shape == (matrix.groups + 1,) and order.rows.shape == (matrix.groups, matrix.slots)
    assert order.ring_columns == matrix.ring_columns
    check_rounds(order, matrix)
    assert covers(order, *matrix.indices(dtype))
    quick = matrix.order(dtype, anneal=False)
    check_rounds(quick, matrix)
    assert covers(quick, *matrix.indices(dtype))


@given(matrix=matrices())
def test_groups_are_even_and_fill_the_first_slots(matrix: Matrix) -> None:
    order = matrix.order()
    groups = [[row for row in slots if row >= 0] for slots in order.rows.tolist()]
    for slots, group in zip(order.rows.tolist(), groups, strict=True):
        assert slots == group + [-1] * (matrix.slots - len(group))
    assert sorted(row for group in groups for row in group) == list(range(len(matrix.rows)))
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    # As many rounds as its longest row has blocks at least, and none without blocks.
    for number, group in enumerate(groups):
        longest = max((len(matrix.rows[row]) for row in group), default=0)
        rounds = int(order.starts[number + 1] - order.starts[number])
        assert rounds >= longest and (rounds > 0) == (longest > 0)


def distinct(rows: torch.Tensor, lists: list[list[int]]) -> list[int]:
    """Return how many different columns the rows of each group have."""
    return [len({column for row in group if row >= 0 for column in lists[row]}) for group in rows.tolist()]


@given(matrix=matrices(), data=st.data())
def test_exchanges_leave_fewer_columns_and_no_longer_rows(matrix: Matrix, data: st.DataObject) -> None:
    lists = [sorted(set(row)) for row in matrix.rows]
    lengths = torch.tensor([len(row) for row in lists])
    listed = torch.tensor([column for row in lists for column in row], dtype=torch.int64)
    order = data.draw(st.permutations(range(len(lists))))
    before = torch.full((matrix.groups, matrix.slots), -1)
    for number, row in enumerate(order):
        before[number % matrix.groups, number // matrix.groups] = row
    after = row_clusters._place_rows(before, lengths, listed, anneal=True)
    assert torch.equal(after >= 0, before >= 0)
    assert sorted(after[after >= 0].tolist()) == list(range(len(lists)))
    assert sum(distinct(after, lists)) <= sum(distinct(before, lists))
    for old, new in zip(before.tolist(), after.tolist(), strict=True):
        old_longest, new_longest = (
            max((len(lists[row]) for row in rows if row >= 0), default=0) for rows in (old, new)
        )
        assert new_longest <= old_longest


def test_the_best_exchanges_come_first_and_no_group_has_two() -> None:
    pairs = torch.triu_indices(4, 4, 1)  # 01 02 03 12 13 23
    score = torch.tensor([2.0, row_clusters.FORBIDDEN, 1.0, -1.0, -2.0, 0.0])
    assert row_clusters._disjoint(pairs, score).T.tolist() == [[1, 3]]  # 02 is left over, and not allowed
    score[4] = 3.0
    assert row_clusters._disjoint(pairs, score).T.tolist() == [[1, 2], [0, 3]]


def test_rows_find_the_group_that_has_their_columns() -> None:
    lists = [[10 * (row // 24) + i for i in range(8)] for row in range(96)]  # four kinds, with columns of their own
    before = torch.arange(96).view(4, 24)
    before[0, 0], before[1, 0], before[2, 5], before[3, 7] = 24, 0, 3 * 24 + 7, 2 * 24 + 5
    listed, lengths = torch.tensor(lists).flatten(), torch.full((96,), 8)
    assert distinct(before, lists) == [16] * 4
    assert distinct(row_clusters._place_rows(before, lengths, listed, anneal=True), lists) == [8] * 4
    quick = row_clusters._place_rows(before, lengths, listed, anneal=False)  # rows change places, not groups
    assert torch.equal(quick.sort(1).values, before.sort(1).values)


def test_neighbors_share_columns() -> None:
    wants = torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1], [0, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    order = row_clusters._in_pairs(wants).tolist()
    assert sorted(order) == list(range(5)) and order[4] == 2
    assert {frozenset(order[:2]), frozenset(order[2:4])} == {frozenset({0, 4}), frozenset({1, 3})}


@given(matrix=matrices())
@settings(max_examples=20)
def test_the_same_matrix_gives_the_same_order(matrix: Matrix) -> None:
    first, second, narrow = matrix.order(), matrix.order(), matrix.order(torch.int32)
    for parts in zip(first[:4], second[:4], narrow[:4], strict=True):
        assert torch.equal(parts[0], parts[1]) and torch.equal(parts[0], parts[2])


@cache
def planned(number: int) -> tuple[Matrix, RowClusters]:
    """Return one of some matrices of all kinds with its order: to plan one takes longer than to judge many changes."""
    draw = random.Random(number)
    block_columns = draw.choice([draw.randint(1, 6), draw.randint(1, 60)])
    longest, slots = draw.choice([2, 6, 30]), draw.choice([12, 24])
    rows = [
        [draw.randrange(block_columns) for _ in range(draw.randint(0, longest))] for _ in range(draw.randint(1, 60))
    ]
    rows[0] = rows[0] or [0]  # something to change
    fewest = -(-len(rows) // slots)
    matrix = Matrix(rows, block_columns, slots, draw.randint(fewest, 2 * fewest + 1), draw.choice([1, 3, 14, 15, 20]))
    return matrix, matrix.order()


@given(number=st.integers(0, 29), data=st.data())
@settings(max_examples=300)
def test_changed_orders_do_not_cover(number: int, data: st.DataObject) -> None:
    matrix, order = planned(number)
    name = data.draw(st.sampled_from(["rounds", "entries", "starts", "rows"]))
    part = getattr(order, name).clone()
    place = tuple(data.draw(st.integers(0, size - 1)) for size in part.shape)
    value = data.draw(st.one_of(st.integers(-2, 70), st.integers(-(2**31), 2**31 - 1)))
    assume(int(part[place]) != value)
    part[place] = value
    assume(not still_valid(order, name, place, value))
    assert not covers(order._replace(**{name: part}), *matrix.indices())


def still_valid(order: RowClusters, name: str, place: tuple[int, ...], value: int) -> bool:
    """Return whether an order has another number in a place and is none the worse."""
    last = order.rounds[place[0], 15].item() if name in ("rounds", "entries") else 0
    count = last & 255
    if name == "rounds" and place[1] == 15:
        # Columns that nothing meets, with no round of the group behind them that would begin elsewhere.
        ends_group = place[0] + 1 in order.starts.tolist()
        return ends_group and value >> 8 == last >> 8 and count < value & 255 <= round_columns(order.ring_columns)
    if name == "rounds":
        return place[1] >= count  # means nothing
    if name == "entries" and place[2] == 1 and order.entries[place].item() >= 0:
        ring = ring_in(order, place[0])  # a column may be there twice
        return ring.get(value) == ring[int(order.entries[place])]
    return False


def ring_in(order: RowClusters, number: int) -> dict[int, int]:
    """Return the columns in the places of the ring, as the blocks of a round meet them."""
    ring: dict[int, int] = {}
    loaded = 0
    first = max(start for start in order.starts.tolist() if start <= number)
    for record in order.rounds[first : number + 1].tolist():
        count, kept = record[15] & 255, record[15] >> 24 & 255
        for place in list(ring)[: len(ring) - kept]:
            del ring[place]
        ring |= {at % order.ring_columns: column for at, column in enumerate(record[:count], loaded)}
        loaded += count
    return ring


def test_orders_with_one_thing_wrong_do_not_cover() -> None:
    matrix = Matrix([[0, 1, 2], [2, 1], [], [4]], 5, slots=12, groups=2)
    crow, col = matrix.indices()
    order = matrix.order()
    assert order.rows[:, :3].tolist() == [[0, 1, -1], [3, 2, -1]] and covers(order, crow, col)

    def with_rows(*rows: list[int]) -> RowClusters:
        return order._replace(rows=torch.tensor([(row + [-1] * 12)[:12] for row in rows], dtype=torch.int32))

    assert covers(with_rows([0, 1], [3, 2]), crow, col)
    assert not covers(with_rows([1, 0], [3, 2]), crow, col)  # blocks of other rows
    assert not covers(with_rows([0, 1], [3, -1]), crow, col)  # a row without blocks, that nobody writes
    assert not covers(with_rows([0, 1], [3, 3]), crow, col)
    assert not covers(with_rows([0, 1], [3, -1, 2]), crow, col)  # a slot without a row before one with a row
    assert not covers(with_rows([0, 1], [3, 2, *[-1] * 9, -2]), crow, col)
    word = order.rounds[-1, 15].item()
    rest = word >> 8 << 8
    counts = [(rest | count, valid) for count, valid in ((1, True), (6, True), (7, False), (0, False))]
    for last, valid in (*counts, (word, True), (word + (1 << 8), False), (word + (1 << 16), False)):
        rounds = order.rounds.clone()
        rounds[-1, 15] = last
        assert covers(order._replace(rounds=rounds), crow, col) == valid
    # A round that takes nothing.
    idle = [torch.cat([part, part[-1:] * 0 + fill]) for part, fill in ((order.rounds, 0), (order.entries, -1))]
    idle[0][-1, 15] = 1 | 1 << 8
    starts = order.starts + order.starts.new_tensor([0, 0, 1])
    assert not covers(order._replace(rounds=idle[0], entries=idle[1], starts=starts), crow, col)
    assert not covers(order._replace(rounds=order.rounds[:-1], entries=order.entries[:-1]), crow, col)
    assert not covers(order._replace(starts=order.starts + 1), crow, col)
    assert not covers(order._replace(starts=order.starts.flip(0)), crow, col)
    for ring_columns in (1, 0, -3):
        assert not covers(order._replace(ring_columns=ring_columns), crow, col)
    swapped = order.entries.clone()
    swapped[0, 0], swapped[1, 0] = order.entries[1, 0], order.entries[0, 0]
    assert not covers(order._replace(entries=swapped), crow, col)
    twice = order.entries.clone()
    twice[1, 0] = -1
    assert not covers(order._replace(entries=twice), crow, col)  # a block that is left out
    # The order of another matrix of as many rows and blocks.
    assert not covers(order, crow, col.flip(0))
    assert not covers(order, torch.tensor([0, 2, 5, 5, 6]), col)
    for wrong in ([0, 3, 5, 5, 7], [1, 3, 5, 5, 6], [0, 6, 5, 5, 6], [0, 3, 5, 6], [0]):
        assert not covers(order, torch.tensor(wrong), col)


def test_torchs_default_device_is_left_alone() -> None:
    matrix = uniform(30, 4, 20, seed=0)
    crow, col = matrix.indices()
    expected = matrix.order()
    with torch.device("meta"):
        found = cluster_rows(crow, col, 20, slots=24, groups=2, ring_columns=matrix.ring_columns, anneal=True)
        assert covers(found, crow, col)
    assert all(torch.equal(*parts) for parts in zip(found[:4], expected[:4], strict=True))


def test_rounds_go_around_the_ring() -> None:
    matrix = Matrix([[3 * row, 3 * row + 1, 3 * row + 2] for row in range(6)], 18, slots=12, ring_columns=20)
    assert [word >> 8 & 255 for word in matrix.order().rounds[:, 15].tolist()] == [0, 6, 12]
    matrix = Matrix([[5 * row + i for i in range(5)] for row in range(6)], 30, slots=12, ring_columns=20)
    assert [word >> 8 & 255 for word in matrix.order().rounds[:, 15].tolist()] == [0, 6, 12, 18, 4]


@pytest.mark.parametrize(("ring_columns", "most"), [(1, 1), (2, 1), (5, 1), (15, 5), (37, 12), (44, 14), (60, 15)])
def test_three_rounds_fit_the_ring(ring_columns: int, most: int) -> None:
    matrix = Matrix([[row] for row in range(24)], 24, ring_columns=ring_columns)
    counts = (matrix.order().rounds[:, 15] & 255).tolist()
    assert counts == [most] * (24 // most) + [24 % most] * (24 % most > 0)


def test_rows_with_the_same_columns_are_put_together() -> None:
    families = [list(range(8 * family, 8 * family + 8)) for family in range(4)]
    matrix = Matrix([families[row % 4] for row in range(48)], 32, slots=12, groups=4)
    order = matrix.order()
    assert [{row % 4 for row in group} for group in order.rows.tolist()] == [{0}, {1}, {2}, {3}]
    assert order.starts.diff().tolist() == [8] * 4
    assert set((order.rounds[:, 15] & 255).tolist()) == {1}


def test_rows_of_like_length_are_put_together() -> None:
    # Each short row shares its columns with a long one, and long ones share none.
    long = [list(range(20 * row, 20 * row + 20)) for row in range(12)]
    matrix = Matrix(
        [row[first:][:end] for row in long for first, end in ((5, 2), (0, 20))], 240, 12, 2, ring_columns=36
    )
    order = matrix.order()
    assert [{row % 2 for row in group} for group in order.rows.tolist()] == [{1}, {0}]
    assert order.starts.diff().tolist() == [20, 2]


def test_a_column_that_others_make_needless_waits() -> None:
    # Column 0 comes first, as it serves three rows. What serves the other three then serves those as well, and two
    # slots of a warp take it together.
    lists = [[0, 1], [1], [0, 2], [2], [0, 3], [3]]
    wanted = torch.tensor([[[need in needs for need in range(4)] for needs in lists]])
    picks, takes = cluster_rounds._cover(wanted, torch.tensor([0]), 4, 12)
    assert picks.tolist() == [[[0, 1, 2, 3], [0, -1, -1, -1]]]
    assert takes.tolist() == [[[1, 1, 2, 2, 3, 3], [4, -1, 4, -1, 4, -1]]]
    assert cluster_rounds._number_loads(picks, takes)[0].tolist() == [[[False, True, True, True], [True] + [False] * 3]]


def test_columns_stay_for_rows_that_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = uniform(24, 20, 30, seed=0)

    def loads_and_kept() -> tuple[int, int]:
        order = matrix.order()
        check_rounds(order, matrix)
        return int((order.rounds[:, 15] & 255).sum()), int((order.rounds[:, 15] >> 24).max())

    loads, kept = loads_and_kept()
    assert loads == 30 and kept > 0  # each column once
    monkeypatch.setattr(cluster_rounds, "kept_rounds", lambda *_: 0)
    loads, kept = loads_and_kept()
    assert loads > 30 and kept == 0


@pytest.mark.parametrize(
    ("ring_columns", "columns", "rounds", "kept"),
    [
        (37, 202, 16, 0),
        (37, 438, 64, 0),
        (37, 495, 128, 6),
        (37, 508, 256, 15),
        (15, 225, 64, 0),
        (15, 251, 128, 4),
        (37, 0, 0, 0),
        (1, 60, 60, 0),
    ],
)
def test_columns_stay_where_the_next_ones_have_room(ring_columns: int, columns: int, rounds: int, kept: int) -> None:
    assert kept_rounds(ring_columns, columns, rounds) == kept
    assert kept == 0 or (kept + 3) * columns <= ring_columns * rounds


@pytest.mark.parametrize(
    ("block_rows", "length", "slots", "most_rounds", "most_loads"),
    [
        (512, 16, 24, 19.3, 204),
        (512, 64, 24, 65.5, 488),
        (256, 16, 12, 22.0, 105),
        (512, 256, 24, 256.5, 509),  # a column comes once
        (256, 128, 12, 128.5, 252),
    ],
)
def test_few_rounds_and_few_loads(
    block_rows: int, length: int, slots: int, most_rounds: float, most_loads: float
) -> None:
    matrix = uniform(block_rows, length, block_rows, seed=0, slots=slots)
    order = matrix.order()
    assert covers(order, *matrix.indices())
    loads = (order.rounds[:, 15] & 255).sum()
    assert order.rounds.shape[0] / matrix.groups <= most_rounds
    assert int(loads) / matrix.groups <= most_loads


def test_a_group_loads_a_column_once_where_it_has_the_rounds() -> None:
    matrix = uniform(512, 16, 512, seed=1)
    order = matrix.order()
    loads = [0] * matrix.groups
    for group, (first, end) in enumerate(pairwise(order.starts.tolist())):
        columns = Counter(
            column for record in order.rounds[first:end].tolist() for column in record[: record[15] & 255]
        )
        assert set(columns) == {column for row in order.rows[group].tolist() if row >= 0 for column in matrix.rows[row]}
        loads[group] = sum(columns.values()) - len(columns)
    assert sum(loads) <= matrix.groups


def test_slots_and_ring_must_have_room() -> None:
    with pytest.raises(ValueError, match="2 groups of 12 slots are too few for 25 block rows"):
        Matrix([[0]] * 25, 1, slots=12, groups=2).order()
    with pytest.raises(ValueError, match="0 groups"):
        Matrix([], 1, slots=12, groups=0).order()
    with pytest.raises(ValueError, match="ring of 0 columns"):
        Matrix([[0]], 1, ring_columns=0).order()


@pytest.mark.parametrize(
    ("block_rows", "slots", "clusters", "at_once", "groups"),
    [
        (512, 24, 0, 0, 22),
        (512, 24, 32, 0, 22),
        (512, 24, 0, 66, 22),
        (512, 24, 32, 66, 22),  # 11 waves of tiles of 24 rows; with more groups, more waves of hardly shorter tiles
        (512, 24, 8, 66, 24),  # 3 waves still
        (512, 24, 4, 66, 32),  # 2 waves still
        (512, 24, 5, 66, 26),  # 2 waves still
        (512, 24, 1, 66, 43),  # as many as allowed: some would be idle otherwise
        (256, 12, 4, 66, 32),
        (900, 24, 32, 66, 38),  # 19 waves of 40; 41 groups are 20 waves of 38
        (3, 24, 1, 66, 2),  # at most twice the fewest
        (1, 24, 1, 66, 1),  # no group without a row
        (0, 24, 1, 66, 0),
    ],
)
def test_groups_are_counted(block_rows: int, slots: int, clusters: int, at_once: int, groups: int) -> None:
    assert count_groups(block_rows, slots, clusters, at_once) == groups


@given(st.integers(1, 3000), st.sampled_from([12, 24]), st.integers(1, 300), st.integers(1, 200))
def test_no_other_count_is_done_sooner(block_rows: int, slots: int, clusters: int, at_once: int) -> None:
    def duration(count: int) -> int:
        return -(-count * clusters // at_once) * (-(-block_rows // count) + 16)

    fewest, groups = count_groups(block_rows, slots), count_groups(block_rows, slots, clusters, at_once)
    assert (fewest - 1) * slots < block_rows <= fewest * slots
    assert fewest <= groups <= min(2 * fewest, block_rows)
    assert all(duration(groups) < duration(count) for count in range(fewest, groups))
    assert all(duration(groups) <= duration(count) for count in range(groups, min(2 * fewest, block_rows) + 1))


@pytest.mark.parametrize("block", [16, 32])
def test_kernels_read_records_as_they_are_written(block: int) -> None:
    source = render(find_spec(f"h100_bsr_spmm_b{block}_gathered"))
    assert f"kRoundColumns = {ROUND_COLUMNS};" in source
    mask = (1 << COUNT_BITS) - 1
    for name, value in (
        ("columns", f"word & {mask}"),
        ("first_place", f"word >> {COUNT_BITS} & {mask}"),
        ("kept", f"word >> {3 * COUNT_BITS}"),
    ):
        assert f"int {name}() const {{ return {value}; }}" in source
    assert (f"int blocks() const {{ return word >> {2 * COUNT_BITS} & {mask}; }}" in source) == (block == 16)


def test_a_block_meets_a_column_of_its_round() -> None:
    crow, col = torch.tensor([0, 1]), torch.tensor([0])
    order = cluster_rows(crow, col, 3, slots=12, groups=1, ring_columns=20)
    assert order.rounds[0, 15] == 1 | 1 << 16 and covers(order, crow, col)
    behind = order.entries.clone()
    behind[0, 0, 1] = 1  # 0 as well, but it means nothing: it is not loaded
    assert not covers(order._replace(entries=behind), crow, col)


def test_an_order_is_of_as_many_rows_and_blocks_as_it_says() -> None:
    matrix = Matrix([[0, 1, 2], [2, 1]], 3)
    order = matrix.order()
    assert not covers(order._replace(block_rows=3), *matrix.indices())
    assert not covers(order._replace(blocks=4), *matrix.indices())


@pytest.mark.parametrize("batch", [1, 100])
def test_groups_are_planned_a_few_at_a_time_with_the_same_result(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    matrix = uniform(60, 5, 30, seed=2)
    together = matrix.order()
    planned, plan = [], cluster_rounds._plan_batch
    monkeypatch.setattr(cluster_rounds, "BATCH", batch)  # not even a group fits
    monkeypatch.setattr(cluster_rounds, "_plan_batch", lambda *given: planned.append(given[1:3]) or plan(*given))
    found = matrix.order()
    assert planned == [(group, group + 1) for group in range(matrix.groups)]
    assert all(torch.equal(*parts) for parts in zip(found[:4], together[:4], strict=True))


def test_the_search_has_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before, form = torch.get_num_threads(), row_clusters._form_groups
    crow, col = torch.tensor([0, 1, 2]), torch.tensor([0, 1])

    def fail(*given: Any) -> Any:
        raise MemoryError

    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(row_clusters, "_form_groups", lambda *a: seen.append(torch.get_num_threads()) or form(*a))
        cluster_rows(crow, col, 2, slots=2, groups=1, ring_columns=3)
        assert (seen, torch.get_num_threads()) == ([1], 2)
        monkeypatch.setattr(row_clusters, "_form_groups", fail)
        with pytest.raises(MemoryError):
            cluster_rows(crow, col, 2, slots=2, groups=1, ring_columns=3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_searches_in_several_threads_give_the_threads_back() -> None:
    before = torch.get_num_threads()
    matrix = uniform(48, 4, 24, seed=0)
    right = matrix.order(anneal=False)
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = [future.result() for future in [pool.submit(matrix.order, anneal=False) for _ in range(12)]]
        with ThreadPoolExecutor(1) as pool:  # what a new thread has is the process's number
            assert pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*parts) for order in found for parts in zip(order[:4], right[:4], strict=True))
