"""Tiles that are handed out: the kernel's own formula, run on the host, gives every tile once, long rows first."""

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

NAME = "h100_bsr_spmm_b128_balanced"
PROGRAM = """\
#include <algorithm>
#define __device__
#define __forceinline__ inline
using std::min;
struct { int x; } gridDim;
struct Params { int block_rows, column_tiles, group_tiles; };
%s
extern "C" void place(const Params* p, int grid, int tile, int* rank, int* column) {
  gridDim.x = grid;
  const TilePlace found(*p, tile);
  *rank = found.rank;
  *column = found.column;
}
"""


class Params(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("block_rows", "column_tiles", "group_tiles"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> ctypes._NamedFuncPointer:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    folder = tmp_path_factory.mktemp("order")
    source = render(find_spec(NAME))
    begin = source.index("struct TilePlace")
    code = source[begin : source.index("};", begin) + 2]
    (folder / "main.cpp").write_text(PROGRAM % code, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "main.cpp", "-o", "main.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(Path(folder) / "main.so")).place


@given(rows=st.integers(1, 70), columns=st.integers(1, 40), group=st.integers(1, 50), grid=st.integers(1, 300))
@example(rows=64, columns=32, group=5, grid=132)
@example(rows=1, columns=1, group=1, grid=1)
def test_every_tile_comes_once_and_long_rows_first(
    place: ctypes._NamedFuncPointer, rows: int, columns: int, group: int, grid: int
) -> None:
    params, rank, column = Params(rows, columns, group), ctypes.c_int(), ctypes.c_int()
    tiles = []
    for tile in range(rows * columns):
        place(ctypes.byref(params), grid, tile, ctypes.byref(rank), ctypes.byref(column))
        tiles.append((rank.value, column.value))
    assert sorted(tiles) == [(i, j) for i in range(rows) for j in range(columns)]
    many = min(rows, -(-grid // columns))  # long rows
    assert tiles == sorted(tiles, key=lambda tile: (tile[0] >= many, tile[1] // group, *tile))
