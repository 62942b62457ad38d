"""The loads of listed blocks, run on the host: each entry of a row's lists gives its block's loads, in order.

A load is a listed block or an equal part of one; two loads are a step where a step is a pair of blocks. As in
test_key_blocks, a host program is made of the pattern's part of the source. A warp's 32 lanes are 32 copies of
KvBlockIterator that call `at` one after the other, twice: the first round leaves what each shuffles, the second reads
it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from batch_values import seqlen_info

from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.render import render_template

KV_LEN, ROWS, LENGTH = 1000, 5, 71
MASKS = 60  # entries that have bits, where bits are the mask: fewer than the first lists have
BITS = {"kind": "block_lists", "mask": "bits"}
PATTERNS: list[dict[str, Any]] = [
    {"kind": "topk", "k": LENGTH},
    {"kind": "topk"},  # as many entries as the caller's lists have
    {"kind": "topk", "k": 32},  # one entry a lane, and none behind them
    {"kind": "block_lists", "mask": "causal"},
]
# Architecture, queries and keys of a block, rows and keys of a tile, pack_gqa
SHAPES = [
    ("sm_90a", 128, 128, 128, 128, 1),
    ("sm_90a", 128, 128, 128, 64, 1),
    ("sm_90a", 64, 128, 128, 64, 1),
    ("sm_90a", 64, 64, 128, 64, 8),
    ("sm_90a", 1, 128, 128, 64, 16),
    ("sm_90a", 16, 64, 128, 64, 1),
    ("sm_90a", 128, 64, 128, 128, 1),  # pairs
    ("sm_90a", 1, 64, 128, 128, 16),
    ("sm_90a", 64, 64, 192, 64, 1),
    ("sm_90a", 64, 128, 192, 64, 1),
    ("sm_90a", 128, 64, 128, 64, 1),
    ("sm_89", 16, 128, 16, 32, 1),
    ("sm_89", 32, 64, 32, 64, 1),
    ("sm_89", 128, 128, 64, 64, 1),
    ("sm_89", 64, 16, 64, 64, 1),
    ("sm_89", 64, 32, 16, 96, 1),
    ("sm_89", 64, 64, 128, 32, 8),
    ("sm_89", 1, 64, 16, 64, 16),
]
WIDTHS = (1, 2, 5, 40)  # work units of a part

HEAD = """\
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
using uint32 = unsigned int;
using int64 = long long;
struct { int x; } threadIdx;
struct Params {
  const int* kv_indices; const int* full_kv_indices; const int* kv_num_blocks; const int* full_kv_num_blocks;
  int64 kv_indices_batch_stride, kv_indices_head_stride, kv_indices_row_stride;
  int64 full_kv_indices_batch_stride, full_kv_indices_head_stride, full_kv_indices_row_stride;
  int64 kv_num_blocks_batch_stride, kv_num_blocks_head_stride, kv_num_blocks_row_stride;
  int64 full_kv_num_blocks_batch_stride, full_kv_num_blocks_head_stride, full_kv_num_blocks_row_stride;
  const int* mask_bits;
  int64 mask_bits_batch_stride, mask_bits_head_stride, mask_bits_row_stride, mask_bits_entry_stride;
  int mask_bits_length;
  int kv_indices_length, full_kv_indices_length, query_blocks, q_len, kv_len;
};
int shuffled[32];
int __ldg(const int* word) { return *word; }
int __shfl_sync(unsigned, int value, int lane) { shuffled[threadIdx.x] = value; return shuffled[lane]; }
"""
# A program of each case.
PROGRAM = """\
namespace %(name)s {
%(constants)s
%(seqlen_info)s
%(pattern)s
// The loads of the queries from `first` on; of a part of them, if it has any work units.
void print_loads(const Params& p, int first, int begin, int units) {
  auto lane = [&] {
    KvBlockIterator one(p, 0, 0, first);
%(direction)s
%(restriction)s
    ++threadIdx.x;
    return one;
  };
  threadIdx.x = 0;
  KvBlockIterator lanes[32] = {%(lanes)s}, &one = lanes[0];
  for (int i = 0; i < one.count * %(step_blocks)s; ++i) {
    int block = 0;
    for (int round = 0; round < 2; ++round)
      for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) block = lanes[threadIdx.x].at(i);
    std::printf("%%d%%s ", block, %(masked)s ? "*" : "");
  }
}
void run() {
  static int lists[2][%(rows)d][%(length)d], counts[2][%(rows)d];
  for (int full = 0; full < 2; ++full)
    for (int row = 0; row < %(rows)d; ++row) {
      counts[full][row] = full ? 3 * row : %(length)d - 7 * row;
      for (int i = 0; i < %(length)d; ++i) lists[full][row][i] = (5 * i + 3 * row + full) %% 12 - 1;
    }
  Params p = {};
  p.kv_indices = lists[0][0], p.full_kv_indices = lists[1][0];
  p.kv_num_blocks = counts[0], p.full_kv_num_blocks = counts[1];
  p.kv_indices_row_stride = p.full_kv_indices_row_stride = %(length)d;
  p.kv_num_blocks_row_stride = p.full_kv_num_blocks_row_stride = 1;
  p.kv_indices_length = p.full_kv_indices_length = %(length)d;
  p.mask_bits_length = %(masks)d;
  p.query_blocks = %(rows)d, p.q_len = %(rows)d * %(block_q)d, p.kv_len = %(kv_len)d;
  for (int first = 0; first < p.q_len + %(behind)s; first += kSubTileRows) {
    print_loads(p, first, 0, 0);
    std::puts("");
    for (int width : std::initializer_list<int>{%(widths)s}) {
      for (int begin = 0; begin < %(length)d; begin += width) {
        print_loads(p, first, begin, width);
        std::printf("| ");
      }
      std::puts("");
    }
  }
}
}  // namespace %(name)s
"""


@dataclass(frozen=True)
class Steps:
    """A pattern's loads for a shape.

    Attributes:
        name: of the case, an identifier.
        shape: one of SHAPES.
        pattern: one of PATTERNS.
        backwards: whether lists are walked through from their end.
    """

    name: str
    shape: tuple[Any, ...]
    pattern: dict[str, Any]
    backwards: bool = False

    @property
    def plan(self) -> Plan:
        arch, block_q, block_kv, m, n, heads = self.shape
        fields = {"op": "attention", "arch": arch, "head_dim": 64, "pack_gqa": heads, "tile": {"m": m, "n": n}}
        options = {"stream_k_tail": False} if self.backwards else {}
        pattern = {**self.pattern, "block": {"q": block_q, "kv": block_kv}}
        return plan_for(find_spec({**fields, **options, "pattern": pattern}))


def named(pattern: dict[str, Any], shape: tuple[Any, ...]) -> str:
    return "_".join(map(str, (pattern["kind"], pattern.get("k", pattern.get("mask", "")), *shape)))


def cases_of(pattern: dict[str, Any], shapes: Sequence[tuple[Any, ...]]) -> list[Steps]:
    return [Steps(named(pattern, shape), shape, pattern) for shape in shapes]


FORWARDS = {named(pattern, ()): cases_of(pattern, SHAPES) for pattern in PATTERNS}
FORWARDS[named(BITS, ())] = cases_of(BITS, (SHAPES[0], SHAPES[6], SHAPES[12]))
BACKWARDS = [
    Steps(f"{named(PATTERNS[0], shape)}_backwards", shape, PATTERNS[0], backwards=True)
    for shape in SHAPES
    if shape[0] == "sm_90a"
]


def program(case: Steps) -> str:
    plan = case.plan
    assert plan.spec.op == "attention"
    pattern = plan.spec.pattern
    return PROGRAM % {
        "name": case.name,
        "step_blocks": max(1, case.shape[4] // case.shape[2]),
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan.constants),
        "seqlen_info": seqlen_info(plan),
        "pattern": render_template(plan, str(plan.flags.pattern_template)),
        "rows": ROWS,
        "behind": beyond(plan),
        "length": LENGTH,
        "masks": MASKS,
        "kv_len": KV_LEN,
        "block_q": case.shape[1],
        "lanes": ", ".join(["lane()"] * 32),
        "masked": "one.masked(i, block)" if pattern.masks_pairs else "false",
        "direction": "    one.backwards = true;" if case.backwards else "",
        "restriction": "    if (units > 0) one.restrict_to(begin, units);" if plan.stream_k else "",
        "widths": ", ".join(map(str, WIDTHS)) if plan.stream_k else "",
    }


def beyond(plan: Plan) -> int:
    """Queries behind the last list: those of a tile of several lists, where the last of them are not there."""
    return sub_tile_rows(plan) if any(param.name == "query_blocks" for param in plan.params) else 0


def expected(
    pattern: dict[str, Any], row: int, block_kv: int, n: int, *, backwards: bool = False, last_key: int = 0
) -> list[str]:
    """The loads of a row's lists; behind the last key for an entry that names no block.

    Loads with masked pairs have a mark: with a causal mask, those behind ``last_key``, which the first query sees.
    """
    steps, pair = max(1, block_kv // n), max(1, n // block_kv)
    key_blocks = -(-KV_LEN // block_kv)
    lists = [[(5 * i + 3 * row + full) % 12 - 1 for i in range(LENGTH)] for full in range(2)]
    if pattern["kind"] == "topk":
        entries = [(entry, "") for entry in lists[0][: pattern.get("k", LENGTH)]]
    else:
        partial = min(LENGTH - 7 * row, MASKS if pattern == BITS else LENGTH)
        entries = [(entry, "*") for entry in lists[0][:partial]] + [(entry, "") for entry in lists[1][: 3 * row]]
    known = [(entry if 0 <= entry < key_blocks else key_blocks, mark) for entry, mark in entries]
    known = known[::-1] if backwards else known
    known += [(key_blocks, "")] * (-len(known) % pair)
    loads = [(entry * steps + step, mark) for entry, mark in known for step in range(steps)]
    if pattern.get("mask") == "causal":
        loads = [(load, mark if (load + 1) * min(n, block_kv) > last_key + 1 else "") for load, mark in loads]
    return [f"{load}{mark}" for load, mark in loads]


def parts(loads: list[str], units: int, width: int) -> list[list[str]]:
    """The loads of each part of a tile of ``units`` work units, ``width`` of them a part."""
    unit = len(loads) // units
    assert len(loads) == unit * units
    return [loads[begin * unit : (begin + width) * unit] for begin in range(0, LENGTH, width)]


def host_program(cases: Sequence[Steps]) -> str:
    """The program of some cases, each of which runs by its number."""
    runs = "\n".join(f"  if (number == {number}) {case.name}::run();" for number, case in enumerate(cases))
    main = f"int main(int, char** arguments) {{\n  const int number = std::atoi(arguments[1]);\n{runs}\n}}\n"
    return "".join([HEAD, *map(program, cases), main])


def lines_of(text: str, cases: Sequence[Steps], folder: Path) -> Iterator[tuple[Steps, list[str]]]:
    """Compile a program; yield each case with the lines it prints."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    (folder / "main.cpp").write_text(text, encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "main.cpp", "-o", "main"], cwd=folder, check=True)
    for number, case in enumerate(cases):
        command = [str(folder / "main"), str(number)]
        yield case, subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("name", FORWARDS)
