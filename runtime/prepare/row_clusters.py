"""Clusters of a BSR matrix's block rows that share loads of B, and the order in which each cluster processes its
blocks.

Row clusters are called groups here and in kernels, where "cluster" means a cluster of thread blocks. A thread block
multiplies a group of block rows of A by a tile of columns of B, in rounds (:mod:`runtime.prepare.cluster_rounds`). A
block column of A, that is a block row of B, is loaded to shared memory once for all rows of the group with a block
there. A greedy set cover (Chvatal, "A Greedy Heuristic for the Set-Covering Problem", 1979) forms the groups: the row
with most columns in common with a group joins it. Optionally, groups then exchange rows by simulated annealing
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

# Score of a row that may join a group, in fifths of a block: 1 for each block in a column of the group, -0.4 for each
# block that the row is shorter than the group's longest row.
SHARED, SHORTER = 5, 2
TAKEN = -(2**62)  # score of a row that is already in a group
# Number of annealing steps, with at most one exchange per group in each step, and number of rows (up to twice as many)
# that are examined together. The temperature, in columns, falls from its initial value to 0; an exchange may cost
# MOST_COST times the temperature. 512 rows with 16 of 512 random columns each, in 22 groups, have 210 columns per group
# before, 203 after 300 steps, 202 after 1500. Matrices of few rows have fewer steps, STEPS_A_ROW per row.
STEPS, STEPS_A_ROW, EXCHANGING_ROWS, TEMPERATURE, MOST_COST = 2000, 8, 1024, 1.1, 3
LAST_STEPS = 30  # upper limit of steps at temperature 0
FORBIDDEN = float(1 << 20)  # cost of a forbidden exchange
SHIFTS = 1 << 16  # offsets in the noise at which a step's noise may begin
# Average share of all columns in a group above which rows are not exchanged, because there is little to gain.
NEARLY_ALL = 15 / 16


class RowClusters(NamedTuple):
    """Block rows of a BSR matrix in groups, and the rounds in which each group processes its stored blocks.

    Attributes:
        rounds: int32 (rounds, 16): elements 0 to 14 are the block columns that a round loads, then 0; element 15 is
            their number (0 to 15) | ring slot of the first one << 8 | blocks that slots process << 16 | number of the
            most recent ring slots that this or later rounds still need << 24.
        entries: int32 (rounds, slots, 2): stored block that each slot processes (index into the values) and ring slot
            of its column; -1, -1 for an idle slot.
        starts: int32 (groups + 1,): first round of each group, and the number of rounds.
        rows: int32 (groups, slots): block row of each slot, -1 for none. The rows of a group are in its first slots.
        ring_columns: slots of the ring.
        block_rows, block_columns, blocks: size of the matrix in blocks, and number of stored blocks.
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
    """Form groups of block rows and assign their stored blocks to rounds, on the CPU (synchronizes).

    The same matrix gives the same result on one machine. The columns of a row may be in any order. Each listing of a
    repeated column is a stored block with its own round. A column out of range counts as the column after the last one.

    Args:
        crow_indices: int32 or int64 (block rows + 1,): first block of each block row, and the number of blocks.
        col_indices: int32 or int64 (blocks,): block column of each block.
        block_columns: block columns of the matrix.
        slots: rows of a group, at most.
        groups: number of groups to form; their sizes differ by at most one.
        ring_columns: capacity of the kernel's ring in block columns. A round loads at most a third of it, and at most
            15. If it needs far fewer, they stay for later rounds.
        anneal: whether groups exchange rows, which takes most of the time if it improves the groups.

    Returns:
        Groups and rounds, on the device of crow_indices.

    Raises:
        ValueError: if the groups have too few slots for the rows, or the ring is empty.
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
    """Run one search at a time, on one CPU thread, because many short calls would wait for other threads.

    512 rows with 64 of 512 random columns each take 0.4 s this way, and 2 to 11 s with two threads on two busy cores.
    The number of threads is global to the process: concurrent searches would save and restore each other's setting.
    """
    with _searching:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def covers(order: RowClusters, crow_indices: torch.Tensor, col_indices: torch.Tensor) -> bool:
    """Whether groups and rounds are valid for a matrix (synchronizes).

    They are valid if each stored block is processed exactly once, by the slot of its row, while its column is in the
    given ring slot; if each block row is in one slot, among the first slots of its group; and if the rounds of a group
    are contiguous, record their number of blocks (at least one), load no more columns than cluster_rows allows, start
    at ring slot 0 for each group, continue after the previous round, and load only into free ring slots.

    Args:
        order: tensors with the shapes and dtypes of RowClusters and any content.
        crow_indices: int32 or int64 (block rows + 1,): first block of each block row, and the number of blocks.
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
    of_group = torch.repeat_interleave(loads[starts[:-1]], starts.diff())  # loads of the previous groups
    before, after = loads[:-1] - of_group, loads[1:] - of_group
    released = before - kept  # loads of its group that no row needs from the start of a round on
    rises = torch.cat([released[:1] >= 0, released.diff() >= 0]) | (before == 0)
    in_order = rises & (released >= 0) & (released >= after - ring_columns)
    if not bool((in_order & (first_places == before % ring_columns)).all()):
        return False
    block, place = entries.unbind(2)
    takes = block >= 0
    nothing = (block == -1) & (place == -1)
    # The last load into a ring slot: it is resident if it exists and no later round may have replaced it yet.
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
    """Block columns, with columns out of range replaced by the one after the last."""
    return col.where((col >= 0) & (col < block_columns), torch.tensor(block_columns, device=CPU))


