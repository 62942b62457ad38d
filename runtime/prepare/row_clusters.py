"""Block rows of a BSR matrix in clusters that share what is loaded of B, and the order in which each takes its blocks.

Row clusters are called groups here and in kernels, where a cluster is one of thread blocks. A thread block multiplies a
group of block rows of A by a tile of columns of B, in rounds (:mod:`runtime.prepare.cluster_rounds`). Block columns of
A, that is block rows of B, come into shared memory once for all rows of the group that have a block there. Groups are
formed by a greedy set cover (Chvatal, "A Greedy Heuristic for the Set-Covering Problem", 1979): the row that has most
columns in common with a group joins it. Where that is asked for, groups then exchange rows, by simulated annealing
(Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing", 1983).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from codegen.preparation import COUNT_BITS, ROUND_COLUMNS, round_columns
from runtime.prepare.cluster_rounds import CPU, Rounds, find_needs, plan_rounds, starts_of

# The score of a row that may join a group, in fifths of a block: 1 for each block that meets a column of the group,
# -0.4 for each block that the row is shorter by than the group's longest row.
SHARED, SHORTER = 5, 2
TAKEN = -(2**62)  # score of a row that is in a group already
# Groups exchange rows in so many steps, in each of which a group has one exchange at most; so many rows, up to twice as
# many, are looked at together. The temperature, in columns, falls from the first step's to 0; an exchange may cost
# MOST_COST times that. 512 rows with 16 of 512 random columns each, in 22 groups, have 210 columns a group before, 203
# after 300 steps, 202 after 1500. Few rows have fewer steps, STEPS_A_ROW for each.
STEPS, STEPS_A_ROW, EXCHANGING_ROWS, TEMPERATURE, MOST_COST = 2000, 8, 1024, 1.1, 3
LAST_STEPS = 30  # at temperature 0, at most
FORBIDDEN = float(1 << 20)  # cost of an exchange that is not allowed
SHIFTS = 1 << 16  # places of the noise at which that of a step may begin
# Of all columns, what groups have on average where rows are not exchanged: there is little to win then.
NEARLY_ALL = 15 / 16


class RowClusters(NamedTuple):
    """Block rows of a BSR matrix in groups, and the rounds in which each group takes its stored blocks.

    Attributes:
        rounds: int32 (rounds, 16): the block columns that a round loads in elements 0 to 14, 0 behind the last one; in
            element 15 how many they are (0 to 15) | the place of the first one in the ring << 8 | the blocks that slots
            take << 16 | how many of the places taken before, the last ones, it or later rounds need << 24.
        entries: int32 (rounds, slots, 2): of each slot the stored block that it takes (index into the values) and the
            place in the ring of the column that it meets; -1, -1 for a slot that takes nothing.
        starts: int32 (groups + 1,): first round of each group, and one more.
        rows: int32 (groups, slots): block row of each slot, -1 for none. The rows of a group are in its first slots.
        ring_columns: places of the ring.
        block_rows, block_columns, blocks: of the matrix; the last are those that are stored.
    """

    rounds: torch.Tensor
    entries: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    ring_columns: int
    block_rows: int
    block_columns: int
    blocks: int


def cluster_rows(
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    block_columns: int,
    *,
    slots: int,
    groups: int,
    ring_columns: int,
    anneal: bool = False,
) -> RowClusters:
    """Form groups of block rows and put their stored blocks in rounds, on the CPU (synchronizes).

    The same matrix gives the same result, on one machine. The columns of a row may be in any order; one that is listed
    more than once is a stored block each time, taken in a round of its own. A column that the matrix does not have
    counts as the one behind its last.

    Args:
        crow_indices: int32 or int64 (block rows + 1,): first block of each block row, and one more.
        col_indices: int32 or int64 (blocks,): block column of each block.
        block_columns: of the matrix.
        slots: rows of a group, at most.
        groups: how many to form; their sizes differ by one at most.
        ring_columns: block columns that the kernel's ring has places for. A round loads no more than a third of them,
            and 15 at most. Where it needs far fewer, they stay for the rounds behind it.
        anneal: whether groups exchange rows, which takes most of the time where it wins anything.

    Returns:
        Groups and rounds, on the device of crow_indices.

    Raises:
        ValueError: if the groups have too few slots for the rows, or the ring has no place.
    """
    block_rows = crow_indices.shape[0] - 1
    if groups < 1 or groups * slots < block_rows:
        raise ValueError(f"{groups} groups of {slots} slots are too few for {block_rows} block rows")
    if ring_columns < 1:
        raise ValueError(f"a ring of {ring_columns} columns has no place for a column")
    crow, col = crow_indices.to("cpu", torch.int64), _known(col_indices.to("cpu", torch.int64), block_columns)
    lengths = crow.diff()
    with _one_thread():
        row = torch.repeat_interleave(torch.arange(block_rows, device=CPU), lengths)
        listed, column_of_listed = _number_listings(row, col, block_columns + 1)
        rows = _form_groups(lengths, listed, column_of_listed.shape[0], slots, groups)
        rows = _place_rows(rows, lengths, listed, anneal)
        plan = plan_rounds(find_needs(rows, row, listed, column_of_listed), slots, ring_columns)
        starts = starts_of(plan.counts)
        places = plan.loads.where(plan.loads < 0, plan.loads % ring_columns)
        entries = torch.stack([plan.blocks, places], 2)
        found = (_write_records(plan, starts, ring_columns), entries, starts, rows)
    records, entries, starts, rows = (part.to(crow_indices.device, torch.int32) for part in found)
    return RowClusters(records, entries, starts, rows, ring_columns, block_rows, block_columns, col.shape[0])


_searching = threading.Lock()


@contextmanager
def _one_thread() -> Iterator[None]:
    """One search at a time, with one thread of the CPU: it is many short calls, and threads wait for each other.

    512 rows with 64 of 512 random columns each take 0.4 s so, and 2 to 11 s with two threads on two busy cores. The
    number is one of the process for threads that come later: two searches at once would save and restore each other's.
    """
    with _searching:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def covers(order: RowClusters, crow_indices: torch.Tensor, col_indices: torch.Tensor) -> bool:
    """Whether groups and rounds are valid ones of a matrix (synchronizes).

    They are if each stored block is taken exactly once, by the slot that its row is in, and its column is in that place
    of the ring then; if each block row is in one slot, of the first of its group; and if the rounds of the groups
    follow each other, say how many blocks they take, one at least, load no more columns than cluster_rows lets a round
    load, begin at place 0 of the ring with each group, each behind the one before, and load into free places only.

    Args:
        order: of the shapes and types that RowClusters has, with any content.
        crow_indices: int32 or int64 (block rows + 1,): first block of each block row, and one more.
        col_indices: int32 or int64 (blocks,): block column of each block.
    """
    parts = (order.rounds, order.entries, order.starts, order.rows)
    rounds, entries, starts, rows = (part.to("cpu", torch.int64) for part in parts)
    crow, col = crow_indices.to("cpu", torch.int64), _known(col_indices.to("cpu", torch.int64), order.block_columns)
    lengths, ring_columns = crow.diff(), order.ring_columns
    if (order.block_rows, order.blocks) != (lengths.shape[0], col.shape[0]) or ring_columns < 1:
        return False
    if not (_rises(crow, col.shape[0]) and _rises(starts, rounds.shape[0]) and _names_once(rows, lengths.shape[0])):
        return False
    counts, first_places, blocks, kept = (rounds[:, -1] >> i * COUNT_BITS & (1 << COUNT_BITS) - 1 for i in range(4))
    in_range = (rounds[:, -1] >= 0) & (counts <= round_columns(ring_columns)) & (blocks > 0) & (kept <= ring_columns)
    if not bool(in_range.all()):
        return False
    loads = starts_of(counts)
    of_group = torch.repeat_interleave(loads[starts[:-1]], starts.diff())  # loads of the groups before
    before, after = loads[:-1] - of_group, loads[1:] - of_group
    released = before - kept  # loads of its group that nobody needs when a round begins, nor later
    rises = torch.cat([released[:1] >= 0, released.diff() >= 0]) | (before == 0)
    in_order = rises & (released >= 0) & (released >= after - ring_columns)
    if not bool((in_order & (first_places == before % ring_columns)).all()):
        return False
    block, place = entries.unbind(2)
    takes = block >= 0
    nothing = (block == -1) & (place == -1)
    # The last load into a place: it is there if there was one, and if no later round's may replace it yet.
    met = after[:, None] - 1 - (after[:, None] - 1 - place) % ring_columns
    in_range = (block < col.shape[0]) & (place >= 0) & (place < ring_columns) & (met >= released[:, None])
    if not bool(in_range.where(takes, nothing).all() and (takes.sum(1) == blocks).all()):
        return False
    slot_row = torch.repeat_interleave(rows, starts.diff(), 0)
    block_row = torch.repeat_interleave(torch.arange(lengths.shape[0], device=CPU), lengths)
    loaded = rounds[:, :-1][torch.arange(ROUND_COLUMNS, device=CPU) < counts[:, None]]
    taken = block[takes]
    return bool(
        torch.equal(taken.sort().values, torch.arange(col.shape[0], device=CPU))
        and torch.equal(block_row[taken], slot_row[takes])
        and torch.equal(col[taken], loaded[(met + of_group[:, None])[takes]])
    )


def _known(col: torch.Tensor, block_columns: int) -> torch.Tensor:
    """Return block columns, those that a matrix does not have as the one behind its last."""
    return col.where((col >= 0) & (col < block_columns), torch.tensor(block_columns, device=CPU))


def _rises(numbers: torch.Tensor, end: int) -> bool:
    """Whether numbers (at least one) rise from 0 to an end, not strictly."""
    return int(numbers[0]) == 0 and int(numbers[-1]) == end and bool((numbers.diff() >= 0).all())


def _names_once(rows: torch.Tensor, block_rows: int) -> bool:
    """Whether rows name each block row once, and -1 only behind the block rows of a group."""
    from_the_first = bool((rows[:, :-1] >= rows[:, 1:].clamp(max=0)).all())
    named = rows[rows >= 0].sort().values
    return from_the_first and bool((rows >= -1).all()) and torch.equal(named, torch.arange(block_rows, device=CPU))


def _number_listings(row: torch.Tensor, col: torch.Tensor, block_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number what block columns rows list, so that each row lists each number once.

    The k-th listings of a column have one number in all rows.

    Args:
        row: int64 (blocks,): block row of each block, rising.
        col: int64 (blocks,): its block column.
        block_columns: of the matrix.

    Returns:
        int64 (blocks,) with the number of each block, and int64 (numbers,) with the block column of each number.
    """
    keys, order = (row * block_columns + col).sort(stable=True)
    place = torch.arange(keys.shape[0], device=CPU)
    new = torch.ones_like(keys, dtype=torch.bool)
    new[1:] = keys.diff() != 0
    repetition = torch.empty_like(col)
    repetition[order] = place - place.where(new, 0).cummax(0).values
    most = int(repetition.max()) + 1 if col.shape[0] else 1
    numbers, listed = torch.unique(col * most + repetition, return_inverse=True)
    return listed, numbers // most


