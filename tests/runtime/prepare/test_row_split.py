"""Block rows that are cut: limits, the table of chunks, and the kernel's own order of units, run on the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from codegen.library import NamedSpec, find_spec  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from codegen.plans.bsr.row_chunks import blocks_of_step, row_cutting  # noqa: E402
from codegen.preparation import RowCut  # noqa: E402
from codegen.render import render  # noqa: E402
from codegen.spec import BsrSpmmSpec  # noqa: E402
from runtime.prepare.row_split import split_rows  # noqa: E402
from runtime.verify.bsr_spmm import CUT_CASES, cases_of, row_counts  # noqa: E402
from runtime.verify.common import generator  # noqa: E402

NAME = "h100_bsr_spmm_b16_balanced"
PROGRAM = """\
#include <algorithm>
#define __device__
#define __forceinline__ inline
using std::min;
struct int4 { int x, y, z, w; };
struct { int x; } threadIdx;
struct Params { const int4* chunks; const int* chunk_count; int column_tiles, group_tiles;
                const int* col_indices; int index_words; };
template <class T> T __ldg(const T* from) { return *from; }
int load_index(const int* indices, int words, int i) { return indices[i * words]; }
%s
extern "C" void place(const Params* p, int unit, int* found) {
  const Unit at(*p, unit);
  for (int value : {at.column, at.row, at.first, at.end, at.chunk, at.first_chunk}) *found++ = value;
}
"""
LENGTHS = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 700)), min_size=1, max_size=40)


def named_of(rows: int = 16, cols: int = 16, n: int = 512, step: int = 1) -> NamedSpec:
    fields: dict[str, Any] = {"op": "bsr_spmm", "arch": "sm_90a", "scheduler": "dynamic", "stages": 2}
    return find_spec(fields | {"block": {"rows": rows, "cols": cols}, "tile": {"m": rows, "n": n, "k": step * cols}})


def spec_of(rows: int = 16, cols: int = 16, n: int = 512, step: int = 1) -> BsrSpmmSpec:
    spec = named_of(rows, cols, n, step).spec
    assert isinstance(spec, BsrSpmmSpec)
    return spec


def table_of(lengths: list[int], limit: int, step: int) -> list[list[int]]:
    """Return the chunks of block rows of these lengths, as a kernel reads them."""
    crow = torch.tensor([0, *lengths]).cumsum(0)
    blocks = sum(lengths)
    found = split_rows(crow, RowCut.at(limit, len(lengths), blocks), step)
    assert found.limit == limit
    assert found.chunks.dtype == found.total.dtype == torch.int32
    assert found.chunks.shape == (len(lengths) + blocks // limit, 4) and found.total.shape == (1,)
    assert int(found.total) <= found.chunks.shape[0]
    return found.chunks[: int(found.total)].tolist()


class Params(ctypes.Structure):
    _fields_ = (
        ("chunks", ctypes.c_void_p),
        ("chunk_count", ctypes.POINTER(ctypes.c_int)),
        *((name, ctypes.c_int) for name in ("column_tiles", "group_tiles")),
        ("col_indices", ctypes.c_void_p),
        ("index_words", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> ctypes._NamedFuncPointer:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    folder = tmp_path_factory.mktemp("units")
    source = render(find_spec(NAME))
    begin = source.index("struct Unit {")
    code = source[begin : source.index("};", begin) + 2]
    (folder / "main.cpp").write_text(PROGRAM % code, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "main.cpp", "-o", "main.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(Path(folder) / "main.so")).place


@pytest.mark.parametrize(
    ("rows", "cols", "step", "limit"),
    [(16, 16, 1, 120), (32, 32, 1, 120), (32, 32, 4, 120), (32, 16, 1, 240), (16, 32, 2, 60), (16, 16, 4, 120)],
)
@pytest.mark.parametrize("n", [128, 512])
def test_a_part_costs_a_thirtieth_of_what_its_chunk_reads(rows: int, cols: int, step: int, limit: int, n: int) -> None:
    spec = spec_of(rows, cols, n, step)
    assert blocks_of_step(spec) == step and limit % step == 0
    assert row_cutting(spec).cut(8192 // rows, 4096).limit == row_cutting(spec).cut(1, 1).limit == limit
    written_and_read, of_b = 2 * rows * n * 4, limit * cols * n * 2
    assert 30 * written_and_read == of_b


@pytest.mark.parametrize("size", [16, 32])
def test_shipped_kernels_cut_where_a_part_is_cheap(size: int) -> None:
    spec = find_spec(f"h100_bsr_spmm_b{size}_balanced").spec
    assert isinstance(spec, BsrSpmmSpec)
    cut = row_cutting(spec).cut(8192 // size, 16 * 8192 // size)
    assert cut.limit == 120
    assert row_cutting(spec).workspace(cut, 16)[1] < 8192 * 8192 * 2  # bytes of C
    # Where every row is long, none is cut but by a limit that it passes by far.
    assert row_cutting(spec).cut(8192 // size, 128 * 8192 // size).limit >= 4 * 128


@pytest.mark.parametrize(
    ("block_rows", "mean", "column_tiles", "limit"),
    [
        (8, 64, 1, 13),  # 8 tiles: five chunks a row, more would take longer to join than they save
        (16, 64, 2, 16),  # 32 tiles: four chunks a row, one for each SM
        (64, 64, 1, 32),
        (66, 64, 1, 32),
        (67, 64, 1, 120),  # more tiles than half the SMs
        (8, 16, 1, 120),  # short rows are as soon done as joined
        (8, 32, 1, 8),
        (8, 4000, 1, 250),  # two chunks for each SM
        (3, 0, 1, 120),
    ],
)
def test_rows_with_few_tiles_are_cut(block_rows: int, mean: int, column_tiles: int, limit: int) -> None:
    spec = spec_of(32, 32)
    cut = row_cutting(spec).cut(block_rows, block_rows * mean, column_tiles, 132)
    assert cut.limit == limit


@given(lengths=LENGTHS, step=st.sampled_from([1, 2, 4]), column_tiles=st.integers(1, 40))
def test_parts_of_few_tiles_are_few(lengths: list[int], step: int, column_tiles: int) -> None:
    spec, blocks = spec_of(32, 32, step=step), sum(lengths)
    plain, cut = (
        row_cutting(spec).cut(len(lengths), blocks),
        row_cutting(spec).cut(len(lengths), blocks, column_tiles, 132),
    )
    assert cut.limit <= plain.limit and cut.limit % step == 0 and cut.limit > 0
    tile_bytes = 32 * 512 * 4
    if cut != plain:
        assert row_cutting(spec).workspace(cut, column_tiles)[1] <= max(2 * 132, 128 * column_tiles) * tile_bytes
    counts = [max(1, -(-length // cut.limit)) for length in lengths]
    assert sum(counts) <= cut.chunks and sum(count for count in counts if count > 1) <= cut.parts


@given(lengths=LENGTHS, step=st.sampled_from([1, 2, 4]), rows=st.sampled_from([16, 32]))
@example(lengths=[121] * 40, step=1, rows=16)
@example(lengths=[700] * 300, step=4, rows=32)
@example(lengths=[120, 0, 0], step=1, rows=32)
def test_limits_hold_for_every_matrix(lengths: list[int], step: int, rows: int) -> None:
    spec = spec_of(rows, 32, step=step)
    blocks = sum(lengths)
    cut = row_cutting(spec).cut(len(lengths), blocks)
    assert cut.limit % step == 0 and cut.limit >= 120 * rows // 32
    counts = [max(1, -(-length // cut.limit)) for length in lengths]
    assert sum(counts) <= cut.chunks
    assert sum(count for count in counts if count > 1) <= cut.parts
    counters, part_bytes = row_cutting(spec).workspace(cut, 3)
    assert counters == 2 * 3 * cut.parts and part_bytes == cut.parts * 3 * rows * 512 * 4
    of_c = len(lengths) * rows * 3 * 512 * 2
    assert part_bytes <= max(of_c, 128 * rows * 3 * 512 * 4)
    assert (cut.parts == 0) == (blocks <= cut.limit)


@given(lengths=LENGTHS, limit=st.sampled_from([4, 12, 80]), step=st.sampled_from([1, 2, 4]))
@example(lengths=[0, 80, 1, 81, 160, 161, 0], limit=80, step=1)
@example(lengths=[79, 80, 81, 159, 160, 161, 239, 240, 241], limit=80, step=4)
@example(lengths=[0], limit=80, step=1)
@example(lengths=[0, 5, 0], limit=4, step=4)
def test_chunks_are_the_rows_in_order_of_length(lengths: list[int], limit: int, step: int) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    table = table_of(lengths, limit, step)
    rows = [(row, list(chunks)) for row, chunks in groupby(table, key=lambda chunk: chunk[0])]
    assert [row for row, _ in rows] == sorted(range(len(lengths)), key=lambda row: -lengths[row])
    number = 0
    for row, chunks in rows:
        assert len(chunks) == max(1, -(-lengths[row] // limit))
        bounds = [chunks[0][1], *(end for _, _, end, _ in chunks)]
        assert bounds == [first for _, first, _, _ in chunks] + bounds[-1:]
        assert bounds[0] == starts[row] and bounds[-1] == starts[row] + lengths[row]
        assert all((bound - starts[row]) % step == 0 for bound in bounds[:-1])
        sizes = [end - first for _, first, end, _ in chunks]
        assert max(sizes) <= limit and (len(chunks) == 1 or min(sizes) > 0)
        steps = [-(-size // step) for size in sizes]
        assert max(steps) - min(steps) <= 1
        assert {joined for *_, joined in chunks} == {number if len(chunks) > 1 else -1}
        number += len(chunks)


@given(lengths=LENGTHS, columns=st.integers(1, 20), group=st.integers(1, 25))
@example(lengths=[512, 3, 0, 300, 81, 80], columns=16, group=3)
@example(lengths=[0], columns=1, group=1)
def test_every_unit_comes_once_columns_outermost(
    place: ctypes._NamedFuncPointer, lengths: list[int], columns: int, group: int
) -> None:
    table = table_of(lengths, 80, 1)
    flat = (ctypes.c_int * (4 * len(table)))(*(value for chunk in table for value in chunk))
    total = ctypes.c_int(len(table))
    params = Params(ctypes.addressof(flat), ctypes.pointer(total), columns, min(group, columns), None, 1)

    def unit(number: int) -> list[int]:
        found = (ctypes.c_int * 6)()
        place(ctypes.byref(params), number, found)
        return list(found)

    units = [unit(number) for number in range(len(table) * columns)]
    for column, *what, chunk, first_chunk in units:
        assert [*what, first_chunk] == table[chunk]
        assert 0 <= column < columns
    order = [(column // min(group, columns), chunk, column) for column, _, _, _, chunk, _ in units]
    assert order == sorted(order) and len(set(order)) == len(table) * columns
    assert unit(len(units))[0] == unit(len(units) + 131)[0] == -1


@pytest.mark.parametrize(("rows", "cols", "step"), [(16, 16, 1), (32, 32, 1), (32, 16, 1), (16, 32, 4)])
@pytest.mark.parametrize("case", CUT_CASES, ids=lambda case: case.name)
def test_rows_are_cut_when_a_kernel_is_verified(case: Any, rows: int, cols: int, step: int) -> None:
    plan, cpu = plan_for(named_of(rows, cols, n=256, step=step)), torch.device("cpu")
    lengths = row_counts(plan, case, generator(case.name, cpu), cpu).tolist()
    assert len(lengths) == case.block_rows and max(lengths) <= case.block_columns and case in cases_of(plan)
    assert plan.row_cutting is not None
    limit = plan.row_cutting.cut(case.block_rows, sum(lengths)).limit
    assert sum(length > limit for length in lengths) >= 3
    if case.row_counts == "limit":
        assert {limit, limit + 1, 2 * limit, 2 * limit + 1} <= set(lengths)


def test_other_kernels_are_not_given_rows_to_cut() -> None:
    plan = plan_for(find_spec("h100_bsr_spmm_b128_balanced"))
    assert plan.row_cutting is None and not set(CUT_CASES) & set(cases_of(plan))
