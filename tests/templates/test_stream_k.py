"""Divided tiles: the kernel's own integer formulas, run on the host, hold every share of every tile exactly once."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.render import render
from codegen.stream_k import INDEX_RANGE, SPLIT_COST, StreamK

NAME = "h100_topk32_d64_b64"
PROGRAM = """\
#include <algorithm>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
using int64 = long long;
using uint32 = unsigned;
struct float4 { float x, y, z, w; };
struct { int x; } blockIdx, gridDim, threadIdx;
struct Params { float* partials; int tiles, stream_k_tiles, stream_k_ctas, units; };
constexpr int kWarpgroupThreads = 128;
%(constants)s
%(work_tiles)s
%(partial_place)s
extern "C" {
// Writes index, begin and end of the work tiles of a thread block; returns how many there are.
int work_tiles_of(const Params* p, int grid, int block, int (*work_tiles)[3], int room) {
  gridDim.x = grid;
  blockIdx.x = block;
  int count = 0;
  for (WorkTile work = first_work_tile(*p); work.index < p->tiles && count < room; work = next_work_tile(*p, work)) {
    work_tiles[count][0] = work.index;
    work_tiles[count][1] = work.begin;
    work_tiles[count][2] = work.end;
    ++count;
  }
  return count;
}
int holder(const Params* p, int unit) { return owner_of(*p, unit); }
int64 place_of(const Params* p, int block, int tile, int warpgroup) {
  threadIdx.x = 0;
  return reinterpret_cast<char*>(partial_place(*p, block, tile, warpgroup)) - reinterpret_cast<char*>(p->partials);
}
}
"""


class Params(ctypes.Structure):
    _fields_ = (
        ("partials", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("tiles", "stream_k_tiles", "stream_k_ctas", "units")),
    )


@dataclass(frozen=True)
class WorkTile:
    tile: int
    begin: int
    end: int  # 0: all of it


class Host:
    """The functions of a generated source that schedule work tiles."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.place_of.restype = ctypes.c_longlong

    def work_tiles(self, params: Params, grid: int, block: int) -> list[WorkTile]:
        room = params.tiles + 3
        found = (ctypes.c_int * 3 * room)()
        count = self.library.work_tiles_of(ctypes.byref(params), grid, block, found, room)
        assert count < room
        return [WorkTile(*found[i]) for i in range(count)]

    def holder(self, params: Params, unit: int) -> int:
        return int(self.library.holder(ctypes.byref(params), unit))

    def place(self, params: Params, block: int, tile: int, warpgroup: int) -> int:
        return int(self.library.place_of(ctypes.byref(params), block, tile, warpgroup))


def between(text: str, begin: str, end: str) -> str:
    start = text.index(begin)
    return text[start : text.index(end, start)]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    folder = tmp_path_factory.mktemp("split")
    source = render(find_spec(NAME))
    program = PROGRAM % {
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan().constants),
        "work_tiles": between(source, "struct WorkTile {", "__device__ __forceinline__ KvBlockIterator kv_blocks_of("),
        "partial_place": between(source, "__device__ __forceinline__ float4* partial_place(", "// Stores a partial"),
    }
    (folder / "main.cpp").write_text(program, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "main.cpp", "-o", "main.so"]
    subprocess.run(command, cwd=folder, check=True)
    return Host(ctypes.CDLL(str(Path(folder) / "main.so")))


@cache
def plan() -> Plan:
    return plan_for(find_spec(NAME))


def split() -> StreamK:
    found = plan().stream_k
    assert found is not None
    return found


sizes = {"tiles": st.integers(1, 400), "units": st.integers(1, 300), "slots": st.integers(1, 150)}


