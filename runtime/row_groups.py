"""Block rows of a BSR matrix in groups that share what is loaded of B, and the order in which a group takes its blocks.

A thread block multiplies a group of block rows of A by a tile of columns of B, in rounds. In a round some block columns
of A, that is block rows of B, are in shared memory, and each row of the group takes one of its stored blocks that meets
one of them. Few rounds save time, and few columns loaded save bandwidth. Both the forming of the groups and the
assignment of blocks to rounds are a greedy set cover (Chvatal, "A Greedy Heuristic for the Set-Covering Problem",
1979): a group is joined by the row that has most columns in common with it, and a round takes the column that serves
most of the rows that have no block in this round yet. In between, groups exchange rows, by simulated annealing
(Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing", 1983).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from codegen.plans.gathered import COUNT_BITS, ROUND_COLUMNS, round_columns

CPU = torch.device("cpu")  # named with each new tensor, as torch's default may be another device
# The score of a row that may join a group, in fifths of a block: 1 for each block that meets a column of the group,
# -0.4 for each block that the row is shorter by than the group's longest row.
SHARED, SHORTER = 5, 2
# What a row weighs more, in the choice of a round's columns, for each block that it has left above its group's mean. A
# row at the mean weighs 1. Weights are multiples of 1 / STEP in a range for which sums over the rows of a group are
# exact in float32: the result does not depend on the order in which they are added.
LAG, STEP, LEAST_WEIGHT, MOST_WEIGHT = 0.125, 256, 1 / 16, 1024
TAKEN = -(2**62)  # score of a row that is in a group already
# Groups exchange rows in so many steps, in each of which a group has one exchange at most; so many rows, up to twice as
# many, are looked at together. The temperature, in columns, falls from the first step's to 0; an exchange may cost
# MOST_COST times that. 512 rows with 16 of 512 random columns each, in 22 groups, have 210 columns a group before, 203
# after 300 steps, 201 after 1000.
STEPS, EXCHANGING_ROWS, TEMPERATURE, MOST_COST = 1000, 512, 1.5, 3
LAST_STEPS = 30  # at temperature 0, at most
FORBIDDEN = float(1 << 20)  # what an exchange costs that is not allowed
SHIFTS = 1 << 16  # places of the noise at which that of a step may begin
BATCH = 1 << 19  # elements of (groups, slots, columns) that are worked on at once: what fits in a core's cache


class RowGroups(NamedTuple):
    """Block rows of a BSR matrix in groups, and the rounds in which each group takes its stored blocks.

    Attributes:
        rounds: int32 (rounds, 16): the block columns of a round in elements 0 to 14, 0 behind the last one; in element
            15 how many they are (1 to 15) | the place of the first one in the ring << 8 | the blocks that slots take
            << 16.
        entries: int32 (rounds, slots, 2): of each slot the stored block that it takes (index into the values) and which
            of the round's columns it meets (0 to 14); -1, -1 for a slot that takes nothing.
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


class _Needs(NamedTuple):
    """The block columns that groups need, and who needs them; all int64.

    A block column that a row lists more than once is needed more than once: the k-th listings of all rows share a need.

    Attributes:
        columns: (needs,): block column of each need, the needs of a group behind each other.
        starts: (groups + 1,): first need of each group, and one more.
        group: (blocks,): group of each stored block, rising; blocks are in an order of their own.
        slot: (blocks,): its row's slot.
        need: (blocks,): its need, a number within the group.
        block: (blocks,): its index into the values.
    """

    columns: torch.Tensor
    starts: torch.Tensor
    group: torch.Tensor
    slot: torch.Tensor
    need: torch.Tensor
    block: torch.Tensor


class _Rounds(NamedTuple):
    """The rounds of some groups; all int64.

    Attributes:
        columns: (rounds, 15): block columns, -1 behind the last one.
        entries: (rounds, slots, 2): as in RowGroups.
        counts: (groups,): rounds of each group.
    """

    columns: torch.Tensor
    entries: torch.Tensor
    counts: torch.Tensor


