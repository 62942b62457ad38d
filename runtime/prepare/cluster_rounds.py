"""The rounds in which groups of block rows take their stored blocks, and what each round loads of B.

In a round each row of a group takes one of its blocks, at a column whose rows of B are in shared memory. Few rounds
save time, few columns loaded save bandwidth, and two rows of a warp that meet the same column read its rows of B once.
Which columns a round loads is a greedy set cover (Chvatal, "A Greedy Heuristic for the Set-Covering Problem", 1979):
those that serve most of the rows that would have nothing to take. Columns may stay for some rounds. What a row takes of
those that are there goes by when they leave (Liu, Layland, "Scheduling Algorithms for Multiprogramming in a
Hard-Real-Time Environment", 1973: earliest deadline first).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from codegen.preparation import ROUND_COLUMNS, kept_rounds, round_columns

CPU = torch.device("cpu")  # named with each new tensor, as torch's default may be another device
# What a row weighs more, in the choice of a round's columns, for each block that it has left above its group's mean. A
# row at the mean weighs 1. Weights are multiples of 1 / STEP in a range for which sums over the rows of a group are
# exact in float32: the result does not depend on the order in which they are added.
LAG, STEP, LEAST_WEIGHT, MOST_WEIGHT = 0.125, 256, 1 / 16, 1024
BATCH = 1 << 19  # elements of (groups, slots, columns) that are worked on at once: what fits in a core's cache


class Needs(NamedTuple):
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


class Rounds(NamedTuple):
    """The rounds of some groups, those of a group behind each other; all int64.

    Attributes:
        columns: (rounds, 15): block columns that a round loads, -1 behind the last one.
        blocks: (rounds, slots): stored block that each slot takes, -1 for none.
        loads: (rounds, slots): at which of the loads of its group, counted from 0, through all its rounds; -1 for none.
        counts: (groups,): rounds of each group.
    """

    columns: torch.Tensor
    blocks: torch.Tensor
    loads: torch.Tensor
    counts: torch.Tensor


def starts_of(counts: torch.Tensor) -> torch.Tensor:
    """Return where parts of these lengths start behind each other, and the end of the last one, int64."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def find_needs(rows: torch.Tensor, row: torch.Tensor, listed: torch.Tensor, columns: torch.Tensor) -> Needs:
    """The blocks that groups need.

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
    starts = starts_of(torch.bincount(keys // numbers, minlength=groups))
    need -= starts[group]
    block = group.argsort(stable=True)
    return Needs(columns[keys % numbers], starts, group[block], where[row][block] % slots, need[block], block)


def plan_rounds(needs: Needs, slots: int, ring_columns: int) -> Rounds:
    """Return the rounds of all groups.

    Args:
        needs: of the groups.
        slots: rows of a group, at most.
        ring_columns: block columns whose rows of B have a place in shared memory.
    """
    batches = [_plan_batch(needs, first, end, slots, ring_columns) for first, end in _batches(needs.starts, slots)]
    return Rounds(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


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


def _plan_batch(needs: Needs, first: int, end: int, slots: int, ring_columns: int) -> Rounds:
    """Return the rounds of some groups.

    Args:
        needs: of all groups.
        first: number of the first group.
        end: one more than the last one's.
        slots: rows of a group, at most.
        ring_columns: places of the ring.
    """
    starts = needs.starts[first : end + 1]
    part = slice(*torch.searchsorted(needs.group, starts.new_tensor([first, end])).tolist())
    table = starts.new_full((end - first, slots, max(int(starts.diff().max()), 1)), -1)
    table[needs.group[part] - first, needs.slot[part], needs.need[part]] = needs.block[part]
    longest = (table >= 0).sum(2).amax(1)
    kept = [kept_rounds(ring_columns, *pair) for pair in zip(starts.diff().tolist(), longest.tolist(), strict=True)]
    picks, takes = _cover(table >= 0, starts.new_tensor(kept), round_columns(ring_columns), ring_columns)
    used, numbers = _number_loads(picks, takes)
    at = takes.flatten(1).clamp(min=0)
    need = picks.flatten(1).gather(1, at).view_as(takes).clamp(min=0)
    blocks = table.gather(2, need.transpose(1, 2)).transpose(1, 2).where(takes >= 0, -1)
    loads = numbers.gather(1, at).view_as(takes).where(takes >= 0, -1)
    order = used.to(torch.int8).argsort(dim=2, descending=True, stable=True)  # what is not used goes behind
    columns = picks.new_full((*picks.shape[:2], ROUND_COLUMNS), -1)
    loaded = needs.columns[(starts[:-1, None, None] + picks).clamp(max=needs.columns.shape[0] - 1)]
    columns[:, :, : picks.shape[2]] = loaded.where(used, -1).gather(2, order)
    takes_any = (takes >= 0).any(2)
    return Rounds(columns[takes_any], blocks[takes_any], loads[takes_any], takes_any.sum(1))


def _cover(wanted: torch.Tensor, kept: torch.Tensor, width: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the columns of rounds until each slot has taken what it wants, for many groups at once.

    Args:
        wanted: bool (groups, slots, needs).
        kept: int64 (groups,): for how many more rounds what a round loads stays.
        width: needs that a round loads, at most.
        room: needs that there is room for.

    Returns:
        int64 (groups, rounds, width): needs that a round loads, -1 behind the last one; and int64 (groups, rounds,
        slots): which of them a slot takes, counted through the loads of all rounds, width for each; -1 for none. In
        groups that are done slots take nothing.
    """
    groups, slots, _ = wanted.shape
    depth = int(kept.max()) + 1
    left = wanted.to(torch.float32)
    # What is there: the needs of the last rounds, oldest first, and for how many rounds after this one they stay.
    resident = torch.full((groups, depth, width), -1, dtype=torch.int64, device=CPU)
    stays = kept[:, None] - torch.arange(depth - 1, -1, -1, device=CPU)
    all_picks: list[torch.Tensor] = []
    all_takes: list[torch.Tensor] = []
    while bool((counts := left.sum(2)).any()):
        waiting = (counts > 0).to(torch.float32)
        mean = counts.sum(1, keepdim=True) / waiting.sum(1, keepdim=True).clamp(min=1)
        weights = ((1 + LAG * (counts - mean)).clamp(LEAST_WEIGHT, MOST_WEIGHT) * STEP).round() / STEP * waiting
        resident = torch.cat([resident[:, 1:], torch.full_like(resident[:, :1], -1)], 1)
        resident.masked_fill_((stays < 0)[:, :, None], -1)
        wants = _wanted_of(left, resident.flatten(1))
        # Places are given back in their order: those up to the first one that somebody still wants.
        taken = ((resident.flatten(1) >= 0) & (wants.any(1).cumsum(1) > 0)).sum(1)
        resident[:, -1] = _pick(left, weights, wants.sum(2).to(torch.float32), kept, width=width, room=room - taken)
        takes = _take(left, resident, stays)
        all_takes.append(takes.where(takes < 0, takes + (len(all_picks) + 1 - depth) * width))
        all_picks.append(resident[:, -1])
    if not all_picks:
        nothing = torch.empty(groups, 0, width + slots, dtype=torch.int64, device=CPU)
        return nothing[:, :, :width], nothing[:, :, width:]
    return torch.stack(all_picks, 1), torch.stack(all_takes, 1)


