"""What a warpgroup leaves out or masks: the kernel's own lines, run on the host, leave what its queries see."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_values import (
    PROBLEMS_OF_LENGTHS,
    declarations,
    lengths_of,
    numbered,
    problems,
    seqlen_info,
    window_or,
)

from codegen.library import find_spec
from codegen.patterns import PatternBase
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.render import render_plan, render_template
from codegen.spec import AttentionSpec

ROWS = 64  # of a warpgroup
CAUSAL = {"kind": "causal"}
PREFIX = {"kind": "prefix_lm"}
CASES: list[tuple[dict[str, Any], int, int]] = [
    (PREFIX, 192, 80),
    (PREFIX, 256, 64),
    (CAUSAL, 192, 80),
    (CAUSAL, 192, 128),
    (CAUSAL, 256, 64),
    (CAUSAL | {"align": "top_left"}, 192, 96),
    *(({"kind": "sliding_window"}, m, n) for m, n in ((192, 80), (128, 64))),
    *(
        ({"kind": "sliding_window", "left": left, "right": right}, m, n)
        for left, right, m, n in (
            (0, 0, 192, 64),
            (200, 0, 192, 80),
            (100, 37, 128, 64),
            (300, 254, 256, 64),
            (5, 700, 192, 112),
        )
    ),
]
LENGTHS = [
    *[(1, 1), (1, 1000), (17, 50), (128, 128), (129, 127), (192, 193), (256, 256), (300, 300)],
    *[(70, 701), (500, 640), (9, 900), (300, 40), (700, 129), (260, 1)],
]
PROGRAM = """\
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
%(declarations)sstruct { int x; } threadIdx;
constexpr float kMinusInfinity = -1.0f;
%(constants)s
constexpr int kWarpgroupRows = 64;
%(seqlen_info)s
%(pattern)s
%(seen)s
struct WorkTileInfo { int work, count; };
struct Tile { int batch, first_query; };
int begin = 0, number = -1;  // the part of the tile; -1: all of it

KvBlockIterator kv_blocks_of(const Params& p, const Tile& tile) {
  KvBlockIterator blocks(p, tile.batch, 0, tile.first_query);
%(restriction)s
  return blocks;
}

KvBlockIterator kv_blocks_of(const Params& p, int, const Tile& tile) { return kv_blocks_of(p, tile); }