def gather_rows(
    crow_indices: torch.Tensor,
    col_indices: torch.Tensor,
    block_columns: int,
    *,
    slots: int,
    groups: int,
    ring_columns: int,
) -> RowGroups:
    """Form groups of block rows and put their stored blocks in rounds, on the CPU (synchronises).

    The same matrix gives the same result, on one machine. The columns of a row may be in any order; one that is listed
    more than once is a stored block each time, taken in a round of its own. A column that the matrix does not have
    counts as the one behind its last.

    Args:
        crow_indices: int32 or int64 (block rows + 1,): first block of each block row, and one more.
        col_indices: int32 or int64 (blocks,): block column of each block.
        block_columns: of the matrix.
        slots: rows of a group, at most.
        groups: how many to form; their sizes differ by one at most.
        ring_columns: block columns that the kernel's ring has places for. A round has no more than a third of them, but
            one at least, and 15 at most.

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
    row = torch.repeat_interleave(torch.arange(block_rows, device=CPU), lengths)
    listed, column_of_listed = _number_listings(row, col, block_columns + 1)
    rows = _exchange_rows(_form_groups(lengths, listed, column_of_listed.shape[0], slots, groups), lengths, listed)
    needs = _find_needs(rows, row, listed, column_of_listed)
    most = round_columns(ring_columns)
    batches = [_plan_batch(needs, first, end, slots, most) for first, end in _batches(needs.starts, slots)]
    plan = _Rounds(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    starts = _starts(plan.counts)
    found = (_write_records(plan, starts, ring_columns), plan.entries, starts, rows)
    records, entries, starts, rows = (part.to(crow_indices.device, torch.int32) for part in found)
    return RowGroups(records, entries, starts, rows, ring_columns, block_rows, block_columns, col.shape[0])


def covers(order: RowGroups, crow_indices: torch.Tensor, col_indices: torch.Tensor) -> bool:
    """Return whether groups and rounds are valid ones of a matrix (synchronises).

    They are if each stored block is taken exactly once, by the slot that its row is in, and meets its own column there;
    if each block row is in one slot, of the first of its group; and if the rounds of the groups follow each other, say
    how many blocks they take, have as many columns as gather_rows puts into a round at most, but one at least, and
    begin at place 0 of the ring with each group, each behind the one before.

    Args:
        order: of the shapes and types that RowGroups has, with any content.
        crow_indices: int32 or int64 (block rows + 1,): first block of each block row, and one more.
        col_indices: int32 or int64 (blocks,): block column of each block.
    """
    rounds, entries, starts, rows = (part.to("cpu", torch.int64) for part in order[:4])
    crow, col = crow_indices.to("cpu", torch.int64), _known(col_indices.to("cpu", torch.int64), order.block_columns)
    lengths = crow.diff()
    if (order.block_rows, order.blocks) != (lengths.shape[0], col.shape[0]):
        return False
    if not (_rises(crow, col.shape[0]) and _rises(starts, rounds.shape[0]) and _names_once(rows, lengths.shape[0])):
        return False
    numbers = 1 << COUNT_BITS  # of a last word
    counts, places, blocks = rounds[:, -1] % numbers, rounds[:, -1] // numbers % numbers, rounds[:, -1] // numbers**2
    ring_columns = max(order.ring_columns, 1)
    most = round_columns(order.ring_columns)
    before = _starts(counts)
    in_group = before[:-1] - torch.repeat_interleave(before[starts[:-1]], starts.diff())
    if not bool(((counts >= 1) & (counts <= most) & (places == in_group % ring_columns)).all()):
        return False
    block, meets = entries.unbind(2)
    takes = block >= 0
    nothing = (block == -1) & (meets == -1)
    in_range = (block < col.shape[0]) & (meets >= 0) & (meets < counts[:, None])
    if not bool(in_range.where(takes, nothing).all() and (takes.sum(1) == blocks).all()):
        return False
    slot_row = torch.repeat_interleave(rows, starts.diff(), 0)
    block_row = torch.repeat_interleave(torch.arange(lengths.shape[0], device=CPU), lengths)
    taken = block[takes]
    met = rounds.gather(1, meets.clamp(min=0))[takes]
    return (
        torch.equal(taken.sort().values, torch.arange(col.shape[0], device=CPU))
        and torch.equal(block_row[taken], slot_row[takes])
        and torch.equal(col[taken], met)
    )


def _known(col: torch.Tensor, block_columns: int) -> torch.Tensor:
    """Return block columns, those that a matrix does not have as the one behind its last."""
    return col.where((col >= 0) & (col < block_columns), torch.tensor(block_columns, device=CPU))


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """Return where parts of these lengths start behind each other, and the end of the last one, int64."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _rises(numbers: torch.Tensor, end: int) -> bool:
    """Return whether numbers (at least one) rise from 0 to an end, not strictly."""
    return int(numbers[0]) == 0 and int(numbers[-1]) == end and bool((numbers.diff() >= 0).all())