def _rises(numbers: torch.Tensor, end: int) -> bool:
    """Whether numbers (at least one) ascend from 0 to an end, not strictly."""
    return int(numbers[0]) == 0 and int(numbers[-1]) == end and bool((numbers.diff() >= 0).all())


def _names_once(rows: torch.Tensor, block_rows: int) -> bool:
    """Whether rows contain each block row once, and -1 only after the block rows of a group."""
    from_the_first = bool((rows[:, :-1] >= rows[:, 1:].clamp(max=0)).all())
    named = rows[rows >= 0].sort().values
    return from_the_first and bool((rows >= -1).all()) and torch.equal(named, torch.arange(block_rows, device=CPU))


def _number_listings(row: torch.Tensor, col: torch.Tensor, block_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the listed block columns so that each row lists each number at most once.

    The k-th listings of a column have the same number in all rows.

    Args:
        row: int64 (blocks,): block row of each block, ascending.
        col: int64 (blocks,): block column of each block.
        block_columns: block columns of the matrix.

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
    """Divide block rows into groups of rows with many common columns and similar lengths.

    A group starts with the longest remaining row. The number of columns that each row shares with the group is updated
    as the group grows: a new column of the group counts for all rows that list it.

    Args:
        lengths: int64 (block rows,): blocks of each row.
        listed: int64 (blocks,): column number of each block; a row lists a number at most once.
        numbers: number of column numbers.
        slots: rows of a group, at most.
        groups: number of groups to form.

    Returns:
        int64 (groups, slots): block row of each slot, -1 for none.
    """
    block_rows = lengths.shape[0]
    lists = listed.split(lengths.tolist())
    users = torch.repeat_interleave(torch.arange(block_rows, device=CPU), lengths)[listed.argsort(stable=True)]
    users_of = users.split(torch.bincount(listed, minlength=numbers).tolist())
    # All candidates are compared with the same longest row, so the length of a candidate adds to its score.
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
    """Exchange rows between groups to reduce their columns, then put rows with common columns side by side.

    No group gets a row longer than its longest row.

    Args:
        rows: int64 (groups, slots): block row of each slot, -1 for none; a group's rows are in its first slots.
        lengths: int64 (block rows,): blocks of each row.
        listed: int64 (blocks,): column number of each block; a row lists a number at most once.
        anneal: whether to exchange rows.

    Returns:
        Same layout as rows. In each pair of slots, the second has the row that shares most columns with the first.
    """
    lists = listed.split(lengths.tolist())
    parts = []
    for part in rows.chunk(max(1, lengths.shape[0] // EXCHANGING_ROWS)):
        group, slot = (part >= 0).nonzero(as_tuple=True)
        members = part[group, slot]
        columns = torch.cat([listed[:0], *(lists[row] for row in members.tolist())])
        names, column = torch.unique(columns, return_inverse=True)
        wants = torch.zeros(members.shape[0], names.shape[0], dtype=torch.float32, device=CPU)
        wants[torch.repeat_interleave(torch.arange(members.shape[0], device=CPU), lengths[members]), column] = 1
        wants = wants[:, wants.sum(0) > 1]  # a column of only one row costs the same in any group
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
    """Groups of rows with unchanged sizes and the fewest columns found.

    The cost of moving a row to another group does not depend on the row that replaces it, except for columns that both
    list. The rows to exchange between two groups are therefore found separately, and their common cost is evaluated
    afterwards.

    Args:
        wants: float32 (rows, columns): 1 for the columns of a row, else 0.
        group: int64 (rows,): group of each row.
        lengths: int64 (rows,): blocks of each row.
    """
    count, (rows, columns) = int(group.max()) + 1 if group.shape[0] else 0, wants.shape
    if count < 2 or columns == 0:
        return group
    group = group.clone()
    # Gumbel noise, of which each step takes a part: the best move with noise is a random move weighted by its cost.
    generator = torch.Generator(CPU).manual_seed(0)
    uniform = torch.rand(rows * count + SHIFTS, generator=generator, dtype=torch.float32, device=CPU).clamp(
        1e-7, 1 - 1e-7
    )
    noise, steps = -(-uniform.log()).log(), min(STEPS, STEPS_A_ROW * rows)
    shifts = torch.randint(SHIFTS, (steps + LAST_STEPS,), generator=generator, device=CPU).tolist()
    too_long = lengths[:, None] > lengths.new_zeros(count).scatter_reduce(0, group, lengths, "amax")
    members = _members(group, count)
    users = wants.new_zeros(count, columns).index_add_(0, group, wants)
    pairs = torch.triu_indices(count, count, 1, device=CPU)
    # For each row and group: columns that the row would add; for a row of the group, the columns that it alone lists.
    new, alone = wants.new_empty(rows, count), wants.new_empty(rows, count)
    changed = torch.arange(count, device=CPU)
    moves = wants.new_full((rows + 1, count), FORBIDDEN)  # cost of the moves; the last row is a placeholder
    fewest, found = int((users > 0).sum()), group.clone()
    for step, shift in enumerate(shifts):
        temperature = TEMPERATURE * max(1 - step / steps, 0)
        tables = torch.cat([users[changed] == 0, users[changed] == 1]).to(wants.dtype)
        new[:, changed], alone[:, changed] = (wants @ tables.T).chunk(2, 1)
        costs = (new - alone.gather(1, group[:, None])).masked_fill_(too_long, FORBIDDEN)
        costs.scatter_(1, group[:, None], FORBIDDEN)
        moves[:-1] = costs - temperature * noise[shift : shift + rows * count].view(rows, count)
        best, slot = moves[members].min(1)  # (from group, to group): the best row and its position in its group
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
    """Rows of each group, int64 (count, most rows), padded with the number of rows.

    Args:
        group: int64 (rows,): group of each row.
        count: number of groups.
    """
    by_group, sizes = group.argsort(stable=True), torch.bincount(group, minlength=count)
    slot = torch.arange(group.shape[0], device=CPU) - starts_of(sizes)[group[by_group]]
    members = group.new_full((count, int(sizes.max())), group.shape[0])
    members[group[by_group], slot] = by_group
    return members


def _disjoint(pairs: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Disjoint pairs of groups, the best first, int64 (2, count).

    Args:
        pairs: int64 (2, pairs): pairs of groups.
        score: float32 (pairs,): score of each pair, lower is better; FORBIDDEN / 2 and above forbid it.
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
    """Order of rows in which every second row is the remaining row nearest to the previous one.

    Args:
        wants: float32 (rows, columns): 1 for the columns of a row, else 0.
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
    """Records of rounds in the format of RowClusters, int64 (rounds, 16).

    Args:
        plan: the rounds of all groups.
        starts: int64 (groups + 1,): first round of each group, and the number of rounds.
        ring_columns: slots of the ring.
    """
    counts, blocks = (plan.columns >= 0).sum(1), (plan.blocks >= 0).sum(1)
    loads = starts_of(counts)
    of_group = torch.repeat_interleave(loads[starts[:-1]], plan.counts)
    # First load that a round or a later round needs, numbered through all groups in order.
    oldest = (plan.loads + of_group[:, None]).masked_fill(plan.loads < 0, int(loads[-1])).amin(1)
    oldest = oldest.flip(0).cummin(0).values.flip(0)
    kept = (loads[:-1] - oldest).clamp(min=0)
    words = (counts, (loads[:-1] - of_group) % ring_columns, blocks, kept)
    last = torch.stack([word << i * COUNT_BITS for i, word in enumerate(words)]).sum(0)
    return torch.cat([plan.columns.clamp(min=0), last[:, None]], 1)