def _wanted_of(left: torch.Tensor, needs: torch.Tensor) -> torch.Tensor:
    """Mask of the needs that each slot wants: bool (groups, slots, count).

    Args:
        left: float32 (groups, slots, needs): 1 for what a slot wants, else 0.
        needs: int64 (groups, count): the needs, -1 for none.
    """
    wanted = left.gather(2, needs.clamp(min=0)[:, None].expand(-1, left.shape[1], -1)) > 0
    return wanted & (needs >= 0)[:, None]


def _pick(
    left: torch.Tensor,
    weights: torch.Tensor,
    stock: torch.Tensor,
    kept: torch.Tensor,
    *,
    width: int,
    room: torch.Tensor,
) -> torch.Tensor:
    """Choose what one round loads, one by one, until each slot can take something.

    A need gains the weights of the slots that would have nothing to take without it. It loses 1 for each slot that
    wants it and can take something in all rounds that it stays, as it must be loaded again for that slot.

    Args:
        left: float32 (groups, slots, needs): 1 for what a slot wants, else 0.
        weights: float32 (groups, slots): of the slots, 0 for one that wants nothing.
        stock: float32 (groups, slots): how many of the needs that are there a slot wants. Is changed.
        kept: int64 (groups,): for how many more rounds needs stay.
        width: needs to choose, at most.
        room: int64 (groups,): needs that there is room for.

    Returns:
        int64 (groups, width): needs, -1 behind the last one.
    """
    groups, slots, _ = left.shape
    picks = torch.full((groups, width), -1, dtype=torch.int64, device=CPU)
    rounds = kept[:, None]
    gain = torch.bmm((weights * (stock == 0))[:, None], left)[:, 0]
    score = gain - torch.bmm((stock > rounds).to(torch.float32)[:, None], left)[:, 0]
    for i in range(width):
        pick = score.masked_fill(gain <= 0, -torch.inf).argmax(1)
        wants = left.gather(2, pick[:, None, None].expand(-1, slots, 1))[:, :, 0]
        found = (i < room) & ((wants > 0) & (stock == 0)).any(1)
        if not bool(found.any()):
            break
        picks[:, i] = pick.where(found, -1)
        wants = wants * found[:, None]
        served = wants * weights * (stock == 0)
        change = torch.bmm(torch.stack([served, served + wants * (stock == rounds)], 1), left)
        gain -= change[:, 0]
        score -= change[:, 1]
        stock += wants
    return picks