def _names_once(rows: torch.Tensor, block_rows: int) -> bool:
    """Return whether rows names each block row once, and -1 only behind the block rows of a group."""
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


def _exchange_rows(rows: torch.Tensor, lengths: torch.Tensor, listed: torch.Tensor) -> torch.Tensor:
    """Exchange rows between groups, so that these have fewer columns. No group gets a row longer than its longest was.

    Args:
        rows: int64 (groups, slots): block row of each slot, -1 for none; a group's rows are in its first slots.
        lengths: int64 (block rows,): blocks of each row.
        listed: int64 (blocks,): number of the column of each block; a row lists a number once.

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
        group = _anneal(wants, group, lengths[members])
        exchanged = torch.full_like(part, -1)
        for number in range(part.shape[0]):
            mine = (group == number).nonzero()[:, 0]
            exchanged[number, : mine.shape[0]] = members[mine[_in_pairs(wants[mine])]]
        parts.append(exchanged)
    return torch.cat(parts)


def _anneal(wants: torch.Tensor, group: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return groups of rows, as large as before, that have as few columns as were found.

    Args:
        wants: float32 (rows, columns): 1 for what a row lists, else 0.
        group: int64 (rows,): group of each row.
        lengths: int64 (rows,): blocks of each row.
    """
    count, (rows, columns) = int(group.max()) + 1 if group.shape[0] else 0, wants.shape
    if count < 2 or columns == 0:
        return group
    group = group.clone()
    # Gumbel noise, a part of which each step takes: the exchange that is best with it is one drawn by its cost.
    generator = torch.Generator(CPU).manual_seed(0)
    uniform = torch.rand(rows * rows + SHIFTS, generator=generator, device=CPU).clamp(1e-7, 1 - 1e-7)
    noise, steps = -(-uniform.log()).log(), min(STEPS, 2 * rows)
    shifts = torch.randint(SHIFTS, (steps + LAST_STEPS,), generator=generator, device=CPU).tolist()
    longest = lengths.new_zeros(count).scatter_reduce(0, group, lengths, "amax")
    users = wants.new_zeros(count, columns).index_add_(0, group, wants)
    fewest, found = (users > 0).sum(), group.clone()
    for step, shift in enumerate(shifts):
        temperature = TEMPERATURE * max(1 - step / steps, 0)
        alone = wants * (users[group] == 1)  # what nobody else in a row's group lists
        more = (wants @ (users == 0).to(wants.dtype).T)[:, group] - alone.sum(1, keepdim=True)
        not_allowed = (group[:, None] == group) | (lengths[:, None] > longest[group])
        costs = (more + more.T).masked_fill(not_allowed | not_allowed.T, FORBIDDEN)
        drawn = costs - temperature * noise[shift : shift + rows * rows].view(rows, rows)
        score, other = drawn.min(1)
        # What both rows list, and nobody else in one of their groups, stays a column of that group.
        both = (alone * wants[other] + wants * alone[other]).sum(1)
        cost = costs.gather(1, other[:, None])[:, 0] + both
        good = cost <= MOST_COST * temperature if temperature else cost < 0
        busy: set[int] = set()
        for first in (score + both).masked_fill(~good, FORBIDDEN).argsort(stable=True)[: int(good.sum())].tolist():
            second = int(other[first])
            groups = int(group[first]), int(group[second])
            if busy.isdisjoint(groups):
                busy.update(groups)
                change = wants[second] - wants[first]
                users[groups[0]] += change
                users[groups[1]] -= change
                group[first], group[second] = groups[1], groups[0]
        if (now := (users > 0).sum()) < fewest:
            fewest, found = now, group.clone()
        if not busy and not temperature:
            break
    return found