def _form_groups(lengths: torch.Tensor, listed: torch.Tensor, numbers: int, slots: int, groups: int) -> torch.Tensor:
    """Divide block rows into groups of rows that have many columns in common and about the same length.

    A group begins with the longest row that is left. The columns that each row shares with the group are counted as the
    group grows: a column that it did not have counts for all rows that list it.

    Args:
        lengths: int64 (block rows,): blocks of each row.
        listed: int64 (blocks,): number of the column of each block; a row lists a number once.
        numbers: how many there are.
        slots: rows of a group, at most.
        groups: how many to form.

    Returns:
        int64 (groups, slots): block row of each slot, -1 for none.
    """
    block_rows = lengths.shape[0]
    lists = listed.split(lengths.tolist())
    users = torch.repeat_interleave(torch.arange(block_rows, device=CPU), lengths)[listed.argsort(stable=True)]
    users_of = users.split(torch.bincount(listed, minlength=numbers).tolist())
    # All candidates are compared with the same longest row, so a longer one is better by what it is longer.
    left = SHORTER * lengths
    rows = lengths.new_full((groups, slots), -1)
    for group in range(groups):
        score = left.clone()
        shared = torch.zeros(numbers, dtype=torch.bool, device=CPU)
        for slot in range(block_rows // groups + (group < block_rows % groups)):
            rows[group, slot] = row = int(score.argmax())
            left[row] = score[row] = TAKEN
            new = lists[row][~shared[lists[row]]]
            shared[new] = True
            if new.shape[0]:
                sharing = torch.cat([users_of[number] for number in new.tolist()])
                score += SHARED * torch.bincount(sharing, minlength=block_rows)
    return rows


def _place_rows(rows: torch.Tensor, lengths: torch.Tensor, listed: torch.Tensor, anneal: bool) -> torch.Tensor:
    """Put rows that share columns side by side; before that let groups exchange rows, so that they have fewer columns.

    No group gets a row longer than its longest was.

    Args:
        rows: int64 (groups, slots): block row of each slot, -1 for none; a group's rows are in its first slots.
        lengths: int64 (block rows,): blocks of each row.
        listed: int64 (blocks,): number of the column of each block; a row lists a number once.
        anneal: whether rows are exchanged.

    Returns:
        As rows. Of each two slots, from the first on, the second has the row that shares most columns with the first.
    """
    lists = listed.split(lengths.tolist())
    parts = []
    for part in rows.chunk(max(1, lengths.shape[0] // EXCHANGING_ROWS)):
        group, slot = (part >= 0).nonzero(as_tuple=True)
        members = part[group, slot]
        columns = torch.cat([listed[:0], *(lists[row] for row in members.tolist())])
        names, column = torch.unique(columns, return_inverse=True)
        wants = torch.zeros(members.shape[0], names.shape[0], device=CPU)
        wants[torch.repeat_interleave(torch.arange(members.shape[0], device=CPU), lengths[members]), column] = 1
        wants = wants[:, wants.sum(0) > 1]  # a column of one row costs the same wherever that is
        if anneal:
            users = wants.new_zeros(part.shape[0], wants.shape[1]).index_add_(0, group, wants)
            if int((users > 0).sum()) < NEARLY_ALL * users.numel():
                group = _anneal(wants, group, lengths[members])
        exchanged = torch.full_like(part, -1)
        for number in range(part.shape[0]):
            mine = (group == number).nonzero()[:, 0]
            exchanged[number, : mine.shape[0]] = members[mine[_in_pairs(wants[mine])]]
        parts.append(exchanged)
    return torch.cat(parts)


def _anneal(wants: torch.Tensor, group: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return groups of rows, as large as before, that have as few columns as were found.

    What a move of a row to another group costs does not depend on the row that comes for it, but for columns that both
    list. So of two groups the rows to exchange are found apart, and what they cost together is looked at then.

    Args:
        wants: float32 (rows, columns): 1 for what a row lists, else 0.
        group: int64 (rows,): group of each row.
        lengths: int64 (rows,): blocks of each row.
    """
    count, (rows, columns) = int(group.max()) + 1 if group.shape[0] else 0, wants.shape
    if count < 2 or columns == 0:
        return group
    group = group.clone()
    # Gumbel noise, a part of which each step takes: the move that is best with it is one drawn by its cost.
    generator = torch.Generator(CPU).manual_seed(0)
    uniform = torch.rand(rows * count + SHIFTS, generator=generator, device=CPU).clamp(1e-7, 1 - 1e-7)
    noise, steps = -(-uniform.log()).log(), min(STEPS, STEPS_A_ROW * rows)
    shifts = torch.randint(SHIFTS, (steps + LAST_STEPS,), generator=generator, device=CPU).tolist()
    too_long = lengths[:, None] > lengths.new_zeros(count).scatter_reduce(0, group, lengths, "amax")
    members = _members(group, count)
    users = wants.new_zeros(count, columns).index_add_(0, group, wants)
    pairs = torch.triu_indices(count, count, 1, device=CPU)
    # Of each row and group: columns that the row would bring; if it is one of the group, those that it alone lists.
    new, alone = wants.new_empty(rows, count), wants.new_empty(rows, count)
    changed = torch.arange(count, device=CPU)
    moves = wants.new_full((rows + 1, count), FORBIDDEN)  # what they cost; the last row is no row
    fewest, found = int((users > 0).sum()), group.clone()
    for step, shift in enumerate(shifts):
        temperature = TEMPERATURE * max(1 - step / steps, 0)
        tables = torch.cat([users[changed] == 0, users[changed] == 1]).to(wants.dtype)
        new[:, changed], alone[:, changed] = (wants @ tables.T).chunk(2, 1)
        costs = (new - alone.gather(1, group[:, None])).masked_fill_(too_long, FORBIDDEN)
        costs.scatter_(1, group[:, None], FORBIDDEN)
        moves[:-1] = costs - temperature * noise[shift : shift + rows * count].view(rows, count)
        best, slot = moves[members].min(1)  # (from group, to group): the best row, and where it is in its group
        first, second = _disjoint(pairs, (best + best.T)[pairs[0], pairs[1]])
        row, other = members[first, slot[first, second]], members[second, slot[second, first]]
        change = wants[other] - wants[row]
        then = torch.stack([users[first] + change, users[second] - change])
        cost = ((then > 0).sum((0, 2)) - (users[first] > 0).sum(1) - (users[second] > 0).sum(1)).to(wants.dtype)
        good = cost <= MOST_COST * temperature if temperature else cost < 0
        first, second, row, other = (part[good] for part in (first, second, row, other))
        if first.shape[0] == 0 and not temperature:
            break
        users[first], users[second] = then[:, good]
        members[first, slot[first, second]], members[second, slot[second, first]] = other, row
        group[row], group[other] = second, first
        changed = torch.cat([first, second])
        if (total := int((users > 0).sum())) < fewest:
            fewest, found = total, group.clone()
    return found


def _members(group: torch.Tensor, count: int) -> torch.Tensor:
    """Return the rows of each group, int64 (count, most rows), behind the last one the number of rows.

    Args:
        group: int64 (rows,): group of each row.
        count: of the groups.
    """
    by_group, sizes = group.argsort(stable=True), torch.bincount(group, minlength=count)
    slot = torch.arange(group.shape[0], device=CPU) - starts_of(sizes)[group[by_group]]
    members = group.new_full((count, int(sizes.max())), group.shape[0])
    members[group[by_group], slot] = by_group
    return members


def _disjoint(pairs: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Return pairs that have no group twice, the best first, int64 (2, count).

    Args:
        pairs: int64 (2, pairs): of groups.
        score: float32 (pairs,): of each, the lower the better; FORBIDDEN / 2 and more for none.
    """
    order = score.argsort(stable=True)[: int((score < FORBIDDEN / 2).sum())]
    busy: set[int] = set()
    chosen = []
    for place, first, second in zip(order.tolist(), *pairs[:, order].tolist(), strict=True):
        if busy.isdisjoint((first, second)):
            busy.update((first, second))
            chosen.append(place)
    return pairs[:, chosen]


def _in_pairs(wants: torch.Tensor) -> torch.Tensor:
    """Order of rows in which each second row is the nearest to the row before it, among those left.

    Args:
        wants: float32 (rows, columns): 1 for what a row lists, else 0.
    """
    shared = wants @ wants.T
    shared.fill_diagonal_(-1)
    order = []
    left = torch.ones(wants.shape[0], dtype=torch.bool, device=CPU)
    while int(left.sum()) > 1:
        pair = shared.masked_fill(~(left[:, None] & left), -2).argmax()
        order += [int(pair) // wants.shape[0], int(pair) % wants.shape[0]]
        left[order[-2:]] = False
    return torch.tensor([*order, *left.nonzero()[:, 0].tolist()], dtype=torch.int64, device=CPU)


def _write_records(plan: Rounds, starts: torch.Tensor, ring_columns: int) -> torch.Tensor:
    """Return the records of rounds as RowClusters has them, int64 (rounds, 16).

    Args:
        plan: the rounds of all groups.
        starts: int64 (groups + 1,): first round of each group, and one more.
        ring_columns: places of the ring.
    """
    counts, blocks = (plan.columns >= 0).sum(1), (plan.blocks >= 0).sum(1)
    loads = starts_of(counts)
    of_group = torch.repeat_interleave(loads[starts[:-1]], plan.counts)
    # The first load that a round or one behind it needs, of all groups' loads: those of later groups are later.
    oldest = (plan.loads + of_group[:, None]).masked_fill(plan.loads < 0, int(loads[-1])).amin(1)
    oldest = oldest.flip(0).cummin(0).values.flip(0)
    kept = (loads[:-1] - oldest).clamp(min=0)
    words = (counts, (loads[:-1] - of_group) % ring_columns, blocks, kept)
    last = torch.stack([word << i * COUNT_BITS for i, word in enumerate(words)]).sum(0)
    return torch.cat([plan.columns.clamp(min=0), last[:, None]], 1)