def _take(left: torch.Tensor, resident: torch.Tensor, stays: torch.Tensor) -> torch.Tensor:
    """Let each slot take one of the needs that are there, and remove from what is left what they take.

    A slot takes what leaves first. Where that is not pressing, two slots of a warp that both want a need take it
    together, and what only one of them wants by itself.

    Args:
        left: float32 (groups, slots, needs): 1 for what a slot wants, else 0.
        resident: int64 (groups, rounds, width): the needs of the last rounds, oldest first, -1 for none.
        stays: int64 (groups, rounds): for how many rounds after this one they stay.

    Returns:
        int64 (groups, slots): which of them a slot takes, a number in (rounds, width); -1 for none.
    """
    groups, slots, _ = left.shape
    rounds, width = resident.shape[1:]
    needs = resident.flatten(1)
    wants = _wanted_of(left, needs)
    # A round's needs are pressing for a slot that wants more of those that leave by then than there are rounds left.
    leaving = wants.view(groups, slots, rounds, width).sum(3).cumsum(2)
    pressing = (leaving > stays[:, None]) & (stays >= 0)[:, None]
    first_pressing = pressing.to(torch.int8).argmax(2).where(pressing.any(2), rounds - 1)
    allowed = wants & (torch.arange(rounds * width, device=CPU) // width <= first_pressing[:, :, None])
    partner = torch.arange(slots, device=CPU) ^ 1
    partner = partner.where(partner < slots, slots - 1)
    together = allowed & allowed[:, partner]
    allowed = together.where(together.any(2, keepdim=True), allowed)
    # The first of the best, which is the one that leaves first.
    take = (2 * allowed.to(torch.int8) - (allowed & wants[:, partner]).to(torch.int8)).argmax(2)
    takes_any = wants.any(2)
    need = needs.gather(1, take).clamp(min=0)[:, :, None]
    left.scatter_(2, need, left.gather(2, need).masked_fill(takes_any[:, :, None], 0))
    return take.where(takes_any, -1)


def _number_loads(picks: torch.Tensor, takes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the needs of rounds that a slot takes. Others, picked later, may have served all slots of one.

    Args:
        picks: int64 (groups, rounds, width): needs, -1 for none.
        takes: int64 (groups, rounds, slots): which of them, counted through all rounds, a slot takes, -1 for none.

    Returns:
        bool (groups, rounds, width): whether a slot takes it; and int64 (groups, rounds x width): how many are taken of
        those before it.
    """
    count = picks.shape[1] * picks.shape[2]
    used = torch.zeros(picks.shape[0], count + 1, dtype=torch.bool, device=CPU)
    used = used.scatter_(1, takes.flatten(1).where(takes.flatten(1) >= 0, count), True)[:, :-1]
    return used.view_as(picks), used.cumsum(1) - 1
