"""Tiles of attention kernels: the kernel's own formula, run on the host, gives every query of every head once."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from codegen.library import find_spec
from codegen.plans.attention.order import heads_in_l2
from codegen.render import render

NAMES = (
    "h100_causal",
    "h100_causal_d64_short",
    "h100_causal_few_tiles",
    "h100_block_lists",
    "h100_topk32",
    "l4_causal",
)
PROGRAM = """\
#include <algorithm>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
using uint32 = unsigned;
struct Params { int tiles, query_tiles, heads, heads_in_l2, q_len; };
%s
extern "C" void place(const Params* p, int index, int* found) {
  const Tile tile(*p, index);
  found[0] = tile.batch, found[1] = tile.head, found[2] = tile.first_query;
}
"""
WARPGROUP_ROWS = 64


class Params(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("tiles", "query_tiles", "heads", "heads_in_l2", "q_len"))


@pytest.fixture(scope="module", params=NAMES)
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ctypes.CDLL]:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    folder = tmp_path_factory.mktemp("tiles")
    source = render(find_spec(request.param))
    begin = source.index("struct Tile {")
    code = "\n".join(re.findall(r"^constexpr int k\w+ = -?\d+;", source, re.MULTILINE))
    code += "\n" + source[begin : source.index("\n};", begin) + 3]
    (folder / "main.cpp").write_text(PROGRAM % code, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "main.cpp", "-o", "main.so"]
    subprocess.run(command, cwd=folder, check=True)
    return request.param, ctypes.CDLL(str(folder / "main.so"))


@settings(deadline=None)
@given(
    queries=st.integers(1, 1500), keys=st.integers(1, 40000), batch=st.integers(1, 3), kv_heads=st.integers(1, 4),
    group=st.integers(1, 3),
)  # fmt: skip
@example(queries=1, keys=1, batch=1, kv_heads=1, group=1)
@example(queries=16384, keys=16384, batch=1, kv_heads=2, group=1)
@example(queries=257, keys=40000, batch=2, kv_heads=3, group=2)
def test_every_query_is_in_one_tile(
    kernel: tuple[str, ctypes.CDLL], queries: int, keys: int, batch: int, kv_heads: int, group: int
) -> None:
    name, library = kernel
    spec, heads = find_spec(name).spec, kv_heads * group
    assert spec.op == "attention"
    rows, causal = spec.tile.m, name.startswith("h100_causal")
    tiles = -(-queries // rows)
    in_l2 = heads_in_l2(spec, keys, group, batch * heads)
    assert 1 <= in_l2 <= batch * heads
    params = Params(batch * heads * tiles, tiles, heads, in_l2, queries)
    found = (ctypes.c_int * 3)()
    firsts: dict[tuple[int, int], list[int]] = {}
    for index in range(params.tiles):
        library.place(ctypes.byref(params), index, found)
        firsts.setdefault((found[0], found[1]), []).append(found[2])
    assert set(firsts) == {(i, j) for i in range(batch) for j in range(heads)}
    # Rows behind the last query are cut off by a store. None may begin before query 0: those warpgroups store nothing.
    unused = (tiles * rows - queries) // WARPGROUP_ROWS * WARPGROUP_ROWS if causal else 0
    for first in firsts.values():
        assert sorted(first) == [tile * rows - unused for tile in range(tiles)]
        if causal:
            assert first == sorted(first, reverse=True)  # longest first
    assert tiles * rows - unused >= queries
    assert unused < rows