def _in_pairs(wants: torch.Tensor) -> torch.Tensor:
    """Return an order of rows in which each second one is, of those that are left, the nearest to the one before.

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


def _find_needs(rows: torch.Tensor, row: torch.Tensor, listed: torch.Tensor, columns: torch.Tensor) -> _Needs:
    """Return what the groups need.

    Args:
        rows: int64 (groups, slots): block row of each slot, -1 for none.
        row: int64 (blocks,): block row of each block.
        listed: int64 (blocks,): number of the column of each block; a row lists a number once.
        columns: int64 (numbers,): block column of each number.
    """
    groups, slots = rows.shape
    numbers = max(columns.shape[0], 1)
    where = rows.new_empty(groups * slots)  # slot of each block row, counted through the groups
    where[rows[rows >= 0]] = (rows >= 0).flatten().nonzero().flatten()
    group = where[row] // slots
    keys, need = torch.unique(group * numbers + listed, return_inverse=True)
    starts = _starts(torch.bincount(keys // numbers, minlength=groups))
    need -= starts[group]
    block = group.argsort(stable=True)
    return _Needs(columns[keys % numbers], starts, group[block], where[row][block] % slots, need[block], block)


def _batches(starts: torch.Tensor, slots: int) -> list[tuple[int, int]]:
    """Return first groups and ends of batches of groups whose tables of needs are small together.

    Args:
        starts: int64 (groups + 1,): first need of each group, and one more.
        slots: rows of a group, at most.
    """
    batches = []
    first = widest = 0
    for group, count in enumerate(starts.diff().tolist()):
        widest = max(widest, count)
        if group > first and (group + 1 - first) * slots * widest > BATCH:
            batches.append((first, group))
            first, widest = group, count
    return [*batches, (first, starts.shape[0] - 1)]


def _plan_batch(needs: _Needs, first: int, end: int, slots: int, most: int) -> _Rounds:
    """Return the rounds of some groups.

    Args:
        needs: of all groups.
        first: number of the first group.
        end: one more than the last one's.
        slots: rows of a group, at most.
        most: columns of a round, at most 15.
    """
    starts = needs.starts[first : end + 1]
    part = slice(*torch.searchsorted(needs.group, starts.new_tensor([first, end])).tolist())
    table = starts.new_full((end - first, slots, max(int(starts.diff().max()), 1)), -1)
    table[needs.group[part] - first, needs.slot[part], needs.need[part]] = needs.block[part]
    picks, takes = _cover(table >= 0, most)
    group, step = (picks[:, :, 0] >= 0).nonzero(as_tuple=True)
    picks, takes = picks[group, step], takes[group, step]
    need = picks.gather(1, takes.clamp(min=0))
    block = table[group[:, None], torch.arange(slots, device=CPU), need].where(takes >= 0, -1)
    columns = picks.new_full((picks.shape[0], ROUND_COLUMNS), -1)
    columns[:, :most] = needs.columns[starts[group, None] + picks.clamp(min=0)].where(picks >= 0, -1)
    return _Rounds(columns, torch.stack([block, takes], 2), torch.bincount(group, minlength=end - first))


def _cover(wanted: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the columns of rounds until each slot has taken what it wants, for many groups at once.

    Args:
        wanted: bool (groups, slots, needs).
        most: needs of a round, at most.

    Returns:
        int64 (groups, rounds, most): needs of each round, -1 behind the last one; and int64 (groups, rounds, slots):
        which of them a slot takes, -1 for none. Groups that are done have rounds without needs.
    """
    groups, slots, _ = wanted.shape
    left = wanted.to(torch.float32)
    all_picks, all_takes = [], []
    while bool((counts := left.sum(2)).any()):
        waiting = (counts > 0).to(torch.float32)
        mean = counts.sum(1, keepdim=True) / waiting.sum(1, keepdim=True).clamp(min=1)
        weights = (1 + LAG * (counts - mean)).clamp(LEAST_WEIGHT, MOST_WEIGHT)
        all_picks.append(_pick(left, waiting, (weights * STEP).round() / STEP * waiting, most))
        all_takes.append(_take(left, all_picks[-1]))
    if not all_picks:
        nothing = torch.empty(groups, 0, most + slots, dtype=torch.int64, device=CPU)
        return nothing[:, :, :most], nothing[:, :, most:]
    return _drop_unused(torch.stack(all_picks, 1), torch.stack(all_takes, 1))


