"""``share_kv_loads``, run on the host: how the loads of a tile are put in order, and which has which place and barrier.

The kernel's own functions are compiled for the host. A warp's 32 lanes are 32 contexts of a thread, which meet at each
vote.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.planning import plan_for
from codegen.render import render

FIELDS: dict[str, Any] = {
    "op": "attention",
    "arch": "sm_90a",
    "head_dim": 128,
    "pattern": {"kind": "topk", "k": 32, "block": {"q": 64, "kv": 64}},
    "tile": {"m": 128, "n": 64},
    "schedule": "cooperative",
    "share_kv_loads": True,
    "stages": 4,
}
KEY_BLOCKS = 100
HEAD = """\
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <ucontext.h>
#include <vector>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
using uint32 = unsigned int;
struct Params {};
struct WorkTile {};
struct Tile {};
int __ldg(const int* word) { return *word; }
// A warp's lanes take turns: each runs up to where they meet. The last to get there is the first to go on, so that
// they come in one order and in the other by turns: what is missing a __syncwarp is seen in one of them.
struct Index { int x; } threadIdx;
ucontext_t lanes[32], caller;
bool is_done[32];
int direction;
std::function<void()> code;
bool is_last(int lane) { return lane + direction < 0 || lane + direction == 32; }
void __syncwarp() {
  const int lane = threadIdx.x;
  if (is_last(lane)) {
    direction = -direction;
    return;
  }
  if (is_done[lane + direction]) std::abort();  // it has met less often
  swapcontext(&lanes[lane], &lanes[lane + direction]);
  threadIdx.x = lane;
}
void run_lane(int lane) {
  threadIdx.x = lane;
  code();
  is_done[lane] = true;
  setcontext(is_last(lane) ? &caller : &lanes[lane + direction]);
}
void run_warp(std::function<void()> function) {
  static std::vector<char> stacks(32 << 18);
  code = std::move(function);
  direction = 1;
  for (int lane = 0; lane < 32; ++lane) {
    is_done[lane] = false;
    getcontext(&lanes[lane]);
    lanes[lane].uc_stack.ss_sp = stacks.data() + (lane << 18);
    lanes[lane].uc_stack.ss_size = 1 << 18;
    makecontext(&lanes[lane], reinterpret_cast<void (*)()>(run_lane), 1, lane);
  }
  swapcontext(&caller, &lanes[0]);
  for (bool done : is_done)
    if (!done) std::abort();
}
int __popc(uint32 bits) { return __builtin_popcount(bits); }
int lane_words[32];
uint32 __match_any_sync(unsigned, int value) {
  uint32 equal = 0;
  lane_words[threadIdx.x] = value;
  __syncwarp();
  for (int lane = 0; lane < 32; ++lane) equal |= static_cast<uint32>(lane_words[lane] == value) << lane;
  __syncwarp();
  return equal;
}
int __shfl_sync(unsigned, int value, int lane) {
  lane_words[threadIdx.x] = value;
  __syncwarp();
  const int result = lane_words[lane];
  __syncwarp();
  return result;
}
uint32 __reduce_add_sync(unsigned, uint32 value) {
  uint32 sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += __shfl_sync(0, value, lane);
  return sum;
}
"""
PROGRAM = """\
namespace kernel {
%(constants)s
struct KvBlockIterator {
  int entries;
  const int* list;
  int key_blocks;
  bool backwards;
%(entry)s
};
KvBlockIterator sub_tiles[kSubTiles];
KvBlockIterator kv_blocks_of(const Params&, const WorkTile&, const Tile&, int sub_tile) { return sub_tiles[sub_tile]; }
%(functions)s
}  // namespace kernel
// Puts `tiles` tiles in order, one after the other: lists (tiles, kSubTiles, kTopK); writes the loads of each tile,
// the steps of its warpgroups and the number of its loads. Lists of query blocks from `query_blocks` on are missing.
extern "C" void put_in_order(const int* lists, int tiles, int query_blocks, int key_blocks, bool backwards,
    uint32* loads, uint32* steps, int* numbers) {
  using namespace kernel;
  static int blocks[kEntries], grouped[kEntries];
  static unsigned char sets[kEntries];
  run_warp([&] {
    const int lane = threadIdx.x;
    LoadCounts before;
    for (int tile = 0; tile < tiles; ++tile) {
      if (lane == 0)
        for (int list = 0; list < kSubTiles; ++list)
          sub_tiles[list] = {list < query_blocks ? kTopK : 0, lists + (tile * kSubTiles + list) * kTopK, key_blocks,
              backwards};
      __syncwarp();
      const LoadsOfSets in_tile = match_lists({}, {}, {}, blocks, sets);
      group_loads(in_tile, blocks, sets, grouped);
      const int number = schedule_loads(before, in_tile, grouped, loads + tile * kEntries, steps + tile * kEntries);
      if (lane == 0) numbers[tile] = number;
      __syncwarp();
    }
  });
}
"""


def between(text: str, begin: str, end: str) -> str:
    start = text.index(begin)
    return text[start : text.index(end, start)]


@dataclass
class Tile:
    """What was put in order for a tile: the loads, and the notes on the steps of each warpgroup."""

    loads: list[int]
    steps: list[list[int]]


Order = Callable[..., list[Tile]]


def program(sub_tiles: int, k: int, stages: int) -> str:
    """The functions of a kernel with so many lists of so many entries, and so many stages."""
    pattern = {**FIELDS["pattern"], "k": k}
    named = find_spec({**FIELDS, "pattern": pattern, "tile": {"m": 64 * sub_tiles, "n": 64}, "stages": stages})
    source = render(named)
    parts = (
        ("template <int kDepth>\nstruct PipelineState", "// A work tile"),
        ("constexpr int kSets", "constexpr int kQFullBarrier"),
        ("constexpr int kEntries", "constexpr int kWarpgroupThreads"),
        ("using uint64", "// Producer, one warp"),
    )
    return PROGRAM % {
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan_for(named).constants),
        "entry": between(source, "  // The i-th entry of the list", "};"),
        "functions": "\n".join(between(source, *part) for part in parts),
    }


@pytest.fixture
def build(recorded: Callable[..., None], tmp_path: Path) -> Callable[[int, int, int], Order]:
    """Compiles a kernel and returns its order, unless the same run is known."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")

    def ordering(sub_tiles: int, k: int, stages: int) -> Order:
        text = HEAD + program(sub_tiles, k, stages)
        recorded(text)
        (tmp_path / "main.cpp").write_text(text, encoding="utf-8")
        command = ["g++", "-std=c++20", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
        subprocess.run([*command, "main.cpp", "-o", "main.so"], cwd=tmp_path, check=True)
        function = ctypes.CDLL(str(tmp_path / "main.so")).put_in_order

        def order(
            tiles: list[list[list[int]]], key_blocks: int, query_blocks: int = sub_tiles, backwards: bool = False
        ) -> list[Tile]:
            flat = [entry for lists in tiles for entries in lists for entry in entries]
            loads, steps = ((ctypes.c_uint * len(flat))() for _ in range(2))
            numbers = (ctypes.c_int * len(tiles))()
            given = (ctypes.c_int * len(flat))(*flat)
            function(given, len(tiles), query_blocks, key_blocks, backwards, loads, steps, numbers)
            size = sub_tiles * k
            return [
                Tile(
                    list(loads[t * size : t * size + numbers[t]]),
                    [list(steps[t * size + w * k : t * size + (w + 1) * k]) for w in range(sub_tiles)],
                )
                for t in range(len(tiles))
            ]

        return order

    return ordering


def lists_of_tiles(sub_tiles: int, k: int) -> list[list[list[int]]]:
    """Lists of tiles: equal, apart, partly shared, with repeated entries and with some that name no block."""
    draw = random.Random(1000 * sub_tiles + k)

    def repeated(among: int) -> list[int]:
        return [draw.randrange(among) for _ in range(k)]

    def those(entries: list[int]) -> list[list[int]]:
        return [draw.sample(entries, k) for _ in range(sub_tiles)]

    apart = draw.sample(range(10 * KEY_BLOCKS), sub_tiles * k)
    chance = [draw.sample(range(3 * k), k) for _ in range(8 * sub_tiles)]
    wild = [draw.choice((-1, -7, KEY_BLOCKS, KEY_BLOCKS + 3, 5)) for _ in range(k)]
    return [
        [apart[:k]] * sub_tiles,
        those(apart[:k]),
        [apart[w * k : w * k + k] for w in range(sub_tiles)],
        those(apart[: k + k // 4]),
        [sorted(entries) for entries in those(apart[: 2 * k])],
        # What the last list has in common with each other one alone.
        [*(apart[w * k : w * k + k] for w in range(sub_tiles - 1)), apart[k // 2 : k // 2 + k]],
        [repeated(5) for _ in range(sub_tiles)],
        [repeated(KEY_BLOCKS) for _ in range(sub_tiles)],
        [[3] * k, *([3] * (k // 2) + [w] * (k - k // 2) for w in range(1, sub_tiles))],
        [wild, *(repeated(9) for _ in range(1, sub_tiles))],
        [*(repeated(9) for _ in range(1, sub_tiles)), wild],
        *(chance[i : i + sub_tiles] for i in range(0, len(chance), sub_tiles)),
    ]


@pytest.mark.parametrize("sub_tiles", [2, 3])
@pytest.mark.parametrize("k", [1, 5, 32, 40, 128])
def test_every_entry_is_worked_on_as_often_as_it_is_listed(
    build: Callable[[int, int, int], Order], sub_tiles: int, k: int
) -> None:
    """Loads and steps agree on places, barriers and phases, tile after tile; and no load is needlessly repeated."""
    stages = 5 if k < 100 else sub_tiles
    order, tiles = build(sub_tiles, k, stages), lists_of_tiles(sub_tiles, k)
    for key_blocks in (KEY_BLOCKS, 10 * KEY_BLOCKS):
        place = 0
        loads_of_set: Counter[int] = Counter()
        for lists, tile in zip(tiles, order(tiles, key_blocks), strict=True):
            wanted = [Counter(e if 0 <= e < key_blocks else key_blocks for e in entries) for entries in lists]
            found: list[list[int]] = [[] for _ in lists]
            last = [0] * sub_tiles
            for number, load in enumerate(tile.loads):
                block, full = divmod(load, 64)
                users = [w for w in range(sub_tiles) if full // stages + 1 >> w & 1]
                assert full == full // stages * stages + loads_of_set[full // stages] % stages
                for w in users:
                    note = tile.steps[w][len(found[w])]
                    assert (note & 0xFF, note >> 8 & 0xFF) == (place, full)
                    assert note >> 16 & 1 == loads_of_set[full // stages] // stages % 2
                    assert (note >> 17) * len(users) == (2 if sub_tiles == 2 else 6)
                    assert number - last[w] <= 2 * sub_tiles - 1
                    found[w].append(block)
                    last[w] = number
                loads_of_set[full // stages] += 1
                place = (place + 1) % stages
            assert [Counter(blocks) for blocks in found] == wanted
            union = wanted[0]
            for entries in wanted[1:]:
                union = union | entries
            assert len(tile.loads) == union.total()


@pytest.mark.parametrize("sub_tiles", [2, 3])
def test_loads_for_several_lists_are_spread_over_a_tile(
    build: Callable[[int, int, int], Order], sub_tiles: int
) -> None:
    """Whatever a load is for, as many loads for the same lists come in the first part of a tile as in any other."""
    draw, k, stages = random.Random(sub_tiles), 40, 5
    for tile in build(sub_tiles, k, stages)(
        [[sorted(draw.sample(range(90), k)) for _ in range(sub_tiles)] for _ in range(20)], KEY_BLOCKS
    ):
        places: dict[int, list[float]] = {}
        blocks: dict[int, list[int]] = {}
        for number, load in enumerate(tile.loads):
            places.setdefault(load % 64 // stages, []).append((number + 0.5) / len(tile.loads))
            blocks.setdefault(load % 64 // stages, []).append(load // 64)
        for found in places.values():
            even = [(i + 0.5) / len(found) for i in range(len(found))]
            # Two kinds of turns may have loads for these lists, each of them is spread by itself.
            assert max(abs(at - where) for at, where in zip(found, even, strict=True)) < 0.5 / len(found) + 0.1
        assert all(of_set == sorted(of_set) for of_set in blocks.values())  # in the order of the lists


@pytest.mark.parametrize("sub_tiles", [2, 3])
def test_query_blocks_that_are_missing_take_the_first_list(
    build: Callable[[int, int, int], Order], sub_tiles: int
) -> None:
    k = 40
    entries = list(range(100, 60, -1))
    order, lists = build(sub_tiles, k, 5), [[entries, *[[0] * k] * (sub_tiles - 1)]]
    (tile,) = order(lists, 10 * KEY_BLOCKS, query_blocks=1)
    assert [load // 64 for load in tile.loads] == entries
    (tile,) = order(lists, 10 * KEY_BLOCKS, query_blocks=1, backwards=True)
    assert [load // 64 for load in tile.loads] == entries[::-1]


@pytest.mark.parametrize("sub_tiles", [2, 3])
@pytest.mark.parametrize("extra", [0, 1])
def test_the_rings_never_fill_up(build: Callable[[int, int, int], Order], sub_tiles: int, extra: int) -> None:
    """The K ring and the V ring with consumers that go on as far as they can: the fewest stages allowed suffice."""
    k, stages = 40, sub_tiles + extra
    tiles = lists_of_tiles(sub_tiles, k)
    loads: list[list[int]] = []  # users of each load
    uses: list[list[int]] = [[] for _ in range(sub_tiles)]  # loads of each warpgroup
    for tile in build(sub_tiles, k, stages)(tiles, 10 * KEY_BLOCKS):
        for load in tile.loads:
            loads.append([w for w in range(sub_tiles) if load % 64 // stages + 1 >> w & 1])
            for w in loads[-1]:
                uses[w].append(len(loads) - 1)
    left = [[set(users) for users in loads] for _ in range(2)]  # who still needs a load's place: of K, of V
    there, steps = [0, 0], [0] * sub_tiles
    moved = True
    while moved:
        moved = False
        for ring in range(2):
            while there[ring] < len(loads) and (there[ring] < stages or not left[ring][there[ring] - stages]):
                there[ring] += 1
                moved = True
        for w in range(sub_tiles):
            step = steps[w]
            if step > k * len(tiles):
                continue
            # Scores of a step need its K, and are waited for after V of the step before; the last V has no K beside it.
            needs_k, needs_v = step % k != 0 or step < k * len(tiles), step > 0
            k_load = uses[w][step] if step < len(uses[w]) else -1
            v_load = uses[w][step - 1] if needs_v else -1
            if (needs_k and k_load >= there[0]) or v_load >= there[1]:
                continue
            if k_load >= 0:
                left[0][k_load].discard(w)
            if v_load >= 0:
                left[1][v_load].discard(w)
            steps[w] += 1
            moved = True
    assert steps == [k * len(tiles) + 1] * sub_tiles


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("share_kv_loads", {"arch": "sm_89", "schedule": "multistage"}),
        ("share_kv_loads", {"pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 64}}}),
        ("share_kv_loads", {"pattern": {"kind": "causal"}}),
        ("stream_k_tail", {"stream_k_tail": True}),
        ("schedule", {"schedule": "ping_pong"}),
        ("pack_gqa", {"pack_gqa": 2}),
        ("pattern.block.q", {"pattern": {"kind": "topk", "k": 32, "block": {"q": 128, "kv": 64}}}),
        ("pattern.block.q", {"pattern": {"kind": "topk", "k": 32, "block": {"q": 32, "kv": 64}}}),
        ("tile.m", {"head_dim": 64, "tile": {"m": 256, "n": 64}}),
        ("tile.n", {"tile": {"m": 128, "n": 128}}),
        ("tile.n", {"pattern": {"kind": "topk", "k": 32, "block": {"q": 64, "kv": 128}}}),
        ("head_dim", {"head_dim": 192, "stages": 1}),
        ("pattern.k", {"pattern": {"kind": "topk", "k": 129, "block": {"q": 64, "kv": 64}}}),
        ("stages", {"stages": 1}),
        ("stages", {"stages": 2, "tile": {"m": 192, "n": 64}}),
        ("stages", {"stages": 9, "head_dim": 64}),
        ("stages", {"stages": 7}),
    ],
)
def test_what_it_is_not_written_for_is_refused(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_for(find_spec({**FIELDS, **change}))
    assert caught.value.field == field


def test_it_is_off_by_default_and_then_no_part_of_the_hash() -> None:
    plain = {name: value for name, value in FIELDS.items() if name != "share_kv_loads"}
    assert find_spec({**plain, "share_kv_loads": False}).spec.hash == find_spec(plain).spec.hash
    assert "share_kv_loads" not in find_spec(plain).spec.canonical_json()
    shared = find_spec(FIELDS).spec
    assert '"share_kv_loads":true' in shared.canonical_json() and "stream_k_tail" not in shared.canonical_json()


def test_stages_left_out_suffice_for_both_tiles() -> None:
    plain = {name: value for name, value in FIELDS.items() if name != "stages"}
    for m in (128, 192):
        spec = find_spec({**plain, "tile": {"m": m, "n": 64}}).spec
        assert spec.stages == 4
        plan_for(find_spec(spec))


@pytest.mark.parametrize(("head_dim", "stages"), [(64, 4), (96, 2), (128, 2)])
def test_stages_left_out_fit_with_blocks_of_128_keys(head_dim: int, stages: int) -> None:
    pattern = {"kind": "topk", "k": 128, "block": {"q": 64, "kv": 128}}
    plain = {name: value for name, value in FIELDS.items() if name not in ("stages", "tile", "schedule")}
    plan = plan_for(find_spec({**plain, "pattern": pattern, "head_dim": head_dim}))
    assert plan.spec.stages == stages
    assert plan.spec.tile.model_dump() == {"m": 128, "n": 128}


@pytest.mark.parametrize("head_dim", [192, 256])
def test_a_head_that_is_too_wide_is_to_blame_for_what_follows_it(head_dim: int) -> None:
    pattern = {"kind": "topk", "k": 32, "block": {"q": 64, "kv": 128}}
    plain = {name: value for name, value in FIELDS.items() if name not in ("stages", "tile", "schedule")}
    with pytest.raises(SpecError, match=rf"^head_dim: is {head_dim}; allowed with share_kv_loads: 64, 96, 128$"):
        plan_for(find_spec({**plain, "pattern": pattern, "head_dim": head_dim}))


@pytest.mark.parametrize("head_dim", [96, 128])
def test_three_query_blocks_do_not_fit_beside_steps_of_128_keys(head_dim: int) -> None:
    pattern = {"kind": "topk", "k": 32, "block": {"q": 64, "kv": 128}}
    plain = {name: value for name, value in FIELDS.items() if name not in ("stages", "tile")}
    fields = {**plain, "pattern": pattern, "tile": {"m": 192}}
    with pytest.raises(SpecError, match=r"^tile\.m: is 192; of steps of 128 keys .*: 128$"):
        plan_for(find_spec({**fields, "head_dim": head_dim}))
    assert plan_for(find_spec({**fields, "head_dim": 64})).spec.stages == 4


@pytest.mark.parametrize("grouping", ["none", "given", "search"])
def test_lists_have_a_length_that_is_known_beforehand(grouping: str) -> None:
    pattern = {name: value for name, value in FIELDS["pattern"].items() if name != "k"}
    with pytest.raises(SpecError, match=r"^pattern\.k: is omitted; lists that share loads have one length: 1 to 128$"):
        plan_for(find_spec({**FIELDS, "pattern": pattern, "query_grouping": grouping}))


def test_the_longest_lists_fit_shared_memory() -> None:
    plan_for(find_spec({**FIELDS, "pattern": {**FIELDS["pattern"], "k": 128}}))


@pytest.mark.parametrize(
    ("m", "k", "head_dim", "l2_lockstep", "slices"),
    [
        (192, 32, 128, False, 0),
        (192, 32, 128, True, 5),
        (192, 63, 128, False, 0),
        (192, 64, 128, False, 5),
        (128, 64, 128, False, None),  # two warpgroups have registers for all of Q
        (192, 64, 96, False, 5),  # of six
        (192, 64, 64, False, None),
    ],
)
def test_how_much_of_q_long_tiles_keep_in_registers(
    m: int, k: int, head_dim: int, l2_lockstep: bool, slices: int | None
) -> None:
    """Slices of Q that are in registers, None for all."""
    changes = {"tile": {"m": m, "n": 64}, "head_dim": head_dim, "l2_lockstep": l2_lockstep}
    named = find_spec(FIELDS | changes | {"pattern": FIELDS["pattern"] | {"k": k}})
    plan, source = plan_for(named), render(named)
    assert plan.flags.named()["q_in_registers"] is (slices is None)
    assert (f"kQSlices = {slices};" in source) is bool(slices)
    assert plan.registers.needed <= plan.registers.limit