// For each warpgroup a line with the blocks that it works on in all parts of a tile, and their masks, as bits; then one
// for each of its rows: the first key that is left of each block, the last one, and how many.
int main(int words, char** word) {
  const Params p =
      params_of(std::atoi(word[1]), std::atoi(word[2]), std::atoi(word[5]), words > 6 ? std::atoi(word[6]) : 0);
  const int width = std::atoi(word[3]);
  for (int first = std::atoi(word[4]); first < p.q_len; first += %(m)d) {
    const Tile tile{kBatch, first};
    for (int warpgroup = 0; warpgroup < %(m)d / kWarpgroupRows; ++warpgroup) {
      std::string worked, rows[kWarpgroupRows];
      number = -1;
      const int end = width < 0 ? 1 : kv_blocks_of(p, tile).count;
      for (begin = 0; begin < end; begin += abs(width)) {
        number = width;
        KvBlockIterator blocks = kv_blocks_of(p, tile);
        const WorkTileInfo info{0, blocks.count};
        %(lines)s
        for (int i = 0; i < count; ++i) {
          %(block)s
          int masks = 0;
          %(flags)s
          worked += std::to_string(blocks.at(after + i)) + "/" + std::to_string(masks) + " ";
          if (block != blocks.at(after + i)) worked += "other ";
          int first[kWarpgroupRows], last[kWarpgroupRows], left[kWarpgroupRows] = {};
          for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) {
            const int warp = threadIdx.x / 32, lane = threadIdx.x %% 32;
            const int first_row = warpgroup * kWarpgroupRows + warp * 16 + lane / 4;
            float s[kTileN / 2] = {};
            %(masks)s
            for (int j = 0; j < kTileN / 2; ++j) {
              if (s[j] < 0) continue;
              const int row = warp * 16 + lane / 4 + j / 2 %% 2 * 8;
              const int key = block * kTileN + j / 4 * 8 + lane %% 4 * 2 + j %% 2;
              first[row] = left[row] ? min(first[row], key) : key;
              last[row] = left[row] ? max(last[row], key) : key;
              ++left[row];
            }
          }
          for (int row = 0; row < kWarpgroupRows; ++row) {
            if (left[row] == 0) continue;
            for (int number : {first[row], last[row], left[row]}) rows[row] += std::to_string(number) + " ";
          }
        }
        if (after + count + before != info.count || count < 0) worked += "lost ";
      }
      std::puts(worked.c_str());
      for (const std::string& row : rows) std::puts(row.c_str());
    }
  }
  return words < 6;
}
"""


def plan_of(pattern: dict[str, Any], m: int, n: int, schedule: str = "cooperative", **more: Any) -> Plan:
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": pattern, "schedule": schedule, **more}
    return plan_for(find_spec({**fields, "stages": 2, "tile": {"m": m, "n": n}}))


def pattern_of(plan: Plan) -> PatternBase:
    assert isinstance(plan.spec, AttentionSpec)
    return plan.spec.pattern


def host_program(plan: Plan) -> str:
    source = render_plan(plan)
    pattern = render_template(plan, str(plan.flags.pattern_template)).strip()
    lines = re.search(r"const int newest = .*?const int newest_visible = [^;]*;", source, re.DOTALL)
    seen = re.search(r"struct VisibleRange \{.*?(?=// Online softmax)", source, re.DOTALL)
    masked = re.search(r"(const int block = newest_visible - i;)((?:\s*if \(block [^}]*\})+)", source)
    assert pattern in source and lines and seen and masked
    conditions = re.findall(r"if \((.*?)\) {", masked[2])
    # The first step, which is not in the loop, is masked likewise.
    first = re.sub(r"\bblock\b", "newest_visible", masked[2]).replace("\n  ", "\n")
    assert f"k_state.advance();{first}\n      take_step_max(" in source
    return PROGRAM % {
        "declarations": declarations([pattern_of(plan)], kv_lengths=plan.spec.kv_lengths),  # type: ignore[union-attr]
        "seqlen_info": seqlen_info(plan),
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan.constants),
        "pattern": pattern,
        "restriction": "  if (number >= 0) blocks.restrict_to(begin, number);" if plan.stream_k else "",
        "seen": seen[0].replace("#pragma unroll\n", ""),
        "lines": lines[0],
        "block": masked[1],
        "masks": masked[2],
        "flags": " ".join(f"masks |= ({asked}) << {bit};" for bit, asked in enumerate(conditions)),
        "m": plan.spec.tile.m,
    }


def build(text: str, folder: Path) -> Path:
    (folder / "main.cpp").write_text(text, encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-O1", "main.cpp", "-o", "main"], cwd=folder, check=True)
    return folder / "main"


def runs_in(keys: list[int], n: int) -> list[int]:
    """Return the first key, the last one and the number of keys in each block, last block first."""
    runs = []
    for block in sorted({key // n for key in keys}, reverse=True):
        inside = [key for key in keys if key // n == block]
        runs += [inside[0], inside[-1], len(inside)]
    return runs


@pytest.mark.parametrize(("pattern", "m", "n"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_a_warpgroup_works_on_the_pairs_that_its_queries_see(
    pattern: dict[str, Any], m: int, n: int, recorded: Callable[..., None], tmp_path: Path
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    plan = plan_of(pattern, m, n)
    text = host_program(plan)
    recorded(text)
    program = build(text, tmp_path)
    for q_len, kv_len, value in problems(pattern_of(plan), LENGTHS):
        definition = numbered(pattern_of(plan), value)
        # Where surplus rows come first, whole warpgroups may lie before query 0.
        before = -(-q_len // m) * m - q_len
        start = -(before // ROWS * ROWS) if definition.surplus_first else 0
        values = definition.values_of([value])
        visible = [
            [key for key in range(kv_len) if definition.visible(i, key, q_len, kv_len, values)] for i in range(q_len)
        ]
        for width in (-1, 2) if plan.stream_k else (-1,):
            words = [str(word) for word in (q_len, kv_len, width, start, value)]
            output = subprocess.run([program, *words], check=True, capture_output=True, text=True).stdout
            lines = iter(output.splitlines())
            for first in range(start, q_len, m):
                for query in range(first, first + m, ROWS):
                    asked = dict(map(int, word.split("/")) for word in next(lines).split())
                    queries = range(max(query, 0), min(query + ROWS, q_len))
                    rows = [[int(word) for word in next(lines).split()] for _ in range(ROWS)]
                    seen = {i: visible[i] for i in queries}
                    where = f"q_len {q_len}, kv_len {kv_len}, value {value}, width {width}, queries from {query}"
                    assert set(asked) == {key // n for keys in seen.values() for key in keys}, where
                    for i, keys in seen.items():
                        assert rows[i - query] == runs_in(keys, n), f"{where}, query {i}"
                    for block, masks in asked.items() if all(seen.values()) else ():
                        behind = any(keys[-1] < (block + 1) * n - 1 for keys in seen.values())
                        before = any(keys[0] > block * n for keys in seen.values())
                        assert masks == behind + 2 * before, f"{where}, block {block}"


@pytest.mark.parametrize(
    ("pattern", "m", "n"),
    [
        ({"kind": "prefix_lm"}, 192, 80),
        ({"kind": "causal"}, 192, 80),
        ({"kind": "causal", "align": "top_left"}, 256, 64),
        ({"kind": "sliding_window", "left": 100, "right": 37}, 128, 64),
        ({"kind": "sliding_window", "left": 200, "right": 0}, 192, 80),
        ({"kind": "sliding_window"}, 192, 80),
    ],
    ids=str,
)
def test_a_warpgroup_works_on_the_pairs_before_the_length(
    pattern: dict[str, Any], m: int, n: int, recorded: Callable[..., None], tmp_path: Path
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    plan = plan_of(pattern, m, n, kv_lengths=True)
    text = host_program(plan)
    recorded(text)
    program = build(text, tmp_path)
    for q_len, kv_len in PROBLEMS_OF_LENGTHS:
        prefix = window_or(kv_len // 3, pattern_of(plan))
        definition = numbered(pattern_of(plan), prefix)
        values = definition.values_of([prefix])
        start = -((-(-q_len // m) * m - q_len) // ROWS * ROWS) if definition.surplus_first else 0
        visible = [
            [key for key in range(kv_len) if definition.visible(i, key, q_len, kv_len, values)] for i in range(q_len)
        ]
        for length in lengths_of(kv_len):
            words = map(str, (program, q_len, kv_len, -1, start, prefix, length))
            lines = iter(subprocess.run([*words], check=True, capture_output=True, text=True).stdout.splitlines())
            end = max(0, min(length, kv_len))
            for first in range(start, q_len, m):
                for query in range(first, first + m, ROWS):
                    asked = {int(word.split("/")[0]) for word in next(lines).split()}
                    rows = [[int(word) for word in next(lines).split()] for _ in range(ROWS)]
                    where = f"q_len {q_len}, kv_len {kv_len}, length {length}, queries from {query}"
                    assert all(block * n < end for block in asked), where
                    for i in range(max(query, 0), min(query + ROWS, q_len)):
                        keys = [key for key in visible[i] if key < end]
                        assert rows[i - query] == runs_in(keys, n), f"{where}, query {i}"


@pytest.mark.parametrize(
    ("pattern", "m", "n", "schedule"),
    [
        (CAUSAL, 192, 80, "ping_pong"),  # all warpgroups take part in each turn
        (CAUSAL, 128, 128, "cooperative"),  # no step lies after one warpgroup and before the other
        ({"kind": "dense"}, 192, 80, "cooperative"),
        ({"kind": "sink_window", "sink": 4, "left": 200, "right": 0}, 192, 80, "cooperative"),
    ],
)
def test_elsewhere_all_warpgroups_work_on_all_steps(pattern: dict[str, Any], m: int, n: int, schedule: str) -> None:
    assert "skip_steps(" not in render_plan(plan_of(pattern, m, n, schedule))


def test_with_parts_of_keys_all_warpgroups_work_on_all_steps() -> None:
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": CAUSAL, "tile": {"m": 128, "n": 64}}
    assert plan_for(find_spec(fields | {"schedule": "cooperative"})).flags.skip_masked
    assert not plan_for(find_spec(fields | {"kv_splits": 2})).flags.skip_masked
