"""Schedule of rounds in which groups of block rows process their stored blocks, and the loads of B in each round.

In a round each row of a group processes one of its blocks, in a column whose rows of B are in shared memory. Few rounds
save time, few loaded columns save bandwidth, and two rows of a warp with the same column read its rows of B once. A
greedy set cover (Chvatal, "A Greedy Heuristic for the Set-Covering Problem", 1979) chooses the columns of a round: the
ones that serve most of the rows without work. Columns may stay for several rounds. Among the resident columns, a row
processes first the one that leaves first (Liu, Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time
Environment", 1973: earliest deadline first).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from codegen.preparation import ROUND_COLUMNS, kept_rounds, round_columns

CPU = torch.device("cpu")  # passed for each new tensor, because torch's default device may be another
# Additional weight of a row, in the choice of a round's columns, for each remaining block above its group's mean. A row
# at the mean has weight 1. Weights are multiples of 1 / STEP in a range where float32 sums over the rows of a group are
# exact, so that the result does not depend on the order of summation.
LAG, STEP, LEAST_WEIGHT, MOST_WEIGHT = 0.125, 256, 1 / 16, 1024
BATCH = 1 << 19  # elements of (groups, slots, columns) per batch, sized for a core's cache


class Needs(NamedTuple):
    """The block columns that groups need, and the blocks that need them; all int64.

    A block column that a row lists several times is needed several times: the k-th listings of all rows share a need.

    Attributes:
        columns: (needs,): block column of each need, with the needs of a group contiguous.
        starts: (groups + 1,): first need of each group, and the number of needs.
        group: (blocks,): group of each stored block, ascending.
        slot: (blocks,): slot of the block's row.
        need: (blocks,): need of the block, numbered within the group.
        block: (blocks,): index of the block in the values.
    """

    columns: torch.Tensor
    starts: torch.Tensor
    group: torch.Tensor
    slot: torch.Tensor
    need: torch.Tensor
    block: torch.Tensor


class Rounds(NamedTuple):
    """The rounds of some groups, with the rounds of a group contiguous; all int64.

    Attributes:
        columns: (rounds, 15): block columns that a round loads, then -1.
        blocks: (rounds, slots): stored block that each slot processes, -1 for none.
        loads: (rounds, slots): load that the block uses, numbered from 0 through all rounds of its group; -1 for none.
        counts: (groups,): rounds of each group.
    """

    columns: torch.Tensor
    blocks: torch.Tensor
    loads: torch.Tensor
    counts: torch.Tensor


def starts_of(counts: torch.Tensor) -> torch.Tensor:
    """Exclusive prefix sum of lengths, and the total, int64."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def find_needs(rows: torch.Tensor, row: torch.Tensor, listed: torch.Tensor, columns: torch.Tensor) -> Needs:
    """Find the block columns that groups need.

    Args:
        rows: int64 (groups, slots): block row of each slot, -1 for none.
        row: int64 (blocks,): block row of each block.
        listed: int64 (blocks,): column number of each block; a row lists a number at most once.
        columns: int64 (numbers,): block column of each number.
    """
    groups, slots = rows.shape
    numbers = max(columns.shape[0], 1)
    where = rows.new_empty(groups * slots)  # slot of each block row, numbered through all groups
    where[rows[rows >= 0]] = (rows >= 0).flatten().nonzero().flatten()
    group = where[row] // slots
    keys, need = torch.unique(group * numbers + listed, return_inverse=True)
    starts = starts_of(torch.bincount(keys // numbers, minlength=groups))
    need -= starts[group]
    block = group.argsort(stable=True)
    return Needs(columns[keys % numbers], starts, group[block], where[row][block] % slots, need[block], block)


def plan_rounds(needs: Needs, slots: int, ring_columns: int) -> Rounds:
    """Plan the rounds of all groups.

    Args:
        needs: needs of the groups.
        slots: rows of a group, at most.
        ring_columns: block columns whose rows of B fit in shared memory.
    """
    batches = [_plan_batch(needs, first, end, slots, ring_columns) for first, end in _batches(needs.starts, slots)]
    return Rounds(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def _batches(starts: torch.Tensor, slots: int) -> list[tuple[int, int]]:
    """Begin and end of batches of groups whose tables of needs are small together.

    Args:
        starts: int64 (groups + 1,): first need of each group, and the number of needs.
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
    """Rounds of a batch of groups.

    Args:
        needs: needs of all groups.
        first: first group.
        end: group after the last one.
        slots: rows of a group, at most.
        ring_columns: slots of the ring.
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
    order = used.to(torch.int8).argsort(dim=2, descending=True, stable=True)  # unused entries go last
    columns = picks.new_full((*picks.shape[:2], ROUND_COLUMNS), -1)
    loaded = needs.columns[(starts[:-1, None, None] + picks).clamp(max=needs.columns.shape[0] - 1)]
    columns[:, :, : picks.shape[2]] = loaded.where(used, -1).gather(2, order)
    takes_any = (takes >= 0).any(2)
    return Rounds(columns[takes_any], blocks[takes_any], loads[takes_any], takes_any.sum(1))


def _cover(wanted: torch.Tensor, kept: torch.Tensor, width: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the columns of rounds until every slot has processed its needs, for many groups at once.

    Args:
        wanted: bool (groups, slots, needs).
        kept: int64 (groups,): number of further rounds for which a round's loads stay.
        width: needs that a round loads, at most.
        room: needs that fit at once.

    Returns:
        int64 (groups, rounds, width): needs that a round loads, then -1; and int64 (groups, rounds, slots): the load
        that a slot uses, numbered through all rounds with ``width`` per round; -1 for none. In finished groups all
        slots have -1.
    """
    groups, slots, _ = wanted.shape
    depth = int(kept.max()) + 1
    left = wanted.to(torch.float32)
    # Resident needs: the needs of the last rounds, oldest first, and the number of rounds after this one that they
    # stay.
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
        # Ring slots are freed in order, up to the first one that a row still needs.
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
    """Mask of the needs that each slot still has: bool (groups, slots, count).

    Args:
        left: float32 (groups, slots, needs): 1 for a slot's remaining needs, else 0.
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
    """Choose the needs that one round loads, one by one, until every slot has work.

    A need gains the weights of the slots that would be idle without it. It loses 1 for each slot that needs it but has
    other work in all rounds in which it stays, because it must be loaded again for that slot.

    Args:
        left: float32 (groups, slots, needs): 1 for a slot's remaining needs, else 0.
        weights: float32 (groups, slots): weights of the slots, 0 for a finished slot.
        stock: float32 (groups, slots): number of resident needs of each slot. Modified in place.
        kept: int64 (groups,): number of further rounds for which needs stay.
        width: needs to choose, at most.
        room: int64 (groups,): needs that still fit.

    Returns:
        int64 (groups, width): needs, then -1.
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
    """Assign one resident need to each slot, and remove it from the slot's remaining needs.

    A slot takes the need that leaves first. If that is not urgent, two slots of a warp take a common need together, and
    other needs separately.

    Args:
        left: float32 (groups, slots, needs): 1 for a slot's remaining needs, else 0.
        resident: int64 (groups, rounds, width): the needs of the last rounds, oldest first, -1 for none.
        stays: int64 (groups, rounds): number of rounds after this one that they stay.

    Returns:
        int64 (groups, slots): the need of each slot, as a number in (rounds, width); -1 for none.
    """
    groups, slots, _ = left.shape
    rounds, width = resident.shape[1:]
    needs = resident.flatten(1)
    wants = _wanted_of(left, needs)
    # A round's needs are urgent for a slot that has more needs leaving by then than rounds left.
    leaving = wants.view(groups, slots, rounds, width).sum(3).cumsum(2)
    pressing = (leaving > stays[:, None]) & (stays >= 0)[:, None]
    first_pressing = pressing.to(torch.int8).argmax(2).where(pressing.any(2), rounds - 1)
    allowed = wants & (torch.arange(rounds * width, device=CPU) // width <= first_pressing[:, :, None])
    partner = torch.arange(slots, device=CPU) ^ 1
    partner = partner.where(partner < slots, slots - 1)
    together = allowed & allowed[:, partner]
    allowed = together.where(together.any(2, keepdim=True), allowed)
    # The first of the best, which leaves first.
    take = (2 * allowed.to(torch.int8) - (allowed & wants[:, partner]).to(torch.int8)).argmax(2)
    takes_any = wants.any(2)
    need = needs.gather(1, take).clamp(min=0)[:, :, None]
    left.scatter_(2, need, left.gather(2, need).masked_fill(takes_any[:, :, None], 0))
    return take.where(takes_any, -1)


def _number_loads(picks: torch.Tensor, takes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the loads that slots use. A load is unused if later picks served all of its slots.

    Args:
        picks: int64 (groups, rounds, width): needs, -1 for none.
        takes: int64 (groups, rounds, slots): the load that a slot uses, numbered through all rounds; -1 for none.

    Returns:
        bool (groups, rounds, width): whether a slot uses the load; and int64 (groups, rounds x width): number of used
        loads before it.
    """
    count = picks.shape[1] * picks.shape[2]
    used = torch.zeros(picks.shape[0], count + 1, dtype=torch.bool, device=CPU)
    used = used.scatter_(1, takes.flatten(1).where(takes.flatten(1) >= 0, count), True)[:, :-1]
    return used.view_as(picks), used.cumsum(1) - 1
