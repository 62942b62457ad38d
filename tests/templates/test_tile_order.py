"""Which tile comes when: the kernels' own formulas, run on the host, give every tile once.

A dynamic scheduler begins with the long rows. A static one begins each column tile, or group of these, with another
row; gathered rows come group by group.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from codegen.library import find_spec
from codegen.plans.bsr.balance import group_tiles
from codegen.plans.bsr.spmm_launch import group_rows
from codegen.render import render
from codegen.spec import BsrSpmmSpec

DYNAMIC, STATIC, COLUMNS = "h100_bsr_spmm_b128_balanced", "h100_bsr_spmm_b32", "h100_bsr_spmm_b128"
ROWS = "l4_bsr_spmm_b128"
PROGRAM = """\
#include <algorithm>
#define __device__
#define __forceinline__ inline
using std::min;
using uint32 = unsigned;
struct { int x; } gridDim;
inline int __ldg(const int* from) { return *from; }
struct Params { int block_rows, column_tiles, group_tiles, group_rows; const int* row_order; };
%s
extern "C" void place(const Params* p, int grid, int tile, int* rank, int* column) {
  gridDim.x = grid;
  const by_length::TilePlace found(*p, tile);
  *rank = found.row;
  *column = found.column;
}
extern "C" int row_of_tile(const Params* p, int tile) { return by_rows::TilePlace(*p, tile).row; }
extern "C" void place_in_columns(const Params* p, int tile, int* row, int* column) {
  const columns::TilePlace found(*p, tile);
  *row = found.row;
  *column = found.column;
}
extern "C" void place_in_rows(const Params* p, int tile, int* row, int* column) {
  const rows::TilePlace found(*p, tile);
  *row = found.row;
  *column = found.column;
}
"""


class Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("block_rows", "column_tiles", "group_tiles", "group_rows")),
        ("row_order", ctypes.POINTER(ctypes.c_int)),
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    folder = tmp_path_factory.mktemp("order")
    code = ""
    parts = (
        (DYNAMIC, "struct TilePlace", "};", "namespace by_length { %s }"),
        (STATIC, "struct TilePlace", "};", "namespace by_rows { %s }"),
        (COLUMNS, "struct TilePlace", "};", "namespace columns { %s }"),
        (ROWS, "struct TilePlace", "};", "namespace rows { %s }"),
    )
    for name, what, end, place in parts:
        source = render(find_spec(name))
        begin = source.index(what)
        code += place % source[begin : source.index(end, begin) + 2] + "\n"
    (folder / "main.cpp").write_text(PROGRAM % code, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "main.cpp", "-o", "main.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(Path(folder) / "main.so"))


@given(rows=st.integers(1, 70), columns=st.integers(1, 40), group=st.integers(1, 50), grid=st.integers(1, 300))
@example(rows=64, columns=32, group=5, grid=132)
@example(rows=1, columns=1, group=1, grid=1)
def test_every_tile_comes_once_and_long_rows_first(
    program: ctypes.CDLL, rows: int, columns: int, group: int, grid: int
) -> None:
    order = (ctypes.c_int * rows)(*range(rows))  # rows are as long as their numbers say: the rank is the row
    params, rank, column = Params(rows, columns, group, 1, order), ctypes.c_int(), ctypes.c_int()
    tiles = []
    for tile in range(rows * columns):
        program.place(ctypes.byref(params), grid, tile, ctypes.byref(rank), ctypes.byref(column))
        tiles.append((rank.value, column.value))
    assert sorted(tiles) == [(i, j) for i in range(rows) for j in range(columns)]
    many = min(rows, -(-grid // columns))  # long rows
    assert tiles == sorted(tiles, key=lambda tile: (tile[0] >= many, tile[1] // group, *tile))


def places(place: Any, params: Params, tiles: Iterable[int]) -> list[tuple[int, int]]:
    """Return the block rows and column tiles of tiles."""
    row, column, found = ctypes.c_int(), ctypes.c_int(), []
    for tile in tiles:
        place(ctypes.byref(params), tile, ctypes.byref(row), ctypes.byref(column))
        found.append((row.value, column.value))
    return found


@given(rows=st.integers(1, 70), columns=st.integers(1, 40), group=st.integers(1, 80))
@example(rows=64, columns=64, group=32)
def test_tiles_come_group_by_group_of_rows(program: ctypes.CDLL, rows: int, columns: int, group: int) -> None:
    tiles = places(program.place_in_rows, Params(rows, columns, 1, group), range(rows * columns))
    every = [(i, j) for i in range(rows) for j in range(columns)]
    assert tiles == sorted(every, key=lambda tile: (tile[0] // group, tile[1], tile[0]))


@given(rows=st.integers(1, 70), columns=st.integers(1, 40), group=st.integers(1, 50))
@example(rows=64, columns=32, group=4)
@example(rows=64, columns=32, group=1)
def test_tiles_come_group_by_group_of_columns(program: ctypes.CDLL, rows: int, columns: int, group: int) -> None:
    tiles = places(program.place_in_columns, Params(rows, columns, min(group, columns)), range(rows * columns))
    assert sorted(tiles) == [(i, j) for i in range(rows) for j in range(columns)]
    assert [tile[1] // group for tile in tiles] == sorted(tile[1] // group for tile in tiles)
    for begin in range(0, columns, group):  # in a group: one row after the other, from some row on, its columns rising
        width = min(group, columns - begin)
        part = tiles[begin * rows : (begin + width) * rows]
        first = part[0][0]
        assert part == [((first + i) % rows, begin + j) for i in range(rows) for j in range(width)]


@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("grid", [64, 128])
def test_a_thread_block_has_other_rows_in_each_group(program: ctypes.CDLL, rows: int, group: int, grid: int) -> None:
    tiles = range(5, 64 * rows, grid)
    found = places(program.place_in_columns, Params(rows, 64, group), tiles)
    assert len({row for row, _ in found}) >= min(rows, len(tiles)) // 4


def test_places_of_many_tiles_do_not_overflow(program: ctypes.CDLL) -> None:
    for rows, columns in ((1, 2**31 - 1), (1 << 20, 2047), (3, 700_000_000)):
        last = rows * columns - 1
        ((row, column),) = places(program.place_in_columns, Params(rows, columns, 4), [last])
        assert (row, column) == ((rows - 1 + (columns - 1) // 4 * (rows * 5 // 8 | 1)) % rows, columns - 1)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("b128", 4),
        ("b64x128", 1),
        ("b128_balanced", 8),
        ("b64", 1),
        ("b64_balanced", 2),
        ("b32_balanced", 2),
        ("b16_balanced", 2),
    ],
)
def test_column_tiles_at_once(name: str, wanted: int) -> None:
    spec = find_spec(f"h100_bsr_spmm_{name}").spec
    assert isinstance(spec, BsrSpmmSpec)
    assert group_tiles(spec, 8192) == wanted and group_tiles(spec, 1 << 20) == 1


@pytest.mark.parametrize(
    ("block", "rows", "blocks", "wanted"),
    [
        (128, 64, 1024, 32),
        (128, 64, 512, 64),
        (128, 64, 513, 32),
        (128, 65, 1024, 33),
        (128, 2, 1 << 20, 1),
        (64, 128, 2048, 128),
        (16, 5, 0, 5),
    ],
)
def test_groups_have_their_blocks_in_the_l2(block: int, rows: int, blocks: int, wanted: int) -> None:
    spec = find_spec(f"l4_bsr_spmm_b{block}").spec
    assert isinstance(spec, BsrSpmmSpec)
    assert group_rows(spec, rows, blocks) == wanted


@given(rows=st.integers(1, 300), columns=st.integers(1, 40))
@example(rows=64, columns=32)
def test_every_column_tile_has_every_row_once(program: ctypes.CDLL, rows: int, columns: int) -> None:
    params = Params(rows, columns, 1)
    for column in range(columns):
        found = [program.row_of_tile(ctypes.byref(params), column * rows + i) for i in range(rows)]
        assert sorted(found) == list(range(rows))


@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize("grid", [64, 128])
def test_a_thread_block_has_many_rows(program: ctypes.CDLL, rows: int, grid: int) -> None:
    params = Params(rows, 64, 1)
    tiles = range(5, 64 * rows, grid)
    assert len({program.row_of_tile(ctypes.byref(params), tile) for tile in tiles}) >= min(rows, len(tiles)) // 4


def test_numbers_of_tiles_do_not_overflow(program: ctypes.CDLL) -> None:
    for rows in (1, 2, 3, 1 << 20):
        params, tile = Params(rows, 1, 1), 2**31 - 2
        turned = tile + tile // rows * (rows * 5 // 8 | 1)
        assert program.row_of_tile(ctypes.byref(params), tile) == turned % rows and turned < 2**32
