"""``share_kv``, run on the host: how the lists of a tile are matched, and which load has which place and barrier.

The kernel's own functions are compiled for the host. A warp's 32 lanes are 32 threads, which meet at each shuffle.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plans import plan_for
from codegen.render import render

FIELDS: dict[str, Any] = {
    "op": "attention",
    "arch": "sm_90a",
    "head_dim": 128,
    "pattern": {"kind": "topk", "k": 32, "block": {"q": 64, "kv": 64}},
    "tile": {"m": 128, "n": 64},
    "schedule": "cooperative",
    "share_kv": True,
}
KEY_BLOCKS = 100

PROGRAM = """\
#include <algorithm>
#include <barrier>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
using uint32 = unsigned int;
%(constants)s
struct Params {};
struct Piece {};
struct Tile {};
int __ldg(const int* word) { return *word; }
struct KeyBlocks {
  int entries;
  const int* list;
  int key_blocks;
%(entry)s
};
KeyBlocks streams[2];
KeyBlocks key_blocks_of(const Params&, const Piece&, const Tile&, int stream) { return streams[stream]; }
struct Index { int x; };
thread_local Index threadIdx;
std::barrier<> warp(32);
int words[32];
int __popc(uint32 bits) { return __builtin_popcount(bits); }
int __shfl_sync(unsigned, int value, int lane) {
  words[threadIdx.x] = value;
  warp.arrive_and_wait();
  const int result = words[lane];
  warp.arrive_and_wait();
  return result;
}
uint32 __ballot_sync(unsigned, bool value) {
  uint32 bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<uint32>(__shfl_sync(0, value, lane)) << lane;
  return bits;
}
%(functions)s
extern "C" int match(const int* first, const int* second, int entries_of_second, int key_blocks, int* lists) {
  streams[0] = {kTopK, first, key_blocks};
  streams[1] = {entries_of_second, second, key_blocks};
  int common[32];
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; ++lane) {
    lanes.emplace_back([&, lane] {
      threadIdx.x = lane;
      common[lane] = match_lists({}, {}, {}, lists);
    });
  }
  for (auto& lane : lanes) lane.join();
  return std::all_of(common, common + 32, [&](int count) { return count == common[0]; }) ? common[0] : -1;
}
extern "C" void produced(const int* lists, uint32 common_before, uint32 own_before, int common, int i, int* found) {
  const TileLoad load(lists, {common_before, own_before}, common, i);
  found[0] = load.place.stage, found[1] = load.place.parity, found[2] = load.full, found[3] = load.block;
}
extern "C" void consumed(uint32 common_before, uint32 own_before, int common, int i, int warpgroup, int* found) {
  const Load load = load_of({common_before, own_before}, common, i, warpgroup);
  found[0] = load.stage, found[1] = load.parity, found[2] = load.full, found[3] = load.arrivals;
}
"""


def between(text: str, begin: str, end: str) -> str:
    start = text.index(begin)
    return text[start : text.index(end, start)]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ctypes.CDLL]:
    """Compile the functions of a kernel whose lists have k entries."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")

    def compiled(k: int) -> ctypes.CDLL:
        named = find_spec({**FIELDS, "pattern": {**FIELDS["pattern"], "k": k}})
        source = render(named)
        parts = (
            ("template <int kDepth>\nstruct RingPosition", "// A piece of work"),
            ("// Writes down both lists of a tile", "// Producer, one warp"),
            ("// Loads of the tiles before one", "// Producer, one thread"),
            ("// A load of K, and of V", "// Fills a warpgroup's staging"),
        )
        program = PROGRAM % {
            "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan_for(named).constants),
            "entry": between(source, "  // Entry i of the list", "};"),
            "functions": "\n".join(between(source, *part) for part in parts),
        }
        folder = tmp_path_factory.mktemp(f"share_kv_{k}")
        (folder / "main.cpp").write_text(program, encoding="utf-8")
        command = ["g++", "-std=c++20", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-pthread", "-shared"]
        subprocess.run([*command, "-fPIC", "main.cpp", "-o", "main.so"], cwd=folder, check=True)
        return ctypes.CDLL(str(Path(folder) / "main.so"))

    return compiled


def pairs_of_lists(k: int) -> list[tuple[list[int], list[int]]]:
    """Lists of a tile: equal, apart, partly shared, with repeated entries and with some that name no block."""
    draw = random.Random(k)

    def different(count: int) -> list[int]:
        return draw.sample(range(10 * KEY_BLOCKS), count)

    def repeated(among: int) -> list[int]:
        return [draw.randrange(among) for _ in range(k)]

    apart = different(2 * k)
    shuffled = draw.sample(apart[:k], k)
    partly = draw.sample(apart[k // 4 : k // 4 + k], k)
    wild = [draw.choice((-1, -7, KEY_BLOCKS, KEY_BLOCKS + 3, 5)) for _ in range(k)]
    return [
        (apart[:k], apart[:k]),
        (apart[:k], shuffled),
        (apart[:k], apart[k:]),
        (apart[:k], partly),
        (repeated(5), repeated(5)),
        (repeated(KEY_BLOCKS), repeated(KEY_BLOCKS)),
        ([3] * k, [3] * (k // 2) + [4] * (k - k // 2)),
        (wild, repeated(9)),
        (repeated(9), draw.sample(wild, k)),
    ]


@pytest.mark.parametrize("k", [1, 5, 32, 40])
def test_every_entry_is_worked_on_as_often_as_it_is_listed(build: Callable[[int], ctypes.CDLL], k: int) -> None:
    library, numbers = build(k), ctypes.c_int * k
    for first, second in pairs_of_lists(k):
        for key_blocks in (KEY_BLOCKS, 10 * KEY_BLOCKS):
            found = (ctypes.c_int * (2 * k))(*[-9] * (2 * k))
            common = library.match(numbers(*first), numbers(*second), k, key_blocks, found)
            a, b = (Counter(e if 0 <= e < key_blocks else key_blocks for e in entries) for entries in (first, second))
            lists = list(found)
            assert common == (a & b).total()
            assert Counter(lists[:common]) == a & b
            assert Counter(lists[:k]) == a
            assert Counter(lists[:common] + lists[k + common :]) == b


def test_a_query_block_that_is_alone_keeps_its_list(build: Callable[[int], ctypes.CDLL]) -> None:
    k = 40
    library, found = build(k), (ctypes.c_int * 80)()
    entries = list(range(100, 60, -1))
    assert library.match((ctypes.c_int * k)(*entries), None, 0, 10 * KEY_BLOCKS, found) == k
    assert list(found)[:k] == entries


@pytest.mark.parametrize("k", [1, 5])
def test_producer_and_consumers_agree_on_every_load(build: Callable[[int], ctypes.CDLL], k: int) -> None:
    """Places and barriers of many tiles: each phase of a barrier is met in order, by all that it is for."""
    library, draw = build(k), random.Random(k)
    stages, streams = 4, 2
    found = (ctypes.c_int * 4)()
    common_before = own_before = 0
    places: Counter[int] = Counter()  # uses of each place
    barriers: Counter[int] = Counter()  # uses of each full barrier
    for _ in range(60):
        common = draw.choice((0, k, draw.randint(0, k)))
        lists = (ctypes.c_int * (2 * k))(*range(2 * k))
        loads: dict[tuple[int, int], tuple[int, int, int]] = {}  # warpgroup, entry -> place, barrier, parity
        for i in range(streams * k - common):
            library.produced(lists, common_before, own_before, common, i, found)
            place, parity, full, block = found
            assert (place, parity) == ((common_before + 2 * own_before + i) % stages, places[place] % 2)
            users = (0, 1) if full < stages else (full // stages - 1,)
            assert users == ((0, 1) if i < common else ((i - common) % 2,))
            for user in users:
                loads[user, block % k] = place, full, barriers[full] % 2
            places[place] += 1
            barriers[full] += 1
        for warpgroup in range(2):
            for i in range(k):
                library.consumed(common_before, own_before, common, i, warpgroup, found)
                place, parity, full, arrivals = found
                assert loads.pop((warpgroup, i)) == (place, full, parity)
                assert arrivals == (1 if i < common else 2)
        assert not loads
        common_before += common
        own_before += k - common


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("share_kv", {"arch": "sm_89", "schedule": "multistage"}),
        ("share_kv", {"pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 64}}}),
        ("share_kv", {"pattern": {"kind": "causal"}}),
        ("split_tail", {"split_tail": True}),
        ("schedule", {"schedule": "ping_pong"}),
        ("packed_heads", {"packed_heads": 2}),
        ("pattern.block.q", {"pattern": {"kind": "topk", "k": 32, "block": {"q": 128, "kv": 64}}}),
        ("pattern.block.q", {"pattern": {"kind": "topk", "k": 32, "block": {"q": 32, "kv": 64}}}),
        ("tile.m", {"tile": {"m": 192, "n": 64}}),
        ("tile.m", {"head_dim": 64, "tile": {"m": 256, "n": 64}}),
        ("tile.n", {"tile": {"m": 128, "n": 128}}),
        ("tile.n", {"pattern": {"kind": "topk", "k": 32, "block": {"q": 64, "kv": 128}}}),
        ("head_dim", {"head_dim": 192, "stages": 1}),
        ("pattern.k", {"pattern": {"kind": "topk", "k": 129, "block": {"q": 64, "kv": 64}}}),
        ("stages", {"stages": 3}),
    ],
)
def test_what_it_is_not_written_for_is_refused(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_for(find_spec({**FIELDS, **change}))
    assert caught.value.field == field


def test_it_is_off_by_default_and_then_no_part_of_the_hash() -> None:
    plain = {name: value for name, value in FIELDS.items() if name != "share_kv"}
    assert find_spec({**plain, "share_kv": False}).spec.hash == find_spec(plain).spec.hash
    assert "share_kv" not in find_spec(plain).spec.canonical_json()
    shared = find_spec(FIELDS).spec
    assert '"share_kv":true' in shared.canonical_json() and "split_tail" not in shared.canonical_json()


def test_the_longest_lists_fit_shared_memory() -> None:
    plan_for(find_spec({**FIELDS, "pattern": {**FIELDS["pattern"], "k": 128}}))