def test_loads_are_those_of_the_lists(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    text = host_program(FORWARDS[name])
    recorded(text)
    for case, found in lines_of(text, FORWARDS[name], tmp_path):
        check_loads(case, iter(found))


def check_loads(case: Steps, lines: Iterator[str]) -> None:
    plan, (_, block_q, block_kv, _, n, _) = case.plan, case.shape
    sub_tile = sub_tile_rows(plan)
    for first in range(0, ROWS * block_q + beyond(plan), sub_tile):
        row = first // block_q
        last_key = first + KV_LEN - ROWS * block_q
        loads = expected(case.pattern, row, block_kv, n, last_key=last_key) if row < ROWS else []
        assert next(lines).split() == loads, (case.name, first)
        if plan.stream_k is not None:
            units = plan.spec.pattern.stream_k_units(KV_LEN, sub_tile, n, LENGTH)  # type: ignore[union-attr]
            for width in WIDTHS:
                found = [part.split() for part in next(lines).split("|")[:-1]]
                assert found == parts(loads, units, width), (case.name, first, width)
    assert next(lines, None) is None, case.name


def test_lists_are_walked_through_from_their_end(recorded: Callable[..., None], tmp_path: Path) -> None:
    text = host_program(BACKWARDS)
    recorded(text)
    for case, found in lines_of(text, BACKWARDS, tmp_path):
        _, block_q, block_kv, _, n, _ = case.shape
        for row, line in zip(range(ROWS), found[:: max(1, block_q // sub_tile_rows(case.plan))], strict=False):
            assert line.split() == expected(case.pattern, row, block_kv, n, backwards=True), case.name


def sub_tile_rows(plan: Plan) -> int:
    return int(next(constant.value for constant in plan.constants if constant.name == "kSubTileRows"))