@given(**sizes)
@example(tiles=131, units=128, slots=132)
@example(tiles=1, units=4096, slots=132)
def test_tiles_are_divided_only_where_that_pays(tiles: int, units: int, slots: int) -> None:
    stream_k_tiles, stream_k_ctas = split().divide(tiles, units, slots)
    if stream_k_ctas == 0:
        assert stream_k_tiles == 0
        return
    # What fills whole rounds is left alone, and what is left over is done sooner than one tile would be.
    assert stream_k_tiles == tiles % slots <= stream_k_ctas <= slots
    assert -(-stream_k_tiles * units // stream_k_ctas) + SPLIT_COST < units
    assert stream_k_tiles * units // stream_k_ctas >= 2


@given(**sizes)
@example(tiles=131, units=128, slots=132)
@example(tiles=133, units=64, slots=132)
@example(tiles=1, units=4096, slots=132)
def test_every_unit_is_held_once(host: Host, tiles: int, units: int, slots: int) -> None:
    stream_k_tiles, stream_k_ctas = split().divide(tiles, units, slots)
    params = Params(None, tiles, stream_k_tiles, stream_k_ctas, units)
    grid = min(slots, max(tiles, stream_k_ctas))
    whole: list[int] = []
    places: list[int] = []
    end = 0  # of the units that thread blocks so far hold, tile after tile
    for block in range(grid):
        work_tiles = host.work_tiles(params, grid, block)
        parts = [work for work in work_tiles if work.end > 0]
        assert work_tiles[: len(parts)] == parts, "parts come first"
        assert len(parts) <= 2
        assert bool(parts) == (block < stream_k_ctas)
        whole += [work.tile for work in work_tiles[len(parts) :]]
        for work in parts:
            assert 0 <= work.begin < work.end <= units
            first, end = end, work.tile * units + work.end
            assert first == work.tile * units + work.begin
            assert {host.holder(params, unit) for unit in (first, (first + end) // 2, end - 1)} == {block}
            places += [host.place(params, block, work.tile, i) for i in range(split().counters)]
    assert end == stream_k_tiles * units
    assert sorted(whole) == list(range(stream_k_tiles, tiles))
    part = split().partial_bytes // split().counters
    assert len(places) == len(set(places))
    assert all(
        place % part == 0 and place + part <= split().workspace(stream_k_tiles, stream_k_ctas)[1] for place in places
    )


LONGEST = (INDEX_RANGE - 1) // (100 * 132)


def test_tiles_too_long_for_the_indices_stay_whole() -> None:
    """2^31 keys in steps of 128 have 2^24 units: times 100 tiles and 132 thread blocks, more than 32 bits hold."""
    assert split().divide(100, LONGEST, 132) == (100, 132)
    assert split().divide(100, LONGEST + 1, 132) == (0, 0)
    assert split().divide(100, 2**24, 132) == (0, 0)


@pytest.mark.parametrize("units", [2**10, LONGEST])
def test_holders_of_very_long_tiles(host: Host, units: int) -> None:
    stream_k_tiles, stream_k_ctas = split().divide(100, units, 132)
    assert (stream_k_tiles, stream_k_ctas) == (100, 132)
    params = Params(None, 100, stream_k_tiles, stream_k_ctas, units)
    end = 0
    for block in range(stream_k_ctas):
        for work in host.work_tiles(params, stream_k_ctas, block):
            assert work.tile * units + work.begin == end
            end = work.tile * units + work.end
            assert host.holder(params, end - 1) == block == host.holder(params, work.tile * units + work.begin)
    assert end == 100 * units


def test_a_part_has_room_for_o_and_the_softmax_state() -> None:
    values = {constant.name: constant.value for constant in plan().constants}
    threads, columns = 128, int(values["kHeadDim"])
    floats = 64 * columns + 4 * threads  # O of 64 rows; two maxima and two sums of each thread
    assert values["kPartialFloats"] == floats
    assert split().partial_bytes == 4 * floats * split().counters
    assert split().workspace(3, 5) == (3 * split().counters, 2 * 5 * split().partial_bytes)
    assert split().workspace(0, 0) == (0, 0)
