"""Steps that a warpgroup leaves out: the kernel's own lines, run on the host, leave out what its queries do not see."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from codegen.library import find_spec
from codegen.plan import Plan
from codegen.plans import plan_for
from codegen.render import environment, render_plan
from codegen.spec import AttentionSpec

ROWS = 64  # of a warpgroup
CAUSAL = {"kind": "causal"}
CASES: list[tuple[dict[str, Any], int, int]] = [
    (CAUSAL, 192, 80),
    (CAUSAL, 192, 128),
    (CAUSAL, 256, 64),
    (CAUSAL | {"align": "top_left"}, 192, 96),
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
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
struct Params { int q_len, kv_len; };
%(constants)s
constexpr int kWarpgroupRows = 64;
%(pattern)s
struct Entry { int piece, count; };
struct Tile { int first_query; };
int begin = 0, number = -1;  // the part of the tile; -1: all of it

KeyBlocks key_blocks_of(const Params& p, int, const Tile& tile, int) {
  KeyBlocks blocks(p, 0, 0, tile.first_query);
%(restriction)s
  return blocks;
}

// One line with the blocks that a warpgroup works on in all parts of a tile.
int main(int words, char** word) {
  const Params p{std::atoi(word[1]), std::atoi(word[2])};
  const int width = std::atoi(word[3]);
  for (int first = std::atoi(word[4]); first < p.q_len; first += %(m)d) {
    const Tile tile{first};
    for (int warpgroup = 0; warpgroup < %(m)d / kWarpgroupRows; ++warpgroup) {
      number = -1;
      const int end = width < 0 ? 1 : key_blocks_of(p, 0, tile, 0).count;
      for (begin = 0; begin < end; begin += abs(width)) {
        number = width;
        KeyBlocks blocks = key_blocks_of(p, 0, tile, 0);
        const Entry entry{0, blocks.count};
        const int stream = 0;
        %(lines)s
        for (int i = behind; i < behind + count; ++i) std::printf("%%d ", blocks.at(i));
        if (behind + count + before != entry.count || count < 0) std::printf("lost ");
      }
      std::puts("");
    }
  }
  return words != 5;
}
"""


def plan_of(pattern: dict[str, Any], m: int, n: int, schedule: str = "cooperative") -> Plan:
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": pattern, "schedule": schedule}
    return plan_for(find_spec({**fields, "stages": 2, "tile": {"m": m, "n": n}}))


def build(plan: Plan, folder: Path) -> Path:
    source = render_plan(plan)
    template = environment().get_template(str(plan.values["pattern_template"]))
    pattern = template.render(plan=plan, spec=plan.spec, dtype=plan.dtype, **plan.values).strip()
    found = re.search(r"const int newest = .*?const int count = [^;]*;", source, re.DOTALL)
    assert pattern in source and found
    text = PROGRAM % {
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan.constants),
        "pattern": pattern,
        "restriction": "  if (number >= 0) blocks.restrict_to(begin, number);" if plan.split else "",
        "lines": found[0],
        "m": plan.spec.tile.m,
    }
    (folder / "main.cpp").write_text(text, encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-O1", "main.cpp", "-o", "main"], cwd=folder, check=True)
    return folder / "main"


@pytest.mark.parametrize(("pattern", "m", "n"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_a_warpgroup_works_on_the_blocks_that_its_queries_see(
    pattern: dict[str, Any], m: int, n: int, tmp_path: Path
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    plan = plan_of(pattern, m, n)
    assert isinstance(plan.spec, AttentionSpec)
    program = build(plan, tmp_path)
    for q_len, kv_len in LENGTHS:
        # In causal attention whole warpgroups may lie before query 0.
        before = -(-q_len // m) * m - q_len
        start = -(before // ROWS * ROWS) if pattern["kind"] == "causal" else 0
        for width in (-1, 2) if plan.split else (-1,):
            words = [str(word) for word in (q_len, kv_len, width, start)]
            output = subprocess.run([program, *words], check=True, capture_output=True, text=True).stdout
            lines = iter(output.splitlines())
            for first in range(start, q_len, m):
                for query in range(first, first + m, ROWS):
                    worked = [int(word) for word in next(lines).split()]
                    queries = range(max(query, 0), min(query + ROWS, q_len))
                    visible = {
                        key // n
                        for i in queries
                        for key in range(kv_len)
                        if plan.spec.pattern.visible(i, key, q_len, kv_len)
                    }
                    where = f"q_len {q_len}, kv_len {kv_len}, width {width}, queries from {query}"
                    assert len(worked) == len(set(worked)), where
                    # Queries that there are not may see what they like.
                    assert set(worked) == visible if queries else True, where


@pytest.mark.parametrize(
    ("pattern", "m", "n", "schedule"),
    [
        (CAUSAL, 192, 80, "ping_pong"),  # all warpgroups take part in each turn
        (CAUSAL, 128, 128, "cooperative"),  # no step lies behind one warpgroup and before the other
        ({"kind": "dense"}, 192, 80, "cooperative"),
        ({"kind": "sink_window", "sink": 4, "left": 200, "right": 0}, 192, 80, "cooperative"),
    ],
)
def test_elsewhere_all_warpgroups_work_on_all_steps(pattern: dict[str, Any], m: int, n: int, schedule: str) -> None:
    assert "hand_back" not in render_plan(plan_of(pattern, m, n, schedule))
