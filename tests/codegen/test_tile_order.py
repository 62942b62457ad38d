"""Which tile comes when: the kernels' own formulas, run on the host, give every tile once.

Tiles that are handed out begin with the long rows; others begin each column tile with another row.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from codegen.library import find_spec
from codegen.render import render

BALANCED, STATIC = "h100_bsr_spmm_b128_balanced", "h100_bsr_spmm_b128"
PROGRAM = """\
#include <algorithm>
#define __device__
#define __forceinline__ inline
using std::min;
using uint32 = unsigned;
struct { int x; } gridDim;
struct Params { int block_rows, column_tiles, group_tiles; };
%s
extern "C" void place(const Params* p, int grid, int tile, int* rank, int* column) {
  gridDim.x = grid;
  const TilePlace found(*p, tile);
  *rank = found.rank;
  *column = found.column;
}
extern "C" int row_of_tile(const Params* p, int tile) { return row_of(*p, tile); }
"""


class Params(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("block_rows", "column_tiles", "group_tiles"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    folder = tmp_path_factory.mktemp("order")
    code = ""
    parts = ((BALANCED, "struct TilePlace", "};"), (STATIC, "__device__ __forceinline__ int row_of", "\n}"))
    for name, what, end in parts:
        source = render(find_spec(name))
        begin = source.index(what)
        code += source[begin : source.index(end, begin) + 2] + "\n"
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
    params, rank, column = Params(rows, columns, group), ctypes.c_int(), ctypes.c_int()
    tiles = []
    for tile in range(rows * columns):
        program.place(ctypes.byref(params), grid, tile, ctypes.byref(rank), ctypes.byref(column))
        tiles.append((rank.value, column.value))
    assert sorted(tiles) == [(i, j) for i in range(rows) for j in range(columns)]
    many = min(rows, -(-grid // columns))  # long rows
    assert tiles == sorted(tiles, key=lambda tile: (tile[0] >= many, tile[1] // group, *tile))


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