def _pick(left: torch.Tensor, waiting: torch.Tensor, weights: torch.Tensor, most: int) -> torch.Tensor:
    """Choose the columns of one round, one by one, until each slot can take something.

    A column gains the weights of the slots that it would be the first to serve. It loses 1 for each slot that wants it
    and is served already, as it must be loaded again for that slot.

    Args:
        left: float32 (groups, slots, needs): 1 for what a slot wants, else 0.
        waiting: float32 (groups, slots): 1 for a slot that wants something, else 0.
        weights: float32 (groups, slots): of the slots, 0 for one that wants nothing.
        most: needs of a round, at most.

    Returns:
        int64 (groups, most): needs, -1 behind the last one.
    """
    groups, slots, _ = left.shape
    picks = torch.full((groups, most), -1, dtype=torch.int64, device=CPU)
    gain = torch.bmm(weights[:, None], left)[:, 0]
    score = gain.clone()
    for i in range(most):
        pick = score.masked_fill(gain <= 0, -torch.inf).argmax(1)
        served = waiting * left.gather(2, pick[:, None, None].expand(-1, slots, 1))[:, :, 0]
        found = served.any(1)
        if not bool(found.any()):
            break
        picks[:, i] = pick.where(found, -1)
        waiting = waiting - served
        change = torch.bmm(torch.stack([served * weights, served * (weights + 1)], 1), left)
        gain -= change[:, 0]
        score -= change[:, 1]
    return picks


def _take(left: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    """Let each slot take one of a round's needs, and remove from what is left what they take.

    Of the needs that it wants a slot takes the one that fewest slots want: it is the most likely to be done with then.

    Args:
        left: float32 (groups, slots, needs): 1 for what a slot wants, else 0.
        picks: int64 (groups, most): needs of the round, -1 behind the last one.

    Returns:
        int64 (groups, slots): which of the round's needs a slot takes, -1 for none.
    """
    choices = picks.clamp(min=0)[:, None].expand(-1, left.shape[1], -1)
    wanted = (left.gather(2, choices) > 0) & (picks >= 0)[:, None]
    users = wanted.sum(1, keepdim=True)
    take = users.where(wanted, left.shape[1] + 1).argmin(2, keepdim=True)
    takes_any = wanted.any(2, keepdim=True)
    need = choices.gather(2, take)
    left.scatter_(2, need, left.gather(2, need).masked_fill(takes_any, 0))
    return take.where(takes_any, -1)[:, :, 0]


def _drop_unused(picks: torch.Tensor, takes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Remove the needs of rounds that no slot takes: other needs, picked later, served their slots too.

    Args:
        picks: int64 (groups, rounds, most): needs, -1 for none.
        takes: int64 (groups, rounds, slots): which of them a slot takes, -1 for none.
    """
    most = picks.shape[2]
    used = torch.zeros(*picks.shape[:2], most + 1, dtype=torch.bool, device=CPU)
    used = used.scatter_(2, takes.where(takes >= 0, most), True)[:, :, :most]
    order = used.to(torch.int8).argsort(dim=2, descending=True, stable=True)
    place = used.cumsum(2) - 1
    return (
        picks.where(used, -1).gather(2, order),
        place.gather(2, takes.clamp(min=0)).where(takes >= 0, -1),
    )


def _write_records(plan: _Rounds, starts: torch.Tensor, ring_columns: int) -> torch.Tensor:
    """Return the records of rounds as RowGroups has them, int64 (rounds, 16).

    Args:
        plan: the rounds of all groups.
        starts: int64 (groups + 1,): first round of each group, and one more.
        ring_columns: places of the ring.
    """
    counts = (plan.columns >= 0).sum(1)
    before = _starts(counts)
    place = before[:-1] - torch.repeat_interleave(before[starts[:-1]], plan.counts)
    blocks = (plan.entries[:, :, 0] >= 0).sum(1)
    last = counts | place % ring_columns << COUNT_BITS | blocks << 2 * COUNT_BITS
    return torch.cat([plan.columns.clamp(min=0), last[:, None]], 1)
